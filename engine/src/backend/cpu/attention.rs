//! Causal attention over the paged cache: online softmax over tiles of 64 positions that begin at multiples of 64, whatever
//! the blocks, chunks and neighbours are, so that every bit of a row is its own (EP4). The query heads that share a KV head, and
//! neighbouring rows of a sequence, share its loads.

use std::cell::Cell;

mod tile;

use super::kv::{GROUP, KvLayout, LayerKv};
use super::output::Output;
use super::{HeadShape, Matrix};
use crate::backend::{AttentionSeq, AttentionUnit};
use crate::raw::{Op, Simd};
use tile::{Cached, CachedBf16, CachedF32, Decoded, InCache, Tile};

/// Groups of positions a tile.
const GROUPS: usize = 4;
const TILE: usize = GROUPS * GROUP;
/// Queries that share each load.
const QUERIES: usize = 4;

/// Multiply-adds of a step's attention in all, about.
pub fn work(seqs: &[AttentionSeq<'_>], heads: HeadShape) -> usize {
    seqs.iter().map(|seq| seq.rows * (seq.start_pos + seq.rows) * heads.heads * heads.head_dim * 2).sum()
}

/// Computes one unit.
pub struct AttentionOp<'a> {
    pub q: &'a Matrix,
    pub layer: &'a LayerKv,
    pub layout: KvLayout,
    pub heads: HeadShape,
    /// Positions a row sees, its own among them; `None`: all.
    pub window: Option<usize>,
    pub unit: AttentionUnit,
    /// The unit's sequence.
    pub seq: &'a AttentionSeq<'a>,
    pub out: &'a Output,
}

/// One row of one head on its way through the tiles.
struct Query {
    row: usize,
    head: usize,
    /// Positions `first..=last` are seen.
    first: usize,
    last: usize,
    q: Vec<f32>,
    max: f32,
    sum: f32,
    out: Vec<f32>,
    weights: [f32; TILE],
}

impl Default for Query {
    fn default() -> Self {
        let (q, out) = (Vec::new(), Vec::new());
        Self { row: 0, head: 0, first: 0, last: 0, q, max: f32::NEG_INFINITY, sum: 0.0, out, weights: [0.0; TILE] }
    }
}

/// What a unit works in; each thread has one, and keeps it.
#[derive(Default)]
struct Work {
    queries: Vec<Query>,
    scratch: Vec<u8>,
    decoded: Decoded,
}

thread_local! {
    static WORK: Cell<Option<Box<Work>>> = const { Cell::new(None) };
}

impl Op for AttentionOp<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.layout.kind {
            super::KvType::F32 => self.unit::<S, CachedF32>(s),
            super::KvType::Bf16 => self.unit::<S, CachedBf16>(s),
        }
    }
}

impl AttentionOp<'_> {
    #[inline(always)]
    fn unit<S: Simd, C: Cached>(&self, s: S) {
        let mut work = WORK.take().unwrap_or_default();
        let Work { queries, scratch, decoded } = &mut *work;
        let queries = self.queries(queries);
        let first = queries.iter().map(|query| query.first).min().unwrap_or(0) / TILE;
        let last = (self.pos() + self.unit.rows - 1) / TILE;
        scratch.resize(GROUPS * GROUP * self.layout.head_dim * C::BYTES, 0);
        let (dims, chunks) = (self.layout.head_dim, self.layout.value_dim() / GROUP);
        for start in (first..=last).map(|tile| tile * TILE) {
            let end = (start + TILE).min(self.pos() + self.unit.rows);
            let tile = self.in_cache::<C>(start, end, scratch);
            if queries.len() > QUERIES && C::BYTES < 4 {
                decoded.fill(s, &tile, (dims, chunks, end - start));
                self.tile(s, &*decoded, start..end, queries);
            } else {
                self.tile(s, &tile, start..end, queries);
            }
        }
        for query in queries {
            let scale = 1.0 / query.sum;
            query.out.iter_mut().for_each(|value| *value *= scale);
            let d = self.heads.head_dim;
            self.out.set_run(query.row, query.head * d, &query.out[..d]);
        }
        WORK.set(Some(work));
    }

    /// Position of the first row.
    fn pos(&self) -> usize {
        self.seq.start_pos + self.unit.at
    }

    /// The unit's queries, in memory that earlier ones had.
    fn queries<'q>(&self, queries: &'q mut Vec<Query>) -> &'q mut [Query] {
        let HeadShape { heads, kv_heads, head_dim } = self.heads;
        let (per_kv, scale) = (heads / kv_heads, 1.0 / (head_dim as f32).sqrt());
        let count = self.unit.rows * per_kv;
        queries.resize_with(queries.len().max(count), Query::default);
        for (index, query) in queries[..count].iter_mut().enumerate() {
            let (row, head) = (self.unit.first_row + index / per_kv, self.unit.kv_head * per_kv + index % per_kv);
            let last = self.pos() + index / per_kv;
            (query.row, query.head, query.last) = (row, head, last);
            let windowed = self.window.map_or(0, |window| (last + 1).saturating_sub(window));
            query.first = windowed.max(self.seq.since).min(last);
            query.q.clear();
            query.q.extend(self.q.row(row)[head * head_dim..(head + 1) * head_dim].iter().map(|x| x * scale));
            (query.max, query.sum) = (f32::NEG_INFINITY, 0.0);
            query.out.clear();
            query.out.resize(self.layout.value_dim(), 0.0);
        }
        &mut queries[..count]
    }

    /// Positions `start..end` where they lie.
    #[inline(always)]
    fn in_cache<'a, C: Cached>(&'a self, start: usize, end: usize, scratch: &'a mut [u8]) -> InCache<'a, C> {
        let groups = (end - start).div_ceil(GROUP);
        let mut rest = scratch;
        // groups past the end look at the last one again; the mask takes them out
        let mut keys: [(&[u8], usize); GROUPS] = [(&[], 0); GROUPS];
        for (group, place) in keys.iter_mut().enumerate() {
            let (mine, later) = rest.split_at_mut(GROUP * self.layout.head_dim * C::BYTES);
            rest = later;
            *place = self.keys::<C>(start + group.min(groups - 1) * GROUP, end, mine);
        }
        let mut values: [&[u8]; TILE] = [&[]; TILE];
        for (pos, place) in (start..end).zip(&mut values) {
            *place = self.value_line::<C>(pos);
        }
        InCache::<C>::new(keys, values)
    }

    /// Takes one tile into every query that sees some of it.
    #[inline(always)]
    fn tile<S: Simd>(&self, s: S, tile: &impl Tile, positions: std::ops::Range<usize>, queries: &mut [Query]) {
        for queries in queries.chunks_mut(QUERIES) {
            if queries.iter().all(|query| query.last < positions.start || query.first >= positions.end) {
                continue;
            }
            // loops, not closures: those are not compiled with the instructions of `S`
            match &mut *queries {
                [a, b, c, d] if S::WIDE => self.scores(s, tile, [a, b, c, d]),
                [a, b] if S::WIDE => self.scores(s, tile, [a, b]),
                other => {
                    for query in other {
                        self.scores(s, tile, [query]);
                    }
                }
            }
            for query in &mut *queries {
                query.absorb(s, positions.start);
            }
            match &mut *queries {
                [a, b, c, d] if S::WIDE => self.mix(s, tile, positions.len(), [a, b, c, d]),
                [a, b] if S::WIDE => self.mix(s, tile, positions.len(), [a, b]),
                other => {
                    for query in other {
                        self.mix(s, tile, positions.len(), [query]);
                    }
                }
            }
        }
    }

    /// K of sixteen positions from `start` on, and the bytes from one dimension to the next. Where blocks are no multiple of
    /// sixteen slots they are gathered first.
    #[inline(always)]
    fn keys<'a, C: Cached>(&'a self, start: usize, end: usize, scratch: &'a mut [u8]) -> (&'a [u8], usize) {
        let KvLayout { block_size, head_dim, .. } = self.layout;
        let stride = block_size * C::BYTES;
        if block_size.is_multiple_of(GROUP) {
            return (&self.block_keys(start / block_size)[start % block_size * C::BYTES..], stride);
        }
        for (at, pos) in (start..end.min(start + GROUP)).enumerate() {
            let keys = self.block_keys(pos / block_size);
            for d in 0..head_dim {
                let from = d * stride + pos % block_size * C::BYTES;
                let to = (d * GROUP + at) * C::BYTES;
                scratch[to..to + C::BYTES].copy_from_slice(&keys[from..from + C::BYTES]);
            }
        }
        (scratch, GROUP * C::BYTES)
    }

    #[inline(always)]
    fn block_keys(&self, index: usize) -> &[u8] {
        let block = self.seq.blocks[index] as usize * self.layout.kv_heads + self.unit.kv_head;
        &self.layer.keys[block * self.layout.key_bytes()..(block + 1) * self.layout.key_bytes()]
    }

    /// Scores of a tile into the queries' `weights`: each lane a position, summed over the dimensions in order.
    #[inline(always)]
    fn scores<S: Simd, const Q: usize>(&self, s: S, tile: &impl Tile, mut queries: [&mut Query; Q]) {
        let mut acc = [[s.splat(0.0); GROUPS]; Q];
        let dims = self.layout.head_dim;
        let inputs: [&[f32]; Q] = std::array::from_fn(|q| &queries[q].q[..dims]);
        for d in 0..dims {
            let keys = tile.keys(s, d);
            for (acc, input) in acc.iter_mut().zip(&inputs) {
                let x = s.splat(input[d]);
                for (acc, key) in acc.iter_mut().zip(keys) {
                    *acc = s.fma(x, key, *acc);
                }
            }
        }
        for (query, acc) in queries.iter_mut().zip(acc) {
            for (place, acc) in query.weights.as_chunks_mut().0.iter_mut().zip(acc) {
                s.store(acc, place);
            }
        }
    }

    /// Adds the V of the tile's first `positions` by the queries' `weights`, in their order.
    #[inline(always)]
    fn mix<S: Simd, const Q: usize>(&self, s: S, tile: &impl Tile, positions: usize, mut queries: [&mut Query; Q]) {
        const WIDTH: usize = 4;
        let chunks = self.layout.value_dim() / GROUP;
        for from in (0..chunks / WIDTH * WIDTH).step_by(WIDTH) {
            mix_chunks::<S, Q, WIDTH>(s, tile, (positions, from), &mut queries);
        }
        for from in chunks / WIDTH * WIDTH..chunks {
            mix_chunks::<S, Q, 1>(s, tile, (positions, from), &mut queries);
        }
    }

    #[inline(always)]
    fn value_line<C: Cached>(&self, pos: usize) -> &[u8] {
        let block = self.seq.blocks[pos / self.layout.block_size] as usize * self.layout.kv_heads + self.unit.kv_head;
        let line = self.layout.value_dim() * C::BYTES;
        let start = block * self.layout.value_bytes() + pos % self.layout.block_size * line;
        &self.layer.values[start..start + line]
    }
}

/// The same for `W` chunks of dimensions from `from` on.
#[inline(always)]
fn mix_chunks<S: Simd, const Q: usize, const W: usize>(
    s: S,
    tile: &impl Tile,
    (positions, from): (usize, usize),
    queries: &mut [&mut Query; Q],
) {
    let mut acc = [[s.splat(0.0); Q]; W];
    for (c, acc) in acc.iter_mut().enumerate() {
        for (acc, query) in acc.iter_mut().zip(queries.iter()) {
            *acc = s.load(&query.out.as_chunks().0[from + c]);
        }
    }
    for at in 0..positions.min(TILE) {
        for (c, acc) in acc.iter_mut().enumerate() {
            let v = tile.values(s, at, from + c);
            for (acc, query) in acc.iter_mut().zip(queries.iter()) {
                *acc = s.fma(s.splat(query.weights[at]), v, *acc);
            }
        }
    }
    for (c, acc) in acc.iter().enumerate() {
        for (acc, query) in acc.iter().zip(queries.iter_mut()) {
            s.store(*acc, &mut query.out.as_chunks_mut().0[from + c]);
        }
    }
}

impl Query {
    /// Turns the scores of the tile at `start` into weights and takes them into the running maximum and sum.
    #[inline(always)]
    fn absorb<S: Simd>(&mut self, s: S, start: usize) {
        let seen = |at: usize| start + at >= self.first && start + at <= self.last;
        for (at, score) in self.weights.iter_mut().enumerate() {
            *score = if seen(at) { *score } else { f32::NEG_INFINITY };
        }
        let max = self.weights.iter().fold(self.max, |max, score| if *score > max { *score } else { max });
        if max == f32::NEG_INFINITY {
            // nothing seen yet; but scores that are no numbers must stay so
            let broken = self.weights.iter().any(|score| score.is_nan());
            self.sum = if broken { f32::NAN } else { self.sum };
            self.weights = [0.0; TILE];
            return;
        }
        let shrink = exp(self.max - max);
        let mut sum = s.splat(0.0);
        for chunk in self.weights.as_chunks_mut::<GROUP>().0 {
            for score in chunk.iter_mut() {
                *score = exp(*score - max);
            }
            sum = s.add(sum, s.load(chunk));
        }
        self.sum = self.sum * shrink + s.fold(sum);
        self.max = max;
        if shrink != 1.0 {
            for value in &mut self.out {
                *value *= shrink;
            }
        }
    }
}

/// `e^x` for `x <= 0` to about one part in 10^7, in plain operations that become vector instructions; NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 · 2^23: adding it leaves the nearest whole number in the low bits
    let clamped = if x < -87.0 { -87.0 } else { x };
    let whole = clamped * std::f32::consts::LOG2_E + MAGIC;
    let power = (whole.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    let whole = whole - MAGIC;
    // ln 2 in two parts, so that the rest keeps its low bits
    let rest = clamped - whole * 0.693_359_4 + whole * 2.121_944_4e-4;
    let p = 1.987_569_1e-4 * rest + 1.398_199_9e-3;
    let p = p * rest + 8.333_452e-3;
    let p = p * rest + 4.166_579_6e-2;
    let p = p * rest + 1.666_666_6e-1;
    let p = p * rest + 0.5;
    let p = p * rest * rest + rest + 1.0;
    let value = p * f32::from_bits((power.wrapping_add(127) << 23) as u32);
    if x < -87.0 { 0.0 } else { value }
}
