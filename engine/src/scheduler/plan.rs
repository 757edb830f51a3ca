//! The scheduler's vocabulary: what goes in, what a step is made of, what comes out. Plain values.

use std::sync::Arc;

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
    /// By how much the prompts of others may lengthen a step in which somebody decodes, in ns (at least
    /// [`CHUNK_TOKENS_MIN`] tokens run, so that prompts move too).
    pub prefill_beside_decode_ns: u64,
    /// Are full blocks kept and shared by content?
    pub prefix_cache: bool,
}

/// A prompt moves by so many tokens a step, however slow the machine is.
pub const CHUNK_TOKENS_MIN: usize = 16;
/// Rows of logits that a step makes to tell the logprobs of prompts. Each is the whole vocabulary, through the output head and then through
/// exponentials: hundreds of them would stretch the step of everybody else.
pub const PROMPT_ROWS_MAX: usize = 32;

impl Default for Limits {
    fn default() -> Self {
        Self {
            num_blocks: 1024,
            block_size: 16,
            num_seqs_max: 64,
            step_tokens_max: 512,
            waiting_max: 320,
            seq_len_max: 4096,
            prefill_beside_decode_ns: 200_000_000,
            prefix_cache: true,
        }
    }
}

/// A sequence that asks for admission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSeq {
    pub id: ReqId,
    pub prompt: Arc<[u32]>,
    /// Output ends here at the latest; 0: evaluate the prompt only.
    pub max_new_tokens: usize,
    /// Output ends with any of these (the end-of-sequence ids, unless the request ignores them).
    pub stop_token_ids: Arc<[u32]>,
    /// Are logits wanted for the prompt's own tokens?
    pub prompt_rows: bool,
    /// Lower goes first; among equals the older one.
    pub priority: i32,
    /// Nobody waits for the answer after this, on the clock that `now_ns` is read from.
    pub deadline_ns: Option<u64>,
}

impl NewSeq {
    /// A sequence that wants `max_new_tokens` of output after `prompt`.
    pub fn new(id: ReqId, prompt: impl Into<Arc<[u32]>>, max_new_tokens: usize) -> Self {
        let (stop_token_ids, prompt_rows, priority, deadline_ns) = (Arc::default(), false, 0, None);
        Self { id, prompt: prompt.into(), max_new_tokens, stop_token_ids, prompt_rows, priority, deadline_ns }
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
    #[error("its next token needs {needed_ms} ms here, the deadline is in {left_ms} ms")]
    TooLate { needed_ms: u64, left_ms: u64 },
    #[error("its deadline passed while it ran")]
    Expired,
}

/// One step: the batch for the model, and what each of its sequences is for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepPlan {
    pub batch: StepBatch,
    /// One row a sequence of the batch, in its order.
    pub rows: Vec<PlanRow>,
    pub prefill_tokens: usize,
    pub decode_tokens: usize,
    /// Of `prefill_tokens`: those whose rows of logits are wanted.
    pub prompt_rows: usize,
    /// Of `decode_tokens`: guesses that this step verifies.
    pub draft_tokens: usize,
    /// Sequences that lost their blocks to those that go before them.
    pub preempted: Vec<ReqId>,
    /// Sequences that left the queue for the batch.
    pub admitted: Vec<ReqId>,
    /// Sequences that left for good: the queue, because their deadline cannot be met any more, or the batch, because it has passed.
    pub late: Vec<(ReqId, Refusal)>,
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
    /// How many of the row's tokens, at its end, are guesses to be verified; there is a row of logits for each, and one more.
    /// 0 in a decode that verifies nothing (what others call a bonus-only step): then its shape is that of a plain one.
    pub drafts: usize,
    /// Positions whose logits tell the logprob of the prompt token after them.
    pub report: std::ops::Range<usize>,
}

/// What became of one sequence in a step. A sequence without a result did not move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SeqResult {
    /// `tokens`: none after a chunk of a prompt; else the accepted guesses, in order, and one more.
    Advanced {
        id: ReqId,
        tokens: Vec<u32>,
    },
    Failed {
        id: ReqId,
    },
    /// The step went well, but its own rules allow no next token.
    Barred {
        id: ReqId,
    },
}

impl SeqResult {
    pub fn id(&self) -> ReqId {
        match self {
            Self::Advanced { id, .. } | Self::Failed { id } | Self::Barred { id } => *id,
        }
    }
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
    /// Its own rules allowed no token.
    Barred,
}

/// What to tell the one who asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub id: ReqId,
    /// The new output; after [`Finish::Stop`] the last one is the stop token.
    pub tokens: Vec<u32>,
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

/// What the prefix cache was asked for and what it had, in tokens, since the start. As vLLM counts: once a request, when it is first
/// admitted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefixCounts {
    pub queried_tokens: u64,
    pub hit_tokens: u64,
}

/// A running sequence, as those see it who guess its next tokens.
#[derive(Debug, Clone, Copy)]
pub struct Running<'a> {
    pub id: ReqId,
    /// Prompt and output.
    pub tokens: &'a [u32],
    /// How many of them are in the KV cache.
    pub computed: usize,
    /// Its next step yields a token: guesses are of use.
    pub decodes: bool,
    /// How often it was admitted, and how many tokens were cached then, the last time.
    pub admissions: u32,
    pub cached: usize,
}
