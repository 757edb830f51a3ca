//! How K and V of a tile of positions are read: where they lie in the cache, or from a copy in f32 that many queries share.

use std::marker::PhantomData;

use super::{GROUP, GROUPS, TILE};
use crate::raw::Simd;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Cached values, as sixteen lanes are read.
pub trait Cached {
    const BYTES: usize;
    /// Values of one sum that lie side by side.
    const TOGETHER: usize;
    /// Sixteen columns of a line: of the values that lie side by side there the one at `which`.
    fn load<S: Simd>(s: S, line: &[u8], which: usize) -> S::V;
}

pub struct CachedF32;
pub struct CachedBf16;

impl Cached for CachedF32 {
    const BYTES: usize = 4;
    const TOGETHER: usize = 1;
    #[inline(always)]
    fn load<S: Simd>(s: S, line: &[u8], _: usize) -> S::V {
        line.first_chunk().map_or_else(|| s.splat(0.0), |line| s.load_f32(line))
    }
}

impl Cached for CachedBf16 {
    const BYTES: usize = 2;
    const TOGETHER: usize = 2;
    #[inline(always)]
    fn load<S: Simd>(s: S, line: &[u8], which: usize) -> S::V {
        line.first_chunk().map_or_else(|| s.splat(0.0), |line| s.load_bf16_of_pairs(line, which == 1))
    }
}

/// K and V of a tile, wherever they are read from.
pub trait Tile {
    /// Dimension `d` of the sixteen positions of a group.
    fn keys<S: Simd>(&self, s: S, d: usize) -> [S::V; GROUPS];
    /// Dimensions `16 × chunk` and on of a position of the tile.
    fn values<S: Simd>(&self, s: S, at: usize, chunk: usize) -> S::V;
    /// Asks for V while the scores of dimension `d` are summed.
    #[inline(always)]
    fn ask_values<S: Simd>(&self, _s: S, _d: usize) {}
    /// Asks for K of the next tile while these values are mixed.
    #[inline(always)]
    fn ask_next<S: Simd>(&self, _s: S, _at: usize, _chunk: usize) {}
}

/// As it lies in the cache: groups of sixteen positions, each in one piece.
pub struct InCache<'a, C> {
    pub keys: [&'a [u8]; GROUPS],
    pub values: [&'a [u8]; GROUPS],
    /// Bytes from one line of K, and of V, to the next.
    pub lines: (usize, usize),
    /// K of the tile to come: the processor's own foresight ends with each block.
    pub next: [&'a [u8]; GROUPS],
    pub kind: PhantomData<C>,
}

impl<C: Cached> Tile for InCache<'_, C> {
    #[inline(always)]
    fn keys<S: Simd>(&self, s: S, d: usize) -> [S::V; GROUPS] {
        let mut keys = [s.splat(0.0); GROUPS];
        for (key, bytes) in keys.iter_mut().zip(&self.keys) {
            *key = C::load(s, &bytes[d / C::TOGETHER * self.lines.0..], d % C::TOGETHER);
        }
        keys
    }
    #[inline(always)]
    fn values<S: Simd>(&self, s: S, at: usize, chunk: usize) -> S::V {
        let line = at % GROUP / C::TOGETHER * self.lines.1;
        C::load(s, &self.values[at / GROUP][line + chunk * GROUP * C::TOGETHER * C::BYTES..], at % C::TOGETHER)
    }
    #[inline(always)]
    fn ask_values<S: Simd>(&self, s: S, d: usize) {
        if d.is_multiple_of(C::TOGETHER) {
            for values in &self.values {
                s.prefetch_far(values, d / C::TOGETHER * LINE);
            }
        }
    }
    #[inline(always)]
    fn ask_next<S: Simd>(&self, s: S, at: usize, chunk: usize) {
        if at.is_multiple_of(C::TOGETHER) {
            // as many lines as V of a group has
            let line = at % GROUP / C::TOGETHER * (self.lines.1 / LINE) + chunk;
            s.prefetch_far(self.next[at / GROUP], line * self.lines.0);
        }
    }
}

/// Read once and kept as f32, for many queries.
#[derive(Default)]
pub struct Decoded {
    keys: Vec<[Lanes; GROUPS]>,
    values: Vec<Lanes>,
    chunks: usize,
}

/// On a cache line of its own: across two of them a store takes many times as long, and a load twice.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Lanes([f32; GROUP]);

impl Decoded {
    /// Reads a tile of so many dimensions, chunks of dimensions and positions.
    #[inline(always)]
    pub fn fill<S: Simd>(&mut self, s: S, tile: &impl Tile, (dims, chunks, positions): (usize, usize, usize)) {
        self.keys.resize(dims, [Lanes::default(); GROUPS]);
        self.values.resize(TILE * chunks, Lanes::default());
        self.chunks = chunks;
        // two at a time: which value of a pair is meant must be known where this is compiled
        for (pair, places) in self.keys.chunks_mut(2).enumerate() {
            for (which, place) in places.iter_mut().enumerate() {
                let keys = if which == 0 { tile.keys(s, 2 * pair) } else { tile.keys(s, 2 * pair + 1) };
                for (place, key) in place.iter_mut().zip(keys) {
                    s.store(key, &mut place.0);
                }
            }
        }
        for (pair, places) in self.values.chunks_exact_mut(2 * chunks).take(positions.div_ceil(2)).enumerate() {
            let (first, second) = places.split_at_mut(chunks);
            for (chunk, (first, second)) in first.iter_mut().zip(second).enumerate() {
                s.store(tile.values(s, 2 * pair, chunk), &mut first.0);
                s.store(tile.values(s, 2 * pair + 1, chunk), &mut second.0);
            }
        }
    }
}

impl Tile for Decoded {
    #[inline(always)]
    fn keys<S: Simd>(&self, s: S, d: usize) -> [S::V; GROUPS] {
        let mut keys = [s.splat(0.0); GROUPS];
        for (key, lanes) in keys.iter_mut().zip(&self.keys[d]) {
            *key = s.load(&lanes.0);
        }
        keys
    }
    #[inline(always)]
    fn values<S: Simd>(&self, s: S, at: usize, chunk: usize) -> S::V {
        s.load(&self.values[at * self.chunks + chunk].0)
    }
}
