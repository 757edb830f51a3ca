//! V7: the whole state × event table, as a snapshot that people read in review.
//! Rows: every verdict and class. Columns: what may happen next. Cell: verdict, class and wanted actions
//! (F fence, U unfence, E evidence, R restart, N node) after the event.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, cell, stalled, suspect};
use vitals::observation::{Ms, PagePhase};
use vitals::verdict::{Outcome, Verdict};

type Row = (&'static str, fn() -> Sim);
type Column = (&'static str, fn(&mut Sim) -> Outcome);

fn native() -> Sim {
    Sim::native().up().busy(10_000)
}

fn foreign() -> Sim {
    Sim::foreign().up().busy(10_000)
}

/// Silence of an engine that does nothing at all.
fn until(mut sim: Sim, ms: Ms, done: fn(&Verdict) -> bool) -> Sim {
    sim.cpu = 0;
    burning_until(sim, ms, done)
}

fn burning_until(mut sim: Sim, ms: Ms, done: fn(&Verdict) -> bool) -> Sim {
    assert!(sim.silence_until(ms, done).is_some(), "the row was not reached: {:?}", sim.last);
    sim
}

fn spinning() -> Sim {
    let mut sim = native();
    sim.process().state = Some('R');
    burning_until(sim, 2_000, suspect)
}

fn turning() -> Sim {
    let mut sim = native();
    for _ in 0..20 {
        let at = sim.now + 95;
        let page = sim.page.as_mut().unwrap();
        page.steps_completed += 5;
        page.step_started_ms = Some(at);
        if suspect(&sim.tick(100).verdict) {
            break;
        }
    }
    sim
}

fn lone_waiter() -> Sim {
    let mut sim = native();
    sim.idle();
    sim.tick(100);
    sim.page.as_mut().unwrap().waiting = 3;
    until(sim, 5_000, suspect)
}

fn mute_front() -> Sim {
    let mut sim = native();
    sim.idle();
    let now = sim.now;
    let front = sim.frontend.as_mut().unwrap();
    (front.answers, front.silent_since_ms) = (false, Some(now));
    until(sim, 10_000, suspect)
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
    until(sim, 3_000, suspect)
}

fn starved() -> Sim {
    let mut sim = foreign();
    sim.metrics.as_mut().unwrap().prompt_tokens = Some(0.0);
    sim.deliver_for(100);
    for _ in 0..200 {
        let metrics = sim.metrics.as_mut().unwrap();
        metrics.prompt_tokens = metrics.prompt_tokens.map(|t| t + 500.0);
        metrics.progress_digest += 1;
        if suspect(&sim.tick(500).verdict) {
            break;
        }
    }
    sim
}

fn unkillable() -> Sim {
    let mut sim = until(native(), 20_000, stalled);
    sim.process().kill_sent_ms = Some(sim.now);
    sim.silence(11_000);
    sim
}

fn dead() -> Sim {
    let mut sim = native();
    sim.process().alive = false;
    sim.tick(100);
    sim
}

const ROWS: &[Row] = &[
    ("Starting native", || {
        let mut s = Sim::native();
        s.tick(100);
        s
    }),
    ("Starting foreign", || {
        let mut s = Sim::foreign();
        s.tick(100);
        s
    }),
    ("Idle", || {
        let mut s = native();
        s.idle();
        s.leave();
        s.tick(100);
        s
    }),
    ("Idle, answers, has no page yet", || Sim::foreign().up()),
    ("Progressing native", native),
    ("Progressing foreign", foreign),
    ("Sleeping", || {
        let mut s = native();
        s.page.as_mut().unwrap().phase = PagePhase::Sleep;
        s.tick(100);
        s
    }),
    ("Draining", || {
        let mut s = native();
        s.draining = true;
        s.deliver_for(100);
        s
    }),
    ("Dead", dead),
    ("Suspect StepStalled", || until(native(), 2_000, suspect)),
    ("Suspect StepStalled foreign", || until(foreign(), 5_000, suspect)),
    ("Suspect DeviceWait", spinning),
    ("Suspect Livelock", turning),
    ("Suspect AdmissionStalled", lone_waiter),
    ("Suspect FrontendStalled", mute_front),
    ("Suspect RankSilent", rank_behind),
    ("Suspect DecodeStalled", starved),
    ("Suspect StartupStalled", || until(Sim::native(), 60_000, suspect)),
    ("Stalled StepStalled", || until(native(), 20_000, stalled)),
    ("Stalled StepStalled foreign", || until(foreign(), 60_000, stalled)),
    ("Stalled StartupStalled", || until(Sim::native(), 60_000, stalled)),
    ("Stalled Unkillable", unkillable),
];

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
    ("process gone", |s| {
        s.process().alive = false;
        s.tick(100)
    }),
    ("another process", |s| {
        let now = s.now;
        s.process().started_ms = now;
        s.page = s.page.take().and(Sim::native().page);
        s.tick(100)
    }),
    ("SIGKILL outlived by 11 s", |s| {
        let now = s.now;
        s.process().kill_sent_ms = Some(now);
        s.silence(11_000)
    }),
    ("every source silent", |s| {
        s.proc = None;
        s.page = None;
        s.peers.clear();
        s.gate = None;
        s.metrics = None;
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

#[test]
fn every_state_meets_every_event() {
    let mut table = String::new();
    for (row, build) in ROWS {
        let mut start = build();
        let at = start.last.take().map_or_else(String::new, |outcome| cell(&outcome));
        table.push_str(&format!("{row}  [{at}]\n"));
        for (column, happen) in COLUMNS {
            let outcome = happen(&mut build());
            table.push_str(&format!("    {column:<36} {}\n", cell(&outcome)));
        }
    }
    insta::assert_snapshot!("state_by_event", table);
}
