//! `x · weightᵀ` for repacked weights and inputs quantised to bytes: whole numbers inside a block of 32, f32 between blocks,
//! in the order of the blocks whatever the tile (EP4).

use super::dots::{Kind, Q4K, Q6K, Q8};
use super::inputs::InputForms;
use super::output::Output;
use super::panels::{BLOCK, LANES, PanelKind, Panels};
use super::pool::Pool;
#[cfg(target_arch = "x86_64")]
use super::tiles::{self, TileOp};
use super::{Isa, Matrix};
use crate::raw::{Op, Simd};

/// Input rows as bytes: each block of 32 has its own scale.
#[derive(Debug, Default)]
pub struct QuantInputs {
    pub rows: usize,
    blocks_per_row: usize,
    blocks: Vec<QuantBlock>,
}

/// 32 inputs.
#[derive(Debug, Clone, Copy, Default)]
pub struct QuantBlock {
    /// Four bytes each.
    pub groups: [i32; 8],
    pub scale: f32,
    /// Minus scale times sum: what an offset of the weights is multiplied with.
    pub offset: f32,
    /// What sums begin with where weights are stored 128 too high (Q8_0), and, of each half, 32 too high (Q6_K).
    pub too_high_128: i32,
    pub too_high_32: [i32; 2],
}

/// `x · weightᵀ` into `out`, by tiles where there are some and they are worth it.
pub fn multiply((isa, pool): (Isa, &Pool), (x, forms): (&Matrix, &mut InputForms), weight: &Panels, out: &Output) {
    let (panels, work) = (weight.rows.div_ceil(LANES), weight.rows * weight.cols * x.rows);
    #[cfg(target_arch = "x86_64")]
    if let Some(amx) = isa.tiles().filter(|_| x.rows >= tiles::ROWS_MIN) {
        let x = forms.tiles((isa, pool), x);
        pool.split(panels, 1, work, |panels| isa.run(TileOp { amx, x, weight, panels, out }));
        return;
    }
    let x = forms.quantised((isa, pool), x);
    // processors with tiles were measured the nearer way, and not yet this one
    #[cfg(target_arch = "x86_64")]
    let far = isa.tiles().is_none();
    #[cfg(not(target_arch = "x86_64"))]
    let far = false;
    pool.split(panels, 1, work, |panels| isa.run(QuantOp { x, weight, panels, far, out }));
}

impl QuantInputs {
    /// Takes in other rows, of whole blocks. What is no number becomes one: the scale carries it on.
    pub fn take(&mut self, (isa, pool): (Isa, &Pool), x: &Matrix) {
        (self.rows, self.blocks_per_row) = (x.rows, x.cols / BLOCK);
        self.blocks.resize(x.rows * self.blocks_per_row, QuantBlock::default());
        pool.each_chunk(&mut self.blocks, self.blocks_per_row, x.values.len() * 8, |row, blocks| {
            isa.run(QuantiseOp { x: x.row(row), blocks });
        });
    }

    #[inline(always)]
    fn row(&self, row: usize) -> &[QuantBlock] {
        &self.blocks[row * self.blocks_per_row..(row + 1) * self.blocks_per_row]
    }
}

/// Quantises one row.
struct QuantiseOp<'a> {
    x: &'a [f32],
    blocks: &'a mut [QuantBlock],
}

impl Op for QuantiseOp<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (block, x) in self.blocks.iter_mut().zip(self.x.as_chunks().0) {
            *block = quantise(s, x);
        }
    }
}

/// Bytes and scale of 32 inputs.
#[inline(always)]
pub fn quantise<S: Simd>(s: S, x: &[f32; BLOCK]) -> QuantBlock {
    let halves = x.as_chunks().0;
    let (a, b) = (s.load(&halves[0]), s.load(&halves[1]));
    let (zero, minus) = (s.splat(0.0), s.splat(-1.0));
    let mut sizes = [0.0; LANES];
    s.store(s.max(s.max(a, s.mul(a, minus)), s.max(b, s.mul(b, minus))), &mut sizes);
    let largest = largest(sizes);
    // a number that is none is larger than nothing: it is carried in the scale, or a broken row would look whole
    let broken = s.fold(s.fma(a, zero, s.mul(b, zero))).is_nan();
    let inverse = if largest > 0.0 && !broken { 127.0 / largest } else { 0.0 };
    let inverse = if inverse.is_finite() { inverse } else { 0.0 };
    let mut bytes = [0i8; BLOCK];
    for (byte, x) in bytes.iter_mut().zip(x) {
        // adding 1.5 · 2^23 leaves the nearest whole number in the low bits
        *byte = if inverse == 0.0 { 0 } else { (x * inverse + 12_582_912.0).to_bits() as i8 };
    }
    let mut block = QuantBlock { scale: if broken { f32::NAN } else { largest / 127.0 }, ..QuantBlock::default() };
    for (group, bytes) in block.groups.iter_mut().zip(bytes.as_chunks::<4>().0) {
        let [a, b, c, d] = *bytes;
        *group = i32::from_le_bytes([a as u8, b as u8, c as u8, d as u8]);
    }
    let mut sums = [0i32; BLOCK / LANES];
    for (sum, bytes) in sums.iter_mut().zip(bytes.as_chunks::<LANES>().0) {
        for byte in bytes {
            *sum += i32::from(*byte);
        }
    }
    let [low, high] = sums;
    block.offset = -block.scale * (low + high) as f32;
    (block.too_high_128, block.too_high_32) = (-128 * (low + high), [-32 * low, -32 * high]);
    block
}

/// The largest of sixteen numbers, by halves.
#[inline(always)]
fn largest(mut x: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            x[lane] = if x[lane] > x[lane + half] { x[lane] } else { x[lane + half] };
        }
        half /= 2;
    }
    x[0]
}

/// Some panels of a multiplication, for all inputs.
pub struct QuantOp<'a> {
    pub x: &'a QuantInputs,
    pub weight: &'a Panels,
    pub panels: std::ops::Range<usize>,
    /// Weights are asked for in the second-level cache.
    pub far: bool,
    pub out: &'a Output,
}

impl Op for QuantOp<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.weight.kind {
            PanelKind::Q8 => self.kind::<S, Q8>(s),
            PanelKind::Q4K => self.kind::<S, Q4K>(s),
            PanelKind::Q6K => self.kind::<S, Q6K>(s),
        }
    }
}

impl QuantOp<'_> {
    #[inline(always)]
    fn kind<S: Simd, K: Kind>(&self, s: S) {
        for panel in self.panels.clone() {
            if S::WIDE && self.far {
                self.panel::<S, K, 8, true>(s, panel);
            } else if S::WIDE {
                self.panel::<S, K, 8, false>(s, panel);
            } else {
                self.panel::<S, K, 4, false>(s, panel);
            }
        }
    }

    #[inline(always)]
    fn panel<S: Simd, K: Kind, const M: usize, const F: bool>(&self, s: S, panel: usize) {
        let mut token = 0;
        while token + M <= self.x.rows {
            self.block::<S, K, M, F>(s, panel, token);
            token += M;
        }
        if S::WIDE && token + 4 <= self.x.rows {
            self.block::<S, K, 4, F>(s, panel, token);
            token += 4;
        }
        if token + 2 <= self.x.rows {
            self.block::<S, K, 2, F>(s, panel, token);
            token += 2;
        }
        while token < self.x.rows {
            self.block::<S, K, 1, F>(s, panel, token);
            token += 1;
        }
    }

    #[inline(always)]
    fn block<S: Simd, K: Kind, const M: usize, const F: bool>(&self, s: S, panel: usize, token: usize) {
        let x: [&[QuantBlock]; M] = std::array::from_fn(|m| self.x.row(token + m));
        let (lines, scales) = self.weight.panel(panel);
        let rows = LANES.min(self.weight.rows - panel * LANES);
        for (m, sums) in K::dots::<S, M, F>(s, x, lines, scales).iter().enumerate() {
            self.out.set_lanes(s, (token + m, panel * LANES), *sums, rows);
        }
    }
}
