//! What a request holds in the gate, and for how long: the engines here are played by hand.

use super::*;
use crate::gate::guests::Guests;
use crate::gate::ledger::Control;
use crate::gate::room::BEGINNING_BYTES;
use crate::gate::{CLIENT_BUFFER_BYTES, CLIENT_IDLE, serve_connection};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::net::{TcpListener, TcpStream};

const SOON: Duration = Duration::from_secs(20);
/// One that is read whole, and more than all buffers between gate and engine take.
const BODY_BYTES: usize = 7 << 20;

/// An engine, and a gate before it that waits so long for one that takes nothing.
async fn before_an_engine(takes_nothing_max: Duration) -> (TcpListener, Arc<Proxy>) {
    let engine = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = format!("http://{}", engine.local_addr().unwrap()).parse().unwrap();
    let ledger = Arc::new(Ledger::new(1, Control::default()));
    (engine, Arc::new(Proxy::patient(ledger, &upstream, takes_nothing_max).unwrap()))
}

/// A client that sends this body, and waits.
async fn client(proxy: &Arc<Proxy>, body: &[u8]) -> DuplexStream {
    sends(proxy, body, body.len()).await
}

/// One that has sent this of a body of this length.
async fn sends(proxy: &Arc<Proxy>, body: &[u8], length: usize) -> DuplexStream {
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n");
    let mut client = asks(proxy, &Guests::at_most(9), &head).await;
    client.write_all(body).await.unwrap();
    client
}

/// One of these, who has sent this.
async fn asks(proxy: &Arc<Proxy>, guests: &Arc<Guests>, sent: &str) -> DuplexStream {
    let (mut client, gate) = tokio::io::duplex(CLIENT_BUFFER_BYTES);
    tokio::spawn(serve_connection(gate, Arc::clone(proxy), guests.welcome(), CLIENT_IDLE));
    client.write_all(sent.as_bytes()).await.unwrap();
    client
}

/// The engine's side of the next request, of which it has read the beginning, and how much of it.
async fn begun(engine: &TcpListener) -> (TcpStream, usize) {
    let (mut server, _) = tokio::time::timeout(SOON, engine.accept()).await.unwrap().unwrap();
    let read = tokio::time::timeout(SOON, server.read(&mut [0; 1_024])).await.unwrap().unwrap();
    (server, read)
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let wait = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(SOON, wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}

#[tokio::test]
async fn a_body_holds_its_room_until_the_engine_has_taken_it_or_its_client_leaves() {
    let (engine, proxy) = before_an_engine(TAKES_NOTHING_MAX).await;
    let (mut clients, mut servers) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        clients.push(client(&proxy, &vec![b'x'; BODY_BYTES]).await);
        servers.push(begun(&engine).await);
    }
    let held = || proxy.room.held_bytes();
    assert_eq!(held(), 3 * BODY_BYTES, "all of it waits to be written");
    let (mut reads, _) = servers.remove(0);
    while held() == 3 * BODY_BYTES {
        tokio::time::timeout(SOON, reads.read(&mut vec![0; CLIENT_BUFFER_BYTES])).await.unwrap().unwrap();
    }
    assert_eq!(held(), 2 * BODY_BYTES, "that engine has taken it");
    drop(clients.remove(1));
    until("nobody waits for the second", || held() == BODY_BYTES).await;
    let (mut left, mut rest) = (servers.remove(0).0, Vec::new());
    let ended = tokio::time::timeout(SOON, left.read_to_end(&mut rest)).await;
    assert!(ended.is_ok() && rest.len() < BODY_BYTES, "its connection is held open, or all of it sent");
    assert_eq!((held(), proxy.ledger.reply(0).obs.in_flight), (BODY_BYTES, 2), "two wait");
    // whoever was not left has all of it in the end
    let (mut thaws, mut all) = servers.remove(0);
    while all < BODY_BYTES {
        all += tokio::time::timeout(SOON, thaws.read(&mut vec![0; CLIENT_BUFFER_BYTES])).await.unwrap().unwrap();
    }
    until("all is taken", || held() == 0).await;
}

#[tokio::test]
async fn a_long_body_holds_room_for_what_waits_to_be_written_alone() {
    let (engine, proxy) = before_an_engine(TAKES_NOTHING_MAX).await;
    let _client = sends(&proxy, &vec![b'x'; COUNTED_BYTES_MAX + 1], 9 << 20).await;
    let (mut server, mut taken) = begun(&engine).await;
    assert!(proxy.room.held_bytes() > COUNTED_BYTES_MAX);
    while taken <= COUNTED_BYTES_MAX {
        taken += tokio::time::timeout(SOON, server.read(&mut vec![0; CLIENT_BUFFER_BYTES])).await.unwrap().unwrap();
    }
    until("the engine has it", || proxy.room.held_bytes() == 0).await;
    assert_eq!(proxy.ledger.reply(0).obs.in_flight, 1, "more of it is to come");
}

#[tokio::test]
async fn an_engine_that_takes_nothing_is_given_up_in_the_end() {
    let (engine, proxy) = before_an_engine(Duration::from_secs(1)).await;
    let mut client = client(&proxy, &vec![b'x'; BODY_BYTES]).await;
    let _server = begun(&engine).await;
    let mut answer = [0; 12];
    let told = tokio::time::timeout(SOON, client.read_exact(&mut answer)).await.expect("it is waited for for ever");
    assert!(told.is_ok() && &answer == b"HTTP/1.1 502", "{answer:?}");
    assert_eq!(proxy.room.held_bytes(), 0);
}

/// Work whose body is all there, and work whose body is still to come.
const ASKED: &str = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}";
const BEGUN: &str = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{";

/// What the gate itself says to it, at once.
async fn told(mut client: DuplexStream) -> String {
    let mut text = String::new();
    tokio::time::timeout(SOON, client.read_to_string(&mut text)).await.expect("it is kept waiting").unwrap();
    text
}

#[tokio::test]
async fn where_as_many_are_in_hand_as_may_be_work_is_turned_away_until_one_was_answered_to_its_end() {
    let engine = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = format!("http://{}", engine.local_addr().unwrap()).parse().unwrap();
    let proxy = Proxy::new(Arc::new(Ledger::new(1, Control::default())), &upstream).unwrap();
    let (proxy, guests) = (Arc::new(proxy.with_at_most(2)), Guests::at_most(9));
    let mut waits = asks(&proxy, &guests, ASKED).await;
    let (mut server, _) = begun(&engine).await;
    let uploads = asks(&proxy, &guests, BEGUN).await;
    until("the second is read", || guests.asking() == 2).await;
    let text = told(asks(&proxy, &guests, ASKED).await).await;
    let head = text.to_lowercase();
    assert!(head.starts_with("http/1.1 503") && head.contains("retry-after: 2\r\n"), "{text}");
    assert!(head.contains("connection: close\r\n") && head.contains("\"code\":\"gate_crowded\""), "{text}");
    for mends in
        ["GET /health HTTP/1.1\r\nhost: x\r\n\r\n", "POST /resume HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"]
    {
        let _client = asks(&proxy, &guests, mends).await;
        begun(&engine).await;
    }
    server
        .write_all(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}",
        )
        .await
        .unwrap();
    let mut answer = [0; 12];
    tokio::time::timeout(SOON, waits.read_exact(&mut answer)).await.unwrap().unwrap();
    until("it is answered", || guests.asking() == 1).await;
    let _next = asks(&proxy, &guests, ASKED).await;
    begun(&engine).await;
    assert_eq!(proxy.ledger.reply(0).requests_crowded, 1);
    drop(uploads);
}

#[tokio::test]
async fn a_crowd_that_only_reads_is_bounded_as_well() {
    let (_engine, proxy) = before_an_engine(TAKES_NOTHING_MAX).await;
    let proxy = Arc::new(Arc::into_inner(proxy).unwrap().with_at_most(1));
    let (guests, mut waiting) = (Guests::at_most(999), Vec::new());
    for together in 1..=1 + SPARE {
        waiting.push(asks(&proxy, &guests, "GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n").await);
        until("it is in hand", || guests.asking() == together).await;
    }
    let text = told(asks(&proxy, &guests, "GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n").await).await;
    assert!(text.starts_with("HTTP/1.1 503") && text.contains("gate_crowded"), "{text}");
}

#[tokio::test]
async fn a_short_body_is_read_where_no_room_is_left() {
    let (engine, proxy) = before_an_engine(TAKES_NOTHING_MAX).await;
    let mut full = Share::default();
    while full.grow(&proxy.room, 0, BEGINNING_BYTES) {}
    while full.grow(&proxy.room, BEGINNING_BYTES, 1 << 20) {}
    let long = format!(r#"{{"prompt":"{}","stream":true}}"#, "x".repeat(BEGINNING_BYTES));
    let short = r#"{"prompt":"x","stream":true}"#;
    let mut there = Vec::new();
    for (body, unstreamed) in [(short, 0), (&long, 1)] {
        there.push((client(&proxy, body.as_bytes()).await, begun(&engine).await));
        let told = proxy.ledger.reply(0).obs;
        assert_eq!((told.in_flight, told.unstreamed), (there.len() as u32, Some(unstreamed)), "{}", body.len());
    }
    assert_eq!(proxy.ledger.suspects(0).len(), 1, "it has a print by which it is refused where it is poison");
}

#[test]
fn a_connection_that_no_descriptor_was_left_for_is_told_from_one_that_was_refused() {
    #[derive(Debug, thiserror::Error)]
    #[error("outside")]
    struct Outside(#[source] std::io::Error);
    let failed = |code: Errno| is_exhaustion(&Outside(code.into()));
    assert_eq!(
        [Errno::EMFILE, Errno::ENFILE, Errno::ECONNREFUSED, Errno::ENOMEM].map(failed),
        [true, true, false, false]
    );
}

#[test]
fn connection_headers_and_those_they_name_are_taken_off() {
    let mut headers = HeaderMap::new();
    for (name, value) in [("connection", "close, x-mine"), ("x-mine", "1"), ("te", "trailers"), ("accept", "*/*")] {
        headers.insert(HeaderName::from_static(name), value.parse().unwrap());
    }
    strip_hop_by_hop(&mut headers);
    assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["accept"]);
}
