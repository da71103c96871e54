//! The client's side of the shared route, as `serve` plays it: it asks the decoder to share its memory, starts a provider with the
//! descriptors inherited, and has the decoder adopt what was written - or not.
//!
//! Two rules decide everything. What a provider refuses before its first byte may be tried another way; after it, memory is
//! adopted only if the provider says that the handoff is whole. And the decoder has its memory back only when the provider
//! has ended: as long as it lives it could write.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::Read as _;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::RwLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use kvlayout::Header;
use rustix::event::PollFlags;
use rustix::io::FdFlags;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::decoder::{Adopted, Peer};
use crate::wire::{self, Limits};

/// How long everything may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// The decoder, to connect and to send its message.
    pub share: Duration,
    /// The provider.
    pub provider: Duration,
    /// The provider, to end after it was asked to.
    pub grace: Duration,
    /// The kernel, to end it after that.
    pub death: Duration,
}

impl Default for Times {
    fn default() -> Times {
        Times {
            share: Duration::from_secs(10),
            provider: Duration::from_secs(900),
            grace: Duration::from_secs(2),
            death: Duration::from_secs(30),
        }
    }
}

/// Who serves, with what.
#[derive(Debug, Clone)]
pub struct Serve {
    /// The provider's program.
    pub provider: PathBuf,
    /// Options for it, besides those that a route is made of.
    pub options: Vec<OsString>,
    /// More of them on the file route, where no header tells what the decoder is like.
    pub file_options: Vec<OsString>,
    /// Where the fresh directory is made in which the socket is.
    pub root: PathBuf,
    /// How long everything may take.
    pub times: Times,
    /// What is accepted from the decoder.
    pub limits: Limits,
}

/// One prompt.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The model.
    pub model: &'a Path,
    /// Its ids without the last.
    pub tokens: &'a [i32],
}

/// What happened, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// The socket is there.
    Listening(PathBuf),
    /// Header and descriptors came.
    Received {
        /// Descriptors.
        fds: usize,
        /// The decoder's number for the share.
        share_id: u64,
    },
    /// The provider runs.
    Started {
        /// Its process.
        pid: u32,
        /// What it was told in `--fds`.
        numbers: Vec<RawFd>,
    },
    /// It was not done in time and was asked to end.
    Late,
    /// It did not, and was killed.
    Killed,
    /// It has ended.
    Ended(String),
    /// The decoder took the cells over.
    Adopted(usize),
    /// The decoder has its memory back, as it was.
    Released,
    /// The decoder has its memory back and uses it for something else.
    TakenBack,
}

/// How it ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The decoder holds the prompt.
    Adopted {
        /// What the decoder says.
        adopted: Adopted,
        /// What the provider printed, if it was JSON.
        receipt: Option<serde_json::Value>,
        /// From the start of the provider to its end.
        provider: Duration,
    },
    /// Nothing was written: the file route may be tried.
    FallBack {
        /// Why.
        why: String,
        /// The provider's exit code, if it was started.
        code: Option<i32>,
    },
    /// The decoder's memory may have been written to, and is not adopted; the decoder has to compute the prompt itself.
    Lost {
        /// Why.
        why: String,
        /// Whether the provider has ended, so that the decoder has its memory back.
        ended: bool,
    },
}

/// How the prompt reached the decoder, if it did.
#[derive(Debug, Clone, PartialEq)]
pub enum Served {
    /// By the shared route: the decoder has adopted it.
    Shared(Handoff),
    /// By the file route, after a refusal: the file is there to be restored.
    File(Handoff, FileHandoff),
    /// Not at all, by either: the request is forwarded as it came, for these reasons.
    Forwarded(Handoff, String),
}

/// What the file route gave.
#[derive(Debug, Clone, PartialEq)]
pub struct FileHandoff {
    /// What the provider printed, if it was JSON.
    pub receipt: Option<serde_json::Value>,
    /// From the start of the provider to its end.
    pub provider: Duration,
}

/// What one handoff came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Handoff {
    /// How it ended.
    pub outcome: Outcome,
    /// What happened before.
    pub steps: Vec<Step>,
}

/// What an exit code of the provider says about the decoder's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said {
    /// All rows are there.
    Whole,
    /// Nothing was written.
    Untouched,
    /// Something was, or nobody knows.
    Tainted,
}

/// Reads an exit code. What is not in the provider's table says nothing, nor does a death by a signal that it does not handle: then
/// the worst is assumed.
pub fn said(status: ExitStatus) -> Said {
    match status.code() {
        Some(0) => Said::Whole,
        Some(2 | 65 | 66 | 69 | 70 | 73 | 74 | 75 | 76 | 77 | 78 | 129 | 130 | 143) => Said::Untouched,
        _ => Said::Tainted,
    }
}

/// Held for writing while descriptors are open that any child would inherit, and for reading while other children are started.
static SPAWN: RwLock<()> = RwLock::new(());

/// Starts a child that inherits no region of a decoder, which [`Command::spawn`] alone does not promise while [`Serve`] is at work
/// in another thread.
///
/// # Errors
/// As `spawn`.
pub fn spawn(command: &mut Command) -> std::io::Result<Child> {
    let _held = SPAWN.read().unwrap_or_else(std::sync::PoisonError::into_inner);
    command.spawn()
}

/// The provider's own settings, if the user has any, are not what is tested.
pub fn without_settings(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["LLAMA_ARG_", "NPU_PREFILL_", "ONEBIT_"].iter().any(|p| text.starts_with(p)) {
            command.env_remove(&name);
        }
    }
}

impl Serve {
    /// Serves with a provider and the usual times.
    pub fn new(provider: &Path) -> Serve {
        Serve {
            provider: provider.to_owned(),
            options: Vec::new(),
            file_options: Vec::new(),
            root: std::env::temp_dir(),
            times: Times::default(),
            limits: Limits::default(),
        }
    }

    /// Hands one prompt over. `observe` sees every step as it happens.
    ///
    /// # Errors
    /// When serve itself is at fault - no directory, no socket, no way to start anything. Whatever decoder and provider do is an
    /// [`Outcome`].
    pub fn hand_over(
        &self,
        peer: &mut dyn Peer,
        request: &Request<'_>,
        observe: &mut dyn FnMut(&Step),
    ) -> Result<Handoff> {
        let mut steps = Vec::new();
        let mut step = |s: Step| {
            observe(&s);
            steps.push(s);
        };
        let place = Fresh::new(&self.root)?;
        let outcome = self.in_place(&place, peer, request, &mut step);
        // Nobody has been started when serve itself fails, so the decoder can have its memory as it is.
        if outcome.is_err() {
            peer.release();
        }
        Ok(Handoff { outcome: outcome?, steps })
    }

    /// The same, and if nothing was written the file route to `out`.
    ///
    /// # Errors
    /// As [`hand_over`](Self::hand_over).
    pub fn serve(
        &self,
        peer: &mut dyn Peer,
        request: &Request<'_>,
        out: &Path,
        observe: &mut dyn FnMut(&Step),
    ) -> Result<Served> {
        let handoff = self.hand_over(peer, request, observe)?;
        match &handoff.outcome {
            Outcome::Adopted { .. } => Ok(Served::Shared(handoff)),
            Outcome::Lost { why, .. } => {
                let why = why.clone();
                Ok(Served::Forwarded(handoff, why))
            }
            Outcome::FallBack { why, .. } => match self.file_route(request, out) {
                Ok(file) => Ok(Served::File(handoff, file)),
                Err(e) => {
                    let why = format!("{why}; by the file route: {e:#}");
                    Ok(Served::Forwarded(handoff, why))
                }
            },
        }
    }

    /// The file route alone: `out` is there afterwards.
    ///
    /// # Errors
    /// When the provider does not end well, or in time.
    pub fn file_route(&self, request: &Request<'_>, out: &Path) -> Result<FileHandoff> {
        let place = Fresh::new(&self.root)?;
        let mut command = self.command(&place, request)?;
        command.arg("--out").arg(out).args(&self.file_options);
        let began = Instant::now();
        let mut child = spawn(&mut command).with_context(|| format!("starting {}", self.provider.display()))?;
        let status = self.end_of(&mut child, began + self.times.provider, &mut |_| {})?;
        let provider = began.elapsed();
        ensure!(status.success(), "the provider ended with {status}: {}", start_of(&place.0.join(STDERR)).trim());
        ensure!(out.is_file(), "the provider said it was done, but {} is not there", out.display());
        Ok(FileHandoff { receipt: place.receipt(), provider })
    }

    /// The provider's command, as far as it is the same for both routes.
    fn command(&self, place: &Fresh, request: &Request<'_>) -> Result<Command> {
        let ids = place.0.join("ids");
        let text: String = request.tokens.iter().map(|t| format!("{t}\n")).collect();
        fs::write(&ids, text).with_context(|| format!("writing {}", ids.display()))?;
        let mut command = Command::new(&self.provider);
        command.arg("--tokens").arg(&ids).arg("--model").arg(request.model).args(&self.options);
        let create = |name: &str| {
            let path = place.0.join(name);
            File::create(&path).with_context(|| format!("creating {}", path.display()))
        };
        // Files, so that a full pipe cannot stop the provider, nor a grandchild that holds one stop us.
        command.stdin(Stdio::null()).stdout(create(STDOUT)?).stderr(create(STDERR)?);
        without_settings(&mut command);
        Ok(command)
    }

    fn in_place(
        &self,
        place: &Fresh,
        peer: &mut dyn Peer,
        request: &Request<'_>,
        step: &mut dyn FnMut(Step),
    ) -> Result<Outcome> {
        let socket = place.0.join("share");
        let listener = UnixListener::bind(&socket).with_context(|| format!("listening on {}", socket.display()))?;
        step(Step::Listening(socket.clone()));
        let shared = self.shared(&listener, &socket, peer);
        // Nobody else is to connect.
        drop(listener);
        let _ = fs::remove_file(&socket);
        let (header, share_id, fds) = match shared {
            Ok(shared) => shared,
            Err(e) => {
                peer.release();
                step(Step::Released);
                return Ok(Outcome::FallBack { why: format!("the memory was not shared: {e:#}"), code: None });
            }
        };
        step(Step::Received { fds: fds.len(), share_id });

        let header_file = place.0.join("header.json");
        fs::write(&header_file, &header).with_context(|| format!("writing {}", header_file.display()))?;
        let mut command = self.command(place, request)?;
        command.arg("--layout").arg(&header_file);

        let began = Instant::now();
        let (mut child, numbers) = match inheriting(&mut command, &fds) {
            Ok(started) => started,
            Err(e) => {
                peer.release();
                step(Step::Released);
                let why = format!("the provider {} could not be started: {e:#}", self.provider.display());
                return Ok(Outcome::FallBack { why, code: None });
            }
        };
        drop(fds);
        step(Step::Started { pid: child.id(), numbers });
        let ended = self.end_of(&mut child, began + self.times.provider, step);
        let provider = began.elapsed();
        let status = match ended {
            Ok(status) => status,
            Err(e) => return Ok(Outcome::Lost { why: format!("{e:#}; its memory is not used again"), ended: false }),
        };
        step(Step::Ended(status.to_string()));
        let stderr = start_of(&place.0.join(STDERR));
        match said(status) {
            Said::Whole => match peer.adopt(request.tokens, share_id) {
                Ok(adopted) => {
                    step(Step::Adopted(adopted.cells));
                    Ok(Outcome::Adopted { adopted, receipt: place.receipt(), provider })
                }
                Err(e) => self.lost(peer, format!("the decoder did not adopt: {e:#}"), step),
            },
            Said::Untouched => {
                peer.release();
                step(Step::Released);
                let why = format!("the provider ended with {status}: {}", stderr.trim());
                Ok(Outcome::FallBack { why, code: status.code() })
            }
            Said::Tainted => self.lost(peer, format!("the provider ended with {status}: {}", stderr.trim()), step),
        }
    }

    fn lost(&self, peer: &mut dyn Peer, why: String, step: &mut dyn FnMut(Step)) -> Result<Outcome> {
        let why = match peer.take_back() {
            Ok(()) => why,
            Err(e) => format!("{why}; and the decoder could not reuse its memory: {e:#}"),
        };
        step(Step::TakenBack);
        Ok(Outcome::Lost { why, ended: true })
    }

    /// Asks the decoder to share and takes what it sends: its header as it came, the share's number and the descriptors.
    fn shared(
        &self,
        listener: &UnixListener,
        socket: &Path,
        peer: &mut dyn Peer,
    ) -> Result<(Vec<u8>, u64, Vec<OwnedFd>)> {
        let deadline = Instant::now() + self.times.share;
        let (asked, came) = std::thread::scope(|scope| {
            // The request is answered when the message is sent, and the message is sent when somebody takes it.
            let asked = scope.spawn(|| peer.share(socket));
            let came = loop {
                // A refusal need not be waited for.
                let soon = deadline.min(Instant::now() + Duration::from_millis(20));
                match wire::wait(listener.as_fd(), PollFlags::IN, soon) {
                    Ok(false) if soon < deadline && !asked.is_finished() => continue,
                    // It may have connected, sent and finished since.
                    Ok(false) if asked.is_finished() => break wire::accept(listener, Instant::now()),
                    _ => break wire::accept(listener, deadline),
                }
            };
            let came = came.and_then(|stream| wire::receive(&stream, self.limits, deadline));
            (asked.join(), came)
        });
        let asked = asked.map_err(|_| anyhow::anyhow!("the decoder's thread panicked"))?;
        let message = match (asked, came) {
            (Ok(()), came) => came?,
            (Err(e), Ok(_)) => return Err(e.context("the decoder refused, although its message came")),
            (Err(e), Err(ours)) => bail!("the decoder refused: {e:#} ({ours:#})"),
        };
        let header = Header::parse(&message.body)?;
        let (regions, fds) = (header.regions.len(), message.fds.len());
        ensure!(regions == fds, "the decoder's header has {regions} regions, but {fds} descriptors came with it");
        let share_id =
            header.share_id.context("the decoder's header has no share_id, without which nothing can be adopted")?;
        Ok((message.body, share_id, message.fds))
    }

    /// Waits for the provider's end, and brings it about when it is late.
    ///
    /// # Errors
    /// When it cannot even be killed.
    fn end_of(&self, child: &mut Child, deadline: Instant, step: &mut dyn FnMut(Step)) -> Result<ExitStatus> {
        if let Some(status) = end_by(child, deadline)? {
            return Ok(status);
        }
        step(Step::Late);
        if let Some(pid) = Pid::from_raw(child.id() as i32) {
            let _ = kill_process(pid, Signal::TERM);
        }
        if let Some(status) = end_by(child, Instant::now() + self.times.grace)? {
            // It may have been done just now: then its work is kept.
            return Ok(status);
        }
        let _ = child.kill();
        step(Step::Killed);
        let end = end_by(child, Instant::now() + self.times.death)?;
        end.with_context(|| format!("process {} was killed, but does not end", child.id()))
    }
}

/// Starts a child with descriptors inherited under their own numbers, which are put behind `--fds`.
fn inheriting(command: &mut Command, fds: &[OwnedFd]) -> Result<(Child, Vec<RawFd>)> {
    let _held = SPAWN.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    // The copies are not closed on exec, ours are; nothing else is started until they are gone again.
    let copy = |fd: &OwnedFd| -> rustix::io::Result<OwnedFd> {
        let copy = rustix::io::fcntl_dupfd_cloexec(fd, 3)?;
        rustix::io::fcntl_setfd(&copy, FdFlags::empty())?;
        Ok(copy)
    };
    let copies: Vec<OwnedFd> = fds.iter().map(copy).collect::<Result<_, _>>().context("copying descriptors")?;
    let numbers: Vec<RawFd> = copies.iter().map(AsRawFd::as_raw_fd).collect();
    let list = numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let child = command.arg("--fds").arg(list).spawn()?;
    Ok((child, numbers))
}

/// A child's end, if it comes by then.
fn end_by(child: &mut Child, deadline: Instant) -> Result<Option<ExitStatus>> {
    if let Some(status) = child.try_wait()? {
        return Ok(Some(status));
    }
    match Pid::from_raw(child.id() as i32).map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
        Some(Ok(handle)) => {
            if wire::wait(handle.as_fd(), PollFlags::IN, deadline)? {
                return Ok(Some(child.wait()?));
            }
        }
        // Out of descriptors, or an old kernel.
        _ => {
            while Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
                if let Some(status) = child.try_wait()? {
                    return Ok(Some(status));
                }
            }
        }
    }
    Ok(child.try_wait()?)
}

/// The text of a file, as far as it is small.
fn start_of(path: &Path) -> String {
    const MOST: u64 = 64 << 10;
    let mut bytes = Vec::new();
    if let Ok(file) = File::open(path) {
        let _ = file.take(MOST).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Where a provider's output goes.
const STDOUT: &str = "stdout";
const STDERR: &str = "stderr";

/// A directory that is ours alone, gone with all that is in it when dropped.
struct Fresh(PathBuf);

impl Fresh {
    fn new(root: &Path) -> Result<Fresh> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        for _ in 0..100 {
            let name = format!("npu-prefill-serve-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            let path = root.join(name);
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Fresh(path)),
                // Left by a process of the same number: not ours to touch.
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e).with_context(|| format!("creating {}", path.display())),
            }
        }
        bail!("there is no free name for a directory in {}", root.display())
    }

    /// What a provider that ran here printed, if it was JSON.
    fn receipt(&self) -> Option<serde_json::Value> {
        serde_json::from_str(start_of(&self.0.join(STDOUT)).trim()).ok()
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
