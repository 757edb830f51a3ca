//! The pages of an engine's ranks from tick to tick: when each last moved, whose start-up moves, and who is behind the others.

use crate::excuse::Tick;
use crate::leaders::leads;
use crate::observation::{Ms, PageObs, PagePhase};

/// More pages than any engine has ranks are read in part.
const RANKS_MAX: usize = 1024;

/// One rank's page over time.
#[derive(Debug, Clone, Copy)]
struct RankSign {
    rank: u32,
    /// The data-parallel engine that it is of.
    engine: u32,
    leads: bool,
    steps: u64,
    /// Counted time of the last movement of the page's steps.
    moved_at: Ms,
    step_started_ms: Option<Ms>,
    /// Counted time at which the step under way began.
    step_at: Option<Ms>,
    phase: PagePhase,
    work_done: u64,
    seen: bool,
}

/// All ranks that were ever there.
#[derive(Debug, Clone, Default)]
pub struct Ranks(Vec<RankSign>);

impl Ranks {
    /// Takes the pages of one tick in. True where the start-up of any rank moved: a leader that waits for a worker that loads is none
    /// that stands still.
    pub fn look(&mut self, tick: &Tick, pages: &[PageObs]) -> bool {
        let mut startup_moved = false;
        for sign in &mut self.0 {
            sign.seen = false;
        }
        for page in pages.iter().take(RANKS_MAX) {
            let step_at = page.step_started_ms.map(|at| tick.mark(at));
            match self.0.iter_mut().find(|sign| sign.rank == page.rank) {
                Some(sign) => {
                    startup_moved |= page.phase != sign.phase || page.work_done > sign.work_done;
                    if page.steps_completed != sign.steps || page.step_started_ms != sign.step_started_ms {
                        (sign.moved_at, sign.step_at) = (tick.counted_ms, step_at);
                    }
                    (sign.steps, sign.step_started_ms) = (page.steps_completed, page.step_started_ms);
                    (sign.phase, sign.work_done) = (page.phase, page.work_done);
                    (sign.engine, sign.leads, sign.seen) = (page.engine(), leads(page), true);
                }
                None => self.0.push(RankSign {
                    rank: page.rank,
                    engine: page.engine(),
                    leads: leads(page),
                    steps: page.steps_completed,
                    moved_at: tick.counted_ms,
                    step_started_ms: page.step_started_ms,
                    step_at,
                    phase: page.phase,
                    work_done: page.work_done,
                    seen: true,
                }),
            }
        }
        startup_moved
    }

    /// Counted time at which the oldest step under way of any rank of this engine began, of those that have a page now. A worker may leave its
    /// last step open until it is given the next one (vLLM's before 0.12): of what was owed since, it is no silence.
    pub fn oldest_step_at(&self, engine: u32, owed_since: Ms) -> Option<Ms> {
        let began = |sign: &RankSign| sign.step_at.map(|at| if sign.leads { at } else { at.max(owed_since) });
        self.of(engine).filter(|sign| sign.seen).filter_map(began).min()
    }

    /// Counted time at which any rank of this engine last began or ended a step; 0 without pages.
    pub fn moved_at(&self, engine: u32) -> Ms {
        self.of(engine).map(|sign| sign.moved_at).max().unwrap_or(0)
    }

    /// Ranks of this engine that are behind: no page although it has more, or fewer steps than the furthest rank.
    pub fn silent(&self, pages: &[PageObs], engine: u32) -> Vec<u32> {
        let pages = || pages.iter().filter(|page| page.engine() == engine);
        let ranks = pages().map(PageObs::engine_ranks).max().unwrap_or(1);
        if ranks < 2 {
            return Vec::new();
        }
        let furthest = pages().map(|page| page.steps_completed).max().unwrap_or(0);
        let behind = pages().filter(|page| page.steps_completed < furthest).map(|page| page.rank);
        // only a rank that was once there can have fallen silent
        let gone = self.of(engine).filter(|sign| !sign.seen).map(|sign| sign.rank);
        let mut silent: Vec<u32> = behind.chain(gone).collect();
        silent.sort_unstable();
        silent.dedup();
        silent
    }

    fn of(&self, engine: u32) -> impl Iterator<Item = &RankSign> {
        self.0.iter().filter(move |sign| sign.engine == engine)
    }
}
