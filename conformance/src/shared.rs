//! The provider by the shared route, as a producer of state files: a decoder shares its memory, the provider writes into it, and what
//! the decoder adopts is turned into a file for a real server. The same ids go through the file route too, and the rows of both
//! must be the same, bit for bit.
//!
//! Where the route cannot work - several streams, no flash attention, a window's cells too few - it must be refused, with
//! nothing written, and the file route takes over.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use gguf::Gguf;
use kvlayout::{KvMap, State};

use crate::contract::Kernels;
use crate::decoder::{Decoder, Kind, Options};
use crate::producer::{Job, Produced, Producer, Provider};
use crate::serve::{Outcome, Request, Serve};
use crate::shape::Shape;

/// The way by which a prompt reaches the decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Route {
    /// A state file.
    #[default]
    File,
    /// The decoder's memory; its rows must be those of the file.
    Shared,
    /// Both, whose files must be equal to the last byte: what is shown for one is shown for the other.
    Both,
}

impl std::str::FromStr for Route {
    type Err = String;
    fn from_str(s: &str) -> Result<Route, String> {
        match s {
            "file" => Ok(Route::File),
            "shared" => Ok(Route::Shared),
            "both" => Ok(Route::Both),
            _ => Err("it is file, shared or both".to_owned()),
        }
    }
}

/// The program under test, by the shared route.
pub struct SharedProvider {
    route: Route,
    kind: Kind,
    file: Provider,
    shape: Option<(PathBuf, Shape)>,
    decoder: Option<Decoder>,
    prompts: u64,
    notes: Vec<String>,
}

impl SharedProvider {
    /// A producer that starts this program.
    pub fn new(path: &Path, threads: u32, route: Route, kind: Kind) -> SharedProvider {
        let file = Provider::new(path, threads);
        SharedProvider { route, kind, file, shape: None, decoder: None, prompts: 0, notes: Vec::new() }
    }

    fn options(&mut self, job: &Job<'_>) -> Result<Options> {
        if self.shape.as_ref().is_none_or(|(path, _)| path != job.model) {
            self.shape = Some((job.model.to_owned(), Shape::of(&Gguf::open(job.model)?)?));
        }
        let (_, shape) = self.shape.as_ref().context("no model is loaded")?;
        Ok(Options { kind: self.kind, ..Options::new(shape.kv_spec(&job.cache), job.n_ctx) })
    }

    /// A decoder that was started like this; the one of the prompt before, if it was.
    fn decoder(&mut self, options: Options) -> Result<Decoder> {
        match self.decoder.take() {
            Some(decoder) if decoder.options() == &options => Ok(decoder),
            _ => Decoder::new(options),
        }
    }

    fn serve(&self, job: &Job<'_>, out: &Path) -> Result<Serve> {
        let mut serve = Serve::new(&self.file.path);
        let config = out.with_extension("config");
        fs::write(&config, "").with_context(|| format!("writing {}", config.display()))?;
        // What the decoder is like, the header says; nothing else is told but that it rotates what is quantised.
        serve.options = vec!["--config".into(), config.into(), "-t".into(), self.file.threads.to_string().into()];
        if job.cache.type_k.is_quantised() || job.cache.type_v.is_quantised() {
            serve.options.extend(["--attn-rot".into(), "on".into()]);
        }
        if let Some(chunk) = job.chunk {
            serve.options.extend(["--chunk".into(), chunk.to_string().into()]);
        }
        serve.options.extend(job.kernels.into_iter().flat_map(Kernels::args));
        Ok(serve)
    }

    fn by_file(&mut self, job: &Job<'_>, out: &Path, why: &str) -> Result<Produced> {
        self.notes.push(format!("{BY_FILE}: {why}"));
        self.file.produce(job, out)
    }
}

/// What notes begin with.
const ADOPTED: &str = "shared route";
const BY_FILE: &str = "file route, as it should be";

/// How many prompts of reported cases went by the shared route, and how many were refused there as they should be.
pub fn routes_of(cases: &[serde_json::Value]) -> (usize, usize) {
    let prompts = cases.iter().filter_map(|c| c["prompts"].as_array()).flatten();
    let notes: Vec<_> = prompts.filter_map(|p| p["notes"].as_array()).flatten().filter_map(|n| n.as_str()).collect();
    let count = |what: &str| notes.iter().filter(|n| n.split(':').next() == Some(what)).count();
    (count(ADOPTED), count(BY_FILE))
}

/// Why the shared route has to be refused, if it has to.
fn refusal(options: &Options, n_tokens: usize) -> Option<String> {
    let layout = match options.layout() {
        Ok(layout) => layout,
        Err(e) => return Some(e.to_string()),
    };
    let n = u32::try_from(n_tokens).unwrap_or(u32::MAX);
    KvMap::shared(&options.spec, &layout, n).err().map(|e| e.to_string())
}

impl Producer for SharedProvider {
    fn name(&self) -> String {
        match self.route {
            Route::Both => "provider, both routes".into(),
            _ => "provider, shared route".into(),
        }
    }

    fn produce(&mut self, job: &Job<'_>, out: &Path) -> Result<Produced> {
        self.notes.clear();
        self.prompts += 1;
        let (seed, n) = (self.prompts, job.tokens.len());
        let options = self.options(job)?;
        let refused = refusal(&options, n);
        let spec = options.spec.clone();
        if options.layout().is_err() {
            return self.by_file(job, out, &format!("the decoder does not share: {}", refused.unwrap_or_default()));
        }
        let mut decoder = self.decoder(options)?;
        let memory = decoder.memory();
        memory.fill(seed).context("filling the decoder's memory")?;
        let request = Request { model: job.model, tokens: job.tokens };
        let handoff = self.serve(job, out)?.hand_over(&mut decoder, &request, &mut |_| {})?;
        self.decoder = Some(decoder);
        match handoff.outcome {
            Outcome::Lost { why, .. } => bail!("shared route: {why}"),
            Outcome::FallBack { why, .. } => {
                if let Some(at) = memory.changed(seed, 0)? {
                    bail!("shared route: {at} was written, although the provider refused: {why}");
                }
                match refused {
                    Some(_) => self.by_file(job, out, &why),
                    // The other route says whether it is the model that is declined.
                    None => match self.file.produce(job, out)? {
                        Produced::Skipped(why) => Ok(Produced::Skipped(why)),
                        Produced::File { .. } => bail!("shared route: {why}, although the file route works"),
                    },
                }
            }
            Outcome::Adopted { receipt, .. } => {
                if let Some(why) = refused {
                    bail!("shared route: the provider wrote, although it had to refuse: {why}");
                }
                if let Some(at) = memory.changed(seed, n as u64)? {
                    bail!("shared route: {at} was written, which is in no row of the {n} tokens");
                }
                let receipt = receipt.context("shared route: the provider printed no line of JSON")?;
                let ms = receipt["prefill_ms"].as_f64().with_context(|| format!("no prefill_ms in {receipt}"))?;
                let bytes = memory.state_file(&spec, job.tokens, job.version)?;
                fs::write(out, &bytes).with_context(|| format!("writing {}", out.display()))?;
                let other = out.with_extension("file.bin");
                let by_file = self.file.produce(job, &other).context("the same by the file route")?;
                if let Produced::Skipped(why) = by_file {
                    bail!("the file route is declined, although the shared one was taken: {why}");
                }
                let file = fs::read(&other).with_context(|| format!("reading {}", other.display()))?;
                same(&file, &bytes, self.route == Route::Both)
                    .map_err(|e| anyhow::anyhow!("the routes differ: {e}"))?;
                let _ = fs::remove_file(&other);
                self.notes.push(format!(
                    "{ADOPTED}: {n} rows of {} tensors, equal to the file's",
                    memory.layout().tensors().len()
                ));
                Ok(Produced::File { prefill_ms: Some(ms) })
            }
        }
    }

    fn notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }
}

/// Compares the rows of two state files bit for bit; with `whole`, everything else as well.
///
/// # Errors
/// With the first row that differs and how many do.
pub fn same(file: &[u8], shared: &[u8], whole: bool) -> Result<()> {
    if file == shared {
        return Ok(());
    }
    let (a, b) = (State::parse_any(file)?, State::parse_any(shared)?);
    let tensors = a.tensors();
    ensure!(tensors == b.tensors(), "the file has {} tensors, the memory {}", tensors.len(), b.tensors().len());
    let (mut first, mut rows) = (None, 0);
    for &(section, layer, part) in &tensors {
        let (Some(x), Some(y)) = (a.tensor(section, layer, part), b.tensor(section, layer, part)) else { continue };
        let positions = a.positions(section);
        ensure!(
            (x.ty, x.width, x.data.len()) == (y.ty, y.width, y.data.len()) && positions == b.positions(section),
            "section {section} layer {layer} {part}: {} rows of {} {} in the file, {} rows of {} {} in the memory",
            positions.len(),
            x.width,
            x.ty,
            b.positions(section).len(),
            y.width,
            y.ty
        );
        let row = x.ty.row_bytes(x.width.into()).unwrap_or(1).max(1) as usize;
        for ((p, q), at) in x.data.chunks(row).zip(y.data.chunks(row)).zip(&positions) {
            if p != q {
                rows += 1;
                first.get_or_insert_with(|| format!("section {section} layer {layer} {part}, position {at}"));
            }
        }
    }
    if let Some(first) = first {
        bail!("{rows} rows, the first in {first}");
    }
    let other = kvlayout::compare::structure(&a, &b);
    ensure!(
        !whole,
        "the rows are equal, but not {}",
        other.first().map_or("all other bytes".into(), ToString::to_string)
    );
    Ok(())
}
