//! The device queue: a thread that runs steps in the order they were handed to it, and events that say when each is done. The CPU
//! needs no such queue to compute; it has one so that waiting for a device is the same code, with the same hazard (S2) and the same
//! cure, on a machine without one: an event is asked, never waited for without a deadline (E1).

mod event;
mod model;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

pub use event::Event;
pub use model::QueuedModel;

use crate::waits::this_tid;

/// An idle queue turns at least this often.
const IDLE: Duration = Duration::from_millis(500);
/// Steps that may be under way at once.
const DEPTH: usize = 1;

type Job = Box<dyn FnOnce() + Send>;

/// A queue and its thread, which ends when the last clone is dropped and the last job done.
#[derive(Debug, Clone)]
pub struct DeviceQueue {
    jobs: SyncSender<Job>,
    stick: Arc<AtomicBool>,
    tid: Arc<AtomicU64>,
}

/// Why a job was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    #[error("the device's queue is full")]
    Full,
    #[error("the device's thread has ended")]
    Ended,
}

impl DeviceQueue {
    /// Starts a queue's thread.
    ///
    /// # Errors
    /// What the system says.
    pub fn start() -> std::io::Result<Self> {
        let (jobs, waiting) = sync_channel(DEPTH);
        let tid = Arc::new(AtomicU64::new(0));
        let told = tid.clone();
        let body = move || {
            told.store(this_tid(), Ordering::Relaxed);
            run(&waiting);
        };
        thread::Builder::new().name("device".into()).spawn(body)?;
        Ok(Self { jobs, stick: Arc::default(), tid })
    }

    /// Hands a job over; never blocks. A job that panics is done too, and its event says so.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn submit<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Result<Event<T>, QueueError> {
        use std::sync::mpsc::TrySendError::{Disconnected, Full};
        let event = Event::new();
        let (ours, stick, waiter) = (event.clone(), self.stick.clone(), thread::current());
        let job = move || {
            let result = catch_unwind(AssertUnwindSafe(job));
            ours.finish(result, stick.load(Ordering::Relaxed), &waiter);
        };
        match self.jobs.try_send(Box::new(job)) {
            Ok(()) => Ok(event),
            Err(Full(_)) => Err(QueueError::Full),
            Err(Disconnected(_)) => Err(QueueError::Ended),
        }
    }

    /// The device's thread, as `/proc` knows it; 0 before it runs.
    pub fn tid(&self) -> u64 {
        self.tid.load(Ordering::Relaxed)
    }

    /// From now on no event ever says that it is done, whatever the device does (S2).
    pub fn stick(&self) {
        self.stick.store(true, Ordering::Relaxed);
    }
}

fn run(waiting: &Receiver<Job>) {
    loop {
        match waiting.recv_timeout(IDLE) {
            Ok(job) => job(),
            Err(RecvTimeoutError::Timeout) => (),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::waits::Patience;

    fn result<T>(event: &Event<T>, allowed: Duration) -> Option<thread::Result<T>> {
        let mut patience = Patience::new(Some(allowed));
        loop {
            if let Some(result) = event.query() {
                return Some(result);
            }
            if !patience.turn() {
                return None;
            }
        }
    }

    #[test]
    fn jobs_run_in_order_elsewhere_and_a_panic_is_a_result() {
        let queue = DeviceQueue::start().unwrap();
        let caller = thread::current().id();
        let event = queue.submit(move || thread::current().id() != caller).unwrap();
        assert!(result(&event, Duration::from_secs(20)).unwrap().unwrap());
        assert!(event.query().is_none(), "a result is given once");
        let event = queue.submit(|| std::panic::resume_unwind(Box::new("as told"))).unwrap();
        assert!(result::<()>(&event, Duration::from_secs(20)).unwrap().is_err());
        let event = queue.submit(|| 7).unwrap();
        assert_eq!(result(&event, Duration::from_secs(20)).unwrap().unwrap(), 7, "it lives on");
    }

    #[test]
    fn fault_f2_an_event_that_sticks_ends_the_wait_at_its_deadline() {
        let queue = DeviceQueue::start().unwrap();
        queue.stick();
        let event = queue.submit(|| 7).unwrap();
        assert!(result(&event, Duration::from_millis(50)).is_none());
    }
}
