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
