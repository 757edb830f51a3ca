//! Fences of a healthy engine: whose doing each was, and how long it stood.

use super::bounds::scene;
use super::profile::{HOUR, SECOND, Us};
use super::waits::foretold;
use super::world::World;
use crate::verdict::Outcome;

/// A fence this soon after the environment let the engine go is still the environment's doing.
pub const ENV_GRACE: Us = 3 * SECOND;
/// A fence that a native engine's next step lifts within this is a blink: the price of a low floor
/// (`docs/decisions/2026-11-21-late-agents-and-low-floors.md`), which also says how many a day may be.
const BLINK_MAX: Us = SECOND;
const BLINKS_A_DAY: u64 = 8;
/// So often a slow-down that nobody announced may fence: what turns a hundred times slower at once is told from a hang by its end alone.
const SLOW_MAX: u64 = 3;

/// The account of one history.
#[derive(Debug, Clone, Default)]
pub struct Fences {
    /// The environment held the engine as well.
    pub env: u64,
    /// A step was many times longer than any before it, as in the recording `c0`.
    pub slow: u64,
    pub blinks: u64,
    /// A front end or a grammar kept a request waiting, which `docs/detector.md` says is fenced.
    pub waits: u64,
    /// Nothing was the matter.
    pub wrong: u64,
    open: Option<Open>,
    /// A fence stands that has been accounted for.
    stands: bool,
    /// The slow-down that was fenced last, by its end, and how often.
    slowed: (Us, u64),
}

#[derive(Debug, Clone)]
struct Open {
    at: Us,
    native: bool,
    scene: String,
}

impl Fences {
    /// Takes one tick of a healthy engine in; the fence that has turned out to be wrong, if one has.
    pub fn tick(&mut self, world: &World, outcome: &Outcome) -> Option<(Us, String)> {
        let fenced = outcome.verdict.class().is_some();
        if let Some(open) = self.open.take() {
            let stood = world.now.saturating_sub(open.at);
            if fenced && stood <= BLINK_MAX && open.native {
                self.open = Some(open);
                return None;
            }
            if stood <= BLINK_MAX && open.native {
                self.blinks += 1;
                self.stands = fenced;
                return None;
            }
            self.wrong += 1;
            self.stands = fenced;
            return Some((open.at, open.scene));
        }
        let begins = fenced && !std::mem::replace(&mut self.stands, fenced);
        if begins {
            self.begin(world, outcome);
        }
        None
    }

    fn begin(&mut self, world: &World, outcome: &Outcome) {
        if world.now <= world.env.stood_still + ENV_GRACE {
            self.env += 1;
        } else if foretold(&world.engine, world.now) {
            self.waits += 1;
        } else if world.now <= world.env.slowed && self.one_more_slow(world.env.slowed) {
            self.slow += 1;
        } else {
            self.open = Some(Open { at: world.now, native: world.engine.native(), scene: scene(world, outcome) });
        }
    }

    fn one_more_slow(&mut self, until: Us) -> bool {
        let before = if self.slowed.0 == until { self.slowed.1 } else { 0 };
        self.slowed = (until, before + 1);
        before < SLOW_MAX
    }

    /// How many blinks a span of health may have. An agent that begins anew does not know that the floor was too low before.
    pub fn blinks_max(benign: Us, agent_restarts: u64) -> u64 {
        BLINKS_A_DAY * (benign / (24 * HOUR) + 1) + agent_restarts
    }

    pub fn add(&mut self, more: &Self) {
        self.env += more.env;
        self.slow += more.slow;
        self.blinks += more.blinks;
        self.waits += more.waits;
        self.wrong += more.wrong;
    }
}
