//! `setup`: from a running server to a configuration that was tried. It looks at a state file that the server saves itself,
//! writes what it saw into the configuration, makes one handoff of a built-in prompt as a decoder's owner would - this program as
//! a process of its own - and says what that gained or lost against the server's own prefill of the same prompt.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use gguf::Gguf;
use kvlayout::{CacheType, Section, State, StateVersion};
use serde_json::Value;

use crate::cli::SetupArgs;
use crate::config;
use crate::engine::Engine;
use crate::env;
use crate::exit::{self, Error, Kind, Result};
use crate::say::{bytes, print, say};
use crate::server::{Reply, Restored, Server};
use crate::signals::Watch;

/// Tokens of the reply: enough to see whether it is the server's own.
const REPLY: u32 = 24;
/// Ids of the built-in prompt beyond a sliding window: a shorter prompt gains nothing there, and would show nothing.
const BEYOND_WINDOW: usize = 64;
/// How often a stop is looked for while the server works.
const TICK: Duration = Duration::from_millis(50);

/// The built-in prompt, as often as its length asks for.
const TEXT: &str = "\
Notes for whoever looks after the weather station next. The mast stands on the north side of the roof and is held by three \
wires; the one towards the river was replaced in March and has to be tightened again after the first storm. The rain gauge is \
emptied each morning at seven, before the sun reaches it, and its reading goes into the left column of the book. The thermometer in \
the white box is right to a tenth of a degree, the one by the door is not and serves only to tell visitors that it is warm. When the \
wind vane sticks it is nearly always ice, seldom a bird. The battery lasts nine days without sun. In autumn leaves gather in the drain \
of the lower terrace, and water then stands in front of the door of the instrument room, so the sill was raised by the width of a \
hand. The telephone line is older than the house. Whoever calls before eight in the morning is the airfield, and they want the pressure, \
the cloud base and the direction of the wind, in this order and nothing else. Visitors come on Saturdays; children like the \
barograph best, because it draws while one looks on. ";

/// What a server's memory was seen to be.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    version: StateVersion,
    type_k: CacheType,
    type_v: CacheType,
    flash_attn: bool,
    /// Whether it rotates the rows of quantised caches; `None` where its files do not say.
    attn_rot: Option<bool>,
    n_stream: usize,
    n_ctx: u32,
    /// Its model has a sliding window. Whether it keeps all positions of such layers all the same (`--swa-full`) cannot be seen
    /// from outside: it saves the last ones in any case.
    window: bool,
}

/// One handoff and what the server does without it.
struct Tried {
    n_tokens: usize,
    receipt: Value,
    process: Duration,
    restored: Restored,
    handed: Reply,
    own: Reply,
}

/// Does it.
///
/// # Errors
/// Of every kind, with what to do about it. What was written into the server's directory is gone again.
pub fn run(args: SetupArgs) -> Result<()> {
    let watch =
        Watch::start().map_err(|e| Error::new(Kind::Internal, e).context("setting up the handling of signals"))?;
    let files = Files::new(&args.slots);
    // The work waits for a server and for a child; a stop must not wait for either.
    let (send, done) = mpsc::channel();
    let theirs = files.clone();
    std::thread::Builder::new()
        .name("setup".to_owned())
        .spawn(move || {
            let _ = send.send(work(&args, &theirs));
        })
        .map_err(|e| Error::new(Kind::Busy, e).context("starting a thread"))?;
    let result = loop {
        match done.recv_timeout(TICK) {
            Ok(result) => break result,
            Err(mpsc::RecvTimeoutError::Disconnected) => break Err(Error::new(Kind::Internal, "setup ended early")),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                if let Err(stop) = watch.check() {
                    break Err(stop);
                }
            }
        }
    };
    files.remove();
    result
}

fn work(args: &SetupArgs, files: &Files) -> Result<()> {
    let server = Server::new(&args.server)?;
    if !args.slots.is_dir() {
        let text = format!("--slots {}: no directory; give the server's --slot-save-path", args.slots.display());
        return Err(Error::new(Kind::NoInput, text));
    }
    // The model first: without one that can be computed there is nothing to set up.
    let gguf = Gguf::open(&args.model).map_err(exit::gguf_error)?;
    let engine = Engine::new(&gguf)?;
    server.is_well()?;
    let props = server.props()?;
    note_other_model(&props, &args.model);
    let n_ctx = props["default_generation_settings"]["n_ctx"].as_u64().or_else(|| props["n_ctx"].as_u64());
    let n_ctx = n_ctx.and_then(|n| u32::try_from(n).ok()).filter(|&n| n > 0);
    let n_ctx = n_ctx.ok_or_else(|| Error::new(Kind::Unavailable, "the server's /props does not tell n_ctx"))?;

    let window = engine.window();
    let want = args.prompt_tokens.max(window.map_or(0, |w| w as usize + BEYOND_WINDOW)) + 1;
    let ids = prompt(&server, want, n_ctx)?;

    say(format_args!("looking at what {} saves", server.base()));
    let seen = look(&server, files, ids[0], window.is_some(), n_ctx)?;
    let path = match args.config.clone().or_else(|| env::CONFIG.get().map(PathBuf::from)) {
        Some(path) => path,
        None => config::usual_place().ok_or_else(|| {
            Error::new(Kind::Config, "neither XDG_CONFIG_HOME nor HOME is set; say where to write with --config")
        })?,
    };
    config::write(&path, &seen.to_toml(server.base()))?;
    print(&format!("server         {}\n               {seen}\nconfiguration  {}\n", server.base(), path.display()));
    for v in env::OF_THE_DECODER.iter().filter(|v| v.get().is_some()) {
        say(format_args!("{} is set here and beats the configuration", v.name));
    }

    say(format_args!("handing over a prompt of {} tokens", ids.len()));
    let tried = hand_over(args, &server, files, &ids, &path, &seen)?;
    print(&tried.text());
    tried.verdict(&seen)
}

/// The server may run another file than the one named here. It need not be on this machine under its name, so this is no error.
fn note_other_model(props: &Value, model: &Path) {
    use std::os::unix::fs::MetadataExt;
    let Some(theirs) = props["model_path"].as_str().map(Path::new) else { return };
    let same = match (std::fs::metadata(theirs), std::fs::metadata(model)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()) || a.len() == b.len(),
        _ => theirs.file_name() == model.file_name(),
    };
    if !same {
        let (theirs, ours) = (theirs.display(), model.display());
        say(format_args!("the server's model is {theirs}, --model is {ours}: a cache of another model is nonsense"));
    }
}

/// The ids of the built-in prompt, cut to `want` or to what the context holds.
fn prompt(server: &Server, want: usize, n_ctx: u32) -> Result<Vec<i32>> {
    let room = (n_ctx as usize).saturating_sub(REPLY as usize);
    let want = want.min(room);
    let once = server.tokenize(TEXT)?.len().max(1);
    let mut ids = server.tokenize(&TEXT.repeat(want.div_ceil(once) + 1))?;
    ids.truncate(want);
    if ids.len() < 2 {
        let text = format!("the server's context of {n_ctx} tokens holds no prompt worth a handoff");
        return Err(Error::new(Kind::Refused, text));
    }
    Ok(ids)
}

/// Lets the server save a slot of one id and reads the file.
fn look(server: &Server, files: &Files, id: i32, window: bool, n_ctx: u32) -> Result<Seen> {
    server.erase()?;
    server.complete(&[id], 0, false)?;
    server.save(&files.name)?;
    let read = std::fs::read(&files.state);
    files.remove();
    server.erase()?;
    let bytes = read.map_err(|e| {
        let text = format!("the server saved its slot, but not to {} ({e})", files.state.display());
        Error::new(Kind::NoInput, format!("{text}: is --slots the directory of its --slot-save-path?"))
    })?;
    Seen::from_file(&bytes, window, n_ctx)
}

impl Seen {
    fn from_file(bytes: &[u8], window: bool, n_ctx: u32) -> Result<Seen> {
        let about = |e: Error| e.context("the file that the server saved");
        let state = State::parse_any(bytes).map_err(|e| about(exit::parse_error(e)))?;
        let stream = state.sections.iter().find_map(|s| match s {
            Section::Kv(kv) => kv.streams.iter().find_map(|s| Some((kv, s, s.k.first()?))),
            _ => None,
        });
        let Some((kv, stream, k)) = stream else {
            return Err(about(Error::new(
                Kind::Unavailable,
                "no attention cache in it: its memory is of another kind",
            )));
        };
        // Latent attention keeps no values.
        let type_v = stream.v.first().map_or(k.ty, |v| v.ty);
        Ok(Seen {
            version: state.version,
            type_k: k.ty,
            type_v,
            flash_attn: !stream.v_trans,
            attn_rot: stream.n_rot.filter(|_| k.ty.is_quantised() || type_v.is_quantised()).map(|n| n != (0, 0)),
            n_stream: kv.streams.len(),
            n_ctx,
            window,
        })
    }

    fn to_toml(&self, url: &str) -> String {
        let mut out = format!(
            "# Written by `npu-prefill setup` from the server at {url}.\nstate_version = {}\ncache_type_k = \"{}\"\n\
             cache_type_v = \"{}\"\nflash_attn = {}\nn_ctx = {}\nn_stream = {}\n",
            self.version.number(),
            self.type_k,
            self.type_v,
            self.flash_attn,
            self.n_ctx,
            self.n_stream
        );
        if let Some(on) = self.attn_rot {
            out += &format!("attn_rot = {on}\n");
        }
        if self.window {
            out += "# Whether it runs with --swa-full cannot be seen from outside: add `swa_full = true` if it does.\n";
        }
        out
    }
}

impl std::fmt::Display for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let on = |on| if on { "on" } else { "off" };
        write!(
            f,
            "state version {}, K {}, V {}, flash attention {}, context {}",
            self.version,
            self.type_k,
            self.type_v,
            on(self.flash_attn),
            self.n_ctx
        )?;
        if self.n_stream > 1 {
            write!(f, ", {} streams", self.n_stream)?;
        }
        if self.window {
            write!(f, ", a sliding window (whether with --swa-full cannot be seen)")?;
        }
        Ok(())
    }
}

fn hand_over(
    args: &SetupArgs,
    server: &Server,
    files: &Files,
    ids: &[i32],
    config: &Path,
    seen: &Seen,
) -> Result<Tried> {
    let handed = &ids[..ids.len() - 1];
    let text: String = handed.iter().map(|id| format!("{id}\n")).collect();
    std::fs::write(&files.ids, text)
        .map_err(|e| Error::new(Kind::CannotCreate, format!("writing {}: {e}", files.ids.display())))?;
    let program = std::env::current_exe().map_err(|e| Error::new(Kind::Internal, e).context("finding this program"))?;
    let mut c = Command::new(program);
    c.arg("--tokens").arg(&files.ids).arg("--out").arg(&files.state).arg("--model").arg(&args.model);
    c.arg("--config").arg(config);
    if let Some(n) = args.threads {
        c.args(["--threads", &n.to_string()]);
    }
    let began = Instant::now();
    let output = c.stdin(Stdio::null()).output();
    let process = began.elapsed();
    let output = output.map_err(|e| Error::new(Kind::Internal, e).context("starting this program for the handoff"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let last = said.lines().rfind(|l| !l.trim().is_empty()).unwrap_or_default();
        let last = last.strip_prefix("npu-prefill: ").unwrap_or(last);
        return Err(Error::new(exit::kind_of_child(output.status), format!("the handoff failed: {last}")));
    }
    let receipt: Value = serde_json::from_slice(&output.stdout)
        .map_err(|e| Error::new(Kind::Internal, format!("the handoff's line on stdout: {e}")))?;
    if receipt["state_version"].as_u64() != Some(seen.version.number().into()) {
        let why = receipt["state_version_from"].as_str().unwrap_or("unknown");
        let text = format!("the handoff wrote state version {} ({why})", receipt["state_version"]);
        let advice = format!("the server reads {}; remove that, or pass --state-version {0}", seen.version);
        return Err(Error::new(Kind::Config, format!("{text}, but {advice}")));
    }
    let restored = server.restore(&files.name)?;
    let reply = server.complete(ids, REPLY, true)?;
    server.erase()?;
    let own = server.complete(ids, REPLY, false)?;
    server.erase()?;
    Ok(Tried { n_tokens: ids.len(), receipt, process, restored, handed: reply, own })
}

impl Tried {
    fn process_ms(&self) -> f64 {
        self.process.as_secs_f64() * 1e3
    }

    /// From the prompt's ids to the first token of the reply.
    fn handed_ms(&self) -> f64 {
        self.process_ms() + self.restored.ms + self.handed.prompt_ms
    }

    fn text(&self) -> String {
        let agreed = self.handed.tokens.iter().zip(&self.own.tokens).take_while(|(a, b)| a == b).count();
        let reply = match (self.handed.tokens.len(), self.own.tokens.len()) {
            (0, _) | (_, 0) => "this server does not tell its tokens".to_owned(),
            (a, b) if agreed == a && agreed == b => format!("the same {agreed} tokens with and without the handoff"),
            (a, b) => format!(
                "the same for {agreed} of {} tokens; a server alone differs as much between a prompt at once and its last \
                 token by itself",
                a.max(b)
            ),
        };
        let rate = self.receipt["tokens_per_second"].as_f64().unwrap_or(0.0);
        let prefill = self.receipt["prefill_ms"].as_f64().unwrap_or(0.0);
        let (with, without) = (self.handed_ms(), self.own.prompt_ms);
        let verdict = match without - with {
            _ if self.handed.prompt_n != 1 => "nothing: the server computed the prompt again".to_owned(),
            gain if gain > 0.0 => {
                format!("gained {gain:.0} ms: {:.1} times as fast as the server alone", without / with)
            }
            loss => format!("lost {:.0} ms: this server prefills faster than this machine computes", -loss),
        };
        format!(
            "prompt         {} tokens, {} handed over in a file of {}\n\
             provider       {:.1} ms, of that {prefill:.1} ms prefill ({rate:.0} tokens/s, {})\n\
             restore        {:.1} ms\n\
             prompt_n       {} evaluated after the restore, {:.1} ms\n\
             handed over    {with:.1} ms in all\n\
             server alone   {without:.1} ms for its own prefill of {} tokens\n\
             reply          {reply}\n\
             result         {verdict}\n",
            self.n_tokens,
            self.n_tokens - 1,
            bytes(self.restored.bytes),
            self.process_ms(),
            self.receipt["kernel"].as_str().unwrap_or("?"),
            self.restored.ms,
            self.handed.prompt_n,
            self.handed.prompt_ms,
            self.own.prompt_n,
        )
    }

    /// Whether the handoff did its work. That it is slower is no error: the setup is right, and the figures say what it is worth.
    fn verdict(&self, seen: &Seen) -> Result<()> {
        let short = self.restored.tokens as usize != self.n_tokens - 1;
        if self.handed.prompt_n == 1 && !short {
            return Ok(());
        }
        let what = format!("the server evaluated {} tokens after the handoff instead of 1", self.handed.prompt_n);
        let why = match seen.window {
            _ if short => format!("it restored {} of {} tokens", self.restored.tokens, self.n_tokens - 1),
            true => "its model has a sliding window: try it with --swa-full".to_owned(),
            false => "another request may have come in between: run it with -np 1, or try again".to_owned(),
        };
        Err(Error::new(Kind::Config, format!("{what}: {why}")))
    }
}

/// What lies in the server's directory for the time being.
#[derive(Clone)]
struct Files {
    name: String,
    state: PathBuf,
    ids: PathBuf,
}

impl Files {
    fn new(slots: &Path) -> Files {
        let stem = format!("npu-prefill-setup-{}", std::process::id());
        let (name, ids) = (format!("{stem}.bin"), slots.join(format!("{stem}.ids")));
        Files { state: slots.join(&name), name, ids }
    }

    fn remove(&self) {
        let _ = std::fs::remove_file(&self.state);
        let _ = std::fs::remove_file(&self.ids);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(n: usize) -> Vec<u8> {
        use kvlayout::{KvMap, KvSection, KvSink, KvSpec, LayerKv, MemSpace, Part, Scatter};
        let layers = vec![LayerKv { layer: 0, n_embd_k: 32, n_embd_v: 32 }];
        let spec = KvSpec {
            sections: vec![KvSection { layers, window: None, n_rot: (0, 0) }],
            recurrent: None,
            type_k: CacheType::F16,
            type_v: CacheType::Bf16,
            v_trans: false,
            cell_ext: false,
            swa_full: false,
            n_stream: 1,
        };
        let map = KvMap::state_file(&spec, &vec![1; n], StateVersion::V4).unwrap();
        let mut bytes = Vec::new();
        let space = MemSpace::new(&mut bytes, map.size()).unwrap();
        let mut sink = Box::new(Scatter::new(map, space).unwrap());
        for part in [Part::K, Part::V] {
            sink.put_rows(0, part, 0..n as u32, &vec![0.5; 32 * n]).unwrap();
        }
        sink.commit().unwrap();
        bytes
    }

    #[test]
    fn a_saved_file_shows_the_servers_memory() {
        let seen = Seen::from_file(&saved(20), false, 4096).unwrap();
        assert_eq!((seen.type_k, seen.type_v, seen.flash_attn), (CacheType::F16, CacheType::Bf16, true));
        assert_eq!((seen.version, seen.n_stream, seen.n_ctx), (StateVersion::V4, 1, 4096));
    }

    #[test]
    fn what_is_written_is_what_the_configuration_reads() {
        let seen = Seen::from_file(&saved(20), true, 512).unwrap();
        let config = config::parse(&seen.to_toml("http://x")).unwrap();
        assert_eq!(config.state_version, Some(StateVersion::V4));
        assert_eq!((config.cache_type_k, config.cache_type_v), (Some(CacheType::F16), Some(CacheType::Bf16)));
        assert_eq!((config.n_ctx, config.n_stream, config.swa_full), (Some(512), Some(1), None));
    }

    #[test]
    fn a_file_that_is_none_is_said_so() {
        let e = Seen::from_file(b"qsgg", false, 1).unwrap_err();
        assert!(e.kind == Kind::Data && e.to_string().contains("the server saved"), "{e}");
    }
}
