//! Runs jobs on all processors and counts; the output is in the order of the jobs whoever was first.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::ExitCode,
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Instant,
};

use super::{job::Job, report::Report, spoken};

const PROGRESS_EVERY: u64 = 1_000;

pub struct Tally {
    pub passed: u64,
    pub failed: u64,
    /// Tell the hash of each run.
    pub hashes: bool,
    virtual_ms: u64,
    started: Instant,
    /// The properties that were violated, `P1` to `P16`, invariants, rows of faults.
    properties: BTreeSet<String>,
    /// What operators have said in all runs.
    said: spoken::Spoken,
}

impl Tally {
    pub fn new() -> Self {
        Tally {
            passed: 0,
            failed: 0,
            hashes: false,
            virtual_ms: 0,
            started: Instant::now(),
            properties: BTreeSet::new(),
            said: spoken::Spoken::new(),
        }
    }

    /// Runs all of them.
    pub fn all(&mut self, jobs: &[Job]) {
        let (next, (tell, hear)) = (AtomicUsize::new(0), mpsc::channel());
        thread::scope(|scope| {
            for _ in 0..threads() {
                let (tell, next) = (tell.clone(), &next);
                scope.spawn(move || {
                    loop {
                        let at = next.fetch_add(1, Ordering::Relaxed);
                        let Some(job) = jobs.get(at) else { return };
                        let _ = tell.send((at, job.run(false)));
                    }
                });
            }
            drop(tell);
            let (mut early, mut due) = (BTreeMap::new(), 0);
            for (at, report) in hear {
                early.insert(at, report);
                while let Some(report) = early.remove(&due) {
                    self.count(&jobs[due], &report);
                    due += 1;
                }
            }
        });
    }

    /// One after the other until a violation of one of `wanted` is seen.
    pub fn until(&mut self, jobs: &[Job], wanted: &[&str]) {
        for job in jobs {
            if wanted.iter().any(|property| self.properties.contains(*property)) {
                return;
            }
            let report = job.run(false);
            self.count(job, &report);
        }
    }

    pub fn show(&mut self, job: &Job) {
        let report = job.run(true);
        let shown = report.lines.iter().filter(|line| !line.contains("/leases/"));
        shown.for_each(|line| println!("{}", line.chars().take(400).collect::<String>()));
        println!("{}", hash(&report));
        self.count(job, &report);
    }

    fn count(&mut self, job: &Job, report: &Report) {
        self.virtual_ms += report.virtual_ms;
        report.said.iter().for_each(|(of, words)| self.said.entry(of).or_default().extend(words.iter().cloned()));
        if self.hashes {
            println!("{} {}", job.words(), hash(report));
        }
        if report.violations.is_empty() {
            self.passed += 1;
        } else {
            self.failed += 1;
            println!("FAILED {}", job.words());
            report.violations.iter().for_each(|what| println!("    {what}"));
            println!("    replay: cargo test --release -p operator --test sim -- {}", job.words());
            self.properties.extend(report.violations.iter().map(|what| property(what).to_owned()));
        }
        let done = self.passed + self.failed;
        if done.is_multiple_of(PROGRESS_EVERY) {
            eprintln!("{done} runs in {:.0} s, {} failed", self.started.elapsed().as_secs_f64(), self.failed);
        }
    }

    /// P13: each word that is listed was said by somebody.
    pub fn every_word(&mut self) {
        let unsaid = spoken::unsaid(&self.said);
        if unsaid.is_empty() {
            return self.passed += 1;
        }
        self.failed += 1;
        self.properties.insert("P13".to_owned());
        println!("FAILED docs/conditions.md");
        unsaid.iter().for_each(|what| println!("    P13: {what}"));
    }

    pub fn end(&self) -> ExitCode {
        let (real, hours) = (self.started.elapsed().as_secs_f64(), self.virtual_ms as f64 / 3.6e6);
        println!("{hours:.1} h of virtual time in {real:.1} s, {:.0} times as fast", hours * 3600.0 / real);
        if !self.properties.is_empty() {
            println!("violated: {}", self.properties.iter().cloned().collect::<Vec<_>>().join(" "));
        }
        let word = if self.failed == 0 { "ok" } else { "FAILED" };
        println!(
            "test result: {word}. {} passed; {} failed; 0 ignored; 0 measured; 0 filtered out",
            self.passed, self.failed
        );
        println!("{} passed, {} failed", self.passed, self.failed);
        if self.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// What two runs of one seed must agree on.
fn hash(report: &Report) -> String {
    let Report { hash, events, writes, effective, .. } = report;
    format!("hash {hash:016x}, {events} events, {writes} writes, {effective} effective")
}

/// The property that a violation names: the first word of its kind.
fn property(what: &str) -> &str {
    let kinds = ['P', 'I', 'A', 'B', 'F', 'H', 'S'];
    let named = |word: &&str| {
        word.strip_suffix(':').and_then(|word| word.strip_prefix(kinds)).is_some_and(|n| n.parse::<u8>().is_ok())
    };
    what.split_whitespace().find(named).map_or("?", |word| word.trim_end_matches(':'))
}

fn threads() -> usize {
    let asked = std::env::var("SIM_THREADS").ok().and_then(|count| count.parse().ok());
    asked.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from))
}
