//! A second embedding of every token, with a part for each layer: after the two halves of a layer its part, weighed by what the
//! layer left behind, joins the residual stream.
//!
//! What a layer is given is made of two things: a row of a table, and a projection of the token's first embedding. Both are made
//! anew for each layer and chunk, so that the parts of all layers and positions never stand in memory.

use crate::Error;
use crate::arch::{PerLayer, Presence};
use crate::plan::Op;
use crate::spec::{Common, MAX_WIDTH, Spec};
use crate::weights::{Linear, Loader, Norm};
use gguf::Tensor;
use npu_kernels::{WeightType, WeightView};

/// The numbers.
#[derive(Copy, Clone, Debug)]
pub struct PerLayerSpec {
    /// Channels of a layer's part.
    pub width: usize,
    /// Parts: one for each layer of the file, whether it is computed or not.
    pub n_layer: usize,
}

/// Tensors of the model.
#[derive(Debug)]
pub struct PerLayerTable<'g> {
    /// A row per token: the parts of all layers.
    pub table: Tensor<'g>,
    /// From the first embedding to the parts of all layers.
    pub proj: WeightView<'g>,
    /// Of a part that was made so.
    pub norm: Norm,
}

/// One layer's tensors.
#[derive(Debug)]
pub struct PerLayerWeights<'g> {
    /// Factors of the residual stream before that, one for each channel.
    pub scale: Option<Vec<f32>>,
    /// From the residual stream to what weighs the layer's part.
    pub gate: Linear<'g>,
    /// From the weighed part back to the embedding's length.
    pub proj: Linear<'g>,
    /// Of that, before it joins the residual stream.
    pub norm: Norm,
}

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PerLayerOp {
    /// The layer's part, from the tokens.
    Input {
        /// Inputs: the first embedding.
        k: usize,
        /// Outputs.
        n: usize,
    },
    /// What weighs it.
    Gate {
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
    },
    /// GELU of that times the part, rounded.
    Mix,
    /// Back to the embedding's length.
    Out {
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
    },
}

impl PerLayerSpec {
    /// Reads the numbers.
    pub(crate) fn read(c: &Common<'_>) -> Result<Option<PerLayerSpec>, Error> {
        let key = "embedding_length_per_layer_input";
        let width = match c.arch.per_layer {
            PerLayer::None => 0,
            PerLayer::Wide(n) => n,
            PerLayer::Key => match c.keys.u32(key)? {
                None => return Err(c.keys.wrong(key, "no such key", format!("a number from 0 to {MAX_WIDTH}"))),
                Some(0) => 0,
                Some(n) => c.keys.in_range(key, n, MAX_WIDTH)?,
            },
        };
        let spec = PerLayerSpec { width: width as usize, n_layer: c.n_layer as usize };
        Ok(Some(spec).filter(|s| s.width > 0))
    }

    /// The steps of a chunk that stand before the join.
    pub(crate) fn gate(&self, spec: &Spec) -> [Op; 3] {
        let (e, n) = (spec.n_embd, self.width);
        [PerLayerOp::Gate { k: e, n }, PerLayerOp::Mix, PerLayerOp::Out { k: n, n: e }].map(Op::PerLayer)
    }

    /// The step that makes the layer's part.
    pub(crate) fn input(&self, spec: &Spec) -> Op {
        Op::PerLayer(PerLayerOp::Input { k: spec.n_embd, n: self.width })
    }
}

impl<'g> PerLayerTable<'g> {
    pub(crate) fn load(loader: &mut Loader<'g>, spec: &Spec, p: &PerLayerSpec) -> Result<Self, Error> {
        let all = p.width * p.n_layer;
        Ok(PerLayerTable {
            table: loader.rows("per_layer_token_embd.weight", all, spec.n_vocab as usize)?,
            proj: loader.matrix("per_layer_model_proj.weight", spec.n_embd, all)?,
            norm: loader.norm("per_layer_proj_norm", p.width)?,
        })
    }
}

impl<'g> PerLayerWeights<'g> {
    pub(crate) fn load(loader: &mut Loader<'g>, spec: &Spec, p: &PerLayerSpec, prefix: &str) -> Result<Self, Error> {
        let e = spec.n_embd;
        let scale = if spec.altup.is_some() { Presence::Required } else { Presence::Never };
        Ok(PerLayerWeights {
            scale: loader.vector(&format!("{prefix}.altup_correct_scale.weight"), e, scale)?,
            gate: loader.linear(&format!("{prefix}.inp_gate"), e, p.width, Presence::Never)?,
            proj: loader.linear(&format!("{prefix}.proj"), p.width, e, Presence::Never)?,
            norm: loader.norm(&format!("{prefix}.post_norm"), e)?,
        })
    }

    pub(crate) fn input_types(&self) -> Vec<WeightType> {
        vec![self.gate.weight.ty()]
    }
}

impl PerLayerOp {
    /// Multiplications and additions over `m` rows.
    pub(crate) fn flops(&self, m: u64) -> u64 {
        match self {
            PerLayerOp::Input { k, n } | PerLayerOp::Gate { k, n } | PerLayerOp::Out { k, n } => {
                2 * m * (*k * *n) as u64
            }
            PerLayerOp::Mix => 0,
        }
    }
}

/// Bytes that a chunk takes: the layer's part, what weighs it, and both together as rounded tiles.
pub(crate) fn memory(spec: &Spec, chunk: usize) -> usize {
    chunk * 4 * 3 * spec.per_layer.map_or(0, |p| p.width)
}
