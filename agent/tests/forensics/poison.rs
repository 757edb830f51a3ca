//! Poison requests on real processes (I7): a request that hangs the engine is served twice and never again, and a request that was in
//! flight both times but succeeds whenever it can is served as ever.

use std::io::Write;
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
    let before = starts(run);
    let mut client = TcpStream::connect(&run.gate).unwrap();
    client.write_all(request(body).as_bytes()).unwrap();
    until("another engine", || starts(run) > before && ready(run));
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
        hang(&run, &markers, DEADLY);
        hang(&run, &markers, DEADLY_AGAIN);
        over.store(true, Ordering::Relaxed);
    });
    until("told", || get(&run.agent, "/verdict").contains("\"poison\":[{\"request\":"));
    let answer = ask(&run.gate, &request(DEADLY)).unwrap();
    assert!(answer.starts_with("HTTP/1.1 422") && answer.contains("\"code\":\"poison_request\""), "{answer}");
    assert!(answer.contains("\"type\":\"invalid_request_error\"") && !answer.contains("retry-after"), "{answer}");
    assert!(!answer.contains("deadly"), "{answer}");
    let log = std::fs::read_to_string(run.dir.path().join("agent/engine.log")).unwrap();
    let reached = log.lines().filter(|line| line.starts_with("Received") && line.contains("deadly")).count();
    assert_eq!(reached, 2, "the engine never sees it a third time");
    until("the probe is served", || serves(&run, &markers));
    until("counted", || {
        let metrics = get(&run.agent, "/metrics");
        metrics.contains("truebeat_poison_requests 1")
            && metrics.contains("truebeat_gate_requests{end=\"poisonous\"} 1")
    });
    let incidents = get(&run.agent, "/incidents");
    assert!(incidents.contains("\"inFlight\":[{\"request\":") && incidents.contains("completedAt"), "{incidents}");
}
