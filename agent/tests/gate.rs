//! The gate against a real upstream on loopback: what it counts, what it refuses, what clients see when the engine dies.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed expectation is how a test speaks")]

#[path = "gate/anew.rs"]
mod anew;
#[path = "gate/confined.rs"]
mod confined;
#[path = "gate/ends.rs"]
mod ends;
#[path = "gate/framing.rs"]
mod framing;
#[path = "gate/idle.rs"]
mod idle;
#[path = "gate/own.rs"]
mod own;
#[path = "gate/restart.rs"]
mod restart;
#[path = "gate/unusual.rs"]
mod unusual;
#[path = "gate/uploads.rs"]
mod uploads;

use std::path::{Path, PathBuf};
use std::time::Duration;

use agent::gate::control::{GateClient, Heard};
use agent::gate::counts::renewed;
use agent::gate::ledger::{Control, GateReply};
use agent::gate::{GateConfig, run};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// Bound for anything that should be quick, on a busy machine.
const SOON: Duration = Duration::from_secs(20);

struct Gate {
    address: String,
    client: GateClient,
    control: Control,
    task: JoinHandle<()>,
    _dir: tempfile::TempDir,
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Gate {
    async fn before(upstream: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let control: PathBuf = dir.path().join("gate.sock");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let config = config(upstream, &control);
        let task = tokio::spawn(async move { run(listener, config).await.unwrap() });
        Self { address, client: GateClient::new(control), control: Control::default(), task, _dir: dir }
    }

    /// Exchanges until the reply is as wanted.
    async fn until(&mut self, what: &str, wanted: impl Fn(&GateReply) -> bool) -> GateReply {
        let mut last = None;
        let wait = async {
            loop {
                if let Ok(Heard { reply, .. }) = self.client.exchange(&self.control).await {
                    if wanted(&reply) {
                        return reply;
                    }
                    last = Some(reply);
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        match tokio::time::timeout(SOON, wait).await {
            Ok(reply) => reply,
            Err(_) => panic!("never: {what}; last {last:?}"),
        }
    }

    /// Repeats a question until it is answered: a gate that a busy machine holds up for 50 ms is not waited for.
    async fn answered<T>(&mut self, ask: impl AsyncFn(&mut GateClient) -> std::io::Result<T>) -> T {
        let wait = async {
            loop {
                if let Ok(answer) = ask(&mut self.client).await {
                    return answer;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(SOON, wait).await.expect("the gate never answers")
    }

    async fn send(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }
}

fn config(upstream: &str, control: &Path) -> GateConfig {
    GateConfig::usual(format!("http://{upstream}").parse().unwrap(), control.to_owned())
}

fn post(path: &str, body: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// An engine whose connections the test plays by hand.
async fn engine() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

/// Takes one request; returns the connection and the request's text.
async fn take(listener: &TcpListener) -> (TcpStream, String) {
    let (mut stream, _) = tokio::time::timeout(SOON, listener.accept()).await.unwrap().unwrap();
    let mut text = String::new();
    while !text.contains("\r\n\r\n") || !text.trim_end().ends_with('}') && text.starts_with("POST") {
        let mut buffer = [0; 4096];
        let n = tokio::time::timeout(SOON, stream.read(&mut buffer)).await.unwrap().unwrap();
        assert!(n > 0, "the gate closed before its request was whole: {text}");
        text += &String::from_utf8_lossy(&buffer[..n]);
    }
    (stream, text)
}

async fn rest(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut text)).await.expect("the connection never ended");
    String::from_utf8_lossy(&text).into_owned()
}

const SSE: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

async fn chunk(stream: &mut TcpStream, text: &str) {
    stream.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes()).await.unwrap();
}

#[tokio::test]
async fn a_stream_is_passed_on_and_counted_chunk_by_chunk() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    let mut client = gate.send(&post("/v1/completions", r#"{"prompt":[1,2,3,4,5],"stream":true}"#)).await;
    let (mut server, request) = take(&listener).await;
    assert!(request.contains("\"stream\":true") && !request.to_lowercase().contains("connection: close"), "{request}");
    let owed = gate.until("one request owed", |r| r.obs.in_flight == 1).await;
    assert_eq!((owed.obs.awaiting_first_byte, owed.obs.prompt_tokens_owed, owed.obs.last_delivery_ms), (1, 5, None));
    assert_eq!(owed.obs.unstreamed, Some(0));
    assert!(owed.obs.oldest_in_flight_ms.is_some());
    server.write_all(SSE.as_bytes()).await.unwrap();
    chunk(&mut server, ": a comment is no delivery\n\n").await;
    chunk(&mut server, "data: {\"a\":1}\n\n").await;
    let first = gate.until("a delivery", |r| r.obs.chunks_delivered > 0).await;
    let read = gate.client.counts().expect("the gate lets itself be read");
    assert_eq!(renewed(&read, &first.obs), first.obs, "without a question");
    assert_eq!((first.obs.chunks_delivered, first.obs.awaiting_first_byte, first.obs.in_flight), (1, 0, 1));
    // the client has the chunk before the stream ends
    let mut seen = String::new();
    while !seen.contains("data: {\"a\":1}") {
        let mut buffer = [0; 1024];
        let n = tokio::time::timeout(SOON, client.read(&mut buffer)).await.unwrap().unwrap();
        assert!(n > 0, "{seen}");
        seen += &String::from_utf8_lossy(&buffer[..n]);
    }
    chunk(&mut server, "data: [DONE]\n\n").await;
    server.write_all(b"0\r\n\r\n").await.unwrap();
    assert!(rest(&mut client).await.contains("[DONE]"));
    let done = gate.until("the end", |r| r.obs.requests_done == 1).await;
    assert_eq!((done.requests_completed, done.requests_failed, done.obs.in_flight), (1, 0, 0));
}

#[tokio::test]
async fn a_shut_gate_refuses_work_at_once_lets_streams_go_on_and_health_through() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    let mut streaming = gate.send(&post("/v1/chat/completions", r#"{"messages":[]}"#)).await;
    let (mut server, _) = take(&listener).await;
    gate.control = Control { fenced: true, retry_after_s: 3, reason: "no progress".into(), ..Control::default() };
    gate.until("shut", |r| r.shut).await;
    let refused = rest(&mut gate.send(&post("/v1/completions", "{}")).await).await;
    assert!(
        refused.starts_with("HTTP/1.1 503") && refused.contains("retry-after: 3") && refused.contains("no progress"),
        "{refused}"
    );
    let mut health = gate.send("GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    let (mut second, request) = take(&listener).await;
    assert!(request.starts_with("GET /health"));
    second.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
    assert!(rest(&mut health).await.ends_with("ok"));
    server.write_all(SSE.as_bytes()).await.unwrap();
    chunk(&mut server, "data: late\n\n").await;
    server.write_all(b"0\r\n\r\n").await.unwrap();
    assert!(rest(&mut streaming).await.contains("data: late"));
    let reply = gate.until("both ended", |r| r.obs.requests_done == 1).await;
    let looked = gate.answered(async |client| client.look().await).await.reply;
    assert!(looked.shut && looked.obs == reply.obs, "a look reads the books and leaves the fence: {looked:?}");
    assert_eq!((reply.requests_refused, reply.requests_completed), (1, 1), "GETs are no work");
    gate.control = Control::default();
    gate.until("open", |r| !r.shut).await;
}

#[tokio::test]
async fn a_gate_that_leaves_serves_on_and_asks_each_client_to_close() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    gate.control = Control { leaving: true, ..Control::default() };
    gate.until("told", |_| true).await;
    // the client would keep its connection
    let mut client = gate.send("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}").await;
    let (mut server, _) = take(&listener).await;
    server.write_all(b"HTTP/1.1 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
    let answer = rest(&mut client).await; // to the end of the connection
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("connection: close"), "{answer}");
}

#[tokio::test]
async fn a_gate_that_owed_nothing_calls_once_when_work_comes() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    gate.until("idle", |r| r.obs.in_flight == 0).await;
    assert!(!gate.client.calls(), "nothing has come");
    let first = gate.send(&post("/v1/completions", "{}")).await;
    let (server, _) = take(&listener).await;
    until_called(&mut gate.client).await;
    assert!(!gate.client.calls(), "once");
    gate.until("it is told", |r| r.obs.in_flight == 1).await;
    let second = gate.send(&post("/v1/completions", "{}")).await;
    let (other, _) = take(&listener).await;
    gate.until("two", |r| r.obs.in_flight == 2).await;
    assert!(!gate.client.calls(), "whoever knows of work asks by himself");
    // moved, so that each connection ends and the third request gets one of its own
    for (mut server, mut client) in [(server, first), (other, second)] {
        server.write_all(SSE.as_bytes()).await.unwrap();
        server.write_all(b"0\r\n\r\n").await.unwrap();
        rest(&mut client).await;
    }
    gate.until("idle again", |r| r.obs.in_flight == 0).await;
    let third = gate.send(&post("/v1/completions", "{}")).await;
    let (_server, _) = take(&listener).await;
    until_called(&mut gate.client).await;
    drop(third);
}

async fn until_called(client: &mut GateClient) {
    let called = async {
        while !client.calls() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(SOON, called).await.unwrap();
}

#[tokio::test]
async fn an_engine_that_dies_ends_streams_with_an_error_event_and_others_with_502() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    let mut streaming = gate.send(&post("/v1/completions", "{}")).await;
    let (mut first, _) = take(&listener).await;
    first.write_all(SSE.as_bytes()).await.unwrap();
    chunk(&mut first, "data: half").await;
    gate.until("half", |r| r.obs.chunks_delivered == 1).await;
    drop(first);
    let text = rest(&mut streaming).await;
    let last = text.rsplit("data: ").next().unwrap();
    assert!(!text.contains("half") && last.contains("engine_died") && text.ends_with("0\r\n\r\n"), "{text}");
    let mut plain = gate.send(&post("/v1/completions", "{}")).await;
    drop(take(&listener).await);
    assert!(rest(&mut plain).await.starts_with("HTTP/1.1 502"));
    let mut json = gate.send(&post("/v1/completions", "{}")).await;
    let (mut third, _) = take(&listener).await;
    third
        .write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"half\":")
        .await
        .unwrap();
    drop(third);
    assert!(rest(&mut json).await.starts_with("HTTP/1.1 502"));
    let reply = gate.until("three failures", |r| r.obs.requests_done == 3).await;
    assert_eq!((reply.requests_failed, reply.requests_completed), (3, 0));
    drop(listener);
    let absent = rest(&mut gate.send(&post("/v1/completions", "{}")).await).await;
    assert!(absent.starts_with("HTTP/1.1 503") && absent.contains("retry-after"), "{absent}");
}

#[tokio::test]
async fn requests_that_die_with_an_engine_at_a_shut_gate_are_told_when_to_come_again() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    let mut silent = gate.send(&post("/v1/completions", "{}")).await;
    let (first, _) = take(&listener).await;
    let mut half = gate.send(&post("/v1/completions", "{}")).await;
    let (mut second, _) = take(&listener).await;
    let answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"half\":";
    second.write_all(answer).await.unwrap();
    gate.control = Control { fenced: true, retry_after_s: 3, reason: "no progress".into(), ..Control::default() };
    gate.until("shut", |r| r.shut && r.obs.in_flight == 2).await;
    drop((first, second));
    for client in [&mut silent, &mut half] {
        let told = rest(client).await;
        assert!(told.starts_with("HTTP/1.1 503") && told.contains("retry-after: 3"), "{told}");
        assert!(told.contains("engine_died") && told.contains("no progress"), "{told}");
    }
    let reply = gate.until("both are over", |r| r.obs.requests_done == 2).await;
    assert_eq!((reply.requests_failed, reply.requests_completed), (2, 0));
}

#[tokio::test]
async fn a_client_that_leaves_aborts_the_engines_request() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    let waiting = gate.send(&post("/v1/completions", "{}")).await;
    let (mut before_answer, _) = take(&listener).await;
    drop(waiting);
    assert_eq!(rest(&mut before_answer).await, "", "the engine sees the end");
    let streaming = gate.send(&post("/v1/completions", "{}")).await;
    let (mut server, _) = take(&listener).await;
    server.write_all(SSE.as_bytes()).await.unwrap();
    chunk(&mut server, "data: 1\n\n").await;
    gate.until("first chunk", |r| r.obs.chunks_delivered == 1).await;
    drop(streaming);
    assert_eq!(rest(&mut server).await, "");
    let reply = gate.until("both gone", |r| r.obs.requests_done == 2).await;
    assert_eq!((reply.obs.requests_abandoned, reply.obs.in_flight), (2, 0));
}

#[tokio::test]
async fn a_client_that_does_not_read_is_told_apart_from_a_silent_engine() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    let client = gate.send(&post("/v1/completions", "{}")).await;
    let (mut server, _) = take(&listener).await;
    server.write_all(SSE.as_bytes()).await.unwrap();
    // more than every buffer between engine and client holds
    let flood = tokio::spawn(async move {
        let text = format!("data: {}\n\n", "x".repeat(32 << 10));
        loop {
            let framed = format!("{:x}\r\n{text}\r\n", text.len());
            if server.write_all(framed.as_bytes()).await.is_err() {
                return;
            }
        }
    });
    gate.until("blocked", |r| r.obs.client_blocked == 1).await;
    drop(client);
    gate.until("gone", |r| r.obs.in_flight == 0 && r.obs.client_blocked == 0).await;
    tokio::time::timeout(SOON, flood).await.expect("the engine is let go").unwrap();
}

#[tokio::test]
async fn d04_a_detector_and_a_gate_of_other_versions_understand_each_other() {
    let mut gate = Gate::before("127.0.0.1:1").await;
    gate.until("it is there", |_| true).await;
    let path = gate._dir.path().join("gate.sock");
    let mut line = tokio::io::BufStream::new(tokio::net::UnixStream::connect(path).await.unwrap());
    // an older detector knows less, a newer one more
    for (order, shut) in [
        (r#"{"fenced":true,"retry_after_s":1,"reason":"x","draining":false}"#, true),
        (r#"{"fenced":false,"retry_after_s":1,"reason":"","draining":false,"unheard_of":[{"a":1}]}"#, false),
    ] {
        line.write_all(format!("{order}\n").as_bytes()).await.unwrap();
        line.flush().await.unwrap();
        let mut told = String::new();
        let read = tokio::io::AsyncBufReadExt::read_line(&mut line, &mut told);
        tokio::time::timeout(SOON, read).await.unwrap().unwrap();
        let told: serde_json::Value = serde_json::from_str(&told).unwrap();
        assert_eq!(told["reply"]["shut"], shut, "{order}");
        // an older gate counts less, a newer one more
        let mut reply = told["reply"].clone();
        reply.as_object_mut().unwrap().remove("requests_poisonous");
        reply["unheard_of"] = 1.into();
        assert!(serde_json::from_value::<GateReply>(reply).is_ok());
    }
}
