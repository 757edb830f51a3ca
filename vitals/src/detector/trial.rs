//! What is remembered of a suspect that was let out on trial: that it was one, for how long it had been silent, and whether anything has
//! shown since that it works.

use super::Detector;
use super::case::Case;
use crate::examine::{Complaint, reason};
use crate::excuse::Tick;
use crate::observation::Ms;
use crate::verdict::Reason;

/// The last trial.
#[derive(Debug, Clone, Copy)]
pub(super) struct Trial {
    at_ms: Ms,
    at_counted: Ms,
    /// Of several data-parallel engines the one that it is about.
    engine: Option<u32>,
    /// Counted time at which the case was opened.
    case_began_at: Ms,
    /// For how long work had been owed and nothing was delivered, in this case and in those before it that it carries on.
    silence_ms: Ms,
}

impl Trial {
    pub(super) fn of(tick: &Tick, case: &Case) -> Self {
        Self {
            at_ms: tick.now_ms,
            at_counted: tick.counted_ms,
            engine: case.engine,
            case_began_at: case.began_counted,
            silence_ms: case.silence_ms,
        }
    }
}

impl Detector {
    /// Was it let out on trial a short while ago?
    pub(super) fn relapsing(&self, tick: &Tick) -> bool {
        self.trial_of_late(tick).is_some()
    }

    /// The silence of a complaint, and what is added to it for the words: that of the case before, where the engine has shown nothing
    /// since. Clients that give up before a proof is due (a proxy's time-out is 60 s) would begin it anew for ever otherwise, each time at
    /// the cost of whoever came with the trial.
    pub(super) fn silence_with_trials(&self, tick: &Tick, complaint: &Complaint) -> (Ms, Option<Reason>) {
        let carried = self.trial_of_late(tick).filter(|trial| {
            trial.silence_ms > 0 && trial.engine == complaint.engine && self.worked_at() <= trial.case_began_at
        });
        let Some(trial) = carried else { return (complaint.silence_ms, None) };
        let since_ms = complaint.silence_ms.min(tick.since(trial.at_counted));
        let text = format!(
            "before the trial it was silent for {} ms with work owed, and nothing has moved since",
            trial.silence_ms
        );
        (trial.silence_ms.saturating_add(since_ms), Some(reason("policy", text)))
    }

    fn trial_of_late(&self, tick: &Tick) -> Option<&Trial> {
        self.trial.as_ref().filter(|trial| tick.now_ms.saturating_sub(trial.at_ms) < self.policy.relapse_ms)
    }

    /// When anything was last delivered, taken into the cache, counted or stepped: whatever an engine shows that does something.
    fn worked_at(&self) -> Ms {
        let signs = &self.signs;
        signs.delivered_at().max(signs.worked_at()).max(signs.taken_in_at())
    }
}
