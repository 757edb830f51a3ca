//! What is known of nodes while the server does not answer, and what becomes of the others where one refuses its marks.

use http::{Request, Response};
use kube::{Client, client::Body};
use tower_test::mock;

use super::*;
use crate::{leader::Leadership, metrics::Metrics};

/// Calls against a server that answers its n-th list by the n-th of `answers`: so many nodes, or a refusal.
fn server(answers: &'static [Option<usize>]) -> Calls {
    let (service, mut handle) = mock::pair::<Request<Body>, Response<Body>>();
    tokio::spawn(async move {
        for answer in answers {
            let Some((_, send)) = handle.next_request().await else { return };
            let node = |n: usize| json!({"metadata": {"name": format!("n{n}")}});
            let (code, text) = match answer {
                Some(count) => (200, json!({"metadata": {}, "items": (0..*count).map(node).collect::<Vec<_>>()})),
                None => {
                    (403, json!({"kind": "Status", "status": "Failure", "code": 403, "message": "no", "reason": ""}))
                }
            };
            let body = Body::from(serde_json::to_vec(&text).unwrap());
            send.send_response(Response::builder().status(code).body(body).unwrap());
        }
    });
    Calls::new(Client::new(service, "serving"), Arc::new(Leadership::default()), Arc::new(Metrics::new().unwrap()))
}

#[tokio::test(start_paused = true)]
async fn a_list_that_fails_is_asked_for_again_at_once_and_takes_nothing_away() {
    let calls = server(&[None, Some(2), None, Some(3)]);
    assert_eq!(all(&calls).await.len(), 0, "not known yet");
    sleep(ASK_AGAIN).await;
    assert_eq!(all(&calls).await.len(), 2, "a failure is no fact");
    sleep(ASK_AGAIN).await;
    assert_eq!(all(&calls).await.len(), 2, "known, and not asked");
    sleep(KNOWN_FOR).await;
    assert_eq!(all(&calls).await.len(), 2, "not listed, and as they were");
    sleep(ASK_AGAIN).await;
    assert_eq!(all(&calls).await.len(), 3);
}

/// Two nodes bear the mark of an InferenceDeployment that is gone, and the first must not be touched.
#[tokio::test(start_paused = true)]
async fn a_node_that_refuses_or_hangs_keeps_no_other_from_its_marks() {
    for code in [403, 500, NO_ANSWER] {
        assert_eq!(patched(code).await, ["PATCH /api/v1/nodes/n0", "PATCH /api/v1/nodes/n1"], "{code}");
    }
}

/// For a server that does not answer.
const NO_ANSWER: u16 = 0;

/// The nodes that a sweep patches where the first of them answers with this code.
async fn patched(code: u16) -> Vec<String> {
    let (service, mut handle) = mock::pair::<Request<Body>, Response<Body>>();
    let (say, mut said) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut unanswered = Vec::new();
        let marked = |name: &str| json!({"metadata": {"name": name, "uid": name, "labels": {LABEL_SUSPECT: "true", "avoid.truebeat.io/chat-1": "2020-01-01T00-00-00Z"}}});
        while let Some((request, send)) = handle.next_request().await {
            let line = format!("{} {}", request.method(), request.uri().path());
            let (code, answer) = match line.as_str() {
                "GET /api/v1/nodes" => (200, json!({"metadata": {}, "items": [marked("n0"), marked("n1")]})),
                "PATCH /api/v1/nodes/n0" => (
                    code,
                    json!({"kind": "Status", "status": "Failure", "code": code, "message": "no", "reason": "no"}),
                ),
                "PATCH /api/v1/nodes/n1" => (200, json!({"metadata": {"name": "n1"}})),
                _ => (200, json!({"metadata": {}, "items": []})),
            };
            _ = say.send(line);
            if code == NO_ANSWER {
                unanswered.push(send);
                continue;
            }
            let body = Body::from(serde_json::to_vec(&answer).unwrap());
            send.send_response(Response::builder().status(code).body(body).unwrap());
        }
    });
    let leadership = Arc::new(Leadership::default());
    leadership.renewed();
    let calls = Calls::new(Client::new(service, "serving"), leadership, Arc::new(Metrics::new().unwrap()));
    sweep(&calls).await.unwrap();
    let mut lines = Vec::new();
    while let Ok(line) = said.try_recv() {
        lines.push(line);
    }
    let mut patched: Vec<String> = lines.into_iter().filter(|line| line.starts_with("PATCH")).collect();
    patched.dedup(); // what may heal is tried again
    patched
}
