//! The model seam: what the step loop may ask of a model, and nothing more. Tensors, weights and devices stay behind it.

mod batch;
mod config;
mod decoder;
mod frame;
mod head;
mod load;
mod random;
mod replay;
mod rope;
mod routing;
mod share;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use thiserror::Error;

pub use crate::backend::cpu::Precision;
pub use config::ConfigError;
pub use load::{LoadError, LoadOptions, load_model, load_model_on, load_model_with, load_share_on, longest_sequence};
pub use random::{RandomShape, eager_random_model, random_model, random_model_on};
pub use share::{Share, ShareError};

use crate::backend::{DeviceFault, OutOfMemory};
use crate::beat::{StepShape, Tally};
use crate::programs::ProgramCounts;
use crate::sampling::{Draw, SamplingDefaults};
use crate::stuck::Stuck;
use crate::waits::Threads;

/// Facts that scheduler and server need.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelInfo {
    /// Name for `/v1/models` when the user gives none (the folder's name).
    pub name: String,
    /// `llama`, `mistral`, `qwen2`, `qwen3`, `qwen3_moe`, `mimo`.
    pub arch: String,
    pub vocab_size: usize,
    /// Longest sequence (prompt and output) in tokens.
    pub seq_len_max: usize,
    pub eos_token_ids: Vec<u32>,
    pub bos_token_id: Option<u32>,
    /// Of `generation_config.json`: for requests that leave them out.
    pub sampling: SamplingDefaults,
}

/// Size of the paged KV cache: `num_blocks` blocks of `block_size` tokens each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    pub num_blocks: usize,
    pub block_size: usize,
}

/// One sequence's share of a step: the tokens to run, where they begin, and the sequence's block table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeqInput {
    pub tokens: Vec<u32>,
    /// Position of `tokens[0]` in its sequence; everything before it is in the cache already.
    pub start_pos: usize,
    /// Block ids that hold positions `0..start_pos + tokens.len()`, in order.
    pub block_table: Vec<u32>,
    /// Which rows of logits are wanted.
    pub logits: LogitsWanted,
}

/// Which rows of logits a sequence needs from a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsWanted {
    /// None: a chunk of a prompt that has more chunks to come.
    None,
    /// The row of the last token.
    Last,
    /// A row for every token of this step (prompt logprobs, `echo`).
    All,
    /// The token that comes after the last one, drawn so; or, where other sequences of the step want rows, its row after all
    /// ([`Model::draws`]).
    Drawn(Draw),
}

/// Who reads a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Pass {
    /// The model itself.
    #[default]
    Model,
    /// Its head, which guesses what comes after the next token ([`Model::has_head`]).
    Head,
}

/// The batch of one step; a plain value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepBatch {
    pub seqs: Vec<SeqInput>,
    pub pass: Pass,
}

impl StepBatch {
    /// A step of the model itself.
    pub fn of(seqs: Vec<SeqInput>) -> Self {
        Self { seqs, pass: Pass::Model }
    }
}

/// Logits, one entry a sequence of the batch in its order; each row has `vocab_size` values.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepLogits {
    pub rows: Vec<Vec<Vec<f32>>>,
    /// What was drawn, for the sequences that have no row though they wanted one; empty: nothing.
    pub drawn: Vec<Option<u32>>,
}

impl StepLogits {
    /// Rows, and nothing drawn.
    pub fn of(rows: Vec<Vec<Vec<f32>>>) -> Self {
        Self { rows, drawn: Vec::new() }
    }
}

/// The cache touches all its memory, wherever the machine takes it from: the longest that this may take, on all ranks.
pub const ALLOCATE_MAX: Duration = Duration::from_secs(300);

/// Progress of loading, for the heartbeat page's start-up lease (H5).
pub type LoadProgress<'a> = &'a mut dyn FnMut(u64, u64);

/// Counts the layers that steps have got through: a step that is long and one that is stuck differ in it.
pub type Pulse = Arc<AtomicU64>;

/// What a step shows before it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sign {
    /// A layer is done.
    Layer,
    /// So much of its time it was held up: a thread that it waits for wanted the processor and did not get it.
    HeldUp(Duration),
}

/// Who hears of the signs.
pub type Tell<'a> = &'a mut dyn FnMut(Sign);

/// What the step loop tells a model beside the batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepTerms {
    /// How long a step may go without a sign of life; `None`: for ever (`--guards off`).
    pub allowed: Option<Duration>,
    /// Counters and work owed, for the pages of other ranks.
    pub tally: Tally,
    /// What the step is made of, for the same: a batch alone does not tell guesses to verify from a prompt.
    pub shape: StepShape,
    /// It is one of the first steps, outside any request.
    pub warms: bool,
    /// Faults that are due, for other ranks.
    pub armed: u64,
    /// Steps that had ended before this one, for the same pages: all ranks count alike (H1).
    pub steps_completed: u64,
}

/// A loaded model on some backend.
pub trait Model: Send {
    fn info(&self) -> &ModelInfo;

    /// Bytes of this machine's memory that such a cache takes, on all ranks together; `None`: it lies elsewhere.
    fn kv_bytes(&self, _shape: KvShape) -> Option<u64> {
        None
    }

    /// Allocates the paged KV cache. Called once, before the first step.
    ///
    /// # Errors
    /// [`ModelError::OutOfMemory`] when the cache does not fit.
    fn allocate_kv(&mut self, shape: KvShape) -> Result<(), ModelError>;

    /// What holds for the steps from now on.
    fn terms(&mut self, _terms: &StepTerms) {}

    /// Where its signs of life are counted, if it gives any.
    fn pulse(&self) -> Option<Pulse> {
        None
    }

    /// Has it a head that guesses further ahead ([`Pass::Head`])? A row of such a batch is made from a token and from what the model made of
    /// the token before it, so the model must have read that first; and its logits are of what follows.
    fn has_head(&self) -> bool {
        false
    }

    /// Can it draw tokens by itself ([`LogitsWanted::Drawn`])?
    fn draws(&self) -> bool {
        false
    }

    /// Does a step of it wait for other ranks, with deadlines of its own?
    fn has_ranks(&self) -> bool {
        false
    }

    /// Where it counts the nanoseconds that its waits for other ranks did not count: they were ready to run and were not run.
    fn forgiven(&self) -> Option<Pulse> {
        None
    }

    /// Threads that its steps wait for beside the one that asks for them: those that compute parts of them, and other ranks'.
    fn threads(&self) -> Threads {
        Arc::new(Vec::new)
    }

    /// Does a step of it wait for a device, with a deadline of its own?
    fn waits(&self) -> bool {
        false
    }

    /// Makes the device hang in earnest (S2). False: it has none that could.
    fn hang(&mut self) -> bool {
        false
    }

    /// What became of its step programs, if it has any.
    fn programs(&self) -> Option<Arc<ProgramCounts>> {
        None
    }

    /// Runs one step: writes K and V of `tokens` into their blocks, returns the logits asked for.
    ///
    /// # Errors
    /// [`ModelError::BadBatch`] when a token, position or block is out of range; the cache is then unchanged.
    /// [`ModelError::Stuck`] when the step did not end in time: no later one can.
    fn forward(&mut self, batch: &StepBatch) -> Result<StepLogits, ModelError>;

    /// The same, with what the step shows before its end, where it shows anything.
    ///
    /// # Errors
    /// As [`Self::forward`].
    fn forward_telling(&mut self, batch: &StepBatch, _tell: Tell<'_>) -> Result<StepLogits, ModelError> {
        self.forward(batch)
    }
}

/// What can go wrong behind the seam.
#[derive(Debug, Error)]
pub enum ModelError {
    #[error("the step's batch is malformed: {0}")]
    BadBatch(String),
    #[error("the KV cache needs {needed_bytes} bytes: {reason}")]
    OutOfMemory { needed_bytes: u64, reason: String },
    #[error("{0}")]
    Device(String),
    #[error(transparent)]
    Stuck(#[from] Stuck),
}

impl ModelError {
    fn of_cache(OutOfMemory { needed_bytes, reason }: OutOfMemory) -> Self {
        Self::OutOfMemory { needed_bytes, reason }
    }
}

impl From<DeviceFault> for ModelError {
    fn from(fault: DeviceFault) -> Self {
        match fault {
            DeviceFault::Stuck(stuck) => Self::Stuck(stuck),
            DeviceFault::OutOfMemory(lack) => {
                Self::Device(format!("no memory for this step on the device: {lack}; smaller steps are tried"))
            }
        }
    }
}
