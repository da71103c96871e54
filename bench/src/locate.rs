//! Where things are that nobody named: the provider, which is built from this tree, and the models that the conformance
//! harness has fetched. Nothing is downloaded here.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

const PROVIDER: &str = "npu-prefill";

/// The provider: the given one; under cargo the tree's own, built in release so that what is measured is what stands there;
/// else the one beside this program.
///
/// # Errors
/// There is none, or it cannot be built.
pub fn provider(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        ensure!(path.is_file(), "there is no provider {}; --provider takes the path of the program", path.display());
        // Absolute, because a name without a slash would be looked for along PATH.
        return std::path::absolute(path).with_context(|| format!("the provider {}", path.display()));
    }
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    match std::env::var_os("CARGO") {
        Some(cargo) if tree.join("Cargo.toml").is_file() => build(&cargo, &tree),
        _ => {
            let me = std::env::current_exe().context("asking for this program's own place")?;
            let beside = me.with_file_name(PROVIDER);
            ensure!(
                beside.is_file(),
                "there is no {PROVIDER} beside {}; build it with `cargo build --release`, or name it with --provider",
                me.display()
            );
            Ok(beside)
        }
    }
}

fn build(cargo: &OsStr, tree: &Path) -> Result<PathBuf> {
    let mut command = Command::new(cargo);
    command.args(["build", "--release", "--package", PROVIDER, "--bin", PROVIDER]);
    command.args(["--message-format", "json-render-diagnostics"]).current_dir(tree);
    command.stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = command.output().with_context(|| format!("starting {}", cargo.display()))?;
    ensure!(
        output.status.success(),
        "building {PROVIDER} failed ({}); --provider names one that is built",
        output.status
    );
    executable(&String::from_utf8_lossy(&output.stdout))
        .with_context(|| format!("cargo built {PROVIDER} but did not say where; name it with --provider"))
}

/// The provider's path in what cargo says, one JSON object a line.
fn executable(said: &str) -> Option<PathBuf> {
    said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).find_map(|message| {
        let path = message["executable"].as_str()?;
        (message["target"]["name"] == PROVIDER).then(|| PathBuf::from(path))
    })
}

/// The models to measure: the given ones, else all that the harness has installed.
///
/// # Errors
/// One is not there, or there is none at all.
pub fn models(given: &[PathBuf]) -> Result<Vec<PathBuf>> {
    for path in given {
        ensure!(path.is_file(), "there is no model {}; --model takes the path of a GGUF file", path.display());
    }
    if !given.is_empty() {
        return Ok(given.to_vec());
    }
    let var = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let Some(cache) = var("XDG_CACHE_HOME").or_else(|| Some(var("HOME")?.join(".cache"))) else {
        bail!("no model is given, and neither XDG_CACHE_HOME nor HOME says where fetched ones are; give --model FILE");
    };
    let dir = cache.join("npu-prefill-conformance").join("models");
    let found = installed(&dir);
    ensure!(
        !found.is_empty(),
        "no model is given, and none is installed in {}; give --model FILE, or run `conformance pin install --all`",
        dir.display()
    );
    Ok(found)
}

/// The models in the directories under `dir`, by their names.
fn installed(dir: &Path) -> Vec<PathBuf> {
    let list = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<PathBuf> =
        list(dir).flat_map(|d| list(&d)).filter(|p| p.extension() == Some(OsStr::new("gguf"))).collect();
    found.sort_by(|a, b| a.file_name().cmp(&b.file_name()));
    found
}

/// The last part of a path, which is what a table says of a model.
pub fn name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_provider_is_found_in_cargos_messages() {
        let said = "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"gguf\"},\"executable\":null}\nnot JSON\n\
                    {\"target\":{\"name\":\"npu-prefill\"},\"executable\":\"/t/release/npu-prefill\"}\n";
        assert_eq!(executable(said), Some(PathBuf::from("/t/release/npu-prefill")));
        assert_eq!(executable("{}"), None);
    }

    #[test]
    fn installed_models_are_found() {
        let dir = tempfile::tempdir().unwrap();
        for (sub, name) in [("1", "b.gguf"), ("2", "a.gguf"), ("2", "note.txt")] {
            fs::create_dir_all(dir.path().join(sub)).unwrap();
            fs::write(dir.path().join(sub).join(name), "").unwrap();
        }
        let names: Vec<String> = installed(dir.path()).iter().map(|p| name(p)).collect();
        assert_eq!(names, ["a.gguf", "b.gguf"]);
        assert!(installed(&dir.path().join("none")).is_empty());
    }

    #[test]
    fn what_is_not_there_is_named() {
        let none = Path::new("no/such/thing");
        assert!(models(&[none.to_owned()]).unwrap_err().to_string().contains("no/such/thing"));
        assert!(provider(Some(none)).unwrap_err().to_string().contains("no/such/thing"));
    }
}
