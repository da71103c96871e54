//! One launch of a kernel, from its arguments to its end.

use crate::buffer::Buffer;
use crate::device::{Kernel, made_sense_of};
use crate::error::{Error, State};
use crate::foreign::Foreign;
use crate::shim::RunHandle;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// After this the driver ends a command itself. A launch has to be planned to stay well below it.
pub const WATCHDOG: Duration = Duration::from_secs(2);

/// An argument of a kernel.
#[derive(Debug)]
pub enum Arg {
    /// A number of 8 bytes.
    U64(u64),
    /// A number of 4 bytes.
    U32(u32),
    /// A buffer that the device reads or writes. It comes back from [`Run::wait`].
    Buffer(Buffer),
    /// A buffer that the device only reads, by several runs at once ([`Buffer::share`]).
    Shared(Arc<Buffer>),
    /// A place in somebody else's memory, by its address.
    Foreign(Arc<Foreign>, u64),
}

/// A run on its way. Dropping it waits for its end; what it wrote is lost.
#[derive(Debug)]
pub struct Run {
    kernel: Kernel,
    /// `None` once it has ended or is given up.
    handle: Option<RunHandle>,
    args: Vec<Arg>,
    started: Instant,
}

impl Run {
    /// Sets the arguments in their order, shows the device what the host wrote, and starts.
    pub(crate) fn start(kernel: Kernel, args: Vec<Arg>) -> Result<Run, Error> {
        let context = kernel.context().clone();
        if context.is_lost() {
            return Err(Error::Lost { kernel: kernel.name().to_owned() });
        }
        let sense = |f| made_sense_of(f, Some(kernel.context().device()));
        let mut handle = kernel.handle().run().map_err(sense)?;
        let mut args = args;
        for (i, arg) in args.iter_mut().enumerate() {
            let i = i32::try_from(i).map_err(|_| Error::Request("too many arguments".to_owned()))?;
            match arg {
                Arg::U64(value) => handle.set_u64(i, *value).map_err(sense)?,
                Arg::U32(value) => handle.set_u32(i, *value).map_err(sense)?,
                Arg::Buffer(buffer) => {
                    buffer.flush()?;
                    handle.set_buffer(i, buffer.handle()).map_err(sense)?;
                }
                Arg::Shared(buffer) => handle.set_buffer(i, buffer.handle()).map_err(sense)?,
                Arg::Foreign(memory, offset) => {
                    let address = memory.address(*offset)?;
                    memory.flush();
                    handle.set_u64(i, address).map_err(sense)?;
                }
            }
        }
        if let Err(failure) = handle.start() {
            // It is not known how far that came.
            context.device().live.run(1);
            let mut run = Run { kernel: kernel.clone(), handle: Some(handle), args, started: Instant::now() };
            let error = made_sense_of(failure, Some(context.device()));
            run.give_up(false);
            return Err(error);
        }
        context.device().live.run(1);
        Ok(Run { kernel, handle: Some(handle), args, started: Instant::now() })
    }

    /// Waits for the end, at most that long from now, and gives back the buffers of [`Arg::Buffer`] in their order. On an error
    /// there are none: what the run may have written is not to be used, and the context takes no further run.
    pub fn wait(mut self, limit: Duration) -> Result<Vec<Buffer>, Error> {
        self.finish(limit)?;
        let mut buffers = Vec::new();
        for arg in self.args.drain(..) {
            match arg {
                Arg::Buffer(mut buffer) => {
                    buffer.touched();
                    buffers.push(buffer);
                }
                Arg::Foreign(memory, _) => memory.invalidate(),
                _ => {}
            }
        }
        Ok(buffers)
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    fn finish(&mut self, limit: Duration) -> Result<(), Error> {
        let Some(handle) = self.handle.as_mut() else { return Ok(()) };
        let ms = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX).max(1);
        let ended = handle.wait(ms);
        let kernel = self.kernel.name().to_owned();
        let has_ended = match &ended {
            Ok(State::Pending(_)) => false,
            Ok(_) => true,
            Err(failure) => failure.state.is_some(),
        };
        let error = match ended {
            Ok(State::Completed) => {
                self.handle = None;
                self.kernel.context().device().live.run(-1);
                return Ok(());
            }
            Ok(state @ (State::Pending(_) | State::Timeout)) => Error::Timeout { kernel, limit, state },
            Ok(state) => Error::Failed { kernel, state },
            Err(failure) => match (failure.state, failure.errno) {
                (Some(state @ (State::Pending(_) | State::Timeout)), _) => Error::Timeout { kernel, limit, state },
                (Some(state), _) => Error::Failed { kernel, state },
                (None, libc::ETIME | libc::ETIMEDOUT) => Error::Timeout { kernel, limit, state: State::Pending(0) },
                (None, _) => made_sense_of(failure, Some(self.kernel.context().device())),
            },
        };
        self.give_up(has_ended);
        Err(error)
    }

    /// After a failure. What the run was given stays until the context is gone, and where nobody knows whether the device is still
    /// at it, until the process ends.
    fn give_up(&mut self, has_ended: bool) {
        let Some(handle) = self.handle.take() else { return };
        self.kernel.context().device().live.run(-1);
        let mut args = std::mem::take(&mut self.args);
        if has_ended {
            for arg in &mut args {
                if let Arg::Buffer(buffer) = arg {
                    buffer.spoil();
                }
            }
            self.kernel.context().bury(handle, args);
        } else {
            self.kernel.context().lose();
            for arg in args {
                match arg {
                    Arg::Buffer(buffer) => buffer.abandon(),
                    Arg::Shared(buffer) => std::mem::forget(buffer),
                    Arg::Foreign(memory, _) => std::mem::forget(memory),
                    Arg::U64(_) | Arg::U32(_) => {}
                }
            }
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if self.handle.is_some() {
            // An error has nobody to go to, and whoever drops a run does not look at its output.
            let _ = self.finish(2 * WATCHDOG);
        }
    }
}
