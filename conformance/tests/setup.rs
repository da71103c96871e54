//! `npu-prefill setup` against real pinned servers: what it writes is what conformance's own probe finds, what it prints is
//! about a handoff that worked, and what it left behind is nothing.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;

use conformance::pins::{Cache, Pins};
use conformance::server::{Build, Server, ServerOptions};
use conformance::{fixtures, locate, probe};
use kvlayout::CacheType;
use tempfile::TempDir;

fn provider() -> PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| locate::provider_for_tests().unwrap()).clone()
}

struct Scene {
    dir: TempDir,
    server: Server,
    model: PathBuf,
}

impl Scene {
    fn new(model: &str, pin: &str, change: impl FnOnce(&mut ServerOptions)) -> Scene {
        let (pins, cache) = (Pins::load().unwrap(), Cache::open().unwrap());
        let build = Build::pinned(&pins, &cache, pin).unwrap();
        let model = fixtures::find(model).unwrap().write(&cache.root().join("tiny")).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let slots = dir.path().join("slots");
        std::fs::create_dir(&slots).unwrap();
        let mut options = ServerOptions::new(&model, &slots);
        change(&mut options);
        let server = Server::start(&build, &options, &dir.path().join("log")).unwrap();
        Scene { dir, server, model }
    }

    fn command(&self) -> Command {
        let mut c = Command::new(provider());
        c.env_clear().env("XDG_CONFIG_HOME", self.dir.path().join("config"));
        c.args(["setup", "--server", self.server.client.base(), "--slots"]).arg(&self.server.options.slots);
        c.arg("--model").arg(&self.model).args(["-t", "1"]);
        c
    }

    fn config(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("config/npu-prefill/config.toml")).unwrap_or_default()
    }

    /// Names in the server's directory.
    fn left(&self) -> usize {
        std::fs::read_dir(&self.server.options.slots).unwrap().count()
    }
}

fn text(output: &Output) -> (String, String) {
    (String::from_utf8(output.stdout.clone()).unwrap(), String::from_utf8(output.stderr.clone()).unwrap())
}

#[test]
fn the_configuration_is_what_the_server_is_and_the_handoff_works() {
    for (pin, model, change) in [
        ("v4", "tiny-llama-f32", (|_| ()) as fn(&mut ServerOptions)),
        ("v2", "tiny-qwen3-f16", |o| (o.type_k, o.type_v) = (CacheType::Bf16, CacheType::F32)),
        ("v3", "tiny-llama-f32", |o| o.flash_attn = false),
        // Without values in its cache, and with a recurrent memory beside it.
        ("v4", "arch-deepseek2", |_| ()),
        ("v4", "arch-qwen35", |_| ()),
    ] {
        let scene = Scene::new(model, pin, change);
        let output = scene.command().output().unwrap();
        let (stdout, stderr) = text(&output);
        assert_eq!(output.status.code(), Some(0), "{pin}: {stdout}{stderr}");
        // The same as conformance's own probe finds, by other code.
        let client = &scene.server.client;
        let found =
            probe::Probe::of(client.base(), &scene.server.options.slots, &conformance::locate::provider_for_tests)
                .unwrap();
        let lines = |t: &str| {
            t.lines().filter(|l| !l.starts_with('#')).map(str::to_owned).collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(lines(&scene.config()), lines(&found.to_toml("x")), "{pin}");
        for want in ["server alone", "provider  ", "restore  ", "prompt_n       1 evaluated", "result         "] {
            assert!(stdout.contains(want), "{pin}: no {want:?} in {stdout}");
        }
        assert!(stdout.contains("prompt         513 tokens, 512 handed over"), "{pin}: {stdout}");
        assert!(stdout.contains("gained ") || stdout.contains("lost "), "{pin}: {stdout}");
        assert_eq!(scene.left(), 0, "{pin}");
    }
}

#[test]
fn a_prompt_reaches_past_a_sliding_window() {
    for full in [false, true] {
        let scene = Scene::new("tiny-gemma3-f32", "v4", |o| o.swa_full = full);
        // Shorter than the window of 32, if it were left at that.
        let output = scene.command().args(["-n", "8"]).output().unwrap();
        let (stdout, stderr) = text(&output);
        assert_eq!(output.status.code(), Some(0), "{stdout}{stderr}");
        assert!(scene.config().contains("swa_full = true` if it does"), "{}", scene.config());
        assert!(
            stdout.contains("97 tokens, 96 handed over") && stdout.contains("prompt_n       1 evaluated"),
            "{stdout}"
        );
    }
}

#[test]
fn what_stands_in_the_way_is_said() {
    let scene = Scene::new("tiny-llama-f32", "v4", |_| ());
    let fails = |c: &mut Command, code: i32, want: &str| {
        let output = c.output().unwrap();
        let (stdout, stderr) = text(&output);
        assert_eq!(output.status.code(), Some(code), "{stdout}{stderr}");
        assert!(stderr.lines().last().unwrap_or("").contains(want), "no {want:?} in {stderr}");
    };
    // Another directory than the server's.
    let other = tempfile::tempdir().unwrap();
    fails(scene.command().arg("--slots").arg(other.path()), 2, "cannot be used multiple times");
    let mut c = Command::new(provider());
    c.env_clear().args(["setup", "--server", scene.server.client.base(), "--model"]).arg(&scene.model);
    c.arg("--config").arg(other.path().join("c.toml"));
    fails(c.arg("--slots").arg(other.path()), 66, "is --slots the directory of its --slot-save-path?");
    for name in std::fs::read_dir(&scene.server.options.slots).unwrap() {
        std::fs::remove_file(name.unwrap().path()).unwrap();
    }
    // A state file of another version, newer than anything the server saved.
    let stale = scene.server.options.slots.join("stale.bin");
    std::fs::write(&stale, b"qsgg\x02\0\0\0\0\0\0\0").unwrap();
    fails(&mut scene.command(), 78, "stale.bin");
    std::fs::remove_file(&stale).unwrap();
    // A variable that contradicts the server: said, and the server refuses the file.
    let output = scene.command().env("LLAMA_ARG_CACHE_TYPE_K", "f32").output().unwrap();
    let stderr = text(&output).1;
    assert!(output.status.code() == Some(69) && stderr.contains("LLAMA_ARG_CACHE_TYPE_K is set here"), "{stderr}");
    // Nobody there.
    let base = scene.server.client.base().to_owned();
    let (slots, model) = (scene.server.options.slots.clone(), scene.model.clone());
    drop(scene.server);
    let mut c = Command::new(provider());
    c.env_clear().args(["setup", "--server", &base, "--slots"]).arg(&slots).arg("--model").arg(&model);
    fails(&mut c, 69, "is llama-server running there?");
}
