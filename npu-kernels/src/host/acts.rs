//! Activations as matrix products want them: rounded as ggml's CPU path rounds them, packed in tiles.
//!
//! A tile holds [`TILE_ROWS`] rows so that a kernel can broadcast the same input of each row from neighbouring words.
//! Rows past the end of the matrix are zeros.

use super::panel::CodePanel;
use super::{Kernel, Pool, TILE_ROWS};
use crate::weight::{ActKind, CodeForm, WeightType};
use half::{bf16, f16};

/// A tile of int8 activations.
pub struct CodeTile {
    /// `[k / 4][row]`, four int8 values to a word, the first in the lowest byte.
    pub words: Vec<i32>,
    /// `[k / 32][row]` scales.
    pub scales: Vec<f32>,
    /// What the product with each weight form needs besides: see [`Extra`].
    pub extras: Vec<Extra>,
    k: usize,
    block: usize,
}

/// Per code form: the sums that make up for the form's zero point or carry its minimum.
pub struct Extra {
    /// Sub-block size and zero point of the form.
    pub sub: usize,
    /// The form's zero point.
    pub zero: i32,
    /// `[k / sub][row]`: `-zero * sum(q)`, the start value of the integer product. Empty for forms with a minimum.
    pub start: Vec<i32>,
    /// `[k / sub][row]`: `scale * sum(q)`, which a minimum is multiplied with. Empty for forms without.
    pub sums: Vec<f32>,
}

impl CodeTile {
    fn new(k: usize, block: usize, forms: &[CodeForm]) -> Self {
        let extras = forms.iter().map(|f| {
            let n = k / f.sub * TILE_ROWS;
            let (start, sums) = if f.has_min { (0, n) } else { (n, 0) };
            Extra { sub: f.sub, zero: f.zero, start: vec![0; start], sums: vec![0.0; sums] }
        });
        CodeTile {
            words: vec![0; k / 4 * TILE_ROWS],
            scales: vec![0.0; k / 32 * TILE_ROWS],
            extras: extras.collect(),
            k,
            block,
        }
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Values that share a scale: 32 or 256.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn block(&self) -> usize {
        self.block
    }

    /// What kernels with raw pointers rely on: the panel has this tile's inputs, and all buffers that a product with it
    /// reads are as long as their documentation says. `form` is the index of the panel's form among the tile's.
    ///
    /// # Panics
    /// When it is otherwise, which is a mistake in this crate.
    #[inline]
    pub(crate) fn assert_fits(&self, form: usize, panel: &CodePanel) {
        let (k, extra) = (panel.k, &self.extras[form]);
        let n_sub = k / panel.form.sub;
        assert_eq!(self.k, k, "inputs of tile and panel");
        assert!(self.words.len() >= k / 4 * TILE_ROWS && panel.codes.len() >= k / 4);
        assert!(self.scales.len() >= k / 32 * TILE_ROWS && panel.scales.len() >= n_sub);
        if panel.form.has_min {
            assert!(extra.sums.len() >= n_sub * TILE_ROWS && panel.mins.len() >= n_sub);
        } else {
            assert!(extra.start.len() >= n_sub * TILE_ROWS);
        }
    }

    /// Stores 32 rounded values, block `b` of row `i`, four to a word, and what follows from them: `half_sums` are the sums of the first
    /// and of the last sixteen. `exact` is the scale before it was rounded to f16 (ggml forms the sums of `Q8_1` with
    /// it), `scale` the one that multiplies. `half` rounds to f16: a library call here would cost more than all the rest.
    #[inline(always)]
    pub(crate) fn set_block(
        &mut self,
        (i, b): (usize, usize),
        words: &[i32; 8],
        half_sums: [i32; 2],
        (scale, exact): (f32, f32),
        half: impl Fn(f32) -> f32,
    ) {
        assert!(i < TILE_ROWS, "a row of the tile");
        let rows = &mut self.words[b * 8 * TILE_ROWS..][..8 * TILE_ROWS];
        words.iter().enumerate().for_each(|(j, word)| rows[j * TILE_ROWS + i] = *word);
        self.scales[b * TILE_ROWS + i] = scale;
        let round_sums = self.block == 32;
        for extra in &mut self.extras {
            let (n, sums) = if extra.sub == 32 { (1, [half_sums[0] + half_sums[1], 0]) } else { (2, half_sums) };
            for (h, sum) in sums.into_iter().enumerate().take(n) {
                let at = (b * n + h) * TILE_ROWS + i;
                if extra.sums.is_empty() {
                    extra.start[at] = -extra.zero * sum;
                } else {
                    let product = exact * sum as f32;
                    extra.sums[at] = if round_sums { half(product) } else { product };
                }
            }
        }
    }

    /// Rounds one row, plainly. `half` rounds a number to f16.
    ///
    /// Blocks of 32 follow ggml's `quantize_row_q8_0`/`_q8_1` as its x86 code has them: scale `amax / 127`, kept as
    /// f16, values `x * (127 / amax)` rounded to nearest even. Blocks of 256 follow `quantize_row_q8_K`: the value of
    /// largest magnitude becomes -127, scale in f32, nearest even, at most 127.
    #[inline(always)]
    pub(crate) fn set_row(&mut self, i: usize, row: &[f32], half: impl Fn(f32) -> f32) {
        assert_eq!(row.len(), self.k, "a row of the matrix");
        if self.block == 32 {
            for (b, x) in row.as_chunks::<32>().0.iter().enumerate() {
                let mut lanes = [0f32; 16];
                for (l, pair) in lanes.iter_mut().zip(0..16) {
                    *l = x[pair].abs().max(x[pair + 16].abs());
                }
                let amax = lanes.iter().fold(0f32, |m, &v| m.max(v));
                let exact = amax / 127.0;
                let inverse = if amax > 0.0 { 127.0 / amax } else { 0.0 };
                let q: [i8; 32] = std::array::from_fn(|j| round_i8(x[j] * inverse));
                self.set_block((i, b), &words(&q), half_sums(&q), (half(exact), exact), &half);
            }
        } else {
            for (s, x) in row.as_chunks::<256>().0.iter().enumerate() {
                // The first of the largest magnitudes decides the sign, as in ggml.
                let mut amax = [0f32; 16];
                for c in x.as_chunks::<16>().0 {
                    for (a, v) in amax.iter_mut().zip(c) {
                        *a = a.max(v.abs());
                    }
                }
                let amax = amax.iter().fold(0f32, |m, &v| m.max(v));
                let max = x.iter().copied().find(|v| v.abs() == amax).unwrap_or(0.0);
                let inverse = if amax > 0.0 { -127.0 / max } else { 0.0 };
                let scale = if amax > 0.0 { 1.0 / inverse } else { 0.0 };
                for (b, x) in x.as_chunks::<32>().0.iter().enumerate() {
                    let q: [i8; 32] = std::array::from_fn(|j| round_i8(x[j] * inverse));
                    self.set_block((i, s * 8 + b), &words(&q), half_sums(&q), (scale, scale), &half);
                }
            }
        }
    }
}

/// To f16 and back, on any processor.
pub(crate) fn half_plain(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

/// Nearest even; values lie in -127.5..=127.5 by construction, NaN becomes 0 (and is caught where rows are handed over).
#[inline(always)]
fn round_i8(x: f32) -> i8 {
    // Adding 1.5 * 2^23 leaves the rounded integer in the low bits of the mantissa.
    let bits = (x + 12_582_912.0).to_bits() as i32 - 0x4B40_0000;
    bits.clamp(-127, 127) as i8
}

/// Four codes to a word, the first in the lowest byte.
#[inline(always)]
fn words(q: &[i8; 32]) -> [i32; 8] {
    std::array::from_fn(|j| i32::from_le_bytes(std::array::from_fn(|i| q[4 * j + i] as u8)))
}

/// Sums of the first and of the last sixteen codes.
#[inline(always)]
fn half_sums(q: &[i8; 32]) -> [i32; 2] {
    [0, 16].map(|from| q[from..from + 16].iter().map(|&v| i32::from(v)).sum())
}

/// A tile of float activations, rounded to its kind.
pub struct FloatTile {
    /// `[k][row]`; none where there are pairs.
    pub values: Vec<f32>,
    /// `[k / 2][row]`, rounded up: two bf16, the first in the lower bytes; none where there are values.
    pub pairs: Vec<u32>,
    kind: ActKind,
    k: usize,
}

impl FloatTile {
    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// What values are rounded to.
    pub fn kind(&self) -> ActKind {
        self.kind
    }

    /// Whether its numbers stand in pairs, and panels to multiply it with have to.
    pub fn in_pairs(&self) -> bool {
        !self.pairs.is_empty()
    }

    /// Makes room, of numbers that are unspecified until rows are set.
    fn shape(&mut self, k: usize, in_pairs: bool) {
        let (values, pairs) = if in_pairs { (0, k.div_ceil(2)) } else { (k, 0) };
        self.k = k;
        self.values.resize(values * TILE_ROWS, 0.0);
        self.pairs.resize(pairs * TILE_ROWS, 0);
    }

    /// Rounds one row, plainly.
    pub(crate) fn set_row(&mut self, i: usize, row: &[f32]) {
        assert!(i < TILE_ROWS && row.len() == self.k, "a row of the tile");
        if self.in_pairs() {
            let word = |x: &f32| u32::from(bf16::from_f32(*x).to_bits());
            let pairs = row.chunks(2).map(|x| word(&x[0]) | x.get(1).map_or(0, word) << 16);
            self.pairs[i..].iter_mut().step_by(TILE_ROWS).zip(pairs).for_each(|(p, pair)| *p = pair);
            return;
        }
        let put = self.values[i..].iter_mut().step_by(TILE_ROWS).zip(row);
        match self.kind {
            ActKind::F16 => put.for_each(|(v, x)| *v = f16::from_f32(*x).to_f32()),
            ActKind::Bf16 => put.for_each(|(v, x)| *v = bf16::from_f32(*x).to_f32()),
            _ => put.for_each(|(v, x)| *v = *x),
        }
    }
}

/// The tiles of one kind.
pub enum Tiles {
    /// int8.
    Codes(Vec<CodeTile>),
    /// Floats.
    Floats(Vec<FloatTile>),
}

/// An `m` × `k` matrix of activations, in every kind that the weights it will meet ask for.
pub struct Activations {
    m: usize,
    k: usize,
    room: (usize, usize),
    sets: Vec<(ActKind, Vec<CodeForm>, Tiles)>,
    /// The rows as they were, where somebody asked for them.
    rows: Option<Vec<f32>>,
}

impl Activations {
    /// Room for `m` rows of `k` values that will meet weights of these types.
    pub fn new(m: usize, k: usize, weights: &[WeightType]) -> Self {
        let mut kinds: Vec<(ActKind, Vec<CodeForm>)> = Vec::new();
        for ty in weights {
            let kind = ty.activation();
            let at = kinds.iter().position(|(k, _)| *k == kind).unwrap_or_else(|| {
                kinds.push((kind, Vec::new()));
                kinds.len() - 1
            });
            let forms = &mut kinds[at].1;
            if let Some(form) = ty.code_form()
                && !forms.iter().any(|f| same_extra(f, &form))
            {
                forms.push(form);
            }
        }
        let n_tiles = m.div_ceil(TILE_ROWS);
        let sets = kinds.into_iter().map(|(kind, forms)| {
            let codes = |block| Tiles::Codes((0..n_tiles).map(|_| CodeTile::new(k, block, &forms)).collect());
            let tiles = match kind {
                ActKind::Q8Block32 => codes(32),
                ActKind::Q8Block256 => codes(256),
                ActKind::F32 | ActKind::F16 | ActKind::Bf16 => {
                    let tile = || FloatTile { values: Vec::new(), pairs: Vec::new(), kind, k };
                    Tiles::Floats((0..n_tiles).map(|_| tile()).collect())
                }
            };
            (kind, forms, tiles)
        });
        Activations { m, k, room: (m, k), sets: sets.collect(), rows: None }
    }

    /// From now on keeps the rows unrounded as well, for a device that rounds otherwise.
    pub fn keep_rows(&mut self) {
        self.rows.get_or_insert_with(|| vec![0.0; self.room.0 * self.room.1]);
    }

    /// The rows of the last [`Activations::fill`], `m * k` values, where they are kept.
    pub fn rows(&self) -> Option<&[f32]> {
        self.rows.as_ref().map(|rows| &rows[..self.m * self.k])
    }

    /// Rows in use.
    pub fn m(&self) -> usize {
        self.m
    }

    /// Values of a row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// From now on a matrix of `m` rows of `k` values, neither above its number at creation.
    pub fn reshape(&mut self, m: usize, k: usize) {
        assert!(m <= self.room.0 && k <= self.room.1, "{m} x {k} in room for {:?}", self.room);
        (self.m, self.k) = (m, k);
        for (_, _, tiles) in &mut self.sets {
            match tiles {
                Tiles::Codes(t) => t.iter_mut().for_each(|t| t.k = k),
                Tiles::Floats(t) => t.iter_mut().for_each(|t| t.k = k),
            }
        }
    }

    /// Fills every row: `row(i, buffer)` writes row `i` as f32, which is then rounded into each kind. Rows past the
    /// last one are zeros.
    pub fn fill<K: Kernel>(&mut self, kernel: K, pool: &Pool, row: impl Fn(usize, &mut [f32]) + Sync + Send) {
        let (m, k) = (self.m, self.k);
        let n_tiles = m.div_ceil(TILE_ROWS);
        // One task per tile, over all kinds: the row is computed once.
        let mut per_tile: Vec<Vec<TileMut<'_>>> = (0..n_tiles).map(|_| Vec::with_capacity(self.sets.len())).collect();
        for (kind, _, tiles) in &mut self.sets {
            match tiles {
                Tiles::Codes(t) => {
                    per_tile.iter_mut().zip(t).for_each(|(list, t)| list.push(TileMut::Codes(t)));
                }
                Tiles::Floats(t) => {
                    let in_pairs = *kind == ActKind::Bf16 && kernel.pairs();
                    per_tile.iter_mut().zip(t).for_each(|(list, t)| {
                        t.shape(k, in_pairs);
                        list.push(TileMut::Floats(t));
                    });
                }
            }
        }
        if let Some(rows) = &mut self.rows {
            let chunks = rows[..m * k].chunks_mut((TILE_ROWS * k).max(1));
            per_tile.iter_mut().zip(chunks).for_each(|(list, rows)| list.push(TileMut::Rows(rows)));
        }
        pool.for_each_mut(&mut per_tile, |t, list| {
            let mut buffer = vec![0f32; k];
            for i in 0..TILE_ROWS {
                if t * TILE_ROWS + i < m {
                    row(t * TILE_ROWS + i, &mut buffer);
                } else {
                    buffer.fill(0.0);
                }
                for tile in list.iter_mut() {
                    match tile {
                        TileMut::Codes(tile) => kernel.quantise_row(tile, i, &buffer),
                        TileMut::Floats(tile) => kernel.round_row(tile, i, &buffer),
                        TileMut::Rows(rows) => {
                            if let Some(row) = rows.chunks_exact_mut(k).nth(i) {
                                row.copy_from_slice(&buffer);
                            }
                        }
                    }
                }
            }
        });
    }

    /// The tiles that weights of type `ty` meet, and which of their [`Extra`]s; `None` when the matrix was not made
    /// for that type.
    pub fn tiles_for(&self, ty: WeightType) -> Option<(&Tiles, usize)> {
        let (_, forms, tiles) = self.sets.iter().find(|(kind, _, _)| *kind == ty.activation())?;
        let form = match ty.code_form() {
            Some(form) => forms.iter().position(|f| same_extra(f, &form))?,
            None => 0,
        };
        Some((tiles, form))
    }
}

enum TileMut<'a> {
    Codes(&'a mut CodeTile),
    Floats(&'a mut FloatTile),
    Rows(&'a mut [f32]),
}

fn same_extra(a: &CodeForm, b: &CodeForm) -> bool {
    a.sub == b.sub && a.zero == b.zero && a.has_min == b.has_min
}
