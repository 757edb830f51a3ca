//! A person's word on a pod: an annotation, with who says it and when. What it means is for the agent to know, which reads it as a file.

use anyhow::{Context, bail};
use crds::LABEL_DEPLOYMENT;
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};

const FIELD_MANAGER: &str = "kubectl-truebeat";

/// The pod of this name and the InferenceDeployment that it belongs to; `what` its agent is wanted for, in words.
///
/// # Errors
/// No such pod, or none of Truebeat's.
pub async fn pod_of_ours(pods: &Api<Pod>, namespace: &str, name: &str, what: &str) -> anyhow::Result<(Pod, String)> {
    let pod = pods.get_opt(name).await.with_context(|| format!("could not read pod {namespace}/{name}"))?;
    let pod = pod.with_context(|| format!("there is no pod {name} in namespace {namespace}"))?;
    let Some(deployment) = pod.labels().get(LABEL_DEPLOYMENT).cloned() else {
        bail!("pod {name} belongs to no InferenceDeployment: there is no agent in it that could {what}");
    };
    Ok((pod, deployment))
}

/// Writes one annotation of this very pod; null takes it off.
///
/// # Errors
/// It is gone, or there is no right to patch pods.
pub async fn annotate(pods: &Api<Pod>, pod: &Pod, name: &str, value: Value) -> anyhow::Result<()> {
    let body = json!({"metadata": {"uid": pod.uid(), "annotations": {name: value}}});
    let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    let patched = pods.patch(&pod.name_any(), &params, &Patch::Merge(&body)).await;
    patched.with_context(|| format!("could not annotate pod {} (may you patch pods?)", pod.name_any())).map(drop)
}

/// The name by which the API server knows this person; the record should not say "somebody".
pub async fn who(client: &Client) -> String {
    let reviews: Api<SelfSubjectReview> = Api::all(client.clone());
    let review = reviews.create(&PostParams::default(), &SelfSubjectReview::default()).await.ok();
    let answer = review.and_then(|review| review.status?.user_info?.username);
    answer.unwrap_or_else(|| "somebody".to_owned())
}

/// A time as it stands in an annotation: RFC 3339, whole seconds.
pub fn written(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
