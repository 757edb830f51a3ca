//! Worker ranks as processes: they serve what one process serves, each has its page, a rank that dies, stops or drifts ends the engine in
//! time and by name, and no rank outlives its engine (E3, S1, S3).

use std::path::Path;
use std::time::Instant;

use engine::stuck::EXIT_STUCK;
use heartbeat::Reader;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::client::post;
use crate::guards::{evidence, gives_up, streaming};
use crate::process::Engine;
use crate::support::{page_of, wait_until};

async fn engine(dir: &Path, more: &[&str]) -> Engine {
    let pages = dir.join("pages");
    let args = ["--page-dir", pages.to_str().unwrap(), "--nonce", "7", "--tensor-parallel", "2"];
    Engine::ready(dir, &[&args, more].concat()).await
}

fn pid_of(dir: &Path, rank: u32) -> Pid {
    let page = page_of(Reader::open(&dir.join("pages"), rank).with_nonce(7));
    assert_eq!((page.identity.rank, page.identity.world_size), (rank, 2));
    Pid::from_raw(page.identity.pid as i32)
}

/// Ended, or waiting to be reaped by whoever took it over.
fn is_gone(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.map_or(true, |stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z')))
}

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_say_what_one_says_and_end_together() {
    let dir = tempfile::tempdir().unwrap();
    let ask = json!({"prompt": "once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": true});
    let alone = Engine::ready(dir.path(), &[]).await;
    let want = post(alone.addr, "/v1/completions", &ask).await.json()["choices"][0]["text"].clone();
    drop(alone);
    let mut engine = engine(dir.path(), &[]).await;
    assert_eq!(post(engine.addr, "/v1/completions", &ask).await.json()["choices"][0]["text"], want);
    let worker = pid_of(dir.path(), 1);
    assert_eq!(pid_of(dir.path(), 0).as_raw() as u32, engine.child.id());
    let beat = |rank| page_of(Reader::open(&dir.path().join("pages"), rank)).beat;
    wait_until("the worker's page counts as the first rank's", || {
        let (first, worker) = (beat(0), beat(1));
        worker.steps_completed == first.steps_completed && worker.tokens_delivered > 0
    })
    .await;
    engine.signal(Signal::SIGTERM);
    assert_eq!(engine.ended().await.code(), Some(0));
    assert!(is_gone(worker), "no rank outlives its engine");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_dies_or_stops_ends_the_engine_by_name() {
    for (signal, kind) in [(Signal::SIGKILL, "rank-gone"), (Signal::SIGSTOP, "rank-silent")] {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = engine(dir.path(), &[]).await;
        let stream = streaming(&engine).await;
        let worker = pid_of(dir.path(), 1);
        let since = Instant::now();
        kill(worker, signal).unwrap();
        let doc = gives_up(&mut engine, stream, &dir.path().join("pages"), since).await;
        assert_eq!((doc["kind"].as_str(), &doc["ranks"]), (Some(kind), &json!([1])), "{doc}");
        assert!(is_gone(worker));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_would_launch_another_step_is_an_error_that_names_both() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = engine(dir.path(), &["--fault", "plan-drift:1@sigusr2", "--guards", "on"]).await;
    let stream = streaming(&engine).await;
    engine.signal(Signal::SIGUSR2);
    let doc = gives_up(&mut engine, stream, &dir.path().join("pages"), Instant::now()).await;
    assert!(doc["text"].as_str().unwrap().contains("nothing was launched (E3)"), "{doc}");
}

/// In the midst of its part of a step: its device that never says that it is done, its thread that sleeps or wants a lock.
#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_hangs_in_its_part_ends_the_engine_by_name() {
    for fault in ["device-wait:1@sigusr2", "sleep:1@sigusr2", "lock-held:1@sigusr2"] {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = engine(dir.path(), &["--fault", fault, "--guards", "on"]).await;
        let stream = streaming(&engine).await;
        let worker = pid_of(dir.path(), 1);
        let since = Instant::now();
        engine.signal(Signal::SIGUSR2);
        let doc = gives_up(&mut engine, stream, &dir.path().join("pages"), since).await;
        assert_eq!((doc["kind"].as_str(), &doc["ranks"]), (Some("rank-silent"), &json!([1])), "{fault}: {doc}");
        assert!(is_gone(worker));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fault_of_a_rank_that_is_not_there_is_refused_before_anything_is_loaded() {
    for fault in ["sigstop:1@1steps", "rank-hang"] {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = Engine::launched(dir.path(), &["--fault", fault]);
        assert_eq!(engine.ended().await.code(), Some(1));
        let said = std::fs::read_to_string(dir.path().join("log")).unwrap();
        assert!(
            said.contains("--fault strikes rank 1") && said.contains("there is none after rank 0"),
            "{fault}: {said}"
        );
        assert!(!said.contains("listening"), "{fault}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_die_with_an_engine_that_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = engine(dir.path(), &[]).await;
    let worker = pid_of(dir.path(), 1);
    engine.signal(Signal::SIGKILL);
    engine.ended().await;
    wait_until("the worker is gone", || is_gone(worker)).await;
}

/// Signals rank 1 as soon as it has a page that is not `before`'s; its process.
async fn strike_while_it_loads(dir: &Path, signal: Signal, before: Option<Pid>) -> Pid {
    let mut found = None;
    wait_until("rank 1 has a page", || {
        let page = Reader::open(&dir.join("pages"), 1).with_nonce(7).read().ok();
        found = page.map(|page| Pid::from_raw(page.identity.pid as i32)).filter(|pid| Some(*pid) != before);
        found.is_some()
    })
    .await;
    kill(found.unwrap(), signal).unwrap();
    found.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_dies_or_stops_while_it_loads_ends_the_start_by_name_and_nobody_waits_for_it() {
    for (signal, kind) in [(Signal::SIGKILL, "rank-gone"), (Signal::SIGSTOP, "rank-silent")] {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("pages");
        let (fault, page_dir) = ("startup-stall:1", pages.to_str().unwrap());
        let args =
            ["--nonce", "7", "--page-dir", page_dir, "--tensor-parallel", "2", "--fault", fault, "--guards", "on"];
        let mut engine = Engine::launched(dir.path(), &args);
        let mut worker = strike_while_it_loads(dir.path(), signal, None).await;
        // one that a signal ends is started again, twice
        for _ in 0..if signal == Signal::SIGKILL { 2 } else { 0 } {
            worker = strike_while_it_loads(dir.path(), signal, Some(worker)).await;
        }
        assert_eq!(engine.ended().await.code(), Some(i32::from(EXIT_STUCK)), "{signal}");
        let doc = evidence(&pages, engine.child.id());
        assert_eq!((doc["kind"].as_str(), &doc["ranks"]), (Some(kind), &json!([1])), "{doc}");
        assert!(is_gone(worker));
    }
}
