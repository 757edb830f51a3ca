//! Waits that never end, with deadlines on: whatever it is that hangs, requests are answered, evidence is saved, and the process ends with
//! its known status (E1, E4, E8). The bounds here are generous, for a loaded machine; `make seeds` prints the times.

use std::path::Path;
use std::time::{Duration, Instant};

use engine::stuck::EXIT_STUCK;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::client::{Answer, get, open, post, whole};
use crate::process::Engine;

const COMPLETIONS: &str = "/v1/completions";
/// The reason of an engine that turns and delivers nothing.
pub const BARREN: &str = "nothing was delivered";
/// Of an engine whose fault is not to be the second reason to end.
pub const TRIES: u32 = 3;

fn body(stream: bool) -> Value {
    json!({"prompt": "abc", "max_tokens": 8000, "ignore_eos": true, "stream": stream})
}

/// A long stream, under way, and another after each that ends well: steps do not cease before the fault. Gives the answer that did not.
pub async fn streaming(engine: &Engine) -> tokio::task::JoinHandle<Answer> {
    let addr = engine.addr;
    let mut response = open(addr, COMPLETIONS, &body(true), &[]).await;
    assert_eq!(response.status(), 200);
    tokio::spawn(async move {
        loop {
            let answer = whole(response).await;
            if !answer.text.ends_with("data: [DONE]\n\n") {
                return answer;
            }
            response = open(addr, COMPLETIONS, &body(true), &[]).await;
        }
    })
}

/// What the engine left beside its page.
pub fn evidence(dir: &Path, pid: u32) -> Value {
    serde_json::from_slice(&std::fs::read(dir.join(format!("stuck-{pid}.json"))).unwrap()).unwrap()
}

/// The engine ends with its known status; its stream ended with an error; gives the evidence and the time from `since`.
pub async fn gives_up(
    engine: &mut Engine,
    stream: tokio::task::JoinHandle<Answer>,
    dir: &Path,
    since: Instant,
) -> Value {
    assert_eq!(engine.ended().await.code(), Some(i32::from(EXIT_STUCK)));
    let took = since.elapsed();
    let answer = stream.await.unwrap();
    // one that had not begun has no events
    let last = if answer.status == 200 { answer.events().pop().unwrap() } else { answer.text.as_str() };
    let last: Value = serde_json::from_str(last).unwrap();
    assert_eq!(last["error"]["code"], "shutdown", "{}", answer.text);
    assert!(took < Duration::from_secs(20), "{took:?}");
    let doc = evidence(dir, engine.child.id());
    println!("{}: gone {} ms after it was asked to hang", doc["text"], took.as_millis());
    doc
}

#[tokio::test(flavor = "multi_thread")]
async fn every_hang_is_given_up_in_time_and_explained() {
    let hangs = [
        ("device-wait", "device-wait"),
        ("step-stall", "loop"),
        ("sleep", "device-wait"),
        ("lock-held", "device-wait"),
        ("livelock", "loop"),
    ];
    for (fault, kind) in hangs {
        let mut tries = 1;
        while !is_explained(&format!("{fault}@sigusr2"), kind).await {
            assert!(tries < TRIES, "{fault}: another reason was first, {TRIES} times");
            tries += 1;
        }
    }
}

/// One engine that hangs like this. False where nothing was delivered for so long before that this was its reason, which a busy machine can do.
async fn is_explained(fault: &str, kind: &str) -> bool {
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("pages");
    let args = ["--fault", fault, "--guards", "on", "--page-dir", pages.to_str().unwrap()];
    let mut engine = Engine::ready(dir.path(), &args).await;
    let stream = streaming(&engine).await;
    engine.signal(Signal::SIGUSR2);
    let doc = gives_up(&mut engine, stream, &pages, Instant::now()).await;
    if kind != "loop" && doc["kind"] == "loop" && doc["text"].as_str().is_some_and(|text| text.contains(BARREN)) {
        return false;
    }
    assert_eq!(doc["kind"], kind, "{fault}: {doc}");
    // the flight recorder has the step that was given up, where the loop lived to tell
    let steps = heartbeat::Reader::open(&pages, 0).steps().unwrap();
    let exceeded = steps.last().unwrap().outcome == heartbeat::page::StepOutcome::DeadlineExceeded;
    assert_eq!(exceeded, kind == "device-wait", "{fault}");
    let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
    let end = log.lines().find(|line| line.contains("so long after its deadline passed"));
    println!("{fault}: {}", end.unwrap_or_else(|| panic!("the log tells how long its end took:\n{log}")));
    true
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exception_fails_its_requests_and_the_engine_gives_up_a_device_it_lost() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::ready(dir.path(), &["--fault", "exception@sigusr2", "--guards", "on"]).await;
    assert_eq!(post(engine.addr, COMPLETIONS, &json!({"prompt": "abc", "max_tokens": 3})).await.status, 200);
    let stream = streaming(&engine).await;
    engine.signal(Signal::SIGUSR2);
    let answer = stream.await.unwrap();
    assert!(answer.text.contains("\"error\""), "{}", answer.text);
    assert_eq!(engine.ended().await.code(), Some(i32::from(EXIT_STUCK)));
}

#[tokio::test(flavor = "multi_thread")]
async fn abort_segfault_and_stop_look_from_outside_as_they_do_in_the_field() {
    for (fault, signal) in [("abort", Signal::SIGABRT), ("segfault", Signal::SIGSEGV)] {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = Engine::ready(dir.path(), &["--fault", &format!("{fault}@sigusr2")]).await;
        engine.signal(Signal::SIGUSR2);
        let status = engine.ended().await;
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(signal as i32), "{fault}");
    }
    let dir = tempfile::tempdir().unwrap();
    let engine = Engine::ready(dir.path(), &["--fault", "sigstop@sigusr2"]).await;
    assert_eq!(get(engine.addr, "/health").await.status, 200);
    engine.signal(Signal::SIGUSR2);
    crate::support::wait_until("it is stopped", || engine.process_state() == 'T').await;
}
