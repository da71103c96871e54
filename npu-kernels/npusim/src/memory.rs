//! The process's own memory by address, as the device reaches it through the IOMMU: an address that is not there is an error, not
//! a crash.

use std::io;

fn own() -> libc::pid_t {
    std::process::id() as libc::pid_t
}

/// Reads from an address.
pub fn read(address: u64, bytes: &mut [u8]) -> io::Result<()> {
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: bytes.len() };
    // SAFETY: the local side is a live slice; the kernel checks the other side and copies nothing from where nothing is.
    let n = unsafe { libc::process_vm_readv(own(), &raw const local, 1, &raw const remote, 1, 0) };
    whole(n, bytes.len())
}

/// Writes to an address.
pub fn write(address: u64, bytes: &[u8]) -> io::Result<()> {
    let local = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: bytes.len() };
    // SAFETY: as above; that the process's memory changes at that address is what it asked its device for, as with the real one.
    let n = unsafe { libc::process_vm_writev(own(), &raw const local, 1, &raw const remote, 1, 0) };
    whole(n, bytes.len())
}

fn whole(n: isize, wanted: usize) -> io::Result<()> {
    match n {
        n if n < 0 => Err(io::Error::last_os_error()),
        n if n as usize == wanted => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::EFAULT)),
    }
}

/// A new file of memory.
pub fn memfd(size: u64) -> io::Result<std::fs::File> {
    use std::os::fd::FromRawFd as _;
    // SAFETY: a literal with its NUL.
    let fd = unsafe { libc::memfd_create(c"npusim".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, and nobody else's.
    let file = unsafe { std::fs::File::from_raw_fd(fd) };
    file.set_len(size)?;
    Ok(file)
}
