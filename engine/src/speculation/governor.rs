//! Does speculation pay here, now? Pure: durations come in, yes or no comes out.
//!
//! What a step costs depends on how many sequences decode and how long they are, so each such situation is judged by itself: against
//! plain steps of the same situation, measured before and again and again. Guessing wrong costs time, and that time has to be there
//! first: an account earns a hundredth of all time without guesses and what guesses gain, and pays what they lose. When it is
//! empty nothing is guessed.
//!
//! **Invariant:** over any run, time lost to speculation ≤ [`EARNED`] of the time + [`GRACE_STEPS`] plain steps + one step. Hence never
//! below 0.98 of the speed without it, after the first few hundred steps.

use std::collections::HashMap;

/// Share of plain time that may be lost to trials.
const EARNED: f64 = 0.01;
/// The account begins with so many plain steps: a new engine finds out soon.
pub const GRACE_STEPS: f64 = 8.0;
/// Gains are saved up to so many plain steps.
const SAVED_STEPS_MAX: f64 = 64.0;
/// Plain steps that a situation is known by.
const KNOWN_BY: u32 = 4;
/// While guessing, one step in so many is plain, to measure against.
const MEASURE_EVERY: u32 = 64;
/// Steps with guesses that a judgement needs.
const JUDGED_BY: u32 = 4;

/// How a step of decodes alone went.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepSeen {
    pub sequences: usize,
    /// Tokens of all of them.
    pub context_tokens: usize,
    /// Tokens that it yielded.
    pub yielded: usize,
    /// Was anything guessed or verified in it?
    pub guessed: bool,
    pub took_ns: u64,
}

/// The controller of one engine.
#[derive(Debug, Default)]
pub struct Governor {
    situations: HashMap<(u32, u32), Situation>,
    account_ns: f64,
    started: bool,
    /// Guess whether it pays or not.
    always: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Situation {
    /// Of a plain step; nearer to the quick ones than to the slow ones, so that guesses have to prove themselves.
    plain_ns: f64,
    plain_steps: u32,
    /// Plain steps wanted before anything else: the last one was much quicker than thought.
    doubts: u32,
    guesses: bool,
    since_plain: u32,
    /// Time with guesses over time without, lately; and steps and loss since the trial began.
    ratio: f64,
    tried: u32,
    lost_ns: f64,
    /// What the account must have for another trial.
    trial_ns: f64,
}

impl Governor {
    /// A controller that lets every guess pass: for measurements and tests.
    pub fn always() -> Self {
        Self { always: true, ..Self::default() }
    }

    /// May the next step, of so many sequences with so many tokens in all, guess?
    pub fn allows(&mut self, sequences: usize, context_tokens: usize) -> bool {
        let account_ns = self.account_ns;
        let here = self.situations.entry(situation(sequences, context_tokens)).or_default();
        if self.always {
            return true;
        }
        if here.plain_steps < KNOWN_BY || here.doubts > 0 || account_ns <= 0.0 {
            return false;
        }
        if !here.guesses {
            if account_ns < here.trial_ns {
                return false;
            }
            (here.guesses, here.tried, here.lost_ns) = (true, 0, 0.0);
        }
        here.since_plain += 1;
        here.since_plain < MEASURE_EVERY
    }

    /// A step of decodes alone ended.
    pub fn observe(&mut self, seen: &StepSeen) {
        let here = self.situations.entry(situation(seen.sequences, seen.context_tokens)).or_default();
        let took_ns = seen.took_ns as f64;
        if !seen.guessed {
            here.learn_plain(took_ns);
            self.account_ns += took_ns * EARNED;
            if here.plain_steps == KNOWN_BY && !std::mem::replace(&mut self.started, true) {
                self.account_ns += here.plain_ns * GRACE_STEPS;
            }
        } else if here.plain_steps > 0 {
            let plain_ns = here.plain_ns * seen.yielded as f64 / seen.sequences.max(1) as f64;
            self.account_ns += plain_ns - took_ns;
            here.judge(plain_ns, took_ns);
        } else {
            self.account_ns -= took_ns;
        }
        self.account_ns = self.account_ns.min(here.plain_ns.max(1.0) * SAVED_STEPS_MAX);
    }

    /// Another step ended, in which `guessing_ns` went into guesses: prompts that a draft model reads as well, say.
    pub fn charge(&mut self, took_ns: u64, guessing_ns: u64) {
        self.account_ns += took_ns.saturating_sub(guessing_ns) as f64 * EARNED - guessing_ns as f64;
    }

    /// Does any situation guess?
    pub fn is_on(&self) -> bool {
        self.always || self.account_ns > 0.0 && self.situations.values().any(|here| here.guesses)
    }
}

impl Situation {
    fn learn_plain(&mut self, took_ns: f64) {
        self.since_plain = 0;
        self.doubts = self.doubts.saturating_sub(1);
        let weight = match self.plain_steps {
            steps if steps < KNOWN_BY => 1.0 / f64::from(steps + 1),
            _ if took_ns < self.plain_ns * 0.8 => {
                // The machine, or the sequences, have changed: what was gained may have been imagined.
                self.doubts = self.doubts.max(2);
                0.5
            }
            _ if took_ns < self.plain_ns => 0.25,
            _ => 0.06,
        };
        self.plain_steps = self.plain_steps.saturating_add(1);
        self.plain_ns += (took_ns - self.plain_ns) * weight;
        self.trial_ns = self.trial_ns.max(self.plain_ns * 2.0);
    }

    fn judge(&mut self, plain_ns: f64, took_ns: f64) {
        let ratio = took_ns / plain_ns.max(1.0);
        self.ratio = if self.tried == 0 { ratio } else { self.ratio + (ratio - self.ratio) / 8.0 };
        self.tried += 1;
        self.lost_ns += took_ns - plain_ns;
        if self.tried >= JUDGED_BY && self.ratio > 1.0 {
            self.guesses = false;
            self.trial_ns = self.lost_ns.max(self.plain_ns * 2.0);
        }
    }
}

/// Situations are apart by number of sequences, exactly up to 8, and by the power of two of their tokens.
fn situation(sequences: usize, context_tokens: usize) -> (u32, u32) {
    let width = if sequences <= 8 { sequences as u32 } else { 6 + sequences.ilog2() };
    (width, context_tokens.max(1).ilog2().max(8))
}

#[cfg(test)]
#[path = "governor_tests.rs"]
mod tests;
