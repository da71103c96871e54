//! Carries a plan out on the host's kernels: what all layers have in common. The steps of a kind of layer are in the file
//! of its name.

mod altup;
mod attention;
mod both;
mod delta;
mod dense;
mod experts;
mod latent;
mod linear;
mod mamba;
mod per_layer;
mod shortconv;

use crate::arch::NormKind;
use crate::layer::LayerWeights;
use crate::model::Model;
use crate::offload::Offload;
use crate::plan::{Command, Half, Input, Op, Plan, Work};
use crate::weights::{Linear, Norm};
use crate::{Error, Isa, KvSink};
use kvlayout::{CacheType, Part, Spread};
use npu_kernels::host::acts::Activations;
use npu_kernels::host::gemm::{self, Job, Join, gemm, gemm_gated};
use npu_kernels::host::recurrent::conv::History;
use npu_kernels::host::rowops;
use npu_kernels::host::{Columns, Kernel, Pool, Slab};
use npu_kernels::with_kernel;
use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How to run.
#[derive(Copy, Clone, Debug)]
pub struct Options {
    /// Threads.
    pub threads: usize,
    /// Positions per chunk.
    pub chunk: usize,
    /// Instruction set.
    pub isa: Isa,
    /// Type of the decoder's K cache: what attention reads is rounded to it.
    pub type_k: CacheType,
    /// Type of the decoder's V cache.
    pub type_v: CacheType,
    /// The decoder's context size for one sequence, where known: some models have other rotations in a larger one.
    pub n_ctx: Option<u32>,
    /// The decoder rotates the rows of quantised caches.
    pub attn_rot: bool,
    /// The decoder's attention is the fused kind, which rounds more.
    pub flash_attn: bool,
}

impl Default for Options {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let (type_k, type_v) = (CacheType::F16, CacheType::F16);
        let isa = Isa::detect();
        Options { threads, chunk: 512, isa, type_k, type_v, n_ctx: None, attn_rot: true, flash_attn: true }
    }
}

/// The caller's side of a run.
pub trait Hooks: Send {
    /// Asked between any two commands; `true` ends the run with [`Error::Stopped`].
    fn stop(&self) -> bool;
    /// Told after every chunk of every layer.
    fn progress(&mut self, layer: usize, n_layer: usize, rows: usize, n_tokens: usize);
}

/// Where the time went, in milliseconds of wall time.
#[derive(Copy, Clone, Default, Debug)]
pub struct Timings {
    /// All of it.
    pub prefill_ms: f64,
    /// Matrix products.
    pub gemm_ms: f64,
    /// Attention.
    pub attention_ms: f64,
    /// The sink.
    pub write_ms: f64,
    /// Everything else.
    pub other_ms: f64,
    /// When the first matrix product began, if there was one.
    pub first_gemm: Option<Instant>,
}

/// Computes keys and values of all layers for `tokens` at positions 0, 1, …, and hands them to `sink`.
///
/// # Errors
/// [`Error::Token`] for an id outside the vocabulary, [`Error::NotFinite`] and the sink's own for values that must not
/// be handed over, [`Error::Stopped`] when asked to.
pub fn run(
    model: &Model<'_>,
    tokens: &[u32],
    options: &Options,
    sink: &mut dyn KvSink,
    hooks: &mut dyn Hooks,
) -> Result<Timings, Error> {
    run_on(model, tokens, options, None, sink, hooks)
}

/// [`run`], with matrix products on a device where it has kernels for them. Whatever goes wrong there is made up for by the
/// host; `offload` says afterwards what was done where, and why.
///
/// # Errors
/// As [`run`].
pub fn run_on(
    model: &Model<'_>,
    tokens: &[u32],
    options: &Options,
    offload: Option<&Mutex<Offload>>,
    sink: &mut dyn KvSink,
    hooks: &mut dyn Hooks,
) -> Result<Timings, Error> {
    let n_vocab = model.n_vocab();
    if let Some(index) = tokens.iter().position(|t| *t >= n_vocab) {
        return Err(Error::Token { index, id: tokens[index], n_vocab });
    }
    model.check_context(options.n_ctx)?;
    if let Some(positions) = &model.weights().positions
        && tokens.len() as u64 > positions.ne[1]
    {
        return Err(Error::TooLong { n_tokens: tokens.len(), positions: positions.ne[1] });
    }
    let pool = Pool::new(options.threads)?;
    let plan = Plan::new(model.spec(), tokens.len(), options.chunk);
    let started = Instant::now();
    // All of it on a thread of the pool, which then takes part in every step, instead of waking another and waiting for it.
    let mut timings = pool.run(|| {
        with_kernel!(options.isa, kernel => {
            let host = Host {
                kernel,
                pool: &pool,
                model,
                round_k: options.type_k,
                round_v: options.type_v,
                round_q: round_q(options),
                n_ctx: options.n_ctx,
                attn_rot: options.attn_rot,
                flash_attn: options.flash_attn,
                offload,
            };
            Run::new(host, tokens, &plan).all(&plan, sink, hooks)
        })
    })?;
    timings.prefill_ms = ms(started.elapsed());
    timings.other_ms = timings.prefill_ms - timings.gemm_ms - timings.attention_ms - timings.write_ms;
    Ok(timings)
}

fn ms(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

/// What queries are rounded to before they meet keys. ggml's tiled attention, which takes batches of 64 rows and more,
/// keeps them f32; it exists for caches whose keys and values are both f16 or both f32 (`use_tiled` in
/// `ggml_compute_forward_flash_attn_ext_f16`). For others, queries become what the keys are, or 8-bit blocks where keys are
/// blocks (`vec_dot_type`).
fn round_q(options: &Options) -> CacheType {
    match (options.type_k, options.type_v) {
        (CacheType::F16, CacheType::F16) | (CacheType::F32, CacheType::F32) => CacheType::F32,
        (keys, _) if keys.is_quantised() => CacheType::Q8_0,
        (keys, _) => keys,
    }
}

/// The pool's threads, lent to a sink.
struct Threads<'a>(&'a Pool);

impl Spread for Threads<'_> {
    fn each(&self, n: usize, f: &(dyn Fn(usize) + Sync)) {
        self.0.for_each(n, f);
    }
}

/// What every step needs to know.
#[derive(Copy, Clone)]
struct Host<'a, K> {
    kernel: K,
    pool: &'a Pool,
    model: &'a Model<'a>,
    /// What attention's keys and values are rounded to: the decoder reads them back from its cache.
    round_k: CacheType,
    round_v: CacheType,
    round_q: CacheType,
    /// Quantised rows are rotated before they are stored.
    attn_rot: bool,
    /// The decoder's attention is fused.
    flash_attn: bool,
    /// The decoder's context.
    n_ctx: Option<u32>,
    /// The device beside the host, if there is one. Asked once for each group of projections, and by one thread.
    offload: Option<&'a Mutex<Offload>>,
}

impl<'a, K: Kernel> Host<'a, K> {
    /// The tensors of a command's layer.
    fn weights(&self, c: &Command) -> &'a LayerWeights<'a> {
        &self.model.weights().layers[c.layer]
    }

    /// Makes rows of `k` values, one for each of the command's, and rounds them for what they will be multiplied with: `row(i, buffer)`
    /// writes row `i`. Complains about the first that is not finite, which rounding to integers would hide; `what` names it.
    fn fill(
        &self,
        acts: &mut Activations,
        c: &Command,
        k: usize,
        what: &'static str,
        row: impl Fn(usize, &mut [f32]) + Sync + Send,
    ) -> Result<(), Error> {
        let bad = Bad::default();
        acts.reshape(c.rows.len(), k);
        acts.fill(self.kernel, self.pool, |i, buffer| {
            row(i, buffer);
            self.kernel.rows(|| bad.check(buffer, c.rows.start + i));
        });
        bad.result(c.layer, what)
    }

    /// `out = acts * weight + bias` for projections of the same activations; `out` is row-major, a row per position.
    fn project(&self, acts: &Activations, mut parts: Vec<(&Linear<'_>, &mut [f32])>) {
        if let (Some(offload), Some(rows)) = (self.offload, acts.rows()) {
            let mut offload = offload.lock().unwrap_or_else(PoisonError::into_inner);
            parts = offload.project(self.pool, rows, acts.k(), parts);
            if parts.is_empty() {
                return;
            }
        }
        self.project_on_host(acts, parts);
    }

    /// The same, and never on a device: for experts, whose router would choose others by logits rounded to 8 bits, and for what
    /// recurrent states are made of, where errors add up over positions.
    fn project_on_host(&self, acts: &Activations, parts: Vec<(&Linear<'_>, &mut [f32])>) {
        let mut jobs = Vec::with_capacity(parts.len());
        for (linear, out) in parts {
            let out = Columns::new(out, acts.m(), linear.weight.n());
            jobs.push(Job { weight: linear.weight, bias: linear.bias.as_deref(), out });
        }
        gemm(self.kernel, self.pool, acts, &jobs);
    }

    /// What `join` makes of the outputs of two projections, on the host (see [`gemm_gated`]).
    fn project_gated(&self, acts: &Activations, gate: &Linear<'_>, up: &Linear<'_>, join: Join<'_>, out: &mut [f32]) {
        fn part<'a>(linear: &'a Linear<'_>) -> gemm::Part<'a> {
            gemm::Part { weight: linear.weight, bias: linear.bias.as_deref() }
        }
        let out = Columns::new(out, acts.m(), up.weight.n());
        gemm_gated(self.kernel, self.pool, acts, part(gate), part(up), join, &out);
    }

    /// Rows of the embedding's length become their RMS norm, with the same row of `others` added.
    fn norm_and_add(&self, norm: &Norm, rows: &mut [f32], others: &[f32]) {
        let (e, eps) = (self.model.spec().n_embd, self.model.spec().eps);
        let mut rows: Vec<&mut [f32]> = rows.chunks_exact_mut(e).collect();
        self.pool.for_each_mut(&mut rows, |i, row| {
            SCRATCH.with_borrow_mut(|(buffer, _)| {
                buffer.resize(e, 0.0);
                self.kernel.rows(|| {
                    norm.apply(NormKind::Rms, eps, row, buffer);
                    row.copy_from_slice(buffer);
                    rowops::add(row, &others[i * e..][..e]);
                });
            });
        });
    }
}

/// What passes between the residual stream and the kinds of layers.
struct Stage {
    /// The normed residual rows of a chunk, rounded: the input of a half. Kept unrounded as well for a device, and for experts,
    /// who take rows one by one.
    input: Activations,
    /// Its output, one row per position of the chunk.
    out: Slab,
}

/// Buffers and state of one run.
struct Run<'a, K> {
    host: Host<'a, K>,
    tokens: &'a [u32],
    /// The residual stream of every position, row-major.
    x: Slab,
    stage: Stage,
    attention: attention::Room,
    latent: latent::Room,
    delta: delta::Room,
    shortconv: shortconv::Room,
    mamba: mamba::Room,
    dense: dense::Room,
    experts: experts::Room,
    both: both::Room,
    per_layer: per_layer::Room,
    altup: altup::Room,
}

thread_local! {
    static SCRATCH: RefCell<(Vec<f32>, Vec<half::f16>)> = RefCell::default();
}

impl<'a, K: Kernel> Run<'a, K> {
    fn new(host: Host<'a, K>, tokens: &'a [u32], plan: &Plan) -> Run<'a, K> {
        let (spec, weights) = (host.model.spec(), host.model.weights());
        let (m, e) = (plan.chunk, spec.n_embd);
        let by_row = spec.layers.iter().any(|l| l.ffn.experts().is_some());
        let mut run = Run {
            host,
            tokens,
            x: Slab::new(tokens.len() * e),
            stage: Stage { input: Activations::new(m, e, &weights.input_types()), out: Slab::new(m * e) },
            attention: attention::Room::new(host.model, m, tokens.len()),
            latent: latent::Room::new(host.model, m, tokens.len()),
            delta: delta::Room::new(host.model, m, tokens.len()),
            shortconv: shortconv::Room::new(host.model, m, tokens.len()),
            mamba: mamba::Room::new(host.model, m, tokens.len()),
            dense: dense::Room::new(host.model, m),
            experts: experts::Room::new(host.model, m),
            both: both::Room::new(host.model, m),
            per_layer: per_layer::Room::new(host.model, m),
            altup: altup::Room::new(host.model, m, tokens.len()),
        };
        if by_row || spec.altup.is_some() || host.offload.is_some() {
            run.stage.input.keep_rows();
        }
        if host.offload.is_some() {
            run.attention.keep_rows();
            run.dense.keep_rows();
        }
        run
    }

    fn all(mut self, plan: &Plan, sink: &mut dyn KvSink, hooks: &mut dyn Hooks) -> Result<Timings, Error> {
        let mut t = Timings::default();
        let n_layer = self.host.model.spec().last_layer() + 1;
        let mut layer = 0;
        for c in plan.commands() {
            let c = &c;
            if hooks.stop() {
                return Err(Error::Stopped);
            }
            if let Some(offload) = self.host.offload.filter(|_| c.layer != layer) {
                layer = c.layer;
                offload.lock().unwrap_or_else(PoisonError::into_inner).next_layer();
            }
            let (started, work) = (Instant::now(), c.work());
            if work == Work::Gemm {
                t.first_gemm.get_or_insert(started);
            }
            match &c.op {
                Op::Embed => self.embed(c)?,
                Op::Norm(input) => self.norm(c, *input)?,
                Op::Attention(op) => t.write_ms += self.attention.step(&self.host, &mut self.stage, c, op, sink)?,
                Op::Latent(op) => t.write_ms += self.latent.step(&self.host, &mut self.stage, c, op, sink)?,
                Op::Linear(op) => linear::step(&self.host, &mut self.stage, c, op),
                Op::Delta(op) => t.write_ms += self.delta.step(&self.host, &mut self.stage, c, op, sink)?,
                Op::ShortConv(op) => t.write_ms += self.shortconv.step(&self.host, &mut self.stage, c, op, sink)?,
                Op::Mamba(op) => t.write_ms += self.mamba.step(&self.host, &mut self.stage, c, op, sink)?,
                Op::Dense(op) => self.dense.step(&self.host, &mut self.stage, c, op)?,
                Op::Experts(op) => self.experts.step(&self.host, &mut self.stage, c, op)?,
                Op::Both(op) => self.both.step(&self.host, &mut self.stage, c, op),
                Op::PerLayer(op) => self.per_layer.step(&self.host, &mut self.stage, c, op, self.tokens)?,
                Op::AltUp(op) => self.altup.step(&self.host, &mut self.stage, &mut self.x, c, op)?,
                Op::Scale => self.scale(c),
                Op::Join(half) => self.join(c, *half),
            }
            let took = ms(started.elapsed());
            match work {
                Work::Gemm => t.gemm_ms += took,
                Work::Attention => t.attention_ms += took,
                Work::Other => {}
            }
            if c.ends {
                hooks.progress(c.layer, n_layer, c.rows.end, plan.n_tokens);
            }
        }
        Ok(t)
    }

    fn embed(&mut self, c: &Command) -> Result<(), Error> {
        let spec = self.host.model.spec();
        let weights = self.host.model.weights();
        let (mut vector, mut normed) = (vec![0.0; spec.n_embd], vec![0.0; spec.n_embd]);
        for at in c.rows.clone() {
            let row = &mut self.x[at * spec.n_embd..][..spec.n_embd];
            embedding(self.host.model, self.tokens[at], row)?;
            if let Some(positions) = &weights.positions {
                let bytes = positions.row(at as u64).expect("the prompt's length was checked");
                gguf::dequant::dequantize(positions.ty, bytes, &mut vector)?;
                rowops::add(row, &vector);
            }
            if let Some(norm) = &weights.norm {
                norm.apply(spec.arch.norm, spec.eps, row, &mut normed);
                row.copy_from_slice(&normed);
            }
        }
        Ok(())
    }

    /// The norm of residual rows; complains about the first row that is not finite.
    fn norm(&mut self, c: &Command, what: Input) -> Result<(), Error> {
        let host = self.host;
        let (weights, spec) = (host.weights(c), host.model.spec());
        let (e, eps, kind) = (spec.n_embd, spec.eps, spec.arch.norm);
        let (both, plain) = (weights.ffn.both(), Norm::default());
        let (norm, what, factors) = match what {
            Input::Mixer => (weights.norm.as_ref(), "the input of attention", None),
            Input::FeedForward => (weights.ffn_norm.as_ref(), "the input of the feed-forward network", None),
            Input::Router => (
                Some(&plain),
                "the input of the router",
                both.and_then(|b| Some((1.0 / (e as f32).sqrt(), b.router.as_ref()?))),
            ),
            Input::FirstRouter => (None, "the input of the router", None),
            Input::Experts => (both.and_then(|b| b.norm.as_ref()), "the input of the experts", None),
            Input::PerLayer => {
                let scale = weights.per_layer.as_ref().and_then(|w| w.scale.as_ref());
                (None, "what a layer left behind", scale.map(|s| (1.0, s)))
            }
        };
        let x = &self.x;
        host.fill(&mut self.stage.input, c, e, what, |i, row| {
            let x = &x[(c.rows.start + i) * e..][..e];
            match norm {
                Some(norm) => host.kernel.rows(|| norm.apply(kind, eps, x, row)),
                None => row.copy_from_slice(x),
            }
            if let Some((by, factors)) = factors {
                row.iter_mut().zip(factors).for_each(|(v, f)| *v = *v * by * f);
            }
        })
    }

    /// The residual stream times the layer's number.
    fn scale(&mut self, c: &Command) {
        let Some(by) = self.host.weights(c).out_scale else { return };
        let e = self.host.model.spec().n_embd;
        self.x[c.rows.start * e..c.rows.end * e].iter_mut().for_each(|v| *v *= by);
    }

    /// `x += post_norm(out)`.
    fn join(&mut self, c: &Command, half: Half) {
        let Host { kernel, pool, model, .. } = self.host;
        let weights = self.host.weights(c);
        let norm = match half {
            Half::Mixer => weights.post_norm.as_ref(),
            Half::FeedForward => weights.ffn_post_norm.as_ref(),
            Half::PerLayer => weights.per_layer.as_ref().map(|w| &w.norm),
        };
        let spec = model.spec();
        let (e, eps, kind, scale) = (spec.n_embd, spec.eps, spec.arch.norm, spec.residual_scale);
        let out = &self.stage.out;
        let mut rows: Vec<&mut [f32]> = self.x[c.rows.start * e..c.rows.end * e].chunks_exact_mut(e).collect();
        pool.for_each_mut(&mut rows, |i, x| {
            let out = &out[i * e..][..e];
            match norm {
                None if scale != 1.0 => kernel.rows(|| rowops::add_scaled(x, out, scale)),
                None => kernel.rows(|| rowops::add(x, out)),
                Some(norm) => SCRATCH.with_borrow_mut(|(buffer, _)| {
                    buffer.resize(e, 0.0);
                    kernel.rows(|| {
                        norm.apply(kind, eps, out, buffer);
                        rowops::add(x, buffer);
                    });
                }),
            }
        });
    }
}

/// The embedding of a token, scaled as the model wants it.
fn embedding(model: &Model<'_>, token: u32, row: &mut [f32]) -> Result<(), Error> {
    let (table, scale) = (&model.weights().token_embd, model.spec().embedding_scale);
    let bytes = table.row(u64::from(token)).expect("ids were checked against the vocabulary");
    gguf::dequant::dequantize(table.ty, bytes, row)?;
    if scale != 1.0 {
        row.iter_mut().for_each(|v| *v *= scale);
    }
    Ok(())
}

/// After the last position hands a recurrent layer's memory over, as far as the sink takes it: the convolution's history and
/// the state. Returns the milliseconds that the sink took.
fn put_state(
    sink: &mut dyn KvSink,
    c: &Command,
    n_tokens: usize,
    history: &History,
    state: &[f32],
) -> Result<f64, Error> {
    if c.rows.end < n_tokens {
        return Ok(0.0);
    }
    let (started, layer) = (Instant::now(), c.layer as u32);
    for (part, row) in [(Part::R, &*history.to_cell()), (Part::S, state)] {
        let last = sink.wants(layer, part);
        if !last.is_empty() {
            sink.put_rows(layer, part, last, row)?;
        }
    }
    Ok(ms(started.elapsed()))
}

/// The first position at which something was not finite. Rounding to integers would hide it.
struct Bad(AtomicUsize);

impl Default for Bad {
    fn default() -> Self {
        Bad(AtomicUsize::new(usize::MAX))
    }
}

impl Bad {
    #[inline(always)]
    fn check(&self, row: &[f32], position: usize) {
        // 0 * x is NaN for NaN and infinity, and 0 for everything else.
        let mut lanes = [0f32; 16];
        let (chunks, rest) = row.as_chunks::<16>();
        for c in chunks {
            lanes.iter_mut().zip(c).for_each(|(l, v)| *l += v * 0.0);
        }
        let total: f32 = lanes.iter().sum::<f32>() + rest.iter().map(|v| v * 0.0).sum::<f32>();
        if total != 0.0 {
            self.0.fetch_min(position, Ordering::Relaxed);
        }
    }

    fn result(self, layer: usize, what: &'static str) -> Result<(), Error> {
        match self.0.into_inner() {
            usize::MAX => Ok(()),
            position => Err(Error::NotFinite { layer: layer as u32, position: position as u32, what }),
        }
    }
}
