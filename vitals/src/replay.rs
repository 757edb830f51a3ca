//! A recorded trace through the detector, in virtual time. Pure: the caller opens and unpacks files.
//!
//! Two forms of sample are read: our own (`gate`, `beat`, `gpu`, …: the observation's own types) and the recordings of a real
//! vLLM (`client` is what a gate would have counted, `hb` a prototype's page, `proc` per role). See [`sample`].

pub mod rules;
pub mod sample;

use serde::{Deserialize, Serialize};

use crate::detector::{Detector, Policy};
use crate::observation::{Ms, Observation};
use crate::verdict::{Outcome, Verdict};
use sample::Reader;

/// What keeps a trace from being replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    #[error("line {line} of the trace is not a JSON object: {source}; a trace is one JSON object a line")]
    Json { line: usize, source: serde_json::Error },
    #[error("line {line} of the trace has no number `t` (seconds since the trace began)")]
    NoTime { line: usize },
    #[error(
        "line {line} of the trace changes line {index} of a metrics page that has {lines} lines; the delta needs the full page before it"
    )]
    Delta { line: usize, index: usize, lines: usize },
    #[error("the trace holds no sample")]
    Empty,
}

/// The verdicts of one rule over one trace: one entry for each change.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    pub trace: String,
    pub rule: String,
    pub timeline: Vec<Change>,
}

/// From `t` (seconds of the trace) on, this was the verdict.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Change {
    pub t: f64,
    pub verdict: String,
    pub class: Option<String>,
    pub reasons: Vec<String>,
}

/// Replays a whole trace.
///
/// # Errors
/// A line that is no sample, a delta without its base, or a trace without a sample.
pub fn replay<'a>(
    trace: &str,
    lines: impl IntoIterator<Item = &'a str>,
    policy: &Policy,
) -> Result<Timeline, ReplayError> {
    let mut replay = TraceReplay::new(trace, policy.clone());
    for line in lines {
        replay.push(line)?;
    }
    replay.finish()
}

/// A replay that is fed line by line.
#[derive(Debug)]
pub struct TraceReplay {
    timeline: Timeline,
    detector: Option<Detector>,
    policy: Policy,
    reader: Reader,
    last: Option<Verdict>,
    line: usize,
}

impl TraceReplay {
    pub fn new(trace: &str, policy: Policy) -> Self {
        let timeline = Timeline { trace: trace.to_owned(), rule: "truebeat".to_owned(), timeline: Vec::new() };
        Self { timeline, detector: None, policy, reader: Reader::default(), last: None, line: 0 }
    }

    /// Takes one line; blank lines are nothing. Returns the outcome of the tick.
    ///
    /// # Errors
    /// The line is no sample.
    pub fn push(&mut self, line: &str) -> Result<Option<Outcome>, ReplayError> {
        self.line += 1;
        if line.trim().is_empty() {
            return Ok(None);
        }
        let value: serde_json::Value =
            serde_json::from_str(line).map_err(|source| ReplayError::Json { line: self.line, source })?;
        let (now_ms, obs) = self.reader.read(self.line, &value)?;
        let outcome = self.step(now_ms, &obs);
        Ok(Some(outcome))
    }

    /// The verdicts so far.
    ///
    /// # Errors
    /// There was no sample at all.
    pub fn finish(self) -> Result<Timeline, ReplayError> {
        if self.timeline.timeline.is_empty() { Err(ReplayError::Empty) } else { Ok(self.timeline) }
    }

    /// Takes one observation that was read elsewhere.
    pub(crate) fn step(&mut self, now_ms: Ms, obs: &Observation) -> Outcome {
        let policy = &self.policy;
        let detector = self.detector.get_or_insert_with(|| Detector::new(policy.clone(), now_ms));
        let outcome = detector.step(now_ms, obs);
        if self.last.as_ref() != Some(&outcome.verdict) {
            self.last = Some(outcome.verdict.clone());
            self.timeline.timeline.push(Change {
                t: now_ms as f64 / 1000.0,
                verdict: outcome.verdict.name().to_owned(),
                class: outcome.verdict.class().map(class_text),
                reasons: outcome.reasons.iter().map(|reason| format!("{}: {}", reason.source, reason.text)).collect(),
            });
        }
        outcome
    }
}

/// `RankSilent[1,3]` with its ranks, others by name.
fn class_text(class: &crate::verdict::StallClass) -> String {
    match class {
        crate::verdict::StallClass::RankSilent { ranks } if !ranks.is_empty() => {
            let ranks: Vec<String> = ranks.iter().map(u32::to_string).collect();
            format!("{}[{}]", class.name(), ranks.join(","))
        }
        _ => class.name().to_owned(),
    }
}
