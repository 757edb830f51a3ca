//! P11: every field of the spec has an effect that can be seen, with it and without it. The table must name each field that the
//! generated schema has, and no other: a field that is added without a row here, or whose effect is lost, fails.

use std::collections::BTreeSet;

use crds::{EngineIncident, InferenceDeployment, LABEL_REVISION, poison::InFlight};
use jiff::Timestamp;
use kube::CustomResourceExt;
use serde_json::{Value, json};

use super::{
    build::{build, revision},
    effects_table::{
        FIRST_REVISION,
        Seen::{Children, Plan, PlanLoses},
        table,
    },
    observed::{EpisodeView, Observed, PodView},
    plan::plan,
    testing::{healthy, infd, looked, pod, template},
    validate::validate,
};
use crate::controllers::nodes::view::NodeView;

/// Five replicas, and what `patch` changes in the spec.
pub fn spec_with(patch: &Value) -> InferenceDeployment {
    let mut object = serde_json::to_value(infd("chat")).unwrap();
    object["spec"]["replicas"] = json!(5);
    merge(&mut object["spec"], patch);
    serde_json::from_value(object).unwrap()
}

/// A merge patch.
pub fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else { return *target = patch.clone() };
    if !target.is_object() {
        *target = json!({});
    }
    let map = target.as_object_mut().unwrap();
    for (name, value) in patch {
        match value {
            Value::Null => drop(map.remove(name)),
            value => merge(map.entry(name).or_insert(Value::Null), value),
        }
    }
}

/// All that is applied.
pub fn children(infd: &InferenceDeployment) -> String {
    build(infd).iter().map(|child| revision::canonical(&child.body)).collect()
}

/// Five replicas wanted, four allowed by the Deployment; three of a new revision stall, one of the old serves alone, one starts. The
/// first was restarted a minute ago and a quarter of an hour ago. One of five nodes is avoided already.
pub fn troubled(infd: &InferenceDeployment) -> String {
    let template = template(infd);
    let new = revision::of(&template).to_owned();
    let mut old = template.clone();
    old["metadata"]["labels"][LABEL_REVISION] = json!("old");
    let owners = |uid: &str| json!([{"uid": uid, "controller": true}]);
    let metadata = json!({"uid": "uid-deployment", "ownerReferences": owners("uid-infd")});
    let set = |template: &Value, replicas: i32| json!({"metadata": {"ownerReferences": owners("uid-deployment")}, "spec": {"replicas": replicas, "template": template}});
    let sets = json!([set(&old, 1), set(&template, 4)]);
    let live = json!({"metadata": metadata, "spec": {"replicas": 4, "template": template}, "status": {}});
    let starting = PodView { ready: false, progressing: None, ..healthy("e") };
    let stalled = [("a", 1), ("b", 2), ("c", 3)].map(|(name, second)| pod(name, "Stalled", second));
    let of = |revision: &str, pod: PodView| PodView { revision: revision.to_owned(), ..pod };
    let mut pods: Vec<PodView> = stalled.into_iter().chain([starting]).map(|pod| of(&new, pod)).collect();
    pods.push(of("old", healthy("d")));
    pods.iter_mut().take(2).for_each(shares_a_request);
    let mut infd = infd.clone();
    let status = infd.status.get_or_insert_default();
    status.rollout.stable = "old".to_owned();
    status.recovery.recent = ["2025-12-31T23:45:00Z", "2025-12-31T23:59:30Z"]
        .map(|at| crds::PastGrant { pod_uid: "uid-a".into(), granted_at: at.into(), ..Default::default() })
        .into();
    let (node, until) = ("n9".to_owned(), "2026-01-01T00:30:00Z".to_owned());
    status.recovery.avoid = vec![crds::Avoided { node, until, ..Default::default() }];
    let node = |name: &str| NodeView { name: name.to_owned(), usable: true, ..NodeView::default() };
    let nodes = ["n1", "n2", "n3", "n4", "n9"].map(node).into();
    let children = [("Deployment".to_owned(), live), ("ReplicaSet".to_owned(), sets)].into();
    let now: Timestamp = "2026-01-01T00:00:30Z".parse().unwrap();
    let desired = build(&infd);
    let incidents = vec![over_for_four_hours()];
    let plan = plan(&Observed { children, incidents, nodes, ..looked(infd, pods) }, desired, None, now);
    format!("{plan:?}")
}

/// A suspicion of a pod that is long gone.
fn over_for_four_hours() -> EngineIncident {
    serde_json::from_value(json!({
        "metadata": {"name": "chat-old", "uid": "uid-old"},
        "spec": {"deployment": "chat", "pod": "z", "podUid": "uid-z", "class": "StepStalled", "episodeId": "e-z"},
        "status": {"stage": "Cleared", "outcome": "Cleared", "closedAt": "2025-12-31T20:00:30Z"},
    }))
    .expect("the test's object has the right shape")
}

/// Its stall is confirmed, and a request was in flight that other pods share (I7).
fn shares_a_request(pod: &mut PodView) {
    let EpisodeView::Known(reported) = &mut pod.episode else { return };
    reported.episode.confirmed_at = reported.episode.suspect_at.clone();
    reported.episode.in_flight = vec![InFlight { request: "00000000000000aa".to_owned(), completed_at: None }];
}

#[test]
fn the_hash_of_a_spec_is_of_what_the_pods_show() {
    let revision_of = |infd: &InferenceDeployment| revision::of(&template(infd)).to_owned();
    let first = spec_with(&json!({}));
    for (path, patch, _) in table() {
        let other = spec_with(&patch);
        // new pods begin with it, and those that run are told: nobody is replaced for it
        let told = ["recovery.mode", "recovery.unattendedAfter", "recovery.unattendedWindow"].contains(&path);
        let shown = revision_of(&other) != revision_of(&first) && !told;
        assert_eq!(revision::of_spec(&other.spec) != revision::of_spec(&first.spec), shown, "{path}");
    }
}

#[test]
fn every_field_has_an_effect_with_it_and_without_it() {
    let first = template(&spec_with(&json!({})));
    let first = revision::of(&first).to_owned();
    for (path, patch, seen) in table() {
        // what only sets the stage for the field stands on both sides
        let without = match path {
            "scaling.holdSecondsMax" => json!({"scaling": {"duringIncidents": "Hold"}}),
            "recovery.restartBackoffMax" => json!({"recovery": {"stabilityWindow": "1h", "restartBackoff": "50s"}}),
            "recovery.trialAfter" => json!({"recovery": {"holdPercent": 50}}),
            "recovery.avoidFor" => json!({"recovery": {"restartsBeforeReplace": 1, "avoidNodesPercent": 60}}),
            "recovery.avoidNodesPercent" => json!({"recovery": {"restartsBeforeReplace": 1, "avoidNodesPercent": 20}}),
            _ => json!({}),
        };
        // replicas of a revision that is taken back are not recovered
        let stage = if path.starts_with("recovery.") { json!({"rollout": {"toleratedStalls": 3}}) } else { json!({}) };
        let (mut with, mut without) = (patch, without);
        merge(&mut with, &stage);
        merge(&mut without, &stage);
        let (with, without) = (spec_with(&with), spec_with(&without));
        assert_eq!(validate(&with), Vec::<String>::new(), "{path}");
        let (text, present, absent) = match seen {
            Children(text) => (text, children(&with), children(&without)),
            Plan(text) => (text, troubled(&with), troubled(&without)),
            PlanLoses(text) => (text, troubled(&without), troubled(&with)),
        };
        let text = if text == FIRST_REVISION { first.as_str() } else { text };
        assert!(present.contains(text), "{path}: not there: {text}\n{present}");
        assert!(!absent.contains(text), "{path}: there without the field too: {text}\n{absent}");
    }
}

#[test]
fn the_table_names_every_field_of_the_schema_and_no_other() {
    let crd = serde_json::to_value(InferenceDeployment::crd()).unwrap();
    let mut fields = BTreeSet::new();
    leaves("", &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"], &mut fields);
    let named: BTreeSet<String> = table().into_iter().map(|(path, ..)| path.to_owned()).collect();
    let missing: Vec<_> = fields.difference(&named).collect();
    let unknown: Vec<_> = named.difference(&fields).collect();
    assert!(
        missing.is_empty() && unknown.is_empty(),
        "without an effect test: {missing:?}; no such field: {unknown:?}"
    );
    assert_eq!(table().len(), named.len(), "a field is named twice");
}

/// The paths of everything in a schema that holds a value.
pub fn leaves(path: &str, schema: &Value, fields: &mut BTreeSet<String>) {
    each_in(path, schema, &mut |path, schema| {
        if schema["additionalProperties"].is_object() {
            fields.insert(format!("{path}{{}}"));
        } else if schema["properties"].is_null() && !schema["items"].is_object() {
            fields.insert(path.to_owned());
        }
    });
}

/// All that a schema has, in it and below it, with its path.
pub fn each_in(path: &str, schema: &Value, see: &mut impl FnMut(&str, &Value)) {
    see(path, schema);
    for (name, of) in schema["properties"].as_object().into_iter().flatten() {
        each_in(&if path.is_empty() { name.clone() } else { format!("{path}.{name}") }, of, see);
    }
    if schema["items"].is_object() {
        each_in(&format!("{path}[]"), &schema["items"], see);
    }
}
