//! The operator against an in-process Kubernetes, in virtual time, by seed (RELIABILITY §2.2, §6). The real code runs:
//! elector, controllers, client; the API server, the controllers of Kubernetes, kubelets, engines and agents are models.
//!
//!     cargo test -p operator --test sim                     everything once, and some crash plans and seeds
//!     … -- once                                             standard stories, errors (P6), fields (P5, P11), rows of faults
//!     … -- seeds 1000 --from 5                              seeds 5 to 1004
//!     … -- crashes                                          every write of every standard story, on both sides (P1)
//!     … -- pairs 1000 --from 5                              two deaths in one story (B2)
//!     … -- twice 20                                         seeds 1 to 20, each twice with one hash
//!     … -- hashes 300 --from 5                              seeds, each with its hash, to compare two builds
//!     … -- seed 17, crash freeze-one 5 before, row a4-…     one run with its whole event log
//!     … -- hunt P4|P13                                      until something violates P4 or P13 (for mutants)
//!     … -- hunt-all P16                                     the same, and everything else that is violated on the way
//!     … -- differential 300                                 against the kube-apiserver of $KUBECONFIG (tests/differential.sh)

#![allow(clippy::expect_used, clippy::panic, reason = "a test program; the lint sees test functions alone")]

mod act;
mod agent;
mod broken;
mod changes;
mod checks;
mod clocks;
mod cluster;
mod differential;
mod doubts;
mod drains;
mod end;
mod evictions;
mod expect;
mod faults;
mod fields;
mod fleet;
mod foreign;
mod gone;
mod held;
mod ice;
mod invariants;
mod job;
mod kube;
mod leaving;
mod lists;
mod log;
mod mend;
mod nodes;
mod owners;
mod passes;
mod patience;
mod paused;
mod policies;
mod random;
mod rare;
mod refused;
mod report;
mod rng;
mod rows;
mod run;
mod said;
mod spoken;
mod story;
mod strangers;
mod stuck;
mod tally;
mod told;
mod twin;
mod untrue;
mod world;

/// Most of what it does is to make and drop small JSON objects.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

use std::process::ExitCode;

use job::Job;
use tally::Tally;

/// A short range for `cargo test`.
const SEEDS: u64 = 60;
const SEEDS_TWICE: u64 = 5;
const CRASHES_EVERY: usize = 11;
const PAIRS: u64 = 20;
/// A mutant that survives so many seeds survives.
const HUNT_SEEDS: u64 = 1_000;
const HUNT_ALL_SEEDS: u64 = 40;

fn main() -> ExitCode {
    let words: Vec<String> =
        std::env::args().skip(1).filter(|word| !word.starts_with("--") || word == "--from").collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse::<u64>().unwrap_or_else(|_| panic!("{text:?} is no number"));
    passes::listen();
    let mut tally = Tally::new();
    let (words, from) = match words.as_slice() {
        [words @ .., "--from", from] => (words, number(from)),
        words => (words, 1),
    };
    match words {
        [] => {
            tally.all(&short());
            tally.every_word();
        }
        ["once"] => {
            tally.all(&job::once());
            tally.every_word();
        }
        ["seeds", count] => tally.all(&job::seeds(from, number(count))),
        ["pairs", count] => tally.all(&job::pairs(from, number(count))),
        ["hashes", count] => {
            tally.hashes = true;
            tally.all(&job::seeds(from, number(count)));
        }
        ["twice", count] => tally.all(&(from..from + number(count)).map(Job::Twice).collect::<Vec<_>>()),
        ["crashes"] => tally.all(&job::crashes(1)),
        ["hunt", properties] => hunt(&mut tally, properties),
        ["hunt-all", _] => tally.all(&[job::once(), job::seeds(1, HUNT_ALL_SEEDS)].concat()),
        ["differential", count] => differential(&mut tally, from, number(count)),
        words => match Job::parse(words) {
            Some(job) => tally.show(&job),
            None => panic!("{words:?} is nothing that can be run; the head of main.rs tells what can"),
        },
    }
    tally.end()
}

fn short() -> Vec<Job> {
    let twice = (1..=SEEDS_TWICE).map(Job::Twice);
    let parts = [job::once(), job::crashes(CRASHES_EVERY), job::pairs(1, PAIRS), job::seeds(1, SEEDS)];
    parts.concat().into_iter().chain(twice).collect()
}

/// For mutants: the cheapest first.
fn hunt(tally: &mut Tally, properties: &str) {
    let wanted: Vec<&str> = properties.split('|').collect();
    tally.until(&job::once(), &wanted);
    for part in [job::seeds(1, 60), job::crashes(7), job::seeds(61, HUNT_SEEDS)] {
        tally.until(&part, &wanted);
    }
}

/// Is the simulator's API server like the real one?
fn differential(tally: &mut Tally, from: u64, count: u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    match runtime.block_on(differential::run(from, count)) {
        Ok(differences) => {
            tally.failed = differences.len() as u64;
            tally.passed = count - tally.failed;
            differences.iter().take(20).for_each(|what| println!("DIFFERS {what}"));
        }
        Err(error) => {
            println!("the comparison could not be made: {error}");
            tally.failed += 1;
        }
    }
}
