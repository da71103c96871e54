//! Attention as a kind of mixer: its numbers, tensors, steps and costs.

use crate::Error;
use crate::arch::{Alibi, AttnScale, Latent, Over, Presence, RopeRule, WindowRope};
use crate::plan::Op;
use crate::spec::{Common, MAX_WIDTH, Spec};
use crate::weights::{Linear, Loader, Norm};
use npu_kernels::WeightType;
use npu_kernels::host::attention::{HeadCache, Window};

/// One layer's numbers.
#[derive(Clone, Debug)]
pub struct AttentionSpec {
    /// Query heads.
    pub n_head: usize,
    /// Key-value heads.
    pub n_head_kv: usize,
    /// Channels of one key head (and query head).
    pub head_k: usize,
    /// Channels of one value head.
    pub head_v: usize,
    /// Multiplies scores.
    pub scale: f32,
    /// Values are what keys are projected to.
    pub keys_as_values: bool,
    /// Every query head has a gate of as many channels behind it.
    pub gated: bool,
    /// Whether the layer sees only the window.
    pub windowed: bool,
    /// Which of [`Spec::ropes`], in a layer that has one.
    pub rope: Option<usize>,
    /// Scores s become `cap * tanh(s / cap)`.
    pub softcap: Option<f32>,
    /// Strength of the penalty on distance (ALiBi).
    pub max_bias: f32,
    /// Queries, keys and values are clamped to plus and minus this.
    pub clamp: Option<f32>,
    /// Query and key heads are normed behind RoPE without weights.
    pub plain_norm: bool,
    /// Channels of a head before those that RoPE turns.
    pub rope_from: usize,
    /// Queries, and keys and values, come from short rows.
    pub low_rank: Option<LowRank>,
}

/// The short rows that queries, keys and values come from (MiniCPM 3). Behind the second one are the channels of a key that carry the
/// position, which all heads have in common.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct LowRank {
    /// Channels of the queries' row.
    pub q: usize,
    /// Channels of the row of keys and values.
    pub kv: usize,
    /// Channels that carry the position.
    pub n_rot: usize,
}

/// One layer's tensors.
#[derive(Debug)]
#[allow(missing_docs)] // llama.cpp's tensor names
pub struct AttentionWeights<'g> {
    pub q: Linear<'g>,
    /// With the values of each head behind its keys where both come from a short row.
    pub k: Linear<'g>,
    /// None where values are what keys are projected to.
    pub v: Option<Linear<'g>>,
    pub low: Option<LowRankWeights<'g>>,
    /// What multiplies what the heads read, by its sigmoid.
    pub gate: Option<Linear<'g>>,
    pub q_norm: Option<Norm>,
    pub k_norm: Option<Norm>,
    pub o: Linear<'g>,
    /// A score of each head that joins the softmax and has no value.
    pub sinks: Option<Vec<f32>>,
}

/// Tensors of a [`LowRank`]: the projections to both rows, and their norms.
#[derive(Debug)]
#[allow(missing_docs)] // llama.cpp's tensor names
pub struct LowRankWeights<'g> {
    pub q_a: Linear<'g>,
    pub q_a_norm: Norm,
    pub kv_a: Linear<'g>,
    pub kv_a_norm: Norm,
}

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AttentionOp {
    /// The short rows of queries and of keys and values; without the former in the last layer.
    Narrow {
        /// Inputs.
        k: usize,
        /// Outputs of both.
        n: [usize; 2],
    },
    /// Queries, keys and values from these, normed.
    Widen {
        /// Inputs of both.
        k: [usize; 2],
        /// Outputs of both.
        n: [usize; 2],
    },
    /// Query, key and value projections; without the query in the last layer, without values that are what keys are projected to.
    Qkv {
        /// Inputs.
        k: usize,
        /// Outputs of the three.
        n: [usize; 3],
    },
    /// The gate's projection.
    Gate {
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
    },
    /// Head norms, RoPE, rounding to the cache's type; keys and values go to the sink and to attention.
    StoreKv,
    /// Attention of the chunk's queries over everything before them.
    Attend {
        /// Query heads.
        heads: usize,
        /// Channels of a head.
        head: usize,
        /// The window, in a layer that has one.
        window: Option<Window>,
    },
    /// Output projection.
    Out {
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
    },
}

impl AttentionSpec {
    /// Reads all layers' numbers; those of layers that do not attend stand for nothing.
    pub(crate) fn read(
        c: &Common<'_>,
        has_window: bool,
        windowed: &dyn Fn(usize) -> bool,
        attends: &[bool],
    ) -> Result<Vec<AttentionSpec>, Error> {
        let (keys, n_layer, n_embd) = (&c.keys, c.n_layer, c.n_embd);
        // Other layers may have no heads.
        let min = u32::from(!attends.contains(&false));
        let n_head = keys
            .per_layer_from(min, "attention.head_count", n_layer, MAX_WIDTH)?
            .ok_or_else(|| keys.wrong("attention.head_count", "no such key", "the number of query heads"))?;
        let n_head_kv =
            keys.per_layer_from(min, "attention.head_count_kv", n_layer, MAX_WIDTH)?.unwrap_or_else(|| n_head.clone());
        for (i, _) in attends.iter().enumerate().filter(|(_, a)| **a) {
            keys.in_range("attention.head_count", n_head[i], MAX_WIDTH)?;
            keys.in_range("attention.head_count_kv", n_head_kv[i], MAX_WIDTH)?;
        }
        let head = |key: &str, default: Option<u32>| match keys.u32(key)?.or(default) {
            Some(value) => keys.in_range(key, value, MAX_WIDTH),
            None if n_head[0] > 0 && n_embd.is_multiple_of(n_head[0]) => Ok(n_embd / n_head[0]),
            None => Err(keys.wrong(
                key,
                "no such key",
                format!("it, since {n_embd} channels are no multiple of {} heads", n_head[0]),
            )),
        };
        // llama.cpp asserts for these architectures that values are as long as keys.
        let equal = |k: &str, v: &str, default: Option<u32>| {
            let (head_k, head_v) = (head(k, default)?, head(v, default)?);
            if head_k == head_v { Ok(head_k) } else { Err(keys.wrong(v, head_v, format!("{head_k}, the key_length"))) }
        };
        let low_rank = match c.arch.latent {
            Latent::Heads => Some(LowRank {
                q: keys.size("attention.q_lora_rank", MAX_WIDTH)? as usize,
                kv: keys.size("attention.kv_lora_rank", MAX_WIDTH)? as usize,
                n_rot: keys.size("rope.dimension_count", MAX_WIDTH)? as usize,
            }),
            _ => None,
        };
        let (full, full_v) = match low_rank {
            Some(_) => (head("attention.key_length", None)?, head("attention.value_length", None)?),
            None => {
                let full = equal("attention.key_length", "attention.value_length", None)?;
                (full, full)
            }
        };
        if let Some(low) = low_rank {
            if low.n_rot >= full as usize {
                let wanted = format!("fewer than the {full} channels of a key head");
                return Err(keys.wrong("rope.dimension_count", low.n_rot, wanted));
            }
            if let Some((h, kv)) = n_head.iter().zip(&n_head_kv).find(|(h, kv)| h != kv) {
                let wanted = format!("{h}, as many as query heads: every head has keys of its own");
                return Err(keys.wrong("attention.head_count_kv", kv, wanted));
            }
        }
        let in_window = match c.arch.window.map(|rule| rule.rope) {
            Some(WindowRope::OwnHeads(_)) => {
                equal("attention.key_length_swa", "attention.value_length_swa", Some(full))?
            }
            _ => full,
        };
        for (h, kv) in n_head.iter().zip(&n_head_kv).filter(|(_, kv)| **kv > 0) {
            if !h.is_multiple_of(*kv) {
                return Err(keys.wrong("attention.head_count_kv", kv, format!("a divisor of {h} query heads")));
            }
        }
        let scale = match c.arch.attn_scale {
            AttnScale::EmbdAtLayers(at) if at == n_layer => 1.0 / (n_embd as f32 / n_head[0] as f32).sqrt(),
            AttnScale::Inverse => 1.0 / full as f32,
            AttnScale::One => 1.0,
            AttnScale::Output => keys.f32("attention.output_scale")?.unwrap_or(0.088_388_346),
            AttnScale::Key => keys.f32("attention.scale")?.filter(|s| *s != 0.0).unwrap_or(1.0 / (full as f32).sqrt()),
            AttnScale::Head | AttnScale::EmbdAtLayers(_) => 1.0 / (full as f32).sqrt(),
        };
        let softcap = match c.arch.softcap {
            Some(default) => {
                let key = "attn_logit_softcapping";
                let cap = keys.f32(key)?.unwrap_or(default);
                if cap < 0.0 {
                    return Err(keys.wrong(key, cap, "a number that is not negative"));
                }
                Some(cap).filter(|c| *c > 0.0)
            }
            None => None,
        };
        let max_bias = match c.arch.alibi {
            Alibi::None => 0.0,
            Alibi::Fixed(strength) => strength,
            Alibi::AtLayers(at) => {
                if at == n_layer {
                    8.0
                } else {
                    0.0
                }
            }
            Alibi::Key => {
                let key = "attention.max_alibi_bias";
                let strength = keys.f32(key)?.unwrap_or(0.0);
                if strength < 0.0 {
                    return Err(keys.wrong(key, strength, "a number that is not negative"));
                }
                strength
            }
        };
        let clamp = keys.f32("attention.clamp_kqv")?.filter(|v| c.arch.clamp && *v > 0.0);
        let n_expert = keys.u32("expert_count")?.unwrap_or(0);
        let plain_norm = c.arch.plain_qk_norm.is_some_and(|n| n != n_expert);
        let finetuned = keys.bool("rope.scaling.finetuned")?.unwrap_or(true);
        let has_rope = |i: usize| match c.arch.rope {
            RopeRule::All => true,
            RopeRule::Never => false,
            RopeRule::NotEvery(n) => !(i + 1).is_multiple_of(n as usize),
            RopeRule::NotFirstOf(n) => !has_window || n_layer == n || !i.is_multiple_of(n as usize),
            RopeRule::Windowed => !has_window || windowed(i),
            RopeRule::ByFinetuned => finetuned,
            RopeRule::NotAtLayers(n) => n_layer != n,
        };
        let layer = |i: usize| AttentionSpec {
            n_head: n_head[i] as usize,
            n_head_kv: n_head_kv[i] as usize,
            head_k: if windowed(i) { in_window } else { full } as usize,
            head_v: if windowed(i) { in_window } else { full_v } as usize,
            scale,
            keys_as_values: c.arch.keys_as_values
                && ["attn_v", "attn_qkv"].iter().all(|t| keys.gguf.tensor(&format!("blk.{i}.{t}.weight")).is_none()),
            gated: c.arch.gated_query,
            windowed: windowed(i),
            rope: has_rope(i).then_some(usize::from(windowed(i))),
            softcap,
            max_bias,
            clamp,
            plain_norm: plain_norm && has_rope(i),
            rope_from: low_rank.map_or(0, |low| full as usize - low.n_rot),
            low_rank,
        };
        Ok((0..n_layer as usize).map(layer).collect())
    }

    /// What distance costs each query head (ALiBi), none where there is no penalty.
    pub fn slopes(&self) -> Vec<f32> {
        if self.max_bias == 0.0 {
            return Vec::new();
        }
        // Two geometric rows, the second for the heads beyond the largest power of two, as in ggml.
        let power = 1usize << self.n_head.ilog2();
        let base = |bias: f32| 2f32.powf(-bias / power as f32);
        let (first, second) = (base(self.max_bias), base(self.max_bias / 2.0));
        let slope = |h: usize| {
            if h < power { first.powi(h as i32 + 1) } else { second.powi(2 * (h - power) as i32 + 1) }
        };
        (0..self.n_head).map(slope).collect()
    }

    /// Channels of a position's keys.
    pub fn n_embd_k(&self) -> usize {
        self.n_head_kv * self.head_k
    }

    /// Channels of a position's values.
    pub fn n_embd_v(&self) -> usize {
        self.n_head_kv * self.head_v
    }

    /// Outputs of the query projection, gates included.
    pub fn n_q(&self) -> usize {
        self.n_head * self.head_k * if self.gated { 2 } else { 1 }
    }

    /// Keys and values of all heads but for the channels of keys that carry the position.
    pub(crate) fn n_wide(&self) -> usize {
        self.n_head_kv * (self.rope_from + self.head_v)
    }

    pub(crate) fn ops(&self, spec: &Spec, last: bool) -> Vec<Op> {
        let e = spec.n_embd;
        let q = if last { 0 } else { self.n_q() };
        let v = if self.keys_as_values { 0 } else { self.n_embd_v() };
        let mut ops = match self.low_rank {
            None => vec![AttentionOp::Qkv { k: e, n: [q, self.n_embd_k(), v] }],
            Some(low) => vec![
                AttentionOp::Narrow { k: e, n: [if last { 0 } else { low.q }, low.kv + low.n_rot] },
                AttentionOp::Widen { k: [low.q, low.kv], n: [q, self.n_wide()] },
            ],
        };
        if spec.arch.attn_gate && !last {
            ops.push(AttentionOp::Gate { k: e, n: self.n_head * self.head_v });
        }
        ops.push(AttentionOp::StoreKv);
        if !last {
            let window = spec.window_of_rows().filter(|_| self.windowed);
            ops.push(AttentionOp::Attend { heads: self.n_head, head: self.head_k, window });
            ops.push(AttentionOp::Out { k: self.n_head * self.head_v, n: e });
        }
        ops.into_iter().map(Op::Attention).collect()
    }
}

impl<'g> AttentionWeights<'g> {
    pub(crate) fn load(loader: &mut Loader<'g>, spec: &Spec, a: &AttentionSpec, prefix: &str) -> Result<Self, Error> {
        let (arch, e) = (spec.arch, spec.n_embd);
        let mut low = None;
        let (q, k, v) = if let Some(rank) = a.low_rank {
            let mut part = |name: &str, k, n| loader.linear(&format!("{prefix}.{name}"), k, n, Presence::Never);
            let (q_a, kv_a) = (part("attn_q_a", e, rank.q)?, part("attn_kv_a_mqa", e, rank.kv + rank.n_rot)?);
            let (q, kv) = (part("attn_q_b", rank.q, a.n_q())?, part("attn_kv_b", rank.kv, a.n_wide())?);
            let q_a_norm = loader.norm(&format!("{prefix}.attn_q_a_norm"), rank.q)?;
            let kv_a_norm = loader.norm(&format!("{prefix}.attn_kv_a_norm"), rank.kv)?;
            low = Some(LowRankWeights { q_a, q_a_norm, kv_a, kv_a_norm });
            (q, kv, None)
        } else if a.keys_as_values {
            let mut part = |name: &str, n| loader.linear(&format!("{prefix}.{name}"), e, n, arch.qkv_bias);
            (part("attn_q", a.n_q())?, part("attn_k", a.n_embd_k())?, None)
        } else {
            let [q, k, v] = qkv(loader, prefix, e, [a.n_q(), a.n_embd_k(), a.n_embd_v()], arch.qkv_bias)?;
            (q, k, Some(v))
        };
        let weights = |heads: usize| match arch.qk_norm_rule.over {
            Over::Head => a.head_k,
            Over::EachHead | Over::Row => heads * a.head_k,
        };
        let mut norm = |what: &str, heads: usize| {
            loader.head_norm(&format!("{prefix}.{what}"), a.head_k, weights(heads), arch.qk_norm)
        };
        let (mut q_norm, mut k_norm) = (norm("attn_q_norm", a.n_head)?, norm("attn_k_norm", a.n_head_kv)?);
        if a.plain_norm {
            (q_norm, k_norm) = (Some(Norm::default()), Some(Norm::default()));
        }
        let o = loader.linear(&format!("{prefix}.attn_output"), a.n_head * a.head_v, e, arch.other_bias)?;
        let sinks = match arch.sinks {
            true => loader.vector(&format!("{prefix}.attn_sinks.weight"), a.n_head, Presence::Required)?,
            false => None,
        };
        let gate = match arch.attn_gate {
            true => Some(loader.linear(&format!("{prefix}.attn_gate"), e, a.n_head * a.head_v, Presence::Never)?),
            false => None,
        };
        Ok(AttentionWeights { q, k, v, low, gate, q_norm, k_norm, o, sinks })
    }

    pub(crate) fn input_types(&self) -> Vec<WeightType> {
        match &self.low {
            Some(low) => vec![low.q_a.weight.ty(), low.kv_a.weight.ty()],
            None => [&self.q, &self.k].into_iter().chain(&self.v).chain(&self.gate).map(|l| l.weight.ty()).collect(),
        }
    }

    /// Types of the matrices behind short rows.
    pub(crate) fn wide_types(&self) -> Vec<WeightType> {
        self.low.iter().flat_map(|_| [&self.q, &self.k]).map(|l| l.weight.ty()).collect()
    }
}

/// Query, key and value projections: three tensors, or one with their rows below each other.
pub(super) fn qkv<'g>(
    loader: &mut Loader<'g>,
    prefix: &str,
    k: usize,
    n: [usize; 3],
    bias: Presence,
) -> Result<[Linear<'g>; 3], Error> {
    let fused = format!("{prefix}.attn_qkv");
    if !loader.has(&format!("{fused}.weight")) {
        let mut part = |name: &str, n| loader.linear(&format!("{prefix}.{name}"), k, n, bias);
        return Ok([part("attn_q", n[0])?, part("attn_k", n[1])?, part("attn_v", n[2])?]);
    }
    let mut all = loader.linear(&fused, k, n.iter().sum(), bias)?;
    if all.bias.is_none() && bias != Presence::Never {
        // A fused matrix may have the biases of the parts.
        let mut part = |name: &str, n| loader.vector(&format!("{prefix}.{name}.bias"), n, Presence::Optional);
        if let [Some(q), Some(k), Some(v)] = [part("attn_q", n[0])?, part("attn_k", n[1])?, part("attn_v", n[2])?] {
            all.bias = Some([q, k, v].concat());
        }
    }
    let mut from = 0;
    Ok(n.map(|n| {
        from += n;
        all.rows(from - n, n)
    }))
}

impl AttentionOp {
    /// Multiplications and additions over `rows`.
    pub(crate) fn flops(&self, rows: &std::ops::Range<usize>) -> u64 {
        let m = rows.len() as u64;
        match self {
            AttentionOp::Narrow { k, n } => 2 * m * (*k * (n[0] + n[1])) as u64,
            AttentionOp::Widen { k, n } => 2 * m * (k[0] * n[0] + k[1] * n[1]) as u64,
            AttentionOp::Qkv { k, n } => 2 * m * *k as u64 * n.iter().sum::<usize>() as u64,
            AttentionOp::Gate { k, n } | AttentionOp::Out { k, n } => 2 * m * (*k * *n) as u64,
            AttentionOp::Attend { heads, head, window } => {
                let seen = |p: usize| (p + 1 - window.map_or(0, |w| w.low(p))) as u64;
                rows.clone().map(seen).sum::<u64>() * 4 * (*heads * *head) as u64
            }
            AttentionOp::StoreKv => 0,
        }
    }
}

/// The attention layers of a model.
pub(crate) fn layers(spec: &Spec) -> impl Iterator<Item = &AttentionSpec> {
    spec.layers.iter().filter_map(|l| l.mixer.attention())
}

/// Bytes that attention takes: one layer's keys and values of all positions, their rotations, and a chunk's queries, keys, values and
/// outputs, which stand once as f32 and once, at most, as rounded tiles (about 1.5 bytes a value for each kind).
pub(crate) fn memory(spec: &Spec, n_tokens: usize, chunk: usize) -> usize {
    let widest = |f: &dyn Fn(&AttentionSpec) -> usize| layers(spec).map(f).max().unwrap_or(0);
    let (q, kv) = (
        widest(&|a| a.n_head * a.head_k + if a.gated || spec.arch.attn_gate { a.n_q() } else { 0 }),
        widest(&|a| a.n_embd_k() + a.n_embd_v()),
    );
    let cache = widest(&|a| a.n_head_kv * HeadCache::bytes(a.head_k, a.head_v, n_tokens));
    let tables: usize = spec.ropes.iter().map(|rope| n_tokens * 4 * rope.n_rot).sum();
    // Short rows twice, once rounded, and what keys and values are dealt out from.
    let low = widest(&|a| a.low_rank.map_or(0, |low| 2 * (low.q + low.kv + low.n_rot) + a.n_wide()));
    cache + tables + chunk * 4 * (q + kv + q + q + low)
}
