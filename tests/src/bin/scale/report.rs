//! Figures with their spread and their goals, as lines of text, and which goals were missed. Pure.

use std::fmt::{self, Write};
use std::time::Duration;

/// What was measured, in the order in which it came.
#[derive(Debug, Default)]
pub struct Report(Vec<Line>);

/// What a figure shall be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Goal {
    /// It is told, and nothing is asked of it.
    None,
    AtMost(f64),
    AtLeast(f64),
}

impl Goal {
    /// Is `value` what was asked for? What could not be measured is no number, and is not.
    fn met_by(self, value: f64) -> bool {
        match self {
            Self::None => true,
            Self::AtMost(most) => value <= most,
            Self::AtLeast(least) => value >= least,
        }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => write!(f, "-"),
            Self::AtMost(most) => write!(f, "<={most}"),
            Self::AtLeast(least) => write!(f, ">={least}"),
        }
    }
}

#[derive(Debug)]
struct Line {
    name: String,
    unit: &'static str,
    goal: Goal,
    values: Vec<f64>,
}

impl Line {
    /// The values in their order.
    fn sorted(&self) -> Vec<f64> {
        let mut sorted = self.values.clone();
        sorted.sort_by(f64::total_cmp);
        sorted
    }

    /// The figure that the line tells, and that its goal is asked of.
    fn median(&self) -> f64 {
        let sorted = self.sorted();
        sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

impl Report {
    /// One more value of `name`; the line shows the median of all, and the least and the most where there are several.
    pub fn add(&mut self, name: &str, value: f64, unit: &'static str, goal: Goal) {
        eprintln!("scale: {name} {value:.1} {unit}");
        match self.0.iter_mut().find(|line| line.name == name) {
            Some(line) => line.values.push(value),
            None => self.0.push(Line { name: name.to_owned(), unit, goal, values: vec![value] }),
        }
    }

    /// Median, 99th of a hundred, and the longest of `times`, in milliseconds; `goal` is that of the 99th.
    pub fn add_times(&mut self, name: &str, times: &mut [Duration], goal: Goal) {
        times.sort();
        let ms = |rank: usize| times.get(rank).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3);
        let last = times.len().saturating_sub(1);
        for (word, rank, goal) in
            [("p50", last / 2, Goal::None), ("p99", last * 99 / 100, goal), ("max", last, Goal::None)]
        {
            self.add(&format!("{name}_{word}"), ms(rank), "ms", goal);
        }
    }

    /// The lines.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for line in &self.0 {
            let sorted = line.sorted();
            let (Some(least), Some(most)) = (sorted.first(), sorted.last()) else { continue };
            let spread = if sorted.len() > 1 {
                format!("  [{least:.1} … {most:.1}, n={}]", sorted.len())
            } else {
                String::new()
            };
            let Line { name, unit, goal, .. } = line;
            let _ = writeln!(text, "{name} {:.1} {unit} {goal}{spread}", line.median());
        }
        text
    }

    /// Of which figures the goal was missed, by name.
    pub fn missed(&self) -> Vec<&str> {
        let missed = self.0.iter().filter(|line| !line.goal.met_by(line.median()));
        missed.map(|line| line.name.as_str()).collect()
    }

    /// The same as one line, the last.
    pub fn closing(&self) -> String {
        let goals = self.0.iter().filter(|line| line.goal != Goal::None).count();
        let missed = self.missed();
        match missed.len() {
            0 => format!("met all {goals} goals"),
            count => format!("missed {count} of {goals} goals: {}", missed.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_name_value_unit_goal_and_the_spread_where_there_is_one() {
        let mut report = Report::default();
        report.add("writes", 0.0, "count", Goal::AtMost(0.0));
        for value in [3.0, 1.0, 2.0] {
            report.add("rate", value, "1/s", Goal::AtLeast(200.0));
        }
        assert_eq!(report.text(), "writes 0.0 count <=0\nrate 2.0 1/s >=200  [1.0 … 3.0, n=3]\n");
    }

    #[test]
    fn times_become_three_lines() {
        let mut report = Report::default();
        let mut times: Vec<Duration> = (1..=100).rev().map(Duration::from_millis).collect();
        report.add_times("t", &mut times, Goal::AtMost(1000.0));
        assert_eq!(report.text(), "t_p50 50.0 ms -\nt_p99 99.0 ms <=1000\nt_max 100.0 ms -\n");
        assert_eq!(report.closing(), "met all 1 goals");
    }

    #[test]
    fn a_goal_is_met_up_to_its_very_value_and_from_there_on() {
        let met = |goal: Goal| [1.9, 2.0, 2.1, f64::NAN].map(|value| goal.met_by(value));
        assert_eq!(met(Goal::AtMost(2.0)), [true, true, false, false]);
        assert_eq!(met(Goal::AtLeast(2.0)), [false, true, true, false]);
        assert_eq!(met(Goal::None), [true; 4]);
    }

    #[test]
    fn the_closing_line_names_the_goals_that_the_medians_missed() {
        let mut report = Report::default();
        report.add("writes", 1.0, "count", Goal::AtMost(0.0));
        report.add("memory", 91.0, "MiB", Goal::AtMost(256.0));
        report.add("rollout", 9e9, "s", Goal::None);
        for value in [100.0, 300.0, 150.0] {
            report.add("grants", value, "1/s", Goal::AtLeast(200.0));
        }
        report.add_times("nobody", &mut [], Goal::AtMost(1000.0));
        assert_eq!(report.missed(), ["writes", "grants", "nobody_p99"], "one good burst of three does not meet it");
        assert_eq!(report.closing(), "missed 3 of 4 goals: writes, grants, nobody_p99");
    }
}
