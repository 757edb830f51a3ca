//! Requests and answers that are rare and right.

use agent::gate::ledger::Control;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{Gate, SOON, SSE, chunk, engine, post, rest, take};

/// One exchange: what the engine was asked, and what its client got for this answer.
async fn exchange(request: &str, answer: &str) -> (String, String) {
    let (listener, upstream) = engine().await;
    let gate = Gate::before(&upstream).await;
    let mut client = gate.send(request).await;
    let (mut server, asked) = take(&listener).await;
    server.write_all(answer.as_bytes()).await.unwrap();
    (asked, rest(&mut client).await)
}

#[tokio::test]
async fn the_head_alone_is_asked_for_and_tells_the_length() {
    let ask = "HEAD /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    let (asked, answer) = exchange(ask, "HTTP/1.1 200 OK\r\ncontent-length: 1234\r\n\r\n").await;
    assert!(asked.starts_with("HEAD /v1/models HTTP/1.1\r\n"), "{asked}");
    assert!(answer.contains("content-length: 1234\r\n") && answer.ends_with("\r\n\r\n"), "{answer}");
}

#[tokio::test]
async fn a_request_as_to_a_proxy_is_one_to_the_engine() {
    let ask = "GET http://models.example/v1/models?a=b HTTP/1.1\r\nhost: models.example\r\nconnection: close\r\n\r\n";
    let (asked, answer) = exchange(ask, "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    assert!(asked.starts_with("GET /v1/models?a=b HTTP/1.1\r\n"), "{asked}");
    assert!(answer.ends_with("ok"), "{answer}");
}

#[tokio::test]
async fn an_old_client_gets_a_stream_that_ends_with_its_connection() {
    let ask = "POST /v1/completions HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}";
    let chunked = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n\
                   9\r\ndata: 1\n\n\r\n0\r\n\r\n";
    let (asked, answer) = exchange(ask, chunked).await;
    assert!(asked.contains("HTTP/1.1\r\n") && asked.to_lowercase().contains("host: "), "{asked}");
    assert!(answer.starts_with("HTTP/1.0 200") && answer.ends_with("\r\n\r\ndata: 1\n\n"), "{answer}");
}

#[tokio::test]
async fn a_client_that_asks_before_it_sends_is_told_to_go_on() {
    let (listener, upstream) = engine().await;
    let gate = Gate::before(&upstream).await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nexpect: 100-continue\r\n";
    let mut client = gate.send(&format!("{head}content-length: 2\r\n\r\n")).await;
    let mut told = [0; 25];
    tokio::time::timeout(SOON, client.read_exact(&mut told)).await.expect("it waits for a word").unwrap();
    assert_eq!(std::str::from_utf8(&told).unwrap(), "HTTP/1.1 100 Continue\r\n\r\n");
    client.write_all(b"{}").await.unwrap();
    let (mut server, asked) = take(&listener).await;
    assert!(asked.ends_with("{}") && !asked.to_lowercase().contains("expect"), "{asked}");
    server.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
    assert!(rest(&mut client).await.ends_with("ok"));
}

#[tokio::test]
async fn an_engine_that_answers_before_it_has_read_all_is_heard() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    // more than is read before the engine is asked, and than any buffer between the two takes
    let body = vec![b'x'; 32 << 20];
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    let (mut read, mut write) = gate.send(&head).await.into_split();
    let sending = tokio::spawn(async move { write.write_all(&body).await });
    let (mut server, _) = tokio::time::timeout(SOON, listener.accept()).await.unwrap().unwrap();
    let mut first = [0; 4096];
    assert!(server.read(&mut first).await.unwrap() > 0);
    let answer = b"HTTP/1.1 413 Payload Too Large\r\nconnection: close\r\ncontent-length: 3\r\n\r\nbig";
    server.write_all(answer).await.unwrap();
    let mut told = [0; 12];
    tokio::time::timeout(SOON, read.read_exact(&mut told)).await.expect("nobody answers").unwrap();
    assert_eq!(std::str::from_utf8(&told).unwrap(), "HTTP/1.1 413");
    drop(server);
    // who sends all of it before it reads would hear nothing on a connection that is reset
    tokio::time::timeout(SOON, sending).await.expect("it is never let go").unwrap().expect("it is reset");
    gate.until("its end", |reply| (reply.obs.in_flight, reply.obs.requests_done) == (0, 1)).await;
}

/// Anthropic's clients, and those of the Responses API, tell events apart by their names.
#[tokio::test]
async fn a_stream_of_named_events_that_breaks_off_ends_with_one_of_that_name() {
    let named = "event: message_start\ndata: {}\n\n";
    for (path, sent, name) in [
        ("/v1/messages", named, "event: error\n"),
        ("/v1/x/completions", named, "event: error\n"),
        ("/v1/completions", "data: {}\n\n", ""),
    ] {
        let (listener, upstream) = engine().await;
        let gate = Gate::before(&upstream).await;
        let mut client = gate.send(&post(path, "{}")).await;
        let (mut server, _) = take(&listener).await;
        server.write_all(SSE.as_bytes()).await.unwrap();
        chunk(&mut server, sent).await;
        drop(server);
        let heard = rest(&mut client).await;
        let error = format!("\n\n{name}data: ");
        let (before, error) = heard.rsplit_once(&error).expect(&heard);
        let error: serde_json::Value = serde_json::from_str(error.split('\n').next().unwrap()).unwrap();
        assert!(before.contains(sent.trim_end()), "{heard}");
        assert_eq!(error["error"]["code"], "engine_died");
        assert_eq!(error["type"].as_str(), (!name.is_empty()).then_some("error"));
    }
}

#[tokio::test]
async fn what_is_packed_is_not_asked_for_and_where_it_comes_nothing_is_written_into_it() {
    let (listener, upstream) = engine().await;
    let gate = Gate::before(&upstream).await;
    let ask = post("/v1/completions", "{}").replace("host: x", "host: x\r\naccept-encoding: gzip, br");
    let mut client = gate.send(&ask).await;
    let (mut server, asked) = take(&listener).await;
    assert!(!asked.to_lowercase().contains("accept-encoding"), "{asked}");
    let head = SSE.replace("\r\n\r\n", "\r\ncontent-encoding: gzip\r\n\r\n");
    server.write_all(head.as_bytes()).await.unwrap();
    chunk(&mut server, "packed").await;
    drop(server);
    let heard = rest(&mut client).await;
    assert!(heard.ends_with("packed\r\n"), "its client must see that it broke off: {heard}");
}

#[tokio::test]
async fn a_body_in_a_coding_of_the_connection_is_refused_and_one_in_its_own_passes() {
    let (_listener, upstream) = engine().await;
    let gate = Gate::before(&upstream).await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n";
    let ask = format!("{head}transfer-encoding: gzip, chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n");
    let refused = rest(&mut gate.send(&ask).await).await;
    assert!(refused.starts_with("HTTP/1.1 501") && refused.contains("chunked"), "{refused}");
    assert!(refused.contains("\"invalid_request_error\""), "{refused}");
    let ask = format!("{head}content-encoding: gzip\r\ncontent-length: 2\r\n\r\n{{}}");
    let (asked, answer) = exchange(&ask, "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    assert!(asked.to_lowercase().contains("content-encoding: gzip"), "{asked}");
    assert!(answer.ends_with("ok"), "{answer}");
}

#[tokio::test]
async fn the_body_of_a_request_that_reads_is_passed_on_however_long_it_is() {
    let head = "GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n";
    for (framing, body) in [("content-length: 2", "{}"), ("transfer-encoding: chunked", "2\r\n{}\r\n0\r\n\r\n")] {
        let (listener, upstream) = engine().await;
        let gate = Gate::before(&upstream).await;
        let _client = gate.send(&format!("{head}{framing}\r\n\r\n{body}")).await;
        let (mut server, mut asked) = take(&listener).await;
        let end = format!("\r\n\r\n{body}");
        while !asked.ends_with(&end) {
            let mut more = [0; 1 << 10];
            let read = tokio::time::timeout(SOON, server.read(&mut more)).await.expect(&asked).unwrap();
            assert!(read > 0, "{asked}");
            asked.push_str(std::str::from_utf8(&more[..read]).unwrap());
        }
        assert!(asked.to_lowercase().contains(framing), "{asked}");
    }
}

/// Such a body is counted beside the thread that serves.
#[tokio::test]
async fn a_long_body_is_counted_and_its_print_is_known() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    let body = format!("{{\"prompt\":[{}1],\"stream\":true}}", "1,".repeat(400_000));
    let mut client = gate.send("").await;
    client.write_all(post("/v1/completions", &body).as_bytes()).await.unwrap();
    let (_server, _) = tokio::time::timeout(SOON, listener.accept()).await.unwrap().unwrap();
    let owed = gate.until("owed", |reply| reply.obs.in_flight == 1).await;
    assert_eq!((owed.obs.prompt_tokens_owed, owed.obs.unstreamed), (400_001, Some(0)));
    let suspects = gate.answered(async |client| client.suspects().await).await;
    let print = agent::gate::print::Print::of("/v1/completions", body.as_bytes());
    assert!(suspects.iter().any(|suspect| suspect.request == print.to_string()), "{suspects:?}");
}

/// I7: what parts it is drawn anew, and a client that tries again is met again. A picture in it is no text of a million tokens.
#[tokio::test]
async fn a_form_is_known_by_what_is_in_it_and_counted_as_what_it_is() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    let picture = "p".repeat(400_000);
    let mut held = Vec::new();
    for boundary in ["4f3c", "----WebKit7"] {
        let head = format!(
            "POST /v1/images/edits HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary={boundary}\r\n"
        );
        let body = format!("--{boundary}\r\n\r\n{picture}\r\n--{boundary}--\r\n");
        let mut client = gate.send("").await;
        let ask = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        client.write_all(ask.as_bytes()).await.unwrap();
        held.push((client, tokio::time::timeout(SOON, listener.accept()).await.unwrap().unwrap()));
    }
    let owed = gate.until("owed", |reply| reply.obs.in_flight == 2).await;
    assert!((1_000..4_000).contains(&owed.obs.prompt_tokens_owed), "{:?}", owed.obs);
    let suspects = gate.answered(async |client| client.suspects().await).await;
    assert_eq!(suspects.len(), 1, "{suspects:?}");
}

#[tokio::test]
async fn a_web_socket_is_refused_in_words_and_another_upgrade_is_not_taken_up() {
    let (_listener, upstream) = engine().await;
    let gate = Gate::before(&upstream).await;
    let ask = "GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade\r\nupgrade: WebSocket\r\n\r\n";
    let refused = rest(&mut gate.send(ask).await).await;
    assert!(refused.starts_with("HTTP/1.1 501") && refused.contains("WebSocket"), "{refused}");
    let ask = "GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade, http2-settings\r\nupgrade: h2c\r\n\
               http2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n\r\n";
    let (asked, answer) = exchange(ask, "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    assert!(!asked.to_lowercase().contains("upgrade") && !asked.to_lowercase().contains("http2"), "{asked}");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn whoever_is_refused_is_asked_to_try_on_another_connection() {
    let mut gate = Gate::before("127.0.0.1:1").await;
    // both clients would keep their connections, which lead to this replica for ever
    let ask = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}";
    let absent = rest(&mut gate.send(ask).await).await;
    assert!(absent.starts_with("HTTP/1.1 503") && absent.contains("connection: close"), "{absent}");
    gate.control = Control { fenced: true, ..Control::default() };
    gate.until("shut", |reply| reply.shut).await;
    let refused = rest(&mut gate.send(ask).await).await;
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("connection: close"), "{refused}");
}
