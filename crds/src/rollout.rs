//! How a new revision of the replicas comes in and when it is taken back: the policy, and what the operator remembers of it.
//!
//! A revision is the pod template that follows from a spec, by its hash. It stands as a label on every pod of that revision.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a new replica must have shown before it may serve.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
pub enum Proof {
    #[default]
    Tokens,
    None,
}

/// What becomes of a revision that fails.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
pub enum OnFailure {
    #[default]
    RollBack,
    Hold,
}

/// How a new revision of the replicas comes in, and when it is taken back.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct Rollout {
    /// What a replica must have shown before it may serve. `Tokens`: its engine has delivered some, of more steps than the first; the
    /// agent asks for them itself, through the gate, where no client does. `None`: the engine takes requests. An engine that cannot be
    /// asked (it has no completions, or wants a key) is let through.
    pub proof: Proof,
    /// How long a new replica must have been ready without a break, in seconds, before it counts and the rollout goes on.
    #[schemars(range(min = 0, max = 3600))]
    pub soak_seconds: i32,
    /// A rollout in which no new replica comes to count for this long, in seconds, has failed. Loading a large model takes its time.
    #[schemars(range(min = 10, max = 86400))]
    pub progress_deadline_seconds: i32,
    /// How many replicas more than wanted a rollout may run. Absent: 1, or 0 where the engine asks for devices, for a spare GPU is
    /// rare. With 0 replicas are replaced in place.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1000))]
    pub max_surge: Option<i32>,
    /// How many replicas may be away at once by a drain of nodes (the PodDisruptionBudget), and by a rollout that replaces in place.
    #[schemars(range(min = 1, max = 1000))]
    pub max_unavailable: i32,
    /// So many confirmed stalls of new replicas a rollout survives. One more and it has failed, unless old replicas stall as well: then
    /// the revision is not to blame.
    #[schemars(range(min = 0, max = 1000))]
    pub tolerated_stalls: i32,
    /// What becomes of a revision that fails. `RollBack`: the last good revision comes back. `Hold`: it stays as far as it has come, the
    /// Deployment is paused: no further replica is replaced, and none goes back, even if the failed one recovers. In both cases the failed
    /// revision is remembered and goes no further until the spec changes; the status says so, the spec stays as it is.
    pub on_failure: OnFailure,
    /// A number that is a part of the revision. Another one brings all replicas in anew, and a revision that was rolled back is tried
    /// once more.
    #[schemars(range(min = 0, max = 1000000))]
    pub attempt: i32,
}

impl Default for Rollout {
    fn default() -> Self {
        Rollout {
            proof: Proof::default(),
            soak_seconds: 10,
            progress_deadline_seconds: 3600,
            max_surge: None,
            max_unavailable: 1,
            tolerated_stalls: 0,
            on_failure: OnFailure::default(),
            attempt: 0,
        }
    }
}

/// What the operator remembers of rollouts.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct RolloutStatus {
    /// The last revision that every replica ran and proved: where a rollback goes.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 64))]
    pub stable: String,
    /// The revision that the replicas are brought to now. Another than the spec's after a rollback.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 64))]
    pub target: String,
    /// The revision that the spec stands for: what was made of it by the operator that saw its last change.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 64))]
    pub wanted: String,
    /// What of the spec the pods show, as a hash: for that `wanted` was found.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 64))]
    pub spec: String,
    /// The same of `stable`: a spec that comes back finds its replicas again.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 64))]
    pub stable_spec: String,
    /// The revision that this version of the operator would make of the same spec, where that is another than `wanted`. An operator's
    /// upgrade alone replaces no replica: this one comes with the spec's next change, or with another `spec.rollout.attempt`.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 64))]
    pub newer: String,
    /// Revisions that failed, newest last: none of them is tried again.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["revision"]))]
    pub failed: Vec<FailedRevision>,
}

impl RolloutStatus {
    /// Is there nothing to remember?
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Why a revision failed.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
pub enum FailureReason {
    #[default]
    ReplicaStalled,
    ReplicaCrashes,
    NoProgress,
}

/// A revision that was rolled back or held.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct FailedRevision {
    /// The revision.
    #[schemars(length(max = 64))]
    pub revision: String,
    /// `ReplicaStalled`: a new replica was confirmed to make no progress. `ReplicaCrashes`: the engine of a new replica ended again and
    /// again by itself and does not serve. `NoProgress`: no new replica came to count within `progressDeadlineSeconds`.
    pub reason: FailureReason,
    /// The same for people, with the pod's name.
    #[schemars(length(max = 1024))]
    pub message: String,
    /// When that was seen, RFC 3339.
    #[schemars(length(max = 64))]
    pub at: String,
}
