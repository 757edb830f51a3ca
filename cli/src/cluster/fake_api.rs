//! For tests: an API server that has one pod by name, lists pods, knows who asks, and keeps what is written to it.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

/// What was written, a body each.
pub type Written = Arc<Mutex<Vec<Value>>>;

/// With this pod by name; these are listed before anything is written, and after it. `ann` asks.
pub fn with(pod: Value, [before, after]: [Vec<Value>; 2]) -> (Client, Written) {
    let written = Written::default();
    let kept = written.clone();
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let (pod, before, after, kept) = (pod.clone(), before.clone(), after.clone(), kept.clone());
        async move {
            let (parts, body) = request.into_parts();
            let text = body.collect_bytes().await.unwrap_or_default();
            let mut kept = kept.lock().unwrap();
            let answer = match (parts.method.as_str(), parts.uri.path().ends_with("/pods")) {
                ("GET", true) => {
                    let items = if kept.is_empty() { before } else { after };
                    json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items})
                }
                ("PATCH", _) => {
                    kept.push(serde_json::from_slice(&text).unwrap_or_default());
                    pod
                }
                ("POST", _) => json!({
                    "apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview", "metadata": {},
                    "status": {"userInfo": {"username": "ann"}},
                }),
                _ => pod,
            };
            Ok::<_, Infallible>(http::Response::new(Body::from(answer.to_string().into_bytes())))
        }
    });
    (Client::new(service, "serving"), written)
}
