//! The steps of Mamba and Mamba-2.

use super::{Host, Stage, put_state};
use crate::layer::mamba::{self as kind, MambaOp, MambaSpec, MambaWeights};
use crate::model::Model;
use crate::plan::Command;
use crate::weights::distinct;
use crate::{Error, KvSink};
use npu_kernels::host::acts::Activations;
use npu_kernels::host::recurrent::conv::History;
use npu_kernels::host::recurrent::{Channels, gates, scan};
use npu_kernels::host::rowops;
use npu_kernels::host::{Kernel, Slab};

/// Buffers. Row-major, one row per position of the chunk unless said otherwise.
pub(super) struct Room {
    /// What the convolution takes, and what it gives.
    conv_in: Slab,
    mixed: Slab,
    z: Slab,
    dt: Slab,
    /// Mamba: what the steps come from, input and output vectors; what they are projected from, and the first of them.
    select: Vec<f32>,
    acts_mixed: Activations,
    acts_rank: Activations,
    /// What the state gives, in the kernel's own order; and the same rounded for the output projection.
    out: Slab,
    acts: Activations,
    /// What comes out of that projection in a layer that attends as well.
    beside: Slab,
    /// What is carried from chunk to chunk, of the layer at hand.
    carried: Option<(History, scan::State)>,
    n_tokens: usize,
}

impl Room {
    /// Room for chunks of `m` positions.
    pub fn new(model: &Model<'_>, m: usize, n_tokens: usize) -> Room {
        let most = |f: &dyn Fn(&MambaSpec) -> usize| kind::layers(model.spec()).map(f).max().unwrap_or(0);
        let (channels, inner) = (most(&|s| s.channels()), most(&|s| s.inner()));
        let rank = most(&|s| s.rank.unwrap_or(0));
        let select = most(&|s| s.rank.map_or(0, |rank| rank + 2 * s.vectors()));
        let weights = || model.weights().layers.iter().filter_map(|l| l.mixer.mamba());
        let x = distinct(weights().filter_map(|w| w.x.as_ref()).map(|x| x.weight.ty()));
        let dt = distinct(weights().filter(|w| w.x.is_some()).map(|w| w.dt.weight.ty()));
        Room {
            conv_in: Slab::new(m * channels),
            mixed: Slab::new(m * channels),
            z: Slab::new(m * inner),
            dt: Slab::new(m * most(&|s| s.shape.heads)),
            select: vec![0.0; m * select],
            acts_mixed: Activations::new(m, if rank > 0 { inner } else { 0 }, &x),
            acts_rank: Activations::new(m, rank, &dt),
            out: Slab::new(m * inner),
            acts: Activations::new(m, inner, &distinct(weights().map(|w| w.out.weight.ty()))),
            beside: Slab::new(if kind::beside(model.spec()) { m * model.spec().n_embd } else { 0 }),
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
        op: &MambaOp,
        sink: &mut dyn KvSink,
    ) -> Result<f64, Error> {
        let s = host.model.spec().layers[c.layer].mixer.mamba().expect("these steps are of Mamba layers");
        let w = host.weights(c).mixer.mamba().expect("Mamba layers have their tensors");
        let m = c.rows.len();
        match op {
            MambaOp::Project { .. } => {
                let mut parts = vec![(&w.conv_in, &mut self.conv_in[..m * s.channels()])];
                if s.rank.is_none() {
                    parts.push((&w.dt, &mut self.dt[..m * s.shape.heads]));
                }
                if c.layer < host.model.spec().last_layer() {
                    parts.push((&w.z, &mut self.z[..m * s.inner()]));
                }
                host.project_on_host(&stage.input, parts);
            }
            MambaOp::Conv { .. } => {
                if c.rows.start == 0 {
                    self.carried = Some((w.conv.history(), scan::State::new(s.shape)));
                }
                let (history, _) = self.carried.as_mut().expect("the first chunk began it");
                let n = m * s.channels();
                w.conv.run(host.kernel, host.pool, &self.conv_in[..n], history, true, &mut self.mixed[..n]);
            }
            MambaOp::Select { rank, vectors, .. } => self.select(host, c, s, w, *rank, *vectors)?,
            MambaOp::Scan { .. } => return self.scan(host, c, s, w, sink),
            MambaOp::Out { n, adds, .. } => self.out(host, stage, c, s, w, (*n, *adds))?,
        }
        Ok(0.0)
    }

    fn select<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        c: &Command,
        s: &MambaSpec,
        w: &MambaWeights<'_>,
        rank: usize,
        vectors: usize,
    ) -> Result<(), Error> {
        let (m, inner, n, eps) = (c.rows.len(), s.inner(), rank + vectors, host.model.spec().eps);
        let mixed = &self.mixed;
        host.fill(&mut self.acts_mixed, c, inner, "the output of the convolution", |i, row| {
            row.copy_from_slice(&mixed[i * inner..][..inner]);
        })?;
        let x = w.x.as_ref().expect("Mamba has this projection");
        host.project_on_host(&self.acts_mixed, vec![(x, &mut self.select[..m * n])]);
        if let Some(norms) = &w.select_norms {
            let mut rows: Vec<&mut [f32]> = self.select[..m * n].chunks_exact_mut(n).collect();
            host.pool.for_each_mut(&mut rows, |_, row| {
                let (from, vectors) = row.split_at_mut(rank);
                let (b, c) = vectors.split_at_mut(s.vectors());
                for (part, norm) in [from, b, c].into_iter().zip(norms) {
                    host.kernel.rows(|| rowops::rms_norm_in_place(part, norm, eps));
                }
            });
        }
        let select = &self.select;
        self.acts_rank.reshape(m, rank);
        self.acts_rank.fill(host.kernel, host.pool, |i, row| row.copy_from_slice(&select[i * n..][..rank]));
        host.project_on_host(&self.acts_rank, vec![(&w.dt, &mut self.dt[..m * inner])]);
        Ok(())
    }

    fn scan<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        c: &Command,
        s: &MambaSpec,
        w: &MambaWeights<'_>,
        sink: &mut dyn KvSink,
    ) -> Result<f64, Error> {
        let (m, inner, channels, vectors) = (c.rows.len(), s.inner(), s.channels(), s.vectors());
        let (history, state) = self.carried.as_mut().expect("the convolution began it");
        let mixed = |first| Channels { rows: &self.mixed[..m * channels], stride: channels, first };
        let (b, c_) = match s.rank {
            None => (mixed(inner), mixed(inner + vectors)),
            Some(rank) => {
                let stride = rank + 2 * vectors;
                let part = |first| Channels { rows: &self.select[..m * stride], stride, first };
                (part(rank), part(rank + vectors))
            }
        };
        let dt = Channels::all(&self.dt[..m * s.shape.heads], s.shape.heads);
        let steps = scan::Steps { m, x: mixed(0), dt, a: &w.a, b, c: c_ };
        state.run(host.kernel, host.pool, &steps, &mut self.out[..m * inner]);
        put_state(sink, c, self.n_tokens, history, state.cell())
    }

    fn out<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        c: &Command,
        s: &MambaSpec,
        w: &MambaWeights<'_>,
        (n, adds): (usize, bool),
    ) -> Result<(), Error> {
        let (m, inner, channels) = (c.rows.len(), s.inner(), s.channels());
        let (kernel, eps, out, mixed, z) = (host.kernel, host.model.spec().eps, &self.out, &self.mixed, &self.z);
        host.fill(&mut self.acts, c, inner, "the output of the scan", |i, row| {
            scan::gather(s.shape, &out[..m * inner], m, i, row);
            let x = &mixed[i * channels..][..inner];
            kernel.rows(|| {
                row.iter_mut().zip(x).zip(&w.d).for_each(|((y, x), d)| *y += x * d);
                gates::silu_mul(row, &z[i * inner..][..inner]);
                if let Some(norm) = &w.norm {
                    let group = inner / s.shape.groups;
                    for (y, norm) in row.chunks_exact_mut(group).zip(norm.chunks_exact(group)) {
                        rowops::rms_norm_in_place(y, norm, eps);
                    }
                }
            });
        })?;
        if !adds {
            host.project_on_host(&self.acts, vec![(&w.out, &mut stage.out[..m * n])]);
            return Ok(());
        }
        host.project_on_host(&self.acts, vec![(&w.out, &mut self.beside[..m * n])]);
        let beside = &self.beside;
        let mut rows: Vec<&mut [f32]> = stage.out[..m * n].chunks_exact_mut(n).collect();
        host.pool.for_each_mut(&mut rows, |i, sum| kernel.rows(|| rowops::add(sum, &beside[i * n..][..n])));
        Ok(())
    }
}
