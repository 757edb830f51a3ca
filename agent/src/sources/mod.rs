//! Where observations come from: the page, `/proc`, `/metrics`, the front end, the log, NVML and NCCL's RAS, each with its age.
//!
//! [`Sources::observe`] never waits for any of them: page and `/proc` are read in place (they cannot block), everything else runs
//! in tasks, threads or a killable child of its own, and the newest result is taken (I4). Missing stays missing, never zero.
//!
//! Not filled in here, for the caller knows them: `gate`, `maintenance`, `agent_gap_ms`, `draining`, and `proc.kill_sent_ms`.

mod cgroup;
pub mod clock;
pub mod facts;
mod frontend;
pub mod get;
pub mod log;
pub mod net;
mod nvml;
mod page;
pub mod proc;
pub mod procs;
pub mod ras;
pub mod scrape;
mod tree;
pub mod walk;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use heartbeat::page::StepRecord;
use http::Uri;
use tokio::task::JoinHandle;
use vitals::observation::{Observation, Signal};

use self::clock::TickClock;
use self::facts::{Facts, FactsReader, Look};
pub use self::frontend::FrontendProbe;
pub use self::nvml::{NvmlSource, ProbeCommand, nvml_child_main, probe as nvml_probe};
pub use self::page::{PageLook, PageSource};
use self::procs::ProcRoot;
pub use self::ras::RasSource;
pub use self::scrape::Scraper;
pub use self::tree::{
    EngineProcess, Found, find_engine_in, find_pod_engine, process_tree, process_tree_in, process_tree_members,
};
use self::walk::TreeWatch;

/// The look at `/proc`'s processes: not more often than this, and never more than one part in twenty of the time.
const WALK_EVERY_MS_MIN: u64 = 500;
const WALK_COST_FACTOR: u64 = 20;
/// The facts that are gathered off the tick: between looks, and at most one part in a thousand of the time.
const FACTS_EVERY_MS_MIN: u64 = 1_000;
const FACTS_EVERY_MS_MAX: u64 = 30_000;
const FACTS_COST_FACTOR: u64 = 1_000;
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
    pages: PageSource,
    proc: proc::ProcSource,
    walk: Walk,
    probes: Option<(Scraper, FrontendProbe)>,
    log: Option<log::LogTail>,
    nvml: Option<NvmlSource>,
    ras: Option<RasSource>,
    slow: SlowFacts,
}

/// The facts that were gathered last, the look under way, and when the next is due.
#[derive(Debug, Default)]
struct SlowFacts {
    latest: Option<Facts>,
    reader: Option<FactsReader>,
    running: Option<JoinHandle<(FactsReader, Facts)>>,
    due_ms: u64,
}

/// The walk under way, and when the next is due.
#[derive(Debug, Default)]
struct Walk {
    watch: Option<TreeWatch>,
    running: Option<JoinHandle<(TreeWatch, Vec<i32>, u64)>>,
    due_ms: u64,
}

impl Sources {
    /// Nothing is started before the first [`Self::observe`].
    pub fn new(config: SourcesConfig) -> Self {
        Self {
            pages: PageSource::new(&config.page_dir, config.ranks, config.nonce),
            proc: proc::ProcSource::live(),
            walk: Walk::default(),
            probes: None,
            log: None,
            nvml: None,
            ras: None,
            slow: SlowFacts::default(),
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
        }
        self.walk = Walk::default();
        self.slow = SlowFacts::default();
        self.proc.set_engine(engine.clone());
        self.engine = engine;
    }

    /// The launcher's nonce of the engine that is watched now; a page with another one is silence (H2).
    pub fn set_nonce(&mut self, nonce: Option<u64>) {
        if self.config.nonce != nonce {
            self.config.nonce = nonce;
            self.pages = PageSource::new(&self.config.page_dir, self.config.ranks, nonce);
        }
    }

    /// Everything known now. `now_ms` is `CLOCK_MONOTONIC`; returns within about 20 ms.
    pub async fn observe(&mut self, now_ms: u64) -> Observation {
        self.start_missing();
        self.take_walk(now_ms).await;
        let look = self.pages.look();
        let mut proc = self.proc.look(now_ms, look.pid);
        self.take_facts(now_ms).await;
        if let (Some(proc), Some(facts)) = (&mut proc, &self.slow.latest) {
            facts.lay_over(proc);
        }
        let (metrics, frontend) = match &self.probes {
            Some((scraper, probe)) => (scraper.latest(), probe.latest()),
            None => Default::default(),
        };
        Observation {
            proc: proc.map(|proc| Signal::at(now_ms, proc)).unwrap_or_default(),
            pages: if look.pages.is_empty() { Signal::default() } else { Signal::at(now_ms, look.pages) },
            metrics,
            frontend,
            log: self.log.as_ref().map(log::LogTail::take_hits).unwrap_or_default(),
            gpus: self.nvml.as_ref().map(NvmlSource::latest).unwrap_or_default(),
            ras: self.ras.as_ref().map(RasSource::latest).unwrap_or_default(),
            ..Observation::default()
        }
    }

    /// The newest scrape as it came, and when it was asked for.
    pub fn last_metrics_text(&self) -> Option<(u64, String)> {
        self.probes.as_ref().and_then(|(scraper, _)| scraper.text())
    }

    /// The last lines of the engine's log, oldest first; not redacted.
    pub fn log_tail(&self) -> Vec<String> {
        self.log.as_ref().map(log::LogTail::lines).unwrap_or_default()
    }

    /// The flight recorder of every rank (H6).
    pub fn page_steps(&mut self) -> Vec<StepRecord> {
        self.pages.steps()
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
            self.probes = Some((Scraper::spawn(url), FrontendProbe::spawn(url)));
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
            match log::LogTail::spawn(path) {
                Ok(tail) => self.log = Some(tail),
                // a machine without threads has graver worries; the next tick tries again
                Err(error) => tracing::warn!(%error, path = %path.display(), "cannot follow the engine's log"),
            }
        }
    }

    /// Takes a finished walk over `/proc`, and starts one that is due.
    async fn take_walk(&mut self, now_ms: u64) {
        let Some(engine) = &self.engine else { return };
        if self.walk.running.is_none() && now_ms >= self.walk.due_ms {
            let me = i32::try_from(std::process::id()).unwrap_or(-1);
            let watch = self.walk.watch.take();
            let mut watch = watch.unwrap_or_else(|| TreeWatch::new(ProcRoot::live(), engine.clone(), me));
            self.walk.running = Some(tokio::task::spawn_blocking(move || {
                let began = Instant::now();
                let members = watch.look(now_ms);
                (watch, members, u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX))
            }));
        }
        let Some(running) = &mut self.walk.running else { return };
        let Ok(done) = tokio::time::timeout(WALK_WAIT, running).await else { return };
        self.walk.running = None;
        let Ok((watch, members, cost_ms)) = done else { return };
        self.walk.watch = Some(watch);
        self.walk.due_ms = now_ms.saturating_add(WALK_EVERY_MS_MIN.max(cost_ms.saturating_mul(WALK_COST_FACTOR)));
        self.proc.set_members(members);
    }

    /// Takes facts that were gathered, and starts gathering that is due. Never waits: what takes long is taken by a later tick.
    async fn take_facts(&mut self, now_ms: u64) {
        let Some(engine) = &self.engine else { return };
        if let Some(running) = self.slow.running.take_if(|running| running.is_finished())
            && let Ok((reader, facts)) = running.await
        {
            let pause_ms = (facts.cost_us / 1_000).saturating_mul(FACTS_COST_FACTOR);
            self.slow.due_ms = now_ms.saturating_add(pause_ms.clamp(FACTS_EVERY_MS_MIN, FACTS_EVERY_MS_MAX));
            self.slow.latest = Some(facts);
            self.slow.reader = Some(reader);
        }
        if self.slow.running.is_some() || now_ms < self.slow.due_ms {
            return;
        }
        let mut reader =
            self.slow.reader.take().unwrap_or_else(|| FactsReader::new(ProcRoot::live(), TickClock::live()));
        let look = Look {
            members: self.proc.members().to_vec(),
            stepping: self.proc.stepping_pid(),
            engine: engine.pid,
            port: self.config.engine_url.port_u16().unwrap_or(80),
        };
        self.slow.running = Some(tokio::task::spawn_blocking(move || {
            let facts = reader.gather(&look);
            (reader, facts)
        }));
    }
}
