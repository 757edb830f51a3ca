//! What a rule was worth on a set of histories: latencies of the hangs it caught, false alarms per hour of health.
//!
//! Pure data and arithmetic. `truebeat replay` fills it from recordings, the fleet simulation from virtual time; both add up
//! ([`RuleScore::add`]) and both go into the same table and the same chart.

use serde::{Deserialize, Serialize};

use crate::observation::Ms;

/// Hours of a year.
pub const HOURS_A_YEAR: f64 = 8_766.0;

/// One rule's account. A *fence* takes the replica out of traffic and is undone by itself; an *eviction* destroys the process (or
/// asks somebody who will). A rule that only fences counts no evictions; a rule that only evicts fences at the same moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RuleScore {
    pub rule: String,
    /// Hangs that were put before the rule.
    pub hangs: u64,
    /// Hangs in which it acted (fenced, warned or evicted: its first action) before they ended.
    pub caught: u64,
    /// From the first moment of a hang to the rule's first action, one entry a caught hang, in any order.
    pub latency_ms: Vec<Ms>,
    /// From the first moment of a hang to the rule's eviction, one entry a hang that it evicted.
    #[serde(default)]
    pub evict_latency_ms: Vec<Ms>,
    /// Engine-hours without a hang that it watched.
    pub benign_hours: f64,
    /// Intervals of health in which it fenced.
    pub false_fences: u64,
    /// Intervals of health in which it would have destroyed the engine.
    pub false_evictions: u64,
}

/// A rate with what it rests on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rate {
    /// Events an engine-year; an upper bound where `is_bound`.
    pub per_year: f64,
    /// No event was seen: the rate is the 95 % upper bound by the rule of three.
    pub is_bound: bool,
}

impl RuleScore {
    pub fn new(rule: &str) -> Self {
        Self { rule: rule.to_owned(), ..Self::default() }
    }

    /// Adds what the same rule did elsewhere.
    pub fn add(&mut self, other: &Self) {
        self.hangs += other.hangs;
        self.caught += other.caught;
        self.latency_ms.extend_from_slice(&other.latency_ms);
        self.evict_latency_ms.extend_from_slice(&other.evict_latency_ms);
        self.benign_hours += other.benign_hours;
        self.false_fences += other.false_fences;
        self.false_evictions += other.false_evictions;
    }

    /// The latency that `per_mille` of the hangs did not exceed (990 = p99), by the nearest rank. `None` where that share of them
    /// was not caught at all: a rule that misses hangs has no p99.
    pub fn latency_quantile_ms(&self, per_mille: u64) -> Option<Ms> {
        quantile(&self.latency_ms, self.hangs, per_mille)
    }

    /// The same of evictions.
    pub fn evict_quantile_ms(&self, per_mille: u64) -> Option<Ms> {
        quantile(&self.evict_latency_ms, self.hangs, per_mille)
    }

    /// The longest latency of those caught.
    pub fn latency_max_ms(&self) -> Option<Ms> {
        self.latency_ms.iter().max().copied()
    }

    /// Of the hangs, how many were caught, 0..=1; `None` without a hang.
    pub fn recall(&self) -> Option<f64> {
        (self.hangs > 0).then(|| self.caught as f64 / self.hangs as f64)
    }

    /// False evictions an engine-year.
    pub fn eviction_rate(&self) -> Option<Rate> {
        rate(self.false_evictions, self.benign_hours)
    }

    /// False fences an engine-year.
    pub fn fence_rate(&self) -> Option<Rate> {
        rate(self.false_fences, self.benign_hours)
    }
}

/// Events an engine-year; with no event, three a span of what was watched (the 95 % upper bound of a Poisson count of zero).
/// `None` where nothing was watched.
pub fn rate(events: u64, hours: f64) -> Option<Rate> {
    let seen = if events == 0 { 3.0 } else { events as f64 };
    (hours > 0.0).then(|| Rate { per_year: seen / hours * HOURS_A_YEAR, is_bound: events == 0 })
}

fn quantile(latencies: &[Ms], of: u64, per_mille: u64) -> Option<Ms> {
    let mut sorted = latencies.to_vec();
    sorted.sort_unstable();
    let rank = of.saturating_mul(per_mille.min(1000)).div_ceil(1000).max(1);
    sorted.get(usize::try_from(rank - 1).ok()?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_that_misses_hangs_has_no_quantile_beyond_what_it_caught() {
        let score = RuleScore { hangs: 10, caught: 5, latency_ms: vec![50, 10, 30, 20, 40], ..RuleScore::new("half") };
        assert_eq!(score.latency_quantile_ms(500), Some(50));
        assert_eq!(score.latency_quantile_ms(100), Some(10));
        assert_eq!(score.latency_quantile_ms(990), None);
        assert_eq!(score.latency_max_ms(), Some(50));
        assert_eq!(score.recall(), Some(0.5));
    }

    #[test]
    fn no_event_is_a_bound_and_no_hour_is_no_rate() {
        assert_eq!(rate(0, 3.0), Some(Rate { per_year: HOURS_A_YEAR, is_bound: true }));
        assert_eq!(rate(2, 1.0), Some(Rate { per_year: 2.0 * HOURS_A_YEAR, is_bound: false }));
        assert_eq!(rate(0, 0.0), None);
        assert_eq!(RuleScore::new("x").recall(), None);
    }

    #[test]
    fn scores_add_up() {
        let one = RuleScore { hangs: 1, caught: 1, latency_ms: vec![5], benign_hours: 0.5, ..RuleScore::new("x") };
        let mut sum = one.clone();
        sum.add(&one);
        assert_eq!((sum.hangs, sum.caught, sum.latency_ms.len(), sum.benign_hours), (2, 2, 2, 1.0));
    }
}
