//! Tiny models of random weights, the same on every machine: four architectures, many weight formats, RoPE in all its forms.
//!
//! They are small enough that a server prefills 2,000 tokens in no time and an oracle in double precision can follow, and
//! they are made so that mistakes show: embeddings are small, so that a wrong epsilon in a norm is visible; heads are
//! grouped; a head is not always `n_embd / n_head` wide. Quantised weights are random blocks of the format itself, so no
//! quantiser is needed. They say nothing about language, and nothing about speed.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use gguf::GgmlType;
use gguf::write::Writer;
use sha2::{Digest as _, Sha256};

/// How positions are encoded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rope {
    /// Nothing out of the ordinary.
    Plain,
    /// Frequencies divided by a factor.
    Linear(f32),
    /// A `rope_freqs.weight` tensor.
    Freqs,
    /// YaRN: factor and original context length.
    Yarn(f32, u32),
    /// Only the first channels of each head are rotated.
    Partial(u32),
}

/// How gemma3's sliding-window layers are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// Not at all: every sixth layer is global.
    Absent,
    /// As a period.
    Number(u32),
    /// As one flag per layer (with llama.cpp's default period of six, since that is what it makes of an array here).
    Array,
}

/// One tiny model.
#[derive(Debug, Clone, PartialEq)]
pub struct Tiny {
    /// Its name, `tiny-…`.
    pub name: &'static str,
    /// `general.architecture`.
    pub arch: &'static str,
    /// Format of the matrices.
    pub weights: GgmlType,
    /// Layers.
    pub n_layer: u32,
    /// Query heads.
    pub n_head: u32,
    /// Key/value heads.
    pub n_head_kv: u32,
    /// Channels of a head.
    pub head_dim: u32,
    /// Positions.
    pub rope: Rope,
    /// Sliding window (gemma3).
    pub window: Option<u32>,
    /// How its layers are told.
    pub pattern: Pattern,
    /// A separate output matrix, or the embeddings again.
    pub tied: bool,
}

const N_EMBD: u32 = 256;
const N_FF: u32 = 512;
const N_VOCAB: usize = 320;
const EPS: f32 = 1e-5;

/// Every tiny model.
pub fn all() -> Vec<Tiny> {
    use GgmlType as T;
    let base = |name, arch, weights| {
        let (n_layer, n_head, n_head_kv, head_dim) = match arch {
            "llama" => (3, 8, 2, 32),
            "qwen2" => (3, 4, 2, 64),
            // Wider than n_embd / n_head, so that guessing the head size goes wrong.
            "qwen3" => (3, 8, 2, 64),
            _ => (7, 4, 1, 128),
        };
        Tiny {
            name,
            arch,
            weights,
            n_layer,
            n_head,
            n_head_kv,
            head_dim,
            rope: Rope::Plain,
            window: None,
            pattern: Pattern::Absent,
            tied: false,
        }
    };
    let llama = |name, weights| base(name, "llama", weights);
    let qwen2 = |name, weights| base(name, "qwen2", weights);
    let qwen3 = |name, weights| base(name, "qwen3", weights);
    let gemma3 = |name, weights| Tiny { window: Some(32), ..base(name, "gemma3", weights) };
    vec![
        llama("tiny-llama-f32", T::F32),
        llama("tiny-llama-f16", T::F16),
        llama("tiny-llama-bf16", T::BF16),
        Tiny { tied: true, ..llama("tiny-llama-q8_0", T::Q8_0) },
        llama("tiny-llama-q4_0", T::Q4_0),
        llama("tiny-llama-q4_1", T::Q4_1),
        llama("tiny-llama-q5_0", T::Q5_0),
        llama("tiny-llama-q5_1", T::Q5_1),
        llama("tiny-llama-mxfp4", T::MXFP4),
        Tiny { rope: Rope::Linear(4.0), ..llama("tiny-llama-linear-f32", T::F32) },
        Tiny { rope: Rope::Freqs, ..llama("tiny-llama-freqs-f32", T::F32) },
        Tiny { rope: Rope::Yarn(4.0, 128), ..llama("tiny-llama-yarn-f32", T::F32) },
        qwen2("tiny-qwen2-f32", T::F32),
        Tiny { tied: true, ..qwen2("tiny-qwen2-f16", T::F16) },
        qwen2("tiny-qwen2-q4_k", T::Q4_K),
        qwen2("tiny-qwen2-q6_k", T::Q6_K),
        Tiny { rope: Rope::Yarn(8.0, 64), ..qwen2("tiny-qwen2-yarn-f32", T::F32) },
        qwen3("tiny-qwen3-f32", T::F32),
        qwen3("tiny-qwen3-f16", T::F16),
        qwen3("tiny-qwen3-q5_k", T::Q5_K),
        qwen3("tiny-qwen3-q3_k", T::Q3_K),
        Tiny { rope: Rope::Yarn(4.0, 128), ..qwen3("tiny-qwen3-yarn-f32", T::F32) },
        gemma3("tiny-gemma3-f32", T::F32),
        Tiny { pattern: Pattern::Number(3), rope: Rope::Linear(8.0), ..gemma3("tiny-gemma3-linear-f32", T::F32) },
        Tiny { pattern: Pattern::Array, rope: Rope::Partial(64), ..gemma3("tiny-gemma3-partial-f32", T::F32) },
        Tiny { window: None, ..gemma3("tiny-gemma3-nowindow-f32", T::F32) },
        Tiny { tied: true, ..gemma3("tiny-gemma3-f16", T::F16) },
        gemma3("tiny-gemma3-q2_k", T::Q2_K),
        gemma3("tiny-gemma3-iq4_nl", T::IQ4_NL),
        gemma3("tiny-gemma3-iq4_xs", T::IQ4_XS),
    ]
}

/// Ids that must not be generated: bytes that are no text by themselves. Servers up to build 10566 answer 500 when a reply
/// is not UTF-8.
pub fn unprintable() -> Vec<i32> {
    (3 + 0x80..3 + 0x100).collect()
}

/// The tiny model of that name.
pub fn find(name: &str) -> Option<Tiny> {
    all().into_iter().find(|t| t.name == name)
}

impl Tiny {
    /// The model's bytes.
    pub fn build(&self) -> Result<Vec<u8>> {
        let mut w = Writer::new(self.arch);
        let mut rng = Rng::new(self.name);
        self.keys(&mut w);
        vocabulary(&mut w);
        let (embd, q, kv, ff) = (N_EMBD, self.n_head * self.head_dim, self.n_head_kv * self.head_dim, N_FF);
        let gemma = self.arch == "gemma3";
        // gemma3 multiplies embeddings by sqrt(n_embd).
        let embd_dev = if gemma { 0.03 / 16.0 } else { 0.03 };
        let unit = |n: u32| 1.0 / (n as f32).sqrt();
        let mut put = |name: String, ne: &[u64], ty: GgmlType, values: Values| -> Result<()> {
            let n = ne.iter().product::<u64>() as usize;
            let bytes = values.bytes(&mut rng, ty, n);
            w.tensor(&name, ty, ne, bytes).with_context(|| format!("{}: {name}", self.name))?;
            Ok(())
        };
        let matrix = |rows: u32, cols: u32| [u64::from(cols), u64::from(rows)];
        put("token_embd.weight".into(), &matrix(N_VOCAB as u32, embd), self.weights, Values::Spread(embd_dev))?;
        // Small embeddings give flat logits; the last norm makes up for it, so that the model prefers something.
        let sharp = if self.tied { 0.7 * unit(embd) / embd_dev } else { 2.0 };
        put("output_norm.weight".into(), &[embd.into()], GgmlType::F32, Values::Around(sharp))?;
        if !self.tied {
            put("output.weight".into(), &matrix(N_VOCAB as u32, embd), self.weights, Values::Spread(unit(embd)))?;
        }
        if self.rope == Rope::Freqs {
            put("rope_freqs.weight".into(), &[u64::from(self.head_dim / 2)], GgmlType::F32, Values::Between(1.0, 8.0))?;
        }
        for il in 0..self.n_layer {
            let t = |part: &str| format!("blk.{il}.{part}");
            let f32_ = GgmlType::F32;
            put(t("attn_norm.weight"), &[embd.into()], f32_, Values::Around(1.0))?;
            put(t("attn_q.weight"), &matrix(q, embd), self.weights, Values::Spread(1.5 * unit(embd)))?;
            put(t("attn_k.weight"), &matrix(kv, embd), self.weights, Values::Spread(1.5 * unit(embd)))?;
            put(t("attn_v.weight"), &matrix(kv, embd), self.weights, Values::Spread(unit(embd)))?;
            put(t("attn_output.weight"), &matrix(embd, q), self.weights, Values::Spread(0.1 * unit(q)))?;
            if self.arch == "qwen2" {
                put(t("attn_q.bias"), &[q.into()], f32_, Values::Spread(0.3))?;
                put(t("attn_k.bias"), &[kv.into()], f32_, Values::Spread(0.3))?;
                put(t("attn_v.bias"), &[kv.into()], f32_, Values::Spread(0.3))?;
            }
            if gemma || self.arch == "qwen3" {
                put(t("attn_q_norm.weight"), &[self.head_dim.into()], f32_, Values::Around(1.3))?;
                put(t("attn_k_norm.weight"), &[self.head_dim.into()], f32_, Values::Around(1.3))?;
            }
            if gemma {
                put(t("post_attention_norm.weight"), &[embd.into()], f32_, Values::Around(0.03))?;
                put(t("post_ffw_norm.weight"), &[embd.into()], f32_, Values::Around(0.03))?;
            }
            put(t("ffn_norm.weight"), &[embd.into()], f32_, Values::Around(1.0))?;
            put(t("ffn_gate.weight"), &matrix(ff, embd), self.weights, Values::Spread(1.5 * unit(embd)))?;
            put(t("ffn_up.weight"), &matrix(ff, embd), self.weights, Values::Spread(unit(embd)))?;
            put(t("ffn_down.weight"), &matrix(embd, ff), self.weights, Values::Spread(0.1 * unit(ff)))?;
        }
        Ok(w.finish())
    }

    fn keys(&self, w: &mut Writer) {
        let k = |key: &str| format!("{}.{key}", self.arch);
        w.str("general.name", self.name);
        w.u32("general.quantization_version", 2);
        w.u32(&k("context_length"), 4096);
        w.u32(&k("embedding_length"), N_EMBD);
        w.u32(&k("block_count"), self.n_layer);
        w.u32(&k("feed_forward_length"), N_FF);
        w.u32(&k("attention.head_count"), self.n_head);
        w.u32(&k("attention.head_count_kv"), self.n_head_kv);
        w.f32(&k("attention.layer_norm_rms_epsilon"), EPS);
        if self.head_dim != N_EMBD / self.n_head {
            w.u32(&k("attention.key_length"), self.head_dim);
            w.u32(&k("attention.value_length"), self.head_dim);
        }
        w.f32(&k("rope.freq_base"), if self.arch == "llama" { 10_000.0 } else { 1_000_000.0 });
        match self.rope {
            Rope::Plain | Rope::Freqs => {}
            Rope::Linear(factor) => {
                w.str(&k("rope.scaling.type"), "linear");
                w.f32(&k("rope.scaling.factor"), factor);
            }
            Rope::Yarn(factor, original) => {
                w.str(&k("rope.scaling.type"), "yarn");
                w.f32(&k("rope.scaling.factor"), factor);
                w.u32(&k("rope.scaling.original_context_length"), original);
            }
            Rope::Partial(n_rot) => {
                w.u32(&k("rope.dimension_count"), n_rot);
            }
        }
        if let Some(window) = self.window {
            w.u32(&k("attention.sliding_window"), window);
            match self.pattern {
                Pattern::Absent => {}
                Pattern::Number(n) => {
                    w.u32(&k("attention.sliding_window_pattern"), n);
                }
                Pattern::Array => {
                    let flags: Vec<bool> = (0..self.n_layer).map(|il| il % 6 != 5).collect();
                    w.array_bool(&k("attention.sliding_window_pattern"), &flags);
                }
            }
        }
    }

    /// The model as a file in `dir`, written if it is not there. Its name carries its checksum.
    pub fn write(&self, dir: &Path) -> Result<PathBuf> {
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        let bytes = self.build()?;
        let hash: String = Sha256::digest(&bytes).iter().take(6).map(|b| format!("{b:02x}")).collect();
        let path = dir.join(format!("{}-{hash}.gguf", self.name));
        if !path.exists() {
            let thread = format!("{:?}", std::thread::current().id());
            let digits: String = thread.chars().filter(char::is_ascii_digit).collect();
            let temp = dir.join(format!(".{}-{}-{digits}", self.name, std::process::id()));
            fs::write(&temp, &bytes).with_context(|| format!("writing {}", temp.display()))?;
            fs::rename(&temp, &path).with_context(|| format!("moving {} to {}", temp.display(), path.display()))?;
        }
        Ok(path)
    }
}

/// A vocabulary in the manner of SentencePiece: three special tokens, all bytes, and some letters and pairs.
fn vocabulary(w: &mut Writer) {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).into();
    let mut types = vec![2i32, 3, 3];
    for byte in 0..=255u8 {
        tokens.push(format!("<0x{byte:02X}>"));
        types.push(6);
    }
    tokens.push("\u{2581}".into());
    tokens.extend(('a'..='z').map(String::from));
    let pairs = [
        "th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ti", "es", "or", "te", "of", "ed", "is", "it",
        "al", "ar", "st", "to", "nt", "ng", "se", "ha", "as", "ou", "io", "le", "ve", "co", "me", "de",
    ];
    tokens.extend(pairs.iter().take(N_VOCAB - tokens.len()).map(|p| (*p).to_owned()));
    types.resize(N_VOCAB, 1);
    debug_assert_eq!(tokens.len(), N_VOCAB);
    let scores: Vec<f32> = (0..N_VOCAB).map(|i| if types[i] == 1 { -(i as f32) } else { 0.0 }).collect();
    let names: Vec<&str> = tokens.iter().map(String::as_str).collect();
    w.str("tokenizer.ggml.model", "llama");
    w.array_str("tokenizer.ggml.tokens", &names);
    w.array_f32("tokenizer.ggml.scores", &scores);
    w.array_i32("tokenizer.ggml.token_type", &types);
    w.u32("tokenizer.ggml.bos_token_id", 1);
    w.u32("tokenizer.ggml.eos_token_id", 2);
    w.u32("tokenizer.ggml.unknown_token_id", 0);
    w.bool("tokenizer.ggml.add_bos_token", true);
}

/// What a tensor's values are drawn from.
#[derive(Clone, Copy)]
enum Values {
    /// Around zero, with this deviation.
    Spread(f32),
    /// Around this, by a tenth of it.
    Around(f32),
    /// Evenly between two numbers.
    Between(f32, f32),
}

impl Values {
    fn bytes(self, rng: &mut Rng, ty: GgmlType, n: usize) -> Vec<u8> {
        if let Values::Spread(dev) = self
            && ty.block_elems() > 1
        {
            let mut out = Vec::with_capacity(n / ty.block_elems() as usize * ty.block_bytes() as usize);
            for _ in 0..n / ty.block_elems() as usize {
                block(rng, ty, dev, &mut out);
            }
            return out;
        }
        let mut out = Vec::with_capacity(n * ty.block_bytes() as usize);
        for _ in 0..n {
            let x = match self {
                Values::Spread(dev) => dev * rng.normal(),
                Values::Around(middle) => middle * (1.0 + 0.1 * rng.normal()),
                Values::Between(low, high) => low + (high - low) * rng.unit(),
            };
            match ty {
                GgmlType::F16 => out.extend(f16_bits(x).to_le_bytes()),
                GgmlType::BF16 => out.extend(((x.to_bits() + 0x8000) >> 16).to_le_bytes().into_iter().take(2)),
                _ => out.extend(x.to_le_bytes()),
            }
        }
        out
    }
}

/// One random block whose values have about the deviation `dev` and mean zero. The layouts are ggml's.
fn block(rng: &mut Rng, ty: GgmlType, dev: f32, out: &mut Vec<u8>) {
    // Scales differ from block to block, as they do in real models; the sign is free where the values are lopsided.
    let size = dev * (0.7 + 0.6 * rng.unit());
    let sign = if rng.bit() { 1.0 } else { -1.0 };
    let half = |out: &mut Vec<u8>, x: f32| out.extend(f16_bits(x).to_le_bytes());
    match ty {
        GgmlType::Q8_0 => {
            half(out, size / 73.6);
            out.extend((0..32).map(|_| (rng.below(255) as i32 - 127) as i8 as u8));
        }
        GgmlType::Q4_0 => {
            half(out, sign * size / 4.6);
            rng.bytes(16, out);
        }
        GgmlType::Q4_1 => {
            half(out, size / 4.6);
            half(out, -7.5 * size / 4.6);
            rng.bytes(16, out);
        }
        GgmlType::Q5_0 => {
            half(out, sign * size / 9.2);
            rng.bytes(20, out);
        }
        GgmlType::Q5_1 => {
            half(out, size / 9.2);
            half(out, -15.5 * size / 9.2);
            rng.bytes(20, out);
        }
        GgmlType::IQ4_NL => {
            half(out, sign * size / 70.0);
            rng.bytes(16, out);
        }
        GgmlType::MXFP4 => {
            // Values 0..12 in twelfths of a power of two; 5.6 is their deviation.
            let exponent = (128.0 + (size / 5.6).log2().round()) as u8;
            out.push(exponent);
            rng.bytes(16, out);
        }
        GgmlType::Q2_K => {
            // 16 scales (low nibbles) and minima (high nibbles), both the same so that the values lie around zero.
            let d = size / (8.5 * 1.12);
            for _ in 0..16 {
                let s = 1 + rng.below(15) as u8;
                out.push(s | (s << 4));
            }
            rng.bytes(64, out);
            half(out, d);
            half(out, 1.5 * d);
        }
        GgmlType::Q3_K => {
            rng.bytes(32 + 64 + 12, out);
            half(out, size / (18.5 * 2.3));
        }
        GgmlType::Q4_K | GgmlType::Q5_K => {
            let (middle, spread, bytes) = if ty == GgmlType::Q4_K { (7.5, 4.6, 128) } else { (15.5, 9.2, 32 + 128) };
            let d = size / (36.0 * spread);
            half(out, d);
            half(out, middle * d);
            let scales: [u8; 8] = std::array::from_fn(|_| 8 + rng.below(56) as u8);
            out.extend(pack_k4(&scales, &scales));
            rng.bytes(bytes, out);
        }
        GgmlType::Q6_K => {
            rng.bytes(128 + 64, out);
            out.extend((0..16).map(|_| (rng.below(255) as i32 - 127) as i8 as u8));
            half(out, size / (73.6 * 18.5));
        }
        GgmlType::IQ4_XS => {
            half(out, size / (18.5 * 70.0));
            rng.bytes(2 + 4 + 128, out);
        }
        other => unreachable!("no tiny model has weights of type {other}"),
    }
}

/// Packs eight 6-bit scales and eight 6-bit minima into the twelve bytes of a Q4_K or Q5_K block.
fn pack_k4(scales: &[u8; 8], mins: &[u8; 8]) -> [u8; 12] {
    let mut out = [0u8; 12];
    for j in 0..4 {
        out[j] = (scales[j] & 63) | ((scales[j + 4] >> 4) << 6);
        out[j + 4] = (mins[j] & 63) | ((mins[j + 4] >> 4) << 6);
        out[j + 8] = (scales[j + 4] & 15) | ((mins[j + 4] & 15) << 4);
    }
    out
}

/// The nearest f16, for finite values well inside its range.
fn f16_bits(x: f32) -> u16 {
    half::f16::from_f32(x).to_bits()
}

/// A small generator of our own (splitmix64): a dependency's next version must not change the models.
pub struct Rng(u64);

impl Rng {
    /// From a name.
    pub fn new(seed: &str) -> Rng {
        // FNV-1a, so that models differ by name.
        Rng(seed.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)))
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`, which is small.
    pub fn below(&mut self, n: u32) -> u32 {
        (((self.next_u64() >> 32) * u64::from(n)) >> 32) as u32
    }

    fn bit(&mut self) -> bool {
        self.next_u64() >> 63 == 1
    }

    /// In [0, 1).
    fn unit(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u32 << 24) as f32
    }

    /// Nearly normal: a sum of twelve even draws. Unlike the textbook formula it needs no logarithm, which differs between
    /// mathematics libraries in the last bit.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }

    fn bytes(&mut self, n: usize, out: &mut Vec<u8>) {
        out.extend((0..n).map(|_| (self.next_u64() >> 56) as u8));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gguf::Gguf;

    #[test]
    fn weights_have_the_deviation_asked_for() {
        for tiny in all() {
            let model = Gguf::from_bytes(tiny.name, tiny.build().unwrap()).unwrap();
            let k = model.tensor("blk.0.attn_k.weight").unwrap();
            let mut values = vec![0f32; k.n_elements() as usize];
            gguf::dequant::dequantize(k.ty, k.data, &mut values).unwrap();
            let n = values.len() as f64;
            let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
            let dev = (values.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n).sqrt();
            let want = 1.5 / 16.0;
            assert!((0.6..1.6).contains(&(dev / want)), "{}: deviation {dev}, wanted about {want}", tiny.name);
            assert!(mean.abs() < 0.15 * want, "{}: mean {mean}", tiny.name);
        }
    }

    #[test]
    fn models_are_the_same_every_time_and_differ_by_name() {
        let a = find("tiny-llama-f32").unwrap();
        assert_eq!(a.build().unwrap(), a.build().unwrap());
        let names: Vec<_> = all().iter().map(|t| t.name).collect();
        let mut unique = names.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), names.len());
        assert!(find("tiny-nothing").is_none());
    }
}
