//! The int8 contract's rounding, exactly: one scale per row of activations and one per output of a weight, each the largest
//! magnitude over 127; values over their scale, half away from zero, kept within ±127. A product is then
//! `C · scale_row · scale_col` with `C` an exact 32-bit integer.
//!
//! This is not how ggml rounds (blocks of 32 or 256 along a row, half to even); see `host::acts` for that.

use crate::host::blocks;
use crate::weight::WeightView;

/// The largest K whose products surely fit 32 bits: 127 · 127 · K < 2^31.
pub const MAX_K: usize = (i32::MAX / (127 * 127)) as usize;

/// Rounds a row and returns its scale. A row of zeros, or one too small to have a scale, has scale 0 and codes 0. Values must
/// be finite: of others nothing sensible can be made, and the caller has refused them.
pub fn row(x: &[f32], codes: &mut [i8]) -> f32 {
    let mut lanes = [0f32; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for c in chunks {
        lanes.iter_mut().zip(c).for_each(|(l, v)| *l = l.max(v.abs()));
    }
    let amax = rest.iter().fold(lanes.iter().fold(0f32, |m, v| m.max(*v)), |m, v| m.max(v.abs()));
    let scale = amax / 127.0;
    if scale > 0.0 {
        codes.iter_mut().zip(x).for_each(|(q, v)| *q = code(v / scale));
    } else {
        codes.fill(0);
    }
    scale
}

/// Half away from zero, within ±127.
#[inline(always)]
fn code(x: f32) -> i8 {
    // What `f32::round` does, in a form that is one truncation: |x| is at most 127 and a rounding error, where adding the
    // largest number below a half and truncating never rounds up what is below a half.
    let magnitude = x.abs() + 0.499_999_97;
    (magnitude.min(127.5) as i32 as f32).copysign(x) as i8
}

/// A weight as the contract has it, one output after the other: codes `[n][k]`, and a scale for each output.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Int8Weight {
    /// Inputs.
    pub k: usize,
    /// `[n][k]`.
    pub codes: Vec<i8>,
    /// `[n]`.
    pub scales: Vec<f32>,
}

impl Int8Weight {
    /// Room for `n` outputs of `k` inputs, all zeros.
    pub fn zeros(n: usize, k: usize) -> Int8Weight {
        Int8Weight { k, codes: vec![0; n * k], scales: vec![0.0; n] }
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.scales.len()
    }

    /// Puts a weight's rows at outputs `first..`, from the values its blocks stand for.
    ///
    /// # Errors
    /// The output of the first row that holds a value that is not finite.
    ///
    /// # Panics
    /// When the weight has other inputs, or more outputs than there is room for.
    pub fn put(&mut self, first: usize, weight: &WeightView<'_>) -> Result<(), usize> {
        assert!(weight.k() == self.k && first + weight.n() <= self.n(), "a weight's place");
        let mut values = vec![0f32; self.k];
        for i in 0..weight.n() {
            blocks::row_values(weight.ty(), weight.row(i), &mut values);
            if values.iter().any(|v| !v.is_finite()) {
                return Err(i);
            }
            let scale = row(&values, &mut self.codes[(first + i) * self.k..][..self.k]);
            self.scales[first + i] = scale * weight.factor();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: amax 2.54, so the scale is 0.02 and 0.01 is exactly half a step.
    #[test]
    fn halves_go_away_from_zero() {
        let x = [127.0, 0.5, -0.5, 1.5, -1.5, 2.5, 0.499_999_97, -126.5, 126.499_99, 0.0];
        let mut q = [9i8; 10];
        assert_eq!(row(&x, &mut q), 1.0);
        assert_eq!(q, [127, 1, -1, 2, -2, 3, 0, -127, 126, 0]);
        let mut q = [9i8; 3];
        assert_eq!(row(&[-254.0, 1.0, 3.0], &mut q), 2.0);
        assert_eq!(q, [-127, 1, 2]);
    }

    #[test]
    fn nothing_and_next_to_nothing() {
        let mut q = [9i8; 2];
        assert_eq!(row(&[0.0, -0.0], &mut q), 0.0);
        assert_eq!(q, [0, 0]);
        assert_eq!(row(&[1e-45, 0.0], &mut q), 0.0);
        assert_eq!(q, [0, 0]);
        let scale = row(&[f32::MAX, -f32::MAX], &mut q);
        assert!(scale.is_finite());
        assert_eq!(q, [127, -127]);
    }

    #[test]
    fn one_truncation_is_f32_round() {
        for i in -(127 * 4096)..=127 * 4096 {
            let x = i as f32 / 4096.0;
            assert_eq!(i32::from(code(x)), x.round() as i32, "{x}");
            for x in [f32::from_bits(x.to_bits() + 1), f32::from_bits(x.to_bits().wrapping_sub(1))] {
                if x.abs() <= 127.4 {
                    assert_eq!(i32::from(code(x)), x.round() as i32, "{x:e}");
                }
            }
        }
    }

    #[test]
    fn the_largest_products_fit() {
        let n = MAX_K as i64;
        assert!(127 * 127 * n <= i64::from(i32::MAX) && 127 * 127 * (n + 1) > i64::from(i32::MAX));
    }
}
