//! The arithmetic of single rows. Each function's order of summation depends on lengths alone (EP4).

use crate::raw::{Op, Simd};

/// Partial sums kept apart in [`dot`]: enough independent chains to hide the latency of an add, and vectorisable as is.
const LANES: usize = 16;

/// 1.5 · 2^23: adding it leaves the nearest whole number in the low bits.
pub const MAGIC: f32 = 12_582_912.0;

/// Dot product of two slices of equal length.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a_body, a_tail) = a.as_chunks::<LANES>();
    let (b_body, b_tail) = b.as_chunks::<LANES>();
    let mut sums = [0.0f32; LANES];
    for (a, b) in a_body.iter().zip(b_body) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let mut tail = 0.0;
    for (a, b) in a_tail.iter().zip(b_tail) {
        tail += a * b;
    }
    fold(sums) + tail
}

/// Sums the lanes by halves.
#[inline(always)]
fn fold(mut sums: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            sums[lane] += sums[lane + half];
        }
        half /= 2;
    }
    sums[0]
}

/// Sixteen values, or fewer with zeros behind them.
#[inline(always)]
pub fn with_zeros(values: &[f32]) -> [f32; LANES] {
    if let Some(whole) = values.first_chunk() {
        return *whole;
    }
    let mut padded = [0.0; LANES];
    for (place, value) in padded.iter_mut().zip(values) {
        *place = *value;
    }
    padded
}

/// RMSNorm of one group in place.
pub struct RmsNormOp<'a> {
    pub group: &'a mut [f32],
    pub weight: &'a [f32],
    pub eps: f32,
}

impl Op for RmsNormOp<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let mean_square = dot(self.group, self.group) / self.group.len() as f32;
        let scale = 1.0 / (mean_square + self.eps).sqrt();
        for (x, weight) in self.group.iter_mut().zip(self.weight) {
            *x = weight * (*x * scale);
        }
    }
}

/// Rotary embedding of the heads of one row: pair `i` is `(i, i + half)`, as in the Hugging Face layout.
pub struct RotateOp<'a> {
    pub heads: &'a mut [f32],
    pub cos: &'a [f32],
    pub sin: &'a [f32],
}

impl Op for RotateOp<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for head in self.heads.chunks_exact_mut(2 * self.cos.len()) {
            let (low, high) = head.split_at_mut(self.cos.len());
            for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(self.cos).zip(self.sin) {
                let (a, b) = (*low, *high);
                *low = a * cos - b * sin;
                *high = b * cos + a * sin;
            }
        }
    }
}

/// `x · sigmoid(x)`, by an exponential that cannot overflow.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    let small = super::attention::exp(-x.abs());
    let top = if x > 0.0 { 1.0 } else { small };
    x * top / (1.0 + small)
}
