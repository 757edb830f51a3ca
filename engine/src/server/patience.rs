//! For how long a reader is waited for. A rule that only asks for something now and then is kept by a byte a minute, for ever: so what is
//! taken buys the time that may be waited next, at a least rate, and no more than at the beginning is ever left. Reads the clock.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

/// Slower than any client that means it, and than a modem.
const BYTES_PER_S_MIN: u64 = 500;

/// What is left of it.
#[derive(Debug)]
pub struct Patience {
    most: Duration,
    left: Duration,
    /// Since when nothing is taken, and when that has been so for too long.
    waits: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl Patience {
    /// All of it.
    pub fn of(most: Duration) -> Self {
        Self { most, left: most, waits: None }
    }

    /// For how long nothing is waited for at most.
    pub fn most(&self) -> Duration {
        self.most
    }

    /// So many bytes were taken.
    pub fn earns(&mut self, bytes: usize) {
        let waited = self.waits.take().map_or(Duration::ZERO, |(since, _)| since.elapsed());
        let earned = Duration::from_millis((bytes as u64).saturating_mul(1_000) / BYTES_PER_S_MIN);
        self.left = self.left.saturating_sub(waited).saturating_add(earned).min(self.most);
    }

    /// Nothing is taken; ready when no patience is left.
    pub fn poll_spent(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let left = self.left;
        let (_, end) = self.waits.get_or_insert_with(|| (Instant::now(), Box::pin(sleep(left))));
        end.as_mut().poll(cx)
    }
}
