//! One matrix in the place of attention (some of Deci's layers): every position goes through it alone, and the decoder keeps
//! nothing of such a layer.

use crate::Error;
use crate::arch::Presence;
use crate::plan::Op;
use crate::spec::Spec;
use crate::weights::{Linear, Loader};
use npu_kernels::WeightType;

/// One layer's tensor.
#[derive(Debug)]
pub struct LinearWeights<'g> {
    /// From an embedding's length to the same.
    pub o: Linear<'g>,
}

/// The step: the product.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LinearOp {
    /// Inputs.
    pub k: usize,
    /// Outputs.
    pub n: usize,
}

/// The steps of a chunk.
pub(crate) fn ops(spec: &Spec) -> Vec<Op> {
    vec![Op::Linear(LinearOp { k: spec.n_embd, n: spec.n_embd })]
}

impl<'g> LinearWeights<'g> {
    pub(crate) fn load(loader: &mut Loader<'g>, spec: &Spec, prefix: &str) -> Result<Self, Error> {
        // llama.cpp's loader takes a bias, and its graph leaves it out.
        let o = loader.linear(&format!("{prefix}.attn_output"), spec.n_embd, spec.n_embd, Presence::Never)?;
        Ok(LinearWeights { o })
    }

    pub(crate) fn input_types(&self) -> Vec<WeightType> {
        vec![self.o.weight.ty()]
    }
}

impl LinearOp {
    /// Multiplications and additions over `m` rows.
    pub(crate) fn flops(&self, m: u64) -> u64 {
        2 * m * (self.k * self.n) as u64
    }
}
