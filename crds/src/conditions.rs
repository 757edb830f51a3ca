//! Conditions and their reasons: a closed set, so that alerts and runbooks can name them. Pure; time is an argument.
//!
//! `Ready`, `Reconciling` and `Stalled` mean what kstatus means (the *controller's* progress towards the spec): an engine
//! that hangs is `EnginesProgressing=False`, never `Stalled`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Every wanted replica is ready, by progress.
pub const READY: &str = "Ready";
/// kstatus: present and `True` only while the operator still works towards the spec.
pub const RECONCILING: &str = "Reconciling";
/// kstatus: present and `True` only while the operator cannot get further without a person.
pub const STALLED: &str = "Stalled";
/// Do the engines deliver tokens for the work that they owe? `Unknown` where no agent has said so.
pub const ENGINES_PROGRESSING: &str = "EnginesProgressing";
/// `False` while the episode that some pod reports cannot be read.
pub const EPISODES_READABLE: &str = "EpisodesReadable";

/// Present and `True` only while restarts are wanted and none is granted, because too much stalls at once: page somebody.
pub const RESTARTS_HELD: &str = "RestartsHeld";

/// Present and `True` only while the number of replicas does not follow the spec, because of an open incident.
pub const SCALING_HELD: &str = "ScalingHeld";

/// Present and `True` only while the `/health` of a stalled engine answers 200: whoever routes by it alone sends clients into a hang.
pub const HEALTH_LIES: &str = "HealthLies";

/// Present and `True` only while a pod has the name of this InferenceDeployment in its label and another owner than its label says (A16).
pub const OBJECTS_DOUBTED: &str = "ObjectsDoubted";

/// Why a condition is what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Every wanted replica is ready.
    AllReplicasReady,
    /// `spec.replicas` is 0.
    ScaledToZero,
    /// Fewer replicas are ready than are wanted.
    ReplicasNotReady,
    /// The Deployment still rolls out the newest template.
    RolloutInProgress,
    /// Pods that are wanted cannot be made: quota, admission, a limit range. Kubernetes tries again.
    PodsRefused,
    /// A request to the API failed; it is tried again.
    ApiError,
    /// The spec asks for something that cannot be built.
    InvalidSpec,
    /// The API server refuses what the operator sends; trying again alone will not help.
    Refused,
    /// Every engine makes progress (or owes no work).
    AllProgressing,
    /// At least one engine makes no progress.
    EngineNotProgressing,
    /// At least one agent has not reported yet.
    NotReported,
    /// An agent has reported progress, and its pod is not ready: it is away, or kept out of traffic, and its word may be an old one.
    NotVouchedFor,
    /// An agent whose replica nobody fences has not renewed its word of progress in time.
    NotHeard,
    /// A person keeps replicas out of traffic, and nothing else is missing.
    FencedByPerson,
    /// There is no pod to ask.
    NoReplicas,
    /// Every reported episode could be read.
    EpisodesValid,
    /// At least one reported episode is not what the contract says.
    EpisodeUnreadable,
    /// More than the policy's share of this deployment stalls at once.
    CommonCause,
    /// More than the operator's share of the whole fleet stalls at once.
    FleetCommonCause,
    /// More than the policy's share of the replicas on one node or in one failure domain stalls at once; others are granted.
    PlaceCommonCause,
    /// The revision of this spec has failed, and the last good one stands in its place.
    RolledBack,
    /// The revision of this spec has failed, and nothing was rolled back: it is held by policy, or there is nothing to go back to.
    RolloutFailed,
    /// An engine stalls, and the policy is not to scale meanwhile.
    IncidentOpen,
    /// The engine's own `/health` answers 200 while nothing is delivered.
    Answers200,
    /// A label says that the object belongs here, and its owner reference says something else.
    OwnerMismatch,
}

impl Reason {
    /// The name as it stands in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::AllReplicasReady => "AllReplicasReady",
            Reason::ScaledToZero => "ScaledToZero",
            Reason::ReplicasNotReady => "ReplicasNotReady",
            Reason::RolloutInProgress => "RolloutInProgress",
            Reason::PodsRefused => "PodsRefused",
            Reason::ApiError => "ApiError",
            Reason::InvalidSpec => "InvalidSpec",
            Reason::Refused => "Refused",
            Reason::AllProgressing => "AllProgressing",
            Reason::EngineNotProgressing => "EngineNotProgressing",
            Reason::NotReported => "NotReported",
            Reason::NotVouchedFor => "NotVouchedFor",
            Reason::NotHeard => "NotHeard",
            Reason::FencedByPerson => "FencedByPerson",
            Reason::NoReplicas => "NoReplicas",
            Reason::EpisodesValid => "EpisodesValid",
            Reason::EpisodeUnreadable => "EpisodeUnreadable",
            Reason::CommonCause => "CommonCause",
            Reason::FleetCommonCause => "FleetCommonCause",
            Reason::PlaceCommonCause => "PlaceCommonCause",
            Reason::RolledBack => "RolledBack",
            Reason::RolloutFailed => "RolloutFailed",
            Reason::IncidentOpen => "IncidentOpen",
            Reason::Answers200 => "Answers200",
            Reason::OwnerMismatch => "OwnerMismatch",
        }
    }
}

/// One finding: what a condition should say now, without the bookkeeping of times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Condition type, one of the constants here.
    pub type_: &'static str,
    /// `True`, `False` or `Unknown`.
    pub status: &'static str,
    pub reason: Reason,
    /// For people; cut to 1024 characters.
    pub message: String,
}

/// The new condition list: exactly `findings`, in their order. A condition whose status is unchanged keeps its
/// `lastTransitionTime`, so that an unchanged world gives an equal list (quiescent = silent, P7).
pub fn merge(old: &[Condition], findings: &[Finding], generation: i64, now: jiff::Timestamp) -> Vec<Condition> {
    findings
        .iter()
        .map(|finding| {
            let before = old.iter().find(|c| c.type_ == finding.type_ && c.status == finding.status);
            Condition {
                type_: finding.type_.to_owned(),
                status: finding.status.to_owned(),
                reason: finding.reason.as_str().to_owned(),
                message: finding.message.chars().take(1024).collect(),
                observed_generation: Some(generation),
                last_transition_time: before.map_or(Time(now), |c| c.last_transition_time.clone()),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(status: &'static str) -> Finding {
        Finding { type_: READY, status, reason: Reason::ReplicasNotReady, message: "0 of 1".to_owned() }
    }

    #[test]
    fn transition_time_moves_only_with_the_status() {
        let (t0, t1) = (jiff::Timestamp::UNIX_EPOCH, jiff::Timestamp::from_second(60).unwrap());
        let first = merge(&[], &[finding("False")], 1, t0);
        assert_eq!(merge(&first, &[finding("False")], 1, t1), first);
        let turned = merge(&first, &[finding("True")], 2, t1);
        assert_eq!(turned[0].last_transition_time.0, t1);
        assert_eq!(turned[0].observed_generation, Some(2));
    }

    #[test]
    fn a_condition_without_a_finding_goes() {
        let old = merge(&[], &[finding("False")], 1, jiff::Timestamp::UNIX_EPOCH);
        assert!(merge(&old, &[], 1, jiff::Timestamp::UNIX_EPOCH).is_empty());
    }
}
