//! For how long the front end has not answered.
//!
//! A front end that is frozen with its engine answers nobody, and that accuses it no more than the engine's own silence: what was excused is
//! taken off. `/metrics` is answered by the same port: a `/health` that is silent beside it waits for the engine, whose silence is not the
//! front end's.

use super::Sight;
use crate::excuse::Tick;
use crate::observation::Ms;

/// What is known of its answers.
#[derive(Debug, Clone, Default)]
pub struct FrontSign {
    /// When it last answered (the caller's clock), and how much of all time was excused by then.
    answered: Option<(Ms, Ms)>,
    /// Since when it has not (the caller's clock), and the counted time at which that was first told.
    silent: Option<(Ms, Ms)>,
}

impl FrontSign {
    /// Takes one tick in, whose word of the front end is of `at_ms`, and whose scrape was true at `scraped_ms`. Its silence, if it is known.
    ///
    /// How much was excused since a silence began nobody has written down. But no more than since the last answer, which is too much where a
    /// pause lies between the two, nor than before it was told, which is too little by what the question took: the longer of both holds.
    pub fn look(&mut self, tick: &Tick, sight: &Sight<'_>, at_ms: Ms, scraped_ms: Ms) -> Option<Ms> {
        let frontend = sight.frontend?;
        let excused_ms = tick.now_ms.saturating_sub(tick.counted_ms);
        let answered = self.answered.get_or_insert((at_ms, excused_ms));
        if frontend.answers && answered.0 != at_ms {
            *answered = (at_ms, excused_ms);
        }
        let excused_ms = excused_ms.saturating_sub(answered.1);
        let scraped_ms = sight.metrics.map_or(0, |_| scraped_ms);
        let since = frontend.silent_since_ms.filter(|_| !frontend.answers).map(|at| at.max(scraped_ms));
        self.silent = since.map(|at| self.silent.filter(|(known, _)| *known == at).unwrap_or((at, tick.mark(at))));
        let (at, told_at) = self.silent?;
        Some(tick.now_ms.saturating_sub(at).saturating_sub(excused_ms).max(tick.since(told_at)))
    }
}
