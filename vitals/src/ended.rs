//! A process by which the engine steps has ended, and its front end lives on (H6, H7): nothing is left that could deliver.
//!
//! That needs no deadline of its own rhythm. Requests that came meanwhile hang, those that come next will, and `/health` may say 200 for hours.

use serde::{Deserialize, Serialize};

use crate::examine::{Allowed, Exam, View, reason};
use crate::excuse::Tick;
use crate::observation::{Ms, Observation, ProcObs};
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

/// Since when it has been missed, in counted time.
#[derive(Debug, Clone, Copy, Default)]
pub struct EndedSign {
    since: Option<(i32, Ms)>,
}

impl EndedSign {
    pub fn look(&mut self, tick: &Tick, ended: Option<&EndedObs>) {
        let known = self.since.filter(|(pid, _)| ended.is_some_and(|ended| ended.pid == *pid));
        self.since = known.or(ended.map(|ended| (ended.pid, tick.mark(ended.at_ms))));
    }
}

/// Whose end counts. Who is told to leave, or has ended as a whole, ends its parts in whatever order.
pub(crate) fn of<'a>(proc: Option<&'a ProcObs>, obs: &Observation) -> Option<&'a EndedObs> {
    proc.filter(|proc| proc.alive && !obs.draining)?.ended.as_ref()
}

/// Holds the end against the engine, whether or not it owes anything. Where others of its name live, only if they show nothing either.
pub(crate) fn examine_ended(view: &View<'_>, exam: &mut Exam) {
    let (Some(ended), Some((_, since))) = (view.sight.ended, view.signs.ended.since) else { return };
    let (mark, allowed_ms) = match ended.peers {
        0 => (since, GRACE_MS),
        _ => (since.max(view.signs.moved_at()), view.policy.foreign_floor_ms),
    };
    let silence = view.tick.since(mark);
    exam.hold(silence, Allowed::policy(allowed_ms), || {
        let beside = match ended.peers {
            0 => String::new(),
            peers => format!(", and {peers} more of that name show no progress"),
        };
        let text = format!(
            "{} (process {}), without which the engine does not step, ended {silence} ms ago and none has come in its place{beside}",
            ended.name, ended.pid
        );
        (StallClass::ProcessDied, reason("proc", text), PageSays::Nothing)
    });
}
