//! Plays the decoder's side: starts real llama-servers, lets them and a provider prefill the same ids, and compares what comes
//! out - the state files field by field and in numbers, and what the server says after restoring them.
//!
//! **Invariant:** nothing here links the code under test. A provider is a program that is started, as a decoder's owner
//! would start it; the only shared crates are the readers of the two file formats.
#![deny(unsafe_code)]

pub mod behaviour;
pub mod cases;
pub mod check;
pub mod client;
pub mod contract;
pub mod decoder;
pub mod demo;
pub mod dmabuf;
pub mod fixtures;
pub mod heat;
pub mod hostile;
pub mod html;
mod html_pictures;
mod kept;
pub mod locate;
pub mod matrix;
pub mod nudge;
pub mod oracle;
pub mod pins;
pub mod probe;
pub mod producer;
pub mod prompts;
mod reference;
pub mod report;
pub mod routes;
pub mod run;
pub mod serve;
pub mod server;
pub mod shape;
pub mod shared;
pub mod terminal;
pub mod tolerances;
pub mod wire;
