//! Times cells of this engine on command, in a process that keeps its model: one side of `make bench-peers`, whose other side is
//! `tests/peers/llama_cell.cpp`, with the same words.
//!
//! `cells MODEL THREADS CONTEXT` reads lines `KIND SETTING …` and answers each with `WALL_S CPU_S`: `prefill - TOKENS`,
//! `decode - DEPTH TOKENS`, `batch - SEQS DEPTH TOKENS`; and `roofline` with bytes read and products added a second.
#![allow(clippy::expect_used, clippy::panic, reason = "a benchmark that cannot run must fail")]

mod roofline;

use std::path::PathBuf;
use std::time::Instant;

use engine::model::{KvShape, LoadOptions, LogitsWanted, Model, SeqInput, StepBatch, load_model_with};
use engine::weights::WeightType;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use roofline::Roofline;

const BLOCK_SIZE: usize = 16;
const PROMPT_STEP: usize = 512;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let [model, threads, context] = &args[..] else {
        // `cargo bench` runs every benchmark without a word
        println!("# cells: a part of `make bench-peers`");
        return;
    };
    let threads = threads.parse().expect("a number of threads");
    let mut cells = Cells::load(model.into(), threads, context.parse().expect("a number of tokens"));
    println!("ready");
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        let (kind, rest) = line.split_once(' ').unwrap_or((&line, ""));
        // the second word is a setting of the other engine
        let numbers: Vec<usize> = rest.split(' ').skip(1).map(|word| word.parse().expect("a number")).collect();
        match (kind, &numbers[..]) {
            ("prefill", [tokens]) => cells.time(&[0], 0, &[*tokens]),
            ("decode", [depth, tokens]) => cells.time(&[0], *depth, &vec![1; *tokens]),
            ("batch", [seqs, depth, tokens]) => {
                // sequence 0 stays as deep as it is
                cells.time(&(1..=*seqs).collect::<Vec<_>>(), *depth, &vec![1; *tokens]);
            }
            ("roofline", []) => {
                let kind = if model.contains("bf16") { WeightType::Bf16 } else { WeightType::Q8_0 };
                let Roofline { read_bytes, dot_ops } = Roofline::measure(threads, kind);
                println!("{read_bytes:.0} {dot_ops:.0}");
            }
            _ => panic!("bad command {line:?}"),
        }
    }
}

struct Cells {
    model: Box<dyn Model>,
    vocab: u64,
    random: u64,
    /// Blocks of sequence 0; the others have `SHORT` each.
    long: usize,
    /// Tokens behind each sequence that are in the cache.
    filled: Vec<usize>,
}

/// Blocks of a sequence of a batch.
const SHORT: usize = 512 / BLOCK_SIZE;
const SEQS_MAX: usize = 16;

impl Cells {
    fn load(path: PathBuf, threads: usize, context: usize) -> Self {
        let options = LoadOptions { threads: Some(threads), ..LoadOptions::default() };
        let mut model = load_model_with(&path, &options, &mut |_, _| ()).expect("a model");
        let long = context.div_ceil(BLOCK_SIZE);
        let num_blocks = long + SEQS_MAX * SHORT;
        model.allocate_kv(KvShape { num_blocks, block_size: BLOCK_SIZE }).expect("memory for the cache");
        let vocab = model.info().vocab_size as u64;
        Self { model, vocab, random: 1, long, filled: vec![0; SEQS_MAX + 1] }
    }

    /// Runs `steps` of so many tokens each, with `depth` others behind them, and says what they took.
    fn time(&mut self, seqs: &[usize], depth: usize, steps: &[usize]) {
        for seq in seqs {
            self.fill(*seq, depth);
        }
        let (wall, cpu) = (Instant::now(), cpu_seconds());
        let mut pos = depth;
        for tokens in steps {
            self.step(seqs, pos, *tokens, LogitsWanted::Last);
            pos += tokens;
        }
        println!("{:.9} {:.9}", wall.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    }

    fn fill(&mut self, seq: usize, depth: usize) {
        for from in (self.filled[seq]..depth).step_by(PROMPT_STEP) {
            self.step(&[seq], from, PROMPT_STEP.min(depth - from), LogitsWanted::None);
        }
        // what is beyond it is written anew before it is read
        self.filled[seq] = depth;
    }

    fn step(&mut self, seqs: &[usize], start_pos: usize, tokens: usize, logits: LogitsWanted) {
        let blocks = (start_pos + tokens).div_ceil(BLOCK_SIZE);
        let seqs = seqs.iter().map(|seq| {
            let first = if *seq == 0 { 0 } else { self.long + (seq - 1) * SHORT };
            let tokens = (0..tokens).map(|_| {
                self.random =
                    self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((self.random >> 33) % self.vocab) as u32
            });
            SeqInput {
                tokens: tokens.collect(),
                start_pos,
                block_table: (first..first + blocks).map(|block| block as u32).collect(),
                logits,
            }
        });
        let batch = StepBatch::of(seqs.collect());
        let out = self.model.forward(&batch).expect("a step");
        assert!(out.rows.iter().flatten().all(|row| row[0].is_finite()), "the step gave no numbers");
    }
}

fn cpu_seconds() -> f64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("the system's count");
    (usage.user_time() + usage.system_time()).num_microseconds() as f64 * 1e-6
}
