//! Clients that send or read slowly, on sockets of their own: what is refused before it is read, what is let go, what a drain waits for.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::client::{get, metric, metric_becomes, open};
use crate::support::{Setup, TestEngine, wait_until};

const PATIENCE: Duration = Duration::from_secs(60);
const HEARD_OUT: usize = 5 << 20;

/// The head of a request whose body has so many bytes.
fn head(len: usize) -> String {
    head_of("POST /v1/completions", len)
}

fn head_of(what: &str, len: usize) -> String {
    format!("{what} HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\ncontent-length: {len}\r\n\r\n")
}

/// Who goes on sending after the answer is heard out, and not reset: more than the sockets hold.
async fn is_heard_out(stream: &mut TcpStream) {
    stream.write_all(&vec![b' '; HEARD_OUT]).await.unwrap();
}

async fn connect(addr: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    // a reader that does not read is soon noticed
    socket.set_recv_buffer_size(65_536).unwrap();
    socket.connect(addr).await.unwrap()
}

/// What the server says until its answer's head is there.
async fn status(stream: &mut TcpStream) -> String {
    let mut said = Vec::new();
    while !said.windows(2).any(|two| two == b"\r\n") {
        let read =
            tokio::time::timeout(PATIENCE, stream.read_buf(&mut said)).await.expect("an answer in time").unwrap();
        assert!(read > 0, "it was closed after {:?}", String::from_utf8_lossy(&said));
    }
    String::from_utf8(said[9..12].to_vec()).unwrap()
}

fn long() -> Value {
    json!({"prompt": "long", "max_tokens": 1500, "temperature": 0, "ignore_eos": true, "stream": true})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_engine_says_so_before_a_body_is_read() {
    let mut setup = Setup { step_ms: 5, ..Setup::default() };
    (setup.core.num_seqs_max, setup.core.queue_max) = (1, 0);
    let engine = TestEngine::ready(setup).await;
    let _first = open(engine.addr, "/v1/completions", &long(), &[]).await;
    let mut second = connect(engine.addr).await;
    second.write_all(head(20 << 20).as_bytes()).await.unwrap();
    assert_eq!(status(&mut second).await, "429");
    assert!(metric(engine.addr, "truebeat:requests_refused_total", &["\"queue_full\""]).await >= 1.0);
    is_heard_out(&mut second).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_asks_for_what_is_not_here_hears_so_before_all_is_sent() {
    let engine = TestEngine::ready(Setup::default()).await;
    for (what, told) in [("POST /v2", "404"), ("PUT /v1/completions", "405"), ("POST /health", "405")] {
        let mut stream = connect(engine.addr).await;
        stream.write_all(head_of(what, 20 << 20).as_bytes()).await.unwrap();
        assert_eq!(status(&mut stream).await, told, "{what}");
        is_heard_out(&mut stream).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_does_not_come_is_not_waited_for() {
    let client_patience = Duration::from_millis(200);
    let engine = TestEngine::ready(Setup { client_patience, ..Setup::default() }).await;
    let (mut stream, began) = (connect(engine.addr).await, std::time::Instant::now());
    stream.write_all((head(20 << 20) + "{\"prompt\":").as_bytes()).await.unwrap();
    assert_eq!(status(&mut stream).await, "408");
    assert!(began.elapsed() < PATIENCE / 2, "long before its deadline");
    is_heard_out(&mut stream).await;
    assert_eq!(metric(engine.addr, "truebeat:requests_refused_total", &["\"slow\""]).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_takes_nothing_of_its_answer_is_let_go_and_its_request_cancelled() {
    let client_patience = Duration::from_millis(200);
    let engine = TestEngine::ready(Setup { client_patience, step_ms: 5, ..Setup::default() }).await;
    let mut body = long();
    // more than the sockets hold, long before the outputs end
    (body["n"], body["logprobs"]) = (8.into(), 20.into());
    let body = body.to_string();
    let mut stream = connect(engine.addr).await;
    stream.write_all((head(body.len()) + &body).as_bytes()).await.unwrap();
    metric_becomes(engine.addr, "truebeat:requests_ended_total", &["\"abort\""], 8.0).await;
    metric_becomes(engine.addr, "truebeat:requests_in_flight", &[], 0.0).await;
    drop(stream);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_waits_for_a_body_that_is_coming_and_for_an_answer_that_is_leaving() {
    let mut engine = TestEngine::ready(Setup::default()).await;
    let (begun, rest) = ("{\"prompt\": \"a\", ", "\"max_tokens\": 3}");
    let mut coming = connect(engine.addr).await;
    coming.write_all((head(begun.len() + rest.len()) + begun).as_bytes()).await.unwrap();
    let mut leaving = connect(engine.addr).await;
    let mut body = long();
    (body["n"], body["logprobs"]) = (8.into(), 20.into());
    let body = body.to_string();
    leaving.write_all((head(body.len()) + &body).as_bytes()).await.unwrap();
    // the engine is done with it, the client has hardly begun to read
    metric_becomes(engine.addr, "truebeat:requests_ended_total", &["\"length\""], 8.0).await;
    engine.terminate();
    let shared = engine.handle.shared.clone();
    wait_until("it drains", || shared.draining.load(Ordering::Relaxed)).await;
    let since = Instant::now();
    while since.elapsed() < Duration::from_millis(300) {
        assert_eq!(get(engine.addr, "/health").await.json()["status"], "draining", "it goes on");
    }
    coming.write_all(rest.as_bytes()).await.unwrap();
    assert_eq!(status(&mut coming).await, "200");
    let mut said = Vec::new();
    let read = tokio::time::timeout(PATIENCE, leaving.read_to_end(&mut said)).await;
    read.expect("an end in time").unwrap();
    assert!(String::from_utf8_lossy(&said).contains("data: [DONE]"), "all of it, {} bytes", said.len());
    assert!(engine.ended().await.is_ok());
}
