//! `EngineIncident`: the record of one episode of one pod, which outlives the pod. The operator writes it from what the
//! agent reports; `kubectl get inc` is the on-call's first command.

#![allow(clippy::duplicated_attributes, reason = "one printcolumn attribute a column is how the derive macro is told")]

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::poison::InFlight;
use crate::xid::Xid;

/// One stall of one engine: who, what class, when each step happened, and how it ended.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "inference.truebeat.io",
    version = "v1alpha1",
    kind = "EngineIncident",
    namespaced,
    cel,
    derive = "PartialEq",
    status = "EngineIncidentStatus",
    shortname = "inc",
    category = "inference",
    doc = "One stall of one engine: who, what class, when each step happened, and how it ended. Written by the operator.",
    selectable = ".spec.deployment",
    selectable = ".spec.pod",
    printcolumn(name = "Class", type_ = "string", json_path = ".spec.class"),
    printcolumn(name = "Pod", type_ = "string", json_path = ".spec.pod"),
    printcolumn(name = "Stage", type_ = "string", json_path = ".status.stage"),
    printcolumn(name = "Outcome", type_ = "string", json_path = ".status.outcome"),
    printcolumn(name = "Duration", type_ = "string", json_path = ".status.duration"),
    printcolumn(name = "Lost", type_ = "integer", json_path = ".status.requestsLost"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.node", priority = 1),
    printcolumn(name = "HealthLied", type_ = "boolean", json_path = ".status.healthLied", priority = 1),
    printcolumn(name = "Bundle", type_ = "string", json_path = ".status.bundle", priority = 1)
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.episodeId == oldSelf.episodeId && self.podUid == oldSelf.podUid")
        .message("an incident tells of one episode of one pod: episodeId and podUid cannot change")
)]
pub struct EngineIncidentSpec {
    /// Name of the InferenceDeployment.
    #[schemars(length(max = 253))]
    pub deployment: String,
    /// Name of the pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// UID of the pod.
    #[schemars(length(max = 64))]
    pub pod_uid: String,
    /// Node on which it ran; empty if unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub node: String,
    /// The boot of that node (`status.nodeInfo.bootID`) when this was first recorded; empty if unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 64))]
    pub boot_id: String,
    /// UUIDs of the GPUs that it used, where the agent could see them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 128)))]
    pub gpu_uuids: Vec<String>,
    /// Xids that NVIDIA's driver reported of them, with what mends each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "atomic"))]
    pub xids: Vec<Xid>,
    /// Stall class (`StepStalled`, `DeviceWait`, `Livelock` …), `Dead`, or `FencedByPerson`.
    #[schemars(length(max = 64))]
    pub class: String,
    /// The agent's id of the episode.
    #[schemars(length(max = 128))]
    pub episode_id: String,
    /// Hash of class, top frames, flags and image: the same disease has the same fingerprint. Empty until evidence is taken.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 128))]
    pub fingerprint: String,
}

impl EngineIncidentSpec {
    /// [`EngineIncident::is_stall`], by its parts.
    pub fn is_stall(&self, status: Option<&EngineIncidentStatus>) -> bool {
        self.class == "Dead" || status.is_some_and(|status| status.timeline.confirmed_at.is_some())
    }
}

/// How an incident may end, [`EngineIncidentStatus::outcome`]; the first: its engine was restarted and serves.
pub const OUTCOMES: [&str; 5] = ["Recovered", "Cleared", "Unfenced", "PodGone", "Superseded"];

/// What a [`Timeline`] tells after the suspicion, in the order in which it mostly happens.
pub const STEPS: [&str; 6] = ["fenced", "confirmed", "evidence", "granted", "killed", "serving"];

impl Timeline {
    /// The time of each of [`STEPS`], as it was told.
    pub fn steps(&self) -> [(&'static str, Option<&str>); 6] {
        let at = [
            &self.fenced_at,
            &self.confirmed_at,
            &self.evidence_at,
            &self.granted_at,
            &self.killed_at,
            &self.serving_at,
        ];
        std::array::from_fn(|step| (STEPS[step], at[step].as_deref()))
    }
}

impl EngineIncident {
    /// Did the engine stall or die, beyond suspicion? As [`crate::episode::Episode::is_stall`].
    pub fn is_stall(&self) -> bool {
        self.spec.is_stall(self.status.as_ref())
    }

    /// Is it the record of this episode of this pod? Episode ids are the agent's and unique in a pod alone.
    pub fn tells_of(&self, episode_id: &str, pod_uid: &str) -> bool {
        self.spec.episode_id == episode_id && self.spec.pod_uid == pod_uid
    }
}

/// How far it has come.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct EngineIncidentStatus {
    /// `Suspect`, `Stalled`, `Granted`, `Killed`, `Restarting`, `Recovered`, `Cleared`; `Fenced` while a person's fence stands.
    #[schemars(length(max = 32))]
    pub stage: String,
    /// Why, in words, newest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(max = 512)))]
    pub reasons: Vec<String>,
    /// When each step happened.
    pub timeline: Timeline,
    /// Who turned the second key: `operator`, or `self` (unattended).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub granted_by: Option<String>,
    /// The engine's own `/health` answered 200 while it was stalled, at least once.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub health_lied: bool,
    /// Requests that were in flight when the engine was killed.
    pub requests_lost: i64,
    /// Requests that the gate refused while the replica was fenced.
    pub requests_refused: i64,
    /// Where the evidence bundle lies, if one could be written.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub bundle: Option<String>,
    /// Requests that were in flight when it began, by fingerprint. One that was so at two stalls is refused (`recovery.poisonRequests`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), extend("x-kubernetes-list-type" = "atomic"))]
    pub in_flight: Vec<InFlight>,
    /// `Recovered` (the engine was restarted and serves), `Cleared` (it went on by itself), `Unfenced` (by a person),
    /// `PodGone`, `Superseded`. Absent while open.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub outcome: Option<String>,
    /// When it ended, RFC 3339. Absent while open.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub closed_at: Option<String>,
    /// From suspicion to the end, for people (`12.3s`). Absent while open.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub duration: Option<String>,
}

/// Times of the steps, RFC 3339 with milliseconds, UTC, by the agent's clock. A time that is absent has not happened.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct Timeline {
    /// Work was owed and nothing was delivered for longer than the phase allows.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub suspect_at: Option<String>,
    /// The gate began to refuse.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub fenced_at: Option<String>,
    /// The stall was confirmed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub confirmed_at: Option<String>,
    /// The evidence was saved.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub evidence_at: Option<String>,
    /// The restart was granted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub granted_at: Option<String>,
    /// The engine's process tree was killed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub killed_at: Option<String>,
    /// The replica served again.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub serving_at: Option<String>,
}
