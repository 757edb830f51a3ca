//! What this machine can do in this minute: bytes read from memory, and products added, by as many threads as the engine uses.
#![allow(clippy::disallowed_methods, reason = "a bench may wait: who runs it has a deadline")]

use std::hint::black_box;
use std::time::Instant;

use engine::backend::cpu::Isa;
use engine::raw::large::LargeBytes;
use engine::raw::{Op, Simd};
use engine::weights::WeightType;

/// Beyond any cache that a share of is worth counting on.
const BUFFER_BYTES: usize = 1 << 29;
const ROUNDS: usize = 200_000;
/// Of a thread's part so much is left over, so that places which are read at a time do not lie at the same sets of a cache.
const SKEW_LINES: usize = 68;
/// Lines of a place that are read in one go.
const TURN_LINES: usize = 4;
const LINE: usize = 64;

/// A way to read.
#[derive(Debug, Clone, Copy)]
struct Way {
    /// Places that are read at a time: 1, 2, 4 or 8.
    places: usize,
    /// Bytes that are asked for in advance, as the kernels do (`Ask` in `backend/cpu/dots.rs`); 0: the processor's own foresight alone.
    ahead: usize,
    /// Into the second-level cache.
    far: bool,
}

/// Which is the best differs from processor to processor; what a kernel may do has to be among them, or it reads more than all there is.
const WAYS: [Way; 8] = [
    Way { places: 1, ahead: 0, far: false },
    Way { places: 4, ahead: 0, far: false },
    Way { places: 8, ahead: 0, far: false },
    Way { places: 1, ahead: 4 << 10, far: false },
    Way { places: 1, ahead: 4 << 10, far: true },
    Way { places: 1, ahead: 8 << 10, far: true },
    Way { places: 2, ahead: 4 << 10, far: true },
    Way { places: 4, ahead: 2 << 10, far: true },
];

#[derive(Debug, Clone, Copy)]
pub struct Roofline {
    /// A second.
    pub read_bytes: f64,
    /// A second; an addition and a product count as two.
    pub dot_ops: f64,
}

impl Roofline {
    /// Best of three of each; of reading the best way counts.
    pub fn measure(threads: usize, kind: WeightType) -> Self {
        // in large pages, as weights and caches lie; numbers, for what is too small for one takes many times as long to add
        let mut buffer = LargeBytes::zeroed(BUFFER_BYTES).expect("memory to read");
        buffer.as_chunks_mut().0.iter_mut().for_each(|place| *place = 1f32.to_le_bytes());
        let best = |f: &dyn Fn() -> f64| (0..3).map(|_| f()).fold(0.0, f64::max);
        let read_bytes = WAYS.map(|way| best(&|| read(threads, &buffer, way))).into_iter().fold(0.0, f64::max);
        Self { read_bytes, dot_ops: best(&|| dots(threads, kind)) }
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

fn read(threads: usize, buffer: &[u8], way: Way) -> f64 {
    let isa = Isa::best();
    let lines = buffer.as_chunks().0;
    let part = lines.len() / threads;
    let seconds = timed(threads, |thread| {
        black_box(isa.run(Read { lines: &lines[thread * part..(thread + 1) * part], way }));
    });
    (place_lines(part, way.places) * way.places * threads * LINE) as f64 / seconds
}

/// Lines of each place, of so many in all.
fn place_lines(lines: usize, places: usize) -> usize {
    (lines / places - SKEW_LINES) / TURN_LINES * TURN_LINES
}

/// Reads memory by the widest loads there are, and adds it up so that nothing is left out.
struct Read<'a> {
    lines: &'a [[u8; LINE]],
    way: Way,
}

impl Op for Read<'_> {
    type Out = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        match self.way.places {
            1 => self.places::<S, 1>(s),
            2 => self.places::<S, 2>(s),
            4 => self.places::<S, 4>(s),
            _ => self.places::<S, 8>(s),
        }
    }
}

impl Read<'_> {
    #[inline(always)]
    fn places<S: Simd, const N: usize>(&self, s: S) -> f32 {
        let (len, Way { ahead, far, .. }) = (place_lines(self.lines.len(), N), self.way);
        let places: [&[[[u8; LINE]; TURN_LINES]]; N] =
            std::array::from_fn(|n| self.lines[n * len..(n + 1) * len].as_chunks().0);
        let mut sums = [[s.splat(0.0); TURN_LINES]; N];
        for turn in 0..len / TURN_LINES {
            for (sums, place) in sums.iter_mut().zip(&places) {
                for (sum, line) in sums.iter_mut().zip(&place[turn]) {
                    match (ahead, far) {
                        (0, _) => {}
                        (_, true) => s.prefetch_far(line, ahead),
                        (_, false) => s.prefetch(line, ahead),
                    }
                    *sum = s.add(*sum, s.load_f32(line));
                }
            }
        }
        let mut sum = 0.0;
        for sums in sums {
            for lanes in sums {
                sum += s.fold(lanes);
            }
        }
        sum
    }
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
