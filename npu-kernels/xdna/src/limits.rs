//! How much memory this process may lock. The driver pins what the device reads, and with the small default of many
//! distributions XRT finds no device at all.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fmt;

/// `RLIMIT_MEMLOCK` in bytes; `None` is no limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memlock {
    /// In force.
    pub soft: Option<u64>,
    /// As far as the process may raise it.
    pub hard: Option<u64>,
}

impl Memlock {
    /// The device's heap, which XRT allocates first, and which the driver counts.
    pub const NEED: u64 = 64 << 20;
    /// What to do about a limit that is too small.
    pub const ADVICE: &str = "add `* hard memlock unlimited` and `* soft memlock unlimited` to /etc/security/limits.conf \
         and log in again, or set LimitMEMLOCK=infinity in the service";

    /// Whether the device's heap fits.
    pub fn is_enough(self) -> bool {
        self.soft.is_none_or(|soft| soft > Self::NEED)
    }
}

impl fmt::Display for Memlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |n| format!("{} KiB", n >> 10));
        write!(f, "{} of at most {}, more than {} KiB needed", words(self.soft), words(self.hard), Self::NEED >> 10)
    }
}

/// The limits in force.
pub fn memlock() -> Memlock {
    let Rlimit { current, maximum } = getrlimit(Resource::Memlock);
    Memlock { soft: current, hard: maximum }
}

/// Raises the soft limit to the hard one, as every process may, and gives the limits then in force.
pub fn raise_memlock() -> Memlock {
    let Rlimit { maximum, .. } = getrlimit(Resource::Memlock);
    // A refusal leaves things as they were, and what follows will say so.
    let _ = setrlimit(Resource::Memlock, Rlimit { current: maximum, maximum });
    memlock()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        let raised = raise_memlock();
        assert_eq!(raised.soft, raised.hard);
        assert!(Memlock { soft: None, hard: None }.is_enough());
        assert!(!Memlock { soft: Some(8 << 20), hard: None }.is_enough());
    }
}
