//! The arithmetic of Q4_K and Q6_K with inputs quantised by units: 256 inputs have one scale, and each block of 32 a power of two below it. Inside
//! a unit a scale of the weights meets that power by an addition of whole numbers, and offsets meet sums of inputs as whole numbers, so that
//! the ports that multiply are left to the dots: 8 of 10 instructions there, where blocks with scales of their own have 8 of 11.

use super::{Ask, Kind, NEAR, four_bit_sums, six_bit_sums};
use crate::backend::cpu::panels::{BLOCK, Line};
use crate::backend::cpu::quant::{QuantBytes, Quantised, add_broken, inverse, magnitude, to_bytes};
use crate::raw::Simd;

/// Blocks of a unit.
const BLOCKS: usize = 8;
/// A block whose inputs are smaller by more than 2^30 than the largest of its unit becomes nothing beside them.
const HALVINGS_MAX: i32 = 30;
/// Sums of inputs go into sixteen bits eight times as large: 32 · 127 · 8 fits.
const SUM_BITS: i32 = 3;
/// What stands for a scale of zero, whose exponent cannot be shifted. Beside a scale that is none it changes no bit; alone it gives less than a
/// millionth of a millionth of what the smallest scale would.
const TINY: f32 = 1.0 / (1_u64 << 60) as f32;

/// 256 inputs.
#[derive(Debug, Clone, Copy, Default)]
pub struct QuantUnit {
    blocks: [UnitBlock; BLOCKS],
    /// Sums of the blocks' inputs by two, eight times as large, in the unit's scale.
    sums: [i32; BLOCKS / 2],
    scale: f32,
}

/// 32 inputs of a unit.
#[derive(Debug, Clone, Copy, Default)]
struct UnitBlock {
    bytes: QuantBytes,
    /// What the exponent of a scale gains: its scale is that of the unit, halved so and so often.
    exponent: i32,
}

impl Quantised for QuantUnit {
    const LEN: usize = BLOCKS * BLOCK;

    #[inline(always)]
    fn of<S: Simd>(s: S, x: &[f32]) -> Self {
        let x = x.as_chunks::<BLOCK>().0;
        let (mut sizes, mut largest, mut nothing) = ([0.0; BLOCKS], 0.0, s.splat(0.0));
        for (place, x) in sizes.iter_mut().zip(x) {
            *place = magnitude(s, x);
            largest = if *place > largest { *place } else { largest };
            nothing = add_broken(s, x, nothing);
        }
        let broken = s.fold(nothing).is_nan();
        let mut unit = Self { scale: if broken { f32::NAN } else { largest / 127.0 }, ..Self::default() };
        let inverse = inverse(largest, broken);
        let mut sums = [0i32; BLOCKS];
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

pub struct Q4KUnits;
pub struct Q6KUnits;

impl Kind for Q4KUnits {
    type X = QuantUnit;
    const OF_FEW: Ask = NEAR;

    #[inline(always)]
    fn dots<S: Simd, const M: usize, const F: bool>(
        s: S,
        x: [&[QuantUnit]; M],
        lines: &[Line],
        scales: &[u8],
    ) -> [S::V; M] {
        let mut acc = [s.splat(0.0); M];
        let units = lines.as_chunks::<32>().0.iter().zip(scales.as_chunks::<320>().0).enumerate();
        for (unit, (lines, scales)) in units {
            let (halves, per_block) = (scales.as_chunks::<32>().0, scales[64..].as_chunks::<16>().0);
            // asked for first: scales come in the order in which they lie
            let (d, d_offset) = (s.load_f16(&halves[0]), s.load_f16(&halves[1]));
            let mut sums = [s.splat(0.0); M];
            for (i, lines) in lines.as_chunks::<4>().0.iter().enumerate() {
                let bytes: [&QuantBytes; M] = std::array::from_fn(|m| &x[m][unit].blocks[i].bytes);
                let of_block = four_bit_sums::<S, Self, M, F>(s, &bytes, lines);
                let scale = s.add(s.load_u8(&per_block[2 * i]), s.splat(TINY));
                for m in 0..M {
                    let scale = s.shift_exponent(scale, x[m][unit].blocks[i].exponent);
                    sums[m] = s.fma(s.to_f32(of_block[m]), scale, sums[m]);
                }
            }
            let d_offset = s.mul(d_offset, s.splat(-1.0 / (1 << SUM_BITS) as f32));
            let mut offsets = [s.splat_i32(0); M];
            for (pair, per_block) in per_block.as_chunks::<4>().0.iter().enumerate() {
                let two = s.load_u8_pairs(&per_block[1], &per_block[3]);
                for m in 0..M {
                    offsets[m] = s.dot_i16(offsets[m], two, x[m][unit].sums[pair]);
                }
            }
            for m in 0..M {
                let scale = s.splat(x[m][unit].scale);
                acc[m] = s.fma(sums[m], s.mul(d, scale), acc[m]);
                acc[m] = s.fma(s.to_f32(offsets[m]), s.mul(d_offset, scale), acc[m]);
            }
        }
        acc
    }
}

impl Kind for Q6KUnits {
    type X = QuantUnit;
    const OF_FEW: Ask = NEAR;

    #[inline(always)]
    fn dots<S: Simd, const M: usize, const F: bool>(
        s: S,
        x: [&[QuantUnit]; M],
        lines: &[Line],
        scales: &[u8],
    ) -> [S::V; M] {
        let mut acc = [s.splat(0.0); M];
        let units = lines.as_chunks::<48>().0.iter().zip(scales.as_chunks::<288>().0).enumerate();
        for (unit, (lines, scales)) in units {
            let (halves, per_half) = (scales.as_chunks::<32>().0, scales[32..].as_chunks::<16>().0);
            let d = s.load_f16(&halves[0]);
            let mut sums = [s.splat(0.0); M];
            for (i, lines) in lines.as_chunks::<6>().0.iter().enumerate() {
                let x: [&UnitBlock; M] = std::array::from_fn(|m| &x[m][unit].blocks[i]);
                let (first, second) = (s.load_i8(&per_half[2 * i]), s.load_i8(&per_half[2 * i + 1]));
                let scales = [s.add(first, s.splat(TINY)), s.add(second, s.splat(TINY))];
                // both halves together, where there are registers for it
                if S::WIDE && M > 1 {
                    add_halves::<S, M, F, 2>(s, (&x, lines, scales), 0, &mut sums);
                } else {
                    add_halves::<S, M, F, 1>(s, (&x, lines, scales), 0, &mut sums);
                    add_halves::<S, M, F, 1>(s, (&x, lines, scales), 1, &mut sums);
                }
            }
            for m in 0..M {
                acc[m] = s.fma(sums[m], s.mul(d, s.splat(x[m][unit].scale)), acc[m]);
            }
        }
        acc
    }
}

/// Adds `H` halves of a block with their scales, from `first` on.
#[inline(always)]
fn add_halves<S: Simd, const M: usize, const F: bool, const H: usize>(
    s: S,
    (x, lines, scales): (&[&UnitBlock; M], &[Line; 6], [S::V; 2]),
    first: usize,
    sums: &mut [S::V; M],
) {
    let bytes: [&QuantBytes; M] = std::array::from_fn(|m| &x[m].bytes);
    let of_halves = six_bit_sums::<S, Q6KUnits, M, F, H>(s, &bytes, lines, first);
    for m in 0..M {
        for h in 0..H {
            let scale = s.shift_exponent(scales[first + h], x[m].exponent);
            sums[m] = s.fma(s.to_f32(of_halves[h][m]), scale, sums[m]);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::backend::cpu::panels::{LANES, PanelKind, Panels};
    use crate::backend::cpu::pool::Pool;
    use crate::backend::cpu::quant::{QuantInputs, by_blocks, by_units};
    use crate::backend::cpu::tests::{random_weight, uneven};
    use crate::backend::cpu::{Isa, Matrix, output::Output};
    use crate::raw::Op;
    use crate::weights::WeightType;

    struct Quantise<'a>(&'a [f32]);

    impl Op for Quantise<'_> {
        type Out = QuantUnit;

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> QuantUnit {
            QuantUnit::of(s, self.0)
        }
    }

    fn scale_of(unit: &QuantUnit, block: usize) -> f64 {
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

    /// The product by units, or by blocks with scales of their own.
    fn product(isa: Isa, in_units: bool, x: &Matrix, weight: &Panels) -> Matrix {
        let (pool, panels) = (Pool::new(1), 0..weight.rows.div_ceil(LANES));
        let out = Output::over(Matrix::default(), x.rows, weight.rows);
        let (mut units, mut blocks) = (QuantInputs::default(), QuantInputs::default());
        match (in_units, weight.kind) {
            (true, PanelKind::Q6K) => {
                units.take((isa, &pool), x);
                by_units::<Q6KUnits>(isa, &units, (weight, panels), &out);
            }
            (true, _) => {
                units.take((isa, &pool), x);
                by_units::<Q4KUnits>(isa, &units, (weight, panels), &out);
            }
            (false, _) => {
                blocks.take((isa, &pool), x);
                by_blocks((isa, false), &blocks, (weight, panels), &out);
            }
        }
        out.into_matrix()
    }

    /// What a row becomes as bytes of units, in f64.
    fn held(isa: Isa, row: &[f32]) -> Vec<f64> {
        let units = row.chunks(256).map(|x| isa.run(Quantise(x)));
        let blocks = units.flat_map(|unit| (0..BLOCKS).map(move |b| (unit.blocks[b].bytes.groups, scale_of(&unit, b))));
        blocks
            .flat_map(|(groups, scale)| groups.map(|g| g.to_le_bytes().map(|b| f64::from(b as i8) * scale)))
            .flatten()
            .collect()
    }

    /// Units, and blocks of every size in them, against the plainest loop over the same bytes; and both ways of quantising against each other.
    #[test]
    fn products_of_several_units_are_those_of_their_bytes() {
        for (kind, units, rows) in
            [WeightType::Q4K, WeightType::Q6K].into_iter().flat_map(|k| [(k, 1, 1), (k, 2, 9), (k, 5, 15)])
        {
            let (cols, outputs) = (256 * units, 37);
            let (x, raw) = (uneven(rows, cols, 3), random_weight(kind, outputs, cols, 4));
            let (w, weight) = (raw.to_f32(), Panels::pack(&raw, &Pool::new(1), &mut || ()).unwrap());
            for isa in Isa::all() {
                let (by_units, by_blocks) = (product(isa, true, &x, &weight), product(isa, false, &x, &weight));
                for (at, got) in by_units.values.iter().enumerate() {
                    let (row, w) = (at / outputs, &w[at % outputs * cols..][..cols]);
                    let products = held(isa, x.row(row)).into_iter().zip(w).map(|(x, w)| x * f64::from(*w));
                    let (want, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p * p));
                    // offsets of small blocks meet sums of bytes that are held to an eighth of the unit's step
                    let off = (f64::from(*got) - want).abs();
                    assert!(off <= 2e-3 * size.sqrt(), "{} {kind:?} {units}: {got} {want}", isa.name());
                    let apart = f64::from((got - by_blocks.values[at]).abs());
                    assert!(
                        apart <= 0.05 * size.sqrt(),
                        "{} {kind:?} {units}: {got} {}",
                        isa.name(),
                        by_blocks.values[at]
                    );
                }
            }
        }
    }

    /// Panels that go by together, several times over: no bit depends on how many there are, nor on how many rows.
    #[test]
    fn panels_and_rows_that_go_by_together_change_no_bit() {
        for kind in [WeightType::Q8_0, WeightType::Q4K, WeightType::Q6K] {
            let (rows, cols, outputs) = (15, 2048, 600);
            let x = uneven(rows, cols, 5);
            let raw = random_weight(kind, outputs, cols, 6);
            let (pool, last) = (Pool::new(1), raw.part(592..600).unwrap());
            let (all, last) =
                (Panels::pack(&raw, &pool, &mut || ()).unwrap(), Panels::pack(&last, &pool, &mut || ()).unwrap());
            for (isa, in_units) in
                Isa::all().into_iter().flat_map(|isa| [(isa, false), (isa, kind != WeightType::Q8_0)])
            {
                let whole = product(isa, in_units, &x, &all);
                for row in 0..rows {
                    let alone = Matrix { rows: 1, cols, values: x.row(row).to_vec() };
                    let name = isa.name();
                    assert_eq!(product(isa, in_units, &alone, &all).values, whole.row(row), "{name} {kind:?} {row}");
                    assert_eq!(
                        product(isa, in_units, &alone, &last).values,
                        whole.row(row)[592..],
                        "{name} {kind:?} {row}"
                    );
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
