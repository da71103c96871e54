//! How much memory this process has taken and may still take: the least of what the machine has free, what its control
//! groups leave and what its resource limits leave. A limit that cannot be read is no limit.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// What is left, and who says so.
#[derive(Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes.
    pub bytes: u64,
    /// Whose limit it is.
    pub source: Source,
}

/// Who limits memory.
#[derive(Debug, PartialEq, Eq)]
pub enum Source {
    /// MemAvailable: what the system could give without swapping or killing anyone.
    System,
    /// A control group's limit less its usage.
    Group(PathBuf),
    /// The limit on address space (`ulimit -v`) less what is mapped.
    AddressSpace,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::System => f.write_str("available"),
            Source::Group(path) => write!(f, "left to its control group ({})", path.display()),
            Source::AddressSpace => f.write_str("left of its address space (ulimit -v)"),
        }
    }
}

/// What this process may take on top of what it has.
pub fn room() -> Option<Room> {
    let system = system().map(|bytes| Room { bytes, source: Source::System });
    let space = address_space().map(|bytes| Room { bytes, source: Source::AddressSpace });
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let groups = groups_of(&groups, Path::new("/sys/fs/cgroup"));
    system.into_iter().chain(space).chain(groups).min_by_key(|room| room.bytes)
}

/// The high-water mark of what was resident.
pub fn peak_rss() -> Option<u64> {
    kilobytes(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

fn system() -> Option<u64> {
    kilobytes(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

fn address_space() -> Option<u64> {
    // "Max address space         1048576              unlimited            bytes"
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|l| l.strip_prefix("Max address space"))?;
    let limit: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(limit.saturating_sub(kilobytes(&fs::read_to_string("/proc/self/status").ok()?, "VmSize:")?))
}

fn kilobytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(key))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// What the groups named in `/proc/self/cgroup` leave, and every group above them. Version 2 has one line, `0::PATH`;
/// version 1 one per controller, `N:memory:PATH`, with other names for the files.
fn groups_of(membership: &str, root: &Path) -> Vec<Room> {
    let mut out = Vec::new();
    for line in membership.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (base, max, usage) = match controllers {
            "" => (root.to_owned(), "memory.max", "memory.current"),
            c if c.split(',').any(|c| c == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        let leaf = base.join(path.trim_start_matches('/'));
        for group in leaf.ancestors().take_while(|group| group.starts_with(&base)) {
            let number = |file| fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
            // "max" is no number, and no limit.
            if let (Some(max), Some(usage)) = (number(max), number(usage)) {
                out.push(Room { bytes: max.saturating_sub(usage), source: Source::Group(group.to_owned()) });
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_known_here() {
        assert!(super::peak_rss().unwrap() > 1 << 20);
    }

    #[test]
    fn the_system_says_something() {
        let room = room().expect("Linux tells what is available");
        assert!(room.bytes > 0);
    }

    #[test]
    fn every_group_above_counts() {
        let root = tempfile::tempdir().expect("a directory");
        let inner = root.path().join("user.slice/box");
        fs::create_dir_all(&inner).expect("a directory");
        let put = |dir: &Path, file: &str, text: &str| fs::write(dir.join(file), text).expect("a file");
        put(&inner, "memory.max", "max\n");
        put(&inner, "memory.current", "5\n");
        put(&root.path().join("user.slice"), "memory.max", "1048576\n");
        put(&root.path().join("user.slice"), "memory.current", "48576\n");
        let rooms = groups_of("0::/user.slice/box\n", root.path());
        let group = root.path().join("user.slice");
        assert_eq!(rooms, [Room { bytes: 1_000_000, source: Source::Group(group) }]);
    }

    #[test]
    fn the_first_version_has_other_names() {
        let root = tempfile::tempdir().expect("a directory");
        let group = root.path().join("memory/job");
        fs::create_dir_all(&group).expect("a directory");
        fs::write(group.join("memory.limit_in_bytes"), "100").expect("a file");
        fs::write(group.join("memory.usage_in_bytes"), "250").expect("a file");
        let rooms = groups_of("5:cpu,cpuacct:/job\n4:memory:/job\nnonsense\n", root.path());
        assert_eq!(rooms, [Room { bytes: 0, source: Source::Group(group) }]);
    }
}
