//! What a handoff has resident at its peak, and what of it grows with the prompt. By design that is the residual stream of all
//! positions and one layer's keys and values, both in f32; of the decoder's cache, which is as large as all layers, there is no
//! copy on either route.
//!
//! The table of a real model is a measurement, run by hand:
//!
//! ```text
//! NPU_PREFILL_TEST_MODEL=model.gguf cargo test --release -p npu-prefill --test peak_memory -- --ignored --nocapture
//! ```

mod common;
#[path = "../kvlayout/tests/memory/mod.rs"]
mod memory;

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Ran, Scene, program};
use gguf::Gguf;
use kvlayout::{CacheType, Header, KvSpec, ShareLayout, ShareParams};
use prefill::{CacheParams, Model};

/// A run, and the most it had resident while somebody looked, by where the pages come from.
struct Peak {
    receipt: serde_json::Value,
    /// Memory of its own.
    anon: u64,
    /// The mapped model, and the program itself.
    file: u64,
    /// The decoder's memory.
    shmem: u64,
}

impl Peak {
    /// As the receipt says.
    fn all(&self) -> u64 {
        self.receipt["peak_rss_bytes"].as_u64().unwrap()
    }
}

fn watched(command: &mut Command) -> Peak {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let path = format!("/proc/{}/status", child.id());
    let mut peaks = [0; 3];
    while child.try_wait().unwrap().is_none() {
        let status = std::fs::read_to_string(&path).unwrap_or_default();
        for (peak, name) in peaks.iter_mut().zip(["RssAnon:", "RssFile:", "RssShmem:"]) {
            let line = status.lines().find_map(|l| l.strip_prefix(name));
            let now = line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
            *peak = (*peak).max(now.unwrap_or(0) * 1024);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let ran = Ran::from(child.wait_with_output().unwrap());
    let [anon, file, shmem] = peaks;
    Peak { receipt: ran.receipt(), anon, file, shmem }
}

/// Both routes of one prompt.
fn both(dir: &Path, model: &Path, spec: &KvSpec, ids: &[u32], more: &[&str]) -> [(&'static str, Peak); 2] {
    let tokens = dir.join("ids");
    std::fs::write(&tokens, ids.iter().map(|id| format!("{id}\n")).collect::<String>()).unwrap();
    let command = || {
        let mut c = program();
        c.arg("--tokens").arg(&tokens).arg("--model").arg(model).args(more);
        c
    };
    let layout = ShareLayout::compute(spec, ids.len() as u32 + 1).unwrap();
    let header = dir.join("header.json");
    std::fs::write(&header, Header::new(None, ShareParams::default(), &layout).write()).unwrap();
    let memory = |r: &kvlayout::ShareRegion| rustix::io::dup(memory::make(memory::Kind::Memfd, r.size)).unwrap();
    let fds: Vec<OwnedFd> = layout.regions().iter().map(memory).collect();
    let numbers: Vec<String> = fds.iter().map(|fd| fd.as_raw_fd().to_string()).collect();
    let shared = watched(command().arg("--layout").arg(&header).arg("--fds").arg(numbers.join(",")));
    let file = watched(command().arg("--out").arg(dir.join("state.bin")).args(["--state-version", "3"]));
    [("shared", shared), ("file", file)]
}

/// Bytes per token that are resident by design: of the residual stream, of one layer's keys and values, and of the rows of all
/// layers where they are mapped.
fn by_design(model: &Model<'_>, spec: &KvSpec) -> [u64; 3] {
    let layers = || spec.sections.iter().flat_map(|s| &s.layers);
    let values = |l: &kvlayout::LayerKv| u64::from(l.n_embd_k + l.n_embd_v);
    let row = |ty: CacheType, width: u32| ty.row_bytes(width.into()).unwrap();
    let rows = layers().map(|l| row(spec.type_k, l.n_embd_k) + row(spec.type_v, l.n_embd_v)).sum();
    [4 * model.spec().n_embd as u64, 4 * layers().map(values).max().unwrap(), rows]
}

fn f16_cache(model: &Model<'_>) -> KvSpec {
    let ty = CacheType::F16;
    let cache = CacheParams {
        type_k: ty,
        type_v: ty,
        v_trans: false,
        swa_full: true,
        n_stream: 1,
        n_ctx: None,
        attn_rot: true,
    };
    model.kv_spec(&cache).unwrap()
}

#[test]
fn only_the_residual_stream_and_one_layer_grow_with_the_prompt() {
    // 24 layers, of which a copy would be three times as large as what may grow.
    let scene = Scene::with(1, 24);
    let gguf = Gguf::open(&scene.model).unwrap();
    let model = Model::load(&gguf).unwrap();
    let spec = f16_cache(&model);
    let [stream, layer, rows] = by_design(&model, &spec);
    assert_eq!([stream, layer, rows], [4 * 64, 4 * 64, 24 * 128]);
    let (short, long) = (200, 2000);
    let peaks = [short, long].map(|n| {
        let ids: Vec<u32> = (0..n).map(|i| i * 7 % common::N_VOCAB).collect();
        both(scene.dir.path(), &scene.model, &spec, &ids, &["-t", "1", "--chunk", "64"])
    });
    let [before, after] = peaks;
    for ((route, before), (_, after)) in before.iter().zip(&after) {
        let mapped = if *route == "shared" { rows } else { 0 };
        let allowed = u64::from(long - short) * (stream + layer + mapped) + (2 << 20);
        let grown = after.all().saturating_sub(before.all());
        assert!(grown <= allowed, "{route} route: {grown} bytes more for {} tokens, not {allowed}", long - short);
    }
}

#[test]
#[ignore = "a measurement, of a model that has to be named"]
fn peak_memory() {
    let path = std::env::var_os("NPU_PREFILL_TEST_MODEL").expect("NPU_PREFILL_TEST_MODEL names a model");
    let gguf = Gguf::open(&path).unwrap();
    let model = Model::load(&gguf).unwrap();
    let spec = f16_cache(&model);
    let [stream, layer, rows] = by_design(&model, &spec);
    let dir = tempfile::tempdir().unwrap();
    println!(
        "tokens,route,chunk,peak_rss_bytes,of_files_bytes,of_decoder_bytes,own_bytes,residual_stream_bytes,one_layer_kv_bytes,\
         own_without_these_bytes,rows_bytes"
    );
    for n in [512u32, 8192] {
        let ids: Vec<u32> = (0..n).map(|i| 3 + i * 7919 % (model.n_vocab() - 6)).collect();
        for (route, p) in both(dir.path(), path.as_ref(), &spec, &ids, &["-t", "2"]) {
            let (stream, layer, rows) = (stream * u64::from(n), layer * u64::from(n), rows * u64::from(n));
            let rest = p.anon as i64 - (stream + layer) as i64;
            let (all, chunk) = (p.all(), &p.receipt["chunk"]);
            println!("{n},{route},{chunk},{all},{},{},{},{stream},{layer},{rest},{rows}", p.file, p.shmem, p.anon);
        }
    }
}
