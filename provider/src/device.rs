//! Which device computes matrix products beside the host, and why: from `--device` and `--elfs` to something that `prefill` can
//! be handed, or to the reason why there is nothing.
//!
//! `auto` takes the NPU only where there is a device, a kernel for the model, and a self-test that has passed; everything else
//! is said in one line and computed on the host. Asked for by name, a device that is not to be had is an error.

use std::path::Path;
use std::sync::Mutex;

use npu_kernels::cpu_device::CpuDevice;
use npu_kernels::{Catalogue, Pool, manifest};
use prefill::Offload;
use serde::Serialize;

use crate::cli::Device;
use crate::exit::{Error, Kind, Result};
use crate::job::Compute;
use crate::pack_store::FileStore;
use crate::receipt::round;
use crate::say::say;

/// What M = 128 designs that stream int8 weights are bound by, in bytes per second: others' measurements, not ours.
pub const STREAM_BYTES_PER_SECOND: f64 = 8.3e9;

/// What was made of `--device`.
pub struct Opened {
    /// The device, with the kernels that passed; `None` is the host alone.
    pub offload: Option<Mutex<Offload>>,
    /// Why it is what it is, one line each.
    pub notes: Vec<String>,
}

impl Opened {
    /// The host alone.
    fn host(why: Option<String>) -> Opened {
        Opened { offload: None, notes: why.into_iter().collect() }
    }

    /// For what it was asked by.
    pub fn kind(&self) -> &'static str {
        self.offload.as_ref().map_or("cpu", |o| look(o, |o| o.info().kind))
    }

    /// Memory that a run takes beside the plan's.
    pub fn memory_bytes(&self, needs: &[(usize, Vec<usize>)], chunk: usize) -> u64 {
        self.offload.as_ref().map_or(0, |o| look(o, |o| o.memory_bytes(needs, chunk)))
    }
}

/// Asks something of an offload.
pub fn look<T>(offload: &Mutex<Offload>, f: impl FnOnce(&Offload) -> T) -> T {
    f(&offload.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
}

/// The kernels of `--elfs`.
///
/// # Errors
/// What is wrong with the directory, its manifest or a file.
pub fn catalogue(dir: &Path) -> Result<Catalogue> {
    manifest::load(dir).map_err(|e| Error::new(Kind::Config, e).context("--elfs"))
}

/// Opens what was asked for and tests the kernels that `needs` (inputs and outputs of the plan's projections) would use.
///
/// # Errors
/// A directory of kernels that is not in order, whatever was asked for; and, for a device that was asked for by name, that it
/// is not to be had.
pub fn open(compute: &Compute, needs: &[(usize, Vec<usize>)]) -> Result<Opened> {
    let kernels = compute.elfs.as_deref().map(catalogue).transpose()?;
    let named = match compute.device {
        Device::Cpu => {
            let unused =
                compute.elfs.as_ref().map(|d| format!("kernels in {} are not used: --device cpu", d.display()));
            return Ok(Opened::host(unused));
        }
        Device::Auto => None,
        Device::Npu => Some("npu"),
        Device::Sim => Some("sim"),
        Device::Oracle => Some("oracle"),
    };
    let Some(kernels) = kernels else {
        return match named {
            Some(name) => {
                let text = format!("--device {name}: it needs kernels, and no directory of them is given (--elfs)");
                Err(Error::new(Kind::Unavailable, text))
            }
            // Nobody has spoken of an NPU.
            None => Ok(Opened::host(None)),
        };
    };
    let mut notes = kernels.notes.clone();
    let tried = attempt(compute, kernels, needs, &mut notes);
    match (tried, named) {
        (Ok(offload), _) => Ok(Opened { offload: Some(Mutex::new(offload)), notes }),
        (Err(e), Some(name)) => Err(e.context(format!("--device {name}"))),
        (Err(e), None) => {
            notes.push(format!("computing on the CPU: {e}"));
            Ok(Opened { offload: None, notes })
        }
    }
}

/// The device that was asked for, with nothing tested; the NPU where nobody said.
///
/// # Errors
/// It is not to be had.
pub fn raw(compute: &Compute, kernels: Catalogue) -> Result<Box<dyn npu_kernels::Device + Send>> {
    if kernels.kernels().is_empty() {
        return Err(Error::new(Kind::Unavailable, "the directory of --elfs holds no kernel"));
    }
    match compute.device {
        Device::Oracle | Device::Cpu => {
            let pool = Pool::new(compute.threads).map_err(|e| Error::new(Kind::Busy, e))?;
            let mut device = CpuDevice::new(kernels, pool);
            device.call("oracle");
            Ok(Box::new(device))
        }
        _ => crate::npu::open(kernels, compute.device == Device::Sim),
    }
}

fn attempt(
    compute: &Compute,
    kernels: Catalogue,
    needs: &[(usize, Vec<usize>)],
    notes: &mut Vec<String>,
) -> Result<Offload> {
    let mut offload = Offload::new(raw(compute, kernels)?, FileStore::usual()?);
    let tested = offload.self_test(needs);
    let failed =
        tested.iter().filter_map(|(name, wrong)| Some(format!("kernel {name} is out of use: {}", wrong.as_ref()?)));
    notes.extend(failed);
    if let Some(why) = offload.lost() {
        let kind = if offload.is_busy() { Kind::Busy } else { Kind::Unavailable };
        return Err(Error::new(kind, why.to_owned()));
    }
    if tested.is_empty() {
        return Err(Error::new(Kind::Unavailable, "no kernel has the shape of a projection of this model"));
    }
    if offload.usable() == 0 {
        return Err(Error::new(Kind::Unavailable, "no kernel passed its self-test"));
    }
    Ok(offload)
}

/// Says on stderr what is of note.
pub fn announce(opened: &Opened) {
    opened.notes.iter().for_each(say);
    if let Some(offload) = &opened.offload {
        let line = look(offload, |o| {
            format!(
                "matrix products on {} ({}), {} kernels passed their self-test",
                o.info().kind,
                o.info().name,
                o.usable()
            )
        });
        say(line);
    }
}

/// What the receipt says of a device.
#[derive(Debug, Serialize)]
pub struct Report {
    /// What it calls itself.
    pub name: String,
    /// Its kernel driver.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub driver: String,
    /// Its firmware.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub firmware: String,
    /// Its runtime.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub runtime: String,
    /// Projections (of a chunk each) that it computed.
    pub on_device: u64,
    /// Those for which it has no kernel.
    pub on_host: u64,
    /// Those that it should have computed, and that the host did.
    pub made_up: u64,
    /// Launches that completed.
    pub launches: u64,
    /// Bytes that they streamed.
    pub bytes: u64,
    /// The least time that their weights take by others' measurements of such kernels, in milliseconds.
    pub bound_ms: f64,
    /// Milliseconds for packing weights, or fetching them packed.
    pub pack_ms: f64,
    /// Milliseconds of waiting for launches with nothing else to do.
    pub wait_ms: f64,
    /// Weights that were packed now, and that were found packed.
    pub packed: [u64; 2],
    /// What went wrong on the way; the result does not depend on it.
    pub failures: Vec<String>,
}

impl Report {
    /// After a run.
    pub fn new(offload: &Offload) -> Report {
        let (info, usage) = (offload.info().clone(), offload.usage().clone());
        Report {
            name: info.name,
            driver: info.driver,
            firmware: info.firmware,
            runtime: info.runtime,
            on_device: usage.on_device,
            on_host: usage.on_host,
            made_up: usage.made_up,
            launches: usage.launches,
            bytes: usage.bytes,
            bound_ms: round(usage.weight_bytes as f64 / STREAM_BYTES_PER_SECOND * 1e3),
            pack_ms: round(usage.pack_ms),
            wait_ms: round(usage.wait_ms),
            packed: usage.packed,
            failures: usage.failures,
        }
    }
}
