//! The recovery policy on a real cluster: the last replica that serves, restarts without an operator, places to avoid, and a
//! leader that is killed or asked to go.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use crds::EngineIncident;
use crds::episode::{ANNOTATION_LAST_SERVING, CONDITION_EPISODE, CONDITION_PROGRESSING, Episode};
use crds::node::{CONDITION_ENGINE_STALLS, LABEL_AVOID_PREFIX};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, ResourceExt};
use nix::sys::signal::Signal;
use serde_json::json;
use truebeat_tests::endpoints::Endpoints;
use truebeat_tests::fleet::nodes;
use truebeat_tests::load::Load;
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;
use truebeat_tests::{host, product};

use crate::kill::{SYSTEM, leader, scale_operator};
use crate::lifecycle::manifest_with;
use crate::world::{BOUND, World, answered, is, members, restarted, restarts, told, uid};

/// Scheduling and 30 s of patience stand behind some of these.
pub const LONG: Duration = Duration::from_secs(180);
/// A node that the API server knows and nobody runs.
const PHANTOM: &str = "phantom";
/// Past the operator's own 30 s of knowing the nodes: one that looked before the phantom was there avoids nothing, for lack of another.
const NODES_KNOWN_FOR: Duration = Duration::from_secs(31);

/// One replica with a policy of its own, that serves and has a client.
pub async fn one_serving(world: &World<'_>, name: &str, recovery: &str) -> Result<(String, Endpoints, Load)> {
    product::apply(world.cluster, &manifest_with(name, 1, recovery))?;
    let endpoints = world.endpoints(name);
    let pod = endpoints.count(1, BOUND).await?.remove(0);
    let load = world.load(name).await?;
    answered(&load).await?;
    Ok((pod, endpoints, load))
}

pub async fn removed(world: &World<'_>, name: &str) -> Result<()> {
    world.kubectl(&["delete", "infd", name, "--wait=true", "--timeout=60s"])?;
    until_async("its pods to be gone", BOUND, || async { Ok(members(&world.pods, name).is_empty().then_some(())) })
        .await
}

/// I3: it stays in traffic, although it is suspected and confirmed, until its restart is granted.
pub async fn last_replica(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let (pod, endpoints, load) = one_serving(world, "last", "{mode: Recover, lastReplica: Serve}").await?;
    let marked =
        |seen: &Pod| (seen.name_any() == pod && seen.annotations().contains_key(ANNOTATION_LAST_SERVING)).then_some(());
    let (at, ()) = world.pods.first("the mark", Instant::now() - BOUND, BOUND, marked).await?;
    // the agent hears of it with the answer to the next thing that it says: that it has work now, or none any more
    let said = verdict(&*world.pod(&pod)?);
    let load = if said.as_deref() == Some("Idle") { Some(load) } else { None };
    let other = |seen: &Pod| (seen.name_any() == pod && verdict(seen) != said).then_some(());
    world.pods.first("another word of the agent", at, BOUND, other).await?;
    drop(load);
    let load = world.load("last").await?;
    let before = restarts(&*world.pod(&pod)?, "engine");
    answered(&load).await?;
    let frozen = times.act(&format!("SIGUSR2 to the engine of {pod}, the only one"));
    world.freeze(&pod)?;
    let stage = |inc: &EngineIncident| inc.status.as_ref().filter(|s| s.timeline.confirmed_at.is_some()).map(drop);
    let (at, ()) = world.incident("a confirmed stall", &pod, frozen, stage).await?;
    times.seen("the stall is confirmed", at);
    let outcome = |inc: &EngineIncident| inc.status.as_ref()?.outcome.clone().map(|_| inc.clone());
    let (at, incident) = world.incident("the incident's end", &pod, frozen, outcome).await?;
    times.seen("the incident is closed", at);
    let timeline = incident.status.map(|status| status.timeline).unwrap_or_default();
    let (fenced, granted) = timeline.fenced_at.zip(timeline.granted_at).context("an incident without its times")?;
    times.note(&format!("granted at {granted}, fenced at {fenced}: not before"));
    ensure!(fenced >= granted, "fenced at {fenced}, before the grant at {granted}");
    ensure!(restarts(&*world.pod(&pod)?, "engine") == before + 1, "not one restart");
    let away = endpoints.flip(&pod, false, frozen, BOUND).await?;
    times.seen("its endpoint is away", away);
    times.seen("it is back", endpoints.flip(&pod, true, away, BOUND).await?);
    times.note(&told(&load.felt(frozen)));
    removed(world, "last").await
}

/// I1 without an operator: one restart by itself, not a second one within the window, and the records when it is back.
pub async fn unattended(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let policy = "{mode: Recover, lastReplica: Fence, unattendedAfter: 10s, unattendedWindow: 1h}";
    let (pod, endpoints, load) = one_serving(world, "alone", policy).await?;
    times.act("the operator is scaled to nothing");
    scale_operator(world, 0)?;
    let before = restarts(&*world.pod(&pod)?, "engine");
    let frozen = times.act(&format!("SIGUSR2 to the engine of {pod}"));
    world.freeze(&pod)?;
    let by_itself = |seen: &Pod| episode(seen).filter(|e| e.granted_by.as_deref() == Some("self")).map(drop);
    let (at, ()) = world.pods.first("a restart by itself", frozen, BOUND, by_itself).await?;
    times.seen("the agent grants itself the restart", at);
    let waited = at.duration_since(frozen);
    ensure!(waited >= Duration::from_secs(10), "after {waited:?} only: unattendedAfter is 10 s");
    times.seen("it serves again", endpoints.flip(&pod, true, at, BOUND).await?);
    answered(&load).await?;
    let again = times.act("SIGUSR2 once more: the window is spent");
    world.freeze(&pod)?;
    times.seen("its endpoint is away", endpoints.flip(&pod, false, again, BOUND).await?);
    tokio::time::sleep(Duration::from_secs(20)).await; // twice unattendedAfter: what must not happen has had its time
    ensure!(restarts(&*world.pod(&pod)?, "engine") == before + 1, "a second restart by itself within the window");
    times.now("twice unattendedAfter later it is fenced and nothing was killed");
    scale_operator(world, 2)?;
    times.now("the operator is back");
    // what stands in the status until then is from before it went, and an endpoint may come and go on a machine that has much to do
    let back = Instant::now();
    let granted =
        |inc: &EngineIncident| inc.status.as_ref()?.granted_by.as_deref().filter(|by| *by == "operator").map(drop);
    let (at, ()) = world.incident("a record that the operator granted the second", &pod, again, granted).await?;
    times.seen("the operator's grant is on record", at);
    times.seen("it serves again", endpoints.flip(&pod, true, back, BOUND).await?);
    world.quiet("alone").await?;
    let mut by: Vec<_> = world
        .incidents_since(frozen)
        .iter()
        .filter(|inc| inc.spec.pod == pod)
        .filter_map(|inc| inc.status.as_ref()?.granted_by.clone())
        .collect();
    by.sort();
    ensure!(by.contains(&"operator".to_owned()), "the second was granted by {by:?}");
    times.note(&format!("recorded grants by {by:?}"));
    removed(world, "alone").await
}

/// The agent's verdict, by its declaration.
fn verdict(pod: &Pod) -> Option<String> {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().find(|condition| condition.type_ == CONDITION_PROGRESSING)?.reason.clone()
}

fn episode(pod: &Pod) -> Option<Episode> {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let told = conditions.into_iter().find(|condition| condition.type_ == CONDITION_EPISODE)?;
    serde_json::from_str(told.message.as_deref()?).ok()
}

/// Restart, restart, replace; the place is avoided, the node tells of it; and a pod without any other place comes back.
pub async fn avoid(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let all: Api<Node> = Api::all(world.client.clone());
    let policy = "{mode: Recover, lastReplica: Fence, restartsBeforeReplace: 2, avoidFor: 10m}";
    let (first, endpoints, _load) = one_serving(world, "place", policy).await?;
    let home = world.pod(&first)?.spec.as_ref().and_then(|spec| spec.node_name.clone()).context("a pod on no node")?;
    let _beats = nodes::heartbeats(&world.client, PHANTOM);
    phantom(world)?;
    tokio::time::sleep(NODES_KNOWN_FOR).await;
    times.act("there is another node now (nobody runs it); the engine freezes three times");
    let before = restarts(&*world.pod(&first)?, "engine");
    for n in 1..=2 {
        let frozen = Instant::now();
        world.freeze(&first)?;
        // (not by its endpoint, which may come, go and come again beside one restart; the grant is there since before it)
        restarted(world, &first, before + n, frozen, times).await?;
        times.seen(&format!("restart {n} in place, and all is well"), world.quiet("place").await?);
    }
    let since = Instant::now();
    world.freeze(&first)?;
    let (at, successor) = world
        .pods
        .first("a successor on a node", since, BOUND, |pod| {
            let ours = pod.labels().get(crds::LABEL_DEPLOYMENT).is_some_and(|name| name == "place");
            let node = pod.spec.as_ref()?.node_name.clone()?;
            (ours && pod.name_any() != first).then(|| (pod.name_any(), node))
        })
        .await?;
    times.seen(&format!("replaced by {} on {}", successor.0, successor.1), at);
    ensure!(successor.1 == PHANTOM, "the successor landed on {}, where it came from", successor.1);
    let node = until_async("the node to tell of it", BOUND, || async {
        let node = all.get(&home).await?;
        let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let told = conditions.into_iter().any(|c| c.type_ == CONDITION_ENGINE_STALLS && c.status == "True");
        Ok(told.then_some(node))
    })
    .await?;
    times.now(&format!("condition {CONDITION_ENGINE_STALLS} is True on {home}"));
    ensure!(node.labels().keys().any(|key| key.starts_with(LABEL_AVOID_PREFIX)), "no mark: {:?}", node.labels());
    only_its_own_marks(world, &home)?;
    times.note("as the operator: cordon, taint and a foreign label are refused by admission");

    times.act("the other node takes nobody any more, and the pod there is lost");
    world.cluster.kubectl(&["cordon", PHANTOM])?;
    world.kubectl(&["delete", "pod", &successor.0, "--force", "--grace-period=0"])?;
    let back = endpoints.count(1, LONG).await?.remove(0);
    times.now(&format!("{back} serves, on the place that was avoided: a suspicion is worth less than a replica"));
    let home_of = world.pod(&back)?.spec.as_ref().and_then(|spec| spec.node_name.clone());
    ensure!(home_of.as_deref() == Some(home.as_str()), "it runs on {home_of:?}");
    until_async("the mark to be gone", BOUND, || async {
        let labels = all.get(&home).await?.labels().clone();
        Ok((!labels.keys().any(|key| key.starts_with(LABEL_AVOID_PREFIX))).then_some(()))
    })
    .await?;
    let events = world.kubectl(&["get", "events.events.k8s.io", "-o", "jsonpath={.items[*].reason}"])?;
    for reason in ["NodeAvoided", "AvoidanceLifted"] {
        ensure!(events.contains(reason), "no event {reason}: {events}");
    }
    world.cluster.kubectl(&["delete", "node", PHANTOM])?;
    removed(world, "place").await
}

/// A node of paper: Ready, with room, and without a kubelet.
fn phantom(world: &World<'_>) -> Result<()> {
    let now = k8s_openapi::jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let room = json!({"cpu": "8", "memory": "16Gi", "pods": "50", "ephemeral-storage": "100Gi"});
    let status = json!({
        "capacity": room, "allocatable": room,
        "conditions": [{
            "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "of paper",
            "lastHeartbeatTime": now, "lastTransitionTime": now,
        }],
    });
    let labels = json!({"kubernetes.io/hostname": PHANTOM, "kubernetes.io/os": "linux"});
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": PHANTOM, "labels": labels}});
    product::apply(world.cluster, &node.to_string())?;
    let patch = json!({"status": status}).to_string();
    world.cluster.kubectl(&["patch", "node", PHANTOM, "--subresource=status", "--type=merge", "-p", &patch])?;
    world.cluster.kubectl(&["wait", "node", PHANTOM, "--for=condition=Ready", "--timeout=30s"])?;
    // the taint of a node that was never ready goes when its condition is seen
    world.cluster.kubectl(&["taint", "node", PHANTOM, "node.kubernetes.io/not-ready-"]).map(drop).or(Ok(()))
}

/// RBAC can only say "patch a node"; admission says what of it.
fn only_its_own_marks(world: &World<'_>, node: &str) -> Result<()> {
    let as_operator = "--as=system:serviceaccount:truebeat-system:truebeat-operator";
    for patch in [
        json!({"spec": {"unschedulable": true}}),
        json!({"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}}),
        json!({"metadata": {"labels": {"kubernetes.io/os": "plan9"}}}),
        json!({"metadata": {"annotations": {"a": "b"}}}),
    ] {
        let text = patch.to_string();
        let words = [as_operator, "patch", "node", node, "--type=merge", "-p", &text];
        let Err(refused) = world.cluster.kubectl(&words) else { anyhow::bail!("{text} was not refused") };
        ensure!(format!("{refused:#}").contains("truebeat:"), "{text} was refused by somebody else: {refused:#}");
    }
    Ok(())
}

/// A killed leader's container leads again with its first look; one that is asked to go hands over at once.
pub async fn leader_change(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let (name, process) = leader(world).await?;
    let old = holder(world).await?;
    let killed = times.act(&format!("SIGKILL to the leading operator, {name}"));
    host::signal(&process, Signal::SIGKILL);
    let new = another_holder(world, &old).await?;
    let after = killed.elapsed();
    times.now(&format!("the lease is held by {new}"));
    let container = started(world, &name).await?;
    times.note(&format!(
        "{} ms after SIGKILL; the kubelet started the next container at {container}",
        after.as_millis()
    ));
    ensure!(new.starts_with(&format!("{name}_")), "not its own container took over, but {new}");
    ensure!(after < Duration::from_secs(12), "the old lease had to expire");

    let (name, _) = leader(world).await?;
    let old = holder(world).await?;
    let asked = times.act(&format!("kubectl delete pod {name}: SIGTERM to the leader"));
    world.cluster.kubectl(&["-n", SYSTEM, "delete", "pod", &name, "--wait=false"])?;
    let new = another_holder(world, &old).await?;
    times.now(&format!("the lease is held by {new}"));
    times.note(&format!("{} ms after the request (bar: 3 s)", asked.elapsed().as_millis()));
    ensure!(asked.elapsed() < Duration::from_secs(10), "the old lease had to expire");
    let available = ["-n", SYSTEM, "wait", "deploy/truebeat-operator", "--for=jsonpath={.status.readyReplicas}=2"];
    world.cluster.kubectl(&[&available[..], &["--timeout=90s"]].concat()).map(drop)
}

async fn holder(world: &World<'_>) -> Result<String> {
    let leases: Api<Lease> = Api::namespaced(world.client.clone(), SYSTEM);
    Ok(leases.get("truebeat-operator").await?.spec.and_then(|spec| spec.holder_identity).unwrap_or_default())
}

async fn another_holder(world: &World<'_>, old: &str) -> Result<String> {
    until_async("another holder of the lease", BOUND, || async {
        let now = holder(world).await?;
        Ok((!now.is_empty() && now != old).then_some(now))
    })
    .await
}

/// When the running container of this operator began, by the kubelet.
async fn started(world: &World<'_>, pod: &str) -> Result<String> {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), SYSTEM);
    until_async("a running container", BOUND, || async {
        let pod = pods.get(pod).await?;
        let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
        let at = statuses.filter_map(|s| s.state.as_ref()?.running.as_ref()?.started_at.clone()).next();
        Ok(at.map(|at| at.0.to_string()))
    })
    .await
}

/// A person's fence: seen at the gate, kept over restarts of the agent's parts, in the record from begin to end.
pub async fn by_hand(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let (pod, endpoints, load) = one_serving(world, "hand", "{mode: Recover, lastReplica: Fence}").await?;
    let alone = world.load_on(&pod)?;
    answered(&alone).await?;
    let before = restarts(&*world.pod(&pod)?, "engine");
    let note = json!({"by": "the on-call", "at": k8s_openapi::jiff::Timestamp::now().to_string(), "why": "a look"});
    let fenced = times.act("a person's fence: the annotation truebeat.io/fence");
    world.kubectl(&["annotate", "pod", &pod, &format!("truebeat.io/fence={note}")])?;
    let away = endpoints.flip(&pod, false, fenced, LONG).await?;
    times.seen("its endpoint is away", away);
    let open = |inc: &EngineIncident| (inc.spec.class == "FencedByPerson").then(|| inc.name_any());
    let (at, record) = world.incident("a record", &pod, fenced, open).await?;
    times.seen(&format!("recorded as {record}"), at);

    let now = times.act("SIGKILL to detector and gate: they come back, the fence stands");
    for role in ["agent detect", "agent gate"] {
        host::signal(&host::find(&uid(&*world.pod(&pod)?), role, BOUND)?, Signal::SIGKILL);
    }
    until_async("50 refusals by the new gate", BOUND, || async { Ok((alone.felt(now).refused >= 50).then_some(())) })
        .await?;
    let felt = alone.felt(now);
    times.note(&format!("straight to the gate: {}", told(&felt)));
    ensure!(felt.whole == 0, "{} requests got through", felt.whole);
    ensure!(endpoints.ready().is_empty(), "it gets traffic");

    let lifted = times.act("the annotation is taken off");
    world.kubectl(&["annotate", "pod", &pod, "truebeat.io/fence-"])?;
    times.seen("its endpoint is back", endpoints.flip(&pod, true, lifted, LONG).await?);
    answered(&load).await?;
    let closed = |inc: &EngineIncident| inc.status.as_ref()?.outcome.clone().filter(|_| inc.name_any() == record);
    let (at, outcome) = world.incident("the record's end", &pod, fenced, closed).await?;
    times.seen(&format!("the record is closed: {outcome}"), at);
    ensure!(at >= lifted, "the record was closed while the fence stood");
    ensure!(outcome == "Unfenced", "closed as {outcome}");
    ensure!(restarts(&*world.pod(&pod)?, "engine") == before, "the engine was restarted for it");
    world.quiet("hand").await?;
    ensure!(!world.infds.now().get("hand").is_some_and(|infd| is(infd, "Stalled", "True")), "Stalled is True");
    removed(world, "hand").await
}
