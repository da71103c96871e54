//! The steps of the gated short convolution.

use super::{Host, Stage, put_state};
use crate::layer::shortconv::{self as kind, ShortConvOp};
use crate::model::Model;
use crate::plan::Command;
use crate::weights::distinct;
use crate::{Error, KvSink};
use npu_kernels::host::acts::Activations;
use npu_kernels::host::recurrent::conv::History;
use npu_kernels::host::{Kernel, Slab};

/// Buffers. Row-major, one row per position of the chunk.
pub(super) struct Room {
    x: Slab,
    /// The gates before and after the convolution.
    before: Slab,
    after: Slab,
    mixed: Slab,
    /// The output, rounded for its projection.
    acts: Activations,
    /// What is carried from chunk to chunk, of the layer at hand.
    history: Option<History>,
    n_tokens: usize,
}

impl Room {
    /// Room for chunks of `m` positions.
    pub fn new(model: &Model<'_>, m: usize, n_tokens: usize) -> Room {
        let e = kind::widest(model.spec());
        let buffer = || Slab::new(m * e);
        let weights = model.weights().layers.iter().filter_map(|l| l.mixer.shortconv());
        Room {
            x: buffer(),
            before: buffer(),
            after: buffer(),
            mixed: buffer(),
            acts: Activations::new(m, e, &distinct(weights.map(|w| w.out.weight.ty()))),
            history: None,
            n_tokens,
        }
    }

    /// Does one step; returns the milliseconds that the sink took.
    pub fn step<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        c: &Command,
        op: &ShortConvOp,
        sink: &mut dyn KvSink,
    ) -> Result<f64, Error> {
        let w = host.weights(c).mixer.shortconv().expect("these steps are of short convolutions");
        let (m, e) = (c.rows.len(), host.model.spec().n_embd);
        match op {
            ShortConvOp::Project { .. } => {
                let mut parts = vec![(&w.x, &mut self.x[..m * e]), (&w.before, &mut self.before[..m * e])];
                if c.layer < host.model.spec().last_layer() {
                    parts.push((&w.after, &mut self.after[..m * e]));
                }
                host.project_on_host(&stage.input, parts);
            }
            ShortConvOp::Conv { .. } => {
                if c.rows.start == 0 {
                    self.history = Some(w.conv.history());
                }
                let history = self.history.as_mut().expect("the first chunk began it");
                self.x[..m * e].iter_mut().zip(self.before.iter()).for_each(|(x, b)| *x *= b);
                let out = &mut self.mixed[..m * e];
                w.conv.run(host.kernel, host.pool, &self.x[..m * e], history, false, out);
                return put_state(sink, c, self.n_tokens, history, &[]);
            }
            ShortConvOp::Out { n } => {
                let (mixed, after) = (&self.mixed, &self.after);
                host.fill(&mut self.acts, c, e, "the output of the convolution", |i, row| {
                    let (mixed, after) = (&mixed[i * e..][..e], &after[i * e..][..e]);
                    row.iter_mut().zip(mixed).zip(after).for_each(|((o, m), a)| *o = m * a);
                })?;
                host.project_on_host(&self.acts, vec![(&w.out, &mut stage.out[..m * n])]);
            }
        }
        Ok(0.0)
    }
}
