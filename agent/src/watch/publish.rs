//! What the detector says to others: status lines to the supervisor, the declaration to the reporter. On change, and now and then.

use crds::episode::Episode;
use vitals::verdict::{Outcome, Verdict};

use super::latest::Latest;
use crate::metrics::Metrics;
use crate::report::{Declaration, Heard, Reporter};
use crate::status::{Aside, StatusDoc, VerdictDoc, ready_reason};

/// Without news a status is repeated after this.
const REPEAT_MS: u64 = 500;

/// One tick's news.
#[derive(Debug)]
pub struct News<'a> {
    pub now_ms: u64,
    pub outcome: &'a Outcome,
    pub ready: bool,
    pub fenced: bool,
    pub phase: Option<String>,
    pub incidents: &'a [Episode],
    /// Why the replica is kept out of traffic although the engine may be well.
    pub aside: Aside,
    /// The drain whose gate is shut.
    pub draining: Option<u64>,
    /// A person's fence, in words.
    pub by_hand: Option<&'a str>,
    pub in_flight: Option<u32>,
}

/// Remembers what was said.
#[derive(Debug)]
pub struct Publisher {
    stdout: Latest,
    reporter: Option<Reporter>,
    said: Option<(u64, StatusDoc)>,
    declared: Option<Declaration>,
}

impl Publisher {
    /// `reporter` is `None` outside Kubernetes.
    pub fn new(stdout: Latest, reporter: Option<Reporter>) -> Self {
        Self { stdout, reporter, said: None, declared: None }
    }

    /// What the API said last; nothing outside Kubernetes.
    pub fn heard(&self) -> Heard {
        self.reporter.as_ref().map(Reporter::heard).unwrap_or_default()
    }

    /// Says what is new.
    pub fn publish(&mut self, news: &News<'_>, metrics: &Metrics) {
        if let Some(reporter) = &self.reporter {
            metrics.report_failures.set(i64::try_from(reporter.heard().failures).unwrap_or(i64::MAX));
        }
        self.declare(news);
        let doc = StatusDoc {
            ready: news.ready,
            reason: ready_reason(news.outcome, news.aside, news.by_hand),
            verdict: VerdictDoc::of(news.outcome, news.fenced, news.phase.clone(), news.now_ms),
            incidents: news.incidents.to_vec(),
            metrics: String::new(),
            draining: news.draining,
            in_flight: news.in_flight,
        };
        let due = self
            .said
            .as_ref()
            .is_none_or(|(at, said)| news.now_ms.saturating_sub(*at) >= REPEAT_MS || differs(said, &doc));
        if !due {
            return;
        }
        let with_metrics = StatusDoc { metrics: metrics.text(), ..doc.clone() };
        if let Ok(mut line) = serde_json::to_vec(&with_metrics) {
            line.push(b'\n');
            self.stdout.put(line);
            self.said = Some((news.now_ms, doc));
        }
    }

    /// Numbers in reasons grow with every tick: only a change of substance is declared, with the words of that moment.
    fn declare(&mut self, news: &News<'_>) {
        let Some(reporter) = &self.reporter else { return };
        let reason = ready_reason(news.outcome, news.aside, news.by_hand);
        let declaration = Declaration {
            progressing: progressing(&news.outcome.verdict, news.aside).to_owned(),
            reason: reason.reason,
            message: reason.message,
            episode: news.incidents.first().cloned(),
        };
        if self.declared.as_ref().is_none_or(|declared| substance(declared) != substance(&declaration)) {
            reporter.declare(declaration.clone());
            self.declared = Some(declaration);
        }
    }
}

/// Would a probe or a person notice the difference?
fn differs(said: &StatusDoc, now: &StatusDoc) -> bool {
    let empty = |doc: &StatusDoc| doc.in_flight == Some(0);
    let draining = said.draining != now.draining || now.draining.is_some() && empty(said) != empty(now);
    said.ready != now.ready
        || draining
        || said.reason.reason != now.reason.reason
        || !said.verdict.same_but_time(&now.verdict)
        || marks(&said.incidents) != marks(&now.incidents)
}

type Marks<'a> = Vec<(&'a str, &'a str, [bool; 6])>;

fn marks(incidents: &[Episode]) -> Marks<'_> {
    let mark = |e: &Episode| {
        let times = [&e.fenced_at, &e.confirmed_at, &e.evidence_at, &e.granted_at, &e.killed_at, &e.serving_at];
        times.map(Option::is_some)
    };
    // Only the newest can change.
    incidents.iter().take(1).map(|episode| (episode.id.as_str(), episode.stage.as_str(), mark(episode))).collect()
}

fn substance(declaration: &Declaration) -> (&str, &str, Marks<'_>) {
    (&declaration.progressing, &declaration.reason, marks(declaration.episode.as_slice()))
}

/// The condition's status: `True` progresses, `False` does not, `Unknown` cannot tell or is not meant to.
fn progressing(verdict: &Verdict, aside: Aside) -> &'static str {
    match verdict {
        Verdict::Idle | Verdict::Progressing | Verdict::Slow if aside == Aside::Unproven => "Unknown",
        Verdict::Idle | Verdict::Progressing | Verdict::Slow => "True",
        Verdict::Suspect(_) | Verdict::Stalled(_) | Verdict::Dead => "False",
        Verdict::Starting | Verdict::Sleeping | Verdict::Draining | Verdict::Unknown => "Unknown",
    }
}
