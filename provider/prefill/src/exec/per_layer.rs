//! The steps of a second embedding with a part for each layer.

use super::{Host, SCRATCH, Stage, embedding};
use crate::Error;
use crate::arch::NormKind;
use crate::layer::per_layer::PerLayerOp;
use crate::model::Model;
use crate::plan::Command;
use crate::weights::{Linear, distinct};
use npu_kernels::host::acts::Activations;
use npu_kernels::host::rowops;
use npu_kernels::host::{Kernel, Slab};
use std::sync::{Mutex, PoisonError};

/// Buffers. Row-major, one row per position of the chunk.
pub(super) struct Room {
    /// The layer's part.
    input: Slab,
    gate: Slab,
    /// Their product, rounded for the way back.
    acts: Activations,
}

impl Room {
    /// Room for chunks of `m` positions.
    pub fn new(model: &Model<'_>, m: usize) -> Room {
        let width = model.spec().per_layer.map_or(0, |p| p.width);
        let weights = model.weights().layers.iter().filter_map(|l| l.per_layer.as_ref());
        Room {
            input: Slab::new(m * width),
            gate: Slab::new(m * width),
            acts: Activations::new(m, width, &distinct(weights.map(|w| w.proj.weight.ty()))),
        }
    }

    /// Does one step. `tokens` are those of the whole prompt.
    pub fn step<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        c: &Command,
        op: &PerLayerOp,
        tokens: &[u32],
    ) -> Result<(), Error> {
        let m = c.rows.len();
        let w = host.weights(c).per_layer.as_ref().expect("the model has a part for each layer");
        match op {
            PerLayerOp::Input { n, .. } => self.input(host, stage, c, *n, tokens)?,
            PerLayerOp::Gate { n, .. } => {
                host.project_on_host(&stage.input, vec![(&w.gate, &mut self.gate[..m * n])]);
            }
            PerLayerOp::Mix => {
                let (n, kernel) = (w.gate.weight.n(), host.kernel);
                let (gate, input) = (&self.gate, &self.input);
                host.fill(&mut self.acts, c, n, "the layer's own embedding", |i, row| {
                    let (gate, input) = (&gate[i * n..][..n], &input[i * n..][..n]);
                    SCRATCH.with_borrow_mut(|(_, half)| kernel.rows(|| rowops::gelu_mul(gate, input, row, half)));
                })?;
            }
            PerLayerOp::Out { n, .. } => {
                host.project_on_host(&self.acts, vec![(&w.proj, &mut stage.out[..m * n])]);
            }
        }
        Ok(())
    }

    /// The layer's part of `n` channels: the projected first embedding, normed, and the table's row, over the square root of 2.
    fn input<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        c: &Command,
        n: usize,
        tokens: &[u32],
    ) -> Result<(), Error> {
        let (spec, kernel, m) = (host.model.spec(), host.kernel, c.rows.len());
        let w = host.model.weights().per_layer.as_ref().expect("the model has a part for each layer");
        let (tokens, failed) = (&tokens[c.rows.clone()], Mutex::new(None));
        let fail = |e: Error| {
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
        };
        stage.input.reshape(m, spec.n_embd);
        stage.input.fill(kernel, host.pool, |i, row| {
            if let Err(e) = embedding(host.model, tokens[i], row) {
                fail(e);
            }
        });
        let proj = w.proj.rows(c.layer * n, n).expect("as many rows as layers have channels");
        let linear = Linear { weight: proj, bias: None };
        host.project_on_host(&stage.input, vec![(&linear, &mut self.input[..m * n])]);
        let (down, up, half) = (1.0 / (spec.n_embd as f32).sqrt(), (n as f32).sqrt(), 1.0 / 2f32.sqrt());
        let mut rows: Vec<&mut [f32]> = self.input[..m * n].chunks_exact_mut(n).collect();
        host.pool.for_each_mut(&mut rows, |i, row| {
            SCRATCH.with_borrow_mut(|(buffer, _)| {
                buffer.resize(n, 0.0);
                row.iter_mut().for_each(|v| *v *= down);
                kernel.rows(|| w.norm.apply(NormKind::Rms, spec.eps, row, buffer));
                if let Err(e) = part_of_row(&w.table, tokens[i], c.layer * n, row) {
                    fail(e);
                }
                row.iter_mut().zip(&*buffer).for_each(|(v, b)| *v = (b + *v * up) * half);
            });
        });
        drop(rows);
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}

/// `out.len()` values of a row of a table, from value `first` on, decoding no more blocks than they stand in.
fn part_of_row(table: &gguf::Tensor<'_>, row: u32, first: usize, out: &mut [f32]) -> Result<(), Error> {
    let bytes = table.row(u64::from(row)).expect("ids were checked against the vocabulary");
    let (block, size) = (table.ty.block_elems() as usize, table.ty.block_bytes() as usize);
    let (from, to) = (first / block, (first + out.len()).div_ceil(block));
    let bytes = &bytes[from * size..to * size];
    if from * block == first && (to - from) * block == out.len() {
        return Ok(gguf::dequant::dequantize(table.ty, bytes, out)?);
    }
    let mut whole = vec![0.0; (to - from) * block];
    gguf::dequant::dequantize(table.ty, bytes, &mut whole)?;
    out.copy_from_slice(&whole[first - from * block..][..out.len()]);
    Ok(())
}
