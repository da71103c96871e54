//! A real dma-buf for a decoder's memory: pages of a memory file, wrapped by `/dev/udmabuf`. The kernel can only be asked by an
//! ioctl, which is the one piece of unsafe code in the harness.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use anyhow::{Context as _, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};

/// Who makes them.
pub const DEVICE: &str = "/dev/udmabuf";

/// Where the kernel says how many MiB it wraps at most.
const LIMIT: &str = "/sys/module/udmabuf/parameters/size_limit_mb";

/// `struct udmabuf_create` of `<linux/udmabuf.h>`.
#[repr(C)]
struct Create {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

const UDMABUF_CREATE: Opcode = opcode::write::<Create>(b'u', 0x42);
const UDMABUF_FLAGS_CLOEXEC: u32 = 1;

// SAFETY: `as_ptr` points to the struct that the opcode's size names, which lives as long as self; the kernel only reads it. The
// answer of a call that succeeded is a new descriptor that nobody else owns.
unsafe impl Ioctl for Create {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        UDMABUF_CREATE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        (&raw mut *self).cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> Result<OwnedFd, Errno> {
        // SAFETY: the trait promises that the call succeeded, and then this is a descriptor of ours.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

fn device() -> Result<OwnedFd, Errno> {
    rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

/// Whether this machine makes them, for this user.
pub fn is_there() -> bool {
    device().is_ok()
}

/// A dma-buf over the first bytes of a memory file: whole pages, of a file that is sealed against shrinking. The pages stay when
/// the file is closed.
///
/// # Errors
/// There is no such device, or it does not want to.
pub fn over(memfd: &OwnedFd, bytes: u64) -> Result<OwnedFd> {
    let device = device().with_context(|| format!("opening {DEVICE}"))?;
    let create = Create { memfd: memfd.as_raw_fd() as u32, flags: UDMABUF_FLAGS_CLOEXEC, offset: 0, size: bytes };
    // SAFETY: the device is the one to which the opcode belongs, and `Create` keeps to the protocol.
    let made = unsafe { ioctl(&device, create) };
    made.with_context(|| {
        let most = std::fs::read_to_string(LIMIT).map_or("unknown".into(), |text| format!("{} MiB", text.trim()));
        format!(
            "asking {DEVICE} for a dma-buf of {bytes} bytes (the most that it makes, udmabuf.size_limit_mb: {most})"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ioctl_is_the_kernels() {
        // As a C compiler gets it from the header.
        assert_eq!(UDMABUF_CREATE as u64, 0x4018_7542);
    }
}
