//! Whether a program's executor runs (B9, D2): it beats, and whoever stands outside of it sees how long ago that was. One atomic and the clock, and
//! the answer to a probe.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use axum::{
    http::StatusCode,
    response::{IntoResponse, Response},
};

/// Beats within the longest silence that is still fine.
const BEATS: u32 = 10;

/// The last beat of an executor.
#[derive(Debug)]
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

    /// What `/livez` says: 200, or 503 with for how long nothing has run.
    pub fn answer(&self) -> Response {
        match self.missed() {
            None => "ok".into_response(),
            Some(silence) => {
                let words = format!("the executor has not run for {} s: a call blocks it\n", silence.as_secs());
                (StatusCode::SERVICE_UNAVAILABLE, words).into_response()
            }
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}
