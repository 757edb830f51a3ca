//! An engine that is killed (1a): how soon its supervisor has noticed, and how soon the detector's verdict says so. Each kill has a
//! `truebeat run` of its own, for a crash that follows a crash is restarted ever later.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::figures::{Sorted, line};
use super::run_log::RunLog;
use crate::stage::{EngineKind, Stage};

const NOTICED_MAX: Duration = Duration::from_secs(10);
const GOAL_P99_MS: f64 = 5.0;

/// Kills `count` engines; true when the goal is met.
pub async fn run(out: &Path, model: &Path, count: u32) -> anyhow::Result<bool> {
    let (mut noticed_ms, mut judged_ms) = (Vec::new(), Vec::new());
    for number in 1..=count {
        let [noticed, judged] = one_kill(out, model).await.with_context(|| format!("kill {number} of {count}"))?;
        eprintln!("kill {number}/{count}: noticed after {noticed:.2} ms, judged after {judged:.2} ms");
        noticed_ms.push(noticed);
        judged_ms.push(judged);
    }
    let (noticed, judged) = (Sorted::from(noticed_ms), Sorted::from(judged_ms));
    line("exits_killed", noticed.count(), "count", "-");
    let met = noticed.quantile(0.99) <= GOAL_P99_MS;
    for (name, values, goal) in [("noticed", noticed, format!("<={GOAL_P99_MS}")), ("judged", judged, "-".to_owned())] {
        line(&format!("exit_{name}_p50"), format_args!("{:.2}", values.quantile(0.5)), "ms", "-");
        line(&format!("exit_{name}_p99"), format_args!("{:.2}", values.quantile(0.99)), "ms", &goal);
        line(&format!("exit_{name}_max"), format_args!("{:.2}", values.max()), "ms", "-");
    }
    Ok(met)
}

async fn one_kill(out: &Path, model: &Path) -> anyhow::Result<[f64; 2]> {
    let folder = out.join("exit");
    let kind = EngineKind::Truebeat { model: model.to_owned(), fault: None };
    let mut stage = Stage::launch(&kind, &folder)?;
    let measured = async {
        stage.wait_ready().await?;
        let log = RunLog::open(&folder)?;
        tokio::task::spawn_blocking(move || kill_and_watch(log)).await?
    };
    let measured = measured.await;
    stage.stop().await?;
    measured
}

/// Milliseconds from SIGKILL to the supervisor's word and to the verdict that follows from it.
fn kill_and_watch(mut log: RunLog) -> anyhow::Result<[f64; 2]> {
    let pid = log.engine_pid()?;
    let ended = format!("the engine (pid {pid}) ended");
    let noticed = |line: &str| line.contains(&ended);
    // where the next engine is there before the verdict is told, the verdict is about that one
    let judged = |line: &str| line.contains("verdict Dead") || line.contains("verdict Starting");
    let killed = Instant::now();
    kill(Pid::from_raw(pid), Signal::SIGKILL).with_context(|| format!("could not kill the engine, pid {pid}"))?;
    let seen = log.wait_for([&noticed, &judged], NOTICED_MAX)?;
    Ok(seen.map(|at| at.duration_since(killed).as_secs_f64() * 1000.0))
}
