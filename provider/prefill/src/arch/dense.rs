//! Architectures of attention and plain feed-forward networks.

use super::experts::LLAMA_EXPERTS;
use super::{Activation, Arch, Pairing, Presence, WindowRule};

pub(super) const LLAMA: Arch = Arch {
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
    sinks: false,
    ffn_norm: "ffn_norm",
    experts: None,
    examples: "Llama 1-3.x, Mistral 7B, SmolLM2, TinyLlama",
};

/// The rows.
pub(super) const TABLE: &[Arch] = &[
    Arch { experts: Some(&LLAMA_EXPERTS), examples: "Llama 1-3.x, Mistral 7B, Mixtral, SmolLM2, TinyLlama", ..LLAMA },
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
        window: Some(WindowRule { period: 6, rope_base: Some(10000.0) }),
        rope_factors: false,
        partial_rope: true,
        embd_scale_at_layers: Some(62),
        sinks: false,
        ffn_norm: "ffn_norm",
        experts: None,
        examples: "Gemma 3 270M-27B, text",
    },
];
