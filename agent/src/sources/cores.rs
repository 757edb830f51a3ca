//! The processes that the engine cannot step without, beside its first one: the page's writer, and those that vLLM and SGLang give a title.
//! One that has ended is told as long as no other has come in its place (H6, H7).
//!
//! Reads what [`super::proc`] has read anyway, and the `stat` of a core that is missing from it.

use std::collections::HashSet;

use vitals::observation::EndedObs;

use super::procs::{ProcRoot, Stat};
use super::tree::EngineProcess;

/// Kernel names, 15 characters of a title, of processes that an engine ends with: vLLM's `VLLM::EngineCore`, `VLLM::EngineCore_DP0` and
/// `VLLM::Worker_TP0` (its prefix can be set, its titles need the `setproctitle` package), SGLang's `sglang::scheduler_TP0`,
/// `sglang::detokenizer` and `sglang::data_parallel_controller`. Front ends (`VLLM::APIServer_0`) are none.
const TITLES: [&str; 5] = ["VLLM::EngineCor", "VLLM::Worker", "sglang::schedul", "sglang::detoken", "sglang::data_pa"];

/// The cores of one engine.
#[derive(Debug, Default)]
pub struct Cores {
    known: Vec<Core>,
    /// Who has the name of a core and is none: what a core forks has its name, until it takes another.
    forks: HashSet<(i32, u64)>,
    /// Of those that have ended and have no successor, the oldest first.
    ended: Vec<EndedObs>,
}

#[derive(Debug)]
struct Core {
    process: EngineProcess,
    name: String,
}

impl Cores {
    /// Takes in one look at the engine's processes. `writer`: the process of the page that is believed.
    pub fn look(&mut self, proc: &ProcRoot, stats: &[Stat], root: i32, writer: Option<i32>, now_ms: u64) {
        self.miss(proc, stats, now_ms);
        self.meet(stats, root, writer);
    }

    /// The first that has ended and has no successor.
    pub fn ended(&self) -> Option<EndedObs> {
        let ended = self.ended.first()?;
        let peers = self.known.iter().filter(|core| core.name == ended.name).count();
        Some(EndedObs { peers: u32::try_from(peers).unwrap_or(u32::MAX), ..ended.clone() })
    }

    /// Who was known and is not there any more? Whoever cannot be read may well be (I4), and whoever has taken another name is no core.
    fn miss(&mut self, proc: &ProcRoot, stats: &[Stat], now_ms: u64) {
        let (known, ended) = (&mut self.known, &mut self.ended);
        known.retain(|core| {
            let seen = stats.iter().find(|stat| stat.pid == core.process.pid).cloned();
            let Ok(now) = seen.map_or_else(|| proc.find(core.process.pid), |stat| Ok(Some(stat))) else { return true };
            let lives = now.filter(|stat| stat.start_ticks == core.process.start_ticks && !stat.ended());
            if lives.is_none() {
                ended.push(EndedObs { pid: core.process.pid, name: core.name.clone(), at_ms: now_ms, peers: 0 });
            }
            lives.is_some_and(|stat| stat.comm == core.name)
        });
        self.forks.retain(|(pid, _)| stats.iter().any(|stat| stat.pid == *pid));
    }

    /// Who has come? Each comes in the place of one of its name that has ended, if there is one.
    fn meet(&mut self, stats: &[Stat], root: i32, writer: Option<i32>) {
        let is_core =
            |stat: &&Stat| stat.pid != root && !stat.ended() && (is_title(&stat.comm) || Some(stat.pid) == writer);
        for stat in stats.iter().filter(is_core) {
            let process = EngineProcess { pid: stat.pid, start_ticks: stat.start_ticks };
            if self.known.iter().any(|core| core.process == process) {
                continue;
            }
            let id = (stat.pid, stat.start_ticks);
            let of_a_core = stats.iter().any(|parent| parent.pid == stat.ppid && parent.comm == stat.comm);
            if Some(stat.pid) != writer && (of_a_core || self.forks.contains(&id)) {
                self.forks.insert(id);
                continue;
            }
            if let Some(place) = self.ended.iter().position(|ended| ended.name == stat.comm) {
                self.ended.remove(place);
            }
            self.known.push(Core { process, name: stat.comm.clone() });
        }
    }
}

/// Is this a core's title, as the kernel cuts it?
fn is_title(comm: &str) -> bool {
    TITLES.iter().any(|title| comm.starts_with(title))
}
