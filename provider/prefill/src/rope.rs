//! Rotary position embedding: which angle each pair of channels is turned by at each position.
//!
//! The arithmetic is ggml's (`ggml_rope_cache_init`, `rope_yarn` in `ops.cpp`), in f32 and in its order - angles are
//! made by repeated multiplication - because at long positions the rounding of that product is larger than everything
//! else in a key. How the parameters follow from a model's metadata is llama.cpp's (`llama-context.cpp`).

use npu_kernels::host::rowops::Pairing;

/// One layer's rotation.
#[derive(Clone, PartialEq, Debug)]
pub struct Rope {
    /// Channels that are turned, from the first on; even.
    pub n_rot: usize,
    /// Which of them together.
    pub pairing: Pairing,
    /// Pairs that do not turn; none at all where every pair does.
    pub still: Vec<bool>,
    /// Base of the geometric row of frequencies.
    pub freq_base: f32,
    /// Positions are multiplied by this (1 / scaling factor).
    pub freq_scale: f32,
    /// Divides the angle of each pair.
    pub factors: Factors,
    /// How much of YaRN's interpolation: 0 none, 1 all.
    pub ext_factor: f32,
    /// Multiplies cosine and sine.
    pub attn_factor: f32,
    /// YaRN's bounds, in rotations over the original context.
    pub beta: (f32, f32),
    /// The context length that the model was first trained on.
    pub n_ctx_orig: u32,
}

/// What divides the angles, `n_rot / 2` numbers each.
#[derive(Clone, PartialEq, Debug)]
pub enum Factors {
    /// Nothing.
    None,
    /// These.
    All(Vec<f32>),
    /// One set or the other, by the decoder's context size, whatever the length of the prompt.
    ByContext {
        /// Contexts up to `above`.
        short: Vec<f32>,
        /// Larger ones.
        long: Vec<f32>,
        /// Where the long ones begin.
        above: u32,
    },
}

impl Factors {
    /// Those of a decoder with this context size; `None` where it decides and is not known.
    pub fn of(&self, n_ctx: Option<u32>) -> Option<Option<&[f32]>> {
        match self {
            Factors::None => Some(None),
            Factors::All(all) => Some(Some(all)),
            Factors::ByContext { short, long, above } => n_ctx.map(|n| {
                // The decoder rounds its context up to whole multiples of 256 cells.
                let larger = u64::from(n).next_multiple_of(256) > u64::from(*above);
                Some(if larger { &long[..] } else { short })
            }),
        }
    }
}

/// YaRN's `attn_factor` for a scaling type, as llama.cpp has computed it since it cancels the factor that
/// [`Rope::table`] applies when `ext_factor` is not 0 (builds from December 2025 on). `log_mul` is the metadata's
/// `rope.scaling.yarn_log_multiplier`, `factor` its `rope.scaling.attn_factor`.
pub fn yarn_attn_factor(ext_factor: f32, freq_scale: f32, log_mul: f32, factor: f32) -> f32 {
    if ext_factor == 0.0 {
        return factor;
    }
    let scale = 1.0 / freq_scale;
    let magnitude = |mul: f32| if scale <= 1.0 { 1.0 } else { 0.1 * mul * scale.ln() + 1.0 };
    let magnitude = if log_mul == 0.0 { magnitude(1.0) } else { magnitude(1.0) / magnitude(log_mul) };
    magnitude * (1.0 / (1.0 + 0.1 * scale.ln())) * factor
}

impl Rope {
    /// (low, high) pair between which YaRN passes from extrapolation to interpolation.
    fn corr_dims(&self) -> (f32, f32) {
        let dim = |rotations: f32| {
            self.n_rot as f32 * (self.n_ctx_orig as f32 / (rotations * 2.0 * std::f32::consts::PI)).ln()
                / (2.0 * self.freq_base.ln())
        };
        (dim(self.beta.0).floor().max(0.0), dim(self.beta.1).ceil().min(self.n_rot as f32 - 1.0))
    }

    /// Cosines and sines of position `position`, `n_rot / 2` each, with these factors.
    pub fn table(&self, position: u32, factors: Option<&[f32]>, cos: &mut [f32], sin: &mut [f32]) {
        let theta_scale = self.freq_base.powf(-2.0 / self.n_rot as f32);
        let (low, high) = if self.ext_factor == 0.0 { (0.0, 0.0) } else { self.corr_dims() };
        let mut theta = position as f32;
        for i in 0..self.n_rot / 2 {
            let theta_here = if self.still.get(i) == Some(&true) { 0.0 } else { theta };
            let extrapolated = factors.map_or(theta_here, |f| theta_here / f[i]);
            let mut angle = self.freq_scale * extrapolated;
            let mut magnitude = self.attn_factor;
            if self.ext_factor != 0.0 {
                let y = (i as f32 - low) / (high - low).max(0.001);
                let mix = (1.0 - y.clamp(0.0, 1.0)) * self.ext_factor;
                angle = angle * (1.0 - mix) + extrapolated * mix;
                magnitude *= 1.0 + 0.1 * (1.0 / self.freq_scale).ln();
            }
            cos[i] = angle.cos() * magnitude;
            sin[i] = angle.sin() * magnitude;
            theta *= theta_scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(n_rot: usize) -> Rope {
        Rope {
            n_rot,
            pairing: Pairing::Halves,
            still: Vec::new(),
            freq_base: 10000.0,
            freq_scale: 1.0,
            factors: Factors::None,
            ext_factor: 0.0,
            attn_factor: 1.0,
            beta: (32.0, 1.0),
            n_ctx_orig: 4096,
        }
    }

    fn angles(rope: &Rope, position: u32) -> Vec<f64> {
        let n = rope.n_rot / 2;
        let (mut cos, mut sin) = (vec![0.0; n], vec![0.0; n]);
        rope.table(position, rope.factors.of(None).unwrap(), &mut cos, &mut sin);
        cos.iter().zip(&sin).map(|(c, s)| f64::from(*s).atan2(f64::from(*c))).collect()
    }

    #[test]
    fn frequencies_are_a_geometric_row() {
        // Position 1: angle i is base^(-2i / n_rot).
        for (i, angle) in angles(&plain(64), 1).iter().enumerate() {
            let want = 10000f64.powf(-2.0 * i as f64 / 64.0);
            assert!((angle - want).abs() < 1e-6 * want.max(1e-3), "{i}: {angle} {want}");
        }
    }

    #[test]
    fn linear_scaling_divides_the_position() {
        let scaled = Rope { freq_scale: 0.25, ..plain(16) };
        for (a, b) in angles(&scaled, 8).iter().zip(angles(&plain(16), 2)) {
            assert!((a - b).abs() < 1e-6);
        }
    }

    #[test]
    fn factors_divide_angles_and_ones_change_nothing() {
        let ones = Rope { factors: Factors::All(vec![1.0; 8]), ..plain(16) };
        assert_eq!(angles(&ones, 3), angles(&plain(16), 3));
        let tail = Rope { factors: Factors::All([vec![1.0; 4], vec![8.0; 4]].concat()), ..plain(16) };
        for (i, (a, b)) in angles(&tail, 1).iter().zip(angles(&plain(16), 1)).enumerate() {
            let want = if i < 4 { b } else { b / 8.0 };
            assert!((a - want).abs() < 1e-6, "{i}");
        }
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_scales_slow_ones() {
        let factor = 4.0f32;
        let scale = 1.0 / factor;
        let attn = yarn_attn_factor(1.0, scale, 0.0, 1.0);
        let yarn = Rope { freq_scale: scale, ext_factor: 1.0, attn_factor: attn, ..plain(64) };
        let (a, b) = (angles(&yarn, 1), angles(&plain(64), 1));
        assert!((a[0] - b[0]).abs() < 1e-6, "the fastest pair extrapolates");
        assert!((a[31] - b[31] / 4.0).abs() < 1e-9, "the slowest interpolates");
        // |cos, sin| is 0.1 ln(factor) + 1: the cancelled factor comes back in the table.
        let (mut cos, mut sin) = (vec![0.0; 32], vec![0.0; 32]);
        yarn.table(5, None, &mut cos, &mut sin);
        let want = 0.1 * factor.ln() + 1.0;
        assert!((cos[3].hypot(sin[3]) - want).abs() < 1e-5);
    }
}
