//! Facts gathered off the tick: sockets of a real port, bytes and threads of real processes, and tables of files.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use agent::sources::VisibleGpus;
use agent::sources::clock::TickClock;
use agent::sources::facts::{Facts, FactsReader, Io, Look};
use agent::sources::net::{Sockets, sockets};
use agent::sources::procs::ProcRoot;
use vitals::observation::ProcObs;

use crate::fixture::{FakeProc, Process, Session, eventually};

const HEAD: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";

fn own_pid() -> i32 {
    std::process::id().try_into().unwrap()
}

#[test]
fn connections_and_the_accept_queue_of_a_real_port_are_counted() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let look = || sockets(&ProcRoot::live(), own_pid(), port).unwrap();
    assert_eq!(look(), Sockets { established: 0, accept_queue: 0, listening: true });
    let clients: Vec<TcpStream> = (0..3).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
    let waiting = Sockets { established: 3, accept_queue: 3, listening: true };
    eventually("nobody accepts", || (look() == waiting).then_some(()));
    let accepted = listener.accept().unwrap();
    eventually("one is accepted", || (look() == Sockets { accept_queue: 2, ..waiting }).then_some(()));
    drop((accepted, clients));
}

#[test]
fn the_engines_own_tables_are_read_in_both_families_and_a_mad_one_is_unknown() {
    let fake = FakeProc::new(&[Process { pid: 100, ..Default::default() }]);
    assert_eq!(sockets(&fake.root(), 100, 8_000), None, "no table, no figures");
    // 8000 is 1F40: a listener with two waiting, an established one, a client's end, and another port
    let four = "   0: 0100007F:1F40 00000000:0000 0A 00000080:00000002 00:00000000 00000000 0 0 1 1\n   1: 0100007F:1F40 0100007F:9C40 01 00000000:00000000 00:0 0 0 0 2 1\n   2: 0100007F:9C40 0100007F:1F40 01 00000000:00000000 00:0 0 0 0 3 1\n   3: 0100007F:1F41 0100007F:9C41 01 00000000:00000000 00:0 0 0 0 4 1\n";
    fake.file(100, "net/tcp", &format!("{HEAD}{four}nonsense\n  9: :\n"));
    fake.file(100, "net/tcp6", &format!("{HEAD}   0: 00000000000000000000000001000000:1F40 0:0 01 0:0\n"));
    assert_eq!(sockets(&fake.root(), 100, 8_000), Some(Sockets { established: 2, accept_queue: 2, listening: true }));
    let closed = Some(Sockets { established: 1, ..Sockets::default() });
    assert_eq!(sockets(&fake.root(), 100, 8_001), closed, "nobody listens on that port");
    fake.file(100, "net/tcp", &"x".repeat(5 << 20));
    assert_eq!(sockets(&fake.root(), 100, 8_000), None);
}

#[test]
fn the_engines_gpus_are_those_that_its_environment_lets_it_see() {
    let look = |name: &str, list: &str| {
        let mut engine = std::process::Command::new("sleep").arg("1000").env_clear().env(name, list).spawn().unwrap();
        let look = Look { engine: engine.id().try_into().unwrap(), ..Look::default() };
        let facts = FactsReader::new(ProcRoot::live(), TickClock::live()).gather(&look);
        engine.kill().and_then(|()| engine.wait()).unwrap();
        facts.visible
    };
    let two = VisibleGpus::of_environ(b"CUDA_VISIBLE_DEVICES=2", true);
    assert!(two.is_some());
    assert_eq!(look("CUDA_VISIBLE_DEVICES", "2"), two);
    assert_eq!(look("HOME", "/root"), None);
}

#[test]
fn bytes_read_and_written_are_added_up_and_a_member_that_ends_takes_none_away() {
    let fake = FakeProc::new(&[]);
    let io = |pid: i32, chars: u64, bytes: u64, [calls, storage]: [u64; 2]| {
        let read = format!("rchar: {chars}\nwchar: {calls}\nsyscr: 1\nsyscw: 1\nread_bytes: {bytes}\n");
        fake.file(pid, "io", &format!("{read}write_bytes: {storage}\ncancelled_write_bytes: 77\n"));
    };
    let mut reader = FactsReader::new(fake.root(), TickClock { ticks_per_second: 100, slept_ms: 0 });
    let mut total = |members: &[i32]| reader.gather(&Look { members: members.to_vec(), ..Look::default() }).io;
    assert_eq!(total(&[1]), None);
    io(1, 1_000, 500, [10, 1]);
    io(2, 50, 0, [0, 0]);
    assert_eq!(total(&[1, 2]), Some(Io { chars: 1_050, bytes: 500, written: 11 }));
    io(1, 3_000, 900, [200, 40]);
    assert_eq!(total(&[1, 2]), Some(Io { chars: 3_050, bytes: 900, written: 240 }));
    assert_eq!(total(&[2]), Some(Io { chars: 3_050, bytes: 900, written: 240 }));
    io(2, 10, 4, [3, 0]);
    assert_eq!(total(&[2]), Some(Io { chars: 3_060, bytes: 904, written: 243 }), "another process with its number");
}

#[test]
fn a_real_process_that_reads_and_writes_is_seen_to_do_so() {
    let mut reader = FactsReader::new(ProcRoot::live(), TickClock::live());
    let look = Look { members: vec![own_pid()], engine: own_pid(), ..Look::default() };
    let before = reader.gather(&look).io.unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&vec![7; 1 << 20]).unwrap();
    std::io::Seek::rewind(&mut file).unwrap();
    file.read_to_end(&mut Vec::new()).unwrap();
    let after = reader.gather(&look).io.unwrap();
    let grew = |of: fn(&Io) -> u64| of(&after) >= of(&before) + (1 << 20);
    assert!(grew(|io| io.chars) && grew(|io| io.written), "{before:?} {after:?}");
}

#[test]
fn threads_are_told_the_main_one_first_then_the_busiest() {
    let spinner = std::thread::Builder::new().name("spins".to_owned());
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let ended = std::sync::Arc::clone(&stop);
    let spinning = spinner.spawn(move || while !ended.load(std::sync::atomic::Ordering::Relaxed) {}).unwrap();
    let mut reader = FactsReader::new(ProcRoot::live(), TickClock::live());
    let look = Look { stepping: Some(own_pid()), engine: own_pid(), ..Look::default() };
    let threads = eventually("the busiest is seen", || {
        let threads = reader.gather(&look).threads;
        threads.iter().any(|thread| thread.name == "spins" && thread.burned_ms >= 10).then_some(threads)
    });
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    spinning.join().unwrap();
    assert_eq!(threads[0].tid, own_pid());
    assert!(threads.len() <= 4 && threads[1..].is_sorted_by(|a, b| a.burned_ms >= b.burned_ms), "{threads:?}");
    let mut obs = ProcObs::default();
    Facts { threads, ..Facts::default() }.lay_over(&mut obs, true);
    assert_eq!(obs.threads[0].tid, own_pid());
}

#[test]
fn a_thread_that_is_found_running_twice_says_how_long_it_stood_in_line() {
    let fake = FakeProc::new(&[]);
    let thread = |tid: i32, state: char, ticks: u64, schedstat: &str| {
        let stat = format!("{tid} (t) {state} 1 1 1 0 0 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 5 1 1\n");
        fake.file(100, &format!("task/{tid}/stat"), &stat);
        fake.file(100, &format!("task/{tid}/schedstat"), schedstat);
    };
    let mut reader = FactsReader::new(fake.root(), TickClock { ticks_per_second: 100, slept_ms: 0 });
    let mut look = |now_ms: u64| {
        let mut obs = ProcObs::default();
        reader.gather(&Look { stepping: Some(100), now_ms, ..Look::default() }).lay_over(&mut obs, true);
        assert_eq!(obs.threads_at_ms, Some(now_ms));
        obs.threads.iter().map(|thread| (thread.tid, thread.burned_ms, thread.runnable_ms)).collect::<Vec<_>>()
    };
    thread(100, 'S', 7, "1 2 3\n");
    thread(101, 'R', 10, "100000000 4000000000 9\n");
    thread(102, 'R', 10, "nonsense\n");
    assert_eq!(look(1_000), [(100, 0, None), (101, 0, None), (102, 0, None)]);
    thread(101, 'R', 16, "160000000 4930000000 12\n");
    assert_eq!(look(2_000), [(100, 0, None), (101, 60, Some(930)), (102, 0, None)]);
    thread(101, 'S', 16, "160000000 4930000000 12\n");
    assert_eq!(look(3_000)[1], (101, 0, None), "who sleeps stands in no line");
}

#[test]
fn a_count_of_connections_that_is_old_is_missing_and_not_zero() {
    let facts =
        Facts { sockets: Some(Sockets { established: 0, accept_queue: 0, ..Sockets::default() }), ..Facts::default() };
    let laid = |current| {
        let mut obs = ProcObs::default();
        facts.lay_over(&mut obs, current);
        (obs.connections, obs.accept_queue)
    };
    assert_eq!((laid(true), laid(false)), ((Some(0), Some(0)), (None, None)));
}

#[test]
fn a_stopped_process_is_read_like_any_other() {
    let session = Session::sh("sleep 1000; :");
    session.signal(nix::sys::signal::Signal::SIGSTOP);
    let mut reader = FactsReader::new(ProcRoot::live(), TickClock::live());
    let facts = reader.gather(&Look {
        members: vec![session.pid()],
        stepping: Some(session.pid()),
        engine: session.pid(),
        port: Some(1),
        now_ms: 0,
    });
    assert!(facts.io.is_some() && facts.sockets == Some(Sockets::default()) && facts.threads.len() == 1, "{facts:?}");
}
