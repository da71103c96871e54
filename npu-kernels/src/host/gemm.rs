//! Matrix products: activations times the transpose of a weight matrix.
//!
//! A thread takes two panels of sixteen outputs, decodes their weights into its own cache and multiplies all tiles of
//! rows with them. Nothing is repacked ahead of time and nothing is kept, so a run starts without a loading phase.
//! Matrices that take a group of the rows each ([`gemm_grouped`]) share the threads the same way.

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
/// Bytes that memory hands over at a time.
const CACHE_LINE: usize = 64;
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
    let tiles = 0..acts.m().div_ceil(TILE_ROWS);
    let tasks = jobs.iter().map(|job| (Part { weight: job.weight, bias: job.bias }, &job.out, tiles.clone()));
    run(kernel, pool, acts, &tasks.collect::<Vec<_>>());
}

/// One matrix and what is added to its product.
#[derive(Copy, Clone)]
pub struct Part<'a> {
    /// The weight matrix.
    pub weight: WeightView<'a>,
    /// Added to every row.
    pub bias: Option<&'a [f32]>,
}

/// Products of rows with matrices of which each takes some of the rows only, as the experts of a mixture do.
pub struct GroupedJob<'a> {
    /// One matrix for each group of rows, all of one shape.
    pub parts: Vec<Part<'a>>,
    /// Where the products go, row by row as the activations.
    pub out: Columns<'a>,
}

/// Computes all jobs on all threads. Group `i` of the rows is `tiles[i]`, counted in tiles of [`TILE_ROWS`] rows; it meets
/// matrix `i` of every job, and each matrix is read and decoded once (several times where there are more threads than
/// panels). Groups follow each other; rows between them are left as they are.
///
/// # Panics
/// As [`gemm`]; and when groups overlap or reach past the activations, or a job has another number of matrices.
pub fn gemm_grouped<K: Kernel>(
    kernel: K,
    pool: &Pool,
    acts: &Activations,
    tiles: &[Range<usize>],
    jobs: &[GroupedJob<'_>],
) {
    let mut end = 0;
    for group in tiles {
        assert!(group.start >= end && group.end >= group.start, "groups follow each other");
        end = group.end;
    }
    let mut tasks = Vec::with_capacity(jobs.len() * tiles.len());
    for job in jobs {
        assert_eq!(job.parts.len(), tiles.len(), "a matrix for every group");
    }
    // A group's matrices one after another, so that its rows are read while they are near.
    for (i, group) in tiles.iter().enumerate().filter(|(_, group)| !group.is_empty()) {
        tasks.extend(jobs.iter().map(|job| (job.parts[i], &job.out, group.clone())));
    }
    run(kernel, pool, acts, &tasks);
}

/// Computes products. No two of them write the same rows of the same matrix: [`gemm`] and [`gemm_grouped`] see to it.
fn run<K: Kernel>(kernel: K, pool: &Pool, acts: &Activations, tasks: &[(Part<'_>, &Columns<'_>, Range<usize>)]) {
    let groups = |part: &Part<'_>| part.weight.n().div_ceil(PANELS * PANEL_COLS);
    let n_tiles = acts.m().div_ceil(TILE_ROWS);
    for (part, out, tiles) in tasks {
        assert_eq!(part.weight.k(), acts.k(), "inputs of the weight and of the activations");
        assert_eq!(part.weight.n(), out.n(), "outputs of the weight and of the matrix");
        assert!(part.bias.is_none_or(|b| b.len() == part.weight.n()), "a bias for every output");
        assert!(tiles.end <= n_tiles, "rows of the activations");
    }
    let total: usize = tasks.iter().map(|(part, ..)| groups(part)).sum();
    let most = tasks.iter().map(|(_, _, tiles)| tiles.len()).max().unwrap_or(0);
    // Many threads and few panels: rows are shared out too, and each share decodes its panels again.
    let shares = match total {
        0 => return,
        _ => (TASKS_PER_THREAD * pool.threads()).div_ceil(total).min(most.div_ceil(TILES_PER_SHARE)).max(1),
    };
    // Where each product's work items begin.
    let mut starts = Vec::with_capacity(tasks.len());
    let mut next = 0;
    for (part, ..) in tasks {
        starts.push(next);
        next += groups(part);
    }
    pool.for_each(total * shares, |i| {
        let (item, share) = (i / shares, i % shares);
        let at = starts.partition_point(|&start| start <= item) - 1;
        let (part, out, tiles) = &tasks[at];
        let n = tiles.len();
        let mine = tiles.start + share * n / shares..tiles.start + (share + 1) * n / shares;
        if !mine.is_empty() {
            product(kernel, acts, part, out, (item - starts[at]) * PANELS * PANEL_COLS, mine);
        }
    });
}

/// The weights that the thread will most likely decode next, in as many pieces as there are tiles to multiply before: decoding goes
/// over sixteen rows at once, and so waits for memory in a way that no processor foresees.
fn ahead<'a>(weight: &WeightView<'a>, first: usize, pieces: usize) -> impl Iterator<Item = &'a [u8]> {
    let n = weight.n().saturating_sub(first).min(PANELS * PANEL_COLS);
    let bytes = weight.rows(first, n).map_or(&[][..], |rows| rows.data());
    let piece = bytes.len().div_ceil(pieces).next_multiple_of(CACHE_LINE).max(CACHE_LINE);
    bytes.chunks(piece).chain(std::iter::repeat(&[][..]))
}

/// Has the processor fetch bytes into its cache, if it can be asked to.
fn fetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(CACHE_LINE) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint, and of an address that may be read.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// The outputs from `first` on, a task's worth of them, of the rows in `range`, counted in tiles.
fn product<K: Kernel>(
    kernel: K,
    acts: &Activations,
    job: &Part<'_>,
    to: &Columns<'_>,
    first: usize,
    range: Range<usize>,
) {
    let ty = job.weight.ty();
    let (tiles, form) = acts.tiles_for(ty).expect("activations made for this weight type");
    let mut out: [TileOut; PANELS] = [[[0.0; PANEL_COLS]; TILE_ROWS]; PANELS];
    let firsts: [usize; PANELS] = std::array::from_fn(|p| first + p * PANEL_COLS);
    // The last task may have one panel only.
    let panels = (job.weight.n() - first).div_ceil(PANEL_COLS).min(PANELS);
    let factor = job.weight.factor();
    let ahead = ahead(&job.weight, first + PANELS * PANEL_COLS, range.len());
    // Inside `rows`, so that a line is stored in one piece where registers are as wide.
    let store = |t: usize, out: &mut [TileOut; PANELS]| {
        kernel.rows(|| {
            for (first, out) in firsts.into_iter().zip(out).take(panels) {
                if factor != 1.0 {
                    out.iter_mut().flatten().for_each(|v| *v *= factor);
                }
                if let Some(bias) = job.bias {
                    let bias = &bias[first..bias.len().min(first + PANEL_COLS)];
                    for line in out.iter_mut() {
                        line.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
                    }
                }
                // SAFETY: these elements are written by this task only: `run` hands every group of panels of every product
                // out once for every share of its rows, shares do not overlap, and no two products have the same rows of
                // the same matrix.
                unsafe { to.store(t * TILE_ROWS, first, out) };
            }
        });
    };
    ROOM.with_borrow_mut(|(codes, floats)| match tiles {
        Tiles::Codes(tiles) => {
            for (panel, first) in codes.iter_mut().zip(firsts).take(panels) {
                panel.shape(job.weight.k(), ty.code_form().expect("a type with codes"));
                kernel.decode_codes(&job.weight, first, panel);
            }
            for ((t, tile), ahead) in range.clone().zip(&tiles[range]).zip(ahead) {
                fetch(ahead);
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
            for ((t, tile), ahead) in range.clone().zip(&tiles[range]).zip(ahead) {
                fetch(ahead);
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
