//! A file that appears under its name whole or not at all.
//!
//! A server that is told to restore a state cut inside its tensor data aborts, so this is not tidiness: at no moment,
//! however the process ends, may the final name stand for anything but a complete file. The bytes gather in a file
//! without a name (or, where the file system has no such files, under a temporary one), and get the name when their
//! number is right.
//!
//! It knows nothing of what the bytes mean.

use crate::ByteSpace;
use crate::space::check_inside;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, FallocateFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Resource};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Why a [`StateFile`] could not be started. Nothing has been left behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// No file can be made there: the directory is missing or may not be written, or something that is not a plain file
    /// has the name already.
    #[error("cannot create {}: {why}", path.display())]
    CannotCreate {
        /// The file asked for.
        path: PathBuf,
        /// Why, and what to do.
        why: String,
    },
    /// The place is right, but the system failed: a full disk, no descriptors left.
    #[error("{}: {doing}: {source}", path.display())]
    Io {
        /// The file asked for.
        path: PathBuf,
        /// What was being done.
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// How every temporary name ends. The whole is `.NAME.<pid>.npu-prefill-tmp`, or `.NAME.<pid>-<k>.…` for a further one
/// of the same process: hidden, recognisable, and telling whose it is.
const SUFFIX: &str = ".npu-prefill-tmp";

/// Bytes given to the system at a time, so that a signal is never far from taking effect.
const WRITE: usize = 1 << 20;

/// Bytes after which the disk is set to work, so that at the end it has little left to do.
const BEHIND: u64 = 4 << 20;

/// Held while a temporary gets its name and its lock, and during the sweep: within this process nobody sees one without
/// the other.
static NAMING: Mutex<()> = Mutex::new(());

fn naming() -> MutexGuard<'static, ()> {
    NAMING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A [`ByteSpace`] that is a file in the making. [`seal`](ByteSpace::seal) gives it its name, replacing a file that has
/// it; dropping it before leaves nothing.
///
/// Every byte must have been put exactly once: seal counts them.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
    dir: OwnedFd,
    name: OsString,
    file: Arc<OwnedFd>,
    behind: Behind,
    /// The name in `dir` that must not outlive us.
    temp: Option<OsString>,
    size: u64,
    put: u64,
}

impl StateFile {
    /// Starts a file of exactly `size` bytes that will be `path`, whose directory must exist. Disk space is reserved
    /// now, so that a full disk is noticed before the work is done. Temporaries that dead processes left in the
    /// directory are removed.
    ///
    /// The permissions are what the umask leaves of 0666, as for any file a program makes.
    pub fn create(path: &Path, size: u64) -> Result<StateFile, CreateError> {
        Self::create_in(path, size, true)
    }

    fn create_in(path: &Path, size: u64, unnamed: bool) -> Result<StateFile, CreateError> {
        let cannot = |why: String| CreateError::CannotCreate { path: path.into(), why };
        let io = |doing, e: io::Error| CreateError::Io { path: path.into(), doing, source: e };
        let name = match path.file_name() {
            // `file_name` forgives a trailing slash, which asks for a directory.
            Some(name) if !path.as_os_str().as_bytes().ends_with(b"/") => name.to_owned(),
            _ => return Err(cannot("the path has no file name".into())),
        };
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // Everything below goes through this descriptor: the directory may be renamed, and we still publish where we
        // started.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(parent, flags, Mode::empty()).map_err(|e| match e {
            Errno::NOENT => cannot(format!("the directory {} does not exist", parent.display())),
            Errno::NOTDIR => cannot(format!("{} is not a directory", parent.display())),
            Errno::ACCESS | Errno::PERM | Errno::LOOP | Errno::NAMETOOLONG => {
                cannot(format!("the directory {} cannot be opened: {}", parent.display(), io::Error::from(e)))
            }
            e => io("opening the directory", e.into()),
        })?;
        check_target(&dir, &name).map_err(|e| match e {
            Target::Taken(why) => cannot(why),
            Target::Io(e) if e == Errno::NAMETOOLONG => cannot("the file name is too long".into()),
            Target::Io(e) => io("looking at the target", e.into()),
        })?;
        sweep(&dir);

        // Past this limit the kernel does not just fail, it kills the process.
        if let Some(limit) = rustix::process::getrlimit(Resource::Fsize).current
            && size > limit
        {
            let what = format!("{size} bytes are more than the file size limit of {limit} (ulimit -f)");
            return Err(io("reserving space", io::Error::new(io::ErrorKind::FileTooLarge, what)));
        }
        let refused = |e: Errno| match e {
            Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::NOENT | Errno::NAMETOOLONG => {
                cannot(format!("no file can be made in {}: {}", parent.display(), io::Error::from(e)))
            }
            e => io("making a temporary file", e.into()),
        };
        let mut new = {
            let _naming = naming();
            let (file, temp) = match open_unnamed(&dir).filter(|_| unnamed) {
                Some(file) => (file, None),
                None => open_named(&dir, &name).map(|(file, temp)| (file, Some(temp))).map_err(refused)?,
            };
            let file = Arc::new(file);
            let new = StateFile { path: path.into(), dir, name, file, behind: Behind::default(), temp, size, put: 0 };
            // The lock says that we live, also to a process that cannot see our pid. Not every file system has locks.
            let _ = rustix::fs::flock(&new.file, FlockOperation::NonBlockingLockExclusive);
            new
        };
        new.reserve().map_err(|e| io("reserving space", e))?;
        Ok(new)
    }

    /// The file asked for.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn reserve(&mut self) -> io::Result<()> {
        if self.size == 0 {
            return Ok(());
        }
        loop {
            match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, self.size) {
                Err(Errno::INTR) => continue,
                // Some file systems cannot reserve; a full disk then shows at the first write that finds no room.
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(rustix::fs::ftruncate(&self.file, self.size)?),
                Err(e) => {
                    let e = io::Error::from(e);
                    return Err(io::Error::new(e.kind(), format!("{} bytes: {e}", self.size)));
                }
                Ok(()) => return Ok(()),
            }
        }
    }

    /// From bytes to file. Whatever fails before the name is given leaves nothing behind, by `Drop`.
    fn publish(&mut self) -> io::Result<()> {
        let step =
            |doing: &str, e: io::Error| io::Error::new(e.kind(), format!("{}: {doing}: {e}", self.path.display()));
        let len = rustix::fs::fstat(&self.file).map_err(|e| step("reading its length", e.into()))?.st_size as u64;
        if (len, self.put) != (self.size, self.size) {
            let what = format!("{} bytes of {} were written, the file has {len}: not published", self.put, self.size);
            return Err(step("checking its length", io::Error::other(what)));
        }
        let written = self.behind.end().and_then(|()| retry(|| rustix::fs::fsync(&self.file)));
        written.map_err(|e| step("writing it to disk", e.into()))?;

        let named = {
            let _naming = naming();
            match &self.temp {
                Some(_) => false,
                // Where nothing has the name yet, the last step is one step: not even a kill between two can leave a
                // temporary.
                None => match link(&self.file, &self.dir, &self.name) {
                    Ok(()) => true,
                    Err(Errno::EXIST) => {
                        let linked = first_free(&self.name, |temp| link(&self.file, &self.dir, temp));
                        self.temp = Some(linked.map_err(|e| step("naming it", e.into()))?.1);
                        false
                    }
                    Err(e) => return Err(step("naming it", e.into())),
                },
            }
        };
        if !named && let Some(temp) = &self.temp {
            // A symlink that came meanwhile would be replaced, not followed; but someone wants something else there.
            match check_target(&self.dir, &self.name) {
                Ok(()) => {}
                Err(Target::Taken(why)) => return Err(step("naming it", io::Error::other(why))),
                Err(Target::Io(e)) => return Err(step("naming it", e.into())),
            }
            let renamed = rustix::fs::renameat(&self.dir, temp, &self.dir, &self.name);
            renamed.map_err(|e| step("naming it", e.into()))?;
            self.temp = None;
        }
        match retry(|| rustix::fs::fsync(&self.dir)) {
            // Not every file system can, and then there is nothing to be done about it.
            Ok(()) | Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::ROFS) => Ok(()),
            Err(e) => {
                let _ = rustix::fs::unlinkat(&self.dir, &self.name, AtFlags::empty());
                Err(step("writing its directory to disk", e.into()))
            }
        }
    }
}

/// Has the disk write while rows are still computed: a thread that waits for it, and does nothing else. On a file system in memory
/// there is nothing to wait for.
#[derive(Default, Debug)]
struct Behind {
    /// Bytes since it was told last.
    bytes: u64,
    thread: Option<Writer>,
}

/// What tells the thread to go on, and what the system said to it.
type Writer = (SyncSender<()>, JoinHandle<Result<(), Errno>>);

impl Behind {
    fn wrote(&mut self, file: &Arc<OwnedFd>, bytes: u64) {
        self.bytes += bytes;
        if self.bytes < BEHIND {
            return;
        }
        self.bytes = 0;
        if self.thread.is_none() {
            let (tell, told) = std::sync::mpsc::sync_channel(1);
            let file = Arc::clone(file);
            let work = move || told.iter().try_for_each(|()| retry(|| rustix::fs::fdatasync(&file)));
            // Without a thread everything is left to the end.
            let Ok(thread) = std::thread::Builder::new().name("write-behind".into()).spawn(work) else { return };
            self.thread = Some((tell, thread));
        }
        // One that is at work already, or has met an error, need not be told again.
        let _ = self.thread.as_ref().map(|(tell, _)| tell.try_send(()));
    }

    /// Waits until it is done. The system tells of an error once, so that it must not get lost here.
    fn end(&mut self) -> Result<(), Errno> {
        let Some((tell, thread)) = self.thread.take() else { return Ok(()) };
        drop(tell);
        thread.join().unwrap_or(Err(Errno::IO))
    }
}

impl ByteSpace for StateFile {
    const LIVE: bool = false;

    fn size(&self) -> u64 {
        self.size
    }

    fn put(&mut self, mut at: u64, mut bytes: &[u8]) -> io::Result<()> {
        check_inside(self.size, at, bytes.len())?;
        while !bytes.is_empty() {
            match rustix::io::pwrite(&self.file, &bytes[..bytes.len().min(WRITE)], at) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => {
                    bytes = &bytes[n..];
                    at += n as u64;
                    self.put += n as u64;
                    self.behind.wrote(&self.file, n as u64);
                }
                Err(Errno::INTR) => {}
                Err(e) => {
                    let e = io::Error::from(e);
                    return Err(io::Error::new(
                        e.kind(),
                        format!("{}: writing at byte {at}: {e}", self.path.display()),
                    ));
                }
            }
        }
        Ok(())
    }

    fn seal(mut self) -> io::Result<()> {
        self.publish()
    }
}

impl Drop for StateFile {
    fn drop(&mut self) {
        if let Some(temp) = &self.temp {
            let _ = rustix::fs::unlinkat(&self.dir, temp, AtFlags::empty());
        }
    }
}

fn retry<T>(mut f: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match f() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

enum Target {
    /// Something is there that is not to be replaced.
    Taken(String),
    Io(Errno),
}

/// Only a plain file or nothing may have the name.
fn check_target(dir: &OwnedFd, name: &OsStr) -> Result<(), Target> {
    let kind = match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => FileType::from_raw_mode(stat.st_mode),
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => return Err(Target::Io(e)),
    };
    let what = match kind {
        FileType::RegularFile => return Ok(()),
        FileType::Symlink => "a symbolic link; name the file itself",
        FileType::Directory => "a directory",
        _ => "neither a plain file nor absent",
    };
    Err(Target::Taken(format!("it is {what}")))
}

fn proc_path(file: impl AsFd) -> String {
    format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())
}

/// A file without a name that can get one later; `None` where there is no such thing. It vanishes with the process.
fn open_unnamed(dir: &OwnedFd) -> Option<OwnedFd> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(dir, ".", flags, Mode::from_raw_mode(0o666)).ok()?;
    // Giving it a name later goes by way of /proc, which may not be mounted. Better to know now than when the work is
    // done.
    let (ours, seen) = (rustix::fs::fstat(&file).ok()?, rustix::fs::stat(proc_path(&file)).ok()?);
    ((ours.st_dev, ours.st_ino) == (seen.st_dev, seen.st_ino)).then_some(file)
}

fn link(file: &OwnedFd, dir: &OwnedFd, name: &OsStr) -> Result<(), Errno> {
    rustix::fs::linkat(CWD, proc_path(file), dir, name, AtFlags::SYMLINK_FOLLOW)
}

fn open_named(dir: &OwnedFd, name: &OsStr) -> Result<(OwnedFd, OsString), Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    first_free(name, |temp| rustix::fs::openat(dir, temp, flags, Mode::from_raw_mode(0o666)))
}

/// Tries our temporary names until one is not taken.
fn first_free<T>(name: &OsStr, mut make: impl FnMut(&OsStr) -> Result<T, Errno>) -> Result<(T, OsString), Errno> {
    let mut k = 0;
    loop {
        let temp = temp_name(name, std::process::id(), k);
        match make(&temp) {
            Err(Errno::EXIST) if k < 1000 => k += 1,
            Err(e) => return Err(e),
            Ok(made) => return Ok((made, temp)),
        }
    }
}

fn temp_name(name: &OsStr, pid: u32, k: u32) -> OsString {
    // A name has at most 255 bytes. Ours says what it is for, but only to people, so the long ones are cut.
    let mut temp = vec![b'.'];
    temp.extend_from_slice(&name.as_bytes()[..name.len().min(200)]);
    let further = if k == 0 { String::new() } else { format!("-{k}") };
    temp.extend_from_slice(format!(".{pid}{further}{SUFFIX}").as_bytes());
    OsString::from_vec(temp)
}

/// The process that made a temporary, by its name; `None` for a name that is not one of ours.
fn temp_owner(name: &[u8]) -> Option<Pid> {
    let stem = name.strip_suffix(SUFFIX.as_bytes())?.strip_prefix(b".")?;
    let dot = stem.iter().rposition(|&b| b == b'.').filter(|&at| at > 0)?;
    let owner = std::str::from_utf8(&stem[dot + 1..]).ok()?;
    let (pid, further) = owner.split_once('-').unwrap_or((owner, "0"));
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    if !digits(pid) || !digits(further) { None } else { Pid::from_raw(pid.parse().ok()?) }
}

/// Removes the temporaries of processes that died without doing so. Whatever goes wrong here is none of the caller's
/// business.
fn sweep(dir: &OwnedFd) {
    let Ok(entries) = rustix::fs::Dir::read_from(dir) else { return };
    let _naming = naming();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(pid) = temp_owner(name.to_bytes()) else { continue };
        // A name of our own that is not locked was left by an earlier process with our pid (in containers that is the
        // rule).
        let dead = rustix::process::test_kill_process(pid) == Err(Errno::SRCH);
        if !dead && pid != rustix::process::getpid() {
            continue;
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::openat(dir, name, flags, Mode::empty()) else { continue };
        let plain = rustix::fs::fstat(&file).is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::RegularFile);
        // A process of another pid namespace is not to be seen by its number, but its lock is.
        let unlocked = match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => true,
            Err(Errno::WOULDBLOCK) => false,
            Err(_) => dead,
        };
        if plain && unlocked {
            let _ = rustix::fs::unlinkat(dir, name, AtFlags::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Command, Stdio};

    /// Both ways of keeping the bytes out of sight; the second is what file systems without unnamed files get.
    const BOTH: [bool; 2] = [true, false];

    fn ls(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn filled(path: &Path, unnamed: bool, bytes: &[u8]) -> StateFile {
        let mut f = StateFile::create_in(path, bytes.len() as u64, unnamed).unwrap();
        let cut = bytes.len() / 3;
        f.put(cut as u64, &bytes[cut..]).unwrap();
        f.put(0, &bytes[..cut]).unwrap();
        f
    }

    #[test]
    fn appears_whole_and_replaces_what_was_there() {
        for unnamed in BOTH {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("state.bin");
            let first: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251) as u8).collect();
            let f = filled(&path, unnamed, &first);
            assert!(!path.exists());
            assert_eq!(ls(dir.path()).len(), if unnamed { 0 } else { 1 });
            f.seal().unwrap();
            assert_eq!(fs::read(&path).unwrap(), first);
            assert_eq!(ls(dir.path()), ["state.bin"]);

            let f = filled(&path, unnamed, b"second");
            assert_eq!(fs::read(&path).unwrap(), first);
            f.seal().unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"second");
            assert_eq!(ls(dir.path()), ["state.bin"]);
        }
    }

    #[test]
    fn dropped_or_unfinished_leaves_nothing() {
        for unnamed in BOTH {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("state.bin");
            drop(filled(&path, unnamed, b"abc"));
            assert!(ls(dir.path()).is_empty());

            let mut f = StateFile::create_in(&path, 10, unnamed).unwrap();
            f.put(0, b"123456789").unwrap();
            assert!(f.seal().unwrap_err().to_string().contains("9 bytes of 10"));
            assert!(ls(dir.path()).is_empty());

            let mut f = StateFile::create_in(&path, 10, unnamed).unwrap();
            for (at, bytes) in [(8, &b"abc"[..]), (11, b""), (u64::MAX, b"ab")] {
                assert_eq!(f.put(at, bytes).unwrap_err().kind(), io::ErrorKind::InvalidInput);
            }
        }
    }

    #[test]
    fn what_is_not_a_file_in_a_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        fs::write(d.join("file"), b"x").unwrap();
        fs::create_dir(d.join("sub")).unwrap();
        std::os::unix::fs::symlink("file", d.join("link")).unwrap();
        std::os::unix::fs::symlink("nowhere", d.join("dangling")).unwrap();
        rustix::fs::mknodat(CWD, d.join("fifo"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let before = ls(d);
        for (name, part) in [
            ("missing/x", "does not exist"),
            ("file/x", "is not a directory"),
            ("sub", "a directory"),
            ("sub/", "no file name"),
            ("link", "symbolic link"),
            ("dangling", "symbolic link"),
            ("fifo", "neither a plain file"),
            ("..", "no file name"),
            (&"n".repeat(256), "too long"),
        ] {
            let e = StateFile::create(&d.join(name), 10).unwrap_err();
            assert!(matches!(e, CreateError::CannotCreate { .. }), "{name}: {e:?}");
            assert!(e.to_string().contains(part), "{name}: {e}");
        }
        assert_eq!(ls(d), before);
        assert_eq!(fs::read(d.join("file")).unwrap(), b"x");
    }

    #[test]
    fn what_comes_to_the_name_meanwhile_is_left_alone() {
        for unnamed in BOTH {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("state.bin");
            let f = filled(&path, unnamed, b"abc");
            std::os::unix::fs::symlink("elsewhere", &path).unwrap();
            assert!(f.seal().unwrap_err().to_string().contains("symbolic link"));
            assert_eq!(ls(dir.path()), ["state.bin"]);

            fs::remove_file(&path).unwrap();
            let f = filled(&path, unnamed, b"abc");
            fs::create_dir(&path).unwrap();
            f.seal().unwrap_err();
            assert_eq!(ls(dir.path()), ["state.bin"]);
        }
    }

    #[test]
    fn the_longest_name_works() {
        for unnamed in BOTH {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("n".repeat(255));
            filled(&path, unnamed, b"abc").seal().unwrap();
            filled(&path, unnamed, b"abcd").seal().unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"abcd");
        }
    }

    #[test]
    fn several_of_one_process_do_not_meet() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.bin");
        let files: Vec<StateFile> = (0..4u8).map(|i| filled(&path, i % 2 == 0, &[i; 9])).collect();
        for (i, f) in files.into_iter().enumerate() {
            f.seal().unwrap();
            assert_eq!(fs::read(&path).unwrap(), [i as u8; 9]);
        }
        assert_eq!(ls(dir.path()), ["state.bin"]);
    }

    #[test]
    fn the_mode_is_what_the_umask_leaves() {
        // The umask belongs to the whole process, so another one is needed: this test runs itself under a shell.
        const DIR: &str = "KVLAYOUT_TEST_UMASK_DIR";
        if let Some(dir) = std::env::var_os(DIR) {
            for unnamed in BOTH {
                filled(&Path::new(&dir).join(format!("{unnamed}")), unnamed, b"abc").seal().unwrap();
            }
            return;
        }
        for (umask, mode) in [("022", 0o644), ("077", 0o600)] {
            let dir = tempfile::tempdir().unwrap();
            let this = "file::tests::the_mode_is_what_the_umask_leaves";
            let script = format!("umask {umask}; exec \"$0\" --exact {this}");
            let exe = std::env::current_exe().unwrap();
            let run = Command::new("sh").args(["-c", &script]).arg(exe).env(DIR, dir.path()).output().unwrap();
            assert!(run.status.success(), "{run:?}");
            for unnamed in BOTH {
                let found = fs::metadata(dir.path().join(format!("{unnamed}"))).unwrap().permissions().mode();
                assert_eq!(found & 0o777, mode, "unnamed: {unnamed}");
            }
        }
    }

    #[test]
    fn sweeps_the_temporaries_of_the_dead_only() {
        let dead = {
            let mut child = Command::new("true").spawn().unwrap();
            child.wait().unwrap();
            child.id()
        };
        let mut living = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let name = |pid: u32, k: u32| temp_name(OsStr::new("other.bin"), pid, k).into_string().unwrap();
        let locked = fs::File::create(d.join(name(dead, 1))).unwrap();
        rustix::fs::flock(&locked, FlockOperation::LockExclusive).unwrap();
        let keep = [
            name(living.id(), 0),
            name(dead, 1),
            format!(".x.{dead}.other-tmp"),
            format!("x.{dead}.npu-prefill-tmp"),
            format!(".{dead}.npu-prefill-tmp"),
            ".x.12y.npu-prefill-tmp".into(),
            ".x.99999999999999999999.npu-prefill-tmp".into(),
        ];
        let go = [name(dead, 0), name(dead, 7), name(std::process::id(), 0)];
        keep.iter()
            .chain(&go)
            .for_each(|n| drop(fs::OpenOptions::new().create(true).append(true).open(d.join(n)).unwrap()));
        std::os::unix::fs::symlink(name(dead, 0), d.join(name(dead, 8))).unwrap();
        fs::create_dir(d.join(name(dead, 9))).unwrap();

        drop(StateFile::create(&d.join("state.bin"), 5).unwrap());
        let mut expect: Vec<String> = keep.into_iter().chain([name(dead, 8), name(dead, 9)]).collect();
        expect.sort();
        assert_eq!(ls(d), expect);
        drop(living.stdin.take());
        living.wait().unwrap();
    }

    #[test]
    fn a_full_disk_is_an_error_at_the_start_and_leaves_nothing() {
        // A file system of our own of 1 MiB, where we may make one; the test runs itself inside.
        const DIR: &str = "KVLAYOUT_TEST_FULL_DIR";
        if let Some(dir) = std::env::var_os(DIR) {
            let dir = Path::new(&dir);
            for unnamed in BOTH {
                let e = StateFile::create_in(&dir.join("state.bin"), 2 << 20, unnamed).unwrap_err();
                assert!(
                    matches!(&e, CreateError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull),
                    "{e:?}"
                );
                assert!(ls(dir).is_empty(), "{:?}", ls(dir));
                filled(&dir.join("fits"), unnamed, &[7; 500_000]).seal().unwrap();
                fs::remove_file(dir.join("fits")).unwrap();
            }
            println!("ran inside");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let this = "file::tests::a_full_disk_is_an_error_at_the_start_and_leaves_nothing";
        let script = format!("mount -t tmpfs -o size=1M none \"${DIR}\" && exec \"$0\" --exact --nocapture {this}");
        let exe = std::env::current_exe().unwrap();
        let run = |wrap: &[&str], script: &str| {
            let mut command = Command::new(wrap[0]);
            command.args(&wrap[1..]).args(["sh", "-c", script]).arg(&exe).env(DIR, dir.path()).output()
        };
        let inside = |r: &io::Result<std::process::Output>| {
            r.as_ref().is_ok_and(|r| r.status.success() && String::from_utf8_lossy(&r.stdout).contains("ran inside"))
        };
        let mut tried = Vec::new();
        for wrap in [&["unshare", "-m"][..], &["unshare", "-rm"]] {
            let result = run(wrap, &script);
            if inside(&result) {
                return;
            }
            tried.push(result);
        }
        // The mount may be forbidden (a container): then only a file size limit is left to run into. But a failure of
        // the test itself, inside, is a failure.
        assert!(
            tried.iter().flatten().all(|r| !String::from_utf8_lossy(&r.stdout).contains("running 1 test")),
            "{tried:?}"
        );
        size_limit(&exe);
    }

    /// The limit is a property of the process, so that this needs another one too.
    const LIMIT: &str = "KVLAYOUT_TEST_LIMIT_DIR";

    fn size_limit(exe: &Path) {
        let dir = tempfile::tempdir().unwrap();
        let script = "ulimit -f 1024; exec \"$0\" --exact file::tests::a_file_size_limit_is_an_error_not_a_signal";
        let run = Command::new("sh").args(["-c", script]).arg(exe).env(LIMIT, dir.path()).output().unwrap();
        assert!(run.status.success(), "{run:?}");
    }

    #[test]
    fn a_file_size_limit_is_an_error_not_a_signal() {
        let Some(dir) = std::env::var_os(LIMIT) else { return size_limit(&std::env::current_exe().unwrap()) };
        for unnamed in BOTH {
            let e = StateFile::create_in(&Path::new(&dir).join("state.bin"), 2 << 20, unnamed).unwrap_err();
            assert!(
                matches!(&e, CreateError::Io { source, .. } if source.kind() == io::ErrorKind::FileTooLarge),
                "{e:?}"
            );
            assert!(ls(Path::new(&dir)).is_empty());
        }
    }

    #[test]
    fn nobody_ever_sees_half_a_file() {
        for unnamed in BOTH {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("state.bin");
            let done = std::sync::atomic::AtomicBool::new(false);
            std::thread::scope(|s| {
                s.spawn(|| {
                    while !done.load(std::sync::atomic::Ordering::Relaxed) {
                        if let Ok(bytes) = fs::read(&path) {
                            assert_eq!(bytes.len(), 100_000);
                            assert!(bytes.iter().all(|&b| b == bytes[0]));
                        }
                    }
                });
                for i in 0..30u8 {
                    filled(&path, unnamed, &[i; 100_000]).seal().unwrap();
                }
                done.store(true, std::sync::atomic::Ordering::Relaxed);
            });
        }
    }
}
