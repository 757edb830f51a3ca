//! The incident in which an autoscaler went from 6 to 20 and back to 6 and kept the two frozen ones, in small, under a real
//! HorizontalPodAutoscaler over Prometheus and its adapter: up for the load, and down again over replicas that are frozen and stay so.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use truebeat_tests::custom_metrics::CustomMetrics;
use truebeat_tests::load::Load;
use truebeat_tests::product;
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;

use crate::lifecycle::manifest;
use crate::world::{BOUND, NAMESPACE, World, is, members};

const CLIENTS: usize = 12;
/// The example's own, for this story: another name, a replica for each request, and fifteen seconds of patience: what is looked at is who
/// goes, and nobody can tell a replica that has been frozen for half a second.
const EXAMPLE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/examples/autoscaling/hpa.yaml"));
const HERE: [(&str, &str); 3] =
    [("name: chat", "name: auto"), ("averageValue: \"8\"", "averageValue: \"1\""), ("Seconds: 60", "Seconds: 15")];

pub async fn story(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let endpoints = world.endpoints("auto");
    times.act("kubectl apply: InferenceDeployment auto, 2 replicas, mode Fence; Prometheus and prometheus-adapter");
    product::apply(world.cluster, &manifest("auto", 2, "Fence"))?;
    let first = endpoints.count(2, BOUND).await?;
    times.now("two get traffic");
    let api = CustomMetrics::start(world.cluster)?;
    until_async("figures of both", BOUND, || async { Ok((figures(&api)?.len() == 2).then_some(())) }).await?;

    let begun = times.act(&format!("{CLIENTS} clients, and a HorizontalPodAutoscaler from 2 to 4"));
    let load = clients(world).await?;
    world.kubectl(&["apply", "-f", &autoscaler(world)?])?;
    let grown = endpoints.count(4, BOUND).await?;
    times.now(&format!("scaled out by the agents' own figures: four get traffic, {}", said(&api)?));
    ensure!(load.felt(begun).whole > 0, "nobody was answered: {:?}", load.felt(begun));

    let frozen = times.act(&format!("SIGUSR2 to the engines of the two oldest, {}", first.join(" and ")));
    for pod in &first {
        world.freeze(pod)?;
    }
    for pod in &first {
        times.seen(&format!("{pod}: endpoint away"), endpoints.flip(pod, false, frozen, BOUND).await?);
    }
    until_async("the stalled ones to leave the figures", BOUND, || async {
        let figures = figures(&api)?;
        Ok((!first.iter().any(|pod| figures.contains_key(pod))).then_some(()))
    })
    .await?;
    times.now(&format!("their figures are gone: {}", said(&api)?));

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
    api.remove()?;
    world.kubectl(&["delete", "infd", "auto", "--wait=true", "--timeout=60s"]).map(drop)
}

async fn clients(world: &World<'_>) -> Result<Load> {
    Ok(Load::start(world.address("auto").await?, "demo", CLIENTS))
}

/// The file of the autoscaler.
fn autoscaler(world: &World<'_>) -> Result<String> {
    let mut text = EXAMPLE.to_owned();
    for (there, here) in HERE {
        ensure!(text.contains(there), "the example has no `{there}`");
        text = text.replace(there, here);
    }
    let file = world.cluster.layout().path("hpa.yaml");
    std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file.display().to_string())
}

fn figures(api: &CustomMetrics<'_>) -> Result<BTreeMap<String, f64>> {
    api.figures(NAMESPACE, "auto")
}

fn said(api: &CustomMetrics<'_>) -> Result<String> {
    let of = |(pod, value): (String, f64)| format!("{pod} {value:.1}");
    Ok(format!("in flight {}", figures(api)?.into_iter().map(of).collect::<Vec<_>>().join(", ")))
}
