//! The hazards of the stock kube client (RELIABILITY §7), each twice on a paused clock: as anybody gets it who takes the
//! defaults, and as this operator calls the API.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test program; the lint sees test functions alone")]

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use k8s_openapi::api::core::v1::{ConfigMap, Endpoints, PersistentVolumeClaim, Pod, Secret, Service, ServiceAccount};
use kube::{
    Api, Client, Resource,
    api::{EvictParams, PostParams},
    client::{Body, retry::RetryPolicy},
    runtime::{Controller, controller::Action, watcher},
};
use operator::{
    client::Calls,
    controllers::{
        metadata::{Seen, Source},
        queue::Key,
        watch::{self, Concerned, Watched},
    },
    health::Health,
    leader::Leadership,
    metrics::Metrics,
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, retry::RetryLayer};

type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

/// What a server was asked, in order.
#[derive(Default, Clone)]
struct Asked(Arc<Mutex<Vec<String>>>);

type Server = tower::util::BoxCloneService<Request<Body>, Answer, tower::BoxError>;

impl Asked {
    fn count(&self, word: &str) -> usize {
        self.0.lock().unwrap().iter().filter(|line| line.contains(word)).count()
    }
}

/// A server that answers by `answer(request, how many came before)`; `None`: never.
fn service<F>(asked: &Asked, answer: F) -> Server
where
    F: Fn(&str, usize) -> Option<Answer> + Clone + Send + Sync + 'static,
{
    let asked = asked.clone();
    Server::new(tower::service_fn(move |request: Request<Body>| {
        let line = format!("{} {}", request.method(), request.uri());
        let mut lines = asked.0.lock().unwrap();
        let answer = answer(&line, lines.len());
        lines.push(line);
        let answered: futures::future::BoxFuture<'static, _> = match answer {
            Some(answer) => Box::pin(async move { Ok(answer) }),
            None => Box::pin(std::future::pending()),
        };
        answered
    }))
}

fn say(code: u16, value: &Value) -> Answer {
    Response::builder().status(code).body(Full::new(Bytes::from(value.to_string())).boxed_unsync()).unwrap()
}

fn refuse(code: u16, reason: &str) -> Answer {
    say(code, &json!({"kind": "Status", "status": "Failure", "code": code, "message": reason, "reason": reason}))
}

fn flow(lines: impl Stream<Item = Value> + Send + 'static) -> Answer {
    let frames = lines.map(|line| Ok(Frame::data(Bytes::from(format!("{line}\n")))));
    Response::new(StreamBody::new(frames).boxed_unsync())
}

fn object(kind: &str, version: u64) -> Value {
    json!({
        "apiVersion": "v1", "kind": kind,
        "metadata": {"name": "a", "namespace": "default", "uid": "u", "resourceVersion": version.to_string()},
    })
}

fn list(kind: &str) -> Answer {
    say(
        200,
        &json!({"apiVersion": "v1", "kind": format!("{kind}List"), "metadata": {"resourceVersion": "1"}, "items": [object(kind, 1)]}),
    )
}

/// The client that everybody gets: `Config::default_retry` puts this very layer there.
fn stock(service: Server) -> Client {
    Client::new(RetryLayer::new(RetryPolicy::server_retry()).layer(service), "default")
}

fn ours(client: Client) -> Calls {
    let leadership = Arc::new(Leadership::default());
    leadership.renewed();
    Calls::new(client, leadership, Arc::new(Metrics::new().unwrap()))
}

/// A6, A7: a budget blocks an eviction, and the server says so at once, with 429.
#[tokio::test(start_paused = true)]
async fn stock_a_blocked_eviction_sits_for_minutes_inside_one_call() {
    let asked = Asked::default();
    let client = stock(service(&asked, |_, _| Some(refuse(429, "it would violate the budget"))));
    let start = Instant::now();
    let error = Api::<Pod>::default_namespaced(client).evict("a", &EvictParams::default()).await.unwrap_err();
    assert!(error.to_string().contains("budget"), "{error}");
    assert!(start.elapsed() >= Duration::from_secs(100), "{:?}", start.elapsed());
    assert_eq!(asked.count("POST"), 16);
}

#[tokio::test(start_paused = true)]
async fn fault_a6_ours_a_refused_delete_returns_within_its_deadline() {
    let asked = Asked::default();
    let calls = ours(Client::new(service(&asked, |_, _| Some(refuse(429, "busy"))), "default"));
    let start = Instant::now();
    let error =
        calls.delete(&Api::<Pod>::default_namespaced(calls.client.clone()), "a", ("u", None)).await.unwrap_err();
    assert_eq!(error.code(), Some(429));
    assert!(start.elapsed() <= Duration::from_secs(4) && asked.count("DELETE") <= 3, "{:?}", start.elapsed());
}

/// A8: the write takes effect, and the answer is 504. The first repeat finds the object there.
fn applies_then_times_out(_: &str, before: usize) -> Option<Answer> {
    Some(if before == 0 { refuse(504, "timeout") } else { refuse(409, "AlreadyExists") })
}

#[tokio::test(start_paused = true)]
async fn stock_what_was_created_is_reported_as_an_error() {
    let asked = Asked::default();
    let api = Api::<ConfigMap>::default_namespaced(stock(service(&asked, applies_then_times_out)));
    let mine = serde_json::from_value(object("ConfigMap", 0)).unwrap();
    let error = api.create(&PostParams::default(), &mine).await.unwrap_err();
    assert!(error.to_string().contains("AlreadyExists"), "a success that is told as a failure: {error}");
    assert_eq!(asked.count("POST"), 2);
}

#[tokio::test(start_paused = true)]
async fn fault_a8_ours_what_was_created_is_no_error() {
    let asked = Asked::default();
    let calls = ours(Client::new(service(&asked, applies_then_times_out), "default"));
    let mine: ConfigMap = serde_json::from_value(object("ConfigMap", 0)).unwrap();
    calls.create(&Api::default_namespaced(calls.client.clone()), "a", &mine).await.unwrap();
    assert_eq!(asked.count("POST"), 2);
}

/// A3: ConfigMaps change every second; every list of any other kind is refused.
fn all_but_one_refused(line: &str, _: usize) -> Option<Answer> {
    Some(match line {
        _ if !line.contains("/configmaps") => refuse(403, "Forbidden"),
        _ if line.contains("watch=true") => flow(stream::unfold(2, |version| async move {
            sleep(Duration::from_secs(1)).await;
            Some((json!({"type": "MODIFIED", "object": object("ConfigMap", version)}), version + 1))
        })),
        _ => list("ConfigMap"),
    })
}

/// The longest time between two of these moments.
fn longest_gap(moments: &Mutex<Vec<Instant>>) -> Duration {
    let moments = moments.lock().unwrap();
    assert!(moments.len() > 1, "nothing was ever seen");
    moments.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap()
}

#[tokio::test(start_paused = true)]
async fn stock_refused_kinds_delay_all_others_trino936() {
    let client = stock(service(&Asked::default(), all_but_one_refused));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let note = |_: Arc<ConfigMap>, seen: Arc<Mutex<Vec<Instant>>>| async move {
        seen.lock().unwrap().push(Instant::now());
        Ok::<_, Infallible>(Action::await_change())
    };
    let all = watcher::Config::default;
    let run = Controller::new(Api::<ConfigMap>::default_namespaced(client.clone()), all())
        .owns(Api::<Secret>::default_namespaced(client.clone()), all())
        .owns(Api::<Pod>::default_namespaced(client.clone()), all())
        .owns(Api::<Service>::default_namespaced(client.clone()), all())
        .owns(Api::<ServiceAccount>::default_namespaced(client.clone()), all())
        .owns(Api::<Endpoints>::default_namespaced(client.clone()), all())
        .owns(Api::<PersistentVolumeClaim>::default_namespaced(client), all())
        .run(note, |_, _, _| Action::await_change(), seen.clone())
        .for_each(|_| std::future::ready(()));
    let _ = timeout(Duration::from_secs(600), run).await;
    let gap = longest_gap(&seen);
    assert!(gap >= Duration::from_secs(20), "one joint backoff holds everything up; the longest gap was {gap:?}");
}

#[tokio::test(start_paused = true)]
async fn fault_a3_trino936_ours_refused_kinds_delay_nobody() {
    let client = Client::new(service(&Asked::default(), all_but_one_refused), "default");
    let (seen, health) = (Mutex::new(Vec::new()), health());
    let all = stream::select_all([
        ours_of::<ConfigMap>(&client, "ConfigMap", &health),
        ours_of::<Secret>(&client, "Secret", &health),
        ours_of::<Pod>(&client, "Pod", &health),
        ours_of::<Service>(&client, "Service", &health),
        ours_of::<ServiceAccount>(&client, "ServiceAccount", &health),
        ours_of::<Endpoints>(&client, "Endpoints", &health),
        ours_of::<PersistentVolumeClaim>(&client, "PersistentVolumeClaim", &health),
    ]);
    let run = all.for_each(|_| {
        seen.lock().unwrap().push(Instant::now());
        std::future::ready(())
    });
    let _ = timeout(Duration::from_secs(600), run).await;
    let gap = longest_gap(&seen);
    assert!(gap <= Duration::from_secs(2), "{gap:?}");
    assert_eq!(health.faults().len(), 6, "each refused kind is told of: {:?}", health.faults());
}

/// A2: the watch stands, and nothing comes over it any more …
fn silent(line: &str, _: usize) -> Option<Answer> {
    Some(if line.contains("watch=true") { flow(stream::pending()) } else { list("ConfigMap") })
}

/// … or the request for it is never answered.
fn unanswered(line: &str, _: usize) -> Option<Answer> {
    (!line.contains("watch=true")).then(|| list("ConfigMap"))
}

/// How many requests a stock watcher makes in so long.
async fn stock_requests(answer: fn(&str, usize) -> Option<Answer>, time: Duration) -> usize {
    let asked = Asked::default();
    let api = Api::<ConfigMap>::default_namespaced(stock(service(&asked, answer)));
    let run = watcher(api, watcher::Config::default()).for_each(|_| std::future::ready(()));
    let _ = timeout(time, run).await;
    asked.count("GET")
}

#[tokio::test(start_paused = true)]
async fn stock_a_black_holed_watch_is_noticed_late_or_never() {
    assert_eq!(stock_requests(silent, Duration::from_secs(290)).await, 2, "one list, one watch");
    assert_eq!(stock_requests(unanswered, Duration::from_secs(3600)).await, 2, "one list, one watch");
}

#[tokio::test(start_paused = true)]
async fn fault_a2_ours_a_black_holed_watch_is_noticed_in_half_a_minute() {
    for (answer, time_ms) in [(silent as fn(&str, usize) -> _, 30_200), (unanswered, 10_200)] {
        let client = Client::new(service(&Asked::default(), answer), "default");
        let health = health();
        let run = ours_of::<ConfigMap>(&client, "ConfigMap", &health).for_each(|_| std::future::ready(()));
        let _ = timeout(Duration::from_millis(time_ms), run).await;
        assert_eq!(health.faults(), ["the watch of ConfigMap is stale"]);
    }
}

/// One watch of ours, on its own.
fn ours_of<K: Resource<DynamicType = ()>>(
    client: &Client,
    kind: &'static str,
    health: &Arc<Health>,
) -> futures::stream::BoxStream<'static, Concerned> {
    let source = Source::of::<K>(client.clone(), Some(client.default_namespace()));
    watch::keys(source, Watched { kind, label: None, list_every: None }, health.clone(), of_itself).boxed()
}

fn health() -> Arc<Health> {
    let leadership = Arc::new(Leadership::default());
    leadership.contact();
    let health = Arc::new(Health::new(leadership.clone(), Arc::new(Metrics::new().unwrap())));
    tokio::spawn(async move {
        loop {
            leadership.contact();
            sleep(Duration::from_secs(5)).await;
        }
    });
    health
}

fn of_itself(object: &Seen) -> Option<Key> {
    Some((object.metadata.namespace.clone()?, object.metadata.name.clone()?))
}
