//! A plain network and a mixture of experts in one layer, whose outputs are added up. What each reads, and what stands behind it, is
//! told by [`Beside`].

use crate::Error;
use crate::arch::experts::{Beside, ExpertRule};
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
    pub dense_norm: Option<Norm>,
    /// Factors of the router's input, one for each channel.
    pub router: Option<Vec<f32>>,
    /// Before the mixture.
    pub norm: Option<Norm>,
    /// The mixture's.
    pub experts: ExpertsWeights<'g>,
    /// After it.
    pub experts_norm: Option<Norm>,
}

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BothOp {
    /// The output of the one that comes first, normed where there is a norm, is put aside.
    Keep,
    /// The other's output, normed likewise, and what was put aside are added up.
    Sum,
    /// The same, and the sum is divided by the square root of 2.
    Mean,
}

/// The steps of a chunk.
pub(crate) fn ops(spec: &Spec, dense: &DenseSpec, experts: &ExpertsSpec) -> Vec<Op> {
    let keep = [Op::Both(BothOp::Keep)].into_iter();
    match rule(spec).beside {
        Beside::BesideMixer => {
            let mut ops: Vec<Op> = experts.ops(spec).into_iter().chain(keep).collect();
            ops.push(Op::Norm(Input::FeedForward));
            return ops.into_iter().chain(dense.ops(spec)).chain([Op::Both(BothOp::Sum)]).collect();
        }
        Beside::Mean => {
            let ops = dense.ops(spec).into_iter().chain(keep).chain(experts.ops(spec));
            return ops.chain([Op::Both(BothOp::Mean)]).collect();
        }
        Beside::Norms | Beside::No => {}
    }
    let mut ops: Vec<Op> = dense.ops(spec).into_iter().chain(keep).collect();
    ops.push(Op::Norm(Input::Router));
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
        let beside = rule(spec).beside;
        let norms = beside == Beside::Norms;
        let mut norm = |what: &str, there: bool| there.then(|| loader.norm(&name(what), e)).transpose();
        let (dense_norm, experts_norm) = (norm("post_ffw_norm_1", norms)?, norm("post_ffw_norm_2", norms)?);
        let norm = match beside {
            Beside::BesideMixer => norm("ffn_norm_exps", true)?,
            _ => norm("pre_ffw_norm_2", norms)?,
        };
        let router = if norms { Some(loader.values(&name("ffn_gate_inp.scale"), &[e])?) } else { None };
        Ok(BothWeights {
            dense: DenseWeights::load(loader, spec, dense, prefix)?,
            dense_norm,
            router,
            norm,
            experts: ExpertsWeights::load(loader, spec, experts, prefix)?,
            experts_norm,
        })
    }
}

fn rule(spec: &Spec) -> &'static ExpertRule {
    spec.arch.experts.expect("experts come from a rule")
}

/// Bytes that a chunk takes besides what both take: what is put aside.
pub(crate) fn memory(spec: &Spec, chunk: usize) -> usize {
    if spec.layers.iter().any(|l| l.ffn.is_both()) { chunk * 4 * spec.n_embd } else { 0 }
}
