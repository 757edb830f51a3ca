//! V2: is there work owed and no delivery for longer than the phase allows? One look, no memory of verdicts.
//!
//! The answer is a [`Complaint`] with its class, or how long until there would be one. What to do about it is the detector's.

mod classes;
mod foreign;
mod native;

use crate::deadlines;
use crate::excuse::Tick;
use crate::leaders::ENGINES_MAX;
use crate::observation::{GateObs, Ms, PageObs, PagePhase};
use crate::owed::OwedSource;
use crate::policy::Policy;
use crate::rhythm::Rhythm;
use crate::signs::{Sight, Signs};
use crate::verdict::{Reason, StallClass};
use crate::witness::PageSays;
use crate::xid::Xid;

/// Where a deadline comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Basis {
    /// Quantile × factor of this engine's own history.
    Learned,
    /// The page's lease, capped.
    Declared,
    /// Nothing was learned: the rivals' patience.
    Patience,
    /// Nothing was learned, and nothing works for what is owed: neither CPU, GPU nor disk.
    Idle,
    /// A number of the policy.
    Policy,
}

/// A deadline in milliseconds and its basis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowed {
    pub ms: Ms,
    pub basis: Basis,
    /// An engine that merely crawls (B5) may be silent for as long as this; 0 where crawling cannot be the cause.
    pub crawl_ms: Ms,
}

impl Allowed {
    pub fn learned(ms: Ms) -> Self {
        Self { ms, basis: Basis::Learned, crawl_ms: 0 }
    }
    pub fn declared(ms: Ms) -> Self {
        Self { ms, basis: Basis::Declared, crawl_ms: 0 }
    }
    pub fn patient(ms: Ms) -> Self {
        Self { ms, basis: Basis::Patience, crawl_ms: 0 }
    }
    pub fn idle(ms: Ms) -> Self {
        Self { ms, basis: Basis::Idle, crawl_ms: 0 }
    }
    pub fn policy(ms: Ms) -> Self {
        Self { ms, basis: Basis::Policy, crawl_ms: 0 }
    }

    /// The same deadline of something that usually takes this long.
    pub fn of_usual(self, usual_ms: Ms, policy: &Policy) -> Self {
        self.crawling(usual_ms, policy.patience_cap_ms, policy)
    }

    /// The same of one that health itself may need the rivals' patience for: the fence stands by then, and the kill waits.
    pub fn of_long(self, usual_ms: Ms, policy: &Policy) -> Self {
        self.crawling(usual_ms, policy.long_patience_ms(), policy)
    }

    fn crawling(self, usual_ms: Ms, most_ms: Ms, policy: &Policy) -> Self {
        Self { crawl_ms: usual_ms.saturating_mul(policy.crawl_times).min(most_ms), ..self }
    }

    fn words(self) -> String {
        match self.basis {
            Basis::Learned => format!("{} ms is what this engine's own rhythm allows", self.ms),
            Basis::Declared => format!("the page's lease allows {} ms", self.ms),
            Basis::Patience => format!("nothing comparable was learned yet, so {} ms are allowed", self.ms),
            Basis::Idle => format!("nothing works for it (CPU, GPU, disk), so no more than {} ms are allowed", self.ms),
            Basis::Policy => format!("the policy allows {} ms", self.ms),
        }
    }
}

/// Work is owed and the phase's deadline has passed.
#[derive(Debug, Clone)]
pub struct Complaint {
    pub class: StallClass,
    /// Of several data-parallel engines the one that is accused by its own page, or by its own series: only these clear it.
    pub engine: Option<u32>,
    pub silence_ms: Ms,
    pub allowed: Allowed,
    pub reason: Reason,
    pub page_says: PageSays,
    /// A process that it cannot step without has ended: nothing but another one ends that.
    pub died: bool,
}

/// The result of one look.
#[derive(Debug, Clone, Default)]
pub struct Exam {
    pub complaint: Option<Complaint>,
    /// Without one: when the nearest deadline passes, from now.
    pub due_in_ms: Option<Ms>,
    /// The deadline that rules the gate's silence (bounds what is learned from a gap).
    pub gate_allowed_ms: Ms,
    /// How much of the age of the decode step under way may be learned, by the leaders' places.
    pub step_lessons_ms: [Ms; ENGINES_MAX],
    /// The silence is a confirmed stall already.
    pub confirmed: bool,
}

/// Everything a look needs.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    pub tick: &'a Tick,
    pub sight: &'a Sight<'a>,
    pub signs: &'a Signs,
    pub rhythm: &'a Rhythm,
    pub policy: &'a Policy,
    /// Since the last delivery: does the step run, or would it if it were given a core?
    pub burning: bool,
    /// Does the thread that steps show by its habits that it has taken work in?
    pub steps_by_its_cpu: bool,
    /// For how long nothing at all has been seen to work for what is owed.
    pub idle_ms: Ms,
    /// Xids that may concern this engine.
    pub xids: &'a [Xid],
    /// What no learned deadline of a native step is below (see [`crate::noise`]).
    pub native_floor_ms: Ms,
}

/// A crawl that was seen so long before the last delivery has nothing to do with the silence since.
const CRAWL_FRESH_MS: Ms = 120_000;

impl View<'_> {
    /// Does the gate know that no request in flight has begun to answer, while the front end answers (one probe or two that were late do
    /// not say otherwise)? Then the silence may be the
    /// front end's (a client can make it fetch something), or that of a request that does not stream.
    pub fn nothing_begun(&self) -> bool {
        self.sight.gate.is_some_and(GateObs::only_unanswered)
            && !self.sight.frontend_silent(self.policy.admission_ms.saturating_mul(2))
    }

    /// Has all that is owed begun to answer, is nothing of it in the engine's books, and does the front end answer? Then it is the front end that
    /// waits, for a tool that it calls between two generations.
    pub fn rests(&self) -> bool {
        self.signs.rest.now() && !self.steps_by_its_cpu && !self.front_is_silent(self.policy.admission_ms)
    }

    /// Was it seen to crawl, and to live, not long before it last delivered anything?
    pub fn was_crawling(&self) -> bool {
        let delivered = self.signs.delivered_at();
        self.rhythm.crawled_at.is_some_and(|at| delivered.saturating_sub(at) <= CRAWL_FRESH_MS)
    }

    /// Is the front end known to be silent for so long, or, where nobody asks it, to accept nobody?
    pub fn front_is_silent(&self, at_least_ms: Ms) -> bool {
        let unasked = self.sight.frontend.is_none() && self.signs.backlog.stands(self.tick).is_some();
        unasked || self.sight.frontend_silent(at_least_ms)
    }

    /// Does another data-parallel engine work on beside this one? What is known of the whole tree says nothing about this one then.
    pub fn others_go_on(&self, engine: Option<u32>) -> bool {
        engine.is_some_and(|engine| self.signs.others_go_on(engine, self.tick, self.policy.metrics_fresh_ms))
    }

    /// Does a native page show a step under way for longer than its lease?
    pub fn step_beyond_lease(&self) -> bool {
        let beyond = |page: &PageObs| {
            let began_at = self.signs.ranks.oldest_step_at(page.engine(), self.signs.owed_since);
            began_at.is_some_and(|at| self.tick.since(at) >= deadlines::step_lease_ms(page, self.policy))
        };
        self.sight.native().is_some() && self.signs.leaders.present().any(|(_, leader)| beyond(&leader.page))
    }
}

/// Looks once.
pub fn examine(view: &View<'_>) -> Exam {
    let gate = deadlines::gate_silence(view);
    let mut exam = Exam { gate_allowed_ms: gate.ms, ..Exam::default() };
    match view.sight.native() {
        Some(page) => {
            native::loops(view, &mut exam);
            native::front(view, page, gate, &mut exam);
            foreign::stopped(view, &mut exam);
        }
        None => foreign::foreign(view, gate, &mut exam),
    }
    foreign::scheduler(view, &mut exam);
    undelivered(view, &mut exam);
    exam
}

/// What an engine counts excuses a gate that hears nothing only for so long: streams that have begun and whose clients read get
/// something within the rivals' patience, and a request that is known to stream begins within three times that. An answer that does
/// not stream is silent by its own wish.
fn undelivered(view: &View<'_>, exam: &mut Exam) {
    let Some(gate) = view.sight.gate else { return };
    let begun = gate.begun();
    // (who does not stream, and who is blocked, may be the same: one that still sends)
    let stream_awaited = gate.unstreamed.is_some_and(|unstreamed| gate.awaiting_first_byte > unstreamed);
    // (who is blocked may still send: of those that have begun the one that is silent for longest tells of one that is not)
    let allowed = if begun > gate.client_blocked || gate.quietest_begun_ms.is_some() {
        Allowed::policy(view.policy.patience_cap_ms)
    } else if stream_awaited {
        Allowed::policy(view.policy.long_patience_ms())
    } else {
        return;
    };
    let allowed = Allowed { crawl_ms: view.policy.long_patience_ms(), ..allowed };
    let silence = view.tick.since(view.signs.gate_delivered_at.max(view.signs.owed_since));
    exam.hold(silence, allowed, || {
        let (class, figures) = classes::undelivered(view);
        let text = format!("{figures} for {} requests for {silence} ms; {}", gate.in_flight, allowed.words());
        (class, reason("gate", text), PageSays::Nothing)
    });
}

impl Exam {
    /// Holds a silence against a deadline; the first complaint stays.
    pub(crate) fn hold(
        &mut self,
        silence_ms: Ms,
        allowed: Allowed,
        complain: impl FnOnce() -> (StallClass, Reason, PageSays),
    ) {
        if silence_ms <= allowed.ms {
            let due = allowed.ms - silence_ms;
            self.due_in_ms = Some(self.due_in_ms.map_or(due, |other| other.min(due)));
        } else if self.complaint.is_none() {
            let (class, reason, page_says) = complain();
            self.complaint =
                Some(Complaint { class, engine: None, silence_ms, allowed, reason, page_says, died: false });
        }
    }

    /// The same about one of several data-parallel engines; what was held against all of them stays.
    fn hold_one(
        &mut self,
        engine: u32,
        silence_ms: Ms,
        allowed: Allowed,
        complain: impl FnOnce() -> (StallClass, Reason, PageSays),
    ) {
        let others = self.complaint.take();
        self.hold(silence_ms, allowed, complain);
        self.complaint = others.or(self.complaint.take().map(|own| Complaint { engine: Some(engine), ..own }));
    }

    /// Of complaints about two data-parallel engines the one that is longer overdue stays.
    fn keep_worse(&mut self, other: Option<Complaint>) {
        let overdue = |complaint: &Complaint| complaint.silence_ms.saturating_sub(complaint.allowed.ms);
        if other.as_ref().map(overdue) > self.complaint.as_ref().map(overdue) {
            self.complaint = other;
        }
    }
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
