//! What the operator may write on nodes, although RBAC can only say "patch": its own labels and its own condition. No taint,
//! no cordon, no capacity; whoever holds the operator's token cannot empty a node with it.

use crds::node::{LABEL_AVOID_PREFIX, LABEL_SUSPECT};
use serde_json::{Value, json};

use super::{NAME, labels, unchanged};

pub const POLICY: &str = "truebeat-operator-node-marks-only";

/// CEL has no "object minus field", so each is named.
const STATUS_FIELDS: [&str; 10] = [
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
];

/// The policy.
pub fn policy() -> Value {
    let list = |object: &str, path: &str, empty: &str| format!("has({object}.{path}) ? {object}.{path} : {empty}");
    let ours = |key: &str| format!("{key}.startsWith('{LABEL_AVOID_PREFIX}') || {key} == '{LABEL_SUSPECT}'");
    let foreign = |name: &str| format!("variables.{name}.filter(c, !c.type.startsWith('truebeat.io/'))");
    let kept = |from: &str, to: &str| {
        format!(
            "variables.{from}.all(k, {} || (k in variables.{to} && variables.{to}[k] == variables.{from}[k]))",
            ours("k")
        )
    };
    let validation = |expression: String, message: &str| json!({"expression": expression, "message": message, "reason": "Forbidden"});
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": POLICY, "labels": labels()},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["nodes", "nodes/status"]},
            ]},
            "matchConditions": [{
                "name": "only-truebeats-operator",
                "expression": format!("request.userInfo.username.matches('^system:serviceaccount:[^:]+:{NAME}$')"),
            }],
            "variables": [
                {"name": "oldLabels", "expression": list("oldObject", "metadata.labels", "{}")},
                {"name": "newLabels", "expression": list("object", "metadata.labels", "{}")},
                {"name": "oldConds", "expression": list("oldObject", "status.conditions", "[]")},
                {"name": "newConds", "expression": list("object", "status.conditions", "[]")},
            ],
            "validations": [
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
                    format!("{} == {}", foreign("oldConds"), foreign("newConds")),
                    "truebeat: only conditions of type truebeat.io/* of a node may change",
                ),
                validation(unchanged("status", &STATUS_FIELDS), "truebeat: only conditions may change of a node's status"),
            ],
        },
    })
}
