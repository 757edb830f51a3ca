//! The team as a device sees it whose collectives go by a link of its own (`backend::peers`): the numbers of collectives are those of the
//! shared memory, which says how far each rank's device has come.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::Team;
use super::layout::Word;
use super::witness::{PEER_LOOK, Witness};
use crate::backend::{Peers, Watch};
use crate::stuck::{Stuck, StuckKind};
use crate::waits::Patience;

/// All ranks begin to allocate their caches at once, and come to a talk first.
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
        Box::new(TeamWatch { team: self, witness: Witness::default(), counted: Duration::ZERO, next_look: PEER_LOOK })
    }

    fn fails(&self, stuck: &Stuck) {
        self.fail(stuck.clone());
    }

    fn are_well(&self) -> Result<(), Stuck> {
        self.look_for_words(&self.others(), &Patience::new(self.allowed()))
    }
}

/// One wait's sight of the others.
struct TeamWatch<'a> {
    team: &'a Team,
    witness: Witness,
    /// Time that counted at the last question, and when the next look is due.
    counted: Duration,
    next_look: Duration,
}

impl TeamWatch<'_> {
    /// Time that counts begins anew with each sign of life, and so do the looks.
    fn is_due(&mut self, patience: &Patience) -> bool {
        let now = patience.counted();
        if now < self.counted {
            self.next_look = PEER_LOOK;
        }
        self.counted = now;
        let due = self.team.allowed().is_some() && now >= self.next_look;
        if due {
            self.next_look += PEER_LOOK;
        }
        due
    }

    /// What this rank's device has come to, and the ranks whose devices have not.
    fn behind(&self) -> (u64, Vec<usize>) {
        let arrived = |rank| self.team.layout().of(rank, Word::Arrived).load(Ordering::Acquire);
        let mine = arrived(self.team.rank());
        (mine, (0..self.team.world()).filter(|rank| arrived(*rank) < mine).collect())
    }

    /// What its device owes the others' ones cannot be taken back, as a value of the shared memory can.
    fn look_for_spoilt(&self, patience: &Patience) -> Result<(), Stuck> {
        match self.team.spoiled() {
            Some((rank, why)) if rank != self.team.rank() => {
                let text = format!("rank {rank} could not compute its part, and its device was waited for: {why}");
                Err(self.team.give_up(StuckKind::RankSilent { ranks: vec![rank] }, text, patience))
            }
            _ => Ok(()),
        }
    }
}

impl Watch for TeamWatch<'_> {
    fn look(&mut self, patience: &mut Patience) -> Result<bool, Stuck> {
        if !self.is_due(patience) {
            return Ok(false);
        }
        let (others, (at, behind)) = (self.team.others(), self.behind());
        self.team.look_for_words(&others, patience)?;
        self.look_for_spoilt(patience)?;
        self.team.look_at((&others, &behind), &mut self.witness, &|| self.team.name(at), patience)?;
        // what was forgiven is no sign of life
        self.counted = patience.counted();
        Ok(true)
    }

    fn blame(&self, patience: &Patience) -> Option<Stuck> {
        let (at, behind) = self.behind();
        let how = "has a device that has not come";
        (!behind.is_empty()).then(|| self.team.silent(behind, how, &self.team.name(at), patience))
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]
mod tests {
    use super::*;

    /// Looks until something is seen; a look that is never due would go on for ever.
    fn seen(team: &Team) -> Stuck {
        let (mut watch, mut patience) = (team.watch(), Patience::new(Some(Duration::from_secs(120))));
        loop {
            if let Err(stuck) = watch.look(&mut patience) {
                return stuck;
            }
            assert!(patience.turn(), "nothing was seen");
        }
    }

    #[test]
    fn a_wait_ends_with_what_a_peer_could_not_compute_and_looks_begin_anew_with_each_sign_of_life() {
        let (first, file) = Team::create(2).unwrap();
        let second = Team::join(&file, 1, 2).unwrap();
        for team in [&first, &second] {
            team.allow(Some(Duration::from_secs(60)));
        }
        let mut watch =
            TeamWatch { team: &first, witness: Witness::default(), counted: Duration::ZERO, next_look: PEER_LOOK };
        let mut patience = Patience::new(None);
        for life in 0..2 {
            patience.renew();
            assert!(!watch.is_due(&patience), "life {life}: too soon");
            while patience.counted() < PEER_LOOK {
                patience.turn();
            }
            assert!(watch.is_due(&patience) && !watch.is_due(&patience), "life {life}: once each time");
        }
        std::thread::scope(|scope| {
            let other = scope.spawn(|| second.agree(1, 7));
            first.agree(1, 7).unwrap();
            other.join().unwrap().unwrap();
        });
        second.spoil("9 bytes are wanted");
        let stuck = seen(&first);
        assert_eq!(stuck.kind, StuckKind::RankSilent { ranks: vec![1] });
        assert!(stuck.text.ends_with("its device was waited for: 9 bytes are wanted"), "{}", stuck.text);
        assert_eq!(first.fault(), Some(stuck));
    }

    #[test]
    fn whose_device_has_not_come_is_named_and_a_rank_that_gave_up_is_heard() {
        let (first, file) = Team::create(3).unwrap();
        let [second, third] = [1, 2].map(|rank| Team::join(&file, rank, 3).unwrap());
        let ranks = [&first, &second, &third];
        for team in ranks {
            team.allow(Some(Duration::from_secs(60)));
            assert_eq!(team.begins(), 1);
        }
        let blamed = |team: &Team| team.watch().blame(&Patience::new(None)).map(|stuck| stuck.kind);
        assert_eq!(ranks.map(blamed), [None, None, None], "none has come: each is at fault itself");
        first.reached(1);
        third.reached(1);
        assert_eq!(blamed(&second), None);
        assert_eq!(blamed(&third), Some(StuckKind::RankSilent { ranks: vec![1] }));
        assert_eq!(first.are_well().unwrap_err().kind, StuckKind::RankSilent { ranks: vec![1] }, "as rank 2 said");
    }
}
