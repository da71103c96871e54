//! Tests of the prefill against itself (what must not matter does not), against the reference dequantiser, and against
//! bad models. That its numbers are the decoder's is proved by the conformance harness, on real servers.

mod blocks;
mod experts;
mod families;
mod gemma;
mod latent;
mod models;
mod offload;
mod recurrent;
mod run;
mod tiny;
