//! Which class a silence is, as far as one look can tell.

use super::View;
use crate::observation::PageObs;
use crate::signs::Signs;
use crate::verdict::StallClass;

/// Which step failure it is, as far as one look can tell.
pub(super) fn step_class(view: &View<'_>, engine: u32) -> StallClass {
    let ranks = silent_ranks(view, engine);
    if !ranks.is_empty() {
        return StallClass::RankSilent { ranks };
    }
    if view.others_go_on(Some(engine)) {
        // whatever the tree burns is theirs
        let ranks = pages(view, engine).map(|page| page.rank).collect();
        return StallClass::RankSilent { ranks };
    }
    if view.burning { StallClass::DeviceWait } else { StallClass::StepStalled }
}

/// The pages of one data-parallel engine: only these take the same steps.
fn pages<'a>(view: &View<'a>, engine: u32) -> impl Iterator<Item = &'a PageObs> + Clone + use<'a> {
    view.sight.pages.iter().filter(move |page| page.engine() == engine)
}

/// Ranks behind in steps, or outside a step that their peers are in.
fn silent_ranks(view: &View<'_>, engine: u32) -> Vec<u32> {
    if hands_out_no_step(view, engine) {
        return Vec::new();
    }
    let mut ranks = view.signs.ranks.silent(view.sight.pages, engine);
    // a scheduler that is behind by itself is the step's own failure
    ranks = if scheduler(view, engine).is_some_and(|leader| ranks == [leader.rank]) { Vec::new() } else { ranks };
    let some_in_step = pages(view, engine).any(|page| page.step_started_ms.is_some());
    if ranks.is_empty() && some_in_step {
        ranks = pages(view, engine).filter(|page| page.step_started_ms.is_none()).map(|page| page.rank).collect();
    }
    if let Some(ras) = view.sight.ras.filter(|_| ranks.is_empty()) {
        ranks.clone_from(&ras.silent_ranks);
    }
    ranks
}

/// A leader that schedules for workers and steps with nobody: only its page counts tokens. Ranks that step together all count them.
fn scheduler<'a>(view: &View<'a>, engine: u32) -> Option<&'a PageObs> {
    let pages = pages(view, engine);
    let leader = pages.clone().min_by_key(|page| page.rank).filter(|leader| leader.tokens_delivered > 0)?;
    let works = |page: &PageObs| page.rank == leader.rank || page.tokens_delivered == 0;
    (pages.clone().nth(1).is_some() && pages.clone().all(works)).then_some(leader)
}

/// A scheduler in a step whose workers all wait outside one, none of them behind: it hands out no step. They are not silent, it is.
fn hands_out_no_step(view: &View<'_>, engine: u32) -> bool {
    let Some(leader) = scheduler(view, engine).filter(|leader| leader.step_started_ms.is_some()) else { return false };
    let waits = |page: &PageObs| page.step_started_ms.is_none() && page.steps_completed >= leader.steps_completed;
    let everybody_there = pages(view, engine).count() >= leader.engine_ranks() as usize;
    everybody_there && pages(view, engine).filter(|page| page.rank != leader.rank).all(waits)
}

/// Of a loop whose figures move and that hands out nothing.
pub(super) fn turning(signs: &Signs) -> StallClass {
    if signs.metrics_prompt_at > signs.metrics_tokens_at { StallClass::DecodeStalled } else { StallClass::Livelock }
}

/// Of a gate that has long had nothing, and what the engine's own figures say to that.
pub(super) fn undelivered(view: &View<'_>) -> (StallClass, &'static str) {
    let (signs, fresh_ms) = (view.signs, view.policy.metrics_fresh_ms);
    if view.tick.since(signs.moved_at()) > fresh_ms {
        return (foreign_class(view), "the gate has had nothing");
    }
    // a scrape tells of the gate's last tokens a little later, and tokens of whole answers that were made long ago tell of no front end
    let tokens_at = signs.metrics_tokens_at.max(signs.leaders.tokens_at());
    let handed_out = tokens_at > signs.gate_delivered_at.saturating_add(fresh_ms)
        && view.tick.since(tokens_at) <= fresh_ms.saturating_mul(3);
    let class = if handed_out { StallClass::FrontendStalled } else { turning(signs) };
    (class, "the engine's own figures move, but the gate has had nothing")
}

pub(super) fn foreign_class(view: &View<'_>) -> StallClass {
    let page_idle = view.sight.page.is_some_and(|page| page.step_started_ms.is_none());
    let stopped = view.sight.proc.and_then(|p| p.state) == Some('T');
    // a probe or two that were late do not make a stall the front end's
    if view.front_is_silent(view.policy.metrics_fresh_ms) && (page_idle || !stopped) {
        return StallClass::FrontendStalled;
    }
    let gauges =
        view.sight.metrics.map(|m| (m.running.unwrap_or(0.0), m.waiting.unwrap_or(0.0), m.kv_usage.unwrap_or(0.0)));
    if gauges.is_some_and(|(running, waiting, kv)| running < 1.0 && waiting >= 1.0 && kv < 0.95)
        && view.sight.page.is_none_or(|page| page.step_started_ms.is_none())
    {
        return StallClass::AdmissionStalled;
    }
    step_class(view, view.sight.page.map_or(0, PageObs::engine))
}
