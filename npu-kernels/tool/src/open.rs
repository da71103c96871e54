//! Directories and devices, opened; and what an error's exit status is.

use crate::{On, Where};
use anyhow::{Context as _, Result, bail};
use npu_kernels::cpu_device::CpuDevice;
use npu_kernels::{Catalogue, Device, DeviceError, KernelId, Pool, manifest};
use std::sync::OnceLock;
use xdna::{CatalogueDevice, DeviceLock, Driver};

/// There is no device, or no kernel.
#[derive(Debug)]
pub struct Unavailable(pub String);

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unavailable {}

/// The exit status of an error.
pub fn status(e: &anyhow::Error) -> u8 {
    match e.chain().find_map(|cause| cause.downcast_ref::<DeviceError>()) {
        Some(DeviceError::Busy { .. }) => 75,
        Some(_) => 69,
        None if e.is::<Unavailable>() => 69,
        None if e.is::<xdna::Error>() => match e.downcast_ref::<xdna::Error>().map(xdna::Error::kind) {
            Some(xdna::Kind::Busy) => 75,
            _ => 69,
        },
        None if e.chain().any(|cause| cause.is::<manifest::ManifestError>()) => 78,
        None => 2,
    }
}

/// The directory's kernels.
pub fn catalogue(on: &On) -> Result<Catalogue> {
    let Some(dir) = &on.elfs else { bail!("which kernels? Name their directory with --elfs") };
    let catalogue = manifest::load(dir)?;
    if catalogue.kernels().is_empty() {
        return Err(Unavailable(format!("no kernel in {}", dir.display())).into());
    }
    Ok(catalogue)
}

/// The device.
pub fn device(on: &On, catalogue: Catalogue) -> Result<Box<dyn Device + Send>> {
    match on.device {
        Where::Cpu => {
            let pool = Pool::new(on.threads.into()).context("starting the cpu device")?;
            Ok(Box::new(CpuDevice::new(catalogue, pool)))
        }
        Where::Sim | Where::Npu => {
            let kind = if on.device == Where::Sim { "sim" } else { "npu" };
            Ok(Box::new(CatalogueDevice::new(npu(on)?, kind, catalogue)))
        }
    }
}

/// XRT, once it was loaded: the process then ends by [`leave`].
static LOADED: OnceLock<Driver> = OnceLock::new();

/// The NPU, or its double.
fn npu(on: &On) -> Result<xdna::Device> {
    // The double's library: whoever loads it gets a driver that is none.
    let double = std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains("libnpusim"));
    match (on.device == Where::Sim, double) {
        (true, false) => {
            let text = "the double is not loaded: start the program with LD_PRELOAD=libnpusim.so";
            return Err(Unavailable(text.to_owned()).into());
        }
        (false, true) => {
            return Err(Unavailable("the double of an NPU is loaded: --device sim is its name".to_owned()).into());
        }
        _ => {}
    }
    let driver = Driver::load(on.shim.as_deref())?;
    let driver = LOADED.get_or_init(|| driver);
    let lock = DeviceLock::acquire(std::time::Duration::from_secs(5))?;
    Ok(driver.open(lock, 0)?)
}

/// Ends the process if XRT was loaded: its own way out may hang.
pub fn leave(code: u8) {
    if let Some(driver) = LOADED.get() {
        driver.leave(code.into());
    }
}

/// The kernels whose names contain one of these; all without any.
pub fn pick(device: &dyn Device, names: &[String]) -> Result<Vec<KernelId>> {
    let all = device.kernels();
    let is_meant = |id: &KernelId| names.is_empty() || names.iter().any(|n| all[id.0].name.contains(n.as_str()));
    let found: Vec<KernelId> = (0..all.len()).map(KernelId).filter(is_meant).collect();
    if found.is_empty() {
        let have: Vec<&str> = all.iter().map(|s| s.name.as_str()).collect();
        bail!("no kernel is called {}; there are {}", names.join(" or "), have.join(", "));
    }
    Ok(found)
}
