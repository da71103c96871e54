//! A device in this process that can be told to go wrong, and that remembers what it was asked: for tests of whoever drives one.
//! It computes like [`CpuDevice`]. The double that a real XRT runs on is another thing (`npusim`).

use crate::catalogue::{Catalogue, KernelId, Spec};
use crate::cpu_device::CpuDevice;
use crate::device::{Buffer, Command, Device, DeviceError, DeviceInfo, Fence, Support};
use crate::host::Pool;
use std::time::Duration;

/// What goes wrong.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Misfortune {
    /// The launch does not end in time; its output is half written.
    Timeout,
    /// The launch ends as aborted; its output is half written.
    Abort,
    /// The launch completes, and one element of its output is off by one.
    WrongC,
    /// The launch completes and has written nothing.
    StaleC,
    /// The device disappears; nothing works any more.
    Gone,
    /// The launch is not taken: somebody else has the device.
    Busy,
    /// The launch completes and takes long: an error only for who waits less.
    Slow(Duration),
    /// The launch completes and has written behind its output.
    Overrun,
}

/// What it was asked.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Event {
    Write(Buffer),
    Read(Buffer),
    Submit(Command),
    Wait(Fence),
}

/// See the module's documentation.
pub struct Fake {
    inner: CpuDevice,
    info: DeviceInfo,
    plans: Vec<(u64, Misfortune)>,
    unsupported: Vec<(KernelId, String)>,
    /// What a launch that has been submitted will say.
    pending: Vec<(Fence, Misfortune)>,
    launches: u64,
    gone: bool,
    /// Everything it was asked since it was made or this was cleared.
    pub events: Vec<Event>,
}

impl Fake {
    /// A device with these kernels on which nothing goes wrong.
    pub fn new(catalogue: Catalogue, pool: Pool) -> Fake {
        let info = DeviceInfo { kind: "fake", name: "a device for tests".to_owned(), ..DeviceInfo::default() };
        Fake {
            inner: CpuDevice::new(catalogue, pool),
            info,
            plans: Vec::new(),
            unsupported: Vec::new(),
            pending: Vec::new(),
            launches: 0,
            gone: false,
            events: Vec::new(),
        }
    }

    /// Launch `nth` from now, counted from 0, has this misfortune.
    pub fn plan(&mut self, nth: u64, misfortune: Misfortune) {
        self.plans.push((self.launches + nth, misfortune));
    }

    /// A kernel that it cannot run, and why.
    pub fn refuse(&mut self, kernel: KernelId, why: &str) {
        self.unsupported.push((kernel, why.to_owned()));
    }

    /// Launches so far.
    pub fn launches(&self) -> u64 {
        self.launches
    }

    /// Buffers that have not been given back.
    pub fn buffers(&self) -> usize {
        self.inner.buffers()
    }

    fn here(&self) -> Result<(), DeviceError> {
        if self.gone {
            return Err(DeviceError::Gone { what: "No such device (os error 19)".to_owned() });
        }
        Ok(())
    }
}

impl Device for Fake {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn kernels(&self) -> &[Spec] {
        self.inner.kernels()
    }

    fn supports(&self, kernel: KernelId) -> Support {
        match self.unsupported.iter().find(|(k, _)| *k == kernel) {
            Some((_, why)) => Support::No(why.clone()),
            None => self.inner.supports(kernel),
        }
    }

    fn alloc(&mut self, bytes: usize) -> Result<Buffer, DeviceError> {
        self.here()?;
        self.inner.alloc(bytes)
    }

    fn free(&mut self, buffer: Buffer) {
        self.inner.free(buffer);
    }

    fn write(&mut self, buffer: Buffer, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.here()?;
        self.events.push(Event::Write(buffer));
        self.inner.write(buffer, at, bytes)
    }

    fn read(&mut self, buffer: Buffer, at: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        self.here()?;
        self.events.push(Event::Read(buffer));
        self.inner.read(buffer, at, out)
    }

    fn submit(&mut self, command: &Command) -> Result<Fence, DeviceError> {
        self.here()?;
        self.events.push(Event::Submit(*command));
        let misfortune = self.plans.iter().find(|(at, _)| *at == self.launches).map(|(_, m)| *m);
        self.launches += 1;
        let c_bytes = self.kernels().get(command.kernel.0).map_or(0, |s| s.bytes()[2]);
        let mut before = vec![0u8; c_bytes];
        self.inner.read(command.c, 0, &mut before)?;
        let fence = self.inner.submit(command)?;
        match misfortune {
            None => {}
            Some(Misfortune::Busy) => return Err(DeviceError::Busy { what: "another process".to_owned() }),
            Some(Misfortune::Gone) => {
                self.gone = true;
                self.here()?;
            }
            Some(Misfortune::StaleC) => self.inner.write(command.c, 0, &before)?,
            Some(Misfortune::WrongC) => {
                // The first element that is not zero, so that it is one of the product and not of its padding.
                let mut c = vec![0u8; c_bytes];
                self.inner.read(command.c, 0, &mut c)?;
                let at = c.iter().position(|b| *b != 0).unwrap_or(0) / 4 * 4;
                self.inner.write(command.c, at, &[c[at] ^ 1])?;
            }
            Some(Misfortune::Overrun) => self.inner.write(command.c, c_bytes, &[0])?,
            Some(m @ (Misfortune::Timeout | Misfortune::Abort)) => {
                self.inner.write(command.c, c_bytes / 2, &before[c_bytes / 2..])?;
                self.pending.push((fence, m));
            }
            Some(m @ Misfortune::Slow(_)) => self.pending.push((fence, m)),
        }
        Ok(fence)
    }

    fn wait(&mut self, fence: Fence, limit: Duration) -> Result<(), DeviceError> {
        self.here()?;
        self.events.push(Event::Wait(fence));
        let timeout = Err(DeviceError::Timeout { ms: limit.as_millis() as u64 });
        match self.pending.iter().find(|(f, _)| *f == fence).map(|(_, m)| *m) {
            Some(Misfortune::Timeout) => timeout,
            Some(Misfortune::Slow(takes)) if takes > limit => timeout,
            Some(Misfortune::Abort) => Err(DeviceError::Failed { state: "ABORT".to_owned() }),
            _ => self.inner.wait(fence, limit),
        }
    }
}
