//! `cargo bench -p engine --bench scheduler`: what a decision of the scheduler costs, plan and outcome together, beside steps of a model
//! that take tens of milliseconds. Prints `name value unit goal`: the median of rounds, with the least and the most.
//!
//! `-- count NAME N` makes N decisions of one kind and nothing else, for a counter of instructions around it
//! (`valgrind --tool=callgrind`); the difference of two numbers leaves the rest out.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark that cannot run must fail")]

use std::hint::black_box;
use std::time::Instant;

use engine::scheduler::{Limits, NewSeq, Scheduler, SeqResult};

const ROUNDS: usize = 21;
const PROMPT: usize = 2048;

/// Makes so many decisions, and tells its ns a decision.
type Round = fn(usize) -> f64;

/// What is measured: its name, its goal in ns, decisions a round, and a round. A ten-thousandth of a
/// step of 50 ms is the goal for each eight sequences that decode.
const SERIES: [(&str, f64, usize, Round); 8] = [
    ("scheduler_decode_1", 5_000.0, 200, |count| decode(1, 0, count)),
    ("scheduler_decode_8", 5_000.0, 200, |count| decode(8, 0, count)),
    ("scheduler_decode_64", 40_000.0, 200, |count| decode(64, 0, count)),
    ("scheduler_decode_256", 160_000.0, 200, |count| decode(256, 0, count)),
    ("scheduler_guesses_64", 80_000.0, 200, |count| decode(64, 4, count)),
    ("scheduler_admit_2048_new", 100_000.0, 32, |count| admit(false, count)),
    ("scheduler_admit_2048_cached", 100_000.0, 32, |count| admit(true, count)),
    ("scheduler_submit_behind_200", 1_000_000.0, 3, submit_behind_200),
];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    if let [word, wanted, count] = &args[..] {
        assert_eq!(word, "count");
        let (.., round) = SERIES.iter().find(|(name, ..)| name == wanted).expect("the name of a series");
        round(count.parse().expect("a number of decisions"));
        return;
    }
    for (name, goal_ns, count, round) in SERIES {
        report(name, goal_ns, || round(count));
    }
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
fn decode(sequences: usize, guesses: usize, steps: usize) -> f64 {
    let mut scheduler = Scheduler::new(limits());
    for id in 0..sequences as u64 {
        scheduler.submit(NewSeq::new(id, prompt(id, 512), 1 << 18), 0).expect("it fits");
    }
    step(&mut scheduler);
    let began = Instant::now();
    for _ in 0..steps {
        for id in (0..sequences as u64).filter(|_| guesses > 0) {
            scheduler.propose(id, vec![9; guesses]);
        }
        step(&mut scheduler);
    }
    began.elapsed().as_nanos() as f64 / steps as f64
}

/// A prompt comes, runs in one step and ends; new each time, or the same as before.
fn admit(cached: bool, count: usize) -> f64 {
    let mut scheduler = Scheduler::new(limits());
    let prompts: Vec<Vec<u32>> = (0..count as u64).map(|n| prompt(if cached { 0 } else { n }, PROMPT)).collect();
    if cached {
        scheduler.submit(NewSeq::new(99, prompts[0].clone(), 1), 0).expect("it fits");
        step(&mut scheduler);
    }
    let began = Instant::now();
    for (id, prompt) in (0..).zip(prompts) {
        scheduler.submit(NewSeq::new(id, prompt, 1), 0).expect("it fits");
        step(&mut scheduler);
    }
    began.elapsed().as_nanos() as f64 / count as f64
}

/// A prompt of 32,768 tokens comes behind 200 like it, all but its last 64 tokens the same, with a deadline that they can meet.
fn submit_behind_200(count: usize) -> f64 {
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
    let last: Vec<NewSeq> = (300..300 + count as u64).map(new).collect();
    let began = Instant::now();
    last.into_iter().for_each(|new| scheduler.submit(new, 0).expect("it can be served"));
    began.elapsed().as_nanos() as f64 / count as f64
}
