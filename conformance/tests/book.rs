//! The commands on the pages, run as they stand there: every block marked `console`, page by page, in a directory with a model, against
//! a pinned server where the page starts one. What a block shows under a command is held against what comes out by the first word of
//! each line; figures differ from machine to machine. Blocks marked `by-hand` are not run; `docs/by-hand.md` lists them.
//!
//! Needs bash, curl and jq, hence by name only: `.ci/run` runs it.

use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use conformance::locate;
use conformance::pins::{Cache, Pins};
use conformance::server::{Build, Server, ServerOptions};

/// The address that pages use for a server.
const ADDRESS: &str = "http://127.0.0.1:8080";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// One command with the lines that stand under it.
#[derive(Debug, Clone, PartialEq)]
struct Step {
    line: usize,
    command: String,
    shows: Vec<String>,
}

/// The commands of a page's blocks, and what is wrong with how it has them.
fn steps(page: &str) -> Result<Vec<Step>, String> {
    let mut steps: Vec<Step> = Vec::new();
    let mut block: Option<&str> = None;
    for (i, line) in page.lines().enumerate() {
        match (block, line.trim().strip_prefix("```")) {
            (None, Some(info)) => {
                if ["sh", "bash", "shell"].contains(&info.split(' ').next().unwrap_or("")) {
                    return Err(format!("line {}: a block of commands is marked `console`, so that it is run", i + 1));
                }
                block = Some(info);
            }
            (Some(_), Some(_)) => block = None,
            (Some("console"), None) => match (line.strip_prefix("$ "), steps.last_mut()) {
                (Some(command), _) => {
                    steps.push(Step { line: i + 1, command: command.to_owned(), shows: vec![] });
                }
                (None, Some(step)) if !line.trim().is_empty() => step.shows.push(line.to_owned()),
                _ => {}
            },
            _ => {}
        }
    }
    Ok(steps)
}

/// Runs a page's commands in one place. What they set in the shell stays set.
fn run(page: &str, steps: &[Step], programs: &Path, model: &Path) {
    let dir = tempfile::tempdir().unwrap();
    symlink(model, dir.path().join("model.gguf")).unwrap();
    let (mut server, mut sets) = (None, String::new());
    for step in steps {
        if step.command.starts_with("llama-server ") {
            server = Some(start(dir.path(), &step.command));
            continue;
        }
        let base = server.as_ref().map_or("http://127.0.0.1:9", |s: &Server| s.client.base());
        let command = step.command.replace(ADDRESS, base);
        let mut c = Command::new("bash");
        c.args(["-euo", "pipefail", "-c", &format!("{sets}{command}")]).current_dir(dir.path());
        c.env_clear().env("HOME", dir.path()).stdin(Stdio::null());
        // The cache of servers and models is the tests' own.
        c.env("XDG_CACHE_HOME", Cache::open().unwrap().root().parent().unwrap());
        let path = std::env::var("PATH").unwrap_or_default();
        let output = c.env("PATH", format!("{}:{path}", programs.display())).output().unwrap();
        let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{page}:{}: {command}\n{stdout}{stderr}", step.line);
        for shown in &step.shows {
            let first = shown.split_whitespace().next().unwrap_or("");
            let there = stdout.lines().any(|l| l.trim_start().starts_with(first));
            assert!(there, "{page}:{}: no line begins with {first:?}:\n{stdout}{stderr}", step.line);
        }
        if command.split_once('=').is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_uppercase() || c == '_')) {
            sets += &format!("{command}\n");
        }
    }
}

/// A pinned server in the place of the `llama-server` of a page.
fn start(dir: &Path, command: &str) -> Server {
    let build = Build::pinned(&Pins::load().unwrap(), &Cache::open().unwrap(), "v4").unwrap();
    let mut options = ServerOptions::new(&dir.join("model.gguf").canonicalize().unwrap(), &dir.join("slots"));
    let words: Vec<&str> = command.split_whitespace().collect();
    let after = |name: &str| words.iter().position(|w| *w == name).and_then(|i| words.get(i + 1));
    options.n_ctx = after("-c").and_then(|n| n.parse().ok()).unwrap_or(4096);
    assert_eq!(after("--slot-save-path"), Some(&"./slots/"), "{command}");
    let _ = std::fs::create_dir(&options.slots);
    Server::start(&build, &options, &dir.join("server.log")).unwrap()
}

#[test]
#[ignore = "needs bash, curl and jq; .ci/run runs it"]
fn every_command_of_the_pages_does_what_it_says() {
    let root = root();
    let mut pages = vec![root.join("README.md")];
    pages.extend(std::fs::read_dir(root.join("docs")).unwrap().map(|e| e.unwrap().path()));
    pages.retain(|p| p.extension().is_some_and(|e| e == "md"));
    pages.sort();
    let programs = tempfile::tempdir().unwrap();
    symlink(locate::provider_for_tests().unwrap(), programs.path().join("npu-prefill")).unwrap();
    symlink(env!("CARGO_BIN_EXE_conformance"), programs.path().join("conformance")).unwrap();
    let (pins, cache) = (Pins::load().unwrap(), Cache::open().unwrap());
    let model = cache.install_model(pins.model("smollm2").unwrap()).unwrap();
    let mut count = 0;
    for path in pages {
        let name = path.strip_prefix(&root).unwrap().display().to_string();
        let steps = steps(&std::fs::read_to_string(&path).unwrap()).unwrap_or_else(|e| panic!("{name}: {e}"));
        run(&name, &steps, programs.path(), &model);
        let _ = writeln!(std::io::stdout(), "{name}: {} commands", steps.len());
        count += steps.len();
    }
    assert!(count >= 12, "only {count} commands were found");
}

#[test]
fn commands_are_read_from_blocks() {
    let page = "text\n```console\n$ a b\nfirst 1\n\n$ c\n```\n```console by-hand: why\n$ d\n```\n```text\n$ e\n```\n";
    let step = |line, command: &str, shows: &[&str]| Step {
        line,
        command: command.into(),
        shows: shows.iter().map(|s| (*s).to_owned()).collect(),
    };
    assert_eq!(steps(page), Ok(vec![step(3, "a b", &["first 1"]), step(6, "c", &[])]));
    assert!(steps("```sh\nx\n```\n").is_err());
}
