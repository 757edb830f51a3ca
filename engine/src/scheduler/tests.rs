//! What steps teach, and what refusals do to that, as far as the scheduler's own pace shows it.

use super::*;

const MS: u64 = 1_000_000;

fn due(id: ReqId, tokens: usize, deadline_ms: u64) -> NewSeq {
    NewSeq { deadline_ns: Some(deadline_ms * MS), ..NewSeq::new(id, vec![7; tokens], 4) }
}

/// Runs the next step as if it took so long; every sequence says the same token.
fn step(s: &mut Scheduler, took_ns: u64) -> StepPlan {
    let plan = s.plan(0);
    let results = plan
        .rows
        .iter()
        .map(|row| SeqResult::Advanced { id: row.id, tokens: vec![9; usize::from(row.samples)] })
        .collect();
    s.apply(results);
    s.learn(&plan, took_ns);
    plan
}

#[test]
fn a_prompt_whose_logprobs_are_told_teaches_nothing_about_others() {
    let mut s = Scheduler::new(Limits { prefix_cache: false, ..Limits::default() });
    s.submit(NewSeq { prompt_rows: true, ..NewSeq::new(1, vec![7; 32], 1) }, 0).unwrap();
    let plan = step(&mut s, 3200 * MS);
    assert_eq!((plan.prompt_rows, s.pace), (32, Pace::default()));
    s.submit(NewSeq::new(2, vec![7; 32], 1), 0).unwrap();
    step(&mut s, 32 * MS);
    assert_eq!(s.pace.prefill_ns(32), Some(32 * MS));
}

#[test]
fn who_is_turned_away_in_the_queue_makes_the_next_refusal_less_likely() {
    let mut s = Scheduler::new(Limits { num_seqs_max: 1, prefix_cache: false, ..Limits::default() });
    s.submit(NewSeq::new(1, vec![7; 100], 99), 0).unwrap();
    step(&mut s, 100 * MS);
    // both can be served as they come, and one of them not any more
    s.submit(due(2, 100, 400), 0).unwrap();
    s.submit(due(3, 100, 900), 0).unwrap();
    let plan = s.plan(350 * MS);
    assert_eq!(plan.late.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [2]);
    let mut doubted = Pace::default();
    doubted.learn(0, 100, 100 * MS);
    doubted.doubt();
    assert_eq!(s.pace, doubted);
}

/// What it waits for is its turn to go on, and it has run already: it tells nothing of the estimate by which others are refused at the door.
#[test]
fn who_gave_way_and_is_late_then_raises_no_doubt() {
    let mut s = Scheduler::new(Limits { num_seqs_max: 1, prefix_cache: false, ..Limits::default() });
    s.submit(NewSeq { priority: 1, ..due(1, 100, 400) }, 0).unwrap();
    step(&mut s, 100 * MS);
    s.submit(NewSeq::new(2, vec![7; 100], 99), 0).unwrap();
    assert_eq!(s.plan(0).preempted, [1]);
    let before = s.pace;
    assert_eq!(s.plan(350 * MS).late.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1]);
    assert_eq!(s.pace, before);
}
