//! Where the program under test is: given, built by cargo, or beside this program.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

/// The program's name.
const NAME: &str = "npu-prefill";

/// Finds the provider. `given` wins. Under cargo it is built, so that what is tested is what is in the tree; else it is looked
/// for beside this program.
pub fn provider(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        ensure!(path.is_file(), "there is no provider {}; --provider takes the path of the program", path.display());
        return std::path::absolute(path).with_context(|| path.display().to_string());
    }
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    if let Some(cargo) = std::env::var_os("CARGO")
        && workspace.join("Cargo.toml").is_file()
    {
        // In release, whatever this program was built in: an unoptimised prefill takes minutes.
        return build(Path::new(&cargo), &workspace, "release");
    }
    let me = std::env::current_exe().context("asking for this program's own place")?;
    let beside = me.parent().map(|d| d.join(NAME)).filter(|p| p.is_file());
    beside.with_context(|| {
        format!(
            "there is no {NAME} beside {}; build it with `cargo build --release`, or give it with --provider",
            me.display()
        )
    })
}

/// For tests: the provider as `cargo test` builds it, so that nothing is built twice.
pub fn provider_for_tests() -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").context("tests are run by cargo, which says so in CARGO")?;
    build(Path::new(&cargo), &Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), "test")
}

fn build(cargo: &Path, workspace: &Path, profile: &str) -> Result<PathBuf> {
    let output = Command::new(cargo)
        .args([
            "build",
            "--profile",
            profile,
            "--package",
            NAME,
            "--bin",
            NAME,
            "--message-format",
            "json-render-diagnostics",
        ])
        .current_dir(workspace)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("starting {}", cargo.display()))?;
    ensure!(output.status.success(), "building {NAME} failed ({}); --provider names one that is built", output.status);
    executable(&String::from_utf8_lossy(&output.stdout))
        .with_context(|| format!("cargo built {NAME}, but did not say where it is; name it with --provider"))
}

/// The provider's path in what cargo says, one JSON object a line.
fn executable(said: &str) -> Option<PathBuf> {
    said.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok()).find_map(|message| {
        let path = message["executable"].as_str()?;
        (message["target"]["name"] == NAME).then(|| PathBuf::from(path))
    })
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
}
