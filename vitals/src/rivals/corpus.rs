//! Everybody's rule on each kind of hang and on each healthy look-alike, kind by kind, as a table. Pure formatting.

use std::fmt::Write;

use super::score::RuleScore;
use crate::observation::Ms;

/// What all rules made of the histories of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct KindRow<'a> {
    pub name: &'a str,
    /// In words, what happens.
    pub what: &'a str,
    /// Something hangs in it; else every alarm is false.
    pub is_hang: bool,
    pub histories: u64,
    /// One for each rule, always in the same order.
    pub scores: &'a [RuleScore],
}

/// What the cells mean.
const LEGEND: &str = "\
hist., hours: histories, and hours of health in them. In some histories of a hang nobody comes any more for whom it would be one.
hangs: how many of them the rule noticed at all, and after how many seconds it noticed half of them; * it would also have had each of those
restarted; - none. Hangs that no signal of that engine shows are among them (no gate, and gauges that stand at zero): nobody can notice those.
look-alikes: in how many stretches of health the rule raised an alarm, and after the / in how many it would have destroyed the engine; . none\n";

/// The table: rules are numbered, and `about` says what each of them is.
pub fn render(rows: &[KindRow<'_>], about: &[(&str, &str)]) -> String {
    let mut out = String::new();
    for (i, (rule, about)) in about.iter().enumerate() {
        let _ = writeln!(out, "{:>4}  {rule:<27} {about}", i + 1);
    }
    let _ = writeln!(out, "\n{LEGEND}");
    for (is_hang, title) in [(true, "hangs"), (false, "look-alikes")] {
        let _ = write!(out, "{title:<12} {:>6} {:>7}", "hist.", "hours");
        (1..=about.len()).for_each(|i| _ = write!(out, " {i:>12}"));
        out.push('\n');
        for row in rows.iter().filter(|row| row.is_hang == is_hang) {
            let _ = writeln!(out, "{}", line(row));
        }
        out.push('\n');
    }
    for row in rows {
        let _ = writeln!(out, "{:<4} {}", row.name, row.what);
    }
    out
}

fn line(row: &KindRow<'_>) -> String {
    let hours = row.scores.first().map_or(0.0, |score| score.benign_hours);
    let mut out = format!("{:<12} {:>6} {hours:>7.1}", row.name, row.histories);
    for score in row.scores {
        let cell = if row.is_hang { caught(score) } else { alarms(score) };
        let _ = write!(out, " {cell:>12}");
    }
    out
}

fn caught(score: &RuleScore) -> String {
    if score.caught == 0 {
        return format!("0/{} -", score.hangs);
    }
    let restarts = if score.evict_latency_ms.len() as u64 >= score.caught { "*" } else { "" };
    format!("{}/{} {:.1}{restarts}", score.caught, score.hangs, median_ms(&score.latency_ms) as f64 / 1e3)
}

fn alarms(score: &RuleScore) -> String {
    match (score.false_fences, score.false_evictions) {
        (0, 0) => ".".to_owned(),
        (fences, 0) => fences.to_string(),
        (fences, evictions) => format!("{fences}/{evictions}"),
    }
}

/// Of those that were caught; the lower of the two in the middle.
fn median_ms(latencies: &[Ms]) -> Ms {
    let mut sorted = latencies.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_for_each_kind_and_a_column_for_each_rule() {
        let quick = RuleScore {
            hangs: 3,
            caught: 3,
            latency_ms: vec![300, 2_000, 1_000],
            evict_latency_ms: vec![1_300, 2_000, 3_000],
            benign_hours: 0.25,
            ..RuleScore::new("quick")
        };
        let blind = RuleScore { hangs: 3, caught: 1, latency_ms: vec![30_000], ..RuleScore::new("blind") };
        let deaf = RuleScore { hangs: 3, ..RuleScore::new("deaf") };
        let rash = RuleScore { false_fences: 5, false_evictions: 2, benign_hours: 7.0, ..RuleScore::new("rash") };
        let shy = RuleScore { false_fences: 1, benign_hours: 7.0, ..RuleScore::new("shy") };
        let calm = RuleScore { benign_hours: 7.0, ..RuleScore::new("calm") };
        let row = |name, is_hang, scores| KindRow { name, what: "what happens", is_hang, histories: 3, scores };
        let (hangs, healthy) = ([quick, blind, deaf], [calm, shy, rash]);
        let about = [("quick", "ours"), ("blind", "theirs"), ("deaf", "another")];
        insta::assert_snapshot!(render(&[row("H1", true, &hangs), row("B1", false, &healthy)], &about));
    }
}
