//! Vectors worked out by hand, for all three versions: one layer, two cells, tokens 5 and 7, f16 rows of two channels; and the
//! same with a recurrent layer before it.

mod common;
use kvlayout::*;

const V3: &str = "
    71736767 03000000 02000000 05000000 07000000
    01000000 02000000
    00000000 01000000 00000000
    01000000 01000000 00000000
    00000000 01000000
    01000000 0400000000000000 10111213 20212223
    01000000 0400000000000000 30313233 40414243";

const V4: &str = "
    71736767 04000000 02000000 05000000 07000000
    01000000 02000000
    00000000 01000000 00000000
    01000000 01000000 00000000
    00000000 01000000 00000000 00000000
    01000000 0400000000000000 10111213 20212223
    01000000 0400000000000000 30313233 40414243";

const V3_EXT: &str = "
    71736767 03000000 02000000 05000000 07000000
    01000000 02000000
    00000000 01000000 00000000 00000000 05000000 00000000
    01000000 01000000 01000000 01000000 07000000 00000000
    00000000 01000000
    01000000 0400000000000000 10111213 20212223
    01000000 0400000000000000 30313233 40414243";

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    digits.chunks(2).map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap()).collect()
}

fn vectors() -> Vec<(StateVersion, bool, Vec<u8>)> {
    let mut v2 = unhex(V3);
    v2[4] = 2;
    // Version 2 has the extension without the token.
    let mut v2_ext = unhex(V3_EXT);
    v2_ext[4] = 2;
    v2_ext.drain(68..72);
    v2_ext.drain(44..48);
    let v4_ext = [&[0x71, 0x73, 0x67, 0x67, 4], &unhex(V3_EXT)[5..84], &[0; 8], &unhex(V3_EXT)[84..]].concat();
    vec![
        (StateVersion::V2, false, v2),
        (StateVersion::V2, true, v2_ext),
        (StateVersion::V3, false, unhex(V3)),
        (StateVersion::V3, true, unhex(V3_EXT)),
        (StateVersion::V4, false, unhex(V4)),
        (StateVersion::V4, true, v4_ext),
    ]
}

#[test]
fn the_vectors_have_their_lengths() {
    let lengths: Vec<usize> = vectors().iter().map(|v| v.2.len()).collect();
    assert_eq!(lengths, [100, 116, 100, 124, 108, 132]);
}

#[test]
fn are_read_and_written_back() {
    for (version, cell_ext, bytes) in vectors() {
        let state = State::parse(&bytes).unwrap();
        assert_eq!(read_version(&bytes[..8]), Ok(version));
        assert_eq!((state.version, state.cell_ext, state.tokens.as_slice()), (version, cell_ext, &[5, 7][..]));
        let Section::Kv(kv) = &state.sections[0] else { panic!() };
        let s = kv.stream().unwrap();
        assert_eq!(
            (s.k[0].data.as_slice(), s.v[0].data.as_slice()),
            (&unhex("1011121320212223")[..], &unhex("3031323340414243")[..])
        );
        assert_eq!(state.write(), bytes, "version {version} ext {cell_ext}");
        assert_eq!(State::parse_as(&bytes, &state.shape()), Ok(state));
    }
}

#[test]
fn are_what_the_map_lays_out() {
    for (version, cell_ext, bytes) in vectors() {
        let mut spec = common::dense(1, 2);
        spec.cell_ext = cell_ext;
        let map = KvMap::state_file(&spec, &[5, 7], version).unwrap();
        let mut out = Vec::new();
        let mut sink = Scatter::new(map.clone(), MemSpace::new(&mut out, map.size()).unwrap()).unwrap();
        let half = |b: [u8; 2]| half::f16::from_le_bytes(b).to_f32();
        let k = [[0x10, 0x11], [0x12, 0x13], [0x20, 0x21], [0x22, 0x23]].map(half);
        let v = [[0x30, 0x31], [0x32, 0x33], [0x40, 0x41], [0x42, 0x43]].map(half);
        sink.put_rows(0, Part::K, 0..2, &k).unwrap();
        sink.put_rows(0, Part::V, 0..2, &v).unwrap();
        let receipt = Box::new(sink).commit().unwrap();
        assert_eq!(receipt, Receipt { bytes: bytes.len() as u64, tokens: 2, tensors: 2 });
        assert_eq!(out, bytes, "version {version} ext {cell_ext}");
    }
}

/// What follows the attention section where layer 0 of two has recurrent state: one cell at position 1 with no sequences, not
/// transposed, two layers; R of two numbers, 1 and 2; S of one, 1.5.
const RECURRENT: &str = "
    01000000 01000000 00000000
    00000000 02000000
    00000000 0800000000000000 0000803f 00000040
    00000000 0400000000000000 0000c03f";

#[test]
fn recurrent_sections_are_read_written_back_and_laid_out() {
    for (version, cell_ext, attention) in vectors() {
        let bytes = [attention, unhex(RECURRENT)].concat();
        let state = State::parse(&bytes).unwrap();
        let Section::Rec(rec) = &state.sections[1] else { panic!() };
        assert_eq!((rec.n_layer, rec.cells.as_slice()), (2, &[RecCell { pos: 1 }][..]));
        assert_eq!(state.rows_f32(1, 0, Part::R).unwrap(), [1.0, 2.0]);
        assert_eq!(state.rows_f32(1, 0, Part::S).unwrap(), [1.5]);
        assert_eq!((state.cell_ext, state.write()), (cell_ext, bytes.clone()));

        let mut spec = common::dense(1, 2);
        spec.cell_ext = cell_ext;
        spec.sections[0].layers[0].layer = 1;
        let layers = vec![LayerRec { layer: 0, n_embd_r: 2, n_embd_s: 1 }];
        spec.recurrent = Some(RecSection { n_layer: 2, layers });
        assert_eq!(State::parse_as(&bytes, &Shape::from(&spec)), Ok(state.clone()));
        let map = KvMap::state_file(&spec, &[5, 7], version).unwrap();
        let mut out = Vec::new();
        let mut sink = Scatter::new(map.clone(), MemSpace::new(&mut out, map.size()).unwrap()).unwrap();
        sink.put_rows(0, Part::S, 1..2, &[1.5]).unwrap();
        sink.put_rows(0, Part::R, 1..2, &[1.0, 2.0]).unwrap();
        for part in [Part::K, Part::V] {
            sink.put_rows(1, part, 0..2, &state.rows_f32(0, 0, part).unwrap()).unwrap();
        }
        let receipt = Box::new(sink).commit().unwrap();
        assert_eq!(receipt, Receipt { bytes: bytes.len() as u64, tokens: 2, tensors: 4 });
        assert_eq!(out, bytes, "version {version} ext {cell_ext}");
    }
}

#[test]
fn packed_tokens_are_read_and_written_back() {
    let plain = unhex(V4);
    let words = |w: &[i32]| {
        let mut out = plain[..8].to_vec();
        out.extend((w.len() as u32).to_le_bytes());
        out.extend(w.iter().flat_map(|w| w.to_le_bytes()));
        out.extend(&plain[20..]);
        out
    };
    let bytes = words(&[-1, 1, 2, 5, 7, 0]);
    let state = State::parse(&bytes).unwrap();
    assert_eq!(state.form, TokenForm::Packed { n_media: 0, media: vec![] });
    assert_eq!((state.tokens.as_slice(), state.write()), (&[5, 7][..], bytes));

    // Media are kept, though not understood.
    let bytes = words(&[-1, 1, 2, 5, 7, 1, 0, 4, 99]);
    let state = State::parse(&bytes).unwrap();
    assert_eq!(state.form, TokenForm::Packed { n_media: 1, media: vec![0, 4, 99] });
    assert_eq!(state.write(), bytes);
    assert_eq!(faults::check(&state, &faults::Expect::default()), [faults::Fault::MediaTokens { n_media: 1 }]);

    for (w, field, offset) in [
        (&[-1][..], Field::PackedVersion, 16),
        (&[-1, 2, 2, 5, 7, 0], Field::PackedVersion, 16),
        (&[-1, 1], Field::TokenCount, 20),
        (&[-1, 1, 3, 5, 7, 0], Field::TokenCount, 20),
        (&[-1, 1, -1, 5, 7, 0], Field::TokenCount, 20),
        (&[-1, 1, i32::MAX, 5, 7, 0], Field::TokenCount, 20),
        (&[-1, 1, 0], Field::MediaCount, 24),
        (&[-1, 1, 1, 5, 0, 7], Field::Media, 32),
    ] {
        let e = State::parse(&words(w)).unwrap_err();
        assert_eq!((e.what, e.offset), (field, offset), "{w:?}: {e}");
    }
}
