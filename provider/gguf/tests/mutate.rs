//! Damage of every kind: whatever the bytes, an error or a model that can be walked to its last value, never a panic.

use gguf::{GgmlType, Gguf, write::Writer};
use proptest::prelude::*;

fn good() -> Vec<u8> {
    let mut w = Writer::new("llama");
    w.u8("u8", 1).i8("i8", -1).u16("u16", 2).i16("i16", -2).u32("u32", 3).i32("i32", -3).u64("u64", 4);
    w.i64("i64", -4).f32("f32", 0.5).f64("f64", 0.25).bool("bool", true).str("str", "text");
    w.alignment(32).unwrap();
    w.array_str("a.str", &["a", "", "bc"]).array_i32("a.i32", &[1, -1]).array_bool("a.bool", &[true]);
    w.array_f32("a.f32", &[1.0, 2.0]).array_u64("a.u64", &[1]);
    w.tensor_f32("a.weight", &[4, 2], &[0.5; 8]).unwrap();
    w.tensor("b.weight", GgmlType::Q4_1, &[64, 1, 1], vec![3; 40]).unwrap();
    w.tensor("c.weight", GgmlType::Q6_K, &[256], vec![5; 210]).unwrap();
    w.finish()
}

/// Everything that can be asked of a model.
fn walk(m: &Gguf) {
    let mut text = format!("{m:?} {:?} {}", m.type_census(), m.file_bytes());
    for (key, value) in m.keys() {
        text += &format!("{key} {value} {value:?}");
        let _ = (m.str(key), m.u32(key), m.u64(key), m.i64(key), m.f32(key), m.bool(key));
        if let Some(a) = value.as_array() {
            assert_eq!(a.iter().count(), a.len());
            let _ = a.iter_u64().map(|i| i.filter_map(Result::ok).count());
            let _ = a.iter_i64().map(|i| i.filter_map(Result::ok).count());
            let _ = a.iter_f32().map(|i| i.filter_map(Result::ok).count());
            let _ = a.iter_bool().map(|i| i.filter_map(Result::ok).count());
            let _ = a.iter_str().map(|i| i.filter_map(Result::ok).count());
        }
        assert!(m.get(key).is_some());
    }
    for t in m.tensors() {
        text += &format!("{t:?}");
        assert_eq!(t.data.len() as u64, t.n_rows() * t.row_bytes());
        assert_eq!(m.need_tensor(t.name).unwrap().offset, t.offset);
        if let Ok(values) = t.to_f32() {
            assert_eq!(values.len() as u64, t.n_elements());
        }
    }
    assert!(!text.is_empty());
}

fn open(bytes: Vec<u8>) {
    match Gguf::from_bytes("m", bytes) {
        Ok(m) => walk(&m),
        Err(e) => assert!(e.to_string().starts_with("m: ")),
    }
}

#[test]
fn the_good_one_is_good() {
    let m = Gguf::from_bytes("m", good()).unwrap();
    assert_eq!((m.keys().count(), m.tensors().len()), (19, 3));
    walk(&m);
}

/// Each byte in turn, set to what damages most.
#[test]
fn every_byte_once() {
    let whole = good();
    for i in 0..whole.len() {
        for v in [0, 1, 0x7f, 0x80, 0xff, whole[i] ^ 1, whole[i].wrapping_add(1)] {
            let mut bytes = whole.clone();
            bytes[i] = v;
            open(bytes);
        }
    }
}

/// Eight bytes in turn, set to numbers that overflow something.
#[test]
fn every_word_once() {
    let whole = good();
    for i in 0..whole.len() - 8 {
        for v in [0, 1 << 31, 1 << 32, 1 << 48, 1 << 61, 1 << 62, 1 << 63, u64::MAX, u64::MAX - 31] {
            let mut bytes = whole.clone();
            bytes[i..i + 8].copy_from_slice(&v.to_le_bytes());
            open(bytes);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn some_bytes(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8), cut in 0usize..64) {
        let mut bytes = good();
        for (i, v) in changes {
            let i = i.index(bytes.len());
            bytes[i] = v;
        }
        bytes.truncate(bytes.len() - if cut < 8 { cut * 40 } else { 0 });
        open(bytes);
    }

    #[test]
    fn noise_after_a_header(tail in prop::collection::vec(any::<u8>(), 0..200), n_tensors in 0u64..4, n_keys in 0u64..4) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(n_tensors.to_le_bytes());
        bytes.extend(n_keys.to_le_bytes());
        bytes.extend(tail);
        open(bytes);
    }

    /// Any dimensions: an error, or a tensor that lies in the file.
    #[test]
    fn dimensions(ne in prop::array::uniform4(prop_oneof![0u64..70, any::<u64>(), (0u32..64).prop_map(|b| 1 << b)]), ty in 0u32..45) {
        let mut bytes = b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0t\x04\0\0\0".to_vec();
        bytes.extend(ne.iter().flat_map(|n| n.to_le_bytes()));
        bytes.extend(ty.to_le_bytes());
        bytes.resize(bytes.len() + 8 + 4096, 0);
        open(bytes);
    }
}
