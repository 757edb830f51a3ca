//! Attention's work as the kernels read it: a word list for each block, the block tables of all sequences, and which of the two ways to
//! go through a context. Pure.

use crate::backend::{AttentionSeq, AttentionUnit, HeadShape};

/// As in kernels/attention.cu.
pub const SPLIT: usize = 64;
const QUERIES: usize = 8;
const ITEM_WORDS: usize = 8;
/// Steps of more rows have blocks enough without splitting.
const SPLIT_ROWS_MAX: usize = 64;
/// What splits hand to the join may take no more than this: every row pays for the longest context.
const PARTS_BYTES_MAX: u64 = 256 << 20;

/// What one call of attention is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Items {
    /// `ITEM_WORDS` words a block: first row, rows, position of the first row, KV head, begin of the table, first query, the
    /// first position that later ones see.
    pub words: Vec<u32>,
    /// The block tables, one after another.
    pub tables: Vec<u32>,
    /// Parts that contexts are cut into; 1: each block goes through all of its context.
    pub splits: usize,
    /// Warps of a block, one for each query: eight, or four where no item has more.
    pub warps: usize,
}

impl Items {
    /// The items of `units`, which are parts of `seqs`. Tables begin on multiples of a power of two and the number of splits is one, so that
    /// steps of one shape are launched alike for long.
    pub fn new(seqs: &[AttentionSeq<'_>], units: &[AttentionUnit], heads: HeadShape) -> Self {
        let group = heads.heads / heads.kv_heads.max(1);
        let stride = seqs.iter().map(|seq| seq.blocks.len()).max().unwrap_or(0).max(1).next_power_of_two();
        let mut tables = vec![0; seqs.len() * stride];
        for (table, seq) in tables.chunks_exact_mut(stride).zip(seqs) {
            table[..seq.blocks.len()].copy_from_slice(seq.blocks);
        }
        let mut words = Vec::new();
        for unit in units {
            let (pos, since) = (seqs[unit.seq].start_pos + unit.at, seqs[unit.seq].since);
            for first_query in (0..unit.rows * group).step_by(QUERIES) {
                let item = [unit.first_row, unit.rows, pos, unit.kv_head, unit.seq * stride, first_query, since, 0];
                words.extend(item.map(|word| word as u32));
            }
        }
        let (rows, longest) =
            seqs.iter().fold((0, 0), |(rows, longest), seq| (rows + seq.rows, longest.max(seq.start_pos + seq.rows)));
        let splits = longest.div_ceil(SPLIT).max(1).next_power_of_two();
        let few = units.iter().all(|unit| unit.rows * group <= QUERIES / 2);
        let warps = if few { QUERIES / 2 } else { QUERIES };
        let items = Self { words, tables, splits, warps };
        let splits_pay = rows <= SPLIT_ROWS_MAX && items.parts_bytes(rows, heads) <= PARTS_BYTES_MAX;
        if splits_pay { items } else { Self { splits: 1, ..items } }
    }

    /// Blocks of the launch.
    pub fn len(&self) -> usize {
        self.words.len() / ITEM_WORDS
    }

    /// Bytes of what splits hand to the join: for each query and split its greatest score, its total and `head_dim` sums.
    pub fn parts_bytes(&self, rows: usize, heads: HeadShape) -> u64 {
        rows as u64 * heads.heads as u64 * self.splits as u64 * (heads.head_dim as u64 + 2) * 4
    }
}

/// Shared memory of a block: its queries, and tiles of 32 positions on their way. There is room for two in f32, and so for four in bf16; of
/// the widest heads for half as many.
pub fn shared_bytes(head_dim: usize, warps: usize) -> u32 {
    let (width, tiles) = (head_dim.next_multiple_of(8), if head_dim <= 128 { 2 } else { 1 });
    ((warps * width + tiles * 32 * (width + 8)) * 4) as u32
}

/// The widest head that the kernels take.
pub const HEAD_DIM_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::attention_units;

    #[test]
    fn every_query_of_every_row_is_in_one_item() {
        let heads = HeadShape { heads: 12, kv_heads: 2, head_dim: 64 };
        let seqs = [
            AttentionSeq { rows: 1, start_pos: 700, since: 0, blocks: &[5; 44] },
            AttentionSeq { rows: 9, start_pos: 0, since: 0, blocks: &[7] },
        ];
        let units = attention_units(seqs.iter().map(|seq| seq.rows), heads);
        let items = Items::new(&seqs, &units, heads);
        assert_eq!((items.splits, items.tables.len(), items.tables[64..66].to_vec()), (16, 128, vec![7, 0]));
        let mut seen = std::collections::BTreeSet::new();
        for item in items.words.chunks_exact(ITEM_WORDS) {
            for query in item[5]..(item[1] * 6).min(item[5] + QUERIES as u32) {
                let (row, head) = (item[0] + query / 6, item[3] * 6 + query % 6);
                assert!(seen.insert((row, head)), "row {row} head {head} twice");
                assert_eq!(item[2] + query / 6, if row == 0 { 700 } else { row - 1 }, "position of row {row}");
            }
        }
        assert_eq!(seen.len(), 10 * 12);
        assert!(shared_bytes(HEAD_DIM_MAX, QUERIES) <= 48 << 10, "every device has that much");
    }

    #[test]
    fn a_long_prompt_is_not_split_and_a_step_of_one_shape_is_launched_alike() {
        let heads = HeadShape { heads: 2, kv_heads: 1, head_dim: 8 };
        let of = |rows: usize, start_pos: usize| {
            let blocks = vec![1; (start_pos + rows).div_ceil(16)];
            let seqs = [AttentionSeq { rows, start_pos, since: 0, blocks: &blocks }];
            Items::new(&seqs, &attention_units([rows].into_iter(), heads), heads)
        };
        assert_eq!((of(1, 1000).warps, of(2, 1000).warps, of(3, 1000).warps), (4, 4, 8), "a warp for each query");
        assert_eq!((of(65, 1000).splits, of(64, 1000).splits, of(1, 0).splits), (1, 32, 1));
        let many = HeadShape { heads: 32, kv_heads: 8, head_dim: 128 };
        let decodes = |rows: usize, longest: usize| {
            let start = |row: usize| if row == 0 { longest } else { 10 };
            let seqs: Vec<_> =
                (0..rows).map(|row| AttentionSeq { rows: 1, start_pos: start(row), since: 0, blocks: &[] }).collect();
            Items::new(&seqs, &attention_units(seqs.iter().map(|_| 1), many), many).splits
        };
        assert_eq!((decodes(1, 70_000), decodes(64, 8_000), decodes(64, 70_000)), (2048, 128, 1), "room is bounded");
        let (a, b) = (of(1, 1100), of(1, 1500));
        assert_eq!((a.splits, a.tables.len(), a.len()), (b.splits, b.tables.len(), b.len()));
    }
}
