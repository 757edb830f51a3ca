//! What the engine did while no byte came: tokens that its loop made and its front end has not passed on, and steps that it counted.

use super::Sight;
use crate::excuse::Tick;
use crate::observation::Ms;

/// Since something was last delivered, or work began to be owed.
#[derive(Debug, Clone, Default)]
pub struct SilenceSign {
    /// Counted time at which a page first told of tokens that no byte has followed.
    made_at: Option<Ms>,
    /// The count of steps at the first scrape in it, and by how much the last one was beyond.
    steps_first: Option<f64>,
    steps: Option<f64>,
}

impl SilenceSign {
    /// Takes one tick in; `scraped`: its figures are of a new page.
    pub fn look(&mut self, tick: &Tick, sight: &Sight<'_>, scraped: bool) {
        if sight.heard() || sight.owed.is_none() {
            *self = Self::default();
            return;
        }
        if sight.page_delivered {
            self.made_at.get_or_insert(tick.counted_ms);
        }
        if let Some(steps) = sight.metrics.and_then(|metrics| metrics.iterations).filter(|_| scraped) {
            // a sum from which a rank is missing goes back
            let first = self.steps_first.map_or(steps, |first| first.min(steps));
            (self.steps_first, self.steps) = (Some(first), Some(steps - first));
        }
    }

    /// Since when tokens are made of which no byte tells; `None` where the loop has none to pass on.
    pub fn made_at(&self) -> Option<Ms> {
        self.made_at
    }

    /// How many steps were counted between its first scrape and its last; `None` where nobody counts them.
    pub fn steps(&self) -> Option<f64> {
        self.steps
    }
}
