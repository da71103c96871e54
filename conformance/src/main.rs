//! The command line of the harness. What it does is in the library; this file parses, prints and sets the exit code.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result};
use clap::{Args, Parser, Subcommand};
use conformance::contract::Kernels;
use conformance::decoder::Kind;
use conformance::oracle::{Arithmetic, Mistake};
use conformance::pins::{Cache, Pins};
use conformance::producer::Choice;
use conformance::routes::{self, Routes};
use conformance::run::{self, Verdict};
use conformance::server::Build;
use conformance::shared::Route;
use conformance::{cases, demo, hostile, html, locate, matrix, probe, report, terminal};

/// Proves a provider of llama.cpp state files against real llama-servers.
#[derive(Debug, Parser)]
#[command(name = "conformance", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Hand a prompt over to a real server and show what comes of it
    Demo(DemoArgs),
    /// Run cases; exit 0 only when all pass
    Run(RunArgs),
    /// List the cases
    List(Selection),
    /// Compare two state files: A is the reference
    Compare {
        /// The reference
        a: PathBuf,
        /// The other one
        b: PathBuf,
    },
    /// Run the cases of the support table - architecture by server by cache - and write it where the tree shows it
    Matrix(MatrixArgs),
    /// Print the table of a stored report, or write it as a page to look at
    Report {
        /// What `run --json` wrote
        file: PathBuf,
        /// Write one HTML file with pictures, which needs nothing else
        #[arg(long, value_name = "FILE")]
        html: Option<PathBuf>,
    },
    /// Measure the routes: file, shared memory, and a bare copy of the same bytes
    Routes(RoutesArgs),
    /// Servers and models
    #[command(subcommand)]
    Pin(PinCommand),
}

#[derive(Debug, Args)]
struct DemoArgs {
    /// A llama-server of your own, instead of a pinned one
    #[arg(long, value_name = "PATH")]
    llama_server: Option<PathBuf>,
    /// A model of your own, instead of SmolLM2-135M
    #[arg(long, value_name = "GGUF")]
    model: Option<PathBuf>,
    /// A message of your own
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// The pinned server
    #[arg(long, value_name = "NAME", default_value = "v4")]
    pin: String,
    /// The provider, instead of the one built from this workspace
    #[arg(long, value_name = "PATH")]
    provider: Option<PathBuf>,
    /// Threads of server and provider [default: the cores]
    #[arg(short, long, value_name = "N")]
    threads: Option<u32>,
}

#[derive(Debug, Clone, Args)]
struct Selection {
    /// All cases
    #[arg(long)]
    all: bool,
    /// Cases whose name ENTRY/MODEL/PIN matches; `*` stands for anything
    #[arg(long, value_name = "GLOB")]
    case: Vec<String>,
    /// Only on these servers
    #[arg(long, value_name = "NAME")]
    pin: Vec<String>,
    /// Only these models
    #[arg(long, value_name = "NAME")]
    model: Vec<String>,
    /// Cases from the .toml files of a directory, instead of the built-in ones
    #[arg(long, value_name = "DIR")]
    cases: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct RunArgs {
    #[command(flatten)]
    selection: Selection,
    /// Only these prompts of the cases
    #[arg(long, value_name = "NAME")]
    prompt: Vec<String>,
    /// Who makes the state files: provider, server, oracle, or fixture:DIR
    #[arg(long, value_name = "NAME", default_value = "provider")]
    producer: String,
    /// How the provider hands over: file, shared (the rows must be those of the file) or both (the files must be equal throughout)
    #[arg(long, value_name = "NAME", default_value = "file")]
    route: Route,
    /// What memory is shared: memfd or udmabuf
    #[arg(long, value_name = "NAME", default_value = "memfd")]
    memory: Kind,
    /// The provider's device in cases with `contract`: oracle, sim or npu [default: oracle, with kernels that are nothing but names]
    #[arg(long, value_name = "NAME", requires = "elfs")]
    device: Option<String>,
    /// The directory of its kernels
    #[arg(long, value_name = "DIR", requires = "device")]
    elfs: Option<PathBuf>,
    /// Make the oracle wrong in one way
    #[arg(long, value_name = "NAME")]
    mistake: Option<Mistake>,
    /// The provider, instead of the one built from this workspace
    #[arg(long, value_name = "PATH")]
    provider: Option<PathBuf>,
    /// A llama-server of your own, instead of the pinned ones
    #[arg(long, value_name = "PATH")]
    llama_server: Option<PathBuf>,
    /// Look at the hostile state files; needs no server
    #[arg(long)]
    hostile: bool,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Keep what the servers themselves make of the prompts in this directory, and take it from there in later runs, which then
    /// take a fraction of the time
    #[arg(long, value_name = "DIR", conflicts_with = "llama_server")]
    references: Option<PathBuf>,
    /// Keep the files of cases that do not pass
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Cases at a time, each with one thread [default: the cores]
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
}

#[derive(Debug, Args)]
struct MatrixArgs {
    /// What `run --json` stored, instead of running the cases; all of them must be in it
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// The provider, instead of the one built from this workspace
    #[arg(long, value_name = "PATH")]
    provider: Option<PathBuf>,
    /// The root of the tree whose files are written
    #[arg(long, value_name = "DIR", default_value = ".")]
    root: PathBuf,
    /// Cases at a time, each with one thread [default: the cores]
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
}

#[derive(Debug, Args)]
struct RoutesArgs {
    /// The provider, instead of the one built from this workspace
    #[arg(long, value_name = "PATH")]
    provider: Option<PathBuf>,
    /// A model of your own, instead of SmolLM2-135M
    #[arg(long, value_name = "GGUF")]
    model: Option<PathBuf>,
    /// The pinned server that restores the files; none leaves that out
    #[arg(long, value_name = "NAME", default_value = "v4")]
    pin: String,
    /// Lengths of prompts
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [128, 1024, 8000])]
    tokens: Vec<usize>,
    /// Runs of each
    #[arg(long, value_name = "N", default_value_t = 5)]
    runs: usize,
    /// Threads of server and provider [default: the cores]
    #[arg(short, long, value_name = "N")]
    threads: Option<u32>,
    /// What memory is shared: memfd or udmabuf
    #[arg(long, value_name = "NAME", default_value = "memfd")]
    memory: Kind,
    /// Write all numbers as CSV; - for the terminal
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum PinCommand {
    /// List pinned servers and models, and whether they are installed
    List,
    /// Install a pinned server or model into the cache
    Install {
        /// Its name
        #[arg(required_unless_present = "all")]
        name: Option<String>,
        /// All but the optional ones
        #[arg(long)]
        all: bool,
    },
    /// Find out what a running server's memory looks like and write the provider's configuration
    Probe {
        /// The server
        #[arg(long, value_name = "URL")]
        url: String,
        /// Its --slot-save-path
        #[arg(long, value_name = "DIR")]
        slots: PathBuf,
        /// Where to write; - for the terminal [default: $XDG_CONFIG_HOME/npu-prefill/config.toml]
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    // Looked up when it is needed: opening the cache would make its directory.
    terminal::leave_cleanly(|| Cache::open().map(|c| run::temporary_dirs(c.root())).unwrap_or_default());
    match work(Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("conformance: {e:#}");
            ExitCode::from(2)
        }
    }
}

/// Prints lines on standard output.
macro_rules! show {
    ($($what:tt)*) => { terminal::show(format_args!($($what)*)) };
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn work(cli: Cli) -> Result<bool> {
    match cli.command {
        Command::Demo(args) => run_demo(args),
        Command::Run(args) => run_cases(args),
        Command::List(selection) => {
            for c in select(&Pins::load()?, &selection)? {
                let fa = if c.flash_attn { "" } else { " fa off" };
                let swa = if c.swa_full { " swa-full" } else { "" };
                let np = if c.n_parallel > 1 { format!(" np {}", c.n_parallel) } else { String::new() };
                let by = if c.arithmetic == Arithmetic::Int8 { " int8" } else { "" };
                show!("{}  {} prompts, K {} V {}{fa}{swa}{np}{by}", c.id(), c.prompts.len(), c.type_k, c.type_v);
            }
            Ok(true)
        }
        Command::Compare { a, b } => compare(&a, &b),
        Command::Report { file, html } => {
            let text = std::fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
            let value: serde_json::Value =
                serde_json::from_str(&text).with_context(|| format!("reading {}", file.display()))?;
            match html {
                Some(path) => {
                    std::fs::write(&path, html::page(&value)?).with_context(|| format!("writing {}", path.display()))?
                }
                None => show!("{}", report::table(&value)?.trim_end()),
            }
            Ok(value["counts"][1] == 0 && value["counts"][3] == 0)
        }
        Command::Matrix(args) => write_matrix(&args),
        Command::Routes(args) => measure_routes(args),
        Command::Pin(command) => pin(command),
    }
}

fn run_demo(args: DemoArgs) -> Result<bool> {
    let demo = demo::Demo {
        llama_server: args.llama_server,
        model: args.model,
        prompt: args.prompt,
        pin: args.pin,
        provider: locate::provider(args.provider.as_deref())?,
        threads: args.threads.unwrap_or(cores() as u32),
    };
    let outcome = demo::run(&Pins::load()?, &Cache::open()?, &demo)?;
    show!("{}", outcome.text().trim_end());
    Ok(outcome.succeeded())
}

/// The cases asked for; all of them when nothing is said.
fn select(pins: &Pins, s: &Selection) -> Result<Vec<cases::Case>> {
    let mut list = match &s.cases {
        Some(dir) => cases::from_dir(dir, pins)?,
        None => cases::all(pins)?,
    };
    if !s.all {
        list.retain(|c| s.case.is_empty() || s.case.iter().any(|g| cases::glob(g, &c.id())));
    }
    list.retain(|c| s.pin.is_empty() || s.pin.contains(&c.pin));
    list.retain(|c| s.model.is_empty() || s.model.iter().any(|g| cases::glob(g, &c.model)));
    anyhow::ensure!(!list.is_empty(), "no case matches; `conformance list` shows them");
    Ok(list)
}

fn run_cases(args: RunArgs) -> Result<bool> {
    if args.hostile {
        return run_hostile(args.json);
    }
    let s = &args.selection;
    anyhow::ensure!(
        s.all || !s.case.is_empty() || !s.pin.is_empty() || !s.model.is_empty() || s.cases.is_some(),
        "say which cases: --all, --case GLOB, --pin NAME or --model NAME (`conformance list` shows them)"
    );
    let pins = Pins::load()?;
    let mut list = select(&pins, s)?;
    if !args.prompt.is_empty() {
        list.iter_mut().for_each(|c| c.prompts.retain(|p| args.prompt.contains(p)));
        list.retain(|c| !c.prompts.is_empty());
        anyhow::ensure!(!list.is_empty(), "no case has a prompt called {}", args.prompt.join(" or "));
    }
    let producer = match args.producer.as_str() {
        "provider" => {
            let program = locate::provider(args.provider.as_deref())?;
            match args.route {
                Route::File => Choice::Provider(program),
                route => Choice::Shared(program, route, args.memory),
            }
        }
        other if args.route != Route::File => {
            anyhow::bail!("only a provider writes into a decoder's memory, {other} makes files")
        }
        "server" => Choice::Server,
        "oracle" => Choice::Oracle(args.mistake),
        other => match other.strip_prefix("fixture:") {
            Some(dir) => Choice::Fixture(PathBuf::from(dir)),
            None => {
                anyhow::bail!("no producer is called {other:?}; there are provider, server, oracle and fixture:DIR")
            }
        },
    };
    anyhow::ensure!(
        args.device.is_none() || list.iter().any(|c| c.arithmetic == Arithmetic::Int8),
        "--device is for cases whose products are int8, and none of these is one (`conformance list` shows them)"
    );
    let kernels = args.device.zip(args.elfs).map(|(device, dir)| Kernels { device, dir });
    let context = run::Context {
        pins,
        cache: Cache::open()?,
        producer,
        server: args.llama_server,
        references: args.references,
        kernels,
        keep: args.keep,
    };
    let began = Instant::now();
    let results = run::run_all(&context, &list, args.jobs.unwrap_or_else(cores));
    let program = match &context.producer {
        Choice::Provider(path) | Choice::Shared(path, ..) => Some(path.as_path()),
        _ => None,
    };
    let versions = report::versions(&context.pins, &list, program, context.server.as_deref());
    let report = report::report(&results, began.elapsed().as_secs_f64(), versions);
    let value = serde_json::to_value(&report).context("the report as JSON")?;
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&value).context("the report as JSON")? + "\n";
        std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    show!("{}", report::table(&value)?.trim_end());
    let skipped_all = results.iter().all(|c| c.verdict == Verdict::Skip);
    Ok(!skipped_all && results.iter().all(|c| matches!(c.verdict, Verdict::Pass | Verdict::Skip)))
}

/// Nothing is written unless every case passed.
fn write_matrix(args: &MatrixArgs) -> Result<bool> {
    let pins = Pins::load()?;
    let mut list = cases::all(&pins)?;
    list.retain(matrix::is_of_matrix);
    let passed: Vec<String> = match &args.report {
        Some(file) => {
            let text = std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
            let value: serde_json::Value =
                serde_json::from_str(&text).with_context(|| format!("reading {}", file.display()))?;
            let cases = value["cases"].as_array().context("the report has no list of cases")?;
            let passed = cases.iter().filter(|c| c["verdict"] == "pass").filter_map(|c| c["id"].as_str());
            passed.map(str::to_owned).collect()
        }
        None => {
            let producer = Choice::Provider(locate::provider(args.provider.as_deref())?);
            let context = run::Context {
                pins: Pins::load()?,
                cache: Cache::open()?,
                producer,
                server: None,
                references: None,
                kernels: None,
                keep: None,
            };
            let results = run::run_all(&context, &list, args.jobs.unwrap_or_else(cores));
            results.into_iter().filter(|r| r.verdict == Verdict::Pass).map(|r| r.id).collect()
        }
    };
    let missing: Vec<String> = list.iter().map(cases::Case::id).filter(|id| !passed.contains(id)).collect();
    if !missing.is_empty() {
        show!(
            "nothing is written, since {} of {} cases did not pass:\n{}",
            missing.len(),
            list.len(),
            missing.join("\n")
        );
        return Ok(false);
    }
    let proofs = matrix::proofs(list.iter())?;
    for (page, table) in
        [(matrix::PAGE, matrix::table(&proofs, &pins)?), (matrix::FRONT, matrix::summary(&proofs, &pins)?)]
    {
        let page = args.root.join(page);
        let text = std::fs::read_to_string(&page).with_context(|| format!("reading {}", page.display()))?;
        let text = matrix::splice(&text, &table).with_context(|| page.display().to_string())?;
        std::fs::write(&page, text).with_context(|| format!("writing {}", page.display()))?;
    }
    let file = args.root.join(matrix::LIST);
    std::fs::write(&file, matrix::list(&proofs, &pins)?).with_context(|| format!("writing {}", file.display()))?;
    show!(
        "{} architectures by {} cases: {}, {}, {}",
        proofs.len(),
        list.len(),
        matrix::PAGE,
        matrix::FRONT,
        file.display()
    );
    Ok(true)
}

fn measure_routes(args: RoutesArgs) -> Result<bool> {
    let (pins, cache) = (Pins::load()?, Cache::open()?);
    let routes = Routes {
        provider: locate::provider(args.provider.as_deref())?,
        model: match args.model {
            Some(path) => path,
            None => cache.install_model(pins.model("smollm2")?)?,
        },
        build: if args.pin == "none" { None } else { Some(Build::pinned(&pins, &cache, &args.pin)?) },
        tokens: args.tokens,
        runs: args.runs,
        threads: args.threads.unwrap_or(cores() as u32),
        kind: args.memory,
        root: cache.root().to_owned(),
    };
    let rows = routes::measure(&routes, &mut |text| eprintln!("{text}"))?;
    show!("{}", routes::markdown(&routes, &rows).trim_end());
    match args.csv {
        Some(path) if path.as_os_str() == "-" => show!("\n{}", routes::csv(&rows).trim_end()),
        Some(path) => {
            std::fs::write(&path, routes::csv(&rows)).with_context(|| format!("writing {}", path.display()))?
        }
        None => {}
    }
    Ok(true)
}

fn run_hostile(json: Option<PathBuf>) -> Result<bool> {
    let outcomes = hostile::run()?;
    for o in &outcomes {
        show!("{:<6} {} (a server: {})", if o.flagged { "ok" } else { "MISSED" }, o.name, o.server);
        for f in o.found.iter().take(3) {
            show!("         {f}");
        }
    }
    if let Some(path) = json {
        let text = serde_json::to_string_pretty(&outcomes).context("the outcomes as JSON")? + "\n";
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    let missed = outcomes.iter().filter(|o| !o.flagged).count();
    show!("\n{} hostile files, {} missed", outcomes.len(), missed);
    Ok(missed == 0)
}

fn compare(a: &std::path::Path, b: &std::path::Path) -> Result<bool> {
    let read = |p: &std::path::Path| -> Result<kvlayout::State> {
        let bytes = std::fs::read(p).with_context(|| format!("reading {}", p.display()))?;
        kvlayout::State::parse_any(&bytes).with_context(|| p.display().to_string())
    };
    let (a, b) = (read(a)?, read(b)?);
    let structure = kvlayout::compare::structure(&a, &b);
    for d in &structure {
        show!("{d}");
    }
    let errors = kvlayout::compare::numeric(&a, &b).map_err(|d| anyhow::anyhow!("the rows cannot be compared: {d}"))?;
    show!("section layer part     rows    rel L2   max abs   row max (at)        1-cos max (at)      equal");
    for e in &errors {
        show!(
            "{:>7} {:>5} {:>4} {:>8}  {:.2e}  {:.2e}  {:.2e} {:<8}  {:.2e} {:<8}  {:.1} %",
            e.section,
            e.layer,
            e.part.to_string(),
            e.rows,
            e.rel_l2,
            e.max_abs,
            e.row_max_rel,
            format!("({})", e.worst_row),
            e.row_max_one_minus_cos,
            format!("({})", e.worst_cos_row),
            100.0 * e.equal as f64 / e.values.max(1) as f64
        );
    }
    Ok(structure.is_empty() && errors.iter().all(|e| e.rel_l2 == 0.0))
}

fn pin(command: PinCommand) -> Result<bool> {
    let pins = Pins::load()?;
    match command {
        PinCommand::List => {
            let cache = Cache::open()?;
            for p in &pins.servers {
                let place = cache.server(p).map_or("not installed".into(), |d| d.display().to_string());
                show!("{:<20} server, {} {}, state version {}: {place}", p.name, p.package, p.version, p.state_version);
            }
            for p in &pins.models {
                let place = cache.model(p).map_or("not installed".into(), |d| d.display().to_string());
                show!(
                    "{:<20} model, {} {} ({}, {} MB): {place}",
                    p.name,
                    p.title,
                    p.weights,
                    p.license,
                    p.bytes / 1_000_000
                );
            }
            Ok(true)
        }
        PinCommand::Install { name, all } => {
            let cache = Cache::open()?;
            let wanted = |n: &str, optional: bool| if all { !optional } else { name.as_deref() == Some(n) };
            let mut any = false;
            for p in pins.servers.iter().filter(|p| wanted(&p.name, false)) {
                show!("{}: {}", p.name, cache.install_server(p)?.display());
                any = true;
            }
            for p in pins.models.iter().filter(|p| wanted(&p.name, p.optional)) {
                show!("{}: {}", p.name, cache.install_model(p)?.display());
                any = true;
            }
            anyhow::ensure!(
                any,
                "nothing is pinned as {:?}; `conformance pin list` shows what is",
                name.unwrap_or_default()
            );
            Ok(true)
        }
        PinCommand::Probe { url, slots, out } => {
            let text = probe::Probe::of(&url, &slots, &|| locate::provider(None))?.to_toml(&url);
            if out.as_deref() == Some(std::path::Path::new("-")) {
                show!("{}", text.trim_end());
                return Ok(true);
            }
            let path = match out {
                Some(path) => path,
                None => probe::usual_place()?,
            };
            probe::write(&path, &text)?;
            show!("{}", path.display());
            Ok(true)
        }
    }
}
