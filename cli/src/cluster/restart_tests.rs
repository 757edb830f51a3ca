//! What a person may ask for, what is refused and in which words, and what is waited for.

use serde_json::json;

use super::*;
use crate::cluster::fake_api::{self, Written};
use crds::episode::CONDITION_EPISODE;
use crds::recovery_note::ANNOTATION_RECOVERY;

/// A pod of `chat` whose episode `e-1` is at this stage; empty: it has none.
fn pod(stage: &str, ready: &str) -> Value {
    pod_of("StepStalled", stage, ready, &json!([]))
}

/// The same with an episode of this class, and what the driver reported.
fn pod_of(class: &str, stage: &str, ready: &str, xids: &Value) -> Value {
    let episode = json!({"id": "e-1", "class": class, "stage": stage, "xids": xids}).to_string();
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
fn server(pod: Value) -> (Client, Written) {
    fake_api::with(pod.clone(), [vec![pod.clone()], vec![pod]])
}

async fn asked(pod: Value, even_if_last: bool) -> (Result<Asked, String>, Vec<Value>) {
    let (client, written) = server(pod);
    let wish = Wish { pod: "p".to_owned(), reason: "the store is back".to_owned(), even_if_last };
    let asked = async {
        let (asked, word) = ask(&client, "serving", &wish).await?;
        word.write(&client, "serving").await?;
        anyhow::Ok(asked)
    };
    let asked = asked.await.map_err(|error| error.to_string());
    let written = written.lock().unwrap().clone();
    (asked, written)
}

#[tokio::test]
async fn a_confirmed_stall_is_asked_for_by_its_id_and_by_whom() {
    let (done, written) = asked(pod("Stalled", "False"), false).await;
    assert_eq!(done, Ok(asked_for(false)));
    assert_eq!(written[0]["metadata"]["uid"], "u", "this very pod");
    let text = written[0]["metadata"]["annotations"][ANNOTATION_RESTART].as_str().unwrap();
    let wish = RestartWish::read(text).unwrap();
    assert_eq!((wish.episode.as_str(), wish.words().as_str()), ("e-1", "asked for by ann: the store is back"));
}

fn asked_for(in_vain: bool) -> Asked {
    Asked { uid: "u".to_owned(), episode: "e-1".to_owned(), deployment: "chat".to_owned(), in_vain }
}

/// Whose restart is in vain waits for its replacement, and nothing is under way: an engine that outlives its kill, a GPU that needs more.
#[tokio::test(start_paused = true)]
async fn a_replacement_that_is_waited_for_is_asked_for_as_a_restart_is() {
    let reset = json!([{"code": 79, "gpu": "GPU-1", "remedy": "ResetGpu"}]);
    let harmless = json!([{"code": 13, "gpu": "GPU-1", "remedy": "RestartApplication"}]);
    let none = json!([]);
    for (class, stage, xids, asks) in [
        ("StepStalled", "Stalled", &none, Some(false)),
        ("Unkillable", "Stalled", &none, Some(false)),
        ("Unkillable", "Granted", &none, Some(true)),
        ("Unkillable", "Killed", &none, Some(true)),
        ("Unkillable", "Restarting", &none, None),
        ("StepStalled", "Restarting", &reset, Some(true)),
        ("Dead", "Restarting", &reset, Some(true)),
        ("StepStalled", "Restarting", &harmless, None),
        ("StepStalled", "Killed", &reset, None),
        ("StepStalled", "Granted", &none, None),
    ] {
        let mut pod = pod_of(class, stage, "False", xids);
        let (done, written) = asked(pod.clone(), false).await;
        match asks {
            Some(in_vain) => assert_eq!(done, Ok(asked_for(in_vain)), "{class} {stage} {xids}"),
            None => {
                let refused = done.as_ref().is_err_and(|error| error.contains("under way already"));
                assert!(refused && written.is_empty(), "{class} {stage} {xids}: {done:?}");
            }
        }
        if asks == Some(true) {
            // the key of the restart that is in vain still stands
            pod["metadata"]["annotations"] = json!({ANNOTATION_RESTART_GRANT: "e-1"});
            let waited = wait(&server(pod.clone()).0, "serving", "p", &asked_for(true)).await;
            assert!(waited.is_err(), "{class} {stage}: {waited:?}");
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            let waited = wait(&server(pod).0, "serving", "p", &asked_for(true)).await.unwrap();
            assert!(waited.contains("it is being replaced"), "{waited}");
        }
    }
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
    let asked = asked_for(false);
    for (pod, word) in [
        (granted(), Ok("its restart is granted")),
        (pod("Killed", "False"), Ok("under way")),
        (pod("", "True"), Ok("its stall is over")),
        (other(), Ok("it was replaced")),
        (
            pod("Stalled", "False"),
            Err("`truebeat kubectl why chat -n serving`, under EnginesProgressing or RestartsHeld"),
        ),
    ] {
        let told = wait(&server(pod).0, "serving", "p", &asked).await.map_err(|error| error.to_string());
        let fits = match (&told, word) {
            (Ok(told), Ok(word)) | (Err(told), Err(word)) => told.contains(word),
            _ => false,
        };
        assert!(fits, "{told:?} {word:?}");
    }
}
