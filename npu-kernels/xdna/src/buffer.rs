//! Memory that host and device both see, and the only place that knows when caches must be flushed or invalidated: the device
//! does not look into the processor's.

use crate::device::DeviceInner;
use crate::error::Error;
use crate::shim::BufferHandle;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Some bytes of memory for a run's argument. A run takes it and gives it back ([`crate::Run::wait`]), so nobody looks at it while
/// the device writes. Dropping it gives the memory back for the next buffer of its size.
#[derive(Debug)]
pub struct Buffer {
    device: Arc<DeviceInner>,
    /// `None` only while it is dropped.
    handle: Option<BufferHandle>,
    /// As asked for; the memory may be longer.
    len: usize,
    /// What the host wrote and the device has not been shown: start and end.
    unflushed: (usize, usize),
    /// Whether the device may have written since the host looked.
    stale: bool,
    /// Whether its memory may be used for another buffer.
    reusable: bool,
}

impl Buffer {
    pub(crate) fn new(device: Arc<DeviceInner>, handle: BufferHandle, len: usize, reusable: bool) -> Buffer {
        device.live.buffer(1);
        Buffer { device, handle: Some(handle), len, unflushed: (0, 0), stale: false, reusable }
    }

    /// Zeroes it, which is also what the device will see.
    pub(crate) fn zeroed(mut self) -> Buffer {
        let handle = self.handle.as_mut().expect("only drop takes it");
        handle.zero();
        self.unflushed = (0, handle.len());
        self
    }

    pub(crate) fn handle(&self) -> &BufferHandle {
        self.handle.as_ref().expect("only drop takes it")
    }

    /// Bytes, as asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes, which none has.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the device sees it.
    pub fn address(&self) -> u64 {
        self.handle().address()
    }

    fn check(&self, at: usize, n: usize) -> Result<(), Error> {
        if at > self.len || n > self.len - at {
            return Err(Error::Request(format!("bytes {at}..{} of a buffer of {}", at.saturating_add(n), self.len)));
        }
        Ok(())
    }

    /// Writes bytes at a place. The device sees them from the next run on that gets the buffer.
    pub fn write(&mut self, at: usize, bytes: &[u8]) -> Result<(), Error> {
        self.check(at, bytes.len())?;
        if self.stale {
            // A cache line that is written in part is read first: it must be the device's last word.
            let whole = self.handle().len();
            self.handle().sync(false, 0, whole)?;
            self.stale = false;
        }
        self.handle.as_mut().expect("only drop takes it").copy_in(at, bytes);
        if !bytes.is_empty() {
            let (start, end) = self.unflushed;
            let new = (at, at + bytes.len());
            self.unflushed = if start == end { new } else { (start.min(new.0), end.max(new.1)) };
        }
        Ok(())
    }

    /// Reads bytes from a place, as the last run left them.
    pub fn read(&mut self, at: usize, bytes: &mut [u8]) -> Result<(), Error> {
        self.check(at, bytes.len())?;
        if self.stale {
            let whole = self.handle().len();
            self.handle().sync(false, 0, whole)?;
            self.stale = false;
        }
        self.handle().copy_out(at, bytes);
        Ok(())
    }

    /// A dma-buf descriptor for it.
    pub fn export(&self) -> Result<OwnedFd, Error> {
        Ok(self.handle().export()?)
    }

    /// What has to happen before the device gets it.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        let (start, end) = self.unflushed;
        if start < end {
            self.handle().sync(true, start, end - start)?;
            self.unflushed = (0, 0);
        }
        Ok(())
    }

    /// Shows the device everything that was written so far; after this the buffer can be shared between runs ([`crate::Arg::Shared`]).
    pub fn share(mut self) -> Result<Arc<Buffer>, Error> {
        self.flush()?;
        Ok(Arc::new(self))
    }

    /// The device may have written it.
    pub(crate) fn touched(&mut self) {
        self.stale = true;
    }

    /// Its memory is never given back: a run that nobody has seen end may still write there.
    pub(crate) fn abandon(mut self) {
        std::mem::forget(self.handle.take());
    }

    /// Its memory is not used again: a failed run may still write there.
    pub(crate) fn spoil(&mut self) {
        self.reusable = false;
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.device.live.buffer(-1);
        if let Some(handle) = self.handle.take()
            && self.reusable
        {
            self.device.give_back(handle);
        }
    }
}
