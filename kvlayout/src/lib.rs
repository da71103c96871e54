//! The decoder's memory, byte by byte: what a llama.cpp sequence-state file looks like, where the keys and values of a
//! layer lie in it, how to fill one without anyone seeing half of it, and how to read, judge and compare such files.
//!
//! Three parts that share only the vocabulary of [`spec`](KvSpec):
//!
//! * **Writing.** [`KvMap::state_file`] computes, before a byte is written, where everything will lie; [`Scatter`] takes
//!   rows of f32 from a prefill and puts them there, over any [`ByteSpace`]: memory ([`MemSpace`]) or a file that appears
//!   whole or not at all ([`StateFile`]).
//! * **Reading.** [`State::parse`] takes any bytes apart into fields, [`State::write`] puts them together again to the
//!   same bytes, [`faults`] names what is wrong with a state, including what a server would swallow, and [`compare`]
//!   measures how far two states are apart. The reader shares no layout code with the map, so that one can prove the
//!   other.
//! * **Sharing.** [`ShareLayout`] is where a decoder's live memory keeps its tensors, [`Header`] what a decoder says of it,
//!   [`KvMap::shared`] the map over it; [`Inherited`] takes over descriptors, and [`Regions`] is the byte space over them:
//!   raw copies only, as long as a [`Guard`] allows.
//!
//! The crate knows no model files, computes nothing and prints nothing.
#![deny(unsafe_code)]

mod cache_type;
pub mod compare;
mod convert;
pub mod faults;
mod file;
mod header;
mod inherit;
mod map;
mod map_shared;
mod quantise;
mod region;
mod rotate;
mod scatter;
mod share;
mod space;
mod spec;
mod state;

pub use cache_type::{CacheType, UnknownCacheType};
pub use file::{CreateError, StateFile};
pub use header::{HEADER_MAX, Header, HeaderError, HeaderTensor, ShareParams, ShareRefusal};
pub use inherit::{FdKind, InheritError, Inherited, MAX_FDS, parse_fds};
pub use map::{KvMap, Refusal, Window};
pub use region::{Guard, Mapping, RegionError, Regions, Stopped, Touched, check_fds};
pub use rotate::{hadamard, rotation_widths};
pub use scatter::{KvSink, Receipt, Rows, Scatter, SinkError, magnitude};
pub use share::{
    CELL_STEP, DEFAULT_UBATCH, SHARE_ALIGN, SHARE_CHUNK, ShareLayout, ShareRegion, ShareTensor, padded_ctx,
};
pub use space::{Alone, ByteSpace, Make, MemSpace, Put, Spread};
pub use spec::{KvSection, KvSpec, LayerKv, LayerRec, Order, Part, RecSection, StateVersion, UnsupportedVersion};
pub use state::{
    Appendix, Cell, Checkpoint, Field, Kv, KvShape, ParseError, Place, Rec, RecCell, RecShape, RowsError, Section,
    SectionShape, Shape, State, Stream, Tensor, TokenForm, read_version,
};
