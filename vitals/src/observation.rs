//! What the detector sees: one [`Observation`] a tick, every signal with its age. Missing is never zero.
//!
//! Times are milliseconds of one monotonic clock that the caller chooses (the agent: `CLOCK_MONOTONIC`; a replay: the trace's
//! seconds × 1000). The crate never reads a clock.

use serde::{Deserialize, Deserializer, Serialize};

pub use crate::ended::EndedObs;
use crate::xid::Remedy;

/// Milliseconds of the caller's monotonic clock.
pub type Ms = u64;

/// A value with the moment it was true, or nothing at all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signal<T> {
    pub value: Option<T>,
    /// When the value was true (not: when it was asked for). Meaningless without a value.
    pub at_ms: Ms,
}

impl<T> Default for Signal<T> {
    fn default() -> Self {
        Self { value: None, at_ms: 0 }
    }
}

impl<T> Signal<T> {
    /// A value that was true at `at_ms`.
    pub fn at(at_ms: Ms, value: T) -> Self {
        Self { value: Some(value), at_ms }
    }

    /// The value, unless it is missing or older than `age_ms_max`.
    pub fn fresh(&self, now_ms: Ms, age_ms_max: Ms) -> Option<&T> {
        self.value.as_ref().filter(|_| now_ms.saturating_sub(self.at_ms) <= age_ms_max)
    }
}

/// Everything known about one engine at one tick. An absent source stays `Signal::default()`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// Process facts from /proc.
    pub proc: Signal<ProcObs>,
    /// The heartbeat pages, by rank. A stale or unreadable page is no entry here.
    pub pages: Signal<Vec<PageObs>>,
    /// What the gate in front of the engine counted.
    pub gate: Signal<GateObs>,
    /// What the engine's /metrics said, mapped to meanings (`engine_metrics`).
    pub metrics: Signal<MetricsObs>,
    /// Log signatures seen since the last tick.
    pub log: Vec<LogHit>,
    /// NVML readings, one a GPU.
    pub gpus: Signal<Vec<GpuObs>>,
    /// Xids that NVML's events told, as long as the agent remembers them (those in the log are in `log`).
    #[serde(default)]
    pub xids: Vec<XidObs>,
    /// What the collective library's own RAS service said (NCCL RAS); nothing where none listens.
    #[serde(default)]
    pub ras: Signal<RasObs>,
    /// The engine's HTTP port: did it answer anything within the probe's deadline (never evidence of progress, V2)?
    pub frontend: Signal<FrontendObs>,
    /// A person or the platform says that silence is intended (annotation, sleep or pause API).
    pub maintenance: bool,
    /// How long the agent itself did not run since its last tick (VM pause, throttled agent); the interval is discarded (V5).
    pub agent_gap_ms: Ms,
    /// What is known of a drain: the agent was asked to drain the engine.
    pub draining: bool,
}

/// One rank's page, mapped to the detector's clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageObs {
    pub rank: u32,
    pub world_size: u32,
    /// Data-parallel engines that share these ranks out among them, in their order; 0 where the page does not say: one.
    #[serde(default)]
    pub engines: u32,
    pub steps_completed: u64,
    pub tokens_delivered: u64,
    pub requests_finished: u64,
    pub running: u32,
    pub waiting: u32,
    pub prompt_tokens_owed: u64,
    pub phase: PagePhase,
    pub phase_tokens: u32,
    pub phase_entered_ms: Ms,
    pub lease_ms: Ms,
    /// When the step under way began, if one is.
    pub step_started_ms: Option<Ms>,
    pub work_done: u64,
    pub work_total: u64,
    pub published_ms: Ms,
}

impl PageObs {
    /// Ranks of one data-parallel engine: they step together.
    pub fn engine_ranks(&self) -> u32 {
        self.world_size / self.engines.max(1)
    }

    /// Which of the data-parallel engines this rank is of. Only ranks of the same one take the same steps.
    pub fn engine(&self) -> u32 {
        if self.engines < 2 { 0 } else { self.rank / self.engine_ranks().max(1) }
    }

    /// Requests that it says are owed.
    pub fn owed(&self) -> u32 {
        self.running.saturating_add(self.waiting)
    }
}

/// Phases of contract H5.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PagePhase {
    Load,
    Compile,
    Capture,
    WarmUp,
    Idle,
    Prefill,
    Decode,
    Sleep,
    Drain,
}

/// What the gate knows without asking the engine: the most trusted signal (V2).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateObs {
    /// Changes when the gate restarts; its counters begin anew then.
    pub epoch: u64,
    /// Requests forwarded to the engine and not yet ended.
    pub in_flight: u32,
    /// Of these, requests that have had no first byte of a body.
    pub awaiting_first_byte: u32,
    /// Rough prompt tokens (body bytes / 4, or token ids counted) of requests that await their first byte.
    pub prompt_tokens_owed: u64,
    /// The same of all requests that were ever forwarded, so that one that came and left between two looks is known of. Monotone in an
    /// epoch; 0 where the gate does not count them.
    #[serde(default)]
    pub prompt_tokens_taken: u64,
    /// The longest prompt among those that await their first byte, in the same rough tokens. `None`: the gate does not look.
    #[serde(default)]
    pub longest_prompt_owed: Option<u64>,
    /// Response body chunks and bytes that were read from the engine (whether or not the client took them). Monotone in an epoch.
    pub chunks_delivered: u64,
    pub bytes_delivered: u64,
    /// Requests ended, by whatever end. Monotone in an epoch.
    pub requests_done: u64,
    /// Of these, those that their client left before the end. Monotone in an epoch; 0 where the gate does not tell them apart.
    #[serde(default)]
    pub requests_abandoned: u64,
    /// Requests whose client reads, or sends, too slowly, so that the engine's silence is the client's doing.
    pub client_blocked: u32,
    /// When the oldest request in flight was forwarded.
    pub oldest_in_flight_ms: Option<Ms>,
    /// When the last byte of any response body was read from the engine.
    pub last_delivery_ms: Option<Ms>,
    /// Of the requests that await their first byte, those that did not ask for a stream: silent until their end by their own wish.
    /// `None`: the gate does not look.
    #[serde(default)]
    pub unstreamed: Option<u32>,
    /// Of the requests that have begun to answer and whose client reads: when the one that is silent for longest had its last byte.
    #[serde(default)]
    pub quietest_begun_ms: Option<Ms>,
}

impl GateObs {
    /// Is there work, none of which has begun to answer? Such silence may be the front end's own doing, and a request that does not
    /// stream is silent until its end.
    pub fn only_unanswered(&self) -> bool {
        self.in_flight > 0 && self.awaiting_first_byte >= self.in_flight
    }

    /// Requests in flight that have begun to answer.
    pub fn begun(&self) -> u32 {
        self.in_flight.saturating_sub(self.awaiting_first_byte)
    }

    /// Is every request in flight known to be silent until its answer is whole?
    pub fn only_whole_answers(&self) -> bool {
        self.unstreamed.is_some_and(|unstreamed| unstreamed >= self.in_flight)
    }

    /// May all that the engine makes now be of answers that are silent until they are whole? No stream has begun.
    pub fn may_be_whole(&self) -> bool {
        self.only_unanswered() && self.unstreamed.is_some_and(|unstreamed| unstreamed > 0)
    }

    /// Requests that have had a first byte, or ended: monotone in an epoch.
    pub fn answered(&self) -> u64 {
        self.requests_done.saturating_add(u64::from(self.in_flight.saturating_sub(self.awaiting_first_byte)))
    }
}

/// Meanings read from an engine's /metrics; a series that the engine does not have is `None`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct MetricsObs {
    pub running: Option<f64>,
    pub waiting: Option<f64>,
    pub generation_tokens: Option<f64>,
    pub prompt_tokens: Option<f64>,
    pub iterations: Option<f64>,
    pub requests_finished: Option<f64>,
    /// KV use in 0..=1.
    pub kv_usage: Option<f64>,
    pub sleeping: Option<bool>,
    pub open_fds: Option<f64>,
    /// Requests in flight by the engine's own `/load`, where it has one.
    pub server_load: Option<f64>,
    /// Is generation paused, by the engine's own `/is_paused`, where it has one?
    #[serde(default)]
    pub paused: Option<bool>,
    /// A digest over every progress series: it changes when anything moved.
    pub progress_digest: u64,
    /// The same over counters alone: what only rises while the engine works, and no gauge of room that may be given back. 0 where nobody
    /// tells.
    #[serde(default)]
    pub counters_digest: u64,
    /// When the process that serves the page started, in seconds since 1970 by its own clock: an identity, not a time to compare.
    #[serde(default)]
    pub process_start_seconds: Option<f64>,
    /// Pages on which a counter had fallen: each is a new baseline. 0 where pages are read without memory.
    #[serde(default)]
    pub resets: u32,
    /// Data-parallel ranks, where the page tells of more than one: the sums above hide a rank that stands among others that move.
    #[serde(default)]
    pub ranks: Vec<RankMetrics>,
}

/// One data-parallel rank of an engine's page.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RankMetrics {
    pub rank: u32,
    pub running: Option<f64>,
    pub waiting: Option<f64>,
    /// Changes when a progress series of this rank moved.
    pub progress_digest: u64,
}

/// /proc facts of the engine's process tree.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcObs {
    /// Is the engine's main process there and not a zombie?
    pub alive: bool,
    /// When the engine process started (grace is anchored to this, V3).
    pub started_ms: Ms,
    /// The process that steps: state letter and wchan of its main thread.
    pub state: Option<char>,
    pub wchan: Option<String>,
    /// CPU time of the whole tree, in milliseconds. Monotone while the tree's members live.
    pub cpu_ms: u64,
    /// Compiler children (nvcc, ptxas, cicc, gcc, cc1plus, ninja …) and their CPU time.
    pub compilers: u32,
    pub compilers_cpu_ms: u64,
    /// A debugger holds the process.
    pub traced: bool,
    /// The cgroup throttled or froze the engine since the last look.
    pub throttled: bool,
    pub frozen: bool,
    /// Processes of the tree that are stopped (state T) and not traced, whichever of them steps.
    #[serde(default)]
    pub stopped: u32,
    /// Of these, such that it cannot step without (see [`EndedObs`]).
    #[serde(default)]
    pub stopped_cores: u32,
    /// A process by which the engine steps has ended while its first one lives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<EndedObs>,
    /// How long, since the look before, the unluckiest thread of the process that steps could have run and was given no core. `None`: that
    /// look is too long ago, or the kernel does not say.
    #[serde(default)]
    pub queued_ms: Option<Ms>,
    /// SIGKILL was sent to this engine and it is still there.
    pub kill_sent_ms: Option<Ms>,
    /// Connections of the engine's port that are established (our own probes among them), and those that wait to be accepted.
    #[serde(default)]
    pub connections: Option<u32>,
    #[serde(default)]
    pub accept_queue: Option<u32>,
    /// Does anybody listen on that port? Servers bind it when they can serve, or shortly before.
    #[serde(default)]
    pub listening: Option<bool>,
    /// Bytes that the tree has read, from anywhere and from storage: weights on their way (S4). Monotone.
    #[serde(default)]
    pub read_chars: Option<u64>,
    #[serde(default)]
    pub read_bytes: Option<u64>,
    /// Bytes that it has written, by calls and to storage: a model that is fetched comes by `recv`, which is in no count of what was read,
    /// and goes to a file. Monotone.
    #[serde(default)]
    pub written: Option<u64>,
    /// Threads of the stepping process: the main one, then those that have burned most since the last look.
    #[serde(default)]
    pub threads: Vec<ThreadObs>,
    /// When they were looked at, which is less often than the rest.
    #[serde(default)]
    pub threads_at_ms: Option<Ms>,
}

/// One thread of the process that steps.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadObs {
    pub tid: i32,
    /// The kernel's name of it, at most 15 characters.
    pub name: String,
    pub state: char,
    /// CPU time in all, and since the last look.
    pub cpu_ms: u64,
    pub burned_ms: u64,
    /// How long before this look the last one was; 0 where there was none of this thread.
    #[serde(default)]
    pub span_ms: u64,
    /// Of that time, how long it could have run and was given no core. `None`: the kernel does not say, or it slept at either look.
    #[serde(default)]
    pub runnable_ms: Option<u64>,
}

/// What NCCL's RAS service says of the ranks of a communicator: a witness that names a rank, never a stall by itself (V4).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RasObs {
    /// Ranks of the world that the service calls missing, dead or behind in their collective operations; ascending.
    pub silent_ranks: Vec<u32>,
    /// It says so of a rank of another communicator, whose number there names nobody here.
    #[serde(default)]
    pub silent_elsewhere: bool,
    /// It answered within its deadline, and the answer was understood.
    pub answered: bool,
    /// The sentence of its answer that says so, for people; cut at 300 characters.
    pub text: String,
}

/// Whether the engine's front end answers at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontendObs {
    /// The port accepts and some HTTP status came back within the deadline.
    pub answers: bool,
    /// What `/health` said, e.g. 200 that may well lie; `None` where it is not asked and another path answered.
    pub status: Option<u16>,
    /// Since when it has been silent; `None` while it answers.
    pub silent_since_ms: Option<Ms>,
    /// Has it answered since the engine's start?
    pub ever_answered: bool,
    /// Nobody is at the port that is asked, and the engine's own processes list its models at another.
    #[serde(default)]
    pub elsewhere: bool,
}

/// One signature found in the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogHit {
    /// Name in the signature table.
    pub signature: String,
    pub at_ms: Ms,
    /// The line, cut at 300 characters.
    pub line: String,
}

/// One GPU as NVML tells it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuObs {
    pub uuid: String,
    /// NVML's own number of it, by its place on the bus; `None` where it is not known.
    #[serde(default)]
    pub index: Option<u32>,
    /// PCI address as NVML writes it (`00000000:44:00.0`): by it the kernel's log calls the GPU.
    #[serde(default)]
    pub pci: Option<String>,
    /// 0..=100 each.
    pub util: u32,
    pub memory_util: u32,
    /// `None` where the card does not tell it; recordings have 0 for that as well, which no card draws.
    #[serde(default, deserialize_with = "watts")]
    pub power_watts: Option<f64>,
    #[serde(default, deserialize_with = "watts")]
    pub power_limit_watts: Option<f64>,
    /// Clock of the multiprocessors; `None` where the card does not tell it.
    #[serde(default)]
    pub sm_clock_mhz: Option<u32>,
    /// NVML did not answer within its deadline since this moment.
    pub silent_since_ms: Option<Ms>,
}

fn watts<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.filter(|watts| *watts > 0.0))
}

/// One Xid as NVML's event told it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct XidObs {
    /// The GPU's UUID; empty where it is not known.
    #[serde(default)]
    pub uuid: String,
    pub code: u32,
    /// What the driver itself asked for at that moment, where it says (Xid 154).
    #[serde(default)]
    pub remedy: Option<Remedy>,
    pub at_ms: Ms,
}
