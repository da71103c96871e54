//! Weight blocks to integer codes, one block of 32 values at a time: the plain version that every faster decoder is
//! compared with, and that rare types use as it is.
//!
//! Formats: ggml's `ggml-common.h` (layout of the blocks) and `ggml-quants.c` (meaning of the bits). A value is
//! `scale * (code - zero) + min`, with `zero` and the sub-block size from [`WeightType::code_form`].

use super::low_bit;
use crate::weight::WeightType;
use half::f16;

/// 32 decoded values of one row: codes, and a scale and a minimum for each half (equal where the type has 32-value
/// sub-blocks).
#[derive(Clone, Copy, Debug)]
pub struct Block32 {
    /// Integer codes in the order of the row.
    pub codes: [u8; 32],
    /// Scale of values 0..16 and 16..32.
    pub scale: [f32; 2],
    /// Minimum of values 0..16 and 16..32; zero where the type has none.
    pub min: [f32; 2],
}

/// IQ4's value table (`kvalues_iq4nl`).
pub(crate) const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// FP4 E2M1 values, doubled so that they are whole (`kvalues_mxfp4`).
pub(crate) const FP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

pub(crate) fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Half of the power of two that an E8M0 exponent stands for: FP4 codes are stored doubled.
pub(crate) fn e8m0_half(e: u8) -> f32 {
    // 2^(e-128); exponents 0 and 1 fall among the subnormal numbers.
    if e < 2 { f32::from_bits(0x0020_0000 << e) } else { f32::from_bits(u32::from(e - 1) << 23) }
}

/// The 6-bit scale and minimum of sub-block `j` of a Q4_K or Q5_K block (`get_scale_min_k4`).
pub(crate) fn scale_min_k4(j: usize, packed: &[u8]) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        ((packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4), (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4))
    }
}

/// The signed 6-bit scale `j` (of 16) of a Q3_K block.
fn scale_q3k(j: usize, packed: &[u8]) -> i32 {
    let low = if j < 8 { packed[j] & 15 } else { packed[j - 8] >> 4 };
    let high = (packed[8 + j % 4] >> (2 * (j / 4))) & 3;
    i32::from(low | (high << 4)) - 32
}

fn nibbles(qs: &[u8]) -> [u8; 32] {
    std::array::from_fn(|i| if i < 16 { qs[i] & 15 } else { qs[i - 16] >> 4 })
}

/// Values `32 * index .. 32 * index + 32` of a row.
///
/// # Panics
/// When the row is shorter than that, or the type has no codes.
pub fn decode(ty: WeightType, row: &[u8], index: usize) -> Block32 {
    let (values, bytes) = ty.block();
    let per = values / 32;
    assert!(per > 0, "{ty:?} has no codes");
    let block = &row[index / per * bytes..][..bytes];
    let j = index % per; // which 32 of the block
    let both = |codes, scale: f32, min: f32| Block32 { codes, scale: [scale; 2], min: [min; 2] };
    match ty {
        WeightType::F32 | WeightType::F16 | WeightType::Bf16 => unreachable!("checked above"),
        WeightType::Q4_0 => both(nibbles(&block[2..]), f16_at(block, 0), 0.0),
        WeightType::Q4_1 => both(nibbles(&block[4..]), f16_at(block, 0), f16_at(block, 2)),
        WeightType::Q5_0 | WeightType::Q5_1 => {
            let head = bytes - 20;
            let qh = u32::from_le_bytes([block[head], block[head + 1], block[head + 2], block[head + 3]]);
            let low = nibbles(&block[head + 4..]);
            let codes = std::array::from_fn(|i| low[i] | ((qh >> i & 1) as u8) << 4);
            both(codes, f16_at(block, 0), if ty == WeightType::Q5_1 { f16_at(block, 2) } else { 0.0 })
        }
        WeightType::Q8_0 => both(std::array::from_fn(|i| block[2 + i] ^ 0x80), f16_at(block, 0), 0.0),
        WeightType::Iq4Nl => {
            both(nibbles(&block[2..]).map(|c| (IQ4_VALUES[c as usize] as u8) ^ 0x80), f16_at(block, 0), 0.0)
        }
        WeightType::Mxfp4 => {
            both(nibbles(&block[1..]).map(|c| (FP4_VALUES[c as usize] as u8) ^ 0x80), e8m0_half(block[0]), 0.0)
        }
        WeightType::Q2_K => {
            let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
            let qs = &block[16 + j / 4 * 32..][..32];
            let sc = [block[2 * j], block[2 * j + 1]];
            Block32 {
                codes: std::array::from_fn(|i| qs[i] >> (2 * (j % 4)) & 3),
                scale: sc.map(|s| d * f32::from(s & 15)),
                min: sc.map(|s| -(dmin * f32::from(s >> 4))),
            }
        }
        WeightType::Q3_K => {
            let d = f16_at(block, 108);
            let qs = &block[32 + j / 4 * 32..][..32];
            let codes = std::array::from_fn(|i| (qs[i] >> (2 * (j % 4)) & 3) | (block[i] >> j & 1) << 2);
            let scale = [2 * j, 2 * j + 1].map(|s| d * scale_q3k(s, &block[96..108]) as f32);
            Block32 { codes, scale, min: [0.0; 2] }
        }
        WeightType::Q4_K | WeightType::Q5_K => {
            let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
            let (sc, m) = scale_min_k4(j, &block[4..16]);
            let qs = &block[bytes - 128 + j / 2 * 32..][..32];
            let codes = std::array::from_fn(|i| {
                let low = qs[i] >> (4 * (j % 2)) & 15;
                if ty == WeightType::Q5_K { low | (block[16 + i] >> j & 1) << 4 } else { low }
            });
            both(codes, d * f32::from(sc), -(dmin * f32::from(m)))
        }
        WeightType::Q6_K => {
            let d = f16_at(block, 208);
            let (n, g) = (j / 4, j % 4);
            let ql = &block[n * 64 + (g % 2) * 32..][..32];
            let qh = &block[128 + n * 32..][..32];
            let codes = std::array::from_fn(|i| (ql[i] >> (4 * (g / 2)) & 15) | (qh[i] >> (2 * g) & 3) << 4);
            let scale = [0, 1].map(|h| d * f32::from(block[192 + n * 8 + g * 2 + h] as i8));
            Block32 { codes, scale, min: [0.0; 2] }
        }
        WeightType::Iq4Xs => {
            let d = f16_at(block, 0);
            let high = u16::from_le_bytes([block[2], block[3]]) >> (2 * j) & 3;
            let low = block[4 + j / 2] >> (4 * (j % 2)) & 15;
            let scale = d * (i32::from(low) + 16 * i32::from(high) - 32) as f32;
            both(nibbles(&block[8 + j * 16..]).map(|c| (IQ4_VALUES[c as usize] as u8) ^ 0x80), scale, 0.0)
        }
        _ => low_bit::decode(ty, block, j, ty.code_form().map_or(0, |f| f.zero as u8)),
    }
}

/// A whole row as f32 values: exact for the float types, `scale * (code - zero) + min` for the others.
pub fn row_values(ty: WeightType, row: &[u8], out: &mut [f32]) {
    match ty {
        WeightType::F32 => {
            for (o, b) in out.iter_mut().zip(row.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        WeightType::F16 => {
            for (o, b) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                *o = f16::from_le_bytes(*b).to_f32();
            }
        }
        WeightType::Bf16 => {
            for (o, b) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                *o = half::bf16::from_le_bytes(*b).to_f32();
            }
        }
        _ => {
            let zero = ty.code_form().map_or(0, |f| f.zero);
            for (index, chunk) in out.chunks_mut(32).enumerate() {
                let block = decode(ty, row, index);
                for (i, o) in chunk.iter_mut().enumerate() {
                    *o = block.scale[i / 16] * (i32::from(block.codes[i]) - zero) as f32 + block.min[i / 16];
                }
            }
        }
    }
}
