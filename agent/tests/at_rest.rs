//! What the agent does beside an engine that nobody uses (2d): counted, for times say little on a busy machine.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed expectation is how a test speaks")]

#[path = "common/end_run.rs"]
mod end_run;
#[path = "common/free_addresses.rs"]
mod free_addresses;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use end_run::end_run;
use free_addresses::free_addresses;

const SOON: Duration = Duration::from_secs(40);
const WINDOW: Duration = Duration::from_secs(4);
/// Twice a second; as often again for what a machine and a first minute may bring.
const TICKS_MAX: u64 = 16;

/// `truebeat run` around a server that answers and serves nobody. Dropped, all of it ends.
struct Run {
    supervisor: Child,
    agent: String,
    gate: String,
    dir: tempfile::TempDir,
}

impl Drop for Run {
    fn drop(&mut self) {
        end_run(&mut self.supervisor, &self.dir.path().join("agent"));
    }
}

impl Run {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let [gate, agent, engine] = free_addresses();
        let supervisor = Command::new(env!("CARGO_BIN_EXE_truebeat-agent"))
            .args(["run", "--no-nvml", "--listen", &gate.to_string(), "--agent-listen", &agent.to_string()])
            .args(["--engine-url", &format!("http://{engine}"), "--agent-dir"])
            .arg(dir.path().join("agent"))
            .args(["--", "python3", "-m", "http.server", "--bind", "127.0.0.1", &engine.port().to_string()])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { supervisor, agent: agent.to_string(), gate: gate.to_string(), dir }
    }

    /// Ticks of the detector so far, as its newest whole status tells.
    fn ticks(&self) -> u64 {
        let text = get(&self.agent, "/metrics").unwrap_or_default();
        let count = text.lines().find_map(|line| line.strip_prefix("truebeat_tick_seconds_count "));
        count.map_or(0, |count| count.trim().parse().unwrap())
    }

    /// Waits for the next whole status; returns its ticks, and when it was seen.
    fn next_status(&self) -> (u64, Instant) {
        let before = self.ticks();
        until("another status", || self.ticks() != before);
        (self.ticks(), Instant::now())
    }
}

fn until(what: &str, mut wanted: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !wanted() {
        assert!(begun.elapsed() < SOON, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn get(address: &str, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}

#[test]
fn an_engine_at_rest_is_judged_twice_a_second_and_its_gate_answers_at_once() {
    let run = Run::start();
    until("at rest", || get(&run.agent, "/verdict").is_some_and(|text| text.contains("\"Idle\"")));
    run.next_status();
    let (before, began) = run.next_status();
    let mut ticks = before;
    while began.elapsed() < WINDOW {
        ticks = run.next_status().0;
    }
    let most = TICKS_MAX * began.elapsed().as_secs().max(1) / WINDOW.as_secs();
    assert!(ticks - before <= most, "{} ticks in {:?}", ticks - before, began.elapsed());
    let answer = get(&run.gate, "/").unwrap_or_default();
    assert_eq!(answer.get(9..12), Some("200"), "{answer}");
}
