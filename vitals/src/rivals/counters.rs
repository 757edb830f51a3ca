//! The rules that read `/metrics`: gonka's heartbeat, and the one that everybody writes first.

use super::{Acts, Alarm, Rule};
use crate::observation::{Ms, Observation, Signal};

/// A counter that stands still while the engine says that it holds work.
#[derive(Debug, Default)]
struct Flat {
    count: Option<f64>,
    since_ms: Option<Ms>,
}

impl Flat {
    /// For how long it has stood still. A counter that moved, in either direction, or an engine without work starts anew.
    fn look(&mut self, now_ms: Ms, count: Option<f64>, held: bool) -> Ms {
        if count != self.count || !held || count.is_none() {
            self.since_ms = None;
        }
        self.count = count;
        now_ms.saturating_sub(*self.since_ms.get_or_insert(now_ms))
    }
}

/// gonka's `runner.py` (gonka PR #1421 and #1531): `vllm:iteration_tokens_total_count` unchanged for `MLNODE_HANG_GRACE_SEC` = 120 s
/// while requests are held (running or waiting). A failed scrape is not idleness: what was held last is held still. An engine
/// without the series is not judged. That a refused connection is "dead" at once is left out: an observation does not tell
/// a refusal from a timeout.
#[derive(Debug, Default)]
pub struct Gonka {
    flat: Flat,
}

const GRACE_MS: Ms = 120_000;

impl Rule for Gonka {
    fn name(&self) -> &'static str {
        "gonka"
    }

    fn about(&self) -> &'static str {
        "gonka, iteration_tokens_total_count unchanged for 120 s while requests are held (runner.py, PR #1421)"
    }

    fn acts(&self) -> Acts {
        Acts::Evicts
    }

    fn step(&mut self, now_ms: Ms, obs: &Observation) -> Alarm {
        let metrics = obs.metrics.value.as_ref();
        let held = metrics.is_some_and(|m| m.running.unwrap_or(0.0) + m.waiting.unwrap_or(0.0) > 0.0);
        let flat_ms = self.flat.look(now_ms, metrics.and_then(|m| m.iterations), held);
        if flat_ms >= GRACE_MS { Alarm::Evict } else { Alarm::Quiet }
    }
}

/// `num_requests_running > 0 and rate(generation_tokens_total) == 0` for 30 s: the alert that everybody writes first. Counted as
/// a restart, for that is what it is written for. A scrape that fails leaves no sample, and a rate without samples is no alert:
/// nothing is judged until the next one.
#[derive(Debug, Default)]
pub struct RunningNoRate {
    flat: Flat,
}

const FOR_MS: Ms = 30_000;
/// Prometheus forgets a series five minutes after its last sample; a rule of half a minute looks at no older ones.
const SAMPLE_AGE_MS_MAX: Ms = FOR_MS;

impl Rule for RunningNoRate {
    fn name(&self) -> &'static str {
        "running-no-rate"
    }

    fn about(&self) -> &'static str {
        "running > 0 and no generated token for 30 s, the alert that everybody writes"
    }

    fn acts(&self) -> Acts {
        Acts::Evicts
    }

    fn step(&mut self, now_ms: Ms, obs: &Observation) -> Alarm {
        let metrics = Signal::fresh(&obs.metrics, now_ms, SAMPLE_AGE_MS_MAX);
        let running = metrics.is_some_and(|m| m.running.unwrap_or(0.0) > 0.0);
        let flat_ms = self.flat.look(now_ms, metrics.and_then(|m| m.generation_tokens), running);
        if flat_ms >= FOR_MS { Alarm::Evict } else { Alarm::Quiet }
    }
}
