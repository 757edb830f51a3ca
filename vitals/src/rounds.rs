//! Prompts that go round: an engine that has counted more prompt tokens than it was asked for since it last handed anything out, and counts
//! on, prefills the same again and again. What that takes of its cache is no progress.

use crate::observation::{GateObs, MetricsObs, Ms};
use crate::prefill::TIMES_MAX;
use crate::signs::Sight;

/// What no gate sees of a request: what a chat template writes around it, a picture that the engine fetches.
const UNSEEN_TOKENS: f64 = 256.0;

/// The engine's count of prompt tokens against the gate's of what was asked for.
#[derive(Debug, Clone, Default)]
pub struct Rounds {
    /// Of the gate.
    epoch: Option<u64>,
    /// Requests that the gate had forwarded, by the look before.
    forwarded: u64,
    /// The engine's count at the last scrape.
    counted: Option<f64>,
    /// The engine's count and what the gate had seen served, at the first scrape of all.
    first: Option<(f64, f64)>,
    /// When something was last handed out, nobody was there, or nothing was known (the caller's clock).
    since_ms: Ms,
    /// What was owed then, or has been asked for since.
    offered: f64,
    /// The engine's count at the first scrape after that, and how many of its tokens one of the gate's was until then.
    begins: Option<(f64, f64)>,
    in_vain: bool,
}

impl Rounds {
    /// Takes one look in; `scraped`: the engine's figures are of a new page, which was true at `at_ms`.
    pub fn look(&mut self, now_ms: Ms, sight: &Sight<'_>, scraped: bool, at_ms: Ms) {
        let Some(gate) = sight.gate else { return };
        let is_new = self.epoch != Some(gate.epoch);
        if is_new {
            *self = Self { epoch: Some(gate.epoch), ..Self::default() };
        }
        let forwarded = gate.requests_done.saturating_add(gate.in_flight.into());
        let came = forwarded.saturating_sub(std::mem::replace(&mut self.forwarded, forwarded));
        self.offered += tokens(sight.prompt_tokens_came, came);
        if is_new || sight.delivered() || gate.in_flight == 0 {
            self.since_ms = now_ms;
            self.offered = owed(gate);
            self.begins = None;
            self.in_vain = false;
        }
        // a gate that does not count all that it forwards knows too little
        let counted = sight.metrics.filter(|_| scraped && gate.prompt_tokens_taken > 0).and_then(counted);
        if let Some(counted) = counted {
            self.count(gate, counted, at_ms > self.since_ms);
        }
    }

    fn count(&mut self, gate: &GateObs, counted: f64, silent: bool) {
        let rose = self.counted.replace(counted).is_some_and(|before| counted > before);
        let served = tokens(gate.prompt_tokens_taken, self.forwarded) - owed(gate);
        let (counted_first, served_first) = *self.first.get_or_insert((counted, served));
        if !silent {
            return;
        }
        // many answers to one prompt, pictures: a token of the gate's may always have been several of the engine's
        let usual = (counted - counted_first) / (served - served_first).max(UNSEEN_TOKENS);
        let (from, usual) = *self.begins.get_or_insert((counted, usual.max(1.0)));
        // whoever decodes, be it after prompts that were greater than anybody knew, counts none meanwhile
        self.in_vain = rose && counted - from > self.offered * usual * TIMES_MAX as f64;
    }

    /// Was nothing but the same prompts again seen to be done at the last scrape?
    pub fn in_vain(&self) -> bool {
        self.in_vain
    }
}

fn owed(gate: &GateObs) -> f64 {
    tokens(gate.prompt_tokens_owed, gate.in_flight.into())
}

fn tokens(of_prompts: u64, requests: u64) -> f64 {
    of_prompts as f64 + requests as f64 * UNSEEN_TOKENS
}

fn counted(metrics: &MetricsObs) -> Option<f64> {
    metrics.prompt_tokens.filter(|tokens| tokens.is_finite())
}
