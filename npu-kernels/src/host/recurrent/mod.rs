//! What recurrent layers do between their projections: a short convolution along the positions, a state that is carried
//! from position to position, and the gates around both.
//!
//! * [`conv`]: the causal convolution of every channel with itself, and its history.
//! * [`delta`]: the gated delta rule (Qwen3-Next, Qwen3.5, Kimi Linear).
//! * [`scan`]: the selective scan (Mamba and Mamba-2).
//! * [`gates`]: softplus, sigmoid, L2 norm, gated norms, over one row.
//!
//! Positions are taken one after the other, in f32, as ggml's CPU path does it (`ssm_conv`, `gated_delta_net` and `ssm_scan`
//! in its `ops.cpp`). So the result does not depend on how a prompt is cut into chunks, not in a bit. Threads share the
//! heads out, or rows of a head's state, which do not depend on each other.

pub mod conv;
pub mod delta;
pub mod gates;
pub mod scan;

/// A matrix with one row per position, of which only some channels are meant.
#[derive(Copy, Clone, Debug)]
pub struct Channels<'a> {
    /// The rows, one after the other.
    pub rows: &'a [f32],
    /// Numbers from one row to the next.
    pub stride: usize,
    /// The first channel that is meant.
    pub first: usize,
}

impl<'a> Channels<'a> {
    /// A matrix of `width` channels, all of which are meant.
    pub fn all(rows: &'a [f32], width: usize) -> Self {
        Channels { rows, stride: width, first: 0 }
    }

    /// `n` channels of position `i`, from channel `from` on.
    #[inline(always)]
    pub fn get(&self, i: usize, from: usize, n: usize) -> &'a [f32] {
        &self.rows[i * self.stride + self.first + from..][..n]
    }
}

/// The sum of products, in sixteen sums side by side.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; 16];
    let (a, a_rest) = a.as_chunks::<16>();
    let (b, b_rest) = b.as_chunks::<16>();
    for (a, b) in a.iter().zip(b) {
        for l in 0..16 {
            sums[l] += a[l] * b[l];
        }
    }
    sums.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}
