//! What a heartbeat page says: the values of contract H2–H6 (`docs/contracts/heartbeat.md`), free of layout and I/O.
//!
//! All times are nanoseconds of `CLOCK_MONOTONIC`, which every process of one boot shares.

/// Ranks whose GPUs a page can name.
pub const GPUS_MAX: usize = 8;
/// Step records that the flight recorder keeps (H6).
pub const RING_LEN: usize = 256;

/// Whose page it is (H2). A page whose `pid` and `pid_start_ticks` are not those of the live process is stale.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Process id in the writer's own PID namespace (shared with the agent in our pods).
    pub pid: u32,
    /// Field 22 of `/proc/<pid>/stat`: clock ticks after boot.
    pub pid_start_ticks: u64,
    /// `/proc/sys/kernel/random/boot_id` as 16 bytes.
    pub boot_id: [u8; 16],
    /// Given by the launcher (`TRUEBEAT_NONCE`); 0 where nobody gave one.
    pub nonce: u64,
    /// This rank, and how many there are.
    pub rank: u32,
    pub world_size: u32,
    /// Data-parallel engines that share these ranks out among them, each the same number and in their order; 0 counts as 1.
    pub engines: u32,
    /// UUIDs of the rank's GPUs, at most [`GPUS_MAX`]; empty on CPU.
    pub gpu_uuids: Vec<[u8; 16]>,
}

/// What the engine is doing (H5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Phase {
    Load = 1,
    Compile = 2,
    Capture = 3,
    WarmUp = 4,
    Idle = 5,
    Prefill = 6,
    Decode = 7,
    Sleep = 8,
    Drain = 9,
}

/// The state that is published as one atomic unit: counters (H3), work owed (H4), phase and lease (H5), the step under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beat {
    /// Steps completed since start. Monotone.
    pub steps_completed: u64,
    /// Tokens handed to client queues since start. Monotone.
    pub tokens_delivered: u64,
    /// Requests finished, by whatever end. Monotone.
    pub requests_finished: u64,
    /// Requests in the running batch, and in the queue.
    pub running: u32,
    pub waiting: u32,
    /// Prompt tokens still to prefill, of running and waiting requests.
    pub prompt_tokens_owed: u64,
    pub phase: Phase,
    /// Prompt tokens of the step under way, when the phase is [`Phase::Prefill`]; else 0.
    pub phase_tokens: u32,
    /// When the phase was entered.
    pub phase_entered_ns: u64,
    /// How long the engine says this phase (or, in prefill and decode, this step) may last. The reader caps it.
    pub lease_ms: u32,
    /// When the step under way began; 0 between steps.
    pub step_started_ns: u64,
    /// Start-up work done and in all (bytes of weights, kernels, graphs), in the phase's own unit; 0/0 when unknown.
    pub work_done: u64,
    pub work_total: u64,
    /// When this beat was published.
    pub published_ns: u64,
}

impl Beat {
    /// What a process says that enters `phase` now, has done nothing yet and owes nothing.
    pub fn of_phase(phase: Phase, now_ns: u64) -> Self {
        Self {
            steps_completed: 0,
            tokens_delivered: 0,
            requests_finished: 0,
            running: 0,
            waiting: 0,
            prompt_tokens_owed: 0,
            phase,
            phase_tokens: 0,
            phase_entered_ns: now_ns,
            lease_ms: 0,
            step_started_ns: 0,
            work_done: 0,
            work_total: 0,
            published_ns: now_ns,
        }
    }
}

/// How a recorded step ended (H6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum StepOutcome {
    Ok = 1,
    Failed = 2,
    DeadlineExceeded = 3,
}

/// One line of the flight recorder (H6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepRecord {
    pub step: u64,
    pub started_ns: u64,
    pub ended_ns: u64,
    /// Shape: sequences in the batch, prompt tokens, decode tokens.
    pub requests: u32,
    pub prefill_tokens: u32,
    pub decode_tokens: u32,
    /// Key of the graph that was replayed; 0 for an eager step.
    pub graph_key: u64,
    pub outcome: StepOutcome,
}

/// One consistent read of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    pub identity: Identity,
    pub beat: Beat,
}
