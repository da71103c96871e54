//! The plain kernel: no instruction beyond the baseline, and the yardstick of the others.

use super::acts::{CodeTile, FloatTile, half_plain};
use super::panel::{CodePanel, FloatPanel};
use super::{Kernel, PANEL_COLS, TILE_ROWS, TileOut, attention, lanes};
use crate::weight::WeightView;

/// The plain kernel.
#[derive(Copy, Clone)]
pub struct Scalar;

// SAFETY: uses no instruction that a processor of the compiled target could lack.
unsafe impl Kernel for Scalar {
    fn new() -> Option<Self> {
        Some(Scalar)
    }

    fn decode_codes(self, w: &WeightView<'_>, first: usize, panel: &mut CodePanel) {
        lanes::decode_codes(w, first, panel);
    }

    fn decode_floats(self, w: &WeightView<'_>, first: usize, panel: &mut FloatPanel) {
        lanes::decode_floats(w, first, panel);
    }

    fn mul_codes(self, tile: &CodeTile, form: usize, panel: &CodePanel, out: &mut TileOut) {
        let sub = panel.form.sub;
        let extra = &tile.extras[form];
        *out = [[0.0; PANEL_COLS]; TILE_ROWS];
        for s in 0..panel.k / sub {
            for i in 0..TILE_ROWS {
                let act_scale = tile.scales[s * sub / 32 * TILE_ROWS + i];
                let start = if panel.form.has_min { 0 } else { extra.start[s * TILE_ROWS + i] };
                for (j, o) in out[i].iter_mut().enumerate() {
                    let mut dot = start;
                    for q in s * sub / 4..(s + 1) * sub / 4 {
                        let a = tile.words[q * TILE_ROWS + i].to_le_bytes();
                        let w = &panel.codes[q].0[j * 4..][..4];
                        for (a, w) in a.iter().zip(w) {
                            dot += i32::from(*a as i8) * i32::from(*w);
                        }
                    }
                    *o += panel.scales[s].0[j] * act_scale * dot as f32;
                    if panel.form.has_min {
                        *o += panel.mins[s].0[j] * extra.sums[s * TILE_ROWS + i];
                    }
                }
            }
        }
    }

    fn mul_floats(self, tile: &FloatTile, panel: &FloatPanel, out: &mut TileOut) {
        assert_eq!(tile.k(), panel.k, "inputs of tile and panel");
        lanes::mul_floats::<false>(&tile.values, &panel.values, out);
    }

    fn quantise_row(self, tile: &mut CodeTile, i: usize, row: &[f32]) {
        tile.set_row(i, row, half_plain);
    }

    fn attend(self, task: &attention::Task<'_>, scratch: &mut attention::Scratch, out: &mut [f32]) {
        lanes::attend::<false>(lanes::PlainLoops::<false>, task, scratch, out);
    }

    fn rows<F: FnOnce() -> R, R>(self, f: F) -> R {
        f()
    }
}
