//! Looks at an engine whose page keeps the contract: its own step, its own loop, and what the gate knows beyond them.

use super::{Allowed, Exam, View, classes, phase_name, reason, step_name};
use crate::deadlines;
use crate::leaders::Leader;
use crate::observation::{Ms, PageObs, PagePhase};
use crate::owed::OwedSource;
use crate::verdict::StallClass;
use crate::witness::PageSays;

/// The loop of each data-parallel engine, by its own page and its own deadline; what is said is of the worst.
pub(super) fn loops(view: &View<'_>, exam: &mut Exam) {
    for (place, leader) in view.signs.leaders.present() {
        let others = exam.complaint.take();
        let lesson_ms = step(view, leader, exam);
        if let Some(lesson) = exam.step_lessons_ms.get_mut(place) {
            *lesson = lesson_ms;
        }
        livelock(view, leader, exam);
        if let Some(complaint) = exam.complaint.as_mut().filter(|_| view.signs.leaders.several()) {
            let engine = leader.page.engine();
            complaint.engine = Some(engine);
            let named = format!("data-parallel engine {engine} (rank {}): ", leader.page.rank);
            complaint.reason.text.insert_str(0, &named);
        }
        exam.keep_worse(others);
    }
}

/// A step that does not end, or a loop that owes work and begins none. How much of that step's age may be learned.
fn step(view: &View<'_>, leader: &Leader, exam: &mut Exam) -> Ms {
    let page = &leader.page;
    let (owed, engine) = (page.owed(), page.engine());
    if let Some(step_at) = view.signs.ranks.oldest_step_at(engine, view.signs.owed_since) {
        if owed == 0 && page.phase_tokens == 0 && view.sight.owed.is_none() {
            return 0;
        }
        let silence = view.tick.since(step_at);
        let allowed = deadlines::native_step(view, page);
        let lease = deadlines::worthy_lease_ms(page, allowed, (view.policy, view.signs.loads(view.tick)));
        exam.hold(silence, allowed, || {
            let text = format!(
                "step {} ({}) is under way for {silence} ms with {} running and {} waiting; {}",
                page.steps_completed.saturating_add(1),
                step_name(page),
                page.running,
                page.waiting,
                allowed.words()
            );
            (classes::step_class(view, engine), reason("page", text), PageSays::lease(silence >= lease))
        });
        return deadlines::step_lesson_ms(page, allowed, view.policy);
    }
    if owed > 0 && page.phase != PagePhase::Sleep {
        // work that others hold is no work that it has been silent about
        let came = if view.signs.leaders.several() { leader.owes_at } else { 0 };
        let moved = view.signs.ranks.moved_at(engine).max(view.signs.owed_since).max(came);
        let silence = view.tick.since(moved);
        let allowed =
            Allowed::policy(view.policy.native_between_ms.saturating_add(view.tick.jitter_ms.saturating_mul(2)));
        exam.hold(silence, allowed, || {
            let class =
                if page.running == 0 { StallClass::AdmissionStalled } else { classes::step_class(view, engine) };
            let text = format!(
                "{} running and {} waiting, but no step was begun for {silence} ms; {}",
                page.running,
                page.waiting,
                allowed.words()
            );
            (class, reason("page", text), PageSays::NoStep)
        });
    }
    0
}

/// H3: a loop that turns without delivering is a hang; prefill that gets through its prompt is not.
fn livelock(view: &View<'_>, leader: &Leader, exam: &mut Exam) {
    let page = &leader.page;
    if page.running == 0 {
        return;
    }
    let turned = page.steps_completed.saturating_sub(leader.steps_at_tokens);
    let since_prefill = view.tick.since(leader.prefill_at);
    let since_tokens = view.tick.since(leader.tokens_at.max(view.signs.owed_since));
    if turned >= view.policy.livelock_steps {
        let silence = since_tokens.min(since_prefill);
        let in_vain = page.steps_completed.saturating_sub(leader.steps_at_tokens.max(leader.steps_at_prefill));
        let allowed = deadlines::native_livelock(view, page, in_vain);
        exam.hold(silence, allowed, || {
            let text = format!(
                "{turned} steps turned in {since_tokens} ms and not one token was delivered to {} running requests; {}",
                page.running,
                allowed.words()
            );
            let lease = page.lease_ms.min(view.policy.lease_cap_ms);
            (StallClass::Livelock, reason("page", text), PageSays::lease(silence >= lease))
        });
    }
    // of data-parallel engines another one may hold all that have begun
    let elsewhere = view.signs.leaders.held_elsewhere(page.engine());
    let decoding = view.sight.gate.is_some_and(|gate| gate.begun() > elsewhere);
    if turned > 0 && decoding && since_prefill < since_tokens {
        let allowed = Allowed::policy(view.policy.decode_starved_ms);
        exam.hold(since_tokens, allowed, || {
            let text = format!("prefill moves, but no token was delivered for {since_tokens} ms to requests that had begun to answer; {}", allowed.words());
            (StallClass::DecodeStalled, reason("page", text), PageSays::Nothing)
        });
    }
}

/// The gate owes work that the engine's loop does not know of, or tokens that the front end does not pass on.
pub(super) fn front(view: &View<'_>, page: &PageObs, silence_allowed: Allowed, exam: &mut Exam) {
    let Some(gate) = view.sight.gate.filter(|gate| gate.in_flight > 0) else { return front_by_load(view, exam) };
    let silent_front = view.front_is_silent(view.policy.admission_ms);
    let since_bytes = view.tick.since(view.signs.gate_delivered_at.max(view.signs.owed_since));
    let (silence, allowed) = if view.signs.leaders.all_idle() {
        (since_bytes.min(view.tick.since(view.signs.leaders.steps_at())), admission(view))
    } else if let Some(made_at) = view.signs.silence.made_at().filter(|_| silent_front) {
        // what a loop has not made yet no front end can pass on, nor before its end an answer that does not stream
        let whole = gate.may_be_whole().then_some(view.sight.frontend_silent_ms).flatten();
        let silence = since_bytes.min(view.tick.since(made_at)).min(whole.unwrap_or(Ms::MAX));
        (silence, silence_allowed)
    } else {
        return;
    };
    exam.hold(silence, allowed, || {
        let text = format!(
            "{} requests owed (gate), the engine's loop is {}, and no byte came for {silence} ms; {}",
            gate.in_flight,
            phase_name(page.phase),
            allowed.words()
        );
        (
            if silent_front { StallClass::FrontendStalled } else { StallClass::AdmissionStalled },
            reason("gate", text),
            PageSays::Nothing,
        )
    });
}

/// Without a gate the front end's own count tells of work that the loop does not know of; with the patience that gauges get.
fn front_by_load(view: &View<'_>, exam: &mut Exam) {
    let idle = view.signs.leaders.all_idle();
    let Some(owed) = view.sight.owed.filter(|owed| idle && owed.source == OwedSource::Metrics) else { return };
    let silence = view.tick.since(view.signs.moved_at().max(view.signs.owed_since));
    let allowed = Allowed::patient(view.policy.patience_cap_ms);
    exam.hold(silence, allowed, || {
        let text = format!(
            "{} requests owed (metrics), the engine's loop is idle, and nothing moved for {silence} ms; {}",
            owed.requests,
            allowed.words()
        );
        (StallClass::AdmissionStalled, reason("metrics", text), PageSays::Nothing)
    });
}

/// How long it may take until a loop that is idle hears of what the gate has taken on. A process that is stopped, and not by a debugger,
/// hears of nothing; where the stopped one is another of the tree, it may be none that hands work over.
fn admission(view: &View<'_>) -> Allowed {
    let proc = view.sight.proc;
    if proc.is_some_and(|proc| proc.state == Some('T')) {
        Allowed::policy(view.policy.native_floor_ms)
    } else if proc.is_some_and(|proc| proc.stopped > 0) {
        Allowed::policy(view.policy.foreign_floor_ms)
    } else if view.rests() {
        Allowed::patient(view.policy.patience_cap_ms)
    } else {
        Allowed::policy(view.policy.admission_ms)
    }
}
