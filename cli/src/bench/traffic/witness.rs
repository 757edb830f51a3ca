//! What the engine's page says while clients talk to it, looked at twenty times a second. EP1: nothing of the engine waits past the moment at which
//! it would have given up. EP6: what the page counts as delivered goes up while something is owed, never down, and not at all once a fault has
//! struck. [`Judge`] is pure.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use heartbeat::page::{Beat, Phase};
use heartbeat::unknown::Unknown;
use heartbeat::{Reader, monotonic_ns};
use tokio::task::JoinHandle;

const MS: u64 = 1_000_000;
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Who looks was not run for so long: of what lies in between nothing is said.
const BLIND_MS_MIN: u64 = 500;
/// Of a step's own deadline, whatever its lease, and of the loop between two steps.
const STEP_MS_MIN: u64 = 600;
const TURN_MS_MIN: u64 = 2_000;
/// What is forgiven to who was ready to run and was not: as much again at most.
const FORGIVEN_TIMES: u64 = 2;
/// The guard outside the loop looks this much later; whoever gives up then ends within a second.
const GUARD_MS: u64 = 400;
const END_MS: u64 = 1_000;
/// The step in which a fault becomes due may still deliver what it has.
const STRUCK_MS: u64 = 500;

/// Judges one look after the other.
#[derive(Debug, Default)]
pub struct Judge {
    last: Option<Look>,
    /// What the present life counted at the first look that was long enough after the strike, if it was struck.
    struck: Option<(u32, Option<Beat>)>,
    struck_ns: u64,
    moved_ns: u64,
    /// The fault stops the whole process: then nothing in it can end it.
    stops: bool,
    pub seen: Seen,
}

/// What came of it.
#[derive(Debug, Default, Clone)]
pub struct Seen {
    pub looks: u64,
    /// Tokens of all lives, as they were counted last.
    pub tokens: u64,
    /// Steps that were counted while a struck engine delivered nothing.
    pub barren_steps: u64,
    /// Longest time past a lease, in ms.
    pub late_ms_max: u64,
    pub lies: Vec<String>,
}

#[derive(Debug, Clone, Copy)]
struct Look {
    pid: u32,
    beat: Beat,
    at_ns: u64,
}

impl Judge {
    /// `stops`: the fault stops the whole process.
    pub fn new(stops: bool) -> Self {
        Self { stops, ..Self::default() }
    }

    /// A fault was told to strike this process.
    pub fn strike(&mut self, pid: u32, now_ns: u64) {
        (self.struck, self.struck_ns) = (Some((pid, None)), now_ns);
    }

    /// A counter went back.
    pub fn went_back(&mut self, what: &str) {
        self.lie(format!("EP6: {what}"));
    }

    pub fn look(&mut self, pid: u32, beat: &Beat, now_ns: u64) {
        self.seen.looks += 1;
        let last = self.last.replace(Look { pid, beat: *beat, at_ns: now_ns });
        let same = last.filter(|last| last.pid == pid);
        let before = same.map_or(0, |last| last.beat.tokens_delivered);
        self.seen.tokens += beat.tokens_delivered.saturating_sub(before);
        let blind = same.is_none_or(|last| now_ns.saturating_sub(last.at_ns) > BLIND_MS_MIN * MS);
        let moved = same.is_none_or(|last| moves(&last.beat, beat));
        if blind || moved {
            self.moved_ns = now_ns;
        }
        if !blind && !self.stops {
            self.ends_in_time(beat, now_ns);
        }
        match self.struck.filter(|(struck, _)| *struck == pid) {
            Some((_, then)) => self.delivers_nothing(then, beat, now_ns),
            None => self.moves_on(beat, now_ns),
        }
    }

    /// EP1: whatever is past its lease is given up, and its process with it.
    fn ends_in_time(&mut self, beat: &Beat, now_ns: u64) {
        let (lasted_ms, allowed_ms) = lasted(beat, now_ns);
        let late_ms = lasted_ms.saturating_sub(allowed_ms);
        self.seen.late_ms_max = self.seen.late_ms_max.max(late_ms);
        if lasted_ms > FORGIVEN_TIMES * allowed_ms + GUARD_MS + END_MS {
            let phase = beat.phase;
            self.lie(format!("EP1: {phase:?} lasts {lasted_ms} ms, its lease was {allowed_ms} ms, and nobody ends it"));
        }
    }

    /// EP6: a heart that is struck counts nothing, whether its steps turn or not.
    fn delivers_nothing(&mut self, then: Option<Beat>, beat: &Beat, now_ns: u64) {
        if now_ns < self.struck_ns + STRUCK_MS * MS {
            return;
        }
        let Some(then) = then else {
            self.struck = self.struck.map(|(pid, _)| (pid, Some(*beat)));
            return;
        };
        let more = beat.tokens_delivered - then.tokens_delivered.min(beat.tokens_delivered);
        self.seen.barren_steps = self.seen.barren_steps.max(beat.steps_completed.saturating_sub(then.steps_completed));
        if more > 0 {
            self.lie(format!("EP6: {more} tokens are counted as delivered after the fault struck"));
        }
    }

    /// EP6: while something is owed, something is delivered, or a lease says until when nothing need be.
    fn moves_on(&mut self, beat: &Beat, now_ns: u64) {
        let still_ms = now_ns.saturating_sub(self.moved_ns) / MS;
        let allowed_ms = FORGIVEN_TIMES * lasted(beat, now_ns).1.max(TURN_MS_MIN) + END_MS;
        if in_steps(beat) && beat.running + beat.waiting > 0 && still_ms > allowed_ms {
            self.lie(format!(
                "EP6: {} requests are owed, and nothing moves for {still_ms} ms",
                beat.running + beat.waiting
            ));
        }
    }

    /// What goes on is wrong at each look: some of them say it all.
    fn lie(&mut self, what: String) {
        if self.seen.lies.len() < 20 {
            self.seen.lies.push(what);
        }
    }
}

/// Did anything that is owed move, or is nothing owed?
fn moves(before: &Beat, beat: &Beat) -> bool {
    beat.tokens_delivered != before.tokens_delivered
        || beat.requests_finished != before.requests_finished
        || beat.prompt_tokens_owed < before.prompt_tokens_owed
        || beat.running + beat.waiting == 0
}

fn in_steps(beat: &Beat) -> bool {
    matches!(beat.phase, Phase::Prefill | Phase::Decode)
}

/// How long the step, the loop or the phase has lasted, and how long it may, in ms.
fn lasted(beat: &Beat, now_ns: u64) -> (u64, u64) {
    let since_ms = |from_ns: u64| now_ns.saturating_sub(from_ns) / MS;
    let lease_ms = u64::from(beat.lease_ms);
    match beat.step_started_ns {
        0 if in_steps(beat) => (since_ms(beat.published_ns), lease_ms.max(TURN_MS_MIN)),
        0 => (since_ms(beat.phase_entered_ns), lease_ms),
        started_ns => (since_ms(started_ns), lease_ms.max(STEP_MS_MIN)),
    }
}

/// A witness at work.
#[derive(Debug)]
pub struct Witness {
    judge: Arc<Mutex<Judge>>,
    stop: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Witness {
    /// Looks at the page of this engine, and of those that follow it in the same folder.
    ///
    /// # Errors
    /// When the process does not say where its page is.
    pub fn start(pid: i32, stops: bool) -> anyhow::Result<Self> {
        let mut reader = Reader::open(&page_dir(pid)?, 0);
        let judge = Arc::new(Mutex::new(Judge::new(stops)));
        let stop = Arc::new(AtomicBool::new(false));
        let (theirs, until) = (Arc::clone(&judge), Arc::clone(&stop));
        let task = tokio::spawn(async move {
            while !until.load(Ordering::Relaxed) {
                look(&mut reader, &theirs);
                tokio::time::sleep(LOOK_EVERY).await;
            }
        });
        Ok(Self { judge, stop, task })
    }

    /// A fault is about to strike this process.
    pub fn strike(&self, pid: i32) {
        let pid = u32::try_from(pid).unwrap_or(0);
        self.judge.lock().unwrap_or_else(PoisonError::into_inner).strike(pid, monotonic_ns());
    }

    /// Ends the looking; what was seen.
    pub async fn stop(self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.task.await;
        self.judge.lock().unwrap_or_else(PoisonError::into_inner).seen.clone()
    }
}

fn look(reader: &mut Reader, judge: &Mutex<Judge>) {
    let page = reader.read();
    let mut judge = judge.lock().unwrap_or_else(PoisonError::into_inner);
    match page {
        Ok(page) => judge.look(page.identity.pid, &page.beat, monotonic_ns()),
        Err(error @ Unknown::WentBack { .. }) => judge.went_back(&error.to_string()),
        // between two lives there is no page, or one of the dead
        Err(_) => {}
    }
}

/// Where a process that `truebeat run` started has its page: it was told so.
fn page_dir(pid: i32) -> anyhow::Result<PathBuf> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).context("the engine has gone")?;
    let told = environment.split(|byte| *byte == 0).find_map(|word| word.strip_prefix(b"TRUEBEAT_PAGE_DIR="));
    let told = told.context("nobody told the engine where its page is")?;
    Ok(Path::new(&*String::from_utf8_lossy(told)).to_owned())
}

#[cfg(test)]
#[path = "witness_tests.rs"]
mod tests;
