//! `x · weightᵀ` for repacked weights and inputs quantised to bytes: whole numbers inside a block of 32, f32 between blocks,
//! in the order of the blocks whatever the tile (EP4).

use super::inputs::InputForms;
use super::output::Output;
use super::panels::{BLOCK, LANES, Line, PanelKind, Panels};
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
    too_high_128: i32,
    too_high_32: [i32; 2],
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
            let mut values = [0.0; LANES];
            s.store(*sums, &mut values);
            self.out.set_run(token + m, panel * LANES, &values[..rows]);
        }
    }
}

/// Where weights are asked for, and how many bytes ahead of the arithmetic: about what memory delivers while one answer is on its way.
#[derive(Clone, Copy)]
enum Ask {
    Near(usize),
    /// In the second-level cache.
    Far(usize),
}

const NEAR: Ask = Ask::Near(4 << 10);

/// A line of a panel, for `M` inputs. With few of them a product is as fast as its weights come, and the processor's own foresight ends with
/// each page. `F`: far, for processors whose first-level cache has few requests under way at a time.
#[inline(always)]
fn read<S: Simd, K: Kind, const M: usize, const F: bool>(s: S, line: &Line) -> S::B {
    let ask = if !F {
        NEAR
    } else if M <= 2 {
        K::OF_FEW
    } else {
        Ask::Far(8 << 10)
    };
    match ask {
        Ask::Near(ahead) => s.prefetch(line, ahead),
        Ask::Far(ahead) => s.prefetch_far(line, ahead),
    }
    s.load_bytes(line)
}

/// The arithmetic of one type of panel.
trait Kind {
    /// How weights are asked for where one input goes by, or two.
    const OF_FEW: Ask;
    fn dots<S: Simd, const M: usize, const F: bool>(
        s: S,
        x: [&[QuantBlock]; M],
        lines: &[Line],
        scales: &[u8],
    ) -> [S::V; M];
}

struct Q8;
struct Q4K;
struct Q6K;

impl Kind for Q8 {
    const OF_FEW: Ask = Ask::Far(2 << 10);

    #[inline(always)]
    fn dots<S: Simd, const M: usize, const F: bool>(
        s: S,
        x: [&[QuantBlock]; M],
        lines: &[Line],
        scales: &[u8],
    ) -> [S::V; M] {
        let mut acc = [s.splat(0.0); M];
        let blocks = lines.as_chunks::<8>().0.iter().zip(scales.as_chunks::<32>().0).enumerate();
        for (b, (lines, scales)) in blocks {
            // one input: what spares sums would only be more work on each weight; both ways give the same whole numbers
            let mut sums: [S::I; M] = std::array::from_fn(|m| {
                let too_high = x[m][b].too_high_128;
                if M == 1 { s.splat_i32(too_high) } else { s.begin_high(too_high) }
            });
            for (g, line) in lines.iter().enumerate() {
                let w = read::<S, Self, M, F>(s, line);
                for m in 0..M {
                    let x = x[m][b].groups[g];
                    sums[m] = if M == 1 { s.dot_u8_i8(sums[m], w, x) } else { s.dot_high(sums[m], w, x) };
                }
            }
            let scale = s.load_f16(scales);
            for m in 0..M {
                acc[m] = s.fma(s.to_f32(sums[m]), s.mul(scale, s.splat(x[m][b].scale)), acc[m]);
            }
        }
        acc
    }
}

impl Kind for Q4K {
    const OF_FEW: Ask = NEAR;

    #[inline(always)]
    fn dots<S: Simd, const M: usize, const F: bool>(
        s: S,
        x: [&[QuantBlock]; M],
        lines: &[Line],
        scales: &[u8],
    ) -> [S::V; M] {
        let mut acc = [s.splat(0.0); M];
        let units = lines.as_chunks::<32>().0.iter().zip(scales.as_chunks::<320>().0).enumerate();
        for (unit, (lines, scales)) in units {
            let (halves, per_block) = (scales.as_chunks::<32>().0, scales[64..].as_chunks::<16>().0);
            let (d, d_offset) = (s.load_f16(&halves[0]), s.load_f16(&halves[1]));
            for (i, lines) in lines.as_chunks::<4>().0.iter().enumerate() {
                let b = unit * 8 + i;
                let none = s.splat_i32(0);
                let mut few = [s.begin_few(none); M];
                for (g, line) in lines.iter().enumerate() {
                    let both = read::<S, Self, M, F>(s, line);
                    let (low, high) = (s.low(both), s.high(both));
                    for m in 0..M {
                        few[m] = s.dot_few(few[m], low, x[m][b].groups[g]);
                        few[m] = s.dot_few(few[m], high, x[m][b].groups[g + 4]);
                    }
                }
                let scale = s.mul(d, s.load_u8(&per_block[2 * i]));
                let offset = s.mul(d_offset, s.load_u8(&per_block[2 * i + 1]));
                for m in 0..M {
                    let sums = s.to_f32(s.end_few(none, few[m]));
                    acc[m] = s.fma(sums, s.mul(scale, s.splat(x[m][b].scale)), acc[m]);
                    acc[m] = s.fma(offset, s.splat(x[m][b].offset), acc[m]);
                }
            }
        }
        acc
    }
}

impl Kind for Q6K {
    const OF_FEW: Ask = NEAR;

    #[inline(always)]
    fn dots<S: Simd, const M: usize, const F: bool>(
        s: S,
        x: [&[QuantBlock]; M],
        lines: &[Line],
        scales: &[u8],
    ) -> [S::V; M] {
        let mut acc = [s.splat(0.0); M];
        let units = lines.as_chunks::<48>().0.iter().zip(scales.as_chunks::<288>().0).enumerate();
        for (unit, (lines, scales)) in units {
            let (halves, per_half) = (scales.as_chunks::<32>().0, scales[32..].as_chunks::<16>().0);
            let d = s.load_f16(&halves[0]);
            for (i, lines) in lines.as_chunks::<6>().0.iter().enumerate() {
                let b = unit * 8 + i;
                for half in 0..2 {
                    let mut sums: [S::I; M] = std::array::from_fn(|m| s.splat_i32(x[m][b].too_high_32[half]));
                    let hi = read::<S, Self, M, F>(s, &lines[4 + half]);
                    for (pair, lines) in lines[..4].as_chunks::<2>().0.iter().enumerate() {
                        let w0 = six_bits::<S, M, F>(s, &lines[0], (hi, half), 2 * pair);
                        let w1 = six_bits::<S, M, F>(s, &lines[1], (hi, half), 2 * pair + 1);
                        let first = half * 4 + 2 * pair;
                        for m in 0..M {
                            let few = s.dot_few(s.begin_few(sums[m]), w0, x[m][b].groups[first]);
                            sums[m] = s.end_few(sums[m], s.dot_few(few, w1, x[m][b].groups[first + 1]));
                        }
                    }
                    let scale = s.mul(d, s.load_i8(&per_half[2 * i + half]));
                    for m in 0..M {
                        acc[m] = s.fma(s.to_f32(sums[m]), s.mul(scale, s.splat(x[m][b].scale)), acc[m]);
                    }
                }
            }
        }
        acc
    }
}

/// Weights of a half of a block, 32 too high: low bits of one line, the two high ones of another.
#[inline(always)]
fn six_bits<S: Simd, const M: usize, const F: bool>(
    s: S,
    line: &Line,
    (hi, half): (S::B, usize),
    group: usize,
) -> S::B {
    let both = read::<S, Q6K, M, F>(s, line);
    s.with_two_bits(if half == 0 { s.low(both) } else { s.high(both) }, hi, group)
}
