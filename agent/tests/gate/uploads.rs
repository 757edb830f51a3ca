//! Clients that do not send all of their request: they are told that it is theirs, and nobody takes the engine for hung meanwhile.

use std::time::Duration;

use agent::gate::ledger::{Control, GateReply};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::{Gate, SOON, engine};

/// More than is read to count it: the rest streams through.
const SENT_BYTES: usize = (8 << 20) + 1_000;
/// Longer than any client is waited for.
const LONG: Duration = Duration::from_secs(600);

/// An engine that takes in whatever comes and waits for the end of it.
async fn takes_in(listener: TcpListener) {
    let (mut stream, _) = listener.accept().await.unwrap();
    let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
}

/// A gate, and a client that has sent the most of its request.
async fn uploading(headers: &str, sent: &[u8]) -> (Gate, TcpStream) {
    let (listener, upstream) = engine().await;
    tokio::spawn(takes_in(listener));
    let gate = Gate::before(&upstream).await;
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n\r\n");
    let mut client = gate.send(&head).await;
    client.write_all(sent).await.unwrap();
    (gate, client)
}

async fn all(client: &mut TcpStream) -> String {
    let mut text = Vec::new();
    tokio::time::timeout(LONG, client.read_to_end(&mut text)).await.expect("nobody answers").unwrap();
    String::from_utf8_lossy(&text).into_owned()
}

/// One request ended, by its client.
fn left_by_its_client(reply: &GateReply) -> bool {
    (reply.obs.in_flight, reply.obs.requests_abandoned, reply.requests_failed) == (0, 1, 0)
}

#[tokio::test]
async fn an_upload_that_stalls_is_its_clients_and_is_cut_after_a_minute() {
    let length = format!("content-length: {}", SENT_BYTES + 1);
    let (mut gate, mut client) = uploading(&length, &vec![b'x'; SENT_BYTES]).await;
    let reply = gate.until("the client is waited for", |reply| reply.obs.client_blocked == 1).await;
    assert_eq!((reply.obs.in_flight, reply.obs.awaiting_first_byte), (1, 1));
    // nobody has anything to do: the clock runs to the next deadline
    tokio::time::pause();
    let began = tokio::time::Instant::now();
    let answer = all(&mut client).await;
    let waited = began.elapsed();
    tokio::time::resume();
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("too slowly"), "{answer}");
    assert!((50..70).contains(&waited.as_secs()), "{waited:?}");
    gate.until("the client's end", left_by_its_client).await;
}

#[tokio::test]
async fn an_upload_that_makes_no_sense_is_its_clients_too() {
    let mut sent = format!("{SENT_BYTES:x}\r\n").into_bytes();
    sent.resize(sent.len() + SENT_BYTES, b'x');
    sent.extend(b"\r\nno number\r\n");
    let (mut gate, mut client) = uploading("transfer-encoding: chunked", &sent).await;
    let answer = tokio::time::timeout(SOON, all(&mut client)).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("broke off"), "{answer}");
    gate.until("the client's end", left_by_its_client).await;
}

#[tokio::test]
async fn whoever_is_refused_hears_it_however_much_he_sends() {
    let mut gate = Gate::before("127.0.0.1:1").await;
    gate.control = Control { fenced: true, ..Control::default() };
    gate.until("shut", |reply| reply.shut).await;
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", 4 * SENT_BYTES);
    let mut client = gate.send(&head).await;
    for _ in 0..4 {
        let sent = tokio::time::timeout(SOON, client.write_all(&vec![b'x'; SENT_BYTES])).await;
        sent.expect("nobody reads").expect("the connection is closed before all is sent");
    }
    let answer = tokio::time::timeout(SOON, all(&mut client)).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    let mut waits = gate.send(&head.replace("host: x", "host: x\r\nexpect: 100-continue")).await;
    let answer = tokio::time::timeout(Duration::from_secs(5), all(&mut waits)).await;
    assert!(answer.expect("nothing will come").starts_with("HTTP/1.1 503"));
}

/// Nobody is there to take it: the gate has read no more than it counts.
#[tokio::test]
async fn whoever_sends_to_an_engine_that_is_away_hears_it() {
    let mut gate = Gate::before("127.0.0.1:1").await;
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", 4 * SENT_BYTES);
    let mut client = gate.send(&head).await;
    client.write_all(&vec![b'x'; SENT_BYTES]).await.unwrap();
    gate.until("failed", |reply| reply.requests_failed == 1).await;
    for _ in 0..3 {
        let sent = tokio::time::timeout(SOON, client.write_all(&vec![b'x'; SENT_BYTES])).await;
        sent.expect("nobody reads").expect("the connection is closed before all is sent");
    }
    let answer = tokio::time::timeout(SOON, all(&mut client)).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("engine_absent"), "{answer}");
}

/// The fence comes, and then the pod's end, while the client sends.
#[tokio::test]
async fn whoever_is_refused_in_the_middle_hears_it_too() {
    let mut gate = Gate::before("127.0.0.1:1").await;
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", 4 * SENT_BYTES);
    let mut client = gate.send(&head).await;
    client.write_all(&vec![b'x'; SENT_BYTES / 2]).await.unwrap();
    gate.control = Control { fenced: true, ..Control::default() };
    gate.until("shut", |reply| reply.shut).await;
    client.write_all(&vec![b'x'; SENT_BYTES]).await.unwrap();
    gate.until("refused", |reply| reply.requests_refused == 1).await;
    gate.control = Control { fenced: true, leaving: true, draining: true, ..Control::default() };
    gate.until("shut", |reply| reply.shut).await;
    for _ in 0..5 {
        let sent = tokio::time::timeout(SOON, client.write_all(&vec![b'x'; SENT_BYTES / 2])).await;
        sent.expect("nobody reads").expect("the connection is closed before all is sent");
    }
    let answer = tokio::time::timeout(SOON, all(&mut client)).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
}

#[tokio::test]
async fn an_engine_that_takes_nothing_in_is_not_excused_by_its_client() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    // more than every buffer between the two takes
    let body = vec![b'x'; 32 << 20];
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    let mut client = gate.send(&head).await;
    let sent = tokio::time::timeout(Duration::from_secs(3), client.write_all(&body));
    let (engine, sent) = tokio::join!(tokio::time::timeout(SOON, listener.accept()), sent);
    let _engine = engine.unwrap().unwrap();
    assert!(sent.is_err(), "somebody took all of it");
    let reply = gate.until("owed", |reply| reply.obs.in_flight == 1).await;
    assert_eq!(reply.obs.client_blocked, 0, "the client would send on");
}

/// Its length is known when it is over: what the engine has to get through is more than what was read to count it.
#[tokio::test]
async fn a_long_upload_that_tells_no_length_is_counted_when_it_is_here() {
    const BYTES: usize = 20 << 20;
    let (mut gate, mut client) = uploading("transfer-encoding: chunked", b"").await;
    let piece = [b"100000\r\n", &[b'x'; 1 << 20][..], b"\r\n"].concat();
    for _ in 0..BYTES >> 20 {
        client.write_all(&piece).await.unwrap();
    }
    gate.until("its client is waited for", |reply| reply.obs.client_blocked == 1).await;
    client.write_all(b"0\r\n\r\n").await.unwrap();
    // longer than any text, it is taken for pictures: a token is 512 bytes of them
    gate.until("all of it is owed", |reply| reply.obs.prompt_tokens_owed == BYTES as u64 / 512).await;
}

/// Where the path alone says that it streams: while its client is waited for, the engine could not begin.
#[tokio::test]
async fn an_upload_is_a_stream_when_it_is_here() {
    let (listener, upstream) = engine().await;
    tokio::spawn(takes_in(listener));
    let mut gate = Gate::before(&upstream).await;
    let head = format!("POST /generate_stream HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", SENT_BYTES + 1);
    let mut client = gate.send(&head).await;
    client.write_all(&vec![b'x'; SENT_BYTES]).await.unwrap();
    let reply = gate.until("the client is waited for", |reply| reply.obs.client_blocked == 1).await;
    assert_eq!((reply.obs.awaiting_first_byte, reply.obs.unstreamed), (1, Some(1)));
    client.write_all(b"x").await.unwrap();
    gate.until("it can begin", |reply| (reply.obs.client_blocked, reply.obs.unstreamed) == (0, Some(0))).await;
}
