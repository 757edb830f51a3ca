//! What the first rank tells the others, as bytes: the cache to allocate, or a step with its terms. Pure; reading is total. The hash of a
//! step is over what will be computed, so that ranks with the same hash launch the same collectives of the same sizes (E3).

use std::time::Duration;

use crate::beat::{StepShape, Tally};
use crate::model::{KvShape, LogitsWanted, Pass, SeqInput, StepBatch, StepTerms};

/// One order of the first rank.
#[derive(Debug, Clone, PartialEq)]
pub enum Order {
    Allocate(KvShape),
    Step { terms: StepTerms, batch: StepBatch },
}

/// What bounds the steps of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanLimits {
    pub seqs: usize,
    pub tokens: usize,
    /// Blocks of the longest sequence: sequences that share them have each the whole table.
    pub blocks_a_seq: usize,
}

impl PlanLimits {
    /// The longest order of such an engine.
    pub fn bytes(&self) -> usize {
        let a_seq = self.blocks_a_seq.saturating_mul(4).saturating_add(SEQ_WORDS * 8);
        let lists = self.seqs.saturating_mul(a_seq).saturating_add(self.tokens.saturating_mul(4));
        lists.saturating_add(STEP_WORDS * 8)
    }
}

/// Words of a step beside its sequences, and of each of these beside its tokens and blocks.
const STEP_WORDS: usize = 16;
const SEQ_WORDS: usize = 4;

const ALLOCATE: u64 = 1;
const STEP: u64 = 2;

impl Order {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer(Vec::new());
        match self {
            Self::Allocate(shape) => out.all(&[ALLOCATE, shape.num_blocks as u64, shape.block_size as u64]),
            Self::Step { terms, batch } => {
                let allowed_ms = terms.allowed.map_or(0, |a| u64::try_from(a.as_millis()).unwrap_or(u64::MAX).max(1));
                let Tally { tokens_delivered, requests_finished, running, waiting, prompt_tokens_owed } = terms.tally;
                out.all(&[STEP, allowed_ms, tokens_delivered, requests_finished]);
                out.all(&[running as u64, waiting as u64, prompt_tokens_owed as u64, terms.armed]);
                let StepShape { requests, prefill_tokens, decode_tokens, prefill_units } = terms.shape;
                out.all(&[requests as u64, prefill_tokens as u64, decode_tokens as u64, prefill_units]);
                out.all(&[u64::from(terms.warms), terms.steps_completed]);
                out.batch(batch);
            }
        }
        out.0
    }

    /// From bytes; `None` where they are no order.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut read = Reader(bytes);
        let order = match read.word()? {
            ALLOCATE => Self::Allocate(KvShape { num_blocks: read.size()?, block_size: read.size()? }),
            STEP => {
                let allowed = Some(read.word()?).filter(|ms| *ms > 0).map(Duration::from_millis);
                let tally = Tally {
                    tokens_delivered: read.word()?,
                    requests_finished: read.word()?,
                    running: read.size()?,
                    waiting: read.size()?,
                    prompt_tokens_owed: read.size()?,
                };
                let armed = read.word()?;
                let shape = StepShape {
                    requests: read.size()?,
                    prefill_tokens: read.size()?,
                    decode_tokens: read.size()?,
                    prefill_units: read.word()?,
                };
                let (warms, steps_completed) = (read.word()? != 0, read.word()?);
                let terms = StepTerms { allowed, tally, shape, warms, armed, steps_completed };
                Self::Step { terms, batch: read.batch()? }
            }
            _ => return None,
        };
        read.0.is_empty().then_some(order)
    }
}

/// What a step will compute, in 64 bits: FNV-1a over its batch. By which program a rank computes it is not in it: one may run eagerly what
/// another replays, with the same bits, and a program of another shape than the batch's is refused where it is found (`programs/`).
pub fn hash(batch: &StepBatch) -> u64 {
    let mut out = Writer(Vec::new());
    out.batch(batch);
    out.0.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

struct Writer(Vec<u8>);

impl Writer {
    fn all(&mut self, words: &[u64]) {
        words.iter().for_each(|word| self.0.extend(word.to_le_bytes()));
    }

    fn numbers(&mut self, numbers: &[u32]) {
        self.all(&[numbers.len() as u64]);
        numbers.iter().for_each(|number| self.0.extend(number.to_le_bytes()));
    }

    fn batch(&mut self, batch: &StepBatch) {
        self.all(&[u64::from(batch.pass == Pass::Head), batch.seqs.len() as u64]);
        for seq in &batch.seqs {
            let logits = match seq.logits {
                LogitsWanted::None => 0,
                // nobody draws where there are ranks
                LogitsWanted::Last | LogitsWanted::Drawn(_) => 1,
                LogitsWanted::All => 2,
            };
            self.all(&[seq.start_pos as u64, logits]);
            self.numbers(&seq.tokens);
            self.numbers(&seq.block_table);
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn word(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }

    fn size(&mut self) -> Option<usize> {
        usize::try_from(self.word()?).ok()
    }

    fn numbers(&mut self) -> Option<Vec<u32>> {
        let len = self.size()?.checked_mul(4)?;
        let (numbers, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(numbers.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }

    fn batch(&mut self) -> Option<StepBatch> {
        let pass = match self.word()? {
            0 => Pass::Model,
            1 => Pass::Head,
            _ => return None,
        };
        let count = self.size()?;
        (count <= self.0.len() / (SEQ_WORDS * 8)).then_some(())?;
        Some(StepBatch { seqs: (0..count).map(|_| self.seq()).collect::<Option<_>>()?, pass })
    }

    fn seq(&mut self) -> Option<SeqInput> {
        let start_pos = self.size()?;
        let logits = match self.word()? {
            0 => LogitsWanted::None,
            1 => LogitsWanted::Last,
            2 => LogitsWanted::All,
            _ => return None,
        };
        Some(SeqInput { tokens: self.numbers()?, start_pos, block_table: self.numbers()?, logits })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn order(tokens: Vec<u32>, start_pos: usize, allowed: Option<u64>) -> Order {
        let seq = |logits| SeqInput { tokens: tokens.clone(), start_pos, block_table: vec![3, 1], logits };
        let seqs = vec![seq(LogitsWanted::None), seq(LogitsWanted::Last), seq(LogitsWanted::All)];
        let tally = Tally { tokens_delivered: 5, requests_finished: 4, running: 3, waiting: 2, prompt_tokens_owed: 1 };
        let shape = StepShape { requests: 7, prefill_tokens: 8, decode_tokens: 9, prefill_units: 10 };
        let allowed = allowed.map(Duration::from_millis);
        let terms = StepTerms { allowed, tally, shape, warms: true, armed: 6, steps_completed: 11 };
        Order::Step { terms, batch: StepBatch::of(seqs) }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(tokens: Vec<u32>, start_pos: usize, allowed in proptest::option::of(1u64..1000)) {
            let order = order(tokens, start_pos, allowed);
            prop_assert_eq!(Order::decode(&order.encode()), Some(order));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>, cut in 0usize..200) {
            drop(Order::decode(&bytes));
            let mut whole = order(vec![1, 2, 3], 7, None).encode();
            whole.truncate(cut);
            prop_assert_eq!(Order::decode(&whole), None);
        }
    }

    #[test]
    fn the_longest_order_is_as_long_as_its_limits_say() {
        let order = order(vec![1, 2, 3, 4, 5], 7, None);
        assert_eq!(PlanLimits { seqs: 3, tokens: 15, blocks_a_seq: 2 }.bytes(), order.encode().len());
        let all = usize::MAX;
        assert_eq!(PlanLimits { seqs: all, tokens: all, blocks_a_seq: all }.bytes(), all);
    }

    #[test]
    fn the_hash_is_of_what_is_computed() {
        let batch = |start_pos| match order(vec![1, 2], start_pos, None) {
            Order::Step { batch, .. } => batch,
            Order::Allocate(_) => StepBatch::default(),
        };
        assert_eq!(hash(&batch(3)), hash(&batch(3)));
        assert_ne!(hash(&batch(3)), hash(&batch(4)));
        let head = StepBatch { pass: Pass::Head, ..batch(3) };
        assert_ne!(hash(&batch(3)), hash(&head));
        let guess = Order::Step { terms: StepTerms::default(), batch: head };
        assert_eq!(Order::decode(&guess.encode()), Some(guess));
        let shape = KvShape { num_blocks: 9, block_size: 16 };
        assert_eq!(Order::decode(&Order::Allocate(shape).encode()), Some(Order::Allocate(shape)));
    }
}
