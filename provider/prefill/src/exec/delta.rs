//! The steps of the gated delta net.

use super::{Bad, Host, Stage, put_state};
use crate::layer::delta::{self as kind, DeltaOp, DeltaSpec, DeltaWeights, Strengths};
use crate::model::Model;
use crate::plan::Command;
use crate::weights::distinct;
use crate::{Error, KvSink};
use npu_kernels::host::acts::Activations;
use npu_kernels::host::recurrent::conv::History;
use npu_kernels::host::recurrent::{Channels, delta, gates};
use npu_kernels::host::{Kernel, Slab};

/// Buffers. Row-major, one row per position of the chunk unless said otherwise.
pub(super) struct Room {
    /// Queries, keys and values as projected, and after the convolution.
    qkv: Slab,
    mixed: Slab,
    gate: Slab,
    /// Strengths of all value heads: of corrections, and the logarithm of what stays of the state.
    beta: Vec<f32>,
    decay: Vec<f32>,
    /// Both as one projection gives them.
    strengths: Vec<f32>,
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
        let weights = model.weights().layers.iter().filter_map(|l| l.mixer.delta());
        Room {
            qkv: Slab::new(m * channels),
            mixed: Slab::new(m * channels),
            gate: Slab::new(m * values),
            beta: vec![0.0; m * heads],
            decay: vec![0.0; m * heads],
            strengths: vec![0.0; m * 2 * heads],
            out: Slab::new(m * values),
            acts: Activations::new(m, values, &distinct(weights.map(|w| w.out.weight.ty()))),
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
        let mut parts = vec![(&w.qkv, &mut self.qkv[..m * d.channels()])];
        match &w.strengths {
            Strengths::Apart { beta, alpha } => {
                parts.push((beta, &mut self.beta[..m * heads]));
                parts.push((alpha, &mut self.decay[..m * heads]));
            }
            Strengths::Mixed(both) => parts.push((both, &mut self.strengths[..m * 2 * heads])),
        }
        if c.layer < host.model.spec().last_layer() {
            parts.push((&w.gate, &mut self.gate[..m * d.values()]));
        }
        host.project_on_host(&stage.input, parts);
        if let Strengths::Mixed(_) = &w.strengths {
            let per_key = heads / d.shape.key_heads;
            for (i, both) in self.strengths[..m * 2 * heads].chunks_exact(2 * heads).enumerate() {
                for (key, both) in both.chunks_exact(2 * per_key).enumerate() {
                    let at = i * heads + key * per_key;
                    self.beta[at..][..per_key].copy_from_slice(&both[..per_key]);
                    self.decay[at..][..per_key].copy_from_slice(&both[per_key..]);
                }
            }
        }
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
        for row in self.decay[..m * heads].chunks_exact_mut(heads) {
            for ((g, dt), a) in row.iter_mut().zip(&w.dt).zip(&w.a) {
                *g = gates::softplus(*g + dt) * a;
            }
        }
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
            decay: &self.decay[..m * heads],
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
        let bad = Bad::default();
        self.acts.reshape(m, values);
        self.acts.fill(kernel, host.pool, |i, row| {
            let gate = &gate[i * values..][..values];
            for (h, (head, gate)) in row.chunks_exact_mut(dim).zip(gate.chunks_exact(dim)).enumerate() {
                delta::gather(d.shape, &out[..m * values], m, i, h, head);
                kernel.rows(|| gates::gated_rms_norm(head, &w.norm, gate, eps));
            }
            bad.check(row, c.rows.start + i);
        });
        bad.result(c.layer, "the output of the delta rule")?;
        host.project_on_host(&self.acts, vec![(&w.out, &mut stage.out[..m * n])]);
        Ok(())
    }
}
