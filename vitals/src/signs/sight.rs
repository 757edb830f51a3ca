//! What one tick sees, and what of it moved since the last.

use crate::ended::{self, EndedObs};
use crate::excuse::Tick;
use crate::leaders::leads;
use crate::observation::{FrontendObs, GateObs, MetricsObs, Ms, Observation, PageObs, ProcObs, RasObs};
use crate::owed::Owed;
use crate::policy::Policy;

/// What one tick found; borrowed views of the fresh sources.
#[derive(Debug, Clone)]
pub struct Sight<'a> {
    pub gate: Option<&'a GateObs>,
    /// The leader's page (of data-parallel engines each has its own, see [`crate::leaders`], and this is the first's).
    pub page: Option<&'a PageObs>,
    pub pages: &'a [PageObs],
    pub metrics: Option<&'a MetricsObs>,
    pub proc: Option<&'a ProcObs>,
    /// A process by which the engine steps that has ended, where nobody wished it to.
    pub ended: Option<&'a EndedObs>,
    pub ras: Option<&'a RasObs>,
    pub frontend: Option<&'a FrontendObs>,
    /// For how long the front end has not answered, in counted time; `None` while it does, or where nothing is known of it now.
    pub(crate) frontend_silent_ms: Option<Ms>,
    /// Requests that the pages say are owed.
    pub page_owed: u32,
    pub owed: Option<Owed>,
    /// Tokens or bytes arrived since the last tick, by source.
    pub gate_delivered: bool,
    /// Chunks (or, without a gate, tokens) that arrived since the last tick.
    pub delivered_count: u64,
    /// Requests of the gate that had their first byte, or ended, since the last tick.
    pub answered_count: u64,
    /// Clients who gave up since the last tick, as the gate saw it.
    pub left_count: u64,
    /// Prompt tokens that came to the gate since the last tick.
    pub prompt_tokens_came: u64,
    /// The gate owed nothing at the last tick and does now: no silence before that concerns it, whatever lesser sources said.
    pub(super) gate_began: bool,
    pub page_delivered: bool,
    pub metrics_delivered: bool,
    /// Steps were counted since the scrape before.
    pub iterations_moved: bool,
    /// Any progress series of the scrape moved since the scrape before.
    pub metrics_moved: bool,
    /// Where it did: the time of the scrape before, since which the delivery happened (the caller's clock).
    pub metrics_since_ms: Ms,
    /// The first leader completed this many steps since the last tick.
    pub steps_done: u64,
    /// Start-up moved: work done, phase, or CPU time of a foreign engine.
    pub startup_moved: bool,
    /// The same without CPU time: pages, bytes read or written, compilers.
    pub startup_solid: bool,
    pub(super) native: bool,
}

impl<'a> Sight<'a> {
    /// What is fresh of this observation; nothing is known yet of what moved.
    pub(super) fn of(now_ms: Ms, obs: &'a Observation, policy: &Policy) -> Self {
        let proc = obs.proc.fresh(now_ms, policy.metrics_fresh_ms);
        let pages: &[PageObs] = obs.pages.fresh(now_ms, policy.fresh_ms).map_or(&[], Vec::as_slice);
        Self {
            gate: obs.gate.fresh(now_ms, policy.fresh_ms),
            page: pages.iter().filter(|page| leads(page)).min_by_key(|page| page.rank),
            pages,
            metrics: obs.metrics.fresh(now_ms, policy.metrics_fresh_ms),
            proc,
            ended: ended::of(proc, obs),
            ras: obs.ras.fresh(now_ms, policy.ras_fresh_ms).filter(|ras| ras.answered),
            frontend: obs.frontend.fresh(now_ms, policy.metrics_fresh_ms),
            frontend_silent_ms: None,
            page_owed: 0,
            owed: None,
            gate_delivered: false,
            delivered_count: 0,
            answered_count: 0,
            left_count: 0,
            prompt_tokens_came: 0,
            gate_began: false,
            page_delivered: false,
            metrics_delivered: false,
            iterations_moved: false,
            metrics_moved: false,
            metrics_since_ms: 0,
            steps_done: 0,
            startup_moved: false,
            startup_solid: false,
            native: false,
        }
    }
}

impl Sight<'_> {
    /// Did anything reach a client or a client's queue?
    pub fn delivered(&self) -> bool {
        self.gate_delivered || self.page_delivered || self.metrics_delivered
    }

    /// Did a silence end: the gate's, where there is one, for it sees what reaches clients?
    pub fn heard(&self) -> bool {
        if self.gate.is_some() { self.gate_delivered } else { self.delivered() }
    }

    /// Does the page keep the contract's leases (H5)? One without is a foreign engine's page and no more than a witness.
    pub fn native(&self) -> Option<&PageObs> {
        self.page.filter(|_| self.native)
    }

    /// Is there no source at all (I4: a blind agent says Unknown)?
    pub fn blind(&self) -> bool {
        self.gate.is_none() && self.page.is_none() && self.metrics.is_none() && self.proc.is_none()
    }

    /// When what was delivered since the last look came, for sure, on the caller's clock: a page or a scrape that was missing for a while tells
    /// of what came meanwhile.
    pub fn delivered_ms(&self, now_ms: Ms) -> Ms {
        let gate = self.gate.filter(|_| self.gate_delivered).map(|gate| gate.last_delivery_ms.unwrap_or(now_ms));
        let page = self.pages.iter().filter(|_| self.page_delivered).map(|page| page.published_ms).max();
        let metrics = self.metrics_delivered.then_some(self.metrics_since_ms);
        gate.max(page).max(metrics).unwrap_or(now_ms).min(now_ms)
    }

    /// Is the front end known to be silent for this long?
    pub fn frontend_silent(&self, at_least_ms: Ms) -> bool {
        self.frontend_silent_ms.is_some_and(|silent_ms| silent_ms >= at_least_ms)
    }
}

/// When tokens that a page has counted since the last look were made: a page does not say, but a gate knows when the last of them came.
pub(crate) fn handed_on_at(tick: &Tick, sight: &Sight<'_>) -> Ms {
    let heard = sight.gate.filter(|_| sight.gate_delivered).and_then(|gate| gate.last_delivery_ms);
    heard.map(|at| tick.mark(at)).filter(|at| *at > tick.counted_before_ms).unwrap_or(tick.counted_ms)
}
