//! Phi-accrual on deliveries.

use std::collections::VecDeque;

use super::inside::{Deliveries, owed};
use super::{Acts, Alarm, Rule};
use crate::observation::{Ms, Observation};

/// Hayashibara's accrual detector in the form of Cassandra (gms/FailureDetector.java, 4.1): exponential arrivals, phi = silence / mean
/// / ln 10, window of 1000 intervals, `phi_convict_threshold` = 8, a first interval of 2 s before anything is known. A heartbeat is
/// an observation in which something was delivered to a client. With one a second, it convicts after 18.4 s.
///
/// Cassandra's nodes beat when idle; an engine delivers nothing then. The clock therefore stands while no client waits, which is
/// kinder than the rule as it is written.
#[derive(Debug)]
pub struct PhiAccrual {
    deliveries: Deliveries,
    intervals_ms: VecDeque<Ms>,
    /// Silence with clients waiting since the last delivery.
    silent_ms: Ms,
    seen_ms: Option<Ms>,
}

const WINDOW: usize = 1_000;
const FIRST_INTERVAL_MS: Ms = 2_000;
const PHI_CONVICT: f64 = 8.0;

impl Default for PhiAccrual {
    fn default() -> Self {
        Self {
            deliveries: Deliveries::default(),
            intervals_ms: VecDeque::from([FIRST_INTERVAL_MS]),
            silent_ms: 0,
            seen_ms: None,
        }
    }
}

impl PhiAccrual {
    fn phi(&self) -> f64 {
        let sum: Ms = self.intervals_ms.iter().sum();
        let mean_ms = sum as f64 / self.intervals_ms.len().max(1) as f64;
        self.silent_ms as f64 / mean_ms.max(1.0) / std::f64::consts::LN_10
    }
}

impl Rule for PhiAccrual {
    fn name(&self) -> &'static str {
        "phi-accrual"
    }

    fn about(&self) -> &'static str {
        "phi-accrual with phi = 8 on deliveries while clients wait, exponential form (Cassandra's FailureDetector.java)"
    }

    fn acts(&self) -> Acts {
        Acts::Evicts
    }

    fn step(&mut self, now_ms: Ms, obs: &Observation) -> Alarm {
        let past_ms = self.seen_ms.replace(now_ms).map_or(0, |seen| now_ms.saturating_sub(seen));
        if owed(obs) {
            self.silent_ms = self.silent_ms.saturating_add(past_ms);
        }
        if self.deliveries.moved(obs) {
            if self.silent_ms > 0 {
                self.intervals_ms.push_back(self.silent_ms);
            }
            if self.intervals_ms.len() > WINDOW {
                self.intervals_ms.pop_front();
            }
            self.silent_ms = 0;
        }
        if self.phi() > PHI_CONVICT { Alarm::Evict } else { Alarm::Quiet }
    }
}
