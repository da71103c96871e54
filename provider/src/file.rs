//! The file route: a state file that appears under its name when it is whole, or not at all.
//!
//! It is begun before the work is: a full disk is found in the first milliseconds, not after the prefill.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Instant;

use kvlayout::{CELL_STEP, KvMap, KvSink, KvSpec, Scatter, StateFile};

use crate::exit::{self, Error, Kind, Result};
use crate::handoff::Ready;
use crate::say::{bytes, say};
use crate::state_version;

/// Makes the handoff.
///
/// # Errors
/// Of every kind; nothing has the output's name then that did not have it before.
pub fn hand_over(ready: &Ready<'_>, out: &Path) -> Result<()> {
    let Ready { watch, tokens, decoder, engine, .. } = *ready;
    // Refusals, the cheapest first.
    fits_context(ready)?;
    let version = state_version::choose(decoder.version, &decoder.version_by, out, &decoder.config)?;
    engine.check_version(version.version)?;
    let decoder = &ready.settle_rotation(decoder, Some(version.version))?;
    let spec = engine.kv_spec(decoder)?;
    let work = ready.prepare(decoder)?;
    let mut map = KvMap::state_file(&spec, tokens, version.version).map_err(exit::refusal)?;
    if !version.told {
        say(format_args!("state version {}: {}", version.version, version.why));
    }
    let checkpoint = map.wants_checkpoint() && decoder.checkpoint.unwrap_or(version.version.has_checkpoints());
    if checkpoint {
        map = map.with_checkpoint().map_err(exit::refusal)?;
    } else {
        note_window(&spec, tokens.len());
    }
    room_for(out, map.size())?;

    // The output, still without its name.
    watch.set_output(out);
    watch.check()?;
    let file = StateFile::create(out, map.size()).map_err(exit::create_error)?;
    let mut sink = Box::new(Scatter::new(map, file).map_err(exit::sink_error)?);

    let done = ready.compute(&work, sink.as_mut())?;

    // The name. A stop that comes while it is being given is still a stop.
    let commit = Instant::now();
    watch.begin_commit()?;
    let whole = sink.commit().map_err(|e| exit::sink_error(e).context(format!("writing {}", out.display())))?;
    if let Err(e) = watch.check() {
        let _ = std::fs::remove_file(out);
        return Err(e);
    }
    let commit = commit.elapsed();
    state_version::mark(out, &version);
    let mut receipt = ready.receipt(&work, &done, &whole, commit);
    receipt.route = "file";
    receipt.state_version = Some(version.version.number());
    receipt.state_version_from = Some(version.why.clone());
    receipt.checkpoint = checkpoint;
    receipt.out = Some(out.to_string_lossy().into_owned());
    receipt.print();
    Ok(())
}

/// The output must not take the place of something that is being read.
///
/// # Errors
/// It would.
pub fn is_no_input<'a>(out: &Path, inputs: impl Iterator<Item = &'a Path>) -> Result<()> {
    let Ok(meta) = std::fs::metadata(out) else { return Ok(()) };
    for input in inputs {
        if std::fs::metadata(input).is_ok_and(|m| (m.dev(), m.ino()) == (meta.dev(), meta.ino())) {
            let text = format!("--out {} is the same file as the input {}", out.display(), input.display());
            return Err(Error::new(Kind::Usage, text));
        }
    }
    Ok(())
}

fn fits_context(ready: &Ready<'_>) -> Result<()> {
    let (n_tokens, trained) = (ready.tokens.len(), ready.engine.trained_context());
    // The decoder needs one more cell for the token it evaluates itself.
    let need = n_tokens as u64 + 1;
    if let Some(n_ctx) = ready.decoder.n_ctx {
        let room = u64::from(n_ctx).next_multiple_of(CELL_STEP.into());
        if need > room {
            let text = format!(
                "{n_tokens} ids and the prompt's last one do not fit the decoder's context of {n_ctx} (--ctx-size)"
            );
            return Err(Error::new(Kind::Refused, text));
        }
    } else if need > u64::from(trained) {
        say(format_args!("the prompt of {need} tokens is longer than the {trained} the model was trained for"));
    }
    Ok(())
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
