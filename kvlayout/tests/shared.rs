//! The shared route, over every kind of memory that the machine has: descriptors, regions, and what is in them afterwards.

mod common;
mod memory;
use common::{dense, ids, windowed};
use kvlayout::*;
use memory::{Kind, View};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, OFlags, SealFlags, memfd_create};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The decoder's side of one region: memory full of a pattern. Dma-bufs are whole pages.
fn memory(kind: Kind, len: u64) -> View {
    let view = View::new(memory::make(kind, len));
    let bytes: Vec<u8> = (0..view.len() as u64).map(pattern).collect();
    view.write(0, &bytes);
    view
}

fn pattern(at: u64) -> u8 {
    (at % 251) as u8 ^ 0xa5
}

/// As it would arrive in a child: a number that is open and not close-on-exec.
fn inherit(file: &impl AsFd) -> RawFd {
    rustix::io::fcntl_dupfd_cloexec(file, 3)
        .map(|fd| {
            rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty()).unwrap();
            fd.into_raw_fd()
        })
        .unwrap()
}

fn take(files: &[&impl AsFd]) -> Vec<Inherited> {
    let numbers: Vec<RawFd> = files.iter().map(|f| inherit(*f)).collect();
    Inherited::take(&numbers).unwrap()
}

fn content(memory: &View) -> Vec<u8> {
    memory.bytes()
}

/// Rows of values that exercise the rounding, finite in every type.
fn values(seed: u64, positions: Range<u32>, width: u32) -> Vec<f32> {
    let value = |i: u64| {
        let mut x = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 29;
        x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
        let v = f32::from_bits((x >> 32) as u32);
        if v.is_finite() && v.abs() < 60000.0 { v } else { (x % 1000) as f32 / 7.0 - 60.0 }
    };
    let width = u64::from(width);
    (u64::from(positions.start) * width..u64::from(positions.end) * width).map(value).collect()
}

fn seed_of(layer: u32, part: Part) -> u64 {
    u64::from(layer) * 2 + u64::from(part == Part::V)
}

fn put(sink: &mut dyn KvSink, map: &KvMap, chunk: u32) -> Result<(), SinkError> {
    for (layer, part, w) in map.windows() {
        let mut at = 0;
        while at < map.n_tokens() {
            let end = (at + chunk).min(map.n_tokens());
            sink.put_rows(layer, part, at..end, &values(seed_of(layer, part), at..end, w.width))?;
            at = end;
        }
    }
    Ok(())
}

/// A layout spread over `n` regions, which begin at odd places of their descriptors.
fn spread(spec: &KvSpec, n_ctx: u32, n: u16) -> ShareLayout {
    let layout = ShareLayout::compute(spec, n_ctx).unwrap();
    let mut header = Header::new(None, ShareParams { n_ctx: Some(n_ctx), ..ShareParams::default() }, &layout);
    let mut ends = vec![0; usize::from(n)];
    let mut list = header.clone().with_tensors(&layout).tensors.unwrap();
    for (i, t) in list.iter_mut().enumerate() {
        t.region = (i as u16 / 2) % n;
        let end = &mut ends[usize::from(t.region)];
        // A gap of 64 bytes before each.
        t.offset = *end + 64;
        *end = t.offset + layout.tensors()[i].len();
    }
    header.regions = ends.iter().map(|&size| ShareRegion { offset: 0, size, layout: 0 }).collect();
    // The hashes by asking for them: what the refusal says we would have.
    header.tensors = Some(list);
    for i in 0..usize::from(n) {
        if let Err(ShareRefusal::Hash { region, ours, .. }) = header.resolve(spec, None, n.into()) {
            assert_eq!(region, i);
            header.regions[region].layout = ours;
        }
        header.regions[i].offset = 1000 + 4096 * i as u64 + i as u64;
    }
    Header::parse(header.write().as_bytes()).unwrap().resolve(spec, None, n.into()).unwrap()
}

fn memories(kind: Kind, layout: &ShareLayout) -> Vec<View> {
    // Some bytes follow the last region.
    layout.regions().iter().map(|r| memory(kind, r.end().unwrap() + 777)).collect()
}

/// What every byte must be after rows 0..n of `seed_of` have been written.
fn want(layout: &ShareLayout, map: &KvMap, region: usize, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len as u64).map(pattern).collect();
    for (layer, part, w) in map.windows().filter(|(_, _, w)| usize::from(w.region) == region) {
        let rows = values(seed_of(layer, part), 0..map.n_tokens(), w.width);
        let to = &mut bytes[(layout.regions()[region].offset + w.offset) as usize..][..w.len() as usize];
        if w.elem.is_quantised() {
            let mut blocks = Vec::new();
            w.elem.encode(&rows, &mut blocks).unwrap();
            to.copy_from_slice(&blocks);
            continue;
        }
        let el = w.elem.block_bytes() as usize;
        for (to, v) in to.chunks_exact_mut(el).zip(rows) {
            to.copy_from_slice(&common::bytes(w.elem, v));
        }
    }
    bytes
}

fn any_spec() -> impl Strategy<Value = KvSpec> {
    let ty = || prop::sample::select(CacheType::ALL.to_vec());
    (1u32..7, 1u32..40, prop::option::of(1u32..600), ty(), ty(), any::<bool>()).prop_map(
        |(layers, width, window, type_k, type_v, swa_full)| {
            let quantised = type_k.is_quantised() || type_v.is_quantised();
            let width = if quantised { width * 32 } else { width };
            let spec = match window {
                Some(w) if layers > 2 => windowed(layers, width, w),
                _ => dense(layers, width),
            };
            KvSpec { type_k, type_v, swa_full, ..spec }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn only_the_rows_change_and_they_are_the_file_routes(
        spec in any_spec(),
        n_ctx in 1u32..700,
        n in 1u32..300,
        regions in 0u16..4,
        chunk in 1u32..200,
        kind in prop::sample::select(memory::available()),
    ) {
        let layout = match regions {
            0 => ShareLayout::compute(&spec, n_ctx).unwrap(),
            n => spread(&spec, n_ctx, n.min(spec.sections.iter().map(|s| s.layers.len()).sum::<usize>() as u16)),
        };
        let n = n.min(layout.cells() as u32 - 1);
        let map = KvMap::shared(&spec, &layout, n).unwrap();
        let files = memories(kind, &layout);
        let regions = Regions::map(take(&files.iter().collect::<Vec<_>>()), &layout, &map, Guard::open()).unwrap();
        // Mapping alone changes nothing.
        for (i, file) in files.iter().enumerate() {
            let found = content(file);
            prop_assert!(found.iter().enumerate().all(|(i, b)| *b == pattern(i as u64)), "{}", i);
        }
        let mut sink = Box::new(Scatter::new(map.clone(), regions).unwrap());
        prop_assert!(!sink.touched());
        put(sink.as_mut(), &map, chunk).unwrap();
        prop_assert!(sink.touched());
        let receipt = sink.commit().unwrap();
        prop_assert_eq!(receipt.bytes, map.windows().map(|(_, _, w)| w.len()).sum::<u64>());
        prop_assert_eq!((receipt.tokens, receipt.tensors), (n, layout.tensors().len() as u32));
        for (i, file) in files.iter().enumerate() {
            let found = content(file);
            prop_assert!(found == want(&layout, &map, i, found.len()), "region {}", i);
        }

        // The same rows by the file route.
        let tokens = ids(n as usize);
        let file_map = KvMap::state_file(&spec, &tokens, StateVersion::V4).unwrap().with_checkpoint().unwrap();
        let mut bytes = Vec::new();
        let mut sink = Box::new(Scatter::new(file_map.clone(), MemSpace::new(&mut bytes, file_map.size()).unwrap()).unwrap());
        put(sink.as_mut(), &file_map, chunk).unwrap();
        sink.commit().unwrap();
        let read = |region: u16, at: u64, to: &mut [u8]| {
            files[usize::from(region)].read_exact_at(to, layout.regions()[usize::from(region)].offset + at)
        };
        let from_regions = layout.to_state_file(&spec, &tokens, StateVersion::V4, read).unwrap();
        prop_assert!(bytes == from_regions);
        prop_assert!(State::parse_as(&from_regions, &Shape::from(&spec)).is_ok());
    }

    #[test]
    fn after_a_stop_no_byte_changes(
        allowed in 0u32..60,
        chunk in 1u32..250,
        late in any::<bool>(),
        kind in prop::sample::select(memory::available()),
    ) {
        let spec = dense(3, 200);
        let layout = spread(&spec, 256, 2);
        let map = KvMap::shared(&spec, &layout, 250).unwrap();
        let files = memories(kind, &layout);
        let left = AtomicU32::new(allowed);
        // Who answers no, then yes again, is not believed.
        let may_write = move || {
            let now = left.load(Ordering::Relaxed);
            left.store(now.checked_sub(1).unwrap_or(1000), Ordering::Relaxed);
            now > 0
        };
        let guard = Guard::new(may_write);
        let touched = guard.touched();
        let regions = Regions::map(take(&[&files[0], &files[1]]), &layout, &map, guard).unwrap();
        let mut sink = Box::new(Scatter::new(map.clone(), regions).unwrap());
        match put(sink.as_mut(), &map, chunk) {
            Ok(()) => {
                // The last answer is asked for before the handoff is called whole.
                prop_assert!(allowed >= 12);
                prop_assert!(sink.touched());
                let end = sink.commit();
                prop_assert!(end.is_ok() || end.unwrap_err().is_stopped());
            }
            Err(e) => {
                prop_assert!(e.is_stopped(), "{}", e);
                prop_assert_eq!(sink.touched(), touched.get());
                // The first look comes before the first byte, twice where a device has to be told.
                prop_assert!(touched.get() || allowed <= 1);
                prop_assert!(allowed > 0 || !touched.get());
                // The decoder takes its memory back.
                for file in &files {
                    file.fill(0x5a);
                }
                let mut stopped = 0;
                for (layer, part, w) in map.windows() {
                    for at in (0..250).step_by(chunk as usize) {
                        let to = (at + chunk).min(250);
                        let again = sink.put_rows(layer, part, at..to, &values(3, at..to, w.width)).unwrap_err();
                        // What had come before the stop has come.
                        prop_assert!(again.is_stopped() || matches!(again, SinkError::Twice { .. }), "{}", again);
                        stopped += u32::from(again.is_stopped());
                    }
                }
                prop_assert!(stopped > 0);
                if late {
                    prop_assert!(sink.commit().is_err());
                } else {
                    drop(sink);
                }
                for file in &files {
                    prop_assert!(content(file).iter().all(|b| *b == 0x5a));
                }
            }
        }
    }
}

#[test]
fn a_stop_before_the_end_is_a_stop() {
    let spec = dense(1, 8);
    let layout = ShareLayout::compute(&spec, 256).unwrap();
    let map = KvMap::shared(&spec, &layout, 10).unwrap();
    for kind in memory::available() {
        let file = memory(kind, layout.size());
        let stop = AtomicBool::new(false);
        let guard = Guard::new(|| !stop.load(Ordering::Relaxed));
        let touched = guard.touched();
        let regions = Regions::map(take(&[&file]), &layout, &map, guard).unwrap();
        let mut sink = Box::new(Scatter::new(map.clone(), regions).unwrap());
        put(sink.as_mut(), &map, 10).unwrap();
        stop.store(true, Ordering::Relaxed);
        assert!(sink.commit().unwrap_err().is_stopped());
        assert!(touched.get());
    }
}

#[test]
fn a_stop_within_one_call_ends_it_soon() {
    let spec = dense(1, 1024);
    let layout = ShareLayout::compute(&spec, 4096).unwrap();
    let map = KvMap::shared(&spec, &layout, 4000).unwrap();
    for kind in memory::available() {
        let file = memory(kind, layout.size());
        let left = AtomicU32::new(6);
        let guard = Guard::new(move || left.fetch_sub(1, Ordering::Relaxed) > 1);
        let regions = Regions::map(take(&[&file]), &layout, &map, guard).unwrap();
        let mut sink = Scatter::new(map.clone(), regions).unwrap();
        let e = sink.put_rows(0, Part::K, 0..4000, &vec![1.0; 4000 * 1024]).unwrap_err();
        assert!(e.is_stopped());
        drop(sink);
        let changed = content(&file).iter().enumerate().filter(|(i, b)| **b != pattern(*i as u64)).count();
        assert!(changed > 0 && changed <= 6 << 16, "{changed}");
    }
}

/// As many threads as there are numbers, at once.
struct All;

impl Spread for All {
    fn each(&self, n: usize, f: &(dyn Fn(usize) + Sync)) {
        std::thread::scope(|scope| (0..n).for_each(|i| drop(scope.spawn(move || f(i)))));
    }
}

#[test]
fn several_threads_put_what_one_does() {
    let types = [CacheType::F16, CacheType::Bf16, CacheType::F32];
    for (ty, kind) in types.into_iter().flat_map(|ty| memory::available().into_iter().map(move |kind| (ty, kind))) {
        let spec = KvSpec { type_k: ty, type_v: ty, ..dense(2, 300) };
        let layout = spread(&spec, 512, 2);
        let map = KvMap::shared(&spec, &layout, 500).unwrap();
        let mut seen = Vec::new();
        for spread in [&Alone as &dyn Spread, &All] {
            let files = memories(kind, &layout);
            let regions = Regions::map(take(&[&files[0], &files[1]]), &layout, &map, Guard::open()).unwrap();
            let mut sink = Box::new(Scatter::new(map.clone(), regions).unwrap());
            // All tensors at once, in two calls of positions, the later ones first.
            for positions in [130..500, 0..130] {
                let rows = map.windows().map(|(_, _, w)| values(9, positions.clone(), w.width)).collect::<Vec<_>>();
                let all: Vec<Rows<'_>> = map
                    .windows()
                    .zip(&rows)
                    .map(|((layer, part, _), rows)| Rows {
                        layer,
                        part,
                        positions: positions.clone(),
                        rows,
                        largest: (part == Part::K).then(|| magnitude(rows)),
                    })
                    .collect();
                sink.put_tensors(&all, spread).unwrap();
            }
            sink.commit().unwrap();
            seen.push(files.iter().map(content).collect::<Vec<_>>());
        }
        assert!(seen[0] == seen[1], "{ty}");
    }
}

#[test]
fn of_several_tensors_none_is_touched_when_one_is_refused() {
    let spec = dense(2, 300);
    let layout = ShareLayout::compute(&spec, 512).unwrap();
    let map = KvMap::shared(&spec, &layout, 500).unwrap();
    let file = memory(Kind::Memfd, layout.size());
    let regions = Regions::map(take(&[&file]), &layout, &map, Guard::open()).unwrap();
    let mut sink = Scatter::new(map, regions).unwrap();
    let good = vec![1f32; 500 * 300];
    fn rows(layer: u32, part: Part, rows: &[f32], largest: Option<u32>) -> Rows<'_> {
        Rows { layer, part, positions: 0..500, rows, largest }
    }
    for value in [f32::NAN, f32::INFINITY, 65520.0] {
        let mut bad = good.clone();
        bad[499 * 300 + 7] = value;
        for largest in [None, Some(magnitude(&bad))] {
            let all = [rows(0, Part::K, &good, None), rows(0, Part::V, &bad, largest)];
            let e = sink.put_tensors(&all, &All).unwrap_err();
            let place = match e {
                SinkError::NonFinite { layer, part, position, channel, .. }
                | SinkError::Overflow { layer, part, position, channel, .. } => (layer, part, position, channel),
                other => panic!("{other}"),
            };
            assert_eq!(place, (0, Part::V, 499, 7), "{value}");
        }
    }
    let twice = [rows(1, Part::K, &good, None), rows(1, Part::K, &good, None)];
    assert!(matches!(sink.put_tensors(&twice, &All), Err(SinkError::Twice { layer: 1, part: Part::K, position: 0 })));
    assert!(!sink.touched());
    drop(sink);
    assert!(content(&file).iter().enumerate().all(|(i, b)| *b == pattern(i as u64)));
}

#[test]
fn a_stop_reaches_every_thread() {
    let spec = dense(1, 1024);
    let layout = ShareLayout::compute(&spec, 4096).unwrap();
    let map = KvMap::shared(&spec, &layout, 4000).unwrap();
    for kind in memory::available() {
        let file = memory(kind, layout.size());
        let left = AtomicU32::new(6);
        let may_write = || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok();
        let regions = Regions::map(take(&[&file]), &layout, &map, Guard::new(may_write)).unwrap();
        let mut sink = Scatter::new(map.clone(), regions).unwrap();
        let rows = vec![1.0; 4000 * 1024];
        let all =
            [Part::K, Part::V].map(|part| Rows { layer: 0, part, positions: 0..4000, rows: &rows, largest: None });
        assert!(sink.put_tensors(&all, &All).unwrap_err().is_stopped());
        drop(sink);
        let changed = content(&file).iter().enumerate().filter(|(i, b)| **b != pattern(*i as u64)).count();
        assert!(changed > 0 && changed <= 6 << 16, "{changed}");
    }
}

#[test]
fn a_deadline_needs_nobody_to_tell() {
    let spec = dense(1, 8);
    let layout = ShareLayout::compute(&spec, 256).unwrap();
    let map = KvMap::shared(&spec, &layout, 10).unwrap();
    for kind in memory::available() {
        let file = memory(kind, layout.size());
        let rows = values(1, 0..10, 8);
        for (after, ok) in [(Duration::ZERO, false), (Duration::from_secs(3600), true)] {
            let guard = Guard::open().until(Some(Instant::now() + after));
            let regions = Regions::map(take(&[&file]), &layout, &map, guard).unwrap();
            let mut sink = Scatter::new(map.clone(), regions).unwrap();
            let result = sink.put_rows(0, Part::K, 0..10, &rows);
            assert_eq!(result.is_ok(), ok);
            assert_eq!(sink.touched(), ok);
            drop(sink);
            let same = content(&file).iter().enumerate().all(|(i, b)| *b == pattern(i as u64));
            assert_eq!(same, !ok);
        }
    }
}

/// So much that a device is told of it in between, and access begins once more.
#[test]
fn more_than_a_device_is_told_of_at_once() {
    let spec = KvSpec { type_k: CacheType::F32, type_v: CacheType::F32, ..dense(1, 4096) };
    let layout = ShareLayout::compute(&spec, 2304).unwrap();
    let map = KvMap::shared(&spec, &layout, 2300).unwrap();
    assert!(map.filled() > 64 << 20 && layout.regions().len() == 1);
    let rows: Vec<f32> = (0..2300 * 4096).map(|i| i as f32).collect();
    for kind in memory::available() {
        let file = View::new(memory::make(kind, layout.size()));
        let regions = Regions::map(take(&[&file]), &layout, &map, Guard::open()).unwrap();
        let mut sink = Box::new(Scatter::new(map.clone(), regions).unwrap());
        for part in [Part::K, Part::V] {
            for at in [0u32, 1000, 2000] {
                let to = (at + 1000).min(2300);
                sink.put_rows(0, part, at..to, &rows[at as usize * 4096..to as usize * 4096]).unwrap();
            }
        }
        assert_eq!(sink.commit().unwrap().bytes, map.filled());
        for (_, part, w) in map.windows() {
            for row in [0u64, 999, 1000, 1800, 2299] {
                let found = file.read((w.offset + row * w.row_bytes) as usize, w.row_bytes as usize);
                let want = rows[row as usize * 4096..][..4096].iter().flat_map(|v| v.to_le_bytes());
                assert!(found.into_iter().eq(want), "{kind}: {part}, row {row}");
            }
            let after = file.read((w.offset + w.len()) as usize, 4 * 4 * 4096);
            assert!(after.iter().all(|b| *b == 0), "{kind}: {part}");
        }
    }
}

#[test]
fn a_value_that_is_not_finite_leaves_the_memory_alone() {
    let spec = dense(1, 1024);
    let layout = ShareLayout::compute(&spec, 1024).unwrap();
    let map = KvMap::shared(&spec, &layout, 1000).unwrap();
    for kind in memory::available() {
        for (bad, words) in [(f32::NAN, "NaN at position 998, channel 3"), (70000.0, "is too large for f16")] {
            let file = memory(kind, layout.size());
            let regions = Regions::map(take(&[&file]), &layout, &map, Guard::open()).unwrap();
            let mut sink = Scatter::new(map.clone(), regions).unwrap();
            let mut rows = vec![1.0; 1000 * 1024];
            rows[998 * 1024 + 3] = bad;
            let e = sink.put_rows(0, Part::V, 0..1000, &rows).unwrap_err().to_string();
            assert!(e.contains(words), "{e}");
            assert!(!sink.touched());
            assert!(content(&file).iter().enumerate().all(|(i, b)| *b == pattern(i as u64)));
        }
    }
}

#[test]
fn a_region_one_byte_short() {
    let spec = dense(2, 64);
    let layout = ShareLayout::compute(&spec, 256).unwrap().at_offsets(&[123]);
    let map = KvMap::shared(&spec, &layout, 10).unwrap();
    let exact = memory(Kind::Memfd, layout.size() + 123);
    assert!(Regions::map(take(&[&exact]), &layout, &map, Guard::open()).is_ok());
    let short = memory(Kind::Memfd, layout.size() + 122);
    let e = Regions::map(take(&[&short]), &layout, &map, Guard::open()).unwrap_err();
    assert!(matches!(e, RegionError::Short { .. }));
    let text = e.to_string();
    for word in ["region 0", "131072 bytes at 123", "131194 bytes", "a memory file"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    let e = Regions::map(take(&[&memory(Kind::Memfd, 0)]), &layout, &map, Guard::open()).unwrap_err();
    assert!(matches!(e, RegionError::Short { len: 0, .. }));
    let wraps = layout.clone().at_offsets(&[u64::MAX - 5]);
    let e = Regions::map(take(&[&exact]), &wraps, &map, Guard::open()).unwrap_err();
    assert!(matches!(e, RegionError::Short { .. }));
    let e = Regions::map(take(&[&exact, &short]), &layout, &map, Guard::open()).unwrap_err();
    assert_eq!(e.to_string(), "2 descriptors for the layout's 1 regions");
    // A map of another layout.
    let other = KvMap::shared(&dense(2, 32), &ShareLayout::compute(&dense(2, 32), 256).unwrap(), 10).unwrap();
    assert!(matches!(Regions::map(take(&[&exact]), &layout, &other, Guard::open()), Err(RegionError::Map { .. })));
    let file = KvMap::state_file(&spec, &ids(10), StateVersion::V4).unwrap();
    assert!(matches!(Regions::map(take(&[&exact]), &layout, &file, Guard::open()), Err(RegionError::Map { .. })));
}

#[test]
fn a_region_one_byte_past_the_end_of_any_memory() {
    let spec = dense(2, 64);
    let layout = ShareLayout::compute(&spec, 256).unwrap();
    let map = KvMap::shared(&spec, &layout, 10).unwrap();
    for kind in memory::available() {
        let file = memory(kind, layout.size() + 4096);
        let last = file.len() as u64 - layout.size();
        let regions = Regions::map(take(&[&file]), &layout.clone().at_offsets(&[last]), &map, Guard::open());
        assert!(regions.is_ok(), "{kind}: {regions:?}");
        let past = layout.clone().at_offsets(&[last + 1]);
        let e = Regions::map(take(&[&file]), &past, &map, Guard::open()).unwrap_err().to_string();
        let what = if kind.is_dma_buf() { "a dma-buf of" } else { "a memory file of" };
        assert!(e.contains(&format!("{what} {} bytes", file.len())), "{kind}: {e}");
        assert!(content(&file).iter().enumerate().all(|(i, b)| *b == pattern(i as u64)), "{kind}");
    }
}

#[test]
fn regions_of_one_memory_must_not_overlap() {
    let spec = dense(4, 64);
    let layout = spread(&spec, 256, 2);
    let size = layout.regions()[0].size;
    let map = KvMap::shared(&spec, &layout, 10).unwrap();
    for kind in memory::available() {
        let file = memory(kind, 2 * size + 5);
        let good = layout.clone().at_offsets(&[5, size + 5]);
        let regions = Regions::map(take(&[&file, &file]), &good, &map, Guard::open()).unwrap();
        let mut sink = Box::new(Scatter::new(map.clone(), regions).unwrap());
        put(sink.as_mut(), &map, 3).unwrap();
        sink.commit().unwrap();
        let bad = layout.clone().at_offsets(&[5, size + 4]);
        let e = Regions::map(take(&[&file, &file]), &bad, &map, Guard::open()).unwrap_err().to_string();
        assert!(e.contains("regions 0 and 1 overlap") && e.contains(&format!("5..{}", size + 5)), "{e}");
    }
}

/// Two threads that copy to one place would be undefined, whoever asked for it.
#[test]
fn pieces_that_overlap_are_refused() {
    let spec = dense(1, 64);
    let layout = ShareLayout::compute(&spec, 256).unwrap();
    let map = KvMap::shared(&spec, &layout, 100).unwrap();
    let file = memory(Kind::Memfd, layout.size());
    for (pieces, fine) in [
        ([(0u64, 64usize), (64, 64), (128, 1)], true),
        ([(64, 64), (0, 64), (127, 1)], false),
        ([(64, 64), (0, 65), (300, 1)], false),
        ([(64, 64), (70, 8), (300, 1)], false),
        ([(64, 64), (0, 300), (300, 1)], false),
        ([(64, 0), (64, 0), (64, 8)], true),
    ] {
        for spread in [&Alone as &dyn Spread, &All] {
            let mut regions = Regions::map(take(&[&file]), &layout, &map, Guard::open()).unwrap();
            let put =
                regions.put_pieces(&[0], pieces.len(), spread, &|i, put| put(0, pieces[i].0, &vec![1; pieces[i].1]));
            assert_eq!(put.is_ok(), fine, "{pieces:?}: {put:?}");
            assert!(fine || put.unwrap_err().to_string().contains("overlap"));
            // Each call has its own.
            regions.put(0, &[1; 200]).unwrap();
        }
    }
}

#[test]
fn five_chunks_of_a_real_model() {
    // Memory files without pages, of which three rows per tensor are written.
    let spec = dense(28, 1024);
    let layout = ShareLayout::compute(&spec, 40960).unwrap();
    let map = KvMap::shared(&spec, &layout, 3).unwrap();
    let files: Vec<File> = layout
        .regions()
        .iter()
        .map(|r| {
            let file = File::from(memfd_create("region", MemfdFlags::CLOEXEC).unwrap());
            file.set_len(r.size).unwrap();
            file
        })
        .collect();
    let regions = Regions::map(take(&files.iter().collect::<Vec<_>>()), &layout, &map, Guard::open()).unwrap();
    assert_eq!(regions.count(), 5);
    let mut sink = Box::new(Scatter::new(map.clone(), regions).unwrap());
    put(sink.as_mut(), &map, 2).unwrap();
    assert_eq!(sink.commit().unwrap().bytes, 56 * 3 * 2048);
    for (layer, part, w) in map.windows() {
        let mut found = vec![0; w.len() as usize + 2048];
        files[usize::from(w.region)].read_exact_at(&mut found, w.offset).unwrap();
        let rows = values(seed_of(layer, part), 0..3, w.width);
        let want: Vec<u8> = rows.iter().flat_map(|v| common::bytes(CacheType::F16, *v)).collect();
        assert_eq!(found[..want.len()], want);
        assert!(found[want.len()..].iter().all(|b| *b == 0));
    }
}

#[test]
fn what_is_no_descriptor_of_a_region() {
    let no = |numbers: &[RawFd]| Inherited::take(numbers).unwrap_err();
    let file = memory(Kind::Memfd, 4096);
    for fd in [-1, 0, 1, 2] {
        assert!(matches!(no(&[fd]), InheritError::Standard { .. }));
    }
    assert!(matches!(no(&[1020]), InheritError::Closed { fd: 1020 }) && no(&[1020]).is_missing());
    assert!(matches!(no(&[i32::MAX]), InheritError::Closed { .. }));
    let good = inherit(&file);
    let twice = no(&[good, 1021, good]);
    assert!(matches!(twice, InheritError::Twice { first: 0, second: 2, .. }), "{twice}");
    // It was judged, but not taken.
    let taken = Inherited::take(&[good]).unwrap();
    assert_eq!((taken[0].number(), taken[0].len(), taken[0].kind()), (good, 4096, FdKind::MemFd));
    assert!(rustix::io::fcntl_getfd(&taken[0]).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    let again = no(&[good]);
    assert!(matches!(again, InheritError::NotInherited { .. }), "{again}");
    // This program's own.
    assert!(matches!(no(&[file.as_fd().as_raw_fd()]), InheritError::NotInherited { .. }));
    assert!(matches!(no(&[5; 300]), InheritError::TooMany { found: 300 }));

    let kind = |fd: OwnedFd| no(&[inherit(&fd)]).to_string();
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    assert!(kind(reader).contains("is a pipe") && kind(writer).contains("is a pipe"));
    let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(kind(a.into()).contains("is a socket"));
    assert!(kind(File::open("/").unwrap().into()).contains("is a directory"));
    assert!(
        kind(File::options().read(true).write(true).open("/dev/null").unwrap().into()).contains("character device")
    );
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    assert!(kind(event).contains("an event source"));

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, [1; 5000]).unwrap();
    assert!(kind(File::open(&path).unwrap().into()).contains("open for reading only"));
    assert!(kind(File::options().write(true).open(&path).unwrap().into()).contains("open for writing only"));
    assert!(
        kind(rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, 0.into()).unwrap()).contains("as a path only")
    );
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let mut taken = take(&[&file]);
    assert_eq!(taken[0].len(), 5000);
    assert!(taken[0].warning().is_none() || taken[0].kind() == FdKind::MemFd);
    // A file serves as memory, too.
    let mut mapping = Mapping::new(&taken.remove(0), 4095, 905).unwrap();
    mapping.write(900, &[7; 5]).unwrap();
    assert!(mapping.write(901, &[7; 5]).is_err() && mapping.write(u64::MAX, &[7]).is_err());
    let mut back = [0; 6];
    mapping.read(899, &mut back).unwrap();
    assert_eq!(back, [1, 7, 7, 7, 7, 7]);
    assert!(mapping.read(900, &mut back).is_err());
    assert!(Mapping::new(&take(&[&file])[0], 4096, 905).is_err());
    assert!(Mapping::new(&take(&[&file])[0], u64::MAX, 2).is_err());
}

#[test]
fn seals() {
    let sealed = |seals: SealFlags| {
        let file = memory::unsealed(4096);
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        Inherited::take(&[inherit(&file)]).map(|mut taken| taken.remove(0).warning().map(str::to_owned))
    };
    assert!(sealed(SealFlags::empty()).unwrap().unwrap().contains("not sealed against shrinking"));
    assert_eq!(sealed(SealFlags::SHRINK).unwrap(), None);
    assert_eq!(sealed(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap(), None);
    for seal in [SealFlags::WRITE, SealFlags::FUTURE_WRITE] {
        let e = sealed(SealFlags::SHRINK | seal).unwrap_err();
        assert!(matches!(e, InheritError::Sealed { .. }), "{e}");
    }
    // Without MFD_ALLOW_SEALING there are no seals, and none can come.
    let file = File::from(memfd_create("region", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(10).unwrap();
    let taken = take(&[&file]);
    assert!(taken[0].kind() == FdKind::MemFd && taken[0].warning().is_some());
}

#[test]
fn numbers_on_a_command_line() {
    assert_eq!(parse_fds("3").unwrap(), [3]);
    assert_eq!(parse_fds("3,4, 17").unwrap(), [3, 4, 17]);
    for bad in ["", ",", "3,", "3,,4", "x", "-1", "+3", "0x3", "3;4", "99999999999", "3.0"] {
        assert!(parse_fds(bad).unwrap_err().to_string().contains(&format!("{bad:?}")), "{bad}");
    }
}

#[test]
fn descriptors_are_closed_once() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let file = memory(Kind::Memfd, 4096);
    let numbers: Vec<RawFd> = (0..20).map(|_| inherit(&file)).collect();
    drop(Inherited::take(&numbers).unwrap());
    for fd in numbers {
        // Other tests may have been given the number meanwhile, but as their own.
        match Inherited::take(&[fd]) {
            Err(InheritError::Closed { .. } | InheritError::NotInherited { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(open() < 500);
}

/// What the scatter costs against copying the same bytes. Run alone, in release:
/// `cargo test --release -p kvlayout --test shared -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn cost_against_memcpy() {
    let spec = dense(28, 1024);
    let layout = ShareLayout::compute(&spec, 8192).unwrap();
    let file = File::from(memfd_create("region", MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(&vec![0; layout.size() as usize], 0).unwrap();
    for n in [128, 1024, 8000u32] {
        let map = KvMap::shared(&spec, &layout, n).unwrap();
        for _ in 0..3 {
            let chunk = n.min(512);
            let rows = values(1, 0..chunk, 1024);
            let bytes = vec![3u8; rows.len() * 2];
            let taken = take(&[&file]).remove(0);
            let mut mapping = Mapping::new(&taken, 0, layout.size()).unwrap();
            let start = Instant::now();
            for (_, _, w) in map.windows() {
                for at in (0..n - n % chunk).step_by(chunk as usize) {
                    mapping.write(w.offset + u64::from(at) * 2048, &bytes).unwrap();
                }
            }
            let copy = start.elapsed();
            let start = Instant::now();
            let regions = Regions::map(take(&[&file]), &layout, &map, Guard::open()).unwrap();
            let mapped = start.elapsed();
            let mut sink = Scatter::new(map.clone(), regions).unwrap();
            let start = Instant::now();
            for (layer, part, _) in map.windows() {
                for at in (0..n - n % chunk).step_by(chunk as usize) {
                    sink.put_rows(layer, part, at..at + chunk, &rows).unwrap();
                }
            }
            let scatter = start.elapsed();
            let mb = map.filled() as f64 / 1e6;
            println!("{n} tokens, {mb:.0} MB: memcpy {copy:?}, scatter {scatter:?}, mapping {mapped:?}");
        }
    }
}
