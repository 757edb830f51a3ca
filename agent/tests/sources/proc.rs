//! `/proc` facts over fixture trees: CPU accounts, compilers, tracers, cgroups.

use agent::sources::EngineProcess;
use agent::sources::clock::TickClock;
use agent::sources::proc::ProcSource;
use vitals::observation::ProcObs;

use crate::fixture::{FakeProc, Process, write};

const CLOCK: TickClock = TickClock { ticks_per_second: 100, slept_ms: 3_000 };

struct Watched {
    fake: FakeProc,
    source: ProcSource,
    now_ms: u64,
}

impl Watched {
    fn new(processes: &[Process<'_>]) -> Self {
        let fake = FakeProc::new(processes);
        let mut source = ProcSource::at(fake.root(), &fake.directory.path().join("cgroup"), CLOCK);
        source.set_engine(Some(EngineProcess { pid: 100, start_ticks: 1_000 }));
        source.set_members(processes.iter().map(|process| process.pid).collect());
        Self { fake, source, now_ms: 50_000 }
    }

    fn look(&mut self) -> ProcObs {
        self.now_ms += 1_000;
        self.source.look(self.now_ms, None).unwrap()
    }
}

fn engine(own_ticks: u64, reaped_ticks: u64) -> Process<'static> {
    Process { pid: 100, session: 100, comm: "engine", own_ticks, reaped_ticks, ..Default::default() }
}

fn child(pid: i32, comm: &'static str, own_ticks: u64) -> Process<'static> {
    Process { pid, ppid: 100, session: 100, comm, own_ticks, start_ticks: 1_100, ..Default::default() }
}

#[test]
fn the_start_is_on_the_monotonic_clock() {
    assert_eq!(Watched::new(&[engine(0, 0)]).look().started_ms, 7_000);
}

#[test]
fn cpu_time_is_counted_once_whether_a_child_is_reaped_or_not() {
    let mut watched = Watched::new(&[engine(10, 0), child(101, "worker", 20), child(102, "worker", 5)]);
    assert_eq!(watched.look().cpu_ms, 350);
    // 101 ended and was waited for: its 20 ticks, and 4 that nobody saw, are now the root's reaped time
    watched.fake.remove(101);
    watched.fake.put(&engine(11, 24));
    assert_eq!(watched.look().cpu_ms, 400);
    // 102 ended as somebody else's child: its time is nowhere any more, and must not be taken off
    watched.fake.remove(102);
    assert_eq!(watched.look().cpu_ms, 400);
    watched.fake.put(&engine(13, 24));
    assert_eq!(watched.look().cpu_ms, 420);
    // a child that came and went between two looks
    watched.fake.put(&engine(13, 54));
    assert_eq!(watched.look().cpu_ms, 720);
}

#[test]
fn compilers_are_counted_apart() {
    let mut watched = Watched::new(&[engine(0, 0), child(101, "ptxas", 30), child(102, "python3", 50)]);
    let first = watched.look();
    assert_eq!((first.compilers, first.compilers_cpu_ms), (1, 300));
    watched.fake.put(&child(101, "ptxas", 90));
    assert_eq!(watched.look().compilers_cpu_ms, 900);
    watched.fake.remove(101);
    let last = watched.look();
    assert_eq!((last.compilers, last.compilers_cpu_ms), (0, 900));
}

#[test]
fn dead_zombie_and_reused_pids_are_not_alive() {
    let mut watched = Watched::new(&[engine(0, 0)]);
    assert!(watched.look().alive);
    watched.fake.put(&Process { state: 'Z', ..engine(0, 0) });
    assert!(!watched.look().alive);
    watched.fake.put(&Process { start_ticks: 5_000, ..engine(0, 0) });
    assert!(!watched.look().alive, "another process with the engine's number");
    watched.fake.remove(100);
    let gone = watched.look();
    assert_eq!((gone.alive, gone.state), (false, None));
}

/// D8: a detector without a descriptor, on a machine without a free file.
#[test]
fn d08_an_engine_that_cannot_be_looked_at_is_not_dead() {
    let mut watched = Watched::new(&[engine(0, 0)]);
    assert!(watched.look().alive);
    // reading it fails, and not for want of a process
    let stat = watched.fake.directory.path().join("100/stat");
    std::fs::remove_file(&stat).unwrap();
    std::fs::create_dir(&stat).unwrap();
    assert_eq!(watched.source.look(60_000, None), None, "nobody knows (I4)");
    std::fs::remove_dir(&stat).unwrap();
    assert!(!watched.look().alive);
}

#[test]
fn the_process_that_steps_is_the_pages_else_the_busiest_else_the_root() {
    let mut watched = Watched::new(&[engine(0, 0), Process { state: 'R', ..child(101, "core", 0) }]);
    assert_eq!(watched.look().state, Some('S'), "nobody has burned anything: the root");
    watched.fake.put(&Process { state: 'R', ..child(101, "core", 90) });
    assert_eq!(watched.look().state, Some('R'));
    watched.fake.put(&Process { state: 'D', ..engine(0, 0) });
    let of_page = watched.source.look(60_000, Some(100)).unwrap();
    assert_eq!((of_page.state, of_page.wchan.as_deref()), (Some('D'), Some("futex_do_wait")));
}

#[test]
fn a_job_that_is_stopped_in_somebodys_shell_is_no_engine_that_is_stopped() {
    // `kubectl exec` with a shell, and a pager in it that has burned more than anybody and was stopped by Ctrl-Z
    let shell = Process { pid: 200, session: 200, comm: "bash", start_ticks: 1_200, ..Default::default() };
    let pager = Process { pid: 201, ppid: 200, session: 200, start_ticks: 1_300, comm: "less", ..Default::default() };
    let stopped = |process: Process<'static>| Process { state: 'T', ..process };
    let mut watched = Watched::new(&[engine(5, 0), child(101, "core", 9), shell, pager]);
    watched.look();
    watched.fake.put(&stopped(Process {
        own_ticks: 90,
        pid: 201,
        ppid: 200,
        session: 200,
        start_ticks: 1_300,
        ..Default::default()
    }));
    let seen = watched.look();
    assert_eq!((seen.stopped, seen.state), (0, Some('S')));
    // its own are counted: a child in a session of its own, and an orphan of its session
    watched.fake.put(&stopped(Process { session: 101, ..child(101, "core", 9) }));
    watched.fake.put(&stopped(Process { ppid: 1, ..child(102, "worker", 0) }));
    watched.source.set_members(vec![100, 101, 102, 200, 201]);
    assert_eq!(watched.look().stopped, 2);
    // and whoever writes the page is the one that steps, wherever it came from
    watched.now_ms += 1_000;
    assert_eq!(watched.source.look(watched.now_ms, Some(201)).unwrap().state, Some('T'));
}

#[test]
fn a_debugger_on_any_member_is_seen() {
    let mut watched = Watched::new(&[engine(0, 0), child(101, "worker", 0)]);
    assert!(!watched.look().traced);
    watched.fake.put(&Process { tracer: 77, ..child(101, "worker", 0) });
    assert!(watched.look().traced);
}

#[test]
fn a_v1_limit_that_takes_most_of_the_time_throttles_and_a_freezer_freezes() {
    let groups = "5:cpu,cpuacct:/pod/e\n4:freezer:/pod/e\n";
    let mut watched = Watched::new(&[Process { cgroup: groups, ..engine(0, 0) }]);
    let mounts = watched.fake.directory.path().join("cgroup");
    let stat = |throttled: u64, ns: u64| {
        write(
            &mounts.join("cpu,cpuacct/pod/e/cpu.stat"),
            &format!("nr_periods 9\nnr_throttled {throttled}\nthrottled_time {ns}\n"),
        );
    };
    stat(3, 1_000_000_000);
    write(&mounts.join("freezer/pod/e/freezer.state"), "THAWED\n");
    assert!(!watched.look().throttled, "history is no news");
    stat(4, 1_050_000_000);
    assert!(!watched.look().throttled, "50 ms of a second is normal life");
    stat(9, 1_950_000_000);
    let held = watched.look();
    assert_eq!((held.throttled, held.frozen), (true, false));
    write(&mounts.join("freezer/pod/e/freezer.state"), "FROZEN\n");
    let frozen = watched.look();
    assert_eq!((frozen.throttled, frozen.frozen), (false, true));
}

#[test]
fn who_freezes_a_process_by_hand_makes_a_group_for_it() {
    let mut watched = Watched::new(&[Process { cgroup: "4:freezer:/\n", ..engine(0, 0) }]);
    assert!(!watched.look().frozen, "a root has no freezer to ask");
    let mounts = watched.fake.directory.path().join("cgroup");
    write(&mounts.join("freezer/by-hand/freezer.state"), "FROZEN\n");
    watched.fake.put(&Process { cgroup: "4:freezer:/by-hand\n", ..engine(0, 0) });
    assert!(watched.look().frozen, "a second later it is known");
}

#[test]
fn what_is_mounted_later_is_found_within_a_minute_of_looks() {
    let mut watched = Watched::new(&[Process { cgroup: "4:freezer:/e\n", ..engine(0, 0) }]);
    assert!(!watched.look().frozen);
    let mounts = watched.fake.directory.path().join("cgroup");
    write(&mounts.join("freezer/e/freezer.state"), "FROZEN\n");
    assert!((0..60).any(|_| watched.look().frozen));
}

#[test]
fn a_v2_group_is_read_in_our_mount_or_through_the_engines_own() {
    for (group, place) in [("0::/pod/e\n", "cgroup/pod/e"), ("0::/../e\n", "100/root/sys/fs/cgroup")] {
        let mut watched = Watched::new(&[Process { cgroup: group, ..engine(0, 0) }]);
        let directory = watched.fake.directory.path().join(place);
        let stat = |throttled: u64, us: u64| {
            write(
                &directory.join("cpu.stat"),
                &format!("usage_usec 9\nnr_throttled {throttled}\nthrottled_usec {us}\n"),
            );
        };
        stat(0, 0);
        write(&directory.join("cgroup.events"), "populated 1\nfrozen 0\n");
        assert!(!watched.look().frozen, "{group}");
        stat(5, 800_000);
        write(&directory.join("cgroup.events"), "populated 1\nfrozen 1\n");
        let held = watched.look();
        assert_eq!((held.throttled, held.frozen), (true, true), "{group}");
    }
}
