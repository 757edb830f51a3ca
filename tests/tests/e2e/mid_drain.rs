//! The operator is upgraded, and taken back, while a replica is being drained: it leaves in its own time, and nothing is done twice (B8).

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::{Result, ensure};
use crds::{LABEL_DEPLOYMENT, LABEL_REVISION};
use k8s_openapi::api::core::v1::Pod;
use kube::api::EvictParams;
use kube::{Api, ResourceExt};
use truebeat_tests::load::{End, Held};
use truebeat_tests::product::{self, OPERATOR_IMAGE};
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;

use crate::kill::{SYSTEM, available, leader, scale_operator};
use crate::lifecycle::manifest_of;
use crate::probes::Witness;
use crate::recovery::removed;
use crate::rollout::{nobody_died, settled, without_a_loss};
use crate::upgrade::{THEIRS, made_by_another, memory, up_to_date};
use crate::world::{BOUND, NAMESPACE, World, answered};

const NAME: &str = "moving";
/// The same program under another name: to Kubernetes, and to whoever holds the Lease, another version.
const NEXT_IMAGE: &str = "truebeat.local/operator:next";

/// The drain may last for longer than anything that happens in it.
fn manifest(hold_percent: i32) -> String {
    let rest = format!("rollout: {{soakSeconds: 1}}\n  recovery: {{holdPercent: {hold_percent}}}\n  drainSeconds: 240");
    manifest_of(NAME, 2, "--drain-timeout, 2s", &rest)
}

pub async fn story(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    world.programs.import_operator(world.cluster, NEXT_IMAGE)?;
    times.act("kubectl apply: InferenceDeployment moving, 2 replicas");
    product::apply(world.cluster, &manifest(50))?;
    let endpoints = world.endpoints(NAME);
    let fresh = settled(world, NAME, "").await?;
    made_by_another(world, NAME, 2, times).await?;
    let old = endpoints.count(2, BOUND).await?;
    let load = world.patient_load(NAME).await?;
    answered(&load).await?;
    let leaving = &old[0];
    let held = Held::start(world.gate_of(leaving)?, "demo").await?;
    let known: Vec<String> = world.pods.now().into_keys().collect();

    let witness = Witness::of(world, &endpoints)?;
    let begun = times.act(&format!("{leaving} is evicted, and has a request in flight whose client takes its time"));
    evicted(world, leaving).await?;
    times.seen("its endpoint is away", endpoints.flip(leaving, false, begun, BOUND).await?);
    scale_operator(world, 2)?;
    until_async("an operator to tell of the newer revision", BOUND, || async {
        Ok((memory(world, NAME).newer == fresh).then_some(()))
    })
    .await?;
    times.now(&format!("another version leads: status.rollout: wanted {THEIRS}, newer {fresh}"));
    for (image, hold_percent) in [(NEXT_IMAGE, 51), (OPERATOR_IMAGE, 52)] {
        another_leads(world, image).await?;
        product::apply(world.cluster, &manifest(hold_percent))?;
        until_async("it to take a change of the spec in", BOUND, || async {
            Ok(up_to_date(world, NAME, hold_percent).then_some(()))
        })
        .await?;
        ensure!(world.pod(leaving)?.metadata.deletion_timestamp.is_some(), "{leaving} is not on its way out");
        times.now(&format!("{image} leads and has taken a change of the spec in; {leaving} still drains"));
    }
    endpoints.count(2, BOUND).await?;
    answered(&load).await?;
    let end = held.rest().await;
    ensure!(end == End::Whole, "the request in flight ended {end:?}");
    times.now("its client has taken all of the answer");
    until_async("it to be gone", BOUND, || async { Ok((!world.pods.now().contains_key(leaving)).then_some(())) })
        .await?;
    times.now(&format!("{leaving} is gone"));
    times.seen("all well", world.quiet(NAME).await?);
    answered(&load).await?;
    without_a_loss(&witness, &load, begun, "the drain and both upgrades", times).await?;
    replaced_once(world, &known, begun, times)?;
    ensure!(world.pod(&old[1])?.metadata.deletion_timestamp.is_none(), "{} goes too", old[1]);
    times.note("the other replica is the one that it was");
    nobody_died(world, NAME, times)?;
    drop(load);
    removed(world, NAME).await
}

/// What a drain of its node asks for; refused until the budget has counted its replicas.
async fn evicted(world: &World<'_>, pod: &str) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), NAMESPACE);
    until_async("the eviction", BOUND, || async { Ok(Some(pods.evict(pod, &EvictParams::default()).await?)) })
        .await
        .map(drop)
}

/// The operator of this image takes over.
async fn another_leads(world: &World<'_>, image: &str) -> Result<()> {
    let container = format!("operator={image}");
    world.cluster.kubectl(&["-n", SYSTEM, "set", "image", "deploy/truebeat-operator", &container])?;
    available(world)?;
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), SYSTEM);
    until_async(&format!("{image} to lead"), BOUND, || async {
        let spec = pods.get(&leader(world).await?.0).await?.spec.unwrap_or_default();
        Ok(spec.containers.iter().any(|container| container.image.as_deref() == Some(image)).then_some(()))
    })
    .await
}

/// Besides those that were `known` one pod was ever made, of the revision that the operator before has made.
fn replaced_once(world: &World<'_>, known: &[String], since: Instant, times: &mut Times) -> Result<()> {
    let seen = world.pods.since(since).into_iter().filter_map(|frame| frame.object);
    let mine = seen.filter(|pod| pod.labels().get(LABEL_DEPLOYMENT).is_some_and(|name| name == NAME));
    let made = |pod: &Pod| (pod.name_any(), pod.labels().get(LABEL_REVISION).cloned().unwrap_or_default());
    let made: BTreeSet<_> = mine.map(|pod| made(&pod)).filter(|(name, _)| !known.contains(name)).collect();
    let revisions: Vec<&str> = made.iter().map(|(_, revision)| revision.as_str()).collect();
    ensure!(revisions == [THEIRS], "made meanwhile: {made:?}");
    times.note("one pod was made meanwhile, of the revision that stood");
    Ok(())
}
