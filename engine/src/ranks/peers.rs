//! The team as a device sees it whose collectives go by a link of its own (`backend::peers`): the numbers of collectives are those of the
//! shared memory, which says how far each rank's device has come.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::Team;
use super::layout::Word;
use super::witness::{PEER_LOOK, Witness};
use crate::backend::{Peers, Watch};
use crate::stuck::Stuck;
use crate::waits::Patience;

/// Ranks come to a talk when they have allocated their caches.
const TALK_MAX: Duration = Duration::from_secs(60);

impl Peers for Team {
    fn rank(&self) -> usize {
        Self::rank(self)
    }

    fn world(&self) -> usize {
        Self::world(self)
    }

    fn tell_all(&self, words: &[u32]) -> Option<Vec<Vec<u32>>> {
        let before = self.allowed();
        self.allow(Some(TALK_MAX));
        let mine: Vec<f32> = words.iter().map(|word| f32::from_bits(*word)).collect();
        let mut all = vec![Vec::new(); self.world()];
        self.exchange(&mine, mine.len(), "talk", |rank, _: Range<usize>, theirs: &[AtomicU32]| {
            all[rank].extend(theirs.iter().map(|word| word.load(Ordering::Relaxed)));
        });
        self.allow(before);
        all.iter().all(|told| told.len() == words.len()).then_some(all)
    }

    fn begins(&self) -> u64 {
        self.next_collective()
    }

    fn reached(&self, collective: u64) {
        self.layout().of(Self::rank(self), Word::Arrived).store(collective, Ordering::Release);
    }

    fn watch(&self) -> Box<dyn Watch + '_> {
        Box::new(TeamWatch { team: self, witness: Witness::default(), next_look: PEER_LOOK })
    }
}

/// One wait's sight of the others.
struct TeamWatch<'a> {
    team: &'a Team,
    witness: Witness,
    next_look: Duration,
}

impl TeamWatch<'_> {
    /// What this rank's device has come to, and the ranks whose devices have not.
    fn behind(&self) -> (u64, Vec<usize>) {
        let arrived = |rank| self.team.layout().of(rank, Word::Arrived).load(Ordering::Acquire);
        let mine = arrived(self.team.rank());
        (mine, (0..self.team.world()).filter(|rank| arrived(*rank) < mine).collect())
    }
}

impl Watch for TeamWatch<'_> {
    fn look(&mut self, patience: &mut Patience) -> Result<bool, Stuck> {
        // on the wall: what counts begins anew with each sign of life
        if self.team.allowed().is_none() || patience.waited() < self.next_look {
            return Ok(false);
        }
        self.next_look = patience.waited() + PEER_LOOK;
        let others: Vec<usize> = (0..self.team.world()).filter(|rank| *rank != self.team.rank()).collect();
        self.team.look_for_words(&others, patience)?;
        let at = self.behind().0;
        self.team.look_at(&others, &mut self.witness, &|| self.team.name(at), patience)?;
        Ok(true)
    }

    fn blame(&self, patience: &Patience) -> Option<Stuck> {
        let (at, behind) = self.behind();
        let how = "has a device that has not come";
        (!behind.is_empty()).then(|| self.team.silent(behind, how, &self.team.name(at), patience))
    }
}
