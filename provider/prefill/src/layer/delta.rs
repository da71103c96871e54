//! The gated delta net as a kind of mixer (Qwen3.5, Kimi Linear): its numbers, tensors, steps and costs.
//!
//! Source: llama.cpp's `src/models/{qwen35,qwen3next,kimi-linear,delta-net-base}.cpp`.

use super::attention;
use crate::Error;
use crate::arch::{Presence, Recurrence};
use crate::plan::Op;
use crate::spec::{Common, MAX_WIDTH, Spec};
use crate::weights::{Linear, Loader};
use npu_kernels::WeightType;
use npu_kernels::host::recurrent::conv::CausalConv;
use npu_kernels::host::recurrent::delta::Shape;

/// Beyond any model there is.
pub(super) const MAX_TAPS: u32 = 64;

/// One layer's numbers.
#[derive(Clone, Debug)]
pub struct DeltaSpec {
    /// Heads and their channels.
    pub shape: Shape,
    /// Positions that go into the convolution.
    pub taps: usize,
}

/// One layer's tensors.
#[derive(Debug)]
#[allow(missing_docs)] // llama.cpp's tensor names
pub struct DeltaWeights<'g> {
    /// Queries, keys and values, in this order: one matrix, or three.
    pub qkv: Vec<Linear<'g>>,
    /// What comes before the gate's matrix, where that is of low rank.
    pub gate_a: Option<Linear<'g>>,
    pub gate: Linear<'g>,
    pub strengths: Strengths<'g>,
    pub conv: CausalConv,
    pub dt: Vec<f32>,
    pub a: Vec<f32>,
    pub norm: Vec<f32>,
    pub out: Linear<'g>,
}

/// The projections to one number per value head: how much of a correction is made (beta), and how fast the state fades
/// (alpha).
#[derive(Debug)]
#[allow(missing_docs)]
pub enum Strengths<'g> {
    Apart {
        beta: Linear<'g>,
        alpha: Linear<'g>,
    },
    /// One matrix: for every key head the betas of its value heads, then their alphas.
    Mixed(Linear<'g>),
    /// Betas; alphas of every key channel by way of few channels.
    PerChannel {
        beta: Linear<'g>,
        alpha_a: Linear<'g>,
        alpha_b: Linear<'g>,
    },
}

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DeltaOp {
    /// Projections: queries, keys and values; strengths; and the gate, which the last layer does without.
    Project {
        /// Inputs.
        k: usize,
        /// Outputs of all.
        n: usize,
    },
    /// Strengths of key channels, and the gate, from the few channels that they are projected to first.
    Widen {
        /// Inputs.
        k: usize,
        /// Outputs of all.
        n: usize,
    },
    /// Convolution, norms of queries and keys, decays.
    Conv {
        /// Channels.
        channels: usize,
        /// Positions that go into one.
        taps: usize,
    },
    /// The state goes over the positions; after the last one it and the convolution's history go to the sink.
    Scan {
        /// Value heads.
        heads: usize,
        /// Channels of a head.
        dim: usize,
    },
    /// Gated norm and output projection.
    Out {
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
    },
}

impl DeltaSpec {
    /// Reads the numbers, which all such layers share.
    pub(crate) fn read(c: &Common<'_>) -> Result<DeltaSpec, Error> {
        let keys = &c.keys;
        let taps = keys.size("ssm.conv_kernel", MAX_TAPS)?;
        if c.arch.recurrence == Some(Recurrence::Kda) {
            return DeltaSpec::kda(c, taps);
        }
        let dim = keys.size("ssm.state_size", MAX_WIDTH)?;
        let heads = keys.size("ssm.time_step_rank", MAX_WIDTH)?;
        let key_heads = keys.size("ssm.group_count", MAX_WIDTH)?;
        let inner = keys.size("ssm.inner_size", MAX_WIDTH)?;
        if !heads.is_multiple_of(key_heads) {
            let wanted = format!("a divisor of {heads}, the ssm.time_step_rank");
            return Err(keys.wrong("ssm.group_count", key_heads, wanted));
        }
        let product = u64::from(heads) * u64::from(dim);
        if product != u64::from(inner) {
            let wanted = format!("{product}, the product of ssm.time_step_rank and ssm.state_size");
            return Err(keys.wrong("ssm.inner_size", inner, wanted));
        }
        let channels = product + 2 * u64::from(key_heads) * u64::from(dim);
        fits(c, "ssm.state_size", dim, product * u64::from(dim))?;
        fits(c, "ssm.conv_kernel", taps, channels * u64::from(taps))?;
        let interleaved = c.arch.recurrence == Some(Recurrence::DeltaNet { interleaved: true });
        let (heads, key_heads, dim) = (heads as usize, key_heads as usize, dim as usize);
        let shape = Shape { heads, key_heads, dim, interleaved, per_channel: false };
        Ok(DeltaSpec { shape, taps: taps as usize })
    }

    /// As many key heads as value heads, and as heads of attention.
    fn kda(c: &Common<'_>, taps: u32) -> Result<DeltaSpec, Error> {
        let dim = c.keys.size("kda.head_dim", MAX_WIDTH)?;
        let heads = c.keys.size("attention.head_count", MAX_WIDTH)?;
        let values = u64::from(heads) * u64::from(dim);
        fits(c, "kda.head_dim", dim, values * u64::from(dim))?;
        fits(c, "ssm.conv_kernel", taps, 3 * values * u64::from(taps))?;
        let (heads, dim) = (heads as usize, dim as usize);
        let shape = Shape { heads, key_heads: heads, dim, interleaved: false, per_channel: true };
        Ok(DeltaSpec { shape, taps: taps as usize })
    }

    /// Channels of all value heads.
    pub fn values(&self) -> usize {
        self.shape.heads * self.shape.dim
    }

    /// Channels of all key heads.
    pub fn keys(&self) -> usize {
        self.shape.key_heads * self.shape.dim
    }

    /// Channels of the convolution: queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Numbers in the convolution's history and in the state.
    pub fn n_embd(&self) -> (usize, usize) {
        ((self.taps - 1) * self.channels(), self.values() * self.shape.dim)
    }

    pub(crate) fn ops(&self, spec: &Spec, last: bool) -> Vec<Op> {
        let (e, shape) = (spec.n_embd, self.shape);
        let gate = if last { 0 } else { self.values() };
        let mut ops = Vec::new();
        if shape.per_channel {
            let rank = if last { shape.dim } else { 2 * shape.dim };
            ops.push(DeltaOp::Project { k: e, n: self.channels() + shape.heads + rank });
            ops.push(DeltaOp::Widen { k: shape.dim, n: shape.decays() + gate });
        } else {
            ops.push(DeltaOp::Project { k: e, n: self.channels() + 2 * shape.heads + gate });
        }
        ops.push(DeltaOp::Conv { channels: self.channels(), taps: self.taps });
        ops.push(DeltaOp::Scan { heads: shape.heads, dim: shape.dim });
        if !last {
            ops.push(DeltaOp::Out { k: self.values(), n: e });
        }
        ops.into_iter().map(Op::Delta).collect()
    }
}

/// The decoder's own numbers of these rows are 32-bit.
pub(super) fn fits(c: &Common<'_>, key: &str, found: u32, numbers: u64) -> Result<(), Error> {
    if numbers <= u64::from(u32::MAX) {
        return Ok(());
    }
    let wanted = format!("one that makes fewer than 2^32 numbers a layer, not {numbers}");
    Err(c.keys.wrong(key, found, wanted))
}

impl<'g> DeltaWeights<'g> {
    pub(crate) fn load(loader: &mut Loader<'g>, spec: &Spec, d: &DeltaSpec, prefix: &str) -> Result<Self, Error> {
        let (e, heads, never) = (spec.n_embd, d.shape.heads, Presence::Never);
        let name = |what: &str| format!("{prefix}.{what}");
        if d.shape.per_channel {
            return DeltaWeights::load_kda(loader, e, d, prefix);
        }
        let qkv = loader.linear(&name("attn_qkv"), e, d.channels(), never)?;
        let strengths = if loader.has(&name("ssm_ba.weight")) {
            Strengths::Mixed(loader.linear(&name("ssm_ba"), e, 2 * heads, never)?)
        } else {
            let beta = loader.linear(&name("ssm_beta"), e, heads, never)?;
            Strengths::Apart { beta, alpha: loader.linear(&name("ssm_alpha"), e, heads, never)? }
        };
        Ok(DeltaWeights {
            qkv: vec![qkv],
            gate_a: None,
            gate: loader.linear(&name("attn_gate"), e, d.values(), never)?,
            strengths,
            conv: conv(loader, &name("ssm_conv1d"), d.channels(), d.taps, never)?,
            dt: loader.values(&name("ssm_dt.bias"), &[heads])?,
            a: loader.values(&name("ssm_a"), &[heads])?,
            norm: loader.values(&name("ssm_norm.weight"), &[d.shape.dim])?,
            out: loader.linear(&name("ssm_out"), d.values(), e, never)?,
        })
    }

    /// Kimi delta attention's: the rank of what is projected in two steps is that of a head.
    fn load_kda(loader: &mut Loader<'g>, e: usize, d: &DeltaSpec, prefix: &str) -> Result<Self, Error> {
        let (heads, dim, values) = (d.shape.heads, d.shape.dim, d.values());
        let name = |what: &str| format!("{prefix}.{what}");
        let qkv = attention::qkv(loader, prefix, e, [values; 3], Presence::Never)?;
        let mut conv = Vec::with_capacity(d.taps * d.channels());
        for part in ["q", "k", "v"] {
            conv.extend(loader.values(&name(&format!("ssm_conv1d_{part}.weight")), &[d.taps, 1, values])?);
        }
        let mut linear = |what: &str, k, n| loader.linear(&name(what), k, n, Presence::Never);
        Ok(DeltaWeights {
            qkv: qkv.into(),
            gate_a: Some(linear("ssm_g_a", e, dim)?),
            gate: linear("ssm_g_b", dim, values)?,
            strengths: Strengths::PerChannel {
                beta: linear("ssm_beta", e, heads)?,
                alpha_a: linear("ssm_f_a", e, dim)?,
                alpha_b: linear("ssm_f_b", dim, values)?,
            },
            out: linear("attn_output", values, e)?,
            conv: CausalConv::new(&conv, d.channels(), d.taps, None).expect("the loader checked the shapes"),
            dt: loader.values(&name("ssm_dt.bias"), &[values])?,
            a: loader.values(&name("ssm_a"), &[1, heads])?,
            norm: loader.values(&name("ssm_norm.weight"), &[dim])?,
        })
    }

    pub(crate) fn input_types(&self) -> Vec<WeightType> {
        let mut all: Vec<&Linear<'_>> = self.qkv.iter().collect();
        all.push(self.gate_a.as_ref().unwrap_or(&self.gate));
        match &self.strengths {
            Strengths::Apart { beta, alpha } => all.extend([beta, alpha]),
            Strengths::Mixed(both) => all.push(both),
            Strengths::PerChannel { beta, alpha_a, .. } => all.extend([beta, alpha_a]),
        }
        all.into_iter().map(|l| l.weight.ty()).collect()
    }

    /// Types of the matrices behind those of low rank.
    pub(crate) fn wide_types(&self) -> Vec<WeightType> {
        match &self.strengths {
            Strengths::PerChannel { alpha_b, .. } => vec![alpha_b.weight.ty(), self.gate.weight.ty()],
            _ => Vec::new(),
        }
    }
}

/// A convolution, `stem.weight` and maybe `stem.bias`.
pub(super) fn conv(
    loader: &mut Loader<'_>,
    stem: &str,
    channels: usize,
    taps: usize,
    bias: Presence,
) -> Result<CausalConv, Error> {
    let weight = loader.values(&format!("{stem}.weight"), &[taps, channels])?;
    let bias = loader.vector(&format!("{stem}.bias"), channels, bias)?;
    Ok(CausalConv::new(&weight, channels, taps, bias).expect("the loader checked the shapes"))
}

impl DeltaOp {
    /// Multiplications and additions over `m` rows.
    pub(crate) fn flops(&self, m: u64) -> u64 {
        match self {
            DeltaOp::Project { k, n } | DeltaOp::Widen { k, n } | DeltaOp::Out { k, n } => 2 * m * (*k * *n) as u64,
            DeltaOp::Conv { channels, taps } => 2 * m * (*channels * *taps) as u64,
            // Fading, and two products and an update of two operations each.
            DeltaOp::Scan { heads, dim } => 7 * m * (*heads * *dim * *dim) as u64,
        }
    }
}

/// The delta net layers of a model.
pub(crate) fn layers(spec: &Spec) -> impl Iterator<Item = &DeltaSpec> {
    spec.layers.iter().filter_map(|l| l.mixer.delta())
}

/// Bytes: one layer's state, and a chunk's projections, what becomes of them, and rounded tiles.
pub(crate) fn memory(spec: &Spec, chunk: usize) -> usize {
    let most = |f: &dyn Fn(&DeltaSpec) -> usize| layers(spec).map(f).max().unwrap_or(0);
    let state = most(&|d| d.n_embd().0 + d.n_embd().1);
    // Of low rank: two times as many channels, once as f32 and once rounded.
    let low = |d: &DeltaSpec| if d.shape.per_channel { d.shape.decays() + 3 * d.shape.dim } else { 0 };
    4 * state + chunk * 4 * most(&|d| 2 * d.channels() + 3 * d.values() + 4 * d.shape.heads + low(d))
}
