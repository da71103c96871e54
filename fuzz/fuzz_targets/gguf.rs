//! Model files of any bytes: an error that names the file, or a model that can be walked to its last value.
#![no_main]

use gguf::Gguf;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    match Gguf::from_bytes("m", data.to_vec()) {
        Ok(m) => walk(&m),
        Err(e) => {
            let text = e.to_string();
            assert!(text.starts_with("m: ") && text.len() < 2000 && !text.contains('\n'), "{text:?}");
        }
    }
});

/// Everything that can be asked of a model.
fn walk(m: &Gguf) {
    let mut text = format!("{m:?} {:?} {}", m.type_census(), m.file_bytes());
    let _ = (m.architecture(), m.version(), m.alignment());
    for (key, value) in m.keys() {
        text += &format!("{key} {value} {value:?} {}", m.bad_key(key, "x"));
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
    let mut end = 0;
    for t in m.tensors() {
        text += &format!("{t:?} {:?}", t.shape());
        assert!(t.offset >= end && t.offset.is_multiple_of(m.alignment().into()), "{t:?}");
        end = t.offset + t.data.len() as u64;
        assert!(end <= m.file_bytes());
        assert_eq!(t.data.len() as u64, t.n_rows() * t.row_bytes());
        assert_eq!(m.need_tensor(t.name).expect("a tensor that is listed").offset, t.offset);
        if let Ok(values) = t.to_f32() {
            assert_eq!(values.len() as u64, t.n_elements());
        }
        assert_eq!(t.row(0).is_some(), t.n_rows() > 0);
        assert!(t.row(t.n_rows()).is_none());
    }
    assert!(!text.is_empty());
}
