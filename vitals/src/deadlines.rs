//! V3: deadlines, learned where there is something to learn from, clamped, scaled by the prompt tokens owed.

use crate::examine::{Allowed, Basis, View};
use crate::learner::PROMPT_TOKENS_LONG;
use crate::observation::{GateObs, Ms, PageObs, PagePhase};
use crate::policy::Policy;
use crate::rhythm::Rhythm;

/// How long the step under way of a native page may last.
pub fn native_step(view: &View<'_>, page: &PageObs) -> Allowed {
    let (rhythm, policy) = (view.rhythm, view.policy);
    let lease = step_lease_ms(page, policy);
    let warm = rhythm.is_warm(policy) && view.signs.leaders.is_warm(page, policy);
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
            .of_usual(lease.saturating_mul(2) / LEASE_TIMES, policy),
    }
}

/// What a step of this phase, size and width takes at this quantile of what was learned; `recent`: at least half of the latest maxima.
fn native_step_at(view: &View<'_>, page: &PageObs, permille: u32, recent: bool) -> Option<Ms> {
    let (rhythm, policy) = (view.rhythm, view.policy);
    let lately_ms = if recent { rhythm.decode_recent_ms / 2 } else { rhythm.decode_lately_ms };
    // what is usual of several engines together is mostly that of those with little to do
    let leaders = &view.signs.leaders;
    let own_ms = leaders.of(page.engine()).filter(|_| leaders.several()).map_or(0, |leader| leader.decode_recent_ms);
    let decode = || {
        let quantile = rhythm.decode_step_ms.quantile(permille)?;
        let step_ms = quantile.max(lately_ms);
        // what is usual was learned from usual widths, the greatest from the widest
        let width = if recent { rhythm.decode_width_milli } else { rhythm.decode_usual_width_milli };
        Some(wider(step_ms, page.running, width).max(own_ms))
    };
    match page.phase {
        PagePhase::Prefill => {
            let us = if recent {
                prefill_us_max(rhythm, permille, policy)?
            } else {
                prefill_us_usual(rhythm, page, policy)?
            };
            // a mixed step decodes as well; an engine that never decodes alone has shown what that takes in its prefill steps only
            let decoding_ms = decode().unwrap_or(rhythm.prefill_step_ms);
            Some((us.saturating_mul(u64::from(page.phase_tokens.max(1))) / 1000).saturating_add(decoding_ms))
        }
        PagePhase::Decode => decode(),
        _ => None,
    }
}

/// Microseconds of prefill that a prompt token takes at most.
fn prefill_us_max(rhythm: &Rhythm, permille: u32, policy: &Policy) -> Option<u64> {
    let seen = rhythm.prefill_us_per_token.quantile(permille).map(|us| us.max(rhythm.prefill_recent_us));
    seen.or_else(|| unseen_prefill_us(rhythm, permille, policy))
}

/// What one takes usually: no more than to decode it. The first prefill of a process waits for its own pages, and a high quantile of a few
/// is no more than the slowest of them.
///
/// A chunk deep in a long prompt costs more than most: the one just before it, of the same prompt, tells. That one may have been a first
/// one, or slow itself, so it speaks for no more than twice what is usual.
fn prefill_us_usual(rhythm: &Rhythm, page: &PageObs, policy: &Policy) -> Option<u64> {
    let seen = &rhythm.prefill_us_per_token;
    let permille = if seen.samples() >= GAP_SAMPLES_MIN { 900 } else { 500 };
    let decoded = rhythm.decode_step_ms.quantile(900).map(|ms| ms.max(rhythm.decode_lately_ms).saturating_mul(1000));
    let usual = seen.quantile(permille).or_else(|| unseen_prefill_us(rhythm, 900, policy))?;
    let before = rhythm.prefill_before.filter(|(steps, _)| *steps == page.steps_completed).map_or(0, |(_, us)| us);
    let usual = usual.max(before.min(usual.saturating_mul(2)));
    Some(decoded.map_or(usual, |decoded| usual.min(decoded)))
}

/// Where no look ever saw a prefill step end: what those took at most that were seen under way; else so much that what is allowed is the
/// time of decoding the tokens one by one, which no engine needs for many at once.
fn unseen_prefill_us(rhythm: &Rhythm, permille: u32, policy: &Policy) -> Option<u64> {
    let within = rhythm.prefill_bound_us_per_token.quantile(permille);
    within.or_else(|| {
        let step_ms = rhythm.decode_step_ms.quantile(permille)?.max(rhythm.decode_recent_ms / 2);
        Some(step_ms.saturating_mul(10_000) / u64::from(policy.native_factor_tenths.max(1)))
    })
}

/// A lease is about so many times what the writer expects, as ours sets it (`engine/src/beat/lease.rs`).
const LEASE_TIMES: Ms = 20;

/// How long a native loop may turn without handing out a token, after so many steps that did nothing for anybody. Steps that turn are seen
/// to be as quick as they are: no crawl, and what one of them may last, or its lease, says nothing about many that ended; nor does the
/// machine's jitter, for what is held up ends no steps.
pub fn native_livelock(view: &View<'_>, page: &PageObs, steps_in_vain: u64) -> Allowed {
    let one = Allowed { crawl_ms: 0, ..native_step(view, page) };
    let floor = view.native_floor_ms;
    let many = steps_in_vain >= view.policy.livelock_steps;
    if many && floor < one.ms { Allowed::policy(floor) } else { one }
}

/// The lease of the step under way, capped (H5); the cap where none is declared.
pub fn step_lease_ms(page: &PageObs, policy: &Policy) -> Ms {
    if page.lease_ms == 0 { policy.lease_cap_ms } else { page.lease_ms.min(policy.lease_cap_ms) }
}

/// What is allowed is some four times what was learned, and a lease some twenty times what its writer expects.
const WORTHY_TIMES: Ms = 5;

/// A lease as far as it is worth the name: a first prefill that waits for its own pages leaves long leases behind, and what was learned of
/// prefill since bounds what is declared for it. Decode's own lease follows its steps soon enough. Of an engine that loads something from a
/// disk (`loads`) the lease may well know more than what was learned.
pub fn worthy_lease_ms(page: &PageObs, allowed: Allowed, (policy, loads): (&Policy, bool)) -> Ms {
    let lease = page.lease_ms.min(policy.lease_cap_ms);
    let learned = page.phase == PagePhase::Prefill && allowed.basis == Basis::Learned && !loads;
    if learned { lease.min(allowed.ms.saturating_mul(WORTHY_TIMES)) } else { lease }
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
    if view.rests() {
        return Allowed::patient(policy.patience_cap_ms);
    }
    let owed_tokens = sight.gate.map_or(0, |_| view.signs.prompt_in_step);
    let page_tokens = u64::from(view.signs.leaders.prefill_tokens());
    // an answered prompt that was preempted is prefilled again, which no gate knows
    // where nothing but the gate tells of it, any may have been
    let blind = sight.page.is_none() && sight.metrics.is_none();
    let again = match view.signs.cache.may_preempt(view.tick, policy) {
        true => rhythm.prompt_tokens_max,
        false if blind => rhythm.prompt_served_max,
        false => 0,
    };
    let prompt = owed_tokens.max(page_tokens).max(again);
    let warm = rhythm.chunks_seen >= policy.foreign_warm_chunks && rhythm.delivering_ms >= policy.foreign_warm_ms;
    // a request that does not stream is silent until its end; only counters tell such a one from a hang
    let counters =
        sight.page.is_some() || sight.metrics.is_some_and(|m| m.generation_tokens.is_some() || m.iterations.is_some());
    // nor do counters that come in one lump at a request's end (llama.cpp): they must have been seen to move in between
    let whole = sight.gate.is_some_and(GateObs::only_whole_answers);
    let tells = counters && (!whole || sight.page.is_some() || view.signs.counters_live);
    if !tells && view.nothing_begun() {
        return Allowed::patient(policy.patience_cap_ms);
    }
    let each = sight.gate.map_or(0, |gate| view.signs.longest_in_step(gate));
    // attention of a prompt that is longer than any before costs more a token as well: as if it had more of them
    let deeper = each.max(rhythm.prompt_longest_max);
    let deep = prompt.saturating_mul(deeper) / rhythm.prompt_longest_max.max(PROMPT_TOKENS_LONG).min(deeper).max(1);
    let known = silences(view, deep);
    let token_us = known.token_us.unwrap_or(0);
    let prefill = factor(token_us.saturating_mul(deep) / 1000, policy.foreign_factor_tenths);
    let patience = Allowed::patient(policy.patience_cap_ms);
    // nothing was usual, but what a token costs is known: such a prompt on a host that is throttled to a tenth
    let throttled_ms = (token_us.saturating_mul(deep) / 1000).saturating_mul(THROTTLED_TIMES);
    let (Some(usual), true) = (known.usual, known.warm && warm) else {
        return Allowed { crawl_ms: throttled_ms.min(policy.long_patience_ms()), ..patience };
    };
    let beyond = prompt > reach(rhythm.prompt_tokens_max, policy)
        || (each >= PROMPT_TOKENS_LONG && each > reach(rhythm.prompt_longest_max, policy));
    let step_ms = foreign_step(view, &known, usual, deep).max(prefill / CRAWL_PREFILL_PARTS);
    if beyond || (known.token_us.is_none() && prompt >= PROMPT_TOKENS_LONG) {
        // what a token costs says for how long a prompt of this size may crawl
        return known.token_us.map_or(patience, |_| patience.of_long(step_ms, policy));
    }
    let learned = factor(usual.max(known.recent), policy.foreign_factor_tenths).max(prefill);
    if learned > policy.patience_cap_ms {
        return Allowed::learned(policy.patience_cap_ms).of_long(step_ms, policy);
    }
    // not `clamp`: a policy may well set the cap below the floor
    Allowed::learned(learned.max(policy.foreign_floor_ms).min(policy.patience_cap_ms)).of_usual(step_ms, policy)
}

/// What was learned of silences like this one.
struct Silences {
    usual: Option<Ms>,
    recent: Ms,
    /// Microseconds that a prompt token adds at most, and to a usual step; `None` where long prompts are not known.
    token_us: Option<u64>,
    step_token_us: u64,
    warm: bool,
}

/// The silence before a first byte holds the front end's own work as well: gaps between tokens say nothing about it.
fn silences(view: &View<'_>, prompt: u64) -> Silences {
    let rhythm = view.rhythm;
    let (begun, first) = (&rhythm.gate_us_per_token, &rhythm.first_us_per_token);
    let most = begun.quantile(990).max(first.quantile(990));
    // short prompts are counted as longer ones, and those in a cache cost nothing: it is the dear ones that tell what one costs that is not
    let (step, alone) = (begun.quantile(990).unwrap_or(0), first.quantile(500).unwrap_or(0));
    // of a few the median may be that of prompts in a cache; of fewer still it is the first prefill's, which waits for its own pages; nor is
    // known what a prompt costs that is greater than any before
    let few = (FIRST_BYTE_SAMPLES_MIN..GAP_SAMPLES_MIN).contains(&first.samples());
    let times = if few || prompt > rhythm.prompt_served_max { UNKNOWN_PROMPT_TIMES } else { 1 };
    if view.nothing_begun() {
        let warm = rhythm.first_answers_seen >= view.policy.foreign_warm_answers
            && rhythm.first_byte_ms.samples() >= FIRST_BYTE_SAMPLES_MIN;
        let answers = rhythm.first_byte_ms.quantile(990);
        // streams that begin soon say nothing about an answer that shows counters alone
        let counters = Some(&rhythm.whole_gap_ms).filter(|gaps| gaps.samples() >= FIRST_BYTE_SAMPLES_MIN);
        let usual = match view.sight.gate.is_some_and(GateObs::only_whole_answers) {
            true => answers.zip(counters.and_then(|gaps| gaps.quantile(990))).map(|(answer, gap)| answer.max(gap)),
            false => answers,
        };
        // what a prompt adds among others may be no more than its last chunk
        let token_us = first.quantile(990).and(most);
        return Silences { usual, recent: 0, token_us, step_token_us: alone.saturating_mul(times), warm };
    }
    let (gaps, recent) = (rhythm.gate_gap_ms.quantile(990), rhythm.gate_gap_recent_ms / 2);
    // a long prompt that is taken in chunks lengthens each step of the others, the later the more
    let chunks = (prompt >= PROMPT_TOKENS_LONG).then(|| rhythm.chunk_gap_ms.quantile(990)).flatten();
    let recent = recent.max(chunks.map_or(0, |_| rhythm.chunk_gap_recent_ms));
    let usual = gaps.map(|gaps| gaps.max(chunks.unwrap_or(0)));
    Silences { usual, recent, token_us: most, step_token_us: step.max(alone).saturating_mul(times), warm: true }
}

/// A quota or a neighbour that leaves a tenth of the cores.
const THROTTLED_TIMES: u64 = 10;

/// What is allowed to a prompt is some three times the slowest of many that were learned: one part in so many counts as its usual step.
const CRAWL_PREFILL_PARTS: Ms = 12;

/// What a step usually takes: the gaps of streams tell, and what a prompt adds. A silence before a first byte (`usual`) holds the front end's
/// work as well, and stands in where nothing ever streamed, or nothing does now: such a silence is a whole answer's.
fn foreign_step(view: &View<'_>, known: &Silences, usual: Ms, prompt: u64) -> Ms {
    let gaps = &view.rhythm.gate_gap_ms;
    // a high quantile of a few samples is no more than their greatest
    let permille = if gaps.samples() >= GAP_SAMPLES_MIN { 900 } else { 500 };
    let whole = view.sight.gate.is_some_and(GateObs::only_whole_answers);
    // a step of more streams than usual may take longer in proportion
    let begun = view.sight.gate.map_or(0, GateObs::begun);
    let gap_ms = gaps.quantile(permille).map(|ms| wider(ms, begun, view.rhythm.gate_usual_width_milli));
    let step_ms = gap_ms.filter(|_| !whole).unwrap_or(usual);
    // no prompt token takes longer than to decode it
    let token_us = known.step_token_us.min(step_ms.saturating_mul(1000));
    step_ms.max(token_us.saturating_mul(prompt) / 1000)
}

/// Prompt sizes up to this are inside what was learned.
pub(crate) fn reach(learned_max: u64, policy: &Policy) -> u64 {
    (learned_max.saturating_mul(u64::from(policy.prompt_reach_tenths)) / 10).max(policy.prompt_tokens_free)
}

fn factor(ms: Ms, tenths: u32) -> Ms {
    ms.saturating_mul(u64::from(tenths)) / 10
}

/// What one decode step may teach in any case, its lease allowing.
const STEP_LESSON_MS_MIN: Ms = 500;

/// From so many gaps on a high quantile means something.
const GAP_SAMPLES_MIN: u32 = 32;

/// So many times what a token of the prompts seen cost may one cost where they say little of it.
const UNKNOWN_PROMPT_TIMES: u64 = 4;

/// A quantile of fewer silences before a first byte than this says nothing.
const FIRST_BYTE_SAMPLES_MIN: u32 = 4;
