//! Everything that is not done: the exit status, the one line that says why, and that no output is left.

mod common;

use common::{N_VOCAB, Ran, Scene, model, program, zeros};
use gguf::GgmlType;

#[track_caller]
fn refused(scene: &Scene, more: &[&str], code: i32, says: &str) {
    let ran = scene.run(more);
    ran.failed(code, says);
    assert_eq!(scene.left(), [""; 0], "{more:?}");
}

#[test]
fn usage() {
    let scene = Scene::new(5);
    for more in [
        &["--what"][..],
        &["extra"],
        &["--out", "again"],
        &["-ctk", "f17"],
        &["-fa", "perhaps"],
        &["-t", "0"],
        &["-t", "-2"],
        &["-t", "many"],
        &["--chunk", "0"],
        &["--deadline", "0"],
        &["--state-version", "5"],
        &["--max-memory", "much"],
        &["--device", "gpu"],
    ] {
        refused(&scene, more, 2, "");
    }
    for missing in ["--tokens", "--out", "--model"] {
        let mut c = program();
        for (name, value) in [("--tokens", &scene.ids), ("--out", &scene.out), ("--model", &scene.model)] {
            if name != missing {
                c.arg(name).arg(value);
            }
        }
        Ran::from(c.output().unwrap()).failed(2, missing);
    }
    for (name, value) in [
        ("LLAMA_ARG_CTX_SIZE", "x"),
        ("LLAMA_ARG_CACHE_TYPE_K", "f17"),
        ("LLAMA_ARG_THREADS", "two"),
        ("NPU_PREFILL_DEADLINE", "-1"),
    ] {
        let ran = Ran::from(scene.command().env(name, value).output().unwrap());
        ran.failed(2, name);
    }
    assert_eq!(scene.left(), [""; 0]);
}

#[test]
fn ids_files() {
    let scene = Scene::new(0);
    let cases: &[(&[u8], &str)] = &[
        (b"", "empty"),
        (b"\n", "nothing to hand over"),
        (b"[]", "empty"),
        (b"1\n-2\n", "line 2 (byte 2): id -2 is negative"),
        (b"1\n2\n320\n", "line 3 (byte 4): id 320 is not in the vocabulary, whose 320 ids are 0 to 319"),
        (b"1\ntwo\n", "line 2 (byte 2): \"two\""),
        (b"1.5", "line 1 (byte 0)"),
        (b"1,,2", "a comma with no id"),
        (b"[1,2", "as JSON"),
        (b"[1,-2]", "element 1: id -2 is negative"),
        (b"{\"prompt\":[1]}", "neither \"tokens\" nor \"ids\""),
        (b"\x01\0\0\0\x02\0\0", "7 bytes"),
        (b"\x01\0\0\0\xff\xff\xff\xff", "byte 4: id -1 is negative"),
        (b"\xff\xfe1\0", "UTF-16"),
    ];
    for (bytes, says) in cases {
        std::fs::write(&scene.ids, bytes).unwrap();
        let ran = scene.run::<&str>(&[]);
        ran.failed(65, says);
        assert!(ran.stderr.contains("ids.txt"), "{ran:?}");
        assert_eq!(scene.left(), [""; 0]);
    }
    assert_eq!(N_VOCAB, 320);
}

#[test]
fn inputs_that_are_missing() {
    let scene = Scene::new(5);
    let run = |ids: &str, model: &str| {
        let mut c = program();
        c.args(["--tokens", ids, "--model", model, "--out"]).arg(&scene.out);
        Ran::from(c.output().unwrap())
    };
    let (ids, gguf, dir) =
        (scene.ids.to_str().unwrap(), scene.model.to_str().unwrap(), scene.dir.path().to_str().unwrap());
    run("/nowhere/ids", gguf).failed(66, "/nowhere/ids");
    run(dir, gguf).failed(66, "directory");
    run(ids, "/nowhere/model.gguf").failed(66, "/nowhere/model.gguf");
    run(ids, dir).failed(66, "directory");
    assert_eq!(scene.left(), [""; 0]);
}

#[test]
fn models_that_are_malformed() {
    let scene = Scene::new(5);
    let good = model(2, |_| ()).finish();
    let path = scene.path("bad.gguf");
    let mut cases: Vec<(&str, Vec<u8>)> = vec![
        ("empty", vec![]),
        ("4 bytes", good[..4].to_vec()),
        ("32 bytes", good[..32].to_vec()),
        ("cut by one byte", good[..good.len() - 1].to_vec()),
        ("cut in half", good[..good.len() / 2].to_vec()),
        ("not GGUF", b"once upon a time there was a file".to_vec()),
    ];
    for key in ["block_count", "embedding_length", "attention.head_count"] {
        let w = model(2, |w| {
            w.remove(&format!("llama.{key}"));
        });
        cases.push((key, w.finish()));
        let w = model(2, |w| {
            w.remove(&format!("llama.{key}"));
            w.u32(&format!("llama.{key}"), 0);
        });
        cases.push((key, w.finish()));
    }
    for (what, bytes) in cases {
        std::fs::write(&path, bytes).unwrap();
        let mut c = program();
        c.arg("--tokens").arg(&scene.ids).arg("--out").arg(&scene.out).arg("--model").arg(&path);
        let ran = Ran::from(c.output().unwrap());
        ran.failed(65, "bad.gguf");
        assert_eq!(scene.left(), [""; 0], "{what}");
    }
}

#[test]
fn what_is_not_supported() {
    let scene = Scene::new(5);
    refused(&scene, &["--device", "npu"], 69, "--device npu: it needs kernels");
    // The heads of this model have 16 channels.
    refused(&scene, &["-ctk", "q8_0"], 69, "a K cache of q8_0 for heads of 16 channels");
    let ran = Ran::from(scene.command().env("LLAMA_ARG_CACHE_TYPE_V", "q4_0").output().unwrap());
    ran.failed(69, "a V cache of q4_0 for heads of 16 channels");
    refused(&scene, &["--isa", "abacus"], 69, "abacus");
    let path = scene.path("other.gguf");
    let mut c = program();
    c.arg("--tokens").arg(&scene.ids).arg("--out").arg(&scene.out).arg("--model").arg(&path);
    model(2, |w| {
        w.remove("general.architecture");
        w.str("general.architecture", "rwkv7");
    })
    .write(&path)
    .unwrap();
    Ran::from(c.output().unwrap()).failed(69, "rwkv7");
    assert_eq!(scene.left(), [""; 0]);
    // A type that ggml has given up.
    let mut w = gguf::write::Writer::new("llama");
    let written = w.tensor("token_embd.weight", GgmlType::Q4_2, &[64, 2], zeros(GgmlType::Q4_2, &[64, 2])).is_ok();
    if written {
        w.write(&path).unwrap();
        Ran::from(c.output().unwrap()).failed(69, "Q4_2");
    }
}

#[test]
fn outputs_that_cannot_be_made() {
    let scene = Scene::new(5);
    let out = |path: &str| {
        let mut c = program();
        c.arg("--tokens").arg(&scene.ids).arg("--model").arg(&scene.model).args(["--out", path]);
        Ran::from(c.output().unwrap())
    };
    out("/nowhere/at/all.bin").failed(73, "does not exist");
    out("/proc/state.bin").failed(73, "/proc");
    out("/sys/state.bin").failed(73, "/sys");
    out(&format!("{}/tiny.gguf/state.bin", scene.dir.path().display())).failed(73, "not a directory");
    out(scene.slots.to_str().unwrap()).failed(73, "directory");
    out(&format!("{}/{}", scene.slots.display(), "x".repeat(300))).failed(73, "long");
    out(&format!("{}/", scene.slots.display())).failed(2, "not the name of a file");
    out("..").failed(2, "not the name of a file");
    out(scene.model.to_str().unwrap()).failed(2, "same file");
    out(scene.ids.to_str().unwrap()).failed(2, "same file");
    assert_eq!(scene.left(), [""; 0]);
    let link = scene.slots.join("link.bin");
    for target in ["elsewhere.bin", "/etc/hostname"] {
        std::os::unix::fs::symlink(target, &link).unwrap();
        out(link.to_str().unwrap()).failed(73, "symbolic link");
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        std::fs::remove_file(&link).unwrap();
    }
    assert_eq!(scene.left(), [""; 0]);
}

#[test]
fn parameters_that_do_not_fit() {
    let scene = Scene::new(300);
    refused(&scene, &["-c", "256"], 76, "do not fit the decoder's context of 256");
    refused(&scene, &["--max-memory", "1M"], 76, "--max-memory");
    scene.run(&["-c", "257"]).receipt(); // the server rounds up to 512
    std::fs::remove_file(&scene.out).unwrap();
    scene.run(&["-c", "0", "--max-memory", "1G"]).receipt();
    std::fs::remove_file(&scene.out).unwrap();
    // A decoder that writes a version of the future.
    std::fs::write(scene.slots.join("a.bin"), b"qsgg\x09\0\0\0\0\0\0\0").unwrap();
    let ran = scene.run::<&str>(&[]);
    ran.failed(76, "--state-version");
    assert_eq!(scene.left(), ["a.bin"]);
}

#[test]
fn values_that_are_not_finite() {
    let scene = Scene::new(7);
    // An embedding that is not a number, used at position 3.
    let mut bytes = std::fs::read(&scene.model).unwrap();
    let at = {
        let g = gguf::Gguf::open(&scene.model).unwrap();
        let t = g.tensor("token_embd.weight").unwrap();
        t.offset as usize + scene.tokens[3] as usize * t.row_bytes() as usize
    };
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&scene.model, bytes).unwrap();
    let ran = scene.run::<&str>(&[]);
    let first = scene.tokens.iter().position(|id| *id == scene.tokens[3]).unwrap();
    ran.failed(76, &format!("position {first}"));
    assert!(ran.stderr.contains("layer 0"), "{ran:?}");
    assert_eq!(scene.left(), [""; 0]);
}

#[test]
fn prompts_not_worth_it() {
    let scene = Scene::new(8);
    refused(&scene, &["--min-tokens", "9"], 77, "8 ids, fewer than the 9");
    scene.run(&["--min-tokens", "8"]).receipt();
}

#[test]
fn wrong_configuration() {
    let scene = Scene::new(5);
    let config = scene.path("c.toml");
    for (text, says) in [
        ("state_version = \"4\"", "state_version"),
        ("state_version = 7", "state_version = 7"),
        ("cache_type_k = true", "cache_type_k"),
        ("not toml", "c.toml"),
        ("flash_attn = 17", "flash_attn"),
    ] {
        std::fs::write(&config, text).unwrap();
        refused(&scene, &["--config", config.to_str().unwrap()], 78, says);
        let ran = Ran::from(scene.command().env("NPU_PREFILL_CONFIG", &config).output().unwrap());
        ran.failed(78, "c.toml");
    }
    refused(&scene, &["--config", "/nowhere/c.toml"], 78, "/nowhere/c.toml");
    refused(&scene, &["--elfs", "/nowhere"], 78, "--elfs /nowhere");
    refused(&scene, &["--elfs", scene.model.to_str().unwrap()], 78, "not a directory");
    let ran = Ran::from(scene.command().env("ONEBIT_HYBRID_ELFS", "/nowhere").output().unwrap());
    ran.failed(78, "ONEBIT_HYBRID_ELFS /nowhere");
}
