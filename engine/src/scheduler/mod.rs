//! Continuous batching: which tokens of which sequences run in the next step, and in which KV blocks.
//!
//! Pure: no clock, no socket, no tensor, no thread. [`Scheduler::plan`] returns a value, [`Scheduler::apply`] takes what became
//! of it; a plan that is never applied changes nothing but the queue's place (which is what a livelock looks like).
//!
//! **Invariant:** every running sequence arrived before every waiting one. Only the youngest is ever preempted, so the oldest
//! always moves and nobody starves.
//! **Invariant:** free blocks plus blocks in tables equal the pool's size (E7).

pub mod blocks;
pub mod plan;
mod seq;

use std::collections::VecDeque;

use blocks::BlockPool;
pub use plan::{Finish, Limits, NewSeq, Outcome, Owed, PlanRow, Refusal, ReqId, SeqResult, StepPlan};
use seq::Seq;

/// Queue, running batch and KV blocks.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    pool: BlockPool,
    /// Both in order of arrival.
    waiting: VecDeque<Seq>,
    running: Vec<Seq>,
}

impl Scheduler {
    pub fn new(limits: Limits) -> Self {
        let pool = BlockPool::new(limits.num_blocks, limits.block_size);
        Self { limits, pool, waiting: VecDeque::new(), running: Vec::new() }
    }

    /// Puts a sequence at the end of the queue.
    ///
    /// # Errors
    /// [`Refusal`]: it is malformed, can never fit, or the queue is full.
    pub fn submit(&mut self, new: NewSeq) -> Result<(), Refusal> {
        check_fit(&new, &self.limits)?;
        if self.find(new.id) {
            return Err(Refusal::Duplicate(new.id));
        }
        if self.waiting.len() >= self.limits.waiting_max {
            return Err(Refusal::QueueFull { waiting: self.waiting.len() });
        }
        self.waiting.push_back(Seq::new(new, self.pool.table()));
        Ok(())
    }

    /// Takes a sequence out, its blocks return. False: there is none of this id.
    pub fn cancel(&mut self, id: ReqId) -> bool {
        let before = self.running.len() + self.waiting.len();
        self.running.retain(|s| s.spec.id != id);
        self.waiting.retain(|s| s.spec.id != id);
        self.running.len() + self.waiting.len() < before
    }

    /// The next step: decodes first (one token each, nobody's stream waits for another's prompt), then chunks of prompts
    /// under way, then new sequences, within the step's token budget.
    pub fn plan(&mut self) -> StepPlan {
        let mut plan = StepPlan::default();
        let mut budget = self.limits.step_tokens_max;
        self.running.iter_mut().for_each(Seq::forget_plan);
        self.plan_decodes(&mut plan, &mut budget);
        self.plan_prefills(&mut plan, &mut budget);
        // Who was just preempted would be admitted at once into the room it made.
        if plan.preempted.is_empty() {
            self.admit(&mut plan, &mut budget);
        }
        plan
    }

    /// Takes in what became of the last plan. Sequences that ended are gone when this returns.
    pub fn apply(&mut self, results: &[SeqResult]) -> Vec<Outcome> {
        results.iter().filter_map(|result| self.apply_one(*result)).collect()
    }

    pub fn owed(&self) -> Owed {
        let prompt_tokens = self.running.iter().chain(&self.waiting).map(Seq::prefill_owed).sum();
        Owed { running: self.running.len(), waiting: self.waiting.len(), prompt_tokens }
    }

    pub fn free_blocks(&self) -> usize {
        self.pool.free_blocks()
    }

    /// Blocks that sequences own. Together with the free ones these are all there are (E7).
    pub fn owned_blocks(&self) -> usize {
        self.running.iter().chain(&self.waiting).map(|s| s.table.blocks().len()).sum()
    }

    /// Blocks in use, of all, in 0..=1.
    pub fn kv_usage(&self) -> f64 {
        let total = self.pool.num_blocks().max(1) as f64;
        1.0 - self.pool.free_blocks() as f64 / total
    }

    fn plan_decodes(&mut self, plan: &mut StepPlan, budget: &mut usize) {
        let mut i = 0;
        while i < self.running.len() && *budget > 0 {
            if self.running[i].is_decode() {
                if !self.make_room(i, plan) {
                    break;
                }
                push(plan, budget, &mut self.running[i], 1);
            }
            i += 1;
        }
    }

    /// Gets the block that sequence `i` needs for its next token, from the youngest sequences if it must be.
    /// False: `i` itself was the youngest and went back to the queue.
    fn make_room(&mut self, i: usize, plan: &mut StepPlan) -> bool {
        loop {
            let Some(seq) = self.running.get_mut(i) else { return false };
            let tokens = seq.len();
            if seq.table.grow_to(tokens) {
                return true;
            }
            let Some(mut victim) = self.running.pop() else { return false };
            victim.restart();
            plan.preempted.push(victim.spec.id);
            self.waiting.push_front(victim);
        }
    }

    fn plan_prefills(&mut self, plan: &mut StepPlan, budget: &mut usize) {
        for seq in &mut self.running {
            if *budget == 0 {
                break;
            }
            if !seq.is_decode() && seq.remaining() > 0 {
                let count = seq.remaining().min(*budget);
                push(plan, budget, seq, count);
            }
        }
    }

    /// Admits from the head of the queue, never past it (FCFS). A sequence gets the blocks of all its present tokens at
    /// once, and one block a running sequence is left over, so that admission does not cause the next preemption.
    fn admit(&mut self, plan: &mut StepPlan, budget: &mut usize) {
        while *budget > 0 && self.running.len() < self.limits.num_seqs_max {
            let Some(head) = self.waiting.front_mut() else { return };
            let reserve = self.running.len();
            if self.pool.blocks_for(head.len()) + reserve > self.pool.free_blocks() && reserve > 0 {
                return;
            }
            let tokens = head.len();
            if !head.table.grow_to(tokens) {
                return;
            }
            let Some(mut seq) = self.waiting.pop_front() else { return };
            plan.admitted.push(seq.spec.id);
            let count = seq.remaining().min(*budget);
            push(plan, budget, &mut seq, count);
            self.running.push(seq);
        }
    }

    fn apply_one(&mut self, result: SeqResult) -> Option<Outcome> {
        let (id, token, failed) = match result {
            SeqResult::Advanced { id, token } => (id, token, false),
            SeqResult::Failed { id } => (id, None, true),
        };
        let i = self.running.iter().position(|s| s.spec.id == id && s.is_planned())?;
        let seq = &mut self.running[i];
        let finish = if failed {
            Some(Finish::Failed)
        } else {
            seq.advance(token);
            finish_of(seq, token)
        };
        if finish.is_some() {
            self.running.remove(i);
        }
        Some(Outcome { id, token, finish })
    }

    fn find(&self, id: ReqId) -> bool {
        self.running.iter().chain(&self.waiting).any(|s| s.spec.id == id)
    }
}

/// Can this sequence ever run to its end?
///
/// # Errors
/// [`Refusal`] when it cannot. The front end asks the same before it accepts a request.
pub fn check_fit(new: &NewSeq, limits: &Limits) -> Result<(), Refusal> {
    let tokens = new.prompt.len().saturating_add(new.max_new_tokens);
    let blocks = tokens.div_ceil(limits.block_size.max(1));
    if new.prompt.is_empty() {
        Err(Refusal::EmptyPrompt)
    } else if tokens > limits.seq_len_max {
        Err(Refusal::TooLong { tokens, tokens_max: limits.seq_len_max })
    } else if blocks > limits.num_blocks {
        Err(Refusal::CacheTooSmall { blocks, blocks_max: limits.num_blocks })
    } else {
        Ok(())
    }
}

fn push(plan: &mut StepPlan, budget: &mut usize, seq: &mut Seq, count: usize) {
    let (input, row) = seq.plan(count);
    *(if row.decode { &mut plan.decode_tokens } else { &mut plan.prefill_tokens }) += count;
    *budget -= count;
    plan.batch.seqs.push(input);
    plan.rows.push(row);
}

fn finish_of(seq: &Seq, token: Option<u32>) -> Option<Finish> {
    if token.is_some_and(|t| seq.spec.stop_token_ids.contains(&t)) {
        Some(Finish::Stop)
    } else if seq.generated() >= seq.spec.max_new_tokens && (token.is_some() || seq.remaining() == 0) {
        Some(Finish::Length)
    } else {
        None
    }
}
