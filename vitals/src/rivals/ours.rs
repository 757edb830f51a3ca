//! Our own detector as one rule among the others, and the family of policies that its curve is drawn over.

use super::{Acts, Alarm, Rule};
use crate::detector::Detector;
use crate::observation::{Ms, Observation};
use crate::policy::Policy;
use crate::verdict::Verdict;

/// What our own rule is called in traces, tables and `--rules`.
pub const OUR_NAME: &str = "truebeat";

/// Our curve: percent of every patience, and the name that such a rule has in accounts.
pub const SWEEP: [(u32, &str); 7] = [
    (10, "truebeat@10"),
    (25, "truebeat@25"),
    (50, "truebeat@50"),
    (100, OUR_NAME),
    (200, "truebeat@200"),
    (400, "truebeat@400"),
    (800, "truebeat@800"),
];

/// The detector behind the rivals' trait. The engine's start is the first observation's, as in a replay.
#[derive(Debug)]
pub struct Ours {
    name: &'static str,
    policy: Policy,
    detector: Option<Detector>,
}

impl Ours {
    pub fn new(policy: Policy) -> Self {
        Self { name: OUR_NAME, policy, detector: None }
    }
}

/// Ours at every point of the curve, that at 100 % among them.
pub fn swept(policy: &Policy) -> Vec<Box<dyn Rule>> {
    let one = |(percent, name): &(u32, &'static str)| -> Box<dyn Rule> {
        Box::new(Ours { name, policy: scaled(policy, *percent), detector: None })
    };
    SWEEP.iter().map(one).collect()
}

impl Rule for Ours {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        "work owed and no delivery for longer than this phase and batch have taught (docs/ARCHITECTURE.md)"
    }

    fn acts(&self) -> Acts {
        Acts::Evicts
    }

    fn step(&mut self, now_ms: Ms, obs: &Observation) -> Alarm {
        let policy = &self.policy;
        let detector = self.detector.get_or_insert_with(|| Detector::new(policy.clone(), now_ms));
        match detector.step(now_ms, obs).verdict {
            Verdict::Suspect(_) => Alarm::Suspect,
            Verdict::Stalled(_) | Verdict::Dead => Alarm::Evict,
            _ => Alarm::Quiet,
        }
    }
}

/// The policy with every deadline, factor and confirm time at `percent` of itself: one point of the curve. What is no patience stays:
/// the tick, how long a source counts as fresh, how much history counts as warm.
pub fn scaled(policy: &Policy, percent: u32) -> Policy {
    let ms = |value: Ms| (value.saturating_mul(Ms::from(percent)) / 100).max(1);
    let tenths = |value: u32| (value.saturating_mul(percent) / 100).max(1);
    Policy {
        native_floor_ms: ms(policy.native_floor_ms),
        native_between_ms: ms(policy.native_between_ms),
        foreign_floor_ms: ms(policy.foreign_floor_ms),
        admission_ms: ms(policy.admission_ms),
        decode_starved_ms: ms(policy.decode_starved_ms),
        lease_cap_ms: ms(policy.lease_cap_ms),
        startup_lease_cap_ms: ms(policy.startup_lease_cap_ms),
        patience_cap_ms: ms(policy.patience_cap_ms),
        idle_patience_ms: ms(policy.idle_patience_ms),
        startup_silence_ms: ms(policy.startup_silence_ms),
        crawl_times: ms(policy.crawl_times),
        native_factor_tenths: tenths(policy.native_factor_tenths),
        foreign_factor_tenths: tenths(policy.foreign_factor_tenths),
        confirm_strong_ms: ms(policy.confirm_strong_ms),
        confirm_moderate_ms: ms(policy.confirm_moderate_ms),
        confirm_weak_ms: ms(policy.confirm_weak_ms),
        confirm_timer_ms: ms(policy.confirm_timer_ms),
        ..policy.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_curve_has_one_rule_for_each_of_its_names() {
        let rules = swept(&Policy::default());
        let names: Vec<_> = rules.iter().map(|rule| rule.name()).collect();
        assert_eq!(names, SWEEP.map(|(_, name)| name));
        assert!(names.contains(&OUR_NAME));
    }

    #[test]
    fn the_middle_of_the_family_is_the_policy_itself() {
        let policy = Policy::default();
        assert_eq!(scaled(&policy, 100), policy);
        let half = scaled(&policy, 50);
        assert_eq!((half.foreign_floor_ms, half.native_factor_tenths), (1_250, 20));
        assert_eq!((half.tick_ms, half.fresh_ms), (policy.tick_ms, policy.fresh_ms));
    }
}
