//! What the agent costs beside one engine: its memory and CPU time at rest and while the engine serves (2c, 2d), and what its presence
//! costs the engine's throughput (2b).

mod pairs;
pub(super) mod roles;

use std::path::Path;
use std::time::Duration;

use anyhow::Context;

use self::pairs::Pair;
pub use self::roles::memory;
use self::roles::{Cost, Roles};
use super::figures::{bootstrap, line};
use super::run_log::RunLog;
use crate::clients::Clients;
use crate::stage::{EngineKind, Stage};

const CLIENTS: u16 = 8;
/// What start-up needed once is not what the agent costs.
const SETTLE: Duration = Duration::from_secs(10);
const GOAL_RSS_MIB: f64 = 6.0;
const GOAL_CPU_MS: f64 = 1.0;
const GOAL_LOSS_PERCENT: f64 = 0.1;
const GOAL_LOSS_HIGH_PERCENT: f64 = 0.3;

/// Measures for `seconds` at rest and as long under load, then `pairs` pairs; true when all goals are met. `agent` has the agent's roles:
/// this program where it is `None`.
pub async fn run(out: &Path, model: &Path, agent: Option<&Path>, (seconds, pairs): (u32, u32)) -> anyhow::Result<bool> {
    let folder = out.join("cost");
    let kind = EngineKind::Truebeat { model: model.to_owned(), fault: None };
    let mut stage = Stage::launch_under(agent, &kind, &folder)?;
    let measured = measure(&mut stage, &folder, Duration::from_secs(seconds.into()), pairs).await;
    stage.stop().await?;
    measured
}

async fn measure(stage: &mut Stage, folder: &Path, length: Duration, pairs: u32) -> anyhow::Result<bool> {
    stage.wait_ready().await?;
    let engine = RunLog::open(folder)?.engine_pid()?;
    let roles = Roles::beside(engine).context("could not find the agent's processes")?;
    tokio::time::sleep(SETTLE).await;
    let rest = roles.cost_over(length).await?;
    let clients = Clients::start(&stage.gate, CLIENTS);
    tokio::time::sleep(SETTLE).await;
    let chunks = clients.requests().tokens;
    let load = roles.cost_over(length).await?;
    let chunks = clients.requests().tokens - chunks;
    clients.stop(Duration::from_secs(10)).await;
    let frugal = tell_cost(&rest, &load, chunks, length);
    let clients = Clients::start(&stage.engine, CLIENTS);
    tokio::time::sleep(SETTLE).await;
    let pairs = pairs::measure(&roles, engine, &clients, pairs).await;
    clients.stop(Duration::from_secs(10)).await;
    Ok(tell_pairs(&pairs?) && frugal)
}

fn tell_cost(rest: &Cost, load: &Cost, chunks: u64, length: Duration) -> bool {
    for (role, memory) in &load.memory {
        let threads = memory.threads;
        line(&format!("agent_{role}_rss"), format_args!("{:.1}", memory.rss_mib), "MiB", "-");
        line(&format!("agent_{role}_anonymous"), format_args!("{:.1}", memory.anonymous_mib), "MiB", "-");
        line(&format!("agent_{role}_threads"), threads, "count", "-");
    }
    let total = load.total();
    line("agent_rss", format_args!("{:.1}", total.rss_mib), "MiB", format_args!("<={GOAL_RSS_MIB}"));
    line("agent_pss", format_args!("{:.1}", total.pss_mib), "MiB", "-");
    line("agent_anonymous", format_args!("{:.1}", total.anonymous_mib), "MiB", "-");
    for (what, cost) in [("rest", rest), ("load", load)] {
        for (role, ms) in &cost.cpu_ms_per_s {
            line(&format!("agent_{role}_cpu_{what}"), format_args!("{ms:.2}"), "ms/s", "-");
        }
        line(&format!("agent_wakeups_{what}"), format_args!("{:.1}", cost.wakeups_per_s), "/s", "-");
    }
    // under load the gate carries every chunk, which is a proxy's cost and grows with the traffic: it is told by the chunk
    let (at_rest, at_load) = (rest.cpu(&["supervisor", "detect", "gate"]), load.cpu(&["supervisor", "detect"]));
    let gate_us = load.cpu(&["gate"]) * 1000.0 * length.as_secs_f64() / chunks.max(1) as f64;
    line("agent_cpu_rest", format_args!("{at_rest:.2}"), "ms/s", format_args!("<={GOAL_CPU_MS}"));
    line("agent_cpu_load_without_gate", format_args!("{at_load:.2}"), "ms/s", format_args!("<={GOAL_CPU_MS}"));
    line("gate_cpu_per_chunk", format_args!("{gate_us:.1}"), "us", "-");
    total.rss_mib <= GOAL_RSS_MIB && at_rest <= GOAL_CPU_MS && at_load <= GOAL_CPU_MS
}

/// Losses in percent: of tokens a second, and the growth of the engine's own CPU time a token, which other work on the machine moves
/// less.
fn tell_pairs(pairs: &[Pair]) -> bool {
    let percent =
        |ratio: fn(&Pair) -> f64| -> Vec<f64> { pairs.iter().map(|pair| (ratio(pair) - 1.0) * 100.0).collect() };
    let loss = bootstrap(&percent(Pair::slowdown));
    let growth = bootstrap(&percent(Pair::cpu_growth));
    line("engine_pairs", pairs.len(), "count", "-");
    for (name, of) in [("engine_throughput_loss", loss), ("engine_cpu_per_token_growth", growth)] {
        line(name, format_args!("{:.2}", of.mean), "%", format_args!("<={GOAL_LOSS_PERCENT}"));
        line(&format!("{name}_low95"), format_args!("{:.2}", of.low), "%", "-");
        line(
            &format!("{name}_high95"),
            format_args!("{:.2}", of.high),
            "%",
            format_args!("<={GOAL_LOSS_HIGH_PERCENT}"),
        );
    }
    loss.mean <= GOAL_LOSS_PERCENT && loss.high <= GOAL_LOSS_HIGH_PERCENT
}
