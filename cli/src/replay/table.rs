//! The table of a replay: one row for each labelled stretch, one column for each rule, and a line of sums for each rule. Pure text.

use std::fmt::Write as _;

use vitals::rivals::judge::{Judged, Kind};
use vitals::rivals::score::{Rate, RuleScore};
use vitals::rivals::{self, OUR_NAME};

use super::{Case, Run};

const LEGEND: &str = "\
hang, dead: seconds until the rule first said so; * it also called for a restart in time; - missed
other rows: seconds into a healthy stretch at which it gave a false alarm; * with a call for a restart; . quiet
";

/// The whole table. `runs` is by rule, then by case, as the rules are.
pub fn render(cases: &[Case], rules: &[&'static str], runs: &[Vec<Run>], scores: &[RuleScore]) -> String {
    let mut text = String::new();
    for (number, name) in rules.iter().enumerate() {
        let _ = writeln!(text, "{:>4}  {name:<27} {}", number + 1, about(name));
    }
    let labelled = cases.iter().any(|case| case.truth.is_some());
    if labelled {
        let _ = write!(text, "\n{LEGEND}\n{:<52}", "");
        (1..=rules.len()).for_each(|number| _ = write!(text, "{number:>8}"));
        text.push('\n');
        rows(&mut text, cases, runs);
    }
    for case in cases.iter().filter(|case| case.truth.is_none()) {
        let name = &case.history.trace;
        let _ = writeln!(text, "{name}: no {name}.labels.json beside it, so that nobody can say who was right");
    }
    sums(&mut text, scores);
    text
}

fn about(name: &str) -> &'static str {
    match rivals::by_name(name) {
        Some(rival) => rival.about(),
        None => "ours: work owed and no delivery for longer than this phase and batch have taught",
    }
}

fn rows(text: &mut String, cases: &[Case], runs: &[Vec<Run>]) {
    for (index, case) in cases.iter().enumerate() {
        for (at, span) in case.truth.iter().flatten().enumerate().filter(|(_, span)| span.kind() != Kind::Neutral) {
            let _ = write!(text, "{:<28} {:<10} {:>5.0}-{:<5.0} ", case.history.trace, span.state, span.from, span.to);
            for of_rule in runs {
                let judged = of_rule.iter().find(|run| run.case == index).and_then(|run| run.judged.as_ref());
                let cell = judged.and_then(|judged| judged.get(at)).map(cell).unwrap_or_default();
                let _ = write!(text, "{cell:>8}");
            }
            text.push('\n');
        }
    }
}

fn cell(judged: &Judged) -> String {
    let mark = if judged.evict_s.is_some() { "*" } else { " " };
    match (judged.alarm_s, judged.kind) {
        (Some(seconds), _) => format!("{seconds:.1}{mark}"),
        (None, Kind::Hang | Kind::Dead) => "- ".to_owned(),
        (None, _) => ". ".to_owned(),
    }
}

/// One line for each rule.
fn sums(text: &mut String, scores: &[RuleScore]) {
    let _ = writeln!(
        text,
        "\n{:<27} {:<7} {:>9} {:>8} {:>8} {:>8} {:>9} {:>7} {:>7} {:>9} {:>15}",
        "rule", "acts", "caught", "p50 s", "p99 s", "max s", "kill p99", "fences", "kills", "healthy h", "kills a year"
    );
    for score in scores {
        let seconds = |ms: Option<u64>| ms.map_or("-".to_owned(), |ms| format!("{:.1}", ms as f64 / 1000.0));
        let _ = writeln!(
            text,
            "{:<27} {:<7} {:>9} {:>8} {:>8} {:>8} {:>9} {:>7} {:>7} {:>9.3} {:>15}",
            score.rule,
            acts(&score.rule),
            format!("{}/{}", score.caught, score.hangs),
            seconds(score.latency_quantile_ms(500)),
            seconds(score.latency_quantile_ms(990)),
            seconds(score.latency_max_ms()),
            seconds(score.evict_quantile_ms(990)),
            score.false_fences,
            score.false_evictions,
            score.benign_hours,
            score.eviction_rate().map_or("-".to_owned(), rate),
        );
    }
    text.push_str(
        "fences, kills: healthy stretches with a false alarm, with a false call for a restart. kills a year: of one engine; ≤ is the \
         rule of three\n(none seen: 95 % bound). p99 counts misses: a rule that misses a hang has none.\n",
    );
}

/// The worst that a rule does, in a word.
pub fn acts(name: &str) -> &'static str {
    match rivals::by_name(name) {
        Some(rival) => rival.acts().name(),
        None if name == OUR_NAME => "evicts",
        None => "",
    }
}

/// `≤ 12,345` or `12,345`.
pub fn rate(rate: Rate) -> String {
    let bound = if rate.is_bound { "≤ " } else { "" };
    format!("{bound}{}", grouped(rate.per_year))
}

/// Three digits a group; small numbers keep two figures.
fn grouped(value: f64) -> String {
    if value < 10.0 {
        return format!("{value:.2}");
    }
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped() {
        assert_eq!(
            [grouped(0.5), grouped(12.0), grouped(1234.4), grouped(1234567.0)],
            ["0.50", "12", "1,234", "1,234,567"]
        );
        assert_eq!(rate(Rate { per_year: 1000.0, is_bound: true }), "≤ 1,000");
    }
}
