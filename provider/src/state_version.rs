//! Which version of the state file to write.
//!
//! A server reads exactly one version and nothing about a model tells which, so it is never guessed from one. `auto` looks
//! for evidence: a state file in the output's directory, which is where the running server saves its own; then the
//! version that a probe wrote into the configuration. Only then does it assume one, and says so.
//!
//! Files of our own are no evidence when their version was itself found by `auto`: a wrong first guess would confirm itself
//! for ever. Such files carry an extended attribute and are passed over. Where the file system keeps no attributes they
//! count like any other, and the newest file of the server still wins once there is one.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use kvlayout::StateVersion;
use rustix::fs::{OFlags, XattrFlags, lgetxattr, lsetxattr};

use crate::cli::VersionChoice;
use crate::config::Config;
use crate::exit::{Error, Kind, Result};

/// What is assumed when nothing is known: the version of most builds in use.
const ASSUMED: StateVersion = StateVersion::V3;
/// On files whose version was not the user's word.
const MARK: &str = "user.npu-prefill.version-from";

/// The version, and how it was come by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The version.
    pub version: StateVersion,
    /// For people.
    pub why: String,
    /// Whether the user named it.
    pub told: bool,
}

/// Decides. `by` names the option or variable that `choice` comes from.
///
/// # Errors
/// When the newest state file there has a version that cannot be written here.
pub fn choose(choice: VersionChoice, by: &str, out: &Path, config: &Config) -> Result<Chosen> {
    if let VersionChoice::Exactly(version) = choice {
        return Ok(Chosen { version, why: by.to_owned(), told: true });
    }
    let chosen = |version, why| Ok(Chosen { version, why, told: false });
    if let Some((path, number)) = newest(directory_of(out)) {
        let version = StateVersion::try_from(number).map_err(|e| {
            let advice = "if the decoder reads another version, say which with --state-version";
            Error::new(
                Kind::Refused,
                format!("the newest state file beside the output, {}: {e}; {advice}", path.display()),
            )
        })?;
        return chosen(version, format!("that of the newest state file beside the output, {}", path.display()));
    }
    if let (Some(version), Some(path)) = (config.state_version, &config.path) {
        return chosen(version, format!("state_version in {}", path.display()));
    }
    chosen(ASSUMED, "assumed: no --state-version, no state file beside the output, no configured version".to_owned())
}

/// Marks a finished file as no evidence, unless the user named its version. Best effort.
pub fn mark(out: &Path, chosen: &Chosen) {
    if !chosen.told {
        let _ = lsetxattr(out, MARK, b"auto", XattrFlags::empty());
    }
}

/// The directory that holds a path's last component.
pub fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The newest state file in a directory, with the version it states.
fn newest(dir: &Path) -> Option<(PathBuf, u32)> {
    let mut files: Vec<(SystemTime, PathBuf)> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|e| e.file_type().is_ok_and(|t| t.is_file()) && !is_temporary(e.file_name().as_encoded_bytes()))
        .filter_map(|e| Some((e.metadata().ok()?.modified().ok()?, e.path())))
        .collect();
    files.sort_by(|a, b| b.cmp(a));
    files.into_iter().find_map(|(_, path)| stated_version(&path).map(|version| (path, version)))
}

fn is_temporary(name: &[u8]) -> bool {
    name.starts_with(b".") && name.ends_with(b"npu-prefill-tmp")
}

/// The version word, of a state file that counts.
fn stated_version(path: &Path) -> Option<u32> {
    // Never waits for a writer, never follows a link that took the file's place.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let mut file = File::options().read(true).custom_flags(flags).open(path).ok()?;
    let mut head = [0; 8];
    file.read_exact(&mut head).ok()?;
    let (magic, version) = head.split_at(4);
    let marked = || lgetxattr(path, MARK, &mut [0u8; 16]).is_ok();
    (magic == b"qsgg" && !marked()).then(|| u32::from_le_bytes(version.try_into().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn put(dir: &Path, name: &str, version: u32, age: u64) -> PathBuf {
        let path = dir.join(name);
        let mut bytes = b"qsgg".to_vec();
        bytes.extend(version.to_le_bytes());
        bytes.extend([0; 12]);
        std::fs::write(&path, bytes).unwrap();
        let time = SystemTime::now() - Duration::from_secs(age);
        File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        path
    }

    fn auto(dir: &Path, config: &Config) -> Chosen {
        choose(VersionChoice::Auto, "", &dir.join("out.bin"), config).unwrap()
    }

    #[test]
    fn told_then_newest_then_configured_then_assumed() {
        let dir = tempfile::tempdir().unwrap();
        let config =
            Config { path: Some("/c.toml".into()), state_version: Some(StateVersion::V2), ..Config::default() };
        let c = auto(dir.path(), &Config::default());
        assert!(c.version == StateVersion::V3 && c.why.starts_with("assumed") && !c.told);
        let c = auto(dir.path(), &config);
        assert!(c.version == StateVersion::V2 && c.why.contains("/c.toml"));
        put(dir.path(), "old.bin", 3, 100);
        put(dir.path(), "new.bin", 4, 10);
        let c = auto(dir.path(), &config);
        assert!(c.version == StateVersion::V4 && c.why.contains("new.bin"));
        let c = choose(VersionChoice::Exactly(StateVersion::V2), "--state-version", &dir.path().join("o"), &config)
            .unwrap();
        assert_eq!(c, Chosen { version: StateVersion::V2, why: "--state-version".into(), told: true });
    }

    #[test]
    fn what_is_not_a_state_file_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "a.bin", 2, 100);
        std::fs::write(dir.path().join("ids.txt"), "1 2 3").unwrap();
        std::fs::write(dir.path().join("short"), "qsgg").unwrap();
        put(dir.path(), ".o.bin.12.npu-prefill-tmp", 4, 0);
        std::fs::create_dir(dir.path().join("d")).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(put(elsewhere.path(), "x", 4, 0), dir.path().join("link")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, dir.path().join("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .unwrap();
        assert_eq!(auto(dir.path(), &Config::default()).version, StateVersion::V2);
    }

    #[test]
    fn own_guesses_are_no_evidence() {
        let dir = tempfile::tempdir().unwrap();
        let guess = auto(dir.path(), &Config::default());
        let path = put(dir.path(), "guessed.bin", 3, 0);
        mark(&path, &guess);
        if lgetxattr(&path, MARK, &mut [0u8; 16]).is_err() {
            return; // no extended attributes here
        }
        let config = Config { path: Some("/c".into()), state_version: Some(StateVersion::V4), ..Config::default() };
        assert_eq!(auto(dir.path(), &config).version, StateVersion::V4);
        // A file whose version the user named is.
        let told = Chosen { version: StateVersion::V2, why: String::new(), told: true };
        mark(&put(dir.path(), "told.bin", 2, 0), &told);
        assert_eq!(auto(dir.path(), &config).version, StateVersion::V2);
    }

    #[test]
    fn a_version_of_the_future_is_not_written_over_with_a_guess() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), "a.bin", 5, 0);
        let e = choose(VersionChoice::Auto, "", &dir.path().join("o"), &Config::default()).unwrap_err();
        assert_eq!(e.kind, Kind::Refused);
        assert!(e.to_string().contains("a.bin") && e.to_string().contains("--state-version"), "{e}");
    }
}
