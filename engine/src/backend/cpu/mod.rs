//! The CPU backend, and the oracle that later backends are compared with. Weights stay in the type of their file; each
//! instruction set runs the same kernels (`crate::raw`), and each output has one order of summation.
//!
//! [`Precision::Exact`] computes with f32 inputs throughout. [`Precision::Native`], the default, rounds inputs to what the weights
//! are made for: bf16 for bf16 weights, bytes for quantised ones (with a scale for each 32 values, or one for 256 and powers of two below it
//! where the weights have units of 256 and the processor no tiles); and caches K and V as bf16, with which
//! tiles and AVX-512 multiply Q and the weights of the softmax in bf16.

mod attention;
mod dense;
mod dots;
mod inputs;
mod isa;
mod kernels;
mod kv;
mod memory;
mod output;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod panels;
mod pool;
mod quant;
mod quantised;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::sync::Arc;

use super::{AttentionSeq, AttentionUnit, Backend, HeadShape, KvSize, OutOfMemory, Part, Preparer, WeightShape};
use crate::raw::{Op, Simd};
use crate::waits::Tids;
use crate::weights::{Bytes, RawWeight, WeightType, decode_row};
use attention::AttentionOp;
use inputs::InputForms;
pub use isa::Isa;
use kernels::{RmsNormOp, RotateOp, silu};
pub use kv::KvType;
use kv::{KvLayout, LayerKv, StoreOp};
use output::Output;
use panels::{PanelKind, Panels};
use pool::Pool;

/// A row-major f32 matrix in main memory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) values: Vec<f32>,
}

impl Matrix {
    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..(row + 1) * self.cols]
    }

    /// Makes it `rows × cols`; what its values are does not matter from now on.
    fn resize(&mut self, rows: usize, cols: usize) {
        (self.rows, self.cols) = (rows, cols);
        if self.values.capacity() < rows * cols {
            memory::give(std::mem::replace(&mut self.values, memory::take(rows * cols)));
        }
        self.values.resize(rows * cols, 0.0);
    }
}

impl Drop for Matrix {
    fn drop(&mut self) {
        memory::give(std::mem::take(&mut self.values));
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

impl Weight {
    /// Outputs and inputs.
    fn shape(&self) -> (usize, usize) {
        match self {
            Self::Dense(raw) => (raw.rows, raw.cols),
            Self::Panels(panels) => (panels.rows, panels.cols),
        }
    }
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
    /// What the weights are made for, where the instructions are.
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

    fn kv_type(&self) -> KvType {
        match self.precision {
            Precision::Exact => KvType::F32,
            Precision::Native => KvType::Bf16,
        }
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
    type Scratch = InputForms;

    fn helpers(&self) -> Tids {
        self.pool.tids()
    }

    fn upload(&self, rows: usize, cols: usize, values: Vec<f32>) -> Matrix {
        debug_assert_eq!(values.len(), rows * cols);
        Matrix { rows, cols, values }
    }

    fn download(&self, mut x: Matrix) -> Vec<f32> {
        std::mem::take(&mut x.values)
    }

    fn weight(&self, raw: RawWeight) -> Weight {
        match PanelKind::of(raw.kind) {
            None => Weight::Dense(raw),
            // the oracle pays in memory: inputs that are not rounded need weights that are not in bytes
            Some(_) if self.precision == Precision::Exact => Weight::Dense(raw.decoded()),
            Some(_) => {
                let panels = Panels::pack(&raw, &self.pool, &mut || ());
                panels.map_or_else(|| Weight::Dense(raw.decoded()), Weight::Panels)
            }
        }
    }

    fn preparer(&self) -> Option<&dyn Preparer> {
        Some(self)
    }

    fn prepared(&self, shape: WeightShape, bytes: Bytes, _part: &Part) -> Option<Weight> {
        let kind = PanelKind::of(shape.kind)?;
        Panels::new((shape.rows, shape.cols), kind, bytes).map(Weight::Panels)
    }

    fn kv_bytes(&self, size: KvSize, heads: HeadShape) -> Option<u64> {
        let layout = KvLayout::new(self.kv_type(), heads, size.block_size);
        Some(u64::try_from(kv::bytes(&layout, size)).unwrap_or(u64::MAX))
    }

    fn kv_cache(&self, size: KvSize, heads: HeadShape) -> Result<Kv, OutOfMemory> {
        let layout = KvLayout::new(self.kv_type(), heads, size.block_size);
        Ok(Kv { layout, layers: kv::layers(&layout, size, &self.pool)? })
    }

    fn embed_into(&self, table: &Weight, tokens: &mut dyn Iterator<Item = u32>, out: &mut Matrix) {
        let (tokens, cols) = (tokens.collect::<Vec<_>>(), table.shape().1);
        out.resize(tokens.len(), cols);
        self.each_row(&mut out.values, cols, |row, place| match table {
            Weight::Dense(raw) => place.copy_from_slice(&decode_row(raw.kind, raw.row(tokens[row] as usize))),
            Weight::Panels(panels) => panels.read_row(tokens[row] as usize, place),
        });
    }

    fn rms_norm_over(&self, x: &mut Matrix, weight: &Matrix, eps: f32) {
        self.each_row(&mut x.values, weight.values.len(), |_, group| {
            self.isa.run(RmsNormOp { group, weight: &weight.values, eps });
        });
    }

    fn linear_into(
        &self,
        (x, same): (&Matrix, bool),
        weight: &Weight,
        bias: Option<&Matrix>,
        (out, forms): (&mut Matrix, &mut InputForms),
    ) {
        if !same {
            forms.renew();
        }
        let outputs = weight.shape().0;
        let (on, cells) = ((self.isa, &*self.pool), Output::over(std::mem::take(out), x.rows, outputs));
        match (weight, self.precision) {
            (Weight::Panels(panels), _) => quant::multiply(on, (x, forms), panels, &cells),
            (Weight::Dense(raw), precision) => match (raw.kind, precision) {
                (WeightType::Bf16, Precision::Native) if self.isa.multiplies_bf16() => {
                    dense::multiply_bf16(on, (x, forms), raw, &cells);
                }
                // each pair of bf16 would cost more to take apart than to multiply
                (WeightType::Bf16, _) => dense::multiply::<dense::Bf16>(on, forms.f32_pairs(x), (raw, 0), &cells),
                (WeightType::F16, _) => dense::multiply::<dense::F16>(on, forms.f32_pairs(x), (raw, 0), &cells),
                _ => dense::multiply::<dense::F32>(on, forms.f32(x), (raw, 0), &cells),
            },
        }
        *out = cells.into_matrix();
        if let Some(bias) = bias {
            self.each_row(&mut out.values, outputs, |_, row| add_in_place(row, &bias.values));
        }
    }

    fn rope(&self, x: &mut Matrix, cos: &Matrix, sin: &Matrix) {
        let cols = x.cols;
        self.each_row(&mut x.values, cols, |row, heads| {
            self.isa.run(RotateOp { heads, cos: cos.row(row), sin: sin.row(row) });
        });
    }

    fn store_kv(&self, kv: &mut Kv, layer: usize, k: &Matrix, v: &Matrix, slots: &[usize]) {
        self.isa.run(StoreOp { layer: &mut kv.layers[layer], layout: kv.layout, k, v, slots });
    }

    fn attention_into(
        &self,
        q: &Matrix,
        (kv, layer): (&Kv, usize),
        (seqs, units): (&[AttentionSeq<'_>], &[AttentionUnit]),
        (heads, window): (HeadShape, Option<usize>),
        out: &mut Matrix,
    ) {
        let (layer, layout) = (&kv.layers[layer], kv.layout);
        let cells = Output::over(std::mem::take(out), q.rows, q.cols);
        self.pool.run(units.len(), attention::work(seqs, heads), |index| {
            let (unit, out) = (units[index], &cells);
            let seq = &seqs[unit.seq];
            attention::run(self.isa, AttentionOp { q, layer, layout, heads, window, unit, seq, out });
        });
        *out = cells.into_matrix();
    }

    fn rows(&self, x: &Matrix) -> Vec<Vec<f32>> {
        (0..x.rows).map(|row| x.row(row).to_vec()).collect()
    }

    fn copy(&self, x: &Matrix, out: &mut Matrix) {
        out.resize(x.rows, x.cols);
        out.values.copy_from_slice(&x.values);
    }

    fn silu_mul(&self, gate: &mut Matrix, up: &Matrix) {
        let cols = gate.cols;
        self.each_row(&mut gate.values, cols, |row, gate| self.isa.run(SiluOp { gate, up: up.row(row) }));
    }

    fn add(&self, x: &mut Matrix, y: &Matrix) {
        let cols = x.cols;
        self.each_row(&mut x.values, cols, |row, x| add_in_place(x, y.row(row)));
    }

    fn gather_into(&self, x: &Matrix, rows: &[usize], out: &mut Matrix) {
        out.resize(rows.len(), x.cols);
        let places = out.values.chunks_exact_mut(x.cols.max(1));
        places.zip(rows).for_each(|(place, row)| place.copy_from_slice(x.row(*row)));
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
        let panels = if self.prepares(raw.kind) { Panels::pack(raw, &self.pool, alive) } else { None };
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
