//! Whom a person may fence, what is written and when it is taken back, and what is waited for.

use kube::ResourceExt;
use serde_json::json;

use super::*;
use crate::cluster::fake_api;

fn pod(name: &str, ready: &str) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": name, "uid": name},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }))
    .unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_goes_silent_holds_nobody_for_ever() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    // takes connections and says nothing
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    let client = Client::try_from(kube::Config::new(server.parse().unwrap())).unwrap();
    for (fence, word) in [(Some("a look".to_owned()), "the fence is written"), (None, "the fence is off")] {
        let wish = Wish { pod: "p".to_owned(), fence, even_if_last: false };
        let told = timeout(SEEN_MAX * 2, wait(&client, "serving", &wish)).await.expect("it waits for ever");
        let told = told.unwrap_err().to_string();
        assert!(told.starts_with(word) && told.contains("kubectl get pod p"), "{told}");
    }
}

/// An API server that shows the same pod always.
fn shows(pod: &Pod) -> Client {
    let body = serde_json::to_vec(pod).unwrap();
    let service = tower::service_fn(move |_: http::Request<kube::client::Body>| {
        let answer = http::Response::new(kube::client::Body::from(body.clone()));
        async { Ok::<_, std::convert::Infallible>(answer) }
    });
    Client::new(service, "serving")
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_gone_is_not_waited_for() {
    let absent = json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}).to_string();
    let service = tower::service_fn(move |_: http::Request<kube::client::Body>| {
        let body = kube::client::Body::from(absent.clone().into_bytes());
        let answer = http::Response::builder().status(404).body(body).unwrap();
        async { Ok::<_, std::convert::Infallible>(answer) }
    });
    let client = Client::new(service, "serving");
    let wish = |fence| Wish { pod: "p".to_owned(), fence, even_if_last: false };
    let began = Instant::now();
    let fenced = wait(&client, "serving", &wish(Some("a look".to_owned()))).await.unwrap();
    let error = wait(&client, "serving", &wish(None)).await.unwrap_err().to_string();
    assert!(fenced.contains("gone meanwhile") && error.contains("gone meanwhile"), "{fenced} {error}");
    assert!(began.elapsed() < LOOK_EVERY);
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_is_out_of_traffic_for_a_reason_of_its_own_is_not_yet_fenced() {
    let pod = |ready: &str, reason: &str| -> Pod {
        let word = json!({"type": CONDITION_PROGRESSING, "status": "False", "reason": reason});
        serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "uid": "p"},
            "status": {"conditions": [{"type": "Ready", "status": ready}, word]},
        }))
        .unwrap()
    };
    let fence = || Some("a look".to_owned());
    for (fence, pod, word) in [
        (fence(), pod("False", "StepStalled"), Err("has read the fence")),
        (fence(), pod("True", FENCED_BY_PERSON), Err("still Ready")),
        (fence(), pod("False", FENCED_BY_PERSON), Ok("takes no new requests")),
        (None, pod("True", FENCED_BY_PERSON), Err("is Ready, but its agent has not said")),
        (None, pod("False", "StepStalled"), Err("not Ready after")),
        (None, pod("True", "Progressing"), Ok("Ready again")),
    ] {
        let wish = Wish { pod: "p".to_owned(), fence, even_if_last: false };
        let told = wait(&shows(&pod), "serving", &wish).await.map_err(|error| error.to_string());
        let fits = match (&told, word) {
            (Ok(told), Ok(word)) | (Err(told), Err(word)) => told.contains(word),
            _ => false,
        };
        assert!(fits, "{told:?} {word:?}");
    }
}

#[test]
fn the_last_one_that_serves_is_recognised() {
    let (a, b, sick) = (pod("a", "True"), pod("b", "True"), pod("s", "False"));
    assert!(!is_last(&a, &[a.clone(), b.clone()]));
    assert!(is_last(&a, &[a.clone(), sick.clone()]));
    assert!(!is_last(&sick, &[a.clone(), sick.clone()]), "it does not serve");
    let mut leaving = b;
    leaving.metadata.deletion_timestamp =
        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
    assert!(is_last(&a, &[a.clone(), leaving]), "one on its way out does not count");
    let mut fenced = pod("c", "True");
    fenced.annotations_mut().insert(ANNOTATION_FENCE.to_owned(), json!({"by": "ann"}).to_string());
    assert!(is_last(&a, &[a.clone(), fenced]), "nor one that a person has just fenced");
}

/// A replica of `chat`, fenced or not, and what its agent says of it.
fn replica(name: &str, fenced_by: Option<&str>, reason: &str) -> Value {
    let fence = fenced_by.map(|by| json!({"by": by, "at": "2026-01-01T00:00:00Z"}).to_string());
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "uid": name, "labels": {crds::LABEL_DEPLOYMENT: "chat"},
            "annotations": fence.map_or_else(|| json!({}), |fence| json!({ANNOTATION_FENCE: fence})),
        },
        "status": {"conditions": [
            {"type": "Ready", "status": "True"},
            {"type": CONDITION_PROGRESSING, "status": "True", "reason": reason},
        ]},
    })
}

/// What came of the wish, beside these replicas, the second of them once something is written: what was written of the fence, or why not.
async fn wished(p: Value, others: [Value; 2], fences: bool) -> (Result<(), String>, Vec<Value>) {
    let (client, written) = fake_api::with(p.clone(), others.map(|other| vec![p.clone(), other]));
    let wish = Wish { pod: "p".to_owned(), fence: fences.then(|| "a look".to_owned()), even_if_last: false };
    let done = async {
        if let Some(asked) = ask(&client, "serving", &wish).await? {
            asked.word.write(&client, "serving").await?;
            confirm(&client, "serving", &wish, &asked).await?;
        }
        anyhow::Ok(())
    };
    let done = done.await.map_err(|error| error.to_string());
    let written = written.lock().unwrap();
    (done, written.iter().map(|body| body["metadata"]["annotations"][ANNOTATION_FENCE].clone()).collect())
}

#[tokio::test]
async fn whom_nobody_could_stand_in_for_is_not_fenced() {
    let (plain, fenced) = (|| replica("q", None, "Progressing"), || replica("q", Some("bob"), "Progressing"));
    let p = || replica("p", None, "Progressing");
    let (done, written) = wished(p(), [plain(), plain()], true).await;
    assert!(done.is_ok() && written.len() == 1, "{done:?} {written:?}");
    assert_eq!(Fence::read(written[0].as_str().unwrap()).unwrap().words(), "fenced by ann: a look");
    let (done, written) = wished(p(), [fenced(), fenced()], true).await;
    assert!(done.unwrap_err().contains("the last replica of chat that serves") && written.is_empty());
    let (done, written) = wished(p(), [plain(), fenced()], true).await;
    assert!(done.unwrap_err().contains("is off again"), "bob was as quick");
    assert_eq!(written[1..], [Value::Null]);
}

#[tokio::test]
async fn a_fence_that_stands_is_not_written_over_and_none_is_not_taken_off() {
    let others = || [replica("q", None, "Progressing"), replica("q", None, "Progressing")];
    let (done, written) = wished(replica("p", Some("bob"), FENCED_BY_PERSON), others(), true).await;
    assert_eq!((done, written), (Ok(()), Vec::new()));
    let (done, written) = wished(replica("p", Some("bob"), FENCED_BY_PERSON), others(), false).await;
    assert_eq!((done, written), (Ok(()), vec![Value::Null]));
    let (done, written) = wished(replica("p", None, "StepStalled"), others(), false).await;
    assert!(done.unwrap_err().contains("bears no person's fence") && written.is_empty());
    let (done, written) = wished(replica("p", None, FENCED_BY_PERSON), others(), false).await;
    assert_eq!((done, written), (Ok(()), Vec::new()), "it is off, and waited for");
}

#[tokio::test(start_paused = true)]
async fn a_word_that_nobody_answers_may_be_written() {
    let service = tower::service_fn(|_: http::Request<kube::client::Body>| {
        std::future::pending::<Result<http::Response<kube::client::Body>, std::convert::Infallible>>()
    });
    let word = Word::of(&pod("p", "True"), ANNOTATION_FENCE, Value::Null);
    let told = word.write(&Client::new(service, "serving"), "serving").await.unwrap_err().to_string();
    assert!(told.contains("may have done so all the same") && told.contains("kubectl why p -n serving"), "{told}");
}
