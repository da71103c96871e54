//! Runs cases: real servers make the reference and their own noise (`crate::reference`), where products are computed by a contract
//! the oracle makes its files ([`crate::contract`]), a producer makes its own, and a fresh server `b`, with the usual store of prompts,
//! restores them and replies.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use gguf::Gguf;
use kvlayout::{State, StateVersion};
use serde::Serialize;

use crate::behaviour::{self, Reply, Spread};
use crate::cases::Case;
use crate::check::{self, Distances, Measure, Want};
use crate::client::Client;
use crate::contract::{self, Kernels};
use crate::fixtures;
use crate::heat::{Grid, Heat};
use crate::oracle::Arithmetic;
use crate::pins::{Cache, Pins};
use crate::producer::{Choice, Job, Produced, Times};
use crate::reference::{Reference, until_departure};
use crate::report;
use crate::server::{Build, Server, ServerOptions};
use crate::shape::{CacheOptions, Shape, Weights};
use crate::terminal::Runs;
use crate::tolerances as tol;

/// What all cases share.
pub struct Context {
    /// The pins.
    pub pins: Pins,
    /// Where they are installed.
    pub cache: Cache,
    /// Who makes state files.
    pub producer: Choice,
    /// A server of the user's own, instead of the pinned ones.
    pub server: Option<PathBuf>,
    /// The server's own work is kept here, and taken from here.
    pub references: Option<PathBuf>,
    /// The provider's device for cases of a contract; without one its oracle, with kernels that are nothing but names.
    pub kernels: Option<Kernels>,
    /// Keep the files of failed cases here.
    pub keep: Option<PathBuf>,
}

/// How a case ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Everything is within its limits.
    Pass,
    /// Something is not.
    Fail,
    /// The producer does not do this, with a reason.
    Skip,
    /// It could not be tried.
    Error,
}

/// What one prompt of a case gave.
#[derive(Debug, Clone, Serialize)]
pub struct PromptReport {
    /// The prompt.
    pub prompt: String,
    /// Its ids, N.
    pub n: usize,
    /// Differences of structure.
    pub structure: Vec<String>,
    /// Distances from the server's file.
    pub distances: Distances,
    /// The same of the server from itself, the worst of its variants.
    pub noise: Distances,
    /// Distances from the oracle's file by the same contract, in a case of one.
    pub from_oracle: Option<Distances>,
    /// Measures of this prompt that failed.
    pub failed: Vec<Measure>,
    /// Tokens the server said it restored.
    pub restored: u64,
    /// Time of the restore.
    pub restore_ms: f64,
    /// Evaluated after the restore.
    pub prompt_n: u32,
    /// Expected to be evaluated.
    pub want_prompt_n: u32,
    /// Taken from the restored cells.
    pub cache_n: u32,
    /// The reply after the restore against the control.
    pub handed: Option<Reply>,
    /// The cold reply against the control.
    pub cold: Option<Reply>,
    /// The control with small batches against the control.
    pub small_batch: Option<Reply>,
    /// The control with the other attention against the control.
    pub other_attention: Option<Reply>,
    /// The reply after a restore of the oracle's file by the same contract, in a case of one.
    pub oracle: Option<Reply>,
    /// The provider's prefill.
    pub prefill_ms: Option<f64>,
    /// Where the provider's time went.
    pub times: Option<Times>,
    /// The one token that the server evaluated after the restore.
    pub first_token_ms: Option<f64>,
    /// The server's own prefill of the same ids.
    pub server_prefill_ms: f64,
    /// Asserted outcomes and other things worth knowing.
    pub notes: Vec<String>,
}

impl PromptReport {
    /// Whether the server should use what is handed over.
    fn reuses(&self) -> bool {
        (self.want_prompt_n as usize) < self.n
    }
}

/// What a case gave.
#[derive(Debug, Clone, Serialize)]
pub struct CaseReport {
    /// `entry/model/pin`.
    pub id: String,
    /// The producer.
    pub producer: String,
    /// How it ended.
    pub verdict: Verdict,
    /// Why, where it is not a pass.
    pub reasons: Vec<String>,
    /// How exact the model's weights are.
    pub weights: Option<Weights>,
    /// The worst distances over the prompts.
    pub distances: Distances,
    /// The worst noise over the prompts.
    pub noise: Distances,
    /// Replies after a restore.
    pub handed: Spread,
    /// Cold replies.
    pub cold: Spread,
    /// Controls with small batches.
    pub small_batch: Spread,
    /// Controls with the other attention.
    pub other_attention: Spread,
    /// Replies after a restore of the oracle's files, in a case of a contract.
    pub oracle: Spread,
    /// The worst distances from the oracle's files over the prompts, in such a case.
    pub from_oracle: Option<Distances>,
    /// Prompts of which as few tokens were evaluated as should be: one, or two after a checkpoint.
    pub reused: usize,
    /// Prompts that the server computes again whatever it is given, as it should.
    pub reprocessed: usize,
    /// Differences of the longest prompt by layer and position.
    pub heat: Option<Heat>,
    /// The prompts.
    pub prompts: Vec<PromptReport>,
    /// Wall time.
    pub seconds: f64,
}

impl CaseReport {
    fn ended(id: String, producer: String, verdict: Verdict, reason: String) -> CaseReport {
        CaseReport {
            id,
            producer,
            verdict,
            reasons: vec![reason],
            weights: None,
            distances: Distances::ZERO,
            noise: Distances::ZERO,
            handed: Spread::default(),
            cold: Spread::default(),
            small_batch: Spread::default(),
            other_attention: Spread::default(),
            oracle: Spread::default(),
            from_oracle: None,
            reused: 0,
            reprocessed: 0,
            heat: None,
            prompts: Vec::new(),
            seconds: 0.0,
        }
    }
}

/// Runs cases, `workers` at a time, and says of each how it ended. Reports are in the order of the cases.
pub fn run_all(context: &Context, cases: &[Case], workers: usize) -> Vec<CaseReport> {
    let runs = Runs::new(cases.len(), cases.iter().map(|c| weight(&context.pins, c)).sum());
    // The longest first, so that no worker is left with one at the end.
    let mut order: Vec<usize> = (0..cases.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(weight(&context.pins, &cases[i])));
    let (next, results) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    std::thread::scope(|scope| {
        for _ in 0..workers.max(1) {
            scope.spawn(|| {
                while let Some(&i) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let id = cases[i].id();
                    runs.begin(&id);
                    let report = run_case(context, &cases[i]);
                    runs.end(&id, weight(&context.pins, &cases[i]), &report::line(&report));
                    if let Ok(mut results) = results.lock() {
                        results.insert(i, report);
                    }
                }
            });
        }
    });
    results.into_inner().map(|m| m.into_values().collect()).unwrap_or_default()
}

fn weight(pins: &Pins, case: &Case) -> u64 {
    let bytes = pins.model(&case.model).map_or(1 << 20, |m| m.bytes);
    bytes * case.prompts.len() as u64 * u64::from(case.greedy)
}

/// Runs one case.
pub fn run_case(context: &Context, case: &Case) -> CaseReport {
    let began = Instant::now();
    let name = context.producer.make().name();
    let mut report = match Runner::new(context, case).and_then(|mut r| {
        let result = r.run();
        if let (Some(keep), true) = (&context.keep, !matches!(&result, Ok(r) if r.verdict == Verdict::Pass)) {
            r.keep(keep)?;
        }
        result
    }) {
        Ok(report) => report,
        Err(e) => CaseReport::ended(case.id(), name, Verdict::Error, format!("{e:#}")),
    };
    report.seconds = began.elapsed().as_secs_f64();
    report
}

/// The model a case names, as a file; installed or written if need be.
pub fn model_path(pins: &Pins, cache: &Cache, name: &str) -> Result<PathBuf> {
    match fixtures::find(name) {
        Some(tiny) => tiny.write(&cache.root().join("tiny")),
        None => cache.install_model(pins.model(name)?),
    }
}

/// One case while it runs.
pub(crate) struct Runner<'a> {
    pub(crate) context: &'a Context,
    pub(crate) case: &'a Case,
    pub(crate) build: Build,
    pub(crate) model: PathBuf,
    pub(crate) shape: Shape,
    pub(crate) dir: TempDir,
    tiny: bool,
}

impl<'a> Runner<'a> {
    fn new(context: &'a Context, case: &'a Case) -> Result<Runner<'a>> {
        let build = match &context.server {
            Some(path) => Build::Binary { path: path.clone() },
            None => Build::pinned(&context.pins, &context.cache, &case.pin)?,
        };
        let model = model_path(&context.pins, &context.cache, &case.model)?;
        let shape = Shape::of(&Gguf::open(&model)?)?;
        let dir = TempDir::new(context.cache.root())?;
        Ok(Runner { context, case, build, model, shape, dir, tiny: fixtures::find(&case.model).is_some() })
    }

    fn keep(&self, to: &Path) -> Result<()> {
        let target = to.join(self.case.id().replace('/', "-"));
        if target.exists() {
            fs::remove_dir_all(&target).with_context(|| format!("removing {}", target.display()))?;
        }
        copy_dir(&self.dir.0, &target)
    }

    pub(crate) fn start(&self, which: &str, change: impl FnOnce(&mut ServerOptions)) -> Result<Server> {
        let slots = self.dir.0.join(which);
        fs::create_dir_all(&slots).with_context(|| format!("creating {}", slots.display()))?;
        let mut options = ServerOptions::new(&self.model, &slots);
        options.n_ctx = self.case.n_ctx * self.case.n_parallel;
        options.n_parallel = self.case.n_parallel;
        options.type_k = self.case.type_k;
        options.type_v = self.case.type_v;
        options.flash_attn = self.case.flash_attn;
        options.swa_full = self.case.swa_full;
        change(&mut options);
        let mut server = Server::start(&self.build, &options, &self.dir.0.join(format!("{which}.log")))?;
        if self.tiny {
            server.client.ban = fixtures::unprintable();
        }
        Ok(server)
    }

    pub(crate) fn cache(&self) -> CacheOptions {
        CacheOptions {
            type_k: self.case.type_k,
            type_v: self.case.type_v,
            flash_attn: self.case.flash_attn,
            swa_full: self.case.swa_full,
            n_stream: self.case.n_parallel,
        }
    }

    pub(crate) fn quantised(&self) -> bool {
        self.case.type_k.is_quantised() || self.case.type_v.is_quantised()
    }

    fn run(&mut self) -> Result<CaseReport> {
        let mut references = self.references()?;
        let version = self.version(&references)?;
        self.by_contract(&mut references, version)?;
        let kernels = self.kernels()?;
        let cache = self.cache();
        let mut producer = self.context.producer.make();
        let slots = self.dir.0.join("b");
        fs::create_dir_all(&slots).with_context(|| format!("creating {}", slots.display()))?;
        let mut produced = Vec::new();
        for r in &references {
            let out = slots.join(format!("{}.bin", r.name));
            let job = Job {
                name: format!("{}/{}/{}", self.case.name, self.case.model, r.name),
                model: &self.model,
                tokens: &r.ids[..r.ids.len() - 1],
                version,
                cache,
                n_ctx: self.case.n_ctx,
                chunk: self.case.chunk,
                arithmetic: self.case.arithmetic,
                kernels: kernels.as_ref(),
                server_file: &r.file,
            };
            match producer.produce(&job, &out).with_context(|| format!("prompt {}", r.name))? {
                Produced::File { prefill_ms } => {
                    produced.push((out, prefill_ms, producer.notes(), producer.times()));
                }
                Produced::Skipped(why) => {
                    return Ok(CaseReport::ended(self.case.id(), producer.name(), Verdict::Skip, why));
                }
            }
        }
        let handoff = producer.window_plus_one();
        let worst_noise = references.iter().fold(Distances::ZERO, |d, r| d.max(r.noise));
        let mut report = CaseReport::ended(self.case.id(), producer.name(), Verdict::Pass, String::new());
        report.reasons.clear();
        report.weights = Some(self.shape.weights);
        report.noise = worst_noise;

        let spec = self.shape.kv_spec(&cache);
        let reads_checkpoints =
            self.shape.window.is_some() && version.has_checkpoints() && self.reads_checkpoints(&references)?;
        let mut server = self.start("b", |o| o.cache_ram_mib = 8192)?;
        let longest = references.iter().map(|r| r.ids.len()).max().unwrap_or(0);
        for (r, (file, prefill_ms, notes, times)) in references.iter().zip(&produced) {
            let tokens = &r.ids[..r.ids.len() - 1];
            let bytes = fs::read(file).with_context(|| format!("reading {}", file.display()))?;
            let server_bytes = fs::read(&r.file).with_context(|| format!("reading {}", r.file.display()))?;
            let server_state =
                self.shape.parse(&server_bytes).with_context(|| format!("the server's own file of {}", r.name))?;
            let parsed = self.shape.parse(&bytes);
            let want =
                Want { tokens, version, spec: &spec, n_vocab: self.shape.n_vocab, n_ctx: self.case.n_ctx, handoff };
            let mut p = PromptReport {
                prompt: r.name.clone(),
                n: r.ids.len(),
                structure: check::structure(&bytes, &server_state, &want),
                distances: Distances::ZERO,
                noise: r.noise,
                from_oracle: None,
                failed: Vec::new(),
                restored: 0,
                restore_ms: 0.0,
                prompt_n: 0,
                want_prompt_n: self.want_prompt_n(
                    tokens.len(),
                    handoff,
                    parsed.as_ref().ok().filter(|_| reads_checkpoints),
                ),
                cache_n: 0,
                handed: None,
                cold: Some(r.cold_reply),
                small_batch: r.small_batch,
                other_attention: r.other_attention,
                oracle: r.oracle.as_ref().map(|(_, reply)| *reply),
                prefill_ms: *prefill_ms,
                times: times.clone(),
                first_token_ms: None,
                server_prefill_ms: r.prefill_ms,
                notes: r.notes.iter().chain(notes).cloned().collect(),
            };
            for s in &p.structure {
                report.reasons.push(format!("{}: structure: {s}", r.name));
            }
            match parsed
                .map_err(anyhow::Error::from)
                .and_then(|s| Ok((check::distances(&server_state, &s, &self.shape)?.0, s)))
            {
                Ok((d, state)) => {
                    p.distances = d;
                    if report.heat.is_none() && r.ids.len() == longest {
                        let grid = Grid::of(&server_state, &state, &self.shape, tokens.len());
                        report.heat = grid.ok().map(|g| Heat::new(&r.name, tokens.len(), &g, &r.noise_grid));
                    }
                    p.failed = match &r.oracle {
                        Some((oracle, _)) => {
                            let from_oracle = check::distances(&self.read(oracle)?, &state, &self.shape)?.0;
                            p.from_oracle = Some(from_oracle);
                            report.from_oracle =
                                Some(report.from_oracle.map_or(from_oracle, |worst| worst.max(from_oracle)));
                            contract::judge(&from_oracle, &d, &worst_noise)
                        }
                        None => {
                            let cache = [self.case.type_k, self.case.type_v];
                            check::judge(&d, self.shape.weights, cache, &worst_noise)
                        }
                    };
                    p.failed.retain(|m| !m.passes());
                }
                Err(e) => report.reasons.push(format!("{}: {e:#}", r.name)),
            }
            // A file that is known to be wrong is not fed to a server: some make it abort, and then nothing more is learnt.
            if p.structure.is_empty() {
                let outcome = self.hand_over(&server.client, r, file, &mut p);
                if let Err(e) = server.explain(outcome) {
                    report.reasons.push(format!("{}: {e:#}", r.name));
                    if !matches!(server.exited(), Ok(None)) {
                        server = self.start("b", |o| o.cache_ram_mib = 8192)?;
                    }
                }
            }
            if p.handed.is_some()
                && (p.prompt_n != p.want_prompt_n || p.cache_n as usize != p.n - p.want_prompt_n as usize)
            {
                report.reasons.push(format!(
                    "{}: after the restore prompt_n is {} and cache_n {}, should be {} and {}",
                    r.name,
                    p.prompt_n,
                    p.cache_n,
                    p.want_prompt_n,
                    p.n - p.want_prompt_n as usize
                ));
            }
            report.distances = report.distances.max(p.distances);
            report.prompts.push(p);
        }
        drop(server);
        report.reasons.extend(worst_measures(&report.prompts));
        self.judge_behaviour(&mut report);
        if !report.reasons.is_empty() {
            report.verdict = Verdict::Fail;
        }
        Ok(report)
    }

    /// Whether the server reads checkpoints behind a state: those that do write them, but for the shortest prompts.
    fn reads_checkpoints(&self, references: &[Reference]) -> Result<bool> {
        for r in references {
            let bytes = fs::read(&r.file).with_context(|| format!("reading {}", r.file.display()))?;
            if self.shape.parse(&bytes)?.appendix.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Evaluated tokens that a restore of `handed` cells should leave: one; where a sliding window is not filled two, if there is
    /// a checkpoint that the server reads, or all of them, since then no file can help.
    fn want_prompt_n(&self, handed: usize, window_plus_one: bool, file: Option<&State>) -> u32 {
        let all = handed as u32 + 1;
        match self.shape.window {
            // Without a checkpoint the server wants the cells before the window's first, and short prompts have none.
            Some(window) if !self.case.swa_full && (handed <= window || !window_plus_one) => {
                // The rule is the server's own: it goes on behind the first position of a checkpoint, or at its last, and takes
                // one that begins at 0 for every prompt as long.
                let checkpoints = file.iter().flat_map(|f| &f.appendix);
                let mut usable = checkpoints.flat_map(|a| &a.checkpoints).rev();
                let found = usable.find(|c| c.pos_min == 0 && c.pos_max <= handed as i32);
                found.map_or(all, |c| all - (c.pos_max.max(1) as u32).min(c.n_tokens as u32).min(handed as u32))
            }
            _ => 1,
        }
    }

    /// The version that the server's files carry, which must be the pin's.
    fn version(&self, references: &[Reference]) -> Result<StateVersion> {
        let first = references.first().context("the case has no prompts")?;
        let bytes = fs::read(&first.file).with_context(|| format!("reading {}", first.file.display()))?;
        let found = kvlayout::read_version(&bytes)?;
        if let Some(want) = self.build.state_version() {
            ensure!(found.number() == want, "{} writes state version {found}, its pin says {want}", self.build.name());
        }
        Ok(found)
    }

    /// Restores a file and asks for the reply.
    ///
    /// Servers have been seen to restore a file and then to compute the whole prompt, once in about a thousand handoffs and never twice
    /// for one file, when two could be given one port. That is tried once more, and noted: what a file is to blame for happens
    /// again.
    fn hand_over(&self, client: &Client, r: &Reference, file: &Path, p: &mut PromptReport) -> Result<()> {
        self.hand_over_once(client, r, file, p)?;
        if p.reuses() && p.cache_n == 0 {
            p.notes.push("the server restored the file and computed the whole prompt; tried once more".into());
            self.hand_over_once(client, r, file, p)?;
        }
        Ok(())
    }

    fn hand_over_once(&self, client: &Client, r: &Reference, file: &Path, p: &mut PromptReport) -> Result<()> {
        let name = file.file_name().and_then(|n| n.to_str()).context("file name")?;
        let restored = client.restore(0, name)?;
        p.restored = restored.tokens;
        p.restore_ms = restored.ms;
        ensure!(
            restored.tokens as usize == r.ids.len() - 1,
            "restored {} tokens of {}",
            restored.tokens,
            r.ids.len() - 1
        );
        let ask = self.ask(&r.ids);
        // Where the server computes everything again, the reply is the cold one.
        let against = if p.reuses() { &r.control } else { &r.cold };
        let reply = client.complete(&ask, until_departure(against))?;
        p.first_token_ms = reply.prompt_ms;
        let mut counts = reply.prompt_n.zip(reply.cache_n);
        if counts.is_none() {
            client.restore(0, name)?;
            let counted = client.count(&ask)?;
            counts = counted.prompt_n.zip(counted.cache_n);
        }
        let (prompt_n, cache_n) = counts.context("the server does not say what it evaluated")?;
        (p.prompt_n, p.cache_n) = (prompt_n, cache_n);
        p.handed = Some(behaviour::compare(against, &reply));
        if !p.reuses() {
            p.notes.push(format!("asserted: the server computes all {} tokens again, whatever the file", p.n));
        }
        client.erase(0)?;
        Ok(())
    }

    fn judge_behaviour(&self, report: &mut CaseReport) {
        let (mut handed, mut cold, mut small, mut attention) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut oracle = Vec::new();
        for p in &report.prompts {
            let Some(reply) = p.handed else { continue };
            if !p.reuses() {
                // Compared with the cold reply, which it must equal: nothing of the file is used.
                report.reprocessed += 1;
                if reply.agreed < reply.of.min(1) || (reply.agreed < reply.of && reply.gap > tol::TIE) {
                    report.reasons.push(format!(
                        "{}: the prompt was computed again, but the text departs from the cold one at token {}",
                        p.prompt, reply.agreed
                    ));
                }
                continue;
            }
            report.reused += usize::from(p.prompt_n == p.want_prompt_n);
            handed.push(reply);
            cold.extend(p.cold);
            small.extend(p.small_batch);
            attention.extend(p.other_attention);
            oracle.extend(p.oracle);
        }
        report.handed = Spread::of(&handed);
        report.cold = Spread::of(&cold);
        report.small_batch = Spread::of(&small);
        report.other_attention = Spread::of(&attention);
        report.oracle = Spread::of(&oracle);
        if handed.is_empty() {
            return;
        }
        let (h, c, s, a) = (report.handed, report.cold, report.small_batch, report.other_attention);
        let o = report.oracle;
        let mut reasons = Vec::new();
        let mut fail = |text: String| reasons.push(text);
        // What hangs on a few events, where every text departs.
        let few = if self.case.arithmetic == Arithmetic::Exact { tol::NOISE } else { tol::INT8_FEW };
        for (what, value, times, own) in [
            (
                "mean divergence of the next token, over the texts",
                h.kl_mean,
                tol::NOISE,
                [c.kl_mean, s.kl_mean, a.kl_mean, o.kl_mean],
            ),
            ("largest divergence of the first token", h.kl_max, few, [c.kl_max, s.kl_max, a.kl_max, o.kl_max]),
        ] {
            let limit = times * own.into_iter().fold(tol::KL_FLOOR, f64::max);
            if value.is_nan() || value > limit {
                fail(format!("{what} is {value:.3e}, the limit {limit:.3e}"));
            }
        }
        let own = [c, s, a, o].map(|spread| spread.dlogp_max);
        let spread = tol::NOISE * own.into_iter().fold(tol::TIE / tol::NOISE, f64::max);
        // Texts of 8-bit codes are not the server's, whatever the weights were before.
        let same_texts = self.shape.weights == Weights::F32 && self.case.arithmetic == Arithmetic::Exact;
        for p in report.prompts.iter().filter(|p| p.reuses()) {
            let Some(reply) = p.handed else { continue };
            if !reply.top1 && reply.gap1 > spread {
                fail(format!(
                    "{}: the next token is another, and the control holds its own {:.3} more probable (its spread is {spread:.3})",
                    p.prompt, reply.gap1
                ));
            }
            if same_texts && reply.agreed < reply.of && (reply.gap.is_nan() || reply.gap > spread) {
                fail(format!(
                    "{}: the text departs at token {} where the control's two tokens are {:.4} apart (its spread is {spread:.4})",
                    p.prompt, reply.agreed, reply.gap
                ));
            }
        }
        let mine = Departures::of(&handed);
        let own = [&cold, &small, &attention, &oracle].into_iter().filter(|replies| !replies.is_empty());
        let own: Vec<Departures> = own.map(|replies| Departures::of(replies)).collect();
        let limit = few * own.iter().map(Departures::most).fold(0.0, f64::max);
        if !same_texts && mine.rate() > limit {
            fail(format!(
                "texts depart from the control every {:.1} tokens, those of the server's variants every {}; the limit is {:.1}",
                1.0 / mine.rate(),
                own.iter().map(|d| format!("{:.1}", 1.0 / d.rate())).collect::<Vec<_>>().join(", "),
                1.0 / limit,
            ));
        }
        report.reasons.extend(reasons);
    }
}

/// How often texts depart.
struct Departures {
    departed: f64,
    tokens: f64,
}

impl Departures {
    fn of(replies: &[Reply]) -> Departures {
        let mut d = Departures { departed: 0.0, tokens: 0.0 };
        for r in replies {
            d.departed += f64::from(u8::from(r.agreed < r.of));
            d.tokens += r.agreed as f64 + f64::from(u8::from(r.agreed < r.of));
        }
        d
    }

    /// Departures per token.
    fn rate(&self) -> f64 {
        self.departed / self.tokens.max(1.0)
    }

    /// The rate that another's is measured by: at least one departure, and nothing where there was nothing to measure.
    fn most(&self) -> f64 {
        if self.tokens == 0.0 {
            return 0.0;
        }
        self.departed.max(1.0) / self.tokens.max(1.0)
    }
}

/// The failed measures, one line for each kind with its worst value.
fn worst_measures(prompts: &[PromptReport]) -> Vec<String> {
    let mut kinds: BTreeMap<&str, (usize, &str, &Measure)> = BTreeMap::new();
    for p in prompts {
        for m in &p.failed {
            let entry = kinds.entry(&m.what).or_insert((0, &p.prompt, m));
            entry.0 += 1;
            // Also true for a value that is no number, which is the worst there is.
            if m.value > entry.2.value || m.value.is_nan() {
                (entry.1, entry.2) = (&p.prompt, m);
            }
        }
    }
    let line = |(what, (n, prompt, m)): (&str, (usize, &str, &Measure))| {
        format!("{what}: {:.3e} on {prompt}, the limit is {:.3e} ({n} of {} prompts)", m.value, m.limit, prompts.len())
    };
    kinds.into_iter().map(line).collect()
}

/// A directory in the cache for one run, gone when dropped.
pub(crate) struct TempDir(pub(crate) PathBuf);

/// The directories that this process has for its runs just now.
pub fn temporary_dirs(root: &Path) -> Vec<PathBuf> {
    let own = format!("{}-", std::process::id());
    let entries = fs::read_dir(root.join("run")).into_iter().flatten().flatten();
    entries.filter(|e| e.file_name().to_string_lossy().starts_with(&own)).map(|e| e.path()).collect()
}

impl TempDir {
    pub(crate) fn new(root: &Path) -> Result<TempDir> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let path = root.join("run").join(format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
        if path.exists() {
            fs::remove_dir_all(&path).with_context(|| format!("removing the leftover {}", path.display()))?;
        }
        fs::create_dir_all(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(TempDir(path))
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn copy_dir(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("reading {}", from.display()))? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_dir(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target).with_context(|| format!("copying to {}", target.display()))?;
        }
    }
    Ok(())
}
