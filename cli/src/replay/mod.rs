//! `truebeat replay`: reads traces, runs our detector and the rivals over them in virtual time, and prints what each would have said.
//! Rules, judgement and replay are `vitals`, which is pure; this file opens files, the ones beside it draw.

mod chart;
mod read;
mod table;

use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::ValueEnum;
use vitals::policy::Policy;
use vitals::replay::Timeline;
use vitals::replay::rules::History;
use vitals::rivals::judge::{Judged, Span, account, judge};
use vitals::rivals::score::RuleScore;
use vitals::rivals::{self, OUR_NAME};

use crate::bundle::on_one_line;

#[derive(Debug, clap::Args)]
pub struct ReplayArgs {
    /// Trace files (`*.jsonl` or `*.jsonl.gz`); `NAME.labels.json` beside one says what really happened.
    #[arg(required_unless_present = "scores", value_name = "TRACE")]
    pub traces: Vec<PathBuf>,
    /// Which rules: `truebeat`, a rival's name, several with commas, or `all`.
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = OUR_NAME)]
    pub rules: Vec<String>,
    /// `json`: one object for each trace and rule. `table`: latency of each hang and false alarms, by the labels. `text`: for reading.
    #[arg(long, value_enum, default_value_t = ReplayOutput::Text)]
    pub output: ReplayOutput,
    /// Carry the last hang of each labelled trace on until it has lasted so many seconds (most rules wait for longer than
    /// recordings last). Such a trace is called `NAME+held`.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub hold_hangs: Option<u32>,
    /// Draw false alarms a year against latency into this file.
    #[arg(long, value_name = "FILE.svg")]
    pub chart: Option<PathBuf>,
    /// Accounts of other histories (a simulation's), added to those of the traces: one JSON object a line. Of our curve only the
    /// points are drawn that every such file has (`truebeat@50`: half of the patience).
    #[arg(long, value_name = "FILE")]
    pub scores: Vec<PathBuf>,
    /// Write the accounts here, one JSON object a line.
    #[arg(long, value_name = "FILE")]
    pub write_scores: Option<PathBuf>,
}

/// How a replay is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReplayOutput {
    Text,
    Json,
    Table,
}

/// One history with what really happened, where that is known.
#[derive(Debug)]
struct Case {
    history: History,
    truth: Option<Vec<Span>>,
}

/// What one rule made of one case.
#[derive(Debug)]
struct Run {
    /// Index into the cases.
    case: usize,
    timeline: Timeline,
    judged: Option<Vec<Judged>>,
}

pub fn run(args: &ReplayArgs) -> anyhow::Result<ExitCode> {
    let rules = chosen(&args.rules)?;
    let mut cases = Vec::new();
    for path in &args.traces {
        cases.push(read::case(path)?);
    }
    if let Some(seconds) = args.hold_hangs {
        cases = cases.into_iter().map(|case| held(case, f64::from(seconds))).collect();
    }
    let runs = replay_all(&cases, &rules)?;
    let mut scores = tally(&rules, &runs);
    let mut curve = if args.chart.is_some() { sweep(&cases)? } else { Vec::new() };
    for path in &args.scores {
        read::add_scores(path, &mut scores, &mut curve)?;
    }
    // first what was asked for as files: a reader of what is printed may leave before its end
    if let Some(path) = &args.write_scores {
        let lines: Vec<String> = scores.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
        let text = lines.join("\n") + "\n";
        std::fs::write(path, text).with_context(|| format!("could not write the scores to {}", path.display()))?;
    }
    if let Some(path) = &args.chart {
        draw(path, &scores, &curve)?;
    }
    match args.output {
        ReplayOutput::Json => {
            for run in runs.iter().flatten() {
                println!("{}", serde_json::to_string(&run.timeline)?);
            }
        }
        ReplayOutput::Text => runs.iter().flatten().for_each(|run| print!("{}", text(&run.timeline))),
        ReplayOutput::Table => print!("{}", table::render(&cases, &rules, &runs, &scores)),
    }
    Ok(ExitCode::SUCCESS)
}

/// The names asked for, each once and known, in the order of tables.
fn chosen(asked: &[String]) -> anyhow::Result<Vec<&'static str>> {
    let known: Vec<&'static str> =
        std::iter::once(OUR_NAME).chain(rivals::all().iter().map(|rule| rule.name())).collect();
    for name in asked {
        if name != "all" && !known.contains(&name.as_str()) {
            bail!("--rules {name:?} is no rule; choose from all, {}", known.join(", "));
        }
    }
    let wanted = |name: &&'static str| asked.iter().any(|asked| asked == "all" || asked == name);
    Ok(known.into_iter().filter(wanted).collect())
}

fn held(case: Case, seconds: f64) -> Case {
    match case.truth.as_ref().and_then(|truth| case.history.with_hang_held(truth, seconds)) {
        Some((history, truth)) => Case { history, truth: Some(truth) },
        None => case,
    }
}

/// Every rule over every case; the outer list is by rule.
fn replay_all(cases: &[Case], rules: &[&'static str]) -> anyhow::Result<Vec<Vec<Run>>> {
    let by_rule = |name: &&'static str| cases.iter().enumerate().map(|(i, case)| one(i, case, name)).collect();
    rules.iter().map(by_rule).collect()
}

fn one(index: usize, case: &Case, name: &str) -> anyhow::Result<Run> {
    let timeline = match rivals::by_name(name) {
        Some(mut rival) => case.history.rival(rival.as_mut()),
        None => case.history.ours(&Policy::default())?,
    };
    let judged = case.truth.as_ref().map(|truth| judge(&timeline, truth));
    Ok(Run { case: index, timeline, judged })
}

fn tally(rules: &[&'static str], runs: &[Vec<Run>]) -> Vec<RuleScore> {
    let score = |(name, runs): (&&'static str, &Vec<Run>)| {
        let mut score = RuleScore::new(name);
        runs.iter().filter_map(|run| run.judged.as_ref()).for_each(|judged| account(&mut score, judged));
        score
    };
    rules.iter().zip(runs).map(score).collect()
}

/// Our policy at other patience, over the cases.
fn sweep(cases: &[Case]) -> anyhow::Result<Vec<RuleScore>> {
    let mut points = Vec::new();
    for (percent, name) in rivals::SWEEP {
        let policy = rivals::scaled(&Policy::default(), percent);
        let mut score = RuleScore::new(name);
        for case in cases {
            if let Some(truth) = &case.truth {
                account(&mut score, &judge(&case.history.ours(&policy)?, truth));
            }
        }
        points.push(score);
    }
    Ok(points)
}

fn draw(path: &std::path::Path, scores: &[RuleScore], curve: &[RuleScore]) -> anyhow::Result<()> {
    if scores.iter().all(|score| score.hangs == 0) {
        bail!("--chart needs hangs: no trace has a NAME.labels.json with one beside it, and no --scores have any");
    }
    let svg = chart::render(scores, curve);
    std::fs::write(path, svg).with_context(|| format!("could not write the chart to {}", path.display()))
}

/// For reading. A trace is somebody's file, and its words move no cursor.
fn text(timeline: &Timeline) -> String {
    let plain = |text: &str| on_one_line(text).collect::<String>();
    let mut lines = format!("{} (rule {})\n", plain(&timeline.trace), timeline.rule);
    for change in &timeline.timeline {
        let class = change.class.as_deref().map(|class| format!(" {class}")).unwrap_or_default();
        _ = writeln!(lines, "  {:>9.1} s  {}{class}", change.t, change.verdict);
        for reason in &change.reasons {
            _ = writeln!(lines, "               {}", plain(reason));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_trace_says_moves_no_cursor() {
        let words = "rank 0 \u{1b}[2J\nx (rule ours)";
        let change = serde_json::json!({"t": 1.0, "verdict": "Suspect", "reasons": [words]});
        let timeline = serde_json::json!({"trace": "t", "rule": "truebeat", "timeline": [change]});
        let text = text(&serde_json::from_value(timeline).unwrap());
        assert!(text.lines().count() == 3 && !text.contains('\u{1b}') && text.contains("rank 0  [2J x"), "{text}");
    }

    #[test]
    fn rules_are_chosen_by_name_once_and_in_order() {
        let names = |asked: &[&str]| chosen(&asked.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        assert_eq!(names(&["gonka", "truebeat", "gonka"]).unwrap(), ["truebeat", "gonka"]);
        assert_eq!(names(&["all"]).unwrap().len(), 1 + rivals::all().len());
        let error = names(&["vllm"]).unwrap_err().to_string();
        assert!(error.contains("\"vllm\"") && error.contains("vllm-execute-timeout"), "{error}");
    }
}
