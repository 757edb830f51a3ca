//! Causal attention of one row over paged K and V. Positions are walked in order whatever the block size, so chunking,
//! block tables and neighbours leave every bit of the result alone (EP4).

use super::kernels::{add_scaled, dot, softmax};
use crate::backend::{AttentionSeq, HeadShape};

/// One layer's cache.
#[derive(Clone, Copy)]
pub struct KvView<'a> {
    pub keys: &'a [f32],
    pub values: &'a [f32],
    /// Values a slot: `kv_heads × head_dim`.
    pub width: usize,
    pub block_size: usize,
}

/// Where one row of the step stands.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    pub pos: usize,
    pub blocks: &'a [u32],
}

/// The rows of all sequences, in the order of the step's matrices.
pub fn rows<'a>(seqs: &[AttentionSeq<'a>]) -> Vec<Row<'a>> {
    let row = |seq: &AttentionSeq<'a>, i| Row { pos: seq.start_pos + i, blocks: seq.blocks };
    seqs.iter().flat_map(|seq| (0..seq.rows).map(move |i| row(seq, i))).collect()
}

/// Attention of all heads of one row into `out`; `scores` is scratch.
pub fn attend_row(q: &[f32], row: Row<'_>, kv: KvView<'_>, heads: HeadShape, scores: &mut Vec<f32>, out: &mut [f32]) {
    let scale = 1.0 / (heads.head_dim as f32).sqrt();
    let heads_per_kv = heads.heads / heads.kv_heads;
    for (head, (q, out)) in q.chunks_exact(heads.head_dim).zip(out.chunks_exact_mut(heads.head_dim)).enumerate() {
        let offset = (head / heads_per_kv) * heads.head_dim;
        scores.clear();
        for slot in slots(row, kv.block_size) {
            let start = slot * kv.width + offset;
            scores.push(dot(q, &kv.keys[start..start + heads.head_dim]) * scale);
        }
        softmax(scores);
        out.fill(0.0);
        for (slot, score) in slots(row, kv.block_size).zip(scores.iter()) {
            let start = slot * kv.width + offset;
            add_scaled(out, *score, &kv.values[start..start + heads.head_dim]);
        }
    }
}

/// Slots of positions `0..=row.pos`.
fn slots(row: Row<'_>, block_size: usize) -> impl Iterator<Item = usize> {
    let per_block = row.blocks.iter().flat_map(move |block| {
        let first = *block as usize * block_size;
        first..first + block_size
    });
    per_block.take(row.pos + 1)
}
