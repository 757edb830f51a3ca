//! Where a model comes from: a folder that is there when the engine starts. Nothing is fetched at start-up
//! (docs/decisions/2026-11-25-what-the-api-leaves-out.md).

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::inference_deployment::ImagePullPolicy;

/// The model to serve.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Model {
    /// Where the model's folder comes from. The engine's container sees its path as `$TRUEBEAT_MODEL_PATH`.
    pub source: ModelSource,
}

/// Exactly one of the sources.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(cel, validation = Rule::new("(has(self.file) ? 1 : 0) + (has(self.pvc) ? 1 : 0) + (has(self.oci) ? 1 : 0) == 1")
    .message("set exactly one of file, pvc and oci"))]
pub struct ModelSource {
    /// A folder that is already in the engine's image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<FileSource>,
    /// A folder in a PersistentVolumeClaim of the same namespace, mounted read-only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pvc: Option<PvcSource>,
    /// A folder in an OCI image that holds nothing but the model, mounted read-only (an image volume: Kubernetes 1.35 or newer, where the node's
    /// runtime can).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oci: Option<OciSource>,
}

/// A folder in the engine's image.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct FileSource {
    /// Absolute path inside the engine's image.
    #[schemars(length(min = 1, max = 1024), regex(pattern = r"^/"))]
    pub path: String,
}

/// A folder in a claim.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(cel)]
pub struct PvcSource {
    /// Name of the PersistentVolumeClaim, in the namespace of this object.
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"))]
    pub claim_name: String,
    /// Path of the model's folder inside the volume, relative to its root. Empty: the root itself.
    #[serde(default)]
    #[schemars(length(max = 1024))]
    #[x_kube(validation = Rule::new("!self.startsWith('/') && !self.contains('..')")
        .message("path is relative to the volume's root and may not contain '..'"))]
    pub path: String,
}

/// A folder in an image.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(cel)]
pub struct OciSource {
    /// Reference of the image or artifact. With a digest all replicas have the same weights.
    #[schemars(length(min = 1, max = 1024))]
    #[x_kube(validation = Rule::new("self.matches('^[^[:space:]]+$')").message("reference names one image, without blanks"))]
    pub reference: String,
    /// When to pull it; the cluster's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_policy: Option<ImagePullPolicy>,
    /// Path of the model's folder inside the image, relative to its root. Empty: the root itself.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    #[x_kube(validation = Rule::new("!self.startsWith('/') && !self.contains('..')")
        .message("path is relative to the image's root and may not contain '..'"))]
    pub path: String,
}
