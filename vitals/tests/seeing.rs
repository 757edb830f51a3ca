//! What optional signals add: a detector that begins in the middle, a start-up that only spins, an answer that does not stream, one
//! request stuck among others.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled, suspect};
use vitals::detector::{Detector, Policy};
use vitals::observation::{GpuObs, LogHit, RasObs};
use vitals::verdict::{StallClass, Verdict};

#[test]
fn a_detector_that_begins_in_the_middle_of_a_stall_takes_its_age_from_the_page() {
    let mut sim = Sim::native().up().busy(10_000);
    sim.cpu = 0;
    sim.silence(1_000);
    let began = sim.page.as_ref().unwrap().step_started_ms.unwrap();
    sim.detector = Detector::new(Policy::default(), common::T0);
    sim.silence_until(10_000, suspect).unwrap();
    let age = sim.now - began;
    assert!(
        (2_000..=2_300).contains(&age),
        "a cold detector has the lease of 2 s, counted from the step's begin: {age}"
    );
}

#[test]
fn a_detector_that_begins_in_the_middle_of_a_foreign_stall_counts_from_the_gates_last_delivery() {
    let mut sim = Sim::foreign().up().busy(10_000);
    sim.silence(2_000);
    let last = sim.gate.as_ref().unwrap().last_delivery_ms.unwrap();
    sim.detector = Detector::new(Policy::default(), common::T0);
    sim.silence_until(400_000, suspect).unwrap();
    let silence = sim.now - last;
    assert!((300_000..=300_300).contains(&silence), "{silence}");
}

#[test]
fn a_rank_that_ras_names_stays_named_while_the_next_answer_takes_its_time() {
    let mut sim = Sim::foreign().up().busy(20_000);
    sim.ras =
        Some(RasObs { silent_ranks: vec![3], answered: true, text: "rank 3 is behind".into(), ..RasObs::default() });
    let asked_ms = sim.now;
    // both answers just in time, and the pause between them
    while sim.now < asked_ms + 8_000 + 5_000 + 8_000 {
        sim.now += 100;
        let mut obs = sim.observation();
        obs.ras.at_ms = asked_ms;
        let outcome = sim.detector.step(sim.now, &obs);
        let class = outcome.verdict.class();
        assert!(class.is_none_or(|class| *class == StallClass::RankSilent { ranks: vec![3] }), "{outcome:?}");
        sim.last = Some(outcome);
    }
    assert!(stalled(&sim.last.unwrap().verdict));
}

#[test]
fn a_core_that_says_it_is_dead_is_not_drowned_by_those_that_miss_it_until_it_delivers() {
    let mut sim = Sim::foreign().up().busy(20_000);
    let hit = |signature: &str| LogHit { signature: signature.into(), at_ms: 0, line: String::new() };
    let says = |sim: &mut Sim, log: &[&str]| {
        sim.log = log.iter().map(|signature| hit(signature)).collect();
        sim.tick(100);
        sim.log.clear();
        sim.silence_until(10_000, suspect).unwrap();
        let reasons = &sim.last.as_ref().unwrap().reasons;
        let told = reasons.iter().find(|reason| reason.source == "log").map(|reason| reason.text.clone());
        told.unwrap_or_default()
    };
    sim.tick(100);
    let told =
        says(&mut sim, &["nccl-watchdog", "cuda-error", "vllm-rpc-timeout", "vllm-core-fatal", "nccl-heartbeat"]);
    assert_eq!(told, "the log shows cuda-error: a sticky error, the context is lost (vllm #50880 (H1), llama.cpp)");
    sim.deliver_for(1_000);
    let told = says(&mut sim, &["nccl-watchdog", "vllm-rpc-timeout"]);
    assert!(told.starts_with("the log shows nccl-watchdog: a collective did not end (PyTorch #118369"), "{told}");
}

#[test]
fn a_silent_rank_without_a_name_is_a_witness_and_no_class() {
    let confirmed_after = |silent_elsewhere| {
        let mut sim = Sim::foreign().up().busy(20_000);
        sim.process().state = Some('R');
        sim.cpu = 2_000;
        sim.ras = Some(RasObs { silent_elsewhere, answered: true, ..RasObs::default() });
        let took = sim.silence_until(400_000, stalled).unwrap();
        let class = sim.last.unwrap().verdict;
        assert!(!matches!(class, Verdict::Stalled(StallClass::RankSilent { .. })), "{class:?}");
        took
    };
    assert!(confirmed_after(true) < confirmed_after(false));
}

#[test]
fn a_start_up_that_only_spins_is_late_in_the_end_and_one_that_reads_is_not() {
    let mut sim = Sim::foreign();
    sim.metrics = None;
    sim.cpu = 2_000;
    let late = sim.silence_until(2_000_000, suspect).unwrap();
    assert!((899_000..=901_000).contains(&late), "{late}");
    assert_eq!(sim.last.as_ref().unwrap().verdict, Verdict::Suspect(StallClass::StartupStalled));
    // the CPU time that it is accused of clears it of nothing
    assert_eq!(sim.silence_until(60_000, |verdict| !suspect(verdict) && !stalled(verdict)), None, "{:?}", sim.last);
    assert_eq!(sim.last.as_ref().unwrap().verdict, Verdict::Stalled(StallClass::StartupStalled));

    let mut sim = Sim::foreign();
    sim.metrics = None;
    for second in 0..3_000u64 {
        sim.process().read_chars = Some(second * 500_000_000);
        assert_eq!(sim.tick(1_000).verdict, Verdict::Starting);
    }
    sim.cpu = 0;
    let late = sim.silence_until(400_000, suspect).unwrap();
    // what it used until now is told within two seconds
    assert!((299_000..=303_000).contains(&late), "{late}");
}

/// The kernel counts CPU time in ticks of 10 ms: whoever uses a hundredth of a core shows a tenth of one in some looks.
#[test]
fn a_start_up_that_waits_is_late_however_its_cpu_time_is_counted() {
    let mut sim = Sim::foreign();
    sim.metrics = None;
    sim.cpu = 0;
    let late = (1..4_000u64).find(|look| {
        sim.process().cpu_ms += u64::from(look % 10 == 0) * 10;
        suspect(&sim.tick(100).verdict)
    });
    assert!(late.is_some_and(|look| (2_990..=3_030).contains(&look)), "{late:?}");
    for look in 0..400u64 {
        sim.process().cpu_ms += u64::from(look % 10 == 0) * 10;
        sim.tick(100);
    }
    assert_eq!(sim.last.unwrap().verdict, Verdict::Stalled(StallClass::StartupStalled));
}

#[test]
fn an_answer_that_does_not_stream_is_judged_by_counters_only_where_they_move_on_their_own() {
    for (live, bound) in [(false, 299_000..=301_000), (true, 2_000..=5_000)] {
        let mut sim = Sim::foreign().up().busy(10_000).served(40);
        for count in 0..if live { 8 } else { 0 } {
            // scrapes that count although no byte passed the gate
            sim.admit(1, 10);
            sim.gate.as_mut().unwrap().unstreamed = Some(1);
            sim.tick(100);
            let metrics = sim.metrics.as_mut().unwrap();
            (metrics.progress_digest, metrics.generation_tokens) = (77 + count, Some(1e6 + count as f64));
            sim.tick(100);
            sim.depart();
        }
        sim.admit(1, 10);
        sim.gate.as_mut().unwrap().unstreamed = Some(1);
        let fenced = sim.silence_until(400_000, suspect).unwrap();
        assert!(bound.contains(&fenced), "counters live: {live}: {fenced}");
    }
}

#[test]
fn one_request_stuck_among_deliveries_is_said_and_not_judged() {
    let mut sim = Sim::foreign().up().busy(10_000);
    sim.gate.as_mut().unwrap().quietest_begun_ms = Some(sim.now);
    let mut said = None;
    for _ in 0..900 {
        let outcome = sim.deliver_for(100);
        assert_eq!(outcome.verdict, Verdict::Progressing);
        let stuck = outcome.reasons.iter().any(|reason| reason.text.contains("one request"));
        said = said.or(stuck.then_some(sim.now - sim.gate.as_ref().unwrap().quietest_begun_ms.unwrap()));
    }
    assert!(said.is_some_and(|ms| (60_000..=60_500).contains(&ms)), "{said:?}");
}

#[test]
fn an_nvml_that_does_not_answer_confirms_sooner_and_makes_no_stall() {
    let mut confirmed = Vec::new();
    for silent in [false, true] {
        let mut sim = Sim::foreign().up().busy(10_000);
        sim.process().state = Some('R');
        sim.gpus = vec![GpuObs { silent_since_ms: silent.then_some(sim.now), ..GpuObs::default() }];
        assert!(sim.decode(30_000).iter().all(|outcome| outcome.verdict == Verdict::Progressing));
        sim.silence_until(10_000, suspect).unwrap();
        confirmed.push(sim.silence_until(60_000, stalled).unwrap());
    }
    assert!(confirmed[0] >= 19_000 && confirmed[1] <= 11_000, "{confirmed:?}");
}

#[test]
fn streams_that_begin_soon_say_nothing_about_an_answer_that_shows_counters_alone() {
    let mut sim = Sim::foreign().up().busy(10_000).served(40);
    for round in 0..12 {
        sim.admit(1, 10);
        sim.gate.as_mut().unwrap().unstreamed = Some(1);
        // its counters move each seven seconds, as some engines write them
        for part in 0..3 {
            assert_eq!(sim.silence_until(7_000, suspect), None, "round {round}, part {part}: {:?}", sim.last);
            let metrics = sim.metrics.as_mut().unwrap();
            metrics.progress_digest += 1;
            metrics.generation_tokens = metrics.generation_tokens.map(|tokens| tokens + 40.0);
            sim.tick(100);
        }
        let at = sim.now;
        sim.deliver(1, at);
        sim.tick(100);
        sim.depart();
    }
    sim.admit(1, 10);
    sim.gate.as_mut().unwrap().unstreamed = Some(1);
    let fenced = sim.silence_until(400_000, suspect).unwrap();
    assert!((20_000..=100_000).contains(&fenced), "a hang is still seen, by what such answers took: {fenced}");
}

#[test]
fn steps_that_are_counted_again_lift_a_fence_before_the_answer_comes() {
    let freeze = |counts: bool| {
        let mut sim = Sim::foreign().up().busy(10_000);
        sim.metrics.as_mut().unwrap().iterations = Some(1e3);
        sim.silence_until(10_000, suspect).unwrap();
        let lifted = (0..20).find(|_| {
            let metrics = sim.metrics.as_mut().unwrap();
            metrics.iterations = metrics.iterations.map(|steps| steps + if counts { 1.0 } else { 0.0 });
            metrics.progress_digest += 1;
            !suspect(&sim.tick(1_000).verdict)
        });
        lifted.is_some()
    };
    assert!(freeze(true) && !freeze(false));
}

#[test]
fn a_slow_upload_excuses_no_stream_that_never_begins() {
    // the engine counts on, and the gate hears nothing
    let fenced = |streams: u32, uploads: u32| {
        let mut sim = Sim::foreign().up().busy(10_000).served(40);
        sim.admit(streams + uploads, 10);
        let gate = sim.gate.as_mut().unwrap();
        (gate.unstreamed, gate.client_blocked) = (Some(uploads), uploads);
        (0..1_000u64).find(|_| {
            let metrics = sim.metrics.as_mut().unwrap();
            metrics.progress_digest += 1;
            metrics.generation_tokens = metrics.generation_tokens.map(|tokens| tokens + 40.0);
            (0..10).any(|_| suspect(&sim.tick(100).verdict))
        })
    };
    let alone = fenced(1, 0);
    assert!(alone.is_some_and(|s| (895..905).contains(&s)), "{alone:?}");
    assert_eq!((fenced(1, 1), fenced(2, 3)), (alone, alone));
    assert_eq!(fenced(0, 1), None, "nobody waits for it");
}
