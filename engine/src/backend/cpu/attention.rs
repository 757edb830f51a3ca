//! Causal attention over the paged cache: online softmax over tiles of 64 positions that begin at multiples of 64, whatever
//! the blocks, chunks and neighbours are, so that every bit of a row is its own (EP4). The query heads that share a KV head, and
//! neighbouring rows of a sequence, share its loads. `attention/paired.rs` does the same by products of pairs, `attention/tiled.rs` by
//! tiles, each in an order of its own.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;

mod paired;
mod softmax;
mod tile;
#[cfg(target_arch = "x86_64")]
mod tiled;

use super::kv::{GROUP, KvLayout, LayerKv};
use super::output::Output;
use super::{HeadShape, Isa, Matrix};
use crate::backend::{AttentionSeq, AttentionUnit};
#[cfg(target_arch = "x86_64")]
use crate::raw::amx::Amx;
use crate::raw::{Op, Simd};
#[cfg(test)]
pub use paired::PairsOp;
use softmax::Seen;
pub use softmax::exp;
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

/// Computes one unit, by tiles where the processor has them and heads the shape for them.
pub fn run(isa: Isa, op: AttentionOp<'_>) {
    #[cfg(target_arch = "x86_64")]
    if let Some(amx) = isa.tiles().and_then(Amx::pairs).filter(|_| tiled::fits(&op.layout)) {
        return isa.run(tiled::TiledOp { amx, op });
    }
    isa.run(op);
}

/// Computes one unit by vectors.
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

/// One row of one head.
struct Query {
    row: usize,
    head: usize,
    seen: Seen,
}

/// One query on its way through the tiles, by vectors.
struct Alone {
    query: Query,
    q: Vec<f32>,
    out: Vec<f32>,
    weights: [f32; TILE],
}

impl Default for Alone {
    fn default() -> Self {
        let query = Query { row: 0, head: 0, seen: Seen::new(0, 0) };
        Self { query, q: Vec::new(), out: Vec::new(), weights: [0.0; TILE] }
    }
}

/// What a unit works in; each thread has one, and keeps it.
#[derive(Default)]
struct Work {
    queries: Vec<Alone>,
    scratch: Vec<u8>,
    decoded: Decoded,
    paired: paired::Work,
    #[cfg(target_arch = "x86_64")]
    tiled: tiled::Work,
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
            super::KvType::Bf16 if S::PAIRS => self.pairs(s),
            super::KvType::Bf16 => self.unit::<S, CachedBf16>(s),
        }
    }
}

impl AttentionOp<'_> {
    #[inline(always)]
    fn unit<S: Simd, C: Cached>(&self, s: S) {
        let mut work = WORK.take().unwrap_or_default();
        let Work { queries, scratch, decoded, .. } = &mut *work;
        let queries = self.queries(queries);
        let (dims, chunks) = (self.layout.head_dim, self.layout.value_dim() / GROUP);
        let mut tiles = self.tiles().peekable();
        while let Some(positions) = tiles.next() {
            let next = tiles.peek().map_or([[].as_slice(); GROUPS], |next| self.keys_to_come(next));
            let tile = InCache { next, ..self.in_cache::<C>(positions.clone(), scratch) };
            if queries.len() > QUERIES && C::BYTES < 4 {
                decoded.fill(s, &tile, (dims, chunks, positions.len()));
                self.tile(s, &*decoded, positions, queries);
            } else {
                self.tile(s, &tile, positions, queries);
            }
        }
        for Alone { query, out, .. } in queries {
            self.give(s, query, out);
        }
        WORK.set(Some(work));
    }

    /// Writes what has been mixed for a query to the output.
    #[inline(always)]
    fn give<S: Simd>(&self, s: S, query: &Query, mixed: &mut [f32]) {
        let (scale, d) = (1.0 / query.seen.sum, self.heads.head_dim);
        mixed.iter_mut().for_each(|value| *value *= scale);
        self.out.set_run(s, (query.row, query.head * d), &mixed[..d]);
    }

    /// Position of the first row.
    fn pos(&self) -> usize {
        self.seq.start_pos + self.unit.at
    }

    /// The tiles in which the unit's queries see something.
    fn tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        // the first row looks back the furthest
        let (first, end) = (self.query(0).seen.first / TILE, self.pos() + self.unit.rows);
        (first..end.div_ceil(TILE)).map(move |tile| tile * TILE..end.min((tile + 1) * TILE))
    }

    /// Query `index` of the unit.
    fn query(&self, index: usize) -> Query {
        let per_kv = self.heads.heads / self.heads.kv_heads;
        let (row, head) = (self.unit.first_row + index / per_kv, self.unit.kv_head * per_kv + index % per_kv);
        let last = self.pos() + index / per_kv;
        let windowed = self.window.map_or(0, |window| (last + 1).saturating_sub(window));
        Query { row, head, seen: Seen::new(windowed.max(self.seq.since).min(last), last) }
    }

    /// How many queries the unit has.
    fn count(&self) -> usize {
        self.unit.rows * (self.heads.heads / self.heads.kv_heads)
    }

    /// Q of a query, scaled.
    fn scaled(&self, query: &Query) -> impl Iterator<Item = f32> {
        let d = self.heads.head_dim;
        let scale = 1.0 / (d as f32).sqrt();
        self.q.row(query.row)[query.head * d..(query.head + 1) * d].iter().map(move |x| x * scale)
    }

    /// The unit's queries, in memory that earlier ones had.
    fn queries<'q>(&self, queries: &'q mut Vec<Alone>) -> &'q mut [Alone] {
        let count = self.count();
        queries.resize_with(queries.len().max(count), Alone::default);
        for (index, alone) in queries[..count].iter_mut().enumerate() {
            alone.query = self.query(index);
            alone.q.clear();
            alone.q.extend(self.scaled(&alone.query));
            alone.out.clear();
            alone.out.resize(self.layout.value_dim(), 0.0);
        }
        &mut queries[..count]
    }

    /// A tile of positions where they lie. Where blocks are no multiple of sixteen slots they are gathered first.
    #[inline(always)]
    fn in_cache<'a, C: Cached>(&'a self, positions: Range<usize>, scratch: &'a mut Vec<u8>) -> InCache<'a, C> {
        let starts = starts(&positions);
        let (mut keys, mut values): ([&[u8]; GROUPS], [&[u8]; GROUPS]) = ([&[]; GROUPS], [&[]; GROUPS]);
        if self.in_groups() {
            for ((start, key), value) in starts.iter().zip(&mut keys).zip(&mut values) {
                (*key, *value) = self.group(*start);
            }
            let lines = (self.layout.key_line(), self.layout.value_line());
            return InCache { keys, values, lines, next: [&[]; GROUPS], kind: PhantomData };
        }
        let group = KvLayout { block_size: GROUP, ..self.layout };
        scratch.resize(GROUPS * (group.key_bytes() + group.value_bytes()), 0);
        let mut rest = &mut scratch[..];
        for ((start, key), value) in starts.iter().zip(&mut keys).zip(&mut values) {
            let (k, later) = rest.split_at_mut(group.key_bytes());
            let (v, later) = later.split_at_mut(group.value_bytes());
            self.gather(*start..positions.end.min(start + GROUP), &group, (k, v));
            (*key, *value, rest) = (k, v, later);
        }
        let lines = (group.key_line(), group.value_line());
        InCache { keys, values, lines, next: [&[]; GROUPS], kind: PhantomData }
    }

    /// Whether sixteen positions that begin at a multiple of sixteen lie in one piece.
    fn in_groups(&self) -> bool {
        self.layout.block_size.is_multiple_of(GROUP)
    }

    /// K and V of such a group, and what lies behind them.
    #[inline(always)]
    fn group(&self, start: usize) -> (&[u8], &[u8]) {
        let ((k, v), slot) = (self.block(start / self.layout.block_size), start % self.layout.block_size);
        (&k[self.layout.key_at(slot, 0)..], &v[self.layout.value_at(slot, 0)..])
    }

    /// K of a tile to come, where it lies in groups, to be asked for.
    #[inline(always)]
    fn keys_to_come(&self, positions: &Range<usize>) -> [&[u8]; GROUPS] {
        if self.in_groups() { starts(positions).map(|start| self.group(start).0) } else { [&[]; GROUPS] }
    }

    /// Copies positions, sixteen at most, to where they lie in one piece.
    fn gather(&self, positions: Range<usize>, to: &KvLayout, (keys, values): (&mut [u8], &mut [u8])) {
        let KvLayout { kind, block_size, head_dim, .. } = self.layout;
        for (at, pos) in positions.enumerate() {
            let ((k, v), slot) = (self.block(pos / block_size), pos % block_size);
            for d in 0..head_dim {
                let (from, to) = (self.layout.key_at(slot, d), to.key_at(at, d));
                keys[to..to + kind.size()].copy_from_slice(&k[from..from + kind.size()]);
            }
            for d in 0..self.layout.value_dim() {
                let (from, to) = (self.layout.value_at(slot, d), to.value_at(at, d));
                values[to..to + kind.size()].copy_from_slice(&v[from..from + kind.size()]);
            }
        }
    }

    /// K and V of one of the sequence's blocks.
    #[inline(always)]
    fn block(&self, index: usize) -> (&[u8], &[u8]) {
        let block = self.seq.blocks[index] as usize * self.layout.kv_heads + self.unit.kv_head;
        let (k, v) = (self.layout.key_bytes(), self.layout.value_bytes());
        (&self.layer.keys[block * k..(block + 1) * k], &self.layer.values[block * v..(block + 1) * v])
    }

    /// Takes one tile into every query that sees some of it.
    #[inline(always)]
    fn tile<S: Simd>(&self, s: S, tile: &impl Tile, positions: Range<usize>, queries: &mut [Alone]) {
        for queries in queries.chunks_mut(QUERIES) {
            if queries.iter().all(|alone| alone.query.seen.misses(&positions)) {
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
            for Alone { query, weights, out, .. } in &mut *queries {
                query.seen.absorb(s, positions.start, weights, out);
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

    /// Scores of a tile into the queries' `weights`: each lane a position, summed over the dimensions in order.
    #[inline(always)]
    fn scores<S: Simd, const Q: usize>(&self, s: S, tile: &impl Tile, mut queries: [&mut Alone; Q]) {
        let mut acc = [[s.splat(0.0); GROUPS]; Q];
        let dims = self.layout.head_dim;
        let inputs: [&[f32]; Q] = std::array::from_fn(|q| &queries[q].q[..dims]);
        for d in 0..dims {
            tile.ask_values(s, d);
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
    fn mix<S: Simd, const Q: usize>(&self, s: S, tile: &impl Tile, positions: usize, mut queries: [&mut Alone; Q]) {
        const WIDTH: usize = 4;
        let chunks = self.layout.value_dim() / GROUP;
        for from in (0..chunks / WIDTH * WIDTH).step_by(WIDTH) {
            mix_chunks::<S, Q, WIDTH>(s, tile, (positions, from), &mut queries);
        }
        for from in chunks / WIDTH * WIDTH..chunks {
            mix_chunks::<S, Q, 1>(s, tile, (positions, from), &mut queries);
        }
    }
}

/// Where the groups of a tile begin. Those past the end look at the last one again; the mask takes them out.
fn starts(positions: &Range<usize>) -> [usize; GROUPS] {
    let last = positions.len().div_ceil(GROUP) - 1;
    std::array::from_fn(|group| positions.start + group.min(last) * GROUP)
}

/// The same for `W` chunks of dimensions from `from` on.
#[inline(always)]
fn mix_chunks<S: Simd, const Q: usize, const W: usize>(
    s: S,
    tile: &impl Tile,
    (positions, from): (usize, usize),
    queries: &mut [&mut Alone; Q],
) {
    let mut acc = [[s.splat(0.0); Q]; W];
    for (c, acc) in acc.iter_mut().enumerate() {
        for (acc, query) in acc.iter_mut().zip(queries.iter()) {
            *acc = s.load(&query.out.as_chunks().0[from + c]);
        }
    }
    for at in 0..positions.min(TILE) {
        for (c, acc) in acc.iter_mut().enumerate() {
            tile.ask_next(s, at, from + c);
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
