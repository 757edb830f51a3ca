//! Somebody else writes on our children (P9): what is theirs is left as it is, however often we write what is ours.

use operator::controllers::inference_deployment::plan::ANNOTATION_APPLIED;
use serde_json::{Value, json};

use super::{
    act::Act,
    rows::{Row, row},
    story::{Story, create, edit, plain},
};

const KINDS: [&str; 6] =
    ["services", "deployments", "roles", "rolebindings", "serviceaccounts", "poddisruptionbudgets"];

pub fn rows() -> Vec<Row> {
    vec![row("p9-fields-of-others", fields_of_others, |log| {
        vec![log.changes("PATCH /apis/apps/v1/namespaces/serving/deployments/chat", (40_000, 45_000))]
    })]
}

/// What [`Act::Meddle`] writes, the field that is ours left out.
pub fn note() -> Value {
    json!({"metadata": {"annotations": {"example.com/owner": "team-a"}, "labels": {"example.com/tier": "gold"}}})
}

/// Everything is written anew after it, and the Deployment once more.
fn fields_of_others() -> Story {
    let ours = json!({"metadata": {"annotations": {ANNOTATION_APPLIED: "tampered"}}});
    let each = |at_ms, act: fn(&'static str) -> Act| KINDS.map(|plural| (at_ms, act(plural))).to_vec();
    let mut acts = vec![create(2)];
    acts.extend(each(20_000, |plural| Act::PatchChild { plural, patch: theirs(plural) }));
    acts.extend(KINDS.map(|plural| (21_000, Act::PatchChild { plural, patch: ours.clone() })));
    acts.push(edit(40_000, json!({"engine": {"image": "engine:2"}})));
    acts.extend(each(39_000, |plural| Act::ExpectKept { plural, patch: theirs(plural) }));
    acts.extend(each(90_000, |plural| Act::ExpectKept { plural, patch: theirs(plural) }));
    acts.sort_by_key(|(at, _)| *at);
    plain(acts, Vec::new())
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
