//! The agent's HTTP: `/livez`, `/readyz`, `/verdict`, `/incidents`, `/metrics`, `/drain`. Served by a thread and a runtime of its
//! own, from memory alone, so that it answers whatever the rest of the supervisor does (I4): `/livez` tells whether that does anything (D2).

mod visitors;

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router, middleware};
use role::crowd;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::supervisor::board::{Board, Posted};

/// A drain that nobody bounds ends after this.
const DRAIN_S_DEFAULT: u64 = 25;
const DRAIN_S_MAX: u64 = 3_600;
/// A kubelet that asked stops the engine right after the bound. Where the engine still lives this much later nobody stops it, and
/// whoever asked (anybody who reaches the port can) must not keep the replica out for ever.
const DRAIN_LEFT_MAX: Duration = Duration::from_secs(15);

/// After a pod's end begins, every node of the cluster learns in its own time that its endpoint is gone; requests that come meanwhile
/// are served. A third of the drain's time at most: what is in flight needs the rest.
const DRAIN_OPEN_MS_MAX: u64 = 3_000;

/// Starts the thread. It lives as long as the process. `standalone`: this is a `truebeat run`, on a machine where people may browse.
///
/// # Errors
/// When the thread, its runtime or the listener's registration fails.
pub fn serve_on_own_thread(listener: TcpListener, board: Arc<Board>, standalone: bool) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let listener = {
        let _inside = runtime.enter();
        tokio::net::TcpListener::from_std(listener)?
    };
    let serve = move || runtime.block_on(crowd::serve(listener, router(board, standalone)));
    std::thread::Builder::new().name("http".to_owned()).spawn(serve).map(drop)
}

/// The routes over one board.
pub fn router(board: Arc<Board>, standalone: bool) -> Router {
    let only_visitors = middleware::from_fn(move |request, next| visitors::pass(standalone, request, next));
    Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/verdict", get(verdict))
        .route("/incidents", get(incidents))
        .route("/metrics", get(metrics))
        .route("/drain", get(drain).post(drain).layer(only_visitors))
        .with_state(board)
}

/// Does the supervisor do its work? It looks after detector and gate; after it looks the kubelet, by this.
async fn livez(State(board): State<Arc<Board>>) -> Response {
    board.pulse().answer().await
}

/// May this replica serve? The last answer stays while the detector is away (I4); before its first word, no.
async fn readyz(State(board): State<Arc<Board>>) -> Response {
    let Some(posted) = board.latest() else {
        let body = json!({ "ready": false, "reason": "NoVerdict", "message": "the detector has not spoken yet" });
        return (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response();
    };
    let status = if posted.doc.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = json!({
        "ready": posted.doc.ready,
        "reason": posted.doc.reason.reason,
        "message": posted.doc.reason.message,
        "age_ms": board.age().as_millis() as u64,
    });
    (status, Json(body)).into_response()
}

async fn verdict(State(board): State<Arc<Board>>) -> Json<Value> {
    let Some(posted) = board.latest() else {
        return Json(json!({
            "verdict": "Unknown", "class": null, "since_ms": 0, "fenced": false, "phase": null,
            "reasons": [{ "source": "policy", "text": "the detector has not spoken yet" }],
        }));
    };
    let mut doc = posted.doc.verdict.clone();
    doc.since_ms = doc.since_ms.saturating_add(posted.at.elapsed().as_millis() as u64);
    let mut body = serde_json::to_value(doc).unwrap_or_default();
    body["age_ms"] = (board.age().as_millis() as u64).into();
    Json(body)
}

async fn incidents(State(board): State<Arc<Board>>) -> Json<Value> {
    let list = board.latest().map(|posted| serde_json::to_value(&posted.doc.incidents).unwrap_or_default());
    Json(list.unwrap_or_else(|| json!([])))
}

async fn metrics(State(board): State<Arc<Board>>) -> Response {
    let mut text = board.latest().map(|posted| posted.doc.metrics.clone()).unwrap_or_default();
    text += &board.metrics();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

#[derive(Debug, Deserialize)]
struct DrainQuery {
    timeout_s: Option<u64>,
}

/// The engine's preStop: not ready any more; serve what still comes for a moment, then refuse it; wait until nothing is in flight or
/// the time is up. GET, because that is what the
/// kubelet sends.
async fn drain(State(board): State<Arc<Board>>, Query(query): Query<DrainQuery>) -> Json<Value> {
    let bound_s = query.timeout_s.unwrap_or(DRAIN_S_DEFAULT).min(DRAIN_S_MAX);
    let bound = Duration::from_secs(bound_s);
    let id = board.request_drain(DRAIN_OPEN_MS_MAX.min(bound_s * 1_000 / 3));
    let mut statuses = board.statuses();
    // Lifted whether or not the asker waits; an engine that has gone meanwhile has ended the drain itself.
    let until = board.keep_drain(Instant::now() + bound + DRAIN_LEFT_MAX);
    tokio::spawn(lift(Arc::clone(&board), id, until));
    let empty = statuses.wait_for(|status| {
        // whoever asks later asks for no less
        let heard = |posted: &Posted| posted.doc.draining.is_some_and(|at| at >= id);
        status.as_ref().is_some_and(|posted| heard(posted) && posted.doc.in_flight == Some(0))
    });
    let drained = matches!(tokio::time::timeout(bound, empty).await, Ok(Ok(_)));
    let in_flight = board.latest().and_then(|posted| posted.doc.in_flight);
    Json(json!({ "drained": drained, "in_flight": in_flight }))
}

/// Ends a drain that nobody has used, unless another was asked for meanwhile: whoever waits for that one does it.
async fn lift(board: Arc<Board>, id: u64, until: Instant) {
    let mut drains = board.drains();
    let another = drains.wait_for(|wanted| wanted.id != id);
    if tokio::time::timeout_at(until, another).await.is_err() && board.lift_drain(id) {
        tracing::warn!("a drain was lifted: its bound is over and nobody has stopped the engine");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3_600);

    #[tokio::test]
    async fn a_page_in_a_browser_drains_nobody() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let board = Arc::new(Board::default());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        serve_on_own_thread(listener, Arc::clone(&board), true).unwrap();
        let asks = async |header: &str| {
            let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let head =
                format!("GET /drain?timeout_s=0 HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n{header}\r\n");
            stream.write_all(head.as_bytes()).await.unwrap();
            let mut answer = String::new();
            tokio::time::timeout(LONG, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
            (answer[9..12].to_owned(), board.drains().borrow().id > 0)
        };
        assert_eq!(asks("sec-fetch-site: cross-site\r\n").await, ("403".to_owned(), false));
        assert_eq!(asks("").await, ("200".to_owned(), true));
    }

    #[tokio::test]
    async fn d02_a_supervisor_that_does_nothing_is_not_alive_whatever_its_probe_port_says() {
        let silence_max = Duration::from_secs(1);
        let board = Arc::new(Board::missed_after(silence_max));
        let asks = async || livez(State(Arc::clone(&board))).await.status();
        assert_eq!(asks().await, StatusCode::OK);
        std::thread::sleep(silence_max * 2);
        assert_eq!(asks().await, StatusCode::SERVICE_UNAVAILABLE, "nobody has polled its heart");
        tokio::select! {
            () = board.pulse().beat() => {}
            status = asks() => assert_eq!(status, StatusCode::OK, "it goes on"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_would_lift_a_drain_goes_when_another_was_asked_for() {
        let board = Arc::new(Board::default());
        let began = Instant::now();
        let lifting = |id: u64, time: Duration| lift(Arc::clone(&board), id, board.keep_drain(Instant::now() + time));
        let first = tokio::spawn(lifting(board.request_drain(0), LONG));
        tokio::task::yield_now().await;
        let second = board.request_drain(0);
        first.await.unwrap();
        assert!(began.elapsed() < LONG, "however often somebody asks, one waits");
        assert_eq!(board.drains().borrow().id, second, "and the other one stays");
        lifting(second, LONG / 9).await;
        assert_eq!(
            (board.drains().borrow().id, began.elapsed() >= LONG),
            (0, true),
            "for as long as the first one asked"
        );
        let began = Instant::now();
        lifting(board.request_drain(0), LONG / 9).await;
        assert!(began.elapsed() < LONG, "that is over");
    }
}
