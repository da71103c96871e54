//! Inner loops for x86-64 with AVX2, FMA and F16C.

use super::acts::{CodeTile, FloatTile};
use super::panel::{CodePanel, FloatLine, FloatPanel};
use super::{Kernel, TILE_ROWS, TileOut, attention, lanes};
use crate::weight::WeightView;
use std::arch::x86_64::*;

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Copy, Clone)]
pub struct Avx2(());

// SAFETY: `new` is the only constructor and checks every feature that the methods enable.
unsafe impl Kernel for Avx2 {
    fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c"))
            .then_some(Avx2(()))
    }

    fn decode_codes(self, w: &WeightView<'_>, first: usize, panel: &mut CodePanel) {
        lanes::decode_codes(w, first, panel);
    }

    fn decode_floats(self, w: &WeightView<'_>, first: usize, panel: &mut FloatPanel) {
        lanes::decode_floats(w, first, panel);
    }

    fn mul_codes(self, tile: &CodeTile, form: usize, panel: &CodePanel, out: &mut TileOut) {
        tile.assert_fits(form, panel);
        // SAFETY: `self` proves the instructions; the lengths checked above are all that the loops read.
        unsafe {
            // Two products of a code and an int8 must fit 16 bits, or the codes are taken as signed.
            if panel.form.max_code <= 127 {
                mul_codes::<false>(tile, form, panel, out);
            } else {
                mul_codes::<true>(tile, form, panel, out);
            }
        }
    }

    fn mul_floats(self, tile: &FloatTile, panel: &FloatPanel, out: &mut TileOut) {
        assert_eq!(tile.k(), panel.k, "inputs of tile and panel");
        // SAFETY: `self` proves the instructions.
        unsafe { mul_floats(&tile.values, &panel.values, out) }
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

#[target_feature(enable = "avx2,fma,f16c")]
fn call<F: FnOnce() -> R, R>(f: F) -> R {
    f()
}

#[target_feature(enable = "avx2,fma,f16c")]
fn attend(task: &attention::Task<'_>, scratch: &mut attention::Scratch, out: &mut [f32]) {
    lanes::attend::<true>(lanes::PlainLoops::<true>, task, scratch, out);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn mul_floats(a: &[f32], panel: &[FloatLine], out: &mut TileOut) {
    lanes::mul_floats::<true>(a, panel, out);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn quantise_row(tile: &mut CodeTile, i: usize, row: &[f32]) {
    tile.set_row(i, row, |x| _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm_set_ss(x)))));
}

/// Tile times panel, four rows of the tile and all sixteen columns (two registers) at a time.
///
/// `WIDE` codes reach 255: they are stored as value + 128, so flipping the top bit gives the signed value, whose
/// magnitude is multiplied with the activation times its sign. The zero point is then already gone.
///
/// # Safety
/// The buffers of tile and panel are as long as their documentation says.
#[target_feature(enable = "avx2,fma")]
unsafe fn mul_codes<const WIDE: bool>(tile: &CodeTile, form: usize, panel: &CodePanel, out: &mut TileOut) {
    const ROWS: usize = 4;
    let sub = panel.form.sub;
    let extra = &tile.extras[form];
    let ones = _mm256_set1_epi16(1);
    let flip = _mm256_set1_epi8(-128);
    for r in (0..TILE_ROWS).step_by(ROWS) {
        let mut total = [[_mm256_setzero_ps(); 2]; ROWS];
        for s in 0..panel.k / sub {
            let mut dot = [[_mm256_setzero_si256(); 2]; ROWS];
            for q in s * sub / 4..(s + 1) * sub / 4 {
                for h in 0..2 {
                    // SAFETY: q < k / 4; a line of codes is 64 aligned bytes, a group of words TILE_ROWS.
                    let w = unsafe { _mm256_load_si256(panel.codes.as_ptr().add(q).cast::<__m256i>().add(h)) };
                    let signed = _mm256_xor_si256(w, flip);
                    for i in 0..ROWS {
                        // SAFETY: as above, and r + i < TILE_ROWS.
                        let a = _mm256_set1_epi32(unsafe { *tile.words.as_ptr().add(q * TILE_ROWS + r + i) });
                        let pairs = if WIDE {
                            _mm256_maddubs_epi16(_mm256_abs_epi8(signed), _mm256_sign_epi8(a, signed))
                        } else {
                            _mm256_maddubs_epi16(w, a)
                        };
                        dot[i][h] = _mm256_add_epi32(dot[i][h], _mm256_madd_epi16(pairs, ones));
                    }
                }
            }
            for h in 0..2 {
                // SAFETY: a line of scales (and of mins, where the form has them) is sixteen floats.
                let scale = unsafe { _mm256_load_ps(panel.scales[s].0.as_ptr().add(h * 8)) };
                for i in 0..ROWS {
                    let act = tile.scales[s * sub / 32 * TILE_ROWS + r + i];
                    let start = if WIDE || panel.form.has_min { 0 } else { extra.start[s * TILE_ROWS + r + i] };
                    let sum = _mm256_add_epi32(dot[i][h], _mm256_set1_epi32(start));
                    let both = _mm256_mul_ps(scale, _mm256_set1_ps(act));
                    total[i][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), both, total[i][h]);
                    if panel.form.has_min {
                        // SAFETY: as above.
                        let min = unsafe { _mm256_load_ps(panel.mins[s].0.as_ptr().add(h * 8)) };
                        let act_sum = _mm256_set1_ps(extra.sums[s * TILE_ROWS + r + i]);
                        total[i][h] = _mm256_fmadd_ps(min, act_sum, total[i][h]);
                    }
                }
            }
        }
        for i in 0..ROWS {
            for h in 0..2 {
                // SAFETY: a line of the output is sixteen floats.
                unsafe { _mm256_storeu_ps(out[r + i].as_mut_ptr().add(h * 8), total[i][h]) };
            }
        }
    }
}
