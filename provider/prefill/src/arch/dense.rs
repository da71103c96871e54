//! Architectures of attention and plain feed-forward networks.

use super::experts::{GEMMA4_EXPERTS, LLAMA_EXPERTS};
use super::{
    Activation, Alibi, Arch, AttnScale, FfnShape, Latent, Layout, Mrope, Multipliers, Nextn, NormKind, Norms, Over,
    Pairing, PerLayer, Presence, QkNorm, RecurrentLayers, RopeRule, SharedKv, TemperatureRule, WindowRope, WindowRule,
};

/// Norms before both halves.
pub(super) const BEFORE: Norms = Norms { mixer: Some("attn_norm"), ffn: Some("ffn_norm"), weights: true };
/// One norm that both halves share.
pub(super) const SHARED: Norms = Norms { ffn: None, ..BEFORE };
/// Norms after the halves only.
pub(super) const AFTER: Norms = Norms { mixer: None, ffn: None, weights: true };
/// Norms after the halves.
pub(super) const POST_NORMS: [&str; 2] = ["post_attention_norm", "post_ffw_norm"];
/// RMS norms of heads, before RoPE.
pub(super) const HEAD_NORM: QkNorm = QkNorm { over: Over::Head, kind: NormKind::Rms, after_rope: false };

pub(super) const LLAMA: Arch = Arch {
    name: "llama",
    pairing: Pairing::Interleaved,
    norm: NormKind::Rms,
    norms: BEFORE,
    rms_bias: Presence::Never,
    eps: None,
    layout: Layout::Serial,
    qkv_bias: Presence::Optional,
    other_bias: Presence::Optional,
    qk_norm: Presence::Never,
    qk_norm_rule: HEAD_NORM,
    plain_qk_norm: None,
    post_norms: None,
    scaled_embedding: false,
    embedding_norm: false,
    positions: Presence::Never,
    multipliers: Multipliers::None,
    activation: Activation::Silu,
    ffn: FfnShape::Gated,
    half_ff: false,
    window: None,
    rope_factors: true,
    long_factors: false,
    partial_rope: false,
    rope: RopeRule::All,
    mrope: Mrope::None,
    attn_scale: AttnScale::Head,
    never_flash: false,
    softcap: None,
    alibi: Alibi::None,
    clamp: false,
    value_norm: false,
    keys_as_values: false,
    shared_kv: SharedKv::None,
    per_layer: PerLayer::None,
    altup: false,
    sparse_gates: None,
    out_scale: Presence::Never,
    temperature: TemperatureRule::No,
    yarn_keys: false,
    yarn_beta_fast: 32.0,
    sinks: false,
    latent: Latent::No,
    experts: None,
    output_norm: "output_norm",
    gated_query: false,
    attn_gate: false,
    recurrence: None,
    recurrent_layers: RecurrentLayers::All,
    feed_forward: true,
    lone_halves: false,
    nextn: Nextn::Never,
    examples: "Llama 1-3.x, Mistral 7B, SmolLM2, TinyLlama",
};

/// Halves that llama.cpp pairs as NeoX did.
const NEOX: Arch = Arch { pairing: Pairing::Halves, rope_factors: false, ..LLAMA };

/// What came with GPT-2: norms with biases, no gate, GELU.
const GPT: Arch = Arch {
    pairing: Pairing::Halves,
    norm: NormKind::Layer,
    activation: Activation::Gelu,
    ffn: FfnShape::NoGate,
    rope_factors: false,
    ..LLAMA
};

/// The same, positions being anything but RoPE.
const GPT_NO_ROPE: Arch = Arch { rope: RopeRule::Never, partial_rope: true, ..GPT };

const GEMMA3: Arch = Arch {
    name: "gemma3",
    qkv_bias: Presence::Never,
    other_bias: Presence::Never,
    qk_norm: Presence::Required,
    post_norms: Some(POST_NORMS),
    scaled_embedding: true,
    activation: Activation::Gelu,
    window: Some(WindowRule { period: 6, rope: WindowRope::Own(10000.0), ..WindowRule::USUAL }),
    partial_rope: true,
    attn_scale: AttnScale::EmbdAtLayers(62),
    examples: "Gemma 3 270M-27B, text",
    ..NEOX
};

/// The rows.
pub(super) const TABLE: &[Arch] = &[
    Arch { experts: Some(&LLAMA_EXPERTS), examples: "Llama 1-3.x, Mistral 7B, Mixtral, SmolLM2, TinyLlama", ..LLAMA },
    Arch {
        name: "deci",
        lone_halves: true,
        examples: "Llama-3.x-Nemotron 51B, Super 49B, Ultra 253B, DeciLM 7B",
        ..LLAMA
    },
    Arch {
        name: "mistral3",
        long_factors: true,
        temperature: TemperatureRule::Key,
        yarn_keys: true,
        examples: "Ministral 3, Mistral Small 3.x, Devstral",
        ..LLAMA
    },
    Arch {
        name: "minicpm3",
        qkv_bias: Presence::Never,
        other_bias: Presence::Never,
        multipliers: Multipliers::MiniCpm3,
        partial_rope: true,
        long_factors: true,
        latent: Latent::Heads,
        examples: "MiniCPM3 4B",
        ..NEOX
    },
    Arch { name: "qwen2", other_bias: Presence::Never, examples: "Qwen2, Qwen2.5, Qwen2.5-Coder", ..NEOX },
    Arch {
        name: "qwen2vl",
        mrope: Mrope::Always,
        // No build reads the key for this architecture, so it stays 0 there.
        eps: Some(0.0),
        examples: "Qwen2-VL, Qwen2.5-VL, text",
        ..NEOX
    },
    Arch {
        name: "qwen3",
        other_bias: Presence::Never,
        qk_norm: Presence::Required,
        examples: "Qwen3 0.6B-32B",
        ..NEOX
    },
    Arch {
        name: "qwen3vl",
        qk_norm: Presence::Required,
        mrope: Mrope::Interleaved,
        examples: "Qwen3-VL 2B-32B, text",
        ..NEOX
    },
    Arch {
        name: "gemma",
        scaled_embedding: true,
        activation: Activation::Gelu,
        partial_rope: true,
        examples: "Gemma 1, CodeGemma",
        ..NEOX
    },
    Arch {
        name: "gemma2",
        post_norms: Some(POST_NORMS),
        scaled_embedding: true,
        activation: Activation::Gelu,
        window: Some(WindowRule { period: 2, default: Some(4096), ..WindowRule::USUAL }),
        partial_rope: true,
        attn_scale: AttnScale::EmbdAtLayers(46),
        softcap: Some(50.0),
        examples: "Gemma 2 2B-27B",
        ..NEOX
    },
    GEMMA3,
    Arch {
        name: "gemma4",
        window: Some(WindowRule { period: 0, rope: WindowRope::OwnHeads(10000.0), ..WindowRule::USUAL }),
        rope_factors: true,
        attn_scale: AttnScale::One,
        value_norm: true,
        keys_as_values: true,
        shared_kv: SharedKv::Key,
        per_layer: PerLayer::Key,
        out_scale: Presence::Optional,
        experts: Some(&GEMMA4_EXPERTS),
        examples: "Gemma 4 E2B, E4B, 26B-A4B, 31B, text",
        ..GEMMA3
    },
    Arch {
        name: "gemma3n",
        window: Some(WindowRule { period: 5, rope: WindowRope::Own(10000.0), ..WindowRule::USUAL }),
        attn_scale: AttnScale::One,
        value_norm: true,
        shared_kv: SharedKv::From(20),
        per_layer: PerLayer::Wide(256),
        altup: true,
        // The quantile of a normal distribution below which 95 % lie.
        sparse_gates: Some((10, 1.644_853_6)),
        examples: "Gemma 3n E2B, E4B, text",
        ..GEMMA3
    },
    Arch {
        name: "phi2",
        norms: SHARED,
        layout: Layout::Parallel,
        partial_rope: true,
        examples: "Phi-1, Phi-1.5, Phi-2",
        ..GPT
    },
    Arch {
        name: "phi3",
        ffn: FfnShape::Fused,
        long_factors: true,
        partial_rope: true,
        examples: "Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
        ..NEOX
    },
    Arch {
        name: "olmo",
        norm: NormKind::Layer,
        norms: Norms { weights: false, ..BEFORE },
        clamp: true,
        rope_factors: false,
        examples: "OLMo 1B, 7B",
        ..LLAMA
    },
    Arch {
        name: "olmo2",
        norms: AFTER,
        post_norms: Some(POST_NORMS),
        qk_norm: Presence::Required,
        qk_norm_rule: QkNorm { over: Over::Row, ..HEAD_NORM },
        window: Some(WindowRule { period: 4, rope: WindowRope::Unscaled, ..WindowRule::USUAL }),
        examples: "OLMo 2, OLMo 3",
        ..NEOX
    },
    Arch {
        name: "command-r",
        norm: NormKind::Layer,
        norms: SHARED,
        layout: Layout::Parallel,
        qk_norm: Presence::Optional,
        qk_norm_rule: QkNorm { over: Over::EachHead, kind: NormKind::Layer, after_rope: false },
        rope_factors: false,
        partial_rope: true,
        examples: "Command R, Command R+, Aya",
        ..LLAMA
    },
    Arch {
        name: "cohere2",
        norm: NormKind::Layer,
        norms: SHARED,
        layout: Layout::Parallel,
        window: Some(WindowRule { period: 4, rope: WindowRope::Shared, ..WindowRule::USUAL }),
        rope: RopeRule::Windowed,
        rope_factors: false,
        partial_rope: true,
        examples: "Command R7B, Command A, Aya Expanse 2",
        ..LLAMA
    },
    Arch { name: "exaone", rope_factors: true, examples: "EXAONE 3.0, 3.5", ..NEOX },
    Arch {
        name: "exaone4",
        norms: AFTER,
        post_norms: Some(POST_NORMS),
        qk_norm: Presence::Required,
        window: Some(WindowRule {
            period: 4,
            default: Some(4096),
            only_at_layers: Some(64),
            rope: WindowRope::Shared,
            ..WindowRule::USUAL
        }),
        rope: RopeRule::Windowed,
        rope_factors: true,
        nextn: Nextn::ApartFromV3,
        examples: "EXAONE 4.0 1.2B, 32B",
        ..NEOX
    },
    Arch {
        name: "glm4",
        post_norms: Some(POST_NORMS),
        ffn: FfnShape::Fused,
        mrope: Mrope::Sections,
        rope_factors: false,
        partial_rope: true,
        nextn: Nextn::ApartFromV3,
        examples: "GLM-4-0414 9B, 32B, GLM-Z1",
        ..LLAMA
    },
    Arch {
        name: "chatglm",
        ffn: FfnShape::Fused,
        rope_factors: false,
        partial_rope: true,
        examples: "ChatGLM3, GLM-4 9B Chat, GLM-Edge",
        ..LLAMA
    },
    Arch {
        name: "granite",
        multipliers: Multipliers::Keys,
        attn_scale: AttnScale::Key,
        rope: RopeRule::ByFinetuned,
        long_factors: true,
        examples: "Granite 3.x, Granite 4.0 Micro",
        ..LLAMA
    },
    Arch {
        name: "minicpm",
        multipliers: Multipliers::MiniCpm,
        long_factors: true,
        examples: "MiniCPM, MiniCPM4",
        ..LLAMA
    },
    Arch { name: "internlm2", rope_factors: false, examples: "InternLM2, InternLM2.5, InternLM3", ..LLAMA },
    Arch { name: "starcoder2", examples: "StarCoder2 3B-15B", ..GPT },
    Arch { name: "starcoder", positions: Presence::Required, examples: "StarCoder, SantaCoder", ..GPT_NO_ROPE },
    Arch { name: "smollm3", rope: RopeRule::NotEvery(4), rope_factors: false, examples: "SmolLM3 3B", ..LLAMA },
    Arch { name: "falcon", norms: SHARED, layout: Layout::SecondNorm, examples: "Falcon 7B, 40B", ..GPT },
    Arch { name: "gptneox", layout: Layout::ByKey, partial_rope: true, examples: "GPT-NeoX 20B, Pythia", ..GPT },
    Arch { name: "gpt2", positions: Presence::Required, examples: "GPT-2", ..GPT_NO_ROPE },
    Arch { name: "bloom", alibi: Alibi::Fixed(8.0), embedding_norm: true, examples: "BLOOM, BLOOMZ", ..GPT_NO_ROPE },
    Arch {
        name: "mpt",
        positions: Presence::Optional,
        alibi: Alibi::Key,
        clamp: true,
        qk_norm: Presence::Optional,
        qk_norm_rule: QkNorm { over: Over::Row, kind: NormKind::Layer, after_rope: false },
        examples: "MPT 7B, 30B, Replit Code",
        ..GPT_NO_ROPE
    },
    Arch {
        name: "stablelm",
        norm: NormKind::Layer,
        layout: Layout::ParallelWithoutNorm,
        qk_norm: Presence::Optional,
        qk_norm_rule: QkNorm { over: Over::EachHead, kind: NormKind::Layer, after_rope: false },
        partial_rope: true,
        examples: "StableLM 2 1.6B, 12B, StableLM Zephyr",
        ..NEOX
    },
    Arch { name: "nemotron", activation: Activation::ReluSquared, examples: "Nemotron 3 8B, Minitron 4B, 8B", ..GPT },
    Arch {
        name: "hunyuan-dense",
        qk_norm: Presence::Required,
        qk_norm_rule: QkNorm { after_rope: true, ..HEAD_NORM },
        examples: "Hunyuan 0.5B-7B",
        ..NEOX
    },
    Arch {
        name: "hunyuan_vl",
        qk_norm: Presence::Required,
        qk_norm_rule: QkNorm { after_rope: true, ..HEAD_NORM },
        mrope: Mrope::Sections,
        examples: "HunyuanOCR, text",
        ..NEOX
    },
    Arch {
        name: "apertus",
        qk_norm: Presence::Required,
        activation: Activation::Xielu,
        ffn: FfnShape::NoGate,
        rope_factors: true,
        long_factors: true,
        examples: "Apertus 8B, 70B",
        ..NEOX
    },
    Arch {
        name: "seed_oss",
        norms: Norms { ffn: Some("post_attention_norm"), ..BEFORE },
        examples: "Seed-OSS 36B",
        ..NEOX
    },
    Arch {
        name: "baichuan",
        alibi: Alibi::AtLayers(40),
        rope: RopeRule::NotAtLayers(40),
        rope_factors: false,
        examples: "Baichuan 7B, 13B, Baichuan2",
        ..LLAMA
    },
    Arch { name: "nanbeige", examples: "Nanbeige4 3B", ..LLAMA },
    Arch { name: "xverse", rope_factors: false, examples: "XVERSE 7B-65B", ..LLAMA },
    Arch { name: "orion", norm: NormKind::Layer, examples: "Orion 14B", ..NEOX },
    Arch { name: "qwen", half_ff: true, partial_rope: true, examples: "Qwen 1.8B-72B (the first)", ..NEOX },
    Arch {
        name: "refact",
        alibi: Alibi::Fixed(8.0),
        rope: RopeRule::Never,
        partial_rope: true,
        examples: "Refact 1.6B",
        ..LLAMA
    },
    Arch { name: "codeshell", examples: "CodeShell 7B", ..GPT },
    Arch { name: "plamo", norms: SHARED, layout: Layout::Parallel, examples: "PLaMo 13B", ..NEOX },
    Arch {
        name: "jais",
        norm: NormKind::Layer,
        rope: RopeRule::Never,
        partial_rope: true,
        alibi: Alibi::Key,
        attn_scale: AttnScale::Inverse,
        examples: "Jais 13B, 30B",
        ..NEOX
    },
    Arch { name: "jais2", activation: Activation::ReluSquared, examples: "Jais 2 8B, 70B", ..GPT },
    Arch { name: "ernie4_5", rope_factors: false, examples: "ERNIE 4.5 0.3B", ..LLAMA },
    Arch { name: "paddleocr", mrope: Mrope::Always, examples: "PaddleOCR-VL, text", ..NEOX },
    Arch {
        name: "arcee",
        activation: Activation::ReluSquared,
        ffn: FfnShape::NoGate,
        examples: "Arcee AFM 4.5B",
        ..LLAMA
    },
    Arch { name: "openelm", qk_norm: Presence::Required, partial_rope: true, examples: "OpenELM 270M-3B", ..NEOX },
    Arch {
        name: "maincoder",
        qk_norm: Presence::Required,
        qk_norm_rule: QkNorm { after_rope: true, ..HEAD_NORM },
        rope_factors: false,
        examples: "Maincoder 1B",
        ..LLAMA
    },
    Arch {
        name: "plamo3",
        post_norms: Some(POST_NORMS),
        qk_norm: Presence::Required,
        ffn: FfnShape::Fused,
        window: Some(WindowRule { period: 8, rope: WindowRope::Own(10000.0), ..WindowRule::USUAL }),
        partial_rope: true,
        examples: "PLaMo 3 2B-31B",
        ..NEOX
    },
    Arch { name: "pangu-embedded", examples: "openPangu-Embedded 1B, 7B", ..NEOX },
];
