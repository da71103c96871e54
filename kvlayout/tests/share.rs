//! The layout of a shared memory: known values, and what must hold for any model.

mod common;
use common::{dense, hybrid, windowed};
use kvlayout::*;
use proptest::prelude::*;

fn typed(layers: u32, width: u32, ty: CacheType) -> KvSpec {
    KvSpec { type_k: ty, type_v: ty, ..dense(layers, width) }
}

fn shape(layout: &ShareLayout) -> Vec<(usize, u64, u64)> {
    let count = |i: usize| layout.tensors().iter().filter(|t| usize::from(t.region) == i).count();
    layout.regions().iter().enumerate().map(|(i, r)| (count(i), r.size, r.layout)).collect()
}

#[test]
fn known_layouts() {
    let model = |ty, n_ctx| shape(&ShareLayout::compute(&typed(28, 1024, ty), n_ctx).unwrap());
    assert_eq!(model(CacheType::F16, 256), [(56, 29_360_128, 0xd539129662fc982b)]);
    assert_eq!(model(CacheType::F16, 1), model(CacheType::F16, 256));
    assert_eq!(model(CacheType::F16, 8192), [(56, 939_524_096, 0xba98b0368cca6a2b)]);
    assert_eq!(model(CacheType::F16, 7937), model(CacheType::F16, 8192));
    let q8 = model(CacheType::Q8_0, 8192);
    assert_eq!(q8, [(56, 56 * 8192 * 1024 / 32 * 34, 0xa19b4cd0441b5cc3)]);
    let large = model(CacheType::F16, 40960);
    let tensor = 40960 * 2048;
    assert_eq!(large[..4], [(12, 12 * tensor, 0x1ac3c5c5d9818cc7); 4]);
    assert_eq!(large[4..], [(8, 8 * tensor, 0xbc7878b1b2b3489b)]);
}

#[test]
fn a_tensor_larger_than_a_chunk_has_its_own() {
    let spec = dense(2, 1024);
    let layout = ShareLayout::compute(&spec, 1 << 20).unwrap();
    assert_eq!(layout.regions().iter().map(|r| r.size).collect::<Vec<_>>(), [2 << 30; 4]);
    // One that fills a chunk exactly leaves no room, and needs none.
    let layout = ShareLayout::compute(&spec, 1 << 19).unwrap();
    assert_eq!(layout.regions().iter().map(|r| r.size).collect::<Vec<_>>(), [1 << 30; 4]);
    let layout = ShareLayout::compute(&spec, 1 << 18).unwrap();
    assert_eq!(layout.regions().iter().map(|r| r.size).collect::<Vec<_>>(), [1 << 30; 2]);
}

#[test]
fn window_layers_come_last_with_their_own_cells() {
    let spec = windowed(6, 64, 512);
    let layout = ShareLayout::compute(&spec, 8192).unwrap();
    let layers: Vec<u32> = layout.tensors().iter().map(|t| t.layer).collect();
    assert_eq!(layers, [2, 2, 5, 5, 0, 0, 1, 1, 3, 3, 4, 4]);
    let cells = |layout: &ShareLayout, layer| layout.tensor(layer, Part::V).unwrap().ne[1];
    assert_eq!((cells(&layout, 2), cells(&layout, 0)), (8192, 1024));
    assert_eq!((layout.cells(), layout.n_ctx()), (1024, 8192));
    let ub = ShareLayout::compute_for(&spec, 8192, 513).unwrap();
    assert_eq!((cells(&ub, 2), cells(&ub, 0)), (8192, 1280));
    let small = ShareLayout::compute(&spec, 300).unwrap();
    assert_eq!((cells(&small, 2), cells(&small, 0)), (512, 512));
    let full = ShareLayout::compute(&KvSpec { swa_full: true, ..spec }, 8192).unwrap();
    assert_eq!((cells(&full, 2), cells(&full, 0)), (8192, 8192));
}

#[test]
fn what_cannot_be_laid_out() {
    let good = dense(2, 64);
    let no = |spec: &KvSpec, n_ctx| ShareLayout::compute(spec, n_ctx).unwrap_err();
    assert_eq!(no(&good, 0), Refusal::Context(0));
    assert_eq!(no(&good, u32::MAX), Refusal::Context(u32::MAX));
    assert_eq!(no(&good, i32::MAX as u32), Refusal::Context(i32::MAX as u32));
    assert_eq!(no(&KvSpec { n_stream: 2, ..good.clone() }, 1), Refusal::SharedStreams(2));
    assert_eq!(no(&hybrid(6, 64), 1), Refusal::SharedRecurrent);
    assert_eq!(no(&dense(0, 64), 1), Refusal::NoLayers);
    assert_eq!(no(&dense(1, 0), 1), Refusal::SharedEmpty { layer: 0 });
    let q8 = no(&typed(1, 40, CacheType::Q8_0), 1);
    assert_eq!(q8.to_string(), "layer 0 K: rows of 40 channels are no whole number of 32 of q8_0");
    assert_eq!(no(&windowed(3, 64, 0), 1), Refusal::NoWindow { section: 1 });
    let mut twice = windowed(6, 64, 8);
    twice.sections[1].layers[0].layer = 5;
    assert_eq!(no(&twice, 1), Refusal::LayerOrder { section: 1, layer: 5 });
    let mut twice = good.clone();
    twice.sections[0].layers[1].layer = 0;
    assert_eq!(no(&twice, 1), Refusal::LayerOrder { section: 0, layer: 0 });
    let mut huge = dense(3, u32::MAX);
    huge.type_k = CacheType::F32;
    assert_eq!(no(&huge, (1 << 31) - 256), Refusal::TooLarge);
}

#[test]
fn a_map_needs_its_layout_and_room() {
    let spec = dense(3, 64);
    let layout = ShareLayout::compute(&spec, 256).unwrap();
    let map = KvMap::shared(&spec, &layout, 255).unwrap();
    assert_eq!((map.size(), map.filled()), (6 * 256 * 128, 6 * 255 * 128));
    let no = |spec: &KvSpec, n| KvMap::shared(spec, &layout, n).unwrap_err();
    // The decoder puts the prompt's last token into a cell of its own.
    let full = no(&spec, 256).to_string();
    assert!(full.contains("256 tokens") && full.contains("256 cells"), "{full}");
    assert_eq!(no(&spec, 0), Refusal::NoTokens);
    assert_eq!(no(&spec, u32::MAX), Refusal::TooManyTokens(u32::MAX as usize));
    assert_eq!(no(&hybrid(6, 64), 5), Refusal::SharedRecurrent);
    assert_eq!(no(&KvSpec { v_trans: true, ..spec.clone() }, 5), Refusal::SharedTransposed);
    assert_eq!(no(&KvSpec { n_stream: 4, ..spec.clone() }, 5), Refusal::SharedStreams(4));
    let q8 = typed(3, 64, CacheType::Q8_0);
    let other = no(&q8, 5).to_string();
    assert!(other.contains("q8_0 rows of 64") && other.contains("f16 rows of 64"), "{other}");
    let other = no(&typed(3, 64, CacheType::Bf16), 5).to_string();
    assert!(other.contains("bf16 rows of 64") && other.contains("f16 rows of 64"), "{other}");
    let other = no(&dense(3, 32), 5).to_string();
    assert!(other.contains("rows of 32") && other.contains("rows of 64"), "{other}");
    let more = no(&dense(4, 64), 5).to_string();
    assert!(more.contains("layer 3 K: the model has f16 rows of 64, the layout none"), "{more}");
    let fewer = no(&dense(2, 64), 5).to_string();
    assert!(fewer.contains("layer 2 K: the model has none, the layout f16 rows of 64"), "{fewer}");

    // All positions go into layers with a window, too, as long as these have the cells.
    let spec = windowed(3, 64, 100);
    let layout = ShareLayout::compute_for(&spec, 2048, 100).unwrap();
    let map = KvMap::shared(&spec, &layout, 200).unwrap();
    assert!(map.windows().all(|(_, _, w)| w.positions == (0..200)));
    let long = KvMap::shared(&spec, &layout, 300).unwrap_err().to_string();
    assert!(
        long.contains("section 1: 300 tokens") && long.contains("256 cells") && long.contains("--swa-full"),
        "{long}"
    );
}

fn any_spec() -> impl Strategy<Value = KvSpec> {
    let ty = || prop::sample::select(CacheType::ALL.to_vec());
    let layers = prop::collection::btree_map(0u32..200, (1u32..40, 1u32..40, any::<bool>()), 1..60);
    (layers, ty(), ty(), any::<bool>(), prop::option::of(1u32..5000)).prop_map(
        |(layers, type_k, type_v, swa_full, window)| {
            let (mut full, mut local) = (Vec::new(), Vec::new());
            for (layer, (k, v, is_local)) in layers {
                let list = if is_local && window.is_some() { &mut local } else { &mut full };
                list.push(LayerKv { layer, n_embd_k: k * 32, n_embd_v: v * 32 });
            }
            let mut sections = vec![KvSection { layers: full, window: None, n_rot: (0, 0) }];
            sections.extend(window.map(|w| KvSection { layers: local, window: Some(w), n_rot: (0, 0) }));
            KvSpec { sections, type_k, type_v, swa_full, ..dense(0, 0) }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_is_in_one_place(spec in any_spec(), n_ctx in 1u32..2_000_000, ub in 1u32..4096) {
        let layout = ShareLayout::compute_for(&spec, n_ctx, ub).unwrap();
        let mut region = 0u16;
        let mut end = 0;
        let mut sizes = Vec::new();
        for t in layout.tensors() {
            if t.region != region {
                // A new region only when this tensor did not fit the last one.
                prop_assert_eq!(t.region, region + 1);
                prop_assert!(end + t.len().next_multiple_of(4096) > 1 << 30);
                sizes.push(end);
                (region, end) = (t.region, 0);
            }
            // Offsets grow, nothing overlaps, and between tensors is less than one step.
            prop_assert_eq!(t.offset, end);
            prop_assert_eq!(t.offset % 4096, 0);
            prop_assert_eq!(t.len(), t.ty.row_bytes(t.ne[0]).unwrap() * t.ne[1]);
            end += t.len().next_multiple_of(4096);
            prop_assert_eq!(t.ne[1] % 256, 0);
            prop_assert!(t.ne[1] >= 256 && t.ne[1] < u64::from(n_ctx) + 256);
        }
        sizes.push(end);
        prop_assert_eq!(layout.regions().iter().map(|r| r.size).collect::<Vec<_>>(), sizes.clone());
        for (i, r) in layout.regions().iter().enumerate() {
            let alone = layout.tensors().iter().filter(|t| usize::from(t.region) == i).count() == 1;
            prop_assert!(r.size <= 1 << 30 || alone);
        }
        let layers = spec.sections.iter().map(|s| s.layers.len()).sum::<usize>();
        prop_assert_eq!(layout.tensors().len(), 2 * layers);
        prop_assert_eq!(layout.size(), sizes.iter().sum::<u64>());

        // The hash is that of the rule written down, once more and otherwise.
        for (i, r) in layout.regions().iter().enumerate() {
            let mut h = 1469598103934665603u64;
            for t in layout.tensors().iter().filter(|t| usize::from(t.region) == i) {
                for v in [u64::from(t.ty.id()), t.ne[0], t.ne[1], t.ne[2], t.ne[3]] {
                    h = ((u128::from(h ^ v) * 1099511628211) & u128::from(u64::MAX)) as u64;
                }
            }
            prop_assert_eq!(r.layout, h);
        }
    }

    #[test]
    fn the_rows_of_a_map_lie_in_their_tensors(spec in any_spec(), n_ctx in 1u32..100_000, n in 1u32..5000) {
        let spec = KvSpec { type_k: CacheType::F16, type_v: CacheType::F32, ..spec };
        let layout = ShareLayout::compute(&spec, n_ctx).unwrap();
        match KvMap::shared(&spec, &layout, n) {
            Ok(map) => {
                prop_assert!(u64::from(n) < layout.cells());
                prop_assert_eq!(map.windows().count(), layout.tensors().len());
                for ((layer, part, w), t) in map.windows().zip(layout.tensors()) {
                    prop_assert_eq!((layer, part, w.region, w.offset), (t.layer, t.part, t.region, t.offset));
                    prop_assert_eq!(w.len(), t.row_bytes() * u64::from(n));
                    prop_assert!(w.len() < t.len());
                }
            }
            Err(Refusal::SharedCells { n_tokens, cells, .. }) => {
                prop_assert!(n_tokens == n && cells <= u64::from(n));
            }
            Err(e) => prop_assert!(false, "{}", e),
        }
    }
}
