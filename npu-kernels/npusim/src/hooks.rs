//! The symbols that stand in front of libc's: `open`, `openat`, `close`, `ioctl`, `mmap`, `munmap`. What is not about the node goes
//! on to libc as it came.
//!
//! The hooks are called from anywhere in the process, also by this library itself (closing the memory of a buffer, say). So they
//! first look whether the node is meant, in a table without a lock, and only then take the lock of the simulator, which does
//! nothing to the node itself.

use crate::device::{NODE, Simulator};
use libc::{c_char, c_int, c_ulong, c_void, mode_t, off_t, size_t};
use std::ffi::CStr;
use std::io;
use std::mem::transmute;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, Once, PoisonError};

/// Descriptors up to this number can be the node's.
const MOST: usize = 1 << 16;
static OURS: [AtomicBool; MOST] = [const { AtomicBool::new(false) }; MOST];
/// Where objects are mapped, so that other calls of `munmap` need no lock: how many there are.
static MAPPINGS: AtomicU64 = AtomicU64::new(0);
static SIMULATOR: LazyLock<Mutex<Simulator>> = LazyLock::new(|| Mutex::new(Simulator::from_environment()));

fn simulator() -> MutexGuard<'static, Simulator> {
    SIMULATOR.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_ours(fd: c_int) -> bool {
    usize::try_from(fd).ok().and_then(|fd| OURS.get(fd)).is_some_and(|o| o.load(Ordering::Acquire))
}

fn mark(fd: c_int, ours: bool) {
    if let Some(place) = usize::try_from(fd).ok().and_then(|fd| OURS.get(fd)) {
        place.store(ours, Ordering::Release);
    }
}

/// A descriptor by its number, if it is open; it stays open for as long as the request runs that names it.
pub fn borrow(fd: &c_int) -> Option<BorrowedFd<'_>> {
    // SAFETY: asks about a number, and touches nothing.
    let open = *fd >= 0 && unsafe { libc::fcntl(*fd, libc::F_GETFD) } >= 0;
    // SAFETY: it is open, and the process that asked keeps it so during its request.
    open.then(|| unsafe { BorrowedFd::borrow_raw(*fd) })
}

fn fail(error: &io::Error) -> c_int {
    // SAFETY: the calling thread's own errno.
    unsafe { *libc::__errno_location() = error.raw_os_error().unwrap_or(libc::EIO) };
    -1
}

macro_rules! real {
    ($name:literal as $type:ty) => {{
        static FOUND: LazyLock<usize> = LazyLock::new(|| {
            // SAFETY: a literal with its NUL; the next object in the search order is libc, which has the symbol.
            unsafe { libc::dlsym(libc::RTLD_NEXT, $name.as_ptr()) as usize }
        });
        // SAFETY: libc's function of that name has that type.
        unsafe { transmute::<usize, $type>(*FOUND) }
    }};
}

type Open = unsafe extern "C" fn(*const c_char, c_int, mode_t) -> c_int;
type OpenAt = unsafe extern "C" fn(c_int, *const c_char, c_int, mode_t) -> c_int;
type Close = unsafe extern "C" fn(c_int) -> c_int;
type Ioctl = unsafe extern "C" fn(c_int, c_ulong, *mut c_void) -> c_int;
type Mmap = unsafe extern "C" fn(*mut c_void, size_t, c_int, c_int, c_int, off_t) -> *mut c_void;
type Munmap = unsafe extern "C" fn(*mut c_void, size_t) -> c_int;

/// # Safety
/// `path` is null or a string with its NUL.
unsafe fn is_node(path: *const c_char) -> bool {
    // SAFETY: the caller's promise.
    !path.is_null() && unsafe { CStr::from_ptr(path) }.to_bytes() == NODE.as_bytes()
}

/// After libc has opened the node's placeholder.
fn opened(fd: c_int) -> c_int {
    if fd < 0 {
        return fd;
    }
    let mut simulator = simulator();
    if let Err(e) = simulator.may_open() {
        drop(simulator);
        let real = real!(c"close" as Close);
        // SAFETY: just opened, and nobody else knows it.
        unsafe { real(fd) };
        return fail(&e);
    }
    simulator.opened(fd);
    mark(fd, true);
    static AT_EXIT: Once = Once::new();
    AT_EXIT.call_once(|| {
        // SAFETY: a function that may be called at any time; this library is not unloaded before the process ends.
        unsafe { libc::atexit(at_exit) };
    });
    fd
}

/// XRT keeps the node open to the end.
extern "C" fn at_exit() {
    // Whoever holds the lock while the process ends is stopped in the middle: then there is no report.
    if let Ok(simulator) = SIMULATOR.try_lock()
        && simulator.is_open()
    {
        simulator.report();
    }
}

/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    let real = real!(c"open" as Open);
    // SAFETY: what the caller promised libc. `mode` is there only for some flags; otherwise it is what a register held, and
    // libc does not look at it.
    let (fd, node) = unsafe { (real(path, flags, mode), is_node(path)) };
    if node { opened(fd) } else { fd }
}

/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    let real = real!(c"open64" as Open);
    // SAFETY: as above.
    let (fd, node) = unsafe { (real(path, flags, mode), is_node(path)) };
    if node { opened(fd) } else { fd }
}

/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    let real = real!(c"openat" as OpenAt);
    // SAFETY: as above.
    let (fd, node) = unsafe { (real(dir, path, flags, mode), is_node(path)) };
    if node { opened(fd) } else { fd }
}

/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn openat64(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    let real = real!(c"openat64" as OpenAt);
    // SAFETY: as above.
    let (fd, node) = unsafe { (real(dir, path, flags, mode), is_node(path)) };
    if node { opened(fd) } else { fd }
}

/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    if is_ours(fd) {
        mark(fd, false);
        simulator().closed(fd);
    }
    let real = real!(c"close" as Close);
    // SAFETY: what the caller promised libc.
    unsafe { real(fd) }
}

/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if !is_ours(fd) {
        let real = real!(c"ioctl" as Ioctl);
        // SAFETY: what the caller promised libc. A request without an argument has what a register held, which is not looked at.
        return unsafe { real(fd, request, argument) };
    }
    let bytes = (request >> 16 & 0x3fff) as usize;
    if argument.is_null() || bytes == 0 {
        return fail(&io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: the request's number states the size of what its caller passes, for reading and writing during the call.
    let argument = unsafe { std::slice::from_raw_parts_mut(argument.cast::<u8>(), bytes) };
    match simulator().ioctl(request as u32, argument) {
        Ok(()) => 0,
        Err(e) => fail(&e),
    }
}

/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    n: size_t,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    let real = real!(c"mmap" as Mmap);
    if fd < 0 || !is_ours(fd) {
        // SAFETY: what the caller promised libc.
        return unsafe { real(address, n, prot, flags, fd, offset) };
    }
    let mut simulator = simulator();
    let file = match simulator.map(offset as u64, n as u64, flags & libc::MAP_LOCKED != 0) {
        Ok(file) => file,
        Err(e) => {
            fail(&e);
            return libc::MAP_FAILED;
        }
    };
    // SAFETY: the caller's mapping, of the memory that stands for the device's; that need not be locked.
    let mapped = unsafe { real(address, n, prot, flags & !libc::MAP_LOCKED, file, 0) };
    if mapped != libc::MAP_FAILED {
        simulator.mapped(offset as u64, mapped as u64, n as u64);
        MAPPINGS.fetch_add(1, Ordering::Relaxed);
    }
    mapped
}

/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    n: size_t,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the same function where addresses have 64 bits.
    unsafe { mmap(address, n, prot, flags, fd, offset) }
}

/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn munmap(address: *mut c_void, n: size_t) -> c_int {
    // Allocators call this from anywhere, also while the simulator is at work: the lock is only tried. What is missed is an
    // object whose memory is gone, whose address nobody will use as its.
    if MAPPINGS.load(Ordering::Relaxed) > 0
        && let Ok(mut simulator) = SIMULATOR.try_lock()
    {
        simulator.unmapped(address as u64);
    }
    let real = real!(c"munmap" as Munmap);
    // SAFETY: what the caller promised libc.
    unsafe { real(address, n) }
}
