//! `cargo bench -p engine --bench attention`: attention of one new token over a cache in bf16, alone, at three depths, beside a plain read of as
//! many bytes by as many threads in the same round. Prints `name value unit goal`; behind it the least and the most of the rounds.
//!
//! At each depth as many layers are gone through as together exceed any cache, as in a step, where weights come between one layer and its
//! next turn. Arguments after `--`: `--threads N`, and names of instruction sets instead of the best one.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark that cannot run must fail")]

mod arguments;
mod roofline;

use std::time::Instant;

use engine::backend::cpu::{CpuBackend, Isa, Kv, Matrix};
use engine::backend::{AttentionSeq, Backend, HeadShape, KvSize};
use engine::model::RandomShape;
use engine::weights::WeightType;
use roofline::Roofline;

const SHAPE: RandomShape = RandomShape::QWEN3_0_6B;
const HEADS: HeadShape = HeadShape { heads: SHAPE.heads, kv_heads: SHAPE.kv_heads, head_dim: SHAPE.head_dim };
const BLOCK_SIZE: usize = 16;
const DEPTHS: [usize; 3] = [512, 2048, 8192];
/// Of K and V of a position, in bf16.
const POSITION_BYTES: usize = 2 * HEADS.kv_heads * HEADS.head_dim * 2;
/// Of all layers of a depth; as much as is read beside it.
const CACHE_BYTES: usize = 1 << 29;
const ROUNDS: usize = 5;
/// Of a round's, the quickest counts: as with the read beside it.
const TRIES: usize = 3;
/// A byte of the cache takes so many times what a byte takes that is only read.
const TIME_GOAL: f64 = 1.25;
/// Twice the depth takes two to the power of this times the time.
const GROWTH_GOAL: f64 = 1.05;

fn main() {
    let (threads, args) = arguments::threads_and_words();
    let named = |isa: &Isa| args.iter().any(|arg| arg == isa.name());
    let mut sets: Vec<Isa> = Isa::all().into_iter().filter(named).collect();
    if sets.is_empty() {
        sets.push(Isa::best());
    }
    for isa in sets {
        println!("# {threads} threads, {}", isa.name());
        let backend = CpuBackend::new(threads).with_isa(isa);
        let caches = DEPTHS.map(|depth| Cache::new(&backend, depth));
        let rounds: Vec<Round> = (0..ROUNDS).map(|_| Round::new(&backend, &caches, threads)).collect();
        report(&rounds);
    }
}

/// Layers of one depth.
struct Cache {
    kv: Kv,
    depth: usize,
    layers: usize,
}

impl Cache {
    fn new(backend: &CpuBackend, depth: usize) -> Self {
        let layers = CACHE_BYTES / (depth * POSITION_BYTES);
        let size = KvSize { layers, num_blocks: depth / BLOCK_SIZE, block_size: BLOCK_SIZE };
        let mut kv = backend.kv_cache(size, HEADS).expect("memory for the cache");
        let slots: Vec<usize> = (0..depth).collect();
        let [k, v] = [1, 2].map(|seed| matrix(backend, depth, HEADS.kv_heads * HEADS.head_dim, seed));
        (0..layers).for_each(|layer| backend.store_kv(&mut kv, layer, &k, &v, &slots));
        Self { kv, depth, layers }
    }

    /// Seconds for each byte of the cache.
    fn time(&self, backend: &CpuBackend, q: &Matrix) -> f64 {
        let blocks: Vec<u32> = (0..(self.depth / BLOCK_SIZE) as u32).collect();
        let seq = AttentionSeq { rows: 1, start_pos: self.depth - 1, since: 0, blocks: &blocks };
        let start = Instant::now();
        for layer in 0..self.layers {
            let out = backend.attention(q, (&self.kv, layer), &[seq], HEADS, None);
            assert!(backend.rows(&out)[0][0].is_finite(), "no number");
        }
        start.elapsed().as_secs_f64() / (self.layers * self.depth * POSITION_BYTES) as f64
    }
}

/// Small repeatable numbers.
fn matrix(backend: &CpuBackend, rows: usize, cols: usize, seed: u64) -> Matrix {
    let mut random = seed;
    let values = (0..rows * cols).map(|_| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 40) as f32 / (1 << 23) as f32 - 1.0
    });
    backend.upload(rows, cols, values.collect())
}

/// What was measured in one minute.
struct Round {
    /// Seconds for each byte of a cache, by depth.
    seconds: [f64; DEPTHS.len()],
    /// The same of bytes that are only read.
    read_seconds: f64,
}

impl Round {
    fn new(backend: &CpuBackend, caches: &[Cache; DEPTHS.len()], threads: usize) -> Self {
        let q = matrix(backend, 1, HEADS.heads * HEADS.head_dim, 3);
        let before = Roofline::measure(threads, WeightType::Bf16);
        let mut seconds = [f64::INFINITY; DEPTHS.len()];
        for _ in 0..TRIES {
            for (best, cache) in seconds.iter_mut().zip(caches) {
                *best = best.min(cache.time(backend, &q));
            }
        }
        let after = Roofline::measure(threads, WeightType::Bf16);
        let read_bytes = before.read_bytes.max(after.read_bytes);
        println!("# read {:.1} GB/s, dot {:.0} Gop/s", read_bytes / 1e9, before.dot_ops.max(after.dot_ops) / 1e9);
        Self { seconds, read_seconds: 1.0 / read_bytes }
    }
}

fn report(rounds: &[Round]) {
    let line = |name: &str, unit: &str, goal: &str, of: &dyn Fn(&Round) -> f64| {
        let mut values: Vec<f64> = rounds.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        let (least, median, most) = (values[0], values[values.len() / 2], values[values.len() - 1]);
        println!("{name} {median:.3} {unit} {goal}  # {least:.3} to {most:.3}");
    };
    for (at, depth) in DEPTHS.iter().enumerate() {
        line(&format!("attention_d{depth}_cache_read"), "GB/s", "-", &|round| 1e-9 / round.seconds[at]);
        let goal = format!("<={TIME_GOAL}");
        line(&format!("attention_d{depth}_time_over_read"), "ratio", &goal, &|round| {
            round.seconds[at] / round.read_seconds
        });
    }
    for at in 1..DEPTHS.len() {
        let (less, more) = (DEPTHS[at - 1], DEPTHS[at]);
        let goal = format!("<={GROWTH_GOAL}");
        line(&format!("attention_growth_d{less}_d{more}"), "exponent", &goal, &|round| {
            // of the time for all, which has the depth in it once
            1.0 + (round.seconds[at] / round.seconds[at - 1]).ln() / (more as f64 / less as f64).ln()
        });
    }
}
