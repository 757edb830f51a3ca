//! The hazards of RELIABILITY §7 against a mock server, on a paused clock.

use super::*;
use http::{Request, Response};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::client::Body as KubeBody;
use serde_json::json;
use std::sync::atomic::{AtomicU32, Ordering};
use tower_test::mock;

/// Calls against a server that answers each request by `answer(n)`; `None`: never.
fn calls(answer: impl Fn(u32) -> Option<(u16, serde_json::Value)> + Send + 'static) -> (Calls, Arc<AtomicU32>) {
    let (service, mut handle) = mock::pair::<Request<KubeBody>, Response<KubeBody>>();
    let count = Arc::new(AtomicU32::new(0));
    let seen = count.clone();
    tokio::spawn(async move {
        let mut unanswered = Vec::new();
        while let Some((_, send)) = handle.next_request().await {
            match answer(seen.fetch_add(1, Ordering::SeqCst)) {
                Some((code, body)) => {
                    let body = KubeBody::from(serde_json::to_vec(&body).unwrap());
                    send.send_response(Response::builder().status(code).body(body).unwrap());
                }
                None => unanswered.push(send),
            }
        }
    });
    let leadership = Arc::new(Leadership::default());
    leadership.renewed();
    let client = Client::new(service, "default");
    (Calls::new(client, leadership, Arc::new(Metrics::new().unwrap())), count)
}

fn busy(code: u16, retry_after_s: u32) -> (u16, serde_json::Value) {
    let details = json!({"retryAfterSeconds": retry_after_s});
    (
        code,
        json!({"kind": "Status", "status": "Failure", "code": code, "message": "busy", "reason": "x", "details": details}),
    )
}

fn config_map() -> (u16, serde_json::Value) {
    (200, json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "resourceVersion": "1"}}))
}

fn api(calls: &Calls) -> Api<ConfigMap> {
    Api::namespaced(calls.client.clone(), "default")
}

#[tokio::test(start_paused = true)]
async fn a_server_that_never_answers_costs_one_deadline() {
    let (calls, count) = calls(|_| None);
    let start = Instant::now();
    let error = calls.get(&api(&calls), "a").await.expect_err("no answer");
    assert!(matches!(error, CallError::Deadline { .. }), "{error}");
    assert_eq!((start.elapsed().as_secs(), count.load(Ordering::SeqCst)), (4, 1));
}

/// What is asked for is waited for, within the call's own deadline; of what is no number of seconds nothing is believed.
#[tokio::test(start_paused = true)]
async fn fault_a6_a_retry_after_of_any_kind_is_honoured_up_to_the_deadline() {
    let garbage = |after: serde_json::Value| {
        let mut status = busy(429, 0).1;
        status["details"]["retryAfterSeconds"] = after;
        (429, status)
    };
    let own = (TRIES_MAX, 600); // the operator's own pauses alone
    let table = [
        (busy(429, 0), own),
        (busy(429, 1), (TRIES_MAX, 2_000)),
        (busy(429, 3_600), (2, 2_000)), // a third try would be too late
        (garbage(json!("soon")), own),
        (garbage(json!(-5)), own),
        (garbage(json!(1e30)), own),
        ((429, json!("Too many requests, please try again later.")), own),
    ];
    for (answer, (tries, waited_ms)) in table {
        let told = answer.1.to_string();
        let (calls, count) = calls(move |_| Some(answer.clone()));
        let start = Instant::now();
        let error = calls.get(&api(&calls), "a").await.expect_err("busy for ever");
        assert_eq!(error.code(), Some(429), "{told}");
        assert_eq!((count.load(Ordering::SeqCst), start.elapsed().as_millis()), (tries, waited_ms), "{told}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_short_outage_is_ridden_out() {
    let (calls, count) = calls(|n| Some(if n == 0 { busy(503, 0) } else { config_map() }));
    assert!(calls.get(&api(&calls), "a").await.expect("the second try").is_some());
    assert_eq!(count.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn a_replace_is_never_repeated() {
    let (calls, count) = calls(|_| Some(busy(504, 1)));
    let error = calls.tries(Verb::Replace, "a", || async { api(&calls).get("a").await }).await.expect_err("504");
    assert_eq!((error.code(), count.load(Ordering::SeqCst)), (Some(504), 1));
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_not_repeated_and_lasts() {
    let (calls, count) = calls(|_| Some(busy(422, 0)));
    let error = calls.apply(&api(&calls), "a", &json!({})).await.expect_err("422");
    assert!(error.lasting());
    assert_eq!(count.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn who_does_not_lead_writes_nothing_but_may_read() {
    let (calls, count) = calls(|_| Some(config_map()));
    calls.leadership.lost();
    let error = calls.apply(&api(&calls), "a", &json!({})).await.expect_err("not the leader");
    assert!(matches!(error, CallError::NotLeader { .. }), "{error}");
    assert_eq!(count.load(Ordering::SeqCst), 0);
    assert!(calls.get(&api(&calls), "a").await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_paused_leader_finds_its_lease_too_old_to_write() {
    let (calls, _) = calls(|_| Some(config_map()));
    assert!(calls.leadership.may_write());
    tokio::time::advance(Duration::from_secs(11)).await;
    assert!(!calls.leadership.may_write());
}

#[tokio::test(start_paused = true)]
async fn deleting_what_is_gone_is_fine() {
    let (calls, _) = calls(|_| Some(busy(404, 0)));
    assert!(!calls.delete(&api(&calls), "a", ("uid", None)).await.expect("gone already"));
}

#[tokio::test(start_paused = true)]
async fn a_refusal_of_what_is_sent_is_not_another_object() {
    for (code, field, missed) in
        [(404, "", true), (409, "", true), (422, "metadata.uid", true), (422, "", false), (422, "spec", false)]
    {
        let causes: Vec<_> = (!field.is_empty()).then(|| json!({"field": field})).into_iter().collect();
        let status = json!({"kind": "Status", "status": "Failure", "code": code, "details": {"causes": causes}});
        let (calls, _) = calls(move |_| Some((code, status.clone())));
        let error = calls.merge(&api(&calls), "a", &json!({})).await.expect_err("refused");
        assert_eq!((error.code(), error.missed()), (Some(code), missed), "{field}");
    }
}
