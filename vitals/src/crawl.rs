//! How long an engine that merely crawls may be silent (B5): a hundred times slower than a moment ago, and alive. Nothing tells its first slow
//! step from a hang, so no shorter silence is proof. Field reports end at about a hundred times the usual (0.28 tokens a second).

use crate::examine::{Complaint, View};
use crate::observation::{GateObs, MetricsObs, Ms};
use crate::verdict::StallClass;
use crate::witness::PageSays;

/// No shorter silence proves this complaint, and why; `None` where crawling cannot be its cause. `gpu_works`: the GPU does what it does in
/// health.
pub fn silence_min(view: &View<'_>, complaint: &Complaint, gpu_works: bool) -> Option<(Ms, &'static str)> {
    let (patience_ms, long_ms) = (view.policy.patience_cap_ms, view.policy.long_patience_ms());
    let of_a_step = match &complaint.class {
        StallClass::StepStalled | StallClass::DeviceWait => true,
        // (none that anybody could name is none that diverged)
        StallClass::RankSilent { ranks } => ranks.is_empty() || is_whole_engine(view, complaint, ranks),
        _ => false,
    };
    let (least_ms, why) = match complaint.class {
        _ if view.rests() => (long_ms, "its books are empty, and its front end may wait for a tool that it has called"),
        _ if of_a_step && works_unseen(view, complaint, gpu_works) => {
            (long_ms, "something works for it, and no counter tells of its steps")
        }
        // … and what a crawl is given where no GPU tells, it is given where one works
        _ if of_a_step && gpu_works => {
            (patience_ms.max(complaint.allowed.crawl_ms), "the GPU works as it does in health")
        }
        // a parser of tool calls hands an argument on when all of it is there, and a stream that was preempted waits behind whole answers
        StallClass::FrontendStalled if !view.front_is_silent(view.policy.admission_ms) => (
            complaint.allowed.crawl_ms,
            "tokens are made, and a front end that answers may hold them back until they are whole",
        ),
        // a grammar is compiled for minutes, beside a loop that turns for nobody: no page says then that no step begins
        StallClass::AdmissionStalled
            if (view.burning || view.sight.proc.is_none()) && complaint.page_says == PageSays::Nothing =>
        {
            (patience_ms, "something works for those that wait, a compiler of grammars perhaps")
        }
        StallClass::Livelock | StallClass::DecodeStalled if only_ends_tell(view) => {
            (long_ms, "this engine counts whole answers, and nothing tells more")
        }
        // (a page shows how quick its steps are; and some engines count those alone that hand something out, of which there are none)
        StallClass::Livelock | StallClass::DecodeStalled if few_steps(view) => {
            (long_ms, "few steps have ended since, as where each is slow")
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

/// Has it counted steps since it last delivered, and fewer than make a loop of them?
fn few_steps(view: &View<'_>) -> bool {
    let steps = view.signs.silence.steps().filter(|_| view.sight.page.is_none() && view.sight.metrics.is_some());
    steps.is_some_and(|steps| (1.0..view.policy.livelock_steps as f64).contains(&steps))
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

/// Has it shown nothing between two answers, neither steps nor room taken nor tokens (TensorRT-LLM without its iteration statistics)?
fn counts_ends_alone(view: &View<'_>, metrics: &MetricsObs) -> bool {
    let steps = metrics.iterations.is_some() || metrics.kv_usage.is_some();
    let ends = metrics.requests_finished.is_some();
    ends && !steps && !view.signs.counters_live && !view.signs.tokens_live
}

/// Does nothing tell of steps but that something works for them (or may, unseen), and is nothing known of how long such work takes? A hundred
/// prompts of an engine that crawls, or one answer that does not stream, are minutes of silence.
fn works_unseen(view: &View<'_>, complaint: &Complaint, gpu_works: bool) -> bool {
    let counted = match view.sight.metrics {
        Some(metrics) => !counts_ends_alone(view, metrics),
        None => view.signs.was_scraped() && !view.nothing_begun(),
    };
    let counted = counted || view.sight.page.is_some();
    let works = gpu_works || view.burning || view.sight.proc.is_none();
    !counted && works && complaint.allowed.ms >= view.policy.patience_cap_ms
}
