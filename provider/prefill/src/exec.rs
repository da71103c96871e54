//! Carries a plan out on the host's kernels.

use crate::arch::Activation;
use crate::model::{Model, precision, wanted};
use crate::plan::{Command, Op, Plan};
use crate::{Error, Isa, KvSink};
use kvlayout::{CacheType, Part};
use npu_kernels::host::acts::Activations;
use npu_kernels::host::attention::{HeadCache, Heads, attention};
use npu_kernels::host::gemm::{Job, gemm};
use npu_kernels::host::rowops::{self, Precision};
use npu_kernels::host::{Columns, Kernel, Pool};
use npu_kernels::with_kernel;
use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};
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
}

impl Default for Options {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Options { threads, chunk: 512, isa: Isa::detect(), type_k: CacheType::F16, type_v: CacheType::F16 }
    }
}

/// The caller's side of a run.
pub trait Hooks {
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
    let n_vocab = model.n_vocab();
    if let Some(index) = tokens.iter().position(|t| *t >= n_vocab) {
        return Err(Error::Token { index, id: tokens[index], n_vocab });
    }
    let pool = Pool::new(options.threads)?;
    let plan = Plan::new(model.spec(), tokens.len(), options.chunk);
    let started = Instant::now();
    let mut timings = with_kernel!(options.isa, kernel => {
        Run::new(kernel, &pool, model, tokens, options, &plan).all(&plan, sink, hooks)?
    });
    timings.prefill_ms = ms(started.elapsed());
    timings.other_ms = timings.prefill_ms - timings.gemm_ms - timings.attention_ms - timings.write_ms;
    Ok(timings)
}

fn ms(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

/// What queries are rounded to before they meet keys. ggml's tiled attention, which takes batches of 64 rows and more,
/// keeps them f32; it exists for caches whose keys and values are both f16 or both f32 (`use_tiled` in
/// `ggml_compute_forward_flash_attn_ext_f16`). For others, queries become what the keys are.
fn round_q(options: &Options) -> Precision {
    match (options.type_k, options.type_v) {
        (CacheType::F16, CacheType::F16) | (CacheType::F32, CacheType::F32) => Precision::F32,
        (keys, _) => precision(keys),
    }
}

/// Buffers and state of one run. Row-major, one row per position of the chunk unless said otherwise.
struct Run<'a, K> {
    kernel: K,
    pool: &'a Pool,
    model: &'a Model<'a>,
    tokens: &'a [u32],
    /// What attention's keys and values are rounded to: the decoder reads them back from its cache.
    round_k: Precision,
    round_v: Precision,
    round_q: Precision,
    /// The residual stream of every position.
    x: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attn: Vec<f32>,
    out: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    /// Rounded activations of the embedding's width, of attention's, of the feed-forward network's.
    acts_embd: Activations,
    acts_attn: Activations,
    acts_ff: Activations,
    /// Keys and values of the layer at hand, per key-value head.
    caches: Vec<HeadCache>,
    /// cos and sin per position of the chunk, for the rotation at hand.
    table: Vec<f32>,
    table_of: Option<(usize, usize)>,
}

thread_local! {
    static SCRATCH: RefCell<(Vec<f32>, Vec<half::f16>)> = RefCell::default();
}

impl<'a, K: Kernel> Run<'a, K> {
    fn new(
        kernel: K,
        pool: &'a Pool,
        model: &'a Model<'a>,
        tokens: &'a [u32],
        options: &Options,
        plan: &Plan,
    ) -> Run<'a, K> {
        let spec = model.spec();
        let m = plan.chunk;
        let widest = |f: &dyn Fn(&crate::LayerSpec) -> usize| spec.layers.iter().map(f).max().unwrap_or(0);
        let (q, kv) = (widest(&|l| l.n_head), widest(&|l| l.n_head_kv));
        let ff = widest(&|l| l.n_ff);
        let types = model.weights().types();
        Run {
            kernel,
            pool,
            model,
            tokens,
            round_k: precision(options.type_k),
            round_v: precision(options.type_v),
            round_q: round_q(options),
            x: vec![0.0; tokens.len() * spec.n_embd],
            q: vec![0.0; m * q * spec.head_k],
            k: vec![0.0; m * kv * spec.head_k],
            v: vec![0.0; m * kv * spec.head_v],
            attn: vec![0.0; m * q * spec.head_v],
            out: vec![0.0; m * spec.n_embd],
            gate: vec![0.0; m * ff],
            up: vec![0.0; m * ff],
            acts_embd: Activations::new(m, spec.n_embd, &types[0]),
            acts_attn: Activations::new(m, q * spec.head_v, &types[1]),
            acts_ff: Activations::new(m, ff, &types[2]),
            caches: (0..kv).map(|_| HeadCache::new(spec.head_k, spec.head_v, tokens.len())).collect(),
            table: Vec::new(),
            table_of: None,
        }
    }

    fn all(mut self, plan: &Plan, sink: &mut dyn KvSink, hooks: &mut dyn Hooks) -> Result<Timings, Error> {
        let mut t = Timings::default();
        let n_layer = self.model.spec().layers.len();
        for c in plan.commands() {
            let c = &c;
            if hooks.stop() {
                return Err(Error::Stopped);
            }
            let started = Instant::now();
            if matches!(c.op, Op::Qkv { .. }) {
                t.first_gemm.get_or_insert(started);
            }
            match &c.op {
                Op::Embed => self.embed(c)?,
                Op::AttnNorm => self.attn_norm(c)?,
                Op::Qkv { .. } => self.qkv(c),
                Op::StoreKv => t.write_ms += self.store_kv(c, sink)?,
                Op::Attention { window, .. } => self.attention(c, *window),
                Op::AttnOut { .. } => self.attn_out(c)?,
                Op::FfnNorm => self.ffn_norm(c)?,
                Op::GateUp { .. } => self.gate_up(c),
                Op::Gate => self.gate(c)?,
                Op::Down { .. } => self.down(c),
                Op::Residual => self.residual(c),
            }
            let took = ms(started.elapsed());
            match &c.op {
                Op::Qkv { .. } | Op::AttnOut { .. } | Op::GateUp { .. } | Op::Down { .. } => t.gemm_ms += took,
                Op::Attention { .. } => t.attention_ms += took,
                _ => {}
            }
            if matches!(c.op, Op::Residual) || (c.op == Op::StoreKv && c.layer + 1 == n_layer) {
                hooks.progress(c.layer, n_layer, c.rows.end, plan.n_tokens);
            }
        }
        Ok(t)
    }

    fn embed(&mut self, c: &Command) -> Result<(), Error> {
        let spec = self.model.spec();
        let table = &self.model.weights().token_embd;
        let scale = if spec.arch.scaled_embedding { (spec.n_embd as f32).sqrt() } else { 1.0 };
        for at in c.rows.clone() {
            let row = &mut self.x[at * spec.n_embd..][..spec.n_embd];
            let bytes = table.row(u64::from(self.tokens[at])).expect("ids were checked against the vocabulary");
            gguf::dequant::dequantize(table.ty, bytes, row)?;
            if spec.arch.scaled_embedding {
                row.iter_mut().for_each(|v| *v *= scale);
            }
        }
        Ok(())
    }

    /// Fills `acts` with the norm of residual rows; complains about the first row that is not finite.
    fn norm(&self, c: &Command, acts: &mut Activations, weight: &[f32], what: &'static str) -> Result<(), Error> {
        let (e, eps) = (self.model.spec().n_embd, self.model.spec().eps);
        let bad = Bad::default();
        let kernel = self.kernel;
        acts.reshape(c.rows.len(), e);
        acts.fill(kernel, self.pool, |i, row| {
            let x = &self.x[(c.rows.start + i) * e..][..e];
            kernel.rows(|| rowops::rms_norm(x, weight, eps, row));
            bad.check(row, c.rows.start + i);
        });
        bad.result(c.layer, what)
    }

    fn attn_norm(&mut self, c: &Command) -> Result<(), Error> {
        let weights = self.model.weights();
        let mut acts = std::mem::replace(&mut self.acts_embd, Activations::new(0, 0, &[]));
        let result = self.norm(c, &mut acts, &weights.layers[c.layer].attn_norm, "the input of attention");
        self.acts_embd = acts;
        result
    }

    fn qkv(&mut self, c: &Command) {
        let w = &self.model.weights().layers[c.layer];
        let m = c.rows.len();
        let Op::Qkv { n, .. } = c.op else { return };
        let mut jobs = Vec::with_capacity(3);
        for (i, (linear, out)) in
            [(&w.q, &mut self.q), (&w.k, &mut self.k), (&w.v, &mut self.v)].into_iter().enumerate()
        {
            if n[i] > 0 {
                let out = Columns::new(&mut out[..m * n[i]], m, n[i]);
                jobs.push(Job { weight: linear.weight, bias: linear.bias.as_deref(), out });
            }
        }
        gemm(self.kernel, self.pool, &self.acts_embd, &jobs);
    }

    /// Returns the milliseconds that the sink took.
    fn store_kv(&mut self, c: &Command, sink: &mut dyn KvSink) -> Result<f64, Error> {
        let spec = self.model.spec();
        let (l, w) = (&spec.layers[c.layer], &self.model.weights().layers[c.layer]);
        let m = c.rows.len();
        let (hk, hv, eps) = (spec.head_k, spec.head_v, spec.eps);
        let pairing = spec.arch.pairing;
        let last = c.layer + 1 == spec.layers.len();
        self.rope_table(c, l.rope);
        let n_rot = spec.ropes[l.rope].n_rot;
        let (nq, nk, nv) = (if last { 0 } else { l.n_head * hk }, l.n_head_kv * hk, l.n_head_kv * hv);
        // Norm and rotation, in place.
        let (kernel, table, round_q) = (self.kernel, &self.table, self.round_q);
        let turn = |i: usize, heads: &mut [f32], norm: Option<&Vec<f32>>| {
            let (cos, sin) = table[i * n_rot..][..n_rot].split_at(n_rot / 2);
            kernel.rows(|| {
                for head in heads.chunks_exact_mut(hk) {
                    if let Some(norm) = norm {
                        rowops::rms_norm_in_place(head, norm, eps);
                    }
                    rowops::rope(head, pairing, cos, sin);
                }
            });
        };
        let mut rows: Vec<(&mut [f32], &mut [f32])> = Vec::with_capacity(m);
        let mut q_rest = &mut self.q[..m * nq];
        let mut k_rest = &mut self.k[..m * nk];
        for _ in 0..m {
            let (q, rest) = q_rest.split_at_mut(nq);
            q_rest = rest;
            let (k, rest) = k_rest.split_at_mut(nk);
            k_rest = rest;
            rows.push((q, k));
        }
        self.pool.for_each_mut(&mut rows, |i, (q, k)| {
            turn(i, q, w.attn_q_norm.as_ref());
            turn(i, k, w.attn_k_norm.as_ref());
            SCRATCH.with_borrow_mut(|(_, half)| rowops::round_to(round_q, q, half));
        });
        drop(rows);

        let started = Instant::now();
        let positions = c.rows.start as u32..c.rows.end as u32;
        if wanted(sink, c.layer as u32) {
            sink.put_rows(c.layer as u32, Part::K, positions.clone(), &self.k[..m * nk])?;
            sink.put_rows(c.layer as u32, Part::V, positions, &self.v[..m * nv])?;
        }
        let took = ms(started.elapsed());

        if !last {
            let mut half = Vec::new();
            rowops::round_to(self.round_k, &mut self.k[..m * nk], &mut half);
            rowops::round_to(self.round_v, &mut self.v[..m * nv], &mut half);
            let (k, v) = (&self.k[..m * nk], &self.v[..m * nv]);
            let fresh = c.rows.start == 0;
            self.pool.for_each_mut(&mut self.caches[..l.n_head_kv], |h, cache| {
                if fresh {
                    cache.clear();
                }
                for i in 0..m {
                    cache.push(&k[i * nk + h * hk..][..hk], &v[i * nv + h * hv..][..hv]);
                }
            });
        }
        Ok(took)
    }

    /// cos and sin of the chunk's positions, unless they are at hand already.
    fn rope_table(&mut self, c: &Command, rope: usize) {
        if self.table_of == Some((rope, c.rows.start)) {
            return;
        }
        self.table_of = Some((rope, c.rows.start));
        let rope = &self.model.spec().ropes[rope];
        self.table.resize(c.rows.len() * rope.n_rot, 0.0);
        let mut rows: Vec<&mut [f32]> = self.table.chunks_exact_mut(rope.n_rot).collect();
        self.pool.for_each_mut(&mut rows, |i, row| {
            let (cos, sin) = row.split_at_mut(rope.n_rot / 2);
            rope.table((c.rows.start + i) as u32, cos, sin);
        });
    }

    fn attention(&mut self, c: &Command, window: Option<u32>) {
        let spec = self.model.spec();
        let l = &spec.layers[c.layer];
        let m = c.rows.len();
        let (hk, hv) = (spec.head_k, spec.head_v);
        let heads = Heads {
            q: &self.q[..m * l.n_head * hk],
            n_head: l.n_head,
            caches: &self.caches[..l.n_head_kv],
            m,
            first: c.rows.start,
            scale: spec.attn_scale,
            window: window.map(|w| w as usize),
            out: &mut self.attn[..m * l.n_head * hv],
        };
        attention(self.kernel, self.pool, heads);
    }

    fn attn_out(&mut self, c: &Command) -> Result<(), Error> {
        let Op::AttnOut { k, n } = c.op else { return Ok(()) };
        let w = &self.model.weights().layers[c.layer].o;
        let m = c.rows.len();
        let bad = Bad::default();
        let attn = &self.attn;
        self.acts_attn.reshape(m, k);
        self.acts_attn.fill(self.kernel, self.pool, |i, row| {
            row.copy_from_slice(&attn[i * k..][..k]);
            bad.check(row, c.rows.start + i);
        });
        bad.result(c.layer, "the output of attention")?;
        let out = Columns::new(&mut self.out[..m * n], m, n);
        gemm(self.kernel, self.pool, &self.acts_attn, &[Job { weight: w.weight, bias: w.bias.as_deref(), out }]);
        Ok(())
    }

    /// `x += post_norm(out)`.
    fn join(&mut self, c: &Command, norm: Option<&Vec<f32>>) {
        let (e, eps) = (self.model.spec().n_embd, self.model.spec().eps);
        let (kernel, out) = (self.kernel, &self.out);
        let mut rows: Vec<&mut [f32]> = self.x[c.rows.start * e..c.rows.end * e].chunks_exact_mut(e).collect();
        self.pool.for_each_mut(&mut rows, |i, x| {
            let out = &out[i * e..][..e];
            match norm {
                None => kernel.rows(|| rowops::add(x, out)),
                Some(norm) => SCRATCH.with_borrow_mut(|(buffer, _)| {
                    buffer.resize(e, 0.0);
                    kernel.rows(|| {
                        rowops::rms_norm(out, norm, eps, buffer);
                        rowops::add(x, buffer);
                    });
                }),
            }
        });
    }

    fn ffn_norm(&mut self, c: &Command) -> Result<(), Error> {
        let w = &self.model.weights().layers[c.layer];
        self.join(c, w.attn_post_norm.as_ref());
        let mut acts = std::mem::replace(&mut self.acts_embd, Activations::new(0, 0, &[]));
        let result = self.norm(c, &mut acts, &w.ffn_norm, "the input of the feed-forward network");
        self.acts_embd = acts;
        result
    }

    fn gate_up(&mut self, c: &Command) {
        let Op::GateUp { n, .. } = c.op else { return };
        let w = &self.model.weights().layers[c.layer];
        let m = c.rows.len();
        let jobs = [(&w.gate, &mut self.gate), (&w.up, &mut self.up)].map(|(linear, out)| Job {
            weight: linear.weight,
            bias: linear.bias.as_deref(),
            out: Columns::new(&mut out[..m * n], m, n),
        });
        gemm(self.kernel, self.pool, &self.acts_embd, &jobs);
    }

    fn gate(&mut self, c: &Command) -> Result<(), Error> {
        let spec = self.model.spec();
        let n = spec.layers[c.layer].n_ff;
        let (gate, up, kernel) = (&self.gate, &self.up, self.kernel);
        let bad = Bad::default();
        self.acts_ff.reshape(c.rows.len(), n);
        self.acts_ff.fill(kernel, self.pool, |i, row| {
            let (gate, up) = (&gate[i * n..][..n], &up[i * n..][..n]);
            match spec.arch.activation {
                Activation::Silu => kernel.rows(|| rowops::silu_mul(gate, up, row)),
                Activation::Gelu => {
                    SCRATCH.with_borrow_mut(|(_, half)| kernel.rows(|| rowops::gelu_mul(gate, up, row, half)));
                }
            }
            bad.check(row, c.rows.start + i);
        });
        bad.result(c.layer, "the feed-forward network")
    }

    fn down(&mut self, c: &Command) {
        let Op::Down { n, .. } = c.op else { return };
        let w = &self.model.weights().layers[c.layer].down;
        let m = c.rows.len();
        let out = Columns::new(&mut self.out[..m * n], m, n);
        gemm(self.kernel, self.pool, &self.acts_ff, &[Job { weight: w.weight, bias: w.bias.as_deref(), out }]);
    }

    fn residual(&mut self, c: &Command) {
        self.join(c, self.model.weights().layers[c.layer].ffn_post_norm.as_ref());
    }
}

/// The first position at which something was not finite. Rounding to integers would hide it.
struct Bad(AtomicUsize);

impl Default for Bad {
    fn default() -> Self {
        Bad(AtomicUsize::new(usize::MAX))
    }
}

impl Bad {
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
