//! Programs that building the book and the package takes: of a pinned version, kept in a cache outside of the tree, built without
//! optimisation because they run for a second.

use anyhow::{Context as _, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A program on the registry.
pub struct Tool {
    /// Its package and program.
    pub name: &'static str,
    /// The version.
    pub version: &'static str,
    /// What of it is needed.
    pub features: &'static str,
}

/// Makes the book.
pub const MDBOOK: Tool = Tool { name: "mdbook", version: "0.5.4", features: "search" };
/// Makes the package.
pub const CARGO_DEB: Tool = Tool { name: "cargo-deb", version: "3.8.0", features: "" };

impl Tool {
    /// Where it is, built first if it is not there.
    pub fn get(&self) -> Result<PathBuf> {
        let root = cache()?.join(format!("{}-{}", self.name, self.version));
        let program = root.join("bin").join(self.name);
        if program.is_file() {
            return Ok(program);
        }
        println!("building {} {} into {}", self.name, self.version, root.display());
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let status = Command::new(cargo)
            .args(["install", self.name, "--version", self.version, "--locked", "--debug", "--quiet"])
            .args(["--no-default-features", "--features", self.features, "--root"])
            .arg(&root)
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            // Not in the workspace's own: its lock and its profile are not these.
            .env("CARGO_TARGET_DIR", root.join("build"))
            .stdin(Stdio::null())
            .status()
            .context("starting cargo")?;
        ensure!(status.success(), "building {} {} failed", self.name, self.version);
        let _ = std::fs::remove_dir_all(root.join("build"));
        Ok(program)
    }
}

fn cache() -> Result<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|h| h.join(".cache")));
    Ok(base.context("neither XDG_CACHE_HOME nor HOME is set")?.join("npu-prefill-tools"))
}

/// Runs a program to its end in a directory.
pub fn run(command: &mut Command, root: &Path) -> Result<()> {
    let status = command.current_dir(root).stdin(Stdio::null()).status();
    let status = status.with_context(|| format!("starting {:?}", command.get_program()))?;
    ensure!(status.success(), "{:?} failed ({status})", command.get_program());
    Ok(())
}
