//! Every number that something is judged by, in one place, each with its reason.
//!
//! The reference is always a real server's own output. Where a server disagrees with itself (another batch size, flash
//! attention on or off), nothing can be asked to be closer than that; where it does not, or where weights are exact enough,
//! the limits are absolute. Distances are relative L2 norms, |a - b| / |a|, of a layer's whole K or V matrix or of one row.

use crate::shape::Weights;

/// Limits on distance from the server's K and V.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distance {
    /// Model layer 0, K and V. It depends on embedding, norm, projection and RoPE only, and every variant of a server
    /// computes it alike to the last bit: this is the sharpest limit there is.
    pub layer0: [f64; 2],
    /// Any layer, K and V.
    pub layer: [f64; 2],
    /// Any single row of any layer, K and V.
    pub row: [f64; 2],
    /// Recurrent state of model layer 0: convolution history (R) and state (S). R is a projection, as K and V are before RoPE.
    /// S is a sum over all positions, each term rounded once, and fades.
    pub state0: [f64; 2],
    /// Recurrent state of any layer, R and S: the same after what earlier layers differ in.
    pub state: [f64; 2],
    /// 1 - cosine of any single row.
    pub one_minus_cos: f64,
}

/// Models of f32 weights. Exact (double precision) arithmetic is 4e-7 away in layer 0 (1.4e-5 after rounding both to an f16
/// cache) and up to 1e-3 in later layers; a server is up to 1.3e-3 away from itself. These are about twice that. The smallest
/// deliberate mistake (RoPE base x 1.01, a tenth of the norms' epsilon) is above 2e-3 in layer 0.
pub const F32: Distance = Distance {
    layer0: [1e-4, 1e-4],
    layer: [2e-3, 3e-3],
    row: [2e-2, 4e-2],
    state0: [1e-4, 1e-4],
    state: [2e-3, 3e-3],
    one_minus_cos: 2e-4,
};

/// Models of f16 weights: activations are rounded to f16 in products, which alone is 2e-4 in layer 0. Exact arithmetic is up to
/// 1.6e-3 away in later layers.
pub const F16: Distance = Distance {
    layer0: [1e-3, 1e-3],
    layer: [2e-3, 4e-3],
    row: [1e-2, 2e-2],
    state0: [1e-3, 1e-3],
    state: [2e-3, 4e-3],
    one_minus_cos: 5e-5,
};

/// Layer 0 of models with any other weights. There a server rounds activations to 8-bit blocks (or bf16), and so must we: exact
/// arithmetic is 4e-3 to 1.3e-2 away. Who rounds alike is at most 7e-5 away (tiny models; 2e-5 on the real ones), and a norm whose
/// last bit differs, so that one value in some thousand lands on another code, was 1e-4 to 4e-4. The rest is room for servers built for other processors.
pub const QUANTISED_LAYER0: [f64; 2] = [5e-4, 5e-4];

/// Any single row of layer 0 of such models: up to 3e-4 here, where no value has landed on another code; one that has is some 3e-3.
/// A single wrong id of a prompt is above 0.9.
pub const QUANTISED_ROW0: f64 = 1e-2;

/// Limits for exact weights as multiples where a cache is bf16: its steps are eight times those of f16, so that two values just
/// left and right of a step are stored eight times as far apart.
pub const BF16_CACHE: f64 = 8.0;

/// Layer 0 of a quantised cache, as a share of what quantising itself does to it (its distance from the same server's f16 cache,
/// which the harness measures). Equal values give equal codes; values that differ in their last bit give another code where they
/// lie at an edge. A code is a step, and a share p of them is sqrt(12 p) of the distance: this is one code in a thousand. Measured on
/// f32 weights: 0 for all types without RoPE's last bit (V, and K of gemma3), 0.05 at most with it.
pub const OTHER_CODES_EXACT: f64 = 0.11;

/// The same where weights are quantised too, whose layer 0 may be [`QUANTISED_LAYER0`] away before it is put into codes:
/// one code in fifty.
pub const OTHER_CODES: f64 = 0.5;

/// Any single row of layer 0 of a quantised cache, on the same scale. A row has few blocks: one in which the largest value lies at an
/// edge of the scale's f16 gets other codes throughout.
pub const OTHER_CODES_ROW: f64 = 1.0;

/// How much farther from the server than the server from itself a result may be, or, where products are int8, than the oracle's by the
/// same contract: there 0.9 to 1.03 times is measured. Of a quantised cache the server's variant is the
/// one with an f16 cache, because batches change nothing there and there is no other attention: beyond layer 0 last bits
/// make other codes, which make more of them in the next layer, until two results are two roundings of the same: sqrt(2) times as
/// far from each other as from what they round. Measured: 0.3 to 1.45 times.
pub const NOISE: f64 = 1.5;

/// How far beside itself a model is from which a server's noise is taken where its variants compute nothing otherwise: recurrent layers
/// go over their positions one by one. Every weight of the first norm by so much, up and down in turn. It is a sixtieth of what layer 0 of
/// a result may be away ([`QUANTISED_LAYER0`]), and less than what it is away in models that attend (2e-5); in recurrent ones layer 0 is
/// within 4e-7. Measured on tiny models of 8-bit and 4-bit weights: the server's later layers then move by 0.012 to 0.069, and are
/// up to 0.013 away from ours. After a nudge of an eighth of this they move by 0.008 to 0.046, and one measure of one model fails:
/// how often greedy texts depart.
pub const NUDGE: f32 = 1.0 / 131_072.0;

/// Where products are computed by the int8 contract and the cache is f32, all layers of a prompt of a few tokens, from the
/// oracle's by the same contract, with host kernels that round nothing else. Codes are integers, and what is around them is f32 here and double precision there: 1.6e-7 at most on the tiny
/// models and 2.6e-6 over SmolLM2's 30 layers, as long as no value lies so near to the middle of two codes that it becomes the other one. One
/// that does is 1e-3 or more in the next layer, which is nearly what rounding to 8 bits costs at all.
pub const INT8_SAME: f64 = 1e-5;

/// Layer 0 of any cache by the int8 contract, K and V, from the oracle's. Measured with an f16 cache over 20 prompts: 7e-5 at most on tiny
/// models, but 6.6e-4 where embeddings are Q8_0, and 1.24e-3 (V; K 5.2e-4) on SmolLM2, where one code of one token's row is another. A
/// server's own layer 0, which is not by the contract, is 6e-3 to 6e-2 away.
pub const INT8_LAYER0: f64 = 2.5e-3;

/// Any single row of it: one code is up to 1.2e-2 of a row of V on SmolLM2, whose codes are coarse because a few channels are large.
pub const INT8_ROW0: f64 = 2.5e-2;

/// How many times the oracle's the largest divergence of a first token, and the rate at which texts depart, may be by the int8 contract.
/// Both hang on few events, since every text departs within some twenty tokens. Measured: 0.7 to 2.3 times and 0.7 to 1.7 times. The mean
/// divergence, over hundreds of tokens, is held to [`NOISE`]: 0.9 to 1.3 times.
pub const INT8_FEW: f64 = 3.0;

/// Below this a server's own noise is not a yardstick: on prompts of a few tokens its variants may happen to run the same code.
pub const NOISE_FLOOR: f64 = 2e-3;

/// The absolute limits for a model, if its weights are exact enough for such.
pub fn absolute(weights: Weights) -> Option<Distance> {
    match weights {
        Weights::F32 => Some(F32),
        Weights::F16 => Some(F16),
        Weights::Quantised => None,
    }
}

/// Kullback-Leibler divergence (nats) of the next token from the control that is no difference at all: what f16 rounding of a
/// cache alone makes.
pub const KL_FLOOR: f64 = 1e-4;

/// On models of f32 weights greedy text must equal the control's, except where the control itself holds two tokens for as good as
/// equal: their log probabilities differ by no more than [`NOISE`] times what the server's own variants move log probabilities by
/// (5e-3 to 2.5e-2 on the tiny models with an f16 cache), or by this, whichever is more.
pub const TIE: f64 = 5e-3;

/// Tokens generated for the comparison of texts.
pub const GREEDY: u32 = 64;

/// How many of the most probable tokens are compared.
pub const TOP: u32 = 64;
