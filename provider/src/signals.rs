//! Everything that may stop a run: signals, the parent's death, the deadline.
//!
//! All of them set one flag that the computation polls. A thread stands by for the cases in which nobody polls - a read
//! from a pipe that nobody writes to, a file system that hangs - and ends the process after a grace period, unless the
//! output is just being given its name.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::exit::{Error, Kind};
use crate::state_version::directory_of;

/// How long a stopped run may take to notice.
const GRACE: Duration = Duration::from_secs(5);
/// How often the parent is looked at, for the case that its death was announced before we could hear it.
const TICK: Duration = Duration::from_millis(250);

/// Why a run stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// SIGTERM.
    Terminated,
    /// SIGINT.
    Interrupted,
    /// SIGHUP.
    HangUp,
    /// Whoever started us is gone: nobody would use the output.
    ParentGone,
    /// `--deadline`.
    Deadline,
}

impl Reason {
    const ALL: [Reason; 5] =
        [Reason::Terminated, Reason::Interrupted, Reason::HangUp, Reason::ParentGone, Reason::Deadline];

    fn number(self) -> usize {
        1 + Reason::ALL.iter().position(|&r| r == self).unwrap_or(0)
    }

    /// As an error, with the exit status that goes with it.
    pub fn error(self) -> Error {
        match self {
            Reason::Terminated => Error::new(Kind::Terminated, "cancelled by SIGTERM; no output was left behind"),
            Reason::Interrupted => Error::new(Kind::Interrupted, "cancelled by SIGINT; no output was left behind"),
            Reason::HangUp => Error::new(Kind::HangUp, "cancelled by SIGHUP; no output was left behind"),
            Reason::ParentGone => Error::new(Kind::Terminated, "cancelled: the process that started this one is gone"),
            Reason::Deadline => {
                Error::new(Kind::Busy, "not done when --deadline was reached; no output was left behind")
            }
        }
    }
}

#[derive(Default)]
struct Shared {
    /// 0, or the number of a reason. Signal handlers write it.
    stop: Arc<AtomicUsize>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    committing: bool,
    deadline: Option<Instant>,
    /// The output, whose temporary names are removed before the process is ended by force.
    out: Option<PathBuf>,
}

/// The flag, and the thread that stands by. Cheap to clone.
#[derive(Clone)]
pub struct Watch {
    shared: Arc<Shared>,
    wake: Arc<UnixStream>,
}

impl Watch {
    /// Starts watching. Called once, before anything that could be worth stopping.
    pub fn start() -> io::Result<Watch> {
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
        let parent = getppid();
        let shared = Arc::new(Shared::default());
        let (ours, handlers) = UnixStream::pair()?;
        for (signal, reason) in [(SIGTERM, Reason::Terminated), (SIGINT, Reason::Interrupted), (SIGHUP, Reason::HangUp)]
        {
            // nohup and background jobs of plain shells start us with a signal ignored, and mean it.
            if signal != SIGTERM && ignored_at_start(signal) {
                continue;
            }
            // The actions of one signal run in the order of registration: first the flag, then the wake-up.
            signal_hook::flag::register_usize(signal, shared.stop.clone(), reason.number())?;
            signal_hook::low_level::pipe::register(signal, handlers.try_clone()?)?;
        }
        // The kernel announces the death of the *thread* that started us, too, while the parent itself lives on. So the
        // announcement is a signal that means nothing else, and it only makes the thread look at who the parent is.
        signal_hook::low_level::pipe::register(SIGUSR1, handlers.try_clone()?)?;
        // Over the limit on file sizes a write is to fail, not to kill us.
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        // Where prctl is forbidden, looking at the parent now and then has to do.
        let _ = set_parent_process_death_signal(Some(Signal::USR1));
        let watch = Watch { shared: shared.clone(), wake: Arc::new(handlers) };
        std::thread::Builder::new().name("watch".to_owned()).spawn(move || stand_by(&shared, &ours, parent))?;
        Ok(watch)
    }

    /// Stops the run at this time.
    pub fn set_deadline(&self, at: Instant) {
        lock(&self.shared.state).deadline = Some(at);
        let _ = io::Write::write(&mut &*self.wake, &[0]);
    }

    /// What is to be cleaned up when the process has to be ended by force.
    pub fn set_output(&self, out: &Path) {
        lock(&self.shared.state).out = Some(out.to_owned());
    }

    /// Why the run should stop, if it should.
    pub fn stopped(&self) -> Option<Reason> {
        let n = self.shared.stop.load(Ordering::Relaxed);
        n.checked_sub(1).and_then(|i| Reason::ALL.get(i).copied())
    }

    /// As [`Watch::stopped`], as a result.
    pub fn check(&self) -> Result<(), Error> {
        self.stopped().map_or(Ok(()), |reason| Err(reason.error()))
    }

    /// From here on the process is not ended by force. An error when the run was stopped before.
    pub fn begin_commit(&self) -> Result<(), Error> {
        let mut state = lock(&self.shared.state);
        self.check()?;
        state.committing = true;
        Ok(())
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the process was started with this signal ignored.
fn ignored_at_start(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).unwrap_or_default();
    u64::from_str_radix(mask.trim(), 16).unwrap_or(0) >> (signal - 1) & 1 == 1
}

fn stand_by(shared: &Shared, wake: &UnixStream, parent: Option<Pid>) {
    let mut force_at = None;
    loop {
        let now = Instant::now();
        let deadline = lock(&shared.state).deadline;
        let late = deadline.is_some_and(|at| now >= at);
        if getppid() != parent {
            request(&shared.stop, Reason::ParentGone);
        } else if late {
            request(&shared.stop, Reason::Deadline);
        }
        if shared.stop.load(Ordering::SeqCst) != 0 && now >= *force_at.get_or_insert(now + GRACE) {
            end_by_force(shared);
            force_at = Some(now + GRACE);
        }
        let next = [Some(now + TICK), force_at, deadline.filter(|_| !late)].into_iter().flatten().min().unwrap_or(now);
        let wait = next.saturating_duration_since(now) + Duration::from_millis(1);
        let timeout = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
        let mut fds = [PollFd::new(wake, PollFlags::IN)];
        if matches!(poll(&mut fds, Some(&timeout)), Ok(1)) {
            let _ = io::Read::read(&mut &*wake, &mut [0; 64]);
        }
    }
}

/// The first reason stays, unless a signal brings another.
fn request(stop: &AtomicUsize, reason: Reason) {
    let _ = stop.compare_exchange(0, reason.number(), Ordering::SeqCst, Ordering::SeqCst);
}

/// Returns when the output is being published: that ends by itself.
fn end_by_force(shared: &Shared) {
    // Held to the end: nobody begins a commit any more.
    let state = lock(&shared.state);
    if state.committing {
        return;
    }
    let n = shared.stop.load(Ordering::SeqCst);
    let error = Reason::ALL.get(n.wrapping_sub(1)).copied().unwrap_or(Reason::Terminated).error();
    if let Some(out) = &state.out {
        remove_temporaries(out);
    }
    crate::say::say(&error);
    std::process::exit(error.kind.code().into());
}

/// Removes temporary names that this process has given to its output, by their form `.NAME.<pid>[-<k>].npu-prefill-tmp`.
fn remove_temporaries(out: &Path) {
    let pid = std::process::id().to_string();
    for entry in std::fs::read_dir(directory_of(out)).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let whose =
            name.strip_prefix('.').and_then(|n| n.strip_suffix(".npu-prefill-tmp")).and_then(|n| n.rsplit('.').next());
        if whose.and_then(|w| w.split('-').next()) == Some(&pid) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_go_both_ways() {
        for r in Reason::ALL {
            assert_eq!(Reason::ALL[r.number() - 1], r);
        }
    }

    #[test]
    fn the_first_reason_stays() {
        let stop = AtomicUsize::new(0);
        request(&stop, Reason::Deadline);
        request(&stop, Reason::ParentGone);
        assert_eq!(stop.into_inner(), Reason::Deadline.number());
    }

    #[test]
    fn nothing_is_committed_after_a_stop() {
        let (a, _b) = UnixStream::pair().unwrap();
        let watch = Watch { shared: Arc::default(), wake: Arc::new(a) };
        assert!(watch.begin_commit().is_ok());
        request(&watch.shared.stop, Reason::Terminated);
        assert_eq!(watch.begin_commit().unwrap_err().kind, Kind::Terminated);
    }

    #[test]
    fn only_our_own_temporaries_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let pid = std::process::id();
        let ours = [format!(".x.bin.{pid}.npu-prefill-tmp"), format!(".x.bin.{pid}-2.npu-prefill-tmp")];
        let others = [
            format!(".x.bin.{pid}1.npu-prefill-tmp"),
            format!(".x.bin.1{pid}.npu-prefill-tmp"),
            "x.bin".to_owned(),
            format!(".x.bin.{pid}.other-tmp"),
        ];
        for name in others.iter().chain(&ours) {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        remove_temporaries(&dir.path().join("x.bin"));
        assert!(ours.iter().all(|name| !dir.path().join(name).exists()));
        assert!(others.iter().all(|name| dir.path().join(name).exists()));
    }
}
