//! Loops over sixteen lanes that a compiler turns into vector instructions. They stand here once and are inlined into
//! one function per instruction set, where the wider registers and fused multiply-add are switched on.

use super::attention::{FloatRows, Rows};
use super::panel::{CodePanel, FloatLine, FloatPanel};
use super::words::{WordKeys, WordLine, WordQueries, WordRows};
use super::{PANEL_COLS, TILE_ROWS, TileOut, attention, blocks, words};
use crate::weight::WeightView;

/// Sixteen lanes.
pub(crate) type Lane = [f32; PANEL_COLS];

/// `a * b + c`, fused where the caller's instruction set has it (elsewhere a fused product would be a library call).
#[inline(always)]
pub(crate) fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// e to the x in every lane. Cody-Waite reduction and a polynomial of degree 6 (coefficients: the Taylor series, whose
/// error on |r| <= ln2/2 is below 2e-7 relative); results under 2^-126 become 0, and NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<const FMA: bool>(x: &mut Lane) {
    for v in x.iter_mut() {
        let x = v.clamp(-104.0, 88.0);
        // Rounding by adding 1.5 * 2^23: n stays in the low bits.
        let shifted = mul_add::<FMA>(x, std::f32::consts::LOG2_E, 12_582_912.0);
        let n = shifted - 12_582_912.0;
        // Asked of the number, not of its bits: NaN is not tiny, whatever its sign.
        let tiny = n < -126.0;
        let r = mul_add::<FMA>(n, -0.693_359_4, x);
        let r = mul_add::<FMA>(n, 2.121_944_4e-4, r);
        let mut p = 1.0 / 720.0;
        p = mul_add::<FMA>(p, r, 1.0 / 120.0);
        p = mul_add::<FMA>(p, r, 1.0 / 24.0);
        p = mul_add::<FMA>(p, r, 1.0 / 6.0);
        p = mul_add::<FMA>(p, r, 0.5);
        p = mul_add::<FMA>(p, r, 1.0);
        p = mul_add::<FMA>(p, r, 1.0);
        let n = shifted.to_bits() as i32 - 0x4B40_0000;
        let scale = f32::from_bits(((n.max(-127) + 127) as u32) << 23);
        *v = if tiny { 0.0 } else { p * scale };
    }
}

/// The plain decoder of code panels.
pub(crate) fn decode_codes(w: &WeightView<'_>, first: usize, panel: &mut CodePanel) {
    let sub = panel.form.sub;
    let per = 32 / sub;
    for j in 0..PANEL_COLS {
        if first + j >= w.n() {
            // A row that does not exist contributes nothing: scale and minimum 0.
            panel.scales.iter_mut().chain(&mut panel.mins).for_each(|line| line.0[j] = 0.0);
            continue;
        }
        let row = w.row(first + j);
        for b in 0..w.k() / 32 {
            let block = blocks::decode(w.ty(), row, b);
            for (q, four) in block.codes.as_chunks::<4>().0.iter().enumerate() {
                panel.codes[b * 8 + q].0[j * 4..][..4].copy_from_slice(four);
            }
            for h in 0..per {
                panel.scales[b * per + h].0[j] = block.scale[h];
                if panel.form.has_min {
                    panel.mins[b * per + h].0[j] = block.min[h];
                }
            }
        }
    }
}

/// The plain decoder of float panels.
pub(crate) fn decode_floats(w: &WeightView<'_>, first: usize, panel: &mut FloatPanel) {
    if !panel.pairs.is_empty() {
        for j in 0..PANEL_COLS {
            let row = if first + j < w.n() { w.row(first + j) } else { &[] };
            for (q, line) in panel.pairs.iter_mut().enumerate() {
                for b in 0..4 {
                    line.0[4 * j + b] = row.get(4 * q + b).copied().unwrap_or(0);
                }
            }
        }
        return;
    }
    let mut row = vec![0f32; w.k()];
    for j in 0..PANEL_COLS {
        if first + j < w.n() {
            blocks::row_values(w.ty(), w.row(first + j), &mut row);
        } else {
            row.fill(0.0);
        }
        panel.values.iter_mut().zip(&row).for_each(|(line, x)| line.0[j] = *x);
    }
}

/// Tile times float panel.
#[inline(always)]
pub(crate) fn mul_floats<const FMA: bool>(a: &[f32], panel: &[FloatLine], out: &mut TileOut) {
    let mut acc: TileOut = [[0.0; PANEL_COLS]; TILE_ROWS];
    for (a, w) in a.as_chunks::<TILE_ROWS>().0.iter().zip(panel) {
        for i in 0..TILE_ROWS {
            for l in 0..PANEL_COLS {
                acc[i][l] = mul_add::<FMA>(w.0[l], a[i], acc[i][l]);
            }
        }
    }
    *out = acc;
}

/// Attention's loops, over floats and over 16-bit integers (whose sums are exact), which an instruction set may have better code for.
pub(crate) trait Loops: Copy {
    /// As [`exp`], of numbers that are not above 0; may keep results below 2^-126.
    fn exp(self, x: &mut Lane);

    /// `out[row][key]`: twelve queries (`[channel][row]`) times sixteen keys (`[channel][key]`).
    fn scores(self, keys: &[FloatLine], q: &[f32], out: &mut TileOut);

    /// The same with two groups of keys.
    #[inline(always)]
    fn score_pair(self, keys: [&[FloatLine]; 2], q: &[f32], out: &mut [TileOut; 2]) {
        for (keys, out) in keys.into_iter().zip(out) {
            self.scores(keys, q, out);
        }
    }

    /// `acc[row][..] += weights[row][key] * values[key][..]` over all rows of `values`. Rows of `values` and `acc` are
    /// `lines` lines long, rows of `weights` [`attention::KEY_BLOCK`] numbers.
    fn mix(self, values: &[FloatLine], lines: usize, weights: &[f32], acc: &mut [FloatLine]);

    /// `out[row][key]`: twelve queries times sixteen keys, in integers.
    fn word_scores(self, keys: WordKeys<'_>, q: &WordQueries, out: &mut TileOut);

    /// The same with two groups of keys.
    #[inline(always)]
    fn word_score_pair(self, keys: [WordKeys<'_>; 2], q: &WordQueries, out: &mut [TileOut; 2]) {
        for (keys, out) in keys.into_iter().zip(out) {
            self.word_scores(keys, q, out);
        }
    }

    /// Makes codes of weights times the scales of their values, and returns what the codes are times.
    fn weigh(self, weights: &[Lane], scales: &[Lane], codes: &mut [[i16; PANEL_COLS]]) -> f32;

    /// `acc[row][..] += scales[row] * sum of weights[row][key] * values[key][..]` over all rows of `values`, of which a line has
    /// two. Rows of `values` and `acc` are `lines` lines long, rows of `weights` [`attention::KEY_BLOCK`] numbers.
    fn mix_words(
        self,
        values: &[WordLine],
        lines: usize,
        weights: &[i16],
        scales: &[f32; TILE_ROWS],
        acc: &mut [FloatLine],
    );
}

/// What the compiler makes of the loops as they stand.
#[derive(Copy, Clone)]
pub(crate) struct PlainLoops<const FMA: bool>;

impl<const FMA: bool> Loops for PlainLoops<FMA> {
    #[inline(always)]
    fn exp(self, x: &mut Lane) {
        exp::<FMA>(x);
    }

    #[inline(always)]
    fn scores(self, keys: &[FloatLine], q: &[f32], out: &mut TileOut) {
        mul_floats::<FMA>(q, keys, out);
    }

    #[inline(always)]
    fn mix(self, values: &[FloatLine], lines: usize, weights: &[f32], acc: &mut [FloatLine]) {
        for i in 0..TILE_ROWS {
            for (key, row) in values.chunks_exact(lines).enumerate() {
                let p = weights[i * attention::KEY_BLOCK + key];
                for (a, v) in acc[i * lines..][..lines].iter_mut().zip(row) {
                    for (a, v) in a.0.iter_mut().zip(&v.0) {
                        *a = mul_add::<FMA>(*v, p, *a);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn word_scores(self, keys: WordKeys<'_>, q: &WordQueries, out: &mut TileOut) {
        let mut sums = [[0i32; PANEL_COLS]; TILE_ROWS];
        for (q, keys) in q.codes.as_chunks::<TILE_ROWS>().0.iter().zip(keys.codes) {
            for (sum, q) in sums.iter_mut().zip(q) {
                sum.iter_mut().zip(&keys.0).for_each(|(s, k)| *s += dot(*q, *k));
            }
        }
        for ((out, s), q) in out.iter_mut().zip(sums).zip(q.scales) {
            *out = std::array::from_fn(|l| s[l] as f32 * (q * keys.scales[l]));
        }
    }

    #[inline(always)]
    fn weigh(self, weights: &[Lane], scales: &[Lane], codes: &mut [[i16; PANEL_COLS]]) -> f32 {
        let mut sums = [0f32; PANEL_COLS];
        for (w, scale) in weights.iter().zip(scales) {
            sums = std::array::from_fn(|l| sums[l] + w[l] * scale[l]);
        }
        let (by, back) = words::both_ways(sums.iter().sum());
        for ((w, scale), codes) in weights.iter().zip(scales).zip(codes) {
            *codes = words::codes16(&std::array::from_fn(|l| w[l] * scale[l]), by);
        }
        back
    }

    #[inline(always)]
    fn mix_words(
        self,
        values: &[WordLine],
        lines: usize,
        weights: &[i16],
        scales: &[f32; TILE_ROWS],
        acc: &mut [FloatLine],
    ) {
        for (i, scale) in scales.iter().enumerate() {
            let weights = weights[i * attention::KEY_BLOCK..].as_chunks::<2>().0;
            for (l, acc) in acc[i * lines..][..lines].iter_mut().enumerate() {
                let mut sum = [0i32; PANEL_COLS];
                for (row, w) in values.chunks_exact(lines).zip(weights) {
                    sum.iter_mut().zip(&row[l].0).for_each(|(s, v)| *s += dot(*w, *v));
                }
                acc.0.iter_mut().zip(sum).for_each(|(a, s)| *a = mul_add::<FMA>(s as f32, *scale, *a));
            }
        }
    }
}

#[inline(always)]
fn dot(a: [i16; 2], b: [i16; 2]) -> i32 {
    i32::from(a[0]) * i32::from(b[0]) + i32::from(a[1]) * i32::from(b[1])
}

/// The products of one kind of cache.
trait Products: Copy {
    /// See [`Loops::exp`].
    fn exp(self, x: &mut Lane);

    /// The sum of all lanes.
    fn total(self, lanes: Lane) -> f32;

    /// Takes a tile's queries, times the scale of scores.
    fn queries(self, task: &attention::Task<'_>, scratch: &mut attention::Scratch);

    /// Scores of a group of sixteen keys, or of it and the next.
    fn scores(self, scratch: &attention::Scratch, group: usize, out: &mut [TileOut]);

    /// `acc[row][..] += scores[row][key] * value[first + key][..]`, over `keys` keys.
    fn mix(self, scratch: &mut attention::Scratch, first: usize, keys: usize);
}

#[derive(Copy, Clone)]
struct OfFloats<'a, L, const FMA: bool> {
    rows: &'a FloatRows,
    lines: usize,
    loops: L,
}

impl<L: Loops, const FMA: bool> Products for OfFloats<'_, L, FMA> {
    #[inline(always)]
    fn exp(self, x: &mut Lane) {
        exp::<FMA>(x);
    }

    // One after the other: what real models were held against servers with.
    #[inline(always)]
    fn total(self, lanes: Lane) -> f32 {
        lanes.iter().sum()
    }

    #[inline(always)]
    fn queries(self, task: &attention::Task<'_>, scratch: &mut attention::Scratch) {
        let hk = task.cache.head_k();
        scratch.q.resize(hk * TILE_ROWS, 0.0);
        for i in 0..TILE_ROWS {
            for d in 0..hk {
                let q = if i < task.rows { task.q[i * task.q_stride + d] * task.scale } else { 0.0 };
                scratch.q[d * TILE_ROWS + i] = q;
            }
        }
    }

    #[inline(always)]
    fn scores(self, scratch: &attention::Scratch, group: usize, out: &mut [TileOut]) {
        let keys = |i| self.rows.key_panel(group + i);
        match out {
            [one] => self.loops.scores(keys(0), &scratch.q, one),
            out => self.loops.score_pair([keys(0), keys(1)], &scratch.q, out.as_mut_array().expect("one group or two")),
        }
    }

    #[inline(always)]
    fn mix(self, scratch: &mut attention::Scratch, first: usize, keys: usize) {
        self.loops.mix(self.rows.value_rows(first, keys), self.lines, &scratch.scores, &mut scratch.acc);
    }
}

#[derive(Copy, Clone)]
struct OfWords<'a, L> {
    rows: &'a WordRows,
    lines: usize,
    loops: L,
}

impl<L: Loops> Products for OfWords<'_, L> {
    #[inline(always)]
    fn exp(self, x: &mut Lane) {
        self.loops.exp(x);
    }

    #[inline(always)]
    fn total(self, lanes: Lane) -> f32 {
        across(lanes, |a, b| a + b)
    }

    #[inline(always)]
    fn queries(self, task: &attention::Task<'_>, scratch: &mut attention::Scratch) {
        let hk = task.cache.head_k();
        let WordQueries { codes, scales } = &mut scratch.words;
        codes.clear();
        codes.resize(hk.div_ceil(2) * TILE_ROWS, [0; 2]);
        *scales = [0.0; TILE_ROWS];
        for (i, scale) in scales.iter_mut().enumerate().take(task.rows) {
            let q = &task.q[i * task.q_stride..][..hk];
            let (by, back) = words::by_norm(q);
            *scale = back * task.scale;
            let mut into = codes.as_chunks_mut::<TILE_ROWS>().0.iter_mut();
            for q in q.chunks(PANEL_COLS) {
                let codes = words::codes(q, by);
                codes.as_chunks::<2>().0.iter().zip(&mut into).for_each(|(pair, line)| line[i] = *pair);
            }
        }
    }

    #[inline(always)]
    fn scores(self, scratch: &attention::Scratch, group: usize, out: &mut [TileOut]) {
        let keys = |i| self.rows.key_panel(group + i);
        match out {
            [one] => self.loops.word_scores(keys(0), &scratch.words, one),
            out => {
                let out = out.as_mut_array().expect("one group or two");
                self.loops.word_score_pair([keys(0), keys(1)], &scratch.words, out);
            }
        }
    }

    #[inline(always)]
    fn mix(self, scratch: &mut attention::Scratch, first: usize, keys: usize) {
        const BLOCK: usize = attention::KEY_BLOCK;
        let attention::Scratch { scores, acc, codes, .. } = scratch;
        codes.resize(TILE_ROWS * BLOCK, 0);
        for from in (0..keys).step_by(words::SHARE) {
            // Weights behind the last key are 0, as are those that a row does not see.
            let n = (keys - from).min(words::SHARE).next_multiple_of(PANEL_COLS);
            let values = self.rows.value_scales(first + from, n).as_chunks().0;
            let mut scales = [0f32; TILE_ROWS];
            for (i, scale) in scales.iter_mut().enumerate() {
                let at = i * BLOCK + from..i * BLOCK + from + n;
                let codes = codes[at.clone()].as_chunks_mut().0;
                *scale = self.loops.weigh(scores[at].as_chunks().0, values, codes);
            }
            self.loops.mix_words(self.rows.value_rows(first + from, n), self.lines, &codes[from..], &scales, acc);
        }
    }
}

/// `cap * tanh(s / cap)` of every score.
#[inline(always)]
fn soft_cap<const FMA: bool>(cap: f32, line: &mut Lane) {
    // tanh(y) = 1 - 2 / (exp(2y) + 1).
    let mut e = line.map(|v| 2.0 * (v / cap));
    exp::<FMA>(&mut e);
    line.iter_mut().zip(e).for_each(|(v, e)| *v = cap * (1.0 - 2.0 / (e + 1.0)));
}

/// All lanes become one, in four steps.
#[inline(always)]
fn across(mut lanes: Lane, join: impl Fn(f32, f32) -> f32) -> f32 {
    for width in [8, 4, 2, 1] {
        for l in 0..width {
            lanes[l] = join(lanes[l], lanes[l + width]);
        }
    }
    lanes[0]
}

/// One tile of attention; see [`attention`] for the method.
#[inline(always)]
pub(crate) fn attend<const FMA: bool>(
    loops: impl Loops,
    task: &attention::Task<'_>,
    scratch: &mut attention::Scratch,
    out: &mut [f32],
) {
    let lines = task.cache.value_lines();
    match task.cache.rows() {
        Rows::Floats(rows) => attend_by::<FMA>(OfFloats::<_, FMA> { rows, lines, loops }, task, scratch, out),
        Rows::Words(rows) => attend_by::<FMA>(OfWords { rows, lines, loops }, task, scratch, out),
    }
}

#[inline(always)]
fn attend_by<const FMA: bool>(
    products: impl Products,
    task: &attention::Task<'_>,
    scratch: &mut attention::Scratch,
    out: &mut [f32],
) {
    const BLOCK: usize = attention::KEY_BLOCK;
    let hv = task.cache.head_v();
    let lines = task.cache.value_lines();
    let rows = task.rows;
    scratch.shape(lines);
    products.queries(task, scratch);
    scratch.acc.fill(FloatLine::ZERO);
    let mut max = [f32::NEG_INFINITY; TILE_ROWS];
    let mut sum = [0f32; TILE_ROWS];
    let last = task.first + rows - 1;
    // The first row sees the furthest back.
    let oldest = task.window.map_or(0, |w| w.low(task.first));
    let mut k0 = oldest / PANEL_COLS * PANEL_COLS;
    while k0 <= last {
        let groups = (last + 1 - k0).min(BLOCK).div_ceil(PANEL_COLS);
        for g in (0..groups).step_by(2) {
            let mut pair: [TileOut; 2] = [[[0.0; PANEL_COLS]; TILE_ROWS]; 2];
            products.scores(scratch, k0 / PANEL_COLS + g, &mut pair[..(groups - g).min(2)]);
            for (g, acc) in (g..groups).zip(&mut pair) {
                let key = k0 + g * PANEL_COLS;
                if let Some(cap) = task.softcap {
                    acc.iter_mut().for_each(|line| soft_cap::<FMA>(cap, line));
                }
                if task.slope != 0.0 {
                    for (i, line) in acc.iter_mut().enumerate() {
                        let row = task.first + i.min(rows - 1);
                        for (l, v) in line.iter_mut().enumerate() {
                            // The decoder's mask holds the distance, and is of f16.
                            let distance = row.saturating_sub(key + l) as f32;
                            *v -= task.slope * half::f16::from_f32(distance).to_f32();
                        }
                    }
                }
                let all_visible = key + PANEL_COLS <= task.first + 1 && task.window.is_none_or(|w| key >= w.low(last));
                if !all_visible {
                    for (i, line) in acc.iter_mut().enumerate() {
                        let row = task.first + i.min(rows - 1);
                        let low = task.window.map_or(0, |w| w.low(row));
                        for (l, v) in line.iter_mut().enumerate() {
                            if key + l > row || key + l < low {
                                *v = f32::NEG_INFINITY;
                            }
                        }
                    }
                }
                for (i, line) in acc.iter().enumerate() {
                    scratch.scores[i * BLOCK + g * PANEL_COLS..][..PANEL_COLS].copy_from_slice(line);
                }
            }
        }
        for i in 0..TILE_ROWS {
            let scores = &mut scratch.scores[i * BLOCK..][..groups * PANEL_COLS];
            let mut top = [f32::NEG_INFINITY; PANEL_COLS];
            for line in scores.as_chunks::<PANEL_COLS>().0 {
                for (t, v) in top.iter_mut().zip(line) {
                    *t = if *v > *t { *v } else { *t };
                }
            }
            let top = max[i].max(across(top, f32::max));
            if top == f32::NEG_INFINITY {
                // Nothing visible in this block (window): weights are zero.
                scores.fill(0.0);
                continue;
            }
            let mut total = [0f32; PANEL_COLS];
            for line in scores.as_chunks_mut::<PANEL_COLS>().0 {
                let mut e: Lane = std::array::from_fn(|l| line[l] - top);
                products.exp(&mut e);
                total = std::array::from_fn(|l| total[l] + e[l]);
                *line = e;
            }
            let shrink = if max[i] == top {
                1.0
            } else {
                let mut e = [max[i] - top; PANEL_COLS];
                products.exp(&mut e);
                e[0]
            };
            sum[i] = sum[i] * shrink + products.total(total);
            max[i] = top;
            if shrink != 1.0 {
                let sums = scratch.acc[i * lines..][..lines].iter_mut();
                sums.for_each(|line| line.0.iter_mut().for_each(|v| *v *= shrink));
            }
        }
        let keys = (groups * PANEL_COLS).min(last + 1 - k0);
        products.mix(scratch, k0, keys);
        k0 += BLOCK;
    }
    for i in 0..rows {
        let inverse = match task.sink {
            None => 1.0 / sum[i],
            // As one more key would: both sides shrink to the larger maximum.
            Some(sink) => {
                let top = max[i].max(sink);
                let mut e = [0.0; PANEL_COLS];
                (e[0], e[1]) = (max[i] - top, sink - top);
                exp::<FMA>(&mut e);
                e[0] / (sum[i] * e[0] + e[1])
            }
        };
        let from = scratch.acc[i * lines..][..lines].iter().flat_map(|line| &line.0);
        out[i * hv..][..hv].iter_mut().zip(from).for_each(|(o, v)| *o = v * inverse);
    }
}
