//! Real mixed traffic on a real engine with its guards on, through the gate: half of the time without a fault, in which nothing may
//! break, nobody may be suspected and the engine's memory must be flat; then an engine that is full, which must refuse with 429 and break
//! nothing; then one fault after the other, of the engine and of its ranks, struck again and again. All the
//! time each request must have exactly one end that is true (EP2), and what is asked greedily must be answered byte for byte as it was
//! alone (EP4).

mod ask;
mod crowd;
mod growth;
mod outcome;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use vitals::exposition::{self, Exposition, Limits, Sample as Sampled};

use self::crowd::{Counts, Crowd};
use self::growth::{Sample, slope_mib_per_hour};
use self::outcome::Outcome;
use super::cost::memory;
use super::figures::line;
use super::run_log::RunLog;
use crate::http;
use crate::stage::{CALL, EngineKind, Stage};

const CLIENTS: u64 = 16;
/// What strikes, and how many ranks the engine has then.
const FAULTS: [(&str, u32); 12] = [
    ("step-stall", 1),
    ("device-wait", 1),
    ("livelock", 1),
    ("crash", 1),
    ("sigstop", 1),
    ("lock-held", 1),
    ("segfault", 1),
    ("exception", 1),
    ("sleep", 1),
    ("rank-hang:1", 2),
    ("plan-drift:1", 2),
    ("segfault:1", 2),
];
/// What the engine takes where it is to be full: fewer than there are clients.
const FULL: [&str; 4] = ["--max-num-seqs", "4", "--max-queue", "4"];
/// Traffic runs so long before a fault strikes, so that the detector sees a warm engine.
const WARM_UP: Duration = Duration::from_secs(4);
const RECOVERY_MAX: Duration = Duration::from_secs(60);
/// What clients are given to come to their ends.
const GRACE: Duration = Duration::from_secs(70);
/// In less time than this, warm-up is not over: the growth is told and not judged.
const JUDGED_S_MIN: f64 = 300.0;
/// What the allocator may keep for itself over the time that is judged.
const GROWN_MIB_MAX: f64 = 1.0;

/// One kind of thing that was looked at, and whether it held.
#[derive(Debug, Default)]
struct Checks {
    passed: usize,
    failed: usize,
}

impl Checks {
    fn check(&mut self, holds: bool, what: &str) {
        *(if holds { &mut self.passed } else { &mut self.failed }) += 1;
        if !holds {
            println!("FAILED {what}");
        }
    }
}

/// Runs for `length`, half of it calm; true when every check held.
pub async fn run(out: &Path, model: &Path, length: Duration, seed: u64) -> anyhow::Result<bool> {
    let (calm, mut checks) = (length / 2, Checks::default());
    let (mut all, references) = calm_leg(&out.join("traffic-calm"), model, calm, seed, &mut checks).await?;
    let share = (length - calm) / (FAULTS.len() + 1) as u32;
    all.add(full_leg(&out.join("traffic-full"), model, share, (&references, seed + 1), &mut checks).await?);
    let mut struck = 0;
    for ((fault, ranks), seed) in FAULTS.into_iter().zip(seed + 2..) {
        let folder = out.join(format!("traffic-{}", fault.replace(':', "-rank-")));
        let leg = fault_leg(&folder, model, (fault, ranks, share), &references, seed);
        let (counts, times) = leg.await.with_context(|| format!("fault {fault}"))?;
        eprintln!("{fault}, struck {times} times: {counts}");
        checks.check(times > 0, &format!("{fault} strikes, and the engine serves again"));
        checks.check(counts.of(&Outcome::Completed) > 0, &format!("{fault}: answers beside it"));
        struck += times;
        all.add(counts);
    }
    line("traffic_length", length.as_secs(), "s", "-");
    line("traffic_requests", all.posted(), "count", "-");
    line("traffic_faults_struck", struck, "count", "-");
    for (name, count) in all.lines() {
        line(&format!("traffic_{name}"), count, "count", "-");
    }
    line("traffic_compared", all.compared, "count", "-");
    line("traffic_without_a_true_end", all.lies.len(), "count", 0);
    line("traffic_other_bytes", all.differ.len(), "count", 0);
    all.lies.iter().chain(&all.differ).take(20).for_each(|what| println!("{what}"));
    checks.check(all.lies.is_empty(), "EP2: exactly one true end each");
    checks.check(all.differ.is_empty() && all.compared > 0, "EP4: the same bytes as alone");
    println!("{} passed, {} failed", checks.passed, checks.failed);
    Ok(checks.failed == 0)
}

/// A stage on which the engine serves, and its log.
async fn set(folder: &Path, model: &Path, fault: Option<&str>, more: &[&str]) -> anyhow::Result<(Stage, RunLog)> {
    let more = more.iter().map(|word| (*word).to_owned()).collect();
    let kind = EngineKind::Guarded { model: model.to_owned(), fault: fault.map(str::to_owned), more };
    let mut stage = Stage::launch(&kind, folder)?;
    stage.wait_ready().await?;
    Ok((stage, RunLog::open(folder)?))
}

/// No fault: the references are asked alone, then the crowd comes.
async fn calm_leg(
    folder: &Path,
    model: &Path,
    length: Duration,
    seed: u64,
    checks: &mut Checks,
) -> anyhow::Result<(Counts, Vec<String>)> {
    let (mut stage, mut log) = set(folder, model, None, &[]).await?;
    let pid = log.engine_pid()?;
    let references = crowd::ask_references(&stage.http, &stage.gate).await?;
    let crowd = Crowd::start(&stage.gate, CLIENTS, seed, &references);
    let begun = Instant::now();
    let mut samples: Vec<Sample> = Vec::new();
    while begun.elapsed() < length {
        tokio::time::sleep(Duration::from_millis(250)).await;
        samples.extend(memory(pid).map(|now| (begun.elapsed().as_secs_f64(), now.rss_mib)));
    }
    let counts = crowd.stop(GRACE).await;
    eprintln!("calm: {counts}");
    let again = crowd::ask_references(&stage.http, &stage.gate).await?;
    checks.check(again == references, "EP4: alone again the answers are the same");
    checks.check(counts.of(&Outcome::Broken) == 0, "no request breaks where nothing is wrong");
    checks.check(counts.of(&Outcome::Suspected) == 0, "nobody is called poison where nothing is wrong");
    checks.check(counts.all_kinds(), "every kind of end was seen");
    checks.check(stage.incidents().await?.is_empty(), "no incident where nothing is wrong");
    checks.check(log.engine_pid()? == pid, "one engine all the time");
    judge_memory(&samples, checks);
    judge_books(&stage, &counts, checks).await?;
    stage.stop().await?;
    Ok((counts, references))
}

/// No fault, and less room than clients: whoever finds none is told so by 429, and nobody's answer suffers.
async fn full_leg(
    folder: &Path,
    model: &Path,
    length: Duration,
    (references, seed): (&[String], u64),
    checks: &mut Checks,
) -> anyhow::Result<Counts> {
    let (mut stage, mut log) = set(folder, model, None, &FULL).await?;
    let pid = log.engine_pid()?;
    let crowd = Crowd::start(&stage.gate, CLIENTS, seed, references);
    tokio::time::sleep(length).await;
    let counts = crowd.stop(GRACE).await;
    eprintln!("full: {counts}");
    // nothing else refuses here: the one engine was there all the time, and ready
    checks.check(counts.of(&Outcome::Refused) > 0, "429: an engine that is full says so");
    checks.check(counts.of(&Outcome::Completed) > 0, "429: answers beside it");
    checks.check(counts.of(&Outcome::Broken) == 0, "429: no request breaks where nothing is wrong");
    checks.check(stage.incidents().await?.is_empty() && log.engine_pid()? == pid, "429: a full engine is no hang");
    stage.stop().await?;
    Ok(counts)
}

/// The first third is warm-up: caches fill, and the allocator learns what it needs.
fn judge_memory(samples: &[Sample], checks: &mut Checks) {
    let warm = &samples[samples.len() / 3..];
    let hours = warm.first().zip(warm.last()).map_or(0.0, |(first, last)| (last.0 - first.0) / 3600.0);
    let slope = slope_mib_per_hour(warm);
    let (peak, last) = (samples.iter().map(|s| s.1).fold(0.0, f64::max), samples.last().map_or(0.0, |s| s.1));
    for part in samples.chunks(samples.len().div_ceil(10).max(1)) {
        eprintln!("resident after {:.0} s: {:.1} MiB", part[0].0, part[0].1);
    }
    line("traffic_resident_first", format_args!("{:.1}", samples.first().map_or(0.0, |s| s.1)), "MiB", "-");
    line("traffic_resident_warm", format_args!("{:.1}", warm.first().map_or(0.0, |s| s.1)), "MiB", "-");
    line("traffic_resident_last", format_args!("{last:.1}"), "MiB", "-");
    line("traffic_resident_peak", format_args!("{peak:.1}"), "MiB", "-");
    line("traffic_resident_slope", format_args!("{slope:.2}"), "MiB/h", "-");
    line("traffic_resident_grown", format_args!("{:.2}", slope * hours), "MiB", format_args!("<={GROWN_MIB_MAX}"));
    if hours * 3600.0 >= JUDGED_S_MIN {
        checks.check(slope * hours <= GROWN_MIB_MAX, "memory is flat");
    }
}

/// Nobody is left in the engine, all blocks are back, and it has counted an end for each request that it took and no other.
async fn judge_books(stage: &Stage, counts: &Counts, checks: &mut Checks) -> anyhow::Result<()> {
    // Those who left a moment ago are noticed within a step or two.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (_, text) = http::get(&stage.http, &format!("{}/metrics", stage.engine), CALL).await?;
    let page = exposition::parse(&String::from_utf8_lossy(&text), Limits::default());
    checks.check(sum(&page, "truebeat:requests_in_flight", None)? == 0.0, "nobody is left in the engine");
    checks.check(sum(&page, "vllm:kv_cache_usage_perc", None)? == 0.0, "EP3: all blocks are back");
    let of_end = |wanted| sum(&page, "truebeat:requests_ended_total", wanted);
    let (ended, errors) = (of_end(None)?, of_end(Some(("end", "error")))?);
    let of_reason = |reason| sum(&page, "vllm:request_success_total", Some(("finished_reason", reason)));
    let finished = of_reason("stop")? + of_reason("length")?;
    checks.check(errors == 0.0, "EP5: nobody fails where nobody is poisoned");
    // Twice the references, asked alone; the agent's own question is a few more. Whoever left may have left before the engine heard of it.
    let own = 2.0 * ask::REFERENCES as f64;
    let (least, most) = (counts.of(&Outcome::Completed) as f64 + own, counts.posted() as f64 + own + 8.0);
    line("traffic_engine_ended", ended, "count", format_args!("{least}..{most}"));
    checks.check(finished >= least && ended <= most, "EP2: the engine's ends are those of its clients");
    Ok(())
}

/// The sum over a series, or over those of its samples with this label. A series that is not there is an error: nothing is seen in it.
fn sum(page: &Exposition, name: &str, wanted: Option<(&str, &str)>) -> anyhow::Result<f64> {
    ensure!(page.named(name).next().is_some(), "the engine's metrics have no {name}");
    let is_wanted = |sample: &&Sampled| wanted.is_none_or(|(label, value)| sample.label(label) == Some(value));
    Ok(page.named(name).filter(is_wanted).map(|sample| sample.value).sum())
}

/// Strikes, waits until the replica serves again, and strikes again, with the crowd all the time.
async fn fault_leg(
    folder: &Path,
    model: &Path,
    (fault, ranks, length): (&str, u32, Duration),
    references: &[String],
    seed: u64,
) -> anyhow::Result<(Counts, usize)> {
    let ranks = ranks.to_string();
    let (mut stage, mut log) = set(folder, model, Some(fault), &["--tensor-parallel", &ranks]).await?;
    let mut pid = log.engine_pid()?;
    let crowd = Crowd::start(&stage.gate, CLIENTS, seed, references);
    let (begun, mut times) = (Instant::now(), 0);
    while times == 0 || begun.elapsed() < length {
        tokio::time::sleep(WARM_UP).await;
        stage.hang_engine()?;
        pid = recovered(&stage, &mut log, pid).await?;
        times += 1;
    }
    // Answers after the last recovery are a part of it.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let counts = crowd.stop(GRACE).await;
    let again = crowd::ask_references(&stage.http, &stage.gate).await?;
    if again != references {
        bail!("after a restart the answers are others");
    }
    stage.stop().await?;
    Ok((counts, times))
}

/// Waits for another engine than `old_pid` that serves; returns its process.
async fn recovered(stage: &Stage, log: &mut RunLog, old_pid: i32) -> anyhow::Result<i32> {
    let begun = Instant::now();
    while begun.elapsed() < RECOVERY_MAX {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let pid = log.engine_pid()?;
        let ready = http::get(&stage.http, &format!("{}/readyz", stage.agent), CALL).await;
        if pid != old_pid && matches!(ready, Ok((200, _))) {
            return Ok(pid);
        }
    }
    bail!("no recovery within {RECOVERY_MAX:?}")
}
