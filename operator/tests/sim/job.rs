//! One thing to run, under the words that replay it.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
};

use super::{
    faults::Side,
    fields, mend, random,
    report::Report,
    rng::Rng,
    rows,
    run::run,
    story::{self, Story, plain},
};

/// One run, or the few that are compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Job {
    /// A standard story without a fault.
    Standard(String),
    /// The story of a seed, and the same twice.
    Seed(u64),
    Twice(u64),
    /// A standard story in which operators die at these writes (P1).
    Crash(String, Vec<(u64, Side)>),
    /// P11 and P5 for a field of the spec, P6 for an error.
    Field(String),
    Rollback(String),
    Bad(String),
    /// A row of the catalogue of faults.
    Row(String),
}

impl Job {
    /// Reads what [`Self::words`] wrote.
    pub fn parse(words: &[&str]) -> Option<Self> {
        Some(match words {
            ["standard", name] => Job::Standard((*name).to_owned()),
            ["seed", seed] => Job::Seed(seed.parse().ok()?),
            ["twice", seed] => Job::Twice(seed.parse().ok()?),
            ["crash", name, deaths @ ..] => {
                let death = |pair: &[&str]| Some((pair.first()?.parse().ok()?, side(pair.get(1)?)?));
                Job::Crash((*name).to_owned(), deaths.chunks(2).map(death).collect::<Option<_>>()?)
            }
            ["field", path] => Job::Field((*path).to_owned()),
            ["rollback", path] => Job::Rollback((*path).to_owned()),
            ["bad", name] => Job::Bad((*name).to_owned()),
            ["row", name] => Job::Row((*name).to_owned()),
            _ => return None,
        })
    }

    pub fn words(&self) -> String {
        match self {
            Job::Standard(name) => format!("standard {name}"),
            Job::Seed(seed) => format!("seed {seed}"),
            Job::Twice(seed) => format!("twice {seed}"),
            Job::Crash(name, deaths) => {
                let words = deaths.iter().map(|(at, side)| format!(" {at} {}", word(*side)));
                format!("crash {name}{}", words.collect::<String>())
            }
            Job::Field(path) => format!("field {path}"),
            Job::Rollback(path) => format!("rollback {path}"),
            Job::Bad(name) => format!("bad {name}"),
            Job::Row(name) => format!("row {name}"),
        }
    }

    /// Runs it. A panic in it is a violation like any other.
    pub fn run(&self, keep_lines: bool) -> Report {
        let result = catch_unwind(AssertUnwindSafe(|| self.go(keep_lines)));
        result.unwrap_or_else(|_| Report::failed("it panicked".to_owned()))
    }

    fn go(&self, keep_lines: bool) -> Report {
        let unknown = || Report::failed("there is no such thing".to_owned());
        match self {
            Job::Standard(name) => story::acts(name).map_or_else(unknown, |_| standard(name)),
            Job::Seed(seed) => run(&random::story(*seed), keep_lines),
            Job::Twice(seed) => twice(*seed),
            Job::Crash(name, deaths) => {
                let Some(acts) = story::acts(name) else { return unknown() };
                let patient = Story { patient: true, ..plain(acts, deaths.clone()) };
                let mut report = run(&patient, keep_lines);
                // where engines freeze or heal by the clock, what an operator gets to see depends on when it looks
                if story::by_the_clock(name) {
                    report.compare_what_stands("P1", "the run without a crash", &whole(name));
                } else {
                    report.compare("P1", "the run without a crash", &whole(name));
                    report.writes_no_more(&whole(name), deaths.len() as u64);
                }
                report
            }
            Job::Field(path) => field(path).map_or_else(unknown, |field| fields::effect(&field, keep_lines)),
            Job::Rollback(path) => field(path).map_or_else(unknown, |field| fields::rollback(&field, keep_lines)),
            Job::Bad(name) => {
                let error = mend::all().into_iter().find(|error| error.name == name);
                error.map_or_else(unknown, |error| mend::mended(&error, keep_lines))
            }
            Job::Row(name) => {
                rows::all().iter().find(|row| row.name == name).map_or_else(unknown, |row| row.run(keep_lines))
            }
        }
    }
}

/// Every standard story, field, error and row once.
pub fn once() -> Vec<Job> {
    let standard = story::standard().into_iter().map(|(name, _)| Job::Standard(name.to_owned()));
    let rows = rows::all().into_iter().map(|row| Job::Row(row.name.to_owned()));
    let bad = mend::all().into_iter().map(|error| Job::Bad(error.name.to_owned()));
    let paths: Vec<String> = fields::all().into_iter().map(|field| field.path).collect();
    let fields = paths.iter().map(|path| Job::Field(path.clone()));
    let back = paths.iter().map(|path| Job::Rollback(path.clone()));
    standard.chain(bad).chain(fields).chain(back).chain(rows).collect()
}

pub fn seeds(from: u64, count: u64) -> Vec<Job> {
    (from..from + count).map(Job::Seed).collect()
}

/// An operator that dies at every `every`th write of every standard story, on either side of its effect.
pub fn crashes(every: usize) -> Vec<Job> {
    let mut jobs = Vec::new();
    for (name, _) in story::standard() {
        for at in (1..=whole(name).writes).step_by(every) {
            jobs.extend([Side::Before, Side::After].map(|side| Job::Crash(name.to_owned(), vec![(at, side)])));
        }
    }
    jobs
}

/// B2: two deaths, the second one often in the recovery from the first.
pub fn pairs(from: u64, count: u64) -> Vec<Job> {
    let stories = story::standard();
    let pair = |seed: u64| {
        let mut rng = Rng::new(seed ^ 0xb2);
        let name = rng.pick(&stories).0;
        let writes = whole(name).writes.max(1);
        let first = rng.range(1, writes + 1);
        let second = if rng.permille(500) { first + rng.range(1, 8) } else { rng.range(1, writes + 1) };
        let sides = [Side::Before, Side::After];
        let deaths = vec![(first.min(second), *rng.pick(&sides)), (first.max(second), *rng.pick(&sides))];
        Job::Crash(name.to_owned(), deaths)
    };
    (from..from + count).map(pair).collect()
}

/// The story without a crash, run once.
fn whole(name: &str) -> Arc<Report> {
    static WHOLE: Mutex<BTreeMap<String, Arc<Report>>> = Mutex::new(BTreeMap::new());
    if let Some(report) = WHOLE.lock().expect("no panic").get(name) {
        return report.clone();
    }
    let acts = story::acts(name).expect("a standard story");
    let report = Arc::new(run(&plain(acts, Vec::new()), false));
    WHOLE.lock().expect("no panic").entry(name.to_owned()).or_insert(report).clone()
}

fn standard(name: &str) -> Report {
    let mut acts = story::acts(name).expect("a standard story");
    acts.extend(story::expectations(name));
    acts.sort_by_key(|(at, _)| *at);
    let mut report = run(&plain(acts, Vec::new()).for_long(), true);
    report.has_words(story::words(name));
    report
}

/// The same seed twice is the same run.
fn twice(seed: u64) -> Report {
    let (first, mut second) = (run(&random::story(seed), true), run(&random::story(seed), true));
    second.violations.clear();
    if first.hash != second.hash {
        let at = first.lines.iter().zip(&second.lines).position(|(a, b)| a != b).unwrap_or_default();
        let differ = format!("two runs of one seed differ at line {at}: {} and {}", first.lines[at], second.lines[at]);
        second.violations.push(differ);
    }
    second
}

fn field(path: &str) -> Option<fields::Field> {
    fields::all().into_iter().find(|field| field.path == path)
}

fn side(word: &str) -> Option<Side> {
    [Side::Before, Side::After].into_iter().find(|side| self::word(*side) == word)
}

fn word(side: Side) -> &'static str {
    if side == Side::Before { "before" } else { "after" }
}
