//! Suspects that are let out on trial because their clients gave up, and what is remembered of them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled, suspect};
use vitals::observation::Ms;
use vitals::verdict::Verdict;

const TICK_MS: Ms = 100;

/// A stranger that spins, after it has streamed a chunk each 800 ms, and answered each of forty short requests in as long: a hundred times that may be a crawl.
fn spinning() -> Sim {
    let mut sim = Sim::foreign().up();
    sim.admit(4, 200);
    for _ in 0..100 {
        sim.silence(800 - TICK_MS);
        sim.deliver_for(TICK_MS);
    }
    sim.depart();
    for _ in 0..40 {
        sim.admit(1, 50);
        sim.silence(800 - TICK_MS);
        sim.deliver_for(TICK_MS);
        sim.depart();
    }
    sim.cpu = 1_000;
    sim
}

/// A request comes, gets nothing, and its client gives up after this long, or sees the stall confirmed.
fn asked_in_vain(sim: &mut Sim, client_ms: Ms) -> Option<Ms> {
    sim.admit(1, 50);
    if let Some(metrics) = &mut sim.metrics {
        metrics.running = Some(1.0);
    }
    let confirmed = sim.silence_until(client_ms, stalled);
    assert!(confirmed.is_some() || suspect(&sim.last.as_ref().unwrap().verdict), "fenced meanwhile");
    sim.depart();
    confirmed
}

fn let_out(sim: &mut Sim) {
    let out = sim.silence_until(60_000, |verdict| *verdict == Verdict::Idle).unwrap();
    assert!((29_000..=31_000).contains(&out), "{out}");
}

/// What one silence must last until it proves a hang of this engine.
fn proof_ms() -> Ms {
    let mut sim = spinning();
    sim.admit(1, 50);
    sim.metrics.as_mut().unwrap().running = Some(1.0);
    sim.silence_until(900_000, stalled).unwrap()
}

#[test]
fn silences_that_clients_cut_short_add_up_where_nothing_moved_between_them() {
    let proof_ms = proof_ms();
    assert!(proof_ms > 100_000, "{proof_ms}");
    let client_ms = proof_ms * 2 / 5;
    let mut sim = spinning();
    for _ in 0..2 {
        assert_eq!(asked_in_vain(&mut sim, client_ms), None);
        let_out(&mut sim);
    }
    let third = asked_in_vain(&mut sim, client_ms).unwrap();
    assert!(third.abs_diff(proof_ms - 2 * client_ms) <= 11_000, "{third} of {proof_ms}");
    let said = &sim.last.as_ref().unwrap().reasons;
    assert!(said.iter().any(|reason| reason.text.contains("before the trial it was silent for")), "{said:?}");
}

#[test]
fn a_silence_is_not_carried_over_anything_that_moved() {
    let client_ms = proof_ms() * 2 / 5;
    type Moves = fn(&mut Sim);
    let moves: [(&str, Moves); 3] = [
        ("a delivery", |sim| {
            sim.admit(1, 50);
            sim.deliver_for(TICK_MS);
            sim.depart();
        }),
        ("a step", |sim| {
            let metrics = sim.metrics.as_mut().unwrap();
            metrics.iterations = Some(metrics.iterations.unwrap_or(0.0) + 1.0);
            metrics.progress_digest += 1;
        }),
        ("a long time", |sim| {
            sim.silence(660_000);
        }),
    ];
    for (what, moves) in moves {
        let mut sim = spinning();
        sim.metrics.as_mut().unwrap().iterations = Some(0.0);
        for round in 0..6 {
            assert_eq!(asked_in_vain(&mut sim, client_ms), None, "round {round}, {what} between");
            let_out(&mut sim);
            moves(&mut sim);
            sim.silence(TICK_MS);
        }
    }
}
