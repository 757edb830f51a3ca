//! Guesses of a smaller model with the same vocabulary. It keeps K and V of its own in the very blocks that the scheduler gave the
//! sequence (same numbers, its own memory), reads what the large model has read, and says a few tokens ahead.
//!
//! What it has not read (a prefix cached while it rested, a block that changed hands) makes it guess badly and does no other harm.

use std::collections::{HashMap, HashSet};

use crate::model::{LogitsWanted, Model, ModelError, SeqInput, StepBatch, StepTerms};
use crate::sampling::Sampler;
use crate::scheduler::{ReqId, Running, Scheduler};

/// Tokens that it reads at most in one go beside decodes: their streams wait for it.
const READ_BESIDE_DECODES_MAX: usize = 128;

/// A draft model and how far it has read.
pub struct DraftModel {
    model: Box<dyn Model>,
    block_size: usize,
    /// Tokens that it reads in one go, while nobody's output is under way.
    read_max: usize,
    read: HashMap<ReqId, Progress>,
}

/// How much of a sequence was read since it was admitted last.
#[derive(Debug, Clone, Copy)]
struct Progress {
    admissions: u32,
    tokens: usize,
}

/// A sequence that is guessed for.
struct Guess {
    id: ReqId,
    admissions: u32,
    wanted: usize,
    shadow: Sampler,
    blocks: Vec<u32>,
    /// Tokens of the sequence, guesses apart.
    len: usize,
    drafts: Vec<u32>,
}

impl DraftModel {
    /// `model` has its cache: as many blocks of `block_size` tokens as the large one's.
    pub fn new(model: Box<dyn Model>, block_size: usize, read_max: usize) -> Self {
        Self { model, block_size: block_size.max(1), read_max, read: HashMap::new() }
    }

    /// What holds for each of its steps.
    pub fn terms(&mut self, terms: &StepTerms) {
        self.model.terms(terms);
    }

    /// Reads on where it is behind, and guesses for the sequences that `wanted` names, as many tokens as it says. Drawn with a copy of
    /// the request's own sampler: the large model will draw with the same random numbers, so that two models that think alike mostly
    /// say alike, at any temperature.
    ///
    /// # Errors
    /// What the draft model says; the caller goes on without it.
    pub fn guess(
        &mut self,
        scheduler: &mut Scheduler,
        wanted: &HashMap<ReqId, usize>,
        sampler_of: &dyn Fn(ReqId) -> Option<Sampler>,
    ) -> Result<Vec<(ReqId, Vec<u32>)>, ModelError> {
        let room: HashMap<ReqId, usize> = wanted.iter().map(|(id, n)| (*id, scheduler.draft_room(*id, *n))).collect();
        let (batch, mut guesses) = self.reading(scheduler, &room, sampler_of);
        let mut logits = self.run(batch)?;
        // Who only reads has no row.
        logits.retain(|rows| !rows.is_empty());
        let mut going: Vec<&mut Guess> = guesses.iter_mut().collect();
        loop {
            going.iter_mut().zip(&logits).for_each(|(guess, rows)| guess.draw(rows));
            going.retain(|guess| guess.goes_on());
            if going.is_empty() {
                break;
            }
            logits = self.run(StepBatch { seqs: going.iter().map(|guess| guess.next_input()).collect() })?;
        }
        for guess in &guesses {
            // The last guess was not read.
            let tokens = guess.len + guess.drafts.len().saturating_sub(1);
            self.read.insert(guess.id, Progress { admissions: guess.admissions, tokens });
        }
        Ok(guesses.into_iter().map(|guess| (guess.id, guess.drafts)).collect())
    }

    fn run(&mut self, batch: StepBatch) -> Result<Vec<Vec<Vec<f32>>>, ModelError> {
        if batch.seqs.is_empty() { Ok(Vec::new()) } else { Ok(self.model.forward(&batch)?.rows) }
    }

    /// What is to be read now, and for whom a guess can begin after that, in the order of their rows.
    fn reading(
        &mut self,
        scheduler: &Scheduler,
        room: &HashMap<ReqId, usize>,
        sampler_of: &dyn Fn(ReqId) -> Option<Sampler>,
    ) -> (StepBatch, Vec<Guess>) {
        let ids: HashSet<ReqId> = scheduler.running().map(|seq| seq.id).collect();
        self.read.retain(|id, _| ids.contains(id));
        let (mut batch, mut guesses, mut written) = (StepBatch::default(), Vec::new(), HashSet::new());
        let mut left = self.read_at_once(scheduler);
        for seq in scheduler.running() {
            let wanted = room.get(&seq.id).copied().unwrap_or(0).min(self.reach(&seq));
            let Some((from, to)) = self.span(&seq, wanted, left) else { continue };
            let blocks = scheduler.blocks_of(seq.id);
            let touched = &blocks[from / self.block_size..to.div_ceil(self.block_size)];
            // Two that share a block read it one after the other.
            if touched.iter().any(|block| written.contains(block)) {
                continue;
            }
            written.extend(touched.iter().copied());
            left -= to - from;
            let shadow = if seq.decodes && to == seq.tokens.len() { sampler_of(seq.id) } else { None };
            let logits = if shadow.is_some() { LogitsWanted::Last } else { LogitsWanted::None };
            let tokens = seq.tokens[from..to].to_vec();
            batch.seqs.push(SeqInput { tokens, start_pos: from, block_table: blocks.clone(), logits });
            let (id, admissions, len) = (seq.id, seq.admissions, seq.tokens.len());
            match shadow {
                Some(shadow) => guesses.push(Guess { id, admissions, wanted, shadow, blocks, len, drafts: Vec::new() }),
                None => drop(self.read.insert(id, Progress { admissions, tokens: to })),
            }
        }
        (batch, guesses)
    }

    fn read_at_once(&self, scheduler: &Scheduler) -> usize {
        match scheduler.running().filter(|seq| seq.decodes).count() {
            0 => self.read_max,
            decodes => self.read_max.min(READ_BESIDE_DECODES_MAX.max(2 * decodes)),
        }
    }

    /// The next tokens to read, `left` at most, if there are any and reading them is of use.
    fn span(&self, seq: &Running<'_>, wanted: usize, left: usize) -> Option<(usize, usize)> {
        let from = self.read_so_far(seq);
        let end = if seq.decodes { seq.tokens.len() } else { seq.computed };
        let to = end.min(from + left);
        let useful = !seq.decodes || wanted > 0;
        (useful && from < to && to <= self.model.info().seq_len_max).then_some((from, to))
    }

    /// What was cached when the sequence was admitted was read for another one, as a rule.
    fn read_so_far(&self, seq: &Running<'_>) -> usize {
        let known = self.read.get(&seq.id).filter(|progress| progress.admissions == seq.admissions);
        known.map_or(seq.cached, |progress| progress.tokens).min(seq.computed)
    }

    /// Guesses that its own longest sequence leaves room for.
    fn reach(&self, seq: &Running<'_>) -> usize {
        self.model.info().seq_len_max.saturating_sub(seq.tokens.len())
    }
}

impl Guess {
    fn draw(&mut self, rows: &[Vec<f32>]) {
        match rows.last().map(|row| self.shadow.sample(row)) {
            Some(Ok(sampled)) => self.drafts.push(sampled.token),
            // No number to draw from: this was the last guess.
            _ => self.wanted = self.drafts.len(),
        }
    }

    fn goes_on(&self) -> bool {
        self.drafts.len() < self.wanted
    }

    fn next_input(&self) -> SeqInput {
        let tokens: Vec<u32> = self.drafts.last().copied().into_iter().collect();
        let start_pos = self.len + self.drafts.len() - 1;
        SeqInput { tokens, start_pos, block_table: self.blocks.clone(), logits: LogitsWanted::Last }
    }
}
