//! Writes the newest of many values from a thread of its own, so that a full pipe or a slow disk never holds a tick (I4).

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// The caller's end: what was put and not yet written is replaced.
#[derive(Debug, Clone)]
pub struct Latest {
    slot: Arc<(Mutex<Option<Vec<u8>>>, Condvar)>,
}

impl Latest {
    /// Starts the thread; `write` may block. The thread lives as long as the process.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(name: &str, mut write: impl FnMut(Vec<u8>) + Send + 'static) -> io::Result<Self> {
        let slot: Arc<(Mutex<Option<Vec<u8>>>, Condvar)> = Arc::default();
        let taken = Arc::clone(&slot);
        let run = move || {
            loop {
                let guard = taken.0.lock().unwrap_or_else(PoisonError::into_inner);
                let mut guard =
                    taken.1.wait_while(guard, |slot| slot.is_none()).unwrap_or_else(PoisonError::into_inner);
                let value = guard.take();
                drop(guard);
                value.into_iter().for_each(&mut write);
            }
        };
        std::thread::Builder::new().name(name.to_owned()).spawn(run)?;
        Ok(Self { slot })
    }

    /// Replaces what waits to be written. Never blocks for longer than a move.
    pub fn put(&self, value: Vec<u8>) {
        *self.slot.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
        self.slot.1.notify_one();
    }
}
