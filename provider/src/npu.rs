//! The NPU through XRT: what there is of it on this machine, and the device, opened. The rest of the program knows nothing of XRT.

use std::path::PathBuf;

use npu_kernels::{Catalogue, Device};
use xdna::Memlock;

use crate::env;
use crate::exit::{Error, Kind, Result};

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

fn shim() -> Option<PathBuf> {
    env::SHIM.get().map(PathBuf::from)
}

/// The runtime library and the shim through which it is reached.
///
/// # Errors
/// What is missing, with what to do.
pub fn runtime() -> Result<String, String> {
    let driver = xdna::driver(shim().as_deref()).map_err(|e| e.to_string())?;
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

/// Opens the NPU, or its double.
///
/// # Errors
/// It is not to be had.
pub fn open(kernels: Catalogue, sim: bool) -> Result<Box<dyn Device + Send>> {
    let device = xdna::open(shim().as_deref(), sim, kernels).map_err(|e| {
        let kind = if e.kind() == xdna::Kind::Busy { Kind::Busy } else { Kind::Unavailable };
        Error::new(kind, e)
    })?;
    Ok(Box::new(device))
}
