//! From a row of logits to a token: the request's own rules, greedy, temperature, top-k, top-p, min-p, and the logprobs to tell.
//!
//! Every request has its own generator, seeded by its own seed, and its own rules: what a neighbour samples cannot change its
//! output (EP4). Order: grammar and allowed ids → min_tokens → bias → penalties → temperature → min-p, top-k, top-p; as in vLLM.

pub mod defaults;
mod logprobs;
mod rules;

use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::grammar::{Constraint, ConstraintError};
use crate::splitmix::SplitMix64;
pub use defaults::SamplingDefaults;
pub use logprobs::TokenLogprob;
use logprobs::logprob_of;
use rules::Adjuster;
pub use rules::LogitRules;

/// How one request wants its tokens chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0: greedy.
    pub temperature: f32,
    /// Smallest set of tokens whose probability reaches this, in (0, 1].
    pub top_p: f32,
    /// At most so many tokens; 0: no limit.
    pub top_k: usize,
    /// Only tokens at least this likely, as a share of the likeliest one's probability; 0: no limit.
    pub min_p: f32,
    pub seed: Option<u64>,
    /// Logprobs are wanted, with so many alternatives.
    pub logprobs: Option<usize>,
    /// What is done to the logits before all that; one for all outputs of a request.
    pub rules: Arc<LogitRules>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        let rules = Arc::default();
        Self { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: None, logprobs: None, rules }
    }
}

/// A chosen token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    pub token: u32,
    pub logprob: Option<TokenLogprob>,
}

/// What it takes to choose a token of a row elsewhere, for a request whose rules ask for nothing but the row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// 0: greedy.
    pub temperature: f32,
    /// In (0, 1]; 1: no limit.
    pub top_p: f32,
    /// 0: no limit.
    pub top_k: u32,
    /// 0: no limit.
    pub min_p: f32,
    /// The request's next random number, in [0, 1).
    pub unit: f64,
}

/// No field of it is ever NaN: requests are checked when they come.
impl Eq for Draw {}

/// Why no token can be chosen from a row.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SampleError {
    #[error("the model gave an empty row of logits")]
    Empty,
    #[error("the model gave logits without one finite value")]
    NotFinite,
    #[error("no token is allowed here, neither by the grammar nor by allowed_token_ids")]
    NothingAllowed,
    #[error(transparent)]
    Constraint(#[from] ConstraintError),
}

/// One request's sampler.
#[derive(Debug)]
pub struct Sampler {
    params: SamplingParams,
    rng: SplitMix64,
    adjuster: Adjuster,
    constraint: Option<Constraint>,
    /// After one of these nothing follows.
    stop_ids: Arc<[u32]>,
}

impl Sampler {
    /// `entropy` seeds the generator of a request that gives no seed.
    pub fn new(params: SamplingParams, entropy: u64) -> Self {
        let rng = SplitMix64(params.seed.unwrap_or(entropy));
        let adjuster = Adjuster::new(params.rules.clone());
        Self { params, rng, adjuster, constraint: None, stop_ids: Arc::default() }
    }

    /// The same sampler after this prompt, for output that ends with any of `stop_ids` and obeys `constraint`.
    pub fn after(mut self, prompt: &[u32], stop_ids: Arc<[u32]>, constraint: Option<Constraint>) -> Self {
        self.adjuster.begin(prompt, stop_ids.clone());
        (self.stop_ids, self.constraint) = (stop_ids, constraint);
        self
    }

    /// A copy that foretells what this one would choose. It follows no grammar: those masks are made by another thread, and what a
    /// grammar forbids is found when the guess is verified.
    pub fn shadow(&self) -> Self {
        Self {
            params: self.params.clone(),
            rng: self.rng.clone(),
            adjuster: self.adjuster.clone(),
            constraint: None,
            stop_ids: self.stop_ids.clone(),
        }
    }

    /// Can a token be chosen now? A grammar's mask is made by another thread, which is waited for until `until` at most, and
    /// given up where it is computed for longer than `time_max`.
    ///
    /// # Errors
    /// The grammar failed; the request fails with it, alone (EP5).
    pub fn is_ready(&mut self, until: Instant, time_max: Duration) -> Result<bool, SampleError> {
        match &mut self.constraint {
            Some(constraint) => Ok(constraint.is_ready(until, time_max)?),
            None => Ok(true),
        }
    }

    /// Chooses the next token, which the sampler then takes for granted.
    ///
    /// # Errors
    /// [`SampleError`] when no token can be chosen; the request fails, its neighbours do not.
    pub fn sample(&mut self, logits: &[f32]) -> Result<Sampled, SampleError> {
        let mask = self.constraint.as_ref().map(Constraint::mask).transpose()?;
        let token = match self.adjuster.apply(logits, mask) {
            // a row that was sane before the rules were applied has lost its last token to them
            Some(row) => choose(row, &self.params, &mut self.rng)
                .map_err(|_| argmax(logits).err().unwrap_or(SampleError::NothingAllowed))?,
            None => choose(logits, &self.params, &mut self.rng)?,
        };
        self.take(token)?;
        let logprob = self.params.logprobs.map(|top| logprob_of(logits, token, top));
        Ok(Sampled { token, logprob })
    }

    /// How the next token may be drawn without this sampler, where its rules, its grammar and what it is to tell allow that. Whether the token
    /// is then drawn so ([`Self::drawn`]) or here makes no difference: the random number is the same.
    pub fn draw(&self) -> Option<Draw> {
        let SamplingParams { temperature, top_p, top_k, min_p, .. } = self.params;
        let alone = self.constraint.is_none() && self.params.logprobs.is_none() && self.adjuster.is_idle();
        alone.then(|| {
            let (top_k, unit) = (u32::try_from(top_k).unwrap_or(u32::MAX), self.rng.clone().unit());
            Draw { temperature, top_p, top_k, min_p, unit }
        })
    }

    /// Takes over a token that was drawn as [`Self::draw`] says; `None`: the row had no finite value.
    ///
    /// # Errors
    /// As [`Self::sample`].
    pub fn drawn(&mut self, token: Option<u32>) -> Result<Sampled, SampleError> {
        let token = token.ok_or(SampleError::NotFinite)?;
        if self.params.temperature > 0.0 {
            self.rng.unit();
        }
        self.take(token)?;
        Ok(Sampled { token, logprob: None })
    }

    /// The logprob of a token that was not chosen but given (prompt logprobs).
    pub fn logprob_of(&self, logits: &[f32], token: u32) -> TokenLogprob {
        logprob_of(logits, token, self.params.logprobs.unwrap_or(0))
    }

    fn take(&mut self, token: u32) -> Result<(), SampleError> {
        self.adjuster.note(token);
        if let Some(constraint) = self.constraint.as_mut().filter(|_| !self.stop_ids.contains(&token)) {
            constraint.advance(token)?;
        }
        Ok(())
    }
}

/// The token that these parameters choose of a row; −∞ is never chosen.
fn choose(row: &[f32], params: &SamplingParams, rng: &mut SplitMix64) -> Result<u32, SampleError> {
    let best = argmax(row)?;
    if params.temperature <= 0.0 {
        return Ok(best);
    }
    let scale = 1.0 / f64::from(params.temperature);
    let peak = f64::from(row[best as usize]);
    // relative to the likeliest token, whose weight is 1
    let least = f64::from(params.min_p);
    let weight = |logit: f32| ((f64::from(logit) - peak) * scale).exp();
    let mut candidates: Vec<(u32, f64)> = (0u32..).zip(row).map(|(id, l)| (id, weight(*l))).collect();
    candidates.retain(|(_, w)| w.is_finite() && *w > 0.0 && *w >= least);
    if params.top_p < 1.0 || params.top_k > 0 {
        candidates = nucleus(candidates, params);
    }
    let total: f64 = candidates.iter().map(|(_, w)| w).sum();
    let mut left = rng.unit() * total;
    for (id, weight) in &candidates {
        left -= weight;
        if left < 0.0 {
            return Ok(*id);
        }
    }
    Ok(candidates.last().map_or(best, |(id, _)| *id))
}

/// The likeliest tokens: at most `top_k`, and of these no more than it takes to reach `top_p` of what `top_k` left, as in vLLM and
/// Transformers. Never empty. Only what may be kept is sorted: a vocabulary is long, and mostly a few hundred tokens have all the weight.
fn nucleus(mut candidates: Vec<(u32, f64)>, params: &SamplingParams) -> Vec<(u32, f64)> {
    let mut sorted = 0;
    if params.top_k > 0 {
        sorted = sort_first(&mut candidates, params.top_k);
        candidates.truncate(sorted);
    }
    let total: f64 = candidates.iter().map(|(_, w)| w).sum();
    let wanted = f64::from(params.top_p) * total;
    let (mut keep, mut sum) = (0, 0.0);
    while keep < candidates.len() && (keep == 0 || sum < wanted) {
        if keep == sorted {
            let more = SORTED_FIRST.max(sorted * SORTED_MORE);
            sorted += sort_first(&mut candidates[sorted..], more);
        }
        sum += candidates[keep].1;
        keep += 1;
    }
    candidates.truncate(keep);
    candidates
}

/// So many of the likeliest are sorted to begin with, and then so many times as many more.
const SORTED_FIRST: usize = 256;
const SORTED_MORE: usize = 7;

/// Puts the `count` likeliest in front, likeliest first; says how many those are.
fn sort_first(candidates: &mut [(u32, f64)], count: usize) -> usize {
    // Ties go to the lower id: the result must not depend on the sort's mood.
    let order = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    let count = count.min(candidates.len());
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count, order);
    }
    candidates[..count].sort_unstable_by(order);
    count
}

fn argmax(logits: &[f32]) -> Result<u32, SampleError> {
    if logits.is_empty() {
        return Err(SampleError::Empty);
    }
    let finite = (0u32..).zip(logits).filter(|(_, l)| l.is_finite());
    finite.max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0))).map(|(id, _)| id).ok_or(SampleError::NotFinite)
}

#[cfg(test)]
mod tests;
