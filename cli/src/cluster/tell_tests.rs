//! Tests of the texts for an on-call, on objects as the API serves them.

use std::collections::BTreeMap;

use crds::fence::ANNOTATION_FENCE;
use crds::recovery_note::ANNOTATION_RECOVERY;
use serde_json::json;

use super::*;

fn now() -> Timestamp {
    "2026-11-21T10:00:00Z".parse().unwrap()
}

fn an_incident(name: &str, created: &str, outcome: Option<&str>) -> EngineIncident {
    serde_json::from_value(json!({
        "apiVersion": "inference.truebeat.io/v1alpha1",
        "kind": "EngineIncident",
        "metadata": {"name": name, "namespace": "serving", "creationTimestamp": created},
        "spec": {"deployment": "chat", "pod": "chat-abc", "podUid": "u", "node": "node-1", "class": "DeviceWait", "episodeId": "e-1", "fingerprint": "f00d"},
        "status": {
            "stage": if outcome.is_some() { "Recovered" } else { "Stalled" },
            "reasons": ["page: step 9 is under way for 2301 ms"],
            "timeline": {"suspectAt": "2026-11-21T09:58:00.000Z", "fencedAt": "2026-11-21T09:58:00.050Z", "servingAt": "2026-11-21T09:58:04.500Z"},
            "requestsLost": 8,
            "requestsRefused": 31,
            "grantedBy": outcome.map(|_| "operator"),
            "outcome": outcome,
            "duration": outcome.map(|_| "4.5s"),
            "bundle": "/var/lib/truebeat/bundles/e-1.tar.zst",
        },
    }))
    .unwrap()
}

#[test]
fn an_incident_tells_its_story_with_distances() {
    let text = incident(&an_incident("inc-1", "2026-11-21T09:58:00Z", Some("Recovered")));
    for part in [
        "inc-1: DeviceWait of chat-abc on node-1",
        "Recovered after 4.5s",
        "  - page: step 9 is under way for 2301 ms",
        "serving   2026-11-21T09:58:04.500Z  +4.5 s",
        "granted by operator",
        "requests lost 8, refused 31",
        "e-1.tar.zst",
    ] {
        assert!(text.contains(part), "{part:?} is missing in:\n{text}");
    }
    let open = incident(&an_incident("inc-1", "2026-11-21T09:58:00Z", None));
    assert!(open.contains("open: confirmed, and not restarted yet"), "{open}");
}

/// A fence that is not there, and a restart that nobody waits for, send a person the wrong way.
#[test]
fn an_episode_says_what_was_done_and_what_will_be() {
    for (stage, fenced, mode, words) in [
        ("Suspect", true, Some("Fence"), "fenced on suspicion; nothing is destroyed"),
        ("Suspect", false, Some("Observe"), "suspected, and not fenced for it; nothing is destroyed"),
        ("Stalled", true, Some("Recover"), "confirmed; the restart waits for a grant"),
        ("Stalled", true, Some("Fence"), "confirmed; mode Fence restarts nobody"),
        ("Stalled", false, Some("Observe"), "confirmed; mode Observe neither fences nor restarts"),
        ("Stalled", true, None, "confirmed, and not restarted yet"),
    ] {
        let fenced_at = fenced.then_some("2026-11-21T09:58:00.050Z");
        let text = json!({"id": "e-1", "class": "StepStalled", "stage": stage, "fencedAt": fenced_at}).to_string();
        let note = mode.map(|mode| (ANNOTATION_RECOVERY, format!("{{\"mode\": \"{mode}\"}}")));
        let sick: Pod = serde_json::from_value(json!({
            "metadata": {"name": "a", "annotations": note.into_iter().collect::<BTreeMap<_, _>>()},
            "status": {"conditions": [{"type": CONDITION_EPISODE, "status": "True", "message": text}]},
        }))
        .unwrap();
        let told = pod(&sick, &[], now());
        assert!(told.contains(&format!("  episode e-1: StepStalled; {words}\n")), "{told}");
    }
}

#[test]
fn the_table_has_open_ones_first_and_the_newest_of_the_others_next() {
    let mut all = vec![
        an_incident("old", "2026-11-20T10:00:00Z", Some("Recovered")),
        an_incident("new", "2026-11-21T09:58:45Z", Some("Cleared")),
        an_incident("open", "2026-11-19T10:00:00Z", None),
    ];
    sort(&mut all);
    let text = table(&all, false, now());
    let names: Vec<&str> = text.lines().skip(1).map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(names, ["open", "new", "old"]);
    assert!(text.starts_with("NAME ") && text.contains("75s") && text.contains("2d"), "{text}");
    assert!(table(&all, true, now()).starts_with("NAMESPACE"));
    assert_eq!(no_incidents(None, false), "no incidents");
    assert_eq!(no_incidents(Some("serving"), true), "no open incidents in namespace serving");
}

#[test]
fn a_pod_says_what_its_agent_declared() {
    let broken = json!({"type": CONDITION_EPISODE, "status": "True", "message": "{not json"});
    let stalled =
        json!({"type": CONDITION_PROGRESSING, "status": "False", "reason": "StepStalled", "message": "step 9 lasts"});
    let of = |conditions: serde_json::Value| -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "chat-abc"}, "status": {"conditions": conditions}})).unwrap()
    };
    let ages = json!({"type": CONDITION_PROGRESSING, "status": "True", "lastProbeTime": "2026-11-21T09:00:00Z"});
    let text = pod(&of(json!([ages])), &[], now());
    assert!(text.contains("makes progress (no reason given), by its word of 2026-11-21T09:00:00Z\n"), "{text}");
    let text = pod(&of(json!([stalled, broken])), &[], now());
    assert!(text.contains("makes NO progress (StepStalled)") && text.contains("  - step 9 lasts"), "{text}");
    assert!(text.contains("cannot be read") && text.contains("not Ready") && text.contains("no incidents"), "{text}");
    let foreign = pod(&of(json!([{"type": "Ready", "status": "True"}])), &[], now());
    assert!(
        foreign.contains("no agent has declared anything") && foreign.contains("yes, the pod is Ready"),
        "{foreign}"
    );
}

#[test]
fn maintenance_is_told_with_its_end_and_whether_it_is_over() {
    for (until, told) in [("2099-01-01T00:00:00Z", "no silence counts"), ("2020-01-01T00:00:00Z", "it is over")] {
        let declared = json!({"by": "ann", "why": "weights", "until": until}).to_string();
        let pod_of: Pod = serde_json::from_value(json!({
            "metadata": {"name": "chat-abc", "annotations": {"truebeat.io/maintenance": declared}},
        }))
        .unwrap();
        let text = pod(&pod_of, &[], now());
        assert!(text.contains(&format!("  maintenance declared by ann until {until}: weights; {told}; ")), "{text}");
    }
}

#[test]
fn what_upstream_knows_against_the_flags_is_told_with_its_issue() {
    let of = |args: serde_json::Value| -> InferenceDeployment {
        let engine = json!({"kind": "VLLM", "image": "vllm/vllm-openai:v0.23.0", "args": args});
        serde_json::from_value(json!({
            "apiVersion": "inference.truebeat.io/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "chat"},
            "spec": {"engine": engine, "agent": {"image": "a"}},
        }))
        .unwrap()
    };
    let text = deployment(&of(json!(["--spec-method=mtp"])), &[], &[], now());
    let known = text.lines().find(|line| line.starts_with("  known to be bad: ")).unwrap();
    assert!(known.contains("--no-async-scheduling") && known.contains("/vllm/issues/40926"), "{text}");
    assert_eq!(known_bad(&of(json!(["--spec-method=ngram"]))), "");
}

#[test]
fn whom_a_person_fenced_is_told_as_that() {
    let fence = r#"{"by": "ann", "at": "2026-11-21T09:58:00Z", "why": "a look"}"#;
    let conditions = json!([{"type": CONDITION_PROGRESSING, "status": "True", "reason": "FencedByPerson"}]);
    let fenced: Pod = serde_json::from_value(json!({
        "metadata": {"name": "chat-abc", "annotations": {ANNOTATION_FENCE: fence}}, "status": {"conditions": conditions},
    }))
    .unwrap();
    let text = pod(&fenced, &[], now());
    let said = "  traffic: no, the pod is not Ready\n  fenced by ann: a look at 2026-11-21T09:58:00Z; `truebeat kubectl unfence` ends it\n";
    assert!(text.contains(said), "{text}");
    let infd: InferenceDeployment = serde_json::from_value(json!({
        "apiVersion": "inference.truebeat.io/v1alpha1",
        "kind": "InferenceDeployment",
        "metadata": {"name": "chat"},
        "spec": {"replicas": 3, "engine": {"kind": "VLLM", "image": "i"}, "agent": {"image": "a"}},
        "status": {"replicas": 3, "readyReplicas": 1, "fencedReplicas": 2, "fencedByPerson": 1},
    }))
    .unwrap();
    let text = deployment(&infd, &[], &[], now());
    assert!(text.contains("2 fenced (1 by a person), 0 incidents open"), "{text}");
}

#[test]
fn a_wish_is_told_on_one_line_whatever_it_says() {
    let wish = json!({"by": "ann", "why": "the store is back", "episode": "e-1\n  traffic: yes\u{1b}[31m"}).to_string();
    let asked: Pod = serde_json::from_value(json!({
        "metadata": {"name": "chat-abc", "annotations": {ANNOTATION_RESTART: wish}},
    }))
    .unwrap();
    let text = pod(&asked, &[], now());
    let line = "\n  a restart was asked for by ann: the store is back for episode e-1  traffic: yes[31m\n";
    assert!(text.contains(line) && !text.contains('\u{1b}'), "{text}");
}

/// `restart` sends here whoever waits for a grant in vain.
#[test]
fn a_deployment_says_what_a_restart_waits_for() {
    let held = "3 of 4 replicas stall at once: a common cause is likely, no restart is granted; one is tried at 2026-11-21T10:05:00Z";
    let waits = "3 of 4 engines make no progress: a, b, c; a restart waits for the fleet's budget, held by ns/other";
    let condition = |type_: &str, status: &str, reason: &str, message: &str| {
        let at = "2026-11-21T09:58:45Z";
        json!({"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": at})
    };
    let infd: InferenceDeployment = serde_json::from_value(json!({
        "apiVersion": "inference.truebeat.io/v1alpha1",
        "kind": "InferenceDeployment",
        "metadata": {"name": "chat"},
        "spec": {"replicas": 4, "engine": {"kind": "VLLM", "image": "i"}, "agent": {"image": "a"}},
        "status": {"conditions": [
            condition("RestartsHeld", "True", "CommonCause", held),
            condition("EnginesProgressing", "False", "EngineNotProgressing", waits),
        ]},
    }))
    .unwrap();
    let text = deployment(&infd, &[], &[], now());
    assert!(text.contains(&format!("  RestartsHeld=True (CommonCause) for 75s: {held}\n")), "{text}");
    assert!(text.contains(&format!("  EnginesProgressing=False (EngineNotProgressing) for 75s: {waits}\n")), "{text}");
}

#[test]
fn a_deployment_says_its_conditions_and_at_most_five_incidents() {
    let infd: InferenceDeployment = serde_json::from_value(json!({
        "apiVersion": "inference.truebeat.io/v1alpha1",
        "kind": "InferenceDeployment",
        "metadata": {"name": "chat"},
        "spec": {"replicas": 3, "engine": {"kind": "VLLM", "image": "i"}, "agent": {"image": "a"}},
        "status": {"replicas": 3, "readyReplicas": 2, "fencedReplicas": 1, "conditions": [{
            "type": "EnginesProgressing", "status": "False", "reason": "EngineNotProgressing",
            "message": "1 of 3", "lastTransitionTime": "2026-11-21T09:58:45Z",
        }]},
    }))
    .unwrap();
    let incidents = vec![an_incident("inc", "2026-11-21T09:58:00Z", None); 7];
    let text = deployment(&infd, &[], &incidents, now());
    assert!(text.contains("3 wanted, 3 there, 2 ready") && text.contains("1 fenced"), "{text}");
    assert!(text.contains("EnginesProgressing=False (EngineNotProgressing) for 75s: 1 of 3"), "{text}");
    assert!(text.contains("7 incidents, the newest 5"), "{text}");
    assert_eq!(text.matches("inc: DeviceWait").count(), 5);
}

#[test]
fn fault_f1_a_xid_is_told_with_what_mends_it() {
    let xid = json!({"code": 79, "gpu": "GPU-1\u{1b}[31m", "remedy": "RestartNode"});
    let line = "  the driver reports Xid 79 of GPU-1[31m: the node must be drained and restarted\n";
    let mut one = an_incident("inc", "2026-11-21T09:58:00Z", None);
    one.spec.xids = vec![serde_json::from_value(xid.clone()).unwrap()];
    assert!(incident(&one).contains(line), "{}", incident(&one));
    let text = json!({"id": "e-1", "class": "Dead", "stage": "Restarting", "xids": [xid]}).to_string();
    let conditions = json!([{"type": CONDITION_EPISODE, "status": "True", "message": text}]);
    let sick: Pod =
        serde_json::from_value(json!({"metadata": {"name": "a"}, "status": {"conditions": conditions}})).unwrap();
    assert!(pod(&sick, &[], now()).contains(line), "{}", pod(&sick, &[], now()));
    let avoid = json!([{"node": "n1", "until": "2026-11-21T11:00:00Z", "because": "GpuFault", "xids": [xid]}]);
    let broken = json!([{"node": "n2", "until": "2026-11-21T11:00:00Z", "because": "GpuFault", "xids": [xid]}]);
    let infd: InferenceDeployment = serde_json::from_value(json!({
        "apiVersion": "inference.truebeat.io/v1alpha1",
        "kind": "InferenceDeployment",
        "metadata": {"name": "chat"},
        "spec": {"replicas": 3, "engine": {"kind": "VLLM", "image": "i"}, "agent": {"image": "a"}},
        "status": {"recovery": {"avoid": avoid, "broken": broken}},
    }))
    .unwrap();
    let text = deployment(&infd, &[], &[], now());
    assert!(text.contains("keep away from node n1 until 2026-11-21T11:00:00Z\n") && text.contains(line), "{text}");
    assert!(text.contains("node n2 is broken, and new pods") && text.matches(line).count() == 2, "{text}");
}
