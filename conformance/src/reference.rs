//! What the server itself makes of a case's prompts: its own prefills, controls and cold replies, and how far it is from itself.
//!
//! Three servers, one after the other so that memory stays bounded:
//! - `a`, with the usual batch: prefills every prompt but its last id and saves (the reference), then gets the whole prompt (the
//!   control), then everything again from nothing (cold);
//! - `c`, with batches of 32, and `d`, with flash attention the other way round, or with an f16 cache where the case has a
//!   quantised one, or with a model a little beside itself where layers are recurrent and weights quantised: the same prefills,
//!   which is the noise.
//!
//! None of it depends on who makes the files that are judged, so it can be kept ([`crate::kept`]).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use kvlayout::{CacheType, State};
use serde::{Deserialize, Serialize};

use crate::behaviour::{self, Reply};
use crate::check::{self, Distances};
use crate::client::{Ask, Completion};
use crate::heat::Grid;
use crate::kept::Kept;
use crate::nudge;
use crate::prompts;
use crate::run::Runner;
use crate::server::Server;
use crate::shape::{CacheOptions, Weights};
use crate::tolerances as tol;

/// Batch of the servers whose noise is measured; below it flash attention runs other code than above.
pub(crate) const SMALL_BATCH: u32 = 32;

/// Prompts longer than this are prefilled with the other attention only if there are no shorter ones.
pub(crate) const LONG: usize = 1000;

/// What the server itself made of one prompt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Reference {
    /// The prompt's name.
    pub name: String,
    /// Its ids.
    pub ids: Vec<i32>,
    /// What the server saved of all of them but the last.
    #[serde(skip)]
    pub file: PathBuf,
    /// The reply on top of that.
    pub control: Completion,
    /// The reply from nothing.
    pub cold: Completion,
    /// The latter against the control, as are the two after it.
    pub cold_reply: Reply,
    /// From batches of [`SMALL_BATCH`].
    pub small_batch: Option<Reply>,
    /// From the other attention, or what stands in for it.
    pub other_attention: Option<Reply>,
    /// What the oracle made by the case's contract, where it has one, and the reply on top of that. No work of the server's, and not kept.
    #[serde(skip)]
    pub oracle: Option<(PathBuf, Reply)>,
    /// The server's own prefill.
    pub prefill_ms: f64,
    /// The distance of its variants' files, the worst of them.
    pub noise: Distances,
    /// The same by layer and position.
    pub noise_grid: Grid,
    /// What is worth knowing.
    pub notes: Vec<String>,
}

impl Runner<'_> {
    /// The server's own work on all prompts of the case: kept from an earlier run if there is such, else done now.
    pub(crate) fn references(&self) -> Result<Vec<Reference>> {
        let Some(dir) = &self.context.references else { return self.make_references() };
        let kept = Kept::of(dir, self.context, self.case, &self.build, &self.model)?;
        if let Some(references) = kept.read() {
            return Ok(references);
        }
        let references = self.make_references()?;
        kept.write(&references)?;
        Ok(references)
    }

    fn make_references(&self) -> Result<Vec<Reference>> {
        let mut references = self.controls()?;
        self.noise(&mut references)?;
        Ok(references)
    }

    /// The server's own prefills, controls and cold replies.
    fn controls(&self) -> Result<Vec<Reference>> {
        let mut server = self.start("a", |_| {})?;
        let all = prompts::all()?;
        let mut out = Vec::new();
        for name in &self.case.prompts {
            let prompt = all.iter().find(|p| &p.name == name).with_context(|| format!("no prompt is called {name}"))?;
            let reference = self.reference(&server, prompt);
            let about = || format!("the server's own work on prompt {name}");
            out.push(server.explain(reference).with_context(about)?);
        }
        Ok(out)
    }

    fn reference(&self, server: &Server, prompt: &prompts::Prompt) -> Result<Reference> {
        let client = &server.client;
        let ids = prompt.ids(client, self.case.max_tokens)?;
        let handed = &ids[..ids.len() - 1];
        client.erase(0)?;
        let prefill = client.prefill(handed, 0)?;
        let name = format!("{}.bin", prompt.name);
        let saved = client.save(0, &name)?;
        ensure!(saved.tokens == handed.len() as u64, "saved {} tokens of {}", saved.tokens, handed.len());
        let mut ask = self.ask(&ids);
        let control = client.complete(&ask, |_| true)?;
        let mut notes = Vec::new();
        if control.steps.is_empty() {
            notes.push(
                "the control's reply begins with bytes that are no text, which this server cannot tell".to_owned(),
            );
        } else if control.prompt_n != Some(1) {
            notes.push(format!(
                "no control: the server evaluated {:?} tokens of its own prefill again",
                control.prompt_n
            ));
        }
        client.erase(0)?;
        ask.cache_prompt = false;
        let cold = client.complete(&ask, until_departure(&control))?;
        client.erase(0)?;
        let cold_reply = behaviour::compare(&control, &cold);
        Ok(Reference {
            name: prompt.name.clone(),
            file: server.options.slots.join(&name),
            ids,
            control,
            cold,
            cold_reply,
            small_batch: None,
            other_attention: None,
            oracle: None,
            prefill_ms: prefill.prompt_ms.unwrap_or(0.0),
            noise: Distances::ZERO,
            noise_grid: Grid::default(),
            notes,
        })
    }

    /// How far the server is from itself.
    fn noise(&self, references: &mut [Reference]) -> Result<()> {
        let mut server = self.start("c", |o| o.n_ubatch = SMALL_BATCH)?;
        for r in references.iter_mut() {
            let variant = self.variant(&server, r);
            let (d, grid, reply) =
                server.explain(variant).with_context(|| format!("prompt {} in batches of {SMALL_BATCH}", r.name))?;
            r.noise = r.noise.max(d);
            r.noise_grid = std::mem::take(&mut r.noise_grid).max(grid);
            r.small_batch = Some(reply);
        }
        drop(server);
        // A recurrent layer goes over its positions one by one in every batch size: there the server has nothing but itself.
        let recurrent = self.shape.recurrent.iter().any(Option::is_some) && self.shape.weights == Weights::Quantised;
        let nudged = (recurrent && !self.quantised()).then(|| nudge::write(&self.model, &self.dir.0)).transpose()?;
        let all_long = references.iter().all(|r| r.ids.len() > LONG);
        let mut server = self.start("d", |o| {
            if self.quantised() {
                // There is no other attention for a quantised V; what quantising does is the yardstick (see `tolerances`).
                (o.type_k, o.type_v) = (CacheType::F16, CacheType::F16);
            } else if let Some(nudged) = &nudged {
                o.model.clone_from(nudged);
            } else {
                o.flash_attn = !o.flash_attn;
            }
        })?;
        // The yardstick is the worst of all prompts; the longest are the dearest here, and not the noisiest.
        for r in references.iter_mut().filter(|r| all_long || r.ids.len() <= LONG) {
            let variant = self.variant(&server, r);
            let (d, grid, reply) =
                server.explain(variant).with_context(|| format!("prompt {} with the other attention", r.name))?;
            r.noise = r.noise.max(d);
            r.noise_grid = std::mem::take(&mut r.noise_grid).max(grid);
            r.other_attention = Some(reply);
        }
        Ok(())
    }

    fn variant(&self, server: &Server, r: &Reference) -> Result<(Distances, Grid, Reply)> {
        let client = &server.client;
        client.erase(0)?;
        client.prefill(&r.ids[..r.ids.len() - 1], 0)?;
        let name = format!("{}.bin", r.name);
        client.save(0, &name)?;
        let path = server.options.slots.join(&name);
        let read = |p: &Path, [type_k, type_v]: [CacheType; 2]| -> Result<State> {
            let bytes = fs::read(p).with_context(|| format!("reading {}", p.display()))?;
            let mut state = self.shape.parse(&bytes)?;
            let cache = CacheOptions { type_k, type_v, ..self.cache() };
            check::tell_rotation(&mut state, &self.shape.kv_spec(&cache));
            Ok(state)
        };
        let reference = read(&r.file, [self.case.type_k, self.case.type_v])?;
        let variant = read(&path, [server.options.type_k, server.options.type_v])?;
        let (d, _) = check::distances(&reference, &variant, &self.shape)?;
        let grid = Grid::of(&reference, &variant, &self.shape, r.ids.len() - 1)?;
        fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
        let ask = self.ask(&r.ids);
        let reply = behaviour::compare(&r.control, &client.complete(&ask, until_departure(&r.control))?);
        client.erase(0)?;
        Ok((d, grid, reply))
    }

    /// What every server is asked: the case's tokens, greedily, on top of what its slot holds.
    pub(crate) fn ask<'p>(&self, prompt: &'p [i32]) -> Ask<'p> {
        Ask { prompt, n_predict: self.case.greedy, n_probs: tol::TOP, cache_prompt: true, slot: 0, ignore_eos: true }
    }
}

/// Goes on as long as a reply is the control's; what comes after a departure says nothing.
pub(crate) fn until_departure(control: &Completion) -> impl FnMut(&crate::client::Step) -> bool + '_ {
    let mut seen = 0;
    move |step| {
        let same = control.steps.get(seen).is_some_and(|s| s.id == step.id);
        seen += 1;
        same
    }
}
