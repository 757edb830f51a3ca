//! Which processes are the engine's: these lists get SIGKILL, so what is left out matters as much as what is in.

use std::path::Path;

use agent::sources::{EngineProcess, Found, find_engine_in, left_of_in, process_tree_in};

use crate::fixture::{FakeProc, Process};

const ENGINE: EngineProcess = EngineProcess { pid: 100, start_ticks: 1_000 };

fn process(pid: i32, ppid: i32, session: i32) -> Process<'static> {
    Process { pid, ppid, session, start_ticks: 1_000 + pid as u64 - 100, ..Default::default() }
}

fn engine_and_us() -> Vec<Process<'static>> {
    // 1 init, 50 our supervisor, 51 this agent, 100 the engine which leads its session, 101 and 102 below it
    let mut processes: Vec<Process<'static>> =
        vec![process(100, 50, 100), process(101, 100, 100), process(102, 101, 100)];
    for (pid, ppid) in [(1, 0), (50, 1), (51, 50)] {
        processes.push(Process { pid, ppid, session: 50, start_ticks: 10, ..Default::default() });
    }
    processes
}

#[test]
fn descendants_whatever_their_session_and_orphans_of_the_session() {
    let fake = FakeProc::new(&engine_and_us());
    fake.put(&process(110, 102, 110)); // a descendant in a session of its own
    fake.put(&process(111, 1, 100)); // an orphan of the engine's session
    fake.put(&process(112, 111, 112)); // and its child
    fake.put(&process(120, 1, 120)); // a stranger
    fake.put(&Process { state: 'Z', ..process(130, 100, 100) });
    assert_eq!(process_tree_in(&fake.root(), &ENGINE, 51), [100, 101, 102, 110, 111, 112]);
}

#[test]
fn the_session_of_whoever_started_the_engine_is_not_the_engines() {
    let fake = FakeProc::new(&[
        Process { pid: 50, ppid: 1, session: 40, ..Default::default() },
        Process { pid: 60, ppid: 40, session: 40, comm: "vim", ..Default::default() },
        Process { session: 40, ..process(100, 50, 40) },
        process(101, 100, 40),
    ]);
    assert_eq!(process_tree_in(&fake.root(), &ENGINE, 50), [100, 101]);
}

#[test]
fn orphans_of_a_dead_leader_are_found_and_a_reused_pid_is_not() {
    let fake = FakeProc::new(&engine_and_us());
    fake.remove(100);
    fake.put(&process(101, 1, 100));
    assert_eq!(process_tree_in(&fake.root(), &ENGINE, 51), [101, 102]);
    // the number belongs to somebody else now, who leads another session of that number
    fake.put(&Process { start_ticks: 9_999, ..process(100, 1, 100) });
    assert_eq!(process_tree_in(&fake.root(), &ENGINE, 51), [] as [i32; 0]);
}

#[test]
fn orphans_in_the_engines_container_are_the_engines_and_ours_are_not() {
    let theirs = "5:cpu:/pod/engine\n0::/\n";
    let ours = "5:cpu:/pod/agent\n0::/\n";
    let fake = FakeProc::new(&[
        Process { pid: 1, cgroup: "5:cpu:/pod/pause\n0::/\n", ..Default::default() },
        Process { pid: 20, cgroup: ours, ..Default::default() },
        Process { pid: 21, ppid: 20, cgroup: ours, ..Default::default() },
        Process { cgroup: theirs, ..process(100, 0, 100) },
        Process { cgroup: theirs, ..process(140, 1, 140) },
        Process { cgroup: ours, ..process(141, 1, 141) },
    ]);
    assert_eq!(process_tree_in(&fake.root(), &ENGINE, 21), [100, 140]);
}

/// The engine has ended while no detector was there: its container has ended with it, so whoever is still in there is its own.
#[test]
fn who_is_left_in_a_container_whose_engine_ended_unseen_is_the_engines_but_for_guests() {
    let (engine, next) = ("5:cpu:/pod/engine\n", "5:cpu:/pod/engine-2\n");
    let fake = pod("");
    let inside = |pid, ppid, cgroup| Process { pid, ppid, session: pid, start_ticks: 22, cgroup, ..Default::default() };
    [30, 31].into_iter().for_each(|pid| fake.remove(pid));
    fake.put(&inside(32, 1, engine)); // a worker in a session of its own, and its child
    fake.put(&inside(33, 32, engine));
    fake.put(&inside(41, 40, engine)); // what the shell of `kubectl exec` has started
    fake.put(&Process { state: 'Z', ..inside(34, 1, engine) });
    fake.put(&inside(50, 0, next)); // its successor
    fake.put(&inside(51, 50, next));
    let left = |container| {
        let ended = EngineProcess { pid: 30, start_ticks: 20 };
        left_of_in(&fake.root(), &ended, container, 8).into_iter().map(|left| left.pid).collect::<Vec<_>>()
    };
    assert_eq!(left(Some(engine)), [32, 33]);
    assert_eq!(left(None), [] as [i32; 0], "without its container nobody knows whose they are");
    fake.put(&Process { session: 30, ..inside(32, 1, engine) });
    assert_eq!(left(Some(engine)), [32, 33], "nobody is counted twice");
}

#[test]
fn a_group_that_engines_of_one_machine_share_is_no_container() {
    // two times `truebeat run -- cgexec -g memory:engines …`
    let (ours, engines) = ("0::/user.slice/truebeat\n", "0::/engines\n");
    let fake = FakeProc::new(&[
        Process { pid: 20, cgroup: ours, ..Default::default() },
        Process { pid: 21, ppid: 20, cgroup: ours, ..Default::default() },
        Process { cgroup: engines, ..process(100, 20, 100) },
        Process { cgroup: engines, ..process(101, 100, 100) },
        Process { cgroup: engines, ..process(140, 30, 140) }, // the other run's engine
        Process { cgroup: engines, ..process(150, 1, 150) },
    ]);
    assert_eq!(process_tree_in(&fake.root(), &ENGINE, 21), [100, 101]);
}

#[test]
fn a_slice_that_holds_us_too_is_no_container() {
    let fake = FakeProc::new(&[
        Process { pid: 20, cgroup: "0::/user.slice/truebeat\n", ..Default::default() },
        Process { cgroup: "0::/user.slice\n", ..process(100, 1, 40) },
        Process { cgroup: "0::/user.slice\n", ..process(140, 1, 140) },
    ]);
    assert_eq!(process_tree_in(&fake.root(), &ENGINE, 20), [100]);
}

#[test]
fn we_and_our_ancestors_are_never_in_it() {
    // an agent that the engine itself started
    let fake = FakeProc::new(&[process(100, 1, 100), process(101, 100, 100), process(102, 101, 100)]);
    assert_eq!(process_tree_in(&fake.root(), &ENGINE, 102), [] as [i32; 0], "everything is our ancestor");
}

fn pod(engine_environ: &'static str) -> FakeProc {
    let container = |name| format!("5:cpu:/pod/{name}\n");
    let (pause, ours, mesh, engine) = (container("pause"), container("agent"), container("mesh"), container("engine"));
    let at = |pid, ppid, start_ticks| Process { pid, ppid, start_ticks, ..Default::default() };
    FakeProc::new(&[
        Process { cgroup: &pause, ..at(1, 0, 1) },
        Process { cgroup: &ours, ..at(7, 0, 2) },
        Process { cgroup: &ours, ..at(8, 7, 3) },
        Process { cgroup: &ours, comm: "sh", ..at(70, 0, 4) }, // kubectl exec into our container
        Process { cgroup: &mesh, ..at(15, 0, 5) },
        Process { cgroup: &engine, environ: engine_environ, ..at(30, 0, 20) },
        Process { cgroup: &engine, environ: engine_environ, ..at(31, 30, 21) },
        Process { cgroup: &engine, comm: "sh", ..at(40, 0, 30) }, // kubectl exec into the engine's
    ])
}

#[test]
fn in_a_pod_the_engine_is_the_root_that_names_the_page_directory() {
    let fake = pod("PATH=/bin\0TRUEBEAT_PAGE_DIR=/run/truebeat/\0");
    let named = Found { process: EngineProcess { pid: 30, start_ticks: 20 }, named: true, hides: false };
    assert_eq!(find_engine_in(&fake.root(), 8, Path::new("/run/truebeat"), None), Some(named));
    assert!(!find_engine_in(&fake.root(), 8, Path::new("/elsewhere"), None).unwrap().named, "somebody else's variable");
}

/// A shell of `kubectl exec`, a probe, a hook: each has the environment of the engine's container.
#[test]
fn who_comes_into_the_engines_container_by_another_door_is_no_engine() {
    let names = "PATH=/bin\0TRUEBEAT_PAGE_DIR=/run/truebeat\0";
    let found = |fake: &FakeProc, ended: Option<&str>| {
        find_engine_in(&fake.root(), 8, Path::new("/run/truebeat"), ended).map(|found| (found.process.pid, found.named))
    };
    let shell = Process {
        cgroup: "5:cpu:/pod/engine\n",
        environ: names,
        comm: "sh",
        ppid: 0,
        pid: 40,
        start_ticks: 30,
        ..Default::default()
    };
    let fake = pod("\0\0"); // the engine has written a title over its environment
    fake.remove(15);
    fake.put(&shell);
    assert_eq!(found(&fake, None), Some((30, false)), "the shell would be followed, and spare an engine that hangs");
    let fake = pod(names);
    fake.put(&shell);
    assert_eq!(found(&fake, None), Some((30, true)));
    [15, 30, 31].into_iter().for_each(|pid| fake.remove(pid));
    let ended = Some("5:cpu:/pod/engine\n");
    assert_eq!(found(&fake, ended), None, "its container has not ended yet, and will");
    fake.put(&Process { cgroup: "5:cpu:/pod/engine-2\n", pid: 50, start_ticks: 40, ..shell });
    assert_eq!(found(&fake, ended), Some((50, true)));
}

#[test]
fn without_a_hint_the_oldest_foreign_root_and_never_a_zombie() {
    let fake = pod("");
    let hides = |fake: &FakeProc| find_engine_in(&fake.root(), 8, Path::new("/run/truebeat"), None).unwrap().hides;
    assert!(hides(&fake), "an environment that was written over tells nothing");
    fake.put(&Process {
        pid: 15,
        start_ticks: 5,
        cgroup: "5:cpu:/pod/mesh\n",
        environ: "PATH=/bin\0",
        ..Default::default()
    });
    assert!(!hides(&fake), "a sidecar names another directory, or none");
    let found = |fake: &FakeProc| {
        find_engine_in(&fake.root(), 8, Path::new("/run/truebeat"), None).map(|found| (found.process.pid, found.named))
    };
    assert_eq!(found(&fake), Some((15, false)));
    fake.remove(15);
    assert_eq!(found(&fake), Some((30, false)));
    fake.put(&Process { pid: 30, state: 'Z', cgroup: "5:cpu:/pod/engine\n", ..Default::default() });
    fake.remove(40);
    assert_eq!(found(&fake), None);
}

#[test]
fn the_watch_sees_a_new_child_at_once_and_an_adopted_process_at_the_next_whole_walk() {
    use agent::sources::walk::TreeWatch;
    let member = |pid, ppid, session| Process { pid, ppid, session, cgroup: "0::/a\n", ..Default::default() };
    let fake = FakeProc::new(&[member(1, 0, 1), member(100, 1, 100), member(7, 1, 7)]);
    let engine = EngineProcess { pid: 100, start_ticks: 1_000 };
    let mut watch = TreeWatch::new(fake.root(), engine, 7);
    assert_eq!(watch.look(0, 10_000), [100]);
    fake.put(&member(101, 100, 101));
    assert_eq!(watch.look(500, 10_000), [100, 101]);
    fake.remove(101);
    assert_eq!(watch.look(1_000, 10_000), [100], "one that ended is gone");
    // a stranger first, then the child of a member that nobody saw being born
    fake.put(&member(102, 1, 102));
    assert_eq!(watch.look(1_500, 10_000), [100]);
    fake.put(&member(102, 100, 102));
    assert_eq!(watch.look(2_000, 10_000), [100], "its number is known: not read again before the next whole walk");
    assert_eq!(watch.look(10_600, 10_000), [100, 102]);
}
