//! Whether the executor runs (B9): it beats, and whoever stands outside of it sees how long ago that was. One atomic and the clock.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Beats within the longest silence that is still fine.
const BEATS: u32 = 10;

/// The last beat of an executor.
pub struct Pulse {
    started: Instant,
    beat_ms: AtomicU64,
    silence_max: Duration,
}

impl Pulse {
    /// A pulse that is missed after `silence_max`; its first beat is now.
    pub fn new(silence_max: Duration) -> Self {
        Pulse { started: Instant::now(), beat_ms: AtomicU64::new(0), silence_max }
    }

    /// Beats until dropped; to be polled by what is looked after.
    pub async fn beat(&self) {
        loop {
            self.beat_ms.store(self.now_ms(), Ordering::Relaxed);
            tokio::time::sleep(self.silence_max / BEATS).await;
        }
    }

    /// For how long it has been silent, if that is too long.
    pub fn missed(&self) -> Option<Duration> {
        let silence = Duration::from_millis(self.now_ms().saturating_sub(self.beat_ms.load(Ordering::Relaxed)));
        (silence > self.silence_max).then_some(silence)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}
