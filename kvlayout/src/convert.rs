//! Values into the bytes of a cache's float types: judged first, then converted piece by piece, so that of memory that is read while it is
//! written nothing is touched before all values are known to fit. Quantised rows are [`CacheType::encode`]'s: whether their scales can
//! be held is known only when they are made.
#![allow(unsafe_code)]

use crate::CacheType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Bytes converted at a time: few enough to lie on the stack and to still be in the nearest cache when they are copied out, and so many
/// that a C library copies them by the processor's own instruction, which does not fetch first what it overwrites.
pub(crate) const STRIP: usize = 16 << 10;

/// The bits of the least magnitude that this type cannot hold.
pub(crate) fn limit(ty: CacheType) -> u32 {
    // Without their sign, the bits of f32 are ordered as the values are, with infinity and NaN above all. The first value
    // that rounds to infinity lies half a step above the type's largest: a tie goes to the even one, which is infinity.
    match ty {
        CacheType::F16 => 65520.0f32.to_bits(),
        CacheType::Bf16 => 0x7f7f_8000,
        _ => f32::INFINITY.to_bits(),
    }
}

/// The first value that is NaN or infinite in this type, be it by rounding.
pub(crate) fn not_finite(ty: CacheType, values: &[f32]) -> Option<usize> {
    let limit = limit(ty);
    // One pass without a branch finds the usual case, that there is none.
    let any = wide::reaches(values, limit).unwrap_or_else(|| any_reaches(values, limit));
    if any { values.iter().position(|v| reaches(*v, limit)) } else { None }
}

/// Whether a magnitude is at least that of the bits. Both sides are positive as signed numbers, which every x86-64 compares several at a
/// time; unsigned ones it does not.
#[inline(always)]
fn reaches(v: f32, limit: u32) -> bool {
    (v.to_bits() & 0x7fff_ffff).cast_signed() >= limit.cast_signed()
}

#[inline(always)]
fn any_reaches(values: &[f32], limit: u32) -> bool {
    values.iter().fold(0, |any, v| any | i32::from(reaches(*v, limit))) != 0
}

/// Fills `out` with the bytes of `values`, rounded to nearest, ties to even.
///
/// # Panics
/// For the quantised types, and when `out` has not as many bytes.
pub(crate) fn into_bytes(ty: CacheType, values: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), values.len() * ty.block_bytes() as usize, "bytes for the values");
    match ty {
        CacheType::F32 => {
            for (o, v) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *o = v.to_le_bytes();
            }
        }
        CacheType::F16 => {
            let done = wide::halves(values, out);
            let mut strip = [f16::ZERO; 512];
            for (values, out) in values[done..].chunks(512).zip(out[2 * done..].chunks_mut(1024)) {
                let strip = &mut strip[..values.len()];
                strip.convert_from_f32_slice(values);
                for (o, h) in out.as_chunks_mut().0.iter_mut().zip(strip.iter()) {
                    *o = h.to_le_bytes();
                }
            }
        }
        CacheType::Bf16 => {
            let mut strip = [bf16::ZERO; 512];
            for (values, out) in values.chunks(512).zip(out.chunks_mut(1024)) {
                let strip = &mut strip[..values.len()];
                strip.convert_from_f32_slice(values);
                for (o, h) in out.as_chunks_mut().0.iter_mut().zip(strip.iter()) {
                    *o = h.to_le_bytes();
                }
            }
        }
        _ => panic!("no encoder for {ty}"),
    }
}

/// Sixteen values at a time, where the processor can: `half` does eight, with a call for each.
#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::*;

    /// Whether any value reaches the limit, if that can be said here.
    pub(super) fn reaches(values: &[f32], limit: u32) -> Option<bool> {
        // SAFETY: the processor has the instructions.
        is_x86_feature_detected!("avx512f").then(|| unsafe { any_reaches(values, limit) })
    }

    #[target_feature(enable = "avx512f")]
    fn any_reaches(values: &[f32], limit: u32) -> bool {
        super::any_reaches(values, limit)
    }

    /// Converts as many as there are whole sixteens of; returns how many that are.
    pub(super) fn halves(values: &[f32], out: &mut [u8]) -> usize {
        if !is_x86_feature_detected!("avx512f") {
            return 0;
        }
        // SAFETY: the processor has the instructions.
        unsafe { to_halves(values, out) };
        values.len() / 16 * 16
    }

    #[target_feature(enable = "avx512f")]
    fn to_halves(values: &[f32], out: &mut [u8]) {
        for (v, o) in values.as_chunks::<16>().0.iter().zip(out.as_chunks_mut::<32>().0) {
            // SAFETY: sixteen floats are read, 32 bytes written, at no particular alignment.
            unsafe {
                let half = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(v.as_ptr()));
                _mm256_storeu_si256(o.as_mut_ptr().cast(), half);
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod wide {
    pub(super) fn reaches(_: &[f32], _: u32) -> Option<bool> {
        None
    }

    pub(super) fn halves(_: &[f32], _: &mut [u8]) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_judgement_are_those_of_one_value_at_a_time() {
        let mut seed = 1u64;
        let mut values: Vec<f32> = (0..5000)
            .map(|_| {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                f32::from_bits((seed >> 32) as u32)
            })
            .collect();
        values.extend([0.0, -0.0, 65519.996, -65519.996, 65520.0, f32::MAX, f32::INFINITY, f32::NAN, -f32::NAN, 6e-8]);
        values.extend([f32::from_bits(0x7f7f_7fff), f32::from_bits(0x7f7f_8000), f32::from_bits(0xff7f_8000)]);
        let alone = |ty, v: f32| match ty {
            CacheType::F16 => (f16::from_f32(v).is_finite(), f16::from_f32(v).to_le_bytes().to_vec()),
            CacheType::Bf16 => (bf16::from_f32(v).is_finite(), bf16::from_f32(v).to_le_bytes().to_vec()),
            _ => (v.is_finite(), v.to_le_bytes().to_vec()),
        };
        for ty in [CacheType::F16, CacheType::Bf16, CacheType::F32] {
            let mut kept = Vec::new();
            for v in &values {
                let fits = alone(ty, *v).0;
                assert_eq!(not_finite(ty, &[*v]), (!fits).then_some(0), "{ty} {v}");
                kept.extend(fits.then_some(*v));
            }
            assert!(kept.len() > 500, "{ty}");
            // Lengths around whole sixteens, at odd addresses.
            for n in (0..70).chain([kept.len()]) {
                let mut room = vec![7; 1 + n * ty.block_bytes() as usize];
                into_bytes(ty, &kept[..n], &mut room[1..]);
                let want: Vec<u8> = kept[..n].iter().flat_map(|v| alone(ty, *v).1).collect();
                assert!(room[1..] == want, "{ty} {n}");
            }
            assert_eq!(not_finite(ty, &kept), None);
            kept[777] = f32::NAN;
            assert_eq!(not_finite(ty, &kept), Some(777));
        }
    }
}
