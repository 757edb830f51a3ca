//! `cargo bench -p engine --bench programs`: steps by their programs against the same steps run eagerly, in interleaved pairs. Prints the
//! ratio of times (eager / program) of each shape: median, 10th and 90th percentile; above 1 the program is faster.
//!
//! `-- count tiny|large eager|program STEPS` runs so many steps of one request and nothing else, for a counter of instructions around it
//! (`valgrind --tool=callgrind`); the difference of two numbers of steps leaves the start out.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark that cannot run must fail")]

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use engine::model::{KvShape, LogitsWanted, Model, RandomShape, SeqInput, StepBatch, eager_random_model, random_model};
use engine::weights::WeightType;

const BLOCK_SIZE: usize = 16;
const TINY: RandomShape = RandomShape {
    hidden: 64,
    intermediate: 160,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    vocab: 1536,
    seq_len_max: 4096,
};
const LARGE: RandomShape = RandomShape::QWEN3_0_6B;
/// Position of the tokens that are run.
const DEPTH: usize = 100;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["count", size, way, steps] => count(size, way == "eager", steps.parse().expect("a number of steps")),
        _ => pairs(),
    }
}

fn model(size: &str, eager: bool, threads: usize) -> Box<dyn Model> {
    let (shape, kind) = if size == "tiny" { (TINY, WeightType::Q8_0) } else { (LARGE, WeightType::Q8_0) };
    let model = if eager { eager_random_model(shape, kind, threads) } else { random_model(shape, kind, kind, threads) };
    let mut model = model.expect("sizes are whole blocks");
    model.allocate_kv(KvShape { num_blocks: 16 * 8, block_size: BLOCK_SIZE }).expect("memory for the cache");
    model
}

/// `requests` requests of `tokens` tokens each.
fn batch(requests: usize, tokens: usize) -> StepBatch {
    let seq = |lane: usize| SeqInput {
        tokens: (0..tokens).map(|token| (token + lane) as u32).collect(),
        start_pos: DEPTH,
        block_table: (0..8).map(|block| (lane * 8 + block) as u32).collect(),
        logits: if tokens == 1 { LogitsWanted::Last } else { LogitsWanted::All },
    };
    StepBatch::of((0..requests).map(seq).collect())
}

fn replays(model: &dyn Model) -> u64 {
    model.programs().map_or(0, |counts| counts.replayed.load(Relaxed))
}

/// Runs the step until its program is there.
fn until_replayed(model: &mut dyn Model, batch: &StepBatch) {
    let before = replays(model);
    while replays(model) == before {
        model.forward(batch).expect("a step");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn count(size: &str, eager: bool, steps: usize) {
    let (mut model, batch) = (model(size, eager, 1), batch(1, 1));
    if !eager {
        until_replayed(model.as_mut(), &batch);
    }
    (0..steps).for_each(|_| drop(model.forward(&batch).expect("a step")));
}

fn pairs() {
    for (size, steps) in [("tiny", 2000), ("large", 60)] {
        let mut models = [model(size, true, 1), model(size, false, 1)];
        for (requests, tokens) in [(1, 1), (8, 1), (4, 3)] {
            let batch = batch(requests, tokens);
            until_replayed(models[1].as_mut(), &batch);
            let mut time = |which: usize| {
                let began = Instant::now();
                models[which].forward(&batch).expect("a step");
                began.elapsed().as_secs_f64()
            };
            // the one that goes first changes from pair to pair
            let pair = |i: usize| {
                if i.is_multiple_of(2) {
                    let a = time(0);
                    (a, time(1))
                } else {
                    let b = time(1);
                    (time(0), b)
                }
            };
            let mut ratios: Vec<f64> = (0..steps).map(pair).map(|(eager, program)| eager / program).collect();
            ratios.sort_by(f64::total_cmp);
            let at = |share: f64| ratios[((ratios.len() - 1) as f64 * share) as usize];
            let (median, low, high) = (at(0.5), at(0.1), at(0.9));
            println!("program_{size}_{requests}x{tokens}_speedup {median:.3} ratio 1.0  # p10 {low:.3} p90 {high:.3}");
        }
    }
}
