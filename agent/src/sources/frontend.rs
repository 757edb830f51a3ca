//! The front-end probe: does the engine's HTTP port answer anything at all? Never evidence of progress (V2).
//!
//! One question a second, or every five while nothing is in doubt; at most one outstanding, each on a connection of its own. The question is
//! `/health`, whose 503 says that an engine cannot serve yet. Where that is a generation (SGLang: a token, for which it waits 20 s), its
//! silence is the engine's and not the front end's, and each question that is given up stays in the engine's queue (sglang #35884): such an
//! engine is asked for its models instead, which no scheduler is needed for.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{StatusCode, Uri};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use vitals::engine_metrics::EngineKind;
use vitals::observation::{FrontendObs, Signal};

use super::clock::monotonic_ms;
use super::elsewhere::Elsewhere;
use super::get::{Get, GetError, with_path};
use super::haste::{Haste, Rounds};
use super::scrape::KnownEngine;
use super::tree::EngineProcess;
use crate::ticker::Timer;

const PROBES: Rounds = Rounds { calm: Duration::from_secs(5), hurried: Duration::from_secs(1) };
const PROBE_DEADLINE: Duration = Duration::from_secs(2);

/// The probe of one engine process; it ends when dropped.
#[derive(Debug)]
pub struct FrontendProbe {
    state: Arc<Mutex<Signal<FrontendObs>>>,
    _task: AbortOnDropHandle<()>,
}

impl FrontendProbe {
    /// Starts probing an engine, whose kind the scraper may come to know, and which may be elsewhere. Needs a tokio runtime.
    pub fn spawn(engine_url: &Uri, haste: Haste, kind: KnownEngine, engine: Option<EngineProcess>) -> Self {
        let state = Arc::new(Mutex::new(Signal::default()));
        let who = (Asker::new(engine_url, kind), Elsewhere::of(engine));
        let task = AbortOnDropHandle::new(tokio::spawn(probe_forever(who, Arc::clone(&state), haste)));
        Self { state, _task: task }
    }

    /// The newest result.
    pub fn latest(&self) -> Signal<FrontendObs> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn probe_forever(
    (mut asker, mut elsewhere): (Asker, Elsewhere),
    state: Arc<Mutex<Signal<FrontendObs>>>,
    haste: Haste,
) {
    let mut known: Option<FrontendObs> = None;
    let mut timer = Timer::start();
    loop {
        let began = Instant::now();
        let asked_ms = monotonic_ms();
        let answer = asker.ask().await;
        let mut next = judge(known, asked_ms, answer.as_ref().copied());
        // one that has answered here is here
        if !next.ever_answered && matches!(answer, Err(GetError::Refused { .. })) {
            next.elsewhere = elsewhere.is_there_another(&asker.health.uri).await;
        }
        known = Some(next);
        *state.lock().unwrap_or_else(PoisonError::into_inner) = Signal::at(monotonic_ms(), next);
        haste.rest(began, PROBES, &mut timer).await;
    }
}

/// Asks the question that this engine's front end answers by itself.
#[derive(Debug)]
struct Asker {
    health: Get,
    models: Get,
    kind: KnownEngine,
    /// `/health` has said that the engine can serve.
    came_up: bool,
    /// `/health` was silent while the front end answered.
    health_waits: bool,
}

impl Asker {
    fn new(engine_url: &Uri, kind: KnownEngine) -> Self {
        let get =
            |path| Get { uri: with_path(engine_url, path), accept: "*/*", deadline: PROBE_DEADLINE, body_bytes_max: 0 };
        Self { health: get("/health"), models: get("/v1/models"), kind, came_up: false, health_waits: false }
    }

    /// What `/health` said, or nothing where another path answered.
    async fn ask(&mut self) -> Result<Option<u16>, GetError> {
        if self.leaves_health_alone() {
            return self.models.status().await.map(|_| None);
        }
        match self.health.status().await {
            Ok(status) => {
                self.came_up |= status != StatusCode::SERVICE_UNAVAILABLE;
                Ok(Some(status.as_u16()))
            }
            Err(GetError::Deadline { .. }) if !self.health_is_front_ends() => {
                let answer = self.models.status().await.map(|_| None);
                self.health_waits = answer.is_ok();
                answer
            }
            Err(error) => Err(error),
        }
    }

    /// Would `/health` ask the engine? SGLang's answers by itself only while it starts.
    fn leaves_health_alone(&self) -> bool {
        let generates = self.came_up && self.kind.get() == Some(&EngineKind::Sglang);
        generates || (self.health_waits && !self.health_is_front_ends())
    }

    /// Is it known that `/health` never waits for a step?
    fn health_is_front_ends(&self) -> bool {
        matches!(self.kind.get(), Some(EngineKind::Truebeat | EngineKind::Vllm | EngineKind::TensorRtLlm))
    }
}

/// One probe's result laid over what was known. A refused port and a silent one are both no answer; silence counts from the
/// moment the first unanswered probe was sent.
fn judge(known: Option<FrontendObs>, asked_ms: u64, answer: Result<Option<u16>, &GetError>) -> FrontendObs {
    let silent_since = known.and_then(|known| known.silent_since_ms);
    let ever_answered = known.is_some_and(|known| known.ever_answered);
    match answer {
        Ok(status) => {
            FrontendObs { answers: true, status, silent_since_ms: None, ever_answered: true, elsewhere: false }
        }
        Err(_) => FrontendObs {
            answers: false,
            status: None,
            silent_since_ms: silent_since.or(Some(asked_ms)),
            ever_answered,
            elsewhere: false,
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
        let third = judge(Some(second), 3_100, Ok(Some(503)));
        assert_eq!((third.answers, third.status, third.silent_since_ms), (true, Some(503), None));
        let fourth = judge(Some(third), 4_100, Err(&refused));
        assert_eq!((fourth.silent_since_ms, fourth.ever_answered), (Some(4_100), true));
    }
}
