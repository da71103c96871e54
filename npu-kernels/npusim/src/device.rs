//! The driver: requests on the node, and the state behind it. Nothing here touches the process's memory by itself; arguments come as
//! bytes, and what they point to is read through [`crate::memory`].

use crate::array::Array;
use crate::bos::Bos;
use crate::commands::{Context, execute};
use crate::designs::Design;
use crate::faults::Faults;
use crate::memory;
use crate::registers::COLUMNS;
use crate::uapi::{self, BO_DEV, Fields, State, query};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::io::Write as _;
use std::os::fd::{AsRawFd as _, BorrowedFd, IntoRawFd as _};
use std::time::Duration;

/// The one node.
pub const NODE: &str = "/dev/accel/accel0";
/// Contexts that there are at once.
const CONTEXTS: usize = 16;
/// What can be locked with the fault `memlock`.
const LOCKABLE: u64 = 8 << 20;
/// Objects are mapped at their handle, shifted by this.
pub const MAP_SHIFT: u32 = 36;

fn errno(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

/// Everything.
pub struct Simulator {
    faults: Faults,
    log: bool,
    report: Option<String>,
    bos: Bos,
    contexts: BTreeMap<u32, Context>,
    next_context: u32,
    /// Open descriptors of the node.
    open: BTreeSet<i32>,
    submissions: u64,
    /// Commands that will never end: context and number.
    endless: BTreeSet<(u32, u64)>,
    poisoned: bool,
    /// The context whose configuration the array has.
    loaded: Option<u32>,
    most: (usize, usize),
}

impl Simulator {
    /// From the variables of the environment.
    pub fn from_environment() -> Simulator {
        let var = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        Simulator {
            faults: Faults::parse(&var("NPUSIM_FAULT").unwrap_or_default()),
            log: var("NPUSIM_LOG").is_some(),
            report: var("NPUSIM_REPORT"),
            bos: Bos::new(var("NPUSIM_SHADOW").is_some()),
            contexts: BTreeMap::new(),
            next_context: 1,
            open: BTreeSet::new(),
            submissions: 0,
            endless: BTreeSet::new(),
            poisoned: false,
            loaded: None,
            most: (0, 0),
        }
    }

    fn say(&self, text: impl FnOnce() -> String) {
        if self.log {
            // One write: lines of several threads stay whole. Nobody minds if nobody listens.
            let _ = io::stderr().write_all(format!("npusim: {}\n", text()).as_bytes());
        }
    }

    /// Whether the node may be opened.
    pub fn may_open(&self) -> io::Result<()> {
        match () {
            () if self.faults.has("sva") => Err(errno(libc::EOPNOTSUPP)),
            () if self.faults.has("nodevice") => Err(errno(libc::ENODEV)),
            () => Ok(()),
        }
    }

    pub fn opened(&mut self, fd: i32) {
        self.say(|| format!("open {NODE}: {fd}"));
        self.open.insert(fd);
    }

    /// A descriptor of the node is closed.
    pub fn closed(&mut self, fd: i32) {
        self.open.remove(&fd);
        self.say(|| format!("close {fd}"));
        if self.open.is_empty() {
            self.report();
            // What a process leaves behind, the driver cleans up.
            self.bos = self.bos.anew();
            self.contexts.clear();
            self.endless.clear();
            self.poisoned = false;
            self.loaded = None;
        }
    }

    /// Appends the line of `NPUSIM_REPORT`, when the last open of the node is closed or the process ends.
    pub fn report(&self) {
        let Some(path) = &self.report else { return };
        let (bos, contexts) = self.most;
        let line = format!(
            "submissions {} buffers {} contexts {} most_buffers {bos} most_contexts {contexts}\n",
            self.submissions,
            self.bos.count(),
            self.contexts.len()
        );
        let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
        let _ = file.and_then(|mut f| f.write_all(line.as_bytes()));
    }

    /// Whether the node is open.
    pub fn is_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// What is to be mapped instead of an object: its memory's descriptor. `locked` says whether the pages are to stay.
    pub fn map(&mut self, offset: u64, n: u64, locked: bool) -> io::Result<i32> {
        let handle = u32::try_from(offset >> MAP_SHIFT).map_err(|_| errno(libc::EINVAL))?;
        let short_of_locks = self.faults.has("memlock") && locked && n > LOCKABLE;
        let poison = self.faults.has("poison");
        let bo = self.bos.get(handle).map_err(|_| errno(libc::EINVAL))?;
        if n > bo.size.next_multiple_of(4096) {
            return Err(errno(libc::EINVAL));
        }
        if short_of_locks {
            return Err(errno(libc::EAGAIN));
        }
        self.poisoned |= poison && bo.imported;
        bo.fd().ok_or_else(|| errno(libc::EINVAL))
    }

    pub fn mapped(&mut self, offset: u64, address: u64, n: u64) {
        if let Ok(bo) = self.bos.get((offset >> MAP_SHIFT) as u32) {
            bo.mapped = Some((address, n));
        }
    }

    pub fn unmapped(&mut self, address: u64) {
        self.bos.unmapped(address);
    }

    /// One request. `argument` has the length that the request's number states.
    pub fn ioctl(&mut self, request: u32, argument: &mut [u8]) -> io::Result<()> {
        let result = self.answer(request, Fields(argument));
        if let Err(e) = &result {
            self.say(|| format!("request {request:#x}: {e}"));
        }
        self.most = (self.most.0.max(self.bos.count()), self.most.1.max(self.contexts.len()));
        result
    }

    fn answer(&mut self, request: u32, mut a: Fields<'_>) -> io::Result<()> {
        match uapi::meant(request) {
            uapi::VERSION => {
                // major, minor, patch; then length and address of name, date, description.
                for (at, value) in [(0, 0), (4, 6), (8, 0)] {
                    a.set_u32(at, value);
                }
                let name = b"amdxdna";
                let room = a.u64(16).min(name.len() as u64) as usize;
                if room > 0 {
                    memory::write(a.u64(24), &name[..room])?;
                }
                a.set_u64(16, name.len() as u64);
                a.set_u64(32, 0);
                a.set_u64(48, 0);
                Ok(())
            }
            uapi::CREATE_BO => {
                // flags, vaddr, size; type, handle.
                if a.u64(8) != 0 {
                    // Memory of the process by its address: XRT does that for user pointers, which nobody here uses.
                    return Err(errno(libc::EINVAL));
                }
                let (size, kind) = (a.u64(16), a.u32(24));
                if !(uapi::BO_SHARE..=uapi::BO_CMD).contains(&kind) {
                    return Err(errno(libc::EINVAL));
                }
                let handle = self.bos.create(kind, size)?;
                a.set_u32(28, handle);
                self.say(|| format!("buffer {handle}: kind {kind}, {size} bytes"));
                Ok(())
            }
            uapi::GET_BO_INFO => {
                // ext, ext_flags; handle, pad; map_offset, vaddr, xdna_addr.
                let handle = a.u32(16);
                let bo = self.bos.get(handle)?;
                let offset = if bo.kind == BO_DEV { uapi::INVALID_ADDR } else { u64::from(handle) << MAP_SHIFT };
                a.set_u64(24, offset);
                a.set_u64(32, bo.mapped.map_or(0, |(address, _)| address));
                a.set_u64(40, bo.address.unwrap_or(uapi::INVALID_ADDR));
                Ok(())
            }
            uapi::SYNC_BO => {
                // handle, direction; offset, size.
                let (handle, to_device, at, n) = (a.u32(0), a.u32(4) == 0, a.u64(8), a.u64(16));
                self.say(|| format!("sync {handle} {} {at}+{n}", if to_device { "to" } else { "from" }));
                self.bos.sync(handle, to_device, at, n)
            }
            uapi::GEM_CLOSE => {
                let handle = a.u32(0);
                self.say(|| format!("buffer {handle} is closed"));
                self.bos.close(handle)?;
                if self.faults.has("noclose") { Err(errno(libc::EIO)) } else { Ok(()) }
            }
            uapi::PRIME_HANDLE_TO_FD => {
                // handle, flags, fd.
                let bo = self.bos.get(a.u32(0))?;
                let file = bo.file.as_ref().ok_or_else(|| errno(libc::EINVAL))?.try_clone()?;
                a.set_u32(8, file.into_raw_fd() as u32);
                Ok(())
            }
            uapi::PRIME_FD_TO_HANDLE => {
                let fd = a.u32(8) as i32;
                let fd = crate::hooks::borrow(&fd).ok_or_else(|| errno(libc::EBADF))?;
                let handle = self.import(fd)?;
                a.set_u32(0, handle);
                Ok(())
            }
            uapi::CREATE_HWCTX => self.create_context(&mut a),
            uapi::DESTROY_HWCTX => {
                let handle = a.u32(0);
                self.say(|| format!("context {handle} is gone"));
                if self.loaded == Some(handle) {
                    self.loaded = None;
                }
                self.contexts.remove(&handle).map(drop).ok_or_else(|| errno(libc::EINVAL))
            }
            uapi::CONFIG_HWCTX => self.configure(&a),
            uapi::EXEC_CMD => self.submit(&mut a),
            uapi::WAIT_CMD => {
                // hwctx, timeout; seq.
                let (context, ms, number) = (a.u32(0), a.u32(4), a.u64(8));
                if self.endless.contains(&(context, number)) {
                    // Long enough to be a wait, short enough for a test.
                    std::thread::sleep(Duration::from_millis(u64::from(ms).min(20)));
                    return Err(errno(libc::ETIME));
                }
                Ok(())
            }
            uapi::GET_INFO => self.info(&a),
            uapi::GET_ARRAY => {
                // param, element_size, num_element, pad; buffer.
                a.set_u32(8, 0);
                Ok(())
            }
            uapi::SET_STATE => Ok(()),
            _ => Err(errno(libc::ENOTTY)),
        }
    }

    fn import(&mut self, fd: BorrowedFd<'_>) -> io::Result<u32> {
        let handle = self.bos.import(fd)?;
        self.say(|| format!("buffer {handle}: imported from {}", fd.as_raw_fd()));
        Ok(handle)
    }

    fn create_context(&mut self, a: &mut Fields<'_>) -> io::Result<()> {
        // ext, ext_flags, qos_p; umq_bo, log_buf_bo, max_opc, num_tiles, mem_size, umq_doorbell, handle, syncobj_handle.
        if self.faults.has("firmware") {
            return Err(errno(libc::EINVAL));
        }
        if self.faults.has("contexts") || self.contexts.len() >= CONTEXTS {
            return Err(errno(libc::EINVAL));
        }
        // Tiles are counted in cores, four a column.
        let columns = a.u32(36).div_ceil(4);
        if columns == 0 || columns > COLUMNS {
            return Err(errno(libc::EINVAL));
        }
        let handle = self.next_context;
        self.next_context += 1;
        self.contexts.insert(handle, Context { array: Array::new(columns), design: None, submitted: 0 });
        a.set_u32(44, uapi::INVALID_DOORBELL);
        a.set_u32(48, handle);
        // No syncobj: waiting comes as WAIT_CMD.
        a.set_u32(52, 0);
        self.say(|| format!("context {handle}: {columns} columns"));
        Ok(())
    }

    fn configure(&mut self, a: &Fields<'_>) -> io::Result<()> {
        // handle, param_type; param_val, param_val_size.
        let (handle, param, value, n) = (a.u32(0), a.u32(4), a.u64(8), a.u32(16));
        if !self.contexts.contains_key(&handle) {
            return Err(errno(libc::EINVAL));
        }
        if param != uapi::CONFIG_CU {
            return Ok(());
        }
        // num_cus (2 bytes), 6 of padding; then of each: the binary's handle (4), its function (1), 3 of padding.
        if !(16..=4096).contains(&n) {
            return Err(errno(libc::EINVAL));
        }
        let mut list = vec![0; n as usize];
        memory::read(value, &mut list)?;
        let list = Fields(&mut list);
        let pdi = list.u32(8);
        let bo = self.bos.get(pdi)?;
        let (address, size) = (bo.address.ok_or_else(|| errno(libc::EINVAL))?, bo.size);
        let mut bytes = vec![0; size as usize];
        crate::array::Memory::read(&mut self.bos, address, &mut bytes).map_err(|_| errno(libc::EFAULT))?;
        let design = Design::of(&bytes);
        self.say(|| format!("context {handle}: {design:?}"));
        self.contexts.get_mut(&handle).expect("there").design = Some(design);
        Ok(())
    }

    fn submit(&mut self, a: &mut Fields<'_>) -> io::Result<()> {
        // ext, ext_flags; hwctx, type; cmd_handles, args; cmd_count, arg_count; seq.
        let (handle, cmds, args) = (a.u32(16), a.u64(24), a.u64(32));
        let (n_cmds, n_args) = (a.u32(40), a.u32(44));
        self.submissions += 1;
        let submission = self.submissions;
        if self.poisoned {
            return Err(errno(libc::EFAULT));
        }
        if self.faults.at("enodev", submission) {
            return Err(errno(libc::ENODEV));
        }
        if !self.contexts.contains_key(&handle) || n_cmds != 1 || n_args > 512 {
            return Err(errno(libc::EINVAL));
        }
        let mut list = vec![0; 4 * n_args as usize];
        if n_args > 0 {
            memory::read(args, &mut list)?;
        }
        for i in 0..n_args as usize {
            self.bos.get(Fields(&mut list).u32(4 * i))?;
        }
        if self.loaded != Some(handle) {
            // Another context had the array: what was loaded is gone.
            let context = self.contexts.get_mut(&handle).expect("there");
            if self.loaded.is_some() && context.submitted > 0 {
                context.array = context.array.fresh();
            }
            self.loaded = Some(handle);
        }
        let context = self.contexts.get_mut(&handle).expect("there");
        context.submitted += 1;
        let number = context.submitted;
        a.set_u64(48, number);
        if self.faults.at("etime", submission) || self.faults.since("wedge", submission) {
            self.endless.insert((handle, number));
            self.say(|| format!("submission {submission}: never ends"));
            return Ok(());
        }
        let outcome = execute(&mut self.bos, context, cmds as u32, &self.faults, submission)?;
        self.say(|| format!("submission {submission}: {:?}, {}", outcome.state, outcome.why));
        if outcome.state != State::Completed && !self.log {
            // A failure is worth a line also without the log, where there is a report to put it.
            if let Some(path) = &self.report {
                let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
                let line = format!("submission {submission} ended in {:?}: {}\n", outcome.state, outcome.why);
                let _ = file.and_then(|mut f| f.write_all(line.as_bytes()));
            }
        }
        Ok(())
    }

    fn info(&self, a: &Fields<'_>) -> io::Result<()> {
        // param, buffer_size; buffer.
        let (param, n, address) = (a.u32(0), a.u32(4) as usize, a.u64(8));
        if n > 1 << 20 {
            return Err(errno(libc::EINVAL));
        }
        let mut answer = vec![0u8; n.max(64)];
        let mut f = Fields(&mut answer);
        match param {
            query::AIE_METADATA => {
                // col_size; cols, rows (2 bytes each); version; then core, mem, shim, each row_count, row_start,
                // dma_channel_count, lock_count, event_reg_count and 6 of padding (2 bytes each).
                f.set_u32(0, 1 << 25);
                f.set_u32(4, COLUMNS | 6 << 16);
                f.set_u32(8, 1);
                f.set_u32(12, 1);
                for (at, rows, start, channels, locks) in [(16, 4, 2, 2, 16), (32, 1, 1, 6, 64), (48, 1, 0, 2, 16)] {
                    f.set_u32(at, rows | start << 16);
                    f.set_u32(at + 4, channels | locks << 16);
                }
            }
            query::AIE_VERSION => {
                f.set_u32(0, 1);
                f.set_u32(4, 1);
            }
            query::FIRMWARE_VERSION => {
                let version = if self.faults.has("firmware") { [1, 0, 0, 63] } else { [1, 1, 2, 65] };
                for (i, part) in version.into_iter().enumerate() {
                    f.set_u32(4 * i, part);
                }
            }
            query::RESOURCE_INFO => {
                // npu_clk_max, npu_tops_max, npu_task_max, npu_tops_curr, npu_task_curr.
                let taken = if self.faults.has("contexts") { CONTEXTS } else { self.contexts.len() };
                f.set_u64(16, CONTEXTS as u64);
                f.set_u64(32, taken as u64);
            }
            _ => {}
        }
        memory::write(address, &answer[..n])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uapi::BO_DEV_HEAP;

    fn simulator() -> Simulator {
        let mut s = Simulator::from_environment();
        s.faults = Faults::default();
        s
    }

    fn create(s: &mut Simulator, kind: u32, size: u64) -> io::Result<u32> {
        let mut a = [0u8; 32];
        Fields(&mut a).set_u64(16, size);
        Fields(&mut a).set_u32(24, kind);
        s.ioctl(uapi::CREATE_BO, &mut a)?;
        Ok(Fields(&mut a).u32(28))
    }

    fn address(s: &mut Simulator, handle: u32) -> u64 {
        let mut a = [0u8; 48];
        Fields(&mut a).set_u32(16, handle);
        s.ioctl(uapi::GET_BO_INFO, &mut a).unwrap();
        Fields(&mut a).u64(40)
    }

    #[test]
    fn the_heap_is_shared_out_aligned_and_taken_back() {
        let mut s = simulator();
        assert_eq!(create(&mut s, BO_DEV, 100).unwrap_err().raw_os_error(), Some(libc::EINVAL), "no heap");
        create(&mut s, BO_DEV_HEAP, 64 << 20).unwrap();
        let first = create(&mut s, BO_DEV, 100).unwrap();
        let second = create(&mut s, BO_DEV, 100).unwrap();
        assert_eq!((address(&mut s, first), address(&mut s, second)), (0x400_0000, 0x400_8000));
        let mut a = [0u8; 8];
        Fields(&mut a).set_u32(0, first);
        s.ioctl(uapi::GEM_CLOSE, &mut a).unwrap();
        let third = create(&mut s, BO_DEV, 100).unwrap();
        assert_eq!(address(&mut s, third), 0x400_0000);
        assert_eq!(create(&mut s, BO_DEV, 65 << 20).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
        assert_eq!(s.bos.count(), 3);
    }

    #[test]
    fn contexts_run_out() {
        let mut s = simulator();
        let mut make = |tiles: u32| {
            let mut a = [0u8; 56];
            Fields(&mut a).set_u32(36, tiles);
            s.ioctl(uapi::CREATE_HWCTX, &mut a).map_err(|e| e.raw_os_error().unwrap())
        };
        assert_eq!(make(36), Err(libc::EINVAL), "nine columns");
        assert_eq!(make(0), Err(libc::EINVAL));
        for _ in 0..CONTEXTS {
            make(32).unwrap();
        }
        assert_eq!(make(32), Err(libc::EINVAL));
    }

    #[test]
    fn unknown_requests_and_handles_are_errors() {
        let mut s = simulator();
        assert_eq!(s.ioctl(0x1234, &mut [0; 8]).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(s.ioctl(uapi::GEM_CLOSE, &mut [9; 8]).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert_eq!(s.ioctl(uapi::EXEC_CMD, &mut [0; 56]).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
