//! A person's word on a pod: an annotation, with who says it and when. What it means is for the agent to know, which reads it as a file.

use anyhow::{Context, bail};
use crds::LABEL_DEPLOYMENT;
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::DEADLINE;

const FIELD_MANAGER: &str = "kubectl-truebeat";

/// A word that is to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct Word {
    pod: String,
    /// Of another pod of this name nothing was said.
    uid: Option<String>,
    annotation: &'static str,
    /// Null takes the annotation off.
    value: Value,
}

impl Word {
    pub fn of(pod: &Pod, annotation: &'static str, value: Value) -> Self {
        Self { pod: pod.name_any(), uid: pod.uid(), annotation, value }
    }

    /// The same annotation taken off again.
    pub fn taken_back(&self) -> Self {
        Self { value: Value::Null, ..self.clone() }
    }

    /// Writes it.
    ///
    /// # Errors
    /// The pod is gone, there is no right to patch pods, or no answer in time: then it may be written all the same.
    pub async fn write(&self, client: &Client, namespace: &str) -> anyhow::Result<()> {
        let (pods, name): (Api<Pod>, _) = (Api::namespaced(client.clone(), namespace), &self.pod);
        let body = json!({"metadata": {"uid": self.uid, "annotations": {self.annotation: self.value}}});
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let patch = Patch::Merge(&body);
        let Ok(patched) = timeout(DEADLINE, pods.patch(name, &params, &patch)).await else {
            bail!(
                "the API server has not said within {} s whether it annotated pod {name}: it may have done so all the same; look with \
                 `truebeat kubectl why {name} -n {namespace}`",
                DEADLINE.as_secs()
            );
        };
        patched.with_context(|| format!("could not annotate pod {name} (may you patch pods?)")).map(drop)
    }
}

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
