//! What a front end says that outlives its engine, and what may end a silence behind a fence.

use super::*;

#[tokio::test]
async fn an_engine_that_only_says_errors_delivers_nothing() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    for status in ["400 Bad Request", "429 Too Many Requests", "503 Service Unavailable", "504 Gateway Timeout"] {
        for kind in ["application/json", "text/plain"] {
            let mut client = gate.send(&post("/v1/completions", "{}")).await;
            let (mut server, _) = take(&listener).await;
            let head =
                format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nconnection: close\r\ncontent-length: 4\r\n\r\n");
            server.write_all(format!("{head}dead").as_bytes()).await.unwrap();
            assert!(rest(&mut client).await.ends_with("dead"), "it is passed on all the same");
        }
    }
    let mut client = gate.send(&post("/v1/completions", "{}")).await;
    let (mut server, _) = take(&listener).await;
    server.write_all(SSE.as_bytes()).await.unwrap();
    chunk(&mut server, "data: {\"error\": {\"message\":\"EngineCore died\"}}\n\ndata: [DONE]\n\n").await;
    server.write_all(b"0\r\n\r\n").await.unwrap();
    assert!(rest(&mut client).await.contains("EngineCore died"));
    let reply = gate.until("all ended", |r| r.obs.requests_done == 9).await;
    assert_eq!((reply.obs.chunks_delivered, reply.obs.bytes_delivered, reply.obs.last_delivery_ms), (0, 0, None));
    let ends = (reply.requests_completed, reply.requests_failed, reply.requests_declined);
    assert_eq!(ends, (2, 5, 2), "the 400s were answered, and whoever is full has not failed");
}

/// vLLM's front end outlives its engine by seconds, and ends what was in the step that killed it: streams by an event and a clean end, all else
/// by a 500.
#[tokio::test]
async fn who_was_in_the_step_that_killed_an_engine_is_suspect_although_its_front_end_ended_them_well() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    let begins = [("/v1/completions", "{\"prompt\":\"a\"}"), ("/v1/completions", "{\"prompt\":\"b\"}")];
    let [mut streamed, mut whole] =
        [gate.send(&post(begins[0].0, begins[0].1)).await, gate.send(&post(begins[1].0, begins[1].1)).await];
    let mut servers = Vec::new();
    for _ in 0..2 {
        servers.push(take(&listener).await);
    }
    let of = |body: &str| servers.iter().position(|(_, request)| request.contains(body)).unwrap();
    let (first, second) = (of("\"a\""), of("\"b\""));
    let server = &mut servers[first].0;
    server.write_all(SSE.as_bytes()).await.unwrap();
    chunk(server, "data: {\"choices\":[{\"text\":\"x\"}]}\n\n").await;
    gate.until("a token", |r| r.obs.chunks_delivered == 1).await;
    let server = &mut servers[first].0;
    chunk(server, "data: {\"error\": {\"message\":\"EngineCore died\"}}\n\ndata: [DONE]\n\n").await;
    server.write_all(b"0\r\n\r\n").await.unwrap();
    let head = "HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: 4\r\n\r\ndead";
    servers[second].0.write_all(head.as_bytes()).await.unwrap();
    assert!(rest(&mut streamed).await.contains("EngineCore died") && rest(&mut whole).await.ends_with("dead"));
    let reply = gate.until("both ended", |r| r.obs.requests_done == 2).await;
    assert_eq!((reply.requests_completed, reply.requests_failed), (0, 2));
    let suspects = gate.answered(async |client| client.suspects().await).await;
    assert_eq!(suspects.len(), 2, "{suspects:?}");
    assert!(suspects.iter().all(|one| one.answered_ms.is_none()), "{suspects:?}");
}

/// A fence keeps work away. What ends a pause of the engine's must come through, or the fence never ends.
#[tokio::test]
async fn what_may_end_a_silence_passes_a_fence_and_who_leaves_waits_for_it() {
    let (listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    gate.control = Control { fenced: true, ..Control::default() };
    gate.until("shut", |r| r.shut).await;
    let mut refused = gate.send(&post("/v1/load_lora_adapter", "{}")).await;
    assert!(rest(&mut refused).await.starts_with("HTTP/1.1 503"));
    let mut client = gate.send(&post("/continue_generation", "{}")).await;
    let (mut server, request) = take(&listener).await;
    assert!(request.starts_with("POST /continue_generation"), "{request}");
    gate.until("it is on its way", |r| r.passing == 1 && r.obs.in_flight == 0).await;
    server.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
    assert!(rest(&mut client).await.ends_with("ok"));
    gate.until("it is over", |r| r.passing == 0).await;
}

/// What was answered whole may still lie between gate and client: who leaves waits for its connections.
#[tokio::test]
async fn the_connections_of_a_gate_are_told_until_they_are_over() {
    let (_listener, upstream) = engine().await;
    let mut gate = Gate::before(&upstream).await;
    let _kept = gate.send("").await;
    gate.until("it is there", |r| r.connections == 1 && r.obs.in_flight == 0).await;
    gate.control = Control { draining: true, ..Control::default() };
    gate.until("it was sent away", |r| r.connections == 0).await;
}
