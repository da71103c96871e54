//! What can be made to go wrong, from `NPUSIM_FAULT`: names separated by commas, each with an optional `@N` for the Nth submission
//! only (from 1) instead of every one.
//!
//! | name | what happens |
//! |---|---|
//! | `timeout` | the command ends in TIMEOUT, having done nothing |
//! | `abort` | the command ends in ABORT, having written half of its output |
//! | `error` | the command ends in ERROR |
//! | `etime` | waiting gives ETIME, and the command never ends |
//! | `wedge` | from there on every command is like `etime`, until the node is closed |
//! | `poison` | once a foreign buffer was mapped through the driver, every submission gives EFAULT |
//! | `group` | COMPLETED, with wrong values: what a buffer in a wrong memory group looks like |
//! | `stale` | COMPLETED, but nothing was written: the output is what it was before |
//! | `spill` | COMPLETED and right, but bytes behind the output are written too |
//! | `enodev` | submitting gives ENODEV |
//! | `memlock` | only 8 MiB may be locked: mapping the heap gives EAGAIN |
//! | `firmware` | an old firmware: contexts give EINVAL |
//! | `contexts` | all contexts are taken: EINVAL, and the driver's count says so |
//! | `sva` | opening the node gives EOPNOTSUPP: no shared address space |
//! | `noclose` | closing a buffer says EIO, which XRT prints on its standard output |
//! | `nodevice` | opening the node gives ENODEV |

/// Faults by name.
#[derive(Clone, Debug, Default)]
pub struct Faults(Vec<(String, Option<u64>)>);

impl Faults {
    /// From the variable's text.
    pub fn parse(text: &str) -> Faults {
        let one = |item: &str| {
            let (name, at) = item.split_once('@').unwrap_or((item, ""));
            (name.trim().to_owned(), at.trim().parse().ok())
        };
        Faults(text.split(',').filter(|item| !item.trim().is_empty()).map(one).collect())
    }

    /// Whether the fault is set at all.
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(n, _)| n == name)
    }

    /// Whether it is due at that submission.
    pub fn at(&self, name: &str, submission: u64) -> bool {
        self.0.iter().any(|(n, at)| n == name && at.is_none_or(|at| at == submission))
    }

    /// Whether it is due from that submission on.
    pub fn since(&self, name: &str, submission: u64) -> bool {
        self.0.iter().any(|(n, at)| n == name && at.is_none_or(|at| at <= submission))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_submissions() {
        let f = Faults::parse("timeout@3, stale,wedge@2");
        assert!(f.at("timeout", 3) && !f.at("timeout", 2) && f.at("stale", 1) && f.at("stale", 9));
        assert!(!f.since("wedge", 1) && f.since("wedge", 5) && !f.has("abort"));
    }
}
