//! The detector: a total function from time and observation to an outcome (V7).
//!
//! It keeps four stages (starting, healthy, suspect, stalled) and asks the other modules: [`crate::excuse`] for the clock,
//! [`crate::signs`] for what moved, [`crate::examine`] for a complaint, [`crate::witness`] for its weight. Two speeds (V6): a
//! complaint fences at once, which is reversible; only a confirmed one asks for evidence and a restart.

mod calm;
mod case;
mod said;
mod trial;

pub use crate::policy::Policy;

use case::Case;
use said::{Said, Spoken, Words};
use trial::Trial;

use crate::ended::examine_ended;
use crate::examine::{Exam, View, examine, reason};
use crate::excuse::{SilenceClock, Tick};
use crate::leaders::leads;
use crate::learned::Learned;
use crate::learner::{Judged, Learner};
use crate::noise::Noise;
use crate::observation::{Ms, Observation};
use crate::rhythm::Rhythm;
use crate::signs::{Sight, Signs};
use crate::slow::SlowMeter;
use crate::startup::{examine_startup, is_startup, ready};
use crate::verdict::{Action, Outcome, StallClass, Verdict};
use crate::witness::Witnesses;
use crate::xid::{Xid, XidBook};

#[derive(Debug, Clone)]
enum Stage {
    Starting,
    Healthy,
    Suspect(Case),
    Stalled(Case),
}

/// The state of one engine's detector.
#[derive(Debug, Clone)]
pub struct Detector {
    policy: Policy,
    started_ms: Ms,
    proc_started_ms: Option<Ms>,
    clock: SilenceClock,
    signs: Signs,
    rhythm: Rhythm,
    learner: Learner,
    witnesses: Witnesses,
    xids: XidBook,
    slow: SlowMeter,
    noise: Noise,
    /// When the last look asked for this one.
    asked_ms: Ms,
    due_in_ms: Option<Ms>,
    stage: Stage,
    /// Has its loop's page been seen, and has it delivered anything?
    paged: bool,
    served: bool,
    /// When a suspect was last let out without proof of life.
    trial: Option<Trial>,
    spoken: Spoken,
}

impl Detector {
    /// A detector for an engine whose process started at `engine_started_ms` (grace is anchored to that, V3).
    pub fn new(policy: Policy, engine_started_ms: Ms) -> Self {
        let mut signs = Signs::default();
        signs.restarted(engine_started_ms);
        Self {
            policy,
            started_ms: engine_started_ms,
            proc_started_ms: None,
            clock: SilenceClock::default(),
            signs,
            rhythm: Rhythm::default(),
            learner: Learner::default(),
            witnesses: Witnesses::default(),
            xids: XidBook::default(),
            slow: SlowMeter::default(),
            noise: Noise::default(),
            asked_ms: Ms::MAX,
            due_in_ms: None,
            stage: Stage::Starting,
            paged: false,
            served: false,
            trial: None,
            spoken: Spoken::since(engine_started_ms),
        }
    }

    /// The same of an engine that was paused then, by the word of a detector before this one ([`paused_at`](Self::paused_at)).
    #[must_use]
    pub fn with_pause(mut self, at_ms: Option<Ms>) -> Self {
        self.clock.pause(at_ms);
        self
    }

    /// The same with what a detector before this one had learned of this very process: of the next one nobody knows that it serves the same
    /// model.
    #[must_use]
    pub fn with_learned(mut self, learned: Learned) -> Self {
        (self.signs.counters_live, self.signs.tokens_live) = (learned.counters_live, learned.tokens_live);
        self.rhythm = learned.rhythm;
        self
    }

    /// What it has learned so far.
    pub fn learned(&self) -> Learned {
        let Signs { counters_live, tokens_live, .. } = self.signs;
        Learned { rhythm: self.rhythm.clone(), counters_live, tokens_live }
    }

    /// Since when generation is paused, where a line of the log said so: whoever is restarted does not read it again.
    pub fn paused_at(&self) -> Option<Ms> {
        self.clock.paused_at()
    }

    /// A fresh process: the stage is Starting again, warm-up is done again, what was learned of the rhythm stays.
    pub fn engine_restarted(&mut self, started_ms: Ms) {
        self.started_ms = started_ms;
        self.proc_started_ms = None;
        self.clock.restarted();
        self.signs.restarted(self.clock.counted(started_ms));
        self.rhythm.restarted();
        self.learner.restarted();
        self.witnesses = Witnesses::default();
        self.xids.restarted(started_ms);
        self.slow.restarted();
        self.stage = Stage::Starting;
        (self.paged, self.served) = (false, false);
        self.trial = None;
    }

    /// One tick. Any observation and any time give an answer; a time that goes backwards counts as no time.
    pub fn step(&mut self, now_ms: Ms, obs: &Observation) -> Outcome {
        let mut outcome = Outcome::default();
        self.step_into(now_ms, obs, &mut outcome);
        outcome
    }

    /// The same into the outcome that this detector filled last (or a default one): where nothing of substance changed, its words
    /// stay and nothing is formatted or allocated. Figures in the words of a calm verdict are then up to a second old.
    pub fn step_into(&mut self, now_ms: Ms, obs: &Observation, outcome: &mut Outcome) {
        let said = self.judge(now_ms, obs);
        self.due_in_ms = said.due_in_ms;
        self.asked_ms = self.spoken.fill(self.clock.now_ms(), said, &self.policy, outcome);
    }

    /// When the nearest deadline of what is silent now passes, from the last look; `None` where nothing is owed or a case is open.
    pub fn due_in_ms(&self) -> Option<Ms> {
        self.due_in_ms
    }

    /// Xids that may concern the engine (none that a delivery has proven harmless): what an episode is to name.
    pub fn xids(&self) -> &[Xid] {
        self.xids.xids()
    }

    /// The caller's word that it will look at another time than [`Outcome::check_again_in_ms`], so that this is not taken for lateness.
    pub fn looks_again_in(&mut self, ms: Ms) {
        self.asked_ms = ms;
    }

    fn judge(&mut self, now_ms: Ms, obs: &Observation) -> Said {
        self.notice_restart(obs);
        let tick = self.clock.tick(now_ms, obs, self.in_startup(), &self.policy);
        let sight = self.signs.look(&tick, obs, &self.policy);
        self.meet_page(&sight);
        // what other data-parallel engines deliver speaks for none that is accused
        let delivered = self.accused().map_or(sight.delivered(), |engine| self.signs.delivers(engine));
        self.witnesses.look(&tick, obs, &sight, delivered, &self.policy);
        self.xids.look(tick.now_ms, obs, delivered);
        self.noise.look(&tick, &sight, self.rhythm.is_warm(&self.policy), self.asked_ms);
        if sight.delivered() {
            self.clock.delivered(sight.delivered_ms(tick.now_ms));
        }
        let works = sight.delivered() || self.signs.leaders.prefills();
        if works || sight.owed.is_none() {
            self.clock.moved();
        }
        // what starts owes nothing, and has something to do
        let fine = if self.in_startup() { sight.startup_solid } else { sight.owed.is_none() };
        if works || fine {
            self.clock.works();
        }
        if let Some(said) = self.beyond_judgement(&tick, &sight) {
            return said;
        }
        let exam = self.examine(&tick, &sight);
        let judged = Judged { signs: &self.signs, exam: &exam, policy: &self.policy };
        self.learner.learn(&tick, &sight, &mut self.rhythm, &judged);
        let slow = self.slow.tick(&tick, &sight, &self.policy);
        let stage = std::mem::replace(&mut self.stage, Stage::Healthy);
        match stage {
            Stage::Starting => self.starting(&tick, &sight, exam),
            Stage::Healthy => self.healthy(&tick, &sight, obs.draining, slow, exam),
            Stage::Suspect(case) => self.suspect(&tick, &sight, obs.draining, case, exam),
            Stage::Stalled(case) => self.stalled(&tick, &sight, obs.draining, case, exam),
        }
    }

    /// Of several data-parallel engines the one that a case is open against.
    fn accused(&self) -> Option<u32> {
        match &self.stage {
            Stage::Suspect(case) | Stage::Stalled(case) => case.engine,
            Stage::Starting | Stage::Healthy => None,
        }
    }

    /// A process that started at another time is another process, whether or not anybody told.
    fn notice_restart(&mut self, obs: &Observation) {
        let Some(proc) = obs.proc.value.as_ref().filter(|p| p.alive) else { return };
        let known = self.proc_started_ms.replace(proc.started_ms);
        if known.is_some_and(|known| known.abs_diff(proc.started_ms) > 500) {
            self.engine_restarted(proc.started_ms);
            self.proc_started_ms = Some(proc.started_ms);
        }
    }

    /// A front end may answer before the loop has a page, and was believed; a first page that says that it starts knows better, of an engine
    /// that has delivered nothing.
    fn meet_page(&mut self, sight: &Sight<'_>) {
        self.served |= sight.delivered();
        let first = sight.page.is_some() && !std::mem::replace(&mut self.paged, true);
        if first && !self.served && sight.pages.iter().any(|page| leads(page) && is_startup(page.phase)) {
            // and a case was one against an engine that serves
            self.stage = Stage::Starting;
        }
    }

    /// Verdicts that need no deadline: unkillable, dead, unknown.
    fn beyond_judgement(&mut self, tick: &Tick, sight: &Sight<'_>) -> Option<Said> {
        if let Some(proc) = sight.proc {
            let outlives = proc
                .kill_sent_ms
                .map(|sent| tick.now_ms.saturating_sub(sent))
                .filter(|ms| *ms > self.policy.unkillable_ms);
            if let Some(ms) = outlives.filter(|_| proc.alive) {
                let said = Words::List(vec![reason(
                    "proc",
                    format!("SIGKILL was sent {ms} ms ago and the process is still there: only the node can help"),
                )]);
                let verdict = Verdict::Stalled(StallClass::Unkillable);
                return Some(Said::new(verdict, said, &[Action::Fence, Action::EscalateToNode]));
            }
            if !proc.alive {
                self.stage = Stage::Starting;
                (self.paged, self.served) = (false, false);
                self.signs.restarted(tick.counted_ms);
                let gone = reason("proc", "the engine's process is gone".to_owned());
                let xids = self.xids().iter().map(|xid| reason("gpu", xid.words()));
                let said = Words::List(std::iter::once(gone).chain(xids).collect());
                return Some(Said::new(Verdict::Dead, said, &[Action::Fence]));
            }
        }
        if sight.blind() {
            // I4: a blind agent says so and holds nothing against anybody
            if let Stage::Suspect(case) = &self.stage {
                self.stage = if case.in_startup { Stage::Starting } else { Stage::Healthy };
            }
            let said =
                Words::List(vec![reason("policy", "no source has said anything recent about this engine".to_owned())]);
            return Some(Said::new(Verdict::Unknown, said, &[]));
        }
        None
    }

    fn examine(&self, tick: &Tick, sight: &Sight<'_>) -> Exam {
        let view = self.view(tick, sight);
        let starts = self.in_startup() && !ready(&view);
        let mut exam = if starts { examine_startup(&view) } else { examine(&view) };
        examine_ended(&view, starts, &mut exam);
        Exam { confirmed: matches!(self.stage, Stage::Stalled(_)), ..exam }
    }

    /// Has it not been seen to serve yet?
    fn in_startup(&self) -> bool {
        match &self.stage {
            Stage::Starting => true,
            Stage::Suspect(case) | Stage::Stalled(case) => case.in_startup,
            Stage::Healthy => false,
        }
    }

    fn view<'a>(&'a self, tick: &'a Tick, sight: &'a Sight<'a>) -> View<'a> {
        View {
            tick,
            sight,
            signs: &self.signs,
            rhythm: &self.rhythm,
            policy: &self.policy,
            burning: self.witnesses.burning(),
            steps_by_its_cpu: self.witnesses.steps_by_its_cpu(),
            idle_ms: self.witnesses.idle_ms(tick),
            xids: self.xids(),
            // the noise of one engine says nothing about another's
            native_floor_ms: if self.signs.leaders.several() {
                self.policy.native_floor_ms
            } else {
                self.noise.floor_ms(tick.now_ms, &self.policy)
            },
        }
    }
}
