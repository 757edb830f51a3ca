//! A process by which the engine steps has ended, and its front end lives on (H6, H7): nothing is left that could deliver.
//!
//! That needs no deadline of its own rhythm. Requests that came meanwhile hang, those that come next will, and `/health` may say 200 for hours.

use serde::{Deserialize, Serialize};

use crate::examine::{Allowed, Complaint, Exam, View, reason};
use crate::excuse::Tick;
use crate::observation::{Ms, Observation, ProcObs};
use crate::signs::Sight;
use crate::verdict::StallClass;
use crate::witness::PageSays;

/// An engine that ends as a whole ends its parts one after another.
const GRACE_MS: Ms = 500;

/// The first of the engine's processes that has ended, of those without which it does not step, as long as none has come in its place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedObs {
    pub pid: i32,
    /// The kernel's name of it (`VLLM::EngineCor`).
    pub name: String,
    /// When it was first missed: it may have ended as much earlier as the processes are looked at rarely.
    pub at_ms: Ms,
    /// Processes of that name that live: where there are any, they may serve without it (data-parallel engines).
    pub peers: u32,
}

/// Since when it has been missed, in counted time, and whether the engine goes on without it.
#[derive(Debug, Clone, Default)]
pub struct EndedSign {
    missed: Option<Missed>,
    /// Whom the engine needed for nothing: it was no part of it, or another does its work.
    outlived: Vec<(i32, Ms)>,
}

#[derive(Debug, Clone, Copy)]
struct Missed {
    who: (i32, Ms),
    since: Ms,
    /// Looks since at which tokens were found that were made after its end.
    deliveries: u32,
}

/// The first may be of tokens that it has made itself: a page is read before the processes are.
const DELIVERIES_MIN: u32 = 2;

impl EndedSign {
    /// Whoever cannot look at the processes, or need not, knows no more and no less than before.
    pub fn look(&mut self, tick: &Tick, sight: &Sight<'_>) {
        let Some(proc) = sight.proc else { return };
        let Some(ended) = sight.ended else {
            if proc.ended.is_none() {
                *self = Self::default();
            }
            return;
        };
        let who = (ended.pid, ended.at_ms);
        let known = self.missed.filter(|missed| missed.who == who);
        let mut missed = known.unwrap_or(Missed { who, since: tick.mark(ended.at_ms), deliveries: 0 });
        // a scrape counts what was made since the one before it, and a step that fails is counted as well
        let counted = sight.metrics_delivered && sight.metrics_since_ms >= ended.at_ms;
        missed.deliveries += u32::from(known.is_some() && (sight.page_delivered || counted));
        if missed.deliveries >= DELIVERIES_MIN && !self.outlived.contains(&who) {
            self.outlived.push(who);
        }
        self.missed = Some(missed);
    }

    /// Is it missed by one who has no other of its name, be it for less than the grace?
    pub fn is_missed(&self, sight: &Sight<'_>) -> bool {
        self.since().is_some() && sight.ended.is_some_and(|ended| ended.peers == 0)
    }

    fn since(&self) -> Option<Ms> {
        self.missed.filter(|missed| !self.outlived.contains(&missed.who)).map(|missed| missed.since)
    }
}

/// Whose end counts. Who is told to leave, or has ended as a whole, ends its parts in whatever order.
pub(crate) fn of<'a>(proc: Option<&'a ProcObs>, obs: &Observation) -> Option<&'a EndedObs> {
    proc.filter(|proc| proc.alive && !obs.draining)?.ended.as_ref()
}

/// Holds the end against the engine, whether or not it owes anything: what is owed next will hang. Where others of its name live, only while
/// work is owed of which nothing at all moves. It goes before all other complaints, which it explains. During a start-up that is what a start-up that stands still is called.
pub(crate) fn examine_ended(view: &View<'_>, starts: bool, exam: &mut Exam) {
    let (sight, signs) = (view.sight, view.signs);
    let (Some(ended), Some(since)) = (sight.ended, signs.ended.since()) else { return };
    let (mark, allowed_ms) = match ended.peers {
        0 => (since, GRACE_MS),
        _ if sight.owed.is_none() => return,
        _ => {
            (since.max(signs.delivered_at()).max(signs.moved_at()).max(signs.owed_since), view.policy.foreign_floor_ms)
        }
    };
    let silence = view.tick.since(mark);
    let others = exam.complaint.take();
    exam.hold(silence, Allowed::policy(allowed_ms), || {
        let age = view.tick.now_ms.saturating_sub(ended.at_ms);
        let beside = match ended.peers {
            0 => String::new(),
            peers => format!(", and with {peers} more of that name nothing moved for {silence} ms"),
        };
        let text = format!(
            "{} (process {}), without which the engine does not step, was missed {age} ms ago and none has come in its place{beside}",
            ended.name, ended.pid
        );
        let class = if starts { StallClass::StartupStalled } else { StallClass::ProcessDied };
        (class, reason("proc", text), PageSays::Nothing)
    });
    let died = exam.complaint.take().map(|complaint| Complaint { died: true, ..complaint });
    exam.complaint = died.or(others);
}
