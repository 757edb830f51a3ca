//! The heartbeat pages as observations: nanoseconds to milliseconds, and silence where a page cannot be believed (H2, H8).
//!
//! Reads `rank-<n>.beat` in the page directory and `/proc`, through `heartbeat::Reader` alone.

use std::path::Path;

use heartbeat::Reader;
use heartbeat::page::{Page, Phase, StepRecord};
use vitals::observation::{PageObs, PagePhase};

/// Ranks that are read, whatever the configuration says.
const RANKS_MAX: u32 = 1_024;

/// The pages of one engine.
#[derive(Debug)]
pub struct PageSource {
    ranks: Vec<Rank>,
}

#[derive(Debug)]
struct Rank {
    rank: u32,
    reader: Reader,
    /// Why the last read said nothing: told once, not ten times a second.
    unknown: Option<&'static str>,
}

/// One look at all pages.
#[derive(Debug, Default)]
pub struct PageLook {
    /// The pages that can be believed, by rank.
    pub pages: Vec<PageObs>,
    /// The process to look at: of the rank that is furthest behind.
    pub pid: Option<i32>,
}

impl PageSource {
    /// Touches nothing yet. Without a nonce every live process's page is taken.
    pub fn new(dir: &Path, ranks: u32, nonce: Option<u64>) -> Self {
        let reader = |rank| match nonce {
            Some(nonce) => Reader::open(dir, rank).with_nonce(nonce),
            None => Reader::open(dir, rank),
        };
        let ranks = (0..ranks.min(RANKS_MAX)).map(|rank| Rank { rank, reader: reader(rank), unknown: None }).collect();
        Self { ranks }
    }

    /// Reads every rank. A stale, torn or absent page is no entry.
    pub fn look(&mut self) -> PageLook {
        let mut look = PageLook::default();
        let mut behind: Option<(u64, i32)> = None;
        for rank in &mut self.ranks {
            let Some(page) = rank.read() else { continue };
            if let Ok(pid) = i32::try_from(page.identity.pid)
                && behind.is_none_or(|(steps, _)| page.beat.steps_completed < steps)
            {
                behind = Some((page.beat.steps_completed, pid));
            }
            look.pages.push(observed(&page));
        }
        look.pid = behind.map(|(_, pid)| pid);
        look
    }

    /// The flight recorders of all ranks, rank by rank, oldest step first. Works on the page of a dead process too.
    pub fn steps(&mut self) -> Vec<StepRecord> {
        self.ranks.iter_mut().filter_map(|rank| rank.reader.steps().ok()).flatten().collect()
    }
}

impl Rank {
    fn read(&mut self) -> Option<Page> {
        match self.reader.read() {
            Ok(page) => {
                self.unknown = None;
                Some(page)
            }
            Err(unknown) => {
                let reason = unknown.reason();
                if self.unknown.replace(reason) != Some(reason) {
                    tracing::debug!(rank = self.rank, reason, %unknown, "page says nothing");
                }
                None
            }
        }
    }
}

fn observed(page: &Page) -> PageObs {
    let (identity, beat) = (&page.identity, &page.beat);
    PageObs {
        rank: identity.rank,
        world_size: identity.world_size,
        steps_completed: beat.steps_completed,
        tokens_delivered: beat.tokens_delivered,
        requests_finished: beat.requests_finished,
        running: beat.running,
        waiting: beat.waiting,
        prompt_tokens_owed: beat.prompt_tokens_owed,
        phase: phase(beat.phase),
        phase_tokens: beat.phase_tokens,
        phase_entered_ms: ms(beat.phase_entered_ns),
        lease_ms: u64::from(beat.lease_ms),
        step_started_ms: Some(beat.step_started_ns).filter(|ns| *ns != 0).map(ms),
        work_done: beat.work_done,
        work_total: beat.work_total,
        published_ms: ms(beat.published_ns),
    }
}

fn ms(ns: u64) -> u64 {
    ns / 1_000_000
}

fn phase(phase: Phase) -> PagePhase {
    match phase {
        Phase::Load => PagePhase::Load,
        Phase::Compile => PagePhase::Compile,
        Phase::Capture => PagePhase::Capture,
        Phase::WarmUp => PagePhase::WarmUp,
        Phase::Idle => PagePhase::Idle,
        Phase::Prefill => PagePhase::Prefill,
        Phase::Decode => PagePhase::Decode,
        Phase::Sleep => PagePhase::Sleep,
        Phase::Drain => PagePhase::Drain,
    }
}
