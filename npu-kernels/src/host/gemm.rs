//! Matrix products: activations times the transpose of a weight matrix.
//!
//! A thread takes two panels of sixteen outputs (of a gate and its other half one each), decodes their weights into its own
//! cache and multiplies all tiles of rows with them. Nothing is repacked ahead of time and nothing is kept, so a run starts
//! without a loading phase.
//! Matrices that take a group of the rows each ([`gemm_grouped`]) share the threads the same way.

use super::acts::{Activations, FloatTile, Tiles};
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
    let tasks = jobs.iter().map(|job| Task {
        part: Part { weight: job.weight, bias: job.bias },
        gated: None,
        out: &job.out,
        tiles: 0..acts.m().div_ceil(TILE_ROWS),
    });
    run(kernel, pool, acts, &tasks.collect::<Vec<_>>());
}

/// What becomes of a gate's outputs and the same ones of the other matrix, one by one: `join(gates, others, out)`, all three of
/// one length.
pub type Join<'a> = &'a (dyn Fn(&[f32], &[f32], &mut [f32]) + Sync);

/// Computes two products and of them at once what `join` makes of each pair of outputs, which is all that is written: half
/// the bytes, and the activation done while they are near.
///
/// # Panics
/// As [`gemm`]; and when the matrices differ in shape or type.
pub fn gemm_gated<K: Kernel>(
    kernel: K,
    pool: &Pool,
    acts: &Activations,
    gate: Part<'_>,
    other: Part<'_>,
    join: Join<'_>,
    out: &Columns<'_>,
) {
    let of = |part: &Part<'_>| (part.weight.ty(), part.weight.n(), part.weight.k());
    assert_eq!(of(&gate), of(&other), "matrices of one type and shape");
    let tiles = 0..acts.m().div_ceil(TILE_ROWS);
    run(kernel, pool, acts, &[Task { part: gate, gated: Some((other, join)), out, tiles }]);
}

/// One matrix and what is added to its product.
#[derive(Copy, Clone)]
pub struct Part<'a> {
    /// The weight matrix.
    pub weight: WeightView<'a>,
    /// Added to every row.
    pub bias: Option<&'a [f32]>,
}

impl Part<'_> {
    /// Makes of the product of codes or floats what the matrix stands for, in the columns from `first` on.
    #[inline(always)]
    fn finish(&self, first: usize, out: &mut TileOut) {
        let factor = self.weight.factor();
        if factor != 1.0 {
            out.iter_mut().flatten().for_each(|v| *v *= factor);
        }
        if let Some(bias) = self.bias {
            let bias = &bias[first..bias.len().min(first + PANEL_COLS)];
            for line in out.iter_mut() {
                line.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
            }
        }
    }
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
        for job in jobs {
            tasks.push(Task { part: job.parts[i], gated: None, out: &job.out, tiles: group.clone() });
        }
    }
    run(kernel, pool, acts, &tasks);
}

/// One product, of some of the rows.
struct Task<'a> {
    part: Part<'a>,
    /// The matrix that `part` is the gate of, and what to do with the two.
    gated: Option<(Part<'a>, Join<'a>)>,
    out: &'a Columns<'a>,
    tiles: Range<usize>,
}

impl Task<'_> {
    /// Outputs that a work item writes: those of two panels, or of one where each output takes two.
    fn width(&self) -> usize {
        if self.gated.is_some() { PANEL_COLS } else { PANELS * PANEL_COLS }
    }

    /// Work items.
    fn items(&self) -> usize {
        self.part.weight.n().div_ceil(self.width())
    }

    /// Where the panels of the item begin that writes outputs from `first` on: two, but for the last task one perhaps.
    fn panels(&self, first: usize) -> impl Iterator<Item = (&Part<'_>, usize)> {
        let second = match &self.gated {
            Some((other, _)) => Some((other, first)),
            None => Some((&self.part, first + PANEL_COLS)).filter(|(part, first)| *first < part.weight.n()),
        };
        std::iter::once((&self.part, first)).chain(second)
    }
}

/// Computes products. No two of them write the same rows of the same matrix: [`gemm`], [`gemm_gated`] and [`gemm_grouped`]
/// see to it.
fn run<K: Kernel>(kernel: K, pool: &Pool, acts: &Activations, tasks: &[Task<'_>]) {
    let n_tiles = acts.m().div_ceil(TILE_ROWS);
    for task in tasks {
        for part in std::iter::once(&task.part).chain(task.gated.as_ref().map(|(other, _)| other)) {
            assert_eq!(part.weight.k(), acts.k(), "inputs of the weight and of the activations");
            assert_eq!(part.weight.n(), task.out.n(), "outputs of the weight and of the matrix");
            assert!(part.bias.is_none_or(|b| b.len() == part.weight.n()), "a bias for every output");
        }
        assert!(task.tiles.end <= n_tiles, "rows of the activations");
    }
    let total: usize = tasks.iter().map(Task::items).sum();
    let most = tasks.iter().map(|task| task.tiles.len()).max().unwrap_or(0);
    // Many threads and few panels: rows are shared out too, and each share decodes its panels again.
    let shares = match total {
        0 => return,
        _ => (TASKS_PER_THREAD * pool.threads()).div_ceil(total).min(most.div_ceil(TILES_PER_SHARE)).max(1),
    };
    // Where each product's work items begin.
    let mut starts = Vec::with_capacity(tasks.len());
    let mut next = 0;
    for task in tasks {
        starts.push(next);
        next += task.items();
    }
    pool.for_each(total * shares, |i| {
        let (item, share) = (i / shares, i % shares);
        let at = starts.partition_point(|&start| start <= item) - 1;
        let task = &tasks[at];
        let n = task.tiles.len();
        let mine = task.tiles.start + share * n / shares..task.tiles.start + (share + 1) * n / shares;
        if !mine.is_empty() {
            product(kernel, acts, task, (item - starts[at]) * task.width(), mine);
        }
    });
}

/// The weights that the thread will most likely decode next, in as many pieces as there are tiles to multiply before: decoding goes
/// over sixteen rows at once, and so waits for memory in a way that no processor foresees.
fn ahead<'a>(weight: &WeightView<'a>, first: usize, pieces: usize) -> impl Iterator<Item = &'a [u8]> + use<'a> {
    let n = weight.n().saturating_sub(first).min(PANEL_COLS);
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

/// The outputs from `first` on, an item's worth of them, of the rows in `range`, counted in tiles.
fn product<K: Kernel>(kernel: K, acts: &Activations, task: &Task<'_>, first: usize, range: Range<usize>) {
    let ty = task.part.weight.ty();
    let (tiles, form) = acts.tiles_for(ty).expect("activations made for this weight type");
    let mut out: [TileOut; PANELS] = [[[0.0; PANEL_COLS]; TILE_ROWS]; PANELS];
    let both = task.panels(first).count() == PANELS;
    let mut ahead = task.panels(first + task.width()).map(|(part, first)| ahead(&part.weight, first, range.len()));
    let mut ahead = [ahead.next(), ahead.next()];
    let mut fetch_some = || ahead.iter_mut().flatten().filter_map(Iterator::next).for_each(fetch);
    // Inside `rows`, so that a line is stored in one piece where registers are as wide.
    let store = |t: usize, out: &mut [TileOut; PANELS]| {
        let put = |first: usize, out: &TileOut| {
            // SAFETY: these elements are written by this item only: `run` hands every group of columns of every product out
            // once for every share of its rows, shares do not overlap, and no two products have the same rows of the same
            // matrix.
            unsafe { task.out.store(t * TILE_ROWS, first, out) }
        };
        kernel.rows(|| {
            for ((part, first), out) in task.panels(first).zip(out.iter_mut()) {
                part.finish(first, out);
                if task.gated.is_none() {
                    put(first, out);
                }
            }
            if let Some((_, join)) = &task.gated {
                let mut joined = [[0.0; PANEL_COLS]; TILE_ROWS];
                join(out[0].as_flattened(), out[1].as_flattened(), joined.as_flattened_mut());
                put(first, &joined);
            }
        });
    };
    ROOM.with_borrow_mut(|(codes, floats)| match tiles {
        Tiles::Codes(tiles) => {
            for (panel, (part, first)) in codes.iter_mut().zip(task.panels(first)) {
                panel.shape(part.weight.k(), ty.code_form().expect("a type with codes"));
                kernel.decode_codes(&part.weight, first, panel);
            }
            for (t, tile) in range.clone().zip(&tiles[range]) {
                fetch_some();
                if both {
                    kernel.mul_code_pair(tile, form, codes, &mut out);
                } else {
                    kernel.mul_codes(tile, form, &codes[0], &mut out[0]);
                }
                store(t, &mut out);
            }
        }
        Tiles::Floats(tiles) => {
            for (panel, (part, first)) in floats.iter_mut().zip(task.panels(first)) {
                panel.shape(part.weight.k(), tiles.first().is_some_and(FloatTile::in_pairs));
                kernel.decode_floats(&part.weight, first, panel);
            }
            for (t, tile) in range.clone().zip(&tiles[range]) {
                fetch_some();
                if both {
                    kernel.mul_float_pair(tile, floats, &mut out);
                } else {
                    kernel.mul_floats(tile, &floats[0], &mut out[0]);
                }
                store(t, &mut out);
            }
        }
    });
}
