//! `x · weightᵀ` for weights that stay as their file holds them: f32, bf16 or f16, row after row.
//!
//! Sixteen partial sums an output, folded by halves at the end: the order of summation is that of one row and one token,
//! whatever tile they are computed in (EP4). A tile only shares loads.

use super::inputs::InputForms;
use super::kernels::with_zeros;
use super::output::Output;
#[cfg(target_arch = "x86_64")]
use super::pairs;
use super::pool::Pool;
use super::{Isa, Matrix};
#[cfg(target_arch = "x86_64")]
use crate::raw::amx::Amx;
use crate::raw::{Line, Op, Simd};
use crate::weights::RawWeight;

/// How the steps of one row are read and multiplied.
pub trait Element: Copy + Send + Sync {
    /// What one step takes of an input row …
    type X: Copy + Send + Sync;
    /// … and of a weight row: a cache line.
    type W: Copy + Send + Sync;
    /// Whole steps of a weight row …
    fn steps(row: &[u8]) -> &[Self::W];
    /// … and what is behind them, with zeros behind it; `None` where nothing is.
    fn rest(row: &[u8]) -> Option<Self::W>;
    fn mac<S: Simd>(s: S, acc: S::V, x: &Self::X, w: &Self::W) -> S::V;
}

fn padded<const N: usize>(rest: &[u8]) -> Option<[u8; N]> {
    if rest.is_empty() {
        return None;
    }
    let mut step = [0; N];
    step[..rest.len()].copy_from_slice(rest);
    Some(step)
}

#[inline(always)]
fn halves(w: &[u8; 64]) -> [[u8; 32]; 2] {
    let mut halves = [[0; 32]; 2];
    halves.as_flattened_mut().copy_from_slice(w);
    halves
}

macro_rules! element {
    ($(#[$doc:meta])* $name:ident, $x:ty, $bytes:literal, |$s:ident, $acc:ident, $xs:ident, $w:ident| $mac:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name;

        impl Element for $name {
            type X = $x;
            type W = [u8; $bytes];
            #[inline(always)]
            fn steps(row: &[u8]) -> &[[u8; $bytes]] {
                row.as_chunks().0
            }
            fn rest(row: &[u8]) -> Option<[u8; $bytes]> {
                padded(row.as_chunks::<$bytes>().1)
            }
            #[inline(always)]
            fn mac<S: Simd>($s: S, $acc: S::V, $xs: &$x, $w: &[u8; $bytes]) -> S::V {
                $mac
            }
        }
    };
}

element!(
    /// f32 weights.
    F32, [Line; 1], 64, |s, acc, x, w| s.fma(s.load_f32(&x[0].0), s.load_f32(w), acc));
element!(
/// bf16 weights, f32 inputs.
Bf16, [Line; 2], 64, |s, acc, x, w| {
    let ([first, second], w) = (x, halves(w));
    s.fma(s.load_f32(&second.0), s.load_bf16(&w[1]), s.fma(s.load_f32(&first.0), s.load_bf16(&w[0]), acc))
});
element!(
/// f16 weights, f32 inputs.
F16, [Line; 2], 64, |s, acc, x, w| {
    let ([first, second], w) = (x, halves(w));
    s.fma(s.load_f32(&second.0), s.load_f16(&w[1]), s.fma(s.load_f32(&first.0), s.load_f16(&w[0]), acc))
});
element!(
    /// bf16 weights, bf16 inputs.
    Bf16Pairs, Line, 64, |s, acc, x, w| s.dot_bf16(acc, &x.0, w));

/// Rows of inputs, cut into steps; the last step has zeros behind its end.
#[derive(Debug)]
pub struct Inputs<X> {
    pub rows: usize,
    steps_per_row: usize,
    steps: Vec<X>,
}

impl<X> Default for Inputs<X> {
    fn default() -> Self {
        Self { rows: 0, steps_per_row: 0, steps: Vec::new() }
    }
}

impl<const LINES: usize> Inputs<[Line; LINES]> {
    /// Takes in other rows, as they are.
    pub fn f32(&mut self, x: &Matrix) {
        let step = 16 * LINES;
        (self.rows, self.steps_per_row) = (x.rows, x.cols.div_ceil(step));
        self.steps.clear();
        let steps = x.values.chunks_exact(x.cols.max(1)).flat_map(|row| row.chunks(step));
        let line = |step: &[f32], at: usize| line_of(&with_zeros(step.get(16 * at..).unwrap_or_default()));
        self.steps.extend(steps.map(|step| std::array::from_fn(|at| line(step, at))));
    }
}

impl Inputs<Line> {
    /// Takes in other rows, rounded to bf16 (to nearest, ties to even; a NaN stays one).
    pub fn bf16(&mut self, (isa, pool): (Isa, &Pool), x: &Matrix) {
        (self.rows, self.steps_per_row) = (x.rows, x.cols.div_ceil(32));
        self.steps.resize(x.rows * self.steps_per_row, Line([0; 64]));
        pool.each_chunk(&mut self.steps, self.steps_per_row, x.values.len() * 2, |row, steps| {
            isa.run(RoundOp { x: x.row(row), steps });
        });
    }
}

/// Sixteen f32, little endian.
fn line_of(values: &[f32; 16]) -> Line {
    let mut line = Line([0; 64]);
    line.0.as_chunks_mut().0.iter_mut().zip(values).for_each(|(place, value)| *place = value.to_le_bytes());
    line
}

/// Rounds one row to bf16.
struct RoundOp<'a> {
    x: &'a [f32],
    steps: &'a mut [Line],
}

impl Op for RoundOp<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (step, line) in self.steps.iter_mut().enumerate() {
            for (at, half) in line.0.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                // zeros stand behind the row, whatever an earlier one has left there
                let x = self.x.get(32 * step + 16 * at..).unwrap_or_default();
                for (place, pair) in half.as_chunks_mut().0.iter_mut().zip(s.to_pairs(s.load(&with_zeros(x)))) {
                    *place = pair.to_le_bytes();
                }
            }
        }
    }
}

impl<X> Inputs<X> {
    #[inline(always)]
    fn row(&self, row: usize) -> &[X] {
        &self.steps[row * self.steps_per_row..(row + 1) * self.steps_per_row]
    }
}

/// `x · weightᵀ` into `out`, from output `from` on.
pub fn multiply<E: Element>(
    (isa, pool): (Isa, &Pool),
    x: &Inputs<E::X>,
    (raw, from): (&RawWeight, usize),
    out: &Output,
) {
    let row_len = raw.bytes().len() / raw.rows.max(1);
    let rows = raw.rows - from;
    pool.split(rows, 24, rows * raw.cols * x.rows, |rows| {
        let (first, end) = (from + rows.start, from + rows.end);
        let weights = &raw.bytes()[first * row_len..end * row_len];
        isa.run(DenseOp::<E> { x, weights, row_len, first, out });
    });
}

/// The same for weights and inputs in bf16, by tiles where there are some.
pub fn multiply_bf16((isa, pool): (Isa, &Pool), (x, forms): (&Matrix, &mut InputForms), raw: &RawWeight, out: &Output) {
    #[cfg(target_arch = "x86_64")]
    let done =
        isa.tiles().and_then(Amx::pairs).map_or(0, |t| pairs::multiply(t, (isa, pool), (x, &mut *forms), raw, out));
    #[cfg(not(target_arch = "x86_64"))]
    let done = 0;
    if done < raw.rows {
        multiply::<Bf16Pairs>((isa, pool), forms.bf16((isa, pool), x), (raw, done), out);
    }
}

/// Some outputs of a multiplication, for all inputs.
pub struct DenseOp<'a, E: Element> {
    pub x: &'a Inputs<E::X>,
    /// Weight rows of `row_len` bytes, the first for output `first`.
    pub weights: &'a [u8],
    pub row_len: usize,
    pub first: usize,
    pub out: &'a Output,
}

/// Bytes of inputs that stay in the second-level cache while the weights go by.
const INPUT_TILE_BYTES: usize = 512 << 10;
/// Inputs of a block of wide vectors; with four outputs they have 24 sums, and ten loads for as many products.
const BLOCK_INPUTS: usize = 6;
/// Blocks of inputs that go by the same weights, however short the inputs are.
const TILE_BLOCKS_MAX: usize = 43;

/// How far ahead of the arithmetic weights are asked for at least: about what memory delivers while one answer is on its way.
const AHEAD_MIN: usize = 4 << 10;

/// A block's share of asking for the weights that come next, in the second-level cache: more requests of that are under way at a time. They are
/// asked for in the order in which they lie in memory, whatever the blocks read first; the processor's own foresight ends with each page, and loses its
/// way among several rows. Where vectors are not wide nothing is asked for.
#[derive(Clone, Copy)]
struct Share {
    /// Which one of the blocks that multiply the same weights.
    index: usize,
    /// How many of them ask; what is left of the inputs behind those does not.
    of: usize,
}

impl<E: Element> Op for DenseOp<'_, E> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if S::WIDE && self.x.rows == 1 {
            return self.tile::<S, 1, 1>(s, 0..1);
        }
        // as many blocks each, so that no few inputs are left for which all weights come once more
        let row_bytes = (self.x.steps_per_row * size_of::<E::X>()).max(1);
        let blocks = self.x.rows.div_ceil(BLOCK_INPUTS);
        let tiles = blocks.div_ceil((INPUT_TILE_BYTES / (BLOCK_INPUTS * row_bytes)).clamp(1, TILE_BLOCKS_MAX));
        for tile in 0..tiles {
            let end = BLOCK_INPUTS * (blocks * (tile + 1) / tiles);
            let tokens = BLOCK_INPUTS * (blocks * tile / tiles)..end.min(self.x.rows);
            if S::WIDE {
                self.tile::<S, BLOCK_INPUTS, 4>(s, tokens);
            } else {
                self.tile::<S, 2, 3>(s, tokens);
            }
        }
    }
}

impl<E: Element> DenseOp<'_, E> {
    /// In blocks of `M` inputs by `N` outputs.
    #[inline(always)]
    fn tile<S: Simd, const M: usize, const N: usize>(&self, s: S, tokens: std::ops::Range<usize>) {
        let rows = self.weights.len() / self.row_len.max(1);
        let mut row = 0;
        while row + N <= rows {
            self.features::<S, M, N>(s, tokens.clone(), row);
            row += N;
        }
        while row < rows {
            self.features::<S, M, 1>(s, tokens.clone(), row);
            row += 1;
        }
    }

    #[inline(always)]
    fn features<S: Simd, const M: usize, const N: usize>(&self, s: S, tokens: std::ops::Range<usize>, row: usize) {
        let rows: [&[u8]; N] =
            std::array::from_fn(|n| &self.weights[(row + n) * self.row_len..(row + n + 1) * self.row_len]);
        let weights = WeightRows::<E, N>::of(rows);
        let mut share = Share { index: 0, of: tokens.len().div_ceil(M) };
        let mut token = tokens.start;
        while token + M <= tokens.end {
            self.block::<S, M, N>(s, token, (row, share), &weights);
            (token, share.index) = (token + M, share.index + 1);
        }
        if M > 4 && token + 4 <= tokens.end {
            self.block::<S, 4, N>(s, token, (row, share), &weights);
            (token, share.index) = (token + 4, share.index + 1);
        }
        if M > 2 && token + 2 <= tokens.end {
            self.block::<S, 2, N>(s, token, (row, share), &weights);
            (token, share.index) = (token + 2, share.index + 1);
        }
        while token < tokens.end {
            self.block::<S, 1, N>(s, token, (row, share), &weights);
            (token, share.index) = (token + 1, share.index + 1);
        }
    }

    #[inline(always)]
    fn block<S: Simd, const M: usize, const N: usize>(
        &self,
        s: S,
        token: usize,
        (row, share): (usize, Share),
        weights: &WeightRows<'_, E, N>,
    ) {
        let x: [&[E::X]; M] = std::array::from_fn(|m| self.x.row(token + m));
        let sums = weights.dots::<S, M>(s, x, share);
        for (m, sums) in sums.iter().enumerate() {
            self.out.set_sums(s, (token + m, self.first + row), sums);
        }
    }
}

/// Rows of weights that are multiplied together, cut once for all inputs.
struct WeightRows<'a, E: Element, const N: usize> {
    /// Whole steps, as many of each.
    steps: [&'a [E::W]; N],
    /// What each row has behind them.
    rest: Option<[E::W; N]>,
    /// The first of the rows, from where on the next ones are counted.
    first: &'a [u8],
}

impl<'a, E: Element, const N: usize> WeightRows<'a, E, N> {
    #[inline(always)]
    fn of(rows: [&'a [u8]; N]) -> Self {
        let steps: [&[E::W]; N] = std::array::from_fn(|n| E::steps(rows[n]));
        let rest = E::rest(rows[0]).map(|first| {
            let mut rest = [first; N];
            rest.iter_mut().zip(rows).for_each(|(place, row)| *place = E::rest(row).unwrap_or(*place));
            rest
        });
        Self { steps, rest, first: rows[0] }
    }

    #[inline(always)]
    fn dots<S: Simd, const M: usize>(&self, s: S, x: [&[E::X]; M], share: Share) -> [[S::V; N]; M] {
        let whole = self.steps[0].len().min(x[0].len());
        // all of one length, so that the loop needs no bounds checks
        let w: [&[E::W]; N] = std::array::from_fn(|n| &self.steps[n][..whole]);
        let heads: [&[E::X]; M] = std::array::from_fn(|m| &x[m][..whole]);
        let mut acc = [[s.splat(0.0); N]; M];
        // one row: the next, or more where rows are short; several: as many as these, from so far behind them on
        let ahead = if N == 1 { self.first.len().max(AHEAD_MIN) } else { N * self.first.len() + AHEAD_MIN };
        // more than `N` blocks would ask for rows beyond the next ones. It is written so that the compiler sees that there are `N` lines at most: each
        // is then an instruction of its own, and no loop
        let lines = if share.index < share.of.min(N) { N.div_ceil(share.of) } else { 0 };
        let mut next = ahead + share.index * whole * lines * size_of::<E::W>();
        for step in 0..whole {
            if S::WIDE {
                for line in 0..N {
                    if line < lines {
                        s.prefetch_far(self.first, next + line * size_of::<E::W>());
                    }
                }
                next += lines * size_of::<E::W>();
            }
            for n in 0..N {
                for m in 0..M {
                    acc[m][n] = E::mac(s, acc[m][n], &heads[m][step], &w[n][step]);
                }
            }
        }
        if let Some(rest) = &self.rest {
            for n in 0..N {
                for m in 0..M {
                    acc[m][n] = E::mac(s, acc[m][n], &x[m][whole], &rest[n]);
                }
            }
        }
        acc
    }
}
