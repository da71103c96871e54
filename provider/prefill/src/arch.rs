//! Architectures as tables: what differs between model families, in numbers and flags.
//!
//! Source of every entry: llama.cpp's `src/models/<name>.cpp` (graph and tensors), `src/llama-model.cpp`
//! (hyper-parameters, rope type). To add one, add a row; if it needs a flag that is not here, add the flag and teach
//! [`crate::Spec`], [`crate::weights`] and the plan about it.

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
    /// Models that users know it by.
    pub examples: &'static str,
}

/// How an architecture places its sliding-window layers.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct WindowRule {
    /// Every n-th layer sees everything, the others a window; where the file does not say.
    pub period: u32,
    /// RoPE base of the window layers where the file does not say; they are never scaled.
    pub rope_base: f32,
}

const LLAMA: Arch = Arch {
    name: "llama",
    pairing: Pairing::Interleaved,
    qkv_bias: Presence::Optional,
    other_bias: Presence::Optional,
    qk_norm: Presence::Never,
    post_norms: false,
    scaled_embedding: false,
    activation: Activation::Silu,
    window: None,
    rope_factors: true,
    partial_rope: false,
    embd_scale_at_layers: None,
    examples: "Llama 1-3.x, Mistral 7B, SmolLM2, TinyLlama",
};

/// Every supported architecture.
pub const ALL: &[Arch] = &[
    LLAMA,
    Arch {
        name: "qwen2",
        pairing: Pairing::Halves,
        other_bias: Presence::Never,
        rope_factors: false,
        examples: "Qwen2, Qwen2.5, Qwen2.5-Coder",
        ..LLAMA
    },
    Arch {
        name: "qwen3",
        pairing: Pairing::Halves,
        other_bias: Presence::Never,
        qk_norm: Presence::Required,
        rope_factors: false,
        examples: "Qwen3 0.6B-32B",
        ..LLAMA
    },
    Arch {
        name: "gemma3",
        pairing: Pairing::Halves,
        qkv_bias: Presence::Never,
        other_bias: Presence::Never,
        qk_norm: Presence::Required,
        post_norms: true,
        scaled_embedding: true,
        activation: Activation::Gelu,
        window: Some(WindowRule { period: 6, rope_base: 10000.0 }),
        rope_factors: false,
        partial_rope: true,
        embd_scale_at_layers: Some(62),
        examples: "Gemma 3 270M-27B, text",
    },
];

/// The architecture called `name`.
pub fn find(name: &str) -> Option<&'static Arch> {
    ALL.iter().find(|a| a.name == name)
}
