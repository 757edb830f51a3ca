//! What steps cost on this machine, learned from those that ran: enough to say how long a prompt will take and how much of it fits
//! beside the decodes. Pure. It is no promise: a lease (H5) is learned elsewhere, and is far more patient.

/// Chunks below this say more about the step around them than about themselves.
const PREFILL_TOKENS_MIN: usize = 16;

/// A step that took so many times what was expected says that the machine stood still, not that tokens cost that much.
const BELIEVED_MAX: f64 = 2.0;
/// What a refusal leaves of the estimate by which the next one is made.
const HOPE: f64 = 15.0 / 16.0;

/// Running means, each new step counting for an eighth.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pace {
    /// A step of decodes alone, whatever their number.
    decode_step_ns: Option<f64>,
    prefill_token_ns: Option<f64>,
    /// How many were refused by that since a prompt was last measured.
    refusals: u16,
}

impl Pace {
    /// A step ran so many tokens of each kind in `took_ns`.
    pub fn learn(&mut self, decode_tokens: usize, prefill_tokens: usize, took_ns: u64) {
        let took_ns = took_ns as f64;
        if prefill_tokens == 0 {
            blend(&mut self.decode_step_ns, took_ns);
        } else if prefill_tokens >= PREFILL_TOKENS_MIN {
            let beside = if decode_tokens > 0 { self.decode_step_ns.unwrap_or(0.0) } else { 0.0 };
            // A slow minute may make the decodes look dearer than the whole step; half of it at least was the prompt.
            let seen = (took_ns - beside).max(took_ns / 2.0) / prefill_tokens as f64;
            let hope = self.hope();
            // Doubts that it bears out are taken for what was measured, as far as it goes; the others end.
            self.prefill_token_ns.iter_mut().for_each(|mean| *mean = mean.min(seen.max(*mean * hope)));
            self.refusals = 0;
            blend(&mut self.prefill_token_ns, seen);
        }
    }

    /// Somebody was refused by this estimate. An engine that refuses everybody measures nothing any more; so each refusal makes the next one
    /// a little less likely, until one prompt runs and tells. What was measured stays what it was: decodes are still to be protected by it.
    pub fn doubt(&mut self) {
        self.refusals = self.refusals.saturating_add(1);
    }

    /// What running so many prompt tokens takes, in ns, for those who would be refused for it: at the measured pace, or by what refusals
    /// have left of it. `None`: no prompt was seen yet.
    pub fn prefill_ns(&self, tokens: usize) -> Option<u64> {
        self.prefill_token_ns.map(|ns| (ns * self.hope() * tokens as f64) as u64)
    }

    fn hope(&self) -> f64 {
        HOPE.powi(i32::from(self.refusals))
    }

    /// Prompt tokens that run in `ns` at the measured pace. `None`: no prompt was seen yet.
    pub fn prefill_tokens_in(&self, ns: u64) -> Option<usize> {
        self.prefill_token_ns.map(|token_ns| (ns as f64 / token_ns.max(1.0)) as usize)
    }
}

fn blend(mean: &mut Option<f64>, seen: f64) {
    *mean = Some(mean.map_or(seen, |mean| mean + (seen.min(mean * BELIEVED_MAX) - mean) / 8.0));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_cost_what_is_left_of_a_mixed_step() {
        let mut pace = Pace::default();
        assert_eq!((pace.prefill_ns(5), pace.prefill_tokens_in(5)), (None, None));
        pace.learn(4, 0, 20_000);
        pace.learn(4, 100, 120_000);
        assert_eq!(pace.prefill_ns(50), Some(50_000));
        assert_eq!(pace.prefill_tokens_in(200_000), Some(200));
    }

    #[test]
    fn a_step_in_which_the_machine_stood_still_changes_little() {
        let mut pace = Pace::default();
        pace.learn(0, 100, 100_000);
        pace.learn(0, 100, u64::MAX);
        assert_eq!(pace.prefill_ns(100), Some(112_500));
    }

    #[test]
    fn refusals_make_the_next_one_less_likely_and_change_nothing_that_was_measured() {
        let mut pace = Pace::default();
        pace.learn(0, 100, 100_000);
        (0..100).for_each(|_| pace.doubt());
        assert!(pace.prefill_ns(100) < Some(1_000));
        assert_eq!(pace.prefill_tokens_in(100_000), Some(100), "beside decodes it is as ever");
        pace.learn(0, 100, 100_000);
        assert_eq!(pace.prefill_ns(100), Some(100_000), "it was right");
        (0..100).for_each(|_| pace.doubt());
        pace.learn(0, 100, 10_000);
        assert_eq!(pace.prefill_ns(100), Some(10_000), "it was not");
    }

    #[test]
    fn tiny_chunks_teach_nothing_and_a_slow_decode_cannot_make_prompts_free() {
        let mut pace = Pace::default();
        pace.learn(1, 1, 1_000_000);
        assert_eq!(pace.prefill_ns(1), None);
        pace.learn(1, 0, 1_000_000);
        pace.learn(1, 100, 100_000);
        assert_eq!(pace.prefill_ns(100), Some(50_000));
    }
}
