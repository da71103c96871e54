//! Matrix products: activations times the transpose of a weight matrix.
//!
//! A thread takes a panel of sixteen outputs, decodes its weights into its own cache and multiplies all tiles of rows
//! with it. Nothing is repacked ahead of time and nothing is kept, so a run starts without a loading phase.

use super::acts::{Activations, Tiles};
use super::panel::{CodePanel, FloatPanel};
use super::{Columns, Kernel, PANEL_COLS, Pool, TILE_ROWS, TileOut};
use crate::weight::WeightView;
use std::cell::RefCell;

/// One product: `out[m][n] = acts[m][k] * weight[n][k] + bias[n]`.
pub struct Job<'a> {
    /// The weight matrix.
    pub weight: WeightView<'a>,
    /// Added to every row.
    pub bias: Option<&'a [f32]>,
    /// Where the product goes; as many columns as the weight has rows.
    pub out: Columns<'a>,
}

thread_local! {
    static PANELS: RefCell<(CodePanel, FloatPanel)> = const { RefCell::new((CodePanel::empty(), FloatPanel::empty())) };
}

/// Computes all jobs, which share their activations, on all threads of the pool.
///
/// # Panics
/// When a weight's inputs are not the activations', an output has other columns than its weight has rows, or the
/// activations were not made for a weight's type: the caller's mistakes, not the data's.
pub fn gemm<K: Kernel>(kernel: K, pool: &Pool, acts: &Activations, jobs: &[Job<'_>]) {
    let panels = |job: &Job<'_>| job.weight.n().div_ceil(PANEL_COLS);
    for job in jobs {
        assert_eq!(job.weight.k(), acts.k(), "inputs of the weight and of the activations");
        assert_eq!(job.weight.n(), job.out.n(), "outputs of the weight and of the matrix");
        assert!(job.bias.is_none_or(|b| b.len() == job.weight.n()), "a bias for every output");
    }
    let total: usize = jobs.iter().map(panels).sum();
    pool.for_each(total, |mut i| {
        for job in jobs {
            if i < panels(job) {
                return panel_product(kernel, acts, job, i * PANEL_COLS);
            }
            i -= panels(job);
        }
    });
}

fn panel_product<K: Kernel>(kernel: K, acts: &Activations, job: &Job<'_>, first: usize) {
    let ty = job.weight.ty();
    let (tiles, form) = acts.tiles_for(ty).expect("activations made for this weight type");
    let n_tiles = acts.m().div_ceil(TILE_ROWS);
    let mut out: TileOut = [[0.0; PANEL_COLS]; TILE_ROWS];
    let store = |t: usize, out: &mut TileOut| {
        if let Some(bias) = job.bias {
            let bias = &bias[first..bias.len().min(first + PANEL_COLS)];
            for line in out.iter_mut() {
                line.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
            }
        }
        // SAFETY: this panel's columns are written by this task only: `gemm` hands every panel of every job out once,
        // and each job has a matrix of its own.
        unsafe { job.out.store(t * TILE_ROWS, first, out) };
    };
    PANELS.with_borrow_mut(|(codes, floats)| match tiles {
        Tiles::Codes(tiles) => {
            codes.shape(job.weight.k(), ty.code_form().expect("a type with codes"));
            kernel.decode_codes(&job.weight, first, codes);
            for (t, tile) in tiles.iter().enumerate().take(n_tiles) {
                kernel.mul_codes(tile, form, codes, &mut out);
                store(t, &mut out);
            }
        }
        Tiles::Floats(tiles) => {
            floats.shape(job.weight.k());
            kernel.decode_floats(&job.weight, first, floats);
            for (t, tile) in tiles.iter().enumerate().take(n_tiles) {
                kernel.mul_floats(tile, floats, &mut out);
                store(t, &mut out);
            }
        }
    });
}
