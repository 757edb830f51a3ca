//! A process that the engine cannot step without has ended beside one that lives: over fixture trees and real processes (H6, H7).

use std::os::unix::fs::PermissionsExt;

use agent::sources::clock::{TickClock, monotonic_ms};
use agent::sources::proc::ProcSource;
use agent::sources::procs::ProcRoot;
use agent::sources::{EngineProcess, process_tree};
use nix::sys::signal::Signal;
use vitals::observation::EndedObs;

use crate::fixture::{FakeProc, Process, Session, eventually};

const CORE: &str = "VLLM::EngineCor";
const WORKER: &str = "VLLM::Worker_TP";

struct Watched {
    fake: FakeProc,
    source: ProcSource,
    pids: Vec<i32>,
    now_ms: u64,
}

impl Watched {
    fn new(children: &[Process<'_>]) -> Self {
        let root = Process { pid: 100, session: 100, comm: "python3", ..Default::default() };
        let fake = FakeProc::new(&[root]);
        let clock = TickClock { ticks_per_second: 100, slept_ms: 0 };
        let mut source = ProcSource::at(fake.root(), &fake.directory.path().join("cgroup"), clock);
        source.set_engine(Some(EngineProcess { pid: 100, start_ticks: 1_000 }));
        let mut watched = Self { fake, source, pids: vec![100], now_ms: 50_000 };
        children.iter().for_each(|child| watched.put(child));
        watched
    }

    fn put(&mut self, child: &Process<'_>) {
        self.fake.put(child);
        self.pids.push(child.pid);
    }

    fn look_with_page_of(&mut self, writer: Option<i32>) -> Option<EndedObs> {
        self.now_ms += 100;
        self.source.set_members(self.pids.clone());
        self.source.look(self.now_ms, writer).unwrap().ended
    }

    fn look(&mut self) -> Option<EndedObs> {
        self.look_with_page_of(None)
    }
}

fn child(pid: i32, ppid: i32, comm: &str) -> Process<'_> {
    Process { pid, ppid, session: 100, comm, start_ticks: 1_100, ..Default::default() }
}

#[test]
fn a_core_that_is_gone_a_zombie_or_anothers_number_is_told_until_another_comes_in_its_place() {
    let gone = |watched: &mut Watched| watched.fake.remove(101);
    let zombie = |watched: &mut Watched| watched.fake.put(&Process { state: 'Z', ..child(101, 100, CORE) });
    let reused = |watched: &mut Watched| watched.fake.put(&Process { start_ticks: 9_000, ..child(101, 1, "bash") });
    for end in [gone, zombie, reused] {
        let mut watched = Watched::new(&[child(101, 100, CORE), child(102, 101, WORKER), child(103, 100, "gcc")]);
        assert_eq!(watched.look(), None);
        watched.fake.remove(103);
        assert_eq!(watched.look(), None, "whoever else ends is nobody's core");
        end(&mut watched);
        let at_ms = watched.now_ms + 100;
        let told = Some(EndedObs { pid: 101, name: CORE.to_owned(), at_ms, peers: 0 });
        assert_eq!(watched.look(), told);
        assert_eq!(watched.look(), told, "with the time at which it was first missed");
        let started = Process { start_ticks: at_ms / 10, ..child(104, 100, CORE) };
        watched.put(&Process { comm: "python3", ..started });
        assert_eq!(watched.look(), told, "before it has its title nobody knows what it is");
        watched.fake.put(&started);
        assert_eq!(watched.look(), None);
    }
}

#[test]
fn how_many_of_its_name_live_is_told_beside_it() {
    let mut watched = Watched::new(&[child(101, 100, CORE), child(102, 100, CORE), child(103, 100, CORE)]);
    watched.look();
    watched.fake.remove(102);
    assert_eq!(watched.look().map(|ended| (ended.pid, ended.peers)), Some((102, 2)));
    watched.fake.remove(101);
    assert_eq!(watched.look().map(|ended| (ended.pid, ended.peers)), Some((101, 1)), "the last of them");
    watched.put(&child(104, 100, "sglang::detoken"));
    watched.look();
    watched.fake.remove(104);
    assert_eq!(watched.look().map(|ended| (ended.pid, ended.peers)), Some((104, 0)), "for which nobody stands in");
}

#[test]
fn a_sibling_that_is_met_late_takes_nobodys_place_and_a_successor_does_at_once() {
    let engine = || {
        let mut watched = Watched::new(&[child(101, 100, CORE)]);
        watched.look();
        watched.fake.remove(101);
        watched
    };
    let told = |ended: Option<EndedObs>| ended.map(|ended| (ended.pid, ended.peers));
    let mut watched = engine();
    watched.put(&child(102, 100, CORE));
    assert_eq!(told(watched.look()), Some((101, 1)), "it ran before the other had ended");
    let mut watched = engine();
    assert_eq!(told(watched.look()), Some((101, 0)));
    watched.put(&child(102, 100, CORE));
    assert_eq!(told(watched.look()), Some((101, 1)), "and was found by a later walk");
    let mut watched = engine();
    watched.put(&Process { start_ticks: watched.now_ms / 10, ..child(102, 100, CORE) });
    assert_eq!(watched.look(), None, "begun after the dead one was last seen to live");
}

#[test]
fn what_a_core_forks_has_its_name_and_is_none() {
    let mut watched = Watched::new(&[child(101, 100, CORE), child(110, 101, CORE), child(111, 110, CORE)]);
    watched.look();
    watched.fake.remove(111);
    watched.fake.remove(110);
    assert_eq!(watched.look(), None, "a pool of compile workers ends");
    watched.put(&child(112, 101, CORE));
    watched.look();
    watched.fake.remove(101);
    watched.fake.put(&child(112, 1, CORE));
    assert_eq!(watched.look().map(|ended| (ended.pid, ended.peers)), Some((101, 0)), "an orphan takes nobody's place");
    watched.put(&child(113, 1, CORE));
    assert_eq!(watched.look().map(|ended| ended.pid), Some(101), "nor does one that was never seen before");
}

#[test]
fn what_a_core_forks_and_gives_a_title_is_one_of_its_own() {
    let mut watched = Watched::new(&[child(101, 100, CORE), child(102, 101, CORE)]);
    watched.look();
    watched.fake.put(&child(102, 101, WORKER));
    watched.look();
    watched.fake.remove(102);
    assert_eq!(watched.look().map(|ended| (ended.pid, ended.name)), Some((102, WORKER.to_owned())));
}

#[test]
fn a_visitors_engine_is_nobodys_core() {
    let visitor = Process { session: 200, ..child(200, 0, "python3") };
    let theirs = Process { session: 200, ..child(201, 200, CORE) };
    let mut watched = Watched::new(&[child(101, 100, CORE), visitor, theirs]);
    watched.look();
    watched.fake.remove(201);
    assert_eq!(watched.look(), None);
    watched.fake.remove(101);
    assert_eq!(watched.look().map(|ended| (ended.pid, ended.peers)), Some((101, 0)));
}

/// A warm-up, or a server before this one, beneath the shell that goes on.
#[test]
fn an_engine_that_ends_as_a_whole_beneath_what_started_it_is_not_missed() {
    let mut watched = Watched::new(&[child(101, 100, "python3"), child(102, 101, CORE), child(103, 102, WORKER)]);
    watched.look();
    watched.fake.remove(103);
    watched.fake.remove(102);
    assert!(watched.look().is_some(), "its front end is there yet");
    watched.fake.remove(101);
    assert_eq!(watched.look(), None);
}

#[test]
fn cores_that_are_stopped_are_told_apart_from_bystanders() {
    let stopped = |pid, comm| Process { state: 'T', ..child(pid, 100, comm) };
    let mut watched = Watched::new(&[child(101, 100, CORE), stopped(102, CORE), stopped(103, "sleep")]);
    watched.source.set_members(watched.pids.clone());
    let seen = watched.source.look(60_000, None).unwrap();
    assert_eq!((seen.stopped, seen.stopped_cores), (2, 1));
}

#[test]
fn the_pages_writer_is_a_core_whatever_its_name_and_the_first_process_is_not() {
    let mut watched = Watched::new(&[child(101, 100, "python3")]);
    watched.look_with_page_of(Some(101));
    watched.fake.put(&child(101, 100, CORE));
    assert_eq!(watched.look_with_page_of(Some(101)), None, "it has taken its title");
    watched.fake.remove(101);
    assert_eq!(watched.look().map(|ended| ended.name), Some(CORE.to_owned()), "its page is believed no more");
    let mut watched = Watched::new(&[child(101, 100, "python3")]);
    watched.look_with_page_of(Some(101));
    watched.fake.remove(101);
    assert_eq!(watched.look().map(|ended| ended.pid), Some(101));
    assert_eq!(watched.look_with_page_of(Some(100)), None, "a warm-up, after which the first process serves itself");
    let mut watched = Watched::new(&[]);
    watched.look_with_page_of(Some(100));
    watched.fake.put(&Process { pid: 100, session: 100, comm: "python3", state: 'Z', ..Default::default() });
    assert_eq!(watched.look_with_page_of(Some(100)), None, "that is the engine's own end");
}

#[test]
fn d08_a_core_that_cannot_be_looked_at_has_not_ended() {
    let mut watched = Watched::new(&[child(101, 100, CORE)]);
    watched.look();
    let stat = watched.fake.directory.path().join("101/stat");
    std::fs::remove_file(&stat).unwrap();
    std::fs::create_dir(&stat).unwrap();
    assert_eq!(watched.look(), None, "nobody knows (I4)");
    std::fs::remove_dir(&stat).unwrap();
    assert_eq!(watched.look().map(|ended| ended.pid), Some(101));
}

#[test]
fn a_real_core_that_is_killed_beside_its_front_end_is_missed_at_the_next_look() {
    let dir = tempfile::tempdir().unwrap();
    let core = dir.path().join("VLLM::EngineCore_DP0");
    std::fs::copy("/bin/sleep", &core).unwrap();
    std::fs::set_permissions(&core, std::fs::Permissions::from_mode(0o755)).unwrap();
    let session = Session::sh(&format!("'{}' 1000 & sleep 1000 & wait", core.display()));
    let engine = EngineProcess::of(session.pid()).unwrap();
    let mut source = ProcSource::live();
    source.set_engine(Some(engine.clone()));
    let named = |pid: &i32| ProcRoot::live().stat(*pid).is_some_and(|stat| stat.comm == CORE);
    let pid = eventually("the core is there", || process_tree(&engine).into_iter().find(named));
    source.set_members(process_tree(&engine));
    assert_eq!(source.look(monotonic_ms(), None).unwrap().ended, None);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    let seen = eventually("it is missed", || source.look(monotonic_ms(), None).filter(|seen| seen.ended.is_some()));
    assert!(seen.alive);
    assert_eq!(seen.ended.map(|ended| (ended.pid, ended.name)), Some((pid, CORE.to_owned())));
}
