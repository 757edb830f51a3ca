//! Whether a program's executor runs (B9, D2): whoever stands outside of it asks it to beat, and sees for how long it has not. Nobody who is not
//! asked wakes up for it. One atomic, the clock, two bells, and the answer to a probe.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use axum::{
    http::StatusCode,
    response::{IntoResponse, Response},
};
use tokio::sync::Notify;

/// What a beat is waited for before it counts as one that has yet to come; the executor may be in the middle of its work.
const BEAT_WAIT: Duration = Duration::from_millis(200);
/// Nobody waits for a beat.
const ANSWERED: u64 = 0;

/// The heart of an executor.
#[derive(Debug)]
pub struct Pulse {
    started: Instant,
    /// Since when a beat is waited for, in milliseconds after `started` and one more; or [`ANSWERED`].
    asked: AtomicU64,
    question: Notify,
    answer: Notify,
    silence_max: Duration,
}

impl Pulse {
    /// A pulse that is missed where it was asked for and has not come for `silence_max`.
    pub fn new(silence_max: Duration) -> Self {
        let (question, answer) = (Notify::new(), Notify::new());
        Pulse { started: Instant::now(), asked: AtomicU64::new(ANSWERED), question, answer, silence_max }
    }

    /// Beats when asked, until dropped; to be polled by what is looked after.
    pub async fn beat(&self) {
        loop {
            self.question.notified().await;
            self.asked.store(ANSWERED, Ordering::Release);
            self.answer.notify_waiters();
        }
    }

    /// What `/livez` says: 200, or 503 with for how long nothing has run. Asks for a beat and waits for it a moment, so it must be polled by somebody
    /// else than who beats.
    pub async fn answer(&self) -> Response {
        match self.silence().await {
            None => "ok\n".into_response(),
            Some(silence) if silence <= self.silence_max => {
                format!("ok, but the executor was asked {} ms ago and has not answered yet\n", silence.as_millis())
                    .into_response()
            }
            Some(silence) => {
                let words = format!(
                    "the executor was asked {} s ago and has not run since: a call blocks it\n",
                    silence.as_secs()
                );
                (StatusCode::SERVICE_UNAVAILABLE, words).into_response()
            }
        }
    }

    /// For how long a beat has been waited for in vain; `None` where it came.
    async fn silence(&self) -> Option<Duration> {
        let answer = self.answer.notified();
        tokio::pin!(answer);
        // before the question: an answer between the two is not missed
        answer.as_mut().enable();
        let now = self.now_ms() + 1;
        // who asked first is waited for since then
        _ = self.asked.compare_exchange(ANSWERED, now, Ordering::AcqRel, Ordering::Acquire);
        self.question.notify_one();
        if tokio::time::timeout(BEAT_WAIT.min(self.silence_max / 2), answer).await.is_ok() {
            return None;
        }
        match self.asked.load(Ordering::Acquire) {
            ANSWERED => None,
            asked => Some(Duration::from_millis((self.now_ms() + 1).saturating_sub(asked))),
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SILENCE_MAX: Duration = Duration::from_secs(2);

    async fn said(pulse: &Pulse) -> (u16, String) {
        let answer = pulse.answer().await;
        let status = answer.status().as_u16();
        let body = axum::body::to_bytes(answer.into_body(), 1 << 10).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn a_heart_that_nobody_polls_is_missed_after_its_time_and_well_when_it_goes_on() {
        let pulse = Pulse::new(SILENCE_MAX);
        let (status, words) = said(&pulse).await;
        assert!(status == 200 && words.contains("not answered yet"), "{status} {words}");
        std::thread::sleep(SILENCE_MAX);
        let (status, words) = said(&pulse).await;
        assert!(status == 503 && words.contains("a call blocks it"), "{status} {words}");
        let asks = async {
            // the question that it heard first was an old one
            said(&pulse).await;
            said(&pulse).await
        };
        let answer = tokio::select! { answer = asks => answer, () = pulse.beat() => unreachable!() };
        assert_eq!(answer, (200, "ok\n".to_owned()));
    }

    #[tokio::test]
    async fn who_was_not_asked_for_long_is_not_silent() {
        let pulse = Pulse::new(SILENCE_MAX);
        let asks = async {
            said(&pulse).await;
            std::thread::sleep(SILENCE_MAX * 2);
            said(&pulse).await
        };
        let answer = tokio::select! { answer = asks => answer, () = pulse.beat() => unreachable!() };
        assert_eq!(answer, (200, "ok\n".to_owned()), "nobody asked");
    }
}
