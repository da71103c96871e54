//! `npu-prefill`: the program. Arguments become a job, the job a state file or rows in a decoder's memory, and whatever goes
//! wrong one line on stderr and an exit status. Computing is the `prefill` crate's, bytes are `kvlayout`'s.

mod cli;
mod compare;
mod config;
mod describe;
mod device;
mod doctor;
mod engine;
mod env;
mod exit;
mod file;
mod handed;
mod handoff;
mod ids;
mod inspect;
mod job;
mod memory;
mod npu;
mod pack_store;
mod progress;
mod receipt;
mod say;
mod selftest;
mod server;
mod setup;
mod share;
mod signals;
mod state_version;

use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;

use crate::cli::{Cli, Command};
use crate::exit::{Error, Kind, Result};
use crate::say::complain;

fn main() -> ExitCode {
    let started = Instant::now();
    std::panic::set_hook(Box::new(on_panic));
    if std::env::args_os().len() <= 1 {
        say::say_plain(cli::WELCOME);
        return Kind::Usage.code().into();
    }
    let cli = match Cli::try_parse_from(cli::normalise(std::env::args_os())) {
        Ok(cli) => cli,
        Err(e) if e.use_stderr() => {
            complain(usage(&e.render().to_string()));
            return Kind::Usage.code().into();
        }
        Err(help) => {
            let _ = help.print();
            return ExitCode::SUCCESS;
        }
    };
    // A panic unwinds to here, so that an unfinished output is dropped like on any other error. The hook has said what it was.
    let result = catch_unwind(AssertUnwindSafe(|| dispatch(cli, started)));
    let code = match result {
        Ok(Ok(())) => 0,
        Ok(Err(e)) => {
            let e = e.at_the_end();
            complain(&e);
            e.kind.code()
        }
        Err(_) => Kind::Internal.code(),
    };
    xdna::leave(code);
    code.into()
}

/// What is wrong with a command line, on one line like every other error; the usage itself is a command away.
fn usage(rendered: &str) -> Error {
    let text = rendered.split("\n\nUsage:").next().unwrap_or_default();
    let text = text.split("\n\nFor more information").next().unwrap_or_default();
    let text = text.strip_prefix("error: ").unwrap_or(text).replace(":\n", ":");
    let words: Vec<&str> = text.split_whitespace().collect();
    Error::new(Kind::Usage, words.join(" ") + ". See npu-prefill --help")
}

fn dispatch(mut cli: Cli, started: Instant) -> Result<()> {
    let level = env::LOG.parse(|s| s.parse().map_err(|_| "it is off, error, warn, info, debug or trace".to_owned()))?;
    say::start_log(level.unwrap_or(log::LevelFilter::Warn));
    match cli.command {
        None => {
            // Descriptors first: nothing has been opened so far that their numbers could be taken for.
            let ends = job::Ends::take(&mut cli.handoff)?;
            let watch = signals::Watch::start()
                .map_err(|e| Error::new(Kind::Internal, e).context("setting up the handling of signals"))?;
            let job = job::Job::new(ends, cli.handoff)?;
            handoff::run(job, &watch, started)
        }
        Some(Command::Inspect { file, json }) => inspect::run(&file, json),
        Some(Command::Compare { a, b, json }) => compare::run(&a, &b, json),
        Some(Command::Plan(args)) => describe::plan(&args),
        Some(Command::Layout(args)) => describe::layout(&args),
        Some(Command::Doctor(args)) => doctor::run(&args),
        Some(Command::Selftest(args)) => selftest::run(&args),
        Some(Command::Setup(args)) => setup::run(args),
        Some(Command::Models { json }) => {
            describe::models(json);
            Ok(())
        }
        Some(Command::Completions { shell }) => {
            say::print(&describe::completions(shell));
            Ok(())
        }
        Some(Command::Man) => {
            say::print(&describe::manual());
            Ok(())
        }
        Some(Command::Environment) => {
            say::print(&env::markdown());
            Ok(())
        }
    }
}

fn on_panic(info: &PanicHookInfo<'_>) {
    let what = info.payload();
    let what = what.downcast_ref::<&str>().copied().or_else(|| what.downcast_ref::<String>().map(String::as_str));
    let what = what.unwrap_or("panic").replace('\n', " ");
    let place = info.location().map(|l| format!(" at {l}")).unwrap_or_default();
    complain(format_args!("internal error: {what}{place} (npu-prefill {}); please report this", cli::VERSION));
    if exit::is_tainted() {
        // At once, from whichever thread this is: there is nothing to be dropped, and nothing more may be written.
        std::process::exit(Kind::Tainted.code().into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use exit::tests::{in_a_process_of_its_own, taint};

    #[test]
    #[ignore = "ends its process; run by the next"]
    fn panics_after_writing() {
        std::panic::set_hook(Box::new(on_panic));
        taint();
        // From a thread whose end nobody waits for.
        let _ = std::thread::spawn(|| panic!("on purpose")).join();
        unreachable!("the hook has ended the process");
    }

    #[test]
    fn a_panic_after_the_first_byte_ends_the_process_as_tainted() {
        let (code, said) = in_a_process_of_its_own("tests::panics_after_writing");
        assert!(code == Some(79) && said.contains("internal error: on purpose at "), "{code:?} {said}");
    }
}
