//! The operator against an in-process Kubernetes, in virtual time, by seed (RELIABILITY §2.2, §6). The real code runs:
//! elector, controllers, client; the API server, the controllers of Kubernetes, kubelets, engines and agents are models.
//!
//!     cargo test -p operator --test sim                               the standard stories, a few crash plans and seeds
//!     cargo test -p operator --test sim -- seeds 1000 --from 5        seeds 5 to 1004
//!     cargo test -p operator --test sim -- seed 17                    one seed with its whole event log
//!     cargo test -p operator --test sim -- crashes                    every write of every standard story, both sides
//!     cargo test -p operator --test sim -- crash freeze-one 5 before  one crash plan with its event log
//!     … -- differential 300        against the kube-apiserver of $KUBECONFIG (tests/differential.sh starts one)

#![allow(clippy::expect_used, clippy::panic, reason = "a test program; the lint sees test functions alone")]

mod agent;
mod changes;
mod checks;
mod cluster;
mod differential;
mod end;
mod faults;
mod kube;
mod log;
mod rng;
mod run;
mod story;
mod world;

use std::{process::ExitCode, time::Instant};

use faults::Side;
use run::{Report, run};

/// A short range for `cargo test`.
const SEEDS: u64 = 20;

fn main() -> ExitCode {
    let words: Vec<String> =
        std::env::args().skip(1).filter(|word| !word.starts_with("--") || word == "--from").collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse::<u64>().unwrap_or_else(|_| panic!("{text:?} is no number"));
    let mut tally = Tally::default();
    match words.as_slice() {
        ["seeds", count, "--from", from] => tally.seeds(number(from), number(count)),
        ["seeds", count] => tally.seeds(1, number(count)),
        ["seed", seed] => tally.show(&run(&story::random(number(seed)), true)),
        ["hunt"] => tally.hunt(),
        ["differential", count] => tally.differential(1, number(count)),
        ["differential", count, "--from", from] => tally.differential(number(from), number(count)),
        ["crashes"] => tally.crashes(1),
        ["crash", name, at, side] => {
            let side = if *side == "before" { Side::Before } else { Side::After };
            let acts = story::standard().into_iter().find(|(story, _)| story == name).expect("a standard story").1;
            let whole = run(&story::plain(name, acts.clone(), Vec::new()), false);
            let mut report = run(&story::plain(name, acts, vec![(number(at), side)]), true);
            differs(&whole, &mut report);
            tally.show(&report);
        }
        _ => tally.short(),
    }
    tally.end()
}

#[derive(Default)]
struct Tally {
    passed: u64,
    failed: u64,
    virtual_ms: u64,
    started: Option<Instant>,
}

impl Tally {
    fn short(&mut self) {
        self.standard();
        self.crashes(9);
        self.repeatable(1..4);
        self.seeds(1, SEEDS);
    }

    /// The standard stories without a fault.
    fn standard(&mut self) {
        for (name, acts) in story::standard() {
            let mut report = run(&story::plain(name, acts, Vec::new()), true);
            for (word, wanted) in story::words(name) {
                if report.lines.iter().any(|line| line.contains(word)) != *wanted {
                    let which = if *wanted { "lacks" } else { "has" };
                    report.violations.push(format!("P11: the log {which} {word}"));
                }
            }
            self.count(&report, &format!("crash {name} 0 before"));
        }
    }

    fn seeds(&mut self, from: u64, count: u64) {
        for seed in from..from + count {
            self.count(&run(&story::random(seed), false), &format!("seed {seed}"));
        }
    }

    /// P1: an operator that dies at write k, on either side of its effect, changes nothing of the end.
    fn crashes(&mut self, every: u64) {
        for (name, acts) in story::standard() {
            let whole = run(&story::plain(name, acts.clone(), Vec::new()), false);
            for at in (1..=whole.writes).step_by(usize::try_from(every).unwrap_or(1)) {
                for side in [Side::Before, Side::After] {
                    let mut report = run(&story::plain(name, acts.clone(), vec![(at, side)]), false);
                    differs(&whole, &mut report);
                    let side = if side == Side::Before { "before" } else { "after" };
                    self.count(&report, &format!("crash {name} {at} {side}"));
                }
            }
        }
    }

    /// The same seed twice is the same run.
    fn repeatable(&mut self, seeds: std::ops::Range<u64>) {
        for seed in seeds {
            let (first, mut second) = (run(&story::random(seed), true), run(&story::random(seed), true));
            if first.hash != second.hash {
                let at = first.lines.iter().zip(&second.lines).position(|(a, b)| a != b);
                second.violations = vec![format!("two runs of one seed differ at line {at:?}")];
                if let Some(at) = at {
                    second.violations.push(format!("{}\n    {}", first.lines[at], second.lines[at]));
                }
            } else {
                second.violations.clear();
            }
            self.count(&second, &format!("seed {seed}"));
        }
    }

    /// Is the simulator's API server like the real one?
    fn differential(&mut self, from: u64, count: u64) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        match runtime.block_on(differential::run(from, count)) {
            Ok(differences) => {
                self.failed = differences.len() as u64;
                self.passed = count - self.failed;
                differences.iter().take(20).for_each(|what| println!("DIFFERS {what}"));
            }
            Err(error) => {
                println!("the comparison could not be made: {error}");
                self.failed += 1;
            }
        }
    }

    /// For mutants: until the first violation, the cheapest first.
    fn hunt(&mut self) {
        self.standard();
        let mut seed = 0;
        while self.failed == 0 && seed < 300 {
            seed += 1;
            self.seeds(seed, 1);
            if seed == 60 && self.failed == 0 {
                self.crashes(7);
            }
        }
    }

    fn count(&mut self, report: &Report, replay: &str) {
        self.started.get_or_insert_with(Instant::now);
        self.virtual_ms += report.virtual_ms;
        if report.violations.is_empty() {
            self.passed += 1;
            return;
        }
        self.failed += 1;
        println!("FAILED {}", report.name);
        report.violations.iter().for_each(|what| println!("    {what}"));
        println!("    replay: cargo test -p operator --test sim -- {replay}");
    }

    fn show(&mut self, report: &Report) {
        let shown = report.lines.iter().filter(|line| !line.contains("/leases/"));
        shown.for_each(|line| println!("{}", line.chars().take(400).collect::<String>()));
        println!(
            "hash {:016x}, {} events, {} writes, {} effective",
            report.hash, report.events, report.writes, report.effective
        );
        self.count(report, "the same");
    }

    fn end(&self) -> ExitCode {
        let real = self.started.map_or(0.0, |started| started.elapsed().as_secs_f64());
        println!("{:.1} h of virtual time in {real:.1} s", self.virtual_ms as f64 / 3.6e6);
        let word = if self.failed == 0 { "ok" } else { "FAILED" };
        println!(
            "test result: {word}. {} passed; {} failed; 0 ignored; 0 measured; 0 filtered out",
            self.passed, self.failed
        );
        println!("{} passed, {} failed", self.passed, self.failed);
        if self.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

fn differs(whole: &Report, crashed: &mut Report) {
    // where engines freeze or heal by the clock, or a pod is deleted in its stall, how much an operator gets to see depends on when it looks
    let by_the_clock = matches!(crashed.name.as_str(), "sick-node" | "common-cause-proceed" | "replaced-in-stall");
    if !by_the_clock && whole.end_state != crashed.end_state {
        let (a, b) = (whole.end_state.as_object(), crashed.end_state.as_object());
        let (Some(a), Some(b)) = (a, b) else { return };
        let keys = a.keys().chain(b.keys()).filter(|key| a.get(*key) != b.get(*key));
        let what: std::collections::BTreeSet<String> = keys
            .map(|key| {
                format!(
                    "{key}: {:?} not {:?}",
                    b.get(key).map(ToString::to_string),
                    a.get(key).map(ToString::to_string)
                )
            })
            .collect();
        crashed.violations.push(format!("P1: the end differs from the run without a crash: {what:?}"));
    }
}
