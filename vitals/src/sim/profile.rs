//! Which engine it is: its kind, its speed, and which of its signals an agent would get. Drawn once a history.
//!
//! Speeds span what the field runs: a 1B model on an H100 to a 7B model on two CPU cores.

use super::chance::Chance;

/// Microseconds of virtual time.
pub type Us = u64;
pub const MS: Us = 1_000;
pub const SECOND: Us = 1_000_000;
pub const MINUTE: Us = 60 * SECOND;
pub const HOUR: Us = 3_600 * SECOND;

/// How an engine behaves and what it counts when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineKind {
    /// Truebeat's own: a page with leases.
    Native,
    /// Counters only on steps with output, gauges with every step.
    #[default]
    Vllm,
    /// Gauges each 40 decode steps, token counters at a request's end.
    Sglang,
    /// Token counter in one lump at a request's end, `n_decode_total` with every step; `/metrics` waits for the step.
    LlamaCpp,
    /// Tokens at a request's end, steps counted one by one, no word of the cache; the queue is counted by a task that outlives the shard.
    Tgi,
    /// Tokens at a request's end, cache blocks and gauges with every step where iteration statistics are on.
    TensorRtLlm,
}

impl EngineKind {
    /// What the kernel calls the process by which it steps, where that has a title of its own beside a front end.
    pub fn core_title(self) -> Option<&'static str> {
        match self {
            Self::Vllm => Some("VLLM::EngineCor"),
            Self::Sglang => Some("sglang::schedul"),
            Self::Native | Self::LlamaCpp | Self::Tgi | Self::TensorRtLlm => None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::LlamaCpp => "llama.cpp",
            Self::Tgi => "tgi",
            Self::TensorRtLlm => "tensorrt-llm",
        }
    }
}

/// One replica.
#[derive(Debug, Clone)]
pub struct Profile {
    pub kind: EngineKind,
    /// Tensor-parallel ranks: one page each where there are pages.
    pub ranks: u32,
    pub on_gpu: bool,
    /// A decode step of one sequence, and what each further sequence adds.
    pub step_us: Us,
    pub seq_us: Us,
    /// Prefill, in nanoseconds a token at the start of a prompt.
    pub prefill_token_ns: u64,
    /// The depth of a prompt at which attention costs as much as everything else.
    pub depth_tokens: u64,
    /// Prompt tokens a step; `None`: a prompt is one step, however long.
    pub chunk: Option<u32>,
    pub seqs_max: u32,
    pub kv_tokens: u64,
    pub prompt_max: u32,
    /// Tokenizing and handing over.
    pub front_us: Us,
    pub stream_permille: u64,
    pub startup_us: Us,
    /// SGLang since it writes gauges while it is idle as well.
    pub idle_refresh: bool,
    /// TensorRT-LLM without `enable_iter_perf_stats` tells of requests that end and of nothing else.
    pub iter_stats: bool,
    pub signals: Signals,
    /// Data-parallel engines of the pod, and the place of this one among them.
    pub engines: u32,
    pub place: u32,
}

/// What the agent can see of it.
#[derive(Debug, Clone, Copy)]
pub struct Signals {
    pub gate: bool,
    pub metrics: bool,
    /// A page: with leases (native), or of a plugin (without).
    pub page: bool,
    /// `/load` is switched on.
    pub load: bool,
    pub proc: bool,
    pub gpu: bool,
    pub log: bool,
    pub frontend: bool,
}

impl Profile {
    /// Any engine of this kind.
    pub fn draw(kind: EngineKind, chance: &mut Chance) -> Self {
        let native = kind == EngineKind::Native;
        let gpu_permille = match kind {
            EngineKind::LlamaCpp => 400,
            EngineKind::TensorRtLlm => 1_000,
            _ => 750,
        };
        let on_gpu = !native && chance.permille(gpu_permille);
        let ranks = match kind {
            EngineKind::LlamaCpp => 1,
            _ => chance.pick(&[1, 1, 1, 2, 2, 4, 8]),
        };
        let step_us = if on_gpu { chance.scale(5 * MS, 50 * MS) } else { chance.scale(8 * MS, 250 * MS) };
        let prefill_token_ns = if on_gpu { chance.scale(20_000, 250_000) } else { chance.scale(200_000, 1_500_000) };
        let chunked = match kind {
            EngineKind::LlamaCpp => Some(2_048),
            EngineKind::Native => Some(512),
            _ => chance.permille(700).then(|| chance.pick(&[512, 2_048, 2_048, 8_192, 8_192])),
        };
        let prompt_max = if on_gpu { 131_072 } else { 16_384 };
        let kv_tokens = chance.scale(u64::from(prompt_max) * 2, 1_500_000);
        Self {
            kind,
            ranks,
            on_gpu,
            step_us,
            seq_us: step_us / chance.between(8, 60),
            prefill_token_ns,
            depth_tokens: if on_gpu { chance.scale(16_000, 128_000) } else { chance.scale(4_000, 16_000) },
            chunk: chunked,
            seqs_max: chance.pick(&[4, 8, 32, 64, 128, 256]).max(4),
            kv_tokens,
            prompt_max,
            front_us: chance.scale(MS, 20 * MS),
            stream_permille: chance.pick(&[0, 300, 800, 1_000, 1_000]),
            startup_us: if native {
                chance.scale(2 * SECOND, 60 * SECOND)
            } else {
                chance.scale(20 * SECOND, 9 * MINUTE)
            },
            idle_refresh: kind == EngineKind::Sglang && chance.permille(800),
            iter_stats: kind != EngineKind::TensorRtLlm || chance.permille(700),
            signals: Signals::draw(kind, on_gpu, chance),
            engines: 1,
            place: 0,
        }
    }

    /// The time of prefill of these tokens at this depth of a prompt: attention grows with what stands before.
    pub fn prefill_us(&self, tokens: u32, depth: u32) -> Us {
        let weight = self.depth_tokens + u64::from(depth) + u64::from(tokens) / 2;
        u64::from(tokens) * self.prefill_token_ns / 1_000 * weight / self.depth_tokens.max(1)
    }

    /// About how long a request of this size takes when nobody else is there.
    pub fn service_us(&self, prompt: u32, out: u32) -> Us {
        self.prefill_us(prompt, 0) + u64::from(out) * self.step_us + self.front_us
    }
}

impl Signals {
    fn draw(kind: EngineKind, on_gpu: bool, chance: &mut Chance) -> Self {
        let native = kind == EngineKind::Native;
        Self {
            gate: chance.permille(900),
            metrics: native || chance.permille(950),
            page: native || (kind == EngineKind::Vllm && chance.permille(150)),
            load: kind == EngineKind::Vllm && chance.permille(200),
            proc: chance.permille(970),
            gpu: on_gpu && chance.permille(800),
            log: chance.permille(800),
            frontend: chance.permille(980),
        }
    }
}
