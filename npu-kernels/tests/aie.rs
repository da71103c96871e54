//! The sources in `aie/`, built for this processor: the kernel's own C++ against the oracle. Needs a C++ compiler; says so where
//! there is none.

use npu_kernels::catalogue::{Layout, Spec};
use npu_kernels::{check, oracle};
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn the_kernels_source_computes_what_the_oracle_does() {
    let aie = Path::new(env!("CARGO_MANIFEST_DIR")).join("aie");
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("gemm_i8");
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Ihost", "-o"]).arg(&program);
    match compiler.args(["host/main.cc", "gemm_i8.cc"]).current_dir(&aie).status() {
        Ok(status) => assert!(status.success(), "g++ failed"),
        Err(e) => {
            println!("SKIPPED: no g++ to build npu-kernels/aie with: {e}");
            return;
        }
    }
    for (k, n) in [(128, 128), (192, 256), (640, 1024)] {
        let mut spec = Spec::int8("aie", "", k, n);
        spec.b.layout = Layout::Blocked64x128;
        for seed in 1..=3 {
            let problem = check::Problem::new(&spec, seed);
            let mut command = Command::new(&program);
            command.args([k.to_string(), n.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn().unwrap();
            let mut stdin = child.stdin.take().unwrap();
            stdin.write_all(&[&problem.a[..], &problem.b].concat()).unwrap();
            drop(stdin);
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success());
            let want = oracle::gemm(&spec, &problem.a, &problem.b);
            assert_eq!(check::compare(&spec, &output.stdout, &want), Ok(()), "{k} x {n}, seed {seed}");
            assert_eq!(output.stdout.len(), want.len());
        }
    }
}
