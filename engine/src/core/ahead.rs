//! Guessing ahead, between two steps, as the engine thread does it: no error or panic of a guess reaches a request. One that never ends
//! does: the device that it runs on is the one that everybody needs (E1).

use heartbeat::monotonic_ns;

use crate::core::alone::asked;
use crate::core::step::{Core, shows};
use crate::stuck::Stuck;

impl Core {
    /// Guesses for the next step; returns what that took, in ns.
    ///
    /// # Errors
    /// A guess that did not end in time.
    pub(super) fn guess_ahead(&mut self) -> Result<u64, Stuck> {
        let Some(speculation) = &mut self.speculation else { return Ok(0) };
        let (scheduler, live, heart) = (&mut self.scheduler, &self.live, &mut self.heart);
        let mut tell = |sign| shows(heart, sign);
        let model = self.model.as_mut();
        let began = monotonic_ns();
        let sampler_of = |id| live.get(&id).map(|live| live.sampler.shadow());
        if let Err(error) = asked(|| speculation.propose((model, &mut tell), scheduler, &sampler_of))? {
            tracing::error!(error, "guessing failed; speculation is off from now on");
            self.shared.metrics.speculation(speculation.counts(), false);
            self.speculation = None;
        }
        Ok(monotonic_ns().saturating_sub(began))
    }
}
