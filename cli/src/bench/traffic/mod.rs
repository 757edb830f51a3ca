//! Real mixed traffic on a real engine with its guards on, through the gate: half of the time without a fault, in which nothing may
//! break, nobody may be suspected and the engine's memory must be flat; then an engine that is full, which must refuse with 429 and break
//! nothing; then one fault after the other, of the engine and of its ranks, struck again and again. All the
//! time each request must have exactly one end that is true (EP2), what is asked greedily must be answered byte for byte as it was
//! alone (EP4), and of those that the model makes no numbers of each fails alone (EP5); and a witness looks at the engine's page (EP1, EP6).

mod ask;
mod books;
mod crowd;
mod growth;
mod outcome;
mod poison;
mod witness;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use vitals::exposition::{self, Exposition, Limits};

use self::books::Books;
use self::crowd::{Counts, Crowd};
use self::growth::{Rest, Sample, kept_bytes_per_request, slope_mib_per_hour};
use self::outcome::Outcome;
use self::witness::{Seen, Witness};
use super::cost::memory;
use super::figures::line;
use super::run_log::RunLog;
use crate::http;
use crate::stage::{CALL, EngineKind, Stage};

const CLIENTS: u64 = 16;
/// What strikes, and how many ranks the engine has then.
const FAULTS: [(&str, u32); 13] = [
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
    ("sigstop:1", 2),
];
/// What the engine takes where it is to be full: fewer than there are clients.
const FULL: [&str; 4] = ["--max-num-seqs", "4", "--max-queue", "4"];
/// Traffic runs so long before a fault strikes, so that the detector sees a warm engine.
const WARM_UP: Duration = Duration::from_secs(4);
const RECOVERY_MAX: Duration = Duration::from_secs(60);
/// What clients are given to come to their ends.
const GRACE: Duration = Duration::from_secs(70);
/// So often the calm half comes to rest; the first third of the rests, and of the time, is warm-up.
const RESTS: usize = 9;
/// Threads that served end when nobody wants them for ten seconds, and with them what they keep for themselves; what the engine tells of that
/// may be five seconds old.
const REST: Duration = Duration::from_secs(16);
/// In less time than this, warm-up is not over: what is held is told and not judged.
const JUDGED_S_MIN: f64 = 300.0;
/// What may be kept of a request.
const KEPT_BYTES_MAX: f64 = 16.0;
/// Holes come slower and slower; what grows so fast after warm-up is none of the allocator's.
const GROWN_MIB_PER_HOUR_MAX: f64 = 16.0;

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
    poison::spoil(model)?;
    let (calm, mut checks) = (length / 2, Checks::default());
    let (mut all, references) = calm_leg(&out.join("traffic-calm"), model, calm, seed, &mut checks).await?;
    let share = (length - calm) / (FAULTS.len() + 1) as u32;
    all.add(full_leg(&out.join("traffic-full"), model, share, (&references, seed + 1), &mut checks).await?);
    let mut struck = 0;
    for ((fault, ranks), seed) in FAULTS.into_iter().zip(seed + 2..) {
        let folder = out.join(format!("traffic-{}", fault.replace(':', "-rank-")));
        let leg = fault_leg(&folder, model, (fault, ranks, share), &references, seed);
        let (counts, times, seen) = leg.await.with_context(|| format!("fault {fault}"))?;
        eprintln!("{fault}, struck {times} times: {counts}; {} ms past a lease at most", seen.late_ms_max);
        judge_witness(fault, &seen, &mut checks);
        // with no step there would be nothing that it could have counted
        checks.check(fault != "livelock" || seen.barren_steps > 0, "EP6: steps of a livelock turn, and count nothing");
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

/// No fault: the references are asked alone, then the crowd comes, and goes for a rest now and then.
async fn calm_leg(
    folder: &Path,
    model: &Path,
    length: Duration,
    seed: u64,
    checks: &mut Checks,
) -> anyhow::Result<(Counts, Vec<String>)> {
    let (mut stage, mut log) = set(folder, model, None, &[]).await?;
    let pid = log.engine_pid()?;
    let witness = Witness::start(pid, false)?;
    let references = crowd::ask_references(&stage.http, &stage.gate).await?;
    let (counts, samples, rests) = in_parts(&stage, pid, length, (seed, &references)).await?;
    eprintln!("calm: {counts}");
    let again = crowd::ask_references(&stage.http, &stage.gate).await?;
    checks.check(again == references, "EP4: alone again the answers are the same");
    checks.check(counts.of(&Outcome::Broken) == 0, "no request breaks where nothing is wrong");
    checks.check(counts.of(&Outcome::Suspected) == 0, "nobody is called poison where nothing is wrong");
    checks.check(counts.all_kinds(), "every kind of end was seen");
    checks.check(stage.incidents().await?.is_empty(), "no incident where nothing is wrong");
    checks.check(log.engine_pid()? == pid, "one engine all the time");
    judge_memory(&samples, &rests, checks);
    // Those who left a moment ago are noticed within a step or two.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let page = metrics(&stage).await?;
    let seen = witness.stop().await;
    books::judge(&Books::of(&page, seen.tokens)?, &counts, checks);
    judge_witness("calm", &seen, checks);
    stage.stop().await?;
    Ok((counts, references))
}

/// One crowd after the other, and a rest after each.
async fn in_parts(
    stage: &Stage,
    pid: i32,
    length: Duration,
    (seed, references): (u64, &[String]),
) -> anyhow::Result<(Counts, Vec<Sample>, Vec<Rest>)> {
    let (begun, mut counts) = (Instant::now(), Counts::default());
    let (mut samples, mut rests): (Vec<Sample>, Vec<Rest>) = (Vec::new(), Vec::new());
    for part in 1..=RESTS {
        let seed = seed.wrapping_mul(RESTS as u64 + 1) + part as u64;
        let crowd = Crowd::start(&stage.gate, CLIENTS, seed, references);
        while begun.elapsed() < length * part as u32 / RESTS as u32 {
            tokio::time::sleep(Duration::from_millis(250)).await;
            samples.extend(memory(pid).map(|now| (begun.elapsed().as_secs_f64(), now.rss_mib)));
        }
        counts.add(crowd.stop(GRACE).await);
        tokio::time::sleep(REST.min(length / 30)).await;
        let held = books::sum(&metrics(stage).await?, "truebeat:heap_held_bytes", None)?;
        eprintln!("after {} requests, at rest: {held} bytes held", counts.posted());
        rests.push((counts.posted() as f64, held));
    }
    Ok((counts, samples, rests))
}

/// The engine's own metrics.
async fn metrics(stage: &Stage) -> anyhow::Result<Exposition> {
    let (_, text) = http::get(&stage.http, &format!("{}/metrics", stage.engine), CALL).await?;
    Ok(exposition::parse(&String::from_utf8_lossy(&text), Limits::default()))
}

/// What was seen in the engine's page while `what` went on.
fn judge_witness(what: &str, seen: &Seen, checks: &mut Checks) {
    seen.lies.iter().for_each(|lie| println!("{what}: {lie}"));
    checks.check(seen.looks > 0, &format!("{what}: the engine's page is there to be looked at"));
    let of = |rule: &str| seen.lies.iter().any(|lie| lie.starts_with(rule));
    checks.check(!of("EP1"), &format!("{what}: EP1: whatever lasts past its lease is ended"));
    checks.check(!of("EP6"), &format!("{what}: EP6: the heart counts what is delivered, and nothing else"));
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
    let witness = Witness::start(pid, false)?;
    let crowd = Crowd::start(&stage.gate, CLIENTS, seed, references);
    tokio::time::sleep(length).await;
    let counts = crowd.stop(GRACE).await;
    eprintln!("full: {counts}");
    // nothing else refuses here: the one engine was there all the time, and ready
    checks.check(counts.of(&Outcome::Refused) > 0, "429: an engine that is full says so");
    checks.check(counts.of(&Outcome::Completed) > 0, "429: answers beside it");
    checks.check(counts.of(&Outcome::Broken) == 0, "429: no request breaks where nothing is wrong");
    checks.check(stage.incidents().await?.is_empty() && log.engine_pid()? == pid, "429: a full engine is no hang");
    judge_witness("full", &witness.stop().await, checks);
    stage.stop().await?;
    Ok(counts)
}

/// The first third is warm-up: caches fill, and the allocator learns what it needs.
fn judge_memory(samples: &[Sample], rests: &[Rest], checks: &mut Checks) {
    let (warm, rests) = (&samples[samples.len() / 3..], &rests[rests.len() / 3..]);
    let warm_s = warm.first().zip(warm.last()).map_or(0.0, |(first, last)| last.0 - first.0);
    let (slope, kept) = (slope_mib_per_hour(warm), kept_bytes_per_request(rests));
    let (peak, last) = (samples.iter().map(|s| s.1).fold(0.0, f64::max), samples.last().map_or(0.0, |s| s.1));
    for part in samples.chunks(samples.len().div_ceil(10).max(1)) {
        eprintln!("resident after {:.0} s: {:.1} MiB", part[0].0, part[0].1);
    }
    line("traffic_held_last", format_args!("{:.0}", rests.last().map_or(f64::NAN, |rest| rest.1)), "bytes", "-");
    line("traffic_kept", format_args!("{kept:.1}"), "bytes/request", format_args!("<={KEPT_BYTES_MAX}"));
    line("traffic_resident_first", format_args!("{:.1}", samples.first().map_or(0.0, |s| s.1)), "MiB", "-");
    line("traffic_resident_warm", format_args!("{:.1}", warm.first().map_or(0.0, |s| s.1)), "MiB", "-");
    line("traffic_resident_last", format_args!("{last:.1}"), "MiB", "-");
    line("traffic_resident_peak", format_args!("{peak:.1}"), "MiB", "-");
    line("traffic_resident_slope", format_args!("{slope:.2}"), "MiB/h", format_args!("<={GROWN_MIB_PER_HOUR_MAX}"));
    if warm_s >= JUDGED_S_MIN {
        checks.check(kept <= KEPT_BYTES_MAX, "memory is flat: nothing is kept of requests");
        checks.check(slope <= GROWN_MIB_PER_HOUR_MAX, "memory is flat: nothing is resident for ever");
    }
}

/// Strikes, waits until the replica serves again, and strikes again, with the crowd all the time.
async fn fault_leg(
    folder: &Path,
    model: &Path,
    (fault, ranks, length): (&str, u32, Duration),
    references: &[String],
    seed: u64,
) -> anyhow::Result<(Counts, usize, Seen)> {
    let ranks = ranks.to_string();
    let (mut stage, mut log) = set(folder, model, Some(fault), &["--tensor-parallel", &ranks]).await?;
    let mut pid = log.engine_pid()?;
    let witness = Witness::start(pid, fault == "sigstop")?;
    let crowd = Crowd::start(&stage.gate, CLIENTS, seed, references);
    let (begun, mut times) = (Instant::now(), 0);
    while times == 0 || begun.elapsed() < length {
        tokio::time::sleep(WARM_UP).await;
        witness.strike(pid);
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
    let seen = witness.stop().await;
    stage.stop().await?;
    Ok((counts, times, seen))
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
