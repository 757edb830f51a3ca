//! What an engine counts, when each kind of engine writes it to `/metrics`, and how a native engine sets its leases.

use super::chance::mix;
use super::profile::{EngineKind, MS, Profile, Us};
use crate::observation::MetricsObs;

/// Decode steps between two of SGLang's gauge updates (`decode_log_interval`).
const SGLANG_LOG_STEPS: u64 = 40;
/// Tokens of one of TensorRT-LLM's cache blocks.
const BLOCK_TOKENS: u64 = 32;

/// True counts of the engine's core.
#[derive(Debug, Clone, Default)]
pub struct Counters {
    pub steps: u64,
    pub prompt: u64,
    pub generated: u64,
    pub finished: u64,
    pub preempted: u64,
    /// Requests whose prefill has begun for the first time.
    pub admitted: u64,
    /// Tokens and prompt tokens of finished requests.
    pub lumps: u64,
    pub lump_prompt: u64,
    /// Did anything come out since the last step that was shown?
    pub output: bool,
}

/// What its front end shows: written at the end of steps, by the rules of its kind.
#[derive(Debug, Clone, Default)]
pub struct Shown {
    pub running: u32,
    pub waiting: u32,
    pub kv: u64,
    pub generated: u64,
    pub prompt: u64,
    pub iterations: u64,
    pub finished: u64,
    pub preempted: u64,
    /// Cache blocks given out to prompts and to tokens.
    pub blocks: u64,
    pub refreshed: Us,
    logged_steps: u64,
}

impl Counters {
    /// After `steps` equal steps: the counters that this kind of engine writes now.
    pub fn after_step(&mut self, kind: EngineKind, prefill: bool, steps: u64, shown: &mut Shown) {
        let output = std::mem::take(&mut self.output);
        match kind {
            EngineKind::Native => {
                shown.iterations = self.steps;
                (shown.generated, shown.prompt) = (self.generated, self.prompt);
                (shown.finished, shown.preempted) = (self.finished, self.preempted);
            }
            EngineKind::Vllm if output => {
                shown.iterations += steps;
                (shown.generated, shown.prompt) = (self.generated, self.prompt);
                (shown.finished, shown.preempted) = (self.finished, self.preempted);
            }
            EngineKind::Vllm => {}
            EngineKind::Sglang => {
                (shown.generated, shown.prompt, shown.finished) = (self.lumps, self.lump_prompt, self.finished);
            }
            EngineKind::LlamaCpp => {
                shown.iterations = self.steps;
                (shown.generated, shown.prompt) = (self.lumps, if prefill { self.prompt } else { shown.prompt });
            }
            EngineKind::Tgi => {
                (shown.iterations, shown.generated, shown.finished) = (self.steps, self.lumps, self.finished);
            }
            EngineKind::TensorRtLlm => {
                (shown.generated, shown.prompt, shown.finished) = (self.lumps, self.lump_prompt, self.finished);
                shown.blocks = (self.generated + self.prompt) / BLOCK_TOKENS;
            }
        }
    }
}

impl Shown {
    /// The gauges after a step: running, waiting, KV tokens in use.
    pub fn gauges(&mut self, kind: EngineKind, counters: &Counters, prefill: bool, queue: (u32, u32, u64)) {
        let due = counters.steps >= self.logged_steps + SGLANG_LOG_STEPS || prefill;
        if kind == EngineKind::Sglang && !due {
            return;
        }
        self.logged_steps = counters.steps;
        (self.running, self.waiting, self.kv) = queue;
    }

    /// As the agent's mapping of the exposition would give it (`engine_metrics`).
    pub fn observe(&self, profile: &Profile, asleep: bool, load: Option<u32>, into: &mut MetricsObs) {
        let some = |n: u64| Some(n as f64);
        let kind = profile.kind;
        let gauges = profile.iter_stats;
        // what this engine does not tell moves no digest either
        let kv = if gauges && kind != EngineKind::Tgi { self.kv } else { 0 };
        let blocks = if gauges { self.blocks } else { 0 };
        let kv_usage = self.kv as f64 / profile.kv_tokens as f64;
        *into = MetricsObs {
            running: some(u64::from(self.running)).filter(|_| gauges),
            waiting: some(u64::from(self.waiting)).filter(|_| gauges),
            generation_tokens: some(self.generated),
            prompt_tokens: some(self.prompt).filter(|_| kind != EngineKind::Tgi),
            iterations: some(self.iterations).filter(|_| !matches!(kind, EngineKind::Sglang | EngineKind::TensorRtLlm)),
            requests_finished: if kind == EngineKind::LlamaCpp { None } else { some(self.finished) },
            kv_usage: Some(kv_usage).filter(|_| gauges && kind != EngineKind::Tgi),
            sleeping: (kind == EngineKind::Vllm).then_some(asleep),
            open_fds: None,
            server_load: load.map(f64::from),
            paused: None,
            process_start_seconds: None,
            resets: 0,
            ranks: Vec::new(),
            counters_digest: digest(&[
                self.generated,
                self.prompt,
                self.iterations,
                self.finished,
                self.preempted,
                blocks,
            ]),
            progress_digest: digest(&[
                self.generated,
                self.prompt,
                self.iterations,
                self.finished,
                kv,
                self.preempted,
                blocks,
            ]),
        };
    }
}

/// The native engine's leases, as `engine/src/beat/lease.rs` sets them: twenty times what the size took before.
#[derive(Debug, Clone, Default)]
pub struct LeaseModel {
    decode_token_us: f64,
    prefill_unit_us: f64,
}

impl LeaseModel {
    /// After the warm-up's one prefill and one decode.
    pub fn warm(profile: &Profile) -> Self {
        let mut model = Self::default();
        model.learn(1, 0, profile.step_us);
        model.learn(0, 64 * 512, profile.step_us + profile.prefill_us(64, 0));
        model
    }

    pub fn learn(&mut self, decoding: u32, prefill_units: u64, took: Us) {
        let took = took as f64;
        let blend = |estimate: &mut f64, seen: f64| {
            *estimate = if seen > *estimate { seen } else { *estimate + (seen - *estimate) / 8.0 }
        };
        if prefill_units > 0 {
            let rest = (took - self.decode_token_us * f64::from(decoding)).max(took / 2.0);
            blend(&mut self.prefill_unit_us, rest / prefill_units as f64);
        } else {
            blend(&mut self.decode_token_us, took / f64::from(decoding.max(1)));
        }
    }

    pub fn lease_ms(&self, decoding: u32, prefill_units: u64) -> u64 {
        let expected = self.decode_token_us * f64::from(decoding) + self.prefill_unit_us * prefill_units as f64;
        (((expected / MS as f64) as u64).saturating_mul(20)).clamp(400, 300_000)
    }
}

fn digest(counts: &[u64]) -> u64 {
    counts.iter().fold(0, |sum, count| mix(sum ^ *count).wrapping_add(1))
}
