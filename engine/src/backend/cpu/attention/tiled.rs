//! Attention by tiles of bf16 (AMX): sixteen queries of a KV head go by the cache together. Q and the weights of the softmax are rounded to
//! bf16 for it, so all rows of a model whose heads have the shape for it go this way, however few they are (EP4).

use std::ops::Range;

use super::tile::{CachedBf16, InCache};
use super::{AttentionOp, GROUP, Query, TILE, WORK};
use crate::backend::cpu::kv::{KvLayout, KvType};
use crate::raw::amx::attention::{AttentionTiles, QUERIES, Scores, Weights};
use crate::raw::amx::{AmxPairs, PAIR_STEP};
use crate::raw::{Op, Simd, to_bf16};

/// Whether heads have the shape for it.
pub fn fits(layout: &KvLayout) -> bool {
    layout.kind == KvType::Bf16 && layout.head_dim.is_multiple_of(PAIR_STEP)
}

/// What a unit works in.
#[derive(Default)]
pub struct Work {
    batches: Vec<Batch>,
    /// V of a group that is not full.
    last: Vec<u8>,
}

/// Computes one unit.
pub struct TiledOp<'a> {
    pub amx: AmxPairs,
    pub op: AttentionOp<'a>,
}

impl Op for TiledOp<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (op, layout) = (&self.op, &self.op.layout);
        let mut work = WORK.take().unwrap_or_default();
        let super::Work { scratch, tiled: Work { batches, last }, .. } = &mut *work;
        let batches = op.batches(batches);
        let tiles = self.amx.attention(op.count());
        for positions in op.tiles() {
            let tile = op.in_cache::<CachedBf16>(positions.clone(), scratch);
            let mut values = tile.values;
            let groups = positions.len().div_ceil(GROUP);
            if !positions.len().is_multiple_of(GROUP) {
                copy_first(positions.len() % GROUP, values[groups - 1], layout, last);
                values[groups - 1] = last;
            }
            for batch in batches.iter_mut().filter(|batch| !batch.misses(&positions)) {
                batch.take(s, &tiles, (&tile, &values[..groups]), (positions.start, layout));
            }
        }
        for Batch { queries, mixed, .. } in batches {
            for (query, mixed) in queries.iter().zip(mixed.chunks_exact_mut(layout.value_dim())) {
                op.give(s, query, mixed);
            }
        }
        WORK.set(Some(work));
    }
}

/// The first positions of a group of V, and zeros for what comes after: whatever an earlier owner has left there, times nothing, is nothing.
fn copy_first(positions: usize, values: &[u8], layout: &KvLayout, to: &mut Vec<u8>) {
    to.clear();
    to.resize(GROUP / 2 * layout.value_line(), 0);
    let whole = positions / 2 * layout.value_line();
    to[..whole].copy_from_slice(&values[..whole]);
    if positions % 2 == 1 {
        let places = to[whole..].as_chunks_mut::<4>().0.iter_mut();
        for (place, [low, high, ..]) in places.zip(values[whole..][..layout.value_line()].as_chunks::<4>().0) {
            *place = [*low, *high, 0, 0];
        }
    }
}

/// Sixteen queries at most, on their way through the tiles.
struct Batch {
    queries: Vec<Query>,
    q: Vec<u8>,
    scores: Box<Scores>,
    weights: Box<Weights>,
    mixed: Vec<f32>,
}

impl Default for Batch {
    fn default() -> Self {
        let (scores, weights) = (Box::new([[0.0; TILE]; QUERIES]), Box::new([[0; TILE]; QUERIES]));
        Self { queries: Vec::new(), q: Vec::new(), scores, weights, mixed: Vec::new() }
    }
}

impl AttentionOp<'_> {
    /// The unit's queries, in memory that earlier ones had.
    fn batches<'b>(&self, batches: &'b mut Vec<Batch>) -> &'b mut [Batch] {
        let (count, layout) = (self.count().div_ceil(QUERIES), &self.layout);
        batches.resize_with(batches.len().max(count), Batch::default);
        for (at, batch) in batches[..count].iter_mut().enumerate() {
            batch.queries.clear();
            batch.q.clear();
            for index in at * QUERIES..self.count().min((at + 1) * QUERIES) {
                let query = self.query(index);
                batch.q.extend(self.scaled(&query).flat_map(|x| to_bf16(x).to_le_bytes()));
                batch.queries.push(query);
            }
            batch.q.resize(QUERIES * 2 * layout.head_dim, 0);
            batch.mixed.clear();
            batch.mixed.resize(QUERIES * layout.value_dim(), 0.0);
        }
        &mut batches[..count]
    }
}

impl Batch {
    fn misses(&self, positions: &Range<usize>) -> bool {
        self.queries.iter().all(|query| query.seen.misses(positions))
    }

    /// Takes in one tile, whose first position is `start`.
    #[inline(always)]
    fn take<S: Simd>(
        &mut self,
        s: S,
        tiles: &AttentionTiles,
        (tile, values): (&InCache<'_, CachedBf16>, &[&[u8]]),
        (start, layout): (usize, &KvLayout),
    ) {
        let dims = layout.value_dim();
        let scored = tiles.scores((&self.q, layout.head_dim), (tile.keys, tile.lines.0), &mut self.scores);
        let rows = self.scores.iter_mut().zip(self.weights.iter_mut()).zip(self.mixed.chunks_exact_mut(dims));
        for (query, ((scores, weights), mixed)) in self.queries.iter_mut().zip(rows) {
            query.seen.absorb(s, start, scores, mixed);
            for (place, weight) in weights.iter_mut().zip(scores) {
                *place = to_bf16(*weight);
            }
        }
        let mixed = tiles.mix(&self.weights, values, (&mut self.mixed, dims));
        debug_assert!(scored && mixed, "`fits` has said that lengths fit");
        if !(scored && mixed) {
            // no number is better than a wrong one: it fails the request
            self.queries.iter_mut().for_each(|query| query.seen.sum = f32::NAN);
        }
    }
}
