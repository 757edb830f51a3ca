//! What a device must be able to do for a decoder: about a dozen operations on matrices it owns. The model is written
//! against this trait and knows no device; `cpu` is the first implementation and the oracle of the others.
//! Shapes are the model's duty: it checks every weight at load and every batch before it calls in here.

pub mod cpu;
pub mod cuda;
mod peers;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use thiserror::Error;

pub use peers::{Peers, Watch};

use crate::sampling::Draw;
use crate::stuck::Stuck;
use crate::waits::Tids;
use crate::weights::{Bytes, RawWeight, WeightType};

/// A device is out of memory, in bytes that were asked for.
#[derive(Debug, Clone, Error)]
#[error("{needed_bytes} bytes are wanted at once: {reason}")]
pub struct OutOfMemory {
    pub needed_bytes: u64,
    pub reason: String,
}

/// Why a device did not do what it was asked for.
#[derive(Debug, Clone, Error)]
pub enum DeviceFault {
    /// It did not end in time, or failed for good: no later step can.
    #[error(transparent)]
    Stuck(#[from] Stuck),
    /// A smaller step may go well.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
}

/// What a device is told before a step.
#[derive(Debug, Clone, Default)]
pub struct StepStart {
    /// The step's exact shape as a number, where steps of that shape come again and again; else 0.
    pub shape: u64,
    /// How long the device may go without a layer that is done; `None`: for ever.
    pub allowed: Option<Duration>,
}

/// Q, K and V of the rows of a step; what is in K afterwards does not matter.
pub type QkvRows<'a, M> = (&'a mut M, &'a mut M, &'a M);

/// One sequence's rows of a step, as attention sees them.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSeq<'a> {
    /// How many rows of the step's matrices are its own; sequences follow one another without gaps.
    pub rows: usize,
    /// Position of its first row; row `i` attends to positions `since..=start_pos + i`.
    pub start_pos: usize,
    /// Positions before this one are seen by themselves alone.
    pub since: usize,
    /// Block ids of the whole sequence, in order.
    pub blocks: &'a [u32],
}

/// How heads share a row: Q has `heads` heads of `head_dim`, K and V have `kv_heads`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

/// Rows of a sequence that attention computes together, at most.
pub const ATTENTION_ROWS: usize = 8;

/// A part of attention's work: some rows of one sequence, over one KV head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionUnit {
    /// Which sequence of the step.
    pub seq: usize,
    /// The first of its rows, counted in the step and in the sequence's own rows.
    pub first_row: usize,
    pub at: usize,
    pub rows: usize,
    pub kv_head: usize,
}

/// All parts of a step whose sequences have so many rows each.
pub fn attention_units(rows_of_seqs: impl Iterator<Item = usize>, heads: HeadShape) -> Vec<AttentionUnit> {
    let (mut units, mut first) = (Vec::new(), 0);
    for (seq, len) in rows_of_seqs.enumerate() {
        for at in (0..len).step_by(ATTENTION_ROWS) {
            let (first_row, rows) = (first + at, ATTENTION_ROWS.min(len - at));
            units.extend((0..heads.kv_heads).map(|kv_head| AttentionUnit { seq, first_row, at, rows, kv_head }));
        }
        first += len;
    }
    units
}

/// Size of a paged KV cache on a device.
#[derive(Debug, Clone, Copy)]
pub struct KvSize {
    pub layers: usize,
    pub num_blocks: usize,
    pub block_size: usize,
}

/// Which part of a weight this process holds, and so what its products are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// Some outputs; whoever takes them wants just those.
    Outputs(Range<usize>),
    /// Some inputs: products are to be summed over the ranks.
    Inputs(Range<usize>),
    /// Some outputs, of which every rank needs all; `widths` are the ranks' shares.
    Gathered { mine: Range<usize>, widths: Vec<usize> },
}

/// What a weight is, once it is cut to its part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightShape {
    pub rows: usize,
    pub cols: usize,
    pub kind: WeightType,
}

impl Part {
    /// The shape of this part of a weight of `whole` shape.
    pub fn of_shape(&self, whole: WeightShape) -> WeightShape {
        match self {
            Self::Whole => whole,
            Self::Outputs(mine) | Self::Gathered { mine, .. } => WeightShape { rows: mine.len(), ..whole },
            Self::Inputs(mine) => WeightShape { cols: mine.len(), ..whole },
        }
    }
}

/// What a device makes of weights when they are loaded, and needs to make but once (E5).
pub trait Preparer {
    /// Names the form that it makes; what bears another name is of no use to it.
    fn form(&self) -> String;

    /// Whether it makes anything of weights of this type.
    fn prepares(&self, kind: WeightType) -> bool;

    /// What it makes of a weight, for [`Backend::prepared`]; `None` where that is nothing. Calls `alive` on the way.
    fn prepare(&self, raw: &RawWeight, alive: &mut dyn FnMut()) -> Option<Bytes>;
}

/// Model-level operations. A `Matrix` is f32, row-major, a row a token. A `Weight` keeps the type of its file.
///
/// Every implementation keeps EP4: a row's result depends on that row and its own sequence alone, never on the rows
/// computed beside it, so each reduction has an order fixed by the shape of one row.
pub trait Backend: Send {
    type Matrix: Send + Default;
    /// `outputs × inputs`, as the device likes to read it.
    type Weight: Send;
    /// Paged K and V of all layers.
    type Kv: Send;
    /// What calls of a program keep from one to the next, so that they need not make it anew.
    type Scratch: Send + Default;

    /// Threads of this process that compute parts of its operations beside whoever calls them.
    fn helpers(&self) -> Tids {
        Tids::default()
    }

    /// Whether it computes elsewhere and waits for that, with deadlines of its own.
    fn waits(&self) -> bool {
        false
    }

    /// The fault S2 where it belongs: the device is given something that never ends, and all that comes later waits behind it. False: there is
    /// no device that could hang.
    fn hang(&self) -> bool {
        false
    }

    /// Steps that ran as one launch of a graph, so far.
    fn graphs_run(&self) -> u64 {
        0
    }

    /// Why nothing that it computes counts any more, until the step ends; `None`: all is well.
    fn failed(&self) -> Option<DeviceFault> {
        None
    }

    /// Joins the device with those of the other ranks, if it can: [`Self::sum_over_ranks`] and [`Self::gather_over_ranks`] go by that link from
    /// then on. Every rank calls it, once, when no rank is started anew any more.
    fn join(&self, _peers: &Arc<dyn Peers>) {}

    /// Sums `x` over the ranks, in the order of their numbers. False: there is no link.
    fn sum_over_ranks(&self, _x: &mut Self::Matrix) -> bool {
        false
    }

    /// Puts the ranks' columns side by side, `widths` of each. False: there is no link.
    fn gather_over_ranks(&self, _x: &mut Self::Matrix, _widths: &[usize]) -> bool {
        false
    }

    /// A step begins: all calls until [`Self::end_step`] are its own.
    fn begin_step(&self, _step: &StepStart) {}

    /// The calls of a layer are all made; `pulse` counts it when they are done.
    fn end_layer(&self, pulse: &Arc<AtomicU64>) {
        pulse.fetch_add(1, Ordering::Relaxed);
    }

    /// The step's calls are all made: waits until they are done. What the calls gave counts only if this is well.
    ///
    /// # Errors
    /// [`DeviceFault`], the first of the step; a device that fails leaves out what comes after and gives zeros.
    fn end_step(&self) -> Result<(), DeviceFault> {
        Ok(())
    }

    /// Moves `rows × cols` values to the device.
    fn upload(&self, rows: usize, cols: usize, values: Vec<f32>) -> Self::Matrix;

    /// Values of a matrix, row after row.
    fn download(&self, x: Self::Matrix) -> Vec<f32>;

    /// Takes over a weight of the model's files.
    fn weight(&self, raw: RawWeight) -> Self::Weight;

    /// Takes over a part of a weight, already cut to it. Only a backend of several ranks has parts.
    fn weight_part(&self, raw: RawWeight, _part: &Part) -> Self::Weight {
        self.weight(raw)
    }

    /// Who prepares weights for this device, if they are prepared.
    fn preparer(&self) -> Option<&dyn Preparer> {
        None
    }

    /// Takes over a part of a weight as [`Preparer::prepare`] made it; `None` where the bytes are not of this shape.
    fn prepared(&self, _shape: WeightShape, _bytes: Bytes, _part: &Part) -> Option<Self::Weight> {
        None
    }

    /// Bytes of this machine's memory that such a cache takes; `None`: it lies elsewhere.
    fn kv_bytes(&self, _size: KvSize, _heads: HeadShape) -> Option<u64> {
        None
    }

    /// A cache for all layers.
    ///
    /// # Errors
    /// [`OutOfMemory`] when it does not fit.
    fn kv_cache(&self, size: KvSize, heads: HeadShape) -> Result<Self::Kv, OutOfMemory>;

    /// Rows of `table`, by token id.
    fn embed(&self, table: &Self::Weight, tokens: &[u32]) -> Self::Matrix {
        let mut out = Self::Matrix::default();
        self.embed_into(table, &mut tokens.iter().copied(), &mut out);
        out
    }

    /// Root-mean-square norm of each group of `weight`'s width (a row, or one head of a row), times `weight`.
    fn rms_norm(&self, x: &Self::Matrix, weight: &Self::Matrix, eps: f32) -> Self::Matrix {
        let mut out = Self::Matrix::default();
        self.copy(x, &mut out);
        self.rms_norm_over(&mut out, weight, eps);
        out
    }

    /// `x · weightᵀ + bias`; `weight` is `outputs × inputs`.
    fn linear(&self, x: &Self::Matrix, weight: &Self::Weight, bias: Option<&Self::Matrix>) -> Self::Matrix {
        let mut out = Self::Matrix::default();
        self.linear_into((x, false), weight, bias, (&mut out, &mut Self::Scratch::default()));
        out
    }

    /// Turns the pairs `(i, i + head_dim / 2)` of each head by the row's angles; `cos` and `sin` have `head_dim / 2` columns.
    fn rope(&self, x: &mut Self::Matrix, cos: &Self::Matrix, sin: &Self::Matrix);

    /// Writes row `i` of `k` and `v` to slot `slots[i]` of `layer`.
    fn store_kv(&self, kv: &mut Self::Kv, layer: usize, k: &Self::Matrix, v: &Self::Matrix, slots: &[usize]);

    /// What is between the products and attention: norms of the heads of Q and K (weights of both, and epsilon) where there are any,
    /// rotation of both, and K and V to their slots of a layer.
    fn place_qkv(
        &self,
        (q, k, v): QkvRows<'_, Self::Matrix>,
        norms: Option<(&Self::Matrix, &Self::Matrix, f32)>,
        (cos, sin): (&Self::Matrix, &Self::Matrix),
        (kv, layer): (&mut Self::Kv, usize),
        slots: &[usize],
    ) {
        if let Some((q_norm, k_norm, eps)) = norms {
            self.rms_norm_over(q, q_norm, eps);
            self.rms_norm_over(k, k_norm, eps);
        }
        self.rope(q, cos, sin);
        self.rope(k, cos, sin);
        self.store_kv(kv, layer, k, v, slots);
    }

    /// Causal attention of every row of `q` over its sequence's blocks in `layer`; a row sees the last `window` positions, its own
    /// among them, or all.
    fn attention(
        &self,
        q: &Self::Matrix,
        kv: (&Self::Kv, usize),
        seqs: &[AttentionSeq<'_>],
        heads: HeadShape,
        window: Option<usize>,
    ) -> Self::Matrix {
        let units = attention_units(seqs.iter().map(|seq| seq.rows), heads);
        let mut out = Self::Matrix::default();
        self.attention_into(q, kv, (seqs, &units), (heads, window), &mut out);
        out
    }

    /// Can it choose tokens by itself ([`Self::draw`])?
    fn draws(&self) -> bool {
        false
    }

    /// A token of each row of logits, drawn as told, where it can; of a row without a finite value there is none.
    fn draw(&self, _logits: &Self::Matrix, _draws: &[Draw]) -> Option<Vec<Option<u32>>> {
        None
    }

    // The kernels, on matrices that are there already. What is in them before does not matter.

    /// The rows of a matrix, that stays as it is.
    fn rows(&self, x: &Self::Matrix) -> Vec<Vec<f32>>;

    /// [`Self::embed`] into `out`.
    fn embed_into(&self, table: &Self::Weight, tokens: &mut dyn Iterator<Item = u32>, out: &mut Self::Matrix);

    /// `out = x`.
    fn copy(&self, x: &Self::Matrix, out: &mut Self::Matrix);

    /// [`Self::rms_norm`] in place.
    fn rms_norm_over(&self, x: &mut Self::Matrix, weight: &Self::Matrix, eps: f32);

    /// [`Self::linear`] into `out`. `same`: the input is that of the call before, with the same scratch.
    fn linear_into(
        &self,
        input: (&Self::Matrix, bool),
        weight: &Self::Weight,
        bias: Option<&Self::Matrix>,
        out: (&mut Self::Matrix, &mut Self::Scratch),
    );

    /// [`Self::attention`] into `out`, cut into `units` already.
    fn attention_into(
        &self,
        q: &Self::Matrix,
        kv: (&Self::Kv, usize),
        seqs: (&[AttentionSeq<'_>], &[AttentionUnit]),
        heads: (HeadShape, Option<usize>),
        out: &mut Self::Matrix,
    );

    /// [`Self::gather_rows`] into `out`.
    fn gather_into(&self, x: &Self::Matrix, rows: &[usize], out: &mut Self::Matrix);

    /// `silu(gate) × up`, written over `gate`.
    fn silu_mul(&self, gate: &mut Self::Matrix, up: &Self::Matrix);

    /// `x += y`.
    fn add(&self, x: &mut Self::Matrix, y: &Self::Matrix);

    /// The named rows, in that order.
    fn gather_rows(&self, x: &Self::Matrix, rows: &[usize]) -> Self::Matrix {
        let mut out = Self::Matrix::default();
        self.gather_into(x, rows, &mut out);
        out
    }

    /// `x[rows[i]] += weights[i] · y[i]`, in the order of `i`.
    fn scatter_add(&self, x: &mut Self::Matrix, rows: &[usize], y: &Self::Matrix, weights: &[f32]);
}
