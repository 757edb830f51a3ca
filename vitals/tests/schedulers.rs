//! Data-parallel ranks of a stranger's `/metrics` (no pages): one that stands among others that serve, and what only looks so.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled};
use vitals::observation::{Ms, RankMetrics};
use vitals::verdict::{StallClass, Verdict};

/// A stranger of two ranks that has streamed for a minute, two requests each.
fn two() -> Sim {
    let mut sim = Sim::foreign().up();
    sim.metrics.as_mut().unwrap().ranks =
        (0..2).map(|rank| RankMetrics { rank, running: Some(2.0), ..RankMetrics::default() }).collect();
    sim.admit(4, 200);
    for _ in 0..600 {
        let at = sim.now + 100;
        quiet_since(&mut sim, at);
        serves(&mut sim, 0);
        serves(&mut sim, 1);
        sim.deliver_for(100);
    }
    sim
}

fn rank(sim: &mut Sim, rank: usize) -> &mut RankMetrics {
    &mut sim.metrics.as_mut().unwrap().ranks[rank]
}

fn serves(sim: &mut Sim, of: usize) {
    rank(sim, of).progress_digest += 1;
}

/// The stream that is silent for longest had its last byte then.
fn quiet_since(sim: &mut Sim, at: Ms) {
    sim.gate.as_mut().unwrap().quietest_begun_ms = Some(at);
}

/// The first rank serves on for so long; every verdict.
fn first_serves(sim: &mut Sim, ms: Ms, mut each: impl FnMut(&mut Sim, Ms)) -> Vec<Verdict> {
    let began = sim.now;
    let mut tick = |sim: &mut Sim| {
        serves(sim, 0);
        each(sim, sim.now - began);
        sim.deliver_for(100).verdict
    };
    (0..ms / 100).map(|_| tick(sim)).collect()
}

fn calm(verdicts: &[Verdict]) -> bool {
    verdicts.iter().all(|verdict| matches!(verdict, Verdict::Progressing | Verdict::Slow))
}

#[test]
fn a_rank_whose_streams_stand_while_another_serves_is_confirmed_and_named() {
    let mut sim = two();
    let began = sim.now;
    let verdicts = first_serves(&mut sim, 400_000, |_, _| {});
    let after = |wanted: fn(&Verdict) -> bool| verdicts.iter().position(wanted).map(|tick| tick as Ms * 100);
    let fenced = after(|verdict| verdict.class().is_some()).unwrap();
    assert!((299_000..303_000).contains(&fenced), "{fenced}");
    let confirmed = after(stalled).unwrap();
    assert!((confirmed - fenced..=60_000).contains(&(confirmed - fenced)), "{confirmed}");
    let last = sim.last.as_ref().unwrap();
    assert_eq!(last.verdict, Verdict::Stalled(StallClass::RankSilent { ranks: vec![1] }), "since {began}");
    assert!(last.reasons[0].text.contains("data-parallel rank 1"), "{:?}", last.reasons);
    // what the others deliver does not lift it, and what it does itself does
    assert!(verdicts.iter().skip(fenced as usize / 100).all(|verdict| verdict.class().is_some()));
    let after = first_serves(&mut sim, 2_000, |sim, age_ms| {
        if age_ms > 1_000 {
            serves(sim, 1)
        }
    });
    assert_eq!(after.last(), Some(&Verdict::Progressing));
}

#[test]
fn a_request_that_is_older_than_the_rank_s_last_step_will_do_where_none_streams() {
    let mut sim = two();
    let now = sim.now;
    let gate = sim.gate.as_mut().unwrap();
    (gate.oldest_in_flight_ms, gate.in_flight) = (Some(now - 1_000), 4);
    let verdicts = first_serves(&mut sim, 400_000, |sim, _| {
        let now = sim.now;
        quiet_since(sim, now);
    });
    assert!(verdicts.iter().any(stalled), "{:?}", sim.last);
}

#[test]
fn a_gauge_that_was_left_standing_accuses_nobody() {
    // all that the gate owes is held by the rank that moves
    let mut sim = two();
    let now = sim.now;
    let gate = sim.gate.as_mut().unwrap();
    (gate.oldest_in_flight_ms, gate.in_flight) = (Some(now - 1_000), 2);
    let verdicts = first_serves(&mut sim, 900_000, |sim, _| {
        let now = sim.now;
        quiet_since(sim, now);
    });
    assert!(calm(&verdicts), "{:?}", sim.last);
    // more than it holds, but all of it younger than the other's last step
    let mut sim = two();
    let verdicts = first_serves(&mut sim, 900_000, |sim, _| {
        let now = sim.now;
        let gate = sim.gate.as_mut().unwrap();
        (gate.oldest_in_flight_ms, gate.in_flight) = (Some(now - 10_000), 9);
        quiet_since(sim, now);
    });
    assert!(calm(&verdicts), "{:?}", sim.last);
}

#[test]
fn a_rank_without_work_may_stand_for_ever() {
    let mut sim = two();
    (rank(&mut sim, 1).running, rank(&mut sim, 1).waiting) = (Some(0.0), Some(0.0));
    // the gate's quiet stream is somebody else's affair
    assert!(calm(&first_serves(&mut sim, 3_600_000, |_, _| {})), "{:?}", sim.last);
}

#[test]
fn a_long_prefill_and_an_unequal_load_are_no_hang() {
    let mut sim = two();
    for round in 0..10 {
        // a single step of four minutes, then a little progress
        let verdicts = first_serves(&mut sim, 240_000, |sim, age_ms| {
            if age_ms < 2_000 {
                serves(sim, 1);
                let now = sim.now;
                quiet_since(sim, now);
            }
        });
        assert!(calm(&verdicts), "round {round}: {:?}", sim.last);
    }
}

#[test]
fn scrapes_that_do_not_come_are_no_silence_of_a_rank() {
    let mut sim = two();
    let metrics = sim.metrics.clone();
    for _ in 0..8_000 {
        sim.metrics = None;
        let verdict = sim.deliver_for(100).verdict;
        assert_eq!(verdict, Verdict::Progressing, "{:?}", sim.last);
    }
    // what the first one after that shows has moved since, whenever that was
    sim.metrics = metrics;
    (0..2).for_each(|of| serves(&mut sim, of));
    let verdict = sim.deliver_for(100).verdict;
    assert_eq!(verdict, Verdict::Progressing, "{:?}", sim.last);
}

#[test]
fn maintenance_and_compilers_stop_the_clock_of_a_rank_as_well() {
    let mut sim = two();
    let verdicts = first_serves(&mut sim, 900_000, |sim, age_ms| sim.maintenance = age_ms < 800_000);
    assert!(calm(&verdicts), "{:?}", sim.last);
}

#[test]
fn a_process_that_is_stopped_waits_for_no_device_whatever_the_other_engines_burn() {
    // nothing was learned of it, and its other engines work on answers that do not stream
    let mut sim = Sim::foreign().up();
    sim.cpu = 2_000;
    sim.admit(4, 200);
    sim.process().stopped = 1;
    sim.silence_until(30_000, stalled).unwrap();
    assert_eq!(sim.last.unwrap().verdict, Verdict::Stalled(StallClass::StepStalled));
}

#[test]
fn a_rank_that_stands_does_not_make_the_pod_s_next_silence_a_crawl() {
    let mut sim = two();
    let slowly = |sim: &mut Sim, ms: Ms, wait_ms: Ms, both: bool| {
        for _ in 0..ms / wait_ms {
            sim.silence(wait_ms - 100);
            (0..if both { 2 } else { 1 }).for_each(|of| serves(sim, of));
            let at = if both { sim.now } else { sim.gate.as_ref().unwrap().quietest_begun_ms.unwrap() };
            quiet_since(sim, at);
            sim.deliver_for(100);
        }
    };
    // slow enough for seconds of silence to be no crawl by themselves
    slowly(&mut sim, 1_000_000, 1_000, true);
    slowly(&mut sim, 303_000, 1_000, false);
    assert!(sim.last.as_ref().unwrap().verdict.class().is_some());
    slowly(&mut sim, 13_000, 2_600, false);
    let after = sim.silence_until(200_000, stalled);
    assert!(after.is_some(), "{:?}", sim.last);
    let reasons = &sim.last.as_ref().unwrap().reasons;
    assert!(!reasons.iter().any(|reason| reason.text.contains("crawl before")), "{reasons:?}");
}
