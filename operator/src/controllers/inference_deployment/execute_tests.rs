//! The writes as the API server sees them: verb, path, preconditions, order. A mock answers.

use std::sync::{Arc, Mutex};

use http::{Request, Response};
use kube::{Client, client::Body};
use serde_json::Value;
use tower_test::mock;

use super::*;
use crate::{
    controllers::{
        inference_deployment::{
            build::build,
            observed::{ANNOTATION_DELETION_COST, EpisodeView, Observed, PodView},
            plan::plan,
            testing::{infd, looked, pod},
        },
        nodes::view::NodeView,
    },
    leader::Leadership,
    metrics::Metrics,
};

type Log = Arc<Mutex<Vec<(String, Value)>>>;

/// Requests for this pod are answered late.
const SLOW: &str = "/pods/slow";

/// Calls against a server that echoes bodies, or answers `refuse` with that status where the line contains it. It has nothing to be read, but
/// for what `refuse` answers 200 to.
fn server(refuse: Option<(&'static str, u16)>) -> (Calls, Log) {
    let (service, mut handle) = mock::pair::<Request<Body>, Response<Body>>();
    let log = Log::default();
    let seen = log.clone();
    tokio::spawn(async move {
        while let Some((request, send)) = handle.next_request().await {
            let line = format!("{} {}", request.method(), request.uri().path());
            let bytes = request.into_body().collect_bytes().await.unwrap();
            let body: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
            let reads = line.starts_with("GET");
            let meant = refuse.filter(|(part, _)| line.contains(part) && part.starts_with("GET") == reads);
            let code = meant.map_or(if reads { 404 } else { 200 }, |(_, code)| code);
            let mut full = if reads { json!({"metadata": {"name": "theirs"}}) } else { body.clone() };
            if line.contains("engineincidents") && full.get("spec").is_none() {
                full["spec"] = json!(crds::EngineIncidentSpec::default()); // a status patch is answered with the whole object
            }
            let answer = if code == 200 {
                full
            } else {
                let reason = if code == 404 { "NotFound" } else { "" };
                json!({"kind": "Status", "status": "Failure", "code": code, "message": "no", "reason": reason})
            };
            if !reads {
                seen.lock().unwrap().push((line.clone(), body));
            }
            let body = Body::from(serde_json::to_vec(&answer).unwrap());
            let response = Response::builder().status(code).body(body).unwrap();
            if line.ends_with(SLOW) {
                let seen = seen.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                    seen.lock().unwrap().push((format!("answered {line}"), Value::Null));
                    send.send_response(response);
                });
            } else {
                send.send_response(response);
            }
        }
    });
    let leadership = Arc::new(Leadership::default());
    leadership.renewed();
    let calls = Calls::new(Client::new(service, "serving"), leadership, Arc::new(Metrics::new().unwrap()));
    (calls, log)
}

fn frozen() -> Observed {
    let pods: Vec<PodView> = vec![pod("a", "Stalled", 1), pod("b", "Stalled", 2)];
    looked(infd("chat"), pods)
}

async fn run(
    refuse: Option<(&'static str, u16)>,
    observed: &Observed,
) -> (Result<Vec<StepError>, String>, Vec<(String, Value)>) {
    let (calls, log) = server(refuse);
    let plan = plan(observed, build(&observed.infd), None, jiff::Timestamp::UNIX_EPOCH);
    let result = super::super::execute_plan(&calls, observed, &plan, &[], None).await.map_err(|e| e.to_string());
    let log = log.lock().unwrap().clone();
    (result, log)
}

const INFD_STATUS: &str =
    "PUT /apis/inference.truebeat.io/v1alpha1/namespaces/serving/inferencedeployments/chat/status";

#[tokio::test]
async fn the_budget_is_stored_before_a_pod_hears_of_it() {
    let (result, log) = run(None, &frozen()).await;
    assert_eq!(result, Ok(Vec::new()));
    let position = |line: &str| log.iter().position(|(l, _)| l == line).unwrap_or_else(|| panic!("{line} in {log:#?}"));
    // (who goes first was said before)
    let last = |line: &str| log.iter().rposition(|(l, _)| l == line).unwrap_or_else(|| panic!("{line} in {log:#?}"));
    let (children, stored) =
        (position("PATCH /apis/apps/v1/namespaces/serving/deployments/chat"), position(INFD_STATUS));
    let told = last("PATCH /api/v1/namespaces/serving/pods/a");
    assert!(children < stored && stored < told, "{log:#?}");
    assert_eq!(log[stored].1["metadata"]["resourceVersion"], "1", "the optimistic lock");
    assert_eq!(log[stored].1["status"]["recovery"]["grants"][0]["podUid"], "uid-a");
    assert_eq!(log[told].1["metadata"]["uid"], "uid-a", "the UID precondition");
    assert_eq!(log[told].1["metadata"]["annotations"]["truebeat.io/restart-grant"], "e-a");
    let other = last("PATCH /api/v1/namespaces/serving/pods/b");
    assert!(log[other].1["metadata"]["annotations"].get("truebeat.io/restart-grant").is_none(), "one at a time");
}

/// A forced apply would take it, and the next look tells whose it is.
#[tokio::test]
async fn what_was_made_since_the_look_is_not_taken() {
    let (result, log) = run(Some(("GET /api/v1/namespaces/serving/services/chat", 200)), &frozen()).await;
    let errors = result.unwrap();
    assert!(matches!(&errors[..], [one] if one.subject == "apply Service chat" && !one.lasting), "{errors:?}");
    assert!(!log.iter().any(|(line, _)| line.contains("/services/")), "{log:#?}");
    assert!(log.iter().any(|(line, _)| line.ends_with("/deployments/chat")), "one child does not stop the others");
}

/// What was looked at is meant, and not what has its name by now (P8).
#[tokio::test]
async fn a_child_is_applied_to_the_object_that_was_looked_at() {
    let mut observed = frozen();
    let owner = json!({"uid": observed.infd.metadata.uid, "controller": true});
    let service = json!({"metadata": {"uid": "uid-service", "ownerReferences": [owner]}});
    observed.children.insert("Service".to_owned(), service);
    let (result, log) = run(None, &observed).await;
    assert_eq!(result, Ok(Vec::new()));
    let (_, body) = log.iter().find(|(line, _)| line.ends_with("/services/chat")).unwrap();
    assert_eq!(body["metadata"]["uid"], "uid-service");
}

/// Nobody else may grant before this budget stands, and nobody waits for one tenant's children.
#[tokio::test]
async fn the_turn_is_given_back_when_the_budget_is_stored() {
    let mut observed = frozen();
    observed.pods[1].name = "slow".to_owned();
    let (calls, log) = server(None);
    let plan = plan(&observed, build(&observed.infd), None, jiff::Timestamp::UNIX_EPOCH);
    let turn = tokio::sync::Mutex::new(());
    let taken = turn.lock().await;
    let next = async {
        let _turn = turn.lock().await;
        log.lock().unwrap().iter().map(|(line, _)| line.clone()).collect::<Vec<_>>()
    };
    let (result, before) = tokio::join!(super::super::execute_plan(&calls, &observed, &plan, &[], Some(taken)), next);
    assert!(result.is_ok_and(|errors| errors.is_empty()));
    assert_eq!(before.first().map(String::as_str), Some(INFD_STATUS));
    assert!(!before.iter().any(|line| line.contains("/deployments/") || line.starts_with("answered")), "{before:#?}");
    let all = log.lock().unwrap();
    let stored = all.iter().filter(|(line, _)| line == INFD_STATUS).count();
    assert_eq!(stored, 2, "the budget once, and the conditions: {all:#?}");
}

/// Whoever dies between the two leaves a note too many, and not a frozen replica that outlives a healthy one.
#[tokio::test]
async fn who_goes_first_is_said_before_the_number_falls() {
    let (result, log) = run(None, &frozen()).await;
    assert_eq!(result, Ok(Vec::new()));
    let position = |line: &str| log.iter().position(|(l, _)| l == line).unwrap_or_else(|| panic!("{line} in {log:#?}"));
    let children = position("PATCH /apis/apps/v1/namespaces/serving/deployments/chat");
    for pod in ["a", "b"] {
        let told = position(&format!("PATCH /api/v1/namespaces/serving/pods/{pod}"));
        let annotations = log[told].1["metadata"]["annotations"].as_object().unwrap();
        assert_eq!(
            annotations.keys().collect::<Vec<_>>(),
            [ANNOTATION_DELETION_COST],
            "nothing that must be stored first"
        );
        assert!(told < children, "{log:#?}");
    }
}

#[tokio::test]
async fn who_is_granted_a_restart_hears_of_it_when_the_others_have_been_told() {
    let mut observed = frozen();
    observed.pods[1].name = "slow".to_owned();
    let (result, log) = run(None, &observed).await;
    assert_eq!(result, Ok(Vec::new()));
    let position =
        |line: &str| log.iter().rposition(|(l, _)| l == line).unwrap_or_else(|| panic!("{line} in {log:#?}"));
    let answered = position("answered PATCH /api/v1/namespaces/serving/pods/slow");
    assert!(answered < position("PATCH /api/v1/namespaces/serving/pods/a"), "{log:#?}");
}

/// Stalls of `chat` that the metrics say were repaired, after a pass over this pod.
async fn repaired(refuse: Option<(&'static str, u16)>, pod: PodView) -> String {
    let observed = looked(infd("chat"), vec![pod]);
    let (calls, _) = server(refuse);
    let plan = plan(&observed, build(&observed.infd), None, "2026-01-01T00:02:00Z".parse().unwrap());
    let _ = super::super::execute_plan(&calls, &observed, &plan, &[], None).await;
    let text = String::from_utf8(calls.metrics.text().unwrap()).unwrap();
    let of = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("truebeat_operator_stall_seconds_{name}")));
        line.map(|line| line.replace("deployment=\"chat\",namespace=\"serving\",", "")).unwrap_or_default()
    };
    of("sum") + &of("count")
}

#[tokio::test]
async fn a_repaired_stall_is_observed_where_its_record_is_stored() {
    let mut stalled = pod("a", "Recovered", 10);
    let EpisodeView::Known(reported) = &mut stalled.episode else { panic!("it reports an episode") };
    reported.episode.confirmed_at = Some("2026-01-01T00:00:12Z".to_owned());
    let once = "{outcome=\"Recovered\"} 50{outcome=\"Recovered\"} 1";
    assert_eq!(repaired(None, stalled.clone()).await, once);
    assert_eq!(repaired(Some(("engineincidents", 500)), stalled).await, "", "the next pass stores and observes it");
    assert_eq!(repaired(None, pod("a", "Cleared", 10)).await, "", "a suspicion that came to nothing");
}

/// The driver drops a pass that takes too long, whatever it waits for.
#[tokio::test(start_paused = true)]
async fn who_is_dropped_while_the_budget_is_written_leaves_the_book_closed() {
    let (service, mut handle) = mock::pair::<Request<Body>, Response<Body>>();
    tokio::spawn(async move {
        let mut unanswered = Vec::new();
        while let Some(request) = handle.next_request().await {
            unanswered.push(request);
        }
    });
    let leadership = Arc::new(Leadership::default());
    leadership.renewed();
    let calls = Calls::new(Client::new(service, "serving"), leadership, Arc::new(Metrics::new().unwrap()));
    let ledger = &calls.fleet.ledger;
    ledger.open(std::collections::BTreeMap::new(), Instant::now(), "");
    let wanted = InferenceDeploymentStatus { replicas: 7, ..InferenceDeploymentStatus::default() };
    let (infd, soon) = (infd("chat"), std::time::Duration::from_millis(10));
    assert!(tokio::time::timeout(soon, status(&calls, &infd, wanted)).await.is_err(), "no answer yet");
    assert_eq!(ledger.others("another", Instant::now()), None, "it may be stored");
}

#[tokio::test]
async fn a_lost_race_for_the_budget_tells_no_pod() {
    let (result, log) = run(Some(("/status", 409)), &frozen()).await;
    assert!(result.is_err_and(|e| e.contains("store the status")));
    let hears = |body: &Value| body["metadata"]["annotations"].get(crds::episode::ANNOTATION_RESTART_GRANT).is_some();
    assert!(!log.iter().any(|(line, body)| line.contains("/pods/") && hears(body)), "{log:#?}");
}

#[tokio::test]
async fn a_pod_that_is_gone_meanwhile_is_no_error() {
    let (result, log) = run(Some(("/pods/", 404)), &frozen()).await;
    assert_eq!(result, Ok(Vec::new()));
    assert!(log.iter().any(|(line, _)| line.contains("engineincidents")), "the records are still written");
}

/// By that code a ValidatingAdmissionPolicy refuses, where its author names no other.
#[tokio::test]
async fn a_pod_that_may_not_hear_of_its_grant_is_an_error_that_lasts() {
    let (result, log) = run(Some(("/pods/a", 422)), &frozen()).await;
    let errors = result.expect("the pass goes on");
    assert!(!errors.is_empty() && errors.iter().all(|error| error.lasting), "{errors:?}");
    let status = &log.iter().rfind(|(line, _)| line == INFD_STATUS).unwrap().1["status"];
    let stalled = status["conditions"].as_array().unwrap().iter().find(|c| c["type"] == "Stalled").unwrap();
    assert_eq!(stalled["reason"], "Refused");
}

#[tokio::test]
async fn a_pod_is_deleted_as_it_was_looked_at_or_left_to_the_next_look() {
    let mut observed = frozen();
    observed.infd.spec.recovery.restarts_before_replace = 0;
    observed.pods[0].version = "7".to_owned();
    for refuse in [None, Some(("DELETE /api/v1/namespaces/serving/pods/a", 409))] {
        let (result, log) = run(refuse, &observed).await;
        assert_eq!(result, Ok(Vec::new()), "{refuse:?}");
        let of_it: Vec<_> = log.iter().filter(|(line, _)| line.ends_with("/pods/a")).collect();
        let exactly = &of_it[0].1["preconditions"];
        assert_eq!((of_it.len(), exactly), (1, &json!({"uid": "uid-a", "resourceVersion": "7"})), "{log:#?}");
    }
}

/// Two are replaced at once; the webhook of one node is down, for long.
#[tokio::test(start_paused = true)]
async fn fault_a13_a_node_that_cannot_be_marked_holds_its_own_pod_alone_and_not_for_ever() {
    let mut observed = frozen();
    (observed.infd.spec.recovery.restarts_before_replace, observed.infd.spec.recovery.max_unavailable) = (0, 2);
    observed.infd.spec.recovery.avoid_nodes_percent = 50;
    let node = |n: u8| NodeView { name: format!("n{n}"), usable: true, ..NodeView::default() };
    (observed.nodes, observed.pods[1].node) = ((1..=4).map(node).collect(), "n2".to_owned());
    let plan = plan(&observed, build(&observed.infd), None, "2026-01-01T00:02:00Z".parse().unwrap());
    assert_eq!(plan.marks.len(), 2);
    let (calls, log) = server(Some(("PATCH /api/v1/nodes/n1", 500)));
    let look = async || {
        calls.leadership.renewed();
        let errors = replaces(&calls, &observed.infd, &plan, &BTreeSet::new()).await;
        let mut log = log.lock().unwrap();
        let gone: Vec<String> = log.drain(..).map(|(line, _)| line).filter(|line| line.starts_with("DELETE")).collect();
        (errors, gone.iter().map(|line| line.chars().last().unwrap()).collect::<String>())
    };
    let (errors, gone) = look().await;
    assert!(errors.len() == 1 && errors[0].subject.contains("node n1") && !errors[0].lasting, "{errors:?}");
    assert_eq!(gone, "b", "the other node is marked");
    tokio::time::sleep(std::time::Duration::from_secs(31)).await;
    assert_eq!(look().await, (Vec::new(), "ab".to_owned()), "a suspicion is worth less than a replica");
}

#[tokio::test]
async fn a_refused_child_does_not_stop_recovery_and_shows_in_the_status() {
    let (result, log) = run(Some(("/services/", 403)), &frozen()).await;
    let errors = result.expect("the pass goes on");
    assert!(errors.len() == 1 && errors[0].lasting, "{errors:?}");
    assert!(log.iter().any(|(line, _)| line.contains("/pods/a")), "the grant went out");
    let status = &log.iter().rfind(|(line, _)| line == INFD_STATUS).unwrap().1["status"];
    let stalled = status["conditions"].as_array().unwrap().iter().find(|c| c["type"] == "Stalled").unwrap();
    assert_eq!(stalled["reason"], "Refused");
}

/// Each write of the status is an event that starts the next pass, so a failure that lasts must settle to none.
#[tokio::test]
async fn a_late_write_that_always_fails_is_told_once() {
    let mut observed = frozen();
    let mut writes = Vec::new();
    for _ in 0..4 {
        let (result, log) = run(Some(("/engineincidents/", 422)), &observed).await;
        assert!(result.is_ok_and(|errors| errors.len() == 2));
        let stored: Vec<&Value> = log.iter().filter(|(line, _)| line == INFD_STATUS).map(|(_, body)| body).collect();
        if let Some(last) = stored.last() {
            observed.infd = serde_json::from_value((*last).clone()).unwrap();
        }
        writes.push(stored.len());
    }
    assert_eq!(writes, [2, 0, 0, 0], "the budget and the conditions, then silence");
    let status = observed.infd.status.unwrap();
    assert!(status.conditions.iter().any(|c| c.type_ == "Stalled" && c.reason == "Refused"), "{status:?}");
}

#[tokio::test]
async fn the_early_write_holds_the_old_conditions() {
    let (_, log) = run(None, &frozen()).await;
    let stored: Vec<&Value> =
        log.iter().filter(|(line, _)| line == INFD_STATUS).map(|(_, body)| &body["status"]).collect();
    assert_eq!(stored.len(), 2);
    assert_eq!((&stored[0]["openIncidents"], stored[0].get("conditions")), (&json!(2), None));
    assert!(stored[1]["conditions"].is_array() && stored[1]["recovery"] == stored[0]["recovery"]);
}

#[tokio::test]
async fn events_come_last_and_a_refused_one_is_no_error() {
    let (result, log) = run(Some(("/events", 403)), &frozen()).await;
    assert_eq!(result, Ok(Vec::new()));
    let line = "POST /apis/events.k8s.io/v1/namespaces/serving/events";
    assert_eq!(log.iter().position(|(l, _)| l == line), Some(log.len() - 1), "{log:#?}");
}
