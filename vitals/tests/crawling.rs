//! Slow is not hung: engines that turn a hundred times slower at once, and what tells them from a hang; and how long an engine of which
//! nothing is known may be silent while nothing works.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled, suspect};
use vitals::observation::{GpuObs, Ms};
use vitals::verdict::{Outcome, Verdict};

fn spinning(mut sim: Sim) -> Sim {
    sim.process().state = Some('R');
    sim.process().wchan = None;
    sim.cpu = 1_000;
    sim
}

/// Decode steps of this length; the verdicts on the way.
fn native_steps(sim: &mut Sim, count: u32, step_ms: Ms) -> Vec<Verdict> {
    let mut seen = Vec::new();
    for _ in 0..count {
        let began = sim.now;
        sim.page.as_mut().unwrap().step_started_ms = Some(began);
        while sim.now + 100 < began + step_ms {
            seen.push(sim.tick(100).verdict);
        }
        let page = sim.page.as_mut().unwrap();
        page.steps_completed += 1;
        page.tokens_delivered += u64::from(page.running);
        page.step_started_ms = Some(began + step_ms);
        page.lease_ms = page.lease_ms.max(20 * step_ms);
        sim.deliver(4, began + step_ms);
        seen.push(sim.tick(100).verdict);
    }
    seen
}

/// A foreign engine that streams, one chunk each `gap_ms`.
fn streaming(gap_ms: Ms) -> Sim {
    let mut sim = Sim::foreign().up();
    sim.admit(4, 200);
    for _ in 0..120_000 / gap_ms {
        stream(&mut sim, gap_ms);
    }
    sim
}

fn stream(sim: &mut Sim, gap_ms: Ms) {
    let at = sim.now + gap_ms;
    while sim.now + 100 < at {
        sim.tick(100);
    }
    sim.deliver(4, at);
    sim.tick(at - sim.now);
}

fn health_lies(outcome: &Option<Outcome>) -> bool {
    let outcome = outcome.as_ref().unwrap();
    let said = outcome.reasons.iter().any(|reason| reason.source == "frontend" && reason.text.contains("lies"));
    assert_eq!(said, outcome.health_lies);
    said
}

#[test]
fn a_native_engine_that_crawls_is_fenced_and_lives_and_a_spinning_hang_is_confirmed_after_that() {
    let mut sim = spinning(Sim::native().up().busy(10_000));
    let seen = native_steps(&mut sim, 12, 5_000);
    assert!(seen.iter().any(suspect), "a hundred times slower at once is told within half a second");
    assert!(!seen.iter().any(stalled), "an engine that crawls was to be killed");
    // what it learned of crawling makes it patient
    assert!(!native_steps(&mut sim, 4, 5_000).iter().any(suspect));

    let mut sim = spinning(Sim::native().up().busy(10_000));
    sim.silence_until(1_000, suspect).unwrap();
    let confirmed = sim.silence_until(60_000, stalled).unwrap();
    assert!((6_000..=10_000).contains(&confirmed), "{confirmed}");
    let mut quiet = Sim::native().up().busy(10_000);
    quiet.cpu = 0;
    let confirmed = quiet.silence_until(60_000, stalled).unwrap();
    assert!(confirmed <= 5_000, "who crawls works: {confirmed}");
}

#[test]
fn a_cold_native_engine_may_crawl_as_well() {
    let mut sim = spinning(Sim::native().up());
    sim.admit(1, 10);
    assert!(!native_steps(&mut sim, 3, 12_000).iter().any(stalled));
    sim.silence_until(400_000, stalled).unwrap();
}

#[test]
fn a_foreign_engine_that_is_slow_by_nature_has_its_own_hundred_times() {
    let mut sim = spinning(streaming(500));
    sim.silence_until(20_000, suspect).unwrap();
    assert_eq!(sim.silence_until(55_000, stalled), None, "{:?}", sim.last);
    stream(&mut sim, 100);
    assert!(!suspect(&sim.last.as_ref().unwrap().verdict));
    sim.silence_until(310_000, stalled).unwrap();

    let mut quick = spinning(streaming(100));
    quick.silence_until(20_000, suspect).unwrap();
    let confirmed = quick.silence_until(60_000, stalled).unwrap();
    assert!((19_000..=21_000).contains(&confirmed), "{confirmed}");
}

#[test]
fn a_gpu_that_works_as_in_health_speaks_for_the_engine_and_a_cold_one_against_it() {
    let card = |util, memory_util, watts| {
        vec![GpuObs {
            util,
            memory_util,
            power_watts: Some(watts),
            power_limit_watts: Some(600.0),
            ..GpuObs::default()
        }]
    };
    for (after, least, most) in [(card(98, 40, 430.0), 290_000, 330_000), (card(100, 2, 150.0), 9_000, 14_000)] {
        let mut sim = spinning(Sim::foreign().up().busy(10_000));
        sim.gpus = card(98, 40, 450.0);
        sim.decode(10_000);
        sim.gpus = after;
        let confirmed = sim.silence_until(400_000, stalled).unwrap();
        assert!((least..=most).contains(&confirmed), "{confirmed}: {:?}", sim.last);
    }
}

#[test]
fn where_nothing_was_learned_and_nothing_works_the_fence_comes_after_a_minute_and_the_kill_with_the_rivals() {
    let mut sim = Sim::foreign().up();
    sim.cpu = 10;
    sim.admit(1, 20_000);
    let fenced = sim.silence_until(400_000, suspect).unwrap();
    assert!((60_000..=66_000).contains(&fenced), "{fenced}");
    let confirmed = fenced + sim.silence_until(400_000, stalled).unwrap();
    assert!((300_000..=305_000).contains(&confirmed), "{confirmed}");
    assert!(health_lies(&sim.last), "{:?}", sim.last);
}

#[test]
fn whatever_works_is_given_the_rivals_patience() {
    type Works = fn(&mut Sim);
    let works: [(&str, Works); 4] = [
        ("the CPU", |sim| sim.cpu = 300),
        ("a GPU", |sim| sim.gpus = vec![GpuObs { util: 60, ..GpuObs::default() }]),
        ("the disk", |sim| {
            let read = sim.now * 1_000;
            sim.process().read_chars = Some(read);
        }),
        ("nobody knows what", |sim| sim.proc = None),
    ];
    for (name, works) in works {
        let mut sim = Sim::foreign().up();
        sim.cpu = 10;
        sim.admit(1, 20_000);
        for _ in 0..2_950 {
            works(&mut sim);
            let verdict = sim.tick(100).verdict;
            assert!(!suspect(&verdict), "{name} works: {:?}", sim.last);
        }
    }
}

#[test]
fn health_lies_where_it_says_200_of_a_stall_and_only_there() {
    let mut sim = Sim::native().up().busy(10_000);
    sim.cpu = 0;
    sim.silence_until(5_000, suspect).unwrap();
    assert!(!health_lies(&sim.last), "a suspicion is no proof");
    sim.silence_until(10_000, stalled).unwrap();
    assert!(health_lies(&sim.last));
    let now = sim.now;
    let front = sim.frontend.as_mut().unwrap();
    (front.status, front.answers, front.silent_since_ms) = (Some(503), true, None);
    sim.tick(100);
    assert!(!health_lies(&sim.last), "it tells the truth now");
    let front = sim.frontend.as_mut().unwrap();
    (front.status, front.answers, front.silent_since_ms) = (None, false, Some(now));
    sim.tick(100);
    assert!(!health_lies(&sim.last), "it says nothing");
    sim.frontend.as_mut().unwrap().status = Some(200);
    sim.frontend.as_mut().unwrap().answers = true;
    sim.deliver_for(100);
    assert!(!health_lies(&sim.last), "no stall, no lie");
}

/// No gate: an engine that answers four requests at a time, one end every five seconds; are its tokens counted as they are made?
fn without_a_gate(tokens_live: bool) -> Sim {
    let mut sim = spinning(Sim::foreign().up());
    sim.gate = None;
    sim.process().connections = Some(4);
    let metrics = sim.metrics.as_mut().unwrap();
    (metrics.running, metrics.requests_finished) = (Some(4.0), Some(0.0));
    for tick in 0..600 {
        let metrics = sim.metrics.as_mut().unwrap();
        let (ends, counts) = (tick % 50 == 49, tick % 50 == 49 || tokens_live);
        metrics.requests_finished = metrics.requests_finished.map(|n| n + f64::from(u8::from(ends)));
        metrics.generation_tokens = metrics.generation_tokens.map(|n| n + 20.0 * f64::from(u8::from(counts)));
        metrics.progress_digest += u64::from(counts);
        assert!(!suspect(&sim.tick(100).verdict), "{:?}", sim.last);
    }
    sim
}

/// New requests are prefilled, which moves a figure every five seconds; nobody's tokens are counted.
fn turns_until(sim: &mut Sim, ms: Ms, done: impl Fn(&Verdict) -> bool) -> Option<Ms> {
    let began = sim.now;
    while sim.now - began < ms {
        sim.metrics.as_mut().unwrap().progress_digest += 1;
        if sim.silence_until(5_000, &done).is_some() {
            return Some(sim.now - began);
        }
    }
    None
}

#[test]
fn an_engine_that_counts_whole_answers_and_has_no_gate_may_crawl_through_them() {
    let mut lumps = without_a_gate(false);
    assert_eq!(turns_until(&mut lumps, 800_000, stalled), None, "{:?}", lumps.last);
    let told = &lumps.last.as_ref().unwrap().reasons;
    assert!(told.iter().any(|reason| reason.text.contains("counts whole answers")), "{told:?}");
    let confirmed = turns_until(&mut lumps, 300_000, stalled).unwrap();
    assert!((100_000..=130_000).contains(&confirmed), "{confirmed}");
    assert_eq!(lumps.last.unwrap().verdict.class().unwrap().name(), "Livelock");

    let mut live = without_a_gate(true);
    let confirmed = turns_until(&mut live, 800_000, stalled).unwrap();
    assert!(confirmed <= 325_000, "its tokens are counted as they are made: {confirmed}");
}

#[test]
fn who_was_seen_to_crawl_and_to_live_has_the_rivals_patience() {
    let mut sim = spinning(streaming(100));
    sim.silence_until(4_000, suspect).unwrap();
    stream(&mut sim, 100);
    assert!(!suspect(&sim.last.as_ref().unwrap().verdict), "it delivered");
    sim.silence_until(20_000, suspect).unwrap();
    assert_eq!(sim.silence_until(270_000, stalled), None, "{:?}", sim.last);
    let told = &sim.last.as_ref().unwrap().reasons;
    assert!(told.iter().any(|reason| reason.text.contains("seen to crawl")), "{told:?}");
    sim.silence_until(40_000, stalled).unwrap();

    // two minutes of the old pace, and that is forgotten
    let mut again = spinning(streaming(100));
    again.silence_until(4_000, suspect).unwrap();
    (0..1_300).for_each(|_| stream(&mut again, 100));
    again.silence_until(20_000, suspect).unwrap();
    let confirmed = again.silence_until(60_000, stalled).unwrap();
    assert!(confirmed <= 30_000, "{confirmed}");
}

/// Eight requests, half of which stream, and four of which the engine has begun to work for.
fn half_of_them_stream() -> Sim {
    let mut sim = spinning(streaming(100));
    sim.depart();
    sim.admit(8, 10);
    sim.gate.as_mut().unwrap().unstreamed = Some(4);
    let metrics = sim.metrics.as_mut().unwrap();
    (metrics.running, metrics.kv_usage, metrics.requests_finished) = (Some(4.0), Some(0.3), Some(1.0));
    sim
}

#[test]
fn streams_may_all_wait_behind_answers_that_come_whole() {
    let mut sim = half_of_them_stream();
    assert_eq!(turns_until(&mut sim, 880_000, stalled), None, "{:?}", sim.last);
    let told = &sim.last.as_ref().unwrap().reasons;
    assert!(told.iter().any(|reason| reason.text.contains("counts whole answers")), "{told:?}");
    turns_until(&mut sim, 60_000, stalled).unwrap();
}

#[test]
fn a_stream_that_waits_behind_whole_answers_or_is_held_back_until_it_is_whole_accuses_no_front_end_at_300_s() {
    for waiting in [4.0, 0.0] {
        let mut sim = half_of_them_stream();
        // one of the streams has begun, and two run
        sim.gate.as_mut().unwrap().awaiting_first_byte = 7;
        let metrics = sim.metrics.as_mut().unwrap();
        (metrics.running, metrics.waiting) = (Some(2.0), Some(waiting));
        let began = sim.now;
        let token = |sim: &mut Sim| {
            let metrics = sim.metrics.as_mut().unwrap();
            metrics.generation_tokens = metrics.generation_tokens.map(|tokens| tokens + 3.0);
            metrics.prompt_tokens = Some(metrics.prompt_tokens.unwrap_or(0.0) + 3_900.0);
            metrics.progress_digest += 1;
            sim.silence_until(2_000, stalled).is_some()
        };
        assert!((0..480).any(|_| token(&mut sim)), "{:?}", sim.last);
        let confirmed = sim.now - began;
        assert!((890_000..=910_000).contains(&confirmed), "{confirmed}: {:?}", sim.last);
        assert_eq!(sim.last.unwrap().verdict.class().unwrap().name(), "FrontendStalled");
    }
}

#[test]
fn tokens_of_whole_answers_that_were_made_long_ago_accuse_no_front_end() {
    let mut sim = half_of_them_stream();
    for _ in 0..12 {
        let metrics = sim.metrics.as_mut().unwrap();
        metrics.generation_tokens = metrics.generation_tokens.map(|tokens| tokens + 100.0);
        metrics.progress_digest += 1;
        sim.silence(5_000);
    }
    // a cache that fills is believed to be prefill for long
    let filling = |sim: &mut Sim| {
        let metrics = sim.metrics.as_mut().unwrap();
        metrics.kv_usage = metrics.kv_usage.map(|usage| usage + 0.001);
        turns_until(sim, 5_000, stalled)
    };
    assert!((0..250).any(|_| filling(&mut sim).is_some()), "{:?}", sim.last);
    assert_eq!(sim.last.unwrap().verdict.class().unwrap().name(), "Livelock");
}

#[test]
fn a_step_of_many_more_streams_than_usual_may_crawl_for_longer() {
    let confirmed = |streams: u32| {
        let mut sim = spinning(streaming(200));
        let gate = sim.gate.as_mut().unwrap();
        (gate.in_flight, gate.awaiting_first_byte) = (streams, 0);
        sim.silence_until(10_000, suspect).unwrap() + sim.silence_until(400_000, stalled).unwrap()
    };
    let (usual, many) = (confirmed(4), confirmed(40));
    assert!(usual <= 40_000, "{usual}");
    assert!((usual * 5..=310_000).contains(&many), "{usual} {many}");
}

/// A prompt that is alone, and its first byte after so long; nobody looks in between.
fn prompt_unseen(sim: &mut Sim, tokens: u64, took_ms: Ms) {
    sim.depart();
    sim.tick(1_000);
    sim.admit(1, tokens);
    sim.tick(100);
    let first_byte_at = sim.now + took_ms;
    sim.deliver(1, first_byte_at);
    sim.tick(took_ms);
}

#[test]
fn what_prompts_cost_is_learned_between_two_looks_as_well() {
    let confirmed = |took_ms| {
        let mut sim = spinning(streaming(20));
        for _ in 0..3 {
            prompt_unseen(&mut sim, 500, took_ms);
        }
        sim.admit(2, 300);
        sim.silence_until(10_000, suspect).unwrap() + sim.silence_until(400_000, stalled).unwrap()
    };
    let (quick, slow) = (confirmed(5), confirmed(500));
    assert!(quick <= 25_000, "{quick}");
    assert!((40_000..=120_000).contains(&slow), "a crawl of 300 tokens at a millisecond each: {slow}");
}

#[test]
fn a_prompt_that_health_may_need_the_rivals_patience_for_is_fenced_by_then_and_killed_after_the_long_one() {
    for (tokens, known) in [(50_000, true), (100_000, false)] {
        let mut sim = spinning(Sim::foreign().up().busy(20_000));
        sim.admit(1, 29_000);
        assert_eq!(sim.silence_until(70_000, suspect), None, "a step of 70 s for 29000 tokens");
        sim.decode(10_000);
        sim.admit(1, tokens);
        let fenced = sim.silence_until(400_000, suspect).unwrap();
        assert!((295_000..=305_000).contains(&fenced), "{fenced}");
        let told = sim.last.as_ref().unwrap().reasons[0].text.contains("own rhythm");
        assert_eq!(told, known, "{:?}", sim.last);
        let confirmed = fenced + sim.silence_until(700_000, stalled).unwrap();
        assert!((890_000..=910_000).contains(&confirmed), "{confirmed}: {:?}", sim.last);
    }
}

#[test]
fn an_engine_of_long_prompts_alone_has_no_usual_silence_and_is_not_killed_within_ten_times_what_they_take() {
    let mut sim = spinning(Sim::foreign().up());
    for _ in 0..6 {
        sim.admit(1, 50_000);
        sim.gate.as_mut().unwrap().unstreamed = Some(1);
        sim.silence(44_000);
        // its figures move as it goes, which is what makes its silence tell
        sim.metrics.as_mut().unwrap().progress_digest += 1;
        sim.tick(100);
        sim.silence(1_000);
        let at = sim.now;
        sim.deliver(1, at);
        sim.tick(100);
        sim.depart();
    }
    sim.admit(1, 50_000);
    sim.gate.as_mut().unwrap().unstreamed = Some(1);
    let fenced = sim.silence_until(400_000, suspect).unwrap();
    let confirmed = fenced + sim.silence_until(700_000, stalled).unwrap();
    assert!(fenced <= 301_000 && (450_000..=600_000).contains(&confirmed), "{fenced} {confirmed}: {:?}", sim.last);
}
