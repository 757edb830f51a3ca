//! What looks like a hang and is none.

use vitals::observation::{Ms, PagePhase};
use vitals::verdict::Verdict;

use super::Healthy;
use super::common::Sim;

fn foreign() -> Sim {
    let mut sim = Sim::foreign().up().served(40);
    sim.silence(3_000);
    sim.busy(20_000)
}

/// Ticks of 100 ms, each after `change`.
fn play(sim: &mut Sim, ms: Ms, mut change: impl FnMut(&mut Sim, Ms)) -> Vec<Verdict> {
    let tick = |at| {
        change(sim, at);
        sim.tick(100).verdict
    };
    (0..ms / 100).map(|count| count * 100).map(tick).collect()
}

/// An engine whose counters move at the end of a request only.
fn lumps() -> Sim {
    let mut sim = foreign();
    sim.depart();
    sim.silence(3_000);
    sim.process().state = Some('R');
    sim.cpu = 1_900;
    sim
}

fn whole_answer() -> Vec<Verdict> {
    let mut sim = lumps();
    sim.admit(1, 300);
    sim.gate.as_mut().unwrap().unstreamed = Some(1);
    sim.metrics.as_mut().unwrap().running = Some(1.0);
    play(&mut sim, 120_000, |_, _| {})
}

fn frozen_counters_while_bytes_flow() -> Vec<Verdict> {
    let mut sim = lumps();
    sim.admit(1, 300);
    play(&mut sim, 120_000, |sim, at| {
        if at % 300 == 0 {
            let gate = sim.gate.as_mut().unwrap();
            gate.chunks_delivered += 1;
            gate.bytes_delivered += 20;
            gate.last_delivery_ms = Some(sim.now);
            (gate.awaiting_first_byte, gate.prompt_tokens_owed) = (0, 0);
        }
    })
}

fn compiling() -> Vec<Verdict> {
    let mut sim = foreign();
    sim.cpu = 1_500;
    play(&mut sim, 70_000, |sim, at| {
        let now = sim.now;
        let front = sim.frontend.as_mut().unwrap();
        (front.answers, front.silent_since_ms) = (false, Some(now.min(front.silent_since_ms.unwrap_or(now))));
        let proc = sim.process();
        proc.compilers = 2 + u32::from(at % 700 < 300);
        proc.compilers_cpu_ms += 150;
    })
}

fn chunked_prefills() -> Vec<Verdict> {
    let mut sim = foreign();
    let mut seen = Vec::new();
    for seconds in [25, 40, 69] {
        sim.admit(8, 8 * 16_000);
        let front = sim.frontend.as_mut().unwrap();
        (front.answers, front.status) = (true, Some(503));
        seen.extend(play(&mut sim, seconds * 1_000, |sim, at| {
            if at % 1_300 == 0 {
                let metrics = sim.metrics.as_mut().unwrap();
                metrics.kv_usage = Some(0.3 + at as f64 / 1e6);
                metrics.progress_digest += 1;
            }
        }));
        seen.extend(sim.decode(5_000).into_iter().map(|outcome| outcome.verdict));
    }
    seen
}

fn saturated_front_end() -> Vec<Verdict> {
    let mut sim = foreign();
    let mut seen = Vec::new();
    for second in 0..60u64 {
        let now = sim.now;
        let front = sim.frontend.as_mut().unwrap();
        front.answers = second % 4 == 3;
        front.silent_since_ms = (!front.answers).then_some(front.silent_since_ms.unwrap_or(now));
        seen.extend(sim.decode(1_000).into_iter().map(|outcome| outcome.verdict));
    }
    seen
}

/// Swap sets in: the time between tokens grows by a quarter with each ten, to 3.5 s.
fn crawling() -> Vec<Verdict> {
    let mut sim = foreign();
    let (mut gap, mut seen) = (100, Vec::new());
    for token in 0..260u64 {
        gap = if token % 10 == 9 { (gap + gap / 4 + 25).min(3_500) } else { gap };
        seen.extend(play(&mut sim, gap, |_, _| {}));
        let at = sim.now;
        sim.deliver(1, at);
        seen.push(sim.tick(100).verdict);
    }
    assert!(seen.contains(&Verdict::Slow), "nobody said that it is slow");
    seen
}

fn held_by_the_machine() -> Vec<Verdict> {
    type Hold = fn(&mut Sim, bool);
    let holds: [Hold; 3] = [
        |sim, on| sim.process().throttled = on,
        |sim, on| (sim.process().state, sim.process().traced) = (Some(if on { 'T' } else { 'S' }), on),
        |sim, on| sim.process().frozen = on,
    ];
    let mut sim = foreign();
    let mut seen = Vec::new();
    for hold in holds {
        hold(&mut sim, true);
        seen.extend(play(&mut sim, 90_000, |_, _| {}));
        hold(&mut sim, false);
        seen.extend(sim.decode(5_000).into_iter().map(|outcome| outcome.verdict));
    }
    sim.gap = 600_000;
    sim.cpu = 0;
    seen.push(sim.tick(600_000).verdict);
    sim.gap = 0;
    seen.extend(sim.decode(5_000).into_iter().map(|outcome| outcome.verdict));
    seen
}

fn restored() -> Vec<Verdict> {
    let mut sim = Sim::foreign();
    sim.metrics = None;
    sim.cpu = 20;
    play(&mut sim, 240_000, |sim, at| {
        sim.process().read_chars = Some(at * 10_000);
    })
}

fn asleep() -> Vec<Verdict> {
    let mut sim = foreign();
    sim.metrics.as_mut().unwrap().sleeping = Some(true);
    let mut seen = play(&mut sim, 600_000, |_, _| {});
    sim.metrics.as_mut().unwrap().sleeping = Some(false);
    seen.extend(sim.decode(5_000).into_iter().map(|outcome| outcome.verdict));
    sim.maintenance = true;
    seen.extend(play(&mut sim, 120_000, |_, _| {}));
    let mut native = Sim::native().up().busy(20_000);
    native.page.as_mut().unwrap().phase = PagePhase::Sleep;
    seen.extend(play(&mut native, 600_000, |_, _| {}));
    seen
}

fn idle_night() -> Vec<Verdict> {
    let mut sim = foreign();
    sim.depart();
    sim.cpu = 3;
    (0..8 * 3_600).map(|_| sim.tick(1_000).verdict).collect()
}

pub const ALL: &[Healthy] = &[
    Healthy {
        id: "B1",
        what: "counters stand still while bytes flow, for 120 s",
        play: frozen_counters_while_bytes_flow,
    },
    Healthy { id: "B1w", what: "a whole answer of 120 s, counted in one lump at its end", play: whole_answer },
    Healthy { id: "B2", what: "compilers burn for 70 s, `/health` times out", play: compiling },
    Healthy {
        id: "B3",
        what: "chunked prefills of 128k tokens: 25, 40, 69 s without a byte, `/health` 503",
        play: chunked_prefills,
    },
    Healthy { id: "B4", what: "a saturated event loop: `/health` times out, tokens flow", play: saturated_front_end },
    Healthy { id: "B5", what: "swap sets in: 0.28 tokens a second in the end", play: crawling },
    Healthy {
        id: "B6",
        what: "throttled, held by a debugger, frozen, and a VM pause of ten minutes",
        play: held_by_the_machine,
    },
    Healthy { id: "B7", what: "a restore of 240 s with its port closed", play: restored },
    Healthy { id: "B8", what: "sleep by gauge and by page, maintenance by annotation", play: asleep },
    Healthy { id: "B9", what: "an idle night of 8 h", play: idle_night },
];
