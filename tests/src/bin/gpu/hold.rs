//! Models of random weights on the device, and a process that keeps the device at one kind of work until it is killed.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;
use engine::backend::Backend;
use engine::backend::StepStart;
use engine::backend::cuda::open::{self, DeviceChoice};
use engine::model::{KvShape, LogitsWanted, Model, RandomShape, SeqInput, StepBatch, StepTerms, random_model_on};
use engine::sampling::Draw;
use engine::weights::WeightType;

/// The sizes of Llama 3.2 1B.
pub const OF_1B: RandomShape = RandomShape {
    hidden: 2048,
    intermediate: 8192,
    layers: 16,
    heads: 32,
    kv_heads: 8,
    head_dim: 64,
    vocab: 128_256,
    seq_len_max: 16_384,
};
/// Of Llama 3 8B, with one table for both ends, as the other.
pub const OF_8B: RandomShape = RandomShape {
    hidden: 4096,
    intermediate: 14_336,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    vocab: 128_256,
    seq_len_max: 16_384,
};
pub const BLOCK: usize = 16;
/// Positions that each sequence of a step has room for.
pub const ROOM: usize = 1024;
/// Sequences of a step, at most.
pub const SEQS_MAX: usize = 256;
const GREEDY: Draw = Draw { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, unit: 0.0 };
/// What a step may take here.
pub const ALLOWED: Duration = Duration::from_secs(20);

/// What the device is kept at. A kernel that hangs on all multiprocessors and one that hangs on one are different to look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Work {
    /// Nothing: a context, and weights.
    Idle,
    Prefill,
    Decode,
    /// A kernel that never ends: one warp of it.
    Spin,
    /// A kernel that never ends, on every multiprocessor.
    SpinAll,
}

/// Blocks of a warp that are more than any device runs at once.
const EVERYWHERE: u32 = 4096;

impl Work {
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Spin => "spin",
            Self::SpinAll => "spin-all",
        }
    }
}

pub fn choice(ordinal: u32, kernels: Option<PathBuf>) -> DeviceChoice {
    DeviceChoice { ordinal, kernels, budget_bytes: Some(60 << 30), stays_alone: false }
}

/// A model of that shape in bf16 on the device.
pub fn model(device: &DeviceChoice, shape: RandomShape, eager: bool) -> Result<Box<dyn Model>> {
    let backend = open::open(device, &mut |_, _| {})?;
    let kind = WeightType::Bf16;
    let mut model = random_model_on(backend, shape, (kind, kind), eager).context("the sizes are no whole blocks")?;
    model.allocate_kv(KvShape { num_blocks: SEQS_MAX * ROOM / BLOCK, block_size: BLOCK })?;
    model.terms(&StepTerms { allowed: Some(ALLOWED), ..StepTerms::default() });
    Ok(model)
}

/// A step of `seqs` sequences, `tokens` each, that begin at `pos`; each has room for [`ROOM`] positions of its own.
pub fn step(seqs: usize, tokens: usize, pos: usize) -> StepBatch {
    let blocks = (ROOM / BLOCK) as u32;
    let seq = |index: usize| SeqInput {
        tokens: (0..tokens).map(|i| ((index * 31 + i * 7 + pos) % 1000) as u32).collect(),
        start_pos: pos,
        block_table: (index as u32 * blocks..(index as u32 + 1) * blocks).collect(),
        // what most requests want: a token
        logits: LogitsWanted::Drawn(GREEDY),
    };
    StepBatch::of((0..seqs).map(seq).collect())
}

/// Does `work` until this process is killed; says on standard output when it has begun.
pub fn hold(device: &DeviceChoice, work: Work) -> Result<()> {
    if matches!(work, Work::Spin | Work::SpinAll) {
        let backend = open::open(device, &mut |_, _| {})?;
        backend.begin_step(&StepStart { shape: 0, allowed: Some(Duration::from_secs(3600)) });
        backend.spin(if work == Work::Spin { 1 } else { EVERYWHERE }, false);
        println!("begun");
        return backend.end_step().context("the device was given up");
    }
    let mut model = model(device, OF_1B, false)?;
    let mut pos = 0;
    loop {
        match work {
            Work::Prefill => drop(model.forward(&step(1, 512, 0))?),
            Work::Decode => drop(model.forward(&step(8, 1, pos % 1000))?),
            Work::Idle | Work::Spin | Work::SpinAll => std::thread::sleep(Duration::from_millis(100)),
        }
        // said once it is true: a model that fails at its first step is no prefill
        if pos == 0 {
            println!("begun");
        }
        pos += 1;
    }
}

/// Another process of this program.
pub fn start(device: &DeviceChoice, words: &[&str]) -> Result<Child> {
    let mut command = Command::new(std::env::current_exe().context("where this program lies")?);
    command.arg("--device").arg(device.ordinal.to_string());
    if let Some(kernels) = &device.kernels {
        command.arg("--kernels").arg(kernels);
    }
    command.args(words).stdout(Stdio::piped()).spawn().context("starting this program again")
}
