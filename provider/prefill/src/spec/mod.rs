//! One model's numbers: read from its metadata, completed by llama.cpp's defaults, checked before anything is
//! allocated.

mod keys;
mod rotation;
mod window;

pub(crate) use keys::{Keys, MAX_WIDTH};

use crate::Error;
use crate::arch::{self, Arch};
use crate::layer::attention::AttentionSpec;
use crate::layer::dense::DenseSpec;
use crate::layer::experts;
use crate::layer::{FeedForward, Mixer};
use crate::rope::Rope;
use gguf::Gguf;

/// llama.cpp's own limit (`LLAMA_MAX_LAYERS`).
const MAX_LAYERS: u32 = 512;

/// What is the same in every layer.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The architecture's table.
    pub arch: &'static Arch,
    /// Entries of the vocabulary.
    pub n_vocab: u32,
    /// Length of an embedding.
    pub n_embd: usize,
    /// Added to the mean square in norms.
    pub eps: f32,
    /// Context length the model was trained for.
    pub n_ctx_train: u32,
    /// Window of the sliding-window layers (`n_swa`); `None` when the model has none.
    pub window: Option<u32>,
    /// One entry per layer.
    pub layers: Vec<LayerSpec>,
    /// Rotations, shared by layers: see [`AttentionSpec::rope`].
    pub ropes: Vec<Rope>,
}

/// What may differ between layers.
#[derive(Clone, Debug)]
pub struct LayerSpec {
    /// What mixes the positions.
    pub mixer: Mixer,
    /// What follows, position by position.
    pub ffn: FeedForward,
}

/// What the readers of all kinds of layers start from.
pub(crate) struct Common<'g> {
    pub keys: Keys<'g>,
    pub arch: &'static Arch,
    pub n_layer: u32,
    pub n_embd: u32,
    pub n_ctx_train: u32,
}

impl Spec {
    /// Reads a model's numbers.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an architecture or variant that is not built, [`Error::Key`] for a missing or
    /// contradictory number.
    pub fn read(gguf: &Gguf) -> Result<Spec, Error> {
        let name = gguf.architecture()?;
        let arch = arch::find(name).ok_or_else(|| Error::Unsupported {
            what: format!("architecture {name:?}"),
            hint: format!("supported are {}", arch::all().map(|a| a.name).collect::<Vec<_>>().join(", ")),
        })?;
        let keys = Keys { gguf, arch: arch.name };
        let n_layer = keys.size("block_count", MAX_LAYERS)?;
        let n_embd = keys.size("embedding_length", MAX_WIDTH)?;
        let n_ctx_train = keys.size("context_length", u32::MAX)?;
        let common = Common { keys, arch, n_layer, n_embd, n_ctx_train };
        let keys = &common.keys;
        let eps = keys
            .f32("attention.layer_norm_rms_epsilon")?
            .ok_or_else(|| keys.wrong("attention.layer_norm_rms_epsilon", "no such key", "a small positive number"))?;
        if !(0.0..1.0).contains(&eps) {
            return Err(keys.wrong("attention.layer_norm_rms_epsilon", eps, "a number from 0 to 1"));
        }
        refuse_variants(keys, arch)?;

        let windows = window::read(&common)?;
        let windowed = |i: usize| windows.as_ref().is_some_and(|(_, layers)| layers[i]);
        let attention = AttentionSpec::read(&common, &windowed)?;
        let ffn = match arch.experts {
            Some(rule) => experts::read(&common, rule)?,
            None => DenseSpec::read(&common)?.into_iter().map(FeedForward::Dense).collect(),
        };
        let ropes = rotation::read(&common, attention[0].head_k as u32, windows.is_some())?;
        let layers = attention.into_iter().zip(ffn);
        let layers = layers.map(|(a, ffn)| LayerSpec { mixer: Mixer::Attention(a), ffn }).collect();
        Ok(Spec {
            arch,
            n_vocab: n_vocab(gguf, n_embd)?,
            n_embd: n_embd as usize,
            eps,
            n_ctx_train,
            window: windows.map(|(n, _)| n),
            layers,
            ropes,
        })
    }

    /// Layers.
    pub fn n_layer(&self) -> u32 {
        self.layers.len() as u32
    }
}

/// Entries of the vocabulary, by the embedding matrix.
fn n_vocab(gguf: &Gguf, n_embd: u32) -> Result<u32, Error> {
    let vocab = gguf.need_tensor("token_embd.weight")?;
    u32::try_from(vocab.ne[1]).ok().filter(|n| (1..=i32::MAX as u32).contains(n)).ok_or_else(|| Error::Tensor {
        name: "token_embd.weight".into(),
        found: format!("{:?}", vocab.shape()),
        wanted: format!("[{n_embd}, vocabulary], at most {} entries", i32::MAX),
    })
}

/// Metadata that changes the arithmetic in a way that is not built: better no answer than a wrong one.
fn refuse_variants(keys: &Keys<'_>, arch: &Arch) -> Result<(), Error> {
    if let Some(n) = keys.u32("expert_count")?.filter(|n| *n > 0 && arch.experts.is_none()) {
        return Err(keys.unsupported("expert_count", n, "models of this architecture have no experts"));
    }
    if keys.bool("attention.causal")? == Some(false) {
        return Err(keys.unsupported("attention.causal", false, "only causal models have a cache to hand over"));
    }
    let differ = "builds differ in whether they read it for this architecture";
    for key in ["rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"] {
        if let Some(v) = keys.f32(key)? {
            return Err(keys.unsupported(key, v, differ));
        }
    }
    for (key, default) in [("rope.scaling.yarn_beta_fast", 32.0), ("rope.scaling.yarn_beta_slow", 1.0)] {
        if let Some(v) = keys.f32(key)?.filter(|v| *v != default) {
            return Err(keys.unsupported(key, v, differ));
        }
    }
    Ok(())
}
