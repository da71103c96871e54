//! The shim's handles as owned values, and the only callers of its functions. What is promised here is memory safety; what the
//! calls are good for is decided by the modules above.
//!
//! Handles keep the functions alive, give themselves back on drop, and may be used from any thread: every call but waiting holds
//! one lock, since XRT does not say which of its classes may be used by two threads at once. Waiting has its run to itself.

use crate::error::{Error, State};
use crate::ffi::{
    Functions, XDNA_COMMAND, XDNA_OK, XDNA_SYSTEM, xdna_buffer, xdna_context, xdna_device, xdna_error, xdna_kernel,
    xdna_run,
};
use libloading::Library;
use std::ffi::{CStr, CString, c_void};
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What XRT answered, before anybody has made sense of it.
#[derive(Debug)]
pub struct Failure {
    /// The function.
    pub call: &'static str,
    /// An errno, where there is one.
    pub errno: i32,
    /// The state of a command, where it is that.
    pub state: Option<State>,
    /// Its words.
    pub text: String,
}

/// The loaded library.
pub struct Shim {
    f: Functions,
    lock: Mutex<()>,
}

impl std::fmt::Debug for Shim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shim")
    }
}

/// A fresh error for a call to fill.
fn blank() -> xdna_error {
    xdna_error { kind: XDNA_OK, code: 0, text: [0; 504] }
}

fn failure(call: &'static str, e: &xdna_error) -> Failure {
    // SAFETY: chars are bytes, and the slice is the array.
    let bytes = unsafe { std::slice::from_raw_parts(e.text.as_ptr().cast::<u8>(), e.text.len()) };
    let text = CStr::from_bytes_until_nul(bytes).map_or(String::new(), |c| c.to_string_lossy().into_owned());
    Failure {
        call,
        errno: if e.kind == XDNA_SYSTEM { e.code } else { 0 },
        state: (e.kind == XDNA_COMMAND).then(|| State::from(e.code)),
        text,
    }
}

/// The answer of a call that gives a handle.
fn handle<T>(call: &'static str, pointer: *mut T, e: &xdna_error) -> Result<NonNull<T>, Failure> {
    NonNull::new(pointer).ok_or_else(|| failure(call, e))
}

/// The answer of a call that does something.
fn done(call: &'static str, result: i32, e: &xdna_error) -> Result<(), Failure> {
    if result < 0 { Err(failure(call, e)) } else { Ok(()) }
}

impl Shim {
    /// Loads the library at `path`.
    pub fn load(path: &Path) -> Result<Arc<Shim>, Error> {
        // SAFETY: running the initialisers of the shim and of XRT is what the caller asks for by naming it. They set one
        // variable of the environment, which is why the driver is loaded before threads are started.
        let library = unsafe { Library::new(path) }.map_err(|e| {
            let (shim, reason) = (path.to_owned(), words(&e));
            if reason.contains("libxrt") && reason.contains("No such file") {
                Error::NoXrt { shim, reason }
            } else {
                Error::BadShim { shim, reason }
            }
        })?;
        let bad = |e: libloading::Error| Error::BadShim { shim: path.to_owned(), reason: words(&e) };
        // SAFETY: every version of the shim has this function with this type; it calls nothing.
        let found = unsafe { library.get::<unsafe extern "C" fn() -> u32>(b"xdna_abi\0").map_err(bad)?() };
        if found != crate::ffi::XDNA_SHIM_ABI {
            return Err(Error::WrongAbi { shim: path.to_owned(), found, wanted: crate::ffi::XDNA_SHIM_ABI });
        }
        // SAFETY: the interface number vouches for names and types.
        let f = unsafe { Functions::of(library) }.map_err(bad)?;
        Ok(Arc::new(Shim { f, lock: Mutex::new(()) }))
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        // The lock guards no data of ours: a panic elsewhere leaves nothing half done.
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// XRT's version and that of the headers the shim was built with, as major << 16 | minor.
    pub fn versions(&self) -> Result<(u32, u32), Failure> {
        let (mut e, mut runtime, mut built) = (blank(), 0, 0);
        let _turn = self.turn();
        // SAFETY: all three are live and written by nobody else.
        done("xdna_versions", unsafe { (self.f.xdna_versions)(&mut runtime, &mut built, &mut e) }, &e)?;
        Ok((runtime, built))
    }

    /// How many devices XRT lists.
    pub fn device_count(&self) -> Result<u32, Failure> {
        let (mut e, mut count) = (blank(), 0);
        let _turn = self.turn();
        // SAFETY: both are live and written by nobody else.
        done("xdna_device_count", unsafe { (self.f.xdna_device_count)(&mut count, &mut e) }, &e)?;
        Ok(count)
    }

    /// Ends the process at once, without the destructors of XRT.
    pub fn leave(&self, code: i32) -> ! {
        // SAFETY: takes a number, and does not come back.
        unsafe { (self.f.xdna_leave)(code) };
        unreachable!("xdna_leave came back")
    }
}

/// A loader's error with its cause, which has the file's name.
fn words(e: &libloading::Error) -> String {
    std::error::Error::source(e).map_or_else(|| e.to_string(), |cause| format!("{e}: {cause}"))
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident of $raw:ident freed by $free:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name {
            shim: Arc<Shim>,
            raw: NonNull<$raw>,
        }

        // SAFETY: the handle belongs to no thread, and every use of it holds the shim's lock or, for waiting, the only reference.
        unsafe impl Send for $name {}
        // SAFETY: likewise; there is no access through a shared reference that does not hold the lock.
        unsafe impl Sync for $name {}

        impl Drop for $name {
            fn drop(&mut self) {
                let _turn = self.shim.turn();
                // SAFETY: made by the shim, owned by this value, used for the last time.
                unsafe { (self.shim.f.$free)(self.raw.as_ptr()) };
            }
        }
    )*};
}

handles! {
    /// `xdna_device`.
    DeviceHandle of xdna_device freed by xdna_device_free;
    /// `xdna_context`.
    ContextHandle of xdna_context freed by xdna_context_free;
    /// `xdna_kernel`.
    KernelHandle of xdna_kernel freed by xdna_kernel_free;
    /// `xdna_buffer`, without its mapping.
    BareBuffer of xdna_buffer freed by xdna_buffer_free;
    /// `xdna_run`.
    RunHandle of xdna_run freed by xdna_run_free;
}

impl DeviceHandle {
    /// Opens a device.
    pub fn open(shim: &Arc<Shim>, index: u32) -> Result<DeviceHandle, Failure> {
        let mut e = blank();
        let _turn = shim.turn();
        // SAFETY: e is live.
        let raw = handle("xdna_device_open", unsafe { (shim.f.xdna_device_open)(index, &mut e) }, &e)?;
        Ok(DeviceHandle { shim: shim.clone(), raw })
    }

    /// 0: its name, 1: its PCI address.
    pub fn text(&self, what: i32) -> Result<String, Failure> {
        let (mut e, mut out) = (blank(), [0u8; 256]);
        let _turn = self.shim.turn();
        // SAFETY: the handle is live; `out` has the length that is stated.
        let result = unsafe {
            (self.shim.f.xdna_device_text)(self.raw.as_ptr(), what, out.as_mut_ptr().cast(), out.len(), &mut e)
        };
        done("xdna_device_text", result, &e)?;
        Ok(CStr::from_bytes_until_nul(&out).map_or(String::new(), |c| c.to_string_lossy().into_owned()))
    }

    /// A context for an xclbin or a full ELF.
    pub fn context(&self, bytes: &[u8], elf: bool) -> Result<ContextHandle, Failure> {
        let mut e = blank();
        let (call, make) = if elf {
            ("xdna_context_elf", self.shim.f.xdna_context_elf)
        } else {
            ("xdna_context_xclbin", self.shim.f.xdna_context_xclbin)
        };
        let _turn = self.shim.turn();
        // SAFETY: the handle is live; the bytes are only read during the call, and both classes of XRT copy them.
        let raw = unsafe { make(self.raw.as_ptr(), bytes.as_ptr().cast(), bytes.len(), &mut e) };
        Ok(ContextHandle { shim: self.shim.clone(), raw: handle(call, raw, &e)? })
    }

    /// Memory for host and device.
    pub fn buffer(&self, what: Memory<'_>) -> Result<BufferHandle, Failure> {
        let mut e = blank();
        let (f, device) = (&self.shim.f, self.raw.as_ptr());
        let turn = self.shim.turn();
        // SAFETY: the handle is live, and so is a descriptor that is borrowed.
        let (call, raw) = unsafe {
            match what {
                Memory::Data(n) => ("xdna_buffer_data", (f.xdna_buffer_data)(device, n, &mut e)),
                Memory::Grouped(n, group) => ("xdna_buffer_grouped", (f.xdna_buffer_grouped)(device, group, n, &mut e)),
                Memory::Instructions(n, group) => {
                    ("xdna_buffer_instructions", (f.xdna_buffer_instructions)(device, group, n, &mut e))
                }
                Memory::Import(fd) => ("xdna_buffer_import", (f.xdna_buffer_import)(device, fd.as_raw_fd(), &mut e)),
            }
        };
        let bare = BareBuffer { shim: self.shim.clone(), raw: handle(call, raw, &e)? };
        drop(turn);
        BufferHandle::of(bare)
    }
}

/// What a buffer is for.
pub enum Memory<'a> {
    /// Bytes for arguments.
    Data(usize),
    /// Bytes in a memory group.
    Grouped(usize, i32),
    /// Bytes for instructions, in a memory group.
    Instructions(usize, i32),
    /// A dma-buf, mapped by the driver.
    Import(BorrowedFd<'a>),
}

impl ContextHandle {
    /// Adds a full ELF.
    pub fn add(&self, bytes: &[u8]) -> Result<(), Failure> {
        let mut e = blank();
        let _turn = self.shim.turn();
        // SAFETY: as for `DeviceHandle::context`.
        let result =
            unsafe { (self.shim.f.xdna_context_add)(self.raw.as_ptr(), bytes.as_ptr().cast(), bytes.len(), &mut e) };
        done("xdna_context_add", result, &e)
    }

    /// The kernel of that name.
    pub fn kernel(&self, name: &str) -> Result<KernelHandle, Failure> {
        let mut e = blank();
        let call = "xdna_kernel_open";
        let name = CString::new(name).map_err(|_| Failure {
            call,
            errno: libc::EINVAL,
            state: None,
            text: "a kernel's name has a NUL".to_owned(),
        })?;
        let _turn = self.shim.turn();
        // SAFETY: handle and name are live.
        let raw = unsafe { (self.shim.f.xdna_kernel_open)(self.raw.as_ptr(), name.as_ptr(), &mut e) };
        Ok(KernelHandle { shim: self.shim.clone(), raw: handle(call, raw, &e)? })
    }
}

impl KernelHandle {
    /// The memory group of an argument.
    pub fn group(&self, arg: i32) -> Result<i32, Failure> {
        let (mut e, mut group) = (blank(), 0);
        let _turn = self.shim.turn();
        // SAFETY: handle and place are live.
        let result = unsafe { (self.shim.f.xdna_kernel_group)(self.raw.as_ptr(), arg, &mut group, &mut e) };
        done("xdna_kernel_group", result, &e)?;
        Ok(group)
    }

    /// A run without arguments.
    pub fn run(&self) -> Result<RunHandle, Failure> {
        let mut e = blank();
        let _turn = self.shim.turn();
        // SAFETY: the handle is live.
        let raw = handle("xdna_run_new", unsafe { (self.shim.f.xdna_run_new)(self.raw.as_ptr(), &mut e) }, &e)?;
        Ok(RunHandle { shim: self.shim.clone(), raw })
    }
}

impl RunHandle {
    /// Sets a scalar of 8 bytes.
    pub fn set_u64(&mut self, arg: i32, value: u64) -> Result<(), Failure> {
        let mut e = blank();
        let _turn = self.shim.turn();
        // SAFETY: the handle is live.
        let result = unsafe { (self.shim.f.xdna_run_set_u64)(self.raw.as_ptr(), arg, value, &mut e) };
        done("xdna_run_set_u64", result, &e)
    }

    /// Sets a scalar of 4 bytes.
    pub fn set_u32(&mut self, arg: i32, value: u32) -> Result<(), Failure> {
        let mut e = blank();
        let _turn = self.shim.turn();
        // SAFETY: the handle is live.
        let result = unsafe { (self.shim.f.xdna_run_set_u32)(self.raw.as_ptr(), arg, value, &mut e) };
        done("xdna_run_set_u32", result, &e)
    }

    /// Sets a buffer. It must outlive the run's end, which the caller sees to.
    pub fn set_buffer(&mut self, arg: i32, buffer: &BufferHandle) -> Result<(), Failure> {
        let mut e = blank();
        let _turn = self.shim.turn();
        // SAFETY: both handles are live.
        let result =
            unsafe { (self.shim.f.xdna_run_set_buffer)(self.raw.as_ptr(), arg, buffer.bare.raw.as_ptr(), &mut e) };
        done("xdna_run_set_buffer", result, &e)
    }

    /// Gives it to the device.
    pub fn start(&mut self) -> Result<(), Failure> {
        let mut e = blank();
        let _turn = self.shim.turn();
        // SAFETY: the handle is live.
        done("xdna_run_start", unsafe { (self.shim.f.xdna_run_start)(self.raw.as_ptr(), &mut e) }, &e)
    }

    /// Waits, without the lock: other threads go on.
    pub fn wait(&mut self, ms: u32) -> Result<State, Failure> {
        let (mut e, mut state) = (blank(), 0);
        // SAFETY: the handle is live, and `&mut self` keeps every other user of it away.
        let result = unsafe { (self.shim.f.xdna_run_wait)(self.raw.as_ptr(), ms, &mut state, &mut e) };
        done("xdna_run_wait", result, &e)?;
        Ok(State::from(state))
    }
}

/// A buffer and where the host sees it.
#[derive(Debug)]
pub struct BufferHandle {
    bare: BareBuffer,
    map: NonNull<u8>,
    /// Bytes that may be touched at `map`.
    len: usize,
    address: u64,
}

// SAFETY: the mapping lives as long as the handle and belongs to no thread; reading takes a shared, writing an exclusive
// reference.
unsafe impl Send for BufferHandle {}
// SAFETY: likewise.
unsafe impl Sync for BufferHandle {}

impl BufferHandle {
    fn of(bare: BareBuffer) -> Result<BufferHandle, Failure> {
        let (mut e, mut address, mut size) = (blank(), 0, 0);
        let turn = bare.shim.turn();
        // SAFETY: the handle and both places are live.
        let result = unsafe { (bare.shim.f.xdna_buffer_address)(bare.raw.as_ptr(), &mut address, &mut size, &mut e) };
        done("xdna_buffer_address", result, &e)?;
        // SAFETY: the handle is live.
        let map = unsafe { (bare.shim.f.xdna_buffer_map)(bare.raw.as_ptr(), &mut e) };
        let map = handle::<c_void>("xdna_buffer_map", map, &e)?.cast();
        drop(turn);
        Ok(BufferHandle { bare, map, len: usize::try_from(size).unwrap_or(0), address })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Where the device sees it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Copies into it. Panics outside of it.
    pub fn copy_in(&mut self, at: usize, bytes: &[u8]) {
        assert!(at <= self.len && bytes.len() <= self.len - at, "a write outside of a buffer");
        // SAFETY: the range is inside of the mapping, which is no Rust object; `&mut self` keeps other users of ours away, and
        // no run has the buffer while somebody can have it.
        unsafe { self.map.add(at).copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
    }

    /// Copies out of it. Panics outside of it.
    pub fn copy_out(&self, at: usize, bytes: &mut [u8]) {
        assert!(at <= self.len && bytes.len() <= self.len - at, "a read outside of a buffer");
        // SAFETY: as above.
        unsafe { self.map.add(at).copy_to_nonoverlapping(NonNull::from(&mut *bytes).cast(), bytes.len()) };
    }

    /// Makes all of it zero.
    pub fn zero(&mut self) {
        // SAFETY: all of the mapping, and as above.
        unsafe { self.map.write_bytes(0, self.len) };
    }

    /// Flushes a range before the device reads it, or invalidates it before the host does.
    pub fn sync(&self, to_device: bool, at: usize, n: usize) -> Result<(), Failure> {
        let mut e = blank();
        let _turn = self.bare.shim.turn();
        // SAFETY: the handle is live; XRT checks the range.
        let result =
            unsafe { (self.bare.shim.f.xdna_buffer_sync)(self.bare.raw.as_ptr(), i32::from(to_device), n, at, &mut e) };
        done("xdna_buffer_sync", result, &e)
    }

    /// A descriptor for it.
    pub fn export(&self) -> Result<OwnedFd, Failure> {
        let (mut e, mut fd) = (blank(), -1);
        let _turn = self.bare.shim.turn();
        // SAFETY: handle and place are live.
        let result = unsafe { (self.bare.shim.f.xdna_buffer_export)(self.bare.raw.as_ptr(), &mut fd, &mut e) };
        done("xdna_buffer_export", result, &e)?;
        // SAFETY: the shim made a descriptor for us that nobody else has.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}
