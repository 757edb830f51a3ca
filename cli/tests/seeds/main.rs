//! The five hangs of the field on our own engine, guards off and on: a table. Off, it hangs as the field's reports say, and the agent names
//! the class; on, every request is answered. Real processes, `truebeat run` around them. `make seeds` runs the field's full shapes
//! (512 and 2048 requests), this test smaller ones. S1 and S3 guess tokens, as the field's engines did.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

#[path = "../../../agent/tests/common/end_run.rs"]
mod end_run;
#[path = "../../../agent/tests/common/free_addresses.rs"]
mod free_addresses;
mod load;
mod run;

use heartbeat::page::Phase;
use load::{Felt, Load, Shape};
use run::{Look, Run};

/// One of the field's hangs.
pub struct Seed {
    name: &'static str,
    ranks: u32,
    /// What the demo model is to be.
    model: &'static str,
    /// What else the engine is told.
    more: &'static [&'static str],
    fault: fn(&Shape) -> String,
    /// The agent's name for it.
    class: &'static str,
    /// The states of a rank's threads while it hangs: of the first one its engine and device, of another its engine. Whoever waits burns.
    states: fn(u32) -> &'static str,
    comes: Comes,
}

/// When a hang comes.
#[derive(Clone, Copy, PartialEq)]
enum Comes {
    AtStart,
    /// Somewhere in the load: with guards on the engine's first life ends with it.
    InTheMiddle,
    /// With the last requests of the load, so that the number of those before is exact.
    AtTail,
}

/// One token is guessed for each: a step of bonus tokens alone is half as wide as one of guesses.
const GUESSES: &[&str] = &["--speculative", "ngram", "--speculative-tokens", "1"];

const SEEDS: [Seed; 5] = [
    Seed {
        name: "S0",
        ranks: 1,
        model: "llama",
        more: &[],
        fault: |shape| in_the_middle("step-stall", shape),
        class: "StepStalled",
        states: |_| "SS",
        comes: Comes::InTheMiddle,
    },
    Seed {
        name: "S1",
        ranks: 2,
        model: "llama",
        more: GUESSES,
        fault: |shape| format!("padded-graph@{}reqs", shape.tail),
        class: "RankSilent",
        states: |rank| if rank == 0 { "RR" } else { "R" },
        comes: Comes::AtTail,
    },
    Seed {
        name: "S2",
        ranks: 1,
        model: "llama",
        more: &[],
        fault: |shape| in_the_middle("device-wait", shape),
        class: "DeviceWait",
        states: |_| "RS",
        comes: Comes::InTheMiddle,
    },
    Seed {
        name: "S3",
        ranks: 4,
        model: "llama",
        more: GUESSES,
        fault: |shape| in_the_middle("rank-hang:3", shape),
        class: "RankSilent",
        states: |rank| match rank {
            0 => "RR",
            3 => "S",
            _ => "R",
        },
        comes: Comes::InTheMiddle,
    },
    Seed {
        name: "S4",
        ranks: 8,
        model: "llama-q8",
        more: &[],
        fault: |_| "compile-kill".to_owned(),
        class: "StartupStalled",
        states: |_| "S",
        comes: Comes::AtStart,
    },
];

/// Enough to see that ranks which came late work together.
const FEW: Shape = Shape { total: 16, tail: 8, long_tail: false };

/// `TRUEBEAT_SEEDS_ONLY=S1,S3` runs just these.
fn wanted(name: &str) -> bool {
    std::env::var("TRUEBEAT_SEEDS_ONLY").map_or(true, |only| only.split(',').any(|one| one.is_empty() || one == name))
}

/// Somewhere in the second half; what is left afterwards, with all that were under way, is fewer tokens, so that the engine after it lives.
/// Tokens, not steps: how many requests a step serves is the machine's affair.
fn in_the_middle(kind: &str, shape: &Shape) -> String {
    // the first token of a request comes with its prompt's step, which decodes none
    format!("{kind}@{}tokens", shape.total * 3 / 4 * (load::TOKENS - 1))
}

/// Engines that are tried for a fault that takes a certain batch.
const TRIES_MAX: usize = 3;
/// More threads than this want each processor: what burns gets too little of one to show it.
const OVERLOADED: f64 = 4.0;
/// So often the threads are looked at: whoever sleeps wakes now and then, to look at its stop flag.
const LOOKS_MAX: u32 = 50;
/// Requests that S3's eight ranks get.
const EIGHT_RANKS_MAX: usize = 512;

fn full() -> bool {
    std::env::var("TRUEBEAT_SEEDS").is_ok_and(|seeds| seeds == "full")
}

/// Requests in all, and those that come last: 497 of 512 and 2030 of 2048 were done when S1's engine hung.
fn shapes() -> Vec<(usize, usize)> {
    if full() { vec![(512, 15), (2048, 18)] } else { vec![(64, 15)] }
}

/// In full S3 has the field's eight ranks too, on a model that eight can share, but not with the longest load: two cores take long over it.
fn seeds(total: usize) -> [Seed; 5] {
    let mut seeds = SEEDS;
    if full() && total <= EIGHT_RANKS_MAX {
        seeds[3] = Seed { ranks: 8, model: "llama-q8", ..seeds[3] };
    }
    seeds
}

#[test]
fn guards_off_it_hangs_as_the_field_reports_and_guards_on_everybody_is_answered() {
    println!("seed  guards  done          retried  hung  longest wait  what the agent and the machine say");
    for (total, tail) in shapes() {
        for seed in seeds(total).iter().filter(|seed| wanted(seed.name)) {
            let shape = match seed.comes {
                Comes::AtStart => FEW,
                comes => Shape { total, tail, long_tail: comes == Comes::AtTail },
            };
            match seed.comes {
                Comes::AtStart => never_ready(seed, &shape),
                _ => without_guards(seed, &shape),
            }
            with_guards(seed, &shape);
        }
    }
}

fn without_guards(seed: &Seed, shape: &Shape) {
    // On a machine that is short of processors the last batch may be served in other parts than it came in, and no program meets a shape
    // that is not its own: then nothing was to hang. Or a thread that burns is looked at too seldom in the seconds that it takes to confirm
    // the stall, and is not told from one that sleeps: on a machine with more to do than processors. Then another engine is tried, and the last one must do.
    let attempt = |number: usize| {
        let run = Run::start(seed, &(seed.fault)(shape), "off");
        let felt = Load::new(&run.gate, shape).until_it_hangs();
        let verdict = (felt.hung > 0).then(|| run.class(seed.class))?;
        let told = verdict.class == seed.class || number == TRIES_MAX || run::load_per_processor() < 1.0;
        told.then_some((run, felt, verdict))
    };
    let (run, felt, verdict) = (1..=TRIES_MAX)
        .find_map(attempt)
        .unwrap_or_else(|| panic!("{}: it hangs: {TRIES_MAX} engines did not", seed.name));
    assert!(felt.done < shape.total, "{}: it hangs: {felt:?}", seed.name);
    if seed.comes == Comes::AtTail {
        assert_eq!(felt.done, shape.total - shape.tail, "{}: all but the last batch is done", seed.name);
        assert!(
            run.has_said("a step runs by a program of another shape"),
            "{}: the log ends:\n{}",
            seed.name,
            run.log()
        );
    }
    // a thread that burns is told from one that sleeps by its CPU time, which a machine this short of processors does not give it
    let starved =
        seed.class == "DeviceWait" && run::load_per_processor() > OVERLOADED && verdict.class == "StepStalled";
    assert!(verdict.class == seed.class || starved, "{}: {}, {}", seed.name, verdict.class, verdict.reason);
    let health = run.engine_health();
    assert!(health.starts_with("HTTP/1.1 200"), "{}: it says that it is well: {health}", seed.name);
    let (running, tokens) = (run.metric("vllm:num_requests_running"), run.metric("vllm:generation_tokens_total"));
    assert!(running > 0.0, "{}: work is owed", seed.name);
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert_eq!(run.metric("vllm:generation_tokens_total"), tokens, "{}: nothing moves", seed.name);
    if seed.name == "S0" {
        // what people search the log for; of one seed, because it comes every ten seconds
        run.says(&format!("Avg generation throughput: 0.0 tokens/s, Running: {running} reqs"));
    }
    let states = looks_as_reported(seed, &run);
    let said =
        format!("{} ({}), /health 200, running {running}, ranks {}", verdict.class, verdict.verdict, states.join(" "));
    felt.print(seed.name, "off", shape, &said);
}

/// Each rank's threads are in the states that the field's reports say, and what burns is in no call of the kernel.
fn looks_as_reported(seed: &Seed, run: &Run) -> Vec<String> {
    let as_reported = |look: &Look| look.states() == (seed.states)(look.rank) && look.burns_outside_the_kernel();
    for _ in 0..LOOKS_MAX {
        let looks = run.rank_looks();
        if looks.len() == seed.ranks as usize && looks.iter().all(as_reported) {
            return looks.iter().map(ToString::to_string).collect();
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    panic!("{}: {:?}", seed.name, run.rank_looks())
}

/// One rank prepares for all and is killed in the middle of it; the others wait for it for ever.
fn never_ready(seed: &Seed, shape: &Shape) {
    let run = Run::launch(seed, &(seed.fault)(shape), "off");
    let verdict = run.class(seed.class);
    assert_eq!(verdict.class, seed.class, "{}: {}", seed.name, verdict.reason);
    let health = run.engine_health();
    assert!(health.starts_with("HTTP/1.1 200"), "{}: it says that it is well: {health}", seed.name);
    let (phases, looks) = (run.phases(), run.rank_looks());
    assert!(phases.len() + 1 == seed.ranks as usize, "{}: all but the one that was killed: {phases:?}", seed.name);
    assert!(phases.iter().all(|phase| *phase == Phase::Compile), "{}: none is ready: {phases:?}", seed.name);
    // they look now and then whether the lease was given back, and sleep in between
    assert!(looks.iter().all(|look| look.sleeps_or_looks()), "{}: all that live wait: {looks:?}", seed.name);
    let states: Vec<String> = looks.iter().map(ToString::to_string).collect();
    let said = format!(
        "{} ({}), /health 200, 0 of {} ranks ready: {}",
        verdict.class,
        verdict.verdict,
        seed.ranks,
        states.join(" ")
    );
    Felt::nothing().print(seed.name, "off", shape, &said);
}

fn with_guards(seed: &Seed, shape: &Shape) {
    // as without guards, an engine whose last batch never came together is no test of them: another one is tried
    let (run, felt, refused) = (0..TRIES_MAX)
        .map(|_| {
            let run = Run::start(seed, &(seed.fault)(shape), "on");
            let felt = Load::new(&run.gate, shape).until_all_is_done();
            assert_eq!((felt.done, felt.hung), (shape.total, 0), "{}: {felt:?}", seed.name);
            let refused = run.metric("truebeat:programs_refused_total");
            (run, felt, refused)
        })
        .find(|(_, _, refused)| seed.comes != Comes::AtTail || *refused > 0.0)
        .unwrap_or_else(|| panic!("{}: the guard has something to do: in {TRIES_MAX} engines it had not", seed.name));
    let starts = run.starts();
    let expected = match seed.comes {
        Comes::InTheMiddle => 2, // given up with status 85, and started anew
        Comes::AtStart | Comes::AtTail => 1,
    };
    let mut said =
        if starts == 1 { "no hang, one start".to_owned() } else { format!("{} starts, {}", starts, run.last_exit()) };
    assert_eq!(starts, expected, "{}: starts: {said}; the log ends:\n{}", seed.name, run.log());
    if seed.comes == Comes::AtStart {
        let ready = run.phases().len();
        assert_eq!(ready, seed.ranks as usize, "{}: every rank is there", seed.name);
        for words in ["it is started again", "is taken over"] {
            assert!(run.has_said(words), "{}: the fault struck and was mended: {words}", seed.name);
        }
        said = format!(
            "{ready} of {} ranks ready, one start: the lease taken over, its owner's rank started again",
            seed.ranks
        );
    }
    if seed.comes == Comes::AtTail {
        assert!(run.has_said("a program of another shape is refused"), "{}: it is told once", seed.name);
        said = format!("{said}, {refused} programs of another shape refused");
    }
    assert!(starts == 1 || run.last_exit().contains("85"), "{}: {said}", seed.name);
    felt.print(seed.name, "on", shape, &said);
}
