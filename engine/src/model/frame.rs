//! What all layers of one step need to know of it, and how what it gave is dealt out to its sequences.

use std::ops::Range;

use crate::backend::AttentionSeq;
use crate::sampling::Draw;

use super::StepLogits;

/// What every layer of one step shares.
pub(super) struct StepFrame<'a, M> {
    pub seqs: Vec<AttentionSeq<'a>>,
    pub slots: Vec<usize>,
    pub cos: M,
    pub sin: M,
    /// For each sequence, the rows whose logits are wanted.
    pub wanted: Vec<Range<usize>>,
    /// How tokens are drawn of all those rows; empty where one of them is wanted itself.
    pub draws: Vec<Draw>,
}

impl<M> StepFrame<'_, M> {
    /// The rows whose logits are wanted, of all sequences.
    pub fn rows_wanted(&self) -> Vec<usize> {
        self.wanted.iter().flat_map(|rows| rows.clone()).collect()
    }

    /// Rows of logits, dealt out to the sequences that want them.
    pub fn answer(&self, rows: Vec<Vec<f32>>) -> StepLogits {
        let mut rows = rows.into_iter();
        StepLogits::of(self.wanted.iter().map(|wanted| rows.by_ref().take(wanted.len()).collect()).collect())
    }

    /// What was drawn, dealt out in the same way.
    pub fn tokens(&self, tokens: Vec<Option<u32>>) -> StepLogits {
        let mut tokens = tokens.into_iter();
        let drawn = self.wanted.iter().map(|wanted| tokens.by_ref().take(wanted.len()).last().flatten()).collect();
        StepLogits { rows: vec![Vec::new(); self.wanted.len()], drawn }
    }
}
