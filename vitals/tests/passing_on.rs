//! What is made and not passed on, and what was passed on before anybody looked.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, suspect};
use vitals::observation::{LogHit, PagePhase};
use vitals::verdict::Verdict;

/// A silent front end over a native loop, for so long, beside streams that have begun, or beside requests of which none has, and so many of which do
/// not stream; and when that is fenced.
fn silent_front_over_a_loop(makes_tokens: bool, whole: u32, seconds: u64) -> Option<u64> {
    let mut sim = Sim::native().up().busy(5_000);
    let now = sim.now;
    let gate = sim.gate.as_mut().unwrap();
    assert!(gate.in_flight > 1);
    if whole > 0 {
        (gate.unstreamed, gate.awaiting_first_byte) = (Some(whole.min(gate.in_flight)), gate.in_flight);
    }
    let front = sim.frontend.as_mut().unwrap();
    (front.answers, front.silent_since_ms) = (false, Some(now));
    (0..seconds * 10).find_map(|tick| {
        let at = sim.now + 100;
        let page = sim.page.as_mut().unwrap();
        page.steps_completed += 1;
        (page.step_started_ms, page.published_ms) = (Some(at), at);
        if makes_tokens {
            page.tokens_delivered += 1;
        } else {
            (page.phase, page.phase_tokens, page.prompt_tokens_owed) = (PagePhase::Prefill, 100, 100_000 - tick * 100);
        }
        let front = sim.frontend.as_mut().unwrap();
        if whole > 0 && tick % 40 == 39 {
            // a busy event loop answers now and then
            front.silent_since_ms = Some(at);
        }
        suspect(&sim.tick(100).verdict).then_some(tick * 100)
    })
}

#[test]
fn a_front_end_is_accused_of_what_its_loop_has_made_and_of_nothing_else() {
    let fenced = silent_front_over_a_loop(true, 0, 30).unwrap();
    assert!(fenced <= 10_000, "{fenced}");
    assert_eq!(silent_front_over_a_loop(false, 0, 30), None, "a loop in prefill has made nothing");
    assert_eq!(
        silent_front_over_a_loop(true, u32::MAX, 400),
        None,
        "an answer that comes whole is not due before its end"
    );
    assert_eq!(silent_front_over_a_loop(true, 1, 400), None, "all that it made may be of the one that does not stream");
}

#[test]
fn what_was_delivered_before_a_pause_and_is_seen_only_afterwards_does_not_end_it() {
    let mut sim = Sim::foreign().up().busy(10_000);
    let mut metrics = sim.metrics.take().unwrap();
    sim.silence_until(1_000, suspect);
    let mut obs = sim.observation();
    obs.log = vec![LogHit { signature: "vllm-paused".into(), at_ms: sim.now, line: String::new() }];
    assert_eq!(sim.detector.step(sim.now, &obs).verdict, Verdict::Sleeping);
    assert_eq!(sim.silence_until(30_000, suspect), None);
    // a scrape that was missing for a while
    metrics.generation_tokens = metrics.generation_tokens.map(|tokens| tokens + 10.0);
    metrics.progress_digest += 1;
    sim.metrics = Some(metrics);
    assert_eq!(sim.tick(1_000).verdict, Verdict::Sleeping);
    assert_eq!(sim.silence_until(60_000, suspect), None, "{:?}", sim.last);
}
