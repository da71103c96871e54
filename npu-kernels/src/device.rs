//! What computes a product: a host, an NPU, a double of one. One trait, and the words that go with it.
//!
//! A device is opened with a [`Catalogue`](crate::catalogue::Catalogue); a [`Command`] names one of its kernels and three
//! buffers. Nothing here knows a model. Who validates what: the *device* checks that buffers exist and are large enough for
//! the kernel; the *caller* has packed their contents as the kernel's [`Spec`] says. A device never returns success for a
//! launch that did not complete; what it computed is believed only after [`check`](crate::check).

use crate::catalogue::{KernelId, Spec};
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// A buffer of a device. Its number is good for that device only.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct Buffer(pub u32);

/// A launch that has been submitted.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct Fence(pub u64);

/// One launch: a kernel and its operands. The device puts them in the order that the kernel's file wants.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Command {
    /// Which kernel.
    pub kernel: KernelId,
    /// Activations.
    pub a: Buffer,
    /// Weights.
    pub b: Buffer,
    /// The product.
    pub c: Buffer,
}

/// How a launch gets at memory that is somebody else's.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Import {
    /// By the address of a mapping that this process made itself. The driver only holds the memory.
    Own,
    /// Mapped by the driver. Only for memory of this system's (udmabuf, heaps): a mapping of another device's memory that is
    /// invalidated can fail every later launch of the process.
    Driver,
}

/// Whether a device can run a kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Support {
    /// It can.
    Yes,
    /// It cannot, and why.
    No(String),
}

impl Support {
    /// Whether it is a yes.
    pub fn is_yes(&self) -> bool {
        *self == Support::Yes
    }
}

/// What a device says of itself. Empty where it does not apply.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// `cpu`, `npu` or `sim`: what it was asked for by.
    pub kind: &'static str,
    /// What it calls itself.
    pub name: String,
    /// The kernel driver and its version.
    pub driver: String,
    /// The firmware's version.
    pub firmware: String,
    /// The runtime's version.
    pub runtime: String,
}

/// Why a device did not do what it was asked.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The launch was not done in time. Its output must not be used, and it may still be running.
    #[error("a launch did not complete within {ms} ms")]
    Timeout {
        /// How long was waited.
        ms: u64,
    },
    /// The launch ended in another state than completed. Its output must not be used.
    #[error("a launch ended as {state}")]
    Failed {
        /// The state.
        state: String,
    },
    /// The device is not there any more.
    #[error("the device is gone: {what}")]
    Gone {
        /// What says so.
        what: String,
    },
    /// No memory for a buffer.
    #[error("no device memory for {bytes} bytes: {what}")]
    NoMemory {
        /// How much was asked for.
        bytes: usize,
        /// What says so, and what to do.
        what: String,
    },
    /// Somebody else has it.
    #[error("the device is busy: {what}")]
    Busy {
        /// Who or what.
        what: String,
    },
    /// A kernel's file was refused.
    #[error("kernel {kernel}: {what}")]
    Kernel {
        /// Its name.
        kernel: String,
        /// Why.
        what: String,
    },
    /// The caller named a buffer or a range that is not there: a mistake of the caller's.
    #[error("{0}")]
    Misuse(String),
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

impl DeviceError {
    /// Whether the device must not be used any more in this run. Only a kernel that does not load leaves others usable.
    pub fn ends_device(&self) -> bool {
        !matches!(self, DeviceError::Kernel { .. })
    }
}

/// See the module's documentation.
///
/// Commands of one device complete in the order in which they were submitted; several may be on their way at once, and
/// a caller may write and read buffers that none of these names meanwhile.
pub trait Device {
    /// What it is.
    fn info(&self) -> &DeviceInfo;

    /// The kernels it was opened with; a [`KernelId`] is a place in this list.
    fn kernels(&self) -> &[Spec];

    /// Whether it can run this kernel.
    fn supports(&self, kernel: KernelId) -> Support;

    /// A buffer of at least `bytes` zeros.
    ///
    /// # Errors
    /// There is no memory, or no device any more.
    fn alloc(&mut self, bytes: usize) -> Result<Buffer, DeviceError>;

    /// The first `bytes` bytes of somebody else's memory as a buffer, to be named as A or C. Whether the device sees it as its
    /// owner does is for the caller to find out, with a launch whose result is known.
    ///
    /// # Errors
    /// It cannot be had; a device that launches in this process's memory has no use for it.
    fn import(&mut self, fd: BorrowedFd<'_>, bytes: usize, how: Import) -> Result<Buffer, DeviceError> {
        let _ = (fd, bytes, how);
        Err(DeviceError::Other(format!("{} launches in memory of its own", self.info().kind)))
    }

    /// Gives a buffer back. Launches that use it must have been waited for, or be lost.
    fn free(&mut self, buffer: Buffer);

    /// Writes `bytes` at `at`, so that a launch submitted later reads them.
    ///
    /// # Errors
    /// No such place, or no device any more.
    fn write(&mut self, buffer: Buffer, at: usize, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Reads what a launch that has been waited for wrote.
    ///
    /// # Errors
    /// No such place, or no device any more.
    fn read(&mut self, buffer: Buffer, at: usize, out: &mut [u8]) -> Result<(), DeviceError>;

    /// Starts a launch. May return before it is done.
    ///
    /// # Errors
    /// The device did not take it.
    fn submit(&mut self, command: &Command) -> Result<Fence, DeviceError>;

    /// Returns when the launch has completed.
    ///
    /// # Errors
    /// It has not, within `limit` or at all. Buffers of the launch hold nothing of use then.
    fn wait(&mut self, fence: Fence, limit: Duration) -> Result<(), DeviceError>;
}
