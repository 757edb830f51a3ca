//! The `/proc` source: one [`ProcObs`] of the engine's process tree per look, in well under a millisecond a process.
//!
//! The walk over all of `/proc` is the driver's affair (it may be slow on a big host); this source reads the members it is given.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use vitals::observation::ProcObs;

use super::cgroup::CgroupWatch;
use super::clock::TickClock;
use super::cores::Cores;
use super::procs::{ProcRoot, Stat};
use super::tree::{EngineProcess, add_descendants, family};

/// Members read in one look; an engine with more is read in part.
const MEMBERS_MAX: usize = 512;
const TRACER_EVERY_MS: u64 = 1_000;
/// How fast a process's recent CPU use is forgotten, in choosing which process steps: four fifths of it are left after a second.
const FORGET_PER_SECOND: f64 = 0.25;
/// Programs that compile kernels or host code, by their kernel names (V5). A version at the end (`gcc-12`) is taken off first.
const COMPILERS: [&str; 31] = [
    "nvcc",
    "ptxas",
    "ptxas-blackwell",
    "cicc",
    "cudafe++",
    "fatbinary",
    "nvlink",
    "nvrtc",
    "gcc",
    "g++",
    "cc",
    "c++",
    "cc1",
    "cc1plus",
    "collect2",
    "as",
    "ld",
    "ld.gold",
    "ld.lld",
    "lld",
    "mold",
    "clang",
    "clang++",
    "hipcc",
    "amdclang++",
    "llc",
    "icpx",
    "make",
    "cmake",
    "ninja",
    "x86_64-linux-gn",
];

/// Follows one engine.
#[derive(Debug)]
pub struct ProcSource {
    proc: ProcRoot,
    clock: TickClock,
    cgroup: CgroupWatch,
    engine: Option<EngineProcess>,
    members: Vec<i32>,
    accounts: HashMap<(i32, u64), Account>,
    /// Own and reaped CPU time of all members at the last look, in ticks.
    total_ticks: u64,
    cpu_ticks: u64,
    compiler_ticks: u64,
    looked_ms: Option<u64>,
    stepping: Option<i32>,
    cores: Cores,
    /// Whether a debugger holds a member, and when that was last asked.
    traced: (u64, bool),
}

/// What was last seen of one process.
#[derive(Debug, Clone, Copy, Default)]
struct Account {
    own_ticks: u64,
    /// CPU time lately, old use fading.
    recent: f64,
}

impl ProcSource {
    /// The live one.
    pub fn live() -> Self {
        Self::at(ProcRoot::live(), Path::new("/sys/fs/cgroup"), TickClock::live())
    }

    /// Over any tree of the shape of `/proc` and of the cgroup mounts.
    pub fn at(proc: ProcRoot, cgroup_mounts: &Path, clock: TickClock) -> Self {
        Self {
            cgroup: CgroupWatch::new(proc.clone(), cgroup_mounts),
            proc,
            clock,
            engine: None,
            members: Vec::new(),
            accounts: HashMap::new(),
            total_ticks: 0,
            cpu_ticks: 0,
            compiler_ticks: 0,
            looked_ms: None,
            stepping: None,
            cores: Cores::new(clock),
            traced: (0, false),
        }
    }

    /// The members of the tree as of the latest walk.
    pub fn members(&self) -> &[i32] {
        &self.members
    }

    /// The process that stepped at the last look.
    pub fn stepping_pid(&self) -> Option<i32> {
        self.stepping
    }

    /// Who lives on of those that were seen last, where the engine's first process has ended. Not who came into its container by another
    /// door (`kubectl exec`), with what they started: they hold no GPU, and are nobody's to wait for.
    pub fn left(&self) -> Vec<EngineProcess> {
        let root = self.engine.as_ref().map(|engine| engine.pid);
        let (mut left, mut stats) = (Vec::new(), Vec::new());
        for (pid, start_ticks) in self.accounts.keys().copied().filter(|(pid, _)| Some(*pid) != root) {
            let process = EngineProcess { pid, start_ticks };
            match self.proc.find(pid) {
                Ok(Some(stat)) if process.is(&stat) => stats.push(stat),
                Ok(_) => continue,
                // whoever cannot look has not seen it gone
                Err(_) => {}
            }
            left.push(process);
        }
        let mut visitors: HashSet<i32> = stats.iter().filter(|stat| stat.ppid == 0).map(|stat| stat.pid).collect();
        add_descendants(&stats, &mut visitors);
        left.retain(|process| !visitors.contains(&process.pid));
        left.sort_by_key(|process| process.pid);
        left
    }

    /// Another engine process, or none: everything that was counted begins anew.
    pub fn set_engine(&mut self, engine: Option<EngineProcess>) {
        if self.engine == engine {
            return;
        }
        let mounts = self.cgroup.mounts().to_owned();
        *self = Self::at(self.proc.clone(), &mounts, self.clock);
        self.members = engine.iter().map(|engine| engine.pid).collect();
        self.engine = engine;
    }

    /// Takes the members of a new walk.
    pub fn set_members(&mut self, mut members: Vec<i32>) {
        members.truncate(MEMBERS_MAX);
        self.members = members;
    }

    /// The facts now; `None` where there is no engine, or nobody can look. `page_pid` is the process that writes the page, if one does.
    pub fn look(&mut self, now_ms: u64, page_pid: Option<i32>) -> Option<ProcObs> {
        let engine = self.engine.clone()?;
        let found = self.proc.find(engine.pid).ok()?; // I4: whoever cannot look has not seen it dead
        let root = found.filter(|stat| stat.start_ticks == engine.start_ticks);
        let alive = root.as_ref().is_some_and(|stat| !stat.ended());
        let mut stats = self.member_stats(root);
        self.count_cpu(&stats, now_ms);
        self.cores.look(&self.proc, &stats, engine.pid, page_pid, now_ms);
        forget_stopped_visitors(&mut stats, engine.pid, page_pid);
        let stepping = self.stepping(&stats, &engine, page_pid);
        let compilers = stats.iter().filter(|stat| is_compiler(&stat.comm) && !stat.ended()).count();
        let stepping = stepping.cloned();
        self.stepping = stepping.as_ref().map(|stat| stat.pid);
        let held = if alive { self.cgroup.look(engine.pid, now_ms) } else { Default::default() };
        Some(ProcObs {
            alive,
            started_ms: self.clock.started_ms(engine.start_ticks),
            state: stepping.as_ref().map(|stat| stat.state),
            wchan: stepping.as_ref().and_then(|stat| self.proc.wchan(stat.pid)),
            cpu_ms: self.clock.cpu_ms(self.cpu_ticks),
            compilers: u32::try_from(compilers).unwrap_or(u32::MAX),
            compilers_cpu_ms: self.clock.cpu_ms(self.compiler_ticks),
            traced: self.traced(&stats, now_ms),
            throttled: held.throttled,
            frozen: held.frozen,
            stopped: count_stopped(&stats),
            stopped_cores: self.cores.stopped(),
            ended: self.cores.ended(),
            // the agent alone knows what it sent; the rest is gathered off the tick
            ..ProcObs::default()
        })
    }

    /// Asks at once where a member is stopped, which is when it matters, else once a second: `status` is dear.
    fn traced(&mut self, stats: &[Stat], now_ms: u64) -> bool {
        let (asked_ms, traced) = self.traced;
        let stopped = stats.iter().any(|stat| matches!(stat.state, 't' | 'T'));
        if !stopped && now_ms.saturating_sub(asked_ms) < TRACER_EVERY_MS {
            return traced;
        }
        let traced = stats.iter().any(|stat| !is_compiler(&stat.comm) && self.proc.tracer(stat.pid).is_some());
        self.traced = (now_ms, traced);
        traced
    }

    fn member_stats(&self, root: Option<Stat>) -> Vec<Stat> {
        let root_pid = root.as_ref().map(|stat| stat.pid);
        let others = self.members.iter().filter(|pid| Some(**pid) != root_pid).filter_map(|pid| self.proc.stat(*pid));
        // A pid that now belongs to a process older than the engine was given away between walk and look.
        let start = self.engine.as_ref().map_or(0, |engine| engine.start_ticks);
        root.into_iter().chain(others.filter(|stat| stat.start_ticks >= start)).collect()
    }

    /// Adds what was burned since the last look. Two ways of counting, each blind to something: by process (misses a child that
    /// came and went between looks) and by the sum with reaped children (shrinks when an orphan ends). The larger is right.
    fn count_cpu(&mut self, stats: &[Stat], now_ms: u64) {
        let elapsed_s = self.looked_ms.map_or(0.0, |at_ms| now_ms.saturating_sub(at_ms) as f64 / 1_000.0);
        // about (4/5)^elapsed, which all are weighed by alike; for the exact one a library would be in memory that nothing else needs
        let fade = 1.0 / (1.0 + FORGET_PER_SECOND * elapsed_s);
        let mut accounts = HashMap::with_capacity(stats.len());
        let mut by_process = 0;
        for stat in stats {
            let key = (stat.pid, stat.start_ticks);
            let before = self.accounts.get(&key).copied().unwrap_or_default();
            let burned = stat.own_ticks.saturating_sub(before.own_ticks);
            by_process += burned;
            if is_compiler(&stat.comm) {
                self.compiler_ticks += burned;
            }
            accounts.insert(key, Account { own_ticks: stat.own_ticks, recent: before.recent * fade + burned as f64 });
        }
        let total: u64 = stats.iter().map(|stat| stat.own_ticks.saturating_add(stat.reaped_ticks)).sum();
        self.cpu_ticks += by_process.max(total.saturating_sub(self.total_ticks));
        self.total_ticks = total;
        self.accounts = accounts;
        self.looked_ms = Some(now_ms);
    }

    /// The process that steps: the page's writer, else whoever has burned most lately, else the root.
    fn stepping<'a>(&self, stats: &'a [Stat], engine: &EngineProcess, page_pid: Option<i32>) -> Option<&'a Stat> {
        if let Some(writer) = stats.iter().find(|stat| Some(stat.pid) == page_pid) {
            return Some(writer);
        }
        let recent =
            |stat: &Stat| self.accounts.get(&(stat.pid, stat.start_ticks)).map_or(0.0, |account| account.recent);
        let root_first = |stat: &&Stat| (recent(stat), stat.pid == engine.pid);
        stats
            .iter()
            .filter(|stat| !is_compiler(&stat.comm))
            .max_by(|a, b| root_first(a).partial_cmp(&root_first(b)).unwrap_or(std::cmp::Ordering::Equal))
    }
}

/// A job that somebody stopped in a shell of his own in the engine's container is no engine that is stopped.
fn forget_stopped_visitors(stats: &mut Vec<Stat>, root: i32, page_pid: Option<i32>) {
    if stats.iter().any(|stat| stat.state == 'T') {
        let family = family(stats, root);
        stats.retain(|stat| stat.state != 'T' || family.contains(&stat.pid) || Some(stat.pid) == page_pid);
    }
}

/// Processes in state T; whether a debugger holds one of them is told apart.
fn count_stopped(stats: &[Stat]) -> u32 {
    u32::try_from(stats.iter().filter(|stat| stat.state == 'T').count()).unwrap_or(u32::MAX)
}

/// Is this the kernel's name of a compiler, linker or build tool?
pub fn is_compiler(comm: &str) -> bool {
    let plain = comm.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.').trim_end_matches('-');
    COMPILERS.contains(&comm) || COMPILERS.contains(&plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compilers_are_known_by_name_with_or_without_a_version() {
        for name in [
            "nvcc",
            "ptxas",
            "ptxas-blackwell",
            "cicc",
            "cudafe++",
            "g++-12",
            "gcc-13",
            "clang-17",
            "cc1plus",
            "ninja",
            "cc1",
        ] {
            assert!(is_compiler(name), "{name}");
        }
        for name in ["python3", "python3.11", "vllm", "VLLM::EngineCor", "bash", "", "1", "-"] {
            assert!(!is_compiler(name), "{name}");
        }
    }
}
