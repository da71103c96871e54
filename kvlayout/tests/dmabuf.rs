//! Whether the memory that the shared route is tested on is what it claims to be, and does what the route counts on. Run by
//! itself it takes the kinds that the machine has; in the virtual machine of `tests/vm` all must be there.

mod memory;

use kvlayout::{FdKind, Inherited, Mapping};
use memmap2::MmapOptions;
use memory::{END, Kind, READ, View, WRITE};
use rustix::fd::AsRawFd;
use rustix::io::Errno;

const SIZE: u64 = 3 << 20;

fn pattern(seed: u32, len: usize) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 24) as u8).collect()
}

#[test]
fn all_kinds_are_there_where_they_must_be() {
    let kinds = memory::available();
    println!("{}", kinds.iter().map(Kind::to_string).collect::<Vec<_>>().join(", "));
    assert_eq!(kinds.first(), Some(&Kind::Memfd));
    if memory::required() {
        assert_eq!(kinds, Kind::ALL);
    }
}

#[test]
fn opcodes_are_the_headers() {
    for (ours, theirs) in memory::OPCODES {
        assert_eq!(ours as u64, u64::from(theirs));
    }
}

#[test]
fn buffers_have_their_length_and_kind_and_begin_as_zeros() {
    for kind in memory::available() {
        for size in [1, 4096, 4097, SIZE] {
            let fd = memory::make(kind, size);
            let want = if kind.is_dma_buf() { memory::pages(size) } else { size };
            assert_eq!(memory::length(&fd), Ok(want), "{kind}");
            assert!(View::new(&fd).bytes().iter().all(|b| *b == 0), "{kind}");
            let fd = Inherited::from_owned(fd).unwrap_or_else(|e| panic!("{kind}: {e}"));
            assert_eq!(fd.kind(), if kind.is_dma_buf() { FdKind::DmaBuf } else { FdKind::MemFd }, "{kind}");
            assert_eq!((fd.len(), fd.warning()), (want, None), "{kind}");
        }
    }
}

#[test]
fn what_one_mapping_writes_another_reads() {
    for kind in memory::available() {
        let fd = memory::make(kind, SIZE);
        let (a, b) = (View::new(&fd), View::new(&fd));
        drop(fd);
        let all = pattern(1, a.len());
        a.write(0, &all);
        assert!(b.bytes() == all, "{kind}");
        // Over the borders of pages, and back.
        let some = pattern(2, 9000);
        b.write(4000, &some);
        assert!(a.read(4000, some.len()) == some, "{kind}");
        assert!(a.read(0, 4000) == all[..4000] && a.read(13_000, 100) == all[13_000..13_100], "{kind}");
    }
}

#[test]
fn the_routes_mapping_reads_and_writes_the_same_bytes() {
    for kind in memory::available() {
        let fd = memory::make(kind, SIZE);
        let view = View::new(&fd);
        view.fill(0xa5);
        let fd = Inherited::from_owned(fd).unwrap();
        // The first begins in the middle of a page.
        for (offset, len) in [(4096 + 64, 100_000), (1 << 20, 1 << 20), (SIZE - 10, 10)] {
            let mut map = Mapping::new(&fd, offset, len).unwrap_or_else(|e| panic!("{kind}: {offset}, {len}: {e}"));
            let bytes = pattern(3, len as usize);
            map.write(0, &bytes).unwrap();
            assert!(view.read(offset as usize, len as usize) == bytes, "{kind}");
            let mut back = vec![0; len as usize];
            map.read(0, &mut back).unwrap();
            assert!(back == bytes, "{kind}");
            assert!(view.read(offset as usize - 16, 16) == [0xa5; 16], "{kind}");
        }
        assert!(Mapping::new(&fd, SIZE - 10, 11).is_err(), "{kind}");
    }
}

#[test]
fn access_is_announced_to_dma_bufs_only() {
    for kind in memory::available() {
        let fd = memory::make(kind, SIZE);
        let flags = [READ, READ | END, WRITE, WRITE | END, READ | WRITE, READ | WRITE | END];
        for flags in flags {
            let want = if kind.is_dma_buf() { Ok(()) } else { Err(Errno::NOTTY) };
            assert_eq!(memory::sync(&fd, flags), want, "{kind}: {flags}");
        }
        // No access at all, and flags that are none.
        for flags in [0, END, 8, WRITE | 1 << 40] {
            let want = if kind.is_dma_buf() { Errno::INVAL } else { Errno::NOTTY };
            assert_eq!(memory::sync(&fd, flags), Err(want), "{kind}: {flags}");
        }
        assert_eq!(memory::no_such(&fd), Err(Errno::NOTTY), "{kind}");
    }
}

#[test]
fn pages_of_a_memory_file_are_the_dma_bufs() {
    if !memory::available().contains(&Kind::Udmabuf) {
        return;
    }
    let page = memory::pages(1);
    let file = memory::memfd(4 * page);
    let fd = memory::udmabuf(&file, page, 2 * page).unwrap();
    let (under, over) = (View::new(&file), View::new(&fd));
    assert_eq!(over.len() as u64, 2 * page);
    under.fill(7);
    assert!(over.bytes().iter().all(|b| *b == 7));
    over.fill(9);
    let seen = under.bytes();
    let page = page as usize;
    assert!(seen[..page].iter().chain(&seen[3 * page..]).all(|b| *b == 7));
    assert!(seen[page..3 * page].iter().all(|b| *b == 9));
}

#[test]
fn what_cannot_be_a_buffer_is_refused_by_the_kernel() {
    let kinds = memory::available();
    if kinds.contains(&Kind::Udmabuf) {
        let page = memory::pages(1);
        let file = memory::memfd(2 * page);
        for (offset, size) in [(0, 0), (0, page - 1), (1, page), (page, 2 * page)] {
            assert_eq!(memory::udmabuf(&file, offset, size).err(), Some(Errno::INVAL), "{size} at {offset}");
        }
        // It could shrink under the device.
        assert_eq!(memory::udmabuf(&memory::unsealed(page), 0, page).err(), Some(Errno::INVAL));
    }
    if kinds.contains(&Kind::DmaHeap) {
        assert_eq!(memory::heap(0, 0).err(), Some(Errno::INVAL));
        assert_eq!(memory::heap(4096, 1).err(), Some(Errno::INVAL));
    }
    for kind in kinds.into_iter().filter(|k| k.is_dma_buf()) {
        // Neither longer nor shorter than it was made, and never mapped past its end.
        let fd = memory::make(kind, SIZE);
        assert_eq!(rustix::fs::ftruncate(&fd, 2 * SIZE), Err(Errno::INVAL), "{kind}");
        let map = |offset: u64, len: u64| {
            MmapOptions::new().offset(offset).len(len as usize).map_raw(fd.as_raw_fd()).map_err(|e| e.raw_os_error())
        };
        assert_eq!(map(0, SIZE + 4096).err(), Some(Some(Errno::INVAL.raw_os_error())), "{kind}");
        assert_eq!(map(SIZE, 4096).err(), Some(Some(Errno::INVAL.raw_os_error())), "{kind}");
        assert!(map(SIZE - 4096, 4096).is_ok(), "{kind}");
    }
}
