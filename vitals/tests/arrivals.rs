//! Signs of clients that no gauge shows: connections that nobody accepts, and files that an engine has open for them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled, suspect};
use vitals::observation::Ms;
use vitals::verdict::{StallClass, Verdict};

/// A stranger whose front end nobody asks, and whose new clients get nothing; `queue` says how many connections wait to be accepted. How
/// long until that is confirmed.
fn at_the_door(sim: &mut Sim, queue: impl Fn(Ms) -> u32) -> Option<Ms> {
    sim.frontend = None;
    sim.depart();
    sim.admit(3, 30);
    let began = sim.now;
    while sim.now - began < 600_000 {
        sim.process().accept_queue = Some(queue(sim.now - began));
        if stalled(&sim.tick(100).verdict) {
            return Some(sim.now - began);
        }
    }
    None
}

#[test]
fn connections_that_nobody_accepts_are_the_front_end_s_silence() {
    // what its answers usually take is known
    let mut sim = Sim::foreign().up().busy(20_000);
    sim.depart();
    let mut sim = sim.served(40);
    let unknown = at_the_door(&mut sim.clone(), |_| 0).unwrap();
    // the queue grows with the clients that come
    let took = at_the_door(&mut sim, |age_ms| 3 + (age_ms / 20_000) as u32).unwrap();
    let last = sim.last.unwrap();
    assert_eq!(last.verdict, Verdict::Stalled(StallClass::FrontendStalled));
    assert!(last.reasons.iter().any(|reason| reason.text.contains("wait to be accepted")), "{:?}", last.reasons);
    assert!(took + 30_000 < unknown, "{took} {unknown}");
}

#[test]
fn a_queue_that_is_worked_off_accuses_nobody() {
    // a busy event loop takes in whom it can: the queue is never empty, and shrinks now and then
    let mut sim = Sim::foreign().up().busy(20_000);
    at_the_door(&mut sim, |age_ms| 3 + (age_ms / 1_000 % 10) as u32).unwrap();
    let last = sim.last.unwrap();
    assert_ne!(last.verdict, Verdict::Stalled(StallClass::FrontendStalled));
    assert!(!last.reasons.iter().any(|reason| reason.text.contains("wait to be accepted")), "{:?}", last.reasons);
    // and where answers come, a queue of any length for any time is none of the detector's business
    let mut sim = Sim::foreign().up().busy(20_000);
    sim.process().accept_queue = Some(50);
    for _ in 0..6_000 {
        assert!(!suspect(&sim.deliver_for(100).verdict), "{:?}", sim.last);
    }
}

/// A stranger without gate, `/load` and `/proc`, that stands with four requests by its gauge, and whose open files are then so many.
fn by_gauges(files: impl Fn(Ms) -> f64) -> Verdict {
    let mut sim = Sim::foreign().up();
    (sim.gate, sim.proc) = (None, None);
    sim.metrics.as_mut().unwrap().open_fds = Some(40.0);
    (0..600).for_each(|_| drop(sim.deliver_for(100)));
    let began = sim.now;
    for _ in 0..5_000 {
        sim.metrics.as_mut().unwrap().open_fds = Some(files(sim.now - began));
        sim.tick(100);
    }
    sim.last.unwrap().verdict
}

#[test]
fn files_that_were_opened_since_show_that_clients_still_come_where_nothing_else_does() {
    let after = by_gauges(|age_ms| 40.0 + (age_ms / 30_000) as f64);
    assert!(stalled(&after), "{after:?}");
    // our own questions, and a gauge that was left standing, confirm nothing
    let quiet = by_gauges(|age_ms| 40.0 + (age_ms / 1_000 % 3) as f64);
    assert!(suspect(&quiet), "{quiet:?}");
}
