//! The time between two ticks. An engine that owes nothing is judged twice a second and looked at once in between (2d): such a short look
//! reads the page and judges nothing. Whatever could become work ends that: when the gate calls, the next tick comes when it would have
//! come without rest; a pidfd tells of the engine's end at once; and a page that says anything else than at the last tick is a tick, so that
//! what came past the gate is seen after [`LOOK`] at the latest, with the time of its own that the page tells.

use std::time::{Duration, Instant};

use vitals::verdict::Verdict;

use super::config::milliseconds;
use super::{GAP_MS_MIN, Watch};
use crate::sources::clock::monotonic_ms;
use crate::sources::pace::Pace;

/// Between two looks at an engine at rest.
const LOOK: Duration = Duration::from_millis(250);

/// What ended a wait.
enum Woken {
    InTime,
    ByTheGate,
    ByTheEnd,
}

impl Watch {
    /// Returns when the next tick is due; `took` is what the last one has taken of its time.
    pub(super) async fn rest(&mut self, took: Duration) {
        let tick = self.due_in;
        if !self.may_doze() {
            self.wait(tick.saturating_sub(took), false).await;
            return;
        }
        self.due_in = LOOK;
        self.detector.looks_again_in(milliseconds(2 * LOOK));
        if self.doze(took, tick).await && self.rests_still() {
            self.doze(Duration::ZERO, tick).await;
        }
    }

    /// One wait of a rest, of which `past` is over; false where it was cut short.
    async fn doze(&mut self, past: Duration, tick: Duration) -> bool {
        let began = Instant::now();
        match self.wait(LOOK.saturating_sub(past), true).await {
            Woken::InTime => true,
            Woken::ByTheEnd => false,
            Woken::ByTheGate => {
                self.wait(until_next(past + began.elapsed(), tick), false).await;
                false
            }
        }
    }

    async fn wait(&mut self, length: Duration, hears_calls: bool) -> Woken {
        tokio::select! {
            () = self.ticker.wait(length) => Woken::InTime,
            () = self.follow.ended() => Woken::ByTheEnd,
            () = self.gate.called(), if hears_calls => Woken::ByTheGate,
        }
    }

    fn may_doze(&self) -> bool {
        let owed = self.gate.reply.as_ref().map(|reply| reply.obs.in_flight);
        let settled = self.hold.is_none()
            && self.proof.is_given()
            && !self.control.leaving
            && self.acts.incidents.open().is_none()
            && self.follow.hears_the_end();
        settled && is_at_rest(&self.outcome.verdict, self.sources.pace(), owed)
    }

    /// Is all as the last tick found it, as far as a short look can tell? One that came late is a tick, which makes a gap of that (V5).
    fn rests_still(&mut self) -> bool {
        let now_ms = monotonic_ms();
        let drain = self.drain.borrow().id > self.drain_ended;
        let still = self.late_ms(now_ms) < GAP_MS_MIN && !drain && self.sources.pages_rest(&self.seen);
        self.ticked_ms = self.ticked_ms.map(|before| if still { now_ms } else { before });
        still
    }
}

/// How long until the next of the ticks that would have come every `tick` since one `past` ago.
fn until_next(past: Duration, tick: Duration) -> Duration {
    let tick_ms = milliseconds(tick).max(1);
    Duration::from_millis(tick_ms - milliseconds(past) % tick_ms)
}

/// Does nobody wait for anything of this engine, by everybody's word? A gate that is silent says nothing.
fn is_at_rest(verdict: &Verdict, pace: Pace, owed_by_gate: Option<u32>) -> bool {
    *verdict == Verdict::Idle && pace == Pace::Rest && owed_by_gate == Some(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vitals::verdict::StallClass;

    #[test]
    fn whoever_calls_is_heard_at_the_tick_that_would_have_come() {
        let next = |past_ms| until_next(Duration::from_millis(past_ms), Duration::from_millis(100)).as_millis();
        assert_eq!([0, 30, 99, 100, 249].map(next), [100, 70, 1, 100, 51]);
        assert_eq!(until_next(Duration::from_millis(5), Duration::ZERO).as_millis(), 1);
    }

    #[test]
    fn only_an_idle_engine_that_owes_nothing_by_its_gates_word_is_looked_at_shortly() {
        assert!(is_at_rest(&Verdict::Idle, Pace::Rest, Some(0)));
        for (verdict, pace, owed) in [
            (Verdict::Idle, Pace::Rest, Some(1)),
            (Verdict::Idle, Pace::Rest, None),
            (Verdict::Idle, Pace::Glance, Some(0)),
            (Verdict::Idle, Pace::Stare, Some(0)),
            (Verdict::Progressing, Pace::Rest, Some(0)),
            (Verdict::Starting, Pace::Rest, Some(0)),
            (Verdict::Sleeping, Pace::Rest, Some(0)),
            (Verdict::Suspect(StallClass::StepStalled), Pace::Rest, Some(0)),
        ] {
            assert!(!is_at_rest(&verdict, pace, owed), "{verdict:?} {pace:?} {owed:?}");
        }
    }
}
