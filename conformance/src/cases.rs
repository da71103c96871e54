//! What is tried: a case is a model (or several), the servers, the prompts and the decoder's options, written in TOML.
//!
//! The cases are files in `conformance/cases`, built into the program; a directory of the user's own can be given instead.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use kvlayout::CacheType;
use serde::Deserialize;

use crate::fixtures;
use crate::oracle::Arithmetic;
use crate::pins::Pins;

const TABLES: &[(&str, &str)] = &[
    ("real.toml", include_str!("../cases/real.toml")),
    ("options.toml", include_str!("../cases/options.toml")),
    ("tiny.toml", include_str!("../cases/tiny.toml")),
    ("int8.toml", include_str!("../cases/int8.toml")),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    case: Vec<Entry>,
}

/// As written.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    /// Pinned or tiny models; `*` at the end of a tiny model's name stands for the rest of it.
    models: Vec<String>,
    /// Models that `*` does not stand for.
    #[serde(default)]
    except: Vec<String>,
    pins: Vec<String>,
    /// Names of prompts; all of them but those far longer than the others if absent.
    prompts: Option<Vec<String>>,
    #[serde(default = "default_ctx")]
    n_ctx: u32,
    #[serde(default)]
    max_tokens: Option<usize>,
    #[serde(default = "default_type")]
    type_k: String,
    #[serde(default = "default_type")]
    type_v: String,
    #[serde(default = "yes")]
    flash_attn: bool,
    #[serde(default)]
    swa_full: bool,
    #[serde(default = "one")]
    n_parallel: u32,
    #[serde(default)]
    chunk: Option<u32>,
    #[serde(default = "greedy")]
    greedy: u32,
    /// What kernels compute matrix products by; the provider's own way if absent.
    contract: Option<Contract>,
}

/// What a device's kernels keep to.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Contract {
    Int8,
}

fn default_ctx() -> u32 {
    2304
}
fn default_type() -> String {
    "f16".into()
}
fn yes() -> bool {
    true
}
fn one() -> u32 {
    1
}
fn greedy() -> u32 {
    crate::tolerances::GREEDY
}

/// One case: one model on one server.
#[derive(Debug, Clone)]
pub struct Case {
    /// Name of the entry.
    pub name: String,
    /// Pinned or tiny model.
    pub model: String,
    /// Server pin.
    pub pin: String,
    /// Names of prompts, in order.
    pub prompts: Vec<String>,
    /// Context per slot, in tokens.
    pub n_ctx: u32,
    /// Prompts are cut to this many ids.
    pub max_tokens: usize,
    /// Type of K.
    pub type_k: CacheType,
    /// Type of V.
    pub type_v: CacheType,
    /// Flash attention.
    pub flash_attn: bool,
    /// `--swa-full`.
    pub swa_full: bool,
    /// Slots.
    pub n_parallel: u32,
    /// The provider's `--chunk`.
    pub chunk: Option<u32>,
    /// Tokens to generate.
    pub greedy: u32,
    /// How matrix products are to be computed.
    pub arithmetic: Arithmetic,
}

impl Case {
    /// `entry/model/pin`, as it is shown and selected.
    pub fn id(&self) -> String {
        format!("{}/{}/{}", self.name, self.model, self.pin)
    }
}

/// All cases that are built in.
pub fn all(pins: &Pins) -> Result<Vec<Case>> {
    let mut out = Vec::new();
    for (name, text) in TABLES {
        expand(text, pins, &mut out).with_context(|| (*name).to_owned())?;
    }
    Ok(out)
}

/// The cases of the `.toml` files in a directory.
pub fn from_dir(dir: &Path, pins: &Pins) -> Result<Vec<Case>> {
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .with_context(|| format!("reading {}", dir.display()))?
        .filter_map(|e| e.ok().map(|e| e.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "toml"))
        .collect();
    files.sort();
    let mut out = Vec::new();
    for path in files {
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        expand(&text, pins, &mut out).with_context(|| path.display().to_string())?;
    }
    Ok(out)
}

fn expand(text: &str, pins: &Pins, out: &mut Vec<Case>) -> Result<()> {
    let table: Table = toml::from_str(text)?;
    let known = crate::prompts::all()?;
    for e in table.case {
        let about = || format!("case {}", e.name);
        let prompts = e
            .prompts
            .clone()
            .unwrap_or_else(|| known.iter().filter(|p| p.kind != "far").map(|p| p.name.clone()).collect());
        for p in &prompts {
            ensure!(known.iter().any(|k| &k.name == p), "case {}: no prompt is called {p:?}", e.name);
        }
        let mut models = Vec::new();
        for m in &e.models {
            if let Some(start) = m.strip_suffix('*') {
                let found: Vec<_> =
                    fixtures::all().iter().map(|t| t.name.to_owned()).filter(|n| n.starts_with(start)).collect();
                ensure!(!found.is_empty(), "case {}: no tiny model is called {m:?}", e.name);
                models.extend(found);
            } else if fixtures::find(m).is_some() {
                models.push(m.clone());
            } else {
                models.push(pins.model(m).with_context(about)?.name.clone());
            }
        }
        for model in &e.except {
            ensure!(models.contains(model), "case {}: {model:?} is not among its models", e.name);
        }
        models.retain(|m| !e.except.contains(m));
        for model in &models {
            for pin in &e.pins {
                pins.server(pin).with_context(about)?;
                out.push(Case {
                    name: e.name.clone(),
                    model: model.clone(),
                    pin: pin.clone(),
                    prompts: prompts.clone(),
                    n_ctx: e.n_ctx,
                    max_tokens: e.max_tokens.unwrap_or(usize::MAX).min(e.n_ctx as usize - e.greedy as usize - 1),
                    type_k: e.type_k.parse().with_context(about)?,
                    type_v: e.type_v.parse().with_context(about)?,
                    flash_attn: e.flash_attn,
                    swa_full: e.swa_full,
                    n_parallel: e.n_parallel,
                    chunk: e.chunk,
                    greedy: e.greedy,
                    arithmetic: e.contract.map_or(Arithmetic::Exact, |Contract::Int8| Arithmetic::Int8),
                });
            }
        }
    }
    Ok(())
}

/// Whether a name matches a pattern in which `*` stands for anything.
pub fn glob(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let parts: Vec<_> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    for part in middle {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_cases_cover_what_they_should() {
        let pins = Pins::load().unwrap();
        let all = all(&pins).unwrap();
        for pin in ["v4", "v3", "v2"] {
            for model in ["smollm2", "gemma3", "qwen2.5"] {
                assert!(
                    all.iter().any(|c| c.pin == pin && c.model == model && c.prompts.len() >= 20),
                    "{model} on {pin}"
                );
            }
            for tiny in fixtures::all().iter().filter(|t| t.name.starts_with("tiny-")) {
                assert!(all.iter().any(|c| c.pin == pin && c.model == tiny.name), "{} on {pin}", tiny.name);
            }
        }
        for arch in fixtures::all().iter().filter(|t| t.name.starts_with("arch-")) {
            assert!(all.iter().any(|c| c.name == "arch" && c.pin == "v4" && c.model == arch.name), "{}", arch.name);
        }
        let mut ids: Vec<_> = all.iter().map(Case::id).collect();
        let n = ids.len();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), n, "two cases have one name");
    }

    #[test]
    fn globs() {
        for (pattern, name, want) in [
            ("*", "a/b", true),
            ("a/*", "a/b", true),
            ("*/v4", "a/b/v4", true),
            ("a*b*c", "a--b--c", true),
            ("a*b*c", "a--c--b", false),
            ("a", "ab", false),
            ("*a*", "", false),
            ("ab*b", "ab", false),
        ] {
            assert_eq!(glob(pattern, name), want, "{pattern} {name}");
        }
    }
}
