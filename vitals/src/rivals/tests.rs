//! Each rival against what its source says: when it fires, when it does not.

use super::*;
use crate::observation::{FrontendObs, GateObs, MetricsObs, PageObs, PagePhase, ProcObs, Signal};

const SECOND: Ms = 1_000;

/// A made-up engine that is looked at twice a second.
struct Bench {
    now_ms: Ms,
    obs: Observation,
}

impl Bench {
    /// Serving four streams, with a page, a gate, `/metrics` and an honest front end.
    fn new() -> Self {
        let page = PageObs {
            rank: 0,
            world_size: 1,
            engines: 1,
            steps_completed: 100,
            tokens_delivered: 400,
            requests_finished: 0,
            running: 4,
            waiting: 0,
            prompt_tokens_owed: 0,
            phase: PagePhase::Decode,
            phase_tokens: 4,
            phase_entered_ms: 0,
            lease_ms: 0,
            step_started_ms: Some(0),
            work_done: 0,
            work_total: 0,
            published_ms: 0,
        };
        let gate = GateObs { epoch: 1, in_flight: 4, chunks_delivered: 400, ..GateObs::default() };
        let metrics = MetricsObs {
            running: Some(4.0),
            waiting: Some(0.0),
            generation_tokens: Some(400.0),
            iterations: Some(100.0),
            ..MetricsObs::default()
        };
        let obs = Observation {
            pages: Signal::at(0, vec![page]),
            gate: Signal::at(0, gate),
            metrics: Signal::at(0, metrics),
            proc: Signal::at(0, ProcObs { alive: true, state: Some('R'), ..ProcObs::default() }),
            frontend: Signal::at(0, answering()),
            ..Observation::default()
        };
        Self { now_ms: 0, obs }
    }

    fn page(&mut self) -> &mut PageObs {
        &mut self.obs.pages.value.as_mut().unwrap()[0]
    }

    fn gate(&mut self) -> &mut GateObs {
        self.obs.gate.value.as_mut().unwrap()
    }

    fn metrics(&mut self) -> &mut MetricsObs {
        self.obs.metrics.value.as_mut().unwrap()
    }

    /// Half a second of healthy work.
    fn work(&mut self) {
        let now_ms = self.now_ms;
        let page = self.page();
        page.steps_completed += 10;
        page.tokens_delivered += 40;
        page.step_started_ms = Some(now_ms);
        self.gate().chunks_delivered += 40;
        let metrics = self.metrics();
        metrics.generation_tokens = metrics.generation_tokens.map(|n| n + 40.0);
        metrics.iterations = metrics.iterations.map(|n| n + 10.0);
    }

    /// No work at all, and the engine knows it.
    fn idle(&mut self) {
        let page = self.page();
        (page.running, page.phase, page.step_started_ms) = (0, PagePhase::Idle, None);
        self.gate().in_flight = 0;
        self.metrics().running = Some(0.0);
    }

    /// Lets `rule` look for `ms`, doing `each` before each look; the moment since now at which it first said `alarm` or worse.
    fn run(&mut self, rule: &mut dyn Rule, ms: Ms, alarm: Alarm, mut each: impl FnMut(&mut Self)) -> Option<Ms> {
        let from_ms = self.now_ms;
        let mut first = None;
        while self.now_ms < from_ms + ms {
            self.now_ms += 500;
            self.obs.metrics.at_ms = self.now_ms;
            each(self);
            if rule.step(self.now_ms, &self.obs) >= alarm {
                first = first.or(Some(self.now_ms - from_ms));
            }
        }
        first
    }

    /// A minute of work in which the rule must be quiet, then a hang of `ms`; when the rule first fired in it.
    fn hang(mut self, rule: &mut dyn Rule, warm_ms: Ms, ms: Ms, alarm: Alarm) -> Option<Ms> {
        assert_eq!(self.run(rule, warm_ms, Alarm::Suspect, Self::work), None, "{}: fired at work", rule.name());
        self.run(rule, ms, alarm, |_| {})
    }
}

fn answering() -> FrontendObs {
    FrontendObs { answers: true, status: Some(200), silent_since_ms: None, ever_answered: true, elsewhere: false }
}

fn rule(name: &str) -> Box<dyn Rule> {
    by_name(name).unwrap()
}

fn hang(name: &str, ms: Ms) -> Option<Ms> {
    Bench::new().hang(rule(name).as_mut(), 60 * SECOND, ms, Alarm::Suspect)
}

#[test]
fn names_are_unique_and_found() {
    let names: Vec<_> = all().iter().map(|rule| rule.name()).collect();
    let unique: std::collections::BTreeSet<_> = names.iter().collect();
    assert_eq!(unique.len(), names.len());
    assert!(names.iter().all(|name| by_name(name).is_some() && *name != OUR_NAME));
    assert!(by_name("nobody").is_none());
}

#[test]
fn nobody_fires_at_steady_work_and_only_the_learned_ones_could_at_a_night_of_idleness() {
    for mut rule in all() {
        let mut bench = Bench::new();
        assert_eq!(bench.run(rule.as_mut(), 600 * SECOND, Alarm::Suspect, Bench::work), None, "{}", rule.name());
        bench.idle();
        assert_eq!(bench.run(rule.as_mut(), 3_600 * SECOND, Alarm::Suspect, |_| {}), None, "{}", rule.name());
    }
}

#[test]
fn timers_of_300_s_fire_at_300_s() {
    for name in ["vllm-execute-timeout", "tensorrt-llm-hang-detector"] {
        let fired = hang(name, 600 * SECOND).unwrap();
        assert!((299 * SECOND..=301 * SECOND).contains(&fired), "{name}: {fired}");
        assert_eq!(hang(name, 299 * SECOND), None, "{name}");
    }
    let warned = hang("vllm-shm-warning", 600 * SECOND).unwrap();
    assert!((59 * SECOND..=61 * SECOND).contains(&warned), "{warned}");
}

#[test]
fn sglang_fires_somewhere_in_300_to_450_s_and_nowhere_else() {
    let mut seen = Vec::new();
    for phase in 0..30 {
        let warm_ms = 200 * SECOND + phase * 5 * SECOND;
        let fired = Bench::new().hang(rule("sglang-watchdog").as_mut(), warm_ms, 900 * SECOND, Alarm::Evict).unwrap();
        assert!((300 * SECOND..=450 * SECOND).contains(&fired), "hung after {warm_ms}: {fired}");
        seen.push(fired);
    }
    let (min, max) = (seen.iter().min().unwrap(), seen.iter().max().unwrap());
    assert!(*min <= 310 * SECOND && *max >= 440 * SECOND, "the whole range is used: {min} to {max}");
}

#[test]
fn sglang_does_not_see_a_queue_that_is_never_admitted_but_a_start_that_takes_too_long() {
    let mut bench = Bench::new();
    let mut watchdog = rule("sglang-watchdog");
    bench.run(watchdog.as_mut(), 60 * SECOND, Alarm::Evict, Bench::work);
    bench.idle();
    bench.page().waiting = 5;
    bench.gate().in_flight = 5;
    assert_eq!(bench.run(watchdog.as_mut(), 3_600 * SECOND, Alarm::Evict, |_| {}), None, "cur_batch is None");
    let mut bench = Bench::new();
    bench.idle();
    bench.page().phase = PagePhase::Load;
    bench.page().steps_completed = 0;
    let fired = bench.run(rule("sglang-watchdog").as_mut(), 900 * SECOND, Alarm::Evict, |_| {});
    assert!(fired.is_some_and(|fired| (300 * SECOND..=451 * SECOND).contains(&fired)), "is_initializing: {fired:?}");
}

#[test]
fn health_generate_fails_when_nothing_comes_out_for_20_s() {
    let fired = hang("sglang-health-generate", 120 * SECOND).unwrap();
    assert!((20 * SECOND..=31 * SECOND).contains(&fired), "a probe in each 10 s, each waits 20 s: {fired}");
    let mut bench = Bench::new();
    let mut generate = rule("sglang-health-generate");
    let slow = |bench: &mut Bench| {
        if bench.now_ms.is_multiple_of(19 * SECOND) {
            bench.work();
        }
    };
    assert_eq!(bench.run(generate.as_mut(), 600 * SECOND, Alarm::Suspect, slow), None, "any output will do");
}

#[test]
fn the_canary_flips_after_10_and_3_s_and_any_chunk_resets_it() {
    let fired = hang("dynamo-canary", 60 * SECOND).unwrap();
    assert!((12 * SECOND..=14 * SECOND).contains(&fired), "{fired}");
    let mut bench = Bench::new();
    let mut canary = rule("dynamo-canary");
    // three of four streams are dead; the fourth gets a chunk every nine seconds
    let one_stream = |bench: &mut Bench| {
        if bench.now_ms.is_multiple_of(9 * SECOND) {
            bench.gate().chunks_delivered += 1;
        }
    };
    assert_eq!(bench.run(canary.as_mut(), 600 * SECOND, Alarm::Suspect, one_stream), None);
    assert!(bench.run(canary.as_mut(), 30 * SECOND, Alarm::Suspect, |_| {}).is_some());
    bench.now_ms += 500;
    bench.work();
    assert_eq!(canary.step(bench.now_ms, &bench.obs), Alarm::Quiet, "one chunk makes it Ready again");
}

#[test]
fn an_idle_engine_answers_the_canary_unless_it_is_stopped() {
    let mut bench = Bench::new();
    bench.idle();
    let mut canary = rule("dynamo-canary");
    assert_eq!(bench.run(canary.as_mut(), 60 * SECOND, Alarm::Suspect, |_| {}), None);
    bench.obs.proc.value.as_mut().unwrap().state = Some('T');
    let fired = bench.run(canary.as_mut(), 60 * SECOND, Alarm::Suspect, |_| {});
    assert!(fired.is_some_and(|fired| fired <= 14 * SECOND), "{fired:?}");
}

#[test]
fn nobody_who_asks_the_port_judges_an_engine_that_has_not_opened_it() {
    for name in ["sglang-health-generate", "dynamo-canary", "dynamo-liveness", "kubelet"] {
        let mut bench = Bench::new();
        bench.idle();
        bench.obs.frontend.value = Some(FrontendObs {
            answers: false,
            status: None,
            silent_since_ms: Some(0),
            ever_answered: false,
            elsewhere: false,
        });
        assert_eq!(bench.run(rule(name).as_mut(), 900 * SECOND, Alarm::Suspect, |_| {}), None, "{name}");
    }
}

#[test]
fn dynamo_liveness_kills_at_the_first_failure_after_the_canary() {
    let fired = Bench::new().hang(rule("dynamo-liveness").as_mut(), 60 * SECOND, 60 * SECOND, Alarm::Evict).unwrap();
    assert!((13 * SECOND..=19 * SECOND).contains(&fired), "13 s and at most one period more: {fired}");
    let mut bench = Bench::new();
    let mut liveness = rule("dynamo-liveness");
    bench.run(liveness.as_mut(), 60 * SECOND, Alarm::Evict, Bench::work);
    let since_ms = bench.now_ms;
    bench.obs.frontend.value = Some(FrontendObs {
        answers: false,
        status: None,
        silent_since_ms: Some(since_ms),
        ever_answered: true,
        elsewhere: false,
    });
    let fired = bench.run(liveness.as_mut(), 60 * SECOND, Alarm::Evict, Bench::work).unwrap();
    assert!((4 * SECOND..=10 * SECOND).contains(&fired), "tokens flow, but /live is silent: {fired}");
}

/// Data-parallel engines do not step together, and a worker's page may have no steps at all.
#[test]
fn nobody_who_looks_inside_takes_an_idle_engine_or_a_worker_for_a_step_that_does_not_end() {
    for name in [
        "vllm-execute-timeout",
        "vllm-shm-warning",
        "sglang-watchdog",
        "tensorrt-llm-hang-detector",
        "nvrx-heartbeat",
        "nvrx-in-process",
    ] {
        let mut bench = Bench::new();
        let works = PageObs { world_size: 4, engines: 2, ..bench.page().clone() };
        let still = |rank, steps_completed| PageObs {
            rank,
            steps_completed,
            running: 0,
            step_started_ms: None,
            ..works.clone()
        };
        bench.obs.pages.value = Some(vec![works.clone(), still(1, 0), still(2, 7), still(3, 7)]);
        let mut rule = rule(name);
        for alarm in [Alarm::Suspect, Alarm::Evict] {
            assert_eq!(bench.run(rule.as_mut(), 1_000 * SECOND, alarm, Bench::work), None, "{name}");
        }
    }
}

#[test]
fn the_kubelet_leaves_another_container_to_its_start_up_probe() {
    let mut rule = rule("kubelet");
    let mut bench = Bench::new();
    assert_eq!(bench.run(rule.as_mut(), 60 * SECOND, Alarm::Evict, Bench::work), None);
    let silent = |ever_answered| FrontendObs {
        answers: false,
        status: None,
        silent_since_ms: Some(0),
        ever_answered,
        elsewhere: false,
    };
    bench.obs.frontend = Signal::at(0, silent(false));
    assert_eq!(bench.run(rule.as_mut(), 600 * SECOND, Alarm::Evict, Bench::work), None);
    bench.obs.frontend = Signal::at(0, answering());
    assert_eq!(bench.run(rule.as_mut(), 60 * SECOND, Alarm::Evict, Bench::work), None);
    bench.obs.frontend = Signal::at(0, silent(true));
    assert!(bench.run(rule.as_mut(), 60 * SECOND, Alarm::Evict, Bench::work).is_some());
}

#[test]
fn the_kubelet_sees_health_and_nothing_else() {
    assert_eq!(hang("kubelet", 3_600 * SECOND), None, "/health says 200 in a hang");
    let mut bench = Bench::new();
    let mut kubelet = rule("kubelet");
    bench.run(kubelet.as_mut(), 60 * SECOND, Alarm::Evict, Bench::work);
    let sick = FrontendObs { status: Some(503), ..answering() };
    bench.obs.frontend.value = Some(sick);
    let fired = bench.run(kubelet.as_mut(), 120 * SECOND, Alarm::Evict, Bench::work).unwrap();
    assert!((20 * SECOND..=30 * SECOND).contains(&fired), "three probes of 10 s, though tokens flow: {fired}");
}

#[test]
fn gonka_waits_120_s_and_needs_the_gauges() {
    let fired = hang("gonka", 600 * SECOND).unwrap();
    assert!((119 * SECOND..=121 * SECOND).contains(&fired), "{fired}");
    let mut bench = Bench::new();
    let mut gonka = rule("gonka");
    bench.run(gonka.as_mut(), 60 * SECOND, Alarm::Evict, Bench::work);
    bench.metrics().running = Some(0.0);
    assert_eq!(bench.run(gonka.as_mut(), 3_600 * SECOND, Alarm::Evict, |_| {}), None, "gauges frozen at zero");
    bench.metrics().waiting = Some(3.0);
    assert!(bench.run(gonka.as_mut(), 130 * SECOND, Alarm::Evict, |_| {}).is_some(), "waiting is held, too");
}

#[test]
fn the_naive_rule_needs_running_and_knows_no_long_prefill() {
    let fired = hang("running-no-rate", 600 * SECOND).unwrap();
    assert!((29 * SECOND..=31 * SECOND).contains(&fired), "{fired}");
    let mut bench = Bench::new();
    bench.metrics().running = Some(0.0);
    let mut naive = rule("running-no-rate");
    assert_eq!(bench.run(naive.as_mut(), 3_600 * SECOND, Alarm::Evict, |_| {}), None, "misses half of the real hangs");
    let (mut prefill, mut naive) = (Bench::new(), rule("running-no-rate"));
    let steps = |bench: &mut Bench| bench.page().steps_completed += 1;
    assert!(prefill.run(naive.as_mut(), 60 * SECOND, Alarm::Evict, steps).is_some(), "chunked prefill, healthy");
}

#[test]
fn phi_convicts_after_eight_decades_of_its_mean() {
    let mut bench = Bench::new();
    let mut phi = rule("phi-accrual");
    let each_second = |bench: &mut Bench| {
        if bench.now_ms.is_multiple_of(SECOND) {
            bench.work();
        }
    };
    assert_eq!(bench.run(phi.as_mut(), 1_200 * SECOND, Alarm::Evict, each_second), None);
    let fired = bench.run(phi.as_mut(), 60 * SECOND, Alarm::Evict, |_| {}).unwrap();
    assert!((18_000..=19_500).contains(&fired), "8 ln 10 = 18.4 intervals of one second: {fired}");
}

#[test]
fn nvrx_fires_after_five_times_the_longest_interval() {
    let mut bench = Bench::new();
    let mut nvrx = rule("nvrx-heartbeat");
    let every_4_s = |bench: &mut Bench| {
        if bench.now_ms.is_multiple_of(4 * SECOND) {
            bench.work();
        }
    };
    assert_eq!(bench.run(nvrx.as_mut(), 200 * SECOND, Alarm::Evict, every_4_s), None);
    let fired = bench.run(nvrx.as_mut(), 120 * SECOND, Alarm::Evict, |_| {}).unwrap();
    assert!((20 * SECOND..=26 * SECOND).contains(&fired), "5 x 4 s, looked at every 5 s: {fired}");
}

#[test]
fn nvrx_in_process_restarts_at_60_s_and_kills_at_90_s() {
    let soft = hang("nvrx-in-process", 200 * SECOND).unwrap();
    let hard = Bench::new().hang(rule("nvrx-in-process").as_mut(), 60 * SECOND, 200 * SECOND, Alarm::Evict).unwrap();
    assert!((59 * SECOND..=62 * SECOND).contains(&soft), "{soft}");
    assert!((89 * SECOND..=92 * SECOND).contains(&hard), "{hard}");
}
