//! What steps cost on this machine, learned from those that ran: enough to say how long a prompt will take and how much of it fits
//! beside the decodes. Pure. It is no promise: a lease (H5) is learned elsewhere, and is far more patient.

/// Chunks below this say more about the step around them than about themselves.
const PREFILL_TOKENS_MIN: usize = 16;

/// A step that took so many times what was expected says that the machine stood still, not that tokens cost that much.
const BELIEVED_MAX: f64 = 2.0;
/// What a refusal leaves of the estimate that it was made by.
const HOPE: f64 = 15.0 / 16.0;

/// Running means, each new step counting for an eighth.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pace {
    /// A step of decodes alone, whatever their number.
    decode_step_ns: Option<f64>,
    prefill_token_ns: Option<f64>,
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
            blend(&mut self.prefill_token_ns, (took_ns - beside).max(took_ns / 2.0) / prefill_tokens as f64);
        }
    }

    /// Somebody was refused by this estimate. An engine that refuses everybody measures nothing any more; so each refusal makes the next one
    /// a little less likely, until one prompt runs and tells.
    pub fn doubt(&mut self) {
        self.prefill_token_ns = self.prefill_token_ns.map(|ns| ns * HOPE);
    }

    /// What running so many prompt tokens takes, in ns. `None`: no prompt was seen yet.
    pub fn prefill_ns(&self, tokens: usize) -> Option<u64> {
        self.prefill_token_ns.map(|ns| (ns * tokens as f64) as u64)
    }

    /// Prompt tokens that run in `ns`. `None`: no prompt was seen yet.
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
    fn tiny_chunks_teach_nothing_and_a_slow_decode_cannot_make_prompts_free() {
        let mut pace = Pace::default();
        pace.learn(1, 1, 1_000_000);
        assert_eq!(pace.prefill_ns(1), None);
        pace.learn(1, 0, 1_000_000);
        pace.learn(1, 100, 100_000);
        assert_eq!(pace.prefill_ns(100), Some(50_000));
    }
}
