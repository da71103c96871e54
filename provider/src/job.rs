//! What will be done: the command line, the environment, the configuration and the defaults brought together and checked.
//! Nothing is opened here but the configuration, and nothing is written. Inherited descriptors are taken over, and that
//! first of all: by their number alone they could not be told from what is opened later.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvlayout::{CacheType, Inherited};

use crate::cli::{ComputeArgs, DecoderArgs, Device, DeviceArgs, Handoff, OnOff, VersionChoice, chunk, seconds, size};
use crate::config::{self, Config};
use crate::env::{self, Variable};
use crate::exit::{Error, Kind, Result, inherit_error};

/// Most threads per CPU: more than one is of no use but harmless, thousands are a slip of the hand.
const THREADS_PER_CPU: usize = 4;

/// What is handed over, and where to.
#[derive(Debug)]
pub struct Ends {
    /// The ids file.
    pub tokens: PathBuf,
    /// The model.
    pub model: PathBuf,
    /// Where to.
    pub route: Route,
}

/// The two ways of handing over.
#[derive(Debug)]
pub enum Route {
    /// A state file of this name.
    File(PathBuf),
    /// The decoder's memory.
    Shared(Shared),
}

/// The decoder's memory, as it was given to us.
#[derive(Debug)]
pub struct Shared {
    /// The file with its description.
    pub header: PathBuf,
    /// Its descriptors.
    pub fds: Vec<Inherited>,
}

impl Ends {
    /// Takes the paths out of the arguments and the descriptors over. To be called before anything is opened.
    ///
    /// # Errors
    /// They are not those of a handoff by one of the two routes, or a descriptor is not what a region can be in.
    pub fn take(args: &mut Handoff) -> Result<Ends> {
        let shared = args.layout.is_some() || args.fds.is_some();
        if args.out.is_some() && shared {
            let text = "--out is the file route, --layout and --fds are the shared route: one of them";
            return Err(usage(text.to_owned()));
        }
        let missing: Vec<&str> = [
            ("--tokens", args.tokens.is_none()),
            ("--out", args.out.is_none() && !shared),
            ("--model", args.model.is_none()),
            ("--layout", args.layout.is_none() && shared),
            ("--fds", args.fds.is_none() && shared),
        ]
        .iter()
        .filter_map(|&(name, missing)| missing.then_some(name))
        .collect();
        let (Some(tokens), Some(model), true) = (args.tokens.take(), args.model.take(), missing.is_empty()) else {
            return Err(usage(format!("missing: {}. See npu-prefill --help", missing.join(", "))));
        };
        let route = match (args.out.take(), args.layout.take(), args.fds.take()) {
            (Some(out), ..) => {
                if out.file_name().is_none() || out.as_os_str().as_encoded_bytes().ends_with(b"/") {
                    return Err(usage(format!("--out {}: not the name of a file", out.display())));
                }
                Route::File(out)
            }
            (None, header, fds) => {
                let fds = take_fds(&fds.unwrap_or_default())?;
                Route::Shared(Shared { header: header.unwrap_or_default(), fds })
            }
        };
        Ok(Ends { tokens, model, route })
    }
}

/// Takes over the descriptors of `--fds`. To be called before anything is opened.
///
/// # Errors
/// It is no list of descriptors, or one of them is not what a region can be in.
pub fn take_fds(list: &OsStr) -> Result<Vec<Inherited>> {
    let list = list.to_string_lossy();
    let taken = kvlayout::parse_fds(&list).and_then(|numbers| Inherited::take(&numbers));
    taken.map_err(|e| inherit_error(e).context(format!("--fds {list}")))
}

/// A handoff.
#[derive(Debug)]
pub struct Job {
    /// From where to where.
    pub ends: Ends,
    /// What must match the decoder.
    pub decoder: Decoder,
    /// How to compute.
    pub compute: Compute,
    /// Fewer ids are declined.
    pub min_tokens: usize,
    /// A higher estimate is refused.
    pub max_memory: Option<u64>,
    /// When to give up, from the start of the process.
    pub deadline: Option<Duration>,
    /// What the user should know, one line each.
    pub notes: Vec<String>,
}

/// What must match the decoder.
#[derive(Clone, Debug)]
pub struct Decoder {
    /// Version of the state file.
    pub version: VersionChoice,
    /// What `version` was said by.
    pub version_by: String,
    /// Context size; `None` when not known or the model's own.
    pub n_ctx: Option<u32>,
    /// Type of the keys.
    pub type_k: CacheType,
    /// Type of the values.
    pub type_v: CacheType,
    /// V is transposed: no flash attention.
    pub v_trans: bool,
    /// It rotates the rows of quantised caches; `None` when nobody said so.
    pub attn_rot: Option<bool>,
    /// Whether it reads checkpoints behind a state; `None` when nobody said so.
    pub checkpoint: Option<bool>,
    /// All positions of sliding-window layers.
    pub swa_full: bool,
    /// Streams of the cache.
    pub n_stream: u32,
    /// Whether somebody said so of the types of keys and values; otherwise a header may know better.
    pub types_told: [bool; 2],
    /// The configuration, which knows more.
    pub config: Config,
}

/// How to compute.
#[derive(Debug)]
pub struct Compute {
    /// Threads.
    pub threads: usize,
    /// Tokens at a time; `None` is the engine's default.
    pub chunk: Option<usize>,
    /// Instruction set; `None` is the best there is.
    pub isa: Option<String>,
    /// Where to compute matrix products.
    pub device: Device,
    /// Directory of NPU kernels.
    pub elfs: Option<PathBuf>,
}

impl Job {
    /// Brings everything else together.
    ///
    /// # Errors
    /// What was typed, set or configured does not make a job.
    pub fn new(ends: Ends, args: Handoff) -> Result<Job> {
        let mut notes = Vec::new();
        match &ends.route {
            Route::File(out) => notes.extend(server_refuses(out).map(|why| {
                format!("--out {}: llama-server does not restore files of this name: {why}", out.display())
            })),
            Route::Shared(shared) => notes.extend(shared.fds.iter().filter_map(|fd| fd.warning().map(str::to_owned))),
        }
        let compute = Compute::new(&args.compute, &mut notes)?;
        let decoder = Decoder::new(&args.decoder)?;
        let whole = |s: &str| s.parse::<usize>().map_err(|_| "it is a number of tokens".to_owned());
        Ok(Job {
            ends,
            decoder,
            compute,
            min_tokens: args.limits.min_tokens.or(env::MIN_TOKENS.parse(whole)?).unwrap_or(0),
            max_memory: args.limits.max_memory.or(env::MAX_MEMORY.parse(size)?),
            deadline: args.limits.deadline.or(env::DEADLINE.parse(seconds)?),
            notes,
        })
    }
}

impl Decoder {
    /// From the flags, the environment and the configuration.
    ///
    /// # Errors
    /// See [`Job::new`].
    pub fn new(args: &DecoderArgs) -> Result<Decoder> {
        let named = args.config.clone().or_else(|| env::CONFIG.get().map(PathBuf::from));
        let config = config::load(named.as_deref())?;
        let word = |s: &str| s.parse::<CacheType>().map_err(|e| e.to_string());
        let cache_type = |flag: Option<CacheType>, var: &Variable, configured| -> Result<(CacheType, bool)> {
            let told = flag.or(var.parse(word)?).or(configured);
            Ok((told.unwrap_or(CacheType::F16), told.is_some()))
        };
        let (type_k, k_told) = cache_type(args.cache_type_k, &env::CACHE_TYPE_K, config.cache_type_k)?;
        let (type_v, v_told) = cache_type(args.cache_type_v, &env::CACHE_TYPE_V, config.cache_type_v)?;
        // llama.cpp's own variable says only that rows are not rotated: builds that never did know nothing of it.
        let disabled = env::ATTN_ROT_DISABLE.parse(|s| match s.parse::<i64>() {
            Ok(n) => Ok((n != 0).then_some(OnOff::Off)),
            Err(_) => Err("it is a number".to_owned()),
        })?;
        let attn_rot = args.attn_rot.or(env::ATTN_ROT.parse(str::parse)?).or(disabled.flatten()).and_then(OnOff::told);
        let checkpoint = args.checkpoint.or(env::CHECKPOINT.parse(str::parse)?).and_then(OnOff::told);
        let flash = args.flash_attn.or(env::FLASH_ATTN.parse(str::parse)?).or(config.flash_attn);
        let on_or_off = |s: &str| s.parse().ok().and_then(OnOff::told).ok_or_else(|| "it is on or off".to_owned());
        let swa_env = env::SWA_FULL.parse(on_or_off)?;
        let ctx = env::CTX_SIZE.parse(|s| s.parse::<u32>().map_err(|_| "it is a number of tokens".to_owned()))?;
        let streams = env::N_STREAM.parse(|s| match s.parse() {
            Ok(n @ 1..=256) => Ok(n),
            _ => Err("it is 1 to 256".to_owned()),
        })?;
        let (version, version_by) =
            pick(args.state_version, env::STATE_VERSION.parse(str::parse)?, None, &env::STATE_VERSION)
                .unwrap_or((VersionChoice::Auto, String::new()));
        Ok(Decoder {
            version,
            version_by,
            n_ctx: args.ctx_size.or(ctx).or(config.n_ctx).filter(|&n| n > 0),
            type_k,
            type_v,
            v_trans: flash == Some(OnOff::Off),
            attn_rot: attn_rot.or(config.attn_rot),
            checkpoint,
            swa_full: args.swa_full || swa_env.or(config.swa_full).unwrap_or(false),
            n_stream: args.n_stream.or(streams).or(config.n_stream).unwrap_or(1),
            types_told: [k_told, v_told],
            config,
        })
    }
}

impl Compute {
    /// [`Compute::new`] where only the device matters.
    pub fn of_device(args: &DeviceArgs, notes: &mut Vec<String>) -> Result<Compute> {
        Compute::new(&ComputeArgs { device: args.clone(), ..ComputeArgs::default() }, notes)
    }

    /// From the flags and the environment; what was adjusted is noted.
    ///
    /// # Errors
    /// See [`Job::new`].
    pub fn new(args: &ComputeArgs, notes: &mut Vec<String>) -> Result<Compute> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        // The variable is shared with the server, which takes 0 and -1 for its default; a typed 0 is a mistake.
        let typed = match args.device.threads {
            Some(n) if n == 0 || n < -1 => {
                return Err(usage(format!("--threads {n}: at least 1, or -1 for the default")));
            }
            n => n,
        };
        let set = env::THREADS.parse(|s| s.parse::<i64>().map_err(|_| "it is a number of threads".to_owned()))?;
        let most = cpus.saturating_mul(THREADS_PER_CPU);
        let threads = match typed.or(set).map(usize::try_from) {
            None | Some(Err(_) | Ok(0)) => cpus,
            Some(Ok(n)) if n > most => {
                notes.push(format!("{n} threads are too many for {cpus} CPUs; using {most}"));
                most
            }
            Some(Ok(n)) => n,
        };
        let device = env::DEVICE.parse(|s| {
            <Device as clap::ValueEnum>::from_str(s, false)
                .map_err(|_| "it is auto, cpu, npu, oracle or sim".to_owned())
        })?;
        let elfs = pick(args.device.elfs.clone(), env::ELFS.get().map(PathBuf::from), None, &env::ELFS);
        if let Some((dir, by)) = &elfs {
            let wrong = |what: String| Error::new(Kind::Config, format!("{by} {}: {what}", dir.display()));
            match std::fs::metadata(dir) {
                Ok(meta) if meta.is_dir() => {}
                Ok(_) => return Err(wrong("it is not a directory of kernels".to_owned())),
                Err(e) => return Err(wrong(e.to_string())),
            }
        }
        Ok(Compute {
            threads,
            chunk: args.chunk.or(env::CHUNK.parse(chunk)?),
            isa: args.isa.clone().or(env::ISA.parse(|s| Ok(s.to_owned()))?).filter(|s| s != "auto"),
            device: args.device.device.or(device).unwrap_or(Device::Auto),
            elfs: elfs.map(|(dir, _)| dir),
        })
    }
}

/// Flag beats variable beats configuration; with what it was said by.
fn pick<T>(flag: Option<T>, var: Option<T>, config: Option<(T, String)>, variable: &Variable) -> Option<(T, String)> {
    flag.map(|v| (v, variable.option.to_owned())).or_else(|| var.map(|v| (v, variable.name.to_owned()))).or(config)
}

fn usage(text: String) -> Error {
    Error::new(Kind::Usage, text)
}

/// Why llama-server would answer 400 to a restore of a file of this name.
fn server_refuses(out: &Path) -> Option<String> {
    let name = out.file_name()?;
    let Some(name) = name.to_str() else { return Some("it is not UTF-8".to_owned()) };
    let odd = |c: char| {
        c.is_control()
            || matches!(
                c,
                '\\' | ':'
                    | '*'
                    | '?'
                    | '"'
                    | '<'
                    | '>'
                    | '|'
                    | '\u{ff0e}'
                    | '\u{2215}'
                    | '\u{2216}'
                    | '\u{fffd}'
                    | '\u{feff}'
            )
    };
    if let Some(c) = name.chars().find(|&c| odd(c)) {
        return Some(format!("it contains {c:?}"));
    }
    if name.contains("..") {
        return Some("it contains \"..\"".to_owned());
    }
    if name.starts_with(' ') || name.ends_with([' ', '.']) {
        return Some("it starts or ends with a space, or ends with a dot".to_owned());
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_a_server_refuses() {
        for name in ["a:b", "a..b", "x.", " x", "x ", "a*", "tab\t", "q\u{ff0e}"] {
            assert!(server_refuses(&Path::new("/slots").join(name)).is_some(), "{name}");
        }
        for name in ["a.bin", ".x", "xé.bin", "a b"] {
            assert!(server_refuses(Path::new(name)).is_none(), "{name}");
        }
    }

    fn says(args: Handoff) -> (Kind, String) {
        let mut args = args;
        let e = Ends::take(&mut args).unwrap_err();
        (e.kind, e.to_string())
    }

    #[test]
    fn what_is_missing_is_named() {
        let see = ". See npu-prefill --help";
        let out = Handoff { out: Some("x".into()), ..Handoff::default() };
        assert_eq!(says(out), (Kind::Usage, format!("missing: --tokens, --model{see}")));
        assert_eq!(says(Handoff::default()), (Kind::Usage, format!("missing: --tokens, --out, --model{see}")));
        let layout = Handoff { layout: Some("x".into()), tokens: Some("t".into()), ..Handoff::default() };
        assert_eq!(says(layout), (Kind::Usage, format!("missing: --model, --fds{see}")));
        let fds = Handoff { fds: Some("99".into()), model: Some("m".into()), ..Handoff::default() };
        assert_eq!(says(fds), (Kind::Usage, format!("missing: --tokens, --layout{see}")));
    }

    #[test]
    fn one_route_at_a_time() {
        let both = |layout: Option<&str>, fds: Option<&str>| Handoff {
            out: Some("x".into()),
            tokens: Some("t".into()),
            model: Some("m".into()),
            layout: layout.map(PathBuf::from),
            fds: fds.map(Into::into),
            ..Handoff::default()
        };
        for args in [both(Some("h"), Some("3")), both(Some("h"), None), both(None, Some("3"))] {
            let (kind, text) = says(args);
            assert!(kind == Kind::Usage && text.contains("--out"), "{text}");
        }
    }

    #[test]
    fn descriptors_that_cannot_be_taken() {
        let fds = |list: &str| Handoff {
            tokens: Some("t".into()),
            model: Some("m".into()),
            layout: Some("h".into()),
            fds: Some(list.into()),
            ..Handoff::default()
        };
        for (list, kind) in [
            ("", Kind::Usage),
            ("3,", Kind::Usage),
            ("-1", Kind::Usage),
            ("0x3", Kind::Usage),
            ("99999999999", Kind::Usage),
            ("1", Kind::Refused),
            ("999,999", Kind::Refused),
            ("999999", Kind::NoInput),
        ] {
            let (found, text) = says(fds(list));
            assert!(found == kind && text.starts_with(&format!("--fds {list}: ")), "{list}: {found:?} {text}");
        }
    }
}
