//! The control code: a list of writes to the array's registers with waits in between, in the binary form of aie-rt's
//! `xaie_txn.h`. Both forms are read, that of version 0.1 with full headers and the compact one of 1.0.

use crate::array::{Array, Memory, WINDOW};
use crate::designs::Design;
use crate::registers::Dir;

/// How a transaction ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum End {
    /// All of it was done.
    Done,
    /// A token that nobody will send was waited for.
    Hangs(String),
}

/// Arguments that the firmware puts into descriptors (flow 1). Where XRT has done so before (flow 2), there are none.
pub type Arguments<'a> = Option<&'a [u64]>;

/// Of arguments after this one, whoever made the transaction has added the window already.
const FOLDED_FROM: u64 = 5;

const WRITE: u8 = 0;
const BLOCKWRITE: u8 = 1;
const MASKWRITE: u8 = 3;
const MASKPOLL: u8 = 4;
const NOOP: u8 = 5;
const PREEMPT: u8 = 6;
const LOADPDI: u8 = 8;
const TCT: u8 = 128;
const DDR_PATCH: u8 = 129;

struct Reader<'a> {
    text: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn u32(&self, word: usize) -> Result<u32, String> {
        let at = self.at + 4 * word;
        let bytes = self
            .text
            .get(at..at + 4)
            .ok_or_else(|| format!("the transaction ends within the operation at {}", self.at))?;
        Ok(u32::from_le_bytes(bytes.try_into().expect("4 bytes")))
    }

    fn u64(&self, word: usize) -> Result<u64, String> {
        Ok(u64::from(self.u32(word)?) | u64::from(self.u32(word + 1)?) << 32)
    }
}

/// Carries it out. `Err` says what hardware or firmware would not accept.
pub fn run(text: &[u8], arguments: Arguments<'_>, array: &mut Array, memory: &mut dyn Memory) -> Result<End, String> {
    let mut r = Reader { text, at: 0 };
    let head = r.u32(0)?.to_le_bytes();
    let (count, size) = (r.u32(2)?, r.u32(3)? as usize);
    let compact = match (head[0], head[1]) {
        (0, 1) => false,
        (1, 0) => true,
        (major, minor) => return Err(format!("a transaction of version {major}.{minor}")),
    };
    if size > text.len() || size < 16 {
        return Err(format!("a transaction of {size} bytes in {}", text.len()));
    }
    r.text = &text[..size];
    r.at = 16;
    for _ in 0..count {
        let op = r.u32(0)?.to_le_bytes()[0];
        // Where an operation's address, first value and size stand, in words, and its bytes.
        let bytes = match (op, compact) {
            (WRITE, false) => {
                array.write(r.u32(2)?, r.u32(4)?)?;
                r.u32(5)?
            }
            (WRITE, true) => {
                array.write(r.u32(1)?, r.u32(2)?)?;
                12
            }
            (BLOCKWRITE, _) => {
                let (at, of, first) = if compact { (1, 2, 3) } else { (2, 3, 4) };
                let (address, bytes) = (r.u32(at)?, r.u32(of)?);
                let words = (bytes as usize / 4).checked_sub(first).ok_or("a block write that is too short")?;
                for i in 0..words {
                    array.write(address.wrapping_add(4 * i as u32), r.u32(first + i)?)?;
                }
                bytes
            }
            (MASKWRITE, _) => {
                let (at, value, mask, bytes) = if compact { (1, 2, 3, 16) } else { (2, 4, 5, r.u32(6)?) };
                let (address, value, mask) = (r.u32(at)?, r.u32(value)?, r.u32(mask)?);
                let before = array.read(address)?;
                array.write(address, before & !mask | value & mask)?;
                bytes
            }
            (MASKPOLL, _) => {
                let (at, value, mask, bytes) = if compact { (1, 2, 3, 16) } else { (2, 4, 5, r.u32(6)?) };
                let (address, value, mask) = (r.u32(at)?, r.u32(value)?, r.u32(mask)?);
                array.run(memory)?;
                let found = array.read(address)?;
                if found & mask != value {
                    return Ok(End::Hangs(format!("register {address:#x} stays {found:#x}")));
                }
                bytes
            }
            (NOOP | PREEMPT, _) => 4,
            (LOADPDI, _) => {
                let (length, address) = (r.u32(1)?, r.u64(2)?);
                if length > 16 << 20 {
                    return Err(format!("a binary of {length} bytes"));
                }
                let mut pdi = vec![0; length as usize];
                memory.read(address, &mut pdi)?;
                array.load(Design::of(&pdi)?);
                16
            }
            (TCT, _) => {
                let (who, how) = (r.u32(2)?.to_le_bytes(), r.u32(3)?.to_le_bytes());
                let dir = if who[0] == 0 { Dir::S2mm } else { Dir::Mm2s };
                array.run(memory)?;
                for column in who[2]..who[2].saturating_add(how[2].max(1)) {
                    if !array.token(column.into(), who[1].into(), dir, how[3].into())? {
                        return Ok(End::Hangs(format!(
                            "no token from column {column}, row {}, {dir:?} {}",
                            who[1], how[3]
                        )));
                    }
                }
                r.u32(1)?
            }
            (DDR_PATCH, _) => {
                let bytes = r.u32(1)?;
                let (address, index, plus) = match bytes {
                    24 => (r.u32(2)?, u64::from(r.u32(3)?), u64::from(r.u32(4)?)),
                    48 => (r.u32(6)?, r.u64(8)?, r.u64(10)?),
                    n => return Err(format!("a patch of {n} bytes")),
                };
                if let Some(arguments) = arguments {
                    let base = usize::try_from(index)
                        .ok()
                        .and_then(|i| arguments.get(i))
                        .ok_or_else(|| format!("argument {index} of {}", arguments.len()))?;
                    let window = if index < FOLDED_FROM { WINDOW } else { 0 };
                    let value = base.wrapping_add(plus).wrapping_add(window);
                    let high = array.read(address.wrapping_add(4))? & !0xffff;
                    array.write(address, value as u32)?;
                    array.write(address.wrapping_add(4), high | (value >> 32) as u32 & 0xffff)?;
                }
                bytes
            }
            (op, _) => return Err(format!("operation {op} at byte {}", r.at)),
        };
        if bytes < 4 || bytes % 4 != 0 {
            return Err(format!("operation {op} of {bytes} bytes"));
        }
        r.at += bytes as usize;
    }
    array.run(memory)?;
    Ok(End::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing;

    impl Memory for Nothing {
        fn read(&mut self, _: u64, _: &mut [u8]) -> Result<(), String> {
            Err("no memory".into())
        }

        fn write(&mut self, _: u64, _: &[u8]) -> Result<(), String> {
            Err("no memory".into())
        }
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    #[test]
    fn both_forms_write_registers() {
        let core = 2 << 20 | 0x400;
        let full = words(&[0x0604_0100, 0x108, 2, 72, 0, 0, core, 0, 5, 24, 3, 0, core, 0, 0x20, 0xf0, 32, 0]);
        let compact = words(&[0x0604_0001, 0x108, 2, 44, 0, core, 5, 3, core, 0x20, 0xf0]);
        for text in [full, compact] {
            let mut array = Array::new(1);
            assert_eq!(run(&text, None, &mut array, &mut Nothing), Ok(End::Done));
            assert_eq!(array.read(core), Ok(0x25));
        }
    }

    #[test]
    fn what_is_cut_or_unknown_is_refused() {
        let mut array = Array::new(1);
        let mut says = |text: &[u8]| run(text, None, &mut array, &mut Nothing).unwrap_err();
        assert!(says(&[0; 8]).contains("ends"));
        assert!(says(&words(&[0x0604_0102, 0, 0, 16])).contains("version"));
        assert!(says(&words(&[0x0604_0001, 0, 1, 16])).contains("ends"));
        assert!(says(&words(&[0x0604_0001, 0, 1, 400])).contains("400"));
        assert!(says(&words(&[0x0604_0001, 0, 1, 20, 77])).contains("operation 77"));
        // Nobody sends the token.
        let wait = words(&[0x0604_0001, 0, 1, 32, 128, 16, 0, 1 << 16 | 1 << 8]);
        assert!(matches!(run(&wait, None, &mut Array::new(1), &mut Nothing), Ok(End::Hangs(_))));
    }
}
