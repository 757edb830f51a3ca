//! The worker ranks as processes: started with this program's own words and one more, watched, and ended with it. Each gets the ranks'
//! memory as its standard input, and nobody else does, so that nobody else can join.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::Duration;

use thiserror::Error;

use super::{RANKS_MAX, Team};
use crate::stuck::{Stuck, StuckKind};
use crate::waits::Patience;

/// The hidden argument that makes a process a worker rank.
pub const RANK_FLAG: &str = "--rank-of";
/// Ranks that were told to stop get this long.
const END_MAX: Duration = Duration::from_millis(600);
/// So often a rank is started in all, if what ends it while it loads is a signal.
const STARTS_MAX: u32 = 3;

/// Why the ranks cannot be started.
#[derive(Debug, Error)]
pub enum FleetError {
    #[error("{0} ranks are not possible; 1 to {RANKS_MAX} are")]
    World(usize),
    #[error("the ranks' memory could not be made")]
    Memory(#[source] std::io::Error),
    #[error("rank {rank} could not be started")]
    Spawn { rank: usize, source: std::io::Error },
}

/// Whose worker a process is: `RANK/WORLD/LEADER`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankOf {
    pub rank: usize,
    pub world: usize,
    /// Process id of the first rank.
    pub leader: i32,
}

impl RankOf {
    /// This rank's end of the team.
    ///
    /// # Errors
    /// When the standard input is not the memory of such a team.
    pub fn join(&self) -> std::io::Result<Team> {
        let file = std::io::stdin().as_fd().try_clone_to_owned()?;
        Team::join(&File::from(file), self.rank, self.world)
    }
}

impl FromStr for RankOf {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Option<Vec<i32>> = text.split('/').map(|n| n.parse().ok().filter(|n| *n >= 0)).collect();
        match numbers.as_deref() {
            Some([rank, world, leader]) if rank < world && *world as usize <= RANKS_MAX => {
                Ok(Self { rank: *rank as usize, world: *world as usize, leader: *leader })
            }
            _ => Err("this argument is for the engine's own use".to_owned()),
        }
    }
}

/// The worker processes; clones see the same ones.
#[derive(Debug, Clone, Default)]
pub struct Fleet {
    ranks: Arc<Mutex<Vec<Member>>>,
    /// The team, and the file that a rank joins it with.
    team: Arc<OnceLock<(Arc<Team>, File)>>,
}

#[derive(Debug)]
struct Member {
    rank: usize,
    child: Child,
    starts: u32,
}

impl Fleet {
    /// Makes the team of `world` and starts its workers. They die with the thread that calls this.
    ///
    /// # Errors
    /// [`FleetError`]; what was started is ended.
    pub fn start(&self, world: usize) -> Result<Arc<Team>, FleetError> {
        if !(1..=RANKS_MAX).contains(&world) {
            return Err(FleetError::World(world));
        }
        let (team, file) = Team::create(world).map_err(FleetError::Memory)?;
        // A fleet is started once. The team first: on a slow machine a rank may have loaded, and been killed, before the last one is there,
        // and without a team nobody could tell that it comes back.
        #[allow(clippy::disallowed_methods, reason = "what is stored is there already")]
        let (team, file) = self.team.get_or_init(|| (Arc::new(team), file));
        for rank in 1..world {
            match spawn(rank, world, file) {
                Ok(child) => self.lock().push(Member { rank, child, starts: 1 }),
                Err(source) => {
                    self.end();
                    return Err(FleetError::Spawn { rank, source });
                }
            }
        }
        Ok(team.clone())
    }

    /// Looks after ranks that load, on the thread that started them: one that a signal ended is started again, and its work is taken over
    /// by the others meanwhile (S4).
    ///
    /// # Errors
    /// A rank that has ended and is not to be started again.
    pub fn tend(&self) -> Result<(), Stuck> {
        if let Some((team, file)) = self.team.get() {
            for member in self.lock().iter_mut() {
                let Ok(Some(status)) = member.child.try_wait() else { continue };
                if !self.comes_back(member, status) {
                    continue;
                }
                tracing::warn!(rank = member.rank, %status, "a rank ended while it loaded; it is started again");
                member.starts += 1;
                team.forget(member.rank);
                // one that cannot be started is seen to have ended by the next look
                if let Ok(child) = spawn(member.rank, team.world(), file) {
                    member.child = child;
                }
            }
        }
        self.ended().map_or(Ok(()), Err)
    }

    /// Whether a rank that ended like this is to be started again: it was not ready yet, said nothing, and was not at fault too often.
    fn comes_back(&self, member: &Member, status: ExitStatus) -> bool {
        let loading = |team: &Team| !team.is_loaded(member.rank) && team.layout().failure(member.rank).is_none();
        let loading = self.team.get().is_some_and(|(team, _)| loading(team));
        status.signal().is_some() && member.starts < STARTS_MAX && loading
    }

    /// A rank that has ended, if one has, and how: in its own words where it had any. Never waits.
    pub fn ended(&self) -> Option<Stuck> {
        let mut ranks = self.lock();
        ranks.iter_mut().find_map(|member| {
            let (rank, pid, status) = (member.rank, member.child.id(), member.child.try_wait().ok()??);
            if self.comes_back(member, status) {
                return None;
            }
            let text = match self.team.get().and_then(|(team, _)| team.layout().failure(rank)) {
                Some(words) => format!("rank {rank} (process {pid}) gave up: {words}"),
                None => format!("rank {rank} (process {pid}) has ended: {status}"),
            };
            Some(Stuck { kind: StuckKind::RankGone { rank }, text, waited: Duration::ZERO })
        })
    }

    /// Ends all workers: those that do not stop by themselves within a bound are killed, by their process ids.
    pub fn end(&self) {
        let mut patience = Patience::new(Some(END_MAX));
        let mut ranks = self.lock();
        let alive = |child: &mut Child| matches!(child.try_wait(), Ok(None));
        while ranks.iter_mut().any(|member| alive(&mut member.child)) && patience.turn() {}
        for Member { rank, child, .. } in ranks.iter_mut() {
            if alive(child) {
                tracing::warn!(rank = *rank, pid = child.id(), "a rank did not end; it is killed");
                drop(child.kill());
            }
        }
        let mut patience = Patience::new(Some(END_MAX));
        while ranks.iter_mut().any(|member| alive(&mut member.child)) && patience.turn() {}
        ranks.clear();
    }

    /// Stops all workers at once, by their process ids; for an engine that gives up.
    pub fn kill(&self) {
        // a child that was reaped is left alone: its number may be another's
        self.lock().iter_mut().for_each(|member| drop(member.child.kill()));
    }

    /// Held for a few instructions only, but for [`Self::end`], which is the last call of all.
    fn lock(&self) -> MutexGuard<'_, Vec<Member>> {
        loop {
            match self.ranks.try_lock() {
                Ok(ranks) => return ranks,
                Err(TryLockError::Poisoned(ranks)) => return ranks.into_inner(),
                Err(TryLockError::WouldBlock) => std::thread::yield_now(),
            }
        }
    }
}

/// Starts a worker with this program's own words and one more.
fn spawn(rank: usize, world: usize, memory: &File) -> std::io::Result<Child> {
    let of = format!("{rank}/{world}/{}", std::process::id());
    let mut command = Command::new("/proc/self/exe");
    command.args(std::env::args_os().skip(1)).arg(RANK_FLAG).arg(of);
    // stderr is shared: the engine's log is one
    command.stdin(Stdio::from(memory.try_clone()?)).stdout(Stdio::null()).spawn()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whose_worker_a_process_is_is_read_with_bounds() {
        let of: RankOf = "2/4/1234".parse().unwrap();
        assert_eq!(of, RankOf { rank: 2, world: 4, leader: 1234 });
        for bad in ["", "1", "4/4/1", "1/2", "1/2/x", "-1/2/3", "1/99/3", "1/2/3/4"] {
            assert!(bad.parse::<RankOf>().is_err(), "{bad}");
        }
        // the input of a test is nobody's memory
        assert!(of.join().is_err());
    }
}
