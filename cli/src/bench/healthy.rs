//! Healthy work of every kind on a loaded machine; the detector must stay silent. Every alarm is a failure.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};

use crate::clients::Clients;
use crate::http::HttpClient;
use crate::stage::{EngineKind, Stage};

/// How long each kind of work lasts before the next takes its turn.
const TURN: Duration = Duration::from_secs(20);

/// Kinds of healthy work, each of which has fooled somebody's health check.
#[derive(Debug, Clone, Copy)]
enum Work {
    Idle,
    Steady,
    Burst,
    LongPrompt,
    Disconnects,
}

const ROUND: [Work; 5] = [Work::Steady, Work::Idle, Work::Burst, Work::LongPrompt, Work::Disconnects];

/// Runs for `minutes`; true when there was no alarm.
pub async fn run(out: &Path, model: &Path, minutes: u64, burners: u16) -> anyhow::Result<bool> {
    let kind = EngineKind::Truebeat { model: model.to_owned(), fault: None };
    let mut stage = Stage::launch(&kind, &out.join("healthy"))?;
    let stop_burning = burn(burners);
    let result = watch(&mut stage, Duration::from_secs(minutes * 60)).await;
    stop_burning.store(true, Ordering::Relaxed);
    let (seen, requests, load) = stage.stop_after(result).await?;
    println!("healthy_minutes {minutes} min -");
    println!("load_average_1m {load} - -");
    println!("requests_completed {requests} count -");
    println!("agent_unanswered {} count -", seen.unanswered);
    println!("alarms {} count 0", seen.alarms);
    Ok(seen.alarms == 0)
}

async fn watch(stage: &mut Stage, length: Duration) -> anyhow::Result<(Seen, u64, String)> {
    stage.wait_ready().await?;
    let begun = Instant::now();
    let (mut seen, mut completed) = (Seen::default(), 0);
    for work in ROUND.into_iter().cycle() {
        if begun.elapsed() >= length {
            break;
        }
        let turn = TURN.min(length.saturating_sub(begun.elapsed()));
        let (done, ()) = tokio::join!(do_work(stage, work, turn), watch_turn(stage, turn, &mut seen));
        completed += done;
        eprintln!("{:>5.0} s  {work:?}: {done} requests, {} alarms so far", begun.elapsed().as_secs_f64(), seen.alarms);
    }
    seen.alarms = seen.alarms.max(stage.incidents().await?.len());
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    Ok((seen, completed, load.split(' ').next().unwrap_or("?").to_owned()))
}

/// What was held against the healthy engine, and how often the agent could not be asked (on a machine so loaded that a probe
/// of two seconds is late, which says nothing of the verdict; the incidents at the end say whether something was missed).
#[derive(Debug, Default)]
struct Seen {
    alarms: usize,
    unanswered: usize,
}

async fn watch_turn(stage: &Stage, turn: Duration, seen: &mut Seen) {
    let begun = Instant::now();
    let mut alarmed = false;
    while begun.elapsed() < turn {
        match stage.verdict().await {
            Ok(verdict) => {
                let calm = matches!(verdict["verdict"].as_str(), Some("Progressing" | "Idle" | "Starting" | "Slow"));
                if !calm && !alarmed {
                    eprintln!("ALARM {verdict}");
                    seen.alarms += 1;
                }
                alarmed = !calm;
            }
            Err(error) => {
                eprintln!("unanswered: {error:#}");
                seen.unanswered += 1;
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn do_work(stage: &Stage, work: Work, turn: Duration) -> u64 {
    match work {
        Work::Idle => {
            tokio::time::sleep(turn).await;
            0
        }
        Work::Steady => crowd(stage, 8, turn).await,
        Work::Burst => crowd(stage, 32, turn).await,
        Work::LongPrompt => long_prompts(stage, turn).await,
        Work::Disconnects => disconnects(stage, turn).await,
    }
}

async fn crowd(stage: &Stage, clients: u16, turn: Duration) -> u64 {
    let clients = Clients::start(&stage.gate, clients);
    tokio::time::sleep(turn.saturating_sub(Duration::from_secs(5))).await;
    clients.stop(Duration::from_secs(5)).await.completed
}

/// One very long prompt after the other, with one short answer each.
pub(super) async fn long_prompts(stage: &Stage, turn: Duration) -> u64 {
    let begun = Instant::now();
    let mut done = 0;
    while begun.elapsed() < turn {
        // of its own from the first token on, so that no cache knows a part of it
        let prompt: Vec<u64> = (0..3500).map(|token| 300 + (done * 31 + token * 7) % 500).collect();
        let body = serde_json::json!({ "model": "demo", "prompt": prompt, "max_tokens": 4, "ignore_eos": true });
        if let Some(response) = post(&stage.http, &stage.gate, body).await {
            done += u64::from(response.status().is_success() && response.into_body().collect().await.is_ok());
        }
    }
    done
}

/// Clients that leave after the first bytes.
async fn disconnects(stage: &Stage, turn: Duration) -> u64 {
    let begun = Instant::now();
    while begun.elapsed() < turn {
        let body = serde_json::json!({
            "model": "demo", "prompt": "a client that leaves", "max_tokens": 400, "ignore_eos": true, "stream": true,
        });
        if let Some(response) = post(&stage.http, &stage.gate, body).await {
            let mut body = response.into_body();
            let _first = tokio::time::timeout(Duration::from_secs(2), body.frame()).await;
        }
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    0
}

async fn post(
    client: &HttpClient,
    gate: &str,
    body: serde_json::Value,
) -> Option<http::Response<hyper::body::Incoming>> {
    let request = http::Request::post(format!("{gate}/v1/completions"))
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))
        .ok()?;
    let answer = tokio::time::timeout(Duration::from_secs(60), client.request(request)).await;
    answer.ok()?.ok()
}

/// Burns CPU on `threads` threads until the returned flag is set.
pub(super) fn burn(threads: u16) -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    for _ in 0..threads {
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                std::hint::black_box((0..10_000_u64).fold(0, |sum, n| sum ^ n.wrapping_mul(0x9E37_79B9)));
            }
        });
    }
    stop
}
