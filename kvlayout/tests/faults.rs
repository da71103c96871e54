//! Every way a state file is known to be wrong, made from a sound one, must be found and named - those that a server
//! takes without a word included. And whatever bytes come, the reader ends, and gives back what it read.

mod common;
use common::{dense, hybrid, ids, state, stream, windowed};
use kvlayout::faults::{Expect, Fault, check, check_bytes};
use kvlayout::*;
use proptest::prelude::*;

const N: usize = 39;

fn expect(spec: &KvSpec, n: usize, version: StateVersion) -> Expect {
    Expect {
        n_vocab: Some(2000),
        tokens: Some(ids(n)),
        version: Some(version),
        spec: Some(spec.clone()),
        n_ctx: Some(512),
        handoff: true,
    }
}

fn good() -> (State, Expect) {
    let spec = dense(3, 8);
    (state(&spec, &ids(N), StateVersion::V4), expect(&spec, N, StateVersion::V4))
}

/// Changes a sound state, and checks what the changed file then says, read with and without knowing its shape.
fn broken(change: impl Fn(&mut State)) -> Vec<Fault> {
    let (mut state, expect) = good();
    change(&mut state);
    let found = check(&state, &expect);
    assert_eq!(check_bytes(&state.write(), &expect), found);
    found
}

/// Names alone, for what has several.
fn names(faults: &[Fault]) -> Vec<&'static str> {
    faults.iter().map(Fault::name).collect()
}

#[test]
fn a_sound_state_has_none() {
    for version in StateVersion::ALL {
        for spec in [
            dense(3, 8),
            KvSpec { n_stream: 2, ..dense(1, 4) },
            KvSpec { v_trans: true, ..windowed(4, 8, 6) },
            hybrid(5, 8),
        ] {
            for cell_ext in [false, true] {
                for swa_full in [false, true] {
                    let spec = KvSpec { cell_ext, swa_full, ..spec.clone() };
                    for n in [1, 5, 7, 8, N] {
                        let bytes = state(&spec, &ids(n), version).write();
                        assert_eq!(check_bytes(&bytes, &expect(&spec, n, version)), []);
                        assert_eq!(check_bytes(&bytes, &Expect::default()), []);
                    }
                }
            }
        }
    }
}

#[test]
fn tokens() {
    assert_eq!(
        broken(|s| s.tokens.clear()),
        [
            Fault::NoTokens,
            Fault::TokenCount { want: N, found: 0 },
            Fault::FewerTokensThanCells { section: 0, tokens: 0, cells: N }
        ]
    );
    assert_eq!(
        broken(|s| s.tokens.truncate(30)),
        [Fault::TokenCount { want: N, found: 30 }, Fault::FewerTokensThanCells { section: 0, tokens: 30, cells: N }]
    );
    assert_eq!(
        broken(|s| s.tokens.push(5)),
        [
            Fault::TokenCount { want: N, found: N + 1 },
            Fault::MoreTokensThanCells { section: 0, tokens: N + 1, cells: N }
        ]
    );
    assert_eq!(broken(|s| s.tokens[10] += 1), [Fault::TokenDiffers { index: 10, want: 380, found: 381 }]);
    assert_eq!(
        broken(|s| s.tokens[10] = 2000),
        [
            Fault::TokenOutside { index: 10, id: 2000, n_vocab: 2000 },
            Fault::TokenDiffers { index: 10, want: 380, found: 2000 }
        ]
    );
    assert_eq!(names(&broken(|s| s.tokens[3] = -5)), ["token_outside", "token_differs"]);
    assert_eq!(broken(|s| s.form = TokenForm::Packed { n_media: 0, media: vec![] }), [Fault::PackedTokens]);
    let media = TokenForm::Packed { n_media: 2, media: vec![1, 2] };
    assert_eq!(broken(|s| s.form = media.clone()), [Fault::MediaTokens { n_media: 2 }]);
    // Unknown vocabulary or not, an id is not negative.
    let mut s = good().0;
    s.tokens[1] = -1;
    assert_eq!(check(&s, &Expect::default()), [Fault::TokenOutside { index: 1, id: -1, n_vocab: 1 << 31 }]);
}

#[test]
fn cells_and_positions() {
    let section = 0;
    let cells = |change: &dyn Fn(&mut Vec<Cell>)| broken(|s| change(&mut stream(s, 0).cells));
    let none = |s: &mut State| *stream(s, 0) = Stream::default();
    assert_eq!(broken(none), [Fault::NoCells { section, tokens: N }]);
    assert_eq!(names(&cells(&|c| c[5].pos = -5)), ["negative_position", "cells_out_of_order", "position_gap"]);
    assert_eq!(cells(&|c| c[0].pos = -1)[0], Fault::NegativePosition { section, cell: 0, pos: -1 });
    let all_negative = cells(&|c| c.iter_mut().for_each(|c| c.pos = -5));
    assert_eq!(all_negative[0], Fault::NegativePosition { section, cell: 0, pos: -5 });
    assert_eq!(
        cells(&|c| c[7].pos = 6),
        [Fault::DuplicatePosition { section, cell: 7, pos: 6 }, Fault::PositionGap { section, after: 6, next: 8 }]
    );
    assert_eq!(names(&cells(&|c| c.iter_mut().for_each(|c| c.pos = 0))), ["duplicate_position", "last_position"]);
    assert_eq!(cells(&|c| c.reverse()), [Fault::CellsOutOfOrder { section, cell: 1, pos: 37, previous: 38 }]);
    assert_eq!(
        cells(&|c| c[38].pos = i32::MAX),
        [
            Fault::PositionTooLarge { section, cell: 38, pos: i32::MAX, last: 38 },
            Fault::PositionGap { section, after: 37, next: i32::MAX }
        ]
    );
    assert_eq!(
        cells(&|c| c.iter_mut().for_each(|c| c.pos += 10)),
        [
            Fault::PositionTooLarge { section, cell: 29, pos: 39, last: 38 },
            Fault::FirstPosition { section, want: 0, found: 10 }
        ]
    );
    assert_eq!(
        names(&cells(&|c| c.iter_mut().skip(20).for_each(|c| c.pos += 1))),
        ["position_too_large", "position_gap"]
    );
    // The slot it came from is no matter.
    assert_eq!(cells(&|c| c.iter_mut().for_each(|c| c.seq_id = 7)), []);

    let (s, mut expect) = good();
    expect.n_ctx = Some(20);
    assert_eq!(check(&s, &expect), [Fault::TooManyCells { section, cells: N, n_ctx: 20 }]);
}

#[test]
fn windows() {
    let (window, n) = (6, 20);
    let spec = windowed(4, 8, window);
    let expect = expect(&spec, n, StateVersion::V3);
    let kept = |cells: u32| {
        // A window of another size, and the bytes are those of a section with so many cells.
        let s = state(&windowed(4, 8, cells - 1), &ids(n), StateVersion::V3);
        check_bytes(&s.write(), &expect)
    };
    assert_eq!(kept(7), []);
    assert_eq!(kept(9), []);
    // What a server saves itself: the prompt would be computed again.
    assert_eq!(kept(6), [Fault::WindowCells { section: 1, want: 7, found: 6 }]);
    let own = Expect { handoff: false, ..expect.clone() };
    let s = state(&windowed(4, 8, 5), &ids(n), StateVersion::V3);
    assert_eq!(check(&s, &own), []);
    let s = state(&windowed(4, 8, 4), &ids(n), StateVersion::V3);
    assert_eq!(check(&s, &own), [Fault::WindowCells { section: 1, want: 6, found: 5 }]);
    let mut full = expect.clone();
    full.spec.as_mut().unwrap().swa_full = true;
    assert_eq!(names(&check(&s, &full)), ["window_cells"]);

    let mut s = state(&spec, &ids(n), StateVersion::V3);
    stream(&mut s, 1).cells.iter_mut().for_each(|c| c.pos -= 1);
    assert_eq!(check_bytes(&s.write(), &expect), [Fault::LastPosition { section: 1, want: 19, found: 18 }]);
    stream(&mut s, 1).cells.clear();
    assert_eq!(check_bytes(&s.write(), &expect), [Fault::NoCells { section: 1, tokens: n }]);
}

#[test]
fn values_that_are_none() {
    let put = |part: Part, at: usize, bits: u16| {
        broken(move |s| {
            let stream = stream(s, 0);
            let list = if part == Part::K { &mut stream.k } else { &mut stream.v };
            list[1].data[2 * at..][..2].copy_from_slice(&bits.to_le_bytes());
        })
    };
    let fault = |part, position, channel, value: &str| {
        let (section, layer, value) = (0, 1, value.into());
        [Fault::NonFinite { section, layer, part, position, channel, value, count: 1 }]
    };
    assert_eq!(put(Part::K, 0, 0x7e00), fault(Part::K, 0, 0, "NaN"));
    assert_eq!(put(Part::V, 38 * 8 + 7, 0x7c00), fault(Part::V, 38, 7, "inf"));
    assert_eq!(put(Part::V, 8 + 2, 0xfc00), fault(Part::V, 1, 2, "-inf"));

    // Transposed, the same place is somewhere else.
    let spec = KvSpec { v_trans: true, ..dense(2, 8) };
    let mut s = state(&spec, &ids(N), StateVersion::V4);
    stream(&mut s, 0).v[1].data[2 * (3 * N + 20)..][..2].copy_from_slice(&[0, 0x7c]);
    assert_eq!(check_bytes(&s.write(), &expect(&spec, N, StateVersion::V4)), fault(Part::V, 20, 3, "inf"));

    // In quantised rows it is the scale that is none, and with it the block.
    let mut s = State::parse(include_bytes!("saved/head64-q8_0-v4.bin")).unwrap();
    let k = &mut stream(&mut s, 0).k[0];
    k.data[34..36].copy_from_slice(&[0, 0x7e]);
    let found = check(&s, &Expect::default());
    assert!(matches!(found[..], [Fault::NonFinite { position: 0, channel: 32, count: 32, .. }]), "{found:?}");
}

#[test]
fn extensions() {
    for version in StateVersion::ALL {
        let spec = KvSpec { cell_ext: true, ..dense(1, 4) };
        let expect = expect(&spec, 9, version);
        type Ext = (i32, i32, Option<i32>);
        let broken = |ext: &dyn Fn(&mut Ext)| {
            let mut s = state(&spec, &ids(9), version);
            ext(stream(&mut s, 0).cells[4].ext.as_mut().unwrap());
            names(&check_bytes(&s.write(), &expect))
        };
        assert_eq!(broken(&|e| e.0 = 3), ["cell_extension"]);
        assert_eq!(broken(&|e| e.1 = -1), ["cell_extension"]);
        if version >= StateVersion::V3 {
            assert_eq!(broken(&|e| e.2 = Some(11)), ["cell_extension"]);
        }
        let without = state(&KvSpec { cell_ext: false, ..spec.clone() }, &ids(9), version);
        assert_eq!(names(&check_bytes(&without.write(), &expect)), ["cell_ext"]);
    }
}

#[test]
fn bytes_after_the_end() {
    let (good, expect) = good();
    for trailing in [1usize, 3, 4, 7, 8, 11, 12, 100, 1 << 20] {
        for byte in [0u8, 1, 0xaa, 0xff] {
            let bytes = [good.write(), vec![byte; trailing]].concat();
            let fault = [Fault::TrailingBytes { len: trailing as u64 }];
            assert_eq!(check_bytes(&bytes, &expect), fault);
            assert_eq!(check_bytes(&bytes, &Expect::default()), fault, "{trailing} times {byte}");
            assert_eq!(State::parse(&bytes).unwrap().write(), bytes);
        }
    }
}

/// A sound file of another server: every field that differs is named, not only the first.
#[test]
fn a_file_for_another_server() {
    let (_, expect) = good();
    let from = |spec: &KvSpec, version| names(&check_bytes(&state(spec, &ids(N), version).write(), &expect));
    let spec = dense(3, 8);
    assert_eq!(from(&spec, StateVersion::V3), ["version"]);
    assert_eq!(from(&KvSpec { n_stream: 2, ..spec.clone() }, StateVersion::V4), ["n_stream"]);
    assert_eq!(from(&KvSpec { v_trans: true, ..spec.clone() }, StateVersion::V4), ["v_trans"]);
    assert_eq!(from(&dense(2, 8), StateVersion::V4), ["n_layer"]);
    assert_eq!(from(&dense(4, 8), StateVersion::V4), ["n_layer"]);
    assert_eq!(from(&KvSpec { cell_ext: true, ..spec.clone() }, StateVersion::V4), ["cell_ext"]);
    assert_eq!(from(&windowed(4, 8, 6), StateVersion::V4), ["sections", "n_layer"]);
    let f32s = KvSpec { type_k: CacheType::F32, type_v: CacheType::Bf16, ..spec.clone() };
    assert_eq!(from(&f32s, StateVersion::V4), ["type_k", "type_v", "type_k", "type_v", "type_k", "type_v"]);
    assert_eq!(from(&dense(3, 16), StateVersion::V4), ["row_size_k", "row_size_v"].repeat(3));
    let rotated = broken(|s| stream(s, 0).n_rot = Some((64, 64)));
    assert_eq!(names(&rotated), ["n_rot_k", "n_rot_v"]);
    // A quantised cache whose rows are not rotated as its server would have them.
    let mut q8 = KvSpec { type_k: CacheType::Q8_0, type_v: CacheType::Q8_0, ..dense(1, 64) };
    let against = |spec: &KvSpec| {
        let bytes = include_bytes!("saved/head64-q8_0-v4.bin");
        names(&check_bytes(bytes, &Expect { spec: Some(spec.clone()), ..Expect::default() }))
    };
    assert_eq!(against(&q8), ["n_rot_k", "n_rot_v"]);
    q8.sections[0].n_rot = (64, 64);
    assert_eq!(against(&q8), [""; 0]);
    let jamba = include_bytes!("saved/jamba-f16-v4.bin");
    assert!(names(&check_bytes(jamba, &expect)).contains(&"sections"));
    let mamba = include_bytes!("saved/mamba-f16-v4.bin");
    assert!(names(&check_bytes(mamba, &expect)).contains(&"sections"));
}

/// One field of the file overwritten: named, at its very byte, with what stands there.
#[test]
fn one_damaged_field() {
    let (good, expect) = good();
    let bytes = good.write();
    let at_state = 12 + 4 * N;
    let at_fields = at_state + 8 + 12 * N;
    let at_k = at_fields + 16;
    let at_v = at_k + 3 * (12 + N * 16);
    let last_v = at_v + 2 * (12 + N * 16);
    let word = |v: u32| v.to_le_bytes().to_vec();
    let cases: Vec<(&str, usize, Vec<Vec<u8>>, Field)> = vec![
        ("magic", 0, vec![b"nsgg".to_vec(), b"algg".to_vec(), word(0), b"qsgG".to_vec()], Field::Magic),
        ("version", 4, [0, 1, 5, u32::MAX].map(word).to_vec(), Field::Version),
        ("n_stream", at_state, [0, 2, u32::MAX].map(word).to_vec(), Field::NStream),
        ("v_trans", at_fields, [1, 2, u32::MAX].map(word).to_vec(), Field::VTrans),
        ("n_layer", at_fields + 4, [0, 2, 4, u32::MAX].map(word).to_vec(), Field::NLayer),
        ("type k", at_k, [0, 2, 8, 12, 99, u32::MAX].map(word).to_vec(), Field::TypeK),
        ("type v", at_v, [0, 30, 5].map(word).to_vec(), Field::TypeV),
        ("type v of the last layer", last_v, [0, 30, 5].map(word).to_vec(), Field::TypeV),
    ];
    for (name, at, values, field) in cases {
        for value in values {
            let mut bytes = bytes.clone();
            bytes[at..at + 4].copy_from_slice(&value);
            let found = check_bytes(&bytes, &expect);
            // Some values make another sound file, most make none.
            assert_eq!(found[0].name(), field.name(), "{name} {value:?}: {found:?}");
            if let Fault::Unreadable(e) = &found[0] {
                assert_eq!((found.len(), e.offset), (1, at as u64), "{name} {value:?}: {e}");
            }
        }
    }
    for (at, field) in [(at_k + 4, Field::RowSizeK), (at_v + 4, Field::RowSizeV), (last_v + 4, Field::RowSizeV)] {
        for size in [0u64, 1, 15, 17, 32, 1 << 32, 1 << 63, u64::MAX, u64::MAX - 1] {
            let mut bytes = bytes.clone();
            bytes[at..at + 8].copy_from_slice(&size.to_le_bytes());
            let found = check_bytes(&bytes, &expect);
            let [Fault::Unreadable(e)] = &found[..] else { panic!("{size}: {found:?}") };
            assert_eq!((e.what, e.offset, e.found.as_str()), (field, at as u64, size.to_string().as_str()));
            assert!(State::parse(&bytes).is_err());
        }
    }
    for i in [0, 1, 20, 38] {
        for n_seq_id in [0, 2, u32::MAX] {
            let at = at_state + 8 + 12 * i + 4;
            let mut bytes = bytes.clone();
            bytes[at..at + 4].copy_from_slice(&word(n_seq_id));
            for expect in [&expect, &Expect::default()] {
                let found = check_bytes(&bytes, expect);
                let [Fault::Unreadable(e)] = &found[..] else { panic!("{found:?}") };
                assert_eq!((e.what, e.offset), (Field::NSeqId, at as u64), "{e}");
            }
        }
    }
    // A count of cells that is not theirs shifts all that follows.
    for n in [1, 38, 40, 513, 1_000_000, i32::MAX as u32, u32::MAX] {
        let mut bytes = bytes.clone();
        bytes[at_state + 4..at_state + 8].copy_from_slice(&word(n));
        let found = check_bytes(&bytes, &expect);
        let [Fault::Unreadable(e)] = &found[..] else { panic!("{n}: {found:?}") };
        assert!(e.offset >= at_state as u64 + 4, "{n}: {e}");
        assert!(State::parse(&bytes).is_err(), "{n}");
    }
    let mut none = bytes.clone();
    none[at_state + 4..at_state + 8].fill(0);
    let found = names(&check_bytes(&none, &expect));
    assert_eq!(found, ["no_cells", "trailing"]);
    // So does one of tokens.
    for n in [0, 1, 38, 40, 513, 100_000, i32::MAX as u32, u32::MAX] {
        let mut bytes = bytes.clone();
        bytes[8..12].copy_from_slice(&word(n));
        for expect in [&expect, &Expect::default()] {
            let found = check_bytes(&bytes, expect);
            assert!(matches!(found[..], [Fault::Unreadable(_)]), "{n}: {found:?}");
        }
    }
}

#[test]
fn a_file_cut_anywhere() {
    for version in StateVersion::ALL {
        for (spec, sections) in [(dense(2, 2), 1), (KvSpec { v_trans: true, ..windowed(3, 2, 2) }, 2)] {
            for cell_ext in [false, true] {
                let spec = KvSpec { cell_ext, ..spec.clone() };
                let whole = state(&spec, &ids(5), version);
                let bytes = whole.write();
                let first = State { sections: whole.sections[..1].to_vec(), ..whole }.write().len();
                for cut in 0..bytes.len() {
                    let e = State::parse_as(&bytes[..cut], &Shape::from(&spec)).unwrap_err();
                    assert!(e.short && e.offset <= cut as u64, "{cut}: {e}");
                    let faults = check_bytes(&bytes[..cut], &expect(&spec, 5, version));
                    assert!(matches!(&faults[..], [Fault::Unreadable(e)] if e.short), "{cut}: {faults:?}");
                    // Without knowing that there are two sections, one cannot miss the second.
                    if sections == 1 || !(first..first + 4).contains(&cut) {
                        let e = State::parse(&bytes[..cut]).unwrap_err();
                        assert!(e.short, "{cut} of {}: {e}", bytes.len());
                    } else if cut > first {
                        assert_eq!(names(&check_bytes(&bytes[..cut], &Expect::default())), ["trailing"]);
                    }
                }
            }
        }
    }
}

#[test]
fn several_streams() {
    let mut s = state(&KvSpec { n_stream: 3, ..dense(2, 4) }, &ids(5), StateVersion::V3);
    let Section::Kv(kv) = &mut s.sections[0] else { panic!() };
    kv.streams[2] = kv.streams[0].clone();
    assert_eq!(check_bytes(&s.write(), &Expect::default()), [Fault::SeveralStreams { section: 0, filled: 2 }]);
    kv_last_only(&mut s);
    assert_eq!(check_bytes(&s.write(), &Expect::default()), []);
}

fn kv_last_only(s: &mut State) {
    let Section::Kv(kv) = &mut s.sections[0] else { panic!() };
    kv.streams[0] = Stream::default();
}

#[test]
fn recurrent_memories() {
    let bytes = include_bytes!("saved/jamba-f16-v3.bin");
    let mut s = State::parse(bytes).unwrap();
    assert_eq!(check(&s, &Expect::default()), []);
    s.tokens.push(3);
    // One token more than the state has seen: no cell for it, and the recurrent state is another's.
    assert_eq!(names(&check(&s, &Expect::default())), ["more_tokens_than_cells", "last_position"]);
    s.tokens.pop();
    let Section::Rec(rec) = &mut s.sections[1] else { panic!() };
    rec.records[0].data[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    assert_eq!(names(&check_bytes(&s.write(), &Expect::default())), ["non_finite"]);
    let Section::Rec(rec) = &mut s.sections[1] else { panic!() };
    rec.cells.clear();
    rec.records.iter_mut().for_each(|r| r.data.clear());
    assert_eq!(names(&check(&s, &Expect::default())), ["no_cells"]);
}

#[test]
fn recurrent_memories_of_another_shape() {
    let spec = hybrid(5, 8);
    let good = state(&spec, &ids(9), StateVersion::V4);
    let from = |of: &KvSpec| names(&check_bytes(&good.write(), &expect(of, 9, StateVersion::V4)));
    let with = |change: &dyn Fn(&mut RecSection)| {
        let mut spec = spec.clone();
        spec.recurrent.iter_mut().for_each(change);
        from(&spec)
    };
    assert_eq!(from(&spec), Vec::<&str>::new());
    // A reader without recurrent memory takes the attention section, which is like its own, and passes over the rest.
    assert_eq!(from(&dense(1, 8)), ["trailing"]);
    assert_eq!(with(&|r| r.n_layer = 6), ["n_layer"]);
    assert_eq!(with(&|r| r.layers[1].n_embd_r = 24), ["record_row_size"]);
    assert_eq!(with(&|r| r.layers[0].n_embd_s += 1), ["record_row_size"]);
    assert_eq!(with(&|r| r.layers.truncate(1)), ["record_count"]);
    let changed = |change: &dyn Fn(&mut Rec)| {
        let mut s = good.clone();
        let Section::Rec(rec) = &mut s.sections[1] else { panic!() };
        change(rec);
        names(&check_bytes(&s.write(), &expect(&spec, 9, StateVersion::V4)))
    };
    assert_eq!(changed(&|r| r.cells[0].pos = 7), ["last_position"]);
    assert_eq!(changed(&|r| r.cells[0].pos = 9), ["last_position"]);
    assert_eq!(changed(&|r| r.cells[0].pos = -1), ["last_position"]);
    assert_eq!(changed(&|r| r.records[0].ty = CacheType::F16), ["record_type"]);
    let twice = |r: &mut Rec| {
        r.cells.push(r.cells[0]);
        r.records.iter_mut().for_each(|t| t.data = t.data.repeat(2));
    };
    assert_eq!(changed(&twice), ["cell_count"]);
}

#[test]
fn a_recurrent_memory_cut_anywhere() {
    let spec = hybrid(5, 8);
    let bytes = state(&spec, &ids(9), StateVersion::V3).write();
    for cut in 0..bytes.len() {
        let found = check_bytes(&bytes[..cut], &expect(&spec, 9, StateVersion::V3));
        assert!(matches!(&found[..], [Fault::Unreadable(e)] if e.short), "cut at {cut}: {found:?}");
    }
    let long = [&bytes[..], &[0]].concat();
    assert_eq!(names(&check_bytes(&long, &expect(&spec, 9, StateVersion::V3))), ["trailing"]);
}

#[test]
fn checkpoints() {
    let (mut s, expect) = good();
    let mut with = |n_tokens, pos_min, pos_max| {
        let blobs = [vec![1, 2, 3], vec![], vec![9]];
        s.appendix = Some(Appendix { checkpoints: vec![Checkpoint { n_tokens, pos_min, pos_max, blobs }] });
        let bytes = s.write();
        assert_eq!(State::parse(&bytes).unwrap(), s);
        (names(&check_bytes(&bytes, &expect)), bytes)
    };
    assert_eq!(with(38, 30, 37).0, Vec::<&str>::new());
    assert_eq!(with(39, 38, 38).0, Vec::<&str>::new());
    for (n, min, max) in
        [(40, 0, 38), (39, 0, 39), (39, -1, 38), (39, 5, 4), (-1, 0, 0), (i64::MIN, i32::MIN, i32::MAX)]
    {
        assert_eq!(with(n, min, max).0, ["checkpoint"], "{n} {min} {max}");
    }
    let (_, bytes) = with(38, 30, 37);
    let start = bytes.len() - (12 + 16 + 3 * 8 + 4);
    for cut in start + 4..bytes.len() {
        let e = State::parse(&bytes[..cut]).unwrap_err();
        assert!(e.short && matches!(e.what, Field::Appendix | Field::AppendixVersion), "{cut}: {e}");
    }
    let damage = |at: usize, value: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[start + at..][..value.len()].copy_from_slice(value);
        State::parse(&bytes).unwrap_err()
    };
    assert_eq!(damage(4, &[2]).what, Field::AppendixVersion);
    assert_eq!(damage(8, &[0xff; 4]).what, Field::Appendix);
    assert_eq!(damage(28, &(1u64 << 63).to_le_bytes()).what, Field::Appendix);
    // Other letters are not an appendix.
    let mut other = bytes.clone();
    other[start] = b'X';
    assert_eq!(names(&check_bytes(&other, &expect)), ["trailing"]);
}

/// States that nobody parsed may have anything in their lists.
#[test]
fn lists_that_do_not_fit_together() {
    let mut s = good().0;
    stream(&mut s, 0).k[1].data.pop();
    stream(&mut s, 0).v[2].width = u32::MAX;
    let found = check(&s, &Expect::default());
    assert_eq!(names(&found), ["row_bytes", "row_bytes"]);
    s.write();
    s.shape();
    let mut s = good().0;
    stream(&mut s, 0).v.pop();
    assert_eq!(names(&check(&s, &good().1)), ["n_layer"]);
    assert!(compare::numeric(&good().0, &s).is_err());
}

#[test]
fn every_fault_says_what_it_is() {
    let faults = [
        broken(|s| s.tokens[10] = 7777),
        broken(|s| stream(s, 0).cells[3].pos = -7),
        broken(|s| stream(s, 0).n_rot = Some((64, 0))),
    ]
    .concat();
    let text: Vec<String> = faults.iter().map(|f| f.to_string()).collect();
    assert_eq!(text[0], "token 10 is 7777, outside a vocabulary of 2000");
    assert!(
        text.contains(&"section 0, cell 3: position -7 is negative: the cell would outlive its slot".into()),
        "{text:?}"
    );
    assert!(text.contains(&"section 0: n_rot_k is 64, the reader has 0".into()), "{text:?}");
    let cut = &good().0.write()[..700];
    let text = check_bytes(cut, &good().1)[0].to_string();
    assert_eq!(text, "at byte 672, section 0 layer 0: rows_k: should be 624 bytes, found the end of the file after 28");
}

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = Vec::new();
    for version in StateVersion::ALL {
        for spec in [dense(2, 2), KvSpec { v_trans: true, cell_ext: true, n_stream: 2, ..windowed(3, 2, 2) }] {
            seeds.push(state(&spec, &ids(4), version).write());
        }
    }
    seeds.push(include_bytes!("saved/jamba-f16-v4.bin").to_vec());
    seeds.push(state(&hybrid(4, 2), &ids(3), StateVersion::V4).write());
    seeds.push(include_bytes!("saved/gemma3-f16-v4.bin").to_vec());
    seeds.push(include_bytes!("saved/head64-q4_0-v4.bin").to_vec());
    seeds
}

fn edit() -> impl Strategy<Value = (prop::sample::Index, u32, usize, u8)> {
    let values = prop::sample::select(vec![0u32, 1, 2, 3, 12, 255, 1 << 16, 1 << 31, u32::MAX]);
    (any::<prop::sample::Index>(), values, 1usize..5, 0u8..4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_end_well(
        seed in prop::sample::select(seeds()),
        edits in prop::collection::vec(edit(), 0..6),
    ) {
        let mut bytes = seed;
        for (at, value, len, what) in edits {
            let at = at.index(bytes.len() + 1);
            match what {
                0 => bytes.truncate(at),
                1 => { bytes.splice(at..at, value.to_le_bytes()[..len.min(4)].to_vec()); }
                2 => { bytes.drain(at..(at + len).min(bytes.len())); }
                _ => for (b, v) in bytes[at..].iter_mut().zip(value.to_le_bytes()).take(len) { *b = v },
            }
        }
        let shapes = [dense(2, 2), windowed(3, 2, 2), hybrid(4, 2)].map(|s| Shape::from(&s));
        let reads = shapes.iter().map(|s| State::parse_as(&bytes, s)).chain([State::parse(&bytes)]);
        for state in reads.flatten() {
            prop_assert!(state.write() == bytes);
            check(&state, &good().1);
            prop_assert!(compare::structure(&state, &state).is_empty());
            let _ = compare::numeric(&state, &state);
            let _ = compare::structure(&state, &good().0);
            let _ = compare::numeric(&good().0, &state);
            let again = State::parse_as(&bytes, &state.shape());
            prop_assert!(again.is_ok() || state.tensors().is_empty() || !state.trailing.is_empty());
        }
        check_bytes(&bytes, &good().1);
    }

    #[test]
    fn noise_is_no_state(mut bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(State::parse(&bytes).is_err());
        let head = b"qsgg\x03\x00\x00\x00\x00\x00\x00\x00";
        let n = bytes.len().min(12);
        bytes[..n].copy_from_slice(&head[..n]);
        if let Ok(state) = State::parse(&bytes) {
            prop_assert!(state.write() == bytes);
        }
    }
}
