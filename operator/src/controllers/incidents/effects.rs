//! P11 of the record: every field of an `EngineIncident` tells of one thing, and every word that it may hold is told. The tables must name each
//! field and each word that the generated schema has, and no other: what is added without a row here fails.

use std::collections::BTreeSet;

use crds::{
    EngineIncident, EngineIncidentSpec,
    engine_incident::OUTCOMES,
    episode::Episode,
    fence::Fence,
    inference_deployment::Recovery,
    poison::InFlight,
    xid::{Xid, XidRemedy},
};
use jiff::Timestamp;
use kube::CustomResourceExt;
use serde_json::{Value, json};

use super::plan::{IncidentPlan, Kept, plan, plan_by_default};
use crate::controllers::{
    inference_deployment::{
        effects::leaves,
        observed::{EpisodeView, Ground, PodView},
        testing::{healthy, pod, with_xid},
    },
    nodes::view::NodeView,
};

fn now() -> Timestamp {
    "2026-01-01T00:02:00Z".parse().unwrap()
}

/// A pod that stalls since second 10, on a node that is known.
struct Scene {
    infd: &'static str,
    pod: PodView,
    node: NodeView,
}

impl Scene {
    fn new() -> Self {
        Scene {
            infd: "chat",
            pod: pod("a", "Stalled", 10),
            node: NodeView { name: "n1".into(), ..NodeView::default() },
        }
    }

    fn tells(&mut self, change: impl FnOnce(&mut Episode)) {
        if let EpisodeView::Known(reported) = &mut self.pod.episode {
            change(&mut reported.episode);
            reported.open = !reported.episode.closed();
        }
    }

    fn recovers(&mut self) {
        self.tells(|e| (e.stage, e.serving_at) = ("Recovered".into(), Some("2026-01-01T00:01:00Z".into())));
    }

    /// What is recorded of it.
    fn record(self) -> Value {
        let Scene { infd, pod, node } = self;
        let ground = Ground { pods: &[pod], incidents: &[], nodes: &[node] };
        let write = plan(infd, Kept::of(&Recovery::default()), ground, now()).writes.remove(0);
        json!({"spec": write.spec, "status": write.status})
    }
}

/// A change of the world, and what the field says with it.
type Row = (&'static str, fn(&mut Scene), Value);

fn row(path: &'static str, change: fn(&mut Scene), value: Value) -> Row {
    (path, change, value)
}

fn who_and_what() -> Vec<Row> {
    let fault = |s: &mut Scene| s.pod = with_xid(s.pod.clone(), 79, XidRemedy::RestartNode);
    vec![
        row("spec.deployment", |s| s.infd = "other", json!("other")),
        row("spec.pod", |s| s.pod.name = "b".into(), json!("b")),
        row("spec.podUid", |s| s.pod.uid = "uid-b".into(), json!("uid-b")),
        row("spec.node", |s| s.pod.node = "n7".into(), json!("n7")),
        row("spec.bootId", |s| s.node.boot_id = "b7".into(), json!("b7")),
        row("spec.gpuUuids[]", |s| s.tells(|e| e.gpu_uuids = vec!["GPU-7".into()]), json!("GPU-7")),
        row("spec.xids[].code", fault, json!(79)),
        row("spec.xids[].gpu", fault, json!("GPU-1")),
        row("spec.xids[].remedy", fault, json!("RestartNode")),
        row("spec.class", |s| s.tells(|e| e.class = "DeviceWait".into()), json!("DeviceWait")),
        row("spec.episodeId", |s| s.tells(|e| e.id = "e-7".into()), json!("e-7")),
        row("spec.fingerprint", |s| s.tells(|e| e.fingerprint = Some("f7".into())), json!("f7")),
    ]
}

fn how_it_went() -> Vec<Row> {
    let in_flight = |s: &mut Scene| {
        let (request, completed_at) = ("00000000000000aa".into(), Some("2026-01-01T00:00:07Z".into()));
        s.tells(|e| e.in_flight = vec![InFlight { request, completed_at }]);
    };
    vec![
        row("status.stage", |s| s.tells(|e| e.stage = "Killed".into()), json!("Killed")),
        row("status.reasons[]", |s| s.tells(|e| e.reasons = vec!["why".into()]), json!("why")),
        row("status.timeline.suspectAt", |s| s.tells(|e| e.suspect_at = at(1)), json!(at(1))),
        row("status.timeline.fencedAt", |s| s.tells(|e| e.fenced_at = at(2)), json!(at(2))),
        row("status.timeline.confirmedAt", |s| s.tells(|e| e.confirmed_at = at(3)), json!(at(3))),
        row("status.timeline.evidenceAt", |s| s.tells(|e| e.evidence_at = at(4)), json!(at(4))),
        row("status.timeline.grantedAt", |s| s.tells(|e| e.granted_at = at(5)), json!(at(5))),
        row("status.timeline.killedAt", |s| s.tells(|e| e.killed_at = at(6)), json!(at(6))),
        row("status.timeline.servingAt", |s| s.tells(|e| e.serving_at = at(7)), json!(at(7))),
        row("status.grantedBy", |s| s.tells(|e| e.granted_by = Some("self".into())), json!("self")),
        row("status.healthLied", |s| s.pod.health_lies = true, json!(true)),
        row("status.requestsLost", |s| s.tells(|e| e.requests_lost = 7), json!(7)),
        row("status.requestsRefused", |s| s.tells(|e| e.requests_refused = 7), json!(7)),
        row("status.bundle", |s| s.tells(|e| e.bundle = Some("/b7".into())), json!("/b7")),
        row("status.inFlight[].request", in_flight, json!("00000000000000aa")),
        row("status.inFlight[].completedAt", in_flight, json!(at(7))),
        row("status.outcome", Scene::recovers, json!("Recovered")),
        row("status.closedAt", Scene::recovers, json!("2026-01-01T00:01:00Z")),
        row("status.duration", Scene::recovers, json!("50.0s")),
    ]
}

fn at(second: u8) -> Option<String> {
    Some(format!("2026-01-01T00:00:0{second}Z"))
}

fn table() -> Vec<Row> {
    who_and_what().into_iter().chain(how_it_went()).collect()
}

#[test]
fn every_field_of_a_record_tells_of_something_with_it_and_without_it() {
    let without = Scene::new().record();
    for (path, change, value) in table() {
        let pointer = format!("/{}", path.replace("[]", "/0").replace('.', "/"));
        let mut scene = Scene::new();
        change(&mut scene);
        assert_eq!(scene.record().pointer(&pointer), Some(&value), "{path}");
        assert_ne!(without.pointer(&pointer), Some(&value), "{path}: it says so of anything");
    }
}

#[test]
fn the_table_names_every_field_of_a_record_and_no_other() {
    let schema = schema();
    let mut fields = BTreeSet::new();
    ["spec", "status"].into_iter().for_each(|half| leaves(half, &schema["properties"][half], &mut fields));
    let named: Vec<String> = table().into_iter().map(|(path, ..)| path.to_owned()).collect();
    assert_eq!(named.iter().cloned().collect::<BTreeSet<_>>(), fields);
    assert_eq!(named.len(), fields.len(), "a field is named twice");
}

fn schema() -> Value {
    let crd = serde_json::to_value(EngineIncident::crd()).unwrap();
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}

/// Each remedy, whether a restart in place is pointless for it, and what a person is told.
const REMEDIES: [(&str, bool, &str); 6] = [
    ("Nothing", false, "nothing need be done"),
    ("RestartApplication", false, "the engine must be started anew"),
    ("ResetGpu", true, "the GPU must be reset"),
    ("RestartNode", true, "the node must be drained and restarted"),
    ("ContactSupport", true, "a person must look at the machine"),
    ("Unknown", false, "what mends it is not known"),
];

#[test]
fn every_remedy_of_a_xid_is_recorded_and_weighed_and_put_into_words() {
    let words = &schema()["properties"]["spec"]["properties"]["xids"]["items"]["properties"]["remedy"]["enum"];
    assert_eq!(*words, json!(REMEDIES.map(|(word, ..)| word)));
    for (word, elsewhere, told) in REMEDIES {
        let remedy: XidRemedy = serde_json::from_value(json!(word)).unwrap();
        let mut scene = Scene::new();
        scene.pod = with_xid(scene.pod, 79, remedy);
        assert_eq!(scene.pod.needs_another_place(), elsewhere, "{word}");
        assert_eq!(scene.record()["spec"]["xids"][0]["remedy"], word);
        let xid = Xid { code: 79, gpu: String::new(), remedy };
        assert_eq!(xid.words(), format!("Xid 79: {told}"));
    }
}

/// How the one incident ends that is open while a pod `a` stalls, or is fenced by a person, where the pods are these next.
fn ends(before: PodView, after: PodView) -> Option<String> {
    let open = plan_by_default("chat", &[before], &[], now());
    let spec: EngineIncidentSpec = open.writes[0].spec.clone().unwrap();
    let record = EngineIncident { status: open.writes[0].status.clone(), ..EngineIncident::new("chat-1", spec) };
    let IncidentPlan { writes, .. } = plan_by_default("chat", &[after], &[record], now());
    writes.into_iter().find(|write| write.name == "chat-1")?.status?.outcome
}

#[test]
fn an_incident_ends_in_every_way_that_there_is_and_in_no_other() {
    let fenced = PodView { fence: Fence::read("yes"), ..healthy("a") };
    let again = PodView { uid: "uid-a".into(), ..pod("b", "Stalled", 20) };
    let ways = [
        ends(pod("a", "Stalled", 10), pod("a", "Recovered", 10)),
        ends(pod("a", "Stalled", 10), pod("a", "Cleared", 10)),
        ends(fenced, healthy("a")),
        ends(pod("a", "Stalled", 10), healthy("b")),
        ends(pod("a", "Stalled", 10), again),
    ];
    assert_eq!(ways.map(Option::unwrap_or_default), OUTCOMES);
}
