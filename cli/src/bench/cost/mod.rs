//! What the agent costs beside one engine: its memory and CPU time at rest and while the engine serves (2c, 2d), and what its presence
//! costs the engine's throughput (2b).

mod pairs;
pub(super) mod roles;

use std::path::Path;
use std::time::{Duration, Instant};

use agent::footprint;
use anyhow::Context;
use engine::demo_model::{DemoArch, write_demo_model};

use self::pairs::{Pair, Subject};
pub use self::roles::memory;
use self::roles::{Cost, Roles};
use super::figures::{Interval, bootstrap, line, mean, median};
use super::run_log::RunLog;
use crate::clients::Clients;
use crate::stage::{EngineKind, Stage};

const CLIENTS: u16 = 8;
/// What start-up needed once is not what the agent costs.
const SETTLE: Duration = Duration::from_secs(10);
/// Around the second time that the agent gives memory back: its processes did not start at the same moment.
const MARGIN: Duration = Duration::from_secs(10);
const GOAL_RSS_MIB: f64 = 6.0;
const GOAL_CPU_MS: f64 = 1.0;
const GOAL_LOSS_PERCENT: f64 = 0.1;
const GOAL_LOSS_HIGH_PERCENT: f64 = 0.3;
const NO_GOAL: &str = "-";

/// Measures for `seconds` at rest and as long under load, then `pairs` pairs; true when all goals are met. `agent` has the agent's roles:
/// this program where it is `None`.
pub async fn run(out: &Path, model: &Path, agent: Option<&Path>, (seconds, pairs): (u32, u32)) -> anyhow::Result<bool> {
    let frugal = run_cost(&out.join("cost"), model, agent, Duration::from_secs(seconds.into())).await?;
    let harmless = run_pairs(&out.join("cost-pairs"), agent, pairs).await?;
    Ok(frugal && harmless)
}

async fn run_cost(folder: &Path, model: &Path, agent: Option<&Path>, length: Duration) -> anyhow::Result<bool> {
    let kind = EngineKind::Truebeat { model: model.to_owned(), fault: None };
    let mut stage = Stage::launch_under(agent, &kind, folder)?;
    let measured = measure_cost(&mut stage, folder, length).await;
    stage.stop().await?;
    measured
}

/// Under load first: around the second time that the agent gives memory back, and after it, as it is in every hour but the first. Then at rest.
async fn measure_cost(stage: &mut Stage, folder: &Path, length: Duration) -> anyhow::Result<bool> {
    let begun = Instant::now();
    let (_, roles) = settled(stage, folder).await?;
    let (tidies, tidy) = footprint::SECOND_TIME;
    eprintln!("cost: measured from {} s on, when start-up has left the agent's memory", (tidy + MARGIN).as_secs());
    let clients = Clients::start(&stage.gate, CLIENTS);
    tokio::time::sleep((tidies - MARGIN).saturating_sub(begun.elapsed())).await;
    let tidying = roles.cost_over(tidy - tidies + 2 * MARGIN).await?;
    let chunks = clients.requests().tokens;
    let load = roles.cost_over(length).await?;
    let chunks = clients.requests().tokens - chunks;
    clients.stop(Duration::from_secs(10)).await;
    tokio::time::sleep(SETTLE).await;
    let rest = roles.cost_over(length).await?;
    Ok(tell_cost([&tidying, &load, &rest], chunks, length))
}

/// On a model whose step takes milliseconds: of a step of microseconds most would be the clients' and the sockets' time, and how the
/// machine shares its cores between them and the engine scatters far more than what is looked for.
async fn run_pairs(folder: &Path, agent: Option<&Path>, pairs: u32) -> anyhow::Result<bool> {
    let model = folder.join("model");
    write_demo_model(&model, DemoArch::Qwen3Medium, 1).context("could not make the model of the pairs")?;
    let model = model.canonicalize().context("the model of the pairs has gone")?;
    let kind = EngineKind::Truebeat { model, fault: None };
    let mut stage = Stage::launch_under(agent, &kind, folder)?;
    let measured = async {
        let (engine, roles) = settled(&mut stage, folder).await?;
        pairs::measure(&Subject { roles: &roles, pid: engine, url: &stage.engine }, pairs).await
    };
    let measured = measured.await;
    stage.stop().await?;
    Ok(tell_pairs(&measured?))
}

/// The engine's pid and the agent's processes, once start-up is over.
async fn settled(stage: &mut Stage, folder: &Path) -> anyhow::Result<(i32, Roles)> {
    stage.wait_ready().await?;
    let engine = RunLog::open(folder)?.engine_pid()?;
    let roles = Roles::beside(engine).context("could not find the agent's processes")?;
    tokio::time::sleep(SETTLE).await;
    Ok((engine, roles))
}

fn tell_cost([tidying, load, rest]: [&Cost; 3], chunks: u64, length: Duration) -> bool {
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
    let (share, without_gate) = (tidying_share(tidying, load), ["supervisor", "detect"]);
    line("agent_tidying_cpu_each", format_args!("{share:.3}"), "ms/s", NO_GOAL);
    let at_load = load.cpu(&without_gate) + share * without_gate.len() as f64;
    let at_rest = rest.cpu(&["supervisor", "detect", "gate"]) + share * rest.cpu_ms_per_s.len() as f64;
    let gate_us = load.cpu(&["gate"]) * 1000.0 * length.as_secs_f64() / chunks.max(1) as f64;
    line("agent_cpu_rest", format_args!("{at_rest:.2}"), "ms/s", format_args!("<={GOAL_CPU_MS}"));
    line("agent_cpu_load_without_gate", format_args!("{at_load:.2}"), "ms/s", format_args!("<={GOAL_CPU_MS}"));
    line("gate_cpu_per_chunk", format_args!("{gate_us:.1}"), "us", "-");
    total.rss_mib <= GOAL_RSS_MIB && at_rest <= GOAL_CPU_MS && at_load <= GOAL_CPU_MS
}

/// What it costs one process to give memory back, once in eleven minutes: a part of every second, and in neither window. Of three that do
/// the same, the two that carry no chunks tell it.
fn tidying_share(tidying: &Cost, load: &Cost) -> f64 {
    let quiet = ["supervisor", "detect"];
    let more = (tidying.cpu(&quiet) - load.cpu(&quiet)).max(0.0) / quiet.len() as f64;
    more * tidying.length_s / footprint::CYCLE.as_secs_f64()
}

/// In percent, with the agent against without: the time that the same work takes, and the CPU time for it, which other work on the machine
/// moves less, of the engine alone and with all that the agent takes itself. The medians are judged: of the time, and of all CPU time.
fn tell_pairs(pairs: &[Pair]) -> bool {
    let percent =
        |ratio: fn(&Pair) -> f64| -> Vec<f64> { pairs.iter().map(|pair| (ratio(pair) - 1.0) * 100.0).collect() };
    let [slowdown, growth, all_growth] = [Pair::slowdown, Pair::cpu_growth, Pair::all_cpu_growth].map(percent);
    let loss = bootstrap(&slowdown, median);
    line("engine_pairs", pairs.len(), "count", "-");
    tell_interval("engine_throughput_loss", loss, [GOAL_LOSS_PERCENT, GOAL_LOSS_HIGH_PERCENT].map(at_most));
    tell_interval("engine_throughput_loss_mean", bootstrap(&slowdown, mean), [NO_GOAL; 2].map(str::to_owned));
    tell_interval("engine_cpu_growth", bootstrap(&growth, median), [NO_GOAL; 2].map(str::to_owned));
    let all = bootstrap(&all_growth, median);
    tell_interval("engine_and_agent_cpu_growth", all, [GOAL_LOSS_PERCENT, GOAL_LOSS_HIGH_PERCENT].map(at_most));
    [loss, all].iter().all(|cost| cost.value <= GOAL_LOSS_PERCENT && cost.high <= GOAL_LOSS_HIGH_PERCENT)
}

fn at_most(goal: f64) -> String {
    format!("<={goal}")
}

fn tell_interval(name: &str, of: Interval, [goal, goal_high]: [String; 2]) {
    line(name, format_args!("{:.2}", of.value), "%", goal);
    line(&format!("{name}_low95"), format_args!("{:.2}", of.low), "%", NO_GOAL);
    line(&format!("{name}_high95"), format_args!("{:.2}", of.high), "%", goal_high);
}
