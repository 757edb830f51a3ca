//! `x · weightᵀ` for bf16 weights and inputs by tiles (AMX), the weights read where their file holds them. Sums have an order of their
//! own, so whole units of weight rows go this way however few inputs there are (EP4): a tile is as fast as memory even for one.

use super::inputs::InputForms;
use super::output::Output;
use super::pool::Pool;
use super::{Isa, Matrix};
use crate::raw::amx::{AmxPairs, PAIR_ROWS, PAIR_STEP};
use crate::raw::{Op, Portable, Simd, pair_of};
use crate::weights::RawWeight;

/// Input rows of a tile, where there are several.
pub const TILE: usize = 16;

/// Computes the outputs of whole units of weight rows; returns how many that are.
pub fn multiply(
    tiles: AmxPairs,
    (isa, pool): (Isa, &Pool),
    (x, forms): (&Matrix, &mut InputForms),
    raw: &RawWeight,
    out: &Output,
) -> usize {
    if x.cols == 0 || !x.cols.is_multiple_of(PAIR_STEP) {
        return 0;
    }
    let (units, work) = (raw.rows / PAIR_ROWS, raw.rows * raw.cols * x.rows);
    if x.rows == 1 {
        let inputs = forms.pairs_of_one((isa, pool), x);
        pool.split(units, 1, work, |units| units.for_each(|unit| inputs.unit(tiles, raw, unit, out)));
    } else {
        let inputs = forms.pairs((isa, pool), x);
        pool.split(units, 1, work, |units| units.for_each(|unit| inputs.unit(tiles, raw, unit, out)));
    }
    units * PAIR_ROWS
}

/// Input rows in bf16, `N` side by side, pair by pair; what is beyond the last is zero.
#[derive(Debug, Default)]
pub struct PairInputs<const N: usize> {
    rows: usize,
    tile_bytes: usize,
    bytes: Vec<u8>,
}

impl<const N: usize> PairInputs<N> {
    /// Takes in other rows.
    pub fn take(&mut self, (isa, pool): (Isa, &Pool), x: &Matrix) {
        (self.rows, self.tile_bytes) = (x.rows, x.cols * 2 * N);
        self.bytes.clear();
        self.bytes.resize(x.rows.div_ceil(N) * self.tile_bytes, 0);
        pool.each_chunk(&mut self.bytes, self.tile_bytes, x.values.len() * 8, |tile, bytes| {
            isa.run(FillOp::<N> { x, first: tile * N, bytes });
        });
    }

    fn unit(&self, tiles: AmxPairs, raw: &RawWeight, unit: usize, out: &Output) {
        let (first, row_len) = (unit * PAIR_ROWS, 2 * raw.cols);
        let weights = &raw.bytes()[first * row_len..(first + PAIR_ROWS) * row_len];
        let set_up = tiles.tiles::<N>();
        let mut at = 0;
        for pair in self.bytes.chunks(2 * self.tile_bytes) {
            if let Some((a, b)) = pair.split_at_checked(self.tile_bytes).filter(|(_, b)| !b.is_empty()) {
                let sums = set_up.products(weights, row_len, [a, b]);
                sums.iter().flatten().enumerate().for_each(|(tile, sums)| self.store(sums, at + tile * N, first, out));
            } else {
                let sums = set_up.products(weights, row_len, [pair]);
                sums.iter().flatten().for_each(|sums| self.store(sums, at, first, out));
            }
            at += 2 * N;
        }
    }

    fn store(&self, sums: &[[[f32; N]; 16]; 2], row: usize, first: usize, out: &Output) {
        let column = |n: usize| std::array::from_fn::<_, PAIR_ROWS, _>(|i| sums[i / 16][i % 16][n]);
        (0..N.min(self.rows - row)).for_each(|n| out.set_run(Portable, (row + n, first), &column(n)));
    }
}

/// Rounds rows from `first` on into one tile.
struct FillOp<'a, const N: usize> {
    x: &'a Matrix,
    first: usize,
    bytes: &'a mut [u8],
}

impl<const N: usize> Op for FillOp<'_, N> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for row in 0..N.min(self.x.rows - self.first) {
            let pairs = self.x.row(self.first + row).as_chunks::<2>().0;
            for (place, [a, b]) in self.bytes[4 * row..].chunks_mut(4 * N).zip(pairs) {
                place[..4].copy_from_slice(&pair_of(*a, *b).to_le_bytes());
            }
        }
    }
}
