//! A model, ready to run: its numbers and its tensors, and what the decoder's memory for it looks like.

use crate::arch::{Nextn, RecurrentLayers};
use crate::layer::Mixer;
use crate::layer::attention::AttentionSpec;
use crate::spec::Spec;
use crate::weights::Weights;
use crate::{Error, KvSink};
use gguf::Gguf;
use kvlayout::{CacheType, KvSection, KvSpec, LayerKv, LayerRec, Part, RecSection, StateVersion};

/// A model over a mapped file.
#[derive(Debug)]
pub struct Model<'g> {
    spec: Spec,
    weights: Weights<'g>,
}

/// How the decoder was started, as far as its memory depends on it.
#[derive(Copy, Clone, Debug)]
pub struct CacheParams {
    /// `-ctk`.
    pub type_k: CacheType,
    /// `-ctv`.
    pub type_v: CacheType,
    /// V is transposed: flash attention is off.
    pub v_trans: bool,
    /// It rotates the rows of quantised caches, as builds since April 2026 do unless told otherwise.
    pub attn_rot: bool,
    /// `--swa-full`.
    pub swa_full: bool,
    /// Streams of the cache: the number of slots without a unified cache, else 1.
    pub n_stream: u32,
    /// The decoder's context size, where known.
    pub n_ctx: Option<u32>,
}

impl<'g> Model<'g> {
    /// Reads and checks a model. Touches metadata and the small tensors only.
    ///
    /// # Errors
    /// What is wrong with the file, or what it has that is not supported.
    pub fn load(gguf: &'g Gguf) -> Result<Model<'g>, Error> {
        let spec = Spec::read(gguf)?;
        let weights = Weights::load(gguf, &spec)?;
        Ok(Model { spec, weights })
    }

    /// The model's numbers.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The model's tensors.
    pub fn weights(&self) -> &Weights<'g> {
        &self.weights
    }

    /// Entries of the vocabulary.
    pub fn n_vocab(&self) -> u32 {
        self.spec.n_vocab
    }

    /// Whether the decoder's context size decides what is computed, and is known.
    pub(crate) fn check_context(&self, n_ctx: Option<u32>) -> Result<(), Error> {
        match self.spec.ropes.iter().all(|r| r.factors.of(n_ctx).is_some()) {
            true => Ok(()),
            false => Err(Error::Unsupported {
                what: "a model with rope_factors_long.weight without the decoder's context size".into(),
                hint: "the decoder chooses its rotations by it; say what it was started with (-c, --ctx-size)".into(),
            }),
        }
    }

    /// Whether servers whose state files have this version keep what is known here of the model.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when they do not.
    pub fn check_version(&self, version: StateVersion) -> Result<(), Error> {
        let Spec { arch, n_idle, .. } = &self.spec;
        if arch.nextn == Nextn::ApartFromV3 && *n_idle > 0 && version < StateVersion::V3 {
            return Err(Error::Unsupported {
                what: format!("{}.nextn_predict_layers = {n_idle} for a state file of version {version}", arch.name),
                hint: "servers of that version keep rows for blocks that only predict; later ones do not".into(),
            });
        }
        Ok(())
    }

    /// The decoder's memory for this model.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the context size decides and is not known, and for a quantised cache of heads that are no whole
    /// number of blocks, which no server has; models whose memory is not known are refused when loaded.
    pub fn kv_spec(&self, params: &CacheParams) -> Result<KvSpec, Error> {
        self.check_context(params.n_ctx)?;
        let attention = || (0u32..).zip(&self.spec.layers).filter_map(|(i, l)| Some((i, l.mixer.attention()?)));
        let heads = || attention().map(|(_, a)| a);
        let part = |part: char, ty: CacheType, head: &dyn Fn(&AttentionSpec) -> usize| {
            let block = ty.block_elems();
            match heads().map(head).find(|head| !(*head as u64).is_multiple_of(block)) {
                None => Ok(()),
                Some(head) => Err(Error::Unsupported {
                    what: format!("a {part} cache of {ty} for heads of {head} channels"),
                    hint: format!("its blocks have {block}, and llama.cpp wants whole ones; use f16, bf16 or f32"),
                }),
            }
        };
        part('K', params.type_k, &|a| a.head_k)?;
        part('V', params.type_v, &|a| a.head_v)?;
        if crate::layer::latent::layers(&self.spec).next().is_some()
            && let Some(ty) = [params.type_k, params.type_v].into_iter().find(|ty| ty.block_elems() > 1)
        {
            return Err(Error::Unsupported {
                what: format!("a cache of {ty} for latent attention"),
                hint: "how servers turn rows that are key and value at once is not built; use f16, bf16 or f32".into(),
            });
        }
        let widths = |mixer: &Mixer| match mixer {
            Mixer::Attention(a) | Mixer::Beside(a, _) => Some((a.windowed, a.n_embd_k(), a.n_embd_v())),
            // The row is key and value at once: there is no V.
            Mixer::Latent(a) => Some((false, a.row(), 0)),
            // Servers keep a place for every layer of these.
            Mixer::Linear | Mixer::None if self.spec.arch.lone_halves => Some((false, 0, 0)),
            _ => None,
        };
        let all = || (0u32..).zip(&self.spec.layers).filter_map(|(i, l)| Some((i, widths(&l.mixer)?)));
        let pick = |windowed: bool| KvSection {
            layers: all()
                .filter(|(_, (w, ..))| *w == windowed)
                .map(|(layer, (_, k, v))| LayerKv { layer, n_embd_k: k as u32, n_embd_v: v as u32 })
                .collect(),
            window: self.spec.window.filter(|_| windowed),
            n_rot: rotation(&self.spec, windowed, params.type_k, params.type_v, params.attn_rot),
        };
        // A model with a window has two caches even where the pattern leaves one of them without layers.
        let mut sections = if self.spec.window.is_some() { vec![pick(false), pick(true)] } else { vec![pick(false)] };
        let layers = (0u32..).zip(&self.spec.layers).filter_map(|(layer, l)| {
            let (r, s) = l.mixer.recurrent(&self.spec)?;
            Some(LayerRec { layer, n_embd_r: r as u32, n_embd_s: s as u32 })
        });
        // A model of this kind has the memory even where none of its layers uses it.
        let recurrent =
            self.spec.arch.recurrence.map(|_| RecSection { n_layer: self.spec.n_layer(), layers: layers.collect() });
        // One that has recurrent layers only, by its kind, has no attention cache.
        if self.spec.arch.recurrence.is_some() && self.spec.arch.recurrent_layers == RecurrentLayers::All {
            sections.clear();
        }
        Ok(KvSpec {
            sections,
            recurrent,
            type_k: params.type_k,
            type_v: params.type_v,
            v_trans: params.v_trans || self.spec.arch.never_flash,
            cell_ext: self.spec.mrope,
            swa_full: params.swa_full,
            n_stream: params.n_stream,
        })
    }
}

/// The widths in which keys and values of the cache of layers with or without a window are rotated before they are stored; 0 where
/// they are not. A cache is rotated only where the heads of all its layers have one size, and only where those of the model's first
/// layer, which may be in the other cache, are whole multiples of 64 (`llama_kv_cache`'s constructor asks about that one).
pub(crate) fn rotation(
    spec: &Spec,
    windowed: bool,
    type_k: CacheType,
    type_v: CacheType,
    attn_rot: bool,
) -> (u32, u32) {
    let one = |head: &dyn Fn(&AttentionSpec) -> usize| {
        let mut all = crate::layer::attention::layers(spec).filter(|a| a.windowed == windowed).map(head);
        let first = all.next().unwrap_or(0);
        let asked = crate::layer::attention::layers(spec).next().map_or(0, head);
        if asked.is_multiple_of(64) && all.all(|h| h == first) { first as u32 } else { 0 }
    };
    let (k, v) = kvlayout::rotation_widths(one(&|a| a.head_k), one(&|a| a.head_v));
    let width = |n, ty: CacheType| if attn_rot && ty.is_quantised() { n } else { 0 };
    (width(k, type_k), width(v, type_v))
}

/// Whether a sink takes a layer's keys or values at all.
pub(crate) fn wanted(sink: &dyn KvSink, layer: u32) -> bool {
    [Part::K, Part::V].into_iter().any(|part| !sink.wants(layer, part).is_empty())
}
