//! A checkpoint behind a state, as the provider writes it or not. What a server does with it is in the cases of models with a window.

use conformance::{fixtures, locate};
use kvlayout::State;
use std::path::Path;
use std::process::{Command, Output};

/// The provider with these options on `n` ids of a model whose window is 32; what it said, and the file.
fn run(provider: &Path, dir: &Path, n: usize, options: &[&str], variable: Option<&str>) -> (Output, Vec<u8>) {
    let model = fixtures::find("tiny-gemma3-f32").unwrap().write(dir).unwrap();
    let (ids, out) = (dir.join("ids"), dir.join("slots/out.bin"));
    std::fs::create_dir_all(dir.join("slots")).unwrap();
    std::fs::write(&ids, (0..n).map(|i| format!("{}\n", 10 + i * 7 % 90)).collect::<String>()).unwrap();
    let _ = std::fs::remove_file(&out);
    let mut c = Command::new(provider);
    c.env_clear().arg("--tokens").arg(&ids).arg("--out").arg(&out).arg("--model").arg(&model).args(options);
    if let Some(value) = variable {
        c.env("NPU_PREFILL_CHECKPOINT", value);
    }
    let output = c.output().unwrap();
    (output, std::fs::read(&out).unwrap_or_default())
}

#[test]
fn it_is_written_where_a_server_may_read_it_and_needs_it() {
    let provider = locate::provider_for_tests().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let run = |n: usize, options: &[&str], variable| run(&provider, dir.path(), n, options, variable);
    let plain = run(20, &["--state-version", "4", "--checkpoint", "off"], None).1;
    let plain_3 = run(20, &["--state-version", "3"], None).1;
    for (n, options, variable, want) in [
        (20, &["--state-version", "4"][..], None, true),
        (20, &["--state-version", "4", "--checkpoint", "auto"], Some("off"), true),
        (20, &["--state-version", "4"], Some("off"), false),
        (20, &["--state-version", "3"], None, false),
        (20, &["--state-version", "3"], Some("on"), true),
        (32, &["--state-version", "4"], None, true),
        (33, &["--state-version", "4", "--checkpoint", "on"], None, false),
        (20, &["--state-version", "4", "--checkpoint", "on", "--swa-full"], None, false),
    ] {
        let (output, bytes) = run(n, options, variable);
        let (said, line) = (String::from_utf8(output.stderr).unwrap(), String::from_utf8(output.stdout).unwrap());
        let about = format!("{n} {options:?} {variable:?}: {said}{line}");
        assert_eq!(output.status.code(), Some(0), "{about}");
        let state = State::parse(&bytes).unwrap();
        let of: Vec<_> = state.appendix.iter().flat_map(|a| &a.checkpoints).map(|c| (c.n_tokens, c.pos_max)).collect();
        assert_eq!(of, if want { vec![(n as i64, n as i32 - 1)] } else { vec![] }, "{about}");
        assert_eq!(line.contains("\"checkpoint\":true"), want, "{about}");
        let within = n <= 32 && !options.contains(&"--swa-full");
        assert_eq!(said.contains("no gain expected"), within && !want, "{about}");
        // What stands before it is the same file.
        if n == 20 && within {
            let without = if options.contains(&"4") { &plain } else { &plain_3 };
            assert!(bytes.starts_with(without) && (bytes.len() > without.len()) == want, "{about}");
        }
    }
    let (output, bytes) = run(20, &["--checkpoint", "maybe"], None);
    assert!(output.status.code() == Some(2) && bytes.is_empty());
}
