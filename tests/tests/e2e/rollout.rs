//! Revisions come and go under clients that stream: a good one without one lost request, a bad one without one client on it.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use crds::{EngineIncident, InferenceDeployment, LABEL_REVISION, rollout::FailureReason};
use kube::ResourceExt;
use truebeat_tests::endpoints::Endpoints;
use truebeat_tests::load::{End, Held, Load};
use truebeat_tests::product;
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;

use crate::lifecycle::manifest_of;
use crate::probes::Witness;
use crate::world::{BOUND, World, answered, is, members, told, uid};

/// `fault`: a further argument of the engine. The drain leaves room for what is in flight, also on a machine that is busy with something else;
/// an engine that hangs ends nothing, and is waited for in vain.
fn manifest(name: &str, replicas: i32, attempt: i32, fault: &str) -> String {
    let drain_s = if fault.is_empty() { 25 } else { 9 };
    let rollout = format!("rollout: {{soakSeconds: 1, progressDeadlineSeconds: 25, attempt: {attempt}}}");
    let rest = format!("{rollout}\n  drainSeconds: {drain_s}");
    manifest_of(name, replicas, &format!("--drain-timeout, 2s{fault}"), &rest)
}

pub async fn without_loss(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let endpoints = world.endpoints("roll");
    times.act("kubectl apply: InferenceDeployment roll, 2 replicas, nobody asks them anything");
    product::apply(world.cluster, &manifest("roll", 2, 0, ""))?;
    let old = endpoints.count(2, BOUND).await?;
    times.now("both get traffic");
    for pod in &old {
        let tokens = delivered(world, pod)?;
        ensure!(tokens > 0, "{pod} is ready and has delivered nothing");
        times.note(&format!("{pod} had delivered {tokens} token(s): its agent had asked"));
    }
    let first = settled(world, "roll", "").await?;
    let load = world.patient_load("roll").await?;
    answered(&load).await?;
    let keeping = world.keeping_load("roll").await?;
    answered(&keeping).await?;
    let mut held = Vec::new();
    for pod in &old {
        held.push(Held::start(world.gate_of(pod)?, "demo").await?);
    }

    let witness = Witness::of(world, &endpoints)?;
    let begun = times.act("another attempt: every replica comes in anew, under clients that stream, keep connections, and take their time");
    product::apply(world.cluster, &manifest("roll", 2, 1, ""))?;
    // each of them takes its answer when its replica is on its way out
    let held = old.iter().zip(held).map(|(pod, held)| taken_late(&endpoints, pod, begun, held));
    for end in futures::future::try_join_all(held).await? {
        ensure!(end == End::Whole, "an answer that its client took in late ended {end:?}");
    }
    times.now("two answers came whole whose clients took nothing of them before their replicas left");
    let second = settled(world, "roll", &first).await?;
    until_async("the old replicas to be gone", BOUND, || async {
        let pods = world.pods.now();
        Ok((!old.iter().any(|pod| pods.contains_key(pod))).then_some(()))
    })
    .await?;
    times.now(&format!("revision {first} is gone, {second} serves"));
    without_a_loss(&witness, &load, begun, "the rollout", times).await?;
    answered(&keeping).await?;
    without_a_loss(&witness, &keeping, begun, "the rollout, on kept connections", times).await?;

    let witness = Witness::of(world, &endpoints)?;
    let begun = times.act("kubectl scale infd roll --replicas=1");
    world.kubectl(&["scale", "infd", "roll", "--replicas=1"])?;
    until_async("one pod, and nothing of the other", BOUND, || async {
        let pods = world.pods.now();
        let count = pods.values().filter(|pod| of(pod, "roll")).count();
        Ok((count == 1).then_some(()))
    })
    .await?;
    times.now("one is left");
    answered(&load).await?;
    without_a_loss(&witness, &load, begun, "the scale-in", times).await?;
    answered(&keeping).await?;
    without_a_loss(&witness, &keeping, begun, "the scale-in, on kept connections", times).await?;
    nobody_died(world, "roll", times)
}

/// The answer's client begins to read when the endpoint of `pod` is away.
async fn taken_late(endpoints: &Endpoints, pod: &str, since: Instant, held: Held) -> Result<End> {
    endpoints.flip(pod, false, since, BOUND).await?;
    Ok(held.rest().await)
}

/// A replica whose engine ends because it was asked to leave is no incident.
pub fn nobody_died(world: &World<'_>, name: &str, times: &mut Times) -> Result<()> {
    let mine = |incident: &&Arc<EngineIncident>| incident.spec.deployment == name;
    let told = world.incidents.now();
    let died: Vec<&str> = told.values().filter(mine).map(|incident| incident.spec.class.as_str()).collect();
    ensure!(died.is_empty(), "incidents of replicas that were asked to leave: {died:?}");
    times.note("no incident tells of those that left");
    Ok(())
}

/// Frozen from its first step on: nobody but the agent's own question ever waits on it.
pub async fn bad_revision(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let endpoints = world.endpoints("roll");
    let good = settled(world, "roll", "").await?;
    let load = world.patient_load("roll").await?;
    answered(&load).await?;
    let before = members(&world.pods, "roll");
    let witness = Witness::of(world, &endpoints)?;
    let begun = times.act("kubectl apply: a revision whose engines freeze at their first step");
    product::apply(world.cluster, &manifest("roll", 1, 1, ", --fault, step-stall@1steps"))?;
    let failed = |infd: &InferenceDeployment| {
        let rollout = &infd.status.as_ref()?.rollout;
        (infd.name_any() == "roll").then(|| rollout.failed.last().cloned()).flatten()
    };
    let (at, failed) = world.infds.first("a failed revision", begun, BOUND, failed).await?;
    times.seen(&format!("remembered as failed: {}", failed.message), at);
    // of an engine that never did a step nothing is known to be late: which of the two comes first is the detector's affair
    ensure!(failed.reason != FailureReason::ReplicaCrashes, "{failed:?}");
    until_async("the new replicas to be gone", BOUND, || async {
        Ok((members(&world.pods, "roll") == before && rolled_back(world, &good)).then_some(()))
    })
    .await?;
    times.now("rolled back: only the replicas of the good revision are left");
    // (the status that tells of it is the last that a pass writes)
    until_async("the status to tell of it", BOUND, || async { tells_git(world, &failed.revision).map(Some) }).await?;
    times.note("spec untouched; Stalled=True, RolledBack; kstatus: Failed");
    let served: Vec<_> =
        endpoints.flips().into_iter().filter(|f| f.ready == Some(true) && !before.contains(&f.pod)).collect();
    ensure!(served.is_empty(), "a replica that never delivered got traffic: {served:?}");
    let tried = world.pods.since(begun).into_iter().filter_map(|frame| frame.object).filter(|pod| of(pod, "roll"));
    let mut tried: Vec<String> = tried.map(|pod| pod.name_any()).filter(|pod| !before.contains(pod)).collect();
    tried.sort();
    tried.dedup();
    ensure!(tried.len() == 1, "tried more than once: {tried:?}");
    times.note(&format!("one replica was tried ({}), it never got traffic", tried[0]));
    answered(&load).await?;
    without_a_loss(&witness, &load, begun, "the bad revision", times).await?;

    times.act("kubectl apply: the spec that was good");
    product::apply(world.cluster, &manifest("roll", 1, 1, ""))?;
    times.seen("all well again", world.quiet("roll").await?);
    ensure!(members(&world.pods, "roll") == before, "going back to the good revision made new pods");
    world.kubectl(&["delete", "infd", "roll", "--wait=true", "--timeout=60s"]).map(drop)
}

fn of(pod: &k8s_openapi::api::core::v1::Pod, infd: &str) -> bool {
    pod.labels().get(crds::LABEL_DEPLOYMENT).is_some_and(|name| name == infd)
}

/// Tokens that the engine of `pod` has handed out, from its page.
fn delivered(world: &World<'_>, pod: &str) -> Result<u64> {
    let folder = product::volume(world.cluster, &uid(&*world.pod(pod)?), "page");
    let page = heartbeat::Reader::open(&folder, 0).read_unverified();
    Ok(page.map_err(|error| anyhow::anyhow!("the page of {pod}: {error:?}"))?.beat.tokens_delivered)
}

/// Waits until `infd` is all well with another revision than `not` proven good; gives the revision.
pub async fn settled(world: &World<'_>, infd: &str, not: &str) -> Result<String> {
    until_async(&format!("{infd} to have proven its revision"), BOUND, || async {
        let object = world.infds.now().remove(infd);
        let Some(object) = object else { return Ok(None) };
        let Some(rollout) = object.status.as_ref().map(|status| status.rollout.clone()) else { return Ok(None) };
        let good = !rollout.stable.is_empty() && rollout.stable == rollout.target && rollout.stable != not;
        Ok((good && is(&object, "Ready", "True")).then_some(rollout.stable))
    })
    .await
}

/// Since the witness has looked: who finds nobody because the only replica's probe was late has lost nothing by the product.
pub async fn without_a_loss(
    witness: &Witness<'_>,
    load: &Load,
    since: Instant,
    what: &str,
    times: &mut Times,
) -> Result<()> {
    let lost = witness.lost(load, since).await;
    let felt = load.felt(since);
    times.note(&format!("lost requests during {what}: {lost} ({})", told(&felt)));
    ensure!(lost == 0 && felt.whole > 0, "lost during {what}: {felt:?}");
    Ok(())
}

/// Does the good revision stand in the Deployment?
fn rolled_back(world: &World<'_>, good: &str) -> bool {
    let path = format!("jsonpath={{.spec.template.metadata.labels.{}}}", LABEL_REVISION.replace('.', "\\."));
    world.kubectl(&["get", "deploy", "roll", "-o", &path]).is_ok_and(|revision| revision == good)
}

fn tells_git(world: &World<'_>, revision: &str) -> Result<()> {
    let infd = world.infds.now().remove("roll").context("roll is gone")?;
    ensure!(
        infd.spec.engine.args.iter().any(|arg| arg == "--fault"),
        "the spec was changed: {:?}",
        infd.spec.engine.args
    );
    let status = infd.status.clone().unwrap_or_default();
    let stalled = status.conditions.iter().find(|c| c.type_ == "Stalled").context("no condition Stalled")?;
    ensure!(stalled.status == "True" && stalled.reason == "RolledBack", "{stalled:?}");
    ensure!(
        stalled.message.contains(revision) && stalled.message.contains("raise spec.rollout.attempt"),
        "{}",
        stalled.message
    );
    ensure!(is(&infd, "Ready", "False") && !is(&infd, "Reconciling", "True"), "{:?}", status.conditions);
    ensure!(Some(status.observed_generation) == infd.metadata.generation, "the status speaks of another generation");
    Ok(())
}
