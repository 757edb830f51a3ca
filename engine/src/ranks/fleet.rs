//! The worker ranks as processes: started with this program's own words and one more, watched, and ended with it. Each gets the ranks'
//! memory as its standard input, and nobody else does, so that nobody else can join.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::Duration;

use thiserror::Error;

use super::layout::PLAN_BYTES_MAX;
use super::{Beside, PlanLimits, RANKS_MAX, Team};
use crate::stuck::{Stuck, StuckKind};
use crate::waits::Patience;

/// The hidden argument that makes a process a worker rank.
pub const RANK_FLAG: &str = "--rank-of";
/// Ranks that were told to stop get this long.
const END_MAX: Duration = Duration::from_millis(600);
/// So often a rank is started in all, if what ends it while it loads is a signal.
const STARTS_MAX: u32 = 3;
/// The lock is held for a few instructions; who does not get it for so long goes on without.
const LOCK_MAX: Duration = Duration::from_millis(200);

/// Why the ranks cannot be started.
#[derive(Debug, Error)]
pub enum FleetError {
    #[error("{0} ranks are not possible; 1 to {RANKS_MAX} are")]
    World(usize),
    #[error(
        "a step of {} sequences of {} blocks is told to the other ranks in {} MiB, and {} MiB are possible: lower --max-num-seqs or \
         --max-model-len, or raise --block-size", .0.seqs, .0.blocks_a_seq, .0.bytes() >> 20, PLAN_BYTES_MAX >> 20
    )]
    Plans(PlanLimits),
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
    /// All workers were told to end: one that is started meanwhile ends as well.
    over: Arc<AtomicBool>,
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
    /// Makes the team of `world`, whose steps have these limits, and starts its workers. They die with the thread that calls this.
    ///
    /// # Errors
    /// [`FleetError`]; what was started is ended.
    pub fn start(&self, world: usize, limits: PlanLimits) -> Result<Arc<Team>, FleetError> {
        if !(1..=RANKS_MAX).contains(&world) {
            return Err(FleetError::World(world));
        }
        // refused now: a step that cannot be told would be tried for ever
        if limits.bytes() > PLAN_BYTES_MAX {
            return Err(FleetError::Plans(limits));
        }
        let (team, file) = Team::sized(world, limits.bytes()).map_err(FleetError::Memory)?;
        // A fleet is started once. The team first: on a slow machine a rank may have loaded, and been killed, before the last one is there,
        // and without a team nobody could tell that it comes back.
        #[allow(clippy::disallowed_methods, reason = "what is stored is there already")]
        let (team, file) = self.team.get_or_init(|| (Arc::new(team), file));
        for rank in 1..world {
            match spawn(rank, world, file) {
                Ok(child) => self.keep(rank, child),
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
            self.restart(team, &|rank| spawn(rank, team.world(), file));
        }
        self.ended().map_or(Ok(()), Err)
    }

    /// What takes its time is done without the lock: the log, and a start, which returns only when the program was read.
    fn restart(&self, team: &Team, start: &dyn Fn(usize) -> std::io::Result<Child>) {
        for (rank, status) in self.fallen() {
            tracing::warn!(rank, %status, "a rank ended while it loaded; it is started again");
            team.forget(rank);
            match start(rank) {
                Ok(child) => self.keep(rank, child),
                // seen to have ended once it was tried often enough
                Err(error) => {
                    tracing::warn!(rank, %error, "a rank could not be started again");
                    let mut ranks = self.lock();
                    let member = ranks.iter_mut().flat_map(|ranks| ranks.iter_mut()).find(|member| member.rank == rank);
                    member.into_iter().for_each(|member| member.starts += 1);
                }
            }
        }
    }

    /// The ranks that have ended and are to be started again, and how each ended.
    fn fallen(&self) -> Vec<(usize, ExitStatus)> {
        let Some(mut ranks) = self.lock().filter(|_| !self.over.load(Ordering::SeqCst)) else { return Vec::new() };
        let fallen = ranks.iter_mut().filter_map(|member| {
            let status = member.child.try_wait().ok()??;
            self.comes_back(member, status).then_some((member.rank, status))
        });
        fallen.collect()
    }

    /// Takes `child` in as `rank`; it ends at once where all were told to meanwhile, or where nobody could end it later.
    fn keep(&self, rank: usize, mut child: Child) {
        let Some(mut ranks) = self.lock() else {
            drop(child.kill());
            return;
        };
        if self.over.load(Ordering::SeqCst) {
            drop(child.kill());
        }
        match ranks.iter_mut().find(|member| member.rank == rank) {
            Some(member) => (member.child, member.starts) = (child, member.starts + 1),
            None => ranks.push(Member { rank, child, starts: 1 }),
        }
    }

    /// Whether a rank that ended like this is to be started again: it was not ready yet, said nothing, and was not at fault too often.
    fn comes_back(&self, member: &Member, status: ExitStatus) -> bool {
        let loading = |team: &Team| !team.is_loaded(member.rank) && team.layout().failure(member.rank).is_none();
        let loading = self.team.get().is_some_and(|(team, _)| loading(team));
        status.signal().is_some() && member.starts < STARTS_MAX && loading
    }

    /// A rank that has ended, if one has, and how: in its own words where it had any, which may blame another one. One that ended without
    /// words first: the others may have ended because of it. Hardly waits: who asks will ask again.
    pub fn ended(&self) -> Option<Stuck> {
        let mut ranks = self.lock()?;
        let words = |rank| self.team.get().and_then(|(team, _)| team.layout().failure(rank));
        let ended = ranks.iter_mut().filter_map(|member| {
            let status = member.child.try_wait().ok()??;
            (!self.comes_back(member, status)).then(|| (member.rank, member.child.id(), status, words(member.rank)))
        });
        let (rank, pid, status, words) = ended.min_by_key(|(.., words)| words.is_some())?;
        let (text, blamed) = match words {
            Some((words, blamed)) => (format!("rank {rank} (process {pid}) gave up: {words}"), blamed),
            None => (format!("rank {rank} (process {pid}) has ended: {status}"), None),
        };
        Some(Stuck { kind: blamed.unwrap_or(StuckKind::RankGone { rank }), text, waited: Duration::ZERO })
    }

    /// A rank that is stopped or asleep in a step, `passed` after the last look in this step.
    pub fn frozen(&self, beside: &mut Beside, passed: Duration) -> Option<Stuck> {
        self.team.get()?.0.look_beside(beside, passed)
    }

    /// Ends all workers: those that do not stop by themselves within a bound are killed, by their process ids.
    pub fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
        // taken out: nobody waits for the lock while this waits for them
        let mut ranks = self.lock().map(|mut ranks| std::mem::take(&mut *ranks)).unwrap_or_default();
        let mut patience = Patience::new(Some(END_MAX));
        let alive = |child: &mut Child| matches!(child.try_wait(), Ok(None));
        while ranks.iter_mut().any(|member| alive(&mut member.child)) && patience.turn() {}
        for Member { rank, child, .. } in &mut ranks {
            if alive(child) {
                tracing::warn!(rank = *rank, pid = child.id(), "a rank did not end; it is killed");
                drop(child.kill());
            }
        }
        let mut patience = Patience::new(Some(END_MAX));
        while ranks.iter_mut().any(|member| alive(&mut member.child)) && patience.turn() {}
    }

    /// Stops all workers at once, by their process ids; for an engine that gives up.
    pub fn kill(&self) {
        self.over.store(true, Ordering::SeqCst);
        let mut ranks = self.lock();
        // a child that was reaped is left alone: its number may be another's
        ranks.iter_mut().flat_map(|ranks| ranks.iter_mut()).for_each(|member| drop(member.child.kill()));
    }

    /// `None`: whoever has it was kept from running, or hangs.
    fn lock(&self) -> Option<MutexGuard<'_, Vec<Member>>> {
        let mut patience = Patience::yielding(Some(LOCK_MAX));
        loop {
            match self.ranks.try_lock() {
                Ok(ranks) => return Some(ranks),
                Err(TryLockError::Poisoned(ranks)) => return Some(ranks.into_inner()),
                Err(TryLockError::WouldBlock) if patience.turn() => (),
                Err(TryLockError::WouldBlock) => return None,
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
    use std::time::Instant;

    fn sleeper() -> std::io::Result<Child> {
        Command::new("sleep").arg("600").spawn()
    }

    /// A fleet whose one worker was killed while it loaded.
    fn fallen() -> (Fleet, Arc<Team>) {
        let fleet = Fleet::default();
        let (team, file) = Team::create(2).unwrap();
        let team = Arc::new(team);
        fleet.team.set((team.clone(), file)).unwrap();
        let mut child = sleeper().unwrap();
        child.kill().unwrap();
        while child.try_wait().unwrap().is_none() {}
        fleet.keep(1, child);
        (fleet, team)
    }

    fn child_of(fleet: &Fleet) -> Option<ExitStatus> {
        fleet.ranks.try_lock().unwrap()[0].child.try_wait().unwrap()
    }

    #[test]
    fn nobody_waits_for_a_rank_that_is_being_started_and_one_that_comes_too_late_is_killed() {
        let (fleet, team) = fallen();
        fleet.restart(&team, &|_| {
            // the guard looks, and the engine gives up, while the program is read
            let since = Instant::now();
            assert_eq!(fleet.ended(), None, "it comes back");
            fleet.kill();
            assert!(since.elapsed() < Duration::from_secs(20));
            sleeper()
        });
        let since = Instant::now();
        while child_of(&fleet).is_none() {
            assert!(since.elapsed() < Duration::from_secs(20), "it lives on");
        }
        assert_eq!(child_of(&fleet).unwrap().signal(), Some(9));
        fleet.restart(&team, &|rank| panic!("rank {rank} is started after the end"));
        fleet.end();
        assert!(fleet.ranks.try_lock().unwrap().is_empty());
    }

    #[test]
    fn a_rank_is_started_again_as_often_as_it_may() {
        let (fleet, team) = fallen();
        fleet.restart(&team, &|_| sleeper());
        assert_eq!((child_of(&fleet), fleet.ended()), (None, None));
        fleet.restart(&team, &|rank| panic!("rank {rank} lives"));
        fleet.end();
        let (fleet, team) = fallen();
        for _ in 1..STARTS_MAX {
            assert_eq!(fleet.ended(), None);
            fleet.restart(&team, &|_| Err(std::io::Error::other("as told")));
        }
        assert_eq!(fleet.ended().unwrap().kind, StuckKind::RankGone { rank: 1 });
    }

    fn ended_child() -> Child {
        let mut child = Command::new("true").spawn().unwrap();
        while child.try_wait().unwrap().is_none() {}
        child
    }

    #[test]
    fn a_rank_that_gave_up_because_of_another_names_that_one_and_one_without_words_comes_first() {
        let fleet = Fleet::default();
        let (team, file) = Team::create(4).unwrap();
        let team = Arc::new(team);
        fleet.team.set((team.clone(), file)).unwrap();
        fleet.keep(1, ended_child());
        team.layout().write_failure(1, "rank 0 has not come", Some(&StuckKind::RankSilent { ranks: vec![0] }));
        let stuck = fleet.ended().unwrap();
        assert_eq!(stuck.kind, StuckKind::RankSilent { ranks: vec![0] });
        assert!(stuck.text.starts_with("rank 1 (process") && stuck.text.ends_with("gave up: rank 0 has not come"));
        team.layout().write_failure(1, "its share cannot be loaded", None);
        assert_eq!(fleet.ended().unwrap().kind, StuckKind::RankGone { rank: 1 });
        fleet.keep(2, ended_child());
        assert_eq!(fleet.ended().unwrap().kind, StuckKind::RankGone { rank: 2 }, "without words");
    }

    #[test]
    fn who_does_not_get_the_lock_goes_on_without() {
        let (fleet, _team) = fallen();
        let held = fleet.ranks.try_lock().unwrap();
        assert_eq!(fleet.ended(), None);
        fleet.kill();
        fleet.end();
        drop(held);
        fleet.end();
    }

    #[test]
    fn steps_that_cannot_be_told_are_refused_at_the_start() {
        let limits = PlanLimits { seqs: 4096, tokens: 8192, blocks_a_seq: 65_536 };
        let refused = Fleet::default().start(2, limits).unwrap_err().to_string();
        assert!(refused.contains("in 1024 MiB, and 256 MiB are possible: lower --max-num-seqs"), "{refused}");
    }

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
