//! Where observations come from: the page, `/proc`, `/metrics`, the front end, the log, NVML and NCCL's RAS, each with its age.
//!
//! How closely a tick looks is its [`Pace`]. [`Sources::observe_into`] never waits for any of them: page and `/proc` are read in place (they cannot block), everything else runs
//! in tasks, threads or a killable child of its own, and the newest result is taken (I4). Missing stays missing, never zero.
//!
//! Not filled in here, for the caller knows them: `gate`, `maintenance`, `agent_gap_ms`, `draining`, and `proc.kill_sent_ms`.

mod aside;
mod beat;
pub(crate) mod cgroup;
pub mod clock;
mod cores;
mod elsewhere;
mod exit;
pub mod facts;
mod frontend;
pub mod get;
pub mod haste;
pub mod log;
mod log_memory;
pub mod net;
mod nvml;
pub mod pace;
mod page;
pub mod proc;
pub mod procs;
mod queue;
pub mod ras;
pub mod scrape;
mod steps;
pub(crate) mod tree;
mod turns;
pub mod walk;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::Uri;
use tokio::task::JoinHandle;
use vitals::observation::{Ms, Observation, ProcObs, Signal};

use self::clock::TickClock;
pub use self::exit::ExitWatch;
use self::facts::{Facts, FactsReader, Look};
pub use self::frontend::FrontendProbe;
use self::haste::Haste;
pub use self::log::LogReader;
pub use self::nvml::{NvmlSource, ProbeCommand, VisibleGpus, nvml_child_main, probe as nvml_probe};
use self::pace::{Pace, is_owed};
pub use self::page::PageSource;
use self::procs::ProcRoot;
use self::queue::QueueWatch;
pub use self::ras::RasSource;
pub use self::scrape::Scraper;
pub use self::steps::RankSteps;
pub use self::tree::{
    EngineProcess, Found, container_of, find_engine_in, find_pod_engine, left_of, left_of_in, process_tree,
    process_tree_in, process_tree_members,
};
use self::turns::Done;
use self::walk::TreeWatch;

/// The pages, which ticks and the looks between them read in turn, for microseconds each.
pub type SharedPages = Arc<Mutex<PageSource>>;

/// How long a tick waits for the walk; a longer one is taken by a later tick.
const WALK_WAIT: Duration = Duration::from_millis(15);

/// Where everything is.
#[derive(Debug, Clone)]
pub struct SourcesConfig {
    /// Directory of the heartbeat pages.
    pub page_dir: PathBuf,
    /// Pages `rank-0` to `rank-<ranks - 1>` are read.
    pub ranks: u32,
    /// The launcher's nonce: a page with another one is not this engine's.
    pub nonce: Option<u64>,
    /// E.g. `http://127.0.0.1:8000`.
    pub engine_url: Uri,
    /// The engine's log, if it is a file that we may read.
    pub log_path: Option<PathBuf>,
    /// It lies in memory and nobody else reads it: what was read of it goes.
    pub trim_log: bool,
    /// Ask NVML?
    pub nvml: bool,
    /// `host:port` of NCCL's RAS service; `None` to leave it alone.
    pub ras_address: Option<String>,
}

/// All sources of one engine. Lives in a tokio runtime; its tasks, thread and child end with it.
#[derive(Debug)]
pub struct Sources {
    config: SourcesConfig,
    engine: Option<EngineProcess>,
    pages: SharedPages,
    proc: proc::ProcSource,
    queue: QueueWatch,
    walk: Walk,
    probes: Option<(Scraper, FrontendProbe)>,
    log: Option<log::LogTail>,
    nvml: Option<NvmlSource>,
    ras: Option<RasSource>,
    slow: SlowFacts,
    pace: Pace,
    /// When the processes were read last.
    proc_ms: Option<Ms>,
    probing: Haste,
    scraping: Haste,
}

/// The facts that were gathered last, and the look under way.
#[derive(Debug, Default)]
struct SlowFacts {
    latest: Option<Facts>,
    reader: Option<FactsReader>,
    running: Option<JoinHandle<(FactsReader, Facts)>>,
    done: Option<Done>,
}

/// The walk under way, and the last one.
#[derive(Debug, Default)]
struct Walk {
    watch: Option<TreeWatch>,
    running: Option<JoinHandle<(TreeWatch, Vec<i32>, u64)>>,
    done: Option<Done>,
}

impl Sources {
    /// Nothing is started before the first [`Self::observe`].
    pub fn new(config: SourcesConfig) -> Self {
        Self {
            pages: Arc::new(Mutex::new(PageSource::new(&config.page_dir, config.ranks, config.nonce))),
            proc: proc::ProcSource::live(),
            queue: QueueWatch::new(ProcRoot::live()),
            walk: Walk::default(),
            probes: None,
            log: None,
            nvml: None,
            ras: None,
            slow: SlowFacts::default(),
            pace: Pace::default(),
            proc_ms: None,
            probing: Haste::default(),
            scraping: Haste::default(),
            engine: None,
            config,
        }
    }

    /// The engine process to watch. A new one begins with nothing known; calling again with the same changes nothing.
    pub fn set_engine(&mut self, engine: Option<EngineProcess>) {
        if self.engine == engine {
            return;
        }
        if engine.is_some() {
            // scrapes and probes of the old process say nothing about the new one
            self.probes = None;
            self.ras = None;
            self.log.iter().for_each(log::LogTail::begin_anew);
        }
        self.walk = Walk::default();
        self.slow = SlowFacts::default();
        self.proc_ms = None;
        self.nvml.iter().for_each(|nvml| nvml.set_visible(None));
        self.proc.set_engine(engine.clone());
        self.engine = engine;
    }

    /// The launcher's nonce of the engine that is watched now; a page with another one is silence (H2).
    pub fn set_nonce(&mut self, nonce: Option<u64>) {
        if self.config.nonce != nonce {
            self.config.nonce = nonce;
            *self.pages() = PageSource::new(&self.config.page_dir, self.config.ranks, nonce);
        }
    }

    /// Everything known now, stared at. `now_ms` is `CLOCK_MONOTONIC`; returns within about 20 ms.
    pub async fn observe(&mut self, now_ms: u64) -> Observation {
        let mut obs = Observation::default();
        self.observe_into(now_ms, &mut obs, |_| Pace::Stare).await;
        obs
    }

    /// The same into what was observed last: what is not read anew stays, with its age. `pace` says how closely to look, once the pages
    /// have been read (and what the caller knows of the gate is there). A glance allocates next to nothing.
    pub async fn observe_into(&mut self, now_ms: u64, obs: &mut Observation, pace: impl FnOnce(&Observation) -> Pace) {
        self.start_missing();
        let page_pid = self.look_at_pages(now_ms, obs);
        self.pace = pace(obs);
        self.probing.set(self.pace == Pace::Stare);
        self.scraping.set(self.pace == Pace::Stare || scrapes_matter(obs));
        self.look_at_processes(now_ms, page_pid, obs).await;
        match &self.probes {
            Some((scraper, probe)) => {
                scraper.renew(&mut obs.metrics);
                obs.frontend = probe.latest();
            }
            None => (obs.metrics, obs.frontend) = Default::default(),
        }
        obs.log = self.log.as_ref().map(log::LogTail::take_hits).unwrap_or_default();
        match &self.nvml {
            Some(nvml) => {
                nvml.renew(&mut obs.gpus);
                nvml.renew_xids(&mut obs.xids);
            }
            None => obs.gpus = Signal::default(),
        }
        match &self.ras {
            Some(ras) => ras.renew(&mut obs.ras),
            None => obs.ras = Signal::default(),
        }
    }

    /// How closely the last look looked.
    pub fn pace(&self) -> Pace {
        self.pace
    }

    /// For looks between two ticks.
    pub fn shared_pages(&self) -> SharedPages {
        Arc::clone(&self.pages)
    }

    fn pages(&self) -> MutexGuard<'_, PageSource> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look_at_pages(&mut self, now_ms: u64, obs: &mut Observation) -> Option<i32> {
        let mut pages = obs.pages.value.take().unwrap_or_default();
        let pid = self.pages().look(now_ms, self.pace, &mut pages);
        obs.pages = if pages.is_empty() { Signal::default() } else { Signal::at(now_ms, pages) };
        pid
    }

    async fn look_at_processes(&mut self, now_ms: u64, page_pid: Option<i32>, obs: &mut Observation) {
        self.take_walk(now_ms).await;
        let news = self.take_facts(now_ms, turns::is_gate_silent(now_ms, obs)).await;
        let due = self.proc_ms.is_none_or(|at| now_ms.saturating_sub(at) >= turns::processes_ms(self.pace));
        if due {
            let queued_ms = self.standing(page_pid).and_then(|pid| self.queue.look(now_ms, pid));
            let proc = self.proc.look(now_ms, page_pid).map(|proc| ProcObs { queued_ms, ..proc });
            obs.proc = proc.map(|proc| Signal::at(now_ms, proc)).unwrap_or_default();
            self.proc_ms = Some(now_ms);
        } else if !news {
            return;
        }
        let told = self.slow.latest.as_ref().zip(self.slow.done);
        if let (Some(proc), Some((facts, done))) = (&mut obs.proc.value, told) {
            facts.lay_over(proc, turns::tells_of_now(done.at_ms, now_ms));
        }
    }

    /// Whose threads may be standing in line for a core while work stands still. A page's deadlines begin at 150 ms, so that its writer is
    /// asked at the first such look; others are judged by seconds, and are asked once they are stared at.
    fn standing(&self, page_pid: Option<i32>) -> Option<i32> {
        match self.pace {
            Pace::Rest | Pace::Glance => None,
            Pace::Look => page_pid,
            Pace::Stare => page_pid.or(self.proc.stepping_pid()),
        }
    }

    /// Who lives on of an engine whose first process has ended, as far as it was seen before.
    pub fn left(&self) -> Vec<EngineProcess> {
        self.proc.left()
    }

    /// The newest scrape as it came, and when it was asked for.
    pub fn last_metrics_text(&self) -> Option<(u64, String)> {
        self.probes.as_ref().and_then(|(scraper, _)| scraper.text())
    }

    /// Where a further scrape finds the page.
    pub fn metrics_path(&self) -> &'static str {
        self.probes.as_ref().map_or(scrape::PATHS[0], |(scraper, _)| scraper.path())
    }

    /// What NCCL's RAS answered last; not redacted.
    pub fn last_ras_answer(&self) -> Option<ras::Answer> {
        self.ras.as_ref().and_then(RasSource::answer)
    }

    /// What is kept of the engine's log; not redacted.
    pub fn log_tail(&self) -> LogReader {
        self.log.as_ref().map_or_else(|| Vec::new().into(), log::LogTail::reader)
    }

    /// The flight recorder of every rank (H6).
    pub fn page_steps(&mut self) -> Vec<RankSteps> {
        self.pages().steps()
    }

    /// What NVML is here, or why it is not: a sentence for people.
    pub fn gpu_note(&self) -> String {
        match &self.nvml {
            Some(nvml) => nvml.note(),
            None => "NVML is not asked".to_owned(),
        }
    }

    fn start_missing(&mut self) {
        if self.probes.is_none() {
            let url = &self.config.engine_url;
            let scraper = Scraper::spawn(url, self.scraping.clone());
            let probe = FrontendProbe::spawn(url, self.probing.clone(), scraper.kind(), self.engine.clone());
            self.probes = Some((scraper, probe));
        }
        if self.config.nvml && self.nvml.is_none() {
            self.nvml = Some(NvmlSource::spawn(ProbeCommand::default()));
        }
        if self.ras.is_none() {
            self.ras = self.config.ras_address.as_deref().map(RasSource::spawn);
        }
        if self.log.is_none()
            && let Some(path) = &self.config.log_path
        {
            let follower = log::Follower::new(path).trimming(self.config.trim_log);
            match log::LogTail::spawn(follower, self.probing.clone()) {
                Ok(tail) => self.log = Some(tail),
                // a machine without threads has graver worries; the next tick tries again
                Err(error) => tracing::warn!(%error, path = %path.display(), "cannot follow the engine's log"),
            }
        }
    }

    /// Takes a finished walk over `/proc`, and starts one that is due.
    async fn take_walk(&mut self, now_ms: u64) {
        let Some(engine) = &self.engine else { return };
        if self.walk.running.is_none() && turns::is_walk_due(self.pace, now_ms, self.walk.done) {
            let me = i32::try_from(std::process::id()).unwrap_or(-1);
            let whole_every_ms = turns::whole_walk_ms(self.pace);
            let watch = self.walk.watch.take();
            let mut watch = watch.unwrap_or_else(|| TreeWatch::new(ProcRoot::live(), engine.clone(), me));
            self.walk.running = Some(tokio::task::spawn_blocking(move || {
                let began = Instant::now();
                let members = watch.look(now_ms, whole_every_ms);
                (watch, members, u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX))
            }));
        }
        let Some(running) = &mut self.walk.running else { return };
        let Ok(done) = tokio::time::timeout(WALK_WAIT, running).await else { return };
        self.walk.running = None;
        let Ok((watch, members, cost_us)) = done else { return };
        self.walk.watch = Some(watch);
        self.walk.done = Some(Done { at_ms: now_ms, cost_us });
        self.proc.set_members(members);
    }

    /// Takes facts that were gathered, and starts gathering that is due. Never waits: what takes long is taken by a later tick. Returns
    /// true where there are new ones.
    async fn take_facts(&mut self, now_ms: u64, gate_is_silent: bool) -> bool {
        let Some(engine) = &self.engine else { return false };
        let mut news = false;
        if let Some(running) = self.slow.running.take_if(|running| running.is_finished())
            && let Ok((reader, facts)) = running.await
        {
            self.slow.done = Some(Done { at_ms: now_ms, cost_us: facts.cost_us });
            self.nvml.iter().for_each(|nvml| nvml.set_visible(facts.visible.clone()));
            self.slow.latest = Some(facts);
            self.slow.reader = Some(reader);
            news = true;
        }
        if self.slow.running.is_some() || !turns::are_facts_due(self.pace, gate_is_silent, now_ms, self.slow.done) {
            return news;
        }
        let mut reader =
            self.slow.reader.take().unwrap_or_else(|| FactsReader::new(ProcRoot::live(), TickClock::live()));
        let look = Look {
            members: self.proc.members().to_vec(),
            stepping: self.proc.stepping_pid(),
            engine: engine.pid,
            port: turns::are_sockets_wanted(self.pace, gate_is_silent)
                .then(|| self.config.engine_url.port_u16().unwrap_or(80)),
            now_ms,
        };
        self.slow.running = Some(tokio::task::spawn_blocking(move || {
            let facts = reader.gather(&look);
            (reader, facts)
        }));
        news
    }
}

/// Does the engine's own `/metrics` tell what nothing else does? Where work is owed, or nobody could say so, and no page with leases
/// (H5) tells of it, yes.
fn scrapes_matter(obs: &Observation) -> bool {
    let pages = obs.pages.value.as_deref().unwrap_or_default();
    let gate = obs.gate.value.as_ref();
    (gate.is_none() || is_owed(pages, gate)) && !pages.iter().any(|page| page.lease_ms > 0)
}

/// Takes over what is newer; an equal time means an equal value. True where it was.
fn renew<T: Clone>(newest: &Signal<T>, seen: &mut Signal<T>) -> bool {
    let newer = newest.at_ms != seen.at_ms || newest.value.is_some() != seen.value.is_some();
    if newer {
        seen.clone_from(newest);
    }
    newer
}
