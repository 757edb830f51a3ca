//! What a silence may be counted from and what it may teach: stale gauges, hangs that ended, prompts whose clients left.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled, suspect};
use vitals::verdict::Verdict;

#[test]
fn gauges_that_stand_after_the_last_request_owe_nothing() {
    let mut sim = Sim::foreign().up().busy(10_000);
    sim.leave();
    sim.cpu = 10;
    assert!(sim.metrics.as_ref().unwrap().running.unwrap() > 0.0, "the gauge must stand for this test");
    assert_eq!(sim.silence_until(900_000, |verdict| *verdict != Verdict::Idle), None, "{:?}", sim.last);
    // a request that comes now inherits no silence
    sim.admit(1, 10);
    assert_eq!(sim.tick(100).verdict, Verdict::Progressing, "{:?}", sim.last);
    let fenced = sim.silence_until(400_000, suspect).unwrap();
    assert!(fenced >= 2_000, "{fenced}");
    sim.silence_until(130_000, stalled).unwrap();
}
