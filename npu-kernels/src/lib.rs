//! The arithmetic of a prefill on this machine's processor: block-quantised matrix products, attention and the row
//! operations between them.
//!
//! Not here: models, GGUF files, key-value layouts. A weight is a byte slice with a [`WeightType`]; which tensor of
//! which model it is, the caller knows.
//!
//! Every operation exists as a plain scalar version ([`Isa::Scalar`]) and as versions for the instruction sets that
//! are found at run time. They compute the same thing: integer products are exact in both, and what is rounded is
//! rounded alike up to the order of sums.
// Loops over rows and lanes index several arrays at once; an iterator over one of them would hide the others.
#![allow(clippy::needless_range_loop)]

pub mod host;
pub mod oracle;
pub mod weight;

pub use host::{Isa, Pool};
pub use weight::{ActKind, WeightType, WeightView};
