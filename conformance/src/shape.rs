//! What of a model decides the shape of a decoder's memory: layers, heads, windows, recurrent state. Read from the model's keys alone.

use anyhow::{Context as _, Result, ensure};
use gguf::Gguf;
use kvlayout::{CacheType, KvSection, KvSpec, LayerKv, LayerRec, ParseError, RecSection, State};

/// The shape of a model's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// `general.architecture`.
    pub arch: String,
    /// Size of the vocabulary.
    pub n_vocab: u32,
    /// Key/value heads of each layer.
    pub heads_kv: Vec<usize>,
    /// Whether cells carry the positions of several axes.
    pub cell_ext: bool,
    /// Channels of a key head.
    pub head_k: usize,
    /// Channels of a value head.
    pub head_v: usize,
    /// Channels of a head, key or value, in layers that see only the window.
    pub head_sliding: [usize; 2],
    /// The sliding window, if the model has one.
    pub window: Option<usize>,
    /// Per layer: it sees only the window. Layers that read other layers' keys and values have no place here.
    pub sliding: Vec<bool>,
    /// Per layer: whether it attends.
    pub attends: Vec<bool>,
    /// Per layer: the numbers in its convolution's history and in its state, where it is recurrent.
    pub recurrent: Vec<Option<(usize, usize)>>,
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

/// Architectures that have layers with a window: the window where the file does not say, and the period of layers without.
/// From llama.cpp's `src/models/*.cpp`.
fn window_rule(arch: &str, n_layer: usize) -> Option<(Option<usize>, usize)> {
    match arch {
        "gemma2" => Some((Some(4096), 2)),
        "gemma3" => Some((None, 6)),
        // The file says it layer by layer.
        "gemma4" => Some((None, 0)),
        "gemma3n" => Some((None, 5)),
        "gpt-oss" => Some((None, 2)),
        "mellum" | "smallthinker" | "afmoe" => Some((None, 4)),
        "exaone-moe" => Some((Some(128), 4)),
        // Chunks.
        "llama4" => Some((Some(8192), 4)),
        "olmo2" | "cohere2" => Some((None, 4)),
        "plamo3" => Some((None, 8)),
        "exaone4" if n_layer == 64 => Some((Some(4096), 4)),
        _ => None,
    }
}

impl Shape {
    /// Reads it from a model.
    pub fn of(model: &Gguf) -> Result<Shape> {
        let arch = model.str("general.architecture")?.context("no general.architecture")?.to_owned();
        let key = |k: &str| format!("{arch}.{k}");
        let number = |k: &str| -> Result<Option<usize>> { Ok(model.u32(&key(k))?.map(|n| n as usize)) };
        let need = |k: &str| number(k)?.with_context(|| format!("no {}", key(k)));
        let need_key = |k: &str| model.get(&key(k)).map(drop).with_context(|| format!("no {}", key(k)));
        let (n_embd, n_block) = (need("embedding_length")?, need("block_count")?);
        // Blocks that only predict more tokens have no place in the memory.
        let n_layer = n_block - number("nextn_predict_layers")?.unwrap_or(0).min(n_block);
        let per_layer = |k: &str, default: usize| -> Result<Vec<usize>> {
            match model.get(&key(k)) {
                Some(gguf::Value::Array(a)) => {
                    ensure!(a.len() == n_block, "{} has {} entries for {n_block} blocks", key(k), a.len());
                    a.iter_u64()?.take(n_layer).map(|v| Ok(usize::try_from(v?)?)).collect()
                }
                _ => Ok(vec![number(k)?.unwrap_or(default); n_layer]),
            }
        };
        need_key("attention.head_count")?;
        let heads = per_layer("attention.head_count", 0)?;
        // Those of the first layer are what sizes of heads come from.
        let n_head = *heads.first().context("no layers")?;
        let mut heads_kv = match model.get(&key("attention.head_count_kv")) {
            Some(_) => per_layer("attention.head_count_kv", 0)?,
            None => heads,
        };
        let head_k = number("attention.key_length")?.unwrap_or(n_embd.checked_div(n_head).unwrap_or(0));
        // Latent attention keeps one row that is key and value at once: there is no V.
        let latent = number("attention.key_length_mla")?.is_some_and(|n| n > 0);
        let width = number("attention.value_length")?.unwrap_or(n_embd.checked_div(n_head).unwrap_or(0));
        let head_v = if latent { 0 } else { width };
        let rule = window_rule(&arch, n_layer);
        let window = match rule {
            Some((default, _)) => number("attention.sliding_window")?.or(default).filter(|&n| n > 0),
            None => None,
        };
        // Whatever it says.
        let window = window.map(|n| if arch == "smallthinker" { 4096 } else { n });
        let pattern = key("attention.sliding_window_pattern");
        let mut sliding = match (model.get(&pattern), window) {
            (_, None) => vec![false; n_layer],
            (Some(gguf::Value::Array(a)), _) if a.elem_type() == gguf::ValueType::Bool => {
                // Those of blocks that only predict may be left out.
                ensure!(
                    [n_layer, n_block].contains(&a.len()),
                    "{pattern} has {} entries for {n_layer} layers",
                    a.len()
                );
                a.iter_bool()?.take(n_layer).collect::<Result<_, _>>()?
            }
            (value, _) => {
                let period = value.and_then(|v| v.as_integer()).map(|n| n as usize);
                let period = period.or(rule.map(|(_, period)| period)).unwrap_or(0);
                let full = if arch == "smallthinker" { 0 } else { period.saturating_sub(1) };
                (0..n_layer).map(|il| period == 0 || il % period != full).collect()
            }
        };
        let several = match model.get(&key("rope.dimension_sections")) {
            Some(gguf::Value::Array(a)) => a.iter_i64()?.take(2).all(|v| v.is_ok_and(|v| v > 0)),
            _ => false,
        };
        let cell_ext = match arch.as_str() {
            "qwen2vl" | "paddleocr" | "qwen3vl" | "qwen3vlmoe" | "qwen35" | "qwen35moe" => true,
            "glm4" | "hunyuan_vl" => several,
            _ => false,
        };
        // By the tensors: what a layer consists of cannot be told from a key alone for all architectures.
        let rows = |il: usize, name: &str, axis: usize| -> Option<usize> {
            model.tensor(&format!("blk.{il}.{name}")).map(|t| t.ne[axis] as usize)
        };
        let state = |il: usize| -> Result<Option<(usize, usize)>> {
            if let (Some(taps), Some(channels)) = (rows(il, "ssm_conv1d.weight", 0), rows(il, "ssm_conv1d.weight", 1)) {
                return Ok(Some(((taps - 1) * channels, need("ssm.state_size")? * need("ssm.inner_size")?)));
            }
            if let (Some(taps), Some(channels)) =
                (rows(il, "ssm_conv1d_q.weight", 0), rows(il, "ssm_conv1d_q.weight", 2))
            {
                return Ok(Some((3 * (taps - 1) * channels, channels * need("kda.head_dim")?)));
            }
            Ok(rows(il, "shortconv.conv.weight", 0).map(|taps| ((taps - 1) * n_embd, 0)))
        };
        let mut recurrent = (0..n_layer).map(state).collect::<Result<Vec<_>>>()?;
        // Every kind of attention ends in it, and nothing else has it but Kimi's delta net.
        let attending =
            |il| rows(il, "attn_output.weight", 0).is_some() && rows(il, "ssm_conv1d_q.weight", 0).is_none();
        // Servers keep a place for every layer of Deci's models, whatever it has.
        let mut attends: Vec<bool> = (0..n_layer).map(|il| arch == "deci" || attending(il)).collect();
        let head_sliding = [("attention.key_length_swa", head_k), ("attention.value_length_swa", head_v)];
        let [k, v] = head_sliding.map(|(key, full)| number(key).map(|n| n.unwrap_or(full)));
        let head_sliding = [k?, v?];
        // The last layers may have nothing of their own in the memory.
        let shared = number("attention.shared_kv_layers")?.unwrap_or(0);
        let own = match arch.as_str() {
            // Whatever the file says.
            "gemma3n" => n_layer.min(20),
            _ => n_layer.checked_sub(shared).context("more layers share keys and values than there are")?,
        };
        sliding.truncate(own);
        heads_kv.truncate(own);
        recurrent.truncate(own);
        attends.truncate(own);
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
            heads_kv,
            cell_ext,
            head_k,
            head_v,
            head_sliding,
            window,
            sliding,
            attends,
            recurrent,
            weights,
        })
    }

    /// Takes a state file of this model apart.
    pub fn parse(&self, bytes: &[u8]) -> Result<State, ParseError> {
        // A model without attention has no values either.
        let attends = self.attends.contains(&true);
        if attends && self.head_v == 0 { State::parse_latent(bytes) } else { State::parse(bytes) }
    }

    /// The decoder's memory for this model and these options.
    pub fn kv_spec(&self, o: &CacheOptions) -> KvSpec {
        let layer = |il: usize| {
            let [k, v] = self.head(self.sliding[il]);
            let heads = self.heads_kv[il];
            LayerKv { layer: il as u32, n_embd_k: (heads * k) as u32, n_embd_v: (heads * v) as u32 }
        };
        let pick = |sliding: bool| self.attending(sliding).map(layer).collect();
        // By llama.cpp's rule: keys in the largest power of two times 64 that divides a head, values in 64, quantised caches only.
        let widest = |head: usize| (6..16).map(|i| 1 << i).take_while(|n| head.is_multiple_of(*n)).last().unwrap_or(0);
        let n_rot = |sliding: bool| {
            let [k, v] = self.head(sliding);
            // Whether there is rotation at all depends on the first layer, whichever cache it is in.
            let first = self.head(self.sliding.first() == Some(&true)).map(|head| head.is_multiple_of(64));
            let keys = if o.type_k.is_quantised() && first[0] { widest(k) } else { 0 };
            let values = if o.type_v.is_quantised() && first[1] { widest(v).min(64) } else { 0 };
            (keys as u32, values as u32)
        };
        let mut sections = vec![KvSection { layers: pick(false), window: None, n_rot: n_rot(false) }];
        if self.attending(false).chain(self.attending(true)).next().is_none() {
            sections.clear();
        }
        if let Some(window) = self.window {
            sections.push(KvSection { layers: pick(true), window: Some(window as u32), n_rot: n_rot(true) });
        }
        let rec = |il: usize| {
            let (r, s) = self.recurrent[il]?;
            Some(LayerRec { layer: il as u32, n_embd_r: r as u32, n_embd_s: s as u32 })
        };
        let layers: Vec<LayerRec> = (0..self.recurrent.len()).filter_map(rec).collect();
        let recurrent = (!layers.is_empty()).then_some(RecSection { n_layer: self.recurrent.len() as u32, layers });
        KvSpec {
            sections,
            recurrent,
            type_k: o.type_k,
            type_v: o.type_v,
            // Servers run Grok without flash attention, whatever they are told.
            v_trans: !o.flash_attn || self.arch == "grok",
            cell_ext: self.cell_ext,
            swa_full: o.swa_full,
            n_stream: o.n_stream,
        }
    }

    /// Channels of a key head and of a value head.
    fn head(&self, sliding: bool) -> [usize; 2] {
        if sliding { self.head_sliding } else { [self.head_k, self.head_v] }
    }

    /// The model layer of a section's n-th layer.
    pub fn model_layer(&self, section: usize, index: usize) -> Option<usize> {
        let attends = self.attends.contains(&true);
        match (section, self.window) {
            (0, _) if attends => self.attending(false).nth(index),
            (1, Some(_)) => self.attending(true).nth(index),
            _ => (0..self.recurrent.len()).filter(|&il| self.recurrent[il].is_some()).nth(index),
        }
    }

    /// The layers that attend, to everything or to the window.
    fn attending(&self, sliding: bool) -> impl Iterator<Item = usize> {
        (0..self.sliding.len()).filter(move |&il| self.sliding[il] == sliding && self.attends[il])
    }
}
