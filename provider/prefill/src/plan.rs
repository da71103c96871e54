//! What will be computed, as data: a list of commands that can be printed, priced, and carried out one by one.
//!
//! Layers are the outer loop and chunks of tokens the inner one. So only one layer's keys and values must be at hand
//! for attention, whatever the length of the prompt, and rows are handed over layer by layer; what grows with the
//! prompt is one embedding per token. A chunk bounds everything else.

use crate::spec::Spec;
use npu_kernels::host::attention::HeadCache;
use std::fmt;
use std::ops::Range;

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// Embeddings of the tokens become the residual stream.
    Embed,
    /// RMS norm of the residual stream, rounded for the projections that follow.
    AttnNorm,
    /// Query, key and value projections; without the query in the last layer.
    Qkv {
        /// Inputs.
        k: usize,
        /// Outputs of the three.
        n: [usize; 3],
    },
    /// Head norms, RoPE, rounding to the cache's type; keys and values go to the sink and to attention.
    StoreKv,
    /// Attention of the chunk's queries over everything before them.
    Attention {
        /// Query heads.
        heads: usize,
        /// Channels of a head.
        head: usize,
        /// The window, in a layer that has one.
        window: Option<u32>,
    },
    /// Output projection of attention.
    AttnOut {
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
    },
    /// Attention's output (normed first where the model does) joins the residual stream; then the norm for the
    /// feed-forward network.
    FfnNorm,
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
    /// The network's output joins the residual stream.
    Residual,
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
}

impl Command {
    /// Multiplications and additions.
    pub fn flops(&self) -> u64 {
        let m = self.rows.len() as u64;
        match &self.op {
            Op::Qkv { k, n } => 2 * m * *k as u64 * n.iter().sum::<usize>() as u64,
            Op::AttnOut { k, n } | Op::Down { k, n } => 2 * m * (*k * *n) as u64,
            Op::GateUp { k, n } => 4 * m * (*k * *n) as u64,
            Op::Attention { heads, head, window } => {
                let seen = |p: usize| window.map_or(p + 1, |w| (p + 1).min(w as usize)) as u64;
                self.rows.clone().map(seen).sum::<u64>() * 4 * (*heads * *head) as u64
            }
            _ => 0,
        }
    }
}

/// The steps of one prefill. Every chunk of a layer takes the same ones, so they are kept once per layer.
#[derive(Clone, Debug)]
pub struct Plan {
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
        let e = spec.n_embd;
        let ops = |(layer, l): (usize, &crate::LayerSpec)| {
            let last = layer + 1 == spec.layers.len();
            let (q, k, v) = (l.n_head * spec.head_k, l.n_head_kv * spec.head_k, l.n_head_kv * spec.head_v);
            let mut ops = vec![Op::AttnNorm, Op::Qkv { k: e, n: [if last { 0 } else { q }, k, v] }, Op::StoreKv];
            if !last {
                let window = spec.window.filter(|_| l.windowed);
                ops.extend([
                    Op::Attention { heads: l.n_head, head: spec.head_k, window },
                    Op::AttnOut { k: l.n_head * spec.head_v, n: e },
                    Op::FfnNorm,
                    Op::GateUp { k: e, n: l.n_ff },
                    Op::Gate,
                    Op::Down { k: l.n_ff, n: e },
                    Op::Residual,
                ]);
            }
            ops
        };
        let layers = spec.layers.iter().enumerate().map(ops).collect();
        Plan { layers, n_tokens, chunk, memory: memory(spec, n_tokens, chunk) }
    }

    /// The steps, in order.
    pub fn commands(&self) -> impl Iterator<Item = Command> {
        let chunks = || {
            let starts = (0..self.n_tokens).step_by(self.chunk);
            starts.map(|from| from..(from + self.chunk).min(self.n_tokens))
        };
        let embed = chunks().map(|rows| Command { layer: 0, rows, op: Op::Embed });
        let layers = self.layers.iter().enumerate().flat_map(move |(layer, ops)| {
            chunks()
                .flat_map(move |rows| ops.iter().map(move |op| Command { layer, rows: rows.clone(), op: op.clone() }))
        });
        embed.chain(layers)
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
    let widest = |f: &dyn Fn(&crate::LayerSpec) -> usize| spec.layers.iter().map(f).max().unwrap_or(0);
    let kv_heads = widest(&|l| l.n_head_kv);
    let (q, ff) = (widest(&|l| l.n_head * spec.head_k), widest(&|l| l.n_ff));
    let kv = kv_heads * (spec.head_k + spec.head_v);
    // Activations stand once as f32 and once, at most, as rounded tiles (about 1.5 bytes a value for each kind).
    let per_row = 4 * (q + kv + q + spec.n_embd + 2 * ff) + 4 * (spec.n_embd + q + ff);
    let cache = kv_heads * HeadCache::bytes(spec.head_k, spec.head_v, n_tokens);
    (n_tokens * spec.n_embd * 4 + cache + chunk * per_row + FIXED_BYTES) as u64
}

/// The program itself, its threads' stacks and panels, the norms' weights.
const FIXED_BYTES: usize = 12 << 20;

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
            writeln!(f, "layer {:>3}  rows {rows:<12} {:>9.1} MFLOP  {:?}", c.layer, c.flops() as f64 / 1e6, c.op)?;
        }
        Ok(())
    }
}
