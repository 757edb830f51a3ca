//! `x · weightᵀ` for repacked weights and inputs quantised to bytes: whole numbers inside a block of 32 (offsets of Q4_K: inside a unit of 256,
//! `dots/units.rs`), f32 between blocks, in the order of the blocks whatever the tile (EP4).

use std::fmt::Debug;
use std::marker::PhantomData;
use std::ops::Range;

use super::dots::units::{Q4KUnits, Q6KUnits, QuantUnit};
use super::dots::{Kind, Q4K, Q6K, Q8};
use super::inputs::InputForms;
use super::output::Output;
use super::panels::{BLOCK, LANES, PanelKind, Panels};
use super::pool::Pool;
#[cfg(target_arch = "x86_64")]
use super::tiles::{self, TileOp};
use super::{Isa, Matrix};
use crate::raw::{Op, Simd};

/// 1.5 · 2^23: adding it leaves the nearest whole number in the low bits.
const MAGIC: f32 = 12_582_912.0;

/// Bytes of panels that many inputs go by in turn: they stay in the second-level cache, while a few inputs stay near, in the first up to some 2,800
/// columns. Panel by panel all inputs would come from further away for each.
const PANELS_BYTES: usize = 192 << 10;

/// Input rows as bytes, in pieces of one type.
#[derive(Debug, Default)]
pub struct QuantInputs<X> {
    pub rows: usize,
    pieces_per_row: usize,
    pieces: Vec<X>,
}

/// A piece of a row as bytes.
pub trait Quantised: Debug + Clone + Copy + Default + Send + Sync {
    /// Inputs a piece.
    const LEN: usize;
    /// Bytes and scales of so many inputs. What is no number becomes one: the scale carries it on.
    fn of<S: Simd>(s: S, x: &[f32]) -> Self;
}

/// 32 inputs as bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct QuantBytes {
    /// Four bytes each.
    pub groups: [i32; 8],
    /// What sums of each half begin with where weights are stored 32 too high (Q6_K).
    pub too_high_32: [i32; 2],
}

/// 32 inputs with a scale of their own.
#[derive(Debug, Clone, Copy, Default)]
pub struct QuantBlock {
    pub bytes: QuantBytes,
    pub scale: f32,
    /// Minus scale times sum: what an offset of the weights is multiplied with.
    pub offset: f32,
    /// What sums begin with where weights are stored 128 too high (Q8_0).
    pub too_high_128: i32,
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
    // A few rows must give the bits that many give by tiles. It is the processor that decides and not the set, so that all sets agree on it;
    // and those with tiles were measured asking for weights the nearer way, and not yet the far one.
    let far = !Isa::processor_has_tiles();
    match weight.kind {
        PanelKind::Q4K if far => {
            let x = forms.units((isa, pool), x);
            pool.split(panels, 1, work, |panels| by_units::<Q4KUnits>(isa, x, (weight, panels), out));
        }
        PanelKind::Q6K if far => {
            let x = forms.units((isa, pool), x);
            pool.split(panels, 1, work, |panels| by_units::<Q6KUnits>(isa, x, (weight, panels), out));
        }
        _ => {
            let x = forms.quantised((isa, pool), x);
            pool.split(panels, 1, work, |panels| by_blocks((isa, far), x, (weight, panels), out));
        }
    }
}

/// Some panels of a multiplication with inputs whose blocks have scales of their own.
pub fn by_blocks((isa, far): (Isa, bool), x: &QuantInputs<QuantBlock>, weight: (&Panels, Range<usize>), out: &Output) {
    match weight.0.kind {
        PanelKind::Q8 => isa.run(QuantOp::<Q8>::new(x, weight, far, out)),
        PanelKind::Q4K => isa.run(QuantOp::<Q4K>::new(x, weight, far, out)),
        PanelKind::Q6K => isa.run(QuantOp::<Q6K>::new(x, weight, far, out)),
    }
}

/// Some panels, of the kind that `K` is for, of a multiplication with inputs in units.
pub fn by_units<K: Kind<X = QuantUnit>>(
    isa: Isa,
    x: &QuantInputs<QuantUnit>,
    weight: (&Panels, Range<usize>),
    out: &Output,
) {
    isa.run(QuantOp::<K>::new(x, weight, true, out));
}

impl<X: Quantised> QuantInputs<X> {
    /// Takes in other rows, of whole pieces.
    pub fn take(&mut self, (isa, pool): (Isa, &Pool), x: &Matrix) {
        (self.rows, self.pieces_per_row) = (x.rows, x.cols / X::LEN);
        self.pieces.resize(x.rows * self.pieces_per_row, X::default());
        pool.each_chunk(&mut self.pieces, self.pieces_per_row, x.values.len() * 8, |row, pieces| {
            isa.run(QuantiseOp { x: x.row(row), pieces });
        });
    }

    #[inline(always)]
    fn row(&self, row: usize) -> &[X] {
        &self.pieces[row * self.pieces_per_row..(row + 1) * self.pieces_per_row]
    }
}

/// Quantises one row.
struct QuantiseOp<'a, X> {
    x: &'a [f32],
    pieces: &'a mut [X],
}

impl<X: Quantised> Op for QuantiseOp<'_, X> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (piece, x) in self.pieces.iter_mut().zip(self.x.chunks_exact(X::LEN)) {
            *piece = X::of(s, x);
        }
    }
}

impl Quantised for QuantBlock {
    const LEN: usize = BLOCK;

    #[inline(always)]
    fn of<S: Simd>(s: S, x: &[f32]) -> Self {
        // no closure: it would be compiled without the set's instructions
        let Some(x) = x.first_chunk() else { return Self::default() };
        quantise(s, x)
    }
}

/// Bytes and scale of 32 inputs.
#[inline(always)]
pub fn quantise<S: Simd>(s: S, x: &[f32; BLOCK]) -> QuantBlock {
    let (largest, broken) = (magnitude(s, x), s.fold(add_broken(s, x, s.splat(0.0))).is_nan());
    let scale = if broken { f32::NAN } else { largest / 127.0 };
    let (bytes, [low, high]) = to_bytes(s, x, inverse(largest, broken));
    QuantBlock { bytes, scale, offset: -scale * (low + high) as f32, too_high_128: -128 * (low + high) }
}

/// The largest of 32 inputs, whatever its sign.
#[inline(always)]
pub fn magnitude<S: Simd>(s: S, x: &[f32; BLOCK]) -> f32 {
    let halves = x.as_chunks().0;
    let (a, b, minus) = (s.load(&halves[0]), s.load(&halves[1]), s.splat(-1.0));
    let mut sizes = [0.0; LANES];
    s.store(s.max(s.max(a, s.mul(a, minus)), s.max(b, s.mul(b, minus))), &mut sizes);
    largest(sizes)
}

/// Adds nothing to `sum` for each of 32 inputs, or what is no number where one of them is none. That is larger than nothing: it is carried in
/// the scale, or a broken row would look whole.
#[inline(always)]
pub fn add_broken<S: Simd>(s: S, x: &[f32; BLOCK], sum: S::V) -> S::V {
    let (halves, zero) = (x.as_chunks().0, s.splat(0.0));
    s.fma(s.load(&halves[0]), zero, s.fma(s.load(&halves[1]), zero, sum))
}

/// What inputs are multiplied with to become bytes; zero where they cannot.
#[inline(always)]
pub fn inverse(largest: f32, broken: bool) -> f32 {
    let inverse = if largest > 0.0 && !broken { 127.0 / largest } else { 0.0 };
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// 32 inputs times `inverse`, rounded to bytes, and the sums of both halves.
#[inline(always)]
pub fn to_bytes<S: Simd>(s: S, x: &[f32; BLOCK], inverse: f32) -> (QuantBytes, [i32; 2]) {
    if inverse == 0.0 {
        return (QuantBytes::default(), [0; 2]);
    }
    let halves = x.as_chunks().0;
    let (factor, magic, back) = (s.splat(inverse), s.splat(MAGIC), s.splat(-MAGIC));
    let a = s.add(s.mul(s.load(&halves[0]), factor), magic);
    let b = s.add(s.mul(s.load(&halves[1]), factor), magic);
    let mut rounded = [[0.0; LANES]; 2];
    s.store(a, &mut rounded[0]);
    s.store(b, &mut rounded[1]);
    let mut bytes = [0; BLOCK];
    for (byte, rounded) in bytes.iter_mut().zip(rounded.as_flattened()) {
        *byte = rounded.to_bits() as u8;
    }
    let mut groups = [0; BLOCK / 4];
    for (group, bytes) in groups.iter_mut().zip(bytes.as_chunks().0) {
        *group = i32::from_le_bytes(*bytes);
    }
    // whole numbers below 2^24: their sums are exact in any order
    let (low, high) = (s.fold(s.add(a, back)) as i32, s.fold(s.add(b, back)) as i32);
    (QuantBytes { groups, too_high_32: [-32 * low, -32 * high] }, [low, high])
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
struct QuantOp<'a, K: Kind> {
    x: &'a QuantInputs<K::X>,
    weight: &'a Panels,
    panels: Range<usize>,
    /// Weights are asked for in the second-level cache.
    far: bool,
    out: &'a Output,
    kind: PhantomData<K>,
}

impl<'a, K: Kind> QuantOp<'a, K> {
    fn new(x: &'a QuantInputs<K::X>, (weight, panels): (&'a Panels, Range<usize>), far: bool, out: &'a Output) -> Self {
        Self { x, weight, panels, far, out, kind: PhantomData }
    }
}

impl<K: Kind> Op for QuantOp<'_, K> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (lines, scales) = self.weight.panel(self.panels.start);
        let together = (PANELS_BYTES / (lines.as_flattened().len() + scales.len()).max(1)).max(1);
        for first in self.panels.clone().step_by(together) {
            let panels = first..self.panels.end.min(first + together);
            if S::WIDE && self.far {
                self.panels::<S, 8, true>(s, panels);
            } else if S::WIDE {
                self.panels::<S, 8, false>(s, panels);
            } else {
                self.panels::<S, 4, false>(s, panels);
            }
        }
    }
}

impl<K: Kind> QuantOp<'_, K> {
    /// Each few inputs go by all of these panels, then the next.
    #[inline(always)]
    fn panels<S: Simd, const M: usize, const F: bool>(&self, s: S, panels: Range<usize>) {
        let mut token = 0;
        while token + M <= self.x.rows {
            self.blocks::<S, M, F>(s, panels.clone(), token);
            token += M;
        }
        if S::WIDE && token + 4 <= self.x.rows {
            self.blocks::<S, 4, F>(s, panels.clone(), token);
            token += 4;
        }
        if token + 2 <= self.x.rows {
            self.blocks::<S, 2, F>(s, panels.clone(), token);
            token += 2;
        }
        while token < self.x.rows {
            self.blocks::<S, 1, F>(s, panels.clone(), token);
            token += 1;
        }
    }

    #[inline(always)]
    fn blocks<S: Simd, const M: usize, const F: bool>(&self, s: S, panels: Range<usize>, token: usize) {
        for panel in panels {
            self.block::<S, M, F>(s, panel, token);
        }
    }

    #[inline(always)]
    fn block<S: Simd, const M: usize, const F: bool>(&self, s: S, panel: usize, token: usize) {
        let x: [&[K::X]; M] = std::array::from_fn(|m| self.x.row(token + m));
        let (lines, scales) = self.weight.panel(panel);
        let rows = LANES.min(self.weight.rows - panel * LANES);
        for (m, sums) in K::dots::<S, M, F>(s, x, lines, scales).iter().enumerate() {
            self.out.set_lanes(s, (token + m, panel * LANES), *sums, rows);
        }
    }
}
