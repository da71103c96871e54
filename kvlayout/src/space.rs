//! Where bytes go: the one thing a state file in memory, a state file on disk and a shared region differ in.

use std::io;

/// A place for a known number of bytes, filled in any order.
///
/// The caller puts every byte exactly once and then seals. Dropping an unsealed space discards what can be discarded.
pub trait ByteSpace {
    /// Whether another process sees bytes as soon as they are put (a shared region), or only after
    /// [`seal`](Self::seal).
    const LIVE: bool;

    /// Bytes in all.
    fn size(&self) -> u64;

    /// Puts `bytes` at `at`. Fails with [`io::ErrorKind::InvalidInput`] when they do not lie inside.
    fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()>;

    /// The same where there are several regions: `at` counts from the beginning of `region`. A space without regions is region 0.
    fn put_in(&mut self, region: u16, at: u64, bytes: &[u8]) -> io::Result<()> {
        match region {
            0 => self.put(at, bytes),
            _ => {
                Err(io::Error::new(io::ErrorKind::InvalidInput, format!("region {region} of a space that has only 0")))
            }
        }
    }

    /// Puts `n` pieces, in any order and at the same time on the threads of `spread` where the space can: `make(i, put)` makes piece
    /// `i` and puts its bytes, all of them in one of `regions`, and none that another piece puts. After the first error no further piece is begun.
    fn put_pieces(&mut self, _regions: &[u16], n: usize, _spread: &dyn Spread, make: Make<'_>) -> io::Result<()> {
        (0..n).try_for_each(|i| make(i, &mut |region, at, bytes| self.put_in(region, at, bytes)))
    }

    /// Whether a reader could have seen a byte that was put, where the space itself keeps account of it.
    fn touched(&self) -> Option<bool> {
        None
    }

    /// Hands the bytes over to whoever reads them. A failure means that they were not.
    fn seal(self) -> io::Result<()>;
}

/// Puts bytes: region, place in it, bytes.
pub type Put<'a> = &'a mut dyn FnMut(u16, u64, &[u8]) -> io::Result<()>;

/// Makes a piece of what is to be put, and puts it.
pub type Make<'a> = &'a (dyn Fn(usize, Put<'_>) -> io::Result<()> + Sync);

/// Threads that somebody lends.
pub trait Spread {
    /// Runs `f(0) .. f(n - 1)`, in any order and several at a time; returns when all are done.
    fn each(&self, n: usize, f: &(dyn Fn(usize) + Sync));
}

/// The caller's thread alone.
#[derive(Copy, Clone, Debug)]
pub struct Alone;

impl Spread for Alone {
    fn each(&self, n: usize, f: &(dyn Fn(usize) + Sync)) {
        (0..n).for_each(f);
    }
}

/// Refuses what does not lie inside `size` bytes.
pub(crate) fn check_inside(size: u64, at: u64, len: usize) -> io::Result<()> {
    if at.checked_add(len as u64).is_some_and(|end| end <= size) {
        return Ok(());
    }
    let what = format!("{len} bytes at {at} do not lie inside a space of {size} bytes");
    Err(io::Error::new(io::ErrorKind::InvalidInput, what))
}

/// A borrowed `Vec<u8>` as a byte space. The bytes stay with the caller, sealed or not.
#[derive(Debug)]
pub struct MemSpace<'a> {
    bytes: &'a mut Vec<u8>,
}

impl<'a> MemSpace<'a> {
    /// Makes `bytes` exactly `size` zeroes. Fails with [`io::ErrorKind::OutOfMemory`] when there is no room for them.
    pub fn new(bytes: &'a mut Vec<u8>, size: u64) -> io::Result<MemSpace<'a>> {
        bytes.clear();
        let len = usize::try_from(size).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        bytes
            .try_reserve_exact(len)
            .map_err(|e| io::Error::new(io::ErrorKind::OutOfMemory, format!("{size} bytes: {e}")))?;
        bytes.resize(len, 0);
        Ok(MemSpace { bytes })
    }
}

impl ByteSpace for MemSpace<'_> {
    const LIVE: bool = false;

    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        check_inside(self.size(), at, bytes.len())?;
        self.bytes[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn seal(self) -> io::Result<()> {
        Ok(())
    }
}
