//! The demonstration: a real server, a real model, one prompt, handed over and plain.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use gguf::Gguf;

use crate::behaviour;
use crate::client::{Ask, Completion};
use crate::oracle::Arithmetic;
use crate::pins::{Cache, Pins};
use crate::probe::Probe;
use crate::producer::{Job, Produced, Producer as _, Provider};
use crate::run::TempDir;
use crate::server::{Build, Server, ServerOptions};
use crate::shape::{CacheOptions, Shape};

/// The built-in message: a few hundred tokens for a small model.
const MESSAGE: &str = "\
I keep the log of a small harbour and want to write a short note for the people who will take over from me in spring. \
Here is what I have so far.\n\n\
The harbour has two piers. The northern one is of stone and was repaired last year; boats of up to twelve metres can lie \
there in any weather. The southern one is of wood. Its outer third is closed, because two of the piles move when a \
hand is laid on them, and nobody should moor there until the carpenter has seen them from below. The light at the end of \
the northern pier is switched by a clock, which is wound on Mondays. When the wind comes from the east for more than a day the \
water in the basin rises by about half a metre, and then the boats on the inner ring need longer ropes. The office has a radio, a \
barometer and a kettle. The barometer reads three units too high. The key to the fuel store hangs behind the tide tables, and \
each delivery is written into the green book with date, amount and name. In the cold months the tap on the quay is closed and \
emptied, otherwise the pipe bursts, as it did in my first winter. Fishermen pay by the month, guests by the night, and the \
ferry not at all, because the town agreed so before my time. On the last Sunday of May there is a race for rowing boats, for which \
the basin has to be free by noon.\n\n\
Please make a list of the five things that matter most in the first week, each with one sentence that says why.";

/// Tokens of the reply.
const REPLY: u32 = 64;

/// What the demonstration is run with.
#[derive(Debug, Clone, Default)]
pub struct Demo {
    /// A `llama-server` of the user's own.
    pub llama_server: Option<PathBuf>,
    /// A model of the user's own.
    pub model: Option<PathBuf>,
    /// A message of the user's own.
    pub prompt: Option<String>,
    /// The pinned server, if none is given.
    pub pin: String,
    /// The provider.
    pub provider: PathBuf,
    /// Threads for server and provider.
    pub threads: u32,
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The server's name and the version of its state files.
    pub server: String,
    /// The model file.
    pub model: PathBuf,
    /// Ids of the prompt.
    pub n: usize,
    /// Bytes of the state file.
    pub bytes: u64,
    /// The provider's prefill.
    pub provider_ms: f64,
    /// The server's restore.
    pub restore_ms: f64,
    /// The server's own prefill of the whole prompt.
    pub server_ms: f64,
    /// Evaluated after the restore.
    pub prompt_n: u32,
    /// Whether more than one is what this model and server do with any file.
    pub cannot_reuse: bool,
    /// The reply after the handoff.
    pub handed: Completion,
    /// The reply of the server by itself, from nothing.
    pub plain: Completion,
    /// The reply of the server after its own prefill of all but the last id.
    pub control: Completion,
}

/// Runs it.
pub fn run(pins: &Pins, cache: &Cache, demo: &Demo) -> Result<Outcome> {
    let model = match &demo.model {
        Some(path) => path.clone(),
        None => cache.install_model(pins.model("smollm2")?)?,
    };
    let build = match &demo.llama_server {
        Some(path) => Build::Binary { path: path.clone() },
        None => Build::pinned(pins, cache, &demo.pin)?,
    };
    let dir = TempDir::new(cache.root())?;
    let slots = dir.0.join("slots");
    fs::create_dir_all(&slots).with_context(|| format!("creating {}", slots.display()))?;
    let mut options = ServerOptions::new(&model, &slots);
    options.threads = demo.threads;
    options.n_ctx = 4096;
    let mut server = Server::start(&build, &options, &dir.0.join("server.log"))?;
    let result = hand_over(&mut server, &build, &model, demo);
    server.explain(result)
}

fn hand_over(server: &mut Server, build: &Build, model: &Path, demo: &Demo) -> Result<Outcome> {
    let client = server.client.clone();
    let slots = server.options.slots.clone();
    let text = client.apply_template(demo.prompt.as_deref().unwrap_or(MESSAGE))?;
    let ids = client.tokenize(&text)?;
    ensure!(ids.len() >= 2, "the prompt has {} ids; two is the least there is to hand over", ids.len());
    let n_ctx = server.options.n_ctx;
    ensure!(
        ids.len() + REPLY as usize <= n_ctx as usize,
        "the prompt has {} ids, the server a context of {n_ctx}",
        ids.len()
    );
    let handed_ids = &ids[..ids.len() - 1];

    // The server says what its files look like; nothing is guessed.
    client.prefill(&ids[..1], 0)?;
    client.save(0, "probe.bin")?;
    let probe_path = slots.join("probe.bin");
    let probe_bytes = fs::read(&probe_path).with_context(|| format!("reading {}", probe_path.display()))?;
    let probe = Probe::from_file(&probe_bytes, n_ctx)?;
    client.erase(0)?;

    let out = slots.join("prompt.bin");
    let cache = CacheOptions {
        type_k: probe.type_k,
        type_v: probe.type_v,
        flash_attn: probe.flash_attn,
        swa_full: false,
        n_stream: probe.n_stream,
    };
    let job = Job {
        name: "demo".into(),
        model,
        tokens: handed_ids,
        version: probe.version,
        cache,
        n_ctx,
        chunk: None,
        arithmetic: Arithmetic::Exact,
        kernels: None,
        server_file: &probe_path,
    };
    let mut provider = Provider::new(&demo.provider, demo.threads);
    let provider_ms = match provider.produce(&job, &out)? {
        Produced::File { prefill_ms } => prefill_ms.unwrap_or(0.0),
        Produced::Skipped(why) => anyhow::bail!("{why}"),
    };
    let restored = client.restore(0, "prompt.bin")?;
    let mut ask = Ask { prompt: &ids, n_predict: REPLY, n_probs: 5, cache_prompt: true, slot: 0, ignore_eos: false };
    let handed = client.complete(&ask, |_| true)?;
    client.erase(0)?;

    client.prefill(handed_ids, 0)?;
    let control = client.complete(&ask, |_| true)?;
    client.erase(0)?;
    ask.cache_prompt = false;
    let plain = client.complete(&ask, |_| true)?;

    let window = Shape::of(&Gguf::open(model)?).ok().and_then(|s| s.window);
    Ok(Outcome {
        server: format!("{} (state version {})", build.name(), probe.version),
        model: model.to_owned(),
        n: ids.len(),
        bytes: restored.bytes,
        provider_ms,
        restore_ms: restored.ms,
        server_ms: plain.prompt_ms.unwrap_or(0.0),
        prompt_n: handed.prompt_n.unwrap_or(0),
        cannot_reuse: window.is_some_and(|w| handed_ids.len() <= w),
        handed,
        plain,
        control,
    })
}

impl Outcome {
    /// Whether the handoff did its work: one token evaluated, and the reply that the server itself gives in that situation or
    /// from nothing.
    pub fn succeeded(&self) -> bool {
        self.prompt_n == 1
    }

    /// For people.
    pub fn text(&self) -> String {
        let indent = |c: &Completion| c.text.trim().lines().map(|l| format!("    {l}\n")).collect::<String>();
        let agree = |other: &Completion| {
            let r = behaviour::compare(other, &self.handed);
            if r.agreed == r.of && self.handed.steps.len() == other.steps.len() {
                format!("yes, all {} tokens", r.of)
            } else {
                format!(
                    "for {} of {} tokens; there the two best choices were {:.2} apart in log probability",
                    r.agreed, r.of, r.gap
                )
            }
        };
        let reuse = match (self.prompt_n, self.cannot_reuse) {
            (1, _) => "as it should".to_owned(),
            (_, true) => {
                "the prompt is shorter than the model's sliding window: this server computes it again from any file, \
                          unless it runs with --swa-full"
                    .to_owned()
            }
            (n, false) => format!("it should have been 1, so {} tokens were computed again", n - 1),
        };
        format!(
            "server              {}\nmodel               {}\nprompt              {} tokens, {} handed over in a file of {:.1} MB\n\
             provider's prefill  {:.1} ms\nserver's restore    {:.1} ms\nserver's own        {:.1} ms for the whole prompt\n\
             prompt_n            {} evaluated after the restore ({reuse})\n\nreply, handed over:\n{}\nreply, plain:\n{}\n\
             agrees with the plain reply    {}\nagrees with the control        {}\n\
             (the control: the server prefills all tokens but the last itself, then gets the whole prompt; a plain reply may part \
             from it, because there the last token is computed by other kernels)\n",
            self.server,
            self.model.display(),
            self.n,
            self.n - 1,
            self.bytes as f64 / 1e6,
            self.provider_ms,
            self.restore_ms,
            self.server_ms,
            self.prompt_n,
            indent(&self.handed),
            indent(&self.plain),
            agree(&self.plain),
            agree(&self.control),
        )
    }
}
