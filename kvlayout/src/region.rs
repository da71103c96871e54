//! A decoder's live memory, mapped by ourselves and written by raw copies. The only file in which bytes get into memory that another
//! process reads at the same time; no reference or slice over such memory is ever made, here or anywhere.
//!
//! It knows nothing of layers and rows. Where what goes, the map decides; whether anything may be written, the [`Guard`].
#![allow(unsafe_code)]

use crate::space::check_inside;
use crate::{Alone, ByteSpace, FdKind, Inherited, KvMap, Make, ShareLayout, SinkError, Spread};
use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fd::{AsFd, AsRawFd, RawFd};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, ioctl, opcode};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Bytes copied between two looks at the guard, by one thread.
const BURST: usize = 64 << 10;

/// Bytes after which a device is told of what was written, so that a reader can follow the writer from layer to layer. Telling
/// it walks all pages of a buffer; after every row it would cost more than the rows.
const TELL_EVERY: u64 = 64 << 20;

/// How often the kernel may put us off before we give up; the waiting in between makes it some seconds.
const SYNC_TRIES: u32 = 5000;

/// Why regions cannot be written. Nothing has been.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// Not one descriptor per region.
    #[error("{fds} descriptors for the layout's {regions} regions")]
    Count {
        /// Descriptors given.
        fds: usize,
        /// Regions there are.
        regions: usize,
    },
    /// A region goes past the end of its descriptor.
    #[error(
        "region {region}: {size} bytes at {offset} do not lie inside descriptor {fd}, which is {kind} of {len} bytes"
    )]
    Short {
        /// Index of the region.
        region: usize,
        /// Where it begins.
        offset: u64,
        /// Its bytes.
        size: u64,
        /// The descriptor.
        fd: RawFd,
        /// What it is.
        kind: FdKind,
        /// Bytes it has.
        len: u64,
    },
    /// Two regions share bytes.
    #[error(
        "regions {first} and {second} overlap: descriptors {} and {} are of the same memory, and the regions are its bytes {}..{} and {}..{}",
        fds[0], fds[1], ranges[0].0, ranges[0].1, ranges[1].0, ranges[1].1
    )]
    Overlap {
        /// Index of a region.
        first: usize,
        /// Index of another.
        second: usize,
        /// Their descriptors.
        fds: [RawFd; 2],
        /// First byte and the one after the last, of both.
        ranges: [(u64, u64); 2],
    },
    /// The map is of another layout.
    #[error("a map of {map} bytes over regions of {regions}, or with rows outside of them")]
    Map {
        /// Bytes of the map.
        map: u64,
        /// Bytes of the regions.
        regions: u64,
    },
    /// The system does not let us map it.
    #[error("region {region}: mapping {bytes} bytes of descriptor {fd}: {source}")]
    MapFailed {
        /// Index of the region.
        region: usize,
        /// Bytes wanted.
        bytes: u64,
        /// The descriptor.
        fd: RawFd,
        /// The system's answer.
        source: io::Error,
    },
    /// The memory is promised, but is not there.
    #[error("region {region}: the system has no memory behind bytes {from}..{to} of descriptor {fd}: {source}")]
    NoMemory {
        /// Index of the region.
        region: usize,
        /// The first byte.
        from: u64,
        /// The one after the last.
        to: u64,
        /// The descriptor.
        fd: RawFd,
        /// The system's answer.
        source: io::Error,
    },
}

/// What a region's writer asks before every burst of bytes, and the record of whether it ever got to write any.
///
/// A write that was allowed may still be under way when permission ends, for as long as it takes to copy 64 KiB on each thread
/// that writes; unless the process is stopped in the middle of it. So whoever takes memory back waits for the writer's end, or kills it.
pub struct Guard<'a> {
    may_write: Box<dyn Fn() -> bool + Send + Sync + 'a>,
    until: Option<Instant>,
    stopped: AtomicBool,
    touched: Touched,
}

impl<'a> Guard<'a> {
    /// Writing is allowed as long as `may_write` says so, which any thread that writes asks. Once it has said no, it is not asked
    /// again.
    pub fn new(may_write: impl Fn() -> bool + Send + Sync + 'a) -> Guard<'a> {
        let (may_write, stopped) = (Box::new(may_write), AtomicBool::new(false));
        Guard { may_write, until: None, stopped, touched: Touched::default() }
    }

    /// Always allowed: for memory that nobody takes back.
    pub fn open() -> Guard<'static> {
        Guard::new(|| true)
    }

    /// Also ends writing at this time. The clock is read at every burst, so that a process which was stopped and goes on later
    /// sees it at once, without anyone having to wake up first and tell.
    #[must_use]
    pub fn until(mut self, deadline: Option<Instant>) -> Guard<'a> {
        self.until = deadline;
        self
    }

    /// A handle that tells, also after the sink is gone and in other threads, whether anything has been written.
    pub fn touched(&self) -> Touched {
        self.touched.clone()
    }

    /// Asks.
    fn check(&self) -> io::Result<()> {
        let stopped = || self.stopped.load(Ordering::SeqCst);
        if stopped() || self.until.is_some_and(|t| Instant::now() >= t) || !(self.may_write)() {
            self.stopped.store(true, Ordering::SeqCst);
        }
        // Another thread may have been told no meanwhile.
        if stopped() { Err(io::Error::other(Stopped)) } else { Ok(()) }
    }
}

impl fmt::Debug for Guard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Guard { until, stopped, touched, .. } = self;
        f.debug_struct("Guard").field("until", until).field("stopped", stopped).field("touched", touched).finish()
    }
}

/// Whether the decoder's memory has been written to. Set before the first byte is.
#[derive(Clone, Default, Debug)]
pub struct Touched(Arc<AtomicBool>);

impl Touched {
    /// The answer, which goes from no to yes at most once.
    pub fn get(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    fn set(&self) {
        if !self.get() {
            self.0.store(true, Ordering::SeqCst);
        }
    }
}

/// The error of a write that the [`Guard`] did not allow, inside of an [`io::Error`].
#[derive(Copy, Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("stopped: nothing more is written into the decoder's memory")]
pub struct Stopped;

impl Stopped {
    /// Whether this is why.
    pub fn is(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|e| e.is::<Stopped>())
    }
}

impl SinkError {
    /// Whether a [`Guard`] forbade the write: nothing failed, somebody wanted it to end.
    pub fn is_stopped(&self) -> bool {
        matches!(self, SinkError::Io(e) if Stopped::is(e))
    }
}

/// A shared mapping of some bytes of a descriptor, for copying in and out.
#[derive(Debug)]
pub struct Mapping {
    map: MmapRaw,
    /// Bytes of the mapping before the first that is meant: where a page is larger than memmap2 knows.
    skip: usize,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes from `offset` on, for reading and writing.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when they do not lie inside, or what the system answers.
    pub fn new(fd: &Inherited, offset: u64, len: u64) -> io::Result<Mapping> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= fd.len());
        let (true, Ok(len)) = (inside, usize::try_from(len)) else {
            let what =
                format!("{len} bytes at {offset} do not lie inside the {} of descriptor {}", fd.len(), fd.number());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        };
        // The page is at least as large as the one memmap2 aligns to, so that it has nothing left to align.
        let skip = (offset % fd.page()) as usize;
        let map = MmapOptions::new()
            .offset(offset - skip as u64)
            .len(skip.checked_add(len).ok_or(Errno::OVERFLOW)?)
            .map_raw(fd.as_fd().as_raw_fd())?;
        Ok(Mapping { map, skip, len })
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when they do not lie inside.
    pub fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        // SAFETY: nobody else has the mapping.
        unsafe { self.write_apart(at, bytes) }
    }

    /// The same while other threads write other bytes.
    ///
    /// # Safety
    /// No other thread reads or writes these bytes of this mapping at the same time.
    unsafe fn write_apart(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        check_inside(self.len(), at, bytes.len())?;
        let at = self.skip + at as usize;
        // SAFETY: `at + bytes.len() <= skip + len`, which is the length of the mapping, and the mapping is readable and
        // writable and lives as long as self. `bytes` is ordinary memory of this process and no part of the mapping, since
        // nobody makes references into one. Other threads stay away, as our caller promises. Other processes may read or write
        // the same bytes meanwhile: they are reached through raw pointers only and are plain bytes, of which every value is valid.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.map.as_mut_ptr().add(at), bytes.len()) };
        Ok(())
    }

    /// Copies bytes out, as they are at some moment each.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when they do not lie inside.
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        check_inside(self.len(), at, bytes.len())?;
        let at = self.skip + at as usize;
        // SAFETY: as in `write`, the other way round; `bytes` is borrowed mutably, so it is not the mapping either.
        unsafe { std::ptr::copy_nonoverlapping(self.map.as_ptr().add(at), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Has the system find memory for these bytes now, where it can be asked to, instead of killing us when we write to them.
    /// Changes none of them.
    ///
    /// # Errors
    /// There is none, or they do not lie inside.
    pub fn back(&self, at: u64, len: u64) -> io::Result<()> {
        check_inside(self.len(), at, len as usize)?;
        let at = self.skip + at as usize;
        match self.map.advise_range(Advice::PopulateWrite, at, len as usize) {
            // An older kernel, or memory that is always there.
            Err(e) if [Errno::INVAL, Errno::NOSYS, Errno::OPNOTSUPP].iter().any(|n| is(&e, *n)) => Ok(()),
            other => other,
        }
    }
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// `DMA_BUF_IOCTL_SYNC`, and the flags of its argument.
///
/// Only writing is announced. Announcing reads as well would make some drivers move a buffer for the processor's sake, and what
/// is overwritten need not be read.
const SYNC: Opcode = opcode::write::<u64>(b'b', 0);
const SYNC_WRITE: u64 = 2;
const SYNC_END: u64 = 4;

/// Whether a descriptor needs telling. `false`: it is nothing that devices share.
fn tell(fd: impl AsFd, flags: u64) -> io::Result<bool> {
    insist(|| {
        // SAFETY: the opcode is the kernel's _IOW('b', 0, struct dma_buf_sync), whose argument is one 64-bit word of flags,
        // read and not kept. Descriptors that do not know it answer ENOTTY.
        unsafe { ioctl(fd.as_fd(), Setter::<SYNC, u64>::new(flags)) }
    })
}

/// Calls until there is an answer: the kernel's interface asks for it.
fn insist(mut call: impl FnMut() -> Result<(), Errno>) -> io::Result<bool> {
    for tries in 0.. {
        match call() {
            Ok(()) => return Ok(true),
            Err(Errno::NOTTY) => return Ok(false),
            Err(Errno::INTR | Errno::AGAIN) if tries < SYNC_TRIES => {
                if tries > 10 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(true)
}

#[derive(Debug)]
struct Region {
    fd: Inherited,
    map: Mapping,
    /// The byte of the region with which the mapping begins.
    base: u64,
    size: u64,
    /// Whether devices have to be told: of a dma-buf, as long as it knows what that is.
    tells: bool,
    /// The beginning has been told and the end has not.
    open: bool,
    /// Bytes written since the beginning was told.
    written: AtomicU64,
}

impl Region {
    fn begin(&mut self) -> io::Result<()> {
        if self.tells && !self.open {
            self.tells = tell(&self.fd, SYNC_WRITE)?;
            self.open = self.tells;
        }
        Ok(())
    }

    fn end(&mut self) -> io::Result<()> {
        *self.written.get_mut() = 0;
        match std::mem::take(&mut self.open) {
            true => tell(&self.fd, SYNC_WRITE | SYNC_END).map(drop),
            false => Ok(()),
        }
    }

    /// Copies bytes in, with a look at the guard after every burst; `since` counts a thread's bytes after its last. Threads that
    /// put at the same time share `claims`, and put every byte once.
    fn put(&self, guard: &Guard<'_>, claims: &Claims, since: &mut usize, at: u64, bytes: &[u8]) -> io::Result<()> {
        check_inside(self.size, at, bytes.len())?;
        let at = at.checked_sub(self.base).ok_or(Errno::INVAL)?;
        check_inside(self.map.len(), at, bytes.len())?;
        claims.take(at, bytes.len())?;
        for (i, burst) in bytes.chunks(BURST).enumerate() {
            *since += burst.len();
            if *since > BURST {
                guard.check()?;
                *since = burst.len();
            }
            guard.touched.set();
            // SAFETY: the region is borrowed, so only threads of one `put_pieces` are here, and they share their claims: these
            // bytes are this call's.
            unsafe { self.map.write_apart(at + (i * BURST) as u64, burst)? };
        }
        self.written.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}

/// Which bytes of a region were put since the claims were made, by whatever thread. Pieces are some KiB, so looking them up is next to
/// nothing beside copying them.
#[derive(Default)]
struct Claims(Mutex<BTreeMap<u64, u64>>);

impl Claims {
    /// Makes these bytes the caller's, unless they are somebody's.
    fn take(&self, at: u64, len: usize) -> io::Result<()> {
        let end = at + len as u64;
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Those before do not overlap each other, so the last that begins before our end reaches farthest.
        if let Some((other, until)) = taken.range(..end).next_back().filter(|(_, until)| **until > at) {
            let what =
                format!("bytes {at}..{end} of a region overlap {other}..{until}, which were put in the same call");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        if len > 0 {
            taken.insert(at, end);
        }
        Ok(())
    }
}

fn region_mut(regions: &mut [Region], region: u16) -> io::Result<&mut Region> {
    let count = regions.len();
    regions.get_mut(usize::from(region)).ok_or_else(|| no_region(region, count))
}

fn no_region(region: u16, count: usize) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("region {region} of {count}"))
}

/// All regions of a decoder's memory as one byte space, with the bytes of one region after the other's.
///
/// What is written is seen at once; there is no taking back. Dropped or sealed, it tells devices of what was written.
#[derive(Debug)]
pub struct Regions<'a> {
    regions: Vec<Region>,
    guard: Guard<'a>,
}

impl<'a> Regions<'a> {
    /// Maps what the map will write: of every region the part between its first and last row. Writes nothing, but makes sure that
    /// there is memory behind what will be.
    ///
    /// # Errors
    /// When a descriptor is missing or shorter than its region, when regions overlap, or when the system refuses.
    pub fn map(
        fds: Vec<Inherited>,
        layout: &ShareLayout,
        map: &KvMap,
        guard: Guard<'a>,
    ) -> Result<Regions<'a>, RegionError> {
        check_fds(&fds, layout)?;
        let foreign = || RegionError::Map { map: map.size(), regions: layout.size() };
        if map.size() != layout.size() || map.fixed().next().is_some() {
            return Err(foreign());
        }
        let mut spans: Vec<Option<(u64, u64)>> = vec![None; layout.regions().len()];
        for (_, _, w) in map.windows() {
            let end = w.offset.checked_add(w.len());
            let size = layout.regions().get(usize::from(w.region)).map(|r| r.size);
            let (Some(end), Some(span)) = (end, spans.get_mut(usize::from(w.region))) else { return Err(foreign()) };
            if Some(end) > size {
                return Err(foreign());
            }
            let (from, to) = span.unwrap_or((w.offset, end));
            *span = Some((from.min(w.offset), to.max(end)));
        }
        let mut regions = Vec::with_capacity(fds.len());
        for (i, ((fd, r), span)) in fds.into_iter().zip(layout.regions()).zip(spans).enumerate() {
            let (base, end) = span.unwrap_or((0, 0));
            let (bytes, number) = (end - base, fd.number());
            let map = Mapping::new(&fd, r.offset + base, bytes).map_err(|source| RegionError::MapFailed {
                region: i,
                bytes,
                fd: number,
                source,
            })?;
            let tells = fd.kind() == FdKind::DmaBuf;
            regions.push(Region { fd, map, base, size: r.size, tells, open: false, written: AtomicU64::new(0) });
        }
        for (_, _, w) in map.windows() {
            let (i, r) = (usize::from(w.region), &regions[usize::from(w.region)]);
            r.map.back(w.offset - r.base, w.len()).map_err(|source| {
                let from = layout.regions()[i].offset + w.offset;
                RegionError::NoMemory { region: i, from, to: from + w.len(), fd: r.fd.number(), source }
            })?;
        }
        Ok(Regions { regions, guard })
    }

    /// Number of regions.
    pub fn count(&self) -> usize {
        self.regions.len()
    }
}

/// Checks that there is one descriptor per region, and that every region lies inside of its own and no other.
///
/// # Errors
/// The first that does not. [`Regions::map`] does this, too.
pub fn check_fds(fds: &[Inherited], layout: &ShareLayout) -> Result<(), RegionError> {
    if fds.len() != layout.regions().len() {
        return Err(RegionError::Count { fds: fds.len(), regions: layout.regions().len() });
    }
    for (region, (fd, r)) in fds.iter().zip(layout.regions()).enumerate() {
        if r.end().is_none_or(|end| end > fd.len()) {
            let (offset, size, kind, len) = (r.offset, r.size, fd.kind(), fd.len());
            return Err(RegionError::Short { region, offset, size, fd: fd.number(), kind, len });
        }
    }
    let range = |i: usize| (layout.regions()[i].offset, layout.regions()[i].offset + layout.regions()[i].size);
    for second in 0..fds.len() {
        for first in 0..second {
            let ranges = [range(first), range(second)];
            let disjoint = ranges[0].1 <= ranges[1].0 || ranges[1].1 <= ranges[0].0;
            if fds[first].identity() == fds[second].identity() && !disjoint {
                let fds = [fds[first].number(), fds[second].number()];
                return Err(RegionError::Overlap { first, second, fds, ranges });
            }
        }
    }
    Ok(())
}

impl ByteSpace for Regions<'_> {
    const LIVE: bool = true;

    fn size(&self) -> u64 {
        self.regions.iter().map(|r| r.size).sum()
    }

    fn put(&mut self, mut at: u64, bytes: &[u8]) -> io::Result<()> {
        for i in 0..self.regions.len() {
            let size = self.regions[i].size;
            if at < size {
                return self.put_in(i as u16, at, bytes);
            }
            at -= size;
        }
        check_inside(0, at, bytes.len())
    }

    fn put_in(&mut self, region: u16, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.put_pieces(&[region], 1, &Alone, &|_, put| put(region, at, bytes))
    }

    fn put_pieces(&mut self, regions: &[u16], n: usize, spread: &dyn Spread, make: Make<'_>) -> io::Result<()> {
        for region in regions {
            let r = region_mut(&mut self.regions, *region)?;
            self.guard.check()?;
            // Announcing may take its time: every piece looks again.
            r.begin()?;
        }
        let (all, guard) = (&self.regions, &self.guard);
        let claims: Vec<Claims> = all.iter().map(|_| Claims::default()).collect();
        let failed = OnceLock::new();
        spread.each(n, &|i| {
            if failed.get().is_some() {
                return;
            }
            let mut since = BURST;
            let result = make(i, &mut |region, at, bytes| {
                let r = all.get(usize::from(region)).ok_or_else(|| no_region(region, all.len()))?;
                r.put(guard, &claims[usize::from(region)], &mut since, at, bytes)
            });
            if let Err(e) = result {
                let _ = failed.set(e);
            }
        });
        if let Some(e) = failed.into_inner() {
            return Err(e);
        }
        for region in regions {
            let r = region_mut(&mut self.regions, *region)?;
            if r.open && *r.written.get_mut() >= TELL_EVERY {
                r.end()?;
            }
        }
        Ok(())
    }

    fn touched(&self) -> Option<bool> {
        Some(self.guard.touched.get())
    }

    fn seal(mut self) -> io::Result<()> {
        self.guard.check()?;
        fence(Ordering::SeqCst);
        self.regions.iter_mut().try_for_each(Region::end)
    }
}

impl Drop for Regions<'_> {
    fn drop(&mut self) {
        for r in &mut self.regions {
            let _ = r.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ioctl_is_the_kernels() {
        assert_eq!(SYNC as u64, 0x4008_6200);
    }

    #[test]
    fn what_the_kernel_puts_off_is_asked_again() {
        let mut answers = vec![Ok(()), Err(Errno::AGAIN), Err(Errno::INTR), Err(Errno::INTR)];
        assert!(insist(|| answers.pop().unwrap()).unwrap());
        assert!(answers.is_empty());
        assert!(!insist(|| Err(Errno::NOTTY)).unwrap());
        let mut calls = 0;
        let e = insist(|| {
            calls += 1;
            Err(Errno::INVAL)
        });
        assert!(is(&e.unwrap_err(), Errno::INVAL) && calls == 1);
    }
}
