//! SGLang's own two: the scheduler's watchdog, and `/health_generate`.

use super::inside::{Deliveries, Inside, Poll, answers_when_idle, is_up, owed};
use super::{Acts, Alarm, Rule};
use crate::observation::{Ms, Observation};

/// `ProcessWatchdog` (python/sglang/srt/utils/watchdog.py, commit 005c64c; `watchdog_timeout` = 300 in server_args.py): a thread
/// looks every `timeout / 2`; while `is_active()` and `forward_ct` unchanged for more than the timeout since the look at which it
/// last differed, it dumps stacks, waits 5 s and sends SIGQUIT to the parent. So it fires 300 to 450 s after the last step.
///
/// `is_active` is "initializing, or `cur_batch` is not None": a queue that is never admitted is not seen. The thread needs the
/// GIL and a process that runs; it is given both here. The engine is destroyed 5 s after the alarm.
#[derive(Debug)]
pub struct Watchdog {
    poll: Poll,
    counter: u64,
    since_ms: Option<Ms>,
    fired: bool,
}

const WATCHDOG_TIMEOUT_MS: Ms = 300_000;

impl Default for Watchdog {
    fn default() -> Self {
        Self { poll: Poll::every(WATCHDOG_TIMEOUT_MS / 2), counter: 0, since_ms: None, fired: false }
    }
}

impl Rule for Watchdog {
    fn name(&self) -> &'static str {
        "sglang-watchdog"
    }

    fn about(&self) -> &'static str {
        "SGLang, forward counter unchanged for 300 s while a batch is active, looked at every 150 s (watchdog.py)"
    }

    fn acts(&self) -> Acts {
        Acts::Evicts
    }

    fn step(&mut self, now_ms: Ms, obs: &Observation) -> Alarm {
        let inside = Inside::read(obs);
        let steps = inside.steps.unwrap_or(self.counter);
        if self.poll.due(now_ms) {
            let since_ms = *self.since_ms.get_or_insert(now_ms);
            let active = inside.busy || inside.starting;
            if !active {
                self.since_ms = Some(now_ms);
            } else if steps != self.counter {
                self.counter = steps;
                self.since_ms = Some(now_ms);
            } else if now_ms >= since_ms.saturating_add(WATCHDOG_TIMEOUT_MS) {
                // two sleeps of half the timeout: the wall clock is past it, never exactly on it
                self.fired = true;
            }
        }
        // a process that steps again is another one than the one that was killed
        self.fired &= steps == self.counter;
        if self.fired { Alarm::Evict } else { Alarm::Quiet }
    }
}

/// `GET /health_generate` (python/sglang/srt/entrypoints/http_server.py, `SGLANG_HEALTH_CHECK_TIMEOUT` = 20 s): sends a request for
/// one token and answers 503 unless the detokenizer put out anything, for whomever, within 20 s. Who asks, and what follows from
/// a 503, is the prober's affair: asked every 10 s here, as a kubelet would, and counted as a fence.
///
/// An observation does not hold the probe's own request: where clients wait, it is answered when any of them gets something; where
/// nobody waits, when the process is not stopped. That the probes pile up in the scheduler (sglang #35884) cannot be expressed.
#[derive(Debug)]
pub struct HealthGenerate {
    poll: Poll,
    deliveries: Deliveries,
    /// Probes under way, by the moment they were sent.
    open: Vec<Ms>,
    failing: bool,
}

const GENERATE_TIMEOUT_MS: Ms = 20_000;
const PROBE_PERIOD_MS: Ms = 10_000;

impl Default for HealthGenerate {
    fn default() -> Self {
        Self { poll: Poll::every(PROBE_PERIOD_MS), deliveries: Deliveries::default(), open: Vec::new(), failing: false }
    }
}

impl Rule for HealthGenerate {
    fn name(&self) -> &'static str {
        "sglang-health-generate"
    }

    fn about(&self) -> &'static str {
        "SGLang, /health_generate: no output of any request for 20 s, asked every 10 s (http_server.py)"
    }

    fn acts(&self) -> Acts {
        Acts::Fences
    }

    fn step(&mut self, now_ms: Ms, obs: &Observation) -> Alarm {
        if self.deliveries.moved(obs) || !is_up(obs) || (!owed(obs) && answers_when_idle(obs)) {
            self.open.clear();
            self.failing = false;
        }
        let sent = self.open.len();
        self.open.retain(|at| now_ms.saturating_sub(*at) < GENERATE_TIMEOUT_MS);
        self.failing |= self.open.len() < sent;
        if self.poll.due(now_ms) {
            self.open.push(now_ms);
        }
        if self.failing { Alarm::Suspect } else { Alarm::Quiet }
    }
}
