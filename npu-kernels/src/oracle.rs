//! What the kernels are compared with: the plainest possible code, in double precision, over whole matrices.

use crate::host::blocks;
use crate::weight::{ActKind, WeightView};
use half::{bf16, f16};

/// One row of activations as a product with a weight of this kind sees it: rounded, as values.
pub fn rounded(kind: ActKind, row: &[f32]) -> Vec<f64> {
    match kind {
        ActKind::F32 => row.iter().map(|v| f64::from(*v)).collect(),
        ActKind::F16 => row.iter().map(|v| f16::from_f32(*v).to_f64()).collect(),
        ActKind::Bf16 => row.iter().map(|v| bf16::from_f32(*v).to_f64()).collect(),
        ActKind::Q8Block32 => row.chunks(32).flat_map(block32).collect(),
        ActKind::Q8Block256 => row.chunks(256).flat_map(block256).collect(),
    }
}

fn block32(x: &[f32]) -> Vec<f64> {
    let amax = x.iter().fold(0f32, |m, v| m.max(v.abs()));
    let inverse = if amax > 0.0 { 127.0 / amax } else { 0.0 };
    let scale = f16::from_f32(amax / 127.0).to_f64();
    x.iter().map(|v| scale * f64::from((v * inverse).round_ties_even())).collect()
}

fn block256(x: &[f32]) -> Vec<f64> {
    let mut max = 0f32;
    for v in x {
        if v.abs() > max.abs() {
            max = *v;
        }
    }
    if max == 0.0 {
        return vec![0.0; x.len()];
    }
    let inverse = -127.0 / max;
    let scale = f64::from(1.0 / inverse);
    x.iter().map(|v| scale * f64::from((v * inverse).round_ties_even().min(127.0))).collect()
}

/// `out[m][n]`: every row of `acts` (rounded to the weight's partner kind) times every row of `weight`.
pub fn product(acts: &[Vec<f32>], weight: &WeightView<'_>) -> Vec<Vec<f64>> {
    let rows: Vec<Vec<f64>> = acts.iter().map(|row| rounded(weight.ty().activation(), row)).collect();
    let mut values = vec![0f32; weight.k()];
    let mut out = vec![vec![0f64; weight.n()]; acts.len()];
    for n in 0..weight.n() {
        blocks::row_values(weight.ty(), weight.row(n), &mut values);
        for (row, out) in rows.iter().zip(&mut out) {
            out[n] = row.iter().zip(&values).map(|(a, w)| a * f64::from(*w)).sum();
        }
        if weight.ty().activation() == ActKind::Q8Block32 && weight.ty().code_form().is_some_and(|f| f.has_min) {
            for (row, out) in acts.iter().zip(&mut out) {
                out[n] += rounded_sums(weight, n, row);
            }
        }
    }
    out
}

/// ggml keeps the sum of a `Q8_1` block, which minima are multiplied with, as f16: what that changes.
fn rounded_sums(weight: &WeightView<'_>, n: usize, row: &[f32]) -> f64 {
    let blocks = row.chunks(32).enumerate().map(|(b, x)| {
        let amax = x.iter().fold(0f32, |m, v| m.max(v.abs()));
        let inverse = if amax > 0.0 { 127.0 / amax } else { 0.0 };
        let sum: f32 = x.iter().map(|v| (v * inverse).round_ties_even()).sum();
        let exact: f64 = block32(x).iter().sum();
        let min = f64::from(blocks::decode(weight.ty(), weight.row(n), b).min[0]);
        min * (f16::from_f32(amax / 127.0 * sum).to_f64() - exact)
    });
    blocks.sum()
}

/// Attention of one head: `q[i]` at position `first + i` over `keys` and `values`, causal, with a window.
pub fn attention(
    q: &[Vec<f32>],
    first: usize,
    keys: &[Vec<f32>],
    values: &[Vec<f32>],
    scale: f64,
    window: Option<usize>,
) -> Vec<Vec<f64>> {
    q.iter()
        .enumerate()
        .map(|(i, q)| {
            let at = first + i;
            let low = window.map_or(0, |w| (at + 1).saturating_sub(w));
            let dot = |k: &[f32]| q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() * scale;
            let scores: Vec<f64> = keys[low..=at].iter().map(|k| dot(k)).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let total: f64 = weights.iter().sum();
            (0..values[0].len())
                .map(|d| weights.iter().zip(&values[low..]).map(|(w, v)| w * f64::from(v[d])).sum::<f64>() / total)
                .collect()
        })
        .collect()
}
