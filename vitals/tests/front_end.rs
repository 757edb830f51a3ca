//! For how long a front end has been silent, where time was excused meanwhile.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, suspect};
use vitals::observation::Ms;
use vitals::verdict::Verdict;

/// Over a loop that has nothing to do, for two requests that it has not heard of.
fn with_work_at_the_door() -> Sim {
    let mut sim = Sim::native().up().busy(5_000);
    sim.idle();
    sim
}

/// Since then it answers nobody.
fn silent_since(sim: &mut Sim, at: Ms) {
    let front = sim.frontend.as_mut().unwrap();
    (front.answers, front.silent_since_ms) = (false, Some(at));
}

/// When it is fenced, after so much of a pause of the whole machine and then of silence.
fn fenced_after_a_pause(pause_ms: Ms) -> Ms {
    let mut sim = with_work_at_the_door();
    sim.gap = pause_ms;
    sim.tick(pause_ms);
    sim.gap = 0;
    let at = sim.now;
    silent_since(&mut sim, at);
    let fenced = sim.silence_until(600_000, suspect).unwrap();
    assert_eq!(sim.last.as_ref().unwrap().verdict.class().unwrap().name(), "FrontendStalled");
    fenced
}

#[test]
fn a_front_end_that_stops_after_a_pause_is_found_as_soon_as_any() {
    assert_eq!(fenced_after_a_pause(200_000), fenced_after_a_pause(100));
}

#[test]
fn a_front_end_that_was_frozen_with_its_engine_is_not_accused_of_that() {
    let mut sim = with_work_at_the_door();
    let began = sim.now;
    silent_since(&mut sim, began);
    sim.process().frozen = true;
    assert_eq!(sim.silence_until(120_000, suspect), None);
    sim.process().frozen = false;
    assert_eq!(sim.silence_until(2_500, suspect), None, "it has had no time to answer yet");
    let fenced = sim.silence_until(60_000, |verdict| matches!(verdict, Verdict::Suspect(_)));
    assert!(fenced.is_some_and(|ms| ms <= 10_000), "{fenced:?}: and if it still does not, it is");
}
