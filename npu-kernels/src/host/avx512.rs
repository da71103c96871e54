//! Inner loops for x86-64 with AVX-512 (F, BW, VL, DQ) and VNNI, and for bf16 with AVX-512 BF16 where the processor has it.

use super::acts::{CodeTile, FloatTile};
use super::panel::{CodeLine, CodePanel, FloatLine, FloatPanel};
use super::words::{self, WordKeys, WordLine, WordQueries};
use super::{Kernel, PANEL_COLS, TILE_ROWS, TileOut, attention, avx512_decode, lanes};
use crate::weight::{ActKind, WeightView};
use std::arch::x86_64::*;

/// Proof that the processor has AVX-512 F, BW, VL, DQ, VNNI, FMA and F16C.
#[derive(Copy, Clone)]
pub struct Avx512 {
    /// And that it has AVX-512 BF16.
    pairs: bool,
}

impl Avx512 {
    /// The kernel with AVX-512 BF16, if this processor can run it.
    pub fn with_bf16() -> Option<Avx512> {
        (Avx512::new().is_some() && is_x86_feature_detected!("avx512bf16")).then_some(Avx512 { pairs: true })
    }
}

/// Whether AMD made the processor.
pub(super) fn is_amd() -> bool {
    // The twelve letters of the maker's name.
    let made = __cpuid(0);
    [made.ebx, made.edx, made.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
}

// SAFETY: `new` and `with_bf16` are the only constructors; they check every feature that the methods enable, BF16 if `pairs` is set.
unsafe impl Kernel for Avx512 {
    fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Avx512 { pairs: false })
    }

    const WORDS: bool = true;

    fn decode_codes(self, w: &WeightView<'_>, first: usize, panel: &mut CodePanel) {
        // SAFETY: `self` proves the instructions.
        if !unsafe { avx512_decode::decode(w, first, panel) } {
            lanes::decode_codes(w, first, panel);
        }
    }

    fn decode_floats(self, w: &WeightView<'_>, first: usize, panel: &mut FloatPanel) {
        // SAFETY: `self` proves the instructions.
        if !unsafe { avx512_decode::decode_floats(w, first, panel) } {
            lanes::decode_floats(w, first, panel);
        }
    }

    fn mul_codes(self, tile: &CodeTile, form: usize, panel: &CodePanel, out: &mut TileOut) {
        mul_panels::<1, TILE_ROWS>(self, tile, form, [panel], [out]);
    }

    fn mul_code_pair(self, tile: &CodeTile, form: usize, panels: &[CodePanel; 2], out: &mut [TileOut; 2]) {
        mul_panels::<2, { TILE_ROWS / 2 }>(self, tile, form, panels.each_ref(), out.each_mut());
    }

    fn mul_floats(self, tile: &FloatTile, panel: &FloatPanel, out: &mut TileOut) {
        assert_eq!(tile.k(), panel.k, "inputs of tile and panel");
        if panel.pairs.is_empty() {
            // SAFETY: `self` proves the instructions.
            unsafe { mul_floats(&tile.values, [&panel.values], [out]) }
        } else {
            assert!(self.pairs, "panels in pairs where they can be multiplied");
            // SAFETY: `self` proves the instructions, with BF16 as was seen above.
            unsafe { mul_pairs(&tile.pairs, [&panel.pairs], [out]) }
        }
    }

    fn mul_float_pair(self, tile: &FloatTile, panels: &[FloatPanel; 2], out: &mut [TileOut; 2]) {
        assert!(panels.iter().all(|p| p.k == tile.k()), "inputs of tile and panels");
        if panels.iter().all(|p| p.pairs.is_empty()) {
            // SAFETY: `self` proves the instructions.
            unsafe { mul_floats(&tile.values, panels.each_ref().map(|p| &p.values[..]), out.each_mut()) }
        } else {
            assert!(self.pairs, "panels in pairs where they can be multiplied");
            // SAFETY: `self` proves the instructions, with BF16 as was seen above.
            unsafe { mul_pairs(&tile.pairs, panels.each_ref().map(|p| &p.pairs[..]), out.each_mut()) }
        }
    }

    fn pairs(self) -> bool {
        self.pairs
    }

    fn round_row(self, tile: &mut FloatTile, i: usize, row: &[f32]) {
        assert!(i < TILE_ROWS && row.len() == tile.k(), "a row of the tile");
        match tile.kind() {
            // SAFETY: `self` proves the instructions, with BF16 as is seen here.
            ActKind::Bf16 if self.pairs && tile.in_pairs() => unsafe { round_pairs(&mut tile.pairs, i, row) },
            // SAFETY: `self` proves the instructions.
            ActKind::F16 => unsafe { round_halves(&mut tile.values, i, row) },
            _ => tile.set_row(i, row),
        }
    }

    fn quantise_row(self, tile: &mut CodeTile, i: usize, row: &[f32]) {
        // SAFETY: `self` proves the instructions.
        unsafe { quantise_row(tile, i, row) }
    }

    fn attend(self, task: &attention::Task<'_>, scratch: &mut attention::Scratch, out: &mut [f32]) {
        // SAFETY: `self` proves the instructions.
        unsafe { attend(task, scratch, out) }
    }

    fn rows<F: FnOnce() -> R, R>(self, f: F) -> R {
        // SAFETY: `self` proves the instructions.
        unsafe { call(f) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")]
fn call<F: FnOnce() -> R, R>(f: F) -> R {
    f()
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")]
fn attend(task: &attention::Task<'_>, scratch: &mut attention::Scratch, out: &mut [f32]) {
    lanes::attend::<true>(Loops(()), task, scratch, out);
}

/// The loops of attention, made only inside a function that has the instructions on.
#[derive(Copy, Clone)]
struct Loops(());

impl lanes::Loops for Loops {
    #[inline(always)]
    fn exp(self, x: &mut lanes::Lane) {
        // SAFETY: `Loops` exists only inside `attend`, whose caller has proved the instructions.
        unsafe { exp(x) }
    }

    #[inline(always)]
    fn scores(self, keys: &[FloatLine], q: &[f32], out: &mut TileOut) {
        // SAFETY: as above.
        unsafe { mul_floats(q, [keys], [out]) }
    }

    #[inline(always)]
    fn score_pair(self, keys: [&[FloatLine]; 2], q: &[f32], out: &mut [TileOut; 2]) {
        // SAFETY: as above.
        unsafe { mul_floats(q, keys, out.each_mut()) }
    }

    #[inline(always)]
    fn mix(self, values: &[FloatLine], lines: usize, weights: &[f32], acc: &mut [FloatLine]) {
        let keys = values.len() / lines;
        assert!(acc.len() >= TILE_ROWS * lines);
        assert!(keys <= attention::KEY_BLOCK && weights.len() >= TILE_ROWS * attention::KEY_BLOCK);
        // SAFETY: as above; the lengths are all that is read and written.
        unsafe {
            for l in (0..lines - lines % 2).step_by(2) {
                mix::<2>(&values[l..], keys, lines, weights, &mut acc[l..]);
            }
            if lines % 2 == 1 {
                mix::<1>(&values[lines - 1..], keys, lines, weights, &mut acc[lines - 1..]);
            }
        }
    }

    #[inline(always)]
    fn word_scores(self, keys: WordKeys<'_>, q: &WordQueries, out: &mut TileOut) {
        // SAFETY: as above.
        unsafe { mul_words(q, [keys], [out]) }
    }

    #[inline(always)]
    fn word_score_pair(self, keys: [WordKeys<'_>; 2], q: &WordQueries, out: &mut [TileOut; 2]) {
        // SAFETY: as above.
        unsafe { mul_words(q, keys, out.each_mut()) }
    }

    #[inline(always)]
    fn weigh(self, weights: &[lanes::Lane], scales: &[lanes::Lane], codes: &mut [[i16; PANEL_COLS]]) -> f32 {
        // SAFETY: as above.
        unsafe { weigh(weights, scales, codes) }
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
        let pairs = values.len() / lines;
        assert!(acc.len() >= TILE_ROWS * lines);
        assert!(weights.len() >= (TILE_ROWS - 1) * attention::KEY_BLOCK + 2 * pairs);
        // SAFETY: as above; the lengths are all that is read and written.
        unsafe {
            for l in (0..lines - lines % 2).step_by(2) {
                mix_words::<2>(&values[l..], pairs, lines, weights, scales, &mut acc[l..]);
            }
            if lines % 2 == 1 {
                mix_words::<1>(&values[lines - 1..], pairs, lines, weights, scales, &mut acc[lines - 1..]);
            }
        }
    }
}

/// As [`lanes::exp`], whose constants these are. The last step multiplies by a power of two, and makes 0 of whatever the first ones
/// make of minus infinity.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
fn exp(x: &mut lanes::Lane) {
    // SAFETY: a lane is sixteen floats.
    let v = unsafe { _mm512_loadu_ps(x.as_ptr()) };
    let by = |c: f32| _mm512_set1_ps(c);
    let n = _mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(_mm512_mul_ps(v, by(std::f32::consts::LOG2_E)));
    let r = _mm512_fmadd_ps(n, by(2.121_944_4e-4), _mm512_fmadd_ps(n, by(-0.693_359_4), v));
    let mut p = by(1.0 / 720.0);
    for c in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = _mm512_fmadd_ps(p, r, by(c));
    }
    // SAFETY: as above.
    unsafe { _mm512_storeu_ps(x.as_mut_ptr(), _mm512_scalef_ps(p, n)) };
}

/// Twelve rows times `P` panels of sixteen keys, two channels at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn mul_words<const P: usize>(q: &WordQueries, panels: [WordKeys<'_>; P], out: [&mut TileOut; P]) {
    let codes = q.codes.as_chunks::<TILE_ROWS>().0;
    let n = panels.iter().fold(codes.len(), |n, p| n.min(p.codes.len()));
    let keys = panels.map(|p| &p.codes[..n]);
    let mut sum = [[_mm512_setzero_si512(); P]; TILE_ROWS];
    for (at, q) in codes[..n].iter().enumerate() {
        // SAFETY: a line is one aligned register, and every panel has n of them.
        let k = keys.map(|p| unsafe { _mm512_load_si512(p.as_ptr().add(at).cast()) });
        for (s, q) in sum.iter_mut().zip(q) {
            let q = _mm512_set1_epi32(both(*q));
            for (s, k) in s.iter_mut().zip(k) {
                *s = _mm512_dpwssd_epi32(*s, q, k);
            }
        }
    }
    // SAFETY: sixteen floats each.
    let scales = panels.map(|p| unsafe { _mm512_loadu_ps(p.scales.as_ptr()) });
    for (p, out) in out.into_iter().enumerate() {
        for ((line, s), q) in out.iter_mut().zip(&sum).zip(q.scales) {
            let score = _mm512_mul_ps(_mm512_cvtepi32_ps(s[p]), _mm512_mul_ps(_mm512_set1_ps(q), scales[p]));
            // SAFETY: a line is sixteen floats.
            unsafe { _mm512_storeu_ps(line.as_mut_ptr(), score) };
        }
    }
}

/// See [`lanes::Loops::weigh`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn weigh(weights: &[lanes::Lane], scales: &[lanes::Lane], codes: &mut [[i16; PANEL_COLS]]) -> f32 {
    // SAFETY: sixteen floats each.
    let product = |(w, s): (&lanes::Lane, &lanes::Lane)| unsafe {
        _mm512_mul_ps(_mm512_loadu_ps(w.as_ptr()), _mm512_loadu_ps(s.as_ptr()))
    };
    let sum = weights.iter().zip(scales).map(product).fold(_mm512_setzero_ps(), |a, b| _mm512_add_ps(a, b));
    let (by, back) = words::both_ways(_mm512_reduce_add_ps(sum));
    let by = _mm512_set1_ps(by);
    for (w, codes) in weights.iter().zip(scales).map(product).zip(codes) {
        let words = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(w, by)));
        // SAFETY: sixteen words of 16 bits.
        unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), words) };
    }
    back
}

/// Two words as one number, the first in its low half.
fn both(pair: [i16; 2]) -> i32 {
    i32::from(pair[0] as u16) | i32::from(pair[1]) << 16
}

/// `N` lines of channels for all twelve rows.
///
/// # Safety
/// `values` holds `pairs` rows of `lines` lines less what was cut off in front, `acc` likewise twelve rows, `weights`
/// twelve rows of `KEY_BLOCK`, the last of them `2 * pairs` long at least.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")]
unsafe fn mix_words<const N: usize>(
    values: &[WordLine],
    pairs: usize,
    lines: usize,
    weights: &[i16],
    scales: &[f32; TILE_ROWS],
    acc: &mut [FloatLine],
) {
    let mut sum = [[_mm512_setzero_si512(); N]; TILE_ROWS];
    for pair in 0..pairs {
        let mut v = [_mm512_setzero_si512(); N];
        for (j, v) in v.iter_mut().enumerate() {
            // SAFETY: row `pair` of values, line j, by the promise above.
            *v = unsafe { _mm512_load_si512(values.as_ptr().add(pair * lines + j).cast()) };
        }
        for (i, row) in sum.iter_mut().enumerate() {
            // SAFETY: row i of weights, keys 2 * pair and the next; a pair of them need not be aligned.
            let w = unsafe { weights.as_ptr().add(i * attention::KEY_BLOCK + 2 * pair).cast::<i32>().read_unaligned() };
            let w = _mm512_set1_epi32(w);
            for (s, v) in row.iter_mut().zip(v) {
                *s = _mm512_dpwssd_epi32(*s, w, v);
            }
        }
    }
    for ((i, row), scale) in sum.iter().enumerate().zip(scales) {
        let scale = _mm512_set1_ps(*scale);
        for (j, s) in row.iter().enumerate() {
            // SAFETY: row i of acc, line j.
            unsafe {
                let at = acc.as_mut_ptr().add(i * lines + j).cast();
                _mm512_store_ps(at, _mm512_fmadd_ps(_mm512_cvtepi32_ps(*s), scale, _mm512_load_ps(at)));
            }
        }
    }
}

/// `N` lines of channels for all twelve rows.
///
/// # Safety
/// `values` holds `keys` rows of `lines` lines less what was cut off in front, `acc` likewise twelve rows, `weights`
/// twelve rows of `KEY_BLOCK`, and `keys` is at most that.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma")]
unsafe fn mix<const N: usize>(values: &[FloatLine], keys: usize, lines: usize, weights: &[f32], acc: &mut [FloatLine]) {
    let mut sum = [[_mm512_setzero_ps(); N]; TILE_ROWS];
    for (i, row) in sum.iter_mut().enumerate() {
        for (j, s) in row.iter_mut().enumerate() {
            // SAFETY: row i of acc, line j, by the promise above.
            *s = unsafe { _mm512_load_ps(acc.as_ptr().add(i * lines + j).cast()) };
        }
    }
    for key in 0..keys {
        let mut v = [_mm512_setzero_ps(); N];
        for (j, v) in v.iter_mut().enumerate() {
            // SAFETY: row `key` of values, line j.
            *v = unsafe { _mm512_load_ps(values.as_ptr().add(key * lines + j).cast()) };
        }
        for (i, row) in sum.iter_mut().enumerate() {
            // SAFETY: row i of weights, key below KEY_BLOCK.
            let p = _mm512_set1_ps(unsafe { *weights.as_ptr().add(i * attention::KEY_BLOCK + key) });
            for (s, v) in row.iter_mut().zip(v) {
                *s = _mm512_fmadd_ps(v, p, *s);
            }
        }
    }
    for (i, row) in sum.iter().enumerate() {
        for (j, s) in row.iter().enumerate() {
            // SAFETY: as for the loads.
            unsafe { _mm512_store_ps(acc.as_mut_ptr().add(i * lines + j).cast(), *s) };
        }
    }
}

/// Twelve rows times `P` panels of sixteen columns: with two of them a broadcast value is used twice, and loads are no
/// longer what the loop waits for.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")]
fn mul_floats<const P: usize>(a: &[f32], panels: [&[FloatLine]; P], out: [&mut TileOut; P]) {
    let a = a.as_chunks::<TILE_ROWS>().0;
    let k = panels.iter().fold(a.len(), |k, p| k.min(p.len()));
    let panels = panels.map(|p| &p[..k]);
    let mut sum = [[_mm512_setzero_ps(); P]; TILE_ROWS];
    for (q, a) in a[..k].iter().enumerate() {
        // SAFETY: a line is sixteen aligned floats, and every panel has k of them.
        let w = panels.map(|p| unsafe { _mm512_load_ps(p.as_ptr().add(q).cast()) });
        for (s, a) in sum.iter_mut().zip(a) {
            let a = _mm512_set1_ps(*a);
            for (s, w) in s.iter_mut().zip(w) {
                *s = _mm512_fmadd_ps(w, a, *s);
            }
        }
    }
    for (p, out) in out.into_iter().enumerate() {
        for (line, s) in out.iter_mut().zip(&sum) {
            // SAFETY: a line is sixteen floats.
            unsafe { _mm512_storeu_ps(line.as_mut_ptr(), s[p]) };
        }
    }
}

/// The same of bf16, two inputs at a time: products of two are exact, sums are f32, and numbers below 2^-126 count as 0.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn mul_pairs<const P: usize>(a: &[u32], panels: [&[CodeLine]; P], out: [&mut TileOut; P]) {
    let a = a.as_chunks::<TILE_ROWS>().0;
    let n = panels.iter().fold(a.len(), |n, p| n.min(p.len()));
    let panels = panels.map(|p| &p[..n]);
    let mut sum = [[_mm512_setzero_ps(); P]; TILE_ROWS];
    for (q, a) in a[..n].iter().enumerate() {
        // SAFETY: a line is 64 aligned bytes, every panel has n of them, and any bits are two bf16 to a lane.
        let w: [__m512bh; P] =
            panels.map(|p| unsafe { std::mem::transmute(_mm512_load_si512(p.as_ptr().add(q).cast())) });
        for (s, a) in sum.iter_mut().zip(a) {
            // SAFETY: as above.
            let a: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi32(a.cast_signed())) };
            for (s, w) in s.iter_mut().zip(w) {
                *s = _mm512_dpbf16_ps(*s, w, a);
            }
        }
    }
    for (p, out) in out.into_iter().enumerate() {
        for (line, s) in out.iter_mut().zip(&sum) {
            // SAFETY: a line is sixteen floats.
            unsafe { _mm512_storeu_ps(line.as_mut_ptr(), s[p]) };
        }
    }
}

/// Rounds a row to bf16 and puts it as row `i` among pairs.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
fn round_pairs(pairs: &mut [u32], i: usize, row: &[f32]) {
    let lines = pairs.chunks_mut(16 * TILE_ROWS);
    for (x, lines) in row.chunks(32).zip(lines) {
        let mut whole = [0f32; 32];
        whole[..x.len()].copy_from_slice(x);
        // SAFETY: 32 floats; the result is 32 numbers of 16 bits, which any bits are.
        let words: [u32; 16] = unsafe {
            let (low, high) = (_mm512_loadu_ps(whole.as_ptr()), _mm512_loadu_ps(whole.as_ptr().add(16)));
            std::mem::transmute(_mm512_cvtne2ps_pbh(high, low))
        };
        lines[i..].iter_mut().step_by(TILE_ROWS).zip(words).for_each(|(p, word)| *p = word);
    }
}

/// Rounds a row to f16 and puts it as row `i` among values.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
fn round_halves(values: &mut [f32], i: usize, row: &[f32]) {
    for (x, lines) in row.chunks(16).zip(values.chunks_mut(16 * TILE_ROWS)) {
        let mut whole = [0f32; 16];
        whole[..x.len()].copy_from_slice(x);
        // SAFETY: sixteen floats.
        let x = unsafe { _mm512_loadu_ps(whole.as_ptr()) };
        let rounded = floats(_mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)));
        lines[i..].iter_mut().step_by(TILE_ROWS).zip(rounded).for_each(|(v, x)| *v = x);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")]
fn quantise_row(tile: &mut CodeTile, i: usize, row: &[f32]) {
    assert_eq!(row.len(), tile.k(), "a row of the matrix");
    let half = |x| _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm_set_ss(x))));
    if tile.block() == 32 {
        // Sixteen blocks at a time, so that divisions come sixteen at once and nothing waits for one.
        for (g, x) in row.chunks(16 * 32).enumerate() {
            let blocks = x.as_chunks::<32>().0;
            let mut lanes = [0f32; 16];
            lanes.iter_mut().zip(blocks).for_each(|(l, x)| *l = amax32(x));
            let by = _mm512_set1_ps(127.0);
            // SAFETY: sixteen floats each.
            let (exact, scale, inverse) = unsafe {
                let amax = _mm512_loadu_ps(lanes.as_ptr());
                let exact = _mm512_div_ps(amax, by);
                let some = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(amax, _mm512_setzero_ps());
                let rounded = _mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(exact));
                (floats(exact), floats(rounded), floats(_mm512_maskz_div_ps(some, by, amax)))
            };
            for (j, x) in blocks.iter().enumerate() {
                let (words, sums) = round32(x, inverse[j]);
                tile.set_block((i, g * 16 + j), &words, sums, (scale[j], exact[j]), half);
            }
        }
    } else {
        for (s, x) in row.as_chunks::<256>().0.iter().enumerate() {
            let blocks = x.as_chunks::<32>().0;
            let max = first_largest(x);
            let some = max != 0.0;
            let inverse = if some { -127.0 / max } else { 0.0 };
            let scale = if some { 1.0 / inverse } else { 0.0 };
            for (b, x) in blocks.iter().enumerate() {
                let (words, sums) = round32(x, inverse);
                tile.set_block((i, s * 8 + b), &words, sums, (scale, scale), half);
            }
        }
    }
}

/// The two halves of 32 values.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn halves(x: &[f32; 32]) -> [__m512; 2] {
    // SAFETY: 32 floats are there.
    unsafe { [_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16))] }
}

/// The largest magnitude of 32 values.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn amax32(x: &[f32; 32]) -> f32 {
    let [a, b] = halves(x);
    _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)))
}

/// The first of the values whose magnitude none exceeds.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn first_largest(x: &[f32; 256]) -> f32 {
    let lines = x.as_chunks::<16>().0;
    // SAFETY: sixteen floats each.
    let magnitude = |line: &[f32; 16]| _mm512_abs_ps(unsafe { _mm512_loadu_ps(line.as_ptr()) });
    let amax = lines.iter().map(magnitude).fold(_mm512_setzero_ps(), |a, b| _mm512_max_ps(a, b));
    let amax = _mm512_set1_ps(_mm512_reduce_max_ps(amax));
    for line in lines {
        let equal = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(magnitude(line), amax);
        if equal != 0 {
            return line[equal.trailing_zeros() as usize];
        }
    }
    // Nothing is equal to a NaN.
    0.0
}

/// The lanes of a register.
#[target_feature(enable = "avx512f")]
fn floats(x: __m512) -> [f32; 16] {
    let mut out = [0f32; 16];
    // SAFETY: room for sixteen floats.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), x) };
    out
}

/// `x * inverse`, rounded to nearest even, four bytes to a word, and the sums of the two halves.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn round32(x: &[f32; 32], inverse: f32) -> ([i32; 8], [i32; 2]) {
    let by = _mm512_set1_ps(inverse);
    let [low, high] = halves(x).map(|v| _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v, by))));
    let codes = _mm256_set_m128i(high, low);
    // Sums of bytes exist unsigned only, over eight each: with 128 more a byte.
    let eights = _mm256_sad_epu8(_mm256_xor_si256(codes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    let sum = |e: __m128i| _mm_extract_epi32::<0>(e) + _mm_extract_epi32::<2>(e) - 16 * 128;
    let sums = [sum(_mm256_castsi256_si128(eights)), sum(_mm256_extracti128_si256::<1>(eights))];
    let mut words = [0i32; 8];
    // SAFETY: room for 32 bytes.
    unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), codes) };
    (words, sums)
}

/// Checks the lengths and picks the loop for the panels' form. `R` rows at a time: `R * P` of the registers carry
/// integer products and as many float sums.
fn mul_panels<const P: usize, const R: usize>(
    _: Avx512,
    tile: &CodeTile,
    form: usize,
    panels: [&CodePanel; P],
    out: [&mut TileOut; P],
) {
    assert!(TILE_ROWS.is_multiple_of(R), "a tile in equal parts");
    for panel in panels {
        assert!(panel.form == panels[0].form, "panels of one form");
        tile.assert_fits(form, panel);
    }
    let (extra, form) = (&tile.extras[form], panels[0].form);
    let side = if form.has_min { extra.sums.as_ptr().cast() } else { extra.start.as_ptr() };
    let loops = match (form.sub, form.has_min) {
        (32, true) => mul_codes::<32, true, P, R>,
        (32, false) => mul_codes::<32, false, P, R>,
        (_, true) => mul_codes::<16, true, P, R>,
        (_, false) => mul_codes::<16, false, P, R>,
    };
    // SAFETY: the first argument proves the instructions; the lengths checked here are all that the loops read.
    unsafe { loops(tile, side, panels, out) }
}

/// Tile times panels. Per sub-block the integer products of `R` rows and sixteen columns of each panel build up in
/// registers, then join the float sums in as many more.
///
/// # Safety
/// The panels' `k` is a multiple of 32, the buffers of tile and panels are as long as their documentation says, and
/// `side` points to `[k / SUB][row]` i32 start values (`MIN` false) or f32 sums (`MIN` true).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn mul_codes<const SUB: usize, const MIN: bool, const P: usize, const R: usize>(
    tile: &CodeTile,
    side: *const i32,
    panels: [&CodePanel; P],
    out: [&mut TileOut; P],
) {
    let codes = panels.map(|p| p.codes.as_ptr());
    let scales = panels.map(|p| p.scales.as_ptr());
    let mins = panels.map(|p| p.mins.as_ptr());
    let mut out = out;
    for r in (0..TILE_ROWS).step_by(R) {
        let words = tile.words.as_ptr().wrapping_add(r);
        let act_scales = tile.scales.as_ptr().wrapping_add(r);
        let side = side.wrapping_add(r);
        let mut total = [[_mm512_setzero_ps(); P]; R];
        for s in 0..panels[0].k / SUB {
            // SAFETY: s < k / SUB and r + R <= TILE_ROWS, so every offset stays inside the lengths promised above:
            // words and codes hold SUB / 4 groups per sub-block, side, scales and mins one line each, act_scales one
            // line per 32 values.
            unsafe {
                let side = side.add(s * TILE_ROWS);
                let mut dot = [[_mm512_setzero_si512(); P]; R];
                if !MIN {
                    for (i, dot) in dot.iter_mut().enumerate() {
                        *dot = [_mm512_set1_epi32(*side.add(i)); P];
                    }
                }
                for q in 0..SUB / 4 {
                    let w = codes.map(|codes| _mm512_load_si512(codes.add(s * SUB / 4 + q).cast()));
                    let a = words.add((s * SUB / 4 + q) * TILE_ROWS);
                    for (i, dot) in dot.iter_mut().enumerate() {
                        let a = _mm512_set1_epi32(*a.add(i));
                        for (dot, w) in dot.iter_mut().zip(w) {
                            *dot = _mm512_dpbusd_epi32(*dot, w, a);
                        }
                    }
                }
                let scale = scales.map(|scales| _mm512_load_ps(scales.add(s).cast()));
                let act = act_scales.add(s * SUB / 32 * TILE_ROWS);
                for (i, total) in total.iter_mut().enumerate() {
                    let act = _mm512_set1_ps(*act.add(i));
                    for p in 0..P {
                        let both = _mm512_mul_ps(scale[p], act);
                        total[p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[i][p]), both, total[p]);
                    }
                }
                if MIN {
                    let min = mins.map(|mins| _mm512_load_ps(mins.add(s).cast()));
                    for (i, total) in total.iter_mut().enumerate() {
                        let sum = _mm512_set1_ps(*side.cast::<f32>().add(i));
                        for p in 0..P {
                            total[p] = _mm512_fmadd_ps(min[p], sum, total[p]);
                        }
                    }
                }
            }
        }
        for (p, out) in out.iter_mut().enumerate() {
            for (line, t) in out[r..r + R].iter_mut().zip(&total) {
                // SAFETY: a line is sixteen floats.
                unsafe { _mm512_storeu_ps(line.as_mut_ptr(), t[p]) };
            }
        }
    }
}
