//! The host's kernels: who may run what, and the operations a prefill is made of.
//!
//! * [`blocks`]: weight blocks to integer codes (plain).
//! * [`acts`]: activations as the products want them, rounded and packed in tiles of [`TILE_ROWS`] rows.
//! * [`gemm`]: weight panels decoded on the fly, products of tiles and panels.
//! * [`attention`]: blocked attention with an online softmax.
//! * [`recurrent`]: convolution, gated delta rule and selective scan of recurrent layers.
//! * [`rowops`]: norms, rotary embedding, gated activations, over one row.
//! * [`scalar`], `avx2`, `avx512`, `neon`: the inner loops, one file per instruction set.
//! * [`pool`]: the threads.
//!
//! Loops that a compiler vectorises well stand once, in `lanes`, and are compiled once per instruction set.

pub mod acts;
pub mod attention;
#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_decode;
pub mod blocks;
pub mod gemm;
mod grids;
mod lanes;
mod low_bit;
#[cfg(target_arch = "aarch64")]
pub mod neon;
mod out;
pub mod panel;
pub mod peak;
pub mod pool;
pub mod recurrent;
pub mod rowops;
pub mod scalar;
mod slab;
mod words;

pub use out::Columns;
pub use pool::Pool;
pub use slab::Slab;

use crate::weight::WeightView;
use panel::{CodePanel, FloatPanel};

/// Rows of activations that a kernel works on at once.
pub const TILE_ROWS: usize = 12;
/// Weight rows (outputs) of a panel: the 32-bit lanes of a 512-bit register.
pub const PANEL_COLS: usize = 16;
/// The product of one tile and one panel: `[row][column]`.
pub type TileOut = [[f32; PANEL_COLS]; TILE_ROWS];

/// The instruction sets there are kernels for. Chosen once, by name, and printed.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Isa {
    /// Plain code: the oracle of the others, right everywhere and slow.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL, DQ and VNNI.
    Avx512,
    /// The same with AVX-512 BF16.
    Avx512Bf16,
    /// aarch64 with NEON and the dot-product instructions.
    Neon,
}

impl Isa {
    /// All, best first on processors where all gain ([`Isa::detect`] knows the others).
    pub const ALL: [Isa; 5] = [Isa::Avx512Bf16, Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Scalar];

    /// The best one that this processor has.
    pub fn detect() -> Isa {
        let gains = |isa: &Isa| isa.is_available() && (*isa != Isa::Avx512Bf16 || bf16_gains());
        Isa::ALL.into_iter().find(gains).unwrap_or(Isa::Scalar)
    }

    /// Whether this processor has the instructions.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::Avx2::new().is_some(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::Avx512::new().is_some(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => avx512::Avx512::with_bf16().is_some(),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 => false,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon::Neon::new().is_some(),
            #[cfg(not(target_arch = "aarch64"))]
            Isa::Neon => false,
        }
    }

    /// The kernel's name: architecture, types, variant.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "any-i8f32-scalar",
            Isa::Avx2 => "x86_64-i8f32-avx2",
            Isa::Avx512 => "x86_64-i8f32-avx512vnni",
            Isa::Avx512Bf16 => "x86_64-i8bf16f32-avx512bf16",
            Isa::Neon => "aarch64-i8f32-dotprod",
        }
    }

    /// The instruction set called `name`, as typed on a command line.
    pub fn parse(name: &str) -> Option<Isa> {
        Some(match name {
            "scalar" => Isa::Scalar,
            "avx2" => Isa::Avx2,
            "avx512" => Isa::Avx512,
            "avx512bf16" => Isa::Avx512Bf16,
            "neon" => Isa::Neon,
            _ => return None,
        })
    }
}

/// Whether products of bf16 pairs are faster than those of floats: twice as fast on AMD's Zen 5, half as fast on an Intel Xeon that
/// has them as well (`bench kernels` shows the peaks of both instructions).
fn bf16_gains() -> bool {
    #[cfg(target_arch = "x86_64")]
    return avx512::is_amd();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// The inner loops of one instruction set.
///
/// # Safety
/// A value may only be constructible on a processor that has the instructions: the methods use them unchecked.
pub unsafe trait Kernel: Copy + Send + Sync + Sized + 'static {
    /// The kernel, if this processor can run it.
    fn new() -> Option<Self>;

    /// Decodes rows `first..first + PANEL_COLS` of `w` into `panel` (missing rows as zeros).
    fn decode_codes(self, w: &WeightView<'_>, first: usize, panel: &mut CodePanel);

    /// The same for the float types, as values or in pairs: as the panel was shaped.
    fn decode_floats(self, w: &WeightView<'_>, first: usize, panel: &mut FloatPanel);

    /// Tile times panel, integer codes. `form` is the index of the panel's code form among the tile's.
    fn mul_codes(self, tile: &acts::CodeTile, form: usize, panel: &CodePanel, out: &mut TileOut);

    /// Tile times panel, floats.
    fn mul_floats(self, tile: &acts::FloatTile, panel: &FloatPanel, out: &mut TileOut);

    /// [`Kernel::mul_codes`] with two panels of one shape, where an instruction set gains from a wider product.
    fn mul_code_pair(self, tile: &acts::CodeTile, form: usize, panels: &[CodePanel; 2], out: &mut [TileOut; 2]) {
        for (panel, out) in panels.iter().zip(out) {
            self.mul_codes(tile, form, panel, out);
        }
    }

    /// [`Kernel::mul_floats`] likewise.
    fn mul_float_pair(self, tile: &acts::FloatTile, panels: &[FloatPanel; 2], out: &mut [TileOut; 2]) {
        for (panel, out) in panels.iter().zip(out) {
            self.mul_floats(tile, panel, out);
        }
    }

    /// Whether bf16 numbers are multiplied in pairs, and tiles of them are to be shaped for that.
    fn pairs(self) -> bool {
        false
    }

    /// Rounds row `i` of a tile of floats to its kind, ties to even.
    fn round_row(self, tile: &mut acts::FloatTile, i: usize, row: &[f32]) {
        tile.set_row(i, row);
    }

    /// Rounds row `i` of a tile: blocks of 32 as ggml's `quantize_row_q8_0`, of 256 as its `quantize_row_q8_K`.
    fn quantise_row(self, tile: &mut acts::CodeTile, i: usize, row: &[f32]);

    /// Attention of one tile of query rows (see [`attention`]).
    fn attend(self, task: &attention::Task<'_>, scratch: &mut attention::Scratch, out: &mut [f32]);

    /// Whether it multiplies 16-bit integers so much faster than floats that attention gains by them.
    const WORDS: bool = false;

    /// Runs `f`, compiled for this instruction set where the compiler inlines it: for the loops of [`rowops`].
    fn rows<F: FnOnce() -> R, R>(self, f: F) -> R;
}

/// Calls `$body` with `$kernel` bound to the kernel of `$isa`; the scalar one where the processor lacks it.
#[macro_export]
#[doc(hidden)]
macro_rules! with_kernel {
    ($isa:expr, $kernel:ident => $body:expr) => {{
        #[allow(unused_imports)]
        use $crate::host::Kernel as _;
        match $isa {
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx512 if let Some($kernel) = $crate::host::avx512::Avx512::new() => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx512Bf16 if let Some($kernel) = $crate::host::avx512::Avx512::with_bf16() => $body,
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx2 if let Some($kernel) = $crate::host::avx2::Avx2::new() => $body,
            #[cfg(target_arch = "aarch64")]
            $crate::Isa::Neon if let Some($kernel) = $crate::host::neon::Neon::new() => $body,
            _ => {
                let $kernel = $crate::host::scalar::Scalar;
                $body
            }
        }
    }};
}
