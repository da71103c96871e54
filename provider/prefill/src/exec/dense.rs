//! The steps of the plain feed-forward network.

use super::{Host, SCRATCH, Stage};
use crate::Error;
use crate::arch::Activation;
use crate::layer::dense::{self as kind, DenseOp, DenseSpec, DenseWeights};
use crate::model::Model;
use crate::plan::Command;
use crate::weights::distinct;
use npu_kernels::host::acts::Activations;
use npu_kernels::host::rowops;
use npu_kernels::host::{Kernel, Slab};

/// Buffers. Row-major, one row per position of the chunk.
pub(super) struct Room {
    /// The gates, or what they and the other projection become where that is one step.
    gate: Slab,
    up: Slab,
    /// Their product, rounded for the down projection.
    acts: Activations,
}

impl Room {
    /// Room for chunks of `m` positions.
    pub fn new(model: &Model<'_>, m: usize) -> Room {
        let ff = kind::widest(model.spec());
        let weights = model.weights().layers.iter().filter_map(|l| l.ffn.dense());
        Room {
            gate: Slab::new(m * ff),
            up: Slab::new(m * ff),
            acts: Activations::new(m, ff, &distinct(weights.map(|w| w.down.weight.ty()))),
        }
    }

    /// A device may compute the last projection: it rounds rows itself.
    pub fn keep_rows(&mut self) {
        self.acts.keep_rows();
    }

    /// Does one step.
    pub fn step<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        c: &Command,
        op: &DenseOp,
    ) -> Result<(), Error> {
        let spec = host.model.spec().layers[c.layer].ffn.dense().expect("these steps are of plain networks");
        let w = host.weights(c).ffn.dense().expect("plain networks have plain tensors");
        let m = c.rows.len();
        match op {
            DenseOp::GateUp { n, .. } => {
                let gate = w.gate.as_ref().expect("a network with a gate");
                if at_once(host, spec, w) {
                    let (kernel, activation) = (host.kernel, host.model.spec().arch.activation);
                    let join = |gate: &[f32], up: &[f32], out: &mut [f32]| {
                        SCRATCH.with_borrow_mut(|(_, half)| join(kernel, activation, gate, up, out, half));
                    };
                    host.project_gated(&stage.input, gate, &w.up, &join, &mut self.gate[..m * n]);
                } else {
                    let parts = vec![(gate, &mut self.gate[..m * n]), (&w.up, &mut self.up[..m * n])];
                    host.project(&stage.input, parts);
                }
            }
            DenseOp::Up { n, .. } => host.project(&stage.input, vec![(&w.up, &mut self.up[..m * n])]),
            DenseOp::Gate => self.gate(host, c, spec, w)?,
            DenseOp::Down { n, .. } => host.project(&self.acts, vec![(&w.down, &mut stage.out[..m * n])]),
        }
        Ok(())
    }

    fn gate<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        c: &Command,
        spec: &DenseSpec,
        w: &DenseWeights<'_>,
    ) -> Result<(), Error> {
        let (activation, n, gated) = (host.model.spec().arch.activation, spec.n_ff, w.gate.is_some());
        let (gate, up, kernel) = (if gated { &self.gate } else { &self.up }, &self.up, host.kernel);
        let joined = at_once(host, spec, w);
        host.fill(&mut self.acts, c, n, "the feed-forward network", |i, row| {
            let gate = &gate[i * n..][..n];
            if joined {
                row.copy_from_slice(gate);
                return;
            }
            let up = &up[i * n..][..n];
            match activation {
                Activation::Silu | Activation::Gelu if gated => SCRATCH.with_borrow_mut(|(buffer, half)| {
                    let gate = spec.sparse.map_or(gate, |deviations| sparse(gate, deviations, buffer));
                    join(kernel, activation, gate, up, row, half);
                }),
                Activation::Silu => kernel.rows(|| rowops::silu(up, row)),
                Activation::Gelu => SCRATCH.with_borrow_mut(|(_, half)| kernel.rows(|| rowops::gelu(up, row, half))),
                Activation::ReluSquared => kernel.rows(|| rowops::relu_squared(up, row)),
                Activation::Xielu => {
                    let numbers = spec.xielu.expect("read with the layer's numbers");
                    kernel.rows(|| rowops::xielu(up, &numbers, row));
                }
            }
        })
    }
}

/// Whether the activation of gates joins them with the other projection while both are multiplied, so that neither is written:
/// where both come from the processor, as neighbours, and no gate depends on another.
fn at_once<K: Kernel>(host: &Host<'_, K>, spec: &DenseSpec, w: &DenseWeights<'_>) -> bool {
    let one_type = w.gate.as_ref().is_some_and(|gate| gate.weight.ty() == w.up.weight.ty());
    let by_itself = matches!(host.model.spec().arch.activation, Activation::Silu | Activation::Gelu);
    host.offload.is_none() && one_type && by_itself && spec.sparse.is_none()
}

/// The activation of gates, times the other projection. Of activations with gates there are two.
fn join<K: Kernel>(
    kernel: K,
    activation: Activation,
    gate: &[f32],
    up: &[f32],
    out: &mut [f32],
    half: &mut Vec<half::f16>,
) {
    kernel.rows(|| match activation {
        Activation::Gelu => rowops::gelu_mul(gate, up, out, half),
        _ => rowops::silu_mul(gate, up, out),
    });
}

/// What of `gates` lies beyond their mean and so many deviations, 0 for the others. Sums are ggml's: in f64, then f32.
fn sparse<'b>(gates: &[f32], deviations: f32, out: &'b mut Vec<f32>) -> &'b [f32] {
    let n = gates.len() as f32;
    let sum = |f: &dyn Fn(f32) -> f32| gates.iter().map(|v| f64::from(f(*v))).sum::<f64>() as f32;
    let mean = sum(&|v| v) / n;
    let deviation = (sum(&|v| (v - mean) * (v - mean)) * (1.0 / (n - 1.0))).sqrt();
    let least = mean + deviation * deviations;
    out.clear();
    // NaN stays NaN.
    out.extend(gates.iter().map(|v| if *v - least <= 0.0 { 0.0 } else { v - least }));
    out
}
