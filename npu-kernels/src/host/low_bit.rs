//! The types of fewer than three bits and their kin to integer codes: codebook types (IQ1, IQ2, IQ3), ternary ones (TQ1_0, TQ2_0),
//! NVFP4, and Q1_0 and Q2_0. All of them are small whole numbers times a scale, so that the products are as exact as any.
//!
//! Formats: ggml's `ggml-common.h` and `ggml-quants.c`. Codes are values plus the form's zero point.

use super::blocks::{Block32, FP4_VALUES, f16_at};
use super::grids;
use crate::weight::WeightType;
use half::f16;

/// Seven stored signs; the eighth makes their number even.
fn signs(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | ((seven.count_ones() & 1) as u8) << 7
}

fn word(b: &[u8], i: usize) -> u16 {
    u16::from_le_bytes([b[2 * i], b[2 * i + 1]])
}

fn long(b: &[u8], i: usize) -> u32 {
    u32::from_le_bytes([b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3]])
}

fn nibble(b: &[u8], i: usize) -> u8 {
    b[i / 2] >> (i % 2 * 4) & 15
}

/// Half of what an unsigned 8-bit float (E4M3) stands for: FP4 codes are stored doubled. 127 is 0.
fn e4m3_half(e: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(e >> 3 & 15), f32::from(e & 7));
    match (e, exponent) {
        (0x7f, _) => 0.0,
        (_, 0) => mantissa * f32::powi(2.0, -10),
        _ => (1.0 + mantissa / 8.0) * f32::powi(2.0, exponent - 8),
    }
}

/// Values 32 `j` to 32 `j` + 32 of a block, whose codes lie around `zero`.
///
/// # Panics
/// For other types, and when the block is too short.
pub(crate) fn decode(ty: WeightType, block: &[u8], j: usize, zero: u8) -> Block32 {
    let mut codes = [zero; 32];
    let scale: [f32; 2];
    // Eight values at a time: magnitudes, and which of them are negative.
    let mut eight = |l: usize, value: &dyn Fn(usize) -> i8, signs: u8| {
        for (i, code) in codes[8 * l..8 * l + 8].iter_mut().enumerate() {
            let v = if signs >> i & 1 == 1 { -value(i) } else { value(i) };
            *code = zero.wrapping_add_signed(v);
        }
    };
    let iq2 = |w: u16| move |i: usize| grids::IQ2[usize::from(w >> (2 * i) & 3) % 3] as i8;
    match ty {
        WeightType::Iq2Xxs => {
            let at = long(&block[2..], 2 * j + 1);
            for l in 0..4 {
                eight(l, &iq2(grids::IQ2_XXS[usize::from(block[2 + 8 * j + l])]), signs(at >> (7 * l)));
            }
            scale = [f16_at(block, 0) * (0.5 + (at >> 28) as f32) * 0.25; 2];
        }
        WeightType::Iq2Xs => {
            for l in 0..4 {
                let q = word(&block[2..], 4 * j + l);
                eight(l, &iq2(grids::IQ2_XS[usize::from(q & 511)]), signs(u32::from(q >> 9)));
            }
            let at = |h: usize| f16_at(block, 0) * (0.5 + f32::from(nibble(&block[66..], 2 * j + h))) * 0.25;
            scale = [at(0), at(1)];
        }
        WeightType::Iq2S => {
            for l in 0..4 {
                let high = usize::from(block[66 + j] >> (2 * l) & 3);
                let entry = grids::IQ2_S[usize::from(block[2 + 4 * j + l]) | high << 8];
                eight(l, &iq2(entry), block[34 + 4 * j + l]);
            }
            let at = |h: usize| f16_at(block, 0) * (0.5 + f32::from(nibble(&block[74..], 2 * j + h))) * 0.25;
            scale = [at(0), at(1)];
        }
        WeightType::Iq3Xxs => {
            let at = long(&block[66..], j);
            for l in 0..4 {
                let entry = |i: usize| grids::IQ3_XXS[usize::from(block[2 + 8 * j + 2 * l + i / 4])];
                let value = |i: usize| grids::IQ3[usize::from(entry(i) >> (3 * (i % 4)) & 7)] as i8;
                eight(l, &value, signs(at >> (7 * l)));
            }
            scale = [f16_at(block, 0) * (0.5 + (at >> 28) as f32) * 0.5; 2];
        }
        WeightType::Iq3S => {
            for l in 0..4 {
                let entry = |i: usize| {
                    let k = 2 * l + i / 4;
                    let high = usize::from(block[66 + j] >> k & 1);
                    grids::IQ3_S[usize::from(block[2 + 8 * j + k]) | high << 8]
                };
                let value = |i: usize| 2 * (entry(i) >> (3 * (i % 4)) & 7) as i8 + 1;
                eight(l, &value, block[74 + 4 * j + l]);
            }
            scale = [f16_at(block, 0) * f32::from(1 + 2 * nibble(&block[106..], j)); 2];
        }
        // -1, 0 or 1, moved by an eighth: eighths are whole.
        WeightType::Iq1S => {
            let high = word(&block[34..], j);
            for l in 0..4 {
                let entry = grids::IQ1[usize::from(block[2 + 4 * j + l]) | usize::from(high >> (3 * l) & 7) << 8];
                eight(l, &|i| eighths(entry, i, high >> 15 == 1), 0);
            }
            scale = [f16_at(block, 0) * f32::from(2 * (high >> 12 & 7) + 1) * 0.125; 2];
        }
        WeightType::Iq1M => {
            let scales = &block[48..];
            let d = (0..4).fold(0, |d, i| d | word(scales, i) >> 12 << (4 * i));
            for l in 0..4 {
                let high = nibble(&block[32..], 4 * j + l);
                let entry = grids::IQ1[usize::from(block[4 * j + l]) | usize::from(high & 7) << 8];
                eight(l, &|i| eighths(entry, i, high & 8 != 0), 0);
            }
            let at = |k: usize| f32::from(2 * (word(scales, k / 4) >> (3 * (k % 4)) & 7) + 1) * 0.125;
            scale = [0, 1].map(|h| f16::from_bits(d).to_f32() * at(2 * j + h));
        }
        WeightType::Tq1_0 => {
            for (i, code) in codes.iter_mut().enumerate() {
                let at = 32 * j + i;
                let (byte, digit) = match at {
                    0..160 => (at % 32, at / 32),
                    160..240 => (32 + at % 16, (at - 160) / 16),
                    _ => (48 + at % 4, (at - 240) / 4),
                };
                let rest = block[byte].wrapping_mul(3u8.pow(digit as u32));
                *code = ((u16::from(rest) * 3) >> 8) as u8;
            }
            scale = [f16_at(block, 52); 2];
        }
        WeightType::Tq2_0 => {
            codes = std::array::from_fn(|i| block[j / 4 * 32 + i] >> (j % 4 * 2) & 3);
            scale = [f16_at(block, 64); 2];
        }
        WeightType::Nvfp4 => {
            for l in 0..4 {
                let q = &block[4 + 16 * j + l / 2 * 8..][..8];
                eight(l, &|i| FP4_VALUES[usize::from(q[i] >> (l % 2 * 4) & 15)], 0);
            }
            scale = [e4m3_half(block[2 * j]), e4m3_half(block[2 * j + 1])];
        }
        WeightType::Q1_0 => {
            codes = std::array::from_fn(|i| (block[2 + 4 * j + i / 8] >> (i % 8) & 1) * 2);
            scale = [f16_at(block, 0); 2];
        }
        WeightType::Q2_0 => {
            codes = std::array::from_fn(|i| block[2 + 8 * j + i / 4] >> (i % 4 * 2) & 3);
            scale = [f16_at(block, 0); 2];
        }
        _ => unreachable!("decoded in `blocks`"),
    }
    Block32 { codes, scale, min: [0.0; 2] }
}

fn eighths(entry: u16, i: usize, down: bool) -> i8 {
    8 * ((entry >> (2 * i) & 3) as i8 - 1) + if down { -1 } else { 1 }
}
