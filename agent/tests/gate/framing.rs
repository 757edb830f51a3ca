//! Where an answer ends, and what of it goes on: whole events, trailers, lengths that contradict, connections that are the only end.

use tokio::io::AsyncWriteExt;

use super::{Gate, SSE, chunk, engine, post, rest, take};

/// A gate that has passed on this answer of an engine that is gone then, and what its client heard.
async fn after(answer: &str) -> (Gate, String) {
    let (listener, upstream) = engine().await;
    let gate = Gate::before(&upstream).await;
    let mut client = gate.send(&post("/v1/completions", "{}")).await;
    let (mut server, _) = take(&listener).await;
    server.write_all(answer.as_bytes()).await.unwrap();
    drop(server);
    let heard = rest(&mut client).await;
    (gate, heard)
}

#[tokio::test]
async fn a_stream_goes_on_in_whole_events_and_to_its_end_where_it_ends_well() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    let mut client = gate.send(&post("/v1/completions", "{}")).await;
    let (mut server, _) = take(&listener).await;
    server.write_all(SSE.replace("\r\n\r\n", "\r\ntrailer: x-took\r\n\r\n").as_bytes()).await.unwrap();
    for piece in ["data: {\"a\"", ":1}\n", "\ndata: [DO", "NE]"] {
        chunk(&mut server, piece).await;
    }
    server.write_all(b"0\r\nx-took: 1\r\n\r\n").await.unwrap();
    let heard = rest(&mut client).await;
    let (_, body) = heard.split_once("\r\n\r\n").unwrap();
    assert_eq!(body, "F\r\ndata: {\"a\":1}\n\n\r\nC\r\ndata: [DONE]\r\n0\r\n\r\n", "{heard}");
    let reply = gate.until("its end", |reply| reply.obs.requests_done == 1).await;
    assert_eq!((reply.requests_completed, reply.obs.requests_abandoned), (1, 0), "whoever takes trailers asks no more");
}

#[tokio::test]
async fn a_stream_that_ends_with_its_connection_in_half_an_event_has_broken_off() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    for (said, whole) in [("data: 1\n\ndata: {\"ha", false), ("data: 1\n\n", true), ("data: 1\n\ndata: [DONE]\n", true)]
    {
        let (mut gate, heard) = after(&format!("{head}{said}")).await;
        assert!(heard.contains("data: 1\n\n") && !heard.contains("ha"), "{heard}");
        assert_eq!(heard.contains("engine_died"), !whole, "{heard}");
        assert_eq!(heard.contains("[DONE]"), said.contains("[DONE]"), "{heard}");
        let reply = gate.until("its end", |reply| reply.obs.requests_done == 1).await;
        assert_eq!((reply.requests_completed, reply.requests_failed), (whole.into(), (!whole).into()));
    }
}

#[tokio::test]
async fn of_two_lengths_the_one_that_the_engine_meant_holds() {
    let both = "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n\
                5\r\nwhole\r\n0\r\n\r\n";
    let (_gate, heard) = after(both).await;
    assert!(heard.contains("whole") && !heard.to_lowercase().contains("content-length"), "{heard}");
}

#[tokio::test]
async fn an_engine_that_speaks_an_older_http_is_answered_for_in_this_one() {
    let (_gate, heard) = after("HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nall of it").await;
    let framed = heard.to_lowercase().contains("transfer-encoding: chunked");
    assert!(heard.starts_with("HTTP/1.1 200") && framed && heard.contains("all of it"), "{heard}");
}

#[tokio::test]
async fn a_client_that_goes_when_it_has_heard_the_last_event_was_answered() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    for (said, completed) in [("data: 1\n\n", 0), ("data: [DONE]\n\n", 1)] {
        let client = gate.send(&post("/v1/completions", "{}")).await;
        let (mut server, _) = take(&listener).await;
        server.write_all(SSE.as_bytes()).await.unwrap();
        chunk(&mut server, said).await;
        let mut heard = String::new();
        while !heard.contains(said) {
            client.readable().await.unwrap();
            let mut buffer = [0; 1024];
            let read = client.try_read(&mut buffer).unwrap_or(0);
            heard += &String::from_utf8_lossy(&buffer[..read]);
        }
        drop(client);
        let reply = gate.until("its end", |reply| reply.obs.in_flight == 0).await;
        assert_eq!((reply.requests_completed, reply.obs.requests_abandoned), (completed, 1));
    }
}
