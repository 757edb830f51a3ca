//! Pods as they are read, whose they are, and what of their words counts.

use super::*;
use serde_json::json;

fn pod(conditions: Value) -> ListedPod {
    serde_json::from_value(json!({
        "metadata": {
            "name": "chat-5d8f-x", "uid": "u1", "labels": {LABEL_DEPLOYMENT: "chat", LABEL_REVISION: "r1", LABEL_TEMPLATE_HASH: "5d8f"},
            "annotations": {ANNOTATION_RESTART_GRANT: "e-1"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "chat-5d8f", "uid": "r", "controller": true}],
        },
        "spec": {"containers": [], "nodeName": "n1"},
        "status": {"phase": "Running", "conditions": conditions, "containerStatuses": [
            {"name": "engine", "restartCount": 2, "image": "", "imageID": "", "ready": true},
        ]},
    }))
    .unwrap()
}

fn condition(type_: &str, status: &str, message: &str) -> Value {
    json!({"type": type_, "status": status, "message": message})
}

#[test]
fn a_pod_is_seen_whole() {
    let text =
        json!({"id": "e-1", "class": "Livelock", "stage": "Stalled", "fencedAt": "2026-01-01T00:00:00Z"}).to_string();
    let seen = view(&pod(json!([
        condition("Ready", "False", ""),
        condition(CONDITION_PROGRESSING, "False", "no token for 5 s"),
        condition(CONDITION_EPISODE, "True", &text),
        condition(CONDITION_HEALTH_LIE, "True", "/health answers 200"),
    ])));
    assert!(seen.health_lies && !view(&pod(json!([condition(CONDITION_HEALTH_LIE, "False", "")]))).health_lies);
    assert_eq!((seen.ready, seen.progressing, seen.fenced(), seen.leaving), (false, Some(false), true, false));
    assert_eq!((seen.node.as_str(), seen.grant.as_deref()), ("n1", Some("e-1")));
    assert_eq!((seen.revision.as_str(), seen.restarts), ("r1", 2));
    assert!(seen.open_episode().is_some_and(Episode::awaits_grant));
}

#[test]
fn a_pod_leaves_since_it_was_asked_to_and_not_since_its_grace_is_over() {
    let mut pod = pod(json!([]));
    assert_eq!(view(&pod).leaving_since, None);
    pod.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:01:00Z")).unwrap();
    let since = |grace| {
        let mut pod = pod.clone();
        pod.metadata.deletion_grace_period_seconds = grace;
        view(&pod).leaving_since
    };
    assert_eq!(since(Some(45)).as_deref(), Some("2026-01-01T00:00:15Z"));
    assert_eq!(since(None).as_deref(), Some("2026-01-01T00:01:00Z"));
}

#[test]
fn an_agent_is_away_where_the_kubelet_says_so_and_nowhere_else() {
    let seen = |statuses: Value| {
        let mut pod = pod(json!([]));
        let status = pod.status.as_mut().unwrap();
        status.init_container_statuses = serde_json::from_value(statuses).unwrap();
        view(&pod).agent_away
    };
    let one = |name: &str, state: Value| json!([{"name": name, "restartCount": 7, "image": "", "imageID": "", "ready": false, "state": state}]);
    assert!(seen(one("agent", json!({"waiting": {"reason": "CrashLoopBackOff"}}))));
    assert!(seen(one("agent", json!({"terminated": {"exitCode": 137}}))));
    for here in [
        one("agent", json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}})),
        one("agent", json!({})),
        one("weights", json!({"terminated": {"exitCode": 0}})),
        json!([]),
        Value::Null,
    ] {
        assert!(!seen(here.clone()), "{here}");
    }
}

#[test]
fn silence_and_nonsense_are_told_apart() {
    assert_eq!(view(&pod(json!([]))).episode, EpisodeView::None);
    assert_eq!(view(&pod(json!([condition(CONDITION_EPISODE, "False", "")]))).episode, EpisodeView::None);
    for (status, text) in [("True", ""), ("True", "{"), ("False", "[]")] {
        let seen = view(&pod(json!([condition(CONDITION_EPISODE, status, text)])));
        assert!(matches!(seen.episode, EpisodeView::Unreadable(_)), "{status} {text:?}");
    }
}

#[test]
fn a_pod_that_ended_for_good_is_gone_whatever_its_agent_said_last() {
    for (phase, count) in [("Pending", 1), ("Running", 1), ("Unknown", 1), ("Failed", 0), ("Succeeded", 0)] {
        let mut pod = pod(json!([]));
        pod.status.as_mut().unwrap().phase = Some(phase.to_owned());
        assert_eq!(members(&[pod], "chat").len(), count, "{phase}");
    }
}

#[test]
fn a_label_alone_makes_no_member() {
    let mut stranger = pod(json!([]));
    assert!(belongs(&stranger, "chat"));
    assert!(!belongs(&stranger, "cha"));
    // one of a Deployment `chat-canary`, whose author copied the template with its labels
    stranger.metadata.owner_references.as_mut().unwrap()[0].name = "chat-canary-5d8f".to_owned();
    assert!(!belongs(&stranger, "chat"));
    // one of a ReplicaSet that no Deployment made
    stranger.metadata.owner_references.as_mut().unwrap()[0].name = "chat-5d8f".to_owned();
    stranger.metadata.labels.as_mut().unwrap().remove(LABEL_TEMPLATE_HASH);
    assert!(!belongs(&stranger, "chat"));
    stranger.metadata.owner_references = None;
    assert!(!belongs(&stranger, "chat"));
}

#[test]
fn fault_a16_whom_label_and_owner_tell_apart_is_named_and_no_member() {
    let named = |change: fn(&mut ListedPod)| {
        let mut one = pod(json!([]));
        change(&mut one);
        let pods = [one];
        (members(&pods, "chat").len(), doubted(&pods, "chat"))
    };
    assert_eq!(named(|_| ()), (1, vec![]));
    assert_eq!(named(|pod| pod.metadata.owner_references = None), (0, vec!["chat-5d8f-x".to_owned()]));
    let flipped = |pod: &mut ListedPod| {
        pod.metadata.owner_references.as_mut().unwrap()[0].kind = "ReplicaSex".to_owned();
    };
    assert_eq!(named(flipped), (0, vec!["chat-5d8f-x".to_owned()]));
    let over = |pod: &mut ListedPod| {
        pod.metadata.owner_references = None;
        pod.status.as_mut().unwrap().phase = Some("Failed".to_owned());
    };
    assert_eq!(named(over), (0, vec![]), "it holds nothing any more");
}

#[test]
fn a_word_with_a_time_ages_and_one_without_does_not() {
    let now: Timestamp = "2026-01-01T01:00:00Z".parse().unwrap();
    let seen = |time: Option<&str>| {
        let mut word = condition(CONDITION_PROGRESSING, "True", "");
        word["lastProbeTime"] = json!(time);
        let seen = view(&pod(json!([condition("Ready", "True", ""), word])));
        (seen.progresses(now), seen.word_is_old(now))
    };
    assert_eq!(seen(None), (true, false), "the kubelet vouches for it, or its agent is an older one");
    assert_eq!(seen(Some("2026-01-01T00:36:00Z")), (true, false));
    assert_eq!(seen(Some("2026-01-01T00:34:00Z")), (false, true));
    assert_eq!(seen(Some("2026-01-01T02:00:00Z")), (true, false), "a clock that is ahead");
}

#[test]
fn what_a_deleted_one_of_the_same_name_has_left_goes_and_is_nobody_elses() {
    let infd = crate::controllers::inference_deployment::testing::infd("chat");
    let owner = |kind: &str, name: &str, uid: &str| json!({"kind": kind, "name": name, "uid": uid, "controller": true});
    let apart = |metadata: Value| {
        let mut children = [("Service".to_owned(), json!({"metadata": metadata}))].into();
        let going = set_going_apart(&mut children, &infd);
        (going == ["Service"], children.len())
    };
    let of = |owner: Value| apart(json!({"ownerReferences": [owner]}));
    let (goes, stays, goes_by_itself) = ((true, 0), (false, 1), (true, 1));
    assert_eq!(of(owner("InferenceDeployment", "chat", "uid-before")), goes);
    assert_eq!(of(owner("InferenceDeployment", "chat", "uid-infd")), stays, "its own");
    assert_eq!(of(owner("InferenceDeployment", "other", "uid-before")), stays, "of another that may be there");
    assert_eq!(of(owner("Rollout", "chat", "uid-before")), stays);
    assert_eq!(apart(json!({})), stays, "of nobody: it does not go");
    let own = json!([owner("InferenceDeployment", "chat", "uid-infd")]);
    let deleted = json!({"deletionTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": own});
    assert_eq!(apart(deleted), goes_by_itself, "what it was is still to be seen");
}
