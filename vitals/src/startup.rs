//! Start-up: from the process's start until it can serve. Its silence is judged by start-up progress, not by tokens (S4).

use crate::examine::{Allowed, Complaint, Exam, View, reason};
use crate::leaders::leads;
use crate::observation::{FrontendObs, Ms, PageObs, PagePhase};
use crate::verdict::StallClass;
use crate::witness::PageSays;

/// Is the page in one of the start-up phases of H5?
pub fn is_startup(phase: PagePhase) -> bool {
    matches!(phase, PagePhase::Load | PagePhase::Compile | PagePhase::Capture | PagePhase::WarmUp)
}

/// Has the engine shown that it can serve? All pages outside the start-up phases; where the loop has none, a front end that answers, a delivery, or, where no
/// front end is asked, a metrics page or a port that somebody listens on.
pub fn ready(view: &View<'_>) -> bool {
    match view.sight.page {
        // a worker's page that says that it starts beside a front end that answers and a loop that is through has missed its end
        Some(_) => {
            let through = || !view.sight.pages.iter().any(|page| leads(page) && is_startup(page.phase));
            starting_rank(view).is_none() || (through() && view.sight.frontend.is_some_and(has_come_up))
        }
        None => {
            view.sight.delivered()
                || view.sight.frontend.is_some_and(has_come_up)
                || (view.sight.frontend.is_none() && (view.sight.metrics.is_some() || listening(view) == Some(true)))
        }
    }
}

/// The lowest rank whose page is still in a start-up phase: the leader may be through while a worker loads.
fn starting_rank<'a>(view: &View<'a>) -> Option<&'a PageObs> {
    view.sight.pages.iter().filter(|page| is_startup(page.phase)).min_by_key(|page| page.rank)
}

/// Does anybody listen on the engine's port, as far as its process can be seen?
fn listening(view: &View<'_>) -> Option<bool> {
    view.sight.proc.and_then(|proc| proc.listening)
}

/// A front end that answers 503 says itself that it cannot serve yet (a model that is being loaded).
pub fn has_come_up(front: &FrontendObs) -> bool {
    front.answers && front.status != Some(503)
}

/// Start-up progress against the lease (native) or the policy (foreign).
pub fn examine_startup(view: &View<'_>) -> Exam {
    let sight = view.sight;
    let unseen = sight.page.is_none() && sight.frontend.is_none() && sight.metrics.is_none();
    if unseen && listening(view) != Some(false) {
        // whether it has come up cannot be seen at all: it may be serving, or waiting to
        return Exam { gate_allowed_ms: view.policy.patience_cap_ms, ..Exam::default() };
    }
    let silence = view.tick.since(view.signs.startup_moved_at);
    let (silence, burns) = match view.tick.since(view.signs.startup_solid_at) {
        // CPU time alone holds off a verdict no longer than the longest lease would
        solid if view.sight.page.is_none() && solid > view.policy.startup_lease_cap_ms => (solid, true),
        _ => (silence, false),
    };
    let (allowed, source, text) = match sight.page.map(|page| starting_rank(view).unwrap_or(page)) {
        Some(page) => {
            let cap = view.policy.startup_lease_cap_ms;
            let lease = if page.lease_ms == 0 { view.policy.startup_silence_ms } else { page.lease_ms.min(cap) };
            (
                Allowed::declared(lease.max(view.policy.native_floor_ms)),
                "page",
                format!(
                    "start-up phase {:?} of rank {} stands at {} of {} for {silence} ms; its lease was {lease} ms",
                    page.phase, page.rank, page.work_done, page.work_total
                ),
            )
        }
        None => {
            let policy = view.policy;
            let unseen = view.sight.proc.is_none();
            let allowed = if burns || unseen { policy.startup_lease_cap_ms } else { policy.startup_silence_ms };
            let did = match (unseen, burns) {
                (true, _) => "nothing can be seen of its process",
                (false, true) => "it read and wrote nothing, ran no compiler, and nothing but CPU time moved",
                (false, false) => "it read and wrote nothing, ran no compiler, and used hardly any CPU",
            };
            let text = format!("the engine has not come up, and {did}, for {silence} ms; {allowed} ms are allowed");
            (Allowed::policy(allowed), "proc", text)
        }
    };
    let due: Option<Ms> = (silence <= allowed.ms).then(|| allowed.ms - silence);
    let complaint = due.is_none().then(|| Complaint {
        class: StallClass::StartupStalled,
        engine: None,
        silence_ms: silence,
        allowed,
        reason: reason(source, text),
        page_says: PageSays::lease(source == "page"),
        died: false,
    });
    Exam { complaint, due_in_ms: due, gate_allowed_ms: view.policy.patience_cap_ms, ..Exam::default() }
}
