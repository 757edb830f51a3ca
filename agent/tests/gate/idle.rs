//! Clients that keep their connections, as load balancers do.

use std::time::Duration;

use agent::gate::ledger::Control;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::{Gate, SOON, engine, take};

const ASK: &str = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
const ANSWER: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
/// What Google's load balancers keep a connection for; others keep it for 60 to 90 s.
const LONGEST_KEPT: Duration = Duration::from_secs(600);

/// One more exchange on a connection that is kept.
async fn served(listener: &TcpListener, client: &mut TcpStream) {
    client.write_all(ASK.as_bytes()).await.unwrap();
    let (mut server, _) = take(listener).await;
    server.write_all(ANSWER.as_bytes()).await.unwrap();
    answered(client).await;
}

/// Reads [`ANSWER`] to its end.
async fn answered(client: &mut TcpStream) {
    let mut heard = String::new();
    while !heard.ends_with("ok") {
        let mut buffer = [0; 1024];
        let n = tokio::time::timeout(SOON, client.read(&mut buffer)).await.unwrap().unwrap();
        assert!(n > 0, "it was closed: {heard}");
        heard += &String::from_utf8_lossy(&buffer[..n]);
    }
}

/// The end of the connection, where it comes so soon.
async fn ends_within(client: &mut TcpStream, time: Duration) -> bool {
    // nobody has anything to do: the clock runs to the next deadline
    tokio::time::pause();
    let end = tokio::time::timeout(time, client.read(&mut [0; 16])).await;
    tokio::time::resume();
    matches!(end, Ok(Ok(0) | Err(_)))
}

#[tokio::test]
async fn a_connection_outlives_what_a_load_balancer_keeps_it_for_and_is_not_kept_for_ever() {
    let (listener, upstream) = engine().await;
    let gate = Gate::before(&upstream).await;
    let mut client = TcpStream::connect(&gate.address).await.unwrap();
    assert!(!ends_within(&mut client, LONGEST_KEPT).await, "it was opened beforehand");
    served(&listener, &mut client).await;
    assert!(!ends_within(&mut client, LONGEST_KEPT).await);
    served(&listener, &mut client).await;
    assert!(ends_within(&mut client, 2 * LONGEST_KEPT).await);
    let mut half = gate.send("GET /health HTTP/1.1\r\n").await;
    assert!(ends_within(&mut half, 2 * LONGEST_KEPT).await);
}

/// Some engines close theirs after two seconds, maybe under a request.
#[tokio::test]
async fn a_connection_to_the_engine_is_left_before_any_engine_closes_it() {
    let (listener, upstream) = engine().await;
    let gate = Gate::before(&upstream).await;
    let mut kept = Vec::new();
    for _ in 0..2 {
        let mut client = gate.send(ASK).await;
        let (mut server, _) = take(&listener).await;
        server.write_all(ANSWER.as_bytes()).await.unwrap();
        // from here on the gate keeps the connection idle
        answered(&mut client).await;
        kept.push(server);
        tokio::time::sleep(Duration::from_millis(1_700)).await;
    }
}

#[tokio::test]
async fn a_gate_that_drains_lets_those_go_that_ask_for_nothing() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    let mut idle = TcpStream::connect(&gate.address).await.unwrap();
    served(&listener, &mut idle).await;
    let mut asks = gate.send(ASK).await;
    let (mut server, _) = take(&listener).await;
    gate.control = Control { leaving: true, draining: true, ..Control::default() };
    gate.until("shut", |reply| reply.shut).await;
    assert_eq!(tokio::time::timeout(SOON, idle.read(&mut [0; 16])).await.expect("it is kept").unwrap_or(0), 0);
    server.write_all(ANSWER.as_bytes()).await.unwrap();
    let mut heard = [0; 15];
    tokio::time::timeout(SOON, asks.read_exact(&mut heard)).await.unwrap().unwrap();
    assert_eq!(&heard, b"HTTP/1.1 200 OK");
}

/// All of an answer was taken from the engine, and most of it not by the client: it is owed to nobody any more, and still on its way.
#[tokio::test]
async fn a_gate_that_drains_sends_an_answer_to_its_end() {
    const LENGTH: usize = 7 << 20;
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    let body = r#"{"input": "x"}"#;
    let head = format!("POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let mut client = gate.send(&head).await;
    let (mut server, _) = take(&listener).await;
    let head = format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {LENGTH}\r\n\r\n");
    server.write_all(head.as_bytes()).await.unwrap();
    server.write_all(&vec![b' '; LENGTH]).await.unwrap();
    gate.until("all taken", |reply| reply.requests_completed == 1).await;
    gate.control = Control { leaving: true, draining: true, ..Control::default() };
    gate.until("shut", |reply| reply.shut).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let mut heard = Vec::new();
    tokio::time::timeout(SOON, client.read_to_end(&mut heard)).await.unwrap().unwrap();
    assert!(heard.len() > LENGTH, "{} bytes came", heard.len());
}

/// Its head went out before anybody knew that the gate would leave.
#[tokio::test]
async fn whoever_is_answered_while_the_gate_drains_goes_when_the_answer_ends() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    let mut client = gate.send(ASK).await;
    let (mut server, _) = take(&listener).await;
    server.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no").await.unwrap();
    let mut heard = String::new();
    while !heard.ends_with("\r\n\r\no") {
        let mut buffer = [0; 1024];
        let n = tokio::time::timeout(SOON, client.read(&mut buffer)).await.unwrap().unwrap();
        heard += &String::from_utf8_lossy(&buffer[..n]);
    }
    gate.control = Control { leaving: true, draining: true, ..Control::default() };
    gate.until("shut", |reply| reply.shut).await;
    server.write_all(b"k").await.unwrap();
    let mut rest = String::new();
    tokio::time::timeout(SOON, client.read_to_string(&mut rest)).await.expect("it is kept").unwrap();
    assert_eq!(rest, "k");
}
