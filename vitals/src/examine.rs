//! V2: is there work owed and no delivery for longer than the phase allows? One look, no memory of verdicts.
//!
//! The answer is a [`Complaint`] with its class, or how long until there would be one. What to do about it is the detector's.

use crate::deadlines;
use crate::excuse::Tick;
use crate::observation::{GateObs, Ms, PageObs, PagePhase};
use crate::policy::Policy;
use crate::rhythm::Rhythm;
use crate::signs::{Owed, OwedSource, Sight, Signs};
use crate::verdict::{Reason, StallClass};
use crate::witness::PageSays;

/// Where a deadline comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// Quantile × factor of this engine's own history.
    Learned,
    /// The page's lease, capped.
    Declared,
    /// Nothing was learned: the rivals' patience.
    Patience,
    /// A number of the policy.
    Policy,
}

/// A deadline in milliseconds and its basis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowed {
    pub ms: Ms,
    pub basis: Basis,
}

impl Allowed {
    pub fn learned(ms: Ms) -> Self {
        Self { ms, basis: Basis::Learned }
    }
    pub fn declared(ms: Ms) -> Self {
        Self { ms, basis: Basis::Declared }
    }
    pub fn patient(ms: Ms) -> Self {
        Self { ms, basis: Basis::Patience }
    }
    pub fn policy(ms: Ms) -> Self {
        Self { ms, basis: Basis::Policy }
    }

    fn words(self) -> String {
        match self.basis {
            Basis::Learned => format!("{} ms is what this engine's own rhythm allows", self.ms),
            Basis::Declared => format!("the page's lease allows {} ms", self.ms),
            Basis::Patience => format!("nothing comparable was learned yet, so {} ms are allowed", self.ms),
            Basis::Policy => format!("the policy allows {} ms", self.ms),
        }
    }
}

/// Work is owed and the phase's deadline has passed.
#[derive(Debug, Clone)]
pub struct Complaint {
    pub class: StallClass,
    pub silence_ms: Ms,
    pub allowed: Allowed,
    pub reason: Reason,
    pub page_says: PageSays,
}

/// The result of one look.
#[derive(Debug, Clone, Default)]
pub struct Exam {
    pub complaint: Option<Complaint>,
    /// Without one: when the nearest deadline passes, from now.
    pub due_in_ms: Option<Ms>,
    /// The deadline that rules the gate's silence (bounds what is learned from a gap).
    pub gate_allowed_ms: Ms,
    /// How much of the age of the decode step under way may be learned.
    pub step_lesson_ms: Ms,
}

/// Everything a look needs.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    pub tick: &'a Tick,
    pub sight: &'a Sight<'a>,
    pub signs: &'a Signs,
    pub rhythm: &'a Rhythm,
    pub policy: &'a Policy,
    /// Since the last delivery: was the stepping thread mostly running, or the tree burning CPU?
    pub burning: bool,
}

impl View<'_> {
    /// Does the gate know that no request in flight has begun to answer, while the front end answers? Then the silence may be the
    /// front end's (a client can make it fetch something), or that of a request that does not stream.
    pub fn nothing_begun(&self) -> bool {
        self.sight.gate.is_some_and(GateObs::only_unanswered) && !self.sight.frontend_silent(self.tick.now_ms, 0)
    }

    /// Does a native page show a step under way for longer than its lease?
    pub fn step_beyond_lease(&self) -> bool {
        self.sight.native().is_some_and(|page| {
            self.oldest_step_at().is_some_and(|at| self.tick.since(at) >= deadlines::step_lease_ms(page, self.policy))
        })
    }

    /// Counted time at which the oldest step under way of any rank began.
    fn oldest_step_at(&self) -> Option<Ms> {
        let of_rank = |rank: u32| self.signs.ranks.iter().find(|sign| sign.rank == rank).and_then(|sign| sign.step_at);
        self.sight.pages.iter().filter_map(|page| of_rank(page.rank)).min()
    }
}

/// Looks once.
pub fn examine(view: &View<'_>) -> Exam {
    let mut exam = Exam { gate_allowed_ms: deadlines::gate_silence(view).ms, ..Exam::default() };
    match view.sight.native() {
        Some(page) => {
            native_step(view, page, &mut exam);
            native_livelock(view, page, &mut exam);
            native_front(view, page, &mut exam);
        }
        None => foreign(view, &mut exam),
    }
    exam
}

impl Exam {
    /// Holds a silence against a deadline; the first complaint stays.
    fn hold(&mut self, silence_ms: Ms, allowed: Allowed, complain: impl FnOnce() -> (StallClass, Reason, PageSays)) {
        if silence_ms <= allowed.ms {
            let due = allowed.ms - silence_ms;
            self.due_in_ms = Some(self.due_in_ms.map_or(due, |other| other.min(due)));
        } else if self.complaint.is_none() {
            let (class, reason, page_says) = complain();
            self.complaint = Some(Complaint { class, silence_ms, allowed, reason, page_says });
        }
    }
}

/// A step that does not end, or a loop that owes work and begins none.
fn native_step(view: &View<'_>, page: &PageObs, exam: &mut Exam) {
    let owed = page.running.saturating_add(page.waiting);
    if let Some(step_at) = view.oldest_step_at() {
        if owed == 0 && page.phase_tokens == 0 && view.sight.owed.is_none() {
            return;
        }
        let silence = view.tick.since(step_at);
        let allowed = deadlines::native_step(page, view.rhythm, view.policy, view.tick);
        let lease = page.lease_ms.min(view.policy.lease_cap_ms);
        exam.step_lesson_ms = deadlines::step_lesson_ms(page, allowed, view.policy);
        exam.hold(silence, allowed, || {
            let text = format!(
                "step {} ({}) is under way for {silence} ms with {} running and {} waiting; {}",
                page.steps_completed.saturating_add(1),
                step_name(page),
                page.running,
                page.waiting,
                allowed.words()
            );
            (step_class(view), reason("page", text), PageSays::lease(silence >= lease))
        });
    } else if owed > 0 && page.phase != PagePhase::Sleep {
        let moved = view.signs.ranks.iter().map(|sign| sign.moved_at).max().unwrap_or(0).max(view.signs.owed_since);
        let silence = view.tick.since(moved);
        let allowed =
            Allowed::policy(view.policy.native_between_ms.saturating_add(view.tick.jitter_ms.saturating_mul(2)));
        exam.hold(silence, allowed, || {
            let class = if page.running == 0 { StallClass::AdmissionStalled } else { step_class(view) };
            let text = format!(
                "{} running and {} waiting, but no step was begun for {silence} ms; {}",
                page.running,
                page.waiting,
                allowed.words()
            );
            (class, reason("page", text), PageSays::NoStep)
        });
    }
}

/// H3: a loop that turns without delivering is a hang; prefill that gets through its prompt is not.
fn native_livelock(view: &View<'_>, page: &PageObs, exam: &mut Exam) {
    if page.running == 0 {
        return;
    }
    let turned = page.steps_completed.saturating_sub(view.signs.steps_at_tokens);
    let since_prefill = view.tick.since(view.signs.page_prefill_at);
    let since_tokens = view.tick.since(view.signs.page_tokens_at.max(view.signs.owed_since));
    if turned >= view.policy.livelock_steps {
        let silence = since_tokens.min(since_prefill);
        let allowed = deadlines::native_livelock(page, view.rhythm, view.policy, view.tick);
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
    let decoding = view.sight.gate.is_some_and(|gate| gate.in_flight > gate.awaiting_first_byte);
    if turned > 0 && decoding && since_prefill < since_tokens {
        let allowed = Allowed::policy(view.policy.decode_starved_ms);
        exam.hold(since_tokens, allowed, || {
            let text = format!("prefill moves, but no token was delivered for {since_tokens} ms to requests that had begun to answer; {}", allowed.words());
            (StallClass::DecodeStalled, reason("page", text), PageSays::Nothing)
        });
    }
}

/// The gate owes work that the engine's loop does not know of, or tokens that the front end does not pass on.
fn native_front(view: &View<'_>, page: &PageObs, exam: &mut Exam) {
    let Some(gate) = view.sight.gate.filter(|gate| gate.in_flight > 0) else { return };
    let silent_front = view.sight.frontend_silent(view.tick.now_ms, view.policy.admission_ms);
    let since_bytes = view.tick.since(view.signs.gate_delivered_at.max(view.signs.owed_since));
    let idle = page.phase == PagePhase::Idle && page.running == 0 && page.waiting == 0;
    let (silence, allowed) = if idle {
        (since_bytes.min(view.tick.since(view.signs.page_steps_at)), Allowed::policy(view.policy.admission_ms))
    } else if silent_front {
        (since_bytes, deadlines::gate_silence(view))
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

/// An engine without leases: the gate's silence (or, without a gate, flat counters) against its learned rhythm.
fn foreign(view: &View<'_>, exam: &mut Exam) {
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

/// A stopped process without a debugger delivers nothing, whatever was learned.
fn stopped(view: &View<'_>, owed: Owed, since_any: Ms, exam: &mut Exam) {
    if view.sight.proc.and_then(|p| p.state) != Some('T') {
        return;
    }
    let allowed = Allowed::policy(view.policy.foreign_floor_ms);
    exam.hold(since_any, allowed, || {
        let text = format!("{} requests owed ({}), the process is stopped (state T) without a debugger, and nothing moved for {since_any} ms; {}", owed.requests, source_name(owed.source), allowed.words());
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
        let class = if signs.metrics_prompt_at > signs.metrics_tokens_at {
            StallClass::DecodeStalled
        } else {
            StallClass::Livelock
        };
        let text = format!(
            "the engine's counters move, but {} requests owed ({}) got nothing for {since_delivered} ms; {}",
            owed.requests,
            source_name(owed.source),
            allowed.words()
        );
        (class, reason("metrics", text), PageSays::Nothing)
    });
}

/// Which step failure it is, as far as one look can tell.
fn step_class(view: &View<'_>) -> StallClass {
    let ranks = silent_ranks(view);
    if !ranks.is_empty() {
        return StallClass::RankSilent { ranks };
    }
    if view.burning { StallClass::DeviceWait } else { StallClass::StepStalled }
}

/// Ranks behind in steps, or outside a step that their peers are in.
fn silent_ranks(view: &View<'_>) -> Vec<u32> {
    let mut ranks = view.signs.silent_ranks(view.sight.pages);
    let some_in_step = view.sight.pages.iter().any(|page| page.step_started_ms.is_some());
    if ranks.is_empty() && some_in_step && view.sight.pages.len() > 1 {
        ranks = view.sight.pages.iter().filter(|page| page.step_started_ms.is_none()).map(|page| page.rank).collect();
    }
    ranks
}

fn foreign_class(view: &View<'_>) -> StallClass {
    let page_idle = view.sight.page.is_some_and(|page| page.step_started_ms.is_none());
    let stopped = view.sight.proc.and_then(|p| p.state) == Some('T');
    if view.sight.frontend_silent(view.tick.now_ms, 0) && (page_idle || !stopped) {
        return StallClass::FrontendStalled;
    }
    let gauges =
        view.sight.metrics.map(|m| (m.running.unwrap_or(0.0), m.waiting.unwrap_or(0.0), m.kv_usage.unwrap_or(0.0)));
    if gauges.is_some_and(|(running, waiting, kv)| running < 1.0 && waiting >= 1.0 && kv < 0.95)
        && view.sight.page.is_none_or(|page| page.step_started_ms.is_none())
    {
        return StallClass::AdmissionStalled;
    }
    step_class(view)
}

pub(crate) fn reason(source: &str, text: String) -> Reason {
    Reason { source: source.to_owned(), text }
}

pub(crate) fn source_name(source: OwedSource) -> &'static str {
    match source {
        OwedSource::Gate => "gate",
        OwedSource::Page => "page",
        OwedSource::Metrics => "metrics",
    }
}

fn phase_name(phase: PagePhase) -> &'static str {
    match phase {
        PagePhase::Load => "load",
        PagePhase::Compile => "compile",
        PagePhase::Capture => "capture",
        PagePhase::WarmUp => "warm-up",
        PagePhase::Idle => "idle",
        PagePhase::Prefill => "prefill",
        PagePhase::Decode => "decode",
        PagePhase::Sleep => "sleep",
        PagePhase::Drain => "drain",
    }
}

/// `decode`, or `512 prompt tokens in prefill`.
fn step_name(page: &PageObs) -> String {
    match page.phase_tokens {
        0 => phase_name(page.phase).to_owned(),
        tokens => format!("{tokens} prompt tokens in {}", phase_name(page.phase)),
    }
}
