//! What is said while nothing is held against the engine: starting, and the calm verdicts.

use super::said::{CalmWords, Said, Words};
use super::{Detector, Stage};
use crate::examine::{Exam, reason};
use crate::excuse::{Excuse, Tick};
use crate::observation::{Ms, PagePhase};
use crate::signs::Sight;
use crate::startup::{has_come_up, ready};
use crate::verdict::{Action, Verdict};

impl Detector {
    pub(super) fn starting(&mut self, tick: &Tick, sight: &Sight<'_>, exam: Exam) -> Said {
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
        let actions: &[Action] = if shut { &[Action::Fence] } else { &[] };
        let mut reasons = vec![reason("page", text)];
        // that one a person must hear of; the others are of every start
        if let Some((source, text)) = tick.excuse.filter(|excuse| *excuse == Excuse::Elsewhere).map(Excuse::sentence) {
            reasons.insert(0, reason(source, text.to_owned()));
        }
        let words = Words::List(reasons);
        Said { due_in_ms: exam.due_in_ms, ..Said::new(Verdict::Starting, words, actions) }
    }

    pub(super) fn healthy(&mut self, tick: &Tick, sight: &Sight<'_>, draining: bool, slow: bool, exam: Exam) -> Said {
        if let Some(complaint) = exam.complaint.filter(|_| tick.excuse.is_none()) {
            return self.open_case(tick, sight, complaint, false);
        }
        self.stage = Stage::Healthy;
        let (verdict, words) = self.calm_verdict(tick, sight, draining, slow);
        Said { due_in_ms: exam.due_in_ms, ..Said::new(verdict, Words::Calm(words), &[Action::Unfence]) }
    }

    /// One request stuck among deliveries is no stall of the engine, whose restart would cost the others theirs: it is said, not judged.
    fn stuck_ms(&self, tick: &Tick, sight: &Sight<'_>) -> Option<Ms> {
        let quiet = tick.now_ms.saturating_sub(sight.gate?.quietest_begun_ms?);
        (quiet > self.policy.decode_starved_ms && tick.excuse.is_none()).then_some(quiet)
    }

    /// The verdict while nothing is held against the engine.
    pub(super) fn calm_verdict(
        &self,
        tick: &Tick,
        sight: &Sight<'_>,
        draining: bool,
        slow: bool,
    ) -> (Verdict, CalmWords) {
        let words = CalmWords { excuse: tick.excuse, ..CalmWords::default() };
        let page_drains = sight.page.is_some_and(|page| page.phase == PagePhase::Drain);
        if matches!(tick.excuse, Some(Excuse::Asleep | Excuse::Paused | Excuse::SaysPaused)) {
            return (Verdict::Sleeping, CalmWords { asleep: true, ..words });
        }
        if draining || page_drains {
            return (Verdict::Draining, CalmWords { draining: true, ..words });
        }
        let Some(owed) = sight.owed else { return (Verdict::Idle, words) };
        let slow = self.slow.figures().filter(|_| slow);
        let verdict = if slow.is_some() { Verdict::Slow } else { Verdict::Progressing };
        let owed = Some((owed.source, owed.requests));
        (verdict, CalmWords { owed, slow, stuck_ms: self.stuck_ms(tick, sight), ..words })
    }
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
