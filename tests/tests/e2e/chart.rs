//! The chart on the cluster: installed where the plain manifests were, tested by `helm test`, upgraded, rolled back, removed (what people
//! made stays), installed again over what stayed.

use anyhow::{Result, ensure};
use truebeat_tests::product::{self, AGENT_IMAGE, ENGINE_IMAGE, MODEL, OPERATOR_IMAGE};
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;

use crate::kill::available;
use crate::world::{BOUND, World};

pub const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/truebeat");
pub const SYSTEM: &str = "truebeat-system";
pub const NAMESPACES: &str = r#"
apiVersion: v1
kind: Namespace
metadata: {name: truebeat-system, labels: {pod-security.kubernetes.io/enforce: restricted, pod-security.kubernetes.io/warn: restricted}}
---
apiVersion: v1
kind: Namespace
metadata: {name: charted}
"#;

pub async fn life(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    times.act("the plain installation is taken away");
    world.programs.uninstall(world.cluster)?;
    times.now("gone");
    product::apply(world.cluster, NAMESPACES)?;
    install(world, times, "install").await?;
    let said = helm(world, &["test", "truebeat", "--timeout", "60s"], &[])?;
    ensure!(said.contains("Succeeded"), "{said}");
    times.now("helm test: an operator in step with the API server answers behind its Service");
    acts(world, "charted").await?;
    times.now("it acts: an InferenceDeployment got a status");

    times.act("helm upgrade: one candidate, more logs");
    helm(world, &["upgrade", "truebeat", CHART, "--wait", "--timeout", "90s"], &["replicas=1", "logFilter=debug"])?;
    let one = world.cluster.kubectl(&["-n", SYSTEM, "get", "deploy,pdb", "-o", "name"])?;
    available(world)?;
    candidates(world, "1 1").await?;
    ensure!(!one.contains("poddisruptionbudget"), "after the upgrade: {one}");
    times.now("one candidate, no budget for disruptions");
    times.act("helm rollback");
    helm(world, &["rollback", "truebeat", "1", "--wait", "--timeout", "90s"], &[])?;
    available(world)?;
    candidates(world, "2 2").await?;
    times.now("two candidates again");

    times.act("helm uninstall");
    helm(world, &["uninstall", "truebeat", "--wait", "--timeout", "90s"], &[])?;
    let left = world.cluster.kubectl(&[
        "get",
        "deploy,sa,svc,pdb,role,rolebinding,clusterrole,clusterrolebinding,validatingadmissionpolicy,validatingadmissionpolicybinding",
        "-A",
        "-l",
        "app.kubernetes.io/component=operator",
        "-o",
        "name",
    ])?;
    // the policy stays as long as there may be agents: with the CRDs
    let policy = "admissionregistration.k8s.io/truebeat-agent-own-pod-only";
    let only = |line: &str| line.starts_with("validatingadmissionpolic") && line.ends_with(policy);
    let (stays, others): (Vec<&str>, Vec<&str>) = left.split_whitespace().partition(|line| only(line));
    ensure!(others.is_empty() && stays.len() == 2, "left behind: {left}");
    let kept = world.cluster.kubectl(&["-n", "charted", "get", "infd", "-o", "name"])?;
    ensure!(kept.contains("/kept"), "the InferenceDeployment went with the chart: {kept}");
    times.now("all of it gone; CRDs, the InferenceDeployment and the policy of its agents kept");
    install(world, times, "install again, over the CRDs that were kept").await?;
    world.cluster.kubectl(&["-n", "charted", "delete", "infd", "kept", "--wait=true", "--timeout=60s"])?;
    helm(world, &["uninstall", "truebeat", "--wait", "--timeout", "90s"], &[]).map(drop)
}

pub async fn install(world: &World<'_>, times: &mut Times, how: &str) -> Result<()> {
    times.act(&format!("helm {how}"));
    helm(world, &["install", "truebeat", CHART, "--wait", "--timeout", "90s"], &[])?;
    available(world)?;
    candidates(world, "2 2").await?;
    times.now("two candidates available (PSS restricted)");
    Ok(())
}

/// `helm` with the image of these tests; `sets` on top.
pub fn helm(world: &World<'_>, args: &[&str], sets: &[&str]) -> Result<String> {
    let mut all = vec!["--namespace", SYSTEM];
    all.extend(args);
    let (repository, tag) = OPERATOR_IMAGE.split_once(':').unwrap_or((OPERATOR_IMAGE, "latest"));
    let image =
        [format!("image.repository={repository}"), format!("image.tag={tag}"), "image.pullPolicy=Never".to_owned()];
    if matches!(args.first(), Some(&("install" | "upgrade"))) {
        for set in image.iter().map(String::as_str).chain(sets.iter().copied()) {
            all.extend(["--set", set]);
        }
    }
    world.cluster.helm(&all)
}

/// Waits until so many replicas of the operator are wanted and available.
pub async fn candidates(world: &World<'_>, counts: &str) -> Result<()> {
    let path = "jsonpath={.spec.replicas} {.status.availableReplicas}";
    until_async("the operator's replicas, wanted and available", BOUND, || async {
        let now = world.cluster.kubectl(&["-n", SYSTEM, "get", "deploy", "truebeat-operator", "-o", path])?;
        ensure!(now == counts, "{now:?}, not {counts:?}");
        Ok(Some(()))
    })
    .await
}

/// A custom resource without replicas gets a status from whoever leads.
pub async fn acts(world: &World<'_>, namespace: &str) -> Result<()> {
    product::apply(
        world.cluster,
        &format!(
            r#"
apiVersion: inference.truebeat.io/v1alpha1
kind: InferenceDeployment
metadata: {{name: kept, namespace: {namespace}}}
spec:
  replicas: 0
  model: {{source: {{file: {{path: {MODEL}}}}}}}
  engine: {{kind: Truebeat, image: {ENGINE_IMAGE}}}
  agent: {{image: {AGENT_IMAGE}}}
"#
        ),
    )?;
    let path = "jsonpath={.status.conditions[?(@.type==\"Ready\")].reason}";
    until_async("a status of the InferenceDeployment `kept`", BOUND, || async {
        let reason = world.cluster.kubectl(&["-n", namespace, "get", "infd", "kept", "-o", path])?;
        Ok((reason == "ScaledToZero").then_some(()))
    })
    .await
    .map(drop)
}
