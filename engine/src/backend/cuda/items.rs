//! Attention's work as the kernels read it: a word list for each block, the block tables of all sequences, and which of the two ways to
//! go through a context. Pure.

use super::KvFormat;
use super::products::BLOCKS_MIN;
use crate::backend::{ATTENTION_ROWS, AttentionSeq, AttentionUnit, HeadShape};

/// As in kernels/attention.cuh.
pub const SPLIT: usize = 64;
/// Queries of an item: a warp each, for K and V in f32.
const QUERIES: usize = 8;
/// On tensor cores: a product of all warps, and one of each.
pub const TOGETHER: usize = 16;
const ALONE: usize = 64;
/// Warps of a block on tensor cores.
const TEAM: usize = 4;
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
    /// Warps of a block: in f32 one for each query, eight, or four where no item has more; else four.
    pub warps: usize,
    /// The most queries that an item has.
    pub queries: usize,
}

impl Items {
    /// The items of `units`, which are all parts of `seqs`. Tables begin on multiples of a power of two and the number of splits is one, so that
    /// steps of one shape are launched alike for long.
    pub fn new(seqs: &[AttentionSeq<'_>], units: &[AttentionUnit], heads: HeadShape, format: KvFormat) -> Self {
        let group = heads.heads / heads.kv_heads.max(1);
        let stride = seqs.iter().map(|seq| seq.blocks.len()).max().unwrap_or(0).max(1).next_power_of_two();
        let mut tables = vec![0; seqs.len() * stride];
        for (table, seq) in tables.chunks_exact_mut(stride).zip(seqs) {
            table[..seq.blocks.len()].copy_from_slice(seq.blocks);
        }
        let (rows, longest) =
            seqs.iter().fold((0, 0), |(rows, longest), seq| (rows + seq.rows, longest.max(seq.start_pos + seq.rows)));
        let splits = longest.div_ceil(SPLIT).max(1).next_power_of_two();
        let mut items = Self { words: Vec::new(), tables, splits, warps: TEAM, queries: 0 };
        let even = format == KvFormat::Bf16 && are_even(seqs, heads, longest);
        if rows > SPLIT_ROWS_MAX || even || items.parts_bytes(rows, heads) > PARTS_BYTES_MAX {
            items.splits = 1;
        }
        let most = match format {
            KvFormat::F32 => QUERIES,
            KvFormat::Bf16 if items.splits > 1 || heads.head_dim > ALONE_DIM_MAX => TOGETHER,
            KvFormat::Bf16 => ALONE,
        };
        // as many units of a sequence as fit in an item share its tiles
        let step = (most / group.max(1) / ATTENTION_ROWS).max(1) * ATTENTION_ROWS;
        for unit in units.iter().filter(|unit| unit.at % step == 0) {
            let seq = &seqs[unit.seq];
            let (rows, pos) = (step.min(seq.rows - unit.at), seq.start_pos + unit.at);
            items.queries = items.queries.max(most.min(rows * group));
            for first_query in (0..rows * group).step_by(most) {
                let item = [unit.first_row, rows, pos, unit.kv_head, unit.seq * stride, first_query, seq.since, 0];
                items.words.extend(item.map(|word| word as u32));
            }
        }
        if format == KvFormat::F32 && items.queries > QUERIES / 2 {
            items.warps = QUERIES;
        }
        items
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

/// Whether blocks that go through all of a context each have enough to do, and none has much more than the others: then splits would only
/// have to be joined. All contexts together are as long as `BLOCKS_MIN` of the longest.
fn are_even(seqs: &[AttentionSeq<'_>], heads: HeadShape, longest: usize) -> bool {
    let group = heads.heads / heads.kv_heads.max(1);
    let of = |seq: &AttentionSeq<'_>| (seq.rows * group).div_ceil(ALONE) * (seq.start_pos + seq.rows);
    heads.kv_heads * seqs.iter().map(of).sum::<usize>() >= BLOCKS_MIN * longest
}

/// Shared memory of a block: its queries, and tiles of 32 positions on their way, two or of the widest heads one. On tensor cores: what warps
/// tell each other, queries, and tiles of a split, two or of the narrowest heads four; the widest are cut in halves (kernels/attention_tiles.cuh).
pub fn shared_bytes(head_dim: usize, warps: usize, format: KvFormat) -> u32 {
    let width = head_dim.next_multiple_of(8);
    let bytes = match format {
        KvFormat::F32 if head_dim <= ALONE_DIM_MAX => (warps * width + 2 * 32 * (width + 8)) * 4,
        KvFormat::F32 => (warps * width + 32 * (width + 8)) * 4,
        KvFormat::Bf16 if head_dim <= 64 => TEAM * 1024 + TOGETHER * 64 * 2 + 4 * SPLIT * (64 + 8) * 2,
        KvFormat::Bf16 if head_dim <= 128 => TEAM * 1024 + TOGETHER * 128 * 2 + 2 * SPLIT * (128 + 8) * 2,
        KvFormat::Bf16 => TEAM * 1024 + TOGETHER * 256 * 2 + 2 * SPLIT * (128 + 8) * 2,
    };
    bytes as u32
}

/// The widest head whose sums over sixteen queries a warp has room for.
const ALONE_DIM_MAX: usize = 128;

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
        for (format, most) in [(KvFormat::F32, QUERIES), (KvFormat::Bf16, TOGETHER)] {
            let items = Items::new(&seqs, &units, heads, format);
            assert_eq!((items.splits, items.tables.len(), items.tables[64..66].to_vec()), (16, 128, vec![7, 0]));
            assert_eq!(all_of(&items, most, 6, |row| if row == 0 { 700 } else { row - 1 }), 10 * 12);
        }
        // without splits: sixteen rows of four heads share an item; of six, eight
        for (group, rows) in [(4, 16), (6, 8), (1, 64), (16, 8)] {
            let (heads, seq) =
                (HeadShape { heads: group, kv_heads: 1, head_dim: 64 }, AttentionSeq { rows: 100, ..seqs[1] });
            let items = Items::new(&[seq], &attention_units([100].into_iter(), heads), heads, KvFormat::Bf16);
            assert_eq!((items.splits, items.words[1], items.queries), (1, rows, ALONE.min(rows as usize * group)));
            assert_eq!(all_of(&items, ALONE, group as u32, |row| row), 100 * group);
        }
        for (head_dim, format) in
            [KvFormat::F32, KvFormat::Bf16].into_iter().flat_map(|f| (1..=HEAD_DIM_MAX).map(move |d| (d, f)))
        {
            assert!(shared_bytes(head_dim, QUERIES, format) <= 48 << 10, "every device has that much");
        }
    }

    /// How many queries the items have, each once and where it should be.
    fn all_of(items: &Items, most: usize, group: u32, pos: impl Fn(u32) -> u32) -> usize {
        let mut seen = std::collections::BTreeSet::new();
        for item in items.words.chunks_exact(ITEM_WORDS) {
            for query in item[5]..(item[1] * group).min(item[5] + most as u32) {
                let (row, head) = (item[0] + query / group, item[3] * group + query % group);
                assert!(seen.insert((row, head)), "row {row} head {head} twice");
                assert_eq!(item[2] + query / group, pos(row), "position of row {row}");
            }
        }
        seen.len()
    }

    #[test]
    fn a_long_prompt_is_not_split_and_a_step_of_one_shape_is_launched_alike() {
        let heads = HeadShape { heads: 2, kv_heads: 1, head_dim: 8 };
        let of = |rows: usize, start_pos: usize| {
            let blocks = vec![1; (start_pos + rows).div_ceil(16)];
            let seqs = [AttentionSeq { rows, start_pos, since: 0, blocks: &blocks }];
            Items::new(&seqs, &attention_units([rows].into_iter(), heads), heads, KvFormat::F32)
        };
        assert_eq!((of(1, 1000).warps, of(2, 1000).warps, of(3, 1000).warps), (4, 4, 8), "a warp for each query");
        assert_eq!((of(65, 1000).splits, of(64, 1000).splits, of(1, 0).splits), (1, 32, 1));
        let many = HeadShape { heads: 32, kv_heads: 8, head_dim: 128 };
        let decodes = |rows: usize, longest: usize| {
            let start = |row: usize| if row == 0 { longest } else { 10 };
            let seqs: Vec<_> =
                (0..rows).map(|row| AttentionSeq { rows: 1, start_pos: start(row), since: 0, blocks: &[] }).collect();
            Items::new(&seqs, &attention_units(seqs.iter().map(|_| 1), many), many, KvFormat::Bf16).splits
        };
        assert_eq!((decodes(1, 70_000), decodes(64, 8_000), decodes(64, 70_000)), (2048, 128, 1), "room is bounded");
        let alike = |rows: usize| {
            let seqs = vec![AttentionSeq { rows: 1, start_pos: 639, since: 0, blocks: &[] }; rows];
            Items::new(&seqs, &attention_units(seqs.iter().map(|_| 1), many), many, KvFormat::Bf16).splits
        };
        assert_eq!((alike(1), alike(15), alike(16), alike(64)), (16, 16, 1, 1), "as many blocks as multiprocessors");
        assert_eq!(decodes(32, 8_000), 128, "one is longer than all others");
        let (a, b) = (of(1, 1100), of(1, 1500));
        assert_eq!((a.splits, a.tables.len(), a.len()), (b.splits, b.tables.len(), b.len()));
    }
}
