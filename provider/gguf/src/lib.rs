//! A lazy, checked view of GGUF model files.
//!
//! A GGUF file is a header, a list of typed keys, a list of tensor descriptions and the tensors' bytes. [`Gguf::open`]
//! maps the file, walks the first three once - every length against the bytes that are left, remembering where each value
//! lies without decoding it - and hands out borrowed views: [`Value`], [`Array`], [`Tensor`]. A vocabulary of 150,000
//! entries costs a walk over their lengths and no allocation, which matters to a program that is started per request.
//!
//! ```
//! use gguf::{GgmlType, Gguf, write::Writer};
//!
//! let mut w = Writer::new("llama");
//! w.u32("llama.block_count", 1);
//! w.array_str("tokenizer.ggml.tokens", &["<s>", "hello"]);
//! w.tensor("output_norm.weight", GgmlType::F32, &[2], [1.0f32, 0.5].iter().flat_map(|v| v.to_le_bytes()).collect())?;
//!
//! let model = Gguf::from_bytes("example", w.finish())?;
//! assert_eq!(model.u32("llama.block_count")?, Some(1));
//! assert_eq!(model.u32("llama.context_length")?, None);
//! assert_eq!(model.array("tokenizer.ggml.tokens")?.map(|a| a.len()), Some(2));
//! assert_eq!(model.need_tensor("output_norm.weight")?.to_f32()?, [1.0, 0.5]);
//! # Ok::<(), gguf::Error>(())
//! ```
//!
//! What is accepted:
//! - GGUF 2 and 3, little-endian. GGUF 1, big-endian files and the formats before GGUF are refused by name.
//! - Whole models and split ones (`NAME-00001-of-00003.gguf`; any of the shards may be given). Keys are those of the first
//!   shard, as in llama.cpp.
//! - Every tensor type of ggml up to id 42 ([`GgmlType`]). A tensor of an unknown type, or of one that ggml has removed, is
//!   refused when the file is opened, by name.
//!
//! What is checked, where llama.cpp checks it too: key and tensor names are unique and not empty, dimensions multiply
//! without wrapping, rows are whole blocks, tensors follow each other at `general.alignment` without gap or overlap, and all
//! of them lie inside the file. Nothing is ever allocated by a count that the file merely claims; [`Limits`] bounds the
//! counts as well. Every [`Error`] names the file and the byte offset or the key, what was wanted and what was found.
//!
//! Not here: what keys mean (that depends on the architecture and belongs to who reads the model), fast kernels
//! ([`dequant`] is the scalar reference), and writing of large models ([`mod@write`] builds a file in memory, for fixtures).

pub mod dequant;
mod error;
mod grids;
mod low_bit;
mod mapped;
mod model;
mod parse;
mod types;
mod value;
pub mod write;

pub use error::Error;
pub use model::{Gguf, Tensor, TypeCount};
pub use parse::Limits;
pub use types::{GgmlType, UnknownType};
pub use value::{Array, Value, ValueType};
