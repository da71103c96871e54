//! Registers of the array, as far as the double knows them: where a tile's DMA, its locks and its core are set up, and the fields of
//! buffer descriptors. Numbers are of AIE2P (`xaie2pgbl_params.h` of aie-rt), named as there.

/// The kinds of tile, by row.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Tile {
    /// Row 0: the interface to memory.
    Shim,
    /// Row 1.
    Mem,
    /// Rows 2 to 5.
    Core,
}

/// Columns of the array.
pub const COLUMNS: u32 = 8;
/// Rows of the array.
pub const ROWS: u32 = 6;
/// Bytes of a memory tile.
pub const MEM_BYTES: usize = 512 << 10;
/// Locks of a memory tile.
pub const MEM_LOCKS: usize = 64;
/// Tasks that wait in a channel's queue.
pub const QUEUE: usize = 4;

/// Direction of a channel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Dir {
    /// Stream to memory.
    S2mm,
    /// Memory to stream.
    Mm2s,
}

impl Tile {
    /// Of a row.
    pub fn of_row(row: u32) -> Option<Tile> {
        match row {
            0 => Some(Tile::Shim),
            1 => Some(Tile::Mem),
            2..ROWS => Some(Tile::Core),
            _ => None,
        }
    }

    /// Where its descriptors are, how many, and of how many channels each way.
    pub fn dma(self) -> Option<Dma> {
        match self {
            Tile::Shim => Some(Dma { bds: 0x1_d000, count: 16, channels: 2, control: 0x1_d200 }),
            Tile::Mem => Some(Dma { bds: 0xa_0000, count: 48, channels: 6, control: 0xa_0600 }),
            // Cores' own DMA belongs to the design, which the oracle stands for.
            Tile::Core => None,
        }
    }
}

/// A tile's DMA registers.
pub struct Dma {
    /// Of descriptor 0; they are 0x20 bytes apart.
    pub bds: u32,
    /// Descriptors.
    pub count: u32,
    /// Channels of each direction.
    pub channels: u32,
    /// Control register of S2MM channel 0; those of the channels, S2MM then MM2S, are 8 bytes apart, each with its queue behind it.
    pub control: u32,
}

/// What a register of a tile is.
pub enum Register {
    /// A word of a descriptor.
    Bd(u32, usize),
    /// A channel's control.
    Control,
    /// A channel's task queue.
    Queue(Dir, u32),
    /// A lock's value.
    Lock(usize),
    /// A core's control: bit 0 enables it.
    CoreControl,
    /// A core's data memory.
    CoreData,
    /// Switches, events, clocks: what a design sets up and the double does not look at.
    Other,
}

/// `XAIE2PGBL_MEM_TILE_MODULE_LOCK0_VALUE`; 0x10 bytes apart.
const MEM_LOCK0: u32 = 0xc_0000;
/// `XAIE2PGBL_CORE_MODULE_CORE_CONTROL`.
const CORE_CONTROL: u32 = 0x3_2000;
/// Bytes of a core's data memory.
const CORE_DATA: u32 = 0x1_0000;

impl Register {
    /// What lies at that offset of a tile.
    pub fn at(tile: Tile, offset: u32) -> Register {
        if let Some(dma) = tile.dma() {
            if (dma.bds..dma.bds + 0x20 * dma.count).contains(&offset) {
                let at = offset - dma.bds;
                return Register::Bd(at / 0x20, (at % 0x20 / 4) as usize);
            }
            if (dma.control..dma.control + 16 * dma.channels).contains(&offset) {
                let at = (offset - dma.control) / 8;
                let (dir, channel) = if at < dma.channels { (Dir::S2mm, at) } else { (Dir::Mm2s, at - dma.channels) };
                return if offset % 8 == 4 { Register::Queue(dir, channel) } else { Register::Control };
            }
        }
        match (tile, offset) {
            (Tile::Mem, o) if (MEM_LOCK0..MEM_LOCK0 + 0x10 * MEM_LOCKS as u32).contains(&o) => {
                Register::Lock(((o - MEM_LOCK0) / 0x10) as usize)
            }
            (Tile::Core, CORE_CONTROL) => Register::CoreControl,
            (Tile::Core, 0..CORE_DATA) => Register::CoreData,
            _ => Register::Other,
        }
    }
}

/// A lock's use by a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockUse {
    /// Its number in the tile.
    pub id: usize,
    /// To acquire: at least −value if it is negative, exactly value otherwise. To release: what is added.
    pub value: i32,
}

/// A buffer descriptor, taken apart. Lengths and steps are in words of 4 bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bd {
    /// Words in all.
    pub length: u32,
    /// Byte address: of the device for the interface, in the tile for a memory tile.
    pub address: u64,
    /// Wrap and step of each dimension from the innermost; a wrap of 0 has no end.
    pub dims: Vec<(u32, u32)>,
    /// Step and wrap between executions.
    pub iteration: (u32, u32),
    /// The descriptor that follows.
    pub next: Option<u32>,
    /// Awaited before.
    pub acquire: Option<LockUse>,
    /// Changed after; a value of 0 is none.
    pub release: Option<LockUse>,
}

/// Seven bits with a sign.
fn signed7(value: u32) -> i32 {
    let v = (value & 0x7f) as i32;
    if v >= 64 { v - 128 } else { v }
}

impl Bd {
    /// Takes the words of a descriptor apart; `Err` says what no hardware would accept.
    pub fn decode(tile: Tile, w: &[u32; 8]) -> Result<Bd, String> {
        let bd = match tile {
            Tile::Shim => {
                if w[7] >> 25 & 1 == 0 {
                    return Err("a descriptor that is not valid".into());
                }
                Bd {
                    length: w[0],
                    address: u64::from(w[1] & !3) | u64::from(w[2] & 0xffff) << 32,
                    dims: vec![
                        (w[3] >> 20 & 0x3ff, (w[3] & 0xf_ffff) + 1),
                        (w[4] >> 20 & 0x3ff, (w[4] & 0xf_ffff) + 1),
                        (0, (w[5] & 0xf_ffff) + 1),
                    ],
                    iteration: ((w[6] & 0xf_ffff) + 1, (w[6] >> 20 & 0x3f) + 1),
                    next: (w[7] >> 26 & 1 == 1).then_some(w[7] >> 27 & 0xf),
                    // Locks of the interface are not used by these designs.
                    acquire: None,
                    release: None,
                }
            }
            Tile::Mem => {
                if w[7] >> 31 == 0 {
                    return Err("a descriptor that is not valid".into());
                }
                // Locks 64 to 127 are the tile's own, the others its neighbours'.
                let own = |id: u32| {
                    usize::try_from(id)
                        .ok()
                        .and_then(|id| id.checked_sub(64))
                        .filter(|id| *id < MEM_LOCKS)
                        .ok_or_else(|| format!("lock {id} of a neighbour, which the double does not have"))
                };
                let acquire = match w[7] >> 15 & 1 {
                    0 => None,
                    _ => Some(LockUse { id: own(w[7] & 0xff)?, value: signed7(w[7] >> 8) }),
                };
                let release = match signed7(w[7] >> 24) {
                    0 => None,
                    value => Some(LockUse { id: own(w[7] >> 16 & 0xff)?, value }),
                };
                // The window of the tile's own memory begins at 512 KiB.
                let address = u64::from(w[1] & 0x7_ffff) * 4;
                let address = address
                    .checked_sub(MEM_BYTES as u64)
                    .filter(|a| *a < MEM_BYTES as u64)
                    .ok_or_else(|| format!("address {address:#x} of a neighbour, which the double does not have"))?;
                Bd {
                    length: w[0] & 0x1_ffff,
                    address,
                    dims: vec![
                        (w[2] >> 17 & 0x3ff, (w[2] & 0x1_ffff) + 1),
                        (w[3] >> 17 & 0x3ff, (w[3] & 0x1_ffff) + 1),
                        (w[4] >> 17 & 0x3ff, (w[4] & 0x1_ffff) + 1),
                        (0, (w[5] & 0x1_ffff) + 1),
                    ],
                    iteration: ((w[6] & 0x1_ffff) + 1, (w[6] >> 17 & 0x3f) + 1),
                    next: (w[1] >> 19 & 1 == 1).then_some(w[1] >> 20 & 0x3f),
                    acquire,
                    release,
                }
            }
            Tile::Core => return Err("a core's descriptor".into()),
        };
        if bd.length == 0 {
            return Err("a descriptor of length 0".into());
        }
        Ok(bd)
    }

    /// The runs of neighbouring words that it visits at its `execution`th use, in order: byte offset from its address, bytes.
    pub fn extents(&self, execution: u32) -> Vec<(u64, usize)> {
        let base = u64::from(execution % self.iteration.1) * u64::from(self.iteration.0);
        let (inner, step) = self.dims[0];
        let mut extents: Vec<(u64, usize)> = Vec::new();
        let mut at = 0u32;
        while at < self.length {
            // A whole row of the innermost dimension at once, where its words are neighbours.
            let run = match (inner, step) {
                (0, 1) => self.length,
                (inner, 1) => inner.min(self.length - at),
                _ => 1,
            };
            let (mut rest, mut word) = (u64::from(at), base);
            for (wrap, step) in &self.dims {
                // The outermost dimension, with a wrap of 0, takes what is left.
                let (index, left) = match u64::from(*wrap) {
                    0 => (rest, 0),
                    wrap => (rest % wrap, rest / wrap),
                };
                word += index * u64::from(*step);
                rest = left;
            }
            let (start, bytes) = (word * 4, run as usize * 4);
            match extents.last_mut() {
                Some((s, n)) if *s + *n as u64 == start => *n += bytes,
                _ => extents.push((start, bytes)),
            }
            at += run;
        }
        extents
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_of_the_interface() {
        // Written from the table of fields: 3 rows of 2 words, 10 words apart, at 0x8000_1000; twice, 100 words apart.
        let w = [6, 0x8000_1000, 0, 2 << 20, 3 << 20 | 9, 0, 1 << 20 | 99, 1 << 25];
        let bd = Bd::decode(Tile::Shim, &w).unwrap();
        assert_eq!((bd.length, bd.address, bd.next), (6, 0x8000_1000, None));
        assert_eq!(bd.extents(0), [(0, 8), (40, 8), (80, 8)]);
        assert_eq!(bd.extents(1), [(400, 8), (440, 8), (480, 8)]);
        assert_eq!(bd.extents(2), bd.extents(0));
        assert!(Bd::decode(Tile::Shim, &[6, 0, 0, 0, 0, 0, 0, 0]).is_err(), "not valid");
        assert!(Bd::decode(Tile::Shim, &[0, 0, 0, 0, 0, 0, 0, 1 << 25]).is_err(), "no length");
    }

    #[test]
    fn a_descriptor_of_a_memory_tile() {
        // 16 words in a row at byte 0x100, then descriptor 7; lock 1 at least 1, then lock 2 up by 1.
        let w =
            [16, 0x2_0040 | 1 << 19 | 7 << 20, 0, 0, 0, 0, 0, 1 << 31 | 1 << 24 | 66 << 16 | 1 << 15 | 0x7f << 8 | 65];
        let bd = Bd::decode(Tile::Mem, &w).unwrap();
        assert_eq!((bd.length, bd.address, bd.next), (16, 0x100, Some(7)));
        assert_eq!(bd.acquire, Some(LockUse { id: 1, value: -1 }));
        assert_eq!(bd.release, Some(LockUse { id: 2, value: 1 }));
        assert_eq!(bd.extents(3), [(0, 64)]);
        let neighbour = [16, 0x40, 0, 0, 0, 0, 0, 1 << 31];
        assert!(Bd::decode(Tile::Mem, &neighbour).unwrap_err().contains("neighbour"));
    }

    #[test]
    fn registers_are_found() {
        assert!(matches!(Register::at(Tile::Shim, 0x1_d024), Register::Bd(1, 1)));
        assert!(matches!(Register::at(Tile::Shim, 0x1_d204), Register::Queue(Dir::S2mm, 0)));
        assert!(matches!(Register::at(Tile::Shim, 0x1_d21c), Register::Queue(Dir::Mm2s, 1)));
        assert!(matches!(Register::at(Tile::Mem, 0xa_0634), Register::Queue(Dir::Mm2s, 0)));
        assert!(matches!(Register::at(Tile::Mem, 0xc_0010), Register::Lock(1)));
        assert!(matches!(Register::at(Tile::Core, 0x3_2000), Register::CoreControl));
    }
}
