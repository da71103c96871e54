//! Packed weights kept between runs, in files named by what they were made from: `$XDG_CACHE_HOME/npu-prefill/packed`.
//!
//! A file appears whole or not at all, and whoever reads one checks it. The directory has a bound; the files that were used
//! longest ago make room, but none that was used within the hour: a model that does not fit keeps part of itself rather than
//! pushing itself out on every run. Whatever goes wrong here costs time and nothing else, so nothing here is an error.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use prefill::PackStore;

use crate::env;
use crate::exit::Result;

/// Unless the variable says otherwise.
const DEFAULT_BYTES: u64 = 32 << 30;
/// A file that was used this recently stays.
const FRESH: Duration = Duration::from_secs(3600);
/// No packed weight is larger.
const MAX_FILE: u64 = 2 << 30;

/// See the module's documentation.
pub struct FileStore {
    dir: PathBuf,
    bound: u64,
}

impl FileStore {
    /// The store at its usual place; one that keeps nothing where there is no such place or the bound is 0.
    ///
    /// # Errors
    /// The variable with the bound does not hold a size.
    pub fn usual() -> Result<Box<dyn PackStore + Send>> {
        let bound = env::CACHE_SIZE.parse(crate::cli::size)?.unwrap_or(DEFAULT_BYTES);
        let absolute = |v: &env::Variable| v.get().map(PathBuf::from).filter(|p| p.is_absolute());
        let base = absolute(&env::XDG_CACHE_HOME).or_else(|| absolute(&env::HOME).map(|home| home.join(".cache")));
        Ok(match base {
            Some(base) if bound > 0 => Box::new(FileStore { dir: base.join("npu-prefill/packed"), bound }),
            _ => Box::new(()),
        })
    }

    /// Makes room for `need` bytes; whether there is enough now.
    fn make_room(&self, need: u64) -> bool {
        let Ok(entries) = fs::read_dir(&self.dir) else { return need <= self.bound };
        let mut files: Vec<(SystemTime, u64, PathBuf)> = entries
            .filter_map(|e| {
                let meta = e.as_ref().ok()?.metadata().ok()?;
                Some((meta.modified().ok()?, meta.len(), e.ok()?.path()))
            })
            .collect();
        files.sort();
        let mut total: u64 = files.iter().map(|(_, len, _)| len).sum();
        for (used, len, path) in files {
            if total + need <= self.bound {
                break;
            }
            if used.elapsed().is_ok_and(|age| age < FRESH) || fs::remove_file(path).is_err() {
                continue;
            }
            total -= len;
        }
        total + need <= self.bound && room_on_disk(&self.dir) >= 2 * need
    }
}

fn room_on_disk(dir: &Path) -> u64 {
    rustix::fs::statvfs(dir).map_or(u64::MAX, |fs| fs.f_bavail.saturating_mul(fs.f_frsize))
}

impl PackStore for FileStore {
    fn get(&mut self, key: &str) -> Option<Vec<u8>> {
        let path = self.dir.join(key);
        let file = fs::File::open(&path).ok()?;
        let meta = file.metadata().ok()?;
        if !meta.is_file() || meta.len() > MAX_FILE {
            return None;
        }
        let bytes = fs::read(&path).ok()?;
        let _ = file.set_modified(SystemTime::now());
        Some(bytes)
    }

    fn put(&mut self, key: &str, bytes: &[u8]) {
        let keep = || -> std::io::Result<()> {
            fs::create_dir_all(&self.dir)?;
            if !self.make_room(bytes.len() as u64) {
                return Ok(());
            }
            // Two runs at once write the same bytes, each under a name of its own first.
            let whole = self.dir.join(format!(".{key}.{}", std::process::id()));
            let written = fs::File::create(&whole)
                .and_then(|mut file| file.write_all(bytes))
                .and_then(|()| fs::rename(&whole, self.dir.join(key)));
            if written.is_err() {
                let _ = fs::remove_file(&whole);
            }
            written
        };
        if let Err(e) = keep() {
            log::debug!("packed weights are not kept in {}: {e}", self.dir.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn old(path: &Path, hours: u64) {
        let then = SystemTime::now() - Duration::from_secs(hours * 3600);
        fs::File::options().write(true).open(path).unwrap().set_modified(then).unwrap();
    }

    #[test]
    fn what_is_kept_is_found_within_the_bound() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = FileStore { dir: dir.path().join("packed"), bound: 1000 };
        assert_eq!(store.get("a"), None);
        store.put("a", &[1; 400]);
        store.put("b", &[2; 400]);
        assert_eq!(store.get("a"), Some(vec![1; 400]));
        // Fresh files stay, so there is no room.
        store.put("c", &[3; 400]);
        assert_eq!((store.get("b"), store.get("c")), (Some(vec![2; 400]), None));
        // The one used longest ago goes.
        old(&store.dir.join("a"), 2);
        old(&store.dir.join("b"), 3);
        store.put("c", &[3; 400]);
        assert_eq!((store.get("a"), store.get("b"), store.get("c")), (Some(vec![1; 400]), None, Some(vec![3; 400])));
        store.put("d", &[4; 1001]);
        assert_eq!(store.get("d"), None);
        let names: Vec<_> = fs::read_dir(&store.dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names.len(), 2, "nothing half written: {names:?}");
    }
}
