//! What became of the engine while the agent did not run: a gap of the agent is no proof of a pause.
//!
//! A gap is discarded (V5), because nobody looked: a VM that was paused, a machine that was suspended. But an agent that merely
//! starves beside a busy engine loses its own time and not the engine's. Two things of the engine's own prove that it ran, and
//! how long: steps that turned, at no more than its usual pace, and CPU time, beyond what its usual share explains outside the gap.

use crate::observation::{Ms, Observation};
use crate::policy::Policy;

/// A gap beyond this is no starving: something stopped the agent, and nothing is made of it. (A fresh count costs little then.)
const STARVING_MS_MAX: Ms = 2_000;

/// Readings before a usual share means anything.
const READINGS_MIN: u32 = 10;

/// What is usual of this engine, carried from tick to tick.
#[derive(Debug, Clone, Default)]
pub struct GapWitness {
    steps: Option<u64>,
    /// Usual microseconds a step (slow average).
    pace_us: Option<u64>,
    cpu: Option<(Ms, u64)>,
    /// Slowly fading maximum of the tree's CPU share, in permille of one core.
    share_max: u64,
    readings: u32,
}

impl GapWitness {
    /// A new process: its counters begin anew, what is usual of it stays.
    pub fn restarted(&mut self) {
        self.steps = None;
        self.cpu = None;
    }

    /// How much of the agent's gap the engine is proven to have run; at most the gap.
    pub fn ran_ms(&mut self, now_ms: Ms, elapsed_ms: Ms, gap_ms: Ms, obs: &Observation, policy: &Policy) -> Ms {
        let by_steps = self.by_steps(now_ms, elapsed_ms, gap_ms, obs, policy);
        let by_cpu = self.by_cpu(now_ms, gap_ms, obs, policy);
        if gap_ms > STARVING_MS_MAX { 0 } else { by_steps.max(by_cpu).min(gap_ms) }
    }

    fn by_steps(&mut self, now_ms: Ms, elapsed_ms: Ms, gap_ms: Ms, obs: &Observation, policy: &Policy) -> Ms {
        let pages = obs.pages.fresh(now_ms, policy.fresh_ms);
        let Some(page) = pages.and_then(|pages| pages.iter().min_by_key(|page| page.rank)) else { return 0 };
        let before = self.steps.replace(page.steps_completed);
        let steps = before.map_or(0, |before| page.steps_completed.saturating_sub(before));
        let Some(seen_us) = elapsed_ms.saturating_mul(1000).checked_div(steps).map(|us| us.max(1)) else { return 0 };
        let proven = self.pace_us.map_or(0, |pace_us| steps.saturating_mul(pace_us.min(seen_us)) / 1000);
        // a pause in between must not pass for the engine's own pace
        let lesson = self.pace_us.map_or(seen_us, |pace_us| seen_us.min(pace_us.saturating_mul(2).max(1)));
        self.pace_us =
            Some(self.pace_us.map_or(lesson, |pace_us| pace_us.saturating_mul(7).saturating_add(lesson) / 8));
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
