//! The observed side of an `InferenceDeployment`. Written by the operator alone, through the status subresource.
//!
//! Everything can be rebuilt from the cluster except `recovery`, the restart budget itself (I2), and `rollout`, the memory of what
//! failed: both are kept in the API so that they hold across operator restarts and leaders. Counts are never null: a null in a scale path is a 422.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::hold::HoldStatus;
use crate::rollout::RolloutStatus;
use crate::xid::Xid;

/// What the operator has seen.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct InferenceDeploymentStatus {
    /// The generation of the spec that this status speaks of.
    pub observed_generation: i64,
    /// Pods that exist and are not on their way out.
    pub replicas: i32,
    /// Pods that may serve (Ready, by progress).
    pub ready_replicas: i32,
    /// Pods that are Ready and whose agent says that the engine makes progress.
    pub progressing_replicas: i32,
    /// Pods that an open episode or a person keeps out of traffic.
    pub fenced_replicas: i32,
    /// Those of them that a person keeps out of traffic, and no episode.
    pub fenced_by_person: i32,
    /// Pods with a confirmed stall that is not over, fenced or not.
    pub stalled_replicas: i32,
    /// Incidents that are not closed.
    pub open_incidents: i32,
    /// Label selector of the pods, as a string, for the scale subresource.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 512))]
    pub selector: String,
    /// `Ready`, `Reconciling`, `Stalled` (kstatus), `EnginesProgressing`, `EpisodesReadable`; while there is reason `RestartsHeld`,
    /// `ScalingHeld`, `HealthLies`, `ObjectsDoubted`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// The restart budget in use.
    #[serde(skip_serializing_if = "RecoveryStatus::is_empty")]
    pub recovery: RecoveryStatus,
    /// What the operator remembers of rollouts.
    #[serde(skip_serializing_if = "RolloutStatus::is_empty")]
    pub rollout: RolloutStatus,
}

/// The restart budget in use.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct RecoveryStatus {
    /// Restarts that are granted and not yet over: at most `spec.recovery.maxUnavailable` (I2).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1000), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["podUid"]))]
    pub grants: Vec<Grant>,
    /// Grants of the last `stabilityWindow` and a while longer, newest last: what escalation goes by.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1000), extend("x-kubernetes-list-type" = "atomic"))]
    pub recent: Vec<PastGrant>,
    /// Places from which new pods keep away for a time: a pod was replaced there because restarts did not cure it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 500), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["node"]))]
    pub avoid: Vec<Avoided>,
    /// Places where an engine outlives SIGKILL or a GPU needs more than a restart, and from which new pods do not keep away all the same: the
    /// policy is not to, no more places may be avoided, or a pod found no other. The condition of their nodes tells of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 500), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["node"]))]
    pub broken: Vec<Avoided>,
    /// The common cause that holds restarts, and what is tried under it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hold: Option<HoldStatus>,
}

impl RecoveryStatus {
    fn is_empty(&self) -> bool {
        let RecoveryStatus { grants, recent, avoid, broken, hold } = self;
        grants.is_empty() && recent.is_empty() && avoid.is_empty() && broken.is_empty() && hold.is_none()
    }
}

/// A place to avoid, or one that others should know of.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Avoided {
    /// Name of the node.
    #[schemars(length(max = 253))]
    pub node: String,
    /// The GPUs that the stalled engine used there, where its agent could see them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 128)))]
    pub gpu_uuids: Vec<String>,
    /// Until when, if nothing is heard of it any more, RFC 3339.
    #[schemars(length(max = 64))]
    pub until: String,
    /// Why.
    #[serde(default)]
    pub because: AvoidedBecause,
    /// Xids of those GPUs that no restart of an engine mends, and what does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "atomic"))]
    pub xids: Vec<Xid>,
    /// The boot of the node (`status.nodeInfo.bootID`) in which that was seen: once it is another, nothing of this is held against the node but
    /// Xids for which a person must look. Empty: nobody knew.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 64))]
    pub boot_id: String,
    /// Since when the pod there left when that was seen, RFC 3339: whoever waits for a place since then waits for this one as well. Empty: it stays,
    /// or left later.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 64))]
    pub left_at: String,
    /// New pods kept away from it, and one of them found no other place: it is told of, and avoided no more unless there are news of it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lifted: bool,
}

/// Why a place is avoided, or told of.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AvoidedBecause {
    /// Restarts in place did not cure a pod there.
    #[default]
    RestartsDidNotCure,
    /// An engine there outlives SIGKILL: its process still owns the GPU (I5).
    Unkillable,
    /// An engine there stalled or died with a Xid that only a reset of the GPU, a restart of the node or a person mends (F1).
    GpuFault,
}

/// How a granted recovery is carried out.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GrantAction {
    /// The agent restarts the engine in place.
    #[default]
    Restart,
    /// The operator deletes the pod.
    Replace,
}

/// A grant of the past.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PastGrant {
    /// UID of the pod.
    #[schemars(length(max = 64))]
    pub pod_uid: String,
    /// Its node.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub node: String,
    /// When it was granted, RFC 3339.
    #[schemars(length(max = 64))]
    pub granted_at: String,
    /// What was granted.
    #[serde(default)]
    pub action: GrantAction,
    /// The boot of the node at that time; what happened in an earlier one says nothing of the node. Empty: nobody knew.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 64))]
    pub boot_id: String,
}

/// One granted restart: the second key (I1), and one slot of the budget until its episode closes or its pod is gone or made up for.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Grant {
    /// Id of the episode that asked.
    #[schemars(length(max = 128))]
    pub episode: String,
    /// Name of its pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// UID of its pod: a new pod with the old name has no grant.
    #[schemars(length(max = 64))]
    pub pod_uid: String,
    /// How it is carried out.
    #[serde(default)]
    pub action: GrantAction,
    /// Its node: what a node may bear at once is counted by it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub node: String,
    /// Its failure domain, by the operator's `--domain-topology-key`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub domain: String,
    /// When it was granted, RFC 3339.
    #[schemars(length(max = 64))]
    pub granted_at: String,
    /// How often its engine's container had been started again by then: what ended since is counted from here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarts: Option<i32>,
}
