//! Files that are not what they say: each is an error that names the place, quickly and in little memory.

use std::time::{Duration, Instant};

use gguf::{Error, GgmlType, Gguf, Limits, Value, write::Writer};

/// A file put together field by field.
#[derive(Clone, Default)]
struct Raw(Vec<u8>);

impl Raw {
    fn head(n_tensors: u64, n_keys: u64) -> Raw {
        Raw(b"GGUF".to_vec()).u32(3).u64(n_tensors).u64(n_keys)
    }
    fn u32(mut self, v: u32) -> Raw {
        self.0.extend(v.to_le_bytes());
        self
    }
    fn u64(mut self, v: u64) -> Raw {
        self.0.extend(v.to_le_bytes());
        self
    }
    fn str(self, s: &str) -> Raw {
        self.bytes(s.as_bytes())
    }
    fn bytes(self, s: &[u8]) -> Raw {
        let mut out = self.u64(s.len() as u64);
        out.0.extend(s);
        out
    }
    fn zeros(mut self, n: usize) -> Raw {
        self.0.resize(self.0.len() + n, 0);
        self
    }
    /// Name, dimensions, type and offset.
    fn tensor(self, name: &str, ne: &[u64], ty: u32, offset: u64) -> Raw {
        let out = self.str(name).u32(ne.len() as u32);
        ne.iter().fold(out, |out, &n| out.u64(n)).u32(ty).u64(offset)
    }
}

fn open(bytes: Vec<u8>) -> Result<Gguf, Error> {
    Gguf::from_bytes("m.gguf", bytes)
}

#[track_caller]
fn refused(raw: Raw, wanted: &[&str]) {
    let message = open(raw.0).unwrap_err().to_string();
    for wanted in ["m.gguf: "].iter().chain(wanted) {
        assert!(message.contains(wanted), "{wanted:?} is not in {message:?}");
    }
}

/// A small file with all that a file can have.
fn good() -> Writer {
    let mut w = Writer::new("llama");
    w.u32("llama.block_count", 2).f32("llama.eps", 1e-5).bool("flag", true);
    w.array_str("tokens", &["a", "", "bc"]).array_i32("types", &[1, -1]);
    w.tensor_f32("a.weight", &[4, 2], &[0.5; 8]).unwrap();
    w.tensor("b.weight", GgmlType::Q4_1, &[64], vec![3; 40]).unwrap();
    w
}

#[test]
fn magic_and_version() {
    for (n, at, of) in [(0, 0, "magic"), (3, 0, "magic"), (4, 4, "version"), (7, 4, "version"), (8, 8, "tensors")] {
        let mut raw = Raw::head(0, 0);
        raw.0.truncate(n);
        refused(raw, &[&format!("at byte {at}:"), of, &format!("found {} before the end", n - at)]);
    }
    refused(Raw(b"GGML".to_vec()).zeros(28), &["at byte 0: magic", "wanted \"GGUF\"", "found \"GGML\""]);
    refused(Raw(b"ggjt".to_vec()).zeros(28), &["before GGUF"]);
    refused(Raw(b"tjgg".to_vec()).zeros(28), &["before GGUF"]);
    refused(Raw(b"version https://git-lfs.github.com/spec/v1\n".to_vec()), &["Git LFS pointer"]);
    refused(Raw(b"<!DOCTYPE html>".to_vec()), &["web page"]);
    let version = |v: u32| Raw(b"GGUF".to_vec()).u32(v).zeros(64);
    refused(version(0), &["at byte 4: version is GGUF 0"]);
    refused(version(1), &["at byte 4: version is GGUF 1", "convert the model again"]);
    refused(version(4), &["at byte 4: version is GGUF 4", "2 and 3"]);
    refused(version(3u32.swap_bytes()), &["at byte 4", "big-endian file (GGUF 3)"]);
    refused(version(2u32.swap_bytes()), &["big-endian file (GGUF 2)"]);
    assert!(open(Raw::head(0, 0).0).is_ok(), "nothing in it is fine");
}

#[test]
fn counts_that_the_file_has_no_room_for() {
    for n in [1, 1 << 40, 1 << 62, 1 << 63, u64::MAX] {
        refused(Raw::head(0, n), &["at byte 16: number of keys", &format!("found {n}")]);
        refused(Raw::head(n, 0), &["at byte 8: number of tensors", &format!("found {n}")]);
    }
    // 32, 43 and 45 bytes, of which some count says that there is more.
    refused(Raw::head(1, 0).zeros(8), &["at byte 8: number of tensors", "at most 0", "found 1"]);
    refused(Raw::head(0, 1).u64(1 << 48).zeros(11), &["at byte 24: length of name of key 0", "found 281474976710656"]);
    refused(
        Raw::head(0, 1).str("k").u32(8).u64(1 << 48),
        &["at byte 37: length of value of key \"k\"", "at most the 0"],
    );
    let array = |elem: u32, n: u64| Raw::head(0, 1).str("k").u32(9).u32(elem).u64(n);
    for elem in [0, 4, 7, 8, 10] {
        for n in [1, 1 << 40, 1 << 61, 1 << 62, 1 << 63, u64::MAX] {
            refused(array(elem, n), &["at byte 41: array length of key \"k\"", &format!("found {n}")]);
        }
    }
    // Enough bytes for the lengths that the array claims, but not for what they say.
    refused(array(8, 2).str("a").u64(1 << 48).zeros(40), &["at byte 58: length of string 1 of 2 in key \"k\""]);
    refused(array(8, 2).u64(u64::MAX).zeros(40), &["at byte 49: length of string 0 of 2 in key \"k\""]);
    refused(
        array(8, 3).str("abcdefgh").str("ab").zeros(3),
        &["at byte 75: length of string 2 of 3", "3 before the end"],
    );
}

#[test]
fn limits() {
    let bytes = good().finish();
    let with = |l: Limits| Gguf::from_bytes_with("m.gguf", bytes.clone(), &l).map_err(|e| e.to_string());
    let d = Limits::default();
    assert!(with(d).is_ok());
    assert!(with(Limits { keys: 6, tensors: 2, array: 3 }).is_ok());
    assert!(with(Limits { keys: 5, ..d }).unwrap_err().contains("number of keys: wanted at most 5"));
    assert!(with(Limits { tensors: 1, ..d }).unwrap_err().contains("number of tensors: wanted at most 1"));
    assert!(with(Limits { array: 2, ..d }).unwrap_err().contains("\"tokens\": wanted at most 2"));
}

#[test]
fn keys() {
    refused(Raw::head(0, 1).str("").u32(4).u32(7), &["at byte 24: name of key 0 of 1", "empty"]);
    refused(Raw::head(0, 1).bytes(b"\xff\x1b[31m").u32(4).u32(7), &["at byte 24", "UTF-8", "\\u{1b}"]);
    refused(Raw::head(0, 1).str("k").u32(13).u64(0), &["at byte 33: type of key \"k\"", "0 to 12", "found 13"]);
    refused(Raw::head(0, 1).str("k").u32(u32::MAX).u64(0), &["at byte 33", "found 4294967295"]);
    refused(Raw::head(0, 1).str("k").u32(10).u32(7), &["at byte 37: value of key \"k\"", "wanted 8 bytes, found 4"]);
    refused(Raw::head(0, 1).str("k").u32(9).u32(13).u64(0), &["at byte 37: element type of key \"k\"", "found 13"]);
    let nested = Raw::head(0, 1).str("k").u32(9).u32(9).u64(1).u32(4).u64(1).u32(7);
    refused(nested, &["at byte 37: element type of key \"k\"", "array of arrays"]);
    let twice = Raw::head(0, 3).str("k").u32(4).u32(7).str("a").u32(4).u32(7).str("k").u32(4).u32(7);
    refused(twice, &["at byte 58: name of key", "\"k\" a second time (first at byte 24)"]);
    // A long name is not repeated in full.
    let long = "n".repeat(1 << 20);
    let message = open(Raw::head(0, 1).str(&long).u32(99).u64(0).0).unwrap_err().to_string();
    assert!(message.len() < 300, "{}", message.len());
}

#[test]
fn alignment() {
    let with = |ty: u32, v: u32| Raw::head(0, 1).str("general.alignment").u32(ty).u32(v);
    for v in [0, 3, 33, 48, u32::MAX] {
        refused(with(4, v), &["general.alignment", "power of two", &format!("found u32 {v}")]);
    }
    refused(with(5, 32), &["general.alignment", "found i32 32"]);
    refused(with(9, 4).u64(0), &["general.alignment", "found an array"]);
    for v in [1, 2, 32, 4096, 1 << 31] {
        assert_eq!(open(with(4, v).0).unwrap().alignment(), v);
    }
    // The tensor begins at 2^31, which is far behind the end.
    let raw = Raw::head(1, 1).str("general.alignment").u32(4).u32(1 << 31).tensor("t", &[1], 0, 0).zeros(64);
    refused(raw, &["data of tensor \"t\"", "bytes 2147483648 to 2147483652"]);
    let mut w = good();
    w.alignment(1).unwrap();
    assert_eq!(open(w.finish()).unwrap().need_tensor("a.weight").unwrap().to_f32().unwrap(), [0.5; 8]);
    assert!(w.alignment(0).is_err() && w.alignment(24).is_err());
}

#[test]
fn tensors() {
    let one = |ne: &[u64], ty, offset| Raw::head(1, 0).tensor("t", ne, ty, offset).zeros(256);
    let all_good = one(&[4, 2], 0, 0);
    assert_eq!(open(all_good.0).unwrap().tensor("t").unwrap().offset, 96, "offset 0 is the first byte of the data");

    let empty = Raw::head(1, 0).tensor("", &[4], 0, 0).zeros(64);
    refused(empty, &["at byte 24: name of tensor 0 of 1", "1 to 63 bytes", "found 0"]);
    let long = Raw::head(1, 0).tensor(&"n".repeat(64), &[4], 0, 0).zeros(64);
    refused(long, &["at byte 24: name of tensor 0", "found 64 bytes"]);
    assert!(open(Raw::head(1, 0).tensor(&"n".repeat(63), &[4], 0, 0).zeros(64).0).is_ok());
    refused(Raw::head(1, 0).bytes(b"\xc3\x28").zeros(64), &["at byte 24: name of tensor 0", "UTF-8"]);
    let two = Raw::head(2, 0).tensor("t", &[8], 0, 0).tensor("t", &[8], 0, 32).zeros(128);
    refused(two, &["at byte 57: name of tensor", "\"t\" a second time (first at byte 24)"]);

    refused(one(&[1, 1, 1, 1, 1], 0, 0), &["at byte 33: number of dimensions of tensor \"t\"", "at most 4", "found 5"]);
    refused(Raw::head(1, 0).str("t").u32(u32::MAX).zeros(64), &["at byte 33", "found 4294967295"]);
    refused(one(&[4, 1 << 63], 0, 0), &["at byte 45: dimension 1 of tensor \"t\"", "found 9223372036854775808"]);
    refused(one(&[33, 2], 3, 0), &["at byte 37: row of tensor \"t\"", "multiple of 32", "Q4_1", "found 33"]);

    // Products that wrap to something small, or to zero. The dimensions are below 2^63 each.
    let m = i64::MAX as u64;
    for ne in [
        &[(1 << 42) + 1, 1 << 22][..],
        &[1 << 62, 4],
        &[1 << 32, 1 << 32],
        &[m, 2],
        &[2, m],
        &[m, m, m, m],
        &[1 << 62],
        &[1 << 62, 0],
        &[0, 1 << 40, 1 << 40, 1],
        &[0, 1 << 40, 1 << 40, 0],
        &[1, 1 << 40, 1 << 40, 0],
    ] {
        refused(one(ne, 0, 0), &["at byte 37: size of tensor \"t\"", "below 2^63"]);
    }
    // Elements fit, bytes do not.
    refused(one(&[1 << 60], 28, 0), &["at byte 37: size of tensor \"t\"", "F64"]);
    // Fits in numbers, but not in the file.
    refused(one(&[1 << 50], 2, 0), &["data of tensor \"t\"", "bytes missing"]);
    refused(one(&[1 << 57, 33], 24, 0), &["tensor \"t\"", "2^62"]);
    // Empty tensors and scalars are no error in ggml.
    for ne in [&[0][..], &[0, 5], &[32, 0], &[]] {
        let model = open(one(ne, 0, 0).0).unwrap();
        let t = model.tensor("t").unwrap();
        assert_eq!(t.data.len() as u64, 4 * t.n_elements());
        assert_eq!(t.to_f32().unwrap().len() as u64, t.n_elements());
    }
}

#[test]
fn tensor_types() {
    let one = |ty| Raw::head(1, 0).tensor("t", &[256], ty, 0).zeros(2400);
    for ty in 0..=42 {
        let known = GgmlType::from_id(ty).unwrap();
        if known.is_removed() {
            let named = format!("type of tensor \"t\" is {known} (ggml type {ty})");
            refused(one(ty), &["at byte 45", &named, "convert the model again"]);
        } else {
            assert_eq!(open(one(ty).0).unwrap().tensor("t").unwrap().ty, known);
        }
    }
    for ty in [43, 100, 1 << 31, u32::MAX] {
        refused(one(ty), &["at byte 45", &format!("type of tensor \"t\" is ggml type {ty}"), "fork"]);
    }
}

#[test]
fn places_of_tensors() {
    // Two tensors of 16 bytes; the data begins at byte 96.
    let two = |a, b, data: usize| Raw::head(2, 0).tensor("a", &[4], 0, a).tensor("b", &[4], 0, b).zeros(6 + data);
    let good = two(0, 32, 48);
    assert_eq!(open(good.0).unwrap().tensor("b").unwrap().offset, 128);
    refused(two(0, 32, 47), &["data of tensor \"b\"", "bytes 128 to 144", "file of 143 bytes", "1 bytes missing"]);
    refused(two(0, 32, 0), &["data of tensor \"a\"", "48 bytes missing"]);
    for offset in [0, 16, 31, 33, 64, 1 << 62, 1 << 63, u64::MAX, u64::MAX - 31] {
        let found = format!("wanted 32, where the tensors before it end (no gap, no overlap), found {offset}");
        refused(two(0, offset, 48), &["at byte 82: offset of tensor \"b\"", &found]);
    }
    refused(two(u64::MAX, 32, 48), &["at byte 49: offset of tensor \"a\"", "wanted 0"]);
    // Even the padding before the data is missing.
    refused(Raw::head(1, 0).tensor("t", &[4], 0, 0), &["data of tensor \"t\"", "bytes 64 to 80", "file of 57 bytes"]);
}

#[test]
fn wrong_types_for_what_is_asked() {
    let mut w = good();
    w.i8("minus", -1).u64("large", u64::MAX).f64("double", 0.1).array_u8("bytes", &[7, 8]).str("s", "text");
    w.array_str("odd", &[&b"ok"[..], b"\xff"]);
    let m = open(w.finish()).unwrap();
    assert_eq!(m.u32("llama.block_count").unwrap(), Some(2));
    assert_eq!(m.u64("llama.block_count").unwrap(), Some(2));
    assert_eq!(m.i64("minus").unwrap(), Some(-1));
    assert_eq!(m.f32("double").unwrap(), Some(0.1));
    assert_eq!(m.u32("no").unwrap(), None);
    let says = |e: Error, wanted: &str| {
        let e = e.to_string();
        assert!(e.contains("m.gguf: key ") && e.contains(wanted), "{wanted:?} is not in {e:?}");
    };
    says(m.u32("minus").unwrap_err(), "key \"minus\": wanted an integer from 0 to 4294967295, found i8 -1");
    says(m.u64("minus").unwrap_err(), "found i8 -1");
    says(m.u32("large").unwrap_err(), "found u64 18446744073709551615");
    says(m.i64("large").unwrap_err(), "below 2^63");
    says(m.u32("flag").unwrap_err(), "found bool true");
    says(m.u32("tokens").unwrap_err(), "found arr of 3 str");
    says(m.f32("llama.block_count").unwrap_err(), "wanted an f32, found u32 2");
    says(m.bool("llama.block_count").unwrap_err(), "wanted a bool, found u32 2");
    says(m.str("flag").unwrap_err(), "found bool true");
    says(m.array("s").unwrap_err(), "wanted an array, found str \"text\"");
    says(m.bad_key("llama.rope", "an f32"), "key \"llama.rope\": wanted an f32, found no such key");
    says(m.bad_key("llama.block_count", "at most 1"), "wanted at most 1, found u32 2");

    let array = |k| m.array(k).unwrap().unwrap();
    assert_eq!(array("bytes").iter_u64().unwrap().collect::<Result<Vec<_>, _>>().unwrap(), [7, 8]);
    assert_eq!(array("types").iter_i64().unwrap().collect::<Result<Vec<_>, _>>().unwrap(), [1, -1]);
    assert_eq!(array("tokens").iter_str().unwrap().collect::<Result<Vec<_>, _>>().unwrap(), ["a", "", "bc"]);
    let negative: Vec<_> = array("types").iter_u64().unwrap().collect();
    assert_eq!(*negative[0].as_ref().unwrap(), 1);
    says(array("types").iter_u64().unwrap().nth(1).unwrap().unwrap_err(), "not negative at index 1, found i32 -1");
    says(
        array("types").iter_str().err().unwrap(),
        "key \"types\": wanted an array of UTF-8 strings, found arr of 2 i32",
    );
    says(array("types").iter_f32().err().unwrap(), "floating-point");
    says(array("types").iter_bool().err().unwrap(), "bools");
    says(array("tokens").iter_u64().err().unwrap(), "found arr of 3 str");
    says(array("odd").iter_str().unwrap().nth(1).unwrap().unwrap_err(), "at index 1");
    assert!(matches!(array("odd").iter().nth(1), Some(Value::Bytes(b"\xff"))));
    assert!(m.need_tensor("no").unwrap_err().to_string().contains("no tensor \"no\" among 2"));
}

#[test]
fn a_vocabulary_alone() {
    let mut w = Writer::new("llama");
    w.array_str("tokenizer.ggml.tokens", &["a", "b"]);
    let mut bytes = w.finish();
    bytes.push(0); // neither padding nor its absence matters
    let m = open(bytes).unwrap();
    assert_eq!(m.architecture().unwrap(), "llama");
    assert!(m.need_tensor("token_embd.weight").unwrap_err().to_string().contains("a vocabulary without weights"));
}

#[test]
fn models_and_errors_may_cross_threads() {
    fn crosses<T: Send + Sync + 'static>() {}
    crosses::<Gguf>();
    crosses::<Error>();
}

/// Whatever the byte at which a file is cut, it is an error at a place inside what is left, or a tensor that is cut.
#[test]
fn cut_at_every_byte() {
    let whole = good().finish();
    // The last tensor is 40 bytes from a multiple of 32; its padding is not needed.
    let needed = whole.len() - 24;
    for n in 0..needed {
        match open(whole[..n].to_vec()) {
            Err(Error::Format { offset, .. }) if offset <= n as u64 => {}
            other => panic!("{n} bytes: {other:?}"),
        }
    }
    for n in needed..=whole.len() {
        assert!(open(whole[..n].to_vec()).is_ok(), "{n} bytes");
    }
}

#[test]
fn not_files() {
    let dir = tempfile::tempdir().unwrap();
    let says = |path: &std::path::Path, wanted: &str| {
        let e = Gguf::open(path).unwrap_err().to_string();
        assert!(e.contains(wanted) && e.contains(&path.display().to_string()), "{wanted:?} is not in {e:?}");
    };
    says(&dir.path().join("none.gguf"), "No such file");
    says(dir.path(), "is a directory");
    let empty = dir.path().join("empty.gguf");
    std::fs::write(&empty, []).unwrap();
    says(&empty, "at byte 0: magic: wanted 4 bytes, found 0");
    says(std::path::Path::new("/dev/null"), "not a regular file");
}

/// A file whose claims are large is no work: neither in time nor in memory.
#[test]
fn large_claims_are_cheap() {
    let start = Instant::now();
    for _ in 0..1000 {
        assert!(open(Raw::head(0, 1 << 40).zeros(1000).0).is_err());
        assert!(open(Raw::head(0, 1).str("k").u32(9).u32(8).u64(1 << 40).zeros(1000).0).is_err());
        assert!(open(Raw::head(1, 0).tensor("t", &[1 << 60], 0, 0).zeros(1000).0).is_err());
    }
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    if let Ok(status) = std::fs::read_to_string("/proc/self/status") {
        let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
        let kib: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
        assert!(kib < 64 << 10, "peak of {kib} KiB");
    }
}

/// The program is started per request: a vocabulary of 150,000 entries and as many merges is stepped over in about a
/// millisecond. The bound is loose, for busy machines; a reader that makes a value of each entry exceeds it.
#[test]
fn a_vocabulary_costs_nothing() {
    let words: Vec<String> = (0..150_000).map(|i| format!("w{i}")).collect();
    let mut w = Writer::new("llama");
    w.array_str("tokenizer.ggml.tokens", &words).array_str("tokenizer.ggml.merges", &words);
    w.array_i32("tokenizer.ggml.token_type", &vec![1; words.len()]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    w.write(&path).unwrap();
    let once = || {
        let start = Instant::now();
        let m = Gguf::open(&path).unwrap();
        assert_eq!(m.array("tokenizer.ggml.tokens").unwrap().unwrap().len(), words.len());
        start.elapsed()
    };
    let best = (0..10).map(|_| once()).min().unwrap();
    assert!(best < Duration::from_millis(10), "{best:?}");
}
