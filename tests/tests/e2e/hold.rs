//! A mass stall on a real cluster (I2): all replicas of a deployment freeze at once, nothing is restarted one after another into the same cause,
//! somebody is told, one is tried after a while, and a person may let the others go.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use crds::{EngineIncident, HoldStatus, InferenceDeployment, Trial};
use kube::ResourceExt;
use truebeat_tests::load::Load;
use truebeat_tests::product;
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;

use crate::kill::{SYSTEM, leader};
use crate::lifecycle::manifest_with;
use crate::recovery::{LONG, removed};
use crate::world::{BOUND, World, answered, is, restarts};

const NAME: &str = "mass";
const REPLICAS: usize = 3;
/// Whoever is not to be restarted has had its time by then.
const OTHERS_WAIT: Duration = Duration::from_secs(10);

pub async fn story(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let policy = "{mode: Fence, lastReplica: Fence, maxUnavailable: 3, trialAfter: 1m, restartsBeforeReplace: 10}";
    product::apply(world.cluster, &manifest_with(NAME, 3, policy))?;
    let endpoints = world.endpoints(NAME);
    let pods = endpoints.count(REPLICAS, BOUND).await?;
    answered(&world.load(NAME).await?).await?;
    world.quiet(NAME).await?;
    let _loads: Vec<Load> = pods.iter().map(|pod| world.load_on(pod)).collect::<Result<_>>()?;

    // in the order in which they are confirmed the first would have its key before there is a common cause to see
    let frozen = times.act("SIGUSR2 to all three engines, which are fenced and no more");
    pods.iter().try_for_each(|pod| world.freeze(pod))?;
    for pod in &pods {
        let confirmed = |inc: &EngineIncident| inc.status.as_ref()?.timeline.confirmed_at.as_ref().map(drop);
        let (at, ()) = world.incident("a confirmed stall", pod, frozen, confirmed).await?;
        times.seen(&format!("{pod}: the stall is confirmed"), at);
    }
    let recovers = times.act("kubectl patch: mode Recover; all three might be restarted at once by their budget");
    world.kubectl(&["patch", "infd", NAME, "--type=merge", "-p", r#"{"spec":{"recovery":{"mode":"Recover"}}}"#])?;
    let held = |infd: &InferenceDeployment| of_ours(infd)?.and_then(|_| words_of(infd));
    let (at, words) = world.infds.first("restarts to be held", recovers, BOUND, held).await?;
    times.seen(&format!("RestartsHeld: {words}"), at);
    ensure!(words.contains("3 of 3 replicas stall at once"), "{words}");
    pages(world, times).await?;

    let tried = |infd: &InferenceDeployment| of_ours(infd)??.trial;
    let (at, trial) = world.infds.first("one restart on trial", recovers, LONG, tried).await?;
    times.seen(&format!("{} is restarted on trial", trial.pod), at);
    let since = hold(world)?.since.parse::<k8s_openapi::jiff::Timestamp>()?;
    let waited = trial.granted_at.parse::<k8s_openapi::jiff::Timestamp>()?.duration_since(since);
    ensure!(waited.as_secs() >= 60, "after {waited} only: trialAfter is 1m");
    tokio::time::sleep(OTHERS_WAIT).await;
    others_wait(world, &pods, &trial, frozen)?;
    times.now("the others wait for what comes of it");

    let lifted = times.act("kubectl patch: recovery.holdPercent 100, a person lets them go");
    world.kubectl(&["patch", "infd", NAME, "--type=merge", "-p", r#"{"spec":{"recovery":{"holdPercent":100}}}"#])?;
    for pod in pods.iter().filter(|pod| **pod != trial.pod) {
        times.seen(&format!("{pod}: its endpoint is back"), endpoints.flip(pod, true, lifted, BOUND).await?);
    }
    endpoints.count(REPLICAS, BOUND).await?;
    times.seen("all serve, status all well", world.quiet(NAME).await?);
    removed(world, NAME).await
}

/// The hold of our deployment, if it stands; the outer `None`: it is another's word.
fn of_ours(infd: &InferenceDeployment) -> Option<Option<HoldStatus>> {
    (infd.name_any() == NAME).then(|| infd.status.as_ref()?.recovery.hold.clone().filter(HoldStatus::stands))
}

fn words_of(infd: &InferenceDeployment) -> Option<String> {
    let conditions = infd.status.iter().flat_map(|status| &status.conditions);
    let held = conditions.into_iter().find(|c| c.type_ == "RestartsHeld" && c.status == "True")?;
    (held.reason == "CommonCause").then(|| held.message.clone())
}

fn hold(world: &World<'_>) -> Result<HoldStatus> {
    let now = world.infds.now();
    let infd = now.get(NAME).context("no such InferenceDeployment")?;
    ensure!(is(infd, "RestartsHeld", "True"), "it is held no more");
    of_ours(infd).flatten().context("no hold stands")
}

/// What the alert `TruebeatRestartsHeld` goes by.
async fn pages(world: &World<'_>, times: &mut Times) -> Result<()> {
    let series = format!("truebeat_operator_restarts_held{{deployment=\"{NAME}\",namespace=\"serving\"}} 1");
    until_async("the operator's metric", BOUND, || async {
        let (pod, _) = leader(world).await?;
        let path = format!("/api/v1/namespaces/{SYSTEM}/pods/{pod}:9500/proxy/metrics");
        Ok(world.cluster.kubectl(&["get", "--raw", &path])?.contains(&series).then_some(()))
    })
    .await?;
    times.now("the metric that pages says so");
    Ok(())
}

/// Nobody else has been given a key, let alone been restarted.
fn others_wait(world: &World<'_>, pods: &[String], trial: &Trial, frozen: Instant) -> Result<()> {
    for pod in pods.iter().filter(|pod| **pod != trial.pod) {
        ensure!(restarts(&*world.pod(pod)?, "engine") == 0, "{pod} was restarted");
    }
    let granted = |inc: &EngineIncident| inc.status.as_ref().is_some_and(|s| s.timeline.granted_at.is_some());
    let incidents = world.incidents_since(frozen);
    let keys: Vec<&str> = incidents.iter().filter(|inc| granted(inc)).map(|inc| inc.spec.pod.as_str()).collect();
    ensure!(keys.iter().all(|pod| *pod == trial.pod), "keys were granted to {keys:?}");
    Ok(())
}
