//! What the routes cost: the same prompts by the file route, by the shared route, and as a bare copy of the same bytes.
//!
//! Numbers are medians of interleaved runs, so that a machine which slows down does so for all. Nothing is judged here.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use gguf::Gguf;
use kvlayout::{CacheType, State};
use serde_json::Value;

use crate::client::Client;
use crate::decoder::{Decoder, Kind, Options};
use crate::fixtures::Rng;
use crate::report;
use crate::run::TempDir;
use crate::serve::{Outcome, Request, Serve};
use crate::server::{Build, Server, ServerOptions};
use crate::shape::{CacheOptions, Shape};

/// What is measured.
#[derive(Debug, Clone)]
pub struct Routes {
    /// The provider.
    pub provider: PathBuf,
    /// The model.
    pub model: PathBuf,
    /// A server that restores the files; `None` leaves that out.
    pub build: Option<Build>,
    /// Lengths of prompts.
    pub tokens: Vec<usize>,
    /// Runs of each.
    pub runs: usize,
    /// Threads of provider and server.
    pub threads: u32,
    /// What the decoder's memory is made of.
    pub kind: Kind,
    /// A directory for files.
    pub root: PathBuf,
}

/// Milliseconds of one length, medians.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Row {
    /// Tokens handed over.
    pub tokens: usize,
    /// Bytes of their rows.
    pub bytes: u64,
    /// The file route.
    pub file: Times,
    /// The server's restore of the file.
    pub restore_ms: Option<f64>,
    /// The shared route.
    pub shared: Times,
    /// The bytes copied from ordinary memory into the decoder's, row block by row block.
    pub memcpy_ms: f64,
}

/// Bytes that drive everything else out of a core's caches.
const CACHES: usize = 64 << 20;

/// One route's.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize)]
pub struct Times {
    /// From the start of the provider to its end.
    pub whole_ms: f64,
    /// The provider's prefill, writing included.
    pub prefill_ms: f64,
    /// Its converting and writing.
    pub write_ms: f64,
}

impl Row {
    /// How fast the scatter into shared memory is, as a share of the bare copy's speed.
    pub fn share_of_memcpy(&self) -> f64 {
        self.memcpy_ms / self.shared.write_ms
    }
}

/// Measures.
///
/// # Errors
/// When a handoff does not work, by either route.
pub fn measure(r: &Routes, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>> {
    ensure!(r.runs > 0, "no runs");
    let shape = Shape::of(&Gguf::open(&r.model)?)?;
    let longest = r.tokens.iter().max().copied().context("no lengths of prompts")?;
    ensure!(r.tokens.iter().all(|&n| n > 0), "a prompt of no tokens");
    // A multiple of 256, with room for the token after.
    let n_ctx = u32::try_from(longest + 1)?.checked_next_multiple_of(256).context("too many tokens")?;
    let cache =
        CacheOptions { type_k: CacheType::F16, type_v: CacheType::F16, flash_attn: true, swa_full: true, n_stream: 1 };
    let spec = shape.kv_spec(&cache);
    let dir = TempDir::new(&r.root)?;
    let slots = dir.0.join("slots");
    fs::create_dir_all(&slots).with_context(|| format!("creating {}", slots.display()))?;
    let config = dir.0.join("config");
    fs::write(&config, "").with_context(|| format!("writing {}", config.display()))?;

    let mut server = None;
    let mut version = kvlayout::StateVersion::V3;
    if let Some(build) = &r.build {
        let mut options = ServerOptions::new(&r.model, &slots);
        (options.n_ctx, options.threads, options.swa_full) = (n_ctx, r.threads, true);
        let started = Server::start(build, &options, &dir.0.join("server.log"))?;
        started.client.prefill(&[1], 0)?;
        started.client.save(0, "probe.bin")?;
        version = State::parse_any(&fs::read(slots.join("probe.bin"))?)?.version;
        server = Some(started);
    }

    let mut serve = Serve::new(&r.provider);
    serve.options = vec!["--config".into(), config.into(), "-t".into(), r.threads.to_string().into()];
    serve.file_options =
        ["--state-version", &version.to_string(), "-c", &n_ctx.to_string(), "--swa-full"].map(Into::into).into();
    let options = Options { kind: r.kind, ..Options::new(spec, n_ctx) };
    let mut decoder = Decoder::new(options)?;
    let memory = decoder.memory();
    // A decoder has touched all of its memory before anybody else gets it.
    memory.fill(0)?;

    let mut rows = Vec::new();
    for &n in &r.tokens {
        let mut rng = Rng::new(&format!("routes {n}"));
        // Neither the first ids, which are special, nor what a vocabulary may lack at its end.
        let tokens: Vec<i32> = (0..n).map(|_| (3 + rng.below(shape.n_vocab.saturating_sub(6).max(1))) as i32).collect();
        let request = Request { model: &r.model, tokens: &tokens };
        let (mut file, mut shared, mut restore, mut copies) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let out = slots.join("prompt.bin");
        let mut bytes = 0;
        for i in 0..r.runs {
            progress(&format!("{n} tokens, run {} of {}", i + 1, r.runs));
            let by_file = serve.file_route(&request, &out).context("the file route")?;
            file.push(times(by_file.receipt.as_ref(), by_file.provider)?);
            if let Some(server) = &mut server {
                let ms = restored(&server.client, n);
                restore.push(server.explain(ms)?);
            }
            match serve.hand_over(&mut decoder, &request, &mut |_| {})?.outcome {
                Outcome::Adopted { receipt, provider, .. } => shared.push(times(receipt.as_ref(), provider)?),
                Outcome::FallBack { why, .. } | Outcome::Lost { why, .. } => bail!("the shared route: {why}"),
            }
            let (ms, copied) = copy(&decoder, n as u64)?;
            copies.push(ms);
            bytes = copied;
        }
        rows.push(Row {
            tokens: n,
            bytes,
            file: median_times(&file),
            restore_ms: (!restore.is_empty()).then(|| median(restore)),
            shared: median_times(&shared),
            memcpy_ms: median(copies),
        });
    }
    Ok(rows)
}

fn times(receipt: Option<&Value>, provider: std::time::Duration) -> Result<Times> {
    let receipt = receipt.context("the provider printed no line of JSON")?;
    let ms = |key: &str| receipt[key].as_f64().with_context(|| format!("no {key} in {receipt}"));
    Ok(Times { whole_ms: provider.as_secs_f64() * 1e3, prefill_ms: ms("prefill_ms")?, write_ms: ms("write_ms")? })
}

fn restored(client: &Client, n: usize) -> Result<f64> {
    let restored = client.restore(0, "prompt.bin")?;
    ensure!(restored.tokens as usize == n, "restored {} tokens of {n}", restored.tokens);
    client.erase(0)?;
    Ok(restored.ms)
}

/// Copies rows of every tensor, once, into a mapping as a provider finds its own when it begins to write: new, with memory behind it,
/// and out of the caches, which a prefill has filled with other things.
fn copy(decoder: &Decoder, rows: u64) -> Result<(f64, u64)> {
    let memory = decoder.memory();
    let mut maps = memory.map_again()?;
    let tensors = memory.layout().tensors();
    let largest = tensors.iter().map(|t| rows * t.row_bytes()).max().unwrap_or(0);
    for t in tensors {
        maps[usize::from(t.region)].back(t.offset, rows * t.row_bytes())?;
    }
    let mut others = vec![1u8; CACHES];
    others.iter_mut().for_each(|v| *v = v.wrapping_mul(3));
    std::hint::black_box(&others);
    let source = vec![0x5au8; usize::try_from(largest)?];
    let mut bytes = 0;
    let began = Instant::now();
    for t in tensors {
        let n = rows * t.row_bytes();
        maps[usize::from(t.region)].write(t.offset, &source[..n as usize])?;
        bytes += n;
    }
    Ok((began.elapsed().as_secs_f64() * 1e3, bytes))
}

/// The middle value, or the mean of the two in the middle; NaN of nothing.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    match n {
        0 => f64::NAN,
        _ if n % 2 == 1 => values[n / 2],
        _ => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

fn median_times(all: &[Times]) -> Times {
    let of = |f: fn(&Times) -> f64| median(all.iter().map(f).collect());
    Times { whole_ms: of(|t| t.whole_ms), prefill_ms: of(|t| t.prefill_ms), write_ms: of(|t| t.write_ms) }
}

/// The table for people, with what it was made on.
pub fn markdown(r: &Routes, rows: &[Row]) -> String {
    let m = report::machine();
    let mut out = format!(
        "Model {}, provider with {} thread(s), f16 cache, {}, medians of {} interleaved runs. Machine: {}, {} cores, Linux {}.\n\n",
        file_name(&r.model),
        r.threads,
        match r.kind {
            Kind::MemFd => "memory files",
            Kind::Udmabuf => "dma-bufs",
        },
        r.runs,
        m["cpu"].as_str().unwrap_or("unknown"),
        m["cores"],
        m["kernel"].as_str().unwrap_or("unknown"),
    );
    out.push_str(
        "| tokens | rows, MB | file: write, ms | restore, ms | shared: write, ms | memcpy, ms | of memcpy's speed | file: whole, ms | \
         shared: whole, ms |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    for row in rows {
        let restore = row.restore_ms.map_or("-".into(), |ms| format!("{ms:.2}"));
        let _ = writeln!(
            out,
            "| {} | {:.1} | {:.2} | {restore} | {:.2} | {:.2} | {:.2} | {:.0} | {:.0} |",
            row.tokens,
            row.bytes as f64 / 1e6,
            row.file.write_ms,
            row.shared.write_ms,
            row.memcpy_ms,
            row.share_of_memcpy(),
            row.file.whole_ms,
            row.shared.whole_ms
        );
    }
    out.push_str(
        "\nwrite: converting rows from f32 and putting them where they belong, on the file route with publishing the file; restore: the \
         server's reading of it, which the shared route has not; memcpy: the same bytes, not converted, by one thread, from one buffer \
         into the same memory, mapped anew and out of the caches as a provider finds it; whole: the provider's process from start to end, model and prefill included.\n",
    );
    out
}

/// The table for machines, all numbers in it.
pub fn csv(rows: &[Row]) -> String {
    let mut out = String::from(
        "tokens,bytes,file_whole_ms,file_prefill_ms,file_write_ms,restore_ms,shared_whole_ms,shared_prefill_ms,shared_write_ms,memcpy_ms\n",
    );
    for r in rows {
        let restore = r.restore_ms.map_or(String::new(), |ms| format!("{ms:.3}"));
        let (f, s) = (r.file, r.shared);
        let _ = writeln!(
            out,
            "{},{},{:.3},{:.3},{:.3},{restore},{:.3},{:.3},{:.3},{:.3}",
            r.tokens, r.bytes, f.whole_ms, f.prefill_ms, f.write_ms, s.whole_ms, s.prefill_ms, s.write_ms, r.memcpy_ms
        );
    }
    out
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(Vec::new()).is_nan());
    }
}
