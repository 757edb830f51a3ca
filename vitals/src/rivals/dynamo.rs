//! NVIDIA Dynamo's two: the canary of its runtime, and the liveness probe that its operator writes.

use super::inside::{Deliveries, Poll, answers_when_idle, is_up, owed};
use super::{Acts, Alarm, Rule};
use crate::observation::{Ms, Observation};

/// `HealthCheckManager` (lib/runtime/src/health_check.rs, commit 01a13f0): ten seconds (`DYN_CANARY_WAIT_TIME`) after the last successful
/// response chunk of an endpoint a canary request is sent; unless its first response comes within three seconds
/// (`DYN_HEALTH_CHECK_REQUEST_TIMEOUT`) the endpoint is NotReady, at the first miss. Any successful chunk of any request makes it
/// Ready and starts the wait anew, so that a half-dead worker which still serves one stream stays Ready.
///
/// An observation does not hold the canary: where clients wait, it is answered when any of them gets something within its three
/// seconds; where nobody waits, when the process is not stopped. vLLM's and TensorRT-LLM's decode workers have no canary at all
/// (dynamo #11083); it is given to them here.
#[derive(Debug, Default)]
pub struct Canary {
    deliveries: Deliveries,
    /// When the wait began.
    quiet_since_ms: Option<Ms>,
    sent_ms: Option<Ms>,
    not_ready: bool,
}

const CANARY_WAIT_MS: Ms = 10_000;
const CANARY_TIMEOUT_MS: Ms = 3_000;

impl Canary {
    fn look(&mut self, now_ms: Ms, obs: &Observation) -> bool {
        if self.deliveries.moved(obs) || !is_up(obs) {
            (self.quiet_since_ms, self.sent_ms, self.not_ready) = (Some(now_ms), None, false);
        }
        let waits_since_ms = *self.quiet_since_ms.get_or_insert(now_ms);
        if let Some(sent_ms) = self.sent_ms {
            if !owed(obs) && answers_when_idle(obs) {
                (self.sent_ms, self.not_ready) = (None, false);
            } else if now_ms.saturating_sub(sent_ms) >= CANARY_TIMEOUT_MS {
                (self.sent_ms, self.not_ready) = (None, true);
            }
        } else if now_ms.saturating_sub(waits_since_ms) >= CANARY_WAIT_MS {
            // the next wait begins when this one is sent, whatever becomes of it
            (self.sent_ms, self.quiet_since_ms) = (Some(now_ms), Some(now_ms));
        }
        self.not_ready
    }
}

impl Rule for Canary {
    fn name(&self) -> &'static str {
        "dynamo-canary"
    }

    fn about(&self) -> &'static str {
        "Dynamo, 10 s without a chunk, then a canary unanswered for 3 s; one miss flips (health_check.rs)"
    }

    fn acts(&self) -> Acts {
        Acts::Fences
    }

    fn step(&mut self, now_ms: Ms, obs: &Observation) -> Alarm {
        if self.look(now_ms, obs) { Alarm::Suspect } else { Alarm::Quiet }
    }
}

/// The liveness probe of a worker pod (deploy/operator/internal/dynamo/component_worker.go before runtime 1.5; dynamo #14735): `/live`
/// every 5 s, timeout 4 s, `failureThreshold: 1`; `/live` answers what `/health` does, so that a canary that failed is a death
/// sentence, and so is a front end that does not answer for 4 s because the process compiles.
///
/// The front end's latency is not in an observation: it counts as silent once it has not answered for 4 s.
#[derive(Debug)]
pub struct Liveness {
    canary: Canary,
    poll: Poll,
    fired: bool,
}

const LIVE_PERIOD_MS: Ms = 5_000;
const LIVE_TIMEOUT_MS: Ms = 4_000;

impl Default for Liveness {
    fn default() -> Self {
        Self { canary: Canary::default(), poll: Poll::every(LIVE_PERIOD_MS), fired: false }
    }
}

impl Rule for Liveness {
    fn name(&self) -> &'static str {
        "dynamo-liveness"
    }

    fn about(&self) -> &'static str {
        "Dynamo's operator, /live every 5 s, timeout 4 s, one failure kills; /live = canary (component_worker.go)"
    }

    fn acts(&self) -> Acts {
        Acts::Evicts
    }

    fn step(&mut self, now_ms: Ms, obs: &Observation) -> Alarm {
        let not_ready = self.canary.look(now_ms, obs);
        if self.poll.due(now_ms) {
            let silent_since_ms = obs.frontend.value.and_then(|frontend| frontend.silent_since_ms);
            let silent = silent_since_ms.is_some_and(|since| now_ms.saturating_sub(since) >= LIVE_TIMEOUT_MS);
            // before the first answer the start-up probe is in charge, which waits two hours
            self.fired = is_up(obs) && (not_ready || silent);
        }
        if self.fired { Alarm::Evict } else { Alarm::Quiet }
    }
}
