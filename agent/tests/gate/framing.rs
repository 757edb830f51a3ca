//! Where an answer ends, and what of it goes on: whole events, trailers, lengths that contradict, connections that are the only end.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{Control, Gate, SOON, SSE, chunk, engine, post, rest, take};

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
    let stop = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    for (said, completed) in [("data: 1\n\n", 0), ("data: [DONE]\n\n", 1), (stop, 2)] {
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

/// Its status and its head come before the prompt is worked on. A client that goes by names would take a nameless event for none, and the answer for
/// an empty one.
#[tokio::test]
async fn an_answer_whose_events_have_names_breaks_off_by_name_before_the_first_one() {
    for (path, named) in [("/v1/messages", true), ("/v1/responses", true), ("/v1/completions", false)] {
        let (listener, upstream) = engine().await;
        let mut gate = Gate::before(&upstream).await;
        let mut client = gate.send(&post(path, "{}")).await;
        let (mut server, _) = take(&listener).await;
        server.write_all(SSE.as_bytes()).await.unwrap();
        drop(server);
        let heard = rest(&mut client).await;
        let event = heard.split_once("\r\n\r\n").unwrap().1;
        assert_eq!(event.contains("event: error\ndata: {"), named, "{path}: {event}");
        assert_eq!(event.contains("\"type\":\"error\""), named, "{path}: {event}");
        assert!(event.contains("engine_died"), "{path}: {event}");
        let reply = gate.until("its end", |reply| reply.obs.requests_done == 1).await;
        assert_eq!(reply.requests_failed, 1);
    }
}

/// Nothing but the shut gate tells that there was more to come.
#[tokio::test]
async fn a_stream_that_ends_with_its_connection_at_a_shut_gate_after_a_silence_has_broken_off() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    for (said, shut, whole) in
        [("data: 1\n\n", true, false), ("data: 1\n\n", false, true), ("data: 1\n\ndata: [DONE]\n\n", true, true)]
    {
        let (listener, upstream) = engine().await;
        let mut gate = Gate::before(&upstream).await;
        let mut client = gate.send(&post("/v1/completions", "{}")).await;
        let (mut server, _) = take(&listener).await;
        server.write_all(format!("{head}{said}").as_bytes()).await.unwrap();
        gate.until("a token", |reply| reply.obs.chunks_delivered >= 1).await;
        gate.control = Control { fenced: shut, reason: "no progress".into(), ..Control::default() };
        gate.until("told", |reply| reply.shut == shut).await;
        tokio::time::sleep(Duration::from_millis(700)).await;
        drop(server);
        let heard = rest(&mut client).await;
        assert_eq!(heard.contains("engine_died"), !whole, "{heard}");
        let reply = gate.until("its end", |reply| reply.obs.requests_done == 1).await;
        assert_eq!((reply.requests_completed, reply.requests_failed), (whole.into(), (!whole).into()));
    }
}

/// An nginx of usual settings speaks HTTP/1.0 to what is behind it: there the end of the connection is the end of the answer.
#[tokio::test]
async fn a_client_of_http_1_0_is_told_a_half_answer_from_a_whole_one() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n";
    for whole in [true, false] {
        let (listener, upstream) = engine().await;
        let gate = Gate::before(&upstream).await;
        let mut client = gate.send(&post("/api/chat", "{}").replace("HTTP/1.1", "HTTP/1.0")).await;
        let (mut server, _) = take(&listener).await;
        server.write_all(head.as_bytes()).await.unwrap();
        chunk(&mut server, "{\"message\":{}}\n").await;
        if whole {
            server.write_all(b"0\r\n\r\n").await.unwrap();
        }
        drop(server);
        let mut heard = Vec::new();
        let ended = tokio::time::timeout(SOON, client.read_to_end(&mut heard)).await.unwrap();
        let text = String::from_utf8_lossy(&heard);
        assert!(!text.contains("transfer-encoding"), "{text}");
        assert_eq!(ended.is_ok(), whole, "{ended:?}: {text}");
    }
}
