//! What a program is for: the exact shape of a step (E2). Two steps of one key run the same calls on matrices of the same sizes, and
//! bring the same numbers of values to the same collectives. Pure.

use crate::model::{LogitsWanted, SeqInput, StepBatch};

/// Longer parts of a sequence are prompts: their shapes hardly come twice.
pub const TOKENS_MAX: usize = 17;

/// One request of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SeqShape {
    tokens: usize,
    /// A guess that is verified wants the logits of all its tokens, a plain decode of the last one.
    logits: LogitsWanted,
}

impl SeqShape {
    fn of(seq: &SeqInput) -> Self {
        Self { tokens: seq.tokens.len(), logits: seq.logits }
    }

    fn rows_wanted(self) -> usize {
        match self.logits {
            LogitsWanted::None => 0,
            LogitsWanted::Last => 1,
            LogitsWanted::All => self.tokens,
        }
    }
}

/// The shape of a step: its requests in order, for each how many tokens it runs and whose logits it wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramKey(Box<[SeqShape]>);

impl ProgramKey {
    /// The key of a step; `None` where there is a prompt in it, or nothing.
    pub fn of(batch: &StepBatch) -> Option<Self> {
        is_worth_it(batch).then(|| Self(batch.seqs.iter().map(SeqShape::of).collect()))
    }

    /// Whether a step has exactly this shape.
    pub fn is_of(&self, batch: &StepBatch) -> bool {
        self.0.len() == batch.seqs.len()
            && self.0.iter().zip(&batch.seqs).all(|(shape, seq)| *shape == SeqShape::of(seq))
    }

    /// The key as a number that people can compare in a flight recorder; never 0.
    pub fn number(&self) -> u64 {
        let words = self.0.iter().map(|shape| shape.tokens as u64 * 4 + shape.logits as u64);
        words.fold(0xcbf2_9ce4_8422_2325, |hash: u64, word| (hash ^ word).wrapping_mul(0x100_0000_01b3)).max(1)
    }

    /// Rows of the step's matrices.
    pub fn rows(&self) -> usize {
        self.0.iter().map(|shape| shape.tokens).sum()
    }

    /// Rows whose logits are wanted.
    pub fn rows_wanted(&self) -> usize {
        self.0.iter().map(|shape| shape.rows_wanted()).sum()
    }

    /// Those rows, counted in the step.
    pub fn wanted(&self) -> Vec<usize> {
        let mut end = 0;
        let of = |shape: &SeqShape| {
            end += shape.tokens;
            end - shape.rows_wanted()..end
        };
        self.0.iter().flat_map(of).collect()
    }

    /// Rows of each request.
    pub fn rows_of_seqs(&self) -> impl Iterator<Item = usize> {
        self.0.iter().map(|shape| shape.tokens)
    }
}

/// Whether steps like this one come again and again: decodes, and guesses that are verified.
fn is_worth_it(batch: &StepBatch) -> bool {
    !batch.seqs.is_empty() && batch.seqs.iter().all(|seq| (1..=TOKENS_MAX).contains(&seq.tokens.len()))
}
