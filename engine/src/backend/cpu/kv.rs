//! The paged cache of one layer: for each block and KV head, K as `head_dim × slots` and V as `slots × head_dim`, each in one piece.
//! So one load of K gives sixteen positions, which need no sum across lanes, and a block costs the bytes it holds.
//!
//! What is summed over lies in pairs where values are bf16: two dimensions of K, two positions of V, side by side for each column, as
//! instructions that multiply pairs want them.

use super::kernels::with_zeros;
use super::pool::Pool;
use super::{HeadShape, KvSize, Matrix, OutOfMemory};
use crate::raw::large::LargeBytes;
use crate::raw::{Op, Simd, pair_of, to_bf16};

/// Positions that are looked at together.
pub const GROUP: usize = 16;

/// Bytes that a thread touches at a time, at least.
const TOUCHED_BYTES: usize = 1 << 20;

/// How cached values are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    F32,
    Bf16,
}

impl KvType {
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// Values of one sum that lie side by side.
    pub fn together(self) -> usize {
        match self {
            Self::F32 => 1,
            Self::Bf16 => 2,
        }
    }
}

/// Where things lie in a layer.
#[derive(Debug, Clone, Copy)]
pub struct KvLayout {
    pub kind: KvType,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub block_size: usize,
}

impl KvLayout {
    pub fn new(kind: KvType, heads: HeadShape, block_size: usize) -> Self {
        Self { kind, kv_heads: heads.kv_heads, head_dim: heads.head_dim, block_size }
    }

    /// `head_dim`, made a multiple of the lanes with zeros that stay zero.
    pub fn value_dim(&self) -> usize {
        self.head_dim.next_multiple_of(GROUP)
    }

    /// Of a block and head.
    pub fn key_bytes(&self) -> usize {
        self.head_dim.div_ceil(self.kind.together()) * self.key_line()
    }

    /// Of a block and head.
    pub fn value_bytes(&self) -> usize {
        self.block_size.div_ceil(self.kind.together()) * self.value_line()
    }

    /// Bytes of the dimensions of K that lie side by side, for all slots of a block.
    pub fn key_line(&self) -> usize {
        self.block_size * self.kind.together() * self.kind.size()
    }

    /// Bytes of the positions of V that lie side by side, for all dimensions.
    pub fn value_line(&self) -> usize {
        self.value_dim() * self.kind.together() * self.kind.size()
    }

    /// Where dimension `d` of slot `slot` is within the K of a block and head, in bytes.
    pub fn key_at(&self, slot: usize, d: usize) -> usize {
        place(self.kind, self.key_line(), d, slot)
    }

    /// The same of V.
    pub fn value_at(&self, slot: usize, d: usize) -> usize {
        place(self.kind, self.value_line(), slot, d)
    }
}

/// Byte of the value at `summed` along what is summed over, in a column.
fn place(kind: KvType, line: usize, summed: usize, column: usize) -> usize {
    let together = kind.together();
    summed / together * line + (column * together + summed % together) * kind.size()
}

/// K and V of one layer.
#[derive(Debug)]
pub struct LayerKv {
    pub keys: LargeBytes,
    pub values: LargeBytes,
}

/// What all layers take.
pub fn bytes(layout: &KvLayout, size: KvSize) -> u128 {
    let per_head = (layout.key_bytes() + layout.value_bytes()) as u128;
    size.layers as u128 * size.num_blocks as u128 * layout.kv_heads as u128 * per_head
}

/// Memory for all layers, touched by all threads: the system clears each page at its first touch, which takes longer than to ask for it.
///
/// # Errors
/// When it does not fit.
pub fn layers(layout: &KvLayout, size: KvSize, pool: &Pool) -> Result<Vec<LayerKv>, OutOfMemory> {
    let needed_bytes = bytes(layout, size);
    let refuse = |reason: &str| OutOfMemory {
        needed_bytes: u64::try_from(needed_bytes).unwrap_or(u64::MAX),
        reason: reason.to_owned(),
    };
    if needed_bytes > isize::MAX as u128 {
        return Err(refuse("more than this machine can address"));
    }
    let plane = |block_bytes: usize| {
        let len = size.num_blocks * layout.kv_heads * block_bytes;
        let mut plane = LargeBytes::zeroed(len).ok_or_else(|| refuse("the allocator refused; ask for fewer blocks"))?;
        // touched now: a cache that does not fit fails at start-up and not under the first load
        let (whole, rest) = plane.as_chunks_mut::<TOUCHED_BYTES>();
        pool.each_chunk(whole, 1, whole.len() * TOUCHED_BYTES, |_, chunk| chunk.as_flattened_mut().fill(0));
        rest.fill(0);
        Ok(plane)
    };
    (0..size.layers)
        .map(|_| Ok(LayerKv { keys: plane(layout.key_bytes())?, values: plane(layout.value_bytes())? }))
        .collect()
}

/// Copies row `row` of `k` and `v` (`kv_heads × head_dim` values each) to `slots[row]`.
pub struct StoreOp<'a> {
    pub layer: &'a mut LayerKv,
    pub layout: KvLayout,
    pub k: &'a Matrix,
    pub v: &'a Matrix,
    pub slots: &'a [usize],
}

impl Op for StoreOp<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let mut row = 0;
        while row < self.slots.len() {
            row += if self.are_pair(row) { self.rows::<S, 2>(s, row) } else { self.rows::<S, 1>(s, row) };
        }
    }
}

impl StoreOp<'_> {
    /// Whether this row and the next are positions of V that lie side by side.
    #[inline(always)]
    fn are_pair(&self, row: usize) -> bool {
        let (slot, at) = (self.slots[row], self.slots[row] % self.layout.block_size);
        let fits = at.is_multiple_of(2) && at + 1 < self.layout.block_size;
        self.layout.kind == KvType::Bf16 && fits && self.slots.get(row + 1) == Some(&(slot + 1))
    }

    /// Copies `N` rows from `row` on, which follow each other in a block; says how many.
    #[inline(always)]
    fn rows<S: Simd, const N: usize>(&mut self, s: S, row: usize) -> usize {
        let (layout, slot) = (self.layout, self.slots[row]);
        let (block, at) = (slot / layout.block_size, slot % layout.block_size);
        let (key_bytes, value_bytes, dims) = (layout.key_bytes(), layout.value_bytes(), layout.head_dim);
        for head in 0..layout.kv_heads {
            let (index, from) = (block * layout.kv_heads + head, head * dims);
            let keys = &mut self.layer.keys[index * key_bytes..(index + 1) * key_bytes];
            for n in 0..N {
                store_key(s, &layout, keys, (at + n, &self.k.row(row + n)[from..from + dims]));
            }
            let values = &mut self.layer.values[index * value_bytes..(index + 1) * value_bytes];
            let first = &self.v.row(row)[from..from + dims];
            if N == 2 {
                let line = &mut values[layout.value_at(at, 0)..][..layout.value_line()];
                let second = &self.v.row(row + 1)[from..from + dims];
                for ((place, first), second) in line.as_chunks_mut().0.iter_mut().zip(first).zip(second) {
                    *place = pair_of(*first, *second).to_le_bytes();
                }
            } else {
                for (d, value) in first.iter().enumerate() {
                    write(&mut values[layout.value_at(at, d)..][..layout.kind.size()], *value);
                }
            }
        }
        N
    }
}

/// Writes the key of one position of a block and head.
#[inline(always)]
fn store_key<S: Simd>(s: S, layout: &KvLayout, keys: &mut [u8], (at, key): (usize, &[f32])) {
    if layout.kind == KvType::F32 {
        for (d, value) in key.iter().enumerate() {
            write(&mut keys[layout.key_at(at, d)..][..4], *value);
        }
        return;
    }
    let mut lines = keys.chunks_exact_mut(layout.key_line());
    for values in key.chunks(GROUP) {
        // as many lines are left as there are dimensions: what is there of them, and no more
        for (pair, line) in s.to_pairs(s.load(&with_zeros(values))).iter().zip(&mut lines) {
            line[4 * at..][..4].copy_from_slice(&pair.to_le_bytes());
        }
    }
}

#[inline(always)]
fn write(place: &mut [u8], value: f32) {
    match place.len() {
        4 => place.copy_from_slice(&value.to_le_bytes()),
        _ => place.copy_from_slice(&to_bf16(value).to_le_bytes()),
    }
}
