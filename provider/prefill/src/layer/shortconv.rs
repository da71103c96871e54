//! The gated short convolution as a kind of mixer (LFM2): its numbers, tensors, steps and costs.
//!
//! Source: llama.cpp's `src/models/lfm2.cpp`. There is no state but the convolution's history.

use super::delta::{MAX_TAPS, conv, fits};
use crate::Error;
use crate::arch::Presence;
use crate::plan::Op;
use crate::spec::{Common, Spec};
use crate::weights::{Linear, Loader};
use npu_kernels::WeightType;
use npu_kernels::host::recurrent::conv::CausalConv;

/// One layer's numbers.
#[derive(Clone, Debug)]
pub struct ShortConvSpec {
    /// Positions that go into the convolution.
    pub taps: usize,
}

/// One layer's tensors.
#[derive(Debug)]
pub struct ShortConvWeights<'g> {
    /// What multiplies the input of the convolution.
    pub before: Linear<'g>,
    /// What multiplies its output.
    pub after: Linear<'g>,
    /// Its input.
    pub x: Linear<'g>,
    /// The convolution.
    pub conv: CausalConv,
    /// The output projection.
    pub out: Linear<'g>,
}

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ShortConvOp {
    /// Projections: input and both gates; without the second in the last layer.
    Project {
        /// Inputs.
        k: usize,
        /// Outputs of all.
        n: usize,
    },
    /// First gate and convolution; after the last position its history goes to the sink.
    Conv {
        /// Channels.
        channels: usize,
        /// Positions that go into one.
        taps: usize,
    },
    /// Second gate and output projection.
    Out {
        /// Inputs and outputs.
        n: usize,
    },
}

impl ShortConvSpec {
    /// Reads the numbers, which all such layers share.
    pub(crate) fn read(c: &Common<'_>) -> Result<ShortConvSpec, Error> {
        let taps = c.keys.size("shortconv.l_cache", MAX_TAPS)?;
        if taps < 2 {
            return Err(c.keys.wrong("shortconv.l_cache", taps, format!("a number from 2 to {MAX_TAPS}")));
        }
        fits(c, "shortconv.l_cache", taps, u64::from(taps) * u64::from(c.n_embd))?;
        Ok(ShortConvSpec { taps: taps as usize })
    }

    pub(crate) fn ops(&self, spec: &Spec, last: bool) -> Vec<Op> {
        let e = spec.n_embd;
        let mut ops = vec![
            ShortConvOp::Project { k: e, n: if last { 2 * e } else { 3 * e } },
            ShortConvOp::Conv { channels: e, taps: self.taps },
        ];
        if !last {
            ops.push(ShortConvOp::Out { n: e });
        }
        ops.into_iter().map(Op::ShortConv).collect()
    }
}

impl<'g> ShortConvWeights<'g> {
    pub(crate) fn load(loader: &mut Loader<'g>, spec: &Spec, s: &ShortConvSpec, prefix: &str) -> Result<Self, Error> {
        let (e, never) = (spec.n_embd, Presence::Never);
        let name = |what: &str| format!("{prefix}.shortconv.{what}");
        let all = loader.linear(&name("in_proj"), e, 3 * e, never)?;
        Ok(ShortConvWeights {
            before: all.rows(0, e),
            after: all.rows(e, e),
            x: all.rows(2 * e, e),
            conv: conv(loader, &name("conv"), e, s.taps, never)?,
            out: loader.linear(&name("out_proj"), e, e, never)?,
        })
    }

    pub(crate) fn input_types(&self) -> Vec<WeightType> {
        vec![self.x.weight.ty()]
    }
}

impl ShortConvOp {
    /// Multiplications and additions over `m` rows.
    pub(crate) fn flops(&self, m: u64) -> u64 {
        match self {
            ShortConvOp::Project { k, n } => 2 * m * (*k * *n) as u64,
            ShortConvOp::Conv { channels, taps } => 2 * m * (*channels * *taps) as u64,
            ShortConvOp::Out { n } => 2 * m * (*n * *n) as u64,
        }
    }
}

/// The widest such layer: 0 where there is none.
pub(crate) fn widest(spec: &Spec) -> usize {
    if spec.layers.iter().any(|l| l.mixer.shortconv().is_some()) { spec.n_embd } else { 0 }
}

/// Bytes that a chunk takes: projections, the convolution's output, and rounded tiles.
pub(crate) fn memory(spec: &Spec, chunk: usize) -> usize {
    chunk * 4 * 5 * widest(spec)
}
