//! The driver's device nodes, asked without XRT: which there are, why one cannot be opened, which driver and firmware are behind
//! it; and the import of a dma-buf that is never mapped, which only holds its memory.
//!
//! Calls go through libc's `open` and `ioctl`, so that a double of the driver (npusim) can answer them.

use crate::error::Error;
use std::ffi::{c_int, c_ulong};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::{Path, PathBuf};

const DIRECTORY: &str = "/dev/accel";
/// Nodes are looked for up to this number.
const MOST: u32 = 64;

/// `struct drm_version` of `drm/drm.h`.
#[repr(C)]
#[derive(Default)]
struct DrmVersion {
    major: c_int,
    minor: c_int,
    patch: c_int,
    name_len: usize,
    name: u64,
    date_len: usize,
    date: u64,
    desc_len: usize,
    desc: u64,
}

/// `struct drm_gem_close` of `drm/drm.h`.
#[repr(C)]
struct GemClose {
    handle: u32,
    pad: u32,
}

/// `struct drm_prime_handle` of `drm/drm.h`.
#[repr(C)]
struct PrimeHandle {
    handle: u32,
    flags: u32,
    fd: i32,
}

/// `struct amdxdna_drm_get_info` of `drm/amdxdna_accel.h`.
#[repr(C)]
struct GetInfo {
    param: u32,
    buffer_size: u32,
    buffer: u64,
}

/// `struct amdxdna_drm_query_firmware_version` of `drm/amdxdna_accel.h`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Firmware {
    /// Major.
    pub major: u32,
    /// Minor.
    pub minor: u32,
    /// Patch.
    pub patch: u32,
    /// Build.
    pub build: u32,
}

impl fmt::Display for Firmware {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}.{}", self.major, self.minor, self.patch, self.build)
    }
}

/// `struct amdxdna_drm_get_resource_info` of `drm/amdxdna_accel.h`.
#[repr(C)]
#[derive(Default)]
struct ResourceInfo {
    _clock_max: u64,
    _tops_max: u64,
    tasks_max: u64,
    _tops_now: u64,
    tasks_now: u64,
}

/// `DRM_AMDXDNA_QUERY_FIRMWARE_VERSION`.
const QUERY_FIRMWARE: u32 = 8;
/// `DRM_AMDXDNA_QUERY_RESOURCE_INFO`.
const QUERY_RESOURCES: u32 = 12;

/// `_IOC` of `asm-generic/ioctl.h`, for the type `d` of DRM.
const fn drm(direction: u64, number: u64, size: usize) -> u64 {
    direction << 30 | (size as u64) << 16 | 0x64 << 8 | number
}

const WRITE: u64 = 1;
const READ_WRITE: u64 = 3;
const VERSION: u64 = drm(READ_WRITE, 0x00, size_of::<DrmVersion>());
const GEM_CLOSE: u64 = drm(WRITE, 0x09, size_of::<GemClose>());
const PRIME_FD_TO_HANDLE: u64 = drm(READ_WRITE, 0x2e, size_of::<PrimeHandle>());
/// `DRM_COMMAND_BASE + DRM_AMDXDNA_GET_INFO`.
const GET_INFO: u64 = drm(READ_WRITE, 0x40 + 7, size_of::<GetInfo>());

/// One request. `request` must have been made for `T`, as the constants above are.
fn ioctl<T>(file: &File, request: u64, argument: &mut T) -> io::Result<()> {
    // SAFETY: the descriptor is open; the request's size field is that of T, which is what the kernel reads and writes there;
    // the pointers within T lead to memory that the callers below keep alive, of the lengths that they state.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request as c_ulong as _, std::ptr::from_mut(argument)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Why no node can be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeFault {
    /// The node that came closest.
    pub path: PathBuf,
    /// The errno: `ENOENT` no such node, `EACCES` no right, `ENODEV` no device behind it, or another.
    pub code: i32,
}

impl fmt::Display for NodeFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match self.code {
            libc::ENOENT => write!(
                f,
                "no NPU node: {path} does not exist; this machine has no NPU, or the driver amdxdna is not loaded (modprobe amdxdna)"
            ),
            libc::EACCES | libc::EPERM => write!(
                f,
                "{path} exists but may not be opened; add the user to its group (usermod -aG render USER) and log in again"
            ),
            libc::ENODEV | libc::ENXIO => write!(
                f,
                "{path} exists but no device answers behind it; look for amdxdna in the kernel's messages (dmesg), and see that \
                 the IOMMU is on and not in pass-through (amd_iommu=on iommu.passthrough=0)"
            ),
            // How the driver's binding of the process's address space fails.
            libc::EOPNOTSUPP | libc::ENOSPC => write!(
                f,
                "{path}: the NPU cannot share this process's memory: the IOMMU is off or in pass-through; boot with \
                 amd_iommu=on iommu.passthrough=0"
            ),
            code => write!(f, "{path}: {}", io::Error::from_raw_os_error(code)),
        }
    }
}

/// A node of the driver amdxdna that can be opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    /// Its path.
    pub path: PathBuf,
    /// The driver's version.
    pub driver: String,
    /// The firmware's, where the driver tells.
    pub firmware: Option<Firmware>,
}

impl Node {
    /// The `index`th node of the driver, or why there is none: of several reasons the one that is closest to success.
    pub fn find(index: u32) -> Result<Node, NodeFault> {
        let mut worst = NodeFault { path: Path::new(DIRECTORY).join("accel0"), code: libc::ENOENT };
        let mut seen = 0;
        for number in 0..MOST {
            let path = Path::new(DIRECTORY).join(format!("accel{number}"));
            let fault = match probe(&path) {
                Ok(Some(node)) if seen == index => return Ok(node),
                Ok(found) => {
                    seen += u32::from(found.is_some());
                    continue;
                }
                Err(e) => NodeFault { path, code: e.raw_os_error().unwrap_or(0) },
            };
            if fault.code != libc::ENOENT && worst.code == libc::ENOENT {
                worst = fault;
            }
        }
        Err(worst)
    }
}

/// Asks the driver for a `T`, which must be the struct of that number.
fn query<T: Default>(file: &File, param: u32) -> io::Result<T> {
    let mut answer = T::default();
    let mut info =
        GetInfo { param, buffer_size: size_of::<T>() as u32, buffer: std::ptr::from_mut(&mut answer) as u64 };
    ioctl(file, GET_INFO, &mut info)?;
    Ok(answer)
}

/// Contexts in use and at most, of all processes; `None` where the driver does not tell.
pub fn contexts(path: &Path) -> Option<(u64, u64)> {
    let info: ResourceInfo = query(&open(path).ok()?, QUERY_RESOURCES).ok()?;
    Some((info.tasks_now, info.tasks_max))
}

fn open(path: &Path) -> io::Result<File> {
    // std opens with O_CLOEXEC.
    OpenOptions::new().read(true).write(true).open(path)
}

/// What is behind a node; `None` for one of another driver.
fn probe(path: &Path) -> io::Result<Option<Node>> {
    let file = open(path)?;
    let mut name = [0u8; 32];
    let mut version = DrmVersion { name_len: name.len(), name: name.as_mut_ptr() as u64, ..DrmVersion::default() };
    ioctl(&file, VERSION, &mut version)?;
    if &name[..version.name_len.min(name.len())] != b"amdxdna" {
        return Ok(None);
    }
    let firmware = query(&file, QUERY_FIRMWARE).ok();
    let driver = format!("{}.{}.{}", version.major, version.minor, version.patch);
    Ok(Some(Node { path: path.to_owned(), driver, firmware }))
}

/// The memory of a dma-buf, held by an import on an open of the node that nothing else uses and that is never mapped. A mapping
/// by the driver that is later invalidated would fail every submission of the process.
#[derive(Debug)]
pub struct Pin {
    node: File,
    handle: u32,
}

impl Pin {
    /// Imports `fd` on an open of its own.
    pub fn new(node: &Path, fd: BorrowedFd<'_>) -> Result<Pin, Error> {
        let file = open(node).map_err(|e| Error::system(format!("opening {} once more", node.display()), e))?;
        let mut prime = PrimeHandle { handle: 0, flags: 0, fd: fd.as_raw_fd() };
        ioctl(&file, PRIME_FD_TO_HANDLE, &mut prime)
            .map_err(|e| Error::system("importing a dma-buf into the NPU's driver", e))?;
        Ok(Pin { node: file, handle: prime.handle })
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        // Closing the node would do it as well; a failure changes nothing for us.
        let _ = ioctl(&self.node, GEM_CLOSE, &mut GemClose { handle: self.handle, pad: 0 });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that a C compiler gave for `drm/drm.h` and `drm/amdxdna_accel.h` of Linux 7.3.
    #[test]
    fn requests_are_the_kernels() {
        assert_eq!(VERSION, 0xc040_6400);
        assert_eq!(GEM_CLOSE, 0x4008_6409);
        assert_eq!(PRIME_FD_TO_HANDLE, 0xc00c_642e);
        assert_eq!(GET_INFO, 0xc010_6447);
    }

    #[test]
    fn faults_are_told_apart() {
        let says = |code| NodeFault { path: "/dev/accel/accel0".into(), code }.to_string();
        assert!(says(libc::ENOENT).contains("does not exist"));
        assert!(says(libc::EACCES).contains("render"));
        assert!(says(libc::ENODEV).contains("dmesg"));
        assert!(says(libc::EOPNOTSUPP).contains("passthrough"));
    }
}
