//! One model's numbers: read from its metadata, completed by llama.cpp's defaults, checked before anything is
//! allocated.

mod keys;
mod recurrent;
mod rotation;
mod window;

pub(crate) use keys::{Keys, MAX_WIDTH};

use crate::Error;
use crate::arch::{
    self, Arch, Latent, Layout, Multipliers, Nextn, NormKind, Presence, Recurrence, SharedKv, TemperatureRule,
    WindowForm,
};
use crate::layer::altup::{ALTUP, AltUpSpec};
use crate::layer::attention::AttentionSpec;
use crate::layer::delta::DeltaSpec;
use crate::layer::dense::DenseSpec;
use crate::layer::experts;
use crate::layer::latent::LatentSpec;
use crate::layer::mamba::MambaSpec;
use crate::layer::per_layer::PerLayerSpec;
use crate::layer::shortconv::ShortConvSpec;
use crate::layer::{FeedForward, Mixer};
use crate::rope::Rope;
use gguf::Gguf;
use npu_kernels::host::attention::Window;

/// llama.cpp's own limit (`LLAMA_MAX_LAYERS`).
pub(crate) const MAX_LAYERS: u32 = 512;

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
    /// Multiplies embeddings.
    pub embedding_scale: f32,
    /// Multiplies what each half of a layer adds to the residual stream.
    pub residual_scale: f32,
    /// What makes queries grow with their position.
    pub temperature: Option<Temperature>,
    /// Whether cells carry the positions of several axes (M-RoPE).
    pub mrope: bool,
    /// Context length the model was trained for.
    pub n_ctx_train: u32,
    /// Window of the sliding-window layers (`n_swa`); `None` when the model has none.
    pub window: Option<u32>,
    /// One entry per layer.
    pub layers: Vec<LayerSpec>,
    /// Blocks after the layers that are never computed: they only predict more tokens, or have no keys and values of their own
    /// and come after all that have some.
    pub n_idle: u32,
    /// A second embedding with a part for each layer.
    pub per_layer: Option<PerLayerSpec>,
    /// Several residual streams.
    pub altup: Option<AltUpSpec>,
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
    /// What that reads.
    pub ffn_input: FfnInput,
    /// What it leaves behind is multiplied by a number.
    pub scaled: bool,
}

/// What a layer's feed-forward network reads.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum FfnInput {
    /// The residual stream, with the mixer's output in it.
    AfterMixer,
    /// The residual stream as the mixer found it.
    BesideMixer,
    /// What the mixer read, as it was normed for that.
    Shared,
}

/// Queries at position p are multiplied by `1 + scale * ln(1 + floor((p + offset) / floor))`.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Temperature {
    /// How fast.
    pub scale: f32,
    /// Positions before anything changes.
    pub floor: u32,
    /// Added to positions.
    pub offset: u32,
    /// Only in layers without RoPE.
    pub without_rope: bool,
}

impl Temperature {
    /// What queries at a position are multiplied by.
    pub(crate) fn of(&self, position: usize) -> f32 {
        let steps = ((position + self.offset as usize) as f32 / self.floor as f32).floor();
        ((f64::from(steps) + 1.0).ln() * f64::from(self.scale) + 1.0) as f32
    }
}

/// What the readers of all kinds of layers start from.
pub(crate) struct Common<'g> {
    pub keys: Keys<'g>,
    pub arch: &'static Arch,
    /// Layers, without the blocks that only predict more tokens.
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
        let mut keys = Keys { gguf, arch: arch.name, n_block: 0 };
        keys.n_block = keys.size("block_count", MAX_LAYERS)?;
        let n_nextn = nextn(&keys, arch)?;
        let n_layer = keys.n_block - n_nextn;
        let n_embd = keys.size("embedding_length", MAX_WIDTH)?;
        let n_ctx_train = keys.size("context_length", u32::MAX)?;
        let common = Common { keys, arch, n_layer, n_embd, n_ctx_train };
        let keys = &common.keys;
        let eps_key = match arch.norm {
            NormKind::Rms => "attention.layer_norm_rms_epsilon",
            NormKind::Layer => "attention.layer_norm_epsilon",
        };
        let eps = arch.eps.map_or_else(|| keys.f32(eps_key), |eps| Ok(Some(eps)))?;
        let eps = eps.ok_or_else(|| keys.wrong(eps_key, "no such key", "a small positive number"))?;
        if !(0.0..1.0).contains(&eps) {
            return Err(keys.wrong(eps_key, eps, "a number from 0 to 1"));
        }
        refuse_variants(keys, arch)?;

        let windows = window::read(&common)?;
        let windowed = |i: usize| windows.as_ref().is_some_and(|(_, layers)| layers[i]);
        let n_vocab = n_vocab(gguf, n_embd)?;
        let ffn: Vec<FeedForward> = match arch.experts {
            _ if !arch.feed_forward => vec![FeedForward::None; n_layer as usize],
            Some(rule) => experts::read(&common, rule, n_vocab)?,
            None => DenseSpec::read(&common)?.into_iter().map(FeedForward::from_dense).collect(),
        };
        let mrope = rotation::sections(&common)?;
        let mixes = recurrent::read(&common)?;
        let attends: Vec<bool> = mixes.iter().map(|l| l.attends).collect();
        let (mixers, ropes) = if matches!(arch.latent, Latent::Row | Latent::RowOneQuery) {
            let row = keys.size("attention.key_length", MAX_WIDTH)?;
            let mut ropes = rotation::read(&common, row, None, mrope)?;
            let all = LatentSpec::read(&common, n_vocab, ropes.first_mut(), &attends)?;
            (mixers(&common, &mixes, all.into_iter().map(Mixer::Latent).collect())?, ropes)
        } else {
            let mut attention = Vec::new();
            if attends.contains(&true) {
                attention = AttentionSpec::read(&common, windows.is_some(), &windowed, &attends)?;
            }
            let mixers = mixers(&common, &mixes, attention.into_iter().map(Mixer::Attention).collect())?;
            let first = |windowed: bool| {
                let mut all = mixers.iter().filter_map(Mixer::attention);
                all.find(|a| a.windowed == windowed).map(|a| a.head_k as u32)
            };
            let ropes = match (first(false), first(true)) {
                (None, None) => Vec::new(),
                (full, window) => {
                    let head = full.or(window).unwrap_or(0);
                    rotation::read(&common, head, windows.is_some().then(|| window.unwrap_or(head)), mrope)?
                }
            };
            (mixers, ropes)
        };
        let layer = |(i, (mixer, ffn)): (usize, (Mixer, FeedForward))| {
            let scale = keys.gguf.tensor(&format!("blk.{i}.layer_output_scale.weight"));
            let scaled = arch.out_scale != Presence::Never && scale.is_some();
            Ok(LayerSpec { mixer, ffn, ffn_input: ffn_input(&common, i)?, scaled })
        };
        let mut layers = mixers.into_iter().zip(ffn).enumerate().map(layer).collect::<Result<Vec<_>, Error>>()?;
        let n_shared = shared_kv(&common)?;
        layers.truncate((n_layer - n_shared) as usize);
        let (embedding_scale, residual_scale) = multipliers(&common)?;
        Ok(Spec {
            arch,
            n_vocab,
            n_embd: n_embd as usize,
            eps,
            embedding_scale,
            residual_scale,
            temperature: temperature(&common)?,
            mrope: mrope.is_some(),
            n_ctx_train,
            window: windows.map(|(n, _)| n),
            layers,
            n_idle: n_nextn + n_shared,
            per_layer: PerLayerSpec::read(&common)?,
            altup: arch.altup.then_some(ALTUP),
            ropes,
        })
    }

    /// What windowed layers see.
    pub(crate) fn window_of_rows(&self) -> Option<Window> {
        let n = self.window? as usize;
        Some(match self.arch.window.map(|rule| rule.form) {
            Some(WindowForm::Chunks(_)) => Window::Chunk(n),
            _ => Window::Last(n),
        })
    }

    /// Layers.
    pub fn n_layer(&self) -> u32 {
        self.layers.len() as u32
    }

    /// The last layer that the decoder's memory has a part for: what comes after that is never computed.
    pub fn last_layer(&self) -> usize {
        self.layers.iter().rposition(|l| !matches!(l.mixer, Mixer::Linear | Mixer::None)).unwrap_or(0)
    }
}

/// What mixes the positions of each layer, those of `attention` in the layers that attend.
fn mixers(common: &Common<'_>, layers: &[recurrent::Mixes], attention: Vec<Mixer>) -> Result<Vec<Mixer>, Error> {
    let mut state = None;
    if let Some(kind) = common.arch.recurrence.filter(|_| layers.iter().any(|l| l.recurrent)) {
        state = Some(match kind {
            Recurrence::DeltaNet { .. } | Recurrence::Kda => Mixer::Delta(DeltaSpec::read(common)?),
            Recurrence::ShortConv => Mixer::ShortConv(ShortConvSpec::read(common)?),
            Recurrence::Mamba | Recurrence::Mamba2 { .. } => Mixer::Mamba(MambaSpec::read(common)?),
        });
    }
    let mixer = |(i, of): (usize, &recurrent::Mixes)| {
        let attention = attention.get(i).filter(|_| of.attends);
        match (attention, state.as_ref().filter(|_| of.recurrent)) {
            (None, None) if of.linear => Mixer::Linear,
            (None, None) => Mixer::None,
            (Some(one), None) | (None, Some(one)) => one.clone(),
            (Some(Mixer::Attention(a)), Some(Mixer::Mamba(s))) => Mixer::Beside(a.clone(), s.clone()),
            (Some(_), Some(_)) => unreachable!("no architecture has another state beside attention in one layer"),
        }
    };
    Ok(layers.iter().enumerate().map(mixer).collect())
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

/// What layer `i`'s feed-forward network reads.
fn ffn_input(common: &Common<'_>, i: usize) -> Result<FfnInput, Error> {
    let Common { keys, arch, .. } = common;
    let has = |what: &str| keys.gguf.tensor(&format!("blk.{i}.{what}.weight")).is_some();
    Ok(match arch.layout {
        Layout::Serial => FfnInput::AfterMixer,
        Layout::Parallel => FfnInput::Shared,
        Layout::ParallelWithoutNorm if has("ffn_norm") => FfnInput::AfterMixer,
        Layout::ParallelWithoutNorm => FfnInput::Shared,
        Layout::SecondNorm if has("attn_norm_2") => FfnInput::BesideMixer,
        Layout::SecondNorm => FfnInput::Shared,
        Layout::ByKey => {
            let key = "use_parallel_residual";
            let parallel = keys.bool(key)?.ok_or_else(|| keys.wrong(key, "no such key", "true or false"))?;
            if parallel { FfnInput::BesideMixer } else { FfnInput::AfterMixer }
        }
    })
}

/// Of embeddings and of what the halves of a layer add.
fn multipliers(common: &Common<'_>) -> Result<(f32, f32), Error> {
    let Common { keys, arch, n_layer, n_embd, .. } = common;
    let (embedding, residual) = match arch.multipliers {
        Multipliers::None if arch.scaled_embedding => return Ok(((*n_embd as f32).sqrt(), 1.0)),
        Multipliers::None => return Ok((1.0, 1.0)),
        Multipliers::Keys => (1.0, 1.0),
        Multipliers::MiniCpm => (12.0, 1.4 / (*n_layer as f32).sqrt()),
        Multipliers::MiniCpm3 => return Ok((12.0, 1.4 / (*n_layer as f32).sqrt())),
        Multipliers::Grok => (78.383_67, 1.0),
    };
    // llama.cpp takes 0 for "none".
    let read = |key: &str, default: f32| -> Result<f32, Error> {
        Ok(match keys.f32(key)? {
            None => default,
            Some(0.0) => 1.0,
            Some(v) => v,
        })
    };
    let residual = if arch.multipliers == Multipliers::Grok { 1.0 } else { read("residual_scale", residual)? };
    Ok((read("embedding_scale", embedding)?, residual))
}

/// How many blocks behind the layers only predict more tokens.
fn nextn(keys: &Keys<'_>, arch: &Arch) -> Result<u32, Error> {
    let key = "nextn_predict_layers";
    match keys.u32(key)?.unwrap_or(0) {
        0 => Ok(0),
        n if arch.nextn == Nextn::Never => {
            Err(keys.unsupported(key, n, "servers have no such layers in models of this architecture"))
        }
        n if n >= keys.n_block => Err(keys.wrong(key, n, format!("fewer than the {} of block_count", keys.n_block))),
        n => Ok(n),
    }
}

/// How many of the layers, the last ones, have no keys and values of their own.
fn shared_kv(common: &Common<'_>) -> Result<u32, Error> {
    let Common { keys, arch, n_layer, .. } = common;
    match arch.shared_kv {
        SharedKv::None => Ok(0),
        SharedKv::From(first) => Ok(n_layer.saturating_sub(first)),
        SharedKv::Key => {
            let key = "attention.shared_kv_layers";
            let shared = keys.u32(key)?.unwrap_or(0);
            // Those that have some are at least one with a window and one without, by llama.cpp's own rule.
            match n_layer.checked_sub(shared) {
                Some(2..) => Ok(shared),
                _ => Err(keys.wrong(
                    key,
                    shared,
                    format!("at most {}, two fewer than layers", n_layer.saturating_sub(2)),
                )),
            }
        }
    }
}

/// Queries that grow with their position.
fn temperature(common: &Common<'_>) -> Result<Option<Temperature>, Error> {
    let Common { keys, arch, n_ctx_train, .. } = common;
    match arch.temperature {
        TemperatureRule::No => return Ok(None),
        TemperatureRule::WithoutRope => {
            return Ok(Some(Temperature { scale: 0.1, floor: 8192, offset: 1, without_rope: true }));
        }
        TemperatureRule::Key | TemperatureRule::Length => {}
    }
    let scale = keys.f32("attention.temperature_scale")?.filter(|s| *s != 0.0);
    let Some(scale) = scale else { return Ok(None) };
    let floor = if arch.temperature == TemperatureRule::Length {
        keys.size("attention.temperature_length", u32::MAX)?
    } else {
        let key = "rope.scaling.original_context_length";
        keys.in_range(key, keys.u32(key)?.unwrap_or(*n_ctx_train), u32::MAX)?
    };
    Ok(Some(Temperature { scale, floor, offset: 0, without_rope: false }))
}

/// Metadata that changes the arithmetic in a way that is not built: better no answer than a wrong one.
fn refuse_variants(keys: &Keys<'_>, arch: &Arch) -> Result<(), Error> {
    if let Some(n) = keys.u32("expert_count")?.filter(|n| *n > 0 && arch.experts.is_none()) {
        return Err(keys.unsupported("expert_count", n, "models of this architecture have no experts"));
    }
    if keys.bool("attention.causal")? == Some(false) {
        return Err(keys.unsupported("attention.causal", false, "only causal models have a cache to hand over"));
    }
    let scaling = keys.gguf.str(&keys.name("rope.scaling.type"))?;
    let differ = "builds differ in whether they read it for this architecture";
    for key in ["rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"] {
        // Grok's converter writes what holds without the keys.
        let usual = arch.multipliers == Multipliers::Grok && scaling == Some("yarn");
        if let Some(v) = keys.f32(key)?.filter(|v| !usual || *v != 1.0) {
            return Err(keys.unsupported(key, v, differ));
        }
    }
    let betas = [
        ("rope.scaling.yarn_beta_fast", 32.0),
        ("rope.scaling.yarn_beta_slow", 1.0),
        ("rope.scaling.yarn_log_multiplier", 0.0),
    ];
    // The multiplier of latent attention is read with its scale.
    let read =
        |key: &str| arch.yarn_keys || matches!(arch.latent, Latent::Row) && key == "rope.scaling.yarn_log_multiplier";
    for (key, default) in betas.into_iter().filter(|(key, _)| !read(key)) {
        if let Some(v) = keys.f32(key)?.filter(|v| *v != default) {
            return Err(keys.unsupported(key, v, differ));
        }
    }
    if let Some(n) = keys.u32("num_loops")?.filter(|n| *n > 1) {
        return Err(keys.unsupported("num_loops", n, "layers that are gone through several times are not built yet"));
    }
    if let Some(v) = keys.f32("rope.scaling.alpha")?.filter(|v| *v != 0.0) {
        return Err(keys.unsupported("rope.scaling.alpha", v, "builds differ in whether they read it"));
    }
    Ok(())
}
