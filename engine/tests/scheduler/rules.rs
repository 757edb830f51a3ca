//! The scheduler's rules, one by one.

use crate::held::allocations;
use engine::scheduler::{Finish, Limits, NewSeq, PrefixCounts, Refusal, ReqId, Scheduler, SeqResult, StepPlan};

fn small() -> Limits {
    Limits {
        num_blocks: 8,
        block_size: 4,
        num_seqs_max: 4,
        step_tokens_max: 8,
        waiting_max: 4,
        seq_len_max: 32,
        prefill_beside_decode_ns: u64::MAX,
        prefix_cache: true,
    }
}

/// Runs a step in which every sequence that samples says `token`.
fn step(s: &mut Scheduler, token: u32) -> (StepPlan, Vec<(ReqId, Option<Finish>)>) {
    let plan = s.plan(0);
    let results = plan.rows.iter().map(|row| {
        let tokens = if row.samples { vec![token] } else { Vec::new() };
        SeqResult::Advanced { id: row.id, tokens }
    });
    let outcomes = s.apply(results.collect());
    (plan, outcomes.into_iter().map(|o| (o.id, o.finish)).collect())
}

fn ids(plan: &StepPlan) -> Vec<ReqId> {
    plan.rows.iter().map(|row| row.id).collect()
}

#[test]
fn long_prompts_run_in_chunks_and_decodes_go_on_beside_them() {
    let mut s = Scheduler::new(small());
    s.submit(NewSeq::new(1, vec![1; 2], 10), 0).unwrap();
    step(&mut s, 5);
    s.submit(NewSeq::new(2, vec![1; 12], 1), 0).unwrap();
    let (plan, _) = step(&mut s, 5);
    assert_eq!((plan.decode_tokens, plan.prefill_tokens), (1, 7));
    assert_eq!(s.owed().prompt_tokens, 5);
    let (plan, _) = step(&mut s, 5);
    assert_eq!((plan.decode_tokens, plan.prefill_tokens, plan.rows[1].samples), (1, 5, true));
}

#[test]
fn a_prompt_beside_decodes_takes_no_more_time_than_they_can_bear() {
    let ms = 1_000_000;
    let limits = Limits { num_blocks: 512, step_tokens_max: 512, seq_len_max: 2048, ..small() };
    let mut s = Scheduler::new(Limits { prefill_beside_decode_ns: 50 * ms, ..limits });
    s.submit(NewSeq::new(1, vec![1; 200], 100), 0).unwrap();
    let (plan, _) = step(&mut s, 5);
    assert_eq!(plan.prefill_tokens, 200, "alone it may take what it likes");
    s.learn(&plan, 200 * ms);
    s.submit(NewSeq::new(2, vec![2; 1000], 1), 0).unwrap();
    assert_eq!(step(&mut s, 5).0.prefill_tokens, 50, "a millisecond a token");
    let (plan, _) = step(&mut s, 5);
    s.learn(&plan, 50_000 * ms);
    assert!(step(&mut s, 5).0.prefill_tokens > 40, "one step in which the machine stood still changes little");
    (0..60).for_each(|_| s.learn(&plan, 50_000 * ms));
    assert_eq!(step(&mut s, 5).0.prefill_tokens, 16, "but it moves, however slow");
}

#[test]
fn the_youngest_gives_its_blocks_to_the_oldest_and_comes_back() {
    let limits = Limits { num_blocks: 6, step_tokens_max: 64, ..small() };
    let mut s = Scheduler::new(limits);
    s.submit(NewSeq::new(1, vec![1; 8], 16), 0).unwrap();
    s.submit(NewSeq::new(2, vec![2; 8], 8), 0).unwrap();
    let (mut preempted, mut ended) = (Vec::new(), Vec::new());
    for _ in 0..64 {
        let (plan, outcomes) = step(&mut s, 3);
        preempted.extend(plan.preempted.clone());
        ended.extend(outcomes.into_iter().filter(|o| o.1.is_some()).map(|o| o.0));
    }
    assert_eq!(preempted, [2]);
    assert_eq!(ended, [1, 2]);
}

#[test]
fn a_higher_priority_goes_first_and_takes_the_place_of_a_lower_one() {
    let with = |id, priority| NewSeq { priority, ..NewSeq::new(id, vec![id as u32; 4], 4) };
    let mut s = Scheduler::new(Limits { num_seqs_max: 2, ..small() });
    for (id, priority) in [(1, 5), (2, 5), (3, 0), (4, -1)] {
        s.submit(with(id, priority), 0).unwrap();
    }
    assert_eq!(ids(&step(&mut s, 9).0), [4, 3]);
    s.cancel(3);
    s.cancel(4);
    assert_eq!(ids(&step(&mut s, 9).0), [1, 2]);
    s.submit(with(5, 0), 0).unwrap();
    let (plan, _) = step(&mut s, 9);
    assert_eq!((plan.preempted.clone(), ids(&plan)), (vec![2], vec![1, 5]));
    s.submit(with(6, 5), 0).unwrap();
    assert!(step(&mut s, 9).0.preempted.is_empty(), "an equal waits");
}

#[test]
fn a_higher_priority_does_not_wait_for_a_long_prompt_of_a_lower_one() {
    let with = |id, priority, len| NewSeq { priority, ..NewSeq::new(id, vec![id as u32; len], 4) };
    let mut s = Scheduler::new(Limits { num_blocks: 64, seq_len_max: 128, ..small() });
    s.submit(with(1, 0, 100), 0).unwrap();
    assert_eq!(ids(&step(&mut s, 9).0), [1]);
    s.submit(with(2, -1, 12), 0).unwrap();
    assert_eq!(ids(&step(&mut s, 9).0), [2], "it takes all that the step has");
    let (plan, _) = step(&mut s, 9);
    assert_eq!((ids(&plan), plan.rows[0].samples), (vec![2, 1], true), "the rest goes to the one under way");
    assert_eq!(plan.rows.len(), plan.batch.seqs.len());
}

#[test]
fn room_that_is_made_is_enough_also_when_decodes_take_of_it_in_the_same_step() {
    let with = |id, priority, len| NewSeq { priority, ..NewSeq::new(id, vec![id as u32; len], 4) };
    let mut s = Scheduler::new(Limits { num_blocks: 4, prefix_cache: false, ..small() });
    s.submit(with(1, 0, 4), 0).unwrap();
    step(&mut s, 9);
    // Three blocks are free: two for the one that comes, one to be left over, and the first one's next token takes that.
    s.submit(with(2, -1, 8), 0).unwrap();
    let (plan, _) = step(&mut s, 9);
    assert_eq!((plan.preempted.clone(), ids(&plan)), (vec![1], vec![2]));
}

#[test]
fn a_beginning_that_was_run_before_is_not_run_again() {
    let limits = Limits { num_blocks: 16, step_tokens_max: 64, ..small() };
    let mut s = Scheduler::new(limits);
    let prompt: Vec<u32> = (10..20).collect();
    s.submit(NewSeq::new(1, prompt.clone(), 1), 0).unwrap();
    assert_eq!(step(&mut s, 9).0.prefill_tokens, 10);
    s.submit(NewSeq::new(2, prompt.clone(), 3), 0).unwrap();
    let (plan, _) = step(&mut s, 9);
    assert_eq!((plan.prefill_tokens, plan.batch.seqs[0].start_pos), (2, 8));
    assert_eq!(s.prefix_counts(), PrefixCounts { queried_tokens: 20, hit_tokens: 8 });
    // Who wants logprobs of its prompt has it run.
    s.submit(NewSeq { prompt_rows: true, ..NewSeq::new(3, prompt, 1) }, 0).unwrap();
    assert_eq!(step(&mut s, 9).0.prefill_tokens, 10);
    assert_eq!(s.prefix_counts().queried_tokens, 20);
}

/// A row of logits is the whole vocabulary: who wants one of each prompt token gets them over many steps, and nobody's step is longer for it.
#[test]
fn rows_for_logprobs_of_prompts_are_few_a_step() {
    let limits = Limits { num_blocks: 256, num_seqs_max: 3, step_tokens_max: 512, seq_len_max: 512, ..small() };
    let mut s = Scheduler::new(limits);
    for id in [1, 2] {
        s.submit(NewSeq { prompt_rows: true, ..NewSeq::new(id, vec![id as u32; 70], 4) }, 0).unwrap();
    }
    s.submit(NewSeq::new(3, vec![3; 100], 50), 0).unwrap();
    let mut told = vec![Vec::new(), Vec::new()];
    let mut sizes = Vec::new();
    while s.owed().prompt_tokens > 0 {
        let (plan, _) = step(&mut s, 9);
        let rows = plan.rows.iter().zip(&plan.batch.seqs).filter(|(row, _)| !row.report.is_empty());
        let rows: Vec<usize> = rows
            .map(|(row, seq)| {
                told[row.id as usize - 1].extend(row.report.clone());
                seq.tokens.len()
            })
            .collect();
        assert!(rows.iter().sum::<usize>() <= 32 + 1, "{rows:?}");
        sizes.push(plan.batch.seqs.last().map_or(0, |seq| seq.tokens.len()));
    }
    assert_eq!(told, vec![(0..69).collect::<Vec<_>>(); 2], "each once, in order");
    assert_eq!(sizes[0], 100, "who wants none is as quick as ever");
}

/// After a preemption the part that was reported runs without rows, at once.
#[test]
fn what_was_reported_needs_no_rows_again() {
    let limits = Limits { num_blocks: 64, num_seqs_max: 1, step_tokens_max: 512, seq_len_max: 256, ..small() };
    let mut s = Scheduler::new(limits);
    s.submit(NewSeq { prompt_rows: true, ..NewSeq::new(1, vec![1; 100], 4) }, 0).unwrap();
    for _ in 0..2 {
        assert_eq!(step(&mut s, 9).0.prefill_tokens, 32);
    }
    s.submit(NewSeq { priority: -1, ..NewSeq::new(2, vec![2; 4], 1) }, 0).unwrap();
    assert_eq!(step(&mut s, 9).0.preempted, [1]);
    let sizes: Vec<_> = (0..3).map(|_| step(&mut s, 9).0).map(|plan| (plan.prefill_tokens, plan.prompt_rows)).collect();
    assert_eq!(sizes, [(64, 0), (32, 32), (4, 4)]);
}

#[test]
fn a_failed_sequence_leaves_nothing_in_the_cache() {
    let mut s = Scheduler::new(Limits { num_blocks: 16, ..small() });
    s.submit(NewSeq::new(1, vec![7; 16], 4), 0).unwrap();
    step(&mut s, 9);
    s.plan(0);
    s.apply(vec![SeqResult::Failed { id: 1 }]);
    s.submit(NewSeq::new(2, vec![7; 16], 4), 0).unwrap();
    assert_eq!(s.plan(0).batch.seqs[0].start_pos, 0);
    assert_eq!(s.free_blocks() + s.owned_blocks(), 16);
}

#[test]
fn guesses_are_verified_and_never_run_beside_prompts() {
    let mut s = Scheduler::new(Limits { step_tokens_max: 16, ..small() });
    s.submit(NewSeq::new(1, vec![1; 4], 20), 0).unwrap();
    step(&mut s, 5);
    s.propose(1, vec![6, 7, 8]);
    let plan = s.plan(0);
    assert_eq!((plan.rows[0].drafts, plan.draft_tokens, plan.decode_tokens), (3, 3, 4));
    assert_eq!(plan.batch.seqs[0].tokens, [5, 6, 7, 8]);
    s.apply(vec![SeqResult::Advanced { id: 1, tokens: vec![6, 7, 9] }]);
    let seq = s.running().next().unwrap();
    assert_eq!((seq.tokens, seq.computed), (&[1, 1, 1, 1, 5, 6, 7, 9][..], 7));
    s.propose(1, vec![1, 2, 3]);
    s.submit(NewSeq::new(2, vec![2; 4], 1), 0).unwrap();
    assert_eq!(step(&mut s, 5).0.draft_tokens, 0, "a prompt waits");
    assert_eq!(step(&mut s, 5).0.draft_tokens, 0, "old guesses are gone");
}

#[test]
fn guesses_take_no_blocks_from_others_and_end_with_the_output() {
    let mut s = Scheduler::new(Limits { num_blocks: 5, step_tokens_max: 64, ..small() });
    s.submit(NewSeq::new(1, vec![1; 6], 4), 0).unwrap();
    s.submit(NewSeq::new(2, vec![2; 6], 4), 0).unwrap();
    step(&mut s, 5);
    assert_eq!(s.draft_room(1, 8), 1, "one place is left in its blocks");
    s.cancel(2);
    assert_eq!(s.draft_room(1, 8), 2, "one token of the three to come is no guess");
    assert_eq!(s.draft_room(9, 8), 0);
}

#[test]
fn what_comes_after_a_stop_token_is_not_said() {
    let mut s = Scheduler::new(small());
    s.submit(NewSeq { stop_token_ids: [9].into(), ..NewSeq::new(1, vec![1; 2], 8) }, 0).unwrap();
    step(&mut s, 5);
    s.propose(1, vec![6, 9, 7]);
    s.plan(0);
    let outcomes = s.apply(vec![SeqResult::Advanced { id: 1, tokens: vec![6, 9, 7, 8] }]);
    assert_eq!((outcomes[0].tokens.as_slice(), outcomes[0].finish), (&[6, 9][..], Some(Finish::Stop)));
    assert_eq!(s.free_blocks(), 8);
}

/// A scheduler that has learned: a millisecond a prompt token.
fn experienced() -> Scheduler {
    let mut s = Scheduler::new(Limits { num_blocks: 256, seq_len_max: 512, step_tokens_max: 100, ..small() });
    s.submit(NewSeq::new(99, vec![3; 100], 1), 0).unwrap();
    let (plan, _) = step(&mut s, 5);
    s.learn(&plan, 100_000_000);
    s
}

fn due(id: ReqId, word: u32, deadline_ms: u64) -> NewSeq {
    NewSeq { deadline_ns: Some(deadline_ms * 1_000_000), ..NewSeq::new(id, vec![word; 200], 1) }
}

#[test]
fn who_cannot_be_served_by_the_deadline_is_refused_at_once_with_the_figures() {
    let mut s = experienced();
    assert_eq!(s.submit(due(1, 10, 201), 0), Ok(()));
    assert_eq!(s.submit(due(2, 10, 201), 0), Ok(()), "what it shares with the one before it runs once");
    assert_eq!(s.submit(due(3, 11, 399), 0), Err(Refusal::TooLate { needed_ms: 400, left_ms: 399 }));
    let mut s = experienced();
    assert_eq!(s.submit(due(5, 3, 110), 0), Ok(()), "a hundred of its tokens are cached");
    let mut s = experienced();
    assert_eq!(s.submit(due(6, 10, 199), 0), Err(Refusal::TooLate { needed_ms: 200, left_ms: 199 }));
    let fresh = Scheduler::new(small()).submit(NewSeq { deadline_ns: Some(1), ..NewSeq::new(1, vec![1], 1) }, 0);
    assert_eq!(fresh, Ok(()), "nothing is known yet");
}

/// A queue of long prompts with a prefix in common: whoever comes costs what its own prompt costs, not what the queue's do.
#[test]
fn a_newcomer_costs_no_more_in_a_deep_queue() {
    let mut s = Scheduler::new(Limits {
        num_blocks: 1024,
        seq_len_max: 4096,
        step_tokens_max: 4096,
        waiting_max: 200,
        ..small()
    });
    let prefix = vec![7; 2000];
    s.submit(NewSeq::new(999, prefix.clone(), 1), 0).unwrap();
    let (plan, _) = step(&mut s, 5);
    s.learn(&plan, 2_000_000_000);
    let mut costs = (0..150).map(|id| {
        let prompt = [prefix.clone(), vec![id as u32 + 10; 40]].concat();
        let due = NewSeq { deadline_ns: Some(10_000_000_000), ..NewSeq::new(id, prompt, 1) };
        let before = allocations();
        assert_eq!(s.submit(due, 0), Ok(()), "its own 40 tokens a prompt are what runs");
        allocations() - before
    });
    let (first, last) = (costs.next().unwrap(), costs.last().unwrap());
    assert!(last <= first + 20, "{first} allocations alone, {last} behind 149 others");
}

#[test]
fn a_prefix_that_one_of_a_higher_priority_runs_first_is_counted_once() {
    let mut s = experienced();
    s.submit(due(1, 10, 250), 0).unwrap();
    s.submit(NewSeq { priority: -1, ..due(2, 10, 250) }, 0).unwrap();
    assert_eq!(s.submit(due(3, 10, 250), 0), Ok(()), "200 tokens run for all three");
}

#[test]
fn an_engine_that_refuses_everybody_soon_tries_again() {
    let mut s = experienced();
    // It was slow once; nobody can be served at that pace, and nobody is, until one is let through to see.
    let refused = (1..100).take_while(|id| s.submit(due(*id, 10, 20), 0).is_err()).count();
    assert!((10..60).contains(&refused), "{refused}");
    let (plan, _) = step(&mut s, 5);
    s.learn(&plan, 1_000_000);
    assert_eq!(s.submit(due(200, 11, 100), 0), Ok(()));
}

#[test]
fn who_waited_too_long_is_turned_away_before_it_costs_a_step() {
    let mut s = experienced();
    s.submit(due(1, 10, 300), 0).unwrap();
    let plan = s.plan(101_000_000);
    assert_eq!(plan.late, [(1, Refusal::TooLate { needed_ms: 200, left_ms: 199 })]);
    assert!(plan.is_empty());
    assert_eq!(s.owed().waiting, 0);
}

#[test]
fn who_runs_past_its_deadline_is_ended_and_its_blocks_return() {
    let mut s = Scheduler::new(small());
    s.submit(NewSeq { deadline_ns: Some(10), ..NewSeq::new(1, vec![1; 2], 10) }, 0).unwrap();
    s.submit(NewSeq::new(2, vec![2; 2], 10), 0).unwrap();
    assert_eq!(ids(&step(&mut s, 5).0), [1, 2]);
    assert_eq!(ids(&s.plan(9)), [1, 2]);
    let plan = s.plan(10);
    assert_eq!((plan.late.clone(), ids(&plan)), (vec![(1, Refusal::Expired)], vec![2]));
    assert_eq!((s.free_blocks(), s.owned_blocks()), (7, 1));
    assert!(s.plan(11).late.is_empty(), "it ends once");
}

#[test]
fn refusals_say_why() {
    let mut s = Scheduler::new(small());
    assert_eq!(s.submit(NewSeq::new(1, vec![], 4), 0), Err(Refusal::EmptyPrompt));
    assert_eq!(s.submit(NewSeq::new(1, vec![1; 30], 4), 0), Err(Refusal::TooLong { tokens: 34, tokens_max: 32 }));
    for id in 1..=4 {
        s.submit(NewSeq::new(id, vec![1], 4), 0).unwrap();
    }
    assert_eq!(s.submit(NewSeq::new(4, vec![1], 4), 0), Err(Refusal::Duplicate(4)));
    assert_eq!(s.submit(NewSeq::new(5, vec![1], 4), 0), Err(Refusal::QueueFull { waiting: 4 }));
}
