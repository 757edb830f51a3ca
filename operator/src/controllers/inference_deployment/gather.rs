//! Stage 1: reads everything that one pass decides on, straight from the API server and never from a cache (P2).
//!
//! The order matters (I2): the InferenceDeployment with its grants first, the pods after it. Read the other way round, a
//! pod that was created and granted in between would look gone, and its slot would be given away while it restarts.

use std::collections::BTreeMap;

use crds::{EngineIncident, InferenceDeployment};
use futures::future::try_join_all;
use k8s_openapi::api::{apps::v1::ReplicaSet, core::v1::Pod};
use kube::{
    Api, ResourceExt,
    core::{ApiResource, DynamicObject},
};
use serde_json::Value;

use super::{
    build::{child_name, kinds, selector},
    escalate::Fleet,
    observed::{Observed, members, refuse_replays},
    rollout,
};
use crate::{
    client::{CallError, Calls},
    controllers::nodes,
};

/// A look at `name`, or `None` if there is nothing to do: it is gone, or on its way out with all that it owns.
pub async fn gather(calls: &Calls, namespace: &str, name: &str) -> Result<Option<Observed>, CallError> {
    let infds: Api<InferenceDeployment> = Api::namespaced(calls.client.clone(), namespace);
    let Some(infd) = calls.get(&infds, name).await? else { return Ok(None) };
    if infd.metadata.deletion_timestamp.is_some() {
        return Ok(None);
    }
    let labels = selector(name);
    let pods: Api<Pod> = Api::namespaced(calls.client.clone(), namespace);
    let incidents: Api<EngineIncident> = Api::namespaced(calls.client.clone(), namespace);
    let (pods, incidents, children) = futures::try_join!(
        calls.list(&pods, &labels),
        calls.list(&incidents, &labels),
        children(calls, namespace, name)
    )?;
    let mut children = children;
    if rollout::needs_history(&infd.status.clone().unwrap_or_default().rollout, children.get("Deployment")) {
        children.insert("ReplicaSet".to_owned(), history(calls, namespace, &labels).await?);
    }
    let uid = infd.uid().unwrap_or_default();
    let ours = |incident: &EngineIncident| incident.owner_references().iter().any(|owner| owner.uid == uid);
    let incidents: Vec<EngineIncident> = incidents.items.into_iter().filter(ours).collect();
    let mut pods = members(&pods.items, name);
    refuse_replays(&mut pods, &incidents);
    let avoids = infd.status.as_ref().is_some_and(|status| !status.recovery.avoid.is_empty());
    let nodes = match avoids || pods.iter().any(|pod| pod.open_episode().is_some()) {
        true => nodes::all(calls).await,
        false => Default::default(),
    };
    Ok(Some(Observed { pods, nodes, incidents, children, infd }))
}

/// Everybody else's replicas, stalls and grants, as they stand in the API now. Read as plain JSON: one object that this version of the
/// operator cannot read whole (a newer one wrote it) must not keep the whole fleet from its restarts (B7, B8).
pub async fn fleet(calls: &Calls, own: &InferenceDeployment) -> Result<Fleet, CallError> {
    let resource = ApiResource::erase::<InferenceDeployment>(&());
    let api: Api<DynamicObject> = match &calls.fleet.namespace {
        Some(namespace) => Api::namespaced_with(calls.client.clone(), namespace, &resource),
        None => Api::all_with(calls.client.clone(), &resource),
    };
    let all = calls.list(&api, "").await?;
    let mut fleet = Fleet {
        restarts_percent: calls.fleet.restarts_percent,
        hold_percent: calls.fleet.hold_percent,
        place_max: (calls.fleet.node_restarts_max, calls.fleet.domain_restarts_max),
        ..Fleet::default()
    };
    for other in all.items.iter().filter(|other| other.uid() != own.uid()) {
        let (spec, status) = (&other.data["spec"], &other.data["status"]);
        let count = |n: &Value| n.as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
        fleet.replicas += count(&spec["replicas"]);
        fleet.stalled += count(&status["fencedReplicas"]);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let grants = status["recovery"]["grants"].as_array().into_iter().flatten();
        fleet.grants_at.extend(grants.map(|grant| (text(&grant["node"]), text(&grant["domain"]))));
    }
    fleet.granted = fleet.grants_at.len();
    Ok(fleet)
}

/// The Deployment's ReplicaSets, each with the template of its revision.
async fn history(calls: &Calls, namespace: &str, labels: &str) -> Result<Value, CallError> {
    let sets: Api<ReplicaSet> = Api::namespaced(calls.client.clone(), namespace);
    Ok(serde_json::to_value(calls.list(&sets, labels).await?.items).unwrap_or_default())
}

async fn children(calls: &Calls, namespace: &str, name: &str) -> Result<BTreeMap<String, Value>, CallError> {
    let reads = kinds().into_iter().map(|resource| async move {
        let api: Api<DynamicObject> = Api::namespaced_with(calls.client.clone(), namespace, &resource);
        let live = calls.get(&api, &child_name(name, &resource.kind)).await?;
        Ok::<_, CallError>(live.and_then(|live| Some((resource.kind, serde_json::to_value(live).ok()?))))
    });
    Ok(try_join_all(reads).await?.into_iter().flatten().collect())
}
