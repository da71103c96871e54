//! Finding and loading the shim, and what it says of XRT.

use crate::accel::Node;
use crate::device::{Device, made_sense_of};
use crate::error::Error;
use crate::limits::{Memlock, raise_memlock};
use crate::lock::DeviceLock;
use crate::shim::{DeviceHandle, Shim};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The shim's file name, as `cargo xtask shim` makes it.
pub const SHIM_FILE: &str = "libxdna_shim.so";

/// A version of XRT.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Version {
    /// Major.
    pub major: u32,
    /// Minor.
    pub minor: u32,
}

impl From<u32> for Version {
    fn from(code: u32) -> Version {
        Version { major: code >> 16, minor: code & 0xffff }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// XRT, loaded.
#[derive(Clone, Debug)]
pub struct Driver {
    shim: Arc<Shim>,
    path: PathBuf,
    runtime: Version,
    built: Version,
}

impl Driver {
    /// Loads the shim: `named` if that is given, else the one beside the executable. Do this before threads are started. Loading
    /// it twice gives the same library again.
    pub fn load(named: Option<&Path>) -> Result<Driver, Error> {
        let beside = || std::env::current_exe().ok()?.parent().map(|dir| dir.join(SHIM_FILE));
        let path = named.map(Path::to_owned).or_else(beside).unwrap_or_else(|| SHIM_FILE.into());
        // A name without a slash would be looked for in the system's library directories.
        let path = std::path::absolute(&path).unwrap_or(path);
        if !path.exists() {
            return Err(Error::NoShim { tried: vec![path] });
        }
        let shim = Shim::load(&path)?;
        let (runtime, built) = shim.versions().map_err(Error::from)?;
        Ok(Driver { shim, path, runtime: runtime.into(), built: built.into() })
    }

    /// The shim's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// XRT's version, and that of the headers the shim was built with.
    pub fn versions(&self) -> (Version, Version) {
        (self.runtime, self.built)
    }

    /// How many devices XRT lists. It is asked after the limit of locked memory was raised, without which it may see none.
    pub fn device_count(&self) -> Result<u32, Error> {
        raise_memlock();
        Ok(self.shim.device_count()?)
    }

    /// Opens the `index`th device. `lock` is kept until the last thing made from the device is gone.
    pub fn open(&self, lock: DeviceLock, index: u32) -> Result<Device, Error> {
        let node = Node::find(index).map_err(Error::NoNode)?;
        let memlock: Memlock = raise_memlock();
        let found = self.shim.device_count().map_err(|f| made_sense_of(f, None))?;
        if index >= found {
            return Err(if memlock.is_enough() {
                Error::NoDevice { index, found, memlock }
            } else {
                Error::Memlock { what: format!("XRT lists {found} NPUs"), memlock }
            });
        }
        let handle = DeviceHandle::open(&self.shim, index).map_err(|f| made_sense_of(f, None))?;
        Device::new(self.clone(), handle, node, memlock, lock)
    }

    /// Ends the process at once with that status, without running destructors: XRT's can hang. What Rust's own streams hold back
    /// must have been flushed before.
    pub fn leave(&self, code: i32) -> ! {
        self.shim.leave(code)
    }
}
