//! The selective scan of Mamba and Mamba-2: every channel has a small vector of state that forgets and takes up as the
//! position says.
//!
//! With channel value x, step t = softplus(dt), input vector B and output vector C of one position, per state number n:
//!
//! ```text
//! s[n] = s[n] · e^(t · A[n]) + B[n] · x · t
//! y    = Σ s[n] · C[n]
//! ```
//!
//! Mamba has a step and a vector A for every channel; Mamba-2 has one step and one number A for all channels of a head. Both
//! are heads of some channels here, Mamba's of one.

use super::{Channels, dot, gates};
use crate::host::{Kernel, Pool, lanes};

/// Channels of a task.
const BLOCK: usize = 64;

/// The shape.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Heads: as many as there are steps per position.
    pub heads: usize,
    /// Channels of a head.
    pub dim: usize,
    /// State numbers of a channel.
    pub state: usize,
    /// Groups of heads that share B and C.
    pub groups: usize,
}

/// The state of every channel.
#[derive(Clone, PartialEq, Debug)]
pub struct State {
    shape: Shape,
    /// `[head][channel][state]`: as llama.cpp keeps it.
    cell: Vec<f32>,
}

/// A run of positions.
#[derive(Copy, Clone, Debug)]
pub struct Steps<'a> {
    /// Positions.
    pub m: usize,
    /// Values of all channels.
    pub x: Channels<'a>,
    /// Steps of all heads, before softplus, with their bias.
    pub dt: Channels<'a>,
    /// One negative number per head, or a vector of state numbers for each.
    pub a: &'a [f32],
    /// Input vectors, one per group.
    pub b: Channels<'a>,
    /// Output vectors, likewise.
    pub c: Channels<'a>,
}

impl State {
    /// Before the first position: zeros.
    pub fn new(shape: Shape) -> State {
        State { shape, cell: vec![0.0; shape.heads * shape.dim * shape.state] }
    }

    /// The numbers as llama.cpp keeps them: channel after channel.
    pub fn cell(&self) -> &[f32] {
        &self.cell
    }

    /// Goes over the positions. `out` has `m` × channels numbers, in an order of its own: [`gather`] reads it.
    ///
    /// # Panics
    /// When the shapes do not fit, which is the caller's mistake.
    pub fn run<K: Kernel>(&mut self, kernel: K, pool: &Pool, steps: &Steps<'_>, out: &mut [f32]) {
        let Shape { heads, dim, state, groups } = self.shape;
        let m = steps.m;
        let vectors = steps.a.len() == heads * state && state > 1;
        assert!(vectors || steps.a.len() == heads, "one A, or a vector of them, for each of {heads} heads");
        assert!(heads.is_multiple_of(groups), "{heads} heads in {groups} groups");
        assert_eq!(out.len(), m * heads * dim, "an output of {m} positions");
        let mut tasks: Vec<(&mut [f32], &mut [f32])> = Vec::new();
        let mut rest = out;
        for cell in self.cell.chunks_mut(BLOCK * state) {
            let (out, after) = rest.split_at_mut(cell.len() / state * m);
            rest = after;
            tasks.push((cell, out));
        }
        pool.for_each_mut(&mut tasks, |task, (cell, out)| {
            kernel.rows(|| {
                let n = cell.len() / state;
                for (t, out) in out.chunks_exact_mut(n).enumerate() {
                    // The head at hand, its step, and e to the step times A where that is one number.
                    let mut at = (usize::MAX, 0.0, 0.0);
                    for (i, (s, y)) in cell.chunks_exact_mut(state).zip(out).enumerate() {
                        let channel = task * BLOCK + i;
                        let head = channel / dim;
                        if at.0 != head {
                            let step = gates::softplus(steps.dt.get(t, head, 1)[0]);
                            at = (head, step, if vectors { 0.0 } else { (step * steps.a[head]).exp() });
                        }
                        let (_, step, left) = at;
                        let group = head / (heads / groups);
                        let (b, c) = (steps.b.get(t, group * state, state), steps.c.get(t, group * state, state));
                        let x = steps.x.get(t, channel, 1)[0] * step;
                        if vectors {
                            decay(s, &steps.a[head * state..][..state], step);
                        } else {
                            s.iter_mut().for_each(|s| *s *= left);
                        }
                        s.iter_mut().zip(b).for_each(|(s, b)| *s += b * x);
                        *y = dot(s, c);
                    }
                }
            });
        });
    }
}

/// `s *= e^(step · a)`.
#[inline(always)]
fn decay(s: &mut [f32], a: &[f32], step: f32) {
    let one = |s: &mut [f32; 16], a: &[f32; 16]| {
        let mut e = a.map(|a| a * step);
        lanes::exp::<false>(&mut e);
        s.iter_mut().zip(e).for_each(|(s, e)| *s *= e);
    };
    let (chunks, rest) = s.as_chunks_mut::<16>();
    let (a, a_rest) = a.as_chunks::<16>();
    chunks.iter_mut().zip(a).for_each(|(s, a)| one(s, a));
    for (s, a) in rest.iter_mut().zip(a_rest) {
        let mut lane = [*s; 16];
        one(&mut lane, &[*a; 16]);
        *s = lane[0];
    }
}

/// The output of all channels at position `i`, from what [`State::run`] left.
pub fn gather(shape: Shape, out: &[f32], m: usize, i: usize, row: &mut [f32]) {
    for (b, row) in row[..shape.heads * shape.dim].chunks_mut(BLOCK).enumerate() {
        let from = b * BLOCK * m + i * row.len();
        row.copy_from_slice(&out[from..from + row.len()]);
    }
}
