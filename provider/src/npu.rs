//! The NPU through XRT: what there is of it on this machine, and the device, opened. The rest of the program knows nothing of XRT.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use npu_kernels::{Catalogue, Device};
use xdna::{CatalogueDevice, DeviceLock, Driver, Memlock};

use crate::env;
use crate::exit::{Error, Kind, Result};

/// How long another process may hold the device before we give up on it.
const PATIENCE: Duration = Duration::from_secs(5);
/// The double's library. Whoever loads it gets a driver that is none.
const DOUBLE: &str = "libnpusim";

/// XRT, once it was loaded: the process then ends by [`leave`].
static LOADED: OnceLock<Driver> = OnceLock::new();

/// The device node and what is behind it.
pub struct Node {
    /// Its path.
    pub path: String,
    /// The kernel driver.
    pub driver: String,
    /// The firmware; empty where the driver does not tell.
    pub firmware: String,
}

/// The node of the NPU.
///
/// # Errors
/// Why there is none that can be used, with what to do.
pub fn node() -> Result<Node, String> {
    let node = xdna::Node::find(0).map_err(|e| e.to_string())?;
    Ok(Node {
        path: node.path.display().to_string(),
        driver: format!("amdxdna {}", node.driver),
        firmware: node.firmware.map(|f| f.to_string()).unwrap_or_default(),
    })
}

fn driver() -> Result<Driver, xdna::Error> {
    if let Some(driver) = LOADED.get() {
        return Ok(driver.clone());
    }
    let named = env::SHIM.get().map(PathBuf::from);
    let driver = Driver::load(named.as_deref())?;
    Ok(LOADED.get_or_init(|| driver).clone())
}

/// The runtime library and the shim through which it is reached.
///
/// # Errors
/// What is missing, with what to do.
pub fn runtime() -> Result<String, String> {
    let driver = driver().map_err(|e| e.to_string())?;
    let (now, built) = driver.versions();
    let path = driver.path().display();
    Ok(if now == built {
        format!("XRT {now}, by {path}")
    } else {
        format!("XRT {now}, by {path}, which was built for {built}")
    })
}

/// How much memory may be locked.
///
/// # Errors
/// It is not enough, and what to do.
pub fn memlock() -> Result<String, String> {
    let now = xdna::memlock();
    // The soft limit is raised to the hard one when the device is opened.
    let raised = Memlock { soft: now.hard, hard: now.hard };
    if raised.is_enough() { Ok(now.to_string()) } else { Err(format!("{now}: {}", Memlock::ADVICE)) }
}

/// Whether the double answers instead of the driver.
fn is_double() -> bool {
    std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains(DOUBLE))
}

/// Opens the NPU, or its double.
///
/// # Errors
/// It is not to be had.
pub fn open(kernels: Catalogue, sim: bool) -> Result<Box<dyn Device + Send>> {
    match (sim, is_double()) {
        (true, false) => {
            let text = format!("the double is not loaded: start the program with LD_PRELOAD={DOUBLE}.so");
            return Err(Error::new(Kind::Unavailable, text));
        }
        (false, true) => {
            let text =
                "the double of an NPU is loaded, and it is taken only when it is asked for by name (--device sim)";
            return Err(Error::new(Kind::Unavailable, text));
        }
        _ => {}
    }
    let opened = || -> Result<xdna::Device, xdna::Error> {
        let driver = driver()?;
        driver.open(DeviceLock::acquire(PATIENCE)?, 0)
    };
    let device = opened().map_err(|e| {
        let kind = if e.kind() == xdna::Kind::Busy { Kind::Busy } else { Kind::Unavailable };
        Error::new(kind, e)
    })?;
    Ok(Box::new(CatalogueDevice::new(device, if sim { "sim" } else { "npu" }, kernels)))
}

/// Ends the process if XRT was loaded: its own way out may hang. Everything of the device's must be gone, and what streams hold
/// back written.
pub fn leave(code: u8) {
    if let Some(driver) = LOADED.get() {
        driver.leave(code.into());
    }
}
