//! The front-end probe: does the engine's HTTP port answer anything at all? Never evidence of progress (V2).
//!
//! One `GET /health` a second, or every five while nothing is in doubt; at most one outstanding, each on a connection of its own.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::Uri;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use vitals::observation::{FrontendObs, Signal};

use super::clock::monotonic_ms;
use super::get::{Get, GetError, with_path};
use super::haste::{Haste, Rounds};

const PROBES: Rounds = Rounds { calm: Duration::from_secs(5), hurried: Duration::from_secs(1) };
const PROBE_DEADLINE: Duration = Duration::from_secs(2);

/// The probe of one engine process; it ends when dropped.
#[derive(Debug)]
pub struct FrontendProbe {
    state: Arc<Mutex<Signal<FrontendObs>>>,
    _task: AbortOnDropHandle<()>,
}

impl FrontendProbe {
    /// Starts probing. Needs a tokio runtime.
    pub fn spawn(engine_url: &Uri, haste: Haste) -> Self {
        let state = Arc::new(Mutex::new(Signal::default()));
        let get =
            Get { uri: with_path(engine_url, "/health"), accept: "*/*", deadline: PROBE_DEADLINE, body_bytes_max: 0 };
        let task = AbortOnDropHandle::new(tokio::spawn(probe_forever(get, Arc::clone(&state), haste)));
        Self { state, _task: task }
    }

    /// The newest result.
    pub fn latest(&self) -> Signal<FrontendObs> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn probe_forever(get: Get, state: Arc<Mutex<Signal<FrontendObs>>>, haste: Haste) {
    let mut known: Option<FrontendObs> = None;
    loop {
        let began = Instant::now();
        let asked_ms = monotonic_ms();
        let answer = get.status().await;
        let next = judge(known, asked_ms, answer.as_ref().map(|status| status.as_u16()));
        known = Some(next);
        *state.lock().unwrap_or_else(PoisonError::into_inner) = Signal::at(monotonic_ms(), next);
        haste.rest(began, PROBES).await;
    }
}

/// One probe's result laid over what was known. A refused port and a silent one are both no answer; silence counts from the
/// moment the first unanswered probe was sent.
fn judge(known: Option<FrontendObs>, asked_ms: u64, answer: Result<u16, &GetError>) -> FrontendObs {
    let silent_since = known.and_then(|known| known.silent_since_ms);
    let ever_answered = known.is_some_and(|known| known.ever_answered);
    match answer {
        Ok(status) => FrontendObs { answers: true, status: Some(status), silent_since_ms: None, ever_answered: true },
        Err(_) => FrontendObs {
            answers: false,
            status: None,
            silent_since_ms: silent_since.or(Some(asked_ms)),
            ever_answered,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_counts_from_the_first_unanswered_probe_and_ends_with_any_status() {
        let refused = GetError::Refused { authority: "127.0.0.1:1".to_owned() };
        let first = judge(None, 100, Err(&refused));
        assert_eq!((first.answers, first.silent_since_ms, first.ever_answered), (false, Some(100), false));
        let second = judge(Some(first), 2_100, Err(&refused));
        assert_eq!(second.silent_since_ms, Some(100));
        let third = judge(Some(second), 3_100, Ok(503));
        assert_eq!((third.answers, third.status, third.silent_since_ms), (true, Some(503), None));
        let fourth = judge(Some(third), 4_100, Err(&refused));
        assert_eq!((fourth.silent_since_ms, fourth.ever_answered), (Some(4_100), true));
    }
}
