//! Injection to fence, over many stalls of our engine under load (1b): S0, S2, livelock, and a whole process that is stopped.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use jiff::Timestamp;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::figures::{Sorted, line};
use super::run_log::RunLog;
use crate::clients::Clients;
use crate::stage::{EngineKind, Stage, moment};

/// Faults of the engine's own, and `stopped`: SIGSTOP from outside.
pub const FAULTS: [&str; 4] = ["step-stall", "device-wait", "livelock", STOPPED];
const STOPPED: &str = "stopped";
const CLIENTS: u16 = 8;
/// Streams run this long before a stall is injected, so that the detector sees a warm engine; and this long before the first, so that it has seen
/// how little noise the machine makes (`native_calm_ms` of decode), as it has of any engine that was not restarted a moment ago.
const WARM_UP: Duration = Duration::from_secs(3);
const WARM_UP_FIRST: Duration = Duration::from_secs(15);
/// A hang that computes is confirmed after 150 times the usual step of its size, which takes minutes where little of a core is left: the longest
/// that any policy waits.
const RECOVERY_MAX: Duration = Duration::from_secs(900);
const GOAL_P50_MS: f64 = 200.0;
const GOAL_P99_MS: f64 = 500.0;
const GOAL_MAX_MS: f64 = 1000.0;

/// Runs `count` stalls, of all kinds or of those that are named; true when the goals are met.
pub async fn run(out: &Path, model: &Path, count: u32, only: &[String]) -> anyhow::Result<bool> {
    let named = |fault: &&str| only.is_empty() || only.iter().any(|name| name == fault);
    let faults: Vec<&str> = FAULTS.into_iter().filter(named).collect();
    let mut latencies_ms = Vec::new();
    for (index, fault) in faults.iter().enumerate() {
        let share = (count as usize + faults.len() - 1 - index) / faults.len();
        let of_fault = run_fault(out, model, fault, share).await.with_context(|| format!("fault {fault}"))?;
        let sorted = Sorted::from(of_fault.clone());
        line(&format!("fence_latency_{fault}_p50"), format_args!("{:.0}", sorted.quantile(0.5)), "ms", "-");
        latencies_ms.extend(of_fault);
    }
    let all = Sorted::from(latencies_ms);
    let (p50, p99, max) = (all.quantile(0.5), all.quantile(0.99), all.max());
    line("stalls_injected", all.count(), "count", "-");
    line("fence_latency_p50", format_args!("{p50:.0}"), "ms", format_args!("<={GOAL_P50_MS}"));
    line("fence_latency_p99", format_args!("{p99:.0}"), "ms", format_args!("<={GOAL_P99_MS}"));
    line("fence_latency_max", format_args!("{max:.0}"), "ms", format_args!("<={GOAL_MAX_MS}"));
    Ok(p50 <= GOAL_P50_MS && p99 <= GOAL_P99_MS && max <= GOAL_MAX_MS)
}

async fn run_fault(out: &Path, model: &Path, fault: &str, count: usize) -> anyhow::Result<Vec<f64>> {
    let folder = out.join(format!("stalls-{fault}"));
    let own = (fault != STOPPED).then(|| fault.to_owned());
    let kind = EngineKind::Truebeat { model: model.to_owned(), fault: own };
    let mut stage = Stage::launch(&kind, &folder)?;
    let measured = async {
        stage.wait_ready().await?;
        let clients = Clients::start(&stage.gate, CLIENTS);
        let mut latencies_ms = Vec::with_capacity(count);
        tokio::time::sleep(WARM_UP_FIRST).await;
        for number in 1..=count {
            tokio::time::sleep(WARM_UP).await;
            let (latency_ms, why) = one_stall(&stage, &folder, fault).await?;
            eprintln!("{fault} {number}/{count}: fenced {latency_ms:.0} ms after the injection{why}");
            latencies_ms.push(latency_ms);
        }
        clients.stop(Duration::from_secs(10)).await;
        anyhow::Ok(latencies_ms)
    };
    let latencies_ms = measured.await;
    stage.stop_after(latencies_ms).await
}

/// Stops the engine's process from outside; returns the moment just before.
fn stop_engine(folder: &Path) -> anyhow::Result<Timestamp> {
    let pid = RunLog::open(folder)?.engine_pid()?;
    let injected = Timestamp::now();
    kill(Pid::from_raw(pid), Signal::SIGSTOP).with_context(|| format!("could not stop the engine, pid {pid}"))?;
    Ok(injected)
}

/// Injects one stall and waits until the engine serves again; tells, where the fence came late, what was said against the engine.
async fn one_stall(stage: &Stage, folder: &Path, fault: &str) -> anyhow::Result<(f64, String)> {
    let injected = if fault == STOPPED { stop_engine(folder)? } else { stage.hang_engine()?.1 };
    let begun = Instant::now();
    while begun.elapsed() < RECOVERY_MAX {
        if let Some(episode) = stage.incident_since(injected).await?
            && episode.stage == "Recovered"
        {
            let fenced = moment(&episode.fenced_at).context("the incident has no time for its fence")?;
            let latency_ms = fenced.duration_since(injected).as_secs_f64() * 1000.0;
            let why = episode.reasons.first().filter(|_| latency_ms > GOAL_P50_MS);
            return Ok((latency_ms, why.map(|why| format!(": {why}")).unwrap_or_default()));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    bail!("no recovery within {RECOVERY_MAX:?}")
}
