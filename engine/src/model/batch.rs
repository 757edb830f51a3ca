//! A step's batch as a decoder needs it: checked once against the cache and the model, then turned into positions,
//! slots and wanted rows. Pure. Nothing is written before the whole batch has passed.

use std::collections::HashMap;
use std::ops::Range;

use crate::backend::AttentionSeq;
use crate::sampling::Draw;

use super::{KvShape, LogitsWanted, ModelError, ModelInfo, Pass, SeqInput, StepBatch};

/// Refuses a cache that cannot be.
///
/// # Errors
/// [`ModelError`] when the shape is empty or beyond counting.
pub(super) fn check_shape(shape: KvShape) -> Result<(), ModelError> {
    let KvShape { num_blocks, block_size } = shape;
    if num_blocks == 0 || block_size == 0 || num_blocks > u32::MAX as usize {
        return Err(bad(format!("a KV cache of {num_blocks} blocks of {block_size} tokens is not possible")));
    }
    num_blocks.checked_mul(block_size).map(|_| ()).ok_or_else(|| ModelError::OutOfMemory {
        needed_bytes: u64::MAX,
        reason: format!("{num_blocks} blocks of {block_size} tokens are more than can be counted"),
    })
}

/// Refuses any batch that would read or write outside the cache, or write one slot twice.
pub(super) fn check(batch: &StepBatch, shape: KvShape, info: &ModelInfo) -> Result<(), ModelError> {
    for (index, seq) in batch.seqs.iter().enumerate() {
        check_seq(seq, shape, info).map_err(|reason| bad(format!("sequence {index} of the step: {reason}")))?;
    }
    let mut writers = HashMap::new();
    for (index, seq) in batch.seqs.iter().enumerate() {
        for block in written_blocks(seq, shape.block_size) {
            if let Some(other) = writers.insert(block, index) {
                return Err(bad(format!("sequences {other} and {index} of the step both write block {block}")));
            }
        }
    }
    Ok(())
}

fn check_seq(seq: &SeqInput, shape: KvShape, info: &ModelInfo) -> Result<(), String> {
    if seq.tokens.is_empty() {
        return Err("it has no tokens".to_owned());
    }
    if let Some(token) = seq.tokens.iter().find(|token| **token as usize >= info.vocab_size) {
        return Err(format!("token {token} is outside the vocabulary of {}", info.vocab_size));
    }
    let len = seq.start_pos.saturating_add(seq.tokens.len());
    if len > info.seq_len_max {
        return Err(format!("it reaches {len} tokens; the model takes {}", info.seq_len_max));
    }
    let blocks_needed = len.div_ceil(shape.block_size);
    if seq.block_table.len() < blocks_needed {
        return Err(format!("{len} tokens need {blocks_needed} blocks; its table has {}", seq.block_table.len()));
    }
    if let Some(block) = seq.block_table.iter().find(|block| **block as usize >= shape.num_blocks) {
        return Err(format!("block {block} is outside the cache of {} blocks", shape.num_blocks));
    }
    Ok(())
}

fn written_blocks(seq: &SeqInput, block_size: usize) -> impl Iterator<Item = u32> {
    let len = seq.start_pos + seq.tokens.len();
    seq.block_table[seq.start_pos / block_size..len.div_ceil(block_size)].iter().copied()
}

/// Position of every row of the step.
pub(super) fn positions(batch: &StepBatch) -> Vec<usize> {
    batch.seqs.iter().flat_map(|seq| seq.start_pos..seq.start_pos + seq.tokens.len()).collect()
}

/// Cache slot of every row of the step.
pub(super) fn slots(batch: &StepBatch, block_size: usize) -> Vec<usize> {
    let rows = batch.seqs.iter().flat_map(|seq| (0..seq.tokens.len()).map(move |row| (seq, seq.start_pos + row)));
    rows.map(|(seq, pos)| slot(seq, pos, block_size)).collect()
}

/// Cache slot of a position of a sequence.
pub(super) fn slot(seq: &SeqInput, pos: usize, block_size: usize) -> usize {
    seq.block_table[pos / block_size] as usize * block_size + pos % block_size
}

/// The sequences as attention sees them.
pub(super) fn attention_seqs(batch: &StepBatch) -> Vec<AttentionSeq<'_>> {
    // row 0 of the head is made of no state: no other row sees it
    let since = usize::from(batch.pass == Pass::Head);
    let seqs = batch.seqs.iter();
    seqs.map(|seq| AttentionSeq { rows: seq.tokens.len(), start_pos: seq.start_pos, since, blocks: &seq.block_table })
        .collect()
}

/// For each sequence, the rows of the step whose logits are wanted.
pub(super) fn rows_wanted(batch: &StepBatch) -> Vec<Range<usize>> {
    let mut row = 0;
    let wanted = |seq: &SeqInput| {
        let first = row;
        row += seq.tokens.len();
        match seq.logits {
            LogitsWanted::None => row..row,
            LogitsWanted::Last | LogitsWanted::Drawn(_) => row - 1..row,
            LogitsWanted::All => first..row,
        }
    };
    batch.seqs.iter().map(wanted).collect()
}

/// How tokens are drawn of the rows that are wanted; empty where one of them is wanted itself.
pub(super) fn draws(batch: &StepBatch) -> Vec<Draw> {
    let wants = batch.seqs.iter().filter(|seq| seq.logits != LogitsWanted::None);
    let draw = |seq: &SeqInput| match seq.logits {
        LogitsWanted::Drawn(draw) => Some(draw),
        _ => None,
    };
    wants.map(draw).collect::<Option<_>>().unwrap_or_default()
}

fn bad(reason: String) -> ModelError {
    ModelError::BadBatch(reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape = KvShape { num_blocks: 8, block_size: 4 };

    fn info() -> ModelInfo {
        let (name, arch) = ("m".to_owned(), "llama".to_owned());
        ModelInfo { name, arch, vocab_size: 10, seq_len_max: 16, ..ModelInfo::default() }
    }

    fn seq(tokens: &[u32], start_pos: usize, block_table: &[u32], logits: LogitsWanted) -> SeqInput {
        SeqInput { tokens: tokens.to_vec(), start_pos, block_table: block_table.to_vec(), logits }
    }

    #[test]
    fn rows_positions_and_slots_line_up() {
        let seqs = vec![
            seq(&[1, 2, 3], 3, &[5, 2], LogitsWanted::Last),
            seq(&[4], 0, &[7], LogitsWanted::None),
            seq(&[5, 6], 0, &[0], LogitsWanted::All),
        ];
        let batch = StepBatch::of(seqs);
        check(&batch, SHAPE, &info()).unwrap();
        assert_eq!(positions(&batch), [3, 4, 5, 0, 0, 1]);
        assert_eq!(slots(&batch, 4), [23, 8, 9, 28, 0, 1]);
        assert_eq!(rows_wanted(&batch), [2..3, 4..4, 4..6]);
    }

    #[test]
    fn a_bad_batch_says_which_sequence_and_why() {
        let last = LogitsWanted::Last;
        let cases = [
            (vec![seq(&[], 0, &[0], last)], "no tokens"),
            (vec![seq(&[10], 0, &[0], last)], "token 10"),
            (vec![seq(&[1], 16, &[0, 1, 2, 3, 4], last)], "17 tokens"),
            (vec![seq(&[1], usize::MAX, &[0], last)], "the model takes 16"),
            (vec![seq(&[1; 5], 0, &[0], last)], "need 2 blocks"),
            (vec![seq(&[1], 0, &[8], last)], "block 8"),
            (vec![seq(&[1], 0, &[3], last), seq(&[1], 0, &[3], last)], "both write block 3"),
            (vec![seq(&[1; 8], 0, &[3, 3], last)], "both write block 3"),
        ];
        for (seqs, needle) in cases {
            let error = check(&StepBatch::of(seqs), SHAPE, &info()).unwrap_err().to_string();
            assert!(error.contains(needle), "{error}");
        }
    }

    #[test]
    fn a_shared_prefix_may_be_read_by_two() {
        let batch =
            StepBatch::of(vec![seq(&[1], 4, &[3, 1], LogitsWanted::Last), seq(&[1], 4, &[3, 2], LogitsWanted::Last)]);
        check(&batch, SHAPE, &info()).unwrap();
    }
}
