//! The arithmetic of Q4_K and Q6_K with inputs quantised by units: 256 inputs have one scale, and each block of 32 a power of two below it. Inside
//! a unit a scale of the weights meets that power by an addition of whole numbers, and offsets meet sums of inputs as whole numbers, so that
//! the ports that multiply are left to the dots: 8 of 10 instructions there, where blocks with scales of their own have 8 of 11.

use super::{Ask, Kind, Scaled, add_six_bits, four_bit_sums};
use crate::backend::cpu::panels::Line;
use crate::backend::cpu::quantised::{QuantBytes, QuantUnit, SUM_BITS, UnitBlock};
use crate::raw::Simd;

/// What stands for a scale of zero, whose exponent cannot be shifted. Beside a scale that is none it changes no bit; alone it gives less than a
/// millionth of a millionth of what the smallest scale would.
const TINY: f32 = 1.0 / (1_u64 << 60) as f32;

/// Of one input or two: twice as far as blocks with scales of their own ask, so that two threads reach what memory gives. Twice that again is too far.
const FARTHER: Ask = Ask::Near(8 << 10);

impl Scaled for UnitBlock {
    #[inline(always)]
    fn bytes(&self) -> &QuantBytes {
        &self.bytes
    }
    #[inline(always)]
    fn scaled<S: Simd>(&self, s: S, scale: S::V) -> S::V {
        s.shift_exponent(scale, self.exponent)
    }
}

pub struct Q4KUnits;
pub struct Q6KUnits;

impl Kind for Q4KUnits {
    type X = QuantUnit;
    const OF_FEW: Ask = FARTHER;

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
                    let scale = x[m][unit].blocks[i].scaled(s, scale);
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
    const OF_FEW: Ask = FARTHER;

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
                add_six_bits::<S, Self, _, M, F>(s, (&x, lines, scales), &mut sums);
            }
            for m in 0..M {
                acc[m] = s.fma(sums[m], s.mul(d, s.splat(x[m][unit].scale)), acc[m]);
            }
        }
        acc
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::panels::{LANES, PanelKind, Panels};
    use crate::backend::cpu::pool::Pool;
    use crate::backend::cpu::quant::{by_blocks, by_units};
    use crate::backend::cpu::quantised::QuantInputs;
    use crate::backend::cpu::quantised::tests::{Quantise, scale_of};
    use crate::backend::cpu::tests::{random_weight, uneven};
    use crate::backend::cpu::{Isa, Matrix, output::Output};
    use crate::weights::WeightType;

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
        let blocks = units
            .flat_map(|unit| (0..unit.blocks.len()).map(move |b| (unit.blocks[b].bytes.groups, scale_of(&unit, b))));
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
}
