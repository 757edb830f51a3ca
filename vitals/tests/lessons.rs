//! What a silence may be counted from and what it may teach: stale gauges, hangs that ended, prompts whose clients left.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled, suspect};
use vitals::detector::{Detector, Policy};
use vitals::observation::{Ms, PagePhase};
use vitals::verdict::{StallClass, Verdict};

#[test]
fn gauges_that_stand_after_the_last_request_owe_nothing() {
    let mut sim = Sim::foreign().up().busy(10_000);
    sim.leave();
    sim.cpu = 10;
    assert!(sim.metrics.as_ref().unwrap().running.unwrap() > 0.0, "the gauge must stand for this test");
    assert_eq!(sim.silence_until(900_000, |verdict| *verdict != Verdict::Idle), None, "{:?}", sim.last);
    // a request that comes now inherits no silence
    sim.admit(1, 10);
    assert_eq!(sim.tick(100).verdict, Verdict::Progressing, "{:?}", sim.last);
    let fenced = sim.silence_until(400_000, suspect).unwrap();
    assert!(fenced >= 2_000, "{fenced}");
    sim.silence_until(310_000, stalled).unwrap();
}

#[test]
fn a_hang_that_ended_by_itself_is_no_rhythm() {
    // hung with prompts owed, confirmed or beyond the rivals' patience, and let go
    for confirmed in [true, false] {
        let mut sim = Sim::foreign().up().busy(10_000);
        if !confirmed {
            sim.depart();
        }
        sim.admit(4, 200);
        sim.silence_until(310_000, if confirmed { stalled } else { suspect }).unwrap();
        sim.silence(if confirmed { 200_000 } else { 0 });
        sim.decode(20_000);
        sim.admit(4, 200);
        let next = sim.silence_until(60_000, suspect).unwrap_or(Ms::MAX);
        assert!(next <= 5_000, "confirmed: {confirmed}, fenced after {next} ms");
    }
}

#[test]
fn a_prompt_whose_client_left_is_still_in_the_step() {
    let mut sim = Sim::foreign().up().busy(10_000);
    // what a long prompt takes: ten seconds
    for _ in 0..6 {
        sim.admit(1, 20_000);
        sim.silence(10_000);
        sim.decode(2_000);
    }
    sim.admit(1, 20_000);
    sim.tick(100);
    let gate = sim.gate.as_mut().unwrap();
    (gate.in_flight, gate.awaiting_first_byte, gate.prompt_tokens_owed) = (gate.in_flight - 1, 0, 0);
    assert_eq!(sim.silence_until(12_000, suspect), None, "{:?}", sim.last);
    // and a hang is still one, the sooner where no prompt was owed since the last delivery
    sim.silence_until(60_000, suspect).unwrap();
    sim.decode(2_000);
    let fenced = sim.silence_until(60_000, suspect).unwrap();
    assert!(fenced <= 5_000, "{fenced}");
}

#[test]
fn a_detector_that_finds_an_engine_old_has_seen_no_silence() {
    let mut sim = Sim::foreign();
    sim.metrics = None;
    sim.cpu = 10;
    // the process is 1010 s old, its front end is slow to answer a new agent's first probe
    sim.now += 1_010_000;
    sim.detector = vitals::detector::Detector::new(vitals::policy::Policy::default(), common::T0);
    assert_eq!(sim.silence_until(290_000, suspect), None, "{:?}", sim.last);
    sim.silence_until(20_000, suspect).unwrap();
}

#[test]
fn a_prompt_that_is_older_than_the_detector_teaches_nothing_and_none_teaches_twice() {
    let mut sim = Sim::foreign().up().busy(20_000);
    sim.admit(1, 29_000);
    sim.silence(5_000);
    // another detector takes its place at the very end
    sim.detector = Detector::new(Policy::default(), sim.now);
    // which may not have asked the gate yet when it looks for the first time
    let gate = sim.gate.take();
    sim.tick(100);
    sim.gate = gate;
    sim.silence(200);
    sim.decode(20_000);
    sim.admit(1, 20_000);
    assert_eq!(sim.silence_until(60_000, suspect), None, "of prompts it knows nothing: {:?}", sim.last);

    // ten minutes of decode later: what the prompts taught is neither forgotten nor thinned out
    let mut sim = Sim::knows_long_prompts(600_000);
    sim.admit(1, 10_000);
    let fenced = sim.silence_until(60_000, suspect).unwrap();
    assert!((14_000..=20_000).contains(&fenced), "{fenced}");
}

#[test]
fn a_stopped_process_anywhere_in_the_tree_is_told_before_anything_was_learned() {
    let mut sim = Sim::foreign().up();
    sim.cpu = 10;
    sim.process().stopped = 1;
    sim.admit(4, 200);
    let fenced = sim.silence_until(10_000, suspect).unwrap();
    let confirmed = fenced + sim.silence_until(60_000, stalled).unwrap();
    assert!(confirmed <= 15_000, "{fenced} {confirmed}");
}

#[test]
fn no_lease_excuses_a_step_that_somebody_has_stopped() {
    for (stopped, stopped_cores, allowed) in [(1, 1, 0..=3_000), (1, 0, 120_000..=121_000), (0, 0, 120_000..=121_000)] {
        let mut sim = Sim::native().up();
        sim.admit(4, 14_000);
        let page = sim.page.as_mut().unwrap();
        (page.phase, page.phase_tokens, page.lease_ms) = (PagePhase::Prefill, 14_000, 120_000);
        sim.cpu = 10;
        (sim.process().stopped, sim.process().stopped_cores) = (stopped, stopped_cores);
        let fenced = sim.silence_until(200_000, suspect).unwrap();
        assert!(allowed.contains(&fenced), "{stopped} {stopped_cores}: {fenced}");
        let confirmed = sim.silence_until(60_000, stalled).unwrap();
        assert!(confirmed <= 12_000, "{stopped} {stopped_cores}: {confirmed}");
        assert_eq!(sim.last.unwrap().verdict, Verdict::Stalled(StallClass::StepStalled));
    }
}

#[test]
fn who_was_stopped_and_runs_again_is_let_out_at_once_unless_its_own_rhythm_accuses_it() {
    let lifted = |mut sim: Sim| {
        sim.process().state = Some('T');
        sim.admit(1, 200);
        sim.silence_until(10_000, suspect).unwrap();
        sim.process().state = Some('R');
        sim.silence_until(60_000, |verdict| !suspect(verdict) || stalled(verdict)).unwrap();
        sim.last.unwrap().verdict
    };
    assert_eq!(lifted(Sim::foreign().up()), Verdict::Progressing, "nothing was learned that would accuse it");
    assert!(stalled(&lifted(Sim::foreign().up().busy(20_000))), "it is still silent for too long");
}

#[test]
fn an_engine_that_is_stopped_between_two_requests_hears_of_no_third() {
    let fenced = |state| {
        let mut sim = Sim::native().up().busy(10_000);
        sim.depart();
        sim.idle();
        sim.silence(1_000);
        sim.process().state = Some(state);
        sim.admit(4, 200);
        sim.idle(); // the gate alone knows of them
        sim.silence_until(10_000, suspect).unwrap()
    };
    let (stopped, waiting) = (fenced('T'), fenced('S'));
    assert!(stopped <= 500 && waiting > 2_500, "{stopped} {waiting}");
}

#[test]
fn one_movement_long_ago_is_no_livelock() {
    let mut sim = Sim::foreign().up().busy(10_000);
    sim.depart();
    sim.admit(4, 200);
    sim.silence(60_000);
    // the last sign of a prompt's first chunk; its second one hangs
    sim.metrics.as_mut().unwrap().progress_digest += 1;
    sim.silence_until(310_000, suspect).unwrap();
    sim.silence_until(60_000, stalled).unwrap();
    let class = sim.last.unwrap().verdict.class().unwrap().name();
    assert!(["DeviceWait", "StepStalled"].contains(&class), "{class}");
}

#[test]
fn prompts_that_are_prefilled_again_and_again_are_no_progress() {
    let mut sim = Sim::native().up().busy(10_000);
    sim.admit(2, 4_000);
    let fenced = (0..600).find(|round| {
        let now = sim.now;
        let page = sim.page.as_mut().unwrap();
        (page.phase, page.phase_tokens, page.step_started_ms) = (PagePhase::Prefill, 512, Some(now));
        page.steps_completed += 1;
        page.prompt_tokens_owed = 4_096 - 512 * (round % 8);
        suspect(&sim.tick(100).verdict)
    });
    assert!(fenced.is_some_and(|round| round > 8), "{fenced:?}: {:?}", sim.last);
}

#[test]
fn a_queue_of_prompts_does_not_teach_that_one_is_quick() {
    let mut sim = Sim::foreign().up().busy(10_000);
    // eight prompts of 5 000 tokens are owed at any time, each takes five seconds
    for _ in 0..10 {
        let (now, gate) = (sim.now, sim.gate.as_mut().unwrap());
        (gate.in_flight, gate.awaiting_first_byte, gate.prompt_tokens_owed) = (12, 8, 40_000);
        gate.oldest_in_flight_ms = Some(now);
        sim.silence(5_000);
        let at = sim.now;
        sim.deliver(1, at);
        sim.gate.as_mut().unwrap().prompt_tokens_owed = 35_000;
        sim.tick(100);
    }
    sim.gate.as_mut().unwrap().prompt_tokens_owed = 0;
    sim.decode(20_000);
    sim.admit(1, 5_000);
    assert_eq!(sim.silence_until(6_000, suspect), None, "{:?}", sim.last);
}

/// One prefill step of 512 tokens a tick, of two prompts; `owed` is what is owed after it.
fn prefill_step(sim: &mut Sim, owed: u64) -> Verdict {
    let now = sim.now;
    let page = sim.page.as_mut().unwrap();
    (page.phase, page.phase_tokens, page.step_started_ms) = (PagePhase::Prefill, 512, Some(now));
    page.steps_completed += 1;
    page.prompt_tokens_owed = owed;
    sim.tick(100).verdict
}

/// One client at a time with a prompt of 8192 tokens gives up half way, and another comes within the same look. Does a gate know?
fn clients_who_give_up(sim: &mut Sim, gate_knows: bool) -> Option<usize> {
    (0..40).find(|_| {
        let gate = sim.gate.as_mut().unwrap();
        gate.prompt_tokens_taken += if gate_knows { 8_192 } else { 0 };
        (0..8).any(|step| suspect(&prefill_step(sim, 8_192 - 512 * step)))
    })
}

#[test]
fn clients_who_give_up_in_prefill_and_are_followed_at_once_are_known_to_the_gate() {
    let mut sim = Sim::native().up().busy(10_000);
    sim.admit(1, 8_192);
    assert_eq!(clients_who_give_up(&mut sim, true), None, "{:?}", sim.last);
    // the same page without anybody at the gate is one prompt that is prefilled again and again
    let fenced = clients_who_give_up(&mut sim, false);
    assert!(fenced.is_some(), "{:?}", sim.last);
}

#[test]
fn prompts_that_go_round_at_once_are_no_progress_although_little_falls_at_a_time() {
    let mut sim = Sim::native().up().busy(10_000);
    sim.admit(2, 4_000);
    // each step ends a prompt, which is owed again at once: what is owed goes up and down by a little
    let fenced = (0..2_000).find(|round| suspect(&prefill_step(&mut sim, 30_000 - 150 * (round % 2))));
    assert!(fenced.is_some_and(|rounds| rounds < 3 * 30_000 / 512 + 120), "{fenced:?}: {:?}", sim.last);
}

#[test]
fn prompts_that_come_faster_than_they_are_done_are_progress_and_those_who_leave_are_none_of_it() {
    let mut sim = Sim::native().up().busy(10_000);
    sim.admit(2, 4_000);
    // what is owed only grows, and each time somebody came
    for round in 0..100u64 {
        sim.page.as_mut().unwrap().waiting += 1;
        assert!(!suspect(&prefill_step(&mut sim, 10_000 + 300 * round)), "{round}: {:?}", sim.last);
    }
    // one leaves and another comes between two looks, step after step
    sim.page.as_mut().unwrap().waiting = 0;
    for round in 0..60u64 {
        assert!(!suspect(&prefill_step(&mut sim, 500 + 600 * (round % 2))), "{round}: {:?}", sim.last);
    }
    // clients leave and others come; the steps turn all the while
    for round in 0..100u64 {
        let page = sim.page.as_mut().unwrap();
        page.waiting = if round % 2 == 0 { 1 } else { 9 };
        let owed = if round % 2 == 0 { 2_000 } else { 40_000 };
        assert!(!suspect(&prefill_step(&mut sim, owed)), "{round}: {:?}", sim.last);
    }
}

#[test]
fn a_plugins_page_tells_of_a_loop_that_turns_where_nothing_has_begun_to_answer() {
    let mut sim = Sim::native().up();
    // as vLLM's plugin publishes it: without leases
    sim.page.as_mut().unwrap().lease_ms = 0;
    sim.detector = vitals::detector::Detector::new(vitals::policy::Policy::default(), common::T0);
    sim.gate = sim.gate.take().map(|gate| vitals::observation::GateObs { unstreamed: Some(0), ..gate });
    sim.admit(4, 200);
    let turn = |sim: &mut Sim, tokens: u64| {
        let now = sim.now;
        let page = sim.page.as_mut().unwrap();
        page.lease_ms = 0;
        page.steps_completed += 5;
        page.tokens_delivered += tokens;
        page.step_started_ms = Some(now);
        sim.tick(100).verdict
    };
    // answers that do not stream, and whose tokens are counted, may take their time
    for round in 0..4_000 {
        assert!(!suspect(&turn(&mut sim, 4)), "{round}: {:?}", sim.last);
    }
    let fenced = (1..4_000).find(|_| suspect(&turn(&mut sim, 0)));
    assert!(fenced.is_some_and(|ticks| (2_990..=3_010).contains(&ticks)), "{fenced:?}: {:?}", sim.last);
    assert_eq!(sim.last.unwrap().verdict.class().unwrap().name(), "Livelock");
}

#[test]
fn one_long_prompt_among_short_ones_is_as_long_as_it_is() {
    let fenced = |tells: bool| {
        let mut sim = Sim::foreign().up().busy(10_000);
        for _ in 0..20 {
            sim.admit(8, 8_000);
            sim.gate.as_mut().unwrap().longest_prompt_owed = tells.then_some(1_000);
            sim.silence(400);
            sim.deliver_for(100);
            sim.gate.as_mut().unwrap().longest_prompt_owed = tells.then_some(0);
            sim.decode(1_000);
        }
        // as many tokens as ever, all but a few of one prompt
        sim.admit(8, 8_000);
        sim.gate.as_mut().unwrap().longest_prompt_owed = tells.then_some(7_930);
        sim.silence_until(60_000, suspect)
    };
    assert!(fenced(false).is_some_and(|ms| ms < 6_000), "{:?}", fenced(false));
    assert_eq!(fenced(true), None, "nobody has seen what one of that length takes");
}

#[test]
fn a_successor_knows_what_is_usual_of_the_same_process() {
    let after_a_restart = |knows: bool| {
        let mut sim = Sim::foreign().up().busy(20_000);
        let written = serde_json::to_string(&sim.detector.learned()).unwrap();
        assert!(written.len() < 4_096, "{} bytes a minute", written.len());
        sim.detector = Detector::new(Policy::default(), sim.now - 60_000);
        if knows {
            sim.detector = sim.detector.clone().with_learned(serde_json::from_str(&written).unwrap());
        }
        (0..5).for_each(|_| drop(sim.deliver_for(100)));
        sim.silence_until(400_000, suspect).unwrap()
    };
    assert!(after_a_restart(true) <= 5_000);
    assert!(after_a_restart(false) >= 100_000, "else this tells nothing");
}
