//! Architectures as tables: what differs between model families, in numbers and flags.
//!
//! Source of every entry: llama.cpp's `src/models/<name>.cpp` (graph and tensors), `src/llama-model.cpp`
//! (hyper-parameters, rope type). To add one, add a row to the table of its kind; if it needs a flag that is not here, add
//! the flag and teach `crate::spec` and the kinds of layers (`crate::layer`) about it.

mod dense;
pub mod experts;
mod recurrent;

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

/// What the gate of the feed-forward network goes through, or what stands between its matrices where it has no gate.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Activation {
    /// x * sigmoid(x).
    Silu,
    /// GELU, tanh form.
    Gelu,
    /// max(x, 0)².
    ReluSquared,
    /// xIELU, its four numbers per layer from the keys `xielu.…`.
    Xielu,
}

/// How a plain feed-forward network is built.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum FfnShape {
    /// `ffn_gate`, `ffn_up`, `ffn_down`.
    Gated,
    /// The same, the gate's rows above those of `ffn_up` in one tensor.
    Fused,
    /// `ffn_up`, `ffn_down`.
    NoGate,
}

/// What a row is divided by.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum NormKind {
    /// The root of its mean square.
    Rms,
    /// Its mean is taken away, then it is divided by its deviation; there may be a bias.
    Layer,
}

/// The norms before the halves of a layer, by their tensors' names.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Norms {
    /// Before attention; `None` where it reads the residual stream itself.
    pub mixer: Option<&'static str>,
    /// Before the feed-forward network.
    pub ffn: Option<&'static str>,
    /// Whether they have weights.
    pub weights: bool,
}

/// What the feed-forward network of a layer reads.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Layout {
    /// The residual stream with the attention's output in it.
    Serial,
    /// What attention read.
    Parallel,
    /// What attention read, in files without a norm of its own.
    ParallelWithoutNorm,
    /// The stream without the attention's output, normed on its own, where `use_parallel_residual` says so.
    ByKey,
    /// What attention read; where there is `attn_norm_2`, attention reads the stream through that and the network through
    /// `attn_norm`.
    SecondNorm,
}

/// How queries and keys are normed.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct QkNorm {
    /// What of a row is normed together.
    pub over: Over,
    /// By what.
    pub kind: NormKind,
    /// After RoPE instead of before.
    pub after_rope: bool,
}

/// What of a row of queries or keys a norm takes together.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Over {
    /// A head; all heads have the same weights.
    Head,
    /// A head; each has weights of its own.
    EachHead,
    /// The whole row.
    Row,
}

/// What attention's scores are multiplied by, 1/sqrt(head size) unless said otherwise.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum AttnScale {
    /// As it is.
    Head,
    /// What the key `attention.scale` says, if it is there and not 0.
    Key,
    /// 1/sqrt(n_embd / n_head) in models of this many layers.
    EmbdAtLayers(u32),
    /// 1/head size.
    Inverse,
    /// What the key `attention.output_scale` says, 0.088388346 without it.
    Output,
    /// 1: the norms of queries and keys have taken care of it.
    One,
}

/// Constant factors.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Multipliers {
    /// None.
    None,
    /// Of embeddings and of what each half of a layer adds, by the keys `embedding_scale` and `residual_scale`.
    Keys,
    /// The same; without the keys 12 and 1.4 / sqrt(layers).
    MiniCpm,
    /// These numbers, whatever the keys say.
    MiniCpm3,
    /// Of embeddings alone; without the key 78.38367.
    Grok,
}

/// Where positions turn into numbers.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum RopeRule {
    /// RoPE in every layer.
    All,
    /// In none.
    Never,
    /// In all but every n-th.
    NotEvery(u32),
    /// In all but the first of every n; in all where the model has no window, or n layers.
    NotFirstOf(u32),
    /// In layers with a window; in all where the model has no window.
    Windowed,
    /// In all, or in none where `rope.scaling.finetuned` is false.
    ByFinetuned,
    /// In all, or in none in models of this many layers.
    NotAtLayers(u32),
}

/// A penalty on distance, instead of RoPE.
#[derive(Copy, Clone, PartialEq, Debug)]
pub enum Alibi {
    /// No.
    None,
    /// Of this strength.
    Fixed(f32),
    /// By the key `attention.max_alibi_bias`.
    Key,
    /// Of strength 8 in models of this many layers.
    AtLayers(u32),
}

/// Which layers have no keys and values of their own and read those of layers before. They all come after the layers that have
/// some, so that a prefill does without them.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum SharedKv {
    /// None.
    None,
    /// As many as the key `attention.shared_kv_layers` says, the last ones.
    Key,
    /// All from this one on.
    From(u32),
}

/// A second embedding of every token, with a part for each layer.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum PerLayer {
    /// There is none.
    None,
    /// As wide as the key `embedding_length_per_layer_input` says; there is none where that is 0.
    Key,
    /// As wide as this.
    Wide(u32),
}

/// Attention whose keys and values of all heads come from one short row (MLA), and what of it the decoder keeps.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Latent {
    /// There is none.
    No,
    /// The row. Queries come in one projection or in two, by the model's sizes.
    Row,
    /// The row. Queries come in one projection.
    RowOneQuery,
    /// The keys and values of every head that the row is widened to (MiniCPM 3).
    Heads,
}

/// RoPE whose pairs belong to several positions, of which text has only one.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Mrope {
    /// No.
    None,
    /// Sections one after the other, where the key `rope.dimension_sections` asks for it.
    Sections,
    /// The same; the key must be there.
    Always,
    /// Sections interleaved; the key must be there.
    Interleaved,
}

/// One architecture.
#[derive(Debug)]
pub struct Arch {
    /// `general.architecture`.
    pub name: &'static str,
    /// Which channels RoPE turns together.
    pub pairing: Pairing,
    /// The norms of the residual stream.
    pub norm: NormKind,
    /// Where they are.
    pub norms: Norms,
    /// Whether RMS norms have biases. Layer norms may always have some.
    pub rms_bias: Presence,
    /// What is added under their roots, where the servers do not read it from the file.
    pub eps: Option<f32>,
    /// What the feed-forward network reads.
    pub layout: Layout,
    /// Biases of the query, key and value projections.
    pub qkv_bias: Presence,
    /// Biases of the attention output and the feed-forward projections.
    pub other_bias: Presence,
    /// Norm of queries and keys.
    pub qk_norm: Presence,
    /// How they are normed.
    pub qk_norm_rule: QkNorm,
    /// Query and key heads of layers that have RoPE are normed behind it by a norm without weights, but in models of so many
    /// experts.
    pub plain_qk_norm: Option<u32>,
    /// Norms after attention and after the feed-forward network, before each is added to the residual, by their tensors' names.
    pub post_norms: Option<[&'static str; 2]>,
    /// Embeddings are multiplied by the square root of their length.
    pub scaled_embedding: bool,
    /// A norm of the embeddings, `token_embd_norm`.
    pub embedding_norm: bool,
    /// A vector per position, `position_embd.weight`, added to the embeddings.
    pub positions: Presence,
    /// Constant factors.
    pub multipliers: Multipliers,
    /// The activation.
    pub activation: Activation,
    /// The plain feed-forward network.
    pub ffn: FfnShape,
    /// Whether the network is half as wide as `feed_forward_length`.
    pub half_ff: bool,
    /// Sliding-window layers, where the file has a window.
    pub window: Option<WindowRule>,
    /// `rope_freqs.weight` divides the frequencies.
    pub rope_factors: bool,
    /// `rope_factors_short.weight` and `rope_factors_long.weight` do, by the decoder's context size.
    pub long_factors: bool,
    /// RoPE may turn only the first channels of a head. llama.cpp's graphs of the others assert that it turns all.
    pub partial_rope: bool,
    /// Which layers have RoPE.
    pub rope: RopeRule,
    /// Several positions.
    pub mrope: Mrope,
    /// What scores are multiplied by.
    pub attn_scale: AttnScale,
    /// Servers run it without flash attention, whatever they are told.
    pub never_flash: bool,
    /// Scores go through a soft cap: `attn_logit_softcapping`, or this.
    pub softcap: Option<f32>,
    /// A penalty on distance.
    pub alibi: Alibi,
    /// Queries, keys and values are clamped to ± `attention.clamp_kqv`.
    pub clamp: bool,
    /// Every value head is divided by the root of its mean square.
    pub value_norm: bool,
    /// Layers may lack `attn_v`; their values are then what keys are projected to, before norm and RoPE.
    pub keys_as_values: bool,
    /// Layers that read the keys and values of others.
    pub shared_kv: SharedKv,
    /// A second embedding with a part for each layer.
    pub per_layer: PerLayer,
    /// Several residual streams, of which layers work on the first (AltUp), and a detour around attention (LAuReL).
    pub altup: bool,
    /// In the first so many layers, gates below the mean and so many deviations are nothing, and the others less by that.
    pub sparse_gates: Option<(u32, f32)>,
    /// A number that everything a layer leaves behind is multiplied by, `layer_output_scale`.
    pub out_scale: Presence,
    /// Queries grow with their position.
    pub temperature: TemperatureRule,
    /// The keys `rope.scaling.yarn_beta_fast`, `…_slow` and `…_log_multiplier` are read.
    pub yarn_keys: bool,
    /// `rope.scaling.yarn_beta_fast` where it is not there.
    pub yarn_beta_fast: f32,
    /// Each head has a sink: a score that joins the softmax and has no value.
    pub sinks: bool,
    /// Keys and values of all heads come from one short row (MLA).
    pub latent: Latent,
    /// What its mixtures of experts are like, where it may have them.
    pub experts: Option<&'static experts::ExpertRule>,
    /// The norm after the last layer, by its tensor's name; it is never computed.
    pub output_norm: &'static str,
    /// Every query head has as many channels behind it, whose sigmoid multiplies what the head reads.
    pub gated_query: bool,
    /// A projection of the input of attention, `attn_gate`, whose sigmoid multiplies what the heads read.
    pub attn_gate: bool,
    /// Layers that carry a state along, instead of attention or beside it.
    pub recurrence: Option<Recurrence>,
    /// Which layers do.
    pub recurrent_layers: RecurrentLayers,
    /// Layers have a second half, a feed-forward network.
    pub feed_forward: bool,
    /// A layer may lack attention or have one matrix in its place, and may lack the network, by numbers of heads and widths of 0. What
    /// attention gives in a layer without a network is lost, as llama.cpp has it.
    pub lone_halves: bool,
    /// Whether the last blocks may be there to predict more tokens; a prefill does without them.
    pub nextn: Nextn,
    /// Models that users know it by.
    pub examples: &'static str,
}

/// How an architecture places its sliding-window layers.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct WindowRule {
    /// Every n-th layer sees everything, the others a window; where the file does not say. With 0 it has to, by a flag for each
    /// layer.
    pub period: u32,
    /// The window, where the file does not say; without it there is none then.
    pub default: Option<u32>,
    /// Only models of this many layers have a window.
    pub only_at_layers: Option<u32>,
    /// RoPE of the window layers.
    pub rope: WindowRope,
    /// What the window is like.
    pub form: WindowForm,
}

impl WindowRule {
    /// What most say that have windows at all.
    pub const USUAL: WindowRule =
        WindowRule { period: 4, default: None, only_at_layers: None, rope: WindowRope::Same, form: WindowForm::Last };
}

/// What a window is like.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum WindowForm {
    /// The last positions, as many as the file says.
    Last,
    /// The last so many, where the file has a window of any length. Of every n layers the first sees everything, not the last.
    FixedFullFirst(u32),
    /// Chunks of so many positions, each of which sees itself alone, whatever the file says but 0.
    Chunks(u32),
}

/// How queries grow with their position.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum TemperatureRule {
    /// They do not.
    No,
    /// By `attention.temperature_scale`, in steps of the original context.
    Key,
    /// The same, in steps of `attention.temperature_length`.
    Length,
    /// By a tenth in every 8192 positions, in layers without RoPE (Llama 4).
    WithoutRope,
}

/// RoPE of layers with a window.
#[derive(Copy, Clone, PartialEq, Debug)]
pub enum WindowRope {
    /// Of base `rope.freq_base_swa`, or this; never scaled.
    Own(f32),
    /// The same, without factors, and of `rope.dimension_count_swa` channels of heads of `attention.key_length_swa`.
    OwnHeads(f32),
    /// That of the other layers, of base `rope.freq_base_swa` where it is there.
    Same,
    /// That of the other layers without any scaling.
    Unscaled,
    /// That of the other layers, whatever the keys say.
    Shared,
}

/// Blocks behind the layers that only predict more tokens, as many as `nextn_predict_layers` says.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Nextn {
    /// Servers have none in such models.
    Never,
    /// They have no place in the decoder's memory.
    Apart,
    /// The same, but servers whose state files have version 2 keep rows for them.
    ApartFromV3,
}

/// What recurrent layers consist of.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Recurrence {
    /// The gated delta net.
    DeltaNet {
        /// Neighbouring value heads share a key head.
        interleaved: bool,
    },
    /// The same with a decay for each key channel (Kimi delta attention).
    Kda,
    /// The gated short convolution.
    ShortConv,
    /// The selective scan, every channel for itself.
    Mamba,
    /// The selective scan in heads.
    Mamba2 {
        /// A norm of each group of channels behind the gate.
        norm: Presence,
    },
}

/// How it is told which layers are recurrent, in architectures that have such.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum RecurrentLayers {
    /// All.
    All,
    /// All, each of which attends as well: both read the same input, and what they give is added up.
    BesideAttention,
    /// Those without key-value heads.
    WithoutKvHeads,
    /// Those without key-value heads and without a width of the feed-forward network. Every layer has one half only: where there
    /// is a width it is that network, otherwise a mixer.
    OneHalf,
    /// All but every n-th, or as a list of flags says.
    Interval,
}

/// Every supported architecture, in tables by what their layers are made of.
pub const TABLES: &[&[Arch]] = &[dense::TABLE, experts::TABLE, recurrent::TABLE];

/// Every supported architecture.
pub fn all() -> impl Iterator<Item = &'static Arch> {
    TABLES.iter().copied().flatten()
}

/// The architecture called `name`.
pub fn find(name: &str) -> Option<&'static Arch> {
    all().find(|a| a.name == name)
}
