//! Manners on a terminal: bars for runs and downloads, colours, and a clean line when Ctrl-C ends them. Where stderr is no
//! terminal there are no bars and no colours, and Ctrl-C is what it always was.

use std::io::{IsTerminal as _, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use console::style;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, WeakProgressBar};

/// How often the clock of a bar moves on.
const TICK: Duration = Duration::from_millis(250);

/// Whether a person is looking at stderr.
pub fn is_terminal() -> bool {
    std::io::stderr().is_terminal()
}

/// Prints a line, or lines, on standard output. A reader that has seen enough and left (`| head`) is no error.
pub fn show(what: std::fmt::Arguments) {
    match writeln!(std::io::stdout().lock(), "{what}") {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => eprintln!("conformance: standard output: {e}"),
        _ => {}
    }
}

/// A verdict's word as stderr shows it: in colour on a terminal, unless NO_COLOR says otherwise.
pub fn coloured(word: &str) -> String {
    let padded = format!("{word:<5}");
    let styled = style(padded).for_stderr().bold();
    match word {
        "ok" => styled.green(),
        "skip" => styled.yellow(),
        _ => styled.red(),
    }
    .to_string()
}

fn styled(bar: ProgressBar, template: &str) -> ProgressBar {
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}

/// Every bar there is, to be cleared when a signal ends the program.
static BARS: Mutex<Vec<WeakProgressBar>> = Mutex::new(Vec::new());

fn drawn(len: Option<u64>) -> ProgressBar {
    let target = if is_terminal() { ProgressDrawTarget::stderr_with_hz(8) } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(len, target);
    BARS.lock().unwrap_or_else(PoisonError::into_inner).push(bar.downgrade());
    bar
}

/// Clears what is drawn, for good: a bar that has ended is not drawn again.
fn clear_bars() {
    for bar in BARS.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        if let Some(bar) = bar.upgrade() {
            bar.finish_and_clear();
        }
    }
}

/// A run of many cases: how many are done, which are at work, and how long the rest will take.
pub struct Runs {
    bar: ProgressBar,
    of: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    done: usize,
    at_work: Vec<String>,
}

impl Runs {
    /// Of `of` cases, which weigh `weight` together.
    pub fn new(of: usize, weight: u64) -> Runs {
        let bar = styled(drawn(Some(weight)), "{bar:16} {prefix} cases  {elapsed} + {eta}  {msg}");
        if is_terminal() {
            bar.enable_steady_tick(TICK);
        }
        let runs = Runs { bar, of, state: Mutex::default() };
        runs.show(|_| ());
        runs
    }

    fn show(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut state);
        self.bar.set_prefix(format!("{}/{}", state.done, self.of));
        // As much as fits, with room for the `^C` of a terminal: at the edge that would go to the next line.
        let room = usize::from(console::Term::stderr().size().1).saturating_sub(56);
        self.bar.set_message(state.at_work.join(", ").chars().take(room).collect::<String>());
    }

    /// A case begins.
    pub fn begin(&self, id: &str) {
        self.show(|s| s.at_work.push(id.to_owned()));
    }

    /// A case of that weight has ended; `line` says how.
    pub fn end(&self, id: &str, weight: u64, line: &str) {
        self.bar.suspend(|| {
            let _ = writeln!(std::io::stderr(), "{line}");
        });
        self.bar.inc(weight);
        self.show(|s| {
            s.done += 1;
            s.at_work.retain(|other| other != id);
        });
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Shows how much lies in a directory while `work` fills it: pip tells nothing of a download that a program could read.
pub fn while_filling<T>(dir: &Path, title: &str, work: impl FnOnce() -> T) -> T {
    if !is_terminal() {
        return work();
    }
    let bar = styled(drawn(None), "{spinner} {msg} {bytes}  {bytes_per_sec}  {elapsed}");
    bar.set_message(title.to_owned());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                bar.set_position(size_of(dir));
                std::thread::sleep(TICK / 2);
            }
        });
        let result = work();
        done.store(true, Ordering::Relaxed);
        bar.finish_and_clear();
        result
    })
}

fn size_of(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|e| match e.metadata() {
            Ok(m) if m.is_dir() => size_of(&e.path()),
            Ok(m) => m.len(),
            Err(_) => 0,
        })
        .sum()
}

/// On Ctrl-C (and SIGTERM): clears the line a bar may stand on, removes `dirs`, and then ends as the signal does by itself.
/// Servers end with the harness in any case.
pub fn leave_cleanly(dirs: impl Fn() -> Vec<PathBuf> + Send + 'static) {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let Ok((mut ours, handlers)) = UnixStream::pair() else { return };
    let register = |signal| -> std::io::Result<()> {
        signal_hook::low_level::pipe::register(signal, handlers.try_clone()?).map(|_| ())
    };
    // What tells one from the other: a flag per signal, set before the wake-up.
    let interrupted = std::sync::Arc::new(AtomicBool::new(false));
    let _ = signal_hook::flag::register(SIGINT, interrupted.clone());
    if register(SIGINT).and_then(|()| register(SIGTERM)).is_err() {
        return;
    }
    let _ = std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        let _keep = handlers;
        if ours.read(&mut [0]).is_ok() {
            clear_bars();
            if is_terminal() {
                let _ = std::io::stderr().write_all(b"\r\x1b[K");
            }
            for dir in dirs() {
                let _ = std::fs::remove_dir_all(dir);
            }
            let signal = if interrupted.load(Ordering::SeqCst) { SIGINT } else { SIGTERM };
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_measured_with_what_lies_in_them() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("a")).unwrap();
        std::fs::write(dir.path().join("a/b"), [0; 100]).unwrap();
        std::fs::write(dir.path().join("c"), [0; 11]).unwrap();
        assert_eq!(size_of(dir.path()), 111);
        assert_eq!(size_of(&dir.path().join("none")), 0);
    }
}
