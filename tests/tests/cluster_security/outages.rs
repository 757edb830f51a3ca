//! Rows of the catalogue of faults in which the API server, its store or the leading operator is away for a while and comes back: A1, A21, B3.
//! They come last, because what they break is everybody's.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use crds::InferenceDeployment;
use kube::ResourceExt;
use nix::sys::signal::Signal;
use serde_json::json;
use truebeat_tests::audit::Entry;
use truebeat_tests::fleet::operator::{ACCOUNT, Candidate, NAMESPACE, http};
use truebeat_tests::fleet::replica::{self, Says};
use truebeat_tests::wait::until_async;

use crate::world::{BOUND, OPERATOR_ARGS, World};

/// The leader's.
const LEASE: &str = "truebeat-operator";
/// As much as the simulator lets pass (`no_burst`): what two replicas need, many times over.
const WRITES_MAX: usize = 50;
/// Nobody leads for so long after the store went back, while every agent repeats its word (`operator/src/leader/lease.rs`).
const PAUSE_MAX: Duration = Duration::from_secs(75);

/// A1: nothing is done while nobody can be asked, the same process goes on when that is over, and does not fall over it.
pub async fn api_server_gone(world: &World<'_>) -> Result<()> {
    world.tenant("outage")?;
    let pods = world.deploy("outage", "chat", json!({})).await?;
    let pod = pods.first().context("a pod")?;
    world.cluster.kill("apiserver")?;
    let told = sees_nothing(world).await;
    let asked = world.asked()?.len();
    world.cluster.start_again("apiserver")?;
    comes_back(world).await?;
    told?;
    let tried = world.tried_since(asked)?;
    ensure!(tried.len() <= WRITES_MAX, "{} writes when the API server was back", tried.len());
    let deletes: Vec<String> = tried.iter().filter(|entry| entry.verb == "delete").map(Entry::object).collect();
    ensure!(deletes.is_empty(), "an outage of the API server cost {deletes:?}");
    println!("      {} writes when it was back", tried.len());
    world.stall_until_granted(pod, "outage-1").await?;
    world.recover(pod, "outage-1").await?;
    world.leave("outage").await
}

/// It does not write, is not ready, and is no better off for being started again.
async fn sees_nothing(world: &World<'_>) -> Result<()> {
    let operator = &world.operator;
    until_async("the operator to give up its right to write, and to say that it sees nothing", BOUND, || async {
        let (code, _) = http(operator.address, "GET", "/readyz", "").await?;
        Ok((code == 503 && operator.metric("truebeat_operator_leader", "").await? == 0.0).then_some(()))
    })
    .await?;
    let (code, body) = http(operator.address, "GET", "/livez", "").await?;
    ensure!(code == 200, "it asks to be ended for the API server's sake: {body}");
    Ok(())
}

/// A21: the store is what it was before two stalls were over. Nobody is restarted for the stalls of the past.
pub async fn store_restored(world: &World<'_>) -> Result<()> {
    world.tenant("restored")?;
    let recovery = json!({"maxUnavailable": 1, "restartBackoff": "0s", "restartBackoffMax": "0s"});
    let pods = world.deploy("restored", "chat", json!({"recovery": recovery})).await?;
    let [first, second] = &pods[..] else { anyhow::bail!("{} replicas", pods.len()) };
    world.stall_until_granted(first, "past-1").await?;
    world.say(second, Says::stalls("past-2")).await?;
    let waits = |infd: &InferenceDeployment| {
        infd.status.as_ref().is_some_and(|s| s.recovery.grants.len() == 1 && stalled(infd) == 2)
    };
    world.status("restored", "chat", "one grant, and one who waits for it", waits).await?;
    let (store, backup) = (world.cluster.layout().path("etcd"), world.cluster.layout().path("etcd-backup"));
    world.cluster.kill("etcd")?;
    copy(&store, &backup)?;
    world.cluster.start_again("etcd")?;
    comes_back(world).await?;
    // who waits is well again before it is its turn
    world.say(second, Says::Recovered("past-2".into())).await?;
    world.recover(first, "past-1").await?;
    let then = renewed(world)?;
    until_async("the Lease to be renewed", BOUND, || async { Ok((renewed(world)? != then).then_some(())) }).await?;

    ["sched", "kcm", "apiserver", "etcd"].into_iter().try_for_each(|process| world.cluster.kill(process))?;
    // nobody restores a store in the seconds for which a leader keeps its right without a word
    sees_nothing(world).await?;
    let asked = world.asked()?.len();
    fs::remove_dir_all(&store).and_then(|()| fs::rename(&backup, &store)).context("restore the store")?;
    ["etcd", "apiserver"].into_iter().try_for_each(|process| world.cluster.start_again(process).map(drop))?;
    answers(world).await?;
    // they end where they are refused, as by an API server that does not know its rights yet
    ["kcm", "sched"].into_iter().try_for_each(|process| world.cluster.start_again(process).map(drop))?;
    ensure!(world.grant(first).await?.as_deref() == Some("past-1"), "the store is not that of the past");
    // the agents, whose replicas are well, repeat that; each within its minute
    replica::say_all(&world.client, vec![(second, Says::Serves), (first, Says::Recovered("past-1".into()))]).await?;
    comes_back(world).await?;
    let log = fs::read_to_string(world.cluster.layout().log("operator")).context("the operator's log")?;
    ensure!(log.contains("was restored from a backup"), "the operator has not seen that the store went back");
    let over = |infd: &InferenceDeployment| infd.status.as_ref().is_some_and(|s| s.recovery.grants.is_empty());
    world.status("restored", "chat", "the grant of the past to be over", over).await?;
    for pod in [first, second] {
        ensure!(world.now(pod).await?.is_some(), "{} was replaced for a stall of the past", pod.name_any());
        ensure!(world.grant(pod).await?.as_deref() != Some("past-2"), "granted for a stall of the past");
    }
    let deletes: Vec<String> =
        world.tried_since(asked)?.iter().filter(|entry| entry.verb == "delete").map(Entry::object).collect();
    ensure!(!deletes.iter().any(|object| object.contains(" pods")), "the restore cost {deletes:?}");
    world.stall_until_granted(second, "now-1").await?;
    world.recover(second, "now-1").await?;
    world.leave("restored").await
}

/// B3: a leader that was frozen for longer than its Lease lasts wakes up without its right, and does not write again.
pub async fn frozen_leader(world: &World<'_>) -> Result<()> {
    world.tenant("frozen")?;
    let pods = world.deploy("frozen", "chat", json!({})).await?;
    let (pod, sibling) = (pods.first().context("a pod")?, pods.get(1).context("a sibling")?);
    let first = world.asked()?.last().map(|entry| entry.credential().to_owned()).context("an operator that asks")?;
    ensure!(!first.is_empty(), "the audit log does not tell tokens apart");
    let candidate = Candidate {
        binary: &world.programs.operator,
        name: "operator-second",
        port: 9503,
        account: (NAMESPACE, ACCOUNT),
        args: &OPERATOR_ARGS,
    };
    let second = candidate.start(world.cluster, &world.client).await?;
    second.ready().await?;
    world.operator.process.signal(Signal::SIGSTOP);
    let took = world.stall_until_granted(pod, "frozen-1").await?;
    println!("      granted by the other {:.1} s after the leader froze", took.as_secs_f64());
    let asked = world.asked()?.len();
    world.operator.process.signal(Signal::SIGCONT);
    // it looks around again, and what it sees is work to do
    let looks = || async {
        let looks = |entry: &Entry| entry.credential() == first && entry.resource() == "leases";
        anyhow::Ok(world.asked()?.iter().skip(asked).filter(|entry| looks(entry)).count())
    };
    let sees = async |count: usize| {
        let more = || async { Ok((looks().await? >= count).then_some(())) };
        until_async("the frozen one to look at the Lease", BOUND, more).await
    };
    sees(1).await?;
    world.recover(pod, "frozen-1").await?;
    world.stall_until_granted(sibling, "frozen-2").await?;
    world.recover(sibling, "frozen-2").await?;
    sees(3).await?;
    let wrote = world.tried_since(asked)?;
    let wrote: Vec<String> = wrote
        .iter()
        .filter(|entry| entry.credential() == first)
        .map(|entry| format!("{} {}", entry.verb, entry.object()))
        .collect();
    ensure!(wrote.is_empty(), "it woke up and wrote: {wrote:?}");
    world.leave("frozen").await
}

/// Waits until the API server answers and the operator, the same process, leads again.
async fn comes_back(world: &World<'_>) -> Result<()> {
    answers(world).await?;
    until_async("the operator to lead again", BOUND + PAUSE_MAX, || async {
        ensure!(world.operator.process.alive(), "it is another process");
        Ok((world.operator.metric("truebeat_operator_leader", "").await? == 1.0).then_some(()))
    })
    .await?;
    world.operator.ready().await
}

async fn answers(world: &World<'_>) -> Result<()> {
    until_async("the API server", BOUND, || async {
        Ok((world.cluster.kubectl(&["get", "--raw", "/readyz"])? == "ok").then_some(()))
    })
    .await
}

/// When the leader's Lease was renewed last.
fn renewed(world: &World<'_>) -> Result<String> {
    Ok(world.json(&["-n", NAMESPACE, "lease", LEASE])?["spec"]["renewTime"].to_string())
}

fn stalled(infd: &InferenceDeployment) -> i32 {
    infd.status.as_ref().map_or(0, |status| status.stalled_replicas)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot list {}", from.display()))? {
        let entry = entry?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            copy(&from, &to)?;
        } else {
            fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        }
    }
    Ok(())
}
