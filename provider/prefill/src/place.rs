//! Which command of a plan is whose: the device's or the host's, and why. This is the same question that is asked when the plan
//! is carried out, put beforehand, so that the answer can be printed.

use crate::offload::Offload;
use crate::plan::{Command, Plan, Work};
use std::fmt;

/// Who carries out a part of a command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Where {
    /// The host, and why.
    Host(String),
    /// The device.
    Device {
        /// The kernel.
        kernel: String,
        /// Launches.
        launches: usize,
        /// Bytes that they stream.
        bytes: u64,
    },
}

/// A command and who carries it out. Commands without projections are one part; the others may be several, each with its outputs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// The command.
    pub command: Command,
    /// Its parts: how many outputs (0 for all there is), and where.
    pub parts: Vec<(usize, Where)>,
}

impl fmt::Display for Where {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Where::Host(why) => write!(f, "host: {why}"),
            Where::Device { kernel, launches, bytes } => {
                write!(f, "device: {kernel}, {launches} launches, {:.1} MB", *bytes as f64 / 1e6)
            }
        }
    }
}

/// Every command's place.
pub fn place(plan: &Plan, offload: Option<&Offload>) -> Vec<Place> {
    plan.commands().map(|command| one(command, offload)).collect()
}

fn one(command: Command, offload: Option<&Offload>) -> Place {
    let (k, n) = command.op.products();
    let host = |why: &str| vec![(0, Where::Host(why.to_owned()))];
    let parts = match (offload, n.is_empty()) {
        (None, _) => host("no device"),
        (_, true) if command.work() == Work::Gemm => host("products of this kind of layer are not offered to a device"),
        (_, true) => host("no matrix product with a weight"),
        (Some(offload), false) => {
            let m = command.rows.len();
            let (groups, rest) = offload.choose(k, &n);
            let on_device = groups.into_iter().map(|(id, range)| {
                let spec = &offload.kernels()[id.0];
                let launches = m.div_ceil(spec.m);
                let kernel = spec.name.clone();
                let bytes = launches as u64 * spec.streamed();
                (n[range].iter().sum(), Where::Device { kernel, launches, bytes })
            });
            let on_host = rest.into_iter().map(|(i, why)| (n[i], Where::Host(why)));
            on_device.chain(on_host).collect()
        }
    };
    Place { command, parts }
}
