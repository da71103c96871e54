//! The arithmetic of a prefill: on this machine's processor block-quantised matrix products, attention and the row
//! operations between them; on a device products by catalogued kernels.
//!
//! * [`host`]: the processor's kernels, which everything else is compared with through [`oracle`].
//! * [`device`]: the trait behind which an NPU is, or something that plays one: [`cpu_device`], [`fake`].
//! * [`catalogue`], [`manifest`]: which kernels there are, and the directory they come from.
//! * [`quant`], [`pack`], [`packed`]: numbers as those kernels want them.
//! * [`check`]: whether a kernel computes what it says.
//!
//! Not here: models, GGUF files, key-value layouts. A weight is a byte slice with a [`WeightType`]; which tensor of
//! which model it is, the caller knows.
//!
//! Every operation exists as a plain scalar version ([`Isa::Scalar`]) and as versions for the instruction sets that
//! are found at run time. They compute the same thing: integer products are exact in both, and what is rounded is
//! rounded alike up to the order of sums.
// Loops over rows and lanes index several arrays at once; an iterator over one of them would hide the others.
#![allow(clippy::needless_range_loop)]

pub mod catalogue;
pub mod check;
pub mod cpu_device;
pub mod device;
pub mod fake;
pub mod host;
pub mod manifest;
pub mod oracle;
pub mod pack;
pub mod packed;
pub mod quant;
pub mod weight;

pub use catalogue::{Catalogue, KernelId, Spec};
pub use device::{Command, Device, DeviceError, DeviceInfo, Support};
pub use host::{Isa, Pool};
pub use weight::{ActKind, WeightType, WeightView};
