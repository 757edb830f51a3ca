//! The budgets of recoveries that all deployments share (I2): of a node, of a failure domain, of the fleet. Whoever has a slot is restarted;
//! whoever has none waits, is told for what, and gets it when it is free; and nobody waits elsewhere.

use anyhow::{Context, Result, ensure};
use crds::InferenceDeployment;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};
use truebeat_tests::fleet::replica::Says;

use crate::world::World;

const HOST: &str = "kubernetes.io/hostname";
const ZONE: &str = "topology.kubernetes.io/zone";
/// Half of so many replicas, which is the fleet's budget here, is more than any node or failure domain bears.
const MANY: usize = 8;

/// A node bears two (the operator's default).
pub async fn of_a_node(world: &World<'_>) -> Result<()> {
    world.tenant("crowded")?;
    let pods = world.deploy("crowded", "chat", on(HOST, "sim-0000", MANY)).await?;
    let beside = world.deploy("crowded", "beside", on(HOST, "sim-0001", 2)).await?;
    let of_place = Waits { count: 2, why: "a restart waits for the budget of node sim-0000" };
    waits_in_place(world, &pods[..3], &of_place, &beside[0]).await?;
    world.leave("crowded").await
}

/// A failure domain of two nodes bears three ([`crate::world::OPERATOR_ARGS`]).
pub async fn of_a_domain(world: &World<'_>) -> Result<()> {
    world.tenant("zoned")?;
    let pods = world.deploy("zoned", "chat", on(ZONE, "zone-2", MANY)).await?;
    let beside = world.deploy("zoned", "beside", on(ZONE, "zone-1", 2)).await?;
    let of_node = |name: &str| pods.iter().filter(|pod| node(pod) == name).take(2).cloned().collect::<Vec<_>>();
    let stalls = [of_node("sim-0002"), of_node("sim-0003")].concat();
    ensure!(stalls.len() == 4, "the scheduler has spread them unevenly");
    let of_place = Waits { count: 3, why: "a restart waits for the budget of failure domain zone-2" };
    waits_in_place(world, &stalls, &of_place, &beside[0]).await?;
    world.leave("zoned").await
}

/// Half of the fleet's four replicas are two, whoever asks first.
pub async fn of_the_fleet(world: &World<'_>) -> Result<()> {
    world.tenant("fleet")?;
    let two = || json!({"replicas": 2, "recovery": all_at_once()});
    let first = world.deploy("fleet", "first", two()).await?;
    let second = world.deploy("fleet", "second", two()).await?;
    for (pod, id) in first.iter().zip(["first-0", "first-1"]) {
        world.stall_until_granted(pod, id).await?;
    }
    world.say(&second[0], Says::stalls("second-0")).await?;
    let told = |infd: &InferenceDeployment| says(infd, "a restart waits for the fleet's budget, held by fleet/first");
    world.status("fleet", "second", "it to be told that it waits for the fleet", told).await?;
    ensure!(world.grant(&second[0]).await?.is_none(), "a third of four is restarted");
    world.say(&first[0], Says::Recovered("first-0".into())).await?;
    world.granted(&second[0], "second-0").await?;
    world.recover(&second[0], "second-0").await?;
    world.recover(&first[1], "first-1").await?;
    world.leave("fleet").await
}

/// What is expected of a place that is full.
struct Waits {
    /// So many have a key.
    count: usize,
    why: &'static str,
}

/// All of `pods` stall, one more than their place bears: that one waits, `beside` does not, and the first to be well again makes room.
async fn waits_in_place(world: &World<'_>, pods: &[Pod], place: &Waits, beside: &Pod) -> Result<()> {
    let namespace = beside.namespace().unwrap_or_default();
    let ids: Vec<String> = (0..pods.len()).map(|nth| format!("{namespace}-{nth}")).collect();
    for (pod, id) in pods.iter().zip(&ids) {
        world.say(pod, Says::stalls(id)).await?;
    }
    let grants = |infd: &InferenceDeployment| infd.status.as_ref().map_or(0, |status| status.recovery.grants.len());
    let full = |infd: &InferenceDeployment| grants(infd) == place.count && says(infd, place.why);
    let infd = world.status(&namespace, "chat", place.why, full).await?;
    let held = infd.status.context("a status")?.recovery.grants;
    let has_key = |pod: &Pod| held.iter().any(|grant| Some(&grant.pod_uid) == pod.uid().as_ref());
    let (some, none): (Vec<_>, Vec<_>) = pods.iter().zip(&ids).partition(|(pod, _)| has_key(pod));
    let ([(first, first_id), ..], [(last, last_id)]) = (&some[..], &none[..]) else {
        anyhow::bail!("{} have a key, and {} have none", some.len(), none.len());
    };
    world.granted(first, first_id).await?;

    world.stall_until_granted(beside, "beside-1").await?;
    world.recover(beside, "beside-1").await?;
    ensure!(world.grant(last).await?.is_none(), "{} is restarted beyond the budget", last.name_any());

    world.say(first, Says::Recovered((*first_id).clone())).await?;
    world.granted(last, last_id).await?;
    for (pod, id) in some.iter().skip(1).chain(&none) {
        world.say(pod, Says::Recovered((*id).clone())).await?;
    }
    world.status(&namespace, "chat", "no key to be left", |infd| grants(infd) == 0).await.map(drop)
}

/// So many replicas where this label says so.
fn on(label: &str, place: &str, replicas: usize) -> Value {
    let overlay = json!({"spec": {"nodeSelector": {label: place}}});
    json!({"replicas": replicas, "recovery": all_at_once(), "podOverlay": overlay})
}

/// Its own policy keeps nobody waiting.
fn all_at_once() -> Value {
    json!({"maxUnavailable": MANY, "holdPercent": 100, "restartsBeforeReplace": 10})
}

fn node(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

fn says(infd: &InferenceDeployment, words: &str) -> bool {
    let conditions = infd.status.iter().flat_map(|status| &status.conditions);
    conditions.into_iter().any(|c| c.type_ == "EnginesProgressing" && c.message.contains(words))
}
