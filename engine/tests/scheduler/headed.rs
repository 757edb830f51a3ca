//! [`PagedModel`] with an MTP head that has a cache of its own in the same slots. It is right about the next token as long as everything that
//! it attends to is there: a slot that the head did not read, or read as another's, makes its guess bad and is counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use engine::model::{KvShape, LogitsWanted, Model, ModelError, ModelInfo, Pass, SeqInput, StepBatch, StepLogits};

use crate::paged::{NEVER, PagedModel, Slot};

pub struct HeadedModel {
    model: PagedModel,
    /// What the head has read, by slot; where it has read all, this is what the model has there.
    read: Vec<Slot>,
    /// One guess in so many is wrong, about; 0: none.
    lies: u64,
    /// Rows of the head that attended to a slot that was not read.
    pub blind: Arc<AtomicU64>,
}

impl HeadedModel {
    pub fn new(seq_len_max: usize, lies: u64) -> Self {
        Self { model: PagedModel::new(seq_len_max, true), read: Vec::new(), lies, blind: Arc::default() }
    }

    fn guesses(&mut self, seq: &SeqInput) -> Vec<Vec<f32>> {
        let mut rows = Vec::new();
        for (pos, token) in (seq.start_pos..).zip(&seq.tokens) {
            let slot = self.model.before(seq, pos).next(*token);
            let place = self.model.place(seq, pos);
            self.read[place] = slot;
            let all = (0..pos).map(|pos| self.model.place(seq, pos));
            let sees = all.into_iter().all(|place| self.read[place] == self.model.slots[place]);
            self.blind.fetch_add(u64::from(!sees), Relaxed);
            let lies = self.lies > 0 && slot.chain.is_multiple_of(self.lies);
            let wanted = pos + 1 == seq.start_pos + seq.tokens.len() && seq.logits == LogitsWanted::Last;
            if wanted {
                // the next guess stands on it, until the model reads here
                self.model.slots[place] = slot;
                rows.push(if lies || !sees { NEVER.row(true) } else { slot.row(true) });
            }
        }
        rows
    }
}

impl Model for HeadedModel {
    fn info(&self) -> &ModelInfo {
        self.model.info()
    }

    fn has_head(&self) -> bool {
        true
    }

    fn allocate_kv(&mut self, shape: KvShape) -> Result<(), ModelError> {
        self.read = vec![NEVER; shape.num_blocks * shape.block_size];
        self.model.allocate_kv(shape)
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<StepLogits, ModelError> {
        if batch.pass == Pass::Model {
            return self.model.forward(batch);
        }
        Ok(StepLogits { rows: batch.seqs.iter().map(|seq| self.guesses(seq)).collect() })
    }
}
