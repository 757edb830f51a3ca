//! One trace through many rules at once. Pure: the trace is parsed once, every rule sees the same observations.

use crate::observation::{Ms, Observation, PageObs, Signal};
use crate::policy::Policy;
use crate::rivals::judge::{Kind, Span};
use crate::rivals::{Alarm, Rule};

use super::sample::Reader;
use super::{Change, ReplayError, Timeline, TraceReplay};

/// A trace as the rules see it: each sample's moment and what it says.
#[derive(Debug, Clone, PartialEq)]
pub struct History {
    pub trace: String,
    pub samples: Vec<(Ms, Observation)>,
}

impl History {
    /// Reads a whole trace.
    ///
    /// # Errors
    /// A line that is no sample, a delta without its base, or a trace without a sample.
    pub fn read<'a>(trace: &str, lines: impl IntoIterator<Item = &'a str>) -> Result<Self, ReplayError> {
        let mut reader = Reader::default();
        let mut samples = Vec::new();
        for (i, line) in lines.into_iter().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let line_number = i + 1;
            let value: serde_json::Value =
                serde_json::from_str(line).map_err(|source| ReplayError::Json { line: line_number, source })?;
            samples.push(reader.read(line_number, &value)?);
        }
        if samples.is_empty() {
            return Err(ReplayError::Empty);
        }
        Ok(Self { trace: trace.to_owned(), samples })
    }

    /// Our detector's timeline.
    ///
    /// # Errors
    /// Never for a history that was read: it has a sample.
    pub fn ours(&self, policy: &Policy) -> Result<Timeline, ReplayError> {
        let mut replay = TraceReplay::new(&self.trace, policy.clone());
        for (now_ms, obs) in &self.samples {
            replay.step(*now_ms, obs);
        }
        replay.finish()
    }

    /// A rival's timeline. Its words are those of V1: `Progressing` when it is quiet, `Suspect` when it warns or fences, `Stalled`
    /// when it would have the engine destroyed; it knows no classes.
    pub fn rival(&self, rule: &mut dyn Rule) -> Timeline {
        let mut timeline = Vec::new();
        let mut last: Option<Alarm> = None;
        for (now_ms, obs) in &self.samples {
            let alarm = rule.step(*now_ms, obs);
            if last != Some(alarm) {
                last = Some(alarm);
                let reasons = if alarm == Alarm::Quiet { Vec::new() } else { vec![rule.about().to_owned()] };
                timeline.push(Change {
                    t: *now_ms as f64 / 1000.0,
                    verdict: alarm.verdict().to_owned(),
                    class: None,
                    reasons,
                });
            }
        }
        Timeline { trace: self.trace.clone(), rule: rule.name().to_owned(), timeline }
    }

    /// The same history with its last hang carried on: from the end of that hang the last sample in it is repeated once a second,
    /// as fresh as it was, until the hang has lasted `hang_s`; what came after is cut off. Recordings of hangs end after a minute
    /// or two, and most rules wait for longer. A hang's own signals stand still, which is what makes this a fair extension; CPU
    /// time goes on at the rate of its last ten samples.
    ///
    /// `None` where the truth has no hang, or one that is as long already.
    pub fn with_hang_held(&self, truth: &[Span], hang_s: f64) -> Option<(Self, Vec<Span>)> {
        let at = truth.iter().rposition(|span| span.kind() == Kind::Hang)?;
        let hang = truth.get(at).filter(|hang| hang.to - hang.from < hang_s)?;
        let (from_ms, to_ms) = ((hang.from * 1000.0) as Ms, (hang.to * 1000.0) as Ms);
        // the last second of a hang may hold the signal that ended it
        let end = self.samples.iter().rposition(|(now_ms, _)| *now_ms > from_ms && *now_ms + 1_000 <= to_ms)?;
        let mut samples = self.samples.get(..=end)?.to_vec();
        let (last_ms, last) = samples.last().cloned()?;
        let cpu_a_second = cpu_a_second(&samples);
        let total_s = hang.from + hang_s - last_ms as f64 / 1000.0;
        for second in 1..=(total_s.max(0.0) as Ms) {
            let cpu_ms = cpu_a_second.saturating_mul(second);
            samples.push((last_ms + second * 1_000, later(&last, last_ms, second * 1_000, cpu_ms)));
        }
        let mut truth = truth.get(..=at)?.to_vec();
        if let Some(hang) = truth.last_mut() {
            hang.to = hang.from + hang_s;
        }
        Some((Self { trace: format!("{}+held", self.trace), samples }, truth))
    }
}

/// Milliseconds of CPU time of the engine's processes in each second, over the last ten samples.
fn cpu_a_second(samples: &[(Ms, Observation)]) -> u64 {
    let tail = samples.get(samples.len().saturating_sub(10)..).unwrap_or_default();
    let cpu = |sample: &(Ms, Observation)| sample.1.proc.value.as_ref().map(|proc| (sample.0, proc.cpu_ms));
    match (tail.first().and_then(cpu), tail.last().and_then(cpu)) {
        (Some((from_ms, before)), Some((to_ms, after))) if to_ms > from_ms => {
            after.saturating_sub(before).saturating_mul(1_000) / (to_ms - from_ms)
        }
        _ => 0,
    }
}

/// A source whose last word is older than this had fallen silent, and stays so.
const SILENT_MS: Ms = 3_000;

/// The observation of `now_ms`, `by_ms` later: nothing has happened but that every source which spoke was read again.
fn later(obs: &Observation, now_ms: Ms, by_ms: Ms, cpu_ms: u64) -> Observation {
    fn again<T>(signal: &mut Signal<T>, now_ms: Ms, by_ms: Ms) {
        if now_ms.saturating_sub(signal.at_ms) <= SILENT_MS {
            signal.at_ms = signal.at_ms.saturating_add(by_ms);
        }
    }
    let mut obs = obs.clone();
    obs.log.clear();
    obs.agent_gap_ms = 0;
    again(&mut obs.proc, now_ms, by_ms);
    again(&mut obs.pages, now_ms, by_ms);
    again(&mut obs.gate, now_ms, by_ms);
    again(&mut obs.metrics, now_ms, by_ms);
    again(&mut obs.gpus, now_ms, by_ms);
    again(&mut obs.frontend, now_ms, by_ms);
    if let Some(proc) = &mut obs.proc.value {
        proc.cpu_ms = proc.cpu_ms.saturating_add(cpu_ms);
    }
    let republish = |page: &mut PageObs| page.published_ms = page.published_ms.saturating_add(by_ms);
    obs.pages.value.iter_mut().flatten().for_each(republish);
    obs
}
