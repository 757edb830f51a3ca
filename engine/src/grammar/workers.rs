//! The threads that compute masks while the model runs, in two lanes. A mask goes to a thread that has nothing else to do, and threads
//! are started until there are as many as a lane may have; a grammar whose last mask was slow waits among its like, so that nobody's
//! cheap mask waits behind it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::panics::guarded;

/// So many grammars may turn out to be slow at the same moment before a cheap mask waits for one of them.
const QUICK_THREADS: usize = 16;
/// The model wants the processors.
const SLOW_THREADS: usize = 2;
/// Jobs that may wait for one thread: more than there are constraints, each of which has one at most.
const QUEUE: usize = 1024;
/// An idle thread turns at least this often; it ends as soon as the last handle does.
const IDLE_WAIT: Duration = Duration::from_secs(60);
const STACK_BYTES: usize = 16 << 20;

/// Something to compute; where its result goes is its own business.
pub(super) type Job = Box<dyn FnOnce() + Send>;

/// Where a job waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pace {
    Quick,
    Slow,
}

/// A handle on the threads, which start when they are needed and end with the last handle.
#[derive(Clone)]
pub(super) struct Workers {
    lanes: Arc<[Lane; 2]>,
}

/// Threads that do the same kind of work.
struct Lane {
    name: &'static str,
    stack_bytes: usize,
    /// From the first on as many as have started.
    threads: Vec<OnceLock<Worker>>,
    /// The last one that was to start did not.
    lacks: AtomicBool,
}

struct Worker {
    jobs: SyncSender<Job>,
    /// Jobs that it was given and has not done.
    pending: Arc<AtomicUsize>,
}

impl Default for Workers {
    fn default() -> Self {
        Self { lanes: Arc::new([Lane::new("grammar", QUICK_THREADS), Lane::new("slow-grammar", SLOW_THREADS)]) }
    }
}

impl Workers {
    /// Hands a job over without waiting. False: nobody will do it.
    pub fn submit(&self, pace: Pace, job: Job) -> bool {
        self.lanes[usize::from(pace == Pace::Slow)].submit(job)
    }
}

impl Lane {
    fn new(name: &'static str, count: usize) -> Self {
        let threads = (0..count).map(|_| OnceLock::new()).collect();
        Self { name, stack_bytes: STACK_BYTES, threads, lacks: AtomicBool::new(false) }
    }

    /// To a thread that is idle, or new; else to the one with the least to do.
    fn submit(&self, job: Job) -> bool {
        let workers = self.threads.iter().enumerate().map_while(|(number, place)| self.worker(number, place));
        let mut least: Option<&Worker> = None;
        for worker in workers {
            if worker.pending.compare_exchange(0, 1, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return worker.jobs.try_send(job).is_ok();
            }
            let pending = |worker: &Worker| worker.pending.load(Ordering::Relaxed);
            least = least.filter(|least| pending(least) <= pending(worker)).or(Some(worker));
        }
        least.is_some_and(|worker| {
            worker.pending.fetch_add(1, Ordering::Relaxed);
            worker.jobs.try_send(job).is_ok()
        })
    }

    /// The thread of this place. Where none can be started now, perhaps the next job's can: a machine has no thread left for a moment.
    fn worker<'a>(&self, number: usize, place: &'a OnceLock<Worker>) -> Option<&'a Worker> {
        if place.get().is_none() {
            // one that somebody else started in the same moment stays; this one ends with its queue
            let _ = place.set(self.start(number)?);
        }
        place.get()
    }

    fn start(&self, number: usize) -> Option<Worker> {
        let (jobs, waiting) = sync_channel(QUEUE);
        let pending = Arc::new(AtomicUsize::new(0));
        let counted = pending.clone();
        let thread = std::thread::Builder::new().name(format!("{}-{number}", self.name)).stack_size(self.stack_bytes);
        let started = thread.spawn(move || work(&waiting, &counted));
        let lacked = self.lacks.swap(started.is_err(), Ordering::Relaxed);
        if let Err(error) = &started
            && !lacked
        {
            tracing::error!(%error, "no thread could be started for grammars");
        }
        started.is_ok().then_some(Worker { jobs, pending })
    }
}

fn work(jobs: &Receiver<Job>, pending: &AtomicUsize) {
    loop {
        match jobs.recv_timeout(IDLE_WAIT) {
            Ok(job) => {
                // whoever waits for a job that panicked sees that its result will not come
                drop(guarded(|| {
                    job();
                    Ok(())
                }));
                pending.fetch_sub(1, Ordering::Relaxed);
            }
            Err(RecvTimeoutError::Timeout) => (),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A job that lasts until it is let go.
    fn stone(gate: &Arc<AtomicBool>) -> Job {
        let gate = gate.clone();
        Box::new(move || {
            while !gate.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
        })
    }

    impl Workers {
        /// Keeps every thread busy until the gate opens.
        pub fn hold(&self, gate: &Arc<AtomicBool>) {
            for (pace, count) in [(Pace::Quick, QUICK_THREADS), (Pace::Slow, SLOW_THREADS)] {
                assert!((0..count).all(|_| self.submit(pace, stone(gate))));
            }
        }
    }

    /// Is a cheap job done now?
    fn goes_on(workers: &Workers) -> bool {
        let (done, told) = sync_channel(1);
        assert!(workers.submit(Pace::Quick, Box::new(move || done.try_send(()).unwrap())));
        told.recv_timeout(Duration::from_secs(60)).is_ok()
    }

    #[test]
    fn a_cheap_mask_waits_for_no_slow_one() {
        let (workers, gate) = (Workers::default(), Arc::new(AtomicBool::new(false)));
        // known to be slow, many more than there are threads; and some of which nobody knew
        let slow = (0..100).all(|_| workers.submit(Pace::Slow, stone(&gate)));
        let unknown = (2..QUICK_THREADS).all(|_| workers.submit(Pace::Quick, stone(&gate)));
        assert!(slow && unknown && goes_on(&workers) && goes_on(&workers));
        gate.store(true, Ordering::Relaxed);
    }

    #[test]
    fn threads_that_could_not_be_started_once_are_started_later() {
        let (mut lane, gate) = (Lane::new("test", 2), Arc::new(AtomicBool::new(false)));
        lane.stack_bytes = 1 << 60;
        assert!(!lane.submit(Box::new(|| ())), "no machine has such a stack");
        lane.stack_bytes = STACK_BYTES;
        assert!(lane.submit(stone(&gate)));
        lane.stack_bytes = 1 << 60;
        assert!(lane.submit(stone(&gate)), "it waits behind the other");
        lane.stack_bytes = STACK_BYTES;
        let (done, told) = sync_channel(1);
        assert!(lane.submit(Box::new(move || done.try_send(()).unwrap())));
        assert!(told.recv_timeout(Duration::from_secs(60)).is_ok(), "it has a thread of its own");
        gate.store(true, Ordering::Relaxed);
    }

    #[test]
    fn a_job_that_panics_takes_no_thread_along_and_a_full_lane_works_on() {
        let (workers, gate) = (Workers::default(), Arc::new(AtomicBool::new(false)));
        for _ in 0..2 * QUICK_THREADS {
            assert!(workers.submit(Pace::Quick, Box::new(|| std::panic::resume_unwind(Box::new("as told")))));
        }
        for _ in 0..2 * QUICK_THREADS {
            assert!(workers.submit(Pace::Quick, stone(&gate)));
        }
        gate.store(true, Ordering::Relaxed);
        assert!(goes_on(&workers));
    }
}
