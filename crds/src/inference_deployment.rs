//! `InferenceDeployment`: what a person wants. Every field here has an effect that can be observed (P11); every list and
//! string has a limit, so that the CEL rules have a bounded cost. Rules carry messages that say what to do.

#![allow(clippy::duplicated_attributes, reason = "one printcolumn attribute a column is how the derive macro is told")]

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{overlay::PodOverlay, rollout::Rollout, scaling::Scaling, status::InferenceDeploymentStatus};

pub use crate::agent::{Agent, Evidence};
pub use crate::model::{FileSource, Model, ModelSource, OciSource, PvcSource};
pub use crate::recovery::{LastReplica, PoisonRequests, Recovery, RecoveryMode};

/// A model served by some replicas of an engine, each watched by an agent that makes health mean progress.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "inference.truebeat.io",
    version = "v1alpha1",
    kind = "InferenceDeployment",
    namespaced,
    cel,
    derive = "PartialEq",
    status = "InferenceDeploymentStatus",
    shortname = "infd",
    category = "inference",
    doc = "A model served by replicas of an inference engine whose health means progress: tokens delivered for the work that is owed.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Replicas", type_ = "integer", json_path = ".spec.replicas"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.readyReplicas"),
    printcolumn(name = "Progressing", type_ = "integer", json_path = ".status.progressingReplicas"),
    printcolumn(name = "Fenced", type_ = "integer", json_path = ".status.fencedReplicas"),
    printcolumn(name = "Incidents", type_ = "integer", json_path = ".status.openIncidents"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason"),
    printcolumn(name = "Engine", type_ = "string", json_path = ".spec.engine.kind", priority = 1),
    printcolumn(name = "Revision", type_ = "string", json_path = ".status.rollout.target", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.metadata.name.size() <= 48 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')")
        .message("the name also names a Service and labels: at most 48 of [a-z0-9-], starting with a letter, no dot")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.engine.kind != 'Truebeat' || has(self.model)")
        .message("engine.kind Truebeat needs model.source: the path of the model folder"),
    validation = Rule::new("self.engine.port != self.gate.port && self.engine.port != 9400 && self.gate.port != 9400")
        .message("engine.port, gate.port and the agent's port 9400 must differ: they share one network namespace"),
    validation = Rule::new("self.rollout.progressDeadlineSeconds > self.rollout.soakSeconds")
        .message("rollout.progressDeadlineSeconds must be more than rollout.soakSeconds, or no rollout would ever be in time"),
    validation = Rule::new("duration(self.recovery.restartBackoffMax) >= duration(self.recovery.restartBackoff)")
        .message("recovery.restartBackoffMax must be at least recovery.restartBackoff, the pause that it bounds"),
    validation = Rule::new("self.gate.port == oldSelf.gate.port")
        .message("gate.port cannot change: during a rollout old and new replicas stand behind one Service; make another InferenceDeployment")
)]
pub struct InferenceDeploymentSpec {
    /// How many replicas to run. Also the scale subresource, for HPA, KEDA and `kubectl scale`.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1000))]
    pub replicas: i32,
    /// The model. Optional for engines that bring their own (`VLLM`, `SGLang`, `Custom`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<Model>,
    /// The engine's container.
    pub engine: Engine,
    /// The agent's container, a native sidecar that watches, fences and explains.
    pub agent: Agent,
    /// What may be done when an engine stops making progress.
    #[serde(default)]
    pub recovery: Recovery,
    /// How long running requests may take to finish when a pod is deleted, in seconds, before the engine gets SIGTERM.
    #[serde(default = "drain_seconds")]
    #[schemars(range(min = 0, max = 3600))]
    pub drain_seconds: i32,
    /// The agent's proxy in front of the engine: clients talk to it alone.
    #[serde(default)]
    pub gate: Gate,
    /// How a new revision of the replicas comes in, and when it is taken back.
    #[serde(default)]
    pub rollout: Rollout,
    /// Scaling while engines stall.
    #[serde(default)]
    pub scaling: Scaling,
    /// What is laid over the pods that the operator builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_overlay: Option<PodOverlay>,
}

/// Which engine it is: decides the arguments that the operator adds; also a label of the pods.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, JsonSchema)]
pub enum EngineKind {
    Truebeat,
    #[serde(rename = "VLLM")]
    Vllm,
    SGLang,
    Custom,
}

/// When the kubelet pulls an image.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, JsonSchema)]
pub enum ImagePullPolicy {
    Always,
    IfNotPresent,
    Never,
}

/// The engine's container. It runs as user 1000 without any capability, on a read-only root with `/tmp` writable.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    cel,
    validation = Rule::new("!has(self.tensorParallel) || self.kind != 'Custom'")
        .message("engine.tensorParallel: nobody knows how an engine of kind Custom is told; say it in engine.args"),
    validation = Rule::new("!has(self.tensorParallel) || self.kind != 'Truebeat' || self.tensorParallel <= 16")
        .message("engine.tensorParallel: an engine of kind Truebeat is split over at most 16 ranks"),
    validation = Rule::new("!has(self.tensorParallel) || !has(self.args) || !self.args.exists(a, a.startsWith('--tensor-parallel') || a == '-tp' || a.startsWith('-tp=') || a == '--tp' || a.startsWith('--tp=') || a.startsWith('--tp-size'))")
        .message("engine.tensorParallel and a flag for the same in engine.args: say it once"),
    validation = Rule::new("!has(self.tensorParallel) || !has(self.resources) || !has(self.resources.limits) || !('nvidia.com/gpu' in self.resources.limits) || !self.resources.limits['nvidia.com/gpu'].matches('^[0-9]{1,6}$') || int(self.resources.limits['nvidia.com/gpu']) >= self.tensorParallel")
        .message("engine.tensorParallel needs a GPU for each rank: raise nvidia.com/gpu in engine.resources.limits")
)]
pub struct Engine {
    /// Which engine it is. `Truebeat` gets `engine --model … --listen …` before `args`; the others get `args` alone.
    pub kind: EngineKind,
    /// Image of the engine.
    #[schemars(length(min = 1, max = 1024))]
    pub image: String,
    /// When to pull the image; the cluster's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<ImagePullPolicy>,
    /// Replaces the image's entry point.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 4096)))]
    pub command: Vec<String>,
    /// Arguments. `$(TRUEBEAT_MODEL_PATH)` and `$(TRUEBEAT_ENGINE_PORT)` are expanded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), inner(length(max = 4096)))]
    pub args: Vec<String>,
    /// Environment of the engine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub env: Vec<EnvVar>,
    /// Requests and limits, GPUs among them (`nvidia.com/gpu: "1"` in limits).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// Over how many ranks each layer is split: `--tensor-parallel N` (`Truebeat`) or `--tensor-parallel-size N` (`VLLM`, `SGLang`) after
    /// `args`; at most 16 of `Truebeat`. Absent: the engine's own way. All ranks are in one pod, and `engine.resources` are those of all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub tensor_parallel: Option<i32>,
    /// Port of the engine's HTTP server. The engine should listen on 127.0.0.1 alone: clients come through the gate.
    #[serde(default = "engine_port")]
    #[schemars(range(min = 1024, max = 65535))]
    pub port: i32,
}

/// One environment variable: a value, or a key of a Secret or ConfigMap of the same namespace.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    cel,
    validation = Rule::new("!(has(self.value) && has(self.valueFrom))").message("set value or valueFrom, not both")
)]
pub struct EnvVar {
    /// Name of the variable.
    #[schemars(length(min = 1, max = 256), regex(pattern = r"^[A-Za-z_][A-Za-z0-9_.-]*$"))]
    #[x_kube(validation = Rule::new("!self.startsWith('TRUEBEAT_')").message("names that start with TRUEBEAT_ are the operator's"))]
    pub name: String,
    /// Literal value; empty if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 8192))]
    pub value: Option<String>,
    /// A reference instead of a value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_from: Option<EnvVarSource>,
}

/// Exactly one reference.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    cel,
    validation = Rule::new("has(self.secretKeyRef) != has(self.configMapKeyRef)")
        .message("set exactly one of secretKeyRef and configMapKeyRef")
)]
pub struct EnvVarSource {
    /// A key of a Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_key_ref: Option<KeyRef>,
    /// A key of a ConfigMap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map_key_ref: Option<KeyRef>,
}

/// A key of an object in the same namespace.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct KeyRef {
    /// Name of the object.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Key in it.
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

/// Requests and limits by resource name; quantities are strings (`"2"`, `"500m"`, `"8Gi"`).
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    cel,
    validation = Rule::new("!has(self.requests) || self.requests.all(k, self.requests[k].matches('^[0-9]+([.][0-9]+)?([eE][0-9]+|m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$'))")
        .message("requests: a quantity is a string such as \"2\", \"500m\" or \"8Gi\""),
    validation = Rule::new("!has(self.limits) || self.limits.all(k, self.limits[k].matches('^[0-9]+([.][0-9]+)?([eE][0-9]+|m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$'))")
        .message("limits: a quantity is a string such as \"2\", \"500m\" or \"8Gi\"")
)]
pub struct Resources {
    /// What the scheduler reserves.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16, "additionalProperties" = {"type": "string", "maxLength": 32}))]
    pub requests: BTreeMap<String, String>,
    /// What the container may use at most.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16, "additionalProperties" = {"type": "string", "maxLength": 32}))]
    pub limits: BTreeMap<String, String>,
}

/// The agent's proxy in front of the engine.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct Gate {
    /// Port on which clients are served; the Service's port 80 leads here.
    #[schemars(range(min = 1024, max = 65535))]
    pub port: i32,
    /// Requests in flight through one replica's gate at once (4096 where it is not set); whoever comes beyond them is answered 503 and told to come
    /// again. Each takes 30 to 110 KiB of the agent's memory: with more, raise `agent.resources`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100_000))]
    pub in_flight_max: Option<i32>,
    /// For how many seconds a client's connection is kept that asks for nothing (620 where it is not set): longer than a load balancer in front
    /// keeps it, or that one answers 502 now and then.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86_400))]
    pub client_idle_seconds: Option<i32>,
}

impl Default for Gate {
    fn default() -> Self {
        Gate { port: 8080, in_flight_max: None, client_idle_seconds: None }
    }
}

fn one() -> i32 {
    1
}

fn drain_seconds() -> i32 {
    30
}

fn engine_port() -> i32 {
    8000
}
