//! `plan`, `layout` and `models`: what would be done, where it would go, and what can be.

use std::fmt::Write as _;

use clap::CommandFactory as _;
use gguf::Gguf;
use kvlayout::{CacheType, Header, Refusal, ShareLayout, ShareParams};
use prefill::{Place, Where};

use crate::cli::{Cli, LayoutArgs, PlanArgs};
use crate::device;
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
    let plan = engine.plan(n_tokens, &compute);
    let estimate = engine.estimate(Prompt::Length(n_tokens), &plan);
    if !args.explain {
        print(&format!("{}\n{estimate}\n", plan.to_string().trim_end()));
        return Ok(());
    }
    let opened = device::open(&compute, &plan.products())?;
    device::announce(&opened);
    let explained = |offload: Option<&prefill::Offload>| explain(&prefill::place(&plan, offload));
    let text = match &opened.offload {
        Some(offload) => device::look(offload, |o| explained(Some(o))),
        None => explained(None),
    };
    print(&format!("{text}{estimate}\n"));
    Ok(())
}

/// A line for each part of a command, and what the device's parts add up to.
fn explain(places: &[Place]) -> String {
    let mut out = String::new();
    let (mut launches, mut streamed) = (0, 0);
    for Place { command, parts } in places {
        for (n, place) in parts {
            let rows = format!("{}..{}", command.rows.start, command.rows.end);
            let op = if *n > 0 { format!("{} outputs of {}", n, command.op) } else { command.op.to_string() };
            let _ = writeln!(out, "layer {:>3}  rows {rows:<12} {op}  ->  {place}", command.layer);
            if let Where::Device { launches: l, bytes, .. } = place {
                launches += l;
                streamed += bytes;
            }
        }
    }
    let _ = writeln!(out, "{launches} launches on the device, {:.1} MB streamed", streamed as f64 / 1e6);
    out
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

/// A shell's completions.
pub fn completions(shell: clap_complete::Shell) -> String {
    let mut out = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "npu-prefill", &mut out);
    String::from_utf8_lossy(&out).into_owned()
}

/// The manual page, in roff.
pub fn manual() -> String {
    // Without the commit: the page is committed itself. The long version is what the renderer takes first.
    let version = concat!(env!("CARGO_PKG_VERSION"), "\n", env!("NPU_PREFILL_PINS"));
    let command = Cli::command().version(env!("CARGO_PKG_VERSION")).long_version(version);
    // The page's name has room for a line; the description for all of it.
    let all = command.get_about().map(ToString::to_string).unwrap_or_default();
    let first = all.split("\n\n").next().unwrap_or_default().trim_end_matches('.').to_owned();
    let man = clap_mangen::Man::new(command.about(first).long_about(all)).date("");
    let mut out = Vec::new();
    // Writing to memory does not fail.
    let _ = man.render(&mut out);
    let text = String::from_utf8_lossy(&out).into_owned();
    // One page for all: the commands' own options after the list of commands.
    text + &commands_of_the_manual()
}

fn commands_of_the_manual() -> String {
    let mut out = String::from(".SH \"OPTIONS OF THE COMMANDS\"\n");
    for command in Cli::command().get_subcommands() {
        let mut part = Vec::new();
        let _ = clap_mangen::Man::new(command.clone()).render_options_section(&mut part);
        let part = String::from_utf8_lossy(&part);
        let body = part.split_once(".SH OPTIONS\n").map_or(&*part, |(_, body)| body);
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        out += &format!(".SS \"npu-prefill {}\"\n{}\n{body}", command.get_name(), about.replace('-', "\\-"));
    }
    out + ".SH ENVIRONMENT\nnpu\\-prefill environment prints every variable that is read.\n"
}

/// What every architecture was proved on: architecture, server, state version, cache, tiny models. `conformance matrix` writes
/// it from cases that passed on real servers.
const PROOFS: &str = include_str!("proofs.tsv");

/// One line of it.
struct Proof {
    architecture: &'static str,
    state_version: &'static str,
    cache: &'static str,
    models: &'static str,
}

fn proofs() -> impl Iterator<Item = Proof> {
    PROOFS.lines().filter(|l| !l.starts_with('#')).filter_map(|line| {
        let mut fields = line.split('\t');
        let (architecture, _server) = (fields.next()?, fields.next()?);
        Some(Proof { architecture, state_version: fields.next()?, cache: fields.next()?, models: fields.next()? })
    })
}

/// Prints what is supported, and what each architecture was proved on.
pub fn models(json: bool) {
    let types: Vec<String> = CacheType::ALL.iter().map(ToString::to_string).collect();
    let all: Vec<_> = crate::engine::architectures().collect();
    if json {
        let architectures: Vec<_> = all
            .iter()
            .map(|(name, examples)| {
                let of = proofs().filter(|p| p.architecture == *name);
                let proved = of.map(|p| {
                    serde_json::json!({
                        "state_version": p.state_version.parse::<u32>().unwrap_or_default(),
                        "cache": p.cache,
                        "models": p.models.split(' ').collect::<Vec<_>>(),
                    })
                });
                serde_json::json!({"architecture": name, "examples": examples, "proved": proved.collect::<Vec<_>>()})
            })
            .collect();
        let value = serde_json::json!({
            "architectures": architectures,
            "cache_types": types,
            "state_versions": [2, 3, 4],
        });
        return print(&format!("{value:#}\n"));
    }
    let mut text = format!(
        "{} architectures (general.architecture of the GGUF), each with the state versions of real\n",
        all.len()
    );
    text += "llama-servers that took what was computed for tiny models of it and said the same:\n";
    let width = all.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, examples) in &all {
        let mut versions: Vec<_> = proofs().filter(|p| p.architecture == *name).map(|p| p.state_version).collect();
        versions.sort_unstable();
        versions.dedup();
        text += &format!("  {name:<width$}  {:<7}  {examples}\n", versions.join(" "));
    }
    text += &format!("cache types (-ctk, -ctv): {}\n", types.join(", "));
    text += "state versions: 2, 3, 4\n";
    print(&text);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It is committed, and no text can hold the name of the commit that it is part of.
    #[test]
    fn the_manual_does_not_name_a_commit() {
        let (version, commit) = crate::cli::VERSION.split_once(' ').unwrap();
        let manual = manual();
        assert!(manual.contains(&format!("v{version}\n")), "{manual}");
        assert!(!manual.contains(commit), "{manual}");
    }

    #[test]
    fn every_architecture_is_proved_on_the_newest_server() {
        let proved: Vec<_> = proofs().filter(|p| p.state_version == "4").map(|p| p.architecture).collect();
        for (name, _) in crate::engine::architectures() {
            assert!(proved.contains(&name), "{name} is in the table, but no case proves it");
        }
        for name in proved {
            assert!(crate::engine::architectures().any(|(a, _)| a == name), "{name} is proved, but not in the table");
        }
    }
}
