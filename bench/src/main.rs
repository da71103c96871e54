//! The benchmarks: the provider against llama.cpp, its kernels against the processor's instructions, with a busy neighbour,
//! and as a process. This file parses, prints and sets the exit code; each command is a module.
//!
//! Not a test: nothing is judged, and no figure fails anything. Like the conformance harness it starts the provider as a
//! program; of the code under test it links the kernels alone, which it calls one by one.

mod csv;
mod ids;
mod kernels;
mod locate;
mod machine;
mod neighbour;
mod ours;
mod peer;
mod prefill;
mod process;
mod report;
mod run;
mod stats;
mod svg;
mod table;

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, Parser, Subcommand};
use npu_kernels::{Isa, WeightType};

/// Measures the provider. Figures are the machine's; ratios measured in one run are what can be compared.
#[derive(Debug, Parser)]
#[command(name = "bench", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Whole prompts: the provider and llama-bench in turn
    Prefill(PrefillArgs),
    /// Matrix products and attention on one thread, as shares of what the processor's instructions can do
    Kernels(KernelArgs),
    /// What each side loses to a busy process on one of its cores
    Neighbour(NeighbourArgs),
    /// What it costs to start the provider for every prompt
    Process(ProcessArgs),
    /// Put the recorded measurements into the pages, as pictures and tables; measures nothing
    Report {
        /// Fail when a page or picture is stale, and write nothing
        #[arg(long)]
        check: bool,
    },
}

#[derive(Debug, Args)]
struct OursArgs {
    /// The provider, instead of the one built from this workspace
    #[arg(long, value_name = "PATH")]
    provider: Option<PathBuf>,
    /// Where state files are written; a tmpfs leaves the disk out [default: the system's directory for temporary files]
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// Threads of each side
    #[arg(short, long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
}

impl OursArgs {
    fn provider(&self) -> Result<ours::Ours> {
        ours::Ours::new(conformance::locate::provider(self.provider.as_deref())?, self.threads, self.scratch.as_deref())
    }
}

#[derive(Debug, Args)]
struct PeerArgs {
    /// What tables call llama-bench
    #[arg(long = "peer", value_name = "NAME", default_value = "llama.cpp")]
    name: String,
    /// An option more for llama-bench; once for every word, such as --peer-arg=-ub --peer-arg=1024
    #[arg(long = "peer-arg", value_name = "ARG", allow_hyphen_values = true)]
    more: Vec<String>,
}

impl PeerArgs {
    fn peer(self, program: PathBuf, threads: u32) -> peer::Peer {
        peer::Peer { program, name: self.name, threads, more: self.more }
    }
}

/// Longest prompt, which is also the provider's limit.
const MAX_PROMPT: i64 = 1 << 22;

#[derive(Debug, Args)]
struct PrefillArgs {
    /// llama.cpp's llama-bench
    #[arg(long, value_name = "PATH")]
    llama_bench: PathBuf,
    #[command(flatten)]
    peer: PeerArgs,
    /// A model, several times for several [default: those that conformance has installed]
    #[arg(short, long, value_name = "FILE")]
    model: Vec<PathBuf>,
    /// Lengths of prompts
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [128, 512, 2048],
          value_parser = clap::value_parser!(u32).range(1..=MAX_PROMPT))]
    prompt: Vec<u32>,
    /// Runs of each side per model and length
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Wait up to this long before every run for others to take less than 2 % of the CPU time
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    wait: u32,
    /// Add the rows to this file
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    #[command(flatten)]
    ours: OursArgs,
}

#[derive(Debug, Args)]
struct KernelArgs {
    /// Instruction set: auto, scalar, avx2, avx512, avx512bf16 or neon
    #[arg(long, value_name = "NAME", default_value = "auto")]
    isa: String,
    /// Weight types [default: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, F16, BF16, F32]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = kernels::weight_type)]
    types: Vec<WeightType>,
    /// Rows of activations
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [12, 64, 128, 512],
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    rows: Vec<u32>,
    /// Weight matrices, inputs by outputs; turned round for types whose blocks fit only so
    #[arg(long, value_name = "KxN,...", value_delimiter = ',', default_values = ["576x1536", "896x4864", "1536x8960"],
          value_parser = kernels::shape)]
    shapes: Vec<kernels::Shape>,
    /// Keys that attention looks at
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [512, 2048, 8192],
          value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    keys: Vec<u32>,
    /// Channels of an attention head
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [64, 128],
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    heads: Vec<u32>,
    /// Runs of each
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// CPU time of a run, at least
    #[arg(long, value_name = "MS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    least: u64,
    /// Add the rows to this file
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct NeighbourArgs {
    /// The model
    #[arg(short, long, value_name = "FILE")]
    model: PathBuf,
    /// llama.cpp's llama-bench; without it only the provider is measured
    #[arg(long, value_name = "PATH")]
    llama_bench: Option<PathBuf>,
    #[command(flatten)]
    peer: PeerArgs,
    /// Length of the prompt
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=MAX_PROMPT))]
    prompt: u32,
    /// Runs of each
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    #[command(flatten)]
    ours: OursArgs,
}

#[derive(Debug, Args)]
struct ProcessArgs {
    /// The model
    #[arg(short, long, value_name = "FILE")]
    model: PathBuf,
    /// Lengths of prompts
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [64, 512],
          value_parser = clap::value_parser!(u32).range(1..=MAX_PROMPT))]
    prompt: Vec<u32>,
    /// Runs of each
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    #[command(flatten)]
    ours: OursArgs,
}

fn main() -> ExitCode {
    let report = match work(Cli::parse().command) {
        Ok(report) => report,
        Err(e) => {
            say(&format!("bench: {e:#}"));
            return ExitCode::from(2);
        }
    };
    match io::stdout().write_all(report.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            say(&format!("bench: printing the table: {e}"));
            ExitCode::from(2)
        }
    }
}

/// A line on stderr. Whether anyone can read it changes nothing.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

fn work(command: Command) -> Result<String> {
    // Progress is for people, the report for a file as well: the one goes to stderr, the other to stdout.
    let mut progress = say;
    match command {
        Command::Prefill(a) => {
            let models = locate::models(&a.model)?;
            let threads = a.ours.threads;
            let p = prefill::Prefill {
                models,
                prompts: a.prompt,
                runs: a.runs,
                threads,
                patience: Duration::from_secs(a.wait.into()),
                peer: a.peer.peer(a.llama_bench, threads),
                ours: a.ours.provider()?,
            };
            let rows = prefill::measure(&p, a.csv.as_deref(), &mut progress)?;
            Ok(prefill::report(&p, &rows))
        }
        Command::Kernels(a) => {
            if cfg!(debug_assertions) {
                bail!(
                    "this build is not optimised, so its kernels are none to be measured; \
                     run `cargo run --release -p bench -- kernels`"
                );
            }
            let sizes = |list: Vec<u32>| list.into_iter().map(|n| n as usize).collect();
            let c = kernels::Kernels {
                isa: isa(&a.isa)?,
                types: a.types,
                rows: sizes(a.rows),
                shapes: a.shapes,
                keys: sizes(a.keys),
                heads: sizes(a.heads),
                runs: a.runs,
                least: Duration::from_millis(a.least),
            };
            let results = kernels::measure(&c, a.csv.as_deref(), &mut progress)?;
            Ok(kernels::report(&c, &results))
        }
        Command::Neighbour(a) => {
            let model = model(a.model)?;
            let threads = a.ours.threads;
            let peer = a.llama_bench.map(|program| a.peer.peer(program, threads));
            let ours = a.ours.provider()?;
            let p = neighbour::Neighbour { model, prompt: a.prompt, runs: a.runs, threads, ours, peer };
            let rows = neighbour::measure(&p, &mut progress)?;
            Ok(neighbour::report(&p, &rows))
        }
        Command::Process(a) => {
            let model = model(a.model)?;
            let p = process::Process { model, prompts: a.prompt, runs: a.runs, ours: a.ours.provider()? };
            let rows = process::measure(&p, &mut progress)?;
            Ok(process::report(&p, &rows))
        }
        Command::Report { check } => {
            let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
            if !report::run(&root, check, &mut progress)? {
                bail!("the pages do not show what was recorded");
            }
            Ok(String::new())
        }
    }
}

/// The one model, which has to be there.
fn model(path: PathBuf) -> Result<PathBuf> {
    Ok(locate::models(&[path])?.remove(0))
}

fn isa(name: &str) -> Result<Isa> {
    match (name, Isa::parse(name)) {
        ("auto", _) => Ok(Isa::detect()),
        (_, Some(isa)) if isa.is_available() => Ok(isa),
        (_, Some(_)) => {
            bail!("--isa {name}: this processor does not have it; the best it has is {}", Isa::detect().name())
        }
        (_, None) => bail!("--isa {name}: there is no such one; it is auto, scalar, avx2, avx512, avx512bf16 or neon"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_holds_together() {
        Cli::command().debug_assert();
        let cli =
            Cli::try_parse_from(["bench", "prefill", "--llama-bench", "lb", "--prompt", "1,2", "-m", "a", "-m", "b"]);
        let Command::Prefill(a) = cli.unwrap().command else { panic!("another command") };
        assert_eq!((a.prompt, a.model.len(), a.runs, a.ours.threads), (vec![1, 2], 2, 5, 2));
        let Command::Kernels(a) = Cli::try_parse_from(["bench", "kernels"]).unwrap().command else { panic!("another") };
        assert_eq!((a.rows, a.shapes.len(), a.types.len()), (vec![12, 64, 128, 512], 3, 0));
        assert!(Cli::try_parse_from(["bench", "process", "-m", "a", "--prompt", "0"]).is_err());
        assert!(Cli::try_parse_from(["bench", "kernels", "--types", "Q9"]).is_err());
    }

    #[test]
    fn an_instruction_set_is_one_that_is_there() {
        assert_eq!(isa("auto").unwrap(), Isa::detect());
        assert_eq!(isa("scalar").unwrap(), Isa::Scalar);
        assert!(isa("mmx").unwrap_err().to_string().contains("no such one"));
    }
}
