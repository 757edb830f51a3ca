//! The paged cache of one layer: for each block and KV head, K as `head_dim × slots` and V as `slots × head_dim`, each in one piece.
//! So one load of K gives sixteen positions, which need no sum across lanes, and a block costs the bytes it holds.

use super::dense::to_bf16;
use super::{HeadShape, KvSize, Matrix, OutOfMemory};
use crate::raw::large::LargeBytes;

/// Positions that are looked at together.
pub const GROUP: usize = 16;

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

    pub fn key_bytes(&self) -> usize {
        self.head_dim * self.block_size * self.kind.size()
    }

    pub fn value_bytes(&self) -> usize {
        self.value_dim() * self.block_size * self.kind.size()
    }
}

/// K and V of one layer.
#[derive(Debug)]
pub struct LayerKv {
    pub keys: LargeBytes,
    pub values: LargeBytes,
}

impl LayerKv {
    /// Writes one token's K and V (`kv_heads × head_dim` values each) to `slot`.
    pub fn store(&mut self, layout: &KvLayout, slot: usize, k: &[f32], v: &[f32]) {
        let (block, at, size) = (slot / layout.block_size, slot % layout.block_size, layout.kind.size());
        let heads = k.chunks_exact(layout.head_dim).zip(v.chunks_exact(layout.head_dim)).enumerate();
        for (head, (k, v)) in heads {
            let index = block * layout.kv_heads + head;
            let keys = &mut self.keys[index * layout.key_bytes()..(index + 1) * layout.key_bytes()];
            for (line, value) in keys.chunks_exact_mut(layout.block_size * size).zip(k) {
                write(&mut line[at * size..(at + 1) * size], *value);
            }
            let start = index * layout.value_bytes() + at * layout.value_dim() * size;
            let line = &mut self.values[start..start + layout.head_dim * size];
            line.chunks_exact_mut(size).zip(v).for_each(|(place, value)| write(place, *value));
        }
    }
}

/// Memory for all layers, touched.
///
/// # Errors
/// When it does not fit.
pub fn layers(layout: &KvLayout, size: KvSize) -> Result<Vec<LayerKv>, OutOfMemory> {
    let tokens = size.num_blocks as u128 * size.block_size as u128;
    let per_head = (layout.head_dim + layout.value_dim()) as u128 * layout.kind.size() as u128;
    let needed_bytes = size.layers as u128 * tokens * layout.kv_heads as u128 * per_head;
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
        plane.fill(0);
        Ok(plane)
    };
    (0..size.layers)
        .map(|_| Ok(LayerKv { keys: plane(layout.key_bytes())?, values: plane(layout.value_bytes())? }))
        .collect()
}

fn write(place: &mut [u8], value: f32) {
    match place.len() {
        4 => place.copy_from_slice(&value.to_le_bytes()),
        _ => place.copy_from_slice(&to_bf16(value).to_le_bytes()),
    }
}

/// Copies row `row` of `k` and `v` to `slots[row]`.
pub fn store_rows(layer: &mut LayerKv, layout: &KvLayout, k: &Matrix, v: &Matrix, slots: &[usize]) {
    for (row, slot) in slots.iter().enumerate() {
        layer.store(layout, *slot, k.row(row), v.row(row));
    }
}
