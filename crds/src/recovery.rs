//! What may be done when an engine stops making progress, and how long its record is kept.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// What is a duration here, before anybody has to read it: no part can overflow, and the whole is 30 days at most. (`KubeSchema` knows no
/// struct whose defaults are its own, so the rules are written into the schema.)
fn duration_rules() -> Value {
    json!([{
        "rule": "self.matches('^([0-9]{1,10}ms|[0-9]{1,7}s|[0-9]{1,5}m|[0-9]{1,3}h)+$') && duration(self) <= duration('720h')",
        "message": "a duration is a number with a unit, such as 500ms, 10s, 5m or 1h30m, and at most 720h (30 days)",
    }])
}

/// The same, and long enough to be read by somebody.
fn ttl_rules() -> Value {
    let mut rules = duration_rules();
    let least = json!({
        "rule": "!self.matches('^([0-9]{1,10}ms|[0-9]{1,7}s|[0-9]{1,5}m|[0-9]{1,3}h)+$') || duration(self) >= duration('1m')",
        "message": "the record of an incident is kept for at least 1m",
    });
    rules.as_array_mut().into_iter().for_each(|list| list.push(least.clone()));
    rules
}

/// The same, and either nothing or long enough for somebody who is paged to look first.
fn trial_rules() -> Value {
    let mut rules = duration_rules();
    let least = json!({
        "rule": "!self.matches('^([0-9]{1,10}ms|[0-9]{1,7}s|[0-9]{1,5}m|[0-9]{1,3}h)+$') || duration(self) == duration('0s') || duration(self) >= duration('1m')",
        "message": "restarts are held for at least 1m before one is tried, or 0s: none is tried",
    });
    rules.as_array_mut().into_iter().for_each(|list| list.push(least.clone()));
    rules
}

/// How far recovery goes.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
pub enum RecoveryMode {
    Observe,
    Fence,
    #[default]
    Recover,
}

/// What becomes of the last replica that serves.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
pub enum LastReplica {
    #[default]
    Serve,
    Fence,
}

/// What becomes of requests that were in flight at two stalls.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema)]
pub enum PoisonRequests {
    #[default]
    Refuse,
    Ignore,
}

/// What may be done when an engine stops making progress.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct Recovery {
    /// `Observe` only reports, saves the evidence of a confirmed stall and refuses no poison request; `Fence` also takes the replica out of traffic; `Recover`
    /// also restarts the engine (I1). A rollout is judged and taken back by `rollout` alone, whatever the mode.
    pub mode: RecoveryMode,
    /// How many replicas may be in a granted restart at the same time (I2).
    #[schemars(range(min = 1, max = 1000))]
    pub max_unavailable: i32,
    /// What to do with the last replica that serves when it is suspected (I3). `Serve`: it stays in traffic until its restart is
    /// granted, for slow beats nothing. `Fence`: it is taken out like any other.
    pub last_replica: LastReplica,
    /// When more than this many percent of the replicas (and at least three) stall at once, no restart is granted and
    /// `RestartsHeld` is `True`: a common cause is not cured by restarts (I2). 100 switches it off.
    #[schemars(range(min = 1, max = 100))]
    pub hold_percent: i32,
    /// After restarts were held for so long one replica is restarted on trial (in the whole fleet one, where it is the fleet that is held). If
    /// it serves for a minute the next one is, until so few stall that nothing holds them; each that is in vain doubles the pause before the
    /// next, up to an hour. A hold that comes to be about more than ever since it began waits for as long once more. A duration such as `5m`, at
    /// least `1m`; `0s`: nothing is tried, and the hold waits for a person.
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = trial_rules()))]
    pub trial_after: String,
    /// A pod whose engine was restarted this often within `stabilityWindow` is deleted at the next stall, and its Deployment
    /// makes another: repeated restarts in place would meet the kubelet's growing back-off. So is one whose engine, once restarted, ended
    /// three times on its way up.
    #[schemars(range(min = 1, max = 10))]
    pub restarts_before_replace: i32,
    /// The pause between the grants of two recoveries of one pod. It doubles with each one within `stabilityWindow`, and starts over when
    /// that has passed without any. A duration such as `10s`; `0s`: no pause.
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = duration_rules()))]
    pub restart_backoff: String,
    /// The longest such pause, not less than `restartBackoff`. A duration such as `5m`.
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = duration_rules()))]
    pub restart_backoff_max: String,
    /// How long a restart counts. A duration such as `10m`.
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = duration_rules()))]
    pub stability_window: String,
    /// After a pod was replaced its successors keep away from its node for this long, so that they do not get the same broken
    /// GPU (F3). A duration such as `1h`; `0s`: never.
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = duration_rules()))]
    pub avoid_for: String,
    /// At most so many percent of the nodes on which a pod could run are avoided at once: one where there are at least two,
    /// never all. A pod that finds no other place for 30 s ends it.
    #[schemars(range(min = 1, max = 50))]
    pub avoid_nodes_percent: i32,
    /// If no operator answers a confirmed stall for this long, the agent may grant itself one restart (I1). A duration such as `5m`;
    /// `0s`: never. Less than `10s` counts as `10s`.
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = duration_rules()))]
    pub unattended_after: String,
    /// At most one such restart in this long. A duration such as `1h`; less than `1m` counts as `1m`.
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = duration_rules()))]
    pub unattended_window: String,
    /// A request that was in flight at the stalls of two replicas, and was not answered within `poisonFor`, is refused by all of them with
    /// status 422 before it stalls a third (I7). `Ignore`: it is only told in the incidents.
    pub poison_requests: PoisonRequests,
    /// How long such a request stays refused after its last stall, and how far apart two stalls may lie. A duration such as `6h`.
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = duration_rules()))]
    pub poison_for: String,
    /// How long the record of an incident that is over is kept; then the operator deletes it. A duration such as `168h`, at least `1m`. One that
    /// its pod still tells of stays, and so does, for `poisonFor`, a stall that names what was in flight. Of one object at most 50 are kept.
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = ttl_rules()))]
    pub incident_ttl: String,
}

impl Default for Recovery {
    fn default() -> Self {
        Recovery {
            mode: RecoveryMode::default(),
            max_unavailable: 1,
            last_replica: LastReplica::default(),
            hold_percent: 60,
            trial_after: "5m".to_owned(),
            restarts_before_replace: 2,
            restart_backoff: "10s".to_owned(),
            restart_backoff_max: "5m".to_owned(),
            stability_window: "10m".to_owned(),
            avoid_for: "1h".to_owned(),
            avoid_nodes_percent: 30,
            unattended_after: "5m".to_owned(),
            unattended_window: "1h".to_owned(),
            poison_requests: PoisonRequests::default(),
            poison_for: "6h".to_owned(),
            incident_ttl: "168h".to_owned(),
        }
    }
}
