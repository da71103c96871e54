//! This crate through the real XRT 2.25, over the double of the driver: what works, what each fault of driver, firmware and
//! device turns into, and that nothing is left over.
//!
//! Each test starts this same program once more inside of `npu-kernels/npusim/run.sh`, where there seems to be an NPU, with one of
//! the functions of [`inside`]. It takes four things in cargo's target directory, and says what is missing when it skips; with
//! `NPUSIM_REQUIRED` set it fails instead:
//!
//!     xrt=$(npu-kernels/xdna/install-xrt.sh)
//!     cargo build -p npusim
//!     cargo xtask shim --xrt "$xrt"
//!     cargo xtask simkernels --xrt "$xrt"
//!
//! None of it says anything about a device.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// `target/debug`.
fn built() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().to_owned()
}

fn kernels() -> PathBuf {
    built().join("simkernels")
}

fn xrt() -> PathBuf {
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    std::env::var_os("XDG_CACHE_HOME").map_or_else(|| home.join(".cache"), PathBuf::from).join("npu-prefill-xrt")
}

/// What is not there, and how it comes there.
fn missing() -> Option<String> {
    let needs = [
        (xrt().join("usr/lib/x86_64-linux-gnu/libxrt_coreutil.so.2"), "npu-kernels/xdna/install-xrt.sh"),
        (built().join("libnpusim.so"), "cargo build -p npusim"),
        (built().join(xdna::SHIM_FILE), "cargo xtask shim --xrt DIR"),
        (kernels().join("copy.elf"), "cargo xtask simkernels --xrt DIR"),
    ];
    needs.iter().find(|(path, _)| !path.exists()).map(|(path, how)| format!("{} is missing: {how}", path.display()))
}

/// Whether to go on. Says why not.
fn ready() -> bool {
    match missing() {
        None => true,
        Some(what) if std::env::var_os("NPUSIM_REQUIRED").is_some() => panic!("{what}"),
        Some(what) => {
            eprintln!("skipped: {what}");
            false
        }
    }
}

/// Starts what is added to it where there seems to be an NPU.
fn double(options: &[&str]) -> Command {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../npusim/run.sh");
    let mut command = Command::new("bash");
    command.arg(script).arg("--sim").arg(built().join("libnpusim.so")).arg("--xrt").arg(xrt()).args(options);
    command
}

/// Runs one function of [`inside`] where there seems to be an NPU.
fn start(function: &str, variables: &[(&str, &str)], options: &[&str]) -> Output {
    let mut command = double(options);
    command.arg(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("inside::{function}"), "--ignored", "--nocapture", "--test-threads", "1"]);
    command.envs(variables.iter().copied()).output().unwrap()
}

fn inside(function: &str, variables: &[(&str, &str)], options: &[&str]) {
    if !ready() {
        return;
    }
    let output = start(function, variables, options);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{variables:?} {options:?}\n{out}\n{err}");
}

fn fault(name: &str, function: &str) {
    inside(function, &[("NPUSIM_FAULT", name)], &[]);
}

#[test]
fn the_device_is_listed() {
    inside("listed", &[], &[]);
}

#[test]
fn products_of_full_elfs_are_exact() {
    inside("full_elfs", &[], &[]);
}

#[test]
fn products_of_an_xclbin_are_exact() {
    inside("xclbin", &[], &[]);
}

#[test]
fn every_cache_is_flushed_and_invalidated() {
    // The device has its own copy of every buffer here: one forgotten flush, and the product is wrong.
    inside("full_elfs", &[("NPUSIM_SHADOW", "1")], &[]);
    inside("xclbin", &[("NPUSIM_SHADOW", "1")], &[]);
    inside("partial_writes", &[("NPUSIM_SHADOW", "1")], &[]);
}

#[test]
fn several_kernels_and_contexts_at_once() {
    inside("several", &[], &[]);
}

/// XRT's list of runs as its own C++ program, since the shim has no call for it.
#[test]
fn a_chain_of_xrts_is_one_submission() {
    if !ready() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (source, program) =
        (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/runlist.cpp"), dir.path().join("runlist"));
    let mut compiler = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    compiler.args(["-std=c++17", "-Wall", "-Wextra", "-Werror", "-isystem"]).arg(xrt().join("usr/include"));
    compiler.arg("-o").arg(&program).arg(source).arg("-L").arg(xrt().join("usr/lib/x86_64-linux-gnu"));
    // XRT's C library may be newer than the one that this is built with.
    let built = compiler.args(["-lxrt_coreutil", "-Wl,--allow-shlib-undefined"]).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    for shadow in ["", "1"] {
        let mut command = double(&[]);
        command.arg(&program).arg(kernels().join("copy.elf")).envs([("NPUSIM_LOG", "1"), ("NPUSIM_SHADOW", shadow)]);
        let output = command.output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && err.contains("runlist: right"), "{err}");
        assert!(err.contains("submission 1: Completed, a chain of 3") && !err.contains("submission 2"), "{err}");
    }
}

#[test]
fn foreign_memory_is_read_and_written_in_place() {
    inside("foreign", &[], &[]);
    // It is not mapped through the driver, so nothing is poisoned.
    fault("poison", "foreign");
}

#[test]
fn a_mapping_through_the_driver_can_poison_the_process() {
    inside("imported", &[], &[]);
    fault("poison", "poisoned");
}

#[test]
fn a_thousand_runs_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let report = dir.path().join("report");
    inside("a_thousand_runs", &[("NPUSIM_REPORT", report.to_str().unwrap())], &[]);
    if ready() {
        let text = std::fs::read_to_string(&report).unwrap();
        let line = text.lines().last().unwrap();
        let field = |name: &str| -> u64 {
            line.split(' ').skip_while(|w| *w != name).nth(1).and_then(|n| n.parse().ok()).unwrap()
        };
        // The heap is XRT's own, for the node's whole life.
        assert_eq!((field("submissions"), field("contexts")), (1000, 0), "{text}");
        assert!(field("buffers") <= 1 && field("most_buffers") < 40, "{text}");
    }
}

#[test]
fn a_timeout_ends_in_an_error_and_the_next_context_works() {
    for name in ["timeout@1", "etime@1"] {
        fault(name, "times_out");
    }
    fault("wedge", "stays_wedged");
}

#[test]
fn a_failed_run_gives_no_output() {
    fault("abort@1", "is_aborted");
    fault("error@1", "is_in_error");
}

#[test]
fn a_device_that_disappears_is_gone() {
    fault("enodev@1", "is_gone");
}

#[test]
fn wrong_answers_can_be_seen() {
    for name in ["group", "stale", "spill"] {
        fault(name, "is_wrong");
    }
}

#[test]
fn a_device_that_cannot_be_had_says_why() {
    fault("memlock", "memlock_is_short");
    fault("firmware", "firmware_is_old");
    fault("contexts", "contexts_are_taken");
    inside("contexts_run_out", &[], &[]);
    inside("no_node", &[], &["--no-node"]);
    inside("not_allowed", &[], &["--node-mode", "000"]);
    fault("nodevice", "nothing_behind");
    fault("sva", "no_shared_memory");
}

#[test]
fn what_the_library_prints_is_not_on_stdout() {
    if !ready() {
        return;
    }
    // XRT says on its standard output that a buffer could not be closed.
    let output = start("noisy", &[("NPUSIM_FAULT", "noclose")], &[]);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    assert!(err.contains("Failed to destroy"), "XRT has changed what it says: {err}");
    assert!(!out.contains("Failed") && out.contains("before\nafter\n"), "{out}");
}

#[test]
fn a_configuration_that_lies_around_is_not_read() {
    if !ready() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let ini = dir.path().join("xrt.ini");
    // Read, this makes XRT flush caches by requests to the driver, which can be seen.
    std::fs::write(&ini, "[Debug]\nforce_driver_sync=true\n").unwrap();
    let flushes = |more: &[(&str, &str)]| {
        let mut variables = vec![("XDNA_TEST_DIR", dir.path().to_str().unwrap()), ("NPUSIM_LOG", "1")];
        variables.extend(more);
        let output = start("from_elsewhere", &variables, &[]);
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{err}");
        err.contains("npusim: sync")
    };
    assert!(!flushes(&[]));
    assert!(flushes(&[("XRT_INI_PATH", ini.to_str().unwrap())]), "one that is named is heeded");
}

#[test]
fn what_is_not_there_is_told_apart() {
    let error = xdna::Driver::load(Some(Path::new("/nonexistent/libxdna_shim.so"))).unwrap_err();
    assert!(matches!(error, xdna::Error::NoShim { .. }), "{error}");
    assert_eq!(error.kind(), xdna::Kind::Unavailable);

    let dir = tempfile::tempdir().unwrap();
    let library = |name: &str, source: &str| {
        let (c, so) = (dir.path().join(format!("{name}.c")), dir.path().join(format!("{name}.so")));
        std::fs::write(&c, source).unwrap();
        let status = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&so).arg(&c).status().unwrap();
        assert!(status.success());
        so
    };
    let old = library("old", "unsigned xdna_abi(void) { return 999; }");
    let error = xdna::Driver::load(Some(&old)).unwrap_err();
    assert!(matches!(error, xdna::Error::WrongAbi { found: 999, .. }), "{error}");
    let other = library("other", "int nothing;");
    let error = xdna::Driver::load(Some(&other)).unwrap_err();
    assert!(matches!(error, xdna::Error::BadShim { .. }), "{error}");
    std::fs::write(dir.path().join("text.so"), "no library").unwrap();
    let error = xdna::Driver::load(Some(&dir.path().join("text.so"))).unwrap_err();
    assert!(matches!(error, xdna::Error::BadShim { .. }), "{error}");

    // The shim without XRT: only where the system has none.
    let shim = built().join(xdna::SHIM_FILE);
    if shim.exists() && !Path::new("/usr/lib/x86_64-linux-gnu/libxrt_coreutil.so.2").exists() {
        let error = xdna::Driver::load(Some(&shim)).unwrap_err();
        assert!(matches!(error, xdna::Error::NoXrt { .. }), "{error}");
    }
}

/// What runs where there seems to be an NPU.
mod inside {
    use super::{built, kernels};
    use std::os::fd::AsFd as _;
    use std::path::Path;
    use std::time::Duration;
    use xdna::{Arg, Buffer, Context, Device, DeviceLock, Driver, Error, Kind, Live, State};

    const M: usize = 128;
    const LIMIT: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(200);
    /// Bytes behind an output that must stay as they are.
    const CANARY: usize = 4096;

    fn load() -> Driver {
        Driver::load(Some(&built().join(xdna::SHIM_FILE))).unwrap()
    }

    fn try_open() -> Result<Device, Error> {
        let dir = tempfile::tempdir().unwrap();
        load().open(DeviceLock::acquire_at(&dir.path().join("lock"), Duration::ZERO)?, 0)
    }

    fn open() -> Device {
        try_open().unwrap()
    }

    fn file(name: &str) -> Vec<u8> {
        std::fs::read(kernels().join(name)).unwrap()
    }

    /// K and N from `…_Kk_Nn.EXTENSION`.
    fn shape(path: &Path) -> (usize, usize) {
        let stem = path.file_stem().unwrap().to_str().unwrap();
        let mut numbers = stem.rsplit('_').take(2).map(|p| p[1..].parse().unwrap());
        let n = numbers.next().unwrap();
        (numbers.next().unwrap(), n)
    }

    fn files(extension: &str) -> Vec<(String, usize, usize)> {
        let mut all: Vec<_> = kernels()
            .read_dir()
            .unwrap()
            .map(|e| e.unwrap().path())
            .filter(|p| p.extension().is_some_and(|e| e == extension))
            .filter(|p| p.file_name().unwrap().to_str().unwrap().contains("_K"))
            .map(|p| {
                let (k, n) = shape(&p);
                (p.file_name().unwrap().to_str().unwrap().to_owned(), k, n)
            })
            .collect();
        all.sort();
        assert!(!all.is_empty());
        all
    }

    /// All 256 values, in no order that a mistake could share.
    fn values(seed: u32, n: usize) -> Vec<u8> {
        let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
        (0..n)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                (state >> 11) as u8
            })
            .collect()
    }

    /// The product by its definition.
    fn product(a: &[u8], b: &[u8], k: usize, n: usize) -> Vec<u8> {
        let mut c = vec![0i32; M * n];
        for i in 0..M {
            for p in 0..k {
                let a = i32::from(a[i * k + p] as i8);
                for j in 0..n {
                    c[i * n + j] += a * i32::from(b[p * n + j] as i8);
                }
            }
        }
        c.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    fn filled(mut buffer: Buffer, bytes: &[u8]) -> Buffer {
        buffer.write(0, bytes).unwrap();
        buffer
    }

    /// An output with canaries behind it, and whether they are still there.
    fn output(mut buffer: Buffer) -> Buffer {
        let at = buffer.len() - CANARY;
        buffer.write(at, &[0x5a; CANARY]).unwrap();
        buffer
    }

    fn read(buffer: &mut Buffer) -> (Vec<u8>, bool) {
        let mut all = vec![0; buffer.len()];
        buffer.read(0, &mut all).unwrap();
        let canary = all.split_off(buffer.len() - CANARY);
        (all, canary.iter().all(|b| *b == 0x5a))
    }

    /// The smallest product on a new context: whether it is right, with its canaries.
    fn small(device: &Device, limit: Duration) -> Result<(bool, bool), Error> {
        let context = device.context_elf(&file("full_i8_O_K128_N128.elf"))?;
        small_on(device, &context, limit, 1)
    }

    fn small_on(device: &Device, context: &Context, limit: Duration, seed: u32) -> Result<(bool, bool), Error> {
        let (k, n) = (128, 128);
        let kernel = context.kernel("main:seq")?;
        let (a, b) = (values(seed, M * k), values(seed + 1, k * n));
        let args = vec![
            Arg::Buffer(filled(device.buffer(M * k)?, &a)),
            Arg::Buffer(filled(device.buffer(k * n)?, &b)),
            Arg::Buffer(output(device.buffer(4 * M * n + CANARY)?)),
        ];
        let mut back = kernel.start(args)?.wait(limit)?;
        let (c, canary) = read(&mut back[2]);
        Ok((c == product(&a, &b, k, n), canary))
    }

    const RIGHT: (bool, bool) = (true, true);

    #[test]
    #[ignore = "inside"]
    fn listed() {
        let driver = load();
        assert_eq!(driver.device_count().unwrap(), 1);
        assert_eq!(driver.versions().0.to_string(), "2.25");
        let device = open();
        let info = device.info();
        assert_eq!((info.name.as_str(), info.address.as_str()), ("RyzenAI-npu5", "0000:c5:00.1"));
        assert_eq!(info.node.path, Path::new("/dev/accel/accel0"));
        assert_eq!(info.node.driver, "0.6.0");
        assert_eq!(info.node.firmware.unwrap().to_string(), "1.1.2.65");
        let dir = tempfile::tempdir().unwrap();
        let lock = DeviceLock::acquire_at(&dir.path().join("lock"), Duration::ZERO).unwrap();
        assert_eq!(driver.open(lock, 1).map(drop).unwrap_err().kind(), Kind::Unavailable, "there is no second one");
    }

    #[test]
    #[ignore = "inside"]
    fn from_elsewhere() {
        std::env::set_current_dir(std::env::var_os("XDNA_TEST_DIR").unwrap()).unwrap();
        let device = open();
        assert_eq!(small(&device, LIMIT).unwrap(), RIGHT);
    }

    #[test]
    #[ignore = "inside"]
    fn full_elfs() {
        let device = open();
        for (name, k, n) in files("elf") {
            let context = device.context_elf(&file(&name)).unwrap();
            let kernel = context.kernel("main:seq").unwrap();
            let b = values(7, k * n);
            let weights = filled(device.buffer(k * n).unwrap(), &b).share().unwrap();
            let mut c = Some(output(device.buffer(4 * M * n + CANARY).unwrap()));
            for seed in 0..2 {
                let a = values(11 + seed, M * k);
                let args = vec![
                    Arg::Buffer(filled(device.buffer(M * k).unwrap(), &a)),
                    Arg::Shared(weights.clone()),
                    Arg::Buffer(c.take().unwrap()),
                ];
                let mut back = kernel.start(args).unwrap().wait(LIMIT).unwrap();
                assert_eq!(back.len(), 2);
                let (got, canary) = read(&mut back[1]);
                assert!(got == product(&a, &b, k, n) && canary, "{name}, seed {seed}");
                c = back.pop();
            }
        }
    }

    #[test]
    #[ignore = "inside"]
    fn xclbin() {
        let device = open();
        let context = device.context_xclbin(&file("gemm_i8.xclbin")).unwrap();
        let kernel = context.kernel("GEMM").unwrap();
        assert!(context.kernel("NONE").is_err());
        for (name, k, n) in files("bin") {
            let instructions = kernel.instructions(&file(&name)).unwrap();
            let (a, b) = (values(3, M * k), values(5, k * n));
            let args = vec![
                Arg::Buffer(filled(kernel.buffer(3, M * k).unwrap(), &a)),
                Arg::Buffer(filled(kernel.buffer(4, k * n).unwrap(), &b)),
                Arg::Buffer(output(kernel.buffer(5, 4 * M * n + CANARY).unwrap())),
            ];
            let mut back = kernel.start_with(&instructions, args).unwrap().wait(LIMIT).unwrap();
            let (c, canary) = read(&mut back[2]);
            assert!(c == product(&a, &b, k, n) && canary, "{name}");
        }
    }

    #[test]
    #[ignore = "inside"]
    fn partial_writes() {
        let device = open();
        let context = device.context_elf(&file("copy.elf")).unwrap();
        let kernel = context.kernel("copy:seq").unwrap();
        let mut from = filled(device.buffer(4096).unwrap(), &values(1, 4096));
        let mut to = device.buffer(4096).unwrap();
        let mut want = values(1, 4096);
        for round in 0..4 {
            let mut back = kernel.start(vec![Arg::Buffer(from), Arg::Buffer(to)]).unwrap().wait(LIMIT).unwrap();
            let mut got = vec![0; 4096];
            back[1].read(0, &mut got).unwrap();
            assert_eq!(got, want);
            // A few bytes in the middle of a line, and the output as the next input.
            back[1].write(100 * round + 3, &[round as u8; 5]).unwrap();
            want[100 * round + 3..100 * round + 8].fill(round as u8);
            from = back.pop().unwrap();
            to = back.pop().unwrap();
        }
        drop((from, to));
        // Memory that is used again is zero, for the device as well.
        let args = vec![Arg::Buffer(device.buffer(4096).unwrap()), Arg::Buffer(device.buffer(4096).unwrap())];
        let mut back = kernel.start(args).unwrap().wait(LIMIT).unwrap();
        let mut got = vec![1; 4096];
        back[1].read(0, &mut got).unwrap();
        assert_eq!(got, vec![0; 4096]);
    }

    #[test]
    #[ignore = "inside"]
    fn several() {
        let device = open();
        let one = device.context_elf(&file("full_i8_O_K128_N128.elf")).unwrap();
        let other = device.context_elf(&file("full_i8_O_K128_N128.elf")).unwrap();
        for seed in 0..4 {
            assert_eq!(small_on(&device, &one, LIMIT, seed).unwrap(), RIGHT);
            assert_eq!(small_on(&device, &other, LIMIT, seed + 9).unwrap(), RIGHT);
        }
        one.add(&file("copy.elf")).unwrap();
        let copy = one.kernel("copy:seq").unwrap();
        let args = vec![
            Arg::Buffer(filled(device.buffer(4096).unwrap(), &values(2, 4096))),
            Arg::Buffer(device.buffer(4096).unwrap()),
        ];
        let mut back = copy.start(args).unwrap().wait(LIMIT).unwrap();
        let mut got = vec![0; 4096];
        back[1].read(0, &mut got).unwrap();
        assert_eq!(got, values(2, 4096));
        assert_eq!(small_on(&device, &one, LIMIT, 40).unwrap(), RIGHT);
        // What cannot be is refused before anything is started.
        assert_eq!(device.buffer(0).unwrap_err().kind(), Kind::Request);
        assert_eq!(device.buffer(10).unwrap().write(8, &[0; 3]).unwrap_err().kind(), Kind::Request);
        assert!(device.context_elf(b"no ELF").is_err());
        assert!(device.context_xclbin(b"no xclbin").is_err());
        assert!(one.kernel("none:seq").is_err());
    }

    fn shared_memory(bytes: &[u8]) -> std::fs::File {
        use std::io::Write as _;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    #[test]
    #[ignore = "inside"]
    fn foreign() {
        let device = open();
        let context = device.context_elf(&file("copy.elf")).unwrap();
        let kernel = context.kernel("copy:seq").unwrap();
        let memory = shared_memory(&values(3, 16384));
        let foreign = device.import(memory.as_fd(), 16384).unwrap();
        // From the middle of it into a buffer of ours.
        let args = vec![Arg::Foreign(foreign.clone(), 4096), Arg::Buffer(device.buffer(4096).unwrap())];
        let mut back = kernel.start(args).unwrap().wait(LIMIT).unwrap();
        let mut got = vec![0; 4096];
        back[0].read(0, &mut got).unwrap();
        assert_eq!(got, values(3, 16384)[4096..8192]);
        // And back, to another place of it.
        let args = vec![Arg::Buffer(back.pop().unwrap()), Arg::Foreign(foreign.clone(), 12288)];
        kernel.start(args).unwrap().wait(LIMIT).unwrap();
        let mut all = vec![0; 16384];
        foreign.read(0, &mut all).unwrap();
        assert_eq!(all[12288..], values(3, 16384)[4096..8192]);
        assert_eq!(all[..12288], values(3, 16384)[..12288]);
        foreign.write(5, b"here").unwrap();
        foreign.read(0, &mut all[..16]).unwrap();
        assert_eq!(&all[5..9], b"here");
        assert_eq!(foreign.address(16384).unwrap_err().kind(), Kind::Request);
        assert!(device.import(memory.as_fd(), 16385).is_err());
    }

    fn copy_of_imported(device: &Device) -> Result<Vec<u8>, Error> {
        let memory = shared_memory(&values(4, 4096));
        let imported = device.import_through_driver(memory.as_fd())?;
        let context = device.context_elf(&file("copy.elf"))?;
        let kernel = context.kernel("copy:seq")?;
        let args = vec![Arg::Buffer(imported), Arg::Buffer(device.buffer(4096)?)];
        let mut back = kernel.start(args)?.wait(LIMIT)?;
        let mut got = vec![0; 4096];
        back[1].read(0, &mut got)?;
        Ok(got)
    }

    #[test]
    #[ignore = "inside"]
    fn imported() {
        let device = open();
        assert_eq!(copy_of_imported(&device).unwrap(), values(4, 4096));
        // A buffer of ours by its descriptor is the same memory.
        let mut buffer = filled(device.buffer(4096).unwrap(), &values(5, 4096));
        let fd = buffer.export().unwrap();
        let mut again = device.import_through_driver(fd.as_fd()).unwrap();
        let mut got = vec![0; 4096];
        again.read(0, &mut got).unwrap();
        assert_eq!(got, values(5, 4096));
        buffer.read(0, &mut got).unwrap();
    }

    #[test]
    #[ignore = "inside"]
    fn poisoned() {
        let device = open();
        assert_eq!(small(&device, LIMIT).unwrap(), RIGHT);
        assert_eq!(copy_of_imported(&device).unwrap_err().kind(), Kind::Broken);
        // Every later submission fails too: the reason for `Device::import`.
        assert_eq!(small(&device, LIMIT).unwrap_err().kind(), Kind::Broken);
    }

    fn descriptors() -> usize {
        Path::new("/proc/self/fd").read_dir().unwrap().count()
    }

    #[test]
    #[ignore = "inside"]
    fn a_thousand_runs() {
        let before = descriptors();
        {
            let device = open();
            let mut during = 0;
            for round in 0..10 {
                let context = device.context_elf(&file("full_i8_O_K128_N128.elf")).unwrap();
                for run in 0..100 {
                    assert_eq!(small_on(&device, &context, LIMIT, 100 * round + run).unwrap(), RIGHT);
                }
                drop(context);
                assert_eq!(device.live(), Live::default());
                if round == 0 {
                    during = descriptors();
                }
            }
            assert_eq!(descriptors(), during, "descriptors after 100 and 1000 runs");
            device.trim();
        }
        // XRT keeps the node open for as long as it is loaded; this closes it, and the double writes its report.
        assert!(descriptors() <= before + 8, "{} descriptors, {before} before", descriptors());
    }

    #[test]
    #[ignore = "inside"]
    fn times_out() {
        let device = open();
        let context = device.context_elf(&file("full_i8_O_K128_N128.elf")).unwrap();
        let error = small_on(&device, &context, SHORT, 1).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        assert_eq!(error.kind(), Kind::Broken);
        let error = small_on(&device, &context, SHORT, 1).unwrap_err();
        assert!(matches!(error, Error::Lost { .. }), "{error}");
        drop(context);
        assert_eq!(device.live(), Live::default());
        assert_eq!(small(&device, LIMIT).unwrap(), RIGHT);
    }

    #[test]
    #[ignore = "inside"]
    fn stays_wedged() {
        let device = open();
        for _ in 0..3 {
            let error = small(&device, SHORT).unwrap_err();
            assert!(matches!(error, Error::Timeout { state: State::Pending(_), .. }), "{error}");
        }
        assert_eq!(device.live(), Live::default());
    }

    #[test]
    #[ignore = "inside"]
    fn is_aborted() {
        let device = open();
        let error = small(&device, LIMIT).unwrap_err();
        assert!(matches!(error, Error::Failed { state: State::Abort, .. }), "{error}");
        assert_eq!(small(&device, LIMIT).unwrap(), RIGHT);
    }

    #[test]
    #[ignore = "inside"]
    fn is_in_error() {
        let device = open();
        let error = small(&device, LIMIT).unwrap_err();
        assert!(matches!(error, Error::Failed { state: State::Error, .. }), "{error}");
        assert_eq!(small(&device, LIMIT).unwrap(), RIGHT);
    }

    #[test]
    #[ignore = "inside"]
    fn is_gone() {
        let device = open();
        let error = small(&device, LIMIT).unwrap_err();
        assert!(matches!(error, Error::Gone { .. }), "{error}");
        assert_eq!(small(&device, LIMIT).unwrap(), RIGHT, "once");
    }

    #[test]
    #[ignore = "inside"]
    fn is_wrong() {
        let device = open();
        let got = small(&device, LIMIT).unwrap();
        let want = match std::env::var("NPUSIM_FAULT").unwrap().as_str() {
            "spill" => (true, false),
            _ => (false, true),
        };
        assert_eq!(got, want);
    }

    #[test]
    #[ignore = "inside"]
    fn memlock_is_short() {
        let error = try_open().map(drop).unwrap_err();
        assert!(matches!(error, Error::Memlock { .. }), "{error}");
        assert!(error.to_string().contains("limits.conf"));
    }

    #[test]
    #[ignore = "inside"]
    fn firmware_is_old() {
        let error = small(&open(), LIMIT).unwrap_err();
        assert!(matches!(error, Error::Firmware { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("0.6.0") && text.contains("1.0.0.63") && text.contains("2.25"), "{text}");
    }

    #[test]
    #[ignore = "inside"]
    fn contexts_are_taken() {
        let error = small(&open(), LIMIT).unwrap_err();
        assert_eq!(error.kind(), Kind::Busy, "{error}");
    }

    #[test]
    #[ignore = "inside"]
    fn contexts_run_out() {
        let device = open();
        let elf = file("full_i8_O_K128_N128.elf");
        let mut contexts: Vec<Context> = (0..16).map(|_| device.context_elf(&elf).unwrap()).collect();
        assert_eq!(device.context_elf(&elf).unwrap_err().kind(), Kind::Busy);
        contexts.pop();
        assert_eq!(small(&device, LIMIT).unwrap(), RIGHT);
    }

    fn node_fault(code: i32) {
        match try_open().map(drop).unwrap_err() {
            Error::NoNode(fault) => assert_eq!(fault.code, code, "{fault}"),
            other => panic!("{other}"),
        }
    }

    // ENOENT, EACCES, ENODEV, EOPNOTSUPP.
    #[test]
    #[ignore = "inside"]
    fn no_node() {
        node_fault(2);
    }

    #[test]
    #[ignore = "inside"]
    fn not_allowed() {
        node_fault(13);
    }

    #[test]
    #[ignore = "inside"]
    fn nothing_behind() {
        node_fault(19);
    }

    #[test]
    #[ignore = "inside"]
    fn no_shared_memory() {
        node_fault(95);
    }

    #[test]
    #[ignore = "inside"]
    fn noisy() {
        println!("before");
        let device = open();
        drop(device.buffer(8192).unwrap());
        device.trim();
        drop(device);
        println!("after");
    }
}
