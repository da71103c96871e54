//! Writes first inputs for the targets into `corpus/`: small headers and models, and the states that real servers saved in
//! `kvlayout/tests/saved`. (`layout` needs none.)

use gguf::{GgmlType, write::Writer};
use kvlayout::{Header, ShareLayout, ShareParams};
use npu_prefill_fuzz::models;
use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let put = |target: &str, name: &str, bytes: &[u8]| {
        let dir = corpus.join(target);
        std::fs::create_dir_all(&dir)?;
        std::fs::write(dir.join(name), bytes)
    };

    for (i, spec) in models().iter().enumerate() {
        for n_ctx in [1000, 16384] {
            let layout = ShareLayout::compute(spec, n_ctx)?;
            let params = ShareParams {
                n_ctx: Some(n_ctx),
                n_batch: Some(2048),
                n_ubatch: Some(512),
                flash_attn: Some(true),
                type_k: Some(spec.type_k),
                type_v: Some(spec.type_v),
            };
            let plain = Header::new(Some(7), params, &layout);
            let mut bare = Header::new(None, ShareParams::default(), &layout);
            let listed = if i == 3 { plain.clone() } else { plain.clone().with_tensors(&layout) };
            for choice in 0..4u8 {
                let first = choice << 4 | i as u8;
                let name = |kind: &str| format!("{kind}-{i}-{n_ctx}-{choice}");
                put("header", &name("plain"), &[&[first], plain.write().as_bytes()].concat())?;
                put("header", &name("listed"), &[&[first], listed.write().as_bytes()].concat())?;
            }
            put("header", &format!("bare-{i}-{n_ctx}"), &[&[i as u8], bare.write().as_bytes()].concat())?;
            bare.regions.iter_mut().for_each(|r| r.offset = 4096);
            let text = bare.write();
            let counted = [&[i as u8][..], &(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
            put("header", &format!("counted-{i}-{n_ctx}"), &counted)?;
        }
    }
    let other =
        br#"{"n_ctx":"0x2000","flash_attn":"on","type_k":1,"type_v":"F16","tensors":null,"more":{"x":[-1.5,null]},
        "regions":[{"size":"939524096","layout":"ba98b0368cca6a2b","fd":3}]}"#;
    put("header", "other-spellings", &[&[3], &other[..]].concat())?;

    for file in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvlayout/tests/saved"))? {
        let path = file?.path();
        if path.extension().is_some_and(|e| e == "bin") {
            put("state", &path.file_name().unwrap_or_default().to_string_lossy(), &std::fs::read(&path)?)?;
        }
    }

    let mut w = Writer::new("llama");
    put("gguf", "keys-none", &w.finish())?;
    w.u8("u8", 1).i8("i8", -1).u16("u16", 2).i16("i16", -2).u32("u32", 3).i32("i32", -3).u64("u64", 4);
    w.i64("i64", -4).f32("f32", 0.5).f64("f64", 0.25).bool("bool", true).str("str", "text");
    w.array_str("a.str", &["a", "", "bc"]).array_i32("a.i32", &[1, -1]).array_bool("a.bool", &[true]);
    w.array_f32("a.f32", &[1.0, 2.0]).array_u64("a.u64", &[1]);
    put("gguf", "keys", &w.finish())?;
    w.alignment(8)?;
    w.tensor_f32("a.weight", &[4, 2], &[0.5; 8])?;
    w.tensor("b.weight", GgmlType::Q4_1, &[64, 1, 1], vec![3; 40])?;
    put("gguf", "tensors", &w.finish())?;
    put("gguf", "version-2", &w.version(2).finish())?;
    // One tensor of every type that there is.
    for id in 0..64 {
        let Some(ty) = GgmlType::from_id(id).filter(|ty| !ty.is_removed()) else { continue };
        let mut w = Writer::empty();
        let bytes = vec![0x31; ty.block_bytes() as usize];
        w.tensor("t", ty, &[ty.block_elems()], bytes)?;
        put("gguf", &format!("type-{id}"), &w.finish())?;
    }
    Ok(())
}
