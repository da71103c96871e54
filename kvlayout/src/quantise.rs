//! Values into the blocks of the quantised cache types, bit by bit as llama.cpp's CPU code fills its cache on x86: what its
//! `set_rows` calls is `quantize_row_*_ref` of `ggml-quants.c` for all types but q8_0, whose x86 code divides the other way round
//! and rounds ties to even. Sums and products are in f32, in ggml's order, never fused.

use crate::CacheType;
use half::f16;

/// Elements of a block.
pub(crate) const BLOCK: usize = 32;
/// Bytes of the longest block.
pub(crate) const MAX_BYTES: usize = 34;

/// Values that the codes of iq4_nl stand for.
pub(crate) const IQ4_NL: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Blocks whose largest magnitude is below this are zeros in iq4_nl.
const IQ4_NL_ZERO: f32 = 1e-15;

/// Makes `out` the block of `x`, which is finite; false where a scale or minimum is too large for f16.
///
/// # Panics
/// For the types that have no blocks, and when `out` has not a block's bytes.
pub(crate) fn block(ty: CacheType, x: &[f32; BLOCK], out: &mut [u8]) -> bool {
    match ty {
        CacheType::Q8_0 => {
            let amax = x.iter().fold(0f32, |m, v| m.max(v.abs()));
            let inverse = if amax != 0.0 { 127.0 / amax } else { 0.0 };
            out[2..].iter_mut().zip(x).for_each(|(o, v)| *o = (v * inverse).round_ties_even() as i8 as u8);
            put(out, 0, amax / 127.0)
        }
        CacheType::Q4_0 => {
            let (d, inverse) = signed_scale(x, 8.0);
            nibbles(&mut out[2..], |i| ((x[i] * inverse + 8.5) as u8).min(15));
            put(out, 0, d)
        }
        CacheType::Q4_1 => {
            let (min, d, inverse) = range(x, 15.0);
            nibbles(&mut out[4..], |i| (((x[i] - min) * inverse + 0.5) as u8).min(15));
            put(out, 0, d) & put(out, 2, min)
        }
        CacheType::Q5_0 => {
            let (d, inverse) = signed_scale(x, 16.0);
            fives(&mut out[2..], |i| ((x[i] * inverse + 16.5) as u8).min(31));
            put(out, 0, d)
        }
        CacheType::Q5_1 => {
            let (min, d, inverse) = range(x, 31.0);
            fives(&mut out[4..], |i| ((x[i] - min) * inverse + 0.5) as u8);
            put(out, 0, d) & put(out, 2, min)
        }
        CacheType::Iq4Nl => {
            let (d, codes) = iq4_nl(x);
            nibbles(&mut out[2..], |i| codes[i]);
            put(out, 0, d)
        }
        CacheType::F32 | CacheType::F16 | CacheType::Bf16 => panic!("{ty} has no blocks"),
    }
}

/// Writes a scale; whether it is finite.
fn put(out: &mut [u8], at: usize, v: f32) -> bool {
    let half = f16::from_f32(v);
    out[at..at + 2].copy_from_slice(&half.to_le_bytes());
    half.is_finite()
}

/// The first value of the largest magnitude becomes code 0, `-half`: the scale, and what values are multiplied with.
fn signed_scale(x: &[f32; BLOCK], half: f32) -> (f32, f32) {
    let (mut amax, mut max) = (0f32, 0f32);
    for v in x {
        if amax < v.abs() {
            (amax, max) = (v.abs(), *v);
        }
    }
    let d = max / -half;
    (d, if d != 0.0 { 1.0 / d } else { 0.0 })
}

/// The least value becomes code 0, the largest `top`: minimum, scale, and what is multiplied with.
fn range(x: &[f32; BLOCK], top: f32) -> (f32, f32, f32) {
    let min = x.iter().copied().fold(f32::MAX, |m, v| if v < m { v } else { m });
    let max = x.iter().copied().fold(-f32::MAX, |m, v| if v > m { v } else { m });
    let d = (max - min) / top;
    (min, d, if d != 0.0 { 1.0 / d } else { 0.0 })
}

/// Low halves of the bytes: elements 0..16, high halves: 16..32.
fn nibbles(out: &mut [u8], code: impl Fn(usize) -> u8) {
    for (j, o) in out.iter_mut().enumerate() {
        *o = code(j) | code(j + 16) << 4;
    }
}

/// The fifth bits of all elements in four bytes, then nibbles.
fn fives(out: &mut [u8], code: impl Fn(usize) -> u8) {
    let (high, low) = out.split_at_mut(4);
    let codes: [u8; BLOCK] = std::array::from_fn(&code);
    let bits = codes.iter().enumerate().fold(0u32, |bits, (i, c)| bits | u32::from(c >> 4 & 1) << i);
    high.copy_from_slice(&bits.to_le_bytes());
    nibbles(low, |i| codes[i] & 15);
}

/// Scale and codes: the nearest of the uneven steps, then the scale that fits them best where large values weigh more.
fn iq4_nl(x: &[f32; BLOCK]) -> (f32, [u8; BLOCK]) {
    let mut codes = [0; BLOCK];
    let (mut amax, mut max) = (0f32, 0f32);
    for v in x {
        if v.abs() > amax {
            (amax, max) = (v.abs(), *v);
        }
    }
    if amax < IQ4_NL_ZERO {
        return (0.0, codes);
    }
    let inverse = 1.0 / (max / f32::from(IQ4_NL[0]));
    let (mut sum_qx, mut sum_q2) = (0f32, 0f32);
    for (code, v) in codes.iter_mut().zip(x) {
        *code = nearest_iq4(inverse * v);
        let (q, weight) = (f32::from(IQ4_NL[usize::from(*code)]), v * v);
        sum_qx += weight * q * v;
        sum_q2 += weight * q * q;
    }
    (if sum_q2 > 0.0 { sum_qx / sum_q2 } else { 0.0 }, codes)
}

/// The code whose step is nearest; half way, the higher one.
fn nearest_iq4(v: f32) -> u8 {
    let step = |i: usize| f32::from(IQ4_NL[i]);
    // The first step above v; of it and the one below the nearer.
    let above = (0..16).find(|&i| v < step(i)).unwrap_or(16);
    let code = match above {
        0 => 0,
        16 => 15,
        i if v - step(i - 1) < step(i) - v => i - 1,
        i => i,
    };
    code as u8
}
