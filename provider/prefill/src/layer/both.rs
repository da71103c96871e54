//! A plain network and a mixture of experts in one layer: each reads the residual stream through a norm of its own and has one
//! behind it, and their outputs are added up. The router reads the stream through a norm and factors of its own.

use crate::Error;
use crate::layer::dense::{DenseSpec, DenseWeights};
use crate::layer::experts::{ExpertsSpec, ExpertsWeights};
use crate::plan::{Input, Op};
use crate::spec::Spec;
use crate::weights::{Loader, Norm};

/// One layer's tensors, but for the norm before the plain network, which is where all layers have one.
#[derive(Debug)]
pub struct BothWeights<'g> {
    /// The plain network's.
    pub dense: DenseWeights<'g>,
    /// After it.
    pub dense_norm: Norm,
    /// Factors of the router's input, one for each channel.
    pub router: Vec<f32>,
    /// Before the mixture.
    pub norm: Norm,
    /// The mixture's.
    pub experts: ExpertsWeights<'g>,
    /// After it.
    pub experts_norm: Norm,
}

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BothOp {
    /// The plain network's output, normed, is put aside.
    Keep,
    /// The mixture's output, normed, and what was put aside are added up.
    Sum,
}

/// The steps of a chunk.
pub(crate) fn ops(spec: &Spec, dense: &DenseSpec, experts: &ExpertsSpec) -> Vec<Op> {
    let mut ops = dense.ops(spec);
    ops.extend([Op::Both(BothOp::Keep), Op::Norm(Input::Router)]);
    // The first of the mixture's steps is the router's, which has its own input.
    let mut mixture = experts.ops(spec).into_iter();
    ops.extend(mixture.next());
    ops.push(Op::Norm(Input::Experts));
    ops.extend(mixture);
    ops.push(Op::Both(BothOp::Sum));
    ops
}

impl<'g> BothWeights<'g> {
    pub(crate) fn load(
        loader: &mut Loader<'g>,
        spec: &Spec,
        dense: &DenseSpec,
        experts: &ExpertsSpec,
        prefix: &str,
    ) -> Result<Self, Error> {
        let (name, e) = (|what: &str| format!("{prefix}.{what}"), spec.n_embd);
        Ok(BothWeights {
            dense: DenseWeights::load(loader, spec, dense, prefix)?,
            dense_norm: loader.norm(&name("post_ffw_norm_1"), e)?,
            router: loader.values(&name("ffn_gate_inp.scale"), &[e])?,
            norm: loader.norm(&name("pre_ffw_norm_2"), e)?,
            experts: ExpertsWeights::load(loader, spec, experts, prefix)?,
            experts_norm: loader.norm(&name("post_ffw_norm_2"), e)?,
        })
    }
}

/// Bytes that a chunk takes besides what both take: what is put aside.
pub(crate) fn memory(spec: &Spec, chunk: usize) -> usize {
    if spec.layers.iter().any(|l| l.ffn.is_both()) { chunk * 4 * spec.n_embd } else { 0 }
}
