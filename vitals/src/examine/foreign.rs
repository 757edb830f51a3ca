//! Looks at an engine without leases: the gate's silence, or flat counters, against its learned rhythm.

use super::classes::{foreign_class, turning as turning_class};
use super::{Allowed, Basis, Exam, View, reason, source_name};
use crate::observation::{Ms, ProcObs};
use crate::owed::{Owed, OwedSource};
use crate::verdict::StallClass;
use crate::witness::PageSays;

/// How long ago, in counted time.
#[derive(Debug, Clone, Copy)]
struct Since {
    /// Anything of the engine moved.
    any: Ms,
    /// Something was delivered.
    delivered: Ms,
}

/// An engine without leases: the gate's silence (or, without a gate, flat counters) against its learned rhythm.
pub(super) fn foreign(view: &View<'_>, gate: Allowed, exam: &mut Exam) {
    let Some(owed) = view.sight.owed else { return };
    let signs = view.signs;
    let delivered =
        signs.gate_delivered_at.max(signs.owed_since).max(signs.metrics_tokens_at).max(signs.leaders.tokens_at());
    let moved = delivered.max(signs.moved_at());
    let allowed = foreign_allowed(view, owed, gate);
    let since = Since { any: view.tick.since(moved), delivered: view.tick.since(delivered) };
    beside_leavers(view, owed, allowed, since, exam);
    let flat = since.any.saturating_sub(unseen_ms(view));
    exam.hold(flat, allowed, || {
        let text = format!(
            "{} requests owed ({}) and nothing moved for {flat} ms; {}",
            owed.requests,
            source_name(owed.source),
            allowed.words()
        );
        (foreign_class(view), reason(source_name(owed.source), text), PageSays::Nothing)
    });
    stopped(view, exam);
    turning(view, owed, allowed, since, exam);
}

/// One data-parallel rank of `/metrics` that stands with work owed to it, whatever the others deliver: with the rivals' patience, for a fence
/// costs those others as well, and no scrape tells a long prompt's step from one that never ends.
pub(super) fn scheduler(view: &View<'_>, exam: &mut Exam) {
    let schedulers = &view.signs.schedulers;
    let Some((scheduler, silence)) = schedulers.standing(view.sight.gate) else { return };
    let rank = scheduler.rank;
    if view.sight.native().is_some() && view.signs.leaders.of(rank).is_some() {
        // its own page knows better
        return;
    }
    let allowed = Allowed::policy(view.policy.patience_cap_ms);
    exam.hold_one(rank, silence, allowed, || {
        let text = format!(
            "data-parallel rank {rank} holds {} running and {} waiting, and no series of it moved for {silence} ms, whatever the others do; {}",
            scheduler.running,
            scheduler.waiting,
            allowed.words()
        );
        (StallClass::RankSilent { ranks: vec![rank] }, reason("metrics", text), PageSays::Nothing)
    });
}

/// How old the word of the source is that could tell that something moves: the gate's, or, where no request streams and there is no
/// page, the last scrape's. A gate that is late or a slow `/metrics` is no silence of the engine.
fn unseen_ms(view: &View<'_>) -> Ms {
    let age = |at_ms: Ms| view.tick.now_ms.saturating_sub(at_ms);
    let gate = view.sight.gate.map_or(0, |_| age(view.signs.gate_sampled_ms));
    let only_scrapes = view.nothing_begun() && view.sight.page.is_none() && view.sight.metrics.is_some();
    if only_scrapes { age(view.signs.metrics_sampled_ms).max(gate) } else { gate }
}

/// Gauges cannot tell a long prompt from a hang, so a deadline is learned only where the gate knows what is owed.
fn foreign_allowed(view: &View<'_>, owed: Owed, gate: Allowed) -> Allowed {
    match owed.source {
        // who rests need not work
        OwedSource::Gate if view.rests() => gate,
        OwedSource::Gate => nothing_works(view, gate).unwrap_or(gate),
        OwedSource::Page | OwedSource::Metrics => Allowed::patient(view.policy.patience_cap_ms),
    }
}

/// Patience is for an engine that may be working: a first step of 69 s burns CPU or GPU all the while.
fn nothing_works(view: &View<'_>, gate: Allowed) -> Option<Allowed> {
    let patience = view.policy.idle_patience_ms;
    let due = view.idle_ms > patience && gate.basis == Basis::Patience;
    due.then(|| Allowed::idle(patience.min(view.policy.patience_cap_ms)))
}

/// A stopped process without a debugger delivers nothing, whatever was learned, and whichever of the tree it is: the front end that
/// was picked as the one to watch may well run.
/// (A lease was declared for a step that runs, and says no more of one that does not.)
pub(super) fn stopped(view: &View<'_>, exam: &mut Exam) {
    let Some(owed) = view.sight.owed else { return };
    // (A lease says what a step may take: whoever is stopped beside it is nobody's step.)
    let of_it = |proc: &ProcObs| if view.sight.native().is_some() { proc.stopped_cores } else { proc.stopped };
    if !view.sight.proc.is_some_and(|proc| proc.state == Some('T') || of_it(proc) > 0) {
        return;
    }
    let since_any = view.tick.since(view.signs.delivered_at().max(view.signs.owed_since).max(view.signs.moved_at()));
    let allowed = Allowed::policy(view.policy.foreign_floor_ms);
    exam.hold(since_any, allowed, || {
        let text = format!("{} requests owed ({}), a process of the engine is stopped (state T) without a debugger, and nothing moved for {since_any} ms; {}", owed.requests, source_name(owed.source), allowed.words());
        // whatever else of the tree burns, a process that is stopped waits for no device
        let class = match foreign_class(view) {
            StallClass::DeviceWait => StallClass::StepStalled,
            class => class,
        };
        (class, reason("proc", text), PageSays::Nothing)
    });
}

/// Nothing but clients who left has moved the engine's page for the rivals' patience. Whoever takes them off its books is in no step, so
/// that its loop turns and works for nobody.
fn beside_leavers(view: &View<'_>, owed: Owed, allowed: Allowed, since: Since, exam: &mut Exam) {
    let silence = since.delivered.min(view.tick.since(view.signs.worked_at())).saturating_sub(unseen_ms(view));
    if silence <= since.any {
        return;
    }
    let allowed = allowed_to_turn(view, allowed, view.policy.patience_cap_ms);
    exam.hold(silence, allowed, || {
        let owed_words = format!("{} requests owed ({})", owed.requests, source_name(owed.source));
        let text = format!("{owed_words} and nothing moved for {silence} ms but clients who left; {}", allowed.words());
        let class = match foreign_class(view) {
            class @ (StallClass::FrontendStalled | StallClass::AdmissionStalled) => class,
            _ => turning_class(view.signs),
        };
        (class, reason(source_name(owed.source), text), PageSays::Nothing)
    });
}

/// Something moves, but nothing is delivered: livelock, or decode starved by prefill.
fn turning(view: &View<'_>, owed: Owed, allowed: Allowed, since: Since, exam: &mut Exam) {
    let signs = view.signs;
    // a counter that moved once, long ago, is the last sign of a step that is under way since
    if since.any >= since.delivered || since.any > view.policy.metrics_fresh_ms {
        return;
    }
    let Some(least) = turning_allowed(view) else { return };
    // prefill and decode take room in the cache, and a page tells of both; who only turns does not
    let filled = view.tick.since(signs.taken_in_at());
    // … and one that counts tokens as it makes them makes none for so long by no prefill
    let believed = !signs.tokens_live || since.delivered <= view.policy.long_patience_ms();
    let silence = if believed { since.delivered.min(filled) } else { since.delivered };
    let allowed = allowed_to_turn(view, allowed, least);
    exam.hold(silence, allowed, || {
        // what is judged is the shorter of the two, and who reads must not wonder why the longer one proves nothing
        let taken_in = match silence < since.delivered {
            true => format!(", and took nothing more into its cache for {silence} ms"),
            false => String::new(),
        };
        let text = format!(
            "the engine's counters move, and {} requests owed ({}) got nothing for {} ms{taken_in}; {}",
            owed.requests,
            source_name(owed.source),
            since.delivered,
            allowed.words()
        );
        (turning_class(signs), reason("metrics", text), PageSays::Nothing)
    });
}

/// By the policy, so long at least. Steps that end bound the crawl of one: the rivals' patience is enough.
fn allowed_to_turn(view: &View<'_>, allowed: Allowed, least: Ms) -> Allowed {
    let crawl_ms = allowed.crawl_ms.min(view.policy.patience_cap_ms);
    Allowed { ms: allowed.ms.max(least), basis: Basis::Policy, crawl_ms }
}

/// How long counters may move without a delivery. Only requests that have begun to answer can be starved of decode; the others are in
/// prefill, or do not stream and are counted by some engines in one lump at their end, however long that is: against these only a
/// cache that does not fill speaks, or a page, which counts tokens as they are made.
fn turning_allowed(view: &View<'_>) -> Option<Ms> {
    let policy = view.policy;
    match view.sight.gate {
        Some(gate) if gate.begun() == 0 => {
            let fills = view.sight.metrics.is_some_and(|metrics| metrics.kv_usage.is_some());
            (fills || view.sight.page.is_some()).then_some(policy.patience_cap_ms)
        }
        _ => Some(policy.decode_starved_ms),
    }
}
