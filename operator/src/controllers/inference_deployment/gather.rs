//! Stage 1: reads everything that one pass decides on, straight from the API server and never from a cache (P2).
//!
//! The order matters (I2): the InferenceDeployment with its grants first, the pods after it. Read the other way round, a
//! pod that was created and granted in between would look gone, and its slot would be given away while it restarts.

use std::collections::BTreeMap;

use crds::{EngineIncident, InferenceDeployment};
use futures::future::try_join_all;
use k8s_openapi::api::{apps::v1::ReplicaSet, core::v1::Pod};
use kube::{Api, ResourceExt, core::DynamicObject};

use super::{
    build::{child_name, kinds, selector},
    escalate::Fleet,
    observed::{Observed, members},
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
    let pods = members(&pods.items, name);
    let avoids = infd.status.as_ref().is_some_and(|status| !status.recovery.avoid.is_empty());
    let nodes = match avoids || pods.iter().any(|pod| pod.open_episode().is_some()) {
        true => nodes::all(calls).await,
        false => Default::default(),
    };
    let ours = |incident: &EngineIncident| incident.owner_references().iter().any(|owner| owner.uid == uid);
    Ok(Some(Observed { pods, nodes, incidents: incidents.items.into_iter().filter(ours).collect(), children, infd }))
}

/// Everybody else's replicas, stalls and grants, as they stand in the API now.
pub async fn fleet(calls: &Calls, own: &InferenceDeployment) -> Result<Fleet, CallError> {
    let api: Api<InferenceDeployment> = match &calls.fleet.namespace {
        Some(namespace) => Api::namespaced(calls.client.clone(), namespace),
        None => Api::all(calls.client.clone()),
    };
    let all = calls.list(&api, "").await?;
    let others = all.items.iter().filter(|other| other.uid() != own.uid());
    let mut fleet = Fleet {
        restarts_percent: calls.fleet.restarts_percent,
        hold_percent: calls.fleet.hold_percent,
        place_max: (calls.fleet.node_restarts_max, calls.fleet.domain_restarts_max),
        ..Fleet::default()
    };
    for other in others {
        let count = |n: i32| usize::try_from(n).unwrap_or(0);
        fleet.replicas += count(other.spec.replicas);
        let Some(status) = &other.status else { continue };
        fleet.stalled += count(status.fenced_replicas);
        fleet.granted += status.recovery.grants.len();
        let grants = status.recovery.grants.iter();
        fleet.grants_at.extend(grants.map(|grant| (grant.node.clone(), grant.domain.clone())));
    }
    Ok(fleet)
}

/// The Deployment's ReplicaSets, each with the template of its revision.
async fn history(calls: &Calls, namespace: &str, labels: &str) -> Result<serde_json::Value, CallError> {
    let sets: Api<ReplicaSet> = Api::namespaced(calls.client.clone(), namespace);
    Ok(serde_json::to_value(calls.list(&sets, labels).await?.items).unwrap_or_default())
}

async fn children(
    calls: &Calls,
    namespace: &str,
    name: &str,
) -> Result<BTreeMap<String, serde_json::Value>, CallError> {
    let reads = kinds().into_iter().map(|resource| async move {
        let api: Api<DynamicObject> = Api::namespaced_with(calls.client.clone(), namespace, &resource);
        let live = calls.get(&api, &child_name(name, &resource.kind)).await?;
        Ok::<_, CallError>(live.and_then(|live| Some((resource.kind, serde_json::to_value(live).ok()?))))
    });
    Ok(try_join_all(reads).await?.into_iter().flatten().collect())
}
