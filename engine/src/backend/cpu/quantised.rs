//! Input rows as bytes: each block of 32 with a scale of its own, or 256 with one scale and a power of two below it for each block of 32.

use std::fmt::Debug;

use super::kernels::MAGIC;
use super::panels::{BLOCK, BLOCKS_PER_UNIT, LANES};
use super::pool::Pool;
use super::{Isa, Matrix};
use crate::raw::{Op, Simd};

/// A block whose inputs are smaller by more than 2^30 than the largest of its unit becomes nothing beside them.
const HALVINGS_MAX: i32 = 30;
/// Sums of inputs go into sixteen bits eight times as large: 32 · 127 · 8 fits.
pub const SUM_BITS: i32 = 3;

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

/// 256 inputs.
#[derive(Debug, Clone, Copy, Default)]
pub struct QuantUnit {
    pub blocks: [UnitBlock; BLOCKS_PER_UNIT],
    /// Sums of the blocks' inputs by two, eight times as large, in the unit's scale.
    pub sums: [i32; BLOCKS_PER_UNIT / 2],
    pub scale: f32,
}

/// 32 inputs of a unit.
#[derive(Debug, Clone, Copy, Default)]
pub struct UnitBlock {
    pub bytes: QuantBytes,
    /// What the exponent of a scale gains: its scale is that of the unit, halved so and so often.
    pub exponent: i32,
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
    pub fn row(&self, row: usize) -> &[X] {
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

impl Quantised for QuantUnit {
    const LEN: usize = BLOCKS_PER_UNIT * BLOCK;

    #[inline(always)]
    fn of<S: Simd>(s: S, x: &[f32]) -> Self {
        let x = x.as_chunks::<BLOCK>().0;
        let (mut sizes, mut largest, mut nothing) = ([0.0; BLOCKS_PER_UNIT], 0.0, s.splat(0.0));
        for (place, x) in sizes.iter_mut().zip(x) {
            *place = magnitude(s, x);
            largest = if *place > largest { *place } else { largest };
            nothing = add_broken(s, x, nothing);
        }
        let broken = s.fold(nothing).is_nan();
        let mut unit = Self { scale: if broken { f32::NAN } else { largest / 127.0 }, ..Self::default() };
        let inverse = inverse(largest, broken);
        let mut sums = [0i32; BLOCKS_PER_UNIT];
        for (((block, sum), size), x) in unit.blocks.iter_mut().zip(&mut sums).zip(sizes).zip(x) {
            let halvings = halvings(largest, size);
            block.exponent = -(halvings << 23);
            let factor = inverse * f32::from_bits(((127 + halvings) << 23) as u32);
            let (bytes, [low, high]) = to_bytes(s, x, if factor.is_finite() { factor } else { 0.0 });
            block.bytes = bytes;
            *sum = shifted(low + high, SUM_BITS - halvings);
        }
        for (pair, [first, second]) in unit.sums.iter_mut().zip(sums.as_chunks().0) {
            *pair = first & 0xFFFF | second << 16;
        }
        unit
    }
}

/// How often `largest` may be halved and is still no less than `size`.
#[inline(always)]
fn halvings(largest: f32, size: f32) -> i32 {
    let exponent = ((largest / size).to_bits() >> 23) as i32 - 127;
    if size > 0.0 { exponent.clamp(0, HALVINGS_MAX) } else { 0 }
}

/// `x · 2^by`, rounded; ties to even, or half of the sums that are halved once would all be off to one side.
#[inline(always)]
fn shifted(x: i32, by: i32) -> i32 {
    if by >= 0 { x << by } else { (x + (1 << (-by - 1)) - 1 + (x >> -by & 1)) >> -by }
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

#[cfg(test)]
pub mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::backend::cpu::Isa;

    pub struct Quantise<'a>(pub &'a [f32]);

    impl Op for Quantise<'_> {
        type Out = QuantUnit;

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> QuantUnit {
            QuantUnit::of(s, self.0)
        }
    }

    pub fn scale_of(unit: &QuantUnit, block: usize) -> f64 {
        f64::from(unit.scale) * f64::from(unit.blocks[block].exponent >> 23).exp2()
    }

    proptest! {
        /// Blocks of any sizes: each input is off by no more than half a step of a scale that is less than twice what its block needs by itself;
        /// sums are those of the bytes, to half of an eighth of the unit's step.
        #[test]
        fn small_blocks_keep_their_digits_beside_large_ones(
            values in prop::collection::vec(-1.0f32..1.0, 256), sizes in prop::array::uniform8(-20i32..20),
        ) {
            let x: Vec<f32> = values.iter().enumerate().map(|(i, x)| x * (sizes[i / 32] as f32).exp2()).collect();
            for isa in Isa::all() {
                let unit = isa.run(Quantise(&x));
                for (b, (block, x)) in unit.blocks.iter().zip(x.chunks(32)).enumerate() {
                    let largest = x.iter().fold(0.0, |largest, x| x.abs().max(largest));
                    let scale = scale_of(&unit, b);
                    let at_most = block.exponent == -(HALVINGS_MAX << 23) || largest == 0.0;
                    prop_assert!(at_most || scale <= 2.001 * f64::from(largest / 127.0));
                    let bytes: Vec<i8> = block.bytes.groups.iter().flat_map(|g| g.to_le_bytes()).map(|b| b as i8).collect();
                    for (byte, x) in bytes.iter().zip(x) {
                        prop_assert!((f64::from(*byte) * scale - f64::from(*x)).abs() <= 0.5001 * scale, "{byte} {x} {scale}");
                    }
                    let sums = bytes.chunks(16).map(|half| half.iter().map(|byte| i32::from(*byte)).sum::<i32>());
                    let sums: Vec<i32> = sums.collect();
                    prop_assert_eq!(block.bytes.too_high_32, [-32 * sums[0], -32 * sums[1]]);
                    let held = f64::from((unit.sums[b / 2] >> (16 * (b % 2))) as i16) / 8.0;
                    let sum = f64::from(sums[0] + sums[1]) * f64::from(block.exponent >> 23).exp2();
                    prop_assert!((held - sum).abs() <= 0.5 / 8.0, "{held} {sum}");
                }
            }
        }
    }

    #[test]
    fn nothing_stays_nothing_and_what_is_no_number_is_seen() {
        for isa in Isa::all() {
            let nothing = isa.run(Quantise(&[0.0; 256]));
            assert_eq!((nothing.scale, nothing.sums), (0.0, [0; 4]));
            for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = [1.0; 256];
                x[77] = broken;
                assert!(isa.run(Quantise(&x)).scale.is_nan(), "{broken}");
            }
        }
    }
}
