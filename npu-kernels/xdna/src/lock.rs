//! One process at a time on the NPU, by a lock file that other programs of this kind use as well. It is advice: who does not
//! take the lock is not kept out.

use crate::error::Error;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// The file that programs on this hardware agree on.
pub const DEVICE_LOCK: &str = "/tmp/1bit-npu-device.lock";

/// The lock, held until this is dropped or the process ends. A [`crate::Device`] takes it and holds it for its own life.
#[derive(Debug)]
pub struct DeviceLock {
    _file: OwnedFd,
}

impl DeviceLock {
    /// Takes the lock of [`DEVICE_LOCK`], waiting at most that long; [`Error::Busy`] after it.
    pub fn acquire(wait: Duration) -> Result<DeviceLock, Error> {
        Self::acquire_at(Path::new(DEVICE_LOCK), wait)
    }

    /// The same on another file.
    pub fn acquire_at(path: &Path, wait: Duration) -> Result<DeviceLock, Error> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let failed = |e: Errno| Error::system(format!("opening the lock {}", path.display()), e.into());
        // First without creating: in a directory with the sticky bit, some kernels refuse to open another user's file for
        // creation (fs.protected_regular), though the file is there and open to all.
        let file = match rustix::fs::open(path, flags, Mode::empty()) {
            Err(Errno::NOENT) => rustix::fs::open(path, flags | OFlags::CREATE, Mode::from_raw_mode(0o666)),
            // Reading is enough for flock, where another user made the file and may alone write it.
            Err(Errno::ACCESS) => {
                rustix::fs::open(path, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
            }
            other => other,
        }
        .map_err(failed)?;
        let end = Instant::now() + wait;
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(DeviceLock { _file: file }),
                Err(Errno::AGAIN) if Instant::now() >= end => {
                    let what = format!("another process holds the NPU's lock {}", path.display());
                    return Err(Error::Busy { what });
                }
                Err(Errno::AGAIN | Errno::INTR) => std::thread::sleep(Duration::from_millis(20).min(wait)),
                Err(e) => return Err(failed(e)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn one_at_a_time_and_no_links() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = DeviceLock::acquire_at(&path, Duration::ZERO).unwrap();
        let second = DeviceLock::acquire_at(&path, Duration::from_millis(30)).unwrap_err();
        assert_eq!(second.kind(), Kind::Busy);
        drop(first);
        drop(DeviceLock::acquire_at(&path, Duration::ZERO).unwrap());

        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let error = DeviceLock::acquire_at(&link, Duration::ZERO).unwrap_err();
        assert!(matches!(error, Error::System { code, .. } if code == Errno::LOOP.raw_os_error()), "{error}");
    }
}
