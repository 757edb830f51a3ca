//! The time between two ticks, in which short looks may stand for ticks (2d): such a look reads the pages and judges nothing (`lookout`).
//!
//! **At rest**, where an engine owes nothing, it is judged once a second and looked at three times in between. Whatever could become work ends
//! that: when the gate calls, the next tick comes when it would have come without rest; a pidfd tells of the engine's end at once; and a page
//! that says anything else than at the last tick is a tick, so that what came past the gate is seen after [`REST_LOOK`] at the latest, with the
//! time of its own that the page tells.
//!
//! **In stride**, where all ranks hand out tokens from look to look, up to four of five ticks are such looks. Any doubt is a tick: no token since
//! the look before, a step that is not young, a look that came late; and one that saw prefill is followed by another, which learns how it ended.
//! So whatever could be late is judged at the tick at which it would have been, and the detector learns as much of lateness and of steps that last.

use std::time::{Duration, Instant};

use vitals::observation::PagePhase;
use vitals::verdict::Verdict;

use super::config::milliseconds;
use super::lookout::{Ask, Looked, Order};
use super::{GAP_MS_MIN, Watch};
use crate::sources::pace::Pace;

/// Between two looks at an engine at rest.
const REST_LOOK: Duration = Duration::from_millis(250);
/// Looks from one tick to the next, which is the last of them.
const REST_LOOKS: u32 = 4;
const STRIDE_LOOKS: u32 = 5;
/// In stride no step is older, and no look later: four times this is still below the lowest floor of a deadline (`vitals::noise`).
const STRIDE_MS_MAX: u64 = 25;

/// What ended a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Woken {
    InTime,
    ByTheGate,
    /// By the engine's end, an order to drain, or a look that found a doubt.
    AtOnce,
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
        let Some((ease, ticked_ms)) = self.ease().zip(self.ticked_ms) else {
            self.wait(tick.saturating_sub(took), None).await;
            return;
        };
        let (every, looks) = ease.looks(tick);
        let late_ms_max = if ease == Ease::Rest { GAP_MS_MIN - 1 } else { STRIDE_MS_MAX };
        self.lookout.send(Order { ask: self.ask(ease), every, looks: looks - 1, late_ms_max, ticked_ms, took });
        let began = Instant::now();
        let woken = self.wait((every * looks).saturating_sub(took), Some(ease)).await;
        let (since_ms, due_in) = reckoned(woken, self.lookout.recall(), ticked_ms, (every, looks));
        (self.ticked_ms, self.due_in) = (Some(since_ms), due_in);
        if woken == Woken::ByTheGate {
            let past = took + began.elapsed();
            let pause = until_next(past, tick);
            // a tick that comes when it is meant to is not late
            self.detector.looks_again_in(milliseconds(past + pause));
            self.wait(pause, None).await;
        } else {
            self.detector.looks_again_in(since_ms.saturating_sub(ticked_ms).saturating_add(milliseconds(due_in)));
        }
    }

    /// Waits for so long; where short looks go on meanwhile, also for whatever ends them.
    async fn wait(&mut self, length: Duration, ease: Option<Ease>) -> Woken {
        tokio::select! {
            () = self.ticker.wait(length) => Woken::InTime,
            () = self.follow.ended() => Woken::AtOnce,
            () = self.gate.called(), if ease == Some(Ease::Rest) => Woken::ByTheGate,
            () = self.lookout.doubts(), if ease.is_some() => Woken::AtOnce,
            Ok(()) = self.drain.changed(), if ease.is_some() => Woken::AtOnce,
        }
    }

    fn ask(&self, ease: Ease) -> Ask {
        match ease {
            Ease::Rest => Ask::Rest(self.seen.pages.value.clone().unwrap_or_default()),
            Ease::Stride => Ask::Deliver { step_ms_max: STRIDE_MS_MAX },
        }
    }

    fn ease(&self) -> Option<Ease> {
        let settled = self.hold.is_none()
            && self.proof.is_given()
            && !self.control.leaving
            && self.drain.borrow().id <= self.drain_ended
            && !self.lookout.has_ended()
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
}

impl Ease {
    /// How often is looked, and how many looks there are up to the next tick.
    fn looks(self, tick: Duration) -> (Duration, u32) {
        match self {
            Self::Rest => (REST_LOOK, REST_LOOKS),
            Self::Stride => (tick, STRIDE_LOOKS),
        }
    }
}

/// From when on the next tick counts how late it is, and how long after that it was due. Whatever is late is so since the last look that
/// found all well: also where the machine stood still over more than one of them, so that looks and tick were due at the same moment (V5).
fn reckoned(woken: Woken, looked: Looked, ticked_ms: u64, (every, looks): (Duration, u32)) -> (u64, Duration) {
    if woken == Woken::InTime && looked.all { (ticked_ms, every * looks) } else { (looked.fine_ms, every) }
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
    fn a_machine_that_stood_still_over_looks_and_tick_is_late_since_the_last_look_before() {
        let every = Duration::from_millis(100);
        let late_at = |now_ms: u64, woken, fine_ms, all| {
            let (since_ms, due_in) = reckoned(woken, Looked { fine_ms, all }, 1_000, (every, STRIDE_LOOKS));
            now_ms - since_ms - milliseconds(due_in)
        };
        assert_eq!(late_at(1_500, Woken::InTime, 1_400, true), 0);
        assert_eq!(late_at(1_530, Woken::InTime, 1_400, true), 30);
        // one look was fine, then nobody ran for a second: whether the timer or the doubt is heard first
        for woken in [Woken::InTime, Woken::AtOnce] {
            assert_eq!(late_at(2_110, woken, 1_100, false), 910);
        }
        assert_eq!(late_at(1_200, Woken::AtOnce, 1_100, false), 0, "a doubt in time");
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
