//! What the operator costs: processor time and memory of its process, and the requests that it makes while nothing happens.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use truebeat_tests::cluster::Identity;
use truebeat_tests::fleet::operator::Operator;

use crate::fleet::Fleet;
use crate::report::{Goal, Report};

const WRITES: [&str; 4] = ["create", "patch", "replace", "delete"];
/// Clock ticks a second of /proc, the same on every Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// Leaves the fleet alone and counts.
pub async fn at_rest(fleet: &Fleet<'_>, quiet_s: u64, report: &mut Report) -> Result<()> {
    let operator = fleet.operator.lock().await;
    let thousands = fleet.size as f64 / 1000.0;
    report.add("cpu_of_the_first_rollout_per_1000_pods", cpu_s(operator.process)? / thousands, "s", Goal::None);
    settle(&operator).await?;
    let (before, cpu, started) = (calls(&operator, &WRITES).await?, cpu_s(operator.process)?, Instant::now());
    let reads = calls(&operator, &["get", "list"]).await?;
    tokio::time::sleep(Duration::from_secs(quiet_s)).await;
    let seconds = started.elapsed().as_secs_f64();
    report.add("writes_at_rest", calls(&operator, &WRITES).await? - before, "count", Goal::AtMost(0.0));
    report.add("reads_at_rest", (calls(&operator, &["get", "list"]).await? - reads) / seconds, "1/s", Goal::None);
    report.add(
        "cpu_at_rest_per_1000_pods",
        (cpu_s(operator.process)? - cpu) / seconds * 1e3 / thousands,
        "ms/s",
        Goal::None,
    );
    report.add("memory_at_rest_per_1000_pods", memory_mib(operator.process, "VmRSS")? / thousands, "MiB", Goal::None);
    report.add("memory_at_rest", memory_mib(operator.process, "VmRSS")?, "MiB", Goal::None);
    Ok(())
}

/// After everything.
pub async fn at_the_end(fleet: &Fleet<'_>, report: &mut Report) -> Result<()> {
    let operator = fleet.operator.lock().await;
    report.add("memory_peak", memory_mib(operator.process, "VmHWM")?, "MiB", Goal::AtMost(256.0));
    Ok(())
}

/// Waits until the operator has written nothing for ten seconds.
async fn settle(operator: &Operator) -> Result<()> {
    let mut last = (calls(operator, &WRITES).await?, Instant::now());
    while last.1.elapsed() < Duration::from_secs(10) {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let now = calls(operator, &WRITES).await?;
        if now != last.0 {
            last = (now, Instant::now());
        }
    }
    Ok(())
}

async fn calls(operator: &Operator, verbs: &[&str]) -> Result<f64> {
    let mut sum = 0.0;
    for verb in verbs {
        sum += operator.metric("truebeat_operator_api_calls_total", &format!("verb=\"{verb}\"")).await?;
    }
    Ok(sum)
}

/// Processor time of a process so far, in user and kernel, in seconds.
pub fn cpu_s(process: Identity) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.pid))?;
    let fields: Vec<&str> =
        stat.get(stat.rfind(')').context("no name in stat")? + 2..).context("a short stat")?.split(' ').collect();
    let ticks = |n: usize| fields.get(n).and_then(|field| field.parse::<f64>().ok()).context("no times in stat");
    Ok((ticks(11)? + ticks(12)?) / TICKS_PER_SECOND)
}

/// `VmRSS` or `VmHWM` of a process.
fn memory_mib(process: Identity, what: &str) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid))?;
    let line =
        status.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(':')).context("no memory in status")?;
    let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib / 1024.0)
}
