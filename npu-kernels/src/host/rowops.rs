//! Operations on one row of activations: norms, rotary embedding, gated activations.
//!
//! Formulas are ggml's CPU ones (`ops.cpp`, `vec.h`), including what it rounds: GELU there is a table over half
//! precision numbers, so it is computed from and to half precision here.

use super::lanes;
use half::f16;
use half::slice::HalfFloatSliceExt;

/// Which two channels a rotation turns.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Pairing {
    /// Neighbours 2i and 2i+1 (llama.cpp's `NORM`).
    Interleaved,
    /// i and i + n_rot/2 (llama.cpp's `NEOX`).
    Halves,
}

/// `1 / sqrt(mean(x²) + eps)`. Squares are f32 and their sum f64, as in `ggml_compute_forward_rms_norm_f32`: a scale
/// that differs in its last bit moves values over the edges between two int8 codes, and one code is a row's noise.
#[inline(always)]
fn rms_scale(x: &[f32], eps: f32) -> f32 {
    1.0 / ((squares(x) / x.len() as f64) as f32 + eps).sqrt()
}

/// `out = x / sqrt(mean(x²) + eps) * weight`.
#[inline(always)]
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = rms_scale(x, eps);
    for ((o, v), w) in out.iter_mut().zip(x).zip(weight) {
        *o = v * scale * w;
    }
}

/// [`rms_norm`] without weights.
#[inline(always)]
pub fn rms_norm_plain(x: &[f32], eps: f32, out: &mut [f32]) {
    let scale = rms_scale(x, eps);
    out.iter_mut().zip(x).for_each(|(o, v)| *o = v * scale);
}

/// The sum of `f` over a row.
#[inline(always)]
fn sum(x: &[f32], f: impl Fn(f32) -> f64) -> f64 {
    let mut sums = [0f64; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for c in chunks {
        sums.iter_mut().zip(c).for_each(|(s, v)| *s += f(*v));
    }
    sums.iter().sum::<f64>() + rest.iter().map(|v| f(*v)).sum::<f64>()
}

/// The sum of squares: f32 squares, added up in f64 as ggml does.
#[inline(always)]
pub(crate) fn squares(x: &[f32]) -> f64 {
    sum(x, |v| f64::from(v * v))
}

/// The sum of squares, which cannot overflow.
#[inline(always)]
pub(crate) fn squares_f64(x: &[f32]) -> f64 {
    sum(x, |v| f64::from(v) * f64::from(v))
}

/// `out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`. Sums are f64; ggml adds up in f32, in an order of its
/// own for each instruction set.
#[inline(always)]
pub fn layer_norm(x: &[f32], weight: Option<&[f32]>, bias: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    let mean = (sum(x, f64::from) / x.len() as f64) as f32;
    let variance = (sum(x, |v| f64::from((v - mean) * (v - mean))) / x.len() as f64) as f32;
    let scale = 1.0 / (variance + eps).sqrt();
    out.iter_mut().zip(x).for_each(|(o, v)| *o = (v - mean) * scale);
    if let Some(weight) = weight {
        out.iter_mut().zip(weight).for_each(|(o, w)| *o *= w);
    }
    if let Some(bias) = bias {
        out.iter_mut().zip(bias).for_each(|(o, b)| *o += b);
    }
}

/// [`rms_norm`] in place.
#[inline(always)]
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = rms_scale(x, eps);
    x.iter_mut().zip(weight).for_each(|(v, w)| *v = *v * scale * w);
}

/// `x += y`.
#[inline(always)]
pub fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// `x += y * scale`, the product rounded first.
#[inline(always)]
pub fn add_scaled(x: &mut [f32], y: &[f32], scale: f32) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y * scale);
}

/// Turns the first `2 * cos.len()` channels of one head.
#[inline(always)]
pub fn rope(head: &mut [f32], pairing: Pairing, cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    match pairing {
        Pairing::Interleaved => {
            for ((pair, c), s) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                let [a, b] = *pair;
                *pair = [a * c - b * s, a * s + b * c];
            }
        }
        Pairing::Halves => {
            let (low, high) = head[..2 * half].split_at_mut(half);
            for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
            }
        }
    }
}

/// `g * sigmoid(g)`. A function, since a closure that is not inlined has none of the caller's instructions.
#[inline(always)]
fn silu16(g: &[f32; 16]) -> [f32; 16] {
    let mut e = g.map(|v| -v);
    lanes::exp::<false>(&mut e);
    std::array::from_fn(|i| g[i] / (1.0 + e[i]))
}

/// `out = gate * sigmoid(gate) * up`.
#[inline(always)]
pub fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    let (g, g_rest) = gate.as_chunks::<16>();
    let (u, u_rest) = up.as_chunks::<16>();
    let (o, o_rest) = out.as_chunks_mut::<16>();
    for ((g, u), o) in g.iter().zip(u).zip(o) {
        let s = silu16(g);
        *o = std::array::from_fn(|i| s[i] * u[i]);
    }
    for ((g, u), o) in g_rest.iter().zip(u_rest).zip(o_rest) {
        *o = silu16(&[*g; 16])[0] * u;
    }
}

#[inline(always)]
fn swiglu16(g: &[f32; 16], u: &[f32; 16]) -> [f32; 16] {
    const ALPHA: f32 = 1.702;
    const LIMIT: f32 = 7.0;
    // Not `min`, which would turn NaN into a number.
    let g = g.map(|v| if v > LIMIT { LIMIT } else { v });
    let mut e = g.map(|v| -v * ALPHA);
    lanes::exp::<false>(&mut e);
    std::array::from_fn(|i| g[i] / (1.0 + e[i]) * (u[i].clamp(-LIMIT, LIMIT) + 1.0))
}

/// `out = g * sigmoid(1.702 * g) * (u + 1)` with g the gate, at most 7, and u the other, within ±7 (ggml's `swiglu_oai` with
/// the numbers that gpt-oss has).
#[inline(always)]
pub fn swiglu_oai(gate: &[f32], up: &[f32], out: &mut [f32]) {
    let (g, g_rest) = gate.as_chunks::<16>();
    let (u, u_rest) = up.as_chunks::<16>();
    let (o, o_rest) = out.as_chunks_mut::<16>();
    for ((g, u), o) in g.iter().zip(u).zip(o) {
        *o = swiglu16(g, u);
    }
    for ((g, u), o) in g_rest.iter().zip(u_rest).zip(o_rest) {
        *o = swiglu16(&[*g; 16], &[*u; 16])[0];
    }
}

/// `out = max(gate, 0) * up`.
#[inline(always)]
pub fn relu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((g, u), o) in gate.iter().zip(up).zip(out) {
        *o = if *g <= 0.0 { 0.0 } else { g * u };
    }
}

/// `out = x * sigmoid(x)`.
#[inline(always)]
pub fn silu(x: &[f32], out: &mut [f32]) {
    out.iter_mut().zip(x).for_each(|(o, v)| {
        let mut e = [-v; 16];
        lanes::exp::<false>(&mut e);
        *o = v / (1.0 + e[0]);
    });
}

/// `out = max(x, 0)²`.
#[inline(always)]
pub fn relu_squared(x: &[f32], out: &mut [f32]) {
    out.iter_mut().zip(x).for_each(|(o, v)| {
        // NaN stays NaN.
        *o = if *v <= 0.0 { 0.0 } else { v * v };
    });
}

/// The numbers of [`xielu`], as ggml's operation takes them.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Xielu {
    /// Below zero.
    pub alpha_n: f32,
    /// Above.
    pub alpha_p: f32,
    /// Of the linear part.
    pub beta: f32,
    /// The exponential is not taken of more than this.
    pub eps: f32,
}

/// `out = alpha_p x² + beta x` above zero, `alpha_n (exp(min(x, eps)) - 1 - x) + beta x` below.
#[inline(always)]
pub fn xielu(x: &[f32], n: &Xielu, out: &mut [f32]) {
    out.iter_mut().zip(x).for_each(|(o, &v)| {
        *o =
            if v > 0.0 { n.alpha_p * v * v + n.beta * v } else { (v.min(n.eps).exp_m1() - v) * n.alpha_n + n.beta * v };
    });
}

#[inline(always)]
fn gelu16(x: &[f32; 16]) -> [f32; 16] {
    // tanh(y) = 1 - 2 / (exp(2y) + 1), so 0.5 * x * (1 + tanh(y)) = x - x / (exp(2y) + 1).
    let mut e = x.map(|x| 2.0 * 0.797_884_6 * x * (1.0 + 0.044_715 * x * x));
    lanes::exp::<false>(&mut e);
    std::array::from_fn(|i| x[i] - x[i] / (e[i] + 1.0))
}

/// `out = gelu(x)`, GELU in its tanh form, from and to half precision for |x| < 10 as ggml's table has it.
#[inline(always)]
pub fn gelu(x: &[f32], out: &mut [f32], half_buffer: &mut Vec<f16>) {
    half_buffer.resize(x.len(), f16::ZERO);
    half_buffer.convert_from_f32_slice(x);
    half_buffer.convert_to_f32_slice(out);
    let (chunks, rest) = out.as_chunks_mut::<16>();
    // Loops, since an adapter of iterators that is not inlined has none of the caller's instructions.
    for x in chunks {
        *x = gelu16(x);
    }
    for x in rest {
        *x = gelu16(&[*x; 16])[0];
    }
    half_buffer.convert_from_f32_slice(out);
    half_buffer.convert_to_f32_slice(out);
    for (o, x) in out.iter_mut().zip(x) {
        if *x <= -10.0 {
            *o = 0.0;
        } else if *x >= 10.0 {
            *o = *x;
        }
    }
}

/// `out = gelu(gate) * up`; see [`gelu`].
#[inline(always)]
pub fn gelu_mul(gate: &[f32], up: &[f32], out: &mut [f32], half_buffer: &mut Vec<f16>) {
    gelu(gate, out, half_buffer);
    out.iter_mut().zip(up).for_each(|(o, u)| *o *= u);
}
