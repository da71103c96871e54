//! Inner loops for aarch64 with NEON and the dot-product instructions (Armv8.2 `dotprod`; every Armv8.4 core has them).

use super::acts::{CodeTile, FloatTile, half_plain};
use super::panel::{CodePanel, FloatPanel};
use super::{Kernel, TILE_ROWS, TileOut, attention, lanes};
use crate::weight::WeightView;
use std::arch::aarch64::*;
use std::arch::is_aarch64_feature_detected;

/// Proof that the processor has NEON and `dotprod`.
#[derive(Copy, Clone)]
pub struct Neon(());

// SAFETY: `new` is the only constructor and checks every feature that the methods enable.
unsafe impl Kernel for Neon {
    fn new() -> Option<Self> {
        (is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("dotprod")).then_some(Neon(()))
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
        unsafe { mul_codes(tile, form, panel, out) }
    }

    fn mul_floats(self, tile: &FloatTile, panel: &FloatPanel, out: &mut TileOut) {
        assert_eq!(tile.k(), panel.k, "inputs of tile and panel");
        lanes::mul_floats::<true>(&tile.values, &panel.values, out);
    }

    fn quantise_row(self, tile: &mut CodeTile, i: usize, row: &[f32]) {
        tile.set_row(i, row, half_plain);
    }

    fn attend(self, task: &attention::Task<'_>, scratch: &mut attention::Scratch, out: &mut [f32]) {
        lanes::attend::<true>(lanes::PlainLoops::<true>, task, scratch, out);
    }

    // NEON is in the baseline of the target, so there is nothing to switch on for these.
    fn rows<F: FnOnce() -> R, R>(self, f: F) -> R {
        f()
    }
}

/// Tile times panel, three rows of the tile and all sixteen columns (four registers) at a time.
///
/// The instruction multiplies signed bytes. Codes up to 127 are such; those that reach 255 are stored as value + 128, so
/// flipping the top bit gives the value, and the zero point is gone.
///
/// # Safety
/// The buffers of tile and panel are as long as their documentation says.
#[target_feature(enable = "neon,dotprod")]
unsafe fn mul_codes(tile: &CodeTile, form: usize, panel: &CodePanel, out: &mut TileOut) {
    const ROWS: usize = 3;
    const REGISTERS: usize = 4;
    let sub = panel.form.sub;
    let extra = &tile.extras[form];
    let wide = panel.form.max_code > 127;
    let flip = vdupq_n_u8(if wide { 128 } else { 0 });
    for r in (0..TILE_ROWS).step_by(ROWS) {
        let mut total = [[vdupq_n_f32(0.0); REGISTERS]; ROWS];
        for s in 0..panel.k / sub {
            let mut dot = [[vdupq_n_s32(0); REGISTERS]; ROWS];
            for q in s * sub / 4..(s + 1) * sub / 4 {
                let mut a = [vdupq_n_s8(0); ROWS];
                for (i, a) in a.iter_mut().enumerate() {
                    // SAFETY: q < k / 4 and r + i < TILE_ROWS.
                    let word = unsafe { *tile.words.as_ptr().add(q * TILE_ROWS + r + i) };
                    *a = vreinterpretq_s8_s32(vdupq_n_s32(word));
                }
                for h in 0..REGISTERS {
                    // SAFETY: a line of codes is 64 bytes.
                    let w = unsafe { vld1q_u8(panel.codes.as_ptr().add(q).cast::<u8>().add(h * 16)) };
                    let w = vreinterpretq_s8_u8(veorq_u8(w, flip));
                    for (dot, a) in dot.iter_mut().zip(a) {
                        dot[h] = dot4(dot[h], w, a);
                    }
                }
            }
            for h in 0..REGISTERS {
                // SAFETY: a line of scales (and of mins, where the form has them) is sixteen floats.
                let scale = unsafe { vld1q_f32(panel.scales[s].0.as_ptr().add(h * 4)) };
                for i in 0..ROWS {
                    let act = tile.scales[s * sub / 32 * TILE_ROWS + r + i];
                    let start = if wide || panel.form.has_min { 0 } else { extra.start[s * TILE_ROWS + r + i] };
                    let sum = vcvtq_f32_s32(vaddq_s32(dot[i][h], vdupq_n_s32(start)));
                    total[i][h] = vfmaq_f32(total[i][h], sum, vmulq_n_f32(scale, act));
                    if panel.form.has_min {
                        // SAFETY: as above.
                        let min = unsafe { vld1q_f32(panel.mins[s].0.as_ptr().add(h * 4)) };
                        total[i][h] = vfmaq_n_f32(total[i][h], min, extra.sums[s * TILE_ROWS + r + i]);
                    }
                }
            }
        }
        for (line, total) in out[r..].iter_mut().zip(total) {
            for (h, total) in total.into_iter().enumerate() {
                // SAFETY: a line of the output is sixteen floats.
                unsafe { vst1q_f32(line.as_mut_ptr().add(h * 4), total) };
            }
        }
    }
}

/// Four products of bytes added to each 32-bit lane (`sdot`).
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot4(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: one instruction on registers; the feature that has it is enabled.
    unsafe {
        std::arch::asm!("sdot {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) sum, in(vreg) a, in(vreg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}
