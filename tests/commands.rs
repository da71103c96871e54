//! The commands beside the handoff, and the help.

mod common;

use common::{Ran, Scene, model, program};
use serde_json::Value;

fn run<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Ran {
    Ran::from(program().args(args).output().unwrap())
}

fn json(ran: &Ran) -> Value {
    assert_eq!(ran.stdout.matches('\n').count(), 1, "{ran:?}");
    serde_json::from_str(&ran.stdout).unwrap()
}

#[test]
fn help_and_version() {
    let ran = run(&["--help"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    for text in [
        "npu-prefill --tokens <IDS> --out <STATE> --model <GGUF> [--elfs <DIR>]",
        "npu-prefill --tokens <IDS> --model <GGUF> --layout <HEADER> --fds <N[,N...]>",
        "LLAMA_ARG_CTX_SIZE",
        "-ctk",
        "ONEBIT_HYBRID_ELFS",
        "Exit codes:",
        "After 79 the decoder must not adopt.",
    ] {
        assert!(ran.stdout.contains(text), "{text}");
    }
    let ran = run(&["--version"]);
    assert!(
        ran.code == Some(0) && ran.stdout.starts_with(concat!("npu-prefill ", env!("CARGO_PKG_VERSION"))),
        "{ran:?}"
    );
}

#[test]
fn without_arguments_it_says_what_it_is() {
    let ran = run::<&str>(&[]);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{ran:?}");
    assert!((8..=10).contains(&ran.stderr.lines().count()), "{ran:?}");
    assert!(ran.stderr.lines().all(|l| l.chars().count() <= 120), "{ran:?}");
    for text in ["npu-prefill setup", "npu-prefill --tokens IDS --out", "npu-prefill inspect FILE", "--help"] {
        assert!(ran.stderr.contains(text), "{text}");
    }
    // Anything typed is a call, and what is missing in it is named.
    run(&["-t", "1"]).failed(2, "missing: --tokens, --out, --model");
}

#[test]
fn inspect_a_model() {
    let scene = Scene::new(1);
    let path = scene.model.to_str().unwrap();
    let ran = run(&["inspect", path]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for text in ["architecture  llama", "supported     yes", "F32", "llama.block_count", "tensors       20"] {
        assert!(ran.stdout.contains(text), "no {text:?} in {}", ran.stdout);
    }
    let value = json(&run(&["inspect", "--json", path]));
    assert_eq!((&value["kind"], &value["supported"]), (&"gguf".into(), &true.into()));
    assert_eq!(value["keys"]["llama.block_count"], 2);
    assert_eq!(value["types"][0]["tensors"], 20);

    let other = scene.path("other.gguf");
    model(2, |w| {
        w.remove("general.architecture");
        w.str("general.architecture", "rwkv6");
    })
    .write(&other)
    .unwrap();
    let ran = run(&["inspect", other.to_str().unwrap()]);
    assert!(ran.code == Some(0) && ran.stdout.contains("supported     no: "), "{ran:?}");
}

#[test]
fn inspect_a_state() {
    let scene = Scene::new(30);
    scene.run(&["--state-version", "4"]).receipt();
    let path = scene.out.to_str().unwrap();
    let ran = run(&["inspect", path]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for text in ["version 4", "30 (plain list)", "30 cells, positions 0..29", "K 2 x 32 of f16", "faults        none"] {
        assert!(ran.stdout.contains(text), "no {text:?} in {}", ran.stdout);
    }
    let value = json(&run(&["inspect", path, "--json"]));
    assert_eq!((&value["version"], &value["n_tokens"]), (&4.into(), &30.into()));
    assert_eq!(value["sections"][0]["streams"][0]["k"][1]["width"], 32);
    assert_eq!(value["faults"].as_array().unwrap().len(), 0);

    // Bytes after the end: a server would not mind, we do.
    let mut bytes = std::fs::read(&scene.out).unwrap();
    bytes.extend([7; 100]);
    std::fs::write(&scene.out, &bytes).unwrap();
    let ran = run(&["inspect", path]);
    assert!(ran.code == Some(65) && ran.stdout.contains("fault ") && ran.stderr.contains("1 fault"), "{ran:?}");
    bytes.truncate(bytes.len() - 101);
    std::fs::write(&scene.out, &bytes).unwrap();
    let ran = run(&["inspect", path]);
    assert!(ran.code == Some(65) && ran.stderr.contains("state.bin"), "{ran:?}");
}

#[test]
fn inspect_something_else() {
    let scene = Scene::new(3);
    run(&["inspect", scene.ids.to_str().unwrap()]).failed(65, "neither");
    run(&["inspect", scene.slots.to_str().unwrap()]).failed(66, "slots");
    run(&["inspect", "/nowhere/x"]).failed(66, "/nowhere/x");
    std::fs::write(&scene.ids, "").unwrap();
    run(&["inspect", scene.ids.to_str().unwrap()]).failed(65, "empty");
    run(&["inspect"]).failed(2, "");
}

#[test]
fn compare_states() {
    let scene = Scene::new(30);
    scene.run::<&str>(&[]).receipt();
    let a = scene.slots.join("a.bin");
    std::fs::rename(&scene.out, &a).unwrap();
    scene.run::<&str>(&[]).receipt();
    let (a, b) = (a.to_str().unwrap(), scene.out.to_str().unwrap());
    let ran = run(&["compare", a, b]);
    assert!(ran.code == Some(0) && ran.stdout.contains("all values are equal"), "{ran:?}");

    // Another value in the last row of the last tensor.
    let mut bytes = std::fs::read(b).unwrap();
    let n = bytes.len();
    bytes[n - 1] ^= 0x80;
    std::fs::write(b, &bytes).unwrap();
    let value = json(&run(&["compare", "--json", a, b]));
    let last = value["layers"].as_array().unwrap().last().unwrap();
    assert!(last["rel_l2"].as_f64().unwrap() > 0.0 && last["worst_row"] == 29, "{last}");
    assert_eq!(value["differences"].as_array().unwrap().len(), 0);
    assert_eq!(value["layers"][0]["rel_l2"], 0.0);

    // Another version is another structure.
    scene.run(&["--state-version", "2"]).receipt();
    let ran = run(&["compare", a, b]);
    assert!(ran.code == Some(65) && ran.stdout.contains("differs:") && ran.stderr.contains("1 field"), "{ran:?}");
    // So is another prompt.
    scene.write_ids(&[1, 2, 3]);
    scene.run::<&str>(&[]).receipt();
    assert_eq!(run(&["compare", a, b]).code, Some(65));
    run(&["compare", a, "/nowhere"]).failed(66, "/nowhere");
    run(&["compare", a, scene.ids.to_str().unwrap()]).failed(65, "ids.txt");
}

#[test]
fn plan_and_models() {
    let scene = Scene::new(1);
    let path = scene.model.to_str().unwrap();
    let ran = run(&["plan", "--model", path, "-n", "100", "--chunk", "32"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for text in ["100 positions", "32", "of memory"] {
        assert!(ran.stdout.contains(text), "no {text:?} in {}", ran.stdout);
    }
    run(&["plan", "--model", path, "-n", "0"]).failed(2, "");
    run(&["plan", "--model", "/nowhere", "-n", "1"]).failed(66, "/nowhere");
    let ran = run(&["models"]);
    assert_eq!(ran.code, Some(0));
    for name in ["llama", "qwen2", "qwen3", "gemma3", "f16"] {
        assert!(ran.stdout.contains(name), "{name}");
    }
    let ran = run(&["environment"]);
    assert!(ran.stdout.contains("| `NPU_PREFILL_CONFIG` | `--config` |"), "{ran:?}");
}
