//! A weight as one kernel wants it: rounded to int8, padded, laid out, with what belongs to it - scales, and the projection that
//! its products are checked with. As bytes it can be kept and read again.

use crate::catalogue::{Layout, Spec};
use crate::check::Probe;
use crate::pack;
use crate::quant::Int8Weight;
use crate::weight::WeightView;
use sha2::{Digest, Sha256};

/// See the module's documentation.
#[derive(Clone, PartialEq, Debug)]
pub struct Packed {
    /// Inputs.
    pub k: usize,
    /// Outputs.
    pub n: usize,
    /// B.
    pub bytes: Vec<u8>,
    /// Per output.
    pub scales: Vec<f32>,
    /// To check its products with.
    pub probe: Probe,
}

/// Begins every packed weight's bytes; the digit counts versions of rounding and layout.
const MAGIC: &[u8; 8] = b"npu-b i1";
/// Magic, k, n, length of B; the checksum of everything before it stands at the end.
const HEAD: usize = 8 + 3 * 8;
const TAIL: usize = 4;

impl Packed {
    /// Rounds and lays out weights whose outputs follow one another, for a kernel that covers them.
    ///
    /// # Errors
    /// The output, counted over all, that holds a value that is not finite.
    ///
    /// # Panics
    /// When the kernel is not an int8 one or does not cover them, or the weights differ in their inputs: the caller's choice.
    pub fn new(spec: &Spec, parts: &[WeightView<'_>]) -> Result<Packed, usize> {
        let n: usize = parts.iter().map(WeightView::n).sum();
        let k = parts.first().map_or(0, WeightView::k);
        assert!(spec.is_int8() && k <= spec.k && n <= spec.n, "{k} x {n} for {spec}");
        let mut weight = Int8Weight::zeros(n, k);
        let mut first = 0;
        for part in parts {
            weight.put(first, part).map_err(|row| first + row)?;
            first += part.n();
        }
        let mut bytes = vec![0; spec.k * spec.n];
        match spec.b.layout {
            Layout::Blocked64x128 => pack::blocked::pack(&weight.codes, n, k, spec.k, spec.n, &mut bytes),
            _ => pack::row_major_b(&weight.codes, n, k, spec.k, spec.n, &mut bytes),
        }
        let probe = Probe::new(&weight);
        Ok(Packed { k, n, bytes, scales: weight.scales, probe })
    }

    /// The name under which the packed form of these weights can be kept: a hash of everything it follows from.
    pub fn key(spec: &Spec, parts: &[WeightView<'_>]) -> String {
        let mut hash = Sha256::new();
        hash.update(MAGIC);
        hash.update(format!("{} {} {}", spec.k, spec.n, spec.b));
        for part in parts {
            hash.update(format!("\0{:?} {} {}\0", part.ty(), part.n(), part.k()));
            if part.factor() != 1.0 {
                hash.update(part.factor().to_le_bytes());
            }
            hash.update(part.data());
        }
        hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
    }

    /// Its bytes, to be kept.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD + self.bytes.len() + 4 * self.n + 8 * self.k + TAIL);
        out.extend(MAGIC);
        for number in [self.k, self.n, self.bytes.len()] {
            out.extend((number as u64).to_le_bytes());
        }
        self.scales.iter().for_each(|s| out.extend(s.to_le_bytes()));
        self.probe.sums().iter().for_each(|s| out.extend(s.to_le_bytes()));
        out.extend(&self.bytes);
        let sum = crc32fast::hash(&out);
        out.extend(sum.to_le_bytes());
        out
    }

    /// What [`Packed::to_bytes`] made for a kernel and this many inputs and outputs; `None` for anything else, damaged
    /// bytes among it.
    pub fn from_bytes(spec: &Spec, k: usize, n: usize, bytes: &[u8]) -> Option<Packed> {
        let b_len = spec.bytes()[1];
        if bytes.len() != HEAD + 4 * n + 8 * k + b_len + TAIL {
            return None;
        }
        let (body, sum) = bytes.split_at(bytes.len() - TAIL);
        let mut head = MAGIC.to_vec();
        [k, n, b_len].iter().for_each(|v| head.extend((*v as u64).to_le_bytes()));
        if body[..HEAD] != head[..] || crc32fast::hash(body).to_le_bytes() != *sum {
            return None;
        }
        let (scales, rest) = body[HEAD..].split_at(4 * n);
        let (sums, b) = rest.split_at(8 * k);
        let scales = scales.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let sums = sums.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
        Some(Packed { k, n, bytes: b.to_vec(), scales, probe: Probe::with_sums(n, sums) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WeightType;

    fn weight(n: usize, k: usize) -> Vec<u8> {
        (0..n * k).flat_map(|i| (((i * 31) % 64) as f32 / 8.0 - 4.0).to_le_bytes()).collect()
    }

    /// NVFP4 matrices come with one.
    #[test]
    fn a_factor_is_in_the_scales_and_in_the_name() {
        let data = weight(4, 32);
        let view = WeightView::new(WeightType::F32, 4, 32, &data).unwrap();
        let spec = Spec::int8("x", "O", 128, 128);
        let (plain, twice) = (Packed::new(&spec, &[view]).unwrap(), Packed::new(&spec, &[view.times(2.0)]).unwrap());
        assert_eq!(plain.bytes, twice.bytes);
        assert!(plain.scales.iter().zip(&twice.scales).all(|(p, t)| 2.0 * p == *t && *t > 0.0));
        assert_ne!(Packed::key(&spec, &[view]), Packed::key(&spec, &[view.times(2.0)]));
    }

    #[test]
    fn kept_and_read_again_or_not_at_all() {
        let (n, k) = (100, 96);
        let data = weight(n, k);
        let view = WeightView::new(WeightType::F32, n, k, &data).unwrap();
        for layout in [Layout::RowMajor, Layout::Blocked64x128] {
            let mut spec = Spec::int8("x", "O", 128, 128);
            spec.b.layout = layout;
            let packed = Packed::new(&spec, &[view]).unwrap();
            let bytes = packed.to_bytes();
            assert_eq!(Packed::from_bytes(&spec, k, n, &bytes).as_ref(), Some(&packed));
            assert!(Packed::from_bytes(&spec, k, n - 1, &bytes).is_none());
            assert!(Packed::from_bytes(&spec, k, n, &bytes[..bytes.len() - 1]).is_none());
            for at in (0..bytes.len()).step_by(97) {
                let mut bad = bytes.clone();
                bad[at] ^= 0x10;
                assert!(Packed::from_bytes(&spec, k, n, &bad).is_none(), "byte {at}");
            }
        }
    }

    #[test]
    fn the_key_follows_everything() {
        let data = weight(4, 32);
        let view = |n, k| WeightView::new(WeightType::F32, n, k, &data).unwrap();
        let spec = Spec::int8("x", "O", 128, 128);
        let mut blocked = spec.clone();
        blocked.b.layout = Layout::Blocked64x128;
        let other = weight(5, 32);
        let other = WeightView::new(WeightType::F32, 4, 32, &other[128..]).unwrap();
        let keys = [
            Packed::key(&spec, &[view(4, 32)]),
            Packed::key(&spec, &[view(2, 64)]),
            Packed::key(&blocked, &[view(4, 32)]),
            Packed::key(&Spec::int8("x", "O", 128, 256), &[view(4, 32)]),
            Packed::key(&spec, &[other]),
            Packed::key(&spec, &[view(4, 32), view(4, 32)]),
        ];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[..i].iter().all(|b| a != b), "{i}");
        }
        assert_eq!(Packed::key(&Spec::int8("y", "U", 128, 128), &[view(4, 32)]), keys[0], "not who it is made for");
    }
}
