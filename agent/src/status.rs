//! What the detector tells the supervisor, and the one rule that makes readiness of a verdict. Pure.

use crds::{episode::Episode, fence::FENCED_BY_PERSON};
use serde::{Deserialize, Serialize};
use vitals::verdict::{Outcome, Reason, Verdict};

/// One line of the detector's stdout. The supervisor answers every probe from the newest one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
    /// Requests in flight by the gate's last answer; `None` while the gate is silent.
    #[serde(default)]
    pub in_flight: Option<u32>,
}

/// A name from a closed set (a verdict, a stall class, `Draining`, `FencedByPerson`, `NoVerdict`) and a sentence.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadyReason {
    pub reason: String,
    pub message: String,
}

/// The body of `/verdict`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VerdictDoc {
    pub verdict: String,
    pub class: Option<String>,
    /// How long the verdict has been this one, in milliseconds.
    pub since_ms: u64,
    pub fenced: bool,
    pub reasons: Vec<Reason>,
    /// The engine's own phase, where it publishes one.
    pub phase: Option<String>,
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
        }
    }

    /// Would two documents read the same to a person, but for the passing of time?
    pub fn same_but_time(&self, other: &Self) -> bool {
        (&self.verdict, &self.class, self.fenced, &self.phase)
            == (&other.verdict, &other.class, other.fenced, &other.phase)
    }
}

/// May this replica serve? `before` is the last answer: blindness changes nothing (I4).
pub fn readiness(verdict: &Verdict, fenced: bool, draining: bool, before: bool) -> bool {
    if fenced || draining {
        return false;
    }
    match verdict {
        Verdict::Idle | Verdict::Progressing | Verdict::Slow => true,
        Verdict::Starting | Verdict::Dead | Verdict::Sleeping | Verdict::Draining => false,
        // Unfenced although in doubt: the mode is Observe, or a fence is held back. Slow beats nothing (I3).
        Verdict::Unknown | Verdict::Suspect(_) | Verdict::Stalled(_) => before,
    }
}

/// The reason that goes with [`readiness`]; `by_hand` is a person's fence in words.
pub fn ready_reason(outcome: &Outcome, draining: bool, by_hand: Option<&str>) -> ReadyReason {
    if let Some(words) = by_hand {
        return ReadyReason { reason: FENCED_BY_PERSON.to_owned(), message: words.to_owned() };
    }
    let name = match (draining, outcome.verdict.class()) {
        (true, _) => "Draining",
        (false, Some(class)) => class.name(),
        (false, None) => outcome.verdict.name(),
    };
    let message = outcome.reasons.iter().map(|reason| reason.text.as_str()).collect::<Vec<_>>().join("; ");
    ReadyReason { reason: name.to_owned(), message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vitals::verdict::StallClass;

    #[test]
    fn progress_makes_ready_and_blindness_changes_nothing() {
        for (verdict, fenced, draining, before, ready) in [
            (Verdict::Progressing, false, false, false, true),
            (Verdict::Idle, false, false, false, true),
            (Verdict::Slow, false, false, false, true),
            (Verdict::Progressing, true, false, true, false),
            (Verdict::Progressing, false, true, true, false),
            (Verdict::Starting, false, false, true, false),
            (Verdict::Dead, false, false, true, false),
            (Verdict::Unknown, false, false, true, true),
            (Verdict::Unknown, false, false, false, false),
            (Verdict::Stalled(StallClass::Livelock), true, false, true, false),
            (Verdict::Stalled(StallClass::Livelock), false, false, true, true),
        ] {
            assert_eq!(
                readiness(&verdict, fenced, draining, before),
                ready,
                "{verdict:?} {fenced} {draining} {before}"
            );
        }
    }
}
