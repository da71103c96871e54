//! Weight blocks to panels, for x86-64 with AVX-512 (F, BW, VL, DQ): sixteen rows at a time, one type per instance, so
//! that offsets and shifts are constants. The formats are those of [`super::blocks`], which says where they come from.
//!
//! Loops here are written out rather than given to `array::from_fn`: a closure compiled for these instructions is only
//! inlined where its caller has them too, and the caller would be the standard library.

use super::PANEL_COLS;
use super::panel::{CodeLine, CodePanel, FloatLine, FloatPanel};
use crate::weight::{WeightType, WeightView};
use std::arch::x86_64::*;

/// Decodes rows `first..first + PANEL_COLS` of `w`, if they all exist and there is code for their type; `false` when
/// nothing was done.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn decode(w: &WeightView<'_>, first: usize, panel: &mut CodePanel) -> bool {
    if first + PANEL_COLS > w.n() {
        return false;
    }
    macro_rules! each {
        ($($ty:ident: $bytes:literal),*) => {
            match w.ty() {
                $(WeightType::$ty => decode_panel::<{ WeightType::$ty as u8 }, $bytes>(w, first, panel),)*
                _ => return false,
            }
        };
    }
    each!(Q4_0: 18, Q4_1: 20, Q5_0: 22, Q5_1: 24, Q8_0: 34, Q4_K: 144, Q5_K: 176, Q6_K: 210);
    true
}

/// The same for floats: sixteen rows of a multiple of sixteen inputs.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
pub(super) fn decode_floats(w: &WeightView<'_>, first: usize, panel: &mut FloatPanel) -> bool {
    let ty = w.ty();
    if first + PANEL_COLS > w.n() || !w.k().is_multiple_of(16) {
        return false;
    }
    let mut rows: [&[[u8; 32]]; PANEL_COLS] = [&[]; PANEL_COLS];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = w.row(first + i).as_chunks().0;
    }
    for g in 0..rows[0].len() {
        let mut groups = [_mm256_setzero_si256(); PANEL_COLS];
        for (group, row) in groups.iter_mut().zip(rows) {
            *group = load32(&row[g]);
        }
        if !panel.pairs.is_empty() {
            transpose(&groups, panel.pairs[g * 8..].first_chunk_mut().expect("eight lines for sixteen inputs"));
            continue;
        }
        let mut lines = [CodeLine([0; 4 * PANEL_COLS]); 8];
        transpose(&groups, &mut lines);
        for (j, line) in lines.iter().enumerate() {
            // SAFETY: a line is 64 aligned bytes.
            let bits = unsafe { _mm512_load_si512(line.0.as_ptr().cast()) };
            if ty == WeightType::F32 {
                put(&mut panel.values[g * 8 + j], _mm512_castsi512_ps(bits));
                continue;
            }
            // Two inputs of each row.
            let (low, high) = if ty == WeightType::Bf16 {
                (_mm512_slli_epi32::<16>(bits), _mm512_andnot_si512(_mm512_set1_epi32(0xffff), bits))
            } else {
                let f32s = |halves| _mm512_castps_si512(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves)));
                (f32s(bits), f32s(_mm512_srli_epi32::<16>(bits)))
            };
            put(&mut panel.values[g * 16 + 2 * j], _mm512_castsi512_ps(low));
            put(&mut panel.values[g * 16 + 2 * j + 1], _mm512_castsi512_ps(high));
        }
    }
    true
}

const Q4_0: u8 = WeightType::Q4_0 as u8;
const Q4_1: u8 = WeightType::Q4_1 as u8;
const Q5_0: u8 = WeightType::Q5_0 as u8;
const Q5_1: u8 = WeightType::Q5_1 as u8;
const Q8_0: u8 = WeightType::Q8_0 as u8;
const Q4_K: u8 = WeightType::Q4_K as u8;
const Q5_K: u8 = WeightType::Q5_K as u8;
const Q6_K: u8 = WeightType::Q6_K as u8;

#[inline(always)]
fn at<const N: usize>(block: &[u8], from: usize) -> &[u8; N] {
    block[from..].first_chunk().expect("inside the block")
}

/// Sixteen nibble pairs to 32 codes in the order of the row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn nibbles(bytes: &[u8; 16]) -> __m256i {
    // SAFETY: sixteen bytes are there.
    let v = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
    let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(v), _mm_srli_epi16::<4>(v));
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn load32(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: 32 bytes are there.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// The low or the high halves of 32 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn half_bytes(bytes: &[u8; 32], high: bool) -> __m256i {
    let v = load32(bytes);
    _mm256_and_si256(if high { _mm256_srli_epi16::<4>(v) } else { v }, _mm256_set1_epi8(15))
}

/// Codes `32 * j ..` of one block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn codes32<const TY: u8, const BYTES: usize>(block: &[u8; BYTES], j: usize) -> __m256i {
    match TY {
        Q4_0 => nibbles(at(block, 2)),
        Q4_1 => nibbles(at(block, 4)),
        Q5_0 | Q5_1 => {
            let head = BYTES - 20;
            let fifth = _mm256_maskz_set1_epi8(u32::from_le_bytes(*at(block, head)), 16);
            _mm256_or_si256(nibbles(at(block, head + 4)), fifth)
        }
        // Signed: 128 more makes them codes.
        Q8_0 => _mm256_xor_si256(load32(at(block, 2)), _mm256_set1_epi8(-128)),
        Q4_K => half_bytes(at(block, 16 + j / 2 * 32), j % 2 == 1),
        Q5_K => {
            let low = half_bytes(at(block, 48 + j / 2 * 32), j % 2 == 1);
            let bit = _mm256_test_epi8_mask(load32(at(block, 16)), _mm256_set1_epi8((1u8 << j) as i8));
            _mm256_or_si256(low, _mm256_maskz_set1_epi8(bit, 16))
        }
        _ => {
            // Q6_K: the upper two bits of four groups of 32 share bytes.
            let (n, g) = (j / 4, j % 4);
            let low = half_bytes(at(block, n * 64 + g % 2 * 32), g >= 2);
            let h = load32(at(block, 128 + n * 32));
            let h = match g {
                0 => _mm256_slli_epi16::<4>(h),
                1 => _mm256_slli_epi16::<2>(h),
                2 => h,
                _ => _mm256_srli_epi16::<2>(h),
            };
            _mm256_or_si256(low, _mm256_and_si256(h, _mm256_set1_epi8(0x30)))
        }
    }
}

/// The f16 at byte `from` of each block, as f32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn f16_of<const BYTES: usize>(blocks: &[&[u8; BYTES]; PANEL_COLS], from: usize) -> __m512 {
    let mut bits = [0u16; PANEL_COLS];
    for (bits, block) in bits.iter_mut().zip(blocks) {
        *bits = u16::from_le_bytes(*at(&block[..], from));
    }
    // SAFETY: 32 bytes are there.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(bits.as_ptr().cast()) })
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn put(out: &mut FloatLine, v: __m512) {
    // SAFETY: a line is sixteen aligned floats.
    unsafe { _mm512_store_ps(out.0.as_mut_ptr(), v) };
}

/// The sub-block factors of a K type: `[factor][row]`, scales first, then (Q4_K, Q5_K) minima.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn factors<const TY: u8, const BYTES: usize>(blocks: &[&[u8; BYTES]; PANEL_COLS]) -> [[u8; PANEL_COLS]; 16] {
    let mut out = [[0u8; PANEL_COLS]; 16];
    for (i, block) in blocks.iter().enumerate() {
        let sixteen: [u8; 16] = if TY == Q6_K {
            *at(&block[..], 192)
        } else {
            let word = |from: usize| u32::from_le_bytes(*at(&block[..], from));
            let (a, b, c) = (word(4), word(8), word(12));
            // Four factors to a word, the first in the lowest byte.
            let packed = [
                a & 0x3f3f_3f3f,
                (c & 0x0f0f_0f0f) | ((a >> 2) & 0x3030_3030),
                b & 0x3f3f_3f3f,
                ((c >> 4) & 0x0f0f_0f0f) | ((b >> 2) & 0x3030_3030),
            ];
            let all = packed.iter().rev().fold(0u128, |all, word| all << 32 | u128::from(*word));
            all.to_le_bytes()
        };
        for (line, v) in out.iter_mut().zip(sixteen) {
            line[i] = v;
        }
    }
    out
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn widen(bytes: &[u8; PANEL_COLS], signed: bool) -> __m512 {
    // SAFETY: sixteen bytes are there.
    let v = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
    _mm512_cvtepi32_ps(if signed { _mm512_cvtepi8_epi32(v) } else { _mm512_cvtepu8_epi32(v) })
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn decode_panel<const TY: u8, const BYTES: usize>(w: &WeightView<'_>, first: usize, panel: &mut CodePanel) {
    let values = if matches!(TY, Q4_K | Q5_K | Q6_K) { 256 } else { 32 };
    let per = values / 32;
    let mut rows: [&[[u8; BYTES]]; PANEL_COLS] = [&[]; PANEL_COLS];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = w.row(first + i).as_chunks().0;
    }
    for s in 0..w.k() / values {
        let mut blocks: [&[u8; BYTES]; PANEL_COLS] = [&[0; BYTES]; PANEL_COLS];
        for (block, row) in blocks.iter_mut().zip(rows) {
            *block = &row[s];
        }
        let d = f16_of(&blocks, if TY == Q6_K { 208 } else { 0 });
        match TY {
            Q6_K => {
                for (k, factor) in factors::<TY, BYTES>(&blocks).iter().enumerate() {
                    put(&mut panel.scales[s * 16 + k], _mm512_mul_ps(d, widen(factor, true)));
                }
            }
            Q4_K | Q5_K => {
                let dmin = f16_of(&blocks, 2);
                let factors = factors::<TY, BYTES>(&blocks);
                for j in 0..8 {
                    put(&mut panel.scales[s * 8 + j], _mm512_mul_ps(d, widen(&factors[j], false)));
                    let min = _mm512_mul_ps(dmin, widen(&factors[8 + j], false));
                    put(&mut panel.mins[s * 8 + j], _mm512_sub_ps(_mm512_setzero_ps(), min));
                }
            }
            _ => {
                put(&mut panel.scales[s], d);
                if matches!(TY, Q4_1 | Q5_1) {
                    put(&mut panel.mins[s], f16_of(&blocks, 2));
                }
            }
        }
        for j in 0..per {
            let mut codes = [_mm256_setzero_si256(); PANEL_COLS];
            for (codes, block) in codes.iter_mut().zip(blocks) {
                *codes = codes32::<TY, BYTES>(block, j);
            }
            let lines = &mut panel.codes[(s * per + j) * 8..];
            transpose(&codes, lines.first_chunk_mut().expect("eight lines for 32 codes"));
        }
    }
}

/// Sixteen rows of eight 32-bit groups to eight lines of sixteen.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn transpose(rows: &[__m256i; PANEL_COLS], out: &mut [CodeLine; 8]) {
    // Rows i and i + 8 side by side, then 2 x 2 exchanges within 128-bit lanes, then of lanes.
    let mut z = [_mm512_setzero_si512(); 8];
    for (i, z) in z.iter_mut().enumerate() {
        *z = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(rows[i]), rows[i + 8]);
    }
    let mut a = [_mm512_setzero_si512(); 8];
    for i in 0..4 {
        a[2 * i] = _mm512_unpacklo_epi32(z[2 * i], z[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(z[2 * i], z[2 * i + 1]);
    }
    let mut b = [_mm512_setzero_si512(); 8];
    for o in [0, 4] {
        b[o] = _mm512_unpacklo_epi64(a[o], a[o + 2]);
        b[o + 1] = _mm512_unpackhi_epi64(a[o], a[o + 2]);
        b[o + 2] = _mm512_unpacklo_epi64(a[o + 1], a[o + 3]);
        b[o + 3] = _mm512_unpackhi_epi64(a[o + 1], a[o + 3]);
    }
    let low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    let high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    for j in 0..4 {
        // SAFETY: lines are 64 aligned bytes.
        unsafe {
            _mm512_store_si512((&raw mut out[j]).cast(), _mm512_permutex2var_epi64(b[j], low, b[4 + j]));
            _mm512_store_si512((&raw mut out[j + 4]).cast(), _mm512_permutex2var_epi64(b[j], high, b[4 + j]));
        }
    }
}
