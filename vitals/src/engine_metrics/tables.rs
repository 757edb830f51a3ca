//! The data: which series of which engine means what, in which versions, and who writes it. Names only; a reader of this file needs
//! no code to check it against an engine's own documentation. `docs/engine-signals.md` is made from it.

/// Engines whose series are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    Truebeat,
    Vllm,
    Sglang,
    TensorRtLlm,
    Tgi,
    LlamaCpp,
}

/// What a series means. Several names may mean the same: the first that is present counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Meaning {
    Running,
    Waiting,
    GenerationTokens,
    PromptTokens,
    Iterations,
    Finished,
    KvUsage,
    /// Requests in flight as the front end counts them: live while the engine stands.
    Load,
    /// A counter that moves when the engine works; has no field of its own.
    Progress,
    /// A gauge that the working engine changes; has no field of its own.
    Level,
}

impl Meaning {
    /// Does it only ever rise while one engine process lives?
    pub fn is_counter(self) -> bool {
        matches!(self, Self::GenerationTokens | Self::PromptTokens | Self::Iterations | Self::Finished | Self::Progress)
    }

    /// Does a change prove that the engine worked? Queue gauges rise with arrivals alone, and the front end writes the load.
    pub fn proves_progress(self) -> bool {
        !matches!(self, Self::Running | Self::Waiting | Self::Load)
    }

    /// What the detector reads it as, for people.
    pub fn role(self) -> &'static str {
        match self {
            Self::Running => "owed: running",
            Self::Waiting => "owed: waiting, admission",
            Self::GenerationTokens => "progress: tokens out",
            Self::PromptTokens => "progress: prompt tokens",
            Self::Iterations => "progress: steps",
            Self::Finished => "progress: requests finished",
            Self::KvUsage => "admission: cache in use; progress",
            Self::Load => "owed: in flight, by the front end",
            Self::Progress | Self::Level => "progress",
        }
    }
}

/// One series of one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Series {
    /// Without the engine's prefix.
    pub name: &'static str,
    pub meaning: Meaning,
    /// Only samples with this label value count.
    pub only: Option<(&'static str, &'static str)>,
    /// Samples with one of these values of the label do not count.
    pub but: Option<(&'static str, &'static [&'static str])>,
    /// Versions, who writes it and what misleads.
    pub note: &'static str,
}

impl Series {
    const fn but(mut self, label: &'static str, values: &'static [&'static str]) -> Self {
        self.but = Some((label, values));
        self
    }

    const fn only(mut self, label: &'static str, value: &'static str) -> Self {
        self.only = Some((label, value));
        self
    }
}

const fn series(name: &'static str, meaning: Meaning, note: &'static str) -> Series {
    Series { name, meaning, only: None, but: None, note }
}

/// One engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineTable {
    pub kind: EngineKind,
    pub title: &'static str,
    /// What its series begin with; older or wrapped servers may use another.
    pub prefixes: &'static [&'static str],
    pub series: &'static [Series],
    /// Where the page is, what switches it on, and what its silence means.
    pub note: &'static str,
}

use Meaning::{Finished, GenerationTokens, Iterations, KvUsage, Level, Load, Progress, PromptTokens, Running, Waiting};

const VLLM: &[Series] = &[
    series("num_requests_running", Running, "0.8.5–0.33; set with every step, frozen (maybe at 0) when steps stop"),
    series("num_requests_waiting", Waiting, "0.8.5–0.33; as running; new requests do not move it in a hang"),
    series("generation_tokens_total", GenerationTokens, "0.8.5–0.33; only on steps with output"),
    series(
        "prompt_tokens_total",
        PromptTokens,
        "0.8.5–0.33; only on steps with output: flat in a chunked prefill alone",
    ),
    series("iteration_tokens_total_count", Iterations, "0.8.5–0.33; the count of a histogram: steps with output"),
    series("request_success_total", Finished, "0.8.5–0.33; an abort is the client's doing and does not count")
        .but("finished_reason", &["abort"]),
    series("gpu_cache_usage_perc", KvUsage, "up to 0.10, beside the new name from 0.9; asked before it"),
    series(
        "kv_cache_usage_perc",
        KvUsage,
        "from 0.9; set with every step: all that moves in a chunked prefill alone. Up to 0.11.0 each of several API servers has a series \
         of its own, label `pid`, most of them stale (vllm #28792): they add up, and above 1 are unknown",
    ),
    series("num_preemptions_total", Progress, "0.8.5–0.33"),
    series("prefix_cache_queries_total", Progress, "from 0.9; set with every step"),
    series("gpu_prefix_cache_queries_total", Progress, "up to 0.10, beside the new name from 0.9"),
];

const TRUEBEAT: &[Series] = &[
    series("steps_total", Iterations, "steps completed, written by the step thread"),
    series(
        "requests_ended_total",
        Finished,
        "ends of accepted requests; what clients and deadlines end does not count",
    )
    .but("end", &["abort", "late"]),
    series("requests_in_flight", Load, "written by the front end"),
];

const SGLANG: &[Series] = &[
    series("num_running_reqs", Running, "every version; set at log intervals (40 decode steps)"),
    series("num_queue_reqs", Waiting, "every version; the total has priority=\"\" where priorities are on"),
    series("realtime_tokens_total", GenerationTokens, "from 0.5.7; moves with every decode step")
        .only("mode", "decode"),
    series("generation_tokens_total", GenerationTokens, "every version; added when a request finishes"),
    series("realtime_tokens_total", PromptTokens, "from 0.5.7; moves with every batch of a prefill")
        .only("mode", "prefill_compute"),
    series("prompt_tokens_total", PromptTokens, "every version; added when a request finishes, cached tokens included"),
    series("num_requests_total", Finished, "from 0.4.3 at the latest; not in 0.4.0"),
    series("token_usage", KvUsage, "every version"),
    series("forward_execution_seconds_total", Progress, "from 0.5.11; only with SGLANG_ENABLE_METRICS_DEVICE_TIMER"),
    series("gpu_execution_seconds_total", Progress, "0.5.7–0.5.10, the same"),
    series("cuda_graph_passes_total", Progress, "from 0.5.7"),
    series("cached_tokens_total", Progress, "from 0.4.4; added when a request finishes"),
    series("num_used_tokens", Level, "every version; moves within a prefill"),
];

const TENSORRT_LLM: &[Series] = &[
    series("num_requests_running", Running, "iteration statistics"),
    series("num_requests_waiting", Waiting, "iteration statistics"),
    series("generation_tokens_total", GenerationTokens, "added when a request finishes"),
    series("prompt_tokens_total", PromptTokens, "added when a request finishes"),
    series("num_requests_completed_total", Finished, "iteration statistics"),
    series("request_success_total", Finished, "from 1.1; all that 1.1.0rc5 has beside latency histograms"),
    series("kv_cache_utilization", KvUsage, "iteration statistics"),
    series("kv_cache_gen_alloc_blocks_total", Progress, "blocks given to decoding"),
    series("kv_cache_iter_missed_blocks_total", Progress, "blocks computed by prefill"),
    series("kv_cache_iter_reused_blocks_total", Progress, "blocks found by prefill"),
    series("kv_cache_missed_blocks_total", Progress, "as above, older name"),
    series("kv_cache_reused_blocks_total", Progress, "as above, older name"),
];

const TGI: &[Series] = &[
    series("batch_current_size", Running, "set by the batching loop"),
    series("queue_size", Waiting, "set by the queue's task, which goes on when the shard hangs"),
    series("request_generated_tokens_sum", GenerationTokens, "sum of a histogram: added when a request finishes"),
    series("batch_inference_success", Iterations, "by method, prefill and decode; counted after the shard answered"),
    series("request_success", Finished, "a request that its client gave up counts nowhere"),
    series("batch_forward_duration_count", Progress, "by method; count of a histogram"),
    series("batch_decode_duration_count", Progress, "by method; count of a histogram"),
];

/// `tokens_predicted_total` comes in one lump at a request's end; `n_decode_total` is what moves with every step. Numbers are written with
/// six figures, so above a million a counter moves by tens, above a hundred million by thousands.
const LLAMA_CPP: &[Series] = &[
    series("requests_processing", Running, "every version"),
    series("requests_deferred", Waiting, "every version"),
    series("tokens_predicted_total", GenerationTokens, "added in one lump when a request ends"),
    series(
        "prompt_tokens_total",
        PromptTokens,
        "added when a prompt is through, in 2026 with each batch of it that is waited for",
    ),
    series("n_decode_total", Iterations, "calls of llama_decode; above 10^6 it moves by tens, above 10^8 by thousands"),
    series("kv_cache_usage_ratio", KvUsage, "older versions"),
    series("n_tokens_max", Level, "high watermark of the context"),
    series("spec_decode_num_drafts_total", Progress, "2026; added when a request ends"),
];

/// Every engine. Truebeat's own shows vLLM's names for what vLLM also has, under vLLM's prefix.
pub const ENGINES: &[EngineTable] = &[
    EngineTable {
        kind: EngineKind::Truebeat,
        title: "Truebeat",
        prefixes: &["truebeat:"],
        series: TRUEBEAT,
        note: "`/metrics`, always. What vLLM has too is under vLLM's names; the whole list is in `engine-metrics.md`.",
    },
    EngineTable {
        kind: EngineKind::Vllm,
        title: "vLLM",
        prefixes: &["vllm:"],
        series: VLLM,
        note: "`/metrics`, always; one series for each data-parallel rank, label `engine` (0.8.5 shows the last rank alone; V0 has no such \
               label). All are written by the API server when a step's output arrives, so in a hang all stand still and the page goes on \
               answering. `engine_sleep_state` (not yet in 0.11.0) is the API server's own and correct in a hang. Several API servers write one \
               page together, without `process_*`; so does the front end in Rust (`VLLM_USE_RUST_FRONTEND=1`), which does not tell of \
               sleep either. From 0.18 on a request that the core's input thread refuses (`finished_reason=\"error\"`) counts as a step \
               with output, also in a hang. `/load` (`--enable-server-load-tracking`; the one in Rust always) says what is in flight, live \
               in every hang but one of the API server; without the flag it stays at 0. `/is_paused` (`VLLM_SERVER_DEV_MODE=1`) says \
               whether generation is paused, which no series does; who answers 404 is not asked again.",
    },
    EngineTable {
        kind: EngineKind::Sglang,
        title: "SGLang",
        prefixes: &["sglang:"],
        series: SGLANG,
        note: "`/metrics` with `--enable-metrics`. `tp_rank`, `pp_rank` and `moe_ep_rank` repeat one scheduler's numbers and are not \
               added up; `dp_rank` (from 0.4.10 at the latest) is a scheduler of its own. What the tokenizer counts when a request \
               finishes has no rank and no total over priorities.",
    },
    EngineTable {
        kind: EngineKind::TensorRtLlm,
        title: "TensorRT-LLM",
        prefixes: &["trtllm_", "trtllm:"],
        series: TENSORRT_LLM,
        note: "`/prometheus/metrics` (its `/metrics` is JSON and forgets what it has told), with `return_perf_metrics`; through Dynamo \
               on Dynamo's page, in older releases with the prefix `trtllm:`. Its gauges have a label `pid`. Iteration statistics need \
               `enable_iter_perf_stats`.",
    },
    EngineTable {
        kind: EngineKind::Tgi,
        title: "Text Generation Inference",
        prefixes: &["tgi_"],
        series: TGI,
        note: "`/metrics`, always, from the router. `tgi_request_count` and `tgi_request_input_length` are counted at the door, and \
               `tgi_batch_inference_count` before the shard is asked: arrivals, no progress. Its backends of TensorRT-LLM and llama.cpp \
               write no series of batches and queues.",
    },
    EngineTable {
        kind: EngineKind::LlamaCpp,
        title: "llama.cpp",
        prefixes: &["llamacpp:"],
        series: LLAMA_CPP,
        note: "`/metrics` with `--metrics`. The request waits in the server's own task queue: while a step runs it is not answered, so \
               a page that falls silent is what a hang looks like here. From August 2026 on (llama.cpp #27041) it is answered during a \
               step, and in a hang stands still like others'; requests that come meanwhile are not in `requests_deferred`.",
    },
];

/// Names outside every engine's prefix that are read all the same.
pub const COMMON: &[(&str, &str)] = &[
    ("process_open_fds", "rises with each open connection, also in a hang: arrivals that no gauge shows"),
    ("process_start_time_seconds", "changes when the process that serves the page is another one"),
    ("server_load", "vLLM's `/load`, where a recording has put it into the page"),
];
