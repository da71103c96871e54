//! One model's numbers: read from its metadata, completed by llama.cpp's defaults, checked before anything is
//! allocated.

use crate::Error;
use crate::arch::{self, Arch};
use crate::rope::{Rope, yarn_attn_factor};
use gguf::Gguf;

/// llama.cpp's own limit (`LLAMA_MAX_LAYERS`).
const MAX_LAYERS: u32 = 512;
/// Beyond any model there is; keeps products of two sizes far from overflow.
const MAX_WIDTH: u32 = 1 << 20;

/// What is the same in every layer.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The architecture's table.
    pub arch: &'static Arch,
    /// Entries of the vocabulary.
    pub n_vocab: u32,
    /// Length of an embedding.
    pub n_embd: usize,
    /// Channels of one key head (and query head).
    pub head_k: usize,
    /// Channels of one value head.
    pub head_v: usize,
    /// Added to the mean square in RMS norms.
    pub eps: f32,
    /// Multiplies attention scores.
    pub attn_scale: f32,
    /// Context length the model was trained for.
    pub n_ctx_train: u32,
    /// Window of the sliding-window layers (`n_swa`); `None` when the model has none.
    pub window: Option<u32>,
    /// One entry per layer.
    pub layers: Vec<LayerSpec>,
    /// Rotations, shared by layers: see [`LayerSpec::rope`].
    pub ropes: Vec<Rope>,
}

/// What may differ between layers.
#[derive(Clone, Debug)]
pub struct LayerSpec {
    /// Query heads.
    pub n_head: usize,
    /// Key-value heads.
    pub n_head_kv: usize,
    /// Width of the feed-forward network.
    pub n_ff: usize,
    /// Whether the layer sees only the window.
    pub windowed: bool,
    /// Which of [`Spec::ropes`].
    pub rope: usize,
}

struct Keys<'g> {
    gguf: &'g Gguf,
    arch: &'static str,
}

impl Keys<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    fn wrong(&self, key: &str, found: impl ToString, wanted: impl ToString) -> Error {
        Error::Key { key: self.name(key), found: found.to_string(), wanted: wanted.to_string() }
    }

    fn u32(&self, key: &str) -> Result<Option<u32>, Error> {
        Ok(self.gguf.u32(&self.name(key))?)
    }

    fn f32(&self, key: &str) -> Result<Option<f32>, Error> {
        let value = self.gguf.f32(&self.name(key))?;
        match value {
            Some(v) if !v.is_finite() => Err(self.wrong(key, v, "a finite number")),
            other => Ok(other),
        }
    }

    /// A size that must be there.
    fn size(&self, key: &str, max: u32) -> Result<u32, Error> {
        let Some(value) = self.u32(key)? else {
            return Err(self.wrong(key, "no such key", format!("a number from 1 to {max}")));
        };
        self.in_range(key, value, max)
    }

    fn in_range(&self, key: &str, value: u32, max: u32) -> Result<u32, Error> {
        if (1..=max).contains(&value) {
            Ok(value)
        } else {
            Err(self.wrong(key, value, format!("a number from 1 to {max}")))
        }
    }

    /// One number for all layers, or an array with one for each.
    fn per_layer(&self, key: &str, n_layer: u32, max: u32) -> Result<Option<Vec<u32>>, Error> {
        match self.gguf.get(&self.name(key)) {
            None => Ok(None),
            Some(gguf::Value::Array(array)) => {
                if array.len() != n_layer as usize {
                    return Err(self.wrong(
                        key,
                        format!("{} entries", array.len()),
                        format!("{n_layer}, one per layer"),
                    ));
                }
                let mut all = Vec::new();
                for value in array.iter_u64()? {
                    let value = u32::try_from(value?).unwrap_or(u32::MAX);
                    all.push(self.in_range(key, value, max)?);
                }
                Ok(Some(all))
            }
            Some(_) => Ok(Some(vec![self.size(key, max)?; n_layer as usize])),
        }
    }
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
            hint: format!("supported are {}", arch::ALL.iter().map(|a| a.name).collect::<Vec<_>>().join(", ")),
        })?;
        let keys = Keys { gguf, arch: arch.name };
        let n_layer = keys.size("block_count", MAX_LAYERS)?;
        let n_embd = keys.size("embedding_length", MAX_WIDTH)?;
        let n_head = keys
            .per_layer("attention.head_count", n_layer, MAX_WIDTH)?
            .ok_or_else(|| keys.wrong("attention.head_count", "no such key", "the number of query heads"))?;
        let n_head_kv =
            keys.per_layer("attention.head_count_kv", n_layer, MAX_WIDTH)?.unwrap_or_else(|| n_head.clone());
        let n_ff = keys
            .per_layer("feed_forward_length", n_layer, MAX_WIDTH)?
            .ok_or_else(|| keys.wrong("feed_forward_length", "no such key", "the width of the feed-forward network"))?;
        let head = |key: &str| match keys.u32(key)? {
            Some(value) => keys.in_range(key, value, MAX_WIDTH),
            None if n_embd.is_multiple_of(n_head[0]) => Ok(n_embd / n_head[0]),
            None => Err(keys.wrong(
                key,
                "no such key",
                format!("it, since {n_embd} channels are no multiple of {} heads", n_head[0]),
            )),
        };
        let (head_k, head_v) = (head("attention.key_length")?, head("attention.value_length")?);
        if head_k != head_v {
            // llama.cpp asserts it for these architectures.
            return Err(keys.wrong("attention.value_length", head_v, format!("{head_k}, the key_length")));
        }
        for (h, kv) in n_head.iter().zip(&n_head_kv) {
            if !h.is_multiple_of(*kv) {
                return Err(keys.wrong("attention.head_count_kv", kv, format!("a divisor of {h} query heads")));
            }
        }
        let eps = keys
            .f32("attention.layer_norm_rms_epsilon")?
            .ok_or_else(|| keys.wrong("attention.layer_norm_rms_epsilon", "no such key", "a small positive number"))?;
        if !(0.0..1.0).contains(&eps) {
            return Err(keys.wrong("attention.layer_norm_rms_epsilon", eps, "a number from 0 to 1"));
        }
        let n_ctx_train = keys.size("context_length", u32::MAX)?;
        refuse_variants(&keys)?;

        let windows = windows(&keys, arch, n_layer)?;
        let (rope, window_rope) = ropes(&keys, arch, head_k, n_ctx_train, windows.is_some())?;
        let ropes = [Some(rope), window_rope].into_iter().flatten().collect();
        let layers = (0..n_layer as usize)
            .map(|i| {
                let windowed = windows.as_ref().is_some_and(|(_, layers)| layers[i]);
                LayerSpec {
                    n_head: n_head[i] as usize,
                    n_head_kv: n_head_kv[i] as usize,
                    n_ff: n_ff[i] as usize,
                    windowed,
                    rope: usize::from(windowed),
                }
            })
            .collect();
        let scaled = match arch.embd_scale_at_layers {
            Some(at) if at == n_layer => n_embd as f32 / n_head[0] as f32,
            _ => head_k as f32,
        };
        let vocab = gguf.need_tensor("token_embd.weight")?;
        let n_vocab =
            u32::try_from(vocab.ne[1]).ok().filter(|n| (1..=i32::MAX as u32).contains(n)).ok_or_else(|| {
                Error::Tensor {
                    name: "token_embd.weight".into(),
                    found: format!("{:?}", vocab.shape()),
                    wanted: format!("[{n_embd}, vocabulary], at most {} entries", i32::MAX),
                }
            })?;
        Ok(Spec {
            arch,
            n_vocab,
            n_embd: n_embd as usize,
            head_k: head_k as usize,
            head_v: head_v as usize,
            eps,
            attn_scale: 1.0 / scaled.sqrt(),
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

/// Metadata that changes the arithmetic in a way that is not built: better no answer than a wrong one.
fn refuse_variants(keys: &Keys<'_>) -> Result<(), Error> {
    let unsupported = |key: &str, found: String, hint: &str| {
        Err(Error::Unsupported { what: format!("{} = {found}", keys.name(key)), hint: hint.into() })
    };
    if let Some(n) = keys.u32("expert_count")?.filter(|n| *n > 0) {
        return unsupported("expert_count", n.to_string(), "mixtures of experts are not built yet");
    }
    if keys.gguf.bool(&keys.name("attention.causal"))? == Some(false) {
        return unsupported("attention.causal", "false".into(), "only causal models have a cache to hand over");
    }
    for key in ["rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"] {
        if let Some(v) = keys.f32(key)? {
            return unsupported(key, v.to_string(), "builds differ in whether they read it for this architecture");
        }
    }
    for (key, default) in [("rope.scaling.yarn_beta_fast", 32.0), ("rope.scaling.yarn_beta_slow", 1.0)] {
        if let Some(v) = keys.f32(key)?.filter(|v| *v != default) {
            return unsupported(key, v.to_string(), "builds differ in whether they read it for this architecture");
        }
    }
    Ok(())
}

/// The window and which layers have it.
fn windows(keys: &Keys<'_>, arch: &Arch, n_layer: u32) -> Result<Option<(u32, Vec<bool>)>, Error> {
    let Some(rule) = arch.window else { return Ok(None) };
    let Some(window) = keys.u32("attention.sliding_window")?.filter(|w| *w > 0) else { return Ok(None) };
    let key = "attention.sliding_window_pattern";
    let pattern = keys.gguf.get(&keys.name(key));
    let layers = match pattern {
        Some(gguf::Value::Array(array)) => {
            if array.len() != n_layer as usize {
                return Err(keys.wrong(key, format!("{} entries", array.len()), format!("{n_layer}, one per layer")));
            }
            match array.elem_type() {
                gguf::ValueType::Bool => array.iter_bool()?.collect::<Result<Vec<_>, _>>()?,
                _ => array.iter_i64()?.map(|v| v.map(|v| v != 0)).collect::<Result<Vec<_>, _>>()?,
            }
        }
        _ => {
            let period = keys.u32(key)?.unwrap_or(rule.period);
            (0..n_layer).map(|i| period == 0 || i % period < period - 1).collect()
        }
    };
    Ok(Some((window, layers)))
}

/// The rotation of full layers, and that of window layers where there are any.
fn ropes(
    keys: &Keys<'_>,
    arch: &Arch,
    head_k: u32,
    n_ctx_train: u32,
    windowed: bool,
) -> Result<(Rope, Option<Rope>), Error> {
    let n_rot = keys.u32("rope.dimension_count")?.unwrap_or(head_k);
    if n_rot != head_k && !arch.partial_rope {
        return Err(keys.wrong("rope.dimension_count", n_rot, format!("{head_k}, the size of a key head")));
    }
    if n_rot == 0 || n_rot > head_k {
        return Err(keys.wrong(
            "rope.dimension_count",
            n_rot,
            format!("a number from 2 to {head_k}, the size of a key head"),
        ));
    }
    if !n_rot.is_multiple_of(2) {
        return Err(keys.wrong("rope.dimension_count", n_rot, "an even number"));
    }
    let base = |key: &str, default: f32| {
        let value = keys.f32(key)?.unwrap_or(default);
        if value > 0.0 { Ok(value) } else { Err(keys.wrong(key, value, "a positive number")) }
    };
    let freq_base = base("rope.freq_base", 10000.0)?;
    let key = keys.name("rope.scaling.type");
    let scaling = keys.gguf.str(&key)?.unwrap_or("linear");
    if !["none", "linear", "yarn"].contains(&scaling) {
        return Err(Error::Unsupported {
            what: format!("{key} = {scaling:?}"),
            hint: "supported are none, linear, yarn, and rope_freqs.weight".into(),
        });
    }
    let factor = match keys.f32("rope.scaling.factor")? {
        Some(f) => f,
        None => keys.f32("rope.scale_linear")?.unwrap_or(0.0),
    };
    if factor < 0.0 {
        return Err(keys.wrong("rope.scaling.factor", factor, "a positive number"));
    }
    let freq_scale = if factor == 0.0 || scaling == "none" { 1.0 } else { 1.0 / factor };
    let ext_factor = if scaling == "yarn" { 1.0 } else { 0.0 };
    let attn_factor = keys.f32("rope.scaling.attn_factor")?.unwrap_or(1.0);
    let n_ctx_orig = keys.u32("rope.scaling.original_context_length")?.filter(|n| *n > 0).unwrap_or(n_ctx_train);
    let factors = match keys.gguf.tensor("rope_freqs.weight") {
        Some(t) if arch.rope_factors => {
            if t.n_elements() != u64::from(n_rot / 2) || t.ne[0] != t.n_elements() {
                return Err(Error::Tensor {
                    name: t.name.into(),
                    found: format!("{:?}", t.shape()),
                    wanted: format!("[{}], one factor for each pair of channels", n_rot / 2),
                });
            }
            let factors = t.to_f32()?;
            if let Some(i) = factors.iter().position(|f| !f.is_finite() || *f == 0.0) {
                return Err(Error::Tensor {
                    name: t.name.into(),
                    found: format!("{} at {i}", factors[i]),
                    wanted: "finite factors other than 0".into(),
                });
            }
            Some(factors)
        }
        _ => None,
    };
    let rope = Rope {
        n_rot: n_rot as usize,
        freq_base,
        freq_scale,
        factors,
        ext_factor,
        attn_factor: yarn_attn_factor(ext_factor, freq_scale, attn_factor),
        beta: (32.0, 1.0),
        n_ctx_orig,
    };
    let window_rope = match arch.window {
        Some(rule) if windowed => {
            let freq_base = base("rope.freq_base_swa", rule.rope_base)?;
            Some(Rope { freq_base, freq_scale: 1.0, ..rope.clone() })
        }
        _ => None,
    };
    Ok((rope, window_rope))
}
