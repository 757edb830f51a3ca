//! From a loaded model to one that is ready: its cache, and its first steps, outside any request.

use std::time::{Duration, Instant};

use crate::beat::{Heart, StepShape};
use crate::core::alone::asked;
use crate::core::step::shape_of;
use crate::core::{CoreConfig, CoreError};
use crate::device::QueuedModel;
use crate::model::{
    ALLOCATE_MAX, KvShape, LogitsWanted, Model, ModelError, ModelInfo, Pass, SeqInput, Sign, StepBatch, StepTerms,
};
use crate::scheduler::Limits;
use crate::speculation::{Follower, Guesser, SpeculationSpec};

/// Prompt tokens of the warm-up step.
const TOKENS: usize = 64;
/// Nothing is known of the first steps but that they end.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// Gets models ready.
pub(super) struct Warmer<'a> {
    config: &'a CoreConfig,
    limits: &'a Limits,
    heart: &'a mut Heart,
    /// Signs of life so far.
    done: u64,
}

/// What a step was, and how long it took.
type Seen = (StepShape, Duration);

impl<'a> Warmer<'a> {
    pub fn new(config: &'a CoreConfig, limits: &'a Limits, heart: &'a mut Heart) -> Self {
        Self { config, limits, heart, done: 0 }
    }

    /// Gets the model ready. The first lease is learned from its first steps.
    ///
    /// # Errors
    /// What the model says.
    pub fn prepare(&mut self, model: &mut QueuedModel) -> Result<(), CoreError> {
        self.allocate(model)?;
        let seen = self.warm_up(model, Pass::Model).map_err(CoreError::of(CoreError::WarmUp))?;
        seen.iter().for_each(|(shape, took)| self.heart.warmed_up(shape, *took));
        Ok(())
    }

    /// Who guesses beside `model`, if anybody does.
    ///
    /// # Errors
    /// Who should guess does not go with this model, is not there, has no room, or its wait was given up.
    pub fn guesser(
        &mut self,
        draft: Option<QueuedModel>,
        model: &mut QueuedModel,
    ) -> Result<Option<Guesser>, CoreError> {
        match (draft, &self.config.speculation) {
            (Some(draft), _) => self.draft(draft, model.info()),
            (None, Some(SpeculationSpec::Ngram)) => Ok(Some(Guesser::Ngram)),
            (None, Some(SpeculationSpec::Mtp)) if !model.has_head() => Err(CoreError::NoHead),
            (None, Some(SpeculationSpec::Mtp)) => {
                Ok(self.follower(model, Pass::Head, "the MTP head")?.map(Guesser::Head))
            }
            (None, _) => Ok(None),
        }
    }

    fn draft(&mut self, mut draft: QueuedModel, model: &ModelInfo) -> Result<Option<Guesser>, CoreError> {
        let (ours, theirs) = (draft.info().vocab_size, model.vocab_size);
        if ours != theirs {
            return Err(CoreError::DraftVocabulary { draft: ours, model: theirs });
        }
        self.allocate(&mut draft)?;
        let follower = self.follower(&mut draft, Pass::Model, "the draft model")?;
        Ok(follower.map(|follower| Guesser::Draft(Box::new(draft), follower)))
    }

    /// Somebody who guesses, after first steps. One that fails them is left alone; one that never ends them has taken the device along.
    fn follower(&mut self, model: &mut QueuedModel, pass: Pass, who: &str) -> Result<Option<Follower>, CoreError> {
        if let Err(error) = asked(|| self.warm_up(model, pass)).map_err(CoreError::Stuck)? {
            tracing::error!(error, "{who} failed its first steps; nobody guesses");
            return Ok(None);
        }
        Ok(Some(Follower::new(pass, self.limits, model.info().seq_len_max)))
    }

    /// Something is done, and the next sign of life comes within that time (H5).
    fn alive(&mut self, within: Duration) {
        self.heart.warming_up(self.done, within);
        self.done += 1;
    }

    /// A sign of a step, or of the cache. What a start may take is far longer than any wait for a core.
    fn shows(&mut self, sign: Sign, within: Duration) {
        if sign == Sign::Layer {
            self.alive(within);
        }
    }

    fn allocate(&mut self, model: &mut QueuedModel) -> Result<(), CoreError> {
        let shape = KvShape { num_blocks: self.limits.num_blocks, block_size: self.limits.block_size };
        self.alive(ALLOCATE_MAX);
        model.allocate(shape, &mut |sign| self.shows(sign, ALLOCATE_MAX)).map_err(CoreError::of(CoreError::Cache))
    }

    /// One prefill and one decode into blocks that nobody owns yet: pages of the weights are touched, and the first lease is learned
    /// from a measurement.
    fn warm_up(&mut self, model: &mut QueuedModel, pass: Pass) -> Result<Vec<Seen>, ModelError> {
        let allowed = self.config.guards.then_some(SILENCE_MAX);
        let mut seen = Vec::new();
        for input in self.inputs(model.info()) {
            let shape = shape_of([(input.start_pos > 0, &input)]);
            model.terms(&StepTerms { allowed, shape, warms: true, ..StepTerms::default() });
            self.alive(SILENCE_MAX);
            let began = Instant::now();
            model.step(&StepBatch { seqs: vec![input], pass }, &mut |sign| self.shows(sign, SILENCE_MAX))?;
            seen.push((shape, began.elapsed()));
        }
        self.alive(SILENCE_MAX);
        Ok(seen)
    }

    fn inputs(&self, info: &ModelInfo) -> Vec<SeqInput> {
        let capacity = self.limits.num_blocks.saturating_mul(self.limits.block_size);
        let longest = self.limits.seq_len_max.min(info.seq_len_max).min(capacity);
        let count = TOKENS.min(longest.saturating_sub(1));
        let token = |i: usize| u32::try_from(i % info.vocab_size.max(1)).unwrap_or(0);
        let input = |tokens: Vec<u32>, start_pos: usize| {
            let end = start_pos + tokens.len();
            let block_table = (0u32..).take(end.div_ceil(self.limits.block_size)).collect();
            let fits = !tokens.is_empty() && end <= capacity;
            fits.then_some(SeqInput { tokens, start_pos, block_table, logits: LogitsWanted::Last })
        };
        [input((0..count).map(token).collect(), 0), input(vec![token(0)], count)].into_iter().flatten().collect()
    }
}
