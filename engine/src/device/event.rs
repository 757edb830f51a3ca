//! When a job of the device queue is done, and what it gave. An event can stick: the job ends and nobody is told (S2).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, Thread};

/// One job's event; clones are the same one.
#[derive(Debug)]
pub struct Event<T> {
    shared: Arc<Shared<T>>,
}

#[derive(Debug)]
struct Shared<T> {
    done: AtomicBool,
    result: Mutex<Option<thread::Result<T>>>,
}

impl<T> Clone for Event<T> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<T> Event<T> {
    pub(super) fn new() -> Self {
        Self { shared: Arc::new(Shared { done: AtomicBool::new(false), result: Mutex::new(None) }) }
    }

    /// The job is done; `sticks`: and nobody hears of it.
    pub(super) fn finish(&self, result: thread::Result<T>, sticks: bool, waiter: &Thread) {
        // nobody else takes this lock before `done` is set
        if let Ok(mut place) = self.shared.result.try_lock() {
            *place = Some(result);
        }
        if !sticks {
            self.shared.done.store(true, Ordering::Release);
            waiter.unpark();
        }
    }

    /// What the job gave, once it is done; as `cuEventQuery`, it never waits. The second answer is `None` again.
    pub fn query(&self) -> Option<thread::Result<T>> {
        if !self.shared.done.load(Ordering::Acquire) {
            return None;
        }
        self.shared.result.try_lock().ok()?.take()
    }

    /// Burns this thread until the event comes, as `cuEventSynchronize` does: the wait that must not be (E1), for `--guards off`.
    #[inline(never)]
    pub fn spin_for_ever(&self) {
        while !self.shared.done.load(Ordering::Acquire) {
            std::hint::spin_loop();
        }
    }
}
