//! Why a prefill cannot be, or could not be finished.

use kvlayout::SinkError;

/// Why a model was refused or a run ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file itself is at fault.
    #[error(transparent)]
    Gguf(#[from] gguf::Error),
    /// The model asks for something that is not built: an architecture, a weight type, a variant.
    #[error("{what} is not supported: {hint}")]
    Unsupported {
        /// What the model has.
        what: String,
        /// What is supported instead, or what to do.
        hint: String,
    },
    /// A hyper-parameter is missing, out of range, or contradicts another.
    #[error("key {key:?}: found {found}, wanted {wanted}")]
    Key {
        /// The metadata key.
        key: String,
        /// What the file says.
        found: String,
        /// What a model of this architecture has there.
        wanted: String,
    },
    /// A tensor is missing or has another shape than the hyper-parameters say.
    #[error("tensor {name:?}: found {found}, wanted {wanted}")]
    Tensor {
        /// The tensor's name.
        name: String,
        /// Its shape, or that it is missing.
        found: String,
        /// The shape that the hyper-parameters ask for.
        wanted: String,
    },
    /// A token id that the model has no embedding for.
    #[error("token {index} of the prompt is {id}, but the model's vocabulary has {n_vocab} entries")]
    Token {
        /// Index in the prompt.
        index: usize,
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        n_vocab: u32,
    },
    /// More tokens than the model has vectors for positions.
    #[error("{n_tokens} tokens, but the model has vectors for {positions} positions")]
    TooLong {
        /// Tokens.
        n_tokens: usize,
        /// Positions there are.
        positions: u64,
    },
    /// The computation left the finite numbers; nothing that follows from it is handed over.
    #[error(
        "layer {layer}, position {position}: {what} is not finite (NaN or infinity); the model file is damaged, or its \
         weights overflow"
    )]
    NotFinite {
        /// Model layer.
        layer: u32,
        /// Position in the prompt.
        position: u32,
        /// What was being computed.
        what: &'static str,
    },
    /// The one who takes the rows refused them.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// The threads could not be started.
    #[error(transparent)]
    Pool(#[from] npu_kernels::host::pool::PoolError),
    /// [`crate::Hooks::stop`] said so.
    #[error("stopped")]
    Stopped,
}
