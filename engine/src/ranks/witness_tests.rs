//! Ranks that sleep in a step, and a guard that looks at them: threads in place of processes.
#![allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]

use std::sync::mpsc::channel;

use super::*;
use crate::model::StepTerms;
use crate::waits::this_tid;

/// Longer than any machine takes to see that a thread sleeps.
const LEASE: Duration = Duration::from_secs(120);

/// Rank 0 of two; the thread of the other one sleeps. `None` where the kernel does not count what threads run.
fn beside_a_sleeper() -> Option<Team> {
    if !std::path::Path::new("/proc/self/schedstat").exists() {
        return None;
    }
    let (team, _file) = Team::create(2).unwrap();
    team.layout().of(1, Word::Pid).store(u64::from(std::process::id()), Ordering::Relaxed);
    let (tell, told) = channel();
    std::thread::spawn(move || {
        tell.send(this_tid()).unwrap();
        std::thread::sleep(Duration::from_secs(600));
    });
    team.layout().of(1, Word::Tid).store(told.recv().unwrap(), Ordering::Relaxed);
    Some(team)
}

fn in_step(allowed: Duration, warms: bool) -> StepTerms {
    StepTerms { allowed: Some(allowed), warms, ..StepTerms::default() }
}

#[test]
fn a_rank_that_sleeps_in_a_step_is_known_long_before_the_end_of_a_long_lease() {
    let Some(team) = beside_a_sleeper() else { return };
    team.allow_step(&in_step(LEASE, false));
    let stuck = team.agree(1, 1).unwrap_err();
    assert_eq!(stuck.kind, StuckKind::RankSilent { ranks: vec![1] });
    assert!(stuck.text.contains("rank 1 sleeps and has not come to the agreement on step 1"), "{stuck}");
    assert!(stuck.waited < Duration::from_secs(5), "{stuck}");
}

#[test]
fn a_rank_that_sleeps_in_the_start_has_its_whole_time() {
    for start in [|team: &Team, time| team.allow_step(&in_step(time, true)), |team: &Team, time| team.allow(Some(time))]
    {
        let Some(team) = beside_a_sleeper() else { return };
        start(&team, 3 * STILL_MAX);
        let stuck = team.agree(1, 1).unwrap_err();
        assert!(stuck.text.contains("rank 1 has not come"), "{stuck}");
    }
}

/// When the guard, which looks every 25 ms, gives up a rank. The thread is not looked at before it sleeps.
fn beside(team: &Team) -> (Duration, Stuck) {
    let tid = team.layout().of(1, Word::Tid).load(Ordering::Relaxed);
    let since = std::time::Instant::now();
    while asleep(tid).is_none() {
        assert!(since.elapsed() < Duration::from_secs(60), "it never sleeps");
    }
    let (mut beside, look) = (Beside::default(), Duration::from_millis(25));
    let seen = (1..).find_map(|looks| Some((look * looks, team.look_beside(&mut beside, look)?)));
    seen.unwrap()
}

#[test]
fn the_guard_sees_within_a_second_a_rank_that_sleeps_or_is_stopped_whoever_waits_for_it_and_however_long() {
    let Some(team) = beside_a_sleeper() else { return };
    let (after, stuck) = beside(&team);
    assert_eq!(stuck.kind, StuckKind::RankSilent { ranks: vec![1] });
    assert!(stuck.text.contains("rank 1 sleeps in a step") && after <= STILL_MAX + 2 * PEER_LOOK, "{after:?}: {stuck}");
    let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
    let since = std::time::Instant::now();
    while Peer::look(u64::from(child.id())) != Peer::Stopped {
        assert!(since.elapsed() < Duration::from_secs(60), "it never stops");
    }
    team.layout().of(1, Word::Pid).store(u64::from(child.id()), Ordering::Relaxed);
    let (after, stuck) = beside(&team);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(stuck.kind, StuckKind::RankSilent { ranks: vec![1] });
    assert!(stuck.text.contains("rank 1 is stopped") && after <= STOPPED_MAX + 2 * PEER_LOOK, "{after:?}: {stuck}");
}

#[test]
fn the_guard_leaves_a_rank_alone_that_naps_as_who_waits_for_a_step_does() {
    let (team, _file) = Team::create(2).unwrap();
    let (tell, told) = channel();
    let end = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let ends = end.clone();
    let napper = std::thread::spawn(move || {
        tell.send(this_tid()).unwrap();
        while !ends.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    team.layout().of(1, Word::Pid).store(u64::from(std::process::id()), Ordering::Relaxed);
    team.layout().of(1, Word::Tid).store(told.recv().unwrap(), Ordering::Relaxed);
    let mut beside = Beside::default();
    // a look has time for a nap, and counts for a twentieth of what is too long: on any machine the thread runs between 20 of them
    for _ in 0..60 {
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(team.look_beside(&mut beside, STILL_MAX / 20), None);
    }
    end.store(true, Ordering::Relaxed);
    napper.join().unwrap();
}
