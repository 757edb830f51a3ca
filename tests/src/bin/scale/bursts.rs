//! Many replicas fail at once: how soon clients are spared them, how soon they are granted their restart, and how soon they are replaced.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use truebeat_tests::fleet::replica::{self, Says};
use truebeat_tests::wait::until_async;

use crate::cost::Reading;
use crate::fleet::{BOUND, Fleet, names};
use crate::report::{Goal, Report};
use crate::watch::Story;

/// Each failed replica speaks for itself; so many at once are as many as this machine's one connection pool can bear.
const AT_ONCE: usize = 64;

/// `percent` of the nodes fail at once: every replica on them stalls. Then they recover, stall once more, and are replaced.
pub async fn nodes_fail(fleet: &Fleet<'_>, percent: usize, report: &mut Report) -> Result<()> {
    let nodes = fleet.by_node().await?;
    let failing = (nodes.len() * percent / 100).max(1);
    let pods: Vec<Pod> = nodes.into_values().take(failing).flatten().collect();
    report.add("nodes_that_fail", failing as f64, "count", Goal::None);
    report.add("pods_that_fail", pods.len() as f64, "count", Goal::None);
    let names = names(&pods);

    fleet.seen.forget();
    let before = Reading::now(fleet).await?;
    let first = Instant::now();
    let said = stall(fleet, &pods, "a").await?;
    // the same machine's rate of plain writes, one a replica, 64 at a time: what no operator could be faster than
    report.add("verdicts_per_second", said.len() as f64 / first.elapsed().as_secs_f64(), "1/s", Goal::None);
    let stories = all(fleet, &names, "every endpoint gone and every restart granted", |story| {
        story.gone_at.is_some() && story.granted.is_some()
    })
    .await?;
    Reading::now(fleet).await?.tell(&before, "grant", pods.len(), report);
    let gone: Vec<Instant> = stories.iter().filter_map(|story| story.gone_at).collect();
    let mut each: Vec<Duration> =
        gone.iter().zip(&said).map(|(gone, said)| gone.saturating_duration_since(*said)).collect();
    report.add_times("verdict_to_endpoint_gone", &mut each, Goal::AtMost(1000.0));
    report.add("all_endpoints_gone", last(&gone, first).as_secs_f64(), "s", Goal::None);
    let granted: Vec<Instant> = stories.iter().filter_map(|story| Some(story.granted.as_ref()?.1)).collect();
    let mut each: Vec<Duration> =
        granted.iter().zip(&said).map(|(at, said)| at.saturating_duration_since(*said)).collect();
    report.add_times("verdict_to_grant", &mut each, Goal::None);
    report.add(
        "grants_per_second",
        granted.len() as f64 / last(&granted, first).as_secs_f64(),
        "1/s",
        Goal::AtLeast(200.0),
    );

    say_all(fleet, &pods, |pod| Says::Recovered(episode(pod, "a"))).await?;
    fleet.whole("all of them to have recovered").await?;
    fleet.seen.forget();
    let before = Reading::now(fleet).await?;
    let first = Instant::now();
    stall(fleet, &pods, "b").await?;
    let stories = all(fleet, &names, "every one of them deleted", |story| story.deleted_at.is_some()).await?;
    Reading::now(fleet).await?.tell(&before, "eviction", pods.len(), report);
    let deleted: Vec<Instant> = stories.iter().filter_map(|story| story.deleted_at).collect();
    report.add(
        "evictions_per_second",
        deleted.len() as f64 / last(&deleted, first).as_secs_f64(),
        "1/s",
        Goal::AtLeast(200.0),
    );
    fleet.whole("their successors to be ready").await
}

/// One replica stalls in a fleet that is well, again and again.
pub async fn one_by_one(fleet: &Fleet<'_>, report: &mut Report) -> Result<()> {
    let pods: Vec<Pod> = fleet.by_node().await?.into_values().filter_map(|mut pods| pods.pop()).take(20).collect();
    let (mut gone, mut granted) = (Vec::new(), Vec::new());
    for pod in &pods {
        let one = std::slice::from_ref(pod);
        fleet.seen.forget();
        let said = stall(fleet, one, "c").await?;
        let stories =
            all(fleet, &names(one), "one grant", |story| story.gone_at.is_some() && story.granted.is_some()).await?;
        let (story, said) = (stories.first().context("a story")?, said.first().context("a word")?);
        gone.extend(story.gone_at.map(|at| at.saturating_duration_since(*said)));
        granted.extend(story.granted.as_ref().map(|(_, at)| at.saturating_duration_since(*said)));
        say_all(fleet, one, |pod| Says::Recovered(episode(pod, "c"))).await?;
    }
    fleet.whole("all to be well").await?;
    report.add_times("one_verdict_to_endpoint_gone", &mut gone, Goal::AtMost(200.0));
    report.add_times("one_verdict_to_grant", &mut granted, Goal::None);
    Ok(())
}

/// The id of a pod's episode of this round.
pub fn episode(pod: &Pod, round: &str) -> String {
    format!("{}-{round}", pod.uid().unwrap_or_default())
}

/// Every one says that it stalls; the moments at which each began to say so.
pub async fn stall(fleet: &Fleet<'_>, pods: &[Pod], round: &str) -> Result<Vec<Instant>> {
    say_all(fleet, pods, |pod| Says::stalls(&episode(pod, round))).await
}

async fn say_all(fleet: &Fleet<'_>, pods: &[Pod], says: impl Fn(&Pod) -> Says) -> Result<Vec<Instant>> {
    let words: Vec<(Pod, Says)> = pods.iter().map(|pod| (pod.clone(), says(pod))).collect();
    let one = |(pod, says): (Pod, Says)| {
        let client = fleet.client.clone();
        async move {
            let at = Instant::now();
            replica::say(&client, &pod, &says).await?;
            anyhow::Ok(at)
        }
    };
    stream::iter(words.into_iter().map(one)).buffered(AT_ONCE).try_collect().await
}

/// Waits until `done` holds for each of these pods; gives what happened to them, in their order.
async fn all(fleet: &Fleet<'_>, pods: &[String], what: &str, done: impl Fn(&Story) -> bool) -> Result<Vec<Story>> {
    until_async(what, BOUND, || async {
        let stories = fleet.seen.stories(pods);
        Ok(stories.iter().all(&done).then_some(stories))
    })
    .await
}

/// From the first verdict to the last of `moments`.
fn last(moments: &[Instant], first: Instant) -> Duration {
    moments.iter().max().map_or(Duration::ZERO, |last| last.saturating_duration_since(first))
}
