//! The CPU backend, and the oracle that later backends are compared with. Weights stay in the type of their file; each
//! instruction set runs the same kernels (`crate::raw`), and each output has one order of summation.
//!
//! [`Precision::Exact`] computes with f32 inputs throughout. [`Precision::Native`], the default, rounds inputs to what the weights
//! are made for: bf16 for bf16 weights, bytes with a scale for each 32 values for quantised ones; and caches K and V as bf16.

mod attention;
mod dense;
mod isa;
mod kernels;
mod kv;
mod output;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod panels;
mod pool;
mod quant;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::sync::Arc;

use super::{AttentionSeq, Backend, HeadShape, KvSize, OutOfMemory, Part, Preparer, WeightShape};
use crate::raw::{Op, Simd};
use crate::weights::{Bytes, RawWeight, WeightType, decode_row};
use attention::AttentionOp;
use dense::Inputs;
pub use isa::Isa;
use kernels::{RmsNormOp, RotateOp, silu};
pub use kv::KvType;
use kv::{KvLayout, LayerKv, store_rows};
use output::Output;
use panels::{PanelKind, Panels};
use pool::Pool;

/// A row-major f32 matrix in main memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) values: Vec<f32>,
}

impl Matrix {
    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..(row + 1) * self.cols]
    }
}

/// A weight in memory.
#[derive(Debug)]
pub enum Weight {
    /// As in the file, usually mapped.
    Dense(RawWeight),
    /// Quantised and repacked.
    Panels(Panels),
}

/// K and V of every layer.
#[derive(Debug)]
pub struct Kv {
    layout: KvLayout,
    layers: Vec<LayerKv>,
}

/// What inputs of multiplications are rounded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// Nothing: f32.
    Exact,
    /// What the weights are made for.
    #[default]
    Native,
}

/// The cores of this machine.
#[derive(Debug, Clone)]
pub struct CpuBackend {
    pool: Arc<Pool>,
    isa: Isa,
    precision: Precision,
}

impl CpuBackend {
    /// At most `threads` threads in one operation; small operations always stay on the caller's.
    pub fn new(threads: usize) -> Self {
        Self { pool: Arc::new(Pool::new(threads.max(1))), isa: Isa::best(), precision: Precision::default() }
    }

    /// With other rounding of inputs.
    pub fn with_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    /// With other instructions than the best.
    pub fn with_isa(self, isa: Isa) -> Self {
        Self { isa, ..self }
    }

    /// Calls `f` for every row of `values`, with its index.
    fn each_row(&self, values: &mut [f32], cols: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
        let work = values.len() * 8;
        self.pool.each_chunk(values, cols, work, f);
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
    type Weight = Weight;
    type Kv = Kv;

    fn upload(&self, rows: usize, cols: usize, values: Vec<f32>) -> Matrix {
        debug_assert_eq!(values.len(), rows * cols);
        Matrix { rows, cols, values }
    }

    fn download(&self, x: Matrix) -> Vec<f32> {
        x.values
    }

    fn weight(&self, raw: RawWeight) -> Weight {
        match PanelKind::of(raw.kind) {
            None => Weight::Dense(raw),
            // the oracle pays in memory: inputs that are not rounded need weights that are not in bytes
            Some(_) if self.precision == Precision::Exact => Weight::Dense(raw.decoded()),
            Some(_) => Panels::pack(&raw, &mut || ()).map_or_else(|| Weight::Dense(raw.decoded()), Weight::Panels),
        }
    }

    fn preparer(&self) -> Option<&dyn Preparer> {
        Some(self)
    }

    fn prepared(&self, shape: WeightShape, bytes: Bytes, _part: &Part) -> Option<Weight> {
        let kind = PanelKind::of(shape.kind)?;
        Panels::new((shape.rows, shape.cols), kind, bytes).map(Weight::Panels)
    }

    fn kv_cache(&self, size: KvSize, heads: HeadShape) -> Result<Kv, OutOfMemory> {
        let kind = match self.precision {
            Precision::Exact => KvType::F32,
            Precision::Native => KvType::Bf16,
        };
        let layout = KvLayout::new(kind, heads, size.block_size);
        let tokens = size.num_blocks as u128 * size.block_size as u128;
        let per_token = heads.kv_heads as u128 * (layout.head_dim + layout.value_dim()) as u128 * kind.size() as u128;
        let needed_bytes = size.layers as u128 * tokens * per_token;
        let refuse = |reason: &str| OutOfMemory {
            needed_bytes: u64::try_from(needed_bytes).unwrap_or(u64::MAX),
            reason: reason.to_owned(),
        };
        if needed_bytes > isize::MAX as u128 {
            return Err(refuse("more than this machine can address"));
        }
        let plane = |block_bytes: usize| {
            let mut plane: Vec<u8> = Vec::new();
            let len = size.num_blocks * heads.kv_heads * block_bytes;
            plane.try_reserve_exact(len).map_err(|_| refuse("the allocator refused; ask for fewer blocks"))?;
            // touched now: a cache that does not fit fails at start-up and not under the first load
            plane.resize(len, 0);
            Ok(plane)
        };
        let layer = |_| Ok(LayerKv { keys: plane(layout.key_bytes())?, values: plane(layout.value_bytes())? });
        Ok(Kv { layout, layers: (0..size.layers).map(layer).collect::<Result<_, OutOfMemory>>()? })
    }

    fn embed(&self, table: &Weight, tokens: &[u32]) -> Matrix {
        let row = |token: &u32| match table {
            Weight::Dense(raw) => decode_row(raw.kind, raw.row(*token as usize)),
            Weight::Panels(panels) => panels.row(*token as usize),
        };
        let cols = match table {
            Weight::Dense(raw) => raw.cols,
            Weight::Panels(panels) => panels.cols,
        };
        Matrix { rows: tokens.len(), cols, values: tokens.iter().flat_map(row).collect() }
    }

    fn rms_norm(&self, x: &Matrix, weight: &Matrix, eps: f32) -> Matrix {
        let mut out = x.clone();
        self.each_row(&mut out.values, weight.values.len(), |_, group| {
            self.isa.run(RmsNormOp { group, weight: &weight.values, eps });
        });
        out
    }

    fn linear(&self, x: &Matrix, weight: &Weight, bias: Option<&Matrix>) -> Matrix {
        let outputs = match weight {
            Weight::Dense(raw) => raw.rows,
            Weight::Panels(panels) => panels.rows,
        };
        let (on, out) = ((self.isa, &*self.pool), Output::new(x.rows, outputs));
        match (weight, self.precision) {
            (Weight::Panels(panels), _) => quant::multiply(on, x, panels, &out),
            (Weight::Dense(raw), precision) => match (raw.kind, precision) {
                (WeightType::Bf16, Precision::Native) => dense::multiply_bf16(on, x, raw, &out),
                (WeightType::Bf16, Precision::Exact) => {
                    dense::multiply::<dense::Bf16>(on, &Inputs::f32(&x.values, x.cols), (raw, 0), &out);
                }
                (WeightType::F16, _) => {
                    dense::multiply::<dense::F16>(on, &Inputs::f32(&x.values, x.cols), (raw, 0), &out);
                }
                _ => dense::multiply::<dense::F32>(on, &Inputs::f32(&x.values, x.cols), (raw, 0), &out),
            },
        }
        let mut out = out.into_matrix();
        if let Some(bias) = bias {
            out.values.chunks_exact_mut(outputs.max(1)).for_each(|row| add_in_place(row, &bias.values));
        }
        out
    }

    fn rope(&self, x: &mut Matrix, cos: &Matrix, sin: &Matrix) {
        let cols = x.cols;
        self.each_row(&mut x.values, cols, |row, heads| {
            self.isa.run(RotateOp { heads, cos: cos.row(row), sin: sin.row(row) });
        });
    }

    fn store_kv(&self, kv: &mut Kv, layer: usize, k: &Matrix, v: &Matrix, slots: &[usize]) {
        store_rows(&mut kv.layers[layer], &kv.layout, k, v, slots);
    }

    fn attention(
        &self,
        q: &Matrix,
        (kv, layer): (&Kv, usize),
        seqs: &[AttentionSeq<'_>],
        heads: HeadShape,
        window: Option<usize>,
    ) -> Matrix {
        let (layer, layout) = (&kv.layers[layer], kv.layout);
        let (units, work) = attention::units(seqs, heads);
        let out = Output::new(q.rows, q.cols);
        self.pool.run(units.len(), work, |index| {
            let unit = units[index];
            self.isa.run(AttentionOp { q, layer, layout, heads, window, unit, out: &out });
        });
        out.into_matrix()
    }

    fn silu_mul(&self, gate: &mut Matrix, up: &Matrix) {
        let cols = gate.cols;
        self.each_row(&mut gate.values, cols, |row, gate| self.isa.run(SiluOp { gate, up: up.row(row) }));
    }

    fn add(&self, x: &mut Matrix, y: &Matrix) {
        add_in_place(&mut x.values, &y.values);
    }

    fn gather_rows(&self, x: &Matrix, rows: &[usize]) -> Matrix {
        let values = rows.iter().flat_map(|row| x.row(*row).iter().copied()).collect();
        Matrix { rows: rows.len(), cols: x.cols, values }
    }

    fn scatter_add(&self, x: &mut Matrix, rows: &[usize], y: &Matrix, weights: &[f32]) {
        for (i, (row, weight)) in rows.iter().zip(weights).enumerate() {
            let place = &mut x.values[row * x.cols..(row + 1) * x.cols];
            place.iter_mut().zip(y.row(i)).for_each(|(x, y)| *x += weight * y);
        }
    }
}

impl Preparer for CpuBackend {
    fn form(&self) -> String {
        format!("panels1-{}", self.isa.name())
    }

    fn prepares(&self, kind: WeightType) -> bool {
        self.precision == Precision::Native && PanelKind::of(kind).is_some()
    }

    fn prepare(&self, raw: &RawWeight, alive: &mut dyn FnMut()) -> Option<Bytes> {
        let panels = if self.prepares(raw.kind) { Panels::pack(raw, alive) } else { None };
        panels.map(Panels::into_bytes)
    }
}

/// `silu(gate) × up` over `gate`.
struct SiluOp<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Op for SiluOp<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (gate, up) in self.gate.iter_mut().zip(self.up) {
            *gate = silu(*gate) * up;
        }
    }
}

fn add_in_place(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

#[cfg(test)]
mod tests;
