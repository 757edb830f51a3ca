//! Quota and compilers stop the clock, and not for ever: a hang that burns more cores than its pod may use is held back for as long as it lasts.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled, suspect};
use vitals::detector::Policy;
use vitals::observation::Ms;
use vitals::verdict::Verdict;

fn spins(mut sim: Sim) -> Sim {
    (sim.process().state, sim.process().wchan) = (Some('R'), None);
    sim.cpu = 8_000;
    sim
}

fn throttled(mut sim: Sim) -> Sim {
    sim.process().throttled = true;
    sim
}

/// When it is fenced and when confirmed, from the beginning of the silence on.
fn judged(mut sim: Sim, ms: Ms) -> Option<(Ms, Ms)> {
    let fenced = sim.silence_until(ms, suspect)?;
    Some((fenced, fenced + sim.silence_until(ms, stalled)?))
}

#[test]
fn a_hang_that_burns_all_that_its_quota_allows_is_found() {
    let bound = Policy::default().patience_cap_ms;
    for sim in [Sim::foreign().up().busy(20_000), Sim::native().up().busy(20_000)] {
        let (fenced, confirmed) = judged(throttled(spins(sim)), 3 * bound).expect("it is never noticed");
        assert!(fenced >= bound && confirmed <= 2 * bound, "{fenced} {confirmed}");
    }
}

#[test]
fn an_engine_that_crawls_along_its_quota_is_never_taken_for_hung() {
    let mut sim = throttled(spins(Sim::foreign().up().busy(20_000)));
    for _ in 0..20 {
        // longer than the bound in all, and each silence shorter
        assert_eq!(sim.silence_until(200_000, suspect), None, "{:?}", sim.last);
        sim.deliver_for(100);
    }
}

#[test]
fn an_engine_that_has_nothing_to_do_uses_no_excuse_up() {
    let mut sim = throttled(spins(Sim::foreign().up().busy(20_000)));
    sim.depart();
    sim.silence(1_000_000);
    sim.admit(4, 200);
    assert_eq!(sim.silence_until(200_000, suspect), None, "{:?}", sim.last);
}

#[test]
fn a_start_that_is_held_back_has_time_and_not_for_ever() {
    let policy = Policy::default();
    let mut sim = throttled(spins(Sim::foreign()));
    let fenced = sim.silence_until(10_000_000, suspect).expect("it is never noticed");
    let least = 2 * policy.startup_lease_cap_ms;
    assert!((least..2 * least).contains(&fenced), "{fenced}");
    // one that reads its weights uses none of it up
    let mut sim = throttled(spins(Sim::foreign()));
    for _ in 0..20 {
        *sim.process().read_chars.get_or_insert(0) += 200 << 20;
        assert_eq!(sim.silence_until(policy.startup_lease_cap_ms / 2, suspect), None, "{:?}", sim.last);
    }
}

#[test]
fn a_compiler_that_never_ends_is_no_excuse_for_ever_and_one_that_takes_its_time_is() {
    let mut sim = spins(Sim::foreign().up().busy(20_000));
    let compiles = |sim: &mut Sim| {
        sim.process().compilers = 1;
        sim.process().compilers_cpu_ms += 100;
    };
    let bound = Policy::default().startup_lease_cap_ms;
    let fenced = (1..3 * bound / 100).find(|_| {
        compiles(&mut sim);
        matches!(sim.tick(100).verdict, Verdict::Suspect(_))
    });
    assert!(fenced.is_some_and(|tick| tick * 100 >= bound), "{fenced:?}");
}
