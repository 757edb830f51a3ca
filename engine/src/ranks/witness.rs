//! What a wait, and the guard beside the loop, see of the processes of other ranks: one that is gone ends the step, one that is stopped or
//! asleep in it soon, however long the step may last, and time in which one wanted the processor and did not get it does not count. Reads
//! `/proc`.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Team;
use super::layout::Word;
use super::peer::{Peer, Stillness, asleep};
use crate::stuck::{Stuck, StuckKind};
use crate::waits::{Patience, RunQueues, Turns};

/// How often a wait looks at the processes that it waits for, from when on.
pub(super) const PEER_LOOK: Duration = Duration::from_millis(50);
/// A rank that is stopped so long does not come back in time.
const STOPPED_MAX: Duration = Duration::from_millis(400);
/// A rank that has slept so long in a step, without a moment of work, hangs: who computes runs, and who waits for others or for a device looks
/// a thousand times a second. Shorter than the shortest lease, so that what it is is said.
const STILL_MAX: Duration = Duration::from_millis(500);

/// What one wait has seen of the processes that it waits for.
#[derive(Debug, Default)]
pub(super) struct Witness {
    stopped_at: Option<Duration>,
    stillness: Stillness,
    /// How long the ranks' threads were kept from running.
    run_queues: RunQueues,
}

/// What the guard has seen of the other ranks in the step under way.
#[derive(Debug, Default)]
pub struct Beside {
    counted: Duration,
    next_look: Duration,
    witness: Witness,
}

impl Team {
    /// Looks at the processes of those who are waited for: one that is gone ends the wait, one that is stopped soon. What those who are late
    /// wanted of the processor and did not get is forgiven.
    pub(super) fn look_at(
        &self,
        (missing, late): (&[usize], &[usize]),
        witness: &mut Witness,
        what: &dyn Fn() -> String,
        patience: &mut Patience,
    ) -> Result<(), Stuck> {
        let peers: Vec<(usize, Peer)> = missing.iter().map(|rank| (*rank, self.peer(*rank))).collect();
        if let Some((rank, _)) = peers.iter().find(|(_, peer)| *peer == Peer::Gone) {
            let text = format!("the process of rank {rank} is gone; rank {} waited for it at {}", self.rank(), what());
            return Err(self.give_up(StuckKind::RankGone { rank: *rank }, text, patience));
        }
        let stopped: Vec<usize> = peers.iter().filter(|(_, p)| *p == Peer::Stopped).map(|(rank, _)| *rank).collect();
        if stopped.is_empty() {
            self.forgive(late, witness, patience);
        }
        let still = if self.is_in_step() { self.still(late, witness, patience.counted()) } else { Vec::new() };
        if !still.is_empty() {
            return Err(self.silent(still, "sleeps and has not come", &what(), patience));
        }
        self.look_at_stopped(stopped, &mut witness.stopped_at, what, patience)
    }

    /// Those of `ranks` whose threads have slept for too long.
    fn still(&self, ranks: &[usize], witness: &mut Witness, now: Duration) -> Vec<usize> {
        let tid = |rank| self.layout().of(rank, Word::Tid).load(Ordering::Relaxed);
        let is_still = |rank: &usize| witness.stillness.look(*rank, asleep(tid(*rank)), now) >= STILL_MAX;
        ranks.iter().copied().filter(is_still).collect()
    }

    /// The same for ranks that are stopped now; since when there are any, in counted time, is kept in `stopped_at`.
    fn look_at_stopped(
        &self,
        stopped: Vec<usize>,
        stopped_at: &mut Option<Duration>,
        what: &dyn Fn() -> String,
        patience: &Patience,
    ) -> Result<(), Stuck> {
        if stopped_for(&stopped, stopped_at, patience.counted()) < STOPPED_MAX {
            return Ok(());
        }
        Err(self.silent(stopped, "is stopped and has not come", &what(), patience))
    }

    /// Ranks that load and are stopped: nobody waits for these to the end of the time that loading may be silent.
    pub(super) fn look_at_loading(
        &self,
        loading: &[usize],
        stopped_at: &mut Option<Duration>,
        patience: &Patience,
    ) -> Result<(), Stuck> {
        let is_stopped = |rank: &usize| self.peer(*rank) == Peer::Stopped;
        let stopped = loading.iter().copied().filter(is_stopped).collect();
        self.look_at_stopped(stopped, stopped_at, &|| "the end of loading".to_owned(), patience)
    }

    /// The guard's look, `passed` after its last one in this step, at all other ranks: the first rank may compute for long before it waits for
    /// one that is frozen.
    pub(super) fn look_beside(&self, beside: &mut Beside, passed: Duration) -> Option<Stuck> {
        beside.counted += passed;
        if beside.counted < beside.next_look {
            return None;
        }
        let (now, others) = (beside.counted, self.others());
        beside.next_look = now + PEER_LOOK;
        let is_stopped = |rank: &usize| self.peer(*rank) == Peer::Stopped;
        let stopped: Vec<usize> = others.iter().copied().filter(is_stopped).collect();
        let witness = &mut beside.witness;
        let stopped_for = stopped_for(&stopped, &mut witness.stopped_at, now);
        let still = self.still(&others, witness, now);
        let (ranks, how, waited) = match (stopped_for >= STOPPED_MAX, still.is_empty()) {
            (true, _) => (stopped, "is stopped", stopped_for),
            (_, false) => (still, "sleeps", STILL_MAX),
            _ => return None,
        };
        let names: Vec<String> = ranks.iter().map(ToString::to_string).collect();
        let text = format!("rank {} {how} in a step, and has for {} ms", names.join(", "), waited.as_millis());
        Some(Stuck { kind: StuckKind::RankSilent { ranks }, text, waited })
    }

    fn peer(&self, rank: usize) -> Peer {
        Peer::look(self.layout().of(rank, Word::Pid).load(Ordering::Relaxed))
    }

    /// A rank that wants the processor and does not get it, or whose helper does not, is late, not silent: the longest such time does not count.
    pub(super) fn forgive(&self, missing: &[usize], witness: &mut Witness, patience: &mut Patience) {
        let longest = witness.run_queues.held_up(&self.threads_of(missing), PEER_LOOK, &Turns::of).min(PEER_LOOK);
        patience.forgive(longest);
        self.forgiven().fetch_add(u64::try_from(longest.as_nanos()).unwrap_or(0), Ordering::Relaxed);
    }
}

/// For how long there have been any; since when is kept in `stopped_at`.
fn stopped_for(stopped: &[usize], stopped_at: &mut Option<Duration>, now: Duration) -> Duration {
    *stopped_at = stopped_at.or(Some(now)).filter(|_| !stopped.is_empty());
    stopped_at.map_or(Duration::ZERO, |since| now.saturating_sub(since))
}

#[cfg(test)]
#[path = "witness_tests.rs"]
mod tests;
