//! What a person may ask for, what is refused and in which words, and what is waited for.

use std::sync::{Arc, Mutex};

use serde_json::json;

use super::*;

/// A pod of `chat` whose episode `e-1` is at this stage; empty: it has none.
fn pod(stage: &str, ready: &str) -> Value {
    let episode = json!({"id": "e-1", "class": "StepStalled", "stage": stage}).to_string();
    let open = if stage.is_empty() { "False" } else { "True" };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "p", "uid": "u", "labels": {crds::LABEL_DEPLOYMENT: "chat"}, "annotations": {}},
        "status": {"conditions": [
            {"type": "Ready", "status": ready},
            {"type": CONDITION_PROGRESSING, "status": "True", "reason": "Idle"},
            {"type": CONDITION_EPISODE, "status": open, "message": if stage.is_empty() { String::new() } else { episode }},
        ]},
    })
}

/// An API server with this pod alone; what is written to it.
fn server(pod: Value) -> (Client, Arc<Mutex<Vec<Value>>>) {
    let written = Arc::new(Mutex::new(Vec::new()));
    let kept = written.clone();
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let (pod, kept) = (pod.clone(), kept.clone());
        async move {
            let (parts, body) = request.into_parts();
            let answer = match (parts.method.as_str(), parts.uri.path().ends_with("/pods")) {
                ("GET", true) => json!({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": [pod]}),
                ("PATCH", _) => {
                    let text = body.collect_bytes().await.unwrap_or_default();
                    kept.lock().unwrap().push(serde_json::from_slice(&text).unwrap_or_default());
                    pod
                }
                ("POST", _) => json!({
                    "apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview", "metadata": {},
                    "status": {"userInfo": {"username": "ann"}},
                }),
                _ => pod,
            };
            Ok::<_, std::convert::Infallible>(http::Response::new(kube::client::Body::from(
                answer.to_string().into_bytes(),
            )))
        }
    });
    (Client::new(service, "serving"), written)
}

async fn asked(pod: Value, even_if_last: bool) -> (Result<Asked, String>, Vec<Value>) {
    let (client, written) = server(pod);
    let wish = Wish { pod: "p".to_owned(), reason: "the store is back".to_owned(), even_if_last };
    let asked = ask(&client, "serving", &wish).await.map_err(|error| error.to_string());
    let written = written.lock().unwrap().clone();
    (asked, written)
}

#[tokio::test]
async fn a_confirmed_stall_is_asked_for_by_its_id_and_by_whom() {
    let (done, written) = asked(pod("Stalled", "False"), false).await;
    let wanted = Asked { uid: "u".to_owned(), episode: "e-1".to_owned(), deployment: "chat".to_owned() };
    assert_eq!(done, Ok(wanted));
    assert_eq!(written[0]["metadata"]["uid"], "u", "this very pod");
    let text = written[0]["metadata"]["annotations"][ANNOTATION_RESTART].as_str().unwrap();
    let wish = RestartWish::read(text).unwrap();
    assert_eq!((wish.episode.as_str(), wish.words().as_str()), ("e-1", "asked for by ann: the store is back"));
}

#[tokio::test]
async fn what_is_refused_says_why_and_writes_nothing() {
    let with = |field: &str, value: Value| {
        let mut pod = pod("Stalled", "False");
        pod["metadata"][field] = value;
        pod
    };
    let fence = json!({ANNOTATION_RECOVERY: r#"{"mode":"Fence","unattendedAfter":"5m","unattendedWindow":"1h"}"#});
    for (pod, word) in [
        (pod("", "True"), "no confirmed stall (Idle)"),
        (pod("Suspect", "False"), "suspected and not confirmed"),
        (pod("Restarting", "False"), "under way already (Restarting)"),
        (pod("Recovered", "True"), "no confirmed stall"),
        (pod("Stalled", "True"), "the last replica of chat in traffic"),
        (with("deletionTimestamp", json!("2026-01-01T00:00:00Z")), "on its way out"),
        (with("labels", json!({})), "belongs to no InferenceDeployment"),
        (with("annotations", fence), "mode is Fence"),
    ] {
        let (done, written) = asked(pod, false).await;
        assert!(done.as_ref().is_err_and(|error| error.contains(word)), "{word}: {done:?}");
        assert!(written.is_empty(), "{word}");
    }
    assert!(asked(pod("Stalled", "True"), true).await.0.is_ok(), "--even-if-last");
}

#[tokio::test(start_paused = true)]
async fn it_waits_for_the_grant_and_not_for_ever() {
    let granted = || {
        let mut pod = pod("Stalled", "False");
        pod["metadata"]["annotations"] = json!({ANNOTATION_RESTART_GRANT: "e-1"});
        pod
    };
    let other = || {
        let mut pod = granted();
        pod["metadata"]["uid"] = json!("another");
        pod
    };
    let asked = Asked { uid: "u".to_owned(), episode: "e-1".to_owned(), deployment: "chat".to_owned() };
    for (pod, word) in [
        (granted(), Ok("its restart is granted")),
        (pod("Killed", "False"), Ok("under way")),
        (pod("", "True"), Ok("its stall is over")),
        (other(), Ok("it was replaced")),
        (pod("Stalled", "False"), Err("`truebeat kubectl why chat`")),
    ] {
        let told = wait(&server(pod).0, "serving", "p", &asked).await.map_err(|error| error.to_string());
        let fits = match (&told, word) {
            (Ok(told), Ok(word)) | (Err(told), Err(word)) => told.contains(word),
            _ => false,
        };
        assert!(fits, "{told:?} {word:?}");
    }
}
