//! Looks at an engine without leases: the gate's silence, or flat counters, against its learned rhythm.

use super::classes::foreign_class;
use super::{Allowed, Exam, View, reason, source_name};
use crate::deadlines;
use crate::observation::Ms;
use crate::owed::{Owed, OwedSource};
use crate::verdict::StallClass;
use crate::witness::PageSays;

/// An engine without leases: the gate's silence (or, without a gate, flat counters) against its learned rhythm.
pub(super) fn foreign(view: &View<'_>, exam: &mut Exam) {
    let Some(owed) = view.sight.owed else { return };
    let signs = view.signs;
    let delivered =
        signs.gate_delivered_at.max(signs.owed_since).max(signs.metrics_tokens_at).max(signs.page_tokens_at);
    let moved = delivered
        .max(signs.metrics_moved_at)
        .max(signs.metrics_prompt_at)
        .max(signs.metrics_iterations_at)
        .max(signs.page_steps_at);
    let allowed = foreign_allowed(view, owed);
    let (since_any, since_delivered) = (view.tick.since(moved), view.tick.since(delivered));
    let flat = since_any.saturating_sub(unseen_ms(view));
    exam.hold(flat, allowed, || {
        let text = format!(
            "{} requests owed ({}) and nothing moved for {flat} ms; {}",
            owed.requests,
            source_name(owed.source),
            allowed.words()
        );
        (foreign_class(view), reason(source_name(owed.source), text), PageSays::Nothing)
    });
    stopped(view, owed, since_any, exam);
    turning(view, owed, allowed, since_any, since_delivered, exam);
}

/// Where only a scrape could tell that something moves (no request streams, no page): how old the last one is. A slow `/metrics` is
/// no silence of the engine.
fn unseen_ms(view: &View<'_>) -> Ms {
    let only_scrapes = view.nothing_begun() && view.sight.page.is_none() && view.sight.metrics.is_some();
    if only_scrapes { view.tick.now_ms.saturating_sub(view.signs.metrics_sampled_ms) } else { 0 }
}

/// Gauges cannot tell a long prompt from a hang, so a deadline is learned only where the gate knows what is owed.
fn foreign_allowed(view: &View<'_>, owed: Owed) -> Allowed {
    match owed.source {
        OwedSource::Gate => deadlines::gate_silence(view),
        OwedSource::Page | OwedSource::Metrics => Allowed::patient(view.policy.patience_cap_ms),
    }
}

/// A stopped process without a debugger delivers nothing, whatever was learned, and whichever of the tree it is: the front end that
/// was picked as the one to watch may well run.
fn stopped(view: &View<'_>, owed: Owed, since_any: Ms, exam: &mut Exam) {
    if !view.sight.proc.is_some_and(|proc| proc.state == Some('T') || proc.stopped > 0) {
        return;
    }
    let allowed = Allowed::policy(view.policy.foreign_floor_ms);
    exam.hold(since_any, allowed, || {
        let text = format!("{} requests owed ({}), a process of the engine is stopped (state T) without a debugger, and nothing moved for {since_any} ms; {}", owed.requests, source_name(owed.source), allowed.words());
        (foreign_class(view), reason("proc", text), PageSays::Nothing)
    });
}

/// Something moves, but nothing is delivered: livelock, or decode starved by prefill.
fn turning(view: &View<'_>, owed: Owed, allowed: Allowed, since_any: Ms, since_delivered: Ms, exam: &mut Exam) {
    if since_any >= since_delivered {
        return;
    }
    let signs = view.signs;
    // only requests that have begun to answer can be starved of decode; the others are in prefill, or do not stream and are counted
    // by some engines in one lump at their end, however long that is
    let decoding = view.sight.gate.is_none_or(|gate| gate.in_flight > gate.awaiting_first_byte);
    let least = if decoding { view.policy.decode_starved_ms } else { view.policy.patience_cap_ms };
    let patience = allowed.ms.max(least);
    let allowed = Allowed { ms: patience, ..Allowed::policy(0) };
    exam.hold(since_delivered, allowed, || {
        // a counter that moved once, long ago, is the last sign of a step that hangs since
        let moves = since_any <= view.policy.metrics_fresh_ms;
        let class = match signs.metrics_prompt_at > signs.metrics_tokens_at {
            _ if !moves => foreign_class(view),
            true => StallClass::DecodeStalled,
            false => StallClass::Livelock,
        };
        let what = if moves { "move".to_owned() } else { format!("stand for {since_any} ms") };
        let text = format!(
            "the engine's counters {what}, and {} requests owed ({}) got nothing for {since_delivered} ms; {}",
            owed.requests,
            source_name(owed.source),
            allowed.words()
        );
        (class, reason("metrics", text), PageSays::Nothing)
    });
}
