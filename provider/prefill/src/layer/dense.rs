//! The plain feed-forward network: its numbers, tensors, steps and costs.

use crate::Error;
use crate::arch::{Activation, FfnShape, RecurrentLayers};
use crate::plan::Op;
use crate::spec::{Common, Keys, MAX_WIDTH, Spec};
use crate::weights::{Linear, Loader};
use npu_kernels::WeightType;
use npu_kernels::host::recurrent::gates;
use npu_kernels::host::rowops::Xielu;

/// One layer's numbers.
#[derive(Clone, Debug)]
pub struct DenseSpec {
    /// Width between the projections.
    pub n_ff: usize,
    /// Gates below the mean and so many deviations are nothing, and the others less by that.
    pub sparse: Option<f32>,
    /// The numbers of xIELU, where that is the activation.
    pub xielu: Option<Xielu>,
}

/// One layer's tensors.
#[derive(Debug)]
#[allow(missing_docs)] // llama.cpp's tensor names
pub struct DenseWeights<'g> {
    pub gate: Option<Linear<'g>>,
    pub up: Linear<'g>,
    pub down: Linear<'g>,
}

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DenseOp {
    /// Gate and up projections.
    GateUp {
        /// Inputs.
        k: usize,
        /// Outputs of each.
        n: usize,
    },
    /// The up projection of a network without a gate.
    Up {
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
    },
    /// Activation of the gate times up, or of up where there is no gate, rounded.
    Gate,
    /// Down projection.
    Down {
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
    },
}

impl DenseSpec {
    /// Reads all layers' numbers.
    pub(crate) fn read(c: &Common<'_>) -> Result<Vec<DenseSpec>, Error> {
        let keys = &c.keys;
        // Layers of one half have a width of 0 where they have no network.
        let min = u32::from(c.arch.recurrent_layers != RecurrentLayers::OneHalf && !c.arch.lone_halves);
        let n_ff = keys
            .per_layer_from(min, "feed_forward_length", c.n_layer, MAX_WIDTH)?
            .ok_or_else(|| keys.wrong("feed_forward_length", "no such key", "the width of the feed-forward network"))?;
        let xielu = match c.arch.activation {
            Activation::Xielu => Some(xielu(c)?),
            _ => None,
        };
        let halves = if c.arch.half_ff { 2 } else { 1 };
        if let Some(odd) = n_ff.iter().find(|n| !n.is_multiple_of(halves)) {
            return Err(keys.wrong("feed_forward_length", odd, "an even number"));
        }
        let layer = |(i, n): (usize, u32)| DenseSpec {
            n_ff: (n / halves) as usize,
            sparse: c.arch.sparse_gates.filter(|(layers, _)| i < *layers as usize).map(|(_, deviations)| deviations),
            xielu: xielu.as_ref().map(|x| x[i]),
        };
        Ok(n_ff.into_iter().enumerate().map(layer).collect())
    }

    pub(crate) fn ops(&self, spec: &Spec) -> Vec<Op> {
        let (e, ff) = (spec.n_embd, self.n_ff);
        let first = match spec.arch.ffn {
            FfnShape::NoGate => DenseOp::Up { k: e, n: ff },
            FfnShape::Gated | FfnShape::Fused => DenseOp::GateUp { k: e, n: ff },
        };
        [first, DenseOp::Gate, DenseOp::Down { k: ff, n: e }].map(Op::Dense).into()
    }
}

/// The numbers of each layer's xIELU; the first two as llama.cpp keeps them, before the softplus that ggml puts them through.
fn xielu(c: &Common<'_>) -> Result<Vec<Xielu>, Error> {
    // These keys carry no architecture's name.
    let keys = Keys { arch: "xielu", ..c.keys };
    let read = |name: &str| {
        let all = keys.f32s(name, c.n_layer)?;
        all.ok_or_else(|| keys.wrong(name, "no such key", "a number, or one per layer"))
    };
    let (n, p, beta, eps) = (read("alpha_n")?, read("alpha_p")?, read("beta")?, read("eps")?);
    let layer = |i: usize| Xielu {
        alpha_n: beta[i] + gates::softplus(n[i]),
        alpha_p: gates::softplus(p[i]),
        beta: beta[i],
        eps: eps[i],
    };
    Ok((0..c.n_layer as usize).map(layer).collect())
}

impl<'g> DenseWeights<'g> {
    pub(crate) fn load(loader: &mut Loader<'g>, spec: &Spec, d: &DenseSpec, prefix: &str) -> Result<Self, Error> {
        let (bias, e, ff) = (spec.arch.other_bias, spec.n_embd, d.n_ff);
        let mut linear = |name: &str, k: usize, n: usize| loader.linear(&format!("{prefix}.{name}"), k, n, bias);
        let (gate, up) = match spec.arch.ffn {
            FfnShape::Gated => (Some(linear("ffn_gate", e, ff)?), linear("ffn_up", e, ff)?),
            FfnShape::Fused => {
                let both = linear("ffn_up", e, 2 * ff)?;
                (Some(both.rows(0, ff)), both.rows(ff, ff))
            }
            FfnShape::NoGate => (None, linear("ffn_up", e, ff)?),
        };
        Ok(DenseWeights { gate, up, down: linear("ffn_down", ff, e)? })
    }

    pub(crate) fn input_types(&self) -> Vec<WeightType> {
        self.gate.iter().chain([&self.up]).map(|l| l.weight.ty()).collect()
    }
}

impl DenseOp {
    /// Multiplications and additions over `m` rows.
    pub(crate) fn flops(&self, m: u64) -> u64 {
        match self {
            DenseOp::GateUp { k, n } => 4 * m * (*k * *n) as u64,
            DenseOp::Up { k, n } | DenseOp::Down { k, n } => 2 * m * (*k * *n) as u64,
            DenseOp::Gate => 0,
        }
    }
}

/// Width of the widest network.
pub(crate) fn widest(spec: &Spec) -> usize {
    spec.layers.iter().filter_map(|l| l.ffn.dense()).map(|d| d.n_ff).max().unwrap_or(0)
}

/// Bytes that a chunk takes: gate and up, and their product as rounded tiles.
pub(crate) fn memory(spec: &Spec, chunk: usize) -> usize {
    chunk * 4 * (2 * widest(spec) + widest(spec))
}
