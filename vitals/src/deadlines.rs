//! V3: deadlines, learned where there is something to learn from, clamped, scaled by the prompt tokens owed.

use crate::examine::{Allowed, Basis, Exam, View};
use crate::excuse::Tick;
use crate::observation::{Ms, PageObs, PagePhase};
use crate::policy::Policy;
use crate::rhythm::Rhythm;
use crate::signs::{Sight, Signs};

/// How long the step under way of a native page may last.
pub fn native_step(view: &View<'_>, page: &PageObs) -> Allowed {
    let (rhythm, policy) = (view.rhythm, view.policy);
    let lease = step_lease_ms(page, policy);
    let warm = rhythm.is_warm(policy);
    let learned = native_step_at(view, page, 990, true).filter(|_| {
        page.phase != PagePhase::Prefill
            || page.prompt_tokens_owed.max(u64::from(page.phase_tokens)) <= reach(rhythm.prompt_tokens_max, policy)
    });
    // what the machine does to the agent it does to the engine: lateness is added on top, lease or not (V5)
    let jitter = view.tick.jitter_ms.saturating_mul(2);
    // only decode comes in steps that are alike enough for a floor below the scheduler's usual pauses
    let floor = if page.phase == PagePhase::Decode { view.native_floor_ms } else { policy.native_floor_ms };
    match learned.filter(|_| warm) {
        Some(ms) => Allowed::learned(
            factor(ms, policy.native_factor_tenths).clamp(floor, lease.max(floor)).saturating_add(jitter),
        )
        .of_usual(native_step_at(view, page, 900, false).unwrap_or(ms), policy),
        None => Allowed::declared(lease.max(policy.native_floor_ms).saturating_add(jitter))
            .of_usual(lease / LEASE_TIMES, policy),
    }
}

/// What a step of this phase, size and width takes at this quantile of what was learned; `recent`: at least half of the latest maxima.
fn native_step_at(view: &View<'_>, page: &PageObs, permille: u32, recent: bool) -> Option<Ms> {
    let rhythm = view.rhythm;
    let latest = |value: Ms| if recent { value } else { 0 };
    let decode = || {
        let quantile = rhythm.decode_step_ms.quantile(permille)?;
        let step_ms = quantile.max(latest(rhythm.decode_recent_ms) / 2);
        // what is usual was learned from usual widths, the greatest from the widest
        let width = if recent { rhythm.decode_width_milli } else { rhythm.decode_usual_width_milli };
        Some(wider(step_ms, page.running, width))
    };
    match page.phase {
        PagePhase::Prefill => {
            let us = rhythm.prefill_us_per_token.quantile(permille)?.max(latest(rhythm.prefill_recent_us));
            // a mixed step decodes as well; an engine that never decodes alone has shown what that takes in its prefill steps only
            let decoding_ms = decode().unwrap_or(rhythm.prefill_step_ms);
            Some((us.saturating_mul(u64::from(page.phase_tokens.max(1))) / 1000).saturating_add(decoding_ms))
        }
        PagePhase::Decode => decode(),
        _ => None,
    }
}

/// A lease is about so many times what the writer expects, as ours sets it (`engine/src/beat/lease.rs`).
const LEASE_TIMES: Ms = 20;

/// How long a native loop may turn without handing out a token. Steps that turn are seen to be as quick as they are: no crawl.
pub fn native_livelock(view: &View<'_>, page: &PageObs) -> Allowed {
    Allowed { crawl_ms: 0, ..native_step(view, page) }
}

/// The lease of the step under way, capped (H5); the cap where none is declared.
pub fn step_lease_ms(page: &PageObs, policy: &Policy) -> Ms {
    if page.lease_ms == 0 { policy.lease_cap_ms } else { page.lease_ms.min(policy.lease_cap_ms) }
}

/// What a decode step that lasts may teach: as long as its lease, but a hang that ended teaches no patience beyond twice what was
/// allowed.
pub fn step_lesson_ms(page: &PageObs, allowed: Allowed, policy: &Policy) -> Ms {
    allowed.ms.saturating_mul(2).max(STEP_LESSON_MS_MIN).min(step_lease_ms(page, policy))
}

/// A step of more sequences than were learned from may last longer in proportion, as it does on an engine bound by compute.
fn wider(ms: Ms, running: u32, learned_milli: u64) -> Ms {
    let running_milli = u64::from(running).saturating_mul(1000);
    if learned_milli == 0 || running_milli <= learned_milli {
        return ms;
    }
    ms.saturating_mul(running_milli) / learned_milli
}

/// How long a gate may hear nothing from a foreign engine that owes work.
pub fn gate_silence(view: &View<'_>) -> Allowed {
    let (sight, rhythm, policy) = (view.sight, view.rhythm, view.policy);
    let owed_tokens = sight.gate.map_or(0, |_| view.signs.prompt_in_step);
    let page_tokens =
        sight.page.filter(|page| page.phase == PagePhase::Prefill).map_or(0, |page| u64::from(page.phase_tokens));
    // an answered prompt that was preempted is prefilled again, which no gate knows
    let again = if view.signs.cache.may_preempt(view.tick, sight, policy) { rhythm.prompt_tokens_max } else { 0 };
    let prompt = owed_tokens.max(page_tokens).max(again);
    let warm = rhythm.chunks_seen >= policy.foreign_warm_chunks && rhythm.delivering_ms >= policy.foreign_warm_ms;
    // a request that does not stream is silent until its end; only counters tell such a one from a hang
    let counters =
        sight.page.is_some() || sight.metrics.is_some_and(|m| m.generation_tokens.is_some() || m.iterations.is_some());
    // nor do counters that come in one lump at a request's end (llama.cpp): they must have been seen to move in between
    let all_unstreamed =
        sight.gate.is_some_and(|gate| gate.unstreamed.is_some_and(|unstreamed| unstreamed >= gate.in_flight));
    let tells = counters && (!all_unstreamed || sight.page.is_some() || view.signs.counters_live);
    if !tells && view.nothing_begun() {
        return Allowed::patient(policy.patience_cap_ms);
    }
    // the silence before a first byte holds the front end's own work as well: gaps between tokens say nothing about it
    let (usual, recent, warm) = if view.nothing_begun() {
        let seen = rhythm.first_answers_seen >= policy.foreign_warm_answers
            && rhythm.first_byte_ms.samples() >= FIRST_BYTE_SAMPLES_MIN;
        (rhythm.first_byte_ms.quantile(990), 0, warm && seen)
    } else {
        (rhythm.gate_gap_ms.quantile(990), rhythm.gate_gap_recent_ms / 2, warm)
    };
    let (Some(usual), true) = (usual, warm) else { return Allowed::patient(policy.patience_cap_ms) };
    if prompt > reach(rhythm.prompt_tokens_max, policy) {
        return Allowed::patient(policy.patience_cap_ms);
    }
    let per_token = rhythm.gate_us_per_token.quantile(990).unwrap_or(0);
    let prefill = factor(per_token.saturating_mul(prompt) / 1000, policy.foreign_factor_tenths);
    let learned = factor(usual.max(recent), policy.foreign_factor_tenths).max(prefill);
    // not `clamp`: a policy may well set the cap below the floor
    Allowed::learned(learned.max(policy.foreign_floor_ms).min(policy.patience_cap_ms))
        .of_usual(foreign_step(rhythm, usual, prompt).max(prefill / CRAWL_PREFILL_PARTS), policy)
}

/// What is allowed to a prompt is some three times the slowest of many that were learned: one part in so many counts as its usual step.
const CRAWL_PREFILL_PARTS: Ms = 12;

/// What a step usually takes: the gaps of streams tell, and what a prompt adds. A silence before a first byte (`usual`) holds the front end's
/// work as well, and stands in where nothing ever streamed.
fn foreign_step(rhythm: &Rhythm, usual: Ms, prompt: u64) -> Ms {
    let gaps = &rhythm.gate_gap_ms;
    // a high quantile of a few samples is no more than their greatest
    let permille = if gaps.samples() >= GAP_SAMPLES_MIN { 900 } else { 500 };
    let step_ms = gaps.quantile(permille).unwrap_or(usual);
    let per_token = rhythm.gate_us_per_token.quantile(500).unwrap_or(0);
    step_ms.max(per_token.saturating_mul(prompt) / 1000)
}

/// Prompt sizes up to this are inside what was learned.
fn reach(learned_max: u64, policy: &Policy) -> u64 {
    (learned_max.saturating_mul(u64::from(policy.prompt_reach_tenths)) / 10).max(policy.prompt_tokens_free)
}

fn factor(ms: Ms, tenths: u32) -> Ms {
    ms.saturating_mul(u64::from(tenths)) / 10
}

/// What one decode step may teach in any case, its lease allowing.
const STEP_LESSON_MS_MIN: Ms = 500;

/// From so many gaps on a high quantile means something.
const GAP_SAMPLES_MIN: u32 = 32;

/// A quantile of fewer silences before a first byte than this says nothing.
const FIRST_BYTE_SAMPLES_MIN: u32 = 4;

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
    /// A complaint was raised against that silence: what it may teach at most. One that was confirmed, or that outlasted the rivals'
    /// patience, teaches nothing: it was a hang that ended.
    lesson_ms_max: Option<Ms>,
    /// During that silence: was there a request that had begun to answer?
    begun: bool,
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
    /// What it may teach at most.
    lesson_ms: Ms,
}

impl Learner {
    pub fn restarted(&mut self) {
        *self = Self::default();
    }

    /// Learns from one tick. What was allowed bounds a sample: a silence that was accused teaches no patience beyond twice that, and
    /// one that was confirmed as a stall none at all.
    pub fn learn(&mut self, tick: &Tick, sight: &Sight<'_>, signs: &Signs, rhythm: &mut Rhythm, exam: &Exam) {
        self.learn_steps(tick, sight, rhythm, exam.step_lesson_ms);
        if sight.owed.is_none() {
            self.silence_over();
            return;
        }
        let prompt = sight.gate.map_or(0, |_| signs.prompt_in_step);
        if sight.delivered() {
            rhythm.chunks_seen = rhythm.chunks_seen.saturating_add(sight.delivered_count);
            rhythm.delivering_ms =
                rhythm.delivering_ms.saturating_add(tick.counted_ms.saturating_sub(tick.counted_before_ms).min(2_000));
        }
        let heard = if sight.gate.is_some() { sight.gate_delivered } else { sight.delivered() };
        if heard {
            self.learn_silence(sight, rhythm);
            self.silence_over();
        }
        let since = signs.gate_delivered_at.max(signs.owed_since).max(if sight.gate.is_none() {
            signs.metrics_tokens_at.max(signs.page_tokens_at)
        } else {
            0
        });
        self.silence_peak_ms = self.silence_peak_ms.max(tick.since(since));
        self.prompt_peak = self.prompt_peak.max(prompt);
        self.allowed_peak_ms = self.allowed_peak_ms.max(exam.gate_allowed_ms);
        self.accused(exam);
        self.begun |= sight.gate.is_none_or(|gate| gate.in_flight > gate.awaiting_first_byte);
    }

    fn accused(&mut self, exam: &Exam) {
        let Some(complaint) = &exam.complaint else { return };
        let allowed_ms = match complaint.allowed.basis {
            _ if exam.confirmed => 0,
            Basis::Patience => 0,
            _ => complaint.allowed.ms.saturating_mul(2),
        };
        self.lesson_ms_max = Some(self.lesson_ms_max.map_or(allowed_ms, |known| known.min(allowed_ms)));
    }

    fn silence_over(&mut self) {
        self.lesson_ms_max = None;
        self.silence_peak_ms = 0;
        self.allowed_peak_ms = 0;
        self.prompt_peak = 0;
        self.begun = false;
    }

    /// A silence ended in a delivery.
    fn learn_silence(&self, sight: &Sight<'_>, rhythm: &mut Rhythm) {
        let gap = self.silence_peak_ms.min(self.allowed_peak_ms.saturating_mul(2));
        let gap = self.lesson_ms_max.map_or(gap, |most| gap.min(most));
        if self.lesson_ms_max == Some(0) {
            return;
        }
        if self.prompt_peak < PROMPT_TOKENS_LONG {
            // a long prompt's silence is told by its tokens; it must not make decode patient
            if self.begun || sight.gate.is_none() {
                rhythm.gap(gap);
            } else {
                rhythm.first_byte_ms.record(gap.max(1));
                rhythm.first_answers_seen = rhythm.first_answers_seen.saturating_add(sight.answered_count);
            }
        }
        if self.prompt_peak > 0 {
            // a short prompt's silence is overhead, not prefill: it must not be scaled up to a long prompt's
            // the queue behind it took no part of that silence
            let left = self.prompt_peak.saturating_sub(sight.gate.map_or(0, |gate| gate.prompt_tokens_owed));
            if left > 0 {
                rhythm.gate_us_per_token.record(gap.saturating_mul(1000) / left.max(PROMPT_TOKENS_MIN));
            }
            rhythm.prompt_tokens_max = rhythm.prompt_tokens_max.max(self.prompt_peak);
        }
    }

    fn learn_steps(&mut self, tick: &Tick, sight: &Sight<'_>, rhythm: &mut Rhythm, lesson_ms: Ms) {
        let Some(page) = sight.native() else { return };
        if sight.steps_done > 0 {
            rhythm.steps_seen = rhythm.steps_seen.saturating_add(sight.steps_done);
            if let Some(step) = self.prefill.take()
                && page.steps_completed == step.steps.saturating_add(1)
            {
                let ended_ms = page.step_started_ms.filter(|at| *at > step.started_ms).unwrap_or(tick.now_ms);
                let took_ms = ended_ms.saturating_sub(step.started_ms).min(step.lesson_ms);
                rhythm.prefilled(took_ms, step.tokens);
                rhythm.prompt_tokens_max = rhythm.prompt_tokens_max.max(step.owed).max(u64::from(step.tokens));
            }
            // the mean over the interval, while decode ruled all of it
            if self.decoding && page.phase == PagePhase::Decode && page.running > 0 && tick.lived_ms > 0 {
                let step_ms = (tick.lived_ms / sight.steps_done).max(self.step_age_peak_ms);
                rhythm.decoded(step_ms, page.running);
            }
            self.step_age_peak_ms = 0;
        }
        if let (PagePhase::Decode, Some(at)) = (page.phase, page.step_started_ms) {
            // bounded, so that a hang that ended does not teach patience
            self.step_age_peak_ms = self.step_age_peak_ms.max(tick.now_ms.saturating_sub(at).min(lesson_ms));
        }
        self.decoding = page.phase == PagePhase::Decode && page.running > 0;
        self.prefill = match (page.phase, page.step_started_ms) {
            (PagePhase::Prefill, Some(at)) => Some(PrefillStep {
                tokens: page.phase_tokens,
                owed: page.prompt_tokens_owed,
                started_ms: at,
                steps: page.steps_completed,
                lesson_ms,
            }),
            _ => None,
        };
    }
}
