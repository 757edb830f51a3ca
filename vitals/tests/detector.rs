//! Stories of one engine: how soon it is fenced, what it is called, what excuses it, what ends it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, T0, stalled, suspect};
use vitals::observation::{LogHit, MetricsObs, PagePhase};
use vitals::verdict::{Action, StallClass, Verdict};

fn class(sim: &Sim) -> &'static str {
    sim.last.as_ref().unwrap().verdict.class().map_or("none", StallClass::name)
}

#[test]
fn a_warm_native_engine_that_freezes_is_fenced_within_half_a_second_and_confirmed_after_its_lease() {
    let mut sim = Sim::native().up().busy(10_000);
    sim.cpu = 0;
    let fenced = sim.silence_until(5_000, suspect).unwrap();
    assert!(fenced <= 500, "fenced after {fenced} ms");
    assert_eq!(class(&sim), "StepStalled");
    let confirmed = sim.silence_until(10_000, stalled).unwrap();
    assert!((1_500..=4_000).contains(&confirmed), "confirmed after {confirmed} ms");
    assert_eq!(sim.last.as_ref().unwrap().actions, [Action::Fence, Action::CaptureEvidence, Action::WantRestart]);
}

#[test]
fn a_cold_native_engine_has_its_lease() {
    let mut sim = Sim::native().up();
    sim.admit(1, 10);
    let fenced = sim.silence_until(10_000, suspect).unwrap();
    assert!((1_900..=2_300).contains(&fenced), "fenced after {fenced} ms, the lease is 2000 ms");
}

#[test]
fn a_spinning_step_is_a_device_wait_also_where_the_machine_gives_it_a_quarter_of_a_core() {
    for cpu in [1_000, 300] {
        let mut sim = Sim::native().up().busy(10_000);
        sim.process().state = Some('R');
        sim.process().wchan = None;
        sim.cpu = cpu;
        let fenced = sim.silence_until(5_000, suspect).unwrap();
        assert!(fenced <= 500, "fenced after {fenced} ms at {cpu} permille");
        sim.silence_until(10_000, stalled).unwrap();
        assert_eq!(class(&sim), "DeviceWait");
    }
}

#[test]
fn a_runnable_process_without_cpu_is_starved_not_stuck() {
    let mut sim = Sim::native().up().busy(10_000);
    sim.process().state = Some('R');
    sim.cpu = 20;
    assert_eq!(sim.silence_until(1_500, suspect), None);
}

/// A loop that turns every 10 ms and delivers nothing, after a look in which tokens were seen that the gate had 90 ms earlier: how long
/// after these is it fenced?
fn fenced_after_the_gates_last_token(gate: bool) -> Option<u64> {
    let mut sim = Sim::native().up().busy(10_000);
    let last = sim.now + 10;
    let page = sim.page.as_mut().unwrap();
    (page.steps_completed, page.tokens_delivered) = (page.steps_completed + 10, page.tokens_delivered + 4);
    sim.deliver(4, last);
    if !gate {
        sim.gate = None;
    }
    for ms in [100].into_iter().chain([10; 100]) {
        let now = sim.now + ms;
        let page = sim.page.as_mut().unwrap();
        (page.steps_completed, page.step_started_ms) = (page.steps_completed + ms / 10, Some(now));
        if suspect(&sim.tick(ms).verdict) {
            return Some(sim.now - last);
        }
    }
    None
}

#[test]
fn a_livelock_is_counted_from_the_gates_last_token_where_there_is_a_gate() {
    let (with, without) = (fenced_after_the_gates_last_token(true), fenced_after_the_gates_last_token(false));
    assert!(with.is_some() && with.map(|ms| ms + 90) == without, "{with:?} {without:?}");
}

#[test]
fn a_loop_that_turns_and_delivers_nothing_is_a_livelock() {
    let mut sim = Sim::native().up().busy(10_000);
    let began = sim.now;
    let mut fenced = None;
    while sim.now - began < 3_000 && fenced.is_none() {
        let at = sim.now + 100;
        let page = sim.page.as_mut().unwrap();
        page.steps_completed += 5;
        page.step_started_ms = Some(at - 5);
        fenced = suspect(&sim.tick(100).verdict).then_some(sim.now - began);
    }
    assert!(fenced.is_some_and(|ms| ms <= 600), "{fenced:?}");
    assert_eq!(class(&sim), "Livelock");
}

#[test]
fn prefill_that_gets_through_its_prompt_is_progress_however_long_it_takes() {
    let mut sim = Sim::native().up();
    sim.admit(1, 100_000);
    let page = sim.page.as_mut().unwrap();
    (page.phase, page.phase_tokens, page.prompt_tokens_owed) = (PagePhase::Prefill, 512, 100_000);
    for _ in 0..190 {
        let at = sim.now + 1_000;
        let page = sim.page.as_mut().unwrap();
        page.steps_completed += 1;
        page.prompt_tokens_owed -= 512;
        page.step_started_ms = Some(at);
        let outcome = sim.tick(1_000);
        assert_eq!(outcome.verdict, Verdict::Progressing, "{:?}", outcome.reasons);
    }
}

#[test]
fn a_rank_that_falls_behind_is_named() {
    let mut sim = Sim::native().up();
    for rank in 1..3 {
        let mut peer = sim.page.clone().unwrap();
        peer.rank = rank;
        peer.world_size = 3;
        sim.peers.push(peer);
    }
    sim.page.as_mut().unwrap().world_size = 3;
    let mut sim = sim.busy(0);
    for _ in 0..100 {
        let at = sim.now + 100;
        for peer in &mut sim.peers {
            peer.steps_completed += 2;
            peer.step_started_ms = Some(at - 10);
        }
        sim.deliver_for(100);
    }
    let page = sim.page.as_mut().unwrap();
    page.steps_completed += 1;
    sim.peers[0].steps_completed += 1;
    sim.silence_until(5_000, suspect).unwrap();
    assert_eq!(sim.last.unwrap().verdict, Verdict::Suspect(StallClass::RankSilent { ranks: vec![2] }));
}

#[test]
fn waiting_with_free_capacity_is_an_admission_stall() {
    let mut sim = Sim::native().up().busy(5_000);
    sim.idle();
    sim.tick(100);
    sim.page.as_mut().unwrap().waiting = 3;
    sim.silence_until(5_000, suspect).unwrap();
    assert_eq!(class(&sim), "AdmissionStalled");
}

#[test]
fn a_silent_front_end_over_an_idle_loop_is_a_frontend_stall() {
    let mut sim = Sim::native().up().busy(5_000);
    sim.idle();
    let now = sim.now;
    let front = sim.frontend.as_mut().unwrap();
    (front.answers, front.silent_since_ms) = (false, Some(now));
    sim.silence_until(10_000, suspect).unwrap();
    assert_eq!(class(&sim), "FrontendStalled");
}

#[test]
fn start_up_that_stands_still_past_its_lease_is_a_startup_stall_and_one_that_moves_is_not() {
    let mut sim = Sim::native();
    for _ in 0..90 {
        sim.page.as_mut().unwrap().work_done += 1;
        assert_eq!(sim.tick(1_000).verdict, Verdict::Starting);
    }
    let fenced = sim.silence_until(60_000, suspect).unwrap();
    assert!((29_000..=31_000).contains(&fenced), "{fenced}");
    assert_eq!(class(&sim), "StartupStalled");
    sim.silence_until(5_000, stalled).unwrap();
}

#[test]
fn decode_that_starves_behind_prefill_is_named() {
    let mut sim = Sim::foreign().up().busy(10_000);
    sim.metrics.as_mut().unwrap().prompt_tokens = Some(0.0);
    sim.deliver_for(100);
    let mut named = None;
    for _ in 0..200 {
        let metrics = sim.metrics.as_mut().unwrap();
        metrics.prompt_tokens = metrics.prompt_tokens.map(|t| t + 500.0);
        metrics.progress_digest += 1;
        if suspect(&sim.tick(500).verdict) {
            named = Some(class(&sim));
            break;
        }
    }
    assert_eq!(named, Some("DecodeStalled"));
}

#[test]
fn a_foreign_engine_is_fenced_in_five_seconds_though_its_gauges_froze_at_zero() {
    let mut sim = Sim::foreign().up().busy(10_000);
    sim.metrics.as_mut().unwrap().running = Some(0.0);
    let fenced = sim.silence_until(20_000, suspect).unwrap();
    assert!(fenced <= 5_000, "{fenced}");
}

#[test]
fn a_foreign_engine_that_was_never_seen_working_gets_the_rivals_patience() {
    let mut sim = Sim::foreign().up();
    sim.admit(1, 20_000);
    let fenced = sim.silence_until(400_000, suspect).unwrap();
    assert!((299_000..=301_000).contains(&fenced), "{fenced}");
}

#[test]
fn without_counters_a_whole_answer_may_take_its_time() {
    let mut sim = Sim::foreign().up().busy(10_000);
    sim.leave();
    sim.metrics = None;
    sim.tick(100);
    sim.admit(1, 10);
    let fenced = sim.silence_until(400_000, suspect).unwrap();
    assert!(
        fenced >= 299_000,
        "a request that does not stream and an engine without counters look like a hang: {fenced}"
    );
}

#[test]
fn excuses_stop_the_clock() {
    type Excuse = fn(&mut Sim);
    let excuses: [(&str, Excuse); 5] = [
        ("a debugger", |sim| sim.process().traced = true),
        ("the freezer", |sim| sim.process().frozen = true),
        ("throttling", |sim| sim.process().throttled = true),
        ("maintenance", |sim| sim.maintenance = true),
        ("sleep", |sim| sim.page.as_mut().unwrap().phase = PagePhase::Sleep),
    ];
    for (name, excuse) in excuses {
        let mut sim = Sim::native().up().busy(10_000);
        excuse(&mut sim);
        assert_eq!(sim.silence_until(60_000, suspect), None, "{name} did not excuse");
    }
}

#[test]
fn a_client_that_does_not_read_excuses_an_engine_that_may_wait_for_it_and_no_loop_under_a_lease() {
    let blocked = |mut sim: Sim| {
        let gate = sim.gate.as_mut().unwrap();
        gate.client_blocked = gate.in_flight;
        sim
    };
    let mut foreign = blocked(Sim::foreign().up().busy(20_000));
    assert_eq!(foreign.silence_until(60_000, suspect), None, "{:?}", foreign.last);
    let mut native = blocked(Sim::native().up().busy(10_000));
    assert!(native.silence_until(2_000, suspect).is_some(), "{:?}", native.last);
    assert!(native.silence_until(30_000, stalled).is_some(), "{:?}", native.last);
    // one whose client still sends has not reached it
    let mut idle = Sim::native().up().busy(10_000);
    idle.depart();
    idle.tick(100);
    idle.admit(1, 10);
    let page = idle.page.as_mut().unwrap();
    (page.running, page.waiting, page.step_started_ms) = (0, 0, None);
    assert_eq!(blocked(idle).silence_until(60_000, suspect), None);
}

#[test]
fn compilers_excuse_while_they_burn_cpu_and_no_longer() {
    let mut sim = Sim::foreign().up().busy(10_000);
    for _ in 0..600 {
        let proc = sim.process();
        proc.compilers = 2;
        proc.compilers_cpu_ms += 150;
        assert_eq!(sim.tick(100).verdict, Verdict::Progressing);
    }
    assert!(sim.silence_until(10_000, suspect).is_some(), "a compiler that hangs excuses nothing");
}

#[test]
fn the_agents_own_gap_is_discarded() {
    let mut sim = Sim::native().up().busy(10_000);
    sim.gap = 29_900;
    assert_eq!(sim.tick(30_000).verdict, Verdict::Progressing);
    sim.gap = 0;
    sim.page.as_mut().unwrap().step_started_ms = Some(sim.now);
    assert!(!suspect(&sim.deliver_for(100).verdict));
}

#[test]
fn a_pause_announced_in_the_log_excuses_until_it_is_resumed() {
    let mut sim = Sim::foreign().up().busy(10_000);
    let hit = |name: &str, at_ms| vec![LogHit { signature: name.into(), at_ms, line: String::new() }];
    let mut obs = sim.observation();
    obs.log = hit("vllm-paused", sim.now);
    assert_eq!(sim.detector.step(sim.now, &obs).verdict, Verdict::Sleeping);
    assert_eq!(sim.silence_until(60_000, suspect), None);
    obs = sim.observation();
    obs.log = hit("http-resumed", sim.now);
    sim.detector.step(sim.now, &obs);
    assert!(sim.silence_until(20_000, suspect).is_some());
}

#[test]
fn a_pause_that_the_engine_tells_of_excuses_without_a_log_and_ends_with_its_word() {
    let mut sim = Sim::foreign().up().busy(10_000);
    sim.metrics.as_mut().unwrap().paused = Some(true);
    assert_eq!(sim.tick(100).verdict, Verdict::Sleeping);
    assert_eq!(sim.silence_until(60_000, suspect), None);
    let mut obs = sim.observation();
    obs.log = vec![LogHit { signature: "vllm-paused".into(), at_ms: sim.now, line: String::new() }];
    sim.detector.step(sim.now, &obs);
    sim.metrics.as_mut().unwrap().paused = Some(false);
    assert!(sim.silence_until(20_000, suspect).is_some(), "nobody read the line that it goes on");
}

#[test]
fn a_suspect_that_delivers_is_let_go_at_once_and_a_stalled_one_as_well() {
    let mut sim = Sim::native().up().busy(10_000);
    sim.silence_until(5_000, suspect).unwrap();
    let outcome = sim.deliver_for(100);
    assert_eq!((outcome.verdict, outcome.actions), (Verdict::Progressing, vec![Action::Unfence]));
    sim.silence_until(10_000, stalled).unwrap();
    assert_eq!(sim.deliver_for(100).verdict, Verdict::Progressing);
}

#[test]
fn health_that_answers_ends_nothing() {
    let mut sim = Sim::native().up().busy(10_000);
    sim.silence_until(10_000, stalled).unwrap();
    assert!(stalled(&sim.silence(60_000).verdict), "the front end answered 200 all the while");
}

#[test]
fn a_foreign_suspect_whose_clients_left_is_let_out_on_trial_and_its_relapse_confirms_sooner() {
    let mut sim = Sim::foreign().up().busy(10_000);
    sim.metrics.as_mut().unwrap().running = Some(0.0);
    sim.silence_until(10_000, suspect).unwrap();
    sim.leave();
    let out = sim.silence_until(60_000, |verdict| *verdict == Verdict::Idle).unwrap();
    assert!((29_000..=31_000).contains(&out), "{out}");
    sim.admit(1, 50);
    sim.deliver_for(100);
    sim.metrics.as_mut().unwrap().running = Some(0.0);
    sim.silence_until(10_000, suspect).unwrap();
    let confirmed = sim.silence_until(60_000, stalled).unwrap();
    assert!((9_000..=11_000).contains(&confirmed), "{confirmed}");
}

#[test]
fn a_new_process_starts_anew_whether_or_not_anybody_told() {
    let mut sim = Sim::native().up().busy(10_000);
    sim.silence_until(10_000, stalled).unwrap();
    sim.process().alive = false;
    assert_eq!(sim.tick(100).verdict, Verdict::Dead);
    let fresh = Sim::native();
    sim.page = fresh.page;
    sim.proc = fresh.proc;
    sim.process().started_ms = T0 + 60_000;
    assert_eq!(sim.tick(100).verdict, Verdict::Starting);
    let mut sim = sim.up();
    assert_eq!(sim.tick(100).verdict, Verdict::Progressing, "the gate still holds its requests");
}

#[test]
fn slow_is_told_and_not_fenced() {
    let mut sim = Sim::foreign().up().busy(60_000);
    let mut seen = false;
    for _ in 0..60 {
        let at = sim.now + 1_500;
        sim.deliver(1, at);
        let outcome = sim.tick(1_500);
        seen |= outcome.verdict == Verdict::Slow;
        assert!(!outcome.fenced, "{:?}", outcome.reasons);
    }
    assert!(seen, "4 requests at 1.5 s a token were not slow");
}

#[test]
fn a_prompt_far_beyond_what_was_learned_gets_patience_and_the_next_such_prompt_what_the_first_took() {
    let mut sim = Sim::foreign().up().busy(20_000);
    for round in 0..2 {
        sim.admit(2, 29_000);
        assert_eq!(sim.silence_until(70_000, suspect), None, "round {round}: a step of 70 s for 29000 tokens");
        sim.decode(10_000);
    }
    let fenced = sim.silence_until(20_000, suspect).unwrap();
    assert!(fenced <= 5_000, "decode is as impatient as before: {fenced}");
}

#[test]
fn a_scrape_that_counts_what_came_before_the_fence_does_not_lift_it() {
    let mut sim = Sim::native().up().busy(10_000);
    sim.cpu = 0;
    let scraped_before = MetricsObs { generation_tokens: Some(1_000.0), ..MetricsObs::default() };
    sim.metrics = Some(scraped_before.clone());
    sim.silence_until(5_000, suspect).unwrap();
    sim.metrics = Some(MetricsObs { generation_tokens: Some(9_000.0), progress_digest: 1, ..scraped_before });
    assert!(sim.silence(100).fenced, "the tokens of that scrape were delivered before the fence");
    assert!(sim.silence_until(10_000, stalled).is_some());
}
