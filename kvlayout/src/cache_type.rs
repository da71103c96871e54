//! The element types a decoder's K and V caches can have: bytes per row, encoding and decoding. No other ggml type can stand
//! in a cache.

use crate::{convert, quantise};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::fmt;
use std::str::FromStr;

/// Element type of a K or V cache: the values of llama.cpp's `-ctk` and `-ctv`.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs)] // the names are ggml's and say it all
pub enum CacheType {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q5_1,
    Q5_0,
    Q4_1,
    Q4_0,
    Iq4Nl,
}

/// A cache type llama.cpp does not have.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("cache type {0:?} is not one of f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl")]
pub struct UnknownCacheType(pub String);

impl CacheType {
    /// All of them.
    pub const ALL: [CacheType; 9] = [
        CacheType::F32,
        CacheType::F16,
        CacheType::Bf16,
        CacheType::Q8_0,
        CacheType::Q5_1,
        CacheType::Q5_0,
        CacheType::Q4_1,
        CacheType::Q4_0,
        CacheType::Iq4Nl,
    ];

    /// ggml's number for it, as it stands in a state file.
    pub fn id(self) -> u32 {
        match self {
            CacheType::F32 => 0,
            CacheType::F16 => 1,
            CacheType::Q4_0 => 2,
            CacheType::Q4_1 => 3,
            CacheType::Q5_0 => 6,
            CacheType::Q5_1 => 7,
            CacheType::Q8_0 => 8,
            CacheType::Iq4Nl => 20,
            CacheType::Bf16 => 30,
        }
    }

    /// The type of a ggml number; `None` for those that no cache can have.
    pub fn from_id(id: u32) -> Option<CacheType> {
        Self::ALL.into_iter().find(|t| t.id() == id)
    }

    /// llama.cpp's spelling.
    pub fn name(self) -> &'static str {
        match self {
            CacheType::F32 => "f32",
            CacheType::F16 => "f16",
            CacheType::Bf16 => "bf16",
            CacheType::Q8_0 => "q8_0",
            CacheType::Q5_1 => "q5_1",
            CacheType::Q5_0 => "q5_0",
            CacheType::Q4_1 => "q4_1",
            CacheType::Q4_0 => "q4_0",
            CacheType::Iq4Nl => "iq4_nl",
        }
    }

    /// Elements per block.
    pub fn block_elems(self) -> u64 {
        match self {
            CacheType::F32 | CacheType::F16 | CacheType::Bf16 => 1,
            _ => 32,
        }
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> u64 {
        match self {
            CacheType::F32 => 4,
            CacheType::F16 | CacheType::Bf16 => 2,
            CacheType::Q8_0 => 34,
            CacheType::Q5_1 => 24,
            CacheType::Q5_0 => 22,
            CacheType::Q4_1 => 20,
            CacheType::Q4_0 | CacheType::Iq4Nl => 18,
        }
    }

    /// Bytes of a row of `n` elements; `None` when `n` is no whole number of blocks or the size overflows.
    pub fn row_bytes(self, n: u64) -> Option<u64> {
        n.is_multiple_of(self.block_elems()).then(|| n / self.block_elems())?.checked_mul(self.block_bytes())
    }

    /// Elements in a row of `bytes` bytes; `None` when that is no whole number of blocks.
    pub fn row_elems(self, bytes: u64) -> Option<u64> {
        bytes.is_multiple_of(self.block_bytes()).then(|| bytes / self.block_bytes())?.checked_mul(self.block_elems())
    }

    /// Whether values share scales in blocks. Servers rotate such rows before they store them (see [`hadamard`](crate::hadamard)),
    /// and have no transposed V of them.
    pub fn is_quantised(self) -> bool {
        self.block_elems() > 1
    }
}

impl fmt::Display for CacheType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for CacheType {
    type Err = UnknownCacheType;
    fn from_str(s: &str) -> Result<Self, UnknownCacheType> {
        Self::ALL.into_iter().find(|t| t.name().eq_ignore_ascii_case(s)).ok_or_else(|| UnknownCacheType(s.into()))
    }
}

/// Elements converted at a time, so that the conversion of a long row needs no allocation.
const STRIP: usize = 512;

impl CacheType {
    /// Appends `values` in this type: the float types rounded to nearest, ties to even, the quantised ones as llama.cpp does it
    /// on x86. `Err(i)`: value `i` is not finite in this type (NaN, infinite, or too large for it); `out` is then cut back
    /// to what it was.
    ///
    /// # Panics
    /// When `values` is no whole number of blocks.
    pub fn encode(self, values: &[f32], out: &mut Vec<u8>) -> Result<(), usize> {
        if self.is_quantised() {
            return self.encode_blocks(values, out);
        }
        if let Some(at) = convert::not_finite(self, values) {
            return Err(at);
        }
        let start = out.len();
        out.resize(start + values.len() * self.block_bytes() as usize, 0);
        convert::into_bytes(self, values, &mut out[start..]);
        Ok(())
    }

    fn encode_blocks(self, values: &[f32], out: &mut Vec<u8>) -> Result<(), usize> {
        let (blocks, odd) = values.as_chunks::<{ quantise::BLOCK }>();
        assert!(odd.is_empty(), "{} values are no whole number of blocks of {self}", values.len());
        let (start, bytes) = (out.len(), self.block_bytes() as usize);
        out.resize(start + blocks.len() * bytes, 0);
        for (i, (x, block)) in blocks.iter().zip(out[start..].chunks_exact_mut(bytes)).enumerate() {
            let bad = match x.iter().position(|v| !v.is_finite()) {
                None if quantise::block(self, x, block) => continue,
                // Not the values are too large, but the scale that the largest of them asks for.
                None => (0..x.len()).fold(0, |m, j| if x[j].abs() > x[m].abs() { j } else { m }),
                Some(j) => j,
            };
            out.truncate(start);
            return Err(i * quantise::BLOCK + bad);
        }
        Ok(())
    }

    /// Makes `values`, which are finite and a whole number of blocks, what a reader of this type gets back.
    pub fn round(self, values: &mut [f32]) {
        match self {
            CacheType::F32 => {}
            CacheType::F16 => {
                let mut strip = [f16::ZERO; STRIP];
                for values in values.chunks_mut(STRIP) {
                    let strip = &mut strip[..values.len()];
                    strip.convert_from_f32_slice(values);
                    strip.convert_to_f32_slice(values);
                }
            }
            CacheType::Bf16 => values.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32()),
            _ => {
                let mut block = [0; quantise::MAX_BYTES];
                let block = &mut block[..self.block_bytes() as usize];
                for x in values.as_chunks_mut::<{ quantise::BLOCK }>().0 {
                    quantise::block(self, x, block);
                    self.decode(block, x);
                }
            }
        }
    }

    /// Decodes whole blocks to f32. Only as many elements as both sides have are touched.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        let half = |b: &[u8], at: usize| f16::from_le_bytes([b[at], b[at + 1]]).to_f32();
        let blocks = bytes.chunks_exact(self.block_bytes() as usize);
        match self {
            CacheType::F32 => {
                for (o, b) in out.iter_mut().zip(blocks) {
                    *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
            CacheType::F16 => {
                let mut strip = [f16::ZERO; STRIP];
                for (o, b) in out.chunks_mut(STRIP).zip(bytes.chunks(2 * STRIP)) {
                    let n = o.len().min(b.len() / 2);
                    for (h, b) in strip.iter_mut().zip(b.chunks_exact(2)) {
                        *h = f16::from_le_bytes([b[0], b[1]]);
                    }
                    strip[..n].convert_to_f32_slice(&mut o[..n]);
                }
            }
            CacheType::Bf16 => {
                for (o, b) in out.iter_mut().zip(blocks) {
                    *o = bf16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
            CacheType::Q8_0 => {
                for (o, b) in out.chunks_exact_mut(32).zip(blocks) {
                    let d = half(b, 0);
                    for (o, q) in o.iter_mut().zip(&b[2..]) {
                        *o = *q as i8 as f32 * d;
                    }
                }
            }
            CacheType::Q4_0 => nibbles(blocks, out, |b, q, _| (q as f32 - 8.0) * half(b, 0), 2),
            CacheType::Q4_1 => nibbles(blocks, out, |b, q, _| q as f32 * half(b, 0) + half(b, 2), 4),
            CacheType::Q5_0 => nibbles(blocks, out, |b, q, i| ((q | fifth(b, 2, i)) as f32 - 16.0) * half(b, 0), 6),
            CacheType::Q5_1 => nibbles(blocks, out, |b, q, i| (q | fifth(b, 4, i)) as f32 * half(b, 0) + half(b, 2), 8),
            CacheType::Iq4Nl => nibbles(blocks, out, |b, q, _| quantise::IQ4_NL[q as usize] as f32 * half(b, 0), 2),
        }
    }
}

/// The five-bit types keep the fifth bits of all 32 elements in one word.
fn fifth(block: &[u8], at: usize, i: usize) -> u8 {
    ((block[at + i / 8] >> (i % 8)) & 1) << 4
}

/// Blocks of 32 nibbles: the low halves of the 16 bytes at `at` are elements 0..16, the high halves 16..32.
fn nibbles(
    blocks: std::slice::ChunksExact<'_, u8>,
    out: &mut [f32],
    value: impl Fn(&[u8], u8, usize) -> f32,
    at: usize,
) {
    for (o, b) in out.chunks_exact_mut(32).zip(blocks) {
        for j in 0..16 {
            o[j] = value(b, b[at + j] & 15, j);
            o[j + 16] = value(b, b[at + j] >> 4, j + 16);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_ids_round_trip() {
        for t in CacheType::ALL {
            assert_eq!(CacheType::from_id(t.id()), Some(t));
            assert_eq!(t.name().parse(), Ok(t));
            assert_eq!(format!("{t}"), t.name());
        }
        assert_eq!(CacheType::from_id(12), None);
        assert!("q4_k".parse::<CacheType>().is_err());
    }

    #[test]
    fn rows_of_192_channels() {
        let bytes = |t: CacheType| t.row_bytes(192).unwrap();
        assert_eq!([CacheType::F32, CacheType::F16, CacheType::Q8_0, CacheType::Q4_0].map(bytes), [768, 384, 204, 108]);
        assert_eq!(CacheType::Q8_0.row_bytes(33), None);
        assert_eq!(CacheType::F32.row_bytes(u64::MAX / 2), None);
        for t in CacheType::ALL {
            assert_eq!(t.row_elems(bytes(t)), Some(192));
        }
    }

    #[test]
    fn rounds_to_nearest_even() {
        let mut out = Vec::new();
        // 1 + 2^-11 lies between two f16 values: the even one is 1. One f32 step above it, the upper is nearer.
        let tie = 1.0 + f32::powi(2.0, -11);
        CacheType::F16.encode(&[tie, f32::from_bits(tie.to_bits() + 1), -0.0, 6e-8, 65519.0], &mut out).unwrap();
        assert_eq!(out, [0x00, 0x3c, 0x01, 0x3c, 0x00, 0x80, 0x01, 0x00, 0xff, 0x7b]);
        out.clear();
        CacheType::Bf16.encode(&[1.0 + f32::powi(2.0, -8), 3.0e38], &mut out).unwrap();
        assert_eq!(out[..2], [0x80, 0x3f]);
    }

    #[test]
    fn what_is_not_finite_in_the_type_is_found_where_it_is() {
        for (ty, bad) in [
            (CacheType::F16, vec![f32::NAN, f32::INFINITY, 65520.0, -1e9]),
            (CacheType::Bf16, vec![f32::NAN, f32::NEG_INFINITY, f32::MAX]),
            (CacheType::F32, vec![f32::NAN, f32::INFINITY]),
        ] {
            for bad in bad {
                for at in [0, 511, 512, 1300] {
                    let mut v = vec![1.0f32; 1301];
                    v[at] = bad;
                    let mut out = vec![9];
                    assert_eq!(ty.encode(&v, &mut out), Err(at), "{ty} {bad} {at}");
                    assert_eq!(out, [9]);
                }
            }
        }
    }

    #[test]
    fn encode_then_decode_is_the_value_where_it_fits() {
        let v: Vec<f32> = (0..1000).map(|i| (i as f32 - 500.0) / 8.0).collect();
        for t in [CacheType::F32, CacheType::F16, CacheType::Bf16] {
            let mut bytes = Vec::new();
            t.encode(&v, &mut bytes).unwrap();
            let mut back = vec![0.0; v.len()];
            t.decode(&bytes, &mut back);
            if t != CacheType::Bf16 {
                assert_eq!(v, back, "{t}");
            }
        }
    }

    /// Blocks worked out by hand from ggml's formulas; `tests/saved.rs` holds the types against a server's own rows.
    #[test]
    fn a_ramp_in_each_quantised_type() {
        // -16, -15, ... 15: the largest magnitude is the first and becomes the lowest code.
        let ramp: [f32; 32] = std::array::from_fn(|i| i as f32 - 16.0);
        let f16_bytes = |v: f32| f16::from_f32(v).to_le_bytes();
        let encoded = |ty: CacheType| {
            let mut out = Vec::new();
            ty.encode(&ramp, &mut out).unwrap();
            out
        };
        let q8 = encoded(CacheType::Q8_0);
        assert_eq!(q8[..2], f16_bytes(16.0 / 127.0));
        // 127 / 16 is 7.9375: -127, -119.0625, ... 119.0625.
        assert_eq!([q8[2] as i8, q8[3] as i8, q8[18] as i8, q8[33] as i8], [-127, -119, 0, 119]);
        // A scale of 2, codes x / 2 + 8.5 cut off: -16 is 0, -15 is 1, 0 is 8, 15 is 16 and then 15.
        let q4 = encoded(CacheType::Q4_0);
        assert_eq!(
            (q4[..2].to_vec(), q4[2], q4[3], q4[17]),
            (f16_bytes(2.0).to_vec(), 8 << 4, 9 << 4 | 1, 15 << 4 | 8)
        );
        // 31 wide in 15 steps; 15/31 of 16 is 7.74.
        let q4_1 = encoded(CacheType::Q4_1);
        assert_eq!((&q4_1[..2], &q4_1[2..4]), (&f16_bytes(31.0 / 15.0)[..], &f16_bytes(-16.0)[..]));
        assert_eq!((q4_1[4], q4_1[19]), (8 << 4, 15 << 4 | 7));
        // One code for each value; the fifth bits are those of 16 to 31.
        for (ty, at) in [(CacheType::Q5_0, 2), (CacheType::Q5_1, 4)] {
            let b = encoded(ty);
            assert_eq!((b[at..at + 4].to_vec(), b[at + 4], b[at + 19]), (vec![0, 0, 255, 255], 0, 0xff), "{ty}");
            assert_eq!(b[..2], f16_bytes(1.0));
        }
        let mut back = ramp;
        CacheType::Q5_1.round(&mut back);
        assert_eq!(back, ramp);
        for ty in CacheType::ALL {
            let (mut back, mut zeros) = (ramp, [0.0; 32]);
            ty.round(&mut back);
            ty.round(&mut zeros);
            let most = ramp.iter().zip(back).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            // q4_0 has no code for the largest of the other sign.
            assert!(most <= if ty == CacheType::Iq4Nl { 2.0 } else { 1.1 }, "{ty} {most}");
            assert_eq!(zeros, [0.0; 32], "{ty}");
        }
    }

    #[test]
    fn blocks_that_no_scale_holds_are_found() {
        for ty in CacheType::ALL.into_iter().filter(|t| t.is_quantised()) {
            for (bad, at) in [(f32::NAN, 70), (f32::INFINITY, 0), (f32::NEG_INFINITY, 95), (1e30, 33), (-1e30, 64)] {
                let mut v = [0.25f32; 96];
                v[at] = bad;
                let mut out = vec![7];
                assert_eq!(ty.encode(&v, &mut out), Err(at), "{ty} {bad}");
                assert_eq!(out, [7]);
            }
            // The largest that every type holds, since its minimum is an f16.
            ty.encode(&[65504.0; 32], &mut Vec::new()).unwrap();
        }
    }

    #[test]
    fn one_block_of_each_quantised_type() {
        let d = f16::from_f32(0.5).to_le_bytes();
        let m = f16::from_f32(-2.0).to_le_bytes();
        let block = |parts: &[&[u8]]| parts.concat();
        let qs: Vec<u8> = (0..16).map(|j| (15 - j) << 4 | j).collect();
        let high = 0x8000_0001u32.to_le_bytes();
        let mut out = [0.0; 32];
        let first_last = |ty: CacheType, bytes: Vec<u8>, out: &mut [f32; 32]| {
            assert_eq!(bytes.len() as u64, ty.block_bytes());
            ty.decode(&bytes, out);
            [out[0], out[1], out[16], out[31]]
        };
        let q8: Vec<u8> = (0..32).map(|i| (i - 16) as i8 as u8).collect();
        assert_eq!(first_last(CacheType::Q8_0, block(&[&d, &q8]), &mut out), [-8.0, -7.5, 0.0, 7.5]);
        assert_eq!(first_last(CacheType::Q4_0, block(&[&d, &qs]), &mut out), [-4.0, -3.5, 3.5, -4.0]);
        assert_eq!(first_last(CacheType::Q4_1, block(&[&d, &m, &qs]), &mut out), [-2.0, -1.5, 5.5, -2.0]);
        assert_eq!(first_last(CacheType::Q5_0, block(&[&d, &high, &qs]), &mut out), [0.0, -7.5, -0.5, 0.0]);
        assert_eq!(first_last(CacheType::Q5_1, block(&[&d, &m, &high, &qs]), &mut out), [6.0, -1.5, 5.5, 6.0]);
        assert_eq!(first_last(CacheType::Iq4Nl, block(&[&d, &qs]), &mut out), [-63.5, -52.0, 56.5, -63.5]);
    }
}
