//! Values into the bytes of a cache type, for memory that is read while it is written: judged first, then converted piece by
//! piece. The same rounding as [`CacheType::encode`], which does both at once for everything else, quantised rows among it: whether
//! their scales can be held is known only when they are made.

use crate::CacheType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Bytes converted at a time: small enough to still be in the nearest cache when they are copied out.
pub(crate) const PIECE: usize = 32 << 10;

/// The first value that is NaN or infinite in this type, be it by rounding.
pub(crate) fn not_finite(ty: CacheType, values: &[f32]) -> Option<usize> {
    // Without their sign, the bits of f32 are ordered as the values are, with infinity and NaN above all. The first value
    // that rounds to infinity lies half a step above the type's largest: a tie goes to the even one, which is infinity.
    let limit = match ty {
        CacheType::F16 => 65520.0f32.to_bits(),
        CacheType::Bf16 => 0x7f7f_8000,
        _ => f32::INFINITY.to_bits(),
    };
    let magnitude = |v: &f32| v.to_bits() & 0x7fff_ffff;
    // One pass without a branch finds the usual case, that there is none. Both sides are positive as signed numbers, which every
    // x86-64 compares several at a time; unsigned ones it does not.
    let reaches = |v: &f32| magnitude(v).cast_signed() >= limit.cast_signed();
    let any = values.iter().fold(0, |any, v| any | i32::from(reaches(v)));
    if any == 0 { None } else { values.iter().position(reaches) }
}

/// Makes `out` the bytes of `values`, rounded to nearest, ties to even.
///
/// # Panics
/// For the quantised types.
pub(crate) fn into_bytes(ty: CacheType, values: &[f32], out: &mut Vec<u8>) {
    // The bytes are overwritten all: no need to clear them first.
    out.resize(values.len() * ty.block_bytes() as usize, 0);
    match ty {
        CacheType::F32 => {
            for (o, v) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *o = v.to_le_bytes();
            }
        }
        CacheType::F16 => {
            let mut strip = [f16::ZERO; 512];
            for (values, out) in values.chunks(512).zip(out.chunks_mut(1024)) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_what_encode_does() {
        let mut seed = 1u64;
        let mut values: Vec<f32> = (0..5000)
            .map(|_| {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                f32::from_bits((seed >> 32) as u32)
            })
            .collect();
        values.extend([0.0, -0.0, 65519.996, -65519.996, 65520.0, f32::MAX, f32::INFINITY, f32::NAN, -f32::NAN, 6e-8]);
        values.extend([f32::from_bits(0x7f7f_7fff), f32::from_bits(0x7f7f_8000), f32::from_bits(0xff7f_8000)]);
        for ty in [CacheType::F16, CacheType::Bf16, CacheType::F32] {
            let mut kept = Vec::new();
            for v in &values {
                let judged = not_finite(ty, &[*v]);
                assert_eq!(judged.map_or(Ok(()), Err), ty.encode(&[*v], &mut Vec::new()), "{ty} {v}");
                kept.extend(judged.is_none().then_some(*v));
            }
            assert!(kept.len() > 500, "{ty}");
            let (mut want, mut found) = (Vec::new(), vec![7; 3]);
            ty.encode(&kept, &mut want).unwrap();
            into_bytes(ty, &kept, &mut found);
            assert!(want == found, "{ty}");
            assert_eq!(not_finite(ty, &kept), None);
            kept[777] = f32::NAN;
            assert_eq!(not_finite(ty, &kept), Some(777));
        }
    }
}
