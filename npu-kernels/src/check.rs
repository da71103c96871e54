//! Whether a kernel computes what it says: once before it is used, and again on every product it makes.
//!
//! * [`run`] launches a kernel on a known product and compares every bit with the oracle. Inputs are chosen so that every order
//!   of sums gives the same bits, for the float types as well.
//! * [`launch`] with [`holds`] is the same for less: rows of the result against a random projection, at the cost of reading the
//!   operands once. A wrong row passes with a probability below 2^-30.
//! * [`Probe`] is that projection for one weight. With it a driver checks every product for about what it costs to read it,
//!   so that a device which goes wrong in the middle of a prompt is noticed at the first wrong row.
//!
//! C is poisoned before a launch and has a canary behind it: what is left over, and what is written too far, shows. Inputs are
//! read again afterwards.

use crate::catalogue::{KernelId, Layout, Spec, Type};
use crate::device::{Buffer, Command, Device, DeviceError};
use crate::pack::{self, bfp16, blocked, q4nx};
use crate::{oracle, quant::Int8Weight};
use half::bf16;
use std::fmt;
use std::time::{Duration, Instant};

/// What unused output is filled with.
pub const POISON: u8 = 0xa5;
/// Bytes behind C that no kernel may touch.
pub const CANARY: usize = 4096;
/// How long a check waits for a launch: the driver's own watchdog is at 2 s, and on older kernels at 16.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Numbers that look random and are the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// -most to most.
    fn within(&mut self, most: i64) -> i64 {
        (self.next() >> 33) as i64 % (2 * most + 1) - most
    }
}

/// Operands whose product is known.
pub struct Problem {
    /// A, packed.
    pub a: Vec<u8>,
    /// B, packed.
    pub b: Vec<u8>,
}

impl Problem {
    /// Operands for a kernel. Rows and outputs at the edges hold the largest values there are, of either sign, so that sums
    /// reach their ends; the last row is zeros, as the unused rows of a short block are.
    pub fn new(spec: &Spec, seed: u64) -> Problem {
        let mut random = Random(seed.wrapping_mul(0x5851_f42d_4c95_7f2d) ^ spec.n as u64);
        let (m, k, n) = (spec.m, spec.k, spec.n);
        if spec.is_int8() {
            let mut eight = |i: usize, len: usize, last: bool| -> Vec<i8> {
                match i {
                    0 => vec![127; len],
                    1 => vec![-127; len],
                    _ if last => vec![0; len],
                    _ => (0..len).map(|_| random.within(127) as i8).collect(),
                }
            };
            let a = (0..m).flat_map(|i| eight(i, k, i + 1 == m)).map(i8::cast_unsigned).collect();
            let codes: Vec<i8> = (0..n).flat_map(|j| eight(j, k, false)).collect();
            let mut b = vec![0u8; k * n];
            match spec.b.layout {
                Layout::Blocked64x128 => blocked::pack(&codes, n, k, k, n, &mut b),
                _ => pack::row_major_b(&codes, n, k, k, n, &mut b),
            }
            return Problem { a, b };
        }
        // Small integers: their products add up exactly in f32, in every order.
        let mut small = |most: i64| random.within(most) as f32;
        let a: Vec<f32> = (0..m * k).map(|_| small(8)).collect();
        let a = match spec.a.ty {
            Type::Bfp16 => bfp16::pack(&a, k, bfp16::Round::NearestEven),
            _ => a.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        };
        let b = match spec.b.ty {
            Type::Bfp16 => {
                let b: Vec<f32> = (0..n * k).map(|_| small(8)).collect();
                bfp16::pack(&b, k, bfp16::Round::NearestEven)
            }
            _ => q4nx::pack(
                &(0..n * k)
                    .map(|i| if i % 32 < 2 { (i % 2) as f32 * 15.0 - 8.0 } else { small(7) })
                    .collect::<Vec<_>>(),
                n,
                k,
            ),
        };
        Problem { a, b }
    }
}

/// What was wrong with a launch that completed.
#[derive(Clone, PartialEq, Debug)]
pub enum Wrong {
    /// Elements of the product.
    Elements {
        /// How many are wrong.
        count: usize,
        /// Of how many.
        of: usize,
        /// The first.
        row: usize,
        /// The first.
        column: usize,
        /// What is there.
        found: f64,
        /// What belongs there.
        want: f64,
        /// Whether the first still holds what was there before the launch.
        stale: bool,
    },
    /// A row, by its projection.
    Row {
        /// Which.
        row: usize,
    },
    /// Bytes behind the product were written to.
    Canary {
        /// The first, counted from the end of C.
        at: usize,
    },
    /// An input was written to.
    Input {
        /// `A` or `B`.
        operand: &'static str,
        /// The first byte.
        at: usize,
    },
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wrong::Elements { count, of, row, column, found, want, stale } => {
                let stale = if *stale { ", which is what was there before" } else { "" };
                write!(
                    f,
                    "{count} of {of} elements are wrong, first row {row}, column {column}: {found}{stale}, not {want}"
                )
            }
            Wrong::Row { row } => write!(f, "row {row} of the product is wrong"),
            Wrong::Canary { at } => write!(f, "it wrote behind its output, at byte {at} after the end"),
            Wrong::Input { operand, at } => write!(f, "it wrote into its input {operand}, at byte {at}"),
        }
    }
}

/// Why a kernel did not pass.
#[derive(Clone, PartialEq, Debug)]
pub enum Fault {
    /// The launch itself.
    Device(DeviceError),
    /// Its result.
    Wrong(Wrong),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Device(e) => e.fmt(f),
            Fault::Wrong(w) => w.fmt(f),
        }
    }
}

impl From<DeviceError> for Fault {
    fn from(e: DeviceError) -> Fault {
        Fault::Device(e)
    }
}

/// Buffers for launches of one kernel.
pub struct Room {
    command: Command,
    sizes: [usize; 3],
}

impl Room {
    /// Room for A, B, C and the canary.
    ///
    /// # Errors
    /// No memory, or no device.
    pub fn new(device: &mut dyn Device, kernel: KernelId) -> Result<Room, DeviceError> {
        let sizes = device.kernels()[kernel.0].bytes();
        let mut got: Vec<Buffer> = Vec::with_capacity(3);
        for (bytes, more) in sizes.into_iter().zip([0, 0, CANARY]) {
            match device.alloc(bytes + more) {
                Ok(buffer) => got.push(buffer),
                Err(e) => {
                    got.into_iter().for_each(|b| device.free(b));
                    return Err(e);
                }
            }
        }
        Ok(Room { command: Command { kernel, a: got[0], b: got[1], c: got[2] }, sizes })
    }

    /// The same with a product in this buffer, which has room for it and for the canary ([`Room::product_bytes`]).
    ///
    /// # Errors
    /// No memory, or no device.
    pub fn with_product(device: &mut dyn Device, kernel: KernelId, c: Buffer) -> Result<Room, DeviceError> {
        let mut room = Room::new(device, kernel)?;
        device.free(std::mem::replace(&mut room.command.c, c));
        Ok(room)
    }

    /// Bytes of the product of a kernel, and all that a launch is watched over.
    pub fn product_bytes(spec: &Spec) -> [usize; 2] {
        let c = spec.bytes()[2];
        [c, c + CANARY]
    }

    /// Gives the buffers back.
    pub fn free(self, device: &mut dyn Device) {
        [self.command.a, self.command.b, self.command.c].into_iter().for_each(|b| device.free(b));
    }
}

/// One launch on a problem: the product, and how long the launch took.
///
/// # Errors
/// The launch did not complete, or wrote where it should not.
pub fn launch(device: &mut dyn Device, room: &Room, problem: &Problem) -> Result<(Vec<u8>, Duration), Fault> {
    let Room { command, sizes } = room;
    device.write(command.a, 0, &problem.a)?;
    device.write(command.b, 0, &problem.b)?;
    device.write(command.c, 0, &vec![POISON; sizes[2] + CANARY])?;
    let started = Instant::now();
    let fence = device.submit(command)?;
    device.wait(fence, PATIENCE)?;
    let took = started.elapsed();
    let mut c = vec![0u8; sizes[2] + CANARY];
    device.read(command.c, 0, &mut c)?;
    if let Some(at) = c[sizes[2]..].iter().position(|b| *b != POISON) {
        return Err(Fault::Wrong(Wrong::Canary { at }));
    }
    c.truncate(sizes[2]);
    for (operand, buffer, want) in [("A", command.a, &problem.a), ("B", command.b, &problem.b)] {
        let mut now = vec![0u8; want.len()];
        device.read(buffer, 0, &mut now)?;
        if let Some(at) = now.iter().zip(want).position(|(a, b)| a != b) {
            return Err(Fault::Wrong(Wrong::Input { operand, at }));
        }
    }
    Ok((c, took))
}

/// The first wrong element of a product and how many there are.
pub fn compare(spec: &Spec, found: &[u8], want: &[u8]) -> Result<(), Wrong> {
    let number = |b: &[u8; 4]| match spec.c.ty {
        Type::I32 => f64::from(i32::from_le_bytes(*b)),
        _ => f64::from(f32::from_le_bytes(*b)),
    };
    // 0.0 and -0.0 are one number; everything else has one form.
    let same = |a: &[u8; 4], b: &[u8; 4]| a == b || (spec.c.ty == Type::F32 && number(a) == number(b));
    let (found, want) = (found.as_chunks::<4>().0, want.as_chunks::<4>().0);
    let wrong = || found.iter().zip(want).enumerate().filter(|(_, (a, b))| !same(a, b));
    let Some((at, (a, b))) = wrong().next() else { return Ok(()) };
    Err(Wrong::Elements {
        count: wrong().count(),
        of: want.len(),
        row: at / spec.n,
        column: at % spec.n,
        found: number(a),
        want: number(b),
        stale: *a == [POISON; 4],
    })
}

/// Launches a kernel on the problem of `seed` and compares every bit with the oracle. Returns the time of the launch.
///
/// # Errors
/// What is wrong.
pub fn run(device: &mut dyn Device, kernel: KernelId, seed: u64) -> Result<Duration, Fault> {
    let spec = device.kernels()[kernel.0].clone();
    let room = Room::new(device, kernel)?;
    let problem = Problem::new(&spec, seed);
    let result = launch(device, &room, &problem);
    room.free(device);
    let (c, took) = result?;
    compare(&spec, &c, &oracle::gemm(&spec, &problem.a, &problem.b)).map_err(Fault::Wrong)?;
    Ok(took)
}

/// What a kernel has to pass before a driver uses it: two launches on different problems, so that an answer that is kept from
/// one to the next shows.
///
/// # Errors
/// What is wrong.
pub fn self_test(device: &mut dyn Device, kernel: KernelId) -> Result<(), Fault> {
    let spec = device.kernels()[kernel.0].clone();
    let room = Room::new(device, kernel)?;
    let mut all = || {
        for seed in [1, 2] {
            let problem = Problem::new(&spec, seed);
            let (c, _) = launch(device, &room, &problem)?;
            holds(&spec, &problem, &c).map_err(Fault::Wrong)?;
        }
        Ok(())
    };
    let result = all();
    room.free(device);
    result
}

/// Whether `c` is the product: by projection where products are integers, else by the oracle.
///
/// # Errors
/// What is wrong.
pub fn holds(spec: &Spec, problem: &Problem, c: &[u8]) -> Result<(), Wrong> {
    if !spec.is_int8() {
        return compare(spec, c, &oracle::gemm(spec, &problem.a, &problem.b));
    }
    let (k, n) = (spec.k, spec.n);
    let codes = match spec.b.layout {
        Layout::Blocked64x128 => blocked::unpack(&problem.b, n, k, k, n),
        _ => pack::unpack_row_major_b(&problem.b, n, k, k, n),
    };
    let probe = Probe::new(&Int8Weight { k, codes, scales: vec![1.0; n] });
    let a: Vec<i8> = problem.a.iter().map(|b| b.cast_signed()).collect();
    let rows = a.chunks_exact(k).zip(c.chunks_exact(4 * n));
    match rows.enumerate().find(|(_, (a, c))| !probe.holds(a, c)) {
        Some((row, _)) => Err(Wrong::Row { row }),
        None => Ok(()),
    }
}

/// A weight B times a random vector x. For every row a of activations `(a · B) · x = a · (B · x)`, in integers modulo 2^64; a
/// row of a product for which this is not so is wrong, and one that is wrong agrees by accident with a probability below
/// 2^-30, since the components of x have 31 random bits.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Probe {
    /// `[n]`.
    x: Vec<i32>,
    /// `[k]`: B · x.
    bx: Vec<i64>,
}

impl Probe {
    /// The projection of a weight.
    pub fn new(weight: &Int8Weight) -> Probe {
        let x = Probe::vector(weight.n());
        let mut bx = vec![0i64; weight.k];
        for (row, x) in weight.codes.chunks_exact(weight.k.max(1)).zip(&x) {
            // 38 bits a term and at most 2^18 terms.
            bx.iter_mut().zip(row).for_each(|(sum, b)| *sum += i64::from(*b) * i64::from(*x));
        }
        Probe { x, bx }
    }

    /// A projection whose sums were kept.
    pub fn with_sums(n: usize, bx: Vec<i64>) -> Probe {
        Probe { x: Probe::vector(n), bx }
    }

    /// `[k]`.
    pub fn sums(&self) -> &[i64] {
        &self.bx
    }

    fn vector(n: usize) -> Vec<i32> {
        let mut random = Random(0x0b5e_55ed ^ n as u64);
        (0..n).map(|_| (random.next() >> 33) as i32).collect()
    }

    /// Whether `c` (little-endian i32, at least `n` of them) is `a` (at least `k`) times the weight.
    pub fn holds(&self, a: &[i8], c: &[u8]) -> bool {
        let left = c.as_chunks::<4>().0.iter().zip(&self.x);
        let left = left.fold(0i64, |s, (c, x)| s.wrapping_add(i64::from(i32::from_le_bytes(*c)) * i64::from(*x)));
        let right = a.iter().zip(&self.bx).fold(0i64, |s, (a, b)| s.wrapping_add(b.wrapping_mul(i64::from(*a))));
        left == right
    }
}
