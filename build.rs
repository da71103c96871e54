//! Puts the commit into `--version`. A tree without git, or a copy inside someone else's repository, builds just as well:
//! the version then stands alone.

use std::path::Path;
use std::process::Command;

fn git(root: &str, args: &[&str]) -> Option<String> {
    let out = Command::new("git").arg("-C").arg(root).args(args).output().ok()?;
    let text = String::from_utf8(out.stdout).ok()?;
    let text = text.trim();
    (out.status.success() && !text.is_empty()).then(|| text.to_owned())
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let root = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let version = match hash(&root) {
        Some(hash) => format!("{version} ({hash})"),
        None => version,
    };
    println!("cargo::rustc-env=NPU_PREFILL_VERSION={version}");
}

fn hash(root: &str) -> Option<String> {
    let top = git(root, &["rev-parse", "--show-toplevel"])?;
    if Path::new(&top).canonicalize().ok()? != Path::new(root).canonicalize().ok()? {
        return None;
    }
    // The hash changes when HEAD moves to another branch or when the branch itself moves. A path that does not exist
    // would make cargo run this on every build, so only existing ones are named.
    for name in ["HEAD", "logs/HEAD", "packed-refs"] {
        if let Some(path) = git(root, &["rev-parse", "--git-path", name]) {
            let path = Path::new(root).join(path);
            if path.exists() {
                println!("cargo::rerun-if-changed={}", path.display());
            }
        }
    }
    git(root, &["rev-parse", "--short=12", "--verify", "HEAD"])
}
