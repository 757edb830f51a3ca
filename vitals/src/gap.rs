//! What became of the engine while the agent did not run: a gap of the agent is no proof of a pause.
//!
//! A gap is discarded (V5), because nobody looked: a VM that was paused, a machine that was suspended. But an agent that merely
//! starves beside a busy engine loses its own time and not the engine's. Two things of the engine's own prove that it ran, and
//! how long: steps that turned, at no more than its usual pace, and CPU time, beyond what its usual share explains outside the gap.

use crate::leaders::{ENGINES_MAX, leads};
use crate::observation::{Ms, Observation, PageObs};
use crate::policy::Policy;

/// A gap beyond this is no starving: something stopped the agent, and nothing is made of it. (A fresh count costs little then.)
const STARVING_MS_MAX: Ms = 2_000;

/// Readings before a usual share means anything.
const READINGS_MIN: u32 = 10;

/// What is usual of this engine, carried from tick to tick.
#[derive(Debug, Clone, Default)]
pub struct GapWitness {
    /// One a data-parallel engine: whichever of them turned, the machine ran.
    turns: Vec<Turn>,
    cpu: Option<(Ms, u64)>,
    /// Slowly fading maximum of the tree's CPU share, in permille of one core.
    share_max: u64,
    readings: u32,
}

/// The steps of one engine's leader.
#[derive(Debug, Clone)]
struct Turn {
    engine: u32,
    /// Rank and steps of its page at the look before.
    last: Option<(u32, u64)>,
    /// Usual microseconds a step (slow average).
    pace_us: Option<u64>,
}

impl GapWitness {
    /// A new process: its counters begin anew, what is usual of it stays.
    pub fn restarted(&mut self) {
        self.turns.iter_mut().for_each(|turn| turn.last = None);
        self.cpu = None;
    }

    /// How much of the agent's gap the engine is proven to have run; at most the gap.
    pub fn ran_ms(&mut self, now_ms: Ms, elapsed_ms: Ms, gap_ms: Ms, obs: &Observation, policy: &Policy) -> Ms {
        let by_steps = self.by_steps(now_ms, elapsed_ms, gap_ms, obs, policy);
        let by_cpu = self.by_cpu(now_ms, gap_ms, obs, policy);
        if gap_ms > STARVING_MS_MAX { 0 } else { by_steps.max(by_cpu).min(gap_ms) }
    }

    fn by_steps(&mut self, now_ms: Ms, elapsed_ms: Ms, gap_ms: Ms, obs: &Observation, policy: &Policy) -> Ms {
        let pages = obs.pages.fresh(now_ms, policy.fresh_ms).map_or(&[][..], Vec::as_slice);
        let mut proven = 0;
        for page in pages.iter().filter(|page| leads(page)) {
            let place = match self.turns.iter().position(|turn| turn.engine == page.engine()) {
                Some(place) => place,
                None if self.turns.len() >= ENGINES_MAX => continue,
                None => {
                    self.turns.push(Turn { engine: page.engine(), last: None, pace_us: None });
                    self.turns.len() - 1
                }
            };
            if let Some(turn) = self.turns.get_mut(place) {
                proven = proven.max(turn.look(elapsed_ms, page));
            }
        }
        proven.saturating_sub(elapsed_ms.saturating_sub(gap_ms))
    }

    fn by_cpu(&mut self, now_ms: Ms, gap_ms: Ms, obs: &Observation, policy: &Policy) -> Ms {
        let Some(proc) = obs.proc.fresh(now_ms, policy.fresh_ms) else { return 0 };
        let at_ms = obs.proc.at_ms;
        let Some((last_ms, last_cpu)) = self.cpu.filter(|(last_ms, _)| at_ms > *last_ms) else {
            self.cpu.get_or_insert((at_ms, proc.cpu_ms));
            return 0;
        };
        self.cpu = Some((at_ms, proc.cpu_ms));
        let (used, span) = (proc.cpu_ms.saturating_sub(last_cpu), at_ms - last_ms);
        let share = used.saturating_mul(1000) / span;
        self.share_max = share.max(self.share_max.saturating_sub(self.share_max / 1024));
        self.readings = self.readings.saturating_add(1);
        if self.readings < READINGS_MIN {
            return 0;
        }
        used.saturating_sub(self.share_max.saturating_mul(span.saturating_sub(gap_ms)) / 1000)
    }
}

impl Turn {
    /// For how long it is proven to have run since the look before.
    fn look(&mut self, elapsed_ms: Ms, page: &PageObs) -> Ms {
        let before = self.last.replace((page.rank, page.steps_completed));
        // another rank's page may be the only one that can be read now: its count is no continuation
        let before = before.filter(|(rank, _)| *rank == page.rank);
        let steps = before.map_or(0, |(_, before)| page.steps_completed.saturating_sub(before));
        let Some(seen_us) = elapsed_ms.saturating_mul(1000).checked_div(steps).map(|us| us.max(1)) else { return 0 };
        let proven = self.pace_us.map_or(0, |pace_us| steps.saturating_mul(pace_us.min(seen_us)) / 1000);
        // a pause in between must not pass for the engine's own pace
        let lesson = self.pace_us.map_or(seen_us, |pace_us| seen_us.min(pace_us.saturating_mul(2).max(1)));
        self.pace_us =
            Some(self.pace_us.map_or(lesson, |pace_us| pace_us.saturating_mul(7).saturating_add(lesson) / 8));
        proven
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observation::{PagePhase, Signal};

    fn page(rank: u32, steps_completed: u64) -> PageObs {
        PageObs {
            rank,
            world_size: 2,
            engines: 2,
            steps_completed,
            tokens_delivered: steps_completed,
            requests_finished: 0,
            running: 1,
            waiting: 0,
            prompt_tokens_owed: 0,
            phase: PagePhase::Decode,
            phase_tokens: 0,
            phase_entered_ms: 0,
            lease_ms: 1_000,
            step_started_ms: None,
            work_done: 0,
            work_total: 0,
            published_ms: 0,
        }
    }

    /// Ten seconds of looks, then a gap of the agent of a second: how much of it the engines are proven to have run.
    fn proven(before: impl Fn(u64) -> Vec<PageObs>, after: Vec<PageObs>) -> Ms {
        let (mut gaps, policy) = (GapWitness::default(), Policy::default());
        let mut look = |now_ms, elapsed_ms, gap_ms, pages| {
            let obs = Observation { pages: Signal::at(now_ms, pages), ..Observation::default() };
            gaps.ran_ms(now_ms, elapsed_ms, gap_ms, &obs, &policy)
        };
        for turn in 0..100 {
            look(turn * 100, 100, 0, before(turn));
        }
        look(11_000, 1_100, 1_000, after)
    }

    #[test]
    fn whichever_data_parallel_engine_turned_the_machine_ran() {
        let before = |turn| vec![page(0, 7), page(1, turn * 2)];
        let ran_ms = proven(before, vec![page(0, 7), page(1, 198 + 22)]);
        assert!(ran_ms >= 900, "{ran_ms}");
        assert_eq!(proven(before, vec![page(0, 7), page(1, 198)]), 0);
    }

    #[test]
    fn the_steps_of_another_rank_prove_nothing() {
        let one = |rank, steps| PageObs { engines: 1, ..page(rank, steps) };
        assert_eq!(proven(|turn| vec![one(0, turn * 2), one(1, 1_000)], vec![one(1, 1_000)]), 0);
    }
}
