//! `docs/reference.md`, from what the programs say of themselves: their `--help`, the variables, the models. It is committed,
//! so that it can be read without building, and checked, so that it is not a second truth.

use anyhow::{Context as _, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const PAGE: &str = "docs/reference.md";

const HEAD: &str = "# Reference

<!-- Written by `cargo xtask docs` from the programs themselves. Change them, then run it again. -->

What the programs say of themselves. Flag beats environment variable beats configuration file beats default. Exit codes are
explained in [exit-codes.md](exit-codes.md).
";

/// Writes the page.
pub fn write(root: &Path) -> Result<bool> {
    let page = page(root)?;
    std::fs::write(root.join(PAGE), page).with_context(|| format!("writing {PAGE}"))?;
    println!("{PAGE} written");
    Ok(true)
}

/// Whether the page is as it would be written; says where it is not.
pub fn check(root: &Path) -> Result<bool> {
    let want = page(root)?;
    let have = std::fs::read_to_string(root.join(PAGE)).unwrap_or_default();
    if have == want {
        println!("{PAGE} is up to date");
        return Ok(true);
    }
    let line = have.lines().zip(want.lines()).take_while(|(a, b)| a == b).count();
    let show = |text: &str| text.lines().nth(line).map_or("(end)".to_owned(), |l| format!("{l:?}"));
    eprintln!(
        "{PAGE}:{}: stale: {} here, {} from the programs; run `cargo xtask docs`",
        line + 1,
        show(&have),
        show(&want)
    );
    Ok(false)
}

fn page(root: &Path) -> Result<String> {
    let provider = build(root, "npu-prefill")?;
    let harness = build(root, "conformance")?;
    let mut out = String::from(HEAD);
    out += "\n## npu-prefill\n";
    describe(&provider, "npu-prefill", &mut Vec::new(), &mut out)?;
    out += "\n### Environment variables\n\nAn empty variable is an unset one.\n\n";
    out += ask(&provider, &["environment"])?.trim_end();
    out += "\n\n### Supported\n\n```text\n";
    out += ask(&provider, &["models"])?.trim_end();
    out += "\n```\n\n## conformance\n";
    describe(&harness, "conformance", &mut Vec::new(), &mut out)?;
    Ok(out)
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
