//! Plain causal attention over contiguous K and V in f64, of numbers rounded as the cache and the kernel round them, and how far off a kernel
//! may be.

use half::bf16;

use super::super::*;

/// Of the sum of the sizes of what is added up for an output: f32 and the exponential, which are good to some parts in 10^7, over as many steps
/// as a few thousand positions take.
const F32_PART: f64 = 1e-5;
/// Of the root of the sum of squares of the same, where the weights of the softmax are rounded to bf16: each is off by 2^-9 of itself at most, this
/// way or that.
const BF16_PART: f64 = 4.0 / 512.0;

/// What a kernel rounds to bf16 before it multiplies.
#[derive(Debug, Clone, Copy)]
pub struct Rounds {
    /// K and V, in the cache.
    pub cache: bool,
    /// Q and the weights of the softmax.
    pub inputs: bool,
}

impl Rounds {
    pub fn of(isa: Isa, precision: Precision) -> Self {
        let native = precision == Precision::Native;
        Self { cache: native, inputs: native && isa.multiplies_bf16() }
    }
}

/// One output.
pub struct Want {
    pub value: f64,
    pub off_max: f64,
}

impl Want {
    pub fn is_met_by(&self, got: f64) -> bool {
        (got - self.value).abs() <= self.off_max
    }
}

pub fn rounded(x: &Matrix, wanted: bool) -> Matrix {
    let round = |value: &f32| if wanted { bf16::from_f32(*value).to_f32() } else { *value };
    Matrix { rows: x.rows, cols: x.cols, values: x.values.iter().map(round).collect() }
}

/// One row's outputs, of a cache that is rounded already; it sees the positions `seen`.
pub fn plain(
    q: &[f32],
    (k, v): (&Matrix, &Matrix),
    seen: impl Iterator<Item = usize> + Clone,
    heads: HeadShape,
    rounds: Rounds,
) -> Vec<Want> {
    let d = heads.head_dim;
    let scaled = q.iter().map(|q| q * (1.0 / (d as f32).sqrt()));
    let q: Vec<f64> = scaled.map(|q| f64::from(if rounds.inputs { bf16::from_f32(q).to_f32() } else { q })).collect();
    let mut out = Vec::new();
    for (head, q) in q.chunks_exact(d).enumerate() {
        let at = head / (heads.heads / heads.kv_heads) * d;
        let score = |p: usize| q.iter().zip(&k.row(p)[at..]).map(|(q, k)| q * f64::from(*k)).sum::<f64>().exp();
        let weights: Vec<f64> = seen.clone().map(score).collect();
        let total: f64 = weights.iter().sum();
        out.extend((0..d).map(|i| {
            let parts = seen.clone().zip(&weights).map(|(p, w)| w / total * f64::from(v.row(p)[at + i]));
            let (mut value, mut size, mut squares) = (0.0, 0.0, 0.0);
            for part in parts {
                (value, size, squares) = (value + part, size + part.abs(), squares + part * part);
            }
            let inputs = if rounds.inputs { BF16_PART * squares.sqrt() } else { 0.0 };
            Want { value, off_max: F32_PART * size + inputs + 1e-7 }
        }));
    }
    out
}
