//! How long steps last beside what else happens to the engine: all of a step, or what its host's cores do for it.

use super::engine::{Engine, STEP_MAX};
use super::profile::Us;

impl Engine {
    /// Steps last so many thousandths from now on, the rest of the one under way as well.
    pub fn set_pace(&mut self, now: Us, milli: u64) {
        let before = std::mem::replace(&mut self.mood.pace_milli, milli.max(1));
        self.stretch(now, before, milli);
    }

    /// What the host's cores do for a step lasts so many thousandths from now on. A prefill that a GPU computes is none of theirs.
    pub fn set_host(&mut self, now: Us, milli: u64) {
        let before = std::mem::replace(&mut self.mood.host_milli, milli.max(1));
        if !self.on_device() {
            self.stretch(now, before, milli);
        }
    }

    /// Is the step under way the GPU's own work?
    fn on_device(&self) -> bool {
        self.profile.on_gpu && self.step.is_some_and(|step| step.prefill > 0)
    }

    /// The rest of the step under way lasts `milli` instead of `before` thousandths.
    fn stretch(&mut self, now: Us, before: u64, milli: u64) {
        if let Some(step) = self.step.as_mut().filter(|step| step.end < Us::MAX && before != milli) {
            let goes_on = now.max(self.held_until);
            let rest = step.end.saturating_sub(goes_on);
            let most = STEP_MAX.saturating_sub(goes_on.saturating_sub(step.start)).max(rest);
            step.end = goes_on + (rest.saturating_mul(milli.max(1)) / before.max(1)).min(most);
        }
    }
}
