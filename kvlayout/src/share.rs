//! The layout of a decoder's live memory: which tensors it has, in which buffer each lies and where, and the hash by which both
//! sides of a handoff make sure that they mean the same. Pure arithmetic: nothing is mapped and nothing is read. What a
//! decoder *says* about its memory is [`Header`](crate::Header)'s.

use crate::{CacheType, KvSection, KvSpec, LayerKv, Part, Refusal};
use std::collections::HashSet;
use std::fmt;

/// Tensors begin at multiples of this in their region, whatever the machine's page size is.
pub const SHARE_ALIGN: u64 = 4096;

/// A region grows up to this many bytes; only a single tensor that is larger makes a larger one.
pub const SHARE_CHUNK: u64 = 1 << 30;

/// llama.cpp rounds the number of cells of a cache up to a multiple of this.
pub const CELL_STEP: u32 = 256;

/// llama.cpp's `n_ubatch` when nobody sets it.
pub const DEFAULT_UBATCH: u32 = 512;

/// What the hash of a region begins with, and what it is multiplied by at every step.
const HASH_START: u64 = 1_469_598_103_934_665_603;
const HASH_PRIME: u64 = 1_099_511_627_776 + 0x1b3;

/// Cells of a cache for a context of `n_ctx` tokens; `None` when that is no 32-bit number any more.
pub fn padded_ctx(n_ctx: u32) -> Option<u32> {
    n_ctx.checked_next_multiple_of(CELL_STEP)
}

/// One buffer of the decoder, or the part of one, that holds tensors.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct ShareRegion {
    /// Where in the descriptor's bytes the region begins: a buffer need not start where its memory does.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// Hash of the types and shapes of its tensors, in their order.
    pub layout: u64,
}

impl ShareRegion {
    /// The least number of bytes its descriptor must have; `None` when that is more than a file can have.
    pub fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.size).filter(|&end| end <= i64::MAX as u64)
    }
}

/// One tensor in a region: position-major, one row of `ne[0]` elements per cell.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct ShareTensor {
    /// Index of the layer in the model.
    pub layer: u32,
    /// K or V.
    pub part: Part,
    /// Index of its section in the [`KvSpec`].
    pub section: usize,
    /// Index of its region.
    pub region: u16,
    /// Bytes from the region's beginning.
    pub offset: u64,
    /// Element type.
    pub ty: CacheType,
    /// ggml's dimensions: channels, cells, 1, 1.
    pub ne: [u64; 4],
}

impl ShareTensor {
    /// llama.cpp's name for it.
    pub fn name(&self) -> String {
        tensor_name(self.layer, self.part)
    }

    /// Bytes from one cell's row to the next. 0 where the shape is no whole number of blocks, which a layout never has.
    pub fn row_bytes(&self) -> u64 {
        self.ty.row_bytes(self.ne[0]).unwrap_or(0)
    }

    /// Bytes of all cells.
    pub fn len(&self) -> u64 {
        // No overflow: a layout was refused unless its sizes are all below 2^63.
        self.row_bytes().saturating_mul(self.ne[1])
    }

    /// Never in a layout.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

pub(crate) fn tensor_name(layer: u32, part: Part) -> String {
    let letter = match part {
        Part::K => 'k',
        Part::V => 'v',
        Part::R => 'r',
        Part::S => 's',
    };
    format!("cache_{letter}_l{layer}")
}

/// Where every tensor of a decoder's live memory lies.
///
/// # How it comes about
///
/// Tensors stand in the order in which llama.cpp makes them: section by section, in each layer by layer, K and then V. Each is
/// `[n_embd_gqa, cells, 1, 1]`. They fill regions one after the other:
///
/// ```text
/// for every tensor:
///     n = its bytes, rounded up to 4096
///     if the region has a tensor already and would exceed 2^30 bytes: a new region
///     offset = the region's size; size += n
///     for v in [type id, ne0, ne1, ne2, ne3]: hash = (hash XOR v) * 1099511628211  (mod 2^64; begins as 1469598103934665603)
/// ```
///
/// The cells are n_ctx rounded up to 256, except for sliding-window layers of a decoder without `--swa-full`: those get the window
/// and one micro-batch, rounded likewise, when that is less.
///
/// Two decoders whose regions agree in number, sizes and hashes have the same layout; offsets of regions in their descriptors
/// are the decoder's own affair and 0 in a computed layout.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShareLayout {
    regions: Vec<ShareRegion>,
    tensors: Vec<ShareTensor>,
}

impl ShareLayout {
    /// The layout of a decoder with a context of `n_ctx` tokens and the usual micro-batch.
    ///
    /// # Errors
    /// When such a decoder cannot be, or its memory would be no 63-bit number of bytes.
    pub fn compute(spec: &KvSpec, n_ctx: u32) -> Result<ShareLayout, Refusal> {
        Self::compute_for(spec, n_ctx, DEFAULT_UBATCH)
    }

    /// The same for a micro-batch (`-ub`) of `n_ubatch` tokens, which only sliding-window layers depend on.
    ///
    /// # Errors
    /// As [`compute`](Self::compute).
    pub fn compute_for(spec: &KvSpec, n_ctx: u32, n_ubatch: u32) -> Result<ShareLayout, Refusal> {
        let cells = check_ctx(n_ctx)?;
        let mut b = Builder::new(spec)?;
        for (section, s) in spec.sections.iter().enumerate() {
            let cells = section_cells(spec, s, cells, n_ubatch);
            for l in &s.layers {
                b.layer(spec, section, l, cells)?;
            }
        }
        b.finish()
    }

    /// From parts that have been checked elsewhere.
    pub(crate) fn from_parts(regions: Vec<ShareRegion>, tensors: Vec<ShareTensor>) -> ShareLayout {
        ShareLayout { regions, tensors }
    }

    /// The regions, in the order of their descriptors.
    pub fn regions(&self) -> &[ShareRegion] {
        &self.regions
    }

    /// The tensors, in the order in which they are made.
    pub fn tensors(&self) -> &[ShareTensor] {
        &self.tensors
    }

    /// One tensor, by the layer's index in the model.
    pub fn tensor(&self, layer: u32, part: Part) -> Option<&ShareTensor> {
        self.tensors.iter().find(|t| (t.layer, t.part) == (layer, part))
    }

    /// Bytes of all regions.
    pub fn size(&self) -> u64 {
        self.regions.iter().map(|r| r.size).sum()
    }

    /// The fewest cells that any tensor has, which is the longest prompt that fits.
    pub fn cells(&self) -> u64 {
        self.tensors.iter().map(|t| t.ne[1]).min().unwrap_or(0)
    }

    /// The most cells that any tensor has: the decoder's context rounded up, unless all of its layers have a sliding window.
    pub fn n_ctx(&self) -> u64 {
        self.tensors.iter().map(|t| t.ne[1]).max().unwrap_or(0)
    }

    /// The same layout with the regions beginning at these places of their descriptors. Places for which there is no region
    /// are ignored, regions without a place stay where they are.
    #[must_use]
    pub fn at_offsets(mut self, offsets: &[u64]) -> ShareLayout {
        for (r, &offset) in self.regions.iter_mut().zip(offsets) {
            r.offset = offset;
        }
        self
    }

    /// Bytes of all regions of the layout that [`compute_for`](Self::compute_for) would give, without making it: grows with n_ctx.
    pub(crate) fn total(spec: &KvSpec, n_ctx: u32, n_ubatch: u32) -> Option<u128> {
        let cells = padded_ctx(n_ctx)?;
        let mut sum = 0u128;
        for s in &spec.sections {
            let cells = section_cells(spec, s, cells, n_ubatch);
            for l in &s.layers {
                for (_, ty, width) in parts(spec, s, l) {
                    let bytes = ty.row_bytes(width.into())?.checked_mul(cells.into())?;
                    sum += u128::from(bytes.checked_next_multiple_of(SHARE_ALIGN)?);
                }
            }
        }
        Some(sum)
    }
}

/// One line per region, for people and for comparing.
impl fmt::Display for ShareLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, r) in self.regions.iter().enumerate() {
            let n = self.tensors.iter().filter(|t| usize::from(t.region) == i).count();
            let ShareRegion { offset, size, layout } = r;
            writeln!(f, "region {i}: {n} tensors, {size} bytes at {offset}, layout {layout:#018x}")?;
        }
        Ok(())
    }
}

fn check_ctx(n_ctx: u32) -> Result<u32, Refusal> {
    padded_ctx(n_ctx).filter(|&cells| (1..=i32::MAX as u32).contains(&cells)).ok_or(Refusal::Context(n_ctx))
}

/// Cells of a section's tensors, where full layers have `full`.
fn section_cells(spec: &KvSpec, s: &KvSection, full: u32, n_ubatch: u32) -> u32 {
    match s.window {
        Some(w) if !spec.swa_full => {
            let need = u64::from(w) + u64::from(n_ubatch);
            // Not above `full`, which is a multiple of the step.
            (need.min(full.into()) as u32).next_multiple_of(CELL_STEP)
        }
        _ => full,
    }
}

/// A layer's tensors in order.
pub(crate) fn parts(spec: &KvSpec, s: &KvSection, l: &LayerKv) -> impl Iterator<Item = (Part, CacheType, u32)> {
    let all = [(Part::K, spec.type_k, l.n_embd_k), (Part::V, spec.type_v, l.n_embd_v)];
    all.into_iter().take(if s.k_only() { 1 } else { 2 })
}

/// Checks what a spec must be for its memory to be shared, apart from V's order: the layout of a transposed V is the same.
fn check_spec(spec: &KvSpec) -> Result<(), Refusal> {
    if spec.recurrent.is_some() {
        return Err(Refusal::SharedRecurrent);
    }
    if spec.n_stream != 1 {
        return Err(Refusal::SharedStreams(spec.n_stream));
    }
    if spec.sections.iter().all(|s| s.layers.is_empty()) {
        return Err(Refusal::NoLayers);
    }
    let mut seen = HashSet::new();
    for (section, s) in spec.sections.iter().enumerate() {
        if s.window == Some(0) {
            return Err(Refusal::NoWindow { section });
        }
        let mut last = None;
        for l in &s.layers {
            if last.is_some_and(|last| last >= l.layer) || !seen.insert(l.layer) {
                return Err(Refusal::LayerOrder { section, layer: l.layer });
            }
            last = Some(l.layer);
            if l.is_empty() {
                return Err(Refusal::SharedEmpty { layer: l.layer });
            }
            for (part, ty, width) in parts(spec, s, l) {
                if width == 0 {
                    return Err(Refusal::NoChannels { layer: l.layer, part });
                }
                if ty.row_bytes(width.into()).is_none() {
                    return Err(Refusal::RowBlocks { layer: l.layer, part, width, ty });
                }
            }
        }
    }
    Ok(())
}

struct Builder {
    regions: Vec<ShareRegion>,
    tensors: Vec<ShareTensor>,
}

impl Builder {
    fn new(spec: &KvSpec) -> Result<Builder, Refusal> {
        check_spec(spec)?;
        Ok(Builder { regions: Vec::new(), tensors: Vec::new() })
    }

    fn layer(&mut self, spec: &KvSpec, section: usize, l: &LayerKv, cells: u32) -> Result<(), Refusal> {
        for (part, ty, width) in parts(spec, &spec.sections[section], l) {
            let ne = [width.into(), cells.into(), 1, 1];
            let bytes = ty
                .row_bytes(width.into())
                .and_then(|row| row.checked_mul(cells.into()))
                .and_then(|n| n.checked_next_multiple_of(SHARE_ALIGN))
                .filter(|&n| n <= i64::MAX as u64)
                .ok_or(Refusal::TooLarge)?;
            // A region has a tensor as soon as it exists, so that one which is too large alone still gets its own.
            if self.regions.last().is_none_or(|r| r.size.saturating_add(bytes) > SHARE_CHUNK) {
                self.regions.push(ShareRegion { offset: 0, size: 0, layout: HASH_START });
            }
            let region = u16::try_from(self.regions.len() - 1).map_err(|_| Refusal::TooLarge)?;
            let Some(r) = self.regions.last_mut() else { return Err(Refusal::TooLarge) };
            self.tensors.push(ShareTensor { layer: l.layer, part, section, region, offset: r.size, ty, ne });
            r.size += bytes;
            r.layout = hash(r.layout, ty, ne);
        }
        Ok(())
    }

    fn finish(self) -> Result<ShareLayout, Refusal> {
        let sum = self.regions.iter().try_fold(0u64, |sum, r| sum.checked_add(r.size));
        if sum.is_none_or(|sum| sum > i64::MAX as u64) {
            return Err(Refusal::TooLarge);
        }
        Ok(ShareLayout { regions: self.regions, tensors: self.tensors })
    }
}

/// The hash of the tensors of one region, in their order.
pub(crate) fn hash_of<'a>(tensors: impl IntoIterator<Item = &'a ShareTensor>) -> u64 {
    tensors.into_iter().fold(HASH_START, |h, t| hash(h, t.ty, t.ne))
}

fn hash(start: u64, ty: CacheType, ne: [u64; 4]) -> u64 {
    let [ne0, ne1, ne2, ne3] = ne;
    [ty.id().into(), ne0, ne1, ne2, ne3].into_iter().fold(start, |h, v| (h ^ v).wrapping_mul(HASH_PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_one_tensor() {
        assert_eq!(HASH_PRIME, 1_099_511_628_211);
        assert_eq!(hash(HASH_START, CacheType::F16, [1024, 256, 1, 1]), 0xd38e963c895c21bc);
    }
}
