//! The program's side of the `prefill` crate: options into parameters, errors into exit kinds, memory into an estimate.

use std::fmt;
use std::sync::Mutex;

use gguf::Gguf;
use kvlayout::{KvSink, KvSpec, StateVersion};
use prefill::{CacheParams, Hooks, Isa, Model, Offload, Options, Plan, Timings};

use crate::exit::{self, Error, Kind, Result};
use crate::job::{Compute, Decoder};
use crate::say::bytes;

/// A model that can be prefilled.
pub struct Engine<'g> {
    gguf: &'g Gguf,
    model: Model<'g>,
}

/// What a run is expected to have resident at most.
#[derive(Clone, Copy, Debug)]
pub struct Estimate {
    /// The program, activations, keys and values of the prefill.
    pub work: u64,
    /// What is read of the model's mapped file. It is page cache that a decoder on the same file shares.
    pub model: u64,
}

impl Estimate {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.work.saturating_add(self.model)
    }
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (total, work, model) = (bytes(self.total()), bytes(self.work), bytes(self.model));
        write!(f, "about {total} of memory: {work} to compute and {model} for the mapped model")
    }
}

/// Tokens computed at a time.
pub fn chunk(compute: &Compute, n_tokens: usize) -> usize {
    compute.chunk.unwrap_or_else(|| Options::default().chunk).min(n_tokens.max(1))
}

/// The architectures that are supported, each with models that people know it by.
pub fn architectures() -> impl Iterator<Item = (&'static str, &'static str)> {
    prefill::arch::all().map(|a| (a.name, a.examples))
}

fn isa(compute: &Compute) -> Result<Isa> {
    let Some(name) = &compute.isa else { return Ok(Isa::detect()) };
    let wrong = |what: String| Error::new(Kind::Unavailable, format!("--isa {name}: {what}"));
    match Isa::parse(name) {
        Some(isa) if isa.is_available() => Ok(isa),
        Some(_) => Err(wrong(format!("this processor does not have it; the best it has is {}", Isa::detect().name()))),
        None => Err(wrong("there is no such one; it is auto, scalar, avx2, avx512, avx512bf16 or neon".to_owned())),
    }
}

/// The kernel maps this much around a page that is touched, where the page cache has it.
const FAULT_AROUND: u64 = 64 << 10;

/// What is known of a prompt.
#[derive(Clone, Copy)]
pub enum Prompt<'a> {
    /// Its ids.
    Ids(&'a [i32]),
    /// Only how many there are.
    Length(usize),
}

/// Pieces of the table around the rows of a prompt's tokens.
fn embedding_bytes(table: &gguf::Tensor<'_>, prompt: Prompt<'_>) -> u64 {
    let row = table.row_bytes();
    let pieces = match prompt {
        Prompt::Ids(ids) => {
            let start = |&id: &i32| u64::from(id.unsigned_abs()) * row / FAULT_AROUND;
            ids.iter().map(start).collect::<std::collections::HashSet<u64>>().len() as f64
        }
        // The expected number when the ids are spread evenly.
        Prompt::Length(n) => {
            let all = (table.data.len() as f64 / FAULT_AROUND as f64).max(1.0);
            all * (1.0 - (-(n as f64) / all).exp())
        }
    };
    (pieces * FAULT_AROUND.max(row) as f64) as u64
}

/// What a prefill touches of the mapped model: all metadata, an embedding per token, and the layers' weights - of the last
/// layer only those of keys and values, or of recurrent state, and of blocks behind it nothing.
fn mapped_bytes(gguf: &Gguf, last: usize, prompt: Prompt<'_>) -> u64 {
    let metadata: u64 = (0..gguf.paths().len())
        .map(|shard| gguf.tensors().filter(|t| t.shard == shard).map(|t| t.offset).min().unwrap_or(0))
        .sum();
    let kept = ["attn_norm", "attn_k", "attn_v", "attn_qkv", "ssm_", "shortconv."];
    let touched = |t: gguf::Tensor<'_>| {
        let len = t.data.len() as u64;
        let block = t.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let block = block.and_then(|(i, name)| Some((i.parse::<usize>().ok()?, name)));
        match (t.name, block) {
            ("token_embd.weight", _) => len.min(embedding_bytes(&t, prompt)),
            ("output.weight" | "output_norm.weight", _) => 0,
            (_, Some((i, _))) if i > last => 0,
            (_, Some((i, name))) if i == last && !kept.iter().any(|kept| name.starts_with(kept)) => 0,
            _ => len,
        }
    };
    gguf.tensors().map(touched).sum::<u64>().saturating_add(metadata)
}

impl<'g> Engine<'g> {
    /// Reads the model's description.
    ///
    /// # Errors
    /// The architecture or a tensor type is not supported, or the description does not hold together.
    pub fn new(gguf: &'g Gguf) -> Result<Engine<'g>> {
        let model = Model::load(gguf).map_err(|e| match e {
            // These name the file themselves.
            prefill::Error::Gguf(e) => exit::gguf_error(e),
            e => exit::prefill_error(e).context(gguf.path().display().to_string()),
        })?;
        Ok(Engine { gguf, model })
    }

    /// Ids there are.
    pub fn n_vocab(&self) -> u32 {
        self.model.n_vocab()
    }

    /// The architecture's name.
    pub fn architecture(&self) -> &str {
        self.gguf.architecture().unwrap_or_default()
    }

    /// Whether a state file of this version can be made of the model.
    ///
    /// # Errors
    /// Servers of the version keep something else of it.
    pub fn check_version(&self, version: StateVersion) -> Result<()> {
        self.model.check_version(version).map_err(exit::prefill_error)
    }

    /// The decoder's memory for this model.
    ///
    /// # Errors
    /// The parameters do not go with the model.
    pub fn kv_spec(&self, decoder: &Decoder) -> Result<KvSpec> {
        let params = CacheParams {
            type_k: decoder.type_k,
            type_v: decoder.type_v,
            v_trans: decoder.v_trans,
            attn_rot: decoder.attn_rot.unwrap_or(true),
            swa_full: decoder.swa_full,
            n_stream: decoder.n_stream,
            n_ctx: decoder.n_ctx,
        };
        self.model.kv_spec(&params).map_err(exit::prefill_error)
    }

    /// The sliding window, where the model has one.
    pub fn window(&self) -> Option<u32> {
        self.model.spec().window
    }

    /// What a run will do.
    pub fn plan(&self, n_tokens: usize, compute: &Compute) -> Plan {
        Plan::new(self.model.spec(), n_tokens, chunk(compute, n_tokens))
    }

    /// What a run will need.
    pub fn estimate(&self, prompt: Prompt<'_>, plan: &Plan) -> Estimate {
        let model = mapped_bytes(self.gguf, self.model.spec().last_layer(), prompt);
        Estimate { work: plan.memory_bytes(), model }
    }

    /// Longest prompt the model was trained for.
    pub fn trained_context(&self) -> u32 {
        self.model.spec().n_ctx_train
    }

    /// Settles how to run.
    ///
    /// # Errors
    /// There is no such instruction set, or not here.
    pub fn prepare(&self, compute: &Compute, decoder: &Decoder, n_tokens: usize) -> Result<Prepared<'_, 'g>> {
        let options = Options {
            threads: compute.threads,
            chunk: chunk(compute, n_tokens),
            isa: isa(compute)?,
            type_k: decoder.type_k,
            type_v: decoder.type_v,
            n_ctx: decoder.n_ctx,
            attn_rot: decoder.attn_rot.unwrap_or(true),
            flash_attn: !decoder.v_trans,
        };
        Ok(Prepared { engine: self, options })
    }
}

/// A model and how to run it.
pub struct Prepared<'e, 'g> {
    engine: &'e Engine<'g>,
    /// The settings.
    pub options: Options,
}

impl Prepared<'_, '_> {
    /// Runs it, with matrix products on a device where there is one.
    ///
    /// # Errors
    /// The hooks said stop, or the sink refused rows.
    pub fn run(
        &self,
        tokens: &[i32],
        offload: Option<&Mutex<Offload>>,
        sink: &mut dyn KvSink,
        hooks: &mut dyn Hooks,
    ) -> Result<Timings> {
        let tokens: Vec<u32> = tokens.iter().map(|&id| id.cast_unsigned()).collect();
        prefill::run_on(&self.engine.model, &tokens, &self.options, offload, sink, hooks).map_err(exit::prefill_error)
    }
}
