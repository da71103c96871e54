//! Builds the C shim over XRT (`npu-kernels/xdna/shim.cpp`) where XRT's headers are. Nothing else in the tree needs a C++ compiler.

use anyhow::{Context as _, Result, bail, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

const FILE: &str = "libxdna_shim.so";

/// Builds it against the XRT under `xrt` (a root with `usr/include/xrt`, or a prefix with `include/xrt`) or, without one, the
/// system's, into the directory `out`, and gives the path of the library.
pub fn build(root: &Path, xrt: Option<&Path>, out: &Path) -> Result<PathBuf> {
    let source = root.join("npu-kernels/xdna/shim.cpp");
    let candidates: Vec<PathBuf> = match xrt {
        Some(dir) => vec![dir.join("usr"), dir.to_owned()],
        None => vec!["/usr".into(), "/opt/xilinx/xrt".into()],
    };
    let Some(prefix) = candidates.iter().find(|p| p.join("include/xrt/xrt_device.h").exists()) else {
        let tried: Vec<String> = candidates.iter().map(|p| p.join("include/xrt").display().to_string()).collect();
        bail!(
            "XRT's headers are not there (looked for {}): install libxrt-dev of XRT 2.25, or fetch it with \
             npu-kernels/xdna/install-xrt.sh and name the directory that it prints with --xrt",
            tried.join(", ")
        );
    };
    std::fs::create_dir_all(out).with_context(|| format!("making {}", out.display()))?;
    let library = out.join(FILE);
    let unfinished = out.join(format!("{FILE}.{}", std::process::id()));
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let status = Command::new(&compiler)
        .args(["-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"])
        // XRT's own headers are not ours to mend.
        .arg("-isystem")
        .arg(prefix.join("include"))
        .arg("-o")
        .arg(&unfinished)
        .arg(&source)
        .arg("-L")
        .arg(prefix.join("lib/x86_64-linux-gnu"))
        .arg("-L")
        .arg(prefix.join("lib"))
        // Its initialiser has to run before those of XRT, which read a file (see shim.cpp).
        // The C library that XRT wants may be newer than the one that this is built with.
        .args(["-lxrt_coreutil", "-Wl,--allow-shlib-undefined", "-Wl,-z,defs", "-Wl,-z,initfirst"])
        .status()
        .with_context(|| format!("starting the C++ compiler {}", compiler.display()))?;
    ensure!(status.success(), "{} could not build {}", compiler.display(), source.display());
    std::fs::rename(&unfinished, &library).with_context(|| format!("naming {}", library.display()))?;
    Ok(library)
}
