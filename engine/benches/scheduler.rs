//! `cargo bench -p engine --bench scheduler`: what a decision of the scheduler costs, plan and outcome together, beside steps of a model
//! that take tens of milliseconds. Prints `name value unit goal`: the median of rounds, with the least and the most.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark that cannot run must fail")]

use std::hint::black_box;
use std::time::Instant;

use engine::scheduler::{Limits, NewSeq, Scheduler, SeqResult};

const ROUNDS: usize = 21;
const STEPS: usize = 200;
const PROMPT: usize = 2048;

fn main() {
    for sequences in [1, 8, 64, 256] {
        // A ten-thousandth of a step of 50 ms for each eight sequences.
        let goal_ns = 5_000.0 * (sequences as f64 / 8.0).max(1.0);
        report(&format!("scheduler_decode_{sequences}"), goal_ns, || decode(sequences, 0));
    }
    report("scheduler_guesses_64", 80_000.0, || decode(64, 4));
    report("scheduler_admit_2048_new", 100_000.0, || admit(false));
    report("scheduler_admit_2048_cached", 100_000.0, || admit(true));
    report("scheduler_submit_behind_200", 1_000_000.0, submit_behind_200);
}

/// Runs rounds that tell their ns a decision.
fn report(name: &str, goal_ns: f64, mut round: impl FnMut() -> f64) {
    let mut ns: Vec<f64> = (0..ROUNDS).map(|_| round()).collect();
    ns.sort_by(f64::total_cmp);
    let (least, median, most) = (ns[0], ns[ROUNDS / 2], ns[ROUNDS - 1]);
    println!("{name} {median:.0} ns <={goal_ns:.0} # {least:.0} to {most:.0} in {ROUNDS} rounds");
}

fn limits() -> Limits {
    Limits {
        num_blocks: 65_536,
        num_seqs_max: 256,
        step_tokens_max: 1 << 20,
        waiting_max: 512,
        seq_len_max: 1 << 20,
        ..Limits::default()
    }
}

fn prompt(id: u64, len: usize) -> Vec<u32> {
    (0..len as u64).map(|i| ((id * 7919 + i * 31) % 50_000) as u32).collect()
}

/// One step: every sequence says its guesses, all right, and one token more.
fn step(scheduler: &mut Scheduler) {
    let plan = black_box(scheduler.plan(0));
    let results = plan.rows.iter().zip(&plan.batch.seqs).map(|(row, seq)| {
        let mut tokens = seq.tokens[seq.tokens.len() - row.drafts..].to_vec();
        tokens.extend(row.samples.then_some(7));
        SeqResult::Advanced { id: row.id, tokens }
    });
    black_box(scheduler.apply(results.collect()));
}

/// A batch of sequences of 512 tokens that decode.
fn decode(sequences: usize, guesses: usize) -> f64 {
    let mut scheduler = Scheduler::new(limits());
    for id in 0..sequences as u64 {
        scheduler.submit(NewSeq::new(id, prompt(id, 512), 1 << 18), 0).expect("it fits");
    }
    step(&mut scheduler);
    let began = Instant::now();
    for _ in 0..STEPS {
        for id in (0..sequences as u64).filter(|_| guesses > 0) {
            scheduler.propose(id, vec![9; guesses]);
        }
        step(&mut scheduler);
    }
    began.elapsed().as_nanos() as f64 / STEPS as f64
}

/// A prompt comes, runs in one step and ends; new each time, or the same as before.
fn admit(cached: bool) -> f64 {
    let mut scheduler = Scheduler::new(limits());
    let prompts: Vec<Vec<u32>> = (0..32).map(|n| prompt(if cached { 0 } else { n }, PROMPT)).collect();
    let count = prompts.len() as f64;
    if cached {
        scheduler.submit(NewSeq::new(99, prompts[0].clone(), 1), 0).expect("it fits");
        step(&mut scheduler);
    }
    let began = Instant::now();
    for (id, prompt) in (0..).zip(prompts) {
        scheduler.submit(NewSeq::new(id, prompt, 1), 0).expect("it fits");
        step(&mut scheduler);
    }
    began.elapsed().as_nanos() as f64 / count
}

/// A prompt of 32,768 tokens comes behind 200 like it, all but its last 64 tokens the same, with a deadline that they can meet.
fn submit_behind_200() -> f64 {
    let mut scheduler = Scheduler::new(limits());
    let shared = prompt(0, 32_704);
    let new = |id: u64| {
        let prompt = [shared.clone(), prompt(id, 64)].concat();
        NewSeq { deadline_ns: Some(1_000_000_000), ..NewSeq::new(id, prompt, 1) }
    };
    scheduler.submit(new(999), 0).expect("it fits");
    let plan = scheduler.plan(0);
    scheduler.apply(vec![SeqResult::Advanced { id: 999, tokens: vec![7] }]);
    scheduler.learn(&plan, 500_000_000);
    for id in 0..200 {
        scheduler.submit(new(id), 0).expect("it can be served");
    }
    let last = [new(300), new(301), new(302)];
    let count = last.len() as f64;
    let began = Instant::now();
    last.into_iter().for_each(|new| scheduler.submit(new, 0).expect("it can be served"));
    began.elapsed().as_nanos() as f64 / count
}
