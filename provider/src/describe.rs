//! `plan`, `layout` and `models`: what would be done, where it would go, and what can be.

use std::fmt::Write as _;

use gguf::Gguf;
use kvlayout::{CacheType, Header, Refusal, ShareLayout, ShareParams};

use crate::cli::{LayoutArgs, PlanArgs};
use crate::engine::{Engine, Prompt};
use crate::exit::{self, Result};
use crate::job::{Compute, Decoder};
use crate::say::{print, say};

/// Prints the plan of a prefill and its memory.
///
/// # Errors
/// As a handoff's, up to the point where it would begin.
pub fn plan(args: &PlanArgs) -> Result<()> {
    let mut notes = Vec::new();
    let compute = Compute::new(&args.compute, &mut notes)?;
    let decoder = Decoder::new(&args.decoder)?;
    notes.iter().for_each(say);
    let gguf = Gguf::open(&args.model).map_err(exit::gguf_error)?;
    let engine = Engine::new(&gguf)?;
    let n_tokens = args.n_tokens as usize;
    engine.kv_spec(&decoder)?;
    let estimate = engine.estimate(Prompt::Length(n_tokens), &compute);
    let plan = engine.plan(n_tokens, &compute);
    print(&format!("{}\n{estimate}\n", plan.to_string().trim_end()));
    Ok(())
}

/// Prints the layout of a decoder's shared memory, as text or as the header that it would send.
///
/// # Errors
/// The model cannot be read, or a decoder with these parameters does not share its memory.
pub fn layout(args: &LayoutArgs) -> Result<()> {
    let decoder = Decoder::new(&args.decoder)?;
    let gguf = Gguf::open(&args.model).map_err(exit::gguf_error)?;
    let engine = Engine::new(&gguf)?;
    let spec = engine.kv_spec(&decoder)?;
    if spec.v_trans {
        return Err(exit::refusal(Refusal::SharedTransposed));
    }
    let n_ctx = decoder.n_ctx.unwrap_or(engine.trained_context());
    let layout = ShareLayout::compute_for(&spec, n_ctx, args.ubatch_size).map_err(exit::refusal)?;
    let params = ShareParams {
        n_ctx: Some(n_ctx),
        n_batch: None,
        n_ubatch: Some(args.ubatch_size),
        flash_attn: Some(true),
        type_k: Some(spec.type_k),
        type_v: Some(spec.type_v),
    };
    if args.json {
        print(&format!("{}\n", Header::new(None, params, &layout).with_tensors(&layout).write()));
        return Ok(());
    }
    let mut out = format!(
        "n_ctx {n_ctx}, n_ubatch {}, K {}, V {}, flash attention on\n{layout}",
        args.ubatch_size, spec.type_k, spec.type_v
    );
    let names: Vec<String> = layout.tensors().iter().map(|t| t.name()).collect();
    let width = names.iter().map(String::len).max().unwrap_or(0);
    let _ = writeln!(out, "{:width$}  region      offset  type  shape", "tensor");
    for (name, t) in names.iter().zip(layout.tensors()) {
        let _ = writeln!(out, "{name:width$}  {:>6}  {:>10}  {:<4}  {:?}", t.region, t.offset, t.ty.to_string(), t.ne);
    }
    print(&out);
    Ok(())
}

/// Prints what is supported.
pub fn models() {
    let types: Vec<String> = CacheType::ALL.iter().filter(|t| t.is_supported()).map(ToString::to_string).collect();
    let mut text = String::from("architectures (general.architecture of the GGUF):\n");
    for (name, examples) in crate::engine::architectures() {
        text += &format!("  {name:<8} {examples}\n");
    }
    text += &format!("cache types (-ctk, -ctv): {}\n", types.join(", "));
    text += "state versions: 2, 3, 4\n";
    print(&text);
}
