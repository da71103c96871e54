//! The types of fewer than three bits and their kin to f32, as `dequant` has the others: codebook types (IQ1, IQ2, IQ3), ternary ones
//! (TQ1_0, TQ2_0), NVFP4, and Q1_0 and Q2_0.
//!
//! Bit-equal to `quants.dequantize` of the `gguf` Python package where it has the type; Q1_0 and Q2_0, which are younger, follow
//! ggml's `dequantize_row_q1_0` and `dequantize_row_q2_0`.

use crate::dequant::{half_at, scale};
use crate::grids;

/// Writes eight (or four) values of a codebook times `d`; bit j of `signs` turns value j around.
fn signed(y: &mut [f32], d: f32, magnitudes: impl Iterator<Item = u8>, signs: u8) {
    for (j, (y, m)) in y.iter_mut().zip(magnitudes).enumerate() {
        let v = d * f32::from(m);
        *y = if signs >> j & 1 == 1 { -v } else { v };
    }
}

/// Seven stored signs; the eighth makes their number even.
fn signs(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | ((seven.count_ones() & 1) as u8) << 7
}

fn iq2(word: u16) -> impl Iterator<Item = u8> {
    (0..8).map(move |j| grids::IQ2[usize::from(word >> (2 * j) & 3) % 3])
}

fn iq3_xxs(word: u16) -> impl Iterator<Item = u8> {
    (0..4).map(move |j| grids::IQ3[usize::from(word >> (3 * j) & 7)])
}

fn iq3_s(word: u16) -> impl Iterator<Item = u8> {
    (0..4).map(move |j| 2 * (word >> (3 * j) & 7) as u8 + 1)
}

fn word(b: &[u8], i: usize) -> u16 {
    u16::from_le_bytes([b[2 * i], b[2 * i + 1]])
}

fn long(b: &[u8], i: usize) -> u32 {
    u32::from_le_bytes([b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3]])
}

/// Half-byte `i`, the low one first.
fn nibble(b: &[u8], i: usize) -> u8 {
    b[i / 2] >> (i % 2 * 4) & 15
}

/// d: f16, 8 x (4 x 8 bits index, 4 x 7 bits signs, 4 bits scale).
pub(crate) fn iq2_xxs(b: &[u8; 66], y: &mut [f32; 256]) {
    let d = half_at(b, 0);
    for (g, y) in y.chunks_exact_mut(32).enumerate() {
        let at = long(&b[2..], 2 * g + 1);
        let d = d * (0.5 + (at >> 28) as f32) * 0.25;
        for (l, y) in y.chunks_exact_mut(8).enumerate() {
            signed(y, d, iq2(grids::IQ2_XXS[usize::from(b[2 + 8 * g + l])]), signs(at >> (7 * l)));
        }
    }
}

/// d: f16, 32 x (9 bits index, 7 bits signs), 16 x 4 bits scale.
pub(crate) fn iq2_xs(b: &[u8; 74], y: &mut [f32; 256]) {
    let d = half_at(b, 0);
    for (l, y) in y.chunks_exact_mut(8).enumerate() {
        let q = word(&b[2..], l);
        let d = d * (0.5 + f32::from(nibble(&b[66..], l / 2))) * 0.25;
        signed(y, d, iq2(grids::IQ2_XS[usize::from(q & 511)]), signs(u32::from(q >> 9)));
    }
}

/// d: f16, 32 x low 8 bits index, 32 x 8 bits signs, 32 x high 2 bits index, 16 x 4 bits scale.
pub(crate) fn iq2_s(b: &[u8; 82], y: &mut [f32; 256]) {
    let d = half_at(b, 0);
    for (l, y) in y.chunks_exact_mut(8).enumerate() {
        let high = usize::from(b[66 + l / 4] >> (l % 4 * 2) & 3);
        let d = d * (0.5 + f32::from(nibble(&b[74..], l / 2))) * 0.25;
        signed(y, d, iq2(grids::IQ2_S[usize::from(b[2 + l]) | high << 8]), b[34 + l]);
    }
}

/// d: f16, 64 x 8 bits index, 8 x (4 x 7 bits signs, 4 bits scale).
pub(crate) fn iq3_xxs_block(b: &[u8; 98], y: &mut [f32; 256]) {
    let d = half_at(b, 0);
    for (g, y) in y.chunks_exact_mut(32).enumerate() {
        let at = long(&b[66..], g);
        let d = d * (0.5 + (at >> 28) as f32) * 0.5;
        for (l, y) in y.chunks_exact_mut(8).enumerate() {
            let entry = |i| iq3_xxs(grids::IQ3_XXS[usize::from(b[2 + 8 * g + 2 * l + i])]);
            signed(y, d, entry(0).chain(entry(1)), signs(at >> (7 * l)));
        }
    }
}

/// d: f16, 64 x low 8 bits index, 64 x high bit of it, 32 x 8 bits signs, 8 x 4 bits scale.
pub(crate) fn iq3_s_block(b: &[u8; 110], y: &mut [f32; 256]) {
    let d = half_at(b, 0);
    for (l, y) in y.chunks_exact_mut(8).enumerate() {
        let entry = |i: usize| {
            let high = usize::from(b[66 + i / 8] >> (i % 8) & 1);
            iq3_s(grids::IQ3_S[usize::from(b[2 + i]) | high << 8])
        };
        let d = d * f32::from(1 + 2 * nibble(&b[106..], l / 4));
        signed(y, d, entry(2 * l).chain(entry(2 * l + 1)), b[74 + l]);
    }
}

/// What IQ1's values are moved by, up or down.
const DELTA: f32 = 0.125;

fn moved(y: &mut [f32], d: f32, word: u16, down: bool) {
    let delta = if down { -DELTA } else { DELTA };
    for (j, y) in y.iter_mut().enumerate() {
        *y = d * (f32::from(word >> (2 * j) & 3) - 1.0 + delta);
    }
}

/// d: f16, 32 x low 8 bits index, 8 x (4 x high 3 bits, 3 bits scale, 1 bit direction).
pub(crate) fn iq1_s(b: &[u8; 50], y: &mut [f32; 256]) {
    let d = half_at(b, 0);
    for (l, y) in y.chunks_exact_mut(8).enumerate() {
        let high = word(&b[34..], l / 4);
        let index = usize::from(b[2 + l]) | usize::from(high >> (l % 4 * 3) & 7) << 8;
        moved(y, d * f32::from(2 * (high >> 12 & 7) + 1), grids::IQ1[index], high >> 15 == 1);
    }
}

/// 32 x low 8 bits index, 32 x (high 3 bits, 1 bit direction), 4 x (4 x 3 bits scale, 4 bits of the f16 d).
pub(crate) fn iq1_m(b: &[u8; 56], y: &mut [f32; 256]) {
    let scales = &b[48..];
    let d = (0..4).fold(0, |d, i| d | word(scales, i) >> 12 << (4 * i));
    let d = half::f16::from_bits(d).to_f32();
    for (l, y) in y.chunks_exact_mut(8).enumerate() {
        let (high, k) = (nibble(&b[32..], l), l / 2);
        let six = word(scales, k / 4) >> (k % 4 * 3) & 7;
        let index = usize::from(b[l]) | usize::from(high & 7) << 8;
        moved(y, d * f32::from(2 * six + 1), grids::IQ1[index], high & 8 != 0);
    }
}

/// Digit `n`, the highest first, of five to base three, which a byte holds as a fraction of 256.
fn trit(byte: u8, n: u32) -> f32 {
    let rest = byte.wrapping_mul(3u8.pow(n));
    f32::from(((u16::from(rest) * 3) >> 8) as i8 - 1)
}

/// 32 x 5 digits, 16 x 5 digits, 4 x 4 digits (in runs of as many bytes, all first digits of a run first), d: f16.
pub(crate) fn tq1_0(b: &[u8; 54], y: &mut [f32; 256]) {
    let d = half_at(b, 52);
    let mut at = 0;
    for (bytes, digits) in [(&b[..32], 5), (&b[32..48], 5), (&b[48..52], 4)] {
        for n in 0..digits {
            scale(&mut y[at..], d, bytes.iter().map(|&q| trit(q, n)));
            at += bytes.len();
        }
    }
}

/// 256 x 2 bits in runs of 32 bytes, d: f16.
pub(crate) fn tq2_0(b: &[u8; 66], y: &mut [f32; 256]) {
    let d = half_at(b, 64);
    for (k, y) in y.chunks_exact_mut(32).enumerate() {
        scale(y, d, b[k / 4 * 32..][..32].iter().map(|q| f32::from((q >> (k % 4 * 2) & 3) as i8 - 1)));
    }
}

/// Half of what an unsigned 8-bit float (E4M3, its top bit not used) stands for; 127 is 0.
fn e4m3_half(e: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(e >> 3 & 15), f32::from(e & 7));
    match (e, exponent) {
        (0x7f, _) => 0.0,
        (_, 0) => mantissa * f32::powi(2.0, -10),
        _ => (1.0 + mantissa / 8.0) * f32::powi(2.0, exponent - 8),
    }
}

/// 4 x E4M3 scale, 4 x (16 x 4-bit float: the low halves of 8 bytes, then the high ones).
pub(crate) fn nvfp4(b: &[u8; 36], y: &mut [f32; 64]) {
    for (k, y) in y.chunks_exact_mut(16).enumerate() {
        let q = &b[4 + 8 * k..][..8];
        let codes = q.iter().map(|q| q & 15).chain(q.iter().map(|q| q >> 4));
        scale(y, e4m3_half(b[k]), codes.map(|c| f32::from(crate::dequant::E2M1[usize::from(c)])));
    }
}

/// d: f16, 128 x 1 bit: d where it is set, -d where not.
pub(crate) fn q1_0(b: &[u8; 18], y: &mut [f32; 128]) {
    let d = half_at(b, 0);
    for (j, y) in y.iter_mut().enumerate() {
        *y = if b[2 + j / 8] >> (j % 8) & 1 == 1 { d } else { -d };
    }
}

/// d: f16, 64 x 2 bits: -1, 0, 1, 2.
pub(crate) fn q2_0(b: &[u8; 18], y: &mut [f32; 64]) {
    let d = half_at(b, 0);
    scale(y, d, (0..64).map(|j| f32::from((b[2 + j / 4] >> (j % 4 * 2) & 3) as i8 - 1)));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks written by hand from ggml's layout: the package that the other types are held against does not have these.
    #[test]
    fn one_bit_and_two() {
        let half = half::f16::from_f32(0.5).to_le_bytes();
        let mut b = [0u8; 18];
        b[..2].copy_from_slice(&half);
        (b[2], b[3], b[17]) = (0b0000_0101, 0x80, 0x80);
        let mut y = [0.0; 128];
        q1_0(&b, &mut y);
        let set: Vec<usize> = (0..128).filter(|&i| y[i] == 0.5).collect();
        assert_eq!(set, [0, 2, 15, 127]);
        assert!((0..128).all(|i| y[i].abs() == 0.5));
        // Codes 0, 1, 2, 3 in the first byte, 3 in the last two bits.
        (b[2], b[3], b[17]) = (0b11_10_01_00, 0, 0b11_00_00_00);
        let mut y = [0.0; 64];
        q2_0(&b, &mut y);
        assert_eq!(y[..5], [-0.5, 0.0, 0.5, 1.0, -0.5]);
        assert_eq!(y[62..], [-0.5, 1.0]);
    }
}
