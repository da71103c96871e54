//! What a figure was measured on and beside what: the processor, the date, and how much of it other work took meanwhile.
//!
//! Not a profiler: the kernel counts in ticks, usually of 10 ms, so a share over less than a second is coarse. It is enough to
//! tell a quiet run from a disturbed one.

use std::fs;
use std::ops::AddAssign;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use conformance::report;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Below this share of the machine's CPU time, other work is taken for none.
pub const QUIET: f64 = 0.02;

/// The processor's name, as far as the system tells.
pub fn cpu() -> String {
    report::machine()["cpu"].as_str().unwrap_or_default().to_owned()
}

/// How many CPUs this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A line that says what the figures under it were measured on.
pub fn description() -> String {
    let kernel = report::machine()["kernel"].as_str().unwrap_or_default().to_owned();
    format!("{}, {} CPUs, Linux {kernel}, {}", cpu(), cores(), now())
}

/// Date and time in UTC, to the second.
pub fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    date(since.as_secs())
}

/// The same of a number of seconds since 1970. Years begin with March here, so that a leap day is the last of its year;
/// 400 such years have 146,097 days.
fn date(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days since the 1st of March of the year 0.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3_600, rest / 60 % 60, rest % 60)
}

/// Ticks within which two counters may disagree by their rounding alone.
const SLACK: i64 = 2;

/// CPU time that others took, out of all there was, over one or more spans of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Below 0 where rounding has taken more than there was; over several spans that evens out.
    others: i64,
    all: u64,
}

impl Load {
    /// The others' share; `None` where the system does not tell, or the span was shorter than its clock.
    pub fn share(&self) -> Option<f64> {
        (self.all > 0).then(|| self.others.max(0) as f64 / self.all as f64)
    }

    /// Whether there was next to nothing else, or less than the clock can tell; `None` where that is not known.
    pub fn quiet(&self) -> Option<bool> {
        self.share().map(|s| s < QUIET || self.others <= SLACK)
    }
}

impl AddAssign for Load {
    fn add_assign(&mut self, more: Load) {
        self.others += more.others;
        self.all += more.all;
    }
}

/// The system's counters at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticks {
    busy: u64,
    all: u64,
    /// This process and its children that have ended and were waited for.
    own: u64,
}

impl Ticks {
    fn now() -> Option<Ticks> {
        let (busy, all) = machine_ticks(&fs::read_to_string("/proc/stat").ok()?)?;
        let own = own_ticks(&fs::read_to_string("/proc/self/stat").ok()?)?;
        Some(Ticks { busy, all, own })
    }

    fn until(self, end: Ticks) -> Load {
        let ticks = |from: u64, to: u64| to.saturating_sub(from).min(i64::MAX as u64) as i64;
        // The two counters are not read at one moment and are rounded differently, so this can be less than nothing.
        let others = ticks(self.busy, end.busy) - ticks(self.own, end.own);
        Load { others, all: end.all.saturating_sub(self.all) }
    }
}

/// Busy and all ticks of `/proc/stat`. Time stolen by the host of a virtual machine is busy: somebody else had it.
fn machine_ticks(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().find_map(|l| l.strip_prefix("cpu "))?;
    let fields: Vec<u64> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
    // user nice system idle iowait irq softirq steal; guests, which follow, are part of user and nice.
    let at = |i: usize| fields.get(i).copied().unwrap_or(0);
    let busy = at(0) + at(1) + at(2) + at(5) + at(6) + at(7);
    (fields.len() >= 4).then(|| (busy, busy + at(3) + at(4)))
}

/// The ticks of a process and of its children, from its `stat`.
fn own_ticks(stat: &str) -> Option<u64> {
    // The program's name, in parentheses, may hold anything; the numbers begin after the last one.
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    // utime, stime, cutime, cstime: fields 14 to 17 of the whole line, of which the first two are cut off.
    let times: Vec<u64> = fields.get(11..15)?.iter().map(|f| f.parse()).collect::<Result<_, _>>().ok()?;
    Some(times.iter().sum())
}

/// Watches other work from now on.
pub struct Watch(Option<Ticks>);

impl Watch {
    /// Begins.
    pub fn start() -> Watch {
        Watch(Ticks::now())
    }

    /// What others took since.
    pub fn load(&self) -> Load {
        match (self.0, Ticks::now()) {
            (Some(start), Some(end)) => start.until(end),
            _ => Load::default(),
        }
    }
}

/// Looks for a moment at what else runs. With a `patience`, looks again until it is quiet, at most that long.
pub fn settle(patience: Duration) -> Load {
    const LOOK: Duration = Duration::from_millis(500);
    let began = Instant::now();
    loop {
        let watch = Watch::start();
        std::thread::sleep(LOOK);
        let load = watch.load();
        if load.quiet() != Some(false) || began.elapsed() >= patience {
            return load;
        }
    }
}

/// The CPUs that this thread may use, in ascending order.
///
/// # Errors
/// The system does not say.
pub fn allowed() -> Result<Vec<usize>> {
    let set = sched_getaffinity(None).context("asking which CPUs this process may use")?;
    Ok((0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect())
}

/// Keeps this thread, and what it starts, to these CPUs.
///
/// # Errors
/// The system refuses.
pub fn pin(cores: &[usize]) -> Result<()> {
    ensure!(!cores.is_empty() && cores.iter().all(|&c| c < CpuSet::MAX_CPU), "no CPUs to keep to: {cores:?}");
    let mut set = CpuSet::new();
    cores.iter().for_each(|&core| set.set(core));
    sched_setaffinity(None, &set).with_context(|| format!("keeping to the CPUs {cores:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(date(0), "1970-01-01T00:00:00Z");
        assert_eq!(date(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(date(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(date(1_709_251_200), "2024-03-01T00:00:00Z");
        assert_eq!(date(4_102_444_799), "2099-12-31T23:59:59Z");
        assert!(now().ends_with('Z'));
    }

    #[test]
    fn counters_are_read() {
        let stat = "cpu  100 20 30 1000 50 4 3 2 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        assert_eq!(machine_ticks(stat), Some((159, 1209)));
        assert_eq!(machine_ticks("cpu  100 20 30 1000\n"), Some((150, 1150)));
        assert_eq!(machine_ticks("cpu  1 2 3\n"), None);
        assert_eq!(machine_ticks("intr 1\n"), None);
        let own = "17 (a (b) c) S 1 1 1 0 -1 4194304 500 0 0 0 11 22 33 44 20 0 1 0 5\n";
        assert_eq!(own_ticks(own), Some(110));
        assert_eq!(own_ticks("17 (x) S 1\n"), None);
    }

    #[test]
    fn others_are_what_is_left() {
        let start = Ticks { busy: 1000, all: 5000, own: 300 };
        let load = start.until(Ticks { busy: 1130, all: 5400, own: 410 });
        assert_eq!(load, Load { others: 20, all: 400 });
        assert_eq!(load.share(), Some(0.05));
        assert_eq!(load.quiet(), Some(false));
        // Rounding can make the own part larger than the whole.
        let less = start.until(Ticks { busy: 1010, all: 5020, own: 312 });
        assert_eq!((less, less.share(), less.quiet()), (Load { others: -2, all: 20 }, Some(0.0), Some(true)));
        // What could be rounding is not held against a run.
        assert_eq!(Load { others: 2, all: 20 }.quiet(), Some(true));
        assert_eq!(Load::default().quiet(), None);
        let mut sum = load;
        sum += Load { others: -4, all: 1200 };
        assert_eq!((sum.share(), sum.quiet()), (Some(0.01), Some(true)));
    }

    #[test]
    fn this_machine_tells() {
        assert!(Ticks::now().is_some());
        assert!(!allowed().unwrap().is_empty());
    }

    #[test]
    fn a_thread_can_be_kept_to_a_core() {
        let first = allowed().unwrap()[0];
        let seen = std::thread::spawn(move || pin(&[first]).and_then(|()| allowed())).join().unwrap().unwrap();
        assert_eq!(seen, [first]);
        assert!(pin(&[]).is_err() && pin(&[CpuSet::MAX_CPU]).is_err());
    }
}
