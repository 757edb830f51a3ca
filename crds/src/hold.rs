//! A common cause that holds restarts, as the operator remembers it, and the one restart at a time that is tried under it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::status::GrantAction;

/// A common cause that holds restarts, over operators and leaders.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct HoldStatus {
    /// Since when it holds them, RFC 3339.
    #[schemars(length(max = 64))]
    pub since: String,
    /// When it was over, RFC 3339; absent: it stands. One that was tried is remembered for an hour, should it come back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub over_at: Option<String>,
    /// The widest that it has been; absent: an older operator began it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<HoldScope>,
    /// When it became as wide as that, where it began with less, RFC 3339. The pause before the next trial counts from then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub widened_at: Option<String>,
    /// Trials that were in vain: with each the pause before the next one doubles.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1000))]
    pub failed: i32,
    /// The last trial.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial: Option<Trial>,
}

/// How much of the fleet a hold is about, the narrowest first.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HoldScope {
    /// This deployment's replicas on one node or in one failure domain.
    Place,
    /// All of this deployment.
    Deployment,
    /// The whole fleet.
    Fleet,
}

/// One restart that is granted although restarts are held: does it help?
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Trial {
    /// Name of the pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// UID of the pod.
    #[schemars(length(max = 64))]
    pub pod_uid: String,
    /// Id of its episode.
    #[schemars(length(max = 128))]
    pub episode: String,
    /// How it is carried out.
    #[serde(default)]
    pub action: GrantAction,
    /// When it was granted, RFC 3339.
    #[schemars(length(max = 64))]
    pub granted_at: String,
    /// When the first of those was granted that went well without a break up to this one, RFC 3339. Whoever of them stalls again says that
    /// restarts do not help.
    #[schemars(length(max = 64))]
    pub run_since: String,
    /// Since when it serves again, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub serves_since: Option<String>,
    /// What came of it.
    #[serde(default)]
    pub outcome: TrialOutcome,
    /// When that was known, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub ended_at: Option<String>,
}

/// What came of a trial.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrialOutcome {
    /// It is not known yet.
    #[default]
    Pending,
    /// It served for a minute, and nobody who was restarted stalls again.
    Helped,
    /// It stalls again, or does not come back in its time.
    Failed,
}

impl HoldStatus {
    /// Does it still hold restarts?
    pub fn stands(&self) -> bool {
        self.over_at.is_none()
    }

    /// The trial of which nobody knows yet what comes of it. A hold stands for as long as there is one.
    pub fn pending(&self) -> Option<&Trial> {
        self.trial.as_ref().filter(|trial| self.stands() && trial.outcome == TrialOutcome::Pending)
    }
}
