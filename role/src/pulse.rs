//! Whether a program's executor runs (B9, D2): whoever stands outside of it asks it to beat, and sees for how long it has not. Nobody who is not
//! asked wakes up for it. One question, the clock, and the answer to a probe.

use std::time::{Duration, Instant};

use axum::{
    http::StatusCode,
    response::{IntoResponse, Response},
};
use tokio::sync::watch;

/// What a beat is waited for before it counts as one that has yet to come; the executor may be in the middle of its work.
const BEAT_WAIT: Duration = Duration::from_millis(200);

/// The heart of an executor.
#[derive(Debug)]
pub struct Pulse {
    /// Since when a beat is waited for, if one is.
    asked: watch::Sender<Option<Instant>>,
    silence_max: Duration,
}

impl Pulse {
    /// A pulse that is missed where it was asked for and has not come for `silence_max`.
    pub fn new(silence_max: Duration) -> Self {
        Pulse { asked: watch::Sender::new(None), silence_max }
    }

    /// Beats when asked, until dropped; to be polled by what is looked after.
    pub async fn beat(&self) {
        let mut questions = self.asked.subscribe();
        // it ends with the sender, which is our own
        while questions.wait_for(Option::is_some).await.map(drop).is_ok() {
            self.asked.send_replace(None);
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
        // whoever asked first is waited for since then
        self.asked.send_if_modified(|asked| {
            let asks = asked.is_none();
            asked.get_or_insert_with(Instant::now);
            asks
        });
        let mut answers = self.asked.subscribe();
        let beat = answers.wait_for(Option::is_none);
        _ = tokio::time::timeout(BEAT_WAIT.min(self.silence_max / 2), beat).await;
        let asked = *self.asked.borrow();
        asked.map(|at| at.elapsed())
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
