//! A case against the engine: opened by a complaint (fence), confirmed by its age and its witnesses, ended by proof of life or let
//! out on trial (V6). The stages themselves are the detector's.

use super::said::{Said, Words};
use super::trial::Trial;
use super::{Detector, Stage};
use crate::examine::{Basis, Complaint, Exam, reason};
use crate::excuse::{Excuse, Tick};
use crate::observation::Ms;
use crate::owed::OwedSource;
use crate::signs::Sight;
use crate::startup::{has_come_up, ready};
use crate::verdict::{Action, Reason, StallClass, Verdict};
use crate::witness::{Strength, Weight};

/// An open suspicion.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) class: StallClass,
    /// Of several data-parallel engines the one that it is against.
    pub(super) engine: Option<u32>,
    pub(super) began_ms: Ms,
    pub(super) began_counted: Ms,
    /// The longest silence that counted for it, without what was carried from the case before.
    pub(super) silence_ms: Ms,
    /// What was said against the engine when the case was opened or confirmed.
    reasons: Vec<Reason>,
    /// Counted time since which nothing is owed any more.
    drained_at: Option<Ms>,
    /// Only a floor that came down for a quiet machine made it.
    low_floor: bool,
    /// Nothing but a stopped process made it.
    stopped: bool,
    /// It began before the engine could serve.
    pub(super) in_startup: bool,
}

impl Detector {
    pub(super) fn open_case(&mut self, tick: &Tick, sight: &Sight<'_>, complaint: Complaint, in_startup: bool) -> Said {
        let case = Case {
            class: complaint.class.clone(),
            engine: complaint.engine,
            began_ms: tick.now_ms,
            began_counted: tick.counted_ms,
            silence_ms: 0,
            reasons: vec![complaint.reason.clone()],
            drained_at: None,
            low_floor: complaint.allowed.basis == Basis::Learned
                && sight.native().is_some()
                && complaint.allowed.ms < self.policy.native_floor_ms,
            stopped: complaint.reason.source == "proc" && !complaint.died,
            in_startup,
        };
        let exam = Exam { complaint: Some(complaint), ..Exam::default() };
        self.hold_case(tick, sight, case, exam)
    }

    pub(super) fn suspect(&mut self, tick: &Tick, sight: &Sight<'_>, draining: bool, case: Case, exam: Exam) -> Said {
        let declared = tick.excuse.is_some_and(Excuse::is_declared);
        let died = |complaint: &Complaint| complaint.died && complaint.class != case.class && !declared;
        if let Some(complaint) = exam.complaint.clone().filter(died) {
            // another matter, whose own time counts: an engine that ends as a whole does so within it
            return self.open_case(tick, sight, complaint, case.in_startup);
        }
        if declared || self.proves_life(tick, sight, &case, &exam) {
            if case.low_floor {
                self.noise.was_wrong(tick.now_ms, &self.policy);
            }
            if !declared && let Some(complaint) = exam.complaint.clone().filter(|c| accuses_another(&case, c)) {
                return self.open_case(tick, sight, complaint, false);
            }
            return self.release(tick, sight, &case, draining, exam);
        }
        self.hold_case(tick, sight, case, exam)
    }

    /// A suspicion goes on: confirmed when its time has come, let out on trial when nothing is owed any more or it grows too old.
    fn hold_case(&mut self, tick: &Tick, sight: &Sight<'_>, mut case: Case, exam: Exam) -> Said {
        let age = tick.since(case.began_counted);
        // whose process has ended can serve nobody, whether or not anybody waits
        let died = has_died(&exam);
        let owed = sight.owed.is_some() || case.in_startup || died;
        let relapse = self.relapsing(tick);
        let weighed =
            exam.complaint.as_ref().map(|complaint| self.witnesses.weigh(&self.view(tick, sight), complaint, relapse));
        let mut proof_is_near = false;
        if let (Some(complaint), Some(weight)) = (&exam.complaint, weighed) {
            let current = case.in_startup || complaint_is_current(sight, &weight, self.signs.clients_came());
            case.reasons = vec![complaint.reason.clone()];
            case.reasons.extend(weight.reasons);
            let counts = owed && tick.excuse.is_none() && current;
            let (silence_ms, carried) = self.silence_with_trials(tick, complaint);
            case.reasons.extend(carried);
            if counts {
                case.silence_ms = silence_ms;
            }
            let proven = silence_ms >= weight.silence_ms_min;
            // a trial at this moment would begin the age of the case anew
            proof_is_near = counts && silence_ms + self.policy.trial_after_ms >= weight.silence_ms_min;
            if counts && proven && age >= weight.strength.confirm_ms(&self.policy) {
                (case.class, case.engine) = (complaint.class.clone(), complaint.engine);
                case.reasons.push(reason("policy", format!("suspect for {age} ms: confirmed")));
                return self.hold_stall(sight, case);
            }
        }
        let accused = owed && (exam.complaint.is_some() || self.turned_and_rests(sight, &case));
        case.drained_at = if accused { None } else { Some(case.drained_at.unwrap_or(tick.counted_ms)) };
        // no trial behind a front end that is known not to answer
        let may_serve = sight.frontend.is_none_or(|f| f.answers);
        let drained = may_serve && case.drained_at.is_some_and(|at| tick.since(at) >= self.policy.trial_after_ms);
        let is_old = tick.now_ms.saturating_sub(case.began_ms) >= self.policy.suspect_ms_max;
        if drained || (is_old && !proof_is_near && !died) {
            self.trial = Some(Trial::of(tick, &case));
            return self.release(tick, sight, &case, false, exam);
        }
        let said = case.reasons.clone();
        let verdict = Verdict::Suspect(case.class.clone());
        self.stage = Stage::Suspect(case);
        Said::new(verdict, Words::List(said), &[Action::Fence])
    }

    /// Was it accused of turning for nobody, and has only ceased to turn since? What it was accused of stands until something is handed out, or
    /// taken into the cache.
    fn turned_and_rests(&self, sight: &Sight<'_>, case: &Case) -> bool {
        let turned = matches!(case.class, StallClass::Livelock | StallClass::DecodeStalled);
        let moved_at = self.signs.taken_in_at().max(self.signs.delivered_at());
        turned && sight.native().is_none() && moved_at <= case.began_counted
    }

    pub(super) fn stalled(
        &mut self,
        tick: &Tick,
        sight: &Sight<'_>,
        draining: bool,
        mut case: Case,
        exam: Exam,
    ) -> Said {
        let killed = sight.proc.is_none_or(|proc| proc.kill_sent_ms.is_some());
        let renamed = case.in_startup || killed || case.class == StallClass::ProcessDied;
        if let Some(complaint) = exam.complaint.as_ref().filter(|complaint| complaint.died && !renamed) {
            (case.class, case.engine) = (complaint.class.clone(), None);
            case.reasons.insert(0, complaint.reason.clone());
        }
        // a stall that delivers is none: a restart that was not granted yet is no longer wanted; nor while a person says hands off
        if self.proves_life(tick, sight, &case, &exam) || tick.excuse.is_some_and(Excuse::is_declared) {
            return self.release(tick, sight, &case, draining, exam);
        }
        let drained_at = case.drained_at.unwrap_or(tick.counted_ms);
        case.drained_at = self.may_have_healed(tick, sight, &case).then_some(drained_at);
        if case.drained_at.is_some_and(|at| tick.since(at) >= self.policy.trial_after_ms) {
            self.trial = Some(Trial::of(tick, &case));
            return self.release(tick, sight, &case, draining, exam);
        }
        self.hold_stall(sight, case)
    }

    /// Confirmed, and behind the fence there is nothing left that it could show progress with: nothing speaks against a trial. One
    /// that fails is not repeated while its relapse counts.
    fn may_have_healed(&self, tick: &Tick, sight: &Sight<'_>, case: &Case) -> bool {
        let no_kill = sight.proc.is_none_or(|p| p.kill_sent_ms.is_none() && !matches!(p.state, Some('T' | 'D' | 'Z')));
        sight.owed.is_none()
            && !case.in_startup
            && (case.class != StallClass::ProcessDied || has_peers(sight))
            && sight.frontend.is_some_and(|f| f.answers)
            && no_kill
            && !self.view(tick, sight).step_beyond_lease()
            && !self.relapsing(tick)
    }

    fn hold_stall(&mut self, sight: &Sight<'_>, case: Case) -> Said {
        let verdict = Verdict::Stalled(case.class.clone());
        let mut said = case.reasons.clone();
        self.stage = Stage::Stalled(case);
        let health_lies = sight.frontend.is_some_and(|front| front.answers && front.status == Some(200));
        if health_lies {
            said.push(reason("frontend", "/health says 200 all the while: it lies".to_owned()));
        }
        let actions = &[Action::Fence, Action::CaptureEvidence, Action::WantRestart];
        Said { health_lies, ..Said::new(verdict, Words::List(said), actions) }
    }

    /// Nothing speaks against it any more. Whoever was not through with its start-up is not for that: it is watched as one that starts.
    fn release(&mut self, tick: &Tick, sight: &Sight<'_>, case: &Case, draining: bool, exam: Exam) -> Said {
        let anew = case.class == StallClass::ProcessDied && sight.proc.is_some_and(|proc| proc.ended.is_none());
        if anew {
            // behind its front end, perhaps; and it may load for long
            self.engine_restarted(tick.now_ms);
        }
        if (case.in_startup || anew) && !ready(&self.view(tick, sight)) {
            let said = self.starting(tick, sight, Exam { complaint: None, ..exam });
            // a fence that the case put up is not left standing where nobody sees the start-up end
            return if said.actions.is_empty() { Said { actions: &[Action::Unfence], ..said } } else { said };
        }
        self.stage = Stage::Healthy;
        let (verdict, words) = self.calm_verdict(tick, sight, draining, false);
        Said { due_in_ms: exam.due_in_ms, ..Said::new(verdict, Words::Calm(words), &[Action::Unfence]) }
    }

    /// Hysteresis: what ends a case is a thing that the class says cannot happen, never a gauge or an answer of `/health`.
    fn proves_life(&self, tick: &Tick, sight: &Sight<'_>, case: &Case, exam: &Exam) -> bool {
        // what other data-parallel engines deliver is no life of the one that is accused
        if let Some(engine) = case.engine {
            let clear = exam.complaint.as_ref().is_none_or(|complaint| complaint.engine != Some(engine));
            return match self.signs.leaders.of(engine).filter(|_| sight.native().is_some()) {
                Some(leader) => leader.lives(&case.class, clear),
                None => self.signs.schedulers.moves(engine, case.began_ms),
            };
        }
        if case.class == StallClass::ProcessDied {
            // a front end without its engine answers with errors, which are bytes as well; and whoever cannot look has seen nobody come
            let clear = sight.proc.is_some() && !has_died(exam) && !self.signs.ended.is_missed(sight);
            // that nobody asks them any more is no word for those that are left
            return clear && (!has_peers(sight) || sight.delivered());
        }
        // what the front end answers by itself is no progress of an engine that is in the same step beyond its lease
        if sight.gate_delivered && !self.view(tick, sight).step_beyond_lease() {
            return true;
        }
        match case.class {
            // CPU time moves it and clears it of nothing where CPU time is all that moved
            StallClass::StartupStalled => {
                let came_up = || sight.page.is_none() && sight.frontend.is_some_and(has_come_up);
                exam.complaint.is_none() && (sight.startup_moved || came_up())
            }
            StallClass::FrontendStalled => {
                sight.gate.is_none_or(|gate| gate.in_flight == 0) && sight.frontend.is_some_and(|f| f.answers)
            }
            StallClass::Livelock | StallClass::DecodeStalled => sight.page_delivered || metrics_prove(sight, case),
            _ => {
                sight.page_delivered
                    || metrics_prove(sight, case)
                    || (sight.steps_done > 0 && exam.complaint.is_none())
                    || stepped_since(sight, case)
                    || (exam.complaint.is_none() && (iterated_since(sight, case) || runs_again(sight, case)))
            }
        }
    }
}

/// Do others of the name of the one that has ended live?
fn has_peers(sight: &Sight<'_>) -> bool {
    sight.ended.is_some_and(|ended| ended.peers > 0)
}

/// Has a process ended that it cannot step without?
fn has_died(exam: &Exam) -> bool {
    exam.complaint.as_ref().is_some_and(|complaint| complaint.died)
}

/// Is this complaint about another data-parallel engine than the case?
fn accuses_another(case: &Case, complaint: &Complaint) -> bool {
    case.engine.is_some() && complaint.engine != case.engine
}

/// A scrape counts what was delivered since the scrape before it: it proves life only where that one, too, was taken after the
/// case was opened. A native page knows better and sooner.
fn metrics_prove(sight: &Sight<'_>, case: &Case) -> bool {
    scraped_since(sight, case) && sight.metrics_delivered
}

/// Nobody waits any more, and a series that only a step writes (KV use falls when requests are given up) has moved since the case was
/// opened: whatever held the step has let go.
fn stepped_since(sight: &Sight<'_>, case: &Case) -> bool {
    let nobody_waits = sight.gate.is_some_and(|gate| gate.in_flight == 0);
    nobody_waits && scraped_since(sight, case) && sight.metrics_moved
}

/// Steps were counted between two scrapes that were both taken after the case was opened: the step that was silent has ended, although an
/// answer that does not stream shows nothing yet.
fn iterated_since(sight: &Sight<'_>, case: &Case) -> bool {
    scraped_since(sight, case) && sight.iterations_moved
}

/// It was stopped, that was all there was against it, and it no longer is.
fn runs_again(sight: &Sight<'_>, case: &Case) -> bool {
    case.stopped && sight.proc.is_some_and(|proc| proc.state != Some('T') && proc.stopped == 0)
}

/// Were both the last scrape and the one before it taken after the case was opened, of an engine whose page does not know better?
fn scraped_since(sight: &Sight<'_>, case: &Case) -> bool {
    sight.native().is_none() && sight.metrics_since_ms >= case.began_ms
}

/// Work that only a frozen gauge remembers confirms nothing without a further witness: some engines leave it standing after their
/// last request. Where neither gate, `/load` nor connections tell, connections that came since are seen in the files that it has open.
fn complaint_is_current(sight: &Sight<'_>, weight: &Weight, clients_came: bool) -> bool {
    let gate_is_empty = sight.gate.is_some_and(|gate| gate.in_flight == 0);
    let by_gauges = gate_is_empty && sight.native().is_none();
    let unseen = sight.owed.is_some_and(|owed| owed.source == OwedSource::Metrics)
        && sight.metrics.is_some_and(|metrics| metrics.server_load.is_none())
        && sight.proc.is_none_or(|proc| proc.connections.is_none());
    (!by_gauges || weight.strength >= Strength::Moderate) && (!unseen || weight.decisive || clients_came)
}
