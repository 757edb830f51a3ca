//! Somebody else writes on our children (P9): what is theirs is left as it is, however often we write what is ours.

use kube::{Resource, api::ApiResource, core::DynamicObject};
use operator::controllers::inference_deployment::{
    build::{child_name, kinds},
    plan::ANNOTATION_APPLIED,
};
use serde_json::{Value, json};

use super::{
    act::Act,
    foreign::CHILDREN,
    rows::{Row, row},
    story::{Story, create, edit, freeze, plain},
};

/// When somebody changes a field of ours.
const TAMPERED_MS: u64 = 21_000;

pub fn rows() -> Vec<Row> {
    let of_others = row("p9-fields-of-others", fields_of_others, |log| {
        let anew = kinds().map(|kind| log.changes(&apply(&kind), (TAMPERED_MS, TAMPERED_MS + 5_000)));
        let edited = log.changes("PATCH /apis/apps/v1/namespaces/serving/deployments/chat", (40_000, 45_000));
        anew.into_iter().chain([edited]).collect()
    });
    let beside_ours = row("p9-items-of-others", items_of_others, |log| {
        let applied = log.times(&["PATCH /api/v1/namespaces/serving/services/chat"]);
        let late: Vec<u64> = applied.into_iter().filter(|at| *at > TAMPERED_MS).collect();
        vec![(!late.is_empty()).then(|| format!("the Service is applied for what is not ours, at {late:?} ms"))]
    });
    vec![of_others, beside_ours]
}

/// How a child of this kind is written.
fn apply(kind: &ApiResource) -> String {
    format!("PATCH {}/{} ", DynamicObject::url_path(kind, Some("serving")), child_name("chat", &kind.kind))
}

/// What [`Act::Meddle`] writes, the field that is ours left out.
pub fn note() -> Value {
    json!({"metadata": {"annotations": {"example.com/owner": "team-a"}, "labels": {"example.com/tier": "gold"}}})
}

/// Every child is applied anew after it, for a field of ours is changed as well, and the Deployment once more.
fn fields_of_others() -> Story {
    let ours = json!({"metadata": {"annotations": {ANNOTATION_APPLIED: "tampered"}}});
    let each = |at_ms, act: fn(&'static str) -> Act| CHILDREN.iter().map(move |plural| (at_ms, act(plural)));
    let mut acts = vec![create(2)];
    acts.extend(each(20_000, |plural| Act::PatchChild { plural, patch: theirs(plural) }));
    acts.extend(CHILDREN.iter().map(|plural| (TAMPERED_MS, Act::PatchChild { plural, patch: ours.clone() })));
    acts.push(edit(40_000, json!({"engine": {"image": "engine:2"}})));
    acts.extend(each(39_000, |plural| Act::ExpectKept { plural, patch: theirs(plural) }));
    acts.extend(each(90_000, |plural| Act::ExpectKept { plural, patch: theirs(plural) }));
    acts.sort_by_key(|(at, _)| *at);
    plain(acts, Vec::new())
}

/// Somebody gives the Service one more port: it is theirs, and nothing has to be written for it however often the Service is looked at.
fn items_of_others() -> Story {
    let ports = json!({"spec": {"ports": [
        {"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080},
        {"name": "metrics", "port": 9100, "protocol": "TCP", "targetPort": 9400},
    ]}});
    let more = Act::PatchChild { plural: "services", patch: ports.clone() };
    let kept = Act::ExpectKept { plural: "services", patch: ports };
    plain(
        vec![create(2), (20_000, more), freeze(30_000, 0), edit(60_000, json!({"replicas": 3})), (120_000, kept)],
        Vec::new(),
    )
}

/// Fields that the operator has no opinion of.
fn theirs(plural: &str) -> Value {
    let mut patch = note();
    match plural {
        "services" => patch["spec"] = json!({"sessionAffinity": "ClientIP"}),
        // as `kubectl rollout restart` writes it
        "deployments" => {
            let restarted = json!({"annotations": {"kubectl.kubernetes.io/restartedAt": "2026-01-01T00:00:20Z"}});
            patch["spec"] = json!({"template": {"metadata": restarted}});
        }
        "serviceaccounts" => patch["imagePullSecrets"] = json!([{"name": "registry"}]),
        _ => {}
    }
    patch
}
