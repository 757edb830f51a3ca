//! Each fault shows on the page and in `/health`, and every request is answered all the same (E4, E6, E8).

use std::{
    net::SocketAddr,
    path::Path,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use engine::cli::EngineError;
use engine::server::TIMEOUT_HEADER;
use engine::stuck::{EXIT_STUCK, StuckKind};
use heartbeat::{Reader, page::Beat, page::Phase};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::client::{Answer, get, metric, open, post, post_once, whole};
use crate::support::{Setup, TestEngine, page_of, wait_until};

const COMPLETIONS: &str = "/v1/completions";
/// A deadline before which any machine has made the steps that lead to the fault.
const AMPLE_MS: &str = "10000";

fn body(stream: bool) -> Value {
    json!({"prompt": "abc", "max_tokens": 1000, "ignore_eos": true, "stream": stream})
}

async fn ask_with_deadline(engine: &TestEngine, stream: bool, ms: &str) -> Answer {
    whole(open(engine.addr, COMPLETIONS, &body(stream), &[(TIMEOUT_HEADER, ms)]).await).await
}

/// Polls `/health` until it is not 200.
async fn unhealthy(engine: &TestEngine) -> Value {
    unhealthy_for(engine, "").await
}

/// Polls `/health` until it is not 200 and its reason has these words: for a moment a busy machine may be another reason.
async fn unhealthy_for(engine: &TestEngine, words: &str) -> Value {
    let since = Instant::now();
    loop {
        let health = get(engine.addr, "/health").await;
        if health.status == 503 && health.json()["reason"].as_str().unwrap_or_default().contains(words) {
            return health.json();
        }
        assert!(since.elapsed() < Duration::from_secs(60), "never {words:?}: {}", health.text);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn page(dir: &Path) -> Beat {
    page_of(Reader::open(dir, 0).with_nonce(77)).beat
}

fn with_page(mut setup: Setup, dir: &Path) -> Setup {
    (setup.core.page_dir, setup.core.nonce) = (Some(dir.to_owned()), 77);
    setup
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_step_is_told_by_page_and_health_and_requests_are_answered() {
    let dir = tempfile::tempdir().unwrap();
    let engine = TestEngine::ready(with_page(Setup::fault("step-stall@5steps"), dir.path())).await;
    assert_eq!(get(engine.addr, "/health").await.status, 200);
    // Its stream has begun when the thread freezes: the error comes as an event, and nothing pretends to be done.
    let streamed = ask_with_deadline(&engine, true, AMPLE_MS).await;
    assert_eq!(streamed.status, 200);
    let last: Value = serde_json::from_str(streamed.events().last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "deadline_exceeded", "{}", streamed.text);
    unhealthy_for(&engine, "a step of decode has lasted").await;
    let beat = page(dir.path());
    assert_eq!((beat.phase, beat.steps_completed, beat.running), (Phase::Decode, 5, 1));
    assert!(beat.step_started_ns > 0);
    // Past the lease new requests do not even wait.
    let refused = post_once(engine.addr, COMPLETIONS, &body(false)).await;
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (503, Some("stalled")));
    assert!(refused.header("retry-after").is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_wait_is_told_too_and_a_request_that_never_began_gets_a_status() {
    let engine = TestEngine::ready(Setup::fault("device-wait@sigusr2")).await;
    assert_eq!(post(engine.addr, COMPLETIONS, &json!({"prompt": "a", "max_tokens": 3})).await.status, 200);
    engine.sigusr2.store(true, Ordering::Relaxed);
    let answer = ask_with_deadline(&engine, true, AMPLE_MS).await;
    assert!([503, 504].contains(&answer.status), "{}", answer.text);
    assert!(answer.header("retry-after").is_some());
    unhealthy_for(&engine, "lease").await;
    // the gauges are those of the step that hangs, not of the one before it
    assert_eq!(metric(engine.addr, "vllm:num_requests_running", &[]).await, 1.0);
}

/// Clients that give up soon, until this is aborted.
fn come_and_go(addr: SocketAddr) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        loop {
            // what it asks for never comes
            drop(timeout(Duration::from_millis(50), post_once(addr, COMPLETIONS, &body(true))).await);
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_livelock_turns_without_delivering_and_is_no_progress() {
    let dir = tempfile::tempdir().unwrap();
    let setup = Setup { step_ms: 1, ..Setup::fault("livelock@3steps") };
    let engine = TestEngine::ready(with_page(setup, dir.path())).await;
    let _hanging = open(engine.addr, COMPLETIONS, &body(true), &[]).await;
    wait_until("it turns in vain", || page(dir.path()).tokens_delivered == 3).await;
    let crowd = come_and_go(engine.addr);
    // those who leave, and those whose deadlines pass, are ended: that is no progress of the engine
    unhealthy_for(&engine, "nothing was delivered to").await;
    crowd.abort();
    wait_until("one is left", || page(dir.path()).running == 1).await;
    let before = page(dir.path());
    assert!(before.requests_finished > 2, "{before:?}");
    wait_until("steps go on", || page(dir.path()).steps_completed > before.steps_completed + 5).await;
    let after = page(dir.path());
    assert_eq!((after.tokens_delivered, after.running), (before.tokens_delivered, 1));
    assert_eq!(after.tokens_delivered, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_of_the_engine_thread_is_told_to_its_requests_and_to_whoever_explains_the_end() {
    let engine = TestEngine::ready(Setup { step_ms: 10, ..Setup::default() }).await;
    let streamed = open(engine.addr, COMPLETIONS, &body(true), &[]).await;
    assert_eq!(streamed.status(), 200);
    let (addr, unanswered) = (engine.addr, body(false));
    let waiting = tokio::spawn(async move { post(addr, COMPLETIONS, &unanswered).await });
    wait_until("two are in", || engine.handle.shared.in_flight() == 2).await;
    engine.knobs.panic.store(true, Ordering::Relaxed);
    let last: Value = serde_json::from_str(whole(streamed).await.events().last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "shutdown", "{last}");
    let refused = waiting.await.unwrap();
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (503, Some("shutdown")));
    assert!(refused.header("retry-after").is_some());
    let shared = engine.handle.shared.clone();
    let stuck = shared.given_up().await;
    assert!(stuck.kind == StuckKind::Panic && stuck.text.contains("as the test wants it"), "{stuck}");
    let ended = engine.ended().await.unwrap_err();
    assert_eq!(EngineError::from(ended).exit_code(), EXIT_STUCK);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_startup_stall_is_told_as_starting_first_and_as_stalled_past_its_lease() {
    let dir = tempfile::tempdir().unwrap();
    let engine = TestEngine::start(with_page(Setup::fault("startup-stall"), dir.path())).await;
    assert_eq!(unhealthy(&engine).await["status"], "starting");
    assert_eq!(post(engine.addr, COMPLETIONS, &body(false)).await.json()["error"]["code"], "starting");
    wait_until("the lease passes", || matches!(engine.handle.shared.health(), engine::beat::Health::Stalled(_))).await;
    assert_eq!(unhealthy(&engine).await["status"], "stalled");
    let beat = page(dir.path());
    assert_eq!((beat.phase, beat.work_done, beat.work_total), (Phase::Load, 100, 100));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_liar_says_200_and_lets_its_clients_wait() {
    let engine = TestEngine::ready(Setup { lie: true, ..Setup::fault("step-stall@5steps") }).await;
    let _hanging = open(engine.addr, COMPLETIONS, &body(true), &[]).await;
    wait_until("it is stalled", || matches!(engine.handle.shared.health(), engine::beat::Health::Stalled(_))).await;
    assert_eq!(get(engine.addr, "/health").await.status, 200);
    let answer = ask_with_deadline(&engine, false, "300").await;
    assert_eq!(answer.status, 504, "accepted, and answered at its deadline: {}", answer.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_engine_beats_and_a_loading_one_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let engine = TestEngine::start(with_page(Setup { hold_load: true, ..Setup::default() }, dir.path())).await;
    assert_eq!(get(engine.addr, "/health").await.json()["status"], "starting");
    assert_eq!(page(dir.path()).phase, Phase::Load);
    engine.knobs.hold_load.store(false, Ordering::Relaxed);
    wait_until("it is idle", || page(dir.path()).phase == Phase::Idle).await;
    let first = page(dir.path()).published_ns;
    wait_until("it beats again", || page(dir.path()).published_ns > first).await;
    assert_eq!(get(engine.addr, "/health").await.status, 200);
}
