//! What may be typed, and how text becomes values. What will be done with it is `job.rs`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kvlayout::{CacheType, StateVersion};

/// Package version, with the commit: `unknown` where the build was not in a git tree of its own.
pub const VERSION: &str = env!("NPU_PREFILL_VERSION");
/// The same with the servers that its files were tried on.
const LONG_VERSION: &str = concat!(env!("NPU_PREFILL_VERSION"), "\n", env!("NPU_PREFILL_PINS"));

const USAGE: &str = "npu-prefill --tokens <IDS> --out <STATE> --model <GGUF> [--elfs <DIR>] [OPTIONS]
       npu-prefill --tokens <IDS> --model <GGUF> --layout <HEADER> --fds <N[,N...]> [OPTIONS]
       npu-prefill <COMMAND>";

/// What the program says when nothing is asked of it.
pub const WELCOME: &str = "\
npu-prefill computes the KV cache of a prompt outside of llama.cpp and hands it over to a llama-server, which then
evaluates one token instead of the whole prompt. Three things one does with it:

  npu-prefill setup --server http://127.0.0.1:8080 --slots DIR --model GGUF
      once, and after every update of the server: looks at its state files, tries a handoff, says what it gains
  npu-prefill --tokens IDS --out DIR/x.bin --model GGUF
      per prompt: writes the state file that the server restores (or --layout and --fds: into its memory)
  npu-prefill inspect FILE
      looks into a model or a state file, and says what is wrong with it. More: npu-prefill --help
";

const ABOUT: &str = "Computes the KV cache of a prompt and hands it over to a llama.cpp decoder.

The file route writes a sequence-state file that llama-server restores (POST /slots/0?action=restore), so that it \
evaluates one token instead of the prompt. The file appears under its name when it is whole, or not at all. The shared \
route writes the rows straight into the decoder's memory; everything that can be refused is refused before the first \
byte. On success one line of JSON goes to stdout, \"prefill_ms\" in it; everything else goes to stderr.";

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "npu-prefill",
    version = VERSION,
    long_version = LONG_VERSION,
    about = ABOUT,
    override_usage = USAGE,
    after_help = crate::exit::HELP,
    args_conflicts_with_subcommands = true,
    max_term_width = 110,
)]
pub struct Cli {
    /// Something else than a handoff.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// The handoff.
    #[command(flatten)]
    pub handoff: Handoff,
}

/// What the program can do besides a handoff.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Describe a GGUF model or a state file, and what is wrong with it
    Inspect {
        /// The file
        file: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print how far two state files are apart, per layer; A is the reference
    Compare {
        /// The reference
        a: PathBuf,
        /// The other one
        b: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print what a prefill would do, command by command, and how much memory it would need
    Plan(PlanArgs),
    /// Print how the memory of a decoder that shares it is laid out: regions, sizes, hashes, tensors
    Layout(LayoutArgs),
    /// Say what of an NPU there is on this machine, what is missing, and what to do; exit code 69 where it cannot be used
    Doctor(DoctorArgs),
    /// Test every kernel of --elfs and a tiny prefill with them, and print a report to send
    Selftest(SelftestArgs),
    /// List the model architectures that are supported, what each was proved on, and the cache types
    Models {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Set up for a running llama-server: look at its state files, write the configuration, try one handoff, say what it gains
    Setup(SetupArgs),
    /// List the environment variables, as a Markdown table
    Environment,
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page
    Man,
}

/// The options of a handoff.
#[derive(Debug, Default, Args)]
pub struct Handoff {
    /// Token ids of the prompt, the last one left out: decimal text, JSON, or raw 32-bit integers
    #[arg(long, value_name = "IDS")]
    pub tokens: Option<PathBuf>,
    /// State file to write, in the decoder's --slot-save-path
    #[arg(long, value_name = "STATE")]
    pub out: Option<PathBuf>,
    /// The decoder's model; any shard of a split one
    #[arg(short, long, value_name = "GGUF")]
    pub model: Option<PathBuf>,
    /// Shared route, instead of --out: the file in which the decoder describes its memory
    #[arg(long, value_name = "HEADER")]
    pub layout: Option<PathBuf>,
    /// Shared route: the inherited descriptors of that memory, one per region, in their order
    #[arg(long, value_name = "N[,N...]", allow_hyphen_values = true)]
    pub fds: Option<OsString>,
    #[command(flatten)]
    pub decoder: DecoderArgs,
    #[command(flatten)]
    pub compute: ComputeArgs,
    #[command(flatten)]
    pub limits: LimitArgs,
}

/// What must match the decoder.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Must match the decoder")]
pub struct DecoderArgs {
    /// Version of the state file: 2, 3, 4 or auto. auto is that of the newest state file beside --out, else the configured one, else 3 [env: NPU_PREFILL_STATE_VERSION] [default: auto]
    #[arg(long, value_name = "V", overrides_with = "state_version")]
    pub state_version: Option<VersionChoice>,
    /// Context size; 0 is the model's own [env: LLAMA_ARG_CTX_SIZE]
    #[arg(short, long, value_name = "N", overrides_with = "ctx_size")]
    pub ctx_size: Option<u32>,
    /// Type of the keys, also -ctk: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl [env: LLAMA_ARG_CACHE_TYPE_K] [default: f16]
    #[arg(long, value_name = "TYPE", overrides_with = "cache_type_k")]
    pub cache_type_k: Option<CacheType>,
    /// Type of the values, also -ctv: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl [env: LLAMA_ARG_CACHE_TYPE_V] [default: f16]
    #[arg(long, value_name = "TYPE", overrides_with = "cache_type_v")]
    pub cache_type_v: Option<CacheType>,
    /// Flash attention, also -fa: on, off or auto [env: LLAMA_ARG_FLASH_ATTN] [default: auto, which is on]
    #[arg(long, value_name = "on|off|auto", num_args = 0..=1, default_missing_value = "on", allow_negative_numbers = true, overrides_with = "flash_attn")]
    pub flash_attn: Option<OnOff>,
    /// Whether the decoder rotates the rows of quantised caches: on, off or auto. auto is what a probe found, else on for version 4, which says so in the file, and else refused [env: NPU_PREFILL_ATTN_ROT, and LLAMA_ATTN_ROT_DISABLE for off] [default: auto]
    #[arg(long, value_name = "on|off|auto", overrides_with = "attn_rot")]
    pub attn_rot: Option<OnOff>,
    /// Whether the decoder reads checkpoints behind a state, with which prompts within a sliding window gain too: on, off or auto. auto is on for version 4; a decoder that does not read them ignores them [env: NPU_PREFILL_CHECKPOINT] [default: auto]
    #[arg(long, value_name = "on|off|auto", overrides_with = "checkpoint")]
    pub checkpoint: Option<OnOff>,
    /// The decoder keeps all positions of sliding-window layers [env: LLAMA_ARG_SWA_FULL]
    #[arg(long, overrides_with = "swa_full")]
    pub swa_full: bool,
    /// Streams of its cache: 1, or the number of slots where their memory is not unified [env: NPU_PREFILL_N_STREAM] [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256), overrides_with = "n_stream")]
    pub n_stream: Option<u32>,
    /// Configuration file, as a probe of the decoder writes it [env: NPU_PREFILL_CONFIG] [default: $XDG_CONFIG_HOME/npu-prefill/config.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// How to compute.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Computing")]
pub struct ComputeArgs {
    /// Tokens computed at a time; bounds memory [env: NPU_PREFILL_CHUNK] [default: 512]
    #[arg(long, value_name = "N", value_parser = chunk, overrides_with = "chunk")]
    pub chunk: Option<usize>,
    /// Instruction set of the host kernels: auto, scalar, avx2, avx512, avx512bf16 or neon [env: NPU_PREFILL_ISA] [default: auto]
    #[arg(long, value_name = "NAME", overrides_with = "isa")]
    pub isa: Option<String>,
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// Who computes.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Computing")]
pub struct DeviceArgs {
    /// Threads [env: LLAMA_ARG_THREADS] [default: the CPUs this process may use]
    #[arg(short, long, value_name = "N", allow_negative_numbers = true, overrides_with = "threads")]
    pub threads: Option<i64>,
    /// Directory of NPU kernels [env: ONEBIT_HYBRID_ELFS]
    #[arg(long, value_name = "DIR", overrides_with = "elfs")]
    pub elfs: Option<PathBuf>,
    /// Where to compute matrix products: auto takes the NPU where there are a device and kernels that pass their self-test; oracle computes what the kernels of --elfs would, on this processor; sim is an NPU's double, for tests [env: NPU_PREFILL_DEVICE] [default: auto]
    #[arg(
        long,
        value_enum,
        value_name = "auto|cpu|npu|oracle|sim",
        hide_possible_values = true,
        overrides_with = "device"
    )]
    pub device: Option<Device>,
}

/// When not to.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Decline with exit code 77 when there are fewer ids [env: NPU_PREFILL_MIN_TOKENS]
    #[arg(long, value_name = "N", overrides_with = "min_tokens")]
    pub min_tokens: Option<usize>,
    /// Refuse before loading when the estimate is higher: bytes, or with K, M, G [env: NPU_PREFILL_MAX_MEMORY]
    #[arg(long, value_name = "SIZE", value_parser = size, overrides_with = "max_memory")]
    pub max_memory: Option<u64>,
    /// Give up after so many seconds, fractions allowed [env: NPU_PREFILL_DEADLINE]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, overrides_with = "deadline")]
    pub deadline: Option<Duration>,
}

/// The options of `plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The model
    #[arg(short, long, value_name = "GGUF")]
    pub model: PathBuf,
    /// Number of tokens
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub n_tokens: u32,
    /// Also print on which device each command would be carried out, and why
    #[arg(long)]
    pub explain: bool,
    #[command(flatten)]
    pub decoder: DecoderArgs,
    #[command(flatten)]
    pub compute: ComputeArgs,
}

/// The options of `doctor`, which are `selftest`'s too.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// The options of `selftest`.
#[derive(Debug, Args)]
pub struct SelftestArgs {
    #[command(flatten)]
    pub common: DoctorArgs,
    /// Inherited descriptors: say whether a kernel can write into their memory; overwrites their first bytes
    #[arg(long, value_name = "N[,N...]")]
    pub fds: Option<OsString>,
    /// How it gets there: own mapping, the driver's, or a buffer of the device's and a copy; auto tries the first, then the last
    #[arg(
        long,
        value_name = "auto|own|driver|bounce",
        value_enum,
        default_value = "auto",
        hide_possible_values = true,
        requires = "fds"
    )]
    pub import: Import,
}

/// By which way a kernel's product gets into memory that somebody else handed over.
#[derive(Copy, Clone, PartialEq, Eq, Debug, ValueEnum)]
pub enum Import {
    /// The first, and where that is wrong the last.
    Auto,
    /// The address of our own mapping.
    Own,
    /// A buffer that the driver maps.
    Driver,
    /// A buffer of the device's, copied out by the processor.
    Bounce,
}

/// The options of `layout`.
#[derive(Debug, Args)]
pub struct LayoutArgs {
    /// The model
    #[arg(short, long, value_name = "GGUF")]
    pub model: PathBuf,
    /// Micro-batch of the decoder, also -ub; only sliding-window layers depend on it
    #[arg(long, value_name = "N", default_value_t = kvlayout::DEFAULT_UBATCH, value_parser = clap::value_parser!(u32).range(1..=i64::from(i32::MAX)))]
    pub ubatch_size: u32,
    /// Print the header that such a decoder would send, as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub decoder: DecoderArgs,
}

/// The options of `setup`.
#[derive(Debug, Args)]
pub struct SetupArgs {
    /// The server, such as http://127.0.0.1:8080. What its slot 0 holds is lost
    #[arg(long, value_name = "URL")]
    pub server: String,
    /// The directory of its --slot-save-path
    #[arg(long, value_name = "DIR")]
    pub slots: PathBuf,
    /// The model it runs
    #[arg(short, long, value_name = "GGUF")]
    pub model: PathBuf,
    /// Configuration file to write [env: NPU_PREFILL_CONFIG] [default: $XDG_CONFIG_HOME/npu-prefill/config.toml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Tokens of the built-in prompt; more where the model has a sliding window, fewer where the context is smaller
    #[arg(short = 'n', long, value_name = "N", default_value_t = 512, value_parser = prompt_tokens)]
    pub prompt_tokens: usize,
    /// Threads of the handoff [env: LLAMA_ARG_THREADS] [default: the CPUs this process may use]
    #[arg(short, long, value_name = "N")]
    pub threads: Option<u32>,
}

/// `--state-version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionChoice {
    /// Find out.
    Auto,
    /// This one.
    Exactly(StateVersion),
}

impl FromStr for VersionChoice {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        if s == "auto" {
            return Ok(VersionChoice::Auto);
        }
        s.parse().map(VersionChoice::Exactly).map_err(|_| "it is 2, 3, 4 or auto".to_owned())
    }
}

/// `--flash-attn`, `--attn-rot` and `--checkpoint`, in all of llama.cpp's spellings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnOff {
    /// Yes.
    On,
    /// No.
    Off,
    /// Not said.
    Auto,
}

impl OnOff {
    /// What is said.
    pub fn told(self) -> Option<bool> {
        match self {
            OnOff::On => Some(true),
            OnOff::Off => Some(false),
            OnOff::Auto => None,
        }
    }
}

impl FromStr for OnOff {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "on" | "enabled" | "true" | "1" => Ok(OnOff::On),
            "off" | "disabled" | "false" | "0" => Ok(OnOff::Off),
            "auto" | "-1" => Ok(OnOff::Auto),
            _ => Err("it is on, off or auto".to_owned()),
        }
    }
}

/// `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// The best there is.
    Auto,
    /// The host.
    Cpu,
    /// An NPU or nothing.
    Npu,
    /// The kernels' arithmetic, on the host.
    Oracle,
    /// The double of an NPU.
    Sim,
}

/// A number of tokens computed at a time.
pub fn chunk(s: &str) -> Result<usize, String> {
    match s.parse() {
        Ok(n @ 1..=65_536) => Ok(n),
        _ => Err("it is 1 to 65536".to_owned()),
    }
}

/// A length of the built-in prompt.
fn prompt_tokens(s: &str) -> Result<usize, String> {
    match s.parse() {
        Ok(n @ 1..=1_000_000) => Ok(n),
        _ => Err("it is 1 to 1000000".to_owned()),
    }
}

/// A size in bytes with an optional binary unit: `1500000000`, `800M`, `1.5GiB`.
pub fn size(s: &str) -> Result<u64, String> {
    let wrong = || "it is a number of bytes, or a number with K, M, G or T (of 1024)".to_owned();
    let digits = s.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(s.len());
    let (number, unit) = s.split_at(digits);
    let unit = unit.trim().to_ascii_uppercase();
    let unit = unit.strip_suffix("IB").or_else(|| unit.strip_suffix('B')).unwrap_or(&unit);
    let shift = match unit {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(wrong()),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(1 << shift).ok_or_else(wrong);
    }
    let value = number.parse::<f64>().map_err(|_| wrong())? * (1u64 << shift) as f64;
    // Beyond 2^53 a fraction is a slip of the hand.
    if (0.0..9e15).contains(&value) { Ok(value as u64) } else { Err(wrong()) }
}

/// A positive time in seconds.
pub fn seconds(s: &str) -> Result<Duration, String> {
    let value: f64 = s.parse().map_err(|_| "it is a number of seconds".to_owned())?;
    // Beyond a year nobody waits, and some sums would not hold it.
    if value > 0.0 && value <= 31_536_000.0 {
        Ok(Duration::from_secs_f64(value))
    } else {
        Err("it is a number of seconds above 0, at most a year".to_owned())
    }
}

/// llama.cpp has options of several letters after one dash; clap has none. They become the long ones here.
pub fn normalise(argv: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut options = true;
    argv.into_iter()
        .map(|arg| {
            options &= arg != "--";
            match arg.to_str() {
                Some("-ctk") if options => "--cache-type-k".into(),
                Some("-ctv") if options => "--cache-type-v".into(),
                Some("-fa") if options => "--flash-attn".into(),
                Some("-ub") if options => "--ubatch-size".into(),
                _ => arg,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(normalise(line.split_whitespace().map(OsString::from)))
    }

    #[test]
    fn clap_is_content() {
        Cli::command().debug_assert();
    }

    #[test]
    fn both_usage_lines_are_in_help() {
        let help = Cli::command().render_long_help().to_string();
        for line in [
            "npu-prefill --tokens <IDS> --out <STATE> --model <GGUF> [--elfs <DIR>]",
            "npu-prefill --tokens <IDS> --model <GGUF> --layout <HEADER> --fds <N[,N...]>",
        ] {
            assert!(help.contains(line), "{help}");
        }
    }

    #[test]
    fn llama_cpp_spellings() {
        let cli = parse("npu-prefill -ctk bf16 -ctv f32 -fa off -c 8192 -t 3 -m x.gguf").unwrap().handoff;
        assert_eq!(cli.decoder.cache_type_k.unwrap().to_string(), "bf16");
        assert_eq!(cli.decoder.cache_type_v.unwrap().to_string(), "f32");
        assert_eq!(cli.decoder.flash_attn, Some(OnOff::Off));
        assert_eq!((cli.decoder.ctx_size, cli.compute.device.threads), (Some(8192), Some(3)));
        for (text, want) in [
            ("-fa on", OnOff::On),
            ("-fa 1", OnOff::On),
            ("-fa", OnOff::On),
            ("--flash-attn enabled", OnOff::On),
            ("-fa auto", OnOff::Auto),
            ("-fa -1", OnOff::Auto),
            ("-fa 0", OnOff::Off),
            ("-fa=false", OnOff::Off),
            ("-fa off -fa on", OnOff::On),
        ] {
            let text = text.replace("-fa=", "--flash-attn=");
            let cli = parse(&format!("npu-prefill {text} --out x")).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(cli.handoff.decoder.flash_attn, Some(want), "{text}");
            assert_eq!(cli.handoff.out.unwrap().to_str(), Some("x"));
        }
        for bad in [
            "-fa maybe",
            "-ctk f17",
            "-c -1",
            "-c x",
            "--state-version 5",
            "--chunk 0",
            "--deadline 0",
            "--deadline -3",
            "--deadline nan",
            "--n-stream 0",
            "--device gpu",
            "--max-memory lots",
            "--out a --out b",
            "--what",
        ] {
            assert!(parse(&format!("npu-prefill {bad}")).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_and_times() {
        for (text, want) in
            [("0", 0), ("1", 1), ("1K", 1024), ("1.5k", 1536), ("2G", 2 << 30), ("2GiB", 2 << 30), ("3 MB", 3 << 20)]
        {
            assert_eq!(size(text), Ok(want), "{text}");
        }
        for bad in ["", "G", "-1", "1X", "1e3", "99999999999G", "9999999999999.5G", "1..5", "."] {
            assert!(size(bad).is_err(), "{bad}");
        }
        assert_eq!(seconds("0.25"), Ok(Duration::from_millis(250)));
        for bad in ["0", "-1", "inf", "nan", "x", "", "1e99"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_after_a_double_dash_stay() {
        let out = normalise(["inspect", "-fa", "--", "-fa"].map(OsString::from));
        assert_eq!(out, ["inspect", "--flash-attn", "--", "-fa"]);
    }
}
