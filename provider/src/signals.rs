//! Everything that may stop a run: signals, the parent's death, the deadline.
//!
//! All of them set one flag that the computation polls. A thread stands by for the cases in which nobody polls - a read
//! from a pipe that nobody writes to, a file system that hangs - and ends the process after a grace period, unless the
//! output is just being given its name.
//!
//! Whoever writes into the decoder's memory asks before every burst of bytes ([`Watch::may_write`]), and does not depend on that
//! thread having woken up: of a process that was stopped and goes on, every thread may be the first.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::exit::{Error, Kind, is_tainted};
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
        let (kind, text) = match self {
            Reason::Terminated => (Kind::Terminated, "cancelled by SIGTERM"),
            Reason::Interrupted => (Kind::Interrupted, "cancelled by SIGINT"),
            Reason::HangUp => (Kind::HangUp, "cancelled by SIGHUP"),
            Reason::ParentGone => (Kind::Terminated, "cancelled: the process that started this one is gone"),
            Reason::Deadline => (Kind::Busy, "not done when --deadline was reached"),
        };
        // Of what was written into the decoder's memory, the end of the process tells.
        let left = if is_tainted() { "" } else { "; no output was left behind" };
        Error::new(kind, format!("{text}{left}"))
    }
}

#[derive(Default)]
struct Shared {
    /// 0, or the number of a reason. Signal handlers write it.
    stop: Arc<AtomicUsize>,
    /// The parent may be gone: look. A signal handler sets it.
    orphaned: Arc<AtomicBool>,
    /// Who it was at the start.
    parent: Option<Pid>,
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
        let shared = Arc::new(Shared { parent: getppid(), ..Shared::default() });
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
        // announcement is a signal that means nothing else, and it only makes us look at who the parent is.
        signal_hook::flag::register(SIGUSR1, shared.orphaned.clone())?;
        signal_hook::low_level::pipe::register(SIGUSR1, handlers.try_clone()?)?;
        // Over the limit on file sizes a write is to fail, not to kill us.
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        // Where prctl is forbidden, looking at the parent now and then has to do.
        let _ = set_parent_process_death_signal(Some(Signal::USR1));
        let watch = Watch { shared: shared.clone(), wake: Arc::new(handlers) };
        std::thread::Builder::new().name("watch".to_owned()).spawn(move || stand_by(&shared, &ours))?;
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

    /// Whether bytes may still go into the decoder's memory. Cheap: asked before every burst of them. The deadline is left to
    /// whoever asks, since it takes a look at the clock.
    pub fn may_write(&self) -> bool {
        let orphaned = &self.shared.orphaned;
        let gone = || getppid() != self.shared.parent;
        // The hint stands until somebody has looked, so that no other thread passes by meanwhile, and goes before a second look,
        // so that none that comes then is lost.
        if orphaned.load(Ordering::SeqCst) && (gone() || (orphaned.swap(false, Ordering::SeqCst) && gone())) {
            request(&self.shared.stop, Reason::ParentGone);
        }
        self.stopped().is_none()
    }

    /// Why the run should stop, with a look at everything there is instead of trust in the thread that stands by.
    pub fn look(&self) -> Option<Reason> {
        look(&self.shared, Instant::now());
        self.stopped()
    }

    /// Makes deaths that nothing can be done about have the exit status of a tainted memory once `writing` is set: memory that
    /// is taken away under a mapping, and an abort.
    pub fn cover(&self, writing: &Arc<AtomicBool>) -> io::Result<()> {
        use signal_hook::consts::{SIGABRT, SIGBUS};
        for signal in [SIGBUS, SIGABRT] {
            let status = Kind::Tainted.code().into();
            signal_hook::flag::register_conditional_shutdown(signal, status, writing.clone())?;
        }
        // Otherwise it is what it always was. Of an abort the system itself sees to that.
        signal_hook::flag::register_conditional_default(SIGBUS, Arc::new(AtomicBool::new(true)))?;
        Ok(())
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

/// Looks at the parent and the clock. The deadline, if it is still to come.
fn look(shared: &Shared, now: Instant) -> Option<Instant> {
    let deadline = lock(&shared.state).deadline;
    let late = deadline.is_some_and(|at| now >= at);
    if getppid() != shared.parent {
        request(&shared.stop, Reason::ParentGone);
    } else if late {
        request(&shared.stop, Reason::Deadline);
    }
    deadline.filter(|_| !late)
}

fn stand_by(shared: &Shared, wake: &UnixStream) {
    let mut force_at = None;
    loop {
        let now = Instant::now();
        let deadline = look(shared, now);
        if shared.stop.load(Ordering::SeqCst) != 0 && now >= *force_at.get_or_insert(now + GRACE) {
            end_by_force(shared);
            force_at = Some(now + GRACE);
        }
        let next = [Some(now + TICK), force_at, deadline].into_iter().flatten().min().unwrap_or(now);
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
    let error = Reason::ALL.get(n.wrapping_sub(1)).copied().unwrap_or(Reason::Terminated).error().at_the_end();
    if let Some(out) = &state.out {
        remove_temporaries(out);
    }
    crate::say::complain(&error);
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

    use crate::exit::tests::{in_a_process_of_its_own, taint};

    #[test]
    #[ignore = "ends its process; run by another"]
    fn forced_after_writing() {
        let watch = Watch::start().unwrap();
        taint();
        request(&watch.shared.stop, Reason::Terminated);
        end_by_force(&watch.shared);
    }

    #[test]
    #[ignore = "ends its process; run by another"]
    fn aborted_after_writing() {
        let writing = Arc::new(AtomicBool::new(false));
        Watch::start().unwrap().cover(&writing).unwrap();
        writing.store(true, Ordering::SeqCst);
        std::process::abort();
    }

    #[test]
    #[ignore = "ends its process; run by another"]
    fn aborted_before_writing() {
        Watch::start().unwrap().cover(&Arc::default()).unwrap();
        std::process::abort();
    }

    #[test]
    fn ends_by_force_and_deaths_are_tainted_after_the_first_byte() {
        let (code, said) = in_a_process_of_its_own("signals::tests::forced_after_writing");
        let want = "stopped after writing into the decoder's memory, which must not be adopted: cancelled by SIGTERM\n";
        assert!(code == Some(79) && said.ends_with(want), "{code:?} {said}");
        assert_eq!(in_a_process_of_its_own("signals::tests::aborted_after_writing").0, Some(79));
        assert_eq!(in_a_process_of_its_own("signals::tests::aborted_before_writing").0, None);
    }

    #[test]
    fn writing_ends_with_any_reason() {
        let (a, _b) = UnixStream::pair().unwrap();
        let shared = Arc::new(Shared { parent: getppid(), ..Shared::default() });
        let watch = Watch { shared, wake: Arc::new(a) };
        assert!(watch.may_write() && watch.look().is_none());
        // A mere hint that the parent may be gone is looked into.
        watch.shared.orphaned.store(true, Ordering::SeqCst);
        assert!(watch.may_write() && !watch.shared.orphaned.load(Ordering::SeqCst));
        watch.set_deadline(Instant::now());
        assert_eq!(watch.look(), Some(Reason::Deadline));
        assert!(!watch.may_write());

        let (a, _b) = UnixStream::pair().unwrap();
        let orphan = Watch { shared: Arc::default(), wake: Arc::new(a) };
        assert!(orphan.may_write());
        orphan.shared.orphaned.store(true, Ordering::SeqCst);
        assert!(!orphan.may_write());
        assert_eq!(orphan.stopped(), Some(Reason::ParentGone));
    }
}
