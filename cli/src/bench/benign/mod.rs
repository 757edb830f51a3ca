//! Real processes that do what healthy engines do and what looks like a hang (1d, B1 to B9), many at a time on a loaded machine. Each run
//! is an engine and an agent of their own; a confirmed stall is a false eviction, and a fence is counted beside it.

mod acts;
mod hold;
mod kinds;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::stream::{FuturesUnordered, TryStreamExt};

use self::kinds::{KINDS, Kind};
use super::figures::{Sorted, line};
use super::healthy::burn;
use crate::stage::Stage;

/// So often the load is read.
const LOAD_EVERY: Duration = Duration::from_secs(5);

/// What the runs need.
#[derive(Debug, Clone)]
pub struct Plan {
    pub runs: u32,
    /// Runs at a time.
    pub lanes: u16,
    /// Threads that burn CPU beside them.
    pub burners: u16,
    /// Of these kinds; all where none is named.
    pub only: Vec<String>,
    /// The stranger's server.
    pub server: PathBuf,
}

/// What came of one run.
#[derive(Debug, Default)]
struct Seen {
    evictions: u32,
    fences: u32,
}

/// Runs them; true when no healthy engine was to be killed.
pub async fn run(out: &Path, model: &Path, plan: Plan) -> anyhow::Result<bool> {
    let server = plan.server.canonicalize().with_context(|| format!("there is no server {}", plan.server.display()))?;
    let plan = Plan { server, ..plan };
    let (next, stop) = (AtomicU32::new(0), burn(plan.burners));
    // of one task, so that whoever ends it waits until each has ended its engine
    let mut lanes: FuturesUnordered<_> =
        (0..plan.lanes).map(|lane| run_lane(&plan, model, out.join(format!("benign-{lane}")), &next)).collect();
    let loads = sample_load(Arc::clone(&stop));
    let mut all = BTreeMap::<&'static str, (u32, Seen)>::new();
    while let Some(lane) = lanes.try_next().await? {
        for (kind, seen) in lane {
            let (runs, sum) = all.entry(kind).or_default();
            *runs += 1;
            sum.evictions += seen.evictions;
            sum.fences += seen.fences;
        }
    }
    stop.store(true, Ordering::Relaxed);
    report(&all, &loads.await?);
    Ok(all.values().all(|(_, seen)| seen.evictions == 0))
}

/// One run after the other, until none is left.
async fn run_lane(
    plan: &Plan,
    model: &Path,
    folder: PathBuf,
    next: &AtomicU32,
) -> anyhow::Result<Vec<(&'static str, Seen)>> {
    let named = |kind: &&Kind| plan.only.is_empty() || plan.only.iter().any(|name| name == kind.name);
    let kinds: Vec<&Kind> = KINDS.iter().filter(named).collect();
    let mut done = Vec::new();
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= plan.runs {
            return Ok(done);
        }
        let count = kinds.len().max(1);
        let kind = kinds.get(number as usize % count).context("no kind of that name; there are B1 to B9")?;
        let began = Instant::now();
        let seen = one_run(plan, kind, number as usize / count, model, &folder)
            .await
            .with_context(|| format!("run {number}, {}: see {}", kind.name, folder.display()))?;
        let (took, Seen { evictions, fences }) = (began.elapsed().as_secs_f64(), &seen);
        eprintln!("{:>4}/{} {}: {took:.0} s, {evictions} evictions, {fences} fences", number + 1, plan.runs, kind.name);
        done.push((kind.name, seen));
    }
}

/// An engine and an agent of their own, the act, and a request at the end that must be answered.
async fn one_run(plan: &Plan, kind: &Kind, round: usize, model: &Path, folder: &Path) -> anyhow::Result<Seen> {
    let mut stage = Stage::launch(&kind.engine(model, &plan.server), folder)?;
    let acted = acts::perform(&mut stage, kind, round, &plan.server).await;
    let incidents = stage.incidents().await;
    stage.stop_after(acted).await?;
    let mut seen = Seen::default();
    for episode in incidents? {
        let confirmed = episode.confirmed_at.is_some() || episode.killed_at.is_some();
        seen.evictions += u32::from(confirmed);
        seen.fences += u32::from(!confirmed);
        eprintln!("{} {}: {:?}", kind.name, if confirmed { "EVICTED" } else { "fenced" }, episode.reasons);
    }
    Ok(seen)
}

/// The machine's load of a minute, now and then until `stop`.
fn sample_load(stop: Arc<AtomicBool>) -> tokio::task::JoinHandle<Vec<f64>> {
    tokio::spawn(async move {
        let mut loads = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            tokio::time::sleep(LOAD_EVERY).await;
            let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
            loads.extend(text.split(' ').next().and_then(|load| load.parse::<f64>().ok()));
        }
        loads
    })
}

fn report(all: &BTreeMap<&'static str, (u32, Seen)>, loads: &[f64]) {
    for (kind, (runs, seen)) in all {
        line(&format!("benign_{kind}_runs"), runs, "count", "-");
        line(&format!("benign_{kind}_evictions"), seen.evictions, "count", 0);
        line(&format!("benign_{kind}_fences"), seen.fences, "count", "-");
    }
    let sum = |of: fn(&(u32, Seen)) -> u32| all.values().map(of).sum::<u32>();
    let loads = Sorted::from(loads.to_vec());
    for (name, share) in [("p10", 0.1), ("p50", 0.5), ("p90", 0.9)] {
        line(&format!("benign_load_average_{name}"), format_args!("{:.1}", loads.quantile(share)), "-", "-");
    }
    line("benign_runs", sum(|of| of.0), "count", "-");
    line("benign_evictions", sum(|of| of.1.evictions), "count", 0);
    line("benign_fences", sum(|of| of.1.fences), "count", "-");
}
