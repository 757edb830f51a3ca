//! Injection to fence, over many stalls of our engine under load. The fault rotates over S0, S2 and livelock.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::clients::Clients;
use crate::stage::{EngineKind, Stage, moment};

const FAULTS: [&str; 3] = ["step-stall", "device-wait", "livelock"];
const CLIENTS: u16 = 8;
/// Streams run this long before a stall is injected, so that the detector sees a warm engine.
const WARM_UP: Duration = Duration::from_secs(2);
const RECOVERY_MAX: Duration = Duration::from_secs(120);
const GOAL_P99_MS: f64 = 500.0;
const GOAL_MAX_MS: f64 = 1000.0;

/// Runs `count` stalls; true when the goals are met.
pub async fn run(out: &Path, model: &Path, count: u32) -> anyhow::Result<bool> {
    let mut latencies_ms = Vec::new();
    for (index, fault) in FAULTS.iter().enumerate() {
        let share = (count as usize + FAULTS.len() - 1 - index) / FAULTS.len();
        latencies_ms.extend(run_fault(out, model, fault, share).await.with_context(|| format!("fault {fault}"))?);
    }
    latencies_ms.sort_by(f64::total_cmp);
    let p99 = quantile(&latencies_ms, 0.99);
    let max = latencies_ms.last().copied().unwrap_or(f64::NAN);
    println!("stalls_injected {} count -", latencies_ms.len());
    println!("fence_latency_p50 {:.0} ms <=200", quantile(&latencies_ms, 0.5));
    println!("fence_latency_p99 {p99:.0} ms <={GOAL_P99_MS}");
    println!("fence_latency_max {max:.0} ms <={GOAL_MAX_MS}");
    Ok(p99 <= GOAL_P99_MS && max <= GOAL_MAX_MS)
}

async fn run_fault(out: &Path, model: &Path, fault: &str, count: usize) -> anyhow::Result<Vec<f64>> {
    let kind = EngineKind::Truebeat { model: model.to_owned(), fault: Some(fault.to_owned()) };
    let mut stage = Stage::launch(&kind, &out.join(format!("stalls-{fault}")))?;
    let measured = async {
        stage.wait_ready().await?;
        let clients = Clients::start(&stage.gate, CLIENTS);
        let mut latencies_ms = Vec::with_capacity(count);
        for number in 1..=count {
            tokio::time::sleep(WARM_UP).await;
            let latency_ms = one_stall(&stage).await?;
            eprintln!("{fault} {number}/{count}: fenced {latency_ms:.0} ms after the injection");
            latencies_ms.push(latency_ms);
        }
        clients.stop(Duration::from_secs(10)).await;
        anyhow::Ok(latencies_ms)
    };
    let latencies_ms = measured.await;
    stage.stop().await?;
    latencies_ms
}

/// Injects one stall and waits until the engine serves again.
async fn one_stall(stage: &Stage) -> anyhow::Result<f64> {
    let (_, injected) = stage.hang_engine()?;
    let begun = Instant::now();
    while begun.elapsed() < RECOVERY_MAX {
        if let Some(episode) = stage.incident_since(injected).await?
            && episode.stage == "Recovered"
        {
            let fenced = moment(&episode.fenced_at).context("the incident has no time for its fence")?;
            return Ok(fenced.duration_since(injected).as_secs_f64() * 1000.0);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    bail!("no recovery within {RECOVERY_MAX:?}")
}

/// The value below which a share `q` of the sorted values lies (nearest rank).
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let rank = (sorted.len() as f64 * q).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::quantile;

    #[test]
    fn quantile_is_the_nearest_rank() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(quantile(&values, 0.5), 100.0);
        assert_eq!(quantile(&values, 0.99), 198.0);
        assert!(quantile(&[], 0.5).is_nan());
    }
}
