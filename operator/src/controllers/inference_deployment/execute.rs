//! Stage 5: makes the writes of a plan, in the order that a crash at any point survives (P1).
//!
//! Children first; then the budget (I2: stored under the resourceVersion that the plan was made from), but before them where others wait for
//! their turn to grant; only then the pods hear of grants; then the records (before everything where a child may take pods away); then pods are deleted; the status last. One
//! failed write does not keep the others from being made, but where the budget could not be stored no pod hears of anything.
//!
//! Writes of one stage go to different objects, so they are made at the same time: fifty replicas that stall together do not wait for
//! each other's answers.

use std::{collections::BTreeSet, fmt, future::ready};

use crds::{EngineIncident, InferenceDeployment, InferenceDeploymentStatus};
use futures::{FutureExt, StreamExt, future::BoxFuture, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Resource, ResourceExt,
    core::{DynamicObject, PartialObjectMeta},
};
use serde_json::json;
use tokio::time::Instant;

use super::{
    build::{Child, labels},
    plan::{Plan, PodPatch, Replacement},
};
use crate::{
    client::{CallError, Calls},
    controllers::{
        incidents::plan::{IncidentPlan, IncidentWrite, closed_stall},
        nodes::{self, plan::avoid_label},
    },
};

/// Writes of one stage that are on their way at the same time: eight passes of them stay below what an API server takes by default (200).
pub const AT_ONCE: usize = 16;

/// A write that failed, as a value for the status.
#[derive(Debug, Clone, PartialEq)]
pub struct StepError {
    /// What was attempted, for people.
    pub subject: String,
    /// Trying again alone will not help.
    pub lasting: bool,
    pub message: String,
}

impl fmt::Display for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.subject, self.message)
    }
}

impl StepError {
    pub fn new(subject: String, error: &CallError) -> Self {
        StepError { subject, lasting: error.lasting(), message: error.to_string() }
    }
}

/// Applies the children, but not the Deployment if it must `wait`; returns what failed.
pub async fn children(calls: &Calls, infd: &InferenceDeployment, plan: &Plan, wait: bool) -> Vec<StepError> {
    let namespace = infd.namespace().unwrap_or_default();
    let mut errors = Vec::new();
    for child in &plan.applies {
        if wait && child.resource.kind == "Deployment" {
            let subject = format!("apply {} {}", child.resource.kind, child.name);
            let message = "waits for the record of what its pods alone tell of".to_owned();
            errors.push(StepError { subject, lasting: false, message });
            continue;
        }
        let api: Api<PartialObjectMeta<DynamicObject>> =
            Api::namespaced_with(calls.client.clone(), &namespace, &child.resource);
        match apply(calls, &api, child).await {
            Ok(()) => calls.fleet.repairs.applied(&(namespace.clone(), infd.name_any()), child, Instant::now()),
            Err(error) => errors.push(error),
        }
    }
    errors
}

/// A forced apply takes whatever has the name. One that was looked at is named by its UID; where the look found nothing, somebody may have made
/// theirs meanwhile: the children before this one can take seconds each. (No apply can say that there must be none; what is left is the time
/// of one answer.)
async fn apply(calls: &Calls, api: &Api<PartialObjectMeta<DynamicObject>>, child: &Child) -> Result<(), StepError> {
    let subject = || format!("apply {} {}", child.resource.kind, child.name);
    let failed = |error| StepError::new(subject(), &error);
    let looked_at = child.body["metadata"]["uid"].is_string();
    if !looked_at && calls.get(api, &child.name).await.map_err(failed)?.is_some() {
        let message = "one of this name was made since it was looked for; it is looked at anew".to_owned();
        return Err(StepError { subject: subject(), lasting: false, message });
    }
    calls.apply(api, &child.name, &child.body).await.map(drop).map_err(failed)
}

/// Stores `status` if it differs from the one in `infd`, under the resourceVersion of `infd`; the newer object is
/// returned. A conflict means that somebody else wrote: nothing that follows from this plan may be done.
pub async fn status(
    calls: &Calls,
    infd: &InferenceDeployment,
    status: InferenceDeploymentStatus,
) -> Result<InferenceDeployment, CallError> {
    if infd.status.as_ref() == Some(&status) {
        return Ok(infd.clone()); // quiescent = silent (P7)
    }
    let api: Api<InferenceDeployment> = Api::namespaced(calls.client.clone(), &infd.namespace().unwrap_or_default());
    let mut wanted = infd.clone();
    wanted.metadata.managed_fields = None;
    wanted.status = Some(status);
    // without an answer it may have been stored all the same, and a pass may end in the middle of this
    let doubt = calls.fleet.ledger.doubt();
    let stored = calls.replace_status(&api, &infd.name_any(), &wanted).await?;
    doubt.settled(&stored, Instant::now());
    Ok(stored)
}

/// Annotates the pods: the second key (I1) and the deletion cost. Only after [`status`] stored the grants. Whoever is granted a
/// restart hears of it when all others know what that means for them, or could not be told (I7).
pub async fn pods(calls: &Calls, namespace: &str, patches: &[PodPatch]) -> Vec<StepError> {
    let (granted, others): (Vec<_>, Vec<_>) = patches.iter().partition(|patch| patch.grants());
    let mut errors = Vec::new();
    for stage in [others, granted] {
        errors.extend(all(stage.into_iter().map(|patch| pod(calls, namespace, patch).boxed())).await);
    }
    errors
}

async fn pod(calls: &Calls, namespace: &str, patch: &PodPatch) -> Result<(), StepError> {
    let api: Api<PartialObjectMeta<Pod>> = Api::namespaced(calls.client.clone(), namespace);
    // The UID is a precondition: a new pod with the old name refuses the patch (P8).
    let body = json!({"metadata": {"uid": patch.uid, "annotations": patch.annotations}});
    match calls.merge(&api, &patch.name, &body).await {
        Ok(_) => tracing::info!(namespace, pod = patch.name, annotations = ?patch.annotations, "pod annotated"),
        // Gone or replaced meanwhile: the next look sees it.
        Err(error) if error.missed() => {
            tracing::info!(namespace, pod = patch.name, %error, "pod changed meanwhile, left alone");
        }
        Err(error) => return Err(StepError::new(format!("annotate Pod {}", patch.name), &error)),
    }
    Ok(())
}

/// Deletes the pods whose replacement is granted, each by its UID and as it was looked at (P8), for since that look it may have gone on by
/// itself, and with its own grace: the old process must be gone before another may take its place (P16). Only after [`status`] stored the
/// grants, and after their nodes are marked, so that a successor does not land where it came from. Those that must `wait` stay.
pub async fn replaces(
    calls: &Calls,
    infd: &InferenceDeployment,
    plan: &Plan,
    wait: &BTreeSet<String>,
) -> Vec<StepError> {
    let namespace = infd.namespace().unwrap_or_default();
    let api: Api<Pod> = Api::namespaced(calls.client.clone(), &namespace);
    let unmarked = nodes::mark(calls, &avoid_label(&namespace, &infd.name_any()), &plan.marks).await;
    let failed = |(node, error)| StepError::new(format!("mark node {node}, where a pod is to be replaced"), error);
    let mut errors: Vec<StepError> = unmarked.iter().map(failed).collect();
    let now = plan.replaces.iter().filter(|pod| !wait.contains(&pod.uid) && !unmarked.contains_key(&pod.node));
    errors.extend(all(now.map(|pod| replace(calls, &api, pod).boxed())).await);
    errors
}

async fn replace(calls: &Calls, api: &Api<Pod>, pod: &Replacement) -> Result<(), StepError> {
    let Replacement { name, uid, version, .. } = pod;
    let failed = |error| StepError::new(format!("delete Pod {name}"), &error);
    let namespace = api.namespace();
    if calls.delete(api, name, (uid, Some(version))).await.map_err(failed)? {
        tracing::warn!(namespace, pod = name, "pod deleted: restarts in place did not cure it");
    } else {
        // the next look sees what became of it
        tracing::info!(namespace, pod = name, "pod gone, on its way or changed meanwhile, left alone");
    }
    Ok(())
}

/// Writes and forgets incidents; what failed goes to `errors`. Returns the pods (by UID) that alone tell of what could not be written.
pub async fn incidents(
    calls: &Calls,
    infd: &InferenceDeployment,
    (plan, known): (&IncidentPlan, &[EngineIncident]),
    errors: &mut Vec<StepError>,
) -> BTreeSet<String> {
    let namespace = infd.namespace().unwrap_or_default();
    let api: Api<EngineIncident> = Api::namespaced(calls.client.clone(), &namespace);
    let writes = plan.writes.iter().map(|write| {
        let told_by = write.told_by.clone();
        let stall = closed_stall(write, known);
        let told = move |done: Result<(), StepError>| {
            if let (Ok(()), Some(stall)) = (&done, &stall) {
                calls.metrics.stall_closed(infd, (stall.outcome, stall.seconds), &stall.steps);
            }
            done.map_err(|error| (error, told_by))
        };
        incident(calls, &api, infd, write).map(told).boxed()
    });
    let (failed, untold): (Vec<_>, Vec<_>) = all(writes).await.into_iter().unzip();
    errors.extend(failed);
    errors.extend(all(plan.deletes.iter().map(|(name, uid)| forget(calls, &api, name, uid).boxed())).await);
    untold.into_iter().flatten().collect()
}

/// Makes the writes and returns what failed, in their order.
async fn all<'a, E: Send>(writes: impl Iterator<Item = BoxFuture<'a, Result<(), E>>>) -> Vec<E> {
    let writes: Vec<_> = writes.collect();
    stream::iter(writes).buffered(AT_ONCE).filter_map(|done| ready(done.err())).collect().await
}

async fn forget(calls: &Calls, api: &Api<EngineIncident>, name: &str, uid: &str) -> Result<(), StepError> {
    let failed = |error| StepError::new(format!("delete EngineIncident {name}"), &error);
    calls.delete(api, name, (uid, None)).await.map(|_| ()).map_err(failed)
}

async fn incident(
    calls: &Calls,
    api: &Api<EngineIncident>,
    infd: &InferenceDeployment,
    write: &IncidentWrite,
) -> Result<(), StepError> {
    let failed = |error| StepError::new(format!("write EngineIncident {}", write.name), &error);
    let head = |metadata| json!({"apiVersion": EngineIncident::api_version(&()), "kind": EngineIncident::kind(&()), "metadata": metadata});
    if let Some(spec) = &write.spec {
        let mut body = head(json!({
            "name": write.name,
            "labels": labels(&infd.name_any()),
            "ownerReferences": infd.controller_owner_ref(&()).into_iter().collect::<Vec<_>>(),
        }));
        body["spec"] = json!(spec);
        calls.apply(api, &write.name, &body).await.map_err(failed)?;
        tracing::info!(incident = write.name, class = spec.class, pod = spec.pod, "incident recorded");
    }
    if let Some(status) = &write.status {
        let mut body = head(json!({"name": write.name}));
        body["status"] = json!(status);
        calls.apply_status(api, &write.name, &body).await.map_err(failed)?;
        tracing::info!(incident = write.name, stage = status.stage, outcome = status.outcome, "incident updated");
    }
    Ok(())
}

#[cfg(test)]
#[path = "execute_tests.rs"]
mod tests;
