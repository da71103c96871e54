//! Cases end to end on real servers: the provider as a black box, the server's own files, a binary of the user's own, probing.
//!
//! Servers and models are installed on first use; without network and cache these tests fail, they are never skipped.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use conformance::cases::{self, Case};
use conformance::contract::Kernels;
use conformance::demo::{self, Demo};
use conformance::pins::{Cache, Pins, Python};
use conformance::producer::Choice;
use conformance::run::{self, CaseReport, Context, Verdict};
use conformance::server::{Build, Server, ServerOptions};
use conformance::{fixtures, locate, probe};
use kvlayout::CacheType;

fn context(producer: Choice) -> Context {
    Context {
        pins: Pins::load().unwrap(),
        cache: Cache::open().unwrap(),
        producer,
        server: None,
        references: None,
        kernels: None,
        keep: None,
    }
}

/// Built once, whichever test comes first.
fn provider_path() -> PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| locate::provider_for_tests().unwrap()).clone()
}

/// A built-in case, cut down to a few short prompts.
fn case(id: &str, prompts: &[&str]) -> Case {
    let all = cases::all(&Pins::load().unwrap()).unwrap();
    let mut case = all.into_iter().find(|c| c.id() == id).unwrap_or_else(|| panic!("no case {id}"));
    case.prompts = prompts.iter().map(|p| (*p).to_owned()).collect();
    case.greedy = 16;
    case
}

fn pass(context: &Context, case: &Case) -> CaseReport {
    let report = run::run_case(context, case);
    assert_eq!(report.verdict, Verdict::Pass, "{}: {:#?}", report.id, report.reasons);
    report
}

#[test]
fn the_provider_passes_on_every_server_build() {
    let context = context(Choice::Provider(provider_path()));
    for (id, prompts) in [
        ("tiny/tiny-llama-f32/v4", &["two", "lighthouse", "log-600"][..]),
        ("tiny/tiny-qwen2-q4_k/v3", &["three", "rust", "log-600"]),
        ("tiny/tiny-qwen3-f16/v2", &["two", "greek", "log-600"]),
        // 32 ids are the window: shorter prompts are computed again, which is asserted.
        ("tiny/tiny-gemma3-f32/v4", &["two", "lighthouse", "log-600"]),
        ("tiny-swa-full/tiny-gemma3-f16/v3", &["two", "lighthouse"]),
        ("tiny-fa-off/tiny-llama-f32/v2", &["two", "lighthouse"]),
    ] {
        let report = pass(&context, &case(id, prompts));
        assert_eq!(report.reused + report.reprocessed, prompts.len(), "{id}");
    }
}

/// The second run starts no server for its own work, and comes to the same end; what is damaged is made anew.
#[test]
fn kept_references_judge_as_fresh_ones_do() {
    let dir = tempfile::tempdir().unwrap();
    let case = case("tiny/tiny-llama-q8_0/v4", &["two", "rust"]);
    let mut context = context(Choice::Provider(provider_path()));
    let fresh = pass(&context, &case);
    context.references = Some(dir.path().join("kept"));
    pass(&context, &case);
    let is_case = |e: &fs::DirEntry| e.file_name().to_string_lossy().starts_with("tiny-llama-q8_0-v4-");
    let kept = fs::read_dir(dir.path().join("kept")).unwrap().map(Result::unwrap).find(is_case).unwrap().path();
    let replies = kept.join("references.cbor");
    let stamp = |p: &Path| fs::metadata(p).unwrap().modified().unwrap();
    let made = stamp(&replies);
    let again = pass(&context, &case);
    assert_eq!(stamp(&replies), made);
    for (a, b) in fresh.prompts.iter().zip(&again.prompts) {
        assert_eq!(
            (a.distances, a.noise, a.cold, a.small_batch, a.other_attention, a.handed),
            (b.distances, b.noise, b.cold, b.small_batch, b.other_attention, b.handed)
        );
        assert!(a.notes.is_empty() && b.notes[0].contains("kept"), "{:?} {:?}", a.notes, b.notes);
    }
    // Other questions are other references: one prompt less, and a damaged file.
    let fewer = Case { prompts: vec!["two".into()], ..case.clone() };
    assert!(pass(&context, &fewer).prompts[0].notes.is_empty());
    fs::write(&replies, b"no such thing").unwrap();
    assert!(pass(&context, &case).prompts[0].notes.is_empty());
    assert!(pass(&context, &case).prompts[0].notes[0].contains("kept"));
    // Whose server is not pinned keeps nothing.
    context.server = Some(PathBuf::from("/bin/false"));
    let report = run::run_case(&context, &case);
    assert!(
        report.verdict == Verdict::Error && report.reasons[0].contains("only the work of pinned servers"),
        "{:?}",
        report.reasons
    );
}

/// One prompt of a real model, by the way users see it.
#[test]
fn the_demonstration_works() {
    let demo = Demo {
        pin: "v4".into(),
        provider: provider_path(),
        threads: 1,
        prompt: Some("Name three things that float on water, and say in one sentence each why they do.".into()),
        ..Demo::default()
    };
    let outcome = demo::run(&Pins::load().unwrap(), &Cache::open().unwrap(), &demo).unwrap();
    assert_eq!(outcome.prompt_n, 1, "{}", outcome.text());
    assert!(outcome.succeeded());
    assert!(outcome.handed.text.len() > 20, "{}", outcome.text());
    let text = outcome.text();
    for word in ["provider's prefill", "restore", "server's own", "prompt_n", "handed over", "plain", "agrees"] {
        assert!(text.contains(word), "{word} is missing in:\n{text}");
    }
}

#[test]
fn a_servers_own_file_is_taken_and_a_sliding_window_one_is_not() {
    let context = context(Choice::Server);
    let report = pass(&context, &case("tiny/tiny-qwen3-f32/v3", &["two", "kitchen"]));
    assert_eq!(report.distances.layer, [0.0; 2]);
    assert_eq!(report.reused, 2);
    // What a server itself saves of a window is one cell short of being usable; asserted as it is.
    let report = pass(&context, &case("tiny/tiny-gemma3-f32/v3", &["kitchen"]));
    assert_eq!((report.reused, report.reprocessed), (0, 1));
}

#[test]
fn a_mistake_fails_a_case_and_says_where() {
    let context = context(Choice::Oracle("epsilon".parse().ok()));
    let report = run::run_case(&context, &case("tiny/tiny-llama-f32/v4", &["kitchen"]));
    assert_eq!(report.verdict, Verdict::Fail);
    assert!(report.reasons.iter().any(|r| r.contains("layer 0")), "{:?}", report.reasons);
}

/// The provider's products are the oracle's and far from the server's; and what is not by the contract does not pass for it.
#[test]
fn int8_products_are_judged_by_the_oracles() {
    let case = case("int8-tiny/tiny-llama-q8_0/v4", &["kitchen", "letter", "json"]);
    let provider = context(Choice::Provider(provider_path()));
    let report = pass(&provider, &case);
    let from_oracle = report.from_oracle.unwrap();
    assert!(from_oracle.layer0[0] < 1e-3 && report.distances.layer0[0] > 5e-3, "{report:?}");
    assert_eq!((report.oracle.n, report.handed.n), (3, 3));
    pass(&context(Choice::Oracle(None)), &case);

    let report = run::run_case(&context(Choice::Server), &case);
    assert_eq!(report.verdict, Verdict::Fail);
    assert!(report.reasons[0].starts_with("layer 0 K, from the oracle"), "{:?}", report.reasons);
    // A kernel for some of the projections only: the processor computes the rest, and that is said instead of judged.
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("full_i8_D_K512_N256.elf"), "").unwrap();
    let some = Kernels { device: "oracle".into(), dir: dir.path().to_owned() };
    let report = run::run_case(&Context { kernels: Some(some), ..provider }, &case);
    assert_eq!(report.verdict, Verdict::Error);
    assert!(report.reasons[0].contains("should compute every projection"), "{:?}", report.reasons);
}

#[test]
fn what_a_producer_does_not_do_is_skipped_with_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let report =
        run::run_case(&context(Choice::Fixture(dir.path().to_owned())), &case("tiny/tiny-llama-f32/v4", &["kitchen"]));
    assert_eq!(report.verdict, Verdict::Skip);
    assert!(report.reasons[0].contains("tiny-tiny-llama-f32-kitchen.bin"), "{:?}", report.reasons);
}

#[test]
fn a_broken_file_fails_by_structure_and_is_not_fed_to_the_server() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tiny-tiny-llama-f32-kitchen.bin"), conformance::hostile::good().unwrap()).unwrap();
    let report =
        run::run_case(&context(Choice::Fixture(dir.path().to_owned())), &case("tiny/tiny-llama-f32/v4", &["kitchen"]));
    assert_eq!(report.verdict, Verdict::Fail);
    assert!(report.reasons.iter().any(|r| r.contains("structure")), "{:?}", report.reasons);
    assert!(report.prompts[0].handed.is_none());
}

/// Stands in for a `llama-server` program: the same options, served from a pinned wheel.
fn fake_llama_server(dir: &Path) -> PathBuf {
    let (pins, cache) = (Pins::load().unwrap(), Cache::open().unwrap());
    let wheel = cache.install_server(pins.server("v3").unwrap()).unwrap();
    let path = dir.join("llama-server");
    let python = Python::find().unwrap();
    let python = String::from_utf8(
        Command::new(python.program()).args(["-c", "import sys; print(sys.executable)"]).output().unwrap().stdout,
    )
    .unwrap();
    let script = format!(
        r#"#!{python}
import sys
sys.path.insert(0, {wheel:?})
import argparse, threading
a = argparse.ArgumentParser(allow_abbrev=False)
for o in ["--host", "--port", "-m", "--slot-save-path", "-c", "-np", "-ub", "-ctk", "-ctv", "-fa", "-t", "--cache-ram"]:
    a.add_argument(o, required=True)
for o in ["--no-warmup", "--offline", "--swa-full"]:
    a.add_argument(o, action="store_true")
o = vars(a.parse_args())
import xllamacpp as x
p = x.CommonParams()
p.model.path, p.slot_save_path, p.hostname, p.port = o["m"], o["slot_save_path"], o["host"], int(o["port"])
p.n_ctx, p.n_parallel, p.n_ubatch, p.cpuparams.n_threads = int(o["c"]), int(o["np"]), int(o["ub"]), int(o["t"])
types = {{"f32": 0, "f16": 1, "bf16": 30}}
p.cache_type_k, p.cache_type_v = x.ggml_type(types[o["ctk"]]), x.ggml_type(types[o["ctv"]])
p.flash_attn_type = x.llama_flash_attn_type({{"on": 1, "off": 0}}[o["fa"]])
p.cache_ram_mib, p.swa_full, p.warmup, p.endpoint_slots = int(o["cache_ram"]), o["swa_full"], False, True
server = x.Server(p)
threading.Event().wait()
"#,
        python = python.trim(),
        wheel = wheel.to_str().unwrap(),
    );
    std::fs::write(&path, script).unwrap();
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn a_binary_of_the_users_own_is_a_server_too_and_dies_with_us() {
    let dir = tempfile::tempdir().unwrap();
    let binary = fake_llama_server(dir.path());
    let model = fixtures::find("tiny-llama-f32").unwrap().write(dir.path()).unwrap();
    let options = ServerOptions {
        n_ctx: 1024,
        n_parallel: 2,
        type_k: CacheType::Bf16,
        flash_attn: false,
        type_v: CacheType::F32,
        ..ServerOptions::new(&model, dir.path())
    };
    let mut server = Server::start(&Build::Binary { path: binary.clone() }, &options, &dir.path().join("log")).unwrap();
    server.client.ban = fixtures::unprintable();

    // Probing it gives the provider's configuration.
    let base = server.client.base().to_owned();
    let found = probe::Probe::of(&base, dir.path(), &conformance::locate::provider_for_tests).unwrap();
    assert_eq!((found.version.number(), found.n_stream, found.flash_attn, found.n_ctx), (3, 2, false, 512));
    assert_eq!((found.type_k, found.type_v), (CacheType::Bf16, CacheType::F32));
    let out = dir.path().join("config/config.toml");
    let status = Command::new(env!("CARGO_BIN_EXE_conformance"))
        .args(["pin", "probe", "--url", &base, "--slots"])
        .arg(dir.path())
        .arg("--out")
        .arg(&out)
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    let config: toml::Table = std::fs::read_to_string(&out).unwrap().parse().unwrap();
    assert_eq!(config["state_version"].as_integer(), Some(3));
    assert_eq!(config["cache_type_k"].as_str(), Some("bf16"));
    assert_eq!(config["flash_attn"].as_bool(), Some(false));

    // Dropping it ends the program under the shell, too.
    let client = server.client.clone();
    drop(server);
    let began = Instant::now();
    while client.healthy() {
        assert!(began.elapsed() < Duration::from_secs(5), "the server is still there");
        std::thread::sleep(Duration::from_millis(20));
    }

    // A case on it.
    let mut context = context(Choice::Server);
    context.server = Some(binary);
    pass(&context, &case("tiny/tiny-llama-f32/v3", &["two", "kitchen"]));
}

#[test]
fn a_server_that_cannot_start_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("broken.gguf");
    std::fs::write(&model, b"GGUF no more").unwrap();
    let build = Build::pinned(&Pins::load().unwrap(), &Cache::open().unwrap(), "v4").unwrap();
    let Err(error) = Server::start(&build, &ServerOptions::new(&model, dir.path()), &dir.path().join("log")) else {
        panic!("a broken model was loaded")
    };
    let text = format!("{error:#}");
    assert!(text.contains("broken.gguf") && text.contains("log"), "{text}");
}
