//! What a query has seen so far: running maximum and sum of its softmax, tile after tile.

use super::{GROUP, TILE};
use crate::backend::cpu::kernels::MAGIC;
use crate::raw::Simd;

/// The positions that a query sees, and its softmax over those of the tiles so far.
pub struct Seen {
    /// Positions `first..=last` are seen.
    pub first: usize,
    pub last: usize,
    pub max: f32,
    pub sum: f32,
}

impl Seen {
    pub fn new(first: usize, last: usize) -> Self {
        Self { first, last, max: f32::NEG_INFINITY, sum: 0.0 }
    }

    /// Whether it sees none of these positions.
    pub fn misses(&self, positions: &std::ops::Range<usize>) -> bool {
        self.last < positions.start || self.first >= positions.end
    }

    /// Turns the scores of the tile at `start` into weights, takes them into maximum and sum, and shrinks what was mixed before.
    #[inline(always)]
    pub fn absorb<S: Simd>(&mut self, s: S, start: usize, weights: &mut [f32; TILE], mixed: &mut [f32]) {
        self.hide(start, weights);
        let mut tops = [self.max; GROUP];
        for chunk in weights.as_chunks::<GROUP>().0 {
            for (top, score) in tops.iter_mut().zip(chunk) {
                *top = if *score > *top { *score } else { *top };
            }
        }
        let max = tops.into_iter().fold(self.max, |max, top| if top > max { top } else { max });
        if max == f32::NEG_INFINITY {
            // nothing seen yet; but scores that are no numbers must stay so
            let broken = weights.iter().any(|score| score.is_nan());
            self.sum = if broken { f32::NAN } else { self.sum };
            *weights = [0.0; TILE];
            return;
        }
        let shrink = exp(self.max - max);
        // one loop over all of them becomes vector instructions, loops over sixteen are unrolled before that
        for score in weights.iter_mut() {
            *score = exp(*score - max);
        }
        let mut sum = s.splat(0.0);
        for chunk in weights.as_chunks::<GROUP>().0 {
            sum = s.add(sum, s.load(chunk));
        }
        self.sum = self.sum * shrink + s.fold(sum);
        self.max = max;
        if shrink != 1.0 {
            for value in mixed {
                *value *= shrink;
            }
        }
    }

    /// Takes out what is not seen of the tile at `start`.
    #[inline(always)]
    fn hide(&self, start: usize, scores: &mut [f32; TILE]) {
        if self.first <= start && self.last + 1 >= start + TILE {
            return;
        }
        let within = |position: usize| position.saturating_sub(start).min(TILE) as u32;
        let (from, to) = (within(self.first), within(self.last + 1));
        for (at, score) in (0..).zip(scores) {
            *score = if from <= at && at < to { *score } else { f32::NEG_INFINITY };
        }
    }
}

/// `e^x` for `x <= 0` to about one part in 10^7, in plain operations that become vector instructions; NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let clamped = if x < -87.0 { -87.0 } else { x };
    let whole = clamped * std::f32::consts::LOG2_E + MAGIC;
    let power = (whole.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    let whole = whole - MAGIC;
    // ln 2 in two parts, so that the rest keeps its low bits
    let rest = clamped - whole * 0.693_359_4 + whole * 2.121_944_4e-4;
    let p = 1.987_569_1e-4 * rest + 1.398_199_9e-3;
    let p = p * rest + 8.333_452e-3;
    let p = p * rest + 4.166_579_6e-2;
    let p = p * rest + 1.666_666_6e-1;
    let p = p * rest + 0.5;
    let p = p * rest * rest + rest + 1.0;
    let value = p * f32::from_bits((power.wrapping_add(127) << 23) as u32);
    if x < -87.0 { 0.0 } else { value }
}
