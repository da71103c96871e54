//! The Debian package: what `[package.metadata.deb]` in the root manifest lists, put together by cargo-deb. That it installs and runs
//! in a clean root is `packaging/try-in-a-clean-root`'s to show.

use crate::tools::{CARGO_DEB, run};
use anyhow::{Context as _, Result, ensure};
use std::path::Path;
use std::process::Command;

/// Builds it under `target/debian`.
pub fn build(root: &Path) -> Result<bool> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    run(
        Command::new(cargo).args(["build", "--quiet", "--release", "--package", "npu-prefill", "--bin", "npu-prefill"]),
        root,
    )?;
    let place = root.join("target/debian");
    let _ = std::fs::remove_dir_all(&place);
    std::fs::create_dir_all(&place).with_context(|| format!("creating {}", place.display()))?;
    let program = CARGO_DEB.get()?;
    run(
        // Symbols of panics stay in: a report of one is worth the room.
        Command::new(program).args([
            "deb",
            "--no-build",
            "--no-strip",
            "--package",
            "npu-prefill",
            "--output",
            "target/debian/",
        ]),
        root,
    )?;
    let made = std::fs::read_dir(&place).with_context(|| format!("reading {}", place.display()))?.flatten();
    let made: Vec<_> = made.filter(|e| e.path().extension().is_some_and(|x| x == "deb")).collect();
    ensure!(made.len() == 1, "{} packages under target/debian, should be one", made.len());
    println!("target/debian/{} written", made[0].file_name().to_string_lossy());
    Ok(true)
}
