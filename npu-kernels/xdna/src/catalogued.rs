//! The NPU as an [`npu_kernels::Device`]: catalogued kernels, loaded when they are first launched, over this crate's own values.
//!
//! Buffers get their memory at their first launch, since kernels of an xclbin have groups of their own. Kernels of full ELFs
//! share a context as long as their names differ; a context that was idle for longer than [`WARM`] is made anew before its next
//! launch, because the firmware may have given it up.

use crate::buffer::Buffer as Memory;
use crate::device::{Context, Device, Kernel};
use crate::error::{Error, Kind};
use crate::foreign::Foreign;
use crate::run::{Arg, Run};
use npu_kernels::catalogue::{Catalogue, Files, KernelFile, KernelId, Spec};
use npu_kernels::device::{Buffer, Command, DeviceError, DeviceInfo, Fence, Import, Support};
use npu_kernels::manifest;
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A context that idles for longer is not launched on: at 5 seconds its next run times out.
pub const WARM: Duration = Duration::from_secs(3);

/// Where a buffer's bytes are.
enum Slot {
    /// Not yet on the device: no launch has named it.
    Host(Vec<u8>),
    /// With us.
    Here(Memory),
    /// With us, and lent to launches that only read it.
    Lent(Arc<Memory>),
    /// Somebody else's, mapped by us.
    Theirs(Arc<Foreign>),
    /// With a launch, or lost with one.
    Away,
}

/// A launch that has been submitted.
struct Pending {
    run: Run,
    /// Buffers that come back from it, in its order.
    going: Vec<Buffer>,
    /// And those that it knows by their address.
    theirs: Vec<(Buffer, Arc<Foreign>)>,
    context: usize,
}

/// A kernel that was loaded.
struct Loaded {
    kernel: Kernel,
    /// Of an xclbin.
    instructions: Option<Arc<Memory>>,
    context: usize,
}

struct Shared {
    context: Context,
    /// Kernels by name, and the bytes they came from.
    members: Vec<KernelId>,
    used: Instant,
}

/// See the module's documentation.
pub struct CatalogueDevice {
    info: DeviceInfo,
    kernels: Vec<Spec>,
    // Runs before kernels, kernels before contexts, contexts before the device.
    pending: HashMap<u64, Pending>,
    buffers: Vec<Option<Slot>>,
    loaded: HashMap<KernelId, Loaded>,
    contexts: Vec<Option<Shared>>,
    device: Device,
    launches: u64,
}

impl CatalogueDevice {
    /// A device with these kernels, called `kind`.
    pub fn new(device: Device, kind: &'static str, catalogue: Catalogue) -> CatalogueDevice {
        let found = device.info();
        let info = DeviceInfo {
            kind,
            name: found.name.clone(),
            driver: format!("amdxdna {}", found.node.driver),
            firmware: found.node.firmware.map(|f| f.to_string()).unwrap_or_default(),
            runtime: format!("XRT {}", found.xrt),
        };
        let (pending, buffers, loaded, contexts) = Default::default();
        let kernels = catalogue.into_kernels();
        CatalogueDevice { info, kernels, pending, buffers, loaded, contexts, device, launches: 0 }
    }

    /// A number for a buffer.
    fn place(&mut self, slot: Slot) -> Buffer {
        let at = self.buffers.iter().position(Option::is_none).unwrap_or_else(|| {
            self.buffers.push(None);
            self.buffers.len() - 1
        });
        self.buffers[at] = Some(slot);
        Buffer(at as u32)
    }

    fn slot(&mut self, buffer: Buffer) -> Result<&mut Slot, DeviceError> {
        let slot = self.buffers.get_mut(buffer.0 as usize).and_then(Option::as_mut);
        slot.ok_or_else(|| DeviceError::Misuse(format!("no buffer {}", buffer.0)))
    }

    /// A buffer that is with us and nobody else, on the device or not.
    fn mine(&mut self, buffer: Buffer) -> Result<&mut Slot, DeviceError> {
        let slot = self.slot(buffer)?;
        if let Slot::Lent(_) = slot
            && let Slot::Lent(memory) = std::mem::replace(slot, Slot::Away)
        {
            *slot = match Arc::try_unwrap(memory) {
                Ok(memory) => Slot::Here(memory),
                Err(memory) => Slot::Lent(memory),
            };
        }
        match slot {
            Slot::Lent(_) | Slot::Away => Err(DeviceError::Misuse(format!("buffer {} is with a launch", buffer.0))),
            slot => Ok(slot),
        }
    }

    /// Gives a buffer memory on the device, for argument `arg` of a kernel.
    fn settle(&mut self, buffer: Buffer, id: KernelId, arg: usize) -> Result<(), DeviceError> {
        let bytes = match self.slot(buffer)? {
            Slot::Host(bytes) => std::mem::take(bytes),
            _ => return Ok(()),
        };
        let loaded = &self.loaded[&id];
        let made = match &loaded.instructions {
            None => self.device.buffer(bytes.len()),
            // Opcode, instructions and their number come before the data.
            Some(_) => loaded.kernel.buffer(arg as i32 + 3, bytes.len()),
        };
        let written = made.and_then(|mut memory| memory.write(0, &bytes).map(|()| memory));
        *self.slot(buffer)? = match written {
            Ok(memory) => Slot::Here(memory),
            Err(e) => {
                let need = bytes.len();
                *self.slot(buffer)? = Slot::Host(bytes);
                return Err(match e {
                    Error::Memlock { .. } => DeviceError::NoMemory { bytes: need, what: e.to_string() },
                    e => error(e),
                });
            }
        };
        Ok(())
    }

    /// Loads a kernel unless it is there and warm.
    fn ready(&mut self, id: KernelId) -> Result<(), DeviceError> {
        if let Some(loaded) = self.loaded.get(&id) {
            let at = loaded.context;
            let cold = self.contexts[at].as_ref().is_none_or(|c| c.used.elapsed() > WARM);
            if !cold || !self.pending.is_empty() {
                return Ok(());
            }
            // The old one first: there are few, and another one would drop its configuration anyway.
            let members = self.contexts[at].as_ref().map(|c| c.members.clone()).unwrap_or_default();
            for member in members {
                self.loaded.remove(&member);
            }
            self.contexts[at] = None;
        }
        let spec = self.kernels.get(id.0).cloned().ok_or_else(|| DeviceError::Misuse("no such kernel".to_owned()))?;
        let refused = |what: String| DeviceError::Kernel { kernel: spec.name.clone(), what };
        let read = |file: &KernelFile| manifest::reread(file).map_err(|e| refused(e.to_string()));
        // What XRT says of a file is about the file; that the device is gone or taken is not.
        let about_file = |e: Error| match e {
            Error::Gone { .. }
            | Error::Busy { .. }
            | Error::Memlock { .. }
            | Error::Firmware { .. }
            | Error::Iommu { .. } => error(e),
            e => refused(e.to_string()),
        };
        let (at, instructions) = match &spec.files {
            Files::BuiltIn => return Err(refused("it has no file".to_owned())),
            Files::FullElf(file) => {
                let elf = read(file)?;
                // One whose kernels have other names, so that this one's name says which is meant.
                let joins = |c: &Shared| {
                    c.members.iter().all(|m| {
                        let other = &self.kernels[m.0];
                        matches!(other.files, Files::FullElf(_)) && base(&other.kernel) != base(&spec.kernel)
                    })
                };
                let found = self.contexts.iter().position(|c| c.as_ref().is_some_and(joins));
                match found {
                    Some(at) => {
                        let context = &self.contexts[at].as_ref().expect("found above").context;
                        context.add(&elf).map_err(about_file)?;
                        (at, None)
                    }
                    None => (self.insert(self.device.context_elf(&elf).map_err(about_file)?), None),
                }
            }
            Files::Xclbin { xclbin, insts } => {
                let (xclbin, insts) = (read(xclbin)?, read(insts)?);
                (self.insert(self.device.context_xclbin(&xclbin).map_err(about_file)?), Some(insts))
            }
        };
        let shared = self.contexts[at].as_mut().expect("made or found above");
        let kernel = shared.context.kernel(&spec.kernel).map_err(about_file)?;
        let instructions = instructions.map(|i| kernel.instructions(&i)).transpose().map_err(about_file)?;
        shared.members.push(id);
        shared.used = Instant::now();
        self.loaded.insert(id, Loaded { kernel, instructions, context: at });
        Ok(())
    }

    fn insert(&mut self, context: Context) -> usize {
        let shared = Shared { context, members: Vec::new(), used: Instant::now() };
        match self.contexts.iter().position(Option::is_none) {
            Some(at) => {
                self.contexts[at] = Some(shared);
                at
            }
            None => {
                self.contexts.push(Some(shared));
                self.contexts.len() - 1
            }
        }
    }
}

/// The part of a kernel's name that a full ELF's configuration has.
fn base(name: &str) -> &str {
    name.split(':').next().unwrap_or(name)
}

fn error(e: Error) -> DeviceError {
    match e {
        Error::Timeout { limit, .. } => DeviceError::Timeout { ms: limit.as_millis() as u64 },
        Error::Failed { state, .. } => DeviceError::Failed { state: state.to_string() },
        Error::Gone { text, .. } => DeviceError::Gone { what: text },
        Error::Busy { what } => DeviceError::Busy { what },
        Error::Memlock { .. } => DeviceError::NoMemory { bytes: 0, what: e.to_string() },
        e if e.kind() == Kind::Request => DeviceError::Misuse(e.to_string()),
        e => DeviceError::Other(e.to_string()),
    }
}

impl npu_kernels::Device for CatalogueDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn kernels(&self) -> &[Spec] {
        &self.kernels
    }

    fn supports(&self, kernel: KernelId) -> Support {
        match self.kernels.get(kernel.0).map(|s| &s.files) {
            None => Support::No("no such kernel".to_owned()),
            Some(Files::BuiltIn) => Support::No("it has no file".to_owned()),
            Some(_) => Support::Yes,
        }
    }

    fn alloc(&mut self, bytes: usize) -> Result<Buffer, DeviceError> {
        let mut room = Vec::new();
        room.try_reserve_exact(bytes).map_err(|e| DeviceError::NoMemory { bytes, what: e.to_string() })?;
        room.resize(bytes, 0);
        Ok(self.place(Slot::Host(room)))
    }

    fn import(&mut self, fd: BorrowedFd<'_>, bytes: usize, how: Import) -> Result<Buffer, DeviceError> {
        let slot = match how {
            Import::Own => Slot::Theirs(self.device.import(fd, bytes).map_err(error)?),
            Import::Driver => {
                let memory = self.device.import_through_driver(fd).map_err(error)?;
                if memory.len() < bytes {
                    return Err(DeviceError::Misuse(format!("{bytes} bytes of a dma-buf of {}", memory.len())));
                }
                Slot::Here(memory)
            }
        };
        Ok(self.place(slot))
    }

    fn free(&mut self, buffer: Buffer) {
        if let Some(slot) = self.buffers.get_mut(buffer.0 as usize) {
            *slot = None;
        }
    }

    fn write(&mut self, buffer: Buffer, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        match self.mine(buffer)? {
            Slot::Here(memory) => memory.write(at, bytes).map_err(error),
            Slot::Theirs(memory) => memory.write(at, bytes).map_err(error),
            Slot::Host(room) => {
                let len = room.len();
                let to = at.checked_add(bytes.len()).and_then(|end| room.get_mut(at..end));
                let to = to.ok_or_else(|| {
                    DeviceError::Misuse(format!("{} bytes at {at} of a buffer of {len}", bytes.len()))
                })?;
                to.copy_from_slice(bytes);
                Ok(())
            }
            Slot::Lent(_) | Slot::Away => unreachable!("neither is ours"),
        }
    }

    fn read(&mut self, buffer: Buffer, at: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        match self.mine(buffer)? {
            Slot::Here(memory) => memory.read(at, out).map_err(error),
            Slot::Theirs(memory) => memory.read(at, out).map_err(error),
            Slot::Host(room) => {
                let len = room.len();
                let from = at.checked_add(out.len()).and_then(|end| room.get(at..end));
                let from = from
                    .ok_or_else(|| DeviceError::Misuse(format!("{} bytes at {at} of a buffer of {len}", out.len())))?;
                out.copy_from_slice(from);
                Ok(())
            }
            Slot::Lent(_) | Slot::Away => unreachable!("neither is ours"),
        }
    }

    fn submit(&mut self, command: &Command) -> Result<Fence, DeviceError> {
        self.ready(command.kernel)?;
        let places = self.kernels[command.kernel.0].args;
        let operands = [command.a, command.b, command.c];
        for (buffer, place) in operands.into_iter().zip(places) {
            self.settle(buffer, command.kernel, place)?;
        }
        // A and C go with the launch and come back; B, which several launches read, is lent.
        if let Slot::Here(_) = self.slot(command.b)?
            && let Slot::Here(memory) = std::mem::replace(self.slot(command.b)?, Slot::Away)
        {
            *self.slot(command.b)? = Slot::Lent(memory.share().map_err(error)?);
        }
        let Slot::Lent(b) = self.slot(command.b)? else {
            return Err(DeviceError::Misuse(format!("buffer {} is with a launch", command.b.0)));
        };
        let b = b.clone();
        let takes_addresses = self.loaded[&command.kernel].instructions.is_none();
        for buffer in [command.a, command.c] {
            if let Slot::Theirs(_) = self.mine(buffer)?
                && !takes_addresses
            {
                let what = "a kernel of an xclbin takes buffers of its own groups, not another's memory".to_owned();
                return Err(DeviceError::Kernel { kernel: self.kernels[command.kernel.0].name.clone(), what });
            }
        }
        let mut args = vec![(places[1], command.b, Arg::Shared(b))];
        let mut theirs = Vec::new();
        for (buffer, place) in [(command.a, places[0]), (command.c, places[2])] {
            let arg = match std::mem::replace(self.slot(buffer)?, Slot::Away) {
                Slot::Here(memory) => Arg::Buffer(memory),
                Slot::Theirs(memory) => {
                    theirs.push((buffer, memory.clone()));
                    Arg::Foreign(memory, 0)
                }
                _ => return Err(DeviceError::Misuse(format!("A and C are one buffer, {}", buffer.0))),
            };
            args.push((place, buffer, arg));
        }
        args.sort_by_key(|(place, ..)| *place);
        let going = args.iter().filter(|(.., arg)| matches!(arg, Arg::Buffer(_))).map(|(_, b, _)| *b).collect();
        let args = args.into_iter().map(|(.., arg)| arg).collect();
        let loaded = &self.loaded[&command.kernel];
        let run = match &loaded.instructions {
            None => loaded.kernel.start(args),
            Some(instructions) => loaded.kernel.start_with(instructions, args),
        };
        let run = run.map_err(error)?;
        let context = loaded.context;
        self.launches += 1;
        self.pending.insert(self.launches, Pending { run, going, theirs, context });
        Ok(Fence(self.launches))
    }

    fn wait(&mut self, fence: Fence, limit: Duration) -> Result<(), DeviceError> {
        let pending = self.pending.remove(&fence.0);
        let Pending { run, going, theirs, context } =
            pending.ok_or_else(|| DeviceError::Misuse(format!("no launch {}", fence.0)))?;
        let memory = run.wait(limit).map_err(error)?;
        if let Some(shared) = &mut self.contexts[context] {
            shared.used = Instant::now();
        }
        let back = going.into_iter().zip(memory.into_iter().map(Slot::Here));
        for (buffer, memory) in back.chain(theirs.into_iter().map(|(buffer, memory)| (buffer, Slot::Theirs(memory)))) {
            if let Some(slot) = self.buffers.get_mut(buffer.0 as usize).and_then(Option::as_mut) {
                *slot = memory;
            }
        }
        Ok(())
    }
}
