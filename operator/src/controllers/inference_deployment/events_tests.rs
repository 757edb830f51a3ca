//! What people are told of a change, and that each is told once.

use super::*;
use crate::controllers::inference_deployment::{
    plan::plan,
    testing::{healthy, infd, looked, pod},
};
use crate::controllers::nodes::view::NodeView;

fn now() -> Timestamp {
    "2026-01-01T00:02:00Z".parse().unwrap()
}

/// The plan and the texts of its events.
fn step(observed: &Observed) -> (Plan, Vec<String>) {
    let plan = plan(observed, Vec::new(), None, now());
    let notes = of(observed, &plan, now()).into_iter().filter_map(|event| event.note).collect();
    (plan, notes)
}

#[test]
fn a_grant_and_a_close_are_told_once() {
    let mut world = looked(infd("chat"), vec![pod("a", "Stalled", 1)]);
    let (plan, notes) = step(&world);
    let incident = incident(&world, "uid-a", "e-a");
    assert_eq!(notes, [format!("restart of the engine in pod a granted (incident {incident})")]);
    world.infd.status.get_or_insert_default().recovery.grants = plan.grants;
    assert!(step(&world).1.is_empty(), "the grant stands already");

    world.pods = vec![pod("a", "Recovered", 1)];
    let (plan, notes) = step(&world);
    assert_eq!(notes, [format!("incident {incident} (StepStalled, pod a) closed after 59.0s: Recovered")]);
    let write = &plan.incidents.writes[0];
    let mut stored = EngineIncident::new(&write.name, write.spec.clone().unwrap());
    stored.status = write.status.clone();
    stored.status.as_mut().unwrap().requests_refused = 7; // the record still changes
    world.incidents = vec![stored];
    let (plan, notes) = step(&world);
    assert_eq!((plan.incidents.writes.len(), notes.len()), (1, 0), "closed already");
}

#[test]
fn a_recovery_that_must_wait_is_told_once() {
    let mut world = looked(infd("chat"), vec![pod("a", "Stalled", 1)]);
    let granted_at = "2026-01-01T00:01:55Z".to_owned();
    let past = crds::PastGrant { pod_uid: "uid-a".into(), granted_at, ..Default::default() };
    world.infd.status.get_or_insert_default().recovery.recent = vec![past];
    let (plan, notes) = step(&world);
    assert_eq!(plan.grants, []);
    assert!(notes.len() == 1 && notes[0].ends_with("waits until 2026-01-01T00:02:05Z"), "{notes:?}");
    world.pods[0].queued = Some("e-a@2026-01-01T00:01:59Z".to_owned());
    assert!(step(&world).1.is_empty(), "its agent knows already");
}

#[test]
fn a_long_note_is_cut_where_the_server_counts() {
    // two bytes each, and one that stands across the limit
    let long = format!("x{}", "ä".repeat(NOTE_BYTES_MAX));
    let kept = cut(long.clone());
    assert!(long.starts_with(&kept) && kept.len() == NOTE_BYTES_MAX - 1, "{} bytes", kept.len());
    assert_eq!(cut("short".to_owned()), "short");
}

#[test]
fn an_event_has_what_the_server_demands() {
    let world = looked(infd("chat"), vec![pod("a", "Stalled", 1)]);
    let plan = plan(&world, Vec::new(), None, now());
    let event = serde_json::to_value(&of(&world, &plan, now())[0]).unwrap();
    for field in ["eventTime", "reportingController", "reportingInstance", "action", "reason", "type"] {
        assert!(event[field].as_str().is_some_and(|text| !text.is_empty() && text.len() <= 128), "{field}: {event}");
    }
    assert_eq!(event["regarding"]["namespace"], event["metadata"]["namespace"], "the server compares them");
    assert_eq!(
        (&event["regarding"]["kind"], &event["related"]["uid"]),
        (&"InferenceDeployment".into(), &"uid-a".into())
    );
    assert!(event["metadata"]["name"].as_str().is_some_and(|name| name.ends_with(".granted")));

    let mut replaced = plan;
    replaced.grants[0].action = GrantAction::Replace;
    let name = of(&world, &replaced, now())[0].metadata.name.clone();
    assert!(name.is_some_and(|name| name.ends_with(".replaced")), "another name: each is told once");
}

/// A restart of the node is good news, and nobody had to do without another place for it.
#[test]
fn an_avoidance_that_ends_early_says_why() {
    let mut world = looked(infd("chat"), vec![pod("a", "Recovered", 1)]);
    let until = "2026-01-01T01:01:00Z".to_owned();
    let boot_id = "b1".to_owned();
    world.infd.status.get_or_insert_default().recovery.avoid =
        vec![Avoided { node: "n9".into(), until, boot_id, ..Avoided::default() }];
    let node = |boot: &str| NodeView { name: "n9".into(), boot_id: boot.into(), usable: true, ..NodeView::default() };
    let told = |world: &Observed| {
        let plan = plan(world, Vec::new(), None, now());
        let lifted = |event: &Event| event.reason.as_deref() == Some("AvoidanceLifted");
        let told = of(world, &plan, now()).into_iter().find(lifted);
        told.map(|event| (event.type_.unwrap_or_default(), event.note.unwrap_or_default()))
    };
    let said = |type_: &str, why: &str| Some((type_.to_owned(), format!("node n9 is avoided no longer: {why}")));
    world.nodes = [node("b1")].into();
    assert_eq!(told(&world), None, "it is avoided still");
    world.nodes = [node("b2")].into();
    assert_eq!(told(&world), said("Normal", "it was started anew"));
    world.nodes = [node("b1")].into();
    let waits =
        PodView { unschedulable_since: Some("2026-01-01T00:01:10Z".into()), node: String::new(), ..healthy("c") };
    world.pods.push(waits);
    assert_eq!(told(&world), said("Warning", "a pod found no other place"));
}
