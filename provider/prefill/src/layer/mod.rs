//! What layers are made of: something that mixes positions, then a feed-forward network, each of a kind.
//!
//! A kind has a file here - its numbers, its tensors, its steps and what they cost - and one of the same name beside
//! `exec` that carries the steps out. The enums below are all that knows of every kind.

pub mod altup;
pub mod attention;
pub mod both;
pub mod delta;
pub mod dense;
pub mod experts;
pub mod latent;
pub mod linear;
pub mod mamba;
pub mod per_layer;
pub mod shortconv;

use crate::Error;
use crate::arch::Layout;
use crate::arch::experts::Beside;
use crate::plan::{Input, Op};
use crate::spec::{FfnInput, LayerSpec, Spec};
use crate::weights::{Loader, Norm};
use altup::AltUpWeights;
use attention::{AttentionSpec, AttentionWeights};
use both::BothWeights;
use delta::{DeltaSpec, DeltaWeights};
use dense::{DenseSpec, DenseWeights};
use experts::{ExpertsSpec, ExpertsWeights};
use latent::{LatentSpec, LatentWeights};
use linear::LinearWeights;
use mamba::{MambaSpec, MambaWeights};
use npu_kernels::WeightType;
use per_layer::PerLayerWeights;
use shortconv::{ShortConvSpec, ShortConvWeights};

/// What mixes the positions of a layer.
#[derive(Clone, Debug)]
pub enum Mixer {
    /// Queries, keys and values.
    Attention(AttentionSpec),
    /// Queries, and one row for all heads' keys and values.
    Latent(LatentSpec),
    /// A gated delta net.
    Delta(DeltaSpec),
    /// A gated short convolution.
    ShortConv(ShortConvSpec),
    /// A selective scan.
    Mamba(MambaSpec),
    /// Attention and a selective scan of the same input; what they give is added up.
    Beside(AttentionSpec, MambaSpec),
    /// One matrix for every position alone.
    Linear,
    /// Nothing: the layer has no first half.
    None,
}

/// What follows in a layer, position by position.
#[derive(Clone, Debug)]
pub enum FeedForward {
    /// One network for all positions.
    Dense(DenseSpec),
    /// A few of many networks for each.
    Experts(ExpertsSpec),
    /// One for all and a few of many, added up.
    Both(DenseSpec, ExpertsSpec),
    /// Nothing: the layer has no second half.
    None,
}

impl Mixer {
    /// The numbers of attention.
    pub fn attention(&self) -> Option<&AttentionSpec> {
        match self {
            Mixer::Attention(a) | Mixer::Beside(a, _) => Some(a),
            _ => None,
        }
    }

    /// The numbers of latent attention.
    pub fn latent(&self) -> Option<&LatentSpec> {
        match self {
            Mixer::Latent(a) => Some(a),
            _ => None,
        }
    }

    /// The numbers of a delta net.
    pub fn delta(&self) -> Option<&DeltaSpec> {
        match self {
            Mixer::Delta(d) => Some(d),
            _ => None,
        }
    }

    /// The numbers of a short convolution.
    pub fn shortconv(&self) -> Option<&ShortConvSpec> {
        match self {
            Mixer::ShortConv(s) => Some(s),
            _ => None,
        }
    }

    /// The numbers of a selective scan.
    pub fn mamba(&self) -> Option<&MambaSpec> {
        match self {
            Mixer::Mamba(s) | Mixer::Beside(_, s) => Some(s),
            _ => None,
        }
    }

    /// Numbers in the convolution's history and in the state, where the layer is recurrent.
    pub fn recurrent(&self, spec: &Spec) -> Option<(usize, usize)> {
        match self {
            Mixer::Attention(_) | Mixer::Latent(_) | Mixer::Linear | Mixer::None => None,
            Mixer::Delta(d) => Some(d.n_embd()),
            Mixer::ShortConv(s) => Some(((s.taps - 1) * spec.n_embd, 0)),
            Mixer::Mamba(s) | Mixer::Beside(_, s) => Some(s.n_embd()),
        }
    }

    /// The steps of a chunk; of the last layer only those that the decoder's memory needs.
    pub(crate) fn ops(&self, spec: &Spec, last: bool) -> Vec<Op> {
        match self {
            Mixer::Attention(a) => a.ops(spec, last),
            Mixer::Latent(a) => a.ops(spec, last),
            Mixer::Delta(d) => d.ops(spec, last),
            Mixer::ShortConv(s) => s.ops(spec, last),
            Mixer::Mamba(s) => s.ops(spec, last, false),
            Mixer::Beside(a, s) => [a.ops(spec, last), s.ops(spec, last, true)].concat(),
            Mixer::Linear => linear::ops(spec),
            Mixer::None => Vec::new(),
        }
    }
}

impl FeedForward {
    /// A plain network, none where it has no width.
    pub(crate) fn from_dense(dense: DenseSpec) -> FeedForward {
        if dense.n_ff == 0 { FeedForward::None } else { FeedForward::Dense(dense) }
    }

    /// The numbers of a plain network.
    pub fn dense(&self) -> Option<&DenseSpec> {
        match self {
            FeedForward::Dense(d) | FeedForward::Both(d, _) => Some(d),
            FeedForward::Experts(_) | FeedForward::None => None,
        }
    }

    /// The numbers of a mixture of experts.
    pub fn experts(&self) -> Option<&ExpertsSpec> {
        match self {
            FeedForward::Experts(x) | FeedForward::Both(_, x) => Some(x),
            FeedForward::Dense(_) | FeedForward::None => None,
        }
    }

    /// Whether there are both.
    pub fn is_both(&self) -> bool {
        matches!(self, FeedForward::Both(..))
    }

    /// Steps of a chunk that come before those of the mixer.
    pub(crate) fn first_ops(&self, spec: &Spec) -> Vec<Op> {
        match self.experts() {
            Some(x) if x.router_first => vec![Op::Norm(Input::FirstRouter), x.route(spec)],
            _ => Vec::new(),
        }
    }

    /// Whether the mixture's input is made before the mixer's output joins, and the plain network's after that.
    pub(crate) fn beside_mixer(&self, spec: &Spec) -> bool {
        self.is_both() && spec.arch.experts.is_some_and(|rule| rule.beside == Beside::BesideMixer)
    }

    /// The steps of a chunk.
    pub(crate) fn ops(&self, spec: &Spec) -> Vec<Op> {
        match self {
            FeedForward::Dense(d) => d.ops(spec),
            FeedForward::Experts(x) => x.ops(spec),
            FeedForward::Both(d, x) => both::ops(spec, d, x),
            FeedForward::None => Vec::new(),
        }
    }
}

/// One layer's tensors.
#[derive(Debug)]
pub struct LayerWeights<'g> {
    /// Before the mixer; `None` where it reads the residual stream itself.
    pub norm: Option<Norm>,
    /// The mixer's.
    pub mixer: MixerWeights<'g>,
    /// After it, before its output joins the residual stream.
    pub post_norm: Option<Norm>,
    /// Before the feed-forward network.
    pub ffn_norm: Option<Norm>,
    /// The network's.
    pub ffn: FfnWeights<'g>,
    /// After it, before its output joins the residual stream.
    pub ffn_post_norm: Option<Norm>,
    /// Those of the layer's part of a second embedding.
    pub per_layer: Option<PerLayerWeights<'g>>,
    /// Those of several residual streams.
    pub altup: Option<AltUpWeights<'g>>,
    /// Multiplies the residual stream when all has joined it.
    pub out_scale: Option<f32>,
}

/// Tensors of a [`Mixer`].
#[derive(Debug)]
#[allow(missing_docs)] // the names are the kinds'
pub enum MixerWeights<'g> {
    Attention(AttentionWeights<'g>),
    Latent(Box<LatentWeights<'g>>),
    Delta(DeltaWeights<'g>),
    ShortConv(ShortConvWeights<'g>),
    Mamba(MambaWeights<'g>),
    Beside(Box<(AttentionWeights<'g>, MambaWeights<'g>)>),
    Linear(LinearWeights<'g>),
    None,
}

/// Tensors of a [`FeedForward`].
#[derive(Debug)]
#[allow(missing_docs)] // the names are the kinds'
pub enum FfnWeights<'g> {
    Dense(DenseWeights<'g>),
    Experts(Box<ExpertsWeights<'g>>),
    Both(Box<BothWeights<'g>>),
    None,
}

impl<'g> MixerWeights<'g> {
    fn load(loader: &mut Loader<'g>, spec: &Spec, mixer: &Mixer, prefix: &str) -> Result<Self, Error> {
        Ok(match mixer {
            Mixer::Attention(a) => MixerWeights::Attention(AttentionWeights::load(loader, spec, a, prefix)?),
            Mixer::Latent(a) => MixerWeights::Latent(Box::new(LatentWeights::load(loader, spec, a, prefix)?)),
            Mixer::Delta(d) => MixerWeights::Delta(DeltaWeights::load(loader, spec, d, prefix)?),
            Mixer::ShortConv(s) => MixerWeights::ShortConv(ShortConvWeights::load(loader, spec, s, prefix)?),
            Mixer::Mamba(s) => MixerWeights::Mamba(MambaWeights::load(loader, spec, s, prefix)?),
            Mixer::Beside(a, s) => MixerWeights::Beside(Box::new((
                AttentionWeights::load(loader, spec, a, prefix)?,
                MambaWeights::load(loader, spec, s, prefix)?,
            ))),
            Mixer::Linear => MixerWeights::Linear(LinearWeights::load(loader, spec, prefix)?),
            Mixer::None => MixerWeights::None,
        })
    }

    /// Attention's.
    pub fn attention(&self) -> Option<&AttentionWeights<'g>> {
        match self {
            MixerWeights::Attention(a) => Some(a),
            MixerWeights::Beside(both) => Some(&both.0),
            _ => None,
        }
    }

    /// Latent attention's.
    pub fn latent(&self) -> Option<&LatentWeights<'g>> {
        match self {
            MixerWeights::Latent(a) => Some(a),
            _ => None,
        }
    }

    /// A delta net's.
    pub fn delta(&self) -> Option<&DeltaWeights<'g>> {
        match self {
            MixerWeights::Delta(d) => Some(d),
            _ => None,
        }
    }

    /// A selective scan's.
    pub fn mamba(&self) -> Option<&MambaWeights<'g>> {
        match self {
            MixerWeights::Mamba(s) => Some(s),
            MixerWeights::Beside(both) => Some(&both.1),
            _ => None,
        }
    }

    /// A short convolution's.
    pub fn shortconv(&self) -> Option<&ShortConvWeights<'g>> {
        match self {
            MixerWeights::ShortConv(s) => Some(s),
            _ => None,
        }
    }

    /// That of one matrix.
    pub fn linear(&self) -> Option<&LinearWeights<'g>> {
        match self {
            MixerWeights::Linear(l) => Some(l),
            _ => None,
        }
    }

    /// Types of the matrices that meet the normed residual stream.
    pub fn input_types(&self) -> Vec<WeightType> {
        match self {
            MixerWeights::Attention(a) => a.input_types(),
            MixerWeights::Latent(a) => a.input_types(),
            MixerWeights::Delta(d) => d.input_types(),
            MixerWeights::ShortConv(s) => s.input_types(),
            MixerWeights::Mamba(s) => s.input_types(),
            MixerWeights::Beside(both) => [both.0.input_types(), both.1.input_types()].concat(),
            MixerWeights::Linear(l) => l.input_types(),
            MixerWeights::None => Vec::new(),
        }
    }
}

impl<'g> FfnWeights<'g> {
    fn load(loader: &mut Loader<'g>, spec: &Spec, ffn: &FeedForward, prefix: &str) -> Result<Self, Error> {
        Ok(match ffn {
            FeedForward::Dense(d) => FfnWeights::Dense(DenseWeights::load(loader, spec, d, prefix)?),
            FeedForward::Experts(x) => FfnWeights::Experts(Box::new(ExpertsWeights::load(loader, spec, x, prefix)?)),
            FeedForward::Both(d, x) => FfnWeights::Both(Box::new(BothWeights::load(loader, spec, d, x, prefix)?)),
            FeedForward::None => FfnWeights::None,
        })
    }

    /// A plain network's.
    pub fn dense(&self) -> Option<&DenseWeights<'g>> {
        match self {
            FfnWeights::Dense(d) => Some(d),
            FfnWeights::Both(b) => Some(&b.dense),
            FfnWeights::Experts(_) | FfnWeights::None => None,
        }
    }

    /// A mixture's.
    pub fn experts(&self) -> Option<&ExpertsWeights<'g>> {
        match self {
            FfnWeights::Experts(x) => Some(x),
            FfnWeights::Both(b) => Some(&b.experts),
            FfnWeights::Dense(_) | FfnWeights::None => None,
        }
    }

    /// Those of both networks.
    pub fn both(&self) -> Option<&BothWeights<'g>> {
        match self {
            FfnWeights::Both(b) => Some(b),
            _ => None,
        }
    }

    /// Types of the matrices that meet the normed residual stream.
    pub fn input_types(&self) -> Vec<WeightType> {
        match self {
            FfnWeights::Dense(d) => d.input_types(),
            FfnWeights::Experts(x) => x.input_types(),
            FfnWeights::Both(b) => [b.dense.input_types(), b.experts.input_types()].concat(),
            FfnWeights::None => Vec::new(),
        }
    }
}

impl<'g> LayerWeights<'g> {
    /// Finds and checks layer `i`'s tensors.
    pub(crate) fn load(loader: &mut Loader<'g>, spec: &Spec, l: &LayerSpec, i: usize) -> Result<Self, Error> {
        let prefix = format!("blk.{i}");
        let name = |what: &str| format!("{prefix}.{what}");
        let e = spec.n_embd;
        let mut norms = spec.arch.norms;
        if l.ffn_input == FfnInput::BesideMixer && spec.arch.layout == Layout::SecondNorm {
            (norms.mixer, norms.ffn) = (Some("attn_norm_2"), norms.mixer);
        }
        if spec.arch.lone_halves && matches!((&l.mixer, &l.ffn), (Mixer::None, FeedForward::None)) {
            // One matrix whose output is lost, if there is anything.
            loader.pass_over(&name("attn_norm."));
            loader.pass_over(&name("attn_output."));
        }
        if matches!(l.mixer, Mixer::None) {
            // The norm before its only half is a layer's only one, under the name that is there for both where no layer has two.
            (norms.mixer, norms.ffn) =
                (None, norms.ffn.or(norms.mixer).filter(|_| !matches!(l.ffn, FeedForward::None)));
        } else if l.ffn_input == FfnInput::Shared || matches!(l.ffn, FeedForward::None) {
            norms.ffn = None;
        }
        let mut before = |stem: Option<&str>| match stem {
            None => Ok(None),
            Some(_) if !norms.weights => Ok(Some(Norm::default())),
            Some(stem) => loader.norm(&name(stem), e).map(Some),
        };
        let (norm, ffn_norm) = (before(norms.mixer)?, before(norms.ffn)?);
        let (mut post_norm, mut ffn_post_norm) = (None, None);
        if let Some([mixer, ffn]) = spec.arch.post_norms {
            // Grok's files have one of two names for the second.
            let ffn = if loader.has(&name("post_ffw_norm.weight")) { "post_ffw_norm" } else { ffn };
            post_norm = Some(loader.norm(&name(mixer), e)?);
            ffn_post_norm = Some(loader.norm(&name(ffn), e)?);
        }
        Ok(LayerWeights {
            norm,
            mixer: MixerWeights::load(loader, spec, &l.mixer, &prefix)?,
            post_norm,
            ffn_norm,
            ffn: FfnWeights::load(loader, spec, &l.ffn, &prefix)?,
            ffn_post_norm,
            per_layer: spec.per_layer.map(|p| PerLayerWeights::load(loader, spec, &p, &prefix)).transpose()?,
            altup: spec.altup.map(|a| AltUpWeights::load(loader, spec, &a, &prefix)).transpose()?,
            out_scale: loader.vector(&name("layer_output_scale.weight"), 1, spec.arch.out_scale)?.map(|v| v[0]),
        })
    }
}

/// Bytes that a run needs for the steps of all layers, per kind: for the whole prompt, and for a chunk.
pub(crate) fn memory(spec: &Spec, n_tokens: usize, chunk: usize) -> usize {
    let recurrent = delta::memory(spec, chunk) + shortconv::memory(spec, chunk) + mamba::memory(spec, chunk);
    let ffn = dense::memory(spec, chunk) + experts::memory(spec, chunk) + both::memory(spec, chunk);
    let attention = attention::memory(spec, n_tokens, chunk) + latent::memory(spec, n_tokens, chunk);
    attention + recurrent + ffn + per_layer::memory(spec, chunk) + altup::memory(spec, n_tokens, chunk)
}
