//! The gated delta rule: a square matrix per value head that forgets a little at every position, and is corrected so that
//! the position's key leads to its value.
//!
//! With state S (key × value channels), key k, query q, value v, log decay g and strength b of one position:
//!
//! ```text
//! S = e^g · S            (e^g for each key channel, where the decays differ by channel)
//! S = S + k ⊗ (b · (v - Sᵀk))
//! o = Sᵀq / sqrt(channels)
//! ```

use super::{Channels, dot};
use crate::host::{Kernel, Pool};

/// Rows of a head's state in one task: 16 KiB of 128 channels, which a core keeps at hand while it goes over the positions.
const BLOCK: usize = 32;

/// The shape.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Value heads, each with a state.
    pub heads: usize,
    /// Key heads, a divisor of it.
    pub key_heads: usize,
    /// Channels of a head, keys and values alike.
    pub dim: usize,
    /// Neighbouring value heads read the same key head (Qwen3-Next), or value head h reads key head h mod the number of
    /// key heads (Qwen3.5).
    pub interleaved: bool,
    /// What is left of the state differs by key channel (Kimi Linear), or is one number for a head.
    pub per_channel: bool,
}

impl Shape {
    /// Decays of a position.
    pub fn decays(&self) -> usize {
        self.heads * if self.per_channel { self.dim } else { 1 }
    }

    fn key_head(&self, head: usize) -> usize {
        if self.interleaved { head / (self.heads / self.key_heads) } else { head % self.key_heads }
    }
}

/// The state of every head.
#[derive(Clone, PartialEq, Debug)]
pub struct State {
    shape: Shape,
    /// `[head][value channel][key channel]`: as llama.cpp keeps it.
    cell: Vec<f32>,
}

/// A run of positions.
#[derive(Copy, Clone, Debug)]
pub struct Steps<'a> {
    /// Positions.
    pub m: usize,
    /// Queries of all key heads, of length one.
    pub q: Channels<'a>,
    /// Keys, likewise.
    pub k: Channels<'a>,
    /// Values of all value heads.
    pub v: Channels<'a>,
    /// What is left of the state, e^g, per position and value head, and key channel where decays differ by channel.
    pub left: &'a [f32],
    /// How much of the correction is made, per position and value head.
    pub beta: &'a [f32],
}

impl State {
    /// Before the first position: zeros.
    pub fn new(shape: Shape) -> State {
        State { shape, cell: vec![0.0; shape.heads * shape.dim * shape.dim] }
    }

    /// The numbers as llama.cpp keeps them: head after head, value channel after value channel, along the key channels.
    pub fn cell(&self) -> &[f32] {
        &self.cell
    }

    /// Goes over the positions. `out` has `m` × heads × channels numbers, in an order of its own: [`gather`] reads it.
    ///
    /// # Panics
    /// When the shapes do not fit, which is the caller's mistake.
    pub fn run<K: Kernel>(&mut self, kernel: K, pool: &Pool, steps: &Steps<'_>, out: &mut [f32]) {
        let (shape, m) = (self.shape, steps.m);
        let Shape { heads, dim, .. } = shape;
        assert!(
            steps.left.len() == m * shape.decays() && steps.beta.len() == m * heads,
            "{m} positions of {heads} heads"
        );
        assert_eq!(out.len(), m * heads * dim, "an output of {m} positions");
        let scale = 1.0 / (dim as f32).sqrt();
        let per_head = shape.decays() / heads;
        let mut tasks: Vec<(usize, usize, &mut [f32], &mut [f32])> = Vec::with_capacity(heads * dim.div_ceil(BLOCK));
        let mut rest = out;
        for (head, cell) in self.cell.chunks_exact_mut(dim * dim).enumerate() {
            for (b, rows) in cell.chunks_mut(BLOCK * dim).enumerate() {
                let (out, after) = rest.split_at_mut(rows.len() / dim * m);
                rest = after;
                tasks.push((head, b * BLOCK, rows, out));
            }
        }
        pool.for_each_mut(&mut tasks, |_, (head, first, rows, out)| {
            let key_head = shape.key_head(*head);
            kernel.rows(|| {
                let n = rows.len() / dim;
                for (t, out) in out.chunks_exact_mut(n).enumerate() {
                    let q = steps.q.get(t, key_head * dim, dim);
                    let k = steps.k.get(t, key_head * dim, dim);
                    let v = steps.v.get(t, *head * dim + *first, n);
                    let left = &steps.left[(t * heads + *head) * per_head..][..per_head];
                    let beta = steps.beta[t * heads + *head];
                    for ((row, v), o) in rows.chunks_exact_mut(dim).zip(v).zip(out) {
                        match left {
                            [left] => row.iter_mut().for_each(|s| *s *= left),
                            all => row.iter_mut().zip(all).for_each(|(s, left)| *s *= left),
                        }
                        let delta = (v - dot(row, k)) * beta;
                        row.iter_mut().zip(k).for_each(|(s, k)| *s += k * delta);
                        *o = dot(row, q) * scale;
                    }
                }
            });
        });
    }
}

/// The output of one head at position `i`, from what [`State::run`] left.
pub fn gather(shape: Shape, out: &[f32], m: usize, i: usize, head: usize, row: &mut [f32]) {
    let base = head * shape.dim * m;
    for (b, row) in row[..shape.dim].chunks_mut(BLOCK).enumerate() {
        let from = base + b * BLOCK * m + i * row.len();
        row.copy_from_slice(&out[from..from + row.len()]);
    }
}
