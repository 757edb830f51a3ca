//! Connections that the kernel took and the front end does not accept: a queue that stands is a front end that takes nothing in, whether or
//! not anybody asks it.

use crate::excuse::Tick;
use crate::observation::{Ms, ProcObs};

/// The queue is counted now and then, and what was counted is told for ten seconds: one that stands for longer was counted twice.
const STANDS_MS_MIN: Ms = 15_000;

/// The accept queue of the engine's port over time.
#[derive(Debug, Clone, Default)]
pub struct Backlog {
    waiting: u32,
    /// Counted time since which it has not shrunk, and was not empty.
    since: Option<Ms>,
}

impl Backlog {
    /// Takes one tick in; where nobody counts nothing stands.
    pub fn look(&mut self, tick: &Tick, proc: Option<&ProcObs>) {
        let waiting = proc.and_then(|proc| proc.accept_queue).unwrap_or(0);
        let shrank = waiting < std::mem::replace(&mut self.waiting, waiting);
        self.since = if waiting == 0 || shrank { None } else { self.since.or(Some(tick.counted_ms)) };
    }

    /// How many wait, and for how long it has been so, where the queue stands.
    pub fn stands(&self, tick: &Tick) -> Option<(u32, Ms)> {
        let ms = self.since.map(|at| tick.since(at))?;
        (ms >= STANDS_MS_MIN).then_some((self.waiting, ms))
    }
}
