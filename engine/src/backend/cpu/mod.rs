//! The CPU backend: f32, plain Rust, no unsafe. It is the oracle that later backends are compared with, so it stays
//! simple: one dot product with a fixed order of summation carries all of it.

mod attention;
mod kernels;
mod threads;

use super::{AttentionSeq, Backend, HeadShape, OutOfMemory};
use kernels::{dot, rms_norm_group, rotate_head, silu};
use threads::split_rows;

/// A row-major f32 matrix in main memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) values: Vec<f32>,
}

impl Matrix {
    fn zeros(rows: usize, cols: usize) -> Self {
        Self { rows, cols, values: vec![0.0; rows * cols] }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..(row + 1) * self.cols]
    }
}

/// K and V of every layer: `slots × width` values each.
#[derive(Debug)]
pub struct Kv {
    layers: Vec<LayerKv>,
    width: usize,
}

#[derive(Debug)]
struct LayerKv {
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// f32 on the cores of this machine.
#[derive(Debug, Clone)]
pub struct CpuBackend {
    threads: usize,
}

impl CpuBackend {
    /// At most `threads` threads in one operation; small operations always stay on the caller's.
    pub fn new(threads: usize) -> Self {
        Self { threads: threads.max(1) }
    }
}

impl Default for CpuBackend {
    /// As many threads as the process may use, 16 at most.
    fn default() -> Self {
        Self::new(std::thread::available_parallelism().map_or(1, |n| n.get().min(16)))
    }
}

impl Backend for CpuBackend {
    type Matrix = Matrix;
    type Kv = Kv;

    fn upload(&self, rows: usize, cols: usize, values: Vec<f32>) -> Matrix {
        debug_assert_eq!(values.len(), rows * cols);
        Matrix { rows, cols, values }
    }

    fn download(&self, x: Matrix) -> Vec<f32> {
        x.values
    }

    fn kv_cache(&self, layers: usize, slots: usize, width: usize) -> Result<Kv, OutOfMemory> {
        let needed_bytes = 2 * 4 * layers as u128 * slots as u128 * width as u128;
        let refuse = |reason: &str| OutOfMemory {
            needed_bytes: u64::try_from(needed_bytes).unwrap_or(u64::MAX),
            reason: reason.to_owned(),
        };
        let len = slots.checked_mul(width).ok_or_else(|| refuse("more than this machine can address"))?;
        let plane = || {
            let mut plane: Vec<f32> = Vec::new();
            plane.try_reserve_exact(len).map_err(|_| refuse("the allocator refused; ask for fewer blocks"))?;
            // touched now: a cache that does not fit fails at start-up and not under the first load
            plane.resize(len, 0.0);
            Ok(plane)
        };
        let layers = (0..layers).map(|_| Ok(LayerKv { keys: plane()?, values: plane()? }));
        Ok(Kv { layers: layers.collect::<Result<_, OutOfMemory>>()?, width })
    }

    fn embed(&self, table: &Matrix, tokens: &[u32]) -> Matrix {
        let rows: Vec<usize> = tokens.iter().map(|token| *token as usize).collect();
        self.gather_rows(table, &rows)
    }

    fn rms_norm(&self, x: &Matrix, weight: &Matrix, eps: f32) -> Matrix {
        let mut out = x.clone();
        for group in out.values.chunks_exact_mut(weight.values.len()) {
            rms_norm_group(group, &weight.values, eps);
        }
        out
    }

    fn linear(&self, x: &Matrix, weight: &Matrix, bias: Option<&Matrix>) -> Matrix {
        // Made feature by feature: a thread owns whole weight rows and reads each of them once a tile of tokens,
        // and the same code serves one token (decode) and thousands (prefill).
        let mut by_feature = vec![0.0; weight.rows * x.rows];
        let work = weight.rows * weight.cols * x.rows;
        split_rows(&mut by_feature, x.rows, work, self.threads, |first, out| {
            linear_features(x, weight, first, out);
        });
        let mut out = Matrix { rows: x.rows, cols: weight.rows, values: transpose(by_feature, weight.rows, x.rows) };
        if let Some(bias) = bias {
            for row in out.values.chunks_exact_mut(out.cols) {
                add_in_place(row, &bias.values);
            }
        }
        out
    }

    fn rope(&self, x: &mut Matrix, cos: &Matrix, sin: &Matrix) {
        let cols = x.cols;
        for (row, values) in x.values.chunks_exact_mut(cols).enumerate() {
            for head in values.chunks_exact_mut(2 * cos.cols) {
                rotate_head(head, cos.row(row), sin.row(row));
            }
        }
    }

    fn store_kv(&self, kv: &mut Kv, layer: usize, k: &Matrix, v: &Matrix, slots: &[usize]) {
        let width = kv.width;
        let layer = &mut kv.layers[layer];
        for (row, slot) in slots.iter().enumerate() {
            let place = slot * width..(slot + 1) * width;
            layer.keys[place.clone()].copy_from_slice(k.row(row));
            layer.values[place].copy_from_slice(v.row(row));
        }
    }

    fn attention(
        &self,
        q: &Matrix,
        (kv, layer): (&Kv, usize),
        seqs: &[AttentionSeq<'_>],
        heads: HeadShape,
        block_size: usize,
    ) -> Matrix {
        let layer = &kv.layers[layer];
        let view = attention::KvView { keys: &layer.keys, values: &layer.values, width: kv.width, block_size };
        let rows = attention::rows(seqs);
        let work: usize = rows.iter().map(|row| (row.pos + 1) * q.cols * 2).sum();
        let mut out = Matrix::zeros(q.rows, q.cols);
        split_rows(&mut out.values, q.cols, work, self.threads, |first, chunk| {
            let mut scores = Vec::new();
            for (i, out) in chunk.chunks_exact_mut(q.cols).enumerate() {
                let row = rows[first + i];
                attention::attend_row(q.row(first + i), row, view, heads, &mut scores, out);
            }
        });
        out
    }

    fn silu_mul(&self, gate: &mut Matrix, up: &Matrix) {
        for (gate, up) in gate.values.iter_mut().zip(&up.values) {
            *gate = silu(*gate) * up;
        }
    }

    fn add(&self, x: &mut Matrix, y: &Matrix) {
        add_in_place(&mut x.values, &y.values);
    }

    fn gather_rows(&self, x: &Matrix, rows: &[usize]) -> Matrix {
        let values = rows.iter().flat_map(|row| x.row(*row).iter().copied()).collect();
        Matrix { rows: rows.len(), cols: x.cols, values }
    }
}

/// Tokens whose inputs stay in cache while the weight rows go by.
const TOKEN_TILE: usize = 32;

/// Features `first..` of `x · weightᵀ` into `out`, a row of `x.rows` values a feature.
fn linear_features(x: &Matrix, weight: &Matrix, first: usize, out: &mut [f32]) {
    for tile in (0..x.rows).step_by(TOKEN_TILE) {
        let tile_end = (tile + TOKEN_TILE).min(x.rows);
        for (feature, out) in out.chunks_exact_mut(x.rows).enumerate() {
            let weight_row = weight.row(first + feature);
            for (token, out) in (tile..tile_end).zip(&mut out[tile..tile_end]) {
                *out = dot(x.row(token), weight_row);
            }
        }
    }
}

fn transpose(values: Vec<f32>, rows: usize, cols: usize) -> Vec<f32> {
    if rows == 1 || cols == 1 {
        return values;
    }
    let mut out = vec![0.0; values.len()];
    for (row, line) in values.chunks_exact(cols).enumerate() {
        for (col, value) in line.iter().enumerate() {
            out[col * rows + row] = *value;
        }
    }
    out
}

fn add_in_place(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

#[cfg(test)]
mod tests;
