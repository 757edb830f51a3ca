//! Rows D of the fault catalogue, on real processes: an agent that is killed, frozen, restarted without end, short of descriptors or
//! talking to nobody. The engine and its clients must not notice, and no hang may be forgotten.
//!
//! The whole table, with the rows that are tested elsewhere, is `docs/faults-agent.md`.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use agent::kill::send;
use agent::launch::EngineFile;
use agent::sources::procs::ProcRoot;
use nix::sys::signal::Signal;

use crate::run::Run;

use super::leaks::{Markers, ask, get, launch, post, until, until_ready};

/// Fences soon and never kills.
const FENCE_ONLY: &str = "foreign_floor_ms=1000,foreign_warm_ms=1000,patience_cap_ms=1000,confirm_strong_ms=600000,\
                          confirm_moderate_ms=600000,confirm_weak_ms=600000,confirm_timer_ms=600000";

fn started(markers: &Markers, limits: &str, output: fn() -> Stdio) -> Run {
    let run = launch(markers, FENCE_ONLY, limits, output);
    until_ready(&run);
    run
}

fn ready(run: &Run) -> bool {
    get(&run.agent, "/readyz").starts_with("HTTP/1.1 200")
}

fn engine(run: &Run) -> EngineFile {
    EngineFile::read(&run.dir.path().join("agent")).unwrap()
}

/// The detector that lives now.
fn detector(run: &Run) -> Option<i32> {
    child(run, b"detect")
}

/// The supervisor's child that has this role now.
fn child(run: &Run, wanted: &[u8]) -> Option<i32> {
    let me = i32::try_from(run.supervisor.id()).unwrap();
    let all = ProcRoot::live().all();
    let mine = all.iter().filter(|stat| stat.ppid == me && !stat.ended()).map(|stat| stat.pid);
    let role = |pid: &i32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    mine.into_iter().find(|pid| role(pid).split(|byte| *byte == 0).nth(2) == Some(wanted))
}

fn serves(run: &Run, markers: &Markers) -> bool {
    ask(&run.gate, &post(markers)).is_some_and(|text| text.contains("[DONE]"))
}

#[test]
fn the_table_names_every_row_and_only_tests_that_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let table = std::fs::read_to_string(root.join("docs/faults-agent.md")).unwrap();
    let rows = (1..=10).map(|n| format!("D{n}")).chain((1..=10).map(|n| format!("G{n}")));
    for row in rows {
        let line = table.lines().find(|line| line.starts_with(&format!("| {row} |"))).expect(&row);
        let tests = line.rsplit('|').nth(1).unwrap().split(", ").map(|test| test.split('`').collect::<Vec<_>>());
        for test in tests {
            let [_, file, _, name, _] = test.as_slice() else { panic!("{row}: {test:?} is no file and test") };
            let code =
                std::fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{row}: {file}: {error}"));
            assert!(code.contains(&format!("fn {name}()")), "{row}: {file} has no {name}");
            let (letter, number) = row.split_at(1);
            let mark = format!("{}{:0>2}_", letter.to_lowercase(), number);
            assert!(name.contains(&mark), "{row}: {name} is not named after it");
        }
    }
}

#[test]
fn d01_d02_an_agent_that_is_killed_or_frozen_costs_the_engine_nothing() {
    let markers = Markers::new();
    let run = started(&markers, "true", Stdio::null);
    let before = engine(&run);
    for signal in [Signal::SIGKILL, Signal::SIGSTOP] {
        let victim = detector(&run).unwrap();
        send(&[victim], signal);
        until("its successor", || {
            // (no answer in time is no word of its own)
            let told = get(&run.agent, "/readyz");
            assert!(!told.starts_with("HTTP/1.1 503"), "a blind agent is no eviction ({signal}): {told}");
            detector(&run).is_some_and(|pid| pid != victim)
        });
        until("it serves, and says so", || serves(&run, &markers) && ready(&run));
    }
    assert_eq!(engine(&run), before, "nobody touched the engine");
}

#[test]
fn d02_a_gate_that_is_frozen_is_replaced() {
    let markers = Markers::new();
    let run = started(&markers, "true", Stdio::null);
    let before = engine(&run);
    let victim = child(&run, b"gate").unwrap();
    send(&[victim], Signal::SIGSTOP);
    until("its successor", || child(&run, b"gate").is_some_and(|pid| pid != victim));
    until("it serves", || serves(&run, &markers));
    assert_eq!(engine(&run), before, "nobody touched the engine");
}

#[test]
fn d05_an_agent_that_restarts_without_end_forgets_no_hang() {
    let markers = Markers::new();
    let run = started(&markers, "true", Stdio::null);
    let server = *agent::sources::process_tree(&engine(&run).process()).last().unwrap();
    send(&[server], Signal::SIGUSR2);
    let mut stream = TcpStream::connect(&run.gate).unwrap();
    stream.write_all(post(&markers).as_bytes()).unwrap();
    until("fenced", || !ready(&run));
    let since = Instant::now();
    let mut kills = 0;
    until("ten restarts, in ten seconds or more", || {
        if let Some(victim) = detector(&run) {
            send(&[victim], Signal::SIGKILL);
            kills += 1;
        }
        assert!(!ready(&run), "after {kills} restarts the hang is still known");
        std::thread::sleep(Duration::from_millis(30));
        kills >= 10 && since.elapsed() >= Duration::from_secs(10)
    });
    until("a detector that stays says the same", || {
        get(&run.agent, "/verdict").contains("\"fenced\":true") && detector(&run).is_some()
    });
    assert!(!ready(&run));
    assert_eq!(engine(&run).starts, 1);
}

#[test]
fn d08_without_descriptors_the_agent_is_poorer_and_alive() {
    let markers = Markers::new();
    let mut run = started(&markers, "ulimit -n 40", Stdio::null);
    let before = engine(&run);
    // more clients than the gate has descriptors for
    let crowd: Vec<TcpStream> = (0..120).filter_map(|_| TcpStream::connect(&run.gate).ok()).collect();
    assert!(crowd.len() > 60, "{}", crowd.len());
    std::thread::sleep(Duration::from_secs(2));
    assert!(get(&run.agent, "/livez").starts_with("HTTP/1.1 200"));
    assert_eq!(run.supervisor.try_wait().unwrap(), None);
    until("it serves beside those that ask for nothing", || serves(&run, &markers));
    drop(crowd);
    until("it serves again", || serves(&run, &markers));
    assert_eq!(engine(&run), before);
}

#[test]
fn d08_a_gate_without_descriptors_says_that_it_is_its_own_want() {
    let markers = Markers::new();
    let run = started(&markers, "ulimit -n 40", Stdio::null);
    // whoever asks is not sent away, and each of these has begun to
    let asking = || {
        let mut stream = TcpStream::connect(&run.gate).ok()?;
        stream.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n").ok()?;
        Some(stream)
    };
    let mut crowd: Vec<TcpStream> = (0..120).filter_map(|_| asking()).collect();
    // a connection to the engine that the gate had kept is closed by then
    std::thread::sleep(Duration::from_secs(4));
    let told = |mut stream: TcpStream| {
        let mut answer = [0; 1024];
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        stream.write_all(b"{}").ok()?;
        let n = std::io::Read::read(&mut stream, &mut answer).ok()?;
        Some(String::from_utf8_lossy(&answer[..n]).into_owned())
    };
    let mut last = None;
    until("the gate's own words", || {
        // those that came first were taken for certain
        last = told(crowd.remove(0));
        assert!(last.as_ref().is_none_or(|text| !text.contains("engine_absent")), "the engine is there: {last:?}");
        last.as_ref().is_some_and(|text| text.starts_with("HTTP/1.1 503") && text.contains("gate_exhausted"))
    });
}

#[test]
fn d08_a_gate_takes_as_many_descriptors_as_it_may() {
    let markers = Markers::new();
    let run = started(&markers, "ulimit -Sn 60; ulimit -Hn 1000", Stdio::null);
    let limits = |role: &[u8]| {
        let pid = child(&run, role).unwrap();
        let text = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let line = text.lines().find(|line| line.starts_with("Max open files")).unwrap().to_owned();
        line.split_whitespace().skip(3).take(2).map(|n| n.parse::<u64>().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!((limits(b"gate"), limits(b"detect")), (vec![1_000, 1_000], vec![60, 1_000]));
}

#[test]
fn d09_nobody_reads_the_log_and_everybody_is_served() {
    let markers = Markers::new();
    // the pipes stay open and are never read
    let mut run = started(&markers, "true", Stdio::piped);
    let body = format!(r#"{{"prompt":"{}","stream":true}}"#, "x ".repeat(60 << 10));
    let flood = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    for round in 0..3 {
        until(&format!("round {round} is answered, and the engine waits for no reader of its log"), || {
            ask(&run.gate, &flood).is_some_and(|answer| answer.contains("[DONE]"))
        });
    }
    until("it serves, and says so", || serves(&run, &markers) && ready(&run));
    assert_eq!(run.supervisor.try_wait().unwrap(), None);
}
