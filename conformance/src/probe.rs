//! Finds out what a running server's memory looks like, and writes the provider's configuration from it.
//!
//! One token is prefilled in a slot and the slot is saved; the file says everything: version, cache types, flash attention,
//! streams. Nothing is guessed from the model or from a build number, which servers do not always tell.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use gguf::Gguf;
use kvlayout::{CacheType, Part, Section, State, StateVersion};

use crate::check;
use crate::client::Client;
use crate::oracle::Arithmetic;
use crate::producer::{Job, Produced, Producer as _, Provider};
use crate::run::TempDir;
use crate::shape::{CacheOptions, Shape};

/// What a server was found to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// Version of its state files.
    pub version: StateVersion,
    /// Type of K.
    pub type_k: CacheType,
    /// Type of V.
    pub type_v: CacheType,
    /// Flash attention.
    pub flash_attn: bool,
    /// Whether the rows of quantised caches are rotated; `None` where the file does not say and nothing else did.
    pub attn_rot: Option<bool>,
    /// Why that could not be found out, where it had to be.
    pub rotation_unknown: Option<String>,
    /// Context per slot.
    pub n_ctx: u32,
    /// Streams of its cache.
    pub n_stream: u32,
}

impl Probe {
    /// Probes the server at `url`, whose `--slot-save-path` is `slots`. What slot 0 holds is lost.
    ///
    /// Before version 4 its file does not say whether the rows of a quantised cache are rotated. Then `provider` computes the same
    /// token's rows from the same model, plain and in f32, and the server's are held against both.
    pub fn of(url: &str, slots: &Path, provider: &dyn Fn() -> Result<PathBuf>) -> Result<Probe> {
        let client = Client::new(url);
        ensure!(client.healthy(), "{url}/health does not say ok: is the server running, and has it loaded its model?");
        ensure!(slots.is_dir(), "{} is no directory; give the server's --slot-save-path", slots.display());
        let props = client.props()?;
        let ids = client.tokenize("probe")?;
        let first = ids.first().context("the server tokenises a word to nothing")?;
        client.prefill(&[*first], 0)?;
        let name = format!("npu-prefill-probe-{}.bin", std::process::id());
        let path = slots.join(&name);
        let saved = client.save(0, &name);
        let read = saved.and_then(|_| {
            fs::read(&path).with_context(|| {
                format!("the server saved its slot, but not to {}: is that its --slot-save-path?", path.display())
            })
        });
        let _ = fs::remove_file(&path);
        let _ = client.erase(0);
        let n_ctx = props["default_generation_settings"]["n_ctx"].as_u64().or_else(|| props["n_ctx"].as_u64());
        let n_ctx = n_ctx.and_then(|n| u32::try_from(n).ok()).context("/props does not tell n_ctx")?;
        let bytes = read?;
        let mut probe = Probe::from_file(&bytes, n_ctx)?;
        if probe.attn_rot.is_none() && (probe.type_k.is_quantised() || probe.type_v.is_quantised()) {
            let model = props["model_path"].as_str().map(PathBuf::from);
            let found = match model {
                Some(model) => provider()
                    .and_then(|provider| rotation(&probe, &State::parse_any(&bytes)?, *first, &provider, &model)),
                None => Err(anyhow::anyhow!("/props does not tell model_path")),
            };
            match found {
                Ok(found) => probe.attn_rot = found,
                Err(e) => probe.rotation_unknown = Some(format!("{e:#}").replace('\n', " ")),
            }
        }
        Ok(probe)
    }

    /// The same from a saved file.
    pub fn from_file(bytes: &[u8], n_ctx: u32) -> Result<Probe> {
        let state = State::parse_any(bytes).context("the file the server saved")?;
        let Some(Section::Kv(kv)) = state.sections.iter().find(|s| matches!(s, Section::Kv(kv) if has_rows(kv))) else {
            bail!("the server's file holds no attention cache: its model's memory is of a kind that is not supported");
        };
        let Some((stream, k)) = kv.streams.iter().find_map(|s| Some((s, s.k.first()?))) else {
            bail!("the server's file holds no keys")
        };
        // Latent attention keeps no values.
        let type_v = stream.v.first().map_or(k.ty, |v| v.ty);
        Ok(Probe {
            version: state.version,
            type_k: k.ty,
            type_v,
            flash_attn: !stream.v_trans,
            attn_rot: stream.n_rot.filter(|_| k.ty.is_quantised() || type_v.is_quantised()).map(|n| n != (0, 0)),
            rotation_unknown: None,
            n_ctx,
            n_stream: u32::try_from(kv.streams.len())?,
        })
    }

    /// The provider's configuration.
    pub fn to_toml(&self, url: &str) -> String {
        let attn_rot = match (self.attn_rot, &self.rotation_unknown) {
            (Some(on), _) => format!("attn_rot = {on}\n"),
            (None, Some(why)) => format!("# attn_rot = true or false could not be found out: {why}\n"),
            (None, None) => String::new(),
        };
        format!(
            "# Written by `conformance pin probe` from the server at {url}.\n# Whether it runs with --swa-full cannot be seen from \
             outside: add `swa_full = true` if it does.\nstate_version = {}\ncache_type_k = \"{}\"\ncache_type_v = \"{}\"\n\
             flash_attn = {}\n{attn_rot}n_ctx = {}\nn_stream = {}\n",
            self.version.number(),
            self.type_k,
            self.type_v,
            self.flash_attn,
            self.n_ctx,
            self.n_stream
        )
    }
}

/// Whether the rows of a server's state of one token are rotated; `None` where such heads never are.
fn rotation(probe: &Probe, server: &State, token: i32, provider: &Path, model: &Path) -> Result<Option<bool>> {
    let shape = Shape::of(&Gguf::open(model)?)?;
    let exact = CacheOptions {
        type_k: CacheType::F32,
        type_v: CacheType::F32,
        flash_attn: true,
        swa_full: false,
        n_stream: probe.n_stream,
    };
    let usual = shape.kv_spec(&CacheOptions { type_k: probe.type_k, type_v: probe.type_v, ..exact });
    if usual.sections.iter().all(|s| s.n_rot == (0, 0)) {
        return Ok(None);
    }
    let dir = TempDir::new(&std::env::temp_dir())?;
    let out = dir.0.join("plain.bin");
    let job = Job {
        name: "probe".into(),
        model,
        tokens: &[token],
        version: probe.version,
        cache: exact,
        n_ctx: probe.n_ctx,
        chunk: None,
        arithmetic: Arithmetic::Exact,
        kernels: None,
        server_file: Path::new(""),
    };
    let mut provider = Provider::new(provider, 1);
    if let Produced::Skipped(why) = provider.produce(&job, &out)? {
        bail!("{why}");
    }
    let mut plain = State::parse_any(&fs::read(&out).with_context(|| format!("reading {}", out.display()))?)?;
    check::tell_rotation(&mut plain, &shape.kv_spec(&exact));
    // Of the first layer, where nothing has been read from a cache yet.
    let part = if probe.type_k.is_quantised() { Part::K } else { Part::V };
    let distance = |spec: &kvlayout::KvSpec| -> Result<f64> {
        let mut server = server.clone();
        check::tell_rotation(&mut server, spec);
        let all = kvlayout::compare::numeric(&plain, &server).map_err(|d| anyhow::anyhow!("{d}"))?;
        let first = all.iter().find(|e| e.part == part && shape.model_layer(e.section, e.layer) == Some(0));
        Ok(first.context("no first layer")?.rel_l2)
    };
    let mut straight = usual.clone();
    straight.sections.iter_mut().for_each(|s| s.n_rot = (0, 0));
    // A wrong guess is about 1.4 away, the right one what quantising leaves out: at most 0.2.
    match (distance(&usual)?, distance(&straight)?) {
        (turned, plain) if turned < 0.4 && plain > 0.8 => Ok(Some(true)),
        (turned, plain) if plain < 0.4 && turned > 0.8 => Ok(Some(false)),
        (turned, plain) => bail!("rows are {turned:.2} away if they are rotated and {plain:.2} if not"),
    }
}

fn has_rows(kv: &kvlayout::Kv) -> bool {
    kv.streams.iter().any(|s| !s.k.is_empty())
}

/// Where the provider looks: `$XDG_CONFIG_HOME/npu-prefill/config.toml`, or under `~/.config`.
pub fn usual_place() -> Result<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|h| h.join(".config")));
    Ok(base.context("neither XDG_CONFIG_HOME nor HOME is set; say where with --out")?.join("npu-prefill/config.toml"))
}

/// Writes a configuration, whole or not at all.
pub fn write(path: &Path, text: &str) -> Result<()> {
    let dir = path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
    let temp = dir.join(format!(".config.toml.{}", std::process::id()));
    fs::write(&temp, text).with_context(|| format!("writing {}", temp.display()))?;
    fs::rename(&temp, path).with_context(|| format!("moving {} to {}", temp.display(), path.display()))
}
