//! A node is drained under clients that stream: replicas leave one at a time, each with its requests answered; one that serves nobody
//! is never in the way, and the one that serves is kept. Whoever asks replicas to drain that stay is not obeyed (S15).

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use kube::ResourceExt;
use truebeat_tests::endpoints::Endpoints;
use truebeat_tests::load::Load;
use truebeat_tests::product;
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;

use crate::lifecycle::manifest_of;
use crate::probes::{Probes, Witness};
use crate::recovery::removed;
use crate::rollout::without_a_loss;
use crate::world::{BOUND, NAMESPACE, World, answered, members, ready};

/// What kubectl says of a pod that it may not evict yet.
const WITHIN_BUDGET: &str = "disruption budget";
/// Nobody could go anywhere else than the node that is drained, so that a drain ends by its own bound.
const DRAIN_BOUND: &str = "--timeout=12s";
/// So long a stranger's drain is to last, and so long nobody may follow it: a replica that obeys is out at once, and refuses after a third.
const STRANGERS_DRAIN: Duration = Duration::from_secs(9);

pub async fn story(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let rest = "recovery: {mode: Fence}\n  rollout: {soakSeconds: 1}\n  drainSeconds: 9";
    let args = "--fault, step-stall@sigusr2, --drain-timeout, 2s";
    product::apply(world.cluster, &manifest_of("leaving", 2, args, rest))?;
    let endpoints = world.endpoints("leaving");
    let old = endpoints.count(2, BOUND).await?;
    world.quiet("leaving").await?;
    // half of them keep their connections for as long as they are left open
    let loads = [world.patient_load("leaving").await?, world.keeping_load("leaving").await?];
    all_answered(&loads).await?;

    let witness = Witness::of(world, &endpoints)?;
    let asked = Instant::now();
    strangers(world, times, &old, &endpoints).await?;
    none_lost(&witness, &loads, asked, "the stranger's visit", times).await?;
    let witness = Witness::of(world, &endpoints)?;
    let begun = times.act("kubectl drain, of the only node: nobody who leaves finds another place");
    drain(world, &old[0])?;
    let left = members(&world.pods, "leaving");
    let stayed: Vec<_> = old.iter().filter(|pod| left.contains(pod)).cloned().collect();
    ensure!(stayed.len() == 1, "of {old:?} the drain left {stayed:?}");
    times.now(&format!("one replica was evicted, {} is kept by the budget", stayed[0]));
    none_lost(&witness, &loads, begun, "the drain", times).await?;
    let witness = Witness::of(world, &endpoints)?;
    let begun = times.act("kubectl uncordon");
    uncordon(world, &stayed[0])?;
    let both = endpoints.count(2, BOUND).await?;
    times.now(&format!("{} serves beside it", both.iter().find(|pod| !old.contains(pod)).unwrap_or(&both[0])));
    none_lost(&witness, &loads, begun, "the way back", times).await?;

    let frozen = times.act(&format!("SIGUSR2 to the engine of {}; recovery may only fence it", stayed[0]));
    world.freeze(&stayed[0])?;
    times.seen("its endpoint is away", endpoints.flip(&stayed[0], false, frozen, BOUND).await?);
    until_async("it to be not Ready, which is what an eviction asks for", BOUND, || async {
        Ok((!ready(&*world.pod(&stayed[0])?)).then_some(()))
    })
    .await?;
    until_async("the budget to spare nobody who serves", BOUND, || async {
        let left = ["get", "pdb", "leaving", "-o", "jsonpath={.status.disruptionsAllowed}"];
        Ok((world.kubectl(&left)?.trim() == "0").then_some(()))
    })
    .await?;
    let serving = both.iter().find(|pod| **pod != stayed[0]).unwrap_or(&both[0]);
    drain(world, serving)?;
    let left = members(&world.pods, "leaving");
    ensure!(left.contains(serving) && !left.contains(&stayed[0]), "after the drain there are {left:?}");
    ensure!(!endpoints.ready().contains(&stayed[0]), "{:?} get traffic", endpoints.ready());
    let served = endpoints.count(1, BOUND).await?;
    ensure!(served == [serving.clone()], "{served:?} get traffic");
    times.now(&format!("the frozen one was evicted in spite of the budget, {serving} is kept"));
    all_answered(&loads).await?;
    ensure!(witness.never_alone(begun).await, "for a moment nobody served: {:?}", endpoints.flips());
    uncordon(world, serving)?;
    endpoints.count(2, BOUND).await?;
    times.now("kubectl uncordon: two serve");
    drop(loads);
    removed(world, "leaving").await
}

async fn all_answered(loads: &[Load]) -> Result<()> {
    for load in loads {
        answered(load).await?;
    }
    Ok(())
}

/// All of them are served again, and none has lost a request.
async fn none_lost(
    witness: &Witness<'_>,
    loads: &[Load; 2],
    since: Instant,
    what: &str,
    times: &mut Times,
) -> Result<()> {
    all_answered(loads).await?;
    let [anew, keeping] = loads;
    without_a_loss(witness, anew, since, what, times).await?;
    without_a_loss(witness, keeping, since, &format!("{what}, of clients that keep their connections"), times).await
}

/// Somebody who reaches the agents' ports asks all replicas at once to drain, as a kubelet would: none of them is being deleted, so nobody
/// leaves, and clients do not feel it.
async fn strangers(world: &World<'_>, times: &mut Times, pods: &[String], endpoints: &Endpoints) -> Result<()> {
    let probes = Probes::of(world, pods)?;
    let begun = times.act("a stranger asks every replica to drain");
    let seconds = STRANGERS_DRAIN.as_secs();
    let ask = |pod: &String| {
        let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}:9400/proxy/drain?timeout_s={seconds}");
        let answer = world.cluster.kubectl(&["get", "--raw", &path])?;
        ensure!(answer.contains("in_flight"), "the agent of {pod} answered {answer}");
        Ok(())
    };
    std::thread::scope(|scope| -> Result<()> {
        let asked: Vec<_> = pods.iter().map(|pod| scope.spawn(move || ask(pod))).collect();
        asked.into_iter().try_for_each(|ask| ask.join().unwrap_or_else(|_| bail!("who asked has panicked")))
    })?;
    let mut out = BTreeSet::new();
    while begun.elapsed() < STRANGERS_DRAIN {
        for pod in pods {
            if !ready(&*world.pod(pod)?) {
                out.insert(pod);
            }
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    for pod in pods {
        let late = probes.late(world, pod)?;
        ensure!(late > 0 || !out.contains(pod), "{pod} obeyed a stranger");
        probes.account_for(world, endpoints, pod, begun)?;
    }
    // who obeyed would be out until it is told otherwise
    endpoints.count(pods.len(), Duration::from_secs(10)).await?;
    times.now(&format!("{} s later all serve as before", begun.elapsed().as_secs()));
    Ok(())
}

/// `kubectl drain` of the node of `pod`, of this deployment's pods alone. It must end in words about the budget.
fn drain(world: &World<'_>, pod: &str) -> Result<()> {
    let node = node_of(world, pod)?;
    let mine = format!("--pod-selector={}=leaving", crds::LABEL_DEPLOYMENT);
    let Err(refused) = world.kubectl(&["drain", &node, &mine, "--delete-emptydir-data", DRAIN_BOUND]) else {
        bail!("the drain took every replica");
    };
    ensure!(format!("{refused:#}").contains(WITHIN_BUDGET), "the drain failed for another reason: {refused:#}");
    Ok(())
}

fn uncordon(world: &World<'_>, pod: &str) -> Result<()> {
    world.cluster.kubectl(&["uncordon", &node_of(world, pod)?]).map(drop)
}

fn node_of(world: &World<'_>, pod: &str) -> Result<String> {
    let pod = world.pod(pod)?;
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
    node.ok_or_else(|| anyhow::anyhow!("{} is on no node", pod.name_any()))
}
