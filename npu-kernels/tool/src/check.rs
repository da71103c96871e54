//! `check`: kernels against the oracle.

use crate::show::Show;
use crate::{On, Wrong, bench, open};
use anyhow::Result;
use npu_kernels::check::{self, Fault, Problem, Room};
use npu_kernels::{Device, KernelId, Support};

/// Seeds of the operands.
const SEEDS: [u64; 3] = [1, 2, 3];
/// Launches for the median.
const LAUNCHES: u32 = 5;

/// Checks those that are named.
pub fn run(on: &On, names: &[String], show: &Show) -> Result<()> {
    let mut device = open::device(on, open::catalogue(on)?)?;
    let ids = open::pick(&*device, names)?;
    if all(&mut *device, &ids, show)? { Ok(()) } else { Err(Wrong.into()) }
}

/// Checks these, a line for each; whether all are right.
pub fn all(device: &mut dyn Device, ids: &[KernelId], show: &Show) -> Result<bool> {
    let width = ids.iter().map(|id| device.kernels()[id.0].name.len()).max().unwrap_or(0);
    let mut good = true;
    for id in ids {
        let spec = device.kernels()[id.0].clone();
        let what = format!("{:width$}  {} x {} x {}", spec.name, spec.m, spec.k, spec.n);
        if let Support::No(why) = device.supports(*id) {
            good = false;
            show.line(format!("{}  {what}  {why}", show.bad("SKIPPED")));
            continue;
        }
        match one(device, *id) {
            Ok(median) => {
                show.line(format!("{}  {what}  seeds 1 2 3 bit for bit, median {median:.3} ms", show.good("ok   ")))
            }
            Err((seed, fault)) => {
                good = false;
                show.line(format!("{}  {what}  seed {seed}: {fault}", show.bad("WRONG")));
                if let Fault::Device(e) = fault
                    && e.ends_device()
                {
                    return Err(e.into());
                }
            }
        }
    }
    Ok(good)
}

fn one(device: &mut dyn Device, id: KernelId) -> Result<f64, (u64, Fault)> {
    for seed in SEEDS {
        check::run(device, id, seed).map_err(|fault| (seed, fault))?;
    }
    let spec = device.kernels()[id.0].clone();
    let problem = Problem::new(&spec, SEEDS[0]);
    let room = Room::new(device, id).map_err(|e| (SEEDS[0], e.into()))?;
    let times = bench::times(device, &room, &problem, LAUNCHES);
    room.free(device);
    let times = times.map_err(|fault| (SEEDS[0], fault))?;
    Ok(bench::median(times))
}
