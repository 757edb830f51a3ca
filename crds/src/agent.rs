//! The agent's container in an `InferenceDeployment`: image, environment, the detector's numbers, where evidence lies; and the places in that
//! container which operator, agent and `kubectl truebeat` agree on.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::inference_deployment::{EnvVar, ImagePullPolicy, Resources};

/// A directory of the agent's own.
pub const AGENT_DIR: &str = "/run/truebeat-agent";
/// Where the agent links its own program, whatever the image calls it: who looks into a pod's evidence starts it by this.
pub const AGENT_PROGRAM: &str = "/run/truebeat-agent/program";
/// Where the agent of a pod writes its bundles.
pub const BUNDLE_DIR: &str = "/var/lib/truebeat/bundles";
/// Where it reads those of all pods, a folder each, if they are kept on a claim.
pub const EVIDENCE_DIR: &str = "/var/lib/truebeat/evidence";

/// Not above a cap: a duration of [`Policy`] by its field, and what it is where it is absent.
const ORDER: [(&str, &str, &str, &str); 3] = [
    ("nativeFloor", "300ms", "patienceCap", "300s"),
    ("nativeFloor", "300ms", "leaseCap", "300s"),
    ("foreignFloor", "2500ms", "patienceCap", "300s"),
];

/// The agent's container.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    cel,
    validation = Rule::new("!has(self.env) || !self.env.exists(e, e.name in ['POD_NAME', 'POD_NAMESPACE', 'POD_UID', 'NODE_NAME'])")
        .message("agent.env: POD_NAME, POD_NAMESPACE, POD_UID and NODE_NAME are the operator's")
)]
pub struct Agent {
    /// Image of the agent. Its entry point is given `agent supervise …`: it is `truebeat-agent`, or `truebeat`, which has the other roles too.
    #[schemars(length(min = 1, max = 1024))]
    pub image: String,
    /// When to pull the image; the cluster's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<ImagePullPolicy>,
    /// Requests and limits; absent: 100m and 128Mi requested, 512Mi at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// Environment of the agent, such as `NVIDIA_VISIBLE_DEVICES` where the node's runtime shows GPUs by it to a container that asks for none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub env: Vec<EnvVar>,
    /// What the agent logs, e.g. `info` or `agent=debug,info`; absent: `warn`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256), regex(pattern = r"^[A-Za-z0-9_:=,.-]+$"))]
    pub log_filter: Option<String>,
    /// Bounds of what the detector learns of its engine, where an engine is known to be other than most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// Where evidence lies; absent: in the pod, and gone with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evidence: Option<Evidence>,
}

/// Where evidence lies.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Evidence {
    /// A PersistentVolumeClaim of the same namespace that all replicas can mount at once (`ReadWriteMany`) and group 1000 can write to. Each pod
    /// writes into a folder of its own name, which outlives it, and reads the others'. Nothing of pods that are gone is ever removed.
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub claim_name: String,
}

/// Bounds of what the detector learns. Durations such as `500ms`, `90s` or `10m`; absent: the detector's own.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = order_rules()))]
pub struct Policy {
    /// The longest silence while work is owed that is waited for where nothing was learned; then a fence. Default `5m`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = duration_rules()))]
    pub patience_cap: Option<String>,
    /// The same while nothing works either: no CPU time, no busy GPU, no byte read. Default `1m`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = duration_rules()))]
    pub idle_patience: Option<String>,
    /// No step of an engine with a heartbeat page is suspect before this. Where it is not set, one that decodes alone on a quiet machine is from
    /// 150 ms on. Default `300ms`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = duration_rules()))]
    pub native_floor: Option<String>,
    /// No silence of an engine without one is suspect before this. Default `2500ms`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = duration_rules()))]
    pub foreign_floor: Option<String>,
    /// The longest pause of decode while prefill moves that a healthy engine makes. Default `1m`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = duration_rules()))]
    pub decode_starved: Option<String>,
    /// The longest lease of a step that a page is believed. Default `5m`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = duration_rules()))]
    pub lease_cap: Option<String>,
    /// The longest lease of a start-up that a page is believed. Default `15m`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = duration_rules()))]
    pub startup_lease_cap: Option<String>,
    /// How long a start-up may show no CPU time, no compiler and no page. Default `5m`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = duration_rules()))]
    pub startup_silence: Option<String>,
    /// `Slow`: so long a token at least, and `slowFactor` times what is usual. Default `1s`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 32), regex(pattern = r"^([0-9]+(ms|s|m|h))+$"), extend("x-kubernetes-validations" = duration_rules()))]
    pub slow_token: Option<String>,
    /// `Slow`: so many times what is usual of this engine. Default 10.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 1000))]
    pub slow_factor: Option<i32>,
}

impl Policy {
    /// Each duration: its field, its name among the detector's numbers (in milliseconds), and what it is set to.
    pub fn durations(&self) -> [(&'static str, &'static str, Option<&str>); 9] {
        [
            ("decodeStarved", "decode_starved_ms", self.decode_starved.as_deref()),
            ("foreignFloor", "foreign_floor_ms", self.foreign_floor.as_deref()),
            ("idlePatience", "idle_patience_ms", self.idle_patience.as_deref()),
            ("leaseCap", "lease_cap_ms", self.lease_cap.as_deref()),
            ("nativeFloor", "native_floor_ms", self.native_floor.as_deref()),
            ("patienceCap", "patience_cap_ms", self.patience_cap.as_deref()),
            ("slowToken", "slow_token_ms_min", self.slow_token.as_deref()),
            ("startupLeaseCap", "startup_lease_cap_ms", self.startup_lease_cap.as_deref()),
            ("startupSilence", "startup_silence_ms", self.startup_silence.as_deref()),
        ]
    }

    /// The floors that lie above their caps, by their fields; `ms` reads a duration.
    pub fn inverted(&self, ms: impl Fn(&str) -> Option<u128>) -> Vec<(&'static str, &'static str)> {
        let is = |field: &str, default: &str| {
            let set = self.durations().into_iter().find(|(name, ..)| *name == field).and_then(|(.., set)| set);
            ms(set.unwrap_or(default))
        };
        let inverted = ORDER.iter().filter(|(floor, low, cap, high)| {
            is(floor, low).zip(is(cap, high)).is_some_and(|(floor, cap)| floor > cap)
        });
        inverted.map(|(floor, _, cap, _)| (*floor, *cap)).collect()
    }
}

/// No part can overflow, and no bound is nothing or longer than a day.
fn duration_rules() -> Value {
    json!([{
        "rule": "self.matches('^([0-9]{1,8}ms|[0-9]{1,5}s|[0-9]{1,4}m|[0-9]{1,2}h)+$') && duration(self) > duration('0s') && duration(self) <= duration('24h')",
        "message": "a duration is a number with a unit, such as 500ms, 90s, 10m or 1h30m, more than nothing and at most 24h",
    }])
}

/// No floor above its cap: an agent that is told so does not start, and its engine neither.
fn order_rules() -> Value {
    let is = |field: &str, default: &str| format!("duration(has(self.{field}) ? self.{field} : '{default}')");
    let rules = ORDER.iter().map(|(floor, low, cap, high)| {
        json!({
            "rule": format!("{} <= {}", is(floor, low), is(cap, high)),
            "message": format!("agent.policy: {floor} is above {cap}; lower the floor or raise the cap"),
        })
    });
    Value::Array(rules.collect())
}
