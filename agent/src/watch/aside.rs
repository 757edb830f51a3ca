//! What may hang, read beside the tick that wants it (I4).

use std::time::Duration;

use tokio::sync::oneshot;

/// One read at a time, on a thread that may be left behind: a read that never returns is the last of its kind.
#[derive(Debug)]
pub struct Aside<T> {
    running: Option<oneshot::Receiver<T>>,
    started_ms: Option<u64>,
}

impl<T> Default for Aside<T> {
    fn default() -> Self {
        Self { running: None, started_ms: None }
    }
}

impl<T: Send + 'static> Aside<T> {
    /// What has been read since the last call.
    pub fn take(&mut self) -> Option<T> {
        let taken = match self.running.as_mut()?.try_recv() {
            Err(oneshot::error::TryRecvError::Empty) => return None,
            taken => taken.ok(),
        };
        self.running = None;
        taken
    }

    /// The same, of a read that is waited for, so long at most. One that is late is there to be taken later.
    pub async fn take_within(&mut self, max: Duration) -> Option<T> {
        let taken = tokio::time::timeout(max, self.running.as_mut()?).await.ok()?;
        self.running = None;
        taken.ok()
    }

    /// Would [`Aside::start`] begin to read now? It does not while that goes on already, nor again after a moment.
    pub fn is_due(&self, now_ms: u64, every_ms: u64) -> bool {
        self.running.is_none() && self.started_ms.is_none_or(|at| now_ms.saturating_sub(at) >= every_ms)
    }

    /// Begins to read, if that is due. Needs a runtime.
    pub fn start(&mut self, now_ms: u64, every_ms: u64, read: impl FnOnce() -> T + Send + 'static) {
        if !self.is_due(now_ms, every_ms) {
            return;
        }
        let (tell, told) = oneshot::channel();
        tokio::task::spawn_blocking(move || _ = tell.send(read()));
        (self.running, self.started_ms) = (Some(told), Some(now_ms));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_read_that_hangs_holds_nobody_and_is_not_repeated() {
        let mut aside = Aside::<u32>::default();
        let (free, held) = std::sync::mpsc::channel::<()>();
        aside.start(0, 10, move || held.recv().map_or(1, |()| 2));
        assert_eq!(aside.take(), None);
        assert_eq!(aside.take_within(Duration::from_millis(5)).await, None, "nor is it waited for longer");
        aside.start(1_000, 10, || 3);
        assert_eq!(aside.take(), None, "one at a time");
        drop(free);
        assert_eq!(aside.take_within(Duration::from_secs(40)).await, Some(1));
        aside.start(1_009, 10, || 4);
        assert_eq!(aside.take_within(Duration::from_secs(40)).await, Some(4));
        aside.start(1_018, 10, || 5);
        assert_eq!(aside.take_within(Duration::from_secs(40)).await, None, "it was read a moment ago");
    }
}
