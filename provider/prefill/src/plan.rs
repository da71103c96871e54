//! What will be computed, as data: a list of commands that can be printed, priced, and carried out one by one.
//!
//! Layers are the outer loop and chunks of tokens the inner one. So only one layer's keys and values must be at hand
//! for attention, whatever the length of the prompt, and rows are handed over layer by layer; what grows with the
//! prompt is one embedding per token. A chunk bounds everything else.

use crate::layer;
use crate::layer::altup::AltUpOp;
use crate::layer::attention::AttentionOp;
use crate::layer::both::BothOp;
use crate::layer::delta::DeltaOp;
use crate::layer::dense::DenseOp;
use crate::layer::experts::ExpertsOp;
use crate::layer::latent::LatentOp;
use crate::layer::linear::LinearOp;
use crate::layer::mamba::MambaOp;
use crate::layer::per_layer::PerLayerOp;
use crate::layer::shortconv::ShortConvOp;
use crate::layer::{FeedForward, Mixer};
use crate::spec::{FfnInput, LayerSpec, Spec};
use std::fmt;
use std::ops::Range;

/// One step. Those of a kind of layer stand with the kind, in [`crate::layer`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// Embeddings of the tokens become the residual stream.
    Embed,
    /// Norm of the residual stream, rounded for the projections that follow.
    Norm(Input),
    /// A step of attention.
    Attention(AttentionOp),
    /// A step of latent attention.
    Latent(LatentOp),
    /// One matrix in the place of attention.
    Linear(LinearOp),
    /// A step of a gated delta net.
    Delta(DeltaOp),
    /// A step of a gated short convolution.
    ShortConv(ShortConvOp),
    /// A step of a selective scan.
    Mamba(MambaOp),
    /// A step of the plain feed-forward network.
    Dense(DenseOp),
    /// A step of a mixture of experts.
    Experts(ExpertsOp),
    /// A step of a layer with a plain network and a mixture.
    Both(BothOp),
    /// A step of a second embedding with a part for each layer.
    PerLayer(PerLayerOp),
    /// A step of several residual streams.
    AltUp(AltUpOp),
    /// The residual stream is multiplied by the layer's number.
    Scale,
    /// The half's output (normed first where the model does) joins the residual stream.
    Join(Half),
}

/// What a norm makes the input of.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Input {
    /// What mixes the positions.
    Mixer,
    /// What follows.
    FeedForward,
    /// The router of a mixture beside a plain network.
    Router,
    /// A router that comes before everything else in a layer: the stream as it is.
    FirstRouter,
    /// The experts of such a mixture.
    Experts,
    /// What weighs the layer's part of a second embedding; that is the stream as it is, or times factors.
    PerLayer,
}

/// The two halves of a layer, and what follows where there is a second embedding.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Half {
    /// What mixes the positions.
    Mixer,
    /// What follows.
    FeedForward,
    /// The layer's part of a second embedding.
    PerLayer,
}

/// A step on a layer and a range of positions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Command {
    /// Model layer (0 for the embedding).
    pub layer: usize,
    /// Positions.
    pub rows: Range<usize>,
    /// What is done.
    pub op: Op,
    /// Whether the layer is done with these positions after it.
    pub ends: bool,
}

/// What a step spends its time on.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Work {
    /// Matrix products.
    Gemm,
    /// Attention.
    Attention,
    /// Anything else.
    Other,
}

impl Command {
    /// Multiplications and additions.
    pub fn flops(&self) -> u64 {
        match &self.op {
            Op::Attention(op) => op.flops(&self.rows),
            Op::Latent(op) => op.flops(&self.rows),
            Op::Linear(op) => op.flops(self.rows.len() as u64),
            Op::Delta(op) => op.flops(self.rows.len() as u64),
            Op::ShortConv(op) => op.flops(self.rows.len() as u64),
            Op::Mamba(op) => op.flops(self.rows.len() as u64),
            Op::Dense(op) => op.flops(self.rows.len() as u64),
            Op::Experts(op) => op.flops(self.rows.len() as u64),
            Op::PerLayer(op) => op.flops(self.rows.len() as u64),
            Op::AltUp(op) => op.flops(self.rows.len() as u64),
            Op::Embed | Op::Norm(_) | Op::Both(_) | Op::Scale | Op::Join(_) => 0,
        }
    }

    /// What it spends its time on.
    pub fn work(&self) -> Work {
        match &self.op {
            Op::Attention(AttentionOp::StoreKv) => Work::Other,
            Op::Attention(AttentionOp::Attend { .. }) | Op::Latent(LatentOp::AttendLatent { .. }) => Work::Attention,
            Op::Attention(_) => Work::Gemm,
            Op::Latent(LatentOp::StoreLatent) => Work::Other,
            Op::Latent(_) | Op::Linear(_) => Work::Gemm,
            Op::Dense(DenseOp::GateUp { .. } | DenseOp::Up { .. } | DenseOp::Down { .. }) => Work::Gemm,
            Op::Delta(DeltaOp::Project { .. } | DeltaOp::Widen { .. } | DeltaOp::Out { .. }) => Work::Gemm,
            Op::ShortConv(ShortConvOp::Project { .. } | ShortConvOp::Out { .. }) => Work::Gemm,
            Op::Mamba(MambaOp::Project { .. } | MambaOp::Select { .. } | MambaOp::Out { .. }) => Work::Gemm,
            Op::Experts(ExpertsOp::ExpertsGate) => Work::Other,
            Op::Experts(_) => Work::Gemm,
            Op::PerLayer(PerLayerOp::Mix) => Work::Other,
            Op::PerLayer(_) => Work::Gemm,
            Op::AltUp(AltUpOp::JoinLaurel | AltUpOp::JoinPart) => Work::Other,
            Op::AltUp(_) => Work::Gemm,
            _ => Work::Other,
        }
    }
}

/// The steps of one prefill. Every chunk of a layer takes the same ones, so they are kept once per layer.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What is done before the first layer.
    first: Vec<Op>,
    layers: Vec<Vec<Op>>,
    /// Positions.
    pub n_tokens: usize,
    /// Positions per chunk.
    pub chunk: usize,
    memory: u64,
}

impl Plan {
    /// The steps for `n_tokens` positions in chunks of `chunk` (at least 1).
    pub fn new(spec: &Spec, n_tokens: usize, chunk: usize) -> Plan {
        let chunk = chunk.clamp(1, n_tokens.max(1));
        let last_layer = spec.last_layer();
        let ops = |(layer, l): (usize, &LayerSpec)| {
            let last = layer == last_layer;
            if matches!((&l.mixer, &l.ffn), (Mixer::None, FeedForward::None)) {
                return Vec::new();
            }
            if matches!(l.mixer, Mixer::None) {
                let network = l.ffn.ops(spec).into_iter();
                return [Op::Norm(Input::FeedForward)]
                    .into_iter()
                    .chain(network)
                    .chain([Op::Join(Half::FeedForward)])
                    .collect();
            }
            let mut ops = Vec::new();
            if !last {
                ops.extend(l.ffn.first_ops(spec));
            }
            ops.extend(spec.altup.map(|a| a.predict(spec)));
            ops.push(Op::Norm(Input::Mixer));
            if !last {
                ops.extend(spec.altup.map(|a| a.laurel(spec)));
            }
            ops.extend(l.mixer.ops(spec, last));
            if !last {
                if matches!(l.ffn, FeedForward::None) {
                    // Deci's graph goes on from the stream as the layer found it.
                    ops.extend((!spec.arch.lone_halves).then_some(Op::Join(Half::Mixer)));
                    return ops;
                }
                ops.extend(match l.ffn_input {
                    _ if l.ffn.beside_mixer(spec) => vec![Op::Norm(Input::Experts), Op::Join(Half::Mixer)],
                    FfnInput::AfterMixer if spec.altup.is_some() => {
                        vec![Op::Join(Half::Mixer), Op::AltUp(AltUpOp::JoinLaurel), Op::Norm(Input::FeedForward)]
                    }
                    FfnInput::AfterMixer => vec![Op::Join(Half::Mixer), Op::Norm(Input::FeedForward)],
                    // The network's input is made before the mixer's output joins.
                    FfnInput::BesideMixer => vec![Op::Norm(Input::FeedForward), Op::Join(Half::Mixer)],
                    FfnInput::Shared => vec![Op::Join(Half::Mixer)],
                });
                ops.extend(l.ffn.ops(spec));
                ops.push(Op::Join(Half::FeedForward));
                ops.extend(spec.altup.map(|a| a.correct(spec)));
                if let Some(p) = &spec.per_layer {
                    ops.extend([p.input(spec), Op::Norm(Input::PerLayer)]);
                    ops.extend(p.gate(spec));
                    ops.push(if spec.altup.is_some() {
                        Op::AltUp(AltUpOp::JoinPart)
                    } else {
                        Op::Join(Half::PerLayer)
                    });
                }
                if l.scaled {
                    ops.push(Op::Scale);
                }
            }
            ops
        };
        let layers = spec.layers.iter().take(last_layer + 1).enumerate().map(ops).collect();
        let first = [Op::Embed].into_iter().chain(spec.altup.map(|a| a.spread(spec))).collect();
        Plan { first, layers, n_tokens, chunk, memory: memory(spec, n_tokens, chunk) }
    }

    /// The steps, in order.
    pub fn commands(&self) -> impl Iterator<Item = Command> {
        let chunks = || {
            let starts = (0..self.n_tokens).step_by(self.chunk);
            starts.map(|from| from..(from + self.chunk).min(self.n_tokens))
        };
        let embed = chunks().flat_map(|rows| {
            let command = move |op: &Op| Command { layer: 0, rows: rows.clone(), op: op.clone(), ends: false };
            self.first.iter().map(command)
        });
        let layers = self.layers.iter().enumerate().flat_map(move |(layer, ops)| {
            chunks().flat_map(move |rows| {
                let command = move |(i, op): (usize, &Op)| Command {
                    layer,
                    rows: rows.clone(),
                    op: op.clone(),
                    ends: i + 1 == ops.len(),
                };
                ops.iter().enumerate().map(command)
            })
        });
        embed.chain(layers)
    }

    /// The distinct groups of projections ([`Op::products`]) of all steps. Every chunk of a layer has the same.
    pub fn products(&self) -> Vec<(usize, Vec<usize>)> {
        let mut all: Vec<_> = self.layers.iter().flatten().map(Op::products).filter(|(_, n)| !n.is_empty()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Multiplications and additions of the whole.
    pub fn flops(&self) -> u64 {
        self.commands().map(|c| c.flops()).sum()
    }

    /// Bytes of memory that a run takes besides the model's file: the residual stream of all positions, one layer's
    /// keys and values, and the buffers of a chunk.
    pub fn memory_bytes(&self) -> u64 {
        self.memory
    }
}

fn memory(spec: &Spec, n_tokens: usize, chunk: usize) -> u64 {
    let e = spec.n_embd;
    // A half's output, and its input as rounded tiles.
    let per_row = 4 * (e + e);
    (n_tokens * e * 4 + layer::memory(spec, n_tokens, chunk) + chunk * per_row + FIXED_BYTES) as u64
}

/// The program itself, its threads' stacks and panels, the norms' weights.
const FIXED_BYTES: usize = 12 << 20;

impl Op {
    /// Inputs and outputs of the projections that a device may be asked for, all of the same activations; none for other
    /// steps.
    pub fn products(&self) -> (usize, Vec<usize>) {
        match self {
            Op::Attention(AttentionOp::Narrow { k, n }) => (*k, n.iter().copied().filter(|n| *n > 0).collect()),
            Op::Attention(AttentionOp::Qkv { k, n }) => (*k, n.iter().copied().filter(|n| *n > 0).collect()),
            Op::Attention(AttentionOp::Gate { k, n } | AttentionOp::Out { k, n })
            | Op::Dense(DenseOp::Down { k, n }) => (*k, vec![*n]),
            Op::Linear(LinearOp { k, n }) => (*k, vec![*n]),
            Op::Dense(DenseOp::GateUp { k, n }) => (*k, vec![*n, *n]),
            Op::Dense(DenseOp::Up { k, n }) => (*k, vec![*n]),
            _ => (0, Vec::new()),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Attention(op) => write!(f, "{op:?}"),
            Op::Latent(op) => write!(f, "{op:?}"),
            Op::Linear(op) => write!(f, "{op:?}"),
            Op::Delta(op) => write!(f, "Delta{op:?}"),
            Op::ShortConv(op) => write!(f, "Short{op:?}"),
            Op::Mamba(op) => write!(f, "Mamba{op:?}"),
            Op::Dense(op) => write!(f, "{op:?}"),
            Op::Experts(op) => write!(f, "{op:?}"),
            Op::Both(op) => write!(f, "Both{op:?}"),
            Op::PerLayer(op) => write!(f, "PerLayer{op:?}"),
            Op::AltUp(op) => write!(f, "AltUp{op:?}"),
            other => write!(f, "{other:?}"),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} positions in chunks of {}: {} commands, {:.1} GFLOP, {:.1} MiB besides the model",
            self.n_tokens,
            self.chunk,
            self.commands().count(),
            self.flops() as f64 / 1e9,
            self.memory as f64 / f64::from(1 << 20)
        )?;
        for c in self.commands() {
            let rows = format!("{}..{}", c.rows.start, c.rows.end);
            writeln!(f, "layer {:>3}  rows {rows:<12} {:>9.1} MFLOP  {}", c.layer, c.flops() as f64 / 1e6, c.op)?;
        }
        Ok(())
    }
}
