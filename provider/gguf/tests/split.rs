//! Models in several files: any shard opens the model, and what is missing or foreign is named.

use std::{fs, path::Path};

use gguf::{Error, GgmlType, Gguf, write::Writer};

fn model(name: &str, tensors: usize) -> Writer {
    let mut w = Writer::new("llama");
    w.str("general.name", name).u32("llama.block_count", 2);
    for i in 0..tensors {
        w.tensor_f32(&format!("blk.{i}.weight"), &[4], &[i as f32; 4]).unwrap();
    }
    w
}

fn fails(path: impl AsRef<Path>, wanted: &[&str]) -> Error {
    let error = Gguf::open(path).unwrap_err();
    let message = error.to_string();
    for wanted in wanted {
        assert!(message.contains(wanted), "{wanted:?} is not in {message:?}");
    }
    error
}

#[test]
fn any_shard_opens_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    for version in [2, 3] {
        let stem = format!("v{version}-of-00009-x");
        let paths = model("m", 7).version(version).write_split(dir.path(), &stem, 3).unwrap();
        for path in &paths {
            let m = Gguf::open(path).unwrap();
            assert_eq!(m.version(), version);
            assert_eq!(m.tensors().len(), 7);
            assert_eq!(m.u32("llama.block_count").unwrap(), Some(2));
            assert_eq!(m.paths().collect::<Vec<_>>(), paths);
            for i in 0..7 {
                assert_eq!(m.need_tensor(&format!("blk.{i}.weight")).unwrap().to_f32().unwrap(), [i as f32; 4]);
            }
        }
    }
}

#[test]
fn shards_without_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let paths = model("m", 1).write_split(dir.path(), "m", 3).unwrap();
    assert_eq!(Gguf::open(&paths[1]).unwrap().tensors().len(), 1);
}

#[test]
fn alignment_goes_with_every_shard() {
    let dir = tempfile::tempdir().unwrap();
    let paths = model("m", 4).alignment(128).unwrap().write_split(dir.path(), "m", 2).unwrap();
    let m = Gguf::open(&paths[1]).unwrap();
    assert!(m.tensors().all(|t| t.offset.is_multiple_of(128) && t.data.as_ptr().addr().is_multiple_of(128)));
}

#[test]
fn a_missing_shard_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let paths = model("m", 7).write_split(dir.path(), "m", 3).unwrap();
    fs::remove_file(&paths[1]).unwrap();
    for given in [0, 2] {
        let e = fails(&paths[given], &["3 files", "1 is missing", "m-00002-of-00003.gguf"]);
        assert!(matches!(e, Error::MissingShard { count: 3, missing, .. } if missing == paths[1..2]));
    }
    fs::remove_file(&paths[0]).unwrap();
    fails(&paths[2], &["2 are missing", "m-00001-of-00003.gguf, ", "m-00002-of-00003.gguf"]);
}

#[test]
fn renamed_shards() {
    let dir = tempfile::tempdir().unwrap();
    let paths = model("m", 7).write_split(dir.path(), "m", 3).unwrap();
    let alone = dir.path().join("model.gguf");
    fs::copy(&paths[0], &alone).unwrap();
    fails(&alone, &["model.gguf", "-of-00003.gguf"]);

    let of_four = dir.path().join("m-00001-of-00004.gguf");
    fs::copy(&paths[0], &of_four).unwrap();
    fails(&of_four, &["-of-00003.gguf", "m-00001-of-00004.gguf"]);

    // The second and third change places.
    let aside = dir.path().join("aside");
    fs::rename(&paths[1], &aside).unwrap();
    fs::rename(&paths[2], &paths[1]).unwrap();
    fs::rename(&aside, &paths[2]).unwrap();
    for path in &paths {
        fails(path, &["m-00002-of-00003.gguf", "split.no", "wanted 1", "found 2"]);
    }
}

#[test]
fn a_shard_of_another_model() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let paths = model("a", 7).write_split(a.path(), "m", 3).unwrap();
    let swap = |other: Writer, shards: usize, from: usize, to: usize| {
        let others = other.write_split(b.path(), "m", shards).unwrap();
        let own = fs::read(&paths[to]).unwrap();
        fs::copy(&others[from], &paths[to]).unwrap();
        own
    };
    // Another number of tensors in all.
    let own = swap(model("b", 8), 3, 1, 1);
    fails(&paths[0], &["m-00002-of-00003.gguf", "split.tensors.count", "i32 7", "i32 8"]);
    fs::write(&paths[1], own).unwrap();
    // Another number of files.
    let own = swap(model("b", 7), 2, 1, 1);
    fails(&paths[2], &["split.count", "wanted 3", "found 2"]);
    fs::write(&paths[1], own).unwrap();
    // The same totals, but tensors that overlap with ours.
    let mut w = Writer::new("llama");
    for i in [0, 1, 5, 6, 2, 3, 4] {
        w.tensor_f32(&format!("blk.{i}.weight"), &[4], &[0.0; 4]).unwrap();
    }
    let own = swap(w, 3, 1, 1);
    fails(&paths[0], &["m-00003-of-00003.gguf", "\"blk.5.weight\" at byte", "m-00002-of-00003.gguf"]);
    fs::write(&paths[1], own).unwrap();
    // One tensor fewer than there should be.
    let mut shards = model("a", 7).split(3).unwrap();
    let mut short = Writer::empty();
    short.u16("split.no", 1).u16("split.count", 3).i32("split.tensors.count", 7);
    short.tensor("blk.2.weight", GgmlType::F32, &[4], vec![0; 16]).unwrap();
    short.write(&paths[1]).unwrap();
    fails(&paths[0], &["split.tensors.count", "7 tensors in all files", "found 6"]);
    // Keys of another model.
    shards[1].str("general.name", "b").write(&paths[1]).unwrap();
    fails(&paths[0], &["m-00002-of-00003.gguf", "general.name", "str \"a\"", "str \"b\""]);
    shards[1].str("general.name", "a").write(&paths[1]).unwrap();
    Gguf::open(&paths[0]).unwrap();
    // No number.
    shards[1].remove("split.no").write(&paths[1]).unwrap();
    fails(&paths[0], &["split.no", "no such key"]);
}

#[test]
fn a_damaged_shard_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let paths = model("m", 7).write_split(dir.path(), "m", 3).unwrap();
    let bytes = fs::read(&paths[2]).unwrap();
    fs::write(&paths[2], &bytes[..bytes.len() - 17]).unwrap();
    fails(&paths[0], &["m-00003-of-00003.gguf", "1 bytes missing"]);
}

#[test]
fn split_keys_of_the_wrong_type() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m-00001-of-00002.gguf");
    model("m", 1).str("split.count", "2").write(&path).unwrap();
    fails(&path, &["split.count", "integer", "str \"2\""]);
    model("m", 1).i32("split.count", -2).write(&path).unwrap();
    fails(&path, &["split.count", "i32 -2"]);
    // A count that no directory can have is not walked through.
    model("m", 1).u64("split.count", u64::MAX).write(&path).unwrap();
    fails(&path, &["-of-18446744073709551615.gguf"]);
    let huge = dir.path().join("m-00001-of-18446744073709551615.gguf");
    model("m", 1).u64("split.count", u64::MAX).u64("split.no", 0).write(&huge).unwrap();
    fails(&huge, &["split.count", "65535"]);
}

#[test]
fn one_of_one_and_bytes() {
    let mut w = model("m", 2);
    let dir = tempfile::tempdir().unwrap();
    let paths = w.write_split(dir.path(), "m", 1).unwrap();
    assert_eq!(Gguf::open(&paths[0]).unwrap().tensors().len(), 2);
    // One file of one may be called what it likes.
    let renamed = dir.path().join("x.gguf");
    fs::rename(&paths[0], &renamed).unwrap();
    assert_eq!(Gguf::open(&renamed).unwrap().tensors().len(), 2);
    let e = Gguf::from_bytes("b", w.u16("split.count", 2).finish()).unwrap_err();
    assert!(e.to_string().contains("one of 2 shards"), "{e}");
}
