//! A rule's timeline laid over what really happened: latency of every hang, alarms in every stretch of health.
//!
//! Pure. What happened comes from a `labels.json` beside the trace: `truth` is a list of `{from, to, state}` in the trace's seconds.

use serde::{Deserialize, Serialize};

use super::score::RuleScore;
use crate::observation::Ms;
use crate::replay::Timeline;

/// One stretch of the truth.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Span {
    pub from: f64,
    pub to: f64,
    pub state: String,
}

/// The part of a `labels.json` that is read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Labels {
    pub truth: Vec<Span>,
}

/// What a state means for the account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Work owed that will not be done: it has to be caught.
    Hang,
    /// The process is gone: to be noticed, but no hang, and not counted among them.
    Dead,
    /// Nothing is wrong: every alarm that begins here is false.
    Benign,
    /// A hang that nobody can feel, or the way back: neither an alarm nor silence is wrong.
    Neutral,
}

impl Span {
    /// By the first word of the state; one that is not known is neutral.
    pub fn kind(&self) -> Kind {
        match self.state.as_str() {
            "hang" | "hang_api" => Kind::Hang,
            "dead" => Kind::Dead,
            "not_started" | "startup" | "idle" | "progress" | "slow_step" | "paused" | "asleep" => Kind::Benign,
            _ => Kind::Neutral,
        }
    }
}

/// What a rule did in one stretch. Times are seconds since the stretch began.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Judged {
    pub span: Span,
    #[serde(skip)]
    pub kind: Kind,
    /// Its first alarm, of either sort, that began here; 0 where one that began before still stood in a hang.
    pub alarm_s: Option<f64>,
    /// Its first call for a restart.
    pub evict_s: Option<f64>,
}

/// Seconds of a hang's beginning that may lie before the label: samples and labels are taken by two clocks.
const SLACK_S: f64 = 1.0;

/// Judges a timeline over the truth, stretch by stretch.
pub fn judge(timeline: &Timeline, truth: &[Span]) -> Vec<Judged> {
    let alarms = standing(timeline, 1);
    let evictions = standing(timeline, 2);
    let one = |(i, span): (usize, &Span)| {
        let kind = span.kind();
        let before_hang = truth.get(i + 1).is_some_and(|next| matches!(next.kind(), Kind::Hang | Kind::Dead));
        let found = |list: &[(f64, f64)]| match kind {
            Kind::Hang | Kind::Dead => caught(list, span),
            Kind::Benign | Kind::Neutral => began(list, span, if before_hang { SLACK_S } else { 0.0 }),
        };
        Judged { span: span.clone(), kind, alarm_s: found(&alarms), evict_s: found(&evictions) }
    };
    truth.iter().enumerate().map(one).collect()
}

/// Adds what was judged to the rule's account.
pub fn account(score: &mut RuleScore, judged: &[Judged]) {
    for one in judged {
        let ms = |seconds: f64| (seconds.max(0.0) * 1000.0).round() as Ms;
        match one.kind {
            Kind::Hang => {
                score.hangs += 1;
                score.caught += u64::from(one.alarm_s.is_some());
                score.latency_ms.extend(one.alarm_s.map(ms));
                score.evict_latency_ms.extend(one.evict_s.map(ms));
            }
            Kind::Benign => {
                score.benign_hours += (one.span.to - one.span.from).max(0.0) / 3_600.0;
                score.false_fences += u64::from(one.alarm_s.is_some());
                score.false_evictions += u64::from(one.evict_s.is_some());
            }
            Kind::Dead | Kind::Neutral => {}
        }
    }
}

/// Stretches in which an alarm of at least this height stood: from, to.
fn standing(timeline: &Timeline, height_min: u8) -> Vec<(f64, f64)> {
    let mut list: Vec<(f64, f64)> = Vec::new();
    let mut open = None;
    for change in &timeline.timeline {
        match (open, height(&change.verdict) >= height_min) {
            (None, true) => open = Some(change.t),
            (Some(from), false) => {
                list.push((from, change.t));
                open = None;
            }
            _ => {}
        }
    }
    list.extend(open.map(|from| (from, f64::INFINITY)));
    list
}

/// 1: fenced or warned. 2: to be destroyed.
fn height(verdict: &str) -> u8 {
    match verdict {
        "Suspect" => 1,
        "Stalled" | "Dead" => 2,
        _ => 0,
    }
}

/// Seconds into the hang at which an alarm stood first. One that had begun before, or a sample early, is a catch at once.
fn caught(list: &[(f64, f64)], span: &Span) -> Option<f64> {
    let (from, _) = list.iter().find(|(from, to)| *from < span.to && *to > span.from + SLACK_S)?;
    Some((from - span.from).max(0.0))
}

/// Seconds into the stretch at which an alarm began that did not stand before.
fn began(list: &[(f64, f64)], span: &Span, slack_s: f64) -> Option<f64> {
    let (from, _) = list.iter().find(|(from, _)| *from >= span.from && *from < span.to - slack_s)?;
    Some(from - span.from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::Change;

    fn timeline(changes: &[(f64, &str)]) -> Timeline {
        let change = |(t, verdict): &(f64, &str)| Change {
            t: *t,
            verdict: (*verdict).to_owned(),
            class: None,
            reasons: Vec::new(),
        };
        Timeline { trace: "t".into(), rule: "r".into(), timeline: changes.iter().map(change).collect() }
    }

    fn truth(spans: &[(f64, f64, &str)]) -> Vec<Span> {
        spans.iter().map(|(from, to, state)| Span { from: *from, to: *to, state: (*state).to_owned() }).collect()
    }

    #[test]
    fn latency_counts_from_the_hang_and_health_keeps_its_own_alarms() {
        let line = timeline(&[
            (0.0, "Progressing"),
            (4.0, "Suspect"),
            (5.0, "Progressing"),
            (12.0, "Suspect"),
            (15.0, "Stalled"),
            (31.0, "Progressing"),
        ]);
        let truth = truth(&[
            (0.0, 10.0, "progress"),
            (10.0, 30.0, "hang"),
            (30.0, 33.0, "recovering"),
            (33.0, 3_633.0, "idle"),
        ]);
        let judged = judge(&line, &truth);
        assert_eq!((judged[0].alarm_s, judged[0].evict_s), (Some(4.0), None));
        assert_eq!((judged[1].alarm_s, judged[1].evict_s), (Some(2.0), Some(5.0)));
        assert_eq!((judged[3].alarm_s, judged[3].evict_s), (None, None));
        let mut score = RuleScore::new("r");
        account(&mut score, &judged);
        assert_eq!((score.hangs, score.caught, score.false_fences, score.false_evictions), (1, 1, 1, 0));
        assert_eq!((score.latency_ms.as_slice(), score.evict_latency_ms.as_slice()), (&[2_000][..], &[5_000][..]));
        assert!((score.benign_hours - 3_610.0 / 3_600.0).abs() < 1e-9);
    }

    #[test]
    fn a_hang_that_ends_first_is_a_miss_and_an_alarm_that_stood_is_a_catch_at_once() {
        let late = timeline(&[(0.0, "Progressing"), (25.0, "Stalled")]);
        let spans = truth(&[(0.0, 10.0, "progress"), (10.0, 20.0, "hang"), (20.0, 30.0, "recovering")]);
        let judged = judge(&late, &spans);
        assert_eq!((judged[1].alarm_s, judged[1].evict_s), (None, None));
        let early = timeline(&[(0.0, "Progressing"), (2.0, "Suspect")]);
        let judged = judge(&early, &spans);
        assert_eq!((judged[0].alarm_s, judged[1].alarm_s), (Some(2.0), Some(0.0)));
    }
}
