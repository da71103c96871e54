//! The project's own tools: `cargo xtask tidy` holds the tree against the rules that `ARCHITECTURE.md` states,
//! `cargo xtask docs` writes what the programs say of themselves, `cargo xtask book` and `cargo xtask deb` put pages and package
//! together, `cargo xtask shim` builds the one part that cargo does not, the C shim over XRT, `cargo xtask simkernels`
//! writes kernels for the driver's double. It is not a build system: cargo builds,
//! and `.ci/run` is the list of what has to pass.

mod book;
mod code;
mod docs;
mod messages;
mod package;
mod shim;
mod simkernels;
mod tidy;
mod tools;
mod tree;

use anyhow::{Context as _, Result, bail};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const USAGE: &str = "usage: cargo xtask <command>

  tidy           hold the tree against its rules (also a test of this package)
  tidy --rules   list the rules
  docs           write what the programs say of themselves: reference, manual page, completions (builds them in release); and messages
  docs --check   fail when what the programs say is stale
  messages       write the page of messages, and that of commands which no test runs; needs no build
  messages --check  fail when these are stale
  book           build the book under target/book and follow every link in it (builds mdbook once, into a cache)
  deb            build the Debian package under target/debian (builds cargo-deb once, into a cache)
  shim [--xrt DIR] [--out DIR]
                 build libxdna_shim.so, which connects the programs to XRT, and print its path
  simkernels [--xrt DIR] [--out DIR] [ROLE:KxN..]
                 write the kernels that the double of the driver knows, into the target directory";

fn main() -> ExitCode {
    match work() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("xtask: {e:#}");
            ExitCode::from(2)
        }
    }
}

fn work() -> Result<bool> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    // The package's own place, not the current directory: the alias works anywhere in the tree.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    match args.as_slice() {
        ["tidy"] => {
            let tree = tree::Tree::read(&root)?;
            let complaints = tidy::check(&tree);
            complaints.iter().for_each(|c| eprintln!("{c}"));
            let (files, rules) = (tree.files.len(), tidy::RULES.len());
            match complaints.len() {
                0 => println!("tidy: {files} files, {rules} rules, nothing to say"),
                n => eprintln!("tidy: {n} complaints over {files} files"),
            }
            Ok(complaints.is_empty())
        }
        ["tidy", "--rules"] => {
            tidy::RULES.iter().for_each(|r| println!("{:<14} {}", r.id, r.what));
            tidy::PROVED.iter().for_each(|p| println!("{:<14} proved by {} in {}", p.id, p.test, p.place));
            Ok(true)
        }
        ["docs"] => docs::write(&root),
        ["docs", "--check"] => docs::check(&root),
        ["shim", options @ ..] => {
            let (xrt, out, rest) = places(options)?;
            if let Some(other) = rest.first() {
                bail!("shim: {other:?} is no option\n{USAGE}");
            }
            println!("{}", shim::build(&root, xrt, &out.unwrap_or_else(|| built(&root)))?.display());
            Ok(true)
        }
        ["simkernels", options @ ..] => {
            let (xrt, out, shapes) = places(options)?;
            let out = out.unwrap_or_else(|| built(&root).join("simkernels"));
            let n = simkernels::write(&out, xrt, &shapes)?;
            println!("simkernels: {n} shapes in {}", out.display());
            Ok(true)
        }
        ["messages"] => docs::write_found(&root),
        ["messages", "--check"] => docs::check_found(&root),
        ["book"] => book::build(&root),
        ["deb"] => package::build(&root),
        [] | ["help" | "-h" | "--help"] => {
            println!("{USAGE}");
            Ok(true)
        }
        other => bail!("no command {:?}\n{USAGE}", other.join(" ")),
    }
}

/// Where cargo puts the programs, which look there for what belongs to them.
fn built(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from).join("debug")
}

/// `--xrt DIR`, `--out DIR`, and what else there is.
type Places<'a> = (Option<&'a Path>, Option<PathBuf>, Vec<&'a str>);

fn places<'a>(options: &[&'a str]) -> Result<Places<'a>> {
    let (mut xrt, mut out, mut rest) = (None, None, Vec::new());
    let mut options = options.iter().copied();
    while let Some(option) = options.next() {
        match option {
            "--xrt" | "--out" => {
                let dir = options.next().with_context(|| format!("{option} needs a directory"))?;
                if option == "--xrt" { xrt = Some(Path::new(dir)) } else { out = Some(PathBuf::from(dir)) }
            }
            option if option.starts_with('-') => bail!("{option:?} is no option\n{USAGE}"),
            other => rest.push(other),
        }
    }
    Ok((xrt, out, rest))
}
