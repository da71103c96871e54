//! Descriptors that a parent left open for us, known by number: judged, then owned. This is the one place where a number becomes
//! something that is closed again. It maps nothing and writes nothing.
#![allow(unsafe_code)]

use rustix::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use rustix::fs::{FileType, OFlags, SealFlags, SeekFrom};
use rustix::io::{Errno, FdFlags};
use std::fmt;
use std::io;

/// More descriptors than this cannot be sent in one message of a socket (`SCM_MAX_FD`).
pub const MAX_FDS: usize = 253;

/// `f_type` of the file system that dma-bufs are in.
const DMA_BUF_MAGIC: u64 = 0x444d_4142;
/// `f_type` of memory files in huge pages, which are mapped in whole ones.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// What a descriptor is of.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum FdKind {
    /// A buffer that devices share.
    DmaBuf,
    /// A file that exists in memory only.
    MemFd,
    /// A file on a file system.
    File,
}

impl fmt::Display for FdKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FdKind::DmaBuf => "a dma-buf",
            FdKind::MemFd => "a memory file",
            FdKind::File => "a file",
        })
    }
}

/// Why inherited descriptors were not taken. Nothing has been written; those that had been taken are closed again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InheritError {
    /// The list is no list of numbers.
    #[error("{found:?} is not a list of descriptor numbers like 3,4,5")]
    List {
        /// What was given.
        found: String,
    },
    /// More than can be handed over.
    #[error("{found} descriptors: at most {MAX_FDS} can be handed over at once")]
    TooMany {
        /// How many were given.
        found: usize,
    },
    /// A standard stream.
    #[error("descriptor {fd} is a standard stream: inherited ones are 3 and above")]
    Standard {
        /// The number.
        fd: RawFd,
    },
    /// The same number again.
    #[error("descriptor {fd} is given as number {first} and as number {second} of the list: each region needs its own")]
    Twice {
        /// The number.
        fd: RawFd,
        /// Where it stands first, from 0.
        first: usize,
        /// Where it stands again.
        second: usize,
    },
    /// Nothing is open there.
    #[error("descriptor {fd} is not open: whoever starts this program must let it be inherited")]
    Closed {
        /// The number.
        fd: RawFd,
    },
    /// It cannot have come through an exec.
    #[error(
        "descriptor {fd} is close-on-exec, so it is this program's own and was not inherited, or was taken already"
    )]
    NotInherited {
        /// The number.
        fd: RawFd,
    },
    /// Something in which no rows can be put.
    #[error("descriptor {fd} is {found}: a region is a dma-buf, a memfd or a file")]
    Kind {
        /// The number.
        fd: RawFd,
        /// What it is.
        found: &'static str,
    },
    /// It may not be written through.
    #[error("descriptor {fd} is open {found}: a region must be open for reading and writing")]
    Access {
        /// The number.
        fd: RawFd,
        /// How it is open.
        found: &'static str,
    },
    /// Sealed against writing.
    #[error("descriptor {fd}: its memory is sealed against writing")]
    Sealed {
        /// The number.
        fd: RawFd,
    },
    /// The system failed.
    #[error("descriptor {fd}: {doing}: {source}")]
    Io {
        /// The number.
        fd: RawFd,
        /// What was being done.
        doing: &'static str,
        /// Its answer.
        source: io::Error,
    },
}

impl InheritError {
    /// Whether a descriptor is missing, in contrast to being the wrong one.
    pub fn is_missing(&self) -> bool {
        matches!(self, InheritError::Closed { .. })
    }
}

/// A descriptor that is ours now, closed when dropped, and not inherited by anyone further.
#[derive(Debug)]
pub struct Inherited {
    fd: OwnedFd,
    number: RawFd,
    kind: FdKind,
    len: u64,
    page: u64,
    identity: (u64, u64),
    warning: Option<String>,
}

impl Inherited {
    /// Takes over descriptors by their numbers, in their order. To be called once, early, before anything else is opened.
    ///
    /// # Errors
    /// When one of them is not what a region can be in. All numbers are judged before the first is taken.
    pub fn take(numbers: &[RawFd]) -> Result<Vec<Inherited>, InheritError> {
        if numbers.len() > MAX_FDS {
            return Err(InheritError::TooMany { found: numbers.len() });
        }
        for (second, &fd) in numbers.iter().enumerate() {
            if fd <= 2 {
                return Err(InheritError::Standard { fd });
            }
            if let Some(first) = numbers[..second].iter().position(|&n| n == fd) {
                return Err(InheritError::Twice { fd, first, second });
            }
        }
        numbers.iter().try_for_each(|&fd| inherited(fd))?;
        // From here on what fails is closed by being dropped, with all others.
        let owned: Vec<(RawFd, OwnedFd)> = numbers.iter().map(|&fd| own(fd)).collect::<Result<_, _>>()?;
        owned.into_iter().map(|(number, fd)| judge(number, fd)).collect()
    }

    /// One that came another way, over a socket for instance, judged by the same rules.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn from_owned(fd: OwnedFd) -> Result<Inherited, InheritError> {
        use std::os::fd::AsRawFd;
        judge(fd.as_raw_fd(), fd)
    }

    /// The number it was given by.
    pub fn number(&self) -> RawFd {
        self.number
    }

    /// What it is of.
    pub fn kind(&self) -> FdKind {
        self.kind
    }

    /// Its length in bytes, found by seeking to the end.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What a user should hear about it, if anything.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// Mappings of it begin at multiples of this.
    pub(crate) fn page(&self) -> u64 {
        self.page
    }

    /// Device and inode: the same for two descriptors of the same bytes.
    pub(crate) fn identity(&self) -> (u64, u64) {
        self.identity
    }
}

impl AsFd for Inherited {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Descriptor numbers as they stand on a command line: decimal, separated by commas.
///
/// # Errors
/// When it is anything else. Whether the numbers are any good, [`Inherited::take`] says.
pub fn parse_fds(list: &str) -> Result<Vec<RawFd>, InheritError> {
    let number = |s: &str| match s.trim() {
        s if !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit()) => s.parse().ok(),
        _ => None,
    };
    list.split(',')
        .map(number)
        .collect::<Option<Vec<RawFd>>>()
        .ok_or_else(|| InheritError::List { found: list.chars().take(80).collect() })
}

/// Checks that a number came through an exec: open, and not close-on-exec.
///
/// Everything that this process itself opens, Rust's library and ours, is close-on-exec from the start; what survived an exec
/// cannot be. So the flag tells the two apart, and once [`own`] has set it, the same number is refused.
fn inherited(fd: RawFd) -> Result<(), InheritError> {
    // SAFETY: fd is not -1 (it was checked to be above 2), and the borrow is used for one call that neither closes nor
    // changes anything and answers EBADF when nothing is open there. It does not outlive this function.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    match rustix::io::fcntl_getfd(borrowed) {
        Ok(flags) if flags.contains(FdFlags::CLOEXEC) => Err(InheritError::NotInherited { fd }),
        Ok(_) => Ok(()),
        Err(Errno::BADF) => Err(InheritError::Closed { fd }),
        Err(e) => Err(InheritError::Io { fd, doing: "looking at its flags", source: e.into() }),
    }
}

fn own(number: RawFd) -> Result<(RawFd, OwnedFd), InheritError> {
    use std::os::fd::FromRawFd;
    // Once more: the caller's list is judged as a whole before, and only what still holds is taken.
    inherited(number)?;
    // SAFETY: the descriptor is open and not close-on-exec (checked above), so it is none that code of this process
    // opened and owns; it was left to us by whoever started it. Nobody else takes it: the flag set in the next line makes
    // a second `own` of the number fail, and one list holds no number twice.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC).map_err(|e| InheritError::Io {
        fd: number,
        doing: "making it close-on-exec",
        source: e.into(),
    })?;
    Ok((number, fd))
}

fn judge(number: RawFd, fd: OwnedFd) -> Result<Inherited, InheritError> {
    let failed =
        |doing: &'static str| move |e: Errno| InheritError::Io { fd: number, doing, source: io::Error::from(e) };
    let wrong = |found| Err(InheritError::Kind { fd: number, found });
    let stat = rustix::fs::fstat(&fd).map_err(failed("looking at what it is"))?;
    let fs = rustix::fs::fstatfs(&fd).map_err(failed("looking at where it is"))?;
    let magic = fs.f_type as u64 & 0xffff_ffff;
    let seals = rustix::fs::fcntl_get_seals(&fd);
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        // Some kernels call a dma-buf a regular file, some give it no type.
        _ if magic == DMA_BUF_MAGIC => FdKind::DmaBuf,
        // Only memory files can have seals, with or without any.
        FileType::RegularFile if seals.is_ok() => FdKind::MemFd,
        FileType::RegularFile => FdKind::File,
        FileType::Directory => return wrong("a directory"),
        FileType::Fifo => return wrong("a pipe"),
        FileType::Socket => return wrong("a socket"),
        FileType::CharacterDevice => return wrong("a character device"),
        FileType::BlockDevice => return wrong("a block device"),
        FileType::Symlink => return wrong("a symbolic link"),
        FileType::Unknown => return wrong("an event source or the like"),
    };
    let mode = rustix::fs::fcntl_getfl(&fd).map_err(failed("looking at its mode"))?;
    let found = match mode & OFlags::ACCMODE {
        _ if mode.contains(OFlags::PATH) => Some("as a path only"),
        OFlags::RDWR => None,
        OFlags::WRONLY => Some("for writing only"),
        _ => Some("for reading only"),
    };
    if let Some(found) = found {
        return Err(InheritError::Access { fd: number, found });
    }
    let mut warning = None;
    // Only where the question is understood: it is not for dma-bufs and files on disk, and some kernels answer with an error.
    if let (FdKind::MemFd, Ok(seals)) = (kind, seals) {
        if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
            return Err(InheritError::Sealed { fd: number });
        }
        if !seals.contains(SealFlags::SHRINK) {
            warning = Some(format!(
                "descriptor {number}: its memory is not sealed against shrinking; if it shrinks now, this program is killed"
            ));
        }
    }
    let len = length(&fd).map_err(failed("seeking to its end"))?;
    let page = rustix::param::page_size() as u64;
    // Of a file in huge pages, the preferred block size is one of them.
    let page = if magic == HUGETLBFS_MAGIC { page.max(stat.st_blksize as u64) } else { page };
    Ok(Inherited { fd, number, kind, len, page, identity: (stat.st_dev as u64, stat.st_ino as u64), warning })
}

/// The length by seeking, which is the only way for a dma-buf. The position is shared with whoever else has the file open, so it
/// is put back.
fn length(fd: &OwnedFd) -> Result<u64, Errno> {
    let before = rustix::fs::seek(fd, SeekFrom::Current(0)).unwrap_or(0);
    let len = rustix::fs::seek(fd, SeekFrom::End(0))?;
    let _ = rustix::fs::seek(fd, SeekFrom::Start(before));
    Ok(len)
}
