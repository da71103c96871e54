//! From a checked [`Job`] to a handoff that is made: what both routes have in common. Where the rows go, and what must be right
//! about that, is [`file`](mod@crate::file)'s and [`share`]'s.
//!
//! Everything that can be refused is refused before the work, and before anybody could see a byte of it.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use gguf::Gguf;
use kvlayout::{KvSink, StateVersion};
use prefill::{Options, Plan, Timings};

use crate::device::{self, Opened};
use crate::engine::{Engine, Estimate, Prepared, Prompt};
use crate::exit::{self, Error, Kind, Result};
use crate::job::{Compute, Decoder, Ends, Job, Route};
use crate::progress::Progress;
use crate::receipt::{Receipt, ms, round};
use crate::say::{bytes, say};
use crate::signals::Watch;
use crate::{file, ids, memory, share};

/// Does it. `started` is when the process began.
///
/// # Errors
/// Of every kind. On the file route nothing has the output's name then that did not have it before; on the shared route
/// the last word is [`Error::at_the_end`]'s.
pub fn run(job: Job, watch: &Watch, started: Instant) -> Result<()> {
    job.notes.iter().for_each(say);
    let deadline = job.deadline.map(|after| started + after);
    if let Some(at) = deadline {
        watch.set_deadline(at);
    }
    let Ends { tokens: ids_path, model, route } = job.ends;

    // Inputs.
    let ids_file = open_ids(&ids_path)?;
    let load = Instant::now();
    let gguf = Gguf::open(&model).map_err(exit::gguf_error)?;
    if let Route::File(out) = &route {
        file::is_no_input(out, gguf.paths().chain([ids_path.as_path()]))?;
    }
    let engine = Engine::new(&gguf)?;
    let tokens = ids::read(ids_file, engine.n_vocab())
        .map_err(|e| exit::ids_error(e).context(format!("the ids in {}", ids_path.display())))?;
    watch.check()?;
    if tokens.len() < job.min_tokens {
        let text = format!("declined: {} ids, fewer than the {} of --min-tokens", tokens.len(), job.min_tokens);
        return Err(Error::new(Kind::Declined, text));
    }

    let plan = engine.plan(tokens.len(), &job.compute);
    let opened = device::open(&job.compute, &plan.products())?;
    device::announce(&opened);
    watch.check()?;

    let ready = Ready {
        device: &opened,
        watch,
        started,
        deadline,
        load,
        engine: &engine,
        plan: &plan,
        tokens: &tokens,
        decoder: &job.decoder,
        compute: &job.compute,
        max_memory: job.max_memory,
    };
    match route {
        Route::File(out) => file::hand_over(&ready, &out),
        Route::Shared(shared) => share::hand_over(&ready, shared),
    }
}

/// Everything that a route needs.
pub struct Ready<'a> {
    /// What computes matrix products beside the host.
    device: &'a Opened,
    /// What may stop it.
    pub watch: &'a Watch,
    /// When the process began.
    pub started: Instant,
    /// When it must be done.
    pub deadline: Option<Instant>,
    /// When loading began.
    pub load: Instant,
    /// The model.
    pub engine: &'a Engine<'a>,
    /// What will be done.
    plan: &'a Plan,
    /// The ids.
    pub tokens: &'a [i32],
    /// What was said of the decoder.
    pub decoder: &'a Decoder,
    compute: &'a Compute,
    max_memory: Option<u64>,
}

impl<'a> Ready<'a> {
    /// Settles how to compute rows for this decoder.
    ///
    /// # Errors
    /// It needs more memory than there is, or an instruction set that is not there.
    pub fn prepare(&self, decoder: &Decoder) -> Result<Work<'a>> {
        let prepared = self.engine.prepare(self.compute, decoder, self.tokens.len())?;
        let mut estimate = self.engine.estimate(Prompt::Ids(self.tokens), self.plan);
        if self.device.offload.is_some() {
            let more = self.device.memory_bytes(&self.plan.products(), self.plan.chunk);
            estimate.work = estimate.work.saturating_add(more);
        }
        if let Some(most) = self.max_memory.filter(|&most| estimate.total() > most) {
            let most = bytes(most);
            let text = format!("{estimate}, more than the {most} of --max-memory; a smaller --chunk needs less");
            return Err(Error::new(Kind::Refused, text));
        }
        if let Some(room) = memory::room().filter(|room| estimate.work > room.bytes) {
            let (free, source) = (bytes(room.bytes), room.source);
            let text = format!("{estimate}, but only {free} are {source}; a smaller --chunk needs less");
            return Err(Error::new(Kind::Refused, text));
        }
        Ok(Work { prepared, estimate })
    }

    /// The decoder, with what is settled of the rotation of its quantised rows. Files of version 4 say whether rows are rotated,
    /// and a server refuses what it does not have itself; anywhere else a wrong guess would be fluent nonsense, so that somebody must
    /// have said it.
    ///
    /// # Errors
    /// Nobody has, and it matters.
    pub fn settle_rotation(&self, decoder: &Decoder, version: Option<StateVersion>) -> Result<Decoder> {
        let rotated = Decoder { attn_rot: Some(decoder.attn_rot.unwrap_or(true)), ..decoder.clone() };
        let matters = self.engine.kv_spec(&rotated)?.sections.iter().any(|s| s.n_rot != (0, 0));
        if decoder.attn_rot.is_some() || !matters || version == Some(StateVersion::V4) {
            return Ok(rotated);
        }
        let Decoder { type_k, type_v, .. } = decoder;
        let nobody = match version {
            Some(version) => format!("state files of version {version} do not say"),
            None => "no header says".to_owned(),
        };
        let text = format!(
            "a cache of K {type_k} and V {type_v}: {nobody} whether the decoder rotates such rows (builds since April 2026 do, \
             unless LLAMA_ATTN_ROT_DISABLE=1), and a wrong guess gives wrong answers: say --attn-rot on or off, or let \
             `conformance pin probe` find out"
        );
        Err(Error::new(Kind::Refused, text))
    }

    /// Computes the rows into a sink.
    ///
    /// # Errors
    /// Why it was stopped, if it was; else what the computation or the sink says.
    pub fn compute(&self, work: &Work<'a>, sink: &mut dyn KvSink) -> Result<Done> {
        let load_ms = ms(self.load.elapsed());
        let mut progress = Progress::new(self.watch, self.tokens.len());
        let result = work.prepared.run(self.tokens, self.device.offload.as_ref(), sink, &mut progress);
        let layers = progress.layers();
        drop(progress);
        let timings = result.map_err(|e| self.why(e))?;
        Ok(Done { timings, load_ms, layers })
    }

    /// Whatever went wrong, a stop is the reason if there was one.
    pub fn why(&self, error: Error) -> Error {
        self.watch.look().map_or(error, |reason| reason.error())
    }

    /// What both routes say of a handoff that is made. Committing it took `commit`.
    pub fn receipt(&self, work: &Work<'a>, done: &Done, sink: &kvlayout::Receipt, commit: Duration) -> Receipt<'a> {
        let Options { threads, chunk, isa, type_k, type_v, .. } = work.prepared.options;
        let n = self.tokens.len();
        Receipt {
            prefill_ms: round(done.timings.prefill_ms),
            route: "",
            n_tokens: n,
            tokens_per_second: round(n as f64 / done.timings.prefill_ms * 1e3),
            state_version: None,
            state_version_from: None,
            checkpoint: false,
            share_id: None,
            regions: None,
            bytes: sink.bytes,
            write_ms: round(done.timings.write_ms + ms(commit)),
            load_ms: done.load_ms,
            layer_ms: done.layers.iter().map(|d| (ms(*d) * 10.0).round() / 10.0).collect(),
            first_gemm_ms: done.timings.first_gemm.map(|at| ms(at.duration_since(self.started))),
            total_ms: ms(self.started.elapsed()),
            threads,
            chunk,
            device: self.device.kind(),
            offload: self.device.offload.as_ref().map(|o| device::look(o, device::Report::new)),
            kernel: isa.name(),
            architecture: self.engine.architecture(),
            cache_type_k: type_k.to_string(),
            cache_type_v: type_v.to_string(),
            flash_attn: !self.decoder.v_trans,
            peak_rss_bytes: memory::peak_rss(),
            memory_estimate_bytes: work.estimate.total(),
            out: None,
            npu_prefill: crate::cli::VERSION,
        }
    }
}

/// How rows will be computed.
pub struct Work<'a> {
    prepared: Prepared<'a, 'a>,
    estimate: Estimate,
}

/// How they were.
pub struct Done {
    timings: Timings,
    load_ms: f64,
    layers: Vec<Duration>,
}

fn open_ids(path: &Path) -> Result<File> {
    let about = |e: Error| e.context(format!("opening the ids {}", path.display()));
    let file = File::open(path).map_err(|e| about(exit::open_error(e)))?;
    let meta = file.metadata().map_err(|e| about(exit::open_error(e)))?;
    if meta.is_dir() {
        return Err(about(Error::new(Kind::NoInput, "is a directory")));
    }
    Ok(file)
}
