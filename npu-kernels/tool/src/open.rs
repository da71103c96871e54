//! Directories and devices, opened; and what an error's exit status is.

use crate::{On, Where};
use anyhow::{Context as _, Result, bail};
use npu_kernels::cpu_device::CpuDevice;
use npu_kernels::{Catalogue, Device, DeviceError, KernelId, Pool, manifest};

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
        Where::Sim | Where::Npu => Ok(Box::new(xdna::open(on.shim.as_deref(), on.device == Where::Sim, catalogue)?)),
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
