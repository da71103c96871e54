//! Buffer objects: what is in them as the processor sees it and as the device does, where they are, and what an address means.

use crate::array::Memory;
use crate::memory;
use crate::uapi::{BO_DEV, BO_DEV_HEAP, BO_SHARE};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::fs::FileExt as _;

/// Where the heap begins for the device, and how long it is at most.
const HEAP: u64 = 0x400_0000;
const HEAP_BYTES: u64 = 64 << 20;
const PAGE: u64 = 4096;
/// What is in memory that nobody has written: the driver does not promise zeros.
const OLD: u8 = 0xa5;

/// One object.
pub struct Bo {
    /// `enum amdxdna_bo_type`.
    pub kind: u32,
    /// Bytes, as asked for.
    pub size: u64,
    /// Its memory; a part of the heap has none of its own.
    pub file: Option<File>,
    /// The device's address, where it is not the processor's.
    pub address: Option<u64>,
    /// Where the process has mapped it.
    pub mapped: Option<(u64, u64)>,
    /// The device's view, where it has one of its own.
    shadow: Option<Vec<u8>>,
    /// It came from outside.
    pub imported: bool,
}

/// All objects, by handle. Handles are the node's, which is opened more than once here; one table for all is enough.
pub struct Bos {
    all: BTreeMap<u32, Bo>,
    next: u32,
    shadows: bool,
    /// What must not be written to at all, for faults.
    pub mute: bool,
    /// Writes of the device so far: address, bytes.
    pub written: Vec<(u64, usize)>,
}

fn errno(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}

impl Bos {
    pub fn new(shadows: bool) -> Bos {
        Bos { all: BTreeMap::new(), next: 1, shadows, mute: false, written: Vec::new() }
    }

    /// None, in a memory of the same kind.
    pub fn anew(&self) -> Bos {
        Bos::new(self.shadows)
    }

    pub fn get(&mut self, handle: u32) -> io::Result<&mut Bo> {
        self.all.get_mut(&handle).ok_or_else(|| errno(libc::ENOENT))
    }

    pub fn count(&self) -> usize {
        self.all.len()
    }

    fn add(&mut self, bo: Bo) -> u32 {
        let handle = self.next;
        self.next += 1;
        self.all.insert(handle, bo);
        handle
    }

    fn heap(&self) -> Option<u32> {
        self.all.iter().find(|(_, bo)| bo.kind == BO_DEV_HEAP).map(|(h, _)| *h)
    }

    /// A new object.
    pub fn create(&mut self, kind: u32, size: u64) -> io::Result<u32> {
        if size == 0 || size > 1 << 36 {
            return Err(errno(libc::EINVAL));
        }
        let pages = size.next_multiple_of(PAGE);
        let bo = match kind {
            BO_DEV => {
                self.heap().ok_or_else(|| errno(libc::EINVAL))?;
                let address = self.room(size).ok_or_else(|| errno(libc::ENOMEM))?;
                Bo { kind, size, file: None, address: Some(address), mapped: None, shadow: None, imported: false }
            }
            BO_DEV_HEAP if self.heap().is_some() || size > HEAP_BYTES => return Err(errno(libc::EBUSY)),
            _ => {
                let file = memory::memfd(pages)?;
                if kind == BO_SHARE {
                    let old = vec![OLD; 64 << 10];
                    let mut at = 0;
                    while at < pages {
                        let n = (pages - at).min(old.len() as u64) as usize;
                        file.write_all_at(&old[..n], at)?;
                        at += n as u64;
                    }
                }
                let has_shadow = self.shadows && matches!(kind, BO_SHARE | BO_DEV_HEAP);
                let shadow = has_shadow.then(|| vec![if kind == BO_SHARE { OLD } else { 0 }; pages as usize]);
                let address = (kind == BO_DEV_HEAP).then_some(HEAP);
                Bo { kind, size: pages, file: Some(file), address, mapped: None, shadow, imported: false }
            }
        };
        Ok(self.add(bo))
    }

    /// A free place in the heap, 32 KiB aligned.
    fn room(&self, size: u64) -> Option<u64> {
        let mut taken: Vec<(u64, u64)> = self
            .all
            .values()
            .filter(|bo| bo.kind == BO_DEV)
            .filter_map(|bo| bo.address.map(|a| (a, a + bo.size)))
            .collect();
        taken.sort_unstable();
        let mut at = HEAP;
        for (start, end) in taken {
            if at + size <= start {
                break;
            }
            at = end.next_multiple_of(32 << 10);
        }
        (at + size <= HEAP + HEAP_BYTES).then_some(at)
    }

    /// An object from a descriptor, always a new one: handles are not told apart by the open of the node that they belong to, and
    /// two opens must not share one.
    pub fn import(&mut self, fd: BorrowedFd<'_>) -> io::Result<u32> {
        let file = File::from(fd.try_clone_to_owned()?);
        let size = file.metadata()?.len();
        if size == 0 {
            return Err(errno(libc::EINVAL));
        }
        Ok(self.add(Bo {
            kind: BO_SHARE,
            size,
            file: Some(file),
            address: None,
            mapped: None,
            // What is not ours has no view of ours: it is coherent or it is not, as its owner's.
            shadow: None,
            imported: true,
        }))
    }

    pub fn close(&mut self, handle: u32) -> io::Result<()> {
        self.all.remove(&handle).map(drop).ok_or_else(|| errno(libc::EINVAL))
    }

    pub fn unmapped(&mut self, address: u64) {
        for bo in self.all.values_mut() {
            if bo.mapped.is_some_and(|(start, _)| start == address) {
                bo.mapped = None;
            }
        }
    }

    /// Moves a range between the processor's view and the device's.
    pub fn sync(&mut self, handle: u32, to_device: bool, at: u64, n: u64) -> io::Result<()> {
        let bo = self.get(handle)?;
        if at > bo.size || n > bo.size - at {
            return Err(errno(libc::EINVAL));
        }
        let (handle, at) = match (bo.kind, bo.address) {
            (BO_DEV, Some(address)) => (self.heap().ok_or_else(|| errno(libc::EINVAL))?, address - HEAP + at),
            _ => (handle, at),
        };
        let bo = self.get(handle)?;
        let (Some(file), Some(shadow)) = (&bo.file, &mut bo.shadow) else { return Ok(()) };
        // Caches move lines, not bytes.
        let start = (at & !63) as usize;
        let end = ((at + n).next_multiple_of(64) as usize).min(shadow.len());
        if to_device {
            file.read_exact_at(&mut shadow[start..end], start as u64)
        } else {
            file.write_all_at(&shadow[start..end], start as u64)
        }
    }

    /// The object that an address of the device is in, and where in it.
    fn find(&self, address: u64) -> Option<(u32, u64)> {
        if (HEAP..HEAP + HEAP_BYTES).contains(&address) {
            return self.heap().map(|h| (h, address - HEAP));
        }
        self.all.iter().find_map(|(handle, bo)| {
            let (start, n) = bo.mapped?;
            (bo.kind != BO_DEV_HEAP && (start..start + n).contains(&address)).then(|| (*handle, address - start))
        })
    }

    /// The bytes of a command packet or another object as the driver reads them.
    pub fn peek(&mut self, handle: u32, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let bo = self.get(handle)?;
        bo.file.as_ref().ok_or_else(|| errno(libc::EINVAL))?.read_exact_at(bytes, at)
    }

    pub fn poke(&mut self, handle: u32, at: u64, bytes: &[u8]) -> io::Result<()> {
        let bo = self.get(handle)?;
        bo.file.as_ref().ok_or_else(|| errno(libc::EINVAL))?.write_all_at(bytes, at)
    }

    fn touch(&mut self, address: u64, bytes: Access<'_>) -> Result<(), String> {
        let fault = |e: io::Error| format!("device address {address:#x}: {e}");
        let n = bytes.len() as u64;
        let Some((handle, at)) = self.find(address) else {
            // An address of the process that no object is mapped to: a mapping of its own, reached as it is.
            return match bytes {
                Access::Read(bytes) => memory::read(address, bytes).map_err(fault),
                Access::Write(bytes) => memory::write(address, bytes).map_err(fault),
            };
        };
        let bo = self.all.get_mut(&handle).expect("found");
        if at + n > bo.size {
            return Err(format!("device address {address:#x}: {n} bytes from byte {at} of a buffer of {}", bo.size));
        }
        let range = at as usize..(at + n) as usize;
        match (&mut bo.shadow, &bo.file, bytes) {
            (Some(shadow), _, Access::Read(bytes)) => bytes.copy_from_slice(&shadow[range]),
            (Some(shadow), _, Access::Write(bytes)) => shadow[range].copy_from_slice(bytes),
            (None, Some(file), Access::Read(bytes)) => file.read_exact_at(bytes, at).map_err(fault)?,
            (None, Some(file), Access::Write(bytes)) => file.write_all_at(bytes, at).map_err(fault)?,
            (None, None, _) => return Err(format!("device address {address:#x}: no memory")),
        }
        Ok(())
    }
}

enum Access<'a> {
    Read(&'a mut [u8]),
    Write(&'a [u8]),
}

impl Access<'_> {
    fn len(&self) -> usize {
        match self {
            Access::Read(bytes) => bytes.len(),
            Access::Write(bytes) => bytes.len(),
        }
    }
}

impl Memory for Bos {
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), String> {
        self.touch(address, Access::Read(bytes))
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), String> {
        self.written.push((address, bytes.len()));
        if self.mute {
            return Ok(());
        }
        self.touch(address, Access::Write(bytes))
    }
}

impl Bo {
    /// The descriptor of its memory.
    pub fn fd(&self) -> Option<i32> {
        self.file.as_ref().map(|f| f.as_raw_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sync_moves_bytes_between_the_views() {
        let mut bos = Bos::new(true);
        let handle = bos.create(BO_SHARE, 4096).unwrap();
        bos.get(handle).unwrap().mapped = Some((0x7000_0000_0000, 4096));
        let device = 0x7000_0000_0000;
        let mut seen = [0; 4];
        bos.read(device, &mut seen).unwrap();
        assert_eq!(seen, [OLD; 4], "memory is not cleared");
        bos.poke(handle, 0, b"host").unwrap();
        bos.read(device, &mut seen).unwrap();
        assert_eq!(seen, [OLD; 4], "the host's write is in its cache");
        bos.sync(handle, true, 0, 4).unwrap();
        bos.read(device, &mut seen).unwrap();
        assert_eq!(&seen, b"host");
        bos.write(device + 128, b"npu!").unwrap();
        bos.peek(handle, 128, &mut seen).unwrap();
        assert_eq!(seen, [OLD; 4], "the device's write is behind the host's cache");
        bos.sync(handle, false, 128, 1).unwrap();
        bos.peek(handle, 128, &mut seen).unwrap();
        assert_eq!(&seen, b"npu!", "a line at least");
        assert!(bos.sync(handle, true, 4096, 1).is_err());
        assert!(bos.read(device + 4095, &mut seen).is_err());
    }
}
