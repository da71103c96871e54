//! The small functions around recurrent layers, over one row. Formulas are ggml's (`vec.h`, `unary-ops.cpp`, `ops.cpp`).

use crate::host::{lanes, rowops};

/// log(1 + e^x), and x itself above 20, where they are the same.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { (1.0 + x.exp()).ln() }
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

#[inline(always)]
fn sigmoids(x: &[f32; 16]) -> [f32; 16] {
    let mut e = x.map(|v| -v);
    lanes::exp::<false>(&mut e);
    e.map(|e| 1.0 / (1.0 + e))
}

/// `x *= sigmoid(x)`.
#[inline(always)]
pub fn silu(x: &mut [f32]) {
    let one = |x: &[f32; 16]| -> [f32; 16] {
        let mut e = x.map(|v| -v);
        lanes::exp::<false>(&mut e);
        std::array::from_fn(|i| x[i] / (1.0 + e[i]))
    };
    let (chunks, rest) = x.as_chunks_mut::<16>();
    chunks.iter_mut().for_each(|x| *x = one(x));
    rest.iter_mut().for_each(|x| *x = one(&[*x; 16])[0]);
}

/// `x *= sigmoid(gate)`.
#[inline(always)]
pub fn sigmoid_mul(x: &mut [f32], gate: &[f32]) {
    let (chunks, rest) = x.as_chunks_mut::<16>();
    let (gates, gate_rest) = gate.as_chunks::<16>();
    for (x, g) in chunks.iter_mut().zip(gates) {
        let s = sigmoids(g);
        x.iter_mut().zip(s).for_each(|(x, s)| *x *= s);
    }
    rest.iter_mut().zip(gate_rest).for_each(|(x, g)| *x *= sigmoids(&[*g; 16])[0]);
}

/// `x *= silu(gate)`.
#[inline(always)]
pub fn silu_mul(x: &mut [f32], gate: &[f32]) {
    let (chunks, rest) = x.as_chunks_mut::<16>();
    let (gates, gate_rest) = gate.as_chunks::<16>();
    for (x, g) in chunks.iter_mut().zip(gates) {
        let s = sigmoids(g);
        (0..16).for_each(|i| x[i] *= g[i] * s[i]);
    }
    rest.iter_mut().zip(gate_rest).for_each(|(x, g)| *x *= g * sigmoids(&[*g; 16])[0]);
}

/// `x / sqrt(sum(x²) + eps)`, computed as an RMS norm with eps / n and a scale of 1/sqrt(n), which is how newer builds of
/// llama.cpp do it. Older ones take `x / max(|x|, eps)`: the same but for rows of next to nothing.
#[inline(always)]
pub fn l2_norm(x: &mut [f32], eps: f32) {
    let n = x.len() as f32;
    let scale = 1.0 / ((rowops::squares(x) / x.len() as f64) as f32 + eps / n).sqrt();
    let rest = 1.0 / n.sqrt();
    x.iter_mut().for_each(|v| *v = *v * scale * rest);
}

/// `x = x / sqrt(mean(x²) + eps) * weight * silu(gate)`.
#[inline(always)]
pub fn gated_rms_norm(x: &mut [f32], weight: &[f32], gate: &[f32], eps: f32) {
    rowops::rms_norm_in_place(x, weight, eps);
    silu_mul(x, gate);
}
