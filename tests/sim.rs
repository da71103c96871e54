//! The program through the real XRT 2.25, over the double of the driver: what a whole prefill moves there and back, and that
//! every fault ends in a right result or in a clean refusal. None of it says anything about a device.
//!
//! Takes what `npu-kernels/npusim/run.sh` takes; says what is missing when it skips.

mod common;

use common::{Ran, Scene};
use kvlayout::{Part, State};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// One scale a row and one an output, 8 bits each, against f32 products, in two layers: relative L2 of a layer's K or V.
const INT8_REL: f64 = 3e-2;
/// Two blocks of 128 rows, the second not full.
const N: usize = 150;

fn distance(a: &State, b: &State) -> f64 {
    let mut worst = 0f64;
    for (layer, part) in [(0, Part::K), (0, Part::V), (1, Part::K), (1, Part::V)] {
        let (a, b) = (a.rows_f32(0, layer, part).unwrap(), b.rows_f32(0, layer, part).unwrap());
        let apart: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        worst = worst.max((apart / a.iter().map(|a| f64::from(*a).powi(2)).sum::<f64>()).sqrt());
    }
    worst
}

/// One process at a time has the device, and waits for it only so long.
static DEVICE: Mutex<()> = Mutex::new(());

/// Runs a command where there seems to be an NPU; `None` where that cannot be had.
fn over_the_double(c: &Command, variables: &[(&str, &str)], options: &[&str]) -> Option<Ran> {
    let mut c = common::over_the_double(c, variables, options)?;
    let _mine = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    Some(Ran::from(c.output().unwrap()))
}

/// A handoff with the double's kernels.
fn run(scene: &Scene, device: &str, variables: &[(&str, &str)], options: &[&str]) -> Option<Ran> {
    let mut c = scene.command();
    c.args(["--device", device, "--elfs"]).arg(common::sim_kernels());
    over_the_double(&c, variables, options)
}

#[test]
fn a_prefill_through_xrt_is_the_oracles_to_the_last_bit() {
    let scene = Scene::new(N);
    for variables in [&[][..], &[("NPUSIM_SHADOW", "1")]] {
        let Some(ran) = run(&scene, "sim", variables, &[]) else { return };
        let receipt = ran.receipt();
        let offload = &receipt["offload"];
        assert_eq!(receipt["device"], "sim", "{ran:?}");
        assert!(offload["runtime"].as_str().unwrap().starts_with("XRT 2."), "{offload}");
        assert_eq!((offload["on_device"].as_u64(), offload["made_up"].as_u64()), (Some(9), Some(0)), "{offload}");
        assert_eq!(offload["launches"], 10, "{offload}");
        let through_xrt = std::fs::read(&scene.out).unwrap();
        let kernels = common::sim_kernels();
        scene.run(&["--device", "oracle", "--elfs", kernels.to_str().unwrap()]).receipt();
        assert!(
            through_xrt == std::fs::read(&scene.out).unwrap(),
            "{variables:?}: integers are the same wherever they are added up"
        );
    }
}

fn sha256(path: &Path) -> String {
    let output = Command::new("sha256sum").arg(path).output().unwrap();
    String::from_utf8(output.stdout).unwrap().split(' ').next().unwrap().to_owned()
}

/// The double's kernels of an xclbin, as a directory of their own.
fn xclbins(dir: &Path) {
    let built = common::sim_kernels();
    std::fs::create_dir(dir).unwrap();
    let mut manifest = String::new();
    for (role, k, n) in [("QKV", 128, 256), ("O", 128, 128), ("GU", 128, 512), ("D", 256, 128)] {
        let files = ["gemm_i8.xclbin".to_owned(), format!("gemm_i8_K{k}_N{n}.bin")];
        for file in &files {
            std::fs::copy(built.join(file), dir.join(file)).unwrap();
        }
        let [xclbin, insts] = files;
        manifest += &format!(
            "[[kernel]]\nname = \"{role}\"\nop = \"gemm\"\nkind = \"xclbin+insts\"\nfile = \"{xclbin}\"\nsha256 = \"{}\"\n\
             insts = \"{insts}\"\ninsts-sha256 = \"{}\"\nkernel = \"GEMM\"\nargs = [\"a\", \"b\", \"c\"]\nm = 128\nk = {k}\nn = {n}\n\
             a = {{ type = \"i8\", layout = \"row-major\" }}\nb = {{ type = \"i8\", layout = \"row-major\" }}\n\
             c = {{ type = \"i32\", layout = \"row-major\" }}\nrounding = \"exact\"\n\n",
            sha256(&dir.join(&xclbin)),
            sha256(&dir.join(&insts))
        );
    }
    std::fs::write(dir.join("kernels.toml"), manifest).unwrap();
}

/// The same products by the other flow: one xclbin whose kernel takes control code as its argument.
#[test]
fn a_prefill_with_an_xclbin_is_the_oracles_to_the_last_bit() {
    let scene = Scene::new(N);
    if common::over_the_double(&scene.command(), &[], &[]).is_none() {
        return;
    }
    let (built, dir) = (common::sim_kernels(), scene.path("xclbin"));
    xclbins(&dir);
    for variables in [&[][..], &[("NPUSIM_SHADOW", "1")]] {
        let mut c = scene.command();
        c.args(["--device", "sim", "--elfs"]).arg(&dir);
        let receipt = over_the_double(&c, variables, &[]).unwrap().receipt();
        let offload = &receipt["offload"];
        assert_eq!((offload["on_device"].as_u64(), offload["made_up"].as_u64()), (Some(9), Some(0)), "{offload}");
        assert_eq!(offload["failures"].as_array().unwrap().len(), 0, "{offload}");
        let through_xrt = std::fs::read(&scene.out).unwrap();
        // By names only, from kernels of full ELFs: nothing of these files has a part in it.
        scene.run(&["--device", "oracle", "--elfs", built.to_str().unwrap()]).receipt();
        assert!(through_xrt == std::fs::read(&scene.out).unwrap(), "{variables:?}");
    }
}

#[test]
fn what_goes_wrong_in_the_middle_costs_time_and_not_the_result() {
    let scene = Scene::new(N);
    scene.run::<&str>(&[]).receipt();
    let host = scene.state();
    for fault in ["timeout", "abort", "error", "etime", "wedge", "group", "stale", "enodev"] {
        // Four launches are the self-tests', ten the prefill's.
        let at = format!("{fault}@7");
        let Some(ran) = run(&scene, "sim", &[("NPUSIM_FAULT", &at)], &[]) else { return };
        let receipt = ran.receipt();
        let offload = &receipt["offload"];
        assert_eq!(offload["failures"].as_array().unwrap().len(), 1, "{at}: {offload}");
        assert!(offload["made_up"].as_u64() > Some(0), "{at}: {offload}");
        let error = distance(&host, &scene.state());
        assert!(error < INT8_REL, "{at}: {error:e}");
    }
}

#[test]
fn what_goes_wrong_at_the_start_is_a_refusal_or_a_kernel_less() {
    let scene = Scene::new(N);
    // The kernel is out of use, and the other one is not.
    for fault in ["group@2", "stale@2", "spill@2"] {
        let Some(ran) = run(&scene, "sim", &[("NPUSIM_FAULT", fault)], &[]) else { return };
        let receipt = ran.receipt();
        assert!(ran.stderr.contains("is out of use: self-test: "), "{fault}: {ran:?}");
        assert_eq!(receipt["offload"]["failures"].as_array().unwrap().len(), 0, "{fault}: {ran:?}");
    }
    for fault in ["timeout@1", "abort@1", "enodev@1", "memlock", "firmware", "contexts", "sva", "nodevice"] {
        let Some(ran) = run(&scene, "sim", &[("NPUSIM_FAULT", fault)], &[]) else { return };
        let code = if fault == "contexts" { 75 } else { 69 };
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(code), ""), "{fault}: {ran:?}");
        assert!(ran.stderr.lines().last().unwrap().starts_with("npu-prefill: --device sim: "), "{fault}: {ran:?}");
    }
    for options in [&["--no-node"][..], &["--node-mode", "000"]] {
        let Some(ran) = run(&scene, "sim", &[], options) else { return };
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(69), ""), "{options:?}: {ran:?}");
    }
}

#[test]
fn a_double_is_taken_by_its_name_only() {
    let scene = Scene::new(N);
    let Some(ran) = run(&scene, "npu", &[], &[]) else { return };
    ran.failed(69, "--device npu: the double of an NPU is loaded");
    let ran = run(&scene, "auto", &[], &[]).unwrap();
    assert_eq!(ran.receipt()["device"], "cpu");
    assert!(ran.stderr.contains("computing on the CPU: the double of an NPU is loaded"), "{ran:?}");
}

#[test]
fn the_doctor_and_the_self_test_know_what_they_look_at() {
    let mut c = common::program();
    c.args(["selftest", "--device", "sim", "--elfs"]).arg(common::sim_kernels());
    let Some(ran) = over_the_double(&c, &[], &[]) else { return };
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stdout.contains("on the real XRT over the double") && !ran.stdout.contains("WRONG"), "{ran:?}");
    let mut c = common::program();
    c.args(["doctor", "--json", "--device", "sim", "--elfs"]).arg(common::sim_kernels());
    let ran = over_the_double(&c, &[], &[]).unwrap();
    let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    let state = |check: &str| {
        let all = report["checks"].as_array().unwrap();
        all.iter().find(|c| c["check"] == check).unwrap_or_else(|| panic!("no {check} in {report}"))["state"].clone()
    };
    for check in ["device node", "driver", "firmware", "XRT", "kernels", "self-test"] {
        assert_eq!(state(check), "ok", "{check}: {report}");
    }
}

/// `selftest` with a file of this many bytes as descriptor 7.
fn handed(variables: &[(&str, &str)], elfs: &Path, len: u64, import: &str) -> Option<(Ran, Vec<u8>)> {
    let memory = tempfile::NamedTempFile::new().unwrap();
    memory.as_file().set_len(len).unwrap();
    let mut c = Command::new("bash");
    c.args(["-c", "exec 7<>\"$0\"; exec \"$@\""]).arg(memory.path()).arg(common::program().get_program());
    c.args(["selftest", "--device", "sim", "--fds", "7", "--import", import, "--elfs"]).arg(elfs);
    let ran = over_the_double(&c, variables, &[])?;
    Some((ran, std::fs::read(memory.path()).unwrap()))
}

#[test]
fn memory_that_is_handed_over_is_written_by_the_way_that_works() {
    let (kernels, len) = (common::sim_kernels(), 1 << 20);
    for (import, by) in [
        ("auto", "by the address of our own mapping (own)"),
        ("own", "by the address of our own mapping (own)"),
        ("driver", "through a mapping of the driver's (driver)"),
        ("bounce", "through a buffer of the device's and a copy (bounce)"),
    ] {
        let Some((ran, bytes)) = handed(&[], &kernels, len, import) else { return };
        assert_eq!(ran.code, Some(0), "{import}: {ran:?}");
        let line = ran.stdout.lines().find(|l| l.contains("memory of descriptor 7")).unwrap();
        assert!(line.starts_with("ok     ") && line.contains("gets there ") && line.ends_with(by), "{line}");
        // 128 rows of 128 sums, and behind what is watched nothing.
        let product = 128 * 128 * 4;
        assert!(
            bytes[..product].iter().any(|b| *b != 0) && bytes[product + 4096..].iter().all(|b| *b == 0),
            "{import}"
        );
    }
    // Kernels of an xclbin are given no addresses.
    let dir = tempfile::tempdir().unwrap();
    xclbins(&dir.path().join("xclbin"));
    let (ran, bytes) = handed(&[], &dir.path().join("xclbin"), len, "auto").unwrap();
    assert!(ran.code == Some(0) && bytes[..128 * 128 * 4].iter().any(|b| *b != 0), "{ran:?}");
    assert!(ran.stdout.contains("no kernel gets there by the address") && ran.stdout.contains("(bounce)\n"), "{ran:?}");
    // A driver that takes an import amiss: a reason to have another way.
    let (ran, _) = handed(&[("NPUSIM_FAULT", "poison")], &kernels, len, "driver").unwrap();
    assert_eq!(ran.code, Some(69), "{ran:?}");
    assert!(ran.stdout.contains("does not get there through a mapping of the driver's (driver): "), "{ran:?}");
    let (ran, _) = handed(&[], &kernels, 1000, "auto").unwrap();
    ran.failed(76, "descriptor 7, a file of 1000 bytes: the smallest product and what is watched behind it take ");
}
