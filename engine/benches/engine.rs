//! `cargo bench -p engine`: decode and prefill of a 0.6B shape with random weights, beside the read bandwidth and the dot-product peak that
//! this process measured just before and after. Prints `name value unit goal`; the spread is the 10th and 90th percentile.
//!
//! Absolute figures belong to the machine and the minute; shares of the roofline carry over. Arguments after `--`: parts of
//! cell names to run, and `--threads N`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark that cannot run must fail")]

mod arguments;
mod roofline;

use std::time::Instant;

use engine::model::{KvShape, LogitsWanted, Model, RandomShape, SeqInput, StepBatch, random_model};
use engine::weights::WeightType;
use roofline::Roofline;

const SHAPE: RandomShape = RandomShape::QWEN3_0_6B;
const BLOCK_SIZE: usize = 16;
const DEPTHS: [usize; 3] = [0, 2048, 8192];
const PROMPT: usize = 512;

struct Format {
    name: &'static str,
    kind: WeightType,
    embed: WeightType,
}

const FORMATS: [Format; 4] = [
    Format { name: "q8_0", kind: WeightType::Q8_0, embed: WeightType::Q8_0 },
    // Q4_K_M keeps the embedding, which is also the head, in Q6_K; it also does so with half of V and down, which is left out here
    Format { name: "q4_k", kind: WeightType::Q4K, embed: WeightType::Q6K },
    Format { name: "bf16", kind: WeightType::Bf16, embed: WeightType::Bf16 },
    Format { name: "f32", kind: WeightType::F32, embed: WeightType::F32 },
];

fn main() {
    let (threads, wanted) = arguments::threads_and_words();
    println!("# {threads} threads, {}", engine::backend::cpu::Isa::best().name());
    for format in &FORMATS {
        let cells = cells(format);
        let cells: Vec<_> = cells
            .into_iter()
            .filter(|cell| wanted.is_empty() || wanted.iter().any(|part| cell.name.contains(part)))
            .collect();
        if cells.is_empty() {
            continue;
        }
        let mut model = random_model(SHAPE, format.kind, format.embed, threads).expect("sizes are whole blocks");
        let num_blocks = 8 * 64 + (DEPTHS[2] + PROMPT) / BLOCK_SIZE + 8;
        model.allocate_kv(KvShape { num_blocks, block_size: BLOCK_SIZE }).expect("memory for the cache");
        cells.iter().for_each(|cell| cell.run(model.as_mut(), format, threads));
    }
}

struct Cell {
    name: String,
    /// Rows of each sequence in a step.
    rows: usize,
    sequences: usize,
    depth: usize,
    /// Share of the roofline to reach, in percent.
    goal: f64,
}

fn cells(format: &Format) -> Vec<Cell> {
    let name = |what: &str| format!("{}_{what}", format.name);
    let decode = |depth: &usize| Cell {
        name: name(&format!("decode_d{depth}")),
        rows: 1,
        sequences: 1,
        depth: *depth,
        goal: 60.0,
    };
    let mut cells: Vec<Cell> = DEPTHS.iter().map(decode).collect();
    cells.push(Cell { name: name("decode_batch8"), rows: 1, sequences: 8, depth: 0, goal: 60.0 });
    cells.push(Cell { name: name(&format!("prefill_{PROMPT}")), rows: PROMPT, sequences: 1, depth: 0, goal: 40.0 });
    cells
}

impl Cell {
    fn run(&self, model: &mut dyn Model, format: &Format, threads: usize) {
        let before = Roofline::measure(threads, format.kind);
        let batch = self.batch();
        let steps = if self.rows > 1 { 4 } else { 16 };
        let mut seconds: Vec<f64> = (0..steps + 2)
            .map(|_| {
                let start = Instant::now();
                let logits = model.forward(&batch).expect("a step");
                assert!(logits.rows[0][0][0].is_finite(), "the step gave no numbers");
                start.elapsed().as_secs_f64()
            })
            .skip(2)
            .collect();
        seconds.sort_by(f64::total_cmp);
        let after = Roofline::measure(threads, format.kind);
        let (read_bytes, dot_ops) = (before.read_bytes.max(after.read_bytes), before.dot_ops.max(after.dot_ops));
        let tokens = (self.rows * self.sequences) as f64;
        let at = |share: f64| tokens / seconds[((seconds.len() - 1) as f64 * share).round() as usize];
        let (name, speed) = (&self.name, at(0.5));
        println!("{name} {speed:.2} tok/s - # p10 {:.2} p90 {:.2}", at(0.9), at(0.1));
        let (share, of) = if self.rows > 1 {
            (2.0 * SHAPE.layer_weights() as f64 * speed / dot_ops, "dot_peak")
        } else {
            (self.bytes(format) * speed / tokens / read_bytes, "read_bandwidth")
        };
        println!("{name}_share_of_{of} {:.1} % {}", share * 100.0, self.goal);
        println!("# read {:.1} GB/s, dot {:.0} Gop/s", read_bytes / 1e9, dot_ops / 1e9);
    }

    fn batch(&self) -> StepBatch {
        let seq = |index: usize| {
            let blocks = (self.depth + self.rows).div_ceil(BLOCK_SIZE);
            SeqInput {
                tokens: (0..self.rows).map(|row| (row * 7919 % SHAPE.vocab) as u32).collect(),
                start_pos: self.depth,
                block_table: (0..blocks).map(|block| (index * blocks + block) as u32).collect(),
                logits: LogitsWanted::Last,
            }
        };
        StepBatch::of((0..self.sequences).map(seq).collect())
    }

    /// Bytes a step must read: every weight once, and the cache of each sequence.
    fn bytes(&self, format: &Format) -> f64 {
        let per_weight = |kind: WeightType| kind.block().1 as f64 / kind.block().0 as f64;
        let weights = SHAPE.layer_weights() as f64 * per_weight(format.kind)
            + (SHAPE.vocab * SHAPE.hidden) as f64 * per_weight(format.embed);
        let kv_size = if format.kind == WeightType::F32 { 4 } else { 2 };
        let per_token = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * kv_size;
        weights + (self.sequences * (self.depth + 1) * per_token) as f64
    }
}
