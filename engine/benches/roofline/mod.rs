//! What this machine can do in this minute: bytes read from memory, and products added, by as many threads as the engine uses.
#![allow(clippy::disallowed_methods, reason = "a bench may wait: who runs it has a deadline")]

use std::hint::black_box;
use std::time::Instant;

use engine::backend::cpu::Isa;
use engine::raw::{Op, Simd};
use engine::weights::WeightType;

/// Beyond any cache that a share of is worth counting on.
const BUFFER_BYTES: usize = 1 << 29;
const ROUNDS: usize = 200_000;

#[derive(Debug, Clone, Copy)]
pub struct Roofline {
    /// A second.
    pub read_bytes: f64,
    /// A second; an addition and a product count as two.
    pub dot_ops: f64,
}

impl Roofline {
    /// Best of three of each.
    pub fn measure(threads: usize, kind: WeightType) -> Self {
        let buffer = vec![1u64; BUFFER_BYTES / 8];
        let best = |f: &dyn Fn() -> f64| (0..3).map(|_| f()).fold(0.0, f64::max);
        Self { read_bytes: best(&|| read(threads, &buffer)), dot_ops: best(&|| dots(threads, kind)) }
    }
}

fn timed(threads: usize, f: impl Fn(usize) + Sync) -> f64 {
    let start = Instant::now();
    std::thread::scope(|scope| {
        let f = &f;
        (0..threads).for_each(|thread| drop(scope.spawn(move || f(thread))));
    });
    start.elapsed().as_secs_f64()
}

fn read(threads: usize, buffer: &[u64]) -> f64 {
    let part = buffer.len() / threads;
    let seconds = timed(threads, |thread| {
        let mut sums = [0u64; 32];
        for chunk in buffer[thread * part..(thread + 1) * part].as_chunks::<32>().0 {
            sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum ^= x);
        }
        black_box(sums);
    });
    (part * threads * 8) as f64 / seconds
}

fn dots(threads: usize, kind: WeightType) -> f64 {
    let isa = Isa::best();
    let per_round = match kind {
        WeightType::Q8_0 | WeightType::Q4K | WeightType::Q6K => 64,
        WeightType::Bf16 if isa.multiplies_bf16() => 32,
        WeightType::Bf16 | WeightType::F32 | WeightType::F16 => 16,
    } * ACCUMULATORS
        * 2;
    let seconds = timed(threads, |_| {
        black_box(isa.run(Peak(kind)));
    });
    (ROUNDS * per_round * threads) as f64 / seconds
}

const ACCUMULATORS: usize = 12;

/// Multiplies registers with each other; in loops, not closures, which are not compiled with the instructions of `S`.
struct Peak(WeightType);

impl Op for Peak {
    type Out = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let bytes = black_box([1u8; 64]);
        let mut acc = [s.splat(0.0); ACCUMULATORS];
        match self.0 {
            WeightType::Q8_0 | WeightType::Q4K | WeightType::Q6K => {
                let (w, x, mut sums) = (s.load_bytes(&bytes), black_box(0x0101_0101), [s.splat_i32(0); ACCUMULATORS]);
                for _ in 0..ROUNDS {
                    for sum in &mut sums {
                        *sum = s.dot_u8_i8(*sum, w, x);
                    }
                }
                acc = sums.map(|sum| s.to_f32(sum));
            }
            WeightType::Bf16 if S::PAIRS => {
                for _ in 0..ROUNDS {
                    for acc in &mut acc {
                        *acc = s.dot_bf16(*acc, &bytes, &bytes);
                    }
                }
            }
            WeightType::Bf16 | WeightType::F32 | WeightType::F16 => {
                let x = s.splat(black_box(1.0));
                for _ in 0..ROUNDS {
                    for acc in &mut acc {
                        *acc = s.fma(x, x, *acc);
                    }
                }
            }
        }
        acc.into_iter().map(|acc| s.fold(acc)).sum()
    }
}
