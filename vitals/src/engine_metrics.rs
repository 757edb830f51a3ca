//! Which series of which engine mean what. One table; an engine that lacks a series has `None`, never zero.

use crate::exposition::{Exposition, Sample};
use crate::observation::MetricsObs;

/// Engines whose series are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    Truebeat,
    Vllm,
    Sglang,
    LlamaCpp,
}

/// What a series means. Several names may mean the same: the first that is present counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    Running,
    Waiting,
    GenerationTokens,
    PromptTokens,
    Iterations,
    Finished,
    KvUsage,
    /// Moves when the engine works; has no field of its own.
    Progress,
}

use Meaning::{Finished, GenerationTokens, Iterations, KvUsage, Progress, PromptTokens, Running, Waiting};

/// Names without their engine's prefix. vLLM: the names of 0.8.5 to 0.32 (`gpu_cache_usage_perc` before 0.10.1).
const VLLM: Table = &[
    ("num_requests_running", Running),
    ("num_requests_waiting", Waiting),
    ("generation_tokens_total", GenerationTokens),
    ("prompt_tokens_total", PromptTokens),
    // a histogram whose name ends in _total all the same; its count is the number of steps with output
    ("iteration_tokens_total_count", Iterations),
    ("request_success_total", Finished),
    ("kv_cache_usage_perc", KvUsage),
    ("gpu_cache_usage_perc", KvUsage),
    ("num_preemptions_total", Progress),
    ("prefix_cache_queries_total", Progress),
    ("gpu_prefix_cache_queries_total", Progress),
];

const SGLANG: Table = &[
    ("num_running_reqs", Running),
    ("num_queue_reqs", Waiting),
    ("generation_tokens_total", GenerationTokens),
    ("prompt_tokens_total", PromptTokens),
    ("num_requests_total", Finished),
    ("token_usage", KvUsage),
    ("cached_tokens_total", Progress),
    ("num_used_tokens", Progress),
];

/// llama.cpp adds `tokens_predicted_total` in one lump at a request's end; `n_decode_total` is what moves with every step.
const LLAMA_CPP: Table = &[
    ("requests_processing", Running),
    ("requests_deferred", Waiting),
    ("tokens_predicted_total", GenerationTokens),
    ("prompt_tokens_total", PromptTokens),
    ("n_decode_total", Iterations),
    ("kv_cache_usage_ratio", KvUsage),
    ("n_tokens_max", Progress),
];

/// Names without prefix, and what they mean.
type Table = &'static [(&'static str, Meaning)];

/// Prefix, kind and table. Truebeat's own engine shows vLLM's names for what vLLM also has, under either prefix.
const ENGINES: &[(&str, EngineKind, Table)] = &[
    ("truebeat:", EngineKind::Truebeat, VLLM),
    ("vllm:", EngineKind::Vllm, VLLM),
    ("sglang:", EngineKind::Sglang, SGLANG),
    ("llamacpp:", EngineKind::LlamaCpp, LLAMA_CPP),
];

/// Whose page it is, by the prefixes of its series.
pub fn detect_engine(page: &Exposition) -> Option<EngineKind> {
    ENGINES
        .iter()
        .find(|(prefix, _, _)| page.samples.iter().any(|sample| sample.name.starts_with(prefix)))
        .map(|(_, kind, _)| *kind)
}

/// Maps a page to meanings. Series of several engines (data-parallel ranks) are added up; KV use is the fullest rank's.
pub fn map(page: &Exposition) -> MetricsObs {
    let mut obs = MetricsObs { progress_digest: Fnv::START, ..MetricsObs::default() };
    let mut digest = Fnv(Fnv::START);
    for (prefix, _, table) in ENGINES {
        for (name, meaning) in *table {
            let present = |sample: &&Sample| sample.name.strip_prefix(prefix) == Some(*name);
            let samples = page.samples.iter().filter(present).filter(|sample| counts(*meaning, sample));
            let Some(value) = total(*meaning, samples) else { continue };
            // queue gauges rise with arrivals alone: they prove no progress
            if !matches!(meaning, Running | Waiting) {
                digest.mix(value);
            }
            let slot = match meaning {
                Running => &mut obs.running,
                Waiting => &mut obs.waiting,
                GenerationTokens => &mut obs.generation_tokens,
                PromptTokens => &mut obs.prompt_tokens,
                Iterations => &mut obs.iterations,
                Finished => &mut obs.requests_finished,
                KvUsage => &mut obs.kv_usage,
                Progress => continue,
            };
            slot.get_or_insert(value);
        }
    }
    obs.sleeping = sleeping(page);
    obs.open_fds = page.named("process_open_fds").map(|sample| sample.value).next();
    obs.server_load =
        page.named("server_load").chain(page.named("truebeat:requests_in_flight")).map(|sample| sample.value).next();
    obs.progress_digest = digest.0;
    obs
}

/// A request that its client gave up is counted by the front end alone and proves nothing about the engine.
fn counts(meaning: Meaning, sample: &Sample) -> bool {
    sample.value.is_finite() && !(meaning == Finished && sample.label("finished_reason") == Some("abort"))
}

fn total<'a>(meaning: Meaning, samples: impl Iterator<Item = &'a Sample>) -> Option<f64> {
    samples.map(|sample| sample.value).fold(None, |sum: Option<f64>, value| {
        Some(match sum {
            None => value,
            Some(sum) if meaning == KvUsage => sum.max(value),
            Some(sum) => sum + value,
        })
    })
}

/// `vllm:engine_sleep_state{sleep_state="awake"}` is set by the API server and correct even if the engine does not step.
fn sleeping(page: &Exposition) -> Option<bool> {
    let mut states = page.samples.iter().filter(|sample| sample.name.ends_with(":engine_sleep_state")).peekable();
    states.peek()?;
    Some(states.any(|sample| {
        let awake = sample.label("sleep_state") == Some("awake");
        (awake && sample.value == 0.0) || (!awake && sample.value == 1.0)
    }))
}

struct Fnv(u64);

impl Fnv {
    const START: u64 = 0xcbf2_9ce4_8422_2325;

    fn mix(&mut self, value: f64) {
        for byte in value.to_bits().to_le_bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exposition::{Limits, parse};

    fn mapped(text: &str) -> MetricsObs {
        map(&parse(text, Limits::default()))
    }

    #[test]
    fn vllm_ranks_add_up_and_an_abort_is_no_success() {
        let obs = mapped(
            "vllm:num_requests_running{engine=\"0\"} 2\nvllm:num_requests_running{engine=\"1\"} 3\nvllm:request_success_total{finished_reason=\"stop\"} 4\nvllm:request_success_total{finished_reason=\"abort\"} 9\nvllm:iteration_tokens_total_count 7\n",
        );
        assert_eq!(
            (obs.running, obs.requests_finished, obs.iterations, obs.waiting),
            (Some(5.0), Some(4.0), Some(7.0), None)
        );
    }

    #[test]
    fn old_and_new_names_of_the_cache() {
        assert_eq!(mapped("vllm:gpu_cache_usage_perc 0.5\n").kv_usage, Some(0.5));
        assert_eq!(mapped("vllm:gpu_cache_usage_perc 0.5\nvllm:kv_cache_usage_perc 0.6\n").kv_usage, Some(0.6));
    }

    #[test]
    fn the_digest_moves_with_progress_and_not_with_arrivals() {
        let base = mapped("vllm:generation_tokens_total 5\nvllm:num_requests_waiting 1\n").progress_digest;
        assert_eq!(mapped("vllm:generation_tokens_total 5\nvllm:num_requests_waiting 9\n").progress_digest, base);
        assert_ne!(mapped("vllm:generation_tokens_total 6\nvllm:num_requests_waiting 1\n").progress_digest, base);
    }

    #[test]
    fn sleep_states_and_kinds() {
        assert_eq!(mapped("vllm:engine_sleep_state{sleep_state=\"awake\"} 1.0\nvllm:engine_sleep_state{sleep_state=\"weights_offloaded\"} 0.0\n").sleeping, Some(false));
        assert_eq!(mapped("vllm:engine_sleep_state{sleep_state=\"awake\"} 0.0\nvllm:engine_sleep_state{sleep_state=\"weights_offloaded\"} 1.0\n").sleeping, Some(true));
        assert_eq!(mapped("up 1\n").sleeping, None);
        let kind = |text| detect_engine(&parse(text, Limits::default()));
        assert_eq!(kind("sglang:num_running_reqs 1\n"), Some(EngineKind::Sglang));
        assert_eq!(kind("llamacpp:n_decode_total 1\n"), Some(EngineKind::LlamaCpp));
        assert_eq!(kind("up 1\n"), None);
    }
}
