//! An engine that lies (G6): its own counters rise, and the gate in front of it delivers nothing.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::Sim;
use vitals::observation::Ms;
use vitals::verdict::Verdict;

/// Ticks with forged counters until the verdict is fenced or worse; how long that took.
fn fenced_after(sim: &mut Sim, mut forge: impl FnMut(&mut Sim), at_most: Ms) -> Option<(Ms, Verdict)> {
    let began = sim.now;
    while sim.now - began < at_most {
        forge(sim);
        let verdict = sim.tick(100).verdict;
        if matches!(verdict, Verdict::Suspect { .. } | Verdict::Stalled { .. }) {
            return Some((sim.now - began, verdict));
        }
    }
    None
}

#[test]
fn g06_forged_counters_do_not_hide_that_nothing_is_delivered() {
    let mut sim = Sim::foreign().up().busy(60_000);
    let forge = |sim: &mut Sim| {
        let metrics = sim.metrics.as_mut().unwrap();
        metrics.generation_tokens = metrics.generation_tokens.map(|tokens| tokens + 100.0);
        metrics.requests_finished = Some(metrics.requests_finished.unwrap_or(0.0) + 1.0);
        metrics.progress_digest += 1;
    };
    let found = fenced_after(&mut sim, forge, 1_300_000);
    assert!(found.is_some(), "five minutes of rising counters and a silent gate: {:?}", sim.last);
}

#[test]
fn g06_a_forged_page_does_not_hide_it_either() {
    let mut sim = Sim::native().up().busy(60_000);
    let forge = |sim: &mut Sim| {
        let now = sim.now;
        let page = sim.page.as_mut().unwrap();
        page.steps_completed += 2;
        page.tokens_delivered += 8;
        page.step_started_ms = Some(now);
        page.published_ms = now;
    };
    let found = fenced_after(&mut sim, forge, 1_300_000);
    assert!(found.is_some(), "five minutes of a lively page and a silent gate: {:?}", sim.last);
}

#[test]
fn an_answer_that_does_not_stream_may_take_its_time() {
    let mut sim = Sim::foreign().up().busy(60_000);
    sim.depart();
    sim.admit(1, 10);
    let forge = |sim: &mut Sim| {
        sim.gate.as_mut().unwrap().unstreamed = Some(1);
        let metrics = sim.metrics.as_mut().unwrap();
        metrics.generation_tokens = metrics.generation_tokens.map(|tokens| tokens + 10.0);
        metrics.progress_digest += 1;
    };
    let found = fenced_after(&mut sim, forge, 1_300_000);
    assert!(found.is_none(), "{found:?}");
}
