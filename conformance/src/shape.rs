//! What of a model decides the shape of a decoder's memory: layers, heads, windows. Read from the model's keys alone.

use anyhow::{Context as _, Result, ensure};
use gguf::Gguf;
use kvlayout::{CacheType, KvSection, KvSpec, LayerKv};

/// The shape of a model's attention memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// `general.architecture`.
    pub arch: String,
    /// Size of the vocabulary.
    pub n_vocab: u32,
    /// Key/value heads.
    pub n_head_kv: usize,
    /// Channels of a key head.
    pub head_k: usize,
    /// Channels of a value head.
    pub head_v: usize,
    /// The sliding window, if the model has one.
    pub window: Option<usize>,
    /// Per layer: it sees only the window.
    pub sliding: Vec<bool>,
    /// Whether all matrices are f32, all f16 (or f32), or quantised.
    pub weights: Weights,
}

/// How exact a model's arithmetic is, by the worst of its matrices' formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Weights {
    /// f32.
    F32,
    /// f16: activations are rounded to f16 in products.
    F16,
    /// Anything else: activations are rounded to bf16 or to 8-bit blocks.
    Quantised,
}

/// What a decoder is started with, as far as its memory's shape goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheOptions {
    /// Type of K.
    pub type_k: CacheType,
    /// Type of V.
    pub type_v: CacheType,
    /// Flash attention.
    pub flash_attn: bool,
    /// All positions of sliding-window layers are kept.
    pub swa_full: bool,
    /// Streams.
    pub n_stream: u32,
}

impl Shape {
    /// Reads it from a model.
    pub fn of(model: &Gguf) -> Result<Shape> {
        let arch = model.str("general.architecture")?.context("no general.architecture")?.to_owned();
        let key = |k: &str| format!("{arch}.{k}");
        let number = |k: &str| -> Result<Option<usize>> { Ok(model.u32(&key(k))?.map(|n| n as usize)) };
        let need = |k: &str| number(k)?.with_context(|| format!("no {}", key(k)));
        let (n_embd, n_layer, n_head) =
            (need("embedding_length")?, need("block_count")?, need("attention.head_count")?);
        ensure!(n_head > 0, "{} is 0", key("attention.head_count"));
        let n_head_kv = number("attention.head_count_kv")?.unwrap_or(n_head);
        let head_k = number("attention.key_length")?.unwrap_or(n_embd / n_head);
        let head_v = number("attention.value_length")?.unwrap_or(n_embd / n_head);
        // Which layers see a window, where the file does not say: all but every so-manieth.
        let default_period = match arch.as_str() {
            "gemma3" => Some(6),
            "gpt-oss" => Some(2),
            "mellum" => Some(4),
            _ => None,
        };
        let window = match default_period {
            Some(_) => number("attention.sliding_window")?.filter(|&n| n > 0),
            None => None,
        };
        // llama.cpp takes the pattern as a number only; an array it passes over, and the period is the default.
        let period = model
            .get(&key("attention.sliding_window_pattern"))
            .and_then(|v| v.as_integer())
            .map_or(default_period.unwrap_or(0), |n| n as usize);
        let sliding = (0..n_layer).map(|il| window.is_some() && (period == 0 || il % period < period - 1)).collect();
        let embeddings = model.tensor("token_embd.weight").context("no tensor token_embd.weight")?;
        let mut weights = Weights::F32;
        for t in model.tensors().filter(|t| t.name.starts_with("blk.") && t.n_dims > 1) {
            weights = match (t.ty, weights) {
                (gguf::GgmlType::F32, w) => w,
                (gguf::GgmlType::F16, Weights::F32 | Weights::F16) => Weights::F16,
                _ => Weights::Quantised,
            };
        }
        Ok(Shape {
            n_vocab: u32::try_from(embeddings.ne[1])?,
            arch,
            n_head_kv,
            head_k,
            head_v,
            window,
            sliding,
            weights,
        })
    }

    /// The decoder's memory for this model and these options.
    pub fn kv_spec(&self, o: &CacheOptions) -> KvSpec {
        let layer = |il: usize| LayerKv {
            layer: il as u32,
            n_embd_k: (self.n_head_kv * self.head_k) as u32,
            n_embd_v: (self.n_head_kv * self.head_v) as u32,
        };
        let pick =
            |sliding: bool| (0..self.sliding.len()).filter(|&il| self.sliding[il] == sliding).map(layer).collect();
        let mut sections = vec![KvSection { layers: pick(false), window: None }];
        if let Some(window) = self.window {
            sections.push(KvSection { layers: pick(true), window: Some(window as u32) });
        }
        KvSpec {
            sections,
            recurrent: None,
            type_k: o.type_k,
            type_v: o.type_v,
            v_trans: !o.flash_attn,
            cell_ext: false,
            swa_full: o.swa_full,
            n_stream: o.n_stream,
        }
    }

    /// The model layer of a section's n-th layer.
    pub fn model_layer(&self, section: usize, index: usize) -> Option<usize> {
        let sliding = section == 1;
        (0..self.sliding.len()).filter(|&il| self.sliding[il] == sliding).nth(index)
    }
}
