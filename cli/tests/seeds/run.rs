//! `truebeat run -- truebeat engine`, and what can be seen of it from outside: the agent's verdict, the engine's metrics, its processes.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use agent::launch::EngineFile;
use heartbeat::page::Phase;
use serde_json::Value;

use crate::Seed;
use crate::end_run::end_run;
use crate::free_addresses::free_addresses;

const SOON: Duration = Duration::from_secs(120);
/// After a verdict that may still find its class.
const CLASS_MAX: Duration = Duration::from_secs(20);
/// Ranks that a seed may have.
const RANKS_MAX: u32 = 16;
const TRUEBEAT: &str = env!("CARGO_BIN_EXE_truebeat");

/// A supervised engine. Dropped, all of it ends.
pub struct Run {
    supervisor: Child,
    pub gate: String,
    agent: String,
    engine: String,
    dir: tempfile::TempDir,
}

/// How a rank's threads look.
#[derive(Debug)]
pub struct Look {
    pub rank: u32,
    threads: Vec<(char, String)>,
}

impl Look {
    /// A letter for each thread.
    pub fn states(&self) -> String {
        self.threads.iter().map(|(state, _)| *state).collect()
    }

    /// What runs is in no call of the kernel. (One that does not say where a thread is says nothing of it.)
    pub fn burns_outside_the_kernel(&self) -> bool {
        self.threads.iter().all(|(state, wchan)| *state != 'R' || wchan == "0" || wchan.is_empty())
    }

    /// It is neither stopped nor gone, nor waits for a disk.
    pub fn sleeps_or_looks(&self) -> bool {
        !self.threads.is_empty() && self.threads.iter().all(|(state, _)| matches!(state, 'S' | 'R'))
    }
}

impl std::fmt::Display for Look {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}:{}", self.rank, self.states())
    }
}

/// What the agent says.
pub struct Verdict {
    pub verdict: String,
    pub class: String,
    pub reason: String,
}

impl Drop for Run {
    fn drop(&mut self) {
        end_run(&mut self.supervisor, &self.dir.path().join("agent"));
    }
}

impl Run {
    /// An engine that is ready. Guards off: it lies as the field's do.
    pub fn start(seed: &Seed, fault: &str, guards: &str) -> Self {
        let run = Self::launch(seed, fault, guards);
        run.until("ready", || run.ask(&run.agent, "/readyz").contains(" 200 ").then_some(()));
        run
    }

    /// An engine that may never be ready.
    pub fn launch(seed: &Seed, fault: &str, guards: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("tiny");
        let mut make = Command::new(TRUEBEAT);
        make.arg("demo-model").arg(&model).args(["--arch", seed.model]).stdout(Stdio::null());
        assert!(make.status().unwrap().success());
        let [gate, agent, engine] = free_addresses().map(|address| address.to_string());
        let log = std::fs::File::create(dir.path().join("run.log")).unwrap();
        let mut command = Command::new(TRUEBEAT);
        command.args(["run", "--no-nvml", "--listen", &gate, "--agent-listen", &agent]);
        command.args(["--engine-url", &format!("http://{engine}")]);
        // the agent only looks: off, the hang is to be seen; on, the engine ends by itself and is merely started anew
        command.args(["--recovery-mode", "observe"]);
        command.arg("--agent-dir").arg(dir.path().join("agent"));
        command.arg("--bundle-dir").arg(dir.path().join("bundles"));
        // the line of its figures is on the level that the engine's own program has, and not `truebeat`'s
        command.args(["--", TRUEBEAT, "--log-filter", "warn,engine::cli=info"]);
        command.args(["engine", "--listen", &engine, "--fault", fault, "--guards", guards]);
        command.args(["--tensor-parallel", &seed.ranks.to_string()]).args((guards == "off").then_some("--lie"));
        command.args(seed.more);
        command.arg("--cache-dir").arg(dir.path().join("cache")).arg("--model").arg(&model);
        let err = log.try_clone().unwrap();
        let supervisor = command.stdin(Stdio::null()).stdout(log).stderr(err).spawn().unwrap();
        Self { supervisor, gate, agent, engine, dir }
    }

    /// The agent's verdict as soon as it has this class; or its last one, after a while: what burns on a machine that is short of
    /// processors is seen to burn late.
    pub fn class(&self, wanted: &str) -> Verdict {
        let since = Instant::now();
        loop {
            let verdict = self.verdict();
            if verdict.class == wanted || since.elapsed() > CLASS_MAX {
                return verdict;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn verdict(&self) -> Verdict {
        self.until("a verdict with a class", || {
            let doc = self.json("/verdict")?;
            let text = |field: &Value| field.as_str().map(str::to_owned);
            let class = &doc["class"];
            let class = text(class).or_else(|| Some(class.as_object()?.keys().next()?.clone()))?;
            Some(Verdict { verdict: text(&doc["verdict"])?, class, reason: doc["reasons"].to_string() })
        })
    }

    pub fn engine_health(&self) -> String {
        self.ask(&self.engine, "/health")
    }

    /// The value of a series of the engine.
    pub fn metric(&self, name: &str) -> f64 {
        self.until(name, || {
            let text = self.ask(&self.engine, "/metrics");
            let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")))?.to_owned();
            line.rsplit(' ').next()?.parse().ok()
        })
    }

    /// Each rank's threads as the kernel sees them: engine and, once it is there, device of the first one, engine of the others.
    pub fn rank_looks(&self) -> Vec<Look> {
        let pages = self.page_dir();
        let look = |rank| {
            let pid = heartbeat::Reader::open(&pages, rank).read().ok()?.identity.pid;
            let threads: &[&str] = if rank == 0 { &["engine", "device"] } else { &["engine"] };
            Some(Look { rank, threads: threads.iter().filter_map(|thread| state_and_wchan(pid, thread)).collect() })
        };
        (0..RANKS_MAX).filter_map(look).collect()
    }

    /// The start-up phase, or the lack of one, of each rank whose process lives.
    pub fn phases(&self) -> Vec<Phase> {
        let pages = self.page_dir();
        let read = |rank| heartbeat::Reader::open(&pages, rank).read();
        (0..RANKS_MAX).filter_map(|rank| Some(read(rank).ok()?.beat.phase)).collect()
    }

    /// Whether a line of the log has these words.
    pub fn has_said(&self, words: &str) -> bool {
        std::fs::read_to_string(self.dir.path().join("run.log")).is_ok_and(|log| log.contains(words))
    }

    /// Waits for a line of the log with these words.
    pub fn says(&self, words: &str) {
        self.until(words, || self.has_said(words).then_some(()));
    }

    /// How often the engine was started.
    pub fn starts(&self) -> u64 {
        self.engine_file().starts
    }

    pub fn last_exit(&self) -> String {
        format!("{:?}", self.engine_file().last_exit.map(|exit| (exit.code, exit.signal)))
    }

    fn engine_file(&self) -> EngineFile {
        EngineFile::read(&self.dir.path().join("agent")).unwrap()
    }

    fn page_dir(&self) -> PathBuf {
        let told = std::fs::read_to_string(self.dir.path().join("agent/page-dir"));
        told.map(PathBuf::from).unwrap_or_else(|error| panic!("no pages ({error}): {}", self.log()))
    }

    fn json(&self, path: &str) -> Option<Value> {
        let text = self.ask(&self.agent, path);
        serde_json::from_str(text.split_once("\r\n\r\n")?.1).ok()
    }

    fn until<T>(&self, what: &str, mut wanted: impl FnMut() -> Option<T>) -> T {
        let since = Instant::now();
        loop {
            if let Some(result) = wanted() {
                return result;
            }
            assert!(since.elapsed() < SOON, "never: {what}; the log ends:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn log(&self) -> String {
        let text = std::fs::read_to_string(self.dir.path().join("run.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(12).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }

    fn ask(&self, address: &str, path: &str) -> String {
        let Ok(mut stream) = TcpStream::connect(address) else { return String::new() };
        let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
        let _ = stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes());
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        text
    }
}

/// How many threads want each processor, over the last minute.
pub fn load_per_processor() -> f64 {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: f64 = load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0);
    load / std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64)
}

/// The state of a thread, and where in the kernel it waits; "0": it does not.
fn state_and_wchan(pid: u32, thread: &str) -> Option<(char, String)> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten().map(|task| task.path());
    let named = |task: &PathBuf| std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == thread);
    let task = tasks.into_iter().find(named)?;
    let stat = std::fs::read_to_string(task.join("stat")).ok()?;
    let wchan = std::fs::read_to_string(task.join("wchan")).unwrap_or_default();
    Some((stat.rsplit_once(") ")?.1.chars().next()?, wchan))
}
