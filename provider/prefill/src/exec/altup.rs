//! The steps of several residual streams. The first is the run's own; the others are here.

use super::{Host, SCRATCH, Stage};
use crate::Error;
use crate::arch::NormKind;
use crate::layer::altup::{AltUpOp, AltUpSpec, AltUpWeights};
use crate::model::Model;
use crate::plan::Command;
use crate::weights::{Linear, distinct};
use npu_kernels::host::acts::Activations;
use npu_kernels::host::rowops;
use npu_kernels::host::{Kernel, Slab};

/// Buffers.
pub(super) struct Room {
    spec: Option<AltUpSpec>,
    /// The streams after the first of every position: `[position][stream][channel]`.
    others: Slab,
    /// What was predicted of the first stream, one row per position of the chunk.
    predicted: Slab,
    /// The detour's output, its middle, and that rounded.
    laurel: Slab,
    middle: Slab,
    acts: Activations,
    /// The router's outputs, and these rounded.
    router: Vec<f32>,
    modes: Activations,
    /// What is made of them: `[position][to][from]`, or `[position][to]`.
    coefs: Vec<f32>,
}

impl Room {
    /// Room for chunks of `m` positions.
    pub fn new(model: &Model<'_>, m: usize, n_tokens: usize) -> Room {
        let (spec, e) = (model.spec().altup, model.spec().n_embd);
        let (streams, rank) = spec.map_or((0, 0), |a| (a.streams, a.rank));
        let weights = || model.weights().layers.iter().filter_map(|l| l.altup.as_ref());
        let coefs = weights().flat_map(|w| [&w.predict, &w.correct].map(|l| l.weight.ty()));
        let any = usize::from(spec.is_some());
        Room {
            spec,
            others: Slab::new(n_tokens * streams.saturating_sub(1) * e),
            predicted: Slab::new(any * m * e),
            laurel: Slab::new(any * m * e),
            middle: Slab::new(m * rank),
            acts: Activations::new(any * m, rank, &distinct(weights().map(|w| w.laurel[1].weight.ty()))),
            router: vec![0.0; m * streams],
            modes: Activations::new(any * m, streams, &distinct(coefs)),
            coefs: vec![0.0; m * streams * streams],
        }
    }

    /// Does one step; `x` is the first stream of all positions.
    pub fn step<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        x: &mut [f32],
        c: &Command,
        op: &AltUpOp,
    ) -> Result<(), Error> {
        let AltUpSpec { streams, .. } = self.spec.expect("these steps are of models with several streams");
        let (e, rest) = (host.model.spec().n_embd, streams - 1);
        let x = &mut x[c.rows.start * e..c.rows.end * e];
        let w = || host.weights(c).altup.as_ref().expect("every layer has these tensors");
        match op {
            AltUpOp::Spread { .. } => self.spread(host, stage, x, c)?,
            AltUpOp::Predict { .. } | AltUpOp::Correct { .. } => {
                let predict = matches!(op, AltUpOp::Predict { .. });
                self.ask(host, stage, x, c, w(), predict)?;
                if predict { self.predict(host, x, c, streams) } else { self.correct(host, x, c, streams) }
            }
            AltUpOp::Laurel { n, .. } => self.detour(host, stage, c, w(), *n)?,
            AltUpOp::JoinLaurel => {
                let (laurel, half) = (&self.laurel, 1.0 / 2f32.sqrt());
                let mut rows: Vec<&mut [f32]> = x.chunks_exact_mut(e).collect();
                host.pool.for_each_mut(&mut rows, |i, x| {
                    let laurel = &laurel[i * e..][..e];
                    host.kernel.rows(|| x.iter_mut().zip(laurel).for_each(|(x, l)| *x = (*x + l) * half));
                });
            }
            AltUpOp::JoinPart => {
                let norm = &host.weights(c).per_layer.as_ref().expect("models with streams have such a part").norm;
                let (out, eps) = (&stage.out, host.model.spec().eps);
                let mut rows: Vec<_> = rows(&mut self.others, c, rest * e).collect();
                host.pool.for_each_mut(&mut rows, |i, others| {
                    SCRATCH.with_borrow_mut(|(buffer, _)| {
                        buffer.resize(e, 0.0);
                        host.kernel.rows(|| {
                            norm.apply(NormKind::Rms, eps, &out[i * e..][..e], buffer);
                            others.chunks_exact_mut(e).for_each(|stream| rowops::add(stream, buffer));
                        });
                    });
                });
            }
        }
        Ok(())
    }

    /// The other streams from the embedding: projections of it, of its length.
    fn spread<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        x: &[f32],
        c: &Command,
    ) -> Result<(), Error> {
        let (e, m) = (host.model.spec().n_embd, c.rows.len());
        let table = host.model.weights().altup.as_ref().expect("the model has several streams");
        host.fill(&mut stage.input, c, e, "the embedding", |i, row| {
            row.copy_from_slice(&x[i * e..][..e]);
        })?;
        for (s, proj) in table.proj.iter().enumerate() {
            let linear = Linear { weight: *proj, bias: None };
            host.project_on_host(&stage.input, vec![(&linear, &mut stage.out[..m * e])]);
            let out = &stage.out;
            let mut rows: Vec<_> = rows(&mut self.others, c, table.proj.len() * e).collect();
            host.pool.for_each_mut(&mut rows, |i, others| {
                let (x, out) = (&x[i * e..][..e], &out[i * e..][..e]);
                let (wanted, found) = (length(x), length(out));
                let stream = &mut others[s * e..][..e];
                stream.iter_mut().zip(out).for_each(|(o, v)| *o = v * wanted / found);
            });
        }
        Ok(())
    }

    /// Asks the router about the first stream, and makes coefficients of its answer.
    fn ask<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        x: &[f32],
        c: &Command,
        w: &AltUpWeights<'_>,
        predict: bool,
    ) -> Result<(), Error> {
        let (e, eps, m, kernel) = (host.model.spec().n_embd, host.model.spec().eps, c.rows.len(), host.kernel);
        let (n, by) = (w.router.weight.n(), 1.0 / e as f32);
        host.fill(&mut stage.input, c, e, "the first of several streams", |i, row| {
            kernel.rows(|| w.router_norm.apply(NormKind::Rms, eps, &x[i * e..][..e], row));
            row.iter_mut().for_each(|v| *v *= by);
        })?;
        host.project_on_host(&stage.input, vec![(&w.router, &mut self.router[..m * n])]);
        let router = &self.router;
        self.modes.reshape(m, n);
        self.modes.fill(kernel, host.pool, |i, row| {
            row.iter_mut().zip(&router[i * n..][..n]).for_each(|(o, v)| *o = v.tanh());
        });
        let linear = if predict { &w.predict } else { &w.correct };
        host.project_on_host(&self.modes, vec![(linear, &mut self.coefs[..m * linear.weight.n()])]);
        Ok(())
    }

    /// Every stream of a position gets a mixture of all of them added.
    fn predict<K: Kernel>(&mut self, host: &Host<'_, K>, x: &mut [f32], c: &Command, streams: usize) {
        let (e, rest) = (host.model.spec().n_embd, streams - 1);
        let coefs = &self.coefs;
        let others = rows(&mut self.others, c, rest * e);
        let predicted = self.predicted[..c.rows.len() * e].chunks_exact_mut(e);
        let mut rows: Vec<_> = x.chunks_exact_mut(e).zip(others).zip(predicted).collect();
        host.pool.for_each_mut(&mut rows, |i, ((x, others), predicted)| {
            let coefs = &coefs[i * streams * streams..][..streams * streams];
            let (x, others) = (&mut **x, &mut **others);
            SCRATCH.with_borrow_mut(|(buffer, _)| {
                buffer.clear();
                buffer.extend_from_slice(x);
                buffer.extend_from_slice(others);
                let before = &buffer[..streams * e];
                host.kernel.rows(|| {
                    for (to, stream) in [x].into_iter().chain(others.chunks_exact_mut(e)).enumerate() {
                        for (from, by) in before.chunks_exact(e).zip(&coefs[to * streams..][..streams]) {
                            rowops::add_scaled(stream, from, *by);
                        }
                        if to == 0 {
                            predicted.copy_from_slice(stream);
                        }
                    }
                });
            });
        });
    }

    /// What the layer made of the first stream, less what was predicted, goes into all of them.
    fn correct<K: Kernel>(&mut self, host: &Host<'_, K>, x: &mut [f32], c: &Command, streams: usize) {
        let (e, rest) = (host.model.spec().n_embd, streams - 1);
        let (coefs, predicted) = (&self.coefs, &self.predicted);
        let others = rows(&mut self.others, c, rest * e);
        let mut rows: Vec<_> = x.chunks_exact_mut(e).zip(others).collect();
        host.pool.for_each_mut(&mut rows, |i, (x, others)| {
            let (coefs, predicted) = (&coefs[i * streams..][..streams], &predicted[i * e..][..e]);
            SCRATCH.with_borrow_mut(|(new, _)| {
                new.clear();
                new.extend(x.iter().zip(predicted).map(|(x, p)| x - p));
                x.copy_from_slice(predicted);
                host.kernel.rows(|| {
                    for (stream, by) in [&mut **x].into_iter().chain(others.chunks_exact_mut(e)).zip(coefs) {
                        rowops::add_scaled(stream, new, by + 1.0);
                    }
                });
            });
        });
    }

    /// Through a narrow middle and back, normed, and the input itself.
    fn detour<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &Stage,
        c: &Command,
        w: &AltUpWeights<'_>,
        rank: usize,
    ) -> Result<(), Error> {
        let (e, m) = (host.model.spec().n_embd, c.rows.len());
        host.project_on_host(&stage.input, vec![(&w.laurel[0], &mut self.middle[..m * rank])]);
        let middle = &self.middle;
        host.fill(&mut self.acts, c, rank, "the detour around attention", |i, row| {
            row.copy_from_slice(&middle[i * rank..][..rank]);
        })?;
        host.project_on_host(&self.acts, vec![(&w.laurel[1], &mut self.laurel[..m * e])]);
        let input = stage.input.rows().expect("kept for the detour");
        host.norm_and_add(&w.laurel_norm, &mut self.laurel[..m * e], input);
        Ok(())
    }
}

/// The chunk's other streams: `n` numbers for each position.
fn rows<'o>(others: &'o mut Slab, c: &Command, n: usize) -> impl Iterator<Item = &'o mut [f32]> {
    others[c.rows.start * n..c.rows.end * n].chunks_exact_mut(n)
}

/// The root of the sum of squares, as ggml adds up.
fn length(x: &[f32]) -> f32 {
    (x.iter().map(|v| f64::from(v * v)).sum::<f64>() as f32).sqrt()
}
