//! Guesses of somebody who reads what the model has read and says a few tokens ahead: a smaller model with the same vocabulary, or the
//! model's own MTP head. Both keep K and V of their own in the very blocks that the scheduler gave the sequence (same numbers, their own
//! memory). They read when guesses are wanted, not at every step.
//!
//! What was not read makes guesses bad and does no other harm. A draft model takes it that what was cached when a sequence was admitted it
//! has read for another one. A head knows of each block whether it has, because it can make up for it: what it reads is kept by the model.

use std::collections::{HashMap, HashSet};

use crate::model::{LogitsWanted, Model, ModelError, Pass, SeqInput, StepBatch, Tell};
use crate::sampling::Sampler;
use crate::scheduler::{Limits, Outcome, ReqId, Running, Scheduler, StepPlan};

/// Tokens that it reads at most in one go beside decodes: their streams wait for it.
const READ_BESIDE_DECODES_MAX: usize = 128;

/// How far somebody has read, and how he guesses on from there.
pub struct Follower {
    /// Whether a model reads, or a model's head.
    pass: Pass,
    block_size: usize,
    /// Tokens that it reads in one go, while nobody's output is under way.
    read_max: usize,
    /// Its own longest sequence.
    len_max: usize,
    read: HashMap<ReqId, Progress>,
    /// Blocks that a head has read to their end, for whomever.
    whole: HashSet<u32>,
}

/// How much of a sequence was read since it was admitted last.
#[derive(Debug, Clone, Copy)]
struct Progress {
    admissions: u32,
    tokens: usize,
    /// The block that the next token is in, if there was one yet.
    block: Option<u32>,
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

impl Follower {
    /// Who follows has a cache of as many blocks of the same size as the model.
    pub fn new(pass: Pass, limits: &Limits, len_max: usize) -> Self {
        let (block_size, read_max) = (limits.block_size.max(1), limits.step_tokens_max);
        Self { pass, block_size, read_max, len_max, read: HashMap::new(), whole: HashSet::new() }
    }

    /// The model has run this step: a block whose beginning it wrote has another content than before, and what was read of guesses that are
    /// not in the text was not read of the text.
    pub fn note(&mut self, plan: &StepPlan, outcomes: &[Outcome]) {
        let brought: HashMap<ReqId, usize> =
            outcomes.iter().map(|outcome| (outcome.id, outcome.tokens.len())).collect();
        for (row, seq) in plan.rows.iter().zip(&plan.batch.seqs) {
            // all of them but the last, which no row has run
            let accepted = brought.get(&row.id).map_or(0, |tokens| tokens.saturating_sub(1));
            let text = seq.start_pos + seq.tokens.len() - row.drafts + accepted;
            if let Some(progress) = self.read.get_mut(&row.id) {
                progress.tokens = progress.tokens.min(text);
            }
        }
        for seq in &plan.batch.seqs {
            let begun =
                seq.start_pos.div_ceil(self.block_size)..(seq.start_pos + seq.tokens.len()).div_ceil(self.block_size);
            for block in seq.block_table.get(begun).unwrap_or_default() {
                self.whole.remove(block);
            }
        }
    }

    /// Reads on where it is behind, and guesses for the sequences that `wanted` names, as many tokens as it says. Drawn with a copy of
    /// the request's own sampler: the large model will draw with the same random numbers, so that two models that think alike mostly
    /// say alike, at any temperature.
    ///
    /// # Errors
    /// What `model` says; the caller goes on without it.
    pub fn guess(
        &mut self,
        (model, tell): (&mut dyn Model, Tell<'_>),
        scheduler: &mut Scheduler,
        wanted: &HashMap<ReqId, usize>,
        sampler_of: &dyn Fn(ReqId) -> Option<Sampler>,
    ) -> Result<Vec<(ReqId, Vec<u32>)>, ModelError> {
        let room: HashMap<ReqId, usize> = wanted.iter().map(|(id, n)| (*id, scheduler.draft_room(*id, *n))).collect();
        let (seqs, mut guesses) = self.reading(scheduler, &room, sampler_of);
        let mut logits = self.run((&mut *model, &mut *tell), seqs)?;
        // Who only reads has no row.
        logits.retain(|rows| !rows.is_empty());
        let mut going: Vec<&mut Guess> = guesses.iter_mut().collect();
        loop {
            going.iter_mut().zip(&logits).for_each(|(guess, rows)| guess.draw(rows));
            going.retain(|guess| guess.goes_on());
            if going.is_empty() {
                break;
            }
            logits = self.run((&mut *model, &mut *tell), going.iter().map(|guess| guess.next_input()).collect())?;
        }
        for guess in &guesses {
            // The last guess was not read. A head reads the others again: it made them of its own states, not of the model's.
            let read = if self.pass == Pass::Head { 0 } else { guess.drafts.len().saturating_sub(1) };
            self.has_read(guess.id, guess.admissions, (guess.len + read, &guess.blocks));
        }
        Ok(guesses.into_iter().map(|guess| (guess.id, guess.drafts)).collect())
    }

    fn run(
        &self,
        (model, tell): (&mut dyn Model, Tell<'_>),
        seqs: Vec<SeqInput>,
    ) -> Result<Vec<Vec<Vec<f32>>>, ModelError> {
        let batch = StepBatch { seqs, pass: self.pass };
        if batch.seqs.is_empty() { Ok(Vec::new()) } else { Ok(model.forward_telling(&batch, tell)?.rows) }
    }

    /// What is to be read now, and for whom a guess can begin after that, in the order of their rows.
    fn reading(
        &mut self,
        scheduler: &Scheduler,
        room: &HashMap<ReqId, usize>,
        sampler_of: &dyn Fn(ReqId) -> Option<Sampler>,
    ) -> (Vec<SeqInput>, Vec<Guess>) {
        let ids: HashSet<ReqId> = scheduler.running().map(|seq| seq.id).collect();
        self.read.retain(|id, _| ids.contains(id));
        let (mut seqs, mut guesses, mut written) = (Vec::new(), Vec::new(), HashSet::new());
        let mut left = self.read_at_once(scheduler);
        for seq in scheduler.running() {
            let wanted = room.get(&seq.id).copied().unwrap_or(0).min(self.len_max.saturating_sub(seq.tokens.len()));
            let blocks = scheduler.blocks_of(seq.id);
            let Some((from, to)) = self.span(&seq, &blocks, wanted, left) else { continue };
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
            seqs.push(SeqInput { tokens, start_pos: from, block_table: blocks.clone(), logits });
            let (id, admissions, len) = (seq.id, seq.admissions, seq.tokens.len());
            match shadow {
                Some(shadow) => guesses.push(Guess { id, admissions, wanted, shadow, blocks, len, drafts: Vec::new() }),
                None => self.has_read(id, admissions, (to, &blocks)),
            }
        }
        (seqs, guesses)
    }

    fn has_read(&mut self, id: ReqId, admissions: u32, (tokens, blocks): (usize, &[u32])) {
        let full = tokens / self.block_size;
        self.read.insert(id, Progress { admissions, tokens, block: blocks.get(full).copied() });
        if self.pass == Pass::Head {
            // all before was found whole, or has just been read
            self.whole.extend(blocks.iter().take(full));
        }
    }

    fn read_at_once(&self, scheduler: &Scheduler) -> usize {
        match scheduler.running().filter(|seq| seq.decodes).count() {
            0 => self.read_max,
            decodes => self.read_max.min(READ_BESIDE_DECODES_MAX.max(2 * decodes)),
        }
    }

    /// The next tokens to read, `left` at most, if there are any and reading them is of use.
    fn span(&self, seq: &Running<'_>, blocks: &[u32], wanted: usize, left: usize) -> Option<(usize, usize)> {
        let from = self.read_so_far(seq, blocks);
        let end = if seq.decodes { seq.tokens.len() } else { seq.computed };
        let to = end.min(from + left);
        let useful = !seq.decodes || wanted > 0;
        (useful && from < to && to <= self.len_max).then_some((from, to))
    }

    /// How many of a sequence's tokens need not be read any more.
    fn read_so_far(&self, seq: &Running<'_>, blocks: &[u32]) -> usize {
        let known = self.read.get(&seq.id).filter(|progress| progress.admissions == seq.admissions);
        let tokens = known.map_or(seq.cached, |progress| progress.tokens).min(seq.computed);
        if self.pass == Pass::Model {
            return tokens;
        }
        let full = tokens / self.block_size;
        let unread = blocks.iter().take(full).position(|block| !self.whole.contains(block));
        // a block that was full of what another one had as well may have become the other one
        let same = known.is_some_and(|progress| progress.block == blocks.get(full).copied());
        unread.map_or(if same { tokens } else { full * self.block_size }, |block| block * self.block_size)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::PlanRow;

    /// A sequence of seven tokens, of which the model had read six, and a step that verifies three guesses.
    fn step(drafts: usize) -> StepPlan {
        let (tokens, block_table) = (vec![1; 1 + drafts], vec![0, 1, 2]);
        let seq = SeqInput { tokens, start_pos: 6, block_table, logits: LogitsWanted::All };
        let row = PlanRow { id: 5, samples: true, decode: true, drafts, report: 0..0 };
        StepPlan { batch: StepBatch::of(vec![seq]), rows: vec![row], ..StepPlan::default() }
    }

    #[test]
    fn what_was_read_of_guesses_counts_as_far_as_they_came_to_be_the_text() {
        // three guesses, two of them read: nine tokens are in the cache
        for (drafts, brought, read) in [(3, 1, 7), (3, 2, 8), (3, 3, 9), (3, 4, 9), (0, 1, 7), (3, 0, 7)] {
            let mut follower = Follower::new(Pass::Model, &Limits::default(), 64);
            follower.has_read(5, 1, (9, &[0, 1, 2]));
            let outcome = Outcome { id: 5, tokens: vec![1; brought], finish: None };
            follower.note(&step(drafts), if brought > 0 { std::slice::from_ref(&outcome) } else { &[] });
            assert_eq!(follower.read[&5].tokens, read, "{drafts} guesses, {brought} tokens");
        }
    }
}
