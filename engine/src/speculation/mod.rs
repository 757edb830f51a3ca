//! Speculation: several tokens a step, where guessing them is cheaper than waiting for them. Guesses are made between two steps, handed
//! to the scheduler, verified by the next step as one sequence's longer row, and accepted as far as they are what the model says.
//!
//! **Invariant:** guesses change how fast output comes, never which: greedy output, and sampled output of a seed, is the same with and
//! without them (`verify`, EP4). Whatever goes wrong with a guess ends the guessing, not a request.
//! **Invariant:** it turns itself off where it loses (`governor`).
//! **Invariant:** a step whose guesses are all wanting (bonus tokens only) has the shape of a plain step and is planned and run as one;
//! no shape is padded to another (E2, the hang S1).

mod follower;
mod governor;
mod ngram;
mod reach;
mod verify;

use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    str::FromStr,
};

use thiserror::Error;

use crate::model::{Model, ModelError, StepTerms, Tell};
use crate::sampling::Sampler;
use crate::scheduler::{Outcome, ReqId, Scheduler, StepPlan};
pub use follower::Follower;
use governor::{Governor, StepSeen};
use ngram::NgramIndex;
use reach::Reach;
pub use verify::verify;

/// Who guesses (`--speculative`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SpeculationSpec {
    /// The sequence itself.
    Ngram,
    /// A smaller model.
    Draft(PathBuf),
    /// The model's own head.
    Mtp,
}

/// Why a `--speculative` was not understood.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown way to speculate {0:?}; allowed: ngram, mtp, draft=DIR")]
pub struct SpeculationParseError(String);

impl FromStr for SpeculationSpec {
    type Err = SpeculationParseError;

    fn from_str(text: &str) -> Result<Self, SpeculationParseError> {
        match text.split_once('=') {
            None if text == "ngram" => Ok(Self::Ngram),
            None if text == "mtp" => Ok(Self::Mtp),
            Some(("draft", dir)) if !dir.is_empty() => Ok(Self::Draft(dir.into())),
            _ => Err(SpeculationParseError(text.into())),
        }
    }
}

/// Who guesses, ready to.
pub enum Guesser {
    Ngram,
    Draft(Box<dyn Model>, Follower),
    Head(Follower),
}

impl Guesser {
    fn follower(&mut self) -> Option<&mut Follower> {
        match self {
            Self::Ngram => None,
            Self::Draft(_, follower) | Self::Head(follower) => Some(follower),
        }
    }
}

/// What became of the guesses, since the start. As vLLM counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpeculationCounts {
    /// Sequences of steps that had guesses verified.
    pub drafts: u64,
    pub draft_tokens: u64,
    pub accepted_tokens: u64,
    /// How often the first, second … guess was accepted.
    pub accepted_at: Vec<u64>,
}

/// Speculation of one engine.
pub struct Speculation {
    guesser: Guesser,
    drafts_max: usize,
    governor: Governor,
    reaches: HashMap<ReqId, Reach>,
    indexes: HashMap<ReqId, NgramIndex>,
    counts: SpeculationCounts,
    step: StepNote,
}

/// What is known about the step under way.
#[derive(Debug, Clone, Copy, Default)]
struct StepNote {
    sequences: usize,
    context_tokens: usize,
    yielded: usize,
    verified: usize,
    prompts: bool,
    guessed: bool,
}

impl Speculation {
    /// The same, but it never turns itself off: for measurements of what that is worth.
    #[must_use]
    pub fn always(mut self) -> Self {
        self.governor = Governor::always();
        self
    }

    /// `drafts_max`: guesses a sequence and step.
    pub fn new(guesser: Guesser, drafts_max: usize) -> Self {
        let counts = SpeculationCounts { accepted_at: vec![0; drafts_max], ..SpeculationCounts::default() };
        let (reaches, indexes) = (HashMap::new(), HashMap::new());
        let (governor, step) = (Governor::default(), StepNote::default());
        Self { guesser, drafts_max, governor, reaches, indexes, counts, step }
    }

    /// Takes in what a step made of its guesses.
    pub fn note(&mut self, plan: &StepPlan, outcomes: &[Outcome]) {
        if let Some(follower) = self.guesser.follower() {
            follower.note(plan, outcomes);
        }
        let decodes = plan.rows.iter().filter(|row| row.decode).count();
        let contexts = plan.batch.seqs.iter().map(|seq| seq.start_pos + seq.tokens.len());
        self.step = StepNote {
            sequences: decodes,
            context_tokens: contexts.sum(),
            yielded: outcomes.iter().map(|outcome| outcome.tokens.len()).sum(),
            verified: plan.draft_tokens,
            prompts: plan.prefill_tokens > 0,
            guessed: false,
        };
        let drafts: HashMap<ReqId, usize> =
            plan.rows.iter().filter(|row| row.drafts > 0).map(|row| (row.id, row.drafts)).collect();
        for outcome in outcomes {
            let Some(drafts) = drafts.get(&outcome.id).copied() else { continue };
            let accepted = outcome.tokens.len().saturating_sub(1);
            self.counts.drafts += 1;
            self.counts.draft_tokens += drafts as u64;
            self.counts.accepted_tokens += accepted as u64;
            self.counts.accepted_at.iter_mut().take(accepted).for_each(|count| *count += 1);
            if let Some(reach) = self.reaches.get_mut(&outcome.id) {
                reach.learn(drafts, accepted);
            }
        }
    }

    /// What holds for the steps of whatever guesses beside the model.
    pub fn terms(&mut self, terms: &StepTerms) {
        if let Guesser::Draft(model, _) = &mut self.guesser {
            model.terms(terms);
        }
    }

    /// Guesses for the next step of `model`, where that may pay; `tell` hears what the guessing shows. `sampler_of`: a copy of a request's
    /// sampler.
    ///
    /// # Errors
    /// The draft model's, or the head's. The caller then gives speculation up: who failed once is not asked again.
    pub fn propose(
        &mut self,
        (model, tell): (&mut dyn Model, Tell<'_>),
        scheduler: &mut Scheduler,
        sampler_of: &dyn Fn(ReqId) -> Option<Sampler>,
    ) -> Result<(), ModelError> {
        self.forget_ended(scheduler);
        let (count, context) = scheduler.running().fold((0, 0), |(n, len), seq| (n + 1, len + seq.tokens.len()));
        if count == 0 || !self.governor.allows(count, context) {
            return Ok(());
        }
        let wanted = self.wanted(scheduler);
        self.step.guessed = !wanted.is_empty() || self.step.prompts;
        let proposals = match &mut self.guesser {
            Guesser::Draft(draft, follower) => {
                follower.guess((draft.as_mut(), tell), scheduler, &wanted, sampler_of)?
            }
            Guesser::Head(follower) => follower.guess((model, tell), scheduler, &wanted, sampler_of)?,
            Guesser::Ngram => {
                let seqs = scheduler.running().filter_map(|seq| Some((seq, *wanted.get(&seq.id)?)));
                let indexes = &mut self.indexes;
                seqs.map(|(seq, n)| (seq.id, indexes.entry(seq.id).or_default().guess(seq.tokens, n))).collect()
            }
        };
        for (id, drafts) in proposals.into_iter().filter(|(_, drafts)| !drafts.is_empty()) {
            scheduler.propose(id, drafts);
        }
        Ok(())
    }

    /// The step noted last took `took_ns` in all, `guessing_ns` of it for guesses.
    pub fn timed(&mut self, took_ns: u64, guessing_ns: u64) {
        let StepNote { sequences, context_tokens, yielded, verified, prompts, guessed } = self.step;
        if prompts || yielded == 0 || sequences == 0 {
            return self.governor.charge(took_ns, if guessed { guessing_ns } else { 0 });
        }
        // Looking into a table costs nothing to speak of; a model does.
        let guessed = verified > 0 || (guessed && self.guesser.follower().is_some());
        self.governor.observe(&StepSeen { sequences, context_tokens, yielded, guessed, took_ns });
    }

    pub fn counts(&self) -> &SpeculationCounts {
        &self.counts
    }

    /// Does it guess, or has it turned itself off?
    pub fn is_on(&self) -> bool {
        self.governor.is_on()
    }

    /// Guesses that each decoding sequence is worth.
    fn wanted(&mut self, scheduler: &Scheduler) -> HashMap<ReqId, usize> {
        let new = Reach::new(self.drafts_max);
        let decoding = scheduler.running().filter(|seq| seq.decodes);
        let reaches = &mut self.reaches;
        let wanted = decoding.map(|seq| (seq.id, reaches.entry(seq.id).or_insert(new).wanted()));
        wanted.filter(|(_, count)| *count > 0).collect()
    }

    fn forget_ended(&mut self, scheduler: &Scheduler) {
        let running: HashSet<ReqId> = scheduler.running().map(|seq| seq.id).collect();
        self.reaches.retain(|id, _| running.contains(id));
        self.indexes.retain(|id, _| running.contains(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ways_to_speculate_parse_and_errors_say_what_is_allowed() {
        assert_eq!("ngram".parse(), Ok(SpeculationSpec::Ngram));
        assert_eq!("mtp".parse(), Ok(SpeculationSpec::Mtp));
        assert_eq!("draft=a/b=c".parse(), Ok(SpeculationSpec::Draft("a/b=c".into())));
        for wrong in ["", "draft", "draft=", "ngram=2", "mtp=1"] {
            let error = wrong.parse::<SpeculationSpec>().unwrap_err().to_string();
            assert!(error.contains("draft=DIR"), "{error}");
        }
    }
}
