//! The elector against a mock of the Lease API with resourceVersions, on a paused clock.

use std::sync::Mutex;

use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::{Value, json};
use tower_test::mock;

use super::*;

/// The one Lease as the API server keeps it; `None`: there is none. `dead`: no request is ever answered.
struct Store {
    lease: Option<Value>,
    dead: bool,
}

impl Default for Store {
    /// A first installation.
    fn default() -> Self {
        let mut lease = crate::manifests::lease();
        lease["metadata"]["resourceVersion"] = json!("1");
        Store { lease: Some(lease), dead: false }
    }
}

impl Store {
    fn answer(&mut self, method: &Method, body: Value) -> (u16, Value) {
        let version = |lease: &Value| lease["metadata"]["resourceVersion"].as_str().and_then(|v| v.parse::<u64>().ok());
        let stored = self.lease.as_ref().and_then(version);
        let refused = |code: u16| {
            (
                code,
                json!({"kind": "Status", "status": "Failure", "code": code, "message": "no", "reason": if code == 404 { "NotFound" } else { "Conflict" }}),
            )
        };
        match (method.clone(), stored) {
            (Method::GET, None) => refused(404),
            (Method::GET, Some(_)) => (200, self.lease.clone().unwrap_or_default()),
            (Method::POST, Some(_)) => refused(409),
            (Method::PUT, stored) if stored != version(&body) => refused(409),
            _ => {
                let mut lease = body;
                lease["metadata"]["resourceVersion"] = json!((stored.unwrap_or(0) + 1).to_string());
                self.lease = Some(lease.clone());
                (200, lease)
            }
        }
    }
}

fn candidate(store: &Arc<Mutex<Store>>, name: &str) -> (Elector, Arc<Leadership>) {
    let (service, mut handle) = mock::pair::<Request<Body>, Response<Body>>();
    let store = store.clone();
    tokio::spawn(async move {
        let mut unanswered = Vec::new();
        while let Some((request, send)) = handle.next_request().await {
            let method = request.method().clone();
            let bytes = request.into_body().collect_bytes().await.unwrap();
            let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
            let mut store = store.lock().unwrap();
            if store.dead {
                unanswered.push(send);
                continue;
            }
            let (code, answer) = store.answer(&method, body);
            let answer = Body::from(serde_json::to_vec(&answer).unwrap());
            send.send_response(Response::builder().status(code).body(answer).unwrap());
        }
    });
    let leadership = Arc::new(Leadership::default());
    (Elector::new(Client::new(service, "default"), "truebeat-system", name, leadership.clone()), leadership)
}

/// Lets both campaign for some seconds of the paused clock.
async fn campaign(a: &mut Elector, b: &mut Elector, seconds: u64) {
    let both = async { tokio::join!(a.run(), b.run()) };
    let _ = timeout(Duration::from_secs(seconds), both).await;
}

#[tokio::test(start_paused = true)]
async fn one_of_two_leads_and_keeps_leading() {
    let store = Arc::new(Mutex::new(Store::default()));
    let ((mut a, leads_a), (mut b, leads_b)) = (candidate(&store, "a"), candidate(&store, "b"));
    campaign(&mut a, &mut b, 5).await;
    let first = (leads_a.may_write(), leads_b.may_write());
    assert!(first.0 != first.1, "{first:?}");
    campaign(&mut a, &mut b, 60).await;
    assert_eq!((leads_a.may_write(), leads_b.may_write()), first);
}

/// With the Lease that the manifests ship the first look is enough; without it somebody may have deleted it under a leader.
#[tokio::test(start_paused = true)]
async fn a_first_installation_acts_at_once_and_a_missing_lease_is_claimed_for_its_time() {
    let start = Instant::now();
    let (mut first, leads) = candidate(&Arc::default(), "a");
    first.round().await.unwrap();
    assert!(leads.may_write() && start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());

    let bare = Arc::new(Mutex::new(Store { lease: None, dead: false }));
    let (mut newcomer, leads) = candidate(&bare, "b");
    let start = Instant::now();
    tokio::select! { () = newcomer.run() => {}, () = won(&leads) => {} }
    let waited = start.elapsed();
    assert!(waited >= LEASE_DURATION && waited < LEASE_DURATION + 2 * RETRY_PERIOD, "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn a_released_lease_is_taken_at_once_and_a_silent_one_after_its_time() {
    let store = Arc::new(Mutex::new(Store::default()));
    let ((mut a, leads_a), (mut b, leads_b)) = (candidate(&store, "a"), candidate(&store, "b"));
    a.round().await.unwrap();
    b.round().await.unwrap();
    assert!(leads_a.may_write() && !leads_b.may_write());
    a.release().await;
    b.round().await.unwrap();
    assert!(!leads_a.may_write() && leads_b.may_write(), "released");
    a.round().await.unwrap();
    let start = Instant::now();
    let alone = timeout(Duration::from_secs(60), async { tokio::join!(a.run(), won(&leads_a)) });
    let waited = tokio::select! { _ = alone => None, () = won(&leads_a) => Some(start.elapsed()) };
    let waited = waited.expect("taken over in the end");
    assert!(waited >= LEASE_DURATION && waited < LEASE_DURATION + 2 * RETRY_PERIOD, "{waited:?}");
    assert!(!leads_b.may_write(), "the silent one lost the right long before");
}

/// B5 and the bar of two seconds: a killed leader's next process acts with its first look.
#[tokio::test(start_paused = true)]
async fn fault_b5_a_killed_leaders_container_leads_again_with_its_first_look() {
    let store = Arc::new(Mutex::new(Store::default()));
    let place = || super::super::lease::container("op", Some("uid"), 1);
    let ((mut first, _), (mut other, leads_other)) = (candidate(&store, "op_uid_1"), candidate(&store, "b"));
    first.round().await.unwrap();
    other.round().await.unwrap();
    drop(first); // SIGKILL: nothing is released
    let (second, leads) = candidate(&store, "op_uid_2");
    let mut second = second.with_forerunners(place());
    let start = Instant::now();
    second.round().await.unwrap();
    assert!(leads.may_write() && start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    campaign(&mut second, &mut other, 60).await;
    assert!(leads.may_write() && !leads_other.may_write());
}

/// A21: all operators were away while the store was restored, and nobody of them can have seen it go back.
#[tokio::test(start_paused = true)]
async fn a_process_that_finds_an_old_lease_leads_when_agents_have_had_their_time() {
    for (away_s, wanted) in [(295, Duration::ZERO), (305, WENT_BACK_PAUSE)] {
        let store = Arc::new(Mutex::new(Store::default()));
        let (mut first, _) = candidate(&store, "a");
        first.round().await.unwrap();
        first.release().await;
        let (second, leads) = candidate(&store, "b");
        let mut second = second.with_wall(Wall::new(move || Timestamp::now() + Duration::from_secs(away_s)));
        let start = Instant::now();
        tokio::select! { () = second.run() => {}, () = won(&leads) => {} }
        let waited = start.elapsed();
        assert!(waited >= wanted && waited < wanted + 2 * RETRY_PERIOD, "after {away_s} s: {waited:?}");
    }
}

/// The bar: a lease that is given back has a new holder within three seconds.
#[tokio::test(start_paused = true)]
async fn a_released_lease_has_a_new_holder_within_three_seconds() {
    let mut longest = Duration::ZERO;
    for offset_ms in (0..1_500).step_by(100) {
        let store = Arc::new(Mutex::new(Store::default()));
        let ((mut a, _), (mut b, leads_b)) = (candidate(&store, "a"), candidate(&store, "b"));
        a.round().await.unwrap();
        let waiting = tokio::spawn(async move { b.run().await });
        sleep(Duration::from_millis(5_000 + offset_ms)).await;
        a.release().await;
        let start = Instant::now();
        won(&leads_b).await;
        longest = longest.max(start.elapsed());
        waiting.abort();
    }
    assert!(longest < Duration::from_secs(3), "{longest:?}");
}

async fn won(leadership: &Arc<Leadership>) {
    let _ = leadership.changes().wait_for(|leading| *leading).await;
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_cannot_renew_stops_before_its_lease_expires() {
    let store = Arc::new(Mutex::new(Store::default()));
    let (mut a, leads) = candidate(&store, "a");
    a.round().await.unwrap();
    store.lock().unwrap().dead = true;
    let mut changes = leads.changes();
    let start = Instant::now();
    let lost = async { changes.wait_for(|leading| !*leading).await.map(|_| ()) };
    tokio::select! { () = a.run() => {}, _ = lost => {} }
    assert!(!leads.may_write() && start.elapsed() < LEASE_DURATION, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_write_under_an_old_version_loses() {
    let store = Arc::new(Mutex::new(Store::default()));
    let (mut a, leads) = candidate(&store, "a");
    a.round().await.unwrap();
    let stale = a.api.get(LEASE_NAME).await.unwrap();
    a.round().await.unwrap();
    a.write(Some(stale), Decision::Renew).await.unwrap();
    assert!(!leads.may_write());
}
