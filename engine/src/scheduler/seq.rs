//! One sequence as the scheduler knows it: its tokens, how many of them are in the KV cache, and the blocks it owns.

use crate::model::{LogitsWanted, SeqInput};
use crate::scheduler::blocks::BlockTable;
use crate::scheduler::plan::{NewSeq, PlanRow};

/// Prompt and output of one request. `computed` tokens are in the cache; everything after them is still to run.
#[derive(Debug)]
pub(super) struct Seq {
    pub spec: NewSeq,
    /// Prompt, then output.
    tokens: Vec<u32>,
    computed: usize,
    /// Tokens that the step under way runs; 0 when the sequence is not in it.
    planned: usize,
    /// Prompt positions whose logits were reported already; a recompute does not report them again.
    rows_reported: usize,
    pub table: BlockTable,
}

impl Seq {
    pub fn new(mut spec: NewSeq, table: BlockTable) -> Self {
        let tokens = std::mem::take(&mut spec.prompt);
        spec.prompt_len = tokens.len();
        Self { spec, tokens, computed: 0, planned: 0, rows_reported: 0, table }
    }

    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens still to run before the next one can be sampled.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    pub fn generated(&self) -> usize {
        self.tokens.len() - self.spec.prompt_len
    }

    /// In decode: it has output, and only the newest token is not in the cache.
    pub fn is_decode(&self) -> bool {
        self.generated() > 0 && self.remaining() == 1
    }

    /// Tokens owed before this sequence decodes (H4); nothing once it does.
    pub fn prefill_owed(&self) -> usize {
        if self.is_decode() { 0 } else { self.remaining() }
    }

    /// Loses its blocks; everything is recomputed later (preemption by recompute).
    pub fn restart(&mut self) {
        self.table.clear();
        self.computed = 0;
        self.planned = 0;
    }

    pub fn forget_plan(&mut self) {
        self.planned = 0;
    }

    /// Puts the next `count` tokens into the step.
    pub fn plan(&mut self, count: usize) -> (SeqInput, PlanRow) {
        let (start, end) = (self.computed, self.computed + count);
        self.planned = count;
        let report = self.report_range(start, end);
        let samples = end == self.tokens.len() && self.spec.max_new_tokens > 0;
        let logits = match (report.is_empty(), samples) {
            (false, _) => LogitsWanted::All,
            (true, true) => LogitsWanted::Last,
            (true, false) => LogitsWanted::None,
        };
        let input = SeqInput {
            tokens: self.tokens[start..end].to_vec(),
            start_pos: start,
            block_table: self.table.blocks().to_vec(),
            logits,
        };
        (input, PlanRow { id: self.spec.id, samples, decode: self.is_decode(), report })
    }

    /// The positions of `start..end` whose logits tell about a prompt token that nobody was told of yet.
    fn report_range(&self, start: usize, end: usize) -> std::ops::Range<usize> {
        if !self.spec.prompt_rows {
            return 0..0;
        }
        let first = start.max(self.rows_reported);
        let last = end.min(self.spec.prompt_len.saturating_sub(1));
        first..last.max(first)
    }

    /// The step ran: its tokens are in the cache, and `token` is the next one.
    pub fn advance(&mut self, token: Option<u32>) {
        self.computed += self.planned;
        self.planned = 0;
        self.rows_reported = self.rows_reported.max(self.computed.min(self.spec.prompt_len));
        self.tokens.extend(token);
    }

    pub fn is_planned(&self) -> bool {
        self.planned > 0
    }
}
