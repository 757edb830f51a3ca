//! The CUDA backend: the kernels of `kernels/`, launched in order on one stream of one device, over a driver behind a trait (`driver`). Values
//! are f32, weights keep the type of their file, K and V are bf16 or f32; sums have one order, so that a row's result is its own (EP4).
//!
//! No wait without a deadline (E1): the one wait is `Device::wait` (`wait`). A step's launches are replayed as a graph where a graph of
//! exactly those launches exists, and made one by one otherwise (E2, `graphs`). Memory is one budget (`arena`): what does not fit is an
//! error that says so.
//!
//! With the feature `cuda` there is a driver for NVIDIA's devices (`nvidia`); without it opening one is an error.

#[cfg(not(feature = "cuda"))]
mod absent;
mod arena;
mod capture;
mod device;
pub mod driver;
mod format;
mod fuse;
mod graphs;
pub mod image;
mod items;
mod launches;
mod link;
mod memory;
pub mod nccl;
#[cfg(feature = "cuda")]
mod nvidia;
pub mod open;
mod products;
pub mod proof;
mod sampling;
mod staging;
mod wait;
mod warpgroups;
mod workplace;

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::{
    AttentionSeq, AttentionUnit, Backend, DeviceFault, HeadShape, KvSize, OutOfMemory, Peers, QkvRows, StepStart,
};
use crate::sampling::Draw;
use crate::weights::RawWeight;
use device::Device;
use driver::{Driver, DriverError};
pub use format::{Format, Weight, of_e4m3, to_e4m3};
pub use graphs::GraphCounts;
use items::{HEAD_DIM_MAX, Items};
pub use memory::Matrix;
use memory::Slice;
pub use warpgroups::Variant;

/// How cached K and V are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvFormat {
    F32,
    #[default]
    Bf16,
}

/// K and V of every layer, each `[block][kv_head][slot][head_dim]`.
#[derive(Debug)]
pub struct Kv {
    format: KvFormat,
    heads: HeadShape,
    block_size: usize,
    layers: Vec<(Slice, Slice)>,
}

/// How a device is used.
#[derive(Debug, Clone, Copy, Default)]
pub struct CudaOptions {
    pub kv: KvFormat,
    /// Dense weights are rounded to e4m3, with a scale for each row.
    pub weights_in_e4m3: bool,
    /// What the KV cache leaves of the budget, for the matrices of steps.
    pub step_bytes: u64,
    /// The kernel of `kernels/wgmma.cu` that products of many rows go by, where they go by warpgroups; `None`: the fastest.
    pub many_rows: Option<&'static Variant>,
    /// The ranks of a model are not to join their devices: values go through the machine's memory.
    pub stays_alone: bool,
}

/// One device. It is used by one thread at a time.
pub struct CudaBackend<D: Driver> {
    device: RefCell<Device<D>>,
    options: CudaOptions,
}

impl<D: Driver> CudaBackend<D> {
    /// Takes `budget_bytes` of the device's memory, all that it will ever use.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(driver: D, budget_bytes: u64, options: CudaOptions) -> Result<Self, DriverError> {
        let backend = Self { device: RefCell::new(Device::new(driver, budget_bytes)?), options };
        backend.set_many_rows(options.many_rows);
        Ok(backend)
    }

    /// What became of steps and graphs.
    pub fn graph_counts(&self) -> GraphCounts {
        self.device.borrow().graph_counts()
    }

    /// Whether products of many rows go by warpgroups.
    pub fn has_warpgroups(&self) -> bool {
        self.device.borrow().has_warpgroups()
    }

    /// From now on they do not.
    fn forgo_warpgroups(&self) {
        self.device.borrow_mut().forgo_warpgroups();
    }

    /// By which kernel of `kernels/wgmma.cu` they go; `None`: by the fastest.
    fn set_many_rows(&self, variant: Option<&'static Variant>) {
        self.device.borrow_mut().set_many_rows(variant);
    }

    /// Bytes of the budget that nobody has.
    pub fn free_bytes(&self) -> u64 {
        self.device.borrow_mut().free_bytes()
    }

    /// The fault S2 on the device itself: a kernel of so many blocks that never ends (with `ends`: one that does at once). Whatever comes after
    /// it waits.
    pub fn spin(&self, blocks: u32, ends: bool) {
        self.run(|device| device.spin(blocks, u32::from(ends)));
    }

    fn run<T>(&self, f: impl FnOnce(&mut Device<D>) -> Result<T, DeviceFault>) -> Option<T> {
        self.device.borrow_mut().run(f)
    }

    /// A piece for each of K and V of each layer, if all of that and the steps' share fit.
    fn kv_layers(&self, size: KvSize, layer_bytes: u128) -> Result<Vec<(Slice, Slice)>, OutOfMemory> {
        let mut device = self.device.borrow_mut();
        let (needed, free) = (2 * layer_bytes * size.layers as u128, device.free_bytes());
        let for_kv = free.saturating_sub(self.options.step_bytes);
        let refuse = |fit: u128| OutOfMemory {
            needed_bytes: u64::try_from(needed).unwrap_or(u64::MAX),
            reason: format!(
                "{free} bytes of the device's budget are free and {} are kept for steps: at most {fit} blocks fit",
                self.options.step_bytes
            ),
        };
        let fit = u128::from(for_kv).saturating_mul(size.num_blocks as u128).checked_div(needed).unwrap_or(0);
        if needed > u128::from(for_kv) {
            return Err(refuse(fit));
        }
        let piece = |device: &mut Device<D>| device.take(layer_bytes as u64).map_err(|_| refuse(fit));
        (0..size.layers).map(|_| Ok((piece(&mut device)?, piece(&mut device)?))).collect()
    }
}

impl<D: Driver> Backend for CudaBackend<D> {
    type Matrix = Matrix;
    type Weight = Weight;
    type Kv = Kv;
    type Scratch = ();

    fn waits(&self) -> bool {
        true
    }

    fn hang(&self) -> bool {
        self.spin(1, false);
        true
    }

    fn graphs_run(&self) -> u64 {
        self.graph_counts().replayed
    }

    fn draws(&self) -> bool {
        true
    }

    fn draw(&self, logits: &Matrix, draws: &[Draw]) -> Option<Vec<Option<u32>>> {
        Some(self.sample(logits, draws))
    }

    fn failed(&self) -> Option<DeviceFault> {
        self.device.borrow().fault()
    }

    fn join(&self, peers: &Arc<dyn Peers>) {
        if !self.options.stays_alone {
            self.device.borrow_mut().join(peers);
        }
    }

    fn sum_over_ranks(&self, x: &mut Matrix) -> bool {
        // a device that failed has failed, by whichever way
        self.run(|device| device.sum_over_ranks(x)).unwrap_or(true)
    }

    fn gather_over_ranks(&self, x: &mut Matrix, widths: &[usize]) -> bool {
        self.run(|device| device.gather_over_ranks(x, widths)).unwrap_or(true)
    }

    fn begin_step(&self, step: &StepStart) {
        self.device.borrow_mut().begin(step);
    }

    fn end_layer(&self, pulse: &Arc<AtomicU64>) {
        self.run(|device| device.mark_layer(pulse));
    }

    fn end_step(&self) -> Result<(), DeviceFault> {
        self.device.borrow_mut().end()
    }

    fn upload(&self, rows: usize, cols: usize, values: Vec<f32>) -> Matrix {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let place = self.run(|device| device.put_new(&bytes));
        Matrix { rows, cols, place }
    }

    fn download(&self, x: Matrix) -> Vec<f32> {
        self.rows(&x).concat()
    }

    fn weight(&self, raw: RawWeight) -> Weight {
        let (format, cols) = (Format::of(raw.kind), raw.cols);
        let dense = matches!(format, Format::F32 | Format::F16 | Format::Bf16);
        if dense && self.options.weights_in_e4m3 {
            let place = self.run(|device| device.put_new(&to_e4m3(&raw)));
            return Weight { rows: raw.rows, cols, format: Format::E4m3, place };
        }
        let place = self.run(|device| device.put_new(raw.bytes()));
        Weight { rows: raw.rows, cols, format, place }
    }

    fn kv_cache(&self, size: KvSize, heads: HeadShape) -> Result<Kv, OutOfMemory> {
        let value_bytes = if self.options.kv == KvFormat::F32 { 4 } else { 2 };
        let values = size.num_blocks as u128 * size.block_size as u128 * (heads.kv_heads * heads.head_dim) as u128;
        let lines = size.num_blocks as u128 * size.block_size as u128 * heads.kv_heads as u128;
        if heads.head_dim > HEAD_DIM_MAX || lines > u128::from(u32::MAX) {
            let reason = format!("heads wider than {HEAD_DIM_MAX}, or more than 2^32 of them, are not for this device");
            return Err(OutOfMemory { needed_bytes: u64::MAX, reason });
        }
        let layers = self.kv_layers(size, values * value_bytes)?;
        Ok(Kv { format: self.options.kv, heads, block_size: size.block_size, layers })
    }

    fn rms_norm(&self, x: &Matrix, weight: &Matrix, eps: f32) -> Matrix {
        let mut out = Matrix::default();
        self.run(|device| device.rms_norm_to(&mut out, x, weight, eps));
        out
    }

    fn rope(&self, x: &mut Matrix, cos: &Matrix, sin: &Matrix) {
        self.run(|device| device.rope(x, cos, sin));
    }

    fn store_kv(&self, kv: &mut Kv, layer: usize, k: &Matrix, v: &Matrix, slots: &[usize]) {
        self.run(|device| device.store_kv((kv, layer), k, v, slots));
    }

    fn place_qkv(
        &self,
        (q, k, v): QkvRows<'_, Matrix>,
        norms: Option<(&Matrix, &Matrix, f32)>,
        (cos, sin): (&Matrix, &Matrix),
        kv: (&mut Kv, usize),
        slots: &[usize],
    ) {
        self.run(|device| device.place(([q, k], v), norms, (cos, sin), (kv.0, kv.1), slots));
    }

    fn rows(&self, x: &Matrix) -> Vec<Vec<f32>> {
        let mut rows: Vec<Vec<f32>> = (0..x.rows).map(|_| vec![0.0; x.cols]).collect();
        if x.place.is_some() {
            let parts = rows.iter_mut().map(|row| bytemuck::cast_slice_mut(row));
            self.run(|device| device.get(x.at(), x.len() * 4, parts));
        }
        rows
    }

    fn embed_into(&self, table: &Weight, tokens: &mut dyn Iterator<Item = u32>, out: &mut Matrix) {
        self.run(|device| device.embed(table, tokens, out));
    }

    fn copy(&self, x: &Matrix, out: &mut Matrix) {
        self.run(|device| device.copy(x, out));
    }

    fn rms_norm_over(&self, x: &mut Matrix, weight: &Matrix, eps: f32) {
        self.run(|device| device.rms_norm(x, weight, eps));
    }

    fn linear_into(
        &self,
        x: (&Matrix, bool),
        weight: &Weight,
        bias: Option<&Matrix>,
        (out, _scratch): (&mut Matrix, &mut ()),
    ) {
        self.run(|device| device.matmul(x, weight, bias, out));
    }

    fn attention_into(
        &self,
        q: &Matrix,
        (kv, layer): (&Kv, usize),
        (seqs, units): (&[AttentionSeq<'_>], &[AttentionUnit]),
        (heads, window): (HeadShape, Option<usize>),
        out: &mut Matrix,
    ) {
        let items = Items::new(seqs, units, heads, kv.format);
        self.run(|device| device.attention(q, (kv, layer), &items, (heads, window), out));
    }

    fn gather_into(&self, x: &Matrix, rows: &[usize], out: &mut Matrix) {
        self.run(|device| device.gather(x, rows, out));
    }

    fn silu_mul(&self, gate: &mut Matrix, up: &Matrix) {
        self.run(|device| device.silu_mul(gate, up));
    }

    fn add(&self, x: &mut Matrix, y: &Matrix) {
        self.run(|device| device.add(x, y));
    }

    fn scatter_add(&self, x: &mut Matrix, rows: &[usize], y: &Matrix, weights: &[f32]) {
        self.run(|device| device.scatter_add(x, rows, y, weights));
    }
}
