//! Conditions and counts as tables over small worlds.

use super::*;
use crate::controllers::inference_deployment::{
    plan::plan,
    testing::{healthy, infd, looked, pod},
};
use crds::fence::Fence;
use serde_json::json;

fn now() -> Timestamp {
    "2026-01-01T00:02:00Z".parse().unwrap()
}

fn world(pods: Vec<PodView>) -> Observed {
    let live = json!({
        "metadata": {"generation": 1}, "spec": {"replicas": 2},
        "status": {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2},
    });
    Observed { children: [("Deployment".to_owned(), live)].into(), ..looked(infd("chat"), pods) }
}

/// One of two replicas cannot be made.
fn quota() -> Observed {
    let mut observed = world(vec![healthy("a")]);
    let live = observed.children.get_mut("Deployment").unwrap();
    live["status"]["replicas"] = json!(1);
    let message = "pods \"chat-x\" is forbidden: exceeded quota: pods=1";
    live["status"]["conditions"] = json!([{"type": "ReplicaFailure", "status": "True", "message": message}]);
    observed
}

#[test]
fn fault_a18_what_is_refused_is_said_in_the_servers_words() {
    let observed = quota();
    let status = status(&observed, &plan(&observed, Vec::new(), None, now()), &[], &[], now());
    for type_ in [conditions::READY, conditions::RECONCILING] {
        let said = status.conditions.iter().find(|c| c.type_ == type_).unwrap();
        assert!(said.reason == "PodsRefused" && said.message.contains("exceeded quota: pods=1"), "{said:?}");
    }
}

#[test]
fn a_stall_that_waits_for_somebody_elses_slot_says_whose() {
    use crate::controllers::inference_deployment::fleet::Fleet;
    let observed = world(vec![healthy("a"), pod("b", "Stalled", 1)]);
    let (holders, grants_at) = (vec!["ns/other".to_owned()], vec![("n2".to_owned(), String::new())]);
    let fleet = Fleet {
        replicas: 8,
        granted: 1,
        restarts_percent: 10,
        hold_percent: 30,
        holders,
        grants_at,
        ..Fleet::default()
    };
    let plan = plan(&observed, Vec::new(), Some(&fleet), now());
    assert_eq!(plan.grants, []);
    let status = status(&observed, &plan, &[], &[], now());
    let said = status.conditions.iter().find(|c| c.type_ == conditions::ENGINES_PROGRESSING).unwrap();
    let wanted = "1 of 2 engines make no progress: b; a restart waits for the fleet's budget, held by ns/other";
    assert_eq!(said.message, wanted);
}

#[test]
fn what_a_restart_waits_for_is_told_whatever_the_agents_say() {
    let silent = |progressing, ready| PodView { progressing, ready, ..pod("b", "Stalled", 1) };
    for (pod, reason) in [
        (silent(None, false), "NotReported"),
        (silent(Some(true), false), "NotVouchedFor"),
        (silent(Some(true), true), "AllProgressing"),
    ] {
        let mut observed = world(vec![healthy("a"), pod]);
        observed.infd.spec.recovery.max_unavailable = 0;
        let status = status(&observed, &plan(&observed, Vec::new(), None, now()), &[], &[], now());
        let said = status.conditions.iter().find(|c| c.type_ == conditions::ENGINES_PROGRESSING).unwrap();
        assert_eq!(said.reason, reason);
        assert!(said.message.ends_with("; a restart waits for recovery.maxUnavailable"), "{said:?}");
    }
}

/// `Type=Status/Reason` of each condition.
fn words(observed: &Observed, problems: &[String], errors: &[StepError]) -> Vec<String> {
    let status = status(observed, &plan(observed, Vec::new(), None, now()), problems, errors, now());
    status.conditions.iter().map(|c| format!("{}={}/{}", c.type_, c.status, c.reason)).collect()
}

/// It serves as soon as the person lets it.
fn by_person(name: &str) -> PodView {
    PodView { ready: false, fence: Fence::read(r#"{"by": "ann", "why": "a look"}"#), ..healthy(name) }
}

#[test]
fn whom_a_person_fenced_is_told_as_that() {
    let observed = world(vec![healthy("a"), by_person("b"), PodView { ready: true, ..by_person("c") }]);
    let status = status(&observed, &plan(&observed, Vec::new(), None, now()), &[], &[], now());
    assert_eq!((status.fenced_replicas, status.fenced_by_person, status.stalled_replicas), (2, 2, 0));
    let mut both = pod("b", "Stalled", 1);
    both.fence = by_person("b").fence;
    let observed = world(vec![by_person("a"), both]);
    let status = super::status(&observed, &plan(&observed, Vec::new(), None, now()), &[], &[], now());
    assert_eq!((status.fenced_replicas, status.fenced_by_person, status.stalled_replicas), (2, 1, 1));
    let ready = &status.conditions[0];
    assert_eq!(ready.reason, "ReplicasNotReady", "a stall is missing as well");
    assert!(ready.message.ends_with("a person keeps out of traffic: a (fenced by ann: a look)"), "{ready:?}");
}

#[test]
fn conditions_as_a_table() {
    let error = |lasting| StepError { subject: "apply Deployment chat".into(), lasting, message: "no".into() };
    let lying = PodView { health_lies: true, ..pod("b", "Stalled", 1) };
    let frozen_agent = PodView { ready: false, ..healthy("b") };
    let both = [frozen_agent.clone(), PodView { name: "a".into(), ..frozen_agent.clone() }];
    let unheard = PodView { vouched_at: Some("2025-12-31T23:36:00Z".into()), ..healthy("b") };
    let unreadable = PodView { episode: EpisodeView::Unreadable("empty".into()), ..healthy("b") };
    let rows = [
        ("healthy", words(&world(vec![healthy("a"), healthy("b")]), &[], &[])),
        ("one frozen", words(&world(vec![healthy("a"), pod("b", "Stalled", 1)]), &[], &[])),
        ("one silent", words(&world(vec![healthy("a"), PodView { progressing: None, ..healthy("b") }]), &[], &[])),
        ("one agent frozen", words(&world(vec![healthy("a"), frozen_agent]), &[], &[])),
        ("one agent cut off, in mode Observe", words(&world(vec![healthy("a"), unheard]), &[], &[])),
        ("all agents frozen", words(&world(both.to_vec()), &[], &[])),
        ("one fenced by a person", words(&world(vec![healthy("a"), by_person("b")]), &[], &[])),
        ("one fenced by a person, one stalls", words(&world(vec![by_person("a"), pod("b", "Stalled", 1)]), &[], &[])),
        ("one whose health lies", words(&world(vec![healthy("a"), lying]), &[], &[])),
        ("one unreadable", words(&world(vec![healthy("a"), unreadable]), &[], &[])),
        ("one of no owner", words(&Observed { doubted: vec!["b".into()], ..world(vec![healthy("a")]) }, &[], &[])),
        ("no pod", words(&world(vec![]), &[], &[])),
        ("no deployment yet", words(&Observed { children: Default::default(), ..world(vec![]) }, &[], &[])),
        ("bad spec", words(&world(vec![]), &["spec.x is wrong".into()], &[])),
        ("API away", words(&world(vec![healthy("a"), healthy("b")]), &[], &[error(false)])),
        ("pods refused", words(&quota(), &[], &[])),
        ("refused", words(&world(vec![healthy("a"), healthy("b")]), &[], &[error(true)])),
    ];
    insta::assert_json_snapshot!(rows);
}

#[test]
fn a_stall_is_shown_whole_and_never_as_null() {
    let observed = world(vec![healthy("a"), pod("b", "Stalled", 1)]);
    let status = status(&observed, &plan(&observed, Vec::new(), None, now()), &[], &[], now());
    insta::assert_json_snapshot!(status);
    let text = serde_json::to_string(&InferenceDeploymentStatus::default()).unwrap();
    assert!(!text.contains("null") && text.contains("\"replicas\":0"), "a null in a scale path is a 422: {text}");
}

#[test]
fn an_equal_world_gives_an_equal_status() {
    let mut observed = world(vec![healthy("a"), healthy("b")]);
    let first = status(&observed, &plan(&observed, Vec::new(), None, now()), &[], &[], now());
    observed.infd.status = Some(first.clone());
    let later = now() + jiff::SignedDuration::from_hours(1);
    assert_eq!(status(&observed, &plan(&observed, Vec::new(), None, later), &[], &[], later), first);
}
