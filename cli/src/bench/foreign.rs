//! A stranger's server in warm decode that freezes (1c): injection to fence, and fence to confirmation beside it.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use crds::episode::Episode;

use super::figures::{Sorted, line};
use crate::clients::Clients;
use crate::stage::{EngineKind, Stage, moment};

const CLIENTS: u16 = 8;
/// Streams run this long before a freeze, so that the detector has seen a warm engine: chunks enough and twice the time that it wants.
const WARM_UP: Duration = Duration::from_secs(8);
/// A silence that nothing but itself tells of is confirmed as late as the rivals do.
const RECOVERY_MAX: Duration = Duration::from_secs(400);
const GOAL_P99_S: f64 = 5.0;

/// What became of one freeze, in seconds, and the detector's first words, which name the silence that it allowed.
struct Freeze {
    to_fence: f64,
    fence_to_confirm: f64,
    to_serving: f64,
    reason: String,
}

/// Freezes the server `count` times; true when the goal is met.
pub async fn run(out: &Path, server: &Path, count: u32) -> anyhow::Result<bool> {
    let server = server.canonicalize().with_context(|| format!("there is no server {}", server.display()))?;
    let mut stage = Stage::launch(&EngineKind::Stranger { server, more: Vec::new() }, &out.join("foreign"))?;
    let frozen = freeze_often(&mut stage, count).await;
    let frozen = stage.stop_after(frozen).await?;
    let of = |value: fn(&Freeze) -> f64| Sorted::from(frozen.iter().map(value).collect::<Vec<_>>());
    let (fence, confirm, serving) = (of(|f| f.to_fence), of(|f| f.fence_to_confirm), of(|f| f.to_serving));
    line("foreign_freezes", fence.count(), "count", "-");
    for (name, values, goal) in [
        ("foreign_fence", &fence, format!("<={GOAL_P99_S}")),
        ("foreign_fence_to_confirm", &confirm, "-".to_owned()),
        ("foreign_serving_again", &serving, "-".to_owned()),
    ] {
        line(&format!("{name}_p50"), format_args!("{:.2}", values.quantile(0.5)), "s", "-");
        line(&format!("{name}_p99"), format_args!("{:.2}", values.quantile(0.99)), "s", goal);
    }
    Ok(fence.quantile(0.99) <= GOAL_P99_S)
}

async fn freeze_often(stage: &mut Stage, count: u32) -> anyhow::Result<Vec<Freeze>> {
    stage.wait_ready().await?;
    let clients = Clients::start(&stage.gate, CLIENTS);
    let mut frozen = Vec::new();
    for number in 1..=count {
        tokio::time::sleep(WARM_UP).await;
        let freeze = one_freeze(stage).await.with_context(|| format!("freeze {number} of {count}"))?;
        let Freeze { to_fence, fence_to_confirm, to_serving, reason } = &freeze;
        eprintln!(
            "freeze {number}/{count}: fenced after {to_fence:.2} s, confirmed {fence_to_confirm:.2} s later, serving after {to_serving:.2} s ({reason})"
        );
        frozen.push(freeze);
    }
    clients.stop(Duration::from_secs(10)).await;
    Ok(frozen)
}

async fn one_freeze(stage: &Stage) -> anyhow::Result<Freeze> {
    let (_, injected) = stage.hang_engine()?;
    let begun = Instant::now();
    while begun.elapsed() < RECOVERY_MAX {
        let incident = stage.incident_since(injected).await?.filter(Episode::closed);
        if let Some(episode) = incident {
            let at = |at: &Option<String>, what: &str| moment(at).with_context(|| format!("no time of its {what}"));
            let seconds = |from: jiff::Timestamp, to: jiff::Timestamp| to.duration_since(from).as_secs_f64();
            let fenced = at(&episode.fenced_at, "fence")?;
            return Ok(Freeze {
                to_fence: seconds(injected, fenced),
                fence_to_confirm: seconds(fenced, at(&episode.confirmed_at, "confirmation")?),
                to_serving: seconds(injected, at(&episode.serving_at, "recovery")?),
                reason: episode.reasons.last().cloned().context("it has no reason")?,
            });
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    bail!("no recovery within {RECOVERY_MAX:?}")
}
