//! V3: deadlines, learned where there is something to learn from, clamped, scaled by the prompt tokens owed.

use crate::examine::Allowed;
use crate::excuse::Tick;
use crate::observation::{Ms, PageObs, PagePhase};
use crate::policy::Policy;
use crate::rhythm::Rhythm;
use crate::signs::{Sight, Signs};

/// How long the step under way of a native page may last.
pub fn native_step(page: &PageObs, rhythm: &Rhythm, policy: &Policy, tick: &Tick) -> Allowed {
    let lease = if page.lease_ms == 0 { policy.lease_cap_ms } else { page.lease_ms.min(policy.lease_cap_ms) };
    let warm = rhythm.steps_seen >= policy.native_warm_steps;
    let learned = match page.phase {
        PagePhase::Prefill => rhythm
            .prefill_us_per_token
            .quantile(990)
            .map(|us| us.max(rhythm.prefill_recent_us).saturating_mul(u64::from(page.phase_tokens.max(1))) / 1000)
            .filter(|_| {
                page.prompt_tokens_owed.max(u64::from(page.phase_tokens)) <= reach(rhythm.prompt_tokens_max, policy)
            }),
        PagePhase::Decode => rhythm.decode_step_ms.quantile(990).map(|ms| ms.max(rhythm.decode_recent_ms / 2)),
        _ => None,
    };
    // what the machine does to the agent it does to the engine: lateness is added on top, lease or not (V5)
    let jitter = tick.jitter_ms.saturating_mul(2);
    match learned.filter(|_| warm) {
        Some(ms) => Allowed::learned(
            factor(ms, policy.native_factor_tenths)
                .clamp(policy.native_floor_ms, lease.max(policy.native_floor_ms))
                .saturating_add(jitter),
        ),
        None => Allowed::declared(lease.max(policy.native_floor_ms).saturating_add(jitter)),
    }
}

/// How long a native loop may turn without handing out a token.
pub fn native_livelock(page: &PageObs, rhythm: &Rhythm, policy: &Policy, tick: &Tick) -> Allowed {
    native_step(page, rhythm, policy, tick)
}

/// How long a gate may hear nothing from a foreign engine that owes work.
pub fn gate_silence(sight: &Sight<'_>, rhythm: &Rhythm, policy: &Policy) -> Allowed {
    let owed_tokens = sight.gate.map_or(0, |gate| gate.prompt_tokens_owed);
    let page_tokens =
        sight.page.filter(|page| page.phase == PagePhase::Prefill).map_or(0, |page| u64::from(page.phase_tokens));
    let prompt = owed_tokens.max(page_tokens);
    let warm = rhythm.chunks_seen >= policy.foreign_warm_chunks && rhythm.delivering_ms >= policy.foreign_warm_ms;
    let gap = rhythm.gate_gap_ms.quantile(990);
    // a request that does not stream is silent until its end; only counters tell such a one from a hang
    let counters =
        sight.page.is_some() || sight.metrics.is_some_and(|m| m.generation_tokens.is_some() || m.iterations.is_some());
    if !counters && sight.gate.is_some_and(|gate| gate.awaiting_first_byte >= gate.in_flight) {
        return Allowed::patient(policy.patience_cap_ms);
    }
    let (Some(gap), true) = (gap, warm) else { return Allowed::patient(policy.patience_cap_ms) };
    if prompt > reach(rhythm.prompt_tokens_max, policy) {
        return Allowed::patient(policy.patience_cap_ms);
    }
    let per_token = rhythm.gate_us_per_token.quantile(990).unwrap_or(0);
    let prefill = factor(per_token.saturating_mul(prompt) / 1000, policy.foreign_factor_tenths);
    Allowed::learned(
        factor(gap, policy.foreign_factor_tenths).max(prefill).clamp(policy.foreign_floor_ms, policy.patience_cap_ms),
    )
}

/// Prompt sizes up to this are inside what was learned.
fn reach(learned_max: u64, policy: &Policy) -> u64 {
    (learned_max.saturating_mul(u64::from(policy.prompt_reach_tenths)) / 10).max(policy.prompt_tokens_free)
}

fn factor(ms: Ms, tenths: u32) -> Ms {
    ms.saturating_mul(u64::from(tenths)) / 10
}

/// What one decode step may teach.
const STEP_AGE_MS_MAX: Ms = 500;

/// Prompts below this teach nothing about the time a token takes.
const PROMPT_TOKENS_MIN: u64 = 256;

/// From here on a silence belongs to the prompt.
const PROMPT_TOKENS_LONG: u64 = 1024;

/// What is carried from tick to tick to learn the gate's rhythm: the greatest silence since the last delivery.
#[derive(Debug, Clone, Default)]
pub struct Learner {
    silence_peak_ms: Ms,
    /// The greatest deadline during that silence: a prompt is no longer owed at the moment its first token comes.
    allowed_peak_ms: Ms,
    prompt_peak: u64,
    /// Of a native page: the prefill step that was under way to be timed when it ends.
    prefill: Option<PrefillStep>,
    /// The greatest age of a decode step that was seen under way.
    step_age_peak_ms: Ms,
    /// Did decode rule at the last tick?
    decoding: bool,
}

#[derive(Debug, Clone, Copy)]
struct PrefillStep {
    tokens: u32,
    owed: u64,
    started_ms: Ms,
    steps: u64,
}

impl Learner {
    pub fn restarted(&mut self) {
        *self = Self::default();
    }

    /// Learns from one tick. `allowed_ms` bounds a sample: a hang that ended teaches no patience beyond twice what was allowed.
    pub fn learn(&mut self, tick: &Tick, sight: &Sight<'_>, signs: &Signs, rhythm: &mut Rhythm, allowed_ms: Ms) {
        self.learn_steps(tick, sight, rhythm);
        if sight.owed.is_none() {
            self.silence_peak_ms = 0;
            self.allowed_peak_ms = 0;
            self.prompt_peak = 0;
            return;
        }
        let prompt = sight.gate.map_or(0, |gate| gate.prompt_tokens_owed);
        if sight.delivered() {
            rhythm.chunks_seen = rhythm.chunks_seen.saturating_add(sight.delivered_count);
            rhythm.delivering_ms =
                rhythm.delivering_ms.saturating_add(tick.counted_ms.saturating_sub(tick.counted_before_ms).min(2_000));
        }
        let heard = if sight.gate.is_some() { sight.gate_delivered } else { sight.delivered() };
        if heard {
            let gap = self.silence_peak_ms.min(self.allowed_peak_ms.saturating_mul(2));
            if self.prompt_peak < PROMPT_TOKENS_LONG {
                // a long prompt's silence is told by its tokens; it must not make decode patient
                rhythm.gate_gap_ms.record(gap.max(1));
            }
            if self.prompt_peak > 0 {
                // a short prompt's silence is overhead, not prefill: it must not be scaled up to a long prompt's
                rhythm.gate_us_per_token.record(gap.saturating_mul(1000) / self.prompt_peak.max(PROMPT_TOKENS_MIN));
                rhythm.prompt_tokens_max = rhythm.prompt_tokens_max.max(self.prompt_peak);
            }
            self.silence_peak_ms = 0;
            self.allowed_peak_ms = 0;
            self.prompt_peak = 0;
        }
        let since = signs.gate_delivered_at.max(signs.owed_since).max(if sight.gate.is_none() {
            signs.metrics_tokens_at.max(signs.page_tokens_at)
        } else {
            0
        });
        self.silence_peak_ms = self.silence_peak_ms.max(tick.since(since));
        self.prompt_peak = self.prompt_peak.max(prompt);
        self.allowed_peak_ms = self.allowed_peak_ms.max(allowed_ms);
    }

    fn learn_steps(&mut self, tick: &Tick, sight: &Sight<'_>, rhythm: &mut Rhythm) {
        let Some(page) = sight.native() else { return };
        if sight.steps_done > 0 {
            rhythm.steps_seen = rhythm.steps_seen.saturating_add(sight.steps_done);
            if let Some(step) = self.prefill.take()
                && page.steps_completed == step.steps.saturating_add(1)
            {
                let ended_ms = page.step_started_ms.filter(|at| *at > step.started_ms).unwrap_or(tick.now_ms);
                rhythm.prefilled(
                    ended_ms.saturating_sub(step.started_ms).saturating_mul(1000) / u64::from(step.tokens.max(1)),
                );
                rhythm.prompt_tokens_max = rhythm.prompt_tokens_max.max(step.owed).max(u64::from(step.tokens));
            }
            // the mean over the interval, while decode ruled all of it
            if self.decoding && page.phase == PagePhase::Decode && page.running > 0 && tick.elapsed_ms > 0 {
                rhythm.decoded((tick.elapsed_ms / sight.steps_done).max(self.step_age_peak_ms));
            }
            self.step_age_peak_ms = 0;
        }
        if let (PagePhase::Decode, Some(at)) = (page.phase, page.step_started_ms) {
            // bounded, so that a hang that ended does not teach patience
            self.step_age_peak_ms = self.step_age_peak_ms.max(tick.now_ms.saturating_sub(at)).min(STEP_AGE_MS_MAX);
        }
        self.decoding = page.phase == PagePhase::Decode && page.running > 0;
        self.prefill = match (page.phase, page.step_started_ms) {
            (PagePhase::Prefill, Some(at)) => Some(PrefillStep {
                tokens: page.phase_tokens,
                owed: page.prompt_tokens_owed,
                started_ms: at,
                steps: page.steps_completed,
            }),
            _ => None,
        };
    }
}
