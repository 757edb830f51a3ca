//! The incident in which an autoscaler went from 6 to 20 and back to 6 and kept the two frozen ones, in small, under a real
//! HorizontalPodAutoscaler: up for the load, and down again over replicas that are frozen and stay so.

use anyhow::{Context, Result, ensure};
use kube::ResourceExt;
use truebeat_tests::load::Load;
use truebeat_tests::metrics_api::MetricsApi;
use truebeat_tests::product;
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;

use crate::lifecycle::manifest;
use crate::world::{BOUND, World, is, members};

const METRIC: &str = "truebeat_gate_in_flight";
const CLIENTS: usize = 12;
/// Fifteen seconds of patience: what is looked at is who goes, and nobody can tell a replica that has been frozen for half a second.
const AUTOSCALER: &str = r#"
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: auto, namespace: serving}
spec:
  scaleTargetRef: {apiVersion: inference.truebeat.io/v1alpha1, kind: InferenceDeployment, name: auto}
  minReplicas: 2
  maxReplicas: 4
  behavior: {scaleDown: {stabilizationWindowSeconds: 15}, scaleUp: {stabilizationWindowSeconds: 0}}
  metrics:
  - type: Pods
    pods: {metric: {name: truebeat_gate_in_flight}, target: {type: AverageValue, averageValue: "1"}}
"#;

pub async fn story(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let endpoints = world.endpoints("auto");
    times.act("kubectl apply: InferenceDeployment auto, 2 replicas, mode Fence; the aggregated metrics API");
    product::apply(world.cluster, &manifest("auto", 2, "Fence"))?;
    let first = endpoints.count(2, BOUND).await?;
    times.now("two get traffic");
    let api = MetricsApi::start(world.cluster, METRIC, addresses(world))?;
    until_async("figures of both", BOUND, || async { Ok((api.figures().len() == 2).then_some(())) }).await?;

    let begun = times.act(&format!("{CLIENTS} clients, and a HorizontalPodAutoscaler from 2 to 4"));
    let load = clients(world).await?;
    product::apply(world.cluster, AUTOSCALER)?;
    let grown = endpoints.count(4, BOUND).await?;
    times.now(&format!("scaled out by the agents' own figures: four get traffic, {}", figures(&api)));
    ensure!(load.felt(begun).whole > 0, "nobody was answered: {:?}", load.felt(begun));

    let frozen = times.act(&format!("SIGUSR2 to the engines of the two oldest, {}", first.join(" and ")));
    for pod in &first {
        world.freeze(pod)?;
    }
    for pod in &first {
        times.seen(&format!("{pod}: endpoint away"), endpoints.flip(pod, false, frozen, BOUND).await?);
    }
    until_async("the stalled ones to leave the figures", BOUND, || async {
        Ok((!first.iter().any(|pod| api.figures().contains_key(pod))).then_some(()))
    })
    .await?;
    times.now(&format!("their figures are gone: {}", figures(&api)));

    times.act("the load ends");
    drop(load);
    let left = until_async("two pods to be left", BOUND, || async {
        let left = members(&world.pods, "auto");
        Ok((left.len() == 2).then_some(left))
    })
    .await?;
    times.now("scaled in to two");
    ensure!(!left.iter().any(|pod| first.contains(pod)), "a frozen one survived: {left:?}, frozen were {first:?}");
    ensure!(left.iter().all(|pod| grown.contains(pod)), "{left:?} of {grown:?}");
    until_async("traffic for those that are left", BOUND, || async { Ok((endpoints.ready() == left).then_some(())) })
        .await?;
    times.note("no frozen survivor");
    let auto = world.infds.now().remove("auto").context("auto is gone")?;
    let status = auto.status.clone().unwrap_or_default();
    ensure!(auto.spec.replicas == 2, "the autoscaler wrote {} replicas", auto.spec.replicas);
    ensure!(!is(&auto, "Stalled", "True"), "{:?}", status.conditions);
    world.kubectl(&["delete", "hpa", "auto"])?;
    drop(api);
    world.cluster.kubectl(&["delete", "apiservice", "v1beta2.custom.metrics.k8s.io"])?;
    world.kubectl(&["delete", "infd", "auto", "--wait=true", "--timeout=60s"]).map(drop)
}

async fn clients(world: &World<'_>) -> Result<Load> {
    Ok(Load::start(world.address("auto").await?, "demo", CLIENTS))
}

/// Names and addresses of the pods, looked up anew at each call.
fn addresses(world: &World<'_>) -> truebeat_tests::metrics_api::Pods {
    let frames = world.pods.handle();
    Box::new(move || {
        let pods = frames
            .now()
            .into_iter()
            .filter(|(_, pod)| pod.labels().get(crds::LABEL_DEPLOYMENT).is_some_and(|name| name == "auto"));
        pods.filter_map(|(name, pod)| Some((name, pod.status.as_ref()?.pod_ip.as_ref()?.parse().ok()?))).collect()
    })
}

fn figures(api: &MetricsApi) -> String {
    let of = |(pod, value): (String, f64)| format!("{pod} {value:.1}");
    format!("in flight {}", api.figures().into_iter().map(of).collect::<Vec<_>>().join(", "))
}
