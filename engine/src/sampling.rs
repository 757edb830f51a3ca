//! From a row of logits to a token: greedy, temperature, top-k, top-p, and the logprobs to tell.
//!
//! Every request has its own generator, seeded by its own seed: what a neighbour samples cannot change its output.

use crate::splitmix::SplitMix64;
use thiserror::Error;

/// How one request wants its tokens chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0: greedy.
    pub temperature: f32,
    /// Smallest set of tokens whose probability reaches this, in (0, 1].
    pub top_p: f32,
    /// At most so many tokens; 0: no limit.
    pub top_k: usize,
    pub seed: Option<u64>,
    /// Logprobs are wanted, with so many alternatives.
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: 0, seed: None, logprobs: None }
    }
}

/// The logprob of a token and of the likeliest alternatives at its place (natural logarithm, before temperature).
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    pub token: u32,
    pub logprob: f32,
    /// Likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// A chosen token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    pub token: u32,
    pub logprob: Option<TokenLogprob>,
}

/// A row of logits that no token can be chosen from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SampleError {
    #[error("the model gave an empty row of logits")]
    Empty,
    #[error("the model gave logits without one finite value")]
    NotFinite,
}

/// One request's sampler.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    rng: SplitMix64,
}

impl Sampler {
    /// `entropy` seeds the generator of a request that gives no seed.
    pub fn new(params: SamplingParams, entropy: u64) -> Self {
        let rng = SplitMix64(params.seed.unwrap_or(entropy));
        Self { params, rng }
    }

    /// Chooses the next token.
    ///
    /// # Errors
    /// [`SampleError`] when the row is empty or has no finite value; the request fails, its neighbours do not.
    pub fn sample(&mut self, logits: &[f32]) -> Result<Sampled, SampleError> {
        let best = argmax(logits)?;
        let token = if self.params.temperature <= 0.0 { best } else { self.draw(logits, best) };
        let logprob = self.params.logprobs.map(|top| logprob_of(logits, token, top));
        Ok(Sampled { token, logprob })
    }

    /// The logprob of a token that was not chosen but given (prompt logprobs).
    pub fn logprob_of(&self, logits: &[f32], token: u32) -> TokenLogprob {
        logprob_of(logits, token, self.params.logprobs.unwrap_or(0))
    }

    fn draw(&mut self, logits: &[f32], best: u32) -> u32 {
        let scale = 1.0 / f64::from(self.params.temperature);
        let peak = f64::from(logits[best as usize]);
        let weight = |logit: f32| ((f64::from(logit) - peak) * scale).exp();
        let unlimited = self.params.top_p >= 1.0 && self.params.top_k == 0;
        let mut candidates: Vec<(u32, f64)> = (0u32..).zip(logits).map(|(id, l)| (id, weight(*l))).collect();
        candidates.retain(|(_, w)| w.is_finite() && *w > 0.0);
        if !unlimited {
            candidates = self.nucleus(candidates);
        }
        let total: f64 = candidates.iter().map(|(_, w)| w).sum();
        let mut left = self.rng.unit() * total;
        for (id, weight) in &candidates {
            left -= weight;
            if left < 0.0 {
                return *id;
            }
        }
        candidates.last().map_or(best, |(id, _)| *id)
    }

    /// The likeliest tokens: at most `top_k`, and no more than it takes to reach `top_p`. Never empty.
    fn nucleus(&self, mut candidates: Vec<(u32, f64)>) -> Vec<(u32, f64)> {
        let total: f64 = candidates.iter().map(|(_, w)| w).sum();
        // Ties go to the lower id: the result must not depend on the sort's mood.
        candidates.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if self.params.top_k > 0 {
            candidates.truncate(self.params.top_k);
        }
        let wanted = f64::from(self.params.top_p) * total;
        let mut sum = 0.0;
        let keep = candidates.iter().take_while(|(_, w)| {
            let more = sum < wanted;
            sum += w;
            more
        });
        let keep = keep.count().max(1);
        candidates.truncate(keep);
        candidates
    }
}

fn argmax(logits: &[f32]) -> Result<u32, SampleError> {
    if logits.is_empty() {
        return Err(SampleError::Empty);
    }
    let finite = (0u32..).zip(logits).filter(|(_, l)| l.is_finite());
    finite.max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0))).map(|(id, _)| id).ok_or(SampleError::NotFinite)
}

fn logprob_of(logits: &[f32], token: u32, top: usize) -> TokenLogprob {
    let peak = logits.iter().copied().filter(|l| l.is_finite()).fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().filter(|l| !l.is_nan()).map(|l| f64::from(l - peak).exp()).sum();
    let norm = f64::from(peak) + sum.ln();
    let logprob = |logit: f32| (f64::from(logit) - norm) as f32;
    let own = logits.get(token as usize).map_or(f32::NEG_INFINITY, |l| logprob(*l));
    TokenLogprob { token, logprob: own, top: top_of(logits, top).into_iter().map(|(id, l)| (id, logprob(l))).collect() }
}

/// The `count` largest logits, largest first.
fn top_of(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut all: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).filter(|(_, l)| !l.is_nan()).collect();
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if count == 0 {
        return Vec::new();
    }
    if count < all.len() {
        all.select_nth_unstable_by(count, order);
        all.truncate(count);
    }
    all.sort_unstable_by(order);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, top_p: f32, top_k: usize) -> Sampler {
        Sampler::new(SamplingParams { temperature, top_p, top_k, seed: Some(7), logprobs: Some(2) }, 0)
    }

    #[test]
    fn greedy_takes_the_largest_and_the_lower_id_of_equals() {
        assert_eq!(sampler(0.0, 1.0, 0).sample(&[0.0, 3.0, 3.0, f32::NAN]).unwrap().token, 1);
    }

    #[test]
    fn rows_without_a_finite_value_are_errors() {
        assert_eq!(sampler(1.0, 1.0, 0).sample(&[]), Err(SampleError::Empty));
        assert_eq!(sampler(1.0, 1.0, 0).sample(&[f32::NAN, f32::NEG_INFINITY]), Err(SampleError::NotFinite));
    }

    #[test]
    fn draws_follow_the_distribution() {
        let mut s = sampler(1.0, 1.0, 0);
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
        let mut counts = [0usize; 3];
        for _ in 0..20_000 {
            counts[s.sample(&logits).unwrap().token as usize] += 1;
        }
        for (count, p) in counts.iter().zip([0.5, 0.3, 0.2]) {
            assert!((*count as f64 / 20_000.0 - p).abs() < 0.02, "{counts:?}");
        }
    }

    #[test]
    fn top_p_and_top_k_cut_the_tail() {
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
        let seen = |mut s: Sampler| {
            let mut seen = std::collections::BTreeSet::new();
            for _ in 0..500 {
                seen.insert(s.sample(&logits).unwrap().token);
            }
            seen.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(seen(sampler(1.0, 0.4, 0)), [0]);
        assert_eq!(seen(sampler(1.0, 0.7, 0)), [0, 1]);
        assert_eq!(seen(sampler(1.0, 1.0, 2)), [0, 1]);
        assert_eq!(seen(sampler(1.0, 0.0, 0)), [0], "never empty");
    }

    #[test]
    fn the_seed_alone_decides() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
        let run = |entropy| {
            let mut s = Sampler::new(SamplingParams { seed: Some(42), ..Default::default() }, entropy);
            (0..32).map(|_| s.sample(&logits).unwrap().token).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(2));
    }

    #[test]
    fn logprobs_are_normalised_and_sorted() {
        let l = sampler(0.0, 1.0, 0).sample(&[0.2f32.ln(), 0.5f32.ln(), 0.3f32.ln()]).unwrap().logprob.unwrap();
        assert!((l.logprob - 0.5f32.ln()).abs() < 1e-5);
        assert_eq!(l.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2]);
    }
}
