//! Architectures as tables: what differs between model families, in numbers and flags.
//!
//! Source of every entry: llama.cpp's `src/models/<name>.cpp` (graph and tensors), `src/llama-model.cpp`
//! (hyper-parameters, rope type). To add one, add a row to the table of its kind; if it needs a flag that is not here, add
//! the flag and teach [`crate::spec`] and the kinds of layers ([`crate::layer`]) about it.

mod dense;
pub mod experts;

pub use npu_kernels::host::rowops::Pairing;

/// Whether an optional part is there.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Presence {
    /// Refused when the file has it.
    Never,
    /// Used when the file has it.
    Optional,
    /// Refused when the file lacks it.
    Required,
}

/// What the gate of the feed-forward network goes through.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Activation {
    /// x * sigmoid(x).
    Silu,
    /// GELU, tanh form.
    Gelu,
}

/// One architecture.
#[derive(Debug)]
pub struct Arch {
    /// `general.architecture`.
    pub name: &'static str,
    /// Which channels RoPE turns together.
    pub pairing: Pairing,
    /// Biases of the query, key and value projections.
    pub qkv_bias: Presence,
    /// Biases of the attention output and the feed-forward projections.
    pub other_bias: Presence,
    /// RMS norm of each query and key head before RoPE.
    pub qk_norm: Presence,
    /// Norms after attention and after the feed-forward network, before each is added to the residual.
    pub post_norms: bool,
    /// Embeddings are multiplied by the square root of their length.
    pub scaled_embedding: bool,
    /// The gate's activation.
    pub activation: Activation,
    /// Sliding-window layers, where the file has a window.
    pub window: Option<WindowRule>,
    /// `rope_freqs.weight` divides the frequencies.
    pub rope_factors: bool,
    /// RoPE may turn only the first channels of a head. llama.cpp's graphs of the others assert that it turns all.
    pub partial_rope: bool,
    /// The attention scale is 1/sqrt(n_embd / n_head) instead of 1/sqrt(head size) in models of this many layers.
    pub embd_scale_at_layers: Option<u32>,
    /// Each head has a sink: a score that joins the softmax and has no value.
    pub sinks: bool,
    /// The norm before the feed-forward network, by its tensor's name.
    pub ffn_norm: &'static str,
    /// What its mixtures of experts are like, where it may have them.
    pub experts: Option<&'static experts::ExpertRule>,
    /// Models that users know it by.
    pub examples: &'static str,
}

/// How an architecture places its sliding-window layers.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct WindowRule {
    /// Every n-th layer sees everything, the others a window; where the file does not say.
    pub period: u32,
    /// RoPE base of the window layers where the file does not say, and they are never scaled; or the base and the scale
    /// of the others.
    pub rope_base: Option<f32>,
}

/// Every supported architecture, in tables by what their layers are made of.
pub const TABLES: &[&[Arch]] = &[dense::TABLE, experts::TABLE];

/// Every supported architecture.
pub fn all() -> impl Iterator<Item = &'static Arch> {
    TABLES.iter().copied().flatten()
}

/// The architecture called `name`.
pub fn find(name: &str) -> Option<&'static Arch> {
    all().find(|a| a.name == name)
}
