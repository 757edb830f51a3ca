//! A page of the engine's as an observation: nanoseconds to milliseconds, and the contract's words to the detector's.

use heartbeat::page::{Page, Phase};
use vitals::observation::{PageObs, PagePhase};

/// What the page says.
pub(super) fn observed(page: &Page) -> PageObs {
    let (identity, beat) = (&page.identity, &page.beat);
    PageObs {
        rank: identity.rank,
        world_size: identity.world_size,
        engines: identity.engines,
        steps_completed: beat.steps_completed,
        tokens_delivered: beat.tokens_delivered,
        requests_finished: beat.requests_finished,
        running: beat.running,
        waiting: beat.waiting,
        prompt_tokens_owed: beat.prompt_tokens_owed,
        phase: phase(beat.phase),
        phase_tokens: beat.phase_tokens,
        phase_entered_ms: ms(beat.phase_entered_ns),
        lease_ms: u64::from(beat.lease_ms),
        step_started_ms: Some(beat.step_started_ns).filter(|ns| *ns != 0).map(ms),
        work_done: beat.work_done,
        work_total: beat.work_total,
        published_ms: ms(beat.published_ns),
    }
}

/// A time of a page, on the clock that it shares with all observations.
pub(super) fn ms(ns: u64) -> u64 {
    ns / 1_000_000
}

/// H5.
pub(super) fn phase(phase: Phase) -> PagePhase {
    match phase {
        Phase::Load => PagePhase::Load,
        Phase::Compile => PagePhase::Compile,
        Phase::Capture => PagePhase::Capture,
        Phase::WarmUp => PagePhase::WarmUp,
        Phase::Idle => PagePhase::Idle,
        Phase::Prefill => PagePhase::Prefill,
        Phase::Decode => PagePhase::Decode,
        Phase::Sleep => PagePhase::Sleep,
        Phase::Drain => PagePhase::Drain,
    }
}
