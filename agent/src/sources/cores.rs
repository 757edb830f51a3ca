//! The processes that the engine cannot step without, beside its first one: the page's writer, and those that vLLM and SGLang give a title.
//! One that has ended is told as long as no other has come in its place (H6, H7).
//!
//! Reads what [`super::proc`] has read anyway, and the `stat` of a core, or of its parent, that is missing from it.

use std::collections::HashMap;

use vitals::observation::EndedObs;

use super::clock::TickClock;
use super::procs::{ProcRoot, Stat};
use super::tree::{EngineProcess, family};

/// Kernel names, 15 characters of a title, of processes that an engine ends with: vLLM's `VLLM::EngineCore`, `VLLM::EngineCore_DP0` and
/// `VLLM::Worker_TP0` (its prefix can be set, its titles need the `setproctitle` package), SGLang's `sglang::scheduler_TP0`,
/// `sglang::detokenizer` and `sglang::data_parallel_controller`. Front ends (`VLLM::APIServer_0`) are none.
const TITLES: [&str; 5] = ["VLLM::EngineCor", "VLLM::Worker", "sglang::schedul", "sglang::detoken", "sglang::data_pa"];

/// The cores of one engine.
#[derive(Debug)]
pub struct Cores {
    clock: TickClock,
    known: Vec<Core>,
    /// Who has the name of a core and is none, with that name: what a core forks has it until it takes another.
    forks: HashMap<(i32, u64), String>,
    /// Those that have ended and have no successor, the oldest first.
    ended: Vec<Ended>,
    /// Of the known ones, how many are stopped.
    stopped: u32,
}

#[derive(Debug, Clone)]
struct Core {
    process: EngineProcess,
    name: String,
    /// Who started it: a front end, or another core.
    parent: EngineProcess,
    /// The last look at which it lived.
    seen_ms: u64,
}

#[derive(Debug)]
struct Ended {
    core: Core,
    at_ms: u64,
}

impl Cores {
    /// `clock`: by which the start of a process is compared with the time of a look.
    pub fn new(clock: TickClock) -> Self {
        Self { clock, known: Vec::new(), forks: HashMap::new(), ended: Vec::new(), stopped: 0 }
    }

    /// Takes in one look at the engine's processes. `writer`: the process of the page that is believed.
    pub fn look(&mut self, proc: &ProcRoot, stats: &[Stat], root: i32, writer: Option<i32>, now_ms: u64) {
        self.miss(proc, stats, now_ms);
        self.meet(stats, root, writer, now_ms);
        if stats.iter().any(|stat| Some(stat.pid) == writer && !stat.ended()) {
            // a page is written again, by whomever: who wrote the last one and had no title is no more missed
            self.ended.retain(|ended| is_title(&ended.core.name));
        }
        self.forget_whole_engines(proc, root);
        let of_core = |stat: &&Stat| stat.state == 'T' && self.known.iter().any(|core| core.process.pid == stat.pid);
        self.stopped = count(stats.iter().filter(of_core));
    }

    /// Of those that have ended and have no successor the one that the fewest of its name can stand in for, and of these the last.
    pub fn ended(&self) -> Option<EndedObs> {
        let peers = |ended: &Ended| count(self.known.iter().filter(|core| core.name == ended.core.name));
        let ended = self.ended.iter().rev().min_by_key(|ended| peers(ended))?;
        let (pid, name) = (ended.core.process.pid, ended.core.name.clone());
        Some(EndedObs { pid, name, at_ms: ended.at_ms, peers: peers(ended) })
    }

    /// How many cores were stopped at the last look.
    pub fn stopped(&self) -> u32 {
        self.stopped
    }

    /// Who was known and is not there any more? Whoever cannot be read may well be (I4), and whoever has taken another name is no core.
    fn miss(&mut self, proc: &ProcRoot, stats: &[Stat], now_ms: u64) {
        let (known, ended) = (&mut self.known, &mut self.ended);
        known.retain_mut(|core| {
            let seen = stats.iter().find(|stat| stat.pid == core.process.pid).cloned();
            let Ok(now) = seen.map_or_else(|| proc.find(core.process.pid), |stat| Ok(Some(stat))) else { return true };
            let lives = now.filter(|stat| core.process.is(stat));
            if lives.is_some() {
                core.seen_ms = now_ms;
            } else {
                ended.push(Ended { core: core.clone(), at_ms: now_ms });
            }
            lives.is_some_and(|stat| stat.comm == core.name)
        });
        let same = |(pid, start): &(i32, u64), name: &String| {
            stats.iter().any(|stat| (stat.pid, stat.start_ticks) == (*pid, *start) && stat.comm == *name)
        };
        self.forks.retain(|id, name| same(id, name));
    }

    /// Who has come? Each comes in the place of one of its name and of its parent's that has ended, if there is one: an orphan that a core
    /// leaves has its name and another parent. One that ran while the dead one was still seen to live is no successor, however late it is met:
    /// it is a sibling, which may serve without the dead one or not. Who came by another door (`kubectl exec`) may bring an engine of its own.
    fn meet(&mut self, stats: &[Stat], root: i32, writer: Option<i32>, now_ms: u64) {
        let titled = |stat: &Stat| is_title(&stat.comm);
        if !stats.iter().any(|stat| titled(stat) || Some(stat.pid) == writer) {
            return;
        }
        let own = family(stats, root);
        for stat in stats.iter().filter(|stat| stat.pid != root && !stat.ended()) {
            let process = EngineProcess::from(stat);
            let writes = Some(stat.pid) == writer;
            if !((writes || titled(stat)) && own.contains(&stat.pid))
                || self.known.iter().any(|core| core.process == process)
            {
                continue;
            }
            let Some(parent) = stats.iter().find(|parent| parent.pid == stat.ppid) else { continue };
            let id = (stat.pid, stat.start_ticks);
            if !writes && (parent.comm == stat.comm || self.forks.contains_key(&id)) {
                self.forks.insert(id, stat.comm.clone());
                continue;
            }
            let parent = EngineProcess::from(parent);
            let place = |Ended { core, .. }: &Ended| {
                let succeeds = self.clock.may_have_started_since(stat.start_ticks, core.seen_ms);
                core.name == stat.comm && core.parent == parent && succeeds
            };
            if let Some(place) = self.ended.iter().position(place) {
                self.ended.remove(place);
            }
            self.known.push(Core { process, name: stat.comm.clone(), parent, seen_ms: now_ms });
        }
    }

    /// Where its front end has ended as well, an engine has ended as a whole beneath whatever started it: one after another, or before the one
    /// that is to serve. What is left of that is for whoever watches the first process.
    fn forget_whole_engines(&mut self, proc: &ProcRoot, root: i32) {
        let lost: Vec<EngineProcess> = self.ended.iter().map(|ended| ended.core.process.clone()).collect();
        let (forgotten, kept) = std::mem::take(&mut self.ended).into_iter().partition(|ended| {
            let parent = &ended.core.parent;
            parent.pid != root && !lost.contains(parent) && parent.is_gone_in(proc)
        });
        self.ended = kept;
        // and the workers of a core that is forgotten with it
        let heads: Vec<EngineProcess> = Vec::into_iter(forgotten).map(|ended: Ended| ended.core.process).collect();
        self.ended.retain(|ended| !heads.contains(&ended.core.parent));
    }
}

/// Is this a core's title, as the kernel cuts it?
fn is_title(comm: &str) -> bool {
    TITLES.iter().any(|title| comm.starts_with(title))
}

fn count<T>(of: impl Iterator<Item = T>) -> u32 {
    u32::try_from(of.count()).unwrap_or(u32::MAX)
}
