//! The steps of attention.

use super::{Bad, Host, SCRATCH, Stage, Threads, ms};
use crate::arch::{NormKind, Over};
use crate::layer::attention::{self as kind, AttentionOp, AttentionSpec, AttentionWeights, LowRank};
use crate::model::{Model, rotation, wanted};
use crate::plan::Command;
use crate::weights::{Linear, Norm, distinct};
use crate::{Error, KvSink};
use kvlayout::{Part, Rows, hadamard, magnitude};
use npu_kernels::host::acts::Activations;
use npu_kernels::host::attention::{HeadCache, Heads, Products, Window, attention};
use npu_kernels::host::recurrent::gates::sigmoid_mul;
use npu_kernels::host::rowops;
use npu_kernels::host::{Kernel, Slab};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// Widths in which a layer's keys, and with them queries, and its values are rotated before they are stored; 0 = not.
fn widths<K>(host: &Host<'_, K>, a: &AttentionSpec) -> (usize, usize) {
    let (k, v) = rotation(host.model.spec(), a.windowed, host.round_k, host.round_v, host.attn_rot);
    (k as usize, v as usize)
}

/// Architectures whose attention may be of 16-bit integers: those of which a real model was held against real servers with it and stayed
/// within what they differ from themselves by (SmolLM2). Gemma 3 did not: one row of two thousand turned by more.
const IN_WORDS: &[&str] = &["llama"];

/// What a layer's attention multiplies. Integers of 16 bits, where the processor is faster with them and where queries, keys and values
/// were products of 8-bit codes anyway; with weights that are exact, attention is as well. So it is in models with experts: a
/// router near a tie makes a large difference of a small one, and then we would be farther from the server than it is from itself. So
/// it is where the cache is quantised: of a last bit comes another code there, and one row of SmolLM2's turned by too much. And so
/// without flash attention, where servers round less: replies of SmolLM2's parted from theirs sooner than their own variants' do.
fn products<K: Kernel>(host: &Host<'_, K>, w: &AttentionWeights<'_>) -> Products {
    let coded = |linear: &Linear<'_>| linear.weight.ty().code_form().is_some();
    let spec = host.model.spec();
    let allowed = IN_WORDS.contains(&spec.arch.name)
        && host.flash_attn
        && spec.layers.iter().all(|l| l.ffn.experts().is_none())
        && ![host.round_k, host.round_v].iter().any(|ty| ty.is_quantised());
    if K::WORDS && allowed && coded(&w.q) && coded(&w.k) && w.v.as_ref().is_none_or(coded) {
        Products::Words
    } else {
        Products::Floats
    }
}

/// Buffers. Row-major, one row per position of the chunk unless said otherwise.
pub(super) struct Room {
    q: Slab,
    /// Where queries, keys and values come from short rows: these, rounded, and keys and values as projected from them.
    low: [Slab; 2],
    low_acts: Activations,
    wide: Slab,
    /// Where queries have gates: both as projected, head by head, and the gates alone.
    q_gates: Slab,
    gates: Slab,
    k: Slab,
    v: Slab,
    /// What the heads read, and the same rounded for the output projection.
    attn: Slab,
    acts: Activations,
    /// Keys and values of the layer at hand, per key-value head.
    caches: Vec<HeadCache>,
    n_tokens: usize,
    /// cos and sin of every position, for each of the model's rotations that was asked for: layers take turns, and come chunk by chunk.
    tables: Vec<Vec<f32>>,
}

impl Room {
    /// Room for chunks of `m` positions.
    pub fn new(model: &Model<'_>, m: usize, n_tokens: usize) -> Room {
        let widest = |f: &dyn Fn(&AttentionSpec) -> usize| kind::layers(model.spec()).map(f).max().unwrap_or(0);
        let out = widest(&|a| a.n_head * a.head_v);
        let gated = model.spec().arch.attn_gate || kind::layers(model.spec()).any(|a| a.gated);
        let weights = || model.weights().layers.iter().filter_map(|l| l.mixer.attention());
        let low = |f: &dyn Fn(LowRank) -> usize| widest(&|a| a.low_rank.map_or(0, f));
        let (low_q, low_kv) = (low(&|low| low.q), low(&|low| low.kv + low.n_rot));
        Room {
            low: [Slab::new(m * low_q), Slab::new(m * low_kv)],
            low_acts: Activations::new(
                if low_kv > 0 { m } else { 0 },
                low_q.max(low_kv),
                &distinct(weights().flat_map(|w| w.wide_types())),
            ),
            wide: Slab::new(if low_kv > 0 { m * widest(&|a| a.n_wide()) } else { 0 }),
            q: Slab::new(m * widest(&|a| a.n_head * a.head_k)),
            q_gates: Slab::new(m * widest(&|a| if a.gated { a.n_q() } else { 0 })),
            gates: Slab::new(if gated { m * out } else { 0 }),
            k: Slab::new(m * widest(&|a| a.n_embd_k())),
            v: Slab::new(m * widest(&|a| a.n_embd_v())),
            attn: Slab::new(m * out),
            acts: Activations::new(m, out, &distinct(weights().map(|w| w.o.weight.ty()))),
            caches: Vec::new(),
            n_tokens,
            tables: vec![Vec::new(); model.spec().ropes.len()],
        }
    }

    /// A device may compute the last projection: it rounds rows itself.
    pub fn keep_rows(&mut self) {
        self.acts.keep_rows();
    }

    /// Does one step; returns the milliseconds that the sink took.
    pub fn step<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        c: &Command,
        op: &AttentionOp,
        sink: &mut dyn KvSink,
    ) -> Result<f64, Error> {
        let spec = host.model.spec().layers[c.layer].mixer.attention().expect("attention steps are of such layers");
        let weights = host.weights(c).mixer.attention().expect("attention layers have attention tensors");
        match op {
            AttentionOp::Qkv { n, .. } => self.qkv(host, stage, c, spec, weights, *n),
            AttentionOp::Narrow { n, .. } => {
                let low = weights.low.as_ref().expect("the spec has short rows");
                let [q, kv] = &mut self.low;
                let m = c.rows.len();
                let parts = [(&low.q_a, q, n[0]), (&low.kv_a, kv, n[1])].into_iter().filter(|(.., n)| *n > 0);
                host.project(&stage.input, parts.map(|(l, out, n)| (l, &mut out[..m * n])).collect());
            }
            AttentionOp::Widen { k, n } => self.widen(host, c, spec, weights, *k, *n)?,
            AttentionOp::Gate { n, .. } => {
                let gate = weights.gate.as_ref().expect("the architecture has gates");
                host.project(&stage.input, vec![(gate, &mut self.gates[..c.rows.len() * n])]);
            }
            AttentionOp::StoreKv => return self.store_kv(host, c, spec, weights, sink),
            AttentionOp::Attend { window, .. } => self.attend(host, c, spec, weights, *window),
            AttentionOp::Out { .. } => self.out(host, stage, c, spec, weights)?,
        }
        Ok(0.0)
    }

    fn qkv<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &Stage,
        c: &Command,
        a: &AttentionSpec,
        w: &AttentionWeights<'_>,
        n: [usize; 3],
    ) {
        let m = c.rows.len();
        let q = if a.gated { &mut self.q_gates } else { &mut self.q };
        let parts = [(Some(&w.q), q), (Some(&w.k), &mut self.k), (w.v.as_ref(), &mut self.v)];
        let parts = parts.into_iter().zip(n).filter(|(_, n)| *n > 0);
        host.project(&stage.input, parts.filter_map(|((linear, out), n)| Some((linear?, &mut out[..m * n]))).collect());
        if a.keys_as_values {
            self.v[..m * a.n_embd_v()].copy_from_slice(&self.k[..m * a.n_embd_k()]);
        }
        if a.gated && n[0] > 0 {
            let heads = self.q_gates[..m * n[0]].chunks_exact(2 * a.head_k);
            let into = self.q.chunks_exact_mut(a.head_k).zip(self.gates.chunks_exact_mut(a.head_k));
            for (both, (q, gate)) in heads.zip(into) {
                let (left, right) = both.split_at(a.head_k);
                q.copy_from_slice(left);
                gate.copy_from_slice(right);
            }
        }
    }

    /// Queries, keys and values from short rows.
    fn widen<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        c: &Command,
        a: &AttentionSpec,
        w: &AttentionWeights<'_>,
        k: [usize; 2],
        n: [usize; 2],
    ) -> Result<(), Error> {
        let (Some(rank), Some(low)) = (a.low_rank, &w.low) else { return Ok(()) };
        let (m, eps, row) = (c.rows.len(), host.model.spec().eps, rank.kv + rank.n_rot);
        let parts = [
            (&self.low[0], rank.q, &low.q_a_norm, &w.q, &mut self.q[..m * n[0]]),
            (&self.low[1], row, &low.kv_a_norm, &w.k, &mut self.wide[..m * n[1]]),
        ];
        for ((rows, stride, norm, linear, out), k) in parts.into_iter().zip(k) {
            if out.is_empty() {
                continue;
            }
            host.fill(&mut self.low_acts, c, k, "the short rows of attention", |i, row| {
                host.kernel.rows(|| norm.apply(NormKind::Rms, eps, &rows[i * stride..][..k], row));
            })?;
            host.project_on_host(&self.low_acts, vec![(linear, out)]);
        }
        // Per head keys, then values; the channels that carry the position are the same in all heads.
        let (keys, values) = (self.k[..m * a.n_embd_k()].chunks_exact_mut(a.head_k), a.head_v);
        let heads = self.wide[..m * n[1]].chunks_exact(a.rope_from + values);
        let into = keys.zip(self.v[..m * a.n_embd_v()].chunks_exact_mut(values));
        for (i, ((key, value), from)) in into.zip(heads).enumerate() {
            let shared = &self.low[1][i / a.n_head_kv * row + rank.kv..][..rank.n_rot];
            key[..a.rope_from].copy_from_slice(&from[..a.rope_from]);
            key[a.rope_from..].copy_from_slice(shared);
            value.copy_from_slice(&from[a.rope_from..]);
        }
        Ok(())
    }

    /// Returns the milliseconds that the sink took.
    fn store_kv<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        c: &Command,
        a: &AttentionSpec,
        w: &AttentionWeights<'_>,
        sink: &mut dyn KvSink,
    ) -> Result<f64, Error> {
        let spec = host.model.spec();
        let m = c.rows.len();
        let (hk, hv, eps) = (a.head_k, a.head_v, spec.eps);
        let last = c.layer == spec.last_layer();
        if let Some(rope) = a.rope {
            self.rope_table(host, rope);
        }
        let rope = a.rope.map(|at| {
            let rope = &spec.ropes[at];
            (rope, self.tables[at].get(c.rows.start * rope.n_rot..).unwrap_or_default())
        });
        let (nq, nk, nv) = (if last { 0 } else { a.n_head * hk }, a.n_embd_k(), a.n_embd_v());
        if let Some(limit) = a.clamp {
            for part in [&mut self.q[..m * nq], &mut self.k[..m * nk], &mut self.v[..m * nv]] {
                part.iter_mut().for_each(|v| *v = v.clamp(-limit, limit));
            }
        }
        // Norm, rotary embedding and the cache's rotation, in place.
        let (kernel, round_q, (rot_k, rot_v)) = (host.kernel, host.round_q, widths(host, a));
        let rule = spec.arch.qk_norm_rule;
        let normed = |row: &mut [f32], norm: &Norm, buffer: &mut Vec<f32>| {
            let step = if rule.over == Over::Row { row.len().max(1) } else { hk };
            buffer.resize(step, 0.0);
            for (h, part) in row.chunks_exact_mut(step).enumerate() {
                let from = if rule.over == Over::EachHead { h * hk } else { 0 };
                norm.apply_part(from, rule.kind, eps, part, buffer);
                part.copy_from_slice(buffer);
            }
        };
        let turn = |i: usize, row: &mut [f32], norm: Option<&Norm>, buffer: &mut Vec<f32>| {
            kernel.rows(|| {
                if let (Some(norm), false) = (norm, rule.after_rope) {
                    normed(row, norm, buffer);
                }
                if let Some((rope, table)) = rope {
                    let (cos, sin) = table[i * rope.n_rot..][..rope.n_rot].split_at(rope.n_rot / 2);
                    let heads = row.chunks_exact_mut(hk);
                    heads.for_each(|head| rowops::rope(&mut head[a.rope_from..], rope.pairing, cos, sin));
                }
                if let (Some(norm), true) = (norm, rule.after_rope) {
                    normed(row, norm, buffer);
                }
            });
        };
        let grow = |i: usize, q: &mut [f32]| {
            if let Some(t) = spec.temperature.filter(|t| !t.without_rope || rope.is_none()) {
                let factor = t.of(c.rows.start + i);
                q.iter_mut().for_each(|v| *v *= factor);
            }
        };
        let mut rows: Vec<[&mut [f32]; 3]> = Vec::with_capacity(m);
        let mut rest = [&mut self.q[..m * nq], &mut self.k[..m * nk], &mut self.v[..m * nv]];
        for _ in 0..m {
            let [q, k, v] = rest;
            let ((q, q_rest), (k, k_rest), (v, v_rest)) = (q.split_at_mut(nq), k.split_at_mut(nk), v.split_at_mut(nv));
            rest = [q_rest, k_rest, v_rest];
            rows.push([q, k, v]);
        }
        let bad = Bad::default();
        let largest = [AtomicU32::new(0), AtomicU32::new(0)];
        host.pool.for_each_mut(&mut rows, |i, [q, k, v]| {
            SCRATCH.with_borrow_mut(|(buffer, _)| {
                turn(i, q, w.q_norm.as_ref(), buffer);
                turn(i, k, w.k_norm.as_ref(), buffer);
                if spec.arch.value_norm {
                    buffer.resize(hv, 0.0);
                    kernel.rows(|| {
                        for head in v.chunks_exact_mut(hv) {
                            rowops::rms_norm_plain(head, eps, buffer);
                            head.copy_from_slice(buffer);
                        }
                    });
                }
            });
            grow(i, q);
            kernel.rows(|| {
                hadamard(q, rot_k);
                hadamard(k, rot_k);
                hadamard(v, rot_v);
                bad.check(q, c.rows.start + i);
                // While they are near: the sink need not look at them again.
                for (largest, row) in largest.iter().zip([&**k, &**v]) {
                    let bits = magnitude(row);
                    if bits > largest.load(Ordering::Relaxed) {
                        largest.fetch_max(bits, Ordering::Relaxed);
                    }
                }
            });
            round_q.round(q);
        });
        drop(rows);

        let started = Instant::now();
        let positions = c.rows.start as u32..c.rows.end as u32;
        if wanted(sink, c.layer as u32) {
            let layer = c.layer as u32;
            let all = [(Part::K, &self.k[..m * nk]), (Part::V, &self.v[..m * nv])].into_iter().zip(largest);
            let all = all.map(|((part, rows), largest)| {
                let (positions, largest) = (positions.clone(), Some(largest.into_inner()));
                Rows { layer, part, positions, rows, largest }
            });
            sink.put_tensors(&all.collect::<Vec<_>>(), &Threads(host.pool))?;
        }
        let took = ms(started.elapsed());
        // After the sink, which names a bad key or value more closely.
        bad.result(c.layer, "the queries")?;

        if !last {
            let (k, v) = (self.k[..m * nk].chunks_exact_mut(nk), self.v[..m * nv].chunks_exact_mut(nv));
            let mut rows: Vec<(&mut [f32], &mut [f32])> = k.zip(v).collect();
            host.pool.for_each_mut(&mut rows, |_, (k, v)| {
                host.round_k.round(k);
                host.round_v.round(v);
            });
            drop(rows);
            if c.rows.start == 0 {
                self.clear_caches(a, products(host, w));
            }
            let (k, v) = (&self.k[..m * nk], &self.v[..m * nv]);
            host.pool.for_each_mut(&mut self.caches[..a.n_head_kv], |h, cache| {
                kernel.rows(|| {
                    for i in 0..m {
                        cache.push(&k[i * nk + h * hk..][..hk], &v[i * nv + h * hv..][..hv]);
                    }
                });
            });
        }
        Ok(took)
    }

    /// Caches for a layer's heads, without positions; made anew only where heads have another shape than before.
    fn clear_caches(&mut self, a: &AttentionSpec, products: Products) {
        let is_other = |c: &HeadCache| (c.products(), c.head_k(), c.head_v()) != (products, a.head_k, a.head_v);
        if self.caches.first().is_some_and(is_other) {
            self.caches.clear();
        }
        self.caches.iter_mut().for_each(HeadCache::clear);
        while self.caches.len() < a.n_head_kv {
            self.caches.push(HeadCache::new(products, a.head_k, a.head_v, self.n_tokens));
        }
    }

    /// cos and sin of all positions, unless they are at hand already.
    fn rope_table<K: Kernel>(&mut self, host: &Host<'_, K>, rope: usize) {
        let table = &mut self.tables[rope];
        let rope = &host.model.spec().ropes[rope];
        if !table.is_empty() || rope.n_rot == 0 {
            return;
        }
        table.resize(self.n_tokens * rope.n_rot, 0.0);
        let factors = rope.factors.of(host.n_ctx).expect("asked for before the run began");
        let mut rows: Vec<&mut [f32]> = table.chunks_exact_mut(rope.n_rot).collect();
        host.pool.for_each_mut(&mut rows, |i, row| {
            let (cos, sin) = row.split_at_mut(rope.n_rot / 2);
            rope.table(i as u32, factors, cos, sin);
        });
    }

    fn attend<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        c: &Command,
        a: &AttentionSpec,
        w: &AttentionWeights<'_>,
        window: Option<Window>,
    ) {
        let m = c.rows.len();
        let heads = Heads {
            q: &self.q[..m * a.n_head * a.head_k],
            n_head: a.n_head,
            caches: &self.caches[..a.n_head_kv],
            m,
            first: c.rows.start,
            scale: a.scale,
            softcap: a.softcap,
            slopes: &a.slopes(),
            window,
            sinks: w.sinks.as_deref(),
            out: &mut self.attn[..m * a.n_head * a.head_v],
        };
        attention(host.kernel, host.pool, heads);
    }

    fn out<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        c: &Command,
        a: &AttentionSpec,
        w: &AttentionWeights<'_>,
    ) -> Result<(), Error> {
        let (m, k, n) = (c.rows.len(), a.n_head * a.head_v, w.o.weight.n());
        let (attn, gates, kernel, (_, rot_v)) = (&self.attn, &self.gates, host.kernel, widths(host, a));
        host.fill(&mut self.acts, c, k, "the output of attention", |i, row| {
            row.copy_from_slice(&attn[i * k..][..k]);
            // What the values were turned by, back.
            kernel.rows(|| hadamard(row, rot_v));
            if a.gated || w.gate.is_some() {
                kernel.rows(|| sigmoid_mul(row, &gates[i * k..][..k]));
            }
        })?;
        host.project(&self.acts, vec![(&w.o, &mut stage.out[..m * n])]);
        Ok(())
    }
}
