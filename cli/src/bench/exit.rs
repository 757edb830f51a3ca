//! An engine that is killed (1a): how soon its supervisor has noticed, and how soon the detector's verdict says so. Each kill has a
//! `truebeat run` of its own, for a crash that follows a crash is restarted ever later.
//!
//! Before anybody can notice, the kernel has to take the process down, page by page, on a core that others use as well. A witness, which waits
//! for nothing but that (a pidfd), tells it apart. Both readers ask for short turns of the processor: one that waits for a core measures itself.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use agent::short_slice;
use anyhow::{Context, anyhow};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use super::figures::{Sorted, line};
use super::run_log::RunLog;
use crate::stage::{EngineKind, Stage};

const NOTICED_MAX: Duration = Duration::from_secs(10);
const GOAL_P99_MS: f64 = 5.0;

/// Kills `count` engines; true when the goal is met.
pub async fn run(out: &Path, model: &Path, count: u32) -> anyhow::Result<bool> {
    let mut kills = Vec::new();
    for number in 1..=count {
        let seen = one_kill(out, model).await.with_context(|| format!("kill {number} of {count}"))?;
        let Seen { gone_ms, noticed_ms, judged_ms } = seen;
        eprintln!(
            "kill {number}/{count}: gone after {gone_ms:.2} ms, noticed after {noticed_ms:.2}, judged after {judged_ms:.2}"
        );
        kills.push(seen);
    }
    line("exits_killed", kills.len(), "count", "-");
    let goal = format!("<={GOAL_P99_MS}");
    let tell = |name: &str, of: fn(&Seen) -> f64, goal: &str| {
        let values = Sorted::from(kills.iter().map(of).collect::<Vec<_>>());
        line(&format!("exit_{name}_p50"), format_args!("{:.2}", values.quantile(0.5)), "ms", "-");
        line(&format!("exit_{name}_p99"), format_args!("{:.2}", values.quantile(0.99)), "ms", goal);
        line(&format!("exit_{name}_max"), format_args!("{:.2}", values.max()), "ms", "-");
        values.quantile(0.99)
    };
    tell("gone", |seen| seen.gone_ms, "-");
    let noticed_p99 = tell("noticed", |seen| seen.noticed_ms, &goal);
    // the two words come from two processes at work on the same cores: the witness may well be the later one
    tell("noticed_after_gone", |seen| (seen.noticed_ms - seen.gone_ms).max(0.0), "-");
    tell("judged", |seen| seen.judged_ms, "-");
    Ok(noticed_p99 <= GOAL_P99_MS)
}

/// Milliseconds from SIGKILL.
#[derive(Debug, Clone, Copy)]
struct Seen {
    /// To the kernel's word that the process has ended.
    gone_ms: f64,
    /// To the supervisor's.
    noticed_ms: f64,
    /// To the verdict that follows from it.
    judged_ms: f64,
}

async fn one_kill(out: &Path, model: &Path) -> anyhow::Result<Seen> {
    let folder = out.join("exit");
    let kind = EngineKind::Truebeat { model: model.to_owned(), fault: None };
    let mut stage = Stage::launch(&kind, &folder)?;
    let measured = async {
        stage.wait_ready().await?;
        let log = RunLog::open(&folder)?;
        tokio::task::spawn_blocking(move || kill_and_watch(log)).await?
    };
    let measured = measured.await;
    stage.stop_after(measured).await
}

fn kill_and_watch(mut log: RunLog) -> anyhow::Result<Seen> {
    short_slice::ask().context("could not ask for short turns of the processor")?;
    let pid = log.engine_pid()?;
    let ended = format!("the engine (pid {pid}) ended");
    let noticed = |line: &str| line.contains(&ended);
    // where the next engine is there before the verdict is told, the verdict is about that one
    let judged = |line: &str| line.contains("verdict Dead") || line.contains("verdict Starting");
    let engine = Pid::from_raw(pid).with_context(|| format!("{pid} is no engine's pid"))?;
    let pidfd =
        pidfd_open(engine, PidfdFlags::empty()).with_context(|| format!("could not watch the engine, pid {pid}"))?;
    let witness = std::thread::spawn(move || wait_for_end(&pidfd));
    let killed = Instant::now();
    kill_process(engine, Signal::KILL).with_context(|| format!("could not kill the engine, pid {pid}"))?;
    let [noticed, judged] = log.wait_for([&noticed, &judged], NOTICED_MAX)?;
    let gone = witness.join().map_err(|_| anyhow!("the witness of the engine's end failed"))?;
    let [gone_ms, noticed_ms, judged_ms] = [gone.context("could not wait for the engine's end")?, noticed, judged]
        .map(|at| at.duration_since(killed).as_secs_f64() * 1000.0);
    Ok(Seen { gone_ms, noticed_ms, judged_ms })
}

/// Blocks until the process has ended; returns when it was told so.
fn wait_for_end(pidfd: &OwnedFd) -> nix::Result<Instant> {
    short_slice::ask()?;
    let timeout = PollTimeout::try_from(NOTICED_MAX).map_err(|_| Errno::EINVAL)?;
    match poll(&mut [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)], timeout)? {
        0 => Err(Errno::ETIMEDOUT),
        _ => Ok(Instant::now()),
    }
}
