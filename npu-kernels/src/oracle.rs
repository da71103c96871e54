//! What the kernels are compared with: the plainest possible code, in double precision, over whole matrices.

use crate::catalogue::{Layout, Spec, Type};
use crate::host::attention::Window;
use crate::host::blocks;
use crate::pack::{self, bfp16, blocked, q4nx};
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
            out[n] = row.iter().zip(&values).map(|(a, w)| a * f64::from(*w)).sum::<f64>() * f64::from(weight.factor());
        }
        if weight.ty().activation() == ActKind::Q8Block32 && weight.ty().code_form().is_some_and(|f| f.has_min) {
            for (row, out) in acts.iter().zip(&mut out) {
                out[n] += rounded_sums(weight, n, row) * f64::from(weight.factor());
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

/// Attention of one head: `q[i]` at position `first + i` over `keys` and `values`, causal, with a window of the last positions or of chunks. The sink is one
/// more score, without a value.
pub fn attention(
    q: &[Vec<f32>],
    first: usize,
    keys: &[Vec<f32>],
    values: &[Vec<f32>],
    scale: f64,
    window: Option<Window>,
    sink: Option<f64>,
) -> Vec<Vec<f64>> {
    q.iter()
        .enumerate()
        .map(|(i, q)| {
            let at = first + i;
            let low = match window {
                None => 0,
                Some(Window::Last(w)) => (at + 1).saturating_sub(w),
                Some(Window::Chunk(w)) => at - at % w,
            };
            let dot = |k: &[f32]| q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() * scale;
            let scores: Vec<f64> = keys[low..=at].iter().map(|k| dot(k)).collect();
            let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let total: f64 = weights.iter().sum::<f64>() + sink.map_or(0.0, |s| (s - max).exp());
            (0..values[0].len())
                .map(|d| weights.iter().zip(&values[low..]).map(|(w, v)| w * f64::from(v[d])).sum::<f64>() / total)
                .collect()
        })
        .collect()
}

/// A causal convolution: `input[i][channel]`, `weight[channel][tap]` with the oldest position first, zeros before the first
/// position; with `silu`, x * sigmoid(x) of every sum.
pub fn causal_conv(input: &[Vec<f32>], weight: &[Vec<f32>], bias: Option<&[f32]>, silu: bool) -> Vec<Vec<f64>> {
    let taps = weight[0].len();
    let value = |i: usize, c: usize| {
        let mut sum = bias.map_or(0.0, |b| f64::from(b[c]));
        for (tap, w) in weight[c].iter().enumerate() {
            if let Some(at) = (i + tap + 1).checked_sub(taps) {
                sum += f64::from(*w) * f64::from(input[at][c]);
            }
        }
        if silu { sum / (1.0 + (-sum).exp()) } else { sum }
    };
    (0..input.len()).map(|i| (0..weight.len()).map(|c| value(i, c)).collect()).collect()
}

/// One position of one head for [`delta_rule`]: query, key, value, logarithm of the decay of each key channel, strength.
pub type DeltaStep = (Vec<f32>, Vec<f32>, Vec<f32>, Vec<f32>, f32);

/// The gated delta rule of one head. Outputs of all positions, and the state `[key channel][value channel]` after them.
pub fn delta_rule(steps: &[DeltaStep]) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let d = steps[0].1.len();
    let mut state = vec![vec![0f64; d]; d];
    let mut out = Vec::new();
    for (q, k, v, decay, beta) in steps {
        let read =
            |state: &[Vec<f64>], by: &[f32], j: usize| -> f64 { (0..d).map(|i| state[i][j] * f64::from(by[i])).sum() };
        for (row, decay) in state.iter_mut().zip(decay) {
            row.iter_mut().for_each(|s| *s *= f64::from(*decay).exp());
        }
        let wrong: Vec<f64> = (0..d).map(|j| f64::from(v[j]) - read(&state, k, j)).collect();
        for i in 0..d {
            for j in 0..d {
                state[i][j] += f64::from(k[i]) * f64::from(*beta) * wrong[j];
            }
        }
        out.push((0..d).map(|j| read(&state, q, j) / (d as f64).sqrt()).collect());
    }
    (out, state)
}

/// One position of one channel for [`selective_scan`]: value, step before softplus, input and output vector.
pub type ScanStep = (f32, f32, Vec<f32>, Vec<f32>);

/// The selective scan of one channel with the decays `a`. Outputs of all positions, and the state after them.
pub fn selective_scan(a: &[f32], steps: &[ScanStep]) -> (Vec<f64>, Vec<f64>) {
    let mut state = vec![0f64; a.len()];
    let mut out = Vec::new();
    for (x, dt, b, c) in steps {
        let step = f64::from(*dt).exp().ln_1p();
        for (n, s) in state.iter_mut().enumerate() {
            *s = *s * (step * f64::from(a[n])).exp() + f64::from(b[n]) * f64::from(*x) * step;
        }
        out.push(state.iter().zip(c).map(|(s, c)| s * f64::from(*c)).sum());
    }
    (out, state)
}

/// What a catalogued kernel computes, from operands as they lie in memory: `C[m][n] = A[m][k] · B[k][n]`. Integers exactly,
/// everything else in double precision and rounded once, to nearest, at the end.
///
/// # Panics
/// When the spec is not sound or an operand has another size.
pub fn gemm(spec: &Spec, a: &[u8], b: &[u8]) -> Vec<u8> {
    let [a_bytes, b_bytes, _] = spec.bytes();
    assert!(a.len() == a_bytes && b.len() == b_bytes, "operands of {spec}");
    let (m, k, n) = (spec.m, spec.k, spec.n);
    if spec.is_int8() {
        // B as [n][k].
        let b = match spec.b.layout {
            Layout::Blocked64x128 => blocked::unpack(b, n, k, k, n),
            _ => pack::unpack_row_major_b(b, n, k, k, n),
        };
        let product = |i: usize, j: usize| -> i64 {
            let (a, b) = (&a[i * k..][..k], &b[j * k..][..k]);
            a.iter().zip(b).map(|(a, b)| i64::from(a.cast_signed()) * i64::from(*b)).sum()
        };
        let int = &|i: usize, j: usize| i32::try_from(product(i, j)).expect("K is small enough").to_le_bytes();
        return (0..m).flat_map(|i| (0..n).flat_map(move |j| int(i, j))).collect();
    }
    let a: Vec<f64> = match spec.a.ty {
        Type::Bfp16 => bfp16::values(a).expect("whole blocks"),
        _ => a.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f64()).collect(),
    };
    let b: Vec<f64> = match spec.b.ty {
        Type::Bfp16 => bfp16::values(b).expect("whole blocks"),
        _ => q4nx::values(b, n, k).expect("whole tiles"),
    };
    let product =
        |i: usize, j: usize| -> f64 { a[i * k..][..k].iter().zip(&b[j * k..][..k]).map(|(a, b)| a * b).sum() };
    let product = &product;
    (0..m).flat_map(|i| (0..n).flat_map(move |j| (product(i, j) as f32).to_le_bytes())).collect()
}
