//! What the operator sees of a node, as a plain value. Pure.

use std::collections::{BTreeMap, BTreeSet};

use crds::node::{CONDITION_ENGINE_STALLS, LABEL_AVOID_PREFIX, LABEL_SUSPECT};
use k8s_openapi::{
    api::core::v1::{Node, NodeCondition, NodeSpec, NodeSystemInfo, Taint},
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta},
};
use kube::{Resource, ResourceExt};
use serde::Deserialize;

use crate::controllers::metadata::without_managers;

/// The status takes no longer one; Linux and Windows give 36 characters and fewer.
const BOOT_ID_MAX: usize = 64;

/// A node as it is read: nobody looks at its images and addresses, nor at who wrote which field, which are most of its text.
#[derive(Debug, Clone, Deserialize, Resource)]
#[resource(inherit = "Node")]
pub struct ListedNode {
    #[serde(deserialize_with = "without_managers")]
    pub metadata: ObjectMeta,
    pub spec: Option<NodeSpec>,
    pub status: Option<ListedStatus>,
}

/// What is read of a node's status.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedStatus {
    pub allocatable: Option<BTreeMap<String, Quantity>>,
    pub conditions: Option<Vec<NodeCondition>>,
    pub node_info: Option<NodeSystemInfo>,
}

/// One node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeView {
    pub name: String,
    pub uid: String,
    /// Another with each start of the node; empty: its kubelet does not say.
    pub boot_id: String,
    /// Ready, and open to new pods.
    pub usable: bool,
    /// Devices (resource names with a domain) of which it has at least one.
    pub devices: BTreeSet<String>,
    /// All its labels: pods may ask for any.
    pub labels: BTreeMap<String, String>,
    /// Those of its taints that keep new pods away.
    pub taints: Vec<Taint>,
    /// Value of the topology label that names its failure domain.
    pub domain: Option<String>,
    /// The labels by which pods keep away from it.
    pub avoid: BTreeMap<String, String>,
    /// It carries the label of suspicion.
    pub suspect: bool,
    /// Our condition, if it has one.
    pub stalls: Option<StallsCondition>,
}

/// The condition `truebeat.io/engine-stalls` as it stands.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StallsCondition {
    pub is_true: bool,
    pub reason: String,
    pub message: String,
    /// When it last became true or false, RFC 3339; `None`: nobody has said.
    pub since: Option<String>,
}

/// The view of `node`; `domain_key` is the topology label of failure domains.
pub fn view(node: &ListedNode, domain_key: &str) -> NodeView {
    let status = node.status.as_ref();
    let conditions = status.and_then(|s| s.conditions.as_deref()).unwrap_or_default();
    let find = |type_: &str| conditions.iter().find(|c| c.type_ == type_);
    let closed = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false);
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    let allocatable = status.and_then(|s| s.allocatable.as_ref());
    let boot = status.and_then(|s| s.node_info.as_ref()).map(|info| info.boot_id.clone());
    let labels = node.labels();
    let ours = labels.iter().filter(|(key, _)| key.starts_with(LABEL_AVOID_PREFIX));
    NodeView {
        name: node.name_any(),
        uid: node.uid().unwrap_or_default(),
        boot_id: boot.filter(|boot| boot.len() <= BOOT_ID_MAX).unwrap_or_default(),
        usable: !closed && find("Ready").is_some_and(|c| c.status == "True"),
        devices: allocatable
            .into_iter()
            .flatten()
            .filter(|(name, count)| name.contains('/') && count.0 != "0")
            .map(|(name, _)| name.clone())
            .collect(),
        labels: labels.clone(),
        taints: taints.filter(|taint| taint.effect != "PreferNoSchedule").cloned().collect(),
        domain: labels.get(domain_key).cloned(),
        avoid: ours.map(|(key, until)| (key.clone(), until.clone())).collect(),
        suspect: labels.contains_key(LABEL_SUSPECT),
        stalls: find(CONDITION_ENGINE_STALLS).map(|c| StallsCondition {
            is_true: c.status == "True",
            reason: c.reason.clone().unwrap_or_default(),
            message: c.message.clone().unwrap_or_default(),
            since: c.last_transition_time.as_ref().map(|time| time.0.to_string()),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_node_is_seen_whole() {
        let node: ListedNode = serde_json::from_value(json!({
            "metadata": {"name": "n1", "uid": "u", "labels": {
                "topology.kubernetes.io/zone": "z1", "avoid.truebeat.io/chat-1": "2026-01-01T00-00-00Z", "truebeat.io/suspect": "true",
            }},
            "spec": {"taints": [{"key": "a", "effect": "NoSchedule"}, {"key": "b", "effect": "PreferNoSchedule"}]},
            "status": {
                "allocatable": {"cpu": "8", "nvidia.com/gpu": "4", "example.com/none": "0"},
                "conditions": [
                    {"type": "Ready", "status": "True"},
                    {"type": "truebeat.io/engine-stalls", "status": "True", "reason": "R", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                ],
                "nodeInfo": {"bootID": "b1"},
            },
        }))
        .unwrap();
        let seen = view(&node, "topology.kubernetes.io/zone");
        assert!(seen.usable && seen.suspect);
        assert_eq!(seen.devices.iter().collect::<Vec<_>>(), ["nvidia.com/gpu"]);
        assert_eq!(
            (seen.labels.len(), seen.taints.iter().map(|taint| taint.key.as_str()).collect::<Vec<_>>()),
            (3, vec!["a"])
        );
        assert_eq!((seen.domain.as_deref(), seen.avoid.len(), seen.boot_id.as_str()), (Some("z1"), 1, "b1"));
        let since = Some("2026-01-01T00:00:00Z".to_owned());
        let stalls = StallsCondition { is_true: true, reason: "R".into(), message: "m".into(), since };
        assert_eq!(seen.stalls, Some(stalls));
        let cordoned = ListedNode { spec: serde_json::from_value(json!({"unschedulable": true})).ok(), ..node };
        assert!(!view(&cordoned, "").usable && view(&cordoned, "").domain.is_none());
    }
}
