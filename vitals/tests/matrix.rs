//! V7: the whole state × event table, as a snapshot that people read in review.
//! Rows: every verdict, and every class as each kind of engine shows it. Columns: what may happen next. Cell: verdict, class and wanted
//! actions (F fence, U unfence, E evidence, R restart, N node) after the event. A verdict or class without its rows does not compile.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use std::iter::successors;

use common::{Sim, cell, stalled, suspect};
use vitals::observation::{EndedObs, Ms, PagePhase, ProcObs, RasObs};
use vitals::verdict::{Outcome, StallClass, Verdict};

type Column = (&'static str, fn(&mut Sim) -> Outcome);
/// Which stage of a stall a row is about.
type Stage = fn(&Verdict) -> bool;

/// What tells of the engine: a page that keeps the contract, or gate, figures and `/proc` alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Native,
    Foreign,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Foreign => "foreign",
        }
    }
}

const KINDS: [Kind; 2] = [Kind::Native, Kind::Foreign];
/// So long at most a stage may take to be reached: longer than the longest patience.
const REACHED_MS_MAX: Ms = 1_000_000;

/// Every verdict; of the stalls one each stands for all classes.
fn verdicts() -> impl Iterator<Item = Verdict> {
    successors(Some(Verdict::Starting), |verdict| {
        Some(match verdict {
            Verdict::Starting => Verdict::Idle,
            Verdict::Idle => Verdict::Progressing,
            Verdict::Progressing => Verdict::Slow,
            Verdict::Slow => Verdict::Sleeping,
            Verdict::Sleeping => Verdict::Draining,
            Verdict::Draining => Verdict::Dead,
            Verdict::Dead => Verdict::Unknown,
            Verdict::Unknown => Verdict::Suspect(StallClass::StepStalled),
            Verdict::Suspect(_) => Verdict::Stalled(StallClass::StepStalled),
            Verdict::Stalled(_) => return None,
        })
    })
}

fn classes() -> impl Iterator<Item = StallClass> {
    use StallClass::*;
    successors(Some(StepStalled), |class| {
        Some(match class {
            StepStalled => RankSilent { ranks: Vec::new() },
            RankSilent { .. } => DeviceWait,
            DeviceWait => StartupStalled,
            StartupStalled => AdmissionStalled,
            AdmissionStalled => DecodeStalled,
            DecodeStalled => Livelock,
            Livelock => FrontendStalled,
            FrontendStalled => ProcessDied,
            ProcessDied => Unkillable,
            Unkillable => return None,
        })
    })
}

fn new(kind: Kind) -> Sim {
    match kind {
        Kind::Native => Sim::native(),
        Kind::Foreign => Sim::foreign(),
    }
}

fn busy(kind: Kind) -> Sim {
    new(kind).up().busy(10_000)
}

/// An engine of which this is said; `None`: one of that kind cannot show it.
fn calm(verdict: &Verdict, kind: Kind) -> Option<Sim> {
    let mut sim = busy(kind);
    match (verdict, kind) {
        (Verdict::Starting, _) => sim = new(kind),
        (Verdict::Idle, _) => {
            sim.idle();
            sim.leave();
        }
        (Verdict::Progressing, _) => {}
        (Verdict::Slow, Kind::Foreign) => return Some(slow()),
        // its steps have deadlines of their own: one that takes so long is a stall before it is slow
        (Verdict::Slow, Kind::Native) => return None,
        (Verdict::Sleeping, Kind::Native) => sim.page.as_mut().unwrap().phase = PagePhase::Sleep,
        (Verdict::Sleeping, Kind::Foreign) => sim.metrics.as_mut().unwrap().sleeping = Some(true),
        (Verdict::Draining, _) => sim.draining = true,
        (Verdict::Dead, _) => sim.process().alive = false,
        (Verdict::Unknown, _) => blind(&mut sim),
        (Verdict::Suspect(_) | Verdict::Stalled(_), _) => return None,
    }
    if matches!(verdict, Verdict::Progressing | Verdict::Draining) {
        sim.deliver_for(100)
    } else {
        sim.tick(100)
    };
    Some(sim)
}

/// A token and a half in two seconds, of one that made twenty a second.
fn slow() -> Sim {
    let mut sim = Sim::foreign().up().busy(60_000);
    while sim.last.as_ref().is_some_and(|outcome| outcome.verdict != Verdict::Slow) && sim.now < REACHED_MS_MAX * 2 {
        let at = sim.now + 1_500;
        sim.deliver(1, at);
        sim.tick(1_500);
    }
    sim
}

fn blind(sim: &mut Sim) {
    (sim.proc, sim.page, sim.gate, sim.metrics) = (None, None, None, None);
    sim.peers.clear();
}

/// An engine in this stage of this stall; `None`: one of that kind cannot show it, or only as another class.
fn stall(class: &StallClass, kind: Kind, stage: Stage) -> Option<Sim> {
    use StallClass::*;
    let sim = match (class, kind) {
        (StepStalled, _) => still(busy(kind), stage),
        (RankSilent { .. }, Kind::Native) => still(rank_behind(), stage),
        (RankSilent { .. }, Kind::Foreign) => {
            let mut sim = busy(kind);
            sim.ras = Some(RasObs { silent_ranks: vec![1], answered: true, ..RasObs::default() });
            still(sim, stage)
        }
        (DeviceWait, _) => {
            let mut sim = busy(kind);
            sim.process().state = Some('R');
            moving(sim, stage, |_| {})
        }
        (StartupStalled, _) => still(new(kind), stage),
        (AdmissionStalled, _) => still(lone_waiter(kind), stage),
        // by the time that it is confirmed it goes by the name of a loop that turns for nobody
        (DecodeStalled, Kind::Native) if stage(&Verdict::Stalled(DecodeStalled)) => return None,
        (DecodeStalled, Kind::Native) => moving(busy(kind), stage, fills),
        (DecodeStalled, Kind::Foreign) => moving(busy(kind), stage, takes_prompts_in),
        (Livelock, Kind::Native) => moving(busy(kind), stage, steps),
        (Livelock, Kind::Foreign) => {
            moving(busy(kind), stage, |sim| sim.metrics.as_mut().unwrap().progress_digest += 1)
        }
        (FrontendStalled, _) => still(mute_front(kind), stage),
        (ProcessDied, _) => {
            // (of one that owes work the step is blamed for half a second)
            let mut sim = calm(&Verdict::Idle, kind)?;
            lose_a_part(&mut sim);
            still(sim, stage)
        }
        // whoever is killed was a stall before
        (Unkillable, _) if stage(&Verdict::Suspect(Unkillable)) => return None,
        (Unkillable, _) => {
            let mut sim = still(busy(kind), stalled);
            sim.process().kill_sent_ms = Some(sim.now);
            sim.silence(11_000);
            sim
        }
    };
    Some(sim)
}

/// Until the stage is reached nothing happens, and nothing works.
fn still(mut sim: Sim, stage: Stage) -> Sim {
    sim.cpu = 0;
    moving(sim, stage, |_| {})
}

/// Until the stage is reached this happens before each look.
fn moving(mut sim: Sim, stage: Stage, happens: fn(&mut Sim)) -> Sim {
    let began = sim.now;
    while sim.now - began < REACHED_MS_MAX {
        happens(&mut sim);
        if stage(&sim.tick(100).verdict) {
            break;
        }
    }
    sim
}

fn steps(sim: &mut Sim) {
    let at = sim.now + 95;
    let page = sim.page.as_mut().unwrap();
    page.steps_completed += 5;
    page.step_started_ms = Some(at);
}

/// Prompts come without end, and are all that the steps are for.
fn fills(sim: &mut Sim) {
    steps(sim);
    let page = sim.page.as_mut().unwrap();
    page.phase = PagePhase::Prefill;
    page.phase_tokens = 500;
    page.prompt_tokens_owed = 1_000_000_u64.saturating_sub(100 * page.steps_completed);
}

fn takes_prompts_in(sim: &mut Sim) {
    let metrics = sim.metrics.as_mut().unwrap();
    metrics.prompt_tokens = Some(metrics.prompt_tokens.unwrap_or(0.0) + 100.0);
    metrics.progress_digest += 1;
}

fn lone_waiter(kind: Kind) -> Sim {
    let mut sim = busy(kind);
    match kind {
        Kind::Native => {
            sim.idle();
            sim.tick(100);
            sim.page.as_mut().unwrap().waiting = 3;
        }
        Kind::Foreign => {
            let metrics = sim.metrics.as_mut().unwrap();
            (metrics.running, metrics.waiting) = (Some(0.0), Some(3.0));
        }
    }
    sim
}

fn mute_front(kind: Kind) -> Sim {
    let mut sim = match kind {
        Kind::Native => {
            let mut sim = busy(kind);
            sim.idle();
            sim
        }
        // of one whose rhythm is known the step is blamed, for a probe or two may be late; this one has shown none yet
        Kind::Foreign => {
            let mut sim = new(kind).up();
            sim.admit(4, 200);
            // its port answers no scrape either
            sim.scraped_at = Some(sim.now);
            sim
        }
    };
    let now = sim.now;
    let front = sim.frontend.as_mut().unwrap();
    (front.answers, front.silent_since_ms) = (false, Some(now));
    sim
}

fn rank_behind() -> Sim {
    let mut sim = Sim::native().up();
    let mut peer = sim.page.clone().unwrap();
    (peer.rank, peer.world_size, peer.steps_completed) = (1, 2, 0);
    sim.peers.push(peer);
    sim.admit(4, 200);
    for _ in 0..100 {
        let at = sim.now + 90;
        sim.peers[0].steps_completed += 2;
        sim.peers[0].step_started_ms = Some(at);
        sim.deliver_for(100);
    }
    sim.page.as_mut().unwrap().steps_completed += 1;
    sim
}

/// The process of the engine, which lives unless it was seen to have ended.
fn process(sim: &mut Sim) -> &mut ProcObs {
    let started_ms = sim.now;
    sim.proc.get_or_insert_with(|| ProcObs { alive: true, started_ms, ..ProcObs::default() })
}

fn lose_a_part(sim: &mut Sim) {
    let at_ms = sim.now;
    process(sim).ended = Some(EndedObs { pid: 42, name: "VLLM::EngineCor".to_owned(), at_ms, peers: 0 });
}

const COLUMNS: &[Column] = &[
    ("one tick of silence", |s| s.tick(100)),
    ("1 s of silence", |s| s.silence(1_000)),
    ("60 s of silence", |s| s.silence(60_000)),
    ("tokens delivered", |s| s.deliver_for(100)),
    ("clients leave, loop idles", |s| {
        s.leave();
        s.idle();
        s.tick(100)
    }),
    ("clients leave, nothing else, 60 s", |s| {
        s.leave();
        s.silence(60_000)
    }),
    ("maintenance declared", |s| {
        s.maintenance = true;
        s.tick(100)
    }),
    ("drain asked", |s| {
        s.draining = true;
        s.tick(100)
    }),
    ("a part of it has died, 1 s", |s| {
        lose_a_part(s);
        s.silence(1_000)
    }),
    ("process gone", |s| {
        process(s).alive = false;
        s.tick(100)
    }),
    ("another process", |s| {
        let now = s.now;
        let process = process(s);
        (process.alive, process.started_ms, process.ended) = (true, now, None);
        s.page = s.page.take().and(Sim::native().page);
        s.tick(100)
    }),
    ("SIGKILL outlived by 11 s", |s| {
        let now = s.now;
        process(s).kill_sent_ms = Some(now);
        s.silence(11_000)
    }),
    ("every source silent", |s| {
        blind(s);
        s.tick(100)
    }),
    ("a page that loads", |s| {
        s.page = Sim::native().page;
        s.tick(100)
    }),
    ("the agent slept 60 s", |s| {
        s.gap = 60_000;
        s.tick(60_000)
    }),
];

/// The rows in their order, with their names. Each is what it is named for.
fn rows() -> Vec<(String, Sim)> {
    let mut rows = Vec::new();
    for verdict in verdicts() {
        let stage: Stage = if suspect(&verdict) { suspect } else { stalled };
        for kind in KINDS {
            rows.extend(calm(&verdict, kind).map(|sim| row(&verdict, None, kind, sim)));
        }
        for class in classes().filter(|_| verdict.class().is_some()) {
            for kind in KINDS {
                rows.extend(stall(&class, kind, stage).map(|sim| row(&verdict, Some(&class), kind, sim)));
            }
        }
    }
    rows.push(("Idle foreign, answers, has shown nothing yet".to_owned(), Sim::foreign().up()));
    rows
}

fn row(verdict: &Verdict, class: Option<&StallClass>, kind: Kind, sim: Sim) -> (String, Sim) {
    let class = class.map(StallClass::name);
    let name = [Some(verdict.name()), class, Some(kind.name())].into_iter().flatten().collect::<Vec<_>>().join(" ");
    let last = sim.last.as_ref().unwrap();
    let is = (last.verdict.name(), last.verdict.class().map(StallClass::name));
    assert_eq!(is, (verdict.name(), class), "{name}: {:?}", last.reasons);
    (name, sim)
}

#[test]
fn every_state_meets_every_event() {
    let rows = rows();
    let mut table = String::new();
    for (row, start) in &rows {
        table.push_str(&format!("{row}  [{}]\n", cell(start.last.as_ref().unwrap())));
        for (column, happen) in COLUMNS {
            let outcome = happen(&mut start.clone());
            table.push_str(&format!("    {column:<36} {}\n", cell(&outcome)));
        }
    }
    insta::assert_snapshot!("state_by_event", table);
    let has_row = |name: &str| rows.iter().any(|(row, _)| row.split(' ').any(|word| word == name));
    let without: Vec<_> = StallClass::NAMES.into_iter().filter(|name| !has_row(name)).collect();
    assert!(without.is_empty(), "classes without a row: {without:?}");
    for verdict in verdicts() {
        assert!(has_row(verdict.name()), "{verdict:?} has no row");
    }
}
