//! Rest behind requests that have begun to answer: by its own books the engine has nothing to do, and the gate still owes.
//!
//! A front end may work through several generations for one answer, and wait between two of them for a tool that it calls itself (`/v1/responses`
//! of vLLM and SGLang): for minutes no byte comes, and the engine owes none.

use super::Sight;
use crate::excuse::Tick;
use crate::leaders::Leaders;
use crate::observation::{GateObs, Ms};

/// What its books said, and when.
#[derive(Debug, Clone, Default)]
pub struct RestSign {
    rests: bool,
    /// Counted time at which it was last seen at rest, of a rest that nothing has ended yet.
    rested_at: Option<Ms>,
    /// Requests that it said it had finished, and when a scrape last showed more of them (the caller's clock).
    finished: Option<f64>,
    finished_ms: Option<Ms>,
}

impl RestSign {
    /// Takes one tick in, whose scrape was true at `at_ms`. Until when it rested, where work has come to it since.
    pub fn look(&mut self, tick: &Tick, sight: &Sight<'_>, at_ms: Ms, leaders: &Leaders) -> Option<Ms> {
        self.count(sight, at_ms);
        let rests = sight.gate.and_then(|gate| self.books_rest(gate, sight, at_ms, leaders));
        self.rests = rests == Some(true);
        match rests {
            Some(true) => {
                self.rested_at = Some(tick.counted_ms);
                None
            }
            Some(false) => self.rested_at.take(),
            None => None,
        }
    }

    /// Was it seen at rest at this tick?
    pub fn now(&self) -> bool {
        self.rests
    }

    fn count(&mut self, sight: &Sight<'_>, at_ms: Ms) {
        let Some(now) = sight.metrics.and_then(|metrics| metrics.requests_finished) else { return };
        // the first scrape after a start: where the first requests are all in flight still, whatever was ended was of theirs
        let ended_none = |gate: &GateObs| gate.requests_done + gate.requests_abandoned == 0;
        let first = || if sight.gate.is_some_and(ended_none) { 0.0 } else { now };
        if now > self.finished.replace(now).unwrap_or_else(first) {
            self.finished_ms = Some(at_ms);
        }
    }

    /// `None`: its books are older than the last byte, or there are none.
    fn books_rest(&self, gate: &GateObs, sight: &Sight<'_>, at_ms: Ms, leaders: &Leaders) -> Option<bool> {
        if gate.begun() == 0 || gate.awaiting_first_byte > 0 {
            return Some(false);
        }
        if sight.page.is_some() {
            return Some(leaders.all_idle());
        }
        let metrics = sight.metrics.filter(|_| gate.last_delivery_ms.is_some_and(|last| at_ms > last))?;
        let held = metrics.running? + metrics.waiting?;
        // one that writes its gauges every so many steps says zero of a request that has just begun: it must have ended something since
        let ended = self.finished_ms.zip(gate.oldest_in_flight_ms).is_some_and(|(ended, oldest)| ended >= oldest);
        Some(held < 1.0 && ended)
    }
}
