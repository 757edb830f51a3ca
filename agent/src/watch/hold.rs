//! After the detector's own restart the new one knows nothing of the past: what its forerunner decided holds until there is proof.
//! Pure.

use vitals::observation::Observation;
use vitals::recovery::EpisodeStage;
use vitals::verdict::Verdict;

/// A fence without work in sight is lifted after this, as the detector itself would do on trial.
const TRIAL_AFTER_MS: u64 = 30_000;

/// What was in force when the forerunner died, for the same engine process.
#[derive(Debug, Clone)]
pub struct Hold {
    fenced: bool,
    fit: bool,
    since_ms: u64,
    delivered: Option<Delivered>,
}

/// Everything that only grows while tokens reach clients.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Delivered {
    by_gate: Option<(u64, u64)>,
    by_pages: Option<u64>,
}

impl Hold {
    /// Holds what the forerunner had decided.
    pub fn new(fenced: bool, fit: bool, now_ms: u64) -> Self {
        Self { fenced, fit, since_ms: now_ms, delivered: None }
    }

    /// Is the hold over: did anything reach a client since, or was there nothing to deliver for long enough?
    pub fn is_over(&mut self, now_ms: u64, obs: &Observation, verdict: &Verdict) -> bool {
        let now = Delivered::of(obs);
        let moved = self.delivered.as_ref().is_some_and(|before| now.beyond(before));
        // A source that was silent at first sets its baseline when it first speaks.
        let known = self.delivered.take().unwrap_or_default();
        self.delivered =
            Some(Delivered { by_gate: known.by_gate.or(now.by_gate), by_pages: known.by_pages.or(now.by_pages) });
        if self.fenced {
            moved || matches!(verdict, Verdict::Idle) && now_ms.saturating_sub(self.since_ms) >= TRIAL_AFTER_MS
        } else {
            !matches!(verdict, Verdict::Starting | Verdict::Unknown)
        }
    }

    /// Must the fence stay?
    pub fn fences(&self) -> bool {
        self.fenced
    }

    /// What the engine's fitness was, for a verdict that knows nothing yet.
    pub fn fit(&self, verdict: &Verdict) -> Option<bool> {
        (!self.fenced && matches!(verdict, Verdict::Starting | Verdict::Unknown)).then_some(self.fit)
    }
}

impl Delivered {
    fn of(obs: &Observation) -> Self {
        let pages = obs.pages.value.as_ref();
        Self {
            by_gate: obs.gate.value.as_ref().map(|gate| (gate.epoch, gate.chunks_delivered)),
            by_pages: pages.map(|pages| pages.iter().map(|page| page.tokens_delivered).sum()),
        }
    }

    fn beyond(&self, before: &Self) -> bool {
        let gate = self.by_gate.zip(before.by_gate).is_some_and(|(now, then)| now.0 == then.0 && now.1 > then.1);
        gate || self.by_pages.zip(before.by_pages).is_some_and(|(now, then)| now > then)
    }
}

/// Is the fence held back? The last replica that serves stays in traffic until its restart is granted (I3): slow beats nothing, and
/// whoever is about to be killed takes no new request.
pub fn spared(last_serving: bool, stage: Option<EpisodeStage>) -> bool {
    let restarts = matches!(stage, Some(EpisodeStage::Granted | EpisodeStage::Killed | EpisodeStage::Restarting));
    last_serving && !restarts
}

/// What refused clients are told; `by_hand` is a person's fence in words.
pub fn refusal(verdict: &Verdict, by_hand: Option<&str>) -> String {
    let why = match verdict {
        _ if by_hand.is_some() => format!("it was {}", by_hand.unwrap_or_default()),
        Verdict::Starting => "its engine is starting".to_owned(),
        Verdict::Dead => "its engine has died and is started again".to_owned(),
        verdict => {
            format!("its engine makes no progress ({})", verdict.class().map_or(verdict.name(), |class| class.name()))
        }
    };
    format!("this replica takes no new requests: {why}; try another, or this one again later")
}

#[cfg(test)]
mod tests {
    use super::*;
    use vitals::observation::{GateObs, Signal};

    fn seen(chunks: u64) -> Observation {
        let gate = GateObs { epoch: 1, chunks_delivered: chunks, ..GateObs::default() };
        Observation { gate: Signal::at(0, gate), ..Observation::default() }
    }

    #[test]
    fn a_fence_is_held_until_something_is_delivered() {
        let mut hold = Hold::new(true, false, 0);
        for now in [100, 200, 300] {
            assert!(!hold.is_over(now, &seen(5), &Verdict::Progressing));
        }
        assert!(hold.is_over(400, &seen(6), &Verdict::Progressing));
    }

    #[test]
    fn a_fence_with_nothing_owed_ends_on_trial() {
        let mut hold = Hold::new(true, false, 1_000);
        assert!(!hold.is_over(30_999, &seen(5), &Verdict::Idle));
        assert!(hold.is_over(31_000, &seen(5), &Verdict::Idle));
    }

    #[test]
    fn fitness_is_held_only_while_the_new_detector_knows_nothing() {
        let mut hold = Hold::new(false, true, 0);
        assert_eq!(hold.fit(&Verdict::Starting), Some(true));
        assert_eq!(hold.fit(&Verdict::Dead), None);
        assert!(!hold.is_over(100, &Observation::default(), &Verdict::Starting));
        assert!(hold.is_over(200, &Observation::default(), &Verdict::Idle));
    }

    #[test]
    fn a_refusal_names_the_person_before_the_engine() {
        let told = refusal(&Verdict::Dead, Some("fenced by ann: a look"));
        assert!(told.contains("it was fenced by ann: a look;"), "{told}");
        assert!(refusal(&Verdict::Dead, None).contains("its engine has died"));
    }

    #[test]
    fn the_last_one_that_serves_is_spared_until_its_restart() {
        for (stage, out) in [(None, true), (Some(EpisodeStage::Suspect), true), (Some(EpisodeStage::Stalled), true)] {
            assert_eq!((spared(true, stage), spared(false, stage)), (out, false), "{stage:?}");
        }
        for stage in [EpisodeStage::Granted, EpisodeStage::Killed, EpisodeStage::Restarting] {
            assert!(!spared(true, Some(stage)), "{stage:?}");
        }
    }
}
