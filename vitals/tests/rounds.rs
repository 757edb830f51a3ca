//! Prompts that go round: requests that are prefilled again and again take room in the cache as prefill and decode do, and clients who give up
//! make room in it as they do anywhere. What tells the one from the other, and whom that must not accuse.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, suspect};
use vitals::detector::{Detector, Policy};
use vitals::observation::Ms;

/// Answers that come whole, eight of which the engine works for, among many that wait; `prompts`: what it counts, where it counts them.
fn whole_answers(prompts: Option<f64>) -> Sim {
    let mut sim = Sim::foreign().up().busy(10_000);
    sim.depart();
    sim.admit(130, 70_000);
    let gate = sim.gate.as_mut().unwrap();
    (gate.unstreamed, gate.prompt_tokens_taken) = (Some(130), 70_000);
    let metrics = sim.metrics.as_mut().unwrap();
    (metrics.running, metrics.waiting, metrics.kv_usage) = (Some(8.0), Some(122.0), Some(0.3));
    metrics.prompt_tokens = prompts;
    sim
}

/// One second in which the cache comes to hold so much more, or less, and so many prompt tokens are counted.
fn second(sim: &mut Sim, room: f64, prompts: f64) -> bool {
    let metrics = sim.metrics.as_mut().unwrap();
    metrics.kv_usage = metrics.kv_usage.map(|used| used + room);
    metrics.prompt_tokens = metrics.prompt_tokens.map(|counted| counted + prompts);
    metrics.progress_digest += 1;
    sim.silence_until(1_000, suspect).is_some()
}

/// A client gives up, and another comes.
fn one_for_another(sim: &mut Sim) {
    let gate = sim.gate.as_mut().unwrap();
    gate.requests_done += 1;
    gate.prompt_tokens_taken += 500;
}

/// How long until the fence, where each second is as `each` says.
fn fenced(sim: &mut Sim, most_s: u32, each: impl Fn(&mut Sim, u32) -> bool) -> Option<Ms> {
    let began = sim.now;
    (1..=most_s).any(|s| each(sim, s)).then(|| sim.now - began)
}

/// The cache fills for so many seconds, and a prompt begins anew.
fn round(sim: &mut Sim, s: u32, of_s: u32, prompts: f64) -> bool {
    let room = if s.is_multiple_of(of_s) { -0.01 * f64::from(of_s - 1) } else { 0.01 };
    second(sim, room, prompts)
}

/// Rounds of 22 s, while a client gives up at some seconds and another comes; when it is fenced.
fn rounds_beside_leavers(leaves: impl Fn(u32) -> bool) -> (Option<u64>, Sim) {
    let mut sim = whole_answers(None);
    let after = fenced(&mut sim, 1_500, |sim, s| {
        if leaves(s) {
            one_for_another(sim);
        }
        round(sim, s, 22, 0.0)
    });
    (after, sim)
}

#[test]
fn clients_who_give_up_now_and_then_are_no_excuse_for_room_that_is_given_back_at_other_times() {
    let (after, sim) = rounds_beside_leavers(|s| s % 20 == 1);
    assert!(after.is_some_and(|ms| (300_000..800_000).contains(&ms)), "{after:?}: {:?}", sim.last);
}

#[test]
fn clients_whose_room_is_given_back_a_little_after_they_gave_up_accuse_nobody() {
    let (after, sim) = rounds_beside_leavers(|s| s % 22 == 18);
    assert_eq!(after, None, "{:?}", sim.last);
}

/// A quarter of the cache is given back at once, and little by little a part of it is taken again; when that is fenced.
fn refilled_after(left: bool) -> (Option<u64>, Sim) {
    let mut sim = whole_answers(None);
    let after = fenced(&mut sim, 1_500, |sim, s| {
        if left && s == 61 {
            one_for_another(sim);
        }
        // a step that was under way when the client left
        second(sim, if s == 63 { -0.25 } else { 0.0001 }, 0.0)
    });
    (after, sim)
}

#[test]
fn room_that_is_given_back_at_the_end_of_a_step_may_be_filled_again() {
    let (after, sim) = refilled_after(true);
    assert_eq!(after, None, "{:?}", sim.last);
    let (after, sim) = refilled_after(false);
    assert!(
        after.is_some_and(|ms| (300_000..500_000).contains(&ms)),
        "nobody left: the same room again: {after:?}: {:?}",
        sim.last
    );
}

#[test]
fn a_slot_that_keeps_what_it_held_until_another_is_admitted_to_it_accuses_nobody() {
    let mut sim = whole_answers(None);
    let after = fenced(&mut sim, 1_500, |sim, s| {
        match s % 66 {
            22 => one_for_another(sim),
            23 => sim.metrics.as_mut().unwrap().running = Some(7.0),
            0 => sim.metrics.as_mut().unwrap().running = Some(8.0),
            _ => {}
        }
        round(sim, s, 66, 0.0)
    });
    assert_eq!(after, None, "{:?}", sim.last);
}

#[test]
fn a_cache_that_fills_with_prompts_that_were_counted_many_times_over_does_not_fill() {
    // the first of the prompts leave next to nothing of each step to the others, so that room is taken for hours
    let mut sim = whole_answers(Some(100_000.0));
    let after = fenced(&mut sim, 1_500, |sim, _| second(sim, 0.000_1, 2_000.0));
    assert!(after.is_some_and(|ms| (300_000..600_000).contains(&ms)), "{after:?}: {:?}", sim.last);
    assert_eq!(sim.last.unwrap().verdict.class().unwrap().name(), "DecodeStalled");
}

#[test]
fn prompts_that_were_owed_before_anybody_looked_are_known_to_be_owed() {
    let mut sim = whole_answers(Some(100_000.0));
    sim.detector = Detector::new(Policy::default(), sim.now);
    sim.gate.as_mut().unwrap().prompt_tokens_owed = 5_000_000;
    let after = fenced(&mut sim, 1_500, |sim, _| second(sim, 0.000_1, 2_000.0));
    assert_eq!(after, None, "{:?}", sim.last);
}

#[test]
fn whoever_decodes_after_prompts_that_were_greater_than_the_gate_took_them_for_works_on() {
    // pictures that the engine fetches by themselves, and one more such prompt now and then
    let mut sim = whole_answers(Some(100_000.0));
    let after = fenced(&mut sim, 1_500, |sim, s| {
        let prompts = if s < 60 || s % 50 == 0 { 50_000.0 } else { 0.0 };
        second(sim, 0.000_1, prompts)
    });
    assert_eq!(after, None, "{:?}", sim.last);
}

#[test]
fn a_gate_whose_tokens_were_always_several_of_the_engines_accuses_nobody_of_that() {
    // 500 requests of some 10 tokens by the gate, for each of which the engine counts 2000
    let mut sim = whole_answers(Some(100_000.0));
    for _ in 0..500 {
        let at = sim.now;
        sim.admit(1, 10);
        let gate = sim.gate.as_mut().unwrap();
        (gate.requests_done, gate.prompt_tokens_taken) = (gate.requests_done + 1, gate.prompt_tokens_taken + 10);
        gate.in_flight = 130;
        sim.deliver(1, at);
        second(&mut sim, 0.0, 2_000.0);
    }
    sim.depart();
    sim.admit(400, 4_000);
    let gate = sim.gate.as_mut().unwrap();
    (gate.unstreamed, gate.requests_done) = (Some(400), 500);
    gate.prompt_tokens_taken = 70_000 + 5_000 + 4_000;
    let after = fenced(&mut sim, 700, |sim, _| second(sim, 0.000_1, 2_000.0));
    assert_eq!(after, None, "{:?}", sim.last);
}
