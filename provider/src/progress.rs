//! How far a prefill is: a bar for people, a line a second for programs, which may take silence for a hang.

use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::say::{bar_is_shown, columns, is_terminal, say_if_room};
use crate::signals::Watch;

/// How often a line of progress is printed where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(1);
/// What is done sooner needs no bar.
const SHOW_AFTER: Duration = Duration::from_millis(400);
/// How often the bar's clock moves on.
const TICK: Duration = Duration::from_millis(250);

/// Progress of one run, and what may stop it.
pub struct Progress<'a> {
    watch: &'a Watch,
    n_tokens: usize,
    began: Instant,
    /// When each layer was done, from the beginning.
    layers: Vec<Duration>,
    shown: Shown,
}

enum Shown {
    /// A terminal, nothing on it so far.
    Nothing,
    Bar(ProgressBar),
    Lines {
        latest: Arc<Mutex<String>>,
        /// Ends the thread by being dropped.
        _done: mpsc::Sender<()>,
    },
}

impl<'a> Progress<'a> {
    /// Of a prompt of that many ids.
    pub fn new(watch: &'a Watch, n_tokens: usize) -> Progress<'a> {
        let shown = if is_terminal() { Shown::Nothing } else { lines(n_tokens) };
        Progress { watch, n_tokens, began: Instant::now(), layers: Vec::new(), shown }
    }

    /// How long each layer took.
    pub fn layers(&self) -> Vec<Duration> {
        let before = std::iter::once(Duration::ZERO).chain(self.layers.iter().copied());
        self.layers.iter().zip(before).map(|(&end, start)| end.saturating_sub(start)).collect()
    }
}

fn lines(n_tokens: usize) -> Shown {
    let latest = Arc::new(Mutex::new(format!("progress: 0 of {n_tokens} tokens")));
    let (done, ended) = mpsc::channel();
    let theirs = latest.clone();
    // Without the thread there is no progress to see, and nothing else is lost.
    let _ = std::thread::Builder::new().name("progress".to_owned()).spawn(move || {
        while ended.recv_timeout(LINE_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
            let line = theirs.lock().unwrap_or_else(PoisonError::into_inner).clone();
            say_if_room(line);
        }
    });
    Shown::Lines { latest, _done: done }
}

/// What fits a terminal of that many columns on one line, with room for the `^C` that a terminal shows where the cursor is: at the
/// edge it would go to the next line, and clearing would miss the bar.
fn template(columns: usize) -> String {
    match columns {
        ..=39 => "{percent:>3} %  eta {eta}".to_owned(),
        40..=79 => format!("{{bar:{}}} {{percent:>3}} %  {{rate}}  eta {{eta}}", columns - 36),
        _ => format!("{{bar:{}}} {{pos}}/{{len}} tokens  {{rate}}  {{msg}}  {{elapsed}} + {{eta}}", columns - 72),
    }
}

fn bar(n_tokens: usize, began: Instant) -> ProgressBar {
    let style = ProgressStyle::with_template(&template(columns())).unwrap_or_else(|_| ProgressStyle::default_bar());
    let style = style.with_key("rate", |state: &indicatif::ProgressState, out: &mut dyn std::fmt::Write| {
        // Over the whole run: layers differ, and an estimate that jumps about is of no use.
        let rate = state.pos() as f64 / state.elapsed().as_secs_f64().max(1e-3);
        let _ = write!(out, "{rate:.0} tokens/s");
    });
    let bar = ProgressBar::with_draw_target(Some(n_tokens as u64), ProgressDrawTarget::stderr_with_hz(10));
    let bar = bar.with_style(style.progress_chars("=> ")).with_elapsed(began.elapsed());
    bar.enable_steady_tick(TICK);
    bar_is_shown(true);
    bar
}

impl Drop for Progress<'_> {
    fn drop(&mut self) {
        if let Shown::Bar(bar) = &self.shown {
            bar.finish_and_clear();
            bar_is_shown(false);
        }
    }
}

impl prefill::Hooks for Progress<'_> {
    fn stop(&self) -> bool {
        self.watch.stopped().is_some()
    }

    fn progress(&mut self, layer: usize, n_layer: usize, rows: usize, n_tokens: usize) {
        // Layers are computed one after the other for all tokens; what is done is told as if it were tokens.
        let done = (layer * n_tokens + rows) / n_layer.max(1);
        if rows >= n_tokens {
            self.layers.push(self.began.elapsed());
        }
        if matches!(self.shown, Shown::Nothing) && self.began.elapsed() >= SHOW_AFTER {
            self.shown = Shown::Bar(bar(self.n_tokens, self.began));
        }
        match &self.shown {
            Shown::Nothing => {}
            Shown::Bar(bar) => {
                bar.set_position(done as u64);
                bar.set_message(format!("layer {} of {n_layer}", layer + 1));
            }
            Shown::Lines { latest, .. } => {
                let line = format!("progress: {done} of {} tokens, layer {} of {n_layer}", self.n_tokens, layer + 1);
                *latest.lock().unwrap_or_else(PoisonError::into_inner) = line;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_has_a_template_that_can_be_drawn() {
        for columns in [1, 20, 39, 40, 79, 80, 400] {
            assert!(ProgressStyle::with_template(&template(columns)).is_ok(), "{columns}");
        }
    }
}
