//! The steps of the gated delta net.

use super::{Host, Stage, put_state};
use crate::layer::delta::{self as kind, DeltaOp, DeltaSpec, DeltaWeights, Strengths};
use crate::model::Model;
use crate::plan::Command;
use crate::weights::distinct;
use crate::{Error, KvSink};
use npu_kernels::host::acts::Activations;
use npu_kernels::host::recurrent::conv::History;
use npu_kernels::host::recurrent::{Channels, delta, gates};
use npu_kernels::host::rowops;
use npu_kernels::host::{Kernel, Slab};

/// Buffers. Row-major, one row per position of the chunk unless said otherwise.
pub(super) struct Room {
    /// Queries, keys and values as projected, and after the convolution.
    qkv: Slab,
    mixed: Slab,
    gate: Slab,
    /// Strengths of all value heads: of corrections, and what is left of the state, by key channel too where that differs.
    beta: Vec<f32>,
    left: Vec<f32>,
    /// Both as one projection gives them.
    strengths: Vec<f32>,
    /// What comes before the matrices of low rank: of decays, of the gate, and rounded.
    low: [Vec<f32>; 2],
    low_acts: Activations,
    /// What the state gives, in the kernel's own order; and the same rounded for the output projection.
    out: Slab,
    acts: Activations,
    /// What is carried from chunk to chunk, of the layer at hand.
    carried: Option<(History, delta::State)>,
    n_tokens: usize,
}

impl Room {
    /// Room for chunks of `m` positions.
    pub fn new(model: &Model<'_>, m: usize, n_tokens: usize) -> Room {
        let most = |f: &dyn Fn(&DeltaSpec) -> usize| kind::layers(model.spec()).map(f).max().unwrap_or(0);
        let (channels, values, heads) = (most(&|d| d.channels()), most(&|d| d.values()), most(&|d| d.shape.heads));
        let weights = || model.weights().layers.iter().filter_map(|l| l.mixer.delta());
        let rank = most(&|d| if d.shape.per_channel { d.shape.dim } else { 0 });
        Room {
            qkv: Slab::new(m * channels),
            mixed: Slab::new(m * channels),
            gate: Slab::new(m * values),
            beta: vec![0.0; m * heads],
            left: vec![0.0; m * most(&|d| d.shape.decays())],
            strengths: vec![0.0; m * 2 * heads],
            low: [vec![0.0; m * rank], vec![0.0; m * rank]],
            low_acts: Activations::new(
                if rank > 0 { m } else { 0 },
                rank,
                &distinct(weights().flat_map(|w| w.wide_types())),
            ),
            out: Slab::new(m * values),
            acts: Activations::new(m, values, &distinct(weights().map(|w| w.out.weight.ty()))),
            carried: None,
            n_tokens,
        }
    }

    /// Does one step; returns the milliseconds that the sink took.
    pub fn step<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        c: &Command,
        op: &DeltaOp,
        sink: &mut dyn KvSink,
    ) -> Result<f64, Error> {
        let spec = host.model.spec().layers[c.layer].mixer.delta().expect("these steps are of delta nets");
        let weights = host.weights(c).mixer.delta().expect("delta nets have their tensors");
        match op {
            DeltaOp::Project { .. } => self.project(host, stage, c, spec, weights),
            DeltaOp::Widen { k, .. } => self.widen(host, c, spec, weights, *k)?,
            DeltaOp::Conv { .. } => self.conv(host, c, spec, weights),
            DeltaOp::Scan { .. } => return self.scan(host, c, spec, sink),
            DeltaOp::Out { n, .. } => self.out(host, stage, c, spec, weights, *n)?,
        }
        Ok(0.0)
    }

    fn project<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &Stage,
        c: &Command,
        d: &DeltaSpec,
        w: &DeltaWeights<'_>,
    ) {
        let (m, heads) = (c.rows.len(), d.shape.heads);
        let last = c.layer == host.model.spec().last_layer();
        // Three matrices give three blocks of rows, which are laid side by side below.
        let (apart, n) = (w.qkv.len() > 1, d.channels() / w.qkv.len());
        let projected = if apart { &mut self.mixed } else { &mut self.qkv };
        let mut parts: Vec<_> = w.qkv.iter().zip(projected[..m * d.channels()].chunks_exact_mut(m * n)).collect();
        let [low_alpha, low_gate] = &mut self.low;
        match &w.strengths {
            Strengths::Apart { beta, alpha } => {
                parts.push((beta, &mut self.beta[..m * heads]));
                parts.push((alpha, &mut self.left[..m * heads]));
            }
            Strengths::PerChannel { beta, alpha_a, .. } => {
                parts.push((beta, &mut self.beta[..m * heads]));
                parts.push((alpha_a, &mut low_alpha[..m * d.shape.dim]));
            }
            Strengths::Mixed(both) => parts.push((both, &mut self.strengths[..m * 2 * heads])),
        }
        match &w.gate_a {
            _ if last => {}
            Some(gate) => parts.push((gate, &mut low_gate[..m * d.shape.dim])),
            None => parts.push((&w.gate, &mut self.gate[..m * d.values()])),
        }
        host.project_on_host(&stage.input, parts);
        if apart {
            let blocks = self.mixed[..m * d.channels()].chunks_exact(m * n);
            for (i, block) in blocks.enumerate() {
                let into = self.qkv[..m * d.channels()].chunks_exact_mut(d.channels());
                into.zip(block.chunks_exact(n)).for_each(|(row, from)| row[i * n..][..n].copy_from_slice(from));
            }
        }
        if let Strengths::Mixed(_) = &w.strengths {
            let per_key = heads / d.shape.key_heads;
            for (i, both) in self.strengths[..m * 2 * heads].chunks_exact(2 * heads).enumerate() {
                for (key, both) in both.chunks_exact(2 * per_key).enumerate() {
                    let at = i * heads + key * per_key;
                    self.beta[at..][..per_key].copy_from_slice(&both[..per_key]);
                    self.left[at..][..per_key].copy_from_slice(&both[per_key..]);
                }
            }
        }
    }

    fn widen<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        c: &Command,
        d: &DeltaSpec,
        w: &DeltaWeights<'_>,
        k: usize,
    ) -> Result<(), Error> {
        let Strengths::PerChannel { alpha_b, .. } = &w.strengths else { return Ok(()) };
        let (m, last) = (c.rows.len(), c.layer == host.model.spec().last_layer());
        let mut parts = vec![(&self.low[0], alpha_b, &mut self.left[..m * d.shape.decays()])];
        if !last {
            parts.push((&self.low[1], &w.gate, &mut self.gate[..m * d.values()]));
        }
        for (low, linear, out) in parts {
            host.fill(&mut self.low_acts, c, k, "the gates of the delta rule", |i, row| {
                row.copy_from_slice(&low[i * k..][..k]);
            })?;
            host.project_on_host(&self.low_acts, vec![(linear, out)]);
        }
        Ok(())
    }

    fn conv<K: Kernel>(&mut self, host: &Host<'_, K>, c: &Command, d: &DeltaSpec, w: &DeltaWeights<'_>) {
        let (m, n, heads) = (c.rows.len(), d.channels(), d.shape.heads);
        if c.rows.start == 0 {
            self.carried = Some((w.conv.history(), delta::State::new(d.shape)));
        }
        let (history, _) = self.carried.as_mut().expect("the first chunk began it");
        let mixed = &mut self.mixed[..m * n];
        w.conv.run(host.kernel, host.pool, &self.qkv[..m * n], history, true, mixed);
        let (kernel, eps, dim, keys) = (host.kernel, host.model.spec().eps, d.shape.dim, 2 * d.keys());
        let mut rows: Vec<&mut [f32]> = mixed.chunks_exact_mut(n).collect();
        host.pool.for_each_mut(&mut rows, |_, row| {
            kernel.rows(|| row[..keys].chunks_exact_mut(dim).for_each(|head| gates::l2_norm(head, eps)));
        });
        self.beta[..m * heads].iter_mut().for_each(|b| *b = gates::sigmoid(*b));
        let (decays, per_head) = (d.shape.decays(), d.shape.decays() / heads);
        let mut rows: Vec<&mut [f32]> = self.left[..m * decays].chunks_exact_mut(decays).collect();
        host.pool.for_each_mut(&mut rows, |_, row| {
            for ((row, dt), a) in row.chunks_exact_mut(per_head).zip(w.dt.chunks_exact(per_head)).zip(&w.a) {
                row.iter_mut().zip(dt).for_each(|(g, dt)| *g = (gates::softplus(*g + dt) * a).exp());
            }
        });
    }

    fn scan<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        c: &Command,
        d: &DeltaSpec,
        sink: &mut dyn KvSink,
    ) -> Result<f64, Error> {
        let (m, heads) = (c.rows.len(), d.shape.heads);
        let (history, state) = self.carried.as_mut().expect("the convolution began it");
        let part = |first| Channels { rows: &self.mixed[..m * d.channels()], stride: d.channels(), first };
        let steps = delta::Steps {
            m,
            q: part(0),
            k: part(d.keys()),
            v: part(2 * d.keys()),
            left: &self.left[..m * d.shape.decays()],
            beta: &self.beta[..m * heads],
        };
        state.run(host.kernel, host.pool, &steps, &mut self.out[..m * d.values()]);
        put_state(sink, c, self.n_tokens, history, state.cell())
    }

    fn out<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        c: &Command,
        d: &DeltaSpec,
        w: &DeltaWeights<'_>,
        n: usize,
    ) -> Result<(), Error> {
        let (m, values, dim) = (c.rows.len(), d.values(), d.shape.dim);
        let (kernel, eps, out, gate) = (host.kernel, host.model.spec().eps, &self.out, &self.gate);
        host.fill(&mut self.acts, c, values, "the output of the delta rule", |i, row| {
            let gate = &gate[i * values..][..values];
            for (h, (head, gate)) in row.chunks_exact_mut(dim).zip(gate.chunks_exact(dim)).enumerate() {
                delta::gather(d.shape, &out[..m * values], m, i, h, head);
                kernel.rows(|| match d.shape.per_channel {
                    true => {
                        rowops::rms_norm_in_place(head, &w.norm, eps);
                        gates::sigmoid_mul(head, gate);
                    }
                    false => gates::gated_rms_norm(head, &w.norm, gate, eps),
                });
            }
        })?;
        host.project_on_host(&self.acts, vec![(&w.out, &mut stage.out[..m * n])]);
        Ok(())
    }
}
