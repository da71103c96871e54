//! Matrix products: activations times the transpose of a weight matrix.
//!
//! A thread takes two panels of sixteen outputs, decodes their weights into its own cache and multiplies all tiles of
//! rows with them. Nothing is repacked ahead of time and nothing is kept, so a run starts without a loading phase.

use super::acts::{Activations, Tiles};
use super::panel::{CodePanel, FloatPanel};
use super::{Columns, Kernel, PANEL_COLS, Pool, TILE_ROWS, TileOut};
use crate::weight::WeightView;
use std::cell::RefCell;
use std::ops::Range;

/// One product: `out[m][n] = acts[m][k] * weight[n][k] + bias[n]`.
pub struct Job<'a> {
    /// The weight matrix.
    pub weight: WeightView<'a>,
    /// Added to every row.
    pub bias: Option<&'a [f32]>,
    /// Where the product goes; as many columns as the weight has rows.
    pub out: Columns<'a>,
}

/// Panels that a task decodes and multiplies together.
const PANELS: usize = 2;
/// Tasks for each thread, at least, so that the last to finish keeps the others waiting for little.
const TASKS_PER_THREAD: usize = 4;
/// Tiles of rows, at least, that a decoded panel should be used for.
const TILES_PER_SHARE: usize = 8;

thread_local! {
    static ROOM: RefCell<([CodePanel; PANELS], [FloatPanel; PANELS])> =
        const { RefCell::new(([const { CodePanel::empty() }; PANELS], [const { FloatPanel::empty() }; PANELS])) };
}

/// Computes all jobs, which share their activations, on all threads of the pool.
///
/// # Panics
/// When a weight's inputs are not the activations', an output has other columns than its weight has rows, or the
/// activations were not made for a weight's type: the caller's mistakes, not the data's.
pub fn gemm<K: Kernel>(kernel: K, pool: &Pool, acts: &Activations, jobs: &[Job<'_>]) {
    let groups = |job: &Job<'_>| job.weight.n().div_ceil(PANELS * PANEL_COLS);
    for job in jobs {
        assert_eq!(job.weight.k(), acts.k(), "inputs of the weight and of the activations");
        assert_eq!(job.weight.n(), job.out.n(), "outputs of the weight and of the matrix");
        assert!(job.bias.is_none_or(|b| b.len() == job.weight.n()), "a bias for every output");
    }
    let total: usize = jobs.iter().map(groups).sum();
    let n_tiles = acts.m().div_ceil(TILE_ROWS);
    // Many threads and few panels: rows are shared out too, and each share decodes its panels again.
    let shares = (TASKS_PER_THREAD * pool.threads()).div_ceil(total).min(n_tiles.div_ceil(TILES_PER_SHARE)).max(1);
    pool.for_each(total * shares, |i| {
        let (mut group, share) = (i / shares, i % shares);
        let tiles = share * n_tiles / shares..(share + 1) * n_tiles / shares;
        for job in jobs {
            if group < groups(job) {
                return product(kernel, acts, job, group * PANELS * PANEL_COLS, tiles);
            }
            group -= groups(job);
        }
    });
}

/// The outputs from `first` on, a task's worth of them, of the rows in `range`, counted in tiles.
fn product<K: Kernel>(kernel: K, acts: &Activations, job: &Job<'_>, first: usize, range: Range<usize>) {
    let ty = job.weight.ty();
    let (tiles, form) = acts.tiles_for(ty).expect("activations made for this weight type");
    let mut out: [TileOut; PANELS] = [[[0.0; PANEL_COLS]; TILE_ROWS]; PANELS];
    let firsts: [usize; PANELS] = std::array::from_fn(|p| first + p * PANEL_COLS);
    // The last task may have one panel only.
    let panels = (job.weight.n() - first).div_ceil(PANEL_COLS).min(PANELS);
    // Inside `rows`, so that a line is stored in one piece where registers are as wide.
    let store = |t: usize, out: &mut [TileOut; PANELS]| {
        kernel.rows(|| {
            for (first, out) in firsts.into_iter().zip(out).take(panels) {
                if let Some(bias) = job.bias {
                    let bias = &bias[first..bias.len().min(first + PANEL_COLS)];
                    for line in out.iter_mut() {
                        line.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
                    }
                }
                // SAFETY: these elements are written by this task only: `gemm` hands every group of panels of every job out
                // once for every share of the rows, shares do not overlap, and each job has a matrix of its own.
                unsafe { job.out.store(t * TILE_ROWS, first, out) };
            }
        });
    };
    ROOM.with_borrow_mut(|(codes, floats)| match tiles {
        Tiles::Codes(tiles) => {
            for (panel, first) in codes.iter_mut().zip(firsts).take(panels) {
                panel.shape(job.weight.k(), ty.code_form().expect("a type with codes"));
                kernel.decode_codes(&job.weight, first, panel);
            }
            for (t, tile) in range.clone().zip(&tiles[range]) {
                if panels == PANELS {
                    kernel.mul_code_pair(tile, form, codes, &mut out);
                } else {
                    kernel.mul_codes(tile, form, &codes[0], &mut out[0]);
                }
                store(t, &mut out);
            }
        }
        Tiles::Floats(tiles) => {
            for (panel, first) in floats.iter_mut().zip(firsts).take(panels) {
                panel.shape(job.weight.k());
                kernel.decode_floats(&job.weight, first, panel);
            }
            for (t, tile) in range.clone().zip(&tiles[range]) {
                if panels == PANELS {
                    kernel.mul_float_pair(tile, floats, &mut out);
                } else {
                    kernel.mul_floats(tile, &floats[0], &mut out[0]);
                }
                store(t, &mut out);
            }
        }
    });
}
