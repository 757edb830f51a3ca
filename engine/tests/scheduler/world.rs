//! A scheduler, the model it schedules, and everything that was promised to every request; checked after every move.

use std::collections::{BTreeMap, BTreeSet};

use engine::model::{KvShape, LogitsWanted, Model};
use engine::scheduler::{Finish, Limits, NewSeq, Refusal, ReqId, Scheduler, SeqResult, StepPlan};

use crate::paged::{EOS, PagedModel, argmax, greedy};

/// A request and what became of it.
#[derive(Debug)]
pub struct Request {
    pub prompt: Vec<u32>,
    pub prompt_rows: bool,
    pub expected: Vec<u32>,
    pub said: Vec<u32>,
    pub rows_told: usize,
    /// Terminal events; one each in the end (EP2).
    pub ends: usize,
    pub last_token_ns: Option<u64>,
}

/// What a step does besides running.
#[derive(Debug, Clone, Copy, Default)]
pub struct Mishap {
    /// The so-many-th sequence of the batch fails.
    pub fails: Option<usize>,
    /// The results are thrown away.
    pub lost: bool,
}

pub struct World {
    pub scheduler: Scheduler,
    pub limits: Limits,
    pub requests: BTreeMap<ReqId, Request>,
    pub now_ns: u64,
    /// Longest time between two tokens of a sequence that was not preempted meanwhile, in ns.
    pub gap_ns_max: u64,
    pub preemptions: usize,
    pub late: usize,
    pub accepted: usize,
    model: PagedModel,
    next_id: ReqId,
}

impl World {
    pub fn new(limits: Limits) -> Self {
        let mut model = PagedModel::new(limits.seq_len_max, true);
        model.allocate_kv(KvShape { num_blocks: limits.num_blocks, block_size: limits.block_size }).unwrap();
        let (scheduler, requests) = (Scheduler::new(limits), BTreeMap::new());
        let (now_ns, gap_ns_max, preemptions, late, accepted, next_id) = (0, 0, 0, 0, 0, 1);
        Self { scheduler, limits, requests, now_ns, gap_ns_max, preemptions, late, accepted, model, next_id }
    }

    /// Submits a request; `None` where it was refused, for a reason that is true.
    pub fn submit(&mut self, seq: impl FnOnce(NewSeq) -> NewSeq, prompt: Vec<u32>, output_max: usize) -> Option<ReqId> {
        let id = self.next_id;
        self.next_id += 1;
        let mut new = seq(NewSeq::new(id, prompt.clone(), output_max));
        new.stop_token_ids = vec![EOS];
        let (prompt_rows, deadline_ns) = (new.prompt_rows, new.deadline_ns);
        let waiting = self.scheduler.owed().waiting;
        if let Err(refusal) = self.scheduler.submit(new, self.now_ns) {
            let tokens = prompt.len() + output_max;
            match refusal {
                Refusal::TooLong { .. } => assert!(tokens > self.limits.seq_len_max),
                Refusal::CacheTooSmall { .. } => {
                    assert!(tokens.div_ceil(self.limits.block_size) > self.limits.num_blocks);
                }
                Refusal::QueueFull { .. } => assert!(waiting >= self.limits.waiting_max),
                Refusal::TooLate { needed_ms, left_ms } => assert!(deadline_ns.is_some() && needed_ms >= left_ms),
                other => panic!("{other}"),
            }
            return None;
        }
        let expected = greedy(&prompt, output_max, &[EOS]);
        let (said, rows_told, ends, last_token_ns) = (Vec::new(), 0, 0, None);
        let request = Request { prompt, prompt_rows, expected, said, rows_told, ends, last_token_ns };
        self.requests.insert(id, request);
        Some(id)
    }

    pub fn live(&self) -> Vec<ReqId> {
        self.requests.iter().filter(|(_, request)| request.ends == 0).map(|(id, _)| *id).collect()
    }

    pub fn cancel(&mut self, id: ReqId) {
        assert!(self.scheduler.cancel(id));
        self.requests.get_mut(&id).unwrap().ends += 1;
    }

    /// Proposes what `id` will say next, with the guess at `wrong_at` made wrong.
    pub fn propose(&mut self, id: ReqId, count: usize, wrong_at: usize) {
        let request = &self.requests[&id];
        let mut drafts: Vec<u32> = request.expected[request.said.len()..].iter().take(count).copied().collect();
        drafts.iter_mut().skip(wrong_at).take(1).for_each(|token| *token = 8 + (*token + 1) % 40);
        self.scheduler.propose(id, drafts);
    }

    /// One step that takes `took_ns(plan)`; false when there was nothing to run.
    pub fn step(&mut self, mishap: Mishap, took_ns: impl Fn(&StepPlan) -> u64) -> bool {
        let plan = self.scheduler.plan(self.now_ns);
        self.check(&plan);
        for (id, _) in &plan.late {
            self.requests.get_mut(id).unwrap().ends += 1;
            self.late += 1;
        }
        for id in &plan.preempted {
            self.requests.get_mut(id).unwrap().last_token_ns = None;
            self.preemptions += 1;
        }
        if plan.is_empty() {
            return false;
        }
        let took_ns = took_ns(&plan);
        self.now_ns += took_ns;
        let results = self.run(&plan, mishap.fails);
        if !mishap.lost {
            self.scheduler.learn(&plan, took_ns);
            self.deliver(&plan, results);
        }
        self.check_blocks();
        true
    }

    /// Lets go of what has ended, so that a long run needs no more memory than a short one; returns how many that were.
    pub fn forget_ended(&mut self) -> usize {
        let before = self.requests.len();
        assert!(self.requests.values().all(|request| request.ends <= 1), "EP2: one end each");
        self.requests.retain(|_, request| request.ends == 0);
        before - self.requests.len()
    }

    pub fn check_blocks(&self) {
        let blocks = self.scheduler.free_blocks() + self.scheduler.owned_blocks();
        assert_eq!(blocks, self.limits.num_blocks, "EP3: blocks are conserved");
    }

    /// Runs the model, as the engine thread does: greedy, row by row, as long as the guesses are right.
    fn run(&mut self, plan: &StepPlan, fails: Option<usize>) -> Vec<SeqResult> {
        let logits = self.model.forward(&plan.batch).unwrap().rows;
        let result = |(i, rows): (usize, &Vec<Vec<f32>>)| {
            let (row, input) = (&plan.rows[i], &plan.batch.seqs[i]);
            if fails == Some(i) {
                return SeqResult::Failed { id: row.id };
            }
            let drafts = &input.tokens[input.tokens.len() - row.drafts..];
            let first = rows.len().saturating_sub(row.drafts + 1);
            let mut tokens = Vec::new();
            for at in (0..=row.drafts).filter(|_| row.samples) {
                if at > 0 && tokens.last() != Some(&drafts[at - 1]) {
                    break;
                }
                tokens.extend(argmax(&rows[first + at]));
            }
            SeqResult::Advanced { id: row.id, tokens }
        };
        logits.iter().enumerate().map(result).collect()
    }

    fn deliver(&mut self, plan: &StepPlan, results: Vec<SeqResult>) {
        for (row, result) in plan.rows.iter().zip(&results) {
            let request = self.requests.get_mut(&row.id).unwrap();
            if matches!(result, SeqResult::Advanced { .. }) && !row.report.is_empty() {
                assert_eq!(row.report.start, request.rows_told, "prompt rows are told once and in order");
                request.rows_told = row.report.end;
            }
        }
        let outcomes = self.scheduler.apply(results);
        assert_eq!(outcomes.len(), plan.rows.len());
        for outcome in outcomes {
            let request = self.requests.get_mut(&outcome.id).unwrap();
            assert_eq!(request.ends, 0, "EP2: nothing after the end");
            self.accepted += outcome.tokens.len().saturating_sub(1);
            if !outcome.tokens.is_empty() {
                let gap_ns = request.last_token_ns.map_or(0, |last| self.now_ns - last);
                self.gap_ns_max = self.gap_ns_max.max(gap_ns);
                request.last_token_ns = Some(self.now_ns);
            }
            request.said.extend(&outcome.tokens);
            assert!(request.expected.starts_with(&request.said), "EP4: {} said {:?}", outcome.id, request.said);
            let Some(finish) = outcome.finish else { continue };
            request.ends += 1;
            if finish != Finish::Failed {
                assert_eq!(request.said, request.expected, "EP4: all of it");
                let rows = if request.prompt_rows { request.prompt.len() - 1 } else { 0 };
                assert_eq!(request.rows_told, rows, "all prompt rows were told");
            }
        }
    }

    /// Bounds hold, nobody writes where another one reads or writes, and every decode is in the step.
    fn check(&self, plan: &StepPlan) {
        let count: usize = plan.batch.seqs.iter().map(|s| s.tokens.len()).sum();
        assert!(count <= self.limits.step_tokens_max && plan.rows.len() <= self.limits.num_seqs_max);
        assert_eq!(count, plan.prefill_tokens + plan.decode_tokens);
        assert_eq!(plan.draft_tokens, plan.rows.iter().map(|row| row.drafts).sum::<usize>());
        let size = self.limits.block_size;
        let (mut written, mut read) = (BTreeSet::new(), BTreeSet::new());
        for seq in &plan.batch.seqs {
            let end = (seq.start_pos + seq.tokens.len()).div_ceil(size);
            let fresh = seq.block_table[seq.start_pos / size..end].iter().all(|block| written.insert(*block));
            assert!(fresh, "EP3: a block has two writers");
            read.extend(&seq.block_table[..seq.start_pos / size]);
        }
        assert!(written.is_disjoint(&read), "EP3: a block that others read is written");
        let rows: BTreeSet<ReqId> = plan.rows.iter().map(|row| row.id).collect();
        let left_out = self.scheduler.running().find(|seq| seq.decodes && !rows.contains(&seq.id));
        assert!(left_out.is_none(), "a decode waits: {left_out:?}");
        let shape = |logits| match logits {
            LogitsWanted::None => 0,
            LogitsWanted::Last => 1,
            LogitsWanted::All => 2,
        };
        // A step whose guesses are all wanting is a plain one: its shape is no other (S1).
        for (row, seq) in plan.rows.iter().zip(&plan.batch.seqs).filter(|(row, _)| row.decode && row.drafts == 0) {
            assert_eq!((seq.tokens.len(), shape(seq.logits), row.samples), (1, 1, true));
        }
    }
}
