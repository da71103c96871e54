//! Mixtures of experts: a router sends each position to a few of many feed-forward networks, whose outputs are added
//! up by weight; where the model has one, a network for all positions (the shared expert) is added to that.
//!
//! What an architecture does differently is an [`ExpertRule`], from `llm_graph_context::build_moe_ffn`'s arguments in
//! llama.cpp's `src/models/<name>.cpp`.

use super::FeedForward;
use super::dense::DenseSpec;
use crate::Error;
use crate::arch::experts::{Beside, ExpertGate, ExpertRule, GatingRule, Setting, SharedRule, Step, Width};
use crate::arch::{Presence, RecurrentLayers};
use crate::plan::Op;
use crate::route::{Gating, Routing};
use crate::spec::{Common, MAX_LAYERS, MAX_WIDTH, Spec};
use crate::weights::{Linear, Loader, distinct};
use npu_kernels::host::TILE_ROWS;
use npu_kernels::{WeightType, WeightView};

/// llama.cpp's own limit (`LLAMA_MAX_EXPERTS`).
const MAX_EXPERTS: u32 = 1024;

/// One layer's numbers.
#[derive(Clone, Debug)]
pub struct ExpertsSpec {
    /// How positions choose.
    pub routing: Routing,
    /// What the gates go through.
    pub gate: ExpertGate,
    /// Width of an expert.
    pub n_ff: usize,
    /// Length of the rows that experts read and write, where that is not an embedding's. The router and the shared expert read
    /// embeddings all the same.
    pub latent: Option<usize>,
    /// Width of the shared expert, where there is one.
    pub n_shared: Option<usize>,
    /// The weights multiply what goes into the experts, not what comes out (llama4).
    pub weights_first: bool,
    /// Positions choose before the layer does anything else (smallthinker).
    pub router_first: bool,
}

/// One layer's tensors.
#[derive(Debug)]
pub struct ExpertsWeights<'g> {
    /// The router: an output for each expert.
    pub router: Linear<'g>,
    /// Added to the router's outputs for the choice alone.
    pub selection_bias: Option<Vec<f32>>,
    /// The experts' gates, where they have some.
    pub gate: Option<Matrices<'g>>,
    /// What the gates multiply.
    pub up: Matrices<'g>,
    /// Back to the length of the experts' rows.
    pub down: Matrices<'g>,
    /// From an embedding's length to that of the experts' rows and back, where these are not the same.
    pub latent: Option<LatentWeights<'g>>,
    /// The shared expert.
    pub shared: Option<SharedWeights<'g>>,
}

/// One matrix for each expert.
#[derive(Debug)]
pub struct Matrices<'g> {
    /// In the order of the experts.
    pub weights: Vec<WeightView<'g>>,
    /// `[expert][output]`, added to the products.
    pub bias: Option<Vec<f32>>,
}

/// Projections before and behind experts.
#[derive(Debug)]
#[allow(missing_docs)] // llama.cpp's tensor names
pub struct LatentWeights<'g> {
    pub down: Linear<'g>,
    pub up: Linear<'g>,
}

/// Tensors of a shared expert.
#[derive(Debug)]
#[allow(missing_docs)] // llama.cpp's tensor names
pub struct SharedWeights<'g> {
    pub gate: Option<Linear<'g>>,
    pub up: Linear<'g>,
    pub down: Linear<'g>,
    /// A router of its own: one output, whose sigmoid multiplies the expert's.
    pub mix: Option<Linear<'g>>,
}

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExpertsOp {
    /// The router's outputs, the choice, and positions grouped by expert.
    Route {
        /// Inputs.
        k: usize,
        /// Experts to choose from.
        experts: usize,
        /// How many each position goes to.
        used: usize,
    },
    /// Rows as the experts want them.
    LatentDown {
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
    },
    /// Gate and up projections of every expert over its positions.
    ExpertsGateUp {
        /// Inputs.
        k: usize,
        /// Outputs of each.
        n: usize,
        /// Experts per position.
        used: usize,
    },
    /// The same where there are no gates.
    ExpertsUp {
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
        /// Experts per position.
        used: usize,
    },
    /// Activation of the gates times up, or of up where there are no gates, rounded.
    ExpertsGate,
    /// Down projection of every expert, and the weighted sum of each position.
    ExpertsDown {
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
        /// Experts per position.
        used: usize,
    },
    /// The sum as an embedding's length.
    LatentUp {
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
    },
    /// The shared expert over all positions, added to the sum.
    Shared {
        /// Inputs, and outputs at its end.
        k: usize,
        /// Its width.
        n: usize,
    },
    /// The same where it has no gate.
    SharedUp {
        /// Inputs, and outputs at its end.
        k: usize,
        /// Its width.
        n: usize,
    },
}

/// Every layer's feed-forward network in an architecture that may have experts.
pub(crate) fn read(c: &Common<'_>, rule: &'static ExpertRule, n_vocab: u32) -> Result<Vec<FeedForward>, Error> {
    let keys = &c.keys;
    let n_expert = keys.u32("expert_count")?.unwrap_or(0);
    if n_expert == 0 && !rule.always {
        for key in ["expert_used_count", "expert_group_count"] {
            if let Some(n) = keys.u32(key)?.filter(|n| *n > 0) {
                return Err(keys.wrong(key, n, "0 or no such key, since there are no experts"));
            }
        }
        return Ok(DenseSpec::read(c)?.into_iter().map(FeedForward::Dense).collect());
    }
    let n_expert = keys.size("expert_count", MAX_EXPERTS)?;
    let n_used = uniform(c, "expert_used_count", n_expert)?
        .ok_or_else(|| keys.wrong("expert_used_count", "no such key", format!("a number from 1 to {n_expert}")))?;
    let lead = match rule.leading_dense {
        true => keys.u32("leading_dense_block_count")?.unwrap_or(0).min(c.n_layer),
        false => 0,
    };
    if rule.step == Step::One
        && let Some(step) = keys.u32("interleave_moe_layer_step")?.filter(|n| *n != 1)
    {
        return Err(keys.wrong(
            "interleave_moe_layer_step",
            step,
            "1: a mixture in every layer after the leading ones",
        ));
    }
    let all_of = |key: &str| uniform(c, key, MAX_WIDTH);
    let n_ff = match rule.width {
        Width::Plain => all_of("feed_forward_length")?
            .ok_or_else(|| keys.wrong("feed_forward_length", "no such key", "the width of an expert"))?,
        Width::OwnOrPlain => match all_of("expert_feed_forward_length")? {
            Some(n) => n,
            None => all_of("feed_forward_length")?
                .ok_or_else(|| keys.wrong("feed_forward_length", "no such key", "the width of an expert"))?,
        },
        Width::Own { or_share } => match (all_of("expert_feed_forward_length")?, or_share) {
            (Some(n), _) => n,
            (None, true) => {
                let n = all_of("feed_forward_length")?.map_or(0, |n| n / n_used);
                match n {
                    0 => return Err(keys.wrong("expert_feed_forward_length", "no such key", "the width of an expert")),
                    n => n,
                }
            }
            (None, false) => {
                return Err(keys.wrong("expert_feed_forward_length", "no such key", "the width of an expert"));
            }
        },
    };
    let shared_width = || keys.u32("expert_shared_feed_forward_length").map(|n| n.filter(|n| *n > 0));
    let count = |required: bool| match keys.u32("expert_shared_count")? {
        Some(n) => Ok(n),
        None if required => Err(keys.wrong("expert_shared_count", "no such key", "the number of shared experts")),
        None => Ok(0),
    };
    let n_shared = match rule.shared {
        SharedRule::None => None,
        SharedRule::One => Some(n_ff.into()),
        SharedRule::WidthOrOne => Some(shared_width()?.unwrap_or(n_ff).into()),
        SharedRule::Width => shared_width()?.map(u64::from),
        SharedRule::WidthOrPlain => match shared_width()? {
            Some(n) => Some(n.into()),
            None => all_of("feed_forward_length")?.map(u64::from),
        },
        SharedRule::Count => Some(u64::from(n_ff) * u64::from(count(true)?)),
        SharedRule::CountIfAny => Some(u64::from(n_ff) * u64::from(count(false)?)).filter(|n| *n > 0),
        SharedRule::CountOfWidth => Some(u64::from(shared_width()?.unwrap_or(n_ff)) * u64::from(count(true)?)),
    };
    if let Some(n) = n_shared.filter(|n| *n == 0 || *n > u64::from(MAX_WIDTH)) {
        return Err(keys.wrong(
            "expert_shared_count",
            format!("shared experts of {n} channels"),
            "at least one channel",
        ));
    }
    let gating = match rule.gating {
        GatingRule::Fixed(g) => g,
        GatingRule::Key(default) => match (keys.u32("expert_gating_func")?.filter(|id| *id != 0), default) {
            (Some(id), _) => Gating::from_id(id).ok_or_else(|| {
                keys.unsupported(
                    "expert_gating_func",
                    id,
                    "supported are 1 (softmax), 2 (sigmoid) and 3 (softmax of the chosen)",
                )
            })?,
            // llama.cpp tells GLM 4.7 Flash by its sizes.
            (None, Some(_)) if rule.fused && matches!(c.n_layer, 47 | 48) && n_vocab == 154_880 => Gating::Sigmoid,
            (None, Some(g)) => g,
            (None, None) => return Err(keys.wrong("expert_gating_func", "no such key", "1 (softmax) or 2 (sigmoid)")),
        },
    };
    let normalise = match rule.normalise {
        Setting::Fixed(b) => b,
        Setting::Key => keys.bool("expert_weights_norm")?.unwrap_or(false),
    };
    let scale = if rule.reads_scale { keys.f32("expert_weights_scale")?.unwrap_or(0.0) } else { 0.0 };
    let latent = match keys.u32("moe_latent_size")?.filter(|n| rule.reads_latent && *n > 0) {
        Some(n) => Some(keys.in_range("moe_latent_size", n, MAX_WIDTH)? as usize),
        None => None,
    };
    let routing = Routing {
        n_expert: n_expert as usize,
        n_used: n_used as usize,
        gating,
        by_logits: rule.weights_first,
        normalise,
        scale,
        groups: groups(c, n_expert)?,
    };
    let experts = ExpertsSpec {
        routing,
        gate: rule.gate,
        n_ff: n_ff as usize,
        latent,
        n_shared: n_shared.map(|n| n as usize),
        weights_first: rule.weights_first,
        router_first: rule.router_first,
    };
    if rule.beside != Beside::No {
        let has = |i: usize, what: &str| keys.gguf.tensor(&format!("blk.{i}.{what}.weight")).is_some();
        let layer = |(i, mut d): (usize, DenseSpec)| {
            match rule.beside {
                Beside::Norms if !has(i, "ffn_gate_inp") => return FeedForward::Dense(d),
                Beside::Mean if !has(i, "ffn_up") => return FeedForward::Experts(experts.clone()),
                Beside::BesideMixer => d.n_ff = c.n_embd as usize,
                _ => {}
            }
            FeedForward::Both(d, experts.clone())
        };
        return Ok(DenseSpec::read(c)?.into_iter().enumerate().map(layer).collect());
    }
    let mut all = vec![FeedForward::Experts(experts); c.n_layer as usize];
    if c.arch.recurrent_layers == RecurrentLayers::OneHalf {
        // Layers of one half have a width of 0 where they have no network.
        let widths = keys.per_layer_from(0, "feed_forward_length", c.n_layer, MAX_WIDTH)?.unwrap_or_default();
        all.iter_mut().zip(widths).filter(|(_, n)| *n == 0).for_each(|(ffn, _)| *ffn = FeedForward::None);
    }
    let step = match rule.step {
        Step::Key => keys.size("interleave_moe_layer_step", MAX_LAYERS)?,
        Step::All | Step::One | Step::ByRouter => 1,
    };
    let plain = |i: u32| match rule.step {
        Step::ByRouter => keys.gguf.tensor(&format!("blk.{i}.ffn_gate_inp.weight")).is_none(),
        _ => i < lead || !(i + 1).is_multiple_of(step),
    };
    if (0..c.n_layer).any(plain) {
        for (i, d) in (0u32..).zip(DenseSpec::read(c)?).filter(|(i, _)| plain(*i)) {
            all[i as usize] = FeedForward::Dense(d);
        }
    }
    Ok(all)
}

/// A number that may be given per layer and must be the same in all of them.
fn uniform(c: &Common<'_>, key: &str, max: u32) -> Result<Option<u32>, Error> {
    let Some(all) = c.keys.per_layer(key, c.n_layer, max)? else { return Ok(None) };
    match all.iter().find(|n| **n != all[0]) {
        Some(other) => {
            Err(c.keys.unsupported(key, format!("{} and {other}", all[0]), "it has to be one for all layers"))
        }
        None => Ok(Some(all[0])),
    }
}

/// Expert groups: how many there are, how many are taken.
fn groups(c: &Common<'_>, n_expert: u32) -> Result<Option<(usize, usize)>, Error> {
    let keys = &c.keys;
    let n = keys.u32("expert_group_count")?.unwrap_or(0);
    if n >= n_expert {
        return Err(keys.wrong("expert_group_count", n, format!("fewer than the {n_expert} experts")));
    }
    if n <= 1 {
        return Ok(None);
    }
    if !n_expert.is_multiple_of(n) {
        return Err(keys.wrong("expert_group_count", n, format!("a divisor of the {n_expert} experts")));
    }
    let used = keys.size("expert_group_used_count", n - 1)?;
    Ok(Some((n as usize, used as usize)))
}

impl ExpertsSpec {
    pub(crate) fn ops(&self, spec: &Spec) -> Vec<Op> {
        let (e, row, ff) = (spec.n_embd, self.row(spec), self.n_ff);
        let used = self.routing.n_used;
        let mut ops = Vec::new();
        ops.extend(self.latent.map(|n| ExpertsOp::LatentDown { k: e, n }));
        ops.extend([
            match self.gate.has_matrix() {
                true => ExpertsOp::ExpertsGateUp { k: row, n: ff, used },
                false => ExpertsOp::ExpertsUp { k: row, n: ff, used },
            },
            ExpertsOp::ExpertsGate,
            ExpertsOp::ExpertsDown { k: ff, n: row, used },
        ]);
        ops.extend(self.latent.map(|k| ExpertsOp::LatentUp { k, n: e }));
        ops.extend(self.n_shared.map(|n| match self.gate.has_matrix() {
            true => ExpertsOp::Shared { k: e, n },
            false => ExpertsOp::SharedUp { k: e, n },
        }));
        let route = (!self.router_first).then(|| self.route(spec));
        route.into_iter().chain(ops.into_iter().map(Op::Experts)).collect()
    }

    /// The router's step.
    pub(crate) fn route(&self, spec: &Spec) -> Op {
        let Routing { n_expert, n_used, .. } = self.routing;
        Op::Experts(ExpertsOp::Route { k: spec.n_embd, experts: n_expert, used: n_used })
    }

    /// Length of the rows that experts read and write.
    pub(crate) fn row(&self, spec: &Spec) -> usize {
        self.latent.unwrap_or(spec.n_embd)
    }

    /// Rows that a chunk of `m` positions takes when each expert's begin a tile.
    pub(crate) fn rows(&self, m: usize) -> usize {
        let rows = m * self.routing.n_used;
        let groups = rows.min(self.routing.n_expert);
        // Each group leaves less than a tile free.
        (rows + groups * (TILE_ROWS - 1)).next_multiple_of(TILE_ROWS)
    }
}

impl<'g> ExpertsWeights<'g> {
    pub(crate) fn load(loader: &mut Loader<'g>, spec: &Spec, x: &ExpertsSpec, prefix: &str) -> Result<Self, Error> {
        let rule = spec.arch.experts.expect("experts come from a rule");
        let (e, row, ff, n) = (spec.n_embd, x.row(spec), x.n_ff, x.routing.n_expert);
        let name = |what: &str| format!("{prefix}.{what}");
        let norms = rule.beside == Beside::Norms;
        let router = match norms {
            // What is called its scale there are factors of its input.
            true => Linear { weight: loader.matrix(&name("ffn_gate_inp.weight"), e, n)?, bias: None },
            false => loader.linear(&name("ffn_gate_inp"), e, n, rule.router_bias)?,
        };
        let latent = match x.latent {
            None => None,
            Some(row) => Some(LatentWeights {
                down: loader.linear(&name("ffn_latent_down"), e, row, Presence::Never)?,
                up: loader.linear(&name("ffn_latent_up"), row, e, Presence::Never)?,
            }),
        };
        let fused = name("ffn_gate_up_exps");
        let (gate, up) = if rule.fused && loader.has(&format!("{fused}.weight")) {
            let both = loader.matrices(&format!("{fused}.weight"), row, 2 * ff, n)?;
            let half = |first| both.iter().map(|w| w.rows(first, ff).expect("half of the rows")).collect();
            (Some(Matrices { weights: half(0), bias: None }), Matrices { weights: half(ff), bias: None })
        } else {
            let mut matrices = |what: &str| Matrices::load(loader, &name(what), [row, ff, n], rule.biases);
            let gate = if x.gate.has_matrix() { Some(matrices("ffn_gate_exps")?) } else { None };
            (gate, matrices("ffn_up_exps")?)
        };
        let shared = match x.n_shared {
            None => None,
            Some(width) => Some(SharedWeights {
                gate: match x.gate.has_matrix() {
                    true => Some(loader.linear(&name("ffn_gate_shexp"), e, width, Presence::Never)?),
                    false => None,
                },
                up: loader.linear(&name("ffn_up_shexp"), e, width, Presence::Never)?,
                down: loader.linear(&name("ffn_down_shexp"), width, e, Presence::Never)?,
                mix: match rule.shared_mix {
                    true => Some(loader.linear(&name("ffn_gate_inp_shexp"), e, 1, Presence::Never)?),
                    false => None,
                },
            }),
        };
        let mut down = Matrices::load(loader, &name("ffn_down_exps"), [ff, row, n], rule.biases)?;
        let factors = if norms { Presence::Optional } else { Presence::Never };
        if let Some(factors) = loader.vector(&name("ffn_down_exps.scale"), n, factors)? {
            down.weights.iter_mut().zip(factors).for_each(|(w, by)| *w = w.times(by));
        }
        // Some files name it without `.bias`.
        let bias = if loader.has(&name("exp_probs_b")) { "exp_probs_b" } else { "exp_probs_b.bias" };
        let selection_bias = loader.vector(&name(bias), n, rule.selection_bias)?;
        Ok(ExpertsWeights { router, selection_bias, gate, up, down, latent, shared })
    }

    /// Types of the matrices that meet the normed residual stream as it is.
    pub(crate) fn input_types(&self) -> Vec<WeightType> {
        let mut types = vec![self.router.weight.ty()];
        types.extend(self.latent.iter().map(|l| l.down.weight.ty()));
        if let Some(s) = &self.shared {
            types.extend(s.gate.iter().chain([&s.up]).map(|l| l.weight.ty()));
            types.extend(s.mix.iter().map(|l| l.weight.ty()));
        }
        types
    }

    /// Types of the matrices that meet it position by position, grouped by expert.
    pub(crate) fn grouped_types(&self) -> Vec<WeightType> {
        self.gate.iter().chain([&self.up]).map(|m| m.weights[0].ty()).collect()
    }
}

impl<'g> Matrices<'g> {
    fn load(loader: &mut Loader<'g>, stem: &str, [k, n, count]: [usize; 3], bias: Presence) -> Result<Self, Error> {
        let weights = loader.matrices(&format!("{stem}.weight"), k, n, count)?;
        Ok(Matrices { weights, bias: loader.table(&format!("{stem}.bias"), n, count, bias)? })
    }

    /// What is added to expert `i`'s product.
    pub fn bias(&self, i: usize) -> Option<&[f32]> {
        let n = self.weights[i].n();
        self.bias.as_ref().map(|b| &b[i * n..][..n])
    }
}

impl ExpertsOp {
    /// Multiplications and additions over `m` positions.
    pub(crate) fn flops(&self, m: u64) -> u64 {
        match self {
            ExpertsOp::Route { k, experts, .. } => 2 * m * (*k * *experts) as u64,
            ExpertsOp::LatentDown { k, n } | ExpertsOp::LatentUp { k, n } => 2 * m * (*k * *n) as u64,
            ExpertsOp::ExpertsGateUp { k, n, used } => 4 * m * (*k * *n * *used) as u64,
            ExpertsOp::ExpertsUp { k, n, used } | ExpertsOp::ExpertsDown { k, n, used } => {
                2 * m * (*k * *n * *used) as u64
            }
            ExpertsOp::Shared { k, n } => 6 * m * (*k * *n) as u64,
            ExpertsOp::SharedUp { k, n } => 4 * m * (*k * *n) as u64,
            ExpertsOp::ExpertsGate => 0,
        }
    }
}

/// The mixtures of a model.
pub(crate) fn layers(spec: &Spec) -> impl Iterator<Item = &ExpertsSpec> {
    spec.layers.iter().filter_map(|l| l.ffn.experts())
}

/// Bytes that a chunk takes: the normed rows; per expert and position inputs, gate, up and outputs as f32, inputs and
/// gated values as rounded tiles; router outputs and choices; the experts' rows where these are not an embedding's, their sum as
/// f32 and rounded; the shared expert as a plain network.
pub(crate) fn memory(spec: &Spec, chunk: usize) -> usize {
    let widest = |f: &dyn Fn(&ExpertsSpec) -> usize| layers(spec).map(f).max().unwrap_or(0);
    let e = spec.n_embd;
    let (rows, row) = (widest(&|x| x.rows(chunk)), widest(&|x| x.row(spec)));
    let latent = widest(&|x| x.latent.unwrap_or(0));
    let (ff, shared) = (widest(&|x| x.n_ff), widest(&|x| x.n_shared.unwrap_or(0)));
    let (experts, used) = (widest(&|x| x.routing.n_expert), widest(&|x| x.routing.n_used));
    if rows == 0 {
        return 0;
    }
    // The router meets the input unrounded: one more kind of tile.
    4 * (rows * (2 * row + 3 * ff) + chunk * (2 * e + experts + 4 * used + 3 * latent + 4 * shared))
}

/// The distinct types that the matrices of all layers have, by `f`.
pub(crate) fn types_of<'a>(
    layers: impl Iterator<Item = &'a ExpertsWeights<'a>>,
    f: impl Fn(&'a ExpertsWeights<'a>) -> Vec<WeightType>,
) -> Vec<WeightType> {
    distinct(layers.flat_map(f))
}
