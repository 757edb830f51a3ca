//! Evidence on a claim: fetched from the pod that lives, and, when that was replaced, from its successor; and what else the agent is told in a
//! cluster.

use std::fs::{Permissions, create_dir_all, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use crds::EngineIncident;
use kube::ResourceExt;
use truebeat_tests::endpoints::Endpoints;
use truebeat_tests::product;
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;

use crate::lifecycle::manifest_with;
use crate::recovery::{LONG, removed};
use crate::world::{BOUND, NAMESPACE, World, answered};

const NAME: &str = "kept";

pub async fn story(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    product::apply(world.cluster, &claim(world)?)?;
    // the second stall within the window replaces the pod
    let policy = "{mode: Recover, lastReplica: Fence, restartsBeforeReplace: 1, restartBackoff: 0s, avoidFor: 0s}";
    let told =
        "agent: {logFilter: info, policy: {slowFactor: 20, patienceCap: 6m}, evidence: {claimName: evidence}, image: ";
    product::apply(world.cluster, &manifest_with(NAME, 1, policy).replace("agent: {image: ", told))?;
    let endpoints = world.endpoints(NAME);
    let pod = endpoints.count(1, LONG).await?.remove(0);
    let load = world.load(NAME).await?;
    answered(&load).await?;
    times.act("one replica whose bundles lie on a claim");
    let logs = world.kubectl(&["logs", &pod, "-c", "agent"])?;
    ensure!(logs.contains("INFO") && logs.contains("started"), "logFilter info shows nothing: {logs}");

    let first = stall(world, &pod, &endpoints, times).await?;
    times.now("it stalled and was restarted");
    world.quiet(NAME).await?;
    fetched(world, &first, "from the pod that wrote it", times)?;

    let frozen = Instant::now();
    world.freeze(&pod)?;
    let (_, second) = world.incident("a second incident", &pod, frozen, |inc| Some(inc.name_any())).await?;
    endpoints.flip(&pod, false, frozen, BOUND).await?;
    let successor = endpoints.count(1, LONG).await?.remove(0);
    ensure!(successor != pod, "the pod was not replaced");
    times.now("it stalled again and was replaced");
    world.quiet(NAME).await?;
    let gone = || async { Ok((!world.pods.now().contains_key(&pod)).then_some(())) };
    until_async("the pod to be gone", LONG, gone).await?;
    fetched(world, &second, "from its successor, when it was gone", times)?;
    fetched(world, &first, "the first one still, too", times)?;
    let all = world.as_typed(&format!("truebeat bundles {NAME}"))?;
    ensure!(all.matches(&pod).count() == 2 && !all.contains(&successor), "{all}");
    drop(load);
    removed(world, NAME).await?;
    world.kubectl(&["delete", "pvc", "evidence", "--timeout=30s"])?;
    world.cluster.kubectl(&["delete", "pv", "evidence", "--timeout=30s"]).map(drop)
}

/// Freezes the engine, waits until it serves again; gives the incident's name.
async fn stall(world: &World<'_>, pod: &str, endpoints: &Endpoints, times: &mut Times) -> Result<String> {
    let frozen = times.act(&format!("SIGUSR2 to the engine of {pod}"));
    world.freeze(pod)?;
    let closed = |inc: &EngineIncident| inc.status.as_ref()?.outcome.as_ref().map(|_| inc.name_any());
    let (_, incident) = world.incident("the incident's end", pod, frozen, closed).await?;
    endpoints.count(1, BOUND).await?;
    Ok(incident)
}

/// The incident's bundle comes, and is its own.
fn fetched(world: &World<'_>, incident: &str, whence: &str, times: &mut Times) -> Result<()> {
    let incidents = world.incidents.now();
    let spec = incidents.get(incident).with_context(|| format!("no incident {incident}"))?.spec.clone();
    let shown = world.as_typed(&format!("truebeat bundle {incident}"))?;
    ensure!(shown.contains(&spec.episode_id) && shown.contains("StepStalled"), "{shown}");
    ensure!(shown.contains(product::ENGINE_IMAGE), "it does not say of which image the engine is: {shown}");
    let file = world.cluster.layout().path("plugins").join(format!("{}.tar.zst", spec.episode_id));
    ensure!(file.is_file(), "it is not at {}", file.display());
    let steps = world.as_typed(&format!("truebeat bundle {incident} --to steps.tar.zst --show steps.json"))?;
    let steps: serde_json::Value = serde_json::from_str(&steps).with_context(|| steps.clone())?;
    ensure!(steps.as_array().is_some_and(|steps| !steps.is_empty()), "no steps in it: {steps}");
    times.now(&format!("kubectl truebeat bundle: {whence}"));
    Ok(())
}

/// A volume on the node that nobody provisions, open to the user that the agents are.
fn claim(world: &World<'_>) -> Result<String> {
    let folder = world.cluster.layout().path("evidence");
    create_dir_all(&folder)?;
    set_permissions(&folder, Permissions::from_mode(0o777))?;
    Ok(format!(
        r#"
apiVersion: v1
kind: PersistentVolume
metadata: {{name: evidence}}
spec:
  capacity: {{storage: 1Gi}}
  accessModes: [ReadWriteMany]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: ""
  claimRef: {{namespace: {NAMESPACE}, name: evidence}}
  hostPath: {{path: {folder}, type: Directory}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: evidence, namespace: {NAMESPACE}}}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: ""
  volumeName: evidence
  resources: {{requests: {{storage: 1Gi}}}}
"#,
        folder = folder.display()
    ))
}
