//! `plan` and `models`: what would be done, and what can be.

use gguf::Gguf;
use kvlayout::CacheType;

use crate::cli::PlanArgs;
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
