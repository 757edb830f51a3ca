//! The demo's facts as values: what was measured, what is wrong with it, how it is printed.

use serde::Serialize;

use crate::clients::Requests;

/// Head of the closing table; [`table_row`] has the same columns.
pub const TABLE_HEAD: &str =
    "scenario     result   class             fenced after   restarted     serving  completed  refused  lost";

#[derive(Debug, Default, Serialize)]
pub struct Report {
    pub passed: bool,
    pub scenarios: Vec<ScenarioReport>,
}

/// One scenario's facts. Times are milliseconds after the injection, measured on one wall clock.
#[derive(Debug, Default, Serialize)]
pub struct ScenarioReport {
    pub name: String,
    pub story: String,
    pub engine: String,
    pub fault: Option<String>,
    pub verdict: Option<String>,
    pub class: Option<String>,
    pub reasons: Vec<String>,
    /// HTTP statuses that the engine's own /health gave between the injection and the kill, with their counts.
    pub engine_health_while_frozen: Vec<(u16, u64)>,
    pub fenced_after_ms: Option<f64>,
    pub evidence_after_ms: Option<f64>,
    pub killed_after_ms: Option<f64>,
    pub serving_after_ms: Option<f64>,
    pub bundle: Option<String>,
    pub requests: Requests,
    /// Of these: by the clients that arrived while the engine hung.
    pub newcomers: Requests,
    /// How long the engine ran under load, and how many alarms there were (healthy scenario).
    pub observed_s: f64,
    pub alarms: u64,
    pub timeline: Vec<Moment>,
    /// What is not as it should be; empty means passed.
    pub problems: Vec<String>,
}

/// One line of the timeline.
#[derive(Debug, Clone, Serialize)]
pub struct Moment {
    pub at_ms: f64,
    pub what: String,
}

impl ScenarioReport {
    pub fn moment(&mut self, at_ms: f64, what: impl Into<String>) {
        self.timeline.push(Moment { at_ms, what: what.into() });
    }
}

/// The timeline that a stranger understands.
pub fn print(facts: &ScenarioReport) {
    println!("── {} ── {}", facts.name, facts.story);
    println!("   engine: {}", facts.engine);
    for moment in &facts.timeline {
        println!("   {:>9.2} s  {}", moment.at_ms / 1000.0, moment.what);
    }
    for reason in &facts.reasons {
        println!("              because: {reason}");
    }
    let Requests { completed, refused, lost, tokens } = facts.requests;
    println!("   requests: {completed} completed, {refused} refused with Retry-After, {lost} lost; {tokens} tokens");
    if let Some(bundle) = &facts.bundle {
        println!("   evidence: truebeat bundle {bundle}");
    }
    for problem in &facts.problems {
        println!("   PROBLEM: {problem}");
    }
    println!();
}

/// One line of the closing table.
pub fn table_row(facts: &ScenarioReport) -> String {
    let seconds = |ms: Option<f64>| ms.map_or_else(|| "-".to_owned(), |ms| format!("{:.2} s", ms / 1000.0));
    let result = if facts.problems.is_empty() { "passed" } else { "FAILED" };
    let Requests { completed, refused, lost, .. } = facts.requests;
    format!(
        "{:<13}{result:<9}{:<16}{:>14}{:>12}{:>12}{completed:>11}{refused:>9}{lost:>6}",
        facts.name,
        facts.class.as_deref().unwrap_or("-"),
        seconds(facts.fenced_after_ms),
        seconds(facts.killed_after_ms),
        seconds(facts.serving_after_ms),
    )
}
