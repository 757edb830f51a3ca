//! Prefill steps so short that no look sees one end: what bounds the next one, whatever its lease says.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled, suspect};
use vitals::observation::{Ms, PagePhase};

/// A prompt of so many tokens begins its only prefill step now; the lease comes from a first prefill that was slow.
fn begin_prefill(sim: &mut Sim, tokens: u32) {
    let now = sim.now;
    let page = sim.page.as_mut().unwrap();
    (page.phase, page.phase_tokens, page.prompt_tokens_owed) = (PagePhase::Prefill, tokens, u64::from(tokens));
    (page.lease_ms, page.step_started_ms, page.published_ms) = (6_200, Some(now), now);
}

/// It ends `ms` after it began, and decode goes on in steps of 10 ms until the next look.
fn end_prefill(sim: &mut Sim, ms: Ms) {
    let at = sim.now + 100;
    let page = sim.page.as_mut().unwrap();
    let steps = 1 + (100 - ms) / 10;
    (page.phase, page.phase_tokens, page.prompt_tokens_owed, page.lease_ms) = (PagePhase::Decode, 4, 0, 400);
    page.steps_completed += steps;
    page.tokens_delivered += 4 * steps;
    (page.step_started_ms, page.published_ms) = (Some(at - 5), at);
    sim.deliver(4 * steps, at);
    sim.tick(100);
}

/// Four streams that decode in steps of 10 ms, and nothing else was ever seen.
fn decoding() -> Sim {
    let mut sim = Sim::native().up();
    sim.admit(4, 100);
    for _ in 0..100 {
        end_prefill(&mut sim, 10);
    }
    sim.cpu = 10;
    sim
}

#[test]
fn prefill_that_was_never_seen_is_bounded_by_decode_for_as_many_tokens() {
    let fenced = |tokens| {
        let mut sim = decoding();
        begin_prefill(&mut sim, tokens);
        sim.silence_until(10_000, suspect).unwrap()
    };
    assert!((250..=700).contains(&fenced(20)), "{}", fenced(20));
    assert!(fenced(200) >= 2_000, "decode of as many tokens takes as long: {}", fenced(200));
    assert!(fenced(2_000) <= 6_400, "never longer than the lease: {}", fenced(2_000));
}

#[test]
fn a_prefill_step_that_ended_among_others_is_known_to_have_been_no_longer() {
    let mut sim = decoding();
    for _ in 0..8 {
        begin_prefill(&mut sim, 200);
        sim.tick(5);
        end_prefill(&mut sim, 30);
    }
    begin_prefill(&mut sim, 200);
    let fenced = sim.silence_until(10_000, suspect).unwrap();
    assert!((300..=600).contains(&fenced), "{fenced}");
}

#[test]
fn a_lease_that_one_slow_step_left_behind_delays_no_confirmation_but_of_what_may_crawl() {
    let confirmed = |burns: bool| {
        let mut sim = decoding();
        (sim.cpu, sim.process().state) = if burns { (900, Some('R')) } else { (10, Some('S')) };
        begin_prefill(&mut sim, 200);
        let fenced = sim.silence_until(10_000, suspect).unwrap();
        (fenced, fenced + sim.silence_until(120_000, stalled).unwrap())
    };
    let (fenced, asleep) = confirmed(false);
    assert!(asleep <= fenced * 5 + 200 && asleep >= fenced + 2_000, "fenced after {fenced}, confirmed after {asleep}");
    let (_, burning) = confirmed(true);
    assert!(burning >= 20_000, "an engine that crawls burns as well: {burning}");
}

#[test]
fn steps_that_end_in_vain_are_a_livelock_whatever_one_of_them_may_last() {
    let fenced = |steps_a_look: u64| {
        let mut sim = decoding();
        begin_prefill(&mut sim, 64);
        let began = sim.now;
        while sim.now - began < 10_000 {
            let now = sim.now;
            let page = sim.page.as_mut().unwrap();
            page.steps_completed += steps_a_look;
            (page.step_started_ms, page.published_ms) = (Some(now), now);
            if suspect(&sim.tick(100).verdict) {
                return Some(sim.now - began);
            }
        }
        None
    };
    let many = fenced(10).unwrap();
    assert!((300..=500).contains(&many), "{many}");
    assert!(fenced(1).unwrap() > many, "a few that ended say less: {:?}", fenced(1));
}

#[test]
fn a_slow_first_prefill_is_not_what_a_few_tokens_usually_take() {
    let mut sim = decoding();
    sim.process().state = Some('R');
    sim.cpu = 900;
    // seen by five looks: half a second for 16 tokens
    begin_prefill(&mut sim, 16);
    sim.silence(400);
    end_prefill(&mut sim, 100);
    (0..20).for_each(|_| end_prefill(&mut sim, 10));
    begin_prefill(&mut sim, 16);
    let fenced = sim.silence_until(10_000, suspect).unwrap();
    let confirmed = fenced + sim.silence_until(120_000, stalled).unwrap();
    // 150 times a step of 10 ms and the 16 that decoding them would take, and not 150 times half a second
    assert!((20_000..=32_000).contains(&confirmed), "fenced after {fenced}, confirmed after {confirmed}");
}
