//! What the agent does beside an engine that nobody uses (2d): counted, for times say little on a busy machine.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed expectation is how a test speaks")]

#[path = "common/asking.rs"]
mod asking;
#[path = "common/run.rs"]
mod run;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use asking::{get, until};
use run::{AGENT, Run};

const WINDOW: Duration = Duration::from_secs(4);
/// Once a second; twice as often again for what a machine and a first minute may bring.
const TICKS_MAX: u64 = 12;

impl Run {
    /// Around a server that answers and serves nobody.
    fn start() -> Self {
        Self::begin(Command::new(AGENT).stderr(Stdio::null()), &[], |_, engine| {
            let port = engine.port().to_string();
            ["python3", "-m", "http.server", "--bind", "127.0.0.1", &port].map(Into::into).to_vec()
        })
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

#[test]
fn an_engine_at_rest_is_judged_once_a_second_and_its_gate_answers_at_once() {
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
