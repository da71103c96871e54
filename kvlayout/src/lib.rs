//! The decoder's memory, byte by byte: what a llama.cpp sequence-state file looks like, where the keys and values of a
//! layer lie in it, how to fill one without anyone seeing half of it, and how to read, judge and compare such files.
//!
//! Two halves that share only the vocabulary of [`spec`](KvSpec):
//!
//! * **Writing.** [`KvMap::state_file`] computes, before a byte is written, where everything will lie; [`Scatter`] takes
//!   rows of f32 from a prefill and puts them there, over any [`ByteSpace`]: memory ([`MemSpace`]) or a file that appears
//!   whole or not at all ([`StateFile`]).
//! * **Reading.** [`State::parse`] takes any bytes apart into fields, [`State::write`] puts them together again to the
//!   same bytes, [`faults`] names what is wrong with a state, including what a server would swallow, and [`compare`]
//!   measures how far two states are apart. The reader shares no layout code with the map, so that one can prove the
//!   other.
//!
//! The crate knows no model files, computes nothing and prints nothing.
#![forbid(unsafe_code)]

mod cache_type;
pub mod compare;
pub mod faults;
mod file;
mod map;
mod scatter;
mod space;
mod spec;
mod state;

pub use cache_type::{CacheType, UnknownCacheType};
pub use file::{CreateError, StateFile};
pub use map::{KvMap, Refusal, Window};
pub use scatter::{KvSink, Receipt, Scatter, SinkError};
pub use space::{ByteSpace, MemSpace};
pub use spec::{KvSection, KvSpec, LayerKv, Order, Part, StateVersion, UnsupportedVersion};
pub use state::{
    Appendix, Cell, Checkpoint, Field, Kv, KvShape, ParseError, Place, Rec, RecCell, RowsError, Section, SectionShape,
    Shape, State, Stream, Tensor, TokenForm, read_version,
};
