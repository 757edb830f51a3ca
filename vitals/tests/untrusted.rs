//! An engine that lies (G6): its own counters rise, and the gate in front of it delivers nothing.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled, suspect};
use vitals::observation::Ms;
use vitals::verdict::{StallClass, Verdict};

/// Ticks with forged counters until the verdict is this; how long that took.
fn until(sim: &mut Sim, forge: fn(&mut Sim), at_most: Ms, done: fn(&Verdict) -> bool) -> Option<Ms> {
    let began = sim.now;
    while sim.now - began < at_most {
        forge(sim);
        if done(&sim.tick(100).verdict) {
            return Some(sim.now - began);
        }
    }
    None
}

/// Believed for 300 s, while its front end says that all is well; then fenced, and confirmed at 900 s. Who counts tokens that nobody gets has
/// a front end that hands nothing out, as far as anybody can tell.
fn is_believed_and_found(mut sim: Sim, forge: fn(&mut Sim)) {
    let fenced = until(&mut sim, forge, 400_000, suspect).unwrap();
    assert!((300_000..=301_000).contains(&fenced), "{fenced}: {:?}", sim.last);
    let confirmed = until(&mut sim, forge, 1_300_000, stalled).unwrap();
    assert!((599_000..=601_000).contains(&confirmed), "{confirmed}: {:?}", sim.last);
    let last = sim.last.unwrap();
    assert_eq!((last.verdict, last.health_lies), (Verdict::Stalled(StallClass::FrontendStalled), true));
}

#[test]
fn g06_forged_counters_do_not_hide_that_nothing_is_delivered() {
    let forge = |sim: &mut Sim| {
        let metrics = sim.metrics.as_mut().unwrap();
        metrics.generation_tokens = metrics.generation_tokens.map(|tokens| tokens + 100.0);
        metrics.requests_finished = Some(metrics.requests_finished.unwrap_or(0.0) + 1.0);
        metrics.progress_digest += 1;
    };
    is_believed_and_found(Sim::foreign().up().busy(60_000), forge);
}

#[test]
fn g06_a_forged_page_does_not_hide_it_either() {
    let forge = |sim: &mut Sim| {
        let now = sim.now;
        let page = sim.page.as_mut().unwrap();
        page.steps_completed += 2;
        page.tokens_delivered += 8;
        page.step_started_ms = Some(now);
        page.published_ms = now;
    };
    is_believed_and_found(Sim::native().up().busy(60_000), forge);
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
    let accused = |verdict: &Verdict| suspect(verdict) || stalled(verdict);
    let found = until(&mut sim, forge, 1_300_000, accused);
    assert_eq!(found, None, "{:?}", sim.last);
}
