//! What the operator may write on nodes, although RBAC can only say "patch": its own labels and its own condition. No taint,
//! no cordon, no capacity; whoever holds the operator's token cannot empty a node with it.

use crds::node::{LABEL_AVOID_PREFIX, LABEL_SUSPECT};
use serde_json::{Value, json};

use super::{NAME, or_empty, same_foreign_conditions, unchanged, update_policy, validation};

pub const POLICY: &str = "truebeat-operator-node-marks-only";

/// CEL has no "object minus field", so each is named.
const STATUS_FIELDS: [&str; 13] = [
    "capacity",
    "allocatable",
    "phase",
    "addresses",
    "daemonEndpoints",
    "nodeInfo",
    "images",
    "volumesInUse",
    "volumesAttached",
    "config",
    "features",
    "runtimeHandlers",
    "declaredFeatures",
];

/// The policy.
pub fn policy() -> Value {
    let ours = |key: &str| format!("{key}.startsWith('{LABEL_AVOID_PREFIX}') || {key} == '{LABEL_SUSPECT}'");
    let kept = |from: &str, to: &str| {
        format!(
            "variables.{from}.all(k, {} || (k in variables.{to} && variables.{to}[k] == variables.{from}[k]))",
            ours("k")
        )
    };
    update_policy(
        (POLICY, &["nodes", "nodes/status"]),
        ("only-truebeats-operator", &format!("[^:]+:{NAME}")),
        json!([
            {"name": "oldLabels", "expression": or_empty("oldObject", "metadata.labels", "{}")},
            {"name": "newLabels", "expression": or_empty("object", "metadata.labels", "{}")},
            {"name": "oldConds", "expression": or_empty("oldObject", "status.conditions", "[]")},
            {"name": "newConds", "expression": or_empty("object", "status.conditions", "[]")},
        ]),
        vec![
            validation("object.spec == oldObject.spec".to_owned(), "truebeat: a node's spec must not change"),
            validation(
                format!("{} && {}", kept("oldLabels", "newLabels"), kept("newLabels", "oldLabels")),
                "truebeat: only labels avoid.truebeat.io/* and truebeat.io/suspect of a node may change",
            ),
            validation(
                unchanged("metadata", &["annotations", "finalizers", "ownerReferences"]),
                "truebeat: only labels may change of a node's metadata",
            ),
            validation(
                same_foreign_conditions(),
                "truebeat: only conditions of type truebeat.io/* of a node may change",
            ),
            validation(unchanged("status", &STATUS_FIELDS), "truebeat: only conditions may change of a node's status"),
        ],
    )
}
