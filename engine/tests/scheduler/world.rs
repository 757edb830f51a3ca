//! A scheduler, the model it schedules, and everything that was promised to every request; checked after every move.

use std::collections::{BTreeMap, BTreeSet};

use engine::model::{KvShape, LogitsWanted, Model, SeqInput, StepBatch};
use engine::scheduler::{Finish, Limits, NewSeq, Refusal, ReqId, Scheduler, SeqResult, StepPlan};

use crate::paged::{EOS, NAN, PagedModel, REFUSED, argmax, greedy, mix};
use crate::pulse::{Pulse, Told};

/// A request and what became of it.
#[derive(Debug)]
pub struct Request {
    pub prompt: Vec<u32>,
    pub prompt_rows: bool,
    pub priority: i32,
    pub deadline_ns: Option<u64>,
    pub arrived_ns: u64,
    /// It has a token that the model refuses, or makes no number of (EP5).
    pub poisoned: bool,
    pub expected: Vec<u32>,
    pub said: Vec<u32>,
    pub rows_told: usize,
    /// Terminal events; one each in the end (EP2).
    pub ends: usize,
    pub ended_ns: u64,
    pub last_token_ns: Option<u64>,
}

/// What a step does besides running.
#[derive(Debug, Clone, Copy, Default)]
pub struct Mishap {
    /// The so-many-th sequence of the batch fails.
    pub fails: Option<usize>,
    /// All of them do.
    pub all_fail: bool,
    /// The results are thrown away.
    pub lost: bool,
    /// The machine stands still for so long.
    pub stall_ns: u64,
    /// The client of the so-many-th sequence leaves while the step runs.
    pub leaves: Option<usize>,
}

/// What happened, by number.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tally {
    pub steps: u64,
    pub preemptions: usize,
    pub cancelled: usize,
    /// Of `cancelled`: in the middle of their prompt.
    pub cancelled_prefilling: usize,
    /// Turned away in the queue.
    pub late: usize,
    pub failed: usize,
    /// Guesses that were right.
    pub accepted: usize,
    pub blocks_peak: usize,
}

pub struct World {
    pub scheduler: Scheduler,
    pub limits: Limits,
    pub requests: BTreeMap<ReqId, Request>,
    pub now_ns: u64,
    /// Longest time between two tokens of a sequence that was not preempted meanwhile, in ns, steps that were lost or stood still apart.
    pub gap_ns_max: u64,
    pub tally: Tally,
    /// Everything that happened, in order, as one number.
    pub log: u64,
    pub pulse: Pulse,
    /// What came to requests so far.
    pub told: Told,
    /// Who has no end yet, by rank: priority, then age.
    live: BTreeSet<(i32, ReqId)>,
    /// Time that nobody's stream can be blamed for.
    excused_ns: u64,
    model: PagedModel,
    next_id: ReqId,
}

impl World {
    pub fn new(limits: Limits) -> Self {
        let mut model = PagedModel::new(limits.seq_len_max, true);
        model.allocate_kv(KvShape { num_blocks: limits.num_blocks, block_size: limits.block_size }).unwrap();
        let (scheduler, requests, live) = (Scheduler::new(limits), BTreeMap::new(), BTreeSet::new());
        let (now_ns, gap_ns_max, log, excused_ns, next_id, tally) = (0, 0, 0, 0, 1, Tally::default());
        let (pulse, told) = (Pulse::new(), Told::default());
        Self {
            scheduler,
            limits,
            requests,
            now_ns,
            gap_ns_max,
            tally,
            log,
            pulse,
            told,
            live,
            excused_ns,
            model,
            next_id,
        }
    }

    /// Submits a request; `None` where it was refused, for a reason that is true.
    pub fn submit(&mut self, seq: impl FnOnce(NewSeq) -> NewSeq, prompt: Vec<u32>, output_max: usize) -> Option<ReqId> {
        let id = self.next_id;
        self.next_id += 1;
        let mut new = seq(NewSeq::new(id, prompt.clone(), output_max));
        new.stop_token_ids = [EOS].into();
        let (prompt_rows, deadline_ns, priority) = (new.prompt_rows, new.deadline_ns, new.priority);
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
            self.note(Event::Refused, id);
            return None;
        }
        self.note(Event::Accepted, id);
        let poisoned = prompt.iter().any(|token| [REFUSED, NAN].contains(token));
        let expected = if poisoned { Vec::new() } else { greedy(&prompt, output_max, &[EOS]) };
        let (said, rows_told, ends, ended_ns, last_token_ns, arrived_ns) = (Vec::new(), 0, 0, 0, None, self.now_ns);
        self.live.insert((priority, id));
        let request = Request {
            prompt,
            prompt_rows,
            priority,
            deadline_ns,
            arrived_ns,
            poisoned,
            expected,
            said,
            rows_told,
            ends,
            ended_ns,
            last_token_ns,
        };
        self.requests.insert(id, request);
        Some(id)
    }

    pub fn live(&self) -> Vec<ReqId> {
        self.requests.iter().filter(|(_, request)| request.ends == 0).map(|(id, _)| *id).collect()
    }

    pub fn cancel(&mut self, id: ReqId) {
        let prefills = self.scheduler.running().any(|seq| seq.id == id && !seq.decodes && seq.computed > 0);
        assert!(self.scheduler.cancel(id));
        self.tally.cancelled += 1;
        self.tally.cancelled_prefilling += usize::from(prefills);
        self.end(id, Event::Cancelled);
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
        self.tally.late += plan.late.len();
        plan.late.iter().for_each(|(id, _)| self.end(*id, Event::Late));
        self.check(&plan);
        for id in &plan.preempted {
            self.requests.get_mut(id).unwrap().last_token_ns = None;
            self.tally.preemptions += 1;
            self.note(Event::Preempted, *id);
        }
        plan.admitted.iter().for_each(|id| self.note(Event::Admitted, *id));
        let heard = (self.told, self.scheduler.owed());
        if plan.is_empty() {
            self.pulse.rests(self.now_ns, heard.0, heard.1);
            return false;
        }
        self.pulse.begins(self.now_ns, &plan, heard);
        self.tally.steps += 1;
        self.tally.blocks_peak = self.tally.blocks_peak.max(self.limits.num_blocks - self.scheduler.free_blocks());
        let took_ns = took_ns(&plan) + mishap.stall_ns;
        self.now_ns += took_ns;
        self.excused_ns += if mishap.lost { took_ns } else { mishap.stall_ns };
        self.note(Event::Step, took_ns);
        let results = self.run(&plan, mishap);
        if let Some(row) = mishap.leaves.and_then(|at| plan.rows.get(at)) {
            self.cancel(row.id);
        }
        if !mishap.lost {
            self.scheduler.learn(&plan, took_ns);
            self.deliver(&plan, results, mishap);
        }
        let heard = (self.told, self.scheduler.owed());
        if let Err(lie) = self.pulse.ends(self.now_ns, mishap.stall_ns > 0, heard) {
            panic!("{lie}");
        }
        self.check_blocks();
        true
    }

    /// Lets go of what has ended, so that a long run needs no more memory than a short one; returns what that was.
    pub fn forget_ended(&mut self) -> Vec<Request> {
        assert!(self.requests.values().all(|request| request.ends <= 1), "EP2: one end each");
        self.requests.extract_if(.., |_, request| request.ends > 0).map(|(_, request)| request).collect()
    }

    pub fn check_blocks(&self) {
        let blocks = self.scheduler.free_blocks() + self.scheduler.owned_blocks();
        assert_eq!(blocks, self.limits.num_blocks, "EP3: blocks are conserved");
    }

    /// Nothing comes after this.
    fn end(&mut self, id: ReqId, how: Event) {
        let request = self.requests.get_mut(&id).unwrap();
        request.ends += 1;
        self.told.ends += 1;
        request.ended_ns = self.now_ns;
        assert_eq!(request.ends, 1, "EP2: request {id} ends twice");
        assert!(self.live.remove(&(request.priority, id)));
        self.note(how, id);
    }

    fn note(&mut self, event: Event, of: u64) {
        self.log = mix(self.log ^ of, event as u32);
    }

    /// Runs the model, as the engine thread does: greedy, row by row, as long as the guesses are right; a batch that is refused runs
    /// again one by one.
    fn run(&mut self, plan: &StepPlan, mishap: Mishap) -> Vec<SeqResult> {
        let logits: Vec<Option<Vec<Vec<f32>>>> = match self.model.forward(&plan.batch) {
            Ok(all) => all.rows.into_iter().map(Some).collect(),
            Err(_) => {
                let mut alone = |seq: &SeqInput| {
                    Some(
                        self.model
                            .forward(&StepBatch { seqs: vec![seq.clone()], pass: plan.batch.pass })
                            .ok()?
                            .rows
                            .remove(0),
                    )
                };
                plan.batch.seqs.iter().map(&mut alone).collect()
            }
        };
        let result = |(i, rows): (usize, &Option<Vec<Vec<f32>>>)| {
            let (row, input) = (&plan.rows[i], &plan.batch.seqs[i]);
            let failed = SeqResult::Failed { id: row.id };
            let Some(rows) = rows.as_ref().filter(|_| mishap.fails != Some(i) && !mishap.all_fail) else {
                return failed;
            };
            let drafts = &input.tokens[input.tokens.len() - row.drafts..];
            let first = rows.len().saturating_sub(row.drafts + 1);
            let mut tokens = Vec::new();
            for at in (0..=row.drafts).filter(|_| row.samples) {
                if at > 0 && tokens.last() != Some(&drafts[at - 1]) {
                    break;
                }
                let Some(token) = argmax(&rows[first + at]) else { return failed };
                tokens.push(token);
            }
            SeqResult::Advanced { id: row.id, tokens }
        };
        logits.iter().enumerate().map(result).collect()
    }

    fn deliver(&mut self, plan: &StepPlan, results: Vec<SeqResult>, mishap: Mishap) {
        let here = |world: &Self, id: &ReqId| world.requests[id].ends == 0;
        for (row, result) in plan.rows.iter().zip(&results) {
            if here(self, &row.id) && matches!(result, SeqResult::Advanced { .. }) && !row.report.is_empty() {
                let request = self.requests.get_mut(&row.id).unwrap();
                assert_eq!(row.report.start, request.rows_told, "prompt rows are told once and in order");
                request.rows_told = row.report.end;
            }
        }
        let outcomes = self.scheduler.apply(results);
        assert_eq!(outcomes.len(), plan.rows.iter().filter(|row| here(self, &row.id)).count());
        if !outcomes.is_empty() {
            self.pulse.moves(self.now_ns);
        }
        // What is excused counts as if it had not been.
        let heard_ns = self.now_ns - self.excused_ns;
        for outcome in outcomes {
            let request = self.requests.get_mut(&outcome.id).unwrap();
            assert_eq!(request.ends, 0, "EP2: nothing after the end");
            self.tally.accepted += outcome.tokens.len().saturating_sub(1);
            if !outcome.tokens.is_empty() {
                let gap_ns = request.last_token_ns.map_or(0, |last| heard_ns - last);
                self.gap_ns_max = self.gap_ns_max.max(gap_ns);
                request.last_token_ns = Some(heard_ns);
            }
            request.said.extend(&outcome.tokens);
            self.told.tokens += outcome.tokens.len() as u64;
            assert!(request.expected.starts_with(&request.said), "EP4: {} said {:?}", outcome.id, request.said);
            if let Some(finish) = outcome.finish {
                let doomed = mishap.all_fail
                    || mishap.fails.and_then(|at| plan.rows.get(at)).is_some_and(|row| row.id == outcome.id);
                check_end(request, finish, doomed);
                self.tally.failed += usize::from(finish == Finish::Failed);
                self.end(outcome.id, if finish == Finish::Failed { Event::Failed } else { Event::Finished });
            }
            outcome.tokens.iter().for_each(|token| self.note(Event::Token, u64::from(*token)));
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
        if let Some((_, first)) = self.live.first() {
            assert!(rows.contains(first), "{first} goes before everybody and does not move: {plan:?}");
        }
        let owed = self.scheduler.owed();
        assert_eq!(owed.running + owed.waiting, self.live.len(), "EP2: who has no end runs or waits");
        let left_out = self.scheduler.running().find(|seq| seq.decodes && !rows.contains(&seq.id));
        assert!(left_out.is_none(), "a decode waits: {left_out:?}");
        let shape = |logits| match logits {
            LogitsWanted::None => 0,
            LogitsWanted::Last | LogitsWanted::Drawn(_) => 1,
            LogitsWanted::All => 2,
        };
        // A step whose guesses are all wanting is a plain one: its shape is no other (S1).
        for (row, seq) in plan.rows.iter().zip(&plan.batch.seqs).filter(|(row, _)| row.decode && row.drafts == 0) {
            assert_eq!((seq.tokens.len(), shape(seq.logits), row.samples), (1, 1, true));
        }
    }
}

/// An end that says nothing false: all of the output, or a failure with a reason.
fn check_end(request: &Request, finish: Finish, doomed: bool) {
    if finish == Finish::Failed {
        assert!(request.poisoned || doomed, "EP5: it fails for what a neighbour has");
        return;
    }
    assert!(!request.poisoned, "nothing can follow what is no number");
    assert_eq!(request.said, request.expected, "EP4: all of it");
    let rows = if request.prompt_rows { request.prompt.len() - 1 } else { 0 };
    assert_eq!(request.rows_told, rows, "all prompt rows were told");
}

/// What the log is made of.
#[derive(Debug, Clone, Copy)]
enum Event {
    Accepted,
    Refused,
    Admitted,
    Preempted,
    Step,
    Token,
    Finished,
    Failed,
    Cancelled,
    Late,
}
