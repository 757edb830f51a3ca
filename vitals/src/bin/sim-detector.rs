//! Runs simulated histories of the detector on all cores and prints the table (goals 1d, 1e of the performance anchors).
//!
//! A thin driver: arguments, threads, a clock for its own speed, printing. What is simulated lives in `vitals::sim`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use vitals::observation::{Ms, Observation};
use vitals::policy::Policy;
use vitals::rivals::corpus::{self, KindRow};
use vitals::rivals::score::RuleScore;
use vitals::rivals::watch::Watchers;
use vitals::rivals::{self, Ours, Rule};
use vitals::sim::check::{Checker, Verdicts};
use vitals::sim::history::{self, Spec, Ticks, Watcher};
use vitals::sim::kinds::{self, KINDS, Kind, Truth};
use vitals::sim::table::{Sums, Table, replay_line};
use vitals::verdict::{Outcome, Verdict};

const USAGE: &str = "sim-detector [--hours N] [--seed S] [--kind NAME]... [--fine | --compare] [--rules all|kinds] [--write-scores FILE] [--threads N] [--replay SEED [--verbose]]";

#[derive(Debug, Clone)]
struct Args {
    hours: f64,
    seed: u64,
    kinds: Vec<&'static Kind>,
    ticks: Ticks,
    /// Every history twice: looked at closely, and as seldom as the long run does.
    compare: bool,
    /// Everybody's rules beside ours.
    rules: Option<Rivals>,
    /// Where the accounts of all rules go, our curve's points among them: what `truebeat replay --scores` reads.
    scores: Option<PathBuf>,
    threads: usize,
    replay: Option<u64>,
    verbose: bool,
}

/// How everybody's rules are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rivals {
    /// One line each.
    All,
    /// Kind by kind: a table for the docs, the same at every run (on one thread, for threads share the histories out as they come).
    Kinds,
}

fn main() -> ExitCode {
    let args = match parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(why) => {
            eprintln!("sim-detector: {why}\nusage: {USAGE}\nkinds:");
            KINDS.iter().for_each(|kind| eprintln!("  {:<13} {}", kind.name, kind.what));
            return ExitCode::from(2);
        }
    };
    match (args.replay, args.kinds.first()) {
        (Some(seed), Some(kind)) => replay(&Spec::new(kind, seed, args.ticks), args.verbose),
        (Some(_), None) => {
            eprintln!("sim-detector: --replay needs the --kind of that history");
            ExitCode::from(2)
        }
        (None, _) => simulate(&args),
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Args, String> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut args = Args {
        hours: 1_000.0,
        seed: 1,
        kinds: Vec::new(),
        ticks: Ticks::Coarse,
        compare: false,
        rules: None,
        scores: None,
        threads: cores,
        replay: None,
        verbose: false,
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--hours" => {
                args.hours = value()?.parse().map_err(|_| "--hours needs a number of engine-hours".to_owned())?
            }
            "--seed" => args.seed = number(&value()?)?,
            "--replay" => args.replay = Some(number(&value()?)?),
            "--threads" => args.threads = number(&value()?)?.clamp(1, 256) as usize,
            "--fine" => args.ticks = Ticks::Fine,
            "--compare" => args.compare = true,
            "--rules" => {
                args.rules = match value()?.as_str() {
                    "all" => Some(Rivals::All),
                    "kinds" => Some(Rivals::Kinds),
                    other => return Err(format!("--rules {other:?}: all or kinds")),
                }
            }
            "--write-scores" => args.scores = Some(value()?.into()),
            "--verbose" => args.verbose = true,
            "--kind" => {
                let name = value()?;
                args.kinds.push(kinds::by_name(&name).ok_or(format!("there is no kind {name:?}"))?);
            }
            other => return Err(format!("{other:?} is no argument")),
        }
    }
    if args.rules == Some(Rivals::Kinds) && (args.compare || args.scores.is_some()) {
        return Err("--rules kinds prints its table alone: without --compare and --write-scores".to_owned());
    }
    Ok(args)
}

/// A number, decimal or with `0x`.
fn number(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("{text:?} is no whole number"))
}

fn simulate(args: &Args) -> ExitCode {
    let began = Instant::now();
    let (next, done_us) = (AtomicU64::new(0), AtomicU64::new(0));
    let goal_us = (args.hours * 3.6e9) as u64;
    let work = || {
        let mut part = Part::default();
        while done_us.load(Ordering::Relaxed) < goal_us {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let mut spec = Spec::dealt(args.seed, index, args.ticks);
            if !args.kinds.is_empty() {
                spec.kind = args.kinds[index as usize % args.kinds.len()];
            }
            done_us.fetch_add(part.live(&spec, args), Ordering::Relaxed);
        }
        part
    };
    let mut all = Part::default();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..args.threads).map(|_| scope.spawn(work)).collect();
        // a history that panics ends the run: what its thread had counted is lost, and a count without it would be a lie
        threads.into_iter().for_each(|thread| match thread.join() {
            Ok(part) => all.merge(part),
            Err(panic) => std::panic::resume_unwind(panic),
        });
    });
    let Part { table, by_kind, alike, unlike } = all;
    let total = table.total();
    let scores = sum(&by_kind);
    let seconds = began.elapsed().as_secs_f64();
    if args.rules == Some(Rivals::Kinds) {
        println!("seed {}, {} histories, {:.0} engine-hours\n", args.seed, total.histories, total.benign_hours());
        print!("{}", kinds_table(&table, &by_kind));
        return ending(&total);
    }
    println!("\nseed {}, {} histories", args.seed, total.histories);
    print!("{}", table.render());
    if args.rules == Some(Rivals::All) || args.scores.is_some() {
        print!("{}", rules_table(&scores));
    }
    if args.compare {
        println!("looked at each 100 ms and as seldom as the long run: {alike} histories alike, {unlike} not");
    }
    println!(
        "speed: {:.0} engine-hours a second on {} threads ({:.1} s, {:.1} million ticks, {:.0} ns a tick and thread)",
        total.benign_hours() / seconds,
        args.threads,
        seconds,
        total.ticks as f64 / 1e6,
        seconds * args.threads as f64 * 1e9 / total.ticks.max(1) as f64
    );
    if let Some(path) = &args.scores
        && let Err(why) = write_scores(path, &scores)
    {
        eprintln!("sim-detector: could not write the scores to {}: {why}", path.display());
        return ExitCode::from(2);
    }
    ending(&total)
}

fn ending(total: &Sums) -> ExitCode {
    println!("{} passed, {} failed", total.histories - total.failed, total.failed);
    if total.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What one thread has summed up.
#[derive(Default)]
struct Part {
    table: Table,
    /// Of each kind that was lived, by its place among [`KINDS`].
    by_kind: BTreeMap<usize, Vec<RuleScore>>,
    alike: u64,
    unlike: u64,
}

impl Part {
    /// Lives one history and returns its benign microseconds.
    fn live(&mut self, spec: &Spec, args: &Args) -> u64 {
        let policy = Policy::default();
        let verdicts = if args.rules.is_some() || args.scores.is_some() {
            let mut rules = Rules(Watchers::new(everybody(&policy, args.scores.is_some())));
            let verdicts = history::run(&Spec { linger: true, ..*spec }, &policy, &mut rules);
            let kind = KINDS.iter().position(|kind| kind.name == spec.kind.name).unwrap_or(0);
            add(self.by_kind.entry(kind).or_default(), &rules.0.scores());
            verdicts
        } else {
            history::run(spec, &policy, &mut ())
        };
        if args.compare {
            self.compare(spec, &verdicts);
        }
        if !verdicts.failures.is_empty() && args.rules == Some(Rivals::Kinds) {
            eprintln!("{}", replay_line(&verdicts));
        } else if !verdicts.failures.is_empty() {
            println!("{}", replay_line(&verdicts));
        }
        let benign_us = verdicts.benign_us.max(1);
        self.table.add(verdicts);
        benign_us
    }

    /// The same history with the other rhythm: the same alarms, the same failures?
    fn compare(&mut self, spec: &Spec, seldom: &Verdicts) {
        let often = history::run(&Spec { ticks: Ticks::Fine, ..*spec }, &Policy::default(), &mut ());
        let essence =
            |v: &Verdicts| (v.false_evictions, v.failures.first().map(|(_, what)| *what), v.fence_ms.is_some());
        let near = |a: Option<u64>, b: Option<u64>| a.unwrap_or(0).abs_diff(b.unwrap_or(0)) <= 5_000;
        if essence(&often) == essence(seldom) && near(often.fence_ms, seldom.fence_ms) {
            self.alike += 1;
        } else {
            self.unlike += 1;
            println!("UNLIKE {} {:#x}: {:?} and {:?}", spec.kind.name, spec.seed, essence(&often), essence(seldom));
        }
    }

    fn merge(&mut self, other: Self) {
        self.table.merge(other.table);
        other.by_kind.iter().for_each(|(kind, scores)| add(self.by_kind.entry(*kind).or_default(), scores));
        self.alike += other.alike;
        self.unlike += other.unlike;
    }
}

fn add(sum: &mut Vec<RuleScore>, more: &[RuleScore]) {
    if sum.is_empty() {
        *sum = more.to_vec();
    } else {
        sum.iter_mut().zip(more).for_each(|(sum, more)| sum.add(more));
    }
}

fn sum(by_kind: &BTreeMap<usize, Vec<RuleScore>>) -> Vec<RuleScore> {
    let mut all = Vec::new();
    by_kind.values().for_each(|scores| add(&mut all, scores));
    all
}

fn kinds_table(table: &Table, by_kind: &BTreeMap<usize, Vec<RuleScore>>) -> String {
    let rows = by_kind.iter().filter_map(|(index, scores)| {
        let (kind, sums) = (KINDS.get(*index)?, table.kinds.get(*index)?);
        let is_hang = kind.truth == Truth::Hang;
        Some(KindRow { name: kind.name, what: kind.what, is_hang, histories: sums.histories, scores })
    });
    let rules = everybody(&Policy::default(), false);
    let about: Vec<_> = rules.iter().map(|rule| (rule.name(), rule.about())).collect();
    corpus::render(&rows.collect::<Vec<_>>(), &about)
}

/// All rules beside one history.
struct Rules(Watchers);

impl Watcher for Rules {
    fn tick(&mut self, now_ms: Ms, obs: &Observation, _: &Outcome, checker: &Checker) {
        self.0.tick(now_ms, obs, checker.truth(now_ms * 1_000));
    }
}

/// Ours, at every point of its curve if `curve`, and the rivals.
fn everybody(policy: &Policy, curve: bool) -> Vec<Box<dyn Rule>> {
    let ours = if curve { rivals::swept(policy) } else { vec![Box::new(Ours::new(policy.clone())) as Box<dyn Rule>] };
    ours.into_iter().chain(rivals::all()).collect()
}

/// One account a line.
fn write_scores(path: &Path, scores: &[RuleScore]) -> std::io::Result<()> {
    let lines: Result<Vec<String>, _> = scores.iter().map(serde_json::to_string).collect();
    std::fs::write(path, lines?.join("\n") + "\n")
}

/// One line a rule. The gate obeys our fence, so the others see fewer new requests after it than they would alone.
fn rules_table(scores: &[RuleScore]) -> String {
    let seconds = |ms: Option<Ms>| ms.map_or("-".to_owned(), |ms| format!("{:.1}", ms as f64 / 1e3));
    let mut out = format!(
        "\n{:<24} {:>6} {:>7} {:>8} {:>8} {:>8} {:>10} {:>12} {:>12} {:>9}\n",
        "rule", "hangs", "caught", "p50 s", "p99 s", "max s", "evict p99", "false fences", "false evict.", "a year"
    );
    for score in scores {
        let rate = score.eviction_rate();
        out += &format!(
            "{:<24} {:>6} {:>7} {:>8} {:>8} {:>8} {:>10} {:>12} {:>12} {:>9}\n",
            score.rule,
            score.hangs,
            score.caught,
            seconds(score.latency_quantile_ms(500)),
            seconds(score.latency_quantile_ms(990)),
            seconds(score.latency_max_ms()),
            seconds(score.evict_quantile_ms(990)),
            score.false_fences,
            score.false_evictions,
            rate.map_or("-".to_owned(), |r| format!("{}{:.1}", if r.is_bound { "<" } else { "" }, r.per_year))
        );
    }
    out
}

/// Prints each change of verdict with its reasons; verbose: each look at something that is not calm.
struct Printer {
    last: Option<Verdict>,
    verbose: bool,
    hung: bool,
}

impl Watcher for Printer {
    fn tick(&mut self, now_ms: Ms, obs: &Observation, outcome: &Outcome, checker: &Checker) {
        let t = now_ms as f64 / 1e3;
        if checker.hung() && !std::mem::replace(&mut self.hung, checker.hung()) {
            println!("{t:>12.3} ---- the fault is done");
        }
        if self.last.as_ref() != Some(&outcome.verdict) {
            println!("{t:>12.3} {:?}", outcome.verdict);
            outcome.reasons.iter().for_each(|reason| println!("{:>14} {}: {}", "", reason.source, reason.text));
            self.last = Some(outcome.verdict.clone());
        }
        if self.verbose {
            println!("{t:>12.3} {}", serde_json::to_string(obs).unwrap_or_default());
        }
    }
}

fn replay(spec: &Spec, verbose: bool) -> ExitCode {
    let plot = vitals::sim::script::write(spec.kind, spec.seed);
    plot.world.script.iter().rev().for_each(|(at, act)| println!("{:>12.3} will be: {act:?}", *at as f64 / 1e6));
    let mut printer = Printer { last: None, verbose, hung: false };
    let verdicts = history::run(spec, &Policy::default(), &mut printer);
    println!("{verdicts:#?}");
    if verdicts.failures.is_empty() {
        println!("1 passed, 0 failed");
        return ExitCode::SUCCESS;
    }
    println!("{}\n0 passed, 1 failed", replay_line(&verdicts));
    ExitCode::FAILURE
}
