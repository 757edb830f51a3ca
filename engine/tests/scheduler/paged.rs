//! A model whose whole state is in the paged cache: each slot holds a hash of its token and of the slot before it, found through the
//! block table. A wrong block, a lost chunk, a neighbour's write or a stale shared block changes the output from there on.

use engine::model::{KvShape, LogitsWanted, Model, ModelError, ModelInfo, SeqInput, StepBatch, StepLogits};

pub const VOCAB: usize = 64;
pub const EOS: u32 = 0;
/// A sequence with this token is refused by the model, makes it panic, has logits that are no numbers.
pub const REFUSED: u32 = 1;
pub const PANICS: u32 = 2;
pub const NAN: u32 = 3;
/// Tokens from here on mean nothing.
pub const FIRST: u32 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    pub chain: u64,
    token: u32,
    nan: bool,
}

const BEGIN: Slot = Slot { chain: 0x5EED, token: FIRST, nan: false };
pub const NEVER: Slot = Slot { chain: 0xDEAD_BEEF, token: FIRST + 1, nan: false };

pub struct PagedModel {
    info: ModelInfo,
    pub slots: Vec<Slot>,
    block_size: usize,
    /// Does what it says depend on everything before, or on the last token alone (a draft model)?
    deep: bool,
}

impl PagedModel {
    pub fn new(seq_len_max: usize, deep: bool) -> Self {
        let (name, arch) = ("paged".to_owned(), "paged".to_owned());
        let eos_token_ids = vec![EOS];
        let info = ModelInfo { name, arch, vocab_size: VOCAB, seq_len_max, eos_token_ids, ..ModelInfo::default() };
        Self { info, slots: Vec::new(), block_size: 1, deep }
    }

    /// Where a position of a sequence lies.
    pub fn place(&self, seq: &SeqInput, pos: usize) -> usize {
        seq.block_table[pos / self.block_size] as usize * self.block_size + pos % self.block_size
    }

    /// What is there before a position.
    pub fn before(&self, seq: &SeqInput, pos: usize) -> Slot {
        if pos == 0 { BEGIN } else { self.slots[self.place(seq, pos - 1)] }
    }

    fn rows(&mut self, seq: &SeqInput) -> Vec<Vec<f32>> {
        let mut slot = self.before(seq, seq.start_pos);
        let mut rows = Vec::new();
        for (i, token) in seq.tokens.iter().enumerate() {
            slot = slot.next(*token);
            let place = self.place(seq, seq.start_pos + i);
            self.slots[place] = slot;
            if seq.logits == LogitsWanted::All || (seq.logits == LogitsWanted::Last && i + 1 == seq.tokens.len()) {
                rows.push(slot.row(self.deep));
            }
        }
        rows
    }
}

impl Model for PagedModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn allocate_kv(&mut self, shape: KvShape) -> Result<(), ModelError> {
        (self.slots, self.block_size) = (vec![NEVER; shape.num_blocks * shape.block_size], shape.block_size);
        Ok(())
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<StepLogits, ModelError> {
        // The warm-up step has every token from 0 on.
        let has = |token| batch.seqs.iter().any(|s| s.tokens.contains(&token) && !s.tokens.starts_with(&[0, 1, 2]));
        if has(REFUSED) {
            return Err(ModelError::BadBatch("a refused token".into()));
        }
        assert!(!has(PANICS), "a token that panics");
        Ok(StepLogits::of(batch.seqs.iter().map(|seq| self.rows(seq)).collect()))
    }
}

impl Slot {
    pub fn next(self, token: u32) -> Self {
        Self { chain: mix(self.chain, token), token, nan: self.nan || token == NAN }
    }

    /// Every eighth token, about, hangs on all that was said; the others follow from the one before, so that there is something to guess.
    pub fn row(self, deep: bool) -> Vec<f32> {
        if self.nan {
            return vec![f32::NAN; VOCAB];
        }
        let state = if deep && self.chain.is_multiple_of(8) { self.chain } else { mix(7, self.token) };
        let ends = deep && self.chain.is_multiple_of(61);
        (0..VOCAB as u32)
            .map(|token| match token {
                EOS => {
                    if ends {
                        20.0
                    } else {
                        -20.0
                    }
                }
                special if special < FIRST => -30.0,
                token => (mix(state, token) % 1000) as f32 / 200.0,
            })
            .collect()
    }
}

pub fn mix(state: u64, token: u32) -> u64 {
    let mut z = state.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (u64::from(token) + 1).wrapping_mul(0xD134_2543_DE82_EF95);
    z = (z ^ (z >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z ^ (z >> 32)
}

/// The likeliest token, the lower one of equals; `None` where there is no number.
pub fn argmax(row: &[f32]) -> Option<u32> {
    let numbers = (0u32..).zip(row).filter(|(_, logit)| logit.is_finite());
    numbers.max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0))).map(|(token, _)| token)
}

/// What greedy decoding must say after `prompt`, without cache, batch or scheduler; ends with a stop token.
pub fn greedy(prompt: &[u32], count: usize, stops: &[u32]) -> Vec<u32> {
    let mut slot = prompt.iter().fold(BEGIN, |slot, token| slot.next(*token));
    let mut said = Vec::new();
    while said.len() < count {
        let token = argmax(&slot.row(true)).unwrap();
        said.push(token);
        if stops.contains(&token) {
            break;
        }
        slot = slot.next(token);
    }
    said
}
