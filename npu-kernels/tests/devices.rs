//! Catalogues, their directories, and whether a device's faults are noticed.

use npu_kernels::catalogue::{Catalogue, Files, KernelId, Layout, Operand, Rounding, Spec, Type};
use npu_kernels::check::{self, Fault, Wrong};
use npu_kernels::cpu_device::CpuDevice;
use npu_kernels::device::{Command, Device, DeviceError};
use npu_kernels::fake::{Fake, Misfortune};
use npu_kernels::{Pool, manifest, oracle};
use std::time::Duration;

fn all_forms() -> Vec<Spec> {
    let operand = |ty, layout| Operand { ty, layout };
    let rows = Spec::int8("rows", "O", 256, 384);
    let mut blocked = Spec::int8("blocked", "O", 128, 256);
    blocked.b.layout = Layout::Blocked64x128;
    let q4 = Spec {
        name: "q4".into(),
        m: 16,
        n: 64,
        a: operand(Type::Bf16, Layout::RowMajor),
        b: operand(Type::Q4nx, Layout::Q4nxTiles),
        c: operand(Type::F32, Layout::RowMajor),
        rounding: Rounding::NearestEven,
        ..Spec::int8("", "", 512, 64)
    };
    let blocks = operand(Type::Bfp16, Layout::Bfp16Blocks);
    let bfp = Spec { name: "bfp".into(), a: blocks, b: blocks, k: 64, n: 24, rounding: Rounding::Floor, ..q4.clone() };
    vec![rows, blocked, q4, bfp]
}

fn cpu() -> CpuDevice {
    CpuDevice::new(Catalogue::new(all_forms()).unwrap(), Pool::new(2).unwrap())
}

fn fake() -> Fake {
    Fake::new(Catalogue::new(all_forms()).unwrap(), Pool::new(1).unwrap())
}

#[test]
fn the_host_computes_what_the_oracle_does_in_every_form() {
    let mut device = cpu();
    for id in 0..4 {
        for seed in 1..=3 {
            check::run(&mut device, KernelId(id), seed).unwrap_or_else(|e| panic!("{id} {seed}: {e}"));
        }
        check::self_test(&mut device, KernelId(id)).unwrap();
    }
    assert_eq!(device.buffers(), 0);
}

/// By hand: one product of numbers that are different in every place.
#[test]
fn the_oracle_by_hand() {
    let spec = Spec { m: 2, k: 3, n: 2, ..Spec::int8("x", "", 3, 2) };
    let a = [1i8, 2, 3, -1, 0, 127].map(i8::cast_unsigned);
    let b = [1i8, 10, -2, 20, 3, -127].map(i8::cast_unsigned);
    let c: Vec<i32> = oracle::gemm(&spec, &a, &b).as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
    assert_eq!(c, [1 - 4 + 9, 10 + 40 - 381, -1 + 381, -10 - 127 * 127]);
}

#[test]
fn every_misfortune_is_noticed_and_no_buffer_is_left() {
    let failed = |m: Misfortune, at: u64| {
        let mut device = fake();
        device.plan(at, m);
        let result = check::self_test(&mut device, KernelId(0));
        if m != Misfortune::Gone {
            assert_eq!(device.buffers(), 0, "{m:?}");
        }
        result.expect_err("noticed")
    };
    for at in [0, 1] {
        assert!(matches!(failed(Misfortune::Timeout, at), Fault::Device(DeviceError::Timeout { .. })));
        assert!(matches!(failed(Misfortune::Abort, at), Fault::Device(DeviceError::Failed { .. })));
        assert!(matches!(failed(Misfortune::Gone, at), Fault::Device(DeviceError::Gone { .. })));
        assert!(matches!(failed(Misfortune::Busy, at), Fault::Device(DeviceError::Busy { .. })));
        assert!(matches!(failed(Misfortune::WrongC, at), Fault::Wrong(Wrong::Row { row: 0 })));
        assert!(matches!(failed(Misfortune::StaleC, at), Fault::Wrong(Wrong::Row { row: 0 })));
        assert!(matches!(failed(Misfortune::Overrun, at), Fault::Wrong(Wrong::Canary { at: 0 })));
        let slow = Misfortune::Slow(Duration::from_secs(3600));
        assert!(matches!(failed(slow, at), Fault::Device(DeviceError::Timeout { .. })));
    }
    let mut device = fake();
    device.plan(0, Misfortune::StaleC);
    let e = check::run(&mut device, KernelId(0), 1).unwrap_err();
    assert!(e.to_string().contains("49152 of 49152 elements are wrong, first row 0, column 0"), "{e}");
    assert!(e.to_string().contains("what was there before"), "{e}");
}

#[test]
fn a_single_wrong_element_is_found_by_its_projection_and_named_by_the_oracle() {
    let spec = all_forms()[1].clone();
    let problem = check::Problem::new(&spec, 7);
    let good = oracle::gemm(&spec, &problem.a, &problem.b);
    assert_eq!(check::holds(&spec, &problem, &good), Ok(()));
    // In the last row and column as well, in the highest and the lowest bit.
    for (row, column, bit) in [(0, 0, 0), (77, 130, 0), (126, 255, 31), (127, 255, 0)] {
        let mut bad = good.clone();
        let at = (row * spec.n + column) * 4 + bit / 8;
        bad[at] ^= 1 << (bit % 8);
        assert_eq!(check::holds(&spec, &problem, &bad), Err(Wrong::Row { row }));
        let wrong = check::compare(&spec, &bad, &good).unwrap_err();
        assert!(
            matches!(wrong, Wrong::Elements { count: 1, row: r, column: c, .. } if (r, c) == (row, column)),
            "{wrong}"
        );
    }
}

#[test]
fn misuse_is_an_error() {
    let mut device = cpu();
    let a = device.alloc(10).unwrap();
    assert!(device.write(a, 8, &[0; 3]).is_err());
    assert!(device.read(a, usize::MAX, &mut [0; 2]).is_err());
    let small = Command { kernel: KernelId(0), a, b: a, c: a };
    assert!(device.submit(&small).is_err(), "buffers too small");
    assert!(device.submit(&Command { kernel: KernelId(99), ..small }).is_err());
    device.free(a);
    assert!(device.write(a, 0, &[0]).is_err());
    assert!(device.wait(npu_kernels::device::Fence(5), Duration::ZERO).is_err());
}

fn entry(hash: &str) -> String {
    format!(
        "# kernels\n[[kernel]]\nname = \"o\"\nop = \"gemm\"\nkind = \"full-elf\"\nfile = \"o.elf\"\nsha256 = \"{hash}\"\n\
         kernel = \"main:seq\"\nroles = [\"O\"]\nargs = [\"b\", \"c\", \"a\"]\nm = 128\nk = 640\nn = 640\n\
         a = {{ type = \"i8\", layout = \"row-major\" }}\nb = {{ type = \"i8\", layout = \"blocked-64x128\" }}\n\
         c = {{ type = \"i32\", layout = \"row-major\" }}\nrounding = \"exact\"\n"
    )
}

#[test]
fn a_manifest_is_read_and_written() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("o.elf"), b"a kernel").unwrap();
    let hash = "0123";
    let e = {
        std::fs::write(dir.path().join(manifest::MANIFEST), entry(hash)).unwrap();
        manifest::load(dir.path()).unwrap_err().to_string()
    };
    assert!(e.contains("kernels.toml:7: o.elf hashes to ") && e.ends_with(&format!("not to {hash}")), "{e}");
    // Of "a kernel", by sha256sum.
    let hash = "4fff0d3e643b3894c17a0738fbdc591953aa722c9d42774425090accc4377126".to_owned();
    std::fs::write(dir.path().join(manifest::MANIFEST), entry(&hash)).unwrap();
    let catalogue = manifest::load(dir.path()).unwrap();
    let spec = &catalogue.kernels()[0];
    assert_eq!((spec.name.as_str(), spec.args, spec.b.layout), ("o", [2, 0, 1], Layout::Blocked64x128));
    assert!(matches!(&spec.files, Files::FullElf(f) if f.sha256 == hash));
    std::fs::write(dir.path().join(manifest::MANIFEST), manifest::entry(spec)).unwrap();
    assert_eq!(manifest::load(dir.path()).unwrap().kernels(), catalogue.kernels());
}

#[test]
fn what_is_wrong_with_a_manifest_has_its_line() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("o.elf"), b"a kernel").unwrap();
    let good = entry(&manifest::sha256(b"a kernel"));
    for (from, to, line, word) in [
        ("m = 128", "m = 128\nsize = 3", 12, "unknown field `size`"),
        ("file = \"o.elf\"", "file = \"p.elf\"", 6, "No such file"),
        ("file = \"o.elf\"", "file = \"../o.elf\"", 6, "a file beside this one"),
        ("op = \"gemm\"", "op = \"conv\"", 4, "known is gemm"),
        ("\"full-elf\"", "\"elf\"", 5, "full-elf or xclbin+insts"),
        ("\"full-elf\"", "\"xclbin+insts\"", 5, "needs insts"),
        ("\"c\", \"a\"]", "\"c\"]", 10, "in some order"),
        ("\"c\", \"a\"]", "\"c\", \"c\"]", 10, "in some order"),
        ("type = \"i32\"", "type = \"i16\"", 16, "one of i8, i32"),
        ("\"blocked-64x128\"", "\"blocked\"", 15, "one of row-major"),
        ("k = 640", "k = 100", 2, "multiples of 64 and 128"),
        ("k = 640", "k = -1", 12, "invalid value"),
        ("rounding = \"exact\"", "rounding = \"floor\"", 2, "int8 products are exact"),
        ("rounding = \"exact\"", "rounding = ", 17, ""),
    ] {
        assert!(good.contains(from), "{from}");
        std::fs::write(dir.path().join(manifest::MANIFEST), good.replace(from, to)).unwrap();
        let e = manifest::load(dir.path()).unwrap_err().to_string();
        assert!(e.contains(&format!("kernels.toml:{line}: ")) && e.contains(word), "{to}: {e}");
    }
    std::fs::write(dir.path().join(manifest::MANIFEST), format!("{good}{good}")).unwrap();
    let e = manifest::load(dir.path()).unwrap_err().to_string();
    assert!(e.contains("a second kernel called \"o\""), "{e}");
}

#[test]
fn a_directory_without_a_manifest() {
    let dir = tempfile::tempdir().unwrap();
    assert!(manifest::load(&dir.path().join("nowhere")).is_err());
    assert!(manifest::load(dir.path()).unwrap().kernels().is_empty());
    for name in ["full_i8_D_K1536_N640.elf", "full_i8_QKV_K640_N1024.elf", "other.elf", "notes.txt"] {
        std::fs::write(dir.path().join(name), name).unwrap();
    }
    let catalogue = manifest::load(dir.path()).unwrap();
    let found: Vec<_> = catalogue.kernels().iter().map(|s| (s.roles[0].as_str(), s.m, s.k, s.n)).collect();
    assert_eq!(found, [("D", 128, 1536, 640), ("QKV", 128, 640, 1024)]);
    assert!(catalogue.notes.len() == 1 && catalogue.notes[0].contains("other.elf"), "{:?}", catalogue.notes);
    std::fs::write(dir.path().join("full_i8_D_K1500_N640.elf"), "").unwrap();
    let e = manifest::load(dir.path()).unwrap_err().to_string();
    assert!(e.contains("full_i8_D_K1500_N640.elf: K = 1500"), "{e}");
}
