//! The threads of one run: a pool of its own, which sleeps when there is nothing to do.
//!
//! Work is taken item by item, so a core that another process holds delays its own item only; nobody spins at a
//! barrier.

use rayon::prelude::*;

/// A fixed number of worker threads.
pub struct Pool {
    threads: usize,
    pool: Option<rayon::ThreadPool>,
}

impl Pool {
    /// A pool of `threads` (at least one). With one thread everything runs on the caller's.
    pub fn new(threads: usize) -> Result<Pool, PoolError> {
        let threads = threads.max(1);
        let pool = if threads == 1 {
            None
        } else {
            let named = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("prefill-{i}"));
            Some(named.build().map_err(|e| PoolError { threads, reason: e.to_string() })?)
        };
        Ok(Pool { threads, pool })
    }

    /// How many threads there are.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `f` on a thread of the pool, from which [`Pool::for_each`] costs no more than waking the others.
    pub fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) => pool.install(f),
            None => f(),
        }
    }

    /// Runs `f(0) .. f(n - 1)`, in any order, on all threads; returns when all are done.
    pub fn for_each(&self, n: usize, f: impl Fn(usize) + Sync + Send) {
        match &self.pool {
            Some(pool) if n > 1 => pool.install(|| (0..n).into_par_iter().with_max_len(1).for_each(f)),
            _ => (0..n).for_each(f),
        }
    }

    /// Runs `f(i, &mut items[i])` for every item.
    pub fn for_each_mut<T: Send>(&self, items: &mut [T], f: impl Fn(usize, &mut T) + Sync + Send) {
        match &self.pool {
            Some(pool) if items.len() > 1 => {
                pool.install(|| items.par_iter_mut().enumerate().with_max_len(1).for_each(|(i, item)| f(i, item)));
            }
            _ => items.iter_mut().enumerate().for_each(|(i, item)| f(i, item)),
        }
    }
}

/// The system would not start the threads.
#[derive(Debug, thiserror::Error)]
#[error("cannot start {threads} threads: {reason}; try fewer with -t")]
pub struct PoolError {
    threads: usize,
    reason: String,
}
