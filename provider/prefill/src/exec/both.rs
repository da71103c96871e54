//! The steps that join a plain network and a mixture of experts.

use super::{Host, Stage};
use crate::arch::NormKind;
use crate::layer::both::BothOp;
use crate::model::Model;
use crate::plan::Command;
use npu_kernels::host::{Kernel, Slab};

/// Buffers.
pub(super) struct Room {
    /// The output of the one that comes first, one row per position of the chunk.
    kept: Slab,
}

impl Room {
    /// Room for chunks of `m` positions.
    pub fn new(model: &Model<'_>, m: usize) -> Room {
        let any = model.spec().layers.iter().any(|l| l.ffn.is_both());
        Room { kept: Slab::new(if any { m * model.spec().n_embd } else { 0 }) }
    }

    /// Does one step.
    pub fn step<K: Kernel>(&mut self, host: &Host<'_, K>, stage: &mut Stage, c: &Command, op: &BothOp) {
        let w = host.weights(c).ffn.both().expect("these steps are of layers with both networks");
        let (e, eps, m, kernel) = (host.model.spec().n_embd, host.model.spec().eps, c.rows.len(), host.kernel);
        match op {
            BothOp::Keep => {
                let out = &stage.out;
                let mut rows: Vec<&mut [f32]> = self.kept[..m * e].chunks_exact_mut(e).collect();
                host.pool.for_each_mut(&mut rows, |i, row| {
                    let out = &out[i * e..][..e];
                    match &w.dense_norm {
                        Some(norm) => kernel.rows(|| norm.apply(NormKind::Rms, eps, out, row)),
                        None => row.copy_from_slice(out),
                    }
                });
            }
            BothOp::Sum | BothOp::Mean => {
                if let Some(norm) = &w.experts_norm {
                    return host.norm_and_add(norm, &mut stage.out[..m * e], &self.kept);
                }
                let (kept, by) = (&self.kept, if *op == BothOp::Mean { std::f32::consts::FRAC_1_SQRT_2 } else { 1.0 });
                let mut rows: Vec<&mut [f32]> = stage.out[..m * e].chunks_exact_mut(e).collect();
                host.pool.for_each_mut(&mut rows, |i, row| {
                    kernel.rows(|| row.iter_mut().zip(&kept[i * e..]).for_each(|(v, k)| *v = (*v + k) * by));
                });
            }
        }
    }
}
