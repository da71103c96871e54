//! The words both halves of the crate use: versions, sections, layers and parts. Plain data, no bytes.

use crate::CacheType;
use std::fmt;
use std::str::FromStr;

/// The version of a sequence-state file (`LLAMA_STATE_SEQ_VERSION`): a server reads exactly its own and refuses the
/// others.
///
/// What differs, for attention caches: 3 has a third word (the token id) in the cell extension of M-RoPE models, 4 has
/// in addition the two rotation widths after the layer count of every section. Nothing about a model tells the version;
/// it is a property of the running server.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum StateVersion {
    /// llama.cpp builds up to about 10635.
    V2,
    /// Builds of about 10644 to 11401.
    V3,
    /// Builds from about 11434.
    V4,
}

/// A state version this crate does not know.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("state version {0} is not known: this program reads and writes 2, 3 and 4")]
pub struct UnsupportedVersion(pub String);

impl StateVersion {
    /// All versions, oldest first.
    pub const ALL: [StateVersion; 3] = [StateVersion::V2, StateVersion::V3, StateVersion::V4];

    /// The number in the file.
    pub fn number(self) -> u32 {
        match self {
            StateVersion::V2 => 2,
            StateVersion::V3 => 3,
            StateVersion::V4 => 4,
        }
    }

    /// Whether servers that write this version may read a checkpoint behind a state. To one that does not, it is bytes behind the end,
    /// which it ignores.
    pub fn has_checkpoints(self) -> bool {
        self >= StateVersion::V4
    }
}

impl TryFrom<u32> for StateVersion {
    type Error = UnsupportedVersion;
    fn try_from(n: u32) -> Result<Self, UnsupportedVersion> {
        Self::ALL.into_iter().find(|v| v.number() == n).ok_or_else(|| UnsupportedVersion(n.to_string()))
    }
}

impl FromStr for StateVersion {
    type Err = UnsupportedVersion;
    fn from_str(s: &str) -> Result<Self, UnsupportedVersion> {
        Self::ALL.into_iter().find(|v| v.number().to_string() == s).ok_or_else(|| UnsupportedVersion(format!("{s:?}")))
    }
}

impl fmt::Display for StateVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number().fmt(f)
    }
}

/// One layer of a cache section.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct LayerKv {
    /// Index of the layer in the *model* (the file does not hold it, only the order).
    pub layer: u32,
    /// Width of a key row: KV heads × key head size (`n_embd_k_gqa`).
    pub n_embd_k: u32,
    /// Width of a value row: KV heads × value head size (`n_embd_v_gqa`). 0 in all layers of a section: its key rows are
    /// the values too (MLA), and there is no V.
    pub n_embd_v: u32,
}

/// One cache of the decoder's memory: layers that keep the same positions.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct KvSection {
    /// The layers in it, by ascending model index.
    pub layers: Vec<LayerKv>,
    /// The sliding window (`n_swa`) of its layers; `None` = they see everything. A section with window *w* holds the
    /// last *w* + 1 positions: one more than the server itself saves, because with only *w* a restored prompt is
    /// computed anew.
    pub window: Option<u32>,
    /// Widths in which K and V rows are rotated ([`hadamard`](crate::hadamard)), 0 = not. Files of version 4 say so and servers
    /// refuse others than their own; before, nobody knows. [`rotation_widths`](crate::rotation_widths) has the usual ones.
    pub n_rot: (u32, u32),
}

impl LayerKv {
    /// Whether the layer has neither keys nor values, and a place in the memory all the same: servers keep one for every layer of
    /// some models, though not all attend (Deci's). Only behind a layer that has some.
    pub fn is_empty(&self) -> bool {
        self.n_embd_k == 0 && self.n_embd_v == 0
    }
}

/// One layer of a recurrent memory. Both rows are f32.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct LayerRec {
    /// Index of the layer in the *model*.
    pub layer: u32,
    /// Numbers of the convolution's history (`n_embd_r`): earlier inputs × channels, a channel's inputs side by side, the
    /// oldest first.
    pub n_embd_r: u32,
    /// Numbers of the state (`n_embd_s`). 0 in models that have a history only (LFM2); the file has a row of no bytes then.
    pub n_embd_s: u32,
}

/// The recurrent memory of a decoder: one cell for the sequence, which is the state after its last token.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct RecSection {
    /// Layers of the *model*, those without recurrent state included: it is in the file.
    pub n_layer: u32,
    /// The layers that have state, by ascending model index.
    pub layers: Vec<LayerRec>,
}

impl KvSection {
    /// Whether there is no V: latent attention, whose key rows are the values too.
    pub fn k_only(&self) -> bool {
        !self.layers.is_empty() && self.layers.iter().all(|l| l.n_embd_v == 0)
    }
}

/// Everything about a decoder's memory that decides the bytes of its state, apart from version and tokens.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct KvSpec {
    /// The attention sections in file order: one for most models, full attention then sliding window for those that have
    /// both, none for models without attention.
    pub sections: Vec<KvSection>,
    /// The recurrent section, which stands after all attention sections; `None` for models without such state.
    pub recurrent: Option<RecSection>,
    /// Type of the K cache (`-ctk`).
    pub type_k: CacheType,
    /// Type of the V cache (`-ctv`).
    pub type_v: CacheType,
    /// V is stored transposed, channel by channel: the decoder runs without flash attention.
    pub v_trans: bool,
    /// Every cell carries an extension (M-RoPE models): x and y, and from version 3 the token id.
    pub cell_ext: bool,
    /// The decoder runs with `--swa-full`: window sections hold all positions.
    pub swa_full: bool,
    /// Number of streams of the decoder's caches: 1, or its number of slots when their memory is not unified.
    pub n_stream: u32,
}

/// Which of a layer's tensors is meant.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Part {
    /// Attention keys, after RoPE.
    K,
    /// Attention values.
    V,
    /// Recurrent convolution history, as of after the last position.
    R,
    /// Recurrent state, likewise.
    S,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::K => "K",
            Part::V => "V",
            Part::R => "R",
            Part::S => "S",
        })
    }
}

/// How a tensor's elements follow each other.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Order {
    /// One row of all channels per position.
    Rows,
    /// One row of all positions per channel (V without flash attention).
    Transposed,
}
