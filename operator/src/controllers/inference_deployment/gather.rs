//! Stage 1: reads everything that one pass decides on, straight from the API server and never from a cache (P2).
//!
//! The order matters (I2): the InferenceDeployment with its grants first, the pods after it. Read the other way round, a
//! pod that was created and granted in between would look gone, and its slot would be given away while it restarts.

use std::collections::BTreeMap;

use crds::{EngineIncident, InferenceDeployment, RecoveryStatus};
use futures::future::try_join_all;
use k8s_openapi::api::apps::v1::ReplicaSet;
use kube::{
    Api, ResourceExt,
    core::{ApiResource, DynamicObject},
};
use serde_json::Value;
use tokio::time::Instant;

use super::{
    believed::{refuse_outlived, refuse_replays},
    build::{child_name, kinds, selector},
    execute::StepError,
    fleet::Fleet,
    ledger::Account,
    observed::{ListedPod, Observed, doubted, left_behind, members, set_going_apart},
    rollout,
};
use crate::{
    client::{CallError, Calls},
    controllers::{incidents::listed::ListedIncident, nodes},
};

/// What there is of a name.
#[derive(Debug)]
pub enum Look {
    Whole(Box<Observed>),
    /// Its pods or its records may not be read: nothing can be decided, and it is told.
    Blind(Box<InferenceDeployment>, CallError),
    /// On its way out with all that it owns.
    Leaves,
    /// There is no such InferenceDeployment. Pods that say in their label that they belong to it, and stay, by name.
    Gone(Vec<String>),
}

/// A look at `name`.
pub async fn gather(calls: &Calls, namespace: &str, name: &str) -> Result<Look, CallError> {
    let infds: Api<InferenceDeployment> = Api::namespaced(calls.client.clone(), namespace);
    let pods: Api<ListedPod> = Api::namespaced(calls.client.clone(), namespace);
    let labels = selector(name);
    let Some(infd) = calls.get(&infds, name).await? else {
        return Ok(Look::Gone(left_behind(&calls.list(&pods, &labels).await?.items)));
    };
    if infd.metadata.deletion_timestamp.is_some() {
        return Ok(Look::Leaves);
    }
    let incidents: Api<ListedIncident> = Api::namespaced(calls.client.clone(), namespace);
    let looked = futures::try_join!(
        calls.list(&pods, &labels),
        calls.list(&incidents, &labels),
        children(calls, namespace, name)
    );
    let (pods, incidents, (mut children, mut unread)) = match looked {
        Err(error) if error.lasting() => return Ok(Look::Blind(Box::new(infd), error)),
        looked => looked?,
    };
    let going = set_going_apart(&mut children, &infd);
    if rollout::needs_history(&infd.status.clone().unwrap_or_default().rollout, children.get("Deployment")) {
        match history(calls, namespace, &labels).await {
            Err(error) if error.lasting() => {
                _ = unread.insert("ReplicaSet".to_owned(), unread_of("ReplicaSet", &error))
            }
            history => _ = children.insert("ReplicaSet".to_owned(), history?),
        }
    }
    let uid = infd.uid().unwrap_or_default();
    let ours = |incident: &EngineIncident| incident.owner_references().iter().any(|owner| owner.uid == uid);
    let incidents: Vec<EngineIncident> = incidents.items.into_iter().map(EngineIncident::from).filter(ours).collect();
    let doubted = doubted(&pods.items, name);
    let mut pods = members(&pods.items, name);
    refuse_replays(&mut pods, &incidents);
    let grants = infd.status.as_ref().map(|status| status.recovery.grants.as_slice()).unwrap_or_default();
    refuse_outlived(&mut pods, grants, calls.wall.now());
    calls.fleet.elsewhere.look(&(namespace.to_owned(), name.to_owned()), &mut pods, Instant::now());
    let bad = |recovery: &RecoveryStatus| !recovery.avoid.is_empty() || !recovery.broken.is_empty();
    let nodes = match infd.status.as_ref().is_some_and(|status| bad(&status.recovery))
        || pods.iter().any(|pod| pod.open_episode().is_some())
    {
        true => nodes::all(calls).await,
        false => Default::default(),
    };
    Ok(Look::Whole(Box::new(Observed { pods, nodes, incidents, children, infd, doubted, going, unread })))
}

/// Everybody else's replicas, stalls and grants, as they stand in the API: by the ledger while it is open, else by a list. The caller holds
/// the turn to grant, so that nobody else grants meanwhile.
pub async fn fleet(calls: &Calls, own: &InferenceDeployment) -> Result<Fleet, CallError> {
    let policy = &calls.fleet;
    let uid = own.uid().unwrap_or_default();
    let others = match policy.ledger.others(&uid, Instant::now()) {
        Some(others) => others,
        None => {
            let asked_at = Instant::now();
            policy.ledger.ask(asked_at);
            policy.ledger.open(accounts(calls).await?, asked_at, &uid)
        }
    };
    // whoever looks after one namespace may not know any node
    let domain_max = if policy.namespace.is_some() { 0 } else { policy.domain_restarts_max };
    Ok(Fleet {
        restarts_percent: policy.restarts_percent,
        hold_percent: policy.hold_percent,
        place_max: (policy.node_restarts_max, domain_max),
        ..others
    })
}

/// What each InferenceDeployment holds, by UID.
async fn accounts(calls: &Calls) -> Result<BTreeMap<String, Account>, CallError> {
    let resource = ApiResource::erase::<InferenceDeployment>(&());
    let api: Api<DynamicObject> = match &calls.fleet.namespace {
        Some(namespace) => Api::namespaced_with(calls.client.clone(), namespace, &resource),
        None => Api::all_with(calls.client.clone(), &resource),
    };
    let all = calls.list(&api, "").await?.items;
    let now = calls.wall.now();
    Ok(all.iter().map(|infd| (infd.uid().unwrap_or_default(), Account::of(infd, now))).collect())
}

/// The Deployment's ReplicaSets, each with the template of its revision.
async fn history(calls: &Calls, namespace: &str, labels: &str) -> Result<Value, CallError> {
    let sets: Api<ReplicaSet> = Api::namespaced(calls.client.clone(), namespace);
    Ok(serde_json::to_value(calls.list(&sets, labels).await?.items).unwrap_or_default())
}

/// The children by kind, and those that may not be read.
async fn children(
    calls: &Calls,
    namespace: &str,
    name: &str,
) -> Result<(BTreeMap<String, Value>, BTreeMap<String, StepError>), CallError> {
    let reads = kinds().into_iter().map(|resource| async move {
        match calls.get_json(&resource, namespace, &child_name(name, &resource.kind)).await {
            Err(error) if error.lasting() => {
                Ok((None, Some((resource.kind.clone(), unread_of(&resource.kind, &error)))))
            }
            live => Ok::<_, CallError>((live?.map(|live| (resource.kind, live)), None)),
        }
    });
    let (read, unread): (Vec<_>, Vec<_>) = try_join_all(reads).await?.into_iter().unzip();
    Ok((read.into_iter().flatten().collect(), unread.into_iter().flatten().collect()))
}

fn unread_of(kind: &str, error: &CallError) -> StepError {
    StepError::new(format!("read {kind}"), error)
}
