//! What the host's other work does to a thread that wants a core, and what the agent is told of it (`agent/src/sources/queue.rs`): how long
//! it stood in line between two looks, where work stood still at both and it could run at both.

use super::profile::{MS, Us};
use super::world::{Missing, World};
use crate::observation::Ms;

/// As the agent has them: a look that is longer ago says nothing, and an engine without a page is asked from here on.
const BASELINE_MAX: Us = 400 * MS;
const STILL_MAX: Us = 500 * MS;

/// Follows the thread that steps.
#[derive(Debug, Clone, Default)]
pub struct QueueLook {
    /// Tokens, chunks and answers at the look before.
    moved: [u64; 3],
    still_since: Option<Us>,
    /// The last look at the thread, and whether it could run.
    last: Option<(Us, bool)>,
}

impl QueueLook {
    /// What the agent would say at this look. `runs`: the thread is in state R.
    pub fn look(&mut self, world: &World, runs: bool) -> Option<Ms> {
        let before = if self.asks(world) { self.last.replace((world.now, runs)) } else { None };
        let (at, ran) = before.filter(|(at, _)| world.now.saturating_sub(*at) <= BASELINE_MAX)?;
        Some(if ran && runs { in_line(world, at) / MS } else { 0 })
    }

    /// Does work stand still since the look before, by what page and gate say?
    fn asks(&mut self, world: &World) -> bool {
        let (engine, signals) = (&world.engine, world.engine.profile.signals);
        let page = signals.page && !world.misses(Missing::Page);
        let (running, waiting) = if page { engine.queue() } else { (0, 0) };
        let (book, gate) = (&engine.book, signals.gate);
        let tokens = if page { engine.counters.generated } else { 0 };
        let heard = if gate { [book.chunks, book.done + u64::from(book.in_flight - book.awaiting)] } else { [0, 0] };
        let now = [tokens, heard[0], heard[1]];
        let moved = std::mem::replace(&mut self.moved, now) != now;
        let owed = running + waiting > 0 || (gate && book.in_flight > 0);
        self.still_since = (owed && !moved).then(|| self.still_since.unwrap_or(world.now));
        self.still_since.is_some_and(|since| page || world.now.saturating_sub(since) >= STILL_MAX)
    }
}

/// How much of the time since then a thread that could run all along stood in line.
fn in_line(world: &World, from: Us) -> Us {
    let env = &world.env;
    let starved = env.starved.min(world.now).saturating_sub(env.starved_since.max(from));
    let rest = world.now.saturating_sub(from).saturating_sub(starved);
    starved + rest - rest.saturating_mul(1_000) / world.engine.mood.host_milli.max(1_000)
}
