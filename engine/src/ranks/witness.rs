//! What a wait sees of the processes of other ranks: one that is gone ends it, one that is stopped soon, and time in which one wanted the
//! processor and did not get it does not count. Reads `/proc`.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Team;
use super::layout::Word;
use super::peer::Peer;
use crate::stuck::{Stuck, StuckKind};
use crate::waits::{Patience, RunQueue};

/// How often a wait looks at the processes that it waits for, from when on.
pub(super) const PEER_LOOK: Duration = Duration::from_millis(50);
/// A rank that is stopped so long does not come back in time.
const STOPPED_MAX: Duration = Duration::from_millis(400);

/// What one wait has seen of the processes that it waits for.
#[derive(Debug, Default)]
pub(super) struct Witness {
    stopped_at: Option<Duration>,
    /// For each rank, how long its thread was kept from running.
    run_queues: Vec<RunQueue>,
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
        self.look_at_stopped(stopped, &mut witness.stopped_at, what, patience)
    }

    /// The same for ranks that are stopped now; since when there are any, in counted time, is kept in `stopped_at`.
    fn look_at_stopped(
        &self,
        stopped: Vec<usize>,
        stopped_at: &mut Option<Duration>,
        what: &dyn Fn() -> String,
        patience: &Patience,
    ) -> Result<(), Stuck> {
        if stopped.is_empty() {
            *stopped_at = None;
            return Ok(());
        }
        let since = *stopped_at.get_or_insert(patience.counted());
        if patience.counted().saturating_sub(since) < STOPPED_MAX {
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

    fn peer(&self, rank: usize) -> Peer {
        Peer::look(self.layout().of(rank, Word::Pid).load(Ordering::Relaxed))
    }

    /// A rank that wants the processor and does not get it is late, not silent: the longest such time does not count.
    pub(super) fn forgive(&self, missing: &[usize], witness: &mut Witness, patience: &mut Patience) {
        witness.run_queues.resize(self.world(), RunQueue::default());
        let mut longest = Duration::ZERO;
        for rank in missing {
            let tid = self.layout().of(*rank, Word::Tid).load(Ordering::Relaxed);
            longest = longest.max(witness.run_queues[*rank].held_up(tid));
        }
        let longest = longest.min(PEER_LOOK);
        patience.forgive(longest);
        self.forgiven().fetch_add(u64::try_from(longest.as_nanos()).unwrap_or(0), Ordering::Relaxed);
    }
}
