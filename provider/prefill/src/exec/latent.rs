//! The steps of latent attention.

use super::{Host, Stage, Threads, ms};
use crate::layer::latent::{self as kind, LatentOp, LatentSpec, LatentWeights};
use crate::model::{Model, wanted};
use crate::plan::Command;
use crate::{Error, KvSink};
use kvlayout::{Part as KvPart, Rows};
use npu_kernels::WeightView;
use npu_kernels::host::acts::Activations;
use npu_kernels::host::attention::{HeadCache, Heads, Products, attention};
use npu_kernels::host::gemm::{GroupedJob, Part, gemm_grouped};
use npu_kernels::host::rowops;
use npu_kernels::host::{Columns, Kernel, TILE_ROWS};
use std::time::Instant;

/// Buffers. Row-major, one row per position of the chunk; *head rows* are one per head and position, each head's beginning
/// a tile.
pub(super) struct Room {
    /// The row and its positional channels.
    kv: Vec<f32>,
    /// Between the query projections, and the same normed and rounded.
    q_mid: Vec<f32>,
    q_acts: Activations,
    /// Queries as projected: per head the channels without a position, then those with.
    q: Vec<f32>,
    /// Head rows of the former, rounded, and in the row's space.
    nope: Activations,
    absorbed: Vec<f32>,
    /// Queries in the row's space.
    wide: Vec<f32>,
    /// What the heads read, and head rows of it, rounded; then in the heads' space.
    read: Vec<f32>,
    read_acts: Activations,
    expanded: Vec<f32>,
    /// Rounded for the output projection.
    acts: Activations,
    cache: Vec<HeadCache>,
    n_tokens: usize,
    table: Vec<f32>,
}

impl Room {
    /// Room for chunks of `m` positions.
    pub fn new(model: &Model<'_>, m: usize, n_tokens: usize) -> Room {
        let widest = |f: &dyn Fn(&LatentSpec) -> usize| kind::layers(model.spec()).map(f).max().unwrap_or(0);
        let weights = || model.weights().layers.iter().filter_map(|l| l.mixer.latent());
        let rows = widest(&|a| a.rows(m));
        let (rank, nope, out) = (widest(&|a| a.rank), widest(&|a| a.nope), widest(&|a| a.n_head * a.head_v));
        let q_rank = widest(&|a| a.q_rank.unwrap_or(0));
        Room {
            kv: vec![0.0; m * widest(&LatentSpec::row)],
            q_mid: vec![0.0; m * q_rank],
            q_acts: Activations::new(
                if q_rank > 0 { m } else { 0 },
                q_rank,
                &kind::types_of(weights(), |w| w.q_a.as_ref().map(|_| w.q.weight.ty())),
            ),
            q: vec![0.0; m * widest(&|a| a.n_head * (a.nope + a.n_rot))],
            nope: Activations::new(rows, nope, &kind::types_of(weights(), |w| Some(w.k_b[0].ty()))),
            absorbed: vec![0.0; rows * rank],
            wide: vec![0.0; m * widest(&|a| a.n_head * a.row())],
            read: vec![0.0; m * widest(&|a| a.n_head * a.rank)],
            read_acts: Activations::new(rows, rank, &kind::types_of(weights(), |w| Some(w.v_b[0].ty()))),
            expanded: vec![0.0; rows * widest(&|a| a.head_v)],
            acts: Activations::new(m, out, &kind::types_of(weights(), |w| Some(w.o.weight.ty()))),
            cache: Vec::new(),
            n_tokens,
            table: Vec::new(),
        }
    }

    /// Does one step; returns the milliseconds that the sink took.
    pub fn step<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        c: &Command,
        op: &LatentOp,
        sink: &mut dyn KvSink,
    ) -> Result<f64, Error> {
        let a = host.model.spec().layers[c.layer].mixer.latent().expect("these steps are of latent attention");
        let w = host.weights(c).mixer.latent().expect("latent attention has its tensors");
        let m = c.rows.len();
        match op {
            LatentOp::Latent { n, .. } => {
                let mut parts = vec![(&w.kv_a, &mut self.kv[..m * n[0]])];
                if let (Some((q_a, _)), true) = (&w.q_a, n[1] > 0) {
                    parts.push((q_a, &mut self.q_mid[..m * n[1]]));
                }
                host.project_on_host(&stage.input, parts);
            }
            LatentOp::Queries { k, n } => self.queries(host, stage, c, w, *k, *n)?,
            LatentOp::StoreLatent => return self.store(host, c, a, w, sink),
            LatentOp::Absorb { .. } => self.absorb(host, c, a, w),
            LatentOp::AttendLatent { .. } => {
                let heads = Heads {
                    q: &self.wide[..m * a.n_head * a.row()],
                    n_head: a.n_head,
                    caches: &self.cache,
                    m,
                    first: c.rows.start,
                    scale: a.scale,
                    window: None,
                    softcap: None,
                    slopes: &[],
                    sinks: None,
                    out: &mut self.read[..m * a.n_head * a.rank],
                };
                attention(host.kernel, host.pool, heads);
            }
            LatentOp::Expand { .. } => self.expand(host, m, a, w),
            LatentOp::LatentOut { k, n } => self.out(host, stage, c, a, w, *k, *n)?,
        }
        Ok(0.0)
    }

    fn queries<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &Stage,
        c: &Command,
        w: &LatentWeights<'_>,
        k: usize,
        n: usize,
    ) -> Result<(), Error> {
        let m = c.rows.len();
        let Some((_, norm)) = &w.q_a else {
            host.project_on_host(&stage.input, vec![(&w.q, &mut self.q[..m * n])]);
            return Ok(());
        };
        let (mid, kernel, eps) = (&self.q_mid, host.kernel, host.model.spec().eps);
        host.fill(&mut self.q_acts, c, k, "the input of the query projection", |i, row| {
            kernel.rows(|| rowops::rms_norm(&mid[i * k..][..k], norm, eps, row));
        })?;
        host.project_on_host(&self.q_acts, vec![(&w.q, &mut self.q[..m * n])]);
        Ok(())
    }

    /// Returns the milliseconds that the sink took.
    fn store<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        c: &Command,
        a: &LatentSpec,
        w: &LatentWeights<'_>,
        sink: &mut dyn KvSink,
    ) -> Result<f64, Error> {
        let spec = host.model.spec();
        let (m, row, last) = (c.rows.len(), a.row(), c.layer == spec.last_layer());
        let (kernel, eps) = (host.kernel, spec.eps);
        let head = a.nope + a.n_rot;
        let rope = a.rope.map(|rope| {
            let rope = &spec.ropes[rope];
            (rope, rope.factors.of(host.n_ctx).expect("asked for before the run began"))
        });
        let nq = if last { 0 } else { a.n_head * head };
        self.table.resize(m * a.n_rot, 0.0);
        let mut rows: Vec<(&mut [f32], &mut [f32], &mut [f32])> = Vec::with_capacity(m);
        let (mut kv, mut q, mut table) = (&mut self.kv[..m * row], &mut self.q[..m * nq], &mut self.table[..]);
        for _ in 0..m {
            let (one, two, three) = (kv.split_at_mut(row), q.split_at_mut(nq), table.split_at_mut(a.n_rot));
            rows.push((one.0, two.0, three.0));
            (kv, q, table) = (one.1, two.1, three.1);
        }
        host.pool.for_each_mut(&mut rows, |i, (kv, q, angles)| {
            let (cos, sin) = angles.split_at_mut(a.n_rot / 2);
            if let Some((rope, factors)) = rope {
                rope.table((c.rows.start + i) as u32, factors, cos, sin);
            }
            kernel.rows(|| {
                let (latent, positional) = kv.split_at_mut(a.rank);
                rowops::rms_norm_in_place(latent, &w.kv_a_norm, eps);
                if let Some((rope, _)) = rope {
                    rowops::rope(positional, rope.pairing, cos, sin);
                    for head in q.chunks_exact_mut(head) {
                        rowops::rope(&mut head[a.nope..], rope.pairing, cos, sin);
                    }
                }
            });
        });
        drop(rows);

        let started = Instant::now();
        if wanted(sink, c.layer as u32) {
            let positions = c.rows.start as u32..c.rows.end as u32;
            let (layer, rows) = (c.layer as u32, &self.kv[..m * row]);
            let rows = Rows { layer, part: KvPart::K, positions, rows, largest: None };
            sink.put_tensors(&[rows], &Threads(host.pool))?;
        }
        let took = ms(started.elapsed());
        if !last {
            host.round_k.round(&mut self.kv[..m * row]);
            if c.rows.start == 0 {
                match self.cache.first_mut().filter(|c| (c.head_k(), c.head_v()) == (row, a.rank)) {
                    Some(cache) => cache.clear(),
                    None => self.cache = vec![HeadCache::new(Products::Floats, row, a.rank, self.n_tokens)],
                }
            }
            let kv = &self.kv;
            for row in kv[..m * row].chunks_exact(row) {
                self.cache[0].push(row, &row[..a.rank]);
            }
        }
        Ok(took)
    }

    fn absorb<K: Kernel>(&mut self, host: &Host<'_, K>, c: &Command, a: &LatentSpec, w: &LatentWeights<'_>) {
        let (m, q, head) = (c.rows.len(), &self.q, a.nope + a.n_rot);
        let temperature = host.model.spec().temperature;
        per_head(host, &mut self.nope, m, [a.nope, a.rank], &w.k_b, &mut self.absorbed, |h, i, row| {
            row.copy_from_slice(&q[(i * a.n_head + h) * head..][..a.nope]);
        });
        let (absorbed, step) = (&self.absorbed, m.next_multiple_of(TILE_ROWS));
        let mut rows: Vec<&mut [f32]> = self.wide[..m * a.n_head * a.row()].chunks_exact_mut(a.row()).collect();
        host.pool.for_each_mut(&mut rows, |at, wide| {
            let (i, h) = (at / a.n_head, at % a.n_head);
            wide[..a.rank].copy_from_slice(&absorbed[(h * step + i) * a.rank..][..a.rank]);
            wide[a.rank..].copy_from_slice(&q[at * head + a.nope..][..a.n_rot]);
            if let Some(t) = temperature {
                let factor = t.of(c.rows.start + i);
                wide.iter_mut().for_each(|v| *v *= factor);
            }
            host.round_q.round(wide);
        });
    }

    fn expand<K: Kernel>(&mut self, host: &Host<'_, K>, m: usize, a: &LatentSpec, w: &LatentWeights<'_>) {
        let read = &self.read;
        per_head(host, &mut self.read_acts, m, [a.rank, a.head_v], &w.v_b, &mut self.expanded, |h, i, row| {
            row.copy_from_slice(&read[(i * a.n_head + h) * a.rank..][..a.rank]);
        });
    }

    #[allow(clippy::too_many_arguments)]
    fn out<K: Kernel>(
        &mut self,
        host: &Host<'_, K>,
        stage: &mut Stage,
        c: &Command,
        a: &LatentSpec,
        w: &LatentWeights<'_>,
        k: usize,
        n: usize,
    ) -> Result<(), Error> {
        let m = c.rows.len();
        let (expanded, step) = (&self.expanded, m.next_multiple_of(TILE_ROWS));
        host.fill(&mut self.acts, c, k, "the output of attention", |i, row| {
            for (h, part) in row.chunks_exact_mut(a.head_v).enumerate() {
                part.copy_from_slice(&expanded[(h * step + i) * a.head_v..][..a.head_v]);
            }
        })?;
        host.project_on_host(&self.acts, vec![(&w.o, &mut stage.out[..m * n])]);
        Ok(())
    }
}

/// Head rows times a matrix for each head: `row(head, position, input)` writes the inputs.
fn per_head<K: Kernel>(
    host: &Host<'_, K>,
    acts: &mut Activations,
    m: usize,
    [k, n]: [usize; 2],
    matrices: &[WeightView<'_>],
    out: &mut [f32],
    row: impl Fn(usize, usize, &mut [f32]) + Sync + Send,
) {
    let (step, heads) = (m.next_multiple_of(TILE_ROWS), matrices.len());
    acts.reshape(heads * step, k);
    acts.fill(host.kernel, host.pool, |at, buffer| match at % step {
        i if i < m => row(at / step, i, buffer),
        _ => buffer.fill(0.0),
    });
    let tiles: Vec<_> = (0..heads).map(|h| h * step / TILE_ROWS..(h + 1) * step / TILE_ROWS).collect();
    let parts = matrices.iter().map(|weight| Part { weight: *weight, bias: None }).collect();
    let out = Columns::new(&mut out[..heads * step * n], heads * step, n);
    gemm_grouped(host.kernel, host.pool, acts, &tiles, &[GroupedJob { parts, out }]);
}
