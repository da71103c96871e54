//! `npu-kernel`: what a kernel author keeps open all day. It launches the kernels of a directory on a device and holds them
//! against the oracle; what they are, the library's catalogue knows.

mod bench;
mod check;
mod diff;
mod generate;
mod list;
mod open;
mod show;
mod watch;

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::process::ExitCode;

/// Lists, checks, measures and compares the NPU kernels of a directory.
///
/// Every command works on three devices. cpu computes by the library's own code, takes no kernel file and shows that
/// everything around a kernel is in order; sim runs the files through the real XRT over a double of the driver, whose
/// arithmetic is the oracle; npu is the device. Only npu says anything about a kernel's arithmetic and its speed.
#[derive(Parser)]
#[command(name = "npu-kernel", version, max_term_width = 110, after_help = EXITS)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    on: On,
}

const EXITS: &str = "\
Exit codes:
   0  done, and every kernel that was checked is right
   1  a kernel is wrong
   2  usage
  69  no device, or no kernel
  75  the device is busy
  78  the directory's manifest or a file is wrong";

/// Where, and which kernels.
#[derive(Args, Clone)]
struct On {
    /// Directory of kernels, with a kernels.toml or names like full_i8_O_K640_N640.elf
    #[arg(long, value_name = "DIR", env = "ONEBIT_HYBRID_ELFS", global = true)]
    elfs: Option<PathBuf>,
    /// The device
    #[arg(
        long,
        value_enum,
        default_value = "cpu",
        value_name = "cpu|sim|npu",
        hide_possible_values = true,
        global = true
    )]
    device: Where,
    /// Threads of the cpu device
    #[arg(short, long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=1024), global = true)]
    threads: u16,
    /// The library through which XRT is reached
    #[arg(long, value_name = "FILE", env = "NPU_PREFILL_SHIM", global = true)]
    shim: Option<PathBuf>,
    /// No colours; they are for terminals only anyway
    #[arg(long, env = "NO_COLOR", value_name = "ANY", num_args = 0..=1, default_missing_value = "1", hide = true, global = true)]
    no_color: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Where {
    Cpu,
    Sim,
    Npu,
}

#[derive(Subcommand)]
enum Command {
    /// What kernels there are, what a launch of each moves, and the least time that takes
    List,
    /// Hold kernels against the oracle, every bit, for seeds 1 to 3; and the median of 5 launches
    Check {
        /// Names, or parts of them; all without any
        names: Vec<String>,
    },
    /// Measure launches
    Bench {
        /// Names, or parts of them; all without any
        names: Vec<String>,
        /// Launches of each
        #[arg(short, long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
        runs: u32,
        /// Append a line for each to this file
        #[arg(long, value_name = "FILE")]
        csv: Option<PathBuf>,
    },
    /// Show where a kernel's product first differs from the oracle's
    Diff {
        /// Its name, or a part of it
        name: String,
        /// Seed of the operands
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Rows and columns of a core's tile of C, to name the tile
        #[arg(long, value_name = "RxC", default_value = "32x128", value_parser = diff::tile)]
        tile: (usize, usize),
    },
    /// Check kernels again whenever a file of the directory changes
    Watch {
        /// The directory, instead of --elfs
        dir: Option<PathBuf>,
        /// End after this many rounds of looking
        #[arg(long, hide = true)]
        rounds: Option<u64>,
    },
    /// Print the manifest entry of a kernel file
    Gen(generate::Arguments),
}

/// A kernel was wrong: said already, and only the exit status is left.
#[derive(Debug)]
struct Wrong;

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a kernel is wrong")
    }
}

impl std::error::Error for Wrong {}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let show = show::Show::new(cli.on.no_color.as_ref().is_some_and(|v| !v.is_empty()));
    let result = match cli.command {
        Command::List => list::run(&cli.on, &show),
        Command::Check { names } => check::run(&cli.on, &names, &show),
        Command::Bench { names, runs, csv } => bench::run(&cli.on, &names, runs, csv.as_deref(), &show),
        Command::Diff { name, seed, tile } => diff::run(&cli.on, &name, seed, tile, &show),
        Command::Watch { dir, rounds } => {
            let elfs = dir.or(cli.on.elfs.clone());
            watch::run(&On { elfs, ..cli.on }, rounds, &show)
        }
        Command::Gen(arguments) => generate::run(&arguments, &show),
    };
    let code = match result {
        Ok(()) => 0,
        Err(e) if e.is::<Wrong>() => 1,
        Err(e) => {
            eprintln!("npu-kernel: {e:#}");
            open::status(&e)
        }
    };
    xdna::leave(code);
    ExitCode::from(code)
}
