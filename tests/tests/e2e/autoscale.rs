//! The incident in which an autoscaler went from 6 to 20 and back to 6 and kept the two frozen ones, in small, under a real
//! HorizontalPodAutoscaler over Prometheus and its adapter: up for the load, and down again over replicas that are frozen and stay so.
//! `make e2e-fleet` tells it at the size that it had.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use truebeat_tests::custom_metrics::CustomMetrics;
use truebeat_tests::load::Load;
use truebeat_tests::product;
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;

use crate::lifecycle::manifest;
use crate::world::{BOUND, NAMESPACE, World, is, members};

/// From how many replicas to how many, and back.
const SIZES: &str = "TRUEBEAT_AUTOSCALE";
const IN_SMALL: &str = "2,4";
/// Of the replicas that are there before the load, so many freeze: those that an autoscaler which goes by age would keep.
const FROZEN: usize = 2;
const CLIENTS_A_REPLICA: usize = 3;
/// The example's own, for this story: another name, a replica for each fifth of a request in flight, for a tiny model answers soon; and fifteen
/// seconds of patience: what is looked at is who goes, and nobody can tell a replica that has been frozen for half a second.
const EXAMPLE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/examples/autoscaling/hpa.yaml"));
const HERE: [(&str, &str); 3] =
    [("name: chat", "name: auto"), ("averageValue: \"8\"", "averageValue: \"200m\""), ("Seconds: 60", "Seconds: 15")];

/// How many replicas there are at rest, and under load.
#[derive(Clone, Copy)]
struct Sizes {
    few: usize,
    many: usize,
}

impl Sizes {
    fn wanted() -> Result<Self> {
        let text = std::env::var(SIZES).unwrap_or_else(|_| IN_SMALL.to_owned());
        let sizes = text
            .split_once(',')
            .and_then(|(few, many)| Some(Self { few: few.trim().parse().ok()?, many: many.trim().parse().ok()? }));
        let sizes = sizes.filter(|sizes| FROZEN <= sizes.few && sizes.few < sizes.many);
        sizes.with_context(|| {
            format!("{SIZES} is {text:?}: say from how many replicas to how many, at least {IN_SMALL:?}")
        })
    }
}

pub async fn story(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let Sizes { few, many } = Sizes::wanted()?;
    let patience = BOUND * u32::try_from(many)?.div_ceil(4);
    let endpoints = world.endpoints("auto");
    times.act(&format!(
        "kubectl apply: InferenceDeployment auto, {few} replicas, mode Fence; Prometheus and prometheus-adapter"
    ));
    product::apply(world.cluster, &small(&manifest("auto", i32::try_from(few)?, "Fence"))?)?;
    let first = endpoints.count(few, patience).await?;
    times.now(&format!("{few} get traffic"));
    let api = CustomMetrics::start(world.cluster)?;
    until_async("figures of each", BOUND, || async { Ok((figures(&api)?.len() == few).then_some(())) }).await?;

    let clients = many * CLIENTS_A_REPLICA;
    let begun = times.act(&format!("{clients} clients, and a HorizontalPodAutoscaler from {few} to {many}"));
    let load = Load::start(world.address("auto").await?, "demo", clients);
    world.kubectl(&["apply", "-f", &autoscaler(world, few, many)?])?;
    let grown = endpoints.count(many, patience).await?;
    times.now(&format!("scaled out by the agents' own figures: {many} get traffic, {}", said(&api)?));
    ensure!(load.felt(begun).whole > 0, "nobody was answered: {:?}", load.felt(begun));

    let ill = first.get(..FROZEN).context("the first replicas")?;
    let frozen = times.act(&format!("SIGUSR2 to the engines of two of the oldest, {}", ill.join(" and ")));
    for pod in ill {
        world.freeze(pod)?;
    }
    for pod in ill {
        times.seen(&format!("{pod}: endpoint away"), endpoints.flip(pod, false, frozen, BOUND).await?);
    }
    until_async("the stalled ones to leave the figures", BOUND, || async {
        let figures = figures(&api)?;
        Ok((!ill.iter().any(|pod| figures.contains_key(pod))).then_some(()))
    })
    .await?;
    times.now(&format!("their figures are gone: {}", said(&api)?));

    times.act("the load ends");
    drop(load);
    let left = until_async(&format!("{few} pods to be left"), patience, || async {
        let left = members(&world.pods, "auto");
        Ok((left.len() == few).then_some(left))
    })
    .await?;
    times.now(&format!("scaled in to {few}"));
    ensure!(!left.iter().any(|pod| ill.contains(pod)), "a frozen one survived: {left:?}, frozen were {ill:?}");
    ensure!(left.iter().all(|pod| grown.contains(pod)), "{left:?} of {grown:?}");
    until_async("traffic for those that are left", BOUND, || async { Ok((endpoints.ready() == left).then_some(())) })
        .await?;
    times.note("no frozen survivor");
    let auto = world.infds.now().remove("auto").context("auto is gone")?;
    let status = auto.status.clone().unwrap_or_default();
    ensure!(usize::try_from(auto.spec.replicas) == Ok(few), "the autoscaler wrote {} replicas", auto.spec.replicas);
    ensure!(!is(&auto, "Stalled", "True"), "{:?}", status.conditions);
    world.kubectl(&["delete", "hpa", "auto"])?;
    api.remove()?;
    world.kubectl(&["delete", "infd", "auto", "--wait=true", "--timeout=60s"]).map(drop)
}

/// The same whose pods ask for next to nothing of a core: a scheduler finds no room for twenty on a node of two.
fn small(manifest: &str) -> Result<String> {
    let asks = [("cpu: 50m", "cpu: 5m"), ("Never}", "Never, resources: {requests: {cpu: 5m, memory: 64Mi}}}")];
    rewritten("manifest", manifest, &asks)
}

/// The file of the autoscaler.
fn autoscaler(world: &World<'_>, few: usize, many: usize) -> Result<String> {
    let (least, most) = (format!("minReplicas: {few}"), format!("maxReplicas: {many}"));
    let sizes = [("minReplicas: 2", least.as_str()), ("maxReplicas: 4", most.as_str())];
    let text = rewritten("example", EXAMPLE, &[&HERE[..], &sizes].concat())?;
    let file = world.cluster.layout().path("hpa.yaml");
    std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file.display().to_string())
}

/// What is there by what is wanted here, each of which must be there.
fn rewritten(what: &str, text: &str, changes: &[(&str, &str)]) -> Result<String> {
    changes.iter().try_fold(text.to_owned(), |text, (there, here)| {
        ensure!(text.contains(there), "the {what} has no `{there}`");
        Ok(text.replace(there, here))
    })
}

fn figures(api: &CustomMetrics<'_>) -> Result<BTreeMap<String, f64>> {
    api.figures(NAMESPACE, "auto")
}

fn said(api: &CustomMetrics<'_>) -> Result<String> {
    let of = |(pod, value): (String, f64)| format!("{pod} {value:.1}");
    Ok(format!("in flight {}", figures(api)?.into_iter().map(of).collect::<Vec<_>>().join(", ")))
}
