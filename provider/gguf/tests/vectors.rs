//! Against the `gguf` Python package: what it makes, says and decodes is in `vectors/`, by `vectors/make.py`.

use std::path::PathBuf;

use gguf::{GgmlType, Gguf, Value, ValueType, dequant, write::Writer};

fn vector(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/vectors").join(name)
}

fn text(name: &str) -> String {
    std::fs::read_to_string(vector(name)).unwrap()
}

fn unhex(s: &str) -> Vec<u8> {
    assert!(s.len().is_multiple_of(2));
    (0..s.len() / 2).map(|i| u8::from_str_radix(&s[2 * i..2 * i + 2], 16).unwrap()).collect()
}

fn hex(b: &[u8]) -> String {
    b.iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn types_are_those_of_the_package() {
    let mut known = 0;
    for line in text("types.txt").lines() {
        let f: Vec<&str> = line.split(' ').collect();
        let t = GgmlType::from_id(f[0].parse().unwrap()).unwrap();
        assert_eq!(t.name(), f[1]);
        assert!(!t.is_removed());
        // The package still has Q8_1 with two f32; ggml has made them f16. The type is never in files.
        let bytes = if t == GgmlType::Q8_1 { 40 - 4 } else { f[3].parse().unwrap() };
        assert_eq!((t.block_elems(), t.block_bytes()), (f[2].parse().unwrap(), bytes), "{t}");
        known += 1;
    }
    // All but the removed ones and Q2_0, which is younger than the package.
    let live = GgmlType::ALL.iter().filter(|t| !t.is_removed() && **t != GgmlType::Q2_0).count();
    assert_eq!(known, live);
}

#[test]
fn dequantised_values_are_equal_to_the_bit() {
    let mut seen = Vec::new();
    for line in text("dequant.txt").lines() {
        let f: Vec<&str> = line.split(' ').collect();
        let ty: GgmlType = f[0].parse().unwrap();
        let (blocks, want) = (unhex(f[1]), unhex(f[2]));
        let mut got = vec![f32::NAN; want.len() / 4];
        dequant::dequantize(ty, &blocks, &mut got).unwrap();
        for (i, (got, want)) in got.iter().zip(want.as_chunks::<4>().0).enumerate() {
            let want = f32::from_le_bytes(*want);
            assert_eq!(got.to_bits(), want.to_bits(), "{ty} element {i}: {got} for {want}");
        }
        seen.push(ty);
    }
    seen.sort();
    // The package does not have these: `low_bit` has blocks by hand, and servers are the witnesses.
    let mut all = dequant::SUPPORTED.to_vec();
    all.retain(|t| !matches!(t, GgmlType::Q1_0 | GgmlType::Q2_0));
    all.sort();
    assert_eq!(seen, all);
}

fn numpy_name(t: ValueType) -> &'static str {
    match t {
        ValueType::U8 => "uint8",
        ValueType::I8 => "int8",
        ValueType::U16 => "uint16",
        ValueType::I16 => "int16",
        ValueType::U32 => "uint32",
        ValueType::I32 => "int32",
        ValueType::U64 => "uint64",
        ValueType::I64 => "int64",
        ValueType::F32 => "float32",
        ValueType::F64 => "float64",
        ValueType::Bool => "bool",
        ValueType::Str => "string",
        ValueType::Array => "array",
    }
}

fn shown(v: Value<'_>) -> String {
    match v {
        Value::Bool(b) => u8::from(b).to_string(),
        Value::F32(v) => hex(&f64::from(v).to_le_bytes()),
        Value::F64(v) => hex(&v.to_le_bytes()),
        Value::Str(s) => hex(s.as_bytes()),
        Value::Array(a) => a.iter().map(shown).collect::<Vec<_>>().join(","),
        integer => integer.as_integer().unwrap().to_string(),
    }
}

#[test]
fn a_file_of_the_package_reads_the_same_here_and_there() {
    let model = Gguf::open(vector("whole.gguf")).unwrap();
    assert_eq!((model.version(), model.alignment()), (3, 64));
    let mut got = String::new();
    for (key, value) in model.keys() {
        let ty = match value {
            Value::Array(a) => format!("array:{}", numpy_name(a.elem_type())),
            v => numpy_name(v.ty()).to_owned(),
        };
        got += &format!("key {key} {ty} {}\n", shown(value));
    }
    for t in model.tensors() {
        let shape: Vec<String> = t.shape().iter().map(u64::to_string).collect();
        got += &format!("tensor {} {} {} {} {}\n", t.name, t.ty, shape.join("x"), t.offset, t.data.len());
        assert_eq!(t.data.len() as u64, t.n_rows() * t.row_bytes());
        assert_eq!(t.row(t.n_rows() - 1).unwrap().len() as u64, t.row_bytes());
        assert!(t.row(t.n_rows()).is_none());
    }
    assert_eq!(got, text("whole.txt"));

    let half = model.need_tensor("half.weight").unwrap();
    assert_eq!(half.to_f32().unwrap(), (0..24).map(|i| i as f32).collect::<Vec<_>>());
    assert!(model.need_tensor("ids").unwrap().to_f32().unwrap_err().to_string().contains("I32"));
}

/// The writer's file is the package's, byte for byte.
#[test]
fn the_writer_writes_what_the_package_writes() {
    let want = std::fs::read(vector("whole.gguf")).unwrap();
    let model = Gguf::from_bytes("whole", want.clone()).unwrap();
    let mut w = Writer::new("llama");
    w.alignment(64).unwrap();
    w.u8("t.u8", u8::MAX).i8("t.i8", i8::MIN).u16("t.u16", u16::MAX).i16("t.i16", i16::MIN);
    w.u32("t.u32", u32::MAX).i32("t.i32", i32::MIN).u64("t.u64", u64::MAX).i64("t.i64", i64::MIN);
    w.f32("t.f32", 0.1).f64("t.f64", 0.1).bool("t.true", true).bool("t.false", false).str("t.str", "grüße, 世界");
    w.array_str("a.str", &["x", "", "▁the", "\n"]).array_bool("a.bool", &[true, false, true]);
    w.array_u8("a.u8", &[0, 1, 255]).array_i8("a.i8", &[-128, 127]).array_u16("a.u16", &[0, 65535]);
    w.array_i16("a.i16", &[-32768, 32767]).array_u32("a.u32", &[0, u32::MAX]).array_i32("a.i32", &[-1, 0, 1]);
    w.array_u64("a.u64", &[u64::MAX]).array_i64("a.i64", &[i64::MIN, 1]).array_f32("a.f32", &[0.5, -1.25, 3.0]);
    w.array_f64("a.f64", &[0.5, -1.25]);
    for t in model.tensors() {
        w.tensor(t.name, t.ty, t.shape(), t.data.to_vec()).unwrap();
    }
    assert_eq!(w.finish(), want);
}

#[test]
fn a_split_model_of_the_package() {
    for given in 1..=3 {
        let model = Gguf::open(vector(&format!("split-{given:05}-of-00003.gguf"))).unwrap();
        assert_eq!(model.str("general.name").unwrap(), Some("in three files"));
        let tensors: Vec<(String, usize, f32)> =
            model.tensors().map(|t| (t.name.to_owned(), t.shard, t.to_f32().unwrap()[5])).collect();
        let want: Vec<_> = (0..5).map(|i| (format!("blk.{i}.weight"), i / 2, i as f32)).collect();
        assert_eq!(tensors, want);
        assert_eq!(model.paths().len(), 3);
        assert!(model.path().ends_with("split-00001-of-00003.gguf"));
    }
}
