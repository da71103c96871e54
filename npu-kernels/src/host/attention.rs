//! Attention: queries against the keys and values of one key-value head, blocked, with an online softmax.
//!
//! Keys are kept in panels of sixteen positions, transposed, so that one register holds one channel of sixteen keys;
//! values as rows. A tile of query rows walks over blocks of [`KEY_BLOCK`] keys and carries the running maximum and
//! sum of each row, so no score matrix is ever whole. Masked blocks are not visited.
//!
//! The products are of f32, or of 16-bit integers with scales (`words`). Keys and values come in rounded to the decoder's
//! cache type, since that is what the decoder's own attention would read.

use super::panel::FloatLine;
use super::words::{WordQueries, WordRows};
use super::{Columns, Kernel, PANEL_COLS, Pool, TILE_ROWS};
use std::cell::RefCell;

/// Keys that a tile looks at between two corrections of its running maximum.
pub const KEY_BLOCK: usize = 256;

/// What the products of attention are of.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Products {
    /// f32 throughout.
    Floats,
    /// 16-bit integers with a scale for each row: of keys and values, of queries, and of weights.
    Words,
}

/// Keys and values of one key-value head for the positions so far.
pub struct HeadCache {
    head_k: usize,
    head_v: usize,
    rows: Rows,
    len: usize,
}

/// What a cache holds.
pub(crate) enum Rows {
    Floats(FloatRows),
    Words(WordRows),
}

pub(crate) struct FloatRows {
    /// `[position / 16][channel]` lines of sixteen positions.
    keys: Vec<FloatLine>,
    /// `[position][lines]` lines of channels.
    values: Vec<FloatLine>,
    head_k: usize,
    /// Lines of a value row.
    lines: usize,
}

impl FloatRows {
    fn new(head_k: usize, head_v: usize, positions: usize) -> FloatRows {
        let lines = head_v.div_ceil(PANEL_COLS);
        let values = vec![FloatLine::ZERO; positions * lines];
        let keys = vec![FloatLine::ZERO; positions.div_ceil(PANEL_COLS) * head_k];
        FloatRows { keys, values, head_k, lines }
    }

    fn set(&mut self, at: usize, key: &[f32], value: &[f32]) {
        let (group, lane) = (at / PANEL_COLS, at % PANEL_COLS);
        let panel = &mut self.keys[group * self.head_k..][..self.head_k];
        panel.iter_mut().zip(key).for_each(|(line, k)| line.0[lane] = *k);
        for (line, part) in self.values[at * self.lines..].iter_mut().zip(value.chunks(PANEL_COLS)) {
            line.0[..part.len()].copy_from_slice(part);
        }
    }

    /// Keys `16 * group ..`, a line per channel.
    pub(crate) fn key_panel(&self, group: usize) -> &[FloatLine] {
        &self.keys[group * self.head_k..][..self.head_k]
    }

    /// Values of `n` positions from `first` on.
    pub(crate) fn value_rows(&self, first: usize, n: usize) -> &[FloatLine] {
        &self.values[first * self.lines..][..n * self.lines]
    }
}

impl HeadCache {
    /// An empty cache with room for `positions`.
    pub fn new(products: Products, head_k: usize, head_v: usize, positions: usize) -> Self {
        let rows = match products {
            Products::Floats => Rows::Floats(FloatRows::new(head_k, head_v, positions)),
            Products::Words => Rows::Words(WordRows::new(head_k, head_v, positions)),
        };
        HeadCache { head_k, head_v, rows, len: 0 }
    }

    /// Bytes that a cache of this shape takes at most.
    pub fn bytes(head_k: usize, head_v: usize, positions: usize) -> usize {
        let lines = positions.div_ceil(PANEL_COLS) * head_k + positions * head_v.div_ceil(PANEL_COLS);
        (lines * size_of::<FloatLine>()).max(WordRows::bytes(head_k, head_v, positions))
    }

    /// Forgets every position.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Appends the key and value of the next position.
    #[inline(always)]
    pub fn push(&mut self, key: &[f32], value: &[f32]) {
        assert!(key.len() == self.head_k && value.len() == self.head_v, "one head's row");
        match &mut self.rows {
            Rows::Floats(rows) => rows.set(self.len, key, value),
            Rows::Words(rows) => rows.set(self.len, key, value),
        }
        self.len += 1;
    }

    /// What it is for.
    pub fn products(&self) -> Products {
        match self.rows {
            Rows::Floats(_) => Products::Floats,
            Rows::Words(_) => Products::Words,
        }
    }

    /// Channels of a key.
    pub fn head_k(&self) -> usize {
        self.head_k
    }

    /// Channels of a value.
    pub fn head_v(&self) -> usize {
        self.head_v
    }

    /// Lines of a value row.
    pub(crate) fn value_lines(&self) -> usize {
        self.head_v.div_ceil(PANEL_COLS)
    }

    pub(crate) fn rows(&self) -> &Rows {
        &self.rows
    }
}

/// What a row sees of the positions up to its own.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Window {
    /// The last so many, its own included.
    Last(usize),
    /// Those in its own of the chunks of so many that positions are cut into (Llama 4).
    Chunk(usize),
}

impl Window {
    /// The first position that the row at position `row` sees. It never falls from one row to the next.
    #[inline(always)]
    pub fn low(self, row: usize) -> usize {
        match self {
            Window::Last(n) => (row + 1).saturating_sub(n),
            Window::Chunk(n) => row / n * n,
        }
    }
}

/// Up to [`TILE_ROWS`] query rows of one head, at consecutive positions.
pub struct Task<'a> {
    /// Row `i`'s query starts at `i * q_stride`.
    pub q: &'a [f32],
    /// Distance of rows in `q`.
    pub q_stride: usize,
    /// Rows: 1 to [`TILE_ROWS`].
    pub rows: usize,
    /// Position of row 0. The cache holds at least the positions up to the last row's.
    pub first: usize,
    /// Multiplies every score.
    pub scale: f32,
    /// Scores s become `cap * tanh(s / cap)` then.
    pub softcap: Option<f32>,
    /// What a score loses for each position between query and key (ALiBi), by the distance as an f16 holds it.
    pub slope: f32,
    /// What rows see; everything up to themselves without a window.
    pub window: Option<Window>,
    /// The head's sink: a score that joins the sum of weights and has no value.
    pub sink: Option<f32>,
    /// Keys and values.
    pub cache: &'a HeadCache,
}

/// A thread's working memory.
#[derive(Default)]
pub struct Scratch {
    pub(crate) q: Vec<f32>,
    pub(crate) scores: Vec<f32>,
    pub(crate) acc: Vec<FloatLine>,
    /// Queries in integers.
    pub(crate) words: WordQueries,
    /// `[row][key]` weights in integers, rows [`KEY_BLOCK`] long.
    pub(crate) codes: Vec<i16>,
}

impl Scratch {
    pub(crate) fn shape(&mut self, value_lines: usize) {
        self.scores.resize(KEY_BLOCK * TILE_ROWS, 0.0);
        self.acc.resize(value_lines * TILE_ROWS, FloatLine::ZERO);
    }
}

/// All query heads of a layer, over a chunk of positions.
pub struct Heads<'a> {
    /// `[row][n_head * head_k]` queries.
    pub q: &'a [f32],
    /// Query heads; a multiple of the key-value heads. Head h reads key-value head h / (n_head / n_head_kv).
    pub n_head: usize,
    /// One per key-value head, filled up to the last row's position.
    pub caches: &'a [HeadCache],
    /// Rows.
    pub m: usize,
    /// Position of row 0.
    pub first: usize,
    /// Multiplies every score.
    pub scale: f32,
    /// See [`Task::softcap`].
    pub softcap: Option<f32>,
    /// [`Task::slope`] of each query head; none at all for no penalty.
    pub slopes: &'a [f32],
    /// See [`Task::window`].
    pub window: Option<Window>,
    /// One per query head, in models that have them; see [`Task::sink`].
    pub sinks: Option<&'a [f32]>,
    /// `[row][n_head * head_v]` results.
    pub out: &'a mut [f32],
}

thread_local! {
    static SCRATCH: RefCell<(Scratch, Vec<f32>)> = RefCell::default();
}

/// Computes them on all threads.
///
/// # Panics
/// When a slice has not the length that its documentation says.
pub fn attention<K: Kernel>(kernel: K, pool: &Pool, heads: Heads<'_>) {
    let Heads { q, n_head, caches, m, first, scale, softcap, slopes, window, sinks, out } = heads;
    let (hk, hv) = (caches[0].head_k(), caches[0].head_v());
    let group = n_head / caches.len();
    assert!(group * caches.len() == n_head && q.len() == m * n_head * hk, "queries of {n_head} heads");
    assert!(slopes.is_empty() || slopes.len() == n_head, "a slope for every head");
    assert!(caches.iter().all(|c| c.len >= first + m), "keys of every position");
    assert!(sinks.is_none_or(|s| s.len() == n_head), "a sink for every head");
    let out = Columns::new(out, m, n_head * hv);
    let tiles = m.div_ceil(TILE_ROWS);
    pool.for_each(tiles * n_head, |i| {
        // Late tiles see the most keys: they go first, so that no thread is left alone with a long one.
        let (t, h) = (tiles - 1 - i / n_head, i % n_head);
        let rows = (m - t * TILE_ROWS).min(TILE_ROWS);
        let task = Task {
            q: &q[(t * TILE_ROWS * n_head + h) * hk..],
            q_stride: n_head * hk,
            rows,
            first: first + t * TILE_ROWS,
            scale,
            softcap,
            slope: slopes.get(h).copied().unwrap_or(0.0),
            window,
            sink: sinks.map(|s| s[h]),
            cache: &caches[h / group],
        };
        SCRATCH.with_borrow_mut(|(scratch, result)| {
            result.resize(rows * hv, 0.0);
            kernel.attend(&task, scratch, result);
            for (r, line) in result.chunks_exact(hv).enumerate() {
                // SAFETY: rows of tile t and columns of head h belong to this task only.
                unsafe { out.part(t * TILE_ROWS + r, h * hv, hv) }.copy_from_slice(line);
            }
        });
    });
}
