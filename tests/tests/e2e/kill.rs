//! Our own parts die in the middle: nothing is lost, nothing happens twice, and no pod pays for it.

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use crds::EngineIncident;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use nix::sys::signal::Signal;
use truebeat_tests::host::{self, PodProcess};
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;

use crate::probes::Probes;
use crate::world::{BOUND, World, by_its_own_clock, ready, restarted, restarts, told, two_serving, uid};

pub const SYSTEM: &str = "truebeat-system";
const ROUNDS: usize = 5;

/// So many candidates; with none of them, waits until the last is gone.
pub fn scale_operator(world: &World<'_>, replicas: u8) -> Result<()> {
    let count = format!("--replicas={replicas}");
    world.cluster.kubectl(&["-n", SYSTEM, "scale", "deploy/truebeat-operator", &count])?;
    if replicas == 0 {
        world.cluster.kubectl(&["-n", SYSTEM, "wait", "pod", "--all", "--for=delete", "--timeout=60s"])?;
    }
    Ok(())
}

/// Waits until all of the operator's candidates are there, of the Deployment as it stands.
pub fn available(world: &World<'_>) -> Result<()> {
    world.cluster.kubectl(&["-n", SYSTEM, "rollout", "status", "deploy/truebeat-operator", "--timeout=120s"]).map(drop)
}

pub async fn operator(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let endpoints = world.endpoints("chat");
    let load = world.load("chat").await?;
    let pods = two_serving(world, &endpoints, &load).await?;
    let victim = &pods[0];
    let before = restarts(&*world.pod(victim)?, "engine");
    let (leader, process) = leader(world).await?;
    let (frozen, wall) = (times.act(&format!("SIGUSR2 to the engine of {victim}")), SystemTime::now());
    world.freeze(victim)?;
    let (at, ()) = world.incident("an incident", victim, frozen, |_| Some(())).await?;
    host::signal(&process, Signal::SIGKILL);
    times.seen("an EngineIncident tells of it", at);
    times.now(&format!("SIGKILL to the leading operator, {leader}"));
    let granted = |inc: &EngineIncident| inc.status.as_ref()?.timeline.granted_at.as_ref().map(drop);
    let (at, ()) = world.incident("a grant", victim, frozen, granted).await?;
    times.seen("the restart is granted (by whoever leads now)", at);
    restarted(world, victim, before + 1, frozen, times).await?;
    let outcome = |inc: &EngineIncident| inc.status.as_ref()?.outcome.clone().map(|_| inc.clone());
    let (at, incident) = world.incident("the incident's end", victim, frozen, outcome).await?;
    times.seen("the incident is closed", at);
    times.seen("status and conditions are all well", world.quiet("chat").await?);
    times.note(&by_its_own_clock(&incident, wall)?);
    // the killed one comes back and looks at the same world: it must find nothing to do
    let available = ["-n", SYSTEM, "wait", "deploy/truebeat-operator", "--for=jsonpath={.status.readyReplicas}=2"];
    world.cluster.kubectl(&[&available[..], &["--timeout=90s"]].concat())?;
    times.now("both operators are ready again");
    let (next, _) = self::leader(world).await?;
    times.note(&format!("leader before {leader}, now {next}"));
    world.quiet("chat").await?;
    let count = restarts(&*world.pod(victim)?, "engine");
    ensure!(count == before + 1, "{count} restarts, {} before the freeze", before);
    ensure!(world.incidents_since(frozen).len() == 1, "not one incident: {:?}", world.incidents_since(frozen));
    let episodes = grants(world, frozen);
    ensure!(episodes == [incident.spec.episode_id.clone()], "granted were {episodes:?}");
    times.note("exactly one incident, one grant, one restart");
    times.note(&told(&load.felt(frozen)));
    Ok(())
}

/// The episodes that had a grant at any moment since.
pub fn grants(world: &World<'_>, since: Instant) -> Vec<String> {
    let frames = world.infds.since(since).into_iter().filter_map(|frame| frame.object);
    let mut episodes: Vec<String> = frames
        .flat_map(|infd| infd.status.clone().unwrap_or_default().recovery.grants)
        .map(|grant| grant.episode)
        .collect();
    episodes.sort();
    episodes.dedup();
    episodes
}

/// The pod that leads, and its process on this machine.
pub async fn leader(world: &World<'_>) -> Result<(String, PodProcess)> {
    let leases: Api<Lease> = Api::namespaced(world.client.clone(), SYSTEM);
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), SYSTEM);
    until_async("a leading operator", BOUND, || async {
        let lease = leases.get("truebeat-operator").await?;
        let holder = lease.spec.and_then(|spec| spec.holder_identity).unwrap_or_default();
        let name = holder.split('_').next().unwrap_or_default().to_owned();
        let pod = pods.get(&name).await.with_context(|| format!("holder {holder:?}"))?;
        Ok(Some((name, host::root_process(&pod, "operator", Duration::from_secs(1))?)))
    })
    .await
}

pub async fn detector_and_gate(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let endpoints = world.endpoints("chat");
    let load = world.load("chat").await?;
    let pods = two_serving(world, &endpoints, &load).await?;
    let victim = &pods[0];
    let pod = world.pod(victim)?;
    let before = (restarts(&pod, "agent"), restarts(&pod, "engine"));
    let probes = Probes::of(world, &pods)?;
    let begun = times.act(&format!("in the agent of {victim}, {ROUNDS} times: SIGKILL to detector and gate"));
    for round in 1..=ROUNDS {
        let roles = ["agent detect", "agent gate"];
        let old = roles.map(|role| host::find(&uid(&pod), role, BOUND));
        let [detector, gate] = old;
        let (detector, gate) = (detector?, gate?);
        let killed = Instant::now();
        host::signal(&detector, Signal::SIGKILL);
        host::signal(&gate, Signal::SIGKILL);
        for (role, old) in roles.iter().zip([detector, gate]) {
            until_async(&format!("another `{role}`"), BOUND, || async {
                let new = host::find(&uid(&pod), role, Duration::from_secs(1))?;
                Ok((new.identity != old.identity).then_some(()))
            })
            .await?;
        }
        let since = Instant::now();
        until_async("answers through the new gate", BOUND, || async {
            Ok((load.felt(since).whole >= 10).then_some(()))
        })
        .await?;
        times.now(&format!("round {round}: both are back after {} ms", (since - killed).as_millis()));
    }
    // three more of the kubelet's probe periods and then some, told by the clients' work
    let (since, wanted) = (Instant::now(), load.felt(begun).whole + 200);
    until_async("200 more answers", BOUND, || async { Ok((load.felt(begun).whole >= wanted).then_some(())) }).await?;
    times.now(&format!("200 more answers in {} ms", since.elapsed().as_millis()));
    world.quiet("chat").await?;
    let pod = world.pod(victim)?;
    let after = (restarts(&pod, "agent"), restarts(&pod, "engine"));
    ensure!(after == before, "restarts of agent and engine went from {before:?} to {after:?}");
    let late = probes.late(world, victim)?;
    // what the machine alone does, it does to the other as well
    let alone = probes.late(world, &pods[1])?;
    ensure!(
        late < ROUNDS + alone,
        "{late} probes were late in {ROUNDS} rounds, {alone} of the other: that is no machine's doing"
    );
    for frame in world.pods.since(begun).into_iter().filter(|frame| frame.name == *victim) {
        let seen = frame.object.context("the pod was deleted")?;
        let after = (frame.at - begun).as_millis();
        ensure!(ready(&seen) || late > 0, "the pod was not Ready {after} ms after the first kill");
    }
    let mut flips = 0;
    for pod in &pods {
        flips += probes.account_for(world, &endpoints, pod, begun)?;
    }
    ensure!(world.incidents_since(begun).is_empty(), "incidents: {:?}", world.incidents_since(begun));
    world.nobody_is_evicted()?;
    times.note(&format!(
        "the agent's container was not restarted; no eviction, no incident; {flips} changes of endpoints, all by late probes"
    ));
    times.note(&told(&load.felt(begun)));
    Ok(())
}
