//! The program with a device beside the host: which one it takes, what it says of it, and that the result is the prompt's.

mod common;

use common::{Ran, Scene};
use kvlayout::{Part, State};

/// One scale a row and one an output, 8 bits each, against f32 products, in two layers: relative L2 of a layer's K or V.
const INT8_REL: f64 = 3e-2;

fn distance(a: &State, b: &State) -> f64 {
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
    let mut worst = 0f64;
    for (layer, part) in [(0, Part::K), (0, Part::V), (1, Part::K), (1, Part::V)] {
        let (a, b) = (a.rows_f32(0, layer, part).unwrap(), b.rows_f32(0, layer, part).unwrap());
        let apart = norm(&mut a.iter().zip(&b).map(|(a, b)| f64::from(a - b)));
        worst = worst.max(apart / norm(&mut a.iter().map(|v| f64::from(*v))));
    }
    worst
}

fn kernels(scene: &Scene) -> String {
    scene.kernels().to_str().unwrap().to_owned()
}

#[test]
fn the_kernels_arithmetic_on_this_processor() {
    let scene = Scene::new(150);
    scene.run::<&str>(&[]).receipt();
    let host = scene.state();
    let elfs = kernels(&scene);
    let cache = scene.path("cache");
    let run = || {
        let mut c = scene.command();
        c.args(["--device", "oracle", "--elfs", &elfs]).env("XDG_CACHE_HOME", &cache);
        Ran::from(c.output().unwrap())
    };
    let ran = run();
    let receipt = ran.receipt();
    assert_eq!(receipt["device"], "oracle");
    assert!(ran.stderr.contains("matrix products on oracle (host with "), "{ran:?}");
    let offload = &receipt["offload"];
    // Seven projections of the first layer, two of the last; in two blocks of rows.
    assert_eq!((offload["on_device"].as_u64(), offload["on_host"].as_u64()), (Some(9), Some(0)), "{offload}");
    assert_eq!((offload["launches"].as_u64(), offload["made_up"].as_u64()), (Some(10), Some(0)), "{offload}");
    assert_eq!(offload["packed"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect::<Vec<_>>(), [5, 0]);
    let device = scene.state();
    let error = distance(&host, &device);
    assert!(error > 1e-4 && error < INT8_REL, "{error:e}");

    // Again, with weights that were kept; and again, with files that were damaged.
    let first = std::fs::read(&scene.out).unwrap();
    assert_eq!(run().receipt()["offload"]["packed"][1], 5);
    assert!(std::fs::read(&scene.out).unwrap() == first);
    let packed = cache.join("npu-prefill/packed");
    for file in std::fs::read_dir(&packed).unwrap() {
        let path = file.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        let at = bytes.len() / 2;
        bytes[at] ^= 4;
        std::fs::write(&path, bytes).unwrap();
    }
    assert_eq!(run().receipt()["offload"]["packed"][0], 5);
    assert!(std::fs::read(&scene.out).unwrap() == first);
}

#[test]
fn without_a_device_auto_is_the_cpu_and_says_why() {
    let scene = Scene::new(5);
    let elfs = kernels(&scene);
    let ran = scene.run::<&str>(&[]);
    assert_eq!((ran.receipt()["device"].as_str(), ran.stderr.contains("NPU")), (Some("cpu"), false), "{ran:?}");
    let cpu = std::fs::read(&scene.out).unwrap();
    for set in ["--elfs", "ONEBIT_HYBRID_ELFS"] {
        let mut c = scene.command();
        if set == "--elfs" {
            c.args([set, &elfs]);
        } else {
            c.env(set, &elfs);
        }
        let ran = Ran::from(c.output().unwrap());
        assert_eq!(ran.receipt()["device"], "cpu");
        assert_eq!(ran.stderr.matches("computing on the CPU: ").count(), 1, "{ran:?}");
        assert!(std::fs::read(&scene.out).unwrap() == cpu);
    }
    let ran = scene.run(&["--device", "cpu", "--elfs", &elfs]);
    ran.receipt();
    assert!(ran.stderr.contains("are not used: --device cpu"), "{ran:?}");
}

#[test]
fn a_device_that_is_asked_for_and_not_to_be_had_is_an_error() {
    let scene = Scene::new(5);
    let elfs = kernels(&scene);
    let failed = |more: &[&str], code: i32, says: &str| {
        scene.run(more).failed(code, says);
        assert_eq!(scene.left(), [""; 0]);
    };
    failed(&["--device", "oracle"], 69, "--device oracle: it needs kernels");
    failed(&["--device", "sim"], 69, "--device sim: it needs kernels");
    failed(&["--device", "npu", "--elfs", &elfs], 69, "--device npu: ");
    failed(&["--device", "sim", "--elfs", &elfs], 69, "--device sim: ");
    let empty = scene.path("empty");
    std::fs::create_dir(&empty).unwrap();
    failed(&["--device", "oracle", "--elfs", empty.to_str().unwrap()], 69, "holds no kernel");
    let other = scene.path("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("full_i8_O_K4096_N4096.elf"), "x").unwrap();
    failed(&["--device", "oracle", "--elfs", other.to_str().unwrap()], 69, "no kernel has the shape");
}

#[test]
fn a_directory_that_is_not_in_order_is_an_error_whatever_was_asked_for() {
    let scene = Scene::new(5);
    let elfs = kernels(&scene);
    let manifest = std::path::Path::new(&elfs).join("kernels.toml");
    std::fs::write(&manifest, "[[kernel]]\nop = \"gemm\"\nsize = 3\n").unwrap();
    for device in ["auto", "npu", "oracle", "sim", "cpu"] {
        let ran = scene.run(&["--device", device, "--elfs", &elfs]);
        ran.failed(78, "kernels.toml:3: unknown field `size`");
    }
    std::fs::remove_file(manifest).unwrap();
    std::fs::write(std::path::Path::new(&elfs).join("full_i8_O_K100_N128.elf"), "x").unwrap();
    scene.run(&["--elfs", &elfs]).failed(78, "full_i8_O_K100_N128.elf: K = 100");
}

#[test]
fn a_plan_says_where_and_why() {
    let scene = Scene::new(5);
    let elfs = kernels(&scene);
    let plan = |more: &[&str]| {
        let mut c = common::program();
        c.args(["plan", "-n", "200", "--explain", "--model"]).arg(&scene.model).args(more);
        let ran = Ran::from(c.output().unwrap());
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.stdout
    };
    let text = plan(&["--device", "oracle", "--elfs", &elfs]);
    assert!(text.contains("->  device: full_i8_GU_K128_N256.elf, 2 launches, "), "{text}");
    assert!(text.contains("->  host: no matrix product with a weight"), "{text}");
    assert!(text.contains("10 launches on the device"), "{text}");
    assert!(plan(&[]).contains("->  host: no device"));
}

#[test]
fn a_doctor_says_what_is_missing_and_what_to_do() {
    let scene = Scene::new(5);
    let elfs = kernels(&scene);
    let run = |args: &[&str]| Ran::from(common::program().args(args).output().unwrap());
    // No machine that tests run on has an NPU; one that has is a different test.
    let ran = run(&["doctor"]);
    assert_eq!(ran.code, Some(69), "{ran:?}");
    for word in ["missing  device node", "missing  kernels", "--elfs", "locked memory", "IOMMU"] {
        assert!(ran.stdout.contains(word), "no {word:?} in {ran:?}");
    }
    let ran = run(&["doctor", "--json", "--elfs", &elfs, "--device", "oracle"]);
    let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!((report["usable"].as_bool(), ran.code), (Some(false), Some(69)), "{ran:?}");
    let checks = report["checks"].as_array().unwrap();
    let tested: Vec<_> = checks.iter().filter(|c| c["check"] == "self-test").collect();
    assert_eq!(tested.len(), 2, "{ran:?}");
    assert!(
        tested.iter().all(|c| c["state"] == "ok" && c["found"].as_str().unwrap().contains("by the oracle")),
        "{ran:?}"
    );
}

#[test]
fn a_self_test_is_a_report_to_send() {
    let scene = Scene::new(5);
    let elfs = kernels(&scene);
    let run = |args: &[&str]| Ran::from(common::program().args(args).output().unwrap());
    let ran = run(&["selftest", "--elfs", &elfs, "--device", "oracle"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(ran.stdout.lines().filter(|l| l.starts_with("ok     ")).count(), 3, "{ran:?}");
    assert!(ran.stdout.contains("what a pass shows: computed by the oracle"), "{ran:?}");
    assert!(ran.stdout.contains("a prefill of 150 tokens: "), "{ran:?}");
    run(&["selftest"]).failed(69, "no directory of kernels is given");
    run(&["selftest", "--elfs", &elfs, "--device", "oracle", "--fds", "99"]).failed(66, "descriptor 99 is not open");
    run(&["selftest", "--import", "own"]).failed(2, "--fds");
    // What computes in memory of its own has one way.
    let handed = |import: &str| {
        let mut c = std::process::Command::new("bash");
        c.args(["-c", "exec 7<>\"$0\"; exec \"$@\""]).arg(scene.path("memory")).arg(common::program().get_program());
        c.args(["selftest", "--elfs", &elfs, "--device", "oracle", "--fds", "7", "--import", import]);
        Ran::from(c.output().unwrap())
    };
    std::fs::write(scene.path("memory"), vec![0; 1 << 20]).unwrap();
    let ran = handed("auto");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let why = "by the address of our own mapping (own): oracle launches in memory of its own";
    assert!(ran.stdout.contains(why) && ran.stdout.contains("a copy (bounce)"), "{ran:?}");
    let ran = handed("own");
    assert!(ran.code == Some(69) && ran.stdout.contains("WRONG  memory of descriptor 7, a file of "), "{ran:?}");
    // A file that promises more than its full disk has: writing to it through a mapping would end the process.
    let script =
        "mount -t tmpfs -o size=16k none \"$0\" || exit 99; truncate -s 1M \"$0/m\"; exec 7<>\"$0/m\"; exec \"$@\"";
    std::fs::create_dir(scene.path("disk")).unwrap();
    let mut c = std::process::Command::new("unshare");
    c.args(["-rm", "bash", "-c", script]).arg(scene.path("disk")).arg(common::program().get_program());
    c.args(["selftest", "--elfs", &elfs, "--device", "oracle", "--fds", "7"]);
    let ran = Ran::from(c.output().unwrap());
    if ran.code == Some(99) || ran.stderr.contains("unshare: ") {
        println!("skipped: no mount namespaces here");
    } else {
        ran.failed(74, "the system has no memory behind its first ");
    }
    // What is missing depends on the machine: the shim, XRT, or a device.
    run(&["selftest", "--elfs", &elfs]).failed(69, "no ");
}
