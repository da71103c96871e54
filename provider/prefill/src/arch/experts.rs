//! Architectures with mixtures of experts, and what may differ between the mixtures.
//!
//! Source of every rule: `load_arch_hparams` (keys and their defaults), `load_arch_tensors` (tensors and their shapes) and
//! the arguments of `build_moe_ffn` in llama.cpp's `src/models/<name>.cpp`.

use super::dense::{BEFORE, HEAD_NORM, LLAMA, POST_NORMS};
use super::{
    Activation, Arch, AttnScale, Latent, Mrope, Multipliers, Nextn, NormKind, Norms, Over, Pairing, Presence, QkNorm,
    RopeRule, TemperatureRule, WindowForm, WindowRope, WindowRule,
};
use crate::route::Gating;

/// What differs between mixtures.
#[derive(Debug)]
pub struct ExpertRule {
    /// Every model has experts; where not, a file without an `expert_count` has plain networks.
    pub always: bool,
    /// How the router's outputs become weights.
    pub gating: GatingRule,
    /// Whether the weights of the chosen are divided by their sum.
    pub normalise: Setting,
    /// `expert_weights_scale` is read.
    pub reads_scale: bool,
    /// Where the width of an expert stands.
    pub width: Width,
    /// Whether there is a shared expert, and its width.
    pub shared: SharedRule,
    /// The shared expert has a router of its own.
    pub shared_mix: bool,
    /// `exp_probs_b.bias`.
    pub selection_bias: Presence,
    /// Bias of the router.
    pub router_bias: Presence,
    /// Biases of the experts.
    pub biases: Presence,
    /// Gate and up may be one tensor, `ffn_gate_up_exps`.
    pub fused: bool,
    /// `moe_latent_size` is read: where it is there and not 0, experts have rows of that length, and a projection before and
    /// behind them.
    pub reads_latent: bool,
    /// `leading_dense_block_count` is read: the first layers have plain networks.
    pub leading_dense: bool,
    /// Which layers have a mixture, of those behind the leading ones.
    pub step: Step,
    /// What the gates go through.
    pub gate: ExpertGate,
    /// A plain network beside the mixture.
    pub beside: Beside,
    /// The router reads the residual stream as the layer finds it.
    pub router_first: bool,
    /// Weights multiply inputs, and the choice is by the router's outputs themselves.
    pub weights_first: bool,
}

/// Which layers have a mixture.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// All.
    All,
    /// All; `interleave_moe_layer_step` is read, and has to be 1.
    One,
    /// The last of every `interleave_moe_layer_step`; the others have plain networks.
    Key,
    /// Those that have a router; the others have plain networks.
    ByRouter,
}

/// Whether a layer has a plain network beside its mixture, and how the two are joined.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Beside {
    /// It has none.
    No,
    /// Each has norms of its own before and behind it, and the router has an input of its own. Layers without a router have the
    /// plain network only (Gemma 4).
    Norms,
    /// The mixture reads the residual stream without the attention's output, through a norm of its own; the plain network is as
    /// wide as an embedding (Arctic).
    BesideMixer,
    /// Both read the same; their sum is divided by the square root of 2. Layers without the network have the mixture only (Grok).
    Mean,
}

/// Where the gating comes from.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum GatingRule {
    /// The graph.
    Fixed(Gating),
    /// `expert_gating_func`, with what holds where it is missing or 0.
    Key(Option<Gating>),
}

/// Where the normalisation comes from.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Setting {
    /// The graph.
    Fixed(bool),
    /// `expert_weights_norm`; no where it is missing.
    Key,
}

/// Where the width of an expert stands.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Width {
    /// `feed_forward_length`.
    Plain,
    /// `expert_feed_forward_length`.
    Own {
        /// Where that is missing, `feed_forward_length` shared by the experts in use.
        or_share: bool,
    },
    /// `expert_feed_forward_length`, or `feed_forward_length`.
    OwnOrPlain,
}

/// Whether there is a shared expert, and its width.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum SharedRule {
    /// There is none.
    None,
    /// `expert_shared_feed_forward_length`; none where that is missing or 0.
    Width,
    /// The same, or `feed_forward_length`.
    WidthOrPlain,
    /// An expert's, `expert_shared_count` times.
    Count,
    /// The same, none where the count is missing or 0.
    CountIfAny,
    /// `expert_shared_feed_forward_length` or an expert's, `expert_shared_count` times.
    CountOfWidth,
    /// An expert's.
    One,
    /// `expert_shared_feed_forward_length`, or an expert's.
    WidthOrOne,
}

/// What the gates go through.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum ExpertGate {
    /// x * sigmoid(x).
    Silu,
    /// GELU, tanh form.
    Gelu,
    /// max(x, 0).
    Relu,
    /// gpt-oss's: clamped, and times up + 1.
    SwigluOai,
    /// max(x, 0)² of `up`: there are no gates.
    ReluSquared,
}

impl ExpertGate {
    /// Whether experts have a matrix for it.
    pub fn has_matrix(self) -> bool {
        self != ExpertGate::ReluSquared
    }
}

/// The norm before the mixture under the name of one after attention.
const POST_ATTENTION: Norms = Norms { ffn: Some("post_attention_norm"), ..BEFORE };

/// Softmax over all, weights that add up to one, the plain width: mixtral.
const MIXTRAL: ExpertRule = ExpertRule {
    always: false,
    gating: GatingRule::Fixed(Gating::Softmax),
    normalise: Setting::Fixed(true),
    reads_scale: false,
    width: Width::Plain,
    shared: SharedRule::None,
    shared_mix: false,
    selection_bias: Presence::Never,
    router_bias: Presence::Never,
    biases: Presence::Never,
    fused: false,
    reads_latent: false,
    leading_dense: false,
    step: Step::All,
    gate: ExpertGate::Silu,
    beside: Beside::No,
    router_first: false,
    weights_first: false,
};

/// The same, in every model.
pub(super) const ALWAYS: ExpertRule = ExpertRule { always: true, ..MIXTRAL };
const OWN: ExpertRule = ExpertRule { width: Width::Own { or_share: false }, ..ALWAYS };
/// Leading plain layers, shared experts by count, gating and norm by key.
const DEEPSEEK3: ExpertRule = ExpertRule {
    gating: GatingRule::Key(None),
    normalise: Setting::Key,
    reads_scale: true,
    shared: SharedRule::Count,
    selection_bias: Presence::Optional,
    leading_dense: true,
    ..OWN
};

/// Latent attention, and the same experts, by softmax where no key says otherwise.
const DEEPSEEK2: Arch = Arch {
    name: "deepseek2",
    qkv_bias: Presence::Never,
    other_bias: Presence::Never,
    rope_factors: false,
    partial_rope: true,
    latent: Latent::Row,
    temperature: TemperatureRule::Length,
    nextn: Nextn::ApartFromV3,
    experts: Some(&ExpertRule { gating: GatingRule::Key(Some(Gating::Softmax)), fused: true, ..DEEPSEEK3 }),
    examples: "DeepSeek V2, V3, R1, Kimi K2, Mistral Large 3",
    ..LLAMA
};

/// The `llama` files that have experts: Mixtral and its merges.
pub(super) const LLAMA_EXPERTS: ExpertRule = MIXTRAL;

/// Kimi Linear's: as DeepSeek's, normed always.
pub(super) const KIMI_EXPERTS: ExpertRule =
    ExpertRule { normalise: Setting::Fixed(true), selection_bias: Presence::Required, ..DEEPSEEK3 };
/// LFM2's: leading plain layers, gating by key, normed always.
pub(super) const LFM2_EXPERTS: ExpertRule =
    ExpertRule { gating: GatingRule::Key(None), selection_bias: Presence::Required, leading_dense: true, ..OWN };
/// Nemotron's: without gates, by sigmoid, and a shared one.
pub(super) const NEMOTRON_EXPERTS: ExpertRule = ExpertRule {
    gating: GatingRule::Fixed(Gating::Sigmoid),
    normalise: Setting::Key,
    reads_scale: true,
    shared: SharedRule::Width,
    selection_bias: Presence::Required,
    gate: ExpertGate::ReluSquared,
    reads_latent: true,
    ..OWN
};
/// Jamba's, in the models and layers that have experts: weights as the softmax leaves them.
pub(super) const JAMBA_EXPERTS: ExpertRule =
    ExpertRule { normalise: Setting::Fixed(false), step: Step::ByRouter, ..MIXTRAL };
/// Granite's: a shared expert where its width says so.
pub(super) const GRANITE_EXPERTS: ExpertRule = ExpertRule { shared: SharedRule::Width, ..MIXTRAL };
/// Gemma 4's, in the models that have experts.
pub(super) const GEMMA4_EXPERTS: ExpertRule = ExpertRule {
    width: Width::Own { or_share: false },
    fused: true,
    gate: ExpertGate::Gelu,
    beside: Beside::Norms,
    ..MIXTRAL
};

/// The rows.
pub(super) const TABLE: &[Arch] = &[
    Arch {
        name: "qwen3moe",
        pairing: Pairing::Halves,
        other_bias: Presence::Never,
        qk_norm: Presence::Required,
        rope_factors: false,
        experts: Some(&ExpertRule { width: Width::Own { or_share: true }, ..ALWAYS }),
        examples: "Qwen3 30B-A3B, 235B-A22B, Qwen3-Coder",
        ..LLAMA
    },
    Arch {
        name: "qwen2moe",
        pairing: Pairing::Halves,
        other_bias: Presence::Never,
        rope_factors: false,
        experts: Some(&ExpertRule {
            normalise: Setting::Fixed(false),
            width: Width::Own { or_share: true },
            shared: SharedRule::WidthOrPlain,
            shared_mix: true,
            ..ALWAYS
        }),
        examples: "Qwen1.5-MoE A2.7B, Qwen2 57B-A14B",
        ..LLAMA
    },
    Arch {
        name: "gpt-oss",
        pairing: Pairing::Halves,
        other_bias: Presence::Required,
        rope_factors: false,
        sinks: true,
        norms: POST_ATTENTION,
        window: Some(WindowRule { period: 2, ..WindowRule::USUAL }),
        experts: Some(&ExpertRule {
            gating: GatingRule::Fixed(Gating::SoftmaxOfChosen),
            normalise: Setting::Fixed(false),
            router_bias: Presence::Required,
            biases: Presence::Required,
            gate: ExpertGate::SwigluOai,
            ..OWN
        }),
        examples: "gpt-oss 20b, 120b",
        ..LLAMA
    },
    Arch {
        name: "glm4moe",
        pairing: Pairing::Halves,
        other_bias: Presence::Never,
        qk_norm: Presence::Optional,
        rope_factors: false,
        partial_rope: true,
        norms: POST_ATTENTION,
        nextn: Nextn::ApartFromV3,
        experts: Some(&ExpertRule {
            gating: GatingRule::Key(Some(Gating::Sigmoid)),
            width: Width::Own { or_share: false },
            selection_bias: Presence::Required,
            ..DEEPSEEK3
        }),
        examples: "GLM-4.5, GLM-4.5-Air, GLM-4.6",
        ..LLAMA
    },
    Arch {
        name: "ernie4_5-moe",
        other_bias: Presence::Never,
        rope_factors: false,
        experts: Some(&ExpertRule {
            shared: SharedRule::Width,
            selection_bias: Presence::Optional,
            leading_dense: true,
            step: Step::One,
            ..OWN
        }),
        examples: "ERNIE 4.5 21B-A3B, 300B-A47B",
        ..LLAMA
    },
    Arch {
        name: "deepseek",
        other_bias: Presence::Never,
        experts: Some(&ExpertRule {
            normalise: Setting::Fixed(false),
            reads_scale: true,
            shared: SharedRule::Count,
            leading_dense: true,
            ..OWN
        }),
        examples: "DeepSeek-MoE 16B",
        ..LLAMA
    },
    DEEPSEEK2,
    Arch { name: "mistral4", examples: "Mistral Small 4", ..DEEPSEEK2 },
    Arch {
        name: "qwen3vlmoe",
        pairing: Pairing::Halves,
        other_bias: Presence::Never,
        qk_norm: Presence::Required,
        mrope: Mrope::Interleaved,
        rope_factors: false,
        experts: Some(&ExpertRule { width: Width::Own { or_share: true }, ..ALWAYS }),
        examples: "Qwen3-VL 30B-A3B, 235B-A22B, text",
        ..LLAMA
    },
    Arch {
        name: "granitemoe",
        multipliers: Multipliers::Keys,
        attn_scale: AttnScale::Key,
        rope: RopeRule::ByFinetuned,
        long_factors: true,
        experts: Some(&GRANITE_EXPERTS),
        examples: "Granite 3.x 1B-A400M, 3B-A800M",
        ..LLAMA
    },
    Arch {
        name: "olmoe",
        pairing: Pairing::Halves,
        other_bias: Presence::Never,
        qk_norm: Presence::Required,
        qk_norm_rule: QkNorm { over: Over::Row, ..HEAD_NORM },
        rope_factors: false,
        experts: Some(&ExpertRule { normalise: Setting::Fixed(false), ..ALWAYS }),
        examples: "OLMoE 1B-7B",
        ..LLAMA
    },
    Arch {
        name: "hunyuan-moe",
        pairing: Pairing::Halves,
        other_bias: Presence::Never,
        qk_norm: Presence::Required,
        qk_norm_rule: QkNorm { after_rope: true, ..HEAD_NORM },
        rope_factors: false,
        experts: Some(&ExpertRule { shared: SharedRule::WidthOrPlain, ..ALWAYS }),
        examples: "Hunyuan A13B",
        ..LLAMA
    },
    Arch {
        name: "minimax-m2",
        pairing: Pairing::Halves,
        other_bias: Presence::Never,
        qk_norm: Presence::Required,
        qk_norm_rule: QkNorm { over: Over::Row, ..HEAD_NORM },
        rope_factors: false,
        partial_rope: true,
        experts: Some(&ExpertRule { gating: GatingRule::Key(None), selection_bias: Presence::Required, ..ALWAYS }),
        examples: "MiniMax M2",
        ..LLAMA
    },
    Arch {
        name: "mellum",
        pairing: Pairing::Halves,
        other_bias: Presence::Never,
        qk_norm: Presence::Required,
        rope_factors: false,
        window: Some(WindowRule { period: 4, rope: WindowRope::Unscaled, ..WindowRule::USUAL }),
        experts: Some(&OWN),
        examples: "Mellum 2",
        ..LLAMA
    },
    Arch {
        name: "dbrx",
        pairing: Pairing::Halves,
        norm: NormKind::Layer,
        norms: Norms { ffn: Some("attn_output_norm"), ..BEFORE },
        qkv_bias: Presence::Never,
        other_bias: Presence::Never,
        clamp: true,
        rope_factors: false,
        experts: Some(&ALWAYS),
        examples: "DBRX",
        ..LLAMA
    },
    Arch {
        name: "dots1",
        pairing: Pairing::Halves,
        other_bias: Presence::Never,
        qk_norm: Presence::Required,
        rope_factors: false,
        experts: Some(&DEEPSEEK3),
        examples: "dots.llm1",
        ..LLAMA
    },
    Arch {
        name: "bailingmoe",
        other_bias: Presence::Never,
        experts: Some(&ExpertRule { normalise: Setting::Key, reads_scale: true, shared: SharedRule::Count, ..OWN }),
        examples: "Ling Lite, Ling Plus",
        ..LLAMA
    },
    Arch {
        name: "bailingmoe2",
        pairing: Pairing::Halves,
        qkv_bias: Presence::Never,
        other_bias: Presence::Never,
        qk_norm: Presence::Required,
        rope_factors: false,
        partial_rope: true,
        nextn: Nextn::ApartFromV3,
        experts: Some(&ExpertRule { shared: SharedRule::CountOfWidth, ..DEEPSEEK3 }),
        examples: "Ling 2.0, Ring 2.0",
        ..LLAMA
    },
    Arch {
        name: "exaone-moe",
        pairing: Pairing::Halves,
        other_bias: Presence::Never,
        qk_norm: Presence::Required,
        window: Some(WindowRule { period: 4, default: Some(128), rope: WindowRope::Shared, ..WindowRule::USUAL }),
        rope: RopeRule::Windowed,
        nextn: Nextn::ApartFromV3,
        experts: Some(&ExpertRule { shared: SharedRule::WidthOrOne, ..DEEPSEEK3 }),
        examples: "K-EXAONE 236B-A23B",
        ..LLAMA
    },
    Arch {
        name: "afmoe",
        pairing: Pairing::Halves,
        other_bias: Presence::Never,
        qk_norm: Presence::Required,
        post_norms: Some(POST_NORMS),
        scaled_embedding: true,
        attn_gate: true,
        rope_factors: false,
        partial_rope: true,
        window: Some(WindowRule { period: 4, ..WindowRule::USUAL }),
        rope: RopeRule::NotEvery(4),
        experts: Some(&ExpertRule {
            gating: GatingRule::Key(Some(Gating::Sigmoid)),
            selection_bias: Presence::Required,
            shared: SharedRule::CountIfAny,
            ..DEEPSEEK3
        }),
        examples: "Trinity Nano, Mini",
        ..LLAMA
    },
    Arch {
        name: "hy_v3",
        pairing: Pairing::Halves,
        other_bias: Presence::Never,
        qk_norm: Presence::Required,
        rope_factors: false,
        nextn: Nextn::Apart,
        experts: Some(&ExpertRule {
            gating: GatingRule::Key(Some(Gating::Sigmoid)),
            width: Width::Own { or_share: true },
            shared: SharedRule::WidthOrOne,
            fused: true,
            leading_dense: false,
            step: Step::ByRouter,
            ..DEEPSEEK3
        }),
        examples: "Hunyuan 3 (HY V3) 30B-A3B and larger",
        ..LLAMA
    },
    Arch {
        name: "llama4",
        other_bias: Presence::Never,
        plain_qk_norm: Some(128),
        qk_norm_rule: QkNorm { after_rope: true, ..HEAD_NORM },
        window: Some(WindowRule {
            period: 4,
            default: Some(8192),
            form: WindowForm::Chunks(8192),
            ..WindowRule::USUAL
        }),
        rope: RopeRule::NotEvery(4),
        attn_scale: AttnScale::Key,
        temperature: TemperatureRule::WithoutRope,
        experts: Some(&ExpertRule {
            gating: GatingRule::Fixed(Gating::Sigmoid),
            normalise: Setting::Fixed(false),
            shared: SharedRule::One,
            step: Step::Key,
            weights_first: true,
            ..OWN
        }),
        examples: "Llama 4 Scout, Maverick, text",
        ..LLAMA
    },
    Arch {
        name: "smallthinker",
        pairing: Pairing::Halves,
        other_bias: Presence::Never,
        rope_factors: false,
        window: Some(WindowRule { period: 4, form: WindowForm::FixedFullFirst(4096), ..WindowRule::USUAL }),
        rope: RopeRule::NotFirstOf(4),
        experts: Some(&ExpertRule { gating: GatingRule::Key(None), gate: ExpertGate::Relu, router_first: true, ..OWN }),
        examples: "SmallThinker 4B-A0.6B, 21B-A3B",
        ..LLAMA
    },
    Arch {
        name: "arctic",
        other_bias: Presence::Never,
        rope_factors: false,
        experts: Some(&ExpertRule { beside: Beside::BesideMixer, ..ALWAYS }),
        examples: "Snowflake Arctic",
        ..LLAMA
    },
    Arch {
        name: "grok",
        pairing: Pairing::Halves,
        other_bias: Presence::Never,
        post_norms: Some(["attn_output_norm", "layer_output_norm"]),
        multipliers: Multipliers::Grok,
        attn_scale: AttnScale::Output,
        never_flash: true,
        softcap: Some(30.0),
        activation: Activation::Gelu,
        rope_factors: false,
        yarn_keys: true,
        yarn_beta_fast: 8.0,
        experts: Some(&ExpertRule { width: Width::OwnOrPlain, gate: ExpertGate::Gelu, beside: Beside::Mean, ..ALWAYS }),
        examples: "Grok 1, Grok 2",
        ..LLAMA
    },
    Arch {
        name: "phimoe",
        pairing: Pairing::Halves,
        rms_bias: Presence::Required,
        other_bias: Presence::Required,
        rope_factors: false,
        long_factors: true,
        experts: Some(&ALWAYS),
        examples: "Phi-3.5-MoE",
        ..LLAMA
    },
];
