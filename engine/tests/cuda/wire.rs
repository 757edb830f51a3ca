//! What joins the devices of several ranks in one process, as NCCL joins those of several: each has an end, is whole when all have come, and
//! tells the others of one that gave up.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use engine::backend::cuda::driver::{DriverError, LINK_NAME_BYTES, LinkName};

/// For the other ranks' threads.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the ranks brought to a collective, by rank.
type Brought = Vec<Option<Vec<u8>>>;

/// The ranks of one model.
#[derive(Debug, Default)]
pub struct Wire {
    /// Ranks whose device refuses to be joined.
    pub refuses: AtomicBool,
    come: AtomicUsize,
    parted: AtomicBool,
    rounds: Mutex<HashMap<usize, Brought>>,
    more: Condvar,
}

/// One rank's end.
pub struct End {
    wire: Arc<Wire>,
    rank: usize,
    world: usize,
    round: AtomicUsize,
}

const NAME: LinkName = LinkName([0x5a; LINK_NAME_BYTES]);

impl Wire {
    pub fn name(wire: Option<&Arc<Self>>) -> Result<LinkName, DriverError> {
        let none = || DriverError { call: "NCCL cannot be loaded", reason: "this test has none".to_owned() };
        wire.map(|_| NAME).ok_or_else(none)
    }

    pub fn link(wire: Option<&Arc<Self>>, name: &LinkName, rank: usize, world: usize) -> Result<End, DriverError> {
        let refused = |reason: &str| DriverError { call: "ncclCommInitRankConfig", reason: reason.to_owned() };
        let wire = wire.filter(|_| *name == NAME).ok_or_else(|| refused("invalid argument"))?;
        if wire.refuses.load(Relaxed) && rank == 1 {
            return Err(refused("unhandled cuda error"));
        }
        wire.come.fetch_add(1, Relaxed);
        Ok(End { wire: wire.clone(), rank, world, round: AtomicUsize::new(0) })
    }

    /// Whether a rank gave its end up.
    pub fn is_parted(&self) -> bool {
        self.parted.load(Relaxed)
    }

    /// Collectives that all ranks have brought their values to.
    pub fn rounds(&self) -> usize {
        self.rounds.lock().unwrap().len()
    }
}

impl End {
    pub fn is_linked(&self) -> Result<bool, DriverError> {
        if self.wire.is_parted() {
            return Err(DriverError { call: "a collective of NCCL", reason: "a rank gave up".to_owned() });
        }
        // one that cannot join never comes
        Ok(self.wire.refuses.load(Relaxed) || self.wire.come.load(Relaxed) == self.world)
    }

    /// Brings `mine`, and waits for what all have brought, one behind the other.
    pub fn bring(&self, mine: Vec<u8>) -> Result<Vec<u8>, DriverError> {
        let round = self.round.fetch_add(1, Relaxed);
        let mut rounds = self.wire.rounds.lock().unwrap();
        rounds.entry(round).or_insert_with(|| vec![None; self.world])[self.rank] = Some(mine);
        self.wire.more.notify_all();
        let is_whole = |rounds: &HashMap<usize, Brought>| rounds[&round].iter().all(Option::is_some);
        let (rounds, late) = self.wire.more.wait_timeout_while(rounds, PATIENCE, |rounds| !is_whole(rounds)).unwrap();
        if late.timed_out() {
            return Err(DriverError { call: "ncclAllGather", reason: "another rank has not come".to_owned() });
        }
        Ok(rounds[&round].iter().flatten().flatten().copied().collect())
    }

    pub fn part(self) {
        self.wire.parted.store(true, Relaxed);
    }
}
