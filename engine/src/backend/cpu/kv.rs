//! The paged cache of one layer: for each block and KV head, K as `head_dim × slots` and V as `slots × head_dim`, each in one piece.
//! So one load of K gives sixteen positions, which need no sum across lanes, and a block costs the bytes it holds.
//!
//! What is summed over lies in pairs where values are bf16: two dimensions of K, two positions of V, side by side for each column, as
//! instructions that multiply pairs want them.

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

impl LayerKv {
    /// Writes one token's K and V (`kv_heads × head_dim` values each) to `slot`.
    pub fn store(&mut self, layout: &KvLayout, slot: usize, k: &[f32], v: &[f32]) {
        let (block, at, size) = (slot / layout.block_size, slot % layout.block_size, layout.kind.size());
        let heads = k.chunks_exact(layout.head_dim).zip(v.chunks_exact(layout.head_dim)).enumerate();
        for (head, (k, v)) in heads {
            let index = block * layout.kv_heads + head;
            let keys = &mut self.keys[index * layout.key_bytes()..(index + 1) * layout.key_bytes()];
            let values = &mut self.values[index * layout.value_bytes()..(index + 1) * layout.value_bytes()];
            for (d, (k, v)) in k.iter().zip(v).enumerate() {
                write(&mut keys[layout.key_at(at, d)..][..size], *k);
                write(&mut values[layout.value_at(at, d)..][..size], *v);
            }
        }
    }
}

/// What all layers take.
pub fn bytes(layout: &KvLayout, size: KvSize) -> u128 {
    let per_head = (layout.key_bytes() + layout.value_bytes()) as u128;
    size.layers as u128 * size.num_blocks as u128 * layout.kv_heads as u128 * per_head
}

/// Memory for all layers, touched.
///
/// # Errors
/// When it does not fit.
pub fn layers(layout: &KvLayout, size: KvSize) -> Result<Vec<LayerKv>, OutOfMemory> {
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
