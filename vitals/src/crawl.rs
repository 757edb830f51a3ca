//! How long an engine that merely crawls may be silent (B5): a hundred times slower than a moment ago, and alive. Nothing tells its first slow
//! step from a hang, so no shorter silence is proof. Field reports end at about a hundred times the usual (0.28 tokens a second).

use crate::examine::{Complaint, View};
use crate::observation::{GateObs, Ms};
use crate::verdict::StallClass;

/// No shorter silence proves this complaint, and why; `None` where crawling cannot be its cause. `gpu_works`: the GPU does what it does in
/// health.
pub fn silence_min(view: &View<'_>, complaint: &Complaint, gpu_works: bool) -> Option<(Ms, &'static str)> {
    let (patience_ms, long_ms) = (view.policy.patience_cap_ms, view.policy.long_patience_ms());
    let of_a_step = match &complaint.class {
        StallClass::StepStalled | StallClass::DeviceWait => true,
        StallClass::RankSilent { ranks } => is_whole_engine(view, complaint, ranks),
        _ => false,
    };
    let (least_ms, why) = match complaint.class {
        _ if of_a_step && works_unseen(view, complaint, gpu_works) => {
            (long_ms, "something works for it, and no counter tells of its steps")
        }
        _ if of_a_step && gpu_works => (patience_ms, "the GPU works as it does in health"),
        StallClass::FrontendStalled if streams_may_wait(view) => {
            (long_ms, "tokens are made, and all that run may be answers that come whole")
        }
        StallClass::Livelock | StallClass::DecodeStalled if only_ends_tell(view) => {
            (long_ms, "this engine counts whole answers, and nothing tells more")
        }
        // figures move at the end of each step, of one that crawled as well
        StallClass::Livelock | StallClass::DecodeStalled => {
            (complaint.allowed.crawl_ms, "an engine that crawls does the same")
        }
        _ if of_a_step => (complaint.allowed.crawl_ms, "an engine that crawls does the same"),
        _ => return None,
    };
    // a page shows how quick the steps are that turn
    let turns = matches!(complaint.class, StallClass::Livelock | StallClass::DecodeStalled);
    let shown = turns && view.sight.page.is_some();
    Some(match view.was_crawling() && !shown {
        // who was seen to crawl has the rivals' patience, and where that was not enough, the long one
        true if complaint.allowed.ms >= patience_ms => (least_ms.max(long_ms), CRAWLED),
        true => (least_ms.max(patience_ms), CRAWLED),
        false => (least_ms, why),
    })
}

/// Are these all ranks of the one data-parallel engine that is accused? Then it is no rank that diverged from its peers.
fn is_whole_engine(view: &View<'_>, complaint: &Complaint, ranks: &[u32]) -> bool {
    complaint.engine.is_some_and(|engine| {
        let leader = view.signs.leaders.of(engine);
        leader.is_none_or(|leader| ranks.len() >= leader.page.engine_ranks() as usize)
    })
}

const CRAWLED: &str = "it was seen to crawl before";

/// Is the end of an answer all that would show that tokens are made? Then a loop that turns may be handing them out, however slowly.
fn only_ends_tell(view: &View<'_>) -> bool {
    // those that stream may all wait behind those that do not
    let running = view.sight.metrics.and_then(|metrics| metrics.running).unwrap_or(f64::MAX);
    let fill =
        |gate: &GateObs| gate.only_unanswered() && gate.unstreamed.is_some_and(|some| f64::from(some) >= running);
    let blind = view.sight.gate.is_none_or(|gate| gate.only_whole_answers() || fill(gate));
    blind && view.sight.page.is_none() && !view.signs.tokens_live
}

/// May every stream that has begun wait behind answers that come whole (preempted, in a storm of preemptions)? Then tokens that are made
/// and reach nobody accuse no front end.
fn streams_may_wait(view: &View<'_>) -> bool {
    let (Some(gate), Some(metrics)) = (view.sight.gate, view.sight.metrics) else { return false };
    let (Some(unstreamed), Some(running)) = (gate.unstreamed, metrics.running) else { return false };
    f64::from(unstreamed) >= running && metrics.waiting.is_some_and(|waiting| waiting >= f64::from(gate.begun()))
}

/// Does nothing tell of steps but that something works for them (or may, unseen), and is nothing known of how long such work takes? A hundred
/// prompts of an engine that crawls, or one answer that does not stream, are minutes of silence.
fn works_unseen(view: &View<'_>, complaint: &Complaint, gpu_works: bool) -> bool {
    let counted = view.sight.metrics.is_some() || (view.signs.was_scraped() && !view.nothing_begun());
    let counted = counted || view.sight.page.is_some();
    let works = gpu_works || view.burning || view.sight.proc.is_none();
    !counted && works && complaint.allowed.ms >= view.policy.patience_cap_ms
}
