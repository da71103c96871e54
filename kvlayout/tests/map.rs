//! The map and the scatter, for arbitrary specs.

mod common;
use common::{dense, hybrid, ids, rows, scattered, state, windowed};
use kvlayout::*;
use proptest::prelude::*;
use std::io;
use std::ops::Range;

fn any_spec() -> impl Strategy<Value = KvSpec> {
    let ty = || prop::sample::select(vec![CacheType::F16, CacheType::Bf16, CacheType::F32]);
    let layers = prop::collection::btree_map(0u32..40, (1u32..20, 1u32..20, any::<bool>()), 1..6);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), 1u32..4, prop::option::of(1u32..12));
    let recurrent = prop::option::of(prop::collection::btree_map(0u32..40, (1u32..30, 0u32..30), 0..5));
    (layers, ty(), ty(), flags, recurrent).prop_map(|(layers, type_k, type_v, flags, recurrent)| {
        let (v_trans, cell_ext, swa_full, n_stream, window) = flags;
        let (mut full, mut local) = (Vec::new(), Vec::new());
        for (layer, (n_embd_k, n_embd_v, is_local)) in layers {
            let list = if is_local && window.is_some() { &mut local } else { &mut full };
            list.push(LayerKv { layer, n_embd_k, n_embd_v });
        }
        let mut sections = vec![KvSection { layers: full, window: None, n_rot: (0, 0) }];
        sections.extend(window.map(|w| KvSection { layers: local, window: Some(w), n_rot: (0, 0) }));
        let recurrent = recurrent.map(|layers| {
            let layer = |(layer, (n_embd_r, n_embd_s))| LayerRec { layer, n_embd_r, n_embd_s };
            RecSection { n_layer: 40, layers: layers.into_iter().map(layer).collect() }
        });
        KvSpec { sections, recurrent, type_k, type_v, v_trans, cell_ext, swa_full, n_stream }
    })
}

fn any_version() -> impl Strategy<Value = StateVersion> {
    prop::sample::select(StateVersion::ALL.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn windows_and_fixed_bytes_are_every_byte_once(
        spec in any_spec(),
        n in 1usize..30,
        version in any_version(),
        checkpoint in any::<bool>(),
    ) {
        let map = KvMap::state_file(&spec, &ids(n), version).unwrap();
        let map = if checkpoint { map.with_checkpoint().unwrap() } else { map };
        let mut pieces: Vec<(u64, u64)> = map.windows().map(|(_, _, w)| (w.offset, w.len())).collect();
        let copies = map.windows().filter_map(|(_, _, w)| Some((w.offset + map.copied(w)?, w.len())));
        pieces.extend(copies.collect::<Vec<_>>());
        pieces.extend(map.fixed().map(|(at, bytes)| (at, bytes.len() as u64)));
        pieces.sort();
        let mut end = 0;
        for (at, len) in pieces {
            prop_assert_eq!(at, end);
            prop_assert!(len > 0);
            end += len;
        }
        prop_assert_eq!(end, map.size());
    }

    #[test]
    fn scattered_in_any_order_it_is_the_state_written(
        spec in any_spec(),
        n in 1usize..30,
        version in any_version(),
        seed in any::<u64>(),
        file in any::<bool>(),
        checkpoint in any::<bool>(),
    ) {
        let tokens = ids(n);
        let mut want = state(&spec, &tokens, version);
        let mut map = KvMap::state_file(&spec, &tokens, version).unwrap();
        if checkpoint {
            map = map.with_checkpoint().unwrap();
            want.appendix = common::checkpoint(&spec, &want);
        }
        let (want_state, want) = (want.clone(), want.write());
        prop_assert_eq!(map.size(), want.len() as u64);

        // Every tensor in chunks of its own, all chunks shuffled.
        let mut rng = seed;
        let mut next = |below: u32| {
            rng = rng.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (rng >> 33) as u32 % below
        };
        let mut puts: Vec<(u32, Part, Range<u32>)> = Vec::new();
        for (layer, part, _) in map.windows() {
            let mut at = if matches!(part, Part::R | Part::S) { n as u32 - 1 } else { 0 };
            while at < n as u32 {
                let end = (at + 1 + next(7)).min(n as u32);
                puts.push((layer, part, at..end));
                at = end;
            }
        }
        for i in (1..puts.len()).rev() {
            puts.swap(i, next(i as u32 + 1) as usize);
        }
        let fill = |mut sink: Box<dyn KvSink + '_>| {
            for (layer, part, positions) in puts.clone() {
                let width = map.window(layer, part).unwrap().width;
                sink.put_rows(layer, part, positions.clone(), &rows(layer, part, positions, width)).unwrap();
            }
            assert!(!sink.touched());
            sink.commit().unwrap()
        };
        let mut out = Vec::new();
        if file {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("state");
            fill(Box::new(Scatter::new(map.clone(), StateFile::create(&path, map.size()).unwrap()).unwrap()));
            out = std::fs::read(path).unwrap();
        } else {
            fill(Box::new(Scatter::new(map.clone(), MemSpace::new(&mut out, map.size()).unwrap()).unwrap()));
        }
        prop_assert!(out == want);
        prop_assert_eq!(State::parse_as(&out, &Shape::from(&spec)).unwrap(), want_state);
        prop_assert_eq!(State::parse(&out).unwrap().write(), out);
    }
}

#[test]
fn layers_that_keep_nothing_have_rows_of_no_bytes_behind_one_that_keeps_some() {
    for (v_trans, version) in [false, true].into_iter().flat_map(|t| StateVersion::ALL.map(|v| (t, v))) {
        let mut spec = KvSpec { v_trans, ..dense(4, 4) };
        for l in [1, 3] {
            (spec.sections[0].layers[l].n_embd_k, spec.sections[0].layers[l].n_embd_v) = (0, 0);
        }
        let want = state(&spec, &ids(5), version);
        let map = KvMap::state_file(&spec, &ids(5), version).unwrap();
        assert!(map.windows().map(|(layer, ..)| layer).eq([0, 2, 0, 2]));
        let mut out = Vec::new();
        let mut sink = Scatter::new(map.clone(), MemSpace::new(&mut out, map.size()).unwrap()).unwrap();
        for (layer, part, _) in map.windows() {
            sink.put_rows(layer, part, 0..5, &rows(layer, part, 0..5, 4)).unwrap();
        }
        Box::new(sink).commit().unwrap();
        assert!(out == want.write());
        assert_eq!(State::parse(&out).unwrap(), want);
        assert_eq!(State::parse_as(&out, &Shape::from(&spec)).unwrap(), want);
        // In a first layer nobody could tell them from the rows of another memory.
        (spec.sections[0].layers[0].n_embd_k, spec.sections[0].layers[0].n_embd_v) = (0, 0);
        let refusal = KvMap::state_file(&spec, &ids(5), version).unwrap_err();
        assert_eq!(refusal, Refusal::NoChannels { layer: 0, part: Part::K });
    }
}

#[test]
fn sizes_of_real_models() {
    // 30 layers of 192 channels.
    let spec = dense(30, 192);
    let size = |spec: &KvSpec, n: usize, v| KvMap::state_file(spec, &ids(n), v).unwrap().size();
    assert_eq!(size(&spec, 100, StateVersion::V4), 2_306_356);
    assert_eq!(size(&spec, 100, StateVersion::V2), 2_306_348);
    assert_eq!(size(&spec, 2000, StateVersion::V4) + 16, 46_112_772);
    let transposed = KvSpec { v_trans: true, ..spec.clone() };
    assert_eq!(size(&transposed, 100, StateVersion::V4), 2_306_356);
    let wide = KvSpec { type_k: CacheType::F32, type_v: CacheType::F32, ..spec };
    assert_eq!(size(&wide, 100, StateVersion::V4) + 16, 4_610_372);
}

#[test]
fn five_gigabytes_are_mapped_without_being_written() {
    let spec = dense(28, 1024);
    let n = 48_000u64;
    let map = KvMap::state_file(&spec, &ids(n as usize), StateVersion::V3).unwrap();
    let want = 12 + 4 * n + 8 + 12 * n + 8 + 2 * 28 * (12 + n * 2048);
    assert!(want > 5_000_000_000);
    assert_eq!(map.size(), want);
    let last = map.window(27, Part::V).unwrap();
    assert_eq!(last.offset + last.len(), want);
    assert!(last.offset > u64::from(u32::MAX));
}

#[test]
fn what_cannot_be_a_state_is_refused_before_anything_is_written() {
    let refuse = |spec: &KvSpec, tokens: &[i32]| KvMap::state_file(spec, tokens, StateVersion::V4).unwrap_err();
    let good = dense(2, 4);
    assert_eq!(refuse(&good, &[]), Refusal::NoTokens);
    assert_eq!(refuse(&good, &[1, 2, -3]), Refusal::NegativeToken { index: 2, id: -3 });
    let with = |change: &dyn Fn(&mut KvSpec)| {
        let mut spec = good.clone();
        change(&mut spec);
        refuse(&spec, &[1, 2])
    };
    for ty in CacheType::ALL.into_iter().filter(|t| t.is_quantised()) {
        // Four channels are no block of 32.
        let (k, v) = (with(&|s| s.type_k = ty), with(&|s| s.type_v = ty));
        assert_eq!(k, Refusal::RowBlocks { layer: 0, part: Part::K, width: 4, ty });
        assert_eq!(v, Refusal::RowBlocks { layer: 0, part: Part::V, width: 4, ty });
        assert!(v.to_string().contains(ty.name()));
        let transposed = with(&|s| (s.type_v, s.v_trans) = (ty, true));
        assert_eq!(transposed, Refusal::TransposedBlocks(ty));
        assert!(transposed.to_string().contains("-fa on"));
    }
    for (n_rot, part) in [((3, 0), Part::K), ((0, 8), Part::V)] {
        let n = n_rot.0.max(n_rot.1);
        let refusal = with(&|s| s.sections[0].n_rot = n_rot);
        assert_eq!(refusal, Refusal::Rotation { section: 0, part, width: 4, n_rot: n });
    }
    assert_eq!(with(&|s| s.n_stream = 0), Refusal::Streams(0));
    assert_eq!(with(&|s| s.n_stream = 257), Refusal::Streams(257));
    assert_eq!(with(&|s| s.sections.clear()), Refusal::NoLayers);
    assert_eq!(with(&|s| s.sections[0].layers.clear()), Refusal::NoLayers);
    assert_eq!(with(&|s| s.sections[0].window = Some(0)), Refusal::NoWindow { section: 0 });
    assert_eq!(with(&|s| s.sections[0].layers[1].n_embd_v = 0), Refusal::NoChannels { layer: 1, part: Part::V });
    assert_eq!(with(&|s| s.sections[0].layers.reverse()), Refusal::LayerOrder { section: 0, layer: 0 });
    assert_eq!(with(&|s| s.sections[0].layers[1].layer = 0), Refusal::LayerOrder { section: 0, layer: 0 });
    let twice =
        with(&|s| s.sections.push(KvSection { layers: s.sections[0].layers.clone(), window: Some(3), n_rot: (0, 0) }));
    assert_eq!(twice, Refusal::LayerOrder { section: 1, layer: 0 });
    let alone = with(&|s| {
        s.sections.clear();
        s.recurrent = Some(RecSection { n_layer: 2, layers: vec![] });
    });
    assert_eq!(alone, Refusal::NoLayers);
    let recurrent = |layers: &[(u32, u32, u32)]| {
        let layer = |&(layer, n_embd_r, n_embd_s)| LayerRec { layer, n_embd_r, n_embd_s };
        let layers = layers.iter().map(layer).collect();
        with(&|s| s.recurrent = Some(RecSection { n_layer: 3, layers: Vec::clone(&layers) }))
    };
    assert_eq!(recurrent(&[(3, 1, 1)]), Refusal::RecurrentLayer { layer: 3, n_layer: 3 });
    assert_eq!(recurrent(&[(2, 1, 1), (1, 1, 1)]), Refusal::LayerOrder { section: 1, layer: 1 });
    assert_eq!(recurrent(&[(2, 1, 1), (2, 1, 1)]), Refusal::LayerOrder { section: 1, layer: 2 });
    assert_eq!(recurrent(&[(2, 0, 0)]), Refusal::NoChannels { layer: 2, part: Part::R });
    let mut huge = dense(20_000, u32::MAX);
    huge.type_k = CacheType::F32;
    assert_eq!(refuse(&huge, &ids(100_000)), Refusal::TooLarge);
}

#[test]
fn a_window_keeps_one_position_more_than_it_sees() {
    for (n, first) in [(1, 0), (8, 0), (9, 0), (10, 1), (30, 21)] {
        let map = KvMap::state_file(&windowed(4, 2, 8), &ids(n), StateVersion::V3).unwrap();
        assert_eq!(map.window(2, Part::K).unwrap().positions, 0..n as u32);
        assert_eq!(map.window(3, Part::V).unwrap().positions, first..n as u32);
        let full = KvSpec { swa_full: true, ..windowed(4, 2, 8) };
        let map = KvMap::state_file(&full, &ids(n), StateVersion::V3).unwrap();
        assert_eq!(map.window(3, Part::V).unwrap().positions, 0..n as u32);
    }
    // What does not reach past the window wants a checkpoint, in models without recurrent state.
    for (n, want) in [(1, true), (8, true), (9, false)] {
        let mut spec = windowed(4, 2, 8);
        let wants = |spec: &KvSpec| KvMap::state_file(spec, &ids(n), StateVersion::V4).unwrap().wants_checkpoint();
        assert_eq!(wants(&spec), want, "{n}");
        spec.swa_full = true;
        assert!(!wants(&spec) && !wants(&dense(4, 2)));
    }
    // A window no prompt can fill.
    let map = KvMap::state_file(&windowed(4, 2, u32::MAX), &ids(5), StateVersion::V3).unwrap();
    assert_eq!(map.window(3, Part::K).unwrap().positions, 0..5);
    assert_eq!(map.window(4, Part::K), None);
    assert_eq!(map.window(3, Part::R), None);
}

#[test]
fn recurrent_state_is_that_of_the_last_position() {
    let spec = hybrid(6, 4);
    for version in StateVersion::ALL {
        assert_eq!(scattered(&spec, &ids(20), version), state(&spec, &ids(20), version).write());
    }
    let map = KvMap::state_file(&spec, &ids(10), StateVersion::V4).unwrap();
    assert_eq!(map.window(1, Part::R).map(|w| (w.section, w.positions.clone(), w.len())), Some((1, 9..10, 4 * 13)));
    assert_eq!((map.window(4, Part::S), map.window(2, Part::R), map.window(1, Part::K)), (None, None, None));
    let mut out = Vec::new();
    let mut sink = Scatter::new(map.clone(), MemSpace::new(&mut out, map.size()).unwrap()).unwrap();
    assert_eq!((sink.wants(1, Part::S), sink.wants(4, Part::S)), (9..10, 0..0));
    // Numbers that are none are refused here too; there is no type that could be too small for others.
    let e = sink.put_rows(0, Part::S, 9..10, &[0.0, f32::INFINITY, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap_err();
    assert!(matches!(e, SinkError::NonFinite { layer: 0, part: Part::S, position: 9, channel: 1, .. }), "{e}");
    sink.put_rows(0, Part::S, 9..10, &[f32::MAX; 8]).unwrap();
    for l in [2, 5] {
        for part in [Part::K, Part::V] {
            sink.put_rows(l, part, 0..10, &rows(l, part, 0..10, 4)).unwrap();
        }
    }
    let missing = Box::new(sink).commit().unwrap_err().to_string();
    assert_eq!(missing, "layer 0 R: positions 9..10 are missing");
}

#[test]
fn a_scatter_takes_each_row_once_and_only_rows_it_has() {
    let spec = windowed(4, 3, 4);
    let map = KvMap::state_file(&spec, &ids(10), StateVersion::V3).unwrap();
    let mut out = Vec::new();
    let mut sink = Scatter::new(map.clone(), MemSpace::new(&mut out, map.size()).unwrap()).unwrap();
    assert_eq!((sink.wants(2, Part::K), sink.wants(0, Part::V), sink.wants(9, Part::K)), (0..10, 5..10, 0..0));
    let r = |n: usize| vec![1.0; 3 * n];
    let text = |r: Result<(), SinkError>| r.unwrap_err().to_string();
    assert_eq!(text(sink.put_rows(9, Part::K, 0..1, &r(1))), "layer 9 K: the decoder's memory has no such tensor");
    assert_eq!(text(sink.put_rows(2, Part::K, 0..2, &r(1))), "layer 2 K: 3 values for 2 positions of 3 channels");
    assert_eq!(text(sink.put_rows(2, Part::K, 9..11, &r(2))), "layer 2 K: positions 9..11 of a prompt of 10");
    assert!(matches!(sink.put_rows(2, Part::K, Range { start: 5, end: 3 }, &[]), Err(SinkError::Outside { .. })));
    sink.put_rows(2, Part::K, 3..6, &r(3)).unwrap();
    assert_eq!(text(sink.put_rows(2, Part::K, 0..4, &r(4))), "layer 2 K: position 3 is given twice");
    assert_eq!(text(sink.put_rows(2, Part::K, 5..7, &r(2))), "layer 2 K: position 5 is given twice");
    sink.put_rows(2, Part::K, 4..4, &[]).unwrap();
    // Before the window rows are dropped, however often they come.
    sink.put_rows(0, Part::V, 0..5, &r(5)).unwrap();
    sink.put_rows(0, Part::V, 2..7, &r(5)).unwrap();
    assert_eq!(text(sink.put_rows(0, Part::V, 2..7, &r(5))), "layer 0 V: position 5 is given twice");

    let incomplete = Box::new(sink).commit().unwrap_err().to_string();
    assert_eq!(incomplete, "layer 2 K: positions 0..3 are missing");
}

#[test]
#[allow(clippy::single_range_in_vec_init)] // lists of ranges, some of one
fn nothing_is_committed_with_a_gap() {
    let map = KvMap::state_file(&dense(1, 1), &ids(6), StateVersion::V4).unwrap();
    for (k, missing) in [
        (vec![0..6], None),
        (vec![4..6, 0..2], Some(2..4)),
        (vec![0..1, 1..2, 5..6], Some(2..5)),
        (vec![1..6], Some(0..1)),
        (vec![0..5], Some(5..6)),
        (vec![], Some(0..6)),
    ] {
        let mut out = Vec::new();
        let mut sink = Scatter::new(map.clone(), MemSpace::new(&mut out, map.size()).unwrap()).unwrap();
        for r in k {
            sink.put_rows(0, Part::K, r.clone(), &vec![0.0; r.len()]).unwrap();
        }
        sink.put_rows(0, Part::V, 0..6, &[0.0; 6]).unwrap();
        match (Box::new(sink).commit(), missing) {
            (Ok(_), None) => {}
            (Err(SinkError::Incomplete { layer: 0, part: Part::K, missing }), Some(want)) => {
                assert_eq!(missing, want);
                assert!(!out.starts_with(b"qsgg"));
            }
            (r, want) => panic!("{r:?}, should be {want:?}"),
        }
    }
}

#[test]
fn values_that_are_none_are_refused_with_their_place() {
    for (ty, bad, overflow) in [
        (CacheType::F16, f32::NAN, false),
        (CacheType::F16, f32::NEG_INFINITY, false),
        (CacheType::F16, 70_000.0, true),
        (CacheType::Bf16, f32::INFINITY, false),
        (CacheType::Bf16, -f32::MAX, true),
        (CacheType::F32, f32::NAN, false),
    ] {
        let spec = KvSpec { type_k: ty, type_v: ty, ..windowed(4, 3, 4) };
        let map = KvMap::state_file(&spec, &ids(10), StateVersion::V3).unwrap();
        let mut out = Vec::new();
        let mut sink = Scatter::new(map.clone(), MemSpace::new(&mut out, map.size()).unwrap()).unwrap();
        let mut rows = vec![0.5; 24];
        rows[4 * 3 + 2] = bad;
        let e = sink.put_rows(2, Part::V, 2..10, &rows).unwrap_err();
        match e {
            SinkError::NonFinite { layer: 2, part: Part::V, position: 6, channel: 2, .. } if !overflow => {}
            SinkError::Overflow { layer: 2, part: Part::V, position: 6, channel: 2, ty: t, .. }
                if overflow && t == ty => {}
            e => panic!("{ty} {bad}: {e:?}"),
        }
        // Nothing was taken, so that the same rows may come again, sound.
        rows[4 * 3 + 2] = 0.5;
        sink.put_rows(2, Part::V, 2..10, &rows).unwrap();
        // Rows before the window are not kept, but what is no number there has spoiled what is.
        rows[2] = bad;
        let dropped = sink.put_rows(3, Part::V, 0..8, &rows);
        match dropped {
            Err(SinkError::NonFinite { layer: 3, position: 0, channel: 2, .. }) if !overflow => {}
            Ok(()) if overflow => {}
            r => panic!("{ty} {bad}: {r:?}"),
        }
    }
}

/// A space that others watch.
struct Live(Vec<u8>);

impl ByteSpace for Live {
    const LIVE: bool = true;
    fn size(&self) -> u64 {
        self.0.len() as u64
    }
    fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.0[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
    fn seal(self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_live_space_is_touched_by_the_first_row_kept() {
    let map = KvMap::state_file(&windowed(3, 2, 1), &ids(5), StateVersion::V3).unwrap();
    let mut sink = Scatter::new(map.clone(), Live(vec![0; map.size() as usize])).unwrap();
    sink.put_rows(0, Part::K, 0..3, &[0.0; 6]).unwrap();
    sink.put_rows(0, Part::K, 4..5, &[f32::NAN; 2]).unwrap_err();
    assert!(!sink.touched());
    sink.put_rows(0, Part::K, 3..4, &[0.0; 2]).unwrap();
    assert!(sink.touched());
}

#[test]
fn a_map_and_a_space_must_be_of_one_size() {
    let map = KvMap::state_file(&dense(1, 1), &ids(2), StateVersion::V3).unwrap();
    let mut out = Vec::new();
    let space = MemSpace::new(&mut out, map.size() + 1).unwrap();
    let e = Scatter::new(map, space).unwrap_err();
    assert!(matches!(e, SinkError::SpaceSize { map, space } if map + 1 == space));
    let e = MemSpace::new(&mut out, u64::MAX).unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::OutOfMemory);
}

#[test]
fn a_file_that_cannot_be_finished_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let map = KvMap::state_file(&dense(1, 1), &ids(2), StateVersion::V3).unwrap();
    let file = StateFile::create(&path, map.size()).unwrap();
    let mut sink = Scatter::new(map, file).unwrap();
    sink.put_rows(0, Part::K, 0..2, &[1.0, 2.0]).unwrap();
    Box::new(sink).commit().unwrap_err();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn the_whole_of_a_simple_one() {
    let spec = windowed(7, 5, 6);
    for version in StateVersion::ALL {
        assert_eq!(scattered(&spec, &ids(20), version), state(&spec, &ids(20), version).write());
    }
}

/// Latent attention: one row is key and value at once, and the file has no V. The bytes by hand, from the table above
/// [`KvMap`].
#[test]
fn without_v_there_are_keys_alone() {
    let mut spec = dense(2, 3);
    spec.sections[0].layers.iter_mut().for_each(|l| l.n_embd_v = 0);
    let tokens = [7, 8];
    let out = scattered(&spec, &tokens, StateVersion::V4);
    let word = |v: u32| v.to_le_bytes().to_vec();
    let mut want = [*b"qsgg"].concat();
    // Version, tokens, streams, cells, each cell, V not transposed, layers, no rotation.
    for v in [4, 2, 7, 8, 1, 2, 0, 1, 0, 1, 1, 0, 0, 2, 0, 0] {
        want.extend(word(v));
    }
    for layer in 0..2 {
        want.extend(word(CacheType::F16.id()));
        want.extend(6u64.to_le_bytes());
        want.extend(rows(layer, Part::K, 0..2, 3).into_iter().flat_map(|v| common::bytes(CacheType::F16, v)));
    }
    assert_eq!(out, want);
    let state = State::parse_latent(&out).unwrap();
    assert_eq!(state.tensors(), [(0, 0, Part::K), (0, 1, Part::K)]);
    assert_eq!(State::parse_as(&out, &Shape::from(&spec)).unwrap(), state);
    assert!(State::parse_latent(&out[..out.len() - 1]).is_err());
    assert_eq!(State::parse_any(&out).unwrap(), state);
    // With bytes over it may as well be another's file that was cut.
    assert_eq!(State::parse_any(&[&*out, &[0]].concat()), State::parse(&[&*out, &[0]].concat()));
    let expect = faults::Expect { spec: Some(spec), tokens: Some(tokens.to_vec()), ..Default::default() };
    assert_eq!(faults::check_bytes(&out, &expect), []);
    // The same file for a model with values: what is missing is named.
    let expect = faults::Expect { spec: Some(dense(2, 3)), ..expect };
    assert_ne!(faults::check_bytes(&out, &expect), []);
}
