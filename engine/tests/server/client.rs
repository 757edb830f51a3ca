//! A small HTTP client: whole answers, server-sent events, and connections that are dropped half-way.

use std::{net::SocketAddr, time::Duration};

use axum::body::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, Response, body::Incoming, header::HeaderMap};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);

/// A whole answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub text: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }

    /// The data of the server-sent events.
    pub fn events(&self) -> Vec<&str> {
        self.text.split_terminator("\n\n").map(|e| e.strip_prefix("data: ").expect("an event")).collect()
    }

    /// The events' JSON, which `[DONE]` must end.
    pub fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop(), Some("[DONE]"), "{}", self.text);
        events.iter().map(|e| serde_json::from_str(e).unwrap()).collect()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|v| v.to_str().ok())
    }
}

async fn send(request: Request<Full<Bytes>>) -> Response<Incoming> {
    // A client of its own for each request: what is dropped closes its connection.
    let client: Client<HttpConnector, _> = Client::builder(TokioExecutor::new()).build_http();
    tokio::time::timeout(PATIENCE, client.request(request)).await.expect("an answer in time").expect("an answer")
}

pub async fn whole(response: Response<Incoming>) -> Answer {
    let (parts, body) = response.into_parts();
    let body = tokio::time::timeout(PATIENCE, body.collect()).await.expect("a body in time").expect("a body");
    let text = String::from_utf8(body.to_bytes().to_vec()).unwrap();
    Answer { status: parts.status.as_u16(), headers: parts.headers, text }
}

pub async fn get(addr: SocketAddr, path: &str) -> Answer {
    let request = Request::get(format!("http://{addr}{path}")).body(Full::default()).unwrap();
    whole(send(request).await).await
}

/// A request that is made anew while the engine says that it makes no progress, as its `Retry-After` asks: a machine that gives it no core for
/// the length of its lease has done that.
pub async fn post(addr: SocketAddr, path: &str, body: &Value) -> Answer {
    let since = std::time::Instant::now();
    loop {
        let answer = post_once(addr, path, body).await;
        let stalled = answer.status == 503 && answer.json()["error"]["code"] == "stalled";
        if !stalled || since.elapsed() > PATIENCE {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

pub async fn post_once(addr: SocketAddr, path: &str, body: &Value) -> Answer {
    whole(open(addr, path, body, &[]).await).await
}

/// A request that `post` would not make.
pub async fn request(addr: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
    let mut request = Request::builder().method(method).uri(format!("http://{addr}{path}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    whole(send(request.body(Full::from(body.to_owned())).unwrap()).await).await
}

/// Sends a request and returns as soon as the answer's head is there; dropping the response closes the connection.
pub async fn open(addr: SocketAddr, path: &str, body: &Value, headers: &[(&str, &str)]) -> Response<Incoming> {
    let mut request = Request::post(format!("http://{addr}{path}")).header("content-type", "application/json");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    send(request.body(Full::from(body.to_string())).unwrap()).await
}

/// The value of a series of `/metrics` with this name and all of these labels.
pub async fn metric(addr: SocketAddr, name: &str, labels: &[&str]) -> f64 {
    let text = get(addr, "/metrics").await.text;
    let found = |l: &&str| l.starts_with(&format!("{name}{{")) && labels.iter().all(|label| l.contains(label));
    let line = text.lines().find(found).unwrap_or_else(|| panic!("no {name} {labels:?} in {text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Asks for a metric until it has the value, for a generous while.
pub async fn metric_becomes(addr: SocketAddr, name: &str, labels: &[&str], value: f64) {
    let since = std::time::Instant::now();
    loop {
        let now = metric(addr, name, labels).await;
        if now == value {
            return;
        }
        assert!(since.elapsed() < PATIENCE, "{name} is {now}, not {value}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
