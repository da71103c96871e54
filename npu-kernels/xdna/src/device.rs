//! A device, its contexts and their kernels, as shared values that clean up after the last user.

use crate::accel::{Node, contexts};
use crate::buffer::Buffer;
use crate::driver::{Driver, Version};
use crate::error::Error;
use crate::foreign::Foreign;
use crate::limits::Memlock;
use crate::lock::DeviceLock;
use crate::run::{Arg, Run};
use crate::shim::{BufferHandle, ContextHandle, DeviceHandle, Failure, KernelHandle, Memory, RunHandle};
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of dropped buffers that are kept for the next ones.
const POOL_BYTES: usize = 1 << 30;
const PAGE: usize = 4096;

/// What is known of a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// XRT's name for it, such as `RyzenAI-npu5`.
    pub name: String,
    /// Its PCI address.
    pub address: String,
    /// The node, the driver's version, the firmware's.
    pub node: Node,
    /// XRT's version.
    pub xrt: Version,
    /// The limit of locked memory.
    pub memlock: Memlock,
}

/// How many of each are in use: for tests that nothing is left over. What a run that never ended holds on to does not count, but is
/// not given back either before the process ends.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Live {
    /// [`Buffer`]s; those kept for reuse do not count.
    pub buffers: i64,
    /// [`Context`]s.
    pub contexts: i64,
    /// [`Run`]s.
    pub runs: i64,
}

/// [`Live`], as it is counted.
#[derive(Default, Debug)]
pub struct Counters {
    buffers: AtomicI64,
    contexts: AtomicI64,
    runs: AtomicI64,
}

impl Counters {
    pub fn buffer(&self, by: i64) {
        self.buffers.fetch_add(by, Ordering::Relaxed);
    }

    pub fn run(&self, by: i64) {
        self.runs.fetch_add(by, Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub struct DeviceInner {
    /// By size in bytes. Before the device: fields are dropped in this order.
    pool: Mutex<(HashMap<usize, Vec<BufferHandle>>, usize)>,
    handle: DeviceHandle,
    driver: Driver,
    pub info: DeviceInfo,
    pub live: Counters,
    _lock: DeviceLock,
}

impl DeviceInner {
    pub fn give_back(&self, handle: BufferHandle) {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        if pool.1 + handle.len() <= POOL_BYTES {
            pool.1 += handle.len();
            pool.0.entry(handle.len()).or_default().push(handle);
        }
    }
}

/// Puts XRT's words into the error that says what can be done. `device` is there once one is open.
pub fn made_sense_of(failure: Failure, device: Option<&DeviceInner>) -> Error {
    let Failure { call, errno, text, .. } = failure;
    let making_context = call.starts_with("xdna_context_");
    match errno {
        libc::EAGAIN | libc::EPERM if call.starts_with("xdna_buffer_") || call == "xdna_device_open" => {
            Error::Memlock { what: text, memlock: crate::limits::memlock() }
        }
        libc::ENODEV if text.contains("SVA") => Error::Iommu { text },
        libc::ENODEV | libc::ENXIO => Error::Gone { call, text },
        libc::EOPNOTSUPP | libc::ENOTSUP if making_context => Error::Iommu { text },
        libc::EBUSY | libc::EAGAIN | libc::ENOSPC if making_context => {
            Error::Busy { what: format!("the NPU has no context left ({text})") }
        }
        libc::EINVAL if making_context && text.contains("CREATE_HWCTX") => match device {
            // The firmware has one number for this too, but the driver counts.
            Some(device) if contexts(&device.info.node.path).is_some_and(|(now, most)| most > 0 && now >= most) => {
                Error::Busy { what: format!("all contexts of the NPU are taken ({text})") }
            }
            Some(device) => Error::Firmware {
                driver: device.info.node.driver.clone(),
                firmware: device.info.node.firmware,
                xrt: device.info.xrt.to_string(),
                text,
            },
            None => Error::Xrt { call, code: errno, text },
        },
        code => Error::Xrt { call, code, text },
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        made_sense_of(failure, None)
    }
}

/// An open NPU. Clones are the same device.
#[derive(Clone, Debug)]
pub struct Device(Arc<DeviceInner>);

impl Device {
    pub(crate) fn new(
        driver: Driver,
        handle: DeviceHandle,
        node: Node,
        memlock: Memlock,
        lock: DeviceLock,
    ) -> Result<Device, Error> {
        let name = handle.text(0)?;
        // Not every driver tells, and nothing depends on it.
        let address = handle.text(1).unwrap_or_default();
        let info = DeviceInfo { name, address, node, xrt: driver.versions().0, memlock };
        let (pool, live) = Default::default();
        Ok(Device(Arc::new(DeviceInner { pool, handle, driver, info, live, _lock: lock })))
    }

    /// What is known of it.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// What it was opened with.
    pub fn driver(&self) -> &Driver {
        &self.0.driver
    }

    /// How much is in use.
    pub fn live(&self) -> Live {
        let count = |n: &AtomicI64| n.load(Ordering::Relaxed);
        let live = &self.0.live;
        Live { buffers: count(&live.buffers), contexts: count(&live.contexts), runs: count(&live.runs) }
    }

    /// Gives back the memory that is kept for reuse.
    pub fn trim(&self) {
        *self.0.pool.lock().unwrap_or_else(PoisonError::into_inner) = Default::default();
    }

    /// Memory for an argument: `len` bytes, all zero.
    pub fn buffer(&self, len: usize) -> Result<Buffer, Error> {
        if len == 0 {
            return Err(Error::Request("a buffer of 0 bytes".to_owned()));
        }
        let whole =
            len.checked_next_multiple_of(PAGE).ok_or_else(|| Error::Request(format!("a buffer of {len} bytes")))?;
        let kept = {
            let mut pool = self.0.pool.lock().unwrap_or_else(PoisonError::into_inner);
            let kept = pool.0.get_mut(&whole).and_then(Vec::pop);
            pool.1 -= kept.as_ref().map_or(0, BufferHandle::len);
            kept
        };
        let handle = match kept {
            Some(handle) => handle,
            None => self.0.handle.buffer(Memory::Data(whole)).map_err(|f| made_sense_of(f, Some(&self.0)))?,
        };
        Ok(Buffer::new(self.0.clone(), handle, len, true).zeroed())
    }

    /// A dma-buf as a buffer, mapped by the driver. Only for memory of this process (udmabuf, heaps): a driver's mapping of
    /// another device's memory can fail every submission of the process ([`Foreign`] is for that).
    pub fn import_through_driver(&self, fd: BorrowedFd<'_>) -> Result<Buffer, Error> {
        let handle = self.0.handle.buffer(Memory::Import(fd)).map_err(|f| made_sense_of(f, Some(&self.0)))?;
        let len = handle.len();
        Ok(Buffer::new(self.0.clone(), handle, len, false))
    }

    /// Somebody else's memory, mapped by ourselves and held in the driver.
    pub fn import(&self, fd: BorrowedFd<'_>, len: usize) -> Result<Arc<Foreign>, Error> {
        Ok(Arc::new(Foreign::map(&self.0.info.node.path, fd, len)?))
    }

    /// A context for a full ELF (flow 2). One that was idle for more than 5 seconds may fail its next run: make it when it is
    /// needed, drop it warm.
    pub fn context_elf(&self, elf: &[u8]) -> Result<Context, Error> {
        self.context(elf, true)
    }

    /// A context for an xclbin (flow 1).
    pub fn context_xclbin(&self, xclbin: &[u8]) -> Result<Context, Error> {
        self.context(xclbin, false)
    }

    fn context(&self, bytes: &[u8], elf: bool) -> Result<Context, Error> {
        let handle = self.0.handle.context(bytes, elf).map_err(|f| made_sense_of(f, Some(&self.0)))?;
        self.0.live.contexts.fetch_add(1, Ordering::Relaxed);
        Ok(Context(Arc::new(ContextInner {
            handle: Some(handle),
            device: self.0.clone(),
            elf,
            lost: AtomicBool::new(false),
            graveyard: Mutex::default(),
        })))
    }
}

#[derive(Debug)]
struct ContextInner {
    /// `None` only while it is dropped.
    handle: Option<ContextHandle>,
    device: Arc<DeviceInner>,
    elf: bool,
    /// A run failed: no further one is started.
    lost: AtomicBool,
    /// What failed runs were given, which the device may still write to while the context is there.
    graveyard: Mutex<Vec<(RunHandle, Vec<Arg>)>>,
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        self.handle = None;
        self.device.live.contexts.fetch_add(-1, Ordering::Relaxed);
    }
}

/// Part of the array, set up for some kernels. Clones are the same context.
#[derive(Clone, Debug)]
pub struct Context(Arc<ContextInner>);

impl Context {
    fn handle(&self) -> &ContextHandle {
        self.0.handle.as_ref().expect("only drop takes it")
    }

    pub(crate) fn device(&self) -> &DeviceInner {
        &self.0.device
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Relaxed)
    }

    /// Starts nothing more.
    pub(crate) fn lose(&self) {
        self.0.lost.store(true, Ordering::Relaxed);
    }

    /// Takes what a failed run was given, and starts nothing more.
    pub(crate) fn bury(&self, run: RunHandle, args: Vec<Arg>) {
        self.lose();
        self.0.graveyard.lock().unwrap_or_else(PoisonError::into_inner).push((run, args));
    }

    /// Adds the kernels of another full ELF (flow 2).
    pub fn add(&self, elf: &[u8]) -> Result<(), Error> {
        self.handle().add(elf).map_err(|f| made_sense_of(f, Some(self.device())))
    }

    /// The kernel of that name: `KERNEL:INSTANCE` of a full ELF, `NAME` of an xclbin.
    pub fn kernel(&self, name: &str) -> Result<Kernel, Error> {
        let handle = self.handle().kernel(name).map_err(|f| made_sense_of(f, Some(self.device())))?;
        Ok(Kernel(Arc::new(KernelInner { handle, context: self.clone(), name: name.to_owned() })))
    }
}

#[derive(Debug)]
struct KernelInner {
    handle: KernelHandle,
    context: Context,
    name: String,
}

/// A kernel of a context. Clones are the same kernel.
#[derive(Clone, Debug)]
pub struct Kernel(Arc<KernelInner>);

impl Kernel {
    pub(crate) fn handle(&self) -> &KernelHandle {
        &self.0.handle
    }

    /// Its context.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Memory in the group of one of its arguments (flow 1): `len` bytes, all zero.
    pub fn buffer(&self, arg: i32, len: usize) -> Result<Buffer, Error> {
        self.memory(arg, len, Memory::Grouped)
    }

    /// Its instructions, ready to be an argument (flow 1).
    pub fn instructions(&self, bytes: &[u8]) -> Result<Arc<Buffer>, Error> {
        let mut buffer = self.memory(1, bytes.len(), Memory::Instructions)?;
        buffer.write(0, bytes)?;
        buffer.share()
    }

    fn memory(&self, arg: i32, len: usize, of: impl Fn(usize, i32) -> Memory<'static>) -> Result<Buffer, Error> {
        let device = &self.0.context.0.device;
        if self.0.context.0.elf {
            return Err(Error::Request(format!("{}: memory groups are for kernels of an xclbin", self.0.name)));
        }
        if len == 0 {
            return Err(Error::Request("a buffer of 0 bytes".to_owned()));
        }
        let sense = |f| made_sense_of(f, Some(device));
        let group = self.0.handle.group(arg).map_err(sense)?;
        let handle = device.handle.buffer(of(len, group)).map_err(sense)?;
        Ok(Buffer::new(device.clone(), handle, len, false).zeroed())
    }

    /// Starts it with these arguments, in their order from 0 (flow 2; flow 1 with all arguments spelled out).
    pub fn start(&self, args: Vec<Arg>) -> Result<Run, Error> {
        Run::start(self.clone(), args)
    }

    /// Starts it with instructions (flow 1): the opcode 3, the instructions, their number of words, then `args`.
    pub fn start_with(&self, instructions: &Arc<Buffer>, args: Vec<Arg>) -> Result<Run, Error> {
        let words = u32::try_from(instructions.len() / 4)
            .map_err(|_| Error::Request(format!("{} bytes of instructions", instructions.len())))?;
        let mut all = vec![Arg::U64(3), Arg::Shared(instructions.clone()), Arg::U32(words)];
        all.extend(args);
        Run::start(self.clone(), all)
    }
}
