//! P11: every field of the spec has an effect that can be seen, with it and without it. The table must name each field that the
//! generated schema has, and no other: a field that is added without a row here, or whose effect is lost, fails.

use std::collections::BTreeSet;

use crds::{EngineIncident, InferenceDeployment, LABEL_REVISION, poison::InFlight};
use jiff::Timestamp;
use kube::CustomResourceExt;
use serde_json::{Value, json};

use super::{
    build::{build, revision},
    observed::{EpisodeView, Observed, PodView},
    plan::plan,
    testing::{healthy, infd, pod, template},
    validate::validate,
};
use crate::controllers::nodes::view::NodeView;

/// Where a change is seen.
enum Seen {
    /// This text is in the children only with it.
    Children(&'static str),
    /// This text is in the plan for a troubled world only with it.
    Plan(&'static str),
    /// This text is in that plan only without it.
    PlanLoses(&'static str),
}
use Seen::{Children, Plan, PlanLoses};

fn oci() -> Value {
    let oci = json!({"reference": "that:1", "pullPolicy": "Always", "path": "that/path"});
    json!({"model": {"source": {"file": null, "oci": oci}}})
}

/// Path, what is changed in the spec (a merge patch), and where it shows.
fn table() -> Vec<(&'static str, Value, Seen)> {
    let engine = |value: Value| json!({"engine": value});
    let env = |value: Value| json!({"engine": {"env": [value]}});
    let from =
        |source: &str| env(json!({"name": "A", "valueFrom": {source: {"name": "that-name", "key": "that-key"}}}));
    let pvc = json!({"model": {"source": {"file": null, "pvc": {"claimName": "that-claim", "path": "that/path"}}}});
    let recovery = |value: Value| json!({"recovery": value});
    let rollout = |value: Value| json!({"rollout": value});
    let overlay = |value: Value| json!({"podOverlay": value});
    vec![
        ("replicas", json!({"replicas": 7}), Children("\"replicas\":7")),
        ("model.source.file.path", json!({"model": {"source": {"file": {"path": "/that"}}}}), Children("\"/that\"")),
        ("model.source.pvc.claimName", pvc.clone(), Children("\"claimName\":\"that-claim\"")),
        ("model.source.pvc.path", pvc, Children("/models/that/path")),
        (
            "model.source.oci.reference",
            oci(),
            Children("\"image\":{\"pullPolicy\":\"Always\",\"reference\":\"that:1\"}"),
        ),
        ("model.source.oci.pullPolicy", oci(), Children("\"image\":{\"pullPolicy\":\"Always\"")),
        ("model.source.oci.path", oci(), Children("/models/that/path")),
        ("engine.tensorParallel", engine(json!({"tensorParallel": 7})), Children("\"--tensor-parallel\",\"7\"")),
        (
            "engine.kind",
            engine(json!({"kind": "SGLang"})),
            Children("\"inference.truebeat.io/engine-kind\":\"SGLang\""),
        ),
        ("engine.image", engine(json!({"image": "that:1"})), Children("that:1")),
        (
            "engine.imagePullPolicy",
            engine(json!({"imagePullPolicy": "Always"})),
            Children("\"imagePullPolicy\":\"Always\""),
        ),
        ("engine.command[]", engine(json!({"command": ["that-program"]})), Children("that-program")),
        ("engine.args[]", engine(json!({"args": ["--that"]})), Children("\"--that\"")),
        ("engine.env[].name", env(json!({"name": "THAT"})), Children("\"THAT\"")),
        ("engine.env[].value", env(json!({"name": "A", "value": "that"})), Children("\"that\"")),
        (
            "engine.env[].valueFrom.secretKeyRef.name",
            from("secretKeyRef"),
            Children("\"secretKeyRef\":{\"key\":\"that-key\",\"name\":\"that-name\"}"),
        ),
        ("engine.env[].valueFrom.secretKeyRef.key", from("secretKeyRef"), Children("that-key")),
        ("engine.env[].valueFrom.configMapKeyRef.name", from("configMapKeyRef"), Children("that-name")),
        (
            "engine.env[].valueFrom.configMapKeyRef.key",
            from("configMapKeyRef"),
            Children("\"configMapKeyRef\":{\"key\":\"that-key\",\"name\":\"that-name\"}"),
        ),
        (
            "engine.resources.requests{}",
            engine(json!({"resources": {"requests": {"cpu": "77m"}}})),
            Children("\"requests\":{\"cpu\":\"77m\"}"),
        ),
        (
            "engine.resources.limits{}",
            engine(json!({"resources": {"limits": {"cpu": "77m"}}})),
            Children("\"limits\":{\"cpu\":\"77m\"}"),
        ),
        ("engine.port", engine(json!({"port": 8777})), Children("http://127.0.0.1:8777")),
        ("agent.image", json!({"agent": {"image": "that:1"}}), Children("that:1")),
        (
            "agent.imagePullPolicy",
            json!({"agent": {"imagePullPolicy": "Always"}}),
            Children("\"imagePullPolicy\":\"Always\""),
        ),
        (
            "agent.resources.requests{}",
            json!({"agent": {"resources": {"requests": {"cpu": "77m"}}}}),
            Children("\"requests\":{\"cpu\":\"77m\"}"),
        ),
        (
            "agent.resources.limits{}",
            json!({"agent": {"resources": {"limits": {"cpu": "77m"}}}}),
            Children("\"limits\":{\"cpu\":\"77m\"}"),
        ),
        ("recovery.mode", recovery(json!({"mode": "Observe"})), Plan("\\\"mode\\\":\\\"Observe\\\"")),
        ("recovery.maxUnavailable", recovery(json!({"maxUnavailable": 2})), Plan("Grant { episode: \"e-b\"")),
        (
            "recovery.lastReplica",
            recovery(json!({"lastReplica": "Fence"})),
            PlanLoses("\"truebeat.io/last-serving\": Some"),
        ),
        ("recovery.holdPercent", recovery(json!({"holdPercent": 50})), Plan("3 of 5 replicas stall at once")),
        (
            "recovery.restartsBeforeReplace",
            recovery(json!({"restartsBeforeReplace": 1})),
            Plan("pod_uid: \"uid-a\", action: Replace"),
        ),
        ("recovery.restartBackoff", recovery(json!({"restartBackoff": "61s"})), Plan("Grant { episode: \"e-b\"")),
        (
            "recovery.restartBackoffMax",
            recovery(json!({"stabilityWindow": "1h", "restartBackoff": "50s", "restartBackoffMax": "50s"})),
            Plan("pod_uid: \"uid-a\", action: Replace"),
        ),
        (
            "recovery.stabilityWindow",
            recovery(json!({"stabilityWindow": "1h"})),
            Plan("pod_uid: \"uid-a\", action: Replace"),
        ),
        (
            "recovery.unattendedAfter",
            recovery(json!({"unattendedAfter": "77m"})),
            Plan("\\\"unattendedAfter\\\":\\\"77m\\\""),
        ),
        (
            "recovery.unattendedWindow",
            recovery(json!({"unattendedWindow": "77m"})),
            Plan("\\\"unattendedWindow\\\":\\\"77m\\\""),
        ),
        (
            "recovery.avoidFor",
            recovery(json!({"restartsBeforeReplace": 1, "avoidNodesPercent": 60, "avoidFor": "77m"})),
            Plan("node: \"n1\", gpu_uuids: [], until: \"2026-01-01T01:17:30Z\""),
        ),
        (
            "recovery.avoidNodesPercent",
            recovery(json!({"restartsBeforeReplace": 1, "avoidNodesPercent": 60})),
            Plan("node: \"n1\", gpu_uuids: [], until"),
        ),
        (
            "recovery.poisonRequests",
            recovery(json!({"poisonRequests": "Ignore"})),
            PlanLoses("\"truebeat.io/poison\": Some"),
        ),
        // the second of two stalls of one request, and 77 minutes
        ("recovery.poisonFor", recovery(json!({"poisonFor": "77m"})), Plan("1767230222000")),
        (
            "recovery.incidentTtl",
            recovery(json!({"incidentTtl": "77m"})),
            Plan("deletes: [(\"chat-old\", \"uid-old\")]"),
        ),
        ("drainSeconds", json!({"drainSeconds": 77}), Children("/drain?timeout_s=77")),
        ("gate.port", json!({"gate": {"port": 8777}}), Children("\"targetPort\":8777")),
        ("rollout.proof", rollout(json!({"proof": "None"})), Children("\"--unattended-after\",\"5m\"]")),
        ("rollout.soakSeconds", rollout(json!({"soakSeconds": 77})), Children("\"minReadySeconds\":77")),
        (
            "rollout.progressDeadlineSeconds",
            rollout(json!({"progressDeadlineSeconds": 777})),
            Children("\"progressDeadlineSeconds\":777"),
        ),
        ("rollout.maxSurge", rollout(json!({"maxSurge": 7})), Children("\"maxSurge\":7")),
        (
            "rollout.maxUnavailable",
            rollout(json!({"maxUnavailable": 7})),
            Children("\"maxUnavailable\":7,\"selector\""),
        ),
        ("rollout.toleratedStalls", rollout(json!({"toleratedStalls": 3})), PlanLoses("RolledBack(")),
        ("rollout.onFailure", rollout(json!({"onFailure": "Hold"})), Plan("\"paused\": Bool(true)")),
        ("rollout.attempt", rollout(json!({"attempt": 1})), PlanLoses(FIRST_REVISION)),
        (
            "scaling.duringIncidents",
            json!({"scaling": {"duringIncidents": "Hold"}}),
            Plan("5 replicas are wanted, 4 stay"),
        ),
        (
            "scaling.holdSecondsMax",
            json!({"scaling": {"duringIncidents": "Hold", "holdSecondsMax": 1}}),
            PlanLoses("5 replicas are wanted, 4 stay"),
        ),
        (
            "podOverlay.metadata.labels{}",
            overlay(json!({"metadata": {"labels": {"that": "label"}}})),
            Children("\"that\":\"label\""),
        ),
        (
            "podOverlay.metadata.annotations{}",
            overlay(json!({"metadata": {"annotations": {"that": "note"}}})),
            Children("\"that\":\"note\""),
        ),
        (
            "podOverlay.spec",
            overlay(json!({"spec": {"nodeSelector": {"that": "node"}}})),
            Children("\"nodeSelector\":{\"that\":\"node\"}"),
        ),
    ]
}

/// Stands for the revision of the unchanged spec, which is known only at run time.
const FIRST_REVISION: &str = "(first revision)";

fn spec_with(patch: &Value) -> InferenceDeployment {
    let mut object = serde_json::to_value(infd("chat")).unwrap();
    object["spec"]["replicas"] = json!(5);
    merge(&mut object["spec"], patch);
    serde_json::from_value(object).unwrap()
}

fn merge(target: &mut Value, patch: &Value) {
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

fn children(infd: &InferenceDeployment) -> String {
    build(infd).iter().map(|child| revision::canonical(&child.body)).collect()
}

/// Five replicas wanted, four allowed by the Deployment; three of a new revision stall, one of the old serves alone, one starts. The
/// first was restarted a minute ago and a quarter of an hour ago. One of five nodes is avoided already.
fn troubled(infd: &InferenceDeployment) -> String {
    let template = template(infd);
    let new = revision::of(&template).to_owned();
    let mut old = template.clone();
    old["metadata"]["labels"][LABEL_REVISION] = json!("old");
    let owners = |uid: &str| json!([{"uid": uid, "controller": true}]);
    let metadata = json!({"uid": "uid-deployment", "ownerReferences": owners("uid-infd")});
    let live = json!({"metadata": metadata, "spec": {"replicas": 4, "template": template}, "status": {}});
    let sets = json!([{"metadata": {"ownerReferences": owners("uid-deployment")}, "spec": {"template": old}}]);
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
    let plan = plan(&Observed { infd, children, pods, incidents, nodes }, desired, None, now);
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

fn leaves(path: &str, schema: &Value, fields: &mut BTreeSet<String>) {
    let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    if let Some(properties) = schema["properties"].as_object() {
        properties.iter().for_each(|(name, schema)| leaves(&below(name), schema, fields));
    } else if schema["items"].is_object() {
        leaves(&format!("{path}[]"), &schema["items"], fields);
    } else if schema["additionalProperties"].is_object() {
        fields.insert(format!("{path}{{}}"));
    } else {
        fields.insert(path.to_owned());
    }
}
