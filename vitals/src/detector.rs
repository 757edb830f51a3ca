//! The detector: a total function from time and observation to an outcome (V7).
//!
//! It keeps four stages (starting, healthy, suspect, stalled) and asks the other modules: [`crate::excuse`] for the clock,
//! [`crate::signs`] for what moved, [`crate::examine`] for a complaint, [`crate::witness`] for its weight. Two speeds (V6): a
//! complaint fences at once, which is reversible; only a confirmed one asks for evidence and a restart.

pub use crate::policy::Policy;

use crate::deadlines::Learner;
use crate::examine::{Complaint, Exam, View, examine, reason, source_name};
use crate::excuse::{Excuse, SilenceClock, Tick};
use crate::observation::{Ms, Observation, PagePhase};
use crate::rhythm::Rhythm;
use crate::signs::{Sight, Signs};
use crate::slow::SlowMeter;
use crate::startup::{examine_startup, has_come_up, ready};
use crate::verdict::{Action, Outcome, Reason, StallClass, Verdict};
use crate::witness::{Strength, Witnesses};

/// An open suspicion.
#[derive(Debug, Clone)]
struct Case {
    class: StallClass,
    began_ms: Ms,
    began_counted: Ms,
    /// What was said against the engine when the case was opened or confirmed.
    reasons: Vec<Reason>,
    /// Counted time since which nothing is owed any more.
    drained_at: Option<Ms>,
    /// It began before the engine could serve.
    in_startup: bool,
}

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
    slow: SlowMeter,
    stage: Stage,
    /// When a suspect was last let out without proof of life.
    trial_ms: Option<Ms>,
    said: Verdict,
    since_ms: Ms,
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
            slow: SlowMeter::default(),
            stage: Stage::Starting,
            trial_ms: None,
            said: Verdict::Unknown,
            since_ms: engine_started_ms,
        }
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
        self.slow.restarted();
        self.stage = Stage::Starting;
        self.trial_ms = None;
    }

    /// One tick. Any observation and any time give an answer; a time that goes backwards counts as no time.
    pub fn step(&mut self, now_ms: Ms, obs: &Observation) -> Outcome {
        self.notice_restart(obs);
        let tick = self.clock.tick(now_ms, obs, &self.policy);
        let sight = self.signs.look(&tick, obs, &self.policy);
        self.witnesses.look(&tick, obs, &sight, &self.policy);
        if sight.delivered() {
            self.clock.delivered();
        }
        if let Some(outcome) = self.beyond_judgement(&tick, &sight) {
            return outcome;
        }
        let exam = self.examine(&tick, &sight);
        self.learner.learn(&tick, &sight, &self.signs, &mut self.rhythm, &exam);
        let slow = self.slow.tick(&tick, &sight, &self.policy);
        let stage = std::mem::replace(&mut self.stage, Stage::Healthy);
        match stage {
            Stage::Starting => self.starting(&tick, &sight, exam),
            Stage::Healthy => self.healthy(&tick, &sight, obs.draining, slow, exam),
            Stage::Suspect(case) => self.suspect(&tick, &sight, obs.draining, case, exam),
            Stage::Stalled(case) => self.stalled(&tick, &sight, obs.draining, case, exam),
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

    /// Verdicts that need no deadline: unkillable, dead, unknown.
    fn beyond_judgement(&mut self, tick: &Tick, sight: &Sight<'_>) -> Option<Outcome> {
        if let Some(proc) = sight.proc {
            let outlives = proc
                .kill_sent_ms
                .map(|sent| tick.now_ms.saturating_sub(sent))
                .filter(|ms| *ms > self.policy.unkillable_ms);
            if let Some(ms) = outlives.filter(|_| proc.alive) {
                let said = vec![reason(
                    "proc",
                    format!("SIGKILL was sent {ms} ms ago and the process is still there: only the node can help"),
                )];
                let verdict = Verdict::Stalled(StallClass::Unkillable);
                return Some(self.say(tick, verdict, said, vec![Action::Fence, Action::EscalateToNode], None));
            }
            if !proc.alive {
                self.stage = Stage::Starting;
                self.signs.restarted(tick.counted_ms);
                let said = vec![reason("proc", "the engine's process is gone".to_owned())];
                return Some(self.say(tick, Verdict::Dead, said, vec![Action::Fence], None));
            }
        }
        if sight.blind() {
            // I4: a blind agent says so and holds nothing against anybody
            if matches!(self.stage, Stage::Suspect(_)) {
                self.stage = Stage::Healthy;
            }
            let said = vec![reason("policy", "no source has said anything recent about this engine".to_owned())];
            return Some(self.say(tick, Verdict::Unknown, said, vec![], None));
        }
        None
    }

    fn examine(&self, tick: &Tick, sight: &Sight<'_>) -> Exam {
        let view = self.view(tick, sight);
        let in_startup = match &self.stage {
            Stage::Starting => true,
            Stage::Suspect(case) | Stage::Stalled(case) => case.in_startup,
            Stage::Healthy => false,
        };
        if in_startup && !ready(&view) { examine_startup(&view) } else { examine(&view) }
    }

    fn view<'a>(&'a self, tick: &'a Tick, sight: &'a Sight<'a>) -> View<'a> {
        View {
            tick,
            sight,
            signs: &self.signs,
            rhythm: &self.rhythm,
            policy: &self.policy,
            burning: self.witnesses.burning(),
        }
    }

    fn starting(&mut self, tick: &Tick, sight: &Sight<'_>, exam: Exam) -> Outcome {
        if ready(&self.view(tick, sight)) {
            self.stage = Stage::Healthy;
            return self.healthy(tick, sight, false, false, exam);
        }
        if let Some(complaint) = exam.complaint.filter(|_| tick.excuse.is_none()) {
            return self.open_case(tick, sight, complaint, true);
        }
        self.stage = Stage::Starting;
        let (_, text) = starting_text(tick, sight, self.started_ms);
        // not before it can serve; where nothing is known of its front end the gate is left as it is
        let shut = sight.page.is_some() || sight.frontend.is_some_and(|f| !has_come_up(f));
        let actions = if shut { vec![Action::Fence] } else { vec![] };
        self.say(tick, Verdict::Starting, vec![reason("page", text)], actions, exam.due_in_ms)
    }

    fn healthy(&mut self, tick: &Tick, sight: &Sight<'_>, draining: bool, slow: bool, exam: Exam) -> Outcome {
        if let Some(complaint) = exam.complaint.filter(|_| tick.excuse.is_none()) {
            return self.open_case(tick, sight, complaint, false);
        }
        self.stage = Stage::Healthy;
        let (verdict, said) = self.calm_verdict(tick, sight, draining, slow);
        self.say(tick, verdict, said, vec![Action::Unfence], exam.due_in_ms)
    }

    /// The verdict while nothing is held against the engine.
    fn calm_verdict(&self, tick: &Tick, sight: &Sight<'_>, draining: bool, slow: bool) -> (Verdict, Vec<Reason>) {
        let mut said = Vec::new();
        if let Some(excuse) = tick.excuse {
            let (source, text) = excuse.sentence();
            said.push(reason(source, text.to_owned()));
        }
        let page_drains = sight.page.is_some_and(|page| page.phase == PagePhase::Drain);
        let verdict = if matches!(tick.excuse, Some(Excuse::Asleep | Excuse::Paused)) {
            Verdict::Sleeping
        } else if draining || page_drains {
            said.push(reason("policy", "the engine is being drained".to_owned()));
            Verdict::Draining
        } else if let Some(owed) = sight.owed {
            let how =
                if tick.excuse.is_some() { "their silence is excused" } else { "deliveries are within their deadline" };
            said.push(reason(source_name(owed.source), format!("{} requests owed; {how}", owed.requests)));
            if let (true, Some((pace, usual))) = (slow, self.slow.figures()) {
                said.push(reason("policy", format!("{pace} ms a token and request; its own usual is {usual} ms")));
                Verdict::Slow
            } else {
                Verdict::Progressing
            }
        } else {
            said.push(reason("gate", "no work is owed".to_owned()));
            Verdict::Idle
        };
        (verdict, said)
    }

    fn open_case(&mut self, tick: &Tick, sight: &Sight<'_>, complaint: Complaint, in_startup: bool) -> Outcome {
        let case = Case {
            class: complaint.class.clone(),
            began_ms: tick.now_ms,
            began_counted: tick.counted_ms,
            reasons: vec![complaint.reason.clone()],
            drained_at: None,
            in_startup,
        };
        let exam = Exam { complaint: Some(complaint), ..Exam::default() };
        self.hold_case(tick, sight, case, exam)
    }

    fn suspect(&mut self, tick: &Tick, sight: &Sight<'_>, draining: bool, case: Case, exam: Exam) -> Outcome {
        if self.proves_life(tick, sight, &case, &exam) || tick.excuse.is_some_and(Excuse::is_declared) {
            return self.release(tick, sight, draining, exam);
        }
        self.hold_case(tick, sight, case, exam)
    }

    /// A suspicion goes on: confirmed when its time has come, let out on trial when nothing is owed any more or it grows too old.
    fn hold_case(&mut self, tick: &Tick, sight: &Sight<'_>, mut case: Case, exam: Exam) -> Outcome {
        let age = tick.since(case.began_counted);
        let owed = sight.owed.is_some() || case.in_startup;
        let relapse = self.relapsing(tick);
        let weighed =
            exam.complaint.as_ref().map(|complaint| self.witnesses.weigh(&self.view(tick, sight), complaint, relapse));
        if let (Some(complaint), Some((strength, witnesses))) = (&exam.complaint, weighed) {
            case.reasons = vec![complaint.reason.clone()];
            case.reasons.extend(witnesses);
            let counts = owed && tick.excuse.is_none() && complaint_is_current(sight, strength);
            if counts && age >= strength.confirm_ms(&self.policy) {
                case.class = complaint.class.clone();
                case.reasons.push(reason("policy", format!("suspect for {age} ms: confirmed")));
                return self.hold_stall(tick, case);
            }
        }
        case.drained_at =
            if owed && exam.complaint.is_some() { None } else { Some(case.drained_at.unwrap_or(tick.counted_ms)) };
        // no trial behind a front end that is known not to answer
        let may_serve = sight.frontend.is_none_or(|f| f.answers);
        let drained = may_serve && case.drained_at.is_some_and(|at| tick.since(at) >= self.policy.trial_after_ms);
        if drained || tick.now_ms.saturating_sub(case.began_ms) >= self.policy.suspect_ms_max {
            self.trial_ms = Some(tick.now_ms);
            return self.release(tick, sight, false, exam);
        }
        let said = case.reasons.clone();
        let verdict = Verdict::Suspect(case.class.clone());
        self.stage = Stage::Suspect(case);
        self.say(tick, verdict, said, vec![Action::Fence], None)
    }

    fn stalled(&mut self, tick: &Tick, sight: &Sight<'_>, draining: bool, mut case: Case, exam: Exam) -> Outcome {
        // a stall that delivers is none: a restart that was not granted yet is no longer wanted; nor while a person says hands off
        if self.proves_life(tick, sight, &case, &exam) || tick.excuse.is_some_and(Excuse::is_declared) {
            return self.release(tick, sight, draining, exam);
        }
        let drained_at = case.drained_at.unwrap_or(tick.counted_ms);
        case.drained_at = self.may_have_healed(tick, sight, &case).then_some(drained_at);
        if case.drained_at.is_some_and(|at| tick.since(at) >= self.policy.trial_after_ms) {
            self.trial_ms = Some(tick.now_ms);
            return self.release(tick, sight, draining, exam);
        }
        self.hold_stall(tick, case)
    }

    /// Confirmed, and behind the fence there is nothing left that it could show progress with: nothing speaks against a trial. One
    /// that fails is not repeated while its relapse counts.
    fn may_have_healed(&self, tick: &Tick, sight: &Sight<'_>, case: &Case) -> bool {
        let no_kill = sight.proc.is_none_or(|p| p.kill_sent_ms.is_none() && !matches!(p.state, Some('T' | 'D' | 'Z')));
        sight.owed.is_none()
            && !case.in_startup
            && sight.frontend.is_some_and(|f| f.answers)
            && no_kill
            && !self.view(tick, sight).step_beyond_lease()
            && !self.relapsing(tick)
    }

    /// Was it let out on trial a short while ago?
    fn relapsing(&self, tick: &Tick) -> bool {
        self.trial_ms.is_some_and(|at| tick.now_ms.saturating_sub(at) < self.policy.relapse_ms)
    }

    fn hold_stall(&mut self, tick: &Tick, case: Case) -> Outcome {
        let verdict = Verdict::Stalled(case.class.clone());
        let said = case.reasons.clone();
        self.stage = Stage::Stalled(case);
        self.say(tick, verdict, said, vec![Action::Fence, Action::CaptureEvidence, Action::WantRestart], None)
    }

    fn release(&mut self, tick: &Tick, sight: &Sight<'_>, draining: bool, exam: Exam) -> Outcome {
        self.stage = Stage::Healthy;
        let (verdict, said) = self.calm_verdict(tick, sight, draining, false);
        self.say(tick, verdict, said, vec![Action::Unfence], exam.due_in_ms)
    }

    /// Hysteresis: what ends a case is a thing that the class says cannot happen, never a gauge or an answer of `/health`.
    fn proves_life(&self, tick: &Tick, sight: &Sight<'_>, case: &Case, exam: &Exam) -> bool {
        // what the front end answers by itself is no progress of an engine that is in the same step beyond its lease
        if sight.gate_delivered && !self.view(tick, sight).step_beyond_lease() {
            return true;
        }
        match case.class {
            StallClass::StartupStalled => {
                sight.startup_moved
                    || (exam.complaint.is_none() && sight.page.is_none() && sight.frontend.is_some_and(has_come_up))
            }
            StallClass::FrontendStalled => {
                sight.gate.is_none_or(|gate| gate.in_flight == 0) && sight.frontend.is_some_and(|f| f.answers)
            }
            StallClass::Livelock | StallClass::DecodeStalled => sight.page_delivered || metrics_prove(sight, case),
            _ => {
                sight.page_delivered || metrics_prove(sight, case) || (sight.steps_done > 0 && exam.complaint.is_none())
            }
        }
    }

    fn say(
        &mut self,
        tick: &Tick,
        verdict: Verdict,
        reasons: Vec<Reason>,
        actions: Vec<Action>,
        due_in_ms: Option<Ms>,
    ) -> Outcome {
        if verdict != self.said {
            self.said = verdict.clone();
            self.since_ms = tick.now_ms;
        }
        let fenced = actions.contains(&Action::Fence);
        // never later than the next deadline, so that a fence is not a whole tick late
        let check_again_in_ms =
            due_in_ms.map_or(self.policy.tick_ms, |due| due.saturating_add(1).clamp(20, self.policy.tick_ms.max(20)));
        Outcome { verdict, since_ms: self.since_ms, reasons, actions, check_again_in_ms, fenced }
    }
}

/// A scrape counts what was delivered since the scrape before it: it proves life only where that one, too, was taken after the
/// case was opened. A native page knows better and sooner.
fn metrics_prove(sight: &Sight<'_>, case: &Case) -> bool {
    sight.native().is_none() && sight.metrics_delivered && sight.metrics_since_ms >= case.began_ms
}

/// Work that only a frozen gauge remembers confirms nothing without a further witness.
fn complaint_is_current(sight: &Sight<'_>, strength: Strength) -> bool {
    let gate_is_empty = sight.gate.is_some_and(|gate| gate.in_flight == 0);
    let by_gauges = gate_is_empty && sight.native().is_none();
    !by_gauges || strength >= Strength::Moderate
}

fn starting_text(tick: &Tick, sight: &Sight<'_>, started_ms: Ms) -> (Ms, String) {
    let age = tick.now_ms.saturating_sub(started_ms);
    let text = match sight.page {
        Some(page) => format!(
            "start-up phase {:?}, {} of {} done, {age} ms after the process started",
            page.phase, page.work_done, page.work_total
        ),
        None => format!("the engine does not serve yet, {age} ms after its process started"),
    };
    (age, text)
}
