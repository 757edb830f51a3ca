//! Rows of the catalogue of faults in which a real API server does not let the operator do what it wants, or does it to others: a writer that
//! is always first (A5), a webhook that is down (A13), a right that is gone (A14), CRDs that are gone (A15), a namespace on its way out
//! (A19), a node that is not heard (F4). Each is told, none is a hot loop, and each ends when its cause does.

use anyhow::{Context, Result, ensure};
use crds::InferenceDeployment;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{Duration, sleep};
use truebeat_tests::audit::{self, Entry};
use truebeat_tests::fleet::operator::ACCOUNT;
use truebeat_tests::fleet::replica::{self, Says};
use truebeat_tests::product;
use truebeat_tests::wait::until_async;

use crate::world::{BOUND, World, infd};

/// Tries at one object in one second.
const TRIES_MAX: usize = 5;
/// Between two writes of a writer who is always first.
const STORM_EVERY: Duration = Duration::from_millis(10);
/// How often somebody changes a child back.
const FIGHTS: usize = 300;
const INCIDENTS: &str = "engineincidents.inference.truebeat.io";
const DEPLOYMENTS: &str = "inferencedeployments.inference.truebeat.io";

/// A5: another writer touches each object every 10 ms.
pub async fn conflicts(world: &World<'_>) -> Result<()> {
    world.tenant("storm")?;
    let pods = world.deploy("storm", "chat", json!({})).await?;
    let pod = pods.first().context("a pod")?;
    let asked = world.asked()?.len();
    let storm = storm(&world.client, "storm", &pods);
    world.stall_until_granted(pod, "storm-1").await?;
    world.recover(pod, "storm-1").await?;
    drop(storm);
    let most = calm(&world.tried_since(asked)?)?;
    println!("      at most {most} tries at one object in a second");
    world.leave("storm").await
}

/// Writes to the InferenceDeployment `chat` and to its pods until what is returned is dropped.
fn storm(client: &Client, namespace: &'static str, pods: &[Pod]) -> JoinSet<Result<()>> {
    let mut writers = JoinSet::new();
    let names: Vec<String> = pods.iter().map(ResourceExt::name_any).collect();
    let (pods, infds): (Api<Pod>, Api<InferenceDeployment>) =
        (Api::namespaced(client.clone(), namespace), Api::namespaced(client.clone(), namespace));
    writers.spawn(async move {
        for turn in 0_u64.. {
            let patch = Patch::Merge(json!({"metadata": {"annotations": {"example.com/turn": turn.to_string()}}}));
            for name in &names {
                pods.patch_metadata(name, &PatchParams::default(), &patch).await?;
            }
            infds.patch_metadata("chat", &PatchParams::default(), &patch).await?;
            sleep(STORM_EVERY).await;
        }
        Ok(())
    });
    writers
}

/// A5: somebody changes a child back whenever it was applied. Each of both could go on for ever; one of them is patient.
pub async fn fight(world: &World<'_>) -> Result<()> {
    world.tenant("fought")?;
    let pods = world.deploy("fought", "chat", json!({})).await?;
    let asked = world.asked()?.len();
    let services: Api<Service> = Api::namespaced(world.client.clone(), "fought");
    let theirs = Patch::Merge(json!({"spec": {"selector": {"inference.truebeat.io/deployment": "theirs"}}}));
    for _ in 0..FIGHTS {
        services.patch("chat", &PatchParams::default(), &theirs).await?;
        sleep(2 * STORM_EVERY).await;
    }
    let tried = world.tried_since(asked)?;
    let ours = tried.iter().filter(|entry| entry.resource() == "services").count();
    ensure!((1..=FIGHTS / 20).contains(&ours), "they changed it {FIGHTS} times, we {ours} times");
    println!("      they changed it {FIGHTS} times, we {ours} times");
    // what is at stake beside it does not wait
    let pod = pods.first().context("a pod")?;
    world.stall_until_granted(pod, "fought-1").await?;
    world.recover(pod, "fought-1").await?;
    until_async("ours to stand in the end", BOUND, || async {
        let selector = services.get("chat").await?.spec.and_then(|spec| spec.selector).unwrap_or_default();
        Ok(selector.values().any(|value| value == "chat").then_some(()))
    })
    .await?;
    world.leave("fought").await
}

/// A13: somebody's webhook takes part in every Deployment of a namespace, and nobody answers it.
pub async fn webhook(world: &World<'_>) -> Result<()> {
    world.tenant("hooked")?;
    let hook = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration", "metadata": {"name": "somebodys"},
        "webhooks": [{
            "name": "policy.example.com", "failurePolicy": "Fail", "sideEffects": "None", "admissionReviewVersions": ["v1"], "timeoutSeconds": 1,
            "clientConfig": {"url": "https://127.0.0.1:1/"},
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "hooked"}},
            "rules": [{"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": ["deployments"]}],
        }],
    });
    product::apply(world.cluster, &hook.to_string())?;
    let asked = world.asked()?.len();
    product::apply(world.cluster, &infd("hooked", "chat", json!({})).to_string())?;
    let told = |infd: &InferenceDeployment| says(infd, "Reconciling", "policy.example.com");
    world.status("hooked", "chat", "the webhook's name in a condition", told).await?;
    let tries = || -> Result<usize> {
        let tried = world.tried_since(asked)?;
        Ok(tried.iter().filter(|e| e.namespace() == "hooked" && e.resource() == "deployments").count())
    };
    until_async("the operator to try again and again", BOUND, || async { Ok((tries()? >= 4).then_some(())) }).await?;
    let most = calm(&world.tried_since(asked)?)?;
    world.cluster.kubectl(&["delete", "validatingwebhookconfiguration", "somebodys"])?;
    let pods = world.scheduled("hooked", "chat", 2).await?;
    replica::say_all(&world.client, pods.iter().map(|pod| (pod, Says::Serves)).collect()).await?;
    let ready = |infd: &InferenceDeployment| infd.status.as_ref().is_some_and(|status| status.ready_replicas == 2);
    world.status("hooked", "chat", "both replicas to be ready", ready).await?;
    println!("      {} tries, at most {most} at one object in a second", tries()?);
    world.leave("hooked").await
}

/// A14: the right to patch pods is gone. What needs it is told in the API server's words, everything else goes on, and it comes back with the right.
pub async fn revoked(world: &World<'_>) -> Result<()> {
    world.tenant("revoked")?;
    let pods = world.deploy("revoked", "chat", json!({})).await?;
    let pod = pods.first().context("a pod")?;
    let role = world.json(&["clusterrole", ACCOUNT])?;
    let asked = world.asked()?.len();
    rules(world, &without_pods_patch(&role["rules"])?)?;
    world.say(pod, Says::stalls("revoked-1")).await?;
    let told = |infd: &InferenceDeployment| {
        ["Stalled", "Reconciling"].iter().any(|type_| says(infd, type_, "cannot patch resource \"pods\""))
    };
    let result = async {
        world.status("revoked", "chat", "the missing rule in a condition", told).await?;
        // the rest goes on: a third replica is made
        let three = infd("revoked", "chat", json!({"replicas": 3}));
        product::apply(world.cluster, &three.to_string())?;
        world.scheduled("revoked", "chat", 3).await?;
        calm(&world.tried_since(asked)?)
    };
    let result = result.await;
    rules(world, &role["rules"])?;
    let most = result?;
    ensure!(world.operator.process.alive(), "it is another process");
    until_async("the grant, once it may be written", BOUND, || async {
        let pod = world.now(pod).await?.context("the pod is gone")?;
        Ok(pod.annotations().values().any(|value| value == "revoked-1").then_some(()))
    })
    .await?;
    println!("      at most {most} tries at one object in a second");
    world.recover(pod, "revoked-1").await?;
    world.leave("revoked").await
}

/// Takes the verb out of whichever rule grants it.
fn without_pods_patch(rules: &Value) -> Result<Value> {
    let mut rules = rules.clone();
    let all = rules.as_array_mut().context("rules")?;
    let of_pods =
        all.iter_mut().filter(|rule| rule["resources"].as_array().is_some_and(|r| r.contains(&json!("pods"))));
    let mut taken = 0;
    for verbs in of_pods.filter_map(|rule| rule["verbs"].as_array_mut()) {
        let before = verbs.len();
        verbs.retain(|verb| verb != "patch");
        taken += before - verbs.len();
    }
    ensure!(taken > 0, "no rule grants it: {rules}");
    Ok(rules)
}

fn rules(world: &World<'_>, rules: &Value) -> Result<()> {
    let patch = json!({"rules": rules}).to_string();
    world.cluster.kubectl(&["patch", "clusterrole", ACCOUNT, "--type=merge", "-p", &patch]).map(drop)
}

/// A15: the kind of the records is gone, then that of the deployments, which takes these along: Kubernetes itself ends what they owned, sooner or
/// later. The operator deletes nothing, is the same process in the end, and goes on when they are there again.
pub async fn crds_gone(world: &World<'_>) -> Result<()> {
    world.tenant("kinds")?;
    let pods = world.deploy("kinds", "chat", json!({})).await?;
    let pod = pods.first().context("a pod")?;
    world.stall_until_granted(pod, "kinds-1").await?;
    world.recover(pod, "kinds-1").await?;
    let asked = world.asked()?.len();
    world.cluster.kubectl(&["delete", "crd", INCIDENTS, "--timeout=60s"])?;
    world.say(pod, Says::stalls("kinds-2")).await?;
    misses(world, asked, "engineincidents").await?;
    nothing_deleted(world, asked)?;
    for pod in &pods {
        ensure!(world.now(pod).await?.is_some(), "{} is gone with the kind of the records", pod.name_any());
    }
    world.programs.install(world.cluster)?;
    stays_scaled_down(world)?;
    world.operator.ready().await?;
    let recorded = || world.json(&["-n", "kinds", INCIDENTS]);
    until_async("the stall to be on record", BOUND, || async {
        Ok(recorded()?["items"].as_array().is_some_and(|items| !items.is_empty()).then_some(()))
    })
    .await?;
    world.recover(pod, "kinds-2").await?;

    let asked = world.asked()?.len();
    world.cluster.kubectl(&["delete", "crd", DEPLOYMENTS, "--timeout=60s"])?;
    misses(world, asked, "inferencedeployments").await?;
    nothing_deleted(world, asked)?;
    calm(&world.tried_since(asked)?)?;
    world.programs.install(world.cluster)?;
    stays_scaled_down(world)?;
    // whoever collects what has no owner must know the owner's kind: where it was too slow for that, it goes on now
    world.without_pods("kinds").await?;
    nothing_deleted(world, asked)?;
    world.deploy("kinds", "chat", json!({})).await?;
    ensure!(world.operator.process.alive(), "it is another process");
    world.leave("kinds").await
}

async fn misses(world: &World<'_>, asked: usize, kind: &str) -> Result<()> {
    until_async(&format!("the operator to miss {kind}"), BOUND, || async {
        let seen = |entry: &Entry| entry.resource() == kind && entry.code() == 404;
        Ok(world.asked()?.iter().skip(asked).any(seen).then_some(()))
    })
    .await
}

/// An installation brings the operator's own Deployment along, whose pods could never start here.
fn stays_scaled_down(world: &World<'_>) -> Result<()> {
    let scale =
        ["-n", truebeat_tests::fleet::operator::NAMESPACE, "scale", "deployment/truebeat-operator", "--replicas=0"];
    world.cluster.kubectl(&scale).map(drop)
}

fn nothing_deleted(world: &World<'_>, asked: usize) -> Result<()> {
    let deletes = world.tried_since(asked)?.into_iter().filter(|entry| entry.verb.starts_with("delete"));
    let deletes: Vec<String> = deletes.map(|entry| entry.object()).collect();
    ensure!(deletes.is_empty(), "the operator deleted {deletes:?}");
    Ok(())
}

/// A19: the namespace is on its way out, and somebody else's finalizer keeps it: our objects go, and nothing is made in it.
pub async fn terminating(world: &World<'_>) -> Result<()> {
    world.tenant("leaving")?;
    let pods = world.deploy("leaving", "chat", json!({})).await?;
    let held = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "held", "namespace": "leaving", "finalizers": ["example.com/never"]},
    });
    product::apply(world.cluster, &held.to_string())?;
    let asked = world.asked()?.len();
    world.cluster.kubectl(&["delete", "namespace", "leaving", "--wait=false"])?;
    world.without_pods("leaving").await?;
    until_async("everything of ours to be gone", BOUND, || async {
        let left = world.json(&["-n", "leaving", "infd,inc,deployments,pods,services"])?;
        Ok(left["items"].as_array().is_some_and(Vec::is_empty).then_some(()))
    })
    .await?;
    ensure!(world.now(&pods[0]).await?.is_none());
    let tried = world.tried_since(asked)?;
    let most = calm(&tried)?;
    let refused = tried.iter().filter(|entry| entry.code() == 403).count();
    println!("      {refused} tries were refused; at most {most} at one object in a second");
    ensure!(refused <= 2 * TRIES_MAX, "it goes on making what may not be made: {refused} times");
    world.cluster.kubectl(&[
        "-n",
        "leaving",
        "patch",
        "configmap",
        "held",
        "--type=merge",
        "-p",
        r#"{"metadata":{"finalizers":null}}"#,
    ])?;
    world.cluster.kubectl(&["wait", "--for=delete", "namespace/leaving", "--timeout=60s"]).map(drop)
}

/// F4: a node is not heard any more, and nobody can say whether its pod serves: it is not counted, nor deleted, nor restarted.
pub async fn silent_node(world: &World<'_>) -> Result<()> {
    world.tenant("silent")?;
    let pods = world.deploy("silent", "chat", json!({})).await?;
    let pod = pods.first().context("a pod")?;
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).context("a node")?;
    let asked = world.asked()?.len();
    node_is(world, &node, "Unknown")?;
    let result = async {
        // as the controller manager does to all pods of a node that it gives up, after its grace
        let unheard =
            json!({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "NodeNotReady"}]}});
        let name = pod.name_any();
        let patch = ["-n", "silent", "patch", "pod", &name, "--subresource=status", "-p", &unheard.to_string()];
        world.cluster.kubectl(&patch)?;
        let counted = |infd: &InferenceDeployment| {
            let vouched = says_reason(infd, "EnginesProgressing", "NotVouchedFor");
            vouched && infd.status.as_ref().is_some_and(|status| status.progressing_replicas == 1)
        };
        world.status("silent", "chat", "one replica that nobody vouches for", counted).await?;
        nothing_deleted(world, asked)?;
        let pod = world.now(pod).await?.context("it was deleted")?;
        ensure!(!pod.annotations().keys().any(|key| key.contains("restart-grant")), "it was restarted unheard");
        Ok(())
    };
    let result = result.await;
    node_is(world, &node, "True")?;
    result?;
    world.say(pod, Says::Serves).await?;
    let ready =
        |infd: &InferenceDeployment| infd.status.as_ref().is_some_and(|status| status.progressing_replicas == 2);
    world.status("silent", "chat", "both to be counted again", ready).await?;
    world.leave("silent").await
}

fn node_is(world: &World<'_>, node: &str, ready: &str) -> Result<()> {
    let condition = json!({"type": "Ready", "status": ready, "reason": "Simulated", "message": "as the test wants it"});
    let patch = json!({"status": {"conditions": [condition]}}).to_string();
    world.cluster.kubectl(&["patch", "node", node, "--subresource=status", "-p", &patch]).map(drop)
}

/// The most tries at one object in one second; an error where that is a hot loop.
fn calm(tried: &[Entry]) -> Result<usize> {
    let (most, which) = audit::most_in_a_second(tried, |entry| Some(entry.object()));
    ensure!(most <= TRIES_MAX, "a hot loop: {most} tries at {which}");
    Ok(most)
}

fn says(infd: &InferenceDeployment, type_: &str, words: &str) -> bool {
    let mut conditions = infd.status.iter().flat_map(|status| &status.conditions);
    conditions.any(|c| c.type_ == type_ && c.status == "True" && c.message.contains(words))
}

fn says_reason(infd: &InferenceDeployment, type_: &str, reason: &str) -> bool {
    infd.status.iter().flat_map(|status| &status.conditions).any(|c| c.type_ == type_ && c.reason == reason)
}
