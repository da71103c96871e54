//! The prefill itself: a model and a prompt's tokens in, keys and values out.
//!
//! * [`arch`]: what an architecture is, as a table.
//! * [`Spec`]: one model's numbers, read from its metadata and checked.
//! * [`layer`]: the kinds of mixers and feed-forward networks that layers are made of.
//! * [`weights`]: its tensors, checked against the numbers; every tensor of the file must be accounted for.
//! * [`Plan`]: what will be computed for a prompt, as data.
//! * [`run`]: the plan, carried out on the host's kernels; [`run_on`]: with matrix products on a device beside it.
//! * [`Offload`], [`place`]: what such a device does of it, and why.
//!
//! Nothing here knows a file, a descriptor or a path: rows go to a [`KvSink`]. Logits are never computed, and of the
//! last layer only keys and values are.
#![forbid(unsafe_code)]

pub mod arch;
mod argsort;
mod error;
mod exec;
pub mod layer;
mod model;
mod offload;
mod place;
mod plan;
pub mod rope;
pub mod route;
mod spec;
pub mod weights;

pub use error::Error;
pub use exec::{Hooks, Options, Timings, run, run_on};
pub use kvlayout::KvSink;
pub use model::{CacheParams, Model};
pub use npu_kernels::Isa;
pub use offload::{Offload, PackStore, Usage};
pub use place::{Place, Where, place};
pub use plan::{Command, Half, Op, Plan, Work};
pub use spec::{LayerSpec, Spec};
