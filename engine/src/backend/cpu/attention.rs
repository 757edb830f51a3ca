//! Causal attention over the paged cache: online softmax over tiles of 64 positions that begin at multiples of 64, whatever
//! the blocks, chunks and neighbours are, so that every bit of a row is its own (EP4). The query heads that share a KV head, and
//! neighbouring rows of a sequence, share its loads.

use super::kv::{GROUP, KvLayout, LayerKv};
use super::output::Output;
use super::{HeadShape, Matrix};
use crate::backend::AttentionSeq;
use crate::raw::{Op, Simd};

/// Groups of positions a tile.
const GROUPS: usize = 4;
const TILE: usize = GROUPS * GROUP;
/// Rows of a sequence that are computed together.
pub const ROWS: usize = 8;
/// Queries that share each load.
const QUERIES: usize = 4;

/// Rows `first_row..first_row + rows` of a step, all of one sequence, over one KV head.
#[derive(Debug, Clone, Copy)]
pub struct Unit<'a> {
    first_row: usize,
    rows: usize,
    /// Position of the first of them.
    pos: usize,
    blocks: &'a [u32],
    kv_head: usize,
}

/// All units of a step, and their multiply-adds in all.
pub fn units<'a>(seqs: &[AttentionSeq<'a>], heads: HeadShape) -> (Vec<Unit<'a>>, usize) {
    let (mut units, mut work, mut row) = (Vec::new(), 0, 0);
    for seq in seqs {
        for at in (0..seq.rows).step_by(ROWS) {
            let (rows, pos) = (ROWS.min(seq.rows - at), seq.start_pos + at);
            work += rows * (pos + rows) * heads.heads * heads.head_dim * 2;
            let unit = |kv_head| Unit { first_row: row + at, rows, pos, blocks: seq.blocks, kv_head };
            units.extend((0..heads.kv_heads).map(unit));
        }
        row += seq.rows;
    }
    (units, work)
}

/// Computes one unit.
pub struct AttentionOp<'a> {
    pub q: &'a Matrix,
    pub layer: &'a LayerKv,
    pub layout: KvLayout,
    pub heads: HeadShape,
    /// Positions a row sees, its own among them; `None`: all.
    pub window: Option<usize>,
    pub unit: Unit<'a>,
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

/// Cached values, as sixteen lanes are read.
trait Cached {
    const BYTES: usize;
    fn load<S: Simd>(s: S, bytes: &[u8]) -> S::V;
}

struct CachedF32;
struct CachedBf16;

impl Cached for CachedF32 {
    const BYTES: usize = 4;
    #[inline(always)]
    fn load<S: Simd>(s: S, bytes: &[u8]) -> S::V {
        bytes.first_chunk().map_or_else(|| s.splat(0.0), |bytes| s.load_f32(bytes))
    }
}

impl Cached for CachedBf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn load<S: Simd>(s: S, bytes: &[u8]) -> S::V {
        bytes.first_chunk().map_or_else(|| s.splat(0.0), |bytes| s.load_bf16(bytes))
    }
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
        let mut queries = self.queries();
        let first = queries.iter().map(|query| query.first).min().unwrap_or(0) / TILE;
        let last = (self.unit.pos + self.unit.rows - 1) / TILE;
        let mut scratch = vec![0; GROUPS * GROUP * self.layout.head_dim * C::BYTES];
        for tile in first..=last {
            self.tile::<S, C>(s, tile * TILE, &mut queries, &mut scratch);
        }
        for query in &mut queries {
            let scale = 1.0 / query.sum;
            query.out.iter_mut().for_each(|value| *value *= scale);
            let d = self.heads.head_dim;
            self.out.set_run(query.row, query.head * d, &query.out[..d]);
        }
    }

    fn queries(&self) -> Vec<Query> {
        let HeadShape { heads, kv_heads, head_dim } = self.heads;
        let (per_kv, scale) = (heads / kv_heads, 1.0 / (head_dim as f32).sqrt());
        let query = |row: usize, head: usize| {
            let last = self.unit.pos + row - self.unit.first_row;
            let q = &self.q.row(row)[head * head_dim..(head + 1) * head_dim];
            Query {
                row,
                head,
                first: self.window.map_or(0, |window| (last + 1).saturating_sub(window)),
                last,
                q: q.iter().map(|x| x * scale).collect(),
                max: f32::NEG_INFINITY,
                sum: 0.0,
                out: vec![0.0; self.layout.value_dim()],
                weights: [0.0; TILE],
            }
        };
        let rows = self.unit.first_row..self.unit.first_row + self.unit.rows;
        let heads = self.unit.kv_head * per_kv..(self.unit.kv_head + 1) * per_kv;
        rows.flat_map(|row| heads.clone().map(move |head| (row, head))).map(|(row, head)| query(row, head)).collect()
    }

    /// Positions `start..start + TILE`, as far as they are there.
    #[inline(always)]
    fn tile<S: Simd, C: Cached>(&self, s: S, start: usize, queries: &mut [Query], scratch: &mut [u8]) {
        let end = (start + TILE).min(self.unit.pos + self.unit.rows);
        let groups = (end - start).div_ceil(GROUP);
        let mut rest = scratch;
        // groups past the end look at the last one again; the mask takes them out
        let mut keys: [(&[u8], usize); GROUPS] = [(&[], 0); GROUPS];
        for (group, place) in keys.iter_mut().enumerate() {
            let (mine, later) = rest.split_at_mut(GROUP * self.layout.head_dim * C::BYTES);
            rest = later;
            *place = self.keys::<C>(start + group.min(groups - 1) * GROUP, end, mine);
        }
        for queries in queries.chunks_mut(QUERIES) {
            if queries.iter().all(|query| query.last < start || query.first >= end) {
                continue;
            }
            match &mut *queries {
                [a, b, c, d] if S::WIDE => self.scores::<S, C, 4>(s, &keys, [a, b, c, d]),
                [a, b] if S::WIDE => self.scores::<S, C, 2>(s, &keys, [a, b]),
                other => other.iter_mut().for_each(|query| self.scores::<S, C, 1>(s, &keys, [query])),
            }
            queries.iter_mut().for_each(|query| query.absorb(s, start));
            match &mut *queries {
                [a, b, c, d] if S::WIDE => self.mix::<S, C, 4>(s, start..end, [a, b, c, d]),
                [a, b] if S::WIDE => self.mix::<S, C, 2>(s, start..end, [a, b]),
                other => other.iter_mut().for_each(|query| self.mix::<S, C, 1>(s, start..end, [query])),
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
        let block = self.unit.blocks[index] as usize * self.layout.kv_heads + self.unit.kv_head;
        &self.layer.keys[block * self.layout.key_bytes()..(block + 1) * self.layout.key_bytes()]
    }

    /// Scores of a tile into the queries' `weights`: each lane a position, summed over the dimensions in order.
    #[inline(always)]
    fn scores<S: Simd, C: Cached, const Q: usize>(
        &self,
        s: S,
        keys: &[(&[u8], usize); GROUPS],
        mut queries: [&mut Query; Q],
    ) {
        let mut acc = [[s.splat(0.0); GROUPS]; Q];
        for d in 0..self.layout.head_dim {
            let k: [S::V; GROUPS] = std::array::from_fn(|g| C::load(s, &keys[g].0[d * keys[g].1..]));
            for q in 0..Q {
                let x = s.splat(queries[q].q[d]);
                for g in 0..GROUPS {
                    acc[q][g] = s.fma(x, k[g], acc[q][g]);
                }
            }
        }
        for (query, acc) in queries.iter_mut().zip(acc) {
            for (place, acc) in query.weights.as_chunks_mut().0.iter_mut().zip(acc) {
                s.store(acc, place);
            }
        }
    }

    /// Adds the tile's V by the queries' `weights`, in the order of the positions.
    #[inline(always)]
    fn mix<S: Simd, C: Cached, const Q: usize>(
        &self,
        s: S,
        positions: std::ops::Range<usize>,
        mut queries: [&mut Query; Q],
    ) {
        const WIDTH: usize = 4;
        let (dim, chunks) = (self.layout.value_dim(), self.layout.value_dim() / GROUP);
        for from in (0..chunks).step_by(WIDTH) {
            let width = WIDTH.min(chunks - from);
            let mut acc = [[s.splat(0.0); WIDTH]; Q];
            for (acc, query) in acc.iter_mut().zip(&queries) {
                for (acc, out) in acc.iter_mut().zip(&query.out.as_chunks().0[from..from + width]) {
                    *acc = s.load(out);
                }
            }
            for pos in positions.clone() {
                let line = &self.value_line::<C>(pos, dim)[from * GROUP * C::BYTES..];
                for (c, bytes) in line.chunks_exact(GROUP * C::BYTES).take(width).enumerate() {
                    let v = C::load(s, bytes);
                    for q in 0..Q {
                        let weight = s.splat(queries[q].weights[pos - positions.start]);
                        acc[q][c] = s.fma(weight, v, acc[q][c]);
                    }
                }
            }
            for (acc, query) in acc.iter().zip(&mut queries) {
                for (acc, out) in acc.iter().zip(&mut query.out.as_chunks_mut().0[from..from + width]) {
                    s.store(*acc, out);
                }
            }
        }
    }

    #[inline(always)]
    fn value_line<C: Cached>(&self, pos: usize, dim: usize) -> &[u8] {
        let block = self.unit.blocks[pos / self.layout.block_size] as usize * self.layout.kv_heads + self.unit.kv_head;
        let start = block * self.layout.value_bytes() + pos % self.layout.block_size * dim * C::BYTES;
        &self.layer.values[start..start + dim * C::BYTES]
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
            *chunk = chunk.map(|score| exp(score - max));
            sum = s.add(sum, s.load(chunk));
        }
        self.sum = self.sum * shrink + s.fold(sum);
        self.max = max;
        if shrink != 1.0 {
            self.out.iter_mut().for_each(|value| *value *= shrink);
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
