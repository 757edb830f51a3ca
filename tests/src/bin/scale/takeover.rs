//! The operator goes: killed and started again as its container would be, or asked to leave beside another candidate.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use nix::sys::signal::Signal;
use truebeat_tests::fleet::operator::Operator;
use truebeat_tests::fleet::replica::{self, Says};
use truebeat_tests::wait::until_async;

use crate::bursts::{episode, stall};
use crate::fleet::{BOUND, Fleet, candidate, names};
use crate::report::{Goal, Report};

const GONE: Duration = Duration::from_secs(10);

/// SIGKILL, a stall that nobody hears, and the same container's next process: from its start to that stall's grant.
pub async fn crash(fleet: &Fleet<'_>, repeat: usize, report: &mut Report) -> Result<()> {
    for round in 0..repeat {
        let pod = one(fleet, round).await?;
        let round = format!("k{round}");
        let mut operator = fleet.operator.lock().await;
        operator.process.signal(Signal::SIGKILL);
        anyhow::ensure!(operator.process.gone_within(GONE), "the operator does not die");
        fleet.seen.forget();
        stall(fleet, std::slice::from_ref(&pod), &round).await?;
        let started = Instant::now();
        *operator = candidate(&fleet.binary, "operator-1", 9501).start(fleet.cluster, &fleet.client).await?;
        let acted = granted(fleet, &pod, &round).await?;
        report.add("restart_to_acting", acted.saturating_duration_since(started).as_secs_f64(), "s", Goal::AtMost(2.0));
        operator.ready().await?;
        recover(fleet, &pod, &round).await?;
    }
    Ok(())
}

/// SIGTERM to the leader while another waits: from the signal to the first grant of the other.
pub async fn release(fleet: &Fleet<'_>, repeat: usize, report: &mut Report) -> Result<()> {
    for round in 0..repeat {
        let pod = one(fleet, repeat + round).await?;
        let (name, port) = (format!("operator-r{round}"), 9510 + u16::try_from(round)?);
        let heir: Operator = candidate(&fleet.binary, &name, port).start(fleet.cluster, &fleet.client).await?;
        heir.ready().await?;
        let round = format!("r{round}");
        let mut operator = fleet.operator.lock().await;
        fleet.seen.forget();
        let left = Instant::now();
        operator.process.signal(Signal::SIGTERM);
        anyhow::ensure!(operator.process.gone_within(GONE), "the operator does not leave");
        stall(fleet, std::slice::from_ref(&pod), &round).await?;
        let acted = granted(fleet, &pod, &round).await?;
        report.add("release_to_acting", acted.saturating_duration_since(left).as_secs_f64(), "s", Goal::AtMost(3.0));
        *operator = heir;
        recover(fleet, &pod, &round).await?;
    }
    Ok(())
}

/// Another replica each time: one that was restarted a moment ago would be replaced.
async fn one(fleet: &Fleet<'_>, n: usize) -> Result<Pod> {
    fleet.by_node().await?.into_values().rev().flatten().nth(n).context("no pod")
}

async fn granted(fleet: &Fleet<'_>, pod: &Pod, round: &str) -> Result<Instant> {
    let wanted = episode(pod, round);
    let pods = names(std::slice::from_ref(pod));
    until_async("the grant", BOUND, || async {
        let stories = fleet.seen.stories(&pods);
        let story = stories.first().and_then(|story| story.granted.clone());
        Ok(story.filter(|(id, _)| *id == wanted).map(|(_, at)| at))
    })
    .await
}

async fn recover(fleet: &Fleet<'_>, pod: &Pod, round: &str) -> Result<()> {
    replica::say(&fleet.client, pod, &Says::Recovered(episode(pod, round))).await?;
    fleet.whole("all to be well").await
}
