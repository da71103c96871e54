//! The file route, from a checked [`Job`] to a state file with its name and a line on stdout.
//!
//! Everything that can be refused is refused before the output is begun, and the output is begun before the work is: a
//! full disk is found in the first milliseconds, not after the prefill.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use gguf::Gguf;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvlayout::{KvMap, KvSink, KvSpec, Scatter, StateFile};

use crate::engine::{Engine, Prompt};
use crate::exit::{self, Error, Kind, Result};
use crate::job::Job;
use crate::receipt::{Receipt, ms, peak_rss, round};
use crate::say::{bytes, is_terminal, say, say_if_room};
use crate::signals::Watch;
use crate::{ids, state_version};

/// llama.cpp rounds a context up to a multiple of this.
const CONTEXT_STEP: u32 = 256;
/// How often a line of progress is printed where there is no terminal.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

/// Does it. `started` is when the process began.
///
/// # Errors
/// Of every kind; nothing has the output's name then that did not have it before.
pub fn run(job: &Job, watch: &Watch, started: Instant) -> Result<()> {
    job.notes.iter().for_each(say);
    if let Some(after) = job.deadline {
        watch.set_deadline(started + after);
    }

    // Inputs.
    let ids_file = open_ids(&job.tokens)?;
    let load = Instant::now();
    let gguf = Gguf::open(&job.model).map_err(exit::gguf_error)?;
    not_an_input(job, &gguf)?;
    let engine = Engine::new(&gguf)?;
    let tokens = ids::read(ids_file, engine.n_vocab())
        .map_err(|e| exit::ids_error(e).context(format!("the ids in {}", job.tokens.display())))?;
    watch.check()?;

    // Refusals, the cheapest first.
    if tokens.len() < job.min_tokens {
        let text = format!("declined: {} ids, fewer than the {} of --min-tokens", tokens.len(), job.min_tokens);
        return Err(Error::new(Kind::Declined, text));
    }
    fits_context(job, &engine, tokens.len())?;
    let spec = engine.kv_spec(&job.decoder)?;
    let prepared = engine.prepare(&job.compute, &job.decoder, tokens.len())?;
    let estimate = engine.estimate(Prompt::Ids(&tokens), &job.compute);
    if let Some(most) = job.max_memory.filter(|&most| estimate.total() > most) {
        let text = format!("{estimate}, more than the {} of --max-memory; a smaller --chunk needs less", bytes(most));
        return Err(Error::new(Kind::Refused, text));
    }
    if let Some(free) = available_memory().filter(|&free| estimate.work > free) {
        let text = format!("{estimate}, but only {} are available; a smaller --chunk needs less", bytes(free));
        return Err(Error::new(Kind::Refused, text));
    }
    let version = state_version::choose(job.decoder.version, &job.decoder.version_by, &job.out, &job.decoder.config)?;
    let map = KvMap::state_file(&spec, &tokens, version.version).map_err(exit::refusal)?;
    if !version.told {
        say(format_args!("state version {}: {}", version.version, version.why));
    }
    note_window(&spec, tokens.len());
    room_for(&job.out, map.size())?;

    // The output, still without its name.
    watch.set_output(&job.out);
    watch.check()?;
    let file = StateFile::create(&job.out, map.size()).map_err(exit::create_error)?;
    let mut sink = Box::new(Scatter::new(map, file).map_err(exit::sink_error)?);

    // The work.
    let load_ms = ms(load.elapsed());
    let mut progress = Progress::new(watch, tokens.len());
    let result = prepared.run(&tokens, sink.as_mut(), &mut progress);
    drop(progress);
    let timings = match result {
        Ok(timings) => timings,
        Err(e) => return Err(watch.stopped().map_or(e, |reason| reason.error())),
    };

    // The name. A stop that comes while it is being given is still a stop.
    let commit = Instant::now();
    watch.begin_commit()?;
    let done = sink.commit().map_err(|e| exit::sink_error(e).context(format!("writing {}", job.out.display())))?;
    if let Err(e) = watch.check() {
        let _ = std::fs::remove_file(&job.out);
        return Err(e);
    }
    state_version::mark(&job.out, &version);
    Receipt {
        prefill_ms: round(timings.prefill_ms),
        n_tokens: tokens.len(),
        tokens_per_second: round(tokens.len() as f64 / timings.prefill_ms * 1e3),
        state_version: version.version.number(),
        state_version_from: &version.why,
        bytes: done.bytes,
        write_ms: round(timings.write_ms + ms(commit.elapsed())),
        load_ms,
        total_ms: ms(started.elapsed()),
        threads: prepared.options.threads,
        chunk: prepared.options.chunk,
        device: "cpu",
        kernel: prepared.options.isa.name(),
        architecture: engine.architecture(),
        cache_type_k: job.decoder.type_k.to_string(),
        cache_type_v: job.decoder.type_v.to_string(),
        flash_attn: !job.decoder.v_trans,
        peak_rss_bytes: peak_rss(),
        memory_estimate_bytes: estimate.total(),
        out: &job.out.to_string_lossy(),
        npu_prefill: crate::cli::VERSION,
    }
    .print();
    Ok(())
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

/// The output must not take the place of something that is being read.
fn not_an_input(job: &Job, gguf: &Gguf) -> Result<()> {
    let Ok(out) = std::fs::metadata(&job.out) else { return Ok(()) };
    for input in gguf.paths().chain([job.tokens.as_path()]) {
        if std::fs::metadata(input).is_ok_and(|meta| (meta.dev(), meta.ino()) == (out.dev(), out.ino())) {
            let text = format!("--out {} is the same file as the input {}", job.out.display(), input.display());
            return Err(Error::new(Kind::Usage, text));
        }
    }
    Ok(())
}

fn fits_context(job: &Job, engine: &Engine<'_>, n_tokens: usize) -> Result<()> {
    // The decoder needs one more cell for the token it evaluates itself.
    let need = n_tokens as u64 + 1;
    if let Some(n_ctx) = job.decoder.n_ctx {
        let room = u64::from(n_ctx).next_multiple_of(CONTEXT_STEP.into());
        if need > room {
            let text = format!(
                "{n_tokens} ids and the prompt's last one do not fit the decoder's context of {n_ctx} (--ctx-size)"
            );
            return Err(Error::new(Kind::Refused, text));
        }
    } else if need > u64::from(engine.trained_context()) {
        let trained = engine.trained_context();
        say(format_args!("the prompt of {need} tokens is longer than the {trained} the model was trained for"));
    }
    Ok(())
}

/// What the system could give without swapping or killing anyone; `None` where it does not say.
fn available_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Sliding-window models: some handoffs cannot gain anything.
fn note_window(spec: &KvSpec, n_tokens: usize) {
    let window = spec.sections.iter().filter_map(|s| s.window).min();
    if let Some(window) = window.filter(|&w| !spec.swa_full && n_tokens as u64 <= u64::from(w)) {
        say(format_args!(
            "no gain expected: {n_tokens} ids do not reach past the model's sliding window of {window}, and a decoder \
             without --swa-full then computes the prompt again"
        ));
    }
}

fn room_for(out: &Path, size: u64) -> Result<()> {
    let dir = state_version::directory_of(out);
    // Whatever is wrong with the directory is said better where the file is made.
    let Ok(fs) = rustix::fs::statvfs(dir) else { return Ok(()) };
    let free = fs.f_bfree.saturating_mul(fs.f_frsize);
    // Some file systems have no blocks to count.
    if fs.f_blocks > 0 && free < size {
        let text =
            format!("not enough room in {}: the state needs {}, {} are free", dir.display(), bytes(size), bytes(free));
        return Err(Error::new(Kind::Io, text));
    }
    Ok(())
}

/// A bar for people, a line a second for programs: they may take silence for a hang.
struct Progress<'a> {
    watch: &'a Watch,
    n_tokens: usize,
    shown: Shown,
}

enum Shown {
    Bar(ProgressBar),
    Lines {
        latest: Arc<Mutex<String>>,
        /// Ends the thread by being dropped.
        _done: mpsc::Sender<()>,
    },
}

impl<'a> Progress<'a> {
    fn new(watch: &'a Watch, n_tokens: usize) -> Progress<'a> {
        let shown = if is_terminal() {
            let style = ProgressStyle::with_template("{bar:40} {pos}/{len} tokens, {msg} [{elapsed} < {eta}]");
            let bar = ProgressBar::with_draw_target(Some(n_tokens as u64), ProgressDrawTarget::stderr_with_hz(10));
            Shown::Bar(bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())))
        } else {
            let latest = Arc::new(Mutex::new(format!("progress: 0 of {n_tokens} tokens")));
            let (done, ended) = mpsc::channel();
            let theirs = latest.clone();
            // Without the thread there is no progress to see, and nothing else is lost.
            let _ = std::thread::Builder::new().name("progress".to_owned()).spawn(move || {
                while ended.recv_timeout(PROGRESS_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
                    let line = theirs.lock().unwrap_or_else(PoisonError::into_inner).clone();
                    say_if_room(line);
                }
            });
            Shown::Lines { latest, _done: done }
        };
        Progress { watch, n_tokens, shown }
    }
}

impl Drop for Progress<'_> {
    fn drop(&mut self) {
        if let Shown::Bar(bar) = &self.shown {
            bar.finish_and_clear();
        }
    }
}

impl prefill::Hooks for Progress<'_> {
    fn stop(&self) -> bool {
        self.watch.stopped().is_some()
    }

    fn progress(&mut self, layer: usize, n_layer: usize, rows: usize, n_tokens: usize) {
        // Layers are computed one after the other for all tokens; what is done is told as if it were tokens.
        let done = (layer * n_tokens + rows) / n_layer.max(1);
        match &self.shown {
            Shown::Bar(bar) => {
                bar.set_position(done as u64);
                bar.set_message(format!("layer {} of {n_layer}", layer + 1));
            }
            Shown::Lines { latest, .. } => {
                let line = format!("progress: {done} of {} tokens, layer {} of {n_layer}", self.n_tokens, layer + 1);
                *latest.lock().unwrap_or_else(PoisonError::into_inner) = line;
            }
        }
    }
}
