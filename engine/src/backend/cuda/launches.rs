//! Each operation as launches: which kernel, how many blocks, which arguments. The order of arguments is the kernel's (`kernels/*.cu`).

use std::sync::Arc;

use super::device::Device;
use super::driver::{Address, Driver, Launch};
use super::format::Weight;
use super::items::{Items, TOGETHER, shared_bytes};
use super::memory::{Matrix, Slice};
use super::{Kv, KvFormat};
use crate::backend::{DeviceFault, HeadShape};

/// Threads of a block whose threads have a value each, and of one whose warps have a group of values each.
const VALUES: u32 = 256;
const GROUPS: u32 = 128;
const WARP: u32 = 32;

pub(super) type Done = Result<(), DeviceFault>;

/// An argument of a kernel as a word.
pub(super) trait Word {
    fn word(self) -> u64;
}

impl Word for Address {
    fn word(self) -> u64 {
        self.0
    }
}

impl Word for &Matrix {
    fn word(self) -> u64 {
        self.at().0
    }
}

impl Word for &Slice {
    fn word(self) -> u64 {
        self.at().0
    }
}

impl Word for &Arc<Slice> {
    fn word(self) -> u64 {
        self.at().0
    }
}

/// A count: 32 or 64 bits of it are read.
impl Word for usize {
    fn word(self) -> u64 {
        self as u64
    }
}

impl Word for f32 {
    fn word(self) -> u64 {
        u64::from(self.to_bits())
    }
}

/// Words of any arguments.
macro_rules! args {
    ($($arg:expr),* $(,)?) => { &[$($crate::backend::cuda::launches::Word::word($arg)),*] };
}
pub(super) use args;

/// So many blocks of `threads` that there are as many threads as values.
pub(super) fn values(count: usize) -> ([u32; 3], u32, u32) {
    ([blocks(count, VALUES as usize), 1, 1], VALUES, 0)
}

/// A warp for each of `count` groups.
pub(super) fn groups(count: usize, shared_bytes: u32) -> ([u32; 3], u32, u32) {
    ([blocks(count, (GROUPS / WARP) as usize), 1, 1], GROUPS, shared_bytes)
}

/// A group of values that has a block of its own; which, so that sums keep their order, depends on its width alone.
fn is_wide(width: usize) -> bool {
    width >= 512
}

/// A block for each of `count` wide groups, with a word for each warp.
fn wide(count: usize) -> ([u32; 3], u32, u32) {
    ([blocks(count, 1), 1, 1], VALUES, VALUES / WARP * 4)
}

pub(super) fn blocks(count: usize, of: usize) -> u32 {
    u32::try_from(count.div_ceil(of)).unwrap_or(u32::MAX).max(1)
}

fn words(values: impl IntoIterator<Item = u32>) -> Vec<u8> {
    values.into_iter().flat_map(u32::to_le_bytes).collect()
}

fn places(values: &[usize]) -> Vec<u8> {
    words(values.iter().map(|value| *value as u32))
}

impl<D: Driver> Device<D> {
    /// Makes room for `rows × cols` values in `x`; what is in them does not matter.
    pub(super) fn shape(&mut self, x: &mut Matrix, rows: usize, cols: usize) -> Done {
        let needed = (rows * cols * 4) as u64;
        if x.place.as_ref().is_none_or(|place| place.len_bytes() < needed) {
            x.place = None;
            x.place = Some(self.take(needed.max(4))?);
        }
        (x.rows, x.cols) = (rows, cols);
        Ok(())
    }

    pub(super) fn embed(&mut self, table: &Weight, tokens: &mut dyn Iterator<Item = u32>, out: &mut Matrix) -> Done {
        let tokens: Vec<u32> = tokens.collect();
        let (rows, cols) = (tokens.len(), table.cols);
        self.shape(out, rows, cols)?;
        let Some(place) = &table.place else { return Ok(()) };
        let tokens = self.put_once(words(tokens))?;
        let args = args![&*out, place, &tokens, rows, cols];
        self.launch(Launch::new(table.format.embed(), values(rows * cols), args))
    }

    pub(super) fn copy(&mut self, x: &Matrix, out: &mut Matrix) -> Done {
        self.shape(out, x.rows, x.cols)?;
        self.launch(Launch::new("copy_f32", values(x.len().div_ceil(16)), args![&*out, x, x.len()]))
    }

    pub(super) fn add(&mut self, x: &mut Matrix, y: &Matrix) -> Done {
        self.launch(Launch::new("add_f32", values(x.len().div_ceil(4)), args![&*x, y, x.len()]))
    }

    pub(super) fn silu_mul(&mut self, gate: &mut Matrix, up: &Matrix) -> Done {
        self.launch(Launch::new("silu_mul", values(gate.len().div_ceil(4)), args![&*gate, up, gate.len()]))
    }

    pub(super) fn rms_norm(&mut self, x: &mut Matrix, weight: &Matrix, eps: f32) -> Done {
        let (width, count) = (weight.len(), x.len() / weight.len().max(1));
        let (kernel, geometry) =
            if is_wide(width) { ("rms_norm_wide", wide(count)) } else { ("rms_norm", groups(count, 0)) };
        self.launch(Launch::new(kernel, geometry, args![&*x, weight, count, width, eps]))
    }

    pub(super) fn rms_norm_to(&mut self, out: &mut Matrix, x: &Matrix, weight: &Matrix, eps: f32) -> Done {
        self.shape(out, x.rows, x.cols)?;
        let (width, count) = (weight.len(), x.len() / weight.len().max(1));
        let (kernel, geometry) =
            if is_wide(width) { ("rms_norm_to_wide", wide(count)) } else { ("rms_norm_to", groups(count, 0)) };
        self.launch(Launch::new(kernel, geometry, args![&*out, x, weight, count, width, eps]))
    }

    pub(super) fn rope(&mut self, x: &mut Matrix, cos: &Matrix, sin: &Matrix) -> Done {
        let (head_dim, rows) = (2 * cos.cols, x.rows);
        let heads = x.cols / head_dim.max(1);
        let args = args![&*x, cos, sin, rows, heads, head_dim];
        self.launch(Launch::new("rope", values(rows * heads * cos.cols), args))
    }

    pub(super) fn gather(&mut self, x: &Matrix, rows: &[usize], out: &mut Matrix) -> Done {
        let (count, cols) = (rows.len(), x.cols);
        self.shape(out, count, cols)?;
        let rows = self.put_once(places(rows))?;
        self.launch(Launch::new("gather_rows", values(count * cols), args![&*out, x, &rows, count, cols]))
    }

    pub(super) fn scatter_add(&mut self, x: &mut Matrix, rows: &[usize], y: &Matrix, weights: &[f32]) -> Done {
        let (count, cols) = (rows.len(), x.cols);
        let rows = self.put_once(places(rows))?;
        let weights = self.put_once(words(weights.iter().map(|weight| weight.to_bits())))?;
        self.launch(Launch::new("scatter_add", values(cols), args![&*x, &rows, y, &weights, count, cols]))
    }

    pub(super) fn store_kv(&mut self, (kv, layer): (&Kv, usize), k: &Matrix, v: &Matrix, slots: &[usize]) -> Done {
        let HeadShape { kv_heads, head_dim, .. } = kv.heads;
        let (keys, cached) = &kv.layers[layer];
        let rows = slots.len();
        let slots = self.put_once(places(slots))?;
        let kernel = if kv.format == KvFormat::F32 { "store_kv_f32" } else { "store_kv_bf16" };
        let args = args![keys, cached, k, v, &slots, rows, kv_heads, head_dim, kv.block_size];
        self.launch(Launch::new(kernel, values(rows * kv_heads * head_dim), args))
    }

    /// Norms of heads, rotation and the write to the cache in one kernel; Q stays where it is.
    pub(super) fn place(
        &mut self,
        ([q, k], v): ([&mut Matrix; 2], &Matrix),
        norms: Option<(&Matrix, &Matrix, f32)>,
        (cos, sin): (&Matrix, &Matrix),
        (kv, layer): (&Kv, usize),
        slots: &[usize],
    ) -> Done {
        let HeadShape { kv_heads, head_dim, .. } = kv.heads;
        let (heads, rows) = (q.cols / head_dim.max(1), slots.len());
        let (keys, cached) = &kv.layers[layer];
        let slots = self.put_once(places(slots))?;
        let none = Address::default();
        let (q_norm, k_norm, eps) = norms.map_or((none, none, 0.0), |(q, k, eps)| (q.at(), k.at(), eps));
        let kernel = if kv.format == KvFormat::F32 { "place_f32" } else { "place_bf16" };
        let shared_bytes = (GROUPS / WARP) * head_dim as u32 * 4;
        let geometry = groups(rows * (heads + 2 * kv_heads), shared_bytes);
        let args = args![
            &*q,
            &*k,
            v,
            q_norm,
            k_norm,
            eps,
            cos,
            sin,
            keys,
            cached,
            &slots,
            rows,
            heads,
            kv_heads,
            head_dim,
            kv.block_size
        ];
        self.launch(Launch::new(kernel, geometry, args))
    }

    pub(super) fn attention(
        &mut self,
        q: &Matrix,
        (kv, layer): (&Kv, usize),
        items: &Items,
        (heads, window): (HeadShape, Option<usize>),
        out: &mut Matrix,
    ) -> Done {
        self.shape(out, q.rows, q.cols)?;
        if items.len() == 0 {
            return Ok(());
        }
        let (keys, cached) = &kv.layers[layer];
        let list = self.put_once(words(items.words.iter().copied()))?;
        let tables = self.put_once(words(items.tables.iter().copied()))?;
        let HeadShape { heads, kv_heads, head_dim } = heads;
        let (scale, window, size) = (1.0 / (head_dim as f32).sqrt(), window.unwrap_or(0), kv.block_size);
        let (split, rows) = match (kv.format, items.warps) {
            (KvFormat::F32, 4) => ("attention_split_f32_4", "attention_rows_f32_4"),
            (KvFormat::F32, _) => ("attention_split_f32", "attention_rows_f32"),
            (KvFormat::Bf16, _) if items.queries <= TOGETHER => ("attention_split_bf16", "attention_few_bf16"),
            (KvFormat::Bf16, _) => ("attention_split_bf16", "attention_rows_bf16"),
        };
        let (mut grid, block) = ([blocks(items.len(), 1), 1, 1], items.warps as u32 * WARP);
        let shared = shared_bytes(head_dim, items.warps, kv.format);
        if items.splits == 1 {
            let args = args![&*out, q, keys, cached, &list, &tables, heads, kv_heads, head_dim, size, window, scale];
            return self.launch(Launch::new(rows, (grid, block, shared), args));
        }
        let parts = self.parts(items.parts_bytes(q.rows, HeadShape { heads, kv_heads, head_dim }))?;
        let args =
            args![parts, q, keys, cached, &list, &tables, heads, kv_heads, head_dim, size, window, scale, items.splits];
        grid[1] = blocks(items.splits, 1);
        self.launch(Launch::new(split, (grid, block, shared), args))?;
        (grid[1], grid[2]) = (blocks(head_dim, WARP as usize), blocks(items.queries, items.warps));
        let args = args![&*out, parts, &list, heads, kv_heads, head_dim, items.splits];
        self.launch(Launch::new("attention_join", (grid, block, 0), args))
    }

    /// Occupies the device until `flag` is set: for ever, unless it is 1.
    pub(super) fn spin(&mut self, blocks: u32, flag: u32) -> Done {
        let flag = self.put_new(&flag.to_le_bytes())?;
        self.launch(Launch::new("spin", ([blocks, 1, 1], WARP, 0), args![&flag]))
    }
}
