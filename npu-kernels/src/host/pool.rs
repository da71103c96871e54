//! The threads of one run: a pool of its own, which sleeps when there is nothing to do.
//!
//! Work is taken item by item, so a core that another process holds delays its own item only. Of the last item even that is too
//! much: with an operation every millisecond, everybody would wait for it most of the time, on cores that have nothing else to do. So who
//! has waited for long fetches the thread with that item to his own core, where it goes on at once, and sends it home afterwards. That
//! changes nothing but where threads run, and only among the cores that the process may use.

use rayon::ThreadPool;
use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::Duration;

/// Looks for the end of an operation before a thread sleeps: some 50 us, a few times what being woken costs.
const LOOKS: u32 = 1000;
/// How long a thread sleeps before it fetches others. Items take some tens of microseconds; a system gives the core to another
/// process for some thousands.
const PATIENCE: Duration = Duration::from_micros(100);

/// A fixed number of worker threads.
pub struct Pool {
    threads: usize,
    pool: Option<Workers>,
}

struct Workers {
    pool: ThreadPool,
    /// One for each thread.
    seats: Arc<[Seat]>,
    /// Cores of this process, where the system tells.
    allowed: Option<CpuSet>,
}

/// What the others have to know of a thread.
#[derive(Default)]
struct Seat {
    thread: OnceLock<(Thread, Pid)>,
    /// It has an item, and began that on this core.
    busy: AtomicBool,
    core: AtomicUsize,
    /// It sleeps until the operation's end, or till its patience does.
    waits: AtomicBool,
    /// Somebody has fetched it.
    fetched: AtomicBool,
    /// It was sent home, and may run nowhere else.
    bound: AtomicBool,
}

/// An operation.
struct Step<'a, I, F> {
    workers: &'a Workers,
    /// As many as threads take part: neighbours are done by one thread, which finds in its caches what they have in common.
    parts: Vec<Mutex<I>>,
    left: AtomicUsize,
    f: F,
}

impl Pool {
    /// A pool of `threads` (at least one). With one thread everything runs on the caller's.
    pub fn new(threads: usize) -> Result<Pool, PoolError> {
        let threads = threads.max(1);
        let pool = if threads == 1 { None } else { Some(Workers::new(threads)?) };
        Ok(Pool { threads, pool })
    }

    /// How many threads there are.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `f` on a thread of the pool, from which [`Pool::for_each`] costs no more than waking the others.
    pub fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(workers) => workers.pool.install(f),
            None => f(),
        }
    }

    /// Runs `f(0) .. f(n - 1)`, in any order, on all threads; returns when all are done.
    pub fn for_each(&self, n: usize, f: impl Fn(usize) + Sync + Send) {
        match &self.pool {
            Some(workers) if n > 1 => workers.share(n, |range| range, f),
            _ => (0..n).for_each(f),
        }
    }

    /// Runs `f(i, &mut items[i])` for every item.
    pub fn for_each_mut<T: Send>(&self, items: &mut [T], f: impl Fn(usize, &mut T) + Sync + Send) {
        match &self.pool {
            Some(workers) if items.len() > 1 => {
                let (n, mut rest) = (items.len(), items);
                let part = |range: Range<usize>| {
                    let (part, others) = std::mem::take(&mut rest).split_at_mut(range.len());
                    rest = others;
                    part.iter_mut().enumerate().map(move |(i, item)| (range.start + i, item))
                };
                workers.share(n, part, |(i, item)| f(i, item));
            }
            _ => items.iter_mut().enumerate().for_each(|(i, item)| f(i, item)),
        }
    }
}

impl Workers {
    fn new(threads: usize) -> Result<Workers, PoolError> {
        let seats: Arc<[Seat]> = (0..threads).map(|_| Seat::default()).collect();
        let theirs = seats.clone();
        let named = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("prefill-{i}"));
        let pool = named.start_handler(move |i| drop(theirs[i].thread.set((std::thread::current(), gettid())))).build();
        let pool = pool.map_err(|e| PoolError { threads, reason: e.to_string() })?;
        Ok(Workers { pool, seats, allowed: sched_getaffinity(None).ok() })
    }

    /// Runs `f` on all of `n` items; `part` makes an iterator over some of them.
    fn share<I>(&self, n: usize, part: impl FnMut(Range<usize>) -> I, f: impl Fn(I::Item) + Sync + Send)
    where
        I: DoubleEndedIterator + Send,
    {
        let threads = self.seats.len().min(n);
        let parts = (0..threads).map(|i| i * n / threads..(i + 1) * n / threads).map(part).map(Mutex::new).collect();
        let step = Step { workers: self, parts, left: AtomicUsize::new(n), f };
        self.pool.scope(|scope| {
            for _ in 1..threads {
                scope.spawn(|_| step.take_part());
            }
            step.take_part();
        });
    }
}

impl<I: DoubleEndedIterator + Send, F: Fn(I::Item) + Sync> Step<'_, I, F> {
    /// An item of the thread's own part, the next one, or else the last one of another's.
    fn next(&self, index: usize) -> Option<I::Item> {
        let n = self.parts.len();
        let take = |part: usize, own: bool| {
            let mut items = self.parts[part].lock().unwrap_or_else(PoisonError::into_inner);
            if own { items.next() } else { items.next_back() }
        };
        (0..n).find_map(|i| take((index + i) % n, i == 0 && index < n))
    }

    /// Does items until there are none, and waits for the others.
    fn take_part(&self) {
        let Some(index) = rayon::current_thread_index() else { return };
        let me = &self.workers.seats[index];
        loop {
            let item = self.next(index);
            let Some(item) = item else { break };
            me.begin(self.workers.allowed.as_ref());
            let _done = Done { step: self, me };
            (self.f)(item);
        }
        for _ in 0..LOOKS {
            if self.left.load(SeqCst) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        let mut guests = Vec::new();
        me.waits.store(true, SeqCst);
        while self.left.load(SeqCst) > 0 {
            std::thread::park_timeout(PATIENCE);
            if self.left.load(SeqCst) > 0 {
                self.workers.fetch(&mut guests);
            }
        }
        me.waits.store(false, SeqCst);
        for guest in guests {
            guest.send_home();
        }
    }
}

/// Ends an item, however that came about.
struct Done<'a, 'b, I, F> {
    step: &'a Step<'b, I, F>,
    me: &'a Seat,
}

impl<I, F> Drop for Done<'_, '_, I, F> {
    fn drop(&mut self) {
        self.me.busy.store(false, SeqCst);
        if self.step.left.fetch_sub(1, SeqCst) == 1 {
            for seat in self.step.workers.seats.iter().filter(|s| s.waits.load(SeqCst)) {
                if let Some((thread, _)) = seat.thread.get() {
                    thread.unpark();
                }
            }
        }
    }
}

impl Workers {
    /// Fetches to this core who has an item elsewhere.
    fn fetch<'a>(&'a self, guests: &mut Vec<&'a Seat>) {
        let here = sched_getcpu();
        if self.allowed.as_ref().is_none_or(|a| here >= CpuSet::MAX_CPU || !a.is_set(here)) {
            return;
        }
        for seat in self.seats.iter().filter(|s| s.busy.load(SeqCst) && s.core.load(SeqCst) != here) {
            if !seat.fetched.swap(true, SeqCst) {
                seat.keep_to(here);
                guests.push(seat);
            }
        }
    }
}

impl Seat {
    /// Begins an item, on whatever core.
    fn begin(&self, allowed: Option<&CpuSet>) {
        if self.bound.swap(false, SeqCst)
            && let Some(allowed) = allowed
        {
            let _ = sched_setaffinity(None, allowed);
        }
        self.core.store(sched_getcpu(), SeqCst);
        self.busy.store(true, SeqCst);
    }

    /// Binds it to the core where it began its item: otherwise it would stay, and both would share this one. It unbinds itself once it is
    /// there.
    fn send_home(&self) {
        self.keep_to(self.core.load(SeqCst));
        self.bound.store(true, SeqCst);
        self.fetched.store(false, SeqCst);
    }

    fn keep_to(&self, core: usize) {
        if let Some((_, id)) = self.thread.get()
            && core < CpuSet::MAX_CPU
        {
            let mut set = CpuSet::new();
            set.set(core);
            // It costs time and nothing else if the system will not.
            let _ = sched_setaffinity(Some(*id), &set);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn every_item_is_done_once() {
        for threads in [1, 2, 3, 8, 40] {
            let pool = Pool::new(threads).unwrap();
            for n in [0, 1, 2, 3, 7, 8, 9, 100, 1000] {
                let seen: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each(n, |i| {
                    seen[i].fetch_add(1, SeqCst);
                });
                assert!(seen.iter().all(|s| s.load(SeqCst) == 1), "{threads} {n}");
                let mut items = vec![0; n];
                pool.run(|| pool.for_each_mut(&mut items, |i, item| *item += i + 1));
                assert!(items.iter().enumerate().all(|(i, item)| *item == i + 1), "{threads} {n}");
            }
        }
    }

    /// Items of very different lengths, so that threads take others' items, sleep and fetch.
    #[test]
    fn an_operation_ends_when_its_last_item_does() {
        let pool = Pool::new(4).unwrap();
        for round in 0..200u64 {
            let mut items = [0u64; 9];
            pool.for_each_mut(&mut items, |i, item| {
                if (i as u64 + round).is_multiple_of(5) {
                    std::thread::sleep(Duration::from_micros(50 * (round % 13)));
                }
                *item = round;
            });
            assert_eq!(items, [round; 9]);
        }
    }

    #[test]
    fn a_panic_comes_out_and_leaves_a_pool_that_works() {
        let pool = Pool::new(3).unwrap();
        for bad in [0, 5, 9] {
            let done = AtomicUsize::new(0);
            let run = || {
                pool.for_each(10, |i| {
                    assert_ne!(i, bad);
                    done.fetch_add(1, SeqCst);
                });
            };
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err());
            assert_eq!(done.load(SeqCst), 9, "who goes on does the others");
        }
        let mut items = [0; 10];
        pool.for_each_mut(&mut items, |i, item| *item = i);
        assert_eq!(items, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn an_operation_inside_of_another_ends() {
        let pool = Pool::new(2).unwrap();
        let sum = AtomicUsize::new(0);
        pool.for_each(4, |i| {
            pool.for_each(5, |j| {
                sum.fetch_add(10 * i + j, SeqCst);
            });
        });
        assert_eq!(sum.load(SeqCst), 5 * 60 + 4 * 10);
    }

    /// The cores a thread may run on, and the thread itself.
    fn cores(seat: &Seat) -> Vec<usize> {
        let set = sched_getaffinity(seat.thread.get().map(|t| t.1)).unwrap();
        (0..CpuSet::MAX_CPU).filter(|c| set.is_set(*c)).collect()
    }

    #[test]
    fn who_was_fetched_goes_home_and_is_free_again() {
        let pool = Workers::new(2).unwrap();
        let allowed = pool.allowed.unwrap();
        let all: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|c| allowed.is_set(*c)).collect();
        let (told, heard) = mpsc::channel::<()>();
        let (ready, begun) = mpsc::channel();
        std::thread::scope(|scope| {
            let pool = &pool;
            let (seats, allowed) = (&pool.seats, pool.allowed.as_ref());
            // Stands for the pool's second thread, with an item that takes as long as we say.
            scope.spawn(move || {
                pool.pool.broadcast(|c| {
                    if c.index() == 1 {
                        seats[1].begin(allowed);
                        ready.send(()).unwrap();
                    }
                });
                heard.recv().unwrap();
                pool.pool.broadcast(|c| {
                    if c.index() == 1 {
                        seats[1].begin(allowed);
                    }
                });
            });
            begun.recv().unwrap();
            let home = all.iter().copied().find(|c| *c != sched_getcpu()).unwrap_or(all[0]);
            seats[1].core.store(home, SeqCst);
            let mut guests = Vec::new();
            pool.fetch(&mut guests);
            // We may have been moved since; wherever it is, it is one core.
            let one = cores(&seats[1]);
            if all.len() > 1 && sched_getcpu() != home {
                assert!(guests.len() == 1 && one.len() == 1 && one[0] != home, "{one:?} of {all:?}");
            }
            let again = guests.len();
            pool.fetch(&mut guests);
            assert_eq!(guests.len(), again, "nobody is fetched twice");
            for guest in guests {
                guest.send_home();
                assert_eq!(cores(guest), [home]);
            }
            told.send(()).unwrap();
        });
        assert_eq!(cores(&pool.seats[1]), all);
    }
}
