//! Writes the newest of many values from a thread of its own, so that a full pipe or a slow disk never holds a tick (I4).

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::short_slice;

/// The caller's end: what was put and not yet written is replaced.
#[derive(Debug)]
pub struct Latest {
    slot: Arc<(Mutex<Option<Numbered>>, Condvar)>,
    written: Written,
}

type Numbered = (u64, Vec<u8>);

/// How far the writing is, for whoever waits for it.
#[derive(Debug, Clone)]
pub struct Written {
    /// How many were put, and up to which of them all is written or was replaced.
    put: Arc<AtomicU64>,
    written: watch::Receiver<u64>,
}

impl Latest {
    /// Starts the thread; `write` may block. The thread lives as long as the process.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(name: &str, mut write: impl FnMut(Vec<u8>) + Send + 'static) -> io::Result<Self> {
        let slot: Arc<(Mutex<Option<Numbered>>, Condvar)> = Arc::default();
        let taken = Arc::clone(&slot);
        let (done, written) = watch::channel(0);
        let run = move || {
            // a verdict is no use before it is told
            short_slice::ask_or_log();
            loop {
                let guard = taken.0.lock().unwrap_or_else(PoisonError::into_inner);
                let mut guard =
                    taken.1.wait_while(guard, |slot| slot.is_none()).unwrap_or_else(PoisonError::into_inner);
                let value = guard.take();
                drop(guard);
                if let Some((number, value)) = value {
                    write(value);
                    done.send_replace(number);
                }
            }
        };
        std::thread::Builder::new().name(name.to_owned()).spawn(run)?;
        Ok(Self { slot, written: Written { put: Arc::default(), written } })
    }

    /// Replaces what waits to be written. Never blocks for longer than a move.
    pub fn put(&mut self, value: Vec<u8>) {
        let number = self.written.put.fetch_add(1, Ordering::AcqRel) + 1;
        *self.slot.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((number, value));
        self.slot.1.notify_one();
    }

    /// See [`Written::settled`].
    pub fn written(&self) -> &Written {
        &self.written
    }
}

impl Written {
    /// Waits until what was put last is written, or its writing has failed; false after `max`.
    pub async fn settled(&self, max: Duration) -> bool {
        let (mut written, put) = (self.written.clone(), self.put.load(Ordering::Acquire));
        let done = written.wait_for(|written| *written >= put);
        matches!(tokio::time::timeout(max, done).await, Ok(Ok(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[tokio::test]
    async fn what_was_put_last_is_settled_when_it_is_written_and_no_sooner() {
        let (go, may_go) = mpsc::channel::<()>();
        let (wrote, written) = mpsc::channel();
        let slow = move |value| {
            may_go.recv().unwrap();
            wrote.send(value).unwrap();
        };
        let mut latest = Latest::start("test", slow).unwrap();
        let (soon, long) = (Duration::from_millis(20), Duration::from_secs(40));
        let writing = latest.written().clone();
        assert!(writing.settled(soon).await, "nothing was put");
        latest.put(vec![1]);
        assert!(!writing.settled(soon).await);
        latest.put(vec![2]);
        go.send(()).unwrap();
        assert!(!writing.settled(soon).await, "only what was put first is written");
        go.send(()).unwrap();
        assert!(writing.settled(long).await);
        assert_eq!(written.iter().take(2).collect::<Vec<_>>(), [[1], [2]]);
    }
}
