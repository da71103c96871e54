//! Blocks to f32, one element after the other: the reference that faster code is compared with.
//!
//! Bit-equal to `quants.dequantize` of the `gguf` Python package: the same operations in f32, in the same order, unfused.
//! Layouts are ggml's (`ggml-common.h`); each function shows its own.

use half::{f16, slice::HalfFloatSliceExt};

use crate::{Error, GgmlType, low_bit};

/// The types [`dequantize`] knows.
pub const SUPPORTED: [GgmlType; 28] = [
    GgmlType::F32,
    GgmlType::F16,
    GgmlType::BF16,
    GgmlType::Q4_0,
    GgmlType::Q4_1,
    GgmlType::Q5_0,
    GgmlType::Q5_1,
    GgmlType::Q8_0,
    GgmlType::Q2_K,
    GgmlType::Q3_K,
    GgmlType::Q4_K,
    GgmlType::Q5_K,
    GgmlType::Q6_K,
    GgmlType::IQ4_NL,
    GgmlType::IQ4_XS,
    GgmlType::MXFP4,
    GgmlType::IQ1_S,
    GgmlType::IQ1_M,
    GgmlType::IQ2_XXS,
    GgmlType::IQ2_XS,
    GgmlType::IQ2_S,
    GgmlType::IQ3_XXS,
    GgmlType::IQ3_S,
    GgmlType::TQ1_0,
    GgmlType::TQ2_0,
    GgmlType::NVFP4,
    GgmlType::Q1_0,
    GgmlType::Q2_0,
];

/// Whether [`dequantize`] knows the type.
pub fn is_supported(ty: GgmlType) -> bool {
    SUPPORTED.contains(&ty)
}

pub(crate) fn names() -> String {
    SUPPORTED.map(GgmlType::name).join(" ")
}

/// Decodes whole blocks: `out` has room for exactly the elements in `blocks`.
///
/// # Errors
/// [`Error::NoDequantizer`] for other types than [`SUPPORTED`], [`Error::Blocks`] when the lengths do not match.
pub fn dequantize(ty: GgmlType, blocks: &[u8], out: &mut [f32]) -> Result<(), Error> {
    use GgmlType::*;
    match ty {
        F32 => each::<4, 1>(ty, blocks, out, |b, y| y[0] = f32::from_le_bytes(*b)),
        F16 => f16s(blocks, out),
        BF16 => each::<2, 1>(ty, blocks, out, |b, y| y[0] = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16)),
        Q4_0 => each(ty, blocks, out, q4_0),
        Q4_1 => each(ty, blocks, out, q4_1),
        Q5_0 => each(ty, blocks, out, q5_0),
        Q5_1 => each(ty, blocks, out, q5_1),
        Q8_0 => each(ty, blocks, out, q8_0),
        Q2_K => each(ty, blocks, out, q2_k),
        Q3_K => each(ty, blocks, out, q3_k),
        Q4_K => each(ty, blocks, out, q4_k),
        Q5_K => each(ty, blocks, out, q5_k),
        Q6_K => each(ty, blocks, out, q6_k),
        IQ4_NL => each(ty, blocks, out, iq4_nl),
        IQ4_XS => each(ty, blocks, out, iq4_xs),
        MXFP4 => each(ty, blocks, out, mxfp4),
        IQ1_S => each(ty, blocks, out, low_bit::iq1_s),
        IQ1_M => each(ty, blocks, out, low_bit::iq1_m),
        IQ2_XXS => each(ty, blocks, out, low_bit::iq2_xxs),
        IQ2_XS => each(ty, blocks, out, low_bit::iq2_xs),
        IQ2_S => each(ty, blocks, out, low_bit::iq2_s),
        IQ3_XXS => each(ty, blocks, out, low_bit::iq3_xxs_block),
        IQ3_S => each(ty, blocks, out, low_bit::iq3_s_block),
        TQ1_0 => each(ty, blocks, out, low_bit::tq1_0),
        TQ2_0 => each(ty, blocks, out, low_bit::tq2_0),
        NVFP4 => each(ty, blocks, out, low_bit::nvfp4),
        Q1_0 => each(ty, blocks, out, low_bit::q1_0),
        Q2_0 => each(ty, blocks, out, low_bit::q2_0),
        _ => Err(Error::NoDequantizer { ty }),
    }
}

/// Runs `f` over blocks of `B` bytes and `N` elements.
fn each<const B: usize, const N: usize>(
    ty: GgmlType,
    blocks: &[u8],
    out: &mut [f32],
    f: impl Fn(&[u8; B], &mut [f32; N]),
) -> Result<(), Error> {
    let (whole, odd) = blocks.as_chunks::<B>();
    if !odd.is_empty() {
        let (want, found) = (format!("a multiple of {B} bytes"), format!("{} bytes", blocks.len()));
        return Err(Error::Blocks { ty, want, found });
    }
    let (room, odd) = out.as_chunks_mut::<N>();
    if !odd.is_empty() || room.len() != whole.len() {
        let (want, found) = (format!("room for {} elements", whole.len() * N), format!("room for {}", out.len()));
        return Err(Error::Blocks { ty, want, found });
    }
    for (block, out) in whole.iter().zip(room) {
        f(block, out);
    }
    Ok(())
}

/// Many at a time, since the processor's instruction does eight; bytes in files need not be aligned.
fn f16s(blocks: &[u8], out: &mut [f32]) -> Result<(), Error> {
    each::<2, 1>(GgmlType::F16, blocks, out, |_, _| {})?; // for the check of lengths
    let mut halves = [f16::ZERO; 64];
    for (bytes, out) in blocks.chunks(128).zip(out.chunks_mut(64)) {
        let halves = &mut halves[..out.len()];
        for (half, b) in halves.iter_mut().zip(bytes.as_chunks().0) {
            *half = f16::from_le_bytes(*b);
        }
        halves.convert_to_f32_slice(out);
    }
    Ok(())
}

/// The f16 at bytes `i` and `i + 1`.
pub(crate) fn half_at(b: &[u8], i: usize) -> f32 {
    f16::from_le_bytes([b[i], b[i + 1]]).to_f32()
}

/// 32 values of 4 bits that lie as the low halves of 16 bytes, then the high halves.
fn nibbles(q: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    let (low, high) = out.split_at_mut(16);
    for ((low, high), q) in low.iter_mut().zip(high).zip(q) {
        (*low, *high) = (q & 15, q >> 4);
    }
    out
}

/// `d * q`.
pub(crate) fn scale(y: &mut [f32], d: f32, q: impl IntoIterator<Item = f32>) {
    for (y, q) in y.iter_mut().zip(q) {
        *y = d * q;
    }
}

/// `d * q + m`, rounded twice.
fn scale_add(y: &mut [f32], d: f32, m: f32, q: impl IntoIterator<Item = u8>) {
    for (y, q) in y.iter_mut().zip(q) {
        *y = d * f32::from(q) + m;
    }
}

/// d: f16, 32 x 4 bits.
fn q4_0(b: &[u8; 18], y: &mut [f32; 32]) {
    scale(y, half_at(b, 0), nibbles(&b[2..]).map(|q| f32::from(q as i8 - 8)));
}

/// d, m: f16, 32 x 4 bits.
fn q4_1(b: &[u8; 20], y: &mut [f32; 32]) {
    scale_add(y, half_at(b, 0), half_at(b, 2), nibbles(&b[4..]));
}

/// 32 values of 5 bits: the highest of each in one little-endian word, 32 x 4 bits follow.
fn fives(b: &[u8]) -> [u8; 32] {
    let high = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    let mut out = nibbles(&b[4..]);
    for (e, q) in out.iter_mut().enumerate() {
        *q |= ((high >> e) & 1) as u8 * 16;
    }
    out
}

/// d: f16, 32 x 1 bit, 32 x 4 bits.
fn q5_0(b: &[u8; 22], y: &mut [f32; 32]) {
    scale(y, half_at(b, 0), fives(&b[2..]).map(|q| f32::from(q as i8 - 16)));
}

/// d, m: f16, 32 x 1 bit, 32 x 4 bits.
fn q5_1(b: &[u8; 24], y: &mut [f32; 32]) {
    scale_add(y, half_at(b, 0), half_at(b, 2), fives(&b[4..]));
}

/// d: f16, 32 x i8.
fn q8_0(b: &[u8; 34], y: &mut [f32; 32]) {
    scale(y, half_at(b, 0), b[2..].iter().map(|&q| f32::from(q as i8)));
}

/// 256 values that lie in `256 / N / L` runs of `N` bytes, `L` layers of `8 / L` bits deep: all low layers of a run first.
fn layers<const N: usize, const L: usize>(q: &[u8]) -> [u8; 256] {
    let bits = 8 / L;
    let mut out = [0; 256];
    for (out, q) in out.chunks_exact_mut(N * L).zip(q.chunks_exact(N)) {
        for (layer, out) in out.chunks_exact_mut(N).enumerate() {
            for (out, q) in out.iter_mut().zip(q) {
                *out = (q >> (layer * bits)) & ((1u16 << bits) - 1) as u8;
            }
        }
    }
    out
}

/// 16 x (4 bits scale, 4 bits minimum), 256 x 2 bits, d, dmin: f16.
fn q2_k(b: &[u8; 84], y: &mut [f32; 256]) {
    let (d, dmin) = (half_at(b, 80), half_at(b, 82));
    let q = layers::<32, 4>(&b[16..80]);
    for ((y, q), s) in y.chunks_exact_mut(16).zip(q.chunks_exact(16)).zip(&b[..16]) {
        scale_add(y, d * f32::from(s & 15), -(dmin * f32::from(s >> 4)), q.iter().copied());
    }
}

/// 256 x 1 bit (set: do not subtract 4), 256 x 2 bits, 16 x 6 bits scale, d: f16.
fn q3_k(b: &[u8; 110], y: &mut [f32; 256]) {
    let d = half_at(b, 108);
    let (high, low) = (layers::<32, 8>(&b[..32]), layers::<32, 4>(&b[32..96]));
    let s = &b[96..108]; // the low four bits of 16 scales in 8 bytes, then the high two in 4
    for (k, y) in y.chunks_exact_mut(16).enumerate() {
        let six = (s[k % 8] >> (k / 8 * 4)) & 15 | ((s[8 + k % 4] >> (k / 4 * 2)) & 3) << 4;
        let q = low[16 * k..].iter().zip(&high[16 * k..]).map(|(low, high)| f32::from((low + 4 * high) as i8 - 4));
        scale(y, d * f32::from(six as i8 - 32), q);
    }
}

/// Scale and minimum `k` of 8, 6 bits each in 12 bytes: four whole scales, four whole minimums, and what is left of those
/// eight bytes' high bits completes the other four pairs.
fn scale_min(s: &[u8], k: usize) -> (f32, f32) {
    let (scale, min) = if k < 4 {
        (s[k] & 63, s[k + 4] & 63)
    } else {
        (s[k + 4] & 15 | (s[k - 4] >> 6) << 4, s[k + 4] >> 4 | (s[k] >> 6) << 4)
    };
    (f32::from(scale), f32::from(min))
}

/// d, dmin: f16, 8 x (6 bits scale, 6 bits minimum), 256 x 4 bits.
fn q4_k(b: &[u8; 144], y: &mut [f32; 256]) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    let q = layers::<32, 2>(&b[16..]);
    for (k, (y, q)) in y.chunks_exact_mut(32).zip(q.chunks_exact(32)).enumerate() {
        let (scale, min) = scale_min(&b[4..16], k);
        scale_add(y, d * scale, -(dmin * min), q.iter().copied());
    }
}

/// d, dmin: f16, 8 x (6 bits scale, 6 bits minimum), 256 x 1 bit, 256 x 4 bits.
fn q5_k(b: &[u8; 176], y: &mut [f32; 256]) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    let (high, low) = (layers::<32, 8>(&b[16..48]), layers::<32, 2>(&b[48..]));
    for (k, y) in y.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_min(&b[4..16], k);
        let q = low[32 * k..].iter().zip(&high[32 * k..]).map(|(low, high)| low + 16 * high);
        scale_add(y, d * scale, -(dmin * min), q);
    }
}

/// 256 x low 4 bits (in runs of 64, unlike the other K types), 256 x high 2 bits, 16 x i8 scale, d: f16.
fn q6_k(b: &[u8; 210], y: &mut [f32; 256]) {
    let d = half_at(b, 208);
    let (low, high) = (layers::<64, 2>(&b[..128]), layers::<32, 4>(&b[128..192]));
    for (k, y) in y.chunks_exact_mut(16).enumerate() {
        let q = low[16 * k..].iter().zip(&high[16 * k..]).map(|(low, high)| f32::from((low + 16 * high) as i8 - 32));
        scale(y, d * f32::from(b[192 + k] as i8), q);
    }
}

/// What a 4-bit index of IQ4_NL and IQ4_XS stands for.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// d: f16, 32 x 4 bits index.
fn iq4_nl(b: &[u8; 18], y: &mut [f32; 32]) {
    scale(y, half_at(b, 0), nibbles(&b[2..]).map(|q| f32::from(IQ4[usize::from(q & 15)])));
}

/// d: f16, 8 x 2 bits high, 8 x 4 bits low of scales, 256 x 4 bits index in runs of 16 bytes.
fn iq4_xs(b: &[u8; 136], y: &mut [f32; 256]) {
    let d = half_at(b, 0);
    let high = u16::from_le_bytes([b[2], b[3]]);
    for (k, (y, q)) in y.chunks_exact_mut(32).zip(b[8..].chunks_exact(16)).enumerate() {
        let six = (b[4 + k / 2] >> (k % 2 * 4)) & 15 | (((high >> (2 * k)) & 3) as u8) << 4;
        scale(y, d * f32::from(six as i8 - 32), nibbles(q).map(|q| f32::from(IQ4[usize::from(q & 15)])));
    }
}

/// Twice what a 4-bit float (E2M1) stands for; the scale is halved to match.
pub(crate) const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// A power of two (E8M0), 32 x 4-bit float.
fn mxfp4(b: &[u8; 17], y: &mut [f32; 32]) {
    // Half of 2^(e - 127); the two smallest are subnormal.
    let d = f32::from_bits(if b[0] < 2 { 0x0020_0000 << b[0] } else { u32::from(b[0] - 1) << 23 });
    scale(y, d, nibbles(&b[1..]).map(|q| f32::from(E2M1[usize::from(q & 15)])));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_must_match() {
        for ty in SUPPORTED {
            let (bytes, elems) = (ty.block_bytes() as usize, ty.block_elems() as usize);
            let blocks = vec![0; 2 * bytes];
            dequantize(ty, &blocks, &mut vec![1.0; 2 * elems]).unwrap();
            dequantize(ty, &[], &mut []).unwrap();
            assert!(dequantize(ty, &blocks, &mut vec![1.0; elems]).is_err());
            assert!(dequantize(ty, &blocks, &mut vec![1.0; 2 * elems + 1]).is_err());
            assert!(dequantize(ty, &blocks[1..], &mut vec![1.0; 2 * elems]).is_err());
        }
    }

    #[test]
    fn others_are_refused_by_name() {
        for ty in GgmlType::ALL.iter().copied().filter(|&t| !is_supported(t)) {
            let message = dequantize(ty, &[], &mut []).unwrap_err().to_string();
            assert!(message.contains(ty.name()), "{message}");
        }
    }
}
