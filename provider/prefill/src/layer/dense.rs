//! The plain feed-forward network: its numbers, tensors, steps and costs.

use crate::Error;
use crate::plan::Op;
use crate::spec::{Common, MAX_WIDTH, Spec};
use crate::weights::{Linear, Loader};
use npu_kernels::WeightType;

/// One layer's numbers.
#[derive(Clone, Debug)]
pub struct DenseSpec {
    /// Width between the projections.
    pub n_ff: usize,
}

/// One layer's tensors.
#[derive(Debug)]
#[allow(missing_docs)] // llama.cpp's tensor names
pub struct DenseWeights<'g> {
    pub gate: Linear<'g>,
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
    /// Activation of the gate times up, rounded.
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
        let n_ff = keys
            .per_layer("feed_forward_length", c.n_layer, MAX_WIDTH)?
            .ok_or_else(|| keys.wrong("feed_forward_length", "no such key", "the width of the feed-forward network"))?;
        Ok(n_ff.into_iter().map(|n| DenseSpec { n_ff: n as usize }).collect())
    }

    pub(crate) fn ops(&self, spec: &Spec) -> Vec<Op> {
        let (e, ff) = (spec.n_embd, self.n_ff);
        [DenseOp::GateUp { k: e, n: ff }, DenseOp::Gate, DenseOp::Down { k: ff, n: e }].map(Op::Dense).into()
    }
}

impl<'g> DenseWeights<'g> {
    pub(crate) fn load(loader: &mut Loader<'g>, spec: &Spec, d: &DenseSpec, prefix: &str) -> Result<Self, Error> {
        let (bias, e) = (spec.arch.other_bias, spec.n_embd);
        Ok(DenseWeights {
            gate: loader.linear(&format!("{prefix}.ffn_gate"), e, d.n_ff, bias)?,
            up: loader.linear(&format!("{prefix}.ffn_up"), e, d.n_ff, bias)?,
            down: loader.linear(&format!("{prefix}.ffn_down"), d.n_ff, e, bias)?,
        })
    }

    pub(crate) fn input_types(&self) -> Vec<WeightType> {
        [&self.gate, &self.up].map(|l| l.weight.ty()).into()
    }
}

impl DenseOp {
    /// Multiplications and additions over `m` rows.
    pub(crate) fn flops(&self, m: u64) -> u64 {
        match self {
            DenseOp::GateUp { k, n } => 4 * m * (*k * *n) as u64,
            DenseOp::Down { k, n } => 2 * m * (*k * *n) as u64,
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
