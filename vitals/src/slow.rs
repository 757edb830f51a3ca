//! `Slow`: tokens come, but far slower than this engine's own past. Never fenced: slow beats nothing.

use crate::excuse::Tick;
use crate::observation::Ms;
use crate::policy::Policy;
use crate::rhythm::Histogram;
use crate::signs::Sight;

const WINDOW_MS: Ms = 10_000;
/// Windows of history before a comparison means anything.
const WINDOWS_MIN: u32 = 3;

/// Milliseconds a token and request, over windows of ten seconds of owed work.
#[derive(Debug, Clone, Default)]
pub struct SlowMeter {
    window_ms: Ms,
    request_ms: u64,
    tokens: u64,
    history: Histogram,
    last: Option<Ms>,
    slow: bool,
}

impl SlowMeter {
    pub fn restarted(&mut self) {
        self.window_ms = 0;
        self.request_ms = 0;
        self.tokens = 0;
        self.slow = false;
        self.last = None;
    }

    /// Takes one tick in and says whether the engine is slow now.
    pub fn tick(&mut self, tick: &Tick, sight: &Sight<'_>, policy: &Policy) -> bool {
        let span = tick.counted_ms.saturating_sub(tick.counted_before_ms.max(1)).min(WINDOW_MS);
        let Some(owed) = sight.owed else {
            self.slow = false;
            return false;
        };
        self.window_ms = self.window_ms.saturating_add(span);
        self.request_ms = self.request_ms.saturating_add(span.saturating_mul(u64::from(owed.requests)));
        self.tokens = self.tokens.saturating_add(sight.delivered_count);
        if self.window_ms >= WINDOW_MS {
            self.close_window(policy);
        }
        self.slow
    }

    /// The last full window's milliseconds a token and request, and the learned median.
    pub fn figures(&self) -> Option<(Ms, Ms)> {
        Some((self.last?, self.history.quantile(500)?))
    }

    fn close_window(&mut self, policy: &Policy) {
        if let Some(pace) = self.request_ms.checked_div(self.tokens) {
            let usual = self.history.quantile(500).filter(|_| self.history.samples() >= WINDOWS_MIN);
            self.slow = usual.is_some_and(|usual| {
                pace >= policy.slow_token_ms_min && pace >= usual.saturating_mul(u64::from(policy.slow_factor))
            });
            if !self.slow {
                self.history.record(pace.max(1));
            }
            self.last = Some(pace);
        }
        self.window_ms = 0;
        self.request_ms = 0;
        self.tokens = 0;
    }
}
