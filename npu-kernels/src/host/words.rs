//! Keys, values and queries of attention as 16-bit integers, for processors that multiply those twice as fast as floats.
//!
//! It is no loss beside a cache of f16: a row of keys is scaled by its Euclidean norm to 32767, so that by Cauchy and Schwarz no sum
//! of products with a query, scaled likewise, leaves 32 bits, whatever the number of channels; what rounding then changes is at most
//! 2^-16 of the norm in a channel. Values are scaled by their largest magnitude, and the weights that they are added up with by the sum of
//! the weights, which bounds those sums just so.
//!
//! What is not finite stays visible: it is in a scale, and scales are floats.

use super::panel::FloatLine;
use super::{PANEL_COLS, TILE_ROWS};

/// The largest code, and the norm of a row of codes.
pub(crate) const MOST: f32 = 32767.0;

/// Keys whose weights share a scale: with more, small weights lose digits; with fewer, sums become floats more often.
pub(crate) const SHARE: usize = 64;

/// Two 16-bit codes in each of sixteen lanes: one register, one cache line.
#[derive(Copy, Clone)]
#[repr(C, align(64))]
pub struct WordLine(pub [[i16; 2]; PANEL_COLS]);

impl WordLine {
    /// Zeros.
    pub const ZERO: WordLine = WordLine([[0; 2]; PANEL_COLS]);
}

/// Keys and values of one key-value head.
pub(crate) struct WordRows {
    /// `[position / 16][channel / 2]` lines of sixteen positions with two channels each; an odd channel is 0.
    keys: Vec<WordLine>,
    /// `[position / 16]` lines: what a key's codes are times.
    key_scales: Vec<FloatLine>,
    /// `[position / 2][channel / 16]` lines of sixteen channels of two positions each.
    values: Vec<WordLine>,
    /// `[position]`.
    value_scales: Vec<f32>,
    /// Lines of a panel of keys, and of two positions' values.
    key_lines: usize,
    value_lines: usize,
}

impl WordRows {
    /// Room for `positions`.
    pub fn new(head_k: usize, head_v: usize, positions: usize) -> WordRows {
        let (key_lines, value_lines) = (head_k.div_ceil(2), head_v.div_ceil(PANEL_COLS));
        // Whole panels, so that the last may be read to its end.
        let groups = positions.div_ceil(PANEL_COLS);
        WordRows {
            keys: vec![WordLine::ZERO; groups * key_lines],
            key_scales: vec![FloatLine::ZERO; groups],
            values: vec![WordLine::ZERO; groups * PANEL_COLS / 2 * value_lines],
            value_scales: vec![0.0; groups * PANEL_COLS],
            key_lines,
            value_lines,
        }
    }

    /// Bytes of such rows.
    pub fn bytes(head_k: usize, head_v: usize, positions: usize) -> usize {
        let lines = head_k.div_ceil(2) + 1 + PANEL_COLS / 2 * head_v.div_ceil(PANEL_COLS) + 1;
        positions.div_ceil(PANEL_COLS) * lines * size_of::<WordLine>()
    }

    /// Stores position `at`.
    #[inline(always)]
    pub fn set(&mut self, at: usize, key: &[f32], value: &[f32]) {
        let (group, lane) = (at / PANEL_COLS, at % PANEL_COLS);
        let (by, scale) = by_norm(key);
        self.key_scales[group].0[lane] = scale;
        let panel = &mut self.keys[group * self.key_lines..][..self.key_lines];
        for (lines, x) in panel.chunks_mut(PANEL_COLS / 2).zip(key.chunks(PANEL_COLS)) {
            let codes = codes(x, by);
            lines.iter_mut().zip(codes.as_chunks::<2>().0).for_each(|(line, pair)| line.0[lane] = *pair);
        }
        let (by, scale) = by_largest(value);
        self.value_scales[at] = scale;
        let lines = &mut self.values[at / 2 * self.value_lines..][..self.value_lines];
        for (line, x) in lines.iter_mut().zip(value.chunks(PANEL_COLS)) {
            line.0.iter_mut().zip(codes(x, by)).for_each(|(pair, code)| pair[at % 2] = code);
        }
    }

    /// Keys `16 * group ..`.
    #[inline(always)]
    pub fn key_panel(&self, group: usize) -> WordKeys<'_> {
        let codes = &self.keys[group * self.key_lines..][..self.key_lines];
        WordKeys { codes, scales: &self.key_scales[group].0 }
    }

    /// Values of `n` positions from `first` on; both even.
    #[inline(always)]
    pub fn value_rows(&self, first: usize, n: usize) -> &[WordLine] {
        &self.values[first / 2 * self.value_lines..][..n / 2 * self.value_lines]
    }

    /// What they are times.
    #[inline(always)]
    pub fn value_scales(&self, first: usize, n: usize) -> &[f32] {
        &self.value_scales[first..][..n]
    }
}

/// The nearest codes of up to sixteen numbers times `by`, which are within ±32767 then; of what is none, any. The rest is 0.
#[inline(always)]
pub(crate) fn codes(x: &[f32], by: f32) -> [i16; PANEL_COLS] {
    match x.as_array() {
        Some(x) => codes16(x, by),
        None => {
            let mut all = [0.0; PANEL_COLS];
            all[..x.len()].copy_from_slice(x);
            codes16(&all, by)
        }
    }
}

/// The same of sixteen. Written as a compiler makes vectors of it.
#[inline(always)]
pub(crate) fn codes16(x: &[f32; PANEL_COLS], by: f32) -> [i16; PANEL_COLS] {
    // Adding 1.5 * 2^23 leaves the rounded integer in the low bits of the mantissa.
    let wide: [i32; PANEL_COLS] = std::array::from_fn(|i| (x[i] * by + 12_582_912.0).to_bits() as i32);
    wide.map(|w| w.wrapping_sub(0x4B40_0000) as i16)
}

/// What a row is multiplied by to become codes whose norm is 32767, and what codes are times to become the row again.
#[inline(always)]
pub(crate) fn by_norm(x: &[f32]) -> (f32, f32) {
    both_ways(super::rowops::squares_f64(x).sqrt() as f32)
}

/// The same for codes of which the largest is 32767.
#[inline(always)]
fn by_largest(x: &[f32]) -> (f32, f32) {
    let mut lanes = [0f32; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    // `max` would lose NaN.
    let larger = |a: f32, b: f32| if b.abs() > a || b.is_nan() { b.abs() } else { a };
    chunks.iter().for_each(|c| lanes.iter_mut().zip(c).for_each(|(l, v)| *l = larger(*l, *v)));
    let most = lanes.iter().chain(rest).fold(0f32, |a, b| larger(a, *b));
    both_ways(most)
}

/// Of a size: none at all where there is so little that its inverse would be infinite.
#[inline(always)]
pub(crate) fn both_ways(size: f32) -> (f32, f32) {
    if size < 1e-30 { (0.0, 0.0) } else { (MOST / size, size / MOST) }
}

/// Sixteen keys.
#[derive(Copy, Clone)]
pub(crate) struct WordKeys<'a> {
    /// `[channel / 2]` lines.
    pub codes: &'a [WordLine],
    /// What a key's codes are times.
    pub scales: &'a [f32; PANEL_COLS],
}

/// A tile's queries.
#[derive(Default)]
pub(crate) struct WordQueries {
    /// `[channel / 2][row]` pairs of codes.
    pub codes: Vec<[i16; 2]>,
    /// What a row's codes are times; the scale of scores is in it.
    pub scales: [f32; TILE_ROWS],
}
