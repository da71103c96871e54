//! Architectures with layers that carry a state along, most of them beside attention.

use super::dense::{BEFORE, LLAMA};
use super::experts::{ALWAYS, ExpertRule, SharedRule, Width};
use super::{Arch, Mrope, Norms, Pairing, Presence, Recurrence, RecurrentLayers, RopeRule};

const QWEN35: Arch = Arch {
    name: "qwen35",
    pairing: Pairing::Halves,
    qkv_bias: Presence::Never,
    other_bias: Presence::Never,
    qk_norm: Presence::Required,
    norms: Norms { ffn: Some("post_attention_norm"), ..BEFORE },
    rope_factors: false,
    partial_rope: true,
    mrope: Mrope::Interleaved,
    gated_query: true,
    recurrence: Some(Recurrence::DeltaNet { interleaved: false }),
    recurrent_layers: RecurrentLayers::Interval,
    nextn: true,
    examples: "Qwen3.5, text",
    ..LLAMA
};

/// Experts and one for all positions, which has a router of its own.
const SHARED_EXPERT: ExpertRule = ExpertRule {
    width: Width::Own { or_share: true },
    shared: SharedRule::WidthOrPlain,
    shared_mix: true,
    fused: true,
    ..ALWAYS
};

/// The rows.
pub(super) const TABLE: &[Arch] = &[
    QWEN35,
    Arch { name: "qwen35moe", experts: Some(&SHARED_EXPERT), examples: "Qwen3.5 35B-A3B and larger, text", ..QWEN35 },
    Arch {
        name: "qwen3next",
        mrope: Mrope::None,
        recurrence: Some(Recurrence::DeltaNet { interleaved: true }),
        experts: Some(&SHARED_EXPERT),
        examples: "Qwen3-Next 80B-A3B",
        ..QWEN35
    },
    Arch {
        name: "lfm2",
        pairing: Pairing::Halves,
        qkv_bias: Presence::Never,
        other_bias: Presence::Never,
        qk_norm: Presence::Required,
        output_norm: "token_embd_norm",
        rope_factors: false,
        recurrence: Some(Recurrence::ShortConv),
        recurrent_layers: RecurrentLayers::WithoutKvHeads,
        examples: "LFM2 230M-2.6B",
        ..LLAMA
    },
    Arch {
        name: "jamba",
        qkv_bias: Presence::Never,
        other_bias: Presence::Never,
        rope_factors: false,
        rope: RopeRule::Never,
        recurrence: Some(Recurrence::Mamba),
        recurrent_layers: RecurrentLayers::WithoutKvHeads,
        examples: "Jamba Reasoning 3B, without experts",
        ..LLAMA
    },
    Arch {
        name: "mamba",
        rope: RopeRule::Never,
        rope_factors: false,
        recurrence: Some(Recurrence::Mamba),
        feed_forward: false,
        examples: "Mamba 130M-2.8B, Falcon-Mamba",
        ..LLAMA
    },
    Arch {
        name: "mamba2",
        rope: RopeRule::Never,
        rope_factors: false,
        recurrence: Some(Recurrence::Mamba2),
        feed_forward: false,
        examples: "Mamba-2 130M-2.7B, Mamba-Codestral",
        ..LLAMA
    },
];
