//! `truebeat record`: writes what a detector would see of a live engine into a trace that `truebeat replay` reads (DESIGN: traces).
//!
//! It looks and never acts: the engine's sources are read as the detector reads them, the gate is asked without being told anything.
//! Bounded in time and in bytes. May read clocks, `/proc`, the engine's port and the gate's socket; writes one file.

mod beside;
mod line;
mod sink;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use http::Uri;
use vitals::observation::{Observation, Signal};

use self::beside::Beside;
use self::line::Lines;
use self::sink::Sink;
use crate::gate::control::{GateClient, socket_in};
use crate::launch::{EngineFile, run_dirs};
use crate::options::RANKS;
use crate::signals::{received, unless_ignored};
use crate::sources::clock::monotonic_ms;
use crate::sources::{EngineProcess, Sources, SourcesConfig, find_pod_engine, ras};

/// How often the engine is looked for anew.
const FOLLOW_EVERY: Duration = Duration::from_secs(1);
/// A tick so much later than it should be is the recorder's own gap (V5).
const GAP_MS_MIN: u64 = 150;

/// What a trace unpacks to, at most: whoever replays it holds it in memory.
pub const TEXT_BYTES_MAX: u64 = 1 << 30;
/// What one more line may take, and more.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// What to record, and for how long.
#[derive(Debug, Args)]
pub struct RecordArgs {
    /// The trace to write; a file that exists is not overwritten.
    #[arg(long, value_name = "FILE.jsonl.gz")]
    pub out: PathBuf,
    /// The engine's own address.
    #[arg(long, env = "TRUEBEAT_ENGINE_URL", default_value = "http://127.0.0.1:8000")]
    pub engine_url: Uri,
    /// The agent's directory (`--agent-dir` of `truebeat run` or of the sidecar): tells the engine's process, pages and log, and
    /// has the gate's counters.
    #[arg(long, env = "TRUEBEAT_AGENT_DIR")]
    pub agent_dir: Option<PathBuf>,
    /// The engine's process, where no agent tells it.
    #[arg(long)]
    pub pid: Option<i32>,
    /// Where the engine publishes its heartbeat pages. Default: what the engine's environment says.
    #[arg(long, env = "TRUEBEAT_PAGE_DIR")]
    pub page_dir: Option<PathBuf>,
    /// Pages are looked for up to this many ranks.
    #[arg(long, env = "TRUEBEAT_RANKS", default_value_t = RANKS, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub ranks: u32,
    /// The engine's log. Only lines with a known signature are recorded.
    #[arg(long, env = "TRUEBEAT_LOG_FILE", alias = "log")]
    pub log_file: Option<PathBuf>,
    /// The agent's directory for notes (`--notes-dir` of `truebeat run`): tells whether somebody has declared maintenance.
    #[arg(long, env = "TRUEBEAT_NOTES_DIR")]
    pub notes_dir: Option<PathBuf>,
    /// Do not ask NVML about the GPUs.
    #[arg(long, env = "TRUEBEAT_NO_NVML", value_parser = clap::builder::FalseyValueParser::new())]
    pub no_nvml: bool,
    /// How long. SIGINT, SIGTERM and SIGHUP end it sooner, and the trace is whole.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub seconds: u32,
    /// Samples a second; 10 is what the detector sees.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10))]
    pub hz: u32,
    /// The recording ends when the file has grown to this, or would unpack to more than a replay takes (1 GiB).
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub mib_max: u32,
}

/// Why nothing was recorded.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("{path} exists; a trace is never overwritten: choose another --out or remove it")]
    Exists { path: PathBuf },
    #[error("{path} was made by somebody else meanwhile and is left as it is; the whole trace lies in {part}")]
    Meanwhile { path: PathBuf, part: PathBuf },
    #[error("could not create the trace {path}: {source}")]
    Create { path: PathBuf, source: io::Error },
    #[error("could not write the trace {path}: {source}; what was written until then lies in it")]
    Write { path: PathBuf, source: io::Error },
    #[error("there is no process {pid}")]
    NoProcess { pid: i32 },
    #[error(
        "there is no directory {path}; --agent-dir is what `truebeat run` or the sidecar was told, or /run/truebeat-agent in a pod"
    )]
    NoAgentDir { path: PathBuf },
    #[error("could not be told about signals: {0}")]
    Signals(io::Error),
    #[error(
        "nothing was seen of an engine in {seconds} s: {url} does not answer, and no process and no page is known; give --engine-url, and --agent-dir or --pid"
    )]
    Nothing { seconds: u64, url: Uri },
}

/// What a finished recording holds.
#[derive(Debug, Clone, Default)]
pub struct RecordReport {
    pub out: PathBuf,
    pub samples: u64,
    pub seconds: f64,
    pub bytes: u64,
    /// Samples in which each source spoke.
    seen: Seen,
    /// It grew to its bound before its time was over.
    pub full: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    process: u64,
    pages: u64,
    gate: u64,
    metrics: u64,
    frontend: u64,
    gpus: u64,
}

impl Seen {
    fn count(&mut self, obs: &Observation) {
        self.process += u64::from(obs.proc.value.is_some());
        self.pages += u64::from(obs.pages.value.is_some());
        self.gate += u64::from(obs.gate.value.is_some());
        self.metrics += u64::from(obs.metrics.value.is_some());
        self.frontend += u64::from(obs.frontend.value.is_some_and(|frontend| frontend.answers));
        self.gpus += u64::from(obs.gpus.value.is_some());
    }

    fn nothing(&self) -> bool {
        self.process + self.pages + self.gate + self.metrics + self.frontend == 0
    }
}

impl fmt::Display for RecordReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { out, samples, seconds, bytes, seen, full } = self;
        writeln!(f, "{}: {samples} samples in {seconds:.1} s, {} KiB", out.display(), bytes.div_ceil(1024))?;
        if *full {
            let most_mib = TEXT_BYTES_MAX >> 20;
            writeln!(
                f,
                "it reached --mib-max, or the {most_mib} MiB unpacked that a replay takes, and ended before its time"
            )?;
        }
        let Seen { process, pages, gate, metrics, frontend, gpus } = seen;
        write!(
            f,
            "samples with process {process}, pages {pages}, gate {gate}, metrics {metrics}, front end {frontend}, GPUs {gpus}"
        )
    }
}

/// Records until the time is over, the file is full, or a signal says so.
///
/// # Errors
/// When the file cannot be made or written, and when there was nothing to see.
pub async fn run(args: RecordArgs) -> Result<RecordReport, RecordError> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).map_err(RecordError::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(RecordError::Signals)?;
    // a terminal that is closed, unless whoever started it wanted that otherwise (`nohup`)
    let mut hangup = unless_ignored(SignalKind::hangup()).map_err(RecordError::Signals)?;
    let mut recorder = Recorder::open(args)?;
    let begun = Instant::now();
    tokio::select! {
        done = recorder.record(begun) => done?,
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = received(&mut hangup) => {}
    }
    recorder.close(begun)
}

struct Recorder {
    args: RecordArgs,
    sink: Sink,
    lines: Lines,
    follow: Follow,
    sources: Option<(PathBuf, Sources)>,
    gate: Option<GateClient>,
    beside: Beside,
    report: RecordReport,
    ticked_ms: Option<u64>,
}

impl Recorder {
    fn open(args: RecordArgs) -> Result<Self, RecordError> {
        if let Some(pid) = args.pid.filter(|pid| EngineProcess::of(*pid).is_none()) {
            return Err(RecordError::NoProcess { pid });
        }
        if let Some(path) = args.agent_dir.clone().filter(|path| !path.is_dir()) {
            return Err(RecordError::NoAgentDir { path });
        }
        Ok(Self {
            sink: Sink::create(&args.out)?,
            lines: Lines::default(),
            follow: Follow::default(),
            sources: None,
            gate: args.agent_dir.as_ref().map(|dir| GateClient::new(socket_in(dir))),
            beside: Beside::new(args.agent_dir.clone(), args.notes_dir.clone()),
            report: RecordReport { out: args.out.clone(), ..RecordReport::default() },
            ticked_ms: None,
            args,
        })
    }

    async fn record(&mut self, begun: Instant) -> Result<(), RecordError> {
        let mut ticks = tokio::time::interval(Duration::from_secs(1) / self.args.hz);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let bytes_max = u64::from(self.args.mib_max) << 20;
        let length = Duration::from_secs(self.args.seconds.into());
        while begun.elapsed() < length && !self.report.full {
            ticks.tick().await;
            self.sample().await?;
            self.report.full =
                self.sink.bytes() >= bytes_max || self.sink.text_bytes() + LINE_BYTES_MAX > TEXT_BYTES_MAX;
        }
        Ok(())
    }

    async fn sample(&mut self) -> Result<(), RecordError> {
        self.follow.look(&self.args).await;
        let page_dir = self.follow.page_dir(&self.args);
        if self.sources.as_ref().is_none_or(|(dir, _)| *dir != page_dir) {
            self.sources = Some((page_dir.clone(), Sources::new(self.sources_config(page_dir))));
        }
        let Some((_, sources)) = &mut self.sources else { return Ok(()) };
        sources.set_nonce(self.follow.nonce);
        sources.set_engine(self.follow.engine.clone());
        let now_ms = monotonic_ms();
        let mut obs = sources.observe(now_ms).await;
        let heard = match &mut self.gate {
            Some(gate) => gate.look().await.ok(),
            None => None,
        };
        let engine = self.follow.engine.as_ref();
        self.beside.lay_over(now_ms, engine, heard.as_ref().map(|heard| &heard.reply), &mut obs).await;
        obs.gate = heard.map(|heard| Signal::at(heard.at_ms, heard.reply.obs)).unwrap_or_default();
        let due_ms = 1_000 / u64::from(self.args.hz);
        let late_ms = self.ticked_ms.replace(now_ms).map_or(0, |before| (now_ms - before).saturating_sub(due_ms));
        obs.agent_gap_ms = if late_ms < GAP_MS_MIN { 0 } else { late_ms };
        let line = self.lines.line(now_ms, &obs, sources.last_metrics_text());
        self.sink.write(&line)?;
        self.report.samples += 1;
        self.report.seen.count(&obs);
        Ok(())
    }

    fn sources_config(&self, page_dir: PathBuf) -> SourcesConfig {
        let in_agent_dir = self.args.agent_dir.as_ref().map(|dir| dir.join("engine.log")).filter(|path| path.is_file());
        SourcesConfig {
            page_dir,
            ranks: self.args.ranks,
            nonce: self.follow.nonce,
            engine_url: self.args.engine_url.clone(),
            log_path: self.args.log_file.clone().or(in_agent_dir),
            trim_log: false,
            nvml: !self.args.no_nvml,
            ras_address: Some(ras::address()),
        }
    }

    fn close(self, begun: Instant) -> Result<RecordReport, RecordError> {
        let seconds = begun.elapsed();
        if self.report.seen.nothing() {
            self.sink.discard();
            return Err(RecordError::Nothing { seconds: seconds.as_secs(), url: self.args.engine_url });
        }
        let bytes = self.sink.finish()?;
        Ok(RecordReport { seconds: seconds.as_secs_f64(), bytes, ..self.report })
    }
}

/// Which process is the engine, as far as anybody tells.
#[derive(Debug, Default)]
struct Follow {
    engine: Option<EngineProcess>,
    nonce: Option<u64>,
    /// What the run notes of its pages, or `TRUEBEAT_PAGE_DIR` of the engine's environment.
    told_page_dir: Option<PathBuf>,
    looked: Option<Instant>,
}

impl Follow {
    async fn look(&mut self, args: &RecordArgs) {
        if self.looked.is_some_and(|looked| looked.elapsed() < FOLLOW_EVERY) {
            return;
        }
        self.looked = Some(Instant::now());
        let file = args.agent_dir.as_deref().and_then(EngineFile::read);
        self.nonce = file.as_ref().map(|file| file.nonce);
        let engine = match (&file, args.pid) {
            // once it has ended its number may be somebody else's
            (_, Some(pid)) => self.engine.clone().or_else(|| EngineProcess::of(pid)),
            (Some(file), None) => Some(file.process()),
            (None, None) if args.agent_dir.is_some() => self.search(args).await,
            (None, None) => None,
        };
        if engine != self.engine {
            self.told_page_dir = None;
        }
        if let Some(engine) = engine.as_ref().filter(|_| self.told_page_dir.is_none()) {
            let noted = args.agent_dir.as_deref().filter(|_| file.is_some()).and_then(run_dirs::pages_of);
            // an environment may be written over, or may not be had at once
            self.told_page_dir = if noted.is_some() { noted } else { page_dir_of(engine.pid).await };
        }
        self.engine = engine;
    }

    /// In a pod nobody tells: the engine is searched for, while the one that is known has gone.
    async fn search(&self, args: &RecordArgs) -> Option<EngineProcess> {
        let lives = |engine: &EngineProcess| EngineProcess::of(engine.pid).as_ref() == Some(engine);
        if let Some(engine) = self.engine.as_ref().filter(|engine| lives(engine)) {
            return Some(engine.clone());
        }
        let page_dir = self.page_dir(args);
        let search = tokio::task::spawn_blocking(move || find_pod_engine(&page_dir, None));
        search.await.ok().flatten().map(|found| found.process)
    }

    fn page_dir(&self, args: &RecordArgs) -> PathBuf {
        let told = args.page_dir.clone().or_else(|| self.told_page_dir.clone());
        told.unwrap_or_else(|| PathBuf::from("/run/truebeat"))
    }
}

/// Reads the engine's environment, which waits for its memory lock: aside, and not longer than a second (I4).
async fn page_dir_of(pid: i32) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    let read = tokio::task::spawn_blocking(move || std::fs::read(format!("/proc/{pid}/environ")));
    let environ = tokio::time::timeout(Duration::from_secs(1), read).await.ok()?.ok()?.ok()?;
    let entry = environ.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(b"TRUEBEAT_PAGE_DIR="))?;
    Some(PathBuf::from(std::ffi::OsStr::from_bytes(entry)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use nix::sys::signal::{Signal, raise};
    use tokio::signal::unix::SignalKind;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: RecordArgs,
    }

    #[tokio::test]
    async fn a_terminal_that_is_closed_leaves_a_whole_trace() {
        let dir = tempfile::tempdir().unwrap();
        let (out, part) = (dir.path().join("x.gz"), dir.path().join("x.gz.part"));
        if unless_ignored(SignalKind::hangup()).unwrap().is_none() {
            return;
        }
        let me = std::process::id().to_string();
        let words = ["record", "--no-nvml", "--seconds", "600", "--engine-url", "http://127.0.0.1:1", "--pid", &me];
        let words = words.map(Into::into).into_iter().chain(["--out".into(), out.clone().into_os_string()]);
        let recording = tokio::spawn(run(Cli::parse_from(words).args));
        let begun = Instant::now();
        while !part.exists() || begun.elapsed() < Duration::from_secs(3) {
            assert!(begun.elapsed() < Duration::from_secs(30), "nothing is recorded");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        raise(Signal::SIGHUP).unwrap();
        let report = tokio::time::timeout(Duration::from_secs(30), recording).await.unwrap().unwrap().unwrap();
        assert!(report.samples > 0 && out.exists() && !part.exists());
    }
}
