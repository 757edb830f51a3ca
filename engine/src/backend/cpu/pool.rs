//! Threads that share the work of one operation and sleep when there is none. They only compute: whoever waits for them
//! waits for arithmetic of bounded length, never for another process, lock or device, and looks again after a time limit (E1). What they compute
//! on may lie in a file that is mapped: a page of it comes when the system brings it, as for whoever reads it.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::raw::{Task, lend};
use crate::waits::{Tids, this_tid};

/// Looks for work before a thread sleeps: about the time between two operations of one step.
const SPINS: usize = 2_000;
/// Longest sleep; a lost wake-up costs no more than this.
const SLEEP: Duration = Duration::from_millis(500);
/// Multiply-adds below which the caller computes alone: fewer take less time than to hand them over.
pub const WORK_MIN: usize = 100_000;

/// Pieces a thread: uneven ones even out.
const PIECES_PER_THREAD: usize = 4;
/// More pieces of chunks than this nobody needs: they have their places on the stack.
const PIECES_MAX: usize = 64;

/// A pool; the caller of [`Pool::run`] is one of its threads.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Of the workers: whoever waits for a step waits for them, too.
    tids: Tids,
}

#[derive(Debug, Default)]
struct Shared {
    task: Mutex<Option<Arc<Task>>>,
    /// Counts tasks: a worker sees by it that there is a new one.
    epoch: AtomicUsize,
    stop: AtomicBool,
}

impl Pool {
    /// A pool of `threads`, this one among them. A thread that cannot be had is not an error: the others do its work.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared::default());
        let tids: Tids = (1..threads).map(|_| AtomicU64::new(0)).collect();
        let workers = (1..threads).filter_map(|index| {
            let (shared, tids) = (shared.clone(), tids.clone());
            let body = move || {
                tids[index - 1].store(this_tid(), Ordering::Relaxed);
                shared.work();
            };
            thread::Builder::new().name(format!("kernel-{index}")).spawn(body).ok()
        });
        Self { workers: workers.collect(), shared, tids }
    }

    /// The threads that help whoever calls, each once it runs.
    pub fn tids(&self) -> Tids {
        self.tids.clone()
    }

    /// Threads, the caller's among them.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Whether so much work is worth sharing.
    pub fn shares(&self, work: usize) -> bool {
        !self.workers.is_empty() && work >= WORK_MIN
    }

    /// Calls `f(0)` to `f(pieces - 1)`, at the same time where `work` (multiply-adds in all) is worth it. Which thread runs a
    /// piece has no influence on its values.
    pub fn run(&self, pieces: usize, work: usize, f: impl Fn(usize) + Sync) {
        if pieces <= 1 || !self.shares(work) {
            (0..pieces).for_each(f);
            return;
        }
        let looks = AtomicUsize::new(0);
        let wait = || {
            if looks.fetch_add(1, Ordering::Relaxed) < SPINS { std::hint::spin_loop() } else { thread::yield_now() }
        };
        lend(&f, pieces, |task| self.publish(task), wait);
    }

    /// Calls `f` for ranges that together cover `0..count`, each (but the last) a multiple of `step` long.
    pub fn split(&self, count: usize, step: usize, work: usize, f: impl Fn(Range<usize>) + Sync) {
        let pieces_max = self.threads() * PIECES_PER_THREAD;
        let len = count.div_ceil(pieces_max).next_multiple_of(step).max(1);
        self.run(count.div_ceil(len), work, |piece| f(piece * len..((piece + 1) * len).min(count)));
    }

    /// Calls `f` for every chunk of `len` values, with its index.
    pub fn each_chunk<T: Send>(&self, values: &mut [T], len: usize, work: usize, f: impl Fn(usize, &mut [T]) + Sync) {
        let len = len.max(1);
        if !self.shares(work) {
            values.chunks_exact_mut(len).enumerate().for_each(|(at, chunk)| f(at, chunk));
            return;
        }
        let (pieces_max, chunks) = ((self.threads() * PIECES_PER_THREAD).min(PIECES_MAX), values.len() / len);
        let per_piece = chunks.div_ceil(pieces_max).max(1);
        let mut pieces = std::array::from_fn::<_, PIECES_MAX, _>(|_| Mutex::new(None));
        let filled = values.chunks_mut(per_piece * len).zip(&mut pieces);
        let count = filled.map(|(piece, place)| *place = Mutex::new(Some(piece))).count();
        self.run(count, work, |index| {
            let Some(piece) = taken(&pieces[index]) else { return };
            piece.chunks_exact_mut(len).enumerate().for_each(|(at, chunk)| f(index * per_piece + at, chunk));
        });
    }

    /// Calls `f` with each of `items`.
    pub fn each<T: Send>(&self, items: impl Iterator<Item = T>, work: usize, f: impl Fn(T) + Sync) {
        let items: Vec<_> = items.map(|item| Mutex::new(Some(item))).collect();
        self.run(items.len(), work, |index| {
            if let Some(item) = taken(&items[index]) {
                f(item);
            }
        });
    }

    fn publish(&self, task: &Arc<Task>) {
        // a worker holds this lock for the time of one copy; if it is taken the caller computes alone
        let Ok(mut slot) = self.shared.task.try_lock() else { return };
        *slot = Some(task.clone());
        drop(slot);
        self.shared.epoch.fetch_add(1, Ordering::Release);
        self.workers.iter().for_each(|worker| worker.thread().unpark());
    }
}

/// What lies in the place of an index. Each index comes once, so the lock is free: it only hands over.
fn taken<T>(place: &Mutex<Option<T>>) -> Option<T> {
    place.try_lock().ok()?.take()
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.workers.iter().for_each(|worker| worker.thread().unpark());
        // not joined: they hold nothing, and end by themselves
    }
}

impl Shared {
    fn work(&self) {
        let (mut seen, mut idle) = (0, 0);
        while !self.stop.load(Ordering::Acquire) {
            let epoch = self.epoch.load(Ordering::Acquire);
            let task = if epoch == seen { None } else { self.task.try_lock().ok().and_then(|task| task.clone()) };
            if let Some(task) = task {
                (seen, idle) = (epoch, 0);
                // a panic in here is told to the caller by the task; this thread lives on for the next one
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| task.help()));
            } else if idle < SPINS {
                idle += 1;
                std::hint::spin_loop();
            } else {
                thread::park_timeout(SLEEP);
                idle = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_runs_once() {
        let pool = Pool::new(4);
        for pieces in [0, 1, 2, 7, 100] {
            for _ in 0..50 {
                let counts: Vec<AtomicUsize> = (0..pieces).map(|_| AtomicUsize::new(0)).collect();
                pool.run(pieces, WORK_MIN, |i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn the_threads_that_help_are_known() {
        let (pool, (tell, told)) = (Pool::new(3), std::sync::mpsc::channel());
        let (mut seen, since) = (std::collections::BTreeSet::from([this_tid()]), std::time::Instant::now());
        while seen.len() < 3 {
            assert!(since.elapsed() < Duration::from_secs(60), "not all threads help");
            pool.run(6, WORK_MIN, |_| {
                tell.send(this_tid()).unwrap();
                thread::sleep(Duration::from_millis(1));
            });
            seen.extend(told.try_iter());
        }
        let known = pool.tids().iter().map(|tid| tid.load(Ordering::Relaxed)).chain([this_tid()]).collect();
        assert_eq!(seen, known);
    }

    #[test]
    fn a_sleeping_pool_wakes() {
        let pool = Pool::new(2);
        thread::sleep(Duration::from_millis(20));
        let sum = AtomicUsize::new(0);
        pool.run(10, WORK_MIN, |i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }

    /// What a thread of this process has run so far; `None` where the kernel does not count it.
    fn ran(tid: u64) -> Option<Duration> {
        let text = std::fs::read_to_string(format!("/proc/self/task/{tid}/schedstat")).ok()?;
        text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
    }

    #[test]
    fn a_pool_without_work_sleeps() {
        let (pool, mine) = (Pool::new(2), crate::waits::this_tid());
        let (other, since) = (std::sync::atomic::AtomicU64::new(mine), std::time::Instant::now());
        while other.load(Ordering::Relaxed) == mine {
            assert!(since.elapsed() < Duration::from_secs(60), "the other thread never helps");
            pool.run(2, WORK_MIN, |_| {
                let tid = crate::waits::this_tid();
                if tid != mine {
                    other.store(tid, Ordering::Relaxed);
                }
                thread::sleep(Duration::from_millis(1));
            });
        }
        thread::sleep(Duration::from_millis(50));
        let used = || ran(other.load(Ordering::Relaxed));
        let (before, began) = (used(), std::time::Instant::now());
        thread::sleep(Duration::from_secs(1));
        let share =
            used().zip(before).map(|(now, before)| (now - before).as_secs_f64() / began.elapsed().as_secs_f64());
        // one that spins has a processor, or shares it with a few
        assert!(share.is_none_or(|share| share < 0.05), "{share:?} of a processor");
    }

    #[test]
    fn a_failing_piece_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3);
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(20, WORK_MIN, |i| assert!(i != 13, "as told"));
        }));
        assert!(failed.is_err());
        let done = AtomicUsize::new(0);
        pool.run(20, WORK_MIN, |_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 20);
    }
}
