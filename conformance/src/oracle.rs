//! A prefill in double precision, as plain as it can be written: the yardstick of the harness, and of its own sharpness.
//!
//! It follows llama.cpp's graphs of the four architectures (its `src/models/{llama,qwen2,qwen3,gemma3}.cpp` and the RoPE of
//! ggml's CPU path) and shares nothing with the program under test but the reader of model files. On purpose it emulates
//! none of ggml's rounding, with one exception: gemma3's GELU, which ggml looks up in a table of f16 values.
//!
//! With [`Arithmetic::Int8`] the projections of attention and of feed-forward networks are what kernels of the int8 contract
//! compute (`docs/devices.md`): the yardstick for a provider that uses such kernels. Written from that page alone.
//!
//! [`Mistake`] makes it wrong in one chosen way, to show that the harness would notice. It is not fast, and is not for large
//! models.

use anyhow::{Context as _, Result, bail, ensure};
use gguf::Gguf;
use kvlayout::{KvSink as _, KvSpec, Part};

use crate::shape::Shape;

/// A way to be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mistake {
    /// Every position is one too large.
    PositionPlusOne,
    /// RoPE pairs the other channels: neighbours for halves, or halves for neighbours.
    RopePairing,
    /// The RoPE base is one percent too large.
    RopeBase,
    /// Query heads read the wrong key/value head.
    HeadMap,
    /// One id of the prompt is another.
    OneWrongId,
    /// A position sees the one after it.
    LookAhead,
    /// GELU for SiLU, or SiLU for GELU.
    Activation,
    /// No 1/sqrt(d) in attention.
    NoScale,
    /// A tenth of the norms' epsilon.
    Epsilon,
    /// No norm of queries and keys (qwen3, gemma3).
    NoHeadNorm,
    /// No biases (qwen2).
    NoBias,
    /// No embedding scale (gemma3).
    NoEmbeddingScale,
    /// A sliding window that is one too long (gemma3).
    Window,
    /// The global layers' RoPE everywhere (gemma3).
    OneRope,
    /// RoPE scaling ignored (models that have it).
    NoRopeScaling,
}

impl Mistake {
    /// All of them.
    pub const ALL: [Mistake; 15] = [
        Mistake::PositionPlusOne,
        Mistake::RopePairing,
        Mistake::RopeBase,
        Mistake::HeadMap,
        Mistake::OneWrongId,
        Mistake::LookAhead,
        Mistake::Activation,
        Mistake::NoScale,
        Mistake::Epsilon,
        Mistake::NoHeadNorm,
        Mistake::NoBias,
        Mistake::NoEmbeddingScale,
        Mistake::Window,
        Mistake::OneRope,
        Mistake::NoRopeScaling,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Mistake::PositionPlusOne => "position-plus-one",
            Mistake::RopePairing => "rope-pairing",
            Mistake::RopeBase => "rope-base",
            Mistake::HeadMap => "head-map",
            Mistake::OneWrongId => "one-wrong-id",
            Mistake::LookAhead => "look-ahead",
            Mistake::Activation => "activation",
            Mistake::NoScale => "no-scale",
            Mistake::Epsilon => "epsilon",
            Mistake::NoHeadNorm => "no-head-norm",
            Mistake::NoBias => "no-bias",
            Mistake::NoEmbeddingScale => "no-embedding-scale",
            Mistake::Window => "window",
            Mistake::OneRope => "one-rope",
            Mistake::NoRopeScaling => "no-rope-scaling",
        }
    }
}

impl std::str::FromStr for Mistake {
    type Err = String;
    fn from_str(s: &str) -> Result<Mistake, String> {
        Mistake::ALL.into_iter().find(|m| m.name() == s).ok_or_else(|| {
            let known: Vec<_> = Mistake::ALL.iter().map(|m| m.name()).collect();
            format!("no such mistake; there are {}", known.join(", "))
        })
    }
}

/// How matrix products are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Arithmetic {
    /// In double precision.
    #[default]
    Exact,
    /// By the int8 contract: both operands in 8-bit integers, a scale for each row of activations and one for each output.
    Int8,
}

/// How one layer turns its heads.
#[derive(Debug, Clone)]
struct Rope {
    base: f64,
    /// What angles are multiplied by (1 / factor).
    scale: f64,
    /// YaRN: from which pair on angles are interpolated, and from which wholly.
    ramp: Option<(f64, f64)>,
    /// What the rotated channels are multiplied by.
    magnitude: f64,
}

/// A model, read from GGUF: the numbers of its architecture and all weights as f32.
pub struct Oracle {
    arch: Arch,
    n_embd: usize,
    n_layer: usize,
    n_head: usize,
    n_head_kv: usize,
    head_k: usize,
    head_v: usize,
    n_rot: usize,
    eps: f64,
    window: Option<usize>,
    /// Per layer: sees only the window.
    sliding: Vec<bool>,
    rope: Rope,
    rope_sliding: Rope,
    rope_freqs: Option<Vec<f32>>,
    embeddings: Vec<f32>,
    layers: Vec<Layer>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arch {
    Llama,
    Qwen2,
    Qwen3,
    Gemma3,
}

struct Layer {
    attn_norm: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    o: Vec<f32>,
    q_bias: Option<Vec<f32>>,
    k_bias: Option<Vec<f32>>,
    v_bias: Option<Vec<f32>>,
    q_norm: Option<Vec<f32>>,
    k_norm: Option<Vec<f32>>,
    post_attn_norm: Option<Vec<f32>>,
    ffn_norm: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
    post_ffn_norm: Option<Vec<f32>>,
}

/// Keys and values of one layer, row after row.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerRows {
    /// Keys, after RoPE.
    pub k: Vec<f32>,
    /// Values.
    pub v: Vec<f32>,
}

impl Oracle {
    /// Reads a model.
    pub fn load(model: &Gguf) -> Result<Oracle> {
        let arch_name = model.str("general.architecture")?.context("no general.architecture")?.to_owned();
        let arch = match arch_name.as_str() {
            "llama" => Arch::Llama,
            "qwen2" => Arch::Qwen2,
            "qwen3" => Arch::Qwen3,
            "gemma3" => Arch::Gemma3,
            other => bail!("the oracle does not know the architecture {other}"),
        };
        let key = |k: &str| format!("{arch_name}.{k}");
        let number = |k: &str| -> Result<Option<usize>> { Ok(model.u32(&key(k))?.map(|n| n as usize)) };
        let need = |k: &str| number(k)?.with_context(|| format!("no {}", key(k)));
        let real = |k: &str| -> Result<Option<f64>> { Ok(model.f32(&key(k))?.map(f64::from)) };

        let shape = Shape::of(model)?;
        let (n_embd, n_layer) = (need("embedding_length")?, shape.sliding.len());
        let (n_head, n_head_kv, head_k, head_v) =
            (need("attention.head_count")?, shape.heads_kv[0], shape.head_k, shape.head_v);
        ensure!(head_k == head_v, "keys of {head_k} and values of {head_v} channels are not expected here");
        let n_rot = number("rope.dimension_count")?.unwrap_or(head_k);
        let eps = real("attention.layer_norm_rms_epsilon")?.context("no norm epsilon")?;

        let base = real("rope.freq_base")?.unwrap_or(10_000.0);
        let kind = model.str(&key("rope.scaling.type"))?.unwrap_or("linear").to_owned();
        let factor = real("rope.scaling.factor")?.filter(|&f| f != 0.0).unwrap_or(1.0);
        let attn_factor = real("rope.scaling.attn_factor")?.unwrap_or(1.0);
        let (rope, rope_sliding) = {
            let scale = if kind == "none" { 1.0 } else { 1.0 / factor };
            let (mut ramp, mut magnitude, mut cancel) = (None, attn_factor, 1.0);
            if kind == "yarn" {
                let original =
                    number("rope.scaling.original_context_length")?.map_or(need("context_length")?, |n| n) as f64;
                let fast = real("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0);
                let slow = real("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0);
                let dim =
                    |turns: f64| n_rot as f64 * (original / (turns * std::f64::consts::TAU)).ln() / (2.0 * base.ln());
                ramp = Some((dim(fast).floor().max(0.0), dim(slow).ceil().min(n_rot as f64 - 1.0)));
                let growth = 1.0 + 0.1 * factor.ln();
                magnitude *= if factor <= 1.0 { 1.0 } else { growth };
                // ggml multiplies by this again from each layer's own scale; llama.cpp divides by the global one beforehand.
                cancel = growth;
            }
            let global = Rope { base, scale, ramp, magnitude };
            let local_base = real("rope.freq_base_swa")?.unwrap_or(10_000.0);
            let local = Rope { base: local_base, scale: 1.0, ramp: global.ramp, magnitude: global.magnitude / cancel };
            (global, local)
        };

        let tensor = |name: &str| -> Result<Option<Vec<f32>>> {
            let Some(t) = model.tensor(name) else { return Ok(None) };
            let mut out = vec![0f32; usize::try_from(t.n_elements()).context("tensor size")?];
            gguf::dequant::dequantize(t.ty, t.data, &mut out).with_context(|| name.to_owned())?;
            // NVFP4 matrices come with a factor.
            if let Some(factor) = name.strip_suffix("weight").and_then(|stem| model.tensor(&format!("{stem}scale"))) {
                let factor = factor.to_f32()?[0];
                out.iter_mut().for_each(|v| *v *= factor);
            }
            Ok(Some(out))
        };
        let must = |name: &str, n: usize| -> Result<Vec<f32>> {
            let t = tensor(name)?.with_context(|| format!("no tensor {name}"))?;
            ensure!(t.len() == n, "{name} has {} values, expected {n}", t.len());
            Ok(t)
        };
        let (q_out, kv_out) = (n_head * head_k, n_head_kv * head_k);
        let n_ff = need("feed_forward_length")?;
        let layers = (0..n_layer)
            .map(|il| {
                let n = |part: &str| format!("blk.{il}.{part}");
                Ok(Layer {
                    attn_norm: must(&n("attn_norm.weight"), n_embd)?,
                    q: must(&n("attn_q.weight"), n_embd * q_out)?,
                    k: must(&n("attn_k.weight"), n_embd * kv_out)?,
                    v: must(&n("attn_v.weight"), n_embd * kv_out)?,
                    o: must(&n("attn_output.weight"), n_embd * q_out)?,
                    q_bias: tensor(&n("attn_q.bias"))?,
                    k_bias: tensor(&n("attn_k.bias"))?,
                    v_bias: tensor(&n("attn_v.bias"))?,
                    q_norm: tensor(&n("attn_q_norm.weight"))?,
                    k_norm: tensor(&n("attn_k_norm.weight"))?,
                    post_attn_norm: tensor(&n("post_attention_norm.weight"))?,
                    ffn_norm: must(&n("ffn_norm.weight"), n_embd)?,
                    gate: must(&n("ffn_gate.weight"), n_embd * n_ff)?,
                    up: must(&n("ffn_up.weight"), n_embd * n_ff)?,
                    down: must(&n("ffn_down.weight"), n_embd * n_ff)?,
                    post_ffn_norm: tensor(&n("post_ffw_norm.weight"))?,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Oracle {
            arch,
            n_embd,
            n_layer,
            n_head,
            n_head_kv,
            head_k,
            head_v,
            n_rot,
            eps,
            window: shape.window,
            sliding: shape.sliding,
            rope,
            rope_sliding,
            rope_freqs: tensor("rope_freqs.weight")?,
            embeddings: tensor("token_embd.weight")?.context("no tensor token_embd.weight")?,
            layers,
        })
    }

    /// Keys and values of every layer for positions 0..tokens.len().
    pub fn run(&self, tokens: &[i32], arithmetic: Arithmetic, mistake: Option<Mistake>) -> Result<Vec<LayerRows>> {
        let is = |m: Mistake| mistake == Some(m);
        let matmul = match arithmetic {
            Arithmetic::Exact => matmul,
            Arithmetic::Int8 => matmul_int8,
        };
        let (n, e) = (tokens.len(), self.n_embd);
        let n_vocab = self.embeddings.len() / e;
        ensure!(n > 0, "no tokens");
        let eps = if is(Mistake::Epsilon) { self.eps / 10.0 } else { self.eps };
        let mut x = Vec::with_capacity(n * e);
        for (i, &id) in tokens.iter().enumerate() {
            let mut id = usize::try_from(id).ok().filter(|&id| id < n_vocab).with_context(|| format!("id {id}"))?;
            if is(Mistake::OneWrongId) && i == n / 2 {
                id = (id + 1) % n_vocab;
            }
            let scale =
                if self.arch == Arch::Gemma3 && !is(Mistake::NoEmbeddingScale) { (e as f64).sqrt() } else { 1.0 };
            x.extend(self.embeddings[id * e..(id + 1) * e].iter().map(|&v| f64::from(v) * scale));
        }

        let (hk, hv) = (self.head_k, self.head_v);
        let mut out = Vec::with_capacity(self.n_layer);
        for (il, layer) in self.layers.iter().enumerate() {
            let mut rope =
                if self.sliding[il] && !is(Mistake::OneRope) { self.rope_sliding.clone() } else { self.rope.clone() };
            if is(Mistake::RopeBase) {
                rope.base *= 1.01;
            }
            if is(Mistake::NoRopeScaling) {
                rope = Rope { base: rope.base, scale: 1.0, ramp: None, magnitude: 1.0 };
            }
            let normed = norm_rows(&x, &layer.attn_norm, e, eps);
            let bias = |b: &Option<Vec<f32>>| if is(Mistake::NoBias) { None } else { b.clone() };
            let mut q = matmul(&normed, &layer.q, e, bias(&layer.q_bias).as_deref());
            let mut k = matmul(&normed, &layer.k, e, bias(&layer.k_bias).as_deref());
            let v = matmul(&normed, &layer.v, e, bias(&layer.v_bias).as_deref());
            if !is(Mistake::NoHeadNorm) {
                if let Some(w) = &layer.q_norm {
                    q = norm_rows(&q, w, hk, eps);
                }
                if let Some(w) = &layer.k_norm {
                    k = norm_rows(&k, w, hk, eps);
                }
            }
            let freqs = if is(Mistake::NoRopeScaling) { None } else { self.rope_freqs.as_deref() };
            let neighbours = (self.arch == Arch::Llama) != is(Mistake::RopePairing);
            for (rows, heads) in [(&mut q, self.n_head), (&mut k, self.n_head_kv)] {
                for (p, row) in rows.chunks_exact_mut(heads * hk).enumerate() {
                    let position = (p + usize::from(is(Mistake::PositionPlusOne))) as f64;
                    for head in row.chunks_exact_mut(hk) {
                        rotate(head, self.n_rot, position, &rope, freqs, neighbours);
                    }
                }
            }
            let to_f32 = |rows: &[f64]| rows.iter().map(|&v| v as f32).collect();
            out.push(LayerRows { k: to_f32(&k), v: to_f32(&v) });
            if il + 1 == self.n_layer {
                break;
            }

            let window = match self.window {
                Some(w) if self.sliding[il] => w + usize::from(is(Mistake::Window)),
                _ => usize::MAX,
            };
            let scale = if is(Mistake::NoScale) { 1.0 } else { 1.0 / (hk as f64).sqrt() };
            let mut mixed = vec![0f64; n * self.n_head * hv];
            for p in 0..n {
                let first = (p + 1).saturating_sub(window);
                let last = if is(Mistake::LookAhead) { (p + 1).min(n - 1) } else { p };
                for h in 0..self.n_head {
                    let kv_head =
                        if is(Mistake::HeadMap) { h % self.n_head_kv } else { h / (self.n_head / self.n_head_kv) };
                    let query = &q[(p * self.n_head + h) * hk..][..hk];
                    let at = |j: usize| j * self.n_head_kv + kv_head;
                    let mut score: Vec<f64> =
                        (first..=last).map(|j| scale * dot(query, &k[at(j) * hk..][..hk])).collect();
                    let top = score.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    score.iter_mut().for_each(|s| *s = (*s - top).exp());
                    let sum: f64 = score.iter().sum();
                    let row = &mut mixed[(p * self.n_head + h) * hv..][..hv];
                    for (s, j) in score.iter().zip(first..) {
                        let weight = s / sum;
                        for (r, value) in row.iter_mut().zip(&v[at(j) * hv..][..hv]) {
                            *r += weight * value;
                        }
                    }
                }
            }
            let mut attn = matmul(&mixed, &layer.o, self.n_head * hv, None);
            if let Some(w) = &layer.post_attn_norm {
                attn = norm_rows(&attn, w, e, eps);
            }
            x.iter_mut().zip(&attn).for_each(|(x, a)| *x += a);

            let normed = norm_rows(&x, &layer.ffn_norm, e, eps);
            let mut hidden = matmul(&normed, &layer.gate, e, None);
            let up = matmul(&normed, &layer.up, e, None);
            let gelu = (self.arch == Arch::Gemma3) != is(Mistake::Activation);
            hidden
                .iter_mut()
                .zip(&up)
                .for_each(|(g, u)| *g = u * if gelu { gelu_of(*g) } else { *g / (1.0 + (-*g).exp()) });
            let mut ffn = matmul(&hidden, &layer.down, hidden.len() / n, None);
            if let Some(w) = &layer.post_ffn_norm {
                ffn = norm_rows(&ffn, w, e, eps);
            }
            x.iter_mut().zip(&ffn).for_each(|(x, f)| *x += f);
        }
        Ok(out)
    }

    /// Runs and writes a state file's bytes.
    pub fn state(
        &self,
        tokens: &[i32],
        spec: &KvSpec,
        version: kvlayout::StateVersion,
        arithmetic: Arithmetic,
        mistake: Option<Mistake>,
    ) -> Result<Vec<u8>> {
        let map = kvlayout::KvMap::state_file(spec, tokens, version)?;
        let mut bytes = Vec::new();
        let size = map.size();
        let space = kvlayout::MemSpace::new(&mut bytes, size).context("memory for the state")?;
        let mut sink = kvlayout::Scatter::new(map, space)?;
        for (il, rows) in self.run(tokens, arithmetic, mistake)?.iter().enumerate() {
            let all = 0..tokens.len() as u32;
            sink.put_rows(il as u32, Part::K, all.clone(), &rows.k)?;
            sink.put_rows(il as u32, Part::V, all, &rows.v)?;
        }
        Box::new(sink).commit()?;
        Ok(bytes)
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    // Four sums side by side: the compiler may not reorder one sum, and the oracle should not take minutes.
    let mut sums = [0f64; 4];
    let (a4, b4) = (a.chunks_exact(4), b.chunks_exact(4));
    let rest: f64 = a4.remainder().iter().zip(b4.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in a4.zip(b4) {
        for i in 0..4 {
            sums[i] += x[i] * y[i];
        }
    }
    sums.iter().sum::<f64>() + rest
}

/// `weights` has rows of `n_in`; the result one value per weight row, for every row of `x`.
fn matmul(x: &[f64], weights: &[f32], n_in: usize, bias: Option<&[f32]>) -> Vec<f64> {
    let (rows, n_out) = (x.len() / n_in, weights.len() / n_in);
    let mut out = vec![0f64; rows * n_out];
    let mut w64 = vec![0f64; n_in];
    for (o, w) in weights.chunks_exact(n_in).enumerate() {
        w64.iter_mut().zip(w).for_each(|(a, &b)| *a = f64::from(b));
        let b = bias.map_or(0.0, |b| f64::from(b[o]));
        for (r, row) in x.chunks_exact(n_in).enumerate() {
            out[r * n_out + o] = dot(row, &w64) + b;
        }
    }
    out
}

/// The same by the int8 contract. Products of codes are added up as integers, which is exact in any order.
fn matmul_int8(x: &[f64], weights: &[f32], n_in: usize, bias: Option<&[f32]>) -> Vec<f64> {
    let (rows, n_out) = (x.len() / n_in, weights.len() / n_in);
    let x: Vec<f32> = x.iter().map(|&v| v as f32).collect();
    let x: Vec<(Vec<i16>, f64)> = x.chunks_exact(n_in).map(codes).collect();
    let mut out = vec![0f64; rows * n_out];
    for (o, w) in weights.chunks_exact(n_in).enumerate() {
        let (w, w_scale) = codes(w);
        let b = bias.map_or(0.0, |b| f64::from(b[o]));
        for (r, (x, x_scale)) in x.iter().enumerate() {
            // At most 127 * 127 * n_in, and no model's rows are 133,000 wide.
            let sum: i32 = x.iter().zip(&w).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum();
            out[r * n_out + o] = f64::from(sum) * x_scale * w_scale + b;
        }
    }
    out
}

/// A row in 8-bit codes, and its scale: the largest magnitude over 127; halves go away from zero. Scale and quotient are f32 as the
/// contract has them: weights of few bits have many values right between two codes, and which of them it is hangs on the last bit.
fn codes(row: &[f32]) -> (Vec<i16>, f64) {
    let scale = row.iter().fold(0f32, |most, v| most.max(v.abs())) / 127.0;
    let code = |v: &f32| if scale > 0.0 { (v / scale).round().clamp(-127.0, 127.0) as i16 } else { 0 };
    (row.iter().map(code).collect(), f64::from(scale))
}

fn norm_rows(x: &[f64], weight: &[f32], width: usize, eps: f64) -> Vec<f64> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(width) {
        let mean = row.iter().map(|v| v * v).sum::<f64>() / width as f64;
        let scale = 1.0 / (mean + eps).sqrt();
        out.extend(row.iter().zip(weight).map(|(v, &w)| v * scale * f64::from(w)));
    }
    out
}

fn rotate(head: &mut [f64], n_rot: usize, position: f64, rope: &Rope, freqs: Option<&[f32]>, neighbours: bool) {
    for pair in 0..n_rot / 2 {
        let free =
            position * rope.base.powf(-2.0 * pair as f64 / n_rot as f64) / freqs.map_or(1.0, |f| f64::from(f[pair]));
        let squeezed = free * rope.scale;
        let angle = match rope.ramp {
            Some((low, high)) => {
                let mix = 1.0 - ((pair as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                squeezed * (1.0 - mix) + free * mix
            }
            None => squeezed,
        };
        let (sin, cos) = (angle.sin() * rope.magnitude, angle.cos() * rope.magnitude);
        let (i, j) = if neighbours { (2 * pair, 2 * pair + 1) } else { (pair, pair + n_rot / 2) };
        let (a, b) = (head[i], head[j]);
        head[i] = a * cos - b * sin;
        head[j] = a * sin + b * cos;
    }
}

/// ggml's GELU: the tanh form, looked up by the f16 nearest to the argument and stored as f16; itself beyond ±10.
fn gelu_of(x: f64) -> f64 {
    if x <= -10.0 {
        return 0.0;
    }
    if x >= 10.0 {
        return x;
    }
    let x = half::f16::from_f64(x).to_f64();
    let tanh = ((2.0 / std::f64::consts::PI).sqrt() * x * (1.0 + 0.044715 * x * x)).tanh();
    half::f16::from_f64(0.5 * x * (1.0 + tanh)).to_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand. Scales are 1 and 2; the codes of the weights are 127, 1, -2, halves away from zero.
    #[test]
    fn the_int8_contract() {
        let (x, w) = ([127.0, -0.5, 2.5, 0.0, 0.0, 0.0], [254f32, 1.0, -3.0]);
        let out = matmul_int8(&x, &w, 3, Some(&[0.25]));
        // 127 * 127 + (-1) * 1 + 3 * (-2), times two; the second row is nothing but the bias.
        assert_eq!(out, [2.0 * (16129.0 - 1.0 - 6.0) + 0.25, 0.25]);
    }
}
