//! What a program is for: the exact shape of a step (E2). Two steps of one key run the same calls on matrices of the same sizes, and
//! bring the same numbers of values to the same collectives. Pure.

use crate::model::{LogitsWanted, SeqInput, StepBatch};

/// Longer parts of a sequence are prompts: their shapes hardly come twice.
pub const TOKENS_MAX: usize = 17;
/// See [`ProgramKey::rounded_up`].
const ROUND: usize = 8;

/// One request of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SeqShape {
    tokens: usize,
    wants: Wants,
}

/// A guess that is verified wants the logits of all its tokens, a plain decode of the last one, or what is drawn of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wants {
    None,
    Last,
    All,
    Drawn,
}

impl SeqShape {
    fn of(seq: &SeqInput) -> Self {
        let wants = match seq.logits {
            LogitsWanted::None => Wants::None,
            LogitsWanted::Last => Wants::Last,
            LogitsWanted::All => Wants::All,
            LogitsWanted::Drawn(_) => Wants::Drawn,
        };
        Self { tokens: seq.tokens.len(), wants }
    }

    fn rows_wanted(self) -> usize {
        match self.wants {
            Wants::None => 0,
            Wants::Last | Wants::Drawn => 1,
            Wants::All => self.tokens,
        }
    }
}

/// The shape of a step: its requests in order, for each how many tokens it runs and whose logits it wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramKey {
    /// First, because it tells most keys apart.
    number: u64,
    shapes: Box<[SeqShape]>,
}

impl ProgramKey {
    /// The key of a step; `None` where there is a prompt in it, or nothing.
    pub fn of(batch: &StepBatch) -> Option<Self> {
        is_worth_it(batch).then(|| Self::new(batch.seqs.iter().map(SeqShape::of).collect()))
    }

    fn new(shapes: Box<[SeqShape]>) -> Self {
        let number = number(shapes.iter().copied());
        Self { shapes, number }
    }

    /// The key that engines round a step up to whose programs are of a few sizes, captured before the first request (S1): the next
    /// multiple of 8 requests, each of twice the tokens. 15 requests of one token become 16 of two.
    pub fn rounded_up(batch: &StepBatch) -> Option<Self> {
        let longest = Self::of(batch)?.shapes.iter().map(|shape| shape.tokens).max()?;
        let shape = SeqShape { tokens: longest * 2, wants: Wants::All };
        Some(Self::new(vec![shape; batch.seqs.len().next_multiple_of(ROUND)].into()))
    }

    /// Whether a step has exactly this shape.
    pub fn is_of(&self, batch: &StepBatch) -> bool {
        self.shapes.len() == batch.seqs.len()
            && self.shapes.iter().zip(&batch.seqs).all(|(shape, seq)| *shape == SeqShape::of(seq))
    }

    /// The key as a number, by which programs are found, and which people can compare in a flight recorder; never 0. Two keys may have one.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The number that a step's key has.
    pub fn number_of(batch: &StepBatch) -> u64 {
        number(batch.seqs.iter().map(SeqShape::of))
    }

    /// The same key, with another's number.
    #[cfg(test)]
    pub fn numbered(self, number: u64) -> Self {
        Self { number, ..self }
    }

    /// Rows of the step's matrices.
    pub fn rows(&self) -> usize {
        self.shapes.iter().map(|shape| shape.tokens).sum()
    }

    /// Rows whose logits are wanted.
    pub fn rows_wanted(&self) -> usize {
        self.shapes.iter().map(|shape| shape.rows_wanted()).sum()
    }

    /// Those rows, counted in the step.
    pub fn wanted(&self) -> Vec<usize> {
        let mut end = 0;
        let of = |shape: &SeqShape| {
            end += shape.tokens;
            end - shape.rows_wanted()..end
        };
        self.shapes.iter().flat_map(of).collect()
    }

    /// Rows of each request.
    pub fn rows_of_seqs(&self) -> impl Iterator<Item = usize> {
        self.shapes.iter().map(|shape| shape.tokens)
    }
}

fn number(shapes: impl Iterator<Item = SeqShape>) -> u64 {
    let words = shapes.map(|shape| shape.tokens as u64 * 4 + shape.wants as u64);
    words.fold(0xcbf2_9ce4_8422_2325, |hash: u64, word| (hash ^ word).wrapping_mul(0x100_0000_01b3)).max(1)
}

/// Whether steps like this one come again and again: decodes, and guesses that are verified.
fn is_worth_it(batch: &StepBatch) -> bool {
    !batch.seqs.is_empty() && batch.seqs.iter().all(|seq| (1..=TOKENS_MAX).contains(&seq.tokens.len()))
}
