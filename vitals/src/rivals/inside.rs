//! What the rivals look at, read from an observation: the engine's own step counter and work, deliveries, and a sleeping poller.
//! Touches nothing but the values it is given.

use crate::observation::{Ms, Observation, PageObs, PagePhase};

/// What a thread inside the engine would know at this moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Inside {
    /// Steps completed. Of several ranks the slowest one's: a group steps together. Of data-parallel engines, which do not, those that have work;
    /// a page that has never shown a step beside one of its group that has is a worker's without its loop.
    pub steps: Option<u64>,
    /// Is a batch on the device, or work waiting for one?
    pub busy: bool,
    /// Loading, compiling, capturing or warming up.
    pub starting: bool,
    /// When the step under way began, where a page says so.
    pub step_started_ms: Option<Ms>,
}

impl Inside {
    /// From the page where there is one; else from `/metrics` and the gate, which is the best that an outsider can lend the rule.
    pub fn read(obs: &Observation) -> Self {
        match obs.pages.value.as_deref().filter(|pages| !pages.is_empty()) {
            Some(pages) => {
                let group = |engine: u32| pages.iter().filter(move |rank| rank.engine() == engine);
                let is_busy = |rank: &PageObs| rank.step_started_ms.is_some() || rank.running > 0;
                let works = |page: &&PageObs| group(page.engine()).any(is_busy);
                let steps = |page: &&PageObs| {
                    page.steps_completed > 0 || group(page.engine()).all(|rank| rank.steps_completed == 0)
                };
                let busy = pages.iter().any(is_busy);
                let of_work = pages.iter().filter(|page| !busy || works(page));
                Self {
                    steps: of_work.filter(steps).map(|page| page.steps_completed).min(),
                    busy,
                    starting: pages.iter().any(|page| is_start(page.phase)),
                    step_started_ms: pages.iter().filter_map(|page| page.step_started_ms).min(),
                }
            }
            None => {
                let metrics = obs.metrics.value.as_ref();
                let steps =
                    metrics.and_then(|m| m.iterations.or(m.generation_tokens)).map(|count| count.max(0.0) as u64);
                let gate = obs.gate.value.as_ref().is_some_and(|gate| gate.in_flight > 0);
                let gauges = metrics.is_some_and(|m| m.running.unwrap_or(0.0) > 0.0);
                Self { steps, busy: gate || gauges, ..Self::default() }
            }
        }
    }
}

fn is_start(phase: PagePhase) -> bool {
    matches!(phase, PagePhase::Load | PagePhase::Compile | PagePhase::Capture | PagePhase::WarmUp)
}

/// Since when the engine has been in one and the same step, or busy without completing one.
#[derive(Debug, Default)]
pub struct StepAge {
    steps: Option<u64>,
    since_ms: Option<Ms>,
}

impl StepAge {
    /// The age of the step under way; `None` while there is no work.
    pub fn look(&mut self, now_ms: Ms, obs: &Observation) -> Option<Ms> {
        let inside = Inside::read(obs);
        if !inside.busy || inside.starting {
            self.since_ms = None;
        } else if inside.steps != self.steps || self.since_ms.is_none() {
            self.since_ms = Some(now_ms);
        }
        self.steps = inside.steps;
        let begun_ms = inside.step_started_ms.filter(|_| inside.busy).or(self.since_ms)?;
        Some(now_ms.saturating_sub(begun_ms))
    }
}

/// What has been delivered to clients: by the gate, else by the page, else by the engine's own counter of tokens.
#[derive(Debug, Default)]
pub struct Deliveries {
    last: Option<(u64, u64)>,
}

impl Deliveries {
    /// Was something delivered since the last look? A counter that begins anew is no delivery.
    pub fn moved(&mut self, obs: &Observation) -> bool {
        let Some(now) = count(obs) else { return false };
        let before = self.last.replace(now);
        before.is_some_and(|before| before.0 == now.0 && now.1 > before.1)
    }
}

/// The source's epoch and its count.
fn count(obs: &Observation) -> Option<(u64, u64)> {
    if let Some(gate) = &obs.gate.value {
        return Some((gate.epoch, gate.chunks_delivered.saturating_add(gate.requests_done)));
    }
    if let Some(pages) = obs.pages.value.as_deref().filter(|pages| !pages.is_empty()) {
        return Some((u64::MAX, pages.iter().map(|page| page.tokens_delivered).sum()));
    }
    let tokens = obs.metrics.value.as_ref()?.generation_tokens?;
    Some((u64::MAX - 1, tokens.max(0.0) as u64))
}

/// Are clients waiting for something: by the gate where there is one, else by what the engine says of itself.
pub fn owed(obs: &Observation) -> bool {
    match &obs.gate.value {
        Some(gate) => gate.in_flight > 0,
        None => Inside::read(obs).busy,
    }
}

/// Would a tiny request sent to an idle engine be answered? Not by a stopped process or a dead one, nor behind a silent front end.
/// An idle engine that hangs in any other way cannot be told from a healthy one here: nobody sent the request.
pub fn answers_when_idle(obs: &Observation) -> bool {
    let stopped = obs.proc.value.as_ref().is_some_and(|proc| !proc.alive || proc.state == Some('T'));
    let silent = obs.frontend.value.is_some_and(|frontend| !frontend.answers);
    !stopped && !silent
}

/// Has the front end answered since the engine's start? Before that a start-up probe is in charge, and nothing is registered yet.
/// Where nobody looked at the front end it counts as up.
pub fn is_up(obs: &Observation) -> bool {
    obs.frontend.value.is_none_or(|frontend| frontend.ever_answered)
}

/// A loop of "look, then sleep for a period". A sleep never ends early, so the next look is at the first observation at which the
/// period has passed.
#[derive(Debug)]
pub struct Poll {
    period_ms: Ms,
    next_ms: Option<Ms>,
}

impl Poll {
    /// The first look is at the first observation.
    pub fn every(period_ms: Ms) -> Self {
        Self { period_ms, next_ms: None }
    }

    /// Is it time to look?
    pub fn due(&mut self, now_ms: Ms) -> bool {
        if self.next_ms.is_some_and(|next| now_ms < next) {
            return false;
        }
        self.next_ms = Some(now_ms.saturating_add(self.period_ms));
        true
    }
}
