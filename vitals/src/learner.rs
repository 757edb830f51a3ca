//! What a look teaches: how long steps take, how long the gate hears nothing, and what prompts add to that.

use crate::examine::{Basis, Exam};
use crate::excuse::Tick;
use crate::leaders::Leader;
use crate::observation::{GateObs, Ms, PageObs, PagePhase};
use crate::policy::Policy;
use crate::rhythm::Rhythm;
use crate::signs::{Sight, Signs};

/// Prompts below this teach nothing about the time a token takes.
const PROMPT_TOKENS_MIN: u64 = 256;

/// From here on a silence belongs to the prompt.
pub(crate) const PROMPT_TOKENS_LONG: u64 = 1024;

/// What is carried from tick to tick to learn the gate's rhythm: the greatest silence since the last delivery.
#[derive(Debug, Clone, Default)]
pub struct Learner {
    silence_peak_ms: Ms,
    /// Counted time at which the silence under way began, as the last tick knew it.
    silent_since: Option<Ms>,
    /// The greatest deadline during that silence: a prompt is no longer owed at the moment its first token comes.
    allowed_peak_ms: Ms,
    prompt_peak: u64,
    /// The most that the gate was seen to owe in it: a prompt that was answered at its beginning is in the step after that, and no part of
    /// what ends it.
    owed_peak: u64,
    /// The longest prompt among those.
    longest_peak: u64,
    /// Counted time since which prompts are owed, or since some of them were last served.
    prompt_since: Option<Ms>,
    /// A complaint was raised against that silence: what it may teach at most. One that was confirmed, or that outlasted the rivals'
    /// patience, teaches nothing: it was a hang that ended.
    lesson_ms_max: Option<Ms>,
    /// While only answers that do not stream are owed: when anything of the engine last moved.
    whole_moved_at: Option<Ms>,
    /// At the last tick the engine had nothing to do behind what is owed.
    rested: bool,
    /// The most requests during that silence that had begun to answer.
    begun_peak: u32,
    /// Of native pages, by the leaders' places.
    steps: Vec<StepLearner>,
    /// Prompt tokens that were owed already when this detector first heard of a gate; `None` before. How long these took nobody knows.
    older_tokens: Option<u64>,
}

/// What else is known of the tick that teaches.
#[derive(Debug, Clone, Copy)]
pub struct Judged<'a> {
    pub signs: &'a Signs,
    pub exam: &'a Exam,
    pub policy: &'a Policy,
}

/// What is carried from tick to tick of one leader's page. What its steps teach is of all data-parallel engines, which are alike.
#[derive(Debug, Clone, Default)]
struct StepLearner {
    /// The prefill step that was under way to be timed when it ends.
    prefill: Option<PrefillStep>,
    /// The greatest age of a decode step that was seen under way.
    age_peak_ms: Ms,
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
    /// Another process: what is owed to it is as old as it is.
    pub fn restarted(&mut self) {
        *self = Self { older_tokens: Some(0), ..Self::default() };
    }

    /// Learns from one tick. What was allowed bounds a sample: a silence that was accused teaches no patience beyond twice that, and
    /// one that was confirmed as a stall none at all.
    pub fn learn(&mut self, tick: &Tick, sight: &Sight<'_>, rhythm: &mut Rhythm, judged: &Judged<'_>) {
        let Judged { signs, exam, .. } = *judged;
        self.learn_steps(tick, sight, rhythm, judged);
        self.older_tokens = self.older_tokens.or(sight.gate.map(|gate| gate.prompt_tokens_owed));
        if sight.owed.is_none() {
            self.silence_over();
            self.prompt_since = None;
            return;
        }
        let prompt = sight.gate.map_or(0, |_| signs.prompt_in_step);
        if sight.delivered() {
            rhythm.chunks_seen = rhythm.chunks_seen.saturating_add(sight.delivered_count);
            rhythm.delivering_ms =
                rhythm.delivering_ms.saturating_add(tick.counted_ms.saturating_sub(tick.counted_before_ms).min(2_000));
        }
        self.learn_whole(sight, rhythm, signs);
        let heard = sight.heard();
        // what a front end waited for is no silence of the engine's
        let rested = std::mem::replace(&mut self.rested, signs.rest.now());
        if heard && !rested {
            self.learn_silence(tick, sight, rhythm, judged);
        }
        if heard || self.rested {
            self.silence_over();
        }
        if self.rested {
            self.prompt_since = None;
            return;
        }
        let since = signs.gate_delivered_at.max(signs.owed_since).max(if sight.gate.is_none() {
            signs.metrics_tokens_at.max(signs.leaders.tokens_at())
        } else {
            0
        });
        self.silence_peak_ms = self.silence_peak_ms.max(tick.since(since));
        self.silent_since = Some(since);
        self.prompt_peak = self.prompt_peak.max(prompt);
        let owed = sight.gate.map_or(0, |gate| gate.prompt_tokens_owed);
        self.owed_peak = self.owed_peak.max(owed);
        self.prompt_since = if owed > 0 { self.prompt_since.or(Some(tick.counted_ms)) } else { None };
        self.longest_peak = self.longest_peak.max(sight.gate.map_or(0, |gate| signs.longest_in_step(gate)));
        self.allowed_peak_ms = self.allowed_peak_ms.max(exam.gate_allowed_ms);
        self.accused(tick, judged);
        self.begun_peak = self.begun_peak.max(sight.gate.map_or(0, GateObs::begun));
    }

    fn accused(&mut self, tick: &Tick, judged: &Judged<'_>) {
        let Judged { signs, exam, policy } = *judged;
        let Some(complaint) = &exam.complaint else { return };
        if complaint.engine.is_some_and(|engine| signs.others_go_on(engine, tick, policy.metrics_fresh_ms)) {
            // the silence that is learned from is the pod's, and others deliver
            return;
        }
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
        self.silent_since = None;
        self.allowed_peak_ms = 0;
        self.prompt_peak = 0;
        self.owed_peak = 0;
        self.longest_peak = 0;
        self.begun_peak = 0;
    }

    /// Answers that do not stream show no more than counters, and some engines write these every so many steps only.
    fn learn_whole(&mut self, sight: &Sight<'_>, rhythm: &mut Rhythm, signs: &Signs) {
        let moved_at = signs.moved_at().max(signs.gate_delivered_at).max(signs.owed_since);
        let now = sight.gate.is_some_and(GateObs::only_whole_answers).then_some(moved_at);
        let before = std::mem::replace(&mut self.whole_moved_at, now);
        let gap = now.zip(before).map_or(0, |(now, before)| now.saturating_sub(before));
        if let Some(gap) = self.bounded(gap).filter(|_| gap > 0) {
            rhythm.whole_gap_ms.record(gap);
        }
    }

    /// What a silence may teach at most, if anything.
    fn bounded(&self, ms: Ms) -> Option<Ms> {
        let ms = ms.min(self.allowed_peak_ms.saturating_mul(2));
        let ms = self.lesson_ms_max.map_or(ms, |most| ms.min(most));
        (self.lesson_ms_max != Some(0)).then_some(ms)
    }

    /// A silence ended in a delivery.
    fn learn_silence(&mut self, tick: &Tick, sight: &Sight<'_>, rhythm: &mut Rhythm, judged: &Judged<'_>) {
        let Judged { signs, policy, .. } = *judged;
        let Some(gap) = self.bounded(self.silence_peak_ms.max(self.step_told_ms(sight, signs))) else { return };
        let among_begun = self.begun_peak > 0 || sight.gate.is_none();
        let short = self.prompt_peak < PROMPT_TOKENS_LONG;
        // accused, and alive; or far beyond the usual, whatever was allowed
        let lifted = self.lesson_ms_max.is_some() && gap >= policy.foreign_floor_ms;
        let crawls = lifted || (short && among_begun && rhythm.is_a_crawl(gap));
        // unless another of several engines has ended it, for one that still stands
        if crawls && signs.standing_ms(tick, sight.gate) < gap {
            rhythm.crawled_at = Some(signs.delivered_at());
        }
        if short {
            // a long prompt's silence is told by its tokens; it must not make decode patient
            if among_begun {
                rhythm.gap(gap, self.begun_peak);
            } else {
                rhythm.first_byte_ms.record(gap.max(1));
                rhythm.first_answers_seen = rhythm.first_answers_seen.saturating_add(sight.answered_count);
            }
        }
        // the queue behind it took no part of that silence
        let left = self.owed_peak.saturating_sub(sight.gate.map_or(0, |gate| gate.prompt_tokens_owed));
        if left == 0 {
            if self.prompt_peak >= PROMPT_TOKENS_LONG && among_begun {
                rhythm.chunk_gap(gap);
            }
            return;
        }
        if let Some(older) = self.older_tokens.as_mut().filter(|older| **older > 0) {
            *older = older.saturating_sub(left);
            return;
        }
        let Some(gap) = self.bounded(self.silence_to_first_ms(sight, rhythm, signs)) else { return };
        // a short prompt's silence is overhead, not prefill: it must not be scaled up to a long prompt's
        let per_token = |ms: Ms| ms.saturating_mul(1000) / left.max(PROMPT_TOKENS_MIN);
        if among_begun {
            rhythm.gate_us_per_token.record(per_token(gap));
        } else {
            // a part of a long one's prefill may lie before the last delivery to others
            let long = left / sight.answered_count.max(1) >= PROMPT_TOKENS_LONG;
            let since = self.prompt_since.filter(|_| long).map_or(0, |at| tick.since(at));
            rhythm.first_us_per_token.record(per_token(gap.max(self.bounded(since).unwrap_or(0))));
        }
        rhythm.prompt_served(left, self.prompt_peak, self.longest_peak, policy);
        self.prompt_since = sight.gate.is_some_and(still_owes).then_some(tick.counted_ms);
    }

    /// The silence up to the first of what was delivered since the last tick. The peak tells only of what that tick saw: where ticks are far
    /// apart, or prompts short, that is next to nothing.
    fn silence_to_first_ms(&self, sight: &Sight<'_>, rhythm: &Rhythm, signs: &Signs) -> Ms {
        let to_last_ms = self.silence_to_last_ms(sight, signs);
        // the others came after it, each its usual gap later
        let others = sight.delivered_count.saturating_sub(sight.answered_count.max(1));
        let others_ms = rhythm.gate_gap_ms.quantile(500).unwrap_or(0).saturating_mul(others);
        self.silence_peak_ms.max(to_last_ms.saturating_sub(others_ms))
    }

    /// What one step took that ended since the last tick, by the gate's own clock: each gives every stream that had begun its token. Where
    /// looks are as rare as steps, the peak is what was left of a step at some look, and may be a tenth of it.
    fn step_told_ms(&self, sight: &Sight<'_>, signs: &Signs) -> Ms {
        if self.begun_peak == 0 {
            return 0;
        }
        let steps = sight.delivered_count.div_ceil(u64::from(self.begun_peak)).max(1);
        self.silence_to_last_ms(sight, signs) / steps
    }

    /// The silence up to the last of what was delivered since the last tick; 0 where no gate tells when that was.
    fn silence_to_last_ms(&self, sight: &Sight<'_>, signs: &Signs) -> Ms {
        let told = sight.gate.and_then(|gate| gate.last_delivery_ms).and(self.silent_since);
        told.map_or(0, |since| signs.gate_delivered_at.saturating_sub(since))
    }

    fn learn_steps(&mut self, tick: &Tick, sight: &Sight<'_>, rhythm: &mut Rhythm, judged: &Judged<'_>) {
        if sight.native().is_none() {
            return;
        }
        for (place, leader) in judged.signs.leaders.present() {
            if place >= self.steps.len() {
                self.steps.resize_with(place + 1, StepLearner::default);
            }
            let lesson_ms = judged.exam.step_lessons_ms.get(place).copied();
            if let (Some(steps), Some(lesson_ms)) = (self.steps.get_mut(place), lesson_ms) {
                steps.learn(tick, leader, rhythm, lesson_ms);
            }
        }
    }
}

impl StepLearner {
    fn learn(&mut self, tick: &Tick, leader: &Leader, rhythm: &mut Rhythm, lesson_ms: Ms) {
        let page = &leader.page;
        if leader.steps_done > 0 {
            rhythm.steps_seen = rhythm.steps_seen.saturating_add(leader.steps_done);
            if let Some(step) = self.prefill.take() {
                step.teach(tick, page, rhythm);
            }
            // the mean over the interval, while decode ruled all of it
            if self.decoding && page.phase == PagePhase::Decode && page.running > 0 && tick.lived_ms > 0 {
                let step_ms = (tick.lived_ms / leader.steps_done).max(self.age_peak_ms);
                rhythm.decoded(step_ms, page.running);
            }
            self.age_peak_ms = 0;
        }
        if let (PagePhase::Decode, Some(at)) = (page.phase, page.step_started_ms) {
            // bounded, so that a hang that ended does not teach patience
            self.age_peak_ms = self.age_peak_ms.max(tick.now_ms.saturating_sub(at).min(lesson_ms));
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

impl PrefillStep {
    /// It has ended, and other steps may have come and gone since: then it took no longer than what these leave of the time between.
    fn teach(&self, tick: &Tick, page: &PageObs, rhythm: &mut Rhythm) {
        let others = page.steps_completed.saturating_sub(self.steps.saturating_add(1));
        let ended_ms = page.step_started_ms.filter(|at| *at > self.started_ms).unwrap_or(tick.now_ms);
        let took_ms = ended_ms.saturating_sub(self.started_ms);
        if others == 0 {
            rhythm.prefilled(took_ms.min(self.lesson_ms), self.tokens, page.steps_completed);
        } else {
            // a bucket's upper edge may be a quarter above what was seen
            let each_ms = rhythm.decode_step_ms.quantile(100).unwrap_or(0) * 4 / 5;
            let most_ms = took_ms.saturating_sub(others.saturating_mul(each_ms));
            rhythm.prefilled_within(most_ms.min(self.lesson_ms), self.tokens);
        }
        rhythm.prompt_tokens_max = rhythm.prompt_tokens_max.max(self.owed).max(u64::from(self.tokens));
    }
}

fn still_owes(gate: &GateObs) -> bool {
    gate.prompt_tokens_owed > 0
}
