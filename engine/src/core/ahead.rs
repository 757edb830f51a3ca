//! Guessing ahead, between two steps, as the engine thread does it: no error or panic of a guess reaches a request.

use heartbeat::monotonic_ns;

use crate::core::alone::guarded;
use crate::core::step::Core;

impl Core {
    /// Guesses for the next step; returns what that took, in ns.
    pub(super) fn guess_ahead(&mut self) -> u64 {
        let Some(speculation) = &mut self.speculation else { return 0 };
        let (scheduler, live) = (&mut self.scheduler, &self.live);
        let began = monotonic_ns();
        let sampler_of = |id| live.get(&id).map(|live| live.sampler.shadow());
        let guessed = guarded(|| speculation.propose(scheduler, &sampler_of).map_err(|e| e.to_string()));
        if let Err(error) = guessed {
            tracing::error!(error, "guessing failed; speculation is off from now on");
            self.shared.metrics.speculation(speculation.counts(), false);
            self.speculation = None;
        }
        monotonic_ns().saturating_sub(began)
    }
}
