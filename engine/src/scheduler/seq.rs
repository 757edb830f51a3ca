//! One sequence as the scheduler knows it: its tokens, how many of them are in the KV cache, and the blocks it owns.

use std::cell::OnceCell;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::model::{LogitsWanted, SeqInput};
use crate::scheduler::blocks::{BlockPool, BlockTable};
use crate::scheduler::plan::{Finish, NewSeq, Outcome, PlanRow, Running, SeqResult};

/// Who goes first: by priority, then by age. Lower is before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub priority: i32,
    pub arrival: u64,
}

/// Prompt and output of one request. `computed` tokens are in the cache; everything after them is still to run.
#[derive(Debug)]
pub(super) struct Seq {
    pub spec: NewSeq,
    pub rank: Rank,
    /// Prompt, then output.
    tokens: Vec<u32>,
    prompt_len: usize,
    computed: usize,
    /// Guesses of what comes after `tokens`.
    drafts: Vec<u32>,
    /// Tokens that the step under way runs, and how many of them are guesses; 0 when the sequence is not in it.
    planned: usize,
    planned_drafts: usize,
    /// Prompt positions whose logits were reported already; a recompute does not report them again.
    rows_reported: usize,
    /// How often it got room, and how many tokens were cached then, the last time.
    admissions: u32,
    cached: usize,
    /// While it waits: how many of its tokens the cache had when somebody last looked.
    cached_seen: usize,
    /// And how many of its first tokens are those of prompts that run before it.
    shared: usize,
    /// The hash of all the prompt's tokens up to the end of each full block, once somebody asked.
    chain: OnceCell<Box<[u64]>>,
    pub ended: bool,
    table: BlockTable,
}

impl Seq {
    pub fn new(mut spec: NewSeq, arrival: u64, table: BlockTable) -> Self {
        let tokens = std::mem::take(&mut spec.prompt).to_vec();
        let prompt_len = tokens.len();
        let rank = Rank { priority: spec.priority, arrival };
        let (computed, drafts, planned, planned_drafts, rows_reported) = (0, Vec::new(), 0, 0, 0);
        let (admissions, cached, cached_seen, shared, chain, ended) = (0, 0, 0, 0, OnceCell::new(), false);
        Self {
            spec,
            rank,
            tokens,
            prompt_len,
            computed,
            drafts,
            planned,
            planned_drafts,
            rows_reported,
            admissions,
            cached,
            cached_seen,
            shared,
            chain,
            ended,
            table,
        }
    }

    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens still to run before the next one can be sampled.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// In decode: it has output, and only the newest token is not in the cache.
    pub fn is_decode(&self) -> bool {
        self.generated() > 0 && self.remaining() == 1
    }

    /// Tokens owed before this sequence decodes (H4); nothing once it does.
    pub fn prefill_owed(&self) -> usize {
        if self.is_decode() { 0 } else { self.remaining() }
    }

    pub fn view(&self) -> Running<'_> {
        let Self { tokens, computed, admissions, cached, .. } = self;
        let (id, decodes) = (self.spec.id, self.is_decode());
        Running { id, tokens, computed: *computed, decodes, admissions: *admissions, cached: *cached }
    }

    pub fn blocks(&self) -> impl Iterator<Item = u32> {
        self.table.ids()
    }

    /// Gets the blocks of all present tokens at once, cached ones where there are any, if `reserve` blocks are left over then.
    /// Returns how many tokens need not run; `None`, and no block, when there is no room.
    pub fn take_room(&mut self, pool: &BlockPool, reserve: usize) -> Option<usize> {
        // Cached tokens do not run, so they have no logits to report.
        let cached = if self.reports_left() { 0 } else { self.table.adopt(&self.tokens) };
        let missing = pool.blocks_for(self.len()).saturating_sub(self.table.len());
        let roomy = reserve == 0 || missing + reserve <= pool.free_blocks();
        if roomy && self.table.grow_to(self.tokens.len()) {
            (self.computed, self.cached) = (cached, cached);
            self.admissions += 1;
            Some(cached)
        } else {
            self.table.clear();
            None
        }
    }

    /// Has it run before? Then it waits because it gave way.
    pub fn was_admitted(&self) -> bool {
        self.admissions > 0
    }

    pub fn is_first_admission(&self) -> bool {
        self.admissions == 1
    }

    /// How many of its tokens the cache has now.
    fn cached_tokens(&self) -> usize {
        if self.reports_left() { 0 } else { self.table.cached(&self.tokens) }
    }

    /// Tokens that will run for it before its next one, with all that goes before it run already: by what was known of that when it came.
    pub fn to_run(&self) -> usize {
        match self.table.is_empty() {
            true => self.prefill_owed().saturating_sub(self.shared.max(self.cached_seen)),
            // It took what was cached when it got its blocks.
            false => self.prefill_owed(),
        }
    }

    /// Looks what the cache has of it.
    pub fn look_for_cached(&mut self) {
        self.cached_seen = self.cached_tokens();
    }

    /// `other` runs before it: what they have in common does not run again.
    pub fn goes_after(&mut self, other: &Self, size: usize) {
        if !self.reports_left() {
            self.shared = self.shared.max(self.common(other, size));
        }
    }

    /// Tokens of full blocks that both prompts begin with.
    fn common(&self, other: &Self, size: usize) -> usize {
        let (mine, theirs) = (self.chain(size), other.chain(size));
        let (mut same, mut most) = (0, mine.len().min(theirs.len()));
        // a hash is of all before it: where two are equal, those before them are
        while same < most {
            let middle = same + (most - same).div_ceil(2);
            if mine[middle - 1] == theirs[middle - 1] { same = middle } else { most = middle - 1 }
        }
        same * size
    }

    /// Tokens to run before its next one if it is admitted, by what the cache had when it was last looked for there. Only what is `too_many`
    /// is looked for again: that takes as long as the prompt is.
    pub fn still_to_run(&mut self, too_many: impl Fn(usize) -> bool) -> usize {
        let owed = |seq: &Self| seq.prefill_owed().saturating_sub(seq.cached_seen).max(1);
        if too_many(owed(self)) {
            self.look_for_cached();
        }
        owed(self)
    }

    /// For each full block of the prompt, of `size` tokens, the hash of all tokens up to its end: equal for equal beginnings. They are made
    /// once.
    fn chain(&self, size: usize) -> &[u64] {
        self.chain.get_or_init(|| {
            let mut chain = DefaultHasher::new();
            let link = |block: &[u32]| {
                block.hash(&mut chain);
                chain.finish()
            };
            self.tokens[..self.prompt_len].chunks_exact(size).map(link).collect()
        })
    }

    /// Are logits of prompt tokens still to be reported?
    fn reports_left(&self) -> bool {
        self.spec.prompt_rows && self.rows_reported + 1 < self.prompt_len
    }

    /// Must the newest token have a block that is not there yet?
    pub fn lacks_room(&self) -> bool {
        self.table.capacity() < self.tokens.len()
    }

    /// Gets the block of the newest token. False: there is none.
    pub fn grow(&mut self) -> bool {
        self.table.grow_to(self.tokens.len())
    }

    /// Loses its blocks; what is not found in the cache later is computed again (preemption by recompute).
    pub fn restart(&mut self) {
        self.cached_seen = if self.reports_left() { 0 } else { self.table.sealed_tokens() };
        self.table.clear();
        self.drafts.clear();
        self.computed = 0;
        self.forget_plan();
    }

    pub fn forget_plan(&mut self) {
        (self.planned, self.planned_drafts) = (0, 0);
    }

    /// Makes room for as many guesses as can be of use, `wanted` at most, from blocks that nobody else needs now. Returns how many
    /// there is room for.
    pub fn draft_room(&mut self, wanted: usize, may_grow: bool) -> usize {
        let useful = self.spec.max_new_tokens.saturating_sub(self.generated() + 1).min(wanted);
        if !self.is_decode() || useful == 0 {
            return 0;
        }
        if may_grow {
            // Whether it grew or not, the capacity below tells.
            self.table.grow_to(self.len() + useful);
        }
        self.table.capacity().saturating_sub(self.len()).min(useful)
    }

    /// `drafts` may follow; the next plan has them verified, as far as there is room.
    pub fn propose(&mut self, mut drafts: Vec<u32>, room: usize) {
        drafts.truncate(room);
        self.drafts = drafts;
    }

    /// Guesses that the next step can verify, if it has room for `spare` tokens.
    pub fn usable_drafts(&self, spare: usize) -> usize {
        let held = self.table.capacity().saturating_sub(self.len());
        self.drafts.len().min(spare).min(held)
    }

    /// Puts the next `count` tokens into the step, and `drafts` guesses after them.
    pub fn plan(&mut self, count: usize, drafts: usize) -> (SeqInput, PlanRow) {
        let (start, end) = (self.computed, self.computed + count);
        (self.planned, self.planned_drafts) = (count + drafts, drafts);
        let report = self.report_range(start, end);
        let samples = end == self.tokens.len() && self.spec.max_new_tokens > 0;
        let logits = match (report.is_empty() && drafts == 0, samples) {
            (false, _) => LogitsWanted::All,
            (true, true) => LogitsWanted::Last,
            (true, false) => LogitsWanted::None,
        };
        let tokens = [&self.tokens[start..end], &self.drafts[..drafts]].concat();
        let input = SeqInput { tokens, start_pos: start, block_table: self.table.ids().collect(), logits };
        (input, PlanRow { id: self.spec.id, samples, decode: self.is_decode(), drafts, report })
    }

    /// How many of its tokens a step runs that has room for `budget` tokens and for `rows` more rows of a prompt's logits (one is
    /// always had: whoever is in the step moves).
    pub fn chunk(&self, budget: usize, rows: usize) -> usize {
        let count = self.remaining().min(budget);
        if self.report_range(self.computed, self.computed + count).is_empty() {
            return count;
        }
        // after a preemption: what was reported already runs by itself, and needs no row
        let reported = self.rows_reported.saturating_sub(self.computed);
        count.min(if reported > 0 { reported } else { rows.max(1) })
    }

    /// The positions of `start..end` whose logits tell about a prompt token that nobody was told of yet.
    fn report_range(&self, start: usize, end: usize) -> std::ops::Range<usize> {
        if !self.spec.prompt_rows {
            return 0..0;
        }
        let first = start.max(self.rows_reported);
        let last = end.min(self.prompt_len.saturating_sub(1));
        first..last.max(first)
    }

    /// Takes in what the step brought.
    pub fn take_in(&mut self, result: SeqResult) -> Outcome {
        let id = self.spec.id;
        let outcome = match result {
            SeqResult::Failed { .. } => {
                self.table.condemn();
                Outcome { id, tokens: Vec::new(), finish: Some(Finish::Failed) }
            }
            SeqResult::Barred { .. } => Outcome { id, tokens: Vec::new(), finish: Some(Finish::Barred) },
            SeqResult::Advanced { tokens, .. } => self.advance(tokens),
        };
        self.ended = outcome.finish.is_some();
        outcome
    }

    /// The step ran: its tokens are in the cache, rejected guesses apart, and `tokens` are the next ones.
    fn advance(&mut self, mut tokens: Vec<u32>) -> Outcome {
        let accepted = tokens.len().saturating_sub(1).min(self.planned_drafts);
        let ran = self.planned - self.planned_drafts;
        let stop = tokens.iter().position(|token| self.spec.stop_token_ids.contains(token));
        tokens.truncate(
            self.spec.max_new_tokens.saturating_sub(self.generated()).min(stop.map_or(usize::MAX, |at| at + 1)),
        );
        if !tokens.is_empty() {
            self.tokens.extend(&tokens);
        }
        self.computed = (self.computed + ran + accepted).min(self.tokens.len());
        self.rows_reported = self.rows_reported.max(self.computed.min(self.prompt_len));
        self.table.seal(&self.tokens[..self.computed]);
        self.drafts.clear();
        self.forget_plan();
        let finish = self.finish(&tokens, stop.is_some_and(|at| at < tokens.len()));
        Outcome { id: self.spec.id, tokens, finish }
    }

    fn finish(&self, tokens: &[u32], stopped: bool) -> Option<Finish> {
        let full = self.generated() >= self.spec.max_new_tokens && (!tokens.is_empty() || self.remaining() == 0);
        if stopped { Some(Finish::Stop) } else { full.then_some(Finish::Length) }
    }

    pub fn is_planned(&self) -> bool {
        self.planned > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 4;

    fn seq(pool: &BlockPool, prompt: Vec<u32>) -> Seq {
        Seq::new(NewSeq::new(1, prompt, 4), 1, pool.table())
    }

    #[test]
    fn the_cache_is_looked_through_again_only_for_what_seems_too_much() {
        let pool = BlockPool::new(4, BLOCK, true);
        let prompt: Vec<u32> = (0..12).collect();
        let mut ran = pool.table();
        assert!(ran.grow_to(8));
        ran.seal(&prompt[..8]);
        drop(ran);
        let mut waiting = seq(&pool, prompt);
        assert_eq!(waiting.still_to_run(|_| false), 12, "nobody looked");
        assert_eq!(waiting.still_to_run(|tokens| tokens > 4), 4);
        // all blocks are somebody else's now
        let mut other = pool.table();
        assert!(other.grow_to(16));
        assert_eq!(waiting.still_to_run(|tokens| tokens > 4), 4);
        assert_eq!(waiting.still_to_run(|tokens| tokens > 3), 12);
    }

    #[test]
    fn the_hashes_of_a_prompt_are_made_once() {
        let pool = BlockPool::new(4, BLOCK, true);
        let mut one = seq(&pool, (0..10).collect());
        let other = seq(&pool, (0..8).chain([99; 4]).collect());
        let made = one.chain(BLOCK).as_ptr();
        assert_eq!((one.chain(BLOCK).as_ptr(), one.chain(BLOCK).len()), (made, 2));
        assert_eq!(one.chain(BLOCK), &other.chain(BLOCK)[..2], "equal beginnings");
        one.take_in(SeqResult::Advanced { id: 1, tokens: vec![10, 11] });
        assert_eq!((one.chain(BLOCK).as_ptr(), one.chain(BLOCK).len()), (made, 2), "they are the prompt's");
    }

    #[test]
    fn what_prompts_have_in_common_is_found_to_the_block() {
        let pool = BlockPool::new(4, BLOCK, true);
        for len in 0..40 {
            let one = seq(&pool, (0..40).collect());
            let other = seq(&pool, (0..len).chain([99; 5]).collect());
            assert_eq!(one.common(&other, BLOCK), len as usize / BLOCK * BLOCK);
            assert_eq!(other.common(&one, BLOCK), len as usize / BLOCK * BLOCK);
        }
    }
}
