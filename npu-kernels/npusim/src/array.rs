//! The array: tiles with registers, DMA channels that move bytes by descriptors, locks, streams between them, tokens at the end of
//! tasks, and cores that are an oracle.
//!
//! Channels take turns, one descriptor at a time, until nobody can go on. What is left waiting then would wait for ever on a device
//! too, up to its watchdog.

use crate::designs::{Design, K, K_TILES, M, N, multiply};
use crate::registers::{Bd, COLUMNS, Dir, MEM_BYTES, MEM_LOCKS, QUEUE, Register, Tile};
use std::collections::{BTreeMap, VecDeque};

/// Memory as the array's interface reaches it, by device address.
pub trait Memory {
    /// Reads; `Err` says what is wrong with the address.
    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), String>;
    /// Writes.
    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), String>;
}

/// Device addresses in descriptors are seen through a window that begins here.
pub const WINDOW: u64 = 0x8000_0000;
/// Bytes that a stream may hold before its sender waits.
const STREAM: usize = 256 << 10;

/// A task of a channel.
struct Task {
    first: u32,
    at: u32,
    /// Executions left, this one included.
    left: u32,
    token: bool,
}

/// A channel of a tile.
#[derive(Default)]
struct Channel {
    tasks: VecDeque<Task>,
    tokens: u32,
}

/// A tile with a DMA.
struct Mover {
    words: BTreeMap<(u32, usize), u32>,
    /// How often each descriptor was used: its iteration.
    uses: BTreeMap<u32, u32>,
    channels: BTreeMap<(Dir, u32), Channel>,
}

impl Mover {
    fn new() -> Mover {
        Mover { words: BTreeMap::new(), uses: BTreeMap::new(), channels: BTreeMap::new() }
    }

    fn bd(&self, tile: Tile, id: u32) -> Result<Bd, String> {
        let words: Vec<u32> = (0..8).map(|i| self.words.get(&(id, i)).copied().unwrap_or(0)).collect();
        Bd::decode(tile, words[..].try_into().expect("8 words"))
            .map_err(|e| format!("descriptor {id} of a {tile:?} tile: {e}"))
    }
}

struct Column {
    shim: Mover,
    mem: Mover,
    memory: Vec<u8>,
    locks: [i32; MEM_LOCKS],
    core_on: bool,
    core_data: BTreeMap<u32, u32>,
    /// Sum so far, and tiles in it.
    sum: Vec<i32>,
    tiles: u32,
    /// What goes to the memory tile's S2MM channels, to the interface's, and to the core.
    to_mem: [VecDeque<u8>; 6],
    to_shim: [VecDeque<u8>; 2],
    to_core: [VecDeque<u8>; 2],
}

impl Column {
    fn new() -> Column {
        Column {
            shim: Mover::new(),
            mem: Mover::new(),
            memory: vec![0; MEM_BYTES],
            locks: [0; MEM_LOCKS],
            core_on: false,
            core_data: BTreeMap::new(),
            sum: vec![0; M * N],
            tiles: 0,
            to_mem: Default::default(),
            to_shim: Default::default(),
            to_core: Default::default(),
        }
    }

    fn mover(&mut self, tile: Tile) -> Option<&mut Mover> {
        match tile {
            Tile::Shim => Some(&mut self.shim),
            Tile::Mem => Some(&mut self.mem),
            Tile::Core => None,
        }
    }

    /// Where a channel's stream goes, or comes from.
    fn stream(&mut self, design: Design, tile: Tile, dir: Dir, channel: u32) -> Option<&mut VecDeque<u8>> {
        let c = channel as usize;
        match (design, tile, dir) {
            (Design::GemmI8, Tile::Shim, Dir::Mm2s) => self.to_mem.get_mut(c),
            (Design::GemmI8, Tile::Shim, Dir::S2mm) if c == 0 => self.to_shim.get_mut(0),
            (Design::GemmI8, Tile::Mem, Dir::S2mm) if c < 3 => self.to_mem.get_mut(c),
            (Design::GemmI8, Tile::Mem, Dir::Mm2s) if c < 2 => self.to_core.get_mut(c),
            (Design::GemmI8, Tile::Mem, Dir::Mm2s) if c == 2 => self.to_shim.get_mut(0),
            (Design::Copy, Tile::Shim, _) if c == 0 => self.to_shim.get_mut(0),
            _ => None,
        }
    }

    /// One execution of a descriptor by one channel, if it can happen; whether it did.
    fn step(
        &mut self,
        design: Design,
        tile: Tile,
        dir: Dir,
        channel: u32,
        memory: &mut dyn Memory,
    ) -> Result<bool, String> {
        let mover = self.mover(tile).expect("tiles with a DMA");
        let Some(task) = mover.channels.get(&(dir, channel)).and_then(|c| c.tasks.front()) else { return Ok(false) };
        let (id, used) = (task.at, mover.uses.get(&task.at).copied().unwrap_or(0));
        let bd = mover.bd(tile, id)?;
        if let Some(lock) = bd.acquire {
            let value = self.locks[lock.id];
            let free = if lock.value < 0 { value >= -lock.value } else { value == lock.value };
            if !free {
                return Ok(false);
            }
        }
        let bytes = bd.length as usize * 4;
        let stream = self
            .stream(design, tile, dir, channel)
            .ok_or_else(|| format!("{tile:?} {dir:?} {channel}: the design has no such stream"))?;
        match dir {
            Dir::Mm2s if stream.len() >= STREAM => return Ok(false),
            Dir::S2mm if stream.len() < bytes => return Ok(false),
            _ => {}
        }
        // Acquired only now that it will happen.
        if let Some(lock) = bd.acquire {
            self.locks[lock.id] -= lock.value.abs();
        }
        let mut block = vec![0u8; bytes];
        if dir == Dir::S2mm {
            let stream = self.stream(design, tile, dir, channel).expect("found above");
            for (to, from) in block.iter_mut().zip(stream.drain(..bytes)) {
                *to = from;
            }
        }
        let mut done = 0;
        for (offset, n) in bd.extents(used) {
            let part = &mut block[done..done + n];
            match tile {
                Tile::Shim => {
                    let address = (bd.address + offset)
                        .checked_sub(WINDOW)
                        .ok_or_else(|| format!("address {:#x} is below the window to memory", bd.address))?;
                    match dir {
                        Dir::Mm2s => memory.read(address, part)?,
                        Dir::S2mm => memory.write(address, part)?,
                    }
                }
                _ => {
                    let at = (bd.address + offset) as usize;
                    let place = self
                        .memory
                        .get_mut(at..at + n)
                        .ok_or_else(|| format!("bytes {at:#x}..{:#x} of a memory tile of {MEM_BYTES:#x}", at + n))?;
                    match dir {
                        Dir::Mm2s => part.copy_from_slice(place),
                        Dir::S2mm => place.copy_from_slice(part),
                    }
                }
            }
            done += n;
        }
        if dir == Dir::Mm2s {
            self.stream(design, tile, dir, channel).expect("found above").extend(&block);
        }
        if let Some(lock) = bd.release {
            self.locks[lock.id] += lock.value;
            if !(0..64).contains(&self.locks[lock.id]) {
                return Err(format!("lock {} of a memory tile is {}", lock.id, self.locks[lock.id]));
            }
        }
        let mover = self.mover(tile).expect("as above");
        *mover.uses.entry(id).or_default() += 1;
        let channel = mover.channels.get_mut(&(dir, channel)).expect("as above");
        let task = channel.tasks.front_mut().expect("as above");
        match bd.next {
            Some(next) => task.at = next,
            None => {
                task.at = task.first;
                task.left -= 1;
                if task.left == 0 {
                    channel.tokens += u32::from(task.token);
                    channel.tasks.pop_front();
                }
            }
        }
        Ok(true)
    }

    /// One tile of the product, if its operands are there; whether it happened.
    fn compute(&mut self) -> Result<bool, String> {
        let ready = self.to_core[0].len() >= M * K && self.to_core[1].len() >= K * N;
        if !self.core_on || !ready || self.to_mem[2].len() >= STREAM {
            return Ok(false);
        }
        let tiles = self.core_data.get(&K_TILES).copied().unwrap_or(0);
        if tiles == 0 {
            return Err("a core runs without having been told its number of tiles".into());
        }
        let a: Vec<u8> = self.to_core[0].drain(..M * K).collect();
        let b: Vec<u8> = self.to_core[1].drain(..K * N).collect();
        multiply(&a, &b, &mut self.sum);
        self.tiles += 1;
        if self.tiles == tiles {
            for value in &mut self.sum {
                self.to_mem[2].extend(value.to_le_bytes());
                *value = 0;
            }
            self.tiles = 0;
        }
        Ok(true)
    }
}

/// All of it.
pub struct Array {
    design: Option<Design>,
    columns: Vec<Column>,
    /// Columns that the context has.
    width: u32,
}

impl Array {
    /// Of that many columns, with nothing loaded.
    pub fn new(width: u32) -> Array {
        Array { design: None, columns: (0..COLUMNS).map(|_| Column::new()).collect(), width }
    }

    /// Loads a binary, which resets everything.
    pub fn load(&mut self, design: Design) {
        *self = Array { design: Some(design), ..Array::new(self.width) };
    }

    /// The same columns with nothing loaded.
    pub fn fresh(&self) -> Array {
        Array::new(self.width)
    }

    /// Forgets what a command that did not end has left, but not what is loaded.
    pub fn settle(&mut self) {
        if let Some(design) = self.design {
            self.load(design);
        }
    }

    /// Tile and offset of a register's address, within the context's columns.
    fn place(&mut self, address: u32) -> Result<(&mut Column, u32, Tile, u32), String> {
        let (column, row, offset) = (address >> 25, address >> 20 & 0x1f, address & 0xf_ffff);
        let tile = Tile::of_row(row).ok_or_else(|| format!("register {address:#x}: there is no row {row}"))?;
        if column >= self.width {
            return Err(format!("register {address:#x}: column {column} of a context of {}", self.width));
        }
        Ok((&mut self.columns[column as usize], row, tile, offset))
    }

    /// Writes a register.
    pub fn write(&mut self, address: u32, value: u32) -> Result<(), String> {
        let (column, row, tile, offset) = self.place(address)?;
        match Register::at(tile, offset) {
            Register::Bd(id, word) => {
                column.mover(tile).expect("has descriptors").words.insert((id, word), value);
                // A descriptor that is written anew begins its iteration anew.
                column.mover(tile).expect("has descriptors").uses.remove(&id);
            }
            Register::Queue(dir, channel) => {
                let dma = tile.dma().expect("has queues");
                let mask = if tile == Tile::Mem { 0x3f } else { 0xf };
                let id = value & mask;
                if id >= dma.count {
                    return Err(format!("{tile:?} {dir:?} {channel}: descriptor {id} of {}", dma.count));
                }
                // Even channels of a memory tile reach the first half of its descriptors, odd ones the second.
                if tile == Tile::Mem && (id >= dma.count / 2) != (channel % 2 == 1) {
                    return Err(format!("memory tile {dir:?} {channel} cannot reach descriptor {id}"));
                }
                let channel = column.mover(tile).expect("has queues").channels.entry((dir, channel)).or_default();
                if channel.tasks.len() == QUEUE {
                    return Err(format!("{tile:?} {dir:?}: a fifth task for a queue of {QUEUE}"));
                }
                channel.tasks.push_back(Task {
                    first: id,
                    at: id,
                    left: (value >> 16 & 0xff) + 1,
                    token: value >> 31 == 1,
                });
            }
            Register::Lock(id) => column.locks[id] = (value & 0x3f) as i32,
            // The double has one core a column; the others' settings are theirs.
            Register::CoreControl if row == 2 => column.core_on = value & 1 == 1,
            Register::CoreData if row == 2 => {
                column.core_data.insert(offset, value);
            }
            Register::CoreControl | Register::CoreData | Register::Control | Register::Other => {}
        }
        Ok(())
    }

    /// Reads what a masked write or a poll needs: of registers that the double keeps.
    pub fn read(&mut self, address: u32) -> Result<u32, String> {
        let (column, row, tile, offset) = self.place(address)?;
        Ok(match Register::at(tile, offset) {
            Register::Bd(id, word) => {
                column.mover(tile).expect("has descriptors").words.get(&(id, word)).copied().unwrap_or(0)
            }
            Register::Lock(id) => column.locks[id] as u32,
            Register::CoreControl if row == 2 => u32::from(column.core_on),
            Register::CoreData if row == 2 => column.core_data.get(&offset).copied().unwrap_or(0),
            _ => 0,
        })
    }

    /// Lets everything go on until nothing can.
    pub fn run(&mut self, memory: &mut dyn Memory) -> Result<(), String> {
        let Some(design) = self.design else {
            let waiting = |m: &Mover| m.channels.values().any(|c| !c.tasks.is_empty());
            if self.columns.iter().any(|c| waiting(&c.shim) || waiting(&c.mem)) {
                return Err("tasks in an array that nothing was loaded into".into());
            }
            return Ok(());
        };
        for column in &mut self.columns {
            let mut moved = true;
            while moved {
                moved = false;
                for tile in [Tile::Shim, Tile::Mem] {
                    let channels: Vec<_> = column.mover(tile).expect("a DMA").channels.keys().copied().collect();
                    for (dir, channel) in channels {
                        while column.step(design, tile, dir, channel, memory)? {
                            moved = true;
                        }
                    }
                }
                while design == Design::GemmI8 && column.compute()? {
                    moved = true;
                }
            }
        }
        Ok(())
    }

    /// Takes a token of a channel, if there is one.
    pub fn token(&mut self, column: u32, row: u32, dir: Dir, channel: u32) -> Result<bool, String> {
        if column >= self.width {
            return Err(format!("a token of column {column} of a context of {}", self.width));
        }
        let tile = Tile::of_row(row).ok_or_else(|| format!("a token of row {row}"))?;
        let Some(mover) = self.columns[column as usize].mover(tile) else { return Ok(false) };
        let Some(channel) = mover.channels.get_mut(&(dir, channel)) else { return Ok(false) };
        let had = channel.tokens > 0;
        channel.tokens = channel.tokens.saturating_sub(1);
        Ok(had)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Flat(Vec<u8>);

    impl Memory for Flat {
        fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), String> {
            let at = address as usize;
            bytes.copy_from_slice(self.0.get(at..at + bytes.len()).ok_or("outside")?);
            Ok(())
        }

        fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), String> {
            let at = address as usize;
            self.0.get_mut(at..at + bytes.len()).ok_or("outside")?.copy_from_slice(bytes);
            Ok(())
        }
    }

    fn describe(array: &mut Array, at: u32, words: [u32; 8]) {
        for (i, word) in words.iter().enumerate() {
            array.write(at + 4 * i as u32, *word).unwrap();
        }
    }

    #[test]
    fn a_copy_with_strides_and_a_token() {
        let mut array = Array::new(1);
        array.load(Design::Copy);
        // 2 rows of 2 words, 4 words apart, to 4 words in a row at byte 64.
        describe(&mut array, 0x1_d000, [4, 0x8000_0000, 0, 2 << 20, 2 << 20 | 3, 0, 0, 1 << 25]);
        describe(&mut array, 0x1_d020, [4, 0x8000_0040, 0, 0, 0, 0, 0, 1 << 25]);
        array.write(0x1_d214, 0).unwrap();
        array.write(0x1_d204, 1 | 1 << 31).unwrap();
        let mut memory = Flat((0..128).collect());
        array.run(&mut memory).unwrap();
        assert_eq!(memory.0[64..80], [0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23]);
        assert!(array.token(0, 0, Dir::S2mm, 0).unwrap());
        assert!(!array.token(0, 0, Dir::S2mm, 0).unwrap(), "one token");
        assert!(!array.token(0, 0, Dir::Mm2s, 0).unwrap(), "not asked for");
    }

    #[test]
    fn limits_are_kept() {
        let mut array = Array::new(2);
        array.load(Design::GemmI8);
        for _ in 0..QUEUE {
            array.write(0x1_d204, 0).unwrap();
        }
        assert!(array.write(0x1_d204, 0).unwrap_err().contains("fifth"));
        assert!(array.write(2 << 25 | 0x1_d204, 0).unwrap_err().contains("column 2"));
        assert!(array.write(1 << 20 | 0xa_0604, 30).unwrap_err().contains("cannot reach"));
        assert!(array.write(1 << 20 | 0xa_0604, 48).unwrap_err().contains("of 48"));
        assert!(array.write(7 << 20, 0).unwrap_err().contains("no row"));
    }

    #[test]
    fn nothing_runs_without_a_design() {
        let mut array = Array::new(1);
        array.write(0x1_d214, 0).unwrap();
        assert!(array.run(&mut Flat(Vec::new())).unwrap_err().contains("nothing was loaded"));
    }
}
