//! How long a step may last: learned from the steps before it, scaled by its size. Pure.

use crate::beat::StepShape;

/// A step may take so many times what its size took before.
const FACTOR: u64 = 20;
/// No lease is shorter (a loaded machine may not run us for a while) or longer (the rivals' patience) than these.
const LEASE_MS_MIN: u64 = 400;
const LEASE_MS_MAX: u64 = 300_000;

/// A step is believed to have taken so many times what was expected of it, or the shortest lease, whichever is longer: what is beyond that is
/// a machine that stood still, and would make for leases of minutes. A step that did take longer is followed by others that say so too.
const BELIEVED_MAX: f64 = 4.0;

/// What steps cost lately: nanoseconds a decode token, and nanoseconds a unit of prefill work. A slower step is believed at
/// once, faster ones move the estimate by an eighth each. A wide batch is cheaper a token than a narrow one; taken by the
/// token, the first wide step after narrow ones gets a lease that is too long rather than too short.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LeaseModel {
    decode_token_ns: f64,
    prefill_unit_ns: f64,
}

impl LeaseModel {
    /// Takes in one finished step.
    pub fn learn(&mut self, shape: &StepShape, took_ns: u64) {
        let learned = if shape.prefill_units > 0 { self.prefill_unit_ns } else { self.decode_token_ns } > 0.0;
        let believed_ns = (self.expected_ns(shape) * BELIEVED_MAX).max(LEASE_MS_MIN as f64 * 1e6);
        let took_ns = if learned { (took_ns as f64).min(believed_ns) } else { took_ns as f64 };
        if shape.prefill_units > 0 {
            let rest = (took_ns - self.decode_ns(shape)).max(took_ns / 2.0);
            blend(&mut self.prefill_unit_ns, rest / shape.prefill_units as f64);
        } else {
            blend(&mut self.decode_token_ns, took_ns / shape.decode_tokens.max(1) as f64);
        }
    }

    /// The lease of a step of this shape.
    pub fn lease_ms(&self, shape: &StepShape) -> u32 {
        let lease = ((self.expected_ns(shape) / 1e6) as u64).saturating_mul(FACTOR);
        u32::try_from(lease.clamp(LEASE_MS_MIN, LEASE_MS_MAX)).unwrap_or(u32::MAX)
    }

    fn expected_ns(&self, shape: &StepShape) -> f64 {
        self.decode_ns(shape) + self.prefill_unit_ns * shape.prefill_units as f64
    }

    fn decode_ns(&self, shape: &StepShape) -> f64 {
        self.decode_token_ns * shape.decode_tokens as f64
    }
}

fn blend(estimate: &mut f64, seen: f64) {
    *estimate = if seen > *estimate { seen } else { *estimate + (seen - *estimate) / 8.0 };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefill(units: u64) -> StepShape {
        StepShape { requests: 1, prefill_tokens: 1, decode_tokens: 0, prefill_units: units }
    }

    #[test]
    fn leases_grow_with_the_step_and_stay_within_bounds() {
        let mut m = LeaseModel::default();
        assert_eq!(m.lease_ms(&prefill(1)), 400, "nothing learned: the floor");
        m.learn(&prefill(1_000), 100_000_000);
        assert_eq!(m.lease_ms(&prefill(1_000)), 2_000);
        assert_eq!(m.lease_ms(&prefill(10_000)), 20_000);
        assert_eq!(m.lease_ms(&prefill(u64::MAX)), 300_000);
    }

    #[test]
    fn a_machine_that_stood_still_does_not_make_leases_of_minutes() {
        let mut m = LeaseModel::default();
        let (decode, minute) = (StepShape { requests: 1, decode_tokens: 1, ..Default::default() }, 60_000_000_000);
        for shape in [decode, prefill(1_000)] {
            m.learn(&shape, 10_000_000);
            m.learn(&shape, minute);
            assert!(m.lease_ms(&shape) <= 8_000 + 400, "{} ms", m.lease_ms(&shape));
            m.learn(&shape, minute);
            m.learn(&shape, minute);
            assert!(m.lease_ms(&shape) > 100_000, "steps that do take so long are believed");
        }
        let mut long = LeaseModel::default();
        long.learn(&decode, 2_000_000_000);
        long.learn(&decode, minute);
        assert_eq!(long.lease_ms(&decode), 160_000);
    }

    #[test]
    fn slower_is_believed_at_once_and_faster_slowly() {
        let mut m = LeaseModel::default();
        let decode = StepShape { requests: 1, decode_tokens: 1, ..Default::default() };
        m.learn(&decode, 200_000_000);
        m.learn(&decode, 100_000);
        assert!(m.lease_ms(&decode) > 3_000);
        let wide = StepShape { requests: 8, decode_tokens: 8, ..Default::default() };
        assert!(m.lease_ms(&wide) > 8 * 3_000, "a wide batch gets its share a token");
        for _ in 0..100 {
            m.learn(&decode, 100_000);
        }
        assert_eq!(m.lease_ms(&decode), 400);
    }
}
