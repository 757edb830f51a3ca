//! For how long whoever sends or reads is waited for. A rule that only asks for something now and then is kept by a byte a minute, for ever: so
//! what moves buys the time that may be waited next, at a least rate, and no more than at the beginning is ever left. Reads the clock.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep};

/// Slower than any client that means it, and than a modem; Apache's `mod_reqtimeout` asks for the same.
const BYTES_PER_S_MIN: u64 = 500;

/// What is left of it.
#[derive(Debug)]
pub struct Patience {
    max: Duration,
    left: Duration,
    /// Since when is nothing moving, and until when may it be so?
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl Patience {
    /// All of it.
    pub fn of(max: Duration) -> Self {
        Self { max, left: max, waiting: None }
    }

    /// So many bytes have moved.
    pub fn rewarded(&mut self, bytes: usize) {
        let waited = self.waiting.take().map(|(since, _)| since.elapsed()).unwrap_or_default();
        let earned = Duration::from_millis((bytes as u64).saturating_mul(1_000) / BYTES_PER_S_MIN);
        self.left = self.left.saturating_sub(waited).saturating_add(earned).min(self.max);
    }

    /// Nothing moves; ready when none of it is left.
    pub fn poll_spent(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let left = self.left;
        let (_, end) = self.waiting.get_or_insert_with(|| (Instant::now(), Box::pin(sleep(left))));
        end.as_mut().poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;

    const MAX: Duration = Duration::from_secs(60);

    /// Is it at its end within this time?
    async fn spent(patience: &mut Patience, within: Duration) -> bool {
        tokio::time::timeout(within, poll_fn(|cx| patience.poll_spent(cx))).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn who_moves_enough_is_waited_for_and_a_byte_a_minute_is_not_enough() {
        let mut patience = Patience::of(MAX);
        let most = MAX.mul_f64(0.9);
        for _ in 0..9 {
            assert!(!spent(&mut patience, most).await);
            patience.rewarded(30_000);
        }
        assert!(!spent(&mut patience, most).await, "much more than that buys no more than the beginning had");
        patience.rewarded(1);
        assert!(spent(&mut patience, MAX.mul_f64(0.2)).await, "a tenth was left");
    }

    #[tokio::test(start_paused = true)]
    async fn who_moves_a_little_less_than_enough_is_given_up_in_the_end() {
        let mut patience = Patience::of(MAX);
        let began = Instant::now();
        while !spent(&mut patience, Duration::from_secs(10)).await {
            patience.rewarded(4_000);
            assert!(began.elapsed() < 10 * MAX, "never");
        }
        assert!(began.elapsed() > 4 * MAX, "{:?}", began.elapsed());
    }
}
