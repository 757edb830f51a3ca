//! Poison requests on real processes (I7): a request that hangs the engine is served twice and never again, and a request that was in
//! flight both times but succeeds whenever it can is served as ever.

use std::io::{ErrorKind, Write};
use std::net::TcpStream;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use agent::launch::EngineFile;

use crate::run::Run;

use super::leaks::{Markers, QUICK, ask, get, launch, post, until};

const DEADLY: &str = r#"{"model":"m","prompt":"a deadly word","user":"ann","stream":true}"#;
/// The same for the engine, from another client.
const DEADLY_AGAIN: &str = r#"{"prompt":"a deadly word", "stream":true, "user":"bob", "model":"m"}"#;

fn request(body: &str) -> String {
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn starts(run: &Run) -> u64 {
    EngineFile::read(&run.dir.path().join("agent")).map_or(0, |file| file.starts)
}

fn ready(run: &Run) -> bool {
    get(&run.agent, "/readyz").starts_with("HTTP/1.1 200")
}

fn serves(run: &Run, markers: &Markers) -> bool {
    ask(&run.gate, &post(markers)).is_some_and(|text| text.contains("[DONE]"))
}

/// Hangs the engine with this request until the agent has replaced it.
fn hang(run: &Run, markers: &Markers, body: &str) {
    until("it serves", || ready(run) && serves(run, markers));
    let (known, before) = (reached(run), starts(run));
    let mut client = sent(run, body);
    until("the engine has it", || {
        // also where the engine has it, its log is late and its gate was shut for it: the one that replaces it counts all the same
        if reached(run) == known && is_refused(client.as_ref()) {
            client = sent(run, body);
        }
        reached(run) > known
    });
    until("another engine", || starts(run) > before && ready(run));
}

fn sent(run: &Run, body: &str) -> Option<TcpStream> {
    let mut client = TcpStream::connect(&run.gate).ok()?;
    client.set_read_timeout(Some(Duration::from_millis(100))).ok()?;
    client.write_all(request(body).as_bytes()).ok()?;
    Some(client)
}

/// A gate that is shut, as on a busy machine it may be for a moment, or not there keeps a request from the engine, which would begin an answer.
fn is_refused(client: Option<&TcpStream>) -> bool {
    let mut begin = [0; 12];
    match client.map(|client| client.peek(&mut begin)) {
        Some(Ok(read)) => read == 0 || !b"HTTP/1.1 200".starts_with(&begin[..read]),
        Some(Err(error)) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
        None => true,
    }
}

/// How many deadly requests the engine has seen.
fn reached(run: &Run) -> usize {
    let log = std::fs::read_to_string(run.dir.path().join("agent/engine.log")).unwrap_or_default();
    log.lines().filter(|line| line.starts_with("Received") && line.contains("deadly")).count()
}

/// Says so when it is dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn i7_a_request_that_stalled_twice_is_refused_and_a_probe_that_was_there_both_times_is_served() {
    let markers = Markers::new();
    let run = launch(&markers, QUICK, "true", Stdio::null);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // in flight at any moment
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let _ = ask(&run.gate, &post(&markers));
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        // a failure here ends the others as well
        let _ends = Ends(&over);
        hang(&run, &markers, DEADLY);
        hang(&run, &markers, DEADLY_AGAIN);
    });
    until("told", || get(&run.agent, "/verdict").contains("\"poison\":[{\"request\":"));
    let answer = ask(&run.gate, &request(DEADLY)).unwrap();
    assert!(answer.starts_with("HTTP/1.1 422") && answer.contains("\"code\":\"poison_request\""), "{answer}");
    assert!(answer.contains("\"type\":\"invalid_request_error\"") && !answer.contains("retry-after"), "{answer}");
    assert!(!answer.contains("deadly"), "{answer}");
    assert_eq!(reached(&run), 2, "the engine never sees it a third time");
    until("the probe is served", || serves(&run, &markers));
    until("counted", || {
        let metrics = get(&run.agent, "/metrics");
        metrics.contains("truebeat_poison_requests 1")
            && metrics.contains("truebeat_gate_requests{end=\"poisonous\"} 1")
    });
    let incidents = get(&run.agent, "/incidents");
    assert!(incidents.contains("\"inFlight\":[{\"request\":") && incidents.contains("completedAt"), "{incidents}");
}
