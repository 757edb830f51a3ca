//! The launcher's disk: one access after another, none awaited for long. A disk that hangs must not hold who answers the probes (I6).

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;

/// For how long one access is awaited: an engine is not given up for a disk that is busy for a moment, nor kept by one when all is to end.
const WAIT: Duration = Duration::from_secs(1);

/// Whose turn it is. An access that hangs keeps the turn: what it writes late must not come after what is newer, and no thread is to join it.
#[derive(Debug, Clone, Default)]
pub struct Disk(Arc<Mutex<()>>);

impl Disk {
    /// Does this on a thread of its own. Needs a runtime.
    ///
    /// # Errors
    /// As `work`; `TimedOut` where it, or one before it, has not come back in time. What was begun goes on.
    pub async fn within<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let in_turn = async {
            let turn = Arc::clone(&self.0).lock_owned().await;
            let work = move || {
                let done = work();
                drop(turn);
                done
            };
            tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
        };
        let slow = |_| io::Error::new(io::ErrorKind::TimedOut, "the disk does not answer");
        tokio::time::timeout(WAIT, in_turn).await.map_err(slow)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[tokio::test]
    async fn d10_who_hangs_is_not_awaited_and_nobody_comes_before_it() {
        let disk = Disk::default();
        assert_eq!(disk.within(|| Ok(7)).await.unwrap(), 7);
        let (release, held) = channel::<()>();
        let hangs = disk.within(move || held.recv().map_err(io::Error::other)).await;
        assert_eq!(hangs.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let (done, is_done) = channel();
        let next = disk.within(move || done.send(()).map_err(io::Error::other)).await;
        assert_eq!(next.unwrap_err().kind(), io::ErrorKind::TimedOut);
        release.send(()).unwrap();
        assert!(is_done.recv().is_err(), "who gave up waiting for its turn has not begun");
        while disk.within(|| Ok(())).await.is_err() {}
    }
}
