//! What a spec may ask for beyond the default, each both ways: the number of replicas during an incident (O5), and what becomes of a revision
//! that fails.

use anyhow::{Context, Result, ensure};
use crds::{InferenceDeployment, LABEL_REVISION};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};
use truebeat_tests::fleet::replica::{self, Says};
use truebeat_tests::product;
use truebeat_tests::wait::until_async;

use crate::world::{BOUND, World, infd};

/// `scaling.duringIncidents`: what somebody writes into the scale subresource while an engine stalls is obeyed, or waits, as the policy says.
pub async fn scaling(world: &World<'_>) -> Result<()> {
    world.tenant("scaled")?;
    let spec = json!({"recovery": {"mode": "Fence"}, "scaling": {"duringIncidents": "NoScaleIn"}});
    let pods = world.deploy("scaled", "chat", spec).await?;
    world.say(&pods[0], Says::stalls("scaled-1")).await?;
    let open = |infd: &InferenceDeployment| infd.status.as_ref().is_some_and(|status| status.open_incidents == 1);
    world.status("scaled", "chat", "an open incident", open).await?;

    scale(world, 3)?;
    stands(world, 3, None).await?;
    scale(world, 2)?;
    stands(world, 3, Some("2 replicas are wanted, 3 stay")).await?;
    policy(world, json!({"scaling": {"duringIncidents": "Hold"}}))?;
    scale(world, 4)?;
    stands(world, 3, Some("4 replicas are wanted, 3 stay")).await?;
    policy(world, json!({"scaling": {"duringIncidents": "Follow"}}))?;
    stands(world, 4, None).await?;
    policy(world, json!({"scaling": {"duringIncidents": "Hold"}}))?;
    scale(world, 2)?;
    stands(world, 4, Some("2 replicas are wanted, 4 stay")).await?;
    world.say(&pods[0], Says::Recovered("scaled-1".into())).await?;
    stands(world, 2, None).await?;
    world.leave("scaled").await
}

/// As an autoscaler does.
fn scale(world: &World<'_>, replicas: usize) -> Result<()> {
    world.cluster.kubectl(&["-n", "scaled", "scale", "infd/chat", &format!("--replicas={replicas}")]).map(drop)
}

fn policy(world: &World<'_>, spec: Value) -> Result<()> {
    let patch = json!({"spec": spec}).to_string();
    world.cluster.kubectl(&["-n", "scaled", "patch", "infd", "chat", "--type=merge", "-p", &patch]).map(drop)
}

/// Waits until the Deployment has so many, and `ScalingHeld` says this, or is not there, of the spec as it is now.
async fn stands(world: &World<'_>, replicas: usize, held: Option<&str>) -> Result<()> {
    let told = |infd: &InferenceDeployment| {
        let status = infd.status.clone().unwrap_or_default();
        let found = status.conditions.iter().find(|c| c.type_ == "ScalingHeld");
        let words = match (found, held) {
            (Some(found), Some(words)) => found.status == "True" && found.message.contains(words),
            (found, held) => found.is_none() && held.is_none(),
        };
        words && Some(status.observed_generation) == infd.metadata.generation
    };
    world.status("scaled", "chat", held.unwrap_or("nothing to be held"), told).await?;
    until_async(&format!("a Deployment of {replicas} replicas"), BOUND, || async {
        Ok((deployment(world, "scaled")?["spec"]["replicas"] == replicas).then_some(()))
    })
    .await
}

/// `rollout.onFailure: Hold`: a revision whose replica stalls stays as far as it has come; by `RollBack` the good one comes back.
pub async fn failed_revision(world: &World<'_>) -> Result<()> {
    world.tenant("revised")?;
    let old = world.deploy("revised", "chat", revised("simulated", "Hold")).await?;
    let good = revision(&deployment(world, "revised")?);
    product::apply(world.cluster, &infd("revised", "chat", revised("simulated:2", "Hold")).to_string())?;
    let all = world.scheduled("revised", "chat", 3).await?;
    let is_old = |pod: &&Pod| old.iter().any(|old| old.uid() == pod.uid());
    let new = all.iter().find(|pod| !is_old(pod)).context("a new replica")?;
    world.say(new, Says::stalls("revised-1")).await?;
    let held = world.status("revised", "chat", "the rollout to be held", |infd| fails(infd, "RolloutFailed")).await?;
    let failed = held.status.context("a status")?.rollout.failed;
    ensure!(failed.len() == 1 && failed[0].revision != good, "{failed:?}");
    let stops = || -> Result<bool> {
        let live = deployment(world, "revised")?;
        Ok(live["spec"]["paused"] == true && revision(&live) == failed[0].revision)
    };
    until_async("the Deployment to be paused where it is", BOUND, || async { Ok(stops()?.then_some(())) }).await?;
    // well again it would go on, were it not held
    world.recover(new, "revised-1").await?;
    replica::say_all(&world.client, vec![(new, Says::Serves)]).await?;
    let ready = |infd: &InferenceDeployment| infd.status.as_ref().is_some_and(|status| status.ready_replicas == 3);
    world.status("revised", "chat", "all three to be ready", ready).await?;
    ensure!(stops()?, "the rollout goes on");
    for pod in old.iter().chain([new]) {
        ensure!(world.now(pod).await?.is_some(), "{} is gone", pod.name_any());
    }

    product::apply(world.cluster, &infd("revised", "chat", revised("simulated:2", "RollBack")).to_string())?;
    world.status("revised", "chat", "the good revision to come back", |infd| fails(infd, "RolledBack")).await?;
    until_async("the Deployment to be of the good revision", BOUND, || async {
        let live = deployment(world, "revised")?;
        Ok((live["spec"]["paused"] != true && revision(&live) == good).then_some(()))
    })
    .await?;
    world.replaced(new).await?;
    for pod in &old {
        ensure!(world.now(pod).await?.is_some(), "{} is gone", pod.name_any());
    }
    world.leave("revised").await
}

fn revised(image: &str, on_failure: &str) -> Value {
    let rollout = json!({"soakSeconds": 0, "onFailure": on_failure});
    json!({"engine": {"kind": "Truebeat", "image": image}, "rollout": rollout})
}

fn deployment(world: &World<'_>, namespace: &str) -> Result<Value> {
    world.json(&["-n", namespace, "deployment", "chat"])
}

/// The revision that a Deployment's replicas are brought to.
fn revision(deployment: &Value) -> String {
    deployment["spec"]["template"]["metadata"]["labels"][LABEL_REVISION].as_str().unwrap_or_default().to_owned()
}

/// Does the status say, of the spec as it is now, that a person is needed for this reason?
fn fails(infd: &InferenceDeployment, reason: &str) -> bool {
    let Some(status) = &infd.status else { return false };
    let found = status.conditions.iter().any(|c| c.type_ == "Stalled" && c.status == "True" && c.reason == reason);
    found && Some(status.observed_generation) == infd.metadata.generation
}
