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
/// A step that hangs is given up within a second, and one that turns in vain within three; the process ends with it.
const ENDS_MAX: Duration = Duration::from_secs(10);
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

/// How an engine gave up.
pub struct GaveUp {
    /// What it left beside its page.
    pub doc: Value,
    /// When its stream ended with an error, after the fault.
    pub told: Duration,
}

/// As [`gives_up_when`]; the evidence alone.
pub async fn gives_up(
    engine: &mut Engine,
    stream: tokio::task::JoinHandle<Answer>,
    dir: &Path,
    since: Instant,
) -> Value {
    gives_up_when(engine, stream, dir, since).await.doc
}

/// The engine ends with its known status, and in time; its stream ended with an error. Times are from `since`.
pub async fn gives_up_when(
    engine: &mut Engine,
    stream: tokio::task::JoinHandle<Answer>,
    dir: &Path,
    since: Instant,
) -> GaveUp {
    let pid = engine.child.id();
    let stream = async { (stream.await.unwrap(), since.elapsed()) };
    let ((answer, told), took) = tokio::join!(stream, ends_stuck(engine, since));
    // one that had not begun has no events
    let last = if answer.status == 200 { answer.events().pop().unwrap() } else { answer.text.as_str() };
    let last: Value = serde_json::from_str(last).unwrap();
    assert_eq!(last["error"]["code"], "shutdown", "{}", answer.text);
    let doc = evidence(dir, pid);
    println!("{}: told {} ms after it was asked to hang, gone {} ms", doc["text"], told.as_millis(), took.as_millis());
    GaveUp { doc, told }
}

/// The process ends with the status of a wait that was given up, in time; how long after `since`.
async fn ends_stuck(engine: &mut Engine, since: Instant) -> Duration {
    let (status, took) = (engine.ended().await, since.elapsed());
    assert_eq!(status.code(), Some(i32::from(EXIT_STUCK)));
    assert!(took < ENDS_MAX, "{took:?}");
    took
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
    let since = Instant::now();
    engine.signal(Signal::SIGUSR2);
    let answer = stream.await.unwrap();
    assert!(answer.text.contains("\"error\""), "{}", answer.text);
    ends_stuck(&mut engine, since).await;
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
