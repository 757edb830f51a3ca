//! Several pages of one engine: a scheduler's and its workers', and who of them is silent.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled, suspect};
use vitals::observation::{Ms, PagePhase};
use vitals::verdict::{StallClass, Verdict};

/// A scheduler's page and two workers' as vLLM's plugin publishes them: all count the same steps.
fn plugin() -> Sim {
    let mut sim = Sim::native().up();
    sim.admit(4, 200);
    sim.page.as_mut().unwrap().world_size = 3;
    sim.peers = vec![sim.page.clone().unwrap(), sim.page.clone().unwrap()];
    for (peer, rank) in sim.peers.iter_mut().zip(1..) {
        peer.rank = rank;
    }
    for _ in 0..100 {
        let at = sim.now + 100;
        let page = sim.page.as_mut().unwrap();
        page.steps_completed += 2;
        page.tokens_delivered += 8;
        page.step_started_ms = Some(at);
        let steps = page.steps_completed;
        workers(&mut sim, steps, |_| None);
        sim.deliver(8, at);
        sim.tick(100);
    }
    sim
}

fn workers(sim: &mut Sim, steps: u64, in_step: impl Fn(u32) -> Option<Ms>) {
    for peer in &mut sim.peers {
        peer.steps_completed = steps;
        peer.tokens_delivered = 0;
        peer.step_started_ms = in_step(peer.rank);
    }
}

fn confirmed(mut sim: Sim) -> StallClass {
    sim.silence_until(60_000, suspect).unwrap();
    sim.silence_until(200_000, stalled).unwrap();
    sim.last.unwrap().verdict.class().unwrap().clone()
}

#[test]
fn a_scheduler_that_hands_out_no_step_is_not_its_workers_silence() {
    let sim = plugin();
    assert_eq!(sim.last.as_ref().unwrap().verdict, Verdict::Progressing);
    let mut sim_quiet = sim;
    sim_quiet.cpu = 10;
    assert_eq!(confirmed(sim_quiet), StallClass::StepStalled);
}

#[test]
fn a_worker_that_does_not_enter_the_step_of_the_others_is_silent() {
    let mut sim = plugin();
    let (now, steps) = (sim.now, sim.page.as_ref().unwrap().steps_completed);
    workers(&mut sim, steps, |rank| (rank == 1).then_some(now));
    sim.cpu = 10;
    assert_eq!(confirmed(sim), StallClass::RankSilent { ranks: vec![2] });
}

#[test]
fn a_scheduler_that_sleeps_excuses_workers_that_do_not_know_of_it() {
    let mut sim = plugin();
    let page = sim.page.as_mut().unwrap();
    (page.phase, page.lease_ms, page.step_started_ms) = (PagePhase::Sleep, 0, None);
    page.waiting = 6;
    sim.silence(60_000);
    assert_eq!(sim.last.unwrap().verdict, Verdict::Sleeping);
}

/// The loop's page was withdrawn, or was never made: workers count no tokens, and each looks as if it turned in vain.
#[test]
fn workers_without_their_loop_are_witnesses_and_accuse_nobody() {
    let mut sim = plugin();
    sim.page = None;
    for n in 0..600 {
        let (at, steps) = (sim.now + 100, sim.peers[0].steps_completed + 2);
        workers(&mut sim, steps, |_| Some(at));
        // an answer every two seconds
        if n % 20 == 0 {
            sim.deliver(8, at);
        }
        let told = sim.tick(100);
        assert!(!suspect(&told.verdict), "{n}: {told:?}");
    }
    let fenced = sim.silence_until(600_000, suspect);
    assert!(fenced.is_some(), "and a hang is one by the gate's silence: {:?}", sim.last);
}

/// vLLM before 0.12 ends a worker's last step when it gives it the next one.
#[test]
fn a_step_that_a_worker_left_open_while_nothing_was_owed_is_no_silence() {
    let mut sim = plugin();
    let (now, steps) = (sim.now, sim.page.as_ref().unwrap().steps_completed);
    workers(&mut sim, steps, |_| Some(now));
    sim.leave();
    sim.idle();
    sim.page.as_mut().unwrap().phase_tokens = 0;
    sim.peers.iter_mut().for_each(|peer| peer.running = 0);
    assert_eq!(sim.silence_until(700_000, suspect), None, "{:?}", sim.last);
    // the gate has it, the loop does not know of it yet
    let gate = sim.gate.as_mut().unwrap();
    (gate.in_flight, gate.awaiting_first_byte, gate.prompt_tokens_owed) = (1, 1, 50);
    gate.oldest_in_flight_ms = Some(sim.now);
    assert_eq!(sim.silence_until(1_000, suspect), None, "{:?}", sim.last);
    let page = sim.page.as_mut().unwrap();
    (page.running, page.phase, page.phase_tokens, page.lease_ms) = (1, PagePhase::Decode, 1, 2_000);
    page.step_started_ms = Some(sim.now);
    let fenced = sim.silence_until(60_000, suspect);
    assert!(fenced.is_some(), "the loop's own step is one: {:?}", sim.last);
}
