//! The shared route: rows straight into memory that the decoder will read without looking.
//!
//! There is nothing to take back here. So the order is everything: whatever can be refused is refused before the first byte, and
//! after it either every row is there or the process ends as tainted, whatever the reason. The bytes themselves are put in
//! by [`Regions`], under a [`Guard`] that asks before every burst whether that is still allowed.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kvlayout::{Guard, Header, HeaderError, KvMap, KvSink, Regions, Scatter, ShareRefusal};

use crate::exit::{self, Error, Kind, Result};
use crate::handoff::Ready;
use crate::job::{Decoder, Shared};

/// Makes the handoff.
///
/// # Errors
/// Of every kind. Whether anything had been written then, [`exit::is_tainted`] knows.
pub fn hand_over(ready: &Ready<'_>, shared: Shared) -> Result<()> {
    let Ready { watch, tokens, engine, .. } = *ready;
    let Shared { header: path, fds } = shared;
    // Refusals. All of them are made here.
    let header = read_header(&path)?;
    let decoder = ready.settle_rotation(&agree(ready.decoder, &header)?, None)?;
    let spec = engine.kv_spec(&decoder)?;
    let work = ready.prepare(&decoder)?;
    let layout = header.resolve(&spec, decoder.n_ctx, fds.len()).map_err(exit::share_refusal)?;
    let n_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
    let map = KvMap::shared(&spec, &layout, n_tokens).map_err(exit::refusal)?;
    watch.check()?;

    // The memory, mapped but not touched.
    let writing = Arc::new(AtomicBool::new(false));
    watch.cover(&writing).map_err(|e| Error::new(Kind::Internal, e).context("setting up the handling of signals"))?;
    let may_write = || {
        let may = watch.may_write();
        writing.fetch_or(may, Ordering::SeqCst);
        may
    };
    let guard = Guard::new(may_write).until(ready.deadline);
    exit::watch_memory(guard.touched());
    let regions = Regions::map(fds, &layout, &map, guard).map_err(exit::region_error)?;
    let mut sink = Box::new(Scatter::new(map, regions).map_err(exit::sink_error)?);

    let done = ready.compute(&work, sink.as_mut())?;

    let commit = Instant::now();
    watch.begin_commit()?;
    let whole = sink.commit().map_err(|e| ready.why(exit::sink_error(e)))?;
    let mut receipt = ready.receipt(&work, &done, &whole, commit.elapsed());
    receipt.route = "shared";
    receipt.share_id = header.share_id;
    receipt.regions = Some(layout.regions().len());
    receipt.print();
    Ok(())
}

fn read_header(path: &Path) -> Result<Header> {
    Header::read(path).map_err(|e| match e {
        // This one names the file itself.
        HeaderError::Read { .. } => exit::header_error(e),
        e => exit::header_error(e).context(path.display().to_string()),
    })
}

/// What was said of the decoder, and what its header adds: its types and its context where nobody else named any.
fn agree(told: &Decoder, header: &Header) -> Result<Decoder> {
    let [k, v] = told.types_told;
    let pick = |told, ours, header: Option<_>| if told { ours } else { header.unwrap_or(ours) };
    let type_k = pick(k, told.type_k, header.params.type_k);
    let type_v = pick(v, told.type_v, header.params.type_v);
    if told.v_trans && header.params.flash_attn == Some(true) {
        let text = "the header says flash_attn on, this program was told off (--flash-attn)";
        return Err(Error::new(Kind::Refused, text));
    }
    if header.params.flash_attn == Some(false) {
        return Err(exit::share_refusal(ShareRefusal::FlashAttention));
    }
    Ok(Decoder { type_k, type_v, n_ctx: told.n_ctx.or(header.params.n_ctx), ..told.clone() })
}
