//! What is written by the programs themselves: the reference page, the messages, the manual page, the completions, the list of
//! commands that no test runs. All is committed, so that it can be read and packed without building, and checked, so that it is not a
//! second truth.

use anyhow::{Context as _, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::messages;
use crate::tree::Tree;

const REFERENCE: &str = "docs/reference.md";
const BY_HAND: &str = "docs/by-hand.md";

const HEAD: &str = "# Reference

<!-- Written by `cargo xtask docs` from the programs themselves. Change them, then run it again. -->

What the programs say of themselves. Flag beats environment variable beats configuration file beats default. Exit codes are
explained in [exit-codes.md](exit-codes.md), messages in [messages.md](messages.md).
";

const BY_HAND_HEAD: &str = "# Commands that no test runs

<!-- Written by `cargo xtask messages` from the pages. -->

Every command on the pages and in the README stands in a block marked `console` and is run by a test, except for those
marked `by-hand`, which are listed here with the reason.
";

/// Files and what they should hold.
type Files = Vec<(String, String)>;

/// Writes everything.
pub fn write(root: &Path) -> Result<bool> {
    put(root, said(root)?)?;
    write_found(root)
}

/// Whether what the programs say is as it would be written.
pub fn check(root: &Path) -> Result<bool> {
    compare(root, said(root)?, "docs")
}

/// Writes what is found in the tree: needs no program, and takes no time.
pub fn write_found(root: &Path) -> Result<bool> {
    put(root, found(root)?)
}

/// Whether what is found in the tree is as it would be written.
pub fn check_found(root: &Path) -> Result<bool> {
    compare(root, found(root)?, "messages")
}

fn put(root: &Path, files: Files) -> Result<bool> {
    for (path, want) in files {
        let full = root.join(&path);
        if std::fs::read_to_string(&full).unwrap_or_default() != want {
            if let Some(dir) = full.parent() {
                std::fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
            }
            std::fs::write(&full, want).with_context(|| format!("writing {path}"))?;
            println!("{path} written");
        }
    }
    Ok(true)
}

/// Says where files are not as they should be.
fn compare(root: &Path, files: Files, command: &str) -> Result<bool> {
    let mut fresh = true;
    for (path, want) in files {
        let have = std::fs::read_to_string(root.join(&path)).unwrap_or_default();
        if have == want {
            println!("{path} is up to date");
            continue;
        }
        fresh = false;
        let line = have.lines().zip(want.lines()).take_while(|(a, b)| a == b).count();
        let show = |text: &str| text.lines().nth(line).map_or("(end)".to_owned(), |l| format!("{l:?}"));
        eprintln!(
            "{path}:{}: stale: {} here, should be {}; run `cargo xtask {command}`",
            line + 1,
            show(&have),
            show(&want)
        );
    }
    Ok(fresh)
}

/// What the programs say.
fn said(root: &Path) -> Result<Files> {
    let provider = build(root, "npu-prefill")?;
    let harness = build(root, "conformance")?;
    let said = |args: &[&str]| ask(&provider, args);
    Ok(vec![
        (REFERENCE.into(), reference(&provider, &harness)?),
        ("packaging/npu-prefill.1".into(), said(&["man"])?),
        ("packaging/completions/npu-prefill.bash".into(), said(&["completions", "bash"])?),
        ("packaging/completions/_npu-prefill".into(), said(&["completions", "zsh"])?),
        ("packaging/completions/npu-prefill.fish".into(), said(&["completions", "fish"])?),
    ])
}

/// What the tree says.
fn found(root: &Path) -> Result<Files> {
    let tree = Tree::read(root)?;
    Ok(vec![(messages::PAGE.into(), messages::page(&tree)), (BY_HAND.into(), by_hand(&tree))])
}

fn reference(provider: &Path, harness: &Path) -> Result<String> {
    let mut out = String::from(HEAD);
    out += "\n## npu-prefill\n";
    describe(provider, "npu-prefill", &mut Vec::new(), &mut out)?;
    out += "\n### Environment variables\n\nAn empty variable is an unset one.\n\n";
    out += ask(provider, &["environment"])?.trim_end();
    out += "\n\n### Supported\n\n```text\n";
    out += ask(provider, &["models"])?.trim_end();
    out += "\n```\n\n## conformance\n";
    describe(harness, "conformance", &mut Vec::new(), &mut out)?;
    Ok(out)
}

/// Blocks marked ```` ```console by-hand: reason ````, with where they stand.
fn by_hand(tree: &Tree) -> String {
    let mut out = String::from(BY_HAND_HEAD);
    for (path, text) in
        tree.with_suffix(".md").filter(|(p, _)| (*p == "README.md" || p.starts_with("docs/")) && *p != BY_HAND)
    {
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            let Some(reason) = line.trim().strip_prefix("```console by-hand: ") else { continue };
            let commands: Vec<&str> =
                lines.by_ref().take_while(|l| l.trim() != "```").filter_map(|l| l.strip_prefix("$ ")).collect();
            let target = path.strip_prefix("docs/").map_or(format!("../{path}"), str::to_owned);
            out += &format!("\n[{path}]({target}): {reason}\n\n```text\n{}\n```\n", commands.join("\n"));
        }
    }
    out
}

/// The help of a program or a command of it, and then of the commands under it.
fn describe(program: &Path, name: &str, command: &mut Vec<String>, out: &mut String) -> Result<()> {
    let mut args: Vec<&str> = command.iter().map(String::as_str).collect();
    args.push("--help");
    let help = ask(program, &args)?;
    if !command.is_empty() {
        *out += &format!("\n### {name} {}\n", command.join(" "));
    }
    let lines: Vec<&str> = help.trim_end().lines().map(str::trim_end).collect();
    *out += &format!("\n```text\n{}\n```\n", lines.join("\n"));
    for sub in subcommands(&help) {
        command.push(sub);
        describe(program, name, command, out)?;
        command.pop();
    }
    Ok(())
}

/// The names under `Commands:`.
fn subcommands(help: &str) -> Vec<String> {
    let list = help.lines().skip_while(|l| l.trim() != "Commands:").skip(1).take_while(|l| !l.trim().is_empty());
    // Continuation lines of a long description are indented further than the names.
    let names = list.filter_map(|l| l.strip_prefix("  ").filter(|l| !l.starts_with(' '))?.split_whitespace().next());
    names.filter(|n| *n != "help").map(str::to_owned).collect()
}

/// Builds a program of the workspace in release, as the README's commands build it, and says where it is.
fn build(root: &Path, package: &str) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["build", "--quiet", "--release", "--message-format", "json-render-diagnostics"])
        .args(["--package", package, "--bin", package])
        .current_dir(root)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("starting cargo")?;
    ensure!(output.status.success(), "building {package} failed");
    let said = String::from_utf8(output.stdout).context("what cargo printed")?;
    executable(&said, package).with_context(|| format!("cargo built {package}, but did not say where it is"))
}

/// The program's path in cargo's messages, one JSON object per line.
fn executable(said: &str, name: &str) -> Option<PathBuf> {
    let paths = said.lines().filter_map(|l| l.split_once("\"executable\":\"")?.1.split('"').next());
    paths.map(PathBuf::from).find(|p| p.file_stem().is_some_and(|s| s == name))
}

/// Runs a program and returns what it prints.
fn ask(program: &Path, args: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(args)
        // The width of somebody's terminal, and colours, must not get into the page.
        .env("COLUMNS", "110")
        .env("NO_COLOR", "1")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("starting {}", program.display()))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{} {}` failed: {}", program.display(), args.join(" "), error.trim());
    String::from_utf8(output.stdout).with_context(|| format!("what `{} {}` printed", program.display(), args.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_found_in_a_help_text() {
        let help = "About\n\nUsage: x\n\nCommands:\n  run   Runs it, with a long\n        description\n  pin   Pins\n  help  Print\n\nOptions:\n  -h\n";
        assert_eq!(subcommands(help), ["run", "pin"]);
        assert!(subcommands("Usage: x\n").is_empty());
    }

    #[test]
    fn a_program_is_found_in_cargos_messages() {
        let said = "{\"reason\":\"compiler-artifact\",\"executable\":null}\n{\"executable\":\"/t/release/build-script-build\"}\n\
                    {\"target\":{},\"executable\":\"/t/release/conformance\",\"fresh\":true}\n";
        assert_eq!(executable(said, "conformance"), Some(PathBuf::from("/t/release/conformance")));
        assert_eq!(executable(said, "other"), None);
    }
}
