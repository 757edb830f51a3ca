//! The hangs. Every foreign engine here has a front end that answers 200 all the while.

use vitals::observation::{EndedObs, GpuObs, LogHit, PageObs, RasObs};

use super::Hang;
use super::common::Sim;

/// A foreign engine with a history of idle time and of requests answered, streaming to four clients now.
fn foreign() -> Sim {
    let mut sim = Sim::foreign().up().served(40);
    sim.silence(3_000);
    sim.busy(20_000)
}

/// The same, idle again, and then new requests that have no first byte.
fn asked_when_idle(running: f64, waiting: f64) -> Sim {
    let mut sim = foreign();
    sim.depart();
    sim.silence(3_000);
    sim.admit(4, 160);
    let metrics = sim.metrics.as_mut().unwrap();
    (metrics.running, metrics.waiting) = (Some(running), Some(waiting));
    sim
}

fn spin(mut sim: Sim) -> Sim {
    sim.process().state = Some('R');
    sim.process().wchan = None;
    sim.cpu = 1_000;
    sim
}

fn quiet(mut sim: Sim) -> Sim {
    sim.cpu = 5;
    sim
}

/// A process by which it steps ends.
fn lost(mut sim: Sim, name: &str) -> Sim {
    let at_ms = sim.now;
    sim.process().ended = Some(EndedObs { pid: 42, name: name.to_owned(), at_ms, peers: 0 });
    sim
}

fn gpu(mut sim: Sim, util: u32, watts: f64) -> Sim {
    let card = |util, watts| GpuObs {
        util,
        memory_util: 2,
        power_watts: Some(watts),
        power_limit_watts: Some(600.0),
        ..GpuObs::default()
    };
    sim.gpus = vec![GpuObs { memory_util: 40, ..card(98, 450.0) }];
    sim.decode(5_000);
    sim.gpus = vec![card(util, watts)];
    sim
}

fn ranks() -> Sim {
    let mut sim = Sim::native().up();
    let peer = PageObs { rank: 1, world_size: 2, ..sim.page.clone().unwrap() };
    sim.peers.push(peer);
    sim.admit(4, 200);
    for _ in 0..200 {
        let at = sim.now + 90;
        sim.peers[0].steps_completed += 2;
        sim.peers[0].step_started_ms = Some(at);
        sim.deliver_for(100);
    }
    sim.page.as_mut().unwrap().steps_completed += 1;
    spin(sim)
}

const NOTHING: fn(&mut Sim) = |_| {};

pub const ALL: &[Hang] = &[
    Hang {
        id: "H1",
        what: "hard hang, the main thread runs, SM at 100 %",
        right: &["DeviceWait"],
        build: || gpu(spin(foreign()), 100, 300.0),
        tick: NOTHING,
    },
    Hang {
        id: "H2",
        what: "deadlock at 96 % utilisation and a third of the power",
        right: &["DeviceWait"],
        build: || gpu(spin(foreign()), 96, 140.0),
        tick: NOTHING,
    },
    Hang {
        id: "H3",
        what: "prefill kernel hangs, gauges frozen at zero",
        right: &["DeviceWait"],
        build: || spin(asked_when_idle(0.0, 0.0)),
        tick: NOTHING,
    },
    Hang {
        id: "H4",
        what: "waiting climbs, running stays 0, GPU at 0 %",
        right: &["AdmissionStalled"],
        build: || quiet(asked_when_idle(0.0, 1.0)),
        tick: |sim| {
            let metrics = sim.metrics.as_mut().unwrap();
            metrics.waiting = metrics.waiting.map(|waiting| waiting + 0.1);
        },
    },
    Hang {
        id: "H5",
        what: "collective over shared memory spins, iterations frozen",
        right: &["DeviceWait"],
        build: || spin(foreign()),
        tick: NOTHING,
    },
    Hang {
        id: "H6",
        what: "the engine core has died, silently, and the front end answers",
        right: &["ProcessDied"],
        build: || lost(quiet(foreign()), "VLLM::EngineCor"),
        tick: NOTHING,
    },
    Hang {
        id: "H6w",
        what: "the whole engine has",
        right: &["Dead"],
        build: || {
            let mut sim = foreign();
            sim.process().alive = false;
            sim
        },
        tick: NOTHING,
    },
    Hang {
        id: "H7",
        what: "a scheduler child has died behind a front end that lives",
        right: &["ProcessDied"],
        build: || {
            let mut sim = lost(quiet(foreign()), "sglang::schedul");
            sim.metrics.as_mut().unwrap().running = None;
            sim
        },
        tick: NOTHING,
    },
    Hang {
        id: "H7u",
        what: "the same of a process that nobody knows by name",
        right: &["StepStalled"],
        build: || {
            let mut sim = quiet(foreign());
            sim.metrics.as_mut().unwrap().running = None;
            sim
        },
        tick: NOTHING,
    },
    Hang {
        id: "H8",
        what: "livelock: iterations count up, nothing is delivered (scrapes)",
        right: &["Livelock"],
        build: || {
            let mut sim = spin(foreign());
            sim.metrics.as_mut().unwrap().iterations = Some(0.0);
            sim.deliver_for(100);
            sim
        },
        tick: |sim| {
            let metrics = sim.metrics.as_mut().unwrap();
            metrics.iterations = metrics.iterations.map(|count| count + 10.0);
            metrics.progress_digest += 1;
        },
    },
    Hang {
        id: "H8n",
        what: "the same with a page",
        right: &["Livelock"],
        build: || Sim::native().up().busy(20_000),
        tick: |sim| {
            let at = sim.now + 95;
            let page = sim.page.as_mut().unwrap();
            page.steps_completed += 20;
            page.step_started_ms = Some(at);
        },
    },
    Hang {
        id: "H9",
        what: "decode deadlocks while prefill moves",
        right: &["DecodeStalled"],
        build: || {
            let mut sim = spin(foreign());
            sim.metrics.as_mut().unwrap().prompt_tokens = Some(0.0);
            sim.deliver_for(100);
            sim
        },
        tick: |sim| {
            let metrics = sim.metrics.as_mut().unwrap();
            metrics.prompt_tokens = metrics.prompt_tokens.map(|tokens| tokens + 2_000.0);
            metrics.progress_digest += 1;
        },
    },
    Hang {
        id: "H10",
        what: "a grammar's state machine never returns: no byte for the two that stream",
        right: &["DeviceWait", "StepStalled"],
        build: || spin(foreign()),
        tick: NOTHING,
    },
    Hang {
        id: "H11",
        what: "ranks diverge, all of them spin (pages)",
        right: &["RankSilent"],
        build: ranks,
        tick: NOTHING,
    },
    Hang {
        id: "H11r",
        what: "the same without pages, named by NCCL RAS",
        right: &["RankSilent"],
        build: || {
            let mut sim = spin(foreign());
            sim.ras = Some(RasObs {
                silent_ranks: vec![3],
                answered: true,
                text: "rank 3 is behind".into(),
                ..RasObs::default()
            });
            sim
        },
        tick: NOTHING,
    },
    Hang {
        id: "H12",
        what: "a stranger's subscription stops the broadcast: everybody sleeps, the log warns",
        right: &["StepStalled"],
        build: || quiet(foreign()),
        tick: |sim| {
            let hit = |at_ms| LogHit { signature: "vllm-shm-broadcast".into(), at_ms, line: String::new() };
            sim.log = if sim.now % 60_000 == 0 { vec![hit(sim.now)] } else { Vec::new() };
        },
    },
    Hang {
        id: "H13",
        what: "SIGKILL has no effect",
        right: &["Unkillable"],
        build: || {
            let mut sim = spin(foreign());
            sim.process().kill_sent_ms = Some(sim.now);
            sim
        },
        tick: NOTHING,
    },
];
