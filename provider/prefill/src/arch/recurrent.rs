//! Architectures with layers that carry a state along, most of them beside attention.

use super::dense::{BEFORE, LLAMA, SHARED};
use super::experts::{
    ALWAYS, ExpertRule, GRANITE_EXPERTS, JAMBA_EXPERTS, KIMI_EXPERTS, LFM2_EXPERTS, NEMOTRON_EXPERTS, SharedRule, Width,
};
use super::{
    Activation, Arch, AttnScale, FfnShape, Latent, Mrope, Multipliers, Nextn, Norms, Pairing, Presence, Recurrence,
    RecurrentLayers, RopeRule,
};

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
    nextn: Nextn::Apart,
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

/// The selective scan in heads as Mamba-2 itself has it.
const MAMBA2: Recurrence = Recurrence::Mamba2 { norm: Presence::Required };

const NEMOTRON_H: Arch = Arch {
    name: "nemotron_h",
    norms: SHARED,
    activation: Activation::ReluSquared,
    ffn: FfnShape::NoGate,
    rope_factors: false,
    rope: RopeRule::Never,
    recurrence: Some(MAMBA2),
    recurrent_layers: RecurrentLayers::OneHalf,
    examples: "Nemotron-H 4B-56B, Nemotron Nano 2 9B, 12B",
    ..LLAMA
};

const LFM2: Arch = Arch {
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
        name: "kimi-linear",
        qkv_bias: Presence::Never,
        other_bias: Presence::Never,
        rope_factors: false,
        partial_rope: true,
        rope: RopeRule::Never,
        latent: Latent::RowOneQuery,
        recurrence: Some(Recurrence::Kda),
        recurrent_layers: RecurrentLayers::WithoutKvHeads,
        experts: Some(&KIMI_EXPERTS),
        examples: "Kimi Linear 48B-A3B",
        ..LLAMA
    },
    LFM2,
    Arch { name: "lfm2moe", experts: Some(&LFM2_EXPERTS), examples: "LFM2 8B-A1B, 24B-A2B", ..LFM2 },
    Arch {
        name: "jamba",
        qkv_bias: Presence::Never,
        other_bias: Presence::Never,
        rope_factors: false,
        rope: RopeRule::Never,
        recurrence: Some(Recurrence::Mamba),
        recurrent_layers: RecurrentLayers::WithoutKvHeads,
        experts: Some(&JAMBA_EXPERTS),
        examples: "Jamba 1.5-1.7 Mini, Large, Jamba Reasoning 3B",
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
        recurrence: Some(MAMBA2),
        feed_forward: false,
        examples: "Mamba-2 130M-2.7B, Mamba-Codestral",
        ..LLAMA
    },
    Arch {
        name: "granitehybrid",
        multipliers: Multipliers::Keys,
        attn_scale: AttnScale::Key,
        rope: RopeRule::ByFinetuned,
        recurrence: Some(MAMBA2),
        recurrent_layers: RecurrentLayers::WithoutKvHeads,
        experts: Some(&GRANITE_EXPERTS),
        examples: "Granite 4.0 H 350M, 1B, Micro, Tiny, Small",
        ..LLAMA
    },
    NEMOTRON_H,
    Arch {
        name: "nemotron_h_moe",
        other_bias: Presence::Never,
        experts: Some(&NEMOTRON_EXPERTS),
        nextn: Nextn::Apart,
        examples: "Nemotron 3 Nano 30B-A3B, Super 120B-A12B",
        ..NEMOTRON_H
    },
    Arch {
        name: "falcon-h1",
        pairing: Pairing::Halves,
        // The graph leaves out the output's, though the loader takes it.
        other_bias: Presence::Never,
        rope_factors: false,
        recurrence: Some(Recurrence::Mamba2 { norm: Presence::Optional }),
        recurrent_layers: RecurrentLayers::BesideAttention,
        examples: "Falcon-H1 0.5B-34B",
        ..LLAMA
    },
];
