//! An agent that is frozen whole: nobody vouches for its replica, which is told within seconds; nothing is done to its engine, and the kubelet
//! starts the agent anew (D1, D2).

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use crds::InferenceDeployment;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use nix::sys::signal::Signal;
use truebeat_tests::host;
use truebeat_tests::times::Times;

use crate::world::{BOUND, World, restarts, told, two_serving, uid};

/// Six probes ten seconds apart, five seconds to end, and a busy machine.
const RESTARTED_WITHIN: Duration = Duration::from_secs(240);

pub async fn agent(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let endpoints = world.endpoints("chat");
    let load = world.load("chat").await?;
    let pods = two_serving(world, &endpoints, &load).await?;
    let (victim, other) = (&pods[0], &pods[1]);
    let before = world.pod(victim)?;
    let pages = world.pages(&pods)?;

    let frozen = times.act(&format!("SIGSTOP to each process of the agent of {victim}"));
    freeze(&before)?;
    times.seen("its endpoint is away", endpoints.flip(victim, false, frozen, BOUND).await?);
    let (at, ()) = world.infds.first("a word of it", frozen, BOUND, nobody_vouches).await?;
    times.seen("the operator says that nobody vouches for it (EnginesProgressing Unknown, NotVouchedFor)", at);

    let again =
        |pod: &Pod| (pod.name_any() == *victim && restarts(pod, "agent") > restarts(&before, "agent")).then_some(());
    let (at, ()) = world.pods.first("another agent", frozen, RESTARTED_WITHIN, again).await?;
    times.seen("the kubelet has started its agent anew", at);
    times.seen("its endpoint is back", endpoints.flip(victim, true, at, BOUND).await?);
    times.seen("status and conditions are all well", world.quiet("chat").await?);

    let after = world.pod(victim)?;
    ensure!(uid(&after) == uid(&before), "the pod was replaced");
    let engines = [&before, &after].map(|pod| restarts(pod, "engine"));
    ensure!(engines[0] == engines[1], "restarts of its engine went from {} to {}", engines[0], engines[1]);
    ensure!(world.incidents_since(frozen).is_empty(), "incidents: {:?}", world.incidents_since(frozen));
    stays(world, victim, frozen)?;
    times.note(&format!(
        "{other} delivered meanwhile; its longest pause: {} ms",
        pages.silence(other, frozen).as_millis()
    ));
    times.note("no incident, no eviction, no restart of the engine");
    times.note(&told(&load.felt(frozen)));
    Ok(())
}

/// Stops all that its agent's container runs, the first process first: it would start the others anew.
fn freeze(pod: &Pod) -> Result<()> {
    let root = host::root_process(pod, "agent", BOUND)?;
    host::signal(&root, Signal::SIGSTOP);
    let others = host::processes(&uid(pod)).into_iter().filter(|process| process.container == root.container);
    others
        .filter(|process| process.identity != root.identity)
        .for_each(|process| host::signal(&process, Signal::SIGSTOP));
    Ok(())
}

fn nobody_vouches(object: &InferenceDeployment) -> Option<()> {
    let status = object.status.as_ref().filter(|_| object.name_any() == "chat")?;
    let said = status.conditions.iter().find(|condition| condition.type_ == "EnginesProgressing")?;
    (said.status == "Unknown" && said.reason == "NotVouchedFor").then_some(())
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
