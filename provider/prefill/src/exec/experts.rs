//! The steps of a mixture of experts.
//!
//! Positions of a chunk are put in rows grouped by expert, each group beginning a tile, so that an expert's weights are
//! read and decoded once for all of them. A position that goes to several experts has several rows, its *slots*; the sum
//! over them is made in the order of the choice, as ggml does.

use super::{Bad, Host, SCRATCH, Stage};
use crate::Error;
use crate::arch::experts::ExpertGate;
use crate::layer::experts::{
    self as kind, ExpertsOp, ExpertsSpec, ExpertsWeights, LatentWeights, Matrices, SharedWeights,
};
use crate::model::Model;
use crate::plan::Command;
use crate::route::{self, Choice};
use npu_kernels::host::acts::Activations;
use npu_kernels::host::gemm::{GroupedJob, Part, gemm_grouped};
use npu_kernels::host::rowops;
use npu_kernels::host::{Columns, Kernel, Slab, TILE_ROWS};
use std::cell::RefCell;
use std::ops::Range;

/// A row that no position has.
const NOBODY: u32 = u32::MAX;

thread_local! {
    static ROUTE: RefCell<route::Room> = RefCell::default();
}

/// Buffers. Row-major; *slot rows* are those described above.
pub(super) struct Room {
    /// The router's outputs, a row per position.
    logits: Vec<f32>,
    /// Chosen experts and weights, best first, `n_used` per position.
    choices: Vec<Choice>,
    /// The slot row of each choice.
    slots: Vec<u32>,
    /// The position, counted in the chunk, and the weight of each slot row.
    owners: Vec<(u32, f32)>,
    /// Experts that are in use, and their slot rows, counted in tiles.
    experts: Vec<usize>,
    tiles: Vec<Range<usize>>,
    /// Slot rows of inputs, rounded.
    input: Activations,
    gate: Slab,
    up: Slab,
    /// Their product, rounded for the down projection.
    gated: Activations,
    out: Slab,
    latent: Latent,
    shared: Shared,
}

/// Buffers of experts whose rows are not as long as an embedding, a row per position.
struct Latent {
    /// What the experts read.
    input: Slab,
    /// Their weighted sum, and the same rounded for the way back.
    sum: Slab,
    acts: Activations,
}

/// Buffers of the shared expert, a row per position.
struct Shared {
    gate: Slab,
    up: Slab,
    gated: Activations,
    out: Slab,
    mix: Vec<f32>,
}

impl Room {
    /// Room for chunks of `m` positions.
    pub fn new(model: &Model<'_>, m: usize) -> Room {
        let spec = model.spec();
        let widest = |f: &dyn Fn(&ExpertsSpec) -> usize| kind::layers(spec).map(f).max().unwrap_or(0);
        let (e, row) = (spec.n_embd, widest(&|x| x.row(spec)));
        let (ff, rows) = (widest(&|x| x.n_ff), widest(&|x| x.rows(m)));
        let latent = widest(&|x| x.latent.unwrap_or(0));
        let latent_rows = if latent > 0 { m } else { 0 };
        let shared = widest(&|x| x.n_shared.unwrap_or(0));
        let weights = || model.weights().layers.iter().filter_map(|l| l.ffn.experts());
        let used = widest(&|x| x.routing.n_used);
        let shared_rows = if shared > 0 { m } else { 0 };
        Room {
            logits: vec![0.0; m * widest(&|x| x.routing.n_expert)],
            choices: vec![(0, 0.0); m * used],
            slots: vec![0; m * used],
            owners: vec![(NOBODY, 0.0); rows],
            experts: Vec::new(),
            tiles: Vec::new(),
            input: Activations::new(rows, row, &kind::types_of(weights(), ExpertsWeights::grouped_types)),
            gate: Slab::new(rows * ff),
            up: Slab::new(rows * ff),
            gated: Activations::new(rows, ff, &kind::types_of(weights(), |w| vec![w.down.weights[0].ty()])),
            out: Slab::new(rows * row),
            latent: Latent {
                input: Slab::new(m * latent),
                sum: Slab::new(m * latent),
                acts: Activations::new(
                    latent_rows,
                    latent,
                    &kind::types_of(weights(), |w| w.latent.iter().map(|l| l.up.weight.ty()).collect()),
                ),
            },
            shared: Shared {
                gate: Slab::new(m * shared),
                up: Slab::new(m * shared),
                gated: Activations::new(
                    shared_rows,
                    shared,
                    &kind::types_of(weights(), |w| w.shared.iter().map(|s| s.down.weight.ty()).collect()),
                ),
                out: Slab::new(shared_rows * e),
                mix: vec![0.0; shared_rows],
            },
        }
    }

    /// Does one step.
    pub fn step<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        c: &Command,
        op: &ExpertsOp,
    ) -> Result<(), Error> {
        let spec = host.model.spec().layers[c.layer].ffn.experts().expect("these steps are of mixtures");
        let w = host.weights(c).ffn.experts().expect("mixtures have experts' tensors");
        let latent = || w.latent.as_ref().expect("the spec has rows of their own");
        match op {
            ExpertsOp::Route { .. } => self.route(host, stage, c, spec, w)?,
            ExpertsOp::LatentDown { n, .. } => self.latent.down(host, stage, c, latent(), *n)?,
            ExpertsOp::LatentUp { k, n } => self.latent.up(host, stage, c, latent(), *k, *n)?,
            ExpertsOp::ExpertsGateUp { k, n, .. } | ExpertsOp::ExpertsUp { k, n, .. } => {
                self.gate_up(host, stage, spec, w, *k, *n)
            }
            ExpertsOp::ExpertsGate => self.gate(host, c, spec)?,
            ExpertsOp::ExpertsDown { n, .. } => self.down(host, stage, c.rows.len(), spec, w, *n),
            ExpertsOp::Shared { n, .. } | ExpertsOp::SharedUp { n, .. } => {
                let w = w.shared.as_ref().expect("the spec has a shared expert");
                self.shared.add(host, stage, c, w, *n, spec.gate)?;
            }
        }
        Ok(())
    }

    fn route<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &Stage,
        c: &Command,
        x: &ExpertsSpec,
        w: &ExpertsWeights<'_>,
    ) -> Result<(), Error> {
        let (m, n, used) = (c.rows.len(), x.routing.n_expert, x.routing.n_used);
        host.project_on_host(&stage.input, vec![(&w.router, &mut self.logits[..m * n])]);
        let (logits, bias) = (&self.logits, w.selection_bias.as_deref());
        let bad = Bad::default();
        let mut rows: Vec<&mut [Choice]> = self.choices[..m * used].chunks_exact_mut(used).collect();
        host.pool.for_each_mut(&mut rows, |i, chosen| {
            let logits = &logits[i * n..][..n];
            bad.check(logits, c.rows.start + i);
            // Sorting wants numbers; what is none is complained about below.
            if logits.iter().all(|v| v.is_finite()) {
                ROUTE.with_borrow_mut(|room| x.routing.choose(logits, bias, room, chosen));
            }
        });
        bad.result(c.layer, "the output of the router")?;
        self.group(m, n, used);
        Ok(())
    }

    /// Gives every choice a slot row: experts in order, each from the beginning of a tile, positions in order.
    fn group(&mut self, m: usize, n_expert: usize, used: usize) {
        let mut next = vec![0usize; n_expert];
        let choices = &self.choices[..m * used];
        choices.iter().for_each(|(e, _)| next[*e as usize] += 1);
        self.experts.clear();
        self.tiles.clear();
        let mut tile = 0;
        for (expert, count) in next.iter_mut().enumerate().filter(|(_, n)| **n > 0) {
            let end = tile + count.div_ceil(TILE_ROWS);
            self.experts.push(expert);
            self.tiles.push(tile..end);
            *count = tile * TILE_ROWS;
            tile = end;
        }
        self.owners[..tile * TILE_ROWS].fill((NOBODY, 0.0));
        for (i, (e, weight)) in choices.iter().enumerate() {
            let slot = &mut next[*e as usize];
            self.slots[i] = *slot as u32;
            self.owners[*slot] = ((i / used) as u32, *weight);
            *slot += 1;
        }
    }

    /// Slot rows in use.
    fn rows(&self) -> usize {
        self.tiles.last().map_or(0, |t| t.end * TILE_ROWS)
    }

    fn gate_up<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &Stage,
        x: &ExpertsSpec,
        w: &ExpertsWeights<'_>,
        k: usize,
        n: usize,
    ) {
        let owners = &self.owners;
        let from = match x.latent {
            Some(_) => &self.latent.input[..],
            None => stage.input.rows().expect("kept for experts"),
        };
        self.input.reshape(self.tiles.last().map_or(0, |t| t.end * TILE_ROWS), k);
        self.input.fill(host.kernel, host.pool, |slot, row| match owners[slot] {
            (NOBODY, _) => row.fill(0.0),
            (i, weight) => {
                row.copy_from_slice(&from[i as usize * k..][..k]);
                if x.weights_first {
                    row.iter_mut().for_each(|v| *v *= weight);
                }
            }
        });
        let size = self.rows() * n;
        let gate = w.gate.as_ref().map(|gate| job(&self.experts, gate, &mut self.gate[..size], n));
        let up = job(&self.experts, &w.up, &mut self.up[..size], n);
        let jobs: Vec<GroupedJob<'_>> = gate.into_iter().chain([up]).collect();
        gemm_grouped(host.kernel, host.pool, &self.input, &self.tiles, &jobs);
    }

    fn gate<K: Kernel>(&mut self, host: &Host<'_, K>, c: &Command, x: &ExpertsSpec) -> Result<(), Error> {
        let (rows, n, kernel) = (self.rows(), x.n_ff, host.kernel);
        let (owners, gate, up) = (&self.owners, &self.gate, &self.up);
        let bad = Bad::default();
        self.gated.reshape(rows, n);
        self.gated.fill(kernel, host.pool, |slot, row| {
            if owners[slot].0 == NOBODY {
                return row.fill(0.0);
            }
            gated(kernel, x.gate, &gate[slot * n..][..n], &up[slot * n..][..n], row);
            bad.check(row, c.rows.start + owners[slot].0 as usize);
        });
        bad.result(c.layer, "an expert")
    }

    fn down<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        m: usize,
        x: &ExpertsSpec,
        w: &ExpertsWeights<'_>,
        n: usize,
    ) {
        let size = self.rows() * n;
        let jobs = [job(&self.experts, &w.down, &mut self.out[..size], n)];
        gemm_grouped(host.kernel, host.pool, &self.gated, &self.tiles, &jobs);
        let (slots, owners, out, used) = (&self.slots, &self.owners, &self.out, x.routing.n_used);
        let sums = if x.latent.is_some() { &mut self.latent.sum } else { &mut stage.out };
        let mut rows: Vec<&mut [f32]> = sums[..m * n].chunks_exact_mut(n).collect();
        host.pool.for_each_mut(&mut rows, |i, sum| {
            for (j, &slot) in slots[i * used..][..used].iter().enumerate() {
                let from = &out[slot as usize * n..][..n];
                let weight = if x.weights_first { 1.0 } else { owners[slot as usize].1 };
                host.kernel.rows(|| match j {
                    0 => sum.iter_mut().zip(from).for_each(|(s, v)| *s = v * weight),
                    _ => rowops::add_scaled(sum, from, weight),
                });
            }
        });
    }
}

/// The products of the experts in use with their slot rows, `n` outputs each.
fn job<'a>(experts: &[usize], matrices: &'a Matrices<'_>, out: &'a mut [f32], n: usize) -> GroupedJob<'a> {
    let part = |e: &usize| Part { weight: matrices.weights[*e], bias: matrices.bias(*e) };
    let m = out.len() / n;
    GroupedJob { parts: experts.iter().map(part).collect(), out: Columns::new(out, m, n) }
}

impl Latent {
    /// What the experts read.
    fn down<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &Stage,
        c: &Command,
        w: &LatentWeights<'_>,
        n: usize,
    ) -> Result<(), Error> {
        let size = c.rows.len() * n;
        host.project_on_host(&stage.input, vec![(&w.down, &mut self.input[..size])]);
        let bad = Bad::default();
        let mut rows: Vec<&mut [f32]> = self.input[..size].chunks_exact_mut(n).collect();
        host.pool.for_each_mut(&mut rows, |i, row| host.kernel.rows(|| bad.check(row, c.rows.start + i)));
        bad.result(c.layer, "the input of the experts")
    }

    /// Their sum becomes the mixture's output.
    fn up<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        c: &Command,
        w: &LatentWeights<'_>,
        k: usize,
        n: usize,
    ) -> Result<(), Error> {
        let sum = &self.sum;
        host.fill(&mut self.acts, c, k, "the sum of the experts", |i, row| row.copy_from_slice(&sum[i * k..][..k]))?;
        host.project_on_host(&self.acts, vec![(&w.up, &mut stage.out[..c.rows.len() * n])]);
        Ok(())
    }
}

impl Shared {
    /// Computes it and adds it to the mixture's output.
    fn add<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        c: &Command,
        w: &SharedWeights<'_>,
        n: usize,
        gate: ExpertGate,
    ) -> Result<(), Error> {
        let (m, e, kernel) = (c.rows.len(), host.model.spec().n_embd, host.kernel);
        // What the experts' gates go through counts only where there are none.
        let how = if gate.has_matrix() { ExpertGate::Silu } else { gate };
        let gate = w.gate.as_ref().map(|gate| (gate, &mut self.gate[..m * n]));
        let mut parts: Vec<_> = gate.into_iter().chain([(&w.up, &mut self.up[..m * n])]).collect();
        if let Some(mix) = &w.mix {
            parts.push((mix, &mut self.mix[..m]));
        }
        host.project_on_host(&stage.input, parts);
        let (gate, up) = (&self.gate, &self.up);
        host.fill(&mut self.gated, c, n, "the shared expert", |i, row| {
            gated(kernel, how, &gate[i * n..][..n], &up[i * n..][..n], row);
        })?;
        host.project_on_host(&self.gated, vec![(&w.down, &mut self.out[..m * e])]);
        let (out, mix, mixed) = (&self.out, &self.mix, w.mix.is_some());
        let mut rows: Vec<&mut [f32]> = stage.out[..m * e].chunks_exact_mut(e).collect();
        host.pool.for_each_mut(&mut rows, |i, sum| {
            let from = &out[i * e..][..e];
            if mixed {
                // As the graph has it: silu(x) / x.
                let x = mix[i];
                let by = x / (1.0 + (-x).exp()) / x;
                kernel.rows(|| rowops::add_scaled(sum, from, by));
            } else {
                kernel.rows(|| rowops::add(sum, from));
            }
        });
        Ok(())
    }
}

/// `out` = the gate's activation times `up`, or that of `up` where there is no gate.
fn gated<K: Kernel>(kernel: K, how: ExpertGate, gate: &[f32], up: &[f32], out: &mut [f32]) {
    match how {
        ExpertGate::Silu => kernel.rows(|| rowops::silu_mul(gate, up, out)),
        ExpertGate::Gelu => SCRATCH.with_borrow_mut(|(_, half)| kernel.rows(|| rowops::gelu_mul(gate, up, out, half))),
        ExpertGate::Relu => kernel.rows(|| rowops::relu_mul(gate, up, out)),
        ExpertGate::SwigluOai => kernel.rows(|| rowops::swiglu_oai(gate, up, out)),
        ExpertGate::ReluSquared => kernel.rows(|| rowops::relu_squared(up, out)),
    }
}
