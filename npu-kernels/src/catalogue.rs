//! The kernels there are: what each computes, how its operands lie, which files it is.
//!
//! No kernel comes with this project, so a directory of kernels is the user's, and what it says of itself is checked: names and
//! numbers here, files by their hashes ([`manifest`](crate::manifest)), arithmetic by running ([`check`](crate::check)).

use crate::pack::{bfp16, blocked, q4nx};
use crate::quant;
use std::fmt;
use std::path::PathBuf;

/// A kernel's place in its catalogue.
#[derive(Copy, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct KernelId(pub usize);

/// The type of an operand's numbers.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Type {
    /// 8-bit integers.
    I8,
    /// 32-bit integers.
    I32,
    /// bfloat16.
    Bf16,
    /// Single precision.
    F32,
    /// 4-bit codes with a bf16 scale and zero for every 32 inputs.
    Q4nx,
    /// Blocks of 8 that share an exponent.
    Bfp16,
}

/// How an operand lies in memory; see [`pack`](crate::pack).
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Layout {
    /// `[rows][columns]`; B is `[K][N]`.
    RowMajor,
    /// Tiles of 64 × 128.
    Blocked64x128,
    /// Q4NX tiles.
    Q4nxTiles,
    /// Blocks along K: A `[M][K]`, B `[N][K]`.
    Bfp16Blocks,
}

/// How a kernel rounds what it cannot represent.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Rounding {
    /// Nothing is rounded: integers.
    Exact,
    /// To nearest, halves to even.
    NearestEven,
    /// Towards minus infinity, the array's default.
    Floor,
}

macro_rules! words {
    ($type:ty: $($name:literal = $value:path),+ $(,)?) => {
        impl $type {
            /// Every name, as a manifest spells it.
            pub const NAMES: &[&str] = &[$($name),+];
            /// The one of this name.
            pub fn parse(name: &str) -> Option<Self> {
                match name {
                    $($name => Some($value),)+
                    _ => None,
                }
            }
        }
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($value => $name,)+ })
            }
        }
    };
}

words!(Type: "i8" = Type::I8, "i32" = Type::I32, "bf16" = Type::Bf16, "f32" = Type::F32, "q4nx" = Type::Q4nx,
    "bfp16ebs8" = Type::Bfp16);
words!(Layout: "row-major" = Layout::RowMajor, "blocked-64x128" = Layout::Blocked64x128, "q4nx-tiles" = Layout::Q4nxTiles,
    "bfp16-blocks" = Layout::Bfp16Blocks);
words!(Rounding: "exact" = Rounding::Exact, "nearest-even" = Rounding::NearestEven, "floor" = Rounding::Floor);

/// One operand.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct Operand {
    /// Of which numbers.
    pub ty: Type,
    /// In which order.
    pub layout: Layout,
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.ty, self.layout)
    }
}

/// The files of a kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Files {
    /// A full ELF: configuration, instructions and arguments in one.
    FullElf(KernelFile),
    /// An xclbin and the instructions that drive it.
    Xclbin {
        /// The configuration.
        xclbin: KernelFile,
        /// The instruction words, little-endian.
        insts: KernelFile,
    },
    /// None: computed by this program itself. Only its own devices have such.
    BuiltIn,
}

/// A file, with the hash that it had when it was read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KernelFile {
    /// Where it is.
    pub path: PathBuf,
    /// Of its bytes, in lower-case hexadecimal digits.
    pub sha256: String,
}

impl Files {
    /// `full-elf`, `xclbin+insts` or `built-in`.
    pub fn kind(&self) -> &'static str {
        match self {
            Files::FullElf(_) => "full-elf",
            Files::Xclbin { .. } => "xclbin+insts",
            Files::BuiltIn => "built-in",
        }
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &KernelFile> {
        let (a, b) = match self {
            Files::FullElf(file) => (Some(file), None),
            Files::Xclbin { xclbin, insts } => (Some(xclbin), Some(insts)),
            Files::BuiltIn => (None, None),
        };
        a.into_iter().chain(b)
    }
}

/// One kernel: `C[m][n] = A[m][k] · B[k][n]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spec {
    /// What it is called here: the file's name, or what the manifest calls it.
    pub name: String,
    /// Its files.
    pub files: Files,
    /// The name of the kernel within them, `KERNEL:instance` for a full ELF.
    pub kernel: String,
    /// For which projections it was made (`QKV`, `O`, `GU`, `G`, `U`, `D`); any of the same shape computes the same.
    pub roles: Vec<String>,
    /// Places of A, B and C among the kernel's buffer arguments.
    pub args: [usize; 3],
    /// Rows.
    pub m: usize,
    /// Inputs.
    pub k: usize,
    /// Outputs.
    pub n: usize,
    /// Activations.
    pub a: Operand,
    /// Weights.
    pub b: Operand,
    /// The product.
    pub c: Operand,
    /// How it rounds.
    pub rounding: Rounding,
}

/// Rows of every kernel of the int8 contract.
pub const CONTRACT_M: usize = 128;
/// Inputs and outputs of a kernel of the int8 contract are multiples of this.
pub const CONTRACT_STEP: usize = 128;
/// No dimension of a kernel is larger: the largest models have some 150,000.
pub const MAX_DIMENSION: usize = 1 << 18;
/// No operand is larger.
pub const MAX_OPERAND_BYTES: usize = 1 << 30;

impl Spec {
    /// A kernel of the int8 contract as its name describes it, without files.
    pub fn int8(name: &str, role: &str, k: usize, n: usize) -> Spec {
        let i8_rows = Operand { ty: Type::I8, layout: Layout::RowMajor };
        Spec {
            name: name.to_owned(),
            files: Files::BuiltIn,
            kernel: "main:seq".to_owned(),
            roles: vec![role.to_owned()],
            args: [0, 1, 2],
            m: CONTRACT_M,
            k,
            n,
            a: i8_rows,
            b: i8_rows,
            c: Operand { ty: Type::I32, layout: Layout::RowMajor },
            rounding: Rounding::Exact,
        }
    }

    /// Whether it is one that multiplies int8 and adds up exactly: what the prefill driver uses.
    pub fn is_int8(&self) -> bool {
        (self.a.ty, self.b.ty, self.c.ty) == (Type::I8, Type::I8, Type::I32)
    }

    /// Bytes of A, B and C.
    pub fn bytes(&self) -> [usize; 3] {
        let size = |operand: &Operand, rows: usize, columns: usize| match operand.ty {
            Type::I8 => rows * columns,
            Type::Bf16 => rows * columns * 2,
            Type::I32 | Type::F32 => rows * columns * 4,
            Type::Q4nx => rows * columns / (q4nx::TILE_N * q4nx::TILE_K) * q4nx::TILE_BYTES,
            Type::Bfp16 => rows * columns / bfp16::BLOCK * bfp16::BLOCK_BYTES,
        };
        [size(&self.a, self.m, self.k), size(&self.b, self.k, self.n), size(&self.c, self.m, self.n)]
    }

    /// Bytes that a launch moves between memory and the array.
    pub fn streamed(&self) -> u64 {
        self.bytes().iter().map(|b| *b as u64).sum()
    }

    /// Multiplications and additions of a launch.
    pub fn ops(&self) -> u64 {
        2 * self.m as u64 * self.k as u64 * self.n as u64
    }

    /// What is wrong with its numbers, if anything: a catalogue holds none of which this is not `Ok`.
    ///
    /// # Errors
    /// A sentence.
    pub fn sound(&self) -> Result<(), String> {
        for (what, value) in [("m", self.m), ("k", self.k), ("n", self.n)] {
            if value == 0 || value > MAX_DIMENSION {
                return Err(format!("{what} = {value}: it is 1 to {MAX_DIMENSION}"));
            }
        }
        use Layout as L;
        use Type as T;
        let pair = |o: &Operand| (o.ty, o.layout);
        let known = match (pair(&self.a), pair(&self.b), pair(&self.c)) {
            ((T::I8, L::RowMajor), (T::I8, L::RowMajor), (T::I32, L::RowMajor)) => true,
            ((T::I8, L::RowMajor), (T::I8, L::Blocked64x128), (T::I32, L::RowMajor)) => {
                self.steps(blocked::TILE_K, blocked::TILE_N)?;
                true
            }
            ((T::Bf16, L::RowMajor), (T::Q4nx, L::Q4nxTiles), (T::F32, L::RowMajor)) => {
                self.steps(q4nx::TILE_K, q4nx::TILE_N)?;
                true
            }
            ((T::Bfp16, L::Bfp16Blocks), (T::Bfp16, L::Bfp16Blocks), (T::F32, L::RowMajor)) => {
                self.steps(bfp16::BLOCK, 1)?;
                true
            }
            _ => false,
        };
        if !known {
            return Err(format!(
                "a is {}, b is {}, c is {}: known are int8 with row-major or blocked-64x128 b and i32 c, bf16 with q4nx-tiles \
                 b and f32 c, and bfp16-blocks with f32 c",
                self.a, self.b, self.c
            ));
        }
        if self.is_int8() && self.k > quant::MAX_K {
            return Err(format!("k = {}: from {} on, sums of int8 products leave 32 bits", self.k, quant::MAX_K + 1));
        }
        if self.is_int8() != (self.rounding == Rounding::Exact) {
            return Err(format!("rounding is {}: int8 products are exact, and only they are", self.rounding));
        }
        if let Some(bytes) = self.bytes().into_iter().find(|b| *b > MAX_OPERAND_BYTES) {
            return Err(format!("an operand of {bytes} bytes: at most {MAX_OPERAND_BYTES} are supported"));
        }
        let mut args = self.args;
        args.sort_unstable();
        if args != [0, 1, 2] {
            return Err("args: a, b and c, each once".to_owned());
        }
        Ok(())
    }

    fn steps(&self, k: usize, n: usize) -> Result<(), String> {
        if self.k.is_multiple_of(k) && self.n.is_multiple_of(n) {
            return Ok(());
        }
        Err(format!("b is {}: k = {} and n = {} have to be multiples of {k} and {n}", self.b, self.k, self.n))
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} x {} x {}, {} b)", self.name, self.m, self.k, self.n, self.b)
    }
}

/// Role, K and N in a name of the form `full_i8_<ROLE>_K<K>_N<N>.elf`; `None` where it has another.
///
/// # Errors
/// It has that form and numbers that no kernel of the contract has.
pub fn parse_name(file: &str) -> Option<Result<(String, usize, usize), String>> {
    let body = file.strip_prefix("full_i8_")?.strip_suffix(".elf")?;
    let (rest, n) = body.rsplit_once("_N")?;
    let (role, k) = rest.rsplit_once("_K")?;
    if role.is_empty() || !role.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        return None;
    }
    let number = |digits: &str| {
        let plain = digits.len() <= 9 && digits.bytes().all(|b| b.is_ascii_digit()) && !digits.starts_with('0');
        plain.then(|| digits.parse::<usize>().ok()).flatten()
    };
    let (Some(k), Some(n)) = (number(k), number(n)) else {
        return Some(Err("K and N are numbers without leading zeros".to_owned()));
    };
    let step = CONTRACT_STEP;
    if !k.is_multiple_of(step) || !n.is_multiple_of(step) {
        return Some(Err(format!("K = {k} and N = {n} have to be multiples of {step}")));
    }
    Some(Ok((role.to_owned(), k, n)))
}

/// The kernels of a device.
#[derive(Clone, Debug, Default)]
pub struct Catalogue {
    kernels: Vec<Spec>,
    /// What was passed over, and why; one line each.
    pub notes: Vec<String>,
}

impl Catalogue {
    /// A catalogue of these.
    ///
    /// # Errors
    /// What is wrong with the first that is not sound.
    pub fn new(kernels: Vec<Spec>) -> Result<Catalogue, String> {
        for kernel in &kernels {
            kernel.sound().map_err(|e| format!("{}: {e}", kernel.name))?;
        }
        Ok(Catalogue { kernels, notes: Vec::new() })
    }

    /// All of them, in order.
    pub fn kernels(&self) -> &[Spec] {
        &self.kernels
    }

    /// All of them, taken out.
    pub fn into_kernels(self) -> Vec<Spec> {
        self.kernels
    }
}

/// Which of `kernels` to use for a product of `k` inputs and `n` outputs: of those that are `usable` and large enough the one
/// that streams fewest bytes for each row, the first of several. Padding is zeros, which change no integer.
///
/// # Errors
/// Why there is none.
pub fn choose(kernels: &[Spec], k: usize, n: usize, usable: impl Fn(KernelId) -> bool) -> Result<KernelId, String> {
    let fits = |s: &Spec| s.is_int8() && s.k >= k && s.n >= n;
    let best = kernels
        .iter()
        .enumerate()
        .filter(|(i, s)| fits(s) && wasteless(s, k, n) && usable(KernelId(*i)))
        .min_by_key(|(i, s)| (s.streamed() / s.m as u64, s.m, *i));
    if let Some((i, _)) = best {
        return Ok(KernelId(i));
    }
    let named = |s: &Spec| format!("{} x {}", s.k, s.n);
    Err(match kernels.iter().enumerate().find(|(_, s)| fits(s) && wasteless(s, k, n)) {
        Some((_, s)) => format!("kernel {} is out of use", s.name),
        None => match kernels.iter().filter(|s| fits(s)).min_by_key(|s| s.streamed()) {
            Some(s) => format!("no kernel for {k} x {n}; {} of {} would be mostly padding", s.name, named(s)),
            None => format!("no kernel for {k} x {n}"),
        },
    })
}

/// A product that is at least half of a kernel's work.
fn wasteless(s: &Spec, k: usize, n: usize) -> bool {
    s.k * s.n <= 2 * k.next_multiple_of(CONTRACT_STEP) * n.next_multiple_of(CONTRACT_STEP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_contract() {
        let ok = |name| parse_name(name).unwrap().unwrap();
        assert_eq!(ok("full_i8_QKV_K640_N1024.elf"), ("QKV".into(), 640, 1024));
        assert_eq!(ok("full_i8_G_U_K128_N128.elf"), ("G_U".into(), 128, 128));
        for other in
            ["readme.md", "full_i8_.elf", "full_i8__K128_N128.elf", "full_i4_O_K128_N128.elf", "full_i8_O_K128.elf"]
        {
            assert!(parse_name(other).is_none(), "{other}");
        }
        for wrong in [
            "full_i8_O_K100_N128.elf",
            "full_i8_O_K0_N128.elf",
            "full_i8_O_K128_N.elf",
            "full_i8_O_K-1_N128.elf",
            "full_i8_O_K99999999999999999999_N128.elf",
            "full_i8_O_K0128_N128.elf",
        ] {
            assert!(parse_name(wrong).unwrap().is_err(), "{wrong}");
        }
    }

    #[test]
    fn unsound_kernels() {
        let good = Spec::int8("x", "O", 640, 640);
        assert_eq!(good.sound(), Ok(()));
        assert_eq!(good.bytes(), [128 * 640, 640 * 640, 128 * 640 * 4]);
        type Change = fn(&mut Spec);
        let changes: [(Change, &str); 7] = [
            (|s| s.m = 0, "m = 0"),
            (|s| s.k = 1 << 30, "k = 1073741824"),
            (|s| s.k = 133_248, "leave 32 bits"),
            (|s| s.c.ty = Type::F32, "c is f32"),
            (|s| s.rounding = Rounding::Floor, "rounding is floor"),
            (|s| s.args = [0, 1, 1], "args"),
            (
                |s| {
                    s.b.layout = Layout::Blocked64x128;
                    s.n = 64
                },
                "multiples of 64 and 128",
            ),
        ];
        for (change, word) in changes {
            let mut spec = good.clone();
            change(&mut spec);
            let e = spec.sound().unwrap_err();
            assert!(e.contains(word), "{e}");
        }
    }

    #[test]
    fn the_smallest_that_covers() {
        let kernels = [
            Spec::int8("wide", "GU", 640, 3072),
            Spec::int8("d", "D", 1536, 640),
            Spec::int8("q", "Q", 640, 640),
            Spec::int8("o", "O", 640, 640),
        ];
        let pick = |k, n| choose(&kernels, k, n, |_| true);
        assert_eq!(pick(576, 576), Ok(KernelId(2)), "the first of the same size");
        assert_eq!(pick(576, 3072), Ok(KernelId(0)));
        assert_eq!(pick(576, 384), Ok(KernelId(2)), "padding of less than half");
        assert!(pick(576, 64).unwrap_err().contains("mostly padding"));
        assert!(pick(5760, 64).unwrap_err().contains("no kernel for 5760 x 64"));
        let e = choose(&kernels, 576, 576, |id| id.0 < 2).unwrap_err();
        assert!(e.contains("q is out of use"), "{e}");
    }
}
