//! Room taken in the KV cache: what tells prefill and decode from a loop that merely turns, where no counter says so, and what tells
//! that answered prompts may be prefilled again.

use crate::excuse::Tick;
use crate::leavers::TOLD_MS_MAX;
use crate::observation::Ms;
use crate::policy::Policy;
use crate::rounds::Rounds;
use crate::signs::Sight;

/// From this use on requests may be preempted.
const FULL: f64 = 0.85;
/// And from this on by those who run alone, whoever waits: the next token of any of them may find no room.
const BRIM: f64 = 0.98;
/// Falls that nobody's end explains, since a request last got something: from here on growth is the same room taken again.
const FALLS_MAX: u32 = 3;

/// So many ends are remembered until their room is given back.
const ENDS_MAX: usize = 8;
/// Each until the page has moved so often, for the step under way ends first and the next one shows it; and for so long in any case.
const ENDS_MOVES_MIN: u32 = 3;
const ENDS_MS_MIN: Ms = TOLD_MS_MAX;
/// Who was preempted is taken in again as soon as there is room, which no scrape need see.
const QUEUED_MS_MAX: Ms = 60_000;
/// So long a cache that was at the brim may be: scrapes come later than preemptions.
const BRIM_MS_MAX: Ms = 15_000;

/// Ends of requests whose room may not have been given back yet. One that has given it back, or that waited and held none, explains no later
/// fall: where somebody gives up now and then, prompts that go round would have an excuse for each of their rounds.
#[derive(Debug, Clone, Default)]
struct Ends([Option<End>; ENDS_MAX]);

#[derive(Debug, Clone, Copy)]
struct End {
    /// Counted time.
    at: Ms,
    /// How often the page has moved since.
    moves: u32,
}

impl Ends {
    /// So many requests have ended since the last tick.
    fn come(&mut self, tick: &Tick, count: u64) {
        for _ in 0..count.min(ENDS_MAX as u64) {
            // an empty place is older than any
            if let Some(place) = self.0.iter_mut().min_by_key(|place| place.map(|end| end.at)) {
                *place = Some(End { at: tick.counted_ms, moves: 0 });
            }
        }
    }

    /// Takes the oldest for a fall; false where none is left.
    fn explain(&mut self) -> bool {
        let oldest = self.0.iter_mut().filter(|place| place.is_some()).min_by_key(|place| place.map(|end| end.at));
        oldest.is_some_and(|place| place.take().is_some())
    }

    /// A new page, which has moved or not.
    fn fade(&mut self, tick: &Tick, moved: bool) {
        for place in &mut self.0 {
            let counted = place.map(|end| End { moves: end.moves.saturating_add(u32::from(moved)), ..end });
            *place = counted.filter(|end| end.moves < ENDS_MOVES_MIN || tick.since(end.at) < ENDS_MS_MIN);
        }
    }
}

/// Use of the cache since a request last got something or ended.
#[derive(Debug, Clone, Default)]
pub struct CacheSign {
    used: f64,
    /// The greatest since room was last given back.
    most: f64,
    /// A request ended: what the next scrape says is the new measure.
    freed: bool,
    falls: u32,
    ends: Ends,
    rounds: Rounds,
    running: f64,
    /// Counted time at which use last grew, by work and not by another admission.
    pub filled_at: Ms,
    full_at: Option<Ms>,
    brim_at: Option<Ms>,
    /// When requests were last known to wait, or might have.
    queued_at: Option<Ms>,
}

impl CacheSign {
    /// Takes one look in; `scraped` is whether the page is a new one, `at_ms` when that was true.
    pub fn look(&mut self, tick: &Tick, sight: &Sight<'_>, scraped: bool, at_ms: Ms) {
        self.rounds.look(tick.now_ms, sight, scraped, at_ms);
        let nobody = sight.gate.is_some_and(|gate| gate.in_flight == 0);
        self.freed |= sight.delivered() || sight.answered_count > 0 || nobody;
        self.ends.come(tick, sight.answered_count);
        if sight.delivered() || nobody {
            self.falls = 0;
        }
        let used = sight.metrics.and_then(|metrics| metrics.kv_usage).filter(|used| used.is_finite());
        let Some(used) = used.filter(|_| scraped) else { return };
        let running = sight.metrics.and_then(|metrics| metrics.running).unwrap_or(0.0);
        let admitted = running > std::mem::replace(&mut self.running, running);
        let before = std::mem::replace(&mut self.used, used);
        let freed = std::mem::take(&mut self.freed);
        // (whose room was given back is no excuse for another fall)
        let left = used < before && self.ends.explain();
        if used < before && !freed {
            // room given back late, at the end of a long step, is a new measure no less
            self.most = if left { used } else { self.most };
            // a slot may keep what it held until somebody else is admitted to it (llama.cpp)
            self.falls += u32::from(!left && !admitted && self.falls < FALLS_MAX);
        }
        self.ends.fade(tick, sight.metrics_moved);
        if used > self.most && !freed && !admitted && self.falls < FALLS_MAX && !self.rounds.in_vain() {
            self.filled_at = tick.mark(at_ms);
        }
        self.most = if freed { used } else { used.max(self.most) };
        if used >= FULL {
            self.full_at = Some(tick.counted_ms);
        }
        if used >= BRIM {
            self.brim_at = Some(tick.counted_ms);
        }
        if sight.metrics.and_then(|metrics| metrics.waiting).is_none_or(|waiting| waiting > 0.0) {
            self.queued_at = Some(tick.counted_ms);
        }
    }

    /// May requests that were preempted be prefilled again? Where the queue has long been empty none is, unless room is short right now.
    pub fn may_preempt(&self, tick: &Tick, policy: &Policy) -> bool {
        let lately = |at: Option<Ms>, ms: Ms| at.is_some_and(|at| tick.since(at) < ms);
        let queued = lately(self.queued_at, QUEUED_MS_MAX) && lately(self.full_at, policy.patience_cap_ms);
        queued || lately(self.brim_at, BRIM_MS_MAX)
    }
}
