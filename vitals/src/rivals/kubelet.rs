//! The kubelet's liveness probe as people write it for vLLM.

use super::inside::{Poll, is_up};
use super::{Acts, Alarm, Rule};
use crate::observation::{Ms, Observation};

/// `GET /health` every 10 s, timeout 1 s, three failures in a row restart the container (`periodSeconds`, `timeoutSeconds` and
/// `failureThreshold` of the core/v1 defaults; the same in llm-d's guide). Any status from 200 to 399 is a success. Nothing is
/// counted before the first success: a start-up probe is in charge until then.
///
/// It sees `/health` and nothing else. The latency of an answer is not in an observation: an answer within the prober's own deadline
/// counts, which in recordings is 2 s. That a container that exits is restarted at once is no probe, and not part of this rule.
#[derive(Debug)]
pub struct Liveness {
    poll: Poll,
    failures: u32,
    started: bool,
}

const PERIOD_MS: Ms = 10_000;
const FAILURES: u32 = 3;

impl Default for Liveness {
    fn default() -> Self {
        Self { poll: Poll::every(PERIOD_MS), failures: 0, started: false }
    }
}

impl Rule for Liveness {
    fn name(&self) -> &'static str {
        "kubelet"
    }

    fn about(&self) -> &'static str {
        "kubelet, /health every 10 s, timeout 1 s, three failures (core/v1 defaults)"
    }

    fn acts(&self) -> Acts {
        Acts::Evicts
    }

    fn step(&mut self, now_ms: Ms, obs: &Observation) -> Alarm {
        if !is_up(obs) {
            // another container, whose start-up probe is in charge
            (self.started, self.failures) = (false, 0);
        }
        if self.poll.due(now_ms) {
            let frontend = obs.frontend.value;
            let success =
                frontend.is_some_and(|f| f.answers && f.status.is_none_or(|status| (200..400).contains(&status)));
            self.started |= success;
            self.failures = if success || !self.started { 0 } else { self.failures.saturating_add(1) };
        }
        if self.failures >= FAILURES { Alarm::Evict } else { Alarm::Quiet }
    }
}
