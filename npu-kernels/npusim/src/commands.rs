//! Command packets (`ert_packet` of XRT's `ert.h`): what a submission asks for, carried out at once.

use crate::array::{Array, Memory as _};
use crate::bos::Bos;
use crate::designs::Design;
use crate::faults::Faults;
use crate::transaction::{End, run};
use crate::uapi::{State, opcode};
use std::io;

/// Bytes of a packet that are looked at.
const PACKET: usize = 4096;
/// Control code is not longer.
const MOST_CODE: usize = 8 << 20;

/// A context.
pub struct Context {
    pub array: Array,
    /// What CONFIG_HWCTX has set up (flow 1); a full ELF loads by itself.
    pub design: Option<Result<Design, String>>,
    pub submitted: u64,
}

/// What a submission came to.
pub struct Outcome {
    /// The state to be seen in the packet.
    pub state: State,
    /// What happened, for the log.
    pub why: String,
}

impl Outcome {
    fn new(state: State, why: impl Into<String>) -> Outcome {
        Outcome { state, why: why.into() }
    }
}

struct Packet([u32; PACKET / 4]);

impl Packet {
    fn u64(&self, word: usize) -> u64 {
        u64::from(self.0[word]) | u64::from(self.0[word + 1]) << 32
    }
}

fn packet(bos: &mut Bos, handle: u32) -> io::Result<Packet> {
    let mut bytes = [0u8; PACKET];
    bos.peek(handle, 0, &mut bytes)?;
    let mut words = [0u32; PACKET / 4];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = u32::from_le_bytes(bytes.try_into().expect("4 bytes"));
    }
    Ok(Packet(words))
}

fn set_state(bos: &mut Bos, handle: u32, state: State) -> io::Result<()> {
    let head = packet(bos, handle)?.0[0] & !0xf | state as u32;
    bos.poke(handle, 0, &head.to_le_bytes())
}

/// Carries out the packet in `handle`, and says in it how that went.
pub fn execute(
    bos: &mut Bos,
    context: &mut Context,
    handle: u32,
    faults: &Faults,
    submission: u64,
) -> io::Result<Outcome> {
    let p = packet(bos, handle)?;
    let (kind, count) = (p.0[0] >> 23 & 0x1f, (p.0[0] >> 12 & 0x7ff) as usize);
    if 1 + count > p.0.len() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    if kind == opcode::CMD_CHAIN {
        // command_count, submit_index, error_index, reserved[3], then a handle of 8 bytes each.
        let commands = p.0[1] as usize;
        if 6 + 2 * commands != count {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        for i in 0..commands {
            let outcome = execute(bos, context, p.u64(7 + 2 * i) as u32, faults, submission)?;
            if outcome.state != State::Completed {
                bos.poke(handle, 4 * 3, &(i as u32).to_le_bytes())?;
                set_state(bos, handle, outcome.state)?;
                return Ok(outcome);
            }
        }
        set_state(bos, handle, State::Completed)?;
        return Ok(Outcome::new(State::Completed, format!("a chain of {commands}")));
    }
    let outcome = if faults.at("timeout", submission) {
        Outcome::new(State::Timeout, "fault")
    } else if faults.at("error", submission) {
        Outcome::new(State::Error, "fault")
    } else {
        let outcome = start(bos, context, &p, kind, count, faults, submission);
        if outcome.state != State::Completed {
            context.array.settle();
        }
        outcome
    };
    set_state(bos, handle, outcome.state)?;
    Ok(outcome)
}

/// The kinds that start control code.
fn start(
    bos: &mut Bos,
    context: &mut Context,
    p: &Packet,
    kind: u32,
    count: usize,
    faults: &Faults,
    submission: u64,
) -> Outcome {
    // Word 1 is the mask of compute units, which these devices do not use; the rest begins at word 2.
    let (address, bytes, arguments) = match kind {
        // Opcode (8 bytes), instructions' address (8), their number of words (4), then addresses.
        opcode::START_CU if count >= 6 => {
            if p.u64(2) != 3 {
                return Outcome::new(State::Error, format!("opcode {} where 3 is wanted", p.u64(2)));
            }
            let arguments: Vec<u64> = (0..(count - 6) / 2).map(|i| p.u64(7 + 2 * i)).collect();
            match &context.design {
                Some(Ok(design)) => context.array.load(*design),
                Some(Err(why)) => return Outcome::new(State::Error, why.clone()),
                None => return Outcome::new(State::Error, "a context without a binary"),
            }
            (p.u64(4), p.0[6] as usize * 4, Some(arguments))
        }
        // Instructions' address (8), their bytes (4).
        opcode::START_NPU if count >= 5 => (p.u64(2), p.0[4] as usize, None),
        // Addresses of instructions, save and restore code (8 each), then their bytes (4 each).
        opcode::START_NPU_PREEMPT | opcode::START_NPU_PREEMPT_ELF if count >= 11 => (p.u64(2), p.0[8] as usize, None),
        _ => return Outcome::new(State::Error, format!("a packet of kind {kind} with {count} words")),
    };
    if bytes == 0 || bytes > MOST_CODE {
        return Outcome::new(State::Error, format!("{bytes} bytes of control code"));
    }
    let mut code = vec![0; bytes];
    if let Err(why) = bos.read(address, &mut code) {
        return Outcome::new(State::Error, why);
    }
    bos.mute = faults.at("stale", submission);
    bos.written.clear();
    let end = run(&code, arguments.as_deref(), &mut context.array, bos);
    bos.mute = false;
    match end {
        Err(why) => Outcome::new(State::Error, why),
        Ok(End::Hangs(why)) => Outcome::new(State::Timeout, why),
        Ok(End::Done) => {
            let written = std::mem::take(&mut bos.written);
            match spoil(bos, &written, faults, submission) {
                Some(outcome) => outcome,
                None => Outcome::new(State::Completed, format!("{bytes} bytes of control code")),
            }
        }
    }
}

/// What faults do to an output that was right.
fn spoil(bos: &mut Bos, written: &[(u64, usize)], faults: &Faults, submission: u64) -> Option<Outcome> {
    let mut change = |address: u64, n: usize| {
        let mut bytes = vec![0; n];
        if bos.read(address, &mut bytes).is_ok() {
            bytes.iter_mut().for_each(|b| *b = b.wrapping_add(1));
            let _ = bos.write(address, &bytes);
        }
    };
    if faults.at("group", submission)
        && let Some((address, _)) = written.last()
    {
        change(*address, 4);
    }
    if faults.at("spill", submission)
        && let Some((address, n)) = written.iter().max_by_key(|(address, _)| *address)
    {
        change(*address + *n as u64, 4);
    }
    if faults.at("abort", submission) {
        for (address, n) in &written[written.len() / 2..] {
            change(*address, *n);
        }
        return Some(Outcome::new(State::Abort, "fault"));
    }
    None
}

/// The packets that this project's runs do not send (19 to 21; those that they do, 0 and 22, come from XRT in `xdna/tests/sim.rs`,
/// and so does a chain): made by hand from the structs of XRT's `ert.h`.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::uapi::{BO_CMD, BO_SHARE};

    /// Where the one buffer is for the device, and what lies where in it.
    const BASE: u64 = 0x7000_0000_0000;
    const BINARY: u64 = BASE;
    const CODE: [u64; 2] = [BASE + 0x400, BASE + 0x800];
    const DATA: [u64; 3] = [BASE + 0xc00, BASE + 0xd00, BASE + 0xe00];
    const BYTES: u32 = 64;

    struct Bench {
        bos: Bos,
        context: Context,
        faults: Faults,
    }

    /// Control code that copies, in transactions of version 0.1: load, two descriptors of the interface, two tasks, a wait.
    fn copy(from: u64, to: u64) -> Vec<u8> {
        let mut ops: Vec<Vec<u32>> = vec![vec![8 | 1 << 16, 256, BINARY as u32, (BINARY >> 32) as u32]];
        for (bd, address, queue) in [(0u32, from, 0x1_d214), (1, to, 0x1_d204)] {
            // The array sees memory through a window at 0x8000_0000.
            let seen = address + 0x8000_0000;
            let words = [BYTES / 4, seen as u32, (seen >> 32) as u32, 0, 0, 0, 0, 1 << 25];
            ops.push([&[1, 0, 0x1_d000 + 0x20 * bd, 16 + 32][..], &words].concat());
            ops.push(vec![0, 0, queue, 0, 1 << 31 | bd, 24]);
        }
        ops.push(vec![128, 16, 0, 1 << 8 | 1 << 16]);
        let body: Vec<u8> = ops.iter().flatten().flat_map(|w| w.to_le_bytes()).collect();
        let mut all = vec![0, 1, 4, 6, 8, 1, 0, 0];
        all.extend((ops.len() as u32).to_le_bytes());
        all.extend((16 + body.len() as u32).to_le_bytes());
        all.extend(body);
        all
    }

    impl Bench {
        /// Two programs: the first data to the second, the second to the third.
        fn new() -> Bench {
            let mut bos = Bos::new(false);
            let handle = bos.create(BO_SHARE, 4096).unwrap();
            bos.get(handle).unwrap().mapped = Some((BASE, 4096));
            let mut binary = b"npusim design: copy v1\n".to_vec();
            binary.resize(256, 0);
            bos.write(BINARY, &binary).unwrap();
            for (i, at) in CODE.into_iter().enumerate() {
                bos.write(at, &copy(DATA[i], DATA[i + 1])).unwrap();
            }
            bos.write(DATA[0], &(1..=64).collect::<Vec<u8>>()).unwrap();
            let context = Context { array: Array::new(1), design: None, submitted: 0 };
            Bench { bos, context, faults: Faults::default() }
        }

        /// A packet in the state NEW, with everything behind its first word.
        fn packet(&mut self, kind: u32, words: &[u32]) -> u32 {
            let handle = self.bos.create(BO_CMD, 4096).unwrap();
            let all = [&[1 | (words.len() as u32) << 12 | kind << 23][..], words].concat();
            let bytes: Vec<u8> = all.iter().flat_map(|w| w.to_le_bytes()).collect();
            self.bos.poke(handle, 0, &bytes).unwrap();
            handle
        }

        /// `ert_npu_data`: instructions, their bytes, properties; behind the mask of units, and before arguments.
        fn npu(&mut self, at: u64) -> u32 {
            self.packet(20, &[1, at as u32, (at >> 32) as u32, 256, 0, 7, 7])
        }

        /// `ert_npu_preempt_data`: instructions, save and restore code, the bytes of each, properties.
        fn preempt(&mut self, at: u64) -> u32 {
            self.packet(21, &[1, at as u32, (at >> 32) as u32, 9, 9, 9, 9, 256, 8, 8, 0])
        }

        /// `ert_cmd_chain_data`: number, two indices, three words of nothing, handles.
        fn chain(&mut self, handles: &[u32]) -> u32 {
            let list = handles.iter().flat_map(|h| [*h, 0]);
            let words: Vec<u32> = [handles.len() as u32, 0, 99, 0, 0, 0].into_iter().chain(list).collect();
            self.packet(19, &words)
        }

        fn execute(&mut self, handle: u32) -> io::Result<Outcome> {
            execute(&mut self.bos, &mut self.context, handle, &self.faults, 1)
        }

        fn word(&mut self, handle: u32, word: usize) -> u32 {
            packet(&mut self.bos, handle).unwrap().0[word]
        }

        fn data(&mut self, i: usize) -> Vec<u8> {
            let mut bytes = vec![0; 64];
            self.bos.read(DATA[i], &mut bytes).unwrap();
            bytes
        }
    }

    #[test]
    fn packets_20_and_21_run_their_instructions() {
        let want: Vec<u8> = (1..=64).collect();
        let mut bench = Bench::new();
        let (first, second) = (bench.npu(CODE[0]), bench.preempt(CODE[1]));
        for (handle, i) in [(first, 1), (second, 2)] {
            assert_ne!(bench.data(i), want, "not yet");
            let outcome = bench.execute(handle).unwrap();
            assert_eq!(outcome.state, State::Completed, "{}", outcome.why);
            assert_eq!((bench.data(i), bench.word(handle, 0) & 0xf), (want.clone(), 4));
        }
        // Too short for what they have to say, and without code.
        for (kind, words) in [(20, &[1, 0, 0, 8][..]), (21, &[1, 0, 0, 0, 0, 0, 0, 8, 0, 0]), (20, &[1, 0, 0, 0, 0])] {
            let handle = bench.packet(kind, words);
            assert_eq!(bench.execute(handle).unwrap().state, State::Error, "{kind} {words:?}");
            assert_eq!(bench.word(handle, 0) & 0xf, 5);
        }
    }

    #[test]
    fn a_chain_runs_in_order_and_ends_at_the_first_that_fails() {
        let want: Vec<u8> = (1..=64).collect();
        let mut bench = Bench::new();
        let links = [bench.npu(CODE[0]), bench.preempt(CODE[1])];
        let chain = bench.chain(&links);
        assert_eq!(bench.execute(chain).unwrap().state, State::Completed);
        assert_eq!((bench.data(1), bench.data(2)), (want.clone(), want.clone()));
        assert_eq!([chain, links[0], links[1]].map(|h| bench.word(h, 0) & 0xf), [4; 3]);

        let mut bench = Bench::new();
        let links = [bench.npu(CODE[0]), bench.npu(DATA[2]), bench.preempt(CODE[1])];
        let chain = bench.chain(&links);
        assert_eq!(bench.execute(chain).unwrap().state, State::Error);
        assert_eq!((bench.word(chain, 0) & 0xf, bench.word(chain, 3)), (5, 1), "the second one");
        // The one before it is done, the one after it is as it was.
        assert_eq!([links[0], links[1], links[2]].map(|h| bench.word(h, 0) & 0xf), [4, 5, 1]);
        assert!(bench.data(1) == want && bench.data(2) != want);

        // A number of commands that is not what the packet holds, and a command that is not there.
        let wrong = bench.packet(19, &[2, 0, 0, 0, 0, 0, links[0], 0]);
        assert_eq!(bench.execute(wrong).err().and_then(|e| e.raw_os_error()), Some(libc::EINVAL));
        let nobody = bench.chain(&[999]);
        assert_eq!(bench.execute(nobody).err().and_then(|e| e.raw_os_error()), Some(libc::ENOENT));
    }
}
