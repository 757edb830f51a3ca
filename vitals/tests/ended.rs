//! A process by which the engine steps has ended and its front end lives (H6, H7): told at once, whatever the front end answers, and
//! forgotten when another one has come.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, cell, stalled, suspect};
use vitals::observation::{EndedObs, Ms};
use vitals::verdict::{StallClass, Verdict};

fn serving() -> Sim {
    let mut sim = Sim::foreign().up().busy(20_000);
    sim.cpu = 5;
    sim
}

fn idle() -> Sim {
    let mut sim = serving();
    sim.idle();
    sim.depart();
    sim.silence(2_000);
    sim
}

/// The engine core's process ends; so many of its name live on.
fn ends(mut sim: Sim, peers: u32) -> Sim {
    let at_ms = sim.now;
    sim.process().ended = Some(EndedObs { pid: 42, name: "VLLM::EngineCor".to_owned(), at_ms, peers });
    sim
}

fn fenced_and_confirmed(sim: &mut Sim) -> [Option<Ms>; 2] {
    let began = sim.now;
    let fenced = sim.silence_until(10_000, suspect);
    let confirmed = sim.silence_until(10_000, stalled);
    [fenced, confirmed.map(|_| sim.now - began)]
}

#[test]
fn whoever_has_lost_its_core_is_fenced_and_confirmed_within_seconds_with_work_and_without() {
    for mut sim in [serving(), idle()] {
        sim = ends(sim, 0);
        assert_eq!(fenced_and_confirmed(&mut sim), [Some(600), Some(2_600)]);
        let last = sim.last.clone().unwrap();
        assert_eq!(cell(&last), "Stalled(ProcessDied) FER");
        assert!(last.health_lies);
        let told = last.reasons.iter().any(|r| r.source == "proc" && r.text.contains("VLLM::EngineCor (process 42)"));
        assert!(told, "{:?}", last.reasons);
    }
}

#[test]
fn nothing_that_its_front_end_answers_lets_it_out_and_no_trial_does() {
    for mut sim in [ends(serving(), 0), ends(idle(), 0)] {
        sim.silence(1_000);
        // `500 Internal Server Error` to whoever asks
        for _ in 0..100 {
            let gate = sim.gate.as_mut().unwrap();
            gate.chunks_delivered += 1;
            gate.bytes_delivered += 80;
            gate.requests_done += 1;
            gate.last_delivery_ms = Some(sim.now + 90);
            let outcome = sim.tick(100);
            assert!(suspect(&outcome.verdict) || stalled(&outcome.verdict), "{outcome:?}");
        }
        sim.leave();
        sim.silence(400_000);
        assert_eq!(cell(sim.last.as_ref().unwrap()), "Stalled(ProcessDied) FER", "although nobody waits");
    }
}

#[test]
fn another_one_in_its_place_clears_it() {
    for ms in [1_000, 10_000] {
        let mut sim = ends(idle(), 0);
        sim.silence(ms);
        assert_eq!(sim.last.as_ref().unwrap().verdict.class(), Some(&StallClass::ProcessDied));
        sim.process().ended = None;
        assert_eq!(cell(&sim.tick(100)), "Idle U");
        sim.admit(4, 200);
        sim.cpu = 800;
        let loads = sim.silence_until(200_000, suspect);
        assert_eq!(loads, None, "the rhythm of the one before it is not the next one's, which may load yet");
    }
}

#[test]
fn where_others_of_its_name_live_what_they_deliver_speaks_for_them() {
    let mut sim = ends(serving(), 1);
    // by the gate alone
    sim.metrics = None;
    assert!(sim.decode(20_000).iter().all(|outcome| outcome.verdict == Verdict::Progressing));
    assert_eq!(fenced_and_confirmed(&mut sim), [Some(2_600), Some(4_600)], "and their silence against them");
    let mut sim = ends(idle(), 1);
    assert_eq!(sim.silence_until(600_000, |verdict| *verdict != Verdict::Idle), None, "nothing is asked of them");
    sim.admit(1, 200);
    assert_eq!(fenced_and_confirmed(&mut sim), [Some(2_600), Some(4_600)], "and now it is");
}

#[test]
fn whoever_steps_on_needed_it_for_nothing() {
    let mut sim = ends(serving(), 0);
    assert!(sim.decode(20_000).iter().all(|outcome| outcome.verdict == Verdict::Progressing), "by its tokens");
    sim.depart();
    assert_eq!(sim.silence_until(600_000, |verdict| *verdict != Verdict::Idle), None, "nor later");
    // an engine that another program's core was taken for, fenced before its next scrape
    let mut sim = ends(serving(), 0);
    sim.silence(1_000);
    assert!(suspect(&sim.last.as_ref().unwrap().verdict));
    sim.decode(300);
    assert_eq!(sim.last.as_ref().unwrap().verdict, Verdict::Progressing);
}

#[test]
fn a_case_of_another_class_becomes_this_one_and_takes_its_time() {
    let mut sim = serving();
    sim.silence(4_000);
    assert_eq!(cell(sim.last.as_ref().unwrap()), "Suspect(StepStalled) F");
    sim = ends(sim, 0);
    let since = sim.now;
    assert_eq!(sim.silence_until(10_000, stalled).map(|_| sim.now - since), Some(2_600));
    assert_eq!(cell(sim.last.as_ref().unwrap()), "Stalled(ProcessDied) FER");
    let mut sim = serving();
    sim.silence(20_000);
    assert_eq!(cell(sim.last.as_ref().unwrap()), "Stalled(StepStalled) FER");
    sim = ends(sim, 0);
    sim.silence(1_000);
    let last = sim.last.clone().unwrap();
    assert_eq!(cell(&last), "Stalled(ProcessDied) FER", "without a moment in between");
    assert!(last.reasons.iter().any(|reason| reason.text.contains("VLLM::EngineCor")), "{:?}", last.reasons);
}

#[test]
fn what_the_engine_has_outlived_is_no_matter_after_a_blind_moment_or_a_drain_that_is_called_off() {
    let mut sim = ends(serving(), 0);
    sim.decode(5_000);
    sim.idle();
    sim.depart();
    let proc = sim.proc.take();
    sim.silence(1_000);
    sim.proc = proc;
    assert_eq!(sim.silence_until(60_000, suspect), None);
    sim.draining = true;
    sim.silence(1_000);
    sim.draining = false;
    assert_eq!(sim.silence_until(60_000, suspect), None);
    // … and one that ends later is another matter
    sim.process().ended.as_mut().unwrap().pid = 43;
    sim.process().ended.as_mut().unwrap().at_ms = sim.now;
    assert_eq!(fenced_and_confirmed(&mut sim), [Some(600), Some(2_600)]);
}

#[test]
fn steps_that_fail_and_tokens_from_before_its_end_are_no_steps_without_it() {
    let mut sim = Sim::native().up().busy(20_000);
    sim = ends(sim, 0);
    sim.deliver_for(100);
    for _ in 0..30 {
        // its step fails because of that: counted, and nothing is handed out
        sim.page.as_mut().unwrap().steps_completed += 1;
        sim.tick(100);
    }
    assert_eq!(cell(sim.last.as_ref().unwrap()), "Stalled(ProcessDied) FER");
}

#[test]
fn that_nobody_asks_any_more_lets_those_that_are_left_out_on_trial_and_no_sooner() {
    let mut sim = ends(serving(), 1);
    sim.silence(10_000);
    assert_eq!(cell(sim.last.as_ref().unwrap()), "Stalled(ProcessDied) FER");
    sim.depart();
    let out = sim.silence_until(60_000, |verdict| !stalled(verdict)).unwrap();
    assert!((29_000..=31_000).contains(&out), "{out}");
}

#[test]
fn who_cannot_look_has_seen_nobody_come_in_its_place() {
    let mut sim = ends(idle(), 0);
    sim.silence(5_000);
    let proc = sim.proc.take();
    sim.silence(60_000);
    assert_eq!(cell(sim.last.as_ref().unwrap()), "Stalled(ProcessDied) FER");
    sim.proc = proc;
    sim.silence(1_000);
    assert_eq!(cell(sim.last.as_ref().unwrap()), "Stalled(ProcessDied) FER");
}

#[test]
fn who_was_told_to_leave_or_is_in_other_hands_ends_its_parts_as_it_likes() {
    let mut sim = ends(serving(), 0);
    sim.draining = true;
    assert_eq!(sim.silence_until(2_000, |verdict| suspect(verdict) || stalled(verdict)), None);
    let mut sim = ends(idle(), 0);
    sim.maintenance = true;
    assert_eq!(sim.silence_until(60_000, |verdict| suspect(verdict) || stalled(verdict)), None);
    let mut sim = ends(serving(), 0);
    sim.process().alive = false;
    assert_eq!(sim.tick(100).verdict, Verdict::Dead, "it has ended as a whole");
}

#[test]
fn a_start_up_that_has_lost_its_core_is_not_waited_for() {
    let mut sim = Sim::foreign();
    sim.metrics = None;
    sim.silence(20_000);
    assert_eq!(sim.last.as_ref().unwrap().verdict, Verdict::Starting);
    sim = ends(sim, 0);
    assert_eq!(fenced_and_confirmed(&mut sim), [Some(600), Some(2_600)]);
    assert_eq!(sim.last.as_ref().unwrap().verdict, Verdict::Stalled(StallClass::StartupStalled));
    let told = sim.last.as_ref().unwrap().reasons.iter().any(|reason| reason.text.contains("VLLM::EngineCor"));
    assert!(told, "{:?}", sim.last);
    sim.silence(400_000);
    assert!(stalled(&sim.last.as_ref().unwrap().verdict), "whatever else may be said of that start-up by then");
}
