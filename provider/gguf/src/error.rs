//! What can be wrong with a GGUF file, told so that the place can be found.

use std::{fmt, io, path::PathBuf};

use crate::GgmlType;

/// Why a file could not be opened or read, or blocks not be decoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused; `source` tells a missing file from one that may not be read.
    #[error("{}: {doing}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was being done to it.
        doing: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The bytes are not those of a whole GGUF file.
    #[error("{file}: at byte {offset}: {what}: wanted {want}, found {found}")]
    Format {
        /// The file's name.
        file: String,
        /// Where in the file the offending field begins.
        offset: u64,
        /// The field, with the key or tensor it belongs to.
        what: String,
        /// What a good file has there.
        want: String,
        /// What this one has.
        found: String,
    },
    /// The file is sound as far as read, but of a kind that is not read here: a version, a byte order, a tensor type.
    #[error("{file}: at byte {offset}: {what} is {found}, which is not supported: {hint}")]
    Unsupported {
        /// The file's name.
        file: String,
        /// Where in the file the field begins.
        offset: u64,
        /// The field.
        what: String,
        /// What it says, by name.
        found: String,
        /// What to do about it.
        hint: &'static str,
    },
    /// A key is missing, or its value is of the wrong type or out of range.
    #[error("{file}: key {key:?}: wanted {want}, found {found}")]
    Key {
        /// The file's name.
        file: String,
        /// The key.
        key: String,
        /// The type or range that was asked for.
        want: String,
        /// The value there is.
        found: String,
    },
    /// A tensor is missing.
    #[error("{file}: no tensor {name:?} {}", among(*count))]
    NoTensor {
        /// The file's name.
        file: String,
        /// The tensor that was asked for.
        name: String,
        /// How many tensors there are.
        count: usize,
    },
    /// A model that comes in several files lacks some of them.
    #[error("{file}: a model in {count} files, of which {} missing: {}", are(missing.len()), list(missing))]
    MissingShard {
        /// The shard that was opened.
        file: String,
        /// How many shards the model has.
        count: u64,
        /// Where the missing ones were looked for.
        missing: Vec<PathBuf>,
    },
    /// The shards of a model contradict their names or each other.
    #[error("{file}: {what}: wanted {want}, found {found}")]
    Split {
        /// The shard at fault.
        file: String,
        /// What does not fit.
        what: String,
        /// What the name or the other shards say.
        want: String,
        /// What this shard says.
        found: String,
    },
    /// Encoded bytes and room for values do not match.
    #[error("{ty} blocks: wanted {want}, found {found}")]
    Blocks {
        /// The type of the blocks.
        ty: GgmlType,
        /// The number that would fit.
        want: String,
        /// The number given.
        found: String,
    },
    /// There is no dequantiser for this type.
    #[error("{ty} (ggml type {}) can not be dequantised here; supported are {}", ty.id(), crate::dequant::names())]
    NoDequantizer {
        /// The type.
        ty: GgmlType,
    },
    /// What was given to the writer can not be written.
    #[error("writing GGUF: {what}: wanted {want}, found {found}")]
    Write {
        /// The key or tensor.
        what: String,
        /// What can be written.
        want: String,
        /// What was given.
        found: String,
    },
}

fn among(count: usize) -> String {
    if count == 0 { "nor any other (a vocabulary without weights?)".to_owned() } else { format!("among {count}") }
}

fn are(n: usize) -> String {
    if n == 1 { "1 is".to_owned() } else { format!("{n} are") }
}

fn list(paths: &[PathBuf]) -> String {
    const SHOWN: usize = 4;
    let mut out = paths.iter().take(SHOWN).map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ");
    if paths.len() > SHOWN {
        out.push_str(", ...");
    }
    out
}

/// Text from a file as it may stand in a message: quoted, escaped, and not longer than a line.
pub(crate) struct Shown<'a>(pub &'a [u8]);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MOST: usize = 72;
        let cut = &self.0[..self.0.len().min(MOST)];
        write!(f, "\"{}", String::from_utf8_lossy(cut).escape_debug())?;
        f.write_str(if cut.len() < self.0.len() { "...\"" } else { "\"" })
    }
}
