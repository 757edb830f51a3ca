//! How much noise this machine makes, and so how low the floor of a fast engine's deadline may be (V3, V6).
//!
//! The worst lateness of our own ticks and the worst age of a step that then went on, over the last minute or two of decode. Where
//! four times that fits under the floor, the floor comes down to it; a fence that turns out wrong costs the low floor for long.

use crate::excuse::Tick;
use crate::observation::{Ms, PagePhase};
use crate::policy::Policy;
use crate::signs::Sight;

const WINDOW_MS: Ms = 60_000;
/// Added to four times the worst: two looks that are as close as looks can be, and the walk over /proc between them.
const MARGIN_MS: Ms = 50;
const PENALTY_MS_MAX: Ms = 86_400_000;

/// Two windows of noise, the current one and the one before.
#[derive(Debug, Clone, Default)]
pub struct Noise {
    began_ms: Ms,
    worst_ms: [Ms; 2],
    decoded_ms: [Ms; 2],
    /// The age of the step under way at the last look.
    pending_ms: Ms,
    decoding: bool,
    /// How late our own looks came since the engine last finished a step: so much of its silence nobody saw.
    late_ms: Ms,
    /// Until then the low floor is not used, because it was wrong; and for how long the next time.
    burned_until_ms: Ms,
    penalty_ms: Ms,
}

impl Noise {
    /// Takes one tick in; `asked_ms` is when the look before asked for this one. Only decode counts, which is what the floor is for, and
    /// of a process that is `warm`: what its first steps wait for (pages, caches, code) is its own and not the machine's.
    pub fn look(&mut self, tick: &Tick, sight: &Sight<'_>, warm: bool, asked_ms: Ms) {
        let Some(page) = sight.native() else { return };
        if tick.now_ms.saturating_sub(self.began_ms) >= WINDOW_MS {
            let stale = tick.now_ms.saturating_sub(self.began_ms) >= 2 * WINDOW_MS;
            self.worst_ms = [if stale { 0 } else { self.worst_ms[1] }, 0];
            self.decoded_ms = [if stale { 0 } else { self.decoded_ms[1] }, 0];
            self.began_ms = tick.now_ms;
        }
        let late_ms = tick.elapsed_ms.saturating_sub(asked_ms);
        self.late_ms = if sight.steps_done > 0 { 0 } else { self.late_ms.saturating_add(late_ms) };
        let decodes = warm && page.phase == PagePhase::Decode && page.running > 0;
        if let Some(step_ms) = tick.lived_ms.checked_div(sight.steps_done) {
            if self.decoding && decodes {
                self.worst_ms[1] = self.worst_ms[1].max(late_ms).max(self.pending_ms).max(step_ms);
                self.decoded_ms[1] = self.decoded_ms[1].saturating_add(tick.lived_ms);
            }
            self.pending_ms = 0;
        }
        let age = page.step_started_ms.map_or(0, |at| tick.now_ms.saturating_sub(at));
        self.pending_ms = if decodes { self.pending_ms.max(age) } else { 0 };
        self.decoding = decodes;
    }

    /// The floor of a learned deadline of a native step.
    pub fn floor_ms(&self, now_ms: Ms, policy: &Policy) -> Ms {
        let seen = self.decoded_ms[0].saturating_add(self.decoded_ms[1]) >= policy.native_calm_ms;
        if !seen || now_ms < self.burned_until_ms {
            return policy.native_floor_ms;
        }
        let worst = self.worst_ms[0].max(self.worst_ms[1]);
        worst
            .saturating_mul(4)
            .saturating_add(MARGIN_MS)
            .max(policy.native_floor_calm_ms)
            .saturating_add(self.late_ms)
            .min(policy.native_floor_ms)
    }

    /// A fence that only the low floor made was lifted by a delivery: it was wrong. Each further time costs twice as long.
    pub fn was_wrong(&mut self, now_ms: Ms, policy: &Policy) {
        self.penalty_ms = self.penalty_ms.saturating_mul(2).max(policy.native_calm_penalty_ms).min(PENALTY_MS_MAX);
        self.burned_until_ms = now_ms.saturating_add(self.penalty_ms);
    }
}
