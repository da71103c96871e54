//! Several residual streams (AltUp), of which the layers work on the first: each layer begins with a prediction of what it will
//! leave in all of them, and ends with their correction by what it did. A narrow detour around attention (LAuReL) comes with it.

use crate::Error;
use crate::arch::Presence;
use crate::plan::Op;
use crate::spec::Spec;
use crate::weights::{Linear, Loader, Norm};
use npu_kernels::{WeightType, WeightView};

/// The numbers. No file states them: llama.cpp has them as constants.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct AltUpSpec {
    /// Streams, the first included.
    pub streams: usize,
    /// Channels in the middle of the detour.
    pub rank: usize,
}

/// Those of all models there are.
pub(crate) const ALTUP: AltUpSpec = AltUpSpec { streams: 4, rank: 64 };

/// Tensors of the model.
#[derive(Debug)]
pub struct AltUpTable<'g> {
    /// From the embedding to the other streams.
    pub proj: Vec<WeightView<'g>>,
}

/// One layer's tensors.
#[derive(Debug)]
pub struct AltUpWeights<'g> {
    /// Before the router.
    pub router_norm: Norm,
    /// From the first stream to a number for each stream.
    pub router: Linear<'g>,
    /// From these to how much of each stream goes into the prediction of each.
    pub predict: Linear<'g>,
    /// From these to how much of the correction each stream takes, less 1.
    pub correct: Linear<'g>,
    /// The detour.
    pub laurel: [Linear<'g>; 2],
    /// After it.
    pub laurel_norm: Norm,
}

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AltUpOp {
    /// The embedding becomes all streams.
    Spread {
        /// Inputs.
        k: usize,
        /// Outputs, of all other streams.
        n: usize,
    },
    /// Every stream becomes what is predicted of it.
    Predict {
        /// Channels of a stream.
        k: usize,
        /// Streams.
        n: usize,
    },
    /// The detour around attention.
    Laurel {
        /// Inputs, and outputs at its end.
        k: usize,
        /// Channels in its middle.
        n: usize,
    },
    /// Its output joins the first stream.
    JoinLaurel,
    /// Every stream is corrected by what the layer made of the first.
    Correct {
        /// Channels of a stream.
        k: usize,
        /// Streams.
        n: usize,
    },
    /// The layer's part of the second embedding joins the other streams.
    JoinPart,
}

impl AltUpSpec {
    /// The step after the embedding.
    pub(crate) fn spread(&self, spec: &Spec) -> Op {
        Op::AltUp(AltUpOp::Spread { k: spec.n_embd, n: (self.streams - 1) * spec.n_embd })
    }

    /// The step before a layer.
    pub(crate) fn predict(&self, spec: &Spec) -> Op {
        Op::AltUp(AltUpOp::Predict { k: spec.n_embd, n: self.streams })
    }

    /// The detour.
    pub(crate) fn laurel(&self, spec: &Spec) -> Op {
        Op::AltUp(AltUpOp::Laurel { k: spec.n_embd, n: self.rank })
    }

    /// The step after a layer.
    pub(crate) fn correct(&self, spec: &Spec) -> Op {
        Op::AltUp(AltUpOp::Correct { k: spec.n_embd, n: self.streams })
    }
}

impl<'g> AltUpTable<'g> {
    pub(crate) fn load(loader: &mut Loader<'g>, spec: &Spec, a: &AltUpSpec) -> Result<Self, Error> {
        // From the streams back to one, before the output that is never computed.
        loader.find("altup_unembd_proj.weight");
        Ok(AltUpTable { proj: loader.matrices("altup_proj.weight", spec.n_embd, spec.n_embd, a.streams - 1)? })
    }

    /// Types of the matrices that meet the embedding.
    pub(crate) fn input_types(&self) -> Vec<WeightType> {
        self.proj.iter().map(WeightView::ty).collect()
    }
}

impl<'g> AltUpWeights<'g> {
    pub(crate) fn load(loader: &mut Loader<'g>, spec: &Spec, a: &AltUpSpec, prefix: &str) -> Result<Self, Error> {
        let (name, e, s) = (|what: &str| format!("{prefix}.{what}"), spec.n_embd, a.streams);
        let mut linear = |what: &str, k: usize, n: usize| loader.linear(&name(what), k, n, Presence::Never);
        let (router, predict, correct) = (
            linear("altup_router", e, s)?,
            linear("altup_predict_coef", s, s * s)?,
            linear("altup_correct_coef", s, s)?,
        );
        let laurel = [linear("laurel_l", e, a.rank)?, linear("laurel_r", a.rank, e)?];
        Ok(AltUpWeights {
            router_norm: loader.norm(&name("altup_router_norm"), e)?,
            router,
            predict,
            correct,
            laurel,
            laurel_norm: loader.norm(&name("laurel_post_norm"), e)?,
        })
    }

    /// Types of the matrices that meet a normed stream.
    pub(crate) fn input_types(&self) -> Vec<WeightType> {
        [&self.router, &self.laurel[0]].map(|l| l.weight.ty()).into()
    }
}

impl AltUpOp {
    /// Multiplications and additions over `m` rows.
    pub(crate) fn flops(&self, m: u64) -> u64 {
        let numbers = match self {
            AltUpOp::Spread { k, n } => k * n,
            // The router, and every stream from every stream.
            AltUpOp::Predict { k, n } => k * n + k * n * n,
            AltUpOp::Laurel { k, n } => 2 * k * n,
            AltUpOp::Correct { k, n } => 2 * k * n,
            AltUpOp::JoinLaurel | AltUpOp::JoinPart => 0,
        };
        2 * m * numbers as u64
    }
}

/// Bytes: the other streams of all positions; for a chunk the first one's prediction, the detour's output, and its input unrounded,
/// its middle as f32 and as rounded tiles, and what the router says.
pub(crate) fn memory(spec: &Spec, n_tokens: usize, chunk: usize) -> usize {
    let (Some(a), e) = (spec.altup, spec.n_embd) else { return 0 };
    let router = 2 * a.streams + a.streams * a.streams;
    4 * (n_tokens * (a.streams - 1) * e + chunk * (3 * e + 2 * a.rank + router))
}
