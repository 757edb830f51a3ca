//! What an agent tells the operator about one episode: the message of the pod condition `truebeat.io/episode`, as JSON.
//!
//! The agent writes it, the operator reads it; neither imports the other. A field that is absent has not happened yet.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::poison::InFlight;
use crate::xid::Xid;

/// Pod condition for people: `True` progresses, `False` does not, `Unknown` cannot tell; reason = verdict or stall class.
pub const CONDITION_PROGRESSING: &str = "truebeat.io/progressing";
/// Pod condition for the operator: `True` while an episode is open; the message is an [`Episode`] as JSON.
pub const CONDITION_EPISODE: &str = "truebeat.io/episode";
/// Pod condition for people: `True` while the engine is stalled and its own `/health` answers 200 all the same (reason `Answers200`), else
/// `False` (reason `NoLieSeen`). Whoever routes by `/health` alone sends clients into that hang.
pub const CONDITION_HEALTH_LIE: &str = "truebeat.io/health-lie";
/// Pod annotation, written by the operator alone: the id of the episode whose restart is granted (the second key, I1).
pub const ANNOTATION_RESTART_GRANT: &str = "truebeat.io/restart-grant";
/// Pod annotation, written by the operator alone: `<episode id>@<RFC 3339 seconds UTC>`. An operator is there and holds the
/// episode in its queue until the restart budget (I2) has a slot, so the agent's unattended clock (I1) must not run. It is
/// renewed every 20 s while the episode waits and then left to age: a reader asks whether it is fresh.
pub const ANNOTATION_RESTART_QUEUED: &str = "truebeat.io/restart-queued";
/// Pod annotation, written by the operator alone: `true` while this pod is the last one of its deployment that serves and the
/// policy is to let it serve (I3). The agent does not fence then until a restart is granted. It stands until another serves.
pub const ANNOTATION_LAST_SERVING: &str = "truebeat.io/last-serving";
/// The class of an episode whose process outlives SIGKILL.
pub const CLASS_UNKILLABLE: &str = "Unkillable";
/// An agent says its conditions anew at least this often, should somebody have wiped them, or the API server's store have gone back to
/// what they once were. While its API server is out of reach it cannot.
pub const REPEATED_EVERY: Duration = Duration::from_secs(60);
/// Where nobody is fenced (mode `Observe`, the last one that serves) the kubelet's `Ready` vouches for the agent and not for its engine. There
/// the agent's word of progress bears the time at which it was given (`lastProbeTime`), and is given anew so often.
pub const VOUCHED_EVERY: Duration = Duration::from_secs(600);
/// A word with a time that is longer ago is no news: its agent does not get through to the API server. (The clocks of two nodes may differ.)
pub const VOUCHED_MAX: Duration = Duration::from_secs(1_500);
/// Field manager of the agent's server-side apply to its own pod's status.
pub const AGENT_FIELD_MANAGER: &str = "truebeat-agent";

/// One stall of one engine process, from suspicion to serving again. Times are RFC 3339 with milliseconds, UTC.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Episode {
    /// Unique: pod uid or host name, engine pid and start ticks, and a number. At most 128 characters of `[a-z0-9.-]`.
    pub id: String,
    /// Stall class by name (`StepStalled` …), or `Dead`.
    pub class: String,
    /// `Suspect`, `Stalled`, `Granted`, `Killed`, `Restarting`, `Recovered`, `Cleared` (a suspicion that ended by itself).
    pub stage: String,
    /// Why, in words, newest verdict first.
    #[serde(default)]
    pub reasons: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspect_at: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fenced_at: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confirmed_at: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evidence_at: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granted_at: Option<String>,
    /// `operator`, `self` (unattended or `truebeat run`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub granted_by: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub killed_at: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serving_at: Option<String>,
    /// Where the bundle lies (path or URL), if it could be written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bundle: Option<String>,
    /// Class + top frames + flags + image, hashed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// Requests that were in flight when the engine was killed, and requests that the gate refused while fenced.
    #[serde(default)]
    pub requests_lost: u64,
    #[serde(default)]
    pub requests_refused: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu_uuids: Vec<String>,
    /// Xids that the driver reported of its GPUs and that no delivery has proven harmless; at most [`XIDS_MAX`](crate::xid::XIDS_MAX).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub xids: Vec<Xid>,
    /// Requests that were in flight when it began, by fingerprint (I7); those that never succeeded here first, at most
    /// [`IN_FLIGHT_MAX`](crate::poison::IN_FLIGHT_MAX).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub in_flight: Vec<InFlight>,
}

impl Episode {
    /// Is a restart wanted and not yet granted?
    pub fn awaits_grant(&self) -> bool {
        self.stage == "Stalled"
    }

    /// Is a restart in place pointless: does a GPU need a reset, or its node more, or does the process outlive its kill?
    pub fn needs_another_place(&self) -> bool {
        self.unkillable() || self.outlasts_a_restart()
    }

    /// Was a process of the engine still there long after its SIGKILL? Nothing but its node can end it (I5).
    pub fn unkillable(&self) -> bool {
        self.class == CLASS_UNKILLABLE
    }

    /// Was its restart granted in vain: is it on its way up again on a GPU that no restart mends, or does the process not even end?
    pub fn awaits_replacement(&self) -> bool {
        match self.stage.as_str() {
            "Restarting" => self.outlasts_a_restart(),
            "Granted" | "Killed" => self.unkillable(),
            _ => false,
        }
    }

    fn outlasts_a_restart(&self) -> bool {
        self.xids.iter().any(|xid| xid.remedy.outlasts_a_restart())
    }

    /// Did the engine stall or die, beyond suspicion?
    pub fn is_stall(&self) -> bool {
        self.confirmed_at.is_some() || self.class == "Dead"
    }

    /// Has it ended?
    pub fn closed(&self) -> bool {
        matches!(self.stage.as_str(), "Recovered" | "Cleared")
    }
}
