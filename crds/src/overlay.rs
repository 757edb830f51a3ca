//! What a user may lay over the pods that the operator builds: nodes, tolerations, volumes, labels, a few fields of the engine.

use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Parts of a pod template, merged over the operator's own as `kubectl patch --type=strategic` would.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct PodOverlay {
    /// Labels and annotations of the pods.
    pub metadata: OverlayMetadata,
    /// Fields of the pod's spec, as in `v1.PodSpec`: affinity, dnsConfig, dnsPolicy, hostAliases, imagePullSecrets, nodeSelector,
    /// priorityClassName, readinessGates, resourceClaims, runtimeClassName, schedulerName, tolerations, topologySpreadConstraints,
    /// volumes; of `containers` the one named `engine` with envFrom, resources.claims, volumeDevices, volumeMounts and workingDir;
    /// `initContainers` of your own, which end before the agent starts. A field that is null says nothing. Everything else is refused
    /// with a message (`Stalled=True`, reason `InvalidSpec`).
    #[serde(skip_serializing_if = "Map::is_empty")]
    #[schemars(schema_with = "free")]
    pub spec: Map<String, Value>,
}

/// Labels and annotations of the pods.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct OverlayMetadata {
    /// Labels. Those of Truebeat and `app.kubernetes.io/` are the operator's.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32, "additionalProperties" = {"type": "string", "maxLength": 63}))]
    pub labels: BTreeMap<String, String>,
    /// Annotations. Those of Truebeat and the deletion cost are the operator's.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32, "additionalProperties" = {"type": "string", "maxLength": 4096}))]
    pub annotations: BTreeMap<String, String>,
}

/// The schema of `v1.PodSpec` is not repeated here: the operator reads it by that type and says what is wrong.
fn free(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object", "maxProperties": 16, "x-kubernetes-preserve-unknown-fields": true})
}
