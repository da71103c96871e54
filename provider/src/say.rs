//! Lines on stderr. Nothing here can fail: a closed or full stderr must not change what the program does.

use std::fmt;
use std::io::{IsTerminal, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::env;

/// How long a line may wait for a reader who has let the pipe run full.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whether a bar stands on the terminal's last line.
static BAR: AtomicBool = AtomicBool::new(false);

/// Says that a bar is shown, or not any more: lines then begin by clearing it.
pub fn bar_is_shown(shown: bool) {
    BAR.store(shown, Ordering::SeqCst);
}

/// One line, prefixed with the program's name.
pub fn say(line: impl fmt::Display) {
    say_in("1", line);
}

/// The line that says why the program ends without success.
pub fn complain(line: impl fmt::Display) {
    say_in("1;31", line);
}

/// The same, the name in a style on terminals.
fn say_in(style: &str, line: impl fmt::Display) {
    let clear = if BAR.load(Ordering::SeqCst) { "\r\x1b[K" } else { "" };
    let name = match has_colours() {
        true => format!("\x1b[{style}mnpu-prefill:\x1b[0m"),
        false => "npu-prefill:".to_owned(),
    };
    // One write per line, so that lines of several processes on one stderr do not mix.
    write_if_room(std::io::stderr(), format!("{clear}{name} {line}\n").as_bytes(), PATIENCE);
}

/// Whether stderr is a terminal that wants colours.
fn has_colours() -> bool {
    is_terminal() && env::NO_COLOR.get().is_none() && env::TERM.get().is_none_or(|t| t != "dumb")
}

/// Columns of the terminal, 80 where it does not say.
pub fn columns() -> usize {
    rustix::termios::tcgetwinsize(std::io::stderr()).map(|w| w.ws_col.into()).ok().filter(|&n| n > 0).unwrap_or(80)
}

/// Text for a person who asked for nothing, as it is.
pub fn say_plain(text: &str) {
    write_if_room(std::io::stderr(), text.as_bytes(), PATIENCE);
}

/// A line that is of use only now: it is left out when there is no room for it.
pub fn say_if_room(line: impl fmt::Display) {
    write_if_room(std::io::stderr(), format!("npu-prefill: {line}\n").as_bytes(), Duration::ZERO);
}

/// The line on stdout that says what was done.
pub fn report(line: &str) {
    write_if_room(std::io::stdout(), format!("{line}\n").as_bytes(), 5 * PATIENCE);
}

/// Writes when that does not block: a caller who reads a pipe only after we have ended must not be able to stop us with our
/// own chatter.
fn write_if_room(mut to: impl Write + AsFd, bytes: &[u8], patience: Duration) {
    let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
    let room = {
        let mut fds = [PollFd::new(&to, PollFlags::OUT)];
        // Regular files and closed pipes are always ready. Where polling itself fails, writing tells.
        !matches!(poll(&mut fds, Some(&timeout)), Ok(0))
    };
    if room {
        let _ = to.write_all(bytes).and_then(|()| to.flush());
    }
}

/// Whether a person is looking.
pub fn is_terminal() -> bool {
    std::io::stderr().as_fd().is_terminal()
}

/// Text or JSON for stdout. A reader that went away is not an error of ours.
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Bytes as people read them.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

struct Logger;

impl log::Log for Logger {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }
    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            say(format_args!("{}: {}", record.level().as_str().to_ascii_lowercase(), record.args()));
        }
    }
    fn flush(&self) {}
}

/// Sends what libraries log to stderr.
pub fn start_log(level: log::LevelFilter) {
    if log::set_logger(&Logger).is_ok() {
        log::set_max_level(level);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn sizes() {
        assert_eq!(super::bytes(0), "0 B");
        assert_eq!(super::bytes(1023), "1023 B");
        assert_eq!(super::bytes(1024), "1.0 KiB");
        assert_eq!(super::bytes((1 << 20) - 1), "1.0 MiB");
        assert_eq!(super::bytes(46_112_772), "44.0 MiB");
        assert_eq!(super::bytes(u64::MAX), "16777216.0 TiB");
    }
}
