//! The arithmetic of one panel with a few inputs: whole numbers inside a block, f32 between blocks in their order. Each type of weights has its
//! own, written once for all instruction sets.

pub mod units;

use super::panels::{BLOCKS_PER_UNIT, Line};
use super::quantised::{QuantBlock, QuantBytes, Quantised};
use crate::raw::Simd;

/// Where weights are asked for, and how many bytes ahead of the arithmetic: about what memory delivers while one answer is on its way.
#[derive(Clone, Copy)]
pub enum Ask {
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
pub trait Kind: Send + Sync {
    /// How inputs go by.
    type X: Quantised;
    /// How weights are asked for where one input goes by, or two.
    const OF_FEW: Ask;
    fn dots<S: Simd, const M: usize, const F: bool>(
        s: S,
        x: [&[Self::X]; M],
        lines: &[Line],
        scales: &[u8],
    ) -> [S::V; M];
}

/// 32 inputs, whatever they share their scale with.
trait Scaled {
    fn bytes(&self) -> &QuantBytes;
    /// What a scale of the weights becomes with that of these inputs.
    fn scaled<S: Simd>(&self, s: S, scale: S::V) -> S::V;
}

impl Scaled for QuantBlock {
    #[inline(always)]
    fn bytes(&self) -> &QuantBytes {
        &self.bytes
    }
    #[inline(always)]
    fn scaled<S: Simd>(&self, s: S, scale: S::V) -> S::V {
        s.mul(scale, s.splat(self.scale))
    }
}

pub struct Q8;
pub struct Q4K;
pub struct Q6K;

impl Kind for Q8 {
    type X = QuantBlock;
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
                    let x = x[m][b].bytes.groups[g];
                    sums[m] = if M == 1 { s.dot_u8_i8(sums[m], w, x) } else { s.dot_high(sums[m], w, x) };
                }
            }
            let scale = s.load_f16(scales);
            for m in 0..M {
                acc[m] = s.fma(s.to_f32(sums[m]), x[m][b].scaled(s, scale), acc[m]);
            }
        }
        acc
    }
}

impl Kind for Q4K {
    type X = QuantBlock;
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
                let b = unit * BLOCKS_PER_UNIT + i;
                let bytes: [&QuantBytes; M] = std::array::from_fn(|m| &x[m][b].bytes);
                let of_block = four_bit_sums::<S, Self, M, F>(s, &bytes, lines);
                let scale = s.mul(d, s.load_u8(&per_block[2 * i]));
                let offset = s.mul(d_offset, s.load_u8(&per_block[2 * i + 1]));
                for m in 0..M {
                    let sums = s.to_f32(of_block[m]);
                    acc[m] = s.fma(sums, x[m][b].scaled(s, scale), acc[m]);
                    acc[m] = s.fma(offset, s.splat(x[m][b].offset), acc[m]);
                }
            }
        }
        acc
    }
}

impl Kind for Q6K {
    type X = QuantBlock;
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
                let x: [&QuantBlock; M] = std::array::from_fn(|m| &x[m][unit * BLOCKS_PER_UNIT + i]);
                let scales = [s.mul(d, s.load_i8(&per_half[2 * i])), s.mul(d, s.load_i8(&per_half[2 * i + 1]))];
                add_six_bits::<S, Self, _, M, F>(s, (&x, lines, scales), &mut acc);
            }
        }
        acc
    }
}

/// Adds a block of six bits, whose halves have the weights' scales `scales`.
#[inline(always)]
fn add_six_bits<S: Simd, K: Kind, X: Scaled, const M: usize, const F: bool>(
    s: S,
    block: (&[&X; M], &[Line; 6], [S::V; 2]),
    acc: &mut [S::V; M],
) {
    // both halves together, where there are registers for it: what an input adds to a scale is spread over the lanes once
    if S::WIDE && M > 1 {
        add_halves::<S, K, X, M, F, 2>(s, block, 0, acc);
    } else {
        add_halves::<S, K, X, M, F, 1>(s, block, 0, acc);
        add_halves::<S, K, X, M, F, 1>(s, block, 1, acc);
    }
}

/// Adds `H` halves of a block with their scales, from `first` on.
#[inline(always)]
fn add_halves<S: Simd, K: Kind, X: Scaled, const M: usize, const F: bool, const H: usize>(
    s: S,
    (x, lines, scales): (&[&X; M], &[Line; 6], [S::V; 2]),
    first: usize,
    acc: &mut [S::V; M],
) {
    let bytes: [&QuantBytes; M] = std::array::from_fn(|m| x[m].bytes());
    let sums = six_bit_sums::<S, K, M, F, H>(s, &bytes, lines, first);
    for m in 0..M {
        for h in 0..H {
            acc[m] = s.fma(s.to_f32(sums[h][m]), x[m].scaled(s, scales[first + h]), acc[m]);
        }
    }
}

/// Sums of a block of four bits.
#[inline(always)]
fn four_bit_sums<S: Simd, K: Kind, const M: usize, const F: bool>(
    s: S,
    x: &[&QuantBytes; M],
    lines: &[Line; 4],
) -> [S::I; M] {
    let none = s.splat_i32(0);
    let mut sums = [s.begin_few(none); M];
    for (g, line) in lines.iter().enumerate() {
        let both = read::<S, K, M, F>(s, line);
        let (low, high) = (s.low(both), s.high(both));
        for m in 0..M {
            sums[m] = s.dot_few(sums[m], low, x[m].groups[g]);
            sums[m] = s.dot_few(sums[m], high, x[m].groups[g + 4]);
        }
    }
    for sums in &mut sums {
        *sums = s.end_few(none, *sums);
    }
    sums
}

/// Sums of `H` halves of a block, from `first` on.
#[inline(always)]
fn six_bit_sums<S: Simd, K: Kind, const M: usize, const F: bool, const H: usize>(
    s: S,
    x: &[&QuantBytes; M],
    lines: &[Line; 6],
    first: usize,
) -> [[S::I; M]; H] {
    // loops and no closures: one that is not inlined is compiled without the set's instructions
    let mut sums = [[s.splat_i32(0); M]; H];
    let mut high = [s.load_bytes(&lines[4 + first]); H];
    for h in 0..H {
        high[h] = read::<S, K, M, F>(s, &lines[4 + first + h]);
        for m in 0..M {
            sums[h][m] = s.splat_i32(x[m].too_high_32[first + h]);
        }
    }
    for (pair, lines) in lines[..4].as_chunks::<2>().0.iter().enumerate() {
        let both = [read::<S, K, M, F>(s, &lines[0]), read::<S, K, M, F>(s, &lines[1])];
        for h in 0..H {
            let (group, second) = ((first + h) * 4 + 2 * pair, first + h == 1);
            let w0 = six_bits(s, (both[0], second), high[h], 2 * pair);
            let w1 = six_bits(s, (both[1], second), high[h], 2 * pair + 1);
            for m in 0..M {
                let few = s.dot_few(s.begin_few(sums[h][m]), w0, x[m].groups[group]);
                sums[h][m] = s.end_few(sums[h][m], s.dot_few(few, w1, x[m].groups[group + 1]));
            }
        }
    }
    sums
}

/// Weights of a half of a block, 32 too high: low bits of one line, the two high ones of another.
#[inline(always)]
fn six_bits<S: Simd>(s: S, (both, second): (S::B, bool), high: S::B, group: usize) -> S::B {
    s.with_two_bits(if second { s.high(both) } else { s.low(both) }, high, group)
}
