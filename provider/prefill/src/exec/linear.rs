//! The step of a matrix in the place of attention.

use super::{Host, Stage};
use crate::layer::linear::LinearOp;
use crate::plan::Command;
use npu_kernels::host::Kernel;

/// Does it.
pub(super) fn step<K: Kernel>(host: &Host<'_, K>, stage: &mut Stage, c: &Command, op: &LinearOp) {
    let w = host.weights(c).mixer.linear().expect("this step is of such a layer");
    host.project(&stage.input, vec![(&w.o, &mut stage.out[..c.rows.len() * op.n])]);
}
