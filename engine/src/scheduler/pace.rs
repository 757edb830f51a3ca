//! What steps cost on this machine, learned from those that ran: enough to say how long a prompt will take and how much of it fits
//! beside the decodes. Pure. It is no promise: a lease (H5) is learned elsewhere, and is far more patient.

/// Chunks below this say more about the step around them than about themselves.
const PREFILL_TOKENS_MIN: usize = 16;

/// What a step of decodes counts for.
const DECODES_TELL: f64 = 1.0 / 8.0;
/// A step that took so many times what was expected says that the machine stood still, not that tokens cost that much.
const BELIEVED_MAX: f64 = 2.0;
/// A step with so many prompt tokens counts for half; fewer say the less of themselves, the more of what ran beside them.
const TELLING_TOKENS: f64 = 700.0;
/// A prompt that was a smaller part of its step is no answer to doubts: as much may be chance.
const ANSWERING_PART: f64 = 1.0 / 8.0;
/// What a refusal leaves of the estimate by which the next one is made.
const HOPE: f64 = 15.0 / 16.0;

/// Running means: of steps of decodes, each new one counting for an eighth, and of prompts, each step counting by its tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pace {
    /// A step of decodes alone, whatever their number.
    decode_step_ns: Option<f64>,
    /// A step of one decode alone: what any step takes, whatever is in it (the weights are read once).
    lone_step_ns: Option<f64>,
    prefill_token_ns: Option<f64>,
    /// How many were refused by that since a prompt was last measured.
    refusals: u16,
}

impl Pace {
    /// A step ran so many tokens of each kind in `took_ns`.
    pub fn learn(&mut self, decode_tokens: usize, prefill_tokens: usize, took_ns: u64) {
        let took_ns = took_ns as f64;
        if prefill_tokens == 0 {
            blend(&mut self.decode_step_ns, took_ns, DECODES_TELL);
            if decode_tokens == 1 {
                blend(&mut self.lone_step_ns, took_ns, DECODES_TELL);
            }
        } else if prefill_tokens >= PREFILL_TOKENS_MIN {
            // a short prompt that runs alone is nearly all step, and long ones are not made of such steps
            let beside = if decode_tokens > 0 { self.decode_step_ns } else { self.lone_step_ns }.unwrap_or(0.0);
            let tells = prefill_tokens as f64 / (prefill_tokens as f64 + TELLING_TOKENS);
            // A slow minute may make the decodes look dearer than the whole step; some of it at least was the prompt, but not half of it
            // where few tokens ran beside many decodes.
            let seen = (took_ns - beside).max(took_ns * tells / 2.0) / prefill_tokens as f64;
            if took_ns - beside >= took_ns * ANSWERING_PART {
                let hope = self.hope();
                // Doubts that it bears out are taken for what was measured, as far as it goes; the others end.
                self.prefill_token_ns.iter_mut().for_each(|mean| *mean = mean.min(seen.max(*mean * hope)));
                self.refusals = 0;
            }
            blend(&mut self.prefill_token_ns, seen, tells);
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

fn blend(mean: &mut Option<f64>, seen: f64, tells: f64) {
    *mean = Some(mean.map_or(seen, |mean| mean + (seen.min(mean * BELIEVED_MAX) - mean) * tells));
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
        assert_eq!(pace.prefill_ns(100), Some(6_250));
    }

    const MS: u64 = 1_000_000;

    fn is_near(pace: &Pace, token_ns: u64) -> bool {
        pace.prefill_ns(1).is_some_and(|ns| (token_ns / 2..=token_ns * 2).contains(&ns))
    }

    #[test]
    fn short_prompts_beside_many_decodes_do_not_make_long_ones_dear() {
        let mut pace = Pace::default();
        for step in 0..1_000 {
            pace.learn(64, 0, 25 * MS);
            // as the machine has it: one comes a little late, the next a little early
            pace.learn(64, 16, if step % 2 == 0 { 24 * MS } else { 28 * MS });
        }
        assert!(is_near(&pace, MS * 8 / 100), "{pace:?}");
        for _ in 0..100 {
            pace.learn(64, 0, 25 * MS);
            pace.learn(64, 512, 25 * MS + 512 * MS * 8 / 100);
            assert!(is_near(&pace, MS * 8 / 100), "{pace:?}");
        }
        (0..1_000).for_each(|_| pace.learn(64, 16, 26 * MS));
        assert!(is_near(&pace, MS * 8 / 100), "{pace:?}");
    }

    /// A person's chat, one at a time, on an engine that reads its weights for 25 ms in each step.
    #[test]
    fn short_prompts_alone_do_not_make_long_ones_dear_and_answer_no_doubts() {
        let mut pace = Pace::default();
        pace.learn(1, 0, 25 * MS);
        for _ in 0..1_000 {
            pace.learn(0, 16, 25 * MS + 16 * MS * 8 / 100);
            pace.learn(1, 0, 25 * MS);
        }
        assert!(is_near(&pace, MS * 8 / 100), "{pace:?}");
        (0..10).for_each(|_| pace.doubt());
        let hoped = pace.prefill_ns(100);
        pace.learn(0, 16, 25 * MS + 16 * MS * 8 / 100);
        assert!(pace.prefill_ns(100) <= hoped, "{pace:?}");
        // many decodes together are dearer than one step must be: a prompt alone is not measured by them
        (0..100).for_each(|_| pace.learn(64, 0, 60 * MS));
        (0..100).for_each(|_| pace.learn(0, 512, 25 * MS + 512 * MS * 8 / 100));
        assert!(is_near(&pace, MS * 8 / 100), "{pace:?}");
    }

    #[test]
    fn a_short_prompt_beside_many_decodes_answers_no_doubts() {
        let mut pace = Pace::default();
        pace.learn(64, 0, 25 * MS);
        pace.learn(64, 512, 25 * MS + 512 * MS * 8 / 100);
        (0..100).for_each(|_| pace.doubt());
        let doubted = pace;
        pace.learn(64, 16, 25 * MS);
        assert!(pace.prefill_ns(100) < Some(1_000_000), "the next long one still has its chance");
        let measured = |pace: Pace| pace.prefill_tokens_in(1_000 * MS).unwrap();
        assert!(measured(pace) < measured(doubted) * 11 / 10, "and what was measured is hardly less");
        pace.learn(64, 512, 25 * MS + 512 * MS * 8 / 100);
        assert!(is_near(&pace, MS * 8 / 100), "{pace:?}");
    }

    #[test]
    fn prompts_that_become_dear_are_learned_by_long_chunks_soon_and_by_short_ones_too() {
        for (tokens, steps) in [(512, 8), (16, 200)] {
            let mut pace = Pace::default();
            pace.learn(64, 0, 25 * MS);
            pace.learn(64, 512, 25 * MS + 512 * MS * 8 / 100);
            (0..steps).for_each(|_| pace.learn(64, tokens, 25 * MS + tokens as u64 * MS * 64 / 100));
            assert!(is_near(&pace, MS * 64 / 100), "{tokens}: {pace:?}");
        }
    }
}
