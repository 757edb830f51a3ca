//! An MTP head: one more block behind the model, which makes of the model's last hidden state of a token, and of the token after it, what
//! comes after both. Here a row of the head stands at the place of its token: row `j` is made of token `j` and of the state of `j - 1`.
//! So what the head keeps in a slot depends on the tokens up to that slot alone, as all else in a block: whoever finds a cached prefix finds
//! the head's part of it. (Published engines put the pair a place earlier; attention looks at distances, so that is the same.)
//!
//! **Invariant:** the state of every slot that the model has read is kept beside its K and V, in the same blocks. A head may read any part of
//! a sequence at any time, or none.
//! **Invariant:** the place before the first token has no state: row 0 is made with zeros and seen by no other row.

use crate::backend::Backend;

use super::batch;
use super::decoder::{Cache, Decoder, Layer, Linear};
use super::frame::StepFrame;
use super::{KvShape, LogitsWanted, ModelError, StepBatch, StepLogits};

/// The head's weights; embedding and output head are the model's.
pub(super) struct Head<B: Backend> {
    pub token_norm: B::Matrix,
    pub hidden_norm: B::Matrix,
    /// From both, side by side, the state first, to one.
    pub input: Linear<B>,
    pub layer: Layer<B>,
    pub norm: B::Matrix,
}

/// The state of every slot: the stream behind the model's last block, before its norm.
pub(super) struct States {
    width: usize,
    values: Vec<f32>,
}

impl States {
    /// Memory for all slots of a cache.
    ///
    /// # Errors
    /// [`ModelError::OutOfMemory`] where there is none.
    pub fn new(shape: KvShape, width: usize) -> Result<Self, ModelError> {
        let len = shape.num_blocks.saturating_mul(shape.block_size).saturating_mul(width);
        let mut values = Vec::new();
        values.try_reserve_exact(len).map_err(|_| ModelError::OutOfMemory {
            needed_bytes: Self::bytes(shape, width),
            reason: "no room for the states that the MTP head reads; ask for fewer blocks".to_owned(),
        })?;
        // touched now, as the cache is
        values.resize(len, 0.0);
        Ok(Self { width, values })
    }

    /// What they take.
    pub fn bytes(shape: KvShape, width: usize) -> u64 {
        let values = shape.num_blocks.saturating_mul(shape.block_size).saturating_mul(width) as u64;
        values.saturating_mul(size_of::<f32>() as u64)
    }

    /// Keeps a row for each of `slots`.
    pub fn keep<'a>(&mut self, slots: impl IntoIterator<Item = &'a usize>, rows: &[Vec<f32>]) {
        for (slot, row) in slots.into_iter().zip(rows) {
            self.values[slot * self.width..(slot + 1) * self.width].copy_from_slice(row);
        }
    }

    /// For each row of a batch the state of the place before it, one after another.
    fn before(&self, batch: &StepBatch, block_size: usize) -> Vec<f32> {
        let mut all = Vec::new();
        for seq in &batch.seqs {
            for pos in seq.start_pos..seq.start_pos + seq.tokens.len() {
                match pos.checked_sub(1).map(|before| batch::slot(seq, before, block_size)) {
                    Some(slot) => all.extend_from_slice(&self.values[slot * self.width..(slot + 1) * self.width]),
                    None => all.resize(all.len() + self.width, 0.0),
                }
            }
        }
        all
    }
}

impl<B: Backend + 'static> Decoder<B> {
    /// What the head will read of this step.
    pub(super) fn keep_states(&self, cache: &mut Cache<B>, x: &B::Matrix, frame: &StepFrame<'_, B::Matrix>) {
        if let Some(states) = &mut cache.states {
            states.keep(&frame.slots, &self.backend.rows(x));
        }
    }

    /// A pass of the head. Where the last row of a sequence is wanted what the head made of it is kept as that place's state, until the
    /// model reads there: so the next guess stands on this one.
    pub(super) fn guess(
        &self,
        head: &Head<B>,
        cache: &mut Cache<B>,
        (batch, frame): (&StepBatch, &StepFrame<'_, B::Matrix>),
    ) -> StepLogits {
        let b = &self.backend;
        let mut x = self.head_inputs(head, cache, batch);
        self.layer((&mut cache.kv, self.config.layers), &head.layer, &mut x, frame);
        let rows = frame.rows_wanted();
        if rows.is_empty() {
            return frame.answer(Vec::new());
        }
        let last = b.rms_norm(&b.gather_rows(&x, &rows), &head.norm, self.config.norm_eps);
        if let Some(states) = &mut cache.states {
            let made = frame.answer(b.rows(&last)).rows;
            for ((seq, rows), wanted) in batch.seqs.iter().zip(&made).zip(&frame.wanted) {
                if seq.logits == LogitsWanted::Last {
                    states.keep(&frame.slots[wanted.clone()], rows);
                }
            }
        }
        frame.answer(b.rows(&self.head_product(&last)))
    }

    /// The states before the rows' tokens and the tokens' embeddings, each normed, side by side, brought to the width of the stream.
    fn head_inputs(&self, head: &Head<B>, cache: &Cache<B>, batch: &StepBatch) -> B::Matrix {
        let (b, eps, hidden) = (&self.backend, self.config.norm_eps, self.config.hidden);
        let tokens: Vec<u32> = batch.seqs.iter().flat_map(|seq| seq.tokens.iter().copied()).collect();
        let mut embedded = b.embed(&self.weights.embed, &tokens);
        b.rms_norm_over(&mut embedded, &head.token_norm, eps);
        let before =
            cache.states.as_ref().map(|states| states.before(batch, cache.shape.block_size)).unwrap_or_default();
        let mut before = b.upload(tokens.len(), hidden, before);
        b.rms_norm_over(&mut before, &head.hidden_norm, eps);
        let (before, embedded) = (b.download(before), b.download(embedded));
        let pairs = before.chunks_exact(hidden).zip(embedded.chunks_exact(hidden));
        let both = pairs.flat_map(|(state, token)| [state, token]).flatten().copied().collect();
        self.linear((&b.upload(tokens.len(), 2 * hidden, both), false), &head.input)
    }
}
