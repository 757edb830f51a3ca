//! S15, S16: what somebody can do who owns one pod, or one tenant's namespace.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use crds::InferenceDeployment;
use crds::episode::{ANNOTATION_RESTART_GRANT, CONDITION_EPISODE};
use crds::restart::ANNOTATION_RESTART;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use truebeat_tests::fleet::identity;
use truebeat_tests::fleet::replica::Says;
use truebeat_tests::wait::until_async;

use crate::agents::refused;
use crate::world::{BOUND, World, infd};

/// A value for each field of a pod's status that its owner would like to set. A field that a newer API has and this table has not fails
/// the test: somebody must think about it.
fn status_fields() -> Value {
    let container = json!([{"name": "engine", "image": "other", "imageID": "", "restartCount": 99, "ready": true}]);
    json!({
        "phase": "Failed", "reason": "Evil", "message": "evil", "startTime": "2020-01-01T00:00:00Z", "qosClass": "Guaranteed",
        "hostIP": "192.0.2.1", "hostIPs": [{"ip": "192.0.2.1"}], "podIP": "192.0.2.2", "podIPs": [{"ip": "192.0.2.2"}],
        "nominatedNodeName": "sim-0001", "observedGeneration": 99, "resize": "Infeasible",
        "containerStatuses": container, "initContainerStatuses": container, "ephemeralContainerStatuses": container,
        "resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "somebody-elses"}],
        "extendedResourceClaimStatus": {"resourceClaimName": "somebody-elses", "requestMappings": []},
        "allocatedResources": {"cpu": "64"}, "resources": {"requests": {"cpu": "64"}},
        "nodeAllocatableResourceClaimStatuses": [{"resourceClaimName": "somebody-elses", "containers": ["engine"], "resources": {"cpu": "64"}}],
    })
}

/// What an agent may not say of its pod, field by field; then the worst that it may say, and what the operator makes of it.
pub async fn one_pod(world: &World<'_>) -> Result<()> {
    world.tenant("owned")?;
    world.tenant("victim")?;
    let owned = world.deploy("owned", "chat", json!({})).await?;
    let victims = world.deploy("victim", "chat", json!({})).await?;
    let (owned, sibling) = (owned.first().context("a pod")?, owned.get(1).context("a sibling")?);
    let token = identity::token_of(&world.client, owned).await?;
    let thief = identity::client(world.cluster.layout(), &token).await?;
    by_the_api(world, &thief, owned).await?;
    by_its_words(world, &thief, owned, sibling).await?;
    by_stalling(world, owned).await?;

    for pod in victims.iter().chain([sibling]) {
        let now = world.now(pod).await?.with_context(|| format!("{} is gone", pod.name_any()))?;
        ensure!(!now.annotations().contains_key(ANNOTATION_RESTART_GRANT), "{} got a grant", pod.name_any());
    }
    // nobody else's recovery is kept waiting either
    let patient = victims.first().context("a pod")?;
    let took = world.stall_until_granted(patient, "victim-1").await?;
    println!("      another tenant's stall was granted after {} ms", took.as_millis());
    world.leave("owned").await?;
    world.leave("victim").await
}

async fn by_the_api(world: &World<'_>, thief: &Client, owned: &Pod) -> Result<()> {
    let fields = status_fields();
    let schema: Value = serde_json::from_str(&world.cluster.kubectl(&["get", "--raw", "/openapi/v3/api/v1"])?)?;
    let known = &schema["components"]["schemas"]["io.k8s.api.core.v1.PodStatus"]["properties"];
    for field in known.as_object().context("the schema of a pod's status")?.keys() {
        ensure!(field == "conditions" || fields.get(field).is_some(), "nobody has thought about status.{field}");
    }
    let api: Api<Pod> = Api::namespaced(thief.clone(), "owned");
    let mut words: Vec<(String, Value)> = Vec::new();
    for (field, value) in fields.as_object().context("fields")?.iter().filter(|(field, _)| known.get(field).is_some()) {
        words.push((format!("status.{field}"), json!({"status": {field: value}})));
    }
    for type_ in ["Ready", "ContainersReady", "PodScheduled", "DisruptionTarget", "truebeat.example/progressing"] {
        let condition =
            json!({"type": type_, "status": "False", "reason": "Evil", "message": "", "lastTransitionTime": null});
        words.push((format!("condition {type_}"), json!({"status": {"conditions": [condition]}})));
    }
    let uid = json!([{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "x", "controller": false}]);
    for (field, value) in [
        ("labels", json!({"app": "x"})),
        ("annotations", json!({ANNOTATION_RESTART_GRANT: "mine"})),
        // a person's wish, for the stall that it will claim: it would pass the hold and the pause
        ("annotations", json!({ANNOTATION_RESTART: r#"{"by": "ann", "episode": "owned-1"}"#})),
        ("finalizers", json!(["evil.example/stay"])),
        ("ownerReferences", uid),
    ] {
        words.push((format!("metadata.{field}"), json!({"metadata": {field: value}})));
    }
    words.push(("spec.nodeName".to_owned(), json!({"spec": {"nodeName": "sim-0001", "activeDeadlineSeconds": 1}})));
    let before = core(world, owned).await?;
    for (what, body) in words {
        let answer =
            refused(api.patch_status(&owned.name_any(), &PatchParams::default(), &Patch::Strategic(&body)).await)?;
        let after = core(world, owned).await?;
        ensure!(before == after, "{what} ({answer:?}): changed the pod from {before} to {after}");
    }
    // a merge patch would replace the whole list of conditions
    let wipe = Patch::Merge(json!({"status": {"conditions": []}}));
    ensure!(
        refused(api.patch_status(&owned.name_any(), &PatchParams::default(), &wipe).await)? == Some(403),
        "conditions were wiped"
    );
    ensure!(refused(api.delete(&owned.name_any(), &Default::default()).await)? == Some(403), "a pod deleted itself");
    ensure!(refused(api.list(&Default::default()).await)? == Some(403), "a pod listed pods");
    Ok(())
}

/// What of a pod is none of its agent's business.
async fn core(world: &World<'_>, pod: &Pod) -> Result<Value> {
    let mut now = serde_json::to_value(world.now(pod).await?.context("the pod is gone")?)?;
    let conditions = now["status"]["conditions"].as_array_mut().context("conditions")?;
    conditions.retain(|condition| !condition["type"].as_str().is_some_and(|type_| type_.starts_with("truebeat.io/")));
    for noise in ["managedFields", "resourceVersion", "generation"] {
        now["metadata"].as_object_mut().context("metadata")?.remove(noise);
    }
    if let Some(annotations) = now["metadata"]["annotations"].as_object_mut() {
        annotations.remove("controller.kubernetes.io/pod-deletion-cost"); // the operator's, at any time
    }
    Ok(now)
}

/// Nonsense, excess and lies in its own condition: a pass over its own deployment says so, and that is all.
async fn by_its_words(world: &World<'_>, thief: &Client, owned: &Pod, sibling: &Pod) -> Result<()> {
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let borrowed = json!({"id": format!("{}-1-1", sibling.uid().unwrap_or_default()), "class": "StepStalled", "stage": "Killed", "grantedBy": "operator"});
    let future = json!({"id": "owned-0", "class": "StepStalled", "stage": "Suspect", "suspectAt": "9999-12-31T23:59:59Z", "reasons": vec!["x".repeat(900); 30]});
    let words = [
        "",
        "{",
        "null",
        &deep,
        &"é".repeat(16_000),
        &borrowed.to_string(),
        &future.to_string(),
        r#"{"id": "../../victim/chat", "class": "Dead", "stage": "Stalled"}"#,
    ];
    let api: Api<Pod> = Api::namespaced(thief.clone(), "owned");
    for word in words {
        let passes = world.operator.metric("truebeat_operator_reconciles_total", "").await?;
        let condition = json!({"type": CONDITION_EPISODE, "status": "True", "reason": "Evil", "message": word, "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let body = Patch::Strategic(json!({"status": {"conditions": [condition]}}));
        api.patch_status(&owned.name_any(), &PatchParams::default(), &body).await.context("its own condition")?;
        until_async("a pass over it", BOUND, || async {
            let now = world.operator.metric("truebeat_operator_reconciles_total", "").await?;
            Ok((now > passes).then_some(()))
        })
        .await?;
    }
    let panics = world.operator.metric("truebeat_operator_reconciles_total", "panic").await?;
    ensure!(panics == 0.0, "{panics} passes panicked");
    world.say(owned, Says::Serves).await
}

/// It stalls for ever anew: restarted, restarted, replaced; its deployment's budget never has two.
async fn by_stalling(world: &World<'_>, owned: &Pod) -> Result<()> {
    let within = |infd: &InferenceDeployment| infd.status.as_ref().is_some_and(|s| s.recovery.grants.len() <= 1);
    for round in ["owned-1", "owned-2"] {
        world.stall_until_granted(owned, round).await?;
        world.status("owned", "chat", "at most one grant", within).await?;
        world.recover(owned, round).await?;
    }
    world.say(owned, Says::stalls("owned-3")).await?;
    world.replaced(owned).await?;
    world.status("owned", "chat", "at most one grant", within).await.map(drop)
}

/// One tenant writes as fast as the API server takes it; another's stalls are granted all the same.
pub async fn flood(world: &World<'_>) -> Result<()> {
    const DEPLOYMENTS: usize = 24;
    const STALLS: usize = 3;
    world.tenant("calm")?;
    world.tenant("flood")?;
    let pods = world
        .deploy("calm", "chat", json!({"recovery": {"stabilityWindow": "1s", "restartsBeforeReplace": 10}}))
        .await?;
    let pod = pods.first().context("a pod")?;
    let quiet = stalls(world, pod, "quiet", STALLS).await?;
    let all: Vec<Value> = (0..DEPLOYMENTS).map(|n| infd("flood", &format!("d{n}"), json!({"replicas": 0}))).collect();
    truebeat_tests::product::apply(
        world.cluster,
        &json!({"apiVersion": "v1", "kind": "List", "items": all}).to_string(),
    )?;
    let writers: Vec<_> = (0..4).map(|n| tokio::spawn(write_for_ever(world.client.clone(), n, DEPLOYMENTS))).collect();
    let passes = world.operator.metric("truebeat_operator_reconciles_total", "").await?;
    let flooded = stalls(world, pod, "flooded", STALLS).await;
    let passes = world.operator.metric("truebeat_operator_reconciles_total", "").await? - passes;
    writers.iter().for_each(tokio::task::JoinHandle::abort);
    let shown = |times: &[Duration]| times.iter().map(|t| t.as_millis().to_string()).collect::<Vec<_>>().join(" ");
    println!(
        "      stall to grant, ms: quiet {}; beside {passes} passes of a flood {}",
        shown(&quiet),
        shown(&flooded?)
    );
    ensure!(passes > 0.0, "the flood reached nobody");
    world.leave("flood").await?;
    world.leave("calm").await
}

async fn stalls(world: &World<'_>, pod: &Pod, word: &str, count: usize) -> Result<Vec<Duration>> {
    let mut times = Vec::new();
    for n in 0..count {
        let id = format!("{word}-{n}");
        times.push(world.stall_until_granted(pod, &id).await?);
        world.recover(pod, &id).await?;
    }
    Ok(times)
}

/// Spec changes without an end, over all deployments in turn.
async fn write_for_ever(client: Client, writer: usize, deployments: usize) {
    let api: Api<InferenceDeployment> = Api::namespaced(client, "flood");
    let started = Instant::now();
    for n in (writer..).step_by(4) {
        let spec = json!({"spec": {"drainSeconds": 1 + started.elapsed().as_millis() % 3000}});
        // what the API server refuses or cannot take just now is written again anyway
        let _ = api.patch(&format!("d{}", n % deployments), &PatchParams::default(), &Patch::Merge(spec)).await;
    }
}
