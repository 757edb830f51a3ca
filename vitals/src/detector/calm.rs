//! What is said while nothing is held against the engine: starting, and the calm verdicts.

use super::{Detector, Stage};
use crate::examine::{Exam, reason, source_name};
use crate::excuse::{Excuse, Tick};
use crate::observation::{Ms, PagePhase};
use crate::signs::Sight;
use crate::startup::{has_come_up, ready};
use crate::verdict::{Action, Outcome, Reason, Verdict};

impl Detector {
    pub(super) fn starting(&mut self, tick: &Tick, sight: &Sight<'_>, exam: Exam) -> Outcome {
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

    pub(super) fn healthy(
        &mut self,
        tick: &Tick,
        sight: &Sight<'_>,
        draining: bool,
        slow: bool,
        exam: Exam,
    ) -> Outcome {
        if let Some(complaint) = exam.complaint.filter(|_| tick.excuse.is_none()) {
            return self.open_case(tick, sight, complaint, false);
        }
        self.stage = Stage::Healthy;
        let (verdict, said) = self.calm_verdict(tick, sight, draining, slow);
        self.say(tick, verdict, said, vec![Action::Unfence], exam.due_in_ms)
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
    ) -> (Verdict, Vec<Reason>) {
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
            if let Some(ms) = self.stuck_ms(tick, sight) {
                let text =
                    format!("one request that had begun to answer is silent for {ms} ms while others are served");
                said.push(reason("gate", text));
            }
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
