//! From nothing to serving, growing and shrinking with a frozen one, and back to nothing.

use std::time::Instant;

use anyhow::{Result, ensure};
use crds::InferenceDeployment;
use kube::ResourceExt;
use truebeat_tests::product::{self, AGENT_IMAGE, ENGINE_IMAGE, MODEL};
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;

use crate::world::{BOUND, NAMESPACE, World, answered, is, members, restarts, told, uid};

const NAMESPACE_YAML: &str = r#"
apiVersion: v1
kind: Namespace
metadata:
  name: serving
  labels:
    pod-security.kubernetes.io/enforce: restricted
    pod-security.kubernetes.io/warn: restricted
"#;

/// An engine that says 200 whatever happens and freezes on SIGUSR2. Both replicas may be fenced, and a pod lives through many restarts: the
/// stories freeze the same two over and over.
pub fn manifest(name: &str, replicas: i32, mode: &str) -> String {
    let recovery = format!("{{mode: {mode}, maxUnavailable: 1, lastReplica: Fence, restartsBeforeReplace: 10}}");
    manifest_with(name, replicas, &recovery)
}

/// The same with a recovery policy of its own, as YAML.
pub fn manifest_with(name: &str, replicas: i32, recovery: &str) -> String {
    let rest = format!("recovery: {recovery}\n  rollout: {{soakSeconds: 1}}\n  drainSeconds: 2");
    manifest_of(name, replicas, "--fault, step-stall@sigusr2, --drain-timeout, 2s", &rest)
}

/// Our engine, which lies, with these further arguments; `rest` are the spec's other fields, as YAML.
pub fn manifest_of(name: &str, replicas: i32, args: &str, rest: &str) -> String {
    format!(
        r#"
apiVersion: inference.truebeat.io/v1alpha1
kind: InferenceDeployment
metadata: {{name: {name}, namespace: {NAMESPACE}}}
spec:
  replicas: {replicas}
  model: {{source: {{file: {{path: {MODEL}}}}}}}
  engine:
    kind: Truebeat
    image: {ENGINE_IMAGE}
    imagePullPolicy: Never
    args: [--lie, {args}]
    resources: {{requests: {{cpu: 50m, memory: 64Mi}}}}
  agent: {{image: {AGENT_IMAGE}, imagePullPolicy: Never}}
  {rest}
"#
    )
}

pub async fn install(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    times.act("images of agent, engine (with a model) and operator, from the built programs");
    world.programs.import(world.cluster)?;
    times.now("imported into the node");
    times.act("kubectl apply: CRDs and operator");
    world.programs.install(world.cluster)?;
    times.now("applied, without a warning");
    let available = ["-n", "truebeat-system", "wait", "deploy/truebeat-operator", "--for=condition=Available"];
    world.cluster.kubectl(&[&available[..], &["--timeout=90s"]].concat())?;
    times.now("operator available (2 replicas, PSS restricted)");
    product::apply(world.cluster, NAMESPACE_YAML)?;
    world.watch_own_kinds();
    Ok(())
}

pub async fn apply(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let endpoints = world.endpoints("chat");
    let yaml = manifest("chat", 2, "Recover");
    let applied = times.act("kubectl apply: InferenceDeployment chat, 2 replicas");
    let words = product::apply(world.cluster, &yaml)?;
    ensure!(words.contains("created"), "{words}");
    let looked = |infd: &InferenceDeployment| infd.status.as_ref()?.conditions.first().map(drop);
    let (at, ()) = world.infds.first("a status", applied, BOUND, looked).await?;
    times.seen("the operator has written a status", at);
    endpoints.count(2, BOUND).await?;
    for flip in endpoints.flips().iter().filter(|flip| flip.ready == Some(true)) {
        times.seen(&format!("{} gets traffic", flip.pod), flip.at);
    }
    times.seen("status and conditions say so", world.quiet("chat").await?);
    let chat = world.infds.now().remove("chat");
    let chat: &InferenceDeployment = chat.as_deref().ok_or_else(|| anyhow::anyhow!("chat is gone"))?;
    let status = chat.status.clone().unwrap_or_default();
    let counts = (status.replicas, status.ready_replicas, status.progressing_replicas, status.fenced_replicas);
    ensure!(counts == (2, 2, 2, 0), "replicas, ready, progressing, fenced are {counts:?}");
    ensure!(Some(status.observed_generation) == chat.metadata.generation, "the status speaks of another generation");
    for wrong in ["Reconciling", "Stalled"] {
        ensure!(!is(chat, wrong, "True"), "condition {wrong} is True: {:?}", status.conditions);
    }
    for pod in members(&world.pods, "chat") {
        let pod = world.pod(&pod)?;
        let counts = (restarts(&pod, "engine"), restarts(&pod, "agent"));
        ensure!(counts == (0, 0), "{} was restarted: {counts:?}", pod.name_any());
    }
    let again = product::apply(world.cluster, &yaml)?;
    ensure!(again.contains("unchanged"), "the second apply says: {again}");
    times.note("kubectl apply again: unchanged");
    draws_no_warning(world)?;
    times.note("the Deployment draws no warning (Pod Security: restricted)");
    let load = world.load("chat").await?;
    let since = Instant::now();
    answered(&load).await?;
    times.note(&told(&load.felt(since)));
    Ok(())
}

/// The namespace warns where pods would not be restricted, and here a warning is an error.
fn draws_no_warning(world: &World<'_>) -> Result<()> {
    let live: serde_json::Value = serde_json::from_str(&world.kubectl(&["get", "deploy", "chat", "-o", "json"])?)?;
    let twin = serde_json::json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "twin", "namespace": NAMESPACE}, "spec": live["spec"],
    });
    let file = world.cluster.layout().path("twin.json");
    std::fs::write(&file, twin.to_string())?;
    let create = ["--warnings-as-errors", "create", "--dry-run=server", "-f", &file.display().to_string()];
    world.cluster.kubectl(&create).map(drop)
}

/// 1, 3, 2, 1: the step over 2 shows who goes first, for a ReplicaSet that loses two deletes them at once. The oldest is frozen: of
/// healthy ones it is the one that a ReplicaSet would keep.
pub async fn scale(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let endpoints = world.endpoints("grow");
    times.act("kubectl apply: InferenceDeployment grow, 1 replica, mode Fence");
    product::apply(world.cluster, &manifest("grow", 1, "Fence"))?;
    let oldest = endpoints.count(1, BOUND).await?.remove(0);
    times.now("it gets traffic");
    times.act("kubectl scale infd grow --replicas=3");
    world.kubectl(&["scale", "infd", "grow", "--replicas=3"])?;
    endpoints.count(3, BOUND).await?;
    times.now("three get traffic");
    let load = world.load("grow").await?;
    let frozen = times.act(&format!("SIGUSR2 to the engine of the oldest, {oldest}"));
    world.freeze(&oldest)?;
    times.seen("its endpoint is away", endpoints.flip(&oldest, false, frozen, BOUND).await?);
    let (at, _) = world.incident("an incident", &oldest, frozen, |_| Some(())).await?;
    times.seen("an incident tells of it", at);
    let (at, cost) = world
        .pods
        .first("a deletion cost", frozen, BOUND, |pod| {
            let cost = pod.annotations().get("controller.kubernetes.io/pod-deletion-cost")?;
            (pod.name_any() == oldest).then(|| cost.clone())
        })
        .await?;
    times.seen(&format!("pod-deletion-cost {cost} stands on it"), at);
    for (replicas, count) in [("2", 2), ("1", 1)] {
        times.act(&format!("kubectl scale infd grow --replicas={replicas}"));
        let before = members(&world.pods, "grow");
        world.kubectl(&["scale", "infd", "grow", &format!("--replicas={replicas}")])?;
        let left = until_async("the pods to be fewer", BOUND, || async {
            let members = members(&world.pods, "grow");
            Ok((members.len() == count).then_some(members))
        })
        .await?;
        let gone: Vec<_> = before.iter().filter(|pod| !left.contains(pod)).collect();
        times.now(&format!("{} goes{}", gone[0], if *gone[0] == oldest { ": the frozen one" } else { "" }));
        ensure!(!left.contains(&oldest), "the frozen one stayed, {gone:?} went");
        until_async("traffic for those that are left", BOUND, || async {
            Ok((endpoints.ready() == left).then_some(()))
        })
        .await?;
    }
    answered(&load).await?;
    times.note(&told(&load.felt(frozen)));
    Ok(())
}

pub async fn delete(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let uids: Vec<String> = world.pods.now().values().map(|pod| uid(pod)).collect();
    times.act("kubectl delete infd --all");
    world.kubectl(&["delete", "infd", "--all", "--wait=true", "--timeout=60s"])?;
    times.now("the objects are gone");
    let kinds = "deploy,rs,svc,endpointslices,role,rolebinding,pods,inc,infd";
    let empty = until_async("everything owned to be gone", BOUND, || async {
        let left = world.kubectl(&["get", kinds, "-o", "name"])?;
        let accounts = world.kubectl(&["get", "sa", "-o", "name"])?;
        let accounts: Vec<_> = accounts.lines().filter(|line| *line != "serviceaccount/default").collect();
        ensure!(left.trim().is_empty() && accounts.is_empty(), "left: {} {accounts:?}", left.trim().replace('\n', " "));
        Ok(Some(()))
    })
    .await;
    empty?;
    times.now(&format!("nothing owned is left ({kinds}, sa)"));
    for uid in uids {
        let left = truebeat_tests::host::processes(&uid);
        ensure!(left.is_empty(), "processes of a deleted pod are left: {left:?}");
    }
    times.note("no process of the pods is left on the machine");
    Ok(())
}
