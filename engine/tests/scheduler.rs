//! Properties of the scheduler over random histories of arrivals, steps, failures, cancellations and livelocked steps.
#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::collections::{BTreeMap, BTreeSet, HashMap};

use engine::scheduler::{Finish, Limits, NewSeq, Refusal, ReqId, Scheduler, SeqResult, StepPlan};
use proptest::prelude::*;

const EOS: u32 = 9;

#[derive(Debug, Clone)]
enum Op {
    Submit {
        prompt: usize,
        output: usize,
        rows: bool,
    },
    Cancel(usize),
    Step,
    /// A step in which the n-th sequence of the batch fails.
    FailingStep(usize),
    /// A step whose results are thrown away.
    LostStep,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        4 => (1usize..40, 0usize..30, any::<bool>()).prop_map(|(prompt, output, rows)| Op::Submit { prompt, output, rows }),
        1 => (0usize..20).prop_map(Op::Cancel),
        12 => Just(Op::Step),
        1 => (0usize..8).prop_map(Op::FailingStep),
        1 => Just(Op::LostStep),
    ];
    prop::collection::vec(op, 1..150)
}

/// The scheduler beside a cache that remembers who wrote what, and the ends that each request had.
struct World {
    scheduler: Scheduler,
    limits: Limits,
    cache: HashMap<(u32, usize), (ReqId, usize, u32)>,
    tokens: BTreeMap<ReqId, Vec<u32>>,
    prompt_len: BTreeMap<ReqId, usize>,
    reported: BTreeMap<ReqId, usize>,
    ends: BTreeMap<ReqId, usize>,
    next_id: ReqId,
}

impl World {
    fn new(limits: Limits) -> Self {
        let scheduler = Scheduler::new(limits);
        let (cache, tokens, prompt_len) = (HashMap::new(), BTreeMap::new(), BTreeMap::new());
        let (reported, ends) = (BTreeMap::new(), BTreeMap::new());
        Self { scheduler, limits, cache, tokens, prompt_len, reported, ends, next_id: 1 }
    }

    fn run(&mut self, op: &Op) {
        match *op {
            Op::Submit { prompt, output, rows } => self.submit(prompt, output, rows),
            Op::Cancel(n) => {
                let live: Vec<_> = self.tokens.keys().filter(|id| !self.ends.contains_key(id)).copied().collect();
                if let Some(id) = live.get(n % live.len().max(1)) {
                    assert!(self.scheduler.cancel(*id));
                    *self.ends.entry(*id).or_default() += 1;
                }
            }
            Op::Step => self.step(None, true),
            Op::FailingStep(n) => self.step(Some(n), true),
            Op::LostStep => self.step(None, false),
        }
        let free = self.scheduler.free_blocks();
        assert_eq!(free + self.scheduler.owned_blocks(), self.limits.num_blocks, "blocks are conserved");
    }

    fn submit(&mut self, prompt: usize, output: usize, rows: bool) {
        let id = self.next_id;
        self.next_id += 1;
        let tokens: Vec<u32> = (0..prompt as u32).map(|i| 100 + i).collect();
        let mut seq = NewSeq::new(id, tokens.clone(), output);
        (seq.prompt_rows, seq.stop_token_ids) = (rows, vec![EOS]);
        match self.scheduler.submit(seq) {
            Ok(()) => {
                self.tokens.insert(id, tokens);
                self.prompt_len.insert(id, prompt);
                if rows {
                    self.reported.insert(id, 0);
                }
            }
            Err(refusal) => {
                let too_big = prompt + output > self.limits.seq_len_max
                    || (prompt + output).div_ceil(self.limits.block_size) > self.limits.num_blocks;
                let full = matches!(refusal, Refusal::QueueFull { .. });
                assert!(too_big != full, "{refusal}");
            }
        }
    }

    fn step(&mut self, failing: Option<usize>, apply: bool) {
        let plan = self.scheduler.plan();
        self.check_batch(&plan);
        if !apply {
            return;
        }
        let results: Vec<SeqResult> = plan
            .rows
            .iter()
            .enumerate()
            .map(|(i, row)| {
                // Every 17th token is the end of the sequence.
                let n = self.tokens[&row.id].len() as u32;
                let token = row.samples.then_some(if (n + row.id as u32).is_multiple_of(17) { EOS } else { 200 + n });
                if failing == Some(i) {
                    SeqResult::Failed { id: row.id }
                } else {
                    SeqResult::Advanced { id: row.id, token }
                }
            })
            .collect();
        for (row, result) in plan.rows.iter().zip(&results) {
            if let (SeqResult::Advanced { .. }, Some(reported), false) =
                (result, self.reported.get_mut(&row.id), row.report.is_empty())
            {
                assert_eq!(row.report.start, *reported, "prompt rows are told once and in order");
                *reported = row.report.end;
            }
        }
        let outcomes = self.scheduler.apply(&results);
        assert_eq!(outcomes.len(), plan.rows.len());
        for outcome in outcomes {
            self.tokens.get_mut(&outcome.id).unwrap().extend(outcome.token);
            if let Some(finish) = outcome.finish {
                *self.ends.entry(outcome.id).or_default() += 1;
                let told = self.reported.get(&outcome.id).copied();
                if let (Some(told), true) = (told, finish != Finish::Failed) {
                    assert_eq!(told, self.prompt_len[&outcome.id] - 1, "all prompt rows were told");
                }
            }
        }
    }

    /// Budget and batch bounds hold, no block is in two tables, and everything before `start_pos` is in the cache as it
    /// was written for this very sequence.
    fn check_batch(&mut self, plan: &StepPlan) {
        let count: usize = plan.batch.seqs.iter().map(|s| s.tokens.len()).sum();
        assert!(count <= self.limits.step_tokens_max && plan.rows.len() <= self.limits.num_seqs_max);
        assert_eq!(count, plan.prefill_tokens + plan.decode_tokens);
        let mut seen = BTreeSet::new();
        for (row, seq) in plan.rows.iter().zip(&plan.batch.seqs) {
            assert!(seq.block_table.iter().all(|b| seen.insert(*b)), "a block is in two tables");
            let size = self.limits.block_size;
            let place = |pos: usize| (seq.block_table[pos / size], pos % size);
            for pos in 0..seq.start_pos {
                assert_eq!(self.cache.get(&place(pos)), Some(&(row.id, pos, self.tokens[&row.id][pos])));
            }
            for (i, token) in seq.tokens.iter().enumerate() {
                assert_eq!(*token, self.tokens[&row.id][seq.start_pos + i]);
                self.cache.insert(place(seq.start_pos + i), (row.id, seq.start_pos + i, *token));
            }
        }
    }
}

fn limits() -> impl Strategy<Value = Limits> {
    (4usize..24, 1usize..9, 1usize..6, 0usize..20, 1usize..12).prop_map(
        |(num_blocks, block_size, seqs, budget, waiting_max)| Limits {
            num_blocks,
            block_size,
            num_seqs_max: seqs,
            step_tokens_max: seqs + budget,
            waiting_max,
            seq_len_max: 60,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn blocks_are_conserved_and_every_accepted_request_ends_exactly_once(limits in limits(), ops in ops()) {
        let mut world = World::new(limits);
        ops.iter().for_each(|op| world.run(op));
        // No starvation: what is left is done in as many steps as a single file would take, recomputes included.
        let bound = 70 * (world.tokens.len() + 1) * 3;
        let steps = (0..bound).take_while(|_| {
            world.run(&Op::Step);
            world.scheduler.owed().running + world.scheduler.owed().waiting > 0
        });
        prop_assert!(steps.count() < bound, "starved: {:?}", world.scheduler.owed());
        prop_assert_eq!(world.scheduler.free_blocks(), limits.num_blocks);
        for id in world.tokens.keys() {
            prop_assert_eq!(world.ends.get(id), Some(&1), "request {}", id);
        }
    }
}

fn small() -> Limits {
    Limits { num_blocks: 8, block_size: 4, num_seqs_max: 4, step_tokens_max: 8, waiting_max: 4, seq_len_max: 32 }
}

#[test]
fn long_prompts_run_in_chunks_and_decodes_go_on_beside_them() {
    let mut s = Scheduler::new(small());
    s.submit(NewSeq::new(1, vec![1; 2], 10)).unwrap();
    s.plan();
    s.apply(&[SeqResult::Advanced { id: 1, token: Some(5) }]);
    s.submit(NewSeq::new(2, vec![1; 12], 1)).unwrap();
    let plan = s.plan();
    assert_eq!((plan.decode_tokens, plan.prefill_tokens), (1, 7));
    s.apply(&[SeqResult::Advanced { id: 1, token: Some(5) }, SeqResult::Advanced { id: 2, token: None }]);
    assert_eq!(s.owed().prompt_tokens, 5);
    let plan = s.plan();
    assert_eq!((plan.decode_tokens, plan.prefill_tokens, plan.rows[1].samples), (1, 5, true));
}

#[test]
fn the_youngest_gives_its_blocks_to_the_oldest_and_comes_back() {
    let limits = Limits { num_blocks: 6, step_tokens_max: 64, ..small() };
    let mut s = Scheduler::new(limits);
    s.submit(NewSeq::new(1, vec![1; 8], 16)).unwrap();
    s.submit(NewSeq::new(2, vec![1; 8], 8)).unwrap();
    let mut preempted = Vec::new();
    let mut ended = Vec::new();
    for _ in 0..64 {
        let plan = s.plan();
        preempted.extend(plan.preempted.clone());
        let results: Vec<_> =
            plan.rows.iter().map(|r| SeqResult::Advanced { id: r.id, token: r.samples.then_some(3) }).collect();
        ended.extend(s.apply(&results).into_iter().filter(|o| o.finish.is_some()).map(|o| o.id));
    }
    assert_eq!(preempted, [2]);
    assert_eq!(ended, [1, 2]);
}

#[test]
fn refusals_say_why() {
    let mut s = Scheduler::new(small());
    assert_eq!(s.submit(NewSeq::new(1, vec![], 4)), Err(Refusal::EmptyPrompt));
    assert_eq!(s.submit(NewSeq::new(1, vec![1; 30], 4)), Err(Refusal::TooLong { tokens: 34, tokens_max: 32 }));
    for id in 1..=4 {
        s.submit(NewSeq::new(id, vec![1], 4)).unwrap();
    }
    assert_eq!(s.submit(NewSeq::new(4, vec![1], 4)), Err(Refusal::Duplicate(4)));
    assert_eq!(s.submit(NewSeq::new(5, vec![1], 4)), Err(Refusal::QueueFull { waiting: 4 }));
}
