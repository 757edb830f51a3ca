//! Properties of the detector on generated histories, and totality on arbitrary observations.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled, suspect};
use proptest::prelude::*;
use vitals::detector::{Detector, Policy};
use vitals::exposition::{Limits, parse};
use vitals::observation::{
    FrontendObs, GateObs, GpuObs, LogHit, MetricsObs, Observation, PageObs, PagePhase, ProcObs, Signal, XidObs,
};
use vitals::verdict::{Action, Verdict};

/// What happens in one span of a made-up history.
#[derive(Debug, Clone)]
enum Event {
    Deliver(u64),
    Silence(u64),
    Arrive(u32, u64),
    Leave,
    Idle,
    Starve(u64),
    Gap(u64),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        4 => (1u64..100).prop_map(Event::Deliver),
        3 => (1u64..400).prop_map(Event::Silence),
        2 => (1u32..40, 0u64..30_000).prop_map(|(n, p)| Event::Arrive(n, p)),
        1 => Just(Event::Leave),
        1 => Just(Event::Idle),
        1 => (1u64..30).prop_map(Event::Starve),
        1 => (1_000u64..60_000).prop_map(Event::Gap),
    ];
    proptest::collection::vec(event, 1..40)
}

/// A policy with these numbers in its fields, in the fields' order.
fn policy_of(numbers: &[u64]) -> Policy {
    let mut fields = serde_json::to_value(Policy::default()).unwrap();
    for ((name, field), number) in fields.as_object_mut().unwrap().iter_mut().zip(numbers.iter().cycle()) {
        let small = name.ends_with("_tenths") || name == "slow_factor";
        *field = if small { number % (1 << 32) } else { *number }.into();
    }
    serde_json::from_value(fields).unwrap()
}

fn sims() -> impl Strategy<Value = Sim> {
    any::<bool>().prop_map(|native| if native { Sim::native().up() } else { Sim::foreign().up() })
}

/// Plays one event; every outcome with whether a delivery came in its tick, and whether any source showed work.
fn play(sim: &mut Sim, event: &Event, seen: &mut Vec<(Verdict, bool, bool)>) {
    let work = |sim: &Sim| {
        sim.gate.as_ref().is_some_and(|g| g.in_flight > 0)
            || sim.page.as_ref().is_some_and(|p| p.running + p.waiting > 0 || p.step_started_ms.is_some())
            || sim.metrics.as_ref().is_some_and(|m| m.running.unwrap_or(0.0) > 0.0)
    };
    let mut quiet = |sim: &mut Sim, ms| {
        let outcome = sim.tick(ms);
        seen.push((outcome.verdict, false, work(sim)));
    };
    match event {
        Event::Deliver(ticks) => {
            for _ in 0..*ticks {
                let outcome = sim.deliver_for(100);
                seen.push((outcome.verdict, true, work(sim)));
            }
        }
        Event::Silence(ticks) => (0..*ticks).for_each(|_| quiet(sim, 100)),
        Event::Arrive(requests, prompt) => sim.admit(*requests, *prompt),
        Event::Leave => sim.leave(),
        Event::Idle => sim.idle(),
        Event::Starve(ticks) => {
            let cpu = std::mem::replace(&mut sim.cpu, 10);
            sim.process().state = Some('R');
            (0..*ticks).for_each(|_| quiet(sim, 100));
            sim.process().state = Some('S');
            sim.cpu = cpu;
        }
        Event::Gap(ms) => {
            sim.gap = *ms;
            quiet(sim, *ms);
            sim.gap = 0;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_stall_while_tokens_are_delivered_and_none_begins_without_work(mut sim in sims(), history in events()) {
        let mut seen = Vec::new();
        for event in &history {
            play(&mut sim, event, &mut seen);
        }
        let mut before = false;
        for (verdict, delivered, work) in seen {
            prop_assert!(!(delivered && stalled(&verdict)), "{verdict:?} while tokens are delivered");
            prop_assert!(before || work || !stalled(&verdict), "{verdict:?} began without work owed");
            before = stalled(&verdict);
        }
    }

    #[test]
    fn every_suspicion_ends_within_the_policys_bound(mut sim in sims(), history in events(), excused in any::<bool>()) {
        for event in &history {
            play(&mut sim, event, &mut Vec::new());
        }
        sim.process().throttled = excused;
        let bound = Policy::default().suspect_ms_max + 1_000;
        let mut since = None;
        for _ in 0..(bound / 500 + 4) {
            let verdict = sim.tick(500).verdict;
            since = suspect(&verdict).then(|| since.unwrap_or(sim.now));
            prop_assert!(since.is_none_or(|at| sim.now - at <= bound), "suspect for {} ms", sim.now - since.unwrap_or(0));
        }
    }

    #[test]
    fn any_observation_at_any_time_gives_an_outcome_that_fits_itself(steps in proptest::collection::vec((any::<u64>(), observations()), 1..30)) {
        let mut detector = Detector::new(Policy::default(), 5);
        for (now, obs) in steps {
            let outcome = detector.step(now, &obs);
            prop_assert!(!outcome.reasons.is_empty() && outcome.reasons.iter().all(|reason| !reason.text.is_empty()));
            prop_assert_eq!(outcome.fenced, outcome.actions.contains(&Action::Fence));
            prop_assert!(!(outcome.fenced && outcome.actions.contains(&Action::Unfence)));
            let may_fence = matches!(outcome.verdict, Verdict::Suspect(_) | Verdict::Stalled(_) | Verdict::Dead | Verdict::Starting);
            prop_assert!(may_fence || !outcome.fenced, "{:?} fences", outcome.verdict);
            prop_assert!(!outcome.actions.contains(&Action::WantRestart) || stalled(&outcome.verdict));
            prop_assert!((1..=1_000).contains(&outcome.check_again_in_ms));
        }
    }

    #[test]
    fn any_policy_judges_any_observation(
        numbers in proptest::collection::vec(prop_oneof![Just(0u64), 1u64..1_000, any::<u64>()], 60),
        steps in proptest::collection::vec((0u64..500_000, observations()), 1..20),
        mut sim in sims(),
        history in events(),
    ) {
        let policy = policy_of(&numbers);
        let mut detector = Detector::new(policy.clone(), 5);
        let mut now = 0;
        for (ms, obs) in steps {
            now += ms;
            prop_assert!(!detector.step(now, &obs).reasons.is_empty());
        }
        sim.detector = Detector::new(policy, sim.now);
        let mut seen = Vec::new();
        history.iter().for_each(|event| play(&mut sim, event, &mut seen));
    }

    #[test]
    fn any_text_is_an_exposition(text in "[ -~\n]{0,400}") {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).count();
        let page = parse(&text, Limits::default());
        prop_assert!(page.samples.len() + page.errors as usize <= lines);
        prop_assert!(text.contains("# EOF") || page.samples.len() + page.errors as usize == lines, "a line was dropped in silence");
    }
}

fn signal<T: std::fmt::Debug + Clone + 'static>(value: impl Strategy<Value = T> + 'static) -> BoxedStrategy<Signal<T>> {
    (proptest::option::of(value), any::<u64>()).prop_map(|(value, at_ms)| Signal { value, at_ms }).boxed()
}

fn pages() -> impl Strategy<Value = PageObs> {
    let phases = prop_oneof![
        Just(PagePhase::Load),
        Just(PagePhase::Idle),
        Just(PagePhase::Prefill),
        Just(PagePhase::Decode),
        Just(PagePhase::Sleep),
        Just(PagePhase::Drain)
    ];
    (any::<[u32; 4]>(), any::<[u64; 8]>(), phases, any::<(u32, Option<u64>)>()).prop_map(
        |(small, big, phase, (tokens, step))| PageObs {
            rank: small[0] % 4,
            world_size: small[1],
            engines: tokens % 4,
            running: small[2],
            waiting: small[3],
            steps_completed: big[0],
            tokens_delivered: big[1],
            requests_finished: big[2],
            prompt_tokens_owed: big[3],
            phase_entered_ms: big[4],
            lease_ms: big[5],
            work_done: big[6],
            work_total: big[7],
            phase,
            phase_tokens: tokens,
            step_started_ms: step,
            published_ms: big[0],
        },
    )
}

fn gates() -> impl Strategy<Value = GateObs> {
    (any::<[u32; 3]>(), any::<[u64; 4]>(), any::<(Option<u64>, Option<u64>)>()).prop_map(
        |(small, big, (oldest, last))| GateObs {
            epoch: big[0] % 2,
            in_flight: small[0],
            awaiting_first_byte: small[1],
            client_blocked: small[2],
            prompt_tokens_owed: big[1],
            prompt_tokens_taken: big[0],
            chunks_delivered: big[2],
            bytes_delivered: big[3],
            requests_done: big[3],
            requests_abandoned: big[3] / 2,
            oldest_in_flight_ms: oldest,
            last_delivery_ms: last,
            unstreamed: oldest.map(|_| small[1]),
            longest_prompt_owed: last.map(|_| big[1] / 2),
            quietest_begun_ms: last,
        },
    )
}

fn processes() -> impl Strategy<Value = ProcObs> {
    (any::<[bool; 4]>(), any::<[u64; 3]>(), any::<(u32, char, Option<u64>)>()).prop_map(
        |(flags, big, (compilers, state, kill_sent_ms))| ProcObs {
            alive: flags[0],
            traced: flags[1],
            throttled: flags[2],
            frozen: flags[3],
            started_ms: big[0],
            cpu_ms: big[1],
            compilers_cpu_ms: big[2],
            compilers,
            state: Some(state),
            wchan: None,
            kill_sent_ms,
            ..ProcObs::default()
        },
    )
}

fn observations() -> impl Strategy<Value = Observation> {
    let figure = || proptest::option::of(any::<f64>());
    let metrics = (figure(), figure(), figure(), figure(), figure(), any::<(Option<bool>, u64)>()).prop_map(
        |(running, waiting, tokens, prompt, load, (sleeping, progress_digest))| MetricsObs {
            running,
            waiting,
            generation_tokens: tokens,
            prompt_tokens: prompt,
            server_load: load,
            sleeping,
            progress_digest,
            ..MetricsObs::default()
        },
    );
    let gpu = (any::<[u32; 2]>(), any::<[Option<f64>; 2]>()).prop_map(|(small, power)| GpuObs {
        uuid: "GPU-0".into(),
        index: None,
        pci: None,
        util: small[0],
        memory_util: small[1],
        power_watts: power[0],
        power_limit_watts: power[1],
        sm_clock_mhz: None,
        silent_since_ms: None,
    });
    let front = any::<(bool, Option<u16>, Option<u64>, bool, bool)>().prop_map(
        |(answers, status, silent_since_ms, ever_answered, elsewhere)| FrontendObs {
            answers,
            status,
            silent_since_ms,
            ever_answered,
            elsewhere,
        },
    );
    let log = prop_oneof![Just("vllm-paused"), Just("vllm-resumed"), Just("vllm-core-fatal"), Just("nonsense")]
        .prop_map(|name| LogHit { signature: name.into(), at_ms: 0, line: String::new() });
    let xid = (any::<[u64; 2]>(), 0..200_u32).prop_map(|(odd, code)| XidObs {
        uuid: if odd[0] % 2 == 0 { "GPU-0".into() } else { String::new() },
        code: if odd[0] % 16 == 0 { u32::MAX } else { code },
        remedy: None,
        at_ms: odd[1],
    });
    let sources = (
        signal(processes()),
        signal(proptest::collection::vec(pages(), 0..4)),
        signal(gates()),
        signal(metrics),
        signal(proptest::collection::vec(gpu, 0..2)),
        signal(front),
    );
    let lists = (proptest::collection::vec(log, 0..2), proptest::collection::vec(xid, 0..2));
    (sources, lists, any::<(bool, u64, bool)>()).prop_map(
        |((proc, pages, gate, metrics, gpus, frontend), (log, xids), (maintenance, agent_gap_ms, draining))| {
            Observation {
                proc,
                pages,
                gate,
                metrics,
                log,
                gpus,
                xids,
                ras: Signal::default(),
                frontend,
                maintenance,
                agent_gap_ms,
                draining,
            }
        },
    )
}
