//! The causal convolution: every channel of a position becomes a weighted sum of itself and of the same channel at the
//! positions just before. Before the first position there are zeros.

use super::gates;
use crate::host::{Kernel, Pool};

/// Rows of a task: enough to be worth handing out.
const ROWS: usize = 16;

/// The weights of one convolution.
#[derive(Clone, Debug)]
pub struct CausalConv {
    channels: usize,
    taps: usize,
    /// `[tap][channel]`, the tap of the oldest position first.
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

/// The inputs that the next position still needs: `taps - 1` rows, the oldest first.
#[derive(Clone, PartialEq, Debug)]
pub struct History {
    channels: usize,
    rows: Vec<f32>,
}

impl CausalConv {
    /// From a model's tensors: `weight` is `[channel][tap]` with the oldest position first, `bias` one number per channel.
    /// `None` when the numbers of values do not fit `channels` and `taps`.
    pub fn new(weight: &[f32], channels: usize, taps: usize, bias: Option<Vec<f32>>) -> Option<CausalConv> {
        if channels == 0 || taps == 0 || channels.checked_mul(taps) != Some(weight.len()) {
            return None;
        }
        if bias.as_ref().is_some_and(|b| b.len() != channels) {
            return None;
        }
        let weight = (0..taps).flat_map(|t| (0..channels).map(move |c| weight[c * taps + t])).collect();
        Some(CausalConv { channels, taps, weight, bias })
    }

    /// Channels.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Positions that go into one output.
    pub fn taps(&self) -> usize {
        self.taps
    }

    /// What there is before the first position: zeros.
    pub fn history(&self) -> History {
        History { channels: self.channels, rows: vec![0.0; (self.taps - 1) * self.channels] }
    }

    /// Convolves `input`, a row per position, which goes on where `history` ends; with `silu`, each sum then goes through
    /// x * sigmoid(x). `out` has the shape of `input`.
    ///
    /// # Panics
    /// When the shapes do not fit, which is the caller's mistake.
    pub fn run<K: Kernel>(
        &self,
        kernel: K,
        pool: &Pool,
        input: &[f32],
        history: &mut History,
        silu: bool,
        out: &mut [f32],
    ) {
        let (n, before) = (self.channels, self.taps - 1);
        assert!(input.len() == out.len() && input.len().is_multiple_of(n), "whole rows of {n} channels");
        assert_eq!(history.rows.len(), before * n, "the history of this convolution");
        let old = &history.rows;
        // Row i of what there was before, then of the input.
        let row = |i: usize| if i < before { &old[i * n..][..n] } else { &input[(i - before) * n..][..n] };
        let mut tasks: Vec<&mut [f32]> = out.chunks_mut(ROWS * n).collect();
        pool.for_each_mut(&mut tasks, |task, out| {
            kernel.rows(|| {
                for (i, out) in out.chunks_exact_mut(n).enumerate() {
                    out.fill(0.0);
                    for tap in 0..self.taps {
                        let x = row(task * ROWS + i + tap);
                        let w = &self.weight[tap * n..][..n];
                        out.iter_mut().zip(x).zip(w).for_each(|((o, x), w)| *o += x * w);
                    }
                    if let Some(bias) = &self.bias {
                        out.iter_mut().zip(bias).for_each(|(o, b)| *o += b);
                    }
                    if silu {
                        gates::silu(out);
                    }
                }
            });
        });
        let m = input.len() / n;
        history.rows = (m..m + before).flat_map(row).copied().collect();
    }
}

impl History {
    /// The numbers as llama.cpp keeps them: channel after channel, the oldest position first.
    pub fn to_cell(&self) -> Vec<f32> {
        let before = self.rows.len() / self.channels;
        (0..self.channels).flat_map(|c| (0..before).map(move |t| self.rows[t * self.channels + c])).collect()
    }
}
