//! Latent attention (DeepSeek's MLA): a position's keys and values of all heads are kept as one short row, which is key
//! and value at once.
//!
//! What the decoder keeps is that row, normed, and behind it the channels that carry the position, after RoPE; there is
//! no V. Queries are brought into the row's space (`attn_k_b`, one matrix per head), so that all heads attend to the same
//! row, and what they read is brought back (`attn_v_b`). Follows `llama_model_deepseek2::graph` with `is_mla`.

use crate::Error;
use crate::arch::{Latent, Presence, TemperatureRule};
use crate::plan::Op;
use crate::rope::Rope;
use crate::spec::{Common, MAX_WIDTH, Spec};
use crate::weights::{Linear, Loader, distinct};
use npu_kernels::host::TILE_ROWS;
use npu_kernels::host::attention::HeadCache;
use npu_kernels::{WeightType, WeightView};

/// One layer's numbers.
#[derive(Clone, Debug)]
pub struct LatentSpec {
    /// Query heads.
    pub n_head: usize,
    /// Channels of the row that stands for keys and values.
    pub rank: usize,
    /// Channels that carry the position.
    pub n_rot: usize,
    /// Channels of a query that do not.
    pub nope: usize,
    /// Channels of a head's output.
    pub head_v: usize,
    /// Channels between the two query projections; `None` where there is one.
    pub q_rank: Option<usize>,
    /// Multiplies scores.
    pub scale: f32,
    /// Which of [`Spec::ropes`], where there is one.
    pub rope: Option<usize>,
}

/// One layer's tensors.
#[derive(Debug)]
#[allow(missing_docs)] // llama.cpp's tensor names
pub struct LatentWeights<'g> {
    /// Two projections with a norm between, or one.
    pub q_a: Option<(Linear<'g>, Vec<f32>)>,
    pub q: Linear<'g>,
    pub kv_a: Linear<'g>,
    pub kv_a_norm: Vec<f32>,
    /// Per head: queries into the row's space.
    pub k_b: Vec<WeightView<'g>>,
    /// Per head: from it to the head's output.
    pub v_b: Vec<WeightView<'g>>,
    pub o: Linear<'g>,
}

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LatentOp {
    /// The row and its positional channels, and the first of two query projections.
    Latent {
        /// Inputs.
        k: usize,
        /// Outputs for the row, and between the query projections.
        n: [usize; 2],
    },
    /// Queries, from the input or from what the first projection gave, normed.
    Queries {
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
    },
    /// Norm, RoPE, rounding to the cache's type; rows go to the sink and to attention.
    StoreLatent,
    /// Queries into the row's space.
    Absorb {
        /// Heads.
        heads: usize,
        /// Inputs and outputs of each.
        kn: [usize; 2],
    },
    /// Attention of the chunk's queries over everything before them.
    AttendLatent {
        /// Query heads.
        heads: usize,
        /// Channels of a key, and of a value.
        head: [usize; 2],
    },
    /// What the heads read, back from the row's space.
    Expand {
        /// Heads.
        heads: usize,
        /// Inputs and outputs of each.
        kn: [usize; 2],
    },
    /// Output projection.
    LatentOut {
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
    },
}

impl LatentSpec {
    /// Reads all layers' numbers, and their rotation with them; those of layers that do not attend stand for nothing.
    pub(crate) fn read(
        c: &Common<'_>,
        n_vocab: u32,
        rope: Option<&mut Rope>,
        attends: &[bool],
    ) -> Result<Vec<LatentSpec>, Error> {
        let keys = &c.keys;
        let key = "attention.head_count";
        let n_head = match keys.per_layer(key, c.n_layer, MAX_WIDTH)? {
            None => return Err(keys.wrong(key, "no such key", format!("a number from 1 to {MAX_WIDTH}"))),
            Some(all) if all.iter().any(|n| *n != all[0]) => {
                return Err(keys.unsupported(key, "different numbers", "it has to be one for all layers"));
            }
            Some(all) => all[0],
        };
        let key = "attention.head_count_kv";
        let n_head_kv = keys
            .per_layer_from(0, key, c.n_layer, MAX_WIDTH)?
            .ok_or_else(|| keys.wrong(key, "no such key", "1: all heads read one row"))?;
        if let Some((n, _)) = n_head_kv.iter().zip(attends).find(|(n, attends)| **attends && **n != 1) {
            return Err(keys.wrong(key, n, "1: all heads read one row"));
        }
        for key in ["attention.key_length_mla", "attention.value_length_mla"] {
            if keys.u32(key)?.unwrap_or(0) == 0 {
                return Err(keys.unsupported(
                    key,
                    "no such key",
                    "files of before April 2025 have to be converted anew",
                ));
            }
        }
        let key = "attention.temperature_scale";
        if let Some(v) = keys.f32(key)?.filter(|v| *v != 0.0 && c.arch.temperature == TemperatureRule::No) {
            return Err(keys.unsupported(key, v, "queries of this architecture do not grow with the position"));
        }
        let head_k = keys.size("attention.key_length_mla", MAX_WIDTH)?;
        let head_v = keys.size("attention.value_length_mla", MAX_WIDTH)?;
        let rank = keys.size("attention.kv_lora_rank", MAX_WIDTH)?;
        let n_rot = keys.size("rope.dimension_count", head_k.saturating_sub(1).max(1))?;
        let row = keys.size("attention.key_length", 2 * MAX_WIDTH)?;
        if row != rank + n_rot {
            return Err(keys.wrong(
                "attention.key_length",
                row,
                format!("{}, kv_lora_rank and the rotated channels", rank + n_rot),
            ));
        }
        // llama.cpp's own way to tell the models with one query projection.
        let lite = c.arch.latent == Latent::RowOneQuery
            || matches!(c.n_layer, 26 | 27)
            || (c.n_layer == 48 && n_vocab == 128_256);
        let q_rank = match lite {
            true => None,
            false => {
                let key = "attention.q_lora_rank";
                let n = keys.u32(key)?.ok_or_else(|| keys.wrong(key, "no such key", "a number from 0"))?;
                Some(n).filter(|n| *n > 0).map(|n| keys.in_range(key, n, MAX_WIDTH)).transpose()?
            }
        };
        let (mut magnitude, has_rope) = (1.0, rope.is_some());
        if let Some(rope) = rope {
            let log_mul = keys.f32("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0) / 0.1;
            let stretch = (1.0 / rope.freq_scale).ln();
            if log_mul != 0.0 && rope.ext_factor != 0.0 && rope.freq_scale < 1.0 {
                // What is computed without the multiplier had its own magnitude cancelled; here both cancel but one.
                rope.attn_factor /= 1.0 + 0.1 * stretch;
            }
            magnitude = rope.attn_factor * (1.0 + 0.1 * stretch) * (1.0 + 0.1 * log_mul * stretch);
        }
        let spec = LatentSpec {
            n_head: n_head as usize,
            rank: rank as usize,
            n_rot: n_rot as usize,
            nope: (head_k - n_rot) as usize,
            head_v: head_v as usize,
            q_rank: q_rank.map(|n| n as usize),
            scale: magnitude * magnitude / (head_k as f32).sqrt(),
            rope: has_rope.then_some(0),
        };
        Ok(vec![spec; c.n_layer as usize])
    }

    /// Channels of what the decoder keeps of a position.
    pub fn row(&self) -> usize {
        self.rank + self.n_rot
    }

    /// Rows that `m` positions take when each head's begin a tile.
    pub(crate) fn rows(&self, m: usize) -> usize {
        self.n_head * m.next_multiple_of(TILE_ROWS)
    }

    pub(crate) fn ops(&self, spec: &Spec, last: bool) -> Vec<Op> {
        let e = spec.n_embd;
        let q_rank = if last { 0 } else { self.q_rank.unwrap_or(0) };
        let mut ops = vec![LatentOp::Latent { k: e, n: [self.row(), q_rank] }];
        if !last {
            ops.push(LatentOp::Queries { k: self.q_rank.unwrap_or(e), n: self.n_head * (self.nope + self.n_rot) });
        }
        ops.push(LatentOp::StoreLatent);
        if !last {
            ops.extend([
                LatentOp::Absorb { heads: self.n_head, kn: [self.nope, self.rank] },
                LatentOp::AttendLatent { heads: self.n_head, head: [self.row(), self.rank] },
                LatentOp::Expand { heads: self.n_head, kn: [self.rank, self.head_v] },
                LatentOp::LatentOut { k: self.n_head * self.head_v, n: e },
            ]);
        }
        ops.into_iter().map(Op::Latent).collect()
    }
}

impl<'g> LatentWeights<'g> {
    pub(crate) fn load(loader: &mut Loader<'g>, spec: &Spec, a: &LatentSpec, prefix: &str) -> Result<Self, Error> {
        let e = spec.n_embd;
        let name = |what: &str| format!("{prefix}.{what}");
        let q_out = a.n_head * (a.nope + a.n_rot);
        let (q_a, q) = match a.q_rank {
            None => (None, loader.linear(&name("attn_q"), e, q_out, Presence::Never)?),
            Some(n) => {
                let down = loader.linear(&name("attn_q_a"), e, n, Presence::Never)?;
                let norm = norm(loader, &name("attn_q_a_norm.weight"), n)?;
                (Some((down, norm)), loader.linear(&name("attn_q_b"), n, q_out, Presence::Never)?)
            }
        };
        Ok(LatentWeights {
            q_a,
            q,
            kv_a: loader.linear(&name("attn_kv_a_mqa"), e, a.row(), Presence::Never)?,
            kv_a_norm: norm(loader, &name("attn_kv_a_norm.weight"), a.rank)?,
            k_b: loader.matrices(&name("attn_k_b.weight"), a.nope, a.rank, a.n_head)?,
            v_b: loader.matrices(&name("attn_v_b.weight"), a.rank, a.head_v, a.n_head)?,
            o: loader.linear(&name("attn_output"), a.n_head * a.head_v, e, Presence::Never)?,
        })
    }

    pub(crate) fn input_types(&self) -> Vec<WeightType> {
        let first = self.q_a.as_ref().map_or(&self.q, |(q_a, _)| q_a);
        vec![self.kv_a.weight.ty(), first.weight.ty()]
    }
}

/// The weights of a norm.
fn norm(loader: &mut Loader<'_>, name: &str, n: usize) -> Result<Vec<f32>, Error> {
    let weights = loader.vector(name, n, Presence::Required)?;
    Ok(weights.expect("the loader returns what is required or an error"))
}

impl LatentOp {
    /// Multiplications and additions over `rows`.
    pub(crate) fn flops(&self, rows: &std::ops::Range<usize>) -> u64 {
        let m = rows.len() as u64;
        match self {
            LatentOp::Latent { k, n } => 2 * m * (*k * (n[0] + n[1])) as u64,
            LatentOp::Queries { k, n } | LatentOp::LatentOut { k, n } => 2 * m * (*k * *n) as u64,
            LatentOp::Absorb { heads, kn } | LatentOp::Expand { heads, kn } => 2 * m * (*heads * kn[0] * kn[1]) as u64,
            LatentOp::AttendLatent { heads, head } => {
                rows.clone().map(|p| p as u64 + 1).sum::<u64>() * 2 * (*heads * (head[0] + head[1])) as u64
            }
            LatentOp::StoreLatent => 0,
        }
    }
}

/// The layers of latent attention of a model.
pub(crate) fn layers(spec: &Spec) -> impl Iterator<Item = &LatentSpec> {
    spec.layers.iter().filter_map(|l| l.mixer.latent())
}

/// Bytes that it takes: one layer's rows of all positions; of a chunk, queries in both spaces, what the heads read in both
/// spaces, each once as f32 and, where a product follows, as rounded tiles.
pub(crate) fn memory(spec: &Spec, n_tokens: usize, chunk: usize) -> usize {
    let widest = |f: &dyn Fn(&LatentSpec) -> usize| layers(spec).map(f).max().unwrap_or(0);
    let heads = widest(&|a| a.rows(chunk) * (2 * a.nope + 2 * a.rank + a.rank + a.head_v));
    let flat = widest(&|a| {
        a.n_head * (a.nope + a.n_rot + a.row() + a.rank + 2 * a.head_v) + a.row() + 2 * a.q_rank.unwrap_or(0)
    });
    let cache = widest(&|a| HeadCache::bytes(a.row(), a.rank, n_tokens));
    cache + 4 * (heads + chunk * flat)
}

/// The distinct types that the matrices of all layers have, by `f`.
pub(crate) fn types_of<'a>(
    layers: impl Iterator<Item = &'a LatentWeights<'a>>,
    f: impl Fn(&'a LatentWeights<'a>) -> Option<WeightType>,
) -> Vec<WeightType> {
    distinct(layers.filter_map(f))
}
