//! [`PagedModel`] with an MTP head that has a cache of its own in the same slots. It is right about the next token as long as everything that
//! it attends to is there: a slot that the head did not read, or read as another's, makes its guess bad and is counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use engine::model::{KvShape, LogitsWanted, Model, ModelError, ModelInfo, Pass, SeqInput, StepBatch, StepLogits};

use crate::paged::{NEVER, PagedModel, Slot};

pub struct HeadedModel {
    model: PagedModel,
    /// What the head has read, by slot; where it has read all, this is what the model has there.
    read: Vec<Slot>,
    /// Slots whose state is the head's own, until the model reads there; and rows that the head made of such a state.
    own: Vec<bool>,
    of_own: Vec<bool>,
    /// One guess in so many is wrong, about; 0: none.
    lies: u64,
    /// How long the head takes for a guess, whatever it is worth.
    pub takes: Duration,
    /// Rows of the head that attended to a slot that was not read, or was read of its own state though the model's is there.
    pub blind: Arc<AtomicU64>,
}

impl HeadedModel {
    pub fn new(seq_len_max: usize, lies: u64) -> Self {
        let (model, read, own, of_own) = (PagedModel::new(seq_len_max, true), Vec::new(), Vec::new(), Vec::new());
        Self { model, read, own, of_own, lies, takes: Duration::ZERO, blind: Arc::default() }
    }

    /// Whether the head's row of a position is what it should be.
    fn is_read(&self, seq: &SeqInput, pos: usize) -> bool {
        let place = self.model.place(seq, pos);
        self.read[place] == self.model.slots[place] && self.of_own[place] == self.is_before_own(seq, pos)
    }

    fn is_before_own(&self, seq: &SeqInput, pos: usize) -> bool {
        pos > 0 && self.own[self.model.place(seq, pos - 1)]
    }

    fn guesses(&mut self, seq: &SeqInput) -> Vec<Vec<f32>> {
        let mut rows = Vec::new();
        for (pos, token) in (seq.start_pos..).zip(&seq.tokens) {
            let slot = self.model.before(seq, pos).next(*token);
            let place = self.model.place(seq, pos);
            (self.read[place], self.of_own[place]) = (slot, self.is_before_own(seq, pos));
            let sees = (0..pos).all(|pos| self.is_read(seq, pos));
            self.blind.fetch_add(u64::from(!sees), Relaxed);
            let lies = self.lies > 0 && slot.chain.is_multiple_of(self.lies);
            let wanted = pos + 1 == seq.start_pos + seq.tokens.len() && seq.logits == LogitsWanted::Last;
            if wanted {
                // the next guess stands on it, until the model reads here
                (self.model.slots[place], self.own[place]) = (slot, true);
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
        let slots = shape.num_blocks * shape.block_size;
        (self.read, self.own, self.of_own) = (vec![NEVER; slots], vec![false; slots], vec![false; slots]);
        self.model.allocate_kv(shape)
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<StepLogits, ModelError> {
        if batch.pass == Pass::Model {
            for seq in &batch.seqs {
                for pos in seq.start_pos..seq.start_pos + seq.tokens.len() {
                    let place = self.model.place(seq, pos);
                    self.own[place] = false;
                }
            }
            return self.model.forward(batch);
        }
        std::thread::sleep(self.takes);
        Ok(StepLogits::of(batch.seqs.iter().map(|seq| self.guesses(seq)).collect()))
    }
}
