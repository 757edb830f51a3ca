//! What the detector tells the supervisor, and the one rule that makes readiness of a verdict. Pure.

use crds::{episode::Episode, fence::FENCED_BY_PERSON, poison::Refused};
use serde::{Deserialize, Serialize};
use vitals::verdict::{Outcome, Reason, Verdict};

/// The line that says no more than that the detector lives and has nothing new to say.
pub const ALIVE: &str = "{}";

/// One line of the detector's stdout. The supervisor answers every probe from the newest one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StatusDoc {
    /// May this replica serve?
    pub ready: bool,
    /// Why (or why not), for the body of `/readyz`.
    pub reason: ReadyReason,
    pub verdict: VerdictDoc,
    /// Newest first.
    pub incidents: Vec<Episode>,
    /// Prometheus text format.
    pub metrics: String,
    /// The drain request that is being obeyed, by its number.
    #[serde(default)]
    pub draining: Option<u64>,
    /// Requests that are not over by the gate's last answer, and while it is shut to drain, connections; `None` while the gate is silent.
    #[serde(default)]
    pub in_flight: Option<u32>,
    /// For how long the gate has been there and has not answered.
    #[serde(default)]
    pub gate_hangs_ms: u64,
}

/// A name from a closed set (a verdict, a stall class, `Draining`, `Unproven`, `FencedByPerson`, `NoVerdict`) and a sentence.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadyReason {
    pub reason: String,
    pub message: String,
}

/// The body of `/verdict`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct VerdictDoc {
    pub verdict: String,
    pub class: Option<String>,
    /// How long the verdict has been this one, in milliseconds.
    pub since_ms: u64,
    pub fenced: bool,
    pub reasons: Vec<Reason>,
    /// The engine's own phase, where it publishes one.
    pub phase: Option<String>,
    /// Stalled, while the engine's own `/health` answers 200.
    #[serde(default)]
    pub health_lies: bool,
    /// Requests that the gate refuses, because they were in flight at two stalls (I7).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub poison: Vec<Refused>,
}

impl VerdictDoc {
    /// The document of one tick's outcome. `fenced` is what is done, which may be less than what the verdict asks (mode `Observe`).
    pub fn of(outcome: &Outcome, fenced: bool, phase: Option<String>, now_ms: u64) -> Self {
        Self {
            verdict: outcome.verdict.name().to_owned(),
            class: outcome.verdict.class().map(|class| class.name().to_owned()),
            since_ms: now_ms.saturating_sub(outcome.since_ms),
            fenced,
            reasons: outcome.reasons.clone(),
            phase,
            health_lies: outcome.health_lies,
            poison: Vec::new(),
        }
    }

    /// Would two documents read the same to a person, but for the passing of time?
    pub fn same_but_time(&self, other: &Self) -> bool {
        (&self.verdict, &self.class, self.fenced, &self.phase, self.health_lies)
            == (&other.verdict, &other.class, other.fenced, &other.phase, other.health_lies)
    }
}

/// Why a replica is kept out of traffic whatever its engine does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Aside {
    #[default]
    No,
    /// It is about to leave.
    Draining,
    /// Its engine has not delivered anything yet.
    Unproven,
}

impl Aside {
    /// Leaving outweighs what is not shown yet.
    pub fn of(draining: bool, proven: bool) -> Self {
        match (draining, proven) {
            (true, _) => Self::Draining,
            (false, false) => Self::Unproven,
            (false, true) => Self::No,
        }
    }
}

/// Would this replica serve, by what its engine does alone? `before` is the last answer: blindness changes nothing (I4), and neither does
/// what kept the replica out meanwhile, so that a fence that is taken off in doubt leaves what was there before it.
pub fn fitness(verdict: &Verdict, before: bool) -> bool {
    match verdict {
        Verdict::Idle | Verdict::Progressing | Verdict::Slow => true,
        Verdict::Starting | Verdict::Dead | Verdict::Sleeping | Verdict::Draining => false,
        // Unfenced although in doubt: the mode is Observe, or a fence is held back. Slow beats nothing (I3).
        Verdict::Unknown | Verdict::Suspect(_) | Verdict::Stalled(_) => before,
    }
}

/// May this replica serve?
pub fn readiness(fit: bool, fenced: bool, aside: Aside) -> bool {
    fit && !fenced && aside == Aside::No
}

/// The reason that goes with [`readiness`]; `by_hand` is a person's fence in words.
pub fn ready_reason(outcome: &Outcome, aside: Aside, by_hand: Option<&str>) -> ReadyReason {
    if let Some(words) = by_hand {
        return ReadyReason { reason: FENCED_BY_PERSON.to_owned(), message: words.to_owned() };
    }
    let idle = matches!(outcome.verdict, Verdict::Idle | Verdict::Progressing | Verdict::Slow);
    let name = match (aside, outcome.verdict.class()) {
        (Aside::Draining, _) => "Draining",
        // while it starts or hangs, that says more
        (Aside::Unproven, _) if idle => "Unproven",
        (_, Some(class)) => class.name(),
        (_, None) => outcome.verdict.name(),
    };
    if name == "Unproven" {
        let message =
            "the engine takes requests and has not delivered tokens yet; it is being asked for some".to_owned();
        return ReadyReason { reason: name.to_owned(), message };
    }
    let message = outcome.reasons.iter().map(|reason| reason.text.as_str()).collect::<Vec<_>>().join("; ");
    ReadyReason { reason: name.to_owned(), message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vitals::verdict::StallClass;

    #[test]
    fn progress_makes_ready_and_blindness_changes_nothing() {
        for (verdict, before, fit) in [
            (Verdict::Progressing, false, true),
            (Verdict::Idle, false, true),
            (Verdict::Slow, false, true),
            (Verdict::Starting, true, false),
            (Verdict::Dead, true, false),
            (Verdict::Unknown, true, true),
            (Verdict::Unknown, false, false),
            (Verdict::Stalled(StallClass::Livelock), true, true),
        ] {
            assert_eq!(fitness(&verdict, before), fit, "{verdict:?} {before}");
        }
        use Aside::{Draining, No, Unproven};
        for (fit, fenced, aside, ready) in [
            (true, false, No, true),
            (false, false, No, false),
            (true, true, No, false),
            (true, false, Draining, false),
            (true, false, Unproven, false),
        ] {
            assert_eq!(readiness(fit, fenced, aside), ready, "{fit} {fenced} {aside:?}");
        }
    }

    #[test]
    fn a_fence_that_is_taken_off_in_doubt_leaves_what_was_there_before_it() {
        let (mut fit, mut ready) = (false, Vec::new());
        for (verdict, fenced) in [
            (Verdict::Progressing, false),
            (Verdict::Progressing, true),
            (Verdict::Unknown, true),
            (Verdict::Unknown, false),
        ] {
            fit = fitness(&verdict, fit);
            ready.push(readiness(fit, fenced, Aside::No));
        }
        assert_eq!(ready, [true, false, false, true]);
    }

    #[test]
    fn the_reason_names_what_keeps_it_out() {
        let of = |verdict, aside| ready_reason(&Outcome { verdict, ..Outcome::default() }, aside, None).reason;
        assert_eq!(of(Verdict::Idle, Aside::of(false, false)), "Unproven");
        assert_eq!(of(Verdict::Starting, Aside::Unproven), Verdict::Starting.name());
        assert_eq!(of(Verdict::Idle, Aside::of(true, false)), "Draining");
        assert_eq!(of(Verdict::Idle, Aside::of(false, true)), Verdict::Idle.name());
    }
}
