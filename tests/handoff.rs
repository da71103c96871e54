//! Handoffs that are made: what is written, what is said, and what the options change.

mod common;

use common::{Ran, Scene, check_state, hybrid, model_of_heads, program};
use kvlayout::{CacheType, Section, State, StateVersion, TokenForm};

fn stream(state: &State) -> &kvlayout::Stream {
    match &state.sections[0] {
        Section::Kv(kv) => &kv.streams[0],
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_whole_state_and_one_line() {
    let scene = Scene::new(40);
    let ran = scene.run::<&str>(&[]);
    let receipt = ran.receipt();
    let state = scene.state();
    assert_eq!(state.version, StateVersion::V3);
    assert_eq!(state.form, TokenForm::Plain);
    let s = stream(&state);
    assert_eq!((s.cells.len(), s.k.len(), s.v.len(), s.v_trans), (40, 2, 2, false));
    assert_eq!((s.k[0].ty, s.k[0].width), (CacheType::F16, 32));

    assert!(receipt["prefill_ms"].as_f64().unwrap() > 0.0);
    assert_eq!(receipt["n_tokens"], 40);
    assert_eq!(receipt["state_version"], 3);
    assert_eq!(receipt["bytes"], std::fs::metadata(&scene.out).unwrap().len());
    assert_eq!(receipt["out"], scene.out.to_str().unwrap());
    assert_eq!(receipt["device"], "cpu");
    for key in
        ["write_ms", "load_ms", "first_gemm_ms", "total_ms", "threads", "chunk", "peak_rss_bytes", "tokens_per_second"]
    {
        assert!(receipt[key].as_f64().unwrap() > 0.0, "{key} in {receipt}");
    }
    assert!(ran.stderr.contains("state version 3: assumed"), "{ran:?}");
    assert_eq!(scene.left(), ["state.bin"]);
}

/// Heads of 64 channels, whose quantised rows servers rotate: version 4 says so in the file, for the others somebody has to.
#[test]
fn quantised_caches_and_their_rotation() {
    let scene = Scene::new(20);
    std::fs::write(&scene.model, model_of_heads(2, 1, 1, |_| ()).finish()).unwrap();
    let types = ["-ctk", "q8_0", "-ctv", "q4_0"];
    let run = |more: &[&str]| scene.run(&[&types, more].concat());
    let receipt = run(&["--state-version", "4"]).receipt();
    assert_eq!((&receipt["cache_type_k"], &receipt["cache_type_v"]), (&"q8_0".into(), &"q4_0".into()));
    let rotated = scene.state();
    let s = stream(&rotated);
    assert_eq!((s.n_rot, s.k[0].ty, s.v[1].ty), (Some((64, 64)), CacheType::Q8_0, CacheType::Q4_0));
    run(&["--state-version", "4", "--attn-rot", "off"]).receipt();
    let plain = scene.state();
    assert_eq!(stream(&plain).n_rot, Some((0, 0)));
    // The same rows but for what 8 bits leave out, and after the first layer what 4 bits of V do; without the rotation back
    // they are far apart.
    for e in kvlayout::compare::numeric(&plain, &rotated).unwrap() {
        let eight_bits = e.part == kvlayout::Part::K && e.layer == 0;
        assert!(e.rel_l2 > 1e-4 && e.rel_l2 < if eight_bits { 0.02 } else { 0.2 }, "{e:?}");
    }
    std::fs::remove_file(&scene.out).unwrap();
    for version in ["2", "3"] {
        run(&["--state-version", version]).failed(76, "whether the decoder rotates such rows");
        assert_eq!(scene.left(), [""; 0]);
    }
    let same_as = |ran: Ran, want: &State| {
        ran.receipt();
        assert!(kvlayout::compare::numeric(want, &scene.state()).unwrap().iter().all(|e| e.equal == e.values));
    };
    same_as(run(&["--state-version", "3", "--attn-rot", "on"]), &rotated);
    let with = |name: &str, value: &str| {
        let mut c = scene.command();
        Ran::from(c.args(types).args(["--state-version", "2"]).env(name, value).output().unwrap())
    };
    same_as(with("NPU_PREFILL_ATTN_ROT", "on"), &rotated);
    same_as(with("LLAMA_ATTN_ROT_DISABLE", "1"), &plain);
    with("LLAMA_ATTN_ROT_DISABLE", "0").failed(76, "--attn-rot");
    let config = scene.path("config.toml");
    std::fs::write(&config, "attn_rot = true\n").unwrap();
    same_as(run(&["--state-version", "2", "--config", config.to_str().unwrap()]), &rotated);
    // Values in blocks have no transposed form; keys are rows all the same.
    std::fs::remove_file(&scene.out).unwrap();
    run(&["--state-version", "4", "-fa", "off"]).failed(76, "V cache type q4_0 with flash attention off");
    scene.run(&["-ctk", "q5_1", "-fa", "off", "--state-version", "4"]).receipt();
    assert_eq!(stream(&scene.state()).n_rot, Some((64, 0)));
}

#[test]
fn recurrent_state_is_that_of_the_last_id() {
    for n in [1, 2, 40] {
        let scene = Scene::new(n);
        hybrid().write(&scene.model).unwrap();
        for version in ["2", "3", "4"] {
            scene.run(&["--state-version", version]).receipt();
            let state = scene.state();
            let Section::Rec(rec) = &state.sections[1] else { panic!("{:?}", state.shape()) };
            assert_eq!((rec.n_layer, rec.cells.len(), rec.cells[0].pos), (2, 1, n as i32 - 1));
            let widths: Vec<u32> = rec.records.iter().map(|t| t.width).collect();
            assert_eq!((widths, stream(&state).cells.len()), (vec![128, 0], n));
        }
    }
}

#[test]
fn the_same_prompt_gives_the_same_bytes_anywhere() {
    let scene = Scene::new(33);
    scene.run::<&str>(&[]).receipt();
    let first = std::fs::read(&scene.out).unwrap();
    // From another directory, by relative names, with another environment, over the file that is there.
    let ran = program()
        .current_dir(&scene.slots)
        .envs([("LANG", "tr_TR.UTF-8"), ("TZ", "Asia/Tokyo"), ("HOME", "/nowhere"), ("RUST_BACKTRACE", "1")])
        .args(["--tokens", "ids.txt", "--out", "state.bin", "--model", "../tiny.gguf"])
        .output()
        .unwrap();
    Ran::from(ran).receipt();
    assert_eq!(std::fs::read(&scene.out).unwrap(), first);
    let ran = Ran::from(scene.command().current_dir("/").arg("--out").output().unwrap());
    assert_eq!(ran.code, Some(2));
}

#[test]
fn what_must_match_the_decoder() {
    let scene = Scene::new(20);
    scene.run(&["-ctk", "f32", "-ctv", "bf16", "-fa", "off", "--state-version", "4", "-c", "512"]).receipt();
    let state = scene.state();
    let s = stream(&state);
    assert_eq!((state.version, s.v_trans, s.n_rot), (StateVersion::V4, true, Some((0, 0))));
    assert_eq!((s.k[1].ty, s.v[1].ty), (CacheType::F32, CacheType::Bf16));

    // Flag beats variable beats configuration beats default.
    let config = scene.path("config.toml");
    std::fs::write(&config, "state_version = 2\ncache_type_k = \"f32\"\ncache_type_v = \"f32\"\nflash_attn = false\n")
        .unwrap();
    let run = |more: &[&str]| {
        let _ = std::fs::remove_file(&scene.out);
        let mut c = scene.command();
        c.args(more).env("NPU_PREFILL_CONFIG", &config);
        c.envs([
            ("LLAMA_ARG_CACHE_TYPE_V", "bf16"),
            ("LLAMA_ARG_FLASH_ATTN", "enabled"),
            ("NPU_PREFILL_MIN_TOKENS", ""),
        ]);
        let receipt = Ran::from(c.output().unwrap()).receipt();
        (scene.state(), receipt)
    };
    let (state, receipt) = run(&[]);
    let s = stream(&state);
    assert_eq!(
        (state.version, s.k[0].ty, s.v[0].ty, s.v_trans),
        (StateVersion::V2, CacheType::F32, CacheType::Bf16, false)
    );
    assert!(receipt["state_version_from"].as_str().unwrap().contains("config.toml"));
    let (state, _) = run(&["-ctv", "f16", "--cache-type-k", "bf16", "--flash-attn", "off"]);
    let s = stream(&state);
    assert_eq!((s.k[0].ty, s.v[0].ty, s.v_trans), (CacheType::Bf16, CacheType::F16, true));
}

#[test]
fn the_configuration_is_found_at_its_usual_place() {
    let scene = Scene::new(5);
    let dir = scene.path("home/.config/npu-prefill");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("config.toml"), "state_version = 4\nn_stream = 2\nfuture = [1]\n").unwrap();
    Ran::from(scene.command().env("HOME", scene.path("home")).output().unwrap()).receipt();
    let state = scene.state();
    assert_eq!(state.version, StateVersion::V4);
    let Section::Kv(kv) = &state.sections[0] else { panic!() };
    assert_eq!((kv.streams.len(), kv.streams[1].cells.len()), (2, 0));
    // A relative XDG_CONFIG_HOME is to be ignored; an absolute one without the file means there is none.
    std::fs::remove_file(&scene.out).unwrap();
    let xdg = scene.path("xdg");
    let ran = scene.command().env("HOME", scene.path("home")).env("XDG_CONFIG_HOME", xdg).output().unwrap();
    assert_eq!(Ran::from(ran).receipt()["state_version"], 3);
}

#[test]
fn auto_takes_the_version_of_the_newest_state_beside_the_output() {
    let scene = Scene::new(6);
    let first = scene.slots.join("first.bin");
    for version in ["2", "4"] {
        let mut c = scene.command();
        c.args(["--state-version", version]);
        Ran::from(c.output().unwrap()).receipt();
        std::fs::rename(&scene.out, &first).unwrap();
        let ran = scene.run::<&str>(&[]);
        assert_eq!(ran.receipt()["state_version"], version.parse::<u32>().unwrap(), "{ran:?}");
        assert!(ran.stderr.contains("first.bin"), "{ran:?}");
        std::fs::remove_file(&scene.out).unwrap();
    }
}

#[test]
fn every_encoding_of_the_ids() {
    let scene = Scene::new(0);
    let want = [7, 0, 319, 12];
    let list = "7 0 319 12";
    let raw: Vec<u8> = want.iter().flat_map(|id| i32::to_le_bytes(*id)).collect();
    let good: Vec<(&str, Vec<u8>)> = vec![
        ("lines", list.replace(' ', "\n").into()),
        ("lines, newline at the end", (list.replace(' ', "\n") + "\n").into()),
        ("CRLF", (list.replace(' ', "\r\n") + "\r\n").into()),
        ("blanks", list.into()),
        ("commas", list.replace(' ', ",").into()),
        ("commas and blanks", list.replace(' ', ", ").into()),
        ("byte order mark", format!("\u{feff}{list}\n").into()),
        ("blank lines and tabs", format!("\n\n\t{}\n\n", list.replace(' ', "\n\n")).into()),
        ("JSON array", format!("[{}]", list.replace(' ', ", ")).into()),
        ("JSON tokens", format!("{{\"tokens\": [{}]}}\n", list.replace(' ', ",")).into()),
        ("JSON ids", format!("{{\"n\": 4, \"ids\": [{}]}}", list.replace(' ', ",")).into()),
        ("raw", raw),
    ];
    let mut first: Option<Vec<u8>> = None;
    for (what, bytes) in good {
        std::fs::write(&scene.ids, bytes).unwrap();
        scene.run::<&str>(&[]).receipt();
        check_state(&scene.out, &want);
        let state = std::fs::read(&scene.out).unwrap();
        assert_eq!(*first.get_or_insert(state.clone()), state, "{what}");
    }
    // A pipe will do.
    let script = "printf '7 0 319 12' | \"$0\" --tokens /dev/stdin --out \"$1\" --model \"$2\"";
    let mut c = std::process::Command::new("/bin/sh");
    c.args(["-c", script, common::BIN]).arg(&scene.out).arg(&scene.model);
    Ran::from(c.output().unwrap()).receipt();
    assert_eq!(Some(std::fs::read(&scene.out).unwrap()), first);
}

#[test]
fn threads_are_clamped_with_a_note() {
    let scene = Scene::new(9);
    let ran = scene.run(&["-t", "10000"]);
    let threads = ran.receipt()["threads"].as_u64().unwrap();
    assert!((1..10_000).contains(&threads) && ran.stderr.contains("10000 threads are too many"), "{ran:?}");
    // What the server takes for its default is ours, too.
    let cpus = std::thread::available_parallelism().unwrap().get();
    for value in ["0", "-1", ""] {
        let ran = Ran::from(scene.command().env("LLAMA_ARG_THREADS", value).output().unwrap());
        assert_eq!(ran.receipt()["threads"], cpus);
    }
    assert_eq!(scene.run(&["-t", "1"]).receipt()["threads"], 1);
}

#[test]
fn the_mode_is_what_the_umask_leaves() {
    use std::os::unix::fs::PermissionsExt;
    let scene = Scene::new(3);
    for (umask, mode) in [("022", 0o644), ("077", 0o600)] {
        let _ = std::fs::remove_file(&scene.out);
        let script = format!("umask {umask}; exec \"$0\" \"$@\"");
        let mut c = std::process::Command::new("/bin/sh");
        c.args(["-c", &script, common::BIN]);
        c.arg("--tokens").arg(&scene.ids).arg("--out").arg(&scene.out).arg("--model").arg(&scene.model);
        Ran::from(c.output().unwrap()).receipt();
        assert_eq!(std::fs::metadata(&scene.out).unwrap().permissions().mode() & 0o777, mode);
    }
}

#[test]
fn a_split_model_by_any_of_its_shards() {
    let scene = Scene::new(12);
    scene.run::<&str>(&[]).receipt();
    let whole = std::fs::read(&scene.out).unwrap();
    let shards = common::model(2, |_| ()).write_split(scene.dir.path(), "split", 3).unwrap();
    for shard in &shards {
        let mut c = program();
        c.arg("--tokens").arg(&scene.ids).arg("--out").arg(&scene.out).arg("--model").arg(shard);
        Ran::from(c.output().unwrap()).receipt();
        assert_eq!(std::fs::read(&scene.out).unwrap(), whole);
    }
    std::fs::remove_file(&shards[1]).unwrap();
    std::fs::remove_file(&scene.out).unwrap();
    let mut c = program();
    c.arg("--tokens").arg(&scene.ids).arg("--out").arg(&scene.out).arg("--model").arg(&shards[0]);
    Ran::from(c.output().unwrap()).failed(66, "split-00002-of-00003.gguf");
}

#[test]
fn memory_is_estimated_before_it_is_used() {
    let scene = Scene::new(4000);
    let receipt = scene.run(&["--chunk", "2048"]).receipt();
    let (estimate, peak) =
        (receipt["memory_estimate_bytes"].as_f64().unwrap(), receipt["peak_rss_bytes"].as_f64().unwrap());
    // Of so small a model the program itself is the larger part, and that is a round number in the estimate.
    let most = 1.2 * peak + f64::from(8 << 20);
    assert!(peak <= 1.1 * estimate && estimate <= most, "estimate {estimate}, peak {peak}");
}

#[test]
fn the_chunk_changes_nothing_that_counts() {
    let scene = Scene::new(150);
    scene.run::<&str>(&[]).receipt();
    let whole = scene.slots.join("whole.bin");
    std::fs::rename(&scene.out, &whole).unwrap();
    for chunk in ["1", "7", "64", "149", "1000"] {
        assert!(scene.run(&["--chunk", chunk]).receipt()["chunk"].as_u64().unwrap() <= 150);
        let (a, b) = (check_state(&whole, &scene.tokens), scene.state());
        for layer in kvlayout::compare::numeric(&a, &b).unwrap() {
            assert!(layer.rel_l2 < 1e-3, "chunk {chunk}: {layer:?}");
        }
    }
}

#[test]
fn closed_streams_change_nothing() {
    let scene = Scene::new(30);
    scene.run::<&str>(&[]).receipt();
    let want = std::fs::read(&scene.out).unwrap();
    for redirect in [">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full", "| true", "2>&1 | true"] {
        std::fs::remove_file(&scene.out).unwrap();
        // The program's own exit status, even at the head of a pipe.
        let script = format!("{{ \"$@\"; echo $? >\"$0\"; }} {redirect}");
        let status = scene.path("status");
        let mut c = std::process::Command::new("/bin/sh");
        c.args(["-c", &script]).arg(&status).arg(common::BIN);
        c.arg("--tokens").arg(&scene.ids).arg("--out").arg(&scene.out).arg("--model").arg(&scene.model);
        c.output().unwrap();
        let code = std::fs::read_to_string(&status).unwrap();
        assert_eq!(code.trim(), "0", "{redirect}");
        assert_eq!(std::fs::read(&scene.out).unwrap(), want, "{redirect}");
    }
}
