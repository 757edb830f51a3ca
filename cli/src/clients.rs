//! Clients of demo and bench: each streams one completion after the other through the gate, and counts what became of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use serde::Serialize;
use tokio::task::JoinSet;

use crate::http::{HttpClient, client};
use crate::sse::Events;

/// A client that hears nothing for so long gives the request up as lost, as a patient person would.
const PATIENCE: Duration = Duration::from_secs(600);
/// The longest that a client obeys a Retry-After: the demo wants to see the replica serve again.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(1);
const TOKENS_PER_REQUEST: u32 = 200;

#[derive(Debug, Default)]
struct Counters {
    completed: AtomicU64,
    refused: AtomicU64,
    lost: AtomicU64,
    tokens: AtomicU64,
    stop: AtomicBool,
}

/// What the clients counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Requests {
    /// Streams that ended as they should.
    pub completed: u64,
    /// Requests that were told at once to come back later (503 with Retry-After).
    pub refused: u64,
    /// Streams that broke, and requests that got no answer.
    pub lost: u64,
    pub tokens: u64,
}

impl Requests {
    /// The sum of two crowds' counts.
    pub fn plus(self, other: Self) -> Self {
        Self {
            completed: self.completed + other.completed,
            refused: self.refused + other.refused,
            lost: self.lost + other.lost,
            tokens: self.tokens + other.tokens,
        }
    }
}

/// A running crowd of clients.
#[derive(Debug)]
pub struct Clients {
    counters: Arc<Counters>,
    tasks: JoinSet<()>,
}

enum Ended {
    Completed,
    Refused(Duration),
    Lost,
}

impl Clients {
    /// Starts `count` clients against the gate at `base` (`http://host:port`).
    pub fn start(base: &str, count: u16) -> Self {
        let counters = Arc::new(Counters::default());
        let client = client();
        let mut tasks = JoinSet::new();
        for number in 0..count {
            let ask = Ask { url: format!("{base}/v1/completions"), number, tokens: TOKENS_PER_REQUEST };
            tasks.spawn(client_loop(client.clone(), ask, Arc::clone(&counters)));
        }
        Self { counters, tasks }
    }

    /// Has each of `count` clients stream one completion of `tokens` tokens, the same ones every time; waits for the last.
    pub async fn round(client: &HttpClient, base: &str, count: u16, tokens: u32) -> Requests {
        let counters = Arc::new(Counters::default());
        let mut tasks = JoinSet::new();
        for number in 0..count {
            let ask = Ask { url: format!("{base}/v1/completions"), number, tokens };
            let (client, counters) = (client.clone(), Arc::clone(&counters));
            tasks.spawn(async move { one_turn(&client, &ask, 1, &counters).await });
        }
        let clients = Self { counters, tasks };
        clients.stop(PATIENCE).await
    }

    /// What has been counted so far.
    pub fn requests(&self) -> Requests {
        let Counters { completed, refused, lost, tokens, stop: _ } = &*self.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Requests { completed: read(completed), refused: read(refused), lost: read(lost), tokens: read(tokens) }
    }

    /// Lets every client finish the request it is in, within `grace`; those that do not are cut and not counted.
    pub async fn stop(mut self, grace: Duration) -> Requests {
        self.counters.stop.store(true, Ordering::Relaxed);
        let all = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(grace, all).await.is_err() {
            self.tasks.abort_all();
        }
        self.requests()
    }
}

/// What one client asks for, again and again.
struct Ask {
    url: String,
    number: u16,
    tokens: u32,
}

async fn client_loop(client: HttpClient, ask: Ask, counters: Arc<Counters>) {
    let mut turn = 0_u64;
    while !counters.stop.load(Ordering::Relaxed) {
        turn += 1;
        one_turn(&client, &ask, turn, &counters).await;
    }
}

async fn one_turn(client: &HttpClient, ask: &Ask, turn: u64, counters: &Counters) {
    match one_request(client, ask, turn, counters).await {
        Ended::Completed => counters.completed.fetch_add(1, Ordering::Relaxed),
        Ended::Refused(pause) => {
            tokio::time::sleep(pause.min(RETRY_AFTER_MAX)).await;
            counters.refused.fetch_add(1, Ordering::Relaxed)
        }
        Ended::Lost => {
            tokio::time::sleep(Duration::from_millis(200)).await;
            counters.lost.fetch_add(1, Ordering::Relaxed)
        }
    };
}

async fn one_request(client: &HttpClient, ask: &Ask, turn: u64, counters: &Counters) -> Ended {
    let Ask { url, number, tokens } = ask;
    let body = serde_json::json!({
        "model": "demo", "prompt": format!("client {number}, turn {turn}: an engine that lies"), "stream": true,
        "max_tokens": tokens, "ignore_eos": true, "temperature": 0.0,
    });
    let request = http::Request::post(url)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())));
    let Ok(request) = request else { return Ended::Lost };
    let Ok(Ok(response)) = tokio::time::timeout(PATIENCE, client.request(request)).await else { return Ended::Lost };
    if matches!(response.status().as_u16(), 429 | 503) {
        let seconds = response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
        return seconds.map_or(Ended::Lost, |seconds| Ended::Refused(Duration::from_secs(seconds)));
    }
    if !response.status().is_success() {
        return Ended::Lost;
    }
    read_stream(response.into_body(), counters).await
}

/// Reads server-sent events to `[DONE]`. An `error` event or an early end is a lost request.
async fn read_stream(mut body: hyper::body::Incoming, counters: &Counters) -> Ended {
    let mut events = Events::default();
    loop {
        let Ok(Some(Ok(frame))) = tokio::time::timeout(PATIENCE, body.frame()).await else { return Ended::Lost };
        events.push(frame.data_ref().map(AsRef::as_ref).unwrap_or_default());
        while let Some(data) = events.next_data() {
            match data.as_str() {
                "[DONE]" => return Ended::Completed,
                data if data.contains("\"error\"") => return Ended::Lost,
                _ => counters.tokens.fetch_add(1, Ordering::Relaxed),
            };
        }
    }
}
