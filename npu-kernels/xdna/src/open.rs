//! The way from nothing to a device with a catalogue of kernels, for every program that wants one: XRT loaded once a process, the
//! double told from the driver, the lock taken, the device opened; and the way out of a process that has loaded XRT.

use crate::catalogued::CatalogueDevice;
use crate::driver::Driver;
use crate::error::Error;
use crate::lock::DeviceLock;
use npu_kernels::Catalogue;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

/// How long another process may hold the device before it counts as busy.
const PATIENCE: Duration = Duration::from_secs(5);
/// The double's library (`npu-kernels/npusim`). Whoever has loaded it gets a driver that is none.
const DOUBLE: &str = "libnpusim";

/// XRT, once it was loaded: the process then ends by [`leave`].
static LOADED: OnceLock<Driver> = OnceLock::new();

/// XRT, loaded by the shim `named` (see [`Driver::load`]); the same one whenever it is asked for again.
///
/// # Errors
/// What is missing.
pub fn driver(named: Option<&Path>) -> Result<Driver, Error> {
    if let Some(driver) = LOADED.get() {
        return Ok(driver.clone());
    }
    let driver = Driver::load(named)?;
    Ok(LOADED.get_or_init(|| driver).clone())
}

/// Opens the first NPU with these kernels or, where `sim` asks for it, its double, which is never taken for a device.
///
/// # Errors
/// It is not to be had, or the one is there where the other was asked for.
pub fn open(named: Option<&Path>, sim: bool, kernels: Catalogue) -> Result<CatalogueDevice, Error> {
    let double = std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains(DOUBLE));
    match (sim, double) {
        (true, false) => return Err(Error::NoDouble),
        (false, true) => return Err(Error::Double),
        _ => {}
    }
    let driver = driver(named)?;
    let device = driver.open(DeviceLock::acquire(PATIENCE)?, 0)?;
    Ok(CatalogueDevice::new(device, if sim { "sim" } else { "npu" }, kernels))
}

/// Ends the process if XRT was loaded: its own way out may hang. Everything of the device's must be gone, and what streams hold
/// back written.
pub fn leave(code: u8) {
    if let Some(driver) = LOADED.get() {
        driver.leave(code.into());
    }
}
