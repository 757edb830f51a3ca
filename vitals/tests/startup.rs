//! A start-up that stands still (S4) among several ranks, and without a probe of the front end.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, suspect};
use vitals::detector::{Detector, Policy};
use vitals::observation::{FrontendObs, Ms, PageObs, PagePhase, ProcObs};
use vitals::verdict::{Action, StallClass, Verdict};

/// An engine of which only the process is seen, and whether somebody listens on its port.
fn without_a_probe(listening: Option<bool>) -> Sim {
    let mut sim = Sim::foreign();
    (sim.frontend, sim.metrics) = (None, None);
    sim.cpu = 5;
    sim.process().listening = listening;
    sim
}

#[test]
fn a_port_that_nobody_listens_on_tells_a_start_up_that_no_probe_follows() {
    let mut sim = without_a_probe(Some(false));
    let fenced = sim.silence_until(400_000, suspect).unwrap();
    assert!((300_000..=301_000).contains(&fenced), "{fenced}");
    assert_eq!(sim.last.unwrap().verdict, Verdict::Suspect(StallClass::StartupStalled));
    for listening in [None, Some(true)] {
        let mut sim = without_a_probe(listening);
        assert_eq!(sim.silence_until(1_000_000, suspect), None, "{listening:?}: {:?}", sim.last);
    }
}

/// An engine with a port that nobody told us of would be ended every five minutes for nothing.
#[test]
fn an_engine_that_has_come_up_elsewhere_is_looked_for_in_the_wrong_place_and_hangs_not() {
    let mut sim = Sim::foreign();
    sim.cpu = 5;
    let seen = sim.frontend.as_mut().unwrap();
    seen.elsewhere = true;
    assert_eq!(sim.silence_until(2_000_000, suspect), None, "{:?}", sim.last);
    let told = sim.last.as_ref().unwrap();
    assert_eq!(told.verdict, Verdict::Starting);
    assert!(told.reasons[0].text.contains("--engine-url"), "{:?}", told.reasons);
    sim.frontend.as_mut().unwrap().elsewhere = false;
    assert!(sim.silence_until(400_000, suspect).is_some(), "that one was no engine");
}

#[test]
fn what_its_workers_read_or_write_is_progress_without_a_probe() {
    let counts: [fn(&mut ProcObs) -> &mut Option<u64>; 3] =
        [|proc| &mut proc.read_chars, |proc| &mut proc.read_bytes, |proc| &mut proc.written];
    // weights that are mapped come by faults: a disk is read, and no call reads; those that are fetched are only written
    for count in counts {
        let mut sim = without_a_probe(Some(false));
        let proc = sim.process();
        (proc.read_chars, proc.read_bytes, proc.written) = (Some(9 << 30), Some(0), Some(0));
        for _ in 0..100 {
            *count(sim.process()).as_mut().unwrap() += 200 << 20;
            assert_eq!(sim.silence_until(10_000, suspect), None, "{:?}", sim.last);
        }
        assert!(sim.silence_until(400_000, suspect).is_some(), "it reads no more");
    }
}

#[test]
fn what_ranks_read_that_wait_for_one_another_is_no_progress() {
    let mut sim = without_a_probe(Some(false));
    sim.process().read_chars = Some(3 << 20);
    let fenced = (0..10_000).find(|_| {
        // seven ranks that look at one owner, ten times a second
        *sim.process().read_chars.as_mut().unwrap() += 21_000;
        sim.silence_until(1_000, suspect).is_some()
    });
    assert!(fenced.is_some_and(|second| (299..=312).contains(&second)), "{fenced:?}: {:?}", sim.last);
}

#[test]
fn who_comes_late_to_a_start_up_takes_the_page_s_last_word_for_its_last_movement() {
    // it loads for ten minutes, and the agent is restarted: a phase that was entered long ago has moved since
    for (written_ago, least) in [(0, 29_000), (20_000, 9_000)] {
        let mut sim = Sim::native();
        sim.now += 600_000;
        let now = sim.now;
        let page = sim.page.as_mut().unwrap();
        (page.phase, page.phase_entered_ms, page.lease_ms) = (PagePhase::Load, now - 590_000, 30_000);
        (page.work_done, page.published_ms) = (305, now - written_ago);
        sim.detector = Detector::new(Policy::default(), now - 600_000);
        let fenced = sim.silence_until(60_000, suspect).unwrap();
        assert!((least..=least + 2_000).contains(&fenced), "{fenced}: {:?}", sim.last);
    }
}

/// A leader and a worker in their load phases, each with a lease of ten seconds.
fn two_ranks() -> Sim {
    let mut sim = Sim::native();
    let page = sim.page.as_mut().unwrap();
    (page.world_size, page.lease_ms) = (2, 10_000);
    let worker = vitals::observation::PageObs { rank: 1, ..page.clone() };
    sim.peers = vec![worker];
    sim.cpu = 5;
    sim.tick(100);
    sim
}

fn stands(sim: &mut Sim) -> Ms {
    let fenced = sim.silence_until(60_000, suspect).unwrap();
    assert_eq!(sim.last.as_ref().unwrap().verdict, Verdict::Suspect(StallClass::StartupStalled));
    fenced
}

#[test]
fn a_leader_that_waits_for_a_worker_that_loads_does_not_stand_still() {
    let mut sim = two_ranks();
    for _ in 0..60 {
        sim.peers[0].work_done += 1;
        assert_eq!(sim.silence_until(5_000, suspect), None, "{:?}", sim.last);
    }
    let fenced = stands(&mut sim);
    assert!(fenced <= 11_000, "{fenced}");
}

#[test]
fn a_worker_that_stands_still_is_judged_by_its_own_page() {
    let mut sim = two_ranks();
    let page = sim.page.as_mut().unwrap();
    (page.phase, page.lease_ms) = (PagePhase::Idle, 300_000);
    sim.peers[0].work_done = 37;
    let fenced = stands(&mut sim);
    assert!(fenced <= 11_000, "{fenced}");
    let said = &sim.last.unwrap().reasons[0].text;
    assert!(said.contains("rank 1 stands at 37 of 100"), "{said}");
}

/// A class of workers whose end of start-up the plugin does not know. The gate would wait for the step that it keeps from coming.
#[test]
fn a_worker_that_starts_for_ever_does_not_hold_an_engine_that_serves() {
    let mut sim = two_ranks();
    let through = sim.page.as_mut().unwrap();
    (through.phase, through.lease_ms) = (PagePhase::Idle, 0);
    assert_eq!(sim.tick(100).verdict, Verdict::Starting, "nobody answers yet");
    let up =
        FrontendObs { answers: true, status: Some(200), silent_since_ms: None, ever_answered: true, elsewhere: false };
    sim.frontend = Some(up);
    let told = sim.tick(100);
    assert!(told.verdict == Verdict::Idle && told.actions == [Action::Unfence], "{told:?}");
    assert_eq!(sim.silence_until(1_000_000, |verdict| *verdict != Verdict::Idle), None, "{:?}", sim.last);
    // the loop's own word stands
    let mut sim = two_ranks();
    sim.frontend = Some(up);
    assert_eq!(sim.tick(100).verdict, Verdict::Starting);
}

/// An engine whose front end answers before its loop has a page: with the page it starts, and is judged as one that does.
#[test]
fn a_page_that_comes_after_the_first_answer_tells_that_it_still_starts() {
    let (mut sim, pages) = answers_without_a_page();
    (sim.page, sim.peers) = pages;
    let told = sim.tick(100);
    assert!(told.verdict == Verdict::Starting && told.actions == [Action::Fence], "{told:?}");
    let fenced = stands(&mut sim);
    assert!(fenced <= 11_000, "{fenced}");
}

/// An engine of two ranks whose front end answers, and the pages that it does not have yet.
fn answers_without_a_page() -> (Sim, (Option<PageObs>, Vec<PageObs>)) {
    let up =
        FrontendObs { answers: true, status: Some(200), silent_since_ms: None, ever_answered: true, elsewhere: false };
    let mut sim = Sim { frontend: Some(up), ..two_ranks() };
    sim.detector = Detector::new(Policy::default(), common::T0);
    let pages = (sim.page.take(), std::mem::take(&mut sim.peers));
    assert_eq!(sim.tick(100).verdict, Verdict::Idle, "nothing else is known of it");
    (sim, pages)
}

/// A suspicion that is open when the page comes was one of an engine that serves.
#[test]
fn a_page_that_comes_while_the_engine_is_suspected_tells_that_it_still_starts() {
    let (mut sim, pages) = answers_without_a_page();
    sim.admit(1, 10);
    assert!(sim.silence_until(400_000, suspect).is_some(), "{:?}", sim.last);
    (sim.page, sim.peers) = pages;
    let now = sim.now;
    for page in sim.page.iter_mut().chain(&mut sim.peers) {
        (page.phase_entered_ms, page.published_ms) = (now, now);
    }
    let told = sim.tick(100);
    assert!(told.verdict == Verdict::Starting && told.actions == [Action::Fence], "{told:?}");
}

/// The page of another process (a second engine that somebody starts in the container) is no start-up of one that has served.
#[test]
fn an_engine_that_has_served_does_not_start_by_a_page_that_says_so_later() {
    let mut sim = Sim::foreign().up().busy(5_000);
    sim.leave();
    sim.silence(1_000);
    sim.page = Sim::native().page;
    let told = sim.tick(100);
    assert!(told.verdict == Verdict::Idle && told.actions == [Action::Unfence], "{told:?}");
}

/// A suspicion that ends before the start-up does is no end of the start-up: it is watched on, and no request comes in.
#[test]
fn a_start_up_that_was_suspected_is_a_start_up_when_it_moves_again() {
    let goes_on: [fn(&mut Sim); 2] = [|sim| sim.page.as_mut().unwrap().work_done += 1, |sim| sim.maintenance = true];
    for goes_on in goes_on {
        let mut sim = two_ranks();
        stands(&mut sim);
        goes_on(&mut sim);
        let told = sim.tick(100);
        assert!(told.verdict == Verdict::Starting && told.actions == [Action::Fence], "{told:?}");
        sim.maintenance = false;
        let fenced = stands(&mut sim);
        assert!(fenced <= 12_000, "{fenced}");
    }
}
