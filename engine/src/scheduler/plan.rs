//! The scheduler's vocabulary: what goes in, what a step is made of, what comes out. Plain values.

use thiserror::Error;

use crate::model::StepBatch;

/// A request's name inside one engine process.
pub type ReqId = u64;

/// What bounds the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// KV blocks, and tokens a block holds.
    pub num_blocks: usize,
    pub block_size: usize,
    /// Sequences in the running batch.
    pub num_seqs_max: usize,
    /// Tokens (prompt and decode) that one step may run.
    pub step_tokens_max: usize,
    /// Sequences that may wait.
    pub waiting_max: usize,
    /// Longest sequence, prompt and output, in tokens.
    pub seq_len_max: usize,
}

/// A sequence that asks for admission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSeq {
    pub id: ReqId,
    pub prompt: Vec<u32>,
    /// Output ends here at the latest; 0: evaluate the prompt only.
    pub max_new_tokens: usize,
    /// Output ends with any of these (the end-of-sequence ids, unless the request ignores them).
    pub stop_token_ids: Vec<u32>,
    /// Are logits wanted for the prompt's own tokens?
    pub prompt_rows: bool,
    /// Set by the scheduler.
    pub(super) prompt_len: usize,
}

impl NewSeq {
    /// A sequence that wants `max_new_tokens` of output after `prompt`.
    pub fn new(id: ReqId, prompt: Vec<u32>, max_new_tokens: usize) -> Self {
        Self { id, prompt, max_new_tokens, stop_token_ids: Vec::new(), prompt_rows: false, prompt_len: 0 }
    }
}

/// Why a sequence was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    #[error("the prompt has no token")]
    EmptyPrompt,
    #[error("prompt and output need {tokens} tokens, the longest sequence is {tokens_max}")]
    TooLong { tokens: usize, tokens_max: usize },
    #[error("prompt and output need {blocks} KV blocks, the cache has {blocks_max}")]
    CacheTooSmall { blocks: usize, blocks_max: usize },
    #[error("{waiting} requests wait already")]
    QueueFull { waiting: usize },
    #[error("request {0} is here already")]
    Duplicate(ReqId),
}

/// One step: the batch for the model, and what each of its sequences is for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepPlan {
    pub batch: StepBatch,
    /// One row a sequence of the batch, in its order.
    pub rows: Vec<PlanRow>,
    pub prefill_tokens: usize,
    pub decode_tokens: usize,
    /// Sequences that lost their blocks to older ones.
    pub preempted: Vec<ReqId>,
    /// Sequences that left the queue.
    pub admitted: Vec<ReqId>,
}

impl StepPlan {
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

/// What one sequence of a step is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanRow {
    pub id: ReqId,
    /// A token is to be sampled from the last row of logits.
    pub samples: bool,
    pub decode: bool,
    /// Positions whose logits tell the logprob of the prompt token after them.
    pub report: std::ops::Range<usize>,
}

/// What became of one sequence in a step. A sequence without a result did not move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeqResult {
    Advanced { id: ReqId, token: Option<u32> },
    Failed { id: ReqId },
}

/// How a sequence ended by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A stop token came.
    Stop,
    /// The output has all the tokens that were asked for.
    Length,
    /// The step failed for this sequence.
    Failed,
}

/// What to tell the one who asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    pub id: ReqId,
    pub token: Option<u32>,
    pub finish: Option<Finish>,
}

/// Work owed (H4).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Owed {
    pub running: usize,
    pub waiting: usize,
    /// Tokens to run before the first or, after a preemption, the next output token.
    pub prompt_tokens: usize,
}
