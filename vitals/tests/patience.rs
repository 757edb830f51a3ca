//! Healthy engines that look like hung ones, and what keeps them alive; each with the hang that must still be caught.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled, suspect};
use vitals::observation::{Ms, PagePhase, Signal};
use vitals::verdict::{Action, StallClass, Verdict};

/// A foreign engine that streamed and then served this many short requests, one at a time; idle now.
fn served(requests: u32) -> Sim {
    let mut sim = Sim::foreign().up().busy(10_000);
    sim.depart();
    sim.served(requests)
}

#[test]
fn a_front_end_that_fetches_for_a_client_is_fenced_at_most_and_never_killed_for_a_quiet_cpu() {
    for cpu in [10, 800] {
        let mut sim = served(40);
        sim.cpu = cpu;
        sim.admit(1, 10);
        let fenced = sim.silence_until(20_000, suspect).unwrap();
        assert!(fenced <= 5_000, "the silence before a first byte was learned: {fenced}");
        assert_eq!(sim.silence_until(90_000, stalled), None, "killed at {cpu} permille");
    }
}

#[test]
fn gaps_between_tokens_teach_nothing_about_a_first_byte() {
    let mut sim = served(0);
    sim.admit(1, 10);
    assert_eq!(sim.silence_until(200_000, suspect), None);
}

#[test]
fn a_request_that_the_engine_took_in_and_froze_on_is_confirmed_as_soon_as_ever() {
    let mut sim = served(40);
    sim.cpu = 10;
    sim.admit(1, 10);
    sim.metrics.as_mut().unwrap().running = Some(1.0);
    let confirmed = sim.silence_until(60_000, stalled).unwrap();
    assert!(confirmed <= 15_000, "{confirmed}");
}

#[test]
fn tokens_counted_in_one_lump_at_a_requests_end_are_no_livelock() {
    let mut sim = served(40);
    sim.admit(1, 10);
    for second in 0..250 {
        let metrics = sim.metrics.as_mut().unwrap();
        metrics.running = Some(1.0);
        metrics.iterations = Some(f64::from(second) * 20.0);
        metrics.progress_digest += 1;
        let outcome = sim.tick(1_000);
        assert_eq!(outcome.verdict, Verdict::Progressing, "at {second} s: {:?}", outcome.reasons);
    }
}

#[test]
fn the_rivals_patience_confirms_against_an_engine_that_does_nothing_and_not_where_one_works_unseen() {
    let confirm = |cpu| {
        let mut sim = served(40);
        sim.metrics = None;
        sim.cpu = cpu;
        sim.admit(1, 10);
        sim.silence_until(1_000_000, stalled).unwrap()
    };
    let (idle, burning) = (confirm(10), confirm(800));
    assert!(idle <= 303_000 && (900_000..=921_000).contains(&burning), "idle {idle} ms, burning {burning} ms");
}

#[test]
fn a_slow_scrape_is_no_silence_of_the_engine() {
    let mut sim = served(40);
    sim.admit(1, 10);
    let (mut scraped_ms, mut scraped) = (sim.now, sim.metrics.clone().unwrap());
    for tick in 0..600u32 {
        if tick % 60 == 0 {
            // it was asked for at once and answers six seconds later
            scraped.generation_tokens = Some(f64::from(tick) + 10_000.0);
            scraped.progress_digest += 1;
            scraped_ms = sim.now;
        }
        sim.now += 100;
        let mut obs = sim.observation();
        obs.metrics = Signal::at(scraped_ms, scraped.clone());
        let outcome = sim.detector.step(sim.now, &obs);
        assert_eq!(outcome.verdict, Verdict::Progressing, "{:?}", outcome.reasons);
    }
}

#[test]
fn a_front_end_that_answers_503_has_not_come_up() {
    let mut sim = Sim::foreign();
    sim.metrics = None;
    let front = sim.frontend.as_mut().unwrap();
    (front.answers, front.status) = (true, Some(503));
    let outcome = sim.tick(1_000);
    assert_eq!((outcome.verdict, outcome.actions), (Verdict::Starting, vec![Action::Fence]));
    sim.frontend.as_mut().unwrap().status = Some(200);
    assert_eq!(sim.tick(1_000).verdict, Verdict::Idle);
}

#[test]
fn what_the_front_end_answers_by_itself_frees_no_step_beyond_its_lease() {
    let mut sim = Sim::native().up().busy(10_000);
    sim.silence_until(10_000, stalled).unwrap();
    for _ in 0..20 {
        let at = sim.now;
        sim.deliver(1, at);
        assert!(stalled(&sim.tick(100).verdict), "an error answer ended the case");
    }
    assert_eq!(sim.deliver_for(100).verdict, Verdict::Progressing);
}

#[test]
fn a_loop_that_begins_no_step_is_confirmed_in_ten_seconds_because_no_lease_ran_out() {
    let mut sim = Sim::native().up().busy(5_000);
    sim.idle();
    sim.tick(100);
    sim.page.as_mut().unwrap().waiting = 3;
    sim.silence_until(5_000, suspect).unwrap();
    let confirmed = sim.silence_until(60_000, stalled).unwrap();
    assert!((9_000..=11_000).contains(&confirmed), "{confirmed}");
}

/// Decode steps of this many sequences and milliseconds, under ticks of 100 ms; the longest that was fenced, if any.
fn steps(sim: &mut Sim, count: u32, running: u32, step_ms: Ms) -> u32 {
    let mut fenced = 0;
    for _ in 0..count {
        let now = sim.now;
        let page = sim.page.as_mut().unwrap();
        (page.running, page.phase_tokens, page.lease_ms) = (running, running, 30_000);
        page.step_started_ms = Some(now);
        fenced += u32::from(sim.silence(step_ms - 100).fenced);
        let page = sim.page.as_mut().unwrap();
        page.steps_completed += 1;
        page.tokens_delivered += u64::from(running);
        page.step_started_ms = Some(now + step_ms);
        let at = now + step_ms;
        sim.deliver(1, at);
        sim.tick(100);
    }
    fenced
}

#[test]
fn slow_decode_steps_are_learned_as_long_as_they_are() {
    let mut sim = Sim::native().up();
    sim.admit(1, 10);
    assert_eq!(steps(&mut sim, 80, 1, 3_000), 0);
    sim.cpu = 0;
    assert!(sim.silence_until(31_000, suspect).is_some(), "its lease is the end of patience");
}

#[test]
fn a_wider_batch_may_take_longer_in_proportion() {
    let mut sim = Sim::native().up();
    sim.admit(1, 10);
    assert_eq!(steps(&mut sim, 80, 1, 200), 0);
    assert_eq!(steps(&mut sim, 20, 16, 3_200), 0);
}

#[test]
fn an_engine_that_slows_down_at_once_is_fenced_a_few_times_and_not_for_ever() {
    let mut sim = Sim::native().up().busy(10_000);
    let first = steps(&mut sim, 10, 4, 3_000);
    assert!(first >= 1, "a fast engine's freeze is told at once");
    assert_eq!(steps(&mut sim, 20, 4, 3_000), 0);
}

#[test]
fn a_confirmed_stall_with_nothing_owed_is_tried_once_and_a_relapse_is_not() {
    let mut sim = served(40);
    sim.cpu = 10;
    let stall = |sim: &mut Sim| {
        sim.admit(1, 10);
        sim.metrics.as_mut().unwrap().running = Some(1.0);
        sim.silence_until(60_000, stalled).unwrap();
        sim.depart();
    };
    stall(&mut sim);
    let out = sim.silence_until(60_000, |verdict| *verdict == Verdict::Idle).unwrap();
    assert!((29_000..=31_000).contains(&out), "{out}");
    stall(&mut sim);
    assert!(stalled(&sim.silence(60_000).verdict), "it was tried a short while ago");

    let mut killed = served(40);
    killed.cpu = 10;
    stall(&mut killed);
    killed.process().kill_sent_ms = Some(killed.now);
    let class = killed.silence(60_000).verdict.class().map(StallClass::name);
    assert_eq!(class, Some("Unkillable"), "no trial once the kill was sent");
}

#[test]
fn a_native_front_end_that_fetches_before_its_loop_knows_is_not_killed_for_it() {
    let mut sim = Sim::native().up().busy(10_000);
    sim.idle();
    sim.leave();
    sim.tick(100);
    sim.cpu = 10;
    let gate = sim.gate.as_mut().unwrap();
    (gate.in_flight, gate.awaiting_first_byte) = (1, 1);
    assert_eq!(sim.silence_until(100_000, stalled), None);
    assert_eq!(sim.last.unwrap().verdict, Verdict::Suspect(StallClass::AdmissionStalled));
}

#[test]
fn a_few_prompt_tokens_in_a_wide_step_do_not_make_it_short() {
    let mut sim = Sim::native().up();
    sim.admit(1, 10);
    assert_eq!(steps(&mut sim, 80, 4, 300), 0);
    for (tokens, ms) in [(512, 500), (512, 500), (7, 800)] {
        let now = sim.now;
        let page = sim.page.as_mut().unwrap();
        (page.phase, page.phase_tokens, page.prompt_tokens_owed) = (PagePhase::Prefill, tokens, u64::from(tokens));
        page.step_started_ms = Some(now);
        let fenced = sim.silence(ms).fenced;
        assert!(!fenced, "{tokens} tokens, {ms} ms: {:?}", sim.last);
        let page = sim.page.as_mut().unwrap();
        page.steps_completed += 1;
        page.tokens_delivered += 4;
    }
}

#[test]
fn one_late_probe_makes_no_stream_of_an_answer_that_does_not_stream() {
    let mut sim = served(40);
    sim.metrics = None;
    sim.admit(1, 10);
    sim.gate.as_mut().unwrap().unstreamed = Some(1);
    sim.silence(10_000);
    let now = sim.now;
    let front = sim.frontend.as_mut().unwrap();
    (front.answers, front.silent_since_ms) = (false, Some(now));
    assert!(!sim.silence(2_000).fenced, "{:?}", sim.last);
}

#[test]
fn in_a_cache_at_the_brim_a_step_may_hold_a_prompt_that_is_prefilled_again_whoever_waits() {
    let fenced = |used, later_ms| {
        let mut sim = Sim::knows_long_prompts(20_000);
        let metrics = sim.metrics.as_mut().unwrap();
        (metrics.kv_usage, metrics.waiting) = (Some(used), Some(0.0));
        sim.decode(2_000);
        sim.metrics.as_mut().unwrap().kv_usage = Some(used.min(0.9));
        sim.decode(later_ms);
        sim.silence_until(60_000, suspect).unwrap()
    };
    assert!(fenced(0.9, 0) <= 3_000 && fenced(0.99, 20_000) <= 3_000);
    assert!(fenced(0.99, 0) >= 14_000);
}

#[test]
fn a_prompt_that_came_and_left_between_two_deliveries_may_be_in_the_step_after_the_second() {
    let mut sim = Sim::knows_long_prompts(20_000);
    sim.admit(1, 10_000);
    sim.tick(100);
    let gate = sim.gate.as_mut().unwrap();
    (gate.in_flight, gate.awaiting_first_byte, gate.prompt_tokens_owed) = (gate.in_flight - 1, 0, 0);
    sim.tick(100);
    sim.deliver_for(100);
    let fenced = sim.silence_until(60_000, suspect).unwrap();
    assert!(fenced >= 14_000, "{fenced}");
    sim.decode(1_000);
    let fenced = sim.silence_until(60_000, suspect).unwrap();
    assert!(fenced <= 3_000, "one step later it is forgotten: {fenced}");
}

#[test]
fn a_health_that_waits_for_the_engine_is_no_witness_beside_its_metrics_page() {
    let hang = |health_waits: bool| {
        let mut sim = Sim::foreign().up().busy(20_000);
        let now = sim.now;
        let front = sim.frontend.as_mut().unwrap();
        if health_waits {
            (front.answers, front.status, front.silent_since_ms) = (false, None, Some(now));
        }
        let fenced = sim.silence_until(60_000, suspect).unwrap();
        let confirmed = sim.silence_until(400_000, stalled).unwrap();
        let said = sim.last.as_ref().unwrap();
        let witness = said.reasons.iter().any(|reason| reason.text.contains("does not answer"));
        (fenced, confirmed, said.verdict.clone(), witness)
    };
    let waits = hang(true);
    assert_eq!(waits, hang(false));
    assert!(!waits.3 && waits.2.class().is_some_and(|class| *class != StallClass::FrontendStalled), "{waits:?}");
}

/// An adapter is loaded, or weights are exchanged: no step is begun meanwhile, and a page that says so declares how long that may last. One that
/// says nothing shows a loop that stands still.
#[test]
fn a_call_between_two_steps_has_the_lease_that_its_page_declares() {
    for (tells, fenced) in [(true, false), (false, true)] {
        let mut sim = Sim::native().up().busy(60_000);
        let now = sim.now;
        let page = sim.page.as_mut().unwrap();
        (page.step_started_ms, page.published_ms) = (None, now);
        if tells {
            (page.phase, page.phase_entered_ms, page.phase_tokens) = (PagePhase::Load, now, 0);
            (page.step_started_ms, page.lease_ms) = (Some(now), 900_000);
        }
        // it waits for a disk: nothing else shows that it works
        sim.cpu = 5;
        assert_eq!(sim.silence_until(60_000, suspect).is_some(), fenced, "{:?}", sim.last);
        assert!(sim.silence_until(260_000, suspect).is_some(), "no lease is believed for longer than 300 s");
    }
}

/// A stranger whose series move each five seconds and whose streams get nothing, with so many steps counted each minute; when that is
/// confirmed.
fn turns_in_vain(steps_a_minute: u32) -> Option<Ms> {
    let mut sim = Sim::foreign().up().busy(20_000);
    sim.metrics.as_mut().unwrap().iterations = Some(1_000.0);
    sim.deliver_for(1_000);
    let began = sim.now;
    (0..400).find_map(|look: u32| {
        let metrics = sim.metrics.as_mut().unwrap();
        metrics.progress_digest += 1;
        if look % 12 == 11 {
            metrics.iterations = metrics.iterations.map(|steps| steps + f64::from(steps_a_minute));
        }
        sim.silence_until(5_000, stalled).map(|_| sim.now - began)
    })
}

#[test]
fn a_loop_turns_in_vain_where_many_steps_end_or_none_is_counted_and_a_few_may_be_slow() {
    let [uncounted, many, few] = [0, 60, 1].map(|steps| turns_in_vain(steps).unwrap());
    assert!(uncounted < 600_000 && many < 600_000, "{uncounted} {many}");
    assert!(few > many + 60_000, "{few} {many}");
}
