//! Memory like a decoder's, of every kind that this machine has: memory files, and dma-bufs of both makers that need no device. For
//! tests that write into shared memory and want to see, through a mapping of their own, what another process would see.
//!
//! Nothing of the product is used here. Real dma-bufs need a kernel that has them; `tests/vm/run.sh` boots one.
#![allow(dead_code)] // each test binary uses its own part

use memmap2::{MmapOptions, MmapRaw};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, SeekFrom};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, NoArg, Opcode, Setter, Updater, ioctl, opcode};
use std::fmt;

/// Set where real dma-bufs must be there: a test that cannot have one fails then, instead of doing with less.
pub const REQUIRED: &str = "NPU_PREFILL_TEST_DMABUF";

/// Who made the memory.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// A memory file, sealed against shrinking and growing.
    Memfd,
    /// A dma-buf over the pages of a memory file.
    Udmabuf,
    /// A dma-buf from the system's heap.
    DmaHeap,
}

impl Kind {
    /// All that there may be.
    pub const ALL: [Kind; 3] = [Kind::Memfd, Kind::Udmabuf, Kind::DmaHeap];

    /// Whether devices could share it.
    pub fn is_dma_buf(self) -> bool {
        self != Kind::Memfd
    }

    fn device(self) -> Option<&'static str> {
        match self {
            Kind::Memfd => None,
            Kind::Udmabuf => Some("/dev/udmabuf"),
            Kind::DmaHeap => Some("/dev/dma_heap/system"),
        }
    }

    fn open(self) -> Result<Option<OwnedFd>, Errno> {
        let open = |path| rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        self.device().map(open).transpose()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Memfd => "memfd",
            Kind::Udmabuf => "udmabuf",
            Kind::DmaHeap => "dma-heap",
        })
    }
}

/// Whether real dma-bufs must be there.
pub fn required() -> bool {
    std::env::var_os(REQUIRED).is_some_and(|v| v == "1")
}

/// The kinds that this machine has, memory files first. A test runs over all of them.
///
/// # Panics
/// When one is missing that [`REQUIRED`] promises.
pub fn available() -> Vec<Kind> {
    let there = |kind: &Kind| match kind.open() {
        Ok(_) => true,
        Err(e) => {
            assert!(!required(), "{REQUIRED} is set, but {kind} cannot be had: {}: {e}", kind.device().unwrap_or("-"));
            false
        }
    };
    Kind::ALL.into_iter().filter(there).collect()
}

/// A buffer of zeros, closed on exec. Dma-bufs are whole pages: their size is rounded up.
///
/// # Panics
/// When there is no such buffer to be had.
pub fn make(kind: Kind, size: u64) -> OwnedFd {
    let made = match kind {
        Kind::Memfd => Ok(memfd(size)),
        Kind::Udmabuf => udmabuf(&memfd(pages(size)), 0, pages(size)),
        Kind::DmaHeap => heap(pages(size), 0),
    };
    made.unwrap_or_else(|e| panic!("a {kind} buffer of {size} bytes: {e}"))
}

/// The size rounded up to whole pages.
pub fn pages(size: u64) -> u64 {
    size.next_multiple_of(rustix::param::page_size() as u64)
}

/// The length by seeking, as a receiver finds it.
pub fn length(fd: impl AsFd) -> Result<u64, Errno> {
    rustix::fs::seek(fd, SeekFrom::End(0))
}

/// A memory file of exactly that size, with the seals that a decoder's memory should have.
pub fn memfd(size: u64) -> OwnedFd {
    let fd = unsealed(size);
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    fd
}

/// The same without seals.
pub fn unsealed(size: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, size).unwrap();
    fd
}

// The kernel's interface: <linux/udmabuf.h>, <linux/dma-heap.h>, <linux/dma-buf.h>.

#[repr(C)]
struct UdmabufCreate {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

#[repr(C)]
struct DmaHeapAllocation {
    len: u64,
    fd: u32,
    fd_flags: u32,
    heap_flags: u64,
}

const UDMABUF_CREATE: Opcode = opcode::write::<UdmabufCreate>(b'u', 0x42);
const UDMABUF_FLAGS_CLOEXEC: u32 = 1;
const DMA_HEAP_IOCTL_ALLOC: Opcode = opcode::read_write::<DmaHeapAllocation>(b'H', 0);
const DMA_BUF_IOCTL_SYNC: Opcode = opcode::write::<u64>(b'b', 0);
/// A number that no kernel has given to anything in dma-bufs.
const NO_SUCH: Opcode = opcode::none(b'b', 0xee);

/// The numbers as a C compiler gets them from the headers.
pub const OPCODES: [(Opcode, u32); 3] =
    [(UDMABUF_CREATE, 0x4018_7542), (DMA_HEAP_IOCTL_ALLOC, 0xc018_4800), (DMA_BUF_IOCTL_SYNC, 0x4008_6200)];

/// Flags of [`sync`]: reads, writes, and the end of them.
pub const READ: u64 = 1;
pub const WRITE: u64 = 2;
pub const END: u64 = 4;

/// `UDMABUF_CREATE`, whose answer is the new descriptor.
struct Create(UdmabufCreate);

// SAFETY: as_ptr points to the struct that the opcode's size names, alive as long as self; the kernel only reads it. The
// answer of a call that succeeded is a descriptor that nobody else owns.
unsafe impl Ioctl for Create {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        UDMABUF_CREATE
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        (&raw mut self.0).cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut std::ffi::c_void) -> Result<OwnedFd, Errno> {
        // SAFETY: the trait promises that the call succeeded, and then this is a new descriptor.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

/// A dma-buf over some pages of a memory file, which stay there when the file is closed.
pub fn udmabuf(memfd: &OwnedFd, offset: u64, size: u64) -> Result<OwnedFd, Errno> {
    let device = Kind::Udmabuf.open()?.ok_or(Errno::NODEV)?;
    let create = UdmabufCreate { memfd: memfd.as_raw_fd() as u32, flags: UDMABUF_FLAGS_CLOEXEC, offset, size };
    // SAFETY: the device is the one that the opcode belongs to, and `Create` is the protocol.
    unsafe { ioctl(&device, Create(create)) }
}

/// A dma-buf from the system's heap. No flags are known to the kernel.
pub fn heap(size: u64, flags: u64) -> Result<OwnedFd, Errno> {
    let device = Kind::DmaHeap.open()?.ok_or(Errno::NODEV)?;
    let fd_flags = (OFlags::RDWR | OFlags::CLOEXEC).bits();
    let mut allocation = DmaHeapAllocation { len: size, fd: 0, fd_flags, heap_flags: flags };
    // SAFETY: the device is the one that the opcode belongs to, and the struct is the one that it reads and writes.
    unsafe { ioctl(&device, Updater::<DMA_HEAP_IOCTL_ALLOC, _>::new(&mut allocation)) }?;
    // SAFETY: the call succeeded, so `fd` is a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(allocation.fd as i32) })
}

/// Announces or ends access by the processor, once, with the kernel's bare answer.
pub fn sync(fd: impl AsFd, flags: u64) -> Result<(), Errno> {
    // SAFETY: the argument is one 64-bit word of flags, which is read; descriptors that are no dma-bufs do not know the number.
    unsafe { ioctl(fd, Setter::<DMA_BUF_IOCTL_SYNC, u64>::new(flags)) }
}

/// The same, asked again when the kernel puts it off, and fine with memory that needs none.
fn announced(fd: impl AsFd, flags: u64) {
    loop {
        match sync(&fd, flags) {
            Ok(()) | Err(Errno::NOTTY) => return,
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(e) => panic!("sync {flags}: {e}"),
        }
    }
}

/// Asks a buffer for something that no buffer knows.
pub fn no_such(fd: impl AsFd) -> Result<(), Errno> {
    // SAFETY: no argument is passed, and no kernel does anything on it.
    unsafe { ioctl(fd, NoArg::<NO_SUCH>::new()) }
}

/// A mapping of a whole buffer of its own, as the owner of the memory has one. Every access is announced and ended.
pub struct View {
    fd: OwnedFd,
    map: MmapRaw,
    len: usize,
}

impl View {
    /// Maps the buffer; the descriptor may be closed afterwards.
    pub fn new(fd: impl AsFd) -> View {
        let len = length(&fd).expect("the length by seeking") as usize;
        let fd = rustix::io::fcntl_dupfd_cloexec(fd, 3).unwrap();
        // A file may be empty, a mapping not.
        let map = MmapOptions::new().len(len.max(1)).map_raw(fd.as_raw_fd()).expect("a shared mapping");
        View { fd, map, len }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// A copy of some bytes.
    pub fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len()), "{len} bytes at {at} of {}", self.len());
        let mut bytes = vec![0; len];
        announced(&self.fd, READ);
        // SAFETY: the bytes lie inside of the mapping (just checked), which is readable and lives as long as self; the copy's
        // target is a vector of that length. Others may write there meanwhile: it is reached through raw pointers only.
        unsafe { std::ptr::copy_nonoverlapping(self.map.as_ptr().add(at), bytes.as_mut_ptr(), len) };
        announced(&self.fd, READ | END);
        bytes
    }

    /// A copy of everything.
    pub fn bytes(&self) -> Vec<u8> {
        self.read(0, self.len())
    }

    /// Overwrites some bytes.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        let inside = at.checked_add(bytes.len()).is_some_and(|end| end <= self.len());
        assert!(inside, "{} bytes at {at} of {}", bytes.len(), self.len());
        announced(&self.fd, WRITE);
        // SAFETY: as in `read`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.map.as_mut_ptr().add(at), bytes.len()) };
        announced(&self.fd, WRITE | END);
    }

    /// [`read`](Self::read), as a file does it.
    pub fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> std::io::Result<()> {
        bytes.copy_from_slice(&self.read(at as usize, bytes.len()));
        Ok(())
    }

    /// Overwrites everything with one byte, so that what somebody writes later can be told from what was there.
    pub fn fill(&self, byte: u8) {
        self.write(0, &vec![byte; self.len()]);
    }
}

impl AsFd for View {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
