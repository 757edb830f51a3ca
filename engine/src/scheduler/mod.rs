//! Continuous batching: which tokens of which sequences run in the next step, and in which KV blocks.
//!
//! Pure: no clock (time is an argument), no socket, no tensor, no thread. [`Scheduler::plan`] returns a value, [`Scheduler::apply`]
//! takes what became of it; a plan that is never applied changes nothing but places in the queue, and ends those whose deadline
//! has passed (which is what a livelock looks like).
//!
//! **Invariant:** who ranks first (priority, then age) always moves: it can take the blocks of everybody else, and nobody takes its own.
//! **Invariant:** every decode is in every step; prompts get what is left, and no more of it than the decodes can bear.
//! **Invariant:** a block is free, idle or in a table, whatever happens (EP3; by type, see [`blocks`]).
//! **Invariant:** what a sequence's rows are computed from is its own tokens at their own positions, so its output cannot depend on
//! neighbours, chunks, preemptions or cached prefixes (EP4).

mod admission;
pub mod blocks;
mod pace;
pub mod plan;
mod seq;

use std::collections::{BTreeMap, BTreeSet};

use blocks::BlockPool;
use pace::Pace;
use plan::{CHUNK_TOKENS_MIN, PROMPT_ROWS_MAX};
pub use plan::{
    Finish, Limits, NewSeq, Outcome, Owed, PlanRow, PrefixCounts, Refusal, ReqId, Running, SeqResult, StepPlan,
};
use seq::{Rank, Seq};

pub use admission::check_fit;

/// Queue, running batch and KV blocks.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    pool: BlockPool,
    pace: Pace,
    waiting: BTreeMap<Rank, Seq>,
    /// By rank: the last one gives way first.
    running: Vec<Seq>,
    arrivals: u64,
    prefixes: PrefixCounts,
}

impl Scheduler {
    pub fn new(limits: Limits) -> Self {
        let pool = BlockPool::new(limits.num_blocks, limits.block_size, limits.prefix_cache);
        let (waiting, running) = (BTreeMap::new(), Vec::new());
        Self { limits, pool, pace: Pace::default(), waiting, running, arrivals: 0, prefixes: PrefixCounts::default() }
    }

    /// Takes a sequence out, its blocks return. False: there is none of this id.
    pub fn cancel(&mut self, id: ReqId) -> bool {
        let before = self.running.len() + self.waiting.len();
        self.running.retain(|s| s.spec.id != id);
        self.waiting.retain(|_, s| s.spec.id != id);
        self.running.len() + self.waiting.len() < before
    }

    /// The next step: decodes first (nobody's stream waits for another's prompt), then prompts by rank, those under way and new ones,
    /// within the step's budget of tokens and what decodes can bear.
    pub fn plan(&mut self, now_ns: u64) -> StepPlan {
        let mut plan = StepPlan::default();
        let mut budget = self.limits.step_tokens_max;
        self.running.iter_mut().for_each(Seq::forget_plan);
        self.end_expired(now_ns, &mut plan);
        self.turn_away_late(now_ns, &mut plan);
        self.make_way(&mut plan);
        let made_way = plan.preempted.len();
        self.plan_decodes(&mut plan, &mut budget);
        budget = budget.min(self.prefill_share(plan.decode_tokens));
        // Who was just preempted for want of blocks would be admitted at once into the room it made.
        let admits = plan.preempted.len() == made_way;
        self.plan_prefills(&mut plan, &mut budget, admits);
        if admits {
            self.admit(&mut plan, &mut budget);
        }
        plan
    }

    /// Takes in what became of the last plan. Sequences that ended are gone when this returns.
    pub fn apply(&mut self, results: Vec<SeqResult>) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(results.len());
        let mut next = 0;
        for result in results {
            let Some(i) = self.planned(result.id(), next) else { continue };
            outcomes.push(self.running[i].take_in(result));
            next = i + 1;
        }
        self.running.retain(|seq| !seq.ended);
        outcomes
    }

    /// What the plan's step took, for the ones to come. One that told the logprobs of a prompt says nothing of others: rows as long as the
    /// vocabulary may take many times what the tokens do.
    pub fn learn(&mut self, plan: &StepPlan, took_ns: u64) {
        if plan.prompt_rows > 0 {
            return;
        }
        self.pace.learn(plan.decode_tokens, plan.prefill_tokens, took_ns);
    }

    pub fn owed(&self) -> Owed {
        let prompt_tokens = self.running.iter().chain(self.waiting.values()).map(Seq::prefill_owed).sum();
        Owed { running: self.running.len(), waiting: self.waiting.len(), prompt_tokens }
    }

    /// Blocks that can be had: free ones, and cached ones that nobody uses.
    pub fn free_blocks(&self) -> usize {
        self.pool.free_blocks()
    }

    /// Blocks that are in tables; a shared one counts once. Together with the free ones these are all there are (EP3).
    pub fn owned_blocks(&self) -> usize {
        let seqs = self.running.iter().chain(self.waiting.values());
        seqs.flat_map(Seq::blocks).collect::<BTreeSet<_>>().len()
    }

    /// Blocks in use, of all, in 0..=1.
    pub fn kv_usage(&self) -> f64 {
        let total = self.pool.num_blocks().max(1) as f64;
        1.0 - self.pool.free_blocks() as f64 / total
    }

    pub fn prefix_counts(&self) -> PrefixCounts {
        self.prefixes
    }

    /// The running batch, first in rank first.
    pub fn running(&self) -> impl Iterator<Item = Running<'_>> {
        self.running.iter().map(Seq::view)
    }

    /// The block ids of a running sequence, in order; none for any other.
    pub fn blocks_of(&self, id: ReqId) -> Vec<u32> {
        self.running.iter().find(|seq| seq.spec.id == id).map_or_else(Vec::new, |seq| seq.blocks().collect())
    }

    /// Makes room for guesses of what a decoding sequence says next, `wanted` at most; returns how many there is room for. Never at
    /// the cost of another sequence.
    pub fn draft_room(&mut self, id: ReqId, wanted: usize) -> usize {
        let may_grow = self.pool.free_blocks() > self.running.len();
        let seq = self.running.iter_mut().find(|seq| seq.spec.id == id);
        seq.map_or(0, |seq| seq.draft_room(wanted, may_grow))
    }

    /// The next plan has these guesses verified, if the sequence still decodes and there is room for them. Guesses cost nothing but
    /// time: a wrong one is dropped, none is needed.
    pub fn propose(&mut self, id: ReqId, drafts: Vec<u32>) {
        let room = self.draft_room(id, drafts.len());
        if let Some(seq) = self.running.iter_mut().find(|seq| seq.spec.id == id) {
            seq.propose(drafts, room);
        }
    }

    fn plan_decodes(&mut self, plan: &mut StepPlan, budget: &mut usize) {
        let decodes = self.running.iter().filter(|seq| seq.is_decode()).count();
        let mut spare = if self.is_calm() { budget.saturating_sub(decodes) } else { 0 };
        let mut i = 0;
        while i < self.running.len() && *budget > 0 {
            if self.running[i].is_decode() {
                if !self.make_room(i, plan) {
                    break;
                }
                let drafts = self.running[i].usable_drafts(spare);
                spare -= drafts;
                push(plan, budget, &mut self.running[i], (1, drafts));
            }
            i += 1;
        }
    }

    /// No prompt wants the tokens that guesses would take.
    fn is_calm(&self) -> bool {
        let full = self.running.len() >= self.limits.num_seqs_max;
        (full || self.waiting.is_empty()) && self.running.iter().all(Seq::is_decode)
    }

    /// Gets the block that sequence `i` needs for its next token, from the last ones if it must be.
    /// False: `i` itself was the last and went back to the queue.
    fn make_room(&mut self, i: usize, plan: &mut StepPlan) -> bool {
        loop {
            let Some(seq) = self.running.get_mut(i) else { return false };
            if seq.grow() {
                return true;
            }
            self.preempt_last(plan);
        }
    }

    fn preempt_last(&mut self, plan: &mut StepPlan) {
        let Some(mut victim) = self.running.pop() else { return };
        victim.restart();
        plan.preempted.push(victim.spec.id);
        self.waiting.insert(victim.rank, victim);
    }

    /// Prompt tokens that a step may run beside so many decode tokens.
    fn prefill_share(&self, decode_tokens: usize) -> usize {
        if decode_tokens == 0 {
            return usize::MAX;
        }
        let bearable = self.pace.prefill_tokens_in(self.limits.prefill_beside_decode_ns);
        bearable.map_or(usize::MAX, |tokens| tokens.max(CHUNK_TOKENS_MIN))
    }

    /// Chunks of prompts under way. Whoever waits and goes before one of them does not wait for it, however long it is.
    fn plan_prefills(&mut self, plan: &mut StepPlan, budget: &mut usize, admits: bool) {
        let mut i = 0;
        while i < self.running.len() && *budget > 0 {
            let seq = &self.running[i];
            // Who was admitted a moment ago has its tokens in this step already.
            if !seq.is_decode() && seq.remaining() > 0 && !seq.is_planned() {
                let goes_before = self.waiting.first_key_value().is_some_and(|(rank, _)| *rank < seq.rank);
                if !(admits && goes_before && self.admit_head(plan, budget)) {
                    let seq = &mut self.running[i];
                    let count = seq.chunk(*budget, PROMPT_ROWS_MAX.saturating_sub(plan.prompt_rows));
                    push(plan, budget, seq, (count, 0));
                    i += 1;
                }
                // Else the admitted one stands at `i` or before it, and this one comes again.
                continue;
            }
            i += 1;
        }
    }

    /// Where the sequence of this id runs, if the step has it. Results come in the plan's order, which is mostly this one: the search
    /// begins where the last one ended.
    fn planned(&self, id: ReqId, from: usize) -> Option<usize> {
        let mut order = (from..self.running.len()).chain(0..from.min(self.running.len()));
        order.find(|i| self.running[*i].spec.id == id).filter(|i| self.running[*i].is_planned())
    }
}

fn push(plan: &mut StepPlan, budget: &mut usize, seq: &mut Seq, (count, drafts): (usize, usize)) {
    let (input, row) = seq.plan(count, drafts);
    *(if row.decode { &mut plan.decode_tokens } else { &mut plan.prefill_tokens }) += count + drafts;
    plan.draft_tokens += drafts;
    plan.prompt_rows += if row.report.is_empty() { 0 } else { count };
    *budget -= count + drafts;
    plan.batch.seqs.push(input);
    plan.rows.push(row);
}

#[cfg(test)]
mod tests;
