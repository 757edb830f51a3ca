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
        if now > self.finished.replace(now).unwrap_or_else(|| ended_before_the_first(sight.gate, now)) {
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

/// How many of the requests that the first scrape counts as ended are not known to be parts of what is in flight: those that the gate has seen
/// off, where what is in flight can account for the rest; else all.
fn ended_before_the_first(gate: Option<&GateObs>, now: f64) -> f64 {
    let Some(gate) = gate else { return now };
    let seen_off = gate.requests_done as f64;
    if seen_off == 0.0 || now <= seen_off + f64::from(gate.in_flight) { seen_off.min(now) } else { now }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_had_ended_before_the_first_scrape_is_of_those_in_flight_where_they_can_account_for_it() {
        let gate = |requests_done, requests_abandoned, in_flight| GateObs {
            requests_done,
            requests_abandoned,
            in_flight,
            ..GateObs::default()
        };
        let before =
            |done, abandoned, in_flight, now| ended_before_the_first(Some(&gate(done, abandoned, in_flight)), now);
        assert_eq!(ended_before_the_first(None, 3.0), 3.0, "nobody knows");
        assert_eq!(before(0, 0, 1, 7.0), 0.0, "all of what began is in flight");
        assert_eq!(before(1, 0, 1, 2.0), 1.0, "one was seen off, and a part of the other has ended");
        assert_eq!(before(1, 1, 1, 2.0), 1.0, "one that left was seen off as well");
        assert_eq!(before(1, 0, 1, 1.0), 1.0, "none but the one that was seen off");
        assert_eq!(before(1, 0, 1, 3.0), 3.0, "somebody asks past the gate");
        assert_eq!(before(1_000, 0, 1, 5.0), 5.0, "the engine is younger than the gate");
    }
}
