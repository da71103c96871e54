//! Mamba and Mamba-2 as kinds of mixer: their numbers, tensors, steps and costs.
//!
//! Source: llama.cpp's `src/models/{mamba,mamba2,mamba-base}.cpp`. Mamba is Mamba-2 with heads of one channel, whose steps
//! and vectors are projected from what the convolution gives instead of from the layer's input.

use super::Mixer;
use super::delta::{MAX_TAPS, conv, fits};
use crate::Error;
use crate::arch::{Presence, Recurrence};
use crate::plan::Op;
use crate::spec::{Common, MAX_WIDTH, Spec};
use crate::weights::{Linear, Loader};
use npu_kernels::WeightType;
use npu_kernels::host::recurrent::conv::CausalConv;
use npu_kernels::host::recurrent::scan::Shape;

/// One layer's numbers.
#[derive(Clone, Debug)]
pub struct MambaSpec {
    /// Heads, their channels and their state.
    pub shape: Shape,
    /// Positions that go into the convolution.
    pub taps: usize,
    /// Mamba: numbers that the steps of all channels are projected from. Mamba-2 has none.
    pub rank: Option<usize>,
    /// Mamba: whether those numbers and both vectors are normed.
    pub normed: Normed,
    /// Mamba-2: whether there is a norm behind the gate.
    pub out_norm: Presence,
}

/// How what selects is normed.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Normed {
    /// Not at all.
    No,
    /// Without weights.
    Plain,
    /// With weights.
    Weighted,
}

/// One layer's tensors.
#[derive(Debug)]
#[allow(missing_docs)] // llama.cpp's tensor names
pub struct MambaWeights<'g> {
    /// The gate.
    pub z: Linear<'g>,
    /// What the convolution takes: values, and in Mamba-2 input and output vectors.
    pub conv_in: Linear<'g>,
    pub conv: CausalConv,
    /// Mamba: what the steps come from, input and output vectors.
    pub x: Option<Linear<'g>>,
    /// Weights of the norms of what the steps come from, of input and of output vectors.
    pub select_norms: Option<[Vec<f32>; 3]>,
    /// Steps, with their bias.
    pub dt: Linear<'g>,
    pub a: Vec<f32>,
    /// One number per channel.
    pub d: Vec<f32>,
    /// A norm of each group of channels.
    pub norm: Option<Vec<f32>>,
    pub out: Linear<'g>,
}

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MambaOp {
    /// Projections of the layer's input; without the gate in the last layer.
    Project {
        /// Inputs.
        k: usize,
        /// Outputs of all.
        n: usize,
    },
    /// Convolution.
    Conv {
        /// Channels.
        channels: usize,
        /// Positions that go into one.
        taps: usize,
    },
    /// Mamba: steps and vectors, from what the convolution gives.
    Select {
        /// Inputs.
        k: usize,
        /// Numbers between.
        rank: usize,
        /// Input and output vectors.
        vectors: usize,
    },
    /// The state goes over the positions; after the last one it and the convolution's history go to the sink.
    Scan {
        /// Channels.
        channels: usize,
        /// State numbers of each.
        state: usize,
    },
    /// Gate, norm and output projection.
    Out {
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
        /// They are added to what attention gave.
        adds: bool,
    },
}

impl MambaSpec {
    /// Reads the numbers, which all such layers share.
    pub(crate) fn read(c: &Common<'_>) -> Result<MambaSpec, Error> {
        let keys = &c.keys;
        let (second, out_norm) = match c.arch.recurrence {
            Some(Recurrence::Mamba2 { norm }) => (true, norm),
            _ => (false, Presence::Never),
        };
        let taps = keys.size("ssm.conv_kernel", MAX_TAPS)?;
        let state = keys.size("ssm.state_size", MAX_WIDTH)?;
        let rank = keys.size("ssm.time_step_rank", MAX_WIDTH)?;
        let inner = keys.size("ssm.inner_size", MAX_WIDTH)?;
        let groups = if second { keys.size("ssm.group_count", MAX_WIDTH)? } else { 1 };
        let heads = if second { rank } else { inner };
        if !inner.is_multiple_of(heads) {
            return Err(keys.wrong("ssm.time_step_rank", rank, format!("a divisor of {inner}, the ssm.inner_size")));
        }
        if !heads.is_multiple_of(groups) {
            return Err(keys.wrong("ssm.group_count", groups, format!("a divisor of {heads}, the ssm.time_step_rank")));
        }
        if !second && inner != 2 * c.n_embd {
            // llama.cpp refuses others.
            return Err(keys.wrong("ssm.inner_size", inner, format!("{}, twice the embedding_length", 2 * c.n_embd)));
        }
        let vectors = if second { 2 * u64::from(groups) * u64::from(state) } else { 0 };
        fits(c, "ssm.state_size", state, u64::from(inner) * u64::from(state))?;
        fits(c, "ssm.conv_kernel", taps, u64::from(taps) * (u64::from(inner) + vectors))?;
        // By its name, as llama.cpp tells them apart by their tensors.
        let normed = match (c.arch.name, keys.bool("ssm.dt_b_c_rms")?) {
            ("jamba", _) => Normed::Weighted,
            (_, Some(true)) if !second => Normed::Plain,
            _ => Normed::No,
        };
        let [heads, dim, state, groups] = [heads, inner / heads, state, groups].map(|n| n as usize);
        let rank = (!second).then_some(rank as usize);
        Ok(MambaSpec { shape: Shape { heads, dim, state, groups }, taps: taps as usize, rank, normed, out_norm })
    }

    /// Channels of all heads.
    pub fn inner(&self) -> usize {
        self.shape.heads * self.shape.dim
    }

    /// Numbers of all input vectors, or of all output vectors.
    pub fn vectors(&self) -> usize {
        self.shape.groups * self.shape.state
    }

    /// Channels of the convolution.
    pub fn channels(&self) -> usize {
        self.inner() + if self.rank.is_some() { 0 } else { 2 * self.vectors() }
    }

    /// Numbers in the convolution's history and in the state.
    pub fn n_embd(&self) -> (usize, usize) {
        ((self.taps - 1) * self.channels(), self.inner() * self.shape.state)
    }

    /// The steps of a chunk; `beside`: attention gave its part before.
    pub(crate) fn ops(&self, spec: &Spec, last: bool, beside: bool) -> Vec<Op> {
        let (e, inner) = (spec.n_embd, self.inner());
        let gate = if last { 0 } else { inner };
        let steps = if self.rank.is_some() { 0 } else { self.shape.heads };
        let mut ops = vec![
            MambaOp::Project { k: e, n: self.channels() + steps + gate },
            MambaOp::Conv { channels: self.channels(), taps: self.taps },
        ];
        if let Some(rank) = self.rank {
            ops.push(MambaOp::Select { k: inner, rank, vectors: 2 * self.vectors() });
        }
        ops.push(MambaOp::Scan { channels: inner, state: self.shape.state });
        if !last {
            ops.push(MambaOp::Out { k: inner, n: e, adds: beside });
        }
        ops.into_iter().map(Op::Mamba).collect()
    }
}

impl<'g> MambaWeights<'g> {
    pub(crate) fn load(loader: &mut Loader<'g>, spec: &Spec, s: &MambaSpec, prefix: &str) -> Result<Self, Error> {
        let (e, inner, heads, channels) = (spec.n_embd, s.inner(), s.shape.heads, s.channels());
        let never = Presence::Never;
        let name = |what: &str| format!("{prefix}.{what}");
        let conv = conv(loader, &name("ssm_conv1d"), channels, s.taps, Presence::Required)?;
        let out = loader.linear(&name("ssm_out"), inner, e, never)?;
        if let Some(rank) = s.rank {
            let both = loader.linear(&name("ssm_in"), e, 2 * inner, never)?;
            let norms = [("ssm_dt_norm", rank), ("ssm_b_norm", s.shape.state), ("ssm_c_norm", s.shape.state)];
            let mut weights = Vec::new();
            for (what, n) in norms {
                weights.push(match s.normed {
                    Normed::Weighted => loader.values(&name(&format!("{what}.weight")), &[n])?,
                    _ => vec![1.0; n],
                });
            }
            return Ok(MambaWeights {
                z: both.rows(inner, inner),
                conv_in: both.rows(0, inner),
                conv,
                x: Some(loader.linear(&name("ssm_x"), inner, rank + 2 * s.shape.state, never)?),
                select_norms: <[_; 3]>::try_from(weights).ok().filter(|_| s.normed != Normed::No),
                dt: loader.linear(&name("ssm_dt"), rank, inner, Presence::Required)?,
                a: loader.values(&name("ssm_a"), &[s.shape.state, inner])?,
                d: loader.values(&name("ssm_d"), &[inner])?,
                norm: None,
                out,
            });
        }
        let all = loader.linear(&name("ssm_in"), e, inner + channels + heads, never)?;
        let bias = loader.values(&name("ssm_dt.bias"), &[heads])?;
        let d = loader.values(&name("ssm_d"), &[1, heads])?;
        let groups = s.shape.groups;
        Ok(MambaWeights {
            z: all.rows(0, inner),
            conv_in: all.rows(inner, channels),
            conv,
            x: None,
            select_norms: None,
            dt: Linear { bias: Some(bias), ..all.rows(inner + channels, heads) },
            a: loader.values(&name("ssm_a"), &[1, heads])?,
            d: d.into_iter().flat_map(|d| std::iter::repeat_n(d, s.shape.dim)).collect(),
            norm: loader.table(&name("ssm_norm.weight"), inner / groups, groups, s.out_norm)?,
            out,
        })
    }

    pub(crate) fn input_types(&self) -> Vec<WeightType> {
        vec![self.conv_in.weight.ty()]
    }
}

impl MambaOp {
    /// Multiplications and additions over `m` rows.
    pub(crate) fn flops(&self, m: u64) -> u64 {
        match self {
            MambaOp::Project { k, n } | MambaOp::Out { k, n, .. } => 2 * m * (*k * *n) as u64,
            MambaOp::Conv { channels, taps } => 2 * m * (*channels * *taps) as u64,
            MambaOp::Select { k, rank, vectors } => 2 * m * (*k * (*rank + *vectors) + *rank * *k) as u64,
            // Fading, an input and an output of two operations each.
            MambaOp::Scan { channels, state } => 5 * m * (*channels * *state) as u64,
        }
    }
}

/// The Mamba layers of a model.
pub(crate) fn layers(spec: &Spec) -> impl Iterator<Item = &MambaSpec> {
    spec.layers.iter().filter_map(|l| l.mixer.mamba())
}

/// Whether a layer attends as well.
pub(crate) fn beside(spec: &Spec) -> bool {
    spec.layers.iter().any(|l| matches!(l.mixer, Mixer::Beside(..)))
}

/// Bytes: one layer's state, and a chunk's projections, what becomes of them, and rounded tiles.
pub(crate) fn memory(spec: &Spec, chunk: usize) -> usize {
    let most = |f: &dyn Fn(&MambaSpec) -> usize| layers(spec).map(f).max().unwrap_or(0);
    let state = most(&|s| s.n_embd().0 + s.n_embd().1);
    // What it gives beside attention, until it is added.
    let beside = if beside(spec) { spec.n_embd } else { 0 };
    let between = |s: &MambaSpec| s.rank.map_or(0, |rank| 2 * rank + 2 * s.vectors() + s.inner());
    4 * state + chunk * 4 * (beside + most(&|s| 2 * s.channels() + 3 * s.inner() + s.shape.heads + between(s)))
}
