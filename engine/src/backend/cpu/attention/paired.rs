//! Attention by products of pairs of bf16, where one instruction makes them: K and V are multiplied as the cache holds them. Q and the weights
//! of the softmax are rounded to bf16 for it, as for tiles, so on such a processor all rows of a cache in bf16 go this way, however few
//! they are (EP4).

use super::tile::{CachedBf16, InCache};
use super::{AttentionOp, GROUP, GROUPS, QUERIES, Query, Seen, TILE, WORK, starts};
use crate::backend::cpu::kernels::with_zeros;
use crate::raw::Simd;

/// Sixteen pairs.
type Line = [u8; 64];
/// Lines of V that are read in one go, where there are as many.
const WIDTH: usize = 4;

/// What a unit works in.
#[derive(Default)]
pub struct Work {
    queries: Vec<Paired>,
    /// The last line of V, where only the first of its two positions is there.
    last: Vec<u8>,
}

/// One query on its way through the tiles.
struct Paired {
    query: Query,
    q: Vec<i32>,
    scores: [f32; TILE],
    weights: [i32; TILE / 2],
    mixed: Vec<f32>,
}

impl Default for Paired {
    fn default() -> Self {
        let query = Query { row: 0, head: 0, seen: Seen::new(0, 0) };
        Self { query, q: Vec::new(), scores: [0.0; TILE], weights: [0; TILE / 2], mixed: Vec::new() }
    }
}

/// K and V of a tile.
struct Pairs<'a> {
    cache: InCache<'a, CachedBf16>,
    /// What stands for the last line of V.
    last: Option<&'a [u8]>,
    start: usize,
    positions: usize,
    /// K of the tile to come, where it lies in groups.
    next: [&'a [u8]; GROUPS],
}

impl AttentionOp<'_> {
    /// Computes one unit.
    #[inline(always)]
    pub(super) fn pairs<S: Simd>(&self, s: S) {
        let mut work = WORK.take().unwrap_or_default();
        let super::Work { scratch, paired: Work { queries, last }, .. } = &mut *work;
        let queries = self.paired(s, queries);
        let mut tiles = self.tiles().peekable();
        while let Some(positions) = tiles.next() {
            let next = tiles
                .peek()
                .filter(|_| self.in_groups())
                .map_or([[].as_slice(); GROUPS], |next| starts(next).map(|start| self.group(start).0));
            let cache = self.in_cache::<CachedBf16>(positions.clone(), scratch);
            let (start, positions) = (positions.start, positions.len());
            let last = (positions % 2 == 1).then(|| first_of_pairs(&cache, positions - 1, last));
            let tile = Pairs { cache, last, start, positions, next };
            for (chunk, queries) in queries.chunks_mut(QUERIES).enumerate() {
                let first = chunk == 0;
                if queries.iter().all(|paired| paired.query.seen.misses(&(start..start + positions))) {
                    continue;
                }
                match queries {
                    [a, b, c, d] => tile.take(s, first, [a, b, c, d]),
                    [a, b, c] => tile.take(s, first, [a, b, c]),
                    [a, b] => tile.take(s, first, [a, b]),
                    other => {
                        for query in other {
                            tile.take(s, first, [query]);
                        }
                    }
                }
            }
        }
        for Paired { query, mixed, .. } in queries {
            self.give(s, query, mixed);
        }
        WORK.set(Some(work));
    }

    /// The unit's queries, in memory that earlier ones had.
    #[inline(always)]
    fn paired<'q, S: Simd>(&self, s: S, queries: &'q mut Vec<Paired>) -> &'q mut [Paired] {
        let count = self.count();
        queries.resize_with(queries.len().max(count), Paired::default);
        let d = self.heads.head_dim;
        let scale = s.splat(1.0 / (d as f32).sqrt());
        for (index, paired) in queries[..count].iter_mut().enumerate() {
            paired.query = self.query(index);
            let from = paired.query.head * d;
            paired.q.clear();
            for q in self.q.row(paired.query.row)[from..from + d].chunks(GROUP) {
                let pairs = s.to_pairs(s.mul(s.load(&with_zeros(q)), scale));
                paired.q.extend_from_slice(&pairs[..q.len().div_ceil(2)]);
            }
            paired.mixed.clear();
            paired.mixed.resize(self.layout.value_dim(), 0.0);
        }
        &mut queries[..count]
    }
}

/// A unit by products of pairs, whatever the set has for them: so that tests see this way on any processor.
#[cfg(test)]
pub struct PairsOp<'a>(pub AttentionOp<'a>);

#[cfg(test)]
impl crate::raw::Op for PairsOp<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.0.pairs(s);
    }
}

/// The line of V that position `at` of a tile begins, with zeros for the one behind it: whatever an earlier owner has left there, times
/// nothing, is nothing.
fn first_of_pairs<'a>(cache: &InCache<'_, CachedBf16>, at: usize, to: &'a mut Vec<u8>) -> &'a [u8] {
    let line = cache.lines.1;
    to.clear();
    to.extend_from_slice(&cache.values[at / GROUP][at % GROUP / 2 * line..][..line]);
    to.as_chunks_mut::<4>().0.iter_mut().for_each(|pair| (pair[2], pair[3]) = (0, 0));
    to
}

impl Pairs<'_> {
    /// Takes the tile into some queries, who share its loads. The `first` ones ask for what comes next: scores for V, and what is mixed for K of
    /// the next tile. The processor's own foresight ends with each block.
    #[inline(always)]
    fn take<S: Simd, const Q: usize>(&self, s: S, first: bool, mut queries: [&mut Paired; Q]) {
        self.score(s, first, &mut queries);
        for Paired { query, scores, weights, mixed, .. } in &mut queries {
            query.seen.absorb(s, self.start, scores, mixed);
            for (weights, scores) in weights.as_chunks_mut().0.iter_mut().zip(scores.as_chunks().0) {
                *weights = s.to_pairs(s.load(scores));
            }
        }
        let seen = queries.iter().map(|paired| paired.query.seen.last + 1).max().unwrap_or(0);
        let seen = seen.saturating_sub(self.start).min(self.positions);
        let chunks = self.cache.lines.1 / size_of::<Line>();
        for from in (0..chunks / WIDTH * WIDTH).step_by(WIDTH) {
            self.mix::<S, Q, WIDTH>(s, (first, seen), from, &mut queries);
        }
        for from in chunks / WIDTH * WIDTH..chunks {
            self.mix::<S, Q, 1>(s, (first, seen), from, &mut queries);
        }
    }

    /// Scores: each lane a position, summed over the pairs of dimensions in order.
    #[inline(always)]
    fn score<S: Simd, const Q: usize>(&self, s: S, first: bool, queries: &mut [&mut Paired; Q]) {
        let mut acc = [[s.splat(0.0); GROUPS]; Q];
        let pairs = queries[0].q.len();
        let q: [&[i32]; Q] = std::array::from_fn(|i| &queries[i].q[..pairs]);
        for d in 0..pairs {
            for (group, keys) in self.cache.keys.iter().enumerate() {
                let line = line_at(keys, d * self.cache.lines.0);
                if first {
                    s.prefetch_far(self.cache.values[group], d * size_of::<Line>());
                }
                for (acc, q) in acc.iter_mut().zip(&q) {
                    acc[group] = s.dot_bf16_pair(acc[group], line, q[d]);
                }
            }
        }
        for (query, acc) in queries.iter_mut().zip(acc) {
            for (place, acc) in query.scores.as_chunks_mut().0.iter_mut().zip(acc) {
                s.store(acc, place);
            }
        }
    }

    /// Adds `W` lines of V from line `from` of each two of the `seen` positions on, by the queries' weights, in the order of positions. What only
    /// a neighbour sees has the weight 0.
    #[inline(always)]
    fn mix<S: Simd, const Q: usize, const W: usize>(
        &self,
        s: S,
        (first, seen): (bool, usize),
        from: usize,
        queries: &mut [&mut Paired; Q],
    ) {
        let mut acc = [[s.splat(0.0); Q]; W];
        for (c, acc) in acc.iter_mut().enumerate() {
            for (acc, query) in acc.iter_mut().zip(queries.iter()) {
                *acc = s.load(&query.mixed.as_chunks().0[from + c]);
            }
        }
        // two that lie side by side go together, but for the last of an odd number, whose neighbour is not there
        let pairs = seen.div_ceil(2).min(self.positions / 2).min(TILE / 2);
        for at in 0..pairs {
            let (group, line) = (at / (GROUP / 2), at % (GROUP / 2) * self.cache.lines.1);
            if first {
                let keys = (line / size_of::<Line>() + from) * self.cache.lines.0;
                for c in 0..W {
                    s.prefetch_far(self.next[group], keys + c * self.cache.lines.0);
                }
            }
            let values = &self.cache.values[group][line..];
            add(s, (&mut acc, values, from), at, queries);
        }
        if let Some(last) = self.last.filter(|_| seen == self.positions) {
            add(s, (&mut acc, last, from), pairs.min(TILE / 2 - 1), queries);
        }
        for (c, acc) in acc.iter().enumerate() {
            for (acc, query) in acc.iter().zip(queries.iter_mut()) {
                s.store(*acc, &mut query.mixed.as_chunks_mut().0[from + c]);
            }
        }
    }
}

/// Adds lines of `values`, which are the positions of weight `at`.
#[inline(always)]
fn add<S: Simd, const Q: usize, const W: usize>(
    s: S,
    (acc, values, from): (&mut [[S::V; Q]; W], &[u8], usize),
    at: usize,
    queries: &[&mut Paired; Q],
) {
    for (c, acc) in acc.iter_mut().enumerate() {
        let line = line_at(values, (from + c) * size_of::<Line>());
        for (acc, query) in acc.iter_mut().zip(queries) {
            *acc = s.dot_bf16_pair(*acc, line, query.weights[at]);
        }
    }
}

/// The line at byte `at`; zeros where there is none, which cannot be.
#[inline(always)]
fn line_at(bytes: &[u8], at: usize) -> &Line {
    bytes.get(at..).and_then(<[u8]>::first_chunk).unwrap_or(&[0; 64])
}
