//! The leading operator reads more than its memory limit holds, in the middle of a recovery, and the kernel kills it for that (B5).

use std::time::{Duration, SystemTime};

use anyhow::{Result, ensure};
use crds::EngineIncident;
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::{ContainerState, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use nix::sys::signal::Signal;
use serde_json::json;
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;
use truebeat_tests::{host, product};

use crate::kill::{SYSTEM, available, grants, leader};
use crate::world::{BOUND, NAMESPACE, World, restarted, restarts, told, two_serving};

/// With it an operator leads and recovers two replicas, and cannot read what [`BALLAST`] says.
const LIMIT: &str = "40Mi";
/// So many pods bear the labels of chat's, and annotations of nearly as much as the API server lets a pod have (256 KiB).
const BALLAST: usize = 120;
const BLOB_BYTES: usize = 240 << 10;
const LONG: Duration = Duration::from_secs(180);

pub async fn story(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    limited(world)?;
    let endpoints = world.endpoints("chat");
    let load = world.load("chat").await?;
    let pods = two_serving(world, &endpoints, &load).await?;
    times.note(&format!("the operator's limit is {LIMIT}, and all is well"));
    let victim = &pods[0];
    let before = restarts(&*world.pod(victim)?, "engine");
    let (first, process) = leader(world).await?;
    let frozen = times.act(&format!("SIGUSR2 to the engine of {victim}"));
    world.freeze(victim)?;
    let (at, ()) = world.incident("an incident", victim, frozen, |_| Some(())).await?;
    // so that what follows finds the recovery half-way, however fast this machine is
    host::signal(&process, Signal::SIGSTOP);
    times.seen("an EngineIncident tells of it; the leader stands still", at);
    let heavy = ballast(world).await;
    host::signal(&process, Signal::SIGCONT);
    heavy?;
    let megabytes = (BALLAST * BLOB_BYTES) >> 20;
    times.now(&format!("{BALLAST} pods bear chat's labels and {megabytes} MiB of annotations; the leader goes on"));
    let (who, began, ended) = until_async("an operator to be killed for its memory", LONG, || killed(world)).await?;
    times.now(&format!("{who} is OOMKilled: it ran from {began} to {ended} (the leader was {first})"));
    times.act("these pods are deleted");
    lighten(world).await?;
    times.now("they are gone");
    let outcome = |inc: &EngineIncident| inc.status.as_ref()?.outcome.clone().map(|_| inc.clone());
    restarted(world, victim, before + 1, frozen, times).await?;
    let (at, incident) = world.incident("the incident's end", victim, frozen, outcome).await?;
    times.seen("the incident is closed, by whoever leads now", at);
    let (closed, ended) = (Timestamp::try_from(SystemTime::now() - at.elapsed())?, ended.parse::<Timestamp>()?);
    ensure!(closed > ended, "closed at {closed}, before the kill at {ended}");
    times.seen("status and conditions are all well", world.quiet("chat").await?);
    available(world)?;
    times.now("both operators are ready again");
    leads_again(world, times).await?;
    world.quiet("chat").await?;
    let count = restarts(&*world.pod(victim)?, "engine");
    ensure!(count == before + 1, "{count} restarts, {before} before the freeze");
    ensure!(world.incidents_since(frozen).len() == 1, "not one incident: {:?}", world.incidents_since(frozen));
    let episodes = grants(world, frozen);
    ensure!(episodes == [incident.spec.episode_id.clone()], "granted were {episodes:?}");
    times.note("exactly one incident, one grant, one restart");
    times.note(&told(&load.felt(frozen)));
    world.programs.install(world.cluster)?;
    available(world)
}

/// The operator's Deployment with a limit that two replicas do with. What it has by default is nearly three times what a thousand took
/// (docs/scale.md).
fn limited(world: &World<'_>) -> Result<()> {
    let limits = format!("--limits=memory={LIMIT}");
    let set = ["-n", SYSTEM, "set", "resources", "deploy/truebeat-operator", "--requests=memory=32Mi", &limits];
    world.cluster.kubectl(&set)?;
    available(world)
}

/// Pods that no scheduler looks at and no ReplicaSet adopts. Whoever lists chat's pods reads them.
async fn ballast(world: &World<'_>) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), NAMESPACE);
    let blob = "x".repeat(BLOB_BYTES);
    let one = |n: usize| -> Result<Pod> {
        let secure = json!({
            "runAsNonRoot": true, "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        });
        let container = json!({"name": "ballast", "image": product::ENGINE_IMAGE, "securityContext": secure});
        Ok(serde_json::from_value(json!({
            "metadata": {
                "name": format!("ballast-{n}"),
                "labels": {crds::LABEL_DEPLOYMENT: "chat", "app.kubernetes.io/name": "truebeat", "ballast": "yes"},
                "annotations": {"example.com/blob": blob},
            },
            "spec": {"schedulerName": "nobody", "containers": [container]},
        }))?)
    };
    let all: Vec<Pod> = (0..BALLAST).map(one).collect::<Result<_>>()?;
    let how = PostParams::default();
    for some in all.chunks(16) {
        try_join_all(some.iter().map(|pod| pods.create(&how, pod))).await?;
    }
    Ok(())
}

/// Takes the ballast away.
async fn lighten(world: &World<'_>) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), NAMESPACE);
    let mine = ListParams::default().labels("ballast=yes");
    pods.delete_collection(&DeleteParams::default().grace_period(0), &mine).await?;
    until_async("the ballast to be gone", BOUND, || async {
        Ok(pods.list_metadata(&mine).await?.items.is_empty().then_some(()))
    })
    .await
}

/// An operator whose container the kernel has killed for its memory, by the kubelet's word: who, and from when to when it ran.
async fn killed(world: &World<'_>) -> Result<Option<(String, String, String)>> {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), SYSTEM);
    let found = pods.list(&ListParams::default()).await?.items.into_iter().find_map(|pod| {
        let statuses = pod.status?.container_statuses.unwrap_or_default();
        let ends = statuses.into_iter().flat_map(|status| [status.state, status.last_state]).flatten();
        let end = ends
            .filter_map(|state: ContainerState| state.terminated)
            .find(|end| end.reason.as_deref() == Some("OOMKilled"))?;
        Some((pod.metadata.name?, end.started_at?.0.to_string(), end.finished_at?.0.to_string()))
    });
    Ok(found)
}

/// Somebody holds the Lease again, and it is a process that is alive.
async fn leads_again(world: &World<'_>, times: &mut Times) -> Result<()> {
    let (name, process) = leader(world).await?;
    ensure!(process.identity.alive(), "{name} holds the Lease and is dead");
    times.now(&format!("{name} leads"));
    Ok(())
}
