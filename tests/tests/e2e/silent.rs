//! An agent that is frozen whole, and then killed whole: nobody vouches for its replica, which is told within seconds; nothing is done to its
//! engine, and the kubelet starts the agent anew (D1, D2).

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use crds::InferenceDeployment;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use nix::sys::signal::Signal;
use truebeat_tests::endpoints::Endpoints;
use truebeat_tests::host;
use truebeat_tests::times::Times;

use crate::world::{BOUND, World, restarts, told, two_serving, uid};

/// Six probes ten seconds apart, five seconds to end, the kubelet's pause before a second restart, and a busy machine.
const RESTARTED_WITHIN: Duration = Duration::from_secs(240);
const KILLS_MAX: u32 = 3;

pub async fn agent(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let endpoints = world.endpoints("chat");
    let load = world.load("chat").await?;
    let pods = two_serving(world, &endpoints, &load).await?;
    let (victim, other) = (&pods[0], &pods[1]);
    let before = world.pod(victim)?;
    let pages = world.pages(&pods)?;

    let begun = Instant::now();
    let said = out_and_back(world, times, &endpoints, victim, Signal::SIGSTOP).await?;
    ensure!(said, "the operator did not say that nobody vouches for {victim}");
    // the kubelet waits longer each time before it starts a container again: at first an agent may be back before anybody tells
    let mut kills = 0;
    while !out_and_back(world, times, &endpoints, victim, Signal::SIGKILL).await? {
        kills += 1;
        ensure!(kills < KILLS_MAX, "the operator said of none of {kills} dead agents that nobody vouches for {victim}");
    }

    let after = world.pod(victim)?;
    ensure!(uid(&after) == uid(&before), "the pod was replaced");
    let engines = [&before, &after].map(|pod| restarts(pod, "engine"));
    ensure!(engines[0] == engines[1], "restarts of its engine went from {} to {}", engines[0], engines[1]);
    ensure!(world.incidents_since(begun).is_empty(), "incidents: {:?}", world.incidents_since(begun));
    stays(world, victim, begun)?;
    times.note(&format!(
        "{other} delivered meanwhile; its longest pause: {} ms",
        pages.silence(other, begun).as_millis()
    ));
    times.note("no incident, no eviction, no restart of the engine");
    times.note(&told(&load.felt(begun)));
    Ok(())
}

/// Does this to its agent and waits until another has come; whether the operator said meanwhile that nobody vouches for it.
async fn out_and_back(
    world: &World<'_>,
    times: &mut Times,
    endpoints: &Endpoints,
    victim: &str,
    signal: Signal,
) -> Result<bool> {
    let before = world.pod(victim)?;
    let since = times.act(&format!("{signal} to each process of the agent of {victim}"));
    signal_all(&before, signal)?;
    let away = endpoints.flip(victim, false, since, BOUND).await?;
    times.seen("its endpoint is away", away);
    let again =
        |pod: &Pod| (pod.name_any() == victim && restarts(pod, "agent") > restarts(&before, "agent")).then_some(());
    let (at, ()) = world.pods.first("another agent", since, RESTARTED_WITHIN, again).await?;
    let frames = world.infds.since(since);
    let told = frames.iter().find(|frame| frame.object.as_deref().is_some_and(nobody_vouches)).map(|frame| frame.at);
    if let Some(told) = told {
        times.seen("the operator says that nobody vouches for it (EnginesProgressing Unknown, NotVouchedFor)", told);
    }
    times.seen("the kubelet has started its agent anew", at);
    times.seen("its endpoint is back", endpoints.flip(victim, true, away, BOUND).await?);
    times.seen("status and conditions are all well", world.quiet("chat").await?);
    Ok(told.is_some())
}

/// To all that its agent's container runs, the first process first: it would start the others anew.
fn signal_all(pod: &Pod, signal: Signal) -> Result<()> {
    let root = host::root_process(pod, "agent", BOUND)?;
    host::signal(&root, signal);
    let others = host::processes(&uid(pod)).into_iter().filter(|process| process.container == root.container);
    others.filter(|process| process.identity != root.identity).for_each(|process| host::signal(&process, signal));
    Ok(())
}

fn nobody_vouches(object: &InferenceDeployment) -> bool {
    let mut said = object.status.iter().flat_map(|status| &status.conditions);
    let says = |condition: &Condition| condition.status == "Unknown" && condition.reason == "NotVouchedFor";
    object.name_any() == "chat" && said.any(|condition| condition.type_ == "EnginesProgressing" && says(condition))
}

/// Nothing is done to the pod because of its agent: no eviction, and none that was tried.
fn stays(world: &World<'_>, pod: &str, since: Instant) -> Result<()> {
    let frames = world.pods.since(since).into_iter().filter(|frame| frame.name == pod);
    for frame in frames {
        let seen = frame.object.context("the pod was deleted")?;
        ensure!(seen.metadata.deletion_timestamp.is_none(), "the pod was told to go");
    }
    world.nobody_is_evicted()
}
