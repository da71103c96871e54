//! Memory that another device or process owns, handed over as a dma-buf, on its way into a run.
//!
//! The driver is never asked to map it: since August 2026 one mapping of the driver's that is invalidated fails every
//! submission of the process. So the descriptor is mapped here, all pages are made present, and the address is given to the
//! run, since on these machines the device uses the process's addresses. The memory itself is held by an import that is not
//! mapped (`Pin`). Whether the device sees such memory correctly is measured by the caller with a run whose answer it knows,
//! never assumed.

use crate::accel::Pin;
use crate::error::Error;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;

const PAGE: usize = 4096;
const LINE: usize = 64;
/// `DMA_BUF_IOCTL_SYNC` of `linux/dma-buf.h`, and its flags.
const SYNC: u64 = 0x4008_6200;
const SYNC_READ: u64 = 1;
const SYNC_WRITE: u64 = 2;
const SYNC_END: u64 = 4;

/// A mapped and held dma-buf.
#[derive(Debug)]
pub struct Foreign {
    map: NonNull<u8>,
    len: usize,
    // Dropped before the descriptor, after the mapping.
    _pin: Pin,
    fd: OwnedFd,
}

// SAFETY: a mapping belongs to no thread; nothing here makes references into it, only raw copies.
unsafe impl Send for Foreign {}
// SAFETY: likewise. Copies by two threads of the same bytes are the callers' race, of bytes, as with the other process.
unsafe impl Sync for Foreign {}

impl Foreign {
    /// Maps `len` bytes of `fd`, makes their pages present and holds them by an import on a further open of `node`.
    pub fn map(node: &Path, fd: BorrowedFd<'_>, len: usize) -> Result<Foreign, Error> {
        let failed = |what: &str| Error::system(format!("{what} a dma-buf of {len} bytes"), io::Error::last_os_error());
        let fd = fd.try_clone_to_owned().map_err(|e| Error::system("copying a dma-buf's descriptor", e))?;
        let size = rustix::fs::seek(&fd, rustix::fs::SeekFrom::End(0))
            .map_err(|e| Error::system("asking a dma-buf for its size", e.into()))?;
        if len == 0 || (len as u64) > size {
            return Err(Error::Request(format!("{len} bytes of a dma-buf of {size}")));
        }
        let pin = Pin::new(node, fd.as_fd())?;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if map == libc::MAP_FAILED {
            return Err(failed("mapping"));
        }
        let foreign = Foreign { map: NonNull::new(map.cast()).expect("not null"), len, _pin: pin, fd };
        foreign.populate();
        Ok(foreign)
    }

    /// Makes the pages present for writing, without writing: the device's page walk must find them.
    fn populate(&self) {
        // SAFETY: the range is our mapping. This changes no byte.
        let done = unsafe { libc::madvise(self.map.as_ptr().cast(), self.len, libc::MADV_POPULATE_WRITE) };
        if done != 0 {
            // Not possible for every kind of memory; a read of each page is.
            for at in (0..self.len).step_by(PAGE) {
                // SAFETY: inside of the mapping; volatile, so that it happens.
                unsafe { self.map.add(at).read_volatile() };
            }
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes, which none has.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the device sees a byte.
    pub fn address(&self, offset: u64) -> Result<u64, Error> {
        if offset >= self.len as u64 {
            return Err(Error::Request(format!("byte {offset} of a dma-buf of {}", self.len)));
        }
        Ok(self.map.as_ptr() as u64 + offset)
    }

    fn check(&self, at: usize, n: usize) -> Result<(), Error> {
        if at > self.len || n > self.len - at {
            return Err(Error::Request(format!("bytes {at}..{} of a dma-buf of {}", at.saturating_add(n), self.len)));
        }
        Ok(())
    }

    /// Announces an access of the processor to whoever owns the memory.
    fn announce(&self, flags: u64) -> Result<(), Error> {
        loop {
            // SAFETY: the descriptor is open; the request takes a u64 by pointer.
            if unsafe { libc::ioctl(self.fd.as_raw_fd(), SYNC as _, &raw const flags) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => {}
                // Not a dma-buf: ordinary shared memory needs no such thing.
                Some(libc::ENOTTY) => return Ok(()),
                _ => return Err(Error::system("DMA_BUF_IOCTL_SYNC", error)),
            }
        }
    }

    /// Copies into it and out to memory, where the device and the owner see it.
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<(), Error> {
        self.check(at, bytes.len())?;
        self.announce(SYNC_WRITE)?;
        // SAFETY: checked; raw bytes, no reference.
        unsafe { self.map.add(at).copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
        self.flush_lines(at, bytes.len());
        self.announce(SYNC_WRITE | SYNC_END)
    }

    /// Copies out of it, what is in memory and not what the processor remembers.
    pub fn read(&self, at: usize, bytes: &mut [u8]) -> Result<(), Error> {
        self.check(at, bytes.len())?;
        self.announce(SYNC_READ)?;
        self.flush_lines(at, bytes.len());
        // SAFETY: checked; raw bytes, no reference.
        unsafe { self.map.add(at).copy_to_nonoverlapping(NonNull::from(&mut *bytes).cast(), bytes.len()) };
        self.announce(SYNC_READ | SYNC_END)
    }

    /// Writes back and drops the processor's copies of a range.
    fn flush_lines(&self, at: usize, n: usize) {
        if n == 0 {
            return;
        }
        #[cfg(target_arch = "x86_64")]
        {
            let first = at & !(LINE - 1);
            for line in (first..at + n).step_by(LINE) {
                // SAFETY: the line begins inside of the mapping (which begins at a page), every x86-64 has the instruction, and
                // it changes no byte.
                unsafe { std::arch::x86_64::_mm_clflush(self.map.add(line).as_ptr()) };
            }
            // SAFETY: orders the flushes before what follows; every x86-64 has it.
            unsafe { std::arch::x86_64::_mm_mfence() };
        }
        // There is no such device on another architecture.
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (at, LINE);
    }

    /// Everything, before a run gets it.
    pub(crate) fn flush(&self) {
        self.flush_lines(0, self.len);
    }

    /// Everything, after a run had it: dropping clean copies is the same instruction.
    pub(crate) fn invalidate(&self) {
        self.flush_lines(0, self.len);
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: our mapping, used for the last time. Runs hold the value until their end.
        unsafe { libc::munmap(self.map.as_ptr().cast(), self.len) };
    }
}
