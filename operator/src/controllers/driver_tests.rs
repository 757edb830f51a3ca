//! One watch against a mock server: what it reports of itself, and that a refusal only delays itself.

use http::{Request, Response};
use kube::{Client, client::Body};
use serde_json::json;
use tokio::time::Instant;
use tower_test::mock;

use super::*;
use crate::{leader::Leadership, metrics::Metrics};

/// A server that refuses the first `refusals` lists, then lists one pod; a watch is never answered.
fn context(refusals: u32) -> Arc<Context> {
    let (service, mut handle) = mock::pair::<Request<Body>, Response<Body>>();
    tokio::spawn(async move {
        let (mut lists, mut unanswered) = (0, Vec::new());
        while let Some((request, send)) = handle.next_request().await {
            if request.uri().query().unwrap_or_default().contains("watch=true") {
                unanswered.push(send);
                continue;
            }
            lists += 1;
            let labels = json!({LABEL_DEPLOYMENT: "chat"});
            let (code, answer) = if lists <= refusals {
                (
                    403,
                    json!({"kind": "Status", "status": "Failure", "code": 403, "message": "no", "reason": "Forbidden"}),
                )
            } else {
                let pod = json!({"metadata": {"name": "p", "namespace": "serving", "labels": labels}});
                (
                    200,
                    json!({"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "5"}, "items": [pod]}),
                )
            };
            let body = Body::from(serde_json::to_vec(&answer).unwrap());
            send.send_response(Response::builder().status(code).body(body).unwrap());
        }
    });
    let (leadership, metrics) = (Arc::new(Leadership::default()), Arc::new(Metrics::new().unwrap()));
    leadership.contact();
    let health = Arc::new(Health::new(leadership.clone(), metrics.clone()));
    let calls = Calls::new(Client::new(service, "serving"), leadership, metrics);
    Arc::new(Context { calls, health, namespace: None })
}

const PODS: Watched = Watched { kind: "Pod", label: None, list_every: None };

#[tokio::test(start_paused = true)]
async fn a_watch_says_whether_it_is_in_step_and_maps_members_to_their_owner() {
    let context = context(0);
    let mut requests = one::<Pod>(&context, PODS, of_owner);
    assert_eq!(context.health.faults(), ["the watch of Pod is stale"]);
    let chat = ("serving".to_owned(), "chat".to_owned());
    let mut changed = Changed::default();
    changed.note(chat, None);
    assert_eq!(requests.next().await.expect("endless"), Concerned::First { kind: "Pod", changed });
    assert!(timeout(Duration::from_secs(1), requests.next()).await.is_err());
    assert!(context.health.faults().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_refused_watch_backs_off_alone_and_comes_back() {
    let context = context(4);
    let start = Instant::now();
    let mut requests = one::<Pod>(&context, PODS, of_owner);
    assert_eq!(requests.next().await.expect("endless"), Concerned::Unlisted { kind: "Pod" }, "once");
    assert!(timeout(Duration::from_secs(2), requests.next()).await.is_err());
    assert_eq!(context.health.faults(), ["the watch of Pod is stale"]);
    assert!(matches!(requests.next().await.expect("endless"), Concerned::First { .. }));
    assert_eq!(start.elapsed().as_millis() / 100, 75, "0.5 + 1 + 2 + 4 s");
}

/// A2: the connection stands, and nothing comes over it any more. kube's own watcher would wait for an answer to the
/// watch request for ever, and report itself in step.
#[tokio::test(start_paused = true)]
async fn fault_a2_a_black_holed_watch_is_noticed() {
    let context = context(0);
    let mut requests = one::<Pod>(&context, PODS, of_owner);
    assert!(matches!(requests.next().await.expect("endless"), Concerned::First { .. }));
    assert!(context.health.faults().is_empty());
    assert!(timeout(Duration::from_millis(10_400), requests.next()).await.is_err());
    assert_eq!(context.health.faults(), ["the watch of Pod is stale"]);
    assert!(timeout(Duration::from_secs(1), requests.next()).await.is_ok(), "a new list names the pod's owner again");
}
