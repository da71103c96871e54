//! Who makes state files: the program under test, a server, the oracle, or files made earlier.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use gguf::Gguf;
use kvlayout::{CacheType, StateVersion};
use serde::Serialize;

use crate::contract::Kernels;
use crate::decoder::Kind;
use crate::oracle::{Arithmetic, Mistake, Oracle};
use crate::shape::{CacheOptions, Shape};
use crate::shared::{Route, SharedProvider};

/// How long the provider may take for one prompt.
const DEADLINE: Duration = Duration::from_secs(900);

/// One state file to be made.
#[derive(Debug, Clone)]
pub struct Job<'a> {
    /// Name of the case and the prompt, for fixtures.
    pub name: String,
    /// The model.
    pub model: &'a Path,
    /// The ids handed over: the prompt without its last.
    pub tokens: &'a [i32],
    /// The version the server reads.
    pub version: StateVersion,
    /// The decoder's cache.
    pub cache: CacheOptions,
    /// The decoder's context per slot.
    pub n_ctx: u32,
    /// The provider's chunk.
    pub chunk: Option<u32>,
    /// How matrix products are to be computed.
    pub arithmetic: Arithmetic,
    /// The device and the kernels that compute them so, where it is not the provider's own way.
    pub kernels: Option<&'a Kernels>,
    /// What the server itself saved for these ids.
    pub server_file: &'a Path,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
pub enum Produced {
    /// The file is there; `prefill_ms` as the producer tells it.
    File {
        /// Time for the prefill, if the producer tells.
        prefill_ms: Option<f64>,
    },
    /// This producer does not do that, and why.
    Skipped(String),
}

/// Makes state files.
pub trait Producer {
    /// Its name.
    fn name(&self) -> String;
    /// Makes one at `out`.
    fn produce(&mut self, job: &Job<'_>, out: &Path) -> Result<Produced>;
    /// What is worth knowing about the last one.
    fn notes(&mut self) -> Vec<String> {
        Vec::new()
    }
    /// Where the time of the last one went, where that is known.
    fn times(&mut self) -> Option<Times> {
        None
    }
    /// Whether its files hold the one cell more than the window that makes a sliding-window state usable.
    fn window_plus_one(&self) -> bool {
        true
    }
}

/// What to make a producer from; each worker makes its own.
#[derive(Debug, Clone)]
pub enum Choice {
    /// The program at this path.
    Provider(PathBuf),
    /// The same, into a decoder's memory.
    Shared(PathBuf, Route, Kind),
    /// The server itself.
    Server,
    /// The oracle, right or wrong.
    Oracle(Option<Mistake>),
    /// Files from a directory, `CASE-MODEL-PROMPT.bin`.
    Fixture(PathBuf),
}

impl Choice {
    /// A producer.
    pub fn make(&self) -> Box<dyn Producer> {
        match self {
            Choice::Provider(path) => Box::new(Provider::new(path, 1)),
            Choice::Shared(path, route, kind) => Box::new(SharedProvider::new(path, 1, *route, *kind)),
            Choice::Server => Box::new(ServerSlot),
            Choice::Oracle(mistake) => Box::new(OracleProducer { mistake: *mistake, loaded: None }),
            Choice::Fixture(dir) => Box::new(Fixture { dir: dir.clone() }),
        }
    }
}

/// The program under test, started as a decoder's owner starts it.
pub struct Provider {
    /// The program.
    pub path: PathBuf,
    /// Threads it may use.
    pub threads: u32,
    /// Times of the last run.
    times: Option<Times>,
}

/// Where the time of a provider's run went, in milliseconds. All but the first are what it says of itself.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Times {
    /// From its start to its end, seen from outside.
    pub process_ms: f64,
    /// Opening the model.
    pub load_ms: f64,
    /// From its start to its first matrix product.
    pub first_gemm_ms: Option<f64>,
    /// All layers, writing included.
    pub prefill_ms: f64,
    /// Writing rows and publishing the file, of that.
    pub write_ms: f64,
    /// Each layer.
    pub layer_ms: Vec<f64>,
}

impl Provider {
    /// The program at `path`.
    pub fn new(path: &Path, threads: u32) -> Provider {
        Provider { path: path.to_owned(), threads, times: None }
    }
}

impl Producer for Provider {
    fn name(&self) -> String {
        "provider".into()
    }

    fn produce(&mut self, job: &Job<'_>, out: &Path) -> Result<Produced> {
        let ids = out.with_extension("ids");
        let text: String = job.tokens.iter().map(|t| format!("{t}\n")).collect();
        fs::write(&ids, text).with_context(|| format!("writing {}", ids.display()))?;
        let mut c = Command::new(&self.path);
        c.arg("--tokens").arg(&ids).arg("--out").arg(out).arg("--model").arg(job.model);
        c.args(["--state-version", &job.version.to_string(), "-c", &job.n_ctx.to_string()]);
        c.args(["-t", &self.threads.to_string()]);
        c.args(["--cache-type-k", job.cache.type_k.name(), "--cache-type-v", job.cache.type_v.name()]);
        c.args(["--flash-attn", if job.cache.flash_attn { "on" } else { "off" }]);
        c.args(["--n-stream", &job.cache.n_stream.to_string()]);
        // Version 4 says it in the file, and a server refuses another's; for the rest it is told.
        if job.version < StateVersion::V4 && (job.cache.type_k.is_quantised() || job.cache.type_v.is_quantised()) {
            c.args(["--attn-rot", "on"]);
        }
        if job.cache.swa_full {
            c.arg("--swa-full");
        }
        if let Some(chunk) = job.chunk {
            c.args(["--chunk", &chunk.to_string()]);
        }
        c.args(job.kernels.into_iter().flat_map(Kernels::args));
        // Its own settings, if the user has any, are not what is tested here.
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if name.starts_with("LLAMA_ARG_") || name.starts_with("NPU_PREFILL_") || name.starts_with("ONEBIT_") {
                c.env_remove(name);
            }
        }
        let empty = out.with_extension("config");
        fs::write(&empty, "").with_context(|| format!("writing {}", empty.display()))?;
        c.arg("--config").arg(&empty);
        if job.kernels.is_some() {
            // Weights that are packed for a test are not worth keeping.
            c.env("NPU_PREFILL_CACHE_SIZE", "0");
        }
        self.times = None;
        let began = Instant::now();
        let output = run(c, DEADLINE).with_context(|| format!("the provider {}", self.path.display()))?;
        let process_ms = began.elapsed().as_secs_f64() * 1e3;
        let stderr = String::from_utf8_lossy(&output.stderr);
        if output.code == Some(69) {
            return Ok(Produced::Skipped(format!("the provider declines: {}", stderr.trim())));
        }
        ensure!(output.code == Some(0), "the provider ended with {}: {}", output.status, stderr.trim());
        let stdout = String::from_utf8_lossy(&output.stdout);
        let lines: Vec<_> = stdout.lines().collect();
        ensure!(lines.len() == 1, "the provider wrote {} lines to stdout, should be one: {stdout:?}", lines.len());
        let receipt: serde_json::Value = serde_json::from_str(lines[0])
            .with_context(|| format!("the provider's line is no JSON: {:?}", lines[0]))?;
        let ms = receipt["prefill_ms"].as_f64().with_context(|| format!("no prefill_ms in {}", lines[0]))?;
        ensure!(out.is_file(), "the provider said it was done, but {} is not there", out.display());
        if let Some(kernels) = job.kernels {
            kernels.did_it_all(&receipt)?;
        }
        let number = |key: &str| receipt[key].as_f64();
        self.times = Some(Times {
            process_ms,
            load_ms: number("load_ms").unwrap_or(0.0),
            first_gemm_ms: number("first_gemm_ms"),
            prefill_ms: ms,
            write_ms: number("write_ms").unwrap_or(0.0),
            layer_ms: receipt["layer_ms"].as_array().map_or(vec![], |a| a.iter().filter_map(|v| v.as_f64()).collect()),
        });
        Ok(Produced::File { prefill_ms: Some(ms) })
    }

    fn times(&mut self) -> Option<Times> {
        self.times.take()
    }
}

struct Output {
    code: Option<i32>,
    status: String,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

/// Runs a command with a deadline. What it writes goes to files, so that a full pipe cannot stop it.
fn run(mut command: Command, deadline: Duration) -> Result<Output> {
    let dir = std::env::temp_dir();
    let unique = format!("{}-{:?}", std::process::id(), std::thread::current().id());
    let name = |what: &str| {
        dir.join(format!("conformance-{what}-{}", unique.replace(|c: char| !c.is_ascii_alphanumeric(), "")))
    };
    let (out, err) = (name("out"), name("err"));
    let create = |p: &Path| fs::File::create(p).with_context(|| format!("creating {}", p.display()));
    command.stdin(Stdio::null()).stdout(create(&out)?).stderr(create(&err)?);
    let mut child =
        crate::serve::spawn(&mut command).with_context(|| format!("starting {:?}", command.get_program()))?;
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if began.elapsed() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            bail!("not done after {} s; it was killed", deadline.as_secs());
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let read = |p: &Path| fs::read(p).with_context(|| format!("reading {}", p.display()));
    let output = Output { code: status.code(), status: status.to_string(), stdout: read(&out)?, stderr: read(&err)? };
    let _ = fs::remove_file(&out);
    let _ = fs::remove_file(&err);
    Ok(output)
}

/// The server's own file: what it saves, it should restore.
pub struct ServerSlot;

impl Producer for ServerSlot {
    fn name(&self) -> String {
        "server".into()
    }

    fn produce(&mut self, job: &Job<'_>, out: &Path) -> Result<Produced> {
        fs::copy(job.server_file, out).with_context(|| format!("copying {}", job.server_file.display()))?;
        Ok(Produced::File { prefill_ms: None })
    }

    fn window_plus_one(&self) -> bool {
        false
    }
}

/// The double-precision prefill.
pub struct OracleProducer {
    mistake: Option<Mistake>,
    loaded: Option<(PathBuf, Oracle, Shape)>,
}

/// Above this the oracle would take minutes per prompt.
const ORACLE_LIMIT: u64 = 300 << 20;

impl Producer for OracleProducer {
    fn name(&self) -> String {
        self.mistake.map_or_else(|| "oracle".into(), |m| format!("oracle with {}", m.name()))
    }

    fn produce(&mut self, job: &Job<'_>, out: &Path) -> Result<Produced> {
        let bytes = fs::metadata(job.model).with_context(|| format!("reading {}", job.model.display()))?.len();
        if bytes > ORACLE_LIMIT {
            return Ok(Produced::Skipped(format!("a model of {} MB is too large for the oracle", bytes >> 20)));
        }
        if [job.cache.type_k, job.cache.type_v].iter().any(|t| CacheType::is_quantised(*t)) {
            return Ok(Produced::Skipped("the oracle writes f32, f16 and bf16 caches only".into()));
        }
        if self.loaded.as_ref().is_none_or(|(path, ..)| path != job.model) {
            let model = Gguf::open(job.model)?;
            self.loaded = Some((job.model.to_owned(), Oracle::load(&model)?, Shape::of(&model)?));
        }
        let Some((_, oracle, shape)) = &self.loaded else { bail!("no model is loaded") };
        let began = Instant::now();
        let state = oracle.state(job.tokens, &shape.kv_spec(&job.cache), job.version, job.arithmetic, self.mistake)?;
        fs::write(out, state).with_context(|| format!("writing {}", out.display()))?;
        Ok(Produced::File { prefill_ms: Some(began.elapsed().as_secs_f64() * 1e3) })
    }
}

/// Files made earlier.
pub struct Fixture {
    dir: PathBuf,
}

impl Producer for Fixture {
    fn name(&self) -> String {
        "fixture".into()
    }

    fn produce(&mut self, job: &Job<'_>, out: &Path) -> Result<Produced> {
        let path = self.dir.join(format!("{}.bin", job.name.replace('/', "-")));
        if !path.is_file() {
            return Ok(Produced::Skipped(format!("there is no {}", path.display())));
        }
        fs::copy(&path, out).with_context(|| format!("copying {}", path.display()))?;
        Ok(Produced::File { prefill_ms: None })
    }
}
