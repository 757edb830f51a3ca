//! The time between two ticks, in which short looks may stand for ticks (2d): such a look reads the pages and judges nothing.
//!
//! **At rest**, where an engine owes nothing, it is judged twice a second and looked at once in between. Whatever could become work ends that:
//! when the gate calls, the next tick comes when it would have come without rest; a pidfd tells of the engine's end at once; and a page that
//! says anything else than at the last tick is a tick, so that what came past the gate is seen after [`REST_LOOK`] at the latest, with the time
//! of its own that the page tells.
//!
//! **In stride**, where all ranks hand out tokens from look to look, up to four of five ticks are such looks. Any doubt is a tick: no token since
//! the look before, a step that is not young, a look that came late; and one that saw prefill is followed by another, which learns how it ended.
//! So whatever could be late is judged at the tick at which it would have been, and the detector learns as much of lateness and of steps that last.

use std::time::{Duration, Instant};

use vitals::observation::PagePhase;
use vitals::verdict::Verdict;

use super::config::milliseconds;
use super::{GAP_MS_MIN, Watch};
use crate::sources::clock::monotonic_ms;
use crate::sources::pace::Pace;

/// Between two looks at an engine at rest.
const REST_LOOK: Duration = Duration::from_millis(250);
const REST_LOOKS: u32 = 2;
const STRIDE_LOOKS: u32 = 5;
/// In stride no step is older, and no look later: four times this is still below the lowest floor of a deadline (`vitals::noise`).
const STRIDE_MS_MAX: u64 = 25;

/// What ended a wait.
enum Woken {
    InTime,
    ByTheGate,
    ByTheEnd,
}

/// Why the next tick may wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ease {
    Rest,
    Stride,
}

impl Watch {
    /// Returns when the next tick is due; `took` is what the last one has taken of its time.
    pub(super) async fn rest(&mut self, took: Duration) {
        let tick = self.due_in;
        let Some(ease) = self.ease() else {
            self.wait(tick.saturating_sub(took), false).await;
            return;
        };
        let looks = if ease == Ease::Rest { REST_LOOKS } else { STRIDE_LOOKS };
        self.due_in = if ease == Ease::Rest { REST_LOOK } else { tick };
        let (ticked_ms, mut past) = (self.ticked_ms, took);
        for look in 1..=looks {
            let since_tick_ms =
                self.ticked_ms.zip(ticked_ms).map_or(0, |(looked, ticked)| looked.saturating_sub(ticked));
            self.detector.looks_again_in(since_tick_ms.saturating_add(milliseconds(self.due_in)));
            let in_time = self.doze(past, tick, ease).await;
            if look == looks || !in_time || !self.goes_on(ease) {
                return;
            }
            past = Duration::ZERO;
        }
    }

    /// One wait between two looks, of which `past` is over; false where it was cut short.
    async fn doze(&mut self, past: Duration, tick: Duration, ease: Ease) -> bool {
        let began = Instant::now();
        match self.wait(self.due_in.saturating_sub(past), ease == Ease::Rest).await {
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

    fn ease(&self) -> Option<Ease> {
        let settled = self.hold.is_none()
            && self.proof.is_given()
            && !self.control.leaving
            && self.acts.incidents.open().is_none()
            && self.follow.hears_the_end();
        let owed = self.gate.reply.as_ref().map(|reply| reply.obs.in_flight);
        let (verdict, pace) = (&self.outcome.verdict, self.sources.pace());
        if settled && is_at_rest(verdict, pace, owed) {
            return Some(Ease::Rest);
        }
        let hurried = milliseconds(self.due_in) < self.config.policy.tick_ms;
        let pages = self.seen.pages.value.as_deref().unwrap_or_default();
        let decodes =
            !pages.is_empty() && pages.iter().all(|page| page.phase == PagePhase::Decode && page.lease_ms > 0);
        (settled && !hurried && decodes && is_in_stride(verdict, pace)).then_some(Ease::Stride)
    }

    /// Is all as the last tick found it, as far as a short look can tell? One that came late is a tick, which knows what to make of that (V5).
    fn goes_on(&mut self, ease: Ease) -> bool {
        let now_ms = monotonic_ms();
        let (late_ms, drain) = (self.late_ms(now_ms), self.drain.borrow().id > self.drain_ended);
        let on = !drain
            && match ease {
                Ease::Rest => late_ms < GAP_MS_MIN && self.sources.pages_rest(&self.seen),
                Ease::Stride => late_ms <= STRIDE_MS_MAX && self.sources.pages_deliver(now_ms, STRIDE_MS_MAX),
            };
        self.ticked_ms = self.ticked_ms.map(|before| if on { now_ms } else { before });
        on
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

/// Did the last tick see tokens come, with nothing held against the engine?
fn is_in_stride(verdict: &Verdict, pace: Pace) -> bool {
    *verdict == Verdict::Progressing && pace == Pace::Glance
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

    #[test]
    fn only_an_engine_whose_tokens_come_is_in_stride() {
        assert!(is_in_stride(&Verdict::Progressing, Pace::Glance));
        for (verdict, pace) in [
            (Verdict::Progressing, Pace::Rest),
            (Verdict::Progressing, Pace::Look),
            (Verdict::Progressing, Pace::Stare),
            (Verdict::Slow, Pace::Glance),
            (Verdict::Idle, Pace::Glance),
            (Verdict::Suspect(StallClass::Livelock), Pace::Glance),
        ] {
            assert!(!is_in_stride(&verdict, pace), "{verdict:?} {pace:?}");
        }
    }
}
