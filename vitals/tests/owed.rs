//! Who says that work is owed where there is no gate: the front end's own count (`/load`), which lives on when the engine's gauges do not.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled, suspect};
use vitals::verdict::Verdict;

/// An engine without a gate that worked, and then froze in the moment between two requests: its gauges stand at 0.
fn froze(load: Option<f64>) -> Sim {
    let mut sim = Sim::foreign().up();
    sim.gate = None;
    for _ in 0..600 {
        let metrics = sim.metrics.as_mut().unwrap();
        (metrics.running, metrics.server_load) = (Some(4.0), load.and(Some(4.0)));
        metrics.generation_tokens = metrics.generation_tokens.map(|tokens| tokens + 8.0);
        metrics.progress_digest += 1;
        sim.tick(100);
    }
    let metrics = sim.metrics.as_mut().unwrap();
    (metrics.running, metrics.waiting, metrics.server_load) = (Some(0.0), Some(0.0), load);
    sim
}

#[test]
fn what_the_front_end_counts_is_owed_although_the_gauges_stand_at_zero() {
    let mut sim = froze(Some(8.0));
    assert!(sim.silence_until(400_000, suspect).is_some(), "{:?}", sim.last);
    assert!(sim.silence_until(1_000_000, stalled).is_some(), "{:?}", sim.last);
    assert!(sim.last.unwrap().reasons.iter().any(|reason| reason.text.contains("8 requests owed")));
}

#[test]
fn a_front_end_that_counts_nobody_and_gauges_alone_at_zero_owe_nothing() {
    for load in [Some(0.0), None] {
        let mut sim = froze(load);
        let accused = sim.silence_until(1_300_000, |verdict| suspect(verdict) || stalled(verdict));
        assert_eq!(accused, None, "{load:?}: {:?}", sim.last);
        assert_eq!(sim.last.unwrap().verdict, Verdict::Idle, "{load:?}");
    }
}
