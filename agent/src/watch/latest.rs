//! Writes the newest of many values from a thread of its own, so that a full pipe or a slow disk never holds a tick (I4).

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::short_slice;

/// The caller's end: what was put and not yet written is replaced.
#[derive(Debug)]
pub struct Latest {
    slot: Arc<(Mutex<Option<Numbered>>, Condvar)>,
    /// How many were put, and up to which of them all is written or was replaced.
    put: u64,
    written: watch::Receiver<u64>,
}

type Numbered = (u64, Vec<u8>);

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
        Ok(Self { slot, put: 0, written })
    }

    /// Replaces what waits to be written. Never blocks for longer than a move.
    pub fn put(&mut self, value: Vec<u8>) {
        self.put += 1;
        *self.slot.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((self.put, value));
        self.slot.1.notify_one();
    }

    /// Waits until what was put last is written, or its writing has failed; false after `max`.
    pub async fn settled(&self, max: Duration) -> bool {
        let mut written = self.written.clone();
        let done = written.wait_for(|written| *written >= self.put);
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
        assert!(latest.settled(soon).await, "nothing was put");
        latest.put(vec![1]);
        assert!(!latest.settled(soon).await);
        latest.put(vec![2]);
        go.send(()).unwrap();
        assert!(!latest.settled(soon).await, "only what was put first is written");
        go.send(()).unwrap();
        assert!(latest.settled(long).await);
        assert_eq!(written.iter().take(2).collect::<Vec<_>>(), [[1], [2]]);
    }
}
