//! Puts the commit and the pinned servers into `--version`. A tree without git, or a copy inside someone else's repository,
//! builds just as well: the commit is then `unknown`.

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
    let hash = hash(&root).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=NPU_PREFILL_VERSION={version} ({hash})");
    println!("cargo::rerun-if-changed=conformance/pins.toml");
    println!("cargo::rustc-env=NPU_PREFILL_PINS={}", pins(&root));
}

/// The servers that the harness runs against, in words.
fn pins(root: &str) -> String {
    let text = std::fs::read_to_string(Path::new(root).join("conformance/pins.toml")).unwrap_or_default();
    let table: toml::Table = text.parse().unwrap_or_default();
    let servers = table.get("server").and_then(toml::Value::as_array).cloned().unwrap_or_default();
    let line = |s: &toml::Value| {
        let text = |key: &str| s.get(key).and_then(toml::Value::as_str).map(str::to_owned);
        let version = s.get("state_version")?.as_integer()?;
        Some(format!("state version {version}: {} {}", text("package")?, text("version")?))
    };
    let servers: Vec<String> = servers.iter().filter_map(line).collect();
    match servers.is_empty() {
        true => "tried on no server".to_owned(),
        false => format!("tried on llama-servers of {}", servers.join("; ")),
    }
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
