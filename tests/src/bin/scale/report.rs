//! Figures with their spread and their goals, as lines of text. Pure.

use std::fmt::Write;
use std::time::Duration;

/// What was measured, in the order in which it came.
#[derive(Debug, Default)]
pub struct Report(Vec<Line>);

#[derive(Debug)]
struct Line {
    name: String,
    unit: &'static str,
    goal: &'static str,
    values: Vec<f64>,
}

impl Report {
    /// One more value of `name`; the line shows the median of all, and the least and the most where there are several.
    pub fn add(&mut self, name: &str, value: f64, unit: &'static str, goal: &'static str) {
        eprintln!("scale: {name} {value:.1} {unit}");
        match self.0.iter_mut().find(|line| line.name == name) {
            Some(line) => line.values.push(value),
            None => self.0.push(Line { name: name.to_owned(), unit, goal, values: vec![value] }),
        }
    }

    /// Median, 99th of a hundred, and the longest of `times`, in milliseconds; `goal` is that of the 99th.
    pub fn add_times(&mut self, name: &str, times: &mut [Duration], goal: &'static str) {
        times.sort();
        let ms = |rank: usize| times.get(rank).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3);
        let last = times.len().saturating_sub(1);
        for (word, rank, goal) in [("p50", last / 2, "-"), ("p99", last * 99 / 100, goal), ("max", last, "-")] {
            self.add(&format!("{name}_{word}"), ms(rank), "ms", goal);
        }
    }

    /// The lines.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for Line { name, unit, goal, values } in &self.0 {
            let mut sorted = values.clone();
            sorted.sort_by(f64::total_cmp);
            let (Some(least), Some(most)) = (sorted.first(), sorted.last()) else { continue };
            let median = sorted.get(sorted.len() / 2).unwrap_or(most);
            let spread = if sorted.len() > 1 {
                format!("  [{least:.1} … {most:.1}, n={}]", sorted.len())
            } else {
                String::new()
            };
            let _ = writeln!(text, "{name} {median:.1} {unit} {goal}{spread}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_name_value_unit_goal_and_the_spread_where_there_is_one() {
        let mut report = Report::default();
        report.add("writes", 0.0, "count", "0");
        for value in [3.0, 1.0, 2.0] {
            report.add("rate", value, "1/s", ">=200");
        }
        assert_eq!(report.text(), "writes 0.0 count 0\nrate 2.0 1/s >=200  [1.0 … 3.0, n=3]\n");
    }

    #[test]
    fn times_become_three_lines() {
        let mut report = Report::default();
        let mut times: Vec<Duration> = (1..=100).rev().map(Duration::from_millis).collect();
        report.add_times("t", &mut times, "<=1000");
        assert_eq!(report.text(), "t_p50 50.0 ms -\nt_p99 99.0 ms <=1000\nt_max 100.0 ms -\n");
    }
}
