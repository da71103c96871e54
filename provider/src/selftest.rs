//! `selftest`: every kernel of the directory, bit for bit, and one tiny prefill with its products on the device - a report that a
//! user can send.

use std::sync::Mutex;

use gguf::Gguf;
use gguf::write::Writer;
use kvlayout::{CacheType, KvMap, KvSink, MemSpace, Part, Scatter, State, StateVersion};
use npu_kernels::{KernelId, Spec, check};
use prefill::{CacheParams, Model, Offload, Options, Plan};

use crate::cli::SelftestArgs;
use crate::device;
use crate::doctor::what_it_shows;
use crate::exit::{self, Error, Kind, Result};
use crate::handed;
use crate::job::{self, Compute};
use crate::say::{print, say};

/// Seeds that every kernel is tested with.
const SEEDS: [u64; 3] = [1, 2, 3];
/// One scale a row and one an output, 8 bits each, against f32 products in a model of two layers: relative L2 of a layer's
/// keys or values. 1e-2 to 2e-2 is usual.
const INT8_REL: f64 = 5e-2;
/// A tiny model has no wider layers.
const WIDEST: usize = 1024;
/// More than one block of rows, and not a whole number of them.
const TOKENS: usize = 150;

/// Tests and prints.
///
/// # Errors
/// There is nothing to test, or something is wrong; the report says what.
pub fn run(args: &SelftestArgs) -> Result<()> {
    let SelftestArgs { common: args, fds, import } = args;
    // Before anything else is opened.
    let handed = fds.as_deref().map(job::take_fds).transpose()?.unwrap_or_default();
    let mut notes = Vec::new();
    let compute = Compute::of_device(&args.device, &mut notes)?;
    notes.iter().for_each(say);
    let Some(dir) = &compute.elfs else {
        let text = "no directory of kernels is given (--elfs, ONEBIT_HYBRID_ELFS); npu-prefill doctor says what else is missing";
        return Err(Error::new(Kind::Unavailable, text));
    };
    let catalogue = device::catalogue(dir)?;
    let mut opened = device::raw(&compute, catalogue)?;
    let info = opened.info().clone();
    let mut lines = vec![
        format!("npu-prefill {}", crate::cli::VERSION),
        format!(
            "device {} ({}), {}, firmware {}, {}",
            info.kind,
            info.name,
            or(&info.driver),
            or(&info.firmware),
            or(&info.runtime)
        ),
        format!("what a pass shows: {}", what_it_shows(compute.device)),
    ];
    let mut wrong = 0;
    for id in (0..opened.kernels().len()).map(KernelId) {
        let spec = opened.kernels()[id.0].clone();
        let hash = spec.files.iter().next().map_or("-", |f| f.sha256.as_str());
        let mut result = Ok(());
        let mut times = Vec::new();
        for seed in SEEDS {
            match check::run(&mut *opened, id, seed) {
                Ok(took) => times.push(took.as_secs_f64() * 1e3),
                Err(fault) => {
                    result = Err(format!("seed {seed}: {fault}"));
                    break;
                }
            }
        }
        times.sort_by(f64::total_cmp);
        lines.push(match result {
            Ok(()) => format!("ok     {spec}, {:.3} ms, sha256 {hash}", times[times.len() / 2]),
            Err(fault) => {
                wrong += 1;
                format!("WRONG  {spec}, {fault}, sha256 {hash}")
            }
        });
    }
    let kernels = opened.kernels().to_vec();
    match tiny_prefill(Offload::new(opened, Box::new(())), &kernels)? {
        (line, true) => lines.push(format!("ok     {line}")),
        (line, false) => {
            wrong += 1;
            lines.push(format!("WRONG  {line}"));
        }
    }
    for memory in &handed {
        let (line, right) = handed::test(&compute, dir, memory, *import)?;
        wrong += usize::from(!right);
        lines.push(format!("{} {line}", if right { "ok    " } else { "WRONG " }));
    }
    if args.json {
        let report = serde_json::json!({ "npu_prefill": crate::cli::VERSION, "right": wrong == 0, "lines": lines });
        print(&format!("{report:#}\n"));
    } else {
        print(&(lines.join("\n") + "\n"));
    }
    match wrong {
        0 => Ok(()),
        n => Err(Error::new(Kind::Unavailable, format!("{n} of the tests failed"))),
    }
}

fn or(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

struct Quiet;
impl prefill::Hooks for Quiet {
    fn stop(&self) -> bool {
        false
    }
    fn progress(&mut self, _: usize, _: usize, _: usize, _: usize) {}
}

/// A llama of two layers whose projections are as wide as the narrowest int8 kernel; `None` where that is too wide.
fn tiny(kernels: &[Spec]) -> Option<Gguf> {
    let width = kernels.iter().filter(|s| s.is_int8()).map(|s| s.k).filter(|k| k.is_multiple_of(64)).min()?;
    if width > WIDEST {
        return None;
    }
    let (e, heads, vocabulary) = (width as u64, (width / 64) as u32, 64u64);
    let mut w = Writer::new("llama");
    for (key, value) in [
        ("block_count", 2),
        ("context_length", 4096),
        ("embedding_length", width as u32),
        ("feed_forward_length", width as u32),
        ("attention.head_count", heads),
        ("attention.head_count_kv", heads),
        ("rope.dimension_count", 64),
        ("vocab_size", vocabulary as u32),
    ] {
        w.u32(&format!("llama.{key}"), value);
    }
    w.f32("llama.rope.freq_base", 10_000.0).f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
    let mut seed = 1u32;
    let mut add = |name: &str, ne: &[u64]| {
        let n: u64 = ne.iter().product();
        let matrix = ne.len() > 1;
        let scale = if matrix { 1.7 / (ne[0] as f32).sqrt() } else { 0.0 };
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        let values: Vec<f32> = (0..n).map(|_| if matrix { scale * next() } else { 1.0 }).collect();
        // The shape is ours, so there is nothing to go wrong.
        let _ = w.tensor_f32(name, ne, &values);
    };
    add("token_embd.weight", &[e, vocabulary]);
    add("output_norm.weight", &[e]);
    for layer in 0..2 {
        for name in ["attn_norm", "ffn_norm"] {
            add(&format!("blk.{layer}.{name}.weight"), &[e]);
        }
        for name in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"] {
            add(&format!("blk.{layer}.{name}.weight"), &[e, e]);
        }
    }
    Gguf::from_bytes("the self-test's model", w.finish()).ok()
}

fn state(model: &Model<'_>, options: &Options, offload: Option<&Mutex<Offload>>) -> Result<State> {
    let tokens: Vec<u32> = (0..TOKENS as u32).map(|i| i * 17 % 64).collect();
    let ids: Vec<i32> = tokens.iter().map(|t| t.cast_signed()).collect();
    let (type_k, type_v) = (options.type_k, options.type_v);
    let params =
        CacheParams { type_k, type_v, v_trans: false, swa_full: true, n_stream: 1, n_ctx: None, attn_rot: true };
    let spec = model.kv_spec(&params).map_err(exit::prefill_error)?;
    let map = KvMap::state_file(&spec, &ids, StateVersion::V3).map_err(exit::refusal)?;
    let (size, mut bytes) = (map.size(), Vec::new());
    let space = MemSpace::new(&mut bytes, size).map_err(|e| Error::new(Kind::Io, e))?;
    let mut sink = Box::new(Scatter::new(map, space).map_err(exit::sink_error)?);
    prefill::run_on(model, &tokens, options, offload, &mut *sink, &mut Quiet).map_err(exit::prefill_error)?;
    sink.commit().map_err(exit::sink_error)?;
    State::parse(&bytes).map_err(exit::parse_error)
}

/// A prefill with and without the device: a line, and whether all is well.
fn tiny_prefill(offload: Offload, kernels: &[Spec]) -> Result<(String, bool)> {
    let Some(gguf) = tiny(kernels) else {
        return Ok(("no prefill: every kernel is wider than the model of this test".to_owned(), true));
    };
    let model = Model::load(&gguf).map_err(exit::prefill_error)?;
    let options = Options { type_k: CacheType::F32, type_v: CacheType::F32, ..Options::default() };
    let mut offload = offload;
    let needs = Plan::new(model.spec(), TOKENS, options.chunk).products();
    let failed: Vec<String> =
        offload.self_test(&needs).into_iter().filter_map(|(name, wrong)| Some(format!("{name}: {}", wrong?))).collect();
    if !failed.is_empty() {
        return Ok((format!("a tiny prefill's kernels: {}", failed.join("; ")), false));
    }
    let offload = Mutex::new(offload);
    let host = state(&model, &options, None)?;
    let got = state(&model, &options, Some(&offload))?;
    let usage = device::look(&offload, |o| o.usage().clone());
    let mut worst = 0f64;
    for layer in 0..2 {
        for part in [Part::K, Part::V] {
            let (Ok(a), Ok(b)) = (host.rows_f32(0, layer, part), got.rows_f32(0, layer, part)) else { continue };
            let apart: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
            let whole: f64 = a.iter().map(|a| f64::from(*a).powi(2)).sum();
            worst = worst.max((apart / whole).sqrt());
        }
    }
    let line = format!(
        "a prefill of {TOKENS} tokens: {} projections on the device, {} on the host, {} launches; {worst:.1e} from the host's, at most \
         {INT8_REL:.0e}",
        usage.on_device,
        usage.on_host + usage.made_up,
        usage.launches
    );
    let failures = if usage.failures.is_empty() { String::new() } else { format!("; {}", usage.failures.join("; ")) };
    Ok((line + &failures, worst < INT8_REL && usage.failures.is_empty() && usage.on_device > 0))
}
