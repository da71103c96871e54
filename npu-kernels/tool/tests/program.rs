//! The program as an author uses it, on the cpu device.

use std::io::BufRead as _;
use std::path::Path;
use std::process::{Command, Output};

fn run(args: &[&str], dir: &Path) -> Output {
    let mut c = Command::new(env!("CARGO_BIN_EXE_npu-kernel"));
    c.env_clear().args(args).arg("--elfs").arg(dir).output().unwrap()
}

fn text(o: &Output) -> String {
    String::from_utf8(o.stdout.clone()).unwrap() + &String::from_utf8(o.stderr.clone()).unwrap()
}

fn kernels() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["O_K128_N128", "GU_K128_N256"] {
        std::fs::write(dir.path().join(format!("full_i8_{name}.elf")), name).unwrap();
    }
    dir
}

#[test]
fn kernels_are_listed_checked_and_measured() {
    let dir = kernels();
    let listed = run(&["list"], dir.path());
    assert!(listed.status.success());
    let said = text(&listed);
    assert!(said.contains("full_i8_GU_K128_N256.elf") && said.contains("128 x 128 x 256"), "{said}");
    assert!(said.contains("nothing was measured here") && !said.contains('\x1b'), "{said}");
    let checked = run(&["check"], dir.path());
    assert!(checked.status.success(), "{}", text(&checked));
    assert_eq!(text(&checked).matches("seeds 1 2 3 bit for bit, median ").count(), 2, "{}", text(&checked));
    let one = run(&["check", "O_K128"], dir.path());
    assert_eq!(text(&one).lines().count(), 1, "{}", text(&one));
    let csv = dir.path().join("bench.csv");
    for _ in 0..2 {
        let measured = run(&["bench", "-r", "3", "--csv", csv.to_str().unwrap()], dir.path());
        assert!(measured.status.success(), "{}", text(&measured));
        assert!(text(&measured).contains("say nothing about an NPU"), "{}", text(&measured));
    }
    let csv = std::fs::read_to_string(csv).unwrap();
    assert_eq!(csv.lines().count(), 5, "{csv}");
    let columns = csv.lines().next().unwrap().split(',').count();
    assert!(csv.lines().all(|l| l.split(',').count() == columns), "{csv}");
    let same = run(&["diff", "GU"], dir.path());
    assert!(same.status.success() && text(&same).contains("every element is the oracle's"), "{}", text(&same));
}

#[test]
fn entries_are_generated_and_read() {
    let dir = kernels();
    let file = dir.path().join("full_i8_O_K128_N128.elf");
    let made = run(&["gen", file.to_str().unwrap(), "--layout", "blocked-64x128"], dir.path());
    assert!(made.status.success(), "{}", text(&made));
    std::fs::write(dir.path().join("kernels.toml"), &made.stdout).unwrap();
    let listed = text(&run(&["list"], dir.path()));
    assert!(listed.contains("blocked-64x128") && !listed.contains("GU"), "{listed}");
    // The file changes and the entry does not.
    std::fs::write(&file, "other").unwrap();
    let refused = run(&["check"], dir.path());
    assert!(refused.status.code() == Some(78) && text(&refused).contains("hashes to"), "{}", text(&refused));
    let odd = dir.path().join("odd.elf");
    std::fs::write(&odd, "x").unwrap();
    let unnamed = run(&["gen", odd.to_str().unwrap()], dir.path());
    assert!(unnamed.status.code() == Some(2) && text(&unnamed).contains("give -k"), "{}", text(&unnamed));
}

#[test]
fn a_changed_file_is_checked_again() {
    let dir = kernels();
    let file = dir.path().join("full_i8_O_K128_N128.elf");
    let mut c = Command::new(env!("CARGO_BIN_EXE_npu-kernel"));
    // Long enough for the slowest machine; it is ended as soon as it has said what it should.
    c.env_clear().args(["watch", dir.path().to_str().unwrap(), "--rounds", "400"]);
    let mut child = c.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let both: String = lines.by_ref().take(2).collect();
    std::fs::write(&file, "another").unwrap();
    let again = lines.next().unwrap_or_default();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(both.contains("full_i8_O") && both.contains("full_i8_GU"), "{both}");
    assert!(again.contains("full_i8_O"), "{again}");
}

#[test]
fn what_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let none = run(&["list"], dir.path());
    assert!(none.status.code() == Some(69) && text(&none).contains("no kernel in "), "{}", text(&none));
    let dir = kernels();
    let unknown = run(&["check", "QKV"], dir.path());
    assert!(unknown.status.code() == Some(2) && text(&unknown).contains("there are full_i8_GU"), "{}", text(&unknown));
    for device in ["npu", "sim"] {
        let absent = run(&["check", "--device", device], dir.path());
        assert_eq!(absent.status.code(), Some(69), "{}", text(&absent));
    }
}
