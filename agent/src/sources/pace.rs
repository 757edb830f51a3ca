//! How closely a tick looks (V6): one that owes nothing is left at rest, a healthy engine is glanced at, one whose work stands still for a
//! tick is looked at, and one that is in doubt is stared at. What is dear (`/proc`, scrapes, the log) follows this, so that ten ticks a second
//! cost next to nothing while nothing is wrong, and nothing is seen later than before once something is. Pure.

use vitals::observation::{GateObs, Ms, PageObs};
use vitals::verdict::Verdict;

/// Work that stood still for so long is stared at: a glance that is a little late proves nothing.
const STILL_MS_MAX: Ms = 500;

/// How closely.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pace {
    /// As a glance, and what only matters once work is owed is asked more rarely still: nothing is owed, by the gate's word too.
    Rest,
    /// The page and what the gate has said; everything else now and then.
    Glance,
    /// Also the engine's processes, at this tick.
    Look,
    /// All sources as often as they can bear.
    #[default]
    Stare,
}

/// What makes the pace, from tick to tick.
#[derive(Debug, Clone, Default)]
pub struct PaceKeeper {
    before: Option<Progress>,
    /// Since when nothing was delivered although work is owed.
    still_since_ms: Option<Ms>,
}

/// Everything that moves while work is delivered, by the page and by the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Progress {
    tokens: u64,
    chunks: u64,
    answered: u64,
}

impl PaceKeeper {
    /// The pace of this tick. `verdict` is that of the tick before.
    pub fn pace(&mut self, now_ms: Ms, verdict: &Verdict, pages: &[PageObs], gate: Option<&GateObs>) -> Pace {
        let now = Progress {
            tokens: pages.iter().map(|page| page.tokens_delivered).sum(),
            chunks: gate.map_or(0, |gate| gate.chunks_delivered),
            answered: gate.map_or(0, GateObs::answered),
        };
        let moved = self.before.replace(now).is_some_and(|before| before != now);
        let still = is_owed(pages, gate) && !moved;
        self.still_since_ms = still.then(|| self.still_since_ms.unwrap_or(now_ms));
        let still_ms = self.still_since_ms.map(|since| now_ms.saturating_sub(since));
        let rests = gate.is_some() && !is_owed(pages, gate);
        match (is_calm(verdict), still_ms) {
            (false, _) => Pace::Stare,
            (true, Some(ms)) if ms >= STILL_MS_MAX => Pace::Stare,
            (true, Some(_)) => Pace::Look,
            (true, None) if rests => Pace::Rest,
            (true, None) => Pace::Glance,
        }
    }
}

/// Is work owed, by the gate or by a page?
pub fn is_owed(pages: &[PageObs], gate: Option<&GateObs>) -> bool {
    gate.is_some_and(|gate| gate.in_flight > 0) || pages.iter().any(|page| page.running > 0 || page.waiting > 0)
}

/// Nothing is held against the engine, and nothing is awaited of it.
fn is_calm(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::Idle | Verdict::Progressing | Verdict::Slow | Verdict::Sleeping)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vitals::verdict::StallClass;

    fn gate(in_flight: u32, chunks: u64) -> GateObs {
        GateObs { in_flight, chunks_delivered: chunks, ..GateObs::default() }
    }

    #[test]
    fn what_delivers_is_glanced_at_and_what_owes_nothing_rests() {
        let mut keeper = PaceKeeper::default();
        let paces = [(0, gate(0, 0)), (100, gate(0, 0)), (200, gate(2, 1)), (300, gate(2, 5)), (400, gate(0, 5))]
            .map(|(now_ms, gate)| keeper.pace(now_ms, &Verdict::Progressing, &[], Some(&gate)));
        assert_eq!(paces, [Pace::Rest, Pace::Rest, Pace::Glance, Pace::Glance, Pace::Rest]);
        assert_eq!(keeper.pace(500, &Verdict::Idle, &[], None), Pace::Glance, "a gate that is silent says nothing");
    }

    #[test]
    fn work_that_stands_still_for_one_tick_is_looked_at_and_soon_stared_at() {
        let mut keeper = PaceKeeper::default();
        let mut pace = |now_ms, chunks| keeper.pace(now_ms, &Verdict::Progressing, &[], Some(&gate(1, chunks)));
        assert_eq!(pace(0, 3), Pace::Look, "a first tick has seen nothing move");
        assert_eq!(pace(100, 4), Pace::Glance);
        assert_eq!([pace(200, 4), pace(600, 4), pace(700, 4)], [Pace::Look, Pace::Look, Pace::Stare]);
        assert_eq!(pace(800, 5), Pace::Glance);
    }

    #[test]
    fn whatever_is_not_calm_is_stared_at() {
        for verdict in [Verdict::Starting, Verdict::Unknown, Verdict::Dead, Verdict::Suspect(StallClass::Livelock)] {
            assert_eq!(PaceKeeper::default().pace(0, &verdict, &[], None), Pace::Stare, "{verdict:?}");
        }
    }
}
