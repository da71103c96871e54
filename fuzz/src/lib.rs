//! What the targets share: models of a decoder's memory, and what must hold of its layout. The rules are written down
//! here once more, in 128-bit arithmetic and without looking at the code under test. Nothing is fuzzed here.

use arbitrary::{Arbitrary, Result, Unstructured};
use kvlayout::{CacheType, KvMap, KvSection, KvSpec, LayerKv, Order, Part, Refusal, ShareLayout, ShareTensor};
use std::collections::HashSet;

/// A decoder's memory, mostly one that can be.
#[derive(Clone, Debug)]
pub struct Memory {
    /// The model's side.
    pub spec: KvSpec,
    /// `-c`.
    pub n_ctx: u32,
    /// `-ub`.
    pub n_ubatch: u32,
}

// Where the input ends, every choice is the first: so the usual stands first, and what is refused last.
impl<'a> Arbitrary<'a> for Memory {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Memory> {
        let n_ctx = match u.int_in_range(0..=7)? {
            0..=3 => u.int_in_range(1..=1 << 18)?,
            4..=6 => u.int_in_range(1..=2048)?,
            _ => u.arbitrary()?,
        };
        let n_ubatch = if rarely(u, 8)? { u.arbitrary()? } else { u.int_in_range(1..=4096)? };
        let (type_k, type_v) = (*u.choose(&CacheType::ALL)?, *u.choose(&CacheType::ALL)?);
        let (v_trans, cell_ext, swa_full) = (rarely(u, 8)?, rarely(u, 4)?, rarely(u, 3)?);
        let n_stream = if rarely(u, 16)? { u.arbitrary()? } else { 1 };
        let mut sections = Vec::new();
        for _ in 0..[1, 2, 3, 0][u.int_in_range(0..=3)?] {
            let window = match u.int_in_range(0..=15)? {
                0..=7 => None,
                8..=14 => Some(u.int_in_range(1..=8192)?),
                _ => Some(u.arbitrary()?),
            };
            // Mostly the numbering goes on from section to section, so that no layer stands twice.
            let last = |s: &KvSection| s.layers.iter().map(|l| l.layer).max();
            let mut next = sections.iter().filter_map(last).max().map_or(0, |l: u32| l.saturating_add(1));
            if rarely(u, 16)? {
                next = u.arbitrary()?;
            }
            let mut layers = Vec::new();
            let like = (width(u)?, width(u)?);
            for _ in 0..=u.int_in_range(0..=40)? {
                let layer = if rarely(u, 200)? { u.arbitrary()? } else { next };
                next = layer.saturating_add(u.int_in_range(1..=3)?);
                let (n_embd_k, n_embd_v) = if rarely(u, 4)? { (width(u)?, width(u)?) } else { like };
                layers.push(LayerKv { layer, n_embd_k, n_embd_v });
            }
            if rarely(u, 16)? {
                layers.clear();
            }
            sections.push(KvSection { layers, window, n_rot: (0, 0) });
        }
        Ok(Memory { spec: KvSpec { sections, recurrent: None, type_k, type_v, v_trans, cell_ext, swa_full, n_stream }, n_ctx, n_ubatch })
    }
}

fn rarely(u: &mut Unstructured<'_>, in_so_many: u8) -> Result<bool> {
    Ok(u.int_in_range(1..=in_so_many)? == in_so_many)
}

fn width(u: &mut Unstructured<'_>) -> Result<u32> {
    Ok(match u.int_in_range(0..=63)? {
        0..=31 => u.int_in_range(1..=32)? * 32,
        32..=55 => u.int_in_range(1..=512)? * 32,
        56..=61 => u.int_in_range(1..=64)?,
        62 => u.arbitrary::<u32>()? / 32 * 32,
        _ => u.arbitrary()?,
    })
}

/// A layer's tensors: part, type and channels.
pub fn tensors_of(spec: &KvSpec, l: &LayerKv) -> [(Part, CacheType, u32); 2] {
    [(Part::K, spec.type_k, l.n_embd_k), (Part::V, spec.type_v, l.n_embd_v)]
}

fn row_bytes(ty: CacheType, width: u64) -> u128 {
    u128::from(width) / u128::from(ty.block_elems()) * u128::from(ty.block_bytes())
}

fn len(t: &ShareTensor) -> u128 {
    row_bytes(t.ty, t.ne[0]) * u128::from(t.ne[1])
}

fn up(n: u128, step: u128) -> u128 {
    n.div_ceil(step) * step
}

/// Cells of every section; `None` where there can be no such decoder.
fn cells(m: &Memory) -> Option<Vec<u128>> {
    let Memory { spec, n_ctx, n_ubatch } = m;
    let full = up((*n_ctx).into(), 256);
    if full == 0 || full > i32::MAX as u128 {
        return None;
    }
    let of = |s: &KvSection| match s.window {
        Some(w) if !spec.swa_full => up(u128::from(w) + u128::from(*n_ubatch), 256).min(full),
        _ => full,
    };
    Some(spec.sections.iter().map(of).collect())
}

/// Whether there is such a memory at all.
pub fn can_be(m: &Memory) -> bool {
    let spec = &m.spec;
    let Some(cells) = cells(m) else { return false };
    let mut seen = HashSet::new();
    let mut sum = 0u128;
    for (s, cells) in spec.sections.iter().zip(cells) {
        if s.window == Some(0) || s.layers.windows(2).any(|w| w[0].layer >= w[1].layer) {
            return false;
        }
        for l in &s.layers {
            if !seen.insert(l.layer) {
                return false;
            }
            for (_, ty, width) in tensors_of(spec, l) {
                if width == 0 || !u64::from(width).is_multiple_of(ty.block_elems()) {
                    return false;
                }
                sum += up(row_bytes(ty, width.into()) * cells, 4096);
            }
        }
    }
    spec.n_stream == 1 && !seen.is_empty() && sum <= i64::MAX as u128
}

/// What must hold of any layout of a model, whoever made it: each of the model's tensors is there once, in its type and
/// shape, inside its region, and none shares a byte with another.
pub fn check_layout(spec: &KvSpec, layout: &ShareLayout) {
    for (i, r) in layout.regions().iter().enumerate() {
        assert!(r.end().is_some_and(|end| end <= i64::MAX as u64), "region {i}: {r:?}");
    }
    let mut want = HashSet::new();
    for (section, s) in spec.sections.iter().enumerate() {
        for l in &s.layers {
            for (part, ty, width) in tensors_of(spec, l) {
                want.insert((l.layer, part));
                let t = layout.tensor(l.layer, part).expect("a tensor of the model");
                assert_eq!((t.section, t.ty, t.ne[0], t.ne[2], t.ne[3]), (section, ty, width.into(), 1, 1), "{t:?}");
                assert!((1..=i32::MAX as u64).contains(&t.ne[1]), "{t:?}");
                assert_eq!(u128::from(t.len()), len(t));
                assert_eq!(u128::from(t.row_bytes()), row_bytes(ty, width.into()));
            }
        }
    }
    assert_eq!(layout.tensors().len(), want.len(), "tensors that the model has not");
    let mut places: Vec<_> = layout.tensors().iter().map(|t| (t.region, u128::from(t.offset), len(t))).collect();
    places.sort();
    for &(region, offset, len) in &places {
        let r = layout.regions().get(usize::from(region)).expect("a region");
        assert!(len > 0 && offset + len <= r.size.into(), "{len} bytes at {offset} of {r:?}");
    }
    for pair in places.windows(2) {
        assert!(pair[0].0 < pair[1].0 || pair[0].1 + pair[0].2 <= pair[1].1, "overlap: {pair:?}");
    }
    assert_eq!(layout.cells(), layout.tensors().iter().map(|t| t.ne[1]).min().unwrap_or(0));
    assert_eq!(layout.n_ctx(), layout.tensors().iter().map(|t| t.ne[1]).max().unwrap_or(0));
}

/// The hash of tensors, in this order.
pub fn hash<'a>(tensors: impl IntoIterator<Item = &'a ShareTensor>) -> u64 {
    let words = tensors.into_iter().flat_map(|t| [u64::from(t.ty.id())].into_iter().chain(t.ne));
    words.fold(1469598103934665603, |h, v| ((u128::from(h ^ v) * 1099511628211) & u128::from(u64::MAX)) as u64)
}

/// What must hold besides of a computed layout: the rules by which tensors fill regions.
pub fn check_computed(m: &Memory, layout: &ShareLayout) {
    check_layout(&m.spec, layout);
    let cells = cells(m).expect("a context that can be");
    let order = m.spec.sections.iter().flat_map(|s| &s.layers).flat_map(|l| [(l.layer, Part::K), (l.layer, Part::V)]);
    assert!(order.eq(layout.tensors().iter().map(|t| (t.layer, t.part))), "the order of the tensors");
    // Where the next tensor begins, by the rules.
    let (mut region, mut end) = (0u16, 0u128);
    let mut sizes = Vec::new();
    for (i, t) in layout.tensors().iter().enumerate() {
        assert_eq!(u128::from(t.ne[1]), cells[t.section], "{t:?}");
        if t.region != region {
            assert_eq!(t.region, region + 1, "{t:?}");
            assert!(i > 0 && end + up(len(t), 4096) > 1 << 30, "{t:?} would have fitted at {end}");
            sizes.push(end);
            (region, end) = (t.region, 0);
        }
        assert_eq!((u128::from(t.offset), t.offset % 4096), (end, 0), "{t:?}");
        end += up(len(t), 4096);
        assert!(end <= 1 << 30 || t.offset == 0, "{t:?} should have begun a region");
    }
    sizes.push(end);
    assert_eq!(layout.regions().iter().map(|r| u128::from(r.size)).collect::<Vec<_>>(), sizes);
    assert_eq!(u128::from(layout.size()), sizes.iter().sum::<u128>());
    for (i, r) in layout.regions().iter().enumerate() {
        let here = || layout.tensors().iter().filter(|t| usize::from(t.region) == i);
        assert!(r.size <= 1 << 30 || here().count() == 1, "region {i}: {r:?}");
        assert_eq!((r.layout, r.offset), (hash(here()), 0), "region {i}");
    }
}

/// What must hold of the map of `n` positions in a layout that has been checked.
pub fn check_map(spec: &KvSpec, layout: &ShareLayout, n: u32) {
    let can_be = (1..i32::MAX as u32).contains(&n)
        && u64::from(n) < layout.cells()
        && !spec.v_trans;
    let map = match KvMap::shared(spec, layout, n) {
        Ok(map) => map,
        Err(e) => {
            assert!(!can_be, "{e}");
            assert!(!e.to_string().is_empty());
            return assert!(!matches!(e, Refusal::TooLarge | Refusal::NoLayers | Refusal::SharedTensor { .. }), "{e}");
        }
    };
    assert!(can_be, "a map of {n} positions in {} cells", layout.cells());
    assert_eq!((map.size(), map.n_tokens()), (layout.size(), n));
    assert_eq!(map.fixed().count(), 0);
    assert_eq!(map.windows().count(), layout.tensors().len());
    let mut last = (0, 0);
    let mut filled = 0;
    for (layer, part, w) in map.windows() {
        let t = layout.tensor(layer, part).expect("the window's tensor");
        assert_eq!((w.region, w.offset, w.elem, u64::from(w.width)), (t.region, t.offset, t.ty, t.ne[0]));
        assert_eq!((w.section, w.order, w.positions.clone()), (t.section, Order::Rows, 0..n));
        assert_eq!(u128::from(w.len()), row_bytes(t.ty, t.ne[0]) * u128::from(n));
        // Inside the tensor, which lies inside the region; one row stays for the prompt's last token.
        assert!(u128::from(w.len()) + u128::from(w.row_bytes) <= len(t));
        assert!(last <= (w.region, w.offset), "windows out of order");
        last = (w.region, w.offset);
        filled += u128::from(w.len());
    }
    assert_eq!(u128::from(map.filled()), filled);
}

/// A message is one line and short, whatever the input was.
pub fn check_message(e: &impl std::error::Error) {
    let text = e.to_string();
    assert!(!text.is_empty() && text.len() < 2000 && !text.contains('\n'), "{text:?}");
}

/// Models that headers are held against.
pub fn models() -> [KvSpec; 4] {
    let layers = |of: &mut dyn Iterator<Item = u32>, k: u32, v: u32| -> Vec<LayerKv> {
        of.map(|layer| LayerKv { layer, n_embd_k: k, n_embd_v: v }).collect()
    };
    let spec = |sections, type_k, type_v| KvSpec {
        sections,
        recurrent: None,
        type_k,
        type_v,
        v_trans: false,
        cell_ext: false,
        swa_full: false,
        n_stream: 1,
    };
    let full = |layers| KvSection { layers, window: None, n_rot: (0, 0) };
    [
        // Rows so small that several contexts need the same bytes.
        spec(vec![full(layers(&mut (0..2), 2, 6))], CacheType::F16, CacheType::F16),
        spec(
            vec![
                full(layers(&mut (2..9).step_by(3), 64, 64)),
                KvSection { layers: layers(&mut (0..9).filter(|l| l % 3 != 2), 64, 64), window: Some(512), n_rot: (0, 0) },
            ],
            CacheType::F16,
            CacheType::Bf16,
        ),
        spec(vec![full(layers(&mut (0..3), 64, 32))], CacheType::Q8_0, CacheType::F32),
        // Several regions from 16384 tokens on.
        spec(vec![full(layers(&mut (0..28), 1024, 1024))], CacheType::F16, CacheType::F16),
    ]
}

/// Contexts that this program may have been told of.
pub const CONTEXTS: [Option<u32>; 4] = [None, Some(1000), Some(16384), Some(i32::MAX as u32 - 255)];
